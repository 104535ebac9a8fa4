"""A column of slices is the list of arrays that it stands for."""

from __future__ import annotations

import numpy as np
from equipoise.loaders.slices import Slices
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
