"""VRSP, variance-reduced sequence placement (Libra, arXiv:2607.23250, section "pool-level placement").

Decided here: which replica runs which ready pack, and in which slot; packs are neither cut nor repacked and a step
keeps its documents. Libra's rule is LPT with equal counts (costliest pack first, into the lightest pool that is not
full); here exchanges between pools follow, which take what LPT leaves of the distance to the bound. A pool is what
waits as one:

- ``sync="step"``: the packs of one replica (ranks meet once per step), ``slots`` each;
- ``sync="slot"``: the packs of one slot (ranks meet at every micro-batch). Waiting is then the sum of the slots'
  maxima, and sorted stripes (the dp costliest packs together, then the next dp …) reach the least possible for fixed
  packs. Within a stripe the costliest pack goes to the replica with least work so far, so per-step sums even out too;
- ``pool_size=P``: P packs that P neighbouring replicas run in one slot and whose attention they share (Libra's TAP), so
  that only the pool's sum counts; pools are then placed like packs on dp / P replicas.

How large should P be? ``expected_imbalance`` is Libra's estimate for pools filled at random, right to a factor of two;
``recommend_pool_size`` measures on a sample. Neither gets below ``bound``: a pool costs what its costliest pack does.

Cost: O(n log n), some 20 µs for 128 packs on 8 replicas, 0.3 ms for 512 on 64, 20 ms for 64K on 4,096.

    >>> import numpy as np
    >>> cost = np.array([9, 1, 8, 2])
    >>> slot, replica = vrsp(cost, dp=2, sync="slot", key=0)
    >>> slot[0] == slot[2], slot[1] == slot[3]           # like with like
    (np.True_, np.True_)
    >>> slot, replica = vrsp(cost, dp=2, sync="step", key=0)
    >>> np.bincount(replica, weights=cost)
    array([10., 10.])
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ..packing.assign import lpt, stripes
from ..packing.swaps import refine
from .order import permute


def vrsp(cost: np.ndarray, *, dp: int, sync: str, key: int, pool_size: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Slot int64[p] and replica int64[p] of ``p = dp x slots`` packs of these costs (int64[p]).

    The order of the slots is shuffled by ``key``: balance must not become a curriculum by length. ``pool_size``
    divides dp.
    """
    assert len(cost) % dp == 0, f"{len(cost)} packs do not fill slots of {dp}"
    if pool_size > 1:
        return _pooled(cost, dp, sync, key, pool_size)
    slots = len(cost) // dp
    shuffled = permute(0, slots, slots, key)
    slot, replica = np.empty(len(cost), np.int64), np.empty(len(cost), np.int64)
    order = np.argsort(-cost, kind="stable")
    if sync == "step":
        replica = _equal_counts(cost, dp)
        by_replica = order[np.argsort(replica[order], kind="stable")]  # each replica's packs, costliest first
        slot[by_replica] = np.tile(shuffled, dp)
        return slot, replica
    slot = shuffled[stripes(cost, dp)]
    work = np.zeros(dp, np.int64)
    for stripe in range(slots):
        packs = order[stripe * dp : (stripe + 1) * dp]
        to = np.argsort(work, kind="stable")
        replica[packs] = to
        work[to] += cost[packs]
    return slot, replica


def pools(cost: np.ndarray, pool_size: int) -> np.ndarray:
    """Pool int64[n] of each pack (cost int64[n]), pool_size packs in each, fewer in some where n is no multiple.

    Raises ValueError for a pool of no packs.
    """
    if pool_size < 1:
        raise ValueError(f"a pool holds at least one pack; got pool_size={pool_size}")
    num_pools = -(-len(cost) // pool_size)
    if len(cost) == num_pools * pool_size:
        return _equal_counts(cost, max(num_pools, 1))
    one = np.ones(len(cost), np.int64)
    return refine(cost, one, lpt(cost, one, num_pools, pool_size), num_pools, pool_size)


def imbalance(cost: np.ndarray, pool: np.ndarray) -> float:
    """Costliest pool over the mean pool."""
    loads = np.bincount(pool, weights=cost)
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def bound(cost: np.ndarray, pool_size: int) -> float:
    """No way to form pools of pool_size packs (cost int64[n]) has a smaller ``imbalance``.

    Libra's bound is max F / (P·mean). In full pools the costliest pack also has P - 1 others beside it, and so do the k
    costliest in however many pools they are: the cheapest at least. Where k exceeds the pools, some hold two of them.
    """
    num_pools = -(-len(cost) // pool_size)
    total = int(cost.sum())
    if total == 0:
        return 1.0
    if len(cost) < num_pools * pool_size:
        return max(1.0, int(cost.max()) * num_pools / total)
    rising = np.concatenate([[0], np.cumsum(np.sort(cost))])
    return max(1.0, float(_bound(rising, num_pools, pool_size)) * num_pools / total)


def expected_imbalance(cv: float, pool_size: int, num_packs: int) -> float:
    """Costliest pool over the mean that pools filled at random may expect: 1 + CV/√P · √(2 ln(D/P)).

    cv: standard deviation of a pack's cost over its mean; D = num_packs. Raises ValueError for a pool larger than D.

    >>> round(expected_imbalance(0.98, 8, 128), 2)
    1.82
    """
    if not 1 <= pool_size <= num_packs:
        raise ValueError(f"pools hold 1 … num_packs packs; got pool_size={pool_size} of {num_packs}")
    return 1 + cv / math.sqrt(pool_size) * math.sqrt(2 * math.log(num_packs / pool_size))


def recommend_pool_size(cost: np.ndarray, *, dp: int, packs_per_step: int, tolerance: float = 0.02) -> int:
    """The smallest pool that balances: a divisor of dp at which ``pools`` come within ``tolerance`` of the mean.

    cost: int64[n], a sample of packs in order, of at least one step; taken is the mean over its steps. Where no pool
    balances well enough, the one that balances best: a larger pool shares its attention over more, slower links.
    """
    if packs_per_step % dp or len(cost) < packs_per_step:
        raise ValueError(
            f"a step has a multiple of dp={dp} packs and the sample at least one step; got "
            f"packs_per_step={packs_per_step} and {len(cost)} packs"
        )
    steps = cost[: len(cost) // packs_per_step * packs_per_step].reshape(-1, packs_per_step)
    best, least = 1, math.inf
    for size in (size for size in range(1, dp + 1) if dp % size == 0):
        mean = float(np.mean([imbalance(step, pools(step, size)) for step in steps]))
        if mean < least:
            best, least = size, mean
        if mean <= 1 + tolerance:
            return size
    return best


def _equal_counts(cost: np.ndarray, num_bins: int) -> np.ndarray:
    one, places = np.ones(len(cost), np.int64), len(cost) // num_bins
    # What all have in common cannot be balanced where counts are equal; without it LPT sees what can.
    above = cost - cost.min(initial=np.iinfo(np.int64).max)
    return refine(cost, one, lpt(above, one, num_bins, len(cost), places), num_bins, len(cost), equal_counts=True)


def _pooled(cost: np.ndarray, dp: int, sync: str, key: int, pool_size: int) -> tuple[np.ndarray, np.ndarray]:
    if dp % pool_size:
        raise ValueError(f"pool_size must divide dp={dp}; got {pool_size}")
    pool = pools(cost, pool_size)
    loads = np.zeros(len(cost) // pool_size, np.int64)
    np.add.at(loads, pool, cost)
    slot, group = vrsp(loads, dp=dp // pool_size, sync=sync, key=key)
    members = np.argsort(pool, kind="stable")
    within = np.empty(len(cost), np.int64)
    within[members] = np.tile(np.arange(pool_size), len(loads))
    return slot[pool], group[pool] * pool_size + within


@njit(nogil=True, cache=True)
def _bound(rising, num_bins, size):
    """Least possible sum of the costliest of num_bins bins of `size` items each; rising: sums of the cheapest 0 … n."""
    n = len(rising) - 1
    best = 0.0
    for k in range(1, min(n, 2 * num_bins) + 1):
        each = (
            k - 1
        ) // num_bins  # some bins hold more than this many of the k costliest: j bins, if the others hold `each`
        least = np.inf
        for j in range(1, num_bins + 1):
            held = max(k - each * (num_bins - j), (each + 1) * j)
            if held <= min(k, j * size):
                total = rising[n - k + held] - rising[n - k] + rising[j * size - held]
                least = min(least, total / j)
        best = max(best, least)
    return best
