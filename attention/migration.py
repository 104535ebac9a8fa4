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

So that planning takes no longer the more ranks there are, what is known is not asked again: the best run from a donor to a taker
is found once, and anew only when either took part in a move; takers that have nothing of a pack's keys are alike but for their
room, so that only the one with most is tried. Keys are counted in pieces, at most `PIECES` to each stretch that a rank holds, to
which a run may be charged a little less than it moves.

Where no run fits under the cap, single blocks move as long as that lowers the load of the rank they leave below what it was and
leaves the one they go to below that: what then remains above the cap cannot be divided further with blocks of this size.

Cost: per move about as many runs as there are donors, each of its blocks x pieces they need; see `benchmarks/tiles.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from ..packing.mask_areas import KeyRanges
from .bands import Int64

PIECES, ALL_PIECES = 16, 4096
"""Of the keys in a stretch of neighbouring blocks of one rank, and of all stretches together if they are no more, at most."""
MOST = 16384
"""Blocks that may move: where there are more, those with the most pairs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """The positions of a pool, cut into c blocks."""

    size: Int64
    """int64[c], queries of each."""
    home: Int64
    """int64[c], the rank that holds each block."""
    pairs: Int64
    """int64[c], of the block's queries."""
    linked: np.ndarray
    """bool[c], whether each block needs half or more of the keys of the one before it, at the same home: of one document, or nearly."""
    offsets: Int64
    """int64[c + 1], CSR: block → pieces whose keys it needs."""
    needed: Int64
    """int64[n]."""
    rows: Int64
    """int64[n], how many keys of the needed piece."""
    holder: Int64
    """int64[pieces], the rank that holds each."""

    @staticmethod
    def of(edges: Int64, home: Int64, pairs: Int64, keys: KeyRanges) -> Blocks:
        """edges: int64[c + 1], rising from 0; keys: those that each block needs."""
        begins = _pieces(home)
        cuts = np.append(edges[begins], edges[-1])
        first = np.searchsorted(cuts, keys.ranges[:, 0], side="right") - 1
        count = np.searchsorted(cuts, keys.ranges[:, 1], side="left") - first
        needed = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
        start = np.maximum(np.repeat(keys.ranges[:, 0], count), cuts[needed])
        stop = np.minimum(np.repeat(keys.ranges[:, 1], count), cuts[needed + 1])
        return Blocks(
            size=np.diff(edges),
            home=home,
            pairs=pairs,
            linked=_linked(edges, home, keys),
            offsets=np.concatenate([[0], np.cumsum(count)])[keys.offsets],
            needed=needed,
            rows=stop - start,
            holder=home[begins],
        )

    def largest(self, most: int) -> tuple[Int64, Blocks]:
        """Which blocks have the most pairs, and these by themselves, with the pieces that they need; all where they are no more."""
        kept = np.sort(np.argsort(-self.pairs, kind="stable")[:most])
        if len(kept) == len(self.pairs):
            return kept, self
        count = np.diff(self.offsets)[kept]
        offsets = np.concatenate([[0], np.cumsum(count)])
        entries = np.arange(offsets[-1]) + np.repeat(self.offsets[kept] - offsets[:-1], count)
        pieces, needed = np.unique(self.needed[entries], return_inverse=True)
        blocks = Blocks(
            size=self.size[kept],
            home=self.home[kept],
            pairs=self.pairs[kept],
            linked=self.linked[kept] & (np.diff(kept, prepend=-2) == 1),
            offsets=offsets,
            needed=needed,
            rows=self.rows[entries],
            holder=self.holder[pieces],
        )
        return kept, blocks


def _pieces(home: Int64) -> Int64:
    """The first block of each piece."""
    begins = np.flatnonzero(np.diff(home, prepend=-1))
    blocks = np.diff(np.append(begins, len(home)))
    each = max(1, min(PIECES, ALL_PIECES // max(len(begins), 1)))
    together = np.repeat(-(-blocks // each), blocks)
    return np.flatnonzero((np.arange(len(home)) - np.repeat(begins, blocks)) % together == 0)


def _linked(edges: Int64, home: Int64, keys: KeyRanges) -> np.ndarray:
    block = np.repeat(np.arange(len(home)), np.diff(keys.offsets))
    before = np.maximum(block - 1, 0)
    met = np.minimum(keys.ranges[:, 1], edges[block]) - np.maximum(keys.ranges[:, 0], edges[before])
    rows = np.bincount(block, np.maximum(met, 0), len(home))
    return np.append(False, (2 * rows[1:] >= np.diff(edges)[:-1]) & (home[1:] == home[:-1]))[: len(home)]


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
    kept, blocks = blocks.largest(MOST)
    home, pairs, size = blocks.home, blocks.pairs, blocks.size
    moved = np.ascontiguousarray(owner[:, kept])
    needs = (blocks.holder, blocks.offsets, blocks.needed, blocks.rows)
    uses = np.zeros((ranks, head_groups, len(blocks.holder)), np.int32)
    least = _least_costs(home, pairs, size, *needs, kv_cost, q_cost)
    order = np.lexsort((least, home))
    begin = np.searchsorted(home[order], np.arange(ranks + 1))
    _count_uses(home, blocks.offsets, blocks.needed, uses)
    family = _families(home, *needs[:3], ranks)
    _migrate(home, pairs, size, *needs, blocks.linked, least, order, begin, family, moved, load, uses, cap,
        kv_cost, q_cost, heads_first)  # fmt: skip
    _settle(pairs, order, begin, moved, load, cap)
    owner[:, kept] = moved
    return owner


@njit(nogil=True, cache=True)
def _least_costs(home, pairs, size, holder, offsets, needed, rows, kv_cost, q_cost):
    """About the least that a pair of a run costs which ends in each block: its queries, less the keys that its home is spared."""
    costs = np.full(len(home), np.inf)
    for b in range(len(home)):
        spared = 0
        for i in range(offsets[b], offsets[b + 1]):
            if holder[needed[i]] != home[b]:
                spared += rows[i]
        if pairs[b] > 0:
            costs[b] = (q_cost * size[b] - kv_cost * spared) / pairs[b]
    return costs


@njit(nogil=True, cache=True)
def _count_uses(home, offsets, needed, uses):
    """int32[ranks, groups, pieces]: how many blocks computed on a rank need a piece's keys."""
    for b in range(len(home)):
        for i in range(offsets[b], offsets[b + 1]):
            for g in range(uses.shape[1]):
                uses[home[b], g, needed[i]] += 1


@njit(nogil=True, cache=True)
def _families(home, holder, offsets, needed, ranks):
    """The lowest rank of those that need each other's keys, of each rank."""
    family = np.arange(ranks)
    for b in range(len(home)):
        for i in range(offsets[b], offsets[b + 1]):
            a, c = home[b], holder[needed[i]]
            while family[a] != a:
                a = family[a]
            while family[c] != c:
                c = family[c]
            family[max(a, c)] = min(a, c)
    for r in range(ranks):
        family[r] = family[family[r]]
    return family


@njit(nogil=True, cache=True)
def _shift(b, donor, taker, holder, offsets, needed, rows, ends):
    """Block b goes from a donor to a taker, whose uses of a head group (int32[pieces]) are given and whose ranks are `ends`:
    by how many more KV rows must travel then."""
    more = 0
    for i in range(offsets[b], offsets[b + 1]):
        k = needed[i]
        if donor[k] == 1 and holder[k] != ends[0]:
            more -= rows[i]
        if taker[k] == 0 and holder[k] != ends[1]:
            more += rows[i]
        donor[k] -= 1
        taker[k] += 1
    return more


@njit(nogil=True, cache=True)
def _run(
    last, g, d, r, room, wanted, pairs, size, holder, offsets, needed, rows, linked, owner, uses, costs, heads_first
):
    """(first block of the best run that ends in `last`, cost per pair), of group g from rank d to rank r; `uses` is left as it was."""
    kv_cost, q_cost = costs
    ends = (d, r)
    donor, taker = uses[d, g], uses[r, g]
    moved = kv = q = 0
    b, best, least = last, last, np.inf
    while True:
        moved += pairs[b]
        kv += _shift(b, donor, taker, holder, offsets, needed, rows, ends)
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
        _shift(x, taker, donor, holder, offsets, needed, rows, (r, d))
    return best, least


@njit(nogil=True, cache=True)
def _best_run(
    d, r, room, wanted, pairs, size, holder, offsets, needed, rows, linked, least_costs, order, left, touched, owner,
    uses, costs, heads_first,
):  # fmt: skip
    """(cost per pair, head group, first block, last block) of the cheapest run from d to r; a cost of inf: there is none.

    order: d's blocks, by what a pair costs at least.
    """
    blocks, groups = len(pairs), len(owner)
    least, found = np.inf, (0, 0, 0)
    for last in order:
        if least_costs[last] >= least:
            break
        if left[last] == 0 or pairs[last] > room:
            continue
        after = last + 1
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
                last, g, d, r, room, wanted, pairs, size, holder, offsets, needed, rows, linked, owner, uses, costs,
                heads_first,
            )  # fmt: skip
            if cost < least:
                least, found = cost, (g, first, last)
    return least, found[0], found[1], found[2]


@njit(nogil=True, cache=True)
def _migrate(
    home, pairs, size, holder, offsets, needed, rows, linked, least_costs, order, begin, family, owner, load, uses,
    cap, kv_cost, q_cost, heads_first,
):  # fmt: skip
    """Runs of blocks, the cheapest a pair first, until no rank is above the cap or nothing fits under it."""
    ranks, groups, costs = len(load), len(owner), (kv_cost, q_cost)
    left = np.full(len(home), groups)
    touched = np.zeros((ranks, groups), np.bool_)
    known = np.full((ranks, ranks), np.nan)  # the least cost from a donor to a taker; nan: to be found
    runs = np.zeros((ranks, ranks, 3), np.int64)
    has = np.zeros((ranks, ranks), np.bool_)  # whether a taker has keys of a donor's family
    for d in range(ranks):
        has[d, family[d]] = True
    while load.max() > cap:
        found, least = (-1, 0), np.inf
        for d in range(ranks):
            if load[d] <= cap:
                continue
            mine, stranger = order[begin[d] : begin[d + 1]], -1
            for r in range(ranks):
                if not has[r, family[d]] and (stranger < 0 or load[r] < load[stranger]):
                    stranger = r
            for r in range(ranks):
                if load[r] >= cap or not (r == stranger or has[r, family[d]]):
                    continue
                if np.isnan(known[d, r]):
                    known[d, r], runs[d, r, 0], runs[d, r, 1], runs[d, r, 2] = _best_run(
                        d, r, cap - load[r], load[d] - cap, pairs, size, holder, offsets, needed, rows, linked,
                        least_costs, mine, left, touched, owner, uses, costs, heads_first,
                    )  # fmt: skip
                if known[d, r] < least:
                    found, least = (d, r), known[d, r]
        d, r = found
        if d < 0:
            return
        g, first, last = runs[d, r]
        touched[d, g] = touched[r, g] = has[r, family[d]] = True
        known[d, :] = known[:, r] = np.nan
        for b in range(first, last + 1):
            _shift(b, uses[d, g], uses[r, g], holder, offsets, needed, rows, (d, r))
            owner[g, b] = r
            left[b] -= 1
            load[d] -= pairs[b]
            load[r] += pairs[b]


@njit(nogil=True, cache=True)
def _settle(pairs, order, begin, owner, load, cap):
    """Single blocks from ranks above the cap to the one with the least load, while the larger of the two loads falls."""
    while True:
        improved = False
        for d in np.argsort(-load, kind="mergesort"):
            r = np.argmin(load)
            if load[d] <= cap:
                break
            best, least = (-1, -1), load[d]
            for b in order[begin[d] : begin[d + 1]]:
                larger = max(load[d] - pairs[b], load[r] + pairs[b])
                if larger >= least:
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
