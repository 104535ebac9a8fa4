"""The rows that one tar shard adds to an index: where each document's members lie, checked against each other.

What costs a Python call per document (reading and parsing) is paid for json, txt and cls members only: for tokens in npy or
bin members the headers are all that is read. A document that lacks a member, or whose columns are of other lengths than its
tokens, is refused here and not in the middle of training.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..packing.packs import Int64
from .tar_members import ARRAYS, CODES, ITEM_BYTES, NUM_INTEGERS, TEXTS, Members, format_of, text_columns
from .tar_samples import Samples, group, parse_npy_header, read_npy_headers
from .tar_scan import Bytes, Files, TarError, walk

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def shard_rows(path: str, members: Members) -> tuple[pa.RecordBatch, list[list[str]], int]:
    """(key, offset, size, tokens, dtype, and offset, size, dtype of every further member, a row per document; the columns that
    each member makes; files that belong to no sample). Raises ValueError that names member and byte, but not the shard.
    """
    data = _mapped(path)
    files = walk(data)
    samples = group(files, members.extensions)
    shard = _Shard(data, files, samples, members)
    columns: dict[str, pa.Array] = {"key": _keys(samples, files)}
    tokens, made = np.zeros(0, np.int64), []
    for at, (extension, name) in enumerate(zip(members.extensions, members.names, strict=True)):
        place = shard.located(at)
        if format_of(extension) in TEXTS:
            counted, names = shard.read_texts(at, place, name, tokens)
        else:
            counted, names = shard.measured(at, place, tokens), [name]
        made.append(names)
        prefix = f"{extension}." if at else ""
        columns |= {f"{prefix}offset": pa.array(place.offset), f"{prefix}size": pa.array(place.size)}
        if at == 0:
            tokens = counted
            columns["tokens"] = pa.array(tokens)
        columns[f"{prefix}dtype"] = pa.array(place.dtype.astype(np.int8))
    everything = [name for names in made for name in names]
    if len(set(everything)) < len(everything):
        raise ValueError(f"every column needs a name of its own; the members make {', '.join(everything)}")
    return pa.record_batch(columns), made, samples.ignored


def _mapped(path: str) -> Bytes:
    """The file's bytes. Raises ValueError for a compressed one."""
    with open(path, "rb") as file:
        start = file.read(6)
        for magic, name in _COMPRESSED.items():
            if start.startswith(magic):
                raise ValueError(
                    f"the shard is compressed ({name}), and its documents cannot be read by offset: decompress it, or read it as "
                    f"a stream with Stream.tar"
                )
        if not start:
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(file, np.uint8, "r"))


def _keys(samples: Samples, files: Files) -> pa.Array:
    ends = np.concatenate([[0], samples.key_ends])
    keys = pa.LargeStringArray.from_buffers(len(ends) - 1, pa.py_buffer(ends), pa.py_buffer(samples.keys))
    try:
        keys.validate(full=True)
    except pa.ArrowInvalid:
        for row, (start, stop) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
            try:
                samples.keys[start:stop].tobytes().decode()
            except UnicodeDecodeError:
                at = samples.first[row]
                raise TarError("the member's name is not UTF-8", files.name(at), files.header[at]) from None
    return keys


class _Place:
    """Where the n members of one extension have their data: offset, size in bytes, and dtype (a place in CODES), int64[n]."""

    def __init__(self, offset: Int64, size: Int64) -> None:
        self.offset, self.size, self.dtype = offset, size, np.full(len(offset), -1)


class _Shard:
    """One archive, its files and samples, and which members are wanted."""

    def __init__(self, data: Bytes, files: Files, samples: Samples, members: Members) -> None:
        self.data, self.files, self.samples, self.members = data, files, samples, members

    def _refusal(self, row: int, at: int, rule: str) -> TarError:
        file = self.samples.file[row, at]
        return TarError(rule, self.files.name(file), self.files.header[file])

    def _require(self, good: npt.NDArray[np.bool_], at: int, rule: str, **numbers: np.ndarray) -> None:
        """Raise for the first sample that is not good; ``rule`` is filled in with its numbers."""
        if not good.all():
            row = int(good.argmin())
            raise self._refusal(row, at, rule.format(**{name: values[row] for name, values in numbers.items()}))

    def located(self, at: int) -> _Place:
        """The members with the extension ``at``. Raises TarError where a sample has none."""
        file = self.samples.file[:, at]
        if (file < 0).any():
            first = self.samples.first[(file < 0).argmax()]
            raise TarError(
                f"every sample must have a member with the extension {self.members.extensions[at]!r}; the one that begins here has "
                f"none",
                self.files.name(first),
                self.files.header[first],
            )
        return _Place(self.files.offset[file], self.files.size[file])

    def measured(self, at: int, place: _Place, tokens: Int64) -> Int64:
        """Values in each npy or bin member, int64[n]; fills in the place. ``tokens``: how many there must be, but for tokens."""
        if format_of(self.members.extensions[at]) == "bin":
            assert self.members.dtype is not None
            place.dtype[:] = ARRAYS.index(self.members.dtype)
            counted = place.size // ITEM_BYTES[place.dtype]
        else:
            counted = self._npy_lengths(at, place)
        item = ITEM_BYTES[place.dtype]
        # A count is compared before it is multiplied: what a header states may overflow.
        good = (counted == place.size // item) & (place.size % item == 0)
        self._require(
            good, at, "{counted} values of {item} bytes are due, and the member has {size} bytes of them",
            counted=counted, item=item, size=place.size,
        )  # fmt: skip
        if at == 0:
            kind = np.array(ARRAYS)[place.dtype]
            self._require(place.dtype < NUM_INTEGERS, at, "token ids must be integers; these are {kind}", kind=kind)
        else:
            rule = "a column has one value per token; this one has {counted} beside {tokens} tokens"
            self._require(counted == tokens, at, rule, counted=counted, tokens=tokens)
        return counted

    def _npy_lengths(self, at: int, place: _Place) -> Int64:
        """Values that each npy header states, int64[n]; leaves the place behind the headers."""
        counted = np.zeros(len(place.offset), np.int64)
        read_npy_headers(self.data, place.offset, place.size, counted, place.dtype)
        for row in np.flatnonzero(place.dtype < 0).tolist():
            member = self.data[place.offset[row] : place.offset[row] + place.size[row]]
            try:
                header, counted[row], place.dtype[row] = parse_npy_header(member)
            except ValueError as error:
                raise self._refusal(row, at, str(error)) from None
            place.offset[row] += header
            place.size[row] -= header
        return counted

    def read_texts(self, at: int, place: _Place, name: str, tokens: Int64) -> tuple[Int64, list[str]]:
        """Parse each json, txt or cls member: tokens of each, int64[n], and the columns that all of them hold."""
        text = format_of(self.members.extensions[at])
        place.dtype[:] = CODES.index(text)
        counted = np.zeros(len(place.offset), np.int64)
        kinds: dict[str, bool] = {}
        for row, values in self._texts(at, place, text, name):
            lengths = {column: len(value) for column, value in values.items() if isinstance(value, np.ndarray)}
            counted[row] = due = tokens[row] if at else lengths["input_ids"]
            odd = [column for column, length in lengths.items() if length != due]
            if odd:
                rule = f"a column has one value per token; {odd[0]!r} has {lengths[odd[0]]} beside {due} tokens"
                raise self._refusal(row, at, rule)
            told = {column: column in lengths for column in values}
            if row and told != kinds:
                rule = (
                    f"all documents must hold the same columns; this one has {_told(told)}, those before {_told(kinds)}"
                )
                raise self._refusal(row, at, rule)
            kinds = told
        if not kinds:
            return counted, [name]
        return counted, sorted(kinds, key=lambda column: (column != "input_ids", column))

    def _texts(self, at: int, place: _Place, text: str, name: str) -> Iterator[tuple[int, dict]]:
        for row, (offset, size) in enumerate(zip(place.offset.tolist(), place.size.tolist(), strict=True)):
            try:
                yield row, text_columns(self.data[offset : offset + size].tobytes(), text, name)
            except ValueError as error:
                raise self._refusal(row, at, f"it cannot be read as {text}: {error}") from None


def _told(kinds: dict[str, bool]) -> str:
    return ", ".join(f"{name} ({'per token' if array else 'per document'})" for name, array in sorted(kinds.items()))
