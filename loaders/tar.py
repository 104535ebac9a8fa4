"""TarShards: the documents of indexed tar shards, read by offset, so that any rank reads exactly its own.

Documents are numbered over all shards in the order of the index (``tar_index.py``), which is mapped: ten million cost a process
the pages that it touches. Payload is read with ``pread`` and never mapped: a shard that was cut short in the middle of an epoch
is an error that names the document, not a bus error. What is asked for at once lies in one buffer, of which the documents are
slices, and those that lie close in a shard come by one read: in the order of their offsets a call costs what it costs to copy them.

    index_shards(shards, "shards.arrow")
    source = TarShards("shards.arrow")
    source.rows([7, 0])["input_ids"]                  # two arrays, of the types that the shards hold

Costs when opened: one pass over the index for its checksum, one over its offsets. It pickles as its path, its checksum and
eight bytes per shard.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache, partial
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from ..packing.lengths import Lengths
from ..packing.packs import Int64
from .slices import Slices
from .tar_map import TarMap
from .tar_members import ARRAYS, ITEM_BYTES, TEXTS, format_of, text_columns
from .tar_read import Buffers, Handle, read_range

MAX_OPEN = 64
"""Shards that one TarShards holds open."""
AHEAD = 32
"""Reads of which the kernel is told at once; fewer than MAX_OPEN, for each may be of another shard."""
GAP = 1 << 14
"""Bytes between two documents that are read along with them, to save a read."""


class TarShards:
    """A map-style source over an index that ``index_shards`` made.

    Raises ValueError where the index is damaged or of another version, and where a shard is missing or has another size. A
    shard that changes after that is a ValueError when it is read, naming shard, document and key.
    """

    def __init__(self, index: str | PathLike[str]) -> None:
        self.path = os.path.abspath(index)
        self._checksum: str | None = None
        self._mtimes: Int64 | None = None
        self._handle, self._buffers = lru_cache(MAX_OPEN)(Handle), Buffers()
        self._checksum = self._index.checksum
        self._mtimes = self._index.check()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_checksum": self._checksum, "_mtimes": self._mtimes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._handle, self._buffers = lru_cache(MAX_OPEN)(Handle), Buffers()

    @cached_property
    def _index(self) -> TarMap:
        return TarMap.read(self.path, self._checksum)

    def close(self) -> None:
        """Close the shards and let go of the index; both are opened again when they are needed."""
        self._handle.cache_clear()
        self.__dict__.pop("_index", None)

    def __len__(self) -> int:
        return len(self._index.tokens)

    @property
    def column_names(self) -> list[str]:
        """``input_ids`` and the other columns."""
        return list(self._index.columns)

    def lengths(self) -> Lengths:
        """The length index: views of the mapped file."""
        return Lengths(tokens=self._index.tokens, source=self.path)

    def keys(self, documents: Sequence[int]) -> list[str]:
        """The webdataset keys of these documents."""
        return self._index.keys.take(pa.array(self._checked(documents))).to_pylist()

    def describe(self) -> str:
        """One line: documents, tokens, shards, bytes, columns, and the files that belong to no sample."""
        return self._index.describe()

    def __getitem__(self, document: int) -> dict[str, Any]:
        """The columns of one document."""
        number = operator.index(document)
        return {name: values[0] for name, values in self.rows([number + len(self) if number < 0 else number]).items()}

    def rows(self, documents: Sequence[int] | Int64) -> dict[str, Sequence[Any]]:
        """Columns of these documents: a 1-D array per document, or one value each. The arrays share one buffer, which is used
        again once none of them is held.

        Read in the order in which they lie in the shards, whatever the order asked for.
        """
        index, numbers = self._index, np.array(documents, dtype=np.int64)
        if not len(numbers):
            return {name: [] for name in index.columns}
        values = self._fetch(numbers)
        rows: dict[str, Sequence[Any]] = {}
        for at, (extension, name) in enumerate(zip(index.extensions, index.names, strict=True)):
            held = values if len(index.extensions) == 1 else values[at :: len(index.extensions)]
            if format_of(extension) not in TEXTS:
                rows[name] = held
                continue
            parsed = [self._parsed(number, at, value) for number, value in zip(numbers.tolist(), held, strict=True)]
            rows |= {column: [each[column] for each in parsed] for column in index.made[at]}
        return rows

    def _checked(self, documents: Sequence[int] | Int64) -> Int64:
        numbers = np.asarray(documents, dtype=np.int64)
        outside = (numbers < 0) | (numbers >= len(self))
        if outside.any():
            raise IndexError(f"documents are numbered 0 … {len(self) - 1}; got {numbers[outside][0]}")
        return numbers

    def _parsed(self, document: int, at: int, data: npt.NDArray[np.uint8]) -> dict[str, Any]:
        index = self._index
        extension = index.extensions[at]
        try:
            values = text_columns(data.tobytes(), format_of(extension), index.names[at])
            if set(values) != set(index.made[at]):
                raise ValueError(f"it holds {', '.join(values)}, and held {', '.join(index.made[at])}")
        except ValueError as error:
            raise self._changed(document, f"its {extension} member is not what it was ({error})") from error
        return values

    def _changed(self, document: int, what: str) -> ValueError:
        shard = self._index.shards[self._index.shard[document]]
        return ValueError(
            f"{shard.path}: document {document} (key {self.keys([document])[0]!r}) cannot be read, {what}: the shard was changed "
            f"since it was indexed; index it anew"
        )

    def _fetch(self, documents: Int64) -> Sequence[npt.NDArray[Any]]:
        """The data of the m members of each of k documents: m · k arrays, document after document."""
        index, order = self._index, None
        members, runs, cuts, room, traits = _located(documents, index.shard, *index.places)
        if traits & _OUTSIDE:
            self._checked(documents)
        if traits & _UNSORTED:
            order = np.lexsort((members[1], members[0]))
            members = members[:, order]
            runs, cuts, room, traits = _runs(members)
        buffer, listed = self._buffers.take(room), runs.tolist()
        announce = self._announcer(listed)
        for at, (shard, begin, end, first, last, place) in enumerate(listed):
            into = buffer[place : place + last - first]
            try:
                read_range(self._opened(shard), first, into, partial(announce, at + 1))
            except (ValueError, OSError) as error:
                those = np.arange(begin, end) if order is None else order[begin:end]
                ends = members[1, begin:end] + members[2, begin:end]
                raise self._unread(documents[those // len(index.extensions)], ends, error) from error
        if traits:
            start, stop = cuts.tolist()
            values = _slices(buffer, start, stop, members[3].tolist())
            return values if order is None else _reordered(values, order)
        begins, stops = cuts if order is None else cuts[:, np.argsort(order)]
        return Slices([_as_type(buffer, int(members[3, 0]))], np.zeros(len(begins), np.int64), begins, stops)

    def _announcer(self, runs: list[list[int]]) -> Callable[[int], None]:
        """What tells the kernel of the runs from one on, once a read has to wait: it fetches them side by side."""
        told = 0

        def announce(at: int) -> None:
            nonlocal told
            if at >= told:
                told = at + AHEAD
                for shard, _, _, first, last, _ in runs[at:told]:
                    with suppress(ValueError, OSError):  # it will be told when the run is read
                        self._opened(shard).announce(first, last - first)

        return announce

    def _opened(self, shard: int) -> Handle:
        """The shard, which was checked when it was opened."""
        held = self._index.shards[shard]
        assert self._mtimes is not None
        return self._handle(held.path, held.size, int(self._mtimes[shard]))

    def _unread(self, documents: Int64, ends: Int64, error: Exception) -> ValueError:
        """What to say where a run could not be read: the first document whose bytes are not there, or the first of all."""
        path = self._index.shards[self._index.shard[documents[0]]].path
        left = os.path.getsize(path) if os.path.exists(path) else 0
        beyond = np.flatnonzero(ends > left)
        return self._changed(int(documents[beyond[0] if len(beyond) else 0]), str(error))


_TYPES = [np.dtype(code) for code in ARRAYS] + [np.dtype(np.uint8)] * len(TEXTS)

# What is particular about the members of a fetch.
_UNSORTED, _MIXED, _OUTSIDE = 1, 2, 4


@njit(nogil=True, cache=True)
def _located(documents, shard, offset, size, kind):
    """Where the m members of k documents lie, document after document, and how to read them: (int64[4, k · m]: shard, offset,
    size and type; and what ``_runs`` makes of them).

    offset, size, kind: of every document in the index, an array for each member.
    """
    m = len(offset)
    members = np.empty((4, len(documents) * m), np.int64)
    for i, document in enumerate(documents):
        if not 0 <= document < len(shard):
            return members, np.empty((0, 6), np.int64), members[:2], np.int64(0), _OUTSIDE
        for at in range(m):
            members[0, i * m + at], members[1, i * m + at] = shard[document], offset[at][document]
            members[2, i * m + at], members[3, i * m + at] = size[at][document], kind[at][document]
    runs, cuts, room, traits = _runs(members)
    return members, runs, cuts, room, traits


@njit(nogil=True, cache=True)
def _runs(members):
    """What is read at once, of n members sorted by place: (runs int64[r, 6]: the shard, the first, past the last, first byte,
    past the last, place in the buffer; cuts int64[2, n]: where each begins and ends in the buffer, in values, or in bytes if
    types are mixed; bytes of the buffer; traits).

    First bytes and places are multiples of 64, as are the places of numpy's arrays in a tar: so slices of the buffer are aligned.
    """
    n, odd = members.shape[1], np.int64(0)
    shard, offset, size, kind = members[0], members[1], members[2], members[3]
    runs, cuts = np.empty((n, 6), np.int64), np.empty((2, n), np.int64)
    for i in range(n):
        if i and (shard[i] < shard[i - 1] or (shard[i] == shard[i - 1] and offset[i] < offset[i - 1])):
            return runs[:0], cuts, np.int64(0), _UNSORTED
        odd |= (kind[i] ^ kind[0]) | (offset[i] & (ITEM_BYTES[kind[0]] - 1))
    shift, r, place, last = np.int64(0), -1, np.int64(0), np.int64(0)
    while odd == 0 and 1 << shift < ITEM_BYTES[kind[0]]:
        shift += 1
    for i in range(n):
        if i == 0 or shard[i] != shard[i - 1] or offset[i] - last > GAP:
            place += (last - runs[r, 3] + 63) & ~63 if i else 0
            r, last = r + 1, offset[i]
            runs[r, 0], runs[r, 1], runs[r, 3], runs[r, 5] = shard[i], i, offset[i] & ~63, place
        last = max(last, offset[i] + size[i])
        runs[r, 2], runs[r, 4] = i + 1, last
        cuts[0, i] = (place + offset[i] - runs[r, 3]) >> shift
        cuts[1, i] = cuts[0, i] + (size[i] >> shift)
    return runs[: r + 1], cuts, place + last - runs[r, 3], _MIXED if odd else 0


def _slices(
    buffer: npt.NDArray[np.uint8], start: list[int], stop: list[int], kind: list[int]
) -> list[npt.NDArray[Any]]:
    """buffer[start:stop] as arrays of the types CODES[kind]; copied where an npy header of odd size left them unaligned."""
    values = []
    for a, b, code in zip(start, stop, kind, strict=True):
        held = buffer[a:b]
        values.append(_as_type(held if a % ITEM_BYTES[code] == 0 else held.copy(), code))
    return values


def _as_type(buffer: npt.NDArray[np.uint8], code: int) -> npt.NDArray[Any]:
    """The whole values of type CODES[code] that the buffer holds; its bytes for texts."""
    held = _TYPES[code]
    return buffer[: len(buffer) // held.itemsize * held.itemsize].view(held)


def _reordered(values: list[Any], order: Int64) -> list[Any]:
    """values[i] at place order[i]."""
    placed: list[Any] = [None] * len(values)
    for at, value in zip(order.tolist(), values, strict=True):
        placed[at] = value
    return placed
