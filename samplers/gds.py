"""GDS, global data scheduling (Skrull, arXiv:2505.19609, section 4.3): documents to replicas, then to micro-batches.

Two decisions at once, since Skrull repacks: which replica a document belongs to, by bin packing of FLOPs (LPT and
exchanges over the step), and which of the replica's micro-batches, so that long and short ones interleave: each micro-batch
gets its share of long documents, and short ones beside them for DACP (`packing/dacp.py`) to hide their communication
behind. Documents are dealt by falling cost to the micro-batch of fewest tokens: long ones spread first, short ones fill up,
and all have like room. Dealt in turn, as published, or by least work, steps take up to a tenth longer under DACP: where
micro-batches differ in length the fullest has to cut everything, and a giant without company waits for its keys.

All replicas get the same number of micro-batches, as few as keep their mean fill at ``fill`` (DACP needs room: in a group
whose ranks are full every document has to be cut). The costliest of each replica share a slot, the second costliest the
next …, as sorted stripes do, so that little is lost where ranks wait for each other at every micro-batch; the slots
are then shuffled. Where the two levels do not fit (documents near the cap), the step is packed first and dealt out after.

Cost: O(n log n + n·slots), 0.2 ms for 512 documents on 8 replicas.

    >>> import numpy as np
    >>> tokens = np.array([80, 70, 20, 20, 10, 10])
    >>> order, offsets, slot, replica = gds(tokens, tokens**2, dp=2, capacity=100, slots=2)
    >>> [tokens[order[a:b]].tolist() for a, b in zip(offsets[:-1], offsets[1:])], replica
    ([[80], [10], [70], [20, 20, 10]], array([0, 0, 1, 1]))
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ..packing.assign import csr_from_bins, lpt, same_length, split_largest
from ..packing.swaps import refine
from ..packing.wlb import bins_with_room
from .order import permute
from .vrsp import vrsp

EVENER = 6  # steps from replicas that may be full to replicas of equal tokens


def gds(
    tokens: np.ndarray,
    cost: np.ndarray,
    *,
    dp: int,
    capacity: int,
    slots: int | None = None,
    fill: float = 0.8,
    key: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(order, offsets int64[p + 1], slot int64[p], replica int64[p]) of the p = dp x slots micro-batches of a step.

    tokens (1 … capacity), cost: int64[n]. slots: micro-batches per replica; None: as few as hold the documents and fill
    no more than ``fill`` of the capacity on the mean. None is empty where there are p documents. ``key`` shuffles the
    slots. Raises ValueError where fixed slots cannot hold the step.
    """
    cost, tokens = same_length(cost, tokens)
    if len(tokens) and not 1 <= tokens.min() <= tokens.max() <= capacity:
        raise ValueError(
            f"micro-batches of {capacity} tokens hold documents of 1 … {capacity}; got {tokens.min()} … {tokens.max()}: "
            "drop empty ones, split or truncate long ones, or raise the cap"
        )
    if dp < 1 or (slots is not None and slots < 1) or not 0 < fill <= 1:
        raise ValueError(f"gds needs dp >= 1, slots >= 1 and fill in (0, 1]; got {dp}, {slots} and {fill}")
    count = slots or max(1, -(-int(tokens.sum()) // max(int(fill * dp * capacity), 1)))
    while True:
        packs = _two_levels(tokens, cost, dp, count, capacity)
        if packs is None:
            packs = _packed_first(tokens, cost, dp, count, capacity)
        if packs is not None:
            return *csr_from_bins(packs, dp * count), *_places(packs, cost, dp, count, key)
        if slots is not None:
            raise ValueError(
                f"slots={slots} on {dp} replicas make {slots * dp} micro-batches of at most {capacity} tokens, which do "
                f"not hold {len(tokens)} documents of {int(tokens.sum())} tokens: raise slots or the cap"
            )
        count += 1


def _two_levels(tokens: np.ndarray, cost: np.ndarray, dp: int, slots: int, capacity: int) -> np.ndarray | None:
    """Micro-batch (replica x slots + nth) of each document, int64[n]; None where some document finds no room.

    A replica filled to the brim can rarely be cut into micro-batches: tokens are then spread more evenly, in steps.
    """
    falling = np.argsort(-cost, kind="stable")
    full, even = slots * capacity, -(-int(tokens.sum()) // dp)
    for part in range(EVENER):
        cap = full - (full - even) * part // EVENER
        replica = lpt(cost, tokens, dp, cap)
        if len(replica) and replica.min() < 0:
            return None
        replica = refine(cost, tokens, replica, dp, cap)
        if len(tokens) >= dp * slots:
            _feed(replica, falling, dp, slots)
        packs = _deal(tokens, cost, falling, replica, dp, slots, capacity)
        if not len(packs) or packs.min() >= 0:
            return packs
    return None


def _packed_first(tokens: np.ndarray, cost: np.ndarray, dp: int, slots: int, capacity: int) -> np.ndarray | None:
    """The same by packing the whole step, then dealing out the packs."""
    bins = bins_with_room(tokens, cost, dp * slots, capacity)
    if bins.min() < 0:
        return None
    order, offsets = csr_from_bins(refine(cost, tokens, bins, dp * slots, capacity), dp * slots)
    order, offsets = split_largest(order, np.unique(offsets), tokens, cost, dp * slots)
    pack = np.empty(len(tokens), np.int64)
    pack[order] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    slot, replica = vrsp(_sums(pack, cost, dp * slots), dp=dp, sync="step", key=0)
    return (replica * slots + slot)[pack]


def _places(packs: np.ndarray, cost: np.ndarray, dp: int, slots: int, key: int) -> tuple[np.ndarray, np.ndarray]:
    """(slot, replica) of each micro-batch: a replica's costliest in one slot with those of the others, and so on."""
    falling = np.argsort(-_sums(packs, cost, dp * slots).reshape(dp, slots), axis=1, kind="stable")
    slot = np.empty((dp, slots), np.int64)
    np.put_along_axis(slot, falling, np.tile(permute(0, slots, slots, key), (dp, 1)), axis=1)
    return slot.ravel(), np.repeat(np.arange(dp), slots)


def _sums(bins: np.ndarray, cost: np.ndarray, num_bins: int) -> np.ndarray:
    sums = np.zeros(num_bins, np.int64)
    np.add.at(sums, bins, cost)
    return sums


@njit(nogil=True, cache=True)
def _feed(replica, falling, dp, slots):
    """Give replicas of fewer documents than slots the cheapest of those that have more than they need, in place."""
    count = np.zeros(dp, np.int64)
    for r in replica:
        count[r] += 1
    hungry = 0
    for i in falling[::-1]:
        while hungry < dp and count[hungry] >= slots:
            hungry += 1
        if hungry == dp:
            break
        giver = replica[i]
        if count[giver] > slots:
            count[giver] -= 1
            count[hungry] += 1
            replica[i] = hungry


@njit(nogil=True, cache=True)
def _deal(tokens, cost, falling, replica, dp, slots, capacity):
    """Each document, costliest first, to the micro-batch of fewest tokens (then least work) of its replica, if it has room."""
    work, held = np.zeros(dp * slots, np.int64), np.zeros(dp * slots, np.int64)
    packs = np.full(len(tokens), -1, np.int64)
    for i in falling:
        best = -1
        for p in range(replica[i] * slots, (replica[i] + 1) * slots):
            if held[p] + tokens[i] <= capacity:
                if best < 0 or held[p] < held[best] or (held[p] == held[best] and work[p] < work[best]):
                    best = p
        if best < 0:
            return packs
        packs[i] = best
        work[best] += cost[i]
        held[best] += tokens[i]
    return packs
