"""The order of a stream's documents: by rounds over its parts, so that it depends on nothing else.

Document 0 of part 0, of part 1, …, then document 1 of each, and so on; a part that is over is passed over. Which document is
next, and where, so follows from a round, a part and the ends that are known: neither ranks nor workers come into it. A part is
known to be over once it was looked for a document behind its last.

    >>> place = Place(epoch=0, round=4, part=1, ends=((2, 3),))                       # of four parts; part 2 has 3 documents
    >>> part, ordinal = place.visits(5, num_parts=4)
    >>> part.tolist(), ordinal.tolist(), place.consumed(4).tolist()
    ([1, 3, 0, 1, 3], [4, 4, 5, 5, 5], [5, 4, 3, 4])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..packing.packs import Int64


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where reading goes on in an epoch of a stream: at document ``round`` of ``part``, or the next that there is."""

    epoch: int
    round: int = 0
    part: int = 0
    ends: tuple[tuple[int, int], ...] = ()
    """(part, number of its documents) of parts known to be over."""

    def visits(self, count: int, num_parts: int) -> tuple[Int64, Int64]:
        """The next ``count`` places to look for a document: part and ordinal in it, int64[count]; none if all parts are
        over."""
        alive = np.setdiff1d(np.arange(num_parts), [part for part, _ in self.ends])
        if not len(alive):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        at = np.searchsorted(alive, self.part) + np.arange(count)
        return alive[at % len(alive)], self.round + at // len(alive)

    def behind(self, count: int, num_parts: int, ends: dict[int, int]) -> Place:
        """The place behind so many visits, which found the end of these parts."""
        part, ordinal = self.visits(count + 1, num_parts)
        return replace(self, round=int(ordinal[-1]), part=int(part[-1]), ends=(*self.ends, *sorted(ends.items())))

    def earlier(self, ordinal: int, part: int) -> Place:
        """The same epoch at an earlier document: ends found behind it are not known yet."""
        ends = tuple((over, count) for over, count in self.ends if (count, over) < (ordinal, part))
        return replace(self, round=ordinal, part=part, ends=ends)

    @classmethod
    def of(cls, position: dict) -> Place:
        """From a position of ``StreamAdmission``."""
        ends = tuple((int(part), int(count)) for part, count in position["ends"])
        return cls(epoch=position["epoch"], round=position["round"], part=position["part"], ends=ends)

    def consumed(self, num_parts: int) -> Int64:
        """Documents of each part that lie before this place, int64[num_parts]."""
        before = self.round + (np.arange(num_parts) < self.part)
        for part, count in self.ends:
            before[part] = min(before[part], count)
        return before


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrivals:
    """The documents found by some visits, in their order, alike on all ranks."""

    part: Int64
    ordinal: Int64
    tokens: Int64
    """int64[n]; ``FAILED`` for one that could not be read, where that is no error."""
    targets: Int64
    ends: dict[int, int] = field(default_factory=dict)
    """Parts found to be over: how many documents each has."""
    columns: dict[str, str] | None = None
    """What each document has: names and kinds; None as long as none was read."""


More = Callable[[Place, int, dict[str, str] | None], Arrivals]
"""(place, number of visits, the columns that each document must have) → what they found."""


def told(parts: Sequence[Sequence[int]]) -> More:
    """``more`` of a stream whose documents have these tokens, by part, the same in each epoch: for simulations.

    >>> told([[5, 3], [7]])(Place(epoch=0), 4, None).tokens.tolist()
    [5, 7, 3]
    """

    def more(place: Place, count: int, columns: dict[str, str] | None) -> Arrivals:
        part, ordinal = place.visits(count, len(parts))
        held = np.array([len(tokens) for tokens in parts])
        there = ordinal < held[part]
        tokens = np.array([parts[p][o] for p, o in zip(part[there], ordinal[there], strict=True)], np.int64)
        return Arrivals(
            part=part[there],
            ordinal=ordinal[there],
            tokens=tokens,
            targets=np.maximum(tokens - 1, 0),
            ends={int(over): int(held[over]) for over in np.unique(part[~there])},
            columns=columns or {"input_ids": "int"},
        )

    return more
