"""Slices: a column of arrays, one per document, that are slices of a few flat arrays (Arrow chunks, runs read from a shard).

A list of arrays costs a microsecond per document and per look at it (type, shape, length); here these are columns
themselves, and an array is made only for who asks for one.

    >>> column = Slices([np.arange(5), np.arange(10, 14)], which=[1, 0], begin=[1, 0], stop=[3, 2])
    >>> column.tokens, column[0], list(column)
    (array([2, 2]), array([11, 12]), [array([11, 12]), array([0, 1])])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ..packing.packs import Int64


class Slices(Sequence[npt.NDArray[Any]]):
    """Documents ``flats[which[d]][begin[d]:stop[d]]``.

    Args:
        flats: arrays of one dimension.
        which, begin, stop: int[d] each; every slice must lie within its array, which is not checked.
    """

    def __init__(
        self, flats: Sequence[npt.NDArray[Any]], which: npt.ArrayLike, begin: npt.ArrayLike, stop: npt.ArrayLike
    ) -> None:
        self.flats = flats
        self.which, self.begin, self.stop = (np.asarray(each, np.int64) for each in (which, begin, stop))

    @property
    def tokens(self) -> Int64:
        """Values of each document, int64[d]."""
        return self.stop - self.begin

    @property
    def dtypes(self) -> set[np.dtype]:
        """Of the arrays that documents lie in."""
        if len(self.flats) == 1:
            return {self.flats[0].dtype}
        return {self.flats[flat].dtype for flat in set(self.which.tolist())}

    def cut(self, document: Int64, begin: Int64, tokens: Int64) -> list[npt.NDArray[Any]]:
        """So many values of these documents from ``begin`` on, int64[s] each: s views."""
        flats, first = self.flats, self.begin[document] + begin
        which, last = self.which[document].tolist(), (first + tokens).tolist()
        return [flats[flat][a:b] for flat, a, b in zip(which, first.tolist(), last, strict=True)]

    def __len__(self) -> int:
        return len(self.which)

    @overload
    def __getitem__(self, document: int) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, document: slice) -> list[npt.NDArray[Any]]: ...
    def __getitem__(self, document: int | slice) -> Any:
        if isinstance(document, slice):
            return [self[at] for at in range(len(self))[document]]
        return self.flats[self.which[document]][self.begin[document] : self.stop[document]]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return iter(self.cut(np.arange(len(self)), np.zeros(len(self), np.int64), self.tokens))
