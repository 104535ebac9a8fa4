"""Slices: a column of arrays, one per document, that are slices of a few flat arrays (Arrow chunks, runs read from a shard).

A list of arrays costs a microsecond per document and per look at it (type, shape, length); here these are columns
themselves, and an array is made only for who asks for one. Kernels read tokens where they lie, by address: a pack of
64K tokens is widened in some 5 µs. Every range is held against the array it lies in before a byte of it is read.

    >>> column = Slices([np.arange(5), np.arange(10, 14)], which=[1, 0], begin=[1, 0], stop=[3, 2])
    >>> column.tokens, column[0], list(column)
    (array([2, 2]), array([11, 12]), [array([11, 12]), array([0, 1])])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ..packing.packs import Int64
from .layout import IGNORE, PADDING


class Flats(Sequence[npt.NDArray[Any]]):
    """Arrays of one dimension, and where each lies in memory, which is told once: as long as this lives, so do they."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        self.arrays = arrays

    @cached_property
    def place(self) -> Int64:
        """int64[f, 2]: address of the first value, values."""
        held = [(array.__array_interface__["data"][0], len(array)) for array in self.arrays]
        return np.array(held, np.int64).reshape(-1, 2)

    @cached_property
    def like(self) -> npt.NDArray[Any] | None:
        """An empty array of the type of all; None where kernels cannot read them: of several types, or not of the machine's
        own integers one behind the other."""
        kinds = {array.dtype for array in self.arrays}
        kind = next(iter(kinds), np.dtype(np.int64))
        plain = len(kinds) < 2 and kind.kind in "iu" and kind.isnative
        if not plain or not all(array.flags.c_contiguous and array.flags.aligned for array in self.arrays):
            return None
        return np.empty(0, kind)

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, flat: Any) -> Any:
        return self.arrays[flat]

    def __reduce__(self) -> tuple:
        return Flats, (list(self.arrays),)  # addresses are this process's


class Slices(Sequence[npt.NDArray[Any]]):
    """Documents ``flats[which[d]][begin[d]:stop[d]]``.

    Args:
        flats: arrays of one dimension.
        which, begin, stop: int[d] each; every slice must lie within its array, which is checked when it is copied.
    """

    def __init__(
        self, flats: Sequence[npt.NDArray[Any]], which: npt.ArrayLike, begin: npt.ArrayLike, stop: npt.ArrayLike
    ) -> None:
        self.flats = flats if isinstance(flats, Flats) else Flats(flats)
        self.which, self.begin, self.stop = (np.ascontiguousarray(each, np.int64) for each in (which, begin, stop))

    @classmethod
    def of(cls, arrays: Sequence[npt.NDArray[Any]]) -> Slices:
        """A column of whole integer arrays (or this one) as kernels can read it: others are copied as int64."""
        if isinstance(arrays, Slices):
            if arrays.flats.like is not None:
                return arrays
            arrays = list(arrays)
        flats = Flats(arrays)
        if flats.like is None:
            flats = Flats([np.ascontiguousarray(array).astype(np.int64) for array in arrays])
        size = flats.place[:, 1]
        return cls(flats, np.arange(len(size)), np.zeros_like(size), size)

    @property
    def tokens(self) -> Int64:
        """Values of each document, int64[d]."""
        return self.stop - self.begin

    @property
    def dtypes(self) -> set[np.dtype]:
        """Of the arrays that documents lie in."""
        if self.flats.like is not None:
            return {self.flats.like.dtype}
        return {self.flats[flat].dtype for flat in set(self.which.tolist())}

    def take(self, documents: npt.ArrayLike) -> Slices:
        """The documents at these places, int[k], in that order."""
        at = np.asarray(documents, np.int64)
        return Slices(self.flats, self.which[at], self.begin[at], self.stop[at])

    def cut(self, document: Int64, begin: Int64, tokens: Int64) -> list[npt.NDArray[Any]]:
        """So many values of these documents from ``begin`` on, int64[s] each: s views."""
        flats, first = self.flats.arrays, self.begin[document] + begin
        which, last = self.which[document].tolist(), (first + tokens).tolist()
        return [flats[flat][a:b] for flat, a, b in zip(which, first.tolist(), last, strict=True)]

    def widened(self, document: Int64, begin: Int64, tokens: Int64, empty: npt.NDArray[np.bool_]) -> tuple[Int64, int]:
        """The values of segments (documents int64[s], where in them, how many) end to end, 0 in those that are empty,
        int64[t]; and the lowest of them and 0. For columns that ``of`` made, as what follows."""
        out = np.empty(int(tokens.sum()), np.int64)
        lowest, outside = _widen(*self._held(), document, begin, tokens, empty, out)
        self._refuse(outside)
        return out, lowest

    def ahead(
        self,
        document: Int64,
        begin: Int64,
        tokens: Int64,
        empty: npt.NDArray[np.bool_],
        length: Int64,
        offset: int,
    ) -> Int64:
        """int64[t]: for each value the one ``offset`` further on in its document, which has ``length`` int64[d]; -100 where
        there is none and in segments that are empty."""
        out = np.empty(int(tokens.sum()), np.int64)
        self._refuse(_ahead(*self._held(), document, begin, tokens, empty, length, offset, out))
        return out

    def behind(self, document: Int64, stop: Int64, empty: npt.NDArray[np.bool_], length: Int64) -> Int64:
        """int64[s]: the value behind each segment, which ends at ``stop``; -100 behind a document's last, -101 where empty."""
        out = np.empty(len(document), np.int64)
        self._refuse(_behind(*self._held(), document, stop, empty, length, out))
        return out

    def _held(self) -> tuple[Int64, npt.NDArray[Any], Int64, Int64]:
        like = self.flats.like
        assert like is not None, "kernels read what Slices.of made"
        return self.flats.place, like, self.which, self.begin

    def _refuse(self, outside: int) -> None:
        if outside >= 0:
            flat = int(self.which[outside])
            raise ValueError(
                f"every document must lie within the values of its column; number {outside} of this pack is "
                f"{self.begin[outside]} … {self.stop[outside]} of {len(self.flats[flat])}: the dataset's files are broken"
            )

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


def slices_of_rows(flats: Flats, offsets: Flats, starts: Int64, rows: Int64) -> Slices:
    """Rows int64[d] of a column in chunks: chunk c begins at row ``starts[c]``, and its row r is ``flats[c][offsets[c][r] :
    offsets[c][r + 1]]``. IndexError for a row that no chunk holds."""
    which, begin, stop = np.empty((3, len(rows)), np.int64)
    assert offsets.like is not None
    outside = _bounds(offsets.place, offsets.like, starts, rows, which, begin, stop)
    if outside >= 0:
        raise IndexError(f"the column has no row {rows[outside]}")
    return Slices(flats, which, begin, stop)


def _as_pointer(typingctx, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), codegen


_pointer: Any = intrinsic(_as_pointer)  # kernels call it without the context that numba hands over


@njit(nogil=True, cache=True)
def _widen(place, like, which, begin, document, first, tokens, empty, out):
    at, lowest = 0, np.int64(0)
    for segment in range(len(tokens)):
        count = tokens[segment]
        run = out[at : at + count]
        at += count
        if empty[segment]:
            run[:] = 0
            continue
        held = document[segment]
        flat, start = which[held], begin[held] + first[segment]
        if start < 0 or count < 0 or start + count > place[flat, 1]:
            return lowest, held
        values = carray(_pointer(place[flat, 0]), (place[flat, 1],), like.dtype)[start : start + count]
        for offset in range(count):
            value = np.int64(values[offset])
            run[offset] = value
            lowest = value if value < lowest else lowest
    return lowest, -1


@njit(nogil=True, cache=True)
def _ahead(place, like, which, begin, document, first, tokens, empty, length, offset, out):
    at = 0
    for segment in range(len(tokens)):
        count, held = tokens[segment], document[segment]
        run = out[at : at + count]
        at += count
        there = 0 if empty[segment] else max(min(count, length[held] - first[segment] - offset), 0)
        run[there:] = IGNORE
        if there == 0:
            continue
        flat, start = which[held], begin[held] + first[segment] + offset
        if start < 0 or start + there > place[flat, 1]:
            return held
        values = carray(_pointer(place[flat, 0]), (place[flat, 1],), like.dtype)[start : start + there]
        for number in range(there):
            run[number] = np.int64(values[number])
    return -1


@njit(nogil=True, cache=True)
def _behind(place, like, which, begin, document, stop, empty, length, out):
    for segment in range(len(document)):
        held = document[segment]
        if empty[segment]:
            out[segment] = PADDING
        elif stop[segment] >= length[held]:
            out[segment] = IGNORE
        else:
            flat, at = which[held], begin[held] + stop[segment]
            if at < 0 or at >= place[flat, 1]:
                return held
            out[segment] = np.int64(carray(_pointer(place[flat, 0]), (place[flat, 1],), like.dtype)[at])
    return -1


@njit(nogil=True, cache=True)
def _bounds(place, like, starts, rows, which, begin, stop):
    for number in range(len(rows)):
        chunk = np.searchsorted(starts, rows[number], side="right") - 1
        row = rows[number] - starts[chunk]
        if chunk < 0 or row < 0 or row + 1 >= place[chunk, 1]:
            return number
        offsets = carray(_pointer(place[chunk, 0]), (place[chunk, 1],), like.dtype)
        which[number], begin[number], stop[number] = chunk, offsets[row], offsets[row + 1]
    return -1
