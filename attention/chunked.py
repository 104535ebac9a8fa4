"""ChunkFlow's attention (arXiv:2503.02356): one chunk of a document attends to its own rows and to those of the chunks
before it, which are kept in a store.

What is decided: a chunk is a plan over the document so far (`chunk_plan.py`), so that the one executor runs it, on one
rank or sharded over a CP group; its keys and values are the store's (`kv_store.py`). With cp > 1 they go round the ring
again in the chunk's backward pass, since keeping what was received would be keeping the document. In backward a chunk
leaves what it owes to earlier rows in the store and takes along what later chunks left for its own: backward passes must
run in descending order (`chunk_run.py` sees to that), and are then exact.

Cost: per chunk and layer one kernel call over all keys so far, and the copy of the chunk's keys and values into the
store. Autograd keeps q, out and lse of the chunk; nothing grows with the document but the store.

    >>> from equipoise.attention.groups import CpGroups
    >>> first, second = chunks_of([Home.whole([0, 4]), Home.whole([0, 4])], ranks=(0,), rank=0)
    >>> q, kv = torch.randn(8, 4, 16), torch.randn(8, 2, 16)
    >>> for chunk, rows in ((first, slice(0, 4)), (second, slice(4, 8))):
    ...     print(attend_chunk(chunk, 0, q[rows], kv[rows], kv[rows], CpGroups(dp=1, cp=1)).shape)
    torch.Size([4, 4, 16])
    torch.Size([4, 4, 16])
"""

# T query rows of a chunk at home, S rows of the store so far, H query heads, K key heads, D head dim, V that of values.
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .agreement import agree
from .chunk_plan import Home, chunk_plans
from .executor import counted, own_index, terms, validate
from .groups import CpGroups
from .kernels.contract import Kernel, Scores, kernel_for
from .kv_store import KvStore
from .plan import AttentionPlan
from .program import Program, lower
from .sinks import check_sinks, sink_gradients
from .stages import Run, prepare, run_backward, run_forward


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A chunk of a document, to be passed to the model as its `plan`."""

    plan: AttentionPlan
    """Over the document up to the chunk's end; its tiles have the chunk's queries only."""
    store: KvStore
    """Common to the chunks of the document."""
    first_row: int
    """Rows of the store before those of this chunk."""
    rows: int
    """Tokens of the chunk that this rank holds."""


def chunks_of(homes: list[Home], ranks: tuple[int, ...], rank: int) -> list[Chunk]:
    """The chunks of one document, in order, as `rank` (an index into `ranks`) runs them; their store is empty."""
    plans = chunk_plans(homes, ranks, rank)
    ends = [plan.tokens_of(rank) for plan in plans]
    store = KvStore(ends[-1])
    return [
        Chunk(plan=plan, store=store, first_row=start, rows=end - start)
        for plan, start, end in zip(plans, [0, *ends], ends, strict=False)
    ]


@torch.compiler.disable
def attend_chunk(
    chunk: Chunk,
    layer: int,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKV: Tensor,
    groups: CpGroups,
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Attention of the chunk's queries to all rows up to theirs → out [T, H, V], differentiable.

    layer: under which number the store keeps k and v. The rest is as in `attend`; under a window as many rows travel as
    without. All ranks of the plan call it, forward in ascending and backward in descending order of a document's chunks.
    """
    index = own_index(chunk.plan, groups)
    validate(chunk.rows, q_THD, k_TKD, v_TKV)
    check_sinks(sinks_H, q_THD)
    scores = Scores(scale=q_THD.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap)
    backend = kernel_for(q_THD.device, kernel)
    backend.check(q_THD, v_TKV, scores)
    plan = chunk.plan if window is None else chunk.plan.windowed(window)
    agree(plan, groups, f"chunk, {terms(q_THD, k_TKD, v_TKV, scores, sinks_H)}")
    group, backend = counted(groups, plan.ranks, index, backend)
    run = _prepared(plan, chunk, index, backend, q_THD.device)
    return _AttendChunk.apply(q_THD, k_TKD, v_TKV, sinks_H, chunk, layer, run, group, scores)


def _prepared(plan: AttentionPlan, chunk: Chunk, index: int, kernel: Kernel, device: torch.device) -> Run:
    cache, key = plan.cache, ("chunk", index, kernel, device)
    if key not in cache:
        cache[key] = prepare(_queries_from(chunk.first_row, chunk.rows, lower(plan, index)), kernel, device)
    return cache[key]


def _queries_from(first_row: int, rows: int, program: Program) -> Program:
    """The same with query addresses that count from `first_row` at home, where the chunk's queries begin."""
    shift = np.array([first_row, first_row, 0, 0, first_row, first_row])
    stages = [replace(stage, tiles=[(q, b, tiles - shift) for q, b, tiles in stage.tiles]) for stage in program.stages]
    return replace(program, stages=stages, q_rows=[rows, *program.q_rows[1:]])


class _AttendChunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, chunk, layer, run, group, scores):
        q = q if q.stride(-1) == 1 else q.contiguous()
        home = chunk.store.write(layer, chunk.first_row, k, v)
        out, lse = run_forward(run, run.journey(home, group), q, scores, None, sinks)
        ctx.save_for_backward(q, sinks, out, lse)
        ctx.chunk, ctx.layer, ctx.run, ctx.group, ctx.scores = chunk, layer, run, group, scores
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, sinks, out, lse = ctx.saved_tensors
        chunk, dout = ctx.chunk, dout if dout.stride(-1) == 1 else dout.contiguous()
        home = chunk.store.read(ctx.layer, chunk.first_row + chunk.rows)
        journey = ctx.run.journey(home, ctx.group)
        dq, dk, dv = run_backward(ctx.run, journey, dout, q, out, lse, ctx.scores)
        dk, dv = chunk.store.add(ctx.layer, chunk.first_row, dk, dv)
        d_sinks = None if sinks is None else sink_gradients(sinks, dout, out, lse.transpose(0, 1))
        return *(x.to(q.dtype) for x in (dq, dk, dv)), d_sinks, None, None, None, None, None
