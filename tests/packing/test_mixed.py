"""python -m pytest tests/packing/test_mixed.py"""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from equipoise.packing.best_fit import best_fit_decreasing
from equipoise.packing.mixed import mixed
from equipoise.packing.sharding_choice import ShardCost, adaptive, received_rows
from equipoise.packing.shards import zigzag
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = Path(__file__).parents[3] / "shared" / "lengths"
LAYER = 4 * 64 * 128
INFINIBAND = 2 * 2 * 4 * 128 / 50e9

packs = st.tuples(
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, 400), st.integers(0, 20000)), max_size=24),
    st.integers(1, 17),
    st.sampled_from([1.0, 1.1, 1.5, 4.0]),
    st.sampled_from([0.0, INFINIBAND, 1e-5]),
)


@settings(max_examples=400, deadline=None)
@given(packs)
def test_every_token_once_inside_documents_under_the_cap(drawn):
    lengths, cp, slack, row_seconds = drawn
    cu = np.cumsum([0, *lengths])
    shards = mixed(cu, cp, ShardCost(flops_per_pair=LAYER, row_seconds=row_seconds), slack=slack)
    everything = np.concatenate([shards.positions(rank) for rank in range(cp)])
    assert sorted(everything.tolist()) == list(range(sum(lengths)))
    held, even = shards.tokens(), -(-sum(lengths) // cp)
    assert held.max() <= ceil(slack * even)
    assert sum(lengths) < cp or held.min() >= 1, "no rank is left without tokens"
    start, stop = shards.segments[:, 0], shards.segments[:, 1]
    assert np.all(stop > start) and np.all(cu[shards.document] <= start) and np.all(stop <= cu[shards.document + 1])
    for rank in range(cp):
        assert (np.diff(shards.positions(rank)) > 0).all(), "a rank holds its tokens in order"


@settings(max_examples=200, deadline=None)
@given(packs, st.integers(0, 50))
def test_an_explicit_cap_is_hard(drawn, room):
    lengths, cp, slack, row_seconds = drawn
    cap = -(-sum(lengths) // cp) + room
    cost = ShardCost(flops_per_pair=LAYER, row_seconds=row_seconds)
    assert mixed(np.cumsum([0, *lengths]), cp, cost, slack=slack, max_tokens=cap).tokens().max() <= cap


def test_documents_that_fill_the_ranks_stay_whole():
    shards = mixed(np.arange(0, 80001, 5000), 8, ShardCost(flops_per_pair=LAYER, row_seconds=INFINIBAND))
    assert len(shards.segments) == 16 and received_rows(shards).sum() == 0


def test_one_document_is_cut_over_all_ranks_in_zigzag():
    for cp in (3, 8):
        shards = mixed([0, 40000], cp, ShardCost(flops_per_pair=LAYER))
        assert len(shards.segments) == 2 * cp - 1 and np.ptp(shards.tokens()) <= 1
        pairs = shards.pairs()
        assert pairs.max() - pairs.min() < 2 * 40000


def test_a_full_pack_without_slack_still_has_a_place_for_all():
    """Shares that no longer fit evenly fill what room is left: four ranks, cap equal to the even share, odd lengths."""
    lengths = [977, 631, 500, 499, 333, 211, 97, 41, 13, 7, 3, 1]
    shards = mixed(np.cumsum([0, *lengths]), 4, ShardCost(flops_per_pair=LAYER, row_seconds=1e-7), slack=1.0)
    assert shards.tokens().max() == -(-sum(lengths) // 4)


@pytest.mark.skipif(not LENGTHS.is_dir(), reason="document lengths of the benchmarks are not here")
def test_faster_than_what_is_published_on_real_packs():
    """128K packs over 16 ranks on InfiniBand: mean time of the slowest rank under both published rules, fewer rows."""
    cost = ShardCost(flops_per_pair=LAYER, row_seconds=INFINIBAND)
    for trace in ("wlb_like", "wikipedia", "mooncake_conversation"):
        tokens = np.minimum(np.load(LENGTHS / f"{trace}.npy").astype(np.int64)[:3000], 131072)
        order, offsets = best_fit_decreasing(tokens, 131072)
        times, rows = [], []
        for first, last in list(pairwise(offsets))[:-1][:12]:
            cu = np.concatenate([[0], np.cumsum(tokens[order[first:last]])])
            rules = [zigzag(cu, 16), adaptive(cu, 16, cost), mixed(cu, 16, cost)]
            times.append([cost.seconds(shards).max() for shards in rules])
            rows.append([received_rows(shards).sum() for shards in rules])
        document, choice, ours = np.mean(times, 0)
        assert ours <= min(document, choice) and np.mean(rows, 0)[2] <= np.mean(rows, 0)[0]


def test_wrong_arguments_are_refused():
    cost = ShardCost(flops_per_pair=1)
    for wrong in ({"slack": 0.9}, {"max_tokens": 4}):
        with pytest.raises(ValueError, match="even share, 5"):
            mixed([0, 10], 2, cost, **wrong)
    with pytest.raises(ValueError, match="got 0"):
        mixed([0, 10], 0, cost)
