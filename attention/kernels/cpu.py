"""CPU backend: aten's flash attention for CPU, a few batched calls for many small tiles.

The op's traps decide the shape of this file. It is causal from the top left, so bands are cut into full rectangles and
causal squares (bands.squares), which is faster than a mask too; flipped squares are read backwards. It dies on empty
tiles and gives lse 0 to rows without keys, so neither ever reaches it. It is silently wrong if the last dim is not
contiguous. Its bf16 backward is slow below 256 rows, so small tiles go through fp32. It takes values of the queries'
head dim only, so the smaller of the two is filled up with zeros, which costs as much as if both were the larger.

Padding in a batch repeats a piece's last row. A padded query sees what that row sees, with dO = 0, so its P is finite
and its gradients are 0; a padded key is seen by padded queries only (squares) or masked (rectangles).
"""

# T query rows, S key rows, H query heads, K key heads, D head dim, V that of values; B pieces in a call, padded to L, M rows.
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..bands import FLIPPED, FULL, Int64, squares
from .contract import Rows, Scores, add_, merge_, put_, rows_of, sum_dtype, take, widened
from .grouping import batches, touched
from .staircase import split_staircases

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

SLOW_BACKWARD = 256
"""bf16 backward of shorter tiles is several times faster through fp32."""
FEW = 4
"""Copying a row by its index takes about as long as zeroing so many and adding."""
LONG = 48
"""Rows from which on a piece is copied to its place by itself faster than row by row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """The rows of a call on one side (queries or keys): where they are read and where their results go."""

    length: int
    """Rows of a piece, padding counted."""
    source: Rows
    """Rows of the buffer, B · length, with repetitions where padded."""
    target: Rows
    """The same rows among the touched ones."""
    real: Tensor | None
    """Which of the B · length are no padding; None: all."""
    pads: Tensor | None
    """Which are padding."""
    place: Rows
    """The target of the real ones."""
    spans: list[tuple[int, int, int]] | None
    """(first row of the call, first touched row, rows) of each piece, where pieces are long enough to be copied one by one."""
    first: bool
    """Whether no earlier call nor another piece of this one touches these rows."""
    copied: bool
    """Whether results are copied to where they go, rather than added to what is there; only if `first`."""

    @property
    def rows(self) -> int:
        """Padding left out."""
        return self.place.stop - self.place.start if isinstance(self.place, slice) else len(self.place)

    def read(self, x: Tensor) -> Tensor:
        """[rows, heads, D] → [B, heads, length, D], a view where rows lie side by side."""
        return take(x, self.source).unflatten(0, (-1, self.length)).transpose(1, 2)

    def write(self, x: Tensor, part: Tensor) -> None:
        """Bring results [B · length, heads, D] to their rows; those of padding, gradients, are 0."""
        if not self.copied:
            add_(x, self.target, part)
        elif self.spans is not None:
            for at, to, rows in self.spans:
                x[to : to + rows] = part[at : at + rows]
        else:
            put_(x, self.place, part if self.real is None else part.index_select(0, self.real))


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One batched call of the op."""

    causal: bool
    q: Side
    k: Side
    mask: Tensor | None
    """[B, 1, 1, M] fp32, -inf on padded keys; None: no padded key is visible."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CpuHandle:
    calls: list[Call]
    q_rows: Rows
    k_rows: Rows
    num_q: int
    """Touched query rows."""
    num_k: int
    whole: bool
    """Whether the one call's results are the handle's results as they are."""

    def new(self, like: Tensor, side: str, dtype: torch.dtype) -> Tensor:
        """For results of all touched rows of a side, [rows, heads, D]: zeros, unless all of them will be copied."""
        rows = self.num_q if side == "q" else self.num_k
        make = torch.empty if all(getattr(call, side).copied for call in self.calls) else torch.zeros
        return make((rows, *like.shape[1:]), dtype=dtype, device=like.device)


def check(q_THD: Tensor, v_SKV: Tensor, scores: Scores) -> None:
    """ValueError for capped scores."""
    if scores.softcap is not None:
        raise ValueError(
            f"The cpu attention kernel does not cap scores; got softcap={scores.softcap}. "
            'Pass kernel="reference" (exact and slow).'
        )


def prepare(tiles: Int64, num_q: int, num_k: int, device: torch.device) -> CpuHandle:
    """Cut tiles (int64[m, 6] of addresses) into pieces, group them into calls, make their index tensors."""
    pieces = squares(split_staircases(tiles))
    q_touched, q_place = touched(pieces[:, 0], pieces[:, 1], num_q)
    k_touched, k_place = touched(pieces[:, 2], pieces[:, 3], num_k)
    calls, seen = [], (np.zeros(num_q, bool), np.zeros(num_k, bool))
    for group in batches(pieces, num_q):
        p = pieces[group]
        flipped = p[:, 4] == FLIPPED
        q = _side(p[:, 0], p[:, 1], flipped, q_place, seen[0], device)
        k = _side(p[:, 2], p[:, 3], flipped, k_place, seen[1], device)
        causal = bool(p[0, 4] != FULL)
        mask = None if causal or k.real is None else _key_mask(p[:, 3] - p[:, 2], k.length)
        calls.append(Call(causal=causal, q=q, k=k, mask=mask))
    q_sides, k_sides = _copied([call.q for call in calls]), _copied([call.k for call in calls])
    return CpuHandle(
        calls=[replace(call, q=q, k=k) for call, q, k in zip(calls, q_sides, k_sides, strict=True)],
        q_rows=rows_of(q_touched, device),
        k_rows=rows_of(k_touched, device),
        num_q=len(q_touched),
        num_k=len(k_touched),
        whole=len(calls) == 1 and all(isinstance(side.source, slice) for side in (calls[0].q, calls[0].k)),
    )


def forward(handle: CpuHandle, q_THD: Tensor, k_SKD: Tensor, v_SKV: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """→ out [t, H, V], lse [H, t] of handle.q_rows."""
    if q_THD.shape[2] != v_SKV.shape[2]:
        q_THD, k_SKD, v = widened(max(q_THD.shape[2], v_SKV.shape[2]), q_THD, k_SKD, v_SKV)
        out, lse = forward(handle, q_THD, k_SKD, v, scores)
        return out[..., : v_SKV.shape[2]].contiguous(), lse
    dtype, scale = q_THD.dtype, scores.scale
    if not handle.whole:
        once = all(call.q.first for call in handle.calls)
        out = handle.new(q_THD, "q", dtype if once else sum_dtype(dtype))
        lse_TH = q_THD.new_full((handle.num_q, q_THD.shape[1]), -torch.inf, dtype=sum_dtype(dtype))
    for call in handle.calls:
        mask = None if call.mask is None else call.mask.to(dtype)
        part, part_lse = _forward(
            call.q.read(q_THD), call.k.read(k_SKD), call.k.read(v_SKV), 0.0, call.causal, attn_mask=mask, scale=scale
        )
        part, part_lse = part.transpose(1, 2).flatten(0, 1), part_lse.transpose(1, 2).flatten(0, 1)
        if handle.whole:
            return part, part_lse.transpose(0, 1)
        side, real = call.q, call.q.real
        part_lse = part_lse if real is None else part_lse.index_select(0, real)
        if side.copied:
            side.write(out, part)
            put_(lse_TH, side.place, part_lse)
            continue
        part = part if real is None else part.index_select(0, real)
        if side.first:
            add_(out, side.place, part)
            put_(lse_TH, side.place, part_lse)
        else:
            merge_(out, lse_TH, side.place, part, part_lse)
    return out, lse_TH.transpose(0, 1)


def backward(
    handle: CpuHandle,
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
    dtype, scale = sum_dtype(q_THD.dtype), scores.scale
    if not handle.whole:
        dq = handle.new(q_THD, "q", dtype)
        dk, dv = handle.new(k_SKD, "k", dtype), handle.new(k_SKD, "k", dtype)
    for call in handle.calls:
        operands = [call.q.read(dout_THV), call.q.read(q_THD), call.k.read(k_SKD), call.k.read(v_SKV)]
        operands.append(call.q.read(out_THV))
        if max(call.q.length, call.k.length) < SLOW_BACKWARD:
            operands = [x.to(dtype) for x in operands]
        if call.q.pads is not None:
            # Padded rows repeat, so they were gathered: this writes into a copy.
            operands[0].transpose(1, 2).flatten(0, 1).index_fill_(0, call.q.pads, 0.0)
        lse = take(lse_HT.transpose(0, 1), call.q.source).unflatten(0, (-1, call.q.length)).transpose(1, 2)
        mask = None if call.mask is None else call.mask.to(operands[0].dtype)
        grads = _backward(*operands, lse, 0.0, call.causal, attn_mask=mask, scale=scale)
        dq_part, dk_part, dv_part = (g.transpose(1, 2).flatten(0, 1) for g in grads)
        if handle.whole:
            return dq_part, dk_part, dv_part
        call.q.write(dq, dq_part)
        call.k.write(dk, dk_part)
        call.k.write(dv, dv_part)
    return dq, dk, dv


def _side(start: Int64, stop: Int64, flipped: np.ndarray, place: Int64, seen: np.ndarray, device: torch.device) -> Side:
    """One side of a call over the intervals. Marks their rows as seen."""
    lengths = stop - start
    length = int(lengths.max())
    step = np.minimum(np.arange(length), lengths[:, None] - 1)
    index = np.where(flipped[:, None], stop[:, None] - 1 - step, start[:, None] + step).ravel()
    padding = (np.arange(length) >= lengths[:, None]).ravel()
    padded = bool(padding.any())
    target = rows_of(place[index], device)
    by_start = np.argsort(start)
    once = bool(np.all(start[by_start[1:]] >= stop[by_start[:-1]]))
    first = once and not seen[index].any()
    long = not isinstance(target, slice) and lengths.sum() >= LONG * len(start) and not flipped.any()
    spans = np.column_stack([np.arange(len(start)) * length, place[start], lengths]).tolist() if long else None
    side = Side(
        length=length,
        source=rows_of(index, device),
        target=target,
        real=torch.from_numpy(np.flatnonzero(~padding)) if padded else None,
        pads=torch.from_numpy(np.flatnonzero(padding)) if padded else None,
        place=rows_of(place[index[~padding]], device) if padded else target,
        spans=spans,
        first=first,
        copied=first and (isinstance(target, slice) or long),
    )
    seen[index] = True
    return side


def _copied(sides: list[Side]) -> list[Side]:
    """The sides of all calls, those of few rows copied row by row if nothing need then be zero before: a slow way to copy."""
    slow = sum(side.rows for side in sides if not side.copied)
    if not all(side.first for side in sides) or FEW * slow > sum(side.rows for side in sides):
        return sides
    return [replace(side, copied=True) for side in sides]


def _key_mask(lengths: Int64, length: int) -> Tensor:
    hidden = torch.from_numpy(np.arange(length) >= lengths[:, None])
    return torch.zeros(len(lengths), 1, 1, length).masked_fill_(hidden[:, None, None], -torch.inf)
