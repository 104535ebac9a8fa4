"""The masks that are trained with, from the structure of the documents; one function each, arrays in, a `Mask` out.

Structure is what a dataset has as columns: lengths, prefixes, question and answer lengths. Parameters are the published ones
(DCP's defaults, MagiAttention's benchmark); where a paper leaves a choice, it is said at the function. All of them are linear in
slices, without a Python loop over documents.

    >>> from equipoise.packing.mask_picture import picture
    >>> mask = shared_question([2, 3], Ragged.of([[2, 2], [4]]))
    >>> mask.tokens, mask.pairs()
    (array([6, 7]), array([17, 28]))
    >>> print(picture(mask.take([0])))
    █·····
    ██····
    ███···
    ████··
    ██··█·
    ██··██
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .masks import NO_LIMIT, Mask
from .packs import Int64

SINKS, WINDOW = 64, 4096
"""DCP's lambda mask."""
BLOCK, LOCAL_BLOCKS = 256, 2
"""DCP's causal blockwise mask."""
QUESTION_SHARE, ANSWERS = 0.2, 4
"""DCP's shared question: a fifth question, a fifth for each of four answers."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Several numbers for each of n documents: `values[offsets[i]:offsets[i + 1]]` are those of document i."""

    values: Int64
    offsets: Int64

    def __post_init__(self) -> None:
        for name in ("values", "offsets"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        offsets = self.offsets
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(self.values) or np.any(np.diff(offsets) < 0):
            raise ValueError(f"offsets must rise from 0 to the {len(self.values)} values; got {offsets}.")

    @staticmethod
    def of(lists: Sequence[Sequence[int]]) -> Ragged:
        """From one list for each document."""
        offsets = np.cumsum([0, *(len(values) for values in lists)])
        return Ragged(np.array([value for values in lists for value in values], np.int64), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def document(self) -> Int64:
        """The document of each value."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def sums(self) -> Int64:
        """Sum of each document's values, int64[n]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.values)])[self.offsets])

    def before(self) -> Int64:
        """For each value, the sum of those before it in its document."""
        total = np.cumsum(self.values) - self.values
        first = np.concatenate([[0], np.cumsum(self.values)])[self.offsets[:-1]]
        return total - first[self.document]

    def take(self, documents: Int64) -> Ragged:
        """Those of `documents`, int64[k]."""
        num = np.diff(self.offsets)[documents]
        offsets = np.concatenate([[0], np.cumsum(num)])
        return Ragged(
            self.values[np.arange(offsets[-1]) + np.repeat(self.offsets[documents] - offsets[:-1], num)], offsets
        )


def causal(lengths: npt.ArrayLike) -> Mask:
    """Each token attends to those before it in its document and to itself. lengths: int[n]."""
    t = _lengths(lengths)
    return _mask(t, [_tile(t, 0, t, 0, t, 0, NO_LIMIT)])


def full(lengths: npt.ArrayLike) -> Mask:
    """Each token attends to all of its document. lengths: int[n]."""
    t = _lengths(lengths)
    return _mask(t, [_tile(t, 0, t, 0, t, -NO_LIMIT, NO_LIMIT)])


def sliding_window(lengths: npt.ArrayLike, window: npt.ArrayLike, ahead: npt.ArrayLike = 0) -> Mask:
    """Each token attends to itself, the `window` - 1 tokens before and the `ahead` tokens behind it.

    lengths: int[n]; window, ahead: int, or int[n]. flash-attention's window_size is (window - 1, ahead).
    """
    t = _lengths(lengths)
    _least("window", window, 1)
    return _mask(t, [_tile(t, 0, t, 0, t, -_least("ahead", ahead, 0), np.asarray(window) - 1)])


def window_with_sinks(lengths: npt.ArrayLike, window: npt.ArrayLike = WINDOW, sinks: npt.ArrayLike = SINKS) -> Mask:
    """A causal window of `window` keys, and the first `sinks` tokens for all (the lambda mask). int[n]; int, or int[n]."""
    t, w = _lengths(lengths), _least("window", window, 1)
    s = np.minimum(_least("sinks", sinks, 0), t)
    return _mask(t, [_tile(t, 0, t, 0, t, 0, w - 1), _tile(t, 0, t, 0, s, w, NO_LIMIT)])


def shared_question(question: npt.ArrayLike, answers: Ragged) -> Mask:
    """Answers to one question: each token attends causally to the question and to its own answer, to no other one.

    question: int[n], tokens; answers: tokens of each answer, one after the other behind the question. Without answers a document
    is causal, so prompts of either kind mix.
    """
    q = _lengths(question, "question")
    _rows(answers, len(q), "answers")
    t, document = q + answers.sums(), answers.document
    a0 = q[document] + answers.before()
    a1 = a0 + answers.values
    return _mask(
        t,
        [
            _tile(q, 0, q, 0, q, 0, NO_LIMIT),
            (document, _tile(a0, a0, a1, 0, q[document], -NO_LIMIT, NO_LIMIT)),
            (document, _tile(a0, a0, a1, a0, a1, 0, NO_LIMIT)),
        ],
    )


def shares_of_questions(
    lengths: npt.ArrayLike, share: float = QUESTION_SHARE, answers: int = ANSWERS
) -> tuple[Int64, Ragged]:
    """DCP's structure for documents that have none: int(share · t) tokens of question, the rest in `answers` equal parts, of
    which the last takes the remainder. What `shared_question` wants."""
    t = _lengths(lengths)
    if not 0 <= share <= 1 or answers < 1:
        raise ValueError(f"A question has a share of 0 … 1 and at least one answer; got {share} and {answers}.")
    question = (t * share).astype(np.int64)
    parts = np.repeat(((t - question) // answers)[:, None], answers, axis=1)
    parts[:, -1] += t - question - parts.sum(axis=1)
    return question, Ragged(parts.ravel(), np.arange(len(t) + 1) * answers)


def causal_blockwise(
    lengths: npt.ArrayLike, block: npt.ArrayLike = BLOCK, local_blocks: npt.ArrayLike = LOCAL_BLOCKS
) -> Mask:
    """Demonstrations and a question: the first block is seen by all, the last sees all, those between see `local_blocks` back.

    As DCP computes it: a middle token i sees, beside the first block, the keys from i - local_blocks · block on (a window of
    tokens, not of whole blocks) up to itself. The last block is the one that holds the last token, however short.
    lengths: int[n]; block, local_blocks: int, or int[n].
    """
    t, b = _lengths(lengths), _least("block", block, 1)
    first, last = np.minimum(b, t), np.maximum(t - 1, 0) // b * b
    middle = _tile(t, first, last, first, last, 0, _least("local_blocks", local_blocks, 0) * b)
    return _mask(t, [_tile(t, 0, t, 0, first, 0, NO_LIMIT), middle, _tile(t, last, t, first, t, 0, NO_LIMIT)])


def prefix_lm(prefix: npt.ArrayLike, lengths: npt.ArrayLike) -> Mask:
    """The first `prefix` tokens attend to each other both ways, the others causally. int[n] each, or prefix an int."""
    t = _lengths(lengths)
    p = np.minimum(_least("prefix", prefix, 0), t)
    return _mask(t, [_tile(t, 0, p, 0, p, -NO_LIMIT, NO_LIMIT), _tile(t, p, t, 0, t, 0, NO_LIMIT)])


def block_causal(blocks: Ragged) -> Mask:
    """Video: each block (a frame, a chunk) attends to all of its own tokens and of all earlier blocks. blocks: tokens of each.

    Blocks of one token are causal text; a run of them is one tile, so text and images mix.
    """
    _least("blocks", blocks.values, 0)
    begin = blocks.before()
    end, document = begin + blocks.values, blocks.document
    # A run of single tokens, of one document, is one causal square on top of all that came before.
    single = blocks.values == 1
    runs = np.ones(len(single), bool)
    runs[1:] = ~(single[1:] & single[:-1] & (document[1:] == document[:-1]))
    head = np.flatnonzero(runs)
    tail = np.append(head[1:], len(single)) - 1 if len(head) else head
    lo = np.where(single[head], 0, -NO_LIMIT)
    return _mask(blocks.sums(), [(document[head], _tile(head, begin[head], end[tail], 0, end[tail], lo, NO_LIMIT))])


def equal_blocks(lengths: npt.ArrayLike, block: int) -> Ragged:
    """Blocks of `block` tokens for each document, the last one perhaps shorter: what `block_causal` wants."""
    t = _lengths(lengths)
    _least("block", block, 1)
    num = -(-t // block)
    values = np.full(int(num.sum()), block, np.int64)
    offsets = np.concatenate([[0], np.cumsum(num)])
    some = num > 0
    values[offsets[1:][some] - 1] = (t - (num - 1) * block)[some]
    return Ragged(values, offsets)


Part = Int64 | tuple[Int64, Int64]


def _tile(like: Int64, *columns: npt.ArrayLike) -> Int64:
    return np.stack([np.broadcast_to(np.asarray(column, dtype=np.int64), like.shape) for column in columns], axis=1)


def _mask(tokens: Int64, parts: Sequence[Part]) -> Mask:
    """Tiles of each document, or (document, tiles) where a document has several; those that are empty are left out."""
    every = np.arange(len(tokens))
    document = np.concatenate([part[0] if isinstance(part, tuple) else every for part in parts])
    tiles = np.concatenate([part[1] if isinstance(part, tuple) else part for part in parts])
    kept = np.flatnonzero((tiles[:, 0] < tiles[:, 1]) & (tiles[:, 2] < tiles[:, 3]))
    kept = kept[np.argsort(document[kept], kind="stable")]
    offsets = np.searchsorted(document[kept], np.arange(len(tokens) + 1)).astype(np.int64)
    return Mask(tokens=tokens, offsets=offsets, tiles=tiles[kept])


def _whole(name: str, values: npt.ArrayLike) -> Int64:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers; got {array.dtype}.")
    return array.astype(np.int64)


def _least(name: str, values: npt.ArrayLike, least: int) -> Int64:
    array = _whole(name, values)
    if np.any(array < least):
        raise ValueError(f"{name} must be at least {least}; got {array.min()}.")
    return array


def _lengths(lengths: npt.ArrayLike, name: str = "lengths") -> Int64:
    return np.atleast_1d(_least(name, lengths, 0))


def _rows(ragged: Ragged, documents: int, name: str) -> None:
    if len(ragged) != documents:
        raise ValueError(f"{name} must be given for each of the {documents} documents; got {len(ragged)}.")
    _least(name, ragged.values, 0)
