"""python -m pytest tests/packing/test_chunkflow_places.py"""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from equipoise.packing.chunkflow import BACKWARD
from equipoise.packing.chunkflow_places import Placement, place
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.operations import check_operations

PLACES = st.tuples(
    st.lists(st.integers(1, 6), min_size=1, max_size=16),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(["step", "slot"]),
    st.integers(0, 10**6),
    st.integers(0, 30),
)


def placed(sizes, dp, keep, sync, seed, filler) -> tuple[Placement, np.ndarray, np.ndarray, np.ndarray]:
    groups = np.concatenate([[0], np.cumsum(sizes)])
    forward, backward = np.random.default_rng(seed).integers(0, 100, (2, groups[-1]))
    return place(groups, forward, backward, dp=dp, keep=keep, sync=sync, filler=filler), groups, forward, backward


@settings(max_examples=200, deadline=None)
@given(PLACES)
def test_groups_stay_on_one_replica_in_order_and_slots_are_equal(drawn):
    dp, keep, sync = drawn[1:4]
    placement, groups, _, _ = placed(*drawn)
    places = list(zip(placement.replica.tolist(), placement.slot.tolist(), strict=True))
    assert len(set(places)) == len(places)
    assert min(placement.slot) >= 0 and max(placement.slot) < placement.num_slots
    assert set(placement.replica) <= set(range(dp))
    for replica in range(dp):
        rounds = placement.rounds[placement.offsets[replica] : placement.offsets[replica + 1]].tolist()
        assert sum(rounds) == placement.num_slots
        check_operations(placement.operations(replica, keep), rounds, keep)
        if sync == "slot":
            assert placement.operations(replica, keep).tolist() == placement.operations(0, keep).tolist()
    for first, stop in pairwise(groups.tolist()):
        replica, slot = placement.replica[first], placement.slot[first:stop]
        assert (placement.replica[first:stop] == replica).all() and (np.diff(slot) == 1).all()
        ends = np.cumsum(placement.rounds[placement.offsets[replica] : placement.offsets[replica + 1]])
        assert len(set(np.searchsorted(ends, slot, side="right").tolist())) == 1, "a group in two rounds"


@settings(max_examples=200, deadline=None)
@given(PLACES)
def test_cost_is_what_running_the_operations_takes(drawn):
    dp, keep, sync = drawn[1:4]
    placement, _, forward, backward = placed(*drawn)
    at = {(int(r), int(s)): i for i, (r, s) in enumerate(zip(placement.replica, placement.slot, strict=True))}
    ran = [placement.operations(replica, keep).tolist() for replica in range(dp)]
    clocks = [0] * dp
    for i in range(max(len(operations) for operations in ran)):
        for replica, operations in enumerate(ran):
            if i < len(operations):
                kind, slot = operations[i]
                chunk = at.get((replica, slot))
                clocks[replica] += int((backward if kind == BACKWARD else forward)[chunk]) if chunk is not None else 0
        if sync == "slot":
            clocks = [max(clocks)] * dp
    assert placement.cost(forward, backward, keep, sync) == max(clocks)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_waiting_once_a_step_is_near_the_least_possible(sizes, dp, keep, seed):
    placement, groups, forward, backward = placed(sizes, dp, keep, "step", seed, 0)
    cost = [
        int((forward + backward)[a:b].sum() + forward[a : max(a, b - keep)].sum()) for a, b in pairwise(groups.tolist())
    ]
    least = min(max(np.bincount(bins, weights=cost, minlength=dp)) for bins in product(range(dp), repeat=len(sizes)))
    assert least <= placement.cost(forward, backward, keep, "step") <= 1.2 * least + 1


def test_a_giant_gets_company_only_where_fillers_are_dear():
    """One document of 8 chunks, 8 others, 2 replicas: equal counts would give the giant's replica work it has no time for."""
    sizes = [6] + [1] * 10
    ones = np.ones(16, np.int64)
    groups = np.concatenate([[0], np.cumsum(sizes)])
    free = place(groups, 10 * ones, 20 * ones, dp=2, keep=1, sync="step")
    assert (free.num_slots, free.cost(10 * ones, 20 * ones, 1, "step")) == (9, 270)
    dear = place(groups, 10 * ones, 20 * ones, dp=2, keep=1, sync="step", filler=30)
    assert dear.num_slots == 8
    # Net of fillers the group costs 170 and the others 20: 8 slots end at 210 + 80, 9 at 190 + 90, 10 at 200 + 100.
    between = place(groups, 10 * ones, 20 * ones, dp=2, keep=1, sync="step", filler=10)
    assert between.num_slots == 9
    forward = np.array([1000, 1000] + [10] * 20)
    alone = place([0, *range(2, 23)], forward, forward, dp=2, keep=2, sync="step")
    assert (alone.num_slots, alone.cost(forward, forward, 2, "step")) == (20, 4000)


def test_chunks_are_exchanged_after_the_first_assignment():
    """LPT ends at 19."""
    cost = np.array([8, 7, 6, 5, 4, 2, 2, 2])
    assert place(np.arange(9), cost, 0 * cost, dp=2, keep=1, sync="step").cost(cost, 0 * cost, 1, "step") == 18


def test_what_a_filler_would_cost_is_not_balanced():
    """A group of 4 chunks of 10 is 8 more than 4 fillers of 8; a chunk of 36 is 28 more: the next belongs to the group."""
    forward = np.array([10, 10, 10, 10, 36, 20])
    placement = place([0, 4, 5, 6], forward, 0 * forward, dp=2, keep=4, sync="step", filler=8)
    assert placement.replica[5] == placement.replica[0] != placement.replica[4]


def test_replicas_that_meet_at_every_operation_share_rounds():
    """Groups of 3 and 2: the shorter one's replica fills the round with the costliest standalone chunk."""
    forward = np.array([5, 5, 5, 5, 5, 1, 4, 1, 2])
    placement = place([0, 3, 5, 6, 7, 8, 9], forward, 2 * forward, dp=2, keep=1, sync="slot")
    assert placement.rounds.tolist() == [3, 1, 1, 3, 1, 1]
    assert placement.replica.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0]
    assert placement.slot.tolist() == [0, 1, 2, 0, 1, 3, 2, 4, 3]
    assert placement.recomputed(1).tolist() == [[True, True, False, False, False]] * 2


def test_further_groups_go_where_least_room_is_left():
    """Room of 3 and of 4 beside the longest: the group of 3 takes the 3, or one of 2 would need a round of its own."""
    sizes = [9, 6, 5, 3, 2, 2]
    ones = np.ones(sum(sizes), np.int64)
    placement = place(np.concatenate([[0], np.cumsum(sizes)]), ones, ones, dp=3, keep=1, sync="slot")
    assert placement.rounds.tolist() == [9, 9, 9]


def test_room_is_filled_where_slots_are_costly_anyway():
    """The last piece of the group is short: a chunk of 4 beside it would be waited for."""
    forward = np.array([5, 5, 1, 4, 1])
    placement = place([0, 3, 4, 5], forward, forward, dp=2, keep=3, sync="slot")
    assert placement.cost(forward, forward, 3, "slot") == 2 * (5 + 5 + 1)


@settings(max_examples=200, deadline=None)
@given(PLACES, st.integers(0, 100))
def test_rounds_in_another_order_hold_what_they_held(drawn, seed):
    dp, keep, sync = drawn[1:4]
    placement, _, forward, backward = placed(*drawn)
    other = placement.reordered(lambda count: np.random.default_rng(seed).permutation(count))

    def contents(of: Placement, replica: int) -> list[list[tuple[int, int]]]:
        ends = np.cumsum(of.rounds[of.offsets[replica] : of.offsets[replica + 1]])
        mine = np.flatnonzero(of.replica == replica)
        rounds: list[list[tuple[int, int]]] = [[] for _ in ends]
        for chunk in mine.tolist():
            r = int(np.searchsorted(ends, of.slot[chunk], side="right"))
            rounds[r].append((int(of.slot[chunk] - (ends[r - 1] if r else 0)), chunk))
        return rounds

    for replica in range(dp):
        count = int(np.diff(placement.offsets)[replica])
        order = np.random.default_rng(seed).permutation(count)
        assert contents(other, replica) == [contents(placement, replica)[i] for i in order]
    assert other.cost(forward, backward, keep, sync) == placement.cost(forward, backward, keep, sync)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="sync='both'"):
        place([0, 1], [1], [1], dp=1, keep=1, sync="both")
    with pytest.raises(ValueError, match="got 2 and 1 of 1"):
        place([0, 1], [1, 2], [1], dp=1, keep=1, sync="step")
