"""Heads in turns: which query and KV heads one run of a plan computes, where not all of them at once.

A plan says nothing of heads, so it may be run over some of them at a time, which bounds the received KV (head_chunks),
and over a share of them (Ulysses). Kernels pair heads by GQA's rule, H / K query heads to each KV head; a share may have
fewer of the first or last KV head's, and then `Uneven` repeats KV heads for the kernel only, not for what is sent.

    >>> [(turn.q, turn.kv) for turn in turns((2, 2, 2), 2)]
    [(slice(0, 2, None), slice(0, 1, None)), (slice(2, 6, None), slice(1, 3, None))]
"""

# T query rows, S key rows, H query heads, K key heads, D head dim, V that of values.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .bands import Int64
from .kernels.contract import Kernel, Scores, sum_dtype


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Heads that are computed at once."""

    q: slice
    kv: slice
    per_kv: tuple[int, ...]
    """How many of the query heads look at each of the KV heads."""

    def kernel(self, kernel: Kernel) -> Kernel:
        """What pairs these heads rightly."""
        return kernel if len(set(self.per_kv)) == 1 else Uneven(repeated=kernel, per_kv=self.per_kv)


def turns(per_kv: tuple[int, ...], count: int) -> list[Turn]:
    """KV heads with `per_kv` query heads each, in `count` runs of them or one each."""
    count = min(count, len(per_kv))
    ends = [turn * len(per_kv) // count for turn in range(count + 1)]
    q = [sum(per_kv[:end]) for end in ends]
    return [
        Turn(q=slice(q[i], q[i + 1]), kv=slice(ends[i], ends[i + 1]), per_kv=per_kv[ends[i] : ends[i + 1]])
        for i in range(count)
    ]


def to_groups(x_THD: Tensor, groups: int) -> Tensor:
    """Rows of head groups, group after group: [groups · T, H / groups, D], a copy."""
    return x_THD.unflatten(1, (groups, -1)).transpose(0, 1).flatten(0, 1)


def from_groups(x: Tensor, groups: int) -> Tensor:
    """The way back: [groups · T, H / groups, D] → [T, H, D]."""
    return x.unflatten(0, (groups, -1)).transpose(0, 1).flatten(1, 2)


def sinks_of_groups(sinks_H: Tensor, tokens: int, groups: int) -> Tensor:
    """The sinks of each row of head groups: [groups · tokens, H / groups]."""
    return sinks_H.view(groups, 1, -1).expand(-1, tokens, -1).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class Uneven:
    """A kernel for KV heads that unequally many query heads look at."""

    repeated: Kernel
    per_kv: tuple[int, ...]

    def check(self, q_THD: Tensor, v_SKV: Tensor, scores: Scores) -> None:
        self.repeated.check(q_THD, v_SKV, scores)

    def prepare(self, tiles: Int64, num_q: int, num_k: int, device: torch.device) -> Any:
        return self.repeated.prepare(tiles, num_q, num_k, device)

    def forward(self, handle: Any, q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return self.repeated.forward(handle, q_THD, self._wide(k_SKD), self._wide(v_SKV), *rest)

    def backward(
        self, handle: Any, dout_THV: Tensor, q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        k_SHD, v_SHV = self._wide(k_SKD), self._wide(v_SKV)
        dq, dk, dv = self.repeated.backward(handle, dout_THV, q_THD, k_SHD, v_SHV, *rest)
        return dq, self._summed(dk), self._summed(dv)

    def _wide(self, x_SKD: Tensor) -> Tensor:
        return torch.cat([x_SKD[:, kv : kv + 1].expand(-1, n, -1) for kv, n in enumerate(self.per_kv)], dim=1)

    def _summed(self, d_SHD: Tensor) -> Tensor:
        return torch.stack([x.sum(1) for x in d_SHD.to(sum_dtype(d_SHD.dtype)).split(self.per_kv, dim=1)], dim=1)
