"""Ring attention as a plan: KV rows travel round the ranks, one neighbour a stage (Liu et al. 2023, varlen).

What is decided: in stage s, rank r computes on the KV that started s ranks back, received from its neighbour, while
the next rows are already on their way. A row travels no further than the last rank that needs it: rank r needs a row
only if it holds a later query of the same document, so every sender cuts each segment to the longest prefix that
anyone still ahead of it attends to. For one document this is the whole ring, (P-1)·tokens/P rows a rank; a document
that one rank holds alone never leaves it. What a rank only carries onward does not come back: gradients go straight
home from those who used the row.

Cost: moves for all P ranks, P · segments entries; tiles for one rank by a merge of two sorted lists.

    >>> from equipoise.packing.shards import contiguous
    >>> ring_plan(contiguous([0, 6], 3), ranks=(0, 1, 2)).moves[:, [0, 2, 3, 4, 5]]     # stage, from, to, rows
    array([[1, 0, 1, 0, 2],
           [1, 1, 2, 2, 4],
           [2, 1, 2, 0, 2]])
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..packing.shards import Shards
from .bands import NO_LIMIT
from .plan import KV, AttentionPlan, Int64


def ring_plan(shards: Shards, ranks: tuple[int, ...], rank: int | None = None, *, skip: bool = True) -> AttentionPlan:
    """Lower any shards of causal documents to a ring with forwarding.

    ranks: rank numbers of the domain, one per shard. rank: index of the rank whose tiles are wanted; None: of all.
    skip: leave out rows that nobody behind needs; False sends everything round, which is what a plain ring does.
    """
    P = shards.cp_size
    if len(ranks) != P:
        raise ValueError(f"A ring needs one rank per shard; got {len(ranks)} ranks {ranks} for {P} shards.")
    if rank is not None and not 0 <= rank < P:
        raise ValueError(f"rank is an index into the domain, 0 … {P - 1}; got {rank}.")
    holder = np.repeat(np.arange(P), np.diff(shards.offsets))
    last = np.zeros((P, len(shards.cu_seqlens)), np.int64)
    np.maximum.at(last, (holder, shards.document), shards.segments[:, 1])
    moves, returns = _routes(shards.segments, shards.document, holder, last, skip)
    order = np.lexsort((shards.segments[:, 0], shards.document, holder))
    tiles = [
        _tiles(shards.segments[order], shards.document[order], shards.offsets, r)
        for r in (range(P) if rank is None else [rank])
    ]
    return AttentionPlan(
        ranks=tuple(ranks),
        tokens=int(shards.cu_seqlens[-1]),
        home_offsets=shards.offsets,
        home=shards.segments,
        tiles=np.concatenate(tiles),
        moves=moves,
        returns=returns,
        rank=rank,
    )


def _routes(segments: Int64, document: Int64, holder: Int64, last: Int64, skip: bool) -> tuple[Int64, Int64]:
    """Moves and returns of all ranks, stage by stage. last: int64[P, documents], one past a rank's last query of each."""
    P = len(last)
    start, stop = segments[:, 0], segments[:, 1]
    moves, returns = [], []
    ahead = start if skip else stop
    # From the last stage back, so that `ahead` is what anyone from this stage on still attends to.
    for stage in range(P - 1, 0, -1):
        user = (holder + stage) % P
        needed = np.clip(last[user, document], start, stop)
        ahead = np.maximum(ahead, needed)
        moves.append(_rows(stage, (user - 1) % P, user, start, ahead))
        returns.append(_rows(stage, user, holder, start, needed))
    empty = np.zeros((0, 6), np.int64)
    return np.concatenate([empty, *reversed(moves)]), np.concatenate([empty, *reversed(returns)])


def _rows(stage: int, src: Int64, dst: Int64, start: Int64, stop: Int64) -> Int64:
    columns = np.broadcast_arrays(stage, KV, src, dst, start, stop)
    return np.stack(columns, axis=1)[stop > start].astype(np.int64)


def _tiles(segments: Int64, document: Int64, offsets: Int64, rank: int) -> Int64:
    tiles = np.empty((_match(segments, document, offsets, rank, np.empty((0, 8), np.int64)), 8), np.int64)
    _match(segments, document, offsets, rank, tiles)
    return tiles


@njit(nogil=True, cache=True)
def _match(segments, document, offsets, rank, tiles):
    """Write the tiles of `rank` if there is room for them; return how many there are.

    segments are sorted by holder, document, start. For each stage, the rank's segments and those of the stage's origin
    are walked together, document by document.
    """
    P = len(offsets) - 1
    n = 0
    for stage in range(P):
        origin = (rank - stage) % P
        low = offsets[origin]
        for y in range(offsets[rank], offsets[rank + 1]):
            while low < offsets[origin + 1] and document[low] < document[y]:
                low += 1
            x = low
            while x < offsets[origin + 1] and document[x] == document[y] and segments[x, 0] < segments[y, 1]:
                if n < len(tiles):
                    q0, q1 = max(segments[y, 0], segments[x, 0]), segments[y, 1]
                    tiles[n] = (rank, stage, q0, q1, segments[x, 0], min(segments[x, 1], q1), 0, NO_LIMIT)
                n += 1
                x += 1
    return n
