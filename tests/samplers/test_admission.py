"""Admission: steps that cut the stream without loss."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from equipoise import Lengths
from equipoise.samplers.admission import LAST, Admission, StepSize
from equipoise.samplers.items import Items
from equipoise.samplers.order import Shuffled
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import document_lengths, step_sizes


@given(data=st.data(), lengths=document_lengths(empty=False), last=st.sampled_from(LAST), shuffle=st.booleans())
@settings(max_examples=200, deadline=None)
def test_steps_cut_the_stream_exactly_once(data: st.DataObject, lengths: list[int], last: str, shuffle: bool) -> None:
    """Each epoch's documents come once: in their epoch, or carried into a later one; dropped ones are counted."""
    cap = max(lengths)
    size = StepSize(**data.draw(step_sizes(dp=1, longest=cap)))
    items = Items.of(Lengths.from_array(np.array(lengths)), capacity=cap)
    try:
        admission = Admission(
            items=items,
            order=Shuffled(size=len(items), seed=0, shuffle=shuffle),
            step_size=size,
            capacity=cap,
            last=last,
        )
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
    walked = Admission(
        items=items, order=Shuffled(size=len(items), seed=0), step_size=StepSize(**options), capacity=cap
    )
    steps = walked.num_steps(1)
    windows = [walked.window(1, step) for step in range(steps)]
    jumped = Admission(
        items=items, order=Shuffled(size=len(items), seed=0), step_size=StepSize(**options), capacity=cap
    ).window(1, steps - 1)
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
        Admission(
            items=items, order=Shuffled(size=len(items), seed=0), step_size=StepSize(tokens_per_step=8), capacity=9
        )
    with pytest.raises(ValueError, match="last must be one of"):
        Admission(
            items=items,
            order=Shuffled(size=len(items), seed=0),
            step_size=StepSize(documents_per_step=1),
            capacity=9,
            last="wrap",
        )
