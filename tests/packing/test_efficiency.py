"""python -m pytest tests/packing/test_efficiency.py"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from equipoise.packing.efficiency import efficiency, kernel_seconds
from hypothesis import given, settings
from hypothesis import strategies as st

TIMING = Path(__file__).parents[3] / "shared" / "lengths" / "h100_attention_timing.psv"


def test_the_table_comes_out_as_it_went_in():
    whole = {32: 12, 64: 40, 128: 85, 256: 139, 512: 204, 1024: 283, 2048: 322, 4096: 348, 8192: 361, 16384: 370}
    eighth = {128: 15, 256: 39, 512: 100, 1024: 226, 2048: 279, 4096: 324, 8192: 348}
    assert efficiency(list(whole), list(whole)) == pytest.approx(list(whole.values()), rel=1e-12)
    lengths = np.array(list(eighth))
    assert efficiency(lengths // 8, lengths) == pytest.approx(list(eighth.values()), rel=1e-12)


@pytest.mark.skipif(not TIMING.exists(), reason="the measured timings are not part of the project")
def test_halves_and_quarters_that_are_not_in_the_table_are_within_14_percent_of_the_measured():
    rows = [row for row in csv.DictReader(TIMING.open(), delimiter="|") if row["tp"] == "1"]
    cp = np.array([int(row["cp"]) for row in rows])
    k = 32768 // np.array([int(row["batch_size"]) for row in rows])
    measured = 4 * 64 * 128 * 32768 * (k / 2) / cp / np.array([float(row["total_latency(ms)"]) for row in rows]) / 1e9
    used = (k >= 128) & (cp < 8)
    error = efficiency(k // cp, k)[used] / measured[used] - 1
    assert np.abs(error).max() < 0.14 and np.abs(error).mean() < 0.05


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2**17), st.integers(1, 2**17))
def test_a_row_more_in_the_same_tile_is_worth_more_speed(q, k):
    q = min(q, k)
    speed, next_row = efficiency([q, q + 1], [k, k])
    assert 0 < speed <= 370
    if q % 128 and q < k:
        assert next_row > speed


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2**17))
def test_longer_documents_run_faster(k):
    assert efficiency(128 * k, 128 * k) <= efficiency(128 * (k + 1), 128 * (k + 1))


def test_seconds_follow_from_pairs_and_speed():
    pairs = 4096 * 4097 // 2
    assert kernel_seconds(pairs, 4096, 4096, 4 * 64 * 128) == pytest.approx(pairs * 32768 / 348e12)
    assert kernel_seconds([0], [1], [1], 1.0).tolist() == [0.0]


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="at least 1 row and 1 key; got 0 and 5"):
        efficiency([0], [5])
    assert efficiency([], []).shape == (0,)
