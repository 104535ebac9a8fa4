"""What the ranks of a CP group computed for each token, back in documents: rewards, log-probabilities, embeddings to pool.

A rank holds pieces of documents in an order of its own (zigzag, striped …). Decided here: every rank sends its rows and
their places in the pack to all others, so that each of them has all documents, whole and in the pack's order; fillers and
padding are left out. It is differentiable: the gradient that a rank is given for a document goes back to the ranks that
hold its rows, and what several ranks send for one row is added up, so that it is the gradient of the sum of all ranks'
losses. Where each rank computes the same loss of all documents, and gradients are averaged over ranks as DDP does, that is
the gradient of that loss.

Cost: one exchange of rows forward, one backward, tokens x (P-1)/P rows received by each rank; all documents are held at
once. Labels further ahead than the next token need nothing of this: ``ThdCollator(label_offsets=…)`` cuts them from the
documents, which it has whole.

    >>> import torch
    >>> from equipoise.attention.groups import CpGroups
    >>> batch = {"shard_index": torch.tensor([0, 1, 2, 3, 4]), "cu_seqlens": torch.tensor([0, 3, 5]), "num_docs": 2}
    >>> batch |= {"documents": torch.tensor([7, -1]), "cp_ranks": (0,)}               # the second is a filler
    >>> [x.tolist() for x in gather_documents(torch.arange(5.0), batch, CpGroups(dp=1, cp=1))]
    [[0.0, 1.0, 2.0]]
"""

# T rows at home, N tokens of the pack, padding counted, P ranks of its CP group.
from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .groups import CpGroups, Group
from .kernels.contract import sum_dtype


def gather_documents(outputs: Tensor, batch: Mapping[str, Any], groups: CpGroups) -> list[Tensor]:
    """The rows of each document of the pack, on every rank of its CP group; all of them call it, and backward too.

    outputs: [T, …] any per-token values of this rank, in the order it holds its tokens. batch: a ``ThdBatch``.

    Returns one tensor [tokens of the document, …] for each entry of ``batch.documents`` that is not -1, in that order, of
    outputs' dtype. Raises ValueError on all ranks alike if on one of them outputs do not fit the batch or those of others.
    """
    index, ranks = batch["shard_index"].to(outputs.device), tuple(batch["cp_ranks"])
    tokens = _agreed(outputs, len(index), ranks, groups)
    group = groups[ranks]
    where = _everybodys(index, tokens, group)
    pack = _Gather.apply(outputs, where, tokens, ranks.index(groups.rank), group)
    cu_seqlens = batch["cu_seqlens"].tolist()
    starts = batch["cu_seqlens_padded"].tolist() if "cu_seqlens_padded" in batch else cu_seqlens
    return [
        pack[starts[d] : starts[d] + cu_seqlens[d + 1] - cu_seqlens[d]]
        for d, number in enumerate(batch["documents"].tolist())
        if number >= 0
    ]


def _agreed(outputs: Tensor, held: int, ranks: tuple[int, ...], groups: CpGroups) -> list[int]:
    """Tokens of each rank, once all of them know that everybody's outputs fit."""
    rows, what = outputs.shape[0] if outputs.ndim else -1, f"[…, {list(outputs.shape[1:])}] {outputs.dtype}"
    told = groups.tell(ranks, [rows, held, crc32(f"{what} {outputs.requires_grad}".encode())])
    wrong = {rank: (given, here) for rank, (given, here, _) in zip(ranks, told, strict=True) if given != here}
    if wrong:
        raise ValueError(
            f"outputs have one row per token that a rank holds; (rows, tokens) by rank are {wrong}. Leave out the batch "
            "dimension: outputs[0]."
        )
    if len({alike for _, _, alike in told}) > 1:
        raise ValueError(
            f"outputs must have one shape behind their rows, one dtype and requires_grad alike on ranks {list(ranks)}; "
            f"here they are {what}, requires_grad={outputs.requires_grad}."
        )
    return [here for _, here, _ in told]


def _everybodys(x: Tensor, tokens: list[int], group: Group | None) -> Tensor:
    """The rows [T, …] of all ranks, rank after rank: [N, …]."""
    if group is None:
        return x
    sent, received = torch.cat([x] * len(tokens)), x.new_empty((sum(tokens), *x.shape[1:]))
    group.exchange(sent, [len(x)] * len(tokens), received, tokens).wait()
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, where, tokens, own, group):
        ctx.save_for_backward(where)
        ctx.tokens, ctx.own, ctx.group = tokens, own, group
        return _everybodys(outputs, tokens, group)[torch.argsort(where)]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_pack):
        (where,) = ctx.saved_tensors
        tokens, own = ctx.tokens, ctx.tokens[ctx.own]
        sent = d_pack.index_select(0, where)
        if ctx.group is None:
            return sent, None, None, None, None
        received = sent.new_empty((own * len(tokens), *sent.shape[1:]))
        ctx.group.exchange(sent, tokens, received, [own] * len(tokens)).wait()
        # Rank after rank, so that results repeat bit for bit.
        total = received.unflatten(0, (len(tokens), own)).sum(0, dtype=sum_dtype(sent.dtype))
        return total.to(sent.dtype), None, None, None, None
