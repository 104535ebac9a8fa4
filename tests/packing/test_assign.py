"""python -m pytest tests/packing/test_assign.py"""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from equipoise.packing.assign import csr_from_bins, lpt, next_fit, split_largest, stripes
from hypothesis import given, settings
from hypothesis import strategies as st

items = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), max_size=40)


def lpt_by_hand(cost: list[int], tokens: list[int], num_bins: int, cap: int, max_items: int) -> list[int]:
    load, held, count = [0] * num_bins, [0] * num_bins, [0] * num_bins
    bins = [-1] * len(cost)
    for item in sorted(range(len(cost)), key=lambda i: (-cost[i], i)):
        open_bins = [
            b for b in range(num_bins) if held[b] + tokens[item] <= cap and (max_items == 0 or count[b] < max_items)
        ]
        if open_bins:
            best = min(open_bins, key=lambda b: (load[b], b))
            bins[item] = best
            load[best] += cost[item]
            held[best] += tokens[item]
            count[best] += 1
    return bins


@st.composite
def tight_problems(draw: st.DrawFn) -> tuple[list[int], list[int], int, int, int]:
    """Few different costs, so that loads tie, and a cap that the least loaded bin often cannot keep."""
    num_bins, count = draw(st.integers(1, 9)), draw(st.integers(0, 40))
    cost = draw(st.lists(st.sampled_from([0, 1, 2, 3, 20]), min_size=count, max_size=count))
    tokens = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    cap = draw(st.one_of(st.just(10**6), st.integers(0, 8).map(lambda slack: sum(tokens) // num_bins + slack)))
    return cost, tokens, num_bins, cap, draw(st.sampled_from([0, 0, 1, 2, 3, -(-count // num_bins)]))


@settings(max_examples=1000, deadline=None)
@given(tight_problems())
def test_lpt_is_brute_force(problem):
    assert lpt(*problem).tolist() == lpt_by_hand(*problem)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 12), max_size=40), st.integers(12, 40))
def test_next_fit_opens_a_pack_when_one_does_not_fit(tokens, capacity):
    packs: list[list[int]] = []
    for t in tokens:
        if not packs or sum(packs[-1]) + t > capacity:
            packs.append([])
        packs[-1].append(t)
    assert next_fit(tokens, capacity).tolist() == np.cumsum([0, *map(len, packs)]).tolist()


def split_by_hand(packs: list[list[int]], tokens: list[int], cost: list[int], num_packs: int) -> list[list[int]]:
    packs = [list(pack) for pack in packs]
    while len(packs) < num_packs and any(len(pack) > 1 for pack in packs):
        able = [p for p in range(len(packs)) if len(packs[p]) > 1]
        worst = min(able, key=lambda p: (-sum(cost[i] for i in packs[p]), p))
        halves: list[list[int]] = [[], []]
        for place in sorted(range(len(packs[worst])), key=lambda k: (-cost[packs[worst][k]], k)):
            weight = [(sum(cost[packs[worst][k]] for k in h), sum(tokens[packs[worst][k]] for k in h)) for h in halves]
            halves[1 if weight[1] < weight[0] else 0].append(place)
        pack = packs[worst]
        packs[worst] = [pack[k] for k in sorted(halves[0])]
        packs.append([pack[k] for k in sorted(halves[1])])
    return packs


@settings(max_examples=200, deadline=None)
@given(items, st.lists(st.integers(0, 5), min_size=40, max_size=40), st.integers(0, 30))
def test_split_largest_is_brute_force(drawn, homes, num_packs):
    cost, tokens = [c for c, _ in drawn], [t for _, t in drawn]
    packs = [[i for i in reversed(range(len(drawn))) if homes[i] == home] for home in range(6)]
    packs = [pack for pack in packs if pack]
    order = [i for pack in packs for i in pack]
    offsets = np.cumsum([0, *map(len, packs)])
    order, offsets = split_largest(order, offsets, tokens, cost, num_packs)
    split = [order[a:b].tolist() for a, b in pairwise(offsets)]
    assert split == split_by_hand(packs, tokens, cost, num_packs)
    assert all(split)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, 6), max_size=40))
def test_csr_from_bins_keeps_index_order_and_leaves_out_the_unplaced(bins):
    order, offsets = csr_from_bins(bins, 7)
    assert [order[a:b].tolist() for a, b in pairwise(offsets)] == [
        [i for i, b in enumerate(bins) if b == wanted] for wanted in range(7)
    ]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_no_groups_have_smaller_maxima_than_stripes(cost, width):
    """Against all ways to deal up to six items into groups of at most `width`, the last one smaller."""
    groups = stripes(cost, width)
    sizes = np.bincount(groups)
    assert (sizes[:-1] == width).all() and sizes[-1] <= width
    rest = len(cost) % width
    starts = [0, *range(rest or width, len(cost), width)]
    ends = [*starts[1:], len(cost)]
    reached = sum(max(c for c, g in zip(cost, groups, strict=True) if g == group) for group in set(groups.tolist()))
    best = min(sum(max(way[a:b]) for a, b in zip(starts, ends, strict=True)) for way in permutations(cost))
    assert reached == best
    assert stripes([5, 7, 5, 1], 2).tolist() == [0, 0, 1, 1]


def test_lpt_stays_within_four_thirds_of_the_bound():
    rng = np.random.default_rng(0)
    for _ in range(50):
        cost = rng.lognormal(8, 1.6, 40).astype(np.int64)
        loads = np.bincount(lpt(cost, cost, 8, 10**12), weights=cost, minlength=8)
        assert loads.max() <= 4 / 3 * max(cost.max(), cost.sum() / 8, np.sort(cost)[-9:-7].sum())


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="num_bins >= 1"):
        lpt([1], [1], 0, 5)
    with pytest.raises(ValueError, match=r"shape \(2,\) and \(1,\)"):
        lpt([1, 2], [1], 1, 5)
    with pytest.raises(ValueError, match=r"below 2\*\*62"):
        lpt([2**61, 2**61], [1, 1], 1, 5)
    with pytest.raises(ValueError, match="got costs -1"):
        lpt([-1], [1], 1, 5)
    with pytest.raises(ValueError, match="item 0 holds 7"):
        next_fit([7], 6)
    with pytest.raises(ValueError, match="at least one token"):
        split_largest([0, 1], [0, 2], [0, 1], [1, 1], 2)
    with pytest.raises(ValueError, match="width=0"):
        stripes([1], 0)
    with pytest.raises(ValueError, match="-1 … 1; got 0 … 2"):
        csr_from_bins([0, 2], 2)
