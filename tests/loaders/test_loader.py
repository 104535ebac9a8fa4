"""BalancedLoader: exactly once at every position it can be stopped and resumed, steps, errors, threads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from equipoise import BalancedBatchSampler, BalancedLoader, Lengths, PlannedDataset, Stream, ThdCollator, recipe
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.strategies import document_lengths

ROWS = [np.arange(n) for n in (5, 1, 9, 3, 3, 7, 2, 8, 4, 6, 1, 5)]


def make(dataset: object = None, **options) -> BalancedLoader:
    defaults = {"max_tokens_per_rank": 10, "dp": 1, "documents_per_step": 5}
    return BalancedLoader(
        ROWS if dataset is None else dataset, recipe("vrsp", attend="none"), **{**defaults, **options}
    )


def content(batch) -> tuple:
    return batch.epoch, batch.step, batch.slot, tuple(batch.documents.tolist()), tuple(batch.input_ids.tolist())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("last", ["partial", "drop", "carry"])
def test_resume_at_every_position_three_times_chained(num_workers: int, last: str) -> None:
    """Stopped after i, j and k micro-batches, each time in a new loader, two epochs are read exactly as without a stop."""
    options = {"num_workers": num_workers, "last": last}
    whole = make(**options)
    truth = [content(batch) for _ in range(2) for batch in whole]
    assert {row[0] for row in truth} == {0, 1}
    stops = range(len(truth) + 1) if num_workers == 0 else (0, 3, len(truth) // 2, len(truth))
    for stop in stops:
        read: list[tuple] = []
        state = make(**options).state_dict()
        for share in (stop // 3, 2 * stop // 3, stop, len(truth)):
            loader = make(**options)
            loader.load_state_dict(json.loads(json.dumps(state)))
            while len(read) < share:
                for batch in loader:
                    read.append(content(batch))
                    if len(read) == share:
                        break
            state = loader.state_dict()
        assert read == truth


@given(lengths=document_lengths(max_size=20), stop=st.integers(1, 30), last=st.sampled_from(["partial", "carry"]))
@settings(max_examples=200, deadline=None)
def test_exactly_once_whatever_the_lengths(lengths: list[int], stop: int, last: str) -> None:
    """Broken off anywhere and resumed, every document of the epoch comes once (carried ones in the next)."""
    if not any(lengths):
        return
    rows = [np.arange(n) for n in lengths]
    options = {"max_tokens_per_rank": 32, "too_long": "split", "last": last, "documents_per_step": 6}
    try:
        loader = make(rows, **options)
    except ValueError as error:
        assert "leaves no step" in str(error)
        return
    tokens: dict[int, int] = {}
    for at, batch in enumerate(loader, 1):
        count(tokens, batch)
        if at == stop:
            break
    fresh = make(rows, **options)
    fresh.load_state_dict(loader.state_dict())
    fresh.set_epoch(0)
    for batch in fresh:
        count(tokens, batch)
    if last == "carry":
        fresh.set_epoch(1)
        first = fresh.sampler.admission
        carried = len(first.items) - first.start(1)
        assert sum(tokens.values()) + carried_tokens(fresh, carried) == sum(lengths)
    else:
        assert tokens == {document: n for document, n in enumerate(lengths) if n}


def count(tokens: dict[int, int], batch) -> None:
    sizes = batch.cu_seqlens.diff().tolist()
    for document, size in zip(batch.documents.tolist(), sizes, strict=True):
        if document >= 0:
            tokens[document] = tokens.get(document, 0) + size


def carried_tokens(loader: BalancedLoader, carried: int) -> int:
    admission = loader.sampler.admission
    size = len(admission.items)
    return int(admission.items.spans(admission.order.at(size - carried, size))[0].tokens.sum())


def test_the_epoch_edge_gives_no_empty_epoch() -> None:
    """Saved behind the last batch: the next epoch follows, by itself or by set_epoch; its own epoch has nothing left."""
    first = make()
    for _ in first:
        pass
    state = first.state_dict()
    truth = [content(batch) for batch in first]
    assert truth[0][0] == 1
    for epoch in (None, 1):
        loader = make()
        loader.load_state_dict(state)
        if epoch is not None:
            loader.set_epoch(epoch)
        assert [content(batch) for batch in loader] == truth
    loader = make()
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert list(loader) == []
    assert [content(batch) for batch in loader] == truth
    again = make()
    again.set_epoch(1)
    assert [content(batch) for batch in again] == truth


def test_load_then_save_before_any_batch_keeps_the_state() -> None:
    loader = make()
    next(iter(loader))
    other = make()
    other.load_state_dict(loader.state_dict())
    assert other.state_dict() == loader.state_dict()


def test_steps_group_micro_batches_and_must_be_read() -> None:
    loader = make(dp=1)
    steps = [[content(batch) for batch in step] for step in loader.steps()]
    assert [len({row[1] for row in step}) for step in steps] == [1] * loader.steps_per_epoch == [1, 1, 1]
    assert sum(len(step) for step in steps) == len([batch for batch in make()])  # noqa: C416
    with pytest.raises(RuntimeError, match="was left before the last"):
        for step in make(max_tokens_per_rank=9).steps():
            next(step)


def test_steps_resume_in_mid_step() -> None:
    loader = make()
    it = iter(loader)
    first = next(it)
    assert not first.is_last_slot
    other = make()
    other.load_state_dict(loader.state_dict())
    rest = [content(batch) for batch in next(other.steps())]
    assert rest == [content(batch) for batch in list(make())[1 : first.num_slots]]


def test_the_parts_serve_those_who_keep_their_own_dataloader() -> None:
    """DataLoader(PlannedDataset, batch_sampler=…, collate_fn=…) gives the loader's batches, state included."""
    chosen = recipe("vrsp", attend="none")
    sampler = BalancedBatchSampler(
        Lengths.from_array([len(ids) for ids in ROWS]), chosen, max_tokens_per_rank=10, dp=1, documents_per_step=5
    )
    own = DataLoader(PlannedDataset(ROWS), batch_sampler=sampler, collate_fn=ThdCollator(chosen), num_workers=1)
    batches = list(own)
    assert [content(batch) for batch in batches] == [content(batch) for batch in make()]
    sampler.load_state_dict(batches[2].state())
    assert [content(batch) for batch in own] == [content(batch) for batch in batches[3:]]


def test_len_and_describe() -> None:
    fixed = make(documents_per_step=None, packs_per_step=2)
    assert len(fixed) == len(list(fixed))
    with pytest.raises(TypeError, match="varies"):
        len(make())
    assert "12 items from 12 documents" in str(make()) and "at most 10 tokens" in str(make())


def test_an_error_in_the_dataset_reaches_the_trainer_and_ends_the_thread() -> None:
    class Bad:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> list[int]:
            if index == 2:
                raise OSError("disk gone")
            return [1, 2]

    loader = make(Bad(), lengths=Lengths.from_array(np.full(4, 2)), documents_per_step=4)
    with pytest.raises(RuntimeError, match="document 2 could not be read: OSError: disk gone"):
        list(loader)
    pump = loader._pump
    loader.close()
    assert not pump._thread.is_alive()


def test_breaking_off_leaves_no_thread_and_the_next_iteration_starts_over() -> None:
    loader = make(num_workers=1)
    for _ in range(3):
        for batch in loader:
            assert content(batch)[:3] == (0, 0, 0)
            break
    pump = loader._pump
    loader.close()
    assert not pump._thread.is_alive()


def test_unknown_targets_are_summed_over_the_step_and_survive_a_stop() -> None:
    rows = [{"input_ids": ids, "labels": np.where(ids % 2, ids, -100)} for ids in ROWS]
    whole = list(make(rows))
    for step in {batch.step for batch in whole}:
        held = [batch for batch in whole if batch.step == step]
        assert {batch.num_targets_step for batch in held} == {sum(batch.num_targets for batch in held)}
    for stop in range(len(whole)):
        loader, other = make(rows), make(rows)
        for _, _batch in zip(range(stop + 1), loader, strict=False):
            pass
        other.load_state_dict(loader.state_dict())
        other.set_epoch(0)
        assert [b.num_targets_step for b in other] == [b.num_targets_step for b in whole[stop + 1 :]]


def test_indexed_targets_need_no_labels_pass() -> None:
    table = {"input_ids": [ids.tolist() for ids in ROWS], "labels": [ids.tolist() for ids in ROWS]}
    table["num_targets"] = [max(len(ids) - 1, 0) for ids in ROWS]
    loader = make(Dataset.from_dict(table), targets="num_targets")
    assert loader.sampler.plan(0).num_targets is not None
    batch = next(iter(loader))
    assert batch.num_targets_step == loader.sampler.plan(0).num_targets


def test_labels_over_several_ranks_need_a_group_or_an_index() -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in ROWS]
    with pytest.raises(ValueError, match="must be summed over ranks: initialise torch.distributed"):
        list(make(rows, dp=2, rank=0))


def test_where_a_process_stands_must_be_said_once() -> None:
    with pytest.raises(ValueError, match="give dp="):
        make(dp=None)
    with pytest.raises(ValueError, match="rank is needed for dp=2 x cp=2"):
        make(dp=2, cp=2)
    with pytest.raises(ValueError, match="ahead and check_every must be at least 1"):
        make(ahead=0)


@pytest.mark.parametrize("stream", [False, True])
def test_labels_further_ahead_cross_no_document(stream: bool) -> None:
    """Token ids tell their document: 100 times its number and the position in it."""
    lengths = (1, 2, 3, 7, 5, 9, 4)
    rows = [100 * document + np.arange(tokens) for document, tokens in enumerate(lengths)]
    loader = make(Stream.of([rows]) if stream else rows, label_offsets=(2, 3), num_workers=1)
    seen = 0
    for batch in loader:
        assert batch.label_offsets == (2, 3) and batch.shifted_labels.shape == (2, batch.input_ids.numel())
        ids, labels = batch.input_ids, batch.shifted_labels
        ends = torch.tensor(lengths)[ids // 100]
        for offset, row in zip((2, 3), labels, strict=True):
            assert torch.equal(row, torch.where(ids % 100 + offset < ends, ids + offset, -100))
        seen += ids.numel()
    assert seen == sum(lengths)
    for wrong in ((0,), (1.5,), 2, "2", (-1,)):
        with pytest.raises(ValueError, match="label_offsets are whole numbers of at least 1, tokens ahead"):
            make(rows, label_offsets=wrong)
