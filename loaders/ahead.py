"""The background thread: plans, fetches and agrees ahead of training, so that the trainer finds batches ready.

One thread drives the batches' source (a torch ``DataLoader`` whose sampler plans, or a stream's feed), and talks to the other
ranks where that is needed: the digest of the plan is compared at the first step and every ``every`` steps; target counts that
are not in the length index are summed, and documents that some rank could not read are masked on all, once all of a step's
micro-batches are here and before any of them is handed out.

Ranks must make the same exchanges, also when training breaks off in mid-epoch. So the exchange of a step is made only
once the trainer has begun the step before it, which all ranks do alike; and what was so permitted is made even if the
trainer has left. The queue between thread and trainer is bounded. How long the trainer waited for it is kept, and told where
it is much (``Waiting``).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..packing.cost import CostModel
from .batch import ThdBatch

_log = logging.getLogger("equipoise")
_POLL_SECONDS = 0.05
_GRACE = 1.5  # seconds for a thread to notice that it was left
_MUCH = 0.05  # of the time: waiting that is told


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What ranks tell each other ahead of a step: the plan's digest now and then, and what is not in the length index.

    ``skip``: documents that a rank could not read are left out on all, so each step's targets are counted again.
    """

    group: dist.ProcessGroup | None
    num_ranks: int
    every: int
    skip: bool = False

    def __post_init__(self) -> None:
        if self.skip and self.num_ranks > 1 and self.group is None:
            raise ValueError(
                'on_error="skip" tells all ranks what one could not read: initialise torch.distributed before the loader, or '
                "pass group="
            )

    def check_plan(self, batch: ThdBatch) -> None:
        """Compare the digest across ranks. Raises RuntimeError that names the ranks and the step, on all ranks."""
        if self.group is None:
            return
        mine = torch.tensor([batch.digest - (1 << 63), batch.step, batch.epoch], dtype=torch.int64)
        told = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(told, mine, group=self.group)
        other = [rank for rank, theirs in enumerate(told) if not torch.equal(theirs, told[0])]
        if other:
            raise RuntimeError(
                f"ranks {other} planned step {batch.step} of epoch {batch.epoch} otherwise than rank 0: all ranks need the "
                f"same dataset, options, seed, epoch and package versions"
            )

    def sum_targets(self, targets: int) -> int:
        """Targets of the step over all ranks."""
        if self.num_ranks == 1:
            return targets
        if self.group is None:
            raise ValueError(
                "the dataset has labels, so a step's targets must be summed over ranks: initialise torch.distributed before "
                "the loader (or pass group=), or give targets= the name of a column with each document's count"
            )
        total = torch.tensor(targets, dtype=torch.int64)
        dist.all_reduce(total, group=self.group)
        return int(total)

    def settle(self, batches: list[ThdBatch]) -> list[ThdBatch]:
        """A step's micro-batches with what any rank could not read masked, and with the targets of the whole step."""
        if self.skip:
            skipped = self._skipped_anywhere(sorted({document for batch in batches for document, _ in batch.skipped}))
            batches = [batch.without(skipped) for batch in batches]
        total = batches[0].num_targets_step  # known where a step goes on that was under way
        if total is None:
            total = self.sum_targets(sum(batch.num_targets for batch in batches))
        return [_with_targets(batch, total) for batch in batches]

    def _skipped_anywhere(self, here: list[int]) -> set[int]:
        if self.group is None:
            return set(here)
        most = torch.tensor(len(here))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        if not most:
            return set()
        mine = torch.full((int(most),), -1, dtype=torch.int64)
        mine[: len(here)] = torch.tensor(here, dtype=torch.int64)
        told = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(told, mine, group=self.group)
        return set(torch.cat(told).tolist()) - {-1}

    def refit(self, cost: CostModel, moments: np.ndarray) -> list[float]:
        """Seconds per pair and per token that explain what all ranks measured: fitted on rank 0, the same on all."""
        total = torch.from_numpy(moments.copy())
        if self.num_ranks > 1:
            if self.group is None:
                raise ValueError(
                    "refit=True sums measurements over ranks: initialise torch.distributed before the loader"
                )
            dist.all_reduce(total, group=self.group)
        fitted = cost.fitted(total.numpy())
        told = torch.tensor([fitted.seconds_per_pair, fitted.seconds_per_token], dtype=torch.float64)
        if self.group is not None:
            dist.broadcast(told, group_src=0, group=self.group)
        return told.tolist()


@dataclass(kw_only=True)
class Waiting:
    """How long the trainer waited for micro-batches since an epoch's iteration began, in seconds."""

    first: float = 0.0  # for the first one, start-up included
    later: float = 0.0  # for all others together
    total: float = 0.0  # of the time since the first
    planning: float = 0.0  # that planning took, in the background
    steps: int = 0

    @property
    def share(self) -> float:
        """Of the time since the first micro-batch."""
        return self.later / self.total if self.total else 0.0

    def __str__(self) -> str:
        return (
            f"the trainer waited {self.later:.3g} s of {self.total:.3g} s ({self.share:.1%}) for micro-batches over "
            f"{self.steps} steps, and {self.first:.3g} s for the first; planning took {self.planning:.3g} s"
        )

    @property
    def advice(self) -> str:
        """What to change where that is much."""
        if self.planning > self.total / 2:
            return (
                "planning is slower than training: raise planning_processes or plan_ahead, or set share_planning=True"
            )
        return "reading is slower than training: raise num_workers, prefetch_factor or ahead"


class Gate:
    """How far the trainer is: which steps' exchanges are permitted, and whether it has left."""

    def __init__(self, *, alone: bool = False) -> None:
        self._begun = 0  # steps whose first micro-batch the trainer has taken
        self._progress = threading.Condition()
        self._alone = alone  # no other rank takes part in exchanges
        self.left = False

    @property
    def over(self) -> bool:
        """Whether nobody waits for another micro-batch: neither the trainer nor, for an exchange, another rank."""
        return self.left and self._alone

    def begin(self) -> None:
        """The trainer begins its next step."""
        with self._progress:
            self._begun += 1
            self._progress.notify_all()

    def leave(self) -> None:
        """The trainer takes no more."""
        with self._progress:
            self.left = True
            self._progress.notify_all()

    def permitted(self, ordinal: int) -> bool:
        """Wait for the trainer to begin the step before this one, 0 being the first; False if it left without."""
        with self._progress:
            self._progress.wait_for(lambda: self.left or self._begun >= ordinal)
            return self._begun >= ordinal


class Pump:
    """Iterates ``batches(gate)`` in a thread, at most ``ahead`` before the caller; its errors are raised in the caller.

    RuntimeError if nothing comes for ``timeout`` seconds. The thread ends with the iteration, also one that is broken off.
    """

    def __init__(
        self,
        batches: Callable[[Gate], Iterable[Any]],
        *,
        agreement: Agreement,
        ahead: int,
        timeout: float,
        awaited: Callable[[], str] | None = None,
    ) -> None:
        self._agreement, self._timeout, self._awaited = agreement, timeout, awaited
        # Unlike queue.Queue these stay whole when a signal's handler raises, as torch's does for a worker that was killed.
        self._ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(ahead):
            self._room.put(None)
        self._gate, self.waiting = Gate(alone=agreement.group is None), Waiting()
        self._overdue = False  # it was told already that nothing comes
        self._source = iter(batches(self._gate))  # workers are started here, in the trainer's thread
        self._thread = threading.Thread(target=self._run, name="equipoise-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[ThdBatch]:
        last, began = None, None
        try:
            while True:
                asked = time.perf_counter()
                kind, value = self._next()
                if self._gate.left:
                    raise RuntimeError(
                        "this iteration was ended: by another one, by set_epoch, by a state that was loaded, or by close"
                    )
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                now = time.perf_counter()
                if began is None:
                    began, self.waiting.first = now, now - asked
                else:
                    self.waiting.later += now - asked
                if value.step != last:
                    last = value.step
                    self._gate.begin()
                    self._account(value, now - began)
                yield value
        finally:
            self._gate.leave()

    def _next(self) -> tuple[str, Any]:
        try:
            ready = self._ready.get(timeout=self._timeout)
        except queue.Empty:
            self._overdue = True
            raise RuntimeError(
                f"no micro-batch came for {self._timeout:g} s: a worker, planner or another rank is stuck, or timeout= is too "
                f"short{self._told()}"
            ) from None
        self._room.put(None)
        return ready

    def _told(self) -> str:
        return "" if self._awaited is None else f"; {self._awaited()}"

    def _account(self, batch: ThdBatch, total: float) -> None:
        """Count the step that begins; tell, at every comparison of plans, where the trainer waits much."""
        self.waiting.total, self.waiting.steps = total, self.waiting.steps + 1
        self.waiting.planning += batch.planning_seconds
        if self.waiting.steps % self._agreement.every == 0 and self.waiting.share > _MUCH:
            _log.warning("%s: %s", self.waiting, self.waiting.advice)

    def stop(self) -> None:
        """End the iteration and wait until its thread has made the exchanges that were permitted.

        RuntimeError if that takes longer than ``timeout`` seconds, at once where so much was waited already.
        """
        self._gate.leave()
        with contextlib.suppress(queue.Empty):
            while True:  # batches, or an error that holds what it happened in
                self._ready.get_nowait()
        self._ready.put(("ended", None))  # whoever waits, or takes up the iteration again, hears of it
        self._thread.join(_GRACE if self._overdue else self._timeout)
        if self._thread.is_alive():
            self._overdue = True
            raise RuntimeError(
                f"the iteration's thread did not end within {self._timeout:g} s: a reader or another rank is stuck{self._told()}"
            )

    def abandon(self) -> None:
        """As ``stop``, but what was told already is not told again: a thread that is stuck ends with what it is stuck in."""
        told = self._overdue
        try:
            self.stop()
        except RuntimeError:
            if not told:
                raise

    def _run(self) -> None:
        try:
            for batch in self._agreed():
                self._offer("batch", batch.complete())
            self._offer("end", None)
        except BaseException as error:  # the trainer's thread must see it, whatever it is
            self._offer("error", error)
        finally:
            if isinstance(self._source, Generator):  # what it holds is let go here, not when it is collected
                self._source.close()

    def _offer(self, kind: str, value: Any) -> None:
        while not self._gate.left:
            with contextlib.suppress(queue.Empty):
                self._room.get(timeout=_POLL_SECONDS)
                return self._ready.put((kind, value))

    def _agreed(self) -> Iterator[ThdBatch]:
        """The batches with ``num_targets_step`` known and plans compared; holds a step back only where something must be
        told first."""
        agreement, gate, held, ordinal = self._agreement, self._gate, list[ThdBatch](), -1
        for batch in self._source:
            if ordinal < 0 or batch.slot == 0:
                ordinal += 1
                alone = agreement.group is None
                if gate.left and (alone or not gate.permitted(ordinal)):
                    return
                if not alone and (ordinal == 0 or batch.step % agreement.every == 0):
                    if not gate.permitted(ordinal):
                        return
                    agreement.check_plan(batch)
            if batch.num_targets_step is not None and not agreement.skip:
                yield batch
                continue
            held.append(batch)
            if batch.is_last_slot:
                if not gate.permitted(ordinal):
                    return
                yield from agreement.settle(held)
                held = []


def _with_targets(batch: ThdBatch, total: int) -> ThdBatch:
    """The batch with the step's targets, in its state too: what is left of a step cannot tell them."""
    resume = batch.resume if batch.is_last_slot else {**batch.resume, "num_targets": total}
    return batch.replace(num_targets_step=total, resume=resume)
