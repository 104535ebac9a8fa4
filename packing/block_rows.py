"""The quick search of DCP's placement: blocks between ranks, each with all units of its queries, in clusters of any size.

Threshold accepting over two changes, a cluster to another rank and two exchanged. As all units of a block's queries are computed
where it lives, only keys and values travel, a net has few users, and one array of counts says what a change costs before anything is
changed. What is better computed elsewhere is for block_pairs.py and block_search.py, which has the objective and the fines too.

Cost: 0.05 to 0.3 µs a round, in proportion to the keys of a cluster.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .block_graph import BlockGraph
from .block_search import HEAT, fines
from .packs import Int64


def by_rows(
    graph: BlockGraph,
    cluster: Int64,
    home: Int64,
    *,
    work_cap: Int64,
    token_cap: Int64,
    largest: bool,
    even: float,
    rounds: int,
    heat: float,
    seed: int,
) -> tuple[Int64, float]:
    """(rank of each cluster, energy) after the search from `home`, int64[clusters], of all head groups together.

    cluster: int64[n], that of each block, rising. The best state met is what it gives.
    """
    kv = np.array(graph.row_bytes.kv) * graph.groups
    pair, token = fines(work_cap, token_cap, even)
    rounds = rounds if len(home) else 0
    limits = (work_cap / graph.groups, token_cap, pair * graph.groups, token, largest, float(even))
    return _rows(
        cluster, graph.q, graph.k, graph.pairs, graph.tokens, kv, home, limits, rounds, heat * even / HEAT, seed
    )


@njit(nogil=True, cache=True)
def _uses(cluster, num, q, k):
    """Blocks outside of it whose keys each cluster needs, and blocks of it that others need: two CSRs."""
    offsets, needed = np.zeros(num + 1, np.int64), np.empty(len(q), np.int64)
    seen, some, u = np.full(len(cluster), -1, np.int64), 0, 0
    for c in range(num):
        while u < len(q) and cluster[q[u]] == c:
            if cluster[k[u]] != c and seen[k[u]] != c:
                seen[k[u]] = c
                needed[some] = k[u]
                some += 1
            u += 1
        offsets[c + 1] = some
    wanted = np.flatnonzero(seen >= 0)  # by cluster, as these rise
    own_offsets = np.searchsorted(cluster[wanted], np.arange(num + 1))
    return offsets, needed[:some].copy(), own_offsets, wanted


@njit(nogil=True, cache=True)
def _flow(x, h, r, step, out, back, sent, received):
    sent[h] += step * out[x]
    received[r] += step * out[x]
    sent[r] += step * back[x]
    received[h] += step * back[x]


@njit(nogil=True, cache=True)
def _change(v, a, c, uses, cluster, home, used, out, back, largest, sent, received):
    """Bytes that are moved more when cluster v goes from a to c."""
    offsets, needed, own_offsets, own = uses
    d = np.int64(0)
    for i in range(offsets[v], offsets[v + 1]):
        x = needed[i]
        h = home[cluster[x]]
        if used[x, a] == 1 and a != h:
            d -= out[x] + back[x]
            if largest:
                _flow(x, h, a, -1, out, back, sent, received)
        if used[x, c] == 0 and c != h:
            d += out[x] + back[x]
            if largest:
                _flow(x, h, c, 1, out, back, sent, received)
    for i in range(own_offsets[v], own_offsets[v + 1]):
        x = own[i]
        if used[x, a] > 0:
            d += out[x] + back[x]
        if used[x, c] > 0:
            d -= out[x] + back[x]
        if largest:
            for r in range(used.shape[1]):
                if used[x, r] > 0:
                    if r != a:
                        _flow(x, a, r, -1, out, back, sent, received)
                    if r != c:
                        _flow(x, c, r, 1, out, back, sent, received)
    return d


@njit(nogil=True, cache=True)
def _commit(v, a, c, uses, home, used, load, held, work, tokens):
    offsets, needed, _, _ = uses
    for i in range(offsets[v], offsets[v + 1]):
        used[needed[i], a] -= 1
        used[needed[i], c] += 1
    home[v] = c
    load[a] -= work[v]
    load[c] += work[v]
    held[a] -= tokens[v]
    held[c] += tokens[v]


@njit(nogil=True, cache=True)
def _over(r, load, held, limits):
    work_cap, token_cap, pair, token, _, _ = limits
    return max(0.0, (load - work_cap[r]) * pair) + max(0.0, (held - token_cap[r]) * token)


@njit(nogil=True, cache=True)
def _peak(sent, received, more_sent, more_received, even):
    """As in block_search.py."""
    total, share, P = 0.0, 1.0 / even, len(sent)
    for r in range(P):
        x = max(sent[r] + more_sent[r], received[r] + more_received[r]) * share
        x *= x
        x *= x
        total += x * x
    return P * even * np.sqrt(np.sqrt(np.sqrt(total / P)))


@njit(nogil=True, cache=True)
def _begin(uses, cluster, home, work, tokens, out, back, limits):
    """What ranks use, compute, hold, send and receive, and what it costs."""
    offsets, needed, _, _ = uses
    P = len(limits[0])
    used, load, held = np.zeros((len(cluster), P), np.int32), np.zeros(P, np.int64), np.zeros(P, np.int64)
    sent, received = np.zeros(P, np.int64), np.zeros(P, np.int64)
    total, over = np.int64(0), 0.0
    for v in range(len(home)):
        r = home[v]
        load[r] += work[v]
        held[r] += tokens[v]
        for i in range(offsets[v], offsets[v + 1]):
            x = needed[i]
            h = home[cluster[x]]
            if used[x, r] == 0 and r != h:
                _flow(x, h, r, 1, out, back, sent, received)
                total += out[x] + back[x]
            used[x, r] += 1
    nothing = np.zeros(P, np.int64)
    value = _peak(sent, received, nothing, nothing, limits[5]) if limits[4] else float(total)
    for r in range(P):
        over += _over(r, load[r], held[r], limits)
    return used, load, held, sent, received, value, over


@njit(nogil=True, cache=True)
def _rows(cluster, q, k, pairs, block_tokens, kv, home, limits, rounds, heat, seed):
    """Set up the clusters and search."""
    num = len(home)
    work, tokens = np.zeros(num, np.int64), np.zeros(num, np.int64)
    for u in range(len(q)):
        work[cluster[q[u]]] += pairs[u]
    for b in range(len(cluster)):
        tokens[cluster[b]] += block_tokens[b]
    out, back = block_tokens * kv[0], block_tokens * kv[1]
    uses = _uses(cluster, num, q, k)
    return _search(uses, cluster, home.copy(), work, tokens, out, back, limits, rounds, heat, seed)


@njit(nogil=True, cache=True)
def _search(uses, cluster, home, work, tokens, out, back, limits, rounds, heat, seed):
    used, load, held, sent, received, value, over = _begin(uses, cluster, home, work, tokens, out, back, limits)
    offsets, needed, _, _ = uses
    P, num, largest, even = len(load), len(home), limits[4], limits[5]
    more_sent, more_received = np.zeros(P, np.int64), np.zeros(P, np.int64)
    best, kept = value + over, home.copy()
    random, low = np.uint64(2 * seed + 1), np.uint64((1 << 20) - 1)
    for t in range(rounds):
        for by in (13, -7, 17):  # xorshift
            random ^= random << np.uint64(by) if by > 0 else random >> np.uint64(-by)
        x, y = np.int64(random & low), np.int64((random >> np.uint64(20)) & low)
        kind, z = (
            np.int64((random >> np.uint64(40)) & np.uint64(3)),
            np.int64((random >> np.uint64(42)) & np.uint64(255)),
        )
        u, swap = x * num >> 20, kind == 3
        w, c = np.int64(-1), y * P >> 20
        if kind == 0 or swap:  # the rank of any other, or of a neighbour
            w = y * num >> 20 if z % 4 == 0 else np.int64(min(max(u + (z >> 4) - 8, np.int64(0)), np.int64(num - 1)))
            c = home[w]
        elif kind == 1 and offsets[u + 1] > offsets[u]:  # the rank of some of its keys
            c = home[cluster[needed[offsets[u] + (y * (offsets[u + 1] - offsets[u]) >> 20)]]]
        a = home[u]
        if a == c:
            continue
        pairs, size = work[u] - (work[w] if swap else 0), tokens[u] - (tokens[w] if swap else 0)
        fined = _over(a, load[a] - pairs, held[a] - size, limits) + _over(c, load[c] + pairs, held[c] + size, limits)
        fined -= _over(a, load[a], held[a], limits) + _over(c, load[c], held[c], limits)
        if fined > 4 * even:  # more than any change saves
            continue
        if largest:
            more_sent[:] = 0
            more_received[:] = 0
        d = _change(u, a, c, uses, cluster, home, used, out, back, largest, more_sent, more_received)
        if swap:
            _commit(u, a, c, uses, home, used, load, held, work, tokens)
            d += _change(w, c, a, uses, cluster, home, used, out, back, largest, more_sent, more_received)
        then = _peak(sent, received, more_sent, more_received, even) if largest else value + d
        if then - value + fined <= max(0.0, heat * (0.85 * rounds - t) / rounds):
            _commit(w if swap else u, c if swap else a, a if swap else c, uses, home, used, load, held, work, tokens)
            if largest:
                sent += more_sent
                received += more_received
            value, over = then, over + fined
            if value + over < best - 1e-6 * even:
                best = value + over
                kept[:] = home
        elif swap:
            _commit(u, c, a, uses, home, used, load, held, work, tokens)
    return kept, best
