"""PlannedDataset: fetches the documents of a micro-batch, as views where the storage allows it.

For a HF ``Dataset`` tokens are read straight from the Arrow buffers: a document is a slice of a memory-mapped array, no
token becomes a Python object and only the pages that a rank's shard covers are touched. Any other map-style dataset is
asked for its rows (``__getitems__`` where it has one); a row is a mapping of columns, or the token ids alone.

    >>> data = PlannedDataset([[1, 2, 3], [4, 5]])
    >>> data.rows([1, 0])["input_ids"]
    [array([4, 5]), array([1, 2, 3])]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

from ..packing.lengths import Lengths
from ..samplers.plan import MicroBatch

Rows = dict[str, list[Any]]


class PlannedDataset(Dataset):
    """Wraps a map-style dataset for a ``DataLoader`` driven by a ``BalancedBatchSampler``.

    ``targets`` names a column with each document's number of targets: it belongs to the index, not to the batches.
    """

    def __init__(self, dataset: Any, *, targets: str | None = None) -> None:
        if not hasattr(dataset, "__getitem__"):
            raise ValueError(
                f"a map-style dataset with __getitem__ is needed; got {type(dataset).__name__}: materialise a stream first"
            )
        self.dataset, self.targets = dataset, targets

    def __len__(self) -> int:
        return len(self.dataset)

    def lengths(self, group: str | None = None) -> Lengths:
        """The length index: from Arrow offsets; any other dataset is read once, a document at a time."""
        if hasattr(self.dataset, "data") and hasattr(self.dataset, "column_names"):
            return Lengths.from_dataset(self.dataset, targets=self.targets, group=group)
        named = self.targets or group
        if named is not None:
            raise ValueError(
                f"{named!r} names a column of a HF Dataset; this is a {type(self.dataset).__name__}: pass "
                f"lengths=Lengths(tokens=…, targets=…, group=…) instead"
            )
        measured = (self.rows([document])["input_ids"][0] for document in range(len(self)))
        return Lengths.from_array(np.fromiter((len(ids) for ids in measured), np.int64, len(self)))

    @cached_property
    def has_labels(self) -> bool:
        """Whether documents bring a column of labels, which may mask some targets."""
        names = getattr(self.dataset, "column_names", None)
        return "labels" in (self.rows([0]) if names is None else names)

    def __getstate__(self) -> dict:
        return {"dataset": self.dataset, "targets": self.targets}  # Arrow readers are rebuilt in the worker

    def __getitems__(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, Rows]]:
        """torch's batched fetch: each spec with the whole documents of its spans; a filler brings its template."""
        fetched = []
        for micro_batch in micro_batches:
            document = micro_batch.spans.document
            fetched.append((micro_batch, self.rows(np.where(document < 0, micro_batch.template, document).tolist())))
        return fetched

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"PlannedDataset is fetched by micro-batches, got index {index!r}: drive it by "
            f"DataLoader(batch_sampler=BalancedBatchSampler(…), collate_fn=ThdCollator(…))"
        )

    @cached_property
    def _arrow(self) -> _ArrowReader | None:
        return _ArrowReader(self.dataset, self.targets) if _is_plain_arrow(self.dataset) else None

    def rows(self, documents: list[int]) -> Rows:
        """Columns of these documents: 1-D arrays (one per document) or one scalar per document."""
        if self._arrow is not None:
            return self._arrow.rows(documents)
        if hasattr(self.dataset, "__getitems__"):
            rows = self.dataset.__getitems__(documents)
        else:
            rows = [self.dataset[document] for document in documents]
        rows = [row if isinstance(row, Mapping) else {"input_ids": row} for row in rows]
        for document, row in zip(documents, rows, strict=True):
            if set(row) != set(rows[0]):
                raise ValueError(
                    f"every document must have the same columns; document {documents[0]} has {sorted(rows[0])}, "
                    f"document {document} has {sorted(row)}"
                )
        return {name: [_value(row[name]) for row in rows] for name in rows[0] if name != self.targets}


def _value(value: Any) -> Any:
    """A numpy array for sequences and tensors of one dimension or more; scalars and strings as they are."""
    if isinstance(value, str | bytes | int | float | bool | None):
        return value
    array = np.asarray(value)
    return array.item() if array.ndim == 0 and array.dtype != object else array


def _is_plain_arrow(dataset: Any) -> bool:
    """A HF Dataset whose rows are what Arrow holds (no transform set by the user)."""
    data = getattr(dataset, "data", None)
    if not isinstance(getattr(data, "table", None), pa.Table):
        return False
    return dataset.format["type"] in (None, "numpy", "torch", "arrow", "python")


class _ArrowReader:
    """Slices of the columns of a HF Dataset by document number, over all chunks, without copying."""

    def __init__(self, dataset: Any, targets: str | None) -> None:
        table, indices = dataset.data.table, dataset._indices
        self.indices = None if indices is None else indices.column(0)
        names = [name for name in dataset.format["columns"] if name != targets]
        self.columns = {name: _chunks(name, table.column(name)) for name in names}

    def rows(self, documents: list[int]) -> Rows:
        if self.indices is not None:
            documents = self.indices.take(pa.array(documents)).to_pylist()
        return {name: _read(chunks, starts, documents) for name, (starts, chunks) in self.columns.items()}


def _read(chunks: list[tuple[np.ndarray, np.ndarray | None] | pa.Array], starts: np.ndarray, rows: list[int]) -> list:
    chunk_of = np.searchsorted(starts, rows, side="right") - 1
    row_of = np.asarray(rows) - starts[chunk_of]
    values = []
    for chunk, row in zip(chunk_of.tolist(), row_of.tolist(), strict=True):
        held = chunks[chunk]
        if isinstance(held, tuple):
            flat, offsets = held
            values.append(flat[offsets[row] : offsets[row + 1]] if offsets is not None else flat[row])
        else:
            values.append(held[row].as_py())
    return values


def _chunks(name: str, column: pa.ChunkedArray) -> tuple[np.ndarray, list]:
    """First row of each chunk, and per chunk (flat values, offsets) for lists, (rows, None) for fixed-size ones, or the
    Arrow array itself for scalars."""
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
    chunks: list[Any] = []
    for chunk in column.chunks:
        if not nested:
            chunks.append(chunk)
            continue
        flat = chunk.values
        if flat.null_count:
            raise ValueError(f"column {name!r} holds {flat.null_count} nulls inside its lists; fill or drop them first")
        values = flat.to_numpy(zero_copy_only=False)
        if is_list:
            chunks.append((values, chunk.offsets.to_numpy()))
        else:
            size = kind.list_size
            chunks.append((values[chunk.offset * size :].reshape(-1, size)[: len(chunk)], None))
    return starts, chunks
