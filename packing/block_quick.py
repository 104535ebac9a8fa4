"""A placement of DCP's blocks in milliseconds: from coarse clusters to fine blocks, a few thousand steps each.

1. Runs of a document up to half of an even share of tokens and of work are one cluster, so short documents stay whole and cost
   nothing. Equal runs of the pack and the largest first to the emptiest rank are both searched on (block_rows.py).
2. Where masks are dense (`DENSE` of causal or more) the better of both is searched on at finer and finer clusters, each with all
   its queries' units, and pairs of ranks then share what both receive (block_pairs.py). Where they are sparse, units leave their
   queries' home from the second level on (block_search.py): some rows see all of a document, others next to nothing.
3. Units and blocks are searched at last.

Cost: 1 to 2 ms for 500 to 1,000 units on 16 ranks, 4 ms for 4,400, 25 ms for 34,000.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from .block_graph import BlockGraph
from .block_pairs import paired
from .block_rows import by_rows
from .block_search import searched
from .packs import Int64

LEVELS = (0.51, 0.26, 0.13)
"""Of an even share: the largest clusters of each level but the last, whose clusters are the blocks."""
FIRST, LATER, COLD = 6.0, 4.0, 0.5
"""Thresholds, as block_search.py counts them, of the first level, of later ones, and of equal runs that are to stay so; once units
are placed, half of LATER in the end."""
STEPS = 6000
"""Of each level of clusters."""
PER_UNIT, FEWEST, MOST = 3, 2000, 10_000
"""Steps of each level of units: so many for each, between these; where rows are kept together, STEPS at the most."""
DENSE = 0.3
"""Share of the pairs of causal documents from which rows are kept together."""

UNEVEN = 4
"""Times the mean: the work of a row from which sparse masks, too, begin with the largest clusters."""


def quick(
    graph: BlockGraph, size: Int64, *, work_cap: Int64, token_cap: Int64, largest: bool, even: float, seed: int
) -> tuple[Int64, Int64, float]:
    """(home int64[n], owner int64[groups · m], energy) over parts of so many ranks, int64[P]. The rest is as in `searched`."""
    limits: dict[str, Any] = {
        "work_cap": work_cap,
        "token_cap": token_cap,
        "largest": largest,
        "even": even,
        "seed": seed,
    }
    groups, work = graph.groups, np.bincount(graph.q, graph.pairs, len(graph.tokens)).astype(np.int64)
    long = np.bincount(graph.document, graph.tokens)
    dense = graph.pairs.sum() >= DENSE * (long * (long + 1) / 2).sum()
    uneven = work.max(initial=0) > UNEVEN * work.mean() if len(work) else False
    levels = (*LEVELS, 0.0)[0 if dense or uneven else 1 :]
    home, owner, last = _first(graph, size, work, levels[0], dense, limits), None, 0
    for share in levels[1:]:
        cluster = _clusters(graph, work, size, share)
        coarse = cluster if share else np.arange(len(home))
        if share and coarse[-1] + 1 == last:
            continue
        last = int(coarse[-1]) + 1
        if dense:
            start = home[_firsts(coarse)]
            home = by_rows(graph, coarse, start, rounds=STEPS, heat=LATER, **limits)[0][coarse]
        elif share:
            owner = np.tile(home[graph.q], groups) if owner is None else owner
            home, owner = _units(graph, coarse, home, owner, limits)
    if owner is None:
        owner = np.tile(home[graph.q], groups)
    if dense:
        owner = paired(graph, home, owner, len(size), largest=largest)
    q, k, pairs = graph.units()
    heat = 1.0 if dense else LATER / 2
    return searched(
        graph.nets,
        q,
        k,
        pairs,
        graph.tokens,
        home,
        owner,
        rounds=_steps(graph, STEPS if dense else MOST),
        heat=heat,
        **limits,
    )


def _first(graph: BlockGraph, size: Int64, work: Int64, share: float, dense: bool, limits: dict[str, Any]) -> Int64:
    """Homes of blocks after the coarsest level."""
    cluster = _clusters(graph, work, size, share)
    tokens, pairs = np.bincount(cluster, graph.tokens), np.bincount(cluster, work)
    measure = tokens / max(tokens.sum(), 1) + pairs / max(pairs.sum(), 1)
    order = np.argsort(-measure, kind="stable")
    starts = [(_runs(measure, size), FIRST), (_dealt(measure, tokens, pairs, order, size), FIRST)]
    if not dense:  # neighbours share their windows
        starts.append((starts[0][0], COLD))
    found = [by_rows(graph, cluster, start, rounds=STEPS, heat=heat, **limits) for start, heat in starts]
    return min(found, key=lambda one: one[1])[0][cluster]


def _units(graph: BlockGraph, cluster: Int64, home: Int64, owner: Int64, limits: dict[str, Any]) -> tuple[Int64, Int64]:
    """Homes and owners after a search over clusters and the units between them."""
    coarse, unit = graph.merged(cluster)
    m = len(coarse.q)
    start = np.empty((graph.groups, m), np.int64)
    start[:, unit] = owner.reshape(graph.groups, -1)
    q, k, pairs = coarse.units()
    home, by, _ = searched(
        coarse.nets,
        q,
        k,
        pairs,
        coarse.tokens,
        home[_firsts(cluster)],
        start.ravel(),
        rounds=_steps(graph, MOST),
        heat=LATER,
        **limits,
    )
    return home[cluster], by.reshape(graph.groups, -1)[:, unit].ravel()


def _steps(graph: BlockGraph, most: int) -> int:
    """Of a search over units."""
    return min(max(PER_UNIT * graph.groups * len(graph.q), FEWEST), most)


def _firsts(cluster: Int64) -> Int64:
    """The first block of each cluster."""
    return np.flatnonzero(np.diff(cluster, prepend=-1))


def _clusters(graph: BlockGraph, work: Int64, size: Int64, share: float) -> Int64:
    """Runs of a document of at most so much of an even share of tokens and of work, or one block: that of each, int64[n]."""
    ranks = int(size.sum())
    return _runs_of(
        graph.document, graph.tokens, work, share * float(graph.tokens.sum()) / ranks, share * float(work.sum()) / ranks
    )


def _runs(measure: Int64, size: Int64) -> Int64:
    """The part in whose share the middle of each cluster lies."""
    edges = np.cumsum(size) / size.sum()
    middle = (np.cumsum(measure) - measure / 2) / max(measure.sum(), 1e-9)
    return np.minimum(np.searchsorted(edges, middle, side="right"), len(size) - 1)


@njit(nogil=True, cache=True)
def _runs_of(document, tokens, work, most_tokens, most_work):
    cluster = np.empty(len(document), np.int64)
    at, some, done = -1, 0.0, 0.0
    for b in range(len(document)):
        other = b == 0 or document[b] != document[b - 1]
        if other or some + tokens[b] > most_tokens or done + work[b] > most_work:
            at, some, done = at + 1, 0.0, 0.0
        some += tokens[b]
        done += work[b]
        cluster[b] = at
    return cluster


@njit(nogil=True, cache=True)
def _dealt(measure, tokens, pairs, order, size):
    """Clusters to parts in this order, each to the one that it loads least for its size."""
    P, part = len(size), np.zeros(len(measure), np.int64)
    held, load = np.zeros(P), np.zeros(P)
    all_tokens, all_pairs = max(tokens.sum(), 1.0), max(pairs.sum(), 1.0)
    for v in order:
        best, least = 0, np.inf
        for r in range(P):
            full = max((held[r] + tokens[v]) / all_tokens, (load[r] + pairs[v]) / all_pairs) / size[r]
            if full < least:
                best, least = r, full
        part[v] = best
        held[best] += tokens[v]
        load[best] += pairs[v]
    return part
