"""Ulysses: an all-to-all that trades tokens for heads, attention over the whole pack, and the all-to-all back.

(Jacobs et al. 2023, DeepSpeed-Ulysses.) Each rank gets all tokens of its share of the heads, so attention is causal per
document with no merge, and traffic per rank falls with the group's size: 2·(H + K)·tokens/P · D values, where a ring
moves 2·K·tokens·(P-1)/P · D.

What is decided: rank i of P computes query heads ⌊i·H/P⌋ … ⌊(i+1)·H/P⌋, so H need not be a multiple of P, only at least
P; it is sent the KV heads these look at, so a KV head goes to several ranks where P exceeds K. q, k, v travel in one
all-to-all with uneven splits, so tokens need not divide either. If a rank's query heads are not spread evenly over its
KV heads, it repeats KV heads for its kernel calls.

    >>> from equipoise.packing.shards import contiguous
    >>> print(ulysses_plan(contiguous([0, 5, 11], 2), ranks=(0, 1), rank=0))
    UlyssesPlan over 2 ranks, 11 tokens in 2 documents: rank 0 holds 6
"""

# T tokens at home, N tokens of the pack, H query heads, K key heads, D head dim, V that of values, P ranks; h: a rank's share of H.
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..packing.shards import Shards
from .bands import NO_LIMIT
from .groups import Group
from .kernels.contract import Kernel, Rows, Scores, rows_of, sum_dtype, take
from .plan import Int64, check_window
from .sinks import sink_gradients, with_sinks


@dataclass(frozen=True, kw_only=True, eq=False)
class UlyssesPlan:
    """Where the tokens of a pack are; heads are divided when the tensors are seen."""

    ranks: tuple[int, ...]
    """Rank numbers of the domain."""
    rank: int
    """Index of the rank that runs this plan."""
    cu_seqlens: Int64
    """int64[k+1], document boundaries of the pack."""
    home_offsets: Int64
    """int64[P+1], CSR: rank → positions."""
    positions: Int64
    """int64[N], the positions each rank holds, rank after rank, in the order it holds them."""
    window: int | None = None
    """How many keys a query sees, itself among them; None: all up to itself."""
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What the executor prepared from the plan: left behind when the plan is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": {}}

    @property
    def tokens(self) -> int:
        """Length of the pack."""
        return len(self.positions)

    def tokens_of(self, rank: int) -> int:
        """How many tokens `rank` holds."""
        return int(self.home_offsets[rank + 1] - self.home_offsets[rank])

    def windowed(self, window: int) -> UlyssesPlan:
        """The same for a query's last `window` keys only; kept in the cache."""
        check_window(window)
        if window >= self.tokens:
            return self
        if ("window", window) not in self.cache:
            self.cache["window", window] = replace(self, window=window)
        return self.cache["window", window]

    def bytes_sent(self, heads: int, kv_heads: int, dim: int, itemsize: int, value_dim: int | None = None) -> Int64:
        """What each rank sends to others in forward, q, k, v and out, in bytes, int64[P]. Backward sends as much in all.

        dim: of queries and keys. value_dim: of values, if it is another.
        """
        value_dim = dim if value_dim is None else value_dim
        shares = [_share(i, len(self.ranks), heads, kv_heads) for i in range(len(self.ranks))]
        own = np.array([s.q1 - s.q0 for s in shares])
        width = own * dim + np.array([s.k1 - s.k0 for s in shares]) * (dim + value_dim)
        local = np.diff(self.home_offsets)
        values = local * (width.sum() - width) + own * value_dim * (self.tokens - local)
        return values * itemsize

    def describe(self) -> str:
        return (
            f"UlyssesPlan over {len(self.ranks)} ranks, {self.tokens} tokens in {len(self.cu_seqlens) - 1} documents: "
            f"rank {self.rank} holds {self.tokens_of(self.rank)}"
        )

    def __str__(self) -> str:
        return self.describe()


def ulysses_plan(shards: Shards, ranks: tuple[int, ...], rank: int) -> UlyssesPlan:
    """Ulysses over any shards of causal documents. rank: an index into `ranks`."""
    P = shards.cp_size
    if len(ranks) != P or not 0 <= rank < P:
        raise ValueError(
            f"{P} shards need {P} ranks and an index 0 … {P - 1} of them; got ranks {ranks}, index {rank}."
        )
    return UlyssesPlan(
        ranks=tuple(ranks),
        rank=rank,
        cu_seqlens=shards.cu_seqlens,
        home_offsets=np.concatenate([[0], np.cumsum(shards.tokens())]).astype(np.int64),
        positions=np.concatenate([shards.positions(r) for r in range(P)]),
    )


@dataclass(frozen=True, kw_only=True)
class _Share:
    """Heads of one rank: queries q0 … q1, and the KV heads k0 … k1 they look at."""

    q0: int
    q1: int
    k0: int
    k1: int

    def heads(self, side: str) -> int:
        return self.q1 - self.q0 if side == "q" else self.k1 - self.k0


Kinds: TypeAlias = "tuple[tuple[str, int], ...]"
"""What travels together: of each tensor whether its heads are those of queries ("q") or keys ("k"), and its head dim."""


def _share(rank: int, ranks: int, heads: int, kv_heads: int) -> _Share:
    q0, q1, per_kv = rank * heads // ranks, (rank + 1) * heads // ranks, heads // kv_heads
    return _Share(q0=q0, q1=q1, k0=q0 // per_kv, k1=(q1 - 1) // per_kv + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """A plan made ready for a rank, device, backend and head counts; shared by all layers."""

    group: Group | None
    kernel: Kernel
    handle: Any
    index: int
    tokens: list[int]
    """Tokens of each rank."""
    to_pack: Rows
    """For each position, its row among all ranks' rows."""
    to_ranks: Rows
    """For each row, its position."""
    shares: list[_Share]
    repeats: list[int] | None
    """How many own query heads look at each own KV head, if not equally many; None: the kernel's GQA does."""

    @property
    def share(self) -> _Share:
        return self.shares[self.index]

    def trade(self, sent: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Exchange of flat values; split sizes in values."""
        if self.group is None:
            return sent
        received = sent.new_empty(sum(receive))
        self.group.exchange(sent, send, received, receive).wait()
        return received


def attend_ulysses(
    plan: UlyssesPlan,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKV: Tensor,
    sinks_H: Tensor | None,
    group: Group | None,
    scores: Scores,
    kernel: Kernel,
) -> Tensor:
    """Run the plan → out [T, H, V], differentiable. `attend` checks what it passes and is what users call."""
    heads, kv_heads, P = q_THD.shape[1], k_TKD.shape[1], len(plan.ranks)
    if heads < P:
        raise ValueError(
            f"Ulysses gives every rank at least one query head; got {heads} heads for cp={P}. "
            f"Use cp up to {heads}, or a ring."
        )
    key = (kernel, q_THD.device, heads, kv_heads, group)
    if key not in plan.cache:
        plan.cache[key] = _prepare(plan, group, kernel, q_THD.device, heads, kv_heads)
    return _Ulysses.apply(q_THD, k_TKD, v_TKV, sinks_H, plan.cache[key], scores)


def _prepare(
    plan: UlyssesPlan,
    group: Group | None,
    kernel: Kernel,
    device: torch.device,
    heads: int,
    kv_heads: int,
) -> _Run:
    shares = [_share(i, len(plan.ranks), heads, kv_heads) for i in range(len(plan.ranks))]
    share = shares[plan.rank]
    repeats = np.bincount(np.arange(share.q0, share.q1) // (heads // kv_heads) - share.k0)
    start, stop = plan.cu_seqlens[:-1], plan.cu_seqlens[1:]
    most = NO_LIMIT if plan.window is None else plan.window - 1
    tiles = np.stack([start, stop, start, stop, np.zeros_like(start), np.full_like(start, most)], axis=1)
    return _Run(
        group=group,
        kernel=kernel,
        handle=kernel.prepare(tiles[stop > start], plan.tokens, plan.tokens, device),
        index=plan.rank,
        tokens=np.diff(plan.home_offsets).tolist(),
        to_pack=rows_of(np.argsort(plan.positions), device),
        to_ranks=rows_of(plan.positions, device),
        shares=shares,
        repeats=None if repeats.min() == repeats.max() else repeats.tolist(),
    )


def _to_heads(run: _Run, parts: list[Tensor], kinds: Kinds) -> Tensor:
    """Own tokens of all heads → all tokens, in pack order, of own heads: [N, values], see `_heads`."""
    T = len(parts[0])
    widths = [_width(share, kinds) for share in run.shares]
    sent = parts[0].new_empty(T * sum(widths))
    at = 0
    for share, width in zip(run.shares, widths, strict=True):
        block = sent[at : at + T * width].view(T, width)
        for (side, _), x, piece in zip(kinds, parts, _heads(block, share, kinds), strict=True):
            piece.copy_(x[:, share.q0 : share.q1] if side == "q" else x[:, share.k0 : share.k1])
        at += T * width
    own = _width(run.share, kinds)
    received = run.trade(sent, [T * w for w in widths], [t * own for t in run.tokens])
    return take(received.view(-1, own), run.to_pack)


def _to_tokens(run: _Run, parts: list[Tensor], kinds: Kinds) -> list[tuple[_Share, list[Tensor]]]:
    """The way back of [N, heads, dim] each: for each rank's share of the heads, own tokens of it: [T, heads, dim]."""
    T = run.tokens[run.index]
    own = _width(run.share, kinds)
    whole = parts[0] if len(parts) == 1 else torch.cat([x.flatten(1) for x in parts], dim=1)
    sent = take(whole, run.to_ranks).contiguous().view(-1)
    widths = [_width(share, kinds) for share in run.shares]
    received = run.trade(sent, [t * own for t in run.tokens], [T * w for w in widths])
    blocks = received.split([T * w for w in widths])
    return [
        (share, _heads(block.view(T, width), share, kinds))
        for share, width, block in zip(run.shares, widths, blocks, strict=True)
    ]


def _width(share: _Share, kinds: Kinds) -> int:
    """Values of a token."""
    return sum(share.heads(side) * dim for side, dim in kinds)


def _heads(block: Tensor, share: _Share, kinds: Kinds) -> list[Tensor]:
    """[tokens, values] as the tensors that travelled, [tokens, heads, dim] each: views."""
    parts = block.split([share.heads(side) * dim for side, dim in kinds], dim=1)
    return [x.unflatten(1, (share.heads(side), dim)) for x, (side, dim) in zip(parts, kinds, strict=True)]


class _Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, run, scores):
        kinds = (("q", q.shape[2]), ("k", k.shape[2]), ("k", v.shape[2]))
        qkv = _to_heads(run, [q, k, v], kinds)
        # Every position has itself as a key, so the rows that the kernel touches are all rows.
        out_NhV, lse_hN = run.kernel.forward(run.handle, *_operands(run, qkv, kinds), scores)
        sinks = None if sinks is None else sinks[run.share.q0 : run.share.q1]
        if sinks is not None:
            out_NhV, lse_Nh = with_sinks(out_NhV, lse_hN.transpose(0, 1), sinks)
            lse_hN = lse_Nh.transpose(0, 1)
        out_NhV = out_NhV.to(q.dtype)
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        for share, (piece,) in _to_tokens(run, [out_NhV], (("q", v.shape[2]),)):
            out[:, share.q0 : share.q1] = piece
        ctx.save_for_backward(qkv, sinks, out_NhV, lse_hN)
        ctx.run, ctx.scores, ctx.kinds, ctx.kv_heads = run, scores, kinds, k.shape[1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        run, kinds, (qkv, sinks, out, lse) = ctx.run, ctx.kinds, ctx.saved_tensors
        dout_NhV = _heads(_to_heads(run, [dout], (("q", dout.shape[2]),)), run.share, (("q", dout.shape[2]),))[0]
        dq, dk, dv = run.kernel.backward(run.handle, dout_NhV, *_operands(run, qkv, kinds), out, lse, ctx.scores)
        if run.repeats is not None:
            dk, dv = (_summed(x, run.repeats) for x in (dk, dv))
        parts = _to_tokens(run, [x.to(qkv.dtype) for x in (dq, dk, dv)], kinds)
        (_, D), _, (_, V) = kinds
        T, H, dtype = len(dout), dout.shape[1], sum_dtype(qkv.dtype)
        dq = dout.new_empty((T, H, D), dtype=qkv.dtype)
        dk, dv = (dout.new_zeros((T, ctx.kv_heads, dim), dtype=dtype) for dim in (D, V))
        for share, (q_part, k_part, v_part) in parts:
            dq[:, share.q0 : share.q1] = q_part
            dk[:, share.k0 : share.k1] += k_part
            dv[:, share.k0 : share.k1] += v_part
        d_sinks = None
        if sinks is not None:
            d_sinks = sinks.new_zeros(H)
            d_sinks[run.share.q0 : run.share.q1] = sink_gradients(sinks, dout_NhV, out, lse.transpose(0, 1))
        return dq, dk.to(qkv.dtype), dv.to(qkv.dtype), d_sinks, None, None


def _operands(run: _Run, qkv: Tensor, kinds: Kinds) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of own heads, KV heads repeated where the kernel's GQA would pair them wrongly."""
    q, k, v = _heads(qkv, run.share, kinds)
    if run.repeats is not None:
        k, v = (torch.cat([x[:, i : i + 1].expand(-1, n, -1) for i, n in enumerate(run.repeats)], 1) for x in (k, v))
    return q, k, v


def _summed(d_NhD: Tensor, repeats: list[int]) -> Tensor:
    """Gradients of repeated KV heads, summed per head."""
    return torch.stack([x.sum(1) for x in d_NhD.to(sum_dtype(d_NhD.dtype)).split(repeats, dim=1)], dim=1)
