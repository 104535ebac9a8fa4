"""python -m pytest tests/samplers/test_gds.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from equipoise.packing.assign import best_fit_decreasing
from equipoise.samplers.gds import gds
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Few or many documents, tails, giants at the cap; costs that grow with length, against it, or are nothing."""
    capacity = draw(st.integers(1, 60))
    lengths = st.one_of(st.integers(1, capacity), st.integers(1, max(capacity // 8, 1)), st.just(capacity))
    tokens = np.array(draw(st.lists(lengths, max_size=60)), np.int64)
    cost = draw(st.sampled_from([tokens * (tokens + 7), capacity - tokens, 0 * tokens]))
    return tokens, cost, draw(st.integers(1, 12)), capacity


def check(tokens: np.ndarray, dp: int, capacity: int, plan: tuple[np.ndarray, ...]) -> int:
    """All promises of a plan; returns its slots."""
    order, offsets, slot, replica = plan
    assert sorted(order.tolist()) == list(range(len(tokens)))
    held = [int(tokens[order[a:b]].sum()) for a, b in pairwise(offsets)]
    assert max(held) <= capacity
    slots = len(held) // dp
    assert sorted(zip(replica.tolist(), slot.tolist(), strict=True)) == [
        (r, s) for r in range(dp) for s in range(slots)
    ]
    assert min(held) > 0 or len(tokens) < len(held)
    return slots


@settings(max_examples=300, deadline=None)
@given(steps(), st.integers(0, 9))
def test_every_document_once_under_the_cap_and_no_micro_batch_empty(step, key):
    tokens, cost, dp, capacity = step
    plan = gds(tokens, cost, dp=dp, capacity=capacity, key=key)
    slots = check(tokens, dp, capacity, plan)
    again = gds(tokens, cost, dp=dp, capacity=capacity, key=key)
    assert all((a == b).all() for a, b in zip(plan, again, strict=True))
    fixed = slots + key % 3
    assert check(tokens, dp, capacity, gds(tokens, cost, dp=dp, capacity=capacity, slots=fixed)) == fixed


@settings(max_examples=300, deadline=None)
@given(steps(), st.integers(1, 6))
def test_fixed_slots_hold_whatever_best_fit_holds(step, slots):
    tokens, cost, dp, capacity = step
    try:
        check(tokens, dp, capacity, gds(tokens, cost, dp=dp, capacity=capacity, slots=slots))
    except ValueError:
        assert len(best_fit_decreasing(tokens, capacity)[1]) - 1 > dp * slots


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from([0.3, 0.8, 1.0]))
def test_slots_are_few_but_leave_room(step, fill):
    tokens, cost, dp, capacity = step
    slots = check(tokens, dp, capacity, gds(tokens, cost, dp=dp, capacity=capacity, fill=fill))
    assert tokens.sum() <= max(fill * dp * slots * capacity, 1) + dp * slots or slots == 1
    packs = len(best_fit_decreasing(tokens, capacity)[1]) - 1
    assert slots <= max(1, -(-packs // dp), -(-int(tokens.sum()) // max(int(fill * dp * capacity), 1)))


def test_replicas_are_even_and_long_documents_are_spread():
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = np.r_[rng.integers(9000, 12000, 32), rng.integers(100, 900, 400)]
        cost = tokens * (tokens + 8000)
        order, offsets, slot, replica = gds(tokens, cost, dp=8, capacity=32768, slots=4)
        work = np.zeros((8, 4), np.int64)
        longs = np.zeros((8, 4), np.int64)
        for p in range(32):
            items = order[offsets[p] : offsets[p + 1]]
            work[replica[p], slot[p]] = cost[items].sum()
            longs[replica[p], slot[p]] = (tokens[items] > 8999).sum()
        assert work.sum(1).max() <= 1.001 * work.sum(1).mean()
        assert (longs == 1).all()


def test_replicas_are_even_where_few_documents_make_a_step():
    rng, ratios = np.random.default_rng(0), []
    for _ in range(40):
        tokens = np.clip(rng.lognormal(8, 1, 40), 16, 32768).astype(np.int64)
        cost = tokens * (tokens + 8000)
        order, offsets, _, replica = gds(tokens, cost, dp=4, capacity=65536, slots=2)
        work = np.bincount(np.repeat(replica, np.diff(offsets)), weights=cost[order])
        ratios.append(work.max() / max(cost.max(), work.mean()))
    assert np.mean(ratios) <= 1.001


def test_no_micro_batch_is_empty_where_documents_cost_nothing_and_are_hard_to_fit():
    tokens = np.array([6, 6, 6, 1, 1, 1])
    check(tokens, 2, 10, gds(tokens, 0 * tokens, dp=2, capacity=10, slots=2))


def test_the_costliest_micro_batches_share_a_slot_and_slots_are_shuffled():
    tokens = np.array([100, 1, 1, 100, 1, 1, 2, 2])
    firsts = set()
    for key in range(8):
        _, offsets, slot, replica = gds(tokens, tokens**2, dp=2, capacity=100, slots=2, key=key)
        order = gds(tokens, tokens**2, dp=2, capacity=100, slots=2, key=key)[0]
        giants = [p for p in range(4) if 100 in tokens[order[offsets[p] : offsets[p + 1]]]]
        assert len(giants) == 2 and len({int(replica[p]) for p in giants}) == 2
        assert len({int(slot[p]) for p in giants}) == 1
        firsts.add(int(slot[giants[0]]))
    assert firsts == {0, 1}


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="slots=1 on 2 replicas make 2 micro-batches of at most 10 tokens"):
        gds(np.array([10, 10, 1]), np.array([1, 1, 1]), dp=2, capacity=10, slots=1)
    with pytest.raises(ValueError, match="hold documents of 1 … 10; got 1 … 11"):
        gds(np.array([11, 1]), np.array([1, 1]), dp=2, capacity=10)
    with pytest.raises(ValueError, match="dp >= 1"):
        gds(np.array([1]), np.array([1]), dp=0, capacity=10)
