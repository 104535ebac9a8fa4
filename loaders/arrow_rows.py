"""ArrowRows: columns of documents of a HF ``Dataset``, read straight from its Arrow buffers.

A document is a slice of a memory-mapped array: no token becomes a Python object, nothing is copied, and only pages that are
read are touched. Where a column is lists in all its chunks, which it is but for fixed-size ones, no Python runs per document
either: a kernel finds the chunk of each row and its ends.

    rows = ArrowRows(dataset).rows([3, 1])
    rows["input_ids"]                              # Slices, as are all columns of lists; others hold one value per document
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..packing.packs import Int64
from .slices import Flats, Slices, slices_of_rows


class ArrowRows:
    """Columns of a HF Dataset by document number, over all chunks.

    Args:
        dataset: its rows are what Arrow holds, see ``is_plain``.
        without: a column that is left out.

    Raises ValueError for a column that no batch can hold.
    """

    def __init__(self, dataset: Any, without: str | None = None) -> None:
        table, indices = dataset.data.table, dataset._indices
        self.indices = None if indices is None else indices.column(0)
        names = [name for name in dataset.format["columns"] if name != without]
        self.columns = {name: _column(name, table.column(name)) for name in names}

    def rows(self, documents: list[int]) -> dict[str, Sequence[Any]]:
        """Columns of these documents: 1-D arrays, views of the file, or one scalar per document."""
        numbers = np.array(documents if self.indices is None else self.indices.take(pa.array(documents)), np.int64)
        return {name: column.rows(numbers) for name, column in self.columns.items()}


def is_plain(dataset: Any) -> bool:
    """Whether it is a HF Dataset whose rows are what Arrow holds (no transform set by the user)."""
    data = getattr(dataset, "data", None)
    if not isinstance(getattr(data, "table", None), pa.Table):
        return False
    return dataset.format["type"] in (None, "numpy", "torch", "arrow", "python")


@dataclass(frozen=True, kw_only=True)
class _Lists:
    """Lists of any size: chunk by chunk their values, and where each row's begin."""

    starts: Int64  # first row of each chunk
    values: Flats
    offsets: Flats

    def rows(self, numbers: Int64) -> Slices:
        return slices_of_rows(self.values, self.offsets, self.starts, numbers)


@dataclass(frozen=True, kw_only=True)
class _Others:
    """Chunks whose rows are asked for one by one: arrays of two dimensions (lists of one size), or of scalars."""

    starts: Int64
    chunks: list[Any]

    def rows(self, numbers: Int64) -> list[Any]:
        chunk = np.searchsorted(self.starts, numbers, side="right") - 1
        pairs = zip(chunk.tolist(), (numbers - self.starts[chunk]).tolist(), strict=True)
        values = (self.chunks[held][row] for held, row in pairs)
        return [value.as_py() if isinstance(value, pa.Scalar) else value for value in values]


def _column(name: str, column: pa.ChunkedArray) -> _Lists | _Others:
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    nested = is_list or pa.types.is_fixed_size_list(kind)
    plain = kind.value_type if nested else kind
    number = pa.types.is_integer(plain) or pa.types.is_floating(plain) or pa.types.is_boolean(plain)
    text = pa.types.is_string(plain) or pa.types.is_large_string(plain)
    if not number and (nested or not text):
        raise ValueError(
            f"column {name!r} has type {kind}: a column must hold one list of numbers per document (token-aligned) or one "
            f"number or string per document; remove it with dataset.remove_columns({name!r}) or convert it"
        )
    starts = np.cumsum([0] + [len(chunk) for chunk in column.chunks[:-1]])
    if not nested:
        return _Others(starts=starts, chunks=column.chunks)
    flats = [_values(name, chunk) for chunk in column.chunks]
    if is_list:
        offsets = [chunk.offsets.to_numpy() for chunk in column.chunks]
        return _Lists(starts=starts, values=Flats(flats), offsets=Flats(offsets))
    size = kind.list_size
    chunks = [
        flat[chunk.offset * size :].reshape(-1, size)[: len(chunk)]
        for flat, chunk in zip(flats, column.chunks, strict=True)
    ]
    return _Others(starts=starts, chunks=chunks)


def _values(name: str, chunk: Any) -> np.ndarray:
    if chunk.values.null_count:
        raise ValueError(
            f"column {name!r} holds {chunk.values.null_count} nulls inside its lists; fill or drop them first"
        )
    return chunk.values.to_numpy(zero_copy_only=False)
