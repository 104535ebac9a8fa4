"""Divisions: in which stage each unit of a placement is computed, so that one stage computes while the next one's rows travel (DCP).

Stage 0 is all work that needs nothing from elsewhere. Then, division by division, the rank with the least to do in it takes the
heaviest of its pending units whose rows still fit: what a rank sends and what it receives in a division is limited to 1.2 times
its own mean over the divisions, or that of all ranks if it is more, and one net fits always. Behind them come the units that need nothing
more. The last division takes what is left. Rows stay where they arrived, so a unit costs what has not come yet.

DCP's code limits what is sent between nodes only, and lets a rank that sends much pile it up in the last division.

Cost: divisions x units, 1 ms for 10,000.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .packs import Int64
from .partition import Placement

SLACK = 1.2


def stages(placement: Placement, divisions: int) -> Int64:
    """The stage of each unit, int64[groups · m], 0 … divisions."""
    graph, home, owner = placement.graph, placement.home, placement.owner
    q, k, pairs = graph.units()
    order = np.lexsort((-pairs, owner))
    P = placement.shards.cp_size
    offsets = np.searchsorted(owner[order], np.arange(P + 1))
    return _staged(q, k, pairs, owner, home, graph.nets[0], order, offsets, divisions, SLACK)


@njit(nogil=True, cache=True)
def _missing(net, r, home, n, there):
    """Whether rank r does not have the rows of a net."""
    return home[net % n] != r and not there[net, r]


@njit(nogil=True, cache=True)
def _fits(nets, r, home, n, there, rows, sent, received, send_limit, receive_limit):
    """Whether the rows that are missing still fit into what rank r receives and what their homes send."""
    total = np.int64(0)
    for net in nets:
        if _missing(net, r, home, n, there):
            total += rows[net]
            h = home[net % n]
            if sent[h] > 0 and sent[h] + rows[net] > send_limit[h]:
                return False
    return total == 0 or received[r] == 0 or received[r] + total <= receive_limit[r]


@njit(nogil=True, cache=True)
def _take(nets, r, home, n, there, rows, sent, received):
    for net in nets:
        if _missing(net, r, home, n, there):
            there[net, r] = True
            sent[home[net % n]] += rows[net]
            received[r] += rows[net]


@njit(nogil=True, cache=True)
def _staged(q, k, pairs, owner, home, rows, order, offsets, divisions, slack):
    n, P = len(home), len(offsets) - 1
    stage, there = np.full(len(q), -1, np.int64), np.zeros((len(rows), P), np.bool_)
    sent, received = np.zeros(P, np.int64), np.zeros(P, np.int64)
    for u in range(len(q)):
        if home[q[u] % n] == owner[u] and home[k[u] % n] == owner[u]:
            stage[u] = 0
        else:
            _take((q[u], k[u]), owner[u], home, n, there, rows, sent, received)
    mean = sent.sum() / P
    send_limit = np.maximum(sent, mean) * (slack / divisions)
    receive_limit = np.maximum(received, mean) * (slack / divisions)
    there[:] = False
    for division in range(1, divisions + 1):
        sent[:] = 0
        received[:] = 0
        at, ready = offsets[:-1].copy(), np.zeros(P, np.int64)
        while True:
            r: Any = np.int64(-1)
            for x in range(P):
                if at[x] < offsets[x + 1] and (r < 0 or ready[x] < ready[r]):
                    r = x
            if r < 0:
                break
            u = order[at[r]]
            at[r] += 1
            nets = (q[u], k[u])
            if stage[u] >= 0:
                continue
            if division == divisions or _fits(nets, r, home, n, there, rows, sent, received, send_limit, receive_limit):
                _take(nets, r, home, n, there, rows, sent, received)
                stage[u] = division
                ready[r] += pairs[u]
        for u in range(len(q)):
            r = owner[u]
            if stage[u] < 0 and not (_missing(q[u], r, home, n, there) or _missing(k[u], r, home, n, there)):
                stage[u] = division
    return stage
