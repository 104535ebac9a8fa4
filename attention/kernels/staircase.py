"""Staircases: rows in steps that all see the same first key, and each step some keys more than the one before. No torch.

Striped layouts give them: stripe after stripe of a document's queries sees one stripe of another rank's keys more. As full
rectangles the steps share their keys, and a varlen call may not hold a key twice, so a document of 64 stripes would take 64
calls a stage; on CPU narrow steps are slow. What is decided here: such steps become one causal tile through the steps'
corners, and above it a triangle in each step (keys not before the row's own place), none of which share a row. The first
step stays a rectangle, and the last one's end, where a document ends within a stripe, is one more: three varlen calls,
whatever the number of steps and documents. Linear in tiles, plus one sort.

    >>> import numpy as np
    >>> steps = np.array([[0, 3, 0, 3], [3, 6, 0, 6], [6, 8, 0, 9]])
    >>> split_staircases(np.column_stack([steps, np.full(3, -NO_LIMIT), np.full(3, NO_LIMIT)]))[:, :4]
    array([[0, 3, 0, 3],
           [3, 8, 0, 8],
           [3, 5, 4, 6],
           [6, 8, 7, 9]])
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..bands import NO_LIMIT as NO_LIMIT
from ..bands import Int64

FEWEST = 3
"""Steps that are split up: two are two calls as rectangles."""


def split_staircases(tiles: Int64) -> Int64:
    """The same pairs, staircases split up. tiles: int64[m, 6], see `bands` → int64[n, 6]."""
    full = (tiles[:, 4] == -NO_LIMIT) & (tiles[:, 5] == NO_LIMIT)
    steps = tiles[full]
    steps = np.ascontiguousarray(steps[np.lexsort((steps[:, 0], steps[:, 2]))])
    out = np.empty((3 * len(steps), 6), np.int64)
    return np.concatenate([out[: _split(steps, out)], tiles[~full]])


@njit(nogil=True, cache=True)
def _split(steps, out):
    n = first = 0
    while first < len(steps):
        shift = steps[first, 1] - steps[first, 3]
        stop = first + 1
        while (
            stop < len(steps)
            and steps[stop, 2] == steps[first, 2]
            and steps[stop, 0] == steps[stop - 1, 1]
            and steps[stop - 1, 1] - steps[stop - 1, 3] == shift
            and steps[stop, 3] > steps[stop - 1, 3]
            and steps[stop, 1] - steps[stop, 3] <= shift
        ):
            stop += 1
        if stop < first + FEWEST:
            stop = first + 1
        out[n] = steps[first]
        n += 1
        if stop > first + 1:
            end = steps[stop - 1, 1]
            out[n] = (steps[first, 1], end, steps[first, 2], end - shift, shift, NO_LIMIT)
            n += 1
        for i in range(first + 1, stop):
            q0, q1, _, k1, _, _ = steps[i]
            # Row q has the keys up to its place q - shift by the causal tile, so the first above it is one further.
            above = q0 - shift + 1
            side = min(q1 - q0, k1 - above) if q1 - q0 > 1 else 0
            if side > 0:
                out[n] = (q0, q0 + side, above, above + side, -NO_LIMIT, shift - 1)
                n += 1
            if above + side < k1:
                out[n] = (q0, q1, above + side, k1, -NO_LIMIT, NO_LIMIT)
                n += 1
        first = stop
    return n
