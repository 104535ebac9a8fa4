"""PlannedDataset: fetches the documents of a micro-batch, as views where the storage allows it.

For a HF ``Dataset`` tokens are read straight from the Arrow buffers: a document is a slice of a memory-mapped array, no
token becomes a Python object and only the pages that a rank's shard covers are touched. Any other map-style dataset is
asked for its rows (``__getitems__`` where it has one); a row is a mapping of columns, or the token ids alone. Token files,
tar shards and mixtures are a ``Source``: they know their lengths without reading and give rows by columns.

    >>> data = PlannedDataset([[1, 2, 3], [4, 5]])
    >>> data.rows([1, 0])["input_ids"]
    [array([4, 5]), array([1, 2, 3])]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch.utils.data import Dataset

from ..packing.lengths import Lengths
from ..samplers.micro_batches import MicroBatch
from .arrow_rows import ArrowRows, is_plain
from .layout import IGNORE

Rows = dict[str, Sequence[Any]]


ON_ERROR = ("raise", "skip")
_JUDGED = 7  # documents by which it is judged what columns a document has
SKIPPED = "__skipped__"  # beside the columns of rows: why a document is not among them


@runtime_checkable
class Source(Protocol):
    """A map-style dataset that knows its lengths and gives rows by columns; it pickles small, to go to workers."""

    @property
    def column_names(self) -> list[str]:
        """``input_ids``, ``labels`` where there are any (unshifted, -100 masked), and what else a document has."""

    def __len__(self) -> int: ...

    def lengths(self) -> Lengths:
        """The length index; reads no token."""

    def rows(self, documents: list[int]) -> Rows:
        """Columns of these documents: 1-D arrays (one per document) or one scalar per document."""


class PlannedDataset(Dataset):
    """Wraps a map-style dataset for a ``DataLoader`` driven by a ``BalancedBatchSampler``.

    Args:
        targets: names a column with each document's number of targets: it belongs to the index, not to the batches.
        on_error: a document that cannot be read, or whose values cannot be trained on, is an error (``raise``) or left out
            of the loss (``skip``: its place is filled, and ``batch.skipped`` tells).
    """

    def __init__(self, dataset: Any, *, targets: str | None = None, on_error: str = "raise") -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"a map-style dataset with __getitem__ and __len__ is needed; got {type(dataset).__name__}: hand a stream to "
                f"BalancedLoader as Stream.of(…), or materialise it first"
            )
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}; got {on_error!r}")
        self.dataset, self.targets, self.on_error = dataset, targets, on_error
        self.unmeasured: dict[int, str] = {}  # documents that have no length because they could not be read, and why

    def __len__(self) -> int:
        return len(self.dataset)

    def lengths(self, group: str | None = None) -> Lengths:
        """The length index: from a source, from Arrow offsets; any other dataset is read once, a document at a time."""
        if hasattr(self.dataset, "data") and hasattr(self.dataset, "column_names"):
            return Lengths.from_dataset(self.dataset, targets=self.targets, group=group)
        named = self.targets or group
        if named is not None:
            raise ValueError(
                f"{named!r} names a column of a HF Dataset; this is a {type(self.dataset).__name__}: pass "
                f"lengths=Lengths(tokens=…, targets=…, group=…) instead"
            )
        if isinstance(self.dataset, Source):
            return self.dataset.lengths()
        return Lengths.from_array(np.fromiter(map(self._measured, range(len(self))), np.int64, len(self)))

    def index(self, lengths: Lengths | None, group: str | None) -> Lengths:
        """The length index that was given, or the dataset's own. Raises ValueError where one was given that does not fit."""
        if lengths is None:
            return self.lengths(group)
        if group is not None:
            raise ValueError("group_key names a column to read; with lengths= give Lengths(group=…) instead")
        if len(lengths) != len(self):
            raise ValueError(f"the length index has {len(lengths)} documents, the dataset {len(self)}")
        return lengths

    def _measured(self, document: int) -> int:
        rows = self.readable([document])
        self.unmeasured.update(rows.get(SKIPPED, {}))
        ids = rows["input_ids"][0]
        return 0 if ids is None else len(ids)

    @cached_property
    def has_labels(self) -> bool:
        """Whether documents bring a column of labels, which may mask some targets."""
        names = getattr(self.dataset, "column_names", None)
        return "labels" in (self._kinds[1] if names is None else names)

    @property
    def columns(self) -> list[str]:
        """The columns that a document has: what a source or a table says, or what most of the first documents have."""
        if isinstance(self.dataset, Source):
            return list(self.dataset.column_names)
        return list(self._kinds[1] if self._arrow is None else self._arrow.columns)

    @cached_property
    def _kinds(self) -> tuple[int, dict[str, str]]:
        """The columns that most of the first few documents have, of each whether it is an array or one value; and the first
        document that has them. Documents that are left out do not count."""
        seen: dict[frozenset[tuple[str, str]], tuple[list[int], dict[str, str]]] = {}
        for document in range(len(self)):
            try:
                (row,) = self._presented([document])
            except Exception:
                if self.on_error == "raise" and not seen:
                    raise
            else:
                if self.on_error == "raise" or not fault(row):
                    kinds = _kinds_of(row)
                    seen.setdefault(frozenset(kinds.items()), ([], kinds))[0].append(document)
            most = max((len(documents) for documents, _ in seen.values()), default=0)
            if most > _JUDGED // 2 or (most and document >= _JUDGED - 1):
                break
        documents, kinds = max(seen.values(), key=lambda each: len(each[0]), default=([-1], {}))
        return documents[0], kinds

    def __getstate__(self) -> dict:
        # Arrow readers are rebuilt in the worker.
        names = ("dataset", "targets", "on_error", "unmeasured", "_kinds")
        return {name: self.__dict__[name] for name in names if name in self.__dict__}

    def __getitems__(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[MicroBatch, Rows]]:
        """torch's batched fetch: each spec with the whole documents of its spans; a filler brings its template."""
        fetched = []
        for micro_batch in micro_batches:
            document = micro_batch.spans.document
            numbers = np.where(document < 0, micro_batch.template, document).tolist()
            tokens = np.where(document < 0, -1, micro_batch.document_tokens).tolist()
            fetched.append((micro_batch, self.readable(numbers, tokens)))
        return fetched

    def readable(self, documents: list[int], tokens: list[int] | None = None) -> Rows:
        """``rows``; with ``on_error="skip"`` None in the columns of what cannot be read or trained on, which ``SKIPPED``
        tells why. ``tokens``: what the index says of each; -1: nothing."""
        if self.on_error == "raise":
            return self.rows(documents)
        read: list[Rows | str] = [
            self._row_or_reason(document, -1 if tokens is None else tokens[at]) for at, document in enumerate(documents)
        ]
        names = next((list(row) for row in read if not isinstance(row, str)), ["input_ids"])
        for at, row in enumerate(read):
            if not isinstance(row, str) and set(row) != set(names):
                read[at] = f"its columns are {sorted(row)}, others have {sorted(names)}"
        reasons = {document: row for document, row in zip(documents, read, strict=True) if isinstance(row, str)}
        rows: Rows = {name: [None if isinstance(row, str) else row[name][0] for row in read] for name in names}
        return {**rows, SKIPPED: reasons} if reasons else rows  # type: ignore[dict-item]

    def _row_or_reason(self, document: int, tokens: int) -> Rows | str:
        try:
            row = self.rows([document])
        except Exception as error:  # whatever it is, it concerns this document alone
            return f"{type(error).__name__}: {error}"
        return fault({name: values[0] for name, values in row.items()}, tokens) or row

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"PlannedDataset is fetched by micro-batches, got index {index!r}: drive it by "
            f"DataLoader(batch_sampler=BalancedBatchSampler(…), collate_fn=ThdCollator(…))"
        )

    @cached_property
    def _arrow(self) -> ArrowRows | None:
        return ArrowRows(self.dataset, self.targets) if is_plain(self.dataset) else None

    def rows(self, documents: list[int]) -> Rows:
        """Columns of these documents: 1-D arrays (one per document) or one scalar per document."""
        if self._arrow is not None:
            return self._arrow.rows(documents)
        if isinstance(self.dataset, Source):
            return self.dataset.rows(documents)
        rows = self._presented(documents)
        for document, row in zip(documents, rows, strict=True):
            self._check_columns(document, row)
        return {name: [row[name] for row in rows] for name in rows[0]}

    def _presented(self, documents: list[int]) -> list[dict[str, Any]]:
        """The rows of any map-style dataset."""
        try:
            many = hasattr(self.dataset, "__getitems__")
            rows = self.dataset.__getitems__(documents) if many else map(self._row, documents)
        except Exception:
            rows = map(self._row, documents)  # of many at once nothing tells which it was
        return [self._valued(document, row) for document, row in zip(documents, rows, strict=True)]

    def _valued(self, document: int, row: Any) -> dict[str, Any]:
        given, values = row if isinstance(row, Mapping) else {"input_ids": row}, {}
        for name in given:
            try:
                if name != self.targets:
                    values[name] = _value(given[name])
            except ValueError as error:
                raise ValueError(f"column {name!r} of document {document} is ragged: {error}") from error
        return values

    def _check_columns(self, document: int, row: dict[str, Any]) -> None:
        """A column that comes and goes, or is now an array and now a value, has no place in a pack."""
        (first, known), kinds = self._kinds, _kinds_of(row)
        if set(kinds) != set(known):
            raise ValueError(
                f"every document must have the same columns; document {first} has {sorted(known)}, document {document} has "
                f"{sorted(kinds)}"
            )
        if kinds != known:
            name = next(name for name in kinds if kinds[name] != known[name])
            raise ValueError(
                f"column {name!r} holds arrays for some documents and single values for others: {known[name]} for document "
                f"{first}, {kinds[name]} for document {document}"
            )

    def _row(self, document: int) -> Any:
        try:
            if hasattr(self.dataset, "__getitems__"):
                (row,) = self.dataset.__getitems__([document])
                return row
            return self.dataset[document]
        except Exception as error:
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"document {document} could not be read: {type(error).__name__}: {error}") from error


def fault(row: Mapping[str, Any], tokens: int = -1) -> str | None:
    """Why a document cannot be trained on; None if it can. ``tokens``: what the index says; -1: nothing.

    >>> fault({"input_ids": np.array([1.0, float("nan")])})
    'its token ids are float64, not integers'
    """
    ids = row.get("input_ids")
    if not isinstance(ids, np.ndarray) or ids.ndim != 1:
        return f"its token ids must be a 1-D array; got {'nothing' if ids is None else np.shape(ids)}"
    if ids.dtype.kind not in "iu":
        return f"its token ids are {ids.dtype}, not integers"
    if ids.dtype.kind == "i" and ids.size and ids.min() < 0:
        return f"it holds the token id {ids.min()}, below 0"
    if tokens not in (-1, len(ids)):
        return f"it has {len(ids)} tokens, but {tokens} in the length index"
    for name, value in row.items():
        if isinstance(value, np.ndarray) and value.shape != ids.shape:
            return f"column {name!r} has shape {value.shape} beside {len(ids)} tokens"
    return fault_of_labels(row.get("labels", ids))


def fault_of_labels(labels: Any) -> str | None:
    """Why these cannot be the labels of a document; None if they can."""
    if not isinstance(labels, np.ndarray):
        return f"its labels must be a list of whole numbers; got {type(labels).__name__}"
    if labels.dtype.kind not in "iu" or (labels.dtype == np.uint64 and labels.size and labels.max() >= 1 << 63):
        return f"its token ids and labels must be whole numbers below 2**63; got {labels.dtype}"
    wrong = labels[(labels < 0) & (labels != IGNORE)] if labels.dtype.kind == "i" else labels[:0]
    if len(wrong):
        return f"it holds the label {wrong[0]}: a label is a token id, or {IGNORE} where it is masked"
    return None


def _kinds_of(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: "an array" if isinstance(value, np.ndarray) else "a value" for name, value in row.items()}


def _value(value: Any) -> Any:
    """A numpy array for sequences and tensors of one dimension or more; scalars and strings as they are."""
    if isinstance(value, str | bytes | int | float | bool | None):
        return value
    array = np.asarray(value)
    return array.item() if array.ndim == 0 and array.dtype != object else array
