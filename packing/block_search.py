"""The search that places DCP's blocks and units: changes at random with a fixed seed, accepted while fewer bytes travel.

Threshold accepting, as in dispatch_search.py: a change is accepted if it costs no more than a threshold that falls to zero.
Five changes: a unit to another owner; the units that an owner has of a row (the same queries) or of a column (the same keys) to
another; a block to another home, with the units of its queries that its home computes; two blocks exchanged so. How often each rank
uses each net is counted, so that what a unit costs or saves is known in O(1).

The objective is the bytes of all ranks, or those of the rank that moves most, the larger of what it sends and receives, smoothed:
the 8th power mean over the ranks, so that it falls also where several ranks are nearly the largest. Ranks over their work or their
tokens pay a fine, steep enough that bytes are not worth it.

Cost: 0.3 to 1 µs a round, more where rows are long.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .packs import Int64

FINE = 16.0
"""Even shares of KV bytes that a rank pays for an even share of work, or a quarter of one of tokens, too many."""
HEAT = 40
"""The first threshold: what an even share of the tokens weighs as KV, over this."""


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
    """(home int64[n], owner int64[u], energy) after the search.

    nets: bytes from and to home, int64[nets]; q, k: nets of each unit, int64[u], those of a block being its number modulo n.
    work: int64[u]; tokens: int64[n]. home: rank of each block, or P, which is nobody here. work_cap, token_cap: int64[P].
    even: bytes that thresholds and fines are measured in.
    """
    n = len(tokens)
    by_k = np.argsort(k, kind="stable")
    by_q = np.argsort(q, kind="stable")
    rows = np.searchsorted(q[by_q], np.arange(len(nets[0]) + 1))
    columns = np.searchsorted(k[by_k], np.arange(len(nets[0]) + 1))
    home, owner = home.astype(np.int64), owner.astype(np.int64)
    free = np.flatnonzero(home < len(work_cap))
    args = (nets[0], nets[1], q, k, work, tokens)
    lists = (by_q, rows, by_k, columns, free)
    found_home, found_owner, before, after = _search(
        args,
        lists,
        home.copy(),
        owner.copy(),
        work_cap,
        token_cap,
        largest,
        float(even),
        rounds if n and len(work_cap) > 1 else 0,
        float(heat * even / HEAT),
        seed,
    )
    return (found_home, found_owner, after) if after <= before else (home, owner, before)


@njit(nogil=True, cache=True)
def _flow(net, h, r, step, out, back, sent, received):
    """Rank r begins (1) or ceases (-1) to use a net whose home is h."""
    sent[h] += step * out[net]
    received[r] += step * out[net]
    sent[r] += step * back[net]
    received[h] += step * back[net]


@njit(nogil=True, cache=True)
def _own(u, to, args, home, owner, used, load, sent, received):
    """Unit u goes to another owner."""
    out, back, q, k, work, tokens = args
    a = owner[u]
    for net in (q[u], k[u]):
        h = home[net % len(tokens)]
        used[net, a] -= 1
        if used[net, a] == 0 and a != h:
            _flow(net, h, a, -1, out, back, sent, received)
        if used[net, to] == 0 and to != h:
            _flow(net, h, to, 1, out, back, sent, received)
        used[net, to] += 1
    load[a] -= work[u]
    load[to] += work[u]
    owner[u] = to


@njit(nogil=True, cache=True)
def _settle(b, to, args, home, used, held, sent, received):
    """Block b goes to another home."""
    out, back, tokens = args[0], args[1], args[5]
    a = home[b]
    for net in range(b, len(out), len(tokens)):
        for r in range(used.shape[1]):
            if used[net, r] > 0:
                if r != a:
                    _flow(net, a, r, -1, out, back, sent, received)
                if r != to:
                    _flow(net, to, r, 1, out, back, sent, received)
    held[a] -= tokens[b]
    held[to] += tokens[b]
    home[b] = to


@njit(nogil=True, cache=True)
def _energy(load, held, sent, received, work_cap, token_cap, largest, even):
    P, bytes_, over = len(work_cap), 0.0, 0.0
    share, part = max(work_cap.sum() / P, 1.0), max(token_cap.sum() / P, 1.0)
    for r in range(P):
        over += max(0.0, (load[r] - work_cap[r]) / share) + 4.0 * max(0.0, (held[r] - token_cap[r]) / part)
        if largest:
            x = max(sent[r], received[r]) / even
            x *= x
            x *= x
            bytes_ += x * x
        else:
            bytes_ += received[r]
    if largest:
        bytes_ = P * even * np.sqrt(np.sqrt(np.sqrt(bytes_ / P)))
    else:
        bytes_ += received[P]
    return bytes_ + FINE * even * P**0.5 * over


@njit(nogil=True, cache=True)
def _bundle(units, a, to, args, state, journal, count):
    """Those of `units` that rank a owns go to another; what was done is written down."""
    home, owner, used, load, _, sent, received = state
    for u in units:
        if owner[u] == a:
            _own(u, to, args, home, owner, used, load, sent, received)
            journal[count] = u
            count += 1
    return count


@njit(nogil=True, cache=True)
def _follow(b, to, args, lists, state, journal, count):
    """Block b goes to another home, and the units of its queries that its home owns go with it."""
    home, _, used, _, held, sent, received = state
    by_q, rows = lists[0], lists[1]
    a, n = home[b], len(args[5])
    for net in range(len(args[0]) // 2 + b, len(args[0]), n):
        count = _bundle(by_q[rows[net] : rows[net + 1]], a, to, args, state, journal, count)
    _settle(b, to, args, home, used, held, sent, received)
    return count


@njit(nogil=True, cache=True)
def _begin(args, home, owner, P):
    """What ranks use, compute, hold, send and receive; rank P is nobody."""
    out, back, q, k, work, tokens = args
    used, load, held = np.zeros((len(out), P), np.int32), np.zeros(P + 1, np.int64), np.zeros(P + 1, np.int64)
    sent, received = np.zeros(P + 1, np.int64), np.zeros(P + 1, np.int64)
    for b in range(len(tokens)):
        held[home[b]] += tokens[b]
    for u in range(len(q)):
        r = owner[u]
        load[r] += work[u]
        for net in (q[u], k[u]):
            h = home[net % len(tokens)]
            if used[net, r] == 0 and r != h:
                _flow(net, h, r, 1, out, back, sent, received)
            used[net, r] += 1
    return home, owner, used, load, held, sent, received


@njit(nogil=True, cache=True)
def _pass_units(x, y, z, kind, args, lists, state, journal):
    """Units go to another owner: one, or all that its owner has of a row or column. (their number or -1, from, to)."""
    q, k, n, P = args[2], args[3], len(args[5]), state[2].shape[1]
    by_q, rows, by_k, columns, _ = lists
    home, owner, used, load, _, sent, received = state
    u = x * len(q) >> 20
    a, net = owner[u], q[u] if z % 2 else k[u]
    if z < 96:  # to the home of its queries or keys
        to = home[net % n]
    elif z < 224:  # to an owner of the same row or column
        units = by_q[rows[net] : rows[net + 1]] if z % 2 else by_k[columns[net] : columns[net + 1]]
        to = owner[units[y * len(units) >> 20]]
    else:
        to = y * P >> 20
    if to == a or to >= P:
        return -1, a, to
    if kind < 2:
        _own(u, to, args, home, owner, used, load, sent, received)
        journal[0] = u
        return 1, a, to
    net = k[u] if kind == 3 else q[u]
    units = by_k[columns[net] : columns[net + 1]] if kind == 3 else by_q[rows[net] : rows[net + 1]]
    return _bundle(units, a, to, args, state, journal, np.int64(0)), a, to


@njit(nogil=True, cache=True)
def _pass_blocks(x, y, z, kind, args, lists, state, journal):
    """A block goes to another home, or two are exchanged. (units that went, how many of them with the first or -1, blocks, homes)."""
    home, free, P = state[0], lists[4], state[2].shape[1]
    first = x * len(free) >> 20
    second = y * len(free) >> 20
    if z % 4 > 0:  # a neighbour
        second = min(max(first + z // 4 % 16 - 8, 0), len(free) - 1)
    b, c = free[first], free[second]
    a, to = home[b], home[c]
    if kind == 7 and z % 16 == 0:
        to = y * P >> 20
    if a == to:
        return -1, -1, b, c, a, to
    moved = count = _follow(b, to, args, lists, state, journal, np.int64(0))
    if kind == 6:
        count = _follow(c, a, args, lists, state, journal, count)
    return count, moved, b, c, a, to


@njit(nogil=True, cache=True)
def _undo(count, moved, b, c, a, to, kind, args, state, journal):
    """What was passed goes back; last in, first out, since a unit may have gone twice."""
    home, owner, used, load, held, sent, received = state
    if kind == 6:
        _settle(c, to, args, home, used, held, sent, received)
        for i in range(count - 1, moved - 1, -1):
            _own(journal[i], to, args, home, owner, used, load, sent, received)
        count = moved
    if kind > 4:
        _settle(b, a, args, home, used, held, sent, received)
    for i in range(count - 1, -1, -1):
        _own(journal[i], a, args, home, owner, used, load, sent, received)


@njit(nogil=True, cache=True)
def _search(args, lists, home, owner, work_cap, token_cap, largest, even, rounds, heat, seed):
    state = _begin(args, home, owner, len(work_cap))
    home, owner, _, load, held, sent, received = state
    now = before = _energy(load, held, sent, received, work_cap, token_cap, largest, even)
    num_units, num_free = len(args[2]), len(lists[4])
    journal = np.empty(2 * num_units + 2, np.int64)
    random, low = np.uint64(2 * seed + 1), np.uint64((1 << 20) - 1)
    for t in range(rounds):
        for by in (13, -7, 17):  # xorshift
            random ^= random << np.uint64(by) if by > 0 else random >> np.uint64(-by)
        x = np.int64(random & low)
        y = np.int64((random >> np.uint64(20)) & low)
        kind = np.int64((random >> np.uint64(40)) & np.uint64(7))
        z = np.int64((random >> np.uint64(43)) & np.uint64(255))
        moved = b = c = np.int64(-1)
        if kind < 5 and num_units:
            count, a, to = _pass_units(x, y, z, kind, args, lists, state, journal)
        elif kind > 4 and num_free:
            count, moved, b, c, a, to = _pass_blocks(x, y, z, kind, args, lists, state, journal)
        else:
            continue
        if count < 0:
            continue
        then = _energy(load, held, sent, received, work_cap, token_cap, largest, even)
        # The last part of the search only descends.
        if then - now <= max(0.0, heat * (0.85 * rounds - t) / rounds):
            now = then
        else:
            _undo(count, moved, b, c, a, to, kind, args, state, journal)
    return home, owner, before, now
