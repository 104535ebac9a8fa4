"""Pipeline schedules, and how long they take: an event simulation of stages that wait for each other.

Decides in which order a stage runs the forward and backward passes of a step's micro-batches:

- `one_f_one_b`: warm up, then one forward, one backward; stage s holds at most pp - s micro-batches.
- `interleaved`: every stage holds vpp slices of the model (Megatron-LM's virtual stages), micro-batches go round in
  groups of pp; the bubble is vpp times shorter. Of m micro-batches of equal slices W it takes W·(m·vpp + pp - 1), the
  quota that dynamic CP equalises.
- `state_aware` (ChunkFlow): any list of forward, recompute and backward operations of one device, such as
  `packing.chunkflow.schedule` makes; stage s runs its forwards pp - 1 - s ahead of the list. 1F1B is what becomes of
  F0 B0 F1 B1 … Stages keep their inputs, so a chunk is recomputed where it is needed, waiting for nobody.

`run` takes plain seconds per micro-batch and rank and returns when every stage of every rank is done. All ranks run the
same operations in the same order; ranks that share a micro-batch (a CP group), or all of them, run each operation
together. It costs ~10 ns per operation and rank.

    >>> import numpy as np
    >>> units = np.array([4.0, 2.0, 1.0, 1.0])
    >>> end = run(one_f_one_b(4, pp=4), forward=units, backward=2 * units).end
    >>> float(end.max()), round(float(100 * (1 - 3 * units.sum() / end.max())), 2)  # makespan, bubble in percent
    (56.0, 57.14)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from ..packing.chunkflow import BACKWARD, FORWARD, RECOMPUTE
from ..packing.cost import Float64
from ..packing.packs import Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """What each stage runs, in order."""

    operations: Int64
    """int64[k, 3]: (FORWARD | RECOMPUTE | BACKWARD, micro-batch, slice of the stage), stage after stage."""
    offsets: Int64
    """int64[pp + 1]: stage s runs operations[offsets[s]:offsets[s + 1]]."""
    num_slots: int
    vpp: int = 1

    @property
    def pp(self) -> int:
        return len(self.offsets) - 1

    def held(self) -> Int64:
        """int64[pp]: slices of micro-batches whose activations a stage holds at most.

        One that is recomputed holds nothing from its forward to its recomputation.
        """
        most = np.zeros(self.pp, np.int64)
        for stage in range(self.pp):
            kind, slot, part = self.stage(stage).T
            number = slot * self.vpp + part
            again = np.isin(number, number[kind == RECOMPUTE])
            most[stage] = np.cumsum(np.where(kind == BACKWARD, -1, (kind == RECOMPUTE) | ~again)).max(initial=0)
        return most

    def stage(self, stage: int) -> Int64:
        """Operations of one stage, int64[k, 3]."""
        return self.operations[self.offsets[stage] : self.offsets[stage + 1]]


def one_f_one_b(num_slots: int, pp: int) -> Schedule:
    """1F1B of `num_slots` micro-batches on `pp` stages."""
    slots = np.repeat(np.arange(num_slots), 2)
    return state_aware(np.stack([np.tile([FORWARD, BACKWARD], num_slots), slots], axis=1), pp)


def state_aware(operations: npt.ArrayLike, pp: int) -> Schedule:
    """The operations of one device, int[k, 2] of (operation, micro-batch), spread over `pp` stages.

    Forwards come in order of micro-batches, 0, 1 …; a backward of the list comes after its forward. Stage s runs
    forwards as soon as the list, read pp - 1 - s forwards ahead, has them, and the rest in the order of the list.
    """
    listed = np.asarray(operations, dtype=np.int64).reshape(-1, 2)
    forwards = listed[:, 0] == FORWARD
    num_slots = int(forwards.sum())
    if pp < 1 or num_slots == 0 or np.any(listed[forwards, 1] != np.arange(num_slots)):
        raise ValueError(
            f"state_aware needs pp >= 1 and forwards of micro-batches 0, 1 … in order; got pp={pp} and "
            f"{listed[forwards, 1].tolist()}."
        )
    stages = []
    for stage in range(pp):
        # A forward is keyed by its own number, any other operation by the forwards that this stage runs before it.
        ahead = np.minimum(np.cumsum(forwards) + pp - 1 - stage, num_slots)
        key = np.where(forwards, listed[:, 1], ahead)
        stages.append(listed[np.lexsort((forwards, key))])
    joined = np.concatenate(stages)
    return Schedule(
        operations=np.column_stack([joined, np.zeros(len(joined), np.int64)]),
        offsets=np.arange(pp + 1) * np.int64(len(listed)),
        num_slots=num_slots,
    )


def interleaved(num_slots: int, pp: int, vpp: int) -> Schedule:
    """Megatron-LM's interleaved 1F1B: `vpp` slices a stage, micro-batches in groups of `pp`.

    num_slots: a multiple of pp, as there; else the schedule would wait for forwards that stand behind its backwards.
    """
    if vpp < 1 or num_slots < 1 or (vpp > 1 and num_slots % pp):
        raise ValueError(
            f"The interleaved schedule runs micro-batches in groups of pp={pp}; got {num_slots} on vpp={vpp}. "
            "Fill up or split micro-batches, or use vpp=1."
        )
    if vpp == 1:
        return one_f_one_b(num_slots, pp)
    total = num_slots * vpp
    number = np.arange(total)
    slot = number // (pp * vpp) * pp + number % pp
    part = number // pp % vpp
    stages = []
    for stage in range(pp):
        warm_up = min(total, 2 * (pp - stage - 1) + (vpp - 1) * pp)
        forward = np.column_stack([np.full(total, FORWARD), slot, part])
        backward = np.column_stack([np.full(total, BACKWARD), slot, vpp - 1 - part])
        # Forward i is followed by backward i - warm_up.
        key = np.concatenate([2 * number, 2 * (number + warm_up) + 1])
        stages.append(np.concatenate([forward, backward])[np.argsort(key, kind="stable")])
    return Schedule(
        operations=np.concatenate(stages).astype(np.int64),
        offsets=np.arange(pp + 1) * np.int64(2 * total),
        num_slots=num_slots,
        vpp=vpp,
    )


def quotas(work: float, num_slots: npt.ArrayLike, *, pp: int, vpp: int = 1) -> Float64:
    """Work of one slice of each micro-batch, W_i, so that W_i·(m_i·vpp + pp - 1) is the same for all replicas.

    num_slots: int[dp], m_i, how many micro-batches each replica runs; the m_i·W_i sum to `work`. float64[dp].

    >>> quotas(10.0, [4, 8], pp=3).round(3).tolist()
    [1.136, 0.682]
    """
    slots = np.asarray(num_slots, dtype=np.float64)
    lengths = slots * vpp + pp - 1
    return work / (slots / lengths).sum() / lengths


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """When a schedule is done."""

    end: Float64
    """float64[ranks, pp]: seconds until a stage of a rank is through."""
    busy: Float64
    """float64[ranks, pp]: seconds of its own work, recomputation included."""

    @property
    def seconds(self) -> float:
        """Until the last of them is through."""
        return float(self.end.max())

    @property
    def bubble(self) -> float:
        """Share of the time that stages wait."""
        return 1 - float(self.busy.sum()) / (self.seconds * self.busy.size) if self.seconds else 0.0


def run(
    schedule: Schedule,
    *,
    forward: npt.ArrayLike,
    backward: npt.ArrayLike,
    transfer: npt.ArrayLike = 0.0,
    pace: npt.ArrayLike = 1.0,
    group: npt.ArrayLike | None = None,
) -> Times:
    """Simulate a schedule.

    forward, backward: float[ranks, slots] seconds of each micro-batch on one stage (float[slots]: one rank);
    transfer: seconds to send its activations, or their gradient, to the next stage, broadcast to the same; pace:
    float[ranks, pp], how much longer a stage of a rank takes. group: int[ranks, slots]; neighbouring ranks of one number
    in a slot run its operations together, start to end. None: every rank for itself.
    """
    forward, backward = np.atleast_2d(forward), np.atleast_2d(backward)
    ranks, slots = forward.shape
    if forward.shape != backward.shape or slots != schedule.num_slots:
        raise ValueError(
            f"The schedule has {schedule.num_slots} micro-batches; got forward {forward.shape} and backward "
            f"{backward.shape} seconds of (ranks, slots)."
        )
    together = np.arange(ranks)[:, None] if group is None else np.asarray(group)
    end, busy = np.zeros((schedule.pp, ranks)), np.zeros((schedule.pp, ranks))
    finished = _run(
        schedule.operations,
        schedule.offsets,
        np.int64(schedule.vpp),
        _by_slot(forward / schedule.vpp, ranks, slots, np.float64),
        _by_slot(backward / schedule.vpp, ranks, slots, np.float64),
        _by_slot(transfer, ranks, slots, np.float64),
        _by_slot(pace, ranks, schedule.pp, np.float64),
        _by_slot(together, ranks, slots, np.int64),
        end,
        busy,
    )
    if not finished:
        raise ValueError("The schedule waits for itself: an operation stands before one that it needs.")
    return Times(end=end.T, busy=busy.T)


def _by_slot(values: npt.ArrayLike, ranks: int, columns: int, dtype: npt.DTypeLike) -> np.ndarray:
    """[columns, ranks], contiguous, from what broadcasts to [ranks, columns]."""
    return np.ascontiguousarray(np.broadcast_to(np.asarray(values, dtype=dtype), (ranks, columns)).T)


@njit(nogil=True, cache=True)
def _run(operations, offsets, vpp, forward, backward, transfer, pace, group, end, busy):
    """Fill end and busy, [pp, ranks]; False if the stages wait for each other for ever.

    Which operations are possible next is the same for all ranks, so one pointer per stage serves them all.
    """
    pp, ranks = end.shape
    slots, slices = len(forward), pp * vpp
    # A backward's end takes the place of its forward's: who waited for that has been served.
    passes = np.zeros((slices, slots), np.int64)
    arrival = np.empty((slices, slots, ranks), np.float64)
    nothing = np.zeros(ranks, np.float64)
    at = offsets[:-1].copy()
    left = len(operations)
    while left:
        before = left
        for stage in range(pp):
            while at[stage] < offsets[stage + 1]:
                kind, slot, part = operations[at[stage]]
                this = part * pp + stage
                ready = nothing
                if kind == FORWARD and this > 0:
                    if passes[this - 1, slot] < 1:
                        break
                    ready = arrival[this - 1, slot]
                if kind != FORWARD and passes[this, slot] < 1:
                    break
                if kind == BACKWARD and this < slices - 1:
                    if passes[this + 1, slot] < 2:
                        break
                    ready = arrival[this + 1, slot]
                work = backward[slot] if kind == BACKWARD else forward[slot]
                _together(work, pace[stage], group[slot], ready, end[stage], busy[stage])
                if kind != RECOMPUTE:
                    passes[this, slot] += 1
                    for rank in range(ranks):
                        arrival[this, slot, rank] = end[stage, rank] + (transfer[slot, rank] if pp > 1 else 0.0)
                at[stage] += 1
                left -= 1
        if left == before:
            return False
    return True


@njit(nogil=True, cache=True)
def _together(work, pace, group, ready, end, busy):
    """One operation on all ranks: neighbours of one group start with the last of them and end with the slowest."""
    first, ranks = 0, len(end)
    while first < ranks:
        stop = first + 1
        start = max(end[first], ready[first])
        longest = work[first] * pace[first]
        while stop < ranks and group[stop] == group[first]:
            start = max(start, end[stop], ready[stop])
            longest = max(longest, work[stop] * pace[stop])
            stop += 1
        for rank in range(first, stop):
            busy[rank] += work[rank] * pace[rank]
            end[rank] = start + longest
        first = stop
