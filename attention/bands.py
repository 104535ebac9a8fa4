"""Tiles: rectangles of (query, key) pairs with a band, and the arithmetic on them. No torch.

A tile is (q0, q1, k0, k1, lo, hi): the pairs with q0 <= q < q1, k0 <= k < k1 and lo <= q - k <= hi. A band is stated in
absolute positions, so it does not change its meaning when a tile is cut (a "bottom-right causal" rectangle does), and
it expresses causal (lo = 0), sliding windows (hi = width - 1) and their pieces alike. `NO_LIMIT` leaves a side open.

What is decided here: how tiles join when what they touch lies side by side in memory (`join`: a zigzag rank's two
chunks of a document become one causal square), and how a tile falls apart into what kernels know without a mask
(`squares`: full rectangles, causal squares, flipped squares). All of it is linear in tiles, plus one sort for `join`.

    >>> import numpy as np
    >>> squares(np.array([[4, 8, 0, 8, 0, NO_LIMIT]]))          # rows 4 … 7 of a causal document
    array([[4, 8, 4, 8, 1],
           [4, 8, 0, 4, 0]])
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..packing.mask_tiles import NO_LIMIT as NO_LIMIT

Int64 = npt.NDArray[np.int64]

FULL, CAUSAL, FLIPPED = 0, 1, 2
"""Kinds of pieces: every pair; pairs with k - k0 <= q - q0; pairs with k - k0 >= q - q0."""


def pairs(tiles: Int64) -> Int64:
    """(query, key) pairs of each tile, int64[m]. tiles: int64[m, 6]."""
    return _pairs(np.ascontiguousarray(tiles, dtype=np.int64))


def squares(tiles: Int64) -> Int64:
    """The same pairs as full rectangles and squares with a diagonal. tiles: int64[m, 6] → int64[p, 5] (q0, q1, k0, k1, kind).

    A causal tile gives at most a rectangle, a causal square and a second rectangle; a window of w keys over n rows
    gives about 3·n/w pieces. Tiles without a pair give nothing.
    """
    tiles = np.ascontiguousarray(tiles, dtype=np.int64)
    pieces = np.empty((_squares(tiles, np.empty((0, 5), np.int64)), 5), np.int64)
    _squares(tiles, pieces)
    return pieces


def segments(tiles: Int64) -> Int64:
    """The same pairs as what varlen kernels know. tiles: int64[m, 6] → int64[p, 6] (q0, q1, k0, k1, left, right).

    left and right are flash-attention's window sides, counted from the diagonal that ends in the bottom right corner;
    -1 is open. A causal tile gives at most two: bottom-right causal (-1, 0) and full (-1, -1).
    """
    tiles = np.ascontiguousarray(tiles, dtype=np.int64)
    pieces = np.empty((2 * len(tiles), 6), np.int64)
    return pieces[: _segments(tiles, pieces)]


def join(tiles: Int64) -> Int64:
    """As few tiles as neighbours allow, with the same pairs. tiles: int64[m, 6], disjoint → int64[p, 6]."""
    tiles = np.array(tiles, dtype=np.int64).reshape(-1, 6)
    _trim(tiles)
    tiles = tiles[tiles[:, 0] < tiles[:, 1]]
    while True:
        before = len(tiles)
        tiles = tiles[np.lexsort((tiles[:, 2], tiles[:, 1], tiles[:, 0]))]
        tiles = tiles[: _join_keys(tiles)]
        tiles = tiles[np.lexsort((tiles[:, 0], tiles[:, 3], tiles[:, 2]))]
        tiles = tiles[: _join_queries(tiles)]
        if len(tiles) == before:
            return tiles


@njit(nogil=True, cache=True)
def trimmed(q0, q1, k0, k1, lo, hi):
    """The smallest rectangle that holds the tile's pairs, its band opened where it does not bind; q0 >= q1 if empty."""
    q0, q1 = max(q0, k0 + lo), min(q1, k1 + hi)
    k0, k1 = max(k0, q0 - hi), min(k1, q1 - lo)
    if q0 >= q1 or k0 >= k1 or lo > hi:
        return q0, q0, k0, k0, lo, hi
    if q0 - (k1 - 1) >= lo:
        lo = -NO_LIMIT
    if q1 - 1 - k0 <= hi:
        hi = NO_LIMIT
    return q0, q1, k0, k1, lo, hi


@njit(nogil=True, cache=True)
def _trim(tiles):
    for i in range(len(tiles)):
        t = tiles[i]
        t[0], t[1], t[2], t[3], t[4], t[5] = trimmed(t[0], t[1], t[2], t[3], t[4], t[5])


@njit(nogil=True, cache=True)
def _pairs(tiles):
    counts = np.zeros(len(tiles), np.int64)
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, k0, k1, lo, hi = trimmed(t[0], t[1], t[2], t[3], t[4], t[5])
        if q0 >= q1:
            continue
        # Rows before `right` end at q - lo, the others at k1; rows before `left` begin at k0, the others at q - hi.
        right = min(max(k1 + lo, q0), q1)
        left = min(max(k0 + hi + 1, q0), q1)
        ends = (q0 + right - 1 - 2 * lo + 2) * (right - q0) // 2 + k1 * (q1 - right)
        begins = k0 * (left - q0) + (left + q1 - 1 - 2 * hi) * (q1 - left) // 2
        counts[i] = ends - begins
    return counts


@njit(nogil=True, cache=True)
def _squares(tiles, pieces):
    """Write the pieces if there is room for them; return how many there are."""
    n = 0
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, k0, k1, lo, hi = trimmed(t[0], t[1], t[2], t[3], t[4], t[5])
        if q0 >= q1:
            continue
        right = min(max(k1 + lo, q0), q1)
        left = min(max(k0 + hi + 1, q0), q1)
        cuts = (q0, min(left, right), max(left, right), q1)
        for c in range(3):
            x, end = cuts[c], cuts[c + 1]
            falls, rises = x < right, x >= left
            # A diagonal on both sides: squares may not be wider than the band, or they would overlap.
            step = max(1, hi - lo) if falls and rises else end - x
            while x < end:
                y = min(end, x + step)
                a = x - hi if rises else k0
                b = y - lo if falls else k1
                if hi == lo:
                    n = _put(pieces, n, x, y, a, a + 1, FULL)
                else:
                    if rises:
                        n = _put(pieces, n, x, y, a, a + (y - x), FLIPPED)
                        a += y - x
                    if falls:
                        n = _put(pieces, n, x, y, b - (y - x), b, CAUSAL)
                        b -= y - x
                    n = _put(pieces, n, x, y, a, b, FULL)
                x = y
    return n


@njit(nogil=True, cache=True)
def _put(pieces, n, q0, q1, k0, k1, kind):
    if q0 >= q1 or k0 >= k1:
        return n
    if n < len(pieces):
        # A square of one pair has no diagonal to speak of.
        single = q1 - q0 == 1 and k1 - k0 == 1
        pieces[n] = (q0, q1, k0, k1, FULL if single else kind)
    return n + 1


@njit(nogil=True, cache=True)
def _segments(tiles, pieces):
    n = 0
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, k0, k1, lo, hi = trimmed(t[0], t[1], t[2], t[3], t[4], t[5])
        if q0 >= q1:
            continue
        right = min(max(k1 + lo, q0), q1)
        if q0 < right:
            pieces[n] = (q0, right, max(k0, q0 - hi), right - lo, hi - lo if hi < NO_LIMIT else -1, 0)
            n += 1
        if right < q1:
            first = max(k0, right - hi)
            left = k1 - q1 + hi if q1 - 1 - first > hi else -1
            pieces[n] = (right, q1, first, k1, left, -1)
            n += 1
    return n


@njit(nogil=True, cache=True)
def _inside(t, lo, hi):
    """Whether the band (lo, hi) forbids none of the pairs of tile t that its own band allows."""
    return (lo <= t[4] or t[0] - (t[3] - 1) >= lo) and (hi >= t[5] or t[1] - 1 - t[2] <= hi)


@njit(nogil=True, cache=True)
def _join_keys(tiles):
    """Join runs of tiles with the same rows and touching keys, in place; tiles sorted by rows, then keys."""
    if len(tiles) == 0:
        return 0
    n = 0
    for i in range(1, len(tiles)):
        a, b = tiles[n], tiles[i]
        if a[0] == b[0] and a[1] == b[1] and a[3] == b[2]:
            lo, hi = max(a[4], b[4]), min(a[5], b[5])
            if _inside(a, lo, hi) and _inside(b, lo, hi):
                a[3], a[4], a[5] = b[3], lo, hi
                continue
        n += 1
        tiles[n] = tiles[i]
    return n + 1


@njit(nogil=True, cache=True)
def _join_queries(tiles):
    """Join runs of tiles with touching rows whose union is one band; tiles sorted by keys, then rows."""
    if len(tiles) == 0:
        return 0
    n = 0
    for i in range(1, len(tiles)):
        n += 1
        tiles[n] = tiles[i]
        while n > 0:
            a, b = tiles[n - 1], tiles[n]
            if a[1] != b[0]:
                break
            lo, hi = max(a[4], b[4]), min(a[5], b[5])
            k0, k1 = min(a[2], b[2]), max(a[3], b[3])
            if not (_inside(a, lo, hi) and _inside(b, lo, hi) and _adds_nothing(a, k0, k1, lo, hi)):
                break
            if not _adds_nothing(b, k0, k1, lo, hi):
                break
            a[1], a[2], a[3], a[4], a[5] = b[1], k0, k1, lo, hi
            n -= 1
    return n + 1


@njit(nogil=True, cache=True)
def _adds_nothing(t, k0, k1, lo, hi):
    """Whether the rows of t, given keys k0 … k1 under the band (lo, hi), attend to no key that t does not have."""
    return (t[3] == k1 or t[1] - 1 - t[3] < lo) and (t[2] == k0 or t[0] - (t[2] - 1) > hi)
