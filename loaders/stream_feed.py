"""StreamFeed: a rank's micro-batches of a stream: the next documents are read, their lengths told, and payloads moved.

    feed = StreamFeed(stream, group=group, num_workers=4)
    admission = StreamAdmission(items=StreamItems(capacity=…), more=feed.more, num_parts=stream.num_parts, …)
    for batch in feed.batches(sampler, ThdCollator(recipe), gate):        # a sampler with this admission

Rank r of the group reads parts r, r + world, …; a step takes the next documents of all parts, in the order of the stream. Each
rank tells the lengths of those it has read (one all-gather), all make the same plan of them, and each document goes whole to
the ranks that hold a piece of it (one all-to-all). So three shards serve sixteen ranks evenly, and ranks end together.

The exchange of a step is made once the trainer has begun the step before, and not at all otherwise: all ranks then make the
same ones. What cannot be read is told with the lengths, before anything is planned with it: an error is the same on all ranks,
a document that is skipped is so on all. No rank waits in an exchange for a reader that is slow: lengths are told in turns of
some seconds, as far as they are known. Held in memory are the documents that were told and not yet sent, beside what readers
hold ahead (``buffer_bytes``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from ..packing.packs import Int64
from ..samplers.carry import QueuedAdmission
from ..samplers.stream import StreamAdmission
from ..samplers.stream_items import FAILED, item_of
from ..samplers.stream_order import Arrivals, Place
from .batch import ThdBatch
from .dataset import Rows
from .exchange import gather, move_rows, share, world_of
from .stream import Stream
from .stream_document import Document, End, Failed
from .stream_reader import Found, StreamReader

if TYPE_CHECKING:
    from ..samplers.batch_sampler import BalancedBatchSampler, Solver
    from ..samplers.order import Window
    from ..samplers.plan import MicroBatch, StepPlan
    from .ahead import Gate
    from .collate import ThdCollator

_ENDED = FAILED - 1
_TEMPLATE = -1  # stands for a document of one token, which fillers imitate
Key = tuple[int, int, int]
"""Where a document was read: epoch of the stream, part, ordinal."""


class StreamFeed:
    """Reads this rank's parts of a stream and makes its micro-batches.

    Args:
        stream: what is read, the same on all ranks.
        group: a CPU (gloo) group over the dp x cp ranks that nothing else uses; None: one rank.
        num_workers, buffer_bytes, on_error: see ``StreamReader``.
        timeout: of the group, seconds; a reader is given half of it, so that its error is told before others give up.
    """

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
        self.stream, self.group = stream, group
        self.failed: dict[Key, str] = {}  # documents that were skipped, on any rank, and why
        self._options = {"num_workers": num_workers, "buffer_bytes": buffer_bytes, "on_error": on_error}
        self._on_error, self._timeout = on_error, timeout
        self._rank, self._world = world_of(group)
        self._reader: StreamReader | None = None
        self._at: Place | None = None  # where the reader stands
        self._held: dict[Key, dict[str, Any]] = {}  # documents that were read and not sent yet
        self._plan: StepPlan | None = None
        self._ranks: list[int] | None = None  # the group's rank of each rank of the plan

    def close(self) -> None:
        """End the workers."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._at = None

    # Reading and telling.

    def _reader_at(self, place: Place) -> StreamReader:
        if self._reader is None or self._at != place:
            self.close()
            over = {part for part, _ in place.ends}
            parts = [part for part in range(self._rank, self.stream.num_parts, self._world) if part not in over]
            consumed = place.consumed(self.stream.num_parts)[parts].tolist()
            options: dict[str, Any] = {**self._options, "timeout": self._timeout / 2}
            self._reader = StreamReader(self.stream, parts, epoch=place.epoch, consumed=consumed, **options)
            self._at = place
        return self._reader

    def more(self, place: Place, visits: int, columns: dict[str, str] | None) -> Arrivals:
        """What the next ``visits`` of the stream's parts find, told by all ranks to all, see ``StreamAdmission``.

        Raises ValueError (a document) or RuntimeError (a worker) on all ranks alike.
        """
        try:
            part, ordinal = place.visits(visits, self.stream.num_parts)
            mine = np.flatnonzero(part % self._world == self._rank)
            found = _found(self._reader_at(place), part[mine].tolist())
            if columns is None:
                columns, found = self._agree(found, mine)
            keys = [(place.epoch, *key) for key in zip(part[mine].tolist(), ordinal[mine].tolist(), strict=True)]
            told = self._tell(found, keys, np.bincount(part % self._world, minlength=self._world), columns)
        except BaseException:
            self.close()
            raise
        values = np.empty((visits, 2), np.int64)
        for rank, each in enumerate(told):
            values[part % self._world == rank] = each
        there = values[:, 0] != _ENDED
        over, first = np.unique(part[~there], return_index=True)
        ends = dict(zip(over.tolist(), ordinal[~there][first].tolist(), strict=True))
        self._at = place.behind(visits, self.stream.num_parts, ends)
        return Arrivals(
            part=part[there],
            ordinal=ordinal[there],
            tokens=values[there, 0],
            targets=values[there, 1],
            ends=ends,
            columns=columns,
        )

    def _agree(self, found: Iterator[Found], mine: Int64) -> tuple[dict[str, str] | None, Iterator[Found]]:
        """The columns of the first document that can be read, over all ranks; None if none can."""
        read, note, error = list[Found](), dict[str, Any](), None
        try:
            for at, each in zip(mine.tolist(), found, strict=False):
                read.append(each)
                if isinstance(each, Document):
                    note = {"at": at, "columns": each.columns}
                    break
        except (ValueError, RuntimeError) as raised:
            error, note = raised, _told_error(raised)
        notes = [json.loads(each) for each in share(json.dumps(note), self.group)]
        _raise_first(notes, error)
        told = sorted((each["at"], each["columns"]) for each in notes if "at" in each)
        return told[0][1] if told else None, chain(read, found)

    def _tell(
        self, found: Iterator[Found], keys: list[Key], numbers: Int64, columns: dict[str, str] | None
    ) -> list[Int64]:
        """Tokens and targets of all visits, by rank, int64[numbers[rank], 2]; what was found here is kept."""
        values, at = np.zeros((len(keys), 2), np.int64), 0
        while True:
            begin, note, error = time.monotonic(), dict[str, Any](), None
            try:
                while at < len(keys) and time.monotonic() - begin <= self._timeout / 8:
                    values[at], reason = self._kept(next(found), keys[at], columns)
                    if reason is not None:
                        note.setdefault("failed", []).append([keys[at], reason])
                    at += 1
            except (ValueError, RuntimeError) as raised:
                error, note = raised, _told_error(raised)
            told, texts = gather(
                values[:at], most=int(numbers.max()), note=json.dumps(note) if note else "", group=self.group
            )
            notes = [json.loads(text) for text in texts if text]
            _raise_first(notes, error)
            self.failed |= {tuple(key): reason for each in notes for key, reason in each.get("failed", [])}
            if all(len(each) == number for each, number in zip(told, numbers, strict=True)):
                return told

    def _kept(self, found: Found, key: Key, columns: dict[str, str] | None) -> tuple[tuple[int, int], str | None]:
        """What is told of a visit: tokens and targets, and the reason why a document is skipped."""
        if isinstance(found, End):
            return (_ENDED, 0), None
        if isinstance(found, Document) and found.columns != columns:
            reason = f"its columns are {found.columns}, the first document's {columns}"
            if self._on_error == "raise":
                raise ValueError(f"document {key[2]} of part {key[1]} of the stream ({self.stream.source}): {reason}")
            found = Failed(reason)
        if isinstance(found, Failed):
            return (FAILED, 0), found.reason
        if found.tokens:
            self._held[key] = found.row
        return (found.tokens, found.targets), None

    # Micro-batches.

    def batches(self, sampler: BalancedBatchSampler, collator: ThdCollator, gate: Gate) -> Iterator[ThdBatch]:
        """This rank's micro-batches from where the sampler stands to the end of its epoch; workers start now."""
        if self._world != sampler.cluster.num_ranks:
            raise ValueError(
                f"a stream's documents travel between all ranks: the plan is for {sampler.cluster.num_ranks}, the group has "
                f"{self._world}: initialise torch.distributed before the loader, or pass group= over the dp x cp ranks"
            )
        place = _base(sampler).place
        if len(place.ends) < self.stream.num_parts:
            self._reader_at(place)
        return self._batches(sampler, collator, gate)

    def _batches(self, sampler: BalancedBatchSampler, collator: ThdCollator, gate: Gate) -> Iterator[ThdBatch]:
        base, rows, planned = _base(sampler), dict[int, dict[str, Any]](), sampler.planner
        sampler.planner = lambda windows, solver: self._plans(sampler, gate, windows, solver)
        try:
            for (spec,) in sampler:
                if self._plan is not None:
                    rows, self._plan = self._moved(self._plan, base), None
                yield collator([(spec, _rows_of(spec, rows))])
        finally:
            sampler.planner = planned
            self.close()

    def _plans(
        self, sampler: BalancedBatchSampler, gate: Gate, windows: Iterable[Window], solver: Solver
    ) -> Iterator[tuple[StepPlan, float]]:
        """The plans of an epoch's steps, each made once its exchange is permitted."""
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
            begin = time.perf_counter()
            self._plan = solver(window)
            seconds = time.perf_counter() - begin
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
            row = self._held[int(epoch[at]), int(part[at]), int(ordinal[at])]
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
        self._held = {key: _owned(self._held[key]) for key in kept if key in self._held}


def _found(reader: StreamReader, parts: list[int]) -> Iterator[Found]:
    """What visits of these parts find; a part that is over stays so."""
    over = set[int]()
    for part in parts:
        found = End() if part in over else reader.take(part)
        if isinstance(found, End):
            over.add(part)
        yield found


def _told_error(error: Exception) -> dict[str, Any]:
    return {"error": str(error), "document": isinstance(error, ValueError)}


def _raise_first(notes: list[dict[str, Any]], own: Exception | None) -> None:
    """Raise the error that the first rank tells, on all ranks alike; it is the cause on the rank that had it."""
    told = next((each for each in notes if "error" in each), None)
    if told is not None:
        raise (ValueError if told["document"] else RuntimeError)(told["error"]) from own


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
