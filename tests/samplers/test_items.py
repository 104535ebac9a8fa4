"""Items: the policies for empty and too long documents against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from equipoise import Lengths
from equipoise.samplers.admission import Admission, StepSize
from equipoise.samplers.items import Items
from equipoise.samplers.order import Shuffled
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import document_lengths


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
    spans, targets, _ = items.spans(np.arange(len(items)))
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


def test_indexed_targets_are_used_and_unknown_ones_admitted() -> None:
    index = Lengths(tokens=np.array([6, 4, 9]), targets=np.array([2, 0, 7]))
    items = Items.of(index, capacity=9)
    admission = Admission(
        items=items, order=Shuffled(size=len(items), seed=0), step_size=StepSize(documents_per_step=3), capacity=9
    )
    window = admission.window(0, 0)
    assert window is not None and window.num_targets == 9
    split = Items.of(index, capacity=5, too_long="split")
    window = Admission(
        items=split, order=Shuffled(size=len(split), seed=0), step_size=StepSize(documents_per_step=9), capacity=5
    ).window(0, 0)
    assert window is not None and window.num_targets is None  # a piece's share of an indexed count is not known
