"""Lengths: how many tokens every document has, and where that is known from. All that planning ever reads.

Nothing here touches a token: a HF dataset is measured by the Arrow offsets of its token column, an index on disk is
mapped and never copied whole, and pairs and targets, where they follow from the length, are computed for the documents
of one window only (`take`).

    >>> import numpy as np
    >>> lengths = Lengths.from_array(np.array([5, 0, 3], dtype=np.int32))
    >>> window = lengths.take(np.array([2, 0]))
    >>> window.tokens, window.pairs, window.targets
    (array([3, 5]), array([ 6, 15]), array([2, 4]))

Zero lengths are legal here; the sampler drops and counts such documents.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .blend import Blend
from .cost import causal_pairs
from .packs import Int64

if TYPE_CHECKING:
    from .mask_columns import MaskColumns

Integers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """n documents by length."""

    tokens: Integers
    """int32[n] or int64[n], >= 0; may be a read-only memory map."""
    pairs: Integers | None = None
    """int64[n], pairs of each document under its mask; None: causal, t(t + 1)/2."""
    targets: Integers | None = None
    """int64[n], tokens of each document that carry a loss; None: all but the first, t - 1."""
    group: Integers | None = None
    """int64[n]: documents of one number stay together (answers to one prompt, a DPO pair); None: each by itself."""
    source: str = "array"
    blend: Blend | None = None
    """The sources that lie here one after the other and how they are mixed; None: one source, each document once."""
    masks: MaskColumns | None = None
    """What `pairs` are counted from (`MaskColumns.lengths()`), so that documents may be cut; None: pieces are causal."""

    def __post_init__(self) -> None:
        for name in ("tokens", "pairs", "targets", "group"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _integers(name, getattr(self, name)))
        for name in ("pairs", "targets", "group"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(
                    f"{name} must be given for each of the {len(self.tokens)} documents; got {len(values)}."
                )
        if self.masks is not None and (self.pairs is None or len(self.masks) != len(self.tokens)):
            raise ValueError(
                f"An index with masks has their pairs, for each of its {len(self.tokens)} documents; there are "
                f"{len(self.masks)} masks: MaskColumns.lengths() makes such an index."
            )
        if self.blend is not None and sum(self.blend.sizes) != len(self.tokens):
            raise ValueError(
                f"The sources of a blend make up the index: they have {sum(self.blend.sizes)} documents in all, the "
                f"index {len(self.tokens)}."
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, documents: npt.ArrayLike) -> Lengths:
        """The k documents numbered `documents` (int[k]), with tokens, pairs and targets filled in, all int64[k]."""
        at = np.asarray(documents, dtype=np.int64)
        tokens = np.asarray(self.tokens[at], dtype=np.int64)
        pairs = causal_pairs(0, tokens) if self.pairs is None else self.pairs[at].astype(np.int64)
        targets = np.maximum(tokens - 1, 0) if self.targets is None else self.targets[at].astype(np.int64)
        return Lengths(tokens=tokens, pairs=pairs, targets=targets, source=self.source)

    def pairs_of_pieces(self, document: Int64, start: Int64, stop: Int64) -> Int64:
        """Pairs of the spans [start, stop) of documents, each as a document of its own; all int64[k]."""
        if self.masks is None:
            return causal_pairs(0, stop - start)
        return self.masks.pieces(document, start, stop).pairs()

    def summary(self) -> dict[str, float]:
        """documents, tokens, mean, p50, p90, p99, max, and the share of Σt² that the longest 1 % hold."""
        n = len(self)
        if n == 0:
            return {"documents": 0, "tokens": 0}
        p50, p90, p99 = np.percentile(self.tokens, [50, 90, 99])
        longest = -(-n // 100)
        tail = np.partition(self.tokens, n - longest)[n - longest :].astype(np.float64)
        squares = float(np.square(self.tokens, dtype=np.float64).sum())
        return {
            "documents": n,
            "tokens": int(self.tokens.sum(dtype=np.int64)),
            "mean": float(self.tokens.mean()),
            "p50": float(p50),
            "p90": float(p90),
            "p99": float(p99),
            "max": int(self.tokens.max()),
            "squared_share_of_longest_1%": float(np.square(tail).sum()) / max(squares, 1.0),
        }

    def __str__(self) -> str:
        facts = ", ".join(f"{name} {value:,.4g}" for name, value in self.summary().items())
        return f"Lengths of {self.source}: {facts}"

    @staticmethod
    def from_array(tokens: npt.ArrayLike, *, targets: npt.ArrayLike | None = None, source: str = "array") -> Lengths:
        """From numbers of tokens, int[n]; floats are accepted if they are whole."""
        return Lengths(
            tokens=np.asarray(tokens), targets=None if targets is None else np.asarray(targets), source=source
        )

    @staticmethod
    def from_npy(path: str | PathLike[str]) -> Lengths:
        """From a `.npy` file of integers, mapped read-only."""
        return Lengths(tokens=np.load(path, mmap_mode="r"), source=str(path))

    @staticmethod
    def from_csv(path: str | PathLike[str]) -> Lengths:
        """From a CSV of numbers, read row by row; a first row without numbers is a heading."""
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [[cell for cell in row if cell.strip()] for row in csv.reader(file)]
        if rows and not any(_is_number(cell) for cell in rows[0]):
            rows = rows[1:]
        cells = [cell for row in rows for cell in row]
        words = [cell for cell in cells if not _is_number(cell)]
        if words:
            raise ValueError(f"A CSV of lengths holds numbers only; {path} holds {words[0]!r}.")
        return Lengths(tokens=np.array(cells, dtype=np.float64), source=str(path))

    @staticmethod
    def from_law(
        spec: Mapping[str, Any] | str | PathLike[str], num_documents: int | None = None, seed: int = 0
    ) -> Lengths:
        """From Megatron-LM's mock length configuration: a dict, its JSON, or the path of a JSON file.

        {"mode": "distribution", "type": "lognormal", "format": "thd", "min_seq_len": 128, "max_seq_len": 8192,
        "mean_seq_len": 1024, "lognormal_sigma": 1.5} draws `num_documents` lengths: lognormal with mu = ln(mean) -
        sigma²/2, clipped, cut to integers; with seed 0 they are Megatron's own. {"mode": "file", "path": csv} reads a
        CSV, and repeats it up to `num_documents` where that is given.
        """
        law = _read_spec(spec)
        if law.get("mode") == "file":
            lengths = Lengths.from_csv(_needed(law, "path"))
            if num_documents is None:
                return lengths
            return Lengths(tokens=np.resize(lengths.tokens, num_documents), source=lengths.source)
        if law.get("mode") != "distribution" or law.get("type") != "lognormal":
            raise ValueError(
                'A length law is {"mode": "distribution", "type": "lognormal", …} or {"mode": "file", "path": …}; '
                f"got mode {law.get('mode')!r}, type {law.get('type')!r}."
            )
        if num_documents is None:
            raise ValueError("A length law draws as many documents as asked for; give num_documents.")
        return Lengths(tokens=_lognormal(law, num_documents, seed), source=f"lognormal law, seed {seed}")

    @staticmethod
    def from_dataset(
        dataset: Any, column: str = "input_ids", *, targets: str | None = None, group: str | None = None
    ) -> Lengths:
        """From the list column `column` of a HF `Dataset`, by its Arrow offsets: no token is read.

        Sliced, chunked, selected and shuffled datasets are measured as they present themselves. targets: name of an
        integer column with the number of target tokens of each document. group: name of a column of numbers or strings;
        documents of one value stay together.
        """
        return Lengths(
            tokens=_per_row(dataset, column, _list_lengths),
            targets=None if targets is None else _per_row(dataset, targets, _whole_numbers),
            group=None if group is None else _numbered(dataset, group),
            source=f"dataset column {column!r}",
        )


def _integers(name: str, values: Any) -> Integers:
    """values as int32 or int64 in one dimension, copied only where their type must change."""
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be whole numbers in one dimension; got {values.dtype} of shape {values.shape}.")
    if values.dtype.kind == "f":
        broken = ~np.isfinite(values) | (values != np.trunc(values))
        if broken.any():
            raise ValueError(f"{name} must be whole numbers; entry {_first(broken)} is {values[_first(broken)]}.")
    if len(values) and (values.min() < 0 or values.max() >= 2.0**63):
        raise ValueError(f"{name} must lie in 0 … 2**63 - 1; got {values.min()} … {values.max()}.")
    return values if values.dtype in (np.int32, np.int64) else values.astype(np.int64)


def _first(broken: npt.NDArray[np.bool_]) -> int:
    return int(broken.argmax())


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_spec(spec: Mapping[str, Any] | str | PathLike[str]) -> Mapping[str, Any]:
    if isinstance(spec, Mapping):
        return spec
    text = str(spec)
    law = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    if not isinstance(law, dict):
        raise ValueError(f"A length law is a JSON object; got {type(law).__name__}.")
    return law


def _needed(law: Mapping[str, Any], key: str) -> Any:
    if key not in law:
        raise ValueError(f"A length law of mode {law['mode']!r} needs {key!r}; got {', '.join(law)}.")
    return law[key]


def _lognormal(law: Mapping[str, Any], num_documents: int, seed: int) -> Int64:
    low, high, mean, sigma = (
        float(_needed(law, key)) for key in ("min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma")
    )
    if not (0 <= low <= high and mean > 0 and sigma >= 0):
        raise ValueError(
            "A lognormal law has 0 <= min_seq_len <= max_seq_len, mean_seq_len > 0 and lognormal_sigma >= 0; "
            f"got {low:g}, {high:g}, {mean:g}, {sigma:g}."
        )
    # The legacy generator, because it is the one Megatron draws from.
    drawn = np.random.RandomState(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, num_documents)
    return np.clip(drawn, low, high).astype(np.int64)


def _per_row(dataset: Any, column: str, measure: Callable[[Any, str], Integers]) -> Integers:
    """measure(chunk, column) over the chunks of a HF dataset's column, one number per row as the dataset shows them."""
    if not hasattr(dataset, "column_names") or not hasattr(getattr(dataset, "data", None), "column"):
        raise ValueError(f"from_dataset reads one HF Dataset (a split, map-style); got {type(dataset).__name__}.")
    if column not in dataset.column_names:
        raise ValueError(f"The dataset has no column {column!r}; it has {', '.join(dataset.column_names)}.")
    chunks = [measure(chunk, column) for chunk in dataset.data.column(column).chunks]
    values = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
    # select, shuffle and train_test_split leave the table alone and keep a table of row numbers beside it.
    indices = getattr(dataset, "_indices", None)
    if indices is not None:
        values = values[indices.column(0).to_numpy()]
    if len(values) and values.min() < 0:
        row = _first(values < 0)
        raise ValueError(f"Row {row} of column {column!r} is null or negative ({values[row]}); filter it out first.")
    return values


def _list_lengths(chunk: Any, column: str) -> Integers:
    """Tokens of each list of an Arrow chunk, -1 for a null."""
    import pyarrow as pa

    if pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type):
        tokens = np.diff(chunk.offsets.to_numpy())
    elif pa.types.is_fixed_size_list(chunk.type):
        tokens = np.full(len(chunk), chunk.type.list_size, np.int64)
    else:
        raise ValueError(f"Column {column!r} must hold lists of token ids; it holds {chunk.type}.")
    return np.where(chunk.is_valid().to_numpy(zero_copy_only=False), tokens, -1) if chunk.null_count else tokens


def _whole_numbers(chunk: Any, column: str) -> Integers:
    """The integers of an Arrow chunk, -1 for a null."""
    import pyarrow as pa

    if not pa.types.is_integer(chunk.type):
        raise ValueError(f"Column {column!r} must hold integers; it holds {chunk.type}.")
    return chunk.fill_null(-1).to_numpy().astype(np.int64)


def _numbered(dataset: Any, column: str) -> Int64:
    """The distinct values of a column, numbered; int64[n] by document."""
    if column not in dataset.column_names:
        raise ValueError(f"The dataset has no column {column!r}; it has {', '.join(dataset.column_names)}.")
    values = np.asarray(dataset.with_format("numpy", columns=[column])[:][column])
    if values.ndim != 1:
        raise ValueError(f"Column {column!r} must hold one number or string per document; got shape {values.shape}.")
    return np.unique(values, return_inverse=True)[1].astype(np.int64)
