"""python -m pytest tests/packing/test_chunkflow.py"""

from __future__ import annotations

import doctest
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from equipoise.packing import chunkflow as module
from equipoise.packing.chunkflow import BACKWARD, FORWARD, RECOMPUTE, Placement, chunks, place, schedule
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 60)), max_size=30)


def runs_as_it_must(operations: np.ndarray, sizes: list[int], keep: int) -> None:
    """Forward in order; backward once all later chunks of the group have been, its activations being there; at most
    `keep` of a group's activations at a time; recomputed only what was not kept."""
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    last = np.cumsum(sizes) - 1
    done, held, again = [], set(), []
    backward: set[int] = set()
    for operation, chunk in operations.tolist():
        group = group_of[chunk]
        later = set(range(chunk + 1, int(last[group]) + 1))
        if operation == FORWARD:
            assert chunk == len(done)
            done.append(chunk)
            if len(later) < keep:
                held.add(chunk)
        elif operation == RECOMPUTE:
            assert chunk in done and chunk not in held and later <= backward
            held.add(chunk)
            again.append(chunk)
        else:
            assert chunk in held and later <= backward
            assert int(last[group]) in done
            held.remove(chunk)
            backward.add(chunk)
        assert len(held) <= keep
    assert len(done) == len(backward) == sum(sizes) and not held
    assert sorted(again) == [c for c in range(sum(sizes)) if int(last[group_of[c]]) - c >= keep]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 10))
def test_every_schedule_obeys_the_dependencies_and_keeps_k(sizes, keep):
    runs_as_it_must(schedule(sizes, keep), sizes, keep)


def test_the_order_of_one_document():
    assert schedule(2, 2).tolist() == [[FORWARD, 0], [FORWARD, 1], [BACKWARD, 1], [BACKWARD, 0]]
    kinds = "".join("FRB"[k] for k in schedule([4, 1], 2)[:, 0])
    assert kinds == "FFFFBBRBRBFB"
    assert schedule(5, 2)[:, 1].tolist() == [0, 1, 2, 3, 4, 4, 3, 2, 2, 1, 1, 0, 0]


def toy_gradients(sizes: list[int], keep: int, ascending: bool = False) -> list[torch.Tensor]:
    """Gradients of a causal net of two layers over one sequence, run in chunks of these sizes with a store of K and V.

    ascending: the first N-K chunks recomputed in the order the paper prints.
    """
    generator = torch.Generator().manual_seed(0)
    layers, width, total = 2, 6, sum(sizes)
    x, y = (torch.randn(total, width, dtype=torch.float64, generator=generator) for _ in range(2))
    weights = [
        torch.randn(width, width, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(4 * layers)
    ]
    edges = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    store = [[torch.zeros(total, width, dtype=torch.float64) for _ in range(2)] for _ in range(layers)]
    owed = [[torch.zeros(total, width, dtype=torch.float64) for _ in range(2)] for _ in range(layers)]
    held: dict[int, tuple] = {}

    def forward(chunk: int) -> None:
        a, b = edges[chunk], edges[chunk + 1]
        h, own, earlier = x[a:b], [], []
        for layer in range(layers):
            q, k, v = (h @ w for w in weights[4 * layer : 4 * layer + 3])
            before = [kv[:a].clone().requires_grad_() for kv in store[layer]]
            keys, values = torch.cat([before[0], k]), torch.cat([before[1], v])
            mask = torch.arange(b)[None] <= torch.arange(a, b)[:, None]
            scores = (q @ keys.T / width**0.5).masked_fill(~mask, -torch.inf)
            h = h + torch.tanh(scores.softmax(-1) @ values @ weights[4 * layer + 3])
            for kept, new in zip(store[layer], (k, v), strict=True):
                kept[a:b] = new.detach()
            own += [k, v]
            earlier += before
        held[chunk] = ((h * y[a:b]).sum(), own, earlier)

    def backward(chunk: int) -> None:
        a, b = edges[chunk], edges[chunk + 1]
        loss, own, earlier = held.pop(chunk)
        grads = [owed[i // 2][i % 2][a:b] for i in range(2 * layers)]
        torch.autograd.backward([loss, *own], [torch.ones_like(loss), *grads])
        for i, kv in enumerate(earlier):
            if kv.grad is not None:
                owed[i // 2][i % 2][:a] += kv.grad

    operations = schedule(len(sizes), keep).tolist()
    if ascending:
        kept = len(sizes) - keep
        head = [op for op in operations if op[0] == FORWARD or (op[0] == BACKWARD and op[1] >= kept)]
        operations = head + [[kind, c] for c in range(kept) for kind in (RECOMPUTE, BACKWARD)]
    for operation, chunk in operations:
        if operation == BACKWARD:
            backward(chunk)
        else:
            forward(chunk)
            if operation == FORWARD and chunk < len(sizes) - keep:
                held.pop(chunk)
    return [w.grad for w in weights]


def relative_error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_gradients_are_those_of_the_whole_document(keep):
    """And not those of the order printed in the paper, which loses what later chunks owe to earlier ones."""
    sizes = [4, 4, 4, 4, 3]
    whole = toy_gradients([19], 1)
    assert relative_error(toy_gradients(sizes, keep), whole) < 1e-12
    if keep < 4:
        assert relative_error(toy_gradients(sizes, keep, ascending=True), whole) > 0.1


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 20))
def test_chunks_hold_every_token_once(lengths, chunk_tokens):
    made = chunks(lengths, chunk_tokens)
    seen = sorted(
        (i, t)
        for i, a, b in zip(made.item.tolist(), made.start.tolist(), made.stop.tolist(), strict=True)
        for t in range(a, b)
    )
    assert seen == [(i, t) for i, length in enumerate(lengths) for t in range(length)]
    assert len(made) == 0 or (made.tokens.max() <= chunk_tokens and made.tokens.min() > 0)
    assert made.tokens.tolist() == [int((made.stop - made.start)[a:b].sum()) for a, b in made.slices()]
    assert made.pairs.sum() == sum(length * (length + 1) // 2 for length in lengths)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 20))
def test_long_documents_are_groups_in_order_and_short_ones_stay_whole(lengths, chunk_tokens):
    made = chunks(lengths, chunk_tokens)
    for first, stop in pairwise(made.groups.tolist()):
        count = stop - first
        assert made.chunk_count[first:stop].tolist() == [count] * count
        assert made.chunk_index[first:stop].tolist() == list(range(count))
        pieces = range(*made.offsets[[first, stop]])
        if count > 1:
            item = int(made.item[pieces[0]])
            assert len(pieces) == count == -(-lengths[item] // chunk_tokens) and (made.item[pieces] == item).all()
            assert made.start[pieces].tolist() == list(range(0, lengths[item], chunk_tokens))
        else:
            assert (made.start[pieces] == 0).all() and made.stop[pieces].tolist() == [
                lengths[i] for i in made.item[pieces]
            ]


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """By trying every partition of the items."""

    def best(at: int, rooms: tuple[int, ...]) -> int:
        if at == len(lengths):
            return len(rooms)
        length = lengths[at]
        fitting = [(*rooms[:i], room - length, *rooms[i + 1 :]) for i, room in enumerate(rooms) if room >= length]
        return min(best(at + 1, choice) for choice in [*fitting, (*rooms, capacity - length)])

    return best(0, ())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_standalone_chunks_are_few(lengths):
    """Best-fit-decreasing needs at most 11/9 of the fewest, and two thirds of a pack."""
    assert len(chunks(lengths, 10)) <= 11 / 9 * fewest_bins(lengths, 10) + 2 / 3


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
        runs_as_it_must(placement.operations(replica, keep), rounds, keep)
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
    forward = np.array([1000, 1000] + [10] * 20)
    alone = place([0, *range(2, 23)], forward, forward, dp=2, keep=2, sync="step")
    assert (alone.num_slots, alone.cost(forward, forward, 2, "step")) == (20, 4000)


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


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="chunk_tokens and every item must be at least 1; got 4 and items from 0"):
        chunks([3, 0], 4)
    with pytest.raises(ValueError, match="keeps at least one; got 3 and keep=0"):
        schedule(3, 0)
    with pytest.raises(ValueError, match="sync='both'"):
        place([0, 1], [1], [1], dp=1, keep=1, sync="both")
    with pytest.raises(ValueError, match="got 2 and 1 of 1"):
        place([0, 1], [1, 2], [1], dp=1, keep=1, sync="step")


def test_examples():
    assert doctest.testmod(module).failed == 0
