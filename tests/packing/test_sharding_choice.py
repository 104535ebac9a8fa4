"""python -m pytest tests/packing/test_sharding_choice.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from equipoise.packing.cost import ModelShape
from equipoise.packing.efficiency import kernel_seconds
from equipoise.packing.sharding_choice import ShardCost, adaptive, received_rows
from equipoise.packing.shards import contiguous, striped, zigzag
from hypothesis import given, settings
from hypothesis import strategies as st

LAYER = 4 * 64 * 128
RULES = {
    "contiguous": contiguous,
    "document": zigzag,
    "sequence": lambda cu, cp: zigzag(cu, cp, per="sequence"),
    "striped": striped,
}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 40), max_size=8), st.integers(1, 6), st.sampled_from(list(RULES)),
    st.sampled_from([1e-9, 1e-5]),
)  # fmt: skip
def test_rows_and_seconds_are_counted_per_document(lengths, cp, rule, row_seconds):
    """By hand: each document on each rank is one kernel of its rows; it needs all rows before its last one."""
    cu = np.cumsum([0, *lengths])
    shards = RULES[rule](cu, cp)
    cost = ShardCost(flops_per_pair=LAYER, row_seconds=row_seconds)
    rows, seconds = [], []
    for rank in range(cp):
        held, needed, time = shards.positions(rank), 0, 0.0
        for first, last in pairwise(cu):
            mine = held[(held >= first) & (held < last)] - first
            if len(mine):
                needed += int(mine.max()) + 1 - len(mine)
                pairs = int((mine + 1).sum())
                time += float(kernel_seconds(pairs, len(mine), max(2 * pairs // len(mine) - 1, 1), LAYER))
        rows.append(needed)
        seconds.append(max(time, needed * row_seconds))
    assert received_rows(shards).tolist() == rows
    np.testing.assert_allclose(cost.seconds(shards), seconds, rtol=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 8), st.sampled_from([0.0, 4e-8, 1e-6]))
def test_adaptive_is_the_faster_of_two(lengths, cp, row_seconds):
    cu = np.cumsum([0, *lengths])
    cost = ShardCost(flops_per_pair=LAYER, row_seconds=row_seconds)
    both = [zigzag(cu, cp, per=per) for per in ("sequence", "document")]
    chosen = adaptive(cu, cp, cost)
    assert cost.seconds(chosen).max() == min(cost.seconds(one).max() for one in both)
    assert any(np.array_equal(chosen.segments, one.segments) for one in both)


def test_short_documents_stay_whole_and_long_ones_are_cut():
    cost = ShardCost(flops_per_pair=LAYER)
    short = np.arange(0, 65537, 256)
    assert len(adaptive(short, 8, cost).segments) == 256
    long = np.cumsum([0, 40000, 9000, 7000, 9536])
    assert np.array_equal(adaptive(long, 8, cost).segments, zigzag(long, 8).segments)


def test_another_kernel_may_stand_in():
    cost = ShardCost(flops_per_pair=1, kernel=lambda pairs, rows, keys, flops: np.asarray(rows * 1.0))
    assert cost.seconds(zigzag([0, 10, 12], 2)).tolist() == [6, 6]


def test_the_cost_of_a_shape():
    shape = ModelShape(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=64, vocab_size=0)
    cost = ShardCost.of(shape, bytes_per_second=1e9)
    assert cost.flops_per_pair == shape.flops_per_pair and cost.row_seconds == pytest.approx(2 * 2 * 2 * 8 * 2 / 1e9)


def test_no_tokens_cost_nothing():
    assert ShardCost(flops_per_pair=1).seconds(zigzag([0, 0], 3)).tolist() == [0, 0, 0]


def test_wrong_arguments_are_refused():
    for wrong in ({"flops_per_pair": 0}, {"flops_per_pair": 1, "row_seconds": -1}):
        with pytest.raises(ValueError, match="flops_per_pair > 0"):
            ShardCost(**wrong)
