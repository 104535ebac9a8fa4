"""Before the first row moves, the ranks of a plan make sure that they run the same one.

Ranks that disagree would wait for rows that nobody sends, or add up rows that belong elsewhere. So at a plan's first use
each rank tells the others three 64-bit words, through the CPU: a hash of what all of them must have alike (homes, rows
exchanged in each stage), one of the tensors and options, and one of the rows it exchanges with each other rank. The last is
a sum in which every pair of ranks cancels out if both list the same rows, since a plan may list one rank's part only.
All ranks see all words, so all of them raise the same error, before anything else is sent.

Cost: once per plan, not per layer: hashing its arrays and one message of 24 bytes to each rank of the group.

    >>> from equipoise.attention.groups import CpGroups
    >>> from equipoise.attention.ring import ring_plan
    >>> from equipoise.packing.shards import zigzag
    >>> agree(ring_plan(zigzag([0, 5, 8], 1), ranks=(0,)), CpGroups(dp=1, cp=1), "fp32")      # alone: nothing to agree on
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import xxhash

from .groups import CpGroups
from .plan import KV, AttentionPlan, Int64, Q
from .ulysses import UlyssesPlan

WORD = 1 << 64
OWN = ("rank", "cache", "tiles", "moves", "returns", "known", "planner", "outer")
"""Fields of plans that differ between ranks or are compared otherwise."""


def agree(plan: Any, groups: CpGroups, terms: str) -> None:
    """Raise ValueError on all of the plan's ranks unless it is the same plan everywhere, run on the same `terms`.

    plan: with `ranks`, this rank's among them, and a `cache`. terms: what else all ranks must have alike, in words.
    """
    if len(plan.ranks) == 1 or ("agreed", terms) in plan.cache:
        return
    told = groups.tell(plan.ranks, [_signed(word) for word in words(plan, plan.ranks.index(groups.rank), terms)])
    what = [
        reason
        for reason, words_of_ranks in (("plans", [w[0] for w in told]), ("tensors or options", [w[1] for w in told]))
        if len(set(words_of_ranks)) > 1
    ]
    if not what and sum(w[2] for w in told) % WORD:
        what = ["rows to exchange"]
    if what:
        raise ValueError(
            f"All ranks of a plan must run the same one, on tensors alike; ranks {list(plan.ranks)} have different "
            f"{' and '.join(what)}{_alike(plan.ranks, told)}. Rank {groups.rank} has {plan}, {terms}. Nothing was sent: "
            "look for data, seeds or options that differ between ranks."
        )
    plan.cache["agreed", terms] = True


def _alike(ranks: tuple[int, ...], told: list[list[int]]) -> str:
    """Which ranks have the same plan and terms, to be read behind what differs; "" if all of them have."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, words_of_rank in zip(ranks, told, strict=True):
        alike.setdefault(tuple(words_of_rank[:2]), []).append(rank)
    return f": alike are {' and '.join(map(str, alike.values()))}" if len(alike) > 1 else ""


def words(plan: Any, index: int, terms: str) -> tuple[int, int, int]:
    """(What all ranks have alike, the terms, what this rank exchanges with others), 0 … 2^64 - 1 each."""
    common = xxhash.xxh3_64()
    _feed(common, plan)
    pairs = 0
    # Between groups of Ulysses: the ranks of each place have a plan of their own, alike but for their rank numbers.
    outer = plan.outer if isinstance(plan, UlyssesPlan) else plan
    if isinstance(outer, AttentionPlan):
        for by_stage in (outer.traffic.of(kind)[0] for kind in (KV, Q)):
            used = np.flatnonzero(by_stage.any(1))
            _feed(common, by_stage[: used[-1] + 1 if len(used) else 0])
        for told in (outer.home_offsets, outer.home, outer.head_chunks, outer.head_groups):
            _feed(common, told)
        own = index // plan.degree if isinstance(plan, UlyssesPlan) else index
        pairs = _exchanged(outer.moves, own) + _exchanged(outer.returns, own)
    return common.intdigest(), xxhash.xxh3_64_intdigest(terms.encode()), pairs % WORD


def _feed(state: Any, value: Any) -> None:
    """Hash a plan's fields, or what stands in one."""
    if is_dataclass(value):
        state.update(type(value).__name__.encode())
        for field in fields(value):
            if field.name not in OWN:
                _feed(state, getattr(value, field.name))
    elif isinstance(value, np.ndarray):
        state.update(f"{value.shape}".encode())
        state.update(np.ascontiguousarray(value))
    else:
        state.update(f"{value}".encode())


def _exchanged(routes: Int64, index: int) -> int:
    """Hashes of the rows that pass between this rank and each other, those with a higher one added, with a lower one taken away."""
    own = routes[(routes[:, 2] == index) | (routes[:, 3] == index)]
    peer = own[:, 2] + own[:, 3] - index
    order = np.lexsort((own[:, 2], own[:, 1], own[:, 0], peer))
    own, peer = own[order], peer[order]
    cuts = np.flatnonzero(np.diff(peer)) + 1
    total = 0
    for part in np.split(own, cuts) if len(own) else []:
        other = int(part[0, 2] + part[0, 3]) - index
        total += (1 if other > index else -1) * xxhash.xxh3_64_intdigest(part.tobytes())
    return total


def _signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word
