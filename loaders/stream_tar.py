"""Tar shards read as streams: plain or compressed, from their beginning to their end.

Samples are webdataset's (its rule of names groups members), and so is the opening of whatever is no local file. The walk is
``tarfile``'s; unlike webdataset's own it refuses what ends early: an archive that was cut where a member begins, or whose
next header is damaged, looks to ``tarfile`` like one that is over, and the rest would be lost without a word. Members that are
not asked for are passed over; those that are read come into memory whole, never onto a disk.

    >>> import io, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with tarfile.open(f"{folder}/shard.tar.gz", "w:gz") as tar:
    ...         member = tarfile.TarInfo("000.json")
    ...         member.size = 6
    ...         tar.addfile(member, io.BytesIO(b"[7, 8]"))
    ...     parts = TarParts((f"{folder}/shard.tar.gz",), Members(tokens="json"), 1)
    ...     list(parts(0, epoch=0))
    [{'input_ids': array([7, 8])}]
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from webdataset.gopen import gopen
from webdataset.shardlists import expand_urls
from webdataset.tariterators import group_by_keys

from .tar_members import TEXTS, Members, format_of, text_columns

_META = re.compile(r"__[^/]*__($|/)")  # webdataset's own
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|][biuf][1248])', 'fortran_order': False, 'shape': \((\d{1,15}),\), \} *\n",
    re.DOTALL,
)
_READ = 1 << 16


def shard_paths(shards: str | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Paths of shards, braces in a string expanded. Raises ValueError where there is none, or a local one is missing."""
    paths = tuple(expand_urls(shards) if isinstance(shards, str) else map(os.fspath, shards))
    missing = [path for path in paths if not _is_remote(path) and not os.path.isfile(path)]
    if missing or not paths:
        raise ValueError(f"every shard must be a file; of {len(paths)}, {len(missing)} are not: {missing[:3]}")
    return paths


def _is_remote(path: str) -> bool:
    return re.match(r"[a-z0-9+]+:", path) is not None


@dataclass(frozen=True)
class TarParts:
    """Opens the shards of a part: the part's number and every ``num_parts``-th behind it, one after the other."""

    paths: tuple[str, ...]
    members: Members
    num_parts: int

    def __call__(self, part: int, epoch: int) -> TarDocuments:
        return TarDocuments(self.paths[part :: self.num_parts], self.members)


class TarDocuments:
    """An iterator over the documents of some shards.

    It can be asked for the next one behind a sample, or a shard, that raised ValueError; a generator would be over.
    """

    def __init__(self, paths: tuple[str, ...], members: Members) -> None:
        self._shards = (_samples(path, frozenset(members.extensions)) for path in paths)
        self._members = members
        self._current: Iterator[dict[str, Any]] = iter(())

    def __iter__(self) -> TarDocuments:
        return self

    def __next__(self) -> dict[str, Any]:
        return self._decoded(self.pass_over())

    def pass_over(self) -> dict[str, Any]:
        """Read past the next document, without decoding it."""
        while True:
            try:
                return next(self._current)
            except StopIteration:
                self._current = next(self._shards)

    def _decoded(self, sample: dict[str, Any]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for extension, name in zip(self._members.extensions, self._members.names, strict=True):
            if extension not in sample:
                raise ValueError(f"{_called(sample)} has no member .{extension}")
            try:
                row.update(_columns(sample[extension], extension, name, self._members.dtype))
            except ValueError as error:
                raise ValueError(f"member .{extension} of {_called(sample)}: {error}") from None
        return row


def _called(sample: dict[str, Any]) -> str:
    return f"sample {sample['__key__']!r} of {sample['__url__']}"


def _columns(data: bytes, extension: str, name: str, dtype: str | None) -> dict[str, Any]:
    kind = format_of(extension)
    if kind in TEXTS:
        return text_columns(data, kind, name)
    return {name: npy_values(data) if kind == "npy" else raw_values(data, np.dtype(dtype))}


def npy_values(data: bytes) -> np.ndarray:
    """The numbers of a ``.npy`` in memory, as a view. Raises ValueError where its header does not fit what is there."""
    plain = _NPY.match(data)  # as numpy writes it; its own parser takes ten times as long
    if plain is not None and plain.end() == 10 + int.from_bytes(data[8:10], "little"):
        shape: tuple[int, ...] = (int(plain[2]),)
        dtype, begin = np.dtype(plain[1].decode()), plain.end()
    else:
        shape, dtype, begin = _npy_header(io.BytesIO(data))
    if dtype.kind not in "biuf" or len(shape) != 1:
        raise ValueError(f"numbers in one dimension are needed; got {dtype} of shape {shape}")
    if shape[0] * dtype.itemsize != len(data) - begin:
        raise ValueError(f"its header tells of {shape[0]} x {dtype}, and {len(data) - begin} bytes are behind it")
    return np.frombuffer(data, dtype, shape[0], begin).astype(dtype.newbyteorder("="), copy=False)


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype, int]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError, EOFError) as error:
        raise ValueError(f"it is no .npy of numbers ({error}); write it with numpy.save") from None
    return shape, dtype, file.tell()


def raw_values(data: bytes, dtype: np.dtype) -> np.ndarray:
    """The numbers of a member without a header, as a view. Raises ValueError."""
    if len(data) % dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no whole number of values of type {dtype}")
    return np.frombuffer(data, dtype)


def _samples(path: str, wanted: frozenset[str]) -> Iterator[dict[str, Any]]:
    """webdataset's samples of one shard, with the members of these extensions."""
    try:
        with closing(gopen(path) if _is_remote(path) else open(path, "rb")) as file:
            yield from group_by_keys(_members(file, path, wanted))
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read on: {error}") from error


def _members(file: IO[bytes], path: str, wanted: frozenset[str]) -> Iterator[dict[str, Any]]:
    with tarfile.open(fileobj=file, mode="r|*", bufsize=_READ) as tar:
        for info in tar:
            tar.members = []  # type: ignore[attr-defined]  # or all are kept
            if info.isreg() and not _META.match(info.name):
                extension = os.path.basename(info.name).partition(".")[2].lower()
                taken = tar.extractfile(info) if extension in wanted else None
                yield {"fname": info.name, "data": b"" if taken is None else taken.read(), "__url__": path}
        yield {}  # to webdataset's grouping: the last sample is whole
        _check_end(tar.fileobj)


def _check_end(rest: Any) -> None:
    """Raises ValueError where an archive is not followed by zeros, at least a block of them behind the first."""
    size = 0
    while block := rest.read(_READ):
        size += len(block)
        if block.count(0) < len(block):
            raise ValueError("its end-of-archive mark is followed by other data, or a header is damaged: write it anew")
    if size < tarfile.BLOCKSIZE:
        raise ValueError("it ends without an end-of-archive mark: it was truncated, or is still being written")
