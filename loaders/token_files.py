"""TokenFile: the documents of a flat file of token ids, mapped where it lies, never copied.

    source = TokenFile.megatron("corpus_text_document")                 # PREFIX.bin and PREFIX.idx, as Megatron-LM wrote them
    source = TokenFile.npy("tokens.npy", "offsets.npy")                 # offsets: int64[documents + 1], in tokens
    source = TokenFile.raw("tokens.bin", "uint16", "offsets.npy")
    loader = BalancedLoader(source, recipe("vrsp"), …)

Which tokens are a document follows from the index alone, so lengths are known without reading one. Everything is checked
when a file is opened: what headers claim against the sizes of the files before anything is allocated, then every offset,
a million at a time (some 10 ns each). A document fetched is a slice of the map: a microsecond, and the pages it touches.
What travels to a worker are paths and sizes; it maps the files itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from os import PathLike

import numpy as np
import numpy.typing as npt

from ..packing.lengths import Lengths
from ..packing.packs import Int64
from .mapped import MappedArray, MappedFile, Path, integers, npy_array
from .megatron_index import MegatronDocuments, MegatronSequences, read_index

_BLOCK = 1 << 20  # documents checked at a time


class TokenFile:
    """A source of documents with one column, ``input_ids``; made by ``npy``, ``raw`` or ``megatron``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/tokens.npy", np.arange(10, 17, dtype=np.uint16))
    ...     source = TokenFile.npy(f"{folder}/tokens.npy", np.array([0, 3, 3, 7]))
    ...     source.lengths().tokens.tolist(), source.rows([2, 0])["input_ids"]
    ([3, 0, 4], [array([13, 14, 15, 16], dtype=uint16), array([10, 11, 12], dtype=uint16)])
    """

    def __init__(self, tokens: MappedArray, index: _Offsets | MegatronSequences | MegatronDocuments) -> None:
        self.tokens, self.index = tokens, index
        for first, begin, end in self._blocks():
            bad = (begin < 0) | (end < begin) | (end > tokens.count)
            if bad.any():
                at = int(bad.argmax())
                raise ValueError(
                    f"every document must be a range of the {tokens.count} tokens of {tokens.file.path}; document "
                    f"{first + at} is {begin[at]} … {end[at]} by {index.name}: the index belongs to another file, or is broken"
                )

    @classmethod
    def npy(cls, path: Path, offsets: Path | npt.ArrayLike) -> TokenFile:
        """From a ``.npy`` of integers in one dimension.

        offsets: int[documents + 1] or the path of a ``.npy`` of them; document d is ``tokens[offsets[d]:offsets[d + 1]]``.
        An array is sent to every worker; a path is not. Raises ValueError.
        """
        return cls._cut(npy_array(path, "token ids"), offsets)

    @classmethod
    def raw(cls, path: Path, dtype: npt.DTypeLike, offsets: Path | npt.ArrayLike) -> TokenFile:
        """From a file of nothing but token ids of type ``dtype``; offsets as in ``npy``. Raises ValueError."""
        file, kind = MappedFile(path), integers(np.dtype(dtype), path)
        if file.size % kind.itemsize:
            raise ValueError(
                f"a file of {kind} holds a multiple of {kind.itemsize} bytes; {path} holds {file.size}: it is truncated, or "
                f"of another dtype"
            )
        return cls._cut(MappedArray(file, kind, 0, file.size // kind.itemsize), offsets)

    @classmethod
    def _cut(cls, tokens: MappedArray, offsets: Path | npt.ArrayLike) -> TokenFile:
        index = _Offsets.of(offsets)
        ends = index.values()[[0, -1]]
        if ends[0] != 0 or ends[1] != tokens.count:
            raise ValueError(
                f"offsets go from 0 to the number of tokens; {index.name} goes from {ends[0]} to {ends[1]}, and "
                f"{tokens.file.path} holds {tokens.count} of type {tokens.dtype}: give the offsets made with it, and its dtype"
            )
        return cls(tokens, index)

    @classmethod
    def megatron(cls, prefix: Path, *, documents: bool = False) -> TokenFile:
        """From Megatron-LM's indexed data set, ``PREFIX.bin`` and ``PREFIX.idx``, read as it is.

        Each of its sequences is a document; ``documents=True`` joins the sequences of a document of its own (where they were
        sentences), which must lie one behind the other. Raises ValueError.
        """
        path = os.fspath(prefix)
        missing = [path + end for end in (".bin", ".idx") if not os.path.isfile(path + end)]
        if missing:
            raise ValueError(f"Megatron's data set is a pair PREFIX.bin, PREFIX.idx; there is no file {missing[0]}")
        dtype, index = read_index(MappedFile(path + ".idx"))
        file = MappedFile(path + ".bin")
        tokens = MappedArray(file, dtype, 0, file.size // dtype.itemsize)
        return cls(tokens, MegatronDocuments(index) if documents else index)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def column_names(self) -> list[str]:
        return ["input_ids"]

    def _blocks(self) -> Iterator[tuple[int, Int64, Int64]]:
        """(first document, begins, ends), a block of documents at a time."""
        for first in range(0, len(self), _BLOCK):
            yield first, *self.index.run(first, min(first + _BLOCK, len(self)))

    def lengths(self) -> Lengths:
        """The length index: tokens int32[n], or int64[n] where a document has 2**31 or more. No token is read."""
        self.index.check()
        kind = np.int32 if self.tokens.count < 2**31 else np.int64
        tokens: npt.NDArray[np.integer] = np.empty(len(self), kind)
        for first, begin, end in self._blocks():
            tokens[first : first + len(begin)] = end - begin
        return Lengths(tokens=tokens, source=self.tokens.file.path)

    def rows(self, documents: list[int]) -> dict[str, list[np.ndarray]]:
        """The token ids of these documents, read-only views of the map. Raises ValueError if a file was truncated since."""
        self.tokens.file.check()
        self.index.check()
        wanted = np.asarray(documents, np.int64)
        outside = (wanted < 0) | (wanted >= len(self))
        if outside.any():
            raise IndexError(f"{self.tokens.file.path} has documents 0 … {len(self) - 1}, not {wanted[outside][0]}")
        begin, end = self.index.bounds(wanted)
        ids = self.tokens.values()
        return {"input_ids": [ids[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]}

    def __getitem__(self, document: int) -> dict[str, np.ndarray]:
        """One document."""
        return {name: values[0] for name, values in self.rows([document]).items()}

    def describe(self) -> str:
        """One line."""
        tokens = self.tokens
        return f"{len(self)} documents in {tokens.count} tokens ({tokens.dtype}) of {tokens.file.path}"

    __repr__ = describe


class _Offsets:
    """Documents one behind the other: n + 1 offsets, in memory or mapped."""

    def __init__(self, held: Int64 | MappedArray, name: str) -> None:
        self.held, self.name = held, name

    @classmethod
    def of(cls, offsets: Path | npt.ArrayLike) -> _Offsets:
        if isinstance(offsets, str | PathLike):
            mapped = npy_array(offsets, "offsets")
            index, count = cls(mapped, mapped.file.path), mapped.count
        else:
            array = np.asarray(offsets)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(
                    f"offsets are whole numbers in one dimension; got {array.dtype} of shape {array.shape}"
                )
            index, count = cls(array.astype(np.int64, copy=False), "the array of offsets"), len(array)
        if count < 1:
            raise ValueError(f"n documents have n + 1 offsets, from 0 to the number of tokens; {index.name} is empty")
        return index

    def __len__(self) -> int:
        return (self.held.count if isinstance(self.held, MappedArray) else len(self.held)) - 1

    def values(self) -> np.ndarray:
        return self.held.values() if isinstance(self.held, MappedArray) else self.held

    def check(self) -> None:
        if isinstance(self.held, MappedArray):
            self.held.file.check()

    def run(self, first: int, stop: int) -> tuple[Int64, Int64]:
        """``bounds`` of documents one behind the other: views where the type allows."""
        edges = self.values()[first : stop + 1].astype(np.int64, copy=False)
        return edges[:-1], edges[1:]

    def bounds(self, documents: Int64) -> tuple[Int64, Int64]:
        """First token of each document and one past its last."""
        offsets = self.values()
        return offsets[documents].astype(np.int64), offsets[documents + 1].astype(np.int64)
