"""Admission: a permutation, the policies for odd documents, and steps that cut the stream without loss."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from equipoise import Lengths
from equipoise.samplers.order import Admission, Items, StepSize, key_of, permute
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import document_lengths, step_sizes

LAST = ("partial", "drop", "carry")


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


def brute_pieces(lengths: list[int], cap: int, policy: str) -> list[tuple[int, int, int]]:
    pieces = []
    for document, tokens in enumerate(lengths):
        if tokens == 0 or (tokens > cap and policy == "drop"):
            continue
        stop = min(tokens, cap) if policy == "truncate" else tokens
        pieces += [(document, at, min(at + cap, stop)) for at in range(0, stop, cap)]
    return sorted(pieces)


@given(lengths=document_lengths(), cap=st.integers(1, 100), policy=st.sampled_from(["drop", "truncate", "split"]))
@settings(max_examples=200, deadline=None)
def test_policies_match_brute_force(lengths: list[int], cap: int, policy: str) -> None:
    expected = brute_pieces(lengths, cap, policy)
    index = Lengths.from_array(np.array(lengths))
    if not expected:
        with pytest.raises(ValueError, match="no document is left"):
            Items.of(index, capacity=cap, too_long=policy)
        return
    items = Items.of(index, capacity=cap, too_long=policy)
    spans, targets = items.spans(np.arange(len(items)))
    got = sorted(zip(spans.document.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True))
    assert got == expected
    assert items.empty == lengths.count(0)
    assert items.num_long == sum(tokens > cap for tokens in lengths)
    kept = sum(stop - start for _, start, stop in expected)
    assert items.lost_tokens == sum(lengths) - kept
    assert np.array_equal(spans.pairs, spans.tokens * (spans.tokens + 1) // 2)
    assert targets is not None
    ends = {d: min(n, cap) if policy == "truncate" else n for d, n in enumerate(lengths)}
    brute = [
        stop - start - (stop == ends[d]) for d, start, stop in zip(spans.document, spans.start, spans.stop, strict=True)
    ]
    assert targets.tolist() == brute


def test_a_too_long_document_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match=r"at most 8 tokens.*document 2 has 9 and 1 of 3"):
        Items.of(Lengths.from_array(np.array([8, 1, 9])), capacity=8)


@given(data=st.data(), lengths=document_lengths(empty=False), last=st.sampled_from(LAST), shuffle=st.booleans())
@settings(max_examples=200, deadline=None)
def test_steps_cut_the_stream_exactly_once(data: st.DataObject, lengths: list[int], last: str, shuffle: bool) -> None:
    """Each epoch's documents come once: in their epoch, or carried into a later one; dropped ones are counted."""
    cap = max(lengths)
    size = StepSize(**data.draw(step_sizes(dp=1, longest=cap)))
    items = Items.of(Lengths.from_array(np.array(lengths)), capacity=cap)
    try:
        admission = Admission(items=items, step_size=size, capacity=cap, last=last, shuffle=shuffle)
    except ValueError as error:
        assert last != "partial" and "leaves no step" in str(error)
        return
    seen: list[int] = []
    for epoch in range(3):
        windows = [admission.window(epoch, step) for step in range(admission.num_steps(epoch))]
        assert admission.window(epoch, len(windows)) is None
        documents = [d for window in windows if window is not None for d in window.spans.document.tolist()]
        for window in windows:
            assert window is not None
            tokens = window.spans.tokens
            assert len(tokens) > 0
            if size.documents_per_step:
                assert len(tokens) <= size.documents_per_step
            elif size.tokens_per_step:
                assert tokens.sum() <= size.tokens_per_step
        if last == "partial":
            assert sorted(documents) == list(range(len(lengths)))
        elif last == "drop":
            assert len(set(documents)) == len(documents) == len(lengths) - admission.dropped(epoch)
        seen += documents
        if not shuffle and last == "partial":
            assert documents == list(range(len(lengths)))
    if last == "carry":
        counts = np.bincount(seen, minlength=len(lengths))
        assert counts.max() <= 3 and counts.min() >= 2 - (len(lengths) < 2)
        # what is missing after three epochs is exactly the tail of the third one's order
        assert 3 * len(lengths) - len(seen) == 3 * len(lengths) - admission.start(3)


@given(data=st.data(), lengths=document_lengths(empty=False))
@settings(max_examples=200, deadline=None)
def test_step_edges_are_greedy_and_the_same_from_any_start(data: st.DataObject, lengths: list[int]) -> None:
    """A step takes as many documents as fit; a fresh object asked for one late step agrees with one that walked there."""
    cap = max(lengths)
    options = data.draw(step_sizes(dp=1, longest=cap))
    items = Items.of(Lengths.from_array(np.array(lengths)), capacity=cap)
    walked = Admission(items=items, step_size=StepSize(**options), capacity=cap)
    steps = walked.num_steps(1)
    windows = [walked.window(1, step) for step in range(steps)]
    jumped = Admission(items=items, step_size=StepSize(**options), capacity=cap).window(1, steps - 1)
    assert jumped is not None and windows[-1] is not None
    assert jumped.spans.document.tolist() == windows[-1].spans.document.tolist()
    if "tokens_per_step" in options:
        for window, following in pairwise(windows):
            assert window is not None and following is not None
            assert window.spans.tokens.sum() + following.spans.tokens[0] > options["tokens_per_step"]


def test_step_size_is_checked_at_the_door() -> None:
    with pytest.raises(ValueError, match="exactly one"):
        StepSize()
    with pytest.raises(ValueError, match="exactly one"):
        StepSize(documents_per_step=1, tokens_per_step=1)
    with pytest.raises(ValueError, match="at least 1; got 0"):
        StepSize(documents_per_step=0)
    items = Items.of(Lengths.from_array(np.array([5, 9])), capacity=9)
    with pytest.raises(ValueError, match=r"tokens_per_step is 8, the longest document .* has 9"):
        Admission(items=items, step_size=StepSize(tokens_per_step=8), capacity=9)
    with pytest.raises(ValueError, match="last must be one of"):
        Admission(items=items, step_size=StepSize(documents_per_step=1), capacity=9, last="wrap")


def test_indexed_targets_are_used_and_unknown_ones_admitted() -> None:
    index = Lengths(tokens=np.array([6, 4, 9]), targets=np.array([2, 0, 7]))
    items = Items.of(index, capacity=9)
    admission = Admission(items=items, step_size=StepSize(documents_per_step=3), capacity=9)
    window = admission.window(0, 0)
    assert window is not None and window.num_targets == 9
    split = Items.of(index, capacity=5, too_long="split")
    window = Admission(items=split, step_size=StepSize(documents_per_step=9), capacity=5).window(0, 0)
    assert window is not None and window.num_targets is None  # a piece's share of an indexed count is not known
