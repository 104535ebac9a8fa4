"""Areas of a mask: the pairs in chunks of queries and in blocks of a grid, the keys each chunk needs, the mask cut along a grid.

What planners that place attention itself decide on: MagiAttention deals out chunks of queries by `chunk_pairs` and joins those
whose `chunk_keys` overlap; DCP and Libra's TAP place blocks of (queries, keys), whose workloads are `block_pairs` and whose
parts, once they are placed, are `blocks`. All of them take tiles int64[m, 6] in positions of the pack (`Mask.tiles_of_pack()`,
or columns 2 … 7 of an AttentionPlan's) and edges: boundaries of the chunks, int[c + 1], never falling; what lies outside of the
edges is left out.

Cost: chunks in O(1) for each tile and chunk that meet, blocks in O(1) for each that is not empty: 128K causal tokens over a grid
of 1024 x 1024 in 2 to 9 ms (524,800 blocks), over 256 x 256 in 0.6 ms; sparse masks in a fraction of that (two shared cores).

    >>> import numpy as np
    >>> from equipoise.packing.mask_kinds import causal
    >>> tiles = causal([4, 4]).tiles_of_pack()
    >>> chunk_pairs(tiles, [0, 2, 4, 6, 8]), chunk_keys(tiles, [0, 2, 4, 6, 8]).of(3)
    (array([3, 7, 3, 7]), array([[4, 8]]))
    >>> block_pairs(tiles, [0, 2, 4, 8]).dense()
    array([[ 3,  0,  0],
           [ 4,  3,  0],
           [ 0,  0, 10]])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from .mask_tiles import NO_LIMIT
from .packs import Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockPairs:
    """Pairs of the blocks that have any, as a sparse matrix by rows (CSR): chunks of queries x chunks of keys."""

    shape: tuple[int, int]
    offsets: Int64
    """int64[query chunks + 1]."""
    column: Int64
    """int64[b], the chunk of keys of each block; rising within a row."""
    pairs: Int64
    """int64[b], at least 1."""

    @property
    def row(self) -> Int64:
        """The chunk of queries of each block, int64[b]."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.offsets))

    def __len__(self) -> int:
        return len(self.column)

    def dense(self) -> Int64:
        """int64[query chunks, key chunks]."""
        matrix = np.zeros(self.shape, np.int64)
        matrix[self.row, self.column] = self.pairs
        return matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyRanges:
    """The keys that each chunk of queries attends to: ranges (start, stop), apart from each other and rising (CSR)."""

    offsets: Int64
    """int64[chunks + 1]."""
    ranges: Int64
    """int64[r, 2]."""

    def of(self, chunk: int) -> Int64:
        """int64[n, 2]."""
        return self.ranges[self.offsets[chunk] : self.offsets[chunk + 1]]

    def rows(self) -> Int64:
        """How many keys each chunk needs, int64[chunks]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.ranges[:, 1] - self.ranges[:, 0])])[self.offsets])


def chunk_pairs(tiles: Int64, edges: npt.ArrayLike) -> Int64:
    """Pairs of each chunk of queries, int64[c]."""
    return _chunk_pairs(_tiles(tiles), _edges(edges))


def chunk_keys(tiles: Int64, edges: npt.ArrayLike) -> KeyRanges:
    """The keys that each chunk of queries attends to."""
    tiles, bounds = _tiles(tiles), _edges(edges)
    offsets, member = _members(tiles, bounds)
    counts, ranges = _chunk_keys(tiles, bounds, offsets, member)
    return KeyRanges(offsets=np.concatenate([[0], np.cumsum(counts)]), ranges=ranges)


def block_pairs(tiles: Int64, q_edges: npt.ArrayLike, k_edges: npt.ArrayLike | None = None) -> BlockPairs:
    """Pairs of each block of a grid that has any. k_edges: those of the keys; None: the same as the queries'."""
    tiles, q, k = _tiles(tiles), _edges(q_edges), _edges(q_edges if k_edges is None else k_edges)
    offsets, member = _members(tiles, q)
    rows, column, pairs = _block_pairs(tiles, q, k, offsets, member)
    return BlockPairs(shape=(len(q) - 1, len(k) - 1), offsets=rows, column=column, pairs=pairs)


def blocks(tiles: Int64, q_edges: npt.ArrayLike, k_edges: npt.ArrayLike | None = None) -> tuple[Int64, Int64]:
    """The tiles cut along a grid: (block int64[n, 2] of (query chunk, key chunk), tiles int64[n, 6]), by block; none is empty.

    Give each block a rank and these are a plan's tiles.
    """
    tiles, q, k = _tiles(tiles), _edges(q_edges), _edges(q_edges if k_edges is None else k_edges)
    offsets, member = _members(tiles, q)
    count = _cut(tiles, q, k, offsets, member, np.empty((0, 2), np.int64), np.empty((0, 6), np.int64))
    block, pieces = np.empty((count, 2), np.int64), np.empty((count, 6), np.int64)
    _cut(tiles, q, k, offsets, member, block, pieces)
    order = np.argsort(block[:, 0] * len(k) + block[:, 1], kind="stable")
    return block[order], pieces[order]


def _tiles(tiles: Int64) -> Int64:
    return np.ascontiguousarray(tiles, dtype=np.int64).reshape(-1, 6)


def _edges(edges: npt.ArrayLike) -> Int64:
    bounds = np.asarray(edges)
    if bounds.ndim != 1 or len(bounds) == 0 or bounds.dtype.kind not in "iu" or np.any(bounds[1:] < bounds[:-1]):
        raise ValueError(f"Edges are positions, integers in one dimension that never fall, at least one; got {bounds}.")
    return bounds.astype(np.int64)


# As in mask_tiles.py: a kernel calls kernels of its own file only.
@njit(nogil=True, cache=True)
def _tight(q0, q1, k0, k1, lo, hi):
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
def _count(q0, q1, k0, k1, lo, hi):
    """Pairs of a tight tile."""
    if lo == -NO_LIMIT and hi == NO_LIMIT:
        return (q1 - q0) * (k1 - k0)
    right, left = min(max(k1 + lo, q0), q1), min(max(k0 + hi + 1, q0), q1)
    ends = (q0 + right + 1 - 2 * lo) * (right - q0) // 2 + k1 * (q1 - right)
    return ends - k0 * (left - q0) - (left + q1 - 1 - 2 * hi) * (q1 - left) // 2


@njit(nogil=True, cache=True)
def _at(edges, position):
    """The chunk that holds the position: the last one that begins at or before it."""
    return np.searchsorted(edges, position, side="right") - 1


@njit(nogil=True, cache=True)
def _members(tiles, edges):
    """CSR, chunk → tiles that meet it."""
    chunks = len(edges) - 1
    offsets = np.zeros(chunks + 1, np.int64)
    span = np.zeros((len(tiles), 2), np.int64)
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1, _, _, _, _ = _tight(t[0], t[1], t[2], t[3], t[4], t[5])
        q0, q1 = max(q0, edges[0]), min(q1, edges[-1])
        if q0 < q1:
            span[i] = _at(edges, q0), _at(edges, q1 - 1) + 1
        for c in range(span[i, 0], span[i, 1]):
            offsets[c + 1] += 1
    for c in range(chunks):
        offsets[c + 1] += offsets[c]
    place, member = offsets[:-1].copy(), np.empty(offsets[-1], np.int64)
    for i in range(len(tiles)):
        for c in range(span[i, 0], span[i, 1]):
            member[place[c]] = i
            place[c] += 1
    return offsets, member


@njit(nogil=True, cache=True)
def _chunk_pairs(tiles, edges):
    pairs = np.zeros(len(edges) - 1, np.int64)
    for i in range(len(tiles)):
        t = tiles[i]
        q0, q1 = max(t[0], edges[0]), min(t[1], edges[-1])
        if q0 >= q1:
            continue
        for c in range(_at(edges, q0), _at(edges, q1 - 1) + 1):
            a, b, k0, k1, lo, hi = _tight(max(q0, edges[c]), min(q1, edges[c + 1]), t[2], t[3], t[4], t[5])
            if a < b:
                pairs[c] += _count(a, b, k0, k1, lo, hi)
    return pairs


@njit(nogil=True, cache=True)
def _chunk_keys(tiles, edges, offsets, member):
    counts, ranges = np.zeros(len(edges) - 1, np.int64), np.empty((len(member), 2), np.int64)
    n = 0
    for c in range(len(edges) - 1):
        many = offsets[c + 1] - offsets[c]
        found, begin = np.empty((many, 2), np.int64), n
        some = 0
        for m in range(offsets[c], offsets[c + 1]):
            t = tiles[member[m]]
            q0, q1, k0, k1, _, _ = _tight(max(t[0], edges[c]), min(t[1], edges[c + 1]), t[2], t[3], t[4], t[5])
            if q0 < q1:
                # Of a tight tile every key between the first and the last is attended to.
                found[some] = k0, k1
                some += 1
        for i in np.argsort(found[:some, 0]):
            if n > begin and ranges[n - 1, 1] >= found[i, 0]:
                ranges[n - 1, 1] = max(ranges[n - 1, 1], found[i, 1])
            else:
                ranges[n] = found[i]
                n += 1
        counts[c] = n - begin
    return counts, ranges[:n].copy()


@njit(nogil=True, cache=True)
def _block_pairs(tiles, q_edges, k_edges, offsets, member):
    """Row by row of the grid: sum into a dense row, write what is not 0."""
    rows, row = np.zeros(len(q_edges), np.int64), np.zeros(len(k_edges), np.int64)
    column, pairs = np.empty(1024, np.int64), np.empty(1024, np.int64)
    n = 0
    for c in range(len(q_edges) - 1):
        least, most = len(k_edges), 0
        for m in range(offsets[c], offsets[c + 1]):
            t = tiles[member[m]]
            q0, q1 = max(t[0], q_edges[c]), min(t[1], q_edges[c + 1])
            q0, q1, k0, k1, lo, hi = _tight(q0, q1, max(t[2], k_edges[0]), min(t[3], k_edges[-1]), t[4], t[5])
            if q0 >= q1:
                continue
            first, last = _at(k_edges, k0), _at(k_edges, k1 - 1) + 1
            for b in range(first, last):
                a, z = max(k0, k_edges[b]), min(k1, k_edges[b + 1])
                if q0 - (z - 1) >= lo and q1 - 1 - a <= hi:
                    row[b] += (q1 - q0) * (z - a)
                else:
                    x, y, a, z, low, high = _tight(q0, q1, a, z, lo, hi)
                    if x < y:
                        row[b] += _count(x, y, a, z, low, high)
            least, most = min(least, first), max(most, last)
        if n + most - least > len(column):
            longer = np.empty((2, 2 * len(column) + len(row)), np.int64)
            longer[0, :n], longer[1, :n] = column[:n], pairs[:n]
            column, pairs = longer[0], longer[1]
        for b in range(least, most):
            if row[b] > 0:
                column[n], pairs[n] = b, row[b]
                row[b] = 0
                n += 1
        rows[c + 1] = n
    return rows, column[:n].copy(), pairs[:n].copy()


@njit(nogil=True, cache=True)
def _cut(tiles, q_edges, k_edges, offsets, member, block, pieces):
    """Write the pieces if there is room for them; return how many there are."""
    n = 0
    for c in range(len(q_edges) - 1):
        for m in range(offsets[c], offsets[c + 1]):
            t = tiles[member[m]]
            q0, q1 = max(t[0], q_edges[c]), min(t[1], q_edges[c + 1])
            q0, q1, k0, k1, lo, hi = _tight(q0, q1, max(t[2], k_edges[0]), min(t[3], k_edges[-1]), t[4], t[5])
            if q0 >= q1:
                continue
            for b in range(_at(k_edges, k0), _at(k_edges, k1 - 1) + 1):
                x, y, a, z, low, high = _tight(q0, q1, max(k0, k_edges[b]), min(k1, k_edges[b + 1]), lo, hi)
                if x < y:
                    if n < len(pieces):
                        block[n] = c, b
                        pieces[n] = x, y, a, z, low, high
                    n += 1
    return n
