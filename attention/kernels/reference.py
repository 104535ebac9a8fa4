"""Exact reference: dense attention under a boolean mask, one [T, S] matrix a head. For tests, and for odd devices.

No trick and no tiling, so that it is obviously right; everything is computed in promote(fp32, dtype), so fp64 gives an
oracle. Memory is H · T · S.

    >>> q = torch.randn(3, 2, 4)
    >>> out, lse = dense(q, q, q, torch.ones(3, 3, dtype=torch.bool).tril(), 0.5)
    >>> out.shape, lse.shape
    (torch.Size([3, 2, 4]), torch.Size([2, 3]))
"""

# T query rows, S key rows, H query heads, K key heads, D head dim, V that of values, t and s the touched rows.
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..bands import Int64
from .contract import Rows, Scores, rows_of, sum_dtype, take


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceHandle:
    mask: Tensor
    """bool[t, s], the pairs to compute."""
    q_rows: Rows
    k_rows: Rows


def check(q_THD: Tensor, v_SKV: Tensor, scores: Scores) -> None:
    """Nothing is beyond the reference."""


def dense(
    q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, mask_TS: Tensor, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the pairs of the mask → out [T, H, V], lse [H, T]; rows without keys: 0 and -inf. Differentiable."""
    q, k, v = (x.to(sum_dtype(x.dtype)).transpose(0, 1) for x in (q_THD, k_SKD, v_SKV))
    k, v = (x.repeat_interleave(q.shape[0] // max(x.shape[0], 1), dim=0) for x in (k, v))
    scores_HTS = _capped(q @ k.transpose(1, 2) * scale, softcap).masked_fill(~mask_TS, -torch.inf)
    lse_HT = torch.logsumexp(scores_HTS, dim=-1)
    weights = torch.exp(scores_HTS - lse_HT.masked_fill(lse_HT == -torch.inf, 0.0)[..., None])
    return (weights @ v).transpose(0, 1), lse_HT


def prepare(tiles: Int64, num_q: int, num_k: int, device: torch.device) -> ReferenceHandle:
    """Draw the tiles (int64[m, 6] of addresses) into one mask."""
    mask = np.zeros((num_q, num_k), bool)
    for q0, q1, k0, k1, lo, hi in tiles.tolist():
        apart = np.arange(q0, q1)[:, None] - np.arange(k0, k1)
        mask[q0:q1, k0:k1] |= (lo <= apart) & (apart <= hi)
    q_rows, k_rows = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return ReferenceHandle(
        mask=torch.from_numpy(mask[np.ix_(q_rows, k_rows)]).to(device),
        q_rows=rows_of(q_rows, device),
        k_rows=rows_of(k_rows, device),
    )


def forward(
    handle: ReferenceHandle, q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, scores: Scores
) -> tuple[Tensor, Tensor]:
    """→ out [t, H, V], lse [H, t] of handle.q_rows."""
    q, k, v = take(q_THD, handle.q_rows), take(k_SKD, handle.k_rows), take(v_SKV, handle.k_rows)
    return dense(q, k, v, handle.mask, scores.scale, scores.softcap)


def backward(
    handle: ReferenceHandle,
    dout_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """→ dq [t, H, D], dk [s, K, D], dv [s, K, V]: the softmax's gradient written out, with the final out and lse."""
    dtype, heads = sum_dtype(q_THD.dtype), k_SKD.shape[1]
    q, dout, out = (take(x, handle.q_rows).to(dtype).transpose(0, 1) for x in (q_THD, dout_THV, out_THV))
    k, v = (take(x, handle.k_rows).to(dtype).transpose(0, 1) for x in (k_SKD, v_SKV))
    q, dout, out = (x.unflatten(0, (heads, -1)) for x in (q, dout, out))  # [K, H/K, t, D]
    k, v = k[:, None], v[:, None]
    lse = take(lse_HT.transpose(0, 1), handle.q_rows).transpose(0, 1).unflatten(0, (heads, -1))
    capped = _capped(q @ k.transpose(-1, -2) * scores.scale, scores.softcap)
    p = torch.exp(capped.masked_fill(~handle.mask, -torch.inf) - lse[..., None])
    ds = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scores.scale
    if scores.softcap is not None:
        ds = ds * (1 - (capped / scores.softcap).square())
    dv = (p.transpose(-1, -2) @ dout).sum(1)
    dk = (ds.transpose(-1, -2) @ q).sum(1)
    return (ds @ k).flatten(0, 1).transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
