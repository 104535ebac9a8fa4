"""Tar shards for tests: written by Python's tarfile, with headers by hand where it would refuse."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


class Archive(bytes):
    """Bytes that print short."""

    def __repr__(self) -> str:
        return f"<archive of {len(self)} bytes>"


def npy(values: np.ndarray) -> bytes:
    """A .npy file."""
    out = io.BytesIO()
    np.save(out, values, allow_pickle=values.dtype == object)
    return out.getvalue()


def tar_bytes(members: list[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive of files, whatever their names."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def write_shard(path: Path, documents: list[np.ndarray], first: int = 0) -> Path:
    """A shard with the documents as 000000.npy …"""
    path.write_bytes(tar_bytes([(f"{first + at:06d}.npy", npy(ids)) for at, ids in enumerate(documents)]))
    return path


def header(
    name: bytes, size: int | bytes, kind: bytes = b"0", *, magic: bytes = b"ustar\x0000", prefix: bytes = b""
) -> bytes:
    """A tar header of 512 bytes with a right checksum; size as a number or as the 12 bytes of its field."""
    field = size if isinstance(size, bytes) else b"%011o\0" % size
    block = bytearray(512)
    for at, value in ((0, name), (100, b"0000644\0"), (124, field), (156, kind), (257, magic), (345, prefix)):
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    """Data filled up to whole blocks."""
    return data + bytes(-len(data) % 512)


def record(key: str, value: str) -> bytes:
    """A pax record."""
    rest = f" {key}={value}\n".encode()
    size = len(rest)
    while len(str(size)) + len(rest) != size:
        size = len(str(size)) + len(rest)
    return str(size).encode() + rest


END = bytes(1024)


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Until the condition is true. Raises AssertionError if it does not become so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
