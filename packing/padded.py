"""Padded packs: documents lengthened to what a kernel can divide, for Transformer Engine's THD format.

TE's zigzag cuts each document into 2·cp equal chunks and, with sequence parallelism, each rank's part into tp more,
so each document is padded to a multiple of that. It wants the real boundaries (``cu_seqlens``) and the padded ones
(``cu_seqlens_padded``), both of the whole pack, never divided by cp. Decided here: nothing but the padding, once the
size of the group is known: padding for any size that might come wastes up to 73 % at 512 ranks, padding for the size
that was chosen 0.02 %.

How many real tokens of a document a rank holds is not length / cp where its last chunks are padding
(TransformerEngine #1930, #3331): ``valid_tokens`` counts them.

    >>> padded = pad_documents([0, 4, 12, 18, 28], 4)               # documents of 4, 8, 6, 10, cp 2
    >>> padded
    array([ 0,  4, 12, 20, 32])
    >>> valid_tokens([0, 7], [0, 8], 2)
    array([[3],
           [4]])
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .packs import Int64
from .shards import Shards, boundaries, zigzag


def pad_documents(cu_seqlens: npt.ArrayLike, multiple: int) -> Int64:
    """Boundaries int64[k + 1] of the documents, each padded to a multiple; cu_seqlens: int[k + 1]."""
    cu = boundaries(cu_seqlens)
    if multiple < 1:
        raise ValueError(f"Documents are padded to a multiple of at least 1; got {multiple}.")
    return np.concatenate([[0], np.cumsum(-(-np.diff(cu) // multiple) * multiple)])


def zigzag_padded(cu_seqlens: npt.ArrayLike, cp_size: int, tp_size: int = 1) -> Shards:
    """Zigzag per document over documents padded to 2·cp_size·tp_size (tp_size where cp_size is 1).

    The positions and `cu_seqlens` of the result are those of the padded pack: `padded_source` says where its tokens
    come from.
    """
    if tp_size < 1:
        raise ValueError(f"A TP group has at least one rank; got tp_size={tp_size}.")
    return zigzag(pad_documents(cu_seqlens, tp_size * (2 * cp_size if cp_size > 1 else 1)), cp_size)


def valid_tokens(cu_seqlens: npt.ArrayLike, cu_seqlens_padded: npt.ArrayLike, cp_size: int) -> Int64:
    """Real tokens of each padded document that each rank holds under zigzag, int64[cp_size, k].

    With chunks of c = padded / (2·cp) tokens, rank r holds clamp(length - r·c, 0, c) + clamp(length - (2·cp-1-r)·c,
    0, c).
    """
    length, padded = _lengths(cu_seqlens, cu_seqlens_padded)
    uneven = np.flatnonzero(padded % (2 * cp_size))
    if len(uneven):
        raise ValueError(
            f"Zigzag cuts padded documents into {2 * cp_size} equal chunks; document {uneven[0]} has "
            f"{padded[uneven[0]]} tokens: pad to a multiple of {2 * cp_size}."
        )
    chunk, rank = padded // (2 * cp_size), np.arange(cp_size)[:, None]
    front = np.clip(length - rank * chunk, 0, chunk)
    return front + np.clip(length - (2 * cp_size - 1 - rank) * chunk, 0, chunk)


def padded_source(cu_seqlens: npt.ArrayLike, cu_seqlens_padded: npt.ArrayLike) -> Int64:
    """For each position of the padded pack its position in the pack, -1 for padding; int64[padded tokens]."""
    length, padded = _lengths(cu_seqlens, cu_seqlens_padded)
    first = np.cumsum(length) - length
    within = np.arange(int(padded.sum())) - np.repeat(np.cumsum(padded) - padded, padded)
    return np.where(within < np.repeat(length, padded), np.repeat(first, padded) + within, -1)


def _lengths(cu_seqlens: npt.ArrayLike, cu_seqlens_padded: npt.ArrayLike) -> tuple[Int64, Int64]:
    length, padded = np.diff(boundaries(cu_seqlens)), np.diff(boundaries(cu_seqlens_padded))
    if len(length) != len(padded) or np.any(padded < length):
        raise ValueError(
            f"Padded boundaries hold the same documents, none shorter; got lengths {length} in {padded} padded ones."
        )
    return length, padded
