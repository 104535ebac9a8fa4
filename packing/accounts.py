"""Accounts: the bytes that parallelism saves and the bytes that it moves, as the papers' sums.

Decides nothing; planners and reports use it to say what a choice costs. Per layer, with s tokens of b sequences, hidden
size h, a heads, t tensor-parallel ranks (Megatron-LM's sequence parallelism, arXiv:2205.05198, Eq. 2 and 4):

    TP       s·b·h·(10 + 24/t + 5·a·s/(h·t))       bytes of activations
    TP + SP  s·b·h/t·(34 + 5·a·s/h)

**These are bytes** (34 = 2 bytes x elements, 1 byte for dropout masks), which is often read as elements and doubled. TP
moves 4 all-reduces a layer, TP + SP 4 all-gathers and 4 reduce-scatters: the same bytes.

Context parallelism over cp ranks moves KV, and what a rank receives grows towards the whole of it; all-to-all
(Ulysses) moves 4·N·h/P elements, which falls with P:

    >>> [int(ring_bytes(32768, cp, kv_width=1024)) >> 20 for cp in (2, 4, 8, 16)]
    [64, 96, 112, 120]
    >>> [int(ulysses_bytes(32768, p, width=1024)) >> 20 for p in (2, 4, 8, 16)]
    [128, 64, 32, 16]
    >>> int(ring_block(312e12, 300e9)), int(ring_block(312e12, 12.5e9))      # A100: NVLink, InfiniBand
    (1040, 24960)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cost import Float64, ModelShape

ALL_REDUCES = 4
"""Of one tensor-parallel layer, forward and backward; with sequence parallelism as many gathers and scatters."""


def activation_bytes(
    tokens: npt.ArrayLike, *, hidden: int, heads: int, tp: int = 1, sequence_parallel: bool = False, batch: int = 1
) -> Float64:
    """Activations of one layer on one rank, in bytes; float64[...], for sequences of `tokens` (int[...]).

    The last term is the scores, which a kernel of the flash kind does not keep: heads=0 leaves them out.
    """
    s = np.asarray(tokens, dtype=np.float64)
    scores = 5 * heads * s / hidden
    if sequence_parallel:
        return s * batch * hidden / tp * (34 + scores)
    return s * batch * hidden * (10 + 24 / tp + scores / tp)


def tp_bytes(
    tokens: npt.ArrayLike, *, hidden: int, tp: int, element: int = 2, sequence_parallel: bool = False
) -> Float64:
    """Bytes that one rank sends in one layer, forward and backward, all its collectives being rings; float64[...]."""
    gather = (tp - 1) / tp * element * hidden * np.asarray(tokens, dtype=np.float64)
    scatter = gather
    all_reduce = scatter + gather
    return ALL_REDUCES * gather + ALL_REDUCES * scatter if sequence_parallel else ALL_REDUCES * all_reduce


def ring_bytes(tokens: npt.ArrayLike, cp: npt.ArrayLike, *, kv_width: int, element: int = 2) -> Float64:
    """Bytes of KV that a rank receives for one layer's forward pass, ring or gather: (cp-1)·2·(N/cp)·h_kv·element.

    tokens (N, of the whole pack), cp: int[...]; kv_width: KV heads x head_dim. Backward receives KV again and sends as
    much in dK and dV. float64[...].
    """
    n, ranks = np.asarray(tokens, dtype=np.float64), np.asarray(cp, dtype=np.float64)
    return (ranks - 1) * 2 * (n / ranks) * kv_width * element


def ulysses_bytes(
    tokens: npt.ArrayLike, ranks: npt.ArrayLike, *, width: int, kv_width: int | None = None, element: int = 2
) -> Float64:
    """Bytes on each link for one layer's forward pass, q, k, v and out: 4·N·h/P elements; float64[...].

    width: heads x head_dim (h); kv_width: that of K and V where it is less. At fixed N the bytes fall with the group,
    and stay the same where N grows with it; what grows is their *time*, once the group leaves the node. The share of
    1/P that a rank sends itself is counted, as the paper does.
    """
    widths = 2 * width + 2 * (width if kv_width is None else kv_width)
    return np.asarray(tokens, dtype=np.float64) * widths / np.asarray(ranks, dtype=np.float64) * element


def ring_block(flops: float, bandwidth: float) -> float:
    """Tokens a ring's block needs at least for its transfer to hide behind its compute (4·d·c²/F >= 4·c·d/B).

    flops: per second, bandwidth: bytes per second in one direction. Six blocks must fit into memory: s = 6c.
    """
    return flops / bandwidth


def kv_bytes_per_token(shape: ModelShape, *, element: int = 2) -> int:
    """K and V of one token in all layers: what ChunkFlow's store keeps of a document, and once more for dK and dV."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on the rank of the pipeline stage that holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    store: float
    """KV of documents whose chunks are run one after the other, and its gradient."""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.store

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "activations", "store")
        return f"{self.total / 1e9:.1f} GB: " + ", ".join(f"{name} {getattr(self, name) / 1e9:.1f}" for name in parts)


def rank_memory(
    shape: ModelShape,
    *,
    tokens: int,
    tp: int = 1,
    pp: int = 1,
    shards: int = 1,
    zero: int = 1,
    sequence_parallel: bool = True,
    recompute: bool = False,
    held: int = 1,
    store_tokens: int = 0,
) -> RankMemory:
    """Memory of one rank that trains in bf16 with Adam, on the fullest stage.

    tokens: of one micro-batch on this rank (a pack's over cp). shards: the dp x cp ranks that share a replica's state;
    zero: what they share, 1 the optimizer's, 2 gradients too, 3 weights too, 0 nothing. recompute: keep the layers'
    inputs and one layer's inside. held: micro-batches whose activations the last stage keeps at once (ChunkFlow: K);
    a stage before it keeps one more (1F1B). store_tokens: of documents in ChunkFlow's store.
    """
    if not 0 <= zero <= 3:
        raise ValueError(f"zero must be 0 (nothing shared) … 3 (weights too); got {zero}.")
    stages = []
    for stage in {0, pp - 1}:
        layers = -(-shape.num_layers // pp)
        ends = (stage == 0) + (stage == pp - 1)
        parameters = (layers * layer_parameters(shape) + ends * shape.vocab_size * shape.hidden_size) / tp
        logits = 6 * shape.vocab_size / tp if stage == pp - 1 else 0.0
        inside = _layer_bytes_per_token(shape, tp, sequence_parallel)
        kept = layers * 2 * shape.hidden_size / (tp if sequence_parallel else 1) if recompute else layers * inside
        stages.append(
            RankMemory(
                weights=2 * parameters / (shards if zero >= 3 else 1),
                gradients=2 * parameters / (shards if zero >= 2 else 1),
                optimizer=12 * parameters / (shards if zero >= 1 else 1),
                activations=tokens * (kept * (held + pp - 1 - stage) + logits + (inside if recompute else 0.0)),
                store=2 * store_tokens * kv_bytes_per_token(shape) * layers / shape.num_layers / tp,
            )
        )
    return max(stages, key=lambda memory: memory.total)


def layer_parameters(shape: ModelShape) -> int:
    """Weights of one layer: the projections and the FFN."""
    projections = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    return shape.hidden_size * (projections + (3 if shape.gated else 2) * shape.ffn_size)


def _layer_bytes_per_token(shape: ModelShape, tp: int, sequence_parallel: bool) -> float:
    """Activations of one layer; norms' inputs and outputs, 8h bytes, are on every rank unless tokens are split too."""
    layer = (shape.activation_bytes_per_token - 6 * shape.vocab_size) / shape.num_layers
    replicated = 0 if sequence_parallel else 8 * shape.hidden_size
    return replicated + (layer - replicated) / tp
