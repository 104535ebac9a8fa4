"""Fetching: Arrow slices equal what datasets itself returns, whatever the table looks like."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, concatenate_datasets
from equipoise import PlannedDataset


def plain() -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset.from_dict(
        {
            "input_ids": [rng.integers(0, 99, n).tolist() for n in (3, 0, 5, 1, 8, 2)],
            "score": [0.5 * n for n in range(6)],
            "name": list("abcdef"),
        }
    )


def large() -> Dataset:
    values = pa.array([[1, 2], [3], [], [4, 5, 6]], pa.large_list(pa.uint16()))
    return Dataset(pa.table({"input_ids": values}))


SHAPES = {
    "plain": plain,
    "shuffled": lambda: plain().shuffle(seed=3),
    "selected": lambda: plain().select([4, 1, 1, 0]),
    "sliced": lambda: plain().select(range(2, 5)),
    "chunked": lambda: concatenate_datasets([plain(), plain().select(range(3)), plain()]),
    "large_list": large,
    "sliced table": lambda: Dataset(plain().data.table.slice(1, 4)),
    "fixed size": lambda: Dataset(
        pa.table({"input_ids": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2)).slice(1)})
    ),
    "columns": lambda: plain().with_format("numpy", columns=["input_ids"]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_equal_those_of_datasets(shape: str) -> None:
    dataset = SHAPES[shape]()
    planned = pickle.loads(pickle.dumps(PlannedDataset(dataset)))
    order = [*reversed(range(len(dataset))), 0]
    rows = planned.rows(order)
    for name, values in rows.items():
        for document, value in zip(order, values, strict=True):
            truth = dataset[document][name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == (
                truth.tolist() if isinstance(truth, np.ndarray) else truth
            )
    assert set(rows) == set(dataset[0])


def test_tokens_are_views_of_the_arrow_buffer() -> None:
    planned = PlannedDataset(plain())
    first, again = planned.rows([4])["input_ids"][0], planned.rows([4])["input_ids"][0]
    assert np.shares_memory(first, again) and not first.flags.owndata


def test_a_transform_is_respected() -> None:
    dataset = plain().with_transform(lambda rows: {"input_ids": [[7] * len(ids) for ids in rows["input_ids"]]})
    assert PlannedDataset(dataset).rows([0])["input_ids"][0].tolist() == [7, 7, 7]


def test_columns_of_unknown_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="column 'tags' has type list<.*remove it with"):
        PlannedDataset(plain().add_column("tags", [["x"]] * 6)).rows([0])
    holes = Dataset(pa.table({"input_ids": pa.array([[1, None]], pa.list_(pa.int64()))}))
    with pytest.raises(ValueError, match="holds 1 nulls inside its lists"):
        PlannedDataset(holes).rows([0])


def test_only_map_style_data_and_only_through_the_sampler() -> None:
    with pytest.raises(ValueError, match="map-style dataset"):
        PlannedDataset(iter([[1]]))
    with pytest.raises(TypeError, match="fetched by micro-batches"):
        PlannedDataset([[1]])[0]


def test_lengths_of_any_dataset() -> None:
    assert PlannedDataset([[1, 2, 3], np.arange(5)]).lengths().tokens.tolist() == [3, 5]
    assert PlannedDataset(plain()).lengths().tokens.tolist() == [3, 0, 5, 1, 8, 2]
    assert not PlannedDataset(plain()).has_labels
    assert PlannedDataset([{"input_ids": [1], "labels": [1]}]).has_labels
