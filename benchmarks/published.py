"""Published balancing methods as their papers (or code) state them, in plain Python: the rivals of `quality.py`.

None of them is part of the package. Each takes arrays of tokens and costs (int64 units) and returns what the comparison
needs: loads, bins or steps.
"""

from __future__ import annotations

import heapq

import numpy as np


def cut_in_order(tokens: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(pack, tokens) of the pieces that documents end to end make when cut wherever a pack of `capacity` is full."""
    ends = np.cumsum(tokens)
    ends = np.union1d(ends, np.arange(capacity, ends[-1], capacity))
    return (ends - 1) // capacity, np.diff(np.concatenate([[0], ends]))


def wlb_greedy(
    tokens: np.ndarray, cost: np.ndarray, queue: list[int], num_packs: int, capacity: int
) -> tuple[list[list[int]], list[int]]:
    """Algorithm 1 of WLB-LLM for the documents of `queue`, in that order: (packs, what fitted nowhere)."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    work, length, remained = [0] * num_packs, [0] * num_packs, []
    for d in queue:
        pack = work.index(min(work))
        if length[pack] + tokens[d] > capacity:
            pack = length.index(min(length))
        if length[pack] + tokens[d] > capacity:
            remained.append(d)
            continue
        packs[pack].append(d)
        work[pack] += int(cost[d])
        length[pack] += int(tokens[d])
    return packs, remained


def wlb_queues(
    tokens: np.ndarray,
    cost: np.ndarray,
    edges: np.ndarray,
    num_packs: int,
    capacity: int,
    thresholds: tuple[int, ...],
    max_delay: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(imbalance per step, delay per document, -1: never out) of WLB-LLM's queues; max_delay: a maximum bolted on."""
    queues: list[list[int]] = [[] for _ in thresholds]
    born = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    delay, remained, imbalance = np.full(len(tokens), -1), [], []
    for step in range(len(edges) - 1):
        new = []
        for d in range(edges[step], edges[step + 1]):
            level = int(np.searchsorted(thresholds, tokens[d], side="right"))
            (queues[level - 1] if level else new).append(d)
        for queue in queues:
            count = num_packs if len(queue) >= num_packs else 0
            while max_delay is not None and count < len(queue) and step - born[queue[count]] >= max_delay:
                count += 1
            new += queue[:count]
            del queue[:count]
        new.sort(key=lambda d: -tokens[d])
        packs, remained = wlb_greedy(tokens, cost, remained + new, num_packs, capacity)
        work = [int(cost[pack].sum()) if pack else 0 for pack in packs]
        imbalance.append(max(work) * num_packs / max(sum(work), 1))
        for pack in packs:
            delay[pack] = step - born[pack]
    return np.array(imbalance), delay


def fixed_length(
    tokens: np.ndarray, cost: np.ndarray, edges: np.ndarray, num_packs: int, context: int, batches: int
) -> np.ndarray:
    """Imbalance per step of fixed-length packs filled greedily by workload over windows of several batches.

    What fits nowhere opens the next window; packs of like workload share a step.
    """
    imbalance, left = [], []
    for first in range(0, len(edges) - 1, batches):
        stop = min(first + batches, len(edges) - 1)
        window = sorted([*left, *range(edges[first], edges[stop])], key=lambda d: -tokens[d])
        packs, left = wlb_greedy(tokens, cost, window, num_packs * (stop - first), context)
        work = -np.sort([-int(cost[pack].sum()) if pack else 0 for pack in packs])
        for step in work.reshape(-1, num_packs):
            imbalance.append(step.max() * num_packs / max(step.sum(), 1))
    return np.array(imbalance)


def libra_pools(cost: np.ndarray, num_pools: int, pool_size: int) -> np.ndarray:
    """VRSP's pool of each pack: costliest first into the lightest pool that is not full."""
    pool, load, count = np.empty(len(cost), np.int64), [0] * num_pools, [0] * num_pools
    for d in np.argsort(-cost, kind="stable"):
        best = min((p for p in range(num_pools) if count[p] < pool_size), key=lambda p: (load[p], p))
        pool[d] = best
        load[best] += int(cost[d])
        count[best] += 1
    return pool


def karmarkar_karp(cost: np.ndarray, num_bins: int) -> np.ndarray:
    """Bin of each item by the largest differencing method with equal counts, as verl and others have it."""
    order = np.argsort(cost, kind="stable")
    heap = []
    for first in range(0, len(cost), num_bins):
        sets = [(int(cost[d]), [int(d)]) for d in order[first : first + num_bins]][::-1]
        heap.append((sets[-1][0] - sets[0][0], first, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, name, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        merged = sorted(((x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)), key=lambda s: -s[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], name, merged))
    bins = np.empty(len(cost), np.int64)
    for number, (_, items) in enumerate(heap[0][2]):
        bins[items] = number
    return bins


def skrull_gds(tokens: np.ndarray, cost: np.ndarray, dp: int, capacity: int, slots: int) -> list[list[list[int]]]:
    """Micro-batches of each replica: FLOPs to the least loaded replica, then long and short in turn until one is full.

    The paper opens as many micro-batches as it takes; fewer than `slots` are filled up with empty ones.
    """
    replica: list[list[int]] = [[] for _ in range(dp)]
    load = [0] * dp
    for d in np.argsort(-cost, kind="stable"):
        least = load.index(min(load))
        replica[least].append(int(d))
        load[least] += int(cost[d])
    result = []
    for items in replica:
        count = slots
        while True:
            batches: list[list[int]] = [[] for _ in range(count)]
            held = [0] * count
            fits = True
            for turn, d in enumerate(items):
                tries = [(turn + k) % count for k in range(count)]
                place = next((b for b in tries if held[b] + tokens[d] <= capacity), None)
                if place is None:
                    fits = False
                    break
                batches[place].append(d)
                held[place] += int(tokens[d])
            if fits:
                break
            count += 1
        result.append(batches)
    return result


def skrull_dacp(tokens: np.ndarray, whole: np.ndarray, cp: int, cap: int) -> np.ndarray | None:
    """Rank of each document (-1: cut) by Skrull's greedy with roll-back; None where it fails."""
    room, load = [float(cap)] * cp, [0.0] * cp
    placed: list[list[int]] = [[] for _ in range(cp)]
    rank = np.full(len(tokens), -1)

    def cut(d: int) -> None:
        for r in range(cp):
            room[r] -= tokens[d] / cp
            load[r] += whole[d] / cp

    for d in np.argsort(tokens, kind="stable"):
        while True:
            t = load.index(min(load))
            t = t if room[t] >= tokens[d] else room.index(max(room))
            if room[t] >= tokens[d]:
                placed[t].append(d)
                rank[d], room[t], load[t] = t, room[t] - tokens[d], load[t] + whole[d]
                break
            t = room.index(min(room))
            if room[t] >= tokens[d] / cp:
                cut(d)
                break
            if not placed[t]:
                return None
            undone = placed[t].pop()
            rank[undone], room[t], load[t] = -1, room[t] + tokens[undone], load[t] - whole[undone]
            cut(undone)
            if min(room) < 0:
                return None
    return rank
