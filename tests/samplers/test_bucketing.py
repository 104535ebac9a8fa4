"""python -m pytest tests/samplers/test_bucketing.py"""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from equipoise.samplers.bucketing import buckets, enough_buckets, even_parts
from hypothesis import given, settings
from hypothesis import strategies as st

lengths = st.lists(st.integers(0, 30), min_size=1, max_size=9)


def splits(n: int, parts: int) -> list[list[int]]:
    """Every way to cut n items into at most `parts` runs, as offsets."""
    return [[0, *cuts, n] for k in range(min(parts, n)) for cuts in combinations(range(1, n), k)]


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 5))
def test_buckets_lose_least(tokens, count):
    longest, bucket = buckets(tokens, count)
    assert len(longest) <= count and (np.diff(longest) > 0).all()
    rounded = longest[bucket]
    assert (rounded >= tokens).all() and set(bucket.tolist()) == set(range(len(longest)))
    assert all(max(t for t, b in zip(tokens, bucket, strict=True) if b == i) == top for i, top in enumerate(longest))
    rising = sorted(tokens)
    least = min(
        sum(rising[b - 1] * (b - a) - sum(rising[a:b]) for a, b in pairwise(cuts))
        for cuts in splits(len(rising), count)
    )
    assert rounded.sum() - sum(tokens) == least


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 6))
def test_even_parts_have_the_least_largest(tokens, parts):
    offsets = even_parts(tokens, parts)
    assert (
        len(offsets) == parts + 1 and offsets[0] == 0 and offsets[-1] == len(tokens) and (np.diff(offsets) >= 0).all()
    )
    largest = max(sum(tokens[a:b]) for a, b in pairwise(offsets))
    assert largest == min(max(sum(tokens[a:b]) for a, b in pairwise(cuts)) for cuts in splits(len(tokens), parts))


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 3), st.integers(0, 200))
def test_enough_buckets_lose_at_most_half_of_what_is_free(tokens, count, room):
    capacity = sum(tokens) + room
    longest, bucket = enough_buckets(tokens, count, capacity)
    assert 2 * longest[bucket].sum() <= sum(tokens) + capacity
    if len(longest) > count:
        fewer, of = buckets(tokens, len(longest) - 1)
        assert 2 * fewer[of].sum() > sum(tokens) + capacity


def test_of_equal_partitions_the_last_begins_latest():
    longest, bucket = buckets([1, 2, 3], 2)
    assert longest.tolist() == [2, 3] and bucket.tolist() == [0, 0, 1]


def test_hundreds_of_lengths():
    tokens = np.random.default_rng(0).lognormal(6, 1.5, 512).astype(np.int64)
    longest, bucket = buckets(tokens, 16)
    assert len(longest) == 16 and longest[bucket].sum() < 1.25 * tokens.sum()
    assert even_parts(np.zeros(0, np.int64), 3).tolist() == [0, 0, 0, 0]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="count=0"):
        buckets([1], 0)
    with pytest.raises(ValueError, match="parts=0"):
        even_parts([1], 0)
