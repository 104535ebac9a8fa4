"""Forwarding: a row enters a node once, and is passed on inside it (MagiAttention's hierarchical group cast, for any tiles).

`routing.direct` sends each row from home to every rank that needs it, over the slow links between nodes too, once for each of them.
Here a row that several ranks of another node need goes to one of those, and from there to the others a stage later; what comes of it
takes the same way back: the receiver adds up the gradients of its node (and merges outputs, where queries moved), so that they
leave the node once. Inside the home's node, and where one rank of a node needs a row alone, rows go straight.

Decided here:

- who receives: of the ranks that use the row, the one that has received least from other nodes so far, the largest ranges first.
  What a rank receives in all does not depend on it; what crosses its network link does;
- when: as late as the receiver's first use and the others' allow, in the stage of the first of them. Who else would use the row in
  that stage does so a stage later: such tiles are put off, and no other ones.

So a plan may have one stage more to compute in, and one more, in backward, in which sums leave for home.

Cost: about twice that of `direct`.

    >>> from equipoise.attention.bands import NO_LIMIT
    >>> tiles = [[r, 1, 4 * r, 4 * r + 4, 0, 2, 0, NO_LIMIT] for r in (1, 2, 3)]               # all need rows 0 and 1 of rank 0
    >>> tiles, moves, returns = forwarded(tiles, [0, 1, 2, 3, 4], [[0, 4], [4, 8], [8, 12], [12, 16]], 16, nodes=[0, 0, 1, 1])
    >>> tiles[:, :2].tolist()                                                                  # rank, stage
    [[1, 1], [2, 1], [3, 2]]
    >>> moves                                                                                  # stage, kind, from, to, rows
    array([[1, 0, 0, 1, 0, 2],
           [1, 0, 0, 2, 0, 2],
           [2, 0, 2, 3, 0, 2]])
    >>> returns
    array([[1, 0, 1, 0, 0, 2],
           [2, 0, 3, 2, 0, 2],
           [3, 0, 2, 0, 0, 2]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from .plan import KV, AttentionPlan, Int64, Q
from .routing import joined, straight, trim
from .traffic import Traffic, listed_traffic


def nodes_of(ranks: Sequence[int], devices_per_node: int) -> Int64:
    """The node of each rank number, int64[P]. Raises ValueError where nodes have no ranks."""
    if devices_per_node < 1:
        raise ValueError(f"A node has at least one rank; got devices_per_node={devices_per_node}.")
    return np.asarray(ranks, np.int64) // devices_per_node


def forwarded(
    tiles: npt.ArrayLike,
    home_offsets: npt.ArrayLike,
    home: npt.ArrayLike,
    tokens: int,
    *,
    nodes: npt.ArrayLike,
    head_groups: int = 1,
) -> tuple[Int64, Int64, Int64]:
    """(tiles, moves, returns): the tiles int64[m, 8] as given, some of them a stage later, and routes as `direct` gives them.

    nodes: int[P], the node of each rank. The rest, and what is refused: see `direct`.
    """
    staged, node = np.array(tiles, dtype=np.int64).reshape(-1, 8), np.asarray(nodes, np.int64)
    if len(node) != len(np.asarray(home_offsets)) - 1:
        raise ValueError(f"nodes has an entry for each of {len(np.asarray(home_offsets)) - 1} ranks; got {len(node)}.")
    _, node = np.unique(node, return_inverse=True)
    before = straight(staged, home_offsets, home, tokens, head_groups=head_groups)
    chosen = {kind: _receivers(routes, node) for kind, routes in before.items()}
    cut = staged.copy()
    trim(cut)
    for kind, first in ((KV, 4), (Q, 2)):
        staged[:, 1] = np.maximum(staged[:, 1], cut[:, 1] + _late(cut, first, *chosen[kind].by_rank(len(node))))
    after = straight(staged, home_offsets, home, tokens, head_groups=head_groups)
    ways = [_ways(routes, kind, node, chosen[kind]) for kind, routes in after.items()]
    moves, returns = (joined(np.concatenate(routes)) for routes in zip(*ways, strict=True))
    return staged, moves, returns


def traffic_between(plan: AttentionPlan, nodes: npt.ArrayLike) -> Traffic:
    """What of a plan of all ranks goes from one node to another. nodes: int[P], the node of each rank."""
    node = np.asarray(nodes, np.int64)
    moves, returns = (routes[node[routes[:, 2]] != node[routes[:, 3]]] for routes in (plan.moves, plan.returns))
    return listed_traffic(moves, returns, plan.stages, len(plan.ranks))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Receivers:
    """Who receives which rows of a kind for a node."""

    edges: Int64
    """int64[a + 1]: between them, the same ranks need all rows."""
    receiver: Int64
    """int64[a, nodes]: -1: rows go straight to all who need them."""
    late: Int64
    """int64[n, 4]: (rank, start, stop, stage) that rows are forwarded for, by rank and start."""

    def by_rank(self, ranks: int) -> tuple[Int64, Int64]:
        """(late, where each rank's begin)."""
        return self.late, np.searchsorted(self.late[:, 0], np.arange(ranks + 1))


def _needs(routes: Int64, edges: Int64, node: Int64) -> Int64:
    """Direct routes (rank, home, start, stop, first, last), cut at edges: int64[n, 5] (atom, rank, home, first, last), by atom, node and rank."""
    low, high = np.searchsorted(edges, routes[:, 2]), np.searchsorted(edges, routes[:, 3])
    number = high - low
    which = np.repeat(np.arange(len(routes)), number)
    atom = np.arange(len(which)) - np.repeat(np.cumsum(number) - number - low, number)
    needs = np.column_stack([atom, routes[which][:, [0, 1, 4, 5]]])
    return needs[np.lexsort((needs[:, 1], node[needs[:, 1]], needs[:, 0]))]


def _groups(needs: Int64, node: Int64) -> Int64:
    """CSR: needs of one atom and node."""
    lot = needs[:, 0] * (int(node.max(initial=0)) + 1) + node[needs[:, 1]]
    return np.append(np.flatnonzero(np.diff(lot, prepend=-1)), len(needs))


def _receivers(routes: Int64, node: Int64) -> _Receivers:
    edges = np.unique(routes[:, 2:4])
    needs = _needs(routes, edges, node)
    groups = _groups(needs, node)
    rows = np.diff(edges)[needs[groups[:-1], 0]]
    receiver = np.full((max(len(edges) - 1, 0), int(node.max(initial=0)) + 1), -1, np.int64)
    late = _choose(needs, groups, np.argsort(-rows, kind="stable"), rows, node, receiver)
    late = late[np.lexsort((late[:, 1], late[:, 0]))]
    late = np.column_stack([late[:, 0], edges[late[:, 1]], edges[late[:, 1] + 1], late[:, 2]]) if len(late) else late
    return _Receivers(edges=edges, receiver=receiver, late=late.reshape(-1, 4))


def _ways(routes: Int64, kind: int, node: Int64, chosen: _Receivers) -> tuple[Int64, Int64]:
    """(moves, returns) of a kind."""
    if not len(routes):
        return (np.empty((0, 6), np.int64),) * 2
    edges = np.union1d(routes[:, 2:4], chosen.edges)
    needs = _needs(routes, edges, node)
    ways = _walked(
        needs, _groups(needs, node), node, np.searchsorted(chosen.edges, edges, side="right") - 1, chosen.receiver
    )
    start, stop = edges[needs[:, 0]], edges[needs[:, 0] + 1]
    return tuple(  # type: ignore[return-value]
        np.column_stack([way[:, 0], np.full(len(way), kind), way[:, 1:], start, stop]) for way in ways
    )


@njit(nogil=True, cache=True)
def _choose(needs, groups, order, rows, node, receiver):
    """Fill in the receivers; return int64[n, 3], (rank, atom, stage) of what is forwarded too late for its first use."""
    received, late, n = np.zeros(len(node), np.int64), np.empty((len(needs), 3), np.int64), 0
    for g in range(len(groups) - 1):
        _, rank, home, _, _ = needs[groups[g]]
        if node[rank] != node[home] and groups[g + 1] - groups[g] == 1:
            received[rank] += rows[g]
    for g in order:
        atom, rank, home, _, _ = needs[groups[g]]
        if node[rank] == node[home] or groups[g + 1] - groups[g] == 1:
            continue
        best, soonest = groups[g], needs[groups[g], 3]
        for i in range(groups[g], groups[g + 1]):
            soonest = min(soonest, needs[i, 3])
            if (received[needs[i, 1]], needs[i, 3]) < (received[needs[best, 1]], needs[best, 3]):
                best = i
        receiver[atom, node[rank]] = needs[best, 1]
        received[needs[best, 1]] += rows[g]
        for i in range(groups[g], groups[g + 1]):
            if i != best and needs[i, 3] == soonest:
                late[n] = needs[i, 1], atom, soonest + 1
                n += 1
    return late[:n]


@njit(nogil=True, cache=True)
def _late(tiles, first, late, offsets):
    """Which tiles (trimmed) use rows that are forwarded for a later stage, which is the next: int64[m], 1 or 0."""
    found = np.zeros(len(tiles), np.int64)
    for t in range(len(tiles)):
        rank, stage, start, stop = tiles[t, 0], tiles[t, 1], tiles[t, first], tiles[t, first + 1]
        if tiles[t, 2] == tiles[t, 3]:
            continue
        own = late[offsets[rank] : offsets[rank + 1]]
        i = np.searchsorted(own[:, 2], start, side="right")
        while i < len(own) and own[i, 1] < stop:
            if own[i, 3] > stage:
                found[t] = 1
            i += 1
    return found


@njit(nogil=True, cache=True)
def _walked(needs, groups, node, atoms, receiver):
    """For each need (stage, from, to) of its move and of its return."""
    moves, returns = np.empty((len(needs), 3), np.int64), np.empty((len(needs), 3), np.int64)
    for g in range(len(groups) - 1):
        begin, end = groups[g], groups[g + 1]
        atom, rank, home, _, _ = needs[begin]
        over, comes, leaves, at = receiver[atoms[atom], node[rank]], np.int64(1) << 40, np.int64(0), -1
        for i in range(begin, end):
            _, rank, home, first, last = needs[i]
            if rank == over:
                at, comes, leaves = i, min(comes, first), max(leaves, last)
            else:
                if over >= 0:
                    comes, leaves = min(comes, first - 1), max(leaves, last + 1)
                moves[i] = first, home if over < 0 else over, rank
                returns[i] = last, rank, home if over < 0 else over
        if at >= 0:
            moves[at] = comes, home, over
            returns[at] = leaves, over, home
    return moves, returns
