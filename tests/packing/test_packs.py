"""python -m pytest tests/packing/test_packs.py"""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from equipoise.packing.packs import Packs, Spans
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def packs_and_lists(draw: st.DrawFn) -> tuple[Packs, list[list[tuple[int, int, int, int]]]]:
    """Packs, and the same as lists of (document, start, stop, pairs)."""
    span = st.tuples(st.integers(-1, 9), st.integers(0, 50), st.integers(0, 50), st.integers(0, 99))
    lists = draw(st.lists(st.lists(span.map(lambda s: (s[0], s[1], s[1] + s[2], s[3])), max_size=5), max_size=6))
    flat = np.array([span for spans in lists for span in spans], dtype=np.int64).reshape(-1, 4)
    spans = Spans(document=flat[:, 0], start=flat[:, 1], stop=flat[:, 2], pairs=flat[:, 3])
    return Packs(spans=spans, offsets=np.cumsum([0, *map(len, lists)])), lists


def as_lists(packs: Packs) -> list[list[tuple[int, int, int, int]]]:
    rows = list(
        zip(
            *(a.tolist() for a in (packs.spans.document, packs.spans.start, packs.spans.stop, packs.spans.pairs)),
            strict=True,
        )
    )
    return [rows[a:b] for a, b in pairwise(packs.offsets)]


@settings(max_examples=200, deadline=None)
@given(packs_and_lists(), st.data())
def test_packs_are_lists_of_spans(drawn, data):
    packs, lists = drawn
    assert len(packs) == len(lists)
    assert packs.tokens.tolist() == [sum(stop - start for _, start, stop, _ in spans) for spans in lists]
    assert packs.pairs.tolist() == [sum(span[3] for span in spans) for spans in lists]
    for i, spans in enumerate(lists):
        cu_seqlens = packs.cu_seqlens(i)
        assert cu_seqlens.dtype == np.int32
        assert np.diff(cu_seqlens).tolist() == [stop - start for _, start, stop, _ in spans] and cu_seqlens[0] == 0
    if lists:
        chosen = data.draw(st.lists(st.integers(0, len(lists) - 1)))
        assert as_lists(packs.take(chosen)) == [lists[i] for i in chosen]
    assert as_lists(pickle.loads(pickle.dumps(packs))) == lists
    assert str(packs)


@settings(max_examples=200, deadline=None)
@given(packs_and_lists(), st.integers(0, 120))
def test_check_accepts_exactly_what_is_sound(drawn, cap):
    """Brute force over single tokens: no pack or span is empty, the cap is kept, no token of a document comes twice."""
    packs, lists = drawn
    held = [(doc, t) for spans in lists for doc, start, stop, _ in spans if doc >= 0 for t in range(start, stop)]
    sound = (
        all(spans and all(stop > start for _, start, stop, _ in spans) for spans in lists)
        and all(sum(stop - start for _, start, stop, _ in spans) <= cap for spans in lists)
        and len(held) == len(set(held))
    )
    if sound:
        packs.check(cap)
    else:
        with pytest.raises(ValueError):
            packs.check(cap)


def test_check_names_what_is_wrong():
    whole = Spans.whole([4, 6], [10, 21])
    with pytest.raises(ValueError, match="Pack 1 exceeds the cap of 5 tokens; the largest holds 6"):
        Packs(spans=whole, offsets=[0, 1, 2]).check(5)
    with pytest.raises(ValueError, match="Pack 0 is empty"):
        Packs(spans=whole, offsets=[0, 0, 2]).check(10)
    with pytest.raises(ValueError, match="Span 0 is empty"):
        Packs(spans=Spans.whole([0, 2], [0, 3]), offsets=[0, 2]).check(10)
    with pytest.raises(ValueError, match="Span 2 repeats"):
        Packs(spans=Spans.whole([4, 6, 2], [1, 1, 1], document=[0, 1, 0]), offsets=[0, 3]).check(20)
    fillers = Spans.whole([2, 2], [0, 0], document=[-1, -1])
    Packs(spans=fillers, offsets=[0, 1, 2]).check(2)


def test_pieces_of_one_document_may_lie_in_different_packs():
    spans = Spans(document=[3, 3, 3], start=[8, 0, 4], stop=[9, 4, 8], pairs=[1, 10, 10])
    Packs(spans=spans, offsets=[0, 1, 3]).check(8)


def test_spans_take_and_concat():
    spans = Spans.whole([5, 3, 2], [15, 6, 3], document=[7, 8, 9])
    assert spans.take(spans.tokens > 2).document.tolist() == [7, 8]
    assert spans.take([]).document.dtype == np.int64 and len(spans.take([])) == 0
    both = Spans.concat([spans.take([2]), spans])
    assert both.document.tolist() == [9, 7, 8, 9] and both.pairs.tolist() == [3, 15, 6, 3]
    assert len(Spans.concat([])) == 0


def test_wrong_arrays_are_refused():
    with pytest.raises(ValueError, match="one length"):
        Spans(document=[0], start=[0, 1], stop=[1, 2], pairs=[1, 1])
    with pytest.raises(ValueError, match="stop must be integers"):
        Spans(document=[0], start=[0], stop=[1.5], pairs=[1])
    spans = Spans.whole([1, 2], [1, 3])
    for offsets in ([0, 1], [1, 2], [0, 3, 2], []):
        with pytest.raises(ValueError, match="offsets must rise from 0"):
            Packs(spans=spans, offsets=offsets)
    with pytest.raises(ValueError, match="one number for each of the 2 spans"):
        Packs(spans=spans, offsets=[0, 2]).sums([1])


def test_cu_seqlens_beyond_32_bits_are_refused():
    packs = Packs(spans=Spans.whole([2**30, 2**30], [1, 1]), offsets=[0, 2])
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 tokens"):
        packs.cu_seqlens(0)
