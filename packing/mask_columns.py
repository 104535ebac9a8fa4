"""MaskColumns: the masks of a whole dataset, as columns of structure; slices exist only for the documents asked for.

A million documents with their masks are a few arrays (question lengths, answer lengths), from memory or mapped, and no Python
object per document. Decided here: the kind of mask is one for the dataset, its structure one for each document. That is no
limit to mixing: a shared question without answers, a prefix of 0 and a window as long as the document are causal, and what
fits no kind is a `Mask`, concatenated.

    >>> import numpy as np
    >>> masks = MaskColumns("shared_question", {"question": np.array([2, 5]), "answers": Ragged.of([[2, 2], []])})
    >>> masks.lengths().tokens, masks.lengths().pairs          # what recipes balance by
    (array([6, 5]), array([17, 15]))
    >>> masks.pieces([1, 0], [0, 0], [5, 4]).pairs()            # the spans of a pack
    array([15, 10])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from . import mask_kinds
from .lengths import Lengths, _list_lengths, _per_row, _whole_numbers
from .mask_kinds import Ragged
from .masks import Mask
from .packs import Int64

KINDS: dict[str, Callable[..., Mask]] = {
    "causal": mask_kinds.causal,
    "full": mask_kinds.full,
    "sliding_window": mask_kinds.sliding_window,
    "window_with_sinks": mask_kinds.window_with_sinks,
    "shared_question": mask_kinds.shared_question,
    "causal_blockwise": mask_kinds.causal_blockwise,
    "prefix_lm": mask_kinds.prefix_lm,
    "block_causal": mask_kinds.block_causal,
}
TOGETHER = 1 << 16
"""Documents measured at once: what bounds memory."""


@dataclass(frozen=True, eq=False)
class MaskColumns:
    """Masks of n documents."""

    kind: str
    """Name of a function of mask_kinds.py …"""
    columns: Mapping[str, Any]
    """… and its arguments: int[n] or Ragged of n documents, or one int for all."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"A mask is one of {', '.join(KINDS)}; got {self.kind!r}.")
        try:
            inspect.signature(KINDS[self.kind]).bind(**self.columns)
        except TypeError as error:
            names = inspect.signature(KINDS[self.kind])
            raise ValueError(f"The columns of {self.kind!r} are {', '.join(names.parameters)}; {error}.") from None
        sizes = {name: len(values) for name, values in self.columns.items() if _per_document(values)}
        if len(set(sizes.values())) != 1:
            raise ValueError(
                f"The columns of masks have a value for each document, at least one of them does; got {sizes}."
            )

    def __len__(self) -> int:
        return next(len(values) for values in self.columns.values() if _per_document(values))

    @staticmethod
    def from_dataset(
        dataset: Any, kind: str, columns: Mapping[str, str], fixed: Mapping[str, int] | None = None
    ) -> MaskColumns:
        """From columns of a HF `Dataset`, as it presents itself (sliced, selected, shuffled).

        columns: argument of the mask → name of the column: integers; lists of integers for `answers` and `blocks`; and, for
        `lengths`, the tokens themselves, whose lists are measured by their offsets. fixed: arguments that are one for all.
        """
        found: dict[str, Any] = dict(fixed or {})
        for argument, name in columns.items():
            if argument in ("answers", "blocks"):
                counts = _per_row(dataset, name, _list_lengths)
                rows = dataset.with_format("numpy", columns=[name])[:][name] if len(dataset) else []
                values = np.concatenate([np.zeros(0, np.int64), *(np.asarray(row, np.int64) for row in rows)])
                found[argument] = Ragged(values, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))
            else:
                found[argument] = _per_row(dataset, name, _numbers_or_lengths)
        return MaskColumns(kind, found)

    def take(self, documents: npt.ArrayLike) -> MaskColumns:
        """The documents numbered `documents`, int[k]."""
        at = np.asarray(documents, dtype=np.int64)
        return replace(self, columns={name: _taken(values, at) for name, values in self.columns.items()})

    def mask(self) -> Mask:
        """The slices of all documents: take those of a pack first."""
        return KINDS[self.kind](**self.columns)

    def pieces(self, document: npt.ArrayLike, start: npt.ArrayLike, stop: npt.ArrayLike) -> Mask:
        """The mask of a pack of spans [start, stop) of documents, int[k] each; -1 is a filler, which attends to nothing."""
        at = np.asarray(document, dtype=np.int64)
        known, place = np.unique(at[at >= 0], return_inverse=True)
        numbers = np.full(len(at), -1, np.int64)
        numbers[at >= 0] = place
        return self.take(known).mask().pieces(numbers, start, stop)

    def digest(self) -> str:
        """Hash of all columns."""
        state = xxhash.xxh3_64()
        for name in sorted(self.columns):
            values = self.columns[name]
            state.update(name.encode())
            for array in (values.values, values.offsets) if isinstance(values, Ragged) else (np.asarray(values),):
                state.update(np.ascontiguousarray(array, dtype=np.int64).data)
        return state.hexdigest()

    def lengths(self) -> Lengths:
        """Tokens and pairs of every document: the length index that planners balance by."""
        tokens, pairs = np.empty(len(self), np.int64), np.empty(len(self), np.int64)
        for first in range(0, len(self), TOGETHER):
            some = np.arange(first, min(first + TOGETHER, len(self)))
            mask = self.take(some).mask()
            tokens[some], pairs[some] = mask.tokens, mask.pairs()
        return Lengths(tokens=tokens, pairs=pairs, masks=self, source=f"{self.kind} masks")


def _per_document(values: Any) -> bool:
    return isinstance(values, Ragged) or np.ndim(values) > 0


def _taken(values: Any, at: Int64) -> Any:
    if isinstance(values, Ragged):
        return values.take(at)
    return np.asarray(values)[at] if _per_document(values) else values


def _numbers_or_lengths(chunk: Any, column: str) -> npt.NDArray[np.integer[Any]]:
    import pyarrow as pa

    return _whole_numbers(chunk, column) if pa.types.is_integer(chunk.type) else _list_lengths(chunk, column)
