"""Group cast as a plan: any mask over any shards, queries stay at home, each KV row goes once to each rank that needs it, in stages
chosen by cost (MagiAttention; its group reduce is how dK and dV return).

Decided here: in which stage each rank receives which rows. Stage 0 computes on what is at home while the rows of stage 1 travel, and
so on; a step lasts as long as the longer of its transfer, which all ranks share, and its compute:

    max(comm_1, calc_0) + max(comm_2, calc_1) + … + calc_N + N · stage_seconds,    of the slowest rank.

MagiAttention splits rows evenly, in order, and tries how many stages are best. Here rows with the most pairs for each of them come
first (Johnson's rule for two machines: what computes long and travels briefly goes first, so that later transfers have the most to hide
behind), and for each number of stages three splits are compared with the even one in order: even, each stage as large as the compute
before it hides, and halves. The choice follows from all ranks' rows, so all ranks make it alike.

Cost: 10–25 ms for 128K tokens on 16 ranks, in proportion to segments x parcels; `parcel` sets how finely rows are placed.

    >>> from equipoise.packing.shards import contiguous
    >>> plan = groupcast_plan(contiguous([0, 4, 12], 2), ranks=(0, 1))
    >>> plan.check([0, 4, 12])
    >>> plan.moves                                                  # rows 4 and 5 of the second document, and no others
    array([[1, 0, 0, 1, 4, 6]])
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from numba import njit

from ..packing.cost import SEVEN_B, CostModel, Hardware
from ..packing.dispatch import of_documents
from ..packing.mask_areas import blocks
from ..packing.mask_kinds import sliding_window
from ..packing.masks import Mask
from ..packing.shards import Shards
from . import bands
from .forwarding import forwarded, nodes_of
from .plan import AttentionPlan, Int64
from .routing import direct, part_of

IN_ORDER, EVEN, HIDDEN, HALVES = range(4)
"""How rows are split into stages: evenly in the order of the pack; the others by falling pairs a row: evenly, as much as the compute
before hides, half of what is left."""
UNITS = 1000
"""Seconds are compared as integers: of so many parts of a pair."""
DENSE_7B = CostModel.of(SEVEN_B, Hardware())
"""Over InfiniBand: what is assumed where nothing is said."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What stages are chosen by."""

    cost: CostModel = DENSE_7B
    """Seconds of a pair and of a row; all layers, or one."""
    stage_seconds: float = 2e-3
    """What each stage adds: launches and the merge of its results; of as many layers as `cost`."""
    degree: int | None = None
    """Stages in which rows arrive; 0: one, and nothing is computed before; None: as many as pay, up to max_degree."""
    max_degree: int = 8
    parcel: int = 1024
    """Rows that are placed together, at most."""
    splits: tuple[int, ...] = (IN_ORDER, EVEN, HIDDEN, HALVES)
    """Ways to split that are compared."""
    devices_per_node: int | None = None
    """Ranks of a node, by their numbers in the run: rows enter it once and are forwarded inside, a stage later than chosen where
    need be (forwarding.py); None: they come straight from home."""

    def __post_init__(self) -> None:
        if self.devices_per_node is not None and self.devices_per_node < 1:
            raise ValueError(f"A node has at least one rank; got devices_per_node={self.devices_per_node}.")
        least = min(self.max_degree, self.parcel, 1 if self.degree is None else self.degree + 1, len(self.splits))
        if least < 1 or not self.stage_seconds >= 0 or not set(self.splits) <= set(range(4)):
            raise ValueError(
                "Overlap has max_degree >= 1, parcel >= 1, degree >= 0, stage_seconds >= 0 and splits of 0 … 3; got "
                f"{self.max_degree}, {self.parcel}, {self.degree}, {self.stage_seconds} and {self.splits}."
            )


def groupcast_plan(
    shards: Shards,
    ranks: tuple[int, ...],
    rank: int | None = None,
    *,
    mask: Mask | npt.ArrayLike | None = None,
    overlap: Overlap | None = None,
) -> AttentionPlan:
    """Lower any shards and any mask to a group cast.

    ranks: rank numbers of the domain, one per shard. rank: index of the rank whose part is wanted; None: all of it. mask: of the
    pack's documents; None: causal within each.
    """
    P = shards.cp_size
    if len(ranks) != P:
        raise ValueError(f"A plan needs one rank per shard; got {len(ranks)} ranks {ranks} for {P} shards.")
    if rank is not None and not 0 <= rank < P:
        raise ValueError(f"rank is an index into the domain, 0 … {P - 1}; got {rank}.")
    wanted, chosen = of_documents(shards.cu_seqlens if mask is None else mask), overlap or Overlap()
    if int(wanted.tokens.sum()) != int(shards.cu_seqlens[-1]):
        raise ValueError(
            f"The mask is of {int(wanted.tokens.sum())} tokens, the shards of {int(shards.cu_seqlens[-1])}."
        )
    tiles = _staged(shards, wanted, chosen)
    where = shards.offsets, shards.segments, int(shards.cu_seqlens[-1])
    if chosen.devices_per_node is None:
        moves, returns = direct(tiles, *where)
    else:
        tiles, moves, returns = forwarded(tiles, *where, nodes=nodes_of(ranks, chosen.devices_per_node))
    plan = AttentionPlan(
        ranks=tuple(ranks),
        tokens=int(shards.cu_seqlens[-1]),
        home_offsets=shards.offsets,
        home=shards.segments,
        tiles=_joined(tiles, range(P) if rank is None else [rank]),
        moves=moves,
        returns=returns,
        planner=partial(_windowed, shards, ranks, rank, wanted, chosen),
    )
    return plan if rank is None else part_of(plan, rank)


def expected_seconds(plan: AttentionPlan, overlap: Overlap | None = None) -> float:
    """Seconds of a plan of all ranks under the overlap of transfers and compute that stages are chosen by."""
    chosen = overlap or Overlap()
    P, stages = len(plan.ranks), plan.stages
    pairs, flow = np.zeros((P, stages), np.int64), np.zeros((2, P, stages), np.int64)
    np.add.at(pairs, (plan.tiles[:, 0], plan.tiles[:, 1]), bands.pairs(plan.tiles[:, 2:]))
    for side in (0, 1):
        np.add.at(flow[side], (plan.moves[:, 2 + side], plan.moves[:, 0]), plan.moves[:, 5] - plan.moves[:, 4])
    calc = pairs * chosen.cost.seconds_per_pair
    comm = flow.max(axis=(0, 1)) * chosen.cost.seconds_per_row
    steps = np.maximum(calc[:, :-1], comm[None, 1:]).sum(axis=1) + calc[:, -1]
    return float(steps.max(initial=0.0) + (stages - 1) * chosen.stage_seconds)


def _windowed(
    shards: Shards, ranks: tuple[int, ...], rank: int | None, mask: Mask, overlap: Overlap, window: int
) -> AttentionPlan:
    return groupcast_plan(shards, ranks, rank, mask=mask & sliding_window(mask.tokens, window), overlap=overlap)


def _staged(shards: Shards, mask: Mask, overlap: Overlap) -> Int64:
    """The tiles of all ranks, cut along parcels of rows, each with its stage: int64[m, 8]."""
    total = int(shards.cu_seqlens[-1])
    if total == 0:
        return np.empty((0, 8), np.int64)
    order = np.argsort(shards.segments[:, 0])
    start = shards.segments[order, 0]
    owner = np.repeat(np.arange(shards.cp_size), np.diff(shards.offsets))[order]
    rows = np.union1d(shards.segments, np.arange(0, total, overlap.parcel))
    block, pieces = blocks(mask.tiles_of_pack(), np.append(start, total), rows)
    holder = owner[np.searchsorted(start, rows[:-1], side="right") - 1]  # of each range of rows
    pairs = np.zeros((shards.cp_size, len(rows) - 1), np.int64)
    user = owner[block[:, 0]]
    np.add.at(pairs, (user, block[:, 1]), bands.pairs(pieces))
    stage = _stages(pairs, np.diff(rows), holder, overlap)
    return np.column_stack([user, stage[user, block[:, 1]], pieces])


def _stages(pairs: Int64, length: Int64, holder: Int64, overlap: Overlap) -> Int64:
    """The stage in which each rank computes on each range of rows, int64[ranks, ranges]: 0 for its own, and what it does not need."""
    away = (pairs > 0) & (holder != np.arange(len(pairs))[:, None])
    user, at = np.nonzero(away)
    stage = np.zeros(pairs.shape, np.int64)
    if len(user) == 0:
        return stage
    if overlap.degree == 0:
        return np.ones_like(stage)
    work, rows, home = pairs[user, at], length[at], np.where(away, 0, pairs).sum(axis=1)
    per_row = np.argsort(-(work * UNITS // rows), kind="stable")
    falling = per_row[np.argsort(user[per_row], kind="stable")]
    offsets = np.searchsorted(user, np.arange(len(pairs) + 1))
    unit = (overlap.cost.seconds_per_pair or 1.0) / UNITS
    prices = np.rint(
        np.array([overlap.cost.seconds_per_pair, overlap.cost.seconds_per_row, overlap.stage_seconds]) / unit
    )
    degrees = range(1, overlap.max_degree + 1) if overlap.degree is None else [overlap.degree]
    best, least = np.empty(0, np.int64), -1
    for degree in degrees:
        for split in overlap.splits if degree > 1 else (IN_ORDER,):
            order = np.arange(len(user)) if split == IN_ORDER else falling
            found = _split(order, offsets, work, rows, home, prices.astype(np.int64), degree, split)
            price = _price(found, user, holder[at], work, rows, home, prices.astype(np.int64), degree)
            if least < 0 or price < least:
                best, least = found, price
    stage[user, at] = best
    return stage


def _joined(tiles: Int64, ranks: range | list[int]) -> Int64:
    """Tiles of these ranks, as few as neighbours of one stage allow."""
    out = [np.empty((0, 8), np.int64)]
    for rank in ranks:
        own = tiles[tiles[:, 0] == rank]
        for stage in np.unique(own[:, 1]).tolist():
            joined = bands.join(own[own[:, 1] == stage, 2:])
            out.append(np.column_stack([np.full((len(joined), 2), [rank, stage]), joined]))
    return np.concatenate(out)


@njit(nogil=True, cache=True)
def _split(order, offsets, work, rows, home, prices, degree, split):
    """The stage, 1 … degree, of each parcel. order: of the parcels of each rank; offsets: CSR rank → parcels."""
    stage = np.empty(len(work), np.int64)
    for r in range(len(offsets) - 1):
        left = np.int64(0)
        for i in range(offsets[r], offsets[r + 1]):
            left += rows[i]
        at, calc, moved, done = np.int64(1), home[r] * prices[0], np.int64(0), np.int64(0)
        for i in range(offsets[r], offsets[r + 1]):
            p = order[i]
            if at < degree:
                if split == HIDDEN:
                    full = moved > 0 and (moved + rows[p]) * prices[1] > calc
                elif split == HALVES:
                    full = moved > 0 and 2 * moved >= left
                else:
                    full = moved > 0 and moved * (degree - at + 1) >= left
                if full:
                    at, left, calc, moved, done = at + 1, left - moved, done * prices[0], np.int64(0), np.int64(0)
            stage[p] = at
            moved += rows[p]
            done += work[p]
    return stage


@njit(nogil=True, cache=True)
def _price(stage, user, holder, work, rows, home, prices, degree):
    """What the stages cost the slowest rank, see the module."""
    ranks = len(home)
    calc = np.zeros((degree + 1, ranks), np.int64)
    sent, received = np.zeros_like(calc), np.zeros_like(calc)
    calc[0] = home * prices[0]
    for i in range(len(stage)):
        calc[stage[i], user[i]] += work[i] * prices[0]
        received[stage[i], user[i]] += rows[i] * prices[1]
        sent[stage[i], holder[i]] += rows[i] * prices[1]
    slowest = np.int64(0)
    for r in range(ranks):
        total = calc[degree, r]
        for s in range(degree):
            total += max(calc[s, r], max(sent[s + 1].max(), received[s + 1].max()))
        slowest = max(slowest, total)
    return slowest + degree * prices[2]
