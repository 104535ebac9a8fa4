"""Files of numbers, mapped read-only: what a header claims is compared with the size of the file before it is believed.

A map is shared by all processes of a host and costs none of them memory of its own. It travels to a worker as its path and
size, and is made again there. A file that is truncated while it is mapped would kill whoever reads behind its new end
(SIGBUS); ``check``, one system call, turns that into an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/offsets.npy", np.array([0, 3, 7]))
    ...     npy_array(f"{folder}/offsets.npy", "offsets").values()
    array([0, 3, 7])
"""

from __future__ import annotations

import mmap
import os
from functools import cached_property
from os import PathLike
from typing import Any, BinaryIO

import numpy as np

Path = str | PathLike[str]


class MappedFile:
    """A file mapped read-only. Pickled as its path and size; mapped when first read, in whatever process that is."""

    def __init__(self, path: Path) -> None:
        self.path = os.fspath(path)
        self.size = os.path.getsize(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size}

    @cached_property
    def map(self) -> mmap.mmap | bytes:
        """All of it; a file without a byte cannot be mapped and is b""."""
        with open(self.path, "rb") as file:
            self._refuse(os.fstat(file.fileno()).st_size)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""

    def check(self) -> None:
        """Raise ValueError where the file is shorter than it was: reading behind its end kills the process (SIGBUS)."""
        if isinstance(self.map, mmap.mmap):
            self._refuse(self.map.size())

    def _refuse(self, size: int) -> None:
        if size < self.size:
            raise ValueError(
                f"{self.path} was truncated while in use: it had {self.size} bytes, now {size}; restore it and start again"
            )


class MappedArray:
    """``count`` values of type ``dtype`` from byte ``offset`` of a file on. Raises ValueError where it is too short."""

    def __init__(self, file: MappedFile, dtype: np.dtype, offset: int, count: int) -> None:
        self.file, self.dtype, self.offset, self.count = file, dtype, offset, count
        if offset + count * dtype.itemsize > file.size:
            raise ValueError(
                f"{file.path} must hold {count} values of type {dtype} behind its first {offset} bytes, "
                f"{offset + count * dtype.itemsize} bytes in all; it holds {file.size}: it is truncated, write it again"
            )

    def values(self) -> np.ndarray:
        """All of them, a read-only view of the map."""
        return np.frombuffer(self.file.map, self.dtype, self.count, self.offset)


def integers(dtype: np.dtype, path: Path) -> np.dtype:
    if dtype.kind not in "iu":
        raise ValueError(f"token ids and offsets must be integers; {os.fspath(path)} holds {dtype}: convert it first")
    return dtype


def npy_array(path: Path, what: str) -> MappedArray:
    """The integers of a ``.npy``, mapped; nothing is unpickled. Raises ValueError."""
    file = MappedFile(path)
    with open(file.path, "rb") as opened:
        shape, dtype = _npy_header(opened, file.path)
        behind = opened.tell()
    if len(shape) != 1:
        raise ValueError(f"{what} lie in one dimension; {file.path} has shape {shape}: save array.reshape(-1)")
    array = MappedArray(file, integers(dtype, file.path), behind, shape[0])
    if behind + shape[0] * dtype.itemsize != file.size:
        raise ValueError(
            f"{file.path} holds {file.size} bytes, its header tells of {behind + shape[0] * dtype.itemsize}: save it anew, alone"
        )
    return array


def _npy_header(file: BinaryIO, path: str) -> tuple[tuple[int, ...], np.dtype]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers ({error}); write it with numpy.save") from error
    return shape, dtype
