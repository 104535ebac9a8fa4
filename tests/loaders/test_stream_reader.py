"""StreamReader: the order of the stream from any number of workers, what is refused, and faults that end in one error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from multiprocessing import Value
from pathlib import Path

import numpy as np
import pytest
import torch
from equipoise.loaders.stream import Stream
from equipoise.loaders.stream_document import Document, End, Failed, document_of
from equipoise.loaders.stream_reader import StreamReader
from equipoise.samplers.stream_order import Place
from hypothesis import given, settings
from hypothesis import strategies as st

COUNTS = (4, 5, 6)


def numbered(part: int, count: int, size: int = 3) -> list[dict]:
    return [{"input_ids": [part, n] + [7] * (size - 2), "name": f"{part}.{n}"} for n in range(count)]


def stream(counts: tuple[int, ...] = COUNTS) -> Stream:
    return Stream.of([numbered(part, count) for part, count in enumerate(counts)])


def read(reader: StreamReader, place: Place, parts: list[int], num_parts: int) -> list:
    """All that the parts hold, asked for in the order of the stream."""
    read, over = [], dict(place.ends)
    while any(part not in over for part in parts):
        part, ordinal = (int(of[0]) for of in place.visits(1, num_parts))
        found = reader.take(part) if part in parts else End() if ordinal >= 6 else None
        ends = {part: ordinal} if isinstance(found, End) else {}
        over |= ends
        place = place.behind(1, num_parts, ends)
        if isinstance(found, Document):
            assert found.row["name"] == f"{part}.{ordinal}" and found.row["input_ids"].tolist()[:2] == [part, ordinal]
            assert (found.tokens, found.targets) == (3, 2)
            read.append((part, ordinal))
    reader.close()
    return read


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
def test_the_order_of_the_stream_from_any_number_of_workers(num_workers: int) -> None:
    """B9: three parts of 4, 5 and 6 documents on one reader and on two, from the beginning and from the middle."""
    order = [(p, o) for o in range(6) for p in range(3) if o < COUNTS[p]]
    for parts, place in (
        ([0, 1, 2], Place(epoch=0)),
        ([0, 2], Place(epoch=0)),
        ([1], Place(epoch=0)),
        ([0, 1, 2], Place(epoch=0, round=2, part=1)),
        ([0, 1, 2], Place(epoch=0, round=4, part=2)),
    ):
        consumed = place.consumed(3)[parts]
        reader = StreamReader(stream(), parts, epoch=0, consumed=consumed, num_workers=num_workers, timeout=30)
        assert read(reader, place, parts, 3) == [
            row for row in order if row[0] in parts and row[::-1] >= (place.round, place.part)
        ]


def everything(reader: StreamReader, part: int = 0) -> list:
    found = []
    while not found or not isinstance(found[-1], End):
        found.append(reader.take(part))
    return found


@given(
    sizes=st.lists(st.integers(0, 300), max_size=12),
    block=st.integers(1, 4000),
    kinds=st.lists(st.sampled_from(["uint16", "int32", "int64", "labels", "weights"]), min_size=12, max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_blocks_give_back_what_they_were_made_of(sizes: list[int], block: int, kinds: list[str]) -> None:
    """Whatever the sizes, types and columns: cut into blocks and taken apart, documents are as they were."""
    from equipoise.loaders.stream_reader import PartsInTurn, _Blocks, _unpacked

    rows: list[dict] = []
    for n, kind in zip(sizes, kinds, strict=False):
        ids = np.arange(n, dtype=kind if "int" in kind else "int64")
        extra = {"labels": {"labels": ids}, "weights": {"weights": ids * 0.5, "source": n or None}}.get(kind, {})
        rows.append({"input_ids": ids, **extra})
    reads = PartsInTurn(Stream.of([rows]), (0,), (0,), 0, "raise")
    blocks = list(_Blocks(reads, block))
    found = [found for each in blocks for _, found in _unpacked(each)]
    assert isinstance(found.pop(), End) and len(found) == len(rows)
    for row, document in zip(rows, found, strict=True):
        assert list(row) == list(document.row)
        for name, value in row.items():
            assert np.array_equal(document.row[name], value)
            assert not isinstance(value, np.ndarray) or document.row[name].dtype == value.dtype
    for entries, _ in blocks:
        sizes_here = [document_of(rows.pop(0)).nbytes for _, found in entries if isinstance(found, tuple)]
        assert sum(sizes_here) <= block or len(sizes_here) == 1


BAD = {
    "float64, not integers": [1.0, 2.0],
    "float64, not integers ": [1.0, float("nan")],
    "the token id -3, below 0": [5, -3],
    r"must be a 1-D array; got \(1, 2\)": [[1, 2]],
    "column 'input_ids' is ragged": [[1], [2, 3]],
    "must be a 1-D array; got nothing": {"ids": [1]},
    "column 'mask' has shape": {"input_ids": [1, 2], "mask": [1]},
    "labels must be a list of whole numbers; got int": {"input_ids": [1], "labels": 3},
    "whole numbers below 2": {"input_ids": [1], "labels": [0.5]},
    "below 2.*uint64": np.array([1 << 63], np.uint64),
    "got dict": {"input_ids": [1], "meta": {"a": 1}},
    "got bytes": {"input_ids": [1], "image": b"abc"},
    "got list of <U1": {"input_ids": [1], "tags": ["a"]},
    "bool, not integers": [True, False],
    "got 7|got <U": "text",
    r"1-D array; got \(\)": 7,
}


@pytest.mark.parametrize("reason", BAD)
def test_what_cannot_be_trained_on_is_refused_by_name_or_skipped(reason: str) -> None:
    bad = Stream.of([[[1], BAD[reason], [2, 3]]])
    reader = StreamReader(bad, [0], epoch=0, consumed=[0])
    assert isinstance(reader.take(0), Document)
    with pytest.raises(ValueError, match=f"document 1 of part 0 of the stream .*(?:{reason.strip()}|its token ids)"):
        reader.take(0)
    found = everything(StreamReader(bad, [0], epoch=0, consumed=[0], on_error="skip"))
    assert [type(each) for each in found] == [Document, Failed, Document, End]


def test_what_can_be_trained_on() -> None:
    good = [
        [],
        np.arange(3, dtype=">i4"),
        torch.arange(3),
        (1, 2),
        {"input_ids": [1, 2], "labels": [-100, 2], "score": np.float32(0.5)},
    ]
    assert [document_of(each).tokens for each in good] == [0, 3, 3, 2, 2]
    assert document_of(good[1]).row["input_ids"].dtype == np.int32
    last = document_of(good[4])
    assert (
        last.targets == 1
        and last.row["score"] == 0.5
        and last.columns == {"input_ids": "array", "labels": "array", "score": "value"}
    )
    assert document_of([]).row["input_ids"].dtype == np.int64


def breaking(at: int, count: int = 5):
    for n in range(count):
        if n == at:
            raise OSError("disk gone")
        yield [n]


class Flaky:
    """Raises for every third document and goes on behind it."""

    def __init__(self) -> None:
        self.at = -1

    def __iter__(self) -> Flaky:
        return self

    def __next__(self) -> list[int]:
        self.at += 1
        if self.at == 7:
            raise StopIteration
        if self.at % 3 == 1:
            raise OSError("try the next")
        return [self.at]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exception_of_the_source_comes_in_its_place(num_workers: int) -> None:
    options = {"epoch": 0, "num_workers": num_workers, "timeout": 30}
    reader = StreamReader(Stream.of([partial(breaking, 2)]), [0], consumed=[0], **options)
    assert [reader.take(0).row["input_ids"].tolist() for _ in range(2)] == [[0], [1]]
    with pytest.raises(ValueError, match="document 2 of part 0 .*OSError: disk gone; the part ends here") as error:
        reader.take(0)
    assert "in breaking" in str(error.value.__cause__)
    for consumed in range(8):
        found = everything(StreamReader(Stream.of([Flaky]), [0], consumed=[consumed], on_error="skip", **options))
        there = [n if isinstance(each, Document) else -1 for n, each in enumerate(found[:-1], consumed)]
        assert there == [-1 if n % 3 == 1 else n for n in range(consumed, 7)]
        gone = everything(
            StreamReader(Stream.of([partial(breaking, 2)]), [0], consumed=[consumed], on_error="skip", **options)
        )
        assert len(gone) == max(4 - consumed, 1)
    with pytest.raises(ValueError, match="document 6 of part 0 .*cannot be read: OSError: try the next"):
        StreamReader(Stream.of([Flaky]), [0], consumed=[6], **options).take(0)


def never(epoch: int):
    raise FileNotFoundError("no such bucket")


class Hopeless(Flaky):
    def __next__(self) -> list[int]:
        raise OSError("no")


def test_a_part_that_does_not_open_or_never_gives_anything() -> None:
    found = everything(StreamReader(Stream.of([never]), [0], epoch=0, consumed=[0], on_error="skip"))
    assert [type(each) for each in found] == [Failed, End]
    assert found[0].reason == "the part does not open: FileNotFoundError: no such bucket"
    reader = StreamReader(Stream.of([Hopeless]), [0], epoch=0, consumed=[0], on_error="skip")
    with pytest.raises(ValueError, match="document 99 of part 0 .*100 in a row have failed"):
        everything(reader)


BUILT = multiprocessing.Event()


def killed(epoch: int):
    """Not before the reader is built, or torch tells the main thread of it in the midst of that."""
    yield from ([n] for n in range(3))
    BUILT.wait(30)
    os.kill(os.getpid(), signal.SIGKILL)


def slow(seconds: float):
    yield [1]
    time.sleep(seconds)
    yield [2]


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children()}


def test_a_killed_or_stuck_worker_is_one_error_in_time_and_nothing_stays() -> None:
    """Also while the error is looked at, whose traceback holds all that was there."""
    before, begin, errors = children(), time.monotonic(), []
    BUILT.clear()
    for source, text in ((killed, "killed"), (partial(slow, 2.0), "took more than 0.7 s")):
        reader = StreamReader(
            Stream.of([source, [[1]] * 9]), [0, 1], epoch=0, consumed=[0, 0], num_workers=2, timeout=0.7
        )
        BUILT.set()
        with pytest.raises(
            RuntimeError, match=rf"the worker that reads parts \[0\] .*was {text}|{text} for document"
        ) as error:
            while True:
                reader.take(0)
        errors.append(error)
    while children() - before and time.monotonic() - begin < 10:
        time.sleep(0.05)
    assert not children() - before and len(errors) == 2


def test_a_killed_worker_is_missed_long_before_the_timeout() -> None:
    """Also in a thread, to which torch tells nothing."""
    told = []
    BUILT.set()

    def read() -> None:
        reader = StreamReader(Stream.of([killed]), [0], epoch=0, consumed=[0], num_workers=1, timeout=600)
        try:
            while True:
                reader.take(0)
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    with suppress(RuntimeError):  # what torch tells the main thread
        thread.start()
        thread.join(30)
    thread.join(30)
    assert "was killed" in told[0] and "exited unexpectedly" in told[0]


def endless():
    while True:
        yield [1, 2, 3]


def test_closing_ends_the_workers_though_somebody_holds_what_they_give() -> None:
    """As an error's traceback does, or an iterator that was broken off."""
    before = children()
    reader = StreamReader(Stream.of([endless, endless]), [0, 1], epoch=0, consumed=[0, 0], num_workers=2, timeout=30)
    held = [reader.take(0), reader._processes, reader._queues]
    assert len(children() - before) == 2
    reader.close()
    end = time.monotonic() + 10
    while children() - before:
        assert time.monotonic() < end, "a worker runs on behind close()"
        time.sleep(0.05)
    assert len(held[1]) == 2
    reader.close()  # again: nothing


def trickling():
    for n in range(1000):
        time.sleep(0.06)
        yield [n]


def test_a_slow_source_gives_what_it_has() -> None:
    """A block is not held back until it is full."""
    reader = StreamReader(Stream.of([trickling]), [0], epoch=0, consumed=[0], num_workers=1, timeout=10)
    assert [reader.take(0).row["input_ids"].tolist() for _ in range(3)] == [[0], [1], [2]]
    reader.close()


READ = Value("q", 0)


def counted(size: int, count: int):
    for n in range(count):
        READ.value = n + 1
        yield np.full(size, n)


def test_what_is_read_ahead_is_bounded_in_bytes() -> None:
    """… but a document that is larger than all of it is delivered."""
    buffer = 1 << 20
    for size in (1000, 300_000):
        READ.value = 0
        source = Stream.of([partial(counted, size, 5000)])
        reader = StreamReader(source, [0], epoch=0, consumed=[0], num_workers=1, buffer_bytes=buffer, timeout=30)
        reader.take(0)
        seen, since = 0, time.monotonic()
        while READ.value != seen or time.monotonic() - since < 0.3:
            if READ.value != seen:
                seen, since = READ.value, time.monotonic()
        assert seen * size * 8 <= max(buffer, 7 * size * 8) < 5000 * size * 8
        for n in range(1, 8):
            assert reader.take(0).row["input_ids"][0] == n
        reader.close()


def test_workers_leave_the_trainers_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    reader = StreamReader(stream(), [0, 1, 2], epoch=0, consumed=[0, 0, 0], num_workers=1, timeout=30)
    reader.take(0)
    reader.close()
    assert torch.equal(torch.rand(3), expected)


def test_a_thousand_readers_leave_no_handle(tmp_path: Path) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for n in range(3):
            member = tarfile.TarInfo(f"{n}.json")
            member.size = 3
            tar.addfile(member, io.BytesIO(b"[1]"))
    source = Stream.tar([tmp_path / "0.tar"], tokens="json")
    before = handles()
    for _ in range(1000):
        reader = StreamReader(source, [0], epoch=0, consumed=[1])
        assert isinstance(reader.take(0), Document)
        reader.close()
    del reader
    assert handles() <= before + 1
    for _ in range(3):
        reader = StreamReader(source, [0], epoch=0, consumed=[1], num_workers=1, timeout=30)
        assert isinstance(reader.take(0), Document)
        reader.close()
    gc.collect()
    assert handles() <= before + 8


def test_refusals() -> None:
    source = Stream.of([lambda: iter([[1]])])
    with pytest.raises(ValueError, match="must pickle .* functions defined at the top"):
        StreamReader(source, [0], epoch=0, consumed=[0], num_workers=1)
    assert len(everything(StreamReader(source, [0], epoch=0, consumed=[0]))) == 2
    for wrong in ({"num_workers": -1}, {"buffer_bytes": 0}, {"timeout": 0}):
        with pytest.raises(ValueError, match="num_workers >= 0, buffer_bytes >= 1 and timeout > 0 s"):
            StreamReader(source, [0], epoch=0, consumed=[0], **wrong)
    with pytest.raises(ValueError, match="on_error must be one of raise, skip"):
        StreamReader(source, [0], epoch=0, consumed=[0], on_error="ignore")
    with pytest.raises(ValueError, match="one number for each of 1 parts; got 2"):
        StreamReader(source, [0], epoch=0, consumed=[0, 0])
