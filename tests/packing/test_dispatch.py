"""python -m pytest tests/packing/test_dispatch.py"""

from __future__ import annotations

import itertools
from math import ceil

import numpy as np
import pytest
from equipoise.packing import dispatch_joint
from equipoise.packing.dispatch import (
    SOLVERS,
    dispatch,
    exact,
    loads,
    lower_bound,
    min_heap,
    sorted_sequential,
    topp_heap,
)
from equipoise.packing.dispatch_joint import joint
from equipoise.packing.dispatch_search import improved
from equipoise.packing.mask_areas import KeyRanges, chunk_keys, chunk_pairs
from equipoise.packing.mask_kinds import causal, window_with_sinks
from equipoise.packing.sharding_choice import received_rows
from equipoise.packing.shards import zigzag
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.mask_draws import PROMISE, masks

MAGI = [2, 4, 3, 16, 13, 5, 9, 10]
COUNTER = [8, 7, 6, 5, 4, 2, 2, 2]

jobs = st.lists(st.integers(0, 30), min_size=1, max_size=7)


def no_keys(n: int) -> KeyRanges:
    return KeyRanges(offsets=np.zeros(n + 1, np.int64), ranges=np.zeros((0, 2), np.int64))


def test_published_values():
    assert lower_bound(MAGI, 4) == 15.5
    assert loads(MAGI, exact(MAGI, 4), 4).max() == 16
    assert loads(MAGI, exact(MAGI, 4, most=2), 4).max() == 18
    assert loads(MAGI, min_heap(MAGI, 4), 4).max() == 18
    assert loads(MAGI, topp_heap(MAGI, 4, no_keys(8), top_p=0.5), 4).max() in (18, 19)
    assert sorted(loads(COUNTER, min_heap(COUNTER, 2), 2)) == [17, 19]
    assert sorted(loads(COUNTER, exact(COUNTER, 2), 2)) == [18, 18]


def test_buckets_of_equal_load_differ_where_they_hold_different_numbers_of_jobs():
    assert loads([0, 4, 4, 0], exact([0, 4, 4, 0], 2, most=2), 2).tolist() == [4, 4]
    assert loads([4, 5, 0, 3, 0, 5], exact([4, 5, 0, 3, 0, 5], 3, most=2), 3).max() == 7


@PROMISE
@given(jobs, st.integers(1, 4), st.integers(1, 7))
def test_exact_is_the_least_maximum_of_all_assignments(work, k, most):
    most = max(most, ceil(len(work) / k))
    found = exact(work, k, most=most)
    assert np.bincount(found, minlength=k).max() <= most and found.min() >= 0
    best = (
        min(
            loads(work, np.array(way), k).max()
            for way in itertools.product(range(k), repeat=len(work))
            if max(way.count(b) for b in range(k)) <= most
        )
        if k ** len(work) < 3000
        else loads(work, min_heap(work, k), k).max()
    )
    reached = loads(work, found, k).max()
    assert reached == best if k ** len(work) < 3000 else reached <= best


@PROMISE
@given(st.lists(st.integers(0, 99), min_size=1, max_size=60), st.integers(1, 12), st.data())
def test_no_bucket_has_more_than_its_share_of_jobs(work, k, data):
    sample = np.sort(data.draw(st.lists(st.integers(0, 3), min_size=len(work), max_size=len(work))))
    found = [
        min_heap(work, k),
        topp_heap(work, k, no_keys(len(work)), top_p=data.draw(st.sampled_from([0.0, 0.3, 1.0]))),
        sorted_sequential(work, k, sample, allocation_ratio=data.draw(st.sampled_from([0.2, 1.0, 2.0]))),
    ]
    for bucket in found:
        assert bucket.min() >= 0 and np.bincount(bucket, minlength=k).max() <= ceil(len(work) / k)
        assert loads(work, bucket, k).max() >= lower_bound(work, k)
        assert len(work) < k or np.bincount(bucket, minlength=k).min() >= 0
    # The heap by its definition.
    load, count, by_hand = [0] * k, [0] * k, [-1] * len(work)
    for job in sorted(range(len(work)), key=lambda j: (-work[j], j)):
        b = min((b for b in range(k) if count[b] < ceil(len(work) / k)), key=lambda b: (load[b], count[b], b))
        by_hand[job], load[b], count[b] = b, load[b] + work[job], count[b] + 1
    assert found[0].tolist() == by_hand


def test_affinity_brings_chunks_to_the_keys_they_share():
    """Two documents of two chunks each: with affinity each is whole on a rank, without it both are cut."""
    tiles = causal([8, 8]).tiles_of_pack()
    keys = chunk_keys(tiles, [0, 4, 8, 12, 16])
    work = [10, 26, 10, 26]
    assert topp_heap(work, 2, keys, top_p=1.0).tolist() == [0, 0, 1, 1]
    assert sorted_sequential(work, 2, [0, 0, 1, 1], allocation_ratio=2.0).tolist() == [0, 0, 1, 1]


@st.composite
def packs(draw):
    """(mask, cp, cap or None)"""
    mask, _ = draw(masks(largest=40, most=5))
    cp = draw(st.integers(1, 12))
    even = -(-int(mask.tokens.sum()) // cp)
    cap = draw(st.sampled_from([None, max(even, 1), max(even, 1) + 1, 2 * even + 3]))
    return mask, cp, cap


RULES = {
    **{name: lambda mask, cp, cap, name=name: dispatch(mask, cp, solver=name, max_tokens=cap) for name in SOLVERS[:3]},
    "chunk": lambda mask, cp, cap: dispatch(mask, cp, chunk=3, max_tokens=cap),
    "joint": lambda mask, cp, cap: joint(mask, cp, max_tokens=cap, rounds=300),
    "built": lambda mask, cp, cap: joint(mask, cp, max_tokens=cap, rounds=0, slack=1.0),
}


@PROMISE
@given(packs(), st.sampled_from(sorted(RULES)))
def test_every_token_is_on_one_rank_within_its_cap_and_none_is_empty(drawn, rule):
    mask, cp, cap = drawn
    shards = RULES[rule](mask, cp, cap)
    total = int(mask.tokens.sum())
    positions = [shards.positions(rank) for rank in range(cp)]
    assert np.array_equal(np.sort(np.concatenate(positions)), np.arange(total))
    assert all((np.diff(own) > 0).all() for own in positions)
    assert np.array_equal(shards.cu_seqlens, mask.cu_seqlens)
    start, stop = shards.segments.T
    assert np.all(shards.cu_seqlens[shards.document] <= start) and np.all(
        stop <= shards.cu_seqlens[shards.document + 1]
    )
    held, even = shards.tokens(), -(-total // cp)
    assert cap is None or held.max() <= cap
    assert rule != "joint" or held.max() <= ceil(1.2 * even)
    assert rule != "built" or held.max() <= even
    assert total < cp or held.min() >= 1
    again = RULES[rule](mask, cp, cap)
    assert np.array_equal(again.segments, shards.segments) and np.array_equal(again.offsets, shards.offsets)


def test_chunks_are_equal_but_for_the_last_one():
    shards = dispatch([0, 1000], 4, chunk=10)
    edges = np.unique(shards.segments)
    assert (edges % 10 == 0).all() and edges[-1] == 1000
    assert len(np.unique(dispatch([0, 1001], 4).segments % 32)) <= 2, "ceil(1001 / 32) = 32, the last chunk is short"
    assert shards.pairs().max() <= 1.02 * shards.pairs().mean()


def test_dispatch_by_area_balances_masks_that_causal_shards_do_not():
    mask = window_with_sinks([40_000, 9_000, 300, 16_000], 512, 16)
    area = mask.row_pairs()
    for shards in (dispatch(mask, 6), joint(mask, 6)):
        pairs = np.array([area[shards.positions(rank)].sum() for rank in range(6)])
        assert pairs.max() <= 1.05 * pairs.mean()


LENGTHS = np.array([52060, 25819, 17790, 17057, 7049, 6689, 3000, 1608])


@pytest.mark.parametrize("cp", [8, 16])
def test_joint_needs_at_most_half_the_rows_of_min_heap_within_five_percent_of_balance(cp):
    cu = np.cumsum([0, *LENGTHS])
    plain, ours = dispatch(cu, cp), joint(cu, cp)
    assert received_rows(ours).sum() <= 0.5 * received_rows(plain).sum()
    assert ours.pairs().max() <= 1.05 * min(zigzag(cu, cp).pairs().max(), plain.pairs().max())
    assert ours.tokens().max() <= ceil(1.2 * -(-cu[-1] // cp))


@pytest.mark.parametrize("lengths", [[123_552, 4356, 2603, 561], [50_454, 12_467, *[5500] * 11]])
def test_the_better_of_two_starts_goes_on(lengths, monkeypatch):
    """Ranks of tails with few tokens for a giant alone, with nearly an even share for one among others."""
    cu = np.cumsum([0, *lengths])
    ours, alone = received_rows(joint(cu, 16)).sum(), []
    for least in dispatch_joint.LEAST:
        monkeypatch.setattr(dispatch_joint, "LEAST", (least,))
        alone.append(received_rows(joint(cu, 16)).sum())
    assert ours <= 1.01 * min(alone) and max(alone) > 1.01 * min(alone)


def test_one_document_comes_out_as_zigzag():
    """Tail and head on the first rank, the middle on the last: the fewest rows for equal tokens and pairs."""
    ours, best = joint([0, 64000], 8, balance=1.0, slack=1.0, rounds=0), zigzag([0, 64000], 8)
    assert received_rows(ours).sum() <= 1.01 * received_rows(best).sum()


def test_short_documents_stay_whole():
    shards = joint(np.arange(0, 80001, 5000), 8)
    assert len(shards.segments) == 16 and received_rows(shards).sum() == 0


def test_the_search_counts_rows_of_any_mask_as_it_does_of_causal_ones(monkeypatch):
    """Counting key chunk by key chunk leads where counting by the last chunk does."""
    from equipoise.packing import dispatch_search

    cu = np.cumsum([0, 4000, 1500, 900, 300, 300])
    fast = joint(cu, 4, rounds=3000, slack=1.5)
    monkeypatch.setattr(dispatch_search, "_is_nested", lambda *_: False)
    slow = joint(cu, 4, rounds=3000, slack=1.5)
    assert np.array_equal(fast.segments, slow.segments) and np.array_equal(fast.offsets, slow.offsets)


@PROMISE
@given(masks(largest=40, most=4), st.integers(1, 6), st.integers(0, 300), st.randoms(use_true_random=False))
def test_the_search_knows_what_its_result_costs(drawn, cp, rounds, random):
    """The rows that ranks receive, and fines for what is over the limits, counted anew; never more than it began with."""
    mask, _ = drawn
    tiles, total = mask.tiles_of_pack(), int(mask.tokens.sum())
    if total == 0:
        return
    edges = np.union1d(mask.cu_seqlens, np.arange(0, total, 3))
    document = np.searchsorted(mask.cu_seqlens, edges[:-1], side="right") - 1
    keys, pairs = chunk_keys(tiles, edges), chunk_pairs(tiles, edges)
    limits = {"target": int(pairs.sum()) // cp + 1, "cap": -(-total // cp) + 2}
    rank = np.array([random.randrange(cp) for _ in pairs])

    def cost(owner):
        return improved(edges, owner, pairs, keys, document, cp, **limits, rounds=0, seed=0)[1]

    found, said = improved(edges, rank, pairs, keys, document, cp, **limits, rounds=rounds, seed=1)
    assert said == cost(found) <= cost(rank)
    if (loads(pairs, found, cp) <= limits["target"]).all() and (
        loads(np.diff(edges), found, cp) <= limits["cap"]
    ).all():
        rows = 0
        for r in range(cp):
            own, needed = np.zeros(total, bool), np.zeros(total, bool)
            for chunk in np.flatnonzero(found == r):
                own[edges[chunk] : edges[chunk + 1]] = True
                for a, b in keys.of(chunk).tolist():  # whole chunks are counted
                    a, b = edges[np.searchsorted(edges, a, side="right") - 1], edges[np.searchsorted(edges, b)]
                    needed[a:b] = True
            rows += int((needed & ~own).sum())
        assert said == rows


def test_what_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match="solver must be one of min_heap, topp_heap, sorted_sequential, exact; got 'best'"
    ):
        dispatch([0, 8], 2, solver="best")
    with pytest.raises(ValueError, match="an even share, 4; got cp_size=2, max_tokens=3"):
        dispatch([0, 8], 2, max_tokens=3)
    with pytest.raises(ValueError, match="at least one query; got chunk=0"):
        dispatch([0, 8], 2, chunk=0)
    with pytest.raises(ValueError, match="at most 32 jobs; got 33"):
        exact([1] * 33, 2)
    with pytest.raises(ValueError, match="2 buckets of at most 1 jobs do not hold 3"):
        exact([1, 1, 1], 2, most=1)
    with pytest.raises(ValueError, match="balance >= 1, slack >= 1 and rounds >= 0; got 0.9, 1.2 and 50000"):
        joint([0, 8], 2, balance=0.9)
