"""Ring attention as a plan: in stage s every rank computes on the KV whose home is s ranks back (Liu et al. 2023, varlen).

What is decided: how the rows get there, while those of the next stage are already on their way. With `forward`, the
classic ring, they are passed on by the neighbour and travel no further than the last rank that needs them: one link is
used, and ranks in between carry what they do not need. Without, each row goes from its home straight to every rank that
needs it, in the stage in which it is used: what is received is what is needed, over links between any two ranks. For one
document both are the whole ring, (P-1)·tokens/P rows a rank; a document that one rank holds alone never leaves it.

Cost: causal.py's. `benchmarks/traffic.py` shows what either moves for each layout; packs of many documents cut per
sequence are where forwarding costs most, twice the rows.

    >>> from equipoise.packing.shards import contiguous
    >>> shards = contiguous([0, 6], 3)
    >>> ring_plan(shards, ranks=(0, 1, 2)).moves[:, [0, 2, 3, 4, 5]]                    # stage, from, to, rows
    array([[1, 0, 1, 0, 2],
           [1, 1, 2, 2, 4],
           [2, 1, 2, 0, 2]])
    >>> ring_plan(shards, ranks=(0, 1, 2), forward=False).moves[2, [0, 2, 3, 4, 5]]
    array([2, 0, 2, 0, 2])
"""

from __future__ import annotations

import numpy as np

from ..packing.shards import Shards
from .causal import causal_plan
from .plan import AttentionPlan


def ring_plan(
    shards: Shards, ranks: tuple[int, ...], rank: int | None = None, *, skip: bool = True, forward: bool = True
) -> AttentionPlan:
    """Lower any shards of causal documents to a ring.

    ranks: rank numbers of the domain, one per shard. rank: index of the rank whose part is wanted; None: all of it.
    skip: leave out rows that nobody ahead needs; False sends everything round, which is what a plain ring does.
    forward: pass rows on from neighbour to neighbour; False: straight from home to who needs them.
    """
    return causal_plan(shards, ranks, rank, np.arange(shards.cp_size), forward=forward, skip=skip)
