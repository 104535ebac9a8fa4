"""Rows of packs against documents alone: every token once, with its label, position and columns; saved, reloaded, cached."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, disable_progress_bars, enable_progress_bars, load_from_disk
from equipoise import BalancedBatchSampler, Lengths, Recipe, plan, recipe
from equipoise.loaders.pack_dataset import pack_dataset
from equipoise.packing.assign import best_fit_decreasing
from equipoise.samplers.epoch_packs import packs_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loaders.test_token_files import made
from tests.strategies import document_lengths

CONCAT = recipe("static", pack="concat")
RECIPES = [recipe("static"), CONCAT, recipe("wlb"), recipe("vrsp"), recipe("skrull")]
PIECES = 1000  # no document is as long: token d·1000 + i is the i-th of document d


@pytest.fixture(autouse=True, scope="module")
def quiet():
    disable_progress_bars()
    yield
    enable_progress_bars()


def corpus(lengths: list[int], labels: bool = False) -> list[dict]:
    """Every token is unique; ``weight`` and ``keep`` are token-aligned, the other columns are not."""
    rng = np.random.default_rng(len(lengths))
    rows = []
    for document, tokens in enumerate(lengths):
        ids = document * PIECES + np.arange(tokens)
        row = {"input_ids": ids, "weight": ids / 7, "keep": ids % 2 == 0, "name": f"d{document}", "score": document / 3}
        if labels:
            row["labels"] = np.where(rng.random(tokens) < 0.4, -100, ids)
        rows.append(row)
    return rows


def dataset_of(rows: list[dict]) -> Dataset:
    """As ``datasets`` holds them, where some list may be empty."""
    types = {"input_ids": pa.list_(pa.int64()), "labels": pa.list_(pa.int64()), "weight": pa.list_(pa.float64())}
    types |= {"keep": pa.list_(pa.bool_()), "name": pa.string(), "score": pa.float32()}
    return Dataset(pa.table({name: pa.array([row[name] for row in rows], types[name]) for name in rows[0]}))


def flat(lists) -> list:
    return [value for values in lists for value in values]


def expected_label(row: dict, position: int, start: int, end: int, shifted: bool) -> int:
    labels = row.get("labels", row["input_ids"])
    if shifted:
        return int(labels[position + 1]) if position + 1 < end else -100
    return int(labels[position]) if position > start else -100


@given(
    lengths=document_lengths(max_size=25),
    labels=st.booleans(),
    arrow=st.booleans(),
    chosen=st.sampled_from(RECIPES),
    window=st.none() | st.integers(1, 12),
    too_long=st.sampled_from(["split", "truncate", "drop"]),
    options=st.fixed_dictionaries(
        {"shuffle": st.booleans(), "shift_labels": st.booleans(), "restart_positions": st.booleans()}
    ),
    cap=st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
def test_every_token_once_with_what_belongs_to_it(
    lengths: list[int], labels: bool, arrow: bool, chosen, window: int | None, too_long: str, options: dict, cap: int
) -> None:
    end = [min(n, cap) if too_long == "truncate" else n * (too_long == "split" or n <= cap) for n in lengths]
    rows = corpus(lengths, labels)
    dataset = dataset_of(rows) if arrow else rows
    if not any(end):
        with pytest.raises(ValueError, match="no document is left"):
            pack_dataset(dataset, chosen, max_tokens=cap, window=window, too_long=too_long, **options)
        return
    packed = pack_dataset(dataset, chosen, max_tokens=cap, window=window, too_long=too_long, seed=3, **options)
    seen: Counter[int] = Counter()
    for pack in packed:
        seen.update(pack["input_ids"])
        assert 1 <= len(pack["input_ids"]) <= cap
        assert pack["cu_seqlens"] == [0, *np.cumsum(pack["seq_lengths"]).tolist()] and min(pack["seq_lengths"]) > 0
        names, scores = [rows[d]["name"] for d in pack["doc_ids"]], [rows[d]["score"] for d in pack["doc_ids"]]
        assert pack["name"] == names and np.allclose(pack["score"], scores)
        for document, at, to in zip(pack["doc_ids"], pack["cu_seqlens"], pack["cu_seqlens"][1:], strict=False):
            row, start = rows[document], pack["input_ids"][at] % PIECES
            stop = start + to - at
            assert pack["input_ids"][at:to] == row["input_ids"][start:stop].tolist()
            assert pack["weight"][at:to] == row["weight"][start:stop].tolist()
            assert pack["keep"][at:to] == row["keep"][start:stop].tolist()
            first = 0 if options["restart_positions"] else start
            assert pack["position_ids"][at:to] == list(range(first, first + to - at))
            assert pack["labels"][at:to] == [
                expected_label(row, i, start, end[document], options["shift_labels"]) for i in range(start, stop)
            ]
    assert seen == Counter(d * PIECES + i for d, n in enumerate(end) for i in range(n))


@given(
    lengths=document_lengths(max_size=40, empty=False),
    chosen=st.sampled_from(RECIPES),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_packs_are_those_of_the_plan(lengths: list[int], chosen, seed: int, shuffle: bool) -> None:
    packed = pack_dataset(
        dataset_of(corpus(lengths)), chosen, max_tokens=50, too_long="split", seed=seed, shuffle=shuffle
    )
    sampler = BalancedBatchSampler(
        Lengths.from_array(np.array(lengths)),
        recipe("wlb", options=type(chosen.options)(max_delay=0)) if chosen.pack == "wlb" else chosen,
        max_tokens_per_rank=50,
        dp=1,
        documents_per_step=len(lengths) * 400,
        too_long="split",
        seed=seed,
        shuffle=shuffle,
        order="shuffle" if shuffle else "preserve",
    )
    step = sampler.plan(0)
    rows = [step.packs.take([pack]).spans for pack in step.grid[0]]
    rows = [spans for spans in rows if spans.document[0] >= 0]  # slots that no document is left for
    assert packed["doc_ids"][:] == [spans.document.tolist() for spans in rows]
    assert packed["seq_lengths"][:] == [spans.tokens.tolist() for spans in rows]
    if not shuffle and max(lengths) <= 50:
        alone = plan(np.array(lengths), sampler.recipe, dp=1, max_tokens_per_rank=50, too_long="split").packs
        same = [sorted(alone.take([pack]).spans.document.tolist()) for pack in range(len(alone))]
        assert sorted(sorted(numbers) for numbers in packed["doc_ids"]) == sorted(same)[same.count([-1]) :]


def lognormal(count: int = 20_000) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(5.5, 1.2, count), 4, 8192).astype(np.int64)


def windowed(lengths: np.ndarray, chosen, cap: int, window: int, shuffle: bool = True) -> np.ndarray:
    """Tokens of the packs, in order."""
    sampler = BalancedBatchSampler(
        Lengths.from_array(lengths),
        chosen,
        max_tokens_per_rank=cap,
        dp=1,
        documents_per_step=window,
        shuffle=shuffle,
        order="shuffle" if shuffle else "preserve",
        too_long="split",
    )
    return packs_of(sampler, 1 if chosen.cuts else int(lengths.min())).tokens


@pytest.mark.parametrize("window", [250, 1000, 7000])
def test_windows_cost_no_fill(window: int) -> None:
    """Packed by batches of 1000 documents, as ``map`` hands them over, every batch ends with part-filled packs."""
    lengths = lognormal()
    whole = len(best_fit_decreasing(lengths, 8192)[1]) - 1
    batches = sum(
        len(best_fit_decreasing(lengths[a : a + window], 8192)[1]) - 1 for a in range(0, len(lengths), window)
    )
    packs = len(windowed(lengths, recipe("static"), 8192, window))
    assert packs - whole <= 2 and batches - whole > len(lengths) / window / 2 - 2


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=300), window=st.integers(1, 50), shuffle=st.booleans())
@settings(max_examples=200, deadline=None)
def test_only_the_end_leaves_packs_part_filled(lengths: list[int], window: int, shuffle: bool) -> None:
    tokens = windowed(np.array(lengths), recipe("static"), 100, window, shuffle)
    assert len(tokens) <= -(-sum(lengths) // 100) + sum(
        tokens < 100 - 12
    )  # packs of short documents: full, but for the last
    assert sum(tokens <= 100 - 12) <= 1
    full = windowed(np.array(lengths), CONCAT, 100, window, shuffle)
    assert (full[:-1] == 100).all()


@pytest.mark.parametrize(("shortest", "repacked"), [(700, 100), (1, 150)])
def test_documents_that_none_fits_beside_are_not_packed_again_and_again(
    shortest: int, repacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none can ever fit, they go with their window; where one might, no more wait than best fit wastes."""
    solve, sizes = Recipe.solve, []

    def counted(self, window, *args, **options):
        sizes.append(len(window.spans))
        return solve(self, window, *args, **options)

    monkeypatch.setattr(Recipe, "solve", counted)
    tokens = windowed(np.array([700] * 5000 + [shortest]), recipe("static"), 1000, 100, shuffle=False)
    assert sorted(tokens) == [700] * (5000 - (shortest == 1)) + [700 + (shortest == 1)]
    assert max(sizes) <= repacked and len(sizes) == 51


def test_rests_of_split_documents_find_each_other_over_windows() -> None:
    """25 = 10 + 10 + 5: the rest is shorter than any document."""
    packed = pack_dataset(dataset_of(corpus([25, 6, 25])), max_tokens=10, window=1, too_long="split", shuffle=False)
    assert sorted(packed["seq_lengths"]) == [[5, 5], [6], [10], [10], [10], [10]]


def test_concat_in_order_is_the_stream_itself() -> None:
    rows = corpus([7, 3, 12, 1, 9, 4, 4])
    for window in (None, 2, 3):
        packed = pack_dataset(dataset_of(rows), CONCAT, max_tokens=12, window=window, shuffle=False)
        assert [len(pack) for pack in packed["input_ids"]] == [12, 12, 12, 4]
        assert flat(packed["input_ids"]) == np.concatenate([row["input_ids"] for row in rows]).tolist()


def test_empty_documents_are_dropped_and_counted() -> None:
    packed = pack_dataset(dataset_of(corpus([0, 2, 0])), max_tokens=8)
    assert packed["seq_lengths"][:] == [[2]] and packed["cu_seqlens"][:] == [[0, 2]] and packed["doc_ids"][:] == [[1]]
    assert "1 items from 3 documents" in packed.info.description and "2 empty dropped" in packed.info.description
    with pytest.raises(ValueError, match="no document is left to train on: of 2 documents 2 are empty"):
        pack_dataset(dataset_of(corpus([0, 0])), max_tokens=8)


@pytest.mark.parametrize(
    ("policy", "seq_lengths", "told"),
    [
        ("drop", [[2, 3]], r"1 longer than 8 tokens dropped \(9 tokens lost\)"),
        ("truncate", [[2, 3], [8]], r"1 longer than 8 tokens truncated \(1 tokens lost\)"),
        ("split", [[1, 2, 3], [8]], r"1 longer than 8 tokens split \(0 tokens lost\)"),
    ],
)
def test_documents_too_long_by_an_explicit_policy(policy: str, seq_lengths: list, told: str) -> None:
    """Lengths 9, 2, 3 under a cap of 8."""
    with pytest.raises(ValueError, match="at most 8 tokens .*document 0 has 9 and 1 of 3 are too long"):
        pack_dataset(dataset_of(corpus([9, 2, 3])), max_tokens=8)
    packed = pack_dataset(dataset_of(corpus([9, 2, 3])), max_tokens=8, too_long=policy)
    assert sorted(sorted(row) for row in packed["seq_lengths"]) == seq_lengths
    assert re.search(told, packed.info.description)


def test_saved_and_reloaded_by_datasets(tmp_path: Path) -> None:
    packed = pack_dataset(dataset_of(corpus([9, 2, 3, 5, 4])), max_tokens=10)
    packed.save_to_disk(str(tmp_path / "packed"))
    again = load_from_disk(str(tmp_path / "packed"))
    assert again[:] == packed[:] and again.features == packed.features and len(again) == 3
    assert again.info.description == packed.info.description and "filled" in again.info.description
    assert {again.features[name].feature.dtype for name in ("input_ids", "labels", "position_ids")} == {"int32"}


def on_disk(folder: Path, lengths: list[int], labels: bool = False) -> Dataset:
    dataset_of(corpus(lengths, labels)).save_to_disk(str(folder))
    return load_from_disk(str(folder))


@pytest.mark.parametrize("kept", ["disk", "memory", "source"])
def test_processes_change_nothing(tmp_path: Path, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.loaders.pack_dataset.TOKENS_AT_ONCE", 60)
    lengths = np.random.default_rng(1).integers(0, 30, 60).tolist()
    if kept == "source":
        dataset = made(tmp_path, "megatron", lengths)
    else:
        dataset = on_disk(tmp_path / "d", lengths, True) if kept == "disk" else dataset_of(corpus(lengths, True))
    one = pack_dataset(dataset, max_tokens=30, window=16)
    for files in one.cache_files:
        os.remove(files["filename"])  # or the second would be the first
    two = pack_dataset(dataset, max_tokens=30, window=16, num_proc=2)
    assert len({file["filename"] for file in two.cache_files}) == (0 if kept == "memory" else 2)
    table, other = two.data.table.combine_chunks(), pack_dataset(dataset, max_tokens=30, window=16).data.table
    assert table.equals(other.combine_chunks()) and table.schema.equals(other.schema)
    assert two.info.description == one.info.description and two.features == one.features


def test_a_changed_input_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    """Same path, cap 20 then 40; every option has its own fingerprint, and the same ones the same file."""
    dataset = on_disk(tmp_path / "d", [9, 2, 3, 5, 4, 17, 11])
    base = {"max_tokens": 20, "too_long": "split"}
    changed = [
        {"max_tokens": 40},
        {"max_tokens": 19},
        {"seed": 1},
        {"shuffle": False},
        {"window": 3},
        {"too_long": "drop"},
    ]
    changed += [{"shift_labels": False}, {"restart_positions": True}, {"recipe": "wlb"}, {"recipe": CONCAT}]
    changed += [{"recipe": "wlb", "cost": lambda pairs, tokens: tokens * 1e-6}]
    made_of = [pack_dataset(dataset, **{**base, **change}) for change in [{}, *changed]]
    assert len({packed._fingerprint for packed in made_of}) == len(made_of)
    assert len({packed.cache_files[0]["filename"] for packed in made_of}) == len(made_of)
    assert max(map(len, made_of[0]["input_ids"])) <= 20 < max(map(len, made_of[1]["input_ids"]))
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "d").iterdir()}
    again = pack_dataset(dataset, **base)
    assert again[:] == made_of[0][:] and again._fingerprint == made_of[0]._fingerprint
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "d").iterdir()} == files
    other = pack_dataset(dataset.select([0, 1, 2, 3, 4, 6, 5]), **base)
    assert other._fingerprint != again._fingerprint


def test_a_source_without_a_fingerprint_is_never_taken_from_a_cache(tmp_path: Path) -> None:
    source = made(tmp_path, "npy", [3, 4, 5])
    first = pack_dataset(source, max_tokens=9)
    (tmp_path / "tokens.npy").write_bytes((tmp_path / "tokens.npy").read_bytes()[:-24] + b"\x05\x00" * 12)
    second = pack_dataset(source, max_tokens=9)
    assert flat(second["input_ids"]) == [5] * 12 != flat(first["input_ids"])
    assert first._fingerprint != second._fingerprint
    assert tmp_path not in Path(second.cache_files[0]["filename"]).parents


def test_columns_keep_their_types() -> None:
    table = pa.table(
        {
            "input_ids": pa.array([[1, 2], [3]], pa.large_list(pa.uint16())),
            "mask": pa.array([[1, 0], [1]], pa.list_(pa.int8())),
            "half": pa.array([[0.5, 1], [2]], pa.list_(pa.float32())),
            "rank": pa.array([3, 4], pa.int8()),
            "text": pa.array(["a", None], pa.large_string()),
        }
    )
    packed = pack_dataset(Dataset(table), max_tokens=8, shuffle=False)
    extra = {"mask": [1, 0, 1], "half": [0.5, 1, 2], "rank": [3, 4], "text": ["a", None]}
    assert {name: packed[0][name] for name in extra} == extra and packed[0]["input_ids"] == [1, 2, 3]
    kinds = {name: feature.feature.dtype for name, feature in packed.features.items()}
    assert [kinds[name] for name in extra] == ["int8", "float32", "int8", "large_string"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1, 2], "odd": [1]}], "column 'odd' must hold one value per token .*document 0"),
        ([{"input_ids": [1, 2], "odd": [["x"], ["y"]]}], "column 'odd' has type"),
        (
            [{"input_ids": [1, 2], "seq_lengths": [2, 0]}],
            "column 'seq_lengths' has the name of a column that packing makes",
        ),
        ([{"input_ids": [1, 2], "doc_ids": 7}], "column 'doc_ids' has the name"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], "column 'attention_mask' is not 1 for all of them"),
        ([{"input_ids": [1, 2**31]}], "input_ids are stored as int32; got 1 … 2147483648"),
        ([{"input_ids": [1, -1]}], "must not be negative; got -1"),
        ([{"input_ids": [1.0, 2.0]}], "token ids must be integers"),
        ([{"tokens": [1]}], "no column 'input_ids'"),
    ],
)
def test_odd_columns_are_refused_by_name(rows: list[dict], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_dataset(Dataset.from_list(rows), max_tokens=8)


def test_a_bad_document_is_named_from_another_process(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2], "mask": [1, 2]} for _ in range(50)]
    rows[37]["mask"] = [1]
    with pytest.raises(ValueError, match="column 'mask' .* for document 37 it has shape"):
        pack_dataset(Dataset.from_list(rows), max_tokens=2, shuffle=False, num_proc=2)


def test_attention_masks_of_ones_are_left_out_and_told() -> None:
    """Beside boundaries a mask of ones says nothing, and models that are given one ignore the boundaries."""
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [3], "attention_mask": [1]}]
    packed = pack_dataset(Dataset.from_list(rows), max_tokens=4)
    assert "attention_mask" not in packed.column_names and "Left out: attention_mask" in packed.info.description


def test_groups_stay_together() -> None:
    rows = [{"input_ids": [i] * n, "prompt": f"p{i // 2}"} for i, n in enumerate([5, 4, 5, 1, 2, 4, 1, 1])]
    packed = pack_dataset(Dataset.from_list(rows), max_tokens=10, group_key="prompt")
    for prompts in packed["prompt"]:
        assert set(Counter(prompts).values()) == {2}
    with pytest.raises(ValueError, match="use group_key with window=None"):
        pack_dataset(Dataset.from_list(rows), max_tokens=10, group_key="prompt", window=4)


@pytest.mark.parametrize("name", ["flexsp", "dynamic_cp", "chunkflow"])
def test_recipes_whose_packs_belong_to_ranks_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"recipe '{name}' makes packs for the ranks of one step"):
        pack_dataset(dataset_of(corpus([3])), name, max_tokens=8)


@pytest.mark.parametrize("window", [0, -1, 2.5])
def test_a_window_is_a_number_of_documents(window: float) -> None:
    with pytest.raises(ValueError, match="window is a whole number of documents"):
        pack_dataset(dataset_of(corpus([3])), max_tokens=8, window=window)  # type: ignore[arg-type]


def test_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="map-style"):
        pack_dataset(dataset_of(corpus([3])).to_iterable_dataset(), max_tokens=8)


@pytest.mark.parametrize("shift_labels", [True, False])
def test_a_plain_hf_model_sees_documents_alone(shift_labels: bool) -> None:
    """Loss and boundaries: unmodified, given only what the row holds; pieces of a split document are documents."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 50}
    net = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **shape)).eval()
    rows = [{"input_ids": np.random.default_rng(n).integers(0, 50, n)} for n in (9, 1, 4, 23, 6)]
    packed = pack_dataset(rows, max_tokens=20, too_long="split", shift_labels=shift_labels, restart_positions=True)
    for pack in packed.with_format("torch"):
        given_ids = {name: pack[name][None] for name in ("input_ids", "position_ids", "labels")}
        if shift_labels:
            given_ids["shift_labels"] = given_ids["labels"]
        loss, losses = net(**given_ids, use_cache=False).loss, []
        for a, b in zip(pack["cu_seqlens"], pack["cu_seqlens"][1:], strict=False):
            logits = net(input_ids=pack["input_ids"][None, a:b], use_cache=False).logits[0]
            labels = pack["labels"][a:b] if shift_labels else torch.cat([pack["labels"][a:b][1:], torch.tensor([-100])])
            losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none")[labels != -100])
        assert torch.allclose(loss, torch.cat(losses).mean(), atol=1e-5)
