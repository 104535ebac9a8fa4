"""What a run really sends and computes, counted where it happens; to be held against what plans promise (`loads()`).

A `Counter` given to `CpGroups` counts for everything that runs over them: bytes that leave for and come from other ranks,
(query, key) pairs that kernels are called for, and the CPU seconds that this rank's thread spends in those calls. It
does so by standing between the executors and their groups and kernels; without a counter nothing stands there.

A rank's own rows and the words of agreement.py are not traffic. Seconds are those of the thread that computes, so
ask torch for one thread where they matter; a GPU's are not seen.

    >>> from equipoise.attention.executor import attend
    >>> from equipoise.attention.groups import CpGroups
    >>> from equipoise.attention.ring import ring_plan
    >>> from equipoise.packing.shards import zigzag
    >>> counter = Counter()
    >>> groups = CpGroups(dp=1, cp=1, counter=counter)
    >>> plan = ring_plan(zigzag([0, 5, 8], 1), ranks=(0,))
    >>> q = torch.randn(8, 2, 16)
    >>> _ = attend(plan, q, q, q, groups)
    >>> counts = counter.take()
    >>> counts.pairs == int(plan.loads().pairs[0]), counts.bytes_sent
    (True, 0)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from .bands import Int64, pairs
from .groups import Group, Work
from .kernels.contract import Kernel, Rows, Scores


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of one rank, over all layers, forward and backward, since they were last taken."""

    bytes_sent: int = 0
    """To other ranks."""
    bytes_received: int = 0
    q_bytes_sent: int = 0
    """Of those, what is of queries that an AttentionPlan moves: q, O, LSE and their gradients."""
    q_bytes_received: int = 0
    pairs: int = 0
    """(query, key) pairs of forward kernel calls. Under Ulysses all pairs of the pack, for a share of the heads."""
    head_pairs: int = 0
    """The same times the query heads of each call: the work."""
    pairs_backward: int = 0
    tile_seconds: float = 0.0
    """CPU seconds of this thread in kernel calls, forward and backward."""
    exchanges: int = 0
    """That this rank sent or received something in."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def describe(self) -> str:
        return (
            f"{self.pairs} pairs in {self.tile_seconds:.3g} CPU seconds of tiles, {self.bytes_sent} bytes sent and "
            f"{self.bytes_received} received in {self.exchanges} exchanges"
        )

    __str__ = describe


class Counter:
    """Adds up `Counts`; `take` returns them and begins anew."""

    def __init__(self) -> None:
        self.counts = Counts()

    def take(self) -> Counts:
        """What was counted since the last call."""
        counts, self.counts = self.counts, Counts()
        return counts

    def add(self, counts: Counts) -> None:
        self.counts += counts

    def group(self, group: Group | None, index: int) -> Group | None:
        """The group with its bytes counted. index: of this rank in it."""
        return None if group is None else CountedGroup(counted=group, index=index, counter=self)

    def kernel(self, kernel: Kernel) -> Kernel:
        """The kernel with its pairs and seconds counted."""
        return CountedKernel(counted=kernel, counter=self)


# Both compare by what they wrap, so that what was prepared for one is found again by the next.
@dataclass(frozen=True, kw_only=True)
class CountedGroup:
    counted: Group
    index: int
    counter: Counter
    queries: bool = False
    """What it exchanges is of queries."""

    def of_queries(self) -> CountedGroup:
        return replace(self, queries=True)

    def exchange(self, sent: Tensor, send: list[int], received: Tensor, receive: list[int]) -> Work:
        going, coming = (sum(rows) - rows[self.index] for rows in (send, receive))
        out, into = going * _row_bytes(sent), coming * _row_bytes(received)
        self.counter.add(
            Counts(
                bytes_sent=out,
                bytes_received=into,
                q_bytes_sent=out * self.queries,
                q_bytes_received=into * self.queries,
                exchanges=int(going + coming > 0),
            )
        )
        return self.counted.exchange(sent, send, received, receive)


@dataclass(frozen=True, kw_only=True, eq=False)
class CountedHandle:
    handle: Any
    pairs: int

    @property
    def q_rows(self) -> Rows:
        return self.handle.q_rows

    @property
    def k_rows(self) -> Rows:
        return self.handle.k_rows


@dataclass(frozen=True, kw_only=True)
class CountedKernel:
    counted: Kernel
    counter: Counter

    def check(self, q_THD: Tensor, v_SKV: Tensor, scores: Scores) -> None:
        self.counted.check(q_THD, v_SKV, scores)

    def prepare(self, tiles: Int64, num_q: int, num_k: int, device: torch.device) -> CountedHandle:
        handle = self.counted.prepare(tiles, num_q, num_k, device)
        return CountedHandle(handle=handle, pairs=int(pairs(tiles).sum()))

    def forward(self, handle: CountedHandle, q_THD: Tensor, *operands: Any) -> tuple[Tensor, Tensor]:
        begin = time.thread_time()
        result = self.counted.forward(handle.handle, q_THD, *operands)
        spent, heads = time.thread_time() - begin, q_THD.shape[1]
        self.counter.add(Counts(pairs=handle.pairs, head_pairs=handle.pairs * heads, tile_seconds=spent))
        return result

    def backward(self, handle: CountedHandle, *operands: Any) -> tuple[Tensor, Tensor, Tensor]:
        begin = time.thread_time()
        result = self.counted.backward(handle.handle, *operands)
        self.counter.add(Counts(pairs_backward=handle.pairs, tile_seconds=time.thread_time() - begin))
        return result


def _row_bytes(x: Tensor) -> int:
    return x.element_size() * x.shape[1:].numel()
