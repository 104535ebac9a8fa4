"""The one executor: runs any AttentionPlan, forward and backward, exactly.

What happens in stage i (stages.py): wait for its rows, send off those of stage i+1, compute the tiles of stage i while
they travel, merge by log-sum-exp. Backward walks the same stages with the final (out, lse), and each row's dK and dV go
straight home after its last use, in flight during the next stage. Queries may move too: their O and LSE go home in
forward, their dQ in backward, alike. Sums and merges are in promote(fp32, dtype), in an order fixed by the plan, so results
repeat bit for bit. With one rank nothing is sent.

Cost per layer beside the kernel calls: one exchange a stage (two in backward), as many again where queries move; one copy
of the rows sent, one merge of the rows a stage touches; with head groups a copy of q, k, v and out. What is received is kept
for backward by default: rows · h_kv · (D + V) values a layer, and those of q; `keep=False` receives it again instead. The lowered plan, index tensors and kernel handles are prepared on the plan's
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

# T query rows at home, H query heads, K key heads, D head dim, V that of values.
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .agreement import agree
from .counting import CountedGroup
from .groups import CpGroups, Group
from .heads import Turn, from_groups, sinks_of_groups, to_groups, turns
from .kernels.contract import Kernel, Scores, kernel_for, sum_dtype
from .plan import AttentionPlan
from .program import lower
from .sinks import check_sinks, sink_gradients
from .stages import Kept, Run, prepare, queries_back, run_backward, run_forward
from .trade import Trade, to_heads, to_tokens
from .transport import Journey
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
        keep: keep received KV and Q for backward rather than receive them again.
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
    heads, kv_heads, device = q_THD.shape[1], k_TKD.shape[1], q_THD.device
    if not isinstance(plan, UlyssesPlan):
        per_kv = (heads // kv_heads,) * kv_heads
        plan.check_heads(per_kv)
    if window is not None:
        plan = plan.windowed(window)
    said = f"{terms(q_THD, k_TKD, v_TKV, scores, sinks_H)}, keep={keep}"
    if not isinstance(plan, UlyssesPlan):
        agree(plan, groups, said)
        group, backend = counted(groups, plan.ranks, index, backend)
        return _attend(plan, index, q_THD, k_TKD, v_TKV, sinks_H, per_kv, group, backend, scores, keep)
    for share in plan.shares(heads, kv_heads):
        plan.outer.check_heads(share.per_kv)
    agree(plan, groups, said)
    trade, outer = _trade(plan, device, heads, kv_heads), plan.outer
    inner, _ = counted(groups, plan.inner_ranks, plan.place, backend)
    group, backend = counted(groups, outer.ranks, index // plan.degree, backend)
    share, place = trade.share, index // plan.degree
    q, k, v = to_heads(q_THD, k_TKD, v_TKV, trade, inner)
    sinks = None if sinks_H is None else sinks_H[share.q0 : share.q1]
    out = _attend(outer, place, q, k, v, sinks, share.per_kv, group, backend, scores, keep)
    return to_tokens(out, heads, trade, inner)


def _attend(
    plan: AttentionPlan,
    index: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    per_kv: tuple[int, ...],
    group: Group | None,
    backend: Kernel,
    scores: Scores,
    keep: bool,
) -> Tensor:
    """Attention of the heads at hand, head group after head group where the plan has several."""
    G, run = plan.head_groups, _prepared(plan, index, backend, q.device)
    in_turns = turns(per_kv[: len(per_kv) // G], plan.head_chunks)
    if G > 1:
        sinks = None if sinks is None else sinks_of_groups(sinks.to(sum_dtype(q.dtype)), len(q), G)
        q, k, v = (to_groups(x, G) for x in (q, k, v))
    of_queries = group.of_queries() if isinstance(group, CountedGroup) else group
    out = _Attend.apply(q, k, v, sinks, run, (group, of_queries), scores, keep, in_turns)
    return from_groups(out, G) if G > 1 else out


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


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, run, groups, scores, keep, turns):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        kept, parts, (group, of_queries) = [Kept() for _ in turns], [], groups
        journeys = _chained([run.journey((k[:, turn.kv], v[:, turn.kv]), group) for turn in turns])
        queries = _chained([run.queries((q[:, turn.q],), of_queries) for turn in turns])
        for turn, journey, asking, buffers in zip(turns, journeys, queries, kept, strict=True):
            own_run, to_keep = _run_of(turn, run), buffers if keep else None
            own_sinks = None if sinks is None else sinks[..., turn.q]
            parts.append(run_forward(own_run, journey, q[:, turn.q], scores, to_keep, own_sinks, asking))
            journey.end()
            asking.end()
        out, lse = (_joined(x, dim) for x, dim in zip(zip(*parts, strict=True), (1, 0), strict=True))
        received = [x for buffers in kept for x in (*buffers.kv.values(), *buffers.q.values())]
        ctx.save_for_backward(q, k, v, out, lse, *received, *([] if sinks is None else [sinks]))
        ctx.kept = [(list(buffers.kv), list(buffers.q)) for buffers in kept] if keep else None
        ctx.run, ctx.groups, ctx.scores, ctx.turns, ctx.has_sinks = run, groups, scores, turns, sinks is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        q, k, v, out, lse, *buffers = ctx.saved_tensors
        sinks = buffers.pop() if ctx.has_sinks else None
        run, received, (group, of_queries) = ctx.run, iter(buffers), ctx.groups
        kept_kv: list[dict[int, Tensor] | None] = [None] * len(ctx.turns)
        kept_q = kept_kv.copy()
        for at, numbers in enumerate(ctx.kept or ()):
            kept_kv[at], kept_q[at] = ({number: next(received) for number in row} for row in numbers)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        own = [(dout[:, turn.q], q[:, turn.q], out[:, turn.q], lse[turn.q]) for turn in ctx.turns]
        homes = [(k[:, turn.kv], v[:, turn.kv]) for turn in ctx.turns]
        journeys = _chained([run.journey(home, group, kv) for home, kv in zip(homes, kept_kv, strict=True)])
        queries = _chained([queries_back(run, *x, of_queries, ctx.kept is not None) for x in own])
        parts = []
        for at, turn in enumerate(ctx.turns):
            own_run = _run_of(turn, run)
            parts.append(run_backward(own_run, journeys[at], *own[at], ctx.scores, queries[at], kept_q[at]))
            journeys[at].end()
            queries[at].end()
        grads = (_joined(x, 1).to(q.dtype) for x in zip(*parts, strict=True))
        d_sinks = None if sinks is None else sink_gradients(sinks, dout, out, lse.transpose(0, 1))
        return *grads, d_sinks, None, None, None, None, None


def _chained(journeys: list[Journey]) -> list[Journey]:
    """Each sends off the next one's first rows in its last stage."""
    for journey, following in pairwise(journeys):
        journey.following = following
    return journeys


def _run_of(turn: Turn, run: Run) -> Run:
    kernel = turn.kernel(run.kernel)
    return run if kernel is run.kernel else replace(run, kernel=kernel)


def _joined(parts: tuple[Tensor, ...], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
