"""Mixed sharding: long documents cut over several ranks, short ones whole, as pays (WLB-LLM names it as future work).

Decided here: how many ranks of the CP group each document is cut over, and which. Documents come by falling length;
each tries 1, 2, 4 … cp_size ranks, those of least load that have room for its share, and takes the number of least

    max(slowest rank, ideal) + kernel time lost by cutting + comm_weight · transfer,

the last two as means over the ranks, where a rank's load is the longer of its kernels and its transfers, and the
ideal is an even share of all kernels, with what was lost so far. Over g ranks a document is cut in zigzag: 2·g
chunks, first with last. Ranks hold uneven numbers of tokens, never more than the cap; what no equal share fits any
more fills what room is left. If everything cut over all ranks is faster, that is taken: then this is ``zigzag`` per
document.

A fixed length from which documents are cut is fragile (best on one trace, 1.4 x the ideal on another); this rule has
none.

Cost: 40–150 µs for the search, as much again for the kernel table, for 100–200 documents on 16 ranks.

    >>> from .sharding_choice import ShardCost
    >>> cost = ShardCost(flops_per_pair=4 * 64 * 128, row_seconds=4e-8)
    >>> shards = mixed(np.cumsum([0, 30000] + [1000] * 40), 4, cost)
    >>> np.bincount(shards.document)[:6], shards.tokens()           # one is cut over all, the others are whole
    (array([7, 1, 1, 1, 1, 1]), array([17500, 17500, 17500, 17500]))
"""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt
from numba import njit

from .cost import causal_pairs
from .packs import Int64
from .sharding_choice import ShardCost
from .shards import Shards, boundaries, from_pieces, zigzag

PICOSECONDS = 1e12
"""Planners compare integers; kernels of one layer take microseconds."""


def mixed(
    cu_seqlens: npt.ArrayLike,
    cp_size: int,
    cost: ShardCost,
    *,
    max_tokens: int | None = None,
    slack: float = 1.1,
    comm_weight: float = 0.02,
) -> Shards:
    """Shards of a pack (cu_seqlens: int[k + 1]) that cut each document over as many ranks as pays.

    A rank holds at most `slack` x its even share of the tokens, rounded up, and at most `max_tokens`, where given.
    """
    cu = boundaries(cu_seqlens)
    even = -(-int(cu[-1]) // cp_size) if cp_size > 0 else 0
    if cp_size < 1 or slack < 1 or (max_tokens is not None and max_tokens < even):
        raise ValueError(
            f"mixed needs cp_size >= 1, slack >= 1 and max_tokens of at least an even share, {even}; "
            f"got {cp_size}, {slack} and {max_tokens}."
        )
    cap = ceil(slack * even) if max_tokens is None else min(ceil(slack * even), max_tokens)
    tokens = np.diff(cu)
    degrees = np.array([1 << k for k in range(cp_size.bit_length()) if 1 << k < cp_size] + [cp_size])
    kernel, transfer = _times(tokens, degrees, cost)
    found, document, start, stop, rank = _search(
        tokens, np.argsort(-tokens, kind="stable"), kernel, transfer, degrees, cap, round(comm_weight * 1024)
    )
    if not found:
        return zigzag(cu, cp_size)
    order = np.lexsort((start, document, rank))
    first = cu[document[order]]
    return from_pieces(cu, cp_size, first + start[order], first + stop[order], document[order], rank[order])


def _times(tokens: Int64, degrees: Int64, cost: ShardCost) -> tuple[Int64, Int64]:
    """Picoseconds of kernels, and of transfers, of each document on each of g ranks; int64[k, len(degrees)] each."""
    length = np.maximum(tokens, 1)[:, None]
    rows = -(-length // degrees)
    keys = np.broadcast_to(length, rows.shape)
    kernel = cost.kernel(np.maximum(causal_pairs(0, keys) // degrees, 1), rows, keys, cost.flops_per_pair)
    transfer = (length - length / degrees) * cost.row_seconds
    return np.rint(kernel * PICOSECONDS).astype(np.int64), np.rint(transfer * PICOSECONDS).astype(np.int64)


@njit(nogil=True, cache=True)
def _search(tokens, order, kernel, transfer, degrees, cap, comm_weight):
    """(found, document, start, stop, rank) of the pieces; not found where all documents over all ranks are as fast."""
    cp, last = degrees[-1], len(degrees) - 1
    busy, moving, room = np.zeros(cp, np.int64), np.zeros(cp, np.int64), np.full(cp, cap, np.int64)
    pieces = np.empty((2 * cp * len(tokens), 4), np.int64)
    count, slowest, total = np.int64(0), np.int64(0), kernel[:, 0].sum()
    for d in order:
        if tokens[d] == 0:
            continue
        by_load = np.argsort(np.maximum(busy, moving), kind="mergesort")
        at = _degree(
            tokens[d], kernel[d], transfer[d], degrees, by_load, busy, moving, room, slowest, total // cp, comm_weight
        )
        ranks, share = _seats(tokens[d], degrees[at] if at >= 0 else 0, by_load, room)
        spent = at if at >= 0 else last
        for r in ranks:
            room[r] -= share[r]
            if at >= 0:
                busy[r] += kernel[d, at]
            else:
                busy[r] += kernel[d, 0] * share[r] // tokens[d] + kernel[d, last]
            moving[r] += transfer[d, spent]
            slowest = max(slowest, busy[r], moving[r])
        total += degrees[at] * kernel[d, at] - kernel[d, 0] if at >= 0 else 0
        count = _cut(d, tokens[d], ranks, share, at >= 0, pieces, count)
    cut = max(kernel[:, last].sum(), transfer[:, last].sum())
    found = slowest < cut and (room.max() < cap or tokens.sum() < cp)
    pieces = pieces[:count]
    return found, pieces[:, 0].copy(), pieces[:, 1].copy(), pieces[:, 2].copy(), pieces[:, 3].copy()


@njit(nogil=True, cache=True)
def _degree(tokens, kernel, transfer, degrees, by_load, busy, moving, room, slowest, ideal, comm_weight):
    """The index of the best number of ranks for a document, the smallest of equals; -1 where no equal share fits."""
    best, least, cp = -1, np.int64(0), len(by_load)
    for at in range(len(degrees)):
        g = degrees[at]
        share, seats, worst = (tokens + g - 1) // g, 0, max(slowest, ideal)
        for r in by_load:
            if seats < g and room[r] >= share:
                seats += 1
                worst = max(worst, busy[r] + kernel[at], moving[r] + transfer[at])
        if seats == g:
            lost = g * (kernel[at] + transfer[at] * comm_weight // 1024) - kernel[0]
            score = worst + lost // cp
            if best < 0 or score < least:
                best, least = at, score
    return best


@njit(nogil=True, cache=True)
def _seats(tokens, g, by_load, room):
    """(The ranks, tokens of each rank): g ranks of least load in even shares; for g = 0 as many as it takes, full."""
    ranks, share = np.empty(len(by_load), np.int64), np.zeros(len(by_load), np.int64)
    seats, left = 0, tokens
    for r in by_load:
        if g > 0 and seats < g and room[r] >= (tokens + g - 1) // g:
            share[r] = tokens // g + (1 if seats < tokens % g else 0)
        elif g == 0 and left > 0:
            share[r] = min(left, room[r])
            left -= share[r]
        if share[r] > 0:
            ranks[seats] = r
            seats += 1
    return ranks[:seats], share


@njit(nogil=True, cache=True)
def _cut(d, tokens, ranks, share, zigzag, pieces, count):
    """Append a document's pieces: the first halves of the ranks' shares in order, then the second halves backwards."""
    at = 0
    for i in range(len(ranks)):
        half = share[ranks[i]] // 2 if zigzag else share[ranks[i]]
        pieces[count] = (d, at, at + half, ranks[i])
        at, count = at + half, count + 1
    for i in range(len(ranks) - 1, -1 if zigzag else len(ranks) - 1, -1):
        half = share[ranks[i]] - share[ranks[i]] // 2
        pieces[count] = (d, at, at + half, ranks[i])
        at, count = at + half, count + 1
    return count
