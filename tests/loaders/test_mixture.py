"""A mixture is its sources one after the other: the same rows, the same lengths, and a loader reads it by weight."""

from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from equipoise import BalancedBatchSampler, Lengths, MaskColumns, PlannedDataset, ThdCollator, recipe
from equipoise.loaders.mixture import Mixture
from equipoise.packing.blend import Blend
from hypothesis import given, settings
from hypothesis import strategies as st


class Known:
    """A source that knows its lengths and targets, as token files and tar shards do."""

    def __init__(self, ids: list[np.ndarray], **index) -> None:
        self.ids, self.index, self.column_names = ids, index, ["input_ids", "labels"]

    def __len__(self) -> int:
        return len(self.ids)

    def lengths(self) -> Lengths:
        return Lengths(tokens=np.array([len(ids) for ids in self.ids], np.int32), source="known", **self.index)

    def rows(self, documents: list[int]) -> dict[str, list]:
        return {name: [self.ids[document] for document in documents] for name in self.column_names}

    def __getitem__(self, document: int) -> dict:
        return dict.fromkeys(self.column_names, self.ids[document])


def tokens(first: int, sizes: list[int]) -> list[np.ndarray]:
    """Documents whose ids tell where they come from."""
    return [np.full(size, first + document, np.int32) for document, size in enumerate(sizes)]


def hf(ids: list[np.ndarray], **columns) -> Dataset:
    return Dataset.from_dict({"input_ids": [list(map(int, each)) for each in ids], **columns})


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from([list, hf]), min_size=4, max_size=4),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_rows_are_those_of_the_sources_in_the_order_asked_for(sizes: list, kinds: list, data: st.DataObject) -> None:
    parts = [tokens(100 * number, each) for number, each in enumerate(sizes)]
    mixture = Mixture([kind(part) for kind, part in zip(kinds, parts, strict=False)])
    flat = [ids for part in parts for ids in part]
    wanted = data.draw(st.lists(st.integers(0, len(flat) - 1), min_size=1, max_size=20))
    for source in (mixture, pickle.loads(pickle.dumps(mixture))):
        rows = source.rows(wanted)
        assert list(rows) == ["input_ids"]
        assert [ids.tolist() for ids in rows["input_ids"]] == [flat[document].tolist() for document in wanted]
    assert mixture[wanted[0]]["input_ids"].tolist() == flat[wanted[0]].tolist() and len(mixture) == len(flat)
    lengths = mixture.lengths()
    assert lengths.tokens.tolist() == [len(ids) for ids in flat] and lengths.targets is lengths.pairs is None
    assert lengths.blend.sizes == lengths.blend.weights == tuple(map(len, parts))


def test_indices_are_joined_with_what_each_knows() -> None:
    """Targets that some sources index and others lack: unknown where there are labels, all but the first where not."""
    ids = tokens(0, [3, 2])
    some, none = Known(ids, targets=np.array([1, 0]), pairs=np.array([4, 2])), Known(ids)
    assert Mixture([some, none]).lengths().targets is None
    assert Mixture([some, none]).lengths().pairs.tolist() == [4, 2, 6, 3]
    assert Mixture([some, some]).lengths().targets.tolist() == [1, 0, 1, 0]
    assert Mixture([some, none], columns=["input_ids"]).lengths().targets.tolist() == [1, 0, 2, 1]
    assert Mixture([some, none]).lengths().tokens.dtype == np.int32


def test_columns_are_selected_and_otherwise_agree() -> None:
    ids = tokens(0, [3, 2])
    plain, named = hf(ids), hf(ids, name=["a", "b"])
    with pytest.raises(ValueError, match="source 1 has input_ids, name, where input_ids are wanted"):
        Mixture([plain, named])
    with pytest.raises(ValueError, match="source 1 has input_ids, where input_ids, name are wanted"):
        Mixture([named, plain])
    with pytest.raises(ValueError, match="source 0 has input_ids, where input_ids, name are wanted"):
        Mixture([plain, named], columns=["input_ids", "name"])
    with pytest.raises(ValueError, match="columns= leaves it out: name"):
        Mixture([named], columns=["name"])
    assert Mixture([plain, named], columns=["input_ids"])[3].keys() == {"input_ids"}
    ragged = Mixture([plain, [{"input_ids": ids[0]}, {"input_ids": ids[0], "name": "c"}]])
    with pytest.raises(
        ValueError, match=r"in source 1 .* document 0 is document 2: .*document 1 has \['input_ids', 'name'\]"
    ):
        ragged.rows([0, 3])


class Torn(list):
    def __getitem__(self, document: int) -> list[int]:
        if document == 1:
            raise OSError("torn")
        return super().__getitem__(document)


def test_what_fails_names_its_source() -> None:
    mixture = Mixture([[[1, 2]], Torn([[3], [4]])])
    with pytest.raises(
        RuntimeError, match="in source 1 of the mixture, whose document 0 is document 1: document 1 .*torn"
    ):
        mixture.rows([0, 2])
    skipping = PlannedDataset(mixture, on_error="skip").readable([0, 2])
    assert skipping["input_ids"][1] is None and "torn" in skipping["__skipped__"][2]


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(ValueError, match="source 1 is one"):
        Mixture([[[1]], Mixture([[[1]]])])
    with pytest.raises(ValueError, match="source 1 has none"):
        Mixture([[[1]], []])
    with pytest.raises(ValueError, match="one weight for each; got 1 sources, 2 weights"):
        Mixture([[[1]]], (1, 2))
    with pytest.raises(ValueError, match="documents of a group stay together; source 0 has groups"):
        Mixture([Known(tokens(0, [1, 2]), group=np.array([0, 0]))]).lengths()
    masks = MaskColumns("prefix_lm", {"lengths": np.array([1, 2]), "prefix": 1}).lengths().masks
    with pytest.raises(ValueError, match="documents are causal; source 0 has prefix_lm masks"):
        Mixture([Known(tokens(0, [1, 2]), masks=masks, pairs=np.array([1, 3]))]).lengths()
    with pytest.raises(IndexError, match="documents 0 … 0; got -1"):
        Mixture([[[1]]])[-1]


@pytest.mark.parametrize("exhausted", ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"])
def test_a_sampler_draws_documents_by_weight(exhausted: str) -> None:
    """Two ranks together see what the policy says: 12 of one and 4 of the other at weights 1:1."""
    parts = [tokens(0, [3] * 12), tokens(100, [5] * 4)]
    mixture = Mixture([hf(parts[0]), parts[1]], (1, 1), exhausted)
    dataset, chosen = PlannedDataset(mixture), recipe("static", attend="none")
    assert dataset.lengths().blend == Blend(sizes=(12, 4), weights=(1, 1), exhausted=exhausted)
    seen: Counter = Counter()
    for rank in range(2):
        sampler = BalancedBatchSampler(
            dataset.lengths(), chosen, max_tokens_per_rank=16, dp=2, rank=rank, documents_per_step=4
        )
        for specs in sampler:
            batch = ThdCollator(chosen)(dataset.__getitems__(specs))
            seen.update(batch.documents.tolist())
            ids, counts = torch.unique(batch.input_ids[batch.documents[batch.doc_ids.long()] >= 0], return_counts=True)
            assert {int(i): int(n) % (3 if i < 100 else 5) for i, n in zip(ids, counts, strict=True)} == dict.fromkeys(
                ids.tolist(), 0
            )
    del seen[-1]
    times = {
        "first_exhausted": {0: 1, 100: 1},
        "all_exhausted": {0: 1, 100: 3},
        "all_exhausted_without_replacement": {0: 1, 100: 1},
    }[exhausted]
    first = [seen[document] for document in range(12)]
    assert [seen[document] for document in range(12, 16)] == [times[100]] * 4
    assert sorted(first) == ([0] * 8 + [1] * 4 if exhausted == "first_exhausted" else [1] * 12)


def test_a_first_document_with_columns_of_its_own_speaks_for_no_source() -> None:
    odd = [{"input_ids": [0], "note": 1}, *({"input_ids": [n, n]} for n in range(1, 6))]
    mixture = Mixture([odd, [[9, 9]] * 6])
    assert mixture.column_names == ["input_ids"]
    rows = PlannedDataset(mixture, on_error="skip").readable([5, 0, 7])
    assert list(rows["__skipped__"]) == [0] and rows["input_ids"][1] is None
    assert [rows["input_ids"][at].tolist() for at in (0, 2)] == [[5, 5], [9, 9]]
