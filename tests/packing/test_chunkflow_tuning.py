"""python -m pytest tests/packing/test_chunkflow_tuning.py"""

from __future__ import annotations

import numpy as np
import pytest
from equipoise.packing.chunkflow import chunks
from equipoise.packing.chunkflow_places import place
from equipoise.packing.chunkflow_tuning import tune
from equipoise.packing.cost import CostModel
from hypothesis import given, settings
from hypothesis import strategies as st

COST = CostModel(seconds_per_pair=1e-9, seconds_per_token=1e-6, bytes_per_token=1.0, bytes_fixed=100.0)
MIX = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 600)), min_size=1, max_size=25)


def seconds_of(lengths: list[int], chunk_tokens: int, keep: int, dp: int, overhead: float) -> float:
    made = chunks(lengths, chunk_tokens)
    units = COST.units(made.pairs, made.tokens)
    forward = units // 3 + round(overhead * 1e9)
    backward = units - units // 3 + round(overhead * 1e9)
    placement = place(made.groups, forward, backward, dp=dp, keep=keep, sync="slot")
    return placement.cost(forward, backward, keep, "slot") / 1e9


@settings(max_examples=200, deadline=None)
@given(MIX, st.integers(1, 3), st.integers(1, 800), st.sampled_from([0.0, 1e-5, 1e-3]))
def test_nothing_that_fits_is_faster(lengths, dp, room, overhead):
    options = {"documents_per_step": 100, "dp": dp, "memory_bytes": 100.0 + room, "seconds_per_operation": overhead}
    chunk_tokens, keep = tune(lengths, COST, **options)
    assert chunk_tokens * keep <= room
    assert keep == 1 or (keep - 1) * chunk_tokens < max(lengths), "keeps what no document has"
    chosen = seconds_of(lengths, chunk_tokens, keep, dp, overhead)
    for size in (2**bits for bits in range(10)):
        if size <= room and size < 2 * max(lengths):
            assert chosen <= seconds_of(lengths, size, room // size, dp, overhead)


def test_dear_operations_speak_for_large_chunks():
    lengths = [30] * 200 + [4000]
    options = {"documents_per_step": 201, "dp": 2, "memory_bytes": 1124.0}
    cheap, _ = tune(lengths, COST, seconds_per_operation=1e-8, **options)
    dear, keep = tune(lengths, COST, seconds_per_operation=1e-2, **options)
    assert cheap < dear == 1024 and keep == 1


def test_the_store_and_chunks_in_flight_take_memory():
    options = {"documents_per_step": 1, "dp": 1, "seconds_per_operation": 1e-2, "memory_bytes": 1124.0}
    assert tune([512], COST, **options) == (512, 1)
    assert tune([512], COST, store_bytes_per_token=1.5, **options) == (256, 1)
    assert tune([512], COST, in_flight=3, **options) == (256, 1)


def test_a_pipeline_may_be_scored_instead():
    asked = []

    def step_seconds(placement, forward, backward, keep):
        asked.append((placement.num_slots, len(forward), keep))
        return -float(placement.num_slots)

    smallest = tune(
        [64], COST, documents_per_step=1, dp=1, memory_bytes=164, seconds_per_operation=0, step_seconds=step_seconds
    )
    assert smallest == (1, 64) and asked[:2] == [(1, 1, 1), (2, 2, 2)]


def test_what_does_not_fit_is_refused():
    options = {"documents_per_step": 1, "dp": 1, "seconds_per_operation": 0.0}
    with pytest.raises(ValueError, match="Not one token fits"):
        tune([8], COST, memory_bytes=100.0, **options)
    with pytest.raises(ValueError, match="3 tokens fit into memory, too few for 4 chunks in flight"):
        tune([8], COST, memory_bytes=103.0, in_flight=3, **options)
    with pytest.raises(ValueError, match="tune needs a sample"):
        tune(np.zeros(0, np.int64), COST, memory_bytes=1000.0, **options)
