"""Pairs of ranks that share what both receive: after block_rows.py, where each rank computes all of its own queries.

Two ranks that hold late queries of a long document both receive nearly all of its keys. If one computes all that both compute there
with the first half of the keys, or of the heads, and the other the rest, each key travels once, and queries travel between the two.
Worth it where the keys are many more than the queries: several times, as a query with its gradients weighs more than a key.

For each pair of ranks that work most on the same document the bytes saved are estimated from what both use; the pairs are then tried
from the best on, each rank in one pair, either rank first, and the loads of both are even afterwards.

Cost: 16 pairs of ranks and twice, moving their units there and back: 15 ns a unit.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .block_graph import BlockGraph, grouped
from .packs import Int64


def paired(graph: BlockGraph, home: Int64, owner: Int64, ranks: int, *, largest: bool) -> Int64:
    """The owners of units, int64[groups · m], once pairs of ranks have shared their work. home: int64[n]."""
    q, k, work = graph.units()
    owner = owner.copy()
    if len(owner) == 0:
        return owner
    columns, by_k = grouped(k, len(graph.nets[0]))
    _pair(q, k, work, columns, by_k, graph.nets, graph.document, home, owner, ranks, graph.groups, largest)
    return owner


@njit(nogil=True, cache=True)
def _flow(net, h, r, step, nets, sent, received):
    out, back = step * nets[0][net], step * nets[1][net]
    sent[h] += out
    received[r] += out
    sent[r] += back
    received[h] += back


@njit(nogil=True, cache=True)
def _give(u, c, q, k, nets, home, owner, used, sent, received):
    """Unit u goes to rank c."""
    a = owner[u]
    for net in (q[u], k[u]):
        h = home[net % len(home)]
        used[net, a] -= 1
        if used[net, a] == 0 and a != h:
            _flow(net, h, a, -1, nets, sent, received)
        if used[net, c] == 0 and c != h:
            _flow(net, h, c, 1, nets, sent, received)
        used[net, c] += 1
    owner[u] = c


@njit(nogil=True, cache=True)
def _bytes(sent, received, largest, scale):
    """What is moved: by all ranks, or the 8th powers of what each moves in parts of `scale`."""
    total = 0.0
    for r in range(len(sent)):
        x = max(sent[r], received[r]) / scale
        x *= x
        x *= x
        total += x * x if largest else float(received[r])
    return total


@njit(nogil=True, cache=True)
def _saved(nets, used, home, document, main, groups):
    """Bytes that each pair of ranks is thought to save, float64[P, P]."""
    P, half, n = used.shape[1], len(nets[0]) // 2, len(home)
    saved = np.zeros((P, P))
    for x in range(half):
        h, weight = home[x % n], 0.5 * (nets[0][x] + nets[1][x])
        travels = float(nets[0][half + x] + nets[1][half + x]) * (1.0 if groups == 1 else 0.5)
        for a in range(P):
            if main[a] != document[x % n]:
                continue
            if used[x, a] > 0 and a != h:
                for c in range(P):
                    if c != a and c != h and used[x, c] > 0:
                        saved[a, c] += weight
            if used[half + x, a] > 0:
                for c in range(P):
                    saved[a, c] -= travels
                    saved[c, a] -= travels
    for a in range(P):
        for c in range(P):
            if main[a] != main[c] or a == c:
                saved[a, c] = -1.0
    return saved


@njit(nogil=True, cache=True)
def _split(some, mine, work, first, second, loads, q, k, nets, home, owner, used, sent, received):
    """The first of the units go to one rank, the rest to the other, so that both have the same to do."""
    total = np.int64(0)
    for i in range(len(some)):
        if mine[i] == first:
            total += work[some[i]]
    target, done = total + (loads[second] - loads[first]) // 2, np.int64(0)
    for u in some:
        to = first if done + work[u] // 2 < target else second
        done += work[u]
        if owner[u] != to:
            _give(u, to, q, k, nets, home, owner, used, sent, received)


@njit(nogil=True, cache=True)
def _pair(q, k, work, columns, by_k, nets, document, home, owner, P, groups, largest):
    n = len(home)
    used, amount, load = np.zeros((len(nets[0]), P), np.int32), np.zeros((P, document[-1] + 1)), np.zeros(P, np.int64)
    sent, received = np.zeros(P, np.int64), np.zeros(P, np.int64)
    for u in range(len(q)):
        r = owner[u]
        load[r] += work[u]
        amount[r, document[k[u] % n]] += work[u]
        for net in (q[u], k[u]):
            if used[net, r] == 0 and r != home[net % n]:
                _flow(net, home[net % n], r, 1, nets, sent, received)
            used[net, r] += 1
    main = np.array([np.argmax(amount[r]) for r in range(P)])
    saved = _saved(nets, used, home, document, main, groups)
    scale = max(1.0, float(received.max()))
    for _ in range(2 * P):
        at = int(np.argmax(saved))
        a, c = at // P, at % P
        if saved[a, c] <= 0.0:
            break
        saved[a, c] = saved[c, a] = -1.0
        some, count = np.empty(len(q), np.int64), 0
        for net in range(len(nets[0]) // 2):  # group by group, column by column
            if document[net % n] == main[a]:
                for u in by_k[columns[net] : columns[net + 1]]:
                    if owner[u] == a or owner[u] == c:
                        some[count] = u
                        count += 1
        some = some[:count]
        mine = owner[some]
        least, how = _bytes(sent, received, largest, scale), -1
        for way in range(2):
            first, second = (a, c) if way == 0 else (c, a)
            _split(some, mine, work, first, second, load, q, k, nets, home, owner, used, sent, received)
            then = _bytes(sent, received, largest, scale)
            if then < least:
                least, how = then, way
            for i in range(count):
                u, r = some[i], mine[i]
                if owner[u] != r:
                    _give(u, r, q, k, nets, home, owner, used, sent, received)
        if how >= 0:
            first, second = (a, c) if how == 0 else (c, a)
            _split(some, mine, work, first, second, load, q, k, nets, home, owner, used, sent, received)
            saved[a, :] = saved[:, a] = saved[c, :] = saved[:, c] = -1.0
