"""Plans on disk and between processes: one ``.npz`` of int64 arrays with a JSON header, no pickle.

The header holds a version, the digest, the cluster and the configuration that made the plan; a file that was truncated,
changed, or made under another configuration is refused by naming what differs. As bytes a plan is the same archive behind
a checksum of all of it. An array is never larger than the bytes it is read from, whatever its header says.

Cost: half a millisecond each way for 512 documents, 40 bytes per span.

    >>> from equipoise import plan
    >>> step = plan(np.array([700, 90, 400, 300]), "vrsp", dp=2, max_tokens_per_rank=1000)
    >>> plan_from_bytes(plan_bytes(step), step.config).digest == step.digest
    True
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from ..packing.packs import Packs, Spans
from .cluster import Cluster
from .plan import Rounds, SharedAttention, StepPlan

VERSION = 1
_SPANS = ("document", "start", "stop", "pairs")
_PLAN = ("slot", "first_rank", "cp_size", "span_cost")
_SHARED = ("replicas", "slack", "block", "head_groups")
_ROUNDS = ("sizes", "offsets", "chunk_index", "chunk_count")
_HEADER = ("epoch", "step", "recipe", "largest_group", "num_targets", "displacement", "config")
_CHECKSUM = struct.Struct("<Q")


def save_plan(plan: StepPlan, path: str | PathLike[str]) -> None:
    """Write a plan; ``path`` should end in ``.npz``."""
    with open(path, "wb") as file:
        _write(plan, file)


def load_plan(path: str | PathLike[str], config: dict | None = None) -> StepPlan:
    """Read a plan. Raises ValueError for a file that is none, is damaged, or was made under another ``config``."""
    return _read(Path(path).read_bytes(), str(path), config)


def plan_bytes(plan: StepPlan) -> bytes:
    """The plan as bytes, for ``plan_from_bytes``."""
    file = io.BytesIO()
    _write(plan, file)
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(file.getbuffer())) + file.getvalue()


def plan_from_bytes(data: bytes, config: dict | None = None) -> StepPlan:
    """The plan of these bytes. Raises ValueError if any of them changed, or if it was made under another ``config``."""
    told, archive = data[: _CHECKSUM.size], data[_CHECKSUM.size :]
    found = xxhash.xxh3_64_intdigest(archive)
    if told != _CHECKSUM.pack(found):
        raise ValueError(f"the plan's {len(data)} bytes were damaged: their checksum is {found:x}; make it again")
    return _read(archive, "the plan", config)


def _write(plan: StepPlan, file: IO[bytes]) -> None:
    header = {name: getattr(plan, name) for name in _HEADER}
    header |= {"version": VERSION, "digest": plan.digest, "cluster": asdict(plan.cluster)}
    arrays = {f"span_{name}": getattr(plan.packs.spans, name) for name in _SPANS}
    arrays |= {"offsets": plan.packs.offsets, **{name: getattr(plan, name) for name in _PLAN}}
    if plan.rounds is not None:
        header["keep"] = plan.rounds.keep
        arrays |= {f"round_{name}": getattr(plan.rounds, name) for name in _ROUNDS}
    if plan.shared is not None:
        header["shared"] = {name: getattr(plan.shared, name) for name in _SHARED}
        arrays["shared_cost"] = plan.shared.span_cost
    np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


def _read(data: bytes, name: str, config: dict | None) -> StepPlan:
    try:
        arrays = _arrays(data)
        header = json.loads(bytes(arrays.pop("header")))
        version, digest = header.get("version"), header["digest"]
        plan = _assembled(header, arrays)
    except Exception as error:  # whatever a damaged archive makes of zipfile, json or the constructors
        raise ValueError(f"{name} is no complete plan file ({error!r}); make it again") from error
    if version != VERSION:
        raise ValueError(f"{name} has plan version {version!r}, this is {VERSION}; make it again")
    if plan.digest != digest:
        raise ValueError(f"{name} was changed: its arrays have digest {plan.digest}, its header {digest}")
    wanted = config or plan.config
    differs = [key for key in {**plan.config, **wanted} if plan.config.get(key) != wanted.get(key)]
    if differs:
        told = "; ".join(f"{key}: saved {plan.config.get(key)!r}, now {wanted.get(key)!r}" for key in differs)
        raise ValueError(f"{name} was planned under another configuration ({told})")
    return plan


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        packed = [member.filename for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"plans are not compressed, {packed} are")
        return {name.removesuffix(".npy"): _array(name, archive.read(name)) for name in archive.namelist()}


def _array(name: str, member: bytes) -> np.ndarray:
    """The one-dimensional array that a ``.npy`` member holds, as long as its bytes and not as its header would have it."""
    file = io.BytesIO(member)
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"{name} is of another version")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype not in (np.int64, np.uint8):
        raise ValueError(f"{name} holds {dtype}")
    array = np.frombuffer(member, dtype, offset=file.tell())
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}, its header says {shape}")
    # Read-only arrays would have numba compile every kernel once more.
    return array.copy()


def _assembled(header: dict, arrays: dict[str, np.ndarray]) -> StepPlan:
    rounds = None
    if "keep" in header:
        rounds = Rounds(keep=header["keep"], **{name: arrays[f"round_{name}"] for name in _ROUNDS})
    shared = None
    if "shared" in header:
        shared = SharedAttention(**header["shared"], span_cost=arrays["shared_cost"])
    spans = Spans(**{name: arrays[f"span_{name}"] for name in _SPANS})
    fields: dict[str, Any] = {name: arrays[name] for name in _PLAN} | {name: header[name] for name in _HEADER}
    speeds = header["cluster"].pop("speeds")
    cluster = Cluster(**header["cluster"], speeds=speeds and tuple(speeds))
    packs = Packs(spans=spans, offsets=arrays["offsets"])
    return StepPlan(packs=packs, cluster=cluster, rounds=rounds, shared=shared, **fields)
