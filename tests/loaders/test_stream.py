"""Stream: what opens as parts, and that each part reads the same documents in the same order however it is opened."""

from __future__ import annotations

import io
import lzma
import pickle
import tarfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import webdataset
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from equipoise.loaders.stream import Stream
from equipoise.loaders.stream_document import document_of
from equipoise.loaders.stream_tar import npy_values
from torch.utils.data import DataLoader

ROWS = [{"input_ids": list(range(n, 2 * n)), "name": f"d{n}"} for n in range(1, 24)]


def rows_of(shards: list[int]):
    for shard in shards:
        yield from ROWS[shard::5]


def second(row: dict) -> dict:
    return {**row, "doubled": [2 * token for token in row["input_ids"]]}


def parquet(folder: Path) -> IterableDataset:
    for shard in range(5):
        pq.write_table(pa.Table.from_pylist(ROWS[shard::5]), folder / f"{shard}.parquet", row_group_size=2)
    files = sorted(map(str, folder.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, streaming=True, split="train")


HF = {
    "table": lambda folder: Dataset.from_list(ROWS).to_iterable_dataset(num_shards=5),
    "generator": lambda folder: IterableDataset.from_generator(rows_of, gen_kwargs={"shards": list(range(5))}),
    "parquet": parquet,
    "mapped": lambda folder: Dataset.from_list(ROWS).to_iterable_dataset(num_shards=5).map(second),
    "shuffled": lambda folder: Dataset.from_list(ROWS).to_iterable_dataset(num_shards=5).shuffle(seed=3, buffer_size=4),
    "shuffled generator": lambda folder: HF["generator"](folder).shuffle(seed=3, buffer_size=4),
    "formatted": lambda folder: HF["table"](folder).with_format("torch"),
}


def read(stream: Stream, part: int, epoch: int, skip: int = 0) -> list[list]:
    documents, left = stream.documents(part, epoch, skip)
    read = [document_of(each, stream.columns).row for each in documents][left:]
    return [[value.tolist() if isinstance(value, np.ndarray) else value for value in row.values()] for row in read]


def in_a_worker(read: list) -> list:
    return read[0]


class Parts(torch.utils.data.Dataset):
    def __init__(self, stream: Stream, epoch: int) -> None:
        self.stream, self.epoch = stream, epoch

    def __len__(self) -> int:
        return self.stream.num_parts

    def __getitem__(self, part: int) -> list:
        return read(self.stream, part, self.epoch)


@pytest.mark.parametrize("num_parts", [None, 2])
@pytest.mark.parametrize("kind", HF)
def test_a_hf_stream_gives_each_document_once_from_wherever_it_is_opened(
    kind: str, num_parts: int | None, tmp_path: Path
) -> None:
    """Behind n documents skipped come the others, in any epoch; a worker process reads the order of the main one."""
    stream = Stream.of(HF[kind](tmp_path), num_parts=num_parts)
    assert stream.num_parts == (num_parts or 5)
    orders = []
    for epoch in (0, 1):
        whole = [read(stream, part, epoch) for part in range(stream.num_parts)]
        assert sorted(row[1] for part in whole for row in part) == sorted(row["name"] for row in ROWS)
        assert {(row[1], tuple(row[0])) for part in whole for row in part} == {
            (row["name"], tuple(row["input_ids"])) for row in ROWS
        }
        for part, rows in enumerate(whole):
            for skip in range(len(rows) + 2):
                assert read(stream, part, epoch, skip) == rows[skip:]
        orders.append(whole)
    if kind.startswith("shuffled"):
        assert orders[0] != orders[1]
        loader = DataLoader(Parts(pickle.loads(pickle.dumps(stream)), 1), num_workers=2, collate_fn=in_a_worker)
        assert list(loader) == orders[1]


def test_the_datasets_own_epoch_is_left_alone() -> None:
    dataset = HF["shuffled"](Path())
    read(Stream.of(dataset), 0, epoch=4)
    assert dataset.epoch == 0


def test_columns_are_chosen() -> None:
    stream = Stream.of(HF["mapped"](Path()), columns=["doubled"])
    assert read(stream, 0, 0)[1] == [[2, 3], [4, 6]]
    with pytest.raises(ValueError, match="it has no column 'labels', but 'input_ids', 'name'"):
        read(Stream.of(HF["table"](Path()), columns=["labels"]), 0, 0)


def test_what_ranks_would_read_otherwise_is_refused() -> None:
    table = HF["table"](Path())
    with pytest.raises(ValueError, match=r"without a seed, .* use shuffle\(seed=…\)"):
        Stream.of(table.map(second).shuffle(buffer_size=3))
    with pytest.raises(ValueError, match="was split by node; give the whole of it"):
        Stream.of(split_dataset_by_node(table, rank=0, world_size=2))
    with pytest.raises(ValueError, match=r"num_parts must lie in 1 … 5; got 6"):
        Stream.of(table, num_parts=6)
    with pytest.raises(ValueError, match=r"choose one split of the dataset: dataset\['train'\]"):
        Stream.of(datasets.IterableDatasetDict({"train": table}))


def numbers():
    yield from ([1], [2])


def of_epoch(epoch: int):
    yield [epoch]


class Shifting:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([[self.epoch + n] for n in range(3)])


def test_iterables_and_what_opens_them() -> None:
    stream = Stream.of([numbers, of_epoch, Shifting(), [[5], [6]], HF["generator"](Path())])
    assert [read(stream, part, 7, 1) for part in range(4)] == [[[[2]]], [], [[[8]], [[9]]], [[[6]]]]
    assert len(read(stream, 4, 1)) == len(ROWS)
    assert Stream.of(Shifting()).num_parts == Stream.of(numbers).num_parts == 1
    assert "5 iterables" in stream.source


def test_what_can_be_read_once_only_is_refused() -> None:
    for once in (numbers(), iter([[1]]), map(list, [[1]])):
        with pytest.raises(ValueError, match=r"part 1 is a .*, which can be read once only, .* give a function"):
            Stream.of([[[1]], once])
    with pytest.raises(ValueError, match="part 0 must be an iterable or a function that opens one; got int"):
        Stream.of(3)
    with pytest.raises(ValueError, match="there are 2, and num_parts=3"):
        Stream.of([[[1]], [[2]]], num_parts=3)
    with pytest.raises(ValueError, match="at least 1; got num_parts=0"):
        Stream(open=of_epoch, num_parts=0)


# Tar shards.


def shard(path: Path, names: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, data in names.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def npy(values: object, **options) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(values), **options)
    return out.getvalue()


def samples(first: int, count: int) -> dict[str, bytes]:
    out = {}
    for n in range(first, first + count):
        ids = np.arange(n, dtype=np.uint16)
        out |= {
            f"a/{n:03}.npy": npy(ids),
            f"a/{n:03}.labels.npy": npy(ids),
            f"a/{n:03}.jpg": b"x",
            f"a/{n:03}.txt": b"t%d" % n,
        }
    return out


@pytest.mark.parametrize("num_parts", [None, 2])
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
def test_tar_shards_plain_and_compressed(suffix: str, num_parts: int | None, tmp_path: Path) -> None:
    mode = f"w:{suffix[1:]}" if suffix else "w"
    for at, count in enumerate((4, 5, 6)):
        shard(tmp_path / f"{at}.tar{suffix}", samples(10 * at, count), mode)
    stream = Stream.tar(f"{tmp_path}/{{0..2}}.tar{suffix}", columns=["labels.npy", "txt"], num_parts=num_parts)
    stream = pickle.loads(pickle.dumps(stream))
    expected = [
        [[list(range(n)), list(range(n)), f"t{n}"] for at in shards for n in range(10 * at, 10 * at + 4 + at)]
        for shards in (([0], [1], [2]) if num_parts is None else ([0, 2], [1]))
    ]
    for part, rows in enumerate(expected):
        assert read(stream, part, epoch=0) == rows
        documents, left = stream.documents(part, 0, 3)
        assert left == 3
        for _ in range(3):
            documents.pass_over()  # type: ignore[attr-defined]
        assert document_of(next(documents)).row["txt"] == rows[3][2]


def test_webdataset_finds_the_same_samples(tmp_path: Path) -> None:
    names = {
        "x/1.npy": npy([1]),
        "x/1.other.npy": npy([2]),
        "x/.npy": npy([5]),
        "__meta__": b"",
        "__meta__/2.npy": npy([9]),
        "noextension": b"",
        "y/2.a.npy": npy([3]),
        "y/2.NPY": npy([4]),
        "y/3.npy": npy([]),
    }
    path = shard(tmp_path / "0.tar", names)
    theirs = [sample["__key__"] for sample in webdataset.WebDataset(str(path), shardshuffle=False) if "npy" in sample]
    documents = Stream.tar([path]).open(0, 0)
    ours = [row["input_ids"].tolist() for row in documents]
    assert ours == [[1], [5], [4], []] and len(theirs) == len(ours)


def test_formats_of_members(tmp_path: Path) -> None:
    names = {
        "1.bin": np.arange(3, dtype=np.uint16).tobytes(),
        "1.meta.json": b'{"source": "web", "weights": [0.5, 1, 2]}',
        "1.cls": b"7",
    }
    stream = Stream.tar([shard(tmp_path / "0.tar", names)], tokens="bin", dtype="uint16", columns=["meta.json", "cls"])
    assert read(stream, 0, 0) == [[[0, 1, 2], "web", [0.5, 1.0, 2.0], 7]]
    for wrong in ("pkl", "pyd", "jpg"):
        with pytest.raises(ValueError, match="pickles, which run code|members are read whose extension"):
            Stream.tar([tmp_path / "0.tar"], columns=[wrong])


def failing(path: Path, **options) -> tuple[int, str]:
    """Documents read before the error, and the error."""
    documents, count = iter(Stream.tar([path], **options).open(0, 0)), 0
    with pytest.raises(ValueError) as error:
        for _ in documents:
            count += 1
    return count, str(error.value)


def test_a_shard_that_ends_early_is_an_error_wherever_it_was_cut(tmp_path: Path) -> None:
    """tarfile takes an archive that was cut between two members, or whose header is damaged, for one that is over."""
    whole = shard(tmp_path / "0.tar", samples(3, 4)).read_bytes()
    assert len(whole) % 512 == 0 and not any(whole[16 * 1024 :])
    path = tmp_path / "cut.tar"
    for size in [*range(512, 16 * 1024, 1024), 700, 5000]:
        path.write_bytes(whole[:size])
        count, text = failing(path)
        assert count < 5 and "cut.tar cannot be read on" in text
    path.write_bytes(whole[:8192] + b"\xff" * 512 + whole[8704:])
    assert "header is damaged" in failing(path)[1]
    path.write_bytes(whole + whole)
    assert failing(path) == (4, failing(path)[1]) and "followed by other data" in failing(path)[1]
    packed = lzma.compress(whole)
    path.write_bytes(packed[: len(packed) // 2])
    assert "cannot be read on" in failing(path)[1]


def test_the_next_shard_of_a_part_is_read_behind_one_that_fails(tmp_path: Path) -> None:
    bad = shard(tmp_path / "0.tar", samples(3, 4))
    bad.write_bytes(bad.read_bytes()[:4096])
    documents = Stream.tar([bad, shard(tmp_path / "1.tar", {"9.npy": npy([9])})], num_parts=1).open(0, 0)
    read, failures = [], 0
    iterator = iter(documents)
    while True:
        try:
            read.append(next(iterator)["input_ids"].tolist())
        except StopIteration:
            break
        except ValueError:
            failures += 1
    assert read[-1] == [9] and failures == 1


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">u4", "<i8", "<f4", "?", "<f2"])
def test_npy_members_are_what_numpy_reads(dtype: str) -> None:
    for size in (0, 1, 1000):
        values = np.arange(size).astype(dtype)
        assert np.array_equal(npy_values(npy(values)), values) and npy_values(
            npy(values)
        ).dtype == values.dtype.newbyteorder("=")


def test_hostile_members(tmp_path: Path) -> None:
    huge = npy(np.zeros(3, np.uint16)).replace(b"'shape': (3,), }           ", b"'shape': (999999999999,), }")
    long = npy(np.zeros(3, np.uint16)).replace(b"'shape': (3,)", b"'shape': (999999999999,)")
    for data, text in (
        (huge, "its header tells of 999999999999 x uint16, and 6 bytes are behind it"),
        (long, "its header tells of 999999999999 x uint16, and 17 bytes are behind it"),
        (npy(np.zeros(3)).replace(b"(3,)", b"(4,)"), "its header tells of 4 x float64, and 24 bytes are behind it"),
        (npy(np.zeros(3))[:-8], "its header tells of 3 x float64, and 16 bytes"),
        (npy(np.zeros(3)).replace(b"\x76\x00{", b"\xff\xff{"), "it is no .npy"),
        (npy([[1, 2]]), "one dimension are needed; got int64 of shape"),
        (npy(["a"]), "got <U1"),
        (npy([{}], allow_pickle=True), "got object of shape"),
        (b"\x93NUMPY\x01\x00", "it is no .npy"),
        (b"", "it is no .npy"),
    ):
        with pytest.raises(ValueError, match=text):
            npy_values(data)
        assert "sample '../../7' of" in failing(shard(tmp_path / "0.tar", {"../../7.npy": data}))[1]
    assert "has no member .npy" in failing(shard(tmp_path / "0.tar", {"1.txt": b""}))[1]
    assert not list(tmp_path.parent.glob("7*"))
    with pytest.raises(ValueError, match=r"every shard must be a file; of 2, 1 are not: \['.*missing.tar'\]"):
        Stream.tar([tmp_path / "0.tar", tmp_path / "missing.tar"])
