"""The keys and values of one document, layer by layer, and the gradients they gather: ChunkFlow's state store.

What is decided: one buffer per layer for the whole document, in which each chunk's rows follow those of the chunk before
it, so that a chunk attends to a *slice* of it, its own rows included: one kernel call, nothing copied together, nothing
saved by autograd but the chunk's own queries. Rows are not tied to a graph; their gradients are summed in
promote(fp32, dtype) by the backward passes of later chunks, and the chunk that made the rows takes them along.

Cost: rows x layers x KV heads x (head dim of keys + of values) x (bytes of a value + of a summed gradient), `store_bytes`.
Gradients are there from the first backward pass on.

    >>> store = KvStore(rows=5)
    >>> k = torch.ones(3, 2, 8)
    >>> keys, values = store.write(0, 2, k, k)                  # layer 0, rows 2, 3, 4: rows 0 … 4 so far
    >>> keys.shape, store.nbytes == 5 * 2 * (8 + 8) * 4
    (torch.Size([5, 2, 8]), True)
"""

# S rows of the store, T rows of a chunk, K key heads, D head dim.
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels.contract import sum_dtype
from .transport import Pair


class KvStore:
    """Keys, values and their gradients of the `rows` tokens that this rank holds of a document; by layer number."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._kept: dict[int, Pair] = {}
        self._grads: dict[int, Pair] = {}

    def write(self, layer: int, first: int, k_TKD: Tensor, v_TKD: Tensor) -> Pair:
        """Put a chunk's keys and values at rows `first` …; → those of all rows up to its last, [S, K, D] each, views.

        Written again by a recomputation, with the same values.
        """
        if layer not in self._kept:
            k, v = (x.new_empty((self.rows, *x.shape[1:])) for x in (k_TKD, v_TKD))
            self._kept[layer] = (k, v)
        stop = first + len(k_TKD)
        for buffer, part in zip(self._kept[layer], (k_TKD, v_TKD), strict=True):
            buffer[first:stop] = part.detach()
        return self.read(layer, stop)

    def read(self, layer: int, stop: int) -> Pair:
        """Keys and values of rows 0 … stop - 1, views."""
        k, v = self._kept[layer]
        return k[:stop], v[:stop]

    def add(self, layer: int, first: int, dk_SKD: Tensor, dv_SKD: Tensor) -> Pair:
        """Add what one chunk, at rows `first` …, owes to all rows up to its last; → all that its own rows were owed.

        Chunks come in descending order, so nothing is added to rows that were handed out.
        """
        if layer not in self._grads:
            dtype = sum_dtype(dk_SKD.dtype)
            k, v = self._kept[layer]
            self._grads[layer] = (k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype))
        stop = len(dk_SKD)
        for total, part in zip(self._grads[layer], (dk_SKD, dv_SKD), strict=True):
            total[:stop] += part
        dk, dv = self._grads[layer]
        return dk[first:stop], dv[first:stop]

    def clear(self) -> None:
        """Drop everything: the document is done."""
        self._kept.clear()
        self._grads.clear()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(x.nbytes for held in (self._kept, self._grads) for pair in held.values() for x in pair)


def store_bytes(config: Any, rows: int, dtype: torch.dtype) -> int:
    """Bytes of a full store of `rows` tokens, gradients included. config: of a HF model; dtype: of its keys and values.

    >>> from types import SimpleNamespace
    >>> shape = SimpleNamespace(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
    >>> store_bytes(shape, 131072, torch.bfloat16) / 2**30      # 128K tokens of an 8B: 16 GiB and their gradients
    48.0
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * rows * text.num_hidden_layers * heads * dim * (dtype.itemsize + sum_dtype(dtype).itemsize)
