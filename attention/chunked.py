"""ChunkFlow's attention (arXiv:2503.02356): one chunk of a document attends to its own rows and to those of the chunks
before it, which are kept in a store.

What is decided: a chunk is a plan of its own over the document so far, in which only its own queries are computed, so that
the one executor runs it, on one rank or sharded over a CP group. Each rank's store (`kv_store.py`) holds the rows that it
held when they were computed; with cp > 1 they go round the ring again for each later chunk, and again in its backward
pass, since keeping what is received would be keeping the document. In backward a chunk leaves what it owes to earlier
rows in the store and takes along what later chunks left for its own: backward passes must run in descending order
(`chunk_run.py` sees to that), and are then exact.

Cost: per chunk and layer one kernel call over all keys so far, and the copy of the chunk's keys and values into the
store. Autograd keeps q, out and lse of the chunk; nothing grows with the document but the store.

    >>> from equipoise.attention.groups import CpGroups
    >>> store = KvStore(2 * 4)
    >>> first, second = chunks_of([whole(4), whole(4)], store, ranks=(0,), rank=0)
    >>> q, kv = torch.randn(8, 4, 16), torch.randn(8, 2, 16)
    >>> for chunk, rows in ((first, slice(0, 4)), (second, slice(4, 8))):
    ...     print(attend_chunk(chunk, 0, q[rows], kv[rows], kv[rows], CpGroups(dp=1, cp=1)).shape)
    torch.Size([4, 4, 16])
    torch.Size([4, 4, 16])
"""

# T query rows of a chunk at home, S rows of the store so far, H query heads, K key heads, D head dim.
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..packing.shards import Shards
from .executor import Run, own_index, prepare, run_backward, run_forward, validate
from .groups import CpGroups
from .kernels.contract import Kernel, kernel_for
from .kv_store import KvStore
from .plan import AttentionPlan, Int64
from .program import Program, lower
from .ring import ring_plan

Home: TypeAlias = "tuple[Int64, Int64]"
"""Offsets int64[P+1] and intervals int64[n, 2] of a chunk: which of its positions, 0 …, each rank holds, in order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A chunk of a document, to be passed to the model as its `plan`."""

    plan: AttentionPlan
    """Over the document up to the chunk's end; its tiles have the chunk's queries only."""
    store: KvStore
    first_row: int
    """Rows of the store before those of this chunk."""
    rows: int
    """Tokens of the chunk that this rank holds."""


def whole(tokens: int) -> Home:
    """The home of a chunk that one rank holds."""
    return np.array([0, 1]), np.array([[0, tokens]])


def chunks_of(homes: list[Home], store: KvStore, ranks: tuple[int, ...], rank: int) -> list[Chunk]:
    """The chunks of one document, in order, as `rank` (an index into `ranks`) runs them on a common store."""
    tokens = [int((home[:, 1] - home[:, 0]).sum()) for _, home in homes]
    starts = list(accumulate(tokens, initial=0))
    segments = np.concatenate([home + start for (_, home), start in zip(homes, starts, strict=False)])
    holder = np.concatenate([np.repeat(np.arange(len(ranks)), np.diff(offsets)) for offsets, _ in homes])
    chunks, first_row = [], 0
    for start, stop in pairwise(starts):
        plan = _plan(segments, holder, start, stop, ranks, rank)
        rows = plan.tokens_of(rank) - first_row
        chunks.append(Chunk(plan=plan, store=store, first_row=first_row, rows=rows))
        first_row += rows
    return chunks


def _plan(segments: Int64, holder: Int64, start: int, stop: int, ranks: tuple[int, ...], rank: int) -> AttentionPlan:
    """A ring over positions 0 … stop - 1 of the document, of which the queries from `start` on are computed."""
    held = np.flatnonzero(segments[:, 0] < stop)
    held = held[np.argsort(holder[held], kind="stable")]
    shards = Shards(
        cu_seqlens=np.array([0, stop]),
        cp_size=len(ranks),
        offsets=np.searchsorted(holder[held], np.arange(len(ranks) + 1)).astype(np.int64),
        segments=segments[held],
        document=np.zeros(len(held), np.int64),
    )
    plan = ring_plan(shards, ranks, rank)
    tiles = plan.tiles[plan.tiles[:, 3] > start]
    tiles[:, 2] = np.maximum(tiles[:, 2], start)
    return replace(plan, tiles=tiles)


def attend_chunk(
    chunk: Chunk,
    layer: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    groups: CpGroups,
    scale: float | None = None,
    *,
    kernel: str | None = None,
) -> Tensor:
    """Attention of the chunk's queries to all rows up to theirs → out [T, H, D], differentiable.

    layer: under which number the store keeps k and v. The rest is as in `attend`. All ranks of the plan call it, forward in
    ascending and backward in descending order of a document's chunks.
    """
    index = own_index(chunk.plan, groups)
    validate(chunk.rows, q_THD, k_TKD, v_TKD)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    run = _prepared(chunk, index, kernel_for(q_THD.device, kernel), q_THD.device)
    return _AttendChunk.apply(q_THD, k_TKD, v_TKD, chunk, layer, run, groups[chunk.plan.ranks], scale)


def _prepared(chunk: Chunk, index: int, kernel: Kernel, device: torch.device) -> Run:
    cache, key = chunk.plan.cache, ("chunk", index, kernel, device)
    if key not in cache:
        cache[key] = prepare(_queries_from(chunk.first_row, chunk.rows, lower(chunk.plan, index)), kernel, device)
    return cache[key]


def _queries_from(first_row: int, rows: int, program: Program) -> Program:
    """The same with query addresses that count from `first_row` at home, where the chunk's queries begin."""
    shift = np.array([first_row, first_row, 0, 0, first_row, first_row])
    stages = [replace(stage, tiles=[(b, tiles - shift) for b, tiles in stage.tiles]) for stage in program.stages]
    return replace(program, stages=stages, tokens=rows)


class _AttendChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, chunk, layer, run, group, scale):
        q = q if q.stride(-1) == 1 else q.contiguous()
        home = chunk.store.write(layer, chunk.first_row, k, v)
        out, lse = run_forward(run, run.journey(home, group), q, scale, None)
        ctx.save_for_backward(q, out, lse)
        ctx.chunk, ctx.layer, ctx.run, ctx.group, ctx.scale = chunk, layer, run, group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, out, lse = ctx.saved_tensors
        chunk, dout = ctx.chunk, dout if dout.stride(-1) == 1 else dout.contiguous()
        home = chunk.store.read(ctx.layer, chunk.first_row + chunk.rows)
        journey = ctx.run.journey(home, ctx.group)
        dq, dk, dv = run_backward(ctx.run, journey, dout, q, out, lse, ctx.scale)
        dk, dv = chunk.store.add(ctx.layer, chunk.first_row, dk, dv)
        return *(x.to(q.dtype) for x in (dq, dk, dv)), None, None, None, None, None
