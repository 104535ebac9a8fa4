"""Blend: shares that sum to one on every machine, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from equipoise import Lengths
from equipoise.packing.blend import ONE, Blend
from hypothesis import given, settings
from hypothesis import strategies as st


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_shares_are_the_weights_rounded_to_a_sum_of_one(weights: list[float]) -> None:
    shares = Blend(sizes=(1,) * len(weights), weights=tuple(weights), exhausted="all_exhausted").shares
    assert shares.dtype == np.int64 and shares.sum() == ONE
    assert (np.abs(shares - np.array(weights) / sum(weights) * ONE) < 1 + 1e-3).all()


def test_equal_remainders_go_to_the_first() -> None:
    shares = Blend(sizes=(1, 1, 1), weights=(1, 1, 1), exhausted="all_exhausted").shares
    assert shares.tolist() == [ONE // 3 + 1, ONE // 3, ONE // 3]


def test_numbers_of_numpy_are_taken_as_numbers() -> None:
    """Frozen, hashable and equal however the numbers came: it goes into the digest of a plan."""
    blend = Blend(sizes=np.array([3, 4]), weights=np.array([0.5, 1.5], np.float32), exhausted="first_exhausted")
    assert blend == Blend(sizes=(3, 4), weights=(0.5, 1.5), exhausted="first_exhausted")
    assert hash(blend) and blend.offsets.tolist() == [0, 3, 7]
    assert "3 documents at 0.25" in str(blend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exhausted": "never"}, "exhausted must be one of first_exhausted, .*; got 'never'"),
        ({"weights": (1.0,)}, "one weight for each; got 2 sources, 1 weights"),
        ({"sizes": (), "weights": ()}, "at least one source"),
        ({"sizes": (3, -1)}, "source 1 has -1"),
        ({"weights": (1.0, 0.0)}, "must be positive and finite; source 1 has 0.0"),
        ({"weights": (float("nan"), 1.0)}, "source 0 has nan"),
        ({"weights": (float("inf"), 1.0)}, "source 0 has inf"),
        ({"weights": (1.0, 1e-12)}, "at least 1e-9 of the sum of weights; source 1 has 1e-12 of"),
    ],
)
def test_what_mixes_nothing_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blend(**{"sizes": (3, 4), "weights": (1.0, 1.0), "exhausted": "all_exhausted", **options})


def test_the_sources_make_up_the_index() -> None:
    blend = Blend(sizes=(3, 4), weights=(1, 1), exhausted="all_exhausted")
    assert Lengths(tokens=np.arange(7), blend=blend).blend is blend
    with pytest.raises(ValueError, match="have 7 documents in all, the index 6"):
        Lengths(tokens=np.arange(6), blend=blend)
