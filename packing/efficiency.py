"""Kernel efficiency: how fast attention runs, by the query rows and the keys of one document in one call.

Pairs say how much attention computes, not how long it takes: a kernel works on tiles of 128 query rows, so a document
cut into shorter pieces pays for rows that are not there. The table is FlashAttention forward on an H100 over equal
documents (64 query and 4 KV heads of dim 128, 32K tokens in all), for whole documents and for an eighth of each; between
its points the speed *per full tile* is interpolated over log2 of the keys and of keys / rows, held constant outside them,
and then multiplied by the share of its tiles' rows that are real. It is within 14 % of the measured halves and quarters
of documents of 128 tokens and more, which are not in the table.

The logarithm is exact at powers of two and straight between them, so that CPUs of different make agree bit for bit.

    >>> efficiency([4096, 512, 16], [4096, 4096, 128])          # whole, an eighth of it, an eighth of a short one
    array([348., 324.,  15.])
    >>> pairs = 128 * 129 // 2
    >>> whole, cut = kernel_seconds([pairs, pairs // 8], [128, 16], [128, 128], flops_per_pair=4 * 64 * 128)
    >>> round(float(8 * cut / whole), 1)                        # cutting a document of 128 tokens eight ways
    5.7
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .cost import Float64

TILE = 128
"""Query rows of one tile: fewer cost as much."""
LOG2_OF_SHORTEST = 5
WHOLE = np.array([12, 40, 85, 139, 204, 283, 322, 348, 361, 370], dtype=np.float64)
"""TFLOP/s of whole documents of 32, 64 … 16K tokens."""
EIGHTH = np.array([np.nan, np.nan, 15, 39, 100, 226, 279, 324, 348, np.nan])
"""TFLOP/s where the query is an eighth of the document, which is measured for 128 … 8K."""


def efficiency(q_tokens: npt.ArrayLike, k_tokens: npt.ArrayLike) -> Float64:
    """TFLOP/s (of the pairs that count) of `q_tokens` rows of one document of `k_tokens` keys; float64[...].

    q_tokens, k_tokens: int[...], >= 1, broadcast together. k_tokens is what the rows at most see: the document's
    length, or the end of the piece. More rows than keys count as a whole document of as many keys.
    """
    q, k = np.broadcast_arrays(np.asarray(q_tokens, dtype=np.float64), np.asarray(k_tokens, dtype=np.float64))
    if q.size and not (q.min() >= 1 and k.min() >= 1):
        raise ValueError(f"efficiency takes at least 1 row and 1 key; got {q.min():.0f} and {k.min():.0f}.")
    at = np.clip(_log2(k) - LOG2_OF_SHORTEST, 0, len(WHOLE) - 1)
    below = np.minimum(at.astype(np.int64), len(WHOLE) - 2)
    cut = np.clip(_log2(k / q), 0, 3) / 3
    lower = _WHOLE_PER_TILE[below] * (1 - cut) + _EIGHTH_PER_TILE[below] * cut
    upper = _WHOLE_PER_TILE[below + 1] * (1 - cut) + _EIGHTH_PER_TILE[below + 1] * cut
    return (lower + (at - below) * (upper - lower)) * _real_rows(q)


def kernel_seconds(
    pairs: npt.ArrayLike, q_tokens: npt.ArrayLike, k_tokens: npt.ArrayLike, flops_per_pair: float
) -> Float64:
    """Forward seconds of calls that compute `pairs` (int[...]), `q_tokens` rows over `k_tokens` keys; float64[...].

    flops_per_pair: `ModelShape.flops_per_pair` for all layers; 4 x heads x head_dim for one.
    """
    return np.asarray(pairs, dtype=np.float64) * flops_per_pair / (efficiency(q_tokens, k_tokens) * 1e12)


def _log2(x: Float64) -> Float64:
    """log2, exact at powers of two and straight between them."""
    mantissa, exponent = np.frexp(x)
    return exponent - 2 + 2 * mantissa


def _real_rows(q: npt.ArrayLike) -> Float64:
    """Share of real rows in the tiles of q rows."""
    rows = np.asarray(q, dtype=np.float64)
    return rows / (TILE * np.ceil(rows / TILE))


_LENGTHS = 2.0 ** np.arange(LOG2_OF_SHORTEST, LOG2_OF_SHORTEST + len(WHOLE))
_WHOLE_PER_TILE = WHOLE / _real_rows(_LENGTHS)


def _eighth_per_tile() -> Float64:
    """The row of eighths; where it was not measured, the shape of the row of whole documents goes on."""
    measured = np.flatnonzero(np.isfinite(EIGHTH))
    nearest = np.clip(np.arange(len(EIGHTH)), measured[0], measured[-1])
    shape = _WHOLE_PER_TILE / _WHOLE_PER_TILE[nearest]
    return (EIGHTH / _real_rows(_LENGTHS / 8))[nearest] * shape


_EIGHTH_PER_TILE = _eighth_per_tile()
