"""ThdBatch as a mapping, its loss scale, and what it hands to HF."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch
from equipoise import BalancedLoader, ThdBatch, recipe
from transformers import DataCollatorWithFlattening


def batches(**options) -> list[ThdBatch]:
    rows = [
        {"input_ids": np.arange(n) + 1, "labels": np.where(np.arange(n) % 3, np.arange(n), -100)} for n in (5, 9, 4, 7)
    ]
    defaults = {"max_tokens_per_rank": 10, "dp": 1, "documents_per_step": 4}
    return list(BalancedLoader(rows, recipe("static", attend="none"), **{**defaults, **options}))


def test_it_is_a_read_only_mapping_with_attributes() -> None:
    batch = batches()[0]
    assert batch["input_ids"] is batch.input_ids and len(batch) == len(list(batch))
    with pytest.raises(AttributeError, match="no entry 'inputs'; it has input_ids"):
        batch.inputs  # noqa: B018
    with pytest.raises(TypeError):
        batch["input_ids"] = 1  # type: ignore[index]
    for twin in (pickle.loads(pickle.dumps(batch)), copy.copy(batch)):
        assert torch.equal(twin.input_ids, batch.input_ids) and twin.state() == batch.state()


@pytest.mark.parametrize(
    ("largest", "size"), [((1 << 16) - 1, 2), (1 << 16, 4), ((1 << 31) - 1, 4), (1 << 31, 8), ((1 << 63) - 1, 8)]
)
def test_a_pickle_holds_a_token_in_as_few_bytes_as_its_largest_needs(largest: int, size: int) -> None:
    ids = np.arange(4000)
    ids[17] = largest
    (batch,) = BalancedLoader(
        [ids], recipe("static", attend="none"), max_tokens_per_rank=4000, dp=1, documents_per_step=1
    )
    sent = pickle.dumps(batch)
    assert size * 4000 < len(sent) < size * 4000 + 4000
    twin = pickle.loads(sent)
    for name in ("input_ids", "labels", "position_ids", "shard_index", "doc_ids", "segments", "behind", "documents"):
        assert torch.equal(twin[name], batch[name]) and twin[name].dtype == batch[name].dtype, name
    held = batch.replace(labels=torch.where(batch.labels % 2 == 0, -100, batch.labels))
    assert torch.equal(pickle.loads(pickle.dumps(held)).labels, held.labels)


def test_rebuilding_entry_by_entry_gives_a_batch_again() -> None:
    """torch's pin_memory and accelerate's send_to_device rebuild a mapping as ``type(data)({…})``."""
    batch = batches()[0]
    rebuilt = type(batch)({name: value for name, value in batch.items()})  # noqa: C416
    assert isinstance(rebuilt, ThdBatch) and rebuilt.to("cpu").num_slots == batch.num_slots


def test_to_moves_every_tensor() -> None:
    moved = batches()[0].to("meta")
    assert {value.device.type for value in moved.values() if isinstance(value, torch.Tensor)} == {"meta"}


def test_loss_scale_is_the_steps_denominator() -> None:
    step = batches()
    total = sum(batch.num_targets for batch in step)
    assert {batch.num_targets_step for batch in step} == {total}
    assert step[0].loss_scale() == 1 / total
    assert step[0].loss_scale("mean", world=4) == 4 / total and step[0].loss_scale("sum", world=4) == 1 / total
    assert [batch.is_last_slot for batch in step] == [False] * (len(step) - 1) + [True]
    with pytest.raises(ValueError, match="reduction must be 'mean'"):
        step[0].loss_scale("max")
    with pytest.raises(ValueError, match="target count is not known"):
        step[0].replace(num_targets_step=None).loss_scale()


def test_a_step_without_targets_scales_to_zero_not_nan() -> None:
    rows = [{"input_ids": np.arange(4), "labels": np.full(4, -100)}]
    (batch,) = BalancedLoader(rows, recipe("static", attend="none"), max_tokens_per_rank=8, dp=1, documents_per_step=1)
    assert batch.num_targets_step == 0 and batch.loss_scale() == 0.0
    assert batch.to_hf()["num_items_in_batch"] == float("inf")


def test_hf_arguments_have_a_batch_dimension_and_labels_that_nothing_shifts_again() -> None:
    batch = batches()[0]
    arguments = batch.to_hf()
    assert arguments["input_ids"].shape == arguments["position_ids"].shape == (1, batch.input_ids.numel())
    assert arguments["shift_labels"] is arguments["labels"] and arguments["use_cache"] is False
    assert "attention_mask" not in arguments and "plan" not in arguments
    assert arguments["cu_seq_lens_q"] is batch.cu_seqlens and arguments["max_length_q"] == batch.max_seqlen
    assert batch.replace(plan="a plan").to_hf()["plan"] == "a plan"


def test_recurrent_layers_are_told_which_document_a_token_is_of() -> None:
    """As HF's own collator tells them of the same documents."""
    batch = batches()[0]
    assert "seq_idx" not in batch.to_hf()
    told, ends = batch.to_hf(seq_idx=True)["seq_idx"], batch.cu_seqlens.tolist()
    documents = [batch.input_ids[begin:end].tolist() for begin, end in pairwise(ends)]
    theirs = DataCollatorWithFlattening(return_seq_idx=True)([{"input_ids": ids} for ids in documents])
    assert len(documents) > 1 and told.dtype == theirs["seq_idx"].dtype == torch.int32
    assert torch.equal(told, theirs["seq_idx"]) and torch.equal(batch.input_ids[None], theirs["input_ids"])


def test_megatron_arguments_mask_what_has_no_target() -> None:
    batch = batches()[0]
    arguments = batch.to_megatron()
    mask = arguments["loss_mask"][0].bool()
    assert torch.equal(mask, batch.labels != -100) and int(mask.sum()) == batch.num_targets
    assert torch.equal(arguments["labels"][0][mask], batch.labels[mask]) and (arguments["labels"][0][~mask] == 0).all()
    assert arguments["packed_seq_params"]["cu_seqlens_q"] is batch.cu_seqlens


def test_sums_of_lengths_leave_fillers_out() -> None:
    rows = [np.arange(n) for n in (5, 3)]
    loader = BalancedLoader(
        rows, recipe("static", attend="none"), max_tokens_per_rank=8, dp=1, documents_per_step=2, slots=3
    )
    held = list(loader)
    assert sum(batch.sum_len for batch in held) == 8 and sum(batch.sum_len_sq for batch in held) == 34
    fillers = [batch for batch in held if batch.documents.tolist() == [-1]]
    assert len(fillers) == 1 and fillers[0].labels.tolist() == [-100]
