"""Plans under a sliding window: proved on paper, made by the planner and by cutting alike, and no more travels than is seen.

python -m pytest tests/attention/test_windows.py
"""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from equipoise.attention.agreement import words
from equipoise.attention.gather import gather_plan
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.program import lower
from equipoise.attention.ring import ring_plan
from equipoise.attention.ulysses import ulysses_plan
from equipoise.packing.shards import contiguous, zigzag
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, assert_part, assert_same, sharded

WINDOWS = st.one_of(st.integers(1, 12), st.integers(1, 60))
PLANNERS = {
    "ring": ring_plan,
    "direct": lambda shards, ranks, rank=None: ring_plan(shards, ranks, rank, forward=False),
    "whole ring": lambda shards, ranks, rank=None: ring_plan(shards, ranks, rank, skip=False),
    "gather": gather_plan,
    "gather in 2": lambda shards, ranks, rank=None: gather_plan(shards, ranks, rank, chunks=2),
}


def planned(kind: str, shards, rank=None) -> AttentionPlan:
    return PLANNERS[kind](shards, tuple(range(shards.cp_size)), rank)


def rows(routes: np.ndarray) -> set[tuple[int, ...]]:
    """(stage, from, to, row)."""
    return {(stage, src, dst, row) for stage, _, src, dst, a, b in routes.tolist() for row in range(a, b)}


@PROMISE
@given(sharded(), WINDOWS, st.sampled_from(list(PLANNERS)))
def test_each_pair_of_the_window_once_each_row_in_time_each_gradient_home(shards, window, kind):
    plan = planned(kind, shards).windowed(window)
    plan.check(shards.cu_seqlens, window)
    lengths = np.diff(shards.cu_seqlens)
    assert plan.loads().pairs.sum() == sum(min(i + 1, window) for n in lengths.tolist() for i in range(n))


@PROMISE
@given(sharded(), WINDOWS, st.sampled_from(["ring", "direct", "gather", "gather in 2"]))
def test_cutting_a_plan_leaves_what_the_planner_makes(shards, window, kind):
    """Two ways to the same: from queries that still see a row, and from the tiles."""
    plan = planned(kind, shards)
    made, cut = plan.windowed(window), replace(plan, planner=None).windowed(window)
    cut.check(shards.cu_seqlens, window)
    assert rows(made.moves) == rows(cut.moves) and rows(made.returns) == rows(cut.returns)
    assert np.array_equal(made.loads().pairs, cut.loads().pairs)


@PROMISE
@given(sharded(), WINDOWS, st.integers(0, 11), st.sampled_from(list(PLANNERS)))
def test_one_ranks_window_is_its_part_of_the_whole(shards, window, rank, kind):
    """What all ranks exchange is known alike, and so they agree."""
    rank %= shards.cp_size
    whole, part = planned(kind, shards).windowed(window), planned(kind, shards, rank).windowed(window)
    part.check(shards.cu_seqlens, window)
    if not (part is planned(kind, shards, rank) or window >= part.tokens):
        assert_part(part, whole)
    assert_same(lower(part, rank), lower(whole, rank))
    told = [words(planned(kind, shards, r).windowed(window), r, "") for r in range(shards.cp_size)]
    assert len({common for common, _, _ in told}) == 1 and sum(pairs for _, _, pairs in told) % (1 << 64) == 0


def test_a_long_document_moves_a_window_at_each_boundary():
    """64K tokens on 8 ranks: of each of the 16 chunks the last 1023 rows are seen by the next, elsewhere but once."""
    plan = planned("direct", zigzag([0, 65536], 8), 3).windowed(1024)
    assert plan.traffic.by_rank[1].sum() == 14 * 1023
    full = planned("direct", zigzag([0, 65536], 8), 3).traffic.by_rank[1].sum()
    assert plan.traffic.by_rank[1].sum() <= 0.05 * full
    assert plan.loads().pairs[3] <= 8192 * 1024


def test_a_plan_is_made_once_for_each_window_and_travels_without_it():
    plan = planned("ring", zigzag([0, 40, 50], 2), 1)
    assert plan.windowed(7) is plan.windowed(7) and plan.windowed(7) is not plan.windowed(8)
    assert plan.windowed(50) is plan and plan.windowed(49) is not plan
    again = pickle.loads(pickle.dumps(plan))
    assert again.cache == {} and np.array_equal(again.windowed(7).tiles, plan.windowed(7).tiles)


def test_one_ranks_plan_without_its_planner_moves_as_before():
    shards = zigzag([0, 40, 50], 2)
    plan = replace(planned("ring", shards, 1), planner=None)
    cut = plan.windowed(3)
    assert np.array_equal(cut.moves, plan.moves) and cut.traffic is plan.traffic
    assert cut.loads().pairs[1] == planned("ring", shards, 1).windowed(3).loads().pairs[1]


def test_a_plan_is_not_taken_for_one_of_another_window():
    shards = contiguous([0, 20], 2)
    plan = planned("ring", shards)
    for wrong, window in ((plan, 4), (plan.windowed(4), None), (plan.windowed(4), 5), (plan.windowed(5), 4)):
        with pytest.raises(ValueError, match="never computed|more than once|outside of the mask"):
            wrong.check(shards.cu_seqlens, window)


@pytest.mark.parametrize("plan", [planned("ring", zigzag([0, 9], 2)), ulysses_plan(zigzag([0, 9], 2), (0, 1), 0)])
def test_windows_without_a_key_are_refused(plan):
    with pytest.raises(ValueError, match="at least 1; got 0"):
        plan.windowed(0)
    assert plan.windowed(9) is plan and plan.windowed(8) is plan.windowed(8)
