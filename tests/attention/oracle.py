"""What attention must give: each document alone, dense, on one process; and the cases that executors are held against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from equipoise.attention.gather import gather_plan
from equipoise.attention.kernels.reference import dense
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.ring import ring_plan
from equipoise.attention.ulysses import UlyssesPlan, ulysses_plan
from equipoise.packing.shards import Shards
from torch import Tensor

from tests.attention.draws import shards_of

LAYOUTS = ("contiguous", "sequence", "document")
PLANNERS = {
    "ring": ring_plan,
    "direct": partial(ring_plan, forward=False),
    "gather": gather_plan,
    "gather in 2": partial(gather_plan, chunks=2),
    "ulysses": ulysses_plan,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of attention over a pack, small enough to pickle."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    dtype: torch.dtype = torch.float64
    seed: int = 0
    layout: str = "document"
    kind: str = "ring"
    """One of PLANNERS."""
    keep: bool = True
    value_dim: int | None = None
    """Head dim of values; None: dim."""
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kernel: str | None = None

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int64)

    def shards(self, cp: int) -> Shards:
        return shards_of(self.layout, self.cu_seqlens, cp)

    def plan(self, ranks: tuple[int, ...], rank: int) -> AttentionPlan | UlyssesPlan:
        return PLANNERS[self.kind](self.shards(len(ranks)), ranks, rank)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout of the whole pack, the same in every process."""
        generator = torch.Generator().manual_seed(self.seed)
        T, V = sum(self.lengths), self.value_dim or self.dim
        shapes = [(T, self.heads, self.dim), (T, self.kv_heads, self.dim), (T, self.kv_heads, V), (T, self.heads, V)]
        q, k, v, dout = (torch.randn(s, generator=generator, dtype=torch.float64).to(self.dtype) for s in shapes)
        return q, k, v, dout

    def head_sinks(self) -> Tensor | None:
        """A sink for each head, some of them strong, if the case has any."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.heads, generator=generator, dtype=torch.float64) * 3 if self.sinks else None

    def options(self) -> dict[str, Any]:
        """For `attend`, but for the sinks."""
        return {"keep": self.keep, "window": self.window, "softcap": self.softcap, "kernel": self.kernel}


def seen(tokens: int, window: int | None) -> Tensor:
    """bool[tokens, tokens]: which keys each query of a document sees."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    return mask if window is None else mask.triu(1 - window)


def one_process(case: Case, compute: torch.dtype | None = None) -> list[Tensor]:
    """out, dq, dk, dv, and those of the sinks if there are any, of the pack, document by document, in `compute` (or fp64)."""
    q, k, v, dout = (x.to(compute or torch.float64) for x in case.inputs())
    sinks = case.head_sinks()
    inputs = [x.requires_grad_() for x in (q, k, v) + (() if sinks is None else (sinks,))]
    outs = []
    for start, stop in zip(case.cu_seqlens[:-1], case.cu_seqlens[1:], strict=True):
        mask = seen(int(stop - start), case.window)
        out, lse = dense(q[start:stop], k[start:stop], v[start:stop], mask, case.dim**-0.5, case.softcap)
        if sinks is not None:
            # The sink's share of the softmax is 1 / (1 + exp(lse - sink)), and it has no value.
            out = out * torch.sigmoid(lse.T - sinks)[..., None]
        outs.append(out)
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def naive(case: Case) -> list[Tensor]:
    """out, dq, dk, dv as plain matmuls and softmax in the case's own dtype give them."""
    q, k, v, dout = case.inputs()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    outs = []
    for start, stop in zip(case.cu_seqlens[:-1], case.cu_seqlens[1:], strict=True):
        n, group = int(stop - start), case.heads // case.kv_heads
        qs, ks, vs = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        ks, vs = ks.repeat_interleave(group, 0), vs.repeat_interleave(group, 0)
        scores = (qs @ ks.transpose(1, 2) * case.dim**-0.5).masked_fill(~torch.ones(n, n).tril().bool(), -torch.inf)
        outs.append((scores.softmax(-1) @ vs).transpose(0, 1))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def relative(got: Tensor, want: Tensor) -> float:
    """max |got - want| over max |want|."""
    if want.numel() == 0:
        return 0.0
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-30))
