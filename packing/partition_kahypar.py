"""DCP's hypergraph partitioned by Mt-KaHyPar (extra `solvers`): a fixed seed and one thread, so that all ranks find the same.

As DCP states it, with one weight for two limits: a unit weighs its pairs, a data vertex its tokens, so heavily that tokens come
first; a part may weigh what dealing the blocks out by LPT gives the fullest part, and 1 + balance times its share of the pairs. Where
blocks are of unequal length a part with room for some tokens has room for any number of pairs: what this leaves out of balance
is for the search behind it to repair.

Cost: 0.05 to 0.7 s for 1,000 to 16,000 units in 16 parts, 2 to 3 s for 34,000.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .block_graph import BlockGraph
from .packs import Int64

TOKENS, PAIRS = 1_900_000_000, 20_000_000
"""Weights of all tokens and of all pairs: together below 2**31, which is what Mt-KaHyPar adds up in."""
BYTES = 45_000
"""The largest weight of a net."""


def partitioned(graph: BlockGraph, size: Int64, balance: float, seed: int) -> tuple[Int64, Int64]:
    """(home int64[n], owner int64[groups · m]) of blocks and units over parts of so many ranks each, int64[P].

    Raises ImportError where mtkahypar is not installed.
    """
    try:
        import mtkahypar
    except ImportError as missing:
        raise ImportError('solver="mtkahypar" needs mtkahypar: pip install "equipoise[solvers]"') from missing
    q, k, pairs = graph.units()
    n, count = len(graph.tokens), len(q)
    work = np.maximum(np.rint(pairs * (PAIRS / max(int(pairs.sum()), 1))), 1).astype(np.int64)
    data = np.maximum(np.rint(graph.tokens * (TOKENS / int(graph.tokens.sum()))), 1).astype(np.int64)
    nets, weight = _nets(graph, q, k)
    mtkahypar.set_seed(seed)
    solver = mtkahypar.initialize(1, False)
    context = solver.context_from_preset(mtkahypar.PresetType.QUALITY)
    context.set_partitioning_parameters(len(size), balance, mtkahypar.Objective.KM1)
    target = _dealt(data, size) + np.ceil((1 + balance) * work.sum() / size.sum() * size).astype(np.int64)
    context.set_individual_target_block_weights(target.tolist())
    context.logging = False
    vertices = np.concatenate([data, work]).tolist()
    part = solver.create_hypergraph(context, n + count, len(nets), nets, vertices, weight).partition(context)
    found = np.array(part.get_partition(), np.int64)
    return found[:n], found[n:]


def _nets(graph: BlockGraph, q: Int64, k: Int64) -> tuple[list[list[int]], list[int]]:
    """(vertices of each net, its weight); a vertex is a block, or n + a unit. Nets without a unit are left out."""
    n, (out, back) = len(graph.tokens), graph.nets
    net = np.concatenate([k, q])
    order = np.argsort(net, kind="stable")
    unit = (np.tile(np.arange(len(q)), 2)[order] + n).tolist()
    offsets = np.searchsorted(net[order], np.arange(len(out) + 1)).tolist()
    some = [(at, a, b) for at, (a, b) in enumerate(pairwise(offsets)) if b > a]
    weight = np.maximum(np.rint((out + back) * (BYTES / max(int((out + back).max()), 1))), 1).astype(np.int64)
    return [[at % n, *unit[a:b]] for at, a, b in some], [int(weight[at]) for at, _, _ in some]


def _dealt(data: Int64, size: Int64) -> Int64:
    """What each part holds once blocks are dealt out, the largest first, each to the part that is emptiest for its size."""
    held = np.zeros(len(size), np.int64)
    for weight in np.sort(data)[::-1].tolist():
        held[np.argmin((held + weight) / size)] += weight
    return held
