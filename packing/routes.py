"""Routes from one layout of a pack to another: which rows a rank sends where, in one all-to-all with uneven sizes.

Attention wants zigzag, recurrent and Ulysses layers want contiguous shards; Megatron-LM converts between the two with
a THD route (`context_parallel_layout/routes.py`). Decided here: nothing; a route follows from the two ``Shards``. Any
two of the same pack will do, evenly cut or not, of any document lengths.

The i-th row that a rank sends is ``x[source_index[i]]``, those for rank 0 first (``source_sizes`` rows for each
rank), for each rank in the order in which it will hold them. What arrives, from rank 0 first, are the rows
``y[target_index[i]]``. The way back, and the gradient's, is the same route reversed. An index that would change
nothing is None.

Cost: a few numpy passes over the pack's positions, about 2 ms for 128K tokens.

    >>> from .shards import contiguous, zigzag
    >>> cu = [0, 8, 12, 16]
    >>> there = route(contiguous(cu, 2), zigzag(cu, 2), rank=0)
    >>> there.source_index, there.source_sizes, there.target_index
    (array([0, 1, 6, 7, 2, 3, 4, 5]), array([4, 4]), None)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .packs import Int64
from .shards import Shards


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """One rank's part in changing the layout of a pack."""

    source_index: Int64 | None
    """int64[rows held before]: rows in the order they are sent."""
    source_sizes: Int64
    """int64[cp_size]: how many go to each rank."""
    target_index: Int64 | None
    """int64[rows held after]: where the rows go, in the order they arrive."""
    target_sizes: Int64
    """int64[cp_size]: how many come from each rank."""

    def reversed(self) -> Route:
        """The way back."""
        return Route(
            source_index=self.target_index,
            source_sizes=self.target_sizes,
            target_index=self.source_index,
            target_sizes=self.source_sizes,
        )


def route(source: Shards, target: Shards, rank: int) -> Route:
    """How `rank` gets from the rows it holds in `source` to those in `target`, two layouts of one pack on one group."""
    if source.cp_size != target.cp_size or source.cu_seqlens[-1] != target.cu_seqlens[-1]:
        raise ValueError(
            f"A route joins two layouts of one pack on one group; got {source.cu_seqlens[-1]} tokens on "
            f"{source.cp_size} ranks and {target.cu_seqlens[-1]} on {target.cp_size}."
        )
    if not 0 <= rank < source.cp_size:
        raise ValueError(f"A rank of this group is 0 … {source.cp_size - 1}; got {rank}.")
    source_rank = _homes(source)[0]
    target_rank, target_place = _homes(target)
    mine, wanted = source.positions(rank), target.positions(rank)
    # Both sides of a pair of ranks list its rows in the order of their place in the target.
    sent = np.lexsort((target_place[mine], target_rank[mine]))
    received = np.argsort(source_rank[wanted], kind="stable")
    return Route(
        source_index=_unless_identity(sent),
        source_sizes=np.bincount(target_rank[mine], minlength=source.cp_size),
        target_index=_unless_identity(received),
        target_sizes=np.bincount(source_rank[wanted], minlength=source.cp_size),
    )


def _homes(shards: Shards) -> tuple[Int64, Int64]:
    """(Rank, place on it) of each position of the pack, int64[tokens] each."""
    tokens = int(shards.cu_seqlens[-1])
    rank, place = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    for r in range(shards.cp_size):
        positions = shards.positions(r)
        rank[positions], place[positions] = r, np.arange(len(positions))
    return rank, place


def _unless_identity(index: Int64) -> Int64 | None:
    return None if np.array_equal(index, np.arange(len(index))) else index
