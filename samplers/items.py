"""Items: what can be admitted to a step, once empty and too long documents have been dealt with.

Decided here, by ``too_long``: a document that no pack can hold is an error, dropped, truncated, or split into pieces that
are documents of their own to attention. Nothing happens silently: every count is kept and told.

Cost: one pass over the lengths; stored are the exceptions only, 8 bytes each, so ten million documents cost nothing.

    >>> import numpy as np
    >>> from equipoise import Lengths
    >>> items = Items.of(Lengths.from_array(np.array([5, 0, 3, 9])), capacity=8, too_long="split")
    >>> len(items), items.empty, items.num_split     # document 3 becomes [0, 8) and [8, 9)
    (4, 1, 1)
    >>> spans, targets, _ = items.spans(np.arange(4))
    >>> spans.document.tolist(), spans.start.tolist(), targets.tolist()
    ([0, 2, 3, 3], [0, 0, 0, 8], [4, 2, 8, 0])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..packing.lengths import Lengths
from ..packing.packs import Spans

TOO_LONG = ("error", "drop", "truncate", "split")


@dataclass(frozen=True, kw_only=True, eq=False)
class Items:
    """What can be admitted: every usable document, or the pieces it was split into, numbered ``0 … len - 1``.

    Only the exceptions are stored: ids of removed documents (sorted) and the pieces behind a split document's first.
    """

    lengths: Lengths
    capacity: int
    too_long: str
    removed: np.ndarray  # int64[r]
    piece_document: np.ndarray  # int64[e]
    piece_start: np.ndarray  # int64[e]
    empty: int
    num_long: int
    lost_tokens: int
    multiple: int = 1
    """Documents are padded to a multiple of this, and count so much in a step."""

    @classmethod
    def of(cls, lengths: Lengths, *, capacity: int, too_long: str = "error", multiple: int = 1) -> Items:
        """Apply the policy for documents of more than ``capacity`` tokens; drop empty ones. Raises ValueError."""
        if too_long not in TOO_LONG:
            raise ValueError(f"too_long must be one of {', '.join(TOO_LONG)}; got {too_long!r}")
        tokens = lengths.tokens
        long = np.flatnonzero(tokens > capacity).astype(np.int64)
        empty = np.flatnonzero(tokens == 0).astype(np.int64)
        if len(long) and too_long == "error":
            raise ValueError(
                f"a document may have at most {capacity} tokens (max_tokens_per_rank x cp); document {long[0]} has "
                f"{tokens[long[0]]} and {len(long)} of {len(lengths)} are too long: raise max_tokens_per_rank or cp, or "
                f"choose too_long='drop', 'truncate' or 'split'"
            )
        over = tokens[long].astype(np.int64)
        extra = -(-over // capacity) - 1 if too_long == "split" else np.zeros(0, np.int64)
        nth = np.arange(extra.sum()) - np.repeat(np.cumsum(extra) - extra, extra)  # 0, 1, … within each document
        dropped = long if too_long == "drop" else long[:0]
        lost = {"drop": over, "truncate": over - capacity}.get(too_long, over[:0])
        items = cls(
            lengths=lengths,
            capacity=capacity,
            too_long=too_long,
            removed=np.union1d(empty, dropped),
            piece_document=np.repeat(long[: len(extra)], extra),
            piece_start=(nth + 1) * capacity,
            empty=len(empty),
            num_long=len(long),
            lost_tokens=int(lost.sum()),
            multiple=multiple,
        )
        if len(items) == 0:
            raise ValueError(
                f"no document is left to train on: of {len(lengths)} documents {len(empty)} are empty and "
                f"{len(dropped)} were dropped as longer than {capacity} tokens"
            )
        return items

    def __len__(self) -> int:
        return len(self.lengths) - len(self.removed) + len(self.piece_document)

    @property
    def num_split(self) -> int:
        """Documents cut into pieces."""
        return self.num_long if self.too_long == "split" else 0

    @property
    def longest(self) -> int:
        """Tokens of the longest item."""
        return -(-min(int(self.lengths.tokens.max()), self.capacity) // self.multiple) * self.multiple

    @property
    def longest_item(self) -> int:
        """The first item of the most tokens."""
        document = int(
            np.argmax(np.where(np.isin(np.arange(len(self.lengths)), self.removed), -1, self.lengths.tokens))
        )
        return document - int(np.searchsorted(self.removed, document))

    def document_tokens(self, document: np.ndarray) -> np.ndarray:
        """Tokens of whole documents, by their numbers int64[k]."""
        return self.lengths.tokens[document]

    def tokens(self, items: np.ndarray) -> np.ndarray:
        """Tokens of each item, padding counted, int64[k]."""
        return -(-self.spans(items)[0].tokens // self.multiple) * self.multiple

    def spans(self, items: np.ndarray) -> tuple[Spans, np.ndarray | None, np.ndarray]:
        """Spans of the items int64[k], their target tokens int64[k] (None where a piece's count is not known), and which
        of the k each belongs to: here each to its own."""
        whole = len(self.lengths) - len(self.removed)
        is_piece = items >= whole
        base = np.where(is_piece, 0, items)
        document = base + np.searchsorted(self.removed - np.arange(len(self.removed)), base, side="right")
        start = np.zeros(len(items), np.int64)
        document[is_piece] = self.piece_document[items[is_piece] - whole]
        start[is_piece] = self.piece_start[items[is_piece] - whole]
        rows = self.lengths.take(document)
        assert rows.pairs is not None
        end = np.minimum(rows.tokens, self.capacity) if self.too_long == "truncate" else rows.tokens
        stop = np.minimum(start + self.capacity, end)
        tokens = stop - start
        cut = tokens < rows.tokens
        pairs = rows.pairs.astype(np.int64)
        pairs[cut] = self.lengths.pairs_of_pieces(document[cut], start[cut], stop[cut])
        # The token behind a piece is known, so its last label is kept; a truncated document simply ends there.
        targets: np.ndarray | None = tokens - (stop == end)
        if self.lengths.targets is not None:
            targets = None if cut.any() else rows.targets
        return Spans(document=document, start=start, stop=stop, pairs=pairs), targets, np.arange(len(items))

    def describe(self) -> str:
        """One sentence with the counts: nothing is dropped, cut or changed silently."""
        text = (
            f"{len(self)} items from {len(self.lengths)} documents ({self.lengths.source}); {self.empty} empty dropped"
        )
        if self.num_long:
            done = {"drop": "dropped", "truncate": "truncated", "split": "split"}[self.too_long]
            text += f"; {self.num_long} longer than {self.capacity} tokens {done} ({self.lost_tokens} tokens lost)"
        return text
