"""The sampler as torch drives it: lengths, epochs, states, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
from equipoise import BalancedBatchSampler, CostModel, Hardware, Lengths, ModelShape, recipe


def make(**options) -> BalancedBatchSampler:
    lengths = Lengths.from_array(np.random.default_rng(1).integers(1, 60, 100))
    defaults = {"max_tokens_per_rank": 64, "dp": 2, "documents_per_step": 16}
    return BalancedBatchSampler(lengths, recipe("vrsp"), **{**defaults, **options})


def documents(sampler: BalancedBatchSampler) -> list[list[int]]:
    return [batch.spans.document.tolist() for (batch,) in sampler]


def test_len_is_exact_where_slots_are_fixed_and_refused_elsewhere() -> None:
    fixed = make(documents_per_step=None, packs_per_step=8)
    assert len(fixed) == len(list(fixed)) == fixed.steps_per_epoch * 4
    varying = make()
    assert varying.steps_per_epoch == len({batch.step for (batch,) in varying}) == 7
    with pytest.raises(TypeError, match="steps_per_epoch"):
        len(varying)


def test_epochs_differ_and_repeat() -> None:
    sampler = make()
    first = documents(sampler)
    sampler.set_epoch(1)
    assert documents(sampler) != first
    sampler.set_epoch(0)
    assert documents(sampler) == first
    assert documents(make(seed=1)) != first
    with pytest.raises(ValueError, match="epoch must be"):
        sampler.set_epoch(-1)


def test_evaluation_reads_in_order_and_drops_nothing() -> None:
    sampler = make(evaluation=True, last="drop", dp=1)
    seen = [sorted(d for (b,) in sampler if b.step == step for d in b.spans.document.tolist()) for step in range(7)]
    assert seen == [list(range(at, min(at + 16, 100))) for at in range(0, 100, 16)]


def test_a_state_is_plain_json_and_resumes_anywhere() -> None:
    sampler = make(last="carry")
    sampler.set_epoch(1)
    rows = [batch for (batch,) in sampler]
    for at, batch in enumerate(rows):
        fresh = make(last="carry")
        fresh.load_state_dict(json.loads(json.dumps(batch.state)))
        assert documents(fresh) == [b.spans.document.tolist() for b in rows[at + 1 :]]


def test_a_foreign_state_is_refused_by_naming_what_differs() -> None:
    state = next(iter(make()))[0].state
    with pytest.raises(ValueError, match=r"seed: saved 0, now 3"):
        make(seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match=r"cost: saved"):
        make(cost=lambda pairs, tokens: pairs * 1e-9).load_state_dict(state)
    with pytest.raises(ValueError, match=r"lengths: saved .* of 100"):
        BalancedBatchSampler(
            Lengths.from_array(np.ones(100, np.int64)),
            recipe("vrsp"),
            max_tokens_per_rank=64,
            dp=2,
            documents_per_step=16,
        ).load_state_dict(state)
    grouped = [
        BalancedBatchSampler(
            Lengths(tokens=np.full(8, 5), group=np.array(group)),
            recipe("wlb"),
            max_tokens_per_rank=64,
            dp=2,
            documents_per_step=4,
            evaluation=evaluation,
        )
        for group, evaluation in (
            ([0, 0, 1, 1, 2, 2, 3, 3], False),
            ([0, 1, 1, 2, 2, 3, 3, 0], False),
            ([0, 0, 1, 1, 2, 2, 3, 3], True),
        )
    ]
    saved = next(iter(grouped[0]))[0].state
    with pytest.raises(ValueError, match="lengths: saved"):  # as many groups, of other documents
        grouped[1].load_state_dict(saved)
    with pytest.raises(ValueError, match="shuffle: saved True, now False"):
        grouped[2].load_state_dict(saved)
    with pytest.raises(ValueError, match=r"last: saved 'partial', now 'carry'"):
        make(last="carry").load_state_dict(state)
    with pytest.raises(ValueError, match="lacks slot"):
        make().load_state_dict({key: value for key, value in state.items() if key != "slot"})


def test_the_digest_covers_the_configuration() -> None:
    digests = {
        next(iter(make(**options)))[0].digest
        for options in ({}, {"seed": 1}, {"sync": "slot"}, {"cost": CostModel.of(SMALL, Hardware())}, {"last": "drop"})
    }
    assert len(digests) == 5


SMALL = ModelShape(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=1000
)


def test_options_are_refused_with_the_rule() -> None:
    with pytest.raises(ValueError, match=r"rank must lie in 0 … 3 .*; got 4"):
        make(cp=2, rank=4)
    with pytest.raises(ValueError, match="packs_per_step must be dp x slots"):
        make(documents_per_step=None, packs_per_step=3)
    with pytest.raises(ValueError, match="too_long must be one of"):
        make(too_long="cut")
    with pytest.raises(IndexError, match="epoch 0 has 7 steps, no step 7"):
        make().plan(7)


def test_options_reach_admission_and_micro_batches() -> None:
    """An incomplete step is left out where it is to be; a truncated document ends, for labels too, where it was cut."""
    assert [make(last=last).steps_per_epoch for last in ("partial", "drop", "carry")] == [7, 6, 6]
    for too_long, stop in (("truncate", 32), ("split", 0)):
        assert {batch.document_stop for (batch,) in make(max_tokens_per_rank=32, too_long=too_long)} == {stop}
