"""Plans on disk: one ``.npz`` of int64 arrays with a JSON header, no pickle.

The header holds a version, the digest, the cluster and the configuration that made the plan; a file that was truncated,
changed, or made under another configuration is refused by naming what differs.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from os import PathLike
from typing import Any

import numpy as np

from ..packing.packs import Packs, Spans
from .plan import Cluster, Rounds, StepPlan

VERSION = 1
_SPANS = ("document", "start", "stop", "pairs")
_PLAN = ("slot", "first_rank", "cp_size", "span_cost")
_ROUNDS = ("sizes", "offsets", "chunk_index", "chunk_count")
_HEADER = ("epoch", "step", "recipe", "largest_group", "num_targets", "displacement", "config")


def save_plan(plan: StepPlan, path: str | PathLike[str]) -> None:
    """Write a plan; ``path`` should end in ``.npz``."""
    header = {name: getattr(plan, name) for name in _HEADER}
    header |= {"version": VERSION, "digest": plan.digest, "cluster": asdict(plan.cluster)}
    arrays = {f"span_{name}": getattr(plan.packs.spans, name) for name in _SPANS}
    arrays |= {"offsets": plan.packs.offsets, **{name: getattr(plan, name) for name in _PLAN}}
    if plan.rounds is not None:
        header["keep"] = plan.rounds.keep
        arrays |= {f"round_{name}": getattr(plan.rounds, name) for name in _ROUNDS}
    with open(path, "wb") as file:
        np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


def load_plan(path: str | PathLike[str], config: dict | None = None) -> StepPlan:
    """Read a plan. Raises ValueError for a file that is none, is damaged, or was made under another ``config``."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(bytes(arrays.pop("header")))
        plan = _assembled(header, arrays)
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile, TypeError) as error:
        raise ValueError(f"{path} is no complete plan file ({error}); make it again") from error
    if header.get("version") != VERSION:
        raise ValueError(f"{path} has plan version {header.get('version')!r}, this is {VERSION}; make it again")
    if plan.digest != header["digest"]:
        raise ValueError(f"{path} was changed: its arrays have digest {plan.digest}, its header {header['digest']}")
    wanted = config or plan.config
    differs = [key for key in {**plan.config, **wanted} if plan.config.get(key) != wanted.get(key)]
    if differs:
        told = "; ".join(f"{key}: saved {plan.config.get(key)!r}, now {wanted.get(key)!r}" for key in differs)
        raise ValueError(f"{path} was planned under another configuration ({told})")
    return plan


def _assembled(header: dict, arrays: dict[str, np.ndarray]) -> StepPlan:
    rounds = None
    if "keep" in header:
        rounds = Rounds(keep=header["keep"], **{name: arrays[f"round_{name}"] for name in _ROUNDS})
    spans = Spans(**{name: arrays[f"span_{name}"] for name in _SPANS})
    fields: dict[str, Any] = {name: arrays[name] for name in _PLAN} | {name: header[name] for name in _HEADER}
    speeds = header["cluster"].pop("speeds")
    cluster = Cluster(**header["cluster"], speeds=speeds and tuple(speeds))
    packs = Packs(spans=spans, offsets=arrays["offsets"])
    return StepPlan(packs=packs, cluster=cluster, rounds=rounds, **fields)
