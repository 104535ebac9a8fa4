"""The two all-to-alls of Ulysses: own tokens of all heads for all tokens of own heads, and back; both differentiable.

q, k and v travel together with uneven splits. A rank that has none of a group's tokens, or few heads, takes part alike.
Gradients take the way back; those of KV heads that several ranks looked at are summed where the head's tokens are, in
promote(fp32, dtype), rank after rank.
"""

# T tokens at home, N tokens of the group, H query heads, K key heads, D head dim, h and m: this rank's share of H and K.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .groups import Group
from .kernels.contract import Rows, rows_of, sum_dtype, take
from .ulysses import HeadShare, UlyssesPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Trade:
    """What a rank's all-to-alls need, on a device, for some head counts; shared by all layers."""

    place: int
    tokens: list[int]
    """Tokens of each rank of the group."""
    to_pack: Rows
    """For each of the group's rows in the order of the pack, where it is among all ranks' rows."""
    to_ranks: Rows
    """The other way round."""
    shares: list[HeadShare]

    @staticmethod
    def of(plan: UlyssesPlan, device: torch.device, heads: int, kv_heads: int) -> Trade:
        """Raises ValueError where there are fewer query heads than ranks in a group."""
        first = plan.rank - plan.place
        rows = np.concatenate([plan.home_of(rank) for rank in range(first, first + plan.degree)])
        length = rows[:, 1] - rows[:, 0]
        positions = np.arange(length.sum()) + np.repeat(rows[:, 0] - (np.cumsum(length) - length), length)
        order = np.argsort(positions, kind="stable")
        return Trade(
            place=plan.place,
            tokens=[plan.tokens_of(rank) for rank in range(first, first + plan.degree)],
            to_pack=rows_of(order, device),
            to_ranks=rows_of(np.argsort(order), device),
            shares=plan.shares(heads, kv_heads),
        )

    @property
    def share(self) -> HeadShare:
        """Of this rank."""
        return self.shares[self.place]


def to_heads(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, trade: Trade, group: Group | None) -> tuple[Tensor, ...]:
    """q [N, h, D], k and v [N, m, D] of this rank's heads, in the order of the pack."""
    return _ToHeads.apply(q_THD, k_TKD, v_TKD, trade, group)


def to_tokens(out_NhD: Tensor, heads: int, trade: Trade, group: Group | None) -> Tensor:
    """out [T, H, D] of this rank's tokens."""
    return _ToTokens.apply(out_NhD, heads, trade, group)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, trade, group):
        ctx.trade, ctx.group, ctx.heads = trade, group, (q.shape[1], k.shape[1], v.shape[1])
        return tuple(_give([q, k, v], "qkv", trade, group))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return *_take_back(list(grads), "qkv", ctx.heads, ctx.trade, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, heads, trade, group):
        ctx.trade, ctx.group = trade, group
        return _take_back([out], "q", (heads,), trade, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        return *_give([dout], "q", ctx.trade, ctx.group), None, None, None


def _give(parts: Sequence[Tensor], kinds: str, trade: Trade, group: Group | None) -> list[Tensor]:
    """Own tokens of all heads [T, heads, dim] of each kind ("q" or "k" or "v") → all tokens of own heads [N, share, dim]."""
    T = len(parts[0])
    values = [[_heads(s, kind)[1] * x.shape[2] for kind, x in zip(kinds, parts, strict=True)] for s in trade.shares]
    widths = [sum(row) for row in values]
    sent = parts[0].new_empty(T * sum(widths))
    for share, block, row in zip(trade.shares, sent.split([T * width for width in widths]), values, strict=True):
        for kind, x, place in zip(kinds, parts, block.view(T, sum(row)).split(row, dim=1), strict=True):
            first, count = _heads(share, kind)
            place.unflatten(1, (count, x.shape[2])).copy_(x[:, first : first + count])
    own = widths[trade.place]
    received = _exchange(sent, [T * width for width in widths], [n * own for n in trade.tokens], group)
    whole = take(received.view(sum(trade.tokens), own), trade.to_pack).split(values[trade.place], dim=1)
    return [
        x.unflatten(1, (_heads(trade.share, kind)[1], part.shape[2]))
        for kind, x, part in zip(kinds, whole, parts, strict=True)
    ]


def _take_back(
    parts: Sequence[Tensor], kinds: str, heads: Sequence[int], trade: Trade, group: Group | None
) -> list[Tensor]:
    """The way back: all tokens of own heads of each kind → own tokens of all `heads`; heads that came twice are summed."""
    T, dtype = trade.tokens[trade.place], parts[0].dtype
    flat = torch.cat([x.flatten(1) for x in parts], dim=1) if len(parts) > 1 else parts[0].flatten(1)
    sent = take(flat, trade.to_ranks).contiguous().view(-1)
    values = [[_heads(s, kind)[1] * x.shape[2] for kind, x in zip(kinds, parts, strict=True)] for s in trade.shares]
    widths = [sum(row) for row in values]
    received = _exchange(sent, [n * flat.shape[1] for n in trade.tokens], [T * width for width in widths], group)
    totals = [
        x.new_empty((T, count, x.shape[2])) if kind == "q" else x.new_zeros((T, count, x.shape[2]), dtype=sum_dtype(dtype))
        for kind, x, count in zip(kinds, parts, heads, strict=True)
    ]  # fmt: skip
    for share, block, row in zip(trade.shares, received.split([T * width for width in widths]), values, strict=True):
        for kind, total, part in zip(kinds, totals, block.view(T, sum(row)).split(row, dim=1), strict=True):
            first, count = _heads(share, kind)
            part = part.unflatten(1, (count, total.shape[2]))
            if kind == "q":
                total[:, first : first + count] = part
            else:
                total[:, first : first + count] += part
    return [total.to(dtype) for total in totals]


def _heads(share: HeadShare, kind: str) -> tuple[int, int]:
    """(First head, number of heads) of a kind."""
    return (share.q0, share.q1 - share.q0) if kind == "q" else (share.k0, share.k1 - share.k0)


def _exchange(sent: Tensor, send: list[int], receive: list[int], group: Group | None) -> Tensor:
    """Exchange of flat values; split sizes in values."""
    if group is None:
        return sent
    received = sent.new_empty(sum(receive))
    group.exchange(sent, send, received, receive).wait()
    return received
