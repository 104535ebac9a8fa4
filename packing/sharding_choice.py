"""Choosing how to shard a pack by the time its kernels take (WLB-LLM, OSDI'25, section 5.2: adaptive sharding).

Per-document sharding balances pairs exactly and cuts short documents into pieces that waste tiles and need nearly all
KV; per-sequence sharding keeps documents whole and leaves ranks idle. Decided here: which of the two, for each pack,
by the slowest rank's seconds under a cost that knows both. ``mixed.py`` decides per document.

A rank's seconds are those of its attention kernels, one for each document it holds rows of, or those of receiving the
KV rows it needs, whichever is longer: what of the transfer fits behind the kernels is hidden. Rows are counted as if
they came straight from where they are; a ring that forwards them moves more.

Cost: a numpy pass over the segments of both, 0.3–1 ms for 100 documents on 16 ranks.

    >>> cost = ShardCost(flops_per_pair=4 * 64 * 128)
    >>> adaptive([0, 65536], 8, cost).describe()                    # one document: the two are the same
    '8 ranks x 8192 tokens in 15 segments; pairs max/mean 1.000'
    >>> short = np.arange(0, 65537, 512)                            # 128 of 512 tokens: whole
    >>> len(adaptive(short, 8, cost).segments), len(zigzag(short, 8).segments)
    (128, 1920)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cost import Float64, ModelShape, causal_pairs
from .efficiency import kernel_seconds
from .packs import Int64
from .shards import Shards, zigzag

KernelSeconds = Callable[[Int64, Int64, Int64, float], Float64]


@dataclass(frozen=True, kw_only=True)
class ShardCost:
    """What attention over a pack costs one rank of its CP group, forward."""

    flops_per_pair: float
    """Of all layers, or of one: the same as `row_seconds`."""
    row_seconds: float = 0.0
    """Seconds to receive the keys and values of one token. 0: transfers are free, or always hidden."""
    kernel: KernelSeconds = kernel_seconds
    """Seconds of calls by (pairs, query rows, keys, flops_per_pair), vectorised: by `efficiency.py`, or yours."""

    def __post_init__(self) -> None:
        if not (self.flops_per_pair > 0 and 0 <= self.row_seconds < np.inf):
            raise ValueError(
                f"ShardCost has flops_per_pair > 0 and row_seconds >= 0; got {self.flops_per_pair} and "
                f"{self.row_seconds}."
            )

    @staticmethod
    def of(shape: ModelShape, *, bytes_per_second: float, bytes_per_number: int = 2) -> ShardCost:
        """The cost of `shape` where a rank receives `bytes_per_second`."""
        row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * bytes_per_number
        return ShardCost(flops_per_pair=shape.flops_per_pair, row_seconds=row / bytes_per_second)

    def seconds(self, shards: Shards) -> Float64:
        """Seconds of each rank, float64[cp_size]."""
        rank, rows, _, pairs = _calls(shards)
        # The table knows causal documents and even shares of them; a share's rows see as many keys as those of one of
        # this length, whatever end of the document they are from.
        keys = np.maximum(2 * pairs // np.maximum(rows, 1) - 1, 1)
        each = self.kernel(pairs, rows, keys, self.flops_per_pair)
        kernels = np.bincount(rank, weights=each, minlength=shards.cp_size)
        return np.maximum(kernels, received_rows(shards) * self.row_seconds)


def received_rows(shards: Shards) -> Int64:
    """KV rows that each rank needs and does not hold, int64[cp_size]: of each document all up to its last row there."""
    rank, rows, keys, _ = _calls(shards)
    received = np.zeros(shards.cp_size, np.int64)
    np.add.at(received, rank, keys - rows)
    return received


def _calls(shards: Shards) -> tuple[Int64, Int64, Int64, Int64]:
    """(Rank, rows, keys up to the last row, pairs) of each document on each rank that holds some of it."""
    rank = np.repeat(np.arange(shards.cp_size), np.diff(shards.offsets))
    order = np.lexsort((shards.document, rank))
    rank, document = rank[order], shards.document[order]
    start, stop = (shards.segments[order] - shards.cu_seqlens[document][:, None]).T
    begins = np.flatnonzero(np.r_[True, (rank[1:] != rank[:-1]) | (document[1:] != document[:-1])][: len(order)])
    if not len(order):
        return rank, rank, rank, rank
    rows, pairs = (np.add.reduceat(values, begins) for values in (stop - start, causal_pairs(start, stop)))
    return rank[begins], rows, np.maximum.reduceat(stop, begins), pairs


def adaptive(cu_seqlens: npt.ArrayLike, cp_size: int, cost: ShardCost) -> Shards:
    """``zigzag`` per sequence or per document, whichever ends sooner; per document where both do at once."""
    whole, cut = zigzag(cu_seqlens, cp_size, per="sequence"), zigzag(cu_seqlens, cp_size)
    return whole if cost.seconds(whole).max() < cost.seconds(cut).max() else cut
