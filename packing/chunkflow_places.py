"""Placing ChunkFlow's chunks: which replica runs which group, in which micro-batches.

Decides a replica and a slot for every chunk. The chunks of a group stay on one replica, in order, since they share a
store; all replicas run equally many slots, and with sync="slot" the same sequence of forward, recompute and backward, for
each of these is a collective under FSDP. The paper deals chunks out in order. Costs ~0.1 ms for 512 documents, and 10 to
200 ms for 64K documents on 4,096 replicas.

    >>> import numpy as np
    >>> ones = np.ones(8, np.int64)                             # groups of 3 and 2 chunks, three standalone ones
    >>> placement = place([0, 3, 5, 6, 7, 8], ones, 2 * ones, dp=2, keep=1, sync="slot")
    >>> placement.replica.tolist(), placement.slot.tolist(), placement.rounds[:2].tolist()
    ([0, 0, 0, 1, 1, 1, 0, 1], [0, 1, 2, 0, 1, 2, 3, 3], [3, 1])
    >>> "".join("FRB"[operation] for operation, slot in placement.operations(1, keep=1).tolist())
    'FFFBRBRBFB'
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from numba import njit

from .assign import csr_from_bins, lpt
from .chunkflow import schedule
from .packs import Int64
from .swaps import refine


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Where each of c chunks runs. int64 arrays.

    A replica runs its slots in *rounds*: all forwards of a round, then its backwards, as `schedule` says for a group of
    that size. A round holds a whole group, and may hold further chunks beside it.
    """

    replica: Int64
    """int64[c]"""
    slot: Int64
    """int64[c], in which micro-batch of its replica; a slot that no chunk has is a filler's."""
    rounds: Int64
    """Sizes of the rounds, replica after replica; those of one replica sum to the number of slots."""
    offsets: Int64
    """int64[dp + 1]: replica r runs rounds[offsets[r]:offsets[r + 1]]."""

    @property
    def num_slots(self) -> int:
        return int(self.rounds[: self.offsets[1]].sum())

    def operations(self, replica: int, keep: int) -> Int64:
        """What the replica runs, int64[k, 2] of (operation, slot). With sync="slot" it is the same for all."""
        return schedule(self.rounds[self.offsets[replica] : self.offsets[replica + 1]], keep)

    def reordered(self, order: Callable[[int], Int64]) -> Placement:
        """The rounds of every replica in another order: order(r) is a permutation of 0 … r - 1.

        `place` puts long groups first, which is best for a pipeline; a shuffle keeps a step from being a curriculum.
        """
        counts = np.diff(self.offsets)
        orders = {int(count): np.asarray(order(int(count)), dtype=np.int64) for count in np.unique(counts)}
        old = np.concatenate(
            [begin + orders[count] for begin, count in zip(self.offsets, counts.tolist(), strict=False)]
        )
        first = np.empty_like(self.rounds)
        first[old] = np.cumsum(self.rounds[old]) - self.rounds[old]
        place = self.replica * self.num_slots + self.slot
        ends = np.cumsum(self.rounds)
        round_of = np.searchsorted(ends, place, side="right")
        moved = first[round_of] - (ends - self.rounds)[round_of]
        return replace(self, slot=self.slot + moved, rounds=self.rounds[old])

    def recomputed(self, keep: int) -> npt.NDArray[np.bool_]:
        """bool[dp, slots]: the slots that are run forward twice."""
        first = np.cumsum(self.rounds) - self.rounds
        place = np.arange(self.rounds.sum()) - np.repeat(first, self.rounds)
        return (place < np.repeat(self.rounds - keep, self.rounds)).reshape(-1, self.num_slots)

    def cost(self, forward: npt.ArrayLike, backward: npt.ArrayLike, keep: int, sync: str) -> int:
        """Units until the last replica is done (one stage, fillers free), from those of each chunk, int[c]."""
        forward, backward = (self.grid(values) for values in (forward, backward))
        again = np.where(self.recomputed(keep), forward, 0)
        if sync == "slot":
            return int((forward.max(0) + backward.max(0) + again.max(0)).sum())
        return int((forward + backward + again).sum(1).max())

    def grid(self, per_chunk: npt.ArrayLike) -> Int64:
        """int64[dp, slots] from one number per chunk, int[c]; 0 for fillers."""
        grid = np.zeros((len(self.offsets) - 1, self.num_slots), np.int64)
        grid[self.replica, self.slot] = per_chunk
        return grid


def place(
    groups: npt.ArrayLike,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    *,
    dp: int,
    keep: int,
    sync: str,
    filler: int = 0,
) -> Placement:
    """Spread chunks over `dp` replicas, as many slots each, so that waiting is least.

    groups: int[g + 1], `Chunks.groups`; forward, backward: int[c] cost units of each chunk; filler: units of a slot that
    has no chunk.

    sync="step": groups and standalone chunks go by LPT, recomputation counted, and are then exchanged; rounds are the
    groups. Slots are as few as hold the chunks, or more where fillers are cheaper than giving the replica of a very long
    document as many chunks as the others. sync="slot": replicas meet at every operation and so must run the same ones:
    groups of like size share a round as long as the longest, room beside shorter ones is filled with further groups
    and standalone chunks, and the rest goes in sorted stripes, dp of like cost at a time.
    """
    groups, forward, backward = (np.asarray(values, dtype=np.int64) for values in (groups, forward, backward))
    if dp < 1 or keep < 1 or len(groups) < 2 or sync not in ("step", "slot"):
        raise ValueError(
            f"place needs a group, dp and keep >= 1 and sync 'step' or 'slot'; got {len(groups) - 1} groups, dp={dp}, "
            f"keep={keep}, sync={sync!r}."
        )
    if not groups[-1] == len(forward) == len(backward):
        raise ValueError(
            f"Every chunk has a forward and a backward cost; got {len(forward)} and {len(backward)} of {groups[-1]}."
        )
    if sync == "step":
        return _place_step(groups, forward, backward, dp, keep, filler)
    return _place_slot(groups, forward + backward, dp)


def _place_step(groups: Int64, forward: Int64, backward: Int64, dp: int, keep: int, filler: int) -> Placement:
    sizes = np.diff(groups)
    before = np.concatenate([[0], np.cumsum(forward)])
    again = before[np.maximum(groups[1:] - keep, groups[:-1])] - before[groups[:-1]]
    cost = np.add.reduceat(forward + backward, groups[:-1]) + again
    # A chunk takes the place of a filler: what is to be balanced is what it costs more.
    replica, held = _balanced(np.maximum(cost - filler * sizes, 0), sizes, dp, filler)
    slots = int(held.max())
    # Long groups first: in a pipeline their backward passes would otherwise come when nothing is left to overlap with.
    order = np.lexsort((-cost, -sizes, replica))
    begin = np.empty_like(sizes)
    begin[order] = np.cumsum(sizes[order]) - sizes[order] - (np.cumsum(held) - held)[replica[order]]
    fillers = np.repeat(np.arange(dp), slots - held)
    rounds_of, offsets = csr_from_bins(np.concatenate([replica[order], fillers]), dp)
    rounds = np.concatenate([sizes[order], np.ones(len(fillers), np.int64)])[rounds_of]
    within = np.arange(groups[-1]) - np.repeat(groups[:-1], sizes)
    return Placement(
        replica=np.repeat(replica, sizes), slot=np.repeat(begin, sizes) + within, rounds=rounds, offsets=offsets
    )


def _balanced(cost: Int64, sizes: Int64, dp: int, filler: int) -> tuple[Int64, Int64]:
    """(replica of each group, chunks of each replica): of a few numbers of slots the least within 1 % of the fastest."""
    total = int(sizes.sum())
    fewest = max(-(-total // dp), int(sizes.max()))
    while lpt(cost, sizes, dp, fewest).min() < 0:
        fewest += 1
    bound = max(-(-int(cost.sum()) // dp), int(cost.max()))
    tried: list[tuple[int, Int64, Int64]] = []
    for slots in sorted({fewest, fewest * 9 // 8, fewest * 3 // 2, total}):
        replica = refine(cost, sizes, lpt(cost, sizes, dp, slots), dp, slots)
        held, load = np.zeros(dp, np.int64), np.zeros(dp, np.int64)
        np.add.at(held, replica, sizes)
        np.add.at(load, replica, cost)
        tried.append((int(load.max()) + filler * int(held.max()), replica, held))
        if 100 * tried[-1][0] <= 101 * (bound + filler * fewest):
            break
    fastest = min(units for units, _, _ in tried)
    return next((replica, held) for units, replica, held in tried if 100 * units <= 101 * fastest)


def _place_slot(groups: Int64, cost: Int64, dp: int) -> Placement:
    sizes = np.diff(groups)
    by_size = np.lexsort((-np.add.reduceat(cost, groups[:-1]), -sizes))
    several = by_size[sizes[by_size] > 1]
    alone = groups[:-1][sizes == 1]
    alone = alone[np.argsort(-cost[alone], kind="stable")]
    first_slot, replica_of, rounds = _shelves(sizes[several], dp)
    replica, slot = np.empty(len(cost), np.int64), np.empty(len(cost), np.int64)
    members = np.repeat(several, sizes[several])
    within = np.arange(len(members)) - np.repeat(np.cumsum(sizes[several]) - sizes[several], sizes[several])
    chunk = groups[members] + within
    replica[chunk] = np.repeat(replica_of, sizes[several])
    slot[chunk] = np.repeat(first_slot, sizes[several]) + within
    # Room beside long groups is filled first, costly chunks where slots are costly anyway.
    taken = np.zeros((int(rounds.sum()), dp), np.int64)
    taken[slot[chunk], replica[chunk]] = 1 + cost[chunk]
    free = np.argwhere(taken == 0)
    free = free[np.argsort(-taken.max(1, initial=0)[free[:, 0]], kind="stable")][: len(alone)]
    slot[alone[: len(free)]], replica[alone[: len(free)]] = free[:, 0], free[:, 1]
    stripes = np.arange(len(alone) - len(free))
    slot[alone[len(free) :]], replica[alone[len(free) :]] = len(taken) + stripes // dp, stripes % dp
    rounds = np.concatenate([rounds, np.ones(-(-len(stripes) // dp), np.int64)])
    return Placement(
        replica=replica, slot=slot, rounds=np.tile(rounds, dp), offsets=np.arange(dp + 1) * np.int64(len(rounds))
    )


@njit(nogil=True, cache=True)
def _shelves(sizes, dp):
    """Groups by falling size into rounds, as tall as their first: (first slot, replica) of each, and the rounds' sizes.

    A group goes where least room is left that is enough, ties to the place that was filled last.
    """
    n, longest = len(sizes), sizes[0] if len(sizes) else 0
    first_slot, replica = np.empty(n, np.int64), np.empty(n, np.int64)
    # A round is opened when every place of those before has a group, so there are at most n / dp and one.
    rounds, end = np.empty(n // dp + 1, np.int64), np.zeros(n // dp + 2, np.int64)
    # top[room] is the place filled last among those with that room, below[place] the one filled before it.
    top, below = np.full(longest + 1, -1, np.int64), np.empty(n + dp, np.int64)
    num_rounds = 0
    for g in range(n):
        room = sizes[g]
        while room < longest and top[room] < 0:
            room += 1
        if top[room] < 0:
            room = sizes[g]
            for place in range((num_rounds + 1) * dp - 1, num_rounds * dp - 1, -1):
                below[place], top[room] = top[room], place
            rounds[num_rounds] = room
            end[num_rounds + 1] = end[num_rounds] + room
            num_rounds += 1
        place = top[room]
        top[room] = below[place]
        first_slot[g], replica[g] = end[place // dp + 1] - room, place % dp
        room -= sizes[g]
        below[place], top[room] = top[room], place
    return first_slot, replica, rounds[:num_rounds].copy()
