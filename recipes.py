"""Recipes: one choice for each of the four decisions (pack, place, shard, attend), by name or mixed.

The only module that knows all four. A recipe solves a window of documents into a ``StepPlan`` (pack, place), cuts a
pack into ``Shards`` (shard) and says how its ranks attend (attend).

    >>> from equipoise import recipe
    >>> recipe("wlb")
    Recipe(name='wlb', pack='wlb', place='vrsp', shard='zigzag', attend='ring')
    >>> recipe("static", pack="concat", attend="ulysses").name
    'static+pack=concat+attend=ulysses'

| recipe | pack | place | shard | attend |
|---|---|---|---|---|
| ``static``: no balancing, the baseline | best fit to a fixed length | in order, shuffled | zigzag per document | ring |
| ``wlb``: WLB-LLM without outlier queues | variable length, by workload | VRSP | zigzag per document | ring |
| ``vrsp``: Libra | best fit to a fixed length | VRSP | contiguous | Ulysses |

WLB-LLM places its packs in order, since they are alike. Where one long document is worth several packs they are not, and
in order is worse than no balancing at all (1.45 against 1.32 of the mean per slot, 16K packs of source code, 2 replicas);
placed by cost they come to 1.05.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .packing.assign import best_fit_decreasing, split_largest
from .packing.cost import CostModel, cost_units
from .packing.packs import Packs, Spans
from .packing.shards import Shards, contiguous, zigzag
from .packing.wlb import wlb
from .samplers.order import Window, permute
from .samplers.plan import Cluster, StepPlan
from .samplers.vrsp import vrsp

Cost = CostModel | Callable[[np.ndarray, np.ndarray], np.ndarray]

PACK = ("best_fit", "concat", "wlb")
PLACE = ("in_order", "vrsp")
SHARD = ("zigzag", "zigzag_sequence", "contiguous", "whole")
ATTEND = ("ring", "ulysses", "none")
# WLB-LLM needs packs that can grow: slots are chosen so that the mean pack fills this share of the cap.
_WLB_FILL = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One choice per decision; checked when made.

    Args:
        pack: ``best_fit`` (decreasing, to the cap), ``concat`` (in order, documents cut at the pack's edge), ``wlb``.
        place: ``in_order`` (shuffled, dealt out) or ``vrsp``.
        shard: ``zigzag`` per document, ``zigzag_sequence``, ``contiguous``, or ``whole`` (no context parallelism).
        attend: ``ring``, ``ulysses``, or ``none`` (the batch carries no plan: bring your own attention).
    """

    name: str
    pack: str
    place: str
    shard: str
    attend: str

    def __post_init__(self) -> None:
        for decision, legal in (("pack", PACK), ("place", PLACE), ("shard", SHARD), ("attend", ATTEND)):
            if getattr(self, decision) not in legal:
                raise ValueError(f"{decision} must be one of {', '.join(legal)}; got {getattr(self, decision)!r}")
        if self.shard == "whole" and self.attend != "none":
            raise ValueError(
                f"shard='whole' keeps a pack on one rank and attend={self.attend!r} spreads its attention over several: "
                f"these two halves do not fit; use shard='zigzag' (at cp 1 nothing is sent), or attend='none'"
            )

    def check_cluster(self, cluster: Cluster) -> None:
        """Refuse ranks that this recipe cannot serve, before any of them starts."""
        if self.shard == "whole" and cluster.cp > 1:
            raise ValueError(f"shard='whole' needs cp=1, got cp={cluster.cp}; use shard='zigzag' or 'contiguous'")

    def solve(self, window: Window, cluster: Cluster, cost: Cost) -> StepPlan:
        """Pack and place one step. Raises ValueError where fixed slots cannot hold the step."""
        spans = window.spans
        units = cost_units(cost, spans.pairs, spans.tokens)
        spans, order, offsets = self._packed(spans, units, cluster, window)
        packs = Packs(spans=spans.take(order), offsets=offsets)
        units = cost_units(cost, packs.spans.pairs, packs.spans.tokens)
        places = cluster.dp * _slots(len(packs), cluster, window)
        packs, units = _with_fillers(packs, units, places, cluster.cp)
        slot, replica = self._placed(packs.sums(units), places, window, cluster)
        return StepPlan(
            epoch=window.epoch,
            step=window.step,
            recipe=self.name,
            cluster=cluster,
            packs=packs,
            slot=slot,
            first_rank=replica * cluster.cp,
            cp_size=np.full(places, cluster.cp, np.int64),
            span_cost=units,
            num_targets=window.num_targets,
        )

    def _packed(
        self, spans: Spans, units: np.ndarray, cluster: Cluster, window: Window
    ) -> tuple[Spans, np.ndarray, np.ndarray]:
        """Packs in CSR form, at most as many as there are places; never an empty one."""
        if self.pack == "concat":
            spans, offsets = _concat(spans, cluster.capacity)
            return spans, np.arange(len(spans), dtype=np.int64), offsets
        order, offsets = best_fit_decreasing(spans.tokens, cluster.capacity)
        if self.pack == "wlb":
            order, offsets = _wlb(spans.tokens, units, cluster, order, offsets)
        places = cluster.dp * _slots(len(offsets) - 1, cluster, window)
        order, offsets = split_largest(order, offsets, spans.tokens, units, places)
        return spans, order, offsets

    def _placed(
        self, pack_cost: np.ndarray, places: int, window: Window, cluster: Cluster
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.place == "vrsp":
            return vrsp(pack_cost, dp=cluster.dp, sync=cluster.sync, key=window.key)
        # Best fit emits long documents first: dealt out as they come, packs of a slot would be alike by accident.
        position = permute(0, places, places, window.key)
        return position // cluster.dp, position % cluster.dp

    def shards(self, cu_seqlens: np.ndarray, cp_size: int) -> Shards:
        """Which tokens of a pack each rank of its CP group holds."""
        if self.shard in ("contiguous", "whole"):
            return contiguous(cu_seqlens, cp_size)
        return zigzag(cu_seqlens, cp_size, per="sequence" if self.shard == "zigzag_sequence" else "document")

    def attention(self, shards: Shards, ranks: tuple[int, ...], cp_rank: int) -> Any:
        """The plan that ``attend`` runs on rank ``ranks[cp_rank]``; None for ``attend='none'``."""
        if self.attend == "ring":
            from .attention.ring import ring_plan

            return ring_plan(shards, ranks, cp_rank)
        if self.attend == "ulysses":
            from .attention.ulysses import ulysses_plan

            return ulysses_plan(shards, ranks, cp_rank)
        return None


NAMED = {
    "static": Recipe(name="static", pack="best_fit", place="in_order", shard="zigzag", attend="ring"),
    "wlb": Recipe(name="wlb", pack="wlb", place="vrsp", shard="zigzag", attend="ring"),
    "vrsp": Recipe(name="vrsp", pack="best_fit", place="vrsp", shard="contiguous", attend="ulysses"),
}


def recipe(
    name: str, *, pack: str | None = None, place: str | None = None, shard: str | None = None, attend: str | None = None
) -> Recipe:
    """A named recipe, or a mix that starts from one. Raises ValueError for an unknown name or halves that do not fit."""
    if name not in NAMED:
        raise ValueError(f"recipe must be one of {', '.join(NAMED)}; got {name!r}")
    base = NAMED[name]
    choices = {"pack": pack, "place": place, "shard": shard, "attend": attend}
    changed = {key: value for key, value in choices.items() if value is not None and value != getattr(base, key)}
    mixed = "".join(f"+{key}={value}" for key, value in changed.items())
    return replace(base, name=name + mixed, **changed) if changed else base


def _slots(num_packs: int, cluster: Cluster, window: Window) -> int:
    """Micro-batches per replica: the fixed number, or as few as hold the packs."""
    needed = -(-num_packs // cluster.dp)
    if cluster.slots is None:
        return needed
    if needed > cluster.slots:
        raise ValueError(
            f"slots={cluster.slots} on {cluster.dp} replicas make {cluster.slots * cluster.dp} packs of at most "
            f"{cluster.capacity} tokens; step {window.step} of epoch {window.epoch} needs {num_packs} for its "
            f"{int(window.spans.tokens.sum())} tokens: raise slots or max_tokens_per_rank, or make the step smaller"
        )
    return cluster.slots


def _wlb(
    tokens: np.ndarray, units: np.ndarray, cluster: Cluster, order: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Workload-aware packs; best fit's (order, offsets) where fixed slots leave some document no room otherwise.

    With free slots the count starts at the fill that leaves room to grow and rises until every document has a place.
    """
    slots = cluster.slots or max(
        -(-int(tokens.sum()) // int(_WLB_FILL * cluster.dp * cluster.capacity + 1)),
        -(-(len(offsets) - 1) // cluster.dp),
    )
    while True:
        balanced, edges, left = wlb(tokens, units, slots * cluster.dp, cluster.capacity)
        if not len(left):
            return balanced, np.r_[0, edges[1:][np.diff(edges) > 0]]
        if cluster.slots is not None:
            return order, offsets
        slots += 1


def _concat(spans: Spans, capacity: int) -> tuple[Spans, np.ndarray]:
    """Documents end to end, cut wherever a pack of ``capacity`` tokens is full; pieces are documents of their own."""
    ends = np.cumsum(spans.tokens)
    edges = np.union1d(ends, np.arange(capacity, ends[-1], capacity))
    begins = np.r_[0, edges[:-1]]
    owner = np.searchsorted(ends, begins, side="right")
    shift = spans.start[owner] - (ends - spans.tokens)[owner]
    tokens = edges - begins
    whole = tokens == spans.tokens[owner]
    pieces = Spans(
        document=spans.document[owner],
        start=begins + shift,
        stop=edges + shift,
        pairs=np.where(whole, spans.pairs[owner], tokens * (tokens + 1) // 2),
    )
    return pieces, np.r_[np.flatnonzero(begins % capacity == 0), len(edges)].astype(np.int64)


def _with_fillers(packs: Packs, units: np.ndarray, places: int, cp: int) -> tuple[Packs, np.ndarray]:
    """Fill missing packs, and those of fewer tokens than ranks, up to one token per rank: every rank must have work.

    The filler is a document -1 that weighs nothing.
    """
    tokens = np.r_[packs.tokens, np.zeros(places - len(packs), np.int64)]
    short = np.flatnonzero(tokens < cp)
    if not len(short):
        return packs, units
    zero = np.zeros(len(short), np.int64)
    fillers = Spans(document=zero - 1, start=zero, stop=cp - tokens[short], pairs=zero)
    owner = np.r_[np.repeat(np.arange(len(packs)), np.diff(packs.offsets)), short]
    order = np.argsort(owner, kind="stable")
    offsets = np.r_[0, np.cumsum(np.bincount(owner, minlength=places))]
    return Packs(spans=Spans.concat([packs.spans, fillers]).take(order), offsets=offsets), np.r_[units, zero][order]
