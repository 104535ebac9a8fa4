"""StreamFeed: a rank's micro-batches of a stream: the next documents are read, their lengths told, and payloads moved.

    feed = StreamFeed(stream, group=group, num_workers=4)
    sampler = BalancedBatchSampler(Unindexed(more=feed.more, num_parts=stream.num_parts), recipe, …)
    for batch in feed.batches(sampler, ThdCollator(recipe), gate): …

A step takes the next documents of all parts, in the order of the stream. Each rank tells the lengths of those it has read
(``stream_teller.py``), all make the same plan of them, and each document goes whole to the ranks that hold a piece of it, by
one all-to-all. So three shards serve sixteen ranks evenly, and ranks end together. The exchange of a step is made once the
trainer has begun the step before, and not at all otherwise: all ranks then make the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from ..packing.packs import Int64
from ..samplers.carry import QueuedAdmission
from ..samplers.stream import StreamAdmission
from ..samplers.stream_items import item_of
from ..samplers.stream_order import Arrivals, Place
from .batch import ThdBatch
from .dataset import Rows
from .exchange import move_rows, share, world_of
from .stream import Stream
from .stream_teller import Key, StreamTeller

if TYPE_CHECKING:
    from ..samplers.admission import Window
    from ..samplers.batch_sampler import BalancedBatchSampler
    from ..samplers.micro_batches import MicroBatch
    from ..samplers.plan import StepPlan
    from ..samplers.solver import Planner, Solver
    from .ahead import Gate
    from .collate import ThdCollator

_TEMPLATE = -1  # stands for a document of one token, which fillers imitate


class StreamFeed:
    """Makes the micro-batches of one rank of a group from a stream; for the arguments see ``StreamTeller``."""

    def __init__(
        self,
        stream: Stream,
        *,
        group: dist.ProcessGroup | None = None,
        num_workers: int = 0,
        buffer_bytes: int = 256 << 20,
        timeout: float = 300.0,
        on_error: str = "raise",
    ) -> None:
        self._teller = StreamTeller(
            stream,
            group=group,
            num_workers=num_workers,
            buffer_bytes=buffer_bytes,
            timeout=timeout,
            on_error=on_error,
        )
        self.stream, self.group = stream, group
        self._rank, self._world = world_of(group)
        self._plan: StepPlan | None = None
        self._ranks: list[int] | None = None  # the group's rank of each rank of the plan

    @property
    def failed(self) -> dict[Key, str]:
        """Documents that were skipped, on any rank, and why, by (epoch, part, ordinal)."""
        return self._teller.failed

    def more(self, place: Place, visits: int, columns: dict[str, str] | None) -> Arrivals:
        """What the next ``visits`` of the stream's parts find, told by all ranks to all, see ``StreamAdmission``.

        Raises ValueError (a document) or RuntimeError (a worker) on all ranks alike.
        """
        return self._teller.more(place, visits, columns)

    def close(self) -> None:
        """End the workers."""
        self._teller.close()

    def batches(self, sampler: BalancedBatchSampler, collator: ThdCollator, gate: Gate) -> Iterator[ThdBatch]:
        """This rank's micro-batches from where the sampler stands to the end of its epoch; workers start now."""
        if self._world != sampler.cluster.num_ranks:
            raise ValueError(
                f"a stream's documents travel between all ranks: the plan is for {sampler.cluster.num_ranks}, the group has "
                f"{self._world}: initialise torch.distributed before the loader, or pass group= over the dp x cp ranks"
            )
        self._teller.start(_base(sampler).place)
        return self._batches(sampler, collator, gate)

    def _batches(self, sampler: BalancedBatchSampler, collator: ThdCollator, gate: Gate) -> Iterator[ThdBatch]:
        base, rows, planner = _base(sampler), dict[int, dict[str, Any]](), sampler.planner
        sampler.planner = lambda windows, solver: self._plans(sampler, planner, gate, windows, solver)
        try:
            for (spec,) in sampler:
                if self._plan is not None:
                    rows, self._plan = self._moved(self._plan, base), None
                yield collator([(spec, _rows_of(spec, rows))])
        finally:
            sampler.planner = planner
            self.close()

    def _plans(
        self, sampler: BalancedBatchSampler, planner: Planner, gate: Gate, windows: Iterable[Window], solver: Solver
    ) -> Iterator[tuple[StepPlan, float]]:
        """The plans of an epoch's steps, each made by ``planner`` once its exchange is permitted."""
        base, coming = _base(sampler), iter(windows)
        for ordinal in count():
            if not gate.permitted(ordinal):
                return
            if ordinal == 0:
                self._meet(sampler.rank)
                base.catch_up(_waiting(sampler))
            window = next(coming, None)
            if window is None:
                return
            ((self._plan, seconds),) = planner([window], solver)
            base.released(window)
            yield self._plan, seconds

    def _meet(self, rank: int) -> None:
        """Learn which rank of the group is which of the plan. Raises ValueError where one is missing."""
        if self._ranks is None:
            told = [int(each) for each in share(str(rank), self.group)]
            if sorted(told) != list(range(self._world)):
                raise ValueError(f"each rank of dp x cp takes part once; the group's say that they are {told}")
            self._ranks = np.argsort(told).tolist()

    def _moved(self, plan: StepPlan, base: StreamAdmission) -> dict[int, dict[str, Any]]:
        """All documents that this rank needs in a step, by number, once they have travelled."""
        assert self._ranks is not None
        ranks, template = np.array(self._ranks), int(plan.packs.spans.document.max())
        owner = np.repeat(np.arange(len(plan.packs)), np.diff(plan.packs.offsets))
        size = plan.cp_size[owner]
        nth = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        to = ranks[np.repeat(plan.first_rank[owner], size) + nth]
        needs = np.unique(
            np.stack([to, np.repeat(plan.packs.spans.document, size)]), axis=1
        )  # by rank, then by document
        epoch, part, ordinal = base.items.where(np.where(needs[1] == _TEMPLATE, template, needs[1]))
        reader = part % self._world
        outgoing: list[Rows] = [{} for _ in range(self._world)]
        for at in np.flatnonzero(reader == self._rank).tolist():
            row = self._teller.held[int(epoch[at]), int(part[at]), int(ordinal[at])]
            for name, value in (_cut(row) if needs[1, at] == _TEMPLATE else row).items():
                outgoing[needs[0, at]].setdefault(name, []).append(value)
        rows: dict[int, dict[str, Any]] = {}
        for sender, received in enumerate(move_rows(outgoing, self.group)):
            documents = needs[1, (needs[0] == self._rank) & (reader == sender)].tolist()
            assert all(len(values) == len(documents) for values in received.values()), "documents lost on the way"
            for at, document in enumerate(documents):
                rows[document] = {name: values[at] for name, values in received.items()}
        self._forget(base)
        return rows

    def _forget(self, base: StreamAdmission) -> None:
        """Let go of what was sent; what stays for later steps becomes a copy of its own, for a view keeps a whole block."""
        kept = zip(*(of.tolist() for of in base.unreleased()), strict=True)
        held = self._teller.held
        self._teller.held = {key: _owned(held[key]) for key in kept if key in held}


def _base(sampler: BalancedBatchSampler) -> StreamAdmission:
    admission = sampler.admission.base if isinstance(sampler.admission, QueuedAdmission) else sampler.admission
    assert isinstance(admission, StreamAdmission)
    return admission


def _waiting(sampler: BalancedBatchSampler) -> Int64:
    """Items that were admitted before where the sampler stands, and are still to come."""
    admission, rest = sampler.admission, sampler._rest
    items = [np.zeros(0, np.int64)]
    if isinstance(admission, QueuedAdmission):
        items.append(admission.held(sampler.epoch, sampler.first_step + (rest is not None)).items)
    if rest is not None:
        items.append(item_of(rest.spans.document, rest.spans.start // _base(sampler).capacity))
    return np.unique(np.concatenate(items))


def _cut(row: dict[str, Any]) -> dict[str, Any]:
    """A document of one token."""
    return {name: value[:1] if isinstance(value, np.ndarray) else value for name, value in row.items()}


def _owned(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, np.ndarray) and value.base is not None else value
        for name, value in row.items()
    }


def _rows_of(spec: MicroBatch, rows: dict[int, dict[str, Any]]) -> Rows:
    """Columns of the documents of a micro-batch, a filler's those of the template."""
    held = [rows[document] for document in spec.spans.document.tolist()]
    return {name: [row[name] for row in held] for name in held[0]}
