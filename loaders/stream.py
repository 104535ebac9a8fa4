"""Stream: a source without an index, in parts that can only be read from their beginning.

    stream = Stream.of(load_dataset(…, streaming=True))                   # a HF IterableDataset, by its shards
    stream = Stream.of([read_web, read_books])                            # any iterables, or functions that open them, one part each
    stream = Stream.tar("corpus-{000000..000999}.tar.gz", tokens="npy")   # tar shards, compressed or not
    stream = Stream(open=read_bucket, num_parts=32)                       # open(part, epoch): documents in a repeatable order

Decided here: how much is read side by side. The number of parts is a property of the data and not of the job, so that any
number of ranks and workers reads the documents in the same order; parts are dealt to ranks, and a part is read by one process
at a time. By default there is one part per shard, up to 64: with more shards a part reads several, one after the other, for
each part keeps its reader open and holds a batch of rows of it in memory.

A document is a mapping of columns, of which ``input_ids`` is needed, or its token ids alone. Whether an order is repeatable
is the source's promise: a run that resumes reads past what it has seen. Where that can be seen to be broken it is refused.

    >>> stream = Stream.of([[[1, 2], [3]], [[4, 5, 6]]])
    >>> stream.num_parts, list(stream.documents(0, epoch=0)[0])
    (2, [[1, 2], [3]])
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from .stream_tar import TarParts, shard_paths
from .tar_members import Members

_PARTS = 64
_ROWS = 16  # of a HF dataset that are held at a time for each part


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents in parts; see ``of`` and ``tar``.

    Args:
        open: ``open(part, epoch)`` gives an iterable over the documents of a part, in an order that is the same whenever
            it is called so. Where the iterable has a method ``skip(n)``, that gives one without its first n documents.
            Must pickle if it is to be read in worker processes started by spawning.
        num_parts: how many there are, whatever the number of ranks.
        source: what errors call it.
        columns: those that are kept beside ``input_ids``; None: all.
    """

    open: Callable[[int, int], Iterable[Any]]
    num_parts: int
    source: str = "stream"
    columns: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_parts != int(self.num_parts) or self.num_parts < 1:
            raise ValueError(f"a stream has a whole number of parts, at least 1; got num_parts={self.num_parts!r}")
        if not callable(self.open):
            raise ValueError(f"open must be a function of (part, epoch); got {type(self.open).__name__}")

    @classmethod
    def of(cls, dataset: Any, *, num_parts: int | None = None, columns: Sequence[str] | None = None) -> Stream:
        """From a HF ``IterableDataset``, from an iterable, or from a list of iterables, one part each.

        In place of an iterable may stand a function that opens it, of no argument or of the epoch. An iterable that has a
        method ``set_epoch`` is told the epoch. num_parts: for a HF dataset, at most its number of shards. Raises ValueError.
        """
        kept = None if columns is None else tuple(columns)
        if _is_hf(dataset):
            shards = int(dataset.num_shards)
            parts = min(shards, _PARTS) if num_parts is None else num_parts
            if not 1 <= parts <= shards:
                raise ValueError(
                    f"a part is one shard or several: num_parts must lie in 1 … {shards}; got {num_parts!r}"
                )
            _check_repeatable(dataset)
            return cls(open=_HfParts(dataset, parts), num_parts=parts, source="HF IterableDataset", columns=kept)
        if isinstance(dataset, dict):
            raise ValueError(f"choose one split of the dataset: dataset[{next(iter(dataset), 'train')!r}]")
        opened = list(dataset) if isinstance(dataset, list | tuple) else [dataset]
        if num_parts not in (None, len(opened)):
            raise ValueError(
                f"one part is read per iterable: there are {len(opened)}, and num_parts={num_parts}; give as many "
                f"iterables as there are to be parts"
            )
        for part, each in enumerate(opened):
            _check_opens_again(part, each)
        return cls(open=_Listed(tuple(opened)), num_parts=len(opened), source=_named(dataset), columns=kept)

    @classmethod
    def tar(
        cls,
        shards: str | Sequence[str | os.PathLike[str]],
        *,
        tokens: str = "npy",
        dtype: str | None = None,
        columns: Sequence[str] = (),
        num_parts: int | None = None,
    ) -> Stream:
        """From tar shards in webdataset's layout, plain or compressed (gz, bz2, xz): each sample is a document.

        Read are members by extension, as by ``equipoise index``; nothing is unpickled, and no member's name is used as a
        path. shards: paths, or one string with braces; what is no local file is opened as webdataset opens it. tokens:
        extension of the member with the token ids, which ends in npy, bin (with dtype=) or json; columns: of members with
        other columns. Raises ValueError.
        """
        paths = shard_paths(shards)
        parts = min(len(paths), _PARTS) if num_parts is None else num_parts
        if not 1 <= parts <= len(paths):
            raise ValueError(
                f"a part is one shard or several: num_parts must lie in 1 … {len(paths)}; got {num_parts!r}"
            )
        members = Members(tokens=tokens, columns=tuple(columns), dtype=dtype)
        return cls(open=TarParts(paths, members, parts), num_parts=parts, source=f"{len(paths)} tar shards")

    def documents(self, part: int, epoch: int, skip: int = 0) -> tuple[Iterator[Any], int]:
        """The documents of a part behind its first ``skip``, and how many of those are still to be read past."""
        opened: Any = self.open(part, epoch)
        if _is_hf(opened):
            opened = _HfDocuments.of(opened, int(opened.epoch))
        if skip and hasattr(opened, "skip"):
            return iter(opened.skip(skip)), 0
        return iter(opened), skip


def _named(dataset: Any) -> str:
    return f"{len(dataset)} iterables" if isinstance(dataset, list | tuple) else type(dataset).__name__


def _check_opens_again(part: int, opened: Any) -> None:
    if not isinstance(opened, Iterable):
        if callable(opened):
            return
        raise ValueError(f"part {part} must be an iterable or a function that opens one; got {type(opened).__name__}")
    if isinstance(opened, str | bytes) or iter(opened) is opened:
        raise ValueError(
            f"part {part} is a {type(opened).__name__}, which can be read once only, and a stream is opened anew in workers, at a "
            f"resume and each epoch: give a function that opens it"
        )


@dataclass(frozen=True)
class _Listed:
    """Opens iterables, or what functions open, by their number."""

    parts: tuple[Any, ...]

    def __call__(self, part: int, epoch: int) -> Iterable[Any]:
        opened = self.parts[part]
        if not isinstance(opened, Iterable):
            opened = opened(epoch) if _takes_epoch(opened) else opened()
        if hasattr(opened, "set_epoch"):
            opened.set_epoch(epoch)
        return opened


def _takes_epoch(function: Callable[..., Any]) -> bool:
    needed = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    return any(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in needed)


def _is_hf(dataset: Any) -> bool:
    """A HF ``IterableDataset``, told without importing the library."""
    return hasattr(dataset, "_ex_iterable") and hasattr(dataset, "set_epoch")


def _check_repeatable(dataset: Any) -> None:
    """Raises ValueError where ranks would read other documents, or a resumed run another order."""
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError("the dataset was split by node; give the whole of it: its documents are dealt to ranks here")
    waiting = [dataset._ex_iterable]
    while waiting:
        node = waiting.pop()
        drawn = getattr(getattr(getattr(node, "generator", None), "bit_generator", None), "seed_seq", None)
        seed = getattr(drawn, "entropy", None)
        if isinstance(seed, int) and seed >= 1 << 64:  # what numpy draws if it is given none
            raise ValueError("the dataset is shuffled without a seed, otherwise on each rank: use shuffle(seed=…)")
        waiting += [node.ex_iterable] if hasattr(node, "ex_iterable") else getattr(node, "ex_iterables", [])


@dataclass(frozen=True)
class _HfParts:
    """Opens the shards of a part of a HF ``IterableDataset``."""

    dataset: Any
    num_parts: int

    def __call__(self, part: int, epoch: int) -> _HfDocuments:
        return _HfDocuments.of(self.dataset.shard(num_shards=self.num_parts, index=part), epoch)


@dataclass(frozen=True)
class _HfDocuments:
    """Documents of a HF ``IterableDataset``, read as Arrow tables: no token becomes a Python object.

    ``iter(batch_size)`` does not split by torch's worker nor shift random numbers by it, as ``__iter__`` does: the order is
    the same in every process. The dataset's own ``skip`` is not used: behind it, later epochs keep shards in place.
    """

    dataset: Any
    skipped: int = 0

    @classmethod
    def of(cls, dataset: Any, epoch: int) -> _HfDocuments:
        """Of this epoch."""
        dataset = dataset.with_format("arrow")  # a new dataset, whose epoch is 0
        dataset.set_epoch(epoch)
        return cls(dataset)

    def skip(self, count: int) -> _HfDocuments:
        """Those behind the next ``count``."""
        return _HfDocuments(self.dataset, self.skipped + count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        left = self.skipped
        for table in self.dataset.iter(batch_size=_ROWS):
            if left < len(table):
                yield from _rows(table.slice(left))
            left = max(left - len(table), 0)


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    columns = [_values(column.combine_chunks()) for column in table.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(table.column_names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    """An array per row for lists, as views; else what the rows hold."""
    if pa.types.is_fixed_size_list(column.type):
        offsets = (column.offset + np.arange(len(column) + 1)) * column.type.list_size
    elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        offsets = column.offsets.to_numpy()
    else:
        return column.to_pylist()
    flat = column.values.slice(offsets[0], offsets[-1] - offsets[0]).to_numpy(zero_copy_only=False)
    ends = (offsets - offsets[0]).tolist()
    values: list[Any] = [flat[begin:end] for begin, end in pairwise(ends)]
    for row in np.flatnonzero(~column.is_valid().to_numpy(zero_copy_only=False)) if column.null_count else ():
        values[row] = None
    return values
