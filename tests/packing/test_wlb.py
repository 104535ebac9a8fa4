"""python -m pytest tests/packing/test_wlb.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from equipoise.packing.assign import best_fit_decreasing
from equipoise.packing.cost import causal_pairs
from equipoise.packing.wlb import wlb, wlb_balanced
from hypothesis import given, settings
from hypothesis import strategies as st


def by_hand(tokens: list[int], cost: list[int], num_packs: int, capacity: int) -> tuple[list[list[int]], list[int]]:
    """Algorithm 1 of the paper, one line after the other."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    left = []
    for d in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        work = [sum(cost[i] for i in pack) for pack in packs]
        length = [sum(tokens[i] for i in pack) for pack in packs]
        lightest, shortest = work.index(min(work)), length.index(min(length))
        if length[lightest] + tokens[d] <= capacity:
            packs[lightest].append(d)
        elif length[shortest] + tokens[d] <= capacity:
            packs[shortest].append(d)
        else:
            left.append(d)
    return [sorted(pack) for pack in packs], sorted(left)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), max_size=40),
    st.integers(1, 8),
    st.one_of(st.integers(1, 80), st.just(10**6)),
    st.booleans(),
)
def test_wlb_is_the_algorithm_of_the_paper(drawn, num_packs, capacity, quadratic):
    tokens = [t for t, _ in drawn]
    cost = [t * t + 3 * t for t in tokens] if quadratic else [c for _, c in drawn]
    order, offsets, left = wlb(tokens, cost, num_packs, capacity)
    packs, expected_left = by_hand(tokens, cost, num_packs, capacity)
    assert [order[a:b].tolist() for a, b in pairwise(offsets)] == packs
    assert left.tolist() == expected_left


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 8), st.integers(1, 80))
def test_every_document_once_and_the_cap_is_hard(tokens, num_packs, capacity):
    order, offsets, left = wlb(tokens, tokens, num_packs, capacity)
    assert sorted([*order.tolist(), *left.tolist()]) == list(range(len(tokens)))
    held = np.diff(np.concatenate([[0], np.cumsum(np.asarray(tokens, dtype=np.int64)[order])])[offsets])
    assert held.max() <= capacity and len(offsets) == num_packs + 1


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 8), st.integers(30, 80))
def test_balanced_packs_hold_all_that_best_fit_holds(tokens, num_packs, capacity):
    tokens = np.array(tokens)
    cost = tokens * (tokens + 9)
    order, offsets, left = wlb_balanced(tokens, cost, num_packs, capacity)
    assert sorted([*order.tolist(), *left.tolist()]) == list(range(len(tokens)))
    held = [tokens[order[a:b]].sum() for a, b in pairwise(offsets)]
    assert max(held) <= capacity and len(offsets) == num_packs + 1
    if len(best_fit_decreasing(tokens, capacity)[1]) - 1 <= num_packs:
        assert not len(left)
    if len(tokens) >= num_packs and not len(left):
        assert min(held) > 0


def test_balanced_packs_beat_the_greedy_rule_on_the_mean():
    rng, ours, papers = np.random.default_rng(0), [], []
    for _ in range(60):
        tokens = np.clip(rng.lognormal(8, 1.3, 40), 16, 65536).astype(np.int64)
        cost = tokens * (tokens + 49152) // 1000
        for results, pack in ((ours, wlb_balanced), (papers, wlb)):
            order, offsets, _ = pack(tokens, cost, 4, 131072)
            work = [cost[order[a:b]].sum() for a, b in pairwise(offsets)]
            results.append(max(work) / max(cost.max(), cost.sum() / 4))
    assert np.mean(ours) < np.mean(papers) and max(ours) < 1.01


def test_a_long_document_is_matched_by_a_longer_pack_of_short_ones():
    """Equal work, not equal length: what a pack of fixed length cannot do."""
    tokens = np.array([4000, *[1000] * 30])
    pairs = causal_pairs(0, tokens)
    order, offsets, left = wlb(tokens, pairs, 2, 32000)
    work = [pairs[order[a:b]].sum() for a, b in pairwise(offsets)]
    assert not len(left) and max(work) / np.mean(work) < 1.03
    assert tokens[order[: offsets[1]]].sum() < tokens[order[offsets[1] :]].sum()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="num_packs=0"):
        wlb([1], [1], 0, 5)
    with pytest.raises(ValueError, match="tokens from -1"):
        wlb([-1], [1], 1, 5)
