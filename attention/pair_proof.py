"""That a plan computes each pair of its mask once and no other: the part of `AttentionPlan.check` that knows masks. No torch.

Both the plan and the mask are tiles, and for each query both give intervals of keys: where they begin and end is walked in order,
and each stretch of keys must be covered as often by the plan as by the mask. What differs is counted and named: the first pair,
how many there are of its sort, and the rectangle they lie in, so that a tile that was dropped, doubled or moved can be found.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numba import njit

from .bands import Int64, trimmed

SORTS = ("never computed", "computed more than once", "outside of the mask")


def pairs_once(tiles: Int64, owner: Int64, mask: Int64, computing: Iterable[int]) -> None:
    """Each query of the computing ranks meets each key that the mask gives it once, and no query meets any other.

    tiles: int64[m, 8], of the plan. owner: int64[tokens]. mask: disjoint tiles int64[s, 6] in positions of the pack.
    Raises ValueError.
    """
    wanted = np.isin(owner, np.fromiter(computing, np.int64))
    found = _differences(np.ascontiguousarray(tiles[:, 2:]), np.ascontiguousarray(mask), wanted)
    wrong = [
        f"Pair (query {query}, key {key}) on rank {owner[query]} is {sort} ({count} such pairs, in queries {q0} … {q1} and keys "
        f"{k0} … {k1})"
        for sort, (count, query, key, q0, q1, k0, k1) in zip(SORTS, found.tolist(), strict=True)
        if count
    ]
    if wrong:
        raise ValueError("; ".join(wrong) + ".")


@njit(nogil=True, cache=True)
def _by_row(tiles, tokens):
    """The interval of keys that each tile gives each query: (offsets, start, stop), CSR by query."""
    offsets = np.zeros(tokens + 1, np.int64)
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, _, _, _, _ = trimmed(t[0], t[1], t[2], t[3], t[4], t[5])
        for q in range(q0, q1):
            offsets[q + 1] += 1
    for q in range(tokens):
        offsets[q + 1] += offsets[q]
    start, stop, place = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64), offsets[:-1].copy()
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, k0, k1, lo, hi = trimmed(t[0], t[1], t[2], t[3], t[4], t[5])
        for q in range(q0, q1):
            start[place[q]] = max(k0, q - hi)
            stop[place[q]] = min(k1, q - lo + 1)
            place[q] += 1
    return offsets, start, stop


@njit(nogil=True, cache=True)
def _differences(tiles, mask, wanted):
    """int64[3, 7], for pairs that are missing, doubled and outside: how many, the first one, and the rectangle of all."""
    tokens = len(wanted)
    offsets, start, stop = _by_row(tiles, tokens)
    mask_offsets, mask_start, mask_stop = _by_row(mask, tokens)
    found = np.zeros((3, 7), np.int64)
    for q in range(tokens):
        a, b, c, d = offsets[q], offsets[q + 1], mask_offsets[q], mask_offsets[q + 1]
        if a == b and (c == d or not wanted[q]):
            continue
        n, m = b - a, d - c
        at = np.concatenate((start[a:b], stop[a:b], mask_start[c:d], mask_stop[c:d]))
        times = inside = 0
        order = np.argsort(at)
        for x in range(len(order)):
            event = order[x]
            if event < 2 * n:
                times += 1 if event < n else -1
            else:
                inside += 1 if event < 2 * n + m else -1
            if x + 1 == len(order) or at[order[x + 1]] == at[event]:
                continue
            sort = 1 if times > 1 else 2 if times > inside else 0 if times < inside and wanted[q] else -1
            if sort >= 0:
                _note(found[sort], q, at[event], at[order[x + 1]])
    return found


@njit(nogil=True, cache=True)
def _note(found, q, k0, k1):
    if found[0] == 0:
        found[1], found[2], found[3], found[5], found[6] = q, k0, q, k0, k1 - 1
    found[0] += k1 - k0
    found[4] = q
    found[5], found[6] = min(found[5], k0), max(found[6], k1 - 1)
