"""python -m pytest tests/attention/test_pair_proof.py"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from equipoise.attention.plan import KV, AttentionPlan
from equipoise.attention.ring import ring_plan
from equipoise.packing.mask_areas import blocks, chunk_keys
from equipoise.packing.mask_kinds import causal, sliding_window
from equipoise.packing.masks import Mask
from equipoise.packing.shards import contiguous
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, mask_of
from tests.packing.mask_draws import masks


def plan_of(mask: Mask, cp: int) -> AttentionPlan:
    """Any mask over ranks that hold equal runs: what is at home in stage 0, all the rest sent from home in stage 1."""
    total, tiles = int(mask.tokens.sum()), mask.tiles_of_pack()
    edges = np.arange(cp + 1) * total // cp
    block, pieces = blocks(tiles, edges)
    stage = (block[:, 0] != block[:, 1]).astype(np.int64)
    moves = []
    for rank in range(cp):
        for start, stop in chunk_keys(tiles, edges).of(rank).tolist():
            for home in range(cp):
                a, b = max(start, int(edges[home])), min(stop, int(edges[home + 1]))
                if home != rank and a < b:
                    moves.append((1, KV, home, rank, a, b))
    routes = np.array(moves, np.int64).reshape(-1, 6)
    held = np.flatnonzero(np.diff(edges))
    return AttentionPlan(
        ranks=tuple(range(cp)),
        tokens=total,
        home_offsets=np.searchsorted(held, np.arange(cp + 1)),
        home=np.stack([edges[held], edges[held + 1]], axis=1),
        tiles=np.column_stack([block[:, 0], stage, pieces]),
        moves=routes,
        returns=routes[:, [0, 1, 3, 2, 4, 5]],
    )


@PROMISE
@given(masks(), st.integers(1, 5))
def test_plans_of_any_mask_are_proved(drawn, cp):
    mask, matrix = drawn
    plan = plan_of(mask, cp)
    plan.check(mask)
    assert plan.loads().pairs.sum() == matrix.sum() == mask.pairs().sum()


@PROMISE
@given(masks(), st.integers(1, 4), st.sampled_from(["drop", "double", "shift", "widen"]), st.data())
def test_a_slice_dropped_doubled_or_shifted_is_named_by_its_pairs(drawn, cp, how, data):
    """The error says a pair of each sort that is wrong, and how many there are: as the matrix says."""
    mask, matrix = drawn
    plan = plan_of(mask, cp)
    assume(len(plan.tiles))
    at = data.draw(st.integers(0, len(plan.tiles) - 1))
    tiles = plan.tiles.copy()
    if how == "drop":
        tiles = np.delete(tiles, at, axis=0)
    elif how == "double":
        tiles = np.concatenate([tiles, tiles[at : at + 1]])
    elif how == "shift":
        tiles[at, 4:6] += data.draw(st.sampled_from([-1, 1]))
    else:
        tiles[at, 6:] = (-(1 << 40), 1 << 40)
    total = plan.tokens
    assume(tiles[:, 4].min(initial=0) >= 0 and tiles[:, 5].max(initial=0) <= total)
    times = mask_of(tiles[:, 2:], total, total)
    tiles[:, 1] = 1
    broken = replace(plan, tiles=tiles, moves=everything(plan), returns=plan.returns)
    if np.array_equal(times, matrix):
        return
    with pytest.raises(ValueError) as error:
        broken.check(mask)
    for says, wrong in (
        ("never computed", (times == 0) & matrix),
        ("computed more than once", times > 1),
        ("outside of the mask", (times == 1) & ~matrix),
    ):
        found = re.search(rf"query (\d+), key (\d+)\) on rank \d+ is {says} \((\d+) such", str(error.value))
        assert (found is not None) == bool(wrong.any()), str(error.value)
        if found is not None:
            query, key, count = map(int, found.groups())
            assert wrong[query, key] and count == wrong.sum()
            rows = np.flatnonzero(wrong.any(axis=1))
            assert f"queries {rows[0]} … {rows[-1]}" in str(error.value)


def everything(plan: AttentionPlan) -> np.ndarray:
    """All rows to all ranks: so that a tile that reads other keys fails for its pairs, not for its rows."""
    moves = [
        (1, KV, home, rank, *plan.home_of(home)[0].tolist())
        for rank in range(len(plan.ranks))
        for home in range(len(plan.ranks))
        if home != rank and len(plan.home_of(home))
    ]
    return np.array(moves, np.int64).reshape(-1, 6)


def test_boundaries_and_masks_say_the_same():
    plan = ring_plan(contiguous([0, 5, 12], 2), ranks=(0, 1))
    plan.check([0, 5, 12])
    plan.check(causal([5, 7]))
    with pytest.raises(
        ValueError, match=r"query 5, key 0\).*never computed \(35 such pairs, in queries 5 … 11 and keys 0 … 4"
    ):
        plan.check(causal([12]))
    with pytest.raises(ValueError, match="mask is of 13 tokens, the plan of 12"):
        plan.check(causal([13]))
    windowed = plan.windowed(3)
    windowed.check(sliding_window([5, 7], 3))
    windowed.check(causal([5, 7]), window=3)
    with pytest.raises(ValueError, match=r"query 3, key 0\).*outside of the mask"):
        plan.check(causal([5, 7]), window=3)
