"""Configuration: all that a run's plans follow from, as plain JSON, and what of it may change where the run is resumed.

It is in the digest that ranks compare and in the state a run resumes from. What decides *which* documents come in *which*
order is fixed (``FIXED``); how a step is packed and placed may change, with a warning.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ..packing.cost import cost_units
from ..packing.lengths import Lengths
from .unindexed import Unindexed

if TYPE_CHECKING:
    from .batch_sampler import BalancedBatchSampler

FIXED = ("lengths", "masks", "blend", "seed", "shuffle", "opening", "last", "too_long")
SIZES = ("documents_per_step", "tokens_per_step", "packs_per_step")
UNDER_WAY = ("recipe", "cost", "order")  # must be as they were to plan a step again


def configuration(sampler: BalancedBatchSampler) -> dict:
    """That of a sampler; of its cost what it says of a document of 10,000 tokens, without pairs and with 10**8."""
    cluster, index = asdict(sampler.cluster), sampler.index
    probe = cost_units(sampler.cost, np.array([0, 10**8]), np.array([10**4, 10**4])).tolist()
    return {
        "recipe": repr(sampler.recipe),
        "cost": [*probe, getattr(sampler.cost, "seconds_per_row", 0.0)],
        **cluster,
        "speeds": cluster["speeds"] and list(cluster["speeds"]),
        **{name: value for name, value in asdict(sampler.step_size).items() if value is not None},
        "seed": sampler.seed,
        "shuffle": sampler.shuffle and isinstance(index, Lengths),
        "order": sampler.order,
        "opening": sampler.order == "largest_first",
        "last": sampler.last,
        "too_long": sampler.items.too_long,
        "capacity": sampler.items.capacity,
        "queued": sampler.queued,
        "lengths": _told_of(index),
        "masks": _told_of_masks(index),
        "blend": repr(index.blend) if isinstance(index, Lengths) and index.blend else None,
    }


def _told_of(index: Lengths | Unindexed) -> str:
    """What tells one index from another; of a stream its parts."""
    if isinstance(index, Unindexed):
        return f"stream of {index.num_parts} parts"
    state = xxhash.xxh3_64()
    for name in ("tokens", "pairs", "targets", "group"):
        values = getattr(index, name)
        state.update(name.encode() if values is None else np.ascontiguousarray(values).data)
    return f"{state.hexdigest()} of {len(index)}"


def _told_of_masks(index: Lengths | Unindexed) -> str | None:
    if not isinstance(index, Lengths) or index.masks is None:
        return None
    return f"{index.masks.kind} {index.masks.digest()}"


def differences(saved: dict, config: dict) -> list[str]:
    """Names of what differs. Raises ValueError where that decides which documents come in which order."""
    differs = [key for key in {**config, **saved} if saved.get(key) != config.get(key)]
    fixed = [key for key in differs if key in FIXED]
    if fixed:
        raise ValueError(
            f"the saved run read its documents in another order ({told(fixed, saved, config)}); set these as they were"
        )
    return differs


def told(names: list[str], saved: dict, config: dict) -> str:
    """What was and what is."""
    return "; ".join(f"{name}: saved {saved.get(name)!r}, now {config.get(name)!r}" for name in names)


def warning(differs: list[str], saved: dict, config: dict, rest: bool) -> str:
    """What a resumed run does differently, in a sentence or two."""
    moved = [name for name in differs if name in (*SIZES, "queued", "capacity")]
    text = f"the run is resumed under another configuration ({told(differs, saved, config)}); "
    text += (
        "every remaining document comes exactly once, in other global batches"
        if moved
        else "global batches stay the same, packed and placed anew"
    )
    return text + ("; what was left of the step under way is a step of its own" if rest else "")
