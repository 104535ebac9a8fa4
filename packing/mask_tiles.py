"""Arithmetic of masks as tiles: counting, cutting, subtracting. What `Mask` is made of; no Python loop over tiles.

A tile is (q0, q1, k0, k1, lo, hi), the pairs with q0 <= q < q1, k0 <= k < k1 and lo <= q - k <= hi (`attention/bands.py`
computes on the same ones). Bands are closed under what masks need: two tiles have one tile in common, a tile less another is at
most six, a shift of queries and keys alike leaves lo and hi as they are. Each pair is in a mask once, so masks are kept
disjoint here and all counts are sums over tiles, each in closed form.

    >>> import numpy as np
    >>> causal = np.array([[0, 8, 0, 8, 0, NO_LIMIT]])
    >>> window = np.array([[0, 8, 0, 8, 0, 2]])
    >>> counts(causal), counts(window), counts(minus(causal, np.array([0, 1]), window, np.array([0, 1]))[0])
    (array([36]), array([21]), array([15]))
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .packs import Int64

NO_LIMIT = 1 << 40
"""Larger than any position: -NO_LIMIT <= q - k <= NO_LIMIT holds for every pair."""
FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL = 0, 1, 2, 3
"""MagiAttention's types of slices: every pair; aligned at the bottom right (the last query sees all keys, the one before all but
the last); at the top left (the first query sees all keys, the second all but the first); both."""


def lower(slices: Int64) -> Int64:
    """Slices int64[s, 5] (q0, q1, k0, k1, type) as tiles int64[s, 6]."""
    q0, q1, k0, k1, kind = slices.T
    lo = np.where((kind == CAUSAL) | (kind == BI_CAUSAL), q1 - k1, -NO_LIMIT)
    hi = np.where((kind == INV_CAUSAL) | (kind == BI_CAUSAL), q0 - k0, NO_LIMIT)
    return np.stack([q0, q1, k0, k1, lo, hi], axis=1)


def tightened(tiles: Int64) -> Int64:
    """The smallest rectangle that holds the pairs of each tile, bands opened where they do not bind; all 0 where there are none."""
    tiles = np.array(tiles, dtype=np.int64)
    _tighten(tiles)
    return tiles


def counts(tiles: Int64) -> Int64:
    """Pairs of each tile, int64[m]."""
    return _counts(np.ascontiguousarray(tiles))


def clipped(tiles: Int64, q0: Int64 | int, q1: Int64 | int, k0: Int64 | int, k1: Int64 | int) -> Int64:
    """The tiles within queries [q0, q1) and keys [k0, k1), one rectangle or one for each; tight, some perhaps without a pair."""
    low = [np.maximum(tiles[:, at], least) for at, least in ((0, q0), (2, k0))]
    high = [np.minimum(tiles[:, at], most) for at, most in ((1, q1), (3, k1))]
    return tightened(np.stack([low[0], high[0], low[1], high[1], tiles[:, 4], tiles[:, 5]], axis=1))


def minus(a: Int64, a_offsets: Int64, b: Int64, b_offsets: Int64) -> tuple[Int64, Int64]:
    """The pairs of a that are not in b, document by document (CSR); (tiles, offsets)."""
    return _minus(a, a_offsets, b, b_offsets)


def common(a: Int64, a_offsets: Int64, b: Int64, b_offsets: Int64) -> tuple[Int64, Int64]:
    """The pairs of a that are in b, document by document (CSR); (tiles, offsets)."""
    return _common(a, a_offsets, b, b_offsets)


def disjoint(tiles: Int64, offsets: Int64) -> tuple[Int64, Int64]:
    """Every pair that any tile of a document has, once: of each tile what none before it has; (tiles, offsets)."""
    return _disjoint(tiles, offsets)


def overlap(tiles: Int64, offsets: Int64) -> tuple[int, int, int]:
    """(document, and two of its tiles that share a pair, by their place in `tiles`); -1 for all three if there are none."""
    return _overlap(tiles, offsets)


def row_counts(tiles: Int64, tokens: int) -> Int64:
    """Keys that each query attends to, int64[tokens]; linear in tiles + tokens."""
    return _row_counts(tiles, tokens)


def typed(tiles: Int64) -> tuple[Int64, Int64]:
    """The same pairs as MagiAttention's slices, at most three for a tile: (slices int64[s, 5], tile of each int64[s])."""
    tiles = np.ascontiguousarray(tiles)
    slices, owner = np.empty((3 * len(tiles), 5), np.int64), np.empty(3 * len(tiles), np.int64)
    n = _typed(tiles, slices, owner)
    return slices[:n], owner[:n]


# The same as attention/bands.py's, which is above this room; a kernel calls kernels of its own file only.
@njit(nogil=True, cache=True)
def _tight(q0, q1, k0, k1, lo, hi):
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)
    k0, k1 = max(k0, q0 - hi), min(k1, q1 - lo)
    if q0 >= q1 or k0 >= k1 or lo > hi:
        return 0, 0, 0, 0, lo, hi
    if q0 - (k1 - 1) >= lo:
        lo = -NO_LIMIT
    if q1 - 1 - k0 <= hi:
        hi = NO_LIMIT
    return q0, q1, k0, k1, lo, hi


@njit(nogil=True, cache=True)
def _tighten(tiles):
    for i in range(len(tiles)):
        t = tiles[i]
        t[0], t[1], t[2], t[3], t[4], t[5] = _tight(t[0], t[1], t[2], t[3], t[4], t[5])


@njit(nogil=True, cache=True)
def _turns(q0, q1, k0, k1, lo, hi):
    """Of a tight tile: the row from which all keys end at k1, and the row from which keys begin at q - hi."""
    return min(max(k1 + lo, q0), q1), min(max(k0 + hi + 1, q0), q1)


@njit(nogil=True, cache=True)
def _counts(tiles):
    counted = np.zeros(len(tiles), np.int64)
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, k0, k1, lo, hi = _tight(t[0], t[1], t[2], t[3], t[4], t[5])
        if q0 >= q1:
            continue
        right, left = _turns(q0, q1, k0, k1, lo, hi)
        ends = (q0 + right + 1 - 2 * lo) * (right - q0) // 2 + k1 * (q1 - right)
        begins = k0 * (left - q0) + (left + q1 - 1 - 2 * hi) * (q1 - left) // 2
        counted[i] = ends - begins
    return counted


@njit(nogil=True, cache=True)
def _put(out, n, q0, q1, k0, k1, lo, hi):
    q0, q1, k0, k1, lo, hi = _tight(q0, q1, k0, k1, lo, hi)
    if q0 >= q1:
        return n
    out[n] = (q0, q1, k0, k1, lo, hi)
    return n + 1


@njit(nogil=True, cache=True)
def _meet(a, b):
    return _tight(max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3]), max(a[4], b[4]), min(a[5], b[5]))


@njit(nogil=True, cache=True)
def _subtract(a, b, out, n):
    """Write the pieces of a that are not in b, at most six of them."""
    q0, q1, _, _, _, _ = _meet(a, b)
    if q0 >= q1:
        out[n] = a
        return n + 1
    q0, q1, k0, k1 = max(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), min(a[3], b[3])
    n = _put(out, n, a[0], q0, a[2], a[3], a[4], a[5])
    n = _put(out, n, q0, q1, a[2], k0, a[4], a[5])
    n = _put(out, n, q0, q1, k0, k1, max(a[4], b[5] + 1), a[5])
    n = _put(out, n, q0, q1, k0, k1, a[4], min(a[5], b[4] - 1))
    n = _put(out, n, q0, q1, k1, a[3], a[4], a[5])
    return _put(out, n, q1, a[1], a[2], a[3], a[4], a[5])


@njit(nogil=True, cache=True)
def _grown(array, needed):
    if needed <= len(array):
        return array
    larger = np.empty((max(needed, 2 * len(array)), array.shape[1]), array.dtype)
    larger[: len(array)] = array
    return larger


@njit(nogil=True, cache=True)
def _less(tile, others, out, n):
    """Write what of `tile` is in none of the others; return (out, how many are written)."""
    pieces, count = np.empty((8, 6), np.int64), 0
    if tile[0] < tile[1]:
        pieces[0], count = tile, 1
    for j in range(len(others)):
        q0, q1, _, _, _, _ = _meet(tile, others[j])
        if q0 >= q1:
            continue
        left = np.empty((6 * count, 6), np.int64)
        kept: Any = np.int64(0)
        for i in range(count):
            kept = _subtract(pieces[i], others[j], left, kept)
        pieces, count = left, kept
    out = _grown(out, n + count)
    out[n : n + count] = pieces[:count]
    return out, n + count


@njit(nogil=True, cache=True)
def _minus(a, a_offsets, b, b_offsets):
    out, n = np.empty((len(a) + 8, 6), np.int64), np.int64(0)
    offsets = np.zeros(len(a_offsets), np.int64)
    for d in range(len(a_offsets) - 1):
        others = b[b_offsets[d] : b_offsets[d + 1]]
        for i in range(a_offsets[d], a_offsets[d + 1]):
            out, n = _less(a[i], others, out, n)
        offsets[d + 1] = n
    return out[:n].copy(), offsets


@njit(nogil=True, cache=True)
def _common(a, a_offsets, b, b_offsets):
    out, n = np.empty((len(a) + 8, 6), np.int64), np.int64(0)
    offsets = np.zeros(len(a_offsets), np.int64)
    for d in range(len(a_offsets) - 1):
        for i in range(a_offsets[d], a_offsets[d + 1]):
            for j in range(b_offsets[d], b_offsets[d + 1]):
                q0, q1, k0, k1, lo, hi = _meet(a[i], b[j])
                out = _grown(out, n + 1)
                n = _put(out, n, q0, q1, k0, k1, lo, hi)
        offsets[d + 1] = n
    return out[:n].copy(), offsets


@njit(nogil=True, cache=True)
def _disjoint(tiles, offsets):
    out, n = np.empty((len(tiles) + 8, 6), np.int64), np.int64(0)
    bounds = np.zeros(len(offsets), np.int64)
    for d in range(len(offsets) - 1):
        for i in range(offsets[d], offsets[d + 1]):
            out, n = _less(tiles[i], tiles[offsets[d] : i], out, n)
        bounds[d + 1] = n
    return out[:n].copy(), bounds


@njit(nogil=True, cache=True)
def _overlap(tiles, offsets):
    for d in range(len(offsets) - 1):
        for i in range(offsets[d], offsets[d + 1]):
            for j in range(offsets[d], i):
                q0, q1, _, _, _, _ = _meet(tiles[j], tiles[i])
                if q0 < q1:
                    return d, j, i
    return -1, -1, -1


@njit(nogil=True, cache=True)
def _row_counts(tiles, tokens):
    """A row's keys are level + slope x row; both are summed up from where they change."""
    level, slope = np.zeros(tokens + 1, np.int64), np.zeros(tokens + 1, np.int64)
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, k0, k1, lo, hi = _tight(t[0], t[1], t[2], t[3], t[4], t[5])
        if q0 >= q1:
            continue
        right, left = _turns(q0, q1, k0, k1, lo, hi)
        # Keys end at q + 1 - lo, later at k1; they begin at k0, later at q - hi.
        slope[q0] += 1
        level[q0] += 1 - lo - k0
        slope[right] -= 1
        level[right] += k1 - 1 + lo
        slope[left] -= 1
        level[left] += k0 + hi
        slope[q1] += 1
        level[q1] -= k1 + hi
    rows = np.empty(tokens, np.int64)
    a = b = 0
    for q in range(tokens):
        a += level[q]
        b += slope[q]
        rows[q] = a + b * q
    return rows


@njit(nogil=True, cache=True)
def _typed(tiles, slices, owner):
    n = 0
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, k0, k1, lo, hi = _tight(t[0], t[1], t[2], t[3], t[4], t[5])
        if q0 >= q1:
            continue
        right, left = _turns(q0, q1, k0, k1, lo, hi)
        cuts = (q0, min(left, right), max(left, right), q1)
        for c in range(3):
            x, y = cuts[c], cuts[c + 1]
            if x >= y:
                continue
            falls, rises = x < right, x >= left
            kind = BI_CAUSAL if falls and rises else CAUSAL if falls else INV_CAUSAL if rises else FULL
            slices[n] = (x, y, x - hi if rises else k0, y - lo if falls else k1, kind)
            owner[n] = i
            n += 1
    return n
