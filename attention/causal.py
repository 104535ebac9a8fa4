"""Tiles, moves and returns of causal documents in any shards, once it is said in which stage rows arrive: what ring, direct
sends and KV gather share.

Home rows are numbered by distance: those whose home is s ranks back are at distance s, and `stage_of[s]` is the stage in
which they arrive and are computed on. They come straight from home, or, with `forward`, from the neighbour, who received
them a stage earlier. Decided here is what need not travel: rank r needs a row only if it holds a later query of the same
document, so a sender cuts each segment to the longest prefix that the receiver, or anyone whom the receiver forwards to,
attends to; under a window, to the part behind, from the first row that the receiver's next query still sees. Gradients go
straight home from those who used a row.

With `rank` given only that rank's part is listed; what the domain exchanges in all is counted alike on every rank.

Cost: one pass over ranks x segments, in numba.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from ..packing.shards import Shards
from .bands import NO_LIMIT
from .plan import KV, AttentionPlan, Int64, Traffic


def causal_plan(
    shards: Shards,
    ranks: tuple[int, ...],
    rank: int | None,
    stage_of: Int64,
    *,
    forward: bool,
    skip: bool,
    window: int | None = None,
) -> AttentionPlan:
    """Lower any shards of causal documents. stage_of: int64[P], from 0, never falling; with `forward`, 0 … P-1.

    ranks: rank numbers of the domain, one per shard. rank: index of the rank whose part is wanted; None: all of it.
    skip: leave out rows that nobody needs; False sends all of them everywhere. window: how many keys a query sees, itself
    among them; None: all up to itself.
    """
    P = shards.cp_size
    if len(ranks) != P:
        raise ValueError(f"A plan needs one rank per shard; got {len(ranks)} ranks {ranks} for {P} shards.")
    if rank is not None and not 0 <= rank < P:
        raise ValueError(f"rank is an index into the domain, 0 … {P - 1}; got {rank}.")
    holder = np.repeat(np.arange(P), np.diff(shards.offsets))
    moves, returns, traffic = _routes(shards, holder, stage_of, -1 if rank is None else rank, forward, skip, window)
    order = np.lexsort((shards.segments[:, 0], shards.document, holder))
    segments, document = shards.segments[order], shards.document[order]
    sees = NO_LIMIT + 1 if window is None else window
    listed = range(P) if rank is None else [rank]
    tiles = [_tiles(segments, document, shards.offsets, stage_of, r, sees) for r in listed]
    return AttentionPlan(
        ranks=tuple(ranks),
        tokens=int(shards.cu_seqlens[-1]),
        home_offsets=shards.offsets,
        home=shards.segments,
        tiles=np.concatenate(tiles),
        moves=moves,
        returns=returns,
        rank=rank,
        known=None if rank is None else traffic,
        planner=partial(_windowed, shards, ranks, rank, stage_of, forward, skip) if window is None else None,
    )


def _windowed(
    shards: Shards, ranks: tuple[int, ...], rank: int | None, stage_of: Int64, forward: bool, skip: bool, window: int
) -> AttentionPlan:
    return causal_plan(shards, ranks, rank, stage_of, forward=forward, skip=skip, window=window)


def _routes(
    shards: Shards, holder: Int64, stage_of: Int64, rank: int, forward: bool, skip: bool, window: int | None
) -> tuple[Int64, Int64, Traffic]:
    """Moves and returns that `rank` (-1: any) takes part in, by stage, and what all ranks exchange."""
    P, stages, count = shards.cp_size, int(stage_of[-1]) + 1, len(holder)
    last = _last(shards.segments, shards.document, holder, len(shards.cu_seqlens) - 1, P)
    # Of a segment that is not its own a rank lists at most that it comes and that it goes on, or goes back.
    most = P * count if rank < 0 else 2 * count + P * int((holder == rank).sum())
    moves, returns = np.empty((most, 6), np.int64), np.empty((most, 6), np.int64)
    by_stage, by_rank = np.zeros((stages, 2), np.int64), np.zeros((4, P), np.int64)
    seen = np.empty((0, P), np.int64)
    if window is not None:
        order = np.lexsort((-shards.segments[:, 0], shards.document))
        seen = _seen(shards.segments, shards.document, holder, order, P, window)
    num_moves, num_returns = _walk(
        shards.segments,
        shards.document,
        holder,
        last,
        seen,
        stage_of,
        rank,
        forward,
        skip,
        moves,
        returns,
        by_stage,
        by_rank,
    )
    moves, returns = _in_order(moves[:num_moves], stages), _in_order(returns[:num_returns], stages)
    used = np.flatnonzero(by_stage.any(axis=1))
    return moves, returns, Traffic(by_stage=by_stage[: used[-1] + 1 if len(used) else 1], by_rank=by_rank)


def _tiles(segments: Int64, document: Int64, offsets: Int64, stage_of: Int64, rank: int, window: int) -> Int64:
    nothing = np.empty((0, 8), np.int64)
    tiles = np.empty((_match(segments, document, offsets, stage_of, rank, window, nothing), 8), np.int64)
    _match(segments, document, offsets, stage_of, rank, window, tiles)
    return tiles


@njit(nogil=True, cache=True)
def _last(segments, document, holder, documents, ranks):
    """int64[documents, ranks]: one past the last query of each document that each rank holds; 0 if it holds none."""
    last = np.zeros((documents, ranks), np.int64)
    for x in range(len(segments)):
        d, r = document[x], holder[x]
        last[d, r] = max(last[d, r], segments[x, 1])
    return last


@njit(nogil=True, cache=True)
def _seen(segments, document, holder, order, ranks, window):
    """int64[n, ranks]: from which row on each segment is seen by each rank's later queries; its end if it is not.

    order: by document, and in each from the last segment to the first, so that each rank's next query is known.
    """
    seen = np.empty((len(segments), ranks), np.int64)
    following = np.full(ranks, NO_LIMIT, np.int64)
    for i in range(len(order)):
        x = order[i]
        if i > 0 and document[x] != document[order[i - 1]]:
            following[:] = NO_LIMIT
        start, stop = segments[x, 0], segments[x, 1]
        for rank in range(ranks):
            seen[x, rank] = min(max(start, following[rank] - window + 1), stop)
        following[holder[x]] = start
    return seen


@njit(nogil=True, cache=True)
def _walk(segments, document, holder, last, seen, stage_of, rank, forward, skip, moves, returns, by_stage, by_rank):
    """Count what all ranks exchange, write what `rank` takes part in, segment by segment; return (moves, returns) written.

    seen: under a window, see `_seen`; without rows: there is none.
    """
    P = last.shape[1]
    m = n = 0
    for x in range(len(segments)):
        home, start, stop = holder[x], segments[x, 0], segments[x, 1]
        # From the farthest rank back, so that first … ahead is what anyone from this rank on still attends to.
        first, ahead = (stop, start) if skip else (start, stop)
        for distance in range(P - 1, 0, -1):
            user = home + distance
            user = user - P if user >= P else user
            begin, needed = start, min(max(last[document[x], user], start), stop)
            if len(seen):
                begin, needed = seen[x, user], stop
            if begin < needed:
                first, ahead = min(first, begin), max(ahead, needed)
            a, b = (first, ahead) if forward or not skip else (begin, needed)
            if a >= b:
                continue
            src = home if not forward else user - 1 if user > 0 else P - 1
            stage = stage_of[distance]
            by_stage[stage, 0] += b - a
            by_rank[0, src] += b - a
            by_rank[1, user] += b - a
            if rank < 0 or rank == user or rank == src:
                moves[m] = (stage, KV, src, user, a, b)
                m += 1
            if begin < needed:
                by_stage[stage, 1] += needed - begin
                by_rank[2, user] += needed - begin
                by_rank[3, home] += needed - begin
                if rank < 0 or rank == user or rank == home:
                    returns[n] = (stage, KV, user, home, begin, needed)
                    n += 1
    return m, n


@njit(nogil=True, cache=True)
def _in_order(routes, stages):
    """Routes by stage, those of one stage in the order given."""
    at = np.zeros(stages + 1, np.int64)
    for i in range(len(routes)):
        at[routes[i, 0] + 1] += 1
    for stage in range(stages):
        at[stage + 1] += at[stage]
    ordered = np.empty_like(routes)
    for i in range(len(routes)):
        ordered[at[routes[i, 0]]] = routes[i]
        at[routes[i, 0]] += 1
    return ordered


@njit(nogil=True, cache=True)
def _match(segments, document, offsets, stage_of, rank, window, tiles):
    """Write the tiles of `rank` if there is room for them; return how many there are.

    segments are sorted by holder, document, start. For each distance, the rank's segments and those of the origin are
    walked together, document by document. window: NO_LIMIT + 1 for none.
    """
    P = len(offsets) - 1
    n = 0
    for distance in range(P):
        origin = (rank - distance) % P
        low = offsets[origin]
        for y in range(offsets[rank], offsets[rank + 1]):
            while low < offsets[origin + 1] and document[low] < document[y]:
                low += 1
            x = low
            while x < offsets[origin + 1] and document[x] == document[y] and segments[x, 0] < segments[y, 1]:
                k0, k1 = max(segments[x, 0], segments[y, 0] - window + 1), segments[x, 1]
                q0, q1 = segments[y, 0], min(segments[y, 1], k1 + window - 1)
                x += 1
                if k0 >= k1:
                    continue
                if n < len(tiles):
                    tiles[n] = (rank, stage_of[distance], q0, q1, k0, k1, 0, window - 1)
                n += 1
    return n
