"""Masks: which (query, key) pairs of a pack attend, document by document, for any mask that is made of slices.

A mask is stated as *slices*, MagiAttention's AttnSlice: (query range, key range, FULL | CAUSAL | INV_CAUSAL | BI_CAUSAL), in
positions of the document. It is kept as disjoint *tiles* (mask_tiles.py): a band lo <= q - k <= hi in place of a type means the
same however a tile is cut, so a mask can be cut by chunks, blocks and ranks, and what is left is still exact. `tiles_of_pack`
is what planners cut and executors run; `slices` gives types back.

Decided here: a pair that two slices name is in the mask once. `Mask.of_slices` refuses such slices, since lists of slices are
meant to be disjoint (a kernel that runs them would count the pair twice), unless merge=True; `a | b` unites masks.
Ready-made masks (causal, windows, shared question …) are functions in mask_kinds.py; mask_columns.py keeps those of a whole
dataset as columns.

Cost: counts are closed forms, one per tile. Uniting compares the tiles of one document with each other, s² of them.

    >>> video = Mask.of_slices(6, [(0, 3, 0, 3, FULL), (3, 6, 0, 6, FULL)])
    >>> words = Mask.of_slices(3, [(0, 3, 0, 3, CAUSAL)])
    >>> pack = Mask.concat([video, words])
    >>> print(pack)
    Mask of 2 documents, 9 tokens, 3 tiles: 33 pairs, 0.407 of all, 1.222 of causal
    >>> pack.pairs(), pack.cut(3, 6, 0, 3).pairs()
    (array([27,  6]), array([9, 0]))
    >>> (video | Mask.of_slices(6, [(0, 6, 0, 6, CAUSAL)])).pairs()
    array([27])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import mask_tiles as algebra
from .mask_tiles import BI_CAUSAL, CAUSAL, FULL, INV_CAUSAL, NO_LIMIT
from .packs import Int64

__all__ = ["BI_CAUSAL", "CAUSAL", "FULL", "INV_CAUSAL", "NO_LIMIT", "Mask"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """The masks of n documents that lie end to end."""

    tokens: Int64
    """int64[n], tokens of each document."""
    offsets: Int64
    """int64[n + 1], CSR: document → tiles."""
    tiles: Int64
    """int64[m, 6] (q0, q1, k0, k1, lo, hi) in positions of the document; no pair is in two of them. Tightened, and those without a
    pair left out, when the mask is made."""

    def __post_init__(self) -> None:
        for name, width in (("tokens", 0), ("offsets", 0), ("tiles", 6)):
            array = np.asarray(getattr(self, name))
            if array.size and array.dtype.kind not in "iu":
                raise ValueError(f"Mask.{name} must be integers; got {array.dtype}.")
            array = np.ascontiguousarray(array, dtype=np.int64)
            if array.ndim != (2 if width else 1) or (width and array.shape[1] != width):
                raise ValueError(f"Mask.{name} must be int64[{'n, 6' if width else 'n'}]; got shape {array.shape}.")
            object.__setattr__(self, name, array)
        _refuse_documents(self.tokens)
        n, offsets = len(self.tokens), self.offsets
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(self.tiles) or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"offsets must rise from 0 to the {len(self.tiles)} tiles over {n} documents; got {offsets}."
            )
        _refuse_ranges(self.tiles, self.tokens[self.document], self.document, "Tile")
        tiles = algebra.tightened(self.tiles)
        some = tiles[:, 0] < tiles[:, 1]
        object.__setattr__(self, "tiles", tiles[some])
        object.__setattr__(self, "offsets", np.concatenate([[0], np.cumsum(some)])[offsets])

    @staticmethod
    def of_slices(
        tokens: npt.ArrayLike, slices: npt.ArrayLike, offsets: npt.ArrayLike | None = None, *, merge: bool = False
    ) -> Mask:
        """From slices in positions of their document.

        tokens: int, or int[n] with offsets int[n + 1], the slices of each document (CSR). slices: int[s, 5], (q0, q1, k0, k1,
        type); queries and keys may differ in number. merge: pairs that several slices name count once; else they are refused.
        """
        sizes = np.atleast_1d(np.asarray(tokens, dtype=np.int64))
        stated = np.asarray(slices, dtype=np.int64).reshape(-1, 5)
        if offsets is None and len(sizes) > 1:
            raise ValueError(f"Slices of {len(sizes)} documents need offsets, the slices of each.")
        kinds = stated[:, 4]
        if np.any((kinds < FULL) | (kinds > BI_CAUSAL)):
            raise ValueError(
                f"A slice is FULL 0, CAUSAL 1, INV_CAUSAL 2 or BI_CAUSAL 3; got type {_first(kinds, kinds > 3)}."
            )
        bounds = np.array([0, len(stated)]) if offsets is None else np.asarray(offsets, dtype=np.int64)
        mask = Mask(tokens=sizes, offsets=bounds, tiles=algebra.lower(stated))
        if merge:
            return mask._with(*algebra.disjoint(mask.tiles, mask.offsets))
        _refuse_overlap(algebra.tightened(algebra.lower(stated)), bounds)
        return mask

    @staticmethod
    def concat(masks: Sequence[Mask]) -> Mask:
        """The documents of all masks, one after the other."""
        nothing = np.zeros((0, 6), np.int64)
        counts = np.concatenate([[0], *(np.diff(mask.offsets) for mask in masks)])
        return Mask(
            tokens=np.concatenate([np.zeros(0, np.int64), *(mask.tokens for mask in masks)]),
            offsets=np.cumsum(counts),
            tiles=np.concatenate([nothing, *(mask.tiles for mask in masks)]),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def document(self) -> Int64:
        """The document of each tile, int64[m]."""
        return np.repeat(np.arange(len(self.tokens)), np.diff(self.offsets))

    @property
    def cu_seqlens(self) -> Int64:
        """Where documents begin and end in the pack, int64[n + 1]."""
        return np.concatenate([[0], np.cumsum(self.tokens)])

    def tiles_of_pack(self) -> Int64:
        """The tiles in positions of the pack, int64[m, 6]: what plans are made of."""
        placed = self.tiles.copy()
        placed[:, :4] += self.cu_seqlens[self.document][:, None]
        return placed

    def slices(self) -> tuple[Int64, Int64]:
        """The mask as MagiAttention states it: (slices int64[s, 5] in positions of their document, offsets int64[n + 1])."""
        slices, tile = algebra.typed(self.tiles)
        return slices, np.searchsorted(self.document[tile], np.arange(len(self) + 1)).astype(np.int64)

    def pairs(self) -> Int64:
        """Pairs of each document, int64[n]."""
        return np.diff(np.concatenate([[0], np.cumsum(algebra.counts(self.tiles))])[self.offsets])

    def row_pairs(self) -> Int64:
        """Keys that each query of the pack attends to, int64[tokens of the pack]."""
        return algebra.row_counts(self.tiles_of_pack(), int(self.tokens.sum()))

    def cut(self, q0: int, q1: int, k0: int, k1: int) -> Mask:
        """The pairs with queries in [q0, q1) and keys in [k0, k1), positions of the pack; documents stay as they are."""
        begin = self.cu_seqlens[self.document]
        tiles = algebra.clipped(self.tiles, q0 - begin, q1 - begin, k0 - begin, k1 - begin)
        return Mask(tokens=self.tokens, offsets=self.offsets, tiles=tiles)

    def take(self, documents: npt.ArrayLike) -> Mask:
        """The documents numbered `documents`, int[k], in that order; -1 is a filler of no tokens."""
        at = np.asarray(documents, dtype=np.int64)
        return self.pieces(at, np.zeros_like(at), np.where(at < 0, 0, self.tokens[at]))

    def pieces(self, document: npt.ArrayLike, start: npt.ArrayLike, stop: npt.ArrayLike) -> Mask:
        """Spans [start, stop) of documents, int[k] each, as documents of their own: what they attend to within the span.

        document -1 is a filler, which attends to nothing.
        """
        at, first, last = (np.asarray(values, dtype=np.int64) for values in (document, start, stop))
        if np.any((at < -1) | (at >= len(self))):
            raise ValueError(
                f"Pieces are of documents 0 … {len(self) - 1}, or -1, a filler; got {at.min()} … {at.max()}."
            )
        # -1 finds what is appended: a filler has any length, and no tiles.
        sizes, num = np.append(self.tokens, NO_LIMIT)[at], np.append(np.diff(self.offsets), 0)[at]
        if np.any((first < 0) | (first > last) | (last > sizes)):
            raise ValueError("Pieces are spans of documents, start … stop within their tokens.")
        offsets = np.concatenate([[0], np.cumsum(num)])
        tile = np.arange(offsets[-1]) + np.repeat(self.offsets[at] - offsets[:-1], num)
        begin, end = np.repeat(first, num), np.repeat(last, num)
        tiles = algebra.clipped(self.tiles[tile], begin, end, begin, end)
        tiles[:, :4] -= np.where(tiles[:, 0] < tiles[:, 1], begin, 0)[:, None]
        return Mask(tokens=last - first, offsets=offsets, tiles=tiles)

    def __or__(self, other: Mask) -> Mask:
        """The pairs of either."""
        rest = other - self
        document = np.concatenate([self.document, rest.document])
        order = np.argsort(document, kind="stable")
        return self._with(np.concatenate([self.tiles, rest.tiles])[order], self.offsets + rest.offsets)

    def __and__(self, other: Mask) -> Mask:
        """The pairs of both."""
        self._same_documents(other)
        return self._with(*algebra.common(self.tiles, self.offsets, other.tiles, other.offsets))

    def __sub__(self, other: Mask) -> Mask:
        """The pairs of this one that are not in the other."""
        self._same_documents(other)
        return self._with(*algebra.minus(self.tiles, self.offsets, other.tiles, other.offsets))

    def check(self) -> None:
        """Raise ValueError where two tiles share a pair."""
        _refuse_overlap(self.tiles, self.offsets)

    def dense(self) -> npt.NDArray[np.bool_]:
        """bool[T, T] over the pack: for tests and small pictures."""
        total = int(self.tokens.sum())
        seen = np.zeros((total, total), bool)
        for q0, q1, k0, k1, lo, hi in self.tiles_of_pack().tolist():
            apart = np.arange(q0, q1)[:, None] - np.arange(k0, k1)
            seen[q0:q1, k0:k1] |= (lo <= apart) & (apart <= hi)
        return seen

    def describe(self) -> str:
        """One line: sizes, pairs, and how dense the documents' squares are."""
        pairs, squares = int(self.pairs().sum()), int((self.tokens * self.tokens).sum())
        causal = (squares + int(self.tokens.sum())) // 2
        return (
            f"Mask of {len(self)} documents, {int(self.tokens.sum())} tokens, {len(self.tiles)} tiles: {pairs} pairs, "
            f"{pairs / max(int(self.tokens.sum()) ** 2, 1):.3f} of all, {pairs / max(causal, 1):.3f} of causal"
        )

    def __str__(self) -> str:
        return self.describe()

    def _with(self, tiles: Int64, offsets: Int64) -> Mask:
        return Mask(tokens=self.tokens, offsets=offsets, tiles=tiles)

    def _same_documents(self, other: Mask) -> None:
        if not np.array_equal(self.tokens, other.tokens):
            raise ValueError(
                f"Masks are united and cut with masks of the same documents; got {len(self)} and {len(other)} documents "
                f"of {self.tokens[:4]} … and {other.tokens[:4]} … tokens."
            )


def _refuse_documents(tokens: Int64) -> None:
    if np.any((tokens < 0) | (tokens >= 1 << 31)):
        raise ValueError(f"Documents have 0 … 2**31 - 1 tokens; got {tokens.min()} … {tokens.max()}.")


def _refuse_ranges(tiles: Int64, tokens: Int64, document: Int64, name: str) -> None:
    """Ranges lie within their document; an empty range is no error."""
    broken = np.any(tiles[:, :4] < 0, axis=1) | (tiles[:, 0] > tiles[:, 1]) | (tiles[:, 2] > tiles[:, 3])
    broken |= (tiles[:, 1] > tokens) | (tiles[:, 3] > tokens)
    if np.any(broken):
        at = int(np.argmax(broken))
        q0, q1, k0, k1 = tiles[at, :4]
        raise ValueError(
            f"{name} {at} has queries [{q0}, {q1}) and keys [{k0}, {k1}); its document, {document[at]}, has "
            f"{tokens[at]} tokens."
        )


def _refuse_overlap(tiles: Int64, offsets: Int64) -> None:
    document, one, other = algebra.overlap(tiles, offsets)
    if document < 0:
        return
    a, b = tiles[one], tiles[other]
    lo, hi = max(a[4], b[4]), min(a[5], b[5])
    q0, q1, k0, k1 = algebra.clipped(np.array([[*a[:4], lo, hi]]), b[0], b[1], b[2], b[3])[0, :4]
    raise ValueError(
        f"Slices {one} and {other}, of document {document}, share pairs, such as (query {q0}, key {max(k0, q0 - hi)}), within "
        f"queries {q0} … {q1 - 1} and keys {k0} … {k1 - 1}: slices of a mask are disjoint; to count such pairs once, unite them "
        "(merge=True, or mask | mask)."
    )


def _first(values: Int64, broken: npt.NDArray[np.bool_]) -> int:
    return int(values[int(np.argmax(broken))])
