"""Solve: what becomes of the admitted documents. One function from a window to a ``StepPlan``, by the names of a recipe.

Most recipes pack first (``best_fit``, ``concat``, ``wlb``) and place the packs after (``in_order``, ``vrsp``). Four take both
decisions at once: ChunkFlow's chunks, Skrull's GDS, FlexSP's and dynamic CP's groups of unequal size. Whatever the recipe, no
rank is left idle in any slot: packs are split until there are enough, and what is still missing becomes a filler, a
document -1 of one token per rank that weighs nothing.

A pure function: the same window, cluster and cost give the same arrays on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..packing.assign import best_fit_decreasing, split_largest
from ..packing.chunkflow import chunks
from ..packing.chunkflow_places import place as place_chunks
from ..packing.cost import SEVEN_B, CostModel, cost_units
from ..packing.packs import Spans
from ..packing.wlb import wlb_balanced
from .admission import Window
from .cluster import Cluster
from .dynamic_cp import DynamicCp, dynamic_cp
from .flexsp import FlexSp, SpModel, flexsp
from .gds import gds
from .groups import atoms_of, summed
from .layout import Layout, displacement, in_order, largest_first, ungrouped, with_fillers
from .order import permute
from .pace import paced
from .plan import Rounds, StepPlan
from .vrsp import vrsp

Cost = CostModel | Callable[[np.ndarray, np.ndarray], np.ndarray]

# WLB-LLM needs packs that can grow: slots are chosen so that the mean pack fills this share of the cap.
WLB_FILL = 2 / 3


@dataclass(frozen=True, kw_only=True)
class ChunkFlow:
    """Options of ChunkFlow: the size of a chunk (None: the cap of its CP group), and how many keep their activations."""

    chunk_tokens: int | None = None
    keep: int = 1

    def __post_init__(self) -> None:
        if self.keep < 1 or (self.chunk_tokens is not None and self.chunk_tokens < 1):
            raise ValueError(f"keep and chunk_tokens must be at least 1; got {self.keep} and {self.chunk_tokens}")


@dataclass(frozen=True, kw_only=True)
class Vrsp:
    """Options of VRSP: replicas whose attention is pooled (Libra), so that only their sum has to be level."""

    pool_size: int | None = 1
    """None: the most up to 8 that divide dp."""

    def __post_init__(self) -> None:
        if self.pool_size is not None and self.pool_size < 1:
            raise ValueError(f"pool_size must be at least 1; got {self.pool_size}")

    def pool(self, dp: int) -> int:
        """Replicas of a pool, of dp."""
        return self.pool_size or max(size for size in range(1, 9) if dp % size == 0)


def solve(
    window: Window,
    cluster: Cluster,
    cost: Cost,
    *,
    name: str,
    pack: str,
    place: str,
    options: object = None,
    slot_order: str = "shuffle",
) -> StepPlan:
    """Pack and place one step. Raises ValueError where fixed slots cannot hold it, on all ranks alike.

    slot_order: as the placement leaves them (``shuffle``), by the admission of their documents, which then keep
    to it inside packs too (``preserve``), or by tokens, falling (``largest_first``); ChunkFlow's rounds have their own.
    """
    spans = window.spans
    if window.num_slots is not None:
        cluster = replace(cluster, slots=window.num_slots)
    span_units = cost_units(cost, spans.pairs, spans.tokens)
    units = summed(span_units, window.atom)
    # Planners see what they may not part as one document, and its padding as tokens.
    multiple = 1 if place == "dynamic_cp" else int(cluster.multiple(cluster.cp))
    stand_ins = len(units) < len(spans) or multiple > 1
    if stand_ins:
        spans = atoms_of(spans, window.atom, multiple)
    largest = cluster.cp
    if place == "gds":
        order, offsets, slot, replica = gds(
            spans.tokens, units, dp=cluster.dp, capacity=cluster.capacity, slots=cluster.slots, key=window.key
        )
        layout = _on_replicas(spans, units, order, offsets, slot, replica, cluster)
    elif place in ("flexsp", "dynamic_cp"):
        largest = cluster.num_ranks
        layout = _groups(spans, units, cost, cluster, window, place, options)
    elif place == "chunkflow":
        layout = _chunked(spans, cost, cluster, window, options if isinstance(options, ChunkFlow) else ChunkFlow())
    else:
        pool_size = options.pool(cluster.dp) if isinstance(options, Vrsp) else 1
        layout = _packed_then_placed(spans, units, cost, cluster, window, pack, place, pool_size)
    if stand_ins:
        layout = ungrouped(layout, window.spans, span_units, window.atom)
    if slot_order != "shuffle" and layout.rounds is None:
        layout = in_order(layout) if slot_order == "preserve" else largest_first(layout)
    packs, span_cost = with_fillers(layout, cluster.pad_tp > 0)
    return StepPlan(
        epoch=window.epoch,
        step=window.step,
        recipe=name,
        cluster=cluster,
        packs=packs,
        slot=layout.slot,
        first_rank=layout.first_rank,
        cp_size=layout.cp_size,
        span_cost=span_cost,
        largest_group=largest,
        num_targets=window.num_targets,
        rounds=layout.rounds,
        displacement=displacement(layout),
    )


def _on_replicas(
    spans: Spans,
    units: np.ndarray,
    order: np.ndarray,
    offsets: np.ndarray,
    slot: np.ndarray,
    replica: np.ndarray,
    cluster: Cluster,
) -> Layout:
    return Layout(
        spans=spans,
        units=units,
        order=order,
        offsets=offsets,
        slot=slot,
        first_rank=replica * cluster.cp,
        cp_size=np.full(len(slot), cluster.cp, np.int64),
    )


def _packed_then_placed(
    spans: Spans, units: np.ndarray, cost: Cost, cluster: Cluster, window: Window, pack: str, place: str, pool_size: int
) -> Layout:
    if pack == "concat":
        spans, offsets = _concat(spans, cluster.capacity)
        units, order = cost_units(cost, spans.pairs, spans.tokens), np.arange(len(spans), dtype=np.int64)
    else:
        order, offsets = best_fit_decreasing(spans.tokens, cluster.capacity)
        if pack == "wlb":
            order, offsets = _by_workload(spans.tokens, units, cluster, order, offsets)
    places = cluster.dp * _slots(len(offsets) - 1, cluster, window)
    if pack != "concat":
        order, offsets = split_largest(order, offsets, spans.tokens, units, places)
    offsets = np.r_[offsets, np.full(places + 1 - len(offsets), offsets[-1])]
    if place == "vrsp":
        packed = np.diff(np.r_[0, np.cumsum(units[order])][offsets])
        if cluster.speeds is None:
            slot, replica = vrsp(packed, dp=cluster.dp, sync=cluster.sync, key=window.key, pool_size=pool_size)
        else:
            slot, replica = paced(packed, cluster.pace[:: cluster.cp], sync=cluster.sync, key=window.key)
    else:
        # Best fit emits long documents first: dealt out as they come, packs of a slot would be alike by accident.
        position = permute(0, places, places, window.key)
        slot, replica = position // cluster.dp, position % cluster.dp
    return _on_replicas(spans, units, order, offsets, slot, replica, cluster)


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


def _by_workload(
    tokens: np.ndarray, units: np.ndarray, cluster: Cluster, order: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Workload-aware packs; best fit's (order, offsets) where fixed slots leave some document no room otherwise.

    With free slots the count starts at the fill that leaves room to grow and rises until every document has a place.
    """
    slots = cluster.slots or wlb_slots(int(tokens.sum()), cluster)
    slots = max(slots, cluster.slots or -(-(len(offsets) - 1) // cluster.dp))
    while True:
        balanced, edges, left = wlb_balanced(tokens, units, slots * cluster.dp, cluster.capacity)
        if not len(left):
            return balanced, np.r_[0, edges[1:][np.diff(edges) > 0]]
        if cluster.slots is not None:
            return order, offsets
        slots += 1


def wlb_slots(tokens: int, cluster: Cluster) -> int:
    """The fewest slots whose mean fill leaves WLB-LLM's packs room to grow."""
    return max(1, -(-tokens // int(WLB_FILL * cluster.dp * cluster.capacity + 1)))


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


def _groups(
    spans: Spans, units: np.ndarray, cost: Cost, cluster: Cluster, window: Window, place: str, options: object
) -> Layout:
    """FlexSP and dynamic CP: groups of unequal size over all dp x cp ranks.

    Without options FlexSP's all-to-alls are those of a dense 7B model.
    """
    cap, ranks = cluster.max_tokens_per_rank, cluster.num_ranks
    if place == "flexsp":
        assumed = SpModel.of(SEVEN_B, cost) if isinstance(cost, CostModel) else SpModel.preset("gpt-7b")
        chosen = options if isinstance(options, FlexSp) else FlexSp(model=assumed, more_slots=2)
        placed = flexsp(spans.tokens, units, num_ranks=ranks, cap=cap, options=chosen, slots=cluster.slots)
    else:
        rules = options if isinstance(options, DynamicCp) else DynamicCp()
        rules = replace(rules, pad=max(rules.pad, 2 * cluster.pad_tp))
        placed = dynamic_cp(spans.tokens, units, num_ranks=ranks, cap=cap, options=rules, slots=cluster.slots)
    slots = int(placed.slot.max()) + 1
    return Layout(
        spans=spans,
        units=units,
        order=placed.order,
        offsets=placed.offsets,
        slot=permute(0, slots, slots, window.key)[placed.slot],  # they come by falling length: no curriculum
        first_rank=placed.first_rank,
        cp_size=placed.cp_size,
    )


def _chunked(spans: Spans, cost: Cost, cluster: Cluster, window: Window, options: ChunkFlow) -> Layout:
    """ChunkFlow: chunks of like size; those of one document on one replica, in order, in rounds that all replicas run."""
    size = min(options.chunk_tokens or cluster.capacity, cluster.capacity)
    made = chunks(spans.tokens, size)
    pieces = Spans(
        document=spans.document[made.item],
        start=spans.start[made.item] + made.start,
        stop=spans.start[made.item] + made.stop,
        # A chunk attends to the keys of those before it, which their store hands on.
        pairs=(made.stop * (made.stop + 1) - made.start * (made.start + 1)) // 2,
    )
    units = cost_units(cost, pieces.pairs, pieces.tokens)
    packed = np.add.reduceat(units, made.offsets[:-1])
    forward = packed // 3
    placed = place_chunks(
        made.groups, forward, packed - forward, dp=cluster.dp, keep=options.keep, sync=cluster.sync
    ).reordered(lambda count: permute(0, count, count, window.key))
    slots = placed.num_slots
    if cluster.slots is not None and slots != cluster.slots:
        raise ValueError(
            f"ChunkFlow needs {slots} slots for step {window.step} of epoch {window.epoch}, not slots={cluster.slots}: leave "
            f"slots out, its number follows from the documents"
        )
    again = placed.recomputed(options.keep)[placed.replica, placed.slot]
    np.add.at(units, made.offsets[:-1][again], forward[again])
    taken = placed.replica * slots + placed.slot
    idle = np.setdiff1d(np.arange(cluster.dp * slots), taken)
    place = np.r_[taken, idle]
    layout = _on_replicas(
        pieces,
        units,
        np.arange(len(pieces), dtype=np.int64),
        np.r_[made.offsets, np.full(len(idle), made.offsets[-1])],
        place % slots,
        place // slots,
        cluster,
    )
    alone = np.zeros(len(idle), np.int64)
    layout.rounds = Rounds(
        keep=options.keep,
        sizes=placed.rounds,
        offsets=placed.offsets,
        chunk_index=np.r_[made.chunk_index, alone],
        chunk_count=np.r_[made.chunk_count, alone + 1],
    )
    return layout
