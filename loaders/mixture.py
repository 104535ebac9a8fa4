"""Mixture: several map-style sources as one, from which documents are drawn by weight.

Decided here: nothing but which source a document lies in: those of source 0 come first, then those of source 1, and so on.
How they are drawn is a ``Blend`` in the length index (``packing/blend.py``), which the sampler turns into an order of
documents (``samplers/mixture.py``): deterministic, resumed anywhere, each source shuffled by itself.

    >>> mixture = Mixture([[[1, 2], [3]], [[4, 5, 6]]], weights=(0.7, 0.3), exhausted="first_exhausted")
    >>> len(mixture), mixture[2], mixture.lengths().tokens.tolist()
    (3, {'input_ids': array([4, 5, 6])}, [2, 1, 3])

Cost: the length indices of all sources are put into one array, 4 or 8 bytes a document, in the process that plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..packing.blend import Blend
from ..packing.lengths import Lengths
from .dataset import PlannedDataset, Rows


class Mixture:
    """A ``Source`` of sources: HF Datasets, other map-style datasets, token files, tar shards.

    Args:
        sources: each with the same columns, or all of those named by ``columns``.
        weights: shares of the *documents* drawn, of any sum; None: as many as each has, so that all run out together.
        exhausted: what becomes of a source that runs out, see ``Blend``.
        columns: those to keep, ``input_ids`` among them; None: all.

    A mixture within a mixture is refused: its sources with their share of its weight do the same.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        weights: Sequence[float] | None = None,
        exhausted: str = "all_exhausted_without_replacement",
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        nested = [number for number, source in enumerate(sources) if isinstance(source, Mixture)]
        if nested:
            raise ValueError(
                f"a mixture is made of sources, not of mixtures; source {nested[0]} is one: give its sources in its place, with "
                f"its weight divided among them"
            )
        self._parts = [PlannedDataset(source) for source in sources]
        sizes = tuple(len(part) for part in self._parts)
        if 0 in sizes:
            raise ValueError(f"every source of a mixture needs a document to draw; source {sizes.index(0)} has none")
        self.blend = Blend(sizes=sizes, weights=tuple(sizes if weights is None else weights), exhausted=exhausted)
        self._selected = columns is not None
        self.column_names = _agreed([part.columns for part in self._parts], columns)

    def __len__(self) -> int:
        return sum(self.blend.sizes)

    def lengths(self) -> Lengths:
        """The sources' indices one after the other, with the ``blend``; targets only where every source's are known."""
        parts = [part.lengths() for part in self._parts]
        grouped = [number for number, part in enumerate(parts) if part.group is not None]
        if grouped:
            raise ValueError(
                f"sources are mixed document by document, and documents of a group stay together; source {grouped[0]} has groups"
            )
        masked = [number for number, part in enumerate(parts) if part.masks is not None]
        if masked:
            raise ValueError(
                f"a mixture's documents are causal; source {masked[0]} has {parts[masked[0]].masks.kind} masks: "  # type: ignore[union-attr]
                f"join the columns of all sources into one index by MaskColumns(...).lengths()"
            )
        unknown = "labels" in self.column_names and any(part.targets is None for part in parts)
        return Lengths(
            tokens=np.concatenate([part.tokens for part in parts]),
            pairs=_joined(parts, "pairs"),
            targets=None if unknown else _joined(parts, "targets"),
            source=f"{len(parts)} sources ({', '.join(part.source for part in parts)})",
            blend=self.blend,
        )

    def rows(self, documents: list[int]) -> Rows:
        """Columns of these documents, from whichever source each lies in: 1-D arrays, or one scalar per document."""
        numbers, offsets = np.asarray(documents, np.int64), self.blend.offsets
        source = np.searchsorted(offsets, numbers, side="right") - 1
        out: dict[str, list[Any]] = {name: [None] * len(documents) for name in self.column_names}
        for number in np.unique(source).tolist():
            places = np.flatnonzero(source == number)
            rows = self._rows_of(number, (numbers[places] - offsets[number]).tolist())
            for name, values in out.items():
                for place, value in zip(places.tolist(), rows[name], strict=True):
                    values[place] = value
        return dict(out)

    def _rows_of(self, number: int, documents: list[int]) -> Rows:
        """Columns of a source's documents, which it numbers from 0. Its errors name the source."""
        try:
            rows = self._parts[number].rows(documents)
            held = set(rows) & set(self.column_names) if self._selected else set(rows)
            if held != set(self.column_names):
                raise ValueError(
                    f"documents {documents[:8]} have columns {sorted(rows)}, not {sorted(self.column_names)}"
                )
        except Exception as error:
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            first = self.blend.offsets[number]
            raise kind(f"in source {number} of the mixture, whose document 0 is document {first}: {error}") from error
        return rows

    def __getitem__(self, document: int) -> dict[str, Any]:
        """One document by its columns."""
        if not 0 <= document < len(self):
            raise IndexError(f"the mixture has documents 0 … {len(self) - 1}; got {document}")
        return {name: values[0] for name, values in self.rows([document]).items()}

    def describe(self) -> str:
        """Sources, shares and policy, in a line."""
        return f"Mixture of {self.blend.describe()}; columns {', '.join(self.column_names)}"

    __repr__ = describe


def _agreed(columns: list[list[str]], selected: Sequence[str] | None) -> list[str]:
    """The columns of a mixture. ValueError where a source lacks one, or has one more than the first."""
    if selected is not None and "input_ids" not in selected:
        raise ValueError(f"the tokens are in the column 'input_ids'; columns= leaves it out: {', '.join(selected)}")
    wanted = list(columns[0] if selected is None else dict.fromkeys(selected))
    for number, held in enumerate(columns):
        lacks, more = set(wanted) - set(held), set(held) - set(wanted)
        if lacks or (more and selected is None):
            raise ValueError(
                f"sources of a mixture have the same columns; source {number} has {', '.join(sorted(held))}, where "
                f"{', '.join(sorted(wanted))} are wanted: rename columns, or name those that all have by columns="
            )
    return wanted


def _joined(parts: list[Lengths], name: str) -> np.ndarray | None:
    """A column of all indices, with what follows from the tokens where some lack it; None where all do."""
    if all(getattr(part, name) is None for part in parts):
        return None
    return np.concatenate([getattr(part.take(np.arange(len(part))), name) for part in parts])
