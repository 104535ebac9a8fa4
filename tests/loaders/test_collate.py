"""The THD layout against a brute-force one: tokens, shifted labels, positions, extra columns, cut alike."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset
from equipoise import BalancedLoader, MaskColumns, ThdBatch, ThdCollator, recipe, shard_attend
from equipoise.attention.blocks import place
from equipoise.loaders.shapes import Shapes
from equipoise.packing.padded import padded_source, valid_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import document_lengths

MIXES = [
    {"pack": "best_fit", "shard": "zigzag"},
    {"pack": "concat", "shard": "zigzag_sequence"},
    {"pack": "wlb", "shard": "contiguous"},
    {"pack": "gds", "place": "gds", "shard": "dacp"},
    {"shard": "striped"},
    {"shard": "adaptive"},
    {"shard": "mixed"},
    {"shard": "dispatch"},
    {"shard": "joint"},
]


def corpus(lengths: list[int], labels: bool) -> tuple[list[dict], Dataset | None]:
    rng = np.random.default_rng(len(lengths))
    rows = []
    for document, tokens in enumerate(lengths):
        ids = rng.integers(0, 1000, tokens).astype(np.int32)
        row = {"input_ids": ids, "weight": ids / 7, "id": document, "name": f"d{document}"}
        if labels:
            row["labels"] = np.where(rng.random(tokens) < 0.4, -100, ids)
        rows.append(row)
    return rows, None


def expected(rows: list[dict], batch: ThdBatch, cut: int) -> dict[str, list]:
    """Per token of the pack: what a loop over documents lays out. ``cut``: documents end there (0: nowhere)."""
    out: dict[str, list] = {"input_ids": [], "labels": [], "position_ids": [], "doc_ids": [], "weight": []}
    sizes = np.diff(batch.cu_seqlens.numpy())
    for at, (document, start, size) in enumerate(
        zip(batch.documents.tolist(), batch.starts.tolist(), sizes, strict=True)
    ):
        if document < 0:
            out["input_ids"] += [0] * size
            out["labels"] += [-100] * size
            out["weight"] += [0.0] * size
        else:
            row = rows[document]
            source = row.get("labels", row["input_ids"])
            end = min(len(source), cut or len(source))
            shifted = [*source[1:end], -100]
            out["input_ids"] += row["input_ids"][start : start + size].tolist()
            out["labels"] += [int(label) for label in shifted[start : start + size]]
            out["weight"] += row["weight"][start : start + size].tolist()
        out["position_ids"] += list(range(start, start + size))
        out["doc_ids"] += [at] * size
    return out


@given(
    lengths=document_lengths(max_size=25),
    labels=st.booleans(),
    arrow=st.booleans(),
    mix=st.sampled_from(MIXES),
    cp=st.integers(1, 5),
    policy=st.sampled_from(["split", "truncate"]),
)
@settings(max_examples=200, deadline=None)
def test_every_rank_holds_its_share_of_the_brute_force_layout(
    lengths: list[int], labels: bool, arrow: bool, mix: dict, cp: int, policy: str
) -> None:
    if not any(lengths):
        return
    rows, _ = corpus(lengths, labels)
    dataset = Dataset.from_list(rows) if arrow else rows
    cap = 24
    loaders = [
        BalancedLoader(
            dataset,
            recipe("static", attend="none", **mix),
            max_tokens_per_rank=cap,
            dp=1,
            cp=cp,
            rank=rank,
            documents_per_step=9,
            too_long=policy,
            group=FakeGroup() if labels and cp > 1 else None,
        )
        for rank in range(cp)
    ]
    columns = [iter_specs(loader) for loader in loaders]
    for group in zip(*columns, strict=True):
        pack: dict[str, dict[int, object]] = {}
        for batch in group:
            assert 1 <= batch.input_ids.numel() <= cap
            assert batch.cu_seqlens.dtype == torch.int32 and (batch.cu_seqlens.diff() > 0).all()
            assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())
            for name in ("input_ids", "labels", "position_ids", "doc_ids", "weight"):
                positions = batch.shard_index.tolist()
                pack.setdefault(name, {}).update(zip(positions, batch[name].tolist(), strict=True))
        layout = expected(rows, group[0], cap * cp if policy == "truncate" else 0)
        for name, values in layout.items():
            assert sorted(pack[name]) == list(range(len(values))), name
            assert [pack[name][at] for at in range(len(values))] == values, name
        assert sum(batch.num_targets for batch in group) == sum(label != -100 for label in layout["labels"])
        real = [d for d in group[0].documents.tolist() if d >= 0]
        if real == group[0].documents.tolist():
            assert group[0]["id"].tolist() == real
            assert group[0]["name"] == [f"d{d}" for d in real]


class FakeGroup:
    """Stands for a process group that is never used: collation alone is under test."""


def iter_specs(loader: BalancedLoader) -> list[ThdBatch]:
    collate = ThdCollator(loader.sampler.recipe)
    return [collate(loader.dataset.__getitems__(specs)) for specs in loader.sampler]


@given(
    lengths=document_lengths(max_size=20, empty=False),
    labels=st.booleans(),
    cp=st.integers(1, 4),
    tp=st.integers(1, 3),
    pack=st.sampled_from(["static", "wlb"]),
)
@settings(max_examples=200, deadline=None)
def test_padding_fills_documents_up_and_changes_no_token(
    lengths: list[int], labels: bool, cp: int, tp: int, pack: str
) -> None:
    """Every document padded to 2·cp·tp (tp at cp 1), counted against the cap; pads have no label; real tokens as without."""
    rows, _ = corpus(lengths, labels)
    options = {"max_tokens_per_rank": 6 * tp + 24, "dp": 2, "cp": cp, "documents_per_step": 9, "too_long": "split"}
    loaders = [
        BalancedLoader(
            rows, recipe(pack, shard="zigzag", attend="none"), rank=rank, pad_tp=tp, group=FakeGroup(), **options
        )
        for rank in range(cp)
    ]
    multiple = 2 * cp * tp if cp > 1 else tp
    for group in zip(*(iter_specs(loader) for loader in loaders), strict=True):
        batch = group[0]
        padded = batch.get("cu_seqlens_padded", batch.cu_seqlens)
        assert (padded.diff() % multiple == 0).all() and (padded.diff() - batch.cu_seqlens.diff() < multiple).all()
        layout = expected(rows, batch, 0)
        source = padded_source(batch.cu_seqlens.numpy(), padded.numpy())
        held = np.sort(np.concatenate([each.shard_index.numpy() for each in group]))
        assert np.array_equal(held, np.arange(len(source)))
        counts = valid_tokens(batch.cu_seqlens.numpy(), padded.numpy(), cp) if cp > 1 else None
        for rank, each in enumerate(group):
            assert each.input_ids.numel() <= options["max_tokens_per_rank"]
            at = source[each.shard_index.numpy()]
            real = at >= 0
            for name in ("input_ids", "labels", "position_ids", "weight"):
                got = each[name].numpy()
                assert got[real].tolist() == [layout[name][i] for i in at[real]], name
            assert (each.labels.numpy()[~real] == -100).all() and (each.input_ids.numpy()[~real] == 0).all()
            assert each.num_targets == int((each.labels != -100).sum())
            if counts is not None:
                assert int(real.sum()) == counts[rank].sum()


def test_seven_tokens_padded_to_eight_on_two_ranks() -> None:
    """Lengths 7 and 3 at cp 2: padded 8 and 4, both boundaries, no label on a pad."""
    options = {"max_tokens_per_rank": 8, "dp": 1, "cp": 2, "documents_per_step": 2, "shuffle": False, "pad_tp": 1}
    loaders = [
        BalancedLoader([np.arange(7), np.arange(3)], recipe("static", attend="none"), rank=rank, **options)
        for rank in (0, 1)
    ]
    first, second = (next(iter(loader)) for loader in loaders)
    assert first.cu_seqlens.tolist() == [0, 7, 10] and first.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert first.shard_index.tolist() == [0, 1, 6, 7, 8, 11] and second.shard_index.tolist() == [2, 3, 4, 5, 9, 10]
    assert first.labels.tolist() == [1, 2, -100, -100, 1, -100] and second.labels.tolist() == [3, 4, 5, 6, 2, -100]
    assert first.to_megatron()["packed_seq_params"]["cu_seqlens_q_padded"] is first.cu_seqlens_padded
    assert "cu_seqlens_padded" not in one([np.arange(8)])
    with pytest.raises(ValueError, match="pad_tp lays whole documents out for Transformer Engine's zigzag"):
        one([np.arange(8)], shard="contiguous", pad_tp=1)


@given(
    lengths=document_lengths(max_size=12),
    labels=st.booleans(),
    mix=st.sampled_from(MIXES),
    cp=st.integers(1, 4),
    policy=st.sampled_from(["split", "truncate"]),
    offsets=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_labels_further_ahead_are_those_of_whole_documents(
    lengths: list[int], labels: bool, mix: dict, cp: int, policy: str, offsets: list[int]
) -> None:
    """Brute force: the document's label at position + offset, whatever shard or piece that is in; offset 1 is ``labels``."""
    if not any(lengths):
        return
    rows, cap = corpus(lengths, labels)[0], 24
    for rank in range(cp):
        loader = BalancedLoader(
            rows,
            recipe("static", attend="none", **mix),
            max_tokens_per_rank=cap,
            dp=1,
            cp=cp,
            rank=rank,
            documents_per_step=9,
            too_long=policy,
            group=FakeGroup() if labels and cp > 1 else None,
        )
        collate = ThdCollator(loader.sampler.recipe, label_offsets=(1, *offsets))
        for batch in (collate(loader.dataset.__getitems__(specs)) for specs in loader.sampler):
            assert batch.label_offsets == (1, *offsets) and batch.shifted_labels.dtype == torch.int64
            assert torch.equal(batch.shifted_labels[0], batch.labels)
            wanted = []
            for at, position in zip(batch.doc_ids.tolist(), batch.position_ids.tolist(), strict=True):
                row = rows[batch.documents[at]] if batch.documents[at] >= 0 else {"input_ids": []}
                source = row.get("labels", row["input_ids"])[: cap * cp if policy == "truncate" else None]
                wanted.append([source[position + n] if position + n < len(source) else -100 for n in offsets])
            assert batch.shifted_labels[1:].T.tolist() == np.array(wanted).reshape(-1, len(offsets)).tolist()


def test_labels_further_ahead_survive_pipes_padding_and_masking() -> None:
    loader = BalancedLoader(
        [np.arange(7), np.arange(10, 13)],
        recipe("static", attend="none"),
        max_tokens_per_rank=16,
        dp=1,
        documents_per_step=2,
        shuffle=False,
    )
    collate = ThdCollator(loader.sampler.recipe, label_offsets=(2,), shapes=Shapes(pad_to=16))
    batch = next(collate(loader.dataset.__getitems__(specs)) for specs in loader.sampler)
    ahead = {0: [2, 3, 4, 5, 6, -100, -100], 1: [12, -100, -100]}
    laid = [label for d in batch.documents.tolist() if d >= 0 for label in ahead[d]] + [-100] * 6
    assert batch.shifted_labels.tolist() == [laid] == pickle.loads(pickle.dumps(batch)).shifted_labels.tolist()
    lost = batch.without([0])
    assert [x for x in lost.shifted_labels[0].tolist() if x != -100] == [12]
    assert "shifted_labels" not in one([[1, 2]])
    with pytest.raises(ValueError, match=r"at least 1, tokens ahead; got \(2, 0\)"):
        ThdCollator(recipe("static"), label_offsets=(2, 0))


def one(dataset: object, shard: str | None = None, **options) -> ThdBatch:
    defaults = {"max_tokens_per_rank": 64, "dp": 1, "documents_per_step": 8}
    loader = BalancedLoader(dataset, recipe("static", shard=shard, attend="none"), **{**defaults, **options})
    return next(iter(loader))


def test_masks_are_shifted_per_document() -> None:
    """Masks A [0,1,1,1], B [1,0,1]: a flat shift would give A's last the mask of B's first."""
    rows = [
        {"input_ids": np.array([1, 2, 3, 4]), "labels": np.array([-100, 2, 3, 4])},
        {"input_ids": np.array([5, 6, 7]), "labels": np.array([5, -100, 7])},
    ]
    batch = one(rows, shuffle=False)
    assert batch.labels.tolist() == [2, 3, 4, -100, -100, 7, -100]


def test_a_one_token_document_has_no_target_and_a_cut_keeps_its_label() -> None:
    assert one([[7]]).labels.tolist() == [-100]
    loader = BalancedLoader(
        [list(range(10, 20))],
        recipe("static", attend="none"),
        max_tokens_per_rank=6,
        dp=1,
        documents_per_step=2,
        too_long="split",
    )
    labels = {batch.starts.item(): batch.labels.tolist() for batch in loader}
    assert labels == {0: [11, 12, 13, 14, 15, 16], 6: [17, 18, 19, -100]}


def test_positions_continue_or_restart() -> None:
    """One document of 15 cut at 11: the second piece counts on from 11, or from 0 by an explicit option."""
    options = {"max_tokens_per_rank": 11, "too_long": "split", "shuffle": False, "slots": None}

    def second(**more) -> list[int]:
        loader = BalancedLoader(
            [list(range(15))], recipe("static", attend="none"), dp=1, documents_per_step=2, **options, **more
        )
        return next(b.position_ids.tolist() for b in loader if b.starts.tolist() == [11])

    assert second() == [11, 12, 13, 14]
    assert second(restart_positions=True) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"tokens": np.arange(3)}], "column named 'input_ids'; the dataset has tokens"),
        ([{"input_ids": np.arange(3.0)}], "token ids must be integers; .* float64"),
        ([{"input_ids": np.array([1, -2])}], "must not be negative; got -2"),
        ([{"input_ids": np.zeros((2, 2), int)}], "must be a 1-D array of ids; got shape"),
        (
            [{"input_ids": np.arange(3), "mask": np.arange(4)}],
            "column 'mask' must hold one value per token .*shape \\(4,\\) beside 3",
        ),
        ([{"input_ids": np.arange(3), "slot": 1}], "column 'slot' has the name of an entry"),
        ([{"input_ids": np.arange(3)}, {"input_ids": np.arange(3), "x": 1}], "same columns"),
        (
            [{"input_ids": np.arange(3), "x": 1}, {"input_ids": np.arange(3), "x": np.arange(3)}],
            "arrays for some documents",
        ),
    ],
)
def test_odd_rows_are_refused(rows: list[dict], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one(rows, lengths=None if "input_ids" in rows[0] and rows[0]["input_ids"].ndim == 1 else index(3))


def index(tokens: int):
    from equipoise import Lengths

    return Lengths.from_array(np.array([tokens]))


def test_a_stale_length_index_is_refused() -> None:
    for tokens in (2, 5):  # one token more would be cut off in silence, one less would be missed
        with pytest.raises(ValueError, match=f"document 0 has 3 tokens, but {tokens} in the length index"):
            one([[1, 2, 3]], lengths=index(tokens))
    with pytest.raises(ValueError, match="has 1 documents, the dataset 2"):
        one([[1, 2, 3], [4]], lengths=index(3))


def test_unplanned_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one planned micro-batch"):
        ThdCollator(recipe("static"))([{"input_ids": [1]}, {"input_ids": [2]}])


def test_packs_of_the_same_lengths_are_placed_once(monkeypatch) -> None:
    """DCP's placement takes long; a mask of its own, or other lengths, are placed for themselves."""
    placed = []
    monkeypatch.setattr(shard_attend, "place", lambda *args, **options: placed.append(args) or place(*args, **options))
    rows = [{"input_ids": np.arange(8)} for _ in range(12)]
    index = MaskColumns("prefix_lm", {"lengths": np.full(12, 8), "prefix": 3}).lengths()
    for lengths, times in ((None, 1), (index, 1)):
        loader = BalancedLoader(rows, "dcp", lengths=lengths, dp=1, max_tokens_per_rank=16, documents_per_step=2)
        batches = list(loader)
        assert len(batches) == 6 and len(placed) == times and len({id(batch.plan) for batch in batches}) == 1
        loader.close()
        placed.clear()
    rows[5] = {"input_ids": np.arange(5)}
    loader = BalancedLoader(rows, "dcp", dp=1, max_tokens_per_rank=16, documents_per_step=2)
    assert len(list(loader)) == 6 and len(placed) == 2
    loader.close()
