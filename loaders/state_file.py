"""State on disk: one JSON file per job, whole or not at all, with a checksum. Never a pickle.

All ranks have the same state, so rank 0 writes it and all read it. The file is written beside its name and moved there once
it is on disk, so a job killed at any moment leaves the old state or the new one. What such a job left beside is taken away by
a later save, once it is an hour older than that save's own by the clock of the disk.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "loader.json"
    >>> save_state({"epoch": 0, "step": 3}, path)
    >>> read_state(path)
    {'epoch': 0, 'step': 3}
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from os import PathLike
from pathlib import Path

import xxhash

FORMAT = "equipoise loader state"
_ABANDONED = 3600  # seconds after which nobody is still writing a file of some kilobytes


def save_state(state: dict, path: str | PathLike[str]) -> None:
    """Write the state, replacing what was there; call it on one rank."""
    path = Path(path)
    content = _content(json.dumps(state, sort_keys=True))
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)
    _clear(path)


def read_state(path: str | PathLike[str]) -> dict:
    """The state in a file. Raises ValueError for one that is truncated, changed or of another kind."""
    try:
        content = Path(path).read_bytes()
        body = json.loads(content)["state"]
        if not isinstance(body, str) or content != _content(body).encode():
            raise ValueError("it is not as it was written")
        return json.loads(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # the last: of brackets, thousands deep
        raise ValueError(f"{path} holds no whole loader state ({error}); take an older one") from error


def _content(body: str) -> str:
    """The file for a state that is JSON already."""
    return json.dumps({"format": FORMAT, "checksum": xxhash.xxh3_64_hexdigest(body.encode()), "state": body})


def _clear(path: Path) -> None:
    """Take away what saves that were killed left beside a state; not by process numbers, which may be another host's."""
    with contextlib.suppress(OSError):  # another save does it
        now = path.stat().st_mtime
        for beside in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
            if beside.stem[len(path.name) + 2 :].isdigit() and now - beside.stat().st_mtime > _ABANDONED:
                beside.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """See to it that the file's new name is on disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
