"""Plans of a document that is computed in chunks: in each only the chunk's queries, against all keys so far. No torch.

What is decided: who holds what. A rank keeps the rows that it held when they were computed, chunk after chunk, so the home
of chunk j's plan are the rows of chunks 0 … j in this order, and its queries are the last of them; the ring sends the
earlier rows round again for each later chunk. Documents that only fill a chunk's pack up (a chunk with fewer tokens than
ranks needs one) come behind the document in the plan's positions, and attend to themselves.

Cost: a ring plan per chunk, over all segments so far.

    >>> first, second = chunk_plans([Home.whole([0, 4]), Home.whole([0, 3, 5])], ranks=(0,), rank=0)
    >>> second.home.tolist(), second.tiles[:, 2:6].tolist()
    ([[0, 4], [4, 7], [7, 9]], [[4, 7, 0, 4], [4, 7, 4, 7], [7, 9, 7, 9]])
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..packing.shards import Shards
from .plan import AttentionPlan, Int64
from .ring import ring_plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Home:
    """Which tokens of a chunk's pack each rank holds, in order."""

    cu_seqlens: Int64
    """int64[d+1], boundaries of the pack: the chunk comes first, further documents only fill it up."""
    offsets: Int64
    """int64[P+1], CSR: rank → intervals."""
    intervals: Int64
    """int64[n, 2], (start, stop) in the pack, none across a boundary."""

    @staticmethod
    def whole(cu_seqlens: npt.ArrayLike) -> Home:
        """One rank holds all of it."""
        cu = np.asarray(cu_seqlens, dtype=np.int64)
        return Home(cu_seqlens=cu, offsets=np.array([0, len(cu) - 1]), intervals=np.column_stack([cu[:-1], cu[1:]]))


def chunk_plans(homes: list[Home], ranks: tuple[int, ...], rank: int) -> list[AttentionPlan]:
    """The plan of each chunk of a document, homes being those of its packs in order, for `rank`, an index into `ranks`."""
    own = np.array([home.cu_seqlens[1] for home in homes])
    filled = np.array([home.cu_seqlens[-1] for home in homes]) - own
    stops, behind = np.cumsum(own), np.cumsum(filled)
    chunk = np.repeat(np.arange(len(homes)), [len(home.intervals) for home in homes])
    segments = np.concatenate([home.intervals for home in homes])
    holder = np.concatenate([np.repeat(np.arange(len(ranks)), np.diff(home.offsets)) for home in homes])
    filler = segments[:, 0] >= own[chunk]
    # Positions of the document, and of the fillers counted from its end.
    segments = segments + np.where(filler, (behind - filled - own)[chunk], (stops - own)[chunk])[:, None]
    ends = [home.cu_seqlens[2:] - n + at for home, n, at in zip(homes, own, behind - filled, strict=True)]
    plans = []
    for j, stop in enumerate(stops.tolist()):
        held = np.flatnonzero(chunk <= j)
        held = held[np.argsort(holder[held], kind="stable")]
        placed = segments[held] + np.where(filler[held], stop, 0)[:, None]
        cu = np.concatenate([[0, stop], *(stop + end for end in ends[: j + 1])])
        shards = Shards(
            cu_seqlens=cu,
            cp_size=len(ranks),
            offsets=np.searchsorted(holder[held], np.arange(len(ranks) + 1)).astype(np.int64),
            segments=placed,
            document=np.searchsorted(cu, placed[:, 0], side="right") - 1,
        )
        plans.append(_queries_of(ring_plan(shards, ranks, rank), stop - own[j], stop, cu[-1] - filled[j]))
    return plans


def _queries_of(plan: AttentionPlan, start: int, stop: int, fillers: int) -> AttentionPlan:
    """Only the queries start … stop - 1 of the document, and those of the fillers from position `fillers` on."""
    first, last = plan.tiles[:, 2], plan.tiles[:, 3]
    # Segments end where chunks do, so no tile has queries of two.
    own = ((first >= start) & (last <= stop)) | (first >= fillers)
    return replace(plan, tiles=plan.tiles[own], planner=None)
