"""What adds up over tiles and stages and comes home: outputs, merged by log-sum-exp, and gradients, summed.

A rank has totals for each of its buffers, its own rows' (buffer 0) among them; those of rows that it received go home
after their last use, while the next stage is computed, and join the total there by stage, then by sender; or they join that of a
rank on the way, which sends on the sum. All of it is
in promote(fp32, dtype), LSE too, but for what was computed in one piece and never joined.

    >>> outputs = Outputs(torch.zeros(2, 1, 4), [2], 4)
    >>> for value in (1.0, 3.0):                                         # two keys for row 0, of equal weight
    ...     outputs.put(0, slice(0, 1), (torch.full((1, 1, 4), value), torch.zeros(1, 1)))
    >>> outputs.of(0)[0][:, 0, 0].tolist(), outputs.of(0)[1].exp().tolist()
    ([2.0, 0.0], [[2.0], [0.0]])
"""

# T rows of a buffer, t those a tile touches, H query heads, V head dim of values.
from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from .groups import Group
from .kernels.contract import Rows, add_, covers, merge_, sum_dtype
from .transport import Freight, Parts, Travelling, no_rows, side_by_side


class Totals(Protocol):
    """By buffer."""

    like: Parts
    """No rows, in the shape and dtype that totals travel in."""

    def put(self, buffer: int, rows: Rows, parts: Parts) -> None:
        """Add to, or merge into, some rows of a buffer."""
        ...

    def of(self, buffer: int) -> Parts:
        """The total so far."""
        ...

    def drop(self, buffers: Iterable[int]) -> None:
        """Nothing more will be asked of these."""
        ...


def exchange(
    totals: Totals, coming: Travelling | None, freight: Freight | None, group: Group | None
) -> Travelling | None:
    """Put what is `coming` where it belongs, home or on its way; then start to send what goes home now."""
    if coming is not None:
        for buffer, rows, parts in coming.landings(totals.like):
            totals.put(buffer, rows, parts)
    if freight is None:
        return None
    dtype = totals.like[0].dtype
    leaving = freight.send(
        lambda buffer, rows: side_by_side(totals.of(buffer), rows, dtype), no_rows(totals.like, dtype), group
    )
    totals.drop(freight.spent)
    return leaving


class Outputs:
    """O [T, H, V] and LSE [T, H] of buffers of queries. rows: T of each."""

    def __init__(self, q_THD: Tensor, rows: list[int], value_dim: int) -> None:
        heads, dtype = q_THD.shape[1], sum_dtype(q_THD.dtype)
        self.like: Parts = (
            q_THD.new_empty((0, heads, value_dim), dtype=dtype),
            q_THD.new_empty((0, heads), dtype=dtype),
        )
        self._rows = rows
        self._totals: dict[int, Parts] = {}

    def put(self, buffer: int, rows: Rows, parts: Parts) -> None:
        if buffer not in self._totals and covers(rows, self._rows[buffer]):
            self._totals[buffer] = parts
            return
        out, lse = self.of(buffer)
        out = out.to(lse.dtype)
        merge_(out, lse, rows, *parts)
        self._totals[buffer] = out, lse

    def of(self, buffer: int) -> Parts:
        if buffer in self._totals:
            return self._totals[buffer]
        out, lse = (x.new_zeros((self._rows[buffer], *x.shape[1:])) for x in self.like)
        return out, lse.fill_(-torch.inf)

    def drop(self, buffers: Iterable[int]) -> None:
        for buffer in buffers:
            self._totals.pop(buffer, None)


class Sums:
    """Gradients of what buffers hold. like: parts of such a buffer; rows: how many each has."""

    def __init__(self, like: Parts, rows: list[int]) -> None:
        self.like = tuple(x.new_empty((0, *x.shape[1:]), dtype=sum_dtype(x.dtype)) for x in like)
        self._rows = rows
        self._totals: dict[int, Parts] = {}

    def put(self, buffer: int, rows: Rows, parts: Parts) -> None:
        if buffer not in self._totals and covers(rows, self._rows[buffer]):
            self._totals[buffer] = parts
            return
        self._totals[buffer] = tuple(x.to(y.dtype) for x, y in zip(self.of(buffer), self.like, strict=True))
        for total, part in zip(self._totals[buffer], parts, strict=True):
            add_(total, rows, part)

    def of(self, buffer: int) -> Parts:
        if buffer in self._totals:
            return self._totals[buffer]
        return tuple(x.new_zeros((self._rows[buffer], *x.shape[1:])) for x in self.like)

    def drop(self, buffers: Iterable[int]) -> None:
        for buffer in buffers:
            self._totals.pop(buffer, None)
