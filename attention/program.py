"""A plan as one rank sees it: positions turned into addresses. No torch, so that a loader's worker can do it.

A rank keeps its own rows in buffer 0, in the order it holds them, and the KV rows that arrive in stage s in buffer s,
ordered by sender and then as the plan lists them. `lower` turns tiles into tiles of addresses (joined where rows lie
side by side, which makes one causal square of a zigzag rank's two chunks), and moves and returns into rows to pick and
split sizes of one all-to-all a stage. Whether a stage has an all-to-all follows from what all ranks exchange, so a rank
with nothing to send or receive takes part with empty splits.

    >>> from equipoise.packing.shards import zigzag
    >>> from equipoise.attention.ring import ring_plan
    >>> stage = lower(ring_plan(zigzag([0, 8], 2), ranks=(0, 1)), rank=1).stages[1]
    >>> [(buffer, tiles[:, :4].tolist()) for buffer, tiles in stage.tiles]
    [(1, [[0, 4, 0, 2]])]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from .bands import join
from .plan import AttentionPlan, Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class Cargo:
    """One rank's part in one all-to-all."""

    picks: list[tuple[int, Int64]]
    """(buffer, rows to take of it): laid end to end …"""
    order: Int64 | None
    """… and permuted by this, if given, they are the rows to send, ordered by receiver."""
    send_splits: list[int]
    receive_splits: list[int]
    landing: list[Int64]
    """For returns: the rows at home that what arrives from each sender is added to. Empty for moves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """What one rank does in a stage."""

    tiles: list[tuple[int, Int64]]
    """(buffer of the keys, int64[m, 6] tiles of addresses); queries are at home."""
    moves: Cargo | None
    """Exchanged before the tiles; None if no rank moves anything."""
    returns: Cargo | None
    """Exchanged after the tiles, in backward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    stages: list[Stage]
    tokens: int
    """Rows of buffer 0."""
    buffer_rows: list[int]
    """Rows of each buffer."""


def lower(plan: AttentionPlan, rank: int) -> Program:
    """What `rank` (an index into the plan's ranks) does. The plan must hold its tiles."""
    if plan.rank not in (None, rank):
        raise ValueError(f"This plan holds the tiles of rank {plan.rank} of {plan.ranks}; got rank {rank}.")
    held, buffer_rows = _holdings(plan, rank)
    moves, returns = _by_stage(plan.moves, plan.stages), _by_stage(plan.returns, plan.stages)
    exchanged = np.zeros((plan.stages, 2), bool)
    exchanged[: len(plan.traffic.by_stage)] = plan.traffic.by_stage > 0
    tiles = plan.tiles[plan.tiles[:, 0] == rank]
    stages = [
        Stage(
            tiles=_addressed(tiles[tiles[:, 1] == s], held),
            moves=_cargo(moves[s], rank, len(plan.ranks), held, landing=False) if exchanged[s, 0] else None,
            returns=_cargo(returns[s], rank, len(plan.ranks), held, landing=True) if exchanged[s, 1] else None,
        )
        for s in range(plan.stages)
    ]
    return Program(stages=stages, tokens=buffer_rows[0], buffer_rows=buffer_rows)


def _holdings(plan: AttentionPlan, rank: int) -> tuple[Int64, list[int]]:
    """All intervals the rank ever has, int64[n, 4] = (start, stop, buffer, first row), by start; rows of each buffer."""
    arriving = plan.moves[plan.moves[:, 3] == rank]
    # Stable: within a stage by sender, and then as listed, which is the order in which the sender packs them.
    arriving = arriving[np.lexsort((arriving[:, 2], arriving[:, 0]))]
    home = plan.home_of(rank)
    intervals = np.concatenate([home, arriving[:, 4:]])
    buffer = np.concatenate([np.zeros(len(home), np.int64), arriving[:, 0]])
    lengths = intervals[:, 1] - intervals[:, 0]
    rows = np.zeros(plan.stages, np.int64)
    np.add.at(rows, buffer, lengths)
    first = np.cumsum(lengths) - lengths - (np.cumsum(rows) - rows)[buffer]
    held = np.column_stack([intervals, buffer, first])
    return np.ascontiguousarray(held[np.argsort(held[:, 0], kind="stable")]), rows.tolist()


def _by_stage(routes: Int64, stages: int) -> list[Int64]:
    ordered = routes[np.argsort(routes[:, 0], kind="stable")]
    return np.split(ordered, np.searchsorted(ordered[:, 0], np.arange(1, stages)))


def _addressed(tiles: Int64, held: Int64) -> list[tuple[int, Int64]]:
    """Tiles of addresses by buffer of their keys."""
    out = np.empty((_cut(tiles, held, np.empty((0, 7), np.int64)), 7), np.int64)
    _cut(tiles, held, out)
    return [(int(b), join(out[out[:, 0] == b, 1:])) for b in np.flatnonzero(np.bincount(out[:, 0]))]


def _cargo(routes: Int64, rank: int, ranks: int, held: Int64, landing: bool) -> Cargo:
    """The rank's part in the exchange of `routes`, moves or returns of one stage."""
    length = routes[:, 5] - routes[:, 4]
    going, coming = routes[:, 2] == rank, routes[:, 3] == rank
    outgoing = routes[going][np.argsort(routes[going, 3], kind="stable")]
    incoming = routes[coming][np.argsort(routes[coming, 2], kind="stable")]
    buffer, row = _locate(np.ascontiguousarray(outgoing[:, 4:]), held)
    by_buffer = np.argsort(buffer, kind="stable")
    used = np.flatnonzero(np.bincount(buffer))
    sent, received = (
        np.bincount(routes[at, side], length[at], ranks).astype(int) for at, side in ((going, 3), (coming, 2))
    )
    landings: list[Int64] = []
    if landing:
        _, at_home = _locate(np.ascontiguousarray(incoming[:, 4:]), held)
        landings = np.split(at_home, np.cumsum(received)[:-1])
    return Cargo(
        picks=[(int(b), row[buffer == b]) for b in used],
        order=np.argsort(by_buffer, kind="stable") if len(used) > 1 else None,
        send_splits=sent.tolist(),
        receive_splits=received.tolist(),
        landing=landings,
    )


@njit(nogil=True, cache=True)
def _cut(tiles, held, out):
    """Cut tiles where rows stop lying side by side, and write (buffer, q0, q1, k0, k1, lo, hi) in addresses."""
    n = 0
    for i in range(len(tiles)):
        _, _, q0, q1, k0, k1, lo, hi = tiles[i]
        y = np.searchsorted(held[:, 0], q0, side="right") - 1
        while y < len(held) and held[y, 0] < q1:
            qa, qb, dq = max(q0, held[y, 0]), min(q1, held[y, 1]), held[y, 3] - held[y, 0]
            x = np.searchsorted(held[:, 0], k0, side="right") - 1
            while x < len(held) and held[x, 0] < k1:
                ka, kb, dk = max(k0, held[x, 0]), min(k1, held[x, 1]), held[x, 3] - held[x, 0]
                if qa < qb and ka < kb:
                    if n < len(out):
                        out[n] = (held[x, 2], qa + dq, qb + dq, ka + dk, kb + dk, lo + dq - dk, hi + dq - dk)
                    n += 1
                x += 1
            y += 1
    return n


@njit(nogil=True, cache=True)
def _locate(intervals, held):
    """Buffer and row of every position of the intervals, in order."""
    rows = 0
    for i in range(len(intervals)):
        rows += intervals[i, 1] - intervals[i, 0]
    buffer, row = np.empty(rows, np.int64), np.empty(rows, np.int64)
    n = 0
    for i in range(len(intervals)):
        position, stop = intervals[i]
        x = np.searchsorted(held[:, 0], position, side="right") - 1
        while position < stop:
            end = min(stop, held[x, 1])
            assert x >= 0 and held[x, 0] <= position < end, "the rank does not have a row that the plan uses"
            for p in range(position, end):
                buffer[n], row[n] = held[x, 2], held[x, 3] + p - held[x, 0]
                n += 1
            position = end
            x += 1
    return buffer, row
