"""TAP, tile-based attention parallelism (Libra, arXiv:2607.23250): a pool of CP groups shares the attention of its packs.

The domain is the pool: CP groups that hold a pack each, laid end to end. Tokens stay where the loader put them; each rank
computes attention for its own queries, with keys received from its group, until it has more than its share. The surplus migrates
to ranks of the pool that have less: queries go there with the keys they need, O and LSE come back, and so do dQ, dK and dV in
backward. Which blocks of queries and head groups go where is for migration.py to say: whole head groups first, then blocks of
sequence, to a soft cap of `tolerance` times the mean. A pool in balance moves nothing but what its groups exchange anyway.

Head groups are the stages, too. In stage g a rank computes what it has at home for group g, and for group g - 1 all that had to
come; queries and keys of the next group are under way meanwhile, and outputs of the one before go home. So with G head groups
all but the first arrival and the last return have computing beside them, and about 2/G of what is received is held at a time
(`attend(keep=False)`).

Cost: the blocks of all packs are planned together, on each rank alike; see `benchmarks/tiles.py`.

    >>> from equipoise.packing.shards import contiguous
    >>> pool = [contiguous([0, 8], 1), contiguous([0, 2, 4, 6, 8], 1)]                  # one document of 8; four of 2
    >>> loads = tap_plan(pool, ranks=(0, 1), block=1, tolerance=1.0).loads()
    >>> loads.pairs, loads.q_rows_sent, loads.rows_sent                                # rows 3 and 7 of the long one go
    (array([24, 24]), array([2, 0]), array([8, 0]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..packing.efficiency import WHOLE, efficiency
from ..packing.mask_areas import blocks as cut_along
from ..packing.mask_areas import chunk_keys, chunk_pairs
from ..packing.mask_kinds import causal, sliding_window
from ..packing.masks import Mask
from ..packing.shards import Shards
from . import bands
from .migration import Blocks, placed
from .plan import AttentionPlan, Int64
from .routing import direct, part_of
from .traffic import KV, Q, bytes_moved, listed_traffic

KV_COST, Q_COST = 2, 9
"""Bytes of a row of KV and of Q, there and back, in forward and backward, in proportion: bf16, four query heads to a KV head. What
is said where the plan does not know its model; `Tap.for_heads` says it."""


@dataclass(frozen=True, kw_only=True)
class Tap:
    """How a pool's surplus is cut, and when it migrates."""

    head_groups: int = 1
    """Groups of heads that migrate each for itself, and come in turn; must divide the KV heads."""
    block: int = 512
    """Queries that migrate together, at most: fewer balance better. Kernels need 128 and more, and what goes where a neighbour went
    joins it, so that 512 move no more bytes than 2048 and reach 1.05 on 8 x cp 8 packs of 256K, which in one head group
    2048 miss (1.24): see `benchmarks/tiles.py`."""
    tolerance: float = 1.05
    """No rank exceeds so many times the mean, as far as blocks allow; 1 and up."""
    by: str = "pairs"
    """What is balanced: `pairs`, or the `seconds` that kernels take for them (`packing/efficiency.py`)."""
    kv_cost: int = KV_COST
    """What a row of keys and values costs to move and to bring back, in the unit of `q_cost`; see `for_heads`."""
    q_cost: int = Q_COST
    heads_first: bool = False
    """As much of a document in one head group as may move does at once, as Libra has it; False: as many blocks of it as are
    cheapest a pair, then perhaps another head group's. Measured, packs of 256K, 4 and 8 head groups: heads first never moves fewer
    bytes of KV and Q together; as many over 8 x cp 8 ranks (+0.3 to 3 %), and on 8 x cp 1 9 to 22 % more, which are queries
    (`wlb_like`, `mooncake_conversation`: `benchmarks/tiles.py`). It takes half the time to plan."""

    def __post_init__(self) -> None:
        if self.head_groups < 1 or self.block < 1 or not self.tolerance >= 1 or min(self.kv_cost, self.q_cost) < 0:
            raise ValueError(
                f"A pool has at least one head group, blocks of at least one query, a tolerance of at least 1 and no negative "
                f"costs; got {self}."
            )
        if self.by not in ("pairs", "seconds"):
            raise ValueError(f"by says what a pool balances, 'pairs' or 'seconds'; got {self.by!r}.")

    def for_heads(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        itemsize: int = 2,
        *,
        value_dim: int | None = None,
        keep: bool = True,
    ) -> Tap:
        """The same, with costs that are the bytes of a row of this attention: of KV there and dK, dV back, of Q, dO, O and LSE there and
        (O, LSE) and dQ back (`traffic.bytes_moved`); itemsize: bytes of a value; value_dim, keep: as there.

        Raises ValueError where head groups do not divide the KV heads.

            >>> costs = [Tap().for_heads(heads, 8, 128) for heads in (8, 32, 64)]
            >>> [round(tap.q_cost / tap.kv_cost, 2) for tap in costs]                 # MHA; four, and eight query heads to a KV head
            [1.17, 4.69, 9.38]
        """
        if kv_heads % self.head_groups or heads % kv_heads:
            raise ValueError(
                f"head_groups must divide the KV heads, and these the query heads; got head_groups={self.head_groups}, "
                f"{kv_heads} and {heads}."
            )
        there, back = (
            np.array([[1, KV, 0, 1, 0, 1], [1, Q, 0, 1, 0, 1]]),
            np.array([[1, KV, 1, 0, 0, 1], [1, Q, 1, 0, 0, 1]]),
        )
        row, shape = listed_traffic(there, back, 2, 2), (heads, kv_heads, head_dim, itemsize, value_dim)
        moved = sum(bytes_moved(row, *shape, backward=backward, keep=keep)[0].sum(1) for backward in (False, True))
        kv_cost, q_cost = (moved // self.head_groups).tolist()
        return replace(self, kv_cost=kv_cost, q_cost=q_cost)

    def plan(
        self, shards: Sequence[Shards], ranks: tuple[int, ...], rank: int | None, masks: Sequence[Mask] | None = None
    ) -> AttentionPlan:
        """See `tap_plan`."""
        _refuse(shards, ranks, rank, masks)
        documents = [causal(np.diff(pack.cu_seqlens)) for pack in shards] if masks is None else masks
        mask = Mask.concat(documents)
        offsets, home = _homes(shards)
        tokens = int(mask.tokens.sum())
        runs = _runs(offsets, home)
        edges, blocks = _blocks(runs, mask, tokens, self.block, self.by)
        total, G = self.head_groups * int(blocks.pairs.sum()), self.head_groups
        cap = round(1000 * self.tolerance) * total // (1000 * len(ranks))
        costs = {"kv_cost": self.kv_cost, "q_cost": self.q_cost}
        owner = placed(blocks, len(ranks), G, cap, heads_first=self.heads_first, **costs)
        tiles = _tiles(edges, blocks.home, owner, runs, mask.tiles_of_pack(), tokens)
        moves, returns = direct(tiles, offsets, home, tokens, head_groups=G)
        plan = AttentionPlan(
            ranks=tuple(ranks),
            tokens=tokens,
            home_offsets=offsets,
            home=home,
            tiles=tiles,
            moves=moves,
            returns=returns,
            head_groups=G,
            planner=partial(_windowed, self, shards, tuple(ranks), rank, documents),
        )
        return plan if rank is None else part_of(plan, rank)


def tap_plan(
    shards: Sequence[Shards],
    ranks: tuple[int, ...],
    rank: int | None = None,
    *,
    masks: Sequence[Mask] | None = None,
    head_groups: int = 1,
    block: int = 512,
    tolerance: float = 1.05,
    by: str = "pairs",
    kv_cost: int = KV_COST,
    q_cost: int = Q_COST,
    heads_first: bool = False,
) -> AttentionPlan:
    """A plan of a pool's attention, over the positions of all its packs, end to end.

    shards: of each CP group of the pool, the pack it holds; a pack may be empty. ranks: rank numbers of the pool, CP group after CP
    group. rank: index among them of the rank whose part is wanted; None: all of it. masks: of the packs' documents; None: causal.
    The others: see `Tap`.

    Raises ValueError for ranks that are not as many as the shards', for masks of other packs, and for options out of range.
    """
    return Tap(
        head_groups=head_groups,
        block=block,
        tolerance=tolerance,
        by=by,
        kv_cost=kv_cost,
        q_cost=q_cost,
        heads_first=heads_first,
    ).plan(shards, ranks, rank, masks)


def _windowed(
    tap: Tap, shards: Sequence[Shards], ranks: tuple[int, ...], rank: int | None, masks: Sequence[Mask], window: int
) -> AttentionPlan:
    """The same pool for layers with a sliding window, which need another balance."""
    return tap.plan(shards, ranks, rank, [mask & sliding_window(mask.tokens, window) for mask in masks])


def _refuse(shards: Sequence[Shards], ranks: tuple[int, ...], rank: int | None, masks: Sequence[Mask] | None) -> None:
    sizes = [pack.cp_size for pack in shards]
    if not sizes or sum(sizes) != len(ranks):
        raise ValueError(f"A pool has the ranks of its CP groups, of {sizes} ranks; got {len(ranks)} ranks {ranks}.")
    if rank is not None and not 0 <= rank < len(ranks):
        raise ValueError(f"rank is an index into the pool, 0 … {len(ranks) - 1}; got {rank}.")
    if masks is not None:
        held, masked = [int(pack.cu_seqlens[-1]) for pack in shards], [int(mask.tokens.sum()) for mask in masks]
        if held != masked:
            raise ValueError(
                f"Each pack of a pool has a mask of its tokens; got packs of {held} and masks of {masked}."
            )


def _homes(shards: Sequence[Shards]) -> tuple[Int64, Int64]:
    """(home_offsets, home) of all packs, end to end."""
    begin = np.cumsum([0, *(int(pack.cu_seqlens[-1]) for pack in shards)])
    counts = np.concatenate([np.diff(pack.offsets) for pack in shards])
    home = np.concatenate([pack.segments + at for pack, at in zip(shards, begin, strict=False)])
    return np.concatenate([[0], np.cumsum(counts)]), home


def _runs(offsets: Int64, home: Int64) -> Int64:
    """Positions in runs that one rank holds, int64[n, 3] (start, stop, rank), in order; touching ones joined."""
    held = np.column_stack([home, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))])
    held = held[np.argsort(held[:, 0], kind="stable")]
    begins = np.flatnonzero(np.diff(held[:, 2], prepend=-1))
    stops = np.append(held[begins[1:], 0], held[-1:, 1])
    return np.column_stack([held[begins, 0], stops[: len(begins)], held[begins, 2]])


def _blocks(runs: Int64, mask: Mask, tokens: int, block: int, by: str) -> tuple[Int64, Blocks]:
    """Runs cut into as few blocks of at most `block` queries as may be, equally long: (edges, blocks)."""
    length = runs[:, 1] - runs[:, 0]
    count = -(-length // block)
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    start = np.repeat(runs[:, 0], count) + nth * np.repeat(length, count) // np.repeat(count, count)
    edges = np.append(start, tokens)
    tiles = mask.tiles_of_pack()
    if by == "pairs":
        work = chunk_pairs(tiles, edges)
    else:
        (chunk, _), pieces = (x if x.shape[1] == 6 else x.T for x in cut_along(tiles, edges, [0, tokens]))
        work = np.zeros(len(edges) - 1, np.int64)
        np.add.at(work, chunk, kernel_work(pieces))
    return edges, Blocks.of(edges, np.repeat(runs[:, 2], count), work, chunk_keys(tiles, edges))


def kernel_work(tiles: Int64) -> Int64:
    """How long kernels take for each tile (int64[m, 6], of one document each), int64[m], in pairs of long documents."""
    q0, q1, k0, k1, lo, hi = tiles.T
    rows = np.minimum(q1, k1 + hi) - np.maximum(q0, k0 + lo)
    keys = np.minimum(k1, q1 - lo) - np.maximum(k0, q0 - hi)
    speed = efficiency(np.maximum(rows, 1), np.maximum(keys, 1)) / WHOLE[-1]
    return np.ceil(bands.pairs(tiles) / speed).astype(np.int64)


def _tiles(edges: Int64, home: Int64, owner: Int64, runs: Int64, mask: Int64, tokens: int) -> Int64:
    """int64[m, 8] of all ranks, by stage: group g's own queries on keys at home in stage g, all else of it in stage g + 1."""
    k_edges = np.append(runs[:, 0], tokens)
    parts = [np.zeros((0, 8), np.int64)]
    for group, computes in enumerate(owner):
        begins = np.flatnonzero((np.diff(computes, prepend=-1) != 0) | (np.diff(home, prepend=-1) != 0))
        (chunk, run), pieces = (
            x if x.shape[1] == 6 else x.T for x in cut_along(mask, np.append(edges[begins], tokens), k_edges)
        )
        rank, holder = computes[begins][chunk], home[begins][chunk]
        stage = group + ((rank != holder) | (rank != runs[run, 2]))
        for s in (group, group + 1):
            for r in np.unique(rank[stage == s]).tolist():
                own = bands.join(pieces[(stage == s) & (rank == r)])
                own[:, :4] += group * tokens
                parts.append(np.column_stack([np.full(len(own), r), np.full(len(own), s), own]))
    return np.concatenate(parts)
