"""What hypothesis draws for attention: tiles, documents, shards; and the brute-force readings of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from equipoise.attention.bands import CAUSAL, FULL, NO_LIMIT
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.program import Landing, Program
from equipoise.packing.dacp import dacp_shards
from equipoise.packing.mixed import mixed
from equipoise.packing.sharding_choice import ShardCost, adaptive
from equipoise.packing.shards import Shards, contiguous, striped, zigzag
from hypothesis import settings
from hypothesis import strategies as st

PROMISE = settings(max_examples=200, deadline=None, derandomize=True)


def limits(size: int) -> st.SearchStrategy[int]:
    return st.one_of(st.just(NO_LIMIT), st.integers(-size, size))


@st.composite
def tile(draw: st.DrawFn, num_q: int, num_k: int) -> list[int]:
    """One tile, perhaps without a pair."""
    q = sorted(draw(st.lists(st.integers(0, num_q), min_size=2, max_size=2)))
    k = sorted(draw(st.lists(st.integers(0, num_k), min_size=2, max_size=2)))
    return [*q, *k, -draw(limits(num_q + num_k)), draw(limits(num_q + num_k))]


@st.composite
def disjoint_tiles(draw: st.DrawFn, num_q: int, num_k: int, most: int = 12) -> np.ndarray:
    """Tiles that share rows and keys as they like, but no pair: int64[m, 6]."""
    tiles, taken = [], np.zeros((num_q, num_k), bool)
    for candidate in draw(st.lists(tile(num_q, num_k), max_size=most)):
        mask = mask_of(np.array([candidate]), num_q, num_k) > 0
        if not (mask & taken).any():
            tiles.append(candidate)
            taken |= mask
    return np.array(tiles, np.int64).reshape(-1, 6)


def mask_of(tiles: np.ndarray, num_q: int, num_k: int) -> np.ndarray:
    """How often each pair is in a tile, int[num_q, num_k]."""
    times = np.zeros((num_q, num_k), int)
    for q0, q1, k0, k1, lo, hi in tiles.tolist():
        apart = np.arange(q0, q1)[:, None] - np.arange(k0, k1)
        times[q0:q1, k0:k1] += (lo <= apart) & (apart <= hi)
    return times


def mask_of_squares(pieces: np.ndarray, num_q: int, num_k: int) -> np.ndarray:
    """The same for (q0, q1, k0, k1, kind)."""
    times = np.zeros((num_q, num_k), int)
    for q0, q1, k0, k1, kind in pieces.tolist():
        apart = np.arange(q1 - q0)[:, None] - np.arange(k1 - k0)
        times[q0:q1, k0:k1] += 1 if kind == FULL else apart >= 0 if kind == CAUSAL else apart <= 0
    return times


def mask_of_segments(pieces: np.ndarray, num_q: int, num_k: int) -> np.ndarray:
    """The same for flash-attention's (q0, q1, k0, k1, left, right), as its documentation states windows."""
    times = np.zeros((num_q, num_k), int)
    for q0, q1, k0, k1, left, right in pieces.tolist():
        i, j = np.arange(q1 - q0)[:, None], np.arange(k1 - k0)
        diagonal = i + (k1 - k0) - (q1 - q0)
        seen = np.ones((q1 - q0, k1 - k0), bool)
        if left >= 0:
            seen &= j >= diagonal - left
        if right >= 0:
            seen &= j <= diagonal + right
        times[q0:q1, k0:k1] += seen
    return times


@st.composite
def sharded(draw: st.DrawFn, largest: int = 40) -> Shards:
    """Documents of any length, empty ones too, cut by any rule over 1 to 12 ranks."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 4), st.integers(0, largest)), min_size=1, max_size=8))
    cu_seqlens, cp = np.concatenate([[0], np.cumsum(lengths)]), draw(st.integers(1, 12))
    layout = draw(st.sampled_from(LAYOUTS))
    decision = draw(st.lists(st.integers(-1, cp - 1), min_size=len(lengths), max_size=len(lengths)))
    return shards_of(layout, cu_seqlens, cp, decision)


LAYOUTS = ("contiguous", "document", "sequence", "striped", "mixed", "dacp", "adaptive")
"""Every rule that cuts packs."""


def shards_of(layout: str, cu_seqlens: np.ndarray, cp: int, decision: list[int] | None = None) -> Shards:
    """A pack cut by a rule. decision: int[k], the ranks that hold documents whole under "dacp", -1: none."""
    cost = ShardCost(flops_per_pair=4 * 64 * 128, row_seconds=4e-8)
    if layout == "dacp":
        default = [d % (cp + 1) - 1 for d in range(len(cu_seqlens) - 1)]
        return dacp_shards(cu_seqlens, default if decision is None else decision, cp)
    rules = {
        "contiguous": contiguous,
        "striped": lambda cu, ranks: striped(cu, ranks, stripe=3),
        "mixed": lambda cu, ranks: mixed(cu, ranks, cost),
        "adaptive": lambda cu, ranks: adaptive(cu, ranks, cost),
        "document": zigzag,
        "sequence": lambda cu, ranks: zigzag(cu, ranks, per="sequence"),
    }
    return rules[layout](cu_seqlens, cp)


def assert_part(part: AttentionPlan, whole: AttentionPlan) -> None:
    """The plan of one rank is what of the plan of all concerns it, and both say the same of all ranks."""
    rank = part.rank
    assert np.array_equal(part.tiles, whole.tiles[whole.tiles[:, 0] == rank])
    for name in ("moves", "returns"):
        routes = getattr(whole, name)
        assert np.array_equal(getattr(part, name), routes[(routes[:, 2] == rank) | (routes[:, 3] == rank)])
    assert part.stages == whole.stages
    assert np.array_equal(part.traffic.by_stage, whole.traffic.by_stage[: len(part.traffic.by_stage)])
    assert not whole.traffic.by_stage[len(part.traffic.by_stage) :].any()
    assert np.array_equal(part.traffic.by_rank, whole.traffic.by_rank)


def assert_same(one: Program, other: Program) -> None:
    assert (one.buffer_rows, one.q_rows) == (other.buffer_rows, other.q_rows) and len(one.stages) == len(other.stages)
    for a, b in zip(one.stages, other.stages, strict=True):
        assert [buffers for *buffers, _ in a.tiles] == [buffers for *buffers, _ in b.tiles]
        assert all(np.array_equal(x[-1], y[-1]) for x, y in zip(a.tiles, b.tiles, strict=True))
        for name in ("moves", "returns", "q_moves", "q_returns"):
            left, right = getattr(a, name), getattr(b, name)
            assert (left is None) == (right is None)
            if left is not None and right is not None:
                assert left.send_splits == right.send_splits and left.receive_splits == right.receive_splits
                assert all(np.array_equal(x, y) for (_, x), (_, y) in zip(left.picks, right.picks, strict=True))
                assert all(landed(x) == landed(y) for x, y in zip(left.landing, right.landing, strict=True))


def landed(landing: list[Landing]) -> list[tuple[int, list[int] | None, list[int]]]:
    return [(x.buffer, None if x.which is None else x.which.tolist(), x.rows.tolist()) for x in landing]


def staggered(plan: AttentionPlan) -> AttentionPlan:
    """A full ring in another order: half of what arrives in stage 1 comes a stage later, all the rest then too.

    So rows are sent on from several buffers at once, and tiles read buffers of earlier stages.
    """
    moves, returns, tiles = plan.moves[::-1].copy(), plan.returns[::-1].copy(), plan.tiles[::-1].copy()
    for stages in (moves[:, 0], returns[:, 0], tiles[:, 1]):
        stages[stages >= 1] += 1
    early = np.flatnonzero(moves[:, 0] == 2)[::2]
    moves[early, 0] = 1
    return replace(plan, moves=moves, returns=returns, tiles=tiles)


def direct(plan: AttentionPlan) -> AttentionPlan:
    """The same tiles with all KV sent from home in stage 1: a row goes to several ranks, and comes back from them."""
    moves, returns, tiles = plan.returns[:, [0, 1, 3, 2, 4, 5]].copy(), plan.returns.copy(), plan.tiles.copy()
    moves[:, 0] = returns[:, 0] = 1
    tiles[:, 1] = np.minimum(tiles[:, 1], 1)
    return replace(plan, moves=moves, returns=returns, tiles=tiles)
