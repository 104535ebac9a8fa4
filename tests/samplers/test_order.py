"""Order: a permutation, the same on every machine."""

from __future__ import annotations

import numpy as np
from equipoise.samplers.order import key_of, permute
from hypothesis import given, settings
from hypothesis import strategies as st


@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=200, deadline=None)
def test_permute_is_a_bijection_that_can_be_read_from_anywhere(size: int, key: int) -> None:
    whole = permute(0, size, size, key)
    assert np.array_equal(np.sort(whole), np.arange(size))
    middle = size // 3
    assert np.array_equal(permute(middle, size - middle, size, key), whole[middle:])


def test_permute_shuffles_evenly() -> None:
    """Every document is about equally likely to come first; neighbours do not stay neighbours."""
    first = np.array([permute(0, 1, 10, key_of(seed, 0))[0] for seed in range(4000)])
    counts = np.bincount(first, minlength=10)
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001
    order = permute(0, 10_000, 10_000, key_of(1, 2))
    assert (np.abs(np.diff(order)) == 1).mean() < 0.01
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_keys_differ_by_epoch_and_seed_and_are_fixed() -> None:
    assert len({key_of(seed, epoch) for seed in range(50) for epoch in range(50)}) == 2500
    assert key_of(3, 4) == 10271542606773647558  # the order of a run must survive upgrades
