"""Megatron-LM's index of a data set (``PREFIX.idx``), read as it is: where in ``PREFIX.bin`` each sequence lies.

The layout (``megatron/core/datasets/indexed_dataset.py``), little-endian and without gaps: nine bytes of magic, a version
(uint64, 1), a code of the tokens' dtype (uint8), n sequences and m document edges (uint64 each), then int32[n] tokens of each
sequence, int64[n] its first byte, int64[m] edges: document d is sequences ``edges[d] … edges[d + 1]``. It may end with an
int8 per sequence, its mode, where some are images; such a data set is refused.

Both classes say which tokens of the ``.bin`` a document is (``bounds``); 12 to 20 bytes per document are read, none kept.
"""

from __future__ import annotations

import struct

import numpy as np

from ..packing.packs import Int64
from .mapped import MappedArray, MappedFile, integers

HEADER = struct.Struct("<9sQBQQ")  # magic, version, code of the dtype, sequences, entries of the document index
MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_BLOCK = 1 << 20  # sequences checked at a time


def read_index(file: MappedFile) -> tuple[np.dtype, MegatronSequences]:
    """The dtype of the tokens and the index of their sequences. Raises ValueError."""
    head = bytes(file.map[: HEADER.size])
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError(
            f"Megatron's index begins with {MAGIC!r} and a header of {HEADER.size} bytes; {file.path} begins "
            f"with {head[:9]!r} and holds {file.size}: it is another kind of file"
        )
    _, version, code, num_sequences, num_documents = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        raise ValueError(
            f"Megatron's index has version 1 and a dtype code of 1 … 8; {file.path} has version {version}, code {code}: write "
            f"it again with tools/preprocess_data.py"
        )
    dtype = integers(np.dtype(DTYPES[code]), file.path)
    told = HEADER.size + 12 * num_sequences + 8 * num_documents
    if file.size != told:
        modes = (
            "it has a mode per sequence, so not all are token ids"
            if file.size == told + num_sequences
            else "it is broken"
        )
        raise ValueError(
            f"{file.path} claims {num_sequences} sequences and {num_documents} document edges, so {told} bytes; it holds "
            f"{file.size}: {modes if file.size > told else 'it is truncated'}; give an index of token ids alone, complete"
        )
    return dtype, MegatronSequences(file, dtype.itemsize, num_sequences, num_documents)


class MegatronSequences:
    """Megatron's index of sequences, mapped: lengths in tokens, pointers in bytes."""

    def __init__(self, file: MappedFile, itemsize: int, num_sequences: int, num_documents: int) -> None:
        behind = HEADER.size
        self.file, self.name, self.itemsize = file, file.path, itemsize
        self.length = MappedArray(file, np.dtype("<i4"), behind, num_sequences)
        self.pointer = MappedArray(file, np.dtype("<i8"), behind + 4 * num_sequences, num_sequences)
        self.document = MappedArray(file, np.dtype("<i8"), behind + 12 * num_sequences, num_documents)
        pointers = self.pointer.values()
        for first in range(0, num_sequences, _BLOCK):
            odd = pointers[first : first + _BLOCK] % itemsize != 0
            if odd.any():
                at = first + int(odd.argmax())
                raise ValueError(
                    f"pointers of {self.name} must be multiples of the {itemsize} bytes of a token; that of sequence {at} is "
                    f"{pointers[at]}: the index is broken, write it again"
                )

    def __len__(self) -> int:
        return self.length.count

    def check(self) -> None:
        self.file.check()

    def run(self, first: int, stop: int) -> tuple[Int64, Int64]:
        begin = self.pointer.values()[first:stop] // self.itemsize
        return begin, begin + self.length.values()[first:stop]

    def bounds(self, documents: Int64) -> tuple[Int64, Int64]:
        begin = self.pointer.values()[documents] // self.itemsize
        return begin, begin + self.length.values()[documents]


class MegatronDocuments:
    """Megatron's documents: runs of sequences that lie one behind the other."""

    def __init__(self, sequences: MegatronSequences) -> None:
        self.sequences, self.name = sequences, sequences.name
        edges, count = sequences.document.values(), len(sequences)
        if len(edges) < 1 or edges[0] != 0 or edges[-1] != count or (edges[1:] < edges[:-1]).any():
            raise ValueError(
                f"the document index of {self.name} must rise from 0 to its {count} sequences; it does not: the index is "
                f"broken, or read its sequences with documents=False"
            )
        for first in range(0, max(count - 1, 0), _BLOCK):
            number = np.arange(first, min(first + _BLOCK, count - 1))
            apart = number[sequences.bounds(number)[1] != sequences.bounds(number + 1)[0]] + 1
            inside = np.setdiff1d(apart, edges) if len(apart) else apart
            if len(inside):
                raise ValueError(
                    f"documents=True joins sequences that lie one behind the other; sequence {inside[0]} of {self.name} does "
                    f"not follow the one before it in its document: use documents=False"
                )

    def __len__(self) -> int:
        return self.sequences.document.count - 1

    def check(self) -> None:
        self.sequences.check()

    def run(self, first: int, stop: int) -> tuple[Int64, Int64]:
        return self.bounds(np.arange(first, stop))

    def bounds(self, documents: Int64) -> tuple[Int64, Int64]:
        edges = self.sequences.document.values()
        first, last = edges[documents], edges[documents + 1]
        begin, end = np.zeros(len(documents), np.int64), np.zeros(len(documents), np.int64)
        some = last > first
        begin[some] = self.sequences.bounds(first[some])[0]
        end[some] = self.sequences.bounds(last[some] - 1)[1]
        return begin, end
