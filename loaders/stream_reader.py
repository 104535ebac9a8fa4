"""StreamReader: reads one rank's parts of a stream, ahead and in the very order in which they are needed.

That order is known: by rounds over the parts that are not over. Each worker process reads some of the parts in that order
into a queue of its own, and the reader takes from the queue whose document is next; so a queue that is full never stands in
the way of one that is needed. torch's ``DataLoader`` does the processes, one each: their start and end, their death, and
waits that are bounded. Documents travel in blocks, a copy and some microseconds each.

``buffer_bytes`` bounds what is read ahead, over all workers; a document larger than a worker's share of a block is delivered
all the same, in a block of its own. What a source itself holds is beside that: a shuffle buffer, a batch of rows per part.
Without workers nothing is read ahead.

    >>> from equipoise.loaders.stream import Stream
    >>> reader = StreamReader(Stream.of([[[1, 2], [3]], [[4]]]), [0, 1], epoch=0, consumed=[1, 0])
    >>> reader.take(1).row, reader.take(0).row, reader.take(1)
    ({'input_ids': array([4])}, {'input_ids': array([3])}, End())
"""

from __future__ import annotations

import heapq
import inspect
import pickle
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from .dataset import ON_ERROR
from .stream import Stream
from .stream_document import Document, End, Failed, document_of
from .wire import Bytes, decode, encode
from .worker import end_with_trainer

Found = Document | Failed | End
Block = tuple[list[tuple[int, tuple[int, int] | Failed | End]], Bytes]
"""Of each part in turn the tokens and targets of its document, or what was found instead; and the documents' columns."""

_AHEAD = 4  # blocks that wait in a worker's queue
_BLOCK = 4 << 20  # bytes of a block, at most
_SECONDS = 0.05  # a block is sent once it is so old, so that a slow source does not hold back what it has given
_FAILURES = 100  # in a row that end a part
_TURN = 1.0  # seconds after which torch looks whether a worker is alive


class StreamReader:
    """Documents of some parts, in the order of the stream; see ``take``.

    Args:
        stream: what to read.
        parts: those that this rank reads.
        epoch: of the stream.
        consumed: documents of each of ``parts`` that were read before: they are read past.
        num_workers: processes; 0 reads in the caller's.
        buffer_bytes: read ahead over all workers, at most.
        timeout: seconds that a worker may take for a document.
        on_error: what cannot be read or trained on is an error (``raise``), or a ``Failed`` in its place (``skip``).
    """

    def __init__(
        self,
        stream: Stream,
        parts: Sequence[int],
        *,
        epoch: int,
        consumed: Sequence[int],
        num_workers: int = 0,
        buffer_bytes: int = 256 << 20,
        timeout: float = 300.0,
        on_error: str = "raise",
    ) -> None:
        _check(parts, consumed, num_workers, buffer_bytes, timeout, on_error)
        self._stream, self._timeout, self._on_error = stream, timeout, on_error
        workers = max(min(num_workers, len(parts)), 1)
        self._queue_of = {part: at % workers for at, part in enumerate(parts)}
        self._next = dict(zip(parts, map(int, consumed), strict=True))
        self._waiting: list[deque[tuple[int, Found]]] = [deque() for _ in range(workers)]
        reads = [
            PartsInTurn(stream, tuple(parts[worker::workers]), tuple(consumed[worker::workers]), epoch, on_error)
            for worker in range(workers)
        ]
        self._processes: list[Iterator[Block]] = []
        self._queues: list[Iterator[Iterable[tuple[int, Found]]]] = [([found] for found in read) for read in reads]
        if num_workers:
            _check_pickles(stream)
            size = min(_BLOCK, max(buffer_bytes // (workers * (_AHEAD + 1)), 1))
            self._processes = [self._started(_Blocks(read, size)) for read in reads]
            self._queues = [map(_unpacked, blocks) for blocks in self._processes]

    def _started(self, blocks: _Blocks) -> Iterator[Block]:
        loader: DataLoader = DataLoader(
            blocks,
            batch_size=None,
            num_workers=1,
            prefetch_factor=_AHEAD,
            collate_fn=_as_it_is,
            timeout=min(self._timeout, _TURN),
            worker_init_fn=end_with_trainer,
            generator=torch.Generator(),  # or workers' seeds would be drawn from the trainer's random numbers
        )
        return iter(loader)

    def take(self, part: int) -> Found:
        """The next document of a part; parts must be asked in the order of the stream, and not behind their end.

        Raises ValueError that names the part and the document where it cannot be read and that is an error, and
        RuntimeError where a worker was killed or nothing came in time; workers are ended then.
        """
        waiting = self._waiting[self._queue_of[part]]
        if not waiting:
            self._fill(part, waiting)
        there, found = waiting.popleft()
        assert there == part, f"part {part} asked for before part {there}"
        if isinstance(found, Failed) and (found.final or self._on_error == "raise"):
            self.close()
            raise ValueError(
                f"document {self._next[part]} of part {part} of the stream ({self._stream.source}) cannot be read: {found.reason}"
            ) from (RuntimeError(found.trace) if found.trace else None)
        self._next[part] += not isinstance(found, End)
        return found

    def _fill(self, part: int, waiting: deque[tuple[int, Found]]) -> None:
        began = time.monotonic()
        while not waiting:
            try:
                waiting.extend(next(self._queues[self._queue_of[part]]))
            except (RuntimeError, OSError, EOFError) as error:  # torch's, of a worker that is dead or slow
                late = str(error).startswith("DataLoader timed out")
                if not late or time.monotonic() - began >= self._timeout:
                    raise self._missing(part, "" if late else f": {error}") from error

    def _missing(self, part: int, reason: str) -> RuntimeError:
        """What to say of a worker that gives no more; all are ended."""
        self.close()
        own = [each for each, queue in self._queue_of.items() if queue == self._queue_of[part]]
        return RuntimeError(
            f"the worker that reads parts {own} of the stream ({self._stream.source}) was killed, or took more than "
            f"{self._timeout:g} s for document {self._next[part]} of part {part}{reason}"
        )

    def close(self) -> None:
        """End the workers."""
        for blocks in self._processes:
            blocks._shutdown_workers()  # type: ignore[attr-defined]  # what ``del`` does, but an error's traceback holds it
        self._processes, self._queues = [], []


def _check(
    parts: Sequence[int], consumed: Sequence[int], num_workers: int, buffer_bytes: int, timeout: float, on_error: str
) -> None:
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error must be one of {', '.join(ON_ERROR)}; got {on_error!r}")
    if num_workers < 0 or buffer_bytes < 1 or not timeout > 0:
        raise ValueError(
            f"a stream is read with num_workers >= 0, buffer_bytes >= 1 and timeout > 0 s; got {num_workers}, {buffer_bytes} "
            f"and {timeout}"
        )
    if len(consumed) != len(parts):
        raise ValueError(f"consumed is one number for each of {len(parts)} parts; got {len(consumed)}")


def _check_pickles(stream: Stream) -> None:
    try:
        pickle.dumps(stream)
    except Exception as error:
        raise ValueError(
            f"a stream that workers read must pickle ({type(error).__name__}: {error}): open it with functions defined at the top "
            f"of a module, or use num_workers=0"
        ) from error


def _as_it_is(block: Any) -> Any:
    return block


def _unpacked(block: Block) -> Iterator[tuple[int, Found]]:
    entries, data = block
    columns, at = list(decode(data).items()), 0
    for part, found in entries:
        if isinstance(found, tuple):
            yield part, Document({name: values[at] for name, values in columns}, *found)
            at += 1
        else:
            yield part, found


class _Blocks(IterableDataset):
    """What a worker reads, in blocks of documents with the same columns and at most ``size`` bytes or one document."""

    def __init__(self, reads: PartsInTurn, size: int) -> None:
        self.reads, self.size = reads, size

    def __iter__(self) -> Iterator[Block]:
        entries: list[tuple[int, tuple[int, int] | Failed | End]] = []
        rows: dict[str, list[Any]] = {}
        held, since, kinds = 0, time.monotonic(), None
        for part, found in self.reads:
            size, columns = (found.nbytes, found.columns) if isinstance(found, Document) else (0, kinds)
            if entries and (held + size > self.size or (rows and columns != kinds)):
                yield entries, encode(rows)
                entries, rows, held, since = [], {}, 0, time.monotonic()
            if isinstance(found, Document):
                for name, value in found.row.items():
                    rows.setdefault(name, []).append(value)
            entries.append((part, (found.tokens, found.targets) if isinstance(found, Document) else found))
            held, kinds = held + size, columns
            if time.monotonic() - since > _SECONDS:
                yield entries, encode(rows)
                entries, rows, held, since = [], {}, 0, time.monotonic()
        if entries:
            yield entries, encode(rows)


class PartsInTurn:
    """Documents, failures and ends of some parts, in the order of the stream: by ordinal, then by part."""

    def __init__(
        self, stream: Stream, parts: tuple[int, ...], consumed: tuple[int, ...], epoch: int, on_error: str
    ) -> None:
        self.stream, self.parts, self.consumed, self.epoch, self.on_error = stream, parts, consumed, epoch, on_error

    def __iter__(self) -> Iterator[tuple[int, Found]]:
        readers = {
            part: _Part(self.stream, part, self.epoch, consumed, self.on_error)
            for part, consumed in zip(self.parts, self.consumed, strict=True)
        }
        turns = [(consumed, part) for part, consumed in zip(self.parts, self.consumed, strict=True)]
        heapq.heapify(turns)
        while turns:
            ordinal, part = turns[0]
            found = readers[part].next()
            yield part, found
            if isinstance(found, End) or (isinstance(found, Failed) and found.final):
                heapq.heappop(turns)
                del readers[part]
            else:
                heapq.heapreplace(turns, (ordinal + 1, part))


class _Part:
    """One part of a stream while it is read."""

    def __init__(self, stream: Stream, part: int, epoch: int, consumed: int, on_error: str) -> None:
        self._stream, self._part, self._epoch, self._on_error = stream, part, epoch, on_error
        self._left = consumed  # to be read past
        self._documents: Iterator[Any] | None = None
        self._failed = 0  # in a row

    def next(self) -> Found:
        try:
            found: Found = document_of(self._read(), self._stream.columns)
        except StopIteration:
            return End()
        except Exception as error:  # whatever the source raises, it is this part's
            return self._failure(error)
        self._failed = 0
        return found

    def _read(self) -> Any:
        if self._documents is None:
            self._documents = iter(())  # a part that does not open is over
            try:
                self._documents, self._left = self._stream.documents(self._part, self._epoch, self._left)
            except Exception as error:
                raise ValueError(f"the part does not open: {type(error).__name__}: {error}") from error
        pass_over = getattr(self._documents, "pass_over", self._documents.__next__)
        while self._left:
            self._left -= 1
            try:
                pass_over()
            except StopIteration:
                raise
            except Exception:
                if self._on_error == "raise":
                    raise
        return next(self._documents)

    def _failure(self, error: Exception) -> Failed:
        self._failed += 1
        over = inspect.isgenerator(self._documents) and self._documents.gi_frame is None
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if over:
            reason += "; the part ends here, for its iterator does"
        if self._failed == _FAILURES:
            reason += f"; {_FAILURES} in a row have failed"
        return Failed(reason, "".join(traceback.format_exception(error)), final=self._failed == _FAILURES)
