"""Packs: which pieces of which documents share one micro-batch (the first of the four decisions, as data).

A *span* is a contiguous piece of one document; a *pack* is spans laid end to end, the token stream of one
micro-batch. Both are struct-of-arrays in int64, so that a plan is a handful of numpy arrays: cheap to hash, send and
save. A packer works on plain arrays and returns CSR `(order, offsets)`; the packs are then

    >>> import numpy as np
    >>> spans = Spans.whole(np.array([5, 3, 2]), np.array([15, 6, 3]))     # tokens and pairs of three documents
    >>> packs = Packs(spans=spans.take(np.array([0, 2, 1])), offsets=np.array([0, 2, 3]))
    >>> packs.tokens, packs.pairs, packs.cu_seqlens(0)
    (array([7, 3]), array([18,  6]), array([0, 5, 7], dtype=int32))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """n pieces of documents. Four int64 arrays of length n (any integers are converted).

    The pieces of a document that was split are documents of their own to attention: `pairs` counts what is computed
    for the piece alone.
    """

    document: Int64
    """Number of the document in the length index; -1 is a filler, which belongs to none."""
    start: Int64
    """First token of the piece within its document."""
    stop: Int64
    """One past its last token."""
    pairs: Int64
    """(query, key) pairs that attention computes for the piece under its mask; 0 for a filler."""

    def __post_init__(self) -> None:
        for name in ("document", "start", "stop", "pairs"):
            object.__setattr__(self, name, _int64(name, getattr(self, name)))
        shapes = {name: getattr(self, name).shape for name in ("document", "start", "stop", "pairs")}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"The arrays of Spans must have one length; got {shapes}.")

    @staticmethod
    def whole(tokens: npt.ArrayLike, pairs: npt.ArrayLike, document: npt.ArrayLike | None = None) -> Spans:
        """One span per document, all of it. tokens, pairs: int[n]; document: int[n] numbers, 0 … n-1 by default."""
        stop = _int64("tokens", tokens)
        numbers = np.arange(len(stop)) if document is None else _int64("document", document)
        return Spans(document=numbers, start=np.zeros_like(stop), stop=stop, pairs=_int64("pairs", pairs))

    @staticmethod
    def concat(parts: Sequence[Spans]) -> Spans:
        """The spans of all parts, one after the other."""
        empty = [np.zeros(0, np.int64)]
        return Spans(
            document=np.concatenate([part.document for part in parts] or empty),
            start=np.concatenate([part.start for part in parts] or empty),
            stop=np.concatenate([part.stop for part in parts] or empty),
            pairs=np.concatenate([part.pairs for part in parts] or empty),
        )

    def __len__(self) -> int:
        return len(self.document)

    @property
    def tokens(self) -> Int64:
        """Tokens of each span, int64[n]."""
        return self.stop - self.start

    def take(self, index: npt.ArrayLike) -> Spans:
        """The spans at `index` (int[k], or bool[n]), in that order."""
        at = np.asarray(index)
        at = at.astype(np.int64) if at.size == 0 else at
        return Spans(document=self.document[at], start=self.start[at], stop=self.stop[at], pairs=self.pairs[at])


@dataclass(frozen=True, kw_only=True, eq=False)
class Packs:
    """p packs in CSR form: pack i is `spans[offsets[i]:offsets[i + 1]]`, laid end to end."""

    spans: Spans
    offsets: Int64
    """int64[p + 1], from 0 to len(spans), never falling."""

    def __post_init__(self) -> None:
        offsets = _int64("offsets", self.offsets)
        object.__setattr__(self, "offsets", offsets)
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(self.spans) or np.any(np.diff(offsets) < 0):
            raise ValueError(
                f"offsets must rise from 0 to the number of spans, {len(self.spans)}; "
                f"got {len(offsets)} of them, {_ends(offsets)}."
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> Int64:
        """Tokens of each pack, int64[p]."""
        return self.sums(self.spans.tokens)

    @property
    def pairs(self) -> Int64:
        """Pairs of each pack, int64[p]."""
        return self.sums(self.spans.pairs)

    def sums(self, per_span: npt.ArrayLike) -> Int64:
        """Sum of an integer per span (int[n]) over each pack, int64[p]."""
        values = _int64("per_span", per_span)
        if len(values) != len(self.spans):
            raise ValueError(f"sums wants one number for each of the {len(self.spans)} spans; got {len(values)}.")
        return np.diff(_prefix(values)[self.offsets])

    def cu_seqlens(self, i: int) -> npt.NDArray[np.int32]:
        """Boundaries of the k spans of pack i in its token stream, int32[k + 1], as attention kernels want them."""
        cu_seqlens = _prefix(self.spans.tokens[self.offsets[i] : self.offsets[i + 1]])
        if cu_seqlens[-1] >= 2**31:
            raise ValueError(
                f"cu_seqlens are int32, so a pack holds fewer than 2**31 tokens; pack {i} holds {cu_seqlens[-1]}. "
                "Lower the cap on tokens."
            )
        return cu_seqlens.astype(np.int32)

    def take(self, packs: npt.ArrayLike) -> Packs:
        """The packs numbered `packs` (int[k]), in that order."""
        chosen = _int64("packs", packs)
        counts = np.diff(self.offsets)[chosen]
        offsets = _prefix(counts)
        spans = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][chosen] - offsets[:-1], counts)
        return Packs(spans=self.spans.take(spans), offsets=offsets)

    def check(self, max_tokens: int) -> None:
        """Raise ValueError where a pack or a span is empty, a pack exceeds `max_tokens`, or two spans share a token."""
        _refuse(np.diff(self.offsets) < 1, "Pack {} is empty; every pack holds at least one span.")
        _refuse(self.spans.tokens < 1, "Span {} is empty; drop empty documents before packing.")
        _refuse(self.spans.start < 0, "Span {} starts before its document.")
        _refuse(
            self.spans.document < -1, "Span {} has a document below -1; documents are numbered from 0, a filler is -1."
        )
        tokens = self.tokens
        _refuse(
            tokens > max_tokens,
            f"Pack {{}} exceeds the cap of {max_tokens} tokens; the largest holds {max(tokens, default=0)}.",
        )
        order = np.lexsort((self.spans.start, self.spans.document))
        ordered = self.spans.take(order)
        same = (ordered.document[1:] == ordered.document[:-1]) & (ordered.document[1:] >= 0)
        overlap = np.zeros(len(order), dtype=bool)
        overlap[order[1:]] = same & (ordered.start[1:] < ordered.stop[:-1])
        _refuse(overlap, "Span {} repeats tokens of its document that another span holds.")

    def describe(self) -> str:
        """One line: how many packs, how full and how uneven they are."""
        if len(self) == 0:
            return "0 packs"
        tokens, pairs = self.tokens, self.pairs
        return (
            f"{len(self)} packs of {len(self.spans)} spans; tokens {tokens.sum():,} "
            f"(largest {tokens.max():,}, max/mean {_max_over_mean(tokens):.3f}); "
            f"pairs max/mean {_max_over_mean(pairs):.3f}"
        )

    def __str__(self) -> str:
        return self.describe()


def _int64(name: str, values: npt.ArrayLike) -> Int64:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be integers in one dimension; got {array.dtype} of shape {array.shape}.")
    return array.astype(np.int64, copy=False)


def _prefix(values: Int64) -> Int64:
    """[0, v0, v0 + v1, …], one longer than values."""
    total = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=total[1:])
    return total


def _ends(offsets: Int64) -> str:
    return f"from {offsets[0]} to {offsets[-1]}" if len(offsets) else "none"


def _refuse(broken: npt.NDArray[np.bool_], message: str) -> None:
    """Raise with the number of the first broken one."""
    if broken.any():
        raise ValueError(message.format(int(broken.argmax())))


def _max_over_mean(values: Int64) -> float:
    return float(values.max() * len(values) / max(int(values.sum()), 1))
