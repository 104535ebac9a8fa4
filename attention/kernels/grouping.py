"""Which pieces of attention share one kernel call. No torch.

Pieces of like shape are computed in one batched call, padded to the largest of the group, as long as the padding costs
less than a call: at most WASTE padded pairs a group. Pieces with a side of LARGE or more go alone, so that they need no
copy. No query row comes twice in a group, so that results are merged in one go.

    >>> import numpy as np
    >>> pieces = np.array([[0, 5, 0, 5, 1], [5, 9, 5, 9, 1], [9, 700, 9, 700, 1]])
    >>> [group.tolist() for group in batches(pieces, 700)]
    [[0, 1], [2]]
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..bands import FULL, Int64

LARGE = 256
"""From this length on batching gains nothing and copies cost."""
WASTE = 1024
"""Padded (query, key) pairs that take about as long as one more call, forward and backward, at 8 heads of 64."""


def batches(pieces: Int64, num_q: int) -> list[Int64]:
    """Groups of indices into pieces (int64[p, 5], see bands.squares), each in order of rows; squares come first."""
    if len(pieces) == 0:
        return []
    q_len, k_len = pieces[:, 1] - pieces[:, 0], pieces[:, 3] - pieces[:, 2]
    full = (pieces[:, 4] == FULL).astype(np.int64)
    alone = np.maximum(q_len, k_len) >= LARGE
    layer = layers(pieces[:, :2], full, num_q)
    order = np.lexsort((pieces[:, 0], -q_len, -k_len, layer, alone, full))
    keys = np.stack([full, alone, layer], axis=1)[order]
    group = _cut(keys, q_len[order], k_len[order], WASTE)
    parts = np.split(order, np.flatnonzero(np.diff(group)) + 1)
    return [part[np.argsort(pieces[part, 0], kind="stable")] for part in parts]


def layers(intervals: Int64, kind: Int64, rows: int) -> Int64:
    """The least layer for each item, in order, such that no row is in two items of one kind and layer, int64[n].

    intervals: int64[n, 2·s], s intervals (start, stop) of rows for each item. kind: int64[n], from 0.
    """
    if len(intervals) == 0:
        return np.zeros(0, np.int64)
    return _layers(np.ascontiguousarray(intervals), np.ascontiguousarray(kind), rows, int(kind.max()) + 1)


def touched(start: Int64, stop: Int64, rows: int) -> tuple[Int64, Int64]:
    """Rows that any interval touches, and where each row stands among them."""
    edges = np.zeros(rows + 1, np.int64)
    np.add.at(edges, start, 1)
    np.add.at(edges, stop, -1)
    touched = np.cumsum(edges[:-1]) > 0
    return np.flatnonzero(touched), np.cumsum(touched) - 1


@njit(nogil=True, cache=True)
def _layers(intervals, kind, rows, kinds):
    taken = np.zeros((kinds, rows), np.int64)
    layer = np.zeros(len(intervals), np.int64)
    for i in range(len(intervals)):
        for side in range(0, intervals.shape[1], 2):
            for row in range(intervals[i, side], intervals[i, side + 1]):
                layer[i] = max(layer[i], taken[kind[i], row])
        for side in range(0, intervals.shape[1], 2):
            taken[kind[i], intervals[i, side] : intervals[i, side + 1]] = layer[i] + 1
    return layer


@njit(nogil=True, cache=True)
def _cut(keys, q_len, k_len, waste):
    """Group numbers along sorted pieces: a new group where a key changes, a piece goes alone, or padding costs too much."""
    group = np.zeros(len(q_len), np.int64)
    q_max, k_max, count, area = q_len[0], k_len[0], 1, q_len[0] * k_len[0]
    for i in range(1, len(q_len)):
        q, k, n, a = max(q_max, q_len[i]), max(k_max, k_len[i]), count + 1, area + q_len[i] * k_len[i]
        group[i] = group[i - 1]
        if keys[i, 1] or np.any(keys[i] != keys[i - 1]) or q * k * n - a > waste:
            group[i] += 1
            q, k, n, a = q_len[i], k_len[i], 1, q_len[i] * k_len[i]
        q_max, k_max, count, area = q, k, n, a
    return group
