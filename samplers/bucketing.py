"""Bucketing and micro-batch chunking (FlexSP, ASPLOS'25, sections 4.2 and 4.3): two exact partitions of sorted lengths.

- ``buckets``: at most b groups of like length, each rounded up to its longest, with the least tokens added in all. The
  MILP then decides how many of a bucket go where and not where each goes. Dynamic programming over the lengths in
  order, ``f(b, j) = min_i f(b-1, i) + longest·(j - i) - their sum``, over different lengths only: b·u² steps for u of
  them, 2 ms for 512 documents and 16 buckets.
- ``even_parts``: consecutive documents in m parts whose largest is as small as possible, the slots of a step. The paper
  finds it by dynamic programming as well; here by bisecting the answer, n·log(tokens) steps.

    >>> import numpy as np
    >>> buckets(np.array([100, 90, 10, 9, 8]), 2)                 # longest of each bucket, bucket of each document
    (array([ 10, 100]), array([1, 1, 0, 0, 0]))
    >>> even_parts(np.array([9, 5, 4, 3, 3]), 2)
    array([0, 2, 5])
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..packing.packs import Int64


def buckets(tokens: npt.ArrayLike, count: int) -> tuple[Int64, Int64]:
    """(longest int64[b], bucket of each document int64[n]) of the b <= count buckets, shortest first.

    tokens: int[n]. Sum over documents of longest - tokens is the least possible; of equal partitions the one whose last
    buckets begin latest.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    if count < 1:
        raise ValueError(f"buckets makes at least one bucket; got count={count}.")
    lengths, inverse, number = np.unique(tokens, return_inverse=True, return_counts=True)
    edges = _bucket_edges(lengths, number, min(count, len(lengths)))
    of_length = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    return lengths[edges[1:] - 1], of_length[inverse.reshape(-1)].astype(np.int64)


def enough_buckets(tokens: npt.ArrayLike, count: int, capacity: int) -> tuple[Int64, Int64]:
    """``buckets`` of `count` or more, until at most half of what `capacity` leaves free is lost to rounding up.

    The authors' rule: the sum of rounded tokens is at most (tokens + capacity) / 2.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    while True:
        longest, bucket = buckets(tokens, count)
        if 2 * longest[bucket].sum() <= tokens.sum() + capacity or len(longest) < count:
            return longest, bucket
        count += 1


def even_parts(tokens: npt.ArrayLike, parts: int) -> Int64:
    """Offsets int64[parts + 1] of consecutive parts of tokens (int[n]) whose largest sum is least, early ones full."""
    tokens = np.ascontiguousarray(tokens, dtype=np.int64)
    if parts < 1:
        raise ValueError(f"even_parts makes at least one part; got parts={parts}.")
    return _even_parts(tokens, parts)


@njit(nogil=True, cache=True)
def _bucket_edges(lengths, number, count):
    n = len(lengths)
    items, total = np.zeros(n + 1, np.int64), np.zeros(n + 1, np.int64)
    for i in range(n):
        items[i + 1] = items[i] + number[i]
        total[i + 1] = total[i] + number[i] * lengths[i]
    begins = np.zeros((count + 1, n + 1), np.int64)
    waste = np.zeros(n + 1, np.int64)
    for j in range(1, n + 1):
        waste[j] = lengths[j - 1] * items[j] - total[j]
    for b in range(2, count + 1):
        # Downwards, so that waste[i] for i < j is still that of b - 1 buckets.
        for j in range(n, b - 1, -1):
            least = waste[j]
            for i in range(b - 1, j):
                added = waste[i] + lengths[j - 1] * (items[j] - items[i]) - (total[j] - total[i])
                if added <= least:
                    least, begins[b, j] = added, i
            waste[j] = least
    edges = np.empty(count + 1, np.int64)
    edges[count] = n
    for b in range(count, 0, -1):
        edges[b - 1] = begins[b, edges[b]]
    return edges


@njit(nogil=True, cache=True)
def _even_parts(tokens, parts):
    low, high = np.int64(0), np.int64(0)
    for t in tokens:
        low, high = max(low, t), high + t
    while low < high:
        middle = (low + high) // 2
        if _fill(tokens, parts, middle, np.empty(parts + 1, np.int64)):
            high = middle
        else:
            low = middle + 1
    offsets = np.empty(parts + 1, np.int64)
    _fill(tokens, parts, high, offsets)
    return offsets


@njit(nogil=True, cache=True)
def _fill(tokens, parts, most, offsets):
    """Fill parts up to `most` tokens in order; False if they do not hold all."""
    offsets[:] = len(tokens)
    offsets[0] = 0
    part, held = 0, np.int64(0)
    for i in range(len(tokens)):
        if held + tokens[i] > most:
            part, held = part + 1, np.int64(0)
            if part == parts:
                return False
            offsets[part] = i
        held += tokens[i]
    return True
