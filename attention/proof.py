"""What `AttentionPlan.check` proves of rows, one function a promise; of pairs, pair_proof.py does. No torch.

All of it is done row by row, in numba, with one entry per rank and position: the point is to be obviously right, not to
be small. A failure is a ValueError that names rank, stage and position.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from numba import njit

from .bands import trimmed
from .traffic import KV

Int64 = npt.NDArray[np.int64]

NEVER = np.int64(1 << 40)
"""The arrival stage of a row that never arrives."""


def owners(home_offsets: Int64, home: Int64, tokens: int) -> Int64:
    """The rank that holds each position, int64[tokens]; every position is held once."""
    owner = np.full(tokens, -1, np.int64)
    ranks = np.repeat(np.arange(len(home_offsets) - 1), np.diff(home_offsets))
    for rank, (start, stop) in zip(ranks, home, strict=True):
        if not 0 <= start < stop <= tokens:
            raise ValueError(f"Rank {rank} holds [{start}, {stop}), which is no range of the {tokens} tokens.")
        if np.any(owner[start:stop] >= 0):
            raise ValueError(f"Rank {rank} holds [{start}, {stop}), parts of which another rank or entry holds too.")
        owner[start:stop] = rank
    if np.any(owner < 0):
        raise ValueError(f"Position {int(np.argmax(owner < 0))} is held by no rank.")
    return owner


def arrivals(owner: Int64, moves: Int64, ranks: int, only: int | None = None) -> Int64:
    """The stage from which each rank has each row, int64[ranks, tokens]: 0 at home, NEVER if it never arrives.

    A sender must have a row before the stage it sends it in, and no rank is sent a row it has. only: the rank whose moves
    these are; what others have before they send it is not known then.
    """
    arrival = np.full((ranks, len(owner)), NEVER, np.int64)
    arrival[owner, np.arange(len(owner))] = 0
    _in_range(moves, ranks, len(owner), "move")
    if len(moves) and moves[:, 0].min() < 1:
        raise ValueError("A move arrives in stage 1 or later: stage 0 computes on what is at home.")
    ordered = moves[np.argsort(moves[:, 0], kind="stable")]
    bad, position = _arrive(ordered, arrival, -1 if only is None else only)
    if bad >= 0:
        stage, _, src, dst, start, stop = ordered[bad]
        late = arrival[dst, position] == NEVER
        reason = f"rank {src} does not have row {position} before" if late else f"rank {dst} has row {position} already"
        raise ValueError(f"Stage {stage}, move of [{start}, {stop}) from rank {src} to rank {dst}: {reason}.")
    return arrival


def in_groups(tiles: Int64, tokens: int, groups: int) -> Int64:
    """The tiles with what no pair of theirs needs cut away, those without a pair left out; each lies in one head group."""
    if len(tiles) == 0:
        return tiles
    low, high = tiles[:, [1, 2, 4]].min(), tiles[:, [3, 5]].max()
    if low < 0 or high > tokens * groups:
        size = f"{tokens} tokens" if groups == 1 else f"{groups} x {tokens} tokens of {groups} head groups"
        raise ValueError(f"Tiles reach from {low} to {high}, outside of the {size}.")
    cut = _trimmed(tiles)
    cut = cut[cut[:, 2] < cut[:, 3]]
    group = (cut[:, 2:6] - np.array([0, 1, 0, 1])) // max(tokens, 1)
    across = np.any(group != group[:, :1], axis=1)
    if np.any(across):
        rank, stage, q0, q1, k0, k1 = cut[np.argmax(across), :6]
        raise ValueError(
            f"Stage {stage}, rank {rank}, tile [{q0}, {q1}) x [{k0}, {k1}) is not of one of the {groups} head groups of "
            f"{tokens} tokens each."
        )
    return cut


def tiles_are_fed(tiles: Int64, owner: Int64, arrival: list[Int64], computing: Iterable[int]) -> None:
    """Every tile is computed by a rank that has its queries and its keys by its stage. arrival: of KV and of Q rows."""
    if not set(np.unique(tiles[:, 0]).tolist()) <= set(computing):
        raise ValueError(f"Tiles of ranks {np.unique(tiles[:, 0])}, but those of {list(computing)} only are expected.")
    bad, position, is_query = _fed(tiles, *arrival)
    if bad >= 0:
        rank, stage, q0, q1, k0, k1 = tiles[bad, :6]
        late = (
            "has not arrived" if arrival[is_query][rank, position] < NEVER else "is not at home there and never arrives"
        )
        what = f"query {position} {late}" if is_query else f"key {position} has not arrived"
        raise ValueError(f"Stage {stage}, rank {rank}, tile [{q0}, {q1}) x [{k0}, {k1}): {what}.")


def rows_return(
    tiles: Int64, returns: Int64, kind: int, owner: Int64, arrival: Int64, computing: Iterable[int]
) -> None:
    """What a rank has of each row of a kind goes once, after its last use, and home: at once, or to a rank on the way, which adds its own.

    A rank on the way had the row (arrival: from which stage), and sends on what came to it after that came; what such a rank does is
    not known of those that are not `computing`. Rows that a rank neither uses nor is brought, and those at home, do not leave it.
    """
    ranks = len(arrival)
    result = "its gradient" if kind == KV else "its output"
    _in_range(returns, ranks, len(owner), "return")
    used = np.full((ranks, len(owner)), -1, np.int64)
    _last_use(tiles, 4 if kind == KV else 2, used)
    used[owner, np.arange(len(owner))] = -1
    back = np.full(used.shape, -1, np.int64)
    brought = np.full(used.shape, -1, np.int64)
    for stage, _, src, dst, start, stop in returns:
        if np.any(back[src, start:stop] >= 0):
            raise ValueError(f"Stage {stage}: rank {src} returns [{start}, {stop}) twice.")
        back[src, start:stop] = stage
        brought[dst, start:stop] = np.maximum(brought[dst, start:stop], stage)
    brought[owner, np.arange(len(owner))] = -1
    for rank in computing:
        stray = (brought[rank] >= 0) & ((arrival[rank] >= NEVER) | (back[rank] <= brought[rank]))
        if np.any(stray):
            row = int(np.argmax(stray))
            sent_on = f"sends it on in stage {back[rank, row]} (-1: never), not after it comes"
            raise ValueError(
                f"Stage {brought[rank, row]}: row {row} returns to rank {rank}, which is not its home and "
                f"{'was never sent it' if arrival[rank, row] >= NEVER else sent_on}."
            )
        wrong = (np.maximum(used[rank], brought[rank]) >= 0) != (back[rank] >= 0)
        wrong |= back[rank] < used[rank]
        if np.any(wrong):
            row = int(np.argmax(wrong))
            raise ValueError(
                f"Rank {rank} uses {'KV' if kind == KV else 'Q'} row {row} last in stage {used[rank, row]} and returns "
                f"{result} in stage {back[rank, row]} (-1: never)."
            )


def moved(moves: Int64, tokens: int) -> npt.NDArray[np.bool_]:
    """Which rows are moved anywhere, bool[tokens]."""
    away = np.zeros(tokens, bool)
    for start, stop in moves[:, 4:]:
        away[start:stop] = True
    return away


def traffic_is_known(rank: int, by_stage: Int64, by_rank: Int64, known_stage: Int64, known_rank: Int64) -> None:
    """What a rank lists (by_stage int64[stages, 2], by_rank int64[4, P]) is its share of what all ranks are said to exchange."""
    if np.any(by_rank[:, rank] != known_rank[:, rank]):
        raise ValueError(
            f"Rank {rank} lists {by_rank[:, rank]} rows sent, received, returned and reduced, and is said to have "
            f"{known_rank[:, rank]}."
        )
    said = np.zeros_like(by_stage)
    said[: len(known_stage)] = known_stage
    if np.any(by_stage > said) or not np.array_equal(said.sum(axis=0), known_rank[[0, 2]].sum(axis=1)):
        raise ValueError(f"Rows by stage are {by_stage.T} on rank {rank} and are said to be {said.T} on all ranks.")


def _in_range(routes: Int64, ranks: int, tokens: int, name: str) -> None:
    if len(routes) == 0:
        return
    stage, _, src, dst, start, stop = routes.T
    wrong = (stage < 0) | (src < 0) | (src >= ranks) | (dst < 0) | (dst >= ranks) | (src == dst)
    wrong |= (start < 0) | (start >= stop) | (stop > tokens)
    if np.any(wrong):
        raise ValueError(f"No such {name} among {ranks} ranks and {tokens} tokens: {routes[np.argmax(wrong)]}.")


@njit(nogil=True, cache=True)
def _arrive(moves, arrival, only):
    for i in range(len(moves)):
        stage, src, dst = moves[i, 0], moves[i, 2], moves[i, 3]
        known = only < 0 or only == src
        for row in range(moves[i, 4], moves[i, 5]):
            if (known and arrival[src, row] >= stage) or arrival[dst, row] < NEVER:
                return i, row
            arrival[dst, row] = stage
    return -1, -1


@njit(nogil=True, cache=True)
def _trimmed(tiles):
    out = tiles.copy()
    for i in range(len(tiles)):
        t = out[i]
        t[2], t[3], t[4], t[5], t[6], t[7] = trimmed(t[2], t[3], t[4], t[5], t[6], t[7])
    return out


@njit(nogil=True, cache=True)
def _fed(tiles, keys, queries):
    for i in range(len(tiles)):
        rank, stage = tiles[i, 0], tiles[i, 1]
        for row in range(tiles[i, 2], tiles[i, 3]):
            if queries[rank, row] > stage:
                return i, row, True
        for row in range(tiles[i, 4], tiles[i, 5]):
            if keys[rank, row] > stage:
                return i, row, False
    return -1, -1, False


@njit(nogil=True, cache=True)
def _last_use(tiles, column, used):
    for i in range(len(tiles)):
        rank, stage = tiles[i, 0], tiles[i, 1]
        for row in range(tiles[i, column], tiles[i, column + 1]):
            used[rank, row] = max(used[rank, row], stage)
