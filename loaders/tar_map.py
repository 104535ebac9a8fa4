"""TarMap: an index of tar shards that was opened: its columns mapped, its facts, and the checks that make it trustworthy.

Columns are numpy views of the file: what is not touched is not in memory, and what is, all processes share.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..packing.packs import Int64
from .index_file import read_index
from .tar_members import ARRAYS, CODES, ITEM_BYTES, TEXTS, Members, format_of

_CHECKED_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tar file, as it was when it was indexed."""

    path: str
    size: int
    """Bytes."""
    ignored: int
    """Files in it that belong to no document."""

    def modified(self) -> int:
        """When it was last modified, in ns. Raises ValueError where it is missing or has another size."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise ValueError(f"{self.path}: the shard is in the index and cannot be opened ({error})") from None
        if now.st_size != self.size:
            raise ValueError(
                f"{self.path}: the shard had {self.size} bytes when it was indexed, and has {now.st_size}: index it anew"
            )
        return now.st_mtime_ns


@dataclass(frozen=True, kw_only=True, eq=False)
class TarMap:
    """The mapped columns of an index of n documents, and its facts."""

    path: str
    checksum: str
    shards: list[Shard]
    extensions: tuple[str, ...]
    names: tuple[str, ...]
    made: list[list[str]]
    """The columns that each member makes: an object in a json member makes several."""
    shard: npt.NDArray[np.int32]
    keys: pa.LargeStringArray
    tokens: Int64
    places: tuple[tuple[Int64, ...], tuple[Int64, ...], tuple[npt.NDArray[np.int8], ...]]
    """offset, size and dtype of the members, n numbers for each extension."""

    @staticmethod
    def read(path: str, known: str | None = None) -> TarMap:
        """Open an index; ``known`` is the checksum that another process found right. Raises ValueError where it is unsound."""
        batch, facts = read_index(path, known=known)
        try:
            members = Members(**facts["members"])
            base = os.path.realpath(os.path.dirname(path))
            shards = [
                Shard(path=os.path.join(base, each["path"]), size=int(each["size"]), ignored=int(each["ignored"]))
                for each in facts["shards"]
            ]
            prefixes = ["", *(f"{extension}." for extension in members.columns)]
            types = {"offset": pa.int64(), "size": pa.int64(), "dtype": pa.int8()}
            places = [tuple(_column(batch, prefix + name, kind) for prefix in prefixes) for name, kind in types.items()]
            return TarMap(
                path=path,
                checksum=facts["checksum"],
                shards=shards,
                extensions=members.extensions,
                names=members.names,
                made=[[str(name) for name in made] for made in facts["columns"]],
                shard=_column(batch, "shard", pa.int32()),
                keys=batch.column("key"),
                tokens=_column(batch, "tokens", pa.int64()),
                places=(places[0], places[1], places[2]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no index of tar shards ({error!r}): make it with `equipoise index`") from error

    @property
    def columns(self) -> list[str]:
        """All columns, ``input_ids`` first."""
        return [name for made in self.made for name in made]

    def describe(self) -> str:
        """One line: documents, tokens, shards, bytes, columns, and the files that belong to no sample."""
        size, ignored = (sum(getattr(shard, name) for shard in self.shards) for name in ("size", "ignored"))
        return (
            f"{self.path}: {len(self.tokens):,} documents, {int(self.tokens.sum()):,} tokens in {len(self.shards):,} shards of "
            f"{size:,} bytes; columns {', '.join(self.columns)}"
            + (f"; {ignored:,} files without a key and an extension are ignored" if ignored else "")
        )

    def check(self) -> Int64:
        """When each shard was last modified, in ns, int64[shards].

        Raises ValueError unless all shards are there with their sizes and every document lies within its own.
        """
        mtimes = np.array([shard.modified() for shard in self.shards], np.int64)
        sizes = np.array([shard.size for shard in self.shards], np.int64)
        for begin in range(0, len(self.tokens), _CHECKED_AT_ONCE):
            part = slice(begin, begin + _CHECKED_AT_ONCE)
            shard, tokens = self.shard[part], self.tokens[part]
            good = (shard >= 0) & (shard < len(sizes)) & (tokens >= 0)
            end = sizes[np.where(good, shard, 0)]
            for at, (offset, size, kind) in enumerate(zip(*self.places, strict=True)):
                good &= (offset[part] >= 0) & (size[part] >= 0) & (offset[part] <= end - size[part])
                good &= (kind[part] >= 0) & (kind[part] < len(CODES))
                item = ITEM_BYTES[np.where(good, kind[part], 0)]
                # Compared before it is multiplied: what an index states may overflow.
                good &= (size[part] // item == tokens) & (size[part] % item == 0) | (kind[part] >= len(ARRAYS))
                good &= (kind[part] >= len(ARRAYS)) == (format_of(self.extensions[at]) in TEXTS)
            if not good.all():
                document = begin + int(good.argmin())
                raise ValueError(
                    f"{self.path} is no sound index: document {document} does not lie within its shard; make it again"
                )
        return mtimes


def _column(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> Any:
    column = batch.column(name)
    if column.type != kind or column.null_count:
        raise TypeError(f"column {name} is {column.type} with {column.null_count} nulls, {kind} is due")
    return column.to_numpy()
