"""CUDA backend: varlen flash attention, one call per window and layer of tiles, whatever the number of documents.

Tiles are cut into what varlen kernels know (bands.segments): bottom-right causal and full rectangles, at most two a
causal tile, and windows. All segments with the same window that share no row are one call: their rows are gathered once
(or sliced where they lie side by side), and `cu_seqlens` says where each begins.

flash-attn is used where it is installed, else `torch.nn.attention.varlen` (torch >= 2.11). Both align causal masks to
the bottom right and give lse [H, T] in natural logarithm. Restrictions are theirs: fp16 or bf16, head dim up to 256,
capped scores with flash-attn only. Both take values of the queries' head dim only, so the smaller of the two is filled
up with zeros (as Hugging Face does for MLA): for 192 and 128 that is a fifth more work.
"""

# T query rows, S key rows, H query heads, K key heads, D head dim, V that of values, t and s the touched rows.
from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..bands import Int64, segments
from .contract import Rows, Scores, add_, covers, merge_, rows_of, sum_dtype, take, widened
from .grouping import layers, touched
from .staircase import split_staircases


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One varlen call."""

    q_source: Rows
    k_source: Rows
    q_target: Rows
    """The query rows among the touched ones."""
    k_target: Rows
    cu_q: Tensor
    """int32[n+1], on the device."""
    cu_k: Tensor
    max_q: int
    max_k: int
    window: tuple[int, int]
    """(left, right) from the bottom-right diagonal; -1: open."""

    @property
    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_q, self.cu_k, self.max_q, self.max_k


class Engine(Protocol):
    """A varlen attention over packed rows; q, k, v, dout contiguous, of one head dim, lse [H, t]."""

    @property
    def caps(self) -> bool:
        """Whether it caps scores."""
        ...

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class TorchVarlen:
    """`torch.nn.attention.varlen`. Its backward is called as an operator, since it needs the final out and lse."""

    caps = False

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        out, lse = varlen_attn(
            q,
            k,
            v,
            *call.lengths,
            return_aux=AuxRequest(lse=True),
            scale=scores.scale,
            window_size=call.window,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out, lse

    def backward(
        self, call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.torch_attn._varlen_attn_backward(
            dout, q, k, v, out, lse, *call.lengths, call.window == (-1, 0), no_dropout, scores.scale, list(call.window)
        )


class FlashAttention2:
    """flash-attn >= 2.7: deterministic backward, at the price of some memory."""

    caps = True

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        left, right = call.window
        out, lse, *_ = _flash_attn_varlen_forward(
            q,
            k,
            v,
            *call.lengths,
            0.0,
            scores.scale,
            causal=call.window == (-1, 0),
            window_size_left=left,
            window_size_right=right,
            softcap=scores.softcap or 0.0,
        )
        return out, lse

    def backward(
        self, call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        left, right = call.window
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_varlen_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            *call.lengths,
            0.0,
            scores.scale,
            causal=call.window == (-1, 0),
            window_size_left=left,
            window_size_right=right,
            softcap=scores.softcap or 0.0,
            alibi_slopes=None,
            deterministic=True,
        )
        return dq, dk, dv


@dataclass(frozen=True, kw_only=True, eq=False)
class CudaHandle:
    calls: list[Call]
    q_rows: Rows
    k_rows: Rows
    num_q: int
    """Touched query rows."""
    num_k: int
    whole: bool
    """Whether the one call's results are the handle's results as they are."""
    engine: Engine


def check(q_THD: Tensor, v_SKV: Tensor, scores: Scores, engine: Engine | None = None) -> None:
    """ValueError for a dtype, head dim or softcap that is beyond the varlen kernel."""
    dim = max(q_THD.shape[2], v_SKV.shape[2])
    if q_THD.dtype not in (torch.float16, torch.bfloat16) or dim > 256 or dim % 8:
        raise ValueError(
            f"Flash attention on CUDA takes fp16 or bf16 and a head dim of 8, 16, … 256; got {q_THD.dtype} and "
            f'{dim}. Cast, pad, or pass kernel="reference" (exact and slow).'
        )
    if scores.softcap is not None and not (engine or _installed()).caps:
        raise ValueError(
            f"torch's varlen attention does not cap scores; got softcap={scores.softcap}. Install flash-attn >= 2.7, "
            'or pass kernel="reference" (exact and slow).'
        )


def prepare(tiles: Int64, num_q: int, num_k: int, device: torch.device, engine: Engine | None = None) -> CudaHandle:
    """Cut tiles (int64[m, 6] of addresses) into segments, group them into varlen calls, make their index tensors."""
    pieces = _alike(segments(split_staircases(tiles)), num_q, num_k)
    pieces = pieces[np.lexsort((pieces[:, 2], pieces[:, 0]))]
    windows, kind = np.unique(pieces[:, 4:], axis=0, return_inverse=True)
    # Neither query nor key rows twice in a call: results and gradients are then copied by unique indices.
    rows = np.column_stack([pieces[:, :2], pieces[:, 2:4] + num_q])
    layer = layers(rows, kind.ravel(), num_q + num_k)
    q_touched, q_place = touched(pieces[:, 0], pieces[:, 1], num_q)
    k_touched, k_place = touched(pieces[:, 2], pieces[:, 3], num_k)
    calls = []
    for window, depth in sorted(set(zip(kind.ravel().tolist(), layer.tolist(), strict=True))):
        p = pieces[(kind.ravel() == window) & (layer == depth)]
        q, k = _expanded(p[:, 0], p[:, 1]), _expanded(p[:, 2], p[:, 3])
        left, right = windows[window].tolist()
        calls.append(
            Call(
                q_source=rows_of(q, device),
                k_source=rows_of(k, device),
                q_target=rows_of(q_place[q], device),
                k_target=rows_of(k_place[k], device),
                cu_q=_boundaries(p[:, 1] - p[:, 0], device),
                cu_k=_boundaries(p[:, 3] - p[:, 2], device),
                max_q=int((p[:, 1] - p[:, 0]).max()),
                max_k=int((p[:, 3] - p[:, 2]).max()),
                window=(left, right),
            )
        )
    return CudaHandle(
        calls=calls,
        q_rows=rows_of(q_touched, device),
        k_rows=rows_of(k_touched, device),
        num_q=len(q_touched),
        num_k=len(k_touched),
        whole=len(calls) == 1
        and covers(calls[0].q_target, len(q_touched))
        and covers(calls[0].k_target, len(k_touched)),
        engine=engine or _installed(),
    )


def forward(handle: CudaHandle, q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """→ out [t, H, V], lse [H, t] of handle.q_rows."""
    if q_THD.shape[2] != v_SKV.shape[2]:
        q_THD, k_SKD, v = widened(max(q_THD.shape[2], v_SKV.shape[2]), q_THD, k_SKD, v_SKV)
        out, lse = forward(handle, q_THD, k_SKD, v, scores)
        return out[..., : v_SKV.shape[2]].contiguous(), lse
    dtype = sum_dtype(q_THD.dtype)
    if not handle.whole:
        out = q_THD.new_zeros((handle.num_q, *q_THD.shape[1:]), dtype=dtype)
        lse_TH = q_THD.new_full((handle.num_q, q_THD.shape[1]), -torch.inf, dtype=dtype)
    for call in handle.calls:
        q, k, v = _packed(call.q_source, q_THD), _packed(call.k_source, k_SKD), _packed(call.k_source, v_SKV)
        part, part_lse_HT = handle.engine.forward(call, q, k, v, scores)
        if handle.whole:
            return part, part_lse_HT
        merge_(out, lse_TH, call.q_target, part, part_lse_HT.transpose(0, 1))
    return out, lse_TH.transpose(0, 1)


def backward(
    handle: CudaHandle,
    dout_THV: Tensor,
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKV: Tensor,
    out_THV: Tensor,
    lse_HT: Tensor,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """→ dq [t, H, D] of handle.q_rows, dk [s, K, D] and dv [s, K, V] of handle.k_rows."""
    D, V = q_THD.shape[2], v_SKV.shape[2]
    if D != V:
        dout_THV, q, k, v, out = widened(max(D, V), dout_THV, q_THD, k_SKD, v_SKV, out_THV)
        dq, dk, dv = backward(handle, dout_THV, q, k, v, out, lse_HT, scores)
        return dq[..., :D], dk[..., :D], dv[..., :V]
    dtype = sum_dtype(q_THD.dtype)
    if not handle.whole:
        dq = q_THD.new_zeros((handle.num_q, *q_THD.shape[1:]), dtype=dtype)
        dk, dv = (k_SKD.new_zeros((handle.num_k, *k_SKD.shape[1:]), dtype=dtype) for _ in range(2))
    for call in handle.calls:
        dout, q, out = (_packed(call.q_source, x) for x in (dout_THV, q_THD, out_THV))
        k, v = _packed(call.k_source, k_SKD), _packed(call.k_source, v_SKV)
        lse = take(lse_HT.transpose(0, 1), call.q_source).transpose(0, 1).contiguous()
        grads = handle.engine.backward(call, dout, q, k, v, out, lse, scores)
        if handle.whole:
            return grads
        add_(dq, call.q_target, grads[0])
        add_(dk, call.k_target, grads[1])
        add_(dv, call.k_target, grads[2])
    return dq, dk, dv


def _installed() -> Engine:
    return FlashAttention2() if find_spec("flash_attn") is not None else TorchVarlen()


def _packed(rows: Rows, x: Tensor) -> Tensor:
    return take(x, rows).contiguous()


def _alike(pieces: Int64, num_q: int, num_k: int) -> Int64:
    """Single queries that see all their keys count as causal where others are, so that they share a call."""
    causal = (pieces[:, 4:] == (-1, 0)).all(axis=1)
    single = (pieces[:, 1] - pieces[:, 0] == 1) & (pieces[:, 4:] == (-1, -1)).all(axis=1)
    for start, stop, rows in ((0, 1, num_q), (2, 3, num_k)):
        _, before = touched(pieces[causal, start], pieces[causal, stop], rows)
        before = np.append(-1, before)  # index i: touched rows before row i, less one
        single &= before[pieces[:, start]] == before[pieces[:, stop]]
    pieces[single & causal.any(), 5] = 0
    return pieces


def _expanded(start: Int64, stop: Int64) -> Int64:
    lengths = stop - start
    return np.arange(lengths.sum()) + np.repeat(start - (np.cumsum(lengths) - lengths), lengths)


def _boundaries(lengths: Int64, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)
