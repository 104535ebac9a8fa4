"""Outlier queues over an epoch: exactly once, never later than allowed, and the same wherever one looks in."""

from __future__ import annotations

import json

import numpy as np
from equipoise import BalancedBatchSampler, Lengths, recipe
from equipoise.packing.queues import WlbQueues
from equipoise.samplers.carry import QueuedAdmission
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import cost, document_lengths, step_sizes


def make(lengths: list[int], delay: int, **options) -> BalancedBatchSampler:
    queues = WlbQueues(thresholds=(16,), max_delay=delay)
    defaults = {"max_tokens_per_rank": 64, "too_long": "split", "cost": cost}
    return BalancedBatchSampler(
        Lengths.from_array(np.array(lengths)), recipe("wlb", options=queues), **{**defaults, **options}
    )


def step_of(sampler: BalancedBatchSampler, epoch: int = 0) -> dict[tuple[int, int], int]:
    """The step in which each (document, start) comes; each exactly once."""
    seen: dict[tuple[int, int], int] = {}
    for step in range(sampler.admission.num_steps(epoch)):
        window = sampler.admission.window(epoch, step)
        assert window is not None
        for piece in zip(window.spans.document.tolist(), window.spans.start.tolist(), strict=True):
            assert piece not in seen
            seen[piece] = step
    assert sampler.admission.window(epoch, sampler.admission.num_steps(epoch)) is None
    return seen


@given(
    data=st.data(), lengths=document_lengths(max_size=80, empty=False), dp=st.integers(1, 5), delay=st.integers(1, 6)
)
@settings(max_examples=200, deadline=None)
def test_every_document_comes_once_and_its_delay_is_reported(
    data: st.DataObject, lengths: list[int], dp: int, delay: int
) -> None:
    size = data.draw(step_sizes(dp, 64))
    queued, plain = make(lengths, delay, dp=dp, **size), make(lengths, 0, dp=dp, **size)
    assert isinstance(queued.admission, QueuedAdmission) and not isinstance(plain.admission, QueuedAdmission)
    meant, came = step_of(plain), step_of(queued)
    assert set(meant) == set(came)
    late = {piece: came[piece] - meant[piece] for piece in meant}
    assert min(late.values()) >= 0
    told = queued.admission.delays(0)
    assert told.longest == max(late.values())
    items = queued.items.spans(np.arange(len(queued.items)))[0]
    pieces = zip(items.document.tolist(), items.start.tolist(), strict=True)
    tokens = dict(zip(pieces, items.tokens.tolist(), strict=True))
    assert np.isclose(told.mean, sum(late[piece] * tokens[piece] for piece in late) / sum(tokens.values()))
    for step in range(queued.steps_per_epoch):
        plan = queued.plan(step)
        window = queued.admission.window(0, step)
        assert window is not None
        plan.check(window.spans)


def test_no_delay_exceeds_the_maximum() -> None:
    """Where there is room, the maximum is hard: a thousand documents with a long tail, 40 steps."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(2.3, 1.3, 3000), 1, 64).astype(int).tolist()
    sampler = make(lengths, 5, dp=4, documents_per_step=75)
    own = sampler.admission.base.num_steps(0)
    assert 0 < sampler.admission.delays(0).longest <= 5
    assert sampler.steps_per_epoch - own <= 5


@given(lengths=document_lengths(max_size=60, empty=False), at=st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_state_resumes_without_running_through_the_epoch(lengths: list[int], at: int) -> None:
    whole = [batch for (batch,) in make(lengths, 3, dp=2, documents_per_step=8)]
    at %= len(whole)
    fresh = make(lengths, 3, dp=2, documents_per_step=8)
    fresh.load_state_dict(json.loads(json.dumps(whole[at].state)))
    rest = [batch for (batch,) in fresh]
    assert [(b.step, b.slot, b.spans.document.tolist(), b.digest) for b in rest] == [
        (b.step, b.slot, b.spans.document.tolist(), b.digest) for b in whole[at + 1 :]
    ]


@given(lengths=document_lengths(max_size=60, empty=False), step=st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_any_step_is_the_same_from_a_fresh_sampler(lengths: list[int], step: int) -> None:
    walked = make(lengths, 3, dp=2, documents_per_step=3)
    digests = [walked.plan(number, 1).digest for number in range(walked.admission.num_steps(1))]
    step %= len(digests)
    assert make(lengths, 3, dp=2, documents_per_step=3).plan(step, 1).digest == digests[step]


def test_evaluation_holds_nothing_back() -> None:
    assert not isinstance(make([30] * 9, 4, dp=2, documents_per_step=3, evaluation=True).admission, QueuedAdmission)
