"""Attention sinks: a learned score per head that takes part in the softmax and has no value (gpt-oss's `s_aux`).

What is decided: kernels know nothing of them. A sink adds exp(sink) to the denominator of every row, so the final out and
lse over all keys are corrected once, wherever the keys were computed:

    lse' = logaddexp(lse, sink),  out' = out · exp(lse - lse')

Backward passes of kernels take the final out' and lse' and are then exact as they are, and the sink's own gradient is
-Σ_t exp(sink - lse'_t) · (dout_t · out'_t), over the tokens and heads at hand: the ranks' sum is the whole.

    >>> out, lse = with_sinks(torch.ones(1, 1, 2), torch.zeros(1, 1), torch.zeros(1))       # one key, and a sink as strong
    >>> out.tolist(), lse.exp().tolist()
    ([[[0.5, 0.5]]], [[2.0]])
"""

# T query rows, H query heads, V head dim of values.
from __future__ import annotations

import torch
from torch import Tensor


def check_sinks(sinks: Tensor | None, q_THD: Tensor) -> None:
    """ValueError unless there is one score per head, on the queries' device."""
    if sinks is None:
        return
    if sinks.shape != q_THD.shape[1:2] or not sinks.is_floating_point() or sinks.device != q_THD.device:
        raise ValueError(
            f"sinks are one floating score per query head, [{q_THD.shape[1]}] on {q_THD.device}; got "
            f"{list(sinks.shape)} {sinks.dtype} on {sinks.device}."
        )


def with_sinks(out_THV: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """→ out and lse with the sinks counted, in lse's dtype."""
    total = torch.logaddexp(lse_TH, sinks_H.to(lse_TH.dtype))
    weight = torch.exp(lse_TH - total.masked_fill(total == -torch.inf, 0.0))
    return out_THV.to(lse_TH.dtype) * weight[..., None], total


def sink_gradients(sinks_H: Tensor, dout_THV: Tensor, out_THV: Tensor, lse_TH: Tensor) -> Tensor:
    """→ [H], from the out and lse that have the sinks counted; [T, H] where each row has sinks of its own."""
    dtype = lse_TH.dtype
    weight = torch.exp(sinks_H.to(dtype) - lse_TH)
    grads = -(weight * (dout_THV.to(dtype) * out_THV.to(dtype)).sum(-1))
    return (grads.sum(0) if sinks_H.ndim == 1 else grads).to(sinks_H.dtype)
