"""open_source: a source of documents from a path, told apart by its name.

    loader = BalancedLoader(open_source("corpus/*.parquet"), recipe("wlb"), …)

| path | read by |
|---|---|
| ``.parquet``; ``.jsonl``, ``.json``, ``.ndjson``, also compressed (``.gz``, ``.bz2``, ``.xz``, ``.zst``) | ``datasets``, once, into its cache |
| ``.arrow``, a folder of ``save_to_disk`` | ``datasets``, mapped where it lies |
| ``PREFIX`` of Megatron's ``PREFIX.bin``, ``PREFIX.idx`` | ``TokenFile.megatron``, mapped where it lies |
| an index of tar shards, ``.index`` or ``.arrow``, written by ``equipoise index`` | ``TarShards`` |

Tables have a column ``input_ids`` of integer lists; what is null or ragged in any column is refused here, by name, before a
step is planned. That costs a look at offsets and validity bits, not at tokens. Only files of this machine are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from glob import escape, glob, has_magic
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..packing.lengths import Lengths
from .dataset import PlannedDataset
from .mapped import Path

READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".arrow": "arrow"}
INDEX_MARK = b"equipoise"  # key in the schema of an index, which is an Arrow file too
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
UNDERSTOOD = (
    "Parquet (.parquet), JSON lines (.jsonl, .json, .ndjson; also .gz, .bz2, .xz, .zst), Arrow (.arrow), a folder written by "
    "save_to_disk, PREFIX of Megatron's PREFIX.bin and PREFIX.idx, or an index (.index, .arrow) written by `equipoise index`; raw ids "
    "are opened by TokenFile.npy and TokenFile.raw, which take their offsets"
)


def open_source(path: Path | Iterable[Path], *, columns: list[str] | None = None) -> Any:
    """A map-style source of documents: a HF ``Dataset``, a ``TokenFile`` or ``TarShards``, as the path says.

    Args:
        path: one path, several files of one kind of table, or a pattern (``*``), whose files are read in order of name.
        columns: columns of a table to keep, ``input_ids`` among them; None: all.

    Raises ValueError for anything else than the kinds above, and for nulls, ragged columns and token ids that are no integers.
    """
    if columns is not None and "input_ids" not in columns:
        raise ValueError(f"columns= must keep 'input_ids', the token ids; got {', '.join(columns) or 'none'}")
    given = [os.fspath(path)] if isinstance(path, str | os.PathLike) else [os.fspath(each) for each in path]
    files = [file for each in given for file in _files(each)]
    kinds = {_kind(file) for file in files}
    if len(kinds) != 1:
        raise ValueError(
            f"several paths must be tables of one kind; got {', '.join(files) or 'none'}: open them one by one"
        )
    (kind,) = kinds
    if kind in READERS.values():
        return _checked(_table(kind, files, columns), files[0])
    if len(files) > 1:
        raise ValueError(f"only files of tables are read together; got {', '.join(files)}: open them one by one")
    if kind == "saved":
        return _checked(_saved(files[0], columns), files[0])
    source = _megatron(files[0]) if kind == "megatron" else _tar(files[0])
    if columns is not None and set(columns) != set(source.column_names):
        raise ValueError(
            f"columns= selects from tables; {files[0]} has {', '.join(source.column_names)}, asked for {', '.join(columns)}"
        )
    return source


def _files(path: str) -> list[str]:
    """The path, or what its pattern matches. Raises ValueError where that is nothing, or not on this machine."""
    if "://" in path:
        raise ValueError(f"only files of this machine are opened, and none is fetched; got {path}: copy it here first")
    if not os.path.exists(path) and not os.path.exists(path + ".idx") and has_magic(path):
        found = sorted(glob(path, recursive=True))
        if not found:
            raise ValueError(f"no file matches {path}")
        return found
    return [path]


def _kind(path: str) -> str:
    """What a path is: parquet, json, arrow, saved, megatron or tar. Raises ValueError."""
    stem, suffix = os.path.splitext(path)
    if os.path.isfile(path + ".idx") or (suffix in (".idx", ".bin") and os.path.isfile(stem + ".idx")):
        return "megatron"
    if not os.path.exists(path):
        raise ValueError(f"there is no {path}; understood are {UNDERSTOOD}")
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "state.json")):
            return "saved"
        if os.path.isfile(os.path.join(path, "dataset_dict.json")):
            splits = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
            raise ValueError(
                f"{path} holds several splits; open one of {', '.join(os.path.join(path, s) for s in splits)}"
            )
    elif suffix == ".index" or (suffix == ".arrow" and _is_index(path)):
        return "tar"
    elif suffix in COMPRESSED:
        inner = READERS.get(os.path.splitext(stem)[1])
        if inner == "json":
            return inner
    elif suffix in READERS:
        return READERS[suffix]
    raise ValueError(f"{path} is of no kind that is understood, which are {UNDERSTOOD}")


def _is_index(path: str) -> bool:
    try:
        return INDEX_MARK in (pa.ipc.open_file(pa.memory_map(path)).schema.metadata or {})
    except pa.ArrowInvalid:  # a stream, or broken: whoever reads it will tell
        return False


def _table(kind: str, files: list[str], columns: list[str] | None) -> Any:
    from datasets import Dataset, concatenate_datasets, load_dataset

    if kind == "arrow":
        try:
            return _selected(concatenate_datasets([Dataset.from_file(file) for file in files]), files[0], columns)
        except pa.ArrowInvalid:
            pass  # the other of Arrow's two file formats, which datasets rewrites into its cache
    only = {"columns": columns} if kind == "parquet" and columns is not None else {}
    try:
        dataset = load_dataset(kind, data_files=[escape(file) for file in files], split="train", **only)
    except Exception as error:
        raise ValueError(f"datasets cannot read {', '.join(files)} as {kind}: {error.__cause__ or error}") from error
    return _selected(dataset, files[0], columns)


def _saved(path: str, columns: list[str] | None) -> Any:
    from datasets import load_from_disk

    return _selected(load_from_disk(path), path, columns)


def _megatron(path: str) -> Any:
    from .token_files import TokenFile

    return TokenFile.megatron(path if os.path.isfile(path + ".idx") else os.path.splitext(path)[0])


def _tar(path: str) -> Any:
    from .tar import TarShards

    return TarShards(path)


def _selected(dataset: Any, path: str, columns: list[str] | None) -> Any:
    missing = [name for name in columns or ["input_ids"] if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"the token ids are read from a column named 'input_ids'; {path} has {', '.join(dataset.column_names)} and no "
            f"{', '.join(missing)}"
        )
    return dataset if columns is None else dataset.select_columns(columns)


def _checked(dataset: Any, path: str) -> Any:
    """The dataset, in which every document has integers as tokens, and every other column a value for it or for each token."""
    try:
        tokens = Lengths.from_dataset(dataset).tokens
        PlannedDataset(dataset).rows([])  # refuses columns of other kinds, and nulls among tokens
        for name in dataset.column_names:
            _check_column(dataset, name, tokens)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return dataset


def _check_column(dataset: Any, name: str, tokens: npt.NDArray[np.integer]) -> None:
    column = dataset.data.column(name)
    if not pa.types.is_nested(column.type):
        if column.null_count:
            at = int(column.is_null().to_numpy().argmax())
            raise ValueError(
                f"every document needs a value in every column; {column.null_count} are null in {name!r}, the first in row "
                f"{at}: fill them, or leave the column out with columns="
            )
        return
    if name == "input_ids" and not pa.types.is_integer(column.type.value_type):
        raise ValueError(f"token ids must be integers; 'input_ids' holds {column.type}")
    sizes = Lengths.from_dataset(dataset, name).tokens
    if (sizes != tokens).any():
        at = int((sizes != tokens).argmax())
        raise ValueError(
            f"a list holds one value per token; that of {name!r} in document {at} has {sizes[at]} beside {tokens[at]} tokens: "
            f"mend it, or leave the column out with columns="
        )
