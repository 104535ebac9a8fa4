"""python -m pytest tests/packing/test_lengths.py"""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from equipoise.packing.lengths import Lengths
from hypothesis import given, settings
from hypothesis import strategies as st

LAW = {
    "mode": "distribution",
    "type": "lognormal",
    "format": "thd",
    "min_seq_len": 128,
    "max_seq_len": 8192,
    "mean_seq_len": 1024,
    "lognormal_sigma": 1.5,
}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.data())
def test_take_fills_in_pairs_and_targets(tokens, data):
    lengths = Lengths.from_array(np.array(tokens, dtype=np.int32))
    chosen = data.draw(st.lists(st.integers(0, len(tokens) - 1)))
    window = lengths.take(chosen)
    assert window.tokens.tolist() == [tokens[i] for i in chosen]
    assert window.pairs.tolist() == [tokens[i] * (tokens[i] + 1) // 2 for i in chosen]
    assert window.targets.tolist() == [max(tokens[i] - 1, 0) for i in chosen]
    assert {a.dtype for a in (window.tokens, window.pairs, window.targets)} == {np.dtype(np.int64)}


def test_given_pairs_and_targets_are_taken_as_they_are():
    lengths = Lengths(tokens=np.array([4, 2]), pairs=np.array([7, 3]), targets=np.array([0, 2]))
    window = lengths.take([1, 0, 1])
    assert window.pairs.tolist() == [3, 7, 3] and window.targets.tolist() == [2, 0, 2]


def test_arrays_that_are_no_lengths_are_refused():
    for tokens, message in [
        ([3, -1], "0 … 2\\*\\*63 - 1; got -1 … 3"),
        ([1.0, 2.5], "whole numbers; entry 1 is 2.5"),
        ([1.0, np.nan], "entry 1 is nan"),
        ([1.0, np.inf], "entry 1 is inf"),
        (np.array([2**63], dtype=np.uint64), "2\\*\\*63"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (np.array([1, None]), "object"),
        ([True], "bool"),
    ]:
        with pytest.raises(ValueError, match=message):
            Lengths.from_array(tokens)
    with pytest.raises(ValueError, match="targets must be given for each of the 2 documents; got 1"):
        Lengths.from_array([1, 2], targets=[1])


def test_whole_floats_and_small_integers_are_converted_and_large_arrays_are_not_copied():
    assert Lengths.from_array([1.0, 2.0]).tokens.dtype == np.int64
    assert Lengths.from_array(np.array([1, 2], dtype=np.uint16)).tokens.dtype == np.int64
    for dtype in (np.int32, np.int64):
        tokens = np.arange(9, dtype=dtype)
        assert np.shares_memory(Lengths.from_array(tokens).tokens, tokens)


def test_from_npy_maps_the_file(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([5, 0, 9], dtype=np.int32))
    lengths = Lengths.from_npy(tmp_path / "lengths.npy")
    assert isinstance(lengths.tokens, np.memmap) and not lengths.tokens.flags.writeable
    assert lengths.take([2, 1]).tokens.tolist() == [9, 0] and str(tmp_path) in lengths.source


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=300))
def test_summary(tokens):
    summary = Lengths.from_array(tokens).summary()
    longest = sorted(tokens)[-max(1, -(-len(tokens) // 100)) :]
    share = sum(t * t for t in longest) / max(sum(t * t for t in tokens), 1)
    assert summary["documents"] == len(tokens) and summary["tokens"] == sum(tokens)
    assert summary["max"] == max(tokens) and summary["p50"] == pytest.approx(np.median(tokens))
    assert summary["squared_share_of_longest_1%"] == pytest.approx(share)


def test_summary_of_nothing():
    assert Lengths.from_array(np.zeros(0, np.int64)).summary() == {"documents": 0, "tokens": 0}
    assert "documents 0" in str(Lengths.from_array(np.zeros(0, np.int64)))


def test_megatrons_law_draws_megatrons_lengths(tmp_path):
    """The published configuration, as a dict, as JSON, as a file; the first draws are those of its own generator."""
    drawn = Lengths.from_law(LAW, 1000).tokens
    np.random.seed(0)
    theirs = np.clip(np.random.lognormal(np.log(1024) - 1.5**2 / 2, 1.5, 1000), 128, 8192).astype(int)
    assert np.array_equal(drawn, theirs) and drawn.min() == 128 and drawn.max() == 8192
    (tmp_path / "law.json").write_text(json.dumps(LAW))
    for spec in (json.dumps(LAW), tmp_path / "law.json", str(tmp_path / "law.json")):
        assert np.array_equal(Lengths.from_law(spec, 1000).tokens, drawn)
    assert not np.array_equal(Lengths.from_law(LAW, 1000, seed=1).tokens, drawn)


def test_megatrons_csv(tmp_path):
    path = tmp_path / "lengths.csv"
    for text in ("length\n5\n7\n9\n", "5\n7\n9\n", "a,b,c\n5,7,9\n", "\ufefflength\r\n5\r\n\r\n7.0\r\n9"):
        path.write_text(text, encoding="utf-8")
        assert Lengths.from_csv(path).tokens.tolist() == [5, 7, 9]
    law = {"mode": "file", "path": str(path)}
    assert Lengths.from_law(law).tokens.tolist() == [5, 7, 9]
    assert Lengths.from_law(json.dumps(law), 5).tokens.tolist() == [5, 7, 9, 5, 7]
    path.write_text("5\nmany\n")
    with pytest.raises(ValueError, match="holds 'many'"):
        Lengths.from_csv(path)


def test_laws_that_are_none_are_refused():
    with pytest.raises(ValueError, match="needs 'lognormal_sigma'"):
        Lengths.from_law({name: value for name, value in LAW.items() if name != "lognormal_sigma"}, 9)
    with pytest.raises(ValueError, match="needs 'path'"):
        Lengths.from_law({"mode": "file"})
    with pytest.raises(ValueError, match="type 'zipf'"):
        Lengths.from_law({**LAW, "type": "zipf"}, 9)
    with pytest.raises(ValueError, match="give num_documents"):
        Lengths.from_law(LAW)
    with pytest.raises(ValueError, match="min_seq_len <= max_seq_len"):
        Lengths.from_law({**LAW, "min_seq_len": 9000}, 9)


# ---- HF datasets ----------------------------------------------------------------------------------------------------

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")

LIST_TYPES = [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint8())]


def dataset_of(rows: list[list[int]], list_type: pa.DataType, chunks: int, sliced: bool):
    """A dataset of several chunks whose offsets do not begin at 0 where `sliced`."""
    rows = [[1] * 3, *rows, [1] * 5] if sliced else rows
    cuts = np.linspace(0, len(rows), chunks + 1).astype(int)
    column = pa.chunked_array([pa.array(rows[a:b], list_type) for a, b in pairwise(cuts)], list_type)
    table = pa.table({"input_ids": column, "num_targets": pa.array([len(row) for row in rows], pa.int32())})
    return datasets.Dataset(table.slice(1, len(rows) - 2) if sliced else table)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.sampled_from(LIST_TYPES),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_a_dataset_is_measured_as_it_presents_itself(tokens, list_type, chunks, sliced, data):
    dataset = dataset_of([[7] * t for t in tokens], list_type, chunks, sliced)
    for _ in range(data.draw(st.integers(0, 2))):
        how = data.draw(st.sampled_from(["select", "shuffle", "concatenate", "range"]))
        if how == "select":
            dataset = dataset.select(data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=9)))
        elif how == "shuffle":
            dataset = dataset.shuffle(seed=data.draw(st.integers(0, 9)))
        elif how == "range":
            dataset = dataset.select(range(len(dataset) // 2, len(dataset)))
        else:
            dataset = datasets.concatenate_datasets([dataset, dataset])
    lengths = Lengths.from_dataset(dataset, targets="num_targets")
    assert lengths.tokens.tolist() == [len(row) for row in dataset["input_ids"]] == lengths.targets.tolist()
    assert isinstance(lengths.tokens, np.ndarray) and lengths.tokens.dtype in (np.int32, np.int64)


def test_fixed_size_lists_and_empty_datasets():
    rows = [[1, 2, 3], [4, 5, 6]]
    fixed = datasets.Dataset(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int64(), 3))}))
    assert Lengths.from_dataset(fixed).tokens.tolist() == [3, 3]
    assert len(Lengths.from_dataset(fixed.select([]))) == 0
    assert len(Lengths.from_dataset(datasets.Dataset(pa.table({"x": pa.array([], pa.list_(pa.int8()))})), "x")) == 0


def test_no_token_is_decoded(monkeypatch):
    dataset = dataset_of([[1, 2], [3]], LIST_TYPES[0], 1, False)
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda *_: pytest.fail("a row was decoded"))
    assert Lengths.from_dataset(dataset).tokens.tolist() == [2, 1]


def test_null_rows_are_named():
    table = pa.table({"input_ids": pa.array([[1], None, [2, 3]], LIST_TYPES[0]), "n": pa.array([1, 0, None])})
    dataset = datasets.Dataset(table)
    with pytest.raises(ValueError, match="Row 1 of column 'input_ids' is null"):
        Lengths.from_dataset(dataset)
    with pytest.raises(ValueError, match="Row 0 of column 'input_ids' is null"):
        Lengths.from_dataset(dataset.select([1, 2]))
    assert Lengths.from_dataset(dataset.select([2, 0])).tokens.tolist() == [2, 1]
    with pytest.raises(ValueError, match="Row 1 of column 'n' is null"):
        Lengths.from_dataset(dataset.select([0, 2]), targets="n")


def test_columns_that_do_not_serve_are_refused():
    dataset = datasets.Dataset(pa.table({"text": ["a"], "score": [0.5], "input_ids": [[1]]}))
    with pytest.raises(ValueError, match="no column 'tokens'; it has text, score, input_ids"):
        Lengths.from_dataset(dataset, "tokens")
    with pytest.raises(ValueError, match="'text' must hold lists of token ids; it holds string"):
        Lengths.from_dataset(dataset, "text")
    with pytest.raises(ValueError, match="'score' must hold integers; it holds double"):
        Lengths.from_dataset(dataset, targets="score")
    with pytest.raises(ValueError, match="one HF Dataset .*; got DatasetDict"):
        Lengths.from_dataset(datasets.DatasetDict(train=dataset))
    with pytest.raises(ValueError, match="got IterableDataset"):
        Lengths.from_dataset(dataset.to_iterable_dataset())
