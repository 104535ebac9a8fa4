"""Faults of data, readers and workers: one clear error in time, or a document skipped on all ranks; and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from equipoise import BalancedLoader, Lengths, recipe
from equipoise.loaders.stream import Stream
from equipoise.loaders.tar import TarShards
from equipoise.loaders.tar_index import index_shards

from tests.loaders.archives import write_shard

TOKENS = (3, 5, 2, 4, 6, 3, 2, 5, 4, 3, 6, 2)
BAD = 5
"""The document that is at fault."""


def make(dataset: object, **options) -> BalancedLoader:
    defaults = {"max_tokens_per_rank": 12, "dp": 1, "documents_per_step": 4, "timeout": 60}
    return BalancedLoader(dataset, recipe("vrsp", attend="none"), **{**defaults, **options})


def row(document: int) -> dict:
    """Tokens that tell the document; every third label is masked."""
    ids = 100 * document + np.arange(TOKENS[document])
    return {"input_ids": ids, "labels": np.where(ids % 3, ids, -100), "weights": ids * 0.5, "name": f"n{document}"}


def targets(document: int) -> int:
    return int((row(document)["labels"][1:] != -100).sum())


class Faulty:
    """Twelve documents, of which one is at fault: something else in its place, or what a function does."""

    def __init__(self, fault: object = None, bad: int = BAD) -> None:
        self.fault, self.bad = fault, bad

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, document: int) -> object:
        if document == self.bad and self.fault is not None:
            return self.fault() if callable(self.fault) else {**row(document), **self.fault}  # type: ignore[dict-item]
        return row(document)


def disk_gone() -> None:
    raise OSError("disk gone")


def refused() -> None:
    raise ValueError("no such line")


def no_memory() -> None:
    raise MemoryError


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lost(*names: str) -> dict:
    return {name: value for name, value in row(BAD).items() if name not in names}


N = TOKENS[BAD]
FAULTS: dict[str, object] = {
    "raises": disk_gone,
    "raises without a message": no_memory,
    "refuses": refused,
    "float ids": {"input_ids": np.ones(N)},
    "NaN ids": {"input_ids": np.array([1, np.nan, 2])},
    "bool ids": {"input_ids": np.ones(N, bool)},
    "complex ids": {"input_ids": np.ones(N, complex)},
    "text ids": {"input_ids": ["a", "b", "c"]},
    "one text": {"input_ids": "abc"},
    "no ids": {"input_ids": None},
    "one id": {"input_ids": 7},
    "2-D ids": {"input_ids": np.ones((N, 1), int)},
    "ragged ids": {"input_ids": [[1], [2, 3], 4]},
    "negative id": {"input_ids": np.array([1, -1, 2])},
    "small negative id": {"input_ids": np.array([1, 2, -128], np.int8)},
    "longer than indexed": {"input_ids": np.arange(N + 1), "labels": np.arange(N + 1), "weights": np.ones(N + 1)},
    "shorter than indexed": {"input_ids": np.arange(N - 1), "labels": np.arange(N - 1), "weights": np.ones(N - 1)},
    "empty": {"input_ids": [], "labels": [], "weights": []},
    "short labels": {"labels": np.arange(N - 1)},
    "2-D labels": {"labels": np.ones((N, 2), int)},
    "float labels": {"labels": np.ones(N)},
    "NaN labels": {"labels": np.array([1, np.nan, 2])},
    "text labels": {"labels": "abc"},
    "negative label": {"labels": np.array([1, 2, -1])},
    "ragged weights": {"weights": [[1.0], [2.0, 3.0], 4.0]},
    "long weights": {"weights": np.ones(N + 1)},
    "one weight": {"weights": 0.5},
    "column missing": partial(lost, "weights"),
    "column too many": {"more": 1},
    "name is an array": {"name": np.arange(N)},
}
CASES = [*((name, 0) for name in FAULTS), *((name, 1) for name in ("raises", "NaN ids", "longer than indexed"))]


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """What there is already is left out of collections, of which there are many here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def left() -> tuple[int, set[int], int, set[str]]:
    """Threads, child processes, descriptors and shared memory of this process."""
    gc.collect()
    multiprocessing.active_children()  # reaps those that have ended
    children = set[int]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            children |= set(map(int, (task / "children").read_text().split()))
    return threading.active_count(), children, len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))


def assert_left(before: tuple, seconds: float = 30) -> None:
    """No more threads, processes, descriptors or shared memory than before; what was told to end may take a moment."""
    end = time.monotonic() + seconds
    while True:
        now = left()
        ours = {name for name in now[3] - before[3] if name.startswith(("torch", "equipoise", "psm"))}
        if now[0] <= before[0] and now[1] <= before[1] and now[2] <= before[2] and not ours:
            return
        assert time.monotonic() < end, f"before {before[:3]}, now {now[:3]}, shared memory {ours}"
        time.sleep(0.02)


# Documents at fault


@pytest.mark.parametrize(("name", "num_workers"), CASES)
def test_a_document_at_fault_is_an_error_that_names_it(name: str, num_workers: int) -> None:
    before = left()
    loader = make(Faulty(FAULTS[name]), lengths=Lengths.from_array(TOKENS), num_workers=num_workers)
    with pytest.raises((ValueError, RuntimeError), match=rf"document {BAD}\b"):
        list(loader)
    loader.close()
    assert_left(before)


@pytest.mark.parametrize(("name", "num_workers"), CASES)
def test_a_document_at_fault_is_skipped_and_told(name: str, num_workers: int) -> None:
    before = left()
    loader = make(Faulty(FAULTS[name]), lengths=Lengths.from_array(TOKENS), num_workers=num_workers, on_error="skip")
    steps: dict[int, list] = {}
    for batch in loader:
        steps.setdefault(batch.step, []).append(batch)
        check_tokens(batch)
    loader.close()
    assert list(loader.skipped) == [BAD] and loader.skipped[BAD]
    read = sorted(d for step in steps.values() for batch in step for d in batch.documents.tolist() if d >= 0)
    assert read == [d for d in range(len(TOKENS)) if d != BAD]
    for step in steps.values():
        there = {d for batch in step for d in batch.documents.tolist() if d >= 0}
        assert {batch.num_targets_step for batch in step} == {sum(map(targets, there))}
        assert sum(batch.num_targets for batch in step) == step[0].num_targets_step
    assert_left(before)


def check_tokens(batch) -> None:
    """Every token is its own document's with its own label, or a filler's without one."""
    documents = batch.documents.numpy()[batch.doc_ids.numpy()]
    real, labels = documents >= 0, batch.labels.numpy()
    ids, position = batch.input_ids.numpy(), batch.position_ids.numpy()
    assert (ids == np.where(real, 100 * documents + position, 0)).all()
    ends = position + 1 == np.array(TOKENS)[documents]
    assert (labels == np.where(real & ~ends & ((ids + 1) % 3 > 0), ids + 1, -100)).all()
    assert batch.num_targets == (labels != -100).sum()


@pytest.mark.parametrize("fault", [{"more": 1}, partial(lost, "weights"), {"weights": 0.5}])
def test_a_first_document_with_columns_of_its_own_is_skipped_and_no_other(fault: object) -> None:
    """What columns there are is what most documents say, not the first one."""
    lengths = Lengths.from_array(TOKENS)
    data = Faulty(fault if callable(fault) else {**row(0), **fault}, bad=0)  # type: ignore[dict-item]
    loader = make(data, lengths=lengths, on_error="skip")
    read = {document for batch in loader for document in batch.documents.tolist()}
    assert list(loader.skipped) == [0] and read - {-1} == set(range(1, len(TOKENS)))
    with pytest.raises(ValueError, match=r"document 0\b"):
        list(make(data, lengths=lengths))


class Many(Faulty):
    """Asked for several documents at once."""

    def __getitems__(self, documents: list[int]) -> list:
        return [self[document] for document in documents]


@pytest.mark.parametrize("fault", [disk_gone, refused])
def test_a_document_that_spoils_what_is_read_with_it_is_named(fault: Callable[[], None]) -> None:
    """What a dataset raises for many at once tells of none: they are asked for one by one."""
    loader = make(Many(fault), lengths=Lengths.from_array(TOKENS))
    with pytest.raises((ValueError, RuntimeError), match=rf"document {BAD} could not be read: \w+: (disk|no such)"):
        list(loader)
    loader.close()


def test_a_document_that_cannot_be_measured_is_told_too() -> None:
    """Without an index every document is read once; one that fails then has no length, and is no less lost."""
    loader = make(Faulty(disk_gone), on_error="skip")
    seen = [d for batch in loader for d in batch.documents.tolist() if d >= 0]
    assert sorted(seen) == [d for d in range(len(TOKENS)) if d != BAD]
    assert list(loader.skipped) == [BAD] and "disk gone" in loader.skipped[BAD]
    with pytest.raises(RuntimeError, match=f"document {BAD} could not be read: OSError: disk gone"):
        make(Faulty(disk_gone))


class Hopeless(Faulty):
    """Nothing can be read."""

    def __getitem__(self, document: int) -> object:
        raise OSError(f"no {document}")


def test_an_epoch_of_nothing_but_faults_is_an_epoch_without_targets() -> None:
    loader = make(Hopeless(), lengths=Lengths.from_array(TOKENS), on_error="skip")
    loader.dataset.__dict__["has_labels"] = False
    for batch in loader:
        assert batch.num_targets == batch.num_targets_step == 0 and batch.loss_scale() == 0.0
        assert (batch.labels == -100).all()
    assert sorted(loader.skipped) == list(range(len(TOKENS)))


# Workers and readers


def test_a_killed_worker_is_an_error_in_time_and_the_loader_can_be_iterated_again() -> None:
    before, others = left(), set(multiprocessing.active_children())
    loader = make(Faulty(), num_workers=2, ahead=1, prefetch_factor=1, max_tokens_per_rank=6)
    batches = iter(loader)
    next(batches)
    for process in set(multiprocessing.active_children()) - others:  # not the ranks of other tests
        process.kill()
    del process, others
    with pytest.raises(RuntimeError, match="worker .*killed"):
        list(batches)
    loader.close()
    del batches
    assert_left(before)
    loader.set_epoch(0)
    assert sorted(d for batch in loader for d in batch.documents.tolist() if d >= 0) == list(range(len(TOKENS)))
    loader.close()
    assert_left(before)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_document_that_kills_its_worker_is_an_error(on_error: str) -> None:
    before = left()
    loader = make(Faulty(killed), lengths=Lengths.from_array(TOKENS), num_workers=1, on_error=on_error)
    with pytest.raises(RuntimeError, match="worker .*killed"):
        list(loader)
    loader.close()
    assert_left(before)


RELEASE = threading.Event()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a worker that does not end five seconds before it is killed."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)


def slow() -> dict:
    RELEASE.wait(60)
    return row(BAD)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.usefixtures("impatient")
def test_a_slow_reader_is_an_error_in_time(num_workers: int, on_error: str) -> None:
    """In a worker it is ended; in the trainer's process the thread ends with what it waits for."""
    list(make(Faulty()))  # whatever is to be compiled is so
    before = left()
    RELEASE.clear()
    loader = make(
        Faulty(slow), lengths=Lengths.from_array(TOKENS), num_workers=num_workers, on_error=on_error, timeout=1
    )
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out|took more than 1 s|no micro-batch came for 1 s"):
        list(loader)
    assert time.monotonic() - began < 50
    with suppress(RuntimeError):
        loader.close()
    RELEASE.set()
    loader.close()
    assert_left(before)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.usefixtures("impatient")
def test_a_slow_stream_is_an_error_in_time(num_workers: int) -> None:
    before = left()
    RELEASE.clear()
    loader = make(Stream(open=slow_part, num_parts=2), num_workers=num_workers, timeout=1)
    with pytest.raises(
        RuntimeError, match=r"took more than 0.5 s for document 2 of part 1|no micro-batch came for 1 s"
    ):
        list(loader)
    RELEASE.set()
    loader.close()
    assert_left(before)


def slow_part(part: int, epoch: int):
    yield from (row(document) for document in range(2))
    if part == 1:
        RELEASE.wait(60)
    yield row(2)


# Shards that change under the reader


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two shards of 40 documents of eight tokens; document n holds only n."""
    each = [np.full(8, document, np.uint16) for document in range(80)]
    return [write_shard(tmp_path / f"{at}.tar", each[40 * at : 40 * at + 40], 40 * at) for at in range(2)]


def delete(shards: list[Path]) -> None:
    shards[1].unlink()


def truncate_unopened(shards: list[Path]) -> None:
    os.truncate(shards[1], shards[1].stat().st_size // 2)


def truncate_open(shards: list[Path]) -> None:
    os.truncate(shards[0], 30 * 1024 + 600)  # in the data of document 30


def replace_by_another(shards: list[Path]) -> None:
    content = shards[1].read_bytes()
    shards[1].unlink()
    shards[1].write_bytes(content)


def from_tar(shards: list[Path], **options) -> BalancedLoader:
    source = TarShards(index_shards(shards, shards[0].parent / "index"))
    defaults = {"max_tokens_per_rank": 16, "shuffle": False, "ahead": 1, "plan_ahead": 1, "documents_per_step": 2}
    return make(source, **{**defaults, **options})


HARM = {delete: 40, truncate_unopened: 40, truncate_open: 30, replace_by_another: 40}
"""What happens to the shards, and the first document that is lost."""


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("harm", HARM)
def test_a_shard_that_changes_in_mid_epoch_is_an_error_that_names_document_and_shard(
    shards: list[Path], harm, num_workers: int
) -> None:
    before = left()
    loader = from_tar(shards, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    harm(shards)
    with pytest.raises(ValueError, match=rf"{HARM[harm] // 40}\.tar: document {HARM[harm]} \(key '0000{HARM[harm]}'\)"):
        list(batches)
    loader.close()
    del loader, batches
    assert_left(before)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("harm", HARM)
def test_documents_of_a_shard_that_changes_are_skipped(shards: list[Path], harm, num_workers: int) -> None:
    before = left()
    loader = from_tar(shards, num_workers=num_workers, on_error="skip")
    seen, targets = list[int](), 0
    for batch in loader:
        if not seen:
            harm(shards)
        there = [d for d in batch.documents.tolist() if d >= 0]
        seen, targets = seen + there, targets + batch.num_targets_step * batch.is_last_slot
        assert batch.num_targets_step == batch.num_targets == 7 * len(there) == (batch.labels != -100).sum()
    gone = list(range(30, 40)) if harm is truncate_open else list(range(40, 80))
    assert sorted(loader.skipped) == gone and all("was changed" in reason for reason in loader.skipped.values())
    assert sorted(seen) == [d for d in range(80) if d not in gone] and targets == 7 * (80 - len(gone))
    loader.close()
    del loader
    assert_left(before)


# Ranks


class OnRank(Faulty):
    """A dataset whose disk is gone on one rank only."""

    def __init__(self, rank: int, failing: tuple[int, ...], bad: tuple[int, ...]) -> None:
        super().__init__()
        self.lost = bad if rank in failing else ()

    def __getitem__(self, document: int) -> object:
        return disk_gone() if document in self.lost else super().__getitem__(document)


def skipping(rank: int, world: int, failing: tuple[int, ...], num_workers: int) -> tuple[list[tuple], dict]:
    """(step, slot, documents, targets here, targets told, documents with a label here) of each micro-batch; what was skipped."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # ranks here may have workers
    loader = make(
        OnRank(rank, failing, (1, BAD, 8)),
        lengths=Lengths.from_array(TOKENS),
        dp=2,
        cp=2,
        rank=rank,
        max_tokens_per_rank=6,
        num_workers=num_workers,
        on_error="skip",
    )
    seen = []
    for batch in loader:
        check_tokens(batch)
        labelled = {int(n) for n in batch.documents[batch.doc_ids.long()[batch.labels != -100]]}
        seen.append(
            (batch.step, batch.slot, batch.documents.tolist(), batch.num_targets, batch.num_targets_step, labelled)
        )
    loader.close()
    return seen, loader.skipped


@pytest.mark.parametrize(("failing", "num_workers"), [((1,), 0), ((2,), 1), ((0, 1, 2, 3), 0)])
def test_what_one_rank_cannot_read_is_skipped_by_its_whole_group(ranks, failing: tuple, num_workers: int) -> None:
    """dp 2 x cp 2: the pack holds a filler on both ranks, and the step's targets are those of the documents that are left."""
    told = ranks.run(skipping, 4, failing, num_workers)
    groups = [told[:2], told[2:]]
    reached: set[int] = set()
    for first, second in groups:
        assert [row[:3] for row in first[0]] == [row[:3] for row in second[0]] and set(first[1]) == set(second[1])
        assert set(first[1]) <= {1, BAD, 8}
        reached |= set(first[1])
    assert reached and (len(failing) < 4 or reached == {1, BAD, 8})
    assert all("disk gone" in reason or "another rank" in reason for _, lost in told for reason in lost.values())
    rows = [row for seen, _ in told for row in seen]
    for step in {row[0] for row in rows}:
        there = {d for row in rows if row[0] == step for d in row[2] if d >= 0}
        assert {row[4] for row in rows if row[0] == step} == {sum(map(targets, there))}
        assert sum(row[3] for row in rows if row[0] == step) == sum(map(targets, there))
    assert {d for row in rows for d in row[2] if d >= 0} == set(range(len(TOKENS))) - reached
    assert not reached & {d for row in rows for d in row[5]}


def part_on_rank(part: int, epoch: int, here: int, failing: int):
    """Documents 6 * part …, of which the second cannot be trained on, if this is the rank."""
    for document in range(6 * part, 6 * part + 6):
        bad = here == failing and document % 6 == 1
        yield {**row(document), "input_ids": np.full(TOKENS[document], -1)} if bad else row(document)


def streaming(rank: int, world: int, on_error: str) -> tuple[list[tuple], dict] | str:
    source = Stream(open=partial(part_on_rank, here=rank, failing=1), num_parts=2)
    loader = make(source, dp=2, cp=2, rank=rank, max_tokens_per_rank=6, on_error=on_error)
    seen = []
    try:
        for batch in loader:
            ids = set((batch.input_ids[batch.documents[batch.doc_ids.long()] >= 0] // 100).tolist())
            seen.append((batch.step, batch.num_targets, batch.num_targets_step, ids))
    except ValueError as error:
        return str(error)
    finally:
        loader.close()
    return seen, loader.skipped


def test_what_one_rank_cannot_read_of_a_stream_is_skipped_on_all(ranks) -> None:
    told = ranks.run(streaming, 4, "skip")
    assert {str(lost) for _, lost in told} == {"{(0, 1, 1): 'it holds the token id -1, below 0'}"}
    rows = [row for seen, _ in told for row in seen]
    assert set[int]().union(*(row[3] for row in rows)) == set(range(12)) - {7}
    for step in {row[0] for row in rows}:
        there = set[int]().union(*(row[3] for row in rows if row[0] == step))
        assert {row[2] for row in rows if row[0] == step} == {sum(map(targets, there))}
        assert sum(row[1] for row in rows if row[0] == step) == sum(map(targets, there))
    errors = ranks.run(streaming, 4, "raise")
    assert set(errors) == {errors[0]} and "document 1 of part 1 of the stream" in errors[0]


# A thousand loaders


def one_part(part: int, epoch: int):
    yield from map(row, range(len(TOKENS)))


def test_a_thousand_loaders_leave_nothing_behind(shards: list[Path]) -> None:
    """From lists, shards and streams; of every ten one is read from, and then closed, left or dropped with its iteration."""
    tar = TarShards(index_shards(shards, shards[0].parent / "index"))
    kinds = [
        lambda **options: make(Faulty(), lengths=Lengths.from_array(TOKENS), **options),
        lambda **options: make(tar, max_tokens_per_rank=16, **options),
        lambda **options: make(Stream(open=one_part, num_parts=2), **options),
    ]

    def build(number: int) -> None:
        loader = kinds[number % 3](num_workers=int(number % 300 == 0))
        if number % 10 == 0:
            batches = iter(loader)
            next(batches)
            if number % 20 == 0:
                loader.close()

    for number in range(0, 60, 5):
        build(number)
    before = left()
    for number in range(1000):
        build(number)
    assert_left(before)


def thirty(rank: int, world: int) -> tuple:
    """What there is before and behind thirty loaders, each with a group of its own; a third of them are read from."""

    def build(number: int) -> None:
        loader = make(Faulty(), lengths=Lengths.from_array(TOKENS), dp=world, rank=rank)
        if number % 3 == 0:
            batches = iter(loader)
            next(batches)
            loader.close()

    for number in range(3):
        build(number)
    before = left()
    for number in range(30):
        build(number)
    assert_left(before)
    return before[0], threading.active_count()


def test_thirty_loaders_of_a_team_free_their_groups(ranks) -> None:
    for before, after in ranks.run(thirty, 2):
        assert after <= before
