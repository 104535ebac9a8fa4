"""The search of DCP's placement: blocks between homes and units between owners, at random with a fixed seed, while less is moved.

Threshold accepting, as in dispatch_search.py: a change is accepted if it costs no more than a threshold that falls to zero.
Four changes: a unit to another owner; the units that an owner has of a row (the same queries), or those of them whose keys live with
the other owner; those it has of a column (the same keys); a block to another home, with the units of its queries that its home
computes. How often each rank uses each net is counted, so what a unit costs or saves is known in O(1) before anything is changed.

The objective is the bytes of all ranks, or those of the rank that moves most, the larger of what it sends and receives, smoothed:
the 8th power mean over the ranks, so that it falls also where several ranks are nearly the largest. Ranks over their work or their
tokens pay a fine, steep enough that bytes are not worth it.

Cost: 0.1 to 0.5 µs a round, more where rows are long.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .block_graph import grouped
from .packs import Int64

FINE = 16.0
"""Even shares of KV bytes that a rank pays for an even share of work, or a quarter of one of tokens, too many."""
HEAT = 40
"""The first threshold: what an even share of the tokens weighs as KV, over this."""


def fines(work_cap: Int64, token_cap: Int64, even: float) -> tuple[float, float]:
    """Bytes that a rank pays for each pair and for each token over its limits."""
    one = FINE * even * len(work_cap) ** 0.5 * len(work_cap)
    return float(one / max(work_cap.sum(), 1)), float(4.0 * one / max(token_cap.sum(), 1))


def searched(
    nets: tuple[Int64, Int64],
    q: Int64,
    k: Int64,
    work: Int64,
    tokens: Int64,
    home: Int64,
    owner: Int64,
    *,
    work_cap: Int64,
    token_cap: Int64,
    largest: bool,
    even: float,
    rounds: int,
    heat: float,
    seed: int,
) -> tuple[Int64, Int64, float]:
    """(home int64[n], owner int64[u], energy) after the search, which never ends with more than it began with.

    nets: bytes from and to home, int64[nets]; q, k: nets of each unit, int64[u], q rising, those of a block being its number modulo
    n. work: int64[u]; tokens: int64[n]. home: rank of each block, or P, which is nobody here. work_cap, token_cap: int64[P].
    even: bytes that thresholds and fines are measured in.
    """
    rounds = rounds if len(tokens) and len(work_cap) > 1 else 0
    limits = (work_cap, token_cap, *fines(work_cap, token_cap, even), largest, float(even))
    units = (nets[0], nets[1], q, k, work, tokens)
    start = home.astype(np.int64), owner.astype(np.int64)
    return _search(units, grouped(k, len(nets[0])), *start, limits, rounds, heat * even / HEAT, seed)


@njit(nogil=True, cache=True)
def _starts(keys, n):
    """Where each key begins among rising ones."""
    offsets, at = np.empty(n + 1, np.int64), 0
    for key in range(n + 1):
        while at < len(keys) and keys[at] < key:
            at += 1
        offsets[key] = at
    return offsets


@njit(nogil=True, cache=True)
def _flow(net, h, r, step, out, back, sent, received):
    """Rank r begins (1) or ceases (-1) to use a net whose home is h: bytes."""
    there, again = step * out[net], step * back[net]
    if len(sent) == 0:  # only the sum is wanted
        return there + again
    sent[h] += there
    received[r] += there
    sent[r] += again
    received[h] += again
    return there + again


@njit(nogil=True, cache=True)
def _step(net, a, c, h, many, used, out, back, sent, received):
    """So many of the units with which rank a uses a net go to rank c: bytes."""
    d = np.int64(0)
    if used[net, a] == many and a != h:
        d += _flow(net, h, a, -1, out, back, sent, received)
    if used[net, c] == 0 and c != h:
        d += _flow(net, h, c, 1, out, back, sent, received)
    return d


@njit(nogil=True, cache=True)
def _resettled(net, a, c, leaves, comes, used, out, back, sent, received):
    """The home of a net goes from a to c; with it a ceases to use it, or not, and c begins to: bytes."""
    d = np.int64(0)
    for r in range(used.shape[1]):
        before = used[net, r] > 0
        if before and r != a:
            d += _flow(net, a, r, -1, out, back, sent, received)
        if ((before and not (leaves and r == a)) or (comes and r == c)) and r != c:
            d += _flow(net, c, r, 1, out, back, sent, received)
    return d


@njit(nogil=True, cache=True)
def _over(r, load, held, limits):
    work_cap, token_cap, pair, token, _, _ = limits
    return max(0.0, (load - work_cap[r]) * pair) + max(0.0, (held - token_cap[r]) * token)


@njit(nogil=True, cache=True)
def _peak(sent, received, more_sent, more_received, P, even):
    """Bytes of the rank that moves most, smoothed, P times."""
    total, share = 0.0, 1.0 / even
    for r in range(P):
        x = max(sent[r] + more_sent[r], received[r] + more_received[r]) * share
        x *= x
        x *= x
        total += x * x
    return P * even * np.sqrt(np.sqrt(np.sqrt(total / P)))


@njit(nogil=True, cache=True)
def _begin(units, home, owner, limits):
    """What ranks use, compute, hold, send and receive, and what it costs; rank P is nobody."""
    out, back, q, k, work, tokens = units
    P, n = len(limits[0]), len(tokens)
    used, load, held = np.zeros((len(out), P), np.int32), np.zeros(P + 1, np.int64), np.zeros(P + 1, np.int64)
    sent, received = np.zeros(P + 1, np.int64), np.zeros(P + 1, np.int64)
    for b in range(n):
        held[home[b]] += tokens[b]
    total, value = np.int64(0), 0.0
    for u in range(len(q)):
        r = owner[u]
        load[r] += work[u]
        for net in (q[u], k[u]):
            h = home[net % n]
            if used[net, r] == 0 and r != h:
                total += _flow(net, h, r, 1, out, back, sent, received)
            used[net, r] += 1
    nothing = np.zeros(P + 1, np.int64)
    value = _peak(sent, received, nothing, nothing, P, limits[5]) if limits[4] else float(total)
    over = 0.0
    for r in range(P):
        over += _over(r, load[r], held[r], limits)
    return (home, owner, used, load, held, sent, received), value, over


@njit(nogil=True, cache=True)
def _bundle(
    u, c, kind, z, out, back, q, k, work, n, rows, columns, by_k, home, owner, used, took, more_sent, more_received
):
    """Of its owner's units: one, those of its row or those of its column go to c. (how many, their work, bytes)."""
    a, count, w, d = owner[u], 0, np.int64(0), np.int64(0)
    if kind < 2:
        took[0] = u
        d += _step(q[u], a, c, home[q[u] % n], 1, used, out, back, more_sent, more_received)
        d += _step(k[u], a, c, home[k[u] % n], 1, used, out, back, more_sent, more_received)
        return 1, work[u], d
    row = kind < 5
    net, other = (q[u], k) if row else (k[u], q)
    some = kind != 2 if row else z % 4 == 0  # those alone that meet c at the other end
    first, last = (rows[net], rows[net + 1]) if row else (columns[net], columns[net + 1])
    for i in range(first, last):
        v = i if row else by_k[i]
        h = home[other[v] % n]
        if owner[v] == a and (not some or h == c):
            took[count] = v
            count += 1
            w += work[v]
            d += _step(other[v], a, c, h, 1, used, out, back, more_sent, more_received)
    if count:
        d += _step(net, a, c, home[net % n], count, used, out, back, more_sent, more_received)
    return count, w, d


@njit(nogil=True, cache=True)
def _moved(b, c, out, back, k, work, n, rows, home, owner, used, took, more_sent, more_received):
    """Block b goes to home c, and the units of its queries that its home owns go with it. (how many, their work, bytes)."""
    half = len(out) // 2
    a, count, w, d = home[b], 0, np.int64(0), np.int64(0)
    for net in range(b, half, n):
        before, own = count, False
        for v in range(rows[half + net], rows[half + net + 1]):
            if owner[v] == a:
                took[count] = v
                count += 1
                w += work[v]
                if k[v] == net:
                    own = True
                else:
                    d += _step(k[v], a, c, home[k[v] % n], 1, used, out, back, more_sent, more_received)
        some = count > before
        d += _resettled(half + net, a, c, some, some, used, out, back, more_sent, more_received)
        d += _resettled(net, a, c, own and used[net, a] == 1, own, used, out, back, more_sent, more_received)
    return count, w, d


@njit(nogil=True, cache=True)
def _commit(a, c, b, count, w, q, k, tokens, home, owner, used, load, held, took):
    """What was weighed is done."""
    for i in range(count):
        u = took[i]
        for net in (q[u], k[u]):
            used[net, a] -= 1
            used[net, c] += 1
        owner[u] = c
    load[a] -= w
    load[c] += w
    if b >= 0:
        held[a] -= tokens[b]
        held[c] += tokens[b]
        home[b] = c


@njit(nogil=True, cache=True)
def _aim(x, y, z, kind, q, k, n, P, rows, columns, by_k, free, home, owner):
    """(unit or block, from, to) of a change."""
    if kind > 5:
        at = x * len(free) >> 20
        b, c = free[at], y * P >> 20
        row = len(rows) // 2 + b
        if z < 128:  # a neighbour's home
            c = home[free[min(max(at + (z & 15) - 8, 0), len(free) - 1)]]
        elif z < 200 and rows[row + 1] > rows[row]:  # that of some of its keys
            c = home[k[rows[row] + (y * (rows[row + 1] - rows[row]) >> 20)] % n]
        return b, home[b], c
    u = x * len(q) >> 20
    c = y * P >> 20
    if z < 96:  # the home of its queries or keys
        c = home[k[u] % n] if z % 3 else home[q[u] % n]
    elif z < 224:  # an owner of the same row or column
        net = q[u] if z % 2 else k[u]
        offsets = rows if z % 2 else columns
        i = offsets[net] + (y * (offsets[net + 1] - offsets[net]) >> 20)
        c = owner[i] if z % 2 else owner[by_k[i]]
    return u, owner[u], c


@njit(nogil=True, cache=True)
def _search(units, by_key, home_before, owner_before, limits, rounds, heat, seed):
    out, back, q, k, work, tokens = units
    (home, owner, used, load, held, sent, received), value, over = _begin(
        units, home_before.copy(), owner_before.copy(), limits
    )
    P, n, largest, even, before = len(limits[0]), len(tokens), limits[4], limits[5], value + over
    rows, (columns, by_k), free = _starts(q, len(out)), by_key, np.flatnonzero(home < P)
    each = P + 1 if largest else 0
    took, more_sent, more_received = np.empty(len(q) + 1, np.int64), np.zeros(each, np.int64), np.zeros(each, np.int64)
    random, low = np.uint64(2 * seed + 1), np.uint64((1 << 20) - 1)
    for t in range(rounds):
        for by in (13, -7, 17):  # xorshift
            random ^= random << np.uint64(by) if by > 0 else random >> np.uint64(-by)
        x, y = np.int64(random & low), np.int64((random >> np.uint64(20)) & low)
        kind, z = (
            np.int64((random >> np.uint64(40)) & np.uint64(7)),
            np.int64((random >> np.uint64(43)) & np.uint64(255)),
        )
        if (len(q) if kind < 6 else len(free)) == 0:
            continue
        which, a, c = _aim(x, y, z, kind, q, k, n, P, rows, columns, by_k, free, home, owner)
        if a == c or c >= P:
            continue
        for r in range(each):
            more_sent[r] = more_received[r] = 0
        b, size = (np.int64(-1), np.int64(0)) if kind < 6 else (which, tokens[which])
        if kind < 6:
            count, w, d = _bundle(
                which,
                c,
                kind,
                z,
                out,
                back,
                q,
                k,
                work,
                n,
                rows,
                columns,
                by_k,
                home,
                owner,
                used,
                took,
                more_sent,
                more_received,
            )
        else:
            count, w, d = _moved(b, c, out, back, k, work, n, rows, home, owner, used, took, more_sent, more_received)
        fined = _over(a, load[a] - w, held[a] - size, limits) + _over(c, load[c] + w, held[c] + size, limits)
        fined -= _over(a, load[a], held[a], limits) + _over(c, load[c], held[c], limits)
        then = _peak(sent, received, more_sent, more_received, P, even) if largest else value + d
        # The last part of the search only descends.
        if then - value + fined <= max(0.0, heat * (0.85 * rounds - t) / rounds):
            _commit(a, c, b, count, w, q, k, tokens, home, owner, used, load, held, took)
            for r in range(each):
                sent[r] += more_sent[r]
                received[r] += more_received[r]
            value, over = then, over + fined
    after = value + over
    return (home, owner, after) if after <= before else (home_before, owner_before, before)
