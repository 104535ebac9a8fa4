"""The one executor: runs any AttentionPlan, forward and backward, exactly.

What happens in stage i: wait for its rows, send off those of stage i+1, compute the tiles of stage i while they travel,
merge by log-sum-exp. Backward walks the same stages with the final (out, lse), and each row's dK and dV go straight home
after its last use, in flight during the next stage. Sums and merges are in promote(fp32, dtype), in an order fixed by
the plan, so results repeat bit for bit. With one rank nothing is sent.

Cost per layer beside the kernel calls: one exchange a stage (two in backward), one copy of the rows sent, one merge of
the rows a stage touches. Received KV is kept for backward by default: rows · h_kv · (D + V) values a layer;
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

# T query rows at home, S key rows of a buffer, H query heads, K key heads, D head dim, V that of values.
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .agreement import agree
from .groups import CpGroups, Group
from .heads import Turn, turns
from .kernels.contract import Kernel, Rows, Scores, add_, covers, kernel_for, merge_, sum_dtype
from .plan import AttentionPlan
from .program import Program, lower
from .sinks import check_sinks, sink_gradients, with_sinks
from .trade import Trade, to_heads, to_tokens
from .transport import Freight, Journey, Pair, Travelling, no_rows, side_by_side
from .ulysses import UlyssesPlan


@torch.compiler.disable
def attend(
    plan: AttentionPlan | UlyssesPlan,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKV: Tensor,
    groups: CpGroups,
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    keep: bool = True,
    kernel: str | None = None,
) -> Tensor:
    """Attention of this rank's queries under the plan → out [T, H, V], differentiable. All ranks of the plan call it.

    q_THD, k_TKD, v_TKV: this rank's tokens in the order it holds them, H a multiple of K; values may have another head
    dim than queries and keys.

    Args:
        scale: of the scores; D^-1/2 by default.
        window: a query sees its document's last `window` keys, itself among them (Hugging Face's `sliding_window`); None:
            all. Layers with and without share one plan: `AttentionPlan.windowed` says what then moves.
        softcap: bounds scores to softcap · tanh(score / softcap), where the kernel can; None: not.
        sinks_H: a score per head that takes part in the softmax and has no value, differentiable. A rank's gradient is
            that of its own part, to be summed over ranks as DDP and FSDP do with any parameter's.
        keep: keep received KV for backward rather than receive it again.
        kernel: a backend by name (kernels/contract.py); None: the device's.

    Raises ValueError, before anything is sent, if tensors do not fit the plan, each other or the groups, or the kernel
    cannot do what is asked.
    """
    index = own_index(plan, groups)
    validate(plan.tokens_of(index), q_THD, k_TKD, v_TKV)
    check_sinks(sinks_H, q_THD)
    scores = Scores(scale=q_THD.shape[-1] ** -0.5 if scale is None else scale, softcap=softcap)
    backend = kernel_for(q_THD.device, kernel)
    backend.check(q_THD, v_TKV, scores)
    if window is not None:
        plan = plan.windowed(window)
    agree(plan, groups, f"{terms(q_THD, k_TKD, v_TKV, scores, sinks_H)}, keep={keep}")
    heads, kv_heads, device = q_THD.shape[1], k_TKD.shape[1], q_THD.device
    if not isinstance(plan, UlyssesPlan):
        group, backend = counted(groups, plan.ranks, index, backend)
        in_turns = turns((heads // kv_heads,) * kv_heads, plan.head_chunks)
        run = _prepared(plan, index, backend, device)
        return _Attend.apply(q_THD, k_TKD, v_TKV, sinks_H, run, group, scores, keep, in_turns)
    trade, outer = _trade(plan, device, heads, kv_heads), plan.outer
    inner, _ = counted(groups, plan.inner_ranks, plan.place, backend)
    group, backend = counted(groups, outer.ranks, index // plan.degree, backend)
    share, run = trade.share, _prepared(outer, index // plan.degree, backend, device)
    q, k, v = to_heads(q_THD, k_TKD, v_TKV, trade, inner)
    sinks = None if sinks_H is None else sinks_H[share.q0 : share.q1]
    out = _Attend.apply(q, k, v, sinks, run, group, scores, keep, turns(share.per_kv, outer.head_chunks))
    return to_tokens(out, heads, trade, inner)


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
    if not q.ndim == k.ndim == v.ndim == 3 or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"attend takes q [tokens, heads, dim] and k, v [tokens, kv_heads, dim], tokens and heads of k and v alike; "
            f"got {shapes}."
        )
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


def terms(q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None) -> str:
    """What all ranks must have alike of the tensors and options."""
    _, H, D = q.shape
    _, K, V = v.shape
    return f"q [tokens, {H}, {D}], k and v of {K} heads, v of dim {V}, {q.dtype}, {scores}, sinks={sinks is not None}"


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


def _trade(plan: UlyssesPlan, device: torch.device, heads: int, kv_heads: int) -> Trade:
    key = (device, heads, kv_heads)
    if key not in plan.cache:
        plan.cache[key] = Trade.of(plan, device, heads, kv_heads)
    return plan.cache[key]


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
    run: Run,
    journey: Journey,
    q: Tensor,
    scores: Scores,
    kept: dict[int, Tensor] | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """→ out [T, H, V] in q's dtype, lse [H, T]. Fills `kept` with the received buffers that tiles read."""
    dtype, (T, H, _), V = sum_dtype(q.dtype), q.shape, journey.home[1].shape[2]
    out = lse_TH = None
    for s, stage in enumerate(run.stages):
        journey.arrive(s)
        for buffer, handle in stage.tiles:
            part, part_lse = run.kernel.forward(handle, q, *journey.keys(buffer), scores)
            if kept is not None and buffer > 0:
                kept[buffer] = journey.received[buffer]
            if out is None and covers(handle.q_rows, T):
                out, lse_TH = part, part_lse.transpose(0, 1)
                continue
            out = q.new_zeros((T, H, V), dtype=dtype) if out is None else out.to(dtype)
            lse_TH = q.new_full((T, H), -torch.inf, dtype=dtype) if lse_TH is None else lse_TH
            merge_(out, lse_TH, handle.q_rows, part, part_lse.transpose(0, 1))
    if out is None or lse_TH is None:
        out, lse_TH = q.new_zeros((T, H, V)), q.new_full((T, H), -torch.inf, dtype=dtype)
    if sinks is not None:
        out, lse_TH = with_sinks(out, lse_TH, sinks)
    return out.to(q.dtype), lse_TH.transpose(0, 1)


def run_backward(
    run: Run, journey: Journey, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """→ dq, dk, dv of the rows at home, in the dtype they were summed in."""
    dtype, home = sum_dtype(q.dtype), journey.home
    dq: Tensor | None = None
    grads: dict[int, Pair] = {}
    coming: Travelling | None = None

    def gradients(buffer: int) -> Pair:
        if buffer in grads:
            return grads[buffer]
        dk, dv = (x.new_zeros((run.buffer_rows[buffer], *x.shape[1:]), dtype=dtype) for x in home)
        return dk, dv

    def pick(buffer: int, rows: Rows) -> Tensor:
        return side_by_side(gradients(buffer), rows, dtype)

    for s, stage in enumerate(run.stages):
        journey.arrive(s)
        for buffer, handle in stage.tiles:
            dq_part, *parts = run.kernel.backward(handle, dout, q, *journey.keys(buffer), out, lse, scores)
            dq = _plus(dq, len(q), handle.q_rows, dq_part, dtype)
            before = grads.get(buffer, (None, None))
            rows = run.buffer_rows[buffer]
            dk, dv = (_plus(x, rows, handle.k_rows, part, dtype) for x, part in zip(before, parts, strict=True))
            grads[buffer] = (dk, dv)
        if coming is not None:
            grads[0] = coming.land(gradients(0))
        coming = None if stage.returns is None else stage.returns.send(pick, no_rows(home, dtype), journey.group)
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
    def forward(ctx, q, k, v, sinks, run, group, scores, keep, turns):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        kept: list[dict[int, Tensor]] = [{} for _ in turns]
        parts = []
        for turn, journey, buffers in zip(turns, _journeys(run, k, v, group, turns), kept, strict=True):
            own_sinks = None if sinks is None else sinks[turn.q]
            own_run, to_keep = _run_of(turn, run), buffers if keep else None
            parts.append(run_forward(own_run, journey, q[:, turn.q], scores, to_keep, own_sinks))
            journey.end()
        out, lse = (_joined(x, dim) for x, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))
        received = [x for buffers in kept for x in buffers.values()]
        ctx.save_for_backward(q, k, v, out, lse, *received, *([] if sinks is None else [sinks]))
        ctx.kept = [list(buffers) for buffers in kept] if keep else None
        ctx.run, ctx.group, ctx.scores, ctx.turns, ctx.has_sinks = run, group, scores, turns, sinks is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, *buffers = ctx.saved_tensors
        sinks = buffers.pop() if ctx.has_sinks else None
        received = iter(buffers)
        kept = None if ctx.kept is None else [{number: next(received) for number in row} for row in ctx.kept]
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        parts = []
        for turn, journey in zip(ctx.turns, _journeys(ctx.run, k, v, ctx.group, ctx.turns, kept), strict=True):
            own = [x[:, turn.q] for x in (dout, q, out)]
            own_run, own_lse = _run_of(turn, ctx.run), lse[turn.q]
            parts.append(run_backward(own_run, journey, own[0], own[1], own[2], own_lse, ctx.scores))
            journey.end()
        grads = (_joined(x, 1).to(q.dtype) for x in zip(*parts, strict=True))
        d_sinks = None if sinks is None else sink_gradients(sinks, dout, out, lse.transpose(0, 1))
        return *grads, d_sinks, None, None, None, None, None


def _journeys(
    run: Run, k: Tensor, v: Tensor, group: Group | None, turns: list[Turn], kept: list[dict[int, Tensor]] | None = None
) -> list[Journey]:
    """Those of all turns, each of which sends off the next one's first rows in its last stage."""
    homes = [(k[:, turn.kv], v[:, turn.kv]) for turn in turns]
    journeys = [run.journey(home, group, kept[i] if kept is not None else None) for i, home in enumerate(homes)]
    for journey, following in pairwise(journeys):
        journey.following = following
    return journeys


def _run_of(turn: Turn, run: Run) -> Run:
    kernel = turn.kernel(run.kernel)
    return run if kernel is run.kernel else replace(run, kernel=kernel)


def _joined(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
