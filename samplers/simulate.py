"""The simulator: how long one optimizer step takes on a cluster, from plain arrays of what each rank does in each slot.

Scores any plan before it runs. A micro-batch takes a rank its attention and its matrix products, forward and backward,
and what of its context-parallel traffic is not hidden (`network.py`). Ranks of a group run a micro-batch together; with
sync="slot" all ranks do (FSDP, ZeRO-3, EP meet in every layer), with sync="step" groups meet only at the end; stages of
a pipeline wait for each other as its schedule says (`pipeline.py`). Then gradients are summed. Accelerators of one make
differ (7 % between the fastest and the slowest of 256, Libra): `straggle` slows each down by a share drawn from a seed.

Planning compares integers; these are float seconds, for reports and for choosing between candidates. 64K documents on
4,096 ranks take 5 to 50 ms.

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

from ..packing.accounts import kv_bytes_per_token
from ..packing.chunkflow import BACKWARD
from ..packing.chunkflow_places import Placement
from ..packing.cost import ATTENTION_BACKWARD, LINEAR_BACKWARD, Float64, ModelShape
from .cluster import SYNC
from .network import ClusterShape, Network, exposed, exposed_ring
from .pipeline import Schedule, Times, interleaved, run, state_aware
from .plan import StepPlan

__all__ = ["ClusterShape", "Network", "StepTime", "exposed", "chunkflow_seconds", "pack_seconds", "simulate"]

# Bytes that backward moves for one that forward moves: KV come again and dK, dV go; an all-to-all is its own transpose.
BACKWARD_TRAFFIC = {"ring": 2.0, "gather": 2.0, "all_to_all": 1.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTime:
    """What a simulated step takes. Arrays are float64[ranks], the mean of a rank's pipeline stages."""

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


def simulate(
    shape: ClusterShape,
    *,
    attention: npt.ArrayLike,
    linear: npt.ArrayLike = 0.0,
    received: npt.ArrayLike = 0.0,
    traffic: str = "ring",
    first_rank: npt.ArrayLike | None = None,
    cp_size: npt.ArrayLike | None = None,
    sync: str = "step",
    schedules: Schedule | Sequence[Schedule] | None = None,
    boundary_bytes: npt.ArrayLike = 0.0,
    gradient_bytes: float = 0.0,
    overlap_gradients: bool = True,
    straggle: float = 0.0,
    seed: int = 0,
) -> StepTime:
    """Simulate one optimizer step.

    attention, linear: float[ranks, slots], forward seconds of the whole model on a rank of the dp x cp plane (of its tp
    accelerators together); backward takes 2.5 and 2 times as long. received: bytes of KV that a rank receives forward
    (sends, for an all-to-all), all layers; traffic: "ring", "gather" or "all_to_all". Both may have a last axis more,
    stages of an attention plan: what a stage receives is in flight while the one before is computed. first_rank, cp_size: int[ranks,
    slots], the group that each rank shares a micro-batch with; None: its replica. schedules: of the pipeline, or one for
    each replica (ChunkFlow under sync="step"); None: interleaved 1F1B. boundary_bytes: activations that go from stage to
    stage. gradient_bytes: of one accelerator. All but `attention` broadcast to its shape.
    """
    stages = np.asarray(attention, dtype=np.float64)
    if stages.ndim not in (2, 3) or len(stages) != shape.num_ranks or stages.size == 0 or sync not in SYNC:
        raise ValueError(
            f"simulate takes seconds of ({shape.num_ranks} ranks, slots) and sync 'step' or 'slot'; got {stages.shape} "
            f"and {sync!r}."
        )
    work = stages.sum(2) if stages.ndim == 3 else stages
    if traffic not in BACKWARD_TRAFFIC:
        raise ValueError(f"traffic must be one of {', '.join(BACKWARD_TRAFFIC)}; got {traffic!r}.")
    rank = np.arange(shape.num_ranks)[:, None]
    first = np.broadcast_to(rank // shape.cp * shape.cp if first_rank is None else np.asarray(first_rank), work.shape)
    size = np.broadcast_to(shape.cp if cp_size is None else np.asarray(cp_size), work.shape)
    moving, products = np.asarray(received, dtype=np.float64), np.asarray(linear, dtype=np.float64)
    forward_waits = _exposed(shape, traffic, stages, moving, first, size)
    backward_waits = _exposed(
        shape, traffic, ATTENTION_BACKWARD * stages, BACKWARD_TRAFFIC[traffic] * moving, first, size
    )
    forward, backward = work + products, ATTENTION_BACKWARD * work + LINEAR_BACKWARD * products
    if schedules is None:
        schedules = interleaved(work.shape[1], shape.pp, shape.vpp)
    pace = _pace(shape, straggle, seed)
    times = _run_replicas(
        schedules,
        shape,
        np.zeros_like(first) if sync == "slot" else first,
        forward=(forward + forward_waits) / shape.pp,
        backward=(backward + backward_waits) / shape.pp,
        transfer=np.broadcast_to(shape.transfer_seconds(boundary_bytes), work.shape),
        pace=pace,
    )
    often, last = _forwards(schedules, shape.cp), _last_slot(schedules, shape.cp)
    waits = (often * forward_waits + backward_waits).sum(1) / shape.pp * pace.mean(1)
    gradient = shape.gradient_seconds(gradient_bytes)
    if overlap_gradients:
        gradient = max(0.0, gradient - float(backward[rank[:, 0], last].min()) / (shape.pp * shape.vpp))
    return StepTime(seconds=times.seconds + gradient, busy=times.busy.mean(1) - waits, exposed=waits, gradient=gradient)


def pack_seconds(
    shape: ClusterShape,
    model: ModelShape,
    *,
    tokens: npt.ArrayLike,
    pairs: npt.ArrayLike,
    offsets: npt.ArrayLike,
    cp_size: npt.ArrayLike,
) -> tuple[Float64, Float64]:
    """(attention, linear): forward seconds of each of p packs on each of its ranks, float64[p].

    tokens, pairs: int[m] of the packs' spans, in CSR form by offsets int[p + 1]; cp_size: int[p]. Every span is shared
    evenly by the ranks of its pack, as per-document sharding does: short documents on many ranks run slowly.
    """
    tokens, pairs = np.asarray(tokens, dtype=np.int64), np.asarray(pairs, dtype=np.int64)
    edges, ranks = np.asarray(offsets, dtype=np.int64), np.asarray(cp_size, dtype=np.int64)
    pack = np.repeat(np.arange(len(ranks)), np.diff(edges))
    rows = -(-tokens // ranks[pack])
    calls = shape.attention_seconds(model, pairs / ranks[pack], rows, tokens)
    attention = np.bincount(pack, weights=calls, minlength=len(ranks)).astype(np.float64)
    held = np.bincount(pack, weights=tokens, minlength=len(ranks))
    return attention, shape.linear_seconds(model, held / ranks)


def simulate_plan(
    plan: StepPlan,
    model: ModelShape,
    shape: ClusterShape | None = None,
    *,
    traffic: str = "ring",
    gradient_bytes: float = 0.0,
    straggle: float = 0.0,
    seed: int = 0,
) -> StepTime:
    """Simulate a step as it was planned, on `shape` (default: as many H100s as the plan has ranks).

    Pools that share attention run it together, as slowly as the rank with most of it; what migrates counts as hidden.
    """
    cluster, grid = plan.cluster, plan.grid
    shape = shape or ClusterShape(dp=cluster.dp, cp=cluster.cp)
    if (shape.dp, shape.cp) != (cluster.dp, cluster.cp):
        raise ValueError(
            f"The plan is for dp={cluster.dp} x cp={cluster.cp}; the cluster to simulate has dp={shape.dp} x cp={shape.cp}."
        )
    attention, linear = pack_seconds(
        shape,
        model,
        tokens=plan.packs.spans.tokens,
        pairs=plan.packs.spans.pairs,
        offsets=plan.packs.offsets,
        cp_size=plan.cp_size,
    )
    each_rank, first, size = attention[grid], plan.first_rank[grid], plan.cp_size[grid]
    if plan.shared is not None:
        each_rank = plan.pooled(attention * plan.cp_size)
        size = size * plan.shared.replicas
        first = first // size * size
    schedules: Schedule | list[Schedule] | None = None
    if plan.rounds is not None:
        ranks = range(0, shape.num_ranks, shape.cp)
        each = [
            state_aware(plan.operations(rank), shape.pp) for rank in (ranks if cluster.sync == "step" else ranks[:1])
        ]
        schedules = each if cluster.sync == "step" else each[0]
    return simulate(
        shape,
        attention=each_rank,
        linear=linear[grid],
        received=_traffic_bytes(plan, model, traffic)[grid],
        traffic=traffic,
        first_rank=first,
        cp_size=size,
        sync=cluster.sync,
        schedules=schedules,
        gradient_bytes=gradient_bytes,
        straggle=straggle,
        seed=seed,
    )


def _traffic_bytes(plan: StepPlan, model: ModelShape, traffic: str) -> Float64:
    """What each rank of a pack receives forward (for an all-to-all: sends), all layers, 2-byte floats; float64[p]."""
    held, others = plan.packs.tokens / plan.cp_size, plan.cp_size - 1
    if traffic == "all_to_all":
        heads = 2 * (model.num_heads + model.num_kv_heads)  # q, k, v out and the result back
        return held * others / plan.cp_size * (2 * heads * model.head_dim * model.num_layers)
    return held * others * kv_bytes_per_token(model)


def chunkflow_seconds(
    placement: Placement, forward: npt.ArrayLike, backward: npt.ArrayLike, keep: int, *, pp: int, sync: str = "slot"
) -> float:
    """Seconds of ChunkFlow's state-aware 1F1B on `pp` stages; forward, backward: int[c] nanoseconds of each chunk.

    What `packing.chunkflow_tuning.tune` takes as step_seconds, once pp and sync are bound.
    """
    forward, backward = placement.grid(forward) / (1e9 * pp), placement.grid(backward) / (1e9 * pp)
    if sync == "slot":
        plan = state_aware(placement.operations(0, keep), pp)
        return run(plan, forward=forward, backward=backward, group=np.zeros_like(forward)).seconds
    return max(
        run(state_aware(placement.operations(r, keep), pp), forward=forward[r], backward=backward[r]).seconds
        for r in range(len(forward))
    )


def _exposed(
    shape: ClusterShape, traffic: str, compute: Float64, moving: Float64, first: np.ndarray, size: np.ndarray
) -> Float64:
    """What traffic adds to the compute, float64[ranks, slots]; compute may have an axis of stages."""
    if compute.ndim == 3:
        transfer = shape.ring_seconds(np.broadcast_to(moving, compute.shape), first[..., None], size[..., None])
        return exposed(compute, transfer)
    if traffic == "all_to_all":
        return shape.all_to_all_seconds(moving, first, size)
    transfer = shape.ring_seconds(moving, first, size)
    return exposed_ring(compute, transfer, size) if traffic == "ring" else transfer


def _pace(shape: ClusterShape, straggle: float, seed: int) -> Float64:
    """float64[ranks, pp]: how much longer the slowest accelerator of each stage takes, 1 … 1 + straggle."""
    drawn = np.random.default_rng(seed).random((shape.num_ranks, shape.pp, shape.tp))
    return 1 + straggle * drawn.max(2)


def _forwards(schedules: Schedule | Sequence[Schedule], cp: int) -> np.ndarray:
    """int64[ranks or 1, slots]: how often each micro-batch is run forward."""
    if not isinstance(schedules, Schedule):
        return np.repeat(np.concatenate([_forwards(schedule, 1) for schedule in schedules]), cp, axis=0)
    kind, slot, _ = schedules.stage(0).T
    return np.bincount(slot[kind != BACKWARD], minlength=schedules.num_slots)[None] // schedules.vpp


def _last_slot(schedules: Schedule | Sequence[Schedule], cp: int) -> np.ndarray:
    """int64[ranks or 1]: the micro-batch behind whose backward gradients can hide."""
    if isinstance(schedules, Schedule):
        return schedules.operations[-1:, 1]
    return np.repeat([schedule.operations[-1, 1] for schedule in schedules], cp)


def _run_replicas(
    schedules: Schedule | Sequence[Schedule], shape: ClusterShape, group: np.ndarray, **seconds: np.ndarray
) -> Times:
    if isinstance(schedules, Schedule):
        return run(schedules, group=group, **seconds)
    if len(schedules) != shape.dp or np.any(group // shape.cp != np.arange(shape.num_ranks)[:, None] // shape.cp):
        raise ValueError(
            f"A schedule for each of the {shape.dp} replicas needs sync='step' and groups inside replicas; got "
            f"{len(schedules)}."
        )
    parts = []
    for replica, schedule in enumerate(schedules):
        ranks = slice(replica * shape.cp, (replica + 1) * shape.cp)
        parts.append(run(schedule, group=group[ranks], **{name: values[ranks] for name, values in seconds.items()}))
    return Times(end=np.concatenate([part.end for part in parts]), busy=np.concatenate([part.busy for part in parts]))
