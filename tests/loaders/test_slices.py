"""A column of slices is the list of arrays that it stands for."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from equipoise.loaders.slices import Flats, Slices, slices_of_rows
from hypothesis import given, settings
from hypothesis import strategies as st


@given(data=st.data(), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=3), count=st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_it_is_the_list_of_its_slices(data: st.DataObject, sizes: list[int], count: int) -> None:
    flats = [
        np.arange(10 * at, 10 * at + size, dtype=kind)
        for at, (size, kind) in enumerate(zip(sizes, "iqH", strict=False))
    ]
    which = [data.draw(st.integers(0, len(flats) - 1)) for _ in range(count)]
    ends = [sorted(data.draw(st.integers(0, sizes[flat])) for _ in range(2)) for flat in which]
    column = Slices(flats, which, [begin for begin, _ in ends], [stop for _, stop in ends])
    truth = [flats[flat][begin:stop] for flat, (begin, stop) in zip(which, ends, strict=True)]
    assert len(column) == count and column.tokens.tolist() == list(map(len, truth))
    for held in (list(column), column[:], [column[at] for at in range(count)]):
        assert [(each.tolist(), each.dtype) for each in held] == [(each.tolist(), each.dtype) for each in truth]
    if len(flats) > 1:
        assert column.dtypes == {each.dtype for each in truth}
    documents = np.array([at for at in range(count) if len(truth[at])], np.int64)
    pieces = column.cut(documents, np.ones(len(documents), np.int64), column.tokens[documents] - 1)
    assert [piece.tolist() for piece in pieces] == [truth[at][1:].tolist() for at in documents]


KINDS = ["<i4", "<u2", "<i8", "<u1", "<u4", ">i4", "<u8", "<i2"]


@st.composite
def columns(draw: st.DrawFn) -> tuple[Slices | list[np.ndarray], list[np.ndarray]]:
    """A column, as slices or as a list, of arrays that kernels can read or cannot; and its documents."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    flats = [rng.integers(0, 100, 3 * size).astype(kinds[at % len(kinds)]) for at, size in enumerate(sizes)]
    shape = draw(st.sampled_from(["plain", "strided", "unaligned", "read-only"]))
    if shape == "strided":
        flats = [flat[::2] for flat in flats]
    elif shape == "unaligned":
        flats = [np.frombuffer(b"x" + flat.tobytes(), np.uint8)[1:].view(flat.dtype) for flat in flats]
    elif shape == "read-only":
        for flat in flats:
            flat.flags.writeable = False
    which = rng.integers(0, len(flats), draw(st.integers(1, 6)))
    ends = np.sort([rng.integers(0, len(flats[flat]) + 1, 2) for flat in which], axis=1)
    truth = [flats[flat][a:b] for flat, (a, b) in zip(which, ends.tolist(), strict=True)]
    return (Slices(flats, which, ends[:, 0], ends[:, 1]) if draw(st.booleans()) else truth), truth


@given(held=columns(), offset=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_kernels_copy_what_slices_of_arrays_are(
    held: tuple[Slices | list[np.ndarray], list[np.ndarray]], offset: int, seed: int
) -> None:
    """Segments of the documents, and what is ahead of and behind them, whatever type the values are of."""
    column, truth = Slices.of(held[0]), held[1]
    rng = np.random.default_rng(seed)
    document = rng.integers(0, len(truth), 5)
    ends = np.sort([rng.integers(0, len(truth[at]) + 1, 2) for at in document], axis=1)
    begin, tokens, empty = ends[:, 0].copy(), ends[:, 1] - ends[:, 0], rng.random(5) < 0.2
    length = np.array([rng.integers(0, len(ids) + 1) for ids in truth])  # documents may be cut short
    length = np.maximum(length, [max([0, *ends[document == at, 1]]) for at in range(len(truth))])
    ids, lowest = column.widened(document, begin, tokens, empty)
    due: tuple[list[int], list[int], list[int]] = ([], [], [])
    for at, (a, b) in zip(document.tolist(), ends.tolist(), strict=True):
        nothing, values = empty[len(due[2])], truth[at].astype(np.int64).tolist()
        due[0].extend([0] * (b - a) if nothing else values[a:b])
        seen = [
            values[place] if place < length[at] and not nothing else -100 for place in range(a + offset, b + offset)
        ]
        due[1].extend(seen)
        due[2].append(-101 if nothing else values[b] if b < length[at] else -100)
    assert ids.tolist() == due[0] and lowest == 0 and ids.dtype == np.int64
    assert column.ahead(document, begin, tokens, empty, length, offset).tolist() == due[1]
    assert column.behind(document, ends[:, 1].copy(), empty, length).tolist() == due[2]


def test_the_lowest_value_is_told() -> None:
    one, all_of_it = np.zeros(1, np.int64), np.array([5])
    ids = np.array([3, 1, -7, 4, 2], np.int32)
    for kind, lowest in ((np.int32, -7), (np.int64, -7), (np.uint16, 0)):
        column = Slices.of([ids.astype(kind)])
        assert column.widened(one, one, all_of_it, np.zeros(1, bool))[1] == lowest


@pytest.mark.parametrize(("begin", "stop"), [(3, 9), (-1, 4), (7, 8)])
def test_a_slice_outside_its_array_is_refused_before_it_is_read(begin: int, stop: int) -> None:
    column = Slices([np.arange(5), np.arange(6)], [0, 1], [0, begin], [5, stop])
    at, none, empty = np.array([1]), np.zeros(1, np.int64), np.zeros(1, bool)
    size = np.array([5, stop - begin])
    told = rf"number 1 of this pack is {begin} … {stop} of 6"
    with pytest.raises(ValueError, match=told):
        column.widened(at, none, size[1:], empty)
    with pytest.raises(ValueError, match=told):
        column.ahead(at, none - 1, size[1:] + 1, empty, size + 1, 1)
    if begin >= 0:
        with pytest.raises(ValueError, match=told):
            column.behind(at, np.array([6 - begin]), empty, size + 9)


def test_addresses_stay_in_their_process_and_arrays_alive() -> None:
    column = Slices(Flats([np.arange(4)]), [0, 0], [0, 1], [2, 4])
    address = column.flats.place[0, 0]
    twin = pickle.loads(pickle.dumps(column))
    assert twin.flats.place[0, 0] != address and [each.tolist() for each in twin] == [[0, 1], [1, 2, 3]]
    assert [each.tolist() for each in twin.take([1, 1, 0])] == [[1, 2, 3], [1, 2, 3], [0, 1]]


@given(sizes=st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4), data=st.data())
@settings(max_examples=200, deadline=None)
def test_rows_are_found_in_chunks(sizes: list[list[int]], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([np.int32, np.int64]))
    offsets = [np.cumsum([0, *chunk]).astype(kind) for chunk in sizes]
    flats = [100 * at + np.arange(sum(chunk)) for at, chunk in enumerate(sizes)]
    truth = [flat[a:b].tolist() for flat, ends in zip(flats, offsets, strict=True) for a, b in pairwise(ends.tolist())]
    starts = np.cumsum([0, *map(len, sizes)])[:-1]
    rows = np.array(data.draw(st.lists(st.integers(0, max(len(truth) - 1, 0)), max_size=5 if truth else 0)), np.int64)
    column = slices_of_rows(Flats(flats), Flats(offsets), starts, rows)
    assert [each.tolist() for each in column] == [truth[row] for row in rows]
    for row in (-1, len(truth)):
        with pytest.raises(IndexError, match=f"no row {row}"):
            slices_of_rows(Flats(flats), Flats(offsets), starts, np.array([row]))
