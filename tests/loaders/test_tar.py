"""Reading tar shards by offset: any document, in any order, from any process; shards that change under the reader."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from equipoise.loaders import tar, tar_read
from equipoise.loaders.tar import TarShards
from equipoise.loaders.tar_index import index_shards
from equipoise.loaders.tar_read import FREE, SMALLEST, Buffers, Handle, read_range
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loaders.archives import npy, tar_bytes, write_shard


def documents(count: int, first: int = 0) -> list[np.ndarray]:
    return [np.full(3 + at % 5, first + at, np.uint16) for at in range(count)]


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Three shards of 4, 5 and 6 documents; document n holds only n."""
    return [
        write_shard(tmp_path / f"{at}.tar", documents(4 + at, first), first) for at, first in ((0, 0), (1, 4), (2, 9))
    ]


@pytest.fixture
def source(shards: list[Path], tmp_path: Path) -> TarShards:
    return TarShards(index_shards(shards, tmp_path / "index"))


def values(source: TarShards, wanted: list[int]) -> list[int]:
    """What each of the documents holds."""
    ids = source.rows(wanted)["input_ids"]
    assert all((each == each[0]).all() for each in ids)
    return [int(each[0]) for each in ids]


# Documents, not shards


def test_three_shards_give_every_document_to_whoever_asks(source: TarShards) -> None:
    """4, 5 and 6 documents for 2 ranks of 4 workers each: with whole shards it would be 10 against 5."""
    readers = [source] + [pickle.loads(pickle.dumps(source)) for _ in range(7)]
    seen = [document for at, reader in enumerate(readers) for document in values(reader, list(range(at, 15, 8)))]
    assert sorted(seen) == list(range(15))
    assert [len(list(range(rank, 15, 2))) for rank in range(2)] == [8, 7]


def test_going_on_in_the_middle_reads_nothing_before(source: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    inner = tar.read_range
    monkeypatch.setattr(
        tar,
        "read_range",
        lambda handle, offset, buffer, late: (read.append((offset, len(buffer))), inner(handle, offset, buffer, late)),
    )
    assert values(source, [13, 14]) == [13, 14]
    begin = 4 * 1024  # four documents of the last shard lie before, a header of 512 and an npy of 136 bytes each
    assert len(read) == 1 and read[0][0] >= begin and read[0][1] < 2048


def test_a_source_as_people_see_it(source: TarShards, tmp_path: Path) -> None:
    assert len(source) == 15 and source.column_names == ["input_ids"]
    assert source[0]["input_ids"].tolist() == [0, 0, 0] and source[-1]["input_ids"].dtype == np.uint16
    assert source.lengths().tokens.tolist() == [
        len(ids) for first, n in ((0, 4), (4, 5), (9, 6)) for ids in documents(n, first)
    ]
    assert source.keys([14, 0]) == ["000014", "000000"]
    assert source.rows([]) == {"input_ids": []} and source.keys([]) == []
    assert "15 documents, 71 tokens in 3 shards of 30,720 bytes; columns input_ids" in source.describe()
    for outside in (15, -16):
        with pytest.raises(IndexError, match="numbered 0 … 14"):
            source[outside]
    with pytest.raises(IndexError, match="numbered 0 … 14; got -1"):
        source.rows([0, -1])
    (tmp_path / "more.tar").write_bytes(
        tar_bytes([("README", b"x"), ("__meta__/a.npy", b"x"), ("0.npy", npy(np.arange(3)))])
    )
    assert "; 2 files without a key" in TarShards(index_shards(tmp_path / "more.tar", tmp_path / "more")).describe()
    (tmp_path / "none.tar").write_bytes(tar_bytes([]))
    none = TarShards(index_shards(tmp_path / "none.tar", tmp_path / "none"))
    assert (
        len(none) == 0
        and len(none.lengths()) == 0
        and none.rows([]) == {"input_ids": []}
        and "0 documents" in none.describe()
    )


# Reading


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_are_what_was_written(data: st.DataObject) -> None:
    """Whatever the sizes, gaps, order and repeats; and what was read before stays as it was."""
    sizes = st.integers(0, 60) | st.integers(5000, 60_000)
    lengths = data.draw(st.lists(sizes, min_size=1, max_size=12))
    kinds = data.draw(st.lists(st.sampled_from(["u2", "i4", "i8"]), min_size=len(lengths), max_size=len(lengths)))
    gaps = data.draw(st.lists(st.sampled_from([0, 700, 20_000]), min_size=len(lengths), max_size=len(lengths)))
    first = data.draw(st.integers(0, len(lengths)))
    rng = np.random.default_rng(0)
    truth = [rng.integers(0, 60_000, n).astype(kind) for n, kind in zip(lengths, kinds, strict=True)]
    members = [
        [(f"{at}.txt", str(at).encode()), (f"{at}.npy", npy(ids)), (f"{at}.jpg", bytes(gap))]
        for at, (ids, gap) in enumerate(zip(truth, gaps, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, "a.tar"), Path(folder, "b.tar")]
        for path, part in zip(paths, (members[:first], members[first:]), strict=True):
            path.write_bytes(tar_bytes([member for sample in part for member in sample]))
        source = TarShards(index_shards(paths, Path(folder, "index"), columns=["txt"]))
        held = []
        for _ in range(3):
            order = data.draw(st.lists(st.integers(0, len(truth) - 1), max_size=20))
            held.append((order, source.rows(order)))
        for order, rows in held:
            assert rows["txt"] == [str(document) for document in order]
            for document, ids in zip(order, rows["input_ids"], strict=True):
                assert ids.dtype == truth[document].dtype and np.array_equal(ids, truth[document]) and ids.flags.aligned


def test_neighbours_are_read_at_once_and_distant_ones_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [np.arange(16_000, dtype=np.uint16) + at for at in range(100)]  # 32 KB each, 3.2 MB
    source = TarShards(index_shards(write_shard(tmp_path / "a.tar", ids), tmp_path / "index"))
    read = []
    inner = tar.read_range
    monkeypatch.setattr(
        tar, "read_range", lambda handle, at, buffer, late: (read.append(len(buffer)), inner(handle, at, buffer, late))
    )
    for order in (range(100), [*reversed(range(100))]):
        read.clear()
        rows = source.rows(list(order))["input_ids"]
        assert len(read) == 1 and read[0] < 100 * 33_000
        assert all(np.array_equal(row, ids[document]) for row, document in zip(rows, order, strict=True))
    assert np.shares_memory(rows[10].base, rows[11].base)
    read.clear()
    source.rows([0, 3, 4, 6])
    assert len(read) == 3 and sum(read) < 4 * 33_000


def test_reads_are_announced_once_and_only_where_one_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [np.arange(16_000, dtype=np.uint16) + at for at in range(120)]
    source = TarShards(index_shards(write_shard(tmp_path / "a.tar", ids), tmp_path / "index"))
    read, announced, waiting = [], [], False
    inner = tar.read_range

    def reading(handle, offset, buffer, late):
        read.append((offset, len(buffer)))
        if waiting:
            late()
        inner(handle, offset, buffer, lambda: None)

    monkeypatch.setattr(tar, "read_range", reading)
    monkeypatch.setattr(Handle, "announce", lambda handle, offset, size: announced.append((offset, size)))
    wanted = list(range(0, 120, 3))  # more than are announced at once
    source.rows(wanted)
    assert len(read) == len(wanted) > tar.AHEAD and not announced
    read.clear()
    waiting = True
    source.rows(wanted)
    assert announced == read[1:]


def test_a_read_falls_back_where_the_file_cannot_tell_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)))
    status, late = os.stat(tmp_path / "file"), []
    handle = Handle(str(tmp_path / "file"), status.st_size, status.st_mtime_ns)
    monkeypatch.setattr(tar_read, "_AT_ONCE", 1 << 30)  # a flag that no kernel knows
    buffer = np.zeros(50, np.uint8)
    read_range(handle, 100, buffer, lambda: late.append(True))
    assert late == [True] and buffer.tolist() == list(range(100, 150))
    with pytest.raises(ValueError, match="50 bytes are due at byte 170, and the file has 30"):
        read_range(handle, 170, buffer, lambda: None)


def test_buffers_come_back_when_nothing_is_held_in_them() -> None:
    buffers = Buffers()
    first = buffers.take(100_000)
    first[:] = 1
    part = first[100:200].view(np.uint16)[10:20].reshape(2, 5).T
    del first
    second = buffers.take(100_000)
    second[:] = 2
    assert (part == 257).all()  # not handed out again
    del part
    third = buffers.take(90_000)
    assert (third == 1).all() and len(third) == 90_000  # it is the first
    for size in (0, 100, SMALLEST - 1, SMALLEST, 131_072, 131_073, FREE, FREE + 1):
        assert len(buffers.take(size)) == size


# Processes and handles


def test_a_spawned_process_reads(source: TarShards) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        rows = pool.apply(source.rows, ([14, 0, 7],))
    assert [int(ids[0]) for ids in rows["input_ids"]] == [14, 0, 7]


def test_it_pickles_small_and_the_index_must_stay(source: TarShards, shards: list[Path], tmp_path: Path) -> None:
    source[3]
    blob = pickle.dumps(source)
    assert len(blob) < 400 + len(source.path)
    index_shards(shards[:2], tmp_path / "index")
    with pytest.raises(ValueError, match="no sound index .its checksum is"):
        pickle.loads(blob)[0]
    assert values(source, [14]) == [14]  # mapped already: the file that was


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_a_thousand_sources_leave_no_descriptor(source: TarShards) -> None:
    source[0]
    before = num_descriptors()
    gc.disable()  # nothing may wait for the collector of cycles
    try:
        for _ in range(1000):
            TarShards(source.path)[7]
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()


def test_descriptors_are_bounded_and_closed(tmp_path: Path) -> None:
    paths = [write_shard(tmp_path / f"{at}.tar", documents(1, at)) for at in range(80)]
    source = TarShards(index_shards(paths, tmp_path / "index"))
    before = num_descriptors()
    assert values(source, list(range(80))) == list(range(80))
    assert before < num_descriptors() <= before + tar.MAX_OPEN
    assert source.path in Path("/proc/self/maps").read_text()
    source.close()
    assert num_descriptors() == before and source.path not in Path("/proc/self/maps").read_text()
    assert values(source, [79, 0]) == [79, 0]


# Shards that are not what they were


def test_opening_checks_every_shard(source: TarShards, shards: list[Path], tmp_path: Path) -> None:
    good = shards[1].read_bytes()
    shards[1].write_bytes(good + bytes(512))
    with pytest.raises(ValueError, match="1.tar: the shard had 10240 bytes when it was indexed, and has 10752"):
        TarShards(source.path)
    shards[1].unlink()
    with pytest.raises(ValueError, match="1.tar: the shard is in the index and cannot be opened"):
        TarShards(source.path)
    shards[1].write_bytes(good)
    assert values(TarShards(source.path), [5]) == [5]


def test_shards_move_with_their_index(source: TarShards, shards: list[Path], tmp_path: Path) -> None:
    shutil.copytree(tmp_path, tmp_path / "copy")
    for shard in shards:
        shard.unlink()
    moved = TarShards(tmp_path / "copy" / "index")
    assert values(moved, list(range(15))) == list(range(15))
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    assert values(TarShards(tmp_path / "link" / "index"), [3]) == [3]


def test_a_shard_cut_short_in_the_middle_of_an_epoch(source: TarShards, shards: list[Path]) -> None:
    assert values(source, [9]) == [9]  # open
    os.truncate(shards[2], 2 * 1024 + 600)
    assert values(source, [9, 10]) == [9, 10]
    message = r"2.tar: document 11 \(key '000011'\) cannot be read, .* the shard was changed since it was indexed"
    for order in ([11], [9, 10, 11, 12], [14, 12, 11, 2]):
        with pytest.raises(ValueError, match=message):
            source.rows(order)
    with pytest.raises(ValueError, match="2.tar: document 9 .*it had 10240 bytes.*and has 2648"):
        pickle.loads(pickle.dumps(source)).rows([9])
    assert values(source, [0, 8]) == [0, 8]


def test_a_shard_deleted_in_the_middle_of_an_epoch(source: TarShards, shards: list[Path]) -> None:
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"1.tar: document 6 \(key '000006'\) cannot be read, .*No such file"):
        source.rows([0, 6, 14])


def test_a_shard_replaced_in_the_middle_of_an_epoch(source: TarShards, shards: list[Path]) -> None:
    write_shard(shards[1], documents(5, 100))  # of the same size
    os.utime(shards[1], ns=(1, 1))
    with pytest.raises(
        ValueError, match=r"1.tar: document 4 \(key '000004'\).*modified at 1 ns: the shard was changed"
    ):
        source.rows([4])


def test_texts_that_are_not_what_they_were(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "source": "a"}, {"input_ids": [3], "source": "b"}]
    path = tmp_path / "a.tar"
    path.write_bytes(tar_bytes([(f"{at}.json", json.dumps(row).encode()) for at, row in enumerate(rows)]))
    source = TarShards(index_shards(path, tmp_path / "index", tokens="json"))
    assert source[1] == {"input_ids": np.array([3]), "source": "b"}
    for old, new, message in (
        (b'"source": "b"', b'"sauces": "b"', "it holds input_ids, sauces"),
        (b"[3]", b"[3;", "Expecting"),
    ):
        good = path.read_bytes()
        with open(path, "r+b") as file:  # in place, under an open source
            file.write(good.replace(old, new))
        with pytest.raises(
            ValueError, match=rf"a.tar: document 1 \(key '1'\).*its json member is not what it was .*{message}"
        ):
            source[1]
        with open(path, "r+b") as file:
            file.write(good)
