"""The one executor: runs any AttentionPlan, forward and backward, exactly.

What happens in stage i: wait for its rows, send off those of stage i+1, compute the tiles of stage i while they travel,
merge by log-sum-exp. Backward walks the same stages with the final (out, lse), and each row's dK and dV go straight home
after its last use, in flight during the next stage. Sums and merges are in promote(fp32, dtype), in an order fixed by
the plan, so results repeat bit for bit. With one rank nothing is sent.

Cost per layer beside the kernel calls: one exchange a stage (two in backward), one copy of the rows sent, one merge of
the rows a stage touches. Received KV is kept for backward by default: 2 · rows · h_kv · D values a layer;
`keep=False` receives it again instead. The lowered plan, index tensors and kernel handles are prepared on the plan's
first use and serve all layers.

    >>> import torch
    >>> from equipoise.packing.shards import zigzag
    >>> from equipoise.attention.groups import CpGroups
    >>> from equipoise.attention.ring import ring_plan
    >>> plan = ring_plan(zigzag([0, 5, 8], 1), ranks=(0,))
    >>> q, kv = torch.randn(8, 4, 16), torch.randn(8, 2, 16)
    >>> attend(plan, q, kv, kv, CpGroups(dp=1, cp=1)).shape
    torch.Size([8, 4, 16])
"""

# T query rows at home, S key rows of a buffer, H query heads, K key heads, D head dim.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .agreement import agree
from .groups import CpGroups, Group
from .kernels.contract import Kernel, Rows, add_, covers, kernel_for, merge_, sum_dtype, take
from .plan import AttentionPlan
from .program import Program, lower
from .transport import Freight, Journey, Pair, Travelling
from .ulysses import UlyssesPlan, attend_ulysses


def attend(
    plan: AttentionPlan | UlyssesPlan,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    groups: CpGroups,
    scale: float | None = None,
    *,
    keep: bool = True,
    kernel: str | None = None,
) -> Tensor:
    """Attention of this rank's queries under the plan → out [T, H, D], differentiable. All ranks of the plan call it.

    q_THD, k_TKD, v_TKD: this rank's tokens in the order it holds them, H a multiple of K. scale: of the scores,
    D^-1/2 by default. keep: keep received KV for backward rather than receive it again. kernel: a backend by name
    (kernels/contract.py); None: the device's.

    Raises ValueError, before anything is sent, if tensors do not fit the plan, each other or the groups.
    """
    index = own_index(plan, groups)
    validate(plan.tokens_of(index), q_THD, k_TKD, v_TKD)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    agree(plan, groups, f"q {alike(q_THD)}, k {alike(k_TKD)}, scale={scale}, keep={keep}")
    group, backend = counted(groups, plan.ranks, index, kernel_for(q_THD.device, kernel))
    if isinstance(plan, UlyssesPlan):
        return attend_ulysses(plan, q_THD, k_TKD, v_TKD, group, scale, backend)
    run = _prepared(plan, index, backend, q_THD.device)
    return _Attend.apply(q_THD, k_TKD, v_TKD, run, group, scale, keep)


def counted(groups: CpGroups, ranks: tuple[int, ...], index: int, kernel: Kernel) -> tuple[Group | None, Kernel]:
    """The group of these ranks and the kernel, as they are or with a counter before them."""
    if groups.counter is None:
        return groups[ranks], kernel
    return groups.counter.group(groups[ranks], index), groups.counter.kernel(kernel)


def own_index(plan: AttentionPlan | UlyssesPlan, groups: CpGroups) -> int:
    if groups.rank not in plan.ranks:
        raise ValueError(
            f"Rank {groups.rank} runs a plan of ranks {list(plan.ranks)}; give each rank the plan of its own."
        )
    index = plan.ranks.index(groups.rank)
    if plan.rank not in (None, index):
        raise ValueError(f"The plan was made for index {plan.rank} of ranks {list(plan.ranks)}; this is index {index}.")
    return index


def validate(tokens: int, q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"attend takes q [tokens, heads, dim] and k, v [tokens, kv_heads, dim] alike; got {shapes}.")
    if not q.shape[0] == k.shape[0] == tokens:
        raise ValueError(
            f"The plan gives this rank {tokens} tokens; got {shapes}. Pass this rank's shard, in its order."
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have one head dim; got {shapes}.")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"Query heads must be a multiple of KV heads; got {q.shape[1]} and {k.shape[1]}.")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k, v must have one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}.")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v must be on one device; got {q.device}, {k.device}, {v.device}.")


def alike(x: Tensor) -> str:
    """What all ranks must have alike of a tensor."""
    return f"[tokens, {x.shape[1]}, {x.shape[2]}] {x.dtype}"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Stage:
    tiles: list[tuple[int, Any]]
    """(buffer of the keys, kernel handle)."""
    moves: Freight | None
    returns: Freight | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A plan made ready for one rank, device and backend; shared by all layers."""

    stages: list[_Stage]
    kernel: Kernel
    buffer_rows: list[int]
    read_until: dict[int, int]
    """The last stage during which a received buffer is read or sent on."""

    def journey(self, home: Pair, group: Group | None, kept: dict[int, Tensor] | None = None) -> Journey:
        return Journey([stage.moves for stage in self.stages], self.read_until, home, group, kept)


def _prepared(plan: AttentionPlan, index: int, kernel: Kernel, device: torch.device) -> Run:
    key = (index, kernel, device)
    if key not in plan.cache:
        plan.cache[key] = prepare(lower(plan, index), kernel, device)
    return plan.cache[key]


def prepare(program: Program, kernel: Kernel, device: torch.device) -> Run:
    """What one rank does, with its index tensors and kernel handles on the device."""
    rows = program.buffer_rows
    read_until: dict[int, int] = {}
    for s, stage in enumerate(program.stages):
        # What arrives in stage s leaves its sender during stage s-1.
        sent_on = [(buffer, s - 1) for buffer, _ in stage.moves.picks] if stage.moves else []
        for buffer, at in [*sent_on, *((buffer, s) for buffer, _ in stage.tiles)]:
            read_until[buffer] = max(at, read_until.get(buffer, 0))
    stages = [
        _Stage(
            tiles=[(b, kernel.prepare(tiles, program.tokens, rows[b], device)) for b, tiles in stage.tiles],
            moves=Freight.of(stage.moves, device),
            returns=Freight.of(stage.returns, device),
        )
        for stage in program.stages
    ]
    return Run(stages=stages, kernel=kernel, buffer_rows=rows, read_until=read_until)


def run_forward(
    run: Run, journey: Journey, q: Tensor, scale: float, kept: dict[int, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """→ out [T, H, D] in q's dtype, lse [H, T]. Fills `kept` with the received buffers that tiles read."""
    dtype, (T, H, D) = sum_dtype(q.dtype), q.shape
    out = lse_TH = None
    for s, stage in enumerate(run.stages):
        journey.arrive(s)
        for buffer, handle in stage.tiles:
            part, part_lse = run.kernel.forward(handle, q, *journey.keys(buffer), scale)
            if kept is not None and buffer > 0:
                kept[buffer] = journey.received[buffer]
            if out is None and covers(handle.q_rows, T):
                out, lse_TH = part, part_lse.transpose(0, 1)
                continue
            out = q.new_zeros((T, H, D), dtype=dtype) if out is None else out.to(dtype)
            lse_TH = q.new_full((T, H), -torch.inf, dtype=dtype) if lse_TH is None else lse_TH
            merge_(out, lse_TH, handle.q_rows, part, part_lse.transpose(0, 1))
    if out is None or lse_TH is None:
        return torch.zeros_like(q), q.new_full((H, T), -torch.inf, dtype=dtype)
    return out.to(q.dtype), lse_TH.transpose(0, 1)


def run_backward(
    run: Run, journey: Journey, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """→ dq, dk, dv of the rows at home, in the dtype they were summed in."""
    dtype, k_home = sum_dtype(q.dtype), journey.home[0]
    dq: Tensor | None = None
    grads: dict[int, Pair] = {}
    coming: Travelling | None = None
    empty = k_home.new_empty((0, 2, *k_home.shape[1:]), dtype=dtype)

    def gradients(buffer: int) -> Pair:
        shape = (run.buffer_rows[buffer], *k_home.shape[1:])
        return grads.get(buffer) or (k_home.new_zeros(shape, dtype=dtype), k_home.new_zeros(shape, dtype=dtype))

    def pick(buffer: int, rows: Rows) -> Tensor:
        return torch.stack([take(x, rows).to(dtype) for x in gradients(buffer)], dim=1)

    for s, stage in enumerate(run.stages):
        journey.arrive(s)
        for buffer, handle in stage.tiles:
            dq_part, *parts = run.kernel.backward(handle, dout, q, *journey.keys(buffer), out, lse, scale)
            dq = _plus(dq, len(q), handle.q_rows, dq_part, dtype)
            before = grads.get(buffer, (None, None))
            rows = run.buffer_rows[buffer]
            dk, dv = (_plus(x, rows, handle.k_rows, part, dtype) for x, part in zip(before, parts, strict=True))
            grads[buffer] = (dk, dv)
        if coming is not None:
            grads[0] = coming.land(gradients(0))
        coming = None if stage.returns is None else stage.returns.send(pick, empty, journey.group)
    if coming is not None:
        grads[0] = coming.land(gradients(0))
    dk, dv = gradients(0)
    return torch.zeros_like(q) if dq is None else dq, dk, dv


def _plus(total: Tensor | None, count: int, rows: Rows, part: Tensor, dtype: torch.dtype) -> Tensor:
    """total (None: zeros) with `part` added to some of its `count` rows; in dtype once there is something to sum."""
    if total is None and covers(rows, count):
        return part
    total = part.new_zeros((count, *part.shape[1:]), dtype=dtype) if total is None else total.to(dtype)
    add_(total, rows, part)
    return total


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, run, group, scale, keep):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        kept: dict[int, Tensor] | None = {} if keep else None
        out, lse = run_forward(run, run.journey((k, v), group), q, scale, kept)
        ctx.save_for_backward(q, k, v, out, lse, *(kept or {}).values())
        ctx.kept = None if kept is None else list(kept)
        ctx.run, ctx.group, ctx.scale = run, group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, *buffers = ctx.saved_tensors
        kept = None if ctx.kept is None else dict(zip(ctx.kept, buffers, strict=True))
        journey = ctx.run.journey((k, v), ctx.group, kept)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        grads = run_backward(ctx.run, journey, dout, q, out, lse, ctx.scale)
        return *(x.to(q.dtype) for x in grads), None, None, None, None
