"""An index on disk: one record batch in an Arrow IPC file, with facts in its schema as JSON and a checksum over every byte.

Mapped when read, so that columns of ten million documents are pages of a file that all processes share. Nothing of a file is
handed to Arrow before its checksum was found right; making it costs one pass over the file, read in blocks of a megabyte.
The checksum (xxh3, 64 bits) guards against damage and mix-ups; it is no signature.

    >>> import tempfile
    >>> path = os.path.join((folder := tempfile.TemporaryDirectory()).name, "some.index")
    >>> write_index(path, pa.record_batch({"size": [3, 4]}), {"made": "of two"})
    >>> batch, facts = read_index(path)
    >>> batch["size"].to_pylist(), facts["made"]
    ([3, 4], 'of two')
    >>> folder.cleanup()
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from os import PathLike
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

VERSION = 1
_KEY = b"equipoise"
_MAGIC = b"ARROW1"
_UNKNOWN = "0" * 16
# JSON escapes quotes inside strings, so nothing else in the facts can look like this.
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{16})"')
_BLOCK = 1 << 20


def write_index(
    path: str | PathLike[str],
    batch: pa.RecordBatch,
    facts: dict[str, Any],
    *,
    folder: str = "",
    lasting: bool = True,
) -> None:
    """Write ``batch`` to ``path`` in one stroke: whoever reads finds the file that was there before, or all of this one.

    ``facts`` is JSON, without ``version`` and ``checksum``. ``folder`` is where the file grows (of the same file system; that
    of ``path`` by default), so that what a killed process leaves lies there. ``lasting`` waits for the disk; a file that can be
    made again need not.
    """
    path = os.fspath(path)
    told = json.dumps({"version": VERSION, "checksum": _UNKNOWN, **facts})
    schema = batch.schema.with_metadata({_KEY: told.encode()})
    unfinished = os.path.join(folder or os.path.dirname(path), f".{os.path.basename(path)}.{os.getpid()}.tmp")
    try:
        with pa.OSFile(unfinished, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        with open(unfinished, "r+b") as file:
            checksum, places = _checksum(file)
            for place in places:
                file.seek(place)
                file.write(checksum.encode())
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)
    if lasting:
        _sync_folder(os.path.dirname(path) or ".")


def read_index(path: str | PathLike[str], *, known: str | None = None) -> tuple[pa.RecordBatch, dict[str, Any]]:
    """The record batch, mapped, and the facts with ``version`` and ``checksum``.

    ``known``: the checksum that another process has found right; then it is compared only, and no column is read. Raises
    ValueError where the file is none, is damaged, or is another.
    """
    try:
        with open(path, "rb") as file:
            ends = b"".join(_ends(file))
            stated = {match.group(1).decode() for match in _CHECKSUM.finditer(ends)}
            computed = known or _checksum(file)[0]
        if stated != {computed}:
            raise ValueError(f"its checksum is {computed}, and it states {', '.join(sorted(stated)) or 'none'}")
        reader = pa.ipc.open_file(pa.memory_map(os.fspath(path)))
        facts = json.loads(reader.schema.metadata[_KEY])
        if facts.get("version") != VERSION:
            raise ValueError(f"it has version {facts.get('version')!r}, and this package reads {VERSION}")
        batch = reader.get_batch(0)
        if known is None:
            batch.validate(full=True)
    except FileNotFoundError:
        raise ValueError(f"there is no index {path}: make it with `equipoise index`") from None
    except (ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise ValueError(f"{path} is no sound index ({error}): make it again with `equipoise index`") from error
    return batch, facts


def _ends(file: BinaryIO) -> tuple[bytes, bytes]:
    """The head of the file up to the first column and its footer: both hold the facts. Raises ValueError."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(16)
    file.seek(max(size - 10, 0))
    tail = file.read(10)
    if size < 32 or head[:8] != _MAGIC + b"\0\0" or head[8:12] != b"\xff" * 4 or tail[4:] != _MAGIC:
        raise ValueError("it is not an Arrow IPC file, or was truncated")
    head_size, footer_size = (int.from_bytes(four, "little") for four in (head[12:], tail[:4]))
    if 16 + head_size + footer_size + 10 > size:
        raise ValueError(f"it states {head_size} and {footer_size} bytes of headers, and has {size} bytes in all")
    file.seek(0)
    first = file.read(16 + head_size)
    file.seek(size - 10 - footer_size)
    return first, file.read()


def _checksum(file: BinaryIO) -> tuple[str, list[int]]:
    """xxh3 of the file as if it stated no checksum, and the two places where it does. Raises ValueError."""
    head, footer = _ends(file)
    size = file.seek(0, os.SEEK_END)
    places = []
    digest = xxhash.xxh3_64()
    for part, start in ((head, 0), (footer, size - len(footer))):
        found = [match.start(1) for match in _CHECKSUM.finditer(part)]
        if len(found) != 1:
            raise ValueError(f"it states {len(found)} checksums where one is due")
        places.append(start + found[0])
    digest.update(_without_checksum(head))
    file.seek(len(head))
    left = size - len(head) - len(footer)
    block = memoryview(bytearray(_BLOCK))
    while left:
        num_read = file.readinto(block[: min(left, _BLOCK)])  # type: ignore[attr-defined]
        if not num_read:
            raise ValueError("it was truncated while it was read")
        digest.update(block[:num_read])
        left -= num_read
    digest.update(_without_checksum(footer))
    return digest.hexdigest(), places


def _without_checksum(part: bytes) -> bytes:
    return _CHECKSUM.sub(b'"checksum": "' + _UNKNOWN.encode() + b'"', part)


def _sync_folder(folder: str) -> None:
    """Make the new name last; file systems that cannot are left to do it in their own time."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
