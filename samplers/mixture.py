"""MixedOrder: the order of documents drawn from several sources by weight, an endless stream that is addressed anywhere.

Decided here: which source each draw takes, and which of its documents. The j-th draw from a source with share p is due
at (j + 1/2) / p, and draws come as they are due, the first source first where two are. So after t draws of an epoch a
source of k has been drawn p·t times to within (1 + p·(k - 2)) / 2 documents, which is half a document for two sources,
however long the epoch is. The mix does not depend on the seed; the documents do: each pass over a source has an order
of its own (``order.permute``).

Every epoch draws as many documents from each source. If these are w passes over it and r documents more, then the w
passes are whole in every epoch, and the r go on where those of the epoch before stopped: nothing is starved, and the
source that sets the epoch's length is seen exactly once in it (see ``Blend.exhausted``).

Cost: per draw one comparison per source and ~30 ns for the bijection; per call of ``at`` a bisection for the place of the
first draw, some 20 µs per source; a call of ``permute`` per pass begun. No array of n is kept.

    >>> import numpy as np
    >>> from equipoise import Lengths
    >>> from equipoise.packing.blend import Blend
    >>> items = Items.of(Lengths.from_array(np.full(8, 5)), capacity=8)
    >>> blend = Blend(sizes=(6, 2), weights=(2, 1), exhausted="all_exhausted_without_replacement")
    >>> MixedOrder(items=items, blend=blend, shuffle=False).at(0, 8).tolist()
    [0, 6, 1, 2, 7, 3, 4, 5]
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numba import njit

from ..packing.blend import ONE, Blend
from ..packing.packs import Int64
from .items import Items
from .order import key_of, permute


@dataclass(frozen=True, kw_only=True, eq=False)
class MixedOrder:
    """Position in the endless stream (epoch 0, epoch 1, …) → item. ValueError where a source has none, or is grouped."""

    items: Items
    blend: Blend
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.items, Items):
            raise ValueError(
                f"sources are mixed document by document, and documents of a group stay together; got {len(self.blend.sizes)} "
                f"sources and a group for each document: leave out the groups, or the weights"
            )
        empty = np.flatnonzero(self.counts == 0)
        if len(empty):
            raise ValueError(
                f"every source of a mixture needs a document to draw; all {self.blend.sizes[empty[0]]} documents of source "
                f"{empty[0]} are empty or were dropped as too long: leave the source out, or choose another too_long"
            )

    @cached_property
    def _whole(self) -> Int64:
        """int64[k + 1]: the items of source i that are, or begin, a document are ``_whole[i] … _whole[i + 1]``."""
        offsets = self.blend.offsets
        return offsets - np.searchsorted(self.items.removed, offsets)

    @cached_property
    def _pieces(self) -> Int64:
        """int64[k + 1]: those that continue one are ``_pieces[i] … _pieces[i + 1]``."""
        return self._whole[-1] + np.searchsorted(self.items.piece_document, self.blend.offsets)

    @cached_property
    def counts(self) -> Int64:
        """Items of each source, int64[k]."""
        return np.diff(self._whole) + np.diff(self._pieces)

    @cached_property
    def draws(self) -> Int64:
        """Items drawn from each source in an epoch, int64[k]: at least one."""
        shares, counts = self.blend.shares.tolist(), self.counts.tolist()
        if self.blend.exhausted == "all_exhausted_without_replacement":
            return self.counts
        ends = [Fraction(count * ONE, share) for count, share in zip(counts, shares, strict=True)]
        end = min(ends) if self.blend.exhausted == "first_exhausted" else max(ends)
        return np.array([max(1, _due(share, end)) for share in shares], np.int64)

    @cached_property
    def size(self) -> int:
        """Draws of an epoch."""
        return int(self.draws.sum())

    def at(self, first: int, stop: int) -> Int64:
        """Items int64[stop - first] at these positions of the stream, which may run over epoch edges."""
        parts = [np.zeros(0, np.int64)]
        while first < stop:
            epoch, begin = divmod(first, self.size)
            end = min(begin + stop - first, self.size)
            parts.append(self._within(epoch, begin, end))
            first += end - begin
        return np.concatenate(parts)

    def _within(self, epoch: int, begin: int, end: int) -> Int64:
        source, nth = self.schedule(begin, end)
        items = np.empty(end - begin, np.int64)
        for number in np.unique(source).tolist():
            mine = np.flatnonzero(source == number)
            items[mine] = self._drawn(number, epoch, int(nth[mine[0]]), len(mine))
        return items

    def schedule(self, begin: int, end: int) -> tuple[Int64, Int64]:
        """The source of each draw ``begin … end`` of an epoch and which of its draws this is; int64[end - begin] each."""
        shares, draws = self.blend.shares.tolist(), self.draws.tolist()
        time, done = self._before(begin)
        # When each source's next draw is due, counted from `time` and in units of 1 / (2 · share), as Python's integers.
        ticks = [(2 * drawn + 1) * ONE - 2 * share * time for drawn, share in zip(done, shares, strict=True)]
        left = [drawn < count for drawn, count in zip(done, draws, strict=True)]
        due = [
            divmod(wait, 2 * share) if more else (0, 0) for wait, share, more in zip(ticks, shares, left, strict=True)
        ]
        whole, part = np.array(due, np.int64).T.copy()
        source, nth = np.empty(end - begin, np.int64), np.empty(end - begin, np.int64)
        _draw(whole, part, np.array(done, np.int64), self.draws, self.blend.shares, ONE, begin - sum(done), source, nth)
        return source, nth

    def _before(self, position: int) -> tuple[int, list[int]]:
        """The last whole time before which no more than ``position`` draws of an epoch are due, and those of each source."""
        shares, draws = self.blend.shares.tolist(), self.draws.tolist()
        low, high = 0, max(count * ONE // share for count, share in zip(draws, shares, strict=True)) + 1

        def done(time: int) -> list[int]:
            return [min(_due(share, time), count) for share, count in zip(shares, draws, strict=True)]

        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if sum(done(middle)) <= position else (low, middle - 1)
        return low, done(low)

    def _drawn(self, source: int, epoch: int, first: int, count: int) -> Int64:
        """Items of the draws ``first … first + count`` from a source in an epoch."""
        size = int(self.counts[source])
        passes, rest = divmod(int(self.draws[source]), size)
        parts, stop = [], first + count
        while first < stop:
            if first < passes * size:
                number, place = epoch * passes + first // size, first % size
            else:
                begun, place = divmod(epoch * rest + first - passes * size, size)
                number = -1 - begun  # keys of their own
            taken = min(size - place, stop - first)
            key = key_of(self.seed, source, number)
            parts.append(permute(place, taken, size, key) if self.shuffle else np.arange(place, place + taken))
            first += taken
        nth = np.concatenate(parts)
        documents = int(self._whole[source + 1] - self._whole[source])
        return nth + np.where(nth < documents, self._whole[source], self._pieces[source] - documents)

    def describe(self) -> str:
        """What an epoch draws from each source, in a line: nothing is left out or repeated silently."""
        told = ", ".join(
            f"{drawn} draws of {count} items"
            for drawn, count in zip(self.draws.tolist(), self.counts.tolist(), strict=True)
        )
        return f"an epoch of {self.size} items from {len(self.counts)} sources ({told}), {self.blend.exhausted}"

    __str__ = describe


def _due(share: int, time: int | Fraction) -> int:
    """Draws from a source that are due before a time, counted in draws from all."""
    return -((ONE - 2 * share * time) // (2 * ONE))


@njit(nogil=True, cache=True)
def _draw(whole, part, done, draws, shares, one, skip, source, nth):
    """Draw on: the source of each draw behind the first ``skip`` and which of its draws it is.

    The next draw of source i is due at whole + part / (2 · share); the wait for the one after is one / share.
    """
    for at in range(-skip, len(source)):
        best = -1
        for i in range(len(shares)):
            if done[i] == draws[i]:
                continue
            if best < 0 or whole[i] < whole[best]:
                best = i
            elif whole[i] == whole[best] and part[i] * shares[best] < part[best] * shares[i]:
                best = i
        if at >= 0:
            source[at], nth[at] = best, done[best]
        done[best] += 1
        whole[best] += one // shares[best]
        part[best] += 2 * (one % shares[best])
        if part[best] >= 2 * shares[best]:
            whole[best] += 1
            part[best] -= 2 * shares[best]
