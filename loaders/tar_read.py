"""Reading a range of a file: the one function that reads payload, the open file, and the memory that is read into.

Everything that knows of descriptors is here, so that another kind of file (fsspec's) needs another ``Handle`` and
``read_range`` and nothing else.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

FREE = 1 << 25
"""Bytes of free buffers of one size that are kept; sizes are powers of two."""
SMALLEST = 1 << 16
"""Bytes below which the allocator is left to itself."""
_AT_ONCE = getattr(os, "RWF_NOWAIT", 0)


class Handle:
    """An open shard, closed when nothing holds it any more."""

    def __init__(self, path: str, size: int, mtime_ns: int) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        now = os.fstat(self.descriptor)
        if (now.st_size, now.st_mtime_ns) != (size, mtime_ns):
            raise ValueError(
                f"it had {size} bytes, modified at {mtime_ns} ns, when the source was opened, and has {now.st_size}, modified at "
                f"{now.st_mtime_ns} ns"
            )

    def announce(self, offset: int, size: int) -> None:
        """Tell the kernel that these bytes will be read soon, where it can be told."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def __del__(self, close: Any = os.close) -> None:
        if hasattr(self, "descriptor"):
            close(self.descriptor)


def read_range(handle: Handle, offset: int, buffer: npt.NDArray[np.uint8], late: Callable[[], None]) -> None:
    """Fill buffer (uint8[size]) with the bytes from ``offset`` on: the one place where payload is read.

    ``late`` is called before it waits for bytes that are not in memory. Raises ValueError where the file ends before.
    """
    size = len(buffer)
    try:
        done = os.preadv(handle.descriptor, [buffer.data], offset, _AT_ONCE)
    except OSError:  # nothing is in memory, or this kind of file does not tell; or it is an error that comes again
        done = 0
    if done < size:
        late()
    while done < size:  # a read may stop early, at 2 GiB or for a signal
        more = os.preadv(handle.descriptor, [buffer.data[done:]], offset + done)
        if more == 0:
            raise ValueError(f"{size} bytes are due at byte {offset}, and the file has {done}")
        done += more


class Buffers:
    """Memory to read into, used again once nobody holds an array in it: fresh pages cost ten times what is read into them."""

    def __init__(self) -> None:
        self._free: list[deque[bytearray]] = [deque(maxlen=FREE >> bits) for bits in range(FREE.bit_length())]

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """uint8[size], uninitialised."""
        if not SMALLEST <= size <= FREE:
            return np.empty(size, np.uint8)
        bits = (size - 1).bit_length()
        free = self._free[bits]
        try:
            memory = free.pop()
        except IndexError:
            memory = bytearray(1 << bits)  # of which pages that are not used are never touched
        buffer = np.frombuffer(memory, np.uint8, size)
        # Every array in the buffer refers to this one, however it was cut and viewed, so its end is theirs.
        weakref.finalize(buffer, free.append, memory).atexit = False
        return buffer
