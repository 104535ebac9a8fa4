"""Paths: what is opened is what was written, and what is odd is refused by name; nothing is fetched."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from equipoise import BalancedLoader, recipe
from equipoise.loaders.paths import open_source
from equipoise.loaders.tar import TarShards
from equipoise.loaders.tar_index import index_shards
from equipoise.loaders.token_files import TokenFile

from tests.loaders.archives import write_shard
from tests.loaders.test_token_files import write_megatron

ROWS = [
    {"input_ids": [5, 2**40, 7], "mask": [0, 1, 1], "name": "a", "score": 0.5},
    {"input_ids": [], "mask": [], "name": "b", "score": 1.0},
    {"input_ids": [3], "mask": [1], "name": "c", "score": 2.5},
]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to reach the network fails; datasets caches in this test's folder."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a path was looked for on the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def jsonl(rows: list[dict]) -> bytes:
    return "\n".join(json.dumps(row) for row in rows).encode()


def table(rows: list[dict]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def write(folder: Path, name: str, rows: list[dict] = ROWS) -> Path:
    """One file or folder of every kind, by its ending."""
    path = folder / name
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    if path.suffix in packed:
        path.write_bytes(packed[path.suffix](jsonl(rows)))
    elif path.suffix in (".jsonl", ".ndjson"):
        path.write_bytes(jsonl(rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(table(rows), path, row_group_size=2)
    elif name.startswith("stream"):
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table(rows).schema) as writer:
            writer.write_table(table(rows))
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table(rows).schema) as writer:
            writer.write_table(table(rows))
    else:
        Dataset.from_list(rows).save_to_disk(str(path))
    return path


NAMES = ["a.parquet", "a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.json.bz2", "a.jsonl.xz"]
NAMES += ["stream.arrow", "file.arrow", "saved"]


def read(source) -> Iterator[dict]:
    for row in source:
        yield {name: np.asarray(value).tolist() for name, value in row.items()}


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_that_were_written(tmp_path: Path, name: str) -> None:
    source = open_source(write(tmp_path, name))
    assert list(read(source)) == ROWS
    assert source.data.column("input_ids").type.value_type == pa.int64()
    chosen = open_source(str(tmp_path / name), columns=["name", "input_ids"])
    assert list(read(chosen)) == [{"name": row["name"], "input_ids": row["input_ids"]} for row in ROWS]


def test_columns_left_out_are_not_even_read(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "a.parquet"), columns=["input_ids", "mask"])
    (cached,) = source.cache_files
    assert sorted(Dataset.from_file(cached["filename"]).column_names) == ["input_ids", "mask"]
    with pytest.raises(ValueError, match="columns= must keep 'input_ids', the token ids; got name"):
        open_source(tmp_path / "a.parquet", columns=["name"])


@pytest.mark.parametrize("name", ["stream.arrow", "saved"])
def test_arrow_is_mapped_where_it_lies(tmp_path: Path, name: str) -> None:
    (file,) = {file["filename"] for file in open_source(write(tmp_path, name)).cache_files}
    assert Path(file) == tmp_path / name or Path(file).parent == tmp_path / name


@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".arrow"])
def test_many_files_in_order_given_or_of_their_names(tmp_path: Path, ending: str) -> None:
    """Names hold what a pattern would take for one."""
    folder = tmp_path / "part [1]"
    folder.mkdir()
    one, two = (write(folder, f"stream-{n} [x]{ending}", [row]) for n, row in ((1, ROWS[0]), (2, ROWS[2])))
    assert list(read(open_source([two, one]))) == [ROWS[2], ROWS[0]]
    assert list(read(open_source(tmp_path / f"part*/*{ending}"))) == [ROWS[0], ROWS[2]]


def test_megatron_by_prefix_or_either_file(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m.text", [np.arange(3), np.arange(4)], [0, 1, 2])
    for name in ("m.text", "m.text.idx", "m.text.bin"):
        source = open_source(tmp_path / name, columns=["input_ids"])
        assert isinstance(source, TokenFile) and source.lengths().tokens.tolist() == [3, 4]
    with pytest.raises(ValueError, match="columns= selects from tables; .* has input_ids, asked for input_ids, mask"):
        open_source(tmp_path / "m.text", columns=["input_ids", "mask"])
    with pytest.raises(ValueError, match="only files of tables are read together"):
        open_source([tmp_path / "m.text", tmp_path / "m.text.idx"])


@pytest.mark.parametrize("name", ["shards.index", "shards.arrow"])
def test_an_index_of_tar_shards(tmp_path: Path, name: str) -> None:
    documents = [np.arange(n, dtype=np.uint16) for n in (4, 1, 3)]
    index_shards([write_shard(tmp_path / "a.tar", documents)], tmp_path / name)
    source = open_source(tmp_path / name)
    assert isinstance(source, TarShards) and source.lengths().tokens.tolist() == [4, 1, 3]
    assert source.rows([2])["input_ids"][0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="columns= selects from tables"):
        open_source(tmp_path / name, columns=["input_ids", "mask"])


def test_a_loader_trains_on_a_path(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "a.jsonl"))
    loader = BalancedLoader(
        source, recipe("static", attend="none"), max_tokens_per_rank=8, documents_per_step=3, dp=1, shuffle=False
    )
    (batch,) = loader
    assert batch.input_ids.tolist() == [5, 2**40, 7, 3] and batch.mask.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1]}, {"input_ids": None}], "Row 1 of column 'input_ids' is null"),
        ([{"input_ids": [1]}, {"mask": [2], "input_ids": [1]}], "Row 0 of column 'mask' is null"),
        ([{"input_ids": [1, None]}], "'input_ids' holds 1 nulls inside its lists"),
        ([{"input_ids": [1], "mask": [None]}], "column 'mask'"),
        ([{"input_ids": [1], "name": "a"}, {"input_ids": [1]}], "1 are null in 'name', the first in row 1"),
        ([{"input_ids": [1, 2], "mask": [1]}], "that of 'mask' in document 0 has 1 beside 2 tokens"),
        ([{"input_ids": [1.5]}], "token ids must be integers; 'input_ids' holds list<.*double"),
        ([{"input_ids": [1]}, {"input_ids": "abc"}], "must hold lists of token ids"),
        ([{"input_ids": [[1]]}], "column 'input_ids' has type"),
        ([{"input_ids": [1], "meta": {"a": 1}}], "column 'meta' has type struct"),
        ([{"tokens": [1]}], "named 'input_ids'; .* has tokens and no input_ids"),
    ],
)
@pytest.mark.parametrize("name", ["odd.jsonl", "odd.parquet"])
def test_nulls_and_ragged_columns_are_refused_by_name(
    tmp_path: Path, name: str, rows: list[dict], message: str
) -> None:
    if name.endswith("parquet") and rows[-1].get("input_ids") == "abc":
        return  # Parquet has one type per column
    with pytest.raises(ValueError, match=message):
        open_source(write(tmp_path, name, rows))


def test_columns_left_out_may_be_odd(tmp_path: Path) -> None:
    rows = [{"input_ids": [1], "meta": {"a": 1}, "mask": [1, 2]}, {"input_ids": [1], "name": None}]
    for name in ("a.jsonl", "a.parquet"):
        assert list(read(open_source(write(tmp_path, name, rows), columns=["input_ids"]))) == [{"input_ids": [1]}] * 2
        with pytest.raises(ValueError, match="nothing"):
            open_source(tmp_path / name, columns=["input_ids", "nothing"])


def test_what_is_not_understood_says_what_is(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2")
    (tmp_path / "tokens.bin").write_bytes(b"ab")
    (tmp_path / "b.parquet.gz").write_bytes(b"ab")
    for name in ("a.csv", "tokens.bin", "b.parquet.gz", "."):
        with pytest.raises(ValueError, match=r"of no kind that is understood, which are Parquet \(.*TokenFile.npy"):
            open_source(tmp_path / name)
    with pytest.raises(ValueError, match="there is no .*nowhere.jsonl; understood are Parquet"):
        open_source(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="no file matches"):
        open_source(tmp_path / "*.jsonl")
    with pytest.raises(ValueError, match="tables of one kind; got none"):
        open_source([])
    with pytest.raises(ValueError, match="tables of one kind; got .*a.jsonl, .*a.parquet"):
        open_source([write(tmp_path, "a.jsonl"), write(tmp_path, "a.parquet")])


def test_several_splits_are_not_one_source(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(ValueError, match="several splits; open one of .*two/test, .*two/train"):
        open_source(tmp_path / "two")
    assert len(open_source(tmp_path / "two" / "test")) == 3


@pytest.mark.parametrize("url", ["https://example.org/a.jsonl", "hf://datasets/a/b.parquet", "s3://bucket/a.parquet"])
def test_nothing_is_fetched(url: str) -> None:
    with pytest.raises(ValueError, match="only files of this machine"):
        open_source(url)


@pytest.mark.parametrize(
    ("name", "bytes_"), [("a.jsonl", b'{"input_ids": [1'), ("a.parquet", b"PAR1 no"), ("a.arrow", b"x")]
)
def test_broken_files_are_named(tmp_path: Path, name: str, bytes_: bytes) -> None:
    (tmp_path / name).write_bytes(bytes_)
    with pytest.raises(ValueError, match=f"datasets cannot read .*{name} as"):
        open_source(tmp_path / name)
