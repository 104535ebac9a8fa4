"""StreamTeller: reads one rank's parts of a stream and tells all ranks what it found; all know then what comes next.

Rank r of the group reads parts r, r + world, …. Lengths go to all ranks in one all-gather (``exchange.py``). What cannot be
read is told with them, before anything is planned with it: an error is the same on all ranks, and a document that is skipped
is so on all. No rank waits in an exchange for a reader that is slow: lengths are told in turns of some seconds, as far as they
are known. All documents have the columns of the stream's first. Held in memory are those that were told and not let go, beside
what readers hold ahead (``buffer_bytes``).

    >>> from equipoise.loaders.stream import Stream
    >>> teller = StreamTeller(Stream.of([[[1, 2], [3]], [[4, 5, 6]]]), group=None)
    >>> found = teller.more(Place(epoch=0), 4, None)
    >>> found.tokens.tolist(), found.ends, teller.held[0, 1, 0]
    ([2, 3, 1], {1: 1}, {'input_ids': array([4, 5, 6])})
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist

from ..packing.packs import Int64
from ..samplers.stream_items import FAILED
from ..samplers.stream_order import Arrivals, Place
from .exchange import gather, share, world_of
from .stream import Stream
from .stream_document import Document, End, Failed
from .stream_reader import Found, StreamReader

_ENDED = FAILED - 1
Key = tuple[int, int, int]
"""Where a document was read: epoch of the stream, part, ordinal."""


class StreamTeller:
    """Reads and tells; ``held`` are the documents read here, by where they were read.

    Args:
        stream: what is read, the same on all ranks.
        group: a CPU (gloo) group that nothing else uses at the same time; None: one rank.
        num_workers, buffer_bytes, on_error: see ``StreamReader``.
        timeout: of the group, seconds; a reader is given half of it, so that its error is told before others give up.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        group: dist.ProcessGroup | None,
        num_workers: int = 0,
        buffer_bytes: int = 256 << 20,
        timeout: float = 300.0,
        on_error: str = "raise",
    ) -> None:
        self.stream, self.group = stream, group
        self.held: dict[Key, dict[str, Any]] = {}
        self.failed: dict[Key, str] = {}  # documents that were skipped, on any rank, and why
        self._options = {"num_workers": num_workers, "buffer_bytes": buffer_bytes, "on_error": on_error}
        self._on_error, self._timeout = on_error, timeout
        self._rank, self._world = world_of(group)
        self._reader: StreamReader | None = None
        self._at: Place | None = None  # where the reader stands

    def close(self) -> None:
        """End the workers."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._at = None

    def start(self, place: Place) -> None:
        """Let workers begin to read at a place, if there is anything."""
        if len(place.ends) < self.stream.num_parts:
            self._reader_at(place)

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
            self.held[key] = found.row
        return (found.tokens, found.targets), None


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
