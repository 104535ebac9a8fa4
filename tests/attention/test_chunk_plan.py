"""Plans of chunks, pair by pair: each computes its own queries, and its fillers', against all keys so far, once."""

from __future__ import annotations

import numpy as np
import pytest
from equipoise.attention.chunk_plan import Home, chunk_plans
from equipoise.packing.shards import contiguous, zigzag


def pairs_of(tiles: np.ndarray, tokens: int) -> np.ndarray:
    """int[tokens, tokens], how often each (query, key) is computed."""
    times = np.zeros((tokens, tokens), int)
    for _, _, q0, q1, k0, k1, lo, hi in tiles.tolist():
        apart = np.arange(q0, q1)[:, None] - np.arange(k0, k1)
        times[q0:q1, k0:k1] += (lo <= apart) & (apart <= hi)
    return times


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_chunk_computes_its_own_queries_and_fillers_once(world):
    draw = np.random.default_rng(world)
    for _ in range(40):
        own = draw.integers(1, 9, draw.integers(1, 5)).tolist()
        fillers = [draw.integers(1, 4, draw.integers(0, 3)).tolist() for _ in own]
        packs = [np.cumsum([0, n, *more]) for n, more in zip(own, fillers, strict=True)]
        layout = [contiguous, zigzag][draw.integers(2)]
        shards = [layout(cu, world) for cu in packs]
        homes = [Home(cu_seqlens=s.cu_seqlens, offsets=s.offsets, intervals=s.segments) for s in shards]
        by_rank = [chunk_plans(homes, tuple(range(world)), rank) for rank in range(world)]
        for j, plans in enumerate(zip(*by_rank, strict=True)):
            stop, before = sum(own[: j + 1]), sum(map(sum, fillers[:j]))
            want = np.zeros((plans[0].tokens, plans[0].tokens), int)
            want[stop - own[j] : stop, :stop] = np.tri(own[j], stop, stop - own[j])
            at = stop + before
            for n in fillers[j]:
                want[at : at + n, at : at + n] = np.tri(n)
                at += n
            assert at == plans[0].tokens
            assert np.array_equal(sum(pairs_of(plan.tiles, plan.tokens) for plan in plans), want), (own, fillers, j)


def test_rows_at_home_grow_by_the_rows_of_each_chunk():
    shards = [zigzag([0, 8], 2), zigzag([0, 5], 2), zigzag([0, 1, 2], 2)]
    homes = [Home(cu_seqlens=s.cu_seqlens, offsets=s.offsets, intervals=s.segments) for s in shards]
    for rank in range(2):
        held = [plan.tokens_of(rank) for plan in chunk_plans(homes, (0, 1), rank)]
        assert held == np.cumsum([int(s.tokens()[rank]) for s in shards]).tolist()
