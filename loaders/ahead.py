"""The background thread: plans, fetches and agrees ahead of training, so that the trainer finds batches ready.

One thread drives the torch ``DataLoader`` (whose sampler plans), and talks to the other ranks where that is needed: the
digest of the plan is compared at the first step and every ``every`` steps, and target counts that are not in the length
index are summed once all of a step's micro-batches are here, before any of them is handed out.

Ranks must make the same exchanges, also when training breaks off in mid-epoch. So the exchange of a step is made only
once the trainer has begun the step before it, which all ranks do alike; and what was so permitted is made even if the
trainer has left. The queue between thread and trainer is bounded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..packing.cost import CostModel
from .batch import ThdBatch

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What ranks tell each other ahead of a step: nothing but the plan's digest and, if unknown, target counts."""

    group: dist.ProcessGroup | None
    num_ranks: int
    every: int

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


class Pump:
    """Iterates ``batches`` in a thread, at most ``ahead`` before the caller; its errors are raised in the caller.

    RuntimeError if nothing comes for ``timeout`` seconds. The thread ends with the iteration, also one that is broken off.
    """

    def __init__(self, batches: Iterable[Any], *, agreement: Agreement, ahead: int, timeout: float) -> None:
        self._agreement, self._timeout = agreement, timeout
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(ahead)
        self._begun = 0  # steps whose first micro-batch the trainer has taken
        self._progress = threading.Condition()
        self._stopped = False
        self._source = iter(batches)  # workers are started here, in the trainer's thread
        self._thread = threading.Thread(target=self._run, name="equipoise-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[ThdBatch]:
        last = None
        try:
            while True:
                try:
                    kind, value = self._ready.get(timeout=self._timeout)
                except queue.Empty:
                    raise RuntimeError(
                        f"no micro-batch came for {self._timeout:g} s: a worker or another rank is stuck, or timeout= is too short"
                    ) from None
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                if value.step != last:
                    last = value.step
                    with self._progress:
                        self._begun += 1
                        self._progress.notify()
                yield value
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._progress:
            self._stopped = True
            self._progress.notify()

    def stop(self) -> None:
        """End the iteration and wait until its thread has made the exchanges that were permitted.

        RuntimeError if that takes longer than ``timeout`` seconds.
        """
        self._leave()
        self._thread.join(self._timeout)
        if self._thread.is_alive():
            raise RuntimeError(f"the iteration's thread did not end within {self._timeout:g} s: another rank is stuck")

    def _run(self) -> None:
        try:
            for batch in self._agreed():
                self._offer("batch", batch.complete())
            self._offer("end", None)
        except BaseException as error:  # the trainer's thread must see it, whatever it is
            self._offer("error", error)

    def _offer(self, kind: str, value: Any) -> None:
        while not self._stopped:
            try:
                return self._ready.put((kind, value), timeout=_POLL_SECONDS)
            except queue.Full:
                continue

    def _permitted(self, ordinal: int) -> bool:
        """Wait for the trainer to begin the step before; False if it left without."""
        with self._progress:
            self._progress.wait_for(lambda: self._stopped or self._begun >= ordinal)
            return self._begun >= ordinal

    def _agreed(self) -> Iterator[ThdBatch]:
        """The batches with ``num_targets_step`` known and plans compared; holds a step back only where counts are missing."""
        agreement, held, ordinal = self._agreement, [], -1
        for batch in self._source:
            if ordinal < 0 or batch.slot == 0:
                ordinal += 1
                alone = agreement.group is None
                if self._stopped and (alone or not self._permitted(ordinal)):
                    return
                if not alone and (ordinal == 0 or batch.step % agreement.every == 0):
                    if not self._permitted(ordinal):
                        return
                    agreement.check_plan(batch)
            if batch.num_targets_step is not None:
                yield batch
                continue
            held.append(batch)
            if batch.is_last_slot:
                if not self._permitted(ordinal):
                    return
                total = agreement.sum_targets(sum(each.num_targets for each in held))
                yield from (_with_targets(each, total) for each in held)
                held = []


def _with_targets(batch: ThdBatch, total: int) -> ThdBatch:
    """The batch with the step's targets, in its state too: what is left of a step cannot tell them."""
    resume = batch.resume if batch.is_last_slot else {**batch.resume, "num_targets": total}
    return batch.replace(num_targets_step=total, resume=resume)
