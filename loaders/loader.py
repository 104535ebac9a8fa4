"""BalancedLoader: balanced THD micro-batches in place of a torch ``DataLoader``.

    loader = BalancedLoader(dataset, recipe("vrsp"), max_tokens_per_rank=16384, documents_per_step=256, dp=4, cp=2, rank=rank)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for step in loader.steps():
            for batch in step:
                model(**batch.to_hf()).loss.backward()
            optimizer.step()

torch's ``DataLoader`` does workers, pinning, prefetch and timeouts. Steps are planned ``plan_ahead`` of them before they are
fetched, and a background thread fetches and agrees ``ahead`` micro-batches before training (numba kernels release the GIL);
``loader.waiting`` tells how long the trainer waited all the same. A job keeps one file, ``loader.save(path)``, and goes on
from it with any number of ranks and workers: ``loader.load(path)``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from ..packing.cost import CostModel, moments_of
from ..packing.lengths import Lengths
from ..recipes import Recipe, choose
from ..samplers.batch_sampler import BalancedBatchSampler
from ..samplers.unindexed import Unindexed
from .ahead import Agreement, Gate, Pump, Waiting
from .batch import ThdBatch
from .collate import ThdCollator
from .dataset import PlannedDataset
from .fetch import Fetch, is_of_workers
from .mesh import Place, coordinates, cpu_group, end_group, plan_store
from .planning import PlanAhead, Share
from .shapes import Shapes
from .state_file import read_state, save_state
from .stream import Stream
from .stream_feed import StreamFeed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..samplers.solve import Cost


class BalancedLoader:
    """Iterates this rank's micro-batches of an epoch; equally many on every rank, never an empty one.

    Args:
        dataset: HF ``Dataset`` with a column ``input_ids`` (and optionally ``labels``, unshifted, -100 = masked), any
            map-style dataset of such rows, a ``Source`` (``TokenFile``, ``TarShards``, ``Mixture``), or a ``Stream``, which has
            no index: its documents come in its own order, whatever ``shuffle``, and only reading tells how many there are.
        recipe: a name, or from ``equipoise.recipe(name, …)``.
        max_tokens_per_rank: hard cap of tokens on one rank in one micro-batch.
        documents_per_step, tokens_per_step, packs_per_step: global size of an optimizer step; exactly one.
        dp, cp, rank: the mesh and this process in it, ``rank = replica * cp + cp_rank``; or ``mesh``, a ``DeviceMesh`` with
            any of the axes dp, cp and others (ranks that differ in those others, tp and pp, get the same batches).
        lengths: length index; default: read from the dataset (Arrow offsets; else every document is measured once).
        targets: column with the number of targets of each document (int). Without it they follow from the lengths, or,
            where the dataset has ``labels``, are all-reduced on a CPU group ahead of training.
        group_key: column whose equal values keep documents together in one pack (answers to one prompt, a DPO pair).
        on_error: what a document that cannot be read or trained on is: an error (``raise``), or left out of the loss on all
            ranks (``skip``: listed in ``loader.skipped``; its place in the pack is filled).
        buffer_bytes: that a stream may read ahead on this rank.
        num_workers, prefetch_factor, pin_memory, timeout: torch ``DataLoader``'s; ``timeout`` bounds every wait, seconds.
        ahead: micro-batches that the background thread may hold ready.
        plan_ahead: steps that may be planned before they are fetched.
        planning_processes: that plan, for recipes whose solver takes its time; 0: a thread; None: as the recipe needs.
        share_planning: ranks plan steps in turn and tell each other through torch.distributed's store; else each plans all.
        shapes: sizes that are the same in every micro-batch, see ``Shapes``; ``pad_to`` then is the cap.
        check_every: the plan's digest is compared across ranks at the first step and every so many.
        group: a CPU (gloo) process group over the dp x cp ranks that nothing else uses; default: made here if
            torch.distributed runs.
        slots, sync, seed, shuffle, order, last, too_long, evaluation, cost, speeds, pad_tp: see ``BalancedBatchSampler``.
        restart_positions: pieces of a split document count positions from 0.
        label_offsets: for multi-token prediction, how far ahead labels are wanted beside the next token's, see ``ThdCollator``.
        refit: at each epoch's beginning the cost model's coefficients are fitted to what ``observe`` was told, over all
            ranks; they are part of the digest and the state.
    """

    def __init__(
        self,
        dataset: Any,
        recipe: Recipe | str,
        *,
        max_tokens_per_rank: int,
        documents_per_step: int | None = None,
        tokens_per_step: int | None = None,
        packs_per_step: int | None = None,
        dp: int | None = None,
        cp: int | None = None,
        rank: int | None = None,
        mesh: DeviceMesh | None = None,
        lengths: Lengths | None = None,
        targets: str | None = None,
        group_key: str | None = None,
        on_error: str = "raise",
        buffer_bytes: int = 256 << 20,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        timeout: float = 300.0,
        ahead: int = 4,
        plan_ahead: int = 2,
        planning_processes: int | None = None,
        share_planning: bool = False,
        shapes: Shapes | None = None,
        check_every: int = 100,
        group: dist.ProcessGroup | None = None,
        slots: int | None = None,
        sync: str = "step",
        seed: int = 0,
        shuffle: bool = True,
        order: str = "shuffle",
        last: str = "partial",
        too_long: str = "error",
        evaluation: bool = False,
        cost: Cost | None = None,
        speeds: tuple[float, ...] | None = None,
        pad_tp: int = 0,
        restart_positions: bool = False,
        label_offsets: Sequence[int] = (),
        refit: bool = False,
    ) -> None:
        place, recipe = coordinates(mesh, dp, cp, rank), choose(recipe)
        self._ahead, self._timeout, self.shapes = ahead, timeout, shapes or Shapes()
        if ahead < 1 or check_every < 1:
            raise ValueError(f"ahead and check_every must be at least 1; got {ahead} and {check_every}")
        if group is None:
            group = cpu_group(place, timeout)
            weakref.finalize(self, end_group, group, os.getpid()).atexit = False
        self._feed: StreamFeed | None = None
        self.dataset: PlannedDataset | Stream
        if isinstance(dataset, Stream):
            _refuse_index(lengths, targets, group_key)
            self.dataset = dataset
            self._feed = StreamFeed(
                dataset,
                group=group,
                num_workers=num_workers,
                buffer_bytes=buffer_bytes,
                timeout=timeout,
                on_error=on_error,
            )
        else:
            self.dataset = PlannedDataset(dataset, targets=targets, on_error=on_error)
        index, counted = self._indexed(lengths, group_key, on_error)
        self.shapes.check_rule(recipe.shard, pad_tp, place.cp)
        self.sampler = BalancedBatchSampler(
            index,
            recipe,
            max_tokens_per_rank=self.shapes.cap(max_tokens_per_rank),
            dp=place.dp,
            cp=place.cp,
            rank=place.rank,
            documents_per_step=documents_per_step,
            tokens_per_step=tokens_per_step,
            packs_per_step=packs_per_step,
            slots=slots,
            sync=sync,
            seed=seed,
            shuffle=shuffle,
            order=order,
            last=last,
            too_long=too_long,
            evaluation=evaluation,
            cost=cost,
            speeds=speeds,
            pad_tp=pad_tp,
            count_targets=counted,
        )
        if refit and not isinstance(self.sampler.cost, CostModel):
            raise ValueError("refit=True needs a CostModel, whose coefficients it fits; got a callable cost")
        self._agreement = Agreement(
            group=group,
            num_ranks=place.num_ranks,
            every=check_every,
            skip=on_error == "skip" and self._feed is None,  # a stream's ranks tell each other before they plan
        )
        self._planning = PlanAhead(
            steps=plan_ahead,
            processes=2 * recipe.slow if planning_processes is None else planning_processes,
            share=_shared(place) if share_planning else None,
            timeout=timeout,
        )
        self.sampler.planner = self.shapes.checked(self._planning)
        self._collator = ThdCollator(
            recipe, restart_positions=restart_positions, shapes=self.shapes, label_offsets=label_offsets
        )
        self._fetch: Fetch | None = None
        if isinstance(self.dataset, PlannedDataset):
            self._fetch = Fetch(
                self.dataset,
                self.sampler,
                self._collator,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                pin_memory=pin_memory,
                timeout=timeout,
            )
        self._skipped: dict[int, str] = {}
        self._refit, self._moments, self._observed_epoch = refit, np.zeros(5), 0
        self._state = self.sampler.state_dict()
        self._resumed = self._at_end = self._asked = False
        self._pump: Pump | None = None

    def _indexed(
        self, lengths: Lengths | None, group_key: str | None, on_error: str
    ) -> tuple[Lengths | Unindexed, bool]:
        """What the sampler knows of the documents, and whether it can tell a step's targets."""
        if isinstance(self.dataset, Stream):
            assert self._feed is not None
            return Unindexed(more=self._feed.more, num_parts=self.dataset.num_parts), True
        index = self.dataset.index(lengths, group_key)
        return index, (index.targets is not None or not self.dataset.has_labels) and on_error == "raise"

    @property
    def epoch(self) -> int:
        """The epoch being read, or to be read next."""
        return self._state["epoch"]

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of the current epoch, exact; TypeError for a stream."""
        return self.sampler.admission.num_steps(self.epoch)

    def __len__(self) -> int:
        """Micro-batches of the epoch for this rank; TypeError where slots vary from step to step."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch next: from its beginning, or from where a loaded state stands if it is that epoch's."""
        if not (self._resumed and epoch == self.epoch):
            self._stop()
            self.sampler.set_epoch(epoch)
            self._state = self.sampler.state_dict()
        self._at_end, self._asked = False, True

    def __iter__(self) -> Iterator[ThdBatch]:
        """Micro-batches from the current epoch's beginning, or from a loaded state.

        After an epoch was read to its end (of a stream: until no more came) the next iteration reads the next one; an iteration
        broken off starts over. A loader has one iteration at a time: RuntimeError in one that another, or a state that was
        loaded, has ended.
        """
        self._stop()
        self._stand()
        resumed, self._resumed = self._resumed, False
        self._pump = Pump(
            self._batches,
            agreement=self._agreement,
            ahead=self._ahead,
            timeout=self._timeout,
            awaited=None if self._fetch is None else self._fetch.awaited,
        )
        try:
            for batch in self._pump:
                self._state, resumed = batch.state(), False
                self._skipped.update(batch.skipped)
                yield batch
        except RuntimeError as error:
            if self._fetch is None or not is_of_workers(error):
                raise
            raise self._fetch.told(error) from error  # torch tells the main thread of a dead worker, whatever it is at
        self._at_end = True
        if resumed and self._feed is not None and not self._asked:  # it was saved behind the stream's last micro-batch
            yield from self

    def _stand(self) -> None:
        """Put the sampler where the next iteration begins, with what the epoch before taught the cost model."""
        if self._state["step"] and not (self._resumed or self._at_end):
            self.sampler.load_state_dict(self._state)
            self._at_end = self.sampler.at_end  # all were taken, if not more asked for
        if self._at_end:
            self.set_epoch(self.epoch + 1)
        elif not self._resumed:
            self.set_epoch(self.epoch)
        if self._refit and self.epoch != self._observed_epoch and not self._resumed:
            assert isinstance(self.sampler.cost, CostModel)
            self.sampler.refit(self._agreement.refit(self.sampler.cost, self._moments))
            self._moments[:] = 0
            self._state = self.sampler.state_dict()
        self._observed_epoch = self.epoch
        self.sampler.load_state_dict(self._state)

    def _batches(self, gate: Gate) -> Iterable[ThdBatch]:
        if self._feed is not None:
            return self._feed.batches(self.sampler, self._collator, gate)
        assert self._fetch is not None
        return self._fetch.batches(gate)

    @property
    def skipped(self) -> dict[Any, str]:
        """Documents that could not be read or trained on, and why: by number, of a stream by (epoch, part, ordinal)."""
        if self._feed is not None:
            return dict(self._feed.failed)
        assert isinstance(self.dataset, PlannedDataset)
        return {**self.dataset.unmeasured, **self._skipped}

    def steps(self) -> Iterator[Iterator[ThdBatch]]:
        """Optimizer steps of the epoch, each an iterator over its micro-batches, which must be read to its end."""
        batches = iter(self)
        for batch in batches:
            following = islice(batches, batch.num_slots - batch.slot - 1)
            step = chain((batch,), following)
            yield step
            if next(step, None) is not None:
                raise RuntimeError(
                    f"step {batch.step} of epoch {batch.epoch} was left before the last of its {batch.num_slots} "
                    f"micro-batches; read each step to its end"
                )

    def observe(self, batch: ThdBatch, seconds: float) -> None:
        """Tell what a micro-batch took on this rank, forward and backward; with ``refit=True`` the next epoch plans by it."""
        self._moments += moments_of(batch.pairs, batch.input_ids.numel(), seconds)

    @property
    def waiting(self) -> Waiting:
        """How long the trainer waited in the iteration that is under way, or was last."""
        return Waiting() if self._pump is None else self._pump.waiting

    def _stop(self) -> None:
        if self._pump is not None:
            self._pump.stop()

    def close(self) -> None:
        """End the background thread, workers and planning processes, also of an iteration that was broken off; the loader
        can be iterated again."""
        try:
            if self._pump is not None:
                self._pump.abandon()  # first: exchanges that were permitted need their plans
        finally:
            self._planning.close()
            if self._feed is not None:
                self._feed.close()
            if self._fetch is not None:
                self._fetch.close()

    def state_dict(self) -> dict:
        """Where training stands: behind the last micro-batch that was yielded. Small, global, plain JSON."""
        return dict(self._state)

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved state, also on other ranks, with another cap, recipe or step size: a warning says then what
        becomes of the global batches. ValueError where other documents, or another order, were read.

        The state behind an epoch's last micro-batch continues with the next epoch, unless ``set_epoch`` asks for its own
        epoch again: then nothing of it is left.
        """
        self._stop()
        self.sampler.load_state_dict(state)
        self._state = self.sampler.state_dict()
        self._resumed, self._asked = True, False
        self._at_end = self.sampler.at_end

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a file, whole or not at all; all ranks may call it, rank 0 of the job writes."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            save_state(self.state_dict(), path)

    def load(self, path: str | PathLike[str]) -> None:
        """Continue from a file of ``save``. ValueError if it is truncated, changed or of another kind."""
        self.load_state_dict(read_state(path))

    def describe(self) -> str:
        """What is read and how, in a few lines."""
        cluster = self.sampler.cluster
        return (
            f"BalancedLoader: {self.sampler.items.describe()}\n"
            f"  {self.sampler.recipe}\n"
            f"  {cluster.dp} replicas x cp {cluster.cp}, at most {cluster.max_tokens_per_rank} tokens per rank, "
            f"sync per {cluster.sync}, slots {cluster.slots or 'vary'}; epoch {self.epoch}, step {self._state['step']}"
        )

    __str__ = describe


def _refuse_index(lengths: Lengths | None, targets: str | None, group_key: str | None) -> None:
    if lengths is not None or targets is not None or group_key is not None:
        raise ValueError("a stream has no index: lengths=, targets= and group_key= are for datasets that have one")


def _shared(place: Place) -> Share | None:
    """Ranks plan for each other, where there are several."""
    if place.num_ranks == 1:
        return None
    return Share(store=plan_store(place), rank=place.rank, world=place.num_ranks)
