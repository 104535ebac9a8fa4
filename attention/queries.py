"""Queries as they travel: q onward in forward; in backward what their gradient needs, dO, O and LSE, and q again unless kept.

All of a row travels side by side in q's dtype; the LSE, which must keep its precision, as its bits.

    >>> lse_HT = torch.tensor([[0.1], [-torch.inf]])
    >>> bits = as_bits(lse_HT, torch.bfloat16)
    >>> bits.shape, torch.equal(from_bits(bits, lse_HT.dtype), lse_HT)
    (torch.Size([1, 4]), True)
"""

# T query rows of a buffer, H query heads, D head dim, V that of values.
from __future__ import annotations

import torch
from torch import Tensor

from .transport import Journey, Parts


def as_bits(lse_HT: Tensor, dtype: torch.dtype) -> Tensor:
    """→ [T, H · the size of an LSE over that of dtype]."""
    return lse_HT.transpose(0, 1).contiguous().view(dtype)


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """→ LSE [H, T] in dtype."""
    # A copy, since columns of other rows need not lie where wider values may begin.
    return bits.clone(memory_format=torch.contiguous_format).view(dtype).transpose(0, 1)


def onward(dout_THV: Tensor, q_THD: Tensor, out_THV: Tensor, lse_HT: Tensor, kept: bool) -> Parts:
    """What travels of the queries at home in backward. kept: q was, where it went."""
    parts = dout_THV, out_THV, as_bits(lse_HT, q_THD.dtype)
    return parts if kept else (q_THD, *parts)


def looked_at(journey: Journey, buffer: int, kept: dict[int, Tensor] | None, lse_dtype: torch.dtype) -> Parts:
    """(dO, q, O, LSE [H, T]) of a buffer of received queries. kept: q of each buffer."""
    *q, dout, out, bits = journey.of(buffer)
    return dout, *(q if kept is None else [kept[buffer]]), out, from_bits(bits, lse_dtype)
