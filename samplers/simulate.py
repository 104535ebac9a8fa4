"""The simulator: how long one optimizer step takes on a cluster, from plain arrays of what each rank does in each slot.

Scores any plan before it runs. A micro-batch takes a rank its attention and its matrix products, forward and backward,
and what of its context-parallel traffic is not hidden (`network.py`). Ranks of a group run a micro-batch together; with
sync="slot" all ranks do (FSDP, ZeRO-3, EP meet in every layer), with sync="step" groups meet only at the end; stages of
a pipeline wait for each other as its schedule says (`pipeline.py`). Then gradients are summed. Accelerators of one make
differ (7 % between the fastest and the slowest of 256, Libra): `straggle` slows each down by a share drawn from a seed.

Planning compares integers; these are float seconds, for reports and for choosing between candidates. 64K documents on
4,096 ranks take ~0.1 s.

    >>> shape = ClusterShape(dp=2, network=Network(within=1e9))
    >>> step = simulate(shape, attention=np.array([[2.0, 1.0], [1.0, 1.0]]), linear=1.0, gradient_bytes=1e9)
    >>> step.seconds                   # rank 0: 3·(1 + 1) + 3.5·(2 + 1) and a second for its gradients, 2 s hidden
    16.5
    >>> step.waiting.tolist()
    [0.0, 3.5]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..packing.chunkflow import Placement
from ..packing.cost import ATTENTION_BACKWARD, LINEAR_BACKWARD, Float64, ModelShape
from .network import ClusterShape, Network, exposed, exposed_ring
from .pipeline import Schedule, Times, interleaved, run, state_aware
from .plan import SYNC

__all__ = ["ClusterShape", "Network", "StepTime", "exposed", "pack_seconds", "simulate"]

TRAFFIC = ("ring", "gather", "all_to_all")


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTime:
    """What a simulated step takes. Arrays are float64[ranks], of the stage of a rank that is busiest."""

    seconds: float
    """Until the last rank has the summed gradients."""
    busy: Float64
    """Computing, recomputation included."""
    exposed: Float64
    """Waiting for context-parallel traffic that is not hidden."""
    gradient: float
    """Summing gradients, as far as it is not hidden behind the last backward pass."""

    @property
    def waiting(self) -> Float64:
        """Waiting for other ranks and stages, float64[ranks]."""
        return self.seconds - self.gradient - self.busy - self.exposed

    @property
    def imbalance(self) -> float:
        """The whole time over the time that the mean rank computes."""
        return self.seconds / float(self.busy.mean()) if self.busy.any() else 1.0

    def describe(self) -> str:
        """One line: where the time goes, as shares of it."""
        parts = {
            "computing": self.busy.mean(),
            "exposed communication": self.exposed.mean(),
            "waiting": self.waiting.mean(),
            "gradients": self.gradient,
        }
        shares = ", ".join(f"{name} {100 * part / max(self.seconds, 1e-300):.1f} %" for name, part in parts.items())
        return f"{self.seconds:.4g} s on {len(self.busy)} ranks: {shares}"

    __str__ = describe
