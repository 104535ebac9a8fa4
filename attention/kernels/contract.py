"""The kernel contract: what a block-attention backend must do, and the arithmetic that backends and executors share.

A backend is a module with three functions (`Kernel`). `prepare` is called once per micro-batch and stage with tiles in
addresses (bands.py), and its handle serves every layer; `forward` and `backward` return results for the touched rows
only, `handle.q_rows` and `handle.k_rows`. Rules for all:

- native GQA: H query heads over H_kv key heads, H a multiple of H_kv;
- lse is the natural logarithm, fp32 (fp64 for fp64); every row of q_rows has a key, so it is finite there;
- a row outside of q_rows has no key: its out is 0 and its lse -inf, which is what `merge_` starts from;
- values may have another head dim than queries and keys;
- what is summed or merged is summed in promote(fp32, dtype); what was computed in one piece may stay in dtype;
- `backward` takes the *final* out and lse of a row, over all tiles of all stages, and yields this handle's share.

    >>> kernel_for(torch.device("cpu")).__name__
    'equipoise.attention.kernels.cpu'
"""

# T query rows, S key rows, H query heads, K key heads, D head dim, V that of values, t and s the touched rows of T and S.
from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from ..bands import Int64

Rows: TypeAlias = "slice | Tensor"
"""Rows of a buffer: a slice where they lie side by side, an int64 index tensor where not."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How products of queries and keys become scores: scale · q·k, and if capped softcap · tanh(scale · q·k / softcap).

    >>> Scores(scale=0.125, softcap=0.0)
    Traceback (most recent call last):
        ...
    ValueError: softcap bounds the scores, so it must be positive; got 0.0. Leave it out for none.
    """

    scale: float
    softcap: float | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(
                f"softcap bounds the scores, so it must be positive; got {self.softcap}. Leave it out for none."
            )


class Handle(Protocol):
    """What a backend prepared from tiles; opaque but for the rows it touches."""

    @property
    def q_rows(self) -> Rows: ...
    @property
    def k_rows(self) -> Rows: ...


class Kernel(Protocol):
    """A backend. `tiles`: int64[m, 6] of addresses, disjoint, in any order; trimming them is the backend's business."""

    def check(self, q_THD: Tensor, v_SKV: Tensor, scores: Scores) -> None:
        """ValueError for what this backend cannot do: called before anything is sent."""
        ...

    def prepare(self, tiles: Int64, num_q: int, num_k: int, device: torch.device) -> Any: ...

    def forward(
        self, handle: Any, q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """→ out [t, H, V], lse [H, t]."""
        ...

    def backward(
        self,
        handle: Any,
        dout_THV: Tensor,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKV: Tensor,
        out_THV: Tensor,
        lse_HT: Tensor,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """→ dq [t, H, D], dk [s, K, D], dv [s, K, V]."""
        ...


KERNELS = ("cpu", "cuda", "reference")


def kernel_for(device: torch.device, name: str | None = None) -> Kernel:
    """The backend of that name, or the one for the device; imported when first asked for."""
    if name is None:
        name = {"cpu": "cpu", "cuda": "cuda"}.get(device.type)
        if name is None:
            raise ValueError(f'No attention kernel for {device}; kernel="reference" runs on any device, slowly.')
    if name not in KERNELS:
        raise ValueError(f"Attention kernels are {', '.join(KERNELS)}; got kernel={name!r}.")
    if name in ("cpu", "cuda") and device.type != name:
        raise ValueError(
            f"The {name} attention kernel needs tensors on {name}; got {device}. Leave out kernel={name!r}."
        )
    return cast(Kernel, import_module(f".{name}", __package__))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What results of this dtype are merged and summed in: at least fp32; fp64 stays fp64."""
    return torch.promote_types(torch.float32, dtype)


def widened(dim: int, *parts: Tensor) -> list[Tensor]:
    """Zeros behind the last dim up to `dim`, for kernels that know one head dim only: neither scores nor values change."""
    return [x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1])) for x in parts]


def rows_of(index: Int64, device: torch.device) -> Rows:
    """Rows from a numpy index, on the device."""
    if len(index) == 0:
        return slice(0, 0)
    if index[-1] - index[0] == len(index) - 1 and np.all(np.diff(index) == 1):
        return slice(int(index[0]), int(index[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(index)).to(device)


def covers(rows: Rows, count: int) -> bool:
    """Whether these are all `count` rows in order."""
    return isinstance(rows, slice) and rows.start == 0 and rows.stop == count


def take(x: Tensor, rows: Rows) -> Tensor:
    """x[rows] along dim 0; a view where rows are a slice."""
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def add_(x: Tensor, rows: Rows, part: Tensor) -> None:
    """x[rows] += part along dim 0. A row that comes twice may add zeros only, or the order of additions would matter."""
    part = part.to(x.dtype)
    if isinstance(rows, slice):
        x[rows] += part
    else:
        x.index_add_(0, rows, part)


def put_(x: Tensor, rows: Rows, part: Tensor) -> None:
    """x[rows] = part along dim 0."""
    if isinstance(rows, slice):
        x[rows] = part
    else:
        x.index_copy_(0, rows, part.to(x.dtype))


def merge_(out_THD: Tensor, lse_TH: Tensor, rows: Rows, part_tHD: Tensor, part_lse_tH: Tensor) -> None:
    """Merge the attention of some rows over further keys into what they have so far (0 and -inf: nothing).

    new = logaddexp(lse, part_lse); out = out + exp(part_lse - new) · (part - out), guarded where both are -inf.
    """
    before = take(lse_TH, rows)
    after = torch.logaddexp(before, part_lse_tH)
    weight = torch.exp(part_lse_tH - after.masked_fill(after == -torch.inf, 0.0))[..., None]
    put_(lse_TH, rows, after)
    part = part_tHD.to(out_THD.dtype)
    if isinstance(rows, slice):
        out_THD[rows].lerp_(part, weight)
    else:
        # index_copy_ of whole rows is three times as slow as index_add_ on CPU.
        step = part.sub(out_THD.index_select(0, rows)).mul_(weight)
        out_THD.index_add_(0, rows, step)
