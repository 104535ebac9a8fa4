"""The cluster as the simulator sees it: how fast ranks compute, over which links they talk, what of it is hidden.

Ranks of the dp x cp plane are numbered replica by replica; each stands for tp neighbouring accelerators of a node (and
one such group per pipeline stage). A group of ranks that does not fit into a node talks across nodes:

- a ring, or a gather made of one, goes at the pace of its slowest link;
- an all-to-all sends the share of ranks outside the node across, the rest within, at the same time;
- gradients go by rings through all adapters of a node at once.

A ring hides the transfer of the next block behind the compute of this one, and so what it exposes is what transfers
take longer: nothing from FLOPS / bandwidth tokens a block. Gathers and all-to-alls come before the compute that needs
them and hide nothing.

    >>> seconds = exposed_ring(np.array([8.0, 8.0]), np.array([1.5, 3.0]), np.array([4, 4]))
    >>> seconds.tolist()               # blocks of 2 s; hops of 0.5 s hide, hops of 1 s hide too
    [0.0, 0.0]
    >>> exposed_ring(8.0, 9.0, 4).tolist()       # hops of 3 s behind blocks of 2 s, three of them
    3.0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..packing.cost import Float64, Hardware, ModelShape
from ..packing.efficiency import efficiency

H100_PEAK = 989e12
Speed = Callable[[npt.ArrayLike, npt.ArrayLike], Float64]


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links, in bytes per second that one accelerator sends (and, at the same time, receives)."""

    within: float = 450e9
    """Inside a node; the default is NVLink 4."""
    across: float = 50e9
    """Between nodes, one adapter for each accelerator; the default is 400 Gb/s."""
    per_node: int = 8
    """Accelerators of a node."""

    def __post_init__(self) -> None:
        if not (self.within > 0 and self.across > 0 and self.per_node >= 1):
            raise ValueError(
                f"Network has bandwidths > 0 and per_node >= 1; got {self.within}, {self.across} and {self.per_node}."
            )


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """How many of what, and how fast."""

    dp: int
    cp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Slices of the model on each pipeline stage."""
    hardware: Hardware = field(default_factory=Hardware)
    """Its `efficiency` is that of matrix products outside attention."""
    network: Network = field(default_factory=Network)
    attention_speed: Speed = efficiency
    """TFLOP/s by query rows and keys, of an H100; scaled by the hardware's peak."""

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "pp", "vpp"):
            if getattr(self, name) < 1:
                raise ValueError(f"ClusterShape.{name} must be at least 1; got {getattr(self, name)}.")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} cuts the stages of a pipeline; pp=1 has none. Use vpp=1.")

    @property
    def num_ranks(self) -> int:
        """Ranks of the dp x cp plane."""
        return self.dp * self.cp

    def inside_node(self, first: npt.ArrayLike, size: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether the `size` ranks from `first` (int[...]) are accelerators of one node."""
        begin = np.asarray(first, dtype=np.int64) * self.tp
        last = begin + np.asarray(size, dtype=np.int64) * self.tp - 1
        return begin // self.network.per_node == last // self.network.per_node

    def ring_seconds(self, received: npt.ArrayLike, first: npt.ArrayLike, size: npt.ArrayLike) -> Float64:
        """Seconds to receive `received` bytes (float[...]) from the neighbour in a ring of ranks."""
        link = np.where(self.inside_node(first, size), self.network.within, self.network.across)
        return np.asarray(received, dtype=np.float64) / link

    def all_to_all_seconds(self, sent: npt.ArrayLike, first: npt.ArrayLike, size: npt.ArrayLike) -> Float64:
        """Seconds to send `sent` bytes (float[...]), as many to each of the group's other ranks."""
        ranks = np.asarray(size, dtype=np.int64)
        near = np.minimum(ranks, max(self.network.per_node // self.tp, 1))
        near = np.where(self.inside_node(first, size), ranks, near)
        far_share = (ranks - near) / np.maximum(ranks - 1, 1)
        slower = np.maximum((1 - far_share) / self.network.within, far_share / self.network.across)
        return np.asarray(sent, dtype=np.float64) * slower

    def gradient_seconds(self, gradient_bytes: float) -> float:
        """Seconds to all-reduce a rank's gradients (or to gather and scatter them) over the dp x cp ranks."""
        moved = 2 * gradient_bytes * (self.num_ranks - 1) / self.num_ranks
        if self.inside_node(0, self.num_ranks):
            return moved / self.network.within
        adapters = min(self.num_ranks, max(self.network.per_node // self.tp, 1))
        return moved / min(self.network.within, self.network.across * adapters)

    def transfer_seconds(self, boundary: npt.ArrayLike) -> Float64:
        """Seconds to send `boundary` bytes (float[...]) to the next pipeline stage."""
        inside = self.num_ranks * self.tp * self.pp <= self.network.per_node
        return np.asarray(boundary, dtype=np.float64) / (self.network.within if inside else self.network.across)

    def attention_seconds(
        self, model: ModelShape, pairs: npt.ArrayLike, q_tokens: npt.ArrayLike, k_tokens: npt.ArrayLike
    ) -> Float64:
        """Forward seconds, all layers, of kernel calls of `q_tokens` rows over `k_tokens` keys; int[...] each."""
        flops = np.asarray(pairs, dtype=np.float64) * (model.flops_per_pair / self.tp)
        return flops / (self.attention_speed(q_tokens, k_tokens) * 1e12 * (self.hardware.peak_flops / H100_PEAK))

    def linear_seconds(self, model: ModelShape, tokens: npt.ArrayLike) -> Float64:
        """Forward seconds, all layers, of everything but attention on `tokens` (int[...]) of one rank."""
        speed = self.hardware.peak_flops * self.hardware.efficiency * self.tp
        return np.asarray(tokens, dtype=np.float64) * model.flops_per_token / speed


def exposed(compute: npt.ArrayLike, transfer: npt.ArrayLike) -> Float64:
    """Seconds a rank waits for transfers that are in flight while the stage before is computed; float64[...].

    compute, transfer: float[..., stages]; the transfer of stage i comes before its compute. The first hides nothing.
    """
    work, moving = np.asarray(compute, dtype=np.float64), np.asarray(transfer, dtype=np.float64)
    return moving[..., 0] + np.maximum(moving[..., 1:] - work[..., :-1], 0).sum(-1)


def exposed_ring(compute: npt.ArrayLike, transfer: npt.ArrayLike, size: npt.ArrayLike) -> Float64:
    """The same for a ring of `size` ranks (int[...]) whose size - 1 hops and size blocks are alike; float64[...]."""
    ranks = np.asarray(size, dtype=np.float64)
    hops = ranks - 1
    return np.maximum(np.asarray(transfer, dtype=np.float64) - np.asarray(compute, dtype=np.float64) * hops / ranks, 0)
