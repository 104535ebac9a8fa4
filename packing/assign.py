"""Assigning items to packs: the numba kernels that every packer and placement shares.

All of them see plain int64 arrays (tokens, cost), break ties by a stated rule, release the GIL and return either a bin
per item or CSR `(order, offsets)`: pack i holds items `order[offsets[i]:offsets[i + 1]]`.

- `best_fit_decreasing` (in `best_fit.py`): few packs of a fixed size.
- `next_fit`: documents in the order they come, a new pack when one does not fit.
- `lpt`: longest processing time first, under a hard cap on tokens and, if wanted, on items; within 4/3 of the best
  makespan without the caps.
- `split_largest`: more packs out of too few, for ranks that must all have one.
- `stripes`: like with like, for bins whose dearest item alone counts.
- `csr_from_bins`: from a bin per item to CSR.

`swaps.refine` improves on any of them by exchanges.

    >>> import numpy as np
    >>> order, offsets = best_fit_decreasing(np.array([3, 7, 5, 2]), 10)
    >>> [order[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:])]
    [[1, 0], [2, 3]]
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from .best_fit import best_fit_decreasing, fitting
from .packs import Int64

__all__ = ["best_fit_decreasing", "csr_from_bins", "lpt", "next_fit", "split_largest", "stripes"]

MAX_INT64 = np.iinfo(np.int64).max


def next_fit(tokens: npt.ArrayLike, capacity: int) -> Int64:
    """Fill packs with items in the order given (int[n], each 1 … capacity); returns offsets int64[packs + 1]."""
    return _next_fit(fitting(tokens, capacity), int(capacity))


def lpt(cost: npt.ArrayLike, tokens: npt.ArrayLike, num_bins: int, cap: int, max_items: int = 0) -> Int64:
    """Bin of each item, int64[n]; -1 where no bin had room.

    Items (cost int[n] >= 0, tokens int[n] >= 0) come by falling cost, equal ones by index; each goes to the bin of
    least cost (ties: the lower bin) whose tokens stay within `cap` and which holds fewer than `max_items` items (0: any
    number).
    """
    cost, tokens = same_length(cost, tokens)
    if num_bins < 1 or max_items < 0:
        raise ValueError(f"lpt needs num_bins >= 1 and max_items >= 0; got {num_bins} and {max_items}.")
    return _lpt(cost, tokens, np.argsort(-cost, kind="stable"), int(num_bins), int(cap), int(max_items) or MAX_INT64)


def split_largest(
    order: npt.ArrayLike, offsets: npt.ArrayLike, tokens: npt.ArrayLike, cost: npt.ArrayLike, num_packs: int
) -> tuple[Int64, Int64]:
    """Split packs until there are `num_packs`, or until every pack holds one item; returns (order, offsets).

    The costliest pack of two or more items (ties: the lower number) is halved by LPT, items of equal cost by place, equal
    loads by tokens; the half that got the costliest item keeps the number, the other is appended, and in both items
    stay in the order they had. order: int[m] items, offsets: int[p + 1]; tokens (>= 1), cost: int[n] by item.
    """
    cost, tokens = same_length(cost, tokens)
    if len(tokens) and tokens.min() < 1:
        raise ValueError("Packs that are to be split hold items of at least one token; drop empty items first.")
    order, offsets = np.array(order, dtype=np.int64), np.asarray(offsets, dtype=np.int64)
    if len(offsets) - 1 >= num_packs:
        return order, offsets
    return _split_largest(order, offsets, tokens, cost, int(num_packs))


def stripes(cost: npt.ArrayLike, width: int) -> Int64:
    """Stripe of each item (cost int[n]), int64[n]: the `width` dearest are stripe 0, the next stripe 1 …; ties by index.

    No other way to form groups of at most `width` has a smaller sum of the groups' maxima.
    """
    cost = np.asarray(cost, dtype=np.int64)
    if width < 1:
        raise ValueError(f"A stripe is at least one item wide; got width={width}.")
    stripe = np.empty(len(cost), np.int64)
    stripe[np.argsort(-cost, kind="stable")] = np.arange(len(cost)) // width
    return stripe


def csr_from_bins(bins: npt.ArrayLike, num_bins: int) -> tuple[Int64, Int64]:
    """(order, offsets int64[num_bins + 1]) from the bin of each item, int[n]; -1 leaves an item out.

    Within a bin items keep index order.
    """
    bins = np.asarray(bins, dtype=np.int64)
    if len(bins) and (bins.max() >= num_bins or bins.min() < -1):
        raise ValueError(f"Bins must be -1 … {num_bins - 1}; got {bins.min()} … {bins.max()}.")
    return _csr(bins, int(num_bins))


def same_length(cost: npt.ArrayLike, tokens: npt.ArrayLike) -> tuple[Int64, Int64]:
    """cost and tokens as int64[n]; refuses negative ones, and costs whose sum could overflow."""
    cost, tokens = np.ascontiguousarray(cost, dtype=np.int64), np.ascontiguousarray(tokens, dtype=np.int64)
    if cost.shape != tokens.shape or cost.ndim != 1:
        raise ValueError(f"Every item has a cost and tokens; got arrays of shape {cost.shape} and {tokens.shape}.")
    if len(cost) and (cost.min() < 0 or tokens.min() < 0 or cost.sum(dtype=np.float64) >= 2.0**62):
        raise ValueError(
            "Costs and tokens are >= 0 and all costs together stay below 2**62; "
            f"got costs {cost.min()} … {cost.max()}, tokens from {tokens.min()}. State costs in a larger unit."
        )
    return cost, tokens


@njit(nogil=True, cache=True)
def _next_fit(tokens, capacity):
    offsets = np.empty(len(tokens) + 1, np.int64)
    offsets[0] = 0
    packs = room = 0
    for i in range(len(tokens)):
        if tokens[i] > room:
            offsets[packs] = i
            packs += 1
            room = capacity
        room -= tokens[i]
    offsets[packs] = len(tokens)
    return offsets[: packs + 1].copy()


@njit(nogil=True, cache=True)
def _winners(keys):
    """A tournament over keys (int64[k]): the tree of winners, 1 the root; the least key wins, ties the lower index."""
    leaves = 1
    while leaves < len(keys):
        leaves *= 2
    tree = np.full(2 * leaves, -1, np.int64)
    for k in range(len(keys)):
        tree[leaves + k] = k
    for node in range(leaves - 1, 0, -1):
        left, right = tree[2 * node], tree[2 * node + 1]
        tree[node] = right if right >= 0 and keys[right] < keys[left] else left
    return tree


@njit(nogil=True, cache=True)
def _replay(tree, keys, k):
    """Restore the tournament after keys[k] changed: its winner meets the winner of the other side at every level."""
    node = len(tree) // 2 + k
    best, least = k, keys[k]
    while node > 1:
        other = tree[node ^ 1]
        if other >= 0:
            key = keys[other]
            wins = key < least or (key == least and other < best)
            best, least = (other, key) if wins else (best, least)
        node >>= 1
        tree[node] = best


@njit(nogil=True, cache=True)
def _lpt(cost, tokens, by_cost, num_bins, cap, max_items):
    n = len(cost)
    bins = np.full(n, -1, np.int64)
    room = np.full(num_bins, cap, np.int64)
    places = np.full(num_bins, max_items, np.int64)
    load = np.zeros(num_bins, np.int64)
    tree = _winners(load)
    # smallest[i]: the fewest tokens among items i …, below which a bin is closed for good.
    smallest = np.empty(n + 1, np.int64)
    smallest[n] = MAX_INT64
    for i in range(n - 1, -1, -1):
        smallest[i] = min(smallest[i + 1], tokens[by_cost[i]])
    for i in range(n):
        item = by_cost[i]
        best = int(tree[1])
        if tokens[item] > room[best] or places[best] == 0:
            best = _least_with_room(load, room, places, tokens[item])
        if best >= 0:
            bins[item] = best
            room[best] -= tokens[item]
            places[best] -= 1
            load[best] += cost[item]
            if room[best] < smallest[i + 1] or places[best] == 0:
                load[best] = MAX_INT64
            _replay(tree, load, best)
    return bins


@njit(nogil=True, cache=True)
def _least_with_room(load, room, places, tokens):
    best = -1
    for b in range(len(load)):
        if tokens <= room[b] and places[b] > 0 and (best < 0 or load[b] < load[best]):
            best = b
    return best


@njit(nogil=True, cache=True)
def _split_largest(order, offsets, tokens, cost, num_packs):
    packs = len(offsets) - 1
    start, stop = np.empty(num_packs, np.int64), np.empty(num_packs, np.int64)
    start[:packs], stop[:packs] = offsets[:-1], offsets[1:]
    load = np.full(num_packs, -1, np.int64)
    for p in range(packs):
        load[p] = _weight(order[start[p] : stop[p]], cost)
    while packs < num_packs:
        p = int(np.argmax(load))
        if load[p] < 0:
            break
        middle = start[p] + _halve(order[start[p] : stop[p]], tokens, cost)
        start[packs], stop[packs], stop[p] = middle, stop[p], middle
        load[p] = _weight(order[start[p] : stop[p]], cost)
        load[packs] = _weight(order[start[packs] : stop[packs]], cost)
        packs += 1
    result = np.empty_like(order)
    bounds = np.zeros(packs + 1, np.int64)
    for p in range(packs):
        bounds[p + 1] = bounds[p] + stop[p] - start[p]
        result[bounds[p] : bounds[p + 1]] = order[start[p] : stop[p]]
    return result, bounds


@njit(nogil=True, cache=True)
def _weight(items, cost):
    """Cost of a pack that can be split, -1 for one that cannot."""
    if len(items) < 2:
        return np.int64(-1)
    total = np.int64(0)
    for item in items:
        total += cost[item]
    return total


@njit(nogil=True, cache=True)
def _halve(items, tokens, cost):
    """Reorder items in place into two halves of like cost, each in the order it had; returns the size of the first."""
    second = np.empty(len(items), np.bool_)
    load = np.zeros(2, np.int64)
    size = np.zeros(2, np.int64)
    for i in np.argsort(-cost[items], kind="mergesort"):
        # Equal loads go by tokens, or items that cost nothing would leave the second half empty.
        side = 1 if load[1] < load[0] or (load[1] == load[0] and size[1] < size[0]) else 0
        second[i] = side == 1
        load[side] += cost[items[i]]
        size[side] += tokens[items[i]]
    items[:] = np.concatenate((items[~second], items[second]))
    return len(items) - second.sum()


@njit(nogil=True, cache=True)
def _csr(bins, num_bins):
    offsets = np.zeros(num_bins + 1, np.int64)
    for b in bins:
        if b >= 0:
            offsets[b + 1] += 1
    offsets = np.cumsum(offsets)
    at = offsets[:-1].copy()
    order = np.empty(offsets[-1], np.int64)
    for i in range(len(bins)):
        if bins[i] >= 0:
            order[at[bins[i]]] = i
            at[bins[i]] += 1
    return order, offsets
