"""Who computes which blocks of a pool: surplus moves, block by block, from ranks with too much attention to those with too little.

What Libra's TAP decides (arXiv:2607.23250; its pseudo-code is not published, so the greedy is that of DistCA, arXiv:2510.18121:
the recipient with the largest deficit takes, from whichever donor, the item that costs the fewest bytes a pair). A *block* is up
to `size` neighbouring queries of one rank in one head group, with all keys they attend to: O is final where it was computed, and
nothing needs to be merged. Decided here:

- a rank gives only while it is above `cap`, and none takes beyond it, so what is balanced does not move;
- what moves at once is a *run* of blocks of one head group, from the last that is left towards the first, as long as each
  needs the keys of the one before it: late queries of a document have the most pairs a row, and all of a run share their keys;
- a run ends where a pair costs least, so that the late queries of a document may move in several head groups before its early
  ones do in any; with `heads_first` it is as long as the donor's surplus and the recipient's room allow, so that whole head groups
  of a document move before its queries are cut, as Libra has it: up to twice the bytes of queries, for about the same of keys;
- the cost of a run is that of its queries (Q out, O and dQ back) and of the keys that the recipient has neither at home nor for
  blocks it computes already, less those that the donor then need not receive.

Where no run fits under the cap, single blocks move as long as that lowers the load of the rank they leave below what it was and
leaves the one they go to below that: what then remains above the cap cannot be divided further with blocks of this size.

Cost: runs tried x blocks they need; 8 packs of 256K causal tokens, 8 head groups, blocks of 2048: see `benchmarks/tiles.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from ..packing.mask_areas import KeyRanges
from .bands import Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """The positions of a pool, cut."""

    edges: Int64
    """int64[c + 1], rising from 0."""
    home: Int64
    """int64[c], the rank that holds each block."""
    pairs: Int64
    """int64[c], of the block's queries."""
    offsets: Int64
    """int64[c + 1], CSR: block → blocks whose keys it needs."""
    needed: Int64
    """int64[n]."""
    rows: Int64
    """int64[n], how many keys of the needed block."""

    @staticmethod
    def of(edges: Int64, home: Int64, pairs: Int64, keys: KeyRanges) -> Blocks:
        """keys: those that each block needs."""
        first = np.searchsorted(edges, keys.ranges[:, 0], side="right") - 1
        count = np.searchsorted(edges, keys.ranges[:, 1], side="left") - first
        begin = np.cumsum(count) - count
        needed = np.arange(count.sum()) + np.repeat(first - begin, count)
        start = np.maximum(np.repeat(keys.ranges[:, 0], count), edges[needed])
        stop = np.minimum(np.repeat(keys.ranges[:, 1], count), edges[needed + 1])
        offsets = np.concatenate([[0], np.cumsum(count)])[keys.offsets]
        return Blocks(edges=edges, home=home, pairs=pairs, offsets=offsets, needed=needed, rows=stop - start)


def placed(
    blocks: Blocks, ranks: int, head_groups: int, cap: int, *, kv_cost: int, q_cost: int, heads_first: bool
) -> Int64:
    """The rank that computes each block of each head group, int64[head_groups, c].

    cap: pairs, of all head groups, that no rank should exceed. kv_cost, q_cost: what it takes to move a row of keys and values, or
    of queries, and to bring back what comes of it; in any unit.
    """
    owner = np.tile(blocks.home, (head_groups, 1))
    load = np.zeros(ranks, np.int64)
    np.add.at(load, blocks.home, blocks.pairs * head_groups)
    if load.max(initial=0) <= cap:
        return owner
    size = np.diff(blocks.edges)
    uses = np.zeros((ranks, head_groups, len(blocks.home)), np.int64)
    needs = (blocks.offsets, blocks.needed, blocks.rows)
    linked = _linked(blocks.home, size, *needs)
    least = _least_costs(blocks.home, blocks.pairs, size, *needs, kv_cost, q_cost)
    order = np.argsort(least, kind="stable")
    _count_uses(blocks.home, blocks.offsets, blocks.needed, uses)
    _migrate(blocks.home, blocks.pairs, size, *needs, linked, least, order, owner, load, uses, cap,
        kv_cost, q_cost, heads_first)  # fmt: skip
    _settle(blocks.home, blocks.pairs, owner, load, cap)
    return owner


@njit(nogil=True, cache=True)
def _linked(home, size, offsets, needed, rows):
    """Whether each block needs half or more of the keys of the one before it, at the same home: of one document, or nearly."""
    linked = np.zeros(len(home), np.bool_)
    for b in range(1, len(home)):
        for i in range(offsets[b], offsets[b + 1]):
            if needed[i] == b - 1 and 2 * rows[i] >= size[b - 1]:
                linked[b] = home[b - 1] == home[b]
    return linked


@njit(nogil=True, cache=True)
def _least_costs(home, pairs, size, offsets, needed, rows, kv_cost, q_cost):
    """About the least that a pair of a run costs which ends in each block: its queries, less the keys that its home is spared."""
    costs = np.full(len(home), np.inf)
    for b in range(len(home)):
        spared = 0
        for i in range(offsets[b], offsets[b + 1]):
            if home[needed[i]] != home[b]:
                spared += rows[i]
        if pairs[b] > 0:
            costs[b] = (q_cost * size[b] - kv_cost * spared) / pairs[b]
    return costs


@njit(nogil=True, cache=True)
def _count_uses(home, offsets, needed, uses):
    """int64[ranks, groups, blocks]: how many blocks computed on a rank need a block's keys."""
    for b in range(len(home)):
        for i in range(offsets[b], offsets[b + 1]):
            for g in range(uses.shape[1]):
                uses[home[b], g, needed[i]] += 1


@njit(nogil=True, cache=True)
def _shift(b, donor, taker, home, offsets, needed, rows, ends):
    """Block b goes from a donor to a taker, whose uses of a head group (int64[blocks]) are given and whose ranks are `ends`:
    by how many more KV rows must travel then."""
    more = 0
    for i in range(offsets[b], offsets[b + 1]):
        k = needed[i]
        if donor[k] == 1 and home[k] != ends[0]:
            more -= rows[i]
        if taker[k] == 0 and home[k] != ends[1]:
            more += rows[i]
        donor[k] -= 1
        taker[k] += 1
    return more


@njit(nogil=True, cache=True)
def _run(
    last, g, d, r, room, wanted, home, pairs, size, offsets, needed, rows, linked, owner, uses, costs, heads_first
):
    """(first block of the best run that ends in `last`, cost per pair), of group g from rank d to rank r; `uses` is left as it was."""
    kv_cost, q_cost = costs
    ends = (d, r)
    donor, taker = uses[d, g], uses[r, g]
    moved = kv = q = 0
    b, best, least = last, last, np.inf
    while True:
        moved += pairs[b]
        kv += _shift(b, donor, taker, home, offsets, needed, rows, ends)
        q += size[b]
        cost = (kv * kv_cost + q * q_cost) / moved
        if heads_first or cost <= least:
            best, least = b, cost
        if moved >= wanted or not linked[b] or owner[g, b - 1] != d or pairs[b - 1] == 0 or moved + pairs[b - 1] > room:
            break
        if not heads_first and cost > 2 * least:
            break
        b -= 1
    for x in range(b, last + 1):
        _shift(x, taker, donor, home, offsets, needed, rows, (r, d))
    return best, least


@njit(nogil=True, cache=True)
def _migrate(
    home, pairs, size, offsets, needed, rows, linked, least_costs, order, owner, load, uses, cap, kv_cost, q_cost,
    heads_first,
):  # fmt: skip
    """Runs of blocks, the cheapest a pair first, until no rank is above the cap or nothing fits under it."""
    blocks, groups, costs = len(home), len(owner), (kv_cost, q_cost)
    left = np.full(blocks, groups)
    touched = np.zeros((len(load), groups), np.bool_)
    while load.max() > cap:
        found, least = (-1, 0, 0, 0, 0), np.inf
        for last in order:
            if least_costs[last] >= least:
                break
            d, after = home[last], last + 1
            if load[d] <= cap or left[last] == 0:
                continue
            for r in range(len(load)):
                room = cap - load[r]
                if pairs[last] > room:
                    continue
                fits = after < blocks and linked[after] and pairs[last] <= pairs[after] <= room
                fresh = False
                for g in range(groups):
                    # A run that ends later has all of this one; groups that neither rank has a part in moving are alike.
                    if owner[g, last] != d or (fits and owner[g, after] == d):
                        continue
                    if not touched[d, g] and not touched[r, g]:
                        if fresh:
                            continue
                        fresh = True
                    first, cost = _run(
                        last, g, d, r, room, load[d] - cap, home, pairs, size, offsets, needed, rows, linked, owner,
                        uses, costs, heads_first,
                    )  # fmt: skip
                    if cost < least:
                        found, least = (d, r, g, first, last), cost
        d, r, g, first, last = found
        if d < 0:
            return
        touched[d, g] = touched[r, g] = True
        for b in range(first, last + 1):
            _shift(b, uses[d, g], uses[r, g], home, offsets, needed, rows, (d, r))
            owner[g, b] = r
            left[b] -= 1
            load[d] -= pairs[b]
            load[r] += pairs[b]


@njit(nogil=True, cache=True)
def _settle(home, pairs, owner, load, cap):
    """Single blocks from ranks above the cap to the one with the least load, while the larger of the two loads falls."""
    while True:
        improved = False
        for d in np.argsort(-load, kind="mergesort"):
            r = np.argmin(load)
            if load[d] <= cap:
                continue
            best, least = (-1, -1), load[d]
            for b in range(len(home)):
                larger = max(load[d] - pairs[b], load[r] + pairs[b])
                if home[b] != d or larger >= least:
                    continue
                for g in range(len(owner)):
                    if owner[g, b] == d:
                        best, least = (g, b), larger
                        break
            g, b = best
            if g >= 0:
                owner[g, b] = r
                load[d] -= pairs[b]
                load[r] += pairs[b]
                improved = True
                break
        if not improved:
            return
