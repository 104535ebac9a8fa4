"""Joint dispatch: as few KV rows as balance allows (ours; MagiAttention's min-heap balances pairs and does not look at bytes).

Decided here: which queries each rank of a CP group holds, in chunks of any length, weighing three things: no rank computes more than
`balance` x the mean of the pairs, holds more than `slack` x an even share of the tokens, and under both as few rows travel as we
find. What a rank receives of a causal document is all before its last query there, so rows are saved by cutting long documents over
few ranks, and short ones not at all:

1. **Build** (`_build`). While the heaviest document fits into no rank, the next rank is filled: with as long a tail of it as leaves
   room for light company (whole short documents, then the document's own head, which needs nothing from elsewhere). For one
   document that is zigzag, for one among short ones runs of equal pairs. What then fits whole goes to the least loaded rank. Done
   twice, with as few tokens on the ranks of tails as others have room for, and with nearly an even share; the one goes on that is
   better after a tenth of the search.
2. **Improve** (dispatch_search.py). The pieces, cut to an eighth of a rank at most, are moved and exchanged at random with a fixed
   seed, and a change that costs up to a falling threshold is accepted: repairs balance, then saves rows. Masks of any kind: rows
   are counted for the keys that each piece needs, at the resolution of the pieces.

On 128K packs of the traces of benchmarks/traffic.py, 10 each: rows 0.32–0.50 of min-heap's with 8 chunks a rank (and 0.27–0.35
of them in the mean pack), pairs max/mean below 1.05. All numbers are integers, so that all ranks find the same.

The largest sender is hardly relieved: where a long document is cut, the fewest rows travel if one rank holds its head and nothing
behind it, and everybody else needs that: cp - 1 times up to `slack` x an even share, which min-heap has at 1.0. A rank that is to
send less has to receive more, which is what `packing/partition.py` weighs ("largest").

Cost: 10–20 ms for 128K tokens on 16 ranks, most of it step 2, `rounds` x 0.25 µs.

    >>> from equipoise.packing.dispatch import dispatch
    >>> from equipoise.packing.sharding_choice import received_rows
    >>> cu = np.cumsum([0, 52000, 26000, 18000, 17000, 7000, 7000, 4000])
    >>> plain, ours = dispatch(cu, 16), joint(cu, 16)
    >>> ours.describe()
    '16 ranks x 9826 tokens in 91 segments; pairs max/mean 1.048'
    >>> int(received_rows(plain).sum()), int(received_rows(ours).sum())
    (1170088, 436158)
"""

from __future__ import annotations

from functools import partial
from math import ceil

import numpy as np
import numpy.typing as npt
from numba import njit

from .dispatch import checked_cap, of_documents, shards_of
from .dispatch_search import improved
from .mask_areas import chunk_keys
from .mask_tiles import row_counts
from .masks import Mask
from .packs import Int64
from .shards import Shards

GRAIN = 8
"""Pieces of a rank: none has more than an eighth of an even share of tokens and pairs together."""
LEAST = (0.6, 0.9)
"""Of an even share: what a rank that is filled holds, if others have room for the rest. Tails compute much for few tokens: which of
these leads to fewer rows depends on what else there is, so each is built and improved for a while, and the better one goes on."""
WHILE = 0.1
"""Of the rounds: those of each start."""
WHOLE = 2 << 20
"""Two grains: a piece up to this size is not cut."""


def joint(
    mask: Mask | npt.ArrayLike,
    cp_size: int,
    *,
    balance: float = 1.047,
    slack: float = 1.2,
    max_tokens: int | None = None,
    rounds: int = 50_000,
    seed: int = 0,
) -> Shards:
    """Shards of a pack. mask: of its documents, or their boundaries alone, int[k + 1]: causal within each.

    balance: pairs of the fullest rank over the mean, aimed at; where that is out of reach, as near as found. slack, max_tokens: a
    rank holds at most slack x an even share of the tokens, rounded up, and at most max_tokens. rounds: steps of the search.
    """
    masked = of_documents(mask)
    tiles, cu = masked.tiles_of_pack(), masked.cu_seqlens
    total = int(cu[-1])
    cap = checked_cap(total, cp_size, max_tokens)
    if balance < 1 or slack < 1 or rounds < 0:
        raise ValueError(f"joint needs balance >= 1, slack >= 1 and rounds >= 0; got {balance}, {slack} and {rounds}.")
    if total == 0:
        return shards_of(cu, np.zeros(1, np.int64), np.zeros(0, np.int64), cp_size, cap)
    even = -(-total // cp_size)
    cap = min(cap, ceil(slack * even))
    before = np.concatenate([[0], np.cumsum(row_counts(tiles, total))])
    mean = max(int(before[-1]) // cp_size, 1)
    target = int(mean * balance)
    rounds = rounds if cp_size > 1 else 0
    starts = []
    for least in LEAST:
        pieces = _built(cu, before, cp_size, target, cap, int(least * even))
        edges, rank = _cut(pieces, before, max(even // GRAIN, 1), max(mean // GRAIN, 1))
        document = np.searchsorted(cu, edges[:-1], side="right") - 1
        keys, pairs = chunk_keys(tiles, edges), np.diff(before[edges])
        search = partial(
            improved, edges, pairs=pairs, keys=keys, document=document, ranks=cp_size, target=target, cap=cap
        )
        starts.append((*search(rank, rounds=int(WHILE * rounds), seed=seed), edges, search))
    rank, _, edges, search = min(starts, key=lambda start: start[1])
    rank, _ = search(rank, rounds=rounds - len(LEAST) * int(WHILE * rounds), seed=seed)
    return shards_of(cu, edges, rank, cp_size, cap)


def _built(cu: Int64, before: Int64, cp_size: int, target: int, cap: int, least: int) -> Int64:
    """Pieces int64[n, 3] (start, stop, rank) that cover the pack, by start."""
    out = np.empty((4 * len(cu) + 40 * cp_size + 64, 3), np.int64)
    order = np.argsort(np.diff(cu), kind="stable")
    pieces = out[: _build(cu, before, order, cp_size, target, cap, least, out)]
    pieces = pieces[pieces[:, 0] < pieces[:, 1]]
    return pieces[np.argsort(pieces[:, 0])]


def _cut(pieces: Int64, before: Int64, tokens: int, pairs: int) -> tuple[Int64, Int64]:
    """(edges int64[c + 1], rank int64[c]) of pieces cut to at most so many tokens and pairs, a full share of either being one grain."""
    measure = np.concatenate([[0], np.cumsum((1 << 20) // tokens + ((np.diff(before) << 20) // pairs))])
    start, stop, rank = pieces.T
    size = measure[stop] - measure[start]
    parts = np.where(size <= WHOLE, 1, -(-size >> 20))
    piece = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(piece)) - np.repeat(np.cumsum(parts) - parts, parts)
    edges = np.searchsorted(measure, measure[start[piece]] + size[piece] * part // parts[piece])
    edges = np.append(np.where(part == 0, start[piece], edges), len(before) - 1)
    some = edges[1:] > edges[:-1]
    return np.append(edges[:-1][some], edges[-1]), rank[piece][some]


@njit(nogil=True, cache=True)
def _company(order, low, high, whole, before, heavy, room, take):
    """Choose whole documents, the shortest first, that fit into the room; (tokens, pairs) of them."""
    tokens = pairs = np.int64(0)
    for d in order:
        size = high[d] - low[d]
        take[d] = d != heavy and whole[d] and 0 < size <= room - tokens
        if take[d]:
            tokens += size
            pairs += before[high[d]] - before[low[d]]
    return tokens, pairs


@njit(nogil=True, cache=True)
def _heaviest(low, high, before):
    heavy = 0
    for d in range(len(low)):
        if before[high[d]] - before[low[d]] > before[high[heavy]] - before[low[heavy]]:
            heavy = d
    return heavy


@njit(nogil=True, cache=True)
def _build(cu, before, order, ranks, target, cap, least, out):
    """Write the pieces; return how many. order: documents by rising length. before: pairs of all queries before each."""
    low, high = cu[:-1].copy(), cu[1:].copy()
    whole, take = np.ones(len(low), np.bool_), np.zeros(len(low), np.bool_)
    tokens, work, n = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.int64(0)
    left = cu[-1]
    for r in range(ranks if len(low) else 0):
        d = _heaviest(low, high, before)
        a, z = low[d], high[d]
        if before[z] - before[a] <= target and z - a <= cap:
            break
        size = min(cap, max(least, left - (ranks - r - 1) * cap), left)
        # The longest tail that, with company up to that size, computes no more than the target.
        tail, most = np.int64(0), min(size, z - a)
        while tail < most:
            trial = (tail + most + 1) // 2
            some, pairs = _company(order, low, high, whole, before, d, size - trial, take)
            head = min(size - trial - some, z - a - trial)
            if before[z] - before[z - trial] + pairs + before[a + head] - before[a] <= target:
                tail = trial
            else:
                most = trial - 1
        some, pairs = _company(order, low, high, whole, before, d, size - tail, take)
        head = min(size - tail - some, z - a - tail)
        for e in range(len(low)):
            if take[e]:
                out[n] = low[e], high[e], r
                n, low[e] = n + 1, high[e]
        out[n] = a, a + head, r
        out[n + 1] = z - tail, z, r
        n += 2
        tokens[r] = tail + some + head
        work[r] = before[z] - before[z - tail] + pairs + before[a + head] - before[a]
        low[d], high[d], whole[d], left = a + head, z - tail, False, left - tokens[r]
    return _spread(low, high, before, tokens, work, target, cap, out, n)


@njit(nogil=True, cache=True)
def _tail(a, z, before, pairs, tokens):
    """The longest run of rows that ends at z and has at most so many pairs and tokens."""
    least, most = np.int64(0), max(min(z - a, tokens), 0)
    while least < most:
        trial = (least + most + 1) // 2
        if before[z] - before[z - trial] <= pairs:
            least = trial
        else:
            most = trial - 1
    return least


@njit(nogil=True, cache=True)
def _spread(low, high, before, tokens, work, target, cap, out, n):
    """What is left of each document, the heaviest first, to the rank that it loads least; where it overloads any, cut to their room."""
    # Loads are compared in 2^-20 of a full rank.
    pair, token = max(target >> 20, 1), max(cap, 1)
    weight = np.empty(len(low), np.int64)
    for d in range(len(low)):
        weight[d] = -max((before[high[d]] - before[low[d]]) // pair, ((high[d] - low[d]) << 20) // token)
    for d in np.argsort(weight, kind="mergesort"):
        while high[d] > low[d]:
            a, z, best, lowest = low[d], high[d], -1, np.int64(0)
            for r in range(len(tokens)):
                load = max((work[r] + before[z] - before[a]) // pair, ((tokens[r] + z - a) << 20) // token)
                if best < 0 or load < lowest:
                    best, lowest = r, load
            size = z - a
            if lowest > 1 << 20 and size > 1:
                size = np.int64(0)
                for r in range(len(tokens)):
                    room = _tail(a, z, before, target - work[r], cap - tokens[r])
                    if room > size:
                        best, size = r, room
                if size * 16 < min(z - a, cap):  # crumbs: the fullest are left to the search
                    best = int(np.argmin(tokens))
                    size = min(z - a, max(cap - tokens[best], 1))
            out[n] = z - size, z, best
            n += 1
            tokens[best] += size
            work[best] += before[z] - before[z - size]
            high[d] -= size
    return n
