"""What goes wrong with loaders elsewhere, by the items of a survey of public reports: each with its own input, done right here.

An item whose input a test beside the code has already is not repeated:

| item | test |
|---|---|
| A5 of streams | ``loaders/test_stream_feed.py::test_ranks_whose_documents_differ_end_together`` |
| A8 | ``loaders/test_collate.py::test_masks_are_shifted_per_document``, ``…::test_a_one_token_document_has_no_target…`` |
| A11 | ``loaders/test_shapes.py::test_boundaries_do_not_repeat_the_end_unless_asked_to`` |
| A12, A13 of pack_dataset | ``loaders/test_pack_dataset.py::test_empty_documents…``, ``…::test_documents_too_long_by_an_explicit_policy`` |
| A14 | ``loaders/test_collate.py::test_seven_tokens_padded_to_eight_on_two_ranks`` |
| A17 over processes | ``test_training.py::test_a_step_equals_one_process`` |
| B9 | ``loaders/test_stream_feed.py::test_three_shards_serve_any_ranks_evenly``, ``loaders/test_tar.py::test_three_shards…`` |
| B12 | ``loaders/test_pack_dataset.py::test_windows_cost_no_fill``, ``…::test_only_the_end_leaves_packs_part_filled`` |
| B14 compiled | ``loaders/test_shapes.py::test_a_compiled_function_is_compiled_once`` |
| B17 of streams | ``loaders/test_stream_feed.py::test_a_killed_worker_is_an_error_on_all_ranks`` |
| B22 of pack_dataset | ``loaders/test_pack_dataset.py::test_a_changed_input_is_not_taken_from_the_cache`` |
| C10 | ``loaders/test_loader.py::test_resume_at_every_position…``, ``loaders/test_machine.py::test_a_state_goes_from_any_number…`` |
| C11 | ``test_recipes.py::test_the_digest_does_not_depend_on_the_hash_seed`` |
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from equipoise import BalancedLoader, Lengths, Stream, ThdBatch, plan, recipe
from equipoise.loaders.shapes import Shapes
from equipoise.loaders.tar import TarShards
from equipoise.loaders.tar_index import index_shards
from equipoise.packing.queues import WlbQueues
from equipoise.samplers.order import permute
from equipoise.samplers.plan import StepPlan
from torch.utils.data import get_worker_info

from tests.loaders.archives import write_shard

STATIC, VRSP = recipe("static", attend="none"), recipe("vrsp", attend="none")
CONCAT = recipe("static", pack="concat", attend="none")
QUEUES = recipe("wlb", attend="none", options=WlbQueues(thresholds=(3, 6), max_delay=2))

IN_ORDER = {"shuffle": False, "order": "preserve", "too_long": "split"}


def rows(lengths: Iterable[int]) -> list[np.ndarray]:
    """Documents of these lengths; the tokens of document d are 100 d, 100 d + 1, …"""
    return [100 * at + np.arange(count) for at, count in enumerate(lengths)]


def make(data: Any, cap: int, chosen: Any = STATIC, **options) -> BalancedLoader:
    size = {} if {"packs_per_step", "tokens_per_step"} & set(options) else {"documents_per_step": 1}
    return BalancedLoader(data, chosen, max_tokens_per_rank=cap, **{"dp": 1, **size, **options})


def side_by_side(data: Any, cap: int, chosen: Any = STATIC, *, dp: int, cp: int = 1, **options) -> list[BalancedLoader]:
    """The loader of every rank, all in this process."""
    return [make(data, cap, chosen, dp=dp, cp=cp, rank=rank, **options) for rank in range(dp * cp)]


def held(batch: ThdBatch) -> list[int]:
    """Its documents, fillers left out."""
    return [document for document in batch.documents.tolist() if document >= 0]


def all_held(batches: Iterable[ThdBatch]) -> list[int]:
    return [document for batch in batches for document in held(batch)]


def firsts(batches: Iterable[ThdBatch]) -> list[int]:
    """Documents of ``rows`` told by their tokens, one per batch."""
    return [int(batch.input_ids[0]) // 100 for batch in batches]


def by_step(batches: Iterable[ThdBatch]) -> dict[tuple[int, int], Counter]:
    """Documents of each (epoch, step)."""
    found: dict[tuple[int, int], Counter] = {}
    for batch in batches:
        found.setdefault((batch.epoch, batch.step), Counter()).update(held(batch))
    return found


class Counting(Sequence):
    """Documents of one length that are made when they are read, and noted then."""

    column_names = ("input_ids",)

    def __init__(self, count: int, tokens: int = 4) -> None:
        self.count, self.tokens, self.read = count, tokens, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, document: int) -> np.ndarray:
        self.read.append(document)
        return np.full(self.tokens, document % 1000)

    @property
    def lengths(self) -> Lengths:
        return Lengths.from_array(np.full(self.count, self.tokens, np.int32))


class Letters:
    """Twelve documents in three parts of four, opened anew each time."""

    def __init__(self, part: int) -> None:
        self.part = part

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(rows([2] * 12)[4 * self.part : 4 * self.part + 4])


def shards(folder: Path, counts: Sequence[int], tokens: int = 2) -> TarShards:
    documents, ends = rows([tokens] * sum(counts)), np.cumsum([0, *counts])
    paths = [
        write_shard(folder / f"{at}.tar", documents[ends[at] : ends[at + 1]], int(ends[at]))
        for at in range(len(counts))
    ]
    return TarShards(index_shards(paths, folder / "shards.arrow"))


# A: nearly sure without a test


@pytest.mark.parametrize("kind", ["shards", "stream"])
def test_a1_a_second_resume_does_not_restart_the_stream(kind: str, tmp_path: Path) -> None:
    """12 samples in 3 shards: take 3, save, load, again and again; loading and saving at once changes nothing."""
    data = shards(tmp_path, [4, 4, 4]) if kind == "shards" else Stream.of([Letters(part) for part in range(3)])
    truth = firsts(make(data, 2, shuffle=False))
    assert sorted(truth) == list(range(12)) and (kind == "stream" or truth == list(range(12)))
    state, taken = make(data, 2, shuffle=False).state_dict(), []
    for _ in range(4):
        loader = make(data, 2, shuffle=False)
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        taken.append(firsts(islice(loader, 3)))
        state = loader.state_dict()
        loader.close()
    assert taken == [truth[at : at + 3] for at in (0, 3, 6, 9)]


@pytest.mark.parametrize("asked", ["before", "after", "not"])
def test_a2_the_epoch_boundary_gives_no_empty_epoch(asked: str) -> None:
    """8 samples, batches of 2, saved at every position 0 … 4, ``set_epoch`` before and after loading."""
    data = rows([2] * 8)
    for position in range(5):
        first = make(data, 4, documents_per_step=2)
        before = all_held(islice(first, position))
        loader = make(data, 4, documents_per_step=2)
        if asked == "before":
            loader.set_epoch(0)
        loader.load_state_dict(first.state_dict())
        if asked == "after":
            loader.set_epoch(0)
        if position < 4 or asked == "after":
            rest = list(loader)
            assert len(rest) == 4 - position and sorted(before + all_held(rest)) == list(range(8))
        if asked != "not":
            loader.set_epoch(1)
        following = list(loader)
        assert [batch.epoch for batch in following] == [1] * 4 and sorted(all_held(following)) == list(range(8))


@pytest.mark.parametrize("chosen", [STATIC, QUEUES], ids=["static", "queues"])
def test_a3_no_document_is_lost_in_a_buffer(chosen: Any) -> None:
    """40 samples; at every stop micro-batches are ready, packs open and documents held back in queues."""
    data, options = rows([2, 7, 3, 1, 5, 4, 8, 6] * 5), {"documents_per_step": 10, "ahead": 4}
    for stop in range(len(list(make(data, 9, chosen, **options))) + 1):
        first, other = make(data, 9, chosen, **options), make(data, 9, chosen, **options)
        seen = all_held(islice(first, stop))
        other.load_state_dict(first.state_dict())
        other.set_epoch(0)
        assert sorted(seen + all_held(other)) == list(range(40))


def test_a3_nor_in_workers_that_prefetch() -> None:
    """40 samples, stopped after 6 while two workers have eight more on their way."""
    options = {"documents_per_step": 4, "num_workers": 2, "prefetch_factor": 4}
    first, other = make(rows([3] * 40), 3, **options), make(rows([3] * 40), 3, **options)
    seen = all_held(islice(first, 6))
    other.load_state_dict(first.state_dict())
    assert sorted(seen + all_held(other)) == list(range(40))
    first.close(), other.close()


def test_a5_all_ranks_make_as_many_micro_batches() -> None:
    """Documents of 95 that fit alone and of 20 that fit five to a pack: the count is the plan's, not a collective's."""
    batches = [list(each) for each in side_by_side(rows([95] * 5 + [20] * 5), 100, dp=2, documents_per_step=10)]
    assert len(batches[0]) == len(batches[1]) == batches[0][0].num_slots
    assert sorted(all_held(batches[0] + batches[1])) == list(range(10))
    assert [batch.digest for batch in batches[0]] == [batch.digest for batch in batches[1]]


@pytest.mark.parametrize("name", ["static", "wlb", "vrsp", "skrull", "flexsp", "dynamic_cp"])
def test_a7_the_cap_is_not_broken_by_the_balancer(name: str) -> None:
    """Eight documents of 7 under a cap of 8: eight packs, though 56 tokens would fill seven."""
    step = plan(np.full(8, 7), name, dp=1, max_tokens_per_rank=8)
    step.check()
    filler = step.packs.spans.document[step.packs.offsets[:-1]] < 0
    assert step.packs.tokens[~filler].tolist() == [7] * 8 and step.packs.tokens.max() <= 8
    with pytest.raises(ValueError, match="at most 8 tokens"):
        plan(np.array([7, 9]), name, dp=1, max_tokens_per_rank=8)


@pytest.mark.parametrize("restart", [False, True])
def test_a9_positions_never_jump_inside_a_segment(restart: bool) -> None:
    """A document of 15 cut at a cap of 11 behind 3 tokens of another: a position modulo 11 would be 8, 9, 10, 0, …"""
    loader = make(rows([3, 15]), 11, CONCAT, **IN_ORDER, documents_per_step=3, restart_positions=restart)
    first, second = sorted(loader, key=lambda batch: batch.starts[-1].item())
    assert first.position_ids.tolist() == [0, 1, 2, *range(8)] and first.doc_ids.tolist() == [0] * 3 + [1] * 8
    assert second.position_ids.tolist() == ([0, 1, 2, 0, 1, 2, 3] if restart else list(range(8, 15)))
    assert second.documents.tolist() == [1, 1] and second.starts.tolist() == [
        8,
        11,
    ]  # too long by itself, and so cut too
    assert first.labels.tolist() == [1, 2, -100, *range(101, 109)]  # the label at the cut survives


def test_a10_boundaries_are_told_and_not_guessed_from_positions() -> None:
    """A pack whose positions are 5, 6, 7, 0, 1: a continued piece and a document."""
    loader = make(rows([8, 2]), 5, STATIC, shuffle=False, too_long="split", documents_per_step=3)
    batch = next(batch for batch in loader if batch.position_ids.tolist() == [5, 6, 7, 0, 1])
    given = batch.to_hf()
    assert given["cu_seq_lens_q"].tolist() == given["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert (given["max_length_q"], given["max_length_k"]) == (3, 3) and type(given["max_length_q"]) is int
    assert given["position_ids"].shape == (1, 5) and given["cu_seq_lens_q"].dtype == torch.int32
    packed = batch.to_megatron()["packed_seq_params"]
    assert packed["cu_seqlens_q"].tolist() == [0, 3, 5] and packed["max_seqlen_kv"] == 3
    assert make(rows([8]), 8, recipe("static")).__iter__().__next__().to_hf()["plan"].tokens == 8


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a12_empty_documents_are_dropped_and_never_a_boundary(kind: str) -> None:
    def data(documents: list) -> Any:
        return documents if kind == "rows" else Stream.of([documents])

    loader = make(data([[], [1, 2], []]), 8, documents_per_step=3)
    (batch,) = loader
    assert batch.cu_seqlens.tolist() == [0, 2] and batch.input_ids.tolist() == [1, 2] and batch.num_docs == 1
    if kind == "rows":
        assert "2 empty dropped" in loader.describe()
        with pytest.raises(ValueError, match="no document is left to train on: of 2 documents 2 are empty"):
            make([[], []], 8)


@pytest.mark.parametrize(
    ("policy", "sizes", "told"),
    [
        ("drop", [2, 3], "1 longer than 8 tokens dropped (9 tokens lost)"),
        ("truncate", [2, 3, 8], "1 longer than 8 tokens truncated (1 tokens lost)"),
        ("split", [1, 2, 3, 8], "1 longer than 8 tokens split (0 tokens lost)"),
    ],
)
def test_a13_documents_that_are_too_long_by_an_explicit_policy(policy: str, sizes: list[int], told: str) -> None:
    with pytest.raises(ValueError, match="at most 8 tokens .*document 0 has 9 and 1 of 3 are too long"):
        make(rows([9, 2, 3]), 8)
    loader = make(rows([9, 2, 3]), 8, too_long=policy, documents_per_step=4)
    assert sorted(size for batch in loader for size in batch.cu_seqlens.diff().tolist()) == sizes
    assert told in loader.describe()


def test_a16_fields_beside_the_tokens_are_padded_and_cut_like_them() -> None:
    """Documents of 3 and 5 on two ranks, padded to 4 and 8."""
    data = [{"input_ids": ids, "weight": ids * 0.5} for ids in rows([3, 5])]
    shares = [next(iter(each)) for each in side_by_side(data, 8, dp=1, cp=2, documents_per_step=2, pad_tp=1)]
    where = torch.cat([share.shard_index for share in shares])
    assert sorted(where.tolist()) == list(range(12))
    whole = {name: torch.cat([share[name] for share in shares])[where.argsort()] for name in ("input_ids", "weight")}
    assert torch.equal(whole["weight"], whole["input_ids"] * 0.5)
    first = shares[0]
    for document, padded, size in zip(first.documents, first.cu_seqlens_padded, first.cu_seqlens.diff(), strict=False):
        assert whole["input_ids"][padded : padded + size].tolist() == (100 * document + torch.arange(size)).tolist()


def summed_gradient(weight: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the sum of token losses of a bigram model."""
    loss = torch.nn.functional.cross_entropy(weight[ids], labels, ignore_index=-100, reduction="sum")
    return torch.autograd.grad(loss, weight)[0]


def test_a17_a_step_is_scaled_by_the_targets_of_all_ranks_and_micro_batches() -> None:
    """Valid labels [[10, 1], [3, 2]] on two ranks in two micro-batches: the mean of means is not the sum over 16."""
    counts, rng = [10, 1, 3, 2], np.random.default_rng(0)
    data = [{"input_ids": rng.integers(0, 9, 12)} for _ in counts]
    for row, count in zip(data, counts, strict=True):
        row["labels"] = np.where(np.arange(12) < 12 - count, -100, row["input_ids"])
    known = Lengths(tokens=np.full(4, 12), targets=np.array(counts))
    weight = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    every = [list(each) for each in side_by_side(data, 12, dp=2, lengths=known, documents_per_step=4)]
    assert [len(batches) for batches in every] == [2, 2]
    assert {batch.num_targets_step for batches in every for batch in batches} == {16}
    assert sorted(batch.num_targets for batches in every for batch in batches) == sorted(counts)
    alone = [(torch.from_numpy(row["input_ids"][:-1]), torch.from_numpy(row["labels"][1:])) for row in data]
    truth = sum(summed_gradient(weight, *each) for each in alone) / 16
    for reduction, over in (("sum", 1), ("mean", 2)):
        parts = [
            summed_gradient(weight, batch.input_ids, batch.labels) * batch.loss_scale(reduction) / over
            for batches in every
            for batch in batches
        ]
        assert torch.allclose(sum(parts), truth, rtol=1e-12, atol=0)


def test_a18_both_means_can_be_had_from_a_pack() -> None:
    """Documents of 7 and 2: the mean over tokens and that over documents."""
    (batch,) = make(rows([7, 2]), 9, shuffle=False, documents_per_step=2)
    loss, counted = batch.position_ids.double() + 1, batch.labels != -100
    sums = torch.zeros(2, dtype=torch.float64).index_add(0, batch.doc_ids.long(), loss * counted)
    targets = torch.bincount(batch.doc_ids[counted], minlength=2)
    assert batch.cu_seqlens.diff().tolist() == [7, 2] and targets.tolist() == [6, 1]
    assert float(sums.sum() * batch.loss_scale()) == 22 / 7 and float((sums / targets).mean()) == (21 / 6 + 1) / 2
    assert len(held(batch)) == 2


def test_a19_a_share_without_targets_is_flagged_and_divides_by_the_count_of_all() -> None:
    """One of two micro-batches, and one of two CP shards, have no label: no NaN, and the plan knew."""
    data = [
        {"input_ids": np.arange(8), "labels": np.full(8, -100)},
        {"input_ids": np.arange(8), "labels": np.where(np.arange(8) == 1, 1, -100)},
    ]
    known = Lengths(tokens=np.full(2, 8), targets=np.array([0, 1]))
    batches = list(make(data, 8, lengths=known, documents_per_step=2))
    assert sorted(batch.num_targets for batch in batches) == [0, 1]
    assert {batch.num_targets_step for batch in batches} == {1} and {batch.loss_scale() for batch in batches} == {1.0}
    shares = [next(iter(each)) for each in side_by_side(data, 8, dp=1, cp=2, lengths=known, documents_per_step=2)]
    assert [share.num_targets for share in shares] == [1, 0]
    empty = next(batch for batch in batches if batch.num_targets == 0)
    weight = torch.zeros(9, 9, dtype=torch.float64, requires_grad=True)
    scaled = summed_gradient(weight, empty.input_ids, empty.labels) * empty.loss_scale()
    assert torch.equal(scaled, torch.zeros_like(weight))


def test_a21_every_epoch_is_packed_anew_and_alike_on_all_ranks() -> None:
    """100 documents, two epochs, two ranks."""
    lengths = np.random.default_rng(1).integers(1, 30, 100)
    loaders = side_by_side(rows(lengths), 60, VRSP, dp=2, documents_per_step=25)
    epochs = []
    for epoch in range(2):
        batches = [list(each) for each in loaders]
        assert [b.digest for b in batches[0]] == [b.digest for b in batches[1]]
        assert {batch.epoch for each in batches for batch in each} == {epoch}
        assert sorted(all_held(batches[0] + batches[1])) == list(range(100))
        epochs.append({frozenset(held(batch)) for each in batches for batch in each})
    assert len(epochs[0] & epochs[1]) < len(epochs[0]) // 2


def test_a23_the_tail_is_seen_by_an_explicit_policy() -> None:
    """Five bins for two ranks: filled up, left out, or first in the next epoch."""
    seen: dict[str, list[list[list[int]]]] = {}
    for last in ("partial", "drop", "carry"):
        loaders = side_by_side(rows([10] * 5), 10, dp=2, last=last, packs_per_step=2)
        epochs = [[list(each) for each in loaders] for _ in range(2)]
        assert all(len(first) == len(second) for first, second in epochs)
        seen[last] = [[all_held(batches) for batches in epoch] for epoch in epochs]
    partial, drop, carry = (seen[name] for name in ("partial", "drop", "carry"))
    assert [sorted(first + second) for first, second in partial] == [list(range(5))] * 2
    assert [len(first + second) for first, second in drop] == [4, 4]
    left = set(range(5)) - {*carry[0][0], *carry[0][1]}
    assert len(left) == 1 and left <= {carry[1][0][0], carry[1][1][0]}
    assert [len(first + second) for first, second in carry] == [4, 6]
    assert sorted(all_held(make(rows([10] * 4), 10, packs_per_step=2, last="drop"))) == list(range(4))


def test_a24_recurrent_layers_get_boundaries_and_no_mask_beside_them() -> None:
    """Two documents through a running sum that starts anew by ``doc_ids``, or by ``cu_seqlens``, as if each were alone."""
    data = [{"input_ids": ids, "attention_mask": np.ones_like(ids)} for ids in rows([3, 5])]
    (batch,) = make(data, 8, **IN_ORDER, documents_per_step=2)
    alone = torch.cat([torch.from_numpy(row["input_ids"]).cumsum(0) for row in data])
    by_ends = [batch.input_ids[a:b].cumsum(0) for a, b in torch.stack([batch.cu_seqlens[:-1], batch.cu_seqlens[1:]], 1)]
    same = batch.doc_ids[:, None] == batch.doc_ids
    by_ids = (same.tril().long() * batch.input_ids).sum(1)
    assert batch.doc_ids.tolist() == [0] * 3 + [1] * 5 and batch.doc_ids.dtype == torch.int32
    assert torch.equal(by_ids, alone) and torch.equal(torch.cat(by_ends), alone)
    assert not any("mask" in name for name in batch.to_hf())
    assert "attention_mask" not in batch.to_megatron()


# B: likely


def test_b1_b2_b3_a_million_lengths_cost_no_object_each_and_only_own_documents_are_read() -> None:
    """1M documents on 1024 ranks: the index is used as it is, a step costs its own documents, rank 5 reads what it trains."""
    data, few = Counting(1_000_000), Counting(4096)
    lengths, options = data.lengths, {"dp": 1024, "rank": 5, "documents_per_step": 2048}
    list(make(few, 4, VRSP, lengths=few.lengths, **options))  # compiled before memory is counted
    tracemalloc.start()
    loader = make(data, 4, VRSP, lengths=lengths, **options)
    batches = list(islice(loader, 4))
    held_beside, peak = tracemalloc.get_traced_memory()
    loader.close()
    tracemalloc.stop()  # with planning threads still at work it can crash CPython (gh-128679)
    assert held_beside < 2 << 20 and peak < 6 << 20  # a list of a million ints would take 8 MB, its ints 28 more
    plans = [loader.sampler.plan(step) for step in range(6)]
    own = [document for each in plans for document in each.packs.take(each.grid[5]).spans.document.tolist()]
    assert set(all_held(batches)) <= set(data.read) <= {*range(7), *own}  # the first few tell which columns there are
    assert len(data.read) <= 12 + 6


@pytest.mark.parametrize(("dp", "num_workers"), [(4, 0), (1, 2), (2, 0)])
def test_b4_other_ranks_and_workers_go_on_with_the_same_global_batches(dp: int, num_workers: int) -> None:
    """Saved at two ranks behind a step and in the middle of one; loaded at four and at one, with and without workers."""
    data, options = rows(np.random.default_rng(2).integers(1, 20, 48)), {"documents_per_step": 12, "chosen": VRSP}
    truth = by_step(batch for each in side_by_side(data, 24, dp=2, **options) for batch in each)
    for behind_step in (True, False):
        saved = side_by_side(data, 24, dp=2, **options)
        first = next(iter(saved[0])).num_slots
        seen = [list(islice(each, first + (not behind_step))) for each in saved]
        states = [each.state_dict() for each in saved]
        assert states[0] == states[1]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loaders = side_by_side(data, 24, dp=dp, num_workers=num_workers, **options)
            for each in loaders:
                each.load_state_dict(states[0])
        assert ("resumed under another configuration" in str([each.message for each in told])) == (dp != 2)
        rest = [list(each) for each in loaders]
        for each in loaders:
            each.close()
        assert len({len(each) for each in rest}) == 1
        after = by_step(batch for each in rest for batch in each)
        assert {key: value for key, value in after.items() if key[1] > 1} == {
            k: v for k, v in truth.items() if k[1] > 1
        }
        assert sorted(all_held(b for each in seen + rest for b in each)) == list(range(48))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_b5_a_trainers_loop_resumes_in_its_third_epoch(num_workers: int, tmp_path: Path) -> None:
    """Epochs by ``set_epoch``, workers that stay: none is cut short, and what was trained is not read again."""
    data, options = Counting(24, 3), {"documents_per_step": 4, "num_workers": num_workers}

    def train(loader: BalancedLoader, stop: int = 1000) -> list[tuple[int, list[int]]]:
        seen: list[tuple[int, list[int]]] = []
        for epoch in range(loader.epoch, 4):
            loader.set_epoch(epoch)
            for batch in loader:
                seen.append((batch.epoch, held(batch)))
                if len(seen) == stop:
                    loader.save(tmp_path / "loader.json")
                    return seen
        return seen

    whole = make(data, 12, **options)
    truth = train(whole)
    assert Counter(epoch for epoch, _ in truth) == dict.fromkeys(range(4), 6)
    first, other = make(data, 12, **options), make(data, 12, **options)
    before = train(first, stop=2 * 6 + 2)
    first.close()  # it reads ahead
    data.read.clear()
    other.load(tmp_path / "loader.json")
    assert data.read == [] and other.epoch == 2 and before + train(other) == truth
    assert num_workers or len(data.read) <= 24 + 24 - 8 + 1  # one may be read to see its columns
    for loader in (whole, other):
        loader.close()


def test_b6_accelerate_leaves_the_loader_alone() -> None:
    """Batches of 7 and 9 tokens come whole, each once, as they are without it."""
    alone = [batch.input_ids.tolist() for batch in make(rows([7, 9]), 9, shuffle=False)]
    assert [len(ids) for ids in alone] == [7, 9]
    loader = make(rows([7, 9]), 9, shuffle=False)
    try:
        config = DataLoaderConfiguration(dispatch_batches=False, even_batches=False)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        prepared = accelerator.prepare(loader)
        assert prepared is loader and [batch.input_ids.tolist() for batch in prepared] == alone
        moved = [loader_batch.to(accelerator.device) for loader_batch in loader]
        assert all(isinstance(batch, ThdBatch) and batch.max_seqlen == len(batch.input_ids) for batch in moved)
    finally:
        AcceleratorState._reset_state(True)


def test_b7_peers_of_a_cp_group_get_the_same_documents() -> None:
    """R = 2, cp = 2: ranks 0 and 1 are equal, 2 and 3 are, whatever the state of their random numbers."""
    per_rank = []
    for rank in range(4):
        torch.manual_seed(rank), np.random.seed(rank)
        loader = make(rows([6] * 16), 8, VRSP, dp=2, cp=2, rank=rank, documents_per_step=8)
        per_rank.append([(batch.documents.tolist(), batch.cu_seqlens.tolist(), batch.digest) for batch in loader])
    assert per_rank[0] == per_rank[1] and per_rank[2] == per_rank[3]
    assert [row[2] for row in per_rank[0]] == [row[2] for row in per_rank[2]]
    assert not {d for row in per_rank[0] for d in row[0] if d >= 0} & {d for row in per_rank[2] for d in row[0]}


def test_b8_a_pack_of_several_documents_says_so() -> None:
    batch = next(iter(make(rows([3, 5]), 8, documents_per_step=2)))
    assert batch.num_docs == 2 == len(batch.cu_seqlens) - 1 and batch.max_seqlen == 5
    assert next(iter(make(rows([3, 5]), 8, recipe("static"), documents_per_step=2))).to_hf()["plan"].tokens == 8


class Noting(TarShards):
    """Tar shards that note what is read."""

    read: list[int] = []  # noqa: RUF012

    def rows(self, documents: Sequence[int]) -> dict[str, list[Any]]:
        self.read.extend(documents)
        return super().rows(documents)


def test_b10_a_resume_reads_no_payload_that_it_skips(tmp_path: Path) -> None:
    source = Noting(shards(tmp_path, [4, 5, 6]).path)
    for stop in (1, 7, 14):
        first, other = make(source, 2), make(source, 2)
        seen = all_held(islice(first, stop))
        first.close()
        source.read.clear()
        other.load_state_dict(first.state_dict())
        rest = all_held(other)
        assert source.read == rest and sorted(seen + rest) == list(range(15))


@pytest.mark.parametrize("last", ["partial", "drop", "carry"])
def test_b13_len_is_exact_or_a_type_error(last: str) -> None:
    lengths = np.random.default_rng(3).integers(1, 11, 41)
    fixed = make(rows(lengths), 10, packs_per_step=4, last=last)
    for _ in range(3):
        expected, steps = len(fixed), fixed.steps_per_epoch
        batches = list(fixed)
        assert expected == len(batches) == 4 * steps or last == "carry"
    varying = make(rows(lengths), 10, documents_per_step=8, last=last)
    assert varying.steps_per_epoch == len({batch.step for batch in varying})
    with pytest.raises(TypeError, match="varies from step to step"):
        len(varying)
    with pytest.raises(TypeError):
        len(make(Stream.of([Letters(0)]), 10))


class Killing(Counting):
    """A dataset whose worker is killed at a document."""

    def __getitem__(self, document: int) -> np.ndarray:
        if document == 5 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(document)


def test_b17_a_killed_worker_is_an_error_and_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    loader = make(Killing(12), 4, num_workers=2, shuffle=False, timeout=30, lengths=Killing(12).lengths)
    with pytest.raises(RuntimeError, match="worker .*killed"):
        list(loader)
    loader.close()
    assert set(multiprocessing.active_children()) <= before


PERMUTED = "from equipoise.samplers.order import permute; print(permute(0, 50, 50, 3).tolist())"


def test_b18_processes_that_start_together_share_an_empty_cache(tmp_path: Path) -> None:
    """Two compile the same kernel at once; a process that is forked after it was used uses it too."""
    command, environment = [sys.executable, "-c", PERMUTED], {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[0] for process in started]
    here = permute(0, 50, 50, 3).tolist()
    assert told == [f"{here}\n"] * 2 and list(tmp_path.iterdir())
    child = os.fork()
    if not child:
        os._exit(int(permute(0, 50, 50, 3).tolist() != here))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_b21_groups_stay_together() -> None:
    """Answers to one prompt, two to eight of each."""
    sizes = list(range(2, 9))
    group = np.repeat(np.arange(7) + 100, sizes)
    order = np.random.default_rng(0).permutation(len(group))
    table = {"input_ids": [ids.tolist() for ids in rows([3] * len(group))], "prompt": group[order].tolist()}
    loaders = side_by_side(Dataset.from_dict(table), 24, VRSP, dp=2, documents_per_step=4, group_key="prompt")
    packs = [batch["prompt"] for each in loaders for batch in each]
    found = [{int(prompt) for prompt in pack if prompt is not None} for pack in packs]
    assert sorted(prompt for pack in found for prompt in pack) == sorted(set(group.tolist()))


def test_b22_a_plan_is_not_used_under_another_cap(tmp_path: Path) -> None:
    """The same path, cap 4096 and then 8192."""
    lengths = np.full(10, 1000)
    small, large = (plan(lengths, "vrsp", dp=2, max_tokens_per_rank=cap) for cap in (4096, 8192))
    small.save(tmp_path / "plan")
    assert StepPlan.load(tmp_path / "plan", small.config).digest == small.digest
    with pytest.raises(ValueError, match="another configuration .*max_tokens_per_rank: saved 4096, now 8192"):
        StepPlan.load(tmp_path / "plan", large.config)


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor], ids=["list", "numpy", "torch"])
def test_b23_extra_columns_keep_their_kind(kind: Any) -> None:
    """Per token: laid end to end. Per document: one each. Labels that are plain ints, and arrays of another length: an error."""
    data = [
        {"input_ids": kind(range(n)) if kind is list else kind(list(range(n))), "id": n, "name": f"d{n}"}
        for n in (4, 2)
    ]
    for row, n in zip(data, (4, 2), strict=True):
        row["loss_mask"] = kind([1.0] * n)
    (batch,) = make(data, 6, **IN_ORDER, documents_per_step=2)
    assert batch["loss_mask"].tolist() == [1.0] * 6 and batch["id"].tolist() == [4, 2] and batch["name"] == ["d4", "d2"]
    with pytest.raises(ValueError, match="one value per token or one value per document; for document 1"):
        list(make([data[0], {**data[1], "loss_mask": kind([1.0])}], 6, **IN_ORDER, documents_per_step=2))


# C: possible


def test_c1_padded_boundaries_are_given_only_where_they_differ() -> None:
    options = {"dp": 1, "cp": 2, "rank": 0, "documents_per_step": 2, "pad_tp": 1}
    assert "cu_seqlens_padded" not in next(iter(make(rows([8, 4]), 8, **options)))
    batch = next(iter(make(rows([7, 3]), 8, **options)))
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 12]
    packed = next(iter(make(rows([8, 4]), 8, **options))).to_megatron()["packed_seq_params"]
    assert not any("padded" in name for name in packed)


def test_c2_c3_b14_every_micro_batch_of_every_rank_has_one_size() -> None:
    lengths = np.random.default_rng(4).integers(1, 60, 40)
    shapes = Shapes(pad_to=64, max_docs=12, max_seqlen_bucket=16)
    every = [list(each) for each in side_by_side(rows(lengths), 64, dp=2, shapes=shapes, documents_per_step=10)]
    batches = every[0] + every[1]
    assert len(every[0]) == len(every[1]) and {len(batch.input_ids) for batch in batches} == {64}
    assert {len(batch.cu_seqlens) for batch in batches} == {13} and {type(batch.max_seqlen) for batch in batches} == {
        int
    }
    assert {batch.max_seqlen % 16 for batch in batches} == {0} and sorted(all_held(batches)) == list(range(40))
    for batch in batches:
        assert (batch.cu_seqlens.diff()[: batch.num_docs] > 0).all() and batch.cu_seqlens[batch.num_docs] == 64


def test_c5_the_largest_comes_first() -> None:
    lengths = np.random.default_rng(5).integers(1, 40, 60)
    lengths[57] = 90
    batches = list(make(rows(lengths), 100, order="largest_first", documents_per_step=20))
    assert 57 in all_held(batch for batch in batches if batch.step == 0)
    for step in range(3):
        sizes = [len(batch.input_ids) for batch in batches if batch.step == step]
        assert sizes[0] == max(sizes)


def test_c6_two_jobs_on_one_host_share_nothing() -> None:
    options = {"documents_per_step": 2, "num_workers": 1, "timeout": 30}
    one, two = make(rows([2] * 12), 4, **options), make(rows([3] * 12), 6, **options)
    pairs = list(zip(one, two, strict=True))
    for at, tokens in ((0, 2), (1, 3)):
        assert sorted(all_held(pair[at] for pair in pairs)) == list(range(12))
        assert {len(pair[at].input_ids) for pair in pairs} == {2 * tokens}
    one.close(), two.close()


def test_c8_the_short_last_step_counts_its_own_targets() -> None:
    """Seven documents in steps of four: the second step has three, and is divided by theirs."""
    batches = list(make(rows([5] * 7), 5, documents_per_step=4))
    assert [batch.num_slots for batch in batches] == [4] * 4 + [3] * 3
    assert [batch.num_targets_step for batch in batches] == [16] * 4 + [12] * 3
    assert [batch.is_last_slot for batch in batches] == [False] * 3 + [True] + [False] * 2 + [True]
