"""A plan as one rank sees it: positions turned into addresses. No torch, so that a loader's worker can do it.

A rank keeps its own rows in buffer 0, in the order it holds them, head group after head group, and the KV rows that
arrive in stage s in buffer s, in the order of the pack: from several senders a document's rows come in pieces, which
kernels would take one by one, so the executor places them once, on arrival. Q rows have buffers of their own, alike.
`lower` turns tiles into tiles of addresses (joined where rows lie
side by side, which makes one causal square of a zigzag rank's two chunks), and moves and returns into rows to pick and
split sizes of one all-to-all a stage. Whether a stage has an all-to-all follows from what all ranks exchange, so a rank
with nothing to send or receive takes part with empty splits.

    >>> from equipoise.packing.shards import zigzag
    >>> from equipoise.attention.ring import ring_plan
    >>> stage = lower(ring_plan(zigzag([0, 8], 2), ranks=(0, 1)), rank=1).stages[1]
    >>> [(q_buffer, buffer, tiles[:, :4].tolist()) for q_buffer, buffer, tiles in stage.tiles]
    [(0, 1, [[0, 4, 0, 2]])]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from .bands import join
from .plan import KV, AttentionPlan, Int64, Q


class Landing(NamedTuple):
    """Where rows that come from a sender belong."""

    buffer: int
    """0: they are home. Another: they are on their way, and what this rank has of them goes on with them later."""
    which: Int64 | None
    """Which of the rows that come from the sender these are; None: all of them."""
    rows: Int64
    """Of the buffer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cargo:
    """One rank's part in one all-to-all."""

    picks: list[tuple[int, Int64]]
    """(buffer, rows to take of it): laid end to end …"""
    order: Int64 | None
    """… and permuted by this, if given, they are the rows to send, ordered by receiver."""
    send_splits: list[int]
    receive_splits: list[int]
    placing: Int64 | None
    """Which of the rows that arrive each row of the buffer is; None: all of them as they come."""
    landing: list[list[Landing]]
    """For returns: the rows that what arrives from each sender is added to. Empty for moves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """What one rank does in a stage. An exchange is None if no rank takes part in it."""

    tiles: list[tuple[int, int, Int64]]
    """(buffer of the queries, buffer of the keys, int64[m, 6] tiles of addresses)."""
    moves: Cargo | None
    """KV, exchanged before the tiles."""
    returns: Cargo | None
    """dK and dV, exchanged after the tiles, in backward."""
    q_moves: Cargo | None = None
    """Q, exchanged before the tiles."""
    q_returns: Cargo | None = None
    """O and LSE, exchanged after the tiles, and dQ in backward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    stages: list[Stage]
    buffer_rows: list[int]
    """Rows of each buffer of keys and values."""
    q_rows: list[int]
    """Rows of each buffer of queries."""

    @property
    def tokens(self) -> int:
        """Query rows at home."""
        return self.q_rows[0]


def lower(plan: AttentionPlan, rank: int) -> Program:
    """What `rank` (an index into the plan's ranks) does. The plan must hold its tiles."""
    if plan.rank not in (None, rank):
        raise ValueError(f"This plan holds the tiles of rank {plan.rank} of {plan.ranks}; got rank {rank}.")
    kv_moves, kv_returns, keys, rows = _kind(plan, rank, KV)
    q_moves, q_returns, queries, q_rows = _kind(plan, rank, Q)
    tiles = _addressed(plan.tiles[plan.tiles[:, 0] == rank], queries, keys, plan.stages)
    stages = [
        Stage(tiles=at, moves=move, returns=back, q_moves=q_move, q_returns=q_back)
        for at, move, back, q_move, q_back in zip(tiles, kv_moves, kv_returns, q_moves, q_returns, strict=True)
    ]
    return Program(stages=stages, buffer_rows=rows, q_rows=q_rows)


def _kind(plan: AttentionPlan, rank: int, kind: int) -> tuple[list[Cargo | None], list[Cargo | None], Int64, list[int]]:
    """Of KV or Q rows: what is exchanged before and after each stage, where rows are, and rows of each buffer."""
    exchanged = np.zeros((plan.stages, 2), bool)
    by_stage = plan.traffic.of(kind)[0]
    exchanged[: len(by_stage)] = by_stage > 0
    routes = [x[x[:, 1] == kind] for x in (plan.moves, plan.returns)]
    held, rows, placing = _holdings(plan, routes[0], rank)
    moves = _cargos(plan, routes[0], rank, held, exchanged[:, 0])
    placed = [move and replace(move, placing=order) for move, order in zip(moves, placing, strict=True)]
    return placed, _cargos(plan, routes[1], rank, held, exchanged[:, 1], landing=True), held, rows


def _home(plan: AttentionPlan, rank: int) -> Int64:
    """(start, stop) of what the rank holds, in virtual positions, int64[n, 2]."""
    home, G = plan.home_of(rank), plan.head_groups
    return np.tile(home, (G, 1)) + np.repeat(np.arange(G) * plan.tokens, len(home))[:, None]


def _holdings(plan: AttentionPlan, moves: Int64, rank: int) -> tuple[Int64, list[int], list[Int64 | None]]:
    """All intervals of a kind that the rank ever has, int64[4, n] = (start, stop, buffer, first row), by start; rows of each
    buffer; and for each stage which of the rows that arrive comes where in its buffer."""
    arriving = moves[moves[:, 3] == rank]
    # Stable: within a stage by sender, and then as listed, which is the order in which the sender packs them.
    arriving = arriving[np.lexsort((arriving[:, 2], arriving[:, 0]))]
    placed = np.lexsort((arriving[:, 4], arriving[:, 0]))
    home = _home(plan, rank)
    intervals = np.concatenate([home, arriving[placed, 4:]])
    buffer = np.concatenate([np.zeros(len(home), np.int64), arriving[placed, 0]])
    lengths = intervals[:, 1] - intervals[:, 0]
    rows = np.bincount(buffer, lengths, plan.stages).astype(np.int64)
    first = np.cumsum(lengths) - lengths - (np.cumsum(rows) - rows)[buffer]
    held = np.column_stack([intervals, buffer, first])
    placing: list[Int64 | None] = [None] * plan.stages
    came = np.cumsum(arriving[:, 5] - arriving[:, 4]) - (arriving[:, 5] - arriving[:, 4])
    ends = np.searchsorted(arriving[:, 0], np.arange(plan.stages + 1))
    for stage in np.flatnonzero(np.bincount(arriving[:, 0], placed != np.arange(len(placed)))).tolist():
        order = placed[ends[stage] : ends[stage + 1]]
        placing[stage] = expanded(came[order] - came[ends[stage]], lengths[len(home) :][ends[stage] : ends[stage + 1]])
    return np.ascontiguousarray(held[np.argsort(held[:, 0], kind="stable")].T), rows.tolist(), placing


def expanded(start: Int64, lengths: Int64) -> Int64:
    """start[0], start[0] + 1, … of lengths[0] numbers, then start[1], …"""
    return np.arange(lengths.sum()) + np.repeat(start - (np.cumsum(lengths) - lengths), lengths)


def _addressed(tiles: Int64, queries: Int64, keys: Int64, stages: int) -> list[list[tuple[int, int, Int64]]]:
    """For each stage, tiles of addresses by buffers of their queries and keys."""
    out = _cut(np.ascontiguousarray(tiles), queries, keys)
    out = out[np.lexsort((out[:, 2], out[:, 1], out[:, 0]))]
    by_stage: list[list[tuple[int, int, Int64]]] = [[] for _ in range(stages)]
    cuts = np.flatnonzero(np.any(np.diff(out[:, :3], axis=0) != 0, axis=1)) + 1
    for part in np.split(out, cuts) if len(out) else []:
        # Where a tile was cut there may be pieces without a pair, whose rows need not be there.
        if len(joined := join(part[:, 3:])):
            by_stage[part[0, 0]].append((int(part[0, 1]), int(part[0, 2]), joined))
    return by_stage


def _cargos(
    plan: AttentionPlan, routes: Int64, rank: int, held: Int64, exchanged: npt.NDArray[np.bool_], landing: bool = False
) -> list[Cargo | None]:
    """The rank's part in the exchanges of `routes`, moves or returns, of all stages."""
    outgoing, send_splits = _by_peer(plan, routes[routes[:, 2] == rank], 3)
    incoming, receive_splits = _by_peer(plan, routes[routes[:, 3] == rank], 2)
    buffer, row = _locate(outgoing[:, 4:], held)
    into, at = _locate(incoming[:, 4:], held) if landing else (np.zeros(0, np.int64),) * 2
    leave, come = (np.cumsum(np.append(0, splits.sum(1))) for splits in (send_splits, receive_splits))
    cargos: list[Cargo | None] = [None] * plan.stages
    for s in np.flatnonzero(exchanged).tolist():
        picks, order = _picks(buffer[leave[s] : leave[s + 1]], row[leave[s] : leave[s + 1]])
        ends = (come[s] + np.cumsum(receive_splits[s])).tolist()
        cargos[s] = Cargo(
            picks=picks,
            order=order,
            send_splits=send_splits[s].tolist(),
            receive_splits=receive_splits[s].tolist(),
            placing=None,
            landing=[_landings(into[a:b], at[a:b]) for a, b in pairwise([int(come[s]), *ends])] if landing else [],
        )
    return cargos


def _by_peer(plan: AttentionPlan, routes: Int64, side: int) -> tuple[Int64, Int64]:
    """Routes by stage and peer, as listed else; rows for each, int64[stages, P]."""
    P = len(plan.ranks)
    peer = routes[:, 0] * P + routes[:, side]
    order = np.argsort(peer, kind="stable")
    splits = np.bincount(peer, routes[:, 5] - routes[:, 4], plan.stages * P).astype(np.int64)
    return np.ascontiguousarray(routes[order]), splits.reshape(plan.stages, P)


def _picks(buffer: Int64, row: Int64) -> tuple[list[tuple[int, Int64]], Int64 | None]:
    """Cargo.picks and Cargo.order of rows in the order in which they are sent."""
    if len(buffer) == 0 or np.all(buffer == buffer[0]):
        return [(int(buffer[0]), row)] if len(buffer) else [], None
    by_buffer = np.argsort(buffer, kind="stable")
    return [(int(b), row[buffer == b]) for b in np.unique(buffer)], np.argsort(by_buffer, kind="stable")


def _landings(buffer: Int64, row: Int64) -> list[Landing]:
    """Where rows belong, for each buffer that any do."""
    buffers = np.unique(buffer).tolist()
    if len(buffers) == 1:
        return [Landing(buffers[0], None, row)]
    return [Landing(b, np.flatnonzero(buffer == b), row[buffer == b]) for b in buffers]


@njit(nogil=True, cache=True)
def _find(start, position):
    """Index of the last interval that begins at or before a position, -1 if none does. start: rising."""
    low, high = 0, len(start)
    while low < high:
        middle = (low + high) // 2
        if start[middle] <= position:
            low = middle + 1
        else:
            high = middle
    return low - 1


@njit(nogil=True, cache=True)
def _cut(tiles, queries, keys):
    """Tiles cut where rows stop lying side by side: int64[n, 9], (stage, buffers of queries and keys, q0, q1, k0, k1, lo, hi)
    in addresses."""
    q_start, q_stop, q_buffer, q_first = queries
    start, stop, buffer, first = keys
    out = np.empty((2 * len(tiles) + 8, 9), np.int64)
    n = 0
    for i in range(len(tiles)):
        _, stage, q0, q1, k0, k1, lo, hi = tiles[i]
        y = max(_find(q_start, q0), 0)
        x0 = max(_find(start, k0), 0)
        while y < len(q_start) and q_start[y] < q1:
            qa, qb, dq = max(q0, q_start[y]), min(q1, q_stop[y]), q_first[y] - q_start[y]
            x = x0
            while qa < qb and x < len(start) and start[x] < k1:
                ka, kb, dk = max(k0, start[x]), min(k1, stop[x]), first[x] - start[x]
                if ka < kb:
                    if n == len(out):
                        larger = np.empty((2 * n, 9), np.int64)
                        larger[:n] = out
                        out = larger
                    shift = dq - dk
                    out[n, :3] = (stage, q_buffer[y], buffer[x])
                    out[n, 3:] = (qa + dq, qb + dq, ka + dk, kb + dk, lo + shift, hi + shift)
                    n += 1
                x += 1
            y += 1
    return out[:n]


@njit(nogil=True, cache=True)
def _locate(intervals, held):
    """Buffer and row of every position of the intervals, in order."""
    start, stop, buffers, first = held
    rows = 0
    for i in range(len(intervals)):
        rows += intervals[i, 1] - intervals[i, 0]
    buffer, row = np.empty(rows, np.int64), np.empty(rows, np.int64)
    n = 0
    for i in range(len(intervals)):
        position, end = intervals[i]
        x = _find(start, position)
        while position < end:
            assert x >= 0 and start[x] <= position < stop[x], "the rank does not have a row that the plan uses"
            until = min(end, stop[x])
            for p in range(position, until):
                buffer[n], row[n] = buffers[x], first[x] + p - start[x]
                n += 1
            position = until
            x += 1
    return buffer, row
