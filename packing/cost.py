"""Cost: what a pack costs in seconds and bytes, and how the planners compare it.

Attention costs in proportion to (query, key) *pairs*, everything else to *tokens*; two coefficients therefore say what
a micro-batch costs (WLB-LLM's Wa and Wl, Skrull's F(s)). They follow from the model's shape and the hardware's speed,
are measured, or are replaced by any vectorised callable `(pairs, tokens) -> seconds`. Planners never compare floats:
`units` rounds once to int64 nanoseconds, so that CPUs of different make agree bit for bit.

Per layer and forward, with hidden size h, a heads of dim d, g key-value heads and an FFN of size f:

    linear     2·h·(2·a·d + 2·g·d + m·f) FLOPs per token, m = 3 matrices if gated, else 2
    attention  4·a·d                     FLOPs per pair

which is Skrull's (20h² + 4h·h_kv)·s + 4h·s² for an ungated FFN of 4h and s² pairs. Backward is 2 x the linear part and
2.5 x attention (which recomputes the scores).

    >>> shape = ModelShape(hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128,
    ...                    ffn_size=14336, vocab_size=128256)
    >>> cost = CostModel.of(shape, Hardware(peak_flops=989e12, efficiency=0.4, memory_bytes=80e9))
    >>> one, ten = causal_pairs(0, 40960), 10 * causal_pairs(0, 4096)
    >>> round(float(cost.seconds(one, 40960) / cost.seconds(ten, 40960)), 2)
    1.69
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .packs import Int64

Float64 = npt.NDArray[np.float64]
SecondsOf = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.ArrayLike]

LINEAR_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5


def causal_pairs(start: npt.ArrayLike, stop: npt.ArrayLike) -> Int64:
    """Pairs of the span [start, stop) of a document, whose tokens attend to the whole prefix and to themselves.

    start, stop: int[...] of one shape; returns int64[...]. Exact for documents of up to 2**31 tokens.
    """
    a, b = np.asarray(start, dtype=np.int64), np.asarray(stop, dtype=np.int64)
    return (b * (b + 1) - a * (a + 1)) // 2


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a dense decoder that decide what it costs."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    """Columns of the output head; 0 leaves the head out."""
    gated: bool = True
    """Three FFN matrices (SwiGLU) rather than two (GELU)."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "ffn_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelShape.{name} must be at least 1; got {getattr(self, name)}.")
        if self.vocab_size < 0:
            raise ValueError(f"ModelShape.vocab_size must be 0 (no head) or more; got {self.vocab_size}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads; got {self.num_heads} and {self.num_kv_heads}."
            )

    @staticmethod
    def from_hf(config: object, *, gated: bool = True) -> ModelShape:
        """The shape of a HF config (object or dict) of the Llama family: Llama, Qwen2/3, Mistral, Gemma …

        head_dim and num_key_value_heads default as they do in HF; `gated` is no part of a config. Configs with other
        names (GPT-2's n_embd) or with experts are refused: state a ModelShape by hand, for experts with ffn_size =
        active experts x their size.
        """

        def get(name: str) -> Any:
            return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

        if get("num_experts") or get("num_local_experts") or get("n_routed_experts"):
            raise ValueError(
                "A config with experts does not say how many FLOPs a token takes; state ModelShape(…, ffn_size="
                "active experts x their intermediate size) by hand."
            )
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        missing = [name for name in names if get(name) is None]
        if missing:
            raise ValueError(
                f"The config lacks {', '.join(missing)}; from_hf reads configs of the Llama family only. "
                "State a ModelShape by hand."
            )
        heads = get("num_attention_heads")
        return ModelShape(
            hidden_size=get("hidden_size"),
            num_layers=get("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=get("num_key_value_heads") or heads,
            head_dim=get("head_dim") or get("hidden_size") // heads,
            ffn_size=get("intermediate_size"),
            vocab_size=get("vocab_size"),
            gated=gated,
        )

    @property
    def flops_per_pair(self) -> int:
        """Forward FLOPs of one (query, key) pair, all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def flops_per_token(self) -> int:
        """Forward FLOPs of one token outside attention, all layers and the output head."""
        projections = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        ffn = (3 if self.gated else 2) * self.ffn_size
        return 2 * self.hidden_size * (self.num_layers * (projections + ffn) + self.vocab_size)

    def flops(self, pairs: npt.ArrayLike, tokens: npt.ArrayLike) -> Float64:
        """Forward FLOPs of micro-batches with `pairs` and `tokens` (int[...]), float64[...]."""
        return _floats(pairs) * self.flops_per_pair + _floats(tokens) * self.flops_per_token

    def backward_flops(self, pairs: npt.ArrayLike, tokens: npt.ArrayLike) -> Float64:
        """Backward FLOPs: 2.5 x forward for attention, 2 x for the rest; without recomputing activations."""
        attention = _floats(pairs) * (ATTENTION_BACKWARD * self.flops_per_pair)
        return attention + _floats(tokens) * (LINEAR_BACKWARD * self.flops_per_token)

    @property
    def activation_bytes_per_token(self) -> int:
        """Activations kept for backward in 2-byte floats, without recomputation; 32h + logits for a GPT-shaped layer.

        Per layer: two norm inputs and outputs, q, k, v, the attention output, and the FFN's inner tensors (34h of
        Megatron's activation paper, less its dropout masks). The head keeps logits in 2 and in 4 bytes.
        """
        inner = (3 if self.gated else 2) * self.ffn_size
        layer = 4 * self.hidden_size + 2 * (self.num_heads + self.num_kv_heads) * self.head_dim + inner
        return 2 * self.num_layers * layer + 6 * self.vocab_size


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator. The defaults are an H100 SXM in bf16."""

    peak_flops: float = 989e12
    efficiency: float = 0.4
    """Share of the peak that training reaches."""
    memory_bytes: float = 80e9
    link: float = 50e9
    """Bytes per second to the next rank of a CP group: InfiniBand; 450e9 where a group stays within its NVLink node."""

    def __post_init__(self) -> None:
        if not (self.peak_flops > 0 and 0 < self.efficiency <= 1 and self.memory_bytes >= 0 and self.link > 0):
            raise ValueError(
                "Hardware has peak_flops > 0, 0 < efficiency <= 1, memory_bytes >= 0 and link > 0; "
                f"got {self.peak_flops}, {self.efficiency}, {self.memory_bytes}, {self.link}."
            )


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds and bytes of a micro-batch on one rank, forward and backward."""

    seconds_per_pair: float
    seconds_per_token: float
    seconds_per_row: float = 0.0
    """To send keys and values of one token on, all layers, forward and backward; 0: communication is left out."""
    bytes_per_token: float = 0.0
    bytes_fixed: float = 0.0
    """Weights, gradients, optimizer state: what is there whatever the micro-batch."""

    def __post_init__(self) -> None:
        for name in ("seconds_per_pair", "seconds_per_token", "seconds_per_row", "bytes_per_token", "bytes_fixed"):
            if not 0 <= getattr(self, name) < np.inf:
                raise ValueError(f"CostModel.{name} must be a finite number >= 0; got {getattr(self, name)}.")

    @staticmethod
    def of(shape: ModelShape, hardware: Hardware, *, bytes_fixed: float = 0.0) -> CostModel:
        """The cost of training `shape` on `hardware`, activations kept.

        bytes_fixed, weights and optimizer state, depends on how they are sharded: the caller knows.
        """
        speed = hardware.peak_flops * hardware.efficiency
        return CostModel(
            seconds_per_pair=(1 + ATTENTION_BACKWARD) * shape.flops_per_pair / speed,
            seconds_per_token=(1 + LINEAR_BACKWARD) * shape.flops_per_token / speed,
            # Forward sends keys and values (2-byte floats); backward sends them again, and their gradients home.
            seconds_per_row=3 * 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim / hardware.link,
            bytes_per_token=float(shape.activation_bytes_per_token),
            bytes_fixed=bytes_fixed,
        )

    def fitted(self, moments: npt.ArrayLike) -> CostModel:
        """The coefficients that explain measured seconds best (least squares of relative errors, none negative).

        moments: float64[5], sums of `moments_of` over micro-batches. Unchanged where they do not tell the two apart.

            >>> model = CostModel(seconds_per_pair=1.0, seconds_per_token=1.0)
            >>> told = moments_of(100, 10, 5.0) + moments_of(10, 10, 3.2)          # 0.02 a pair, 0.3 a token
            >>> fit = model.fitted(told)
            >>> round(fit.seconds_per_pair, 6), round(fit.seconds_per_token, 6)
            (0.02, 0.3)
        """
        pp, pt, tt, p, t = np.asarray(moments, dtype=np.float64).tolist()
        if pp * tt - pt * pt <= 1e-9 * pp * tt:
            return self
        per_pair, per_token = (p * tt - t * pt) / (pp * tt - pt * pt), (t * pp - p * pt) / (pp * tt - pt * pt)
        if per_pair < 0:
            per_pair, per_token = 0.0, t / tt
        elif per_token < 0:
            per_pair, per_token = p / pp, 0.0
        return replace(self, seconds_per_pair=per_pair, seconds_per_token=per_token)

    def seconds(self, pairs: npt.ArrayLike, tokens: npt.ArrayLike) -> Float64:
        """Seconds of micro-batches with `pairs` and `tokens` (int[...]), float64[...]."""
        return _floats(pairs) * self.seconds_per_pair + _floats(tokens) * self.seconds_per_token

    def units(self, pairs: npt.ArrayLike, tokens: npt.ArrayLike) -> Int64:
        """The same in int64 nanoseconds, rounded once: what planners compare."""
        return cost_units(self, pairs, tokens)

    def bytes(self, tokens: npt.ArrayLike) -> Float64:
        """Memory of micro-batches of `tokens` (int[...]), float64[...]."""
        return self.bytes_fixed + _floats(tokens) * self.bytes_per_token

    def max_tokens(self, memory_bytes: float) -> int:
        """The most tokens one rank can hold in `memory_bytes`."""
        if self.bytes_per_token <= 0:
            raise ValueError("max_tokens needs bytes_per_token > 0; give it to CostModel, or use CostModel.of.")
        if memory_bytes < self.bytes_fixed + self.bytes_per_token:
            raise ValueError(
                f"Not one token fits into {memory_bytes:.4g} bytes: {self.bytes_fixed:.4g} are taken by weights and a "
                f"token needs {self.bytes_per_token:.4g}. Shard the weights further or recompute activations."
            )
        return int((memory_bytes - self.bytes_fixed) // self.bytes_per_token)


SEVEN_B = ModelShape(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256
)
"""A dense 7B model: what is assumed where nothing is said."""


def moments_of(pairs: float, tokens: float, seconds: float) -> Float64:
    """float64[5] that a measured micro-batch (pairs and tokens of one rank) adds for `CostModel.fitted`."""
    if not seconds > 0:
        raise ValueError(f"A measured micro-batch takes more than 0 seconds; got {seconds}.")
    a, b = pairs / seconds, tokens / seconds
    return np.array([a * a, a * b, b * b, a, b])


def cost_units(model: CostModel | SecondsOf, pairs: npt.ArrayLike, tokens: npt.ArrayLike) -> Int64:
    """int64 nanoseconds of each micro-batch, rounded once, from a CostModel or a callable (pairs, tokens) -> seconds.

    pairs, tokens: int[...]. Refused: anything not finite or negative, and a total of 2**62 or more, which sums of costs
    could not hold (146 years: seconds were surely not meant).
    """
    pairs, tokens = np.asarray(pairs, dtype=np.int64), np.asarray(tokens, dtype=np.int64)
    seconds = np.asarray(model.seconds(pairs, tokens) if isinstance(model, CostModel) else model(pairs, tokens))
    if seconds.shape != np.broadcast_shapes(pairs.shape, tokens.shape):
        raise ValueError(
            f"A cost model returns one number for each of the {pairs.shape} micro-batches; got {seconds.shape}. "
            "It must be vectorised."
        )
    nanoseconds = np.rint(_floats(seconds) * 1e9)
    # Written so that a NaN is refused too.
    if not (np.all(nanoseconds >= 0) and nanoseconds.sum() < 2.0**62):
        raise ValueError(
            "Costs must be finite seconds >= 0 that sum to less than 2**62 nanoseconds; "
            f"got {np.min(seconds)} … {np.max(seconds)} seconds. State them in a larger unit."
        )
    return nanoseconds.astype(np.int64)


def _floats(values: npt.ArrayLike) -> Float64:
    return np.asarray(values, dtype=np.float64)
