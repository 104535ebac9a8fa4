"""The search of joint dispatch: chunks moved between ranks and exchanged, at random with a fixed seed, while fewer rows travel.

Threshold accepting: a change is accepted if it costs no more than a threshold that falls to zero, so the search leaves small hills
behind it early and only descends at the end; the best state met is what it gives. Costs are rows that ranks receive, and for a rank
over its pairs or tokens a fine in rows, steep enough that no document is worth it.

Rows change by what a chunk needs that its rank would not need, or have, without it. Where masks are *nested*, each chunk needing all
of its document before itself (causal), the last chunk of a document that a rank holds says it all, and a change costs a few
operations; else the ranks' needs are counted key chunk by key chunk.

Cost: about 0.25 µs a round where masks are nested, else in proportion to the keys of a chunk.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .mask_areas import KeyRanges
from .packs import Int64

FINE = 16
"""Rows that a rank over its limits by one token pays, for each even share that the longest document has."""
HEAT = 40
"""The first threshold: an even share over this."""


def improved(
    edges: Int64,
    rank: Int64,
    pairs: Int64,
    keys: KeyRanges,
    document: Int64,
    ranks: int,
    target: int,
    cap: int,
    rounds: int,
    seed: int,
) -> tuple[Int64, int]:
    """(Rank of each chunk (int64[c]; edges: int64[c + 1]) after the search, its cost). target, cap: pairs and tokens that none should exceed."""
    even = max(int(edges[-1] - edges[0]) // ranks, 1)
    first = np.searchsorted(document, document)
    begin = np.searchsorted(edges, keys.ranges[:, 0], side="right") - 1
    end = np.searchsorted(edges, keys.ranges[:, 1])
    # Two ranges of a chunk may meet in one key chunk, which counts once.
    chunk = np.repeat(np.arange(len(rank)), np.diff(keys.offsets))
    begin[1:] = np.where(chunk[1:] == chunk[:-1], np.maximum(begin[1:], end[:-1]), begin[1:])
    ranges = np.stack([begin, end], axis=1)
    longest = int((edges[1:] - edges[first]).max())
    fine = FINE * max(1, longest // even)
    per_row = max(int(pairs.sum()) // ranks // (fine * even), 1)
    nested = bool(_is_nested(keys.offsets, ranges, first))
    width = int(document[-1]) + 1 if nested else len(rank)
    need = np.full((ranks, width), -1 if nested else 0, np.int32)
    limits = (target, cap, per_row, fine)
    return _search(
        rank, need, pairs, keys.offsets, ranges, edges, document, first, nested, limits, rounds, even // HEAT, seed
    )


@njit(nogil=True, cache=True)
def _is_nested(offsets, ranges, first):
    for u in range(len(first)):
        i = offsets[u]
        if offsets[u + 1] != i + 1 or ranges[i, 0] != first[u] or ranges[i, 1] != u + 1:
            return False
    return True


@njit(nogil=True, cache=True)
def _less(u, a, offsets, ranges, edges, need, owner, document, first, nested):
    """Rows that rank a, which holds chunk u, receives less without it."""
    length = edges[u + 1] - edges[u]
    if nested:
        if need[a, document[u]] > u:
            return -length
        k = u - 1
        while k >= first[u] and owner[k] != a:
            k -= 1
        return edges[u + 1] - edges[k + 1] - length
    saved, seen = np.int64(0), 0
    for i in range(offsets[u], offsets[u + 1]):
        for k in range(ranges[i, 0], ranges[i, 1]):
            if k == u:
                seen = 1
            elif need[a, k] == 1 and owner[k] != a:
                saved += edges[k + 1] - edges[k]
    return saved - length if need[a, u] > seen else saved


@njit(nogil=True, cache=True)
def _more(u, b, offsets, ranges, edges, need, owner, document, first, nested):
    """Rows that rank b receives more with chunk u, which nobody holds."""
    length = edges[u + 1] - edges[u]
    if nested:
        last = need[b, document[u]]
        return -length if last > u else edges[u + 1] - edges[max(last + 1, first[u])] - length
    added = np.int64(0)
    for i in range(offsets[u], offsets[u + 1]):
        for k in range(ranges[i, 0], ranges[i, 1]):
            if k != u and need[b, k] == 0 and owner[k] != b:
                added += edges[k + 1] - edges[k]
    return added - length if need[b, u] > 0 else added


@njit(nogil=True, cache=True)
def _take(u, a, offsets, ranges, need, owner, document, first, nested):
    """Chunk u leaves its rank."""
    owner[u] = -1
    if not nested:
        for i in range(offsets[u], offsets[u + 1]):
            need[a, ranges[i, 0] : ranges[i, 1]] -= 1
    elif need[a, document[u]] == u:
        k = u - 1
        while k >= first[u] and owner[k] != a:
            k -= 1
        need[a, document[u]] = k if k >= first[u] else -1


@njit(nogil=True, cache=True)
def _give(u, b, offsets, ranges, need, owner, document, nested):
    """Chunk u, which nobody holds, comes to rank b."""
    owner[u] = b
    if nested:
        need[b, document[u]] = max(need[b, document[u]], u)
        return
    for i in range(offsets[u], offsets[u + 1]):
        need[b, ranges[i, 0] : ranges[i, 1]] += 1


@njit(nogil=True, cache=True)
def _rows(owner, tokens, edges, first, need, nested):
    """Rows that all ranks receive."""
    rows = np.int64(0)
    for r in range(len(need)):
        for k in range(need.shape[1]):
            if not nested:
                rows += edges[k + 1] - edges[k] if need[r, k] > 0 and owner[k] != r else 0
            elif need[r, k] >= 0:
                rows += edges[need[r, k] + 1] - edges[first[need[r, k]]]
        rows -= tokens[r] if nested else 0
    return rows


@njit(nogil=True, cache=True)
def _fine(work, tokens, limits):
    target, cap, per_row, fine = limits
    return max(0, work - target) // per_row + max(0, tokens - cap) * fine


@njit(nogil=True, cache=True)
def _search(rank, need, pairs, offsets, ranges, edges, document, first, nested, limits, rounds, heat, seed):
    owner, tokens, work = np.full(len(rank), -1, np.int64), np.zeros(len(need), np.int64), np.zeros(len(need), np.int64)
    reach, length = np.zeros(len(rank), np.int64), np.diff(edges)
    for c in range(len(rank)):
        _give(c, rank[c], offsets, ranges, need, owner, document, nested)
        tokens[rank[c]] += length[c]
        work[rank[c]] += pairs[c]
        reach[c] = length[c]
        for i in range(offsets[c], offsets[c + 1]):
            reach[c] += edges[ranges[i, 1]] - edges[ranges[i, 0]]
    now = _rows(owner, tokens, edges, first, need, nested)
    for r in range(len(need)):
        now += _fine(work[r], tokens[r], limits)
    kept, best, chunks = rank.copy(), now, np.uint64(len(rank))
    state, low = np.uint64(2 * seed + 1), np.uint64((1 << 20) - 1)
    for t in range(rounds):
        for by in (13, -7, 17):  # xorshift
            state ^= state << np.uint64(by) if by > 0 else state >> np.uint64(-by)
        u = np.int64((state & low) * chunks >> np.uint64(20))
        v = np.int64(((state >> np.uint64(20)) & low) * chunks >> np.uint64(20))
        kind = np.int64((state >> np.uint64(40)) & np.uint64(3))
        if kind < 2:  # a neighbour's rank, or the neighbour
            near = u + np.int64((state >> np.uint64(42)) & np.uint64(15)) - 8
            v = min(max(near, np.int64(0)), np.int64(len(rank) - 1))
        a, b, swap = owner[u], owner[v], kind % 2 == 1
        if a == b:
            continue
        threshold = heat * (rounds - t) // rounds
        some_work, some = pairs[u] - (pairs[v] if swap else 0), length[u] - (length[v] if swap else 0)
        change = _fine(work[a] - some_work, tokens[a] - some, limits) + _fine(
            work[b] + some_work, tokens[b] + some, limits
        )
        change -= _fine(work[a], tokens[a], limits) + _fine(work[b], tokens[b], limits)
        if change - reach[u] - (reach[v] if swap else 0) > threshold:
            continue
        change -= _less(u, a, offsets, ranges, edges, need, owner, document, first, nested)
        _take(u, a, offsets, ranges, need, owner, document, first, nested)
        change += _more(u, b, offsets, ranges, edges, need, owner, document, first, nested)
        _give(u, b, offsets, ranges, need, owner, document, nested)
        if swap:
            change -= _less(v, b, offsets, ranges, edges, need, owner, document, first, nested)
            _take(v, b, offsets, ranges, need, owner, document, first, nested)
            change += _more(v, a, offsets, ranges, edges, need, owner, document, first, nested)
            _give(v, a, offsets, ranges, need, owner, document, nested)
        if change > threshold:
            if swap:
                _take(v, a, offsets, ranges, need, owner, document, first, nested)
                _give(v, b, offsets, ranges, need, owner, document, nested)
            _take(u, b, offsets, ranges, need, owner, document, first, nested)
            _give(u, a, offsets, ranges, need, owner, document, nested)
            continue
        now += change
        work[a], work[b] = work[a] - some_work, work[b] + some_work
        tokens[a], tokens[b] = tokens[a] - some, tokens[b] + some
        if now < best:
            best, kept = now, owner.copy()
    return kept, best
