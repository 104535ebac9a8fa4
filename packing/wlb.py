"""WLB-LLM (OSDI'25), Algorithm 1 without its outlier queues: packs of variable length and like workload.

Decides which documents of a window share a micro-batch: documents come by falling length; each goes to the pack of
least workload if its tokens fit under the cap, else to the shortest pack if they fit there, else it is left over. A
pack of many short documents may so grow longer (up to `capacity`) than one that holds a long document, and costs the
same. It costs n·packs comparisons: 512 documents into 16 packs take tens of microseconds.

Where the paper demands length + d < S_max, a pack here may be filled to the brim.

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

from .assign import csr_from_bins, same_length
from .packs import Int64


def wlb(tokens: npt.ArrayLike, cost: npt.ArrayLike, num_packs: int, capacity: int) -> tuple[Int64, Int64, Int64]:
    """Pack n documents into `num_packs`; returns (order, offsets int64[num_packs + 1], left int64[l]).

    tokens, cost: int[n], >= 0. Equal lengths go by index, equal packs by number. Within a pack documents keep index
    order. `left` are the documents that fitted nowhere, by index. A pack may stay empty where documents are few.
    """
    cost, tokens = same_length(cost, tokens)
    if num_packs < 1:
        raise ValueError(f"wlb needs at least one pack; got num_packs={num_packs}.")
    bins = _wlb(tokens, cost, np.argsort(-tokens, kind="stable"), int(num_packs), int(capacity))
    order, offsets = csr_from_bins(bins, num_packs)
    return order, offsets, np.flatnonzero(bins < 0)


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
