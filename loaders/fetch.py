"""Fetch: torch's ``DataLoader`` over planned micro-batches, with what it leaves to its user.

torch waits for a worker as long as ``timeout`` says, and does not look meanwhile whether it lives or whether anybody waits for
the waiter. So it is asked in turns of a second. A worker that was killed, or reads for too long, is an error that names the
documents it was given; workers end when they are told to, also those of an iteration that somebody still holds.

    fetch = Fetch(PlannedDataset(rows), sampler, ThdCollator(recipe), num_workers=2, timeout=300.0)
    for batch in fetch.batches(gate):
        …
    fetch.close()
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from .batch import ThdBatch
from .collate import ThdCollator
from .dataset import PlannedDataset
from .worker import end_with_trainer

if TYPE_CHECKING:
    from ..samplers.batch_sampler import BalancedBatchSampler
    from ..samplers.micro_batches import MicroBatch
    from .ahead import Gate

_TURN = 1.0  # seconds
_PIPE_BYTES = 512 << 10  # what one user's pipes may hold together is bounded
_TOLD = 16  # documents that an error names


class Fetch:
    """Micro-batches in the sampler's order, read by workers that stay, or by whoever asks.

    Args:
        num_workers, prefetch_factor, pin_memory: torch ``DataLoader``'s.
        timeout: seconds that a worker may take for a micro-batch.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        sampler: BalancedBatchSampler,
        collator: ThdCollator,
        *,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        timeout: float = 300.0,
    ) -> None:
        self._given = _Given(sampler)
        self._timeout, self._num_workers = timeout, num_workers
        self._dataset, self._collator, self._pinned = dataset, collator, pin_memory
        self._loader: Any = DataLoader(
            dataset,
            batch_sampler=self._given,  # type: ignore[arg-type]  # torch asks for nothing but its iterator
            collate_fn=collator,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            timeout=min(timeout, _TURN) if num_workers else 0,
            persistent_workers=num_workers > 0,
            worker_init_fn=end_with_trainer,
        )

    def batches(self, gate: Gate) -> Iterator[ThdBatch]:
        """From where the sampler stands, until nobody waits any more; workers start now, in the caller's thread.

        Raises RuntimeError for a worker that was killed or is too slow.
        """
        if not (self._num_workers or self._pinned):  # what torch's loop would do then
            return self._batches((self._collator(self._dataset.__getitems__(specs)) for specs in self._given), gate)
        try:
            source = iter(self._loader)
        except RuntimeError as error:
            if not is_of_workers(error):
                raise
            self.close()  # those that stayed are dead, or still at what an iteration that was left had asked for
            source = iter(self._loader)
        if self._num_workers:
            _widen_pipe(source._worker_result_queue)
        return self._batches(source, gate)

    def _batches(self, source: Iterator[ThdBatch], gate: Gate) -> Iterator[ThdBatch]:
        began = time.monotonic()
        while True:
            try:
                batch = next(source, None)
            except RuntimeError as error:
                if gate.over or not is_of_workers(error):
                    raise
                if "timed out" in str(error) and time.monotonic() - began < self._timeout:
                    continue
                told = self.told(error)
                self.close()
                raise told from error
            if batch is None:
                return
            self._given.come()
            yield batch
            began = time.monotonic()

    def told(self, error: RuntimeError) -> RuntimeError:
        """torch's error of a worker, with what that worker was to read."""
        late = f"a worker took more than {self._timeout:g} s" if "timed out" in str(error) else str(error).strip(" .")
        return RuntimeError(f"{late}: {self.awaited()}")

    def awaited(self) -> str:
        """What has been given out first and has not come; of a worker that is dead, if one is."""
        processes = getattr(self._loader._iterator, "_workers", [])
        dead = {at for at, process in enumerate(processes) if not process.is_alive()}
        waiting = self._given.waiting()
        # torch gives micro-batches to its workers in turn.
        mine = [spec for number, spec in waiting if number % max(self._num_workers, 1) in dead]
        return _named(next(iter(mine or [spec for _, spec in waiting]), None))

    def close(self) -> None:
        """End the workers; another iteration starts new ones."""
        source, self._loader._iterator = self._loader._iterator, None
        if source is not None:
            source._shutdown_workers()  # what ``del`` does, but others may hold it


def _widen_pipe(results: Any) -> None:
    """Room for whole micro-batches, where the system allows: else workers write each in turns with whoever reads it."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(results._reader.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def is_of_workers(error: RuntimeError) -> bool:
    """Whether it is torch's own, of a worker that is dead or slow, and not one that the dataset raised in a worker."""
    return str(error).startswith("DataLoader ")


class _Given:
    """The sampler's specs, and which of them were given out and have not come back as a micro-batch."""

    def __init__(self, sampler: BalancedBatchSampler) -> None:
        self._sampler = sampler
        self._waiting: deque[tuple[int, MicroBatch]] = deque()

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        self._waiting = deque()
        for number, specs in enumerate(self._sampler):
            self._waiting.append((number, specs[0]))
            yield specs

    def come(self) -> None:
        """The first has come."""
        self._waiting.popleft()

    def waiting(self) -> list[tuple[int, MicroBatch]]:
        """Those that have not, in order, each with its number in the iteration."""
        return list(self._waiting)


def _named(spec: MicroBatch | None) -> str:
    if spec is None:
        return "no micro-batch was being read"
    documents = [str(document) for document in spec.spans.document.tolist() if document >= 0]
    more = ["…"] if len(documents) > _TOLD else []
    return (
        f"micro-batch {spec.slot} of step {spec.step} of epoch {spec.epoch} did not come, with documents "
        f"{', '.join(documents[:_TOLD] + more)}"
    )
