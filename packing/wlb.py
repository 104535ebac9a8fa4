"""WLB-LLM (OSDI'25), Algorithm 1: packs of variable length and like workload.

Decides which documents of a step share a micro-batch: `wlb` as the paper does, `wlb_balanced` by LPT and exchanges, which
stays close to the bound (max of mean and costliest document) where the paper's greedy rule need not. In both a pack of
many short documents may grow longer (up to `capacity`) than one that holds a long document, and costs the same. Which
documents enter a step, and which wait, is decided before, in `queues.py`.

The paper's rule costs n·packs comparisons: 512 documents into 16 packs take tens of microseconds, the other twice that.

    >>> import numpy as np
    >>> tokens = np.array([8, 4, 4, 2, 2])
    >>> order, offsets, left = wlb(tokens, tokens**2, num_packs=2, capacity=12)
    >>> [order[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:])], left
    ([[0], [1, 2, 3, 4]], array([], dtype=int64))
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from .assign import best_fit_decreasing, csr_from_bins, lpt, same_length, split_largest
from .packs import Int64
from .swaps import refine


def wlb(tokens: npt.ArrayLike, cost: npt.ArrayLike, num_packs: int, capacity: int) -> tuple[Int64, Int64, Int64]:
    """Pack n documents into `num_packs`; returns (order, offsets int64[num_packs + 1], left int64[l]).

    Documents come by falling length; each goes to the pack of least workload if its tokens fit there, else to the
    shortest pack if they fit there, else it is left over. Where the paper demands length + d < S_max, a pack here may
    be filled to the brim. tokens, cost: int[n], >= 0. Equal lengths go by index, equal packs by number. Within a pack
    documents keep index order. `left` are the documents that fitted nowhere, by index. A pack may stay empty where
    documents are few.
    """
    cost, tokens = same_length(cost, tokens)
    if num_packs < 1:
        raise ValueError(f"wlb needs at least one pack; got num_packs={num_packs}.")
    bins = _wlb(tokens, cost, np.argsort(-tokens, kind="stable"), int(num_packs), int(capacity))
    order, offsets = csr_from_bins(bins, num_packs)
    return order, offsets, np.flatnonzero(bins < 0)


def wlb_balanced(
    tokens: npt.ArrayLike, cost: npt.ArrayLike, num_packs: int, capacity: int
) -> tuple[Int64, Int64, Int64]:
    """The same by LPT and exchanges: arguments and result as in `wlb`.

    Nothing is left over where LPT or best-fit-decreasing finds room for all.
    """
    cost, tokens = same_length(cost, tokens)
    bins = bins_with_room(tokens, cost, num_packs, capacity)
    order, offsets = csr_from_bins(refine(cost, tokens, bins, num_packs, capacity), num_packs)
    return order, offsets, np.flatnonzero(bins < 0)


def bins_with_room(tokens: Int64, cost: Int64, num_packs: int, capacity: int) -> Int64:
    """A pack for each of n documents, int64[n], by LPT; by best fit where that leaves none over and LPT would; else -1s."""
    bins = lpt(cost, tokens, num_packs, capacity)
    if not len(bins) or bins.min() >= 0 or tokens.max() > capacity or tokens.min() < 1:
        return bins
    order, offsets = best_fit_decreasing(tokens, capacity)
    if len(offsets) - 1 > num_packs:
        return bins
    order, offsets = split_largest(order, offsets, tokens, cost, num_packs)
    bins[order] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return bins


@njit(nogil=True, cache=True)
def _wlb(tokens, cost, by_length, num_packs, capacity):
    bins = np.full(len(tokens), -1, np.int64)
    work = np.zeros(num_packs, np.int64)
    length = np.zeros(num_packs, np.int64)
    for d in by_length:
        pack = np.argmin(work)
        if length[pack] + tokens[d] > capacity:
            pack = np.argmin(length)
        if length[pack] + tokens[d] <= capacity:
            bins[d] = pack
            work[pack] += cost[d]
            length[pack] += tokens[d]
    return bins
