"""python -m pytest tests/attention/test_routing.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from equipoise.attention.bands import NO_LIMIT
from equipoise.attention.plan import KV, Q
from equipoise.attention.ring import ring_plan
from equipoise.attention.routing import direct, part_of
from equipoise.packing.shards import contiguous
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, assert_part, sharded, tile


@st.composite
def placed(draw):
    """Tiles anywhere, in stages 1 … 4, over ranks that hold rows in pieces of any length: (tiles, offsets, home, tokens, groups)."""
    tokens, ranks, groups = draw(st.integers(1, 16)), draw(st.integers(1, 5)), draw(st.integers(1, 3))
    owner = np.array(draw(st.lists(st.integers(0, ranks - 1), min_size=tokens, max_size=tokens)))
    begins = np.flatnonzero(np.diff(owner, prepend=-1))
    pieces = np.column_stack([begins, np.append(begins[1:], tokens)])
    order = draw(st.permutations(range(len(begins))))
    order = np.array(order)[np.argsort(owner[begins][list(order)], kind="stable")]
    offsets = np.searchsorted(owner[begins][order], np.arange(ranks + 1))
    tiles = [
        [draw(st.integers(0, ranks - 1)), draw(st.integers(1, 4)), *_shifted(draw, tokens, groups)]
        for _ in range(draw(st.integers(0, 10)))
    ]
    return np.array(tiles, np.int64).reshape(-1, 8), offsets, pieces[order], tokens, groups, owner


def _shifted(draw, tokens, groups):
    q0, q1, k0, k1, lo, hi = draw(tile(tokens, tokens))
    at = draw(st.integers(0, groups - 1)) * tokens
    return q0 + at, q1 + at, k0 + at, k1 + at, lo, hi


def used(tiles, size):
    """{(kind, rank, row): stages in which a pair of a tile of the rank has it}, pair by pair."""
    uses = {}
    for rank, stage, q0, q1, k0, k1, lo, hi in tiles.tolist():
        for q in range(q0, q1):
            for k in range(k0, k1):
                if lo <= q - k <= hi:
                    uses.setdefault((KV, rank, k), set()).add(stage)
                    uses.setdefault((Q, rank, q), set()).add(stage)
    return uses


def rows(routes):
    """{(stage, kind, src, dst, row)}; no row of a route is listed twice."""
    listed = [(s, kind, a, b, row) for s, kind, a, b, x, y in routes.tolist() for row in range(x, y)]
    assert len(listed) == len(set(listed))
    return set(listed)


@PROMISE
@given(placed())
def test_each_row_that_a_pair_needs_elsewhere_moves_once_for_its_first_use_and_returns_after_its_last(drawn):
    tiles, offsets, home, tokens, groups, owner = drawn
    moves, returns = direct(tiles, offsets, home, tokens, head_groups=groups)
    away = {key: stages for key, stages in used(tiles, tokens * groups).items() if owner[key[2] % tokens] != key[1]}
    homes = {key: owner[key[2] % tokens] for key in away}
    assert rows(moves) == {(min(s), kind, homes[kind, r, x], r, x) for (kind, r, x), s in away.items()}
    assert rows(returns) == {(max(s), kind, r, homes[kind, r, x], x) for (kind, r, x), s in away.items()}
    for routes in (moves, returns):
        assert np.array_equal(routes, np.unique(routes, axis=0)), "by stage, kind, from, to, start"
        touching = (routes[1:, :4] == routes[:-1, :4]).all(axis=1) & (routes[1:, 4] <= routes[:-1, 5])
        assert not touching.any(), "ranges that touch are one"


@PROMISE
@given(sharded())
def test_routes_of_a_ring_without_forwarding_come_out_of_its_tiles(shards):
    ranks = tuple(range(shards.cp_size))
    plan = ring_plan(shards, ranks, forward=False)
    moves, returns = direct(plan.tiles, plan.home_offsets, plan.home, plan.tokens)
    assert rows(moves) == rows(plan.moves) and rows(returns) == rows(plan.returns)
    again = replace(plan, moves=moves, returns=returns)
    again.check(shards.cu_seqlens)
    for rank in ranks:
        part = part_of(again, rank)
        assert_part(part, again)
        part.check(shards.cu_seqlens)


def test_what_cannot_be_routed_is_refused_by_name():
    full = [0, 4, 0, 8, -NO_LIMIT, NO_LIMIT]
    with pytest.raises(
        ValueError, match=r"Rank 0 needs key rows within \[0, 8\) in stage 0, which are not at home there"
    ):
        direct([[0, 0, *full]], [0, 1, 2], [[0, 4], [4, 8]], 8)
    with pytest.raises(ValueError, match=r"Rank 1 needs query rows within \[0, 4\) in stage 0"):
        direct([[1, 0, 0, 4, 4, 8, 0, 0], [1, 0, 0, 4, 4, 8, -NO_LIMIT, NO_LIMIT]], [0, 1, 2], [[0, 4], [4, 8]], 8)
    with pytest.raises(ValueError, match="which nobody holds"):
        direct([[0, 1, *full]], [0, 1, 2], [[0, 4], [6, 8]], 8)


def test_a_part_is_taken_of_a_whole():
    plan = ring_plan(contiguous([0, 8], 2), (0, 1))
    with pytest.raises(ValueError, match="rank is an index into the domain, 0 … 1; got 2"):
        part_of(plan, 2)
    with pytest.raises(ValueError, match="lists rank 0 only"):
        part_of(part_of(plan, 0), 1)
