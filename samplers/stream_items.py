"""StreamItems: what can be admitted of a stream, of which only the next documents are known.

The same policies as ``Items`` (empty documents, and those that no pack can hold), over a rolling table of documents in the
order in which they arrive: a row is some 64 bytes, and is forgotten when nothing will ask for it again. Documents are
numbered by their place in that order within the epoch; an item is a document or a piece of one, and its number holds both,
so that it can be told again in a resumed run.

    >>> import numpy as np
    >>> items = StreamItems(capacity=8, too_long="split")
    >>> items.extend(Documents.of(epoch=0, part=[0, 1, 2], ordinal=[0, 0, 0], tokens=[5, 0, 9], targets=[4, 0, 8]), first=0)
    >>> known = items.behind(item_of(0, 0))
    >>> items.tokens(known).tolist(), items.spans(known)[0].document.tolist()
    ([5, 8, 1], [0, 2, 2])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..packing.packs import Int64, Spans
from .admission import StepSize
from .items import TOO_LONG

FAILED = -1
"""Tokens of a document that could not be read, where that is no error."""
NEVER = np.iinfo(np.int64).max
_MOST = 1 << 16  # documents asked for at a time
_FIRST = 16  # documents asked for where nothing tells how many fill a step
Numbers = TypeVar("Numbers", int, Int64)
_PIECE_BITS = 20  # with 33 bits of documents an item is still exact as a JSON number anywhere


def item_of(number: Numbers, piece: Numbers) -> Numbers:
    """The item that is a document's n-th piece, or items int64[k]."""
    return number << _PIECE_BITS | piece


def number_of(items: Numbers) -> Numbers:
    """Document of an item, or of items int64[k]."""
    return items >> _PIECE_BITS


def piece_of(items: Numbers) -> Numbers:
    """Which piece of its document an item is, or items int64[k]."""
    return items & ((1 << _PIECE_BITS) - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """n documents of a stream, all int64[n]: where each was read, how long it is, and what the table adds."""

    epoch: Int64
    """Epoch of the stream that it belongs to; a carried document is admitted in the next one."""
    part: Int64
    ordinal: Int64
    """Its place in the part."""
    tokens: Int64
    targets: Int64
    number: Int64
    pieces: Int64
    """Items it makes: 0 for one that is left out."""
    released: Int64
    """The step that it was given to; ``NEVER`` before that."""

    @classmethod
    def of(
        cls,
        *,
        epoch: int,
        part: npt.ArrayLike,
        ordinal: npt.ArrayLike,
        tokens: npt.ArrayLike,
        targets: npt.ArrayLike,
    ) -> Documents:
        """As they arrive, not numbered yet."""
        given = {"part": part, "ordinal": ordinal, "tokens": tokens, "targets": targets}
        arrays = {name: np.asarray(values, np.int64) for name, values in given.items()}
        blank = np.zeros(len(arrays["part"]), np.int64)
        return cls(**arrays, epoch=blank + epoch, number=blank, pieces=blank, released=blank + NEVER)

    def __len__(self) -> int:
        return len(self.part)

    def take(self, rows: npt.NDArray) -> Documents:
        """Those of these rows."""
        return Documents(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def joined(self, other: Documents) -> Documents:
        """Both, one after the other."""
        return Documents(
            **{each.name: np.r_[getattr(self, each.name), getattr(other, each.name)] for each in fields(self)}
        )

    def replaced(self, **arrays: Int64) -> Documents:
        """With other values for some fields."""
        return Documents(**{**{each.name: getattr(self, each.name) for each in fields(self)}, **arrays})


@dataclass(kw_only=True)
class Counts:
    """What has come of the documents that were passed so far."""

    documents: int = 0
    empty: int = 0
    failed: int = 0
    long: int = 0
    lost_tokens: int = 0
    left_out: int = 0
    """Items that ``last='drop'`` left out at the end of epochs."""


@dataclass(kw_only=True, eq=False)
class StreamItems:
    """The items known of a stream; has the methods of ``Items`` that planning uses.

    Args:
        capacity: tokens that a pack may have, and a piece of a document that is split.
        too_long: ``error``, ``drop``, ``truncate`` or ``split``.
        multiple: documents are padded to a multiple of this, and count so much in a step.
    """

    capacity: int
    too_long: str = "error"
    multiple: int = 1
    columns: dict[str, str] | None = None
    """What each document has, once one was read: names and kinds."""
    counts: Counts = field(default_factory=Counts)
    rows: Documents = field(
        default_factory=lambda: Documents.of(epoch=0, part=[], ordinal=[], tokens=[], targets=[]),
        init=False,
        repr=False,
    )

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise ValueError(f"too_long must be one of {', '.join(TOO_LONG)}; got {self.too_long!r}")

    @property
    def longest(self) -> int:
        """Tokens that an item may have."""
        return -(-self.capacity // self.multiple) * self.multiple

    def extend(self, new: Documents, *, first: int) -> None:
        """Add documents numbered from ``first`` on. Raises ValueError for one that is too long where that is an error."""
        self.rows = self.rows.joined(new.replaced(number=first + np.arange(len(new)), pieces=self._pieces(new)))

    def _pieces(self, new: Documents) -> Int64:
        pieces = (new.tokens > 0).astype(np.int64)
        long = np.flatnonzero(new.tokens > self.capacity)
        if not len(long):
            return pieces
        at, tokens = long[0], new.tokens[long]
        if self.too_long == "error":
            raise ValueError(
                f"a document may have at most {self.capacity} tokens (max_tokens_per_rank x cp); document {new.ordinal[at]} of "
                f"part {new.part[at]} has {tokens[0]}: raise max_tokens_per_rank or cp, or choose too_long='drop', 'truncate' "
                f"or 'split'"
            )
        pieces[long] = {"drop": 0 * tokens, "truncate": 0 * tokens + 1}.get(self.too_long, -(-tokens // self.capacity))
        if pieces.max() >= 1 << _PIECE_BITS:
            raise ValueError(
                f"a document is split into fewer than {1 << _PIECE_BITS} pieces of {self.capacity} tokens; document "
                f"{new.ordinal[pieces.argmax()]} of part {new.part[pieces.argmax()]} needs {pieces.max()}"
            )
        return pieces

    def behind(self, item: int) -> Int64:
        """All known items from this one on, in order, int64[k]."""
        rows = self.rows
        at = int(np.searchsorted(rows.number, number_of(item)))
        number, pieces = rows.number[at:], rows.pieces[at:]
        end = np.cumsum(pieces)
        nth = np.arange(end[-1] if len(end) else 0) - np.repeat(end - pieces, pieces)
        items = np.repeat(number << _PIECE_BITS, pieces) + nth
        return items[np.searchsorted(items, item) :]

    def cut(self, items: Int64, size: StepSize, before: int) -> tuple[int, int]:
        """How many of these items make a step, and how many more documents should be read to tell; 0: it is told.

        before: items of the step before; 0 where there is none.
        """
        if size.documents_per_step is not None:
            return size.documents_per_step, min(max(size.documents_per_step - len(items), 0), _MOST)
        budget, tokens = size.tokens_per_step or 0, self.tokens(items)
        if len(tokens) and tokens[0] > budget:
            _, part, ordinal = self.where(number_of(items[:1]))
            raise ValueError(
                f"a step must hold the longest document: tokens_per_step is {budget}, document {ordinal[0]} of part {part[0]} "
                f"(or a piece of it) has {tokens[0]} tokens; raise tokens_per_step"
            )
        filled = np.cumsum(tokens)
        count = int(np.searchsorted(filled, budget, side="right"))
        if count < len(items) or (count and filled[-1] == budget):
            return count, 0
        held = int(filled[-1]) if count else 0
        mean = budget // before if before else held // max(count, 1)
        return count, min((budget - held) // max(mean, 1) + 1, max(count, before, _FIRST), _MOST)

    def _at(self, number: Int64) -> Int64:
        """Rows of these documents."""
        at = np.searchsorted(self.rows.number, number)
        assert (at < len(self.rows)).all() and (self.rows.number[at] == number).all(), f"unknown among {number}"
        return at

    def document_tokens(self, document: Int64) -> Int64:
        """Tokens of whole documents, by their numbers int64[k]; of fillers (-1) too, as 0."""
        real = document >= 0
        tokens = np.zeros(len(document), np.int64)
        tokens[real] = self.rows.tokens[self._at(document[real])]
        return tokens

    def where(self, document: Int64) -> tuple[Int64, Int64, Int64]:
        """Where these documents (int64[k] numbers) were read: epoch of the stream, part, ordinal in the part."""
        at = self._at(document)
        return self.rows.epoch[at], self.rows.part[at], self.rows.ordinal[at]

    def tokens(self, items: Int64) -> Int64:
        """Tokens of each item, padding counted, int64[k]."""
        return -(-self.spans(items)[0].tokens // self.multiple) * self.multiple

    def spans(self, items: Int64) -> tuple[Spans, Int64 | None, Int64]:
        """Spans of the items int64[k], their target tokens int64[k] (None where a piece's count is not known), and which
        of the k each belongs to: here each to its own."""
        number = number_of(items)
        at = self._at(number)
        whole, start = self.rows.tokens[at], piece_of(items) * self.capacity
        end = np.minimum(whole, self.capacity) if self.too_long == "truncate" else whole
        stop = np.minimum(start + self.capacity, end)
        tokens = stop - start
        # The token behind a piece is known, so its last label is kept; a truncated document simply ends there.
        targets: Int64 | None = tokens - (stop == end)
        if self.columns is not None and "labels" in self.columns:
            targets = None if (tokens < whole).any() else self.rows.targets[at]
        spans = Spans(document=number, start=start, stop=stop, pairs=tokens * (tokens + 1) // 2)
        return spans, targets, np.arange(len(items))

    def passed(self, first: int, stop: int) -> None:
        """Count what became of the documents numbered ``first … stop - 1``."""
        rows = self.rows.take((self.rows.number >= first) & (self.rows.number < stop))
        long = rows.tokens > self.capacity
        over = {"drop": rows.tokens, "truncate": rows.tokens - self.capacity}.get(self.too_long)
        self.counts.documents += stop - first
        self.counts.empty += int((rows.tokens == 0).sum())
        self.counts.failed += int((rows.tokens == FAILED).sum())
        self.counts.long += int(long.sum())
        self.counts.lost_tokens += 0 if over is None else int(over[long].sum())

    def give(self, items: Int64, step: int) -> None:
        """Remember that a step was given these items."""
        released = self.rows.released.copy()
        released[self._at(number_of(items))] = step
        self.rows = self.rows.replaced(released=released)

    def forget(self, edge: int, waiting: Int64, step: int) -> None:
        """Drop the rows of documents numbered below ``edge`` that no item in ``waiting`` belongs to, unless they were
        released in ``step`` or later."""
        rows = self.rows
        kept = (rows.number >= edge) | np.isin(rows.number, number_of(waiting))
        kept |= (rows.released >= step) & (rows.released < NEVER)
        self.rows = rows if kept.all() else rows.take(kept)

    def renumber(self, first: int) -> None:
        """Forget all before document ``first``, which becomes number 0."""
        rows = self.rows.take(self.rows.number >= first)
        self.rows = rows.replaced(number=rows.number - first)

    def describe(self) -> str:
        """One sentence with the counts: nothing is dropped, cut or changed silently."""
        counts = self.counts
        text = f"{counts.documents} documents of a stream so far; {counts.empty} empty dropped"
        if counts.failed:
            text += f"; {counts.failed} that could not be read skipped"
        if counts.long:
            done = {"drop": "dropped", "truncate": "truncated", "split": "split"}[self.too_long]
            text += f"; {counts.long} longer than {self.capacity} tokens {done} ({counts.lost_tokens} tokens lost)"
        if counts.left_out:
            text += f"; {counts.left_out} items left out of incomplete last steps"
        return text


def counts_of(state: Mapping[str, int]) -> Counts:
    """Counts from plain numbers."""
    return Counts(**{each.name: int(state[each.name]) for each in fields(Counts)})
