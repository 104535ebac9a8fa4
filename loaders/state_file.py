"""State on disk: one JSON file per job, whole or not at all, with a checksum. Never a pickle.

All ranks have the same state, so rank 0 writes it and all read it. The file is written beside its name and moved there once
it is on disk, so a job killed at any moment leaves the old state or the new one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "loader.json"
    >>> save_state({"epoch": 0, "step": 3}, path)
    >>> read_state(path)
    {'epoch': 0, 'step': 3}
"""

from __future__ import annotations

import json
import os
from os import PathLike
from pathlib import Path

import xxhash

FORMAT = "equipoise loader state"


def save_state(state: dict, path: str | PathLike[str]) -> None:
    """Write the state, replacing what was there; call it on one rank."""
    path, body = Path(path), json.dumps(state, sort_keys=True)
    content = json.dumps({"format": FORMAT, "checksum": _checksum(body), "state": body})
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def read_state(path: str | PathLike[str]) -> dict:
    """The state in a file. Raises ValueError for one that is truncated, changed or of another kind."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        body = content["state"]
        if content["format"] != FORMAT or content["checksum"] != _checksum(body):
            raise ValueError("its checksum does not fit")
        return json.loads(body)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no whole loader state ({error}); take an older one") from error


def _checksum(body: str) -> str:
    return xxhash.xxh3_64_hexdigest(body.encode())


def _sync_folder(folder: Path) -> None:
    """See to it that the file's new name is on disk too."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
