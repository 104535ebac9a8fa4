"""KV gather as a plan: each rank receives all the KV that its queries need at once, straight from home (Llama 3, WLB-LLM,
Megatron-LM's all-gather).

What is decided: stage 0 computes on what is at home while the rest travels, stage 1 on everything received. Rows that no
query of the receiver attends to are left out, where an all-gather sends them to everybody. Beside a ring without forwarding
the bytes are the same: there is one exchange and one pass over the received rows instead of P-1, but all of them are held
at once, and only what is at home hides the transfer.

Two options bound that memory, both with `attend(keep=False)`, which drops rows once they are used. With `chunks` the rows of
1/chunks of the other ranks arrive in each stage, from one stage to the P-1 of a ring without forwarding. With `head_chunks`
(Llama 3's `heads_k_stride`) 1/head_chunks of the KV heads are gathered and computed at a time, the next ones under way
meanwhile, so two such parts are held: as many kernel calls more, of as many heads less, and no more rows or merges.

Cost: causal.py's.

    >>> from equipoise.packing.shards import contiguous
    >>> gather_plan(contiguous([0, 6], 3), ranks=(0, 1, 2)).moves[:, [0, 2, 3, 4, 5]]   # stage, from, to, rows
    array([[1, 0, 2, 0, 2],
           [1, 0, 1, 0, 2],
           [1, 1, 2, 2, 4]])
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..packing.shards import Shards
from .causal import causal_plan
from .plan import AttentionPlan


def gather_plan(
    shards: Shards,
    ranks: tuple[int, ...],
    rank: int | None = None,
    *,
    skip: bool = True,
    chunks: int = 1,
    head_chunks: int = 1,
) -> AttentionPlan:
    """Lower any shards of causal documents to a gather of KV.

    ranks: rank numbers of the domain, one per shard. rank: index of the rank whose part is wanted; None: all of it.
    skip: leave out rows that no query of the receiver needs; False sends all of them to everybody, an all-gather.
    chunks: stages in which rows arrive; at most one per other rank is of use. head_chunks: turns in which
    KV heads are gathered; at most one per KV head is of use.
    """
    if min(chunks, head_chunks) < 1:
        raise ValueError(
            f"A gather takes at least one stage and one turn; got chunks={chunks}, head_chunks={head_chunks}."
        )
    others = max(shards.cp_size - 1, 1)
    stage_of = -(-np.arange(shards.cp_size) * min(chunks, others) // others)
    plan = causal_plan(shards, ranks, rank, stage_of, forward=False, skip=skip)
    return replace(plan, head_chunks=head_chunks)
