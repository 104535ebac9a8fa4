"""Resuming under another configuration: every remaining document once, the same global batches where steps are alike."""

from __future__ import annotations

import json
import warnings
from collections import Counter

import numpy as np
import pytest
from equipoise import BalancedBatchSampler, Lengths, recipe
from equipoise.packing.queues import WlbQueues
from equipoise.samplers.solve import ChunkFlow
from hypothesis import given, settings
from hypothesis import strategies as st

RECIPES = ("static", "vrsp", "wlb", "skrull")


def global_steps(sampler: BalancedBatchSampler, first_slot: int = 0) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """(step, sorted real spans over all ranks) from where the sampler stands to the epoch's end."""
    steps = []
    for plan, _ in sampler.planner(sampler.windows(), sampler.solver):
        plan.check()
        owner = np.repeat(np.arange(len(plan.packs)), np.diff(plan.packs.offsets))
        spans = plan.packs.spans.take(
            np.flatnonzero((plan.packs.spans.document >= 0) & (plan.slot[owner] >= first_slot))
        )
        rows = zip(spans.document.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True)
        steps.append((plan.step, sorted(rows)))
        first_slot = 0
    return steps


def tokens_of(steps: list) -> Counter:
    return Counter((document, at) for _, rows in steps for document, start, stop in rows for at in range(start, stop))


def stop_anywhere(sampler: BalancedBatchSampler, at: int) -> tuple[dict, list, int]:
    """The state behind the at-th micro-batch (modulo), what was done by then over all ranks, and its slot."""
    batches = [batch for (batch,) in sampler]
    batch = batches[at % len(batches)]
    done = []
    for step, rows in global_steps(sampler):
        if step < batch.step:
            done.append((step, rows))
    plan = sampler.plan(batch.step)
    owner = np.repeat(np.arange(len(plan.packs)), np.diff(plan.packs.offsets))
    spans = plan.packs.spans.take(np.flatnonzero((plan.packs.spans.document >= 0) & (plan.slot[owner] <= batch.slot)))
    done.append(
        (batch.step, list(zip(spans.document.tolist(), spans.start.tolist(), spans.stop.tolist(), strict=True)))
    )
    return json.loads(json.dumps(batch.state)), done, batch.state["slot"]


def clusters() -> st.SearchStrategy[dict]:
    return st.fixed_dictionaries(
        {
            "dp": st.integers(1, 3),
            "cp": st.integers(1, 3),
            "max_tokens_per_rank": st.integers(8, 14),
            "sync": st.sampled_from(["step", "slot"]),
        }
    )


sizes = st.one_of(
    st.fixed_dictionaries({"documents_per_step": st.integers(2, 8)}),
    st.fixed_dictionaries({"tokens_per_step": st.integers(60, 90)}),
)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=3, max_size=30),
    before=clusters(),
    after=clusters(),
    size=sizes,
    size_after=st.one_of(st.none(), sizes),
    name=st.sampled_from(RECIPES),
    name_after=st.sampled_from(RECIPES),
    too_long=st.sampled_from(["drop", "truncate", "split"]),
    stop=st.integers(0, 100),
    shuffle=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_every_remaining_document_exactly_once_under_any_other_configuration(
    lengths, before, after, size, size_after, name, name_after, too_long, stop, shuffle
) -> None:
    index = Lengths.from_array(np.array(lengths))
    common = {"too_long": too_long, "shuffle": shuffle}
    try:
        first = BalancedBatchSampler(index, recipe(name), **before, **size, **common)
        second = BalancedBatchSampler(index, recipe(name_after), **after, **(size_after or size), **common)
    except ValueError:  # nothing is left, or a step is smaller than a document
        return
    whole = tokens_of(global_steps(first))
    state, done, slot = stop_anywhere(first, stop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            second.load_state_dict(state)
        except ValueError as error:
            reasons = ["what planned it"] if slot and name != name_after else []
            if before["max_tokens_per_rank"] * before["cp"] > after["max_tokens_per_rank"] * after["cp"]:
                reasons.append("has room for")
            assert any(reason in str(error) for reason in reasons), str(error)
            return
    rest = global_steps(second, second.first_slot)
    assert tokens_of(done) + tokens_of(rest) == whole
    if slot == 0 and size_after is None and "wlb" not in (name, name_after):
        assert rest == [step for step in global_steps(fresh(first)) if step[0] >= state["step"]]


def fresh(sampler: BalancedBatchSampler) -> BalancedBatchSampler:
    sampler.set_epoch(0)
    return sampler


@given(
    seed=st.integers(0, 99),
    stops=st.lists(st.tuples(st.integers(0, 100), clusters(), sizes), min_size=2, max_size=4),
    name=st.sampled_from(RECIPES),
    last=st.sampled_from(["partial", "drop", "carry"]),
)
@settings(max_examples=200, deadline=None)
def test_chained_over_two_epochs(seed: int, stops: list, name: str, last: str) -> None:
    """Stopped again and again, each time with another cluster: two epochs hold every document twice (less what is left
    over at their ends)."""
    index = Lengths.from_array(np.random.default_rng(seed).integers(1, 9, 40))
    done: list = []
    state = None
    for stop, cluster, size in stops:
        sampler = BalancedBatchSampler(index, recipe(name), **cluster, **size, last=last, seed=seed)
        if state is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sampler.load_state_dict(state)
        batches = [batch for (batch,) in sampler]
        if not batches:
            break
        at = stop % len(batches)
        state = json.loads(json.dumps(batches[at].state))
        left = BalancedBatchSampler(index, recipe(name), **cluster, **size, last=last, seed=seed)
        left.load_state_dict(state)
        remaining = tokens_of(global_steps(left, left.first_slot))
        here = tokens_of(global_steps(sampler, sampler.first_slot))
        here.subtract(remaining)
        assert min(here.values(), default=0) >= 0  # what is left was to come
        done.append(+here)
    total = sum(done, Counter())
    if state is not None:
        total += remaining
    assert max(total.values(), default=1) == 1
    documents = {document for document, _ in total}
    assert len(documents) == 40 or last != "partial"
    assert sum(total.values()) == int(index.tokens[sorted(documents)].sum())


def test_the_warning_tells_what_becomes_of_the_batches() -> None:
    index = Lengths.from_array(np.arange(1, 21))
    first = BalancedBatchSampler(index, recipe("static"), dp=1, max_tokens_per_rank=40, documents_per_step=5)
    batches = [batch for (batch,) in first]
    state = next(batch.state for batch in batches if batch.state["slot"] == 0)
    wider = BalancedBatchSampler(index, recipe("static"), dp=4, max_tokens_per_rank=40, documents_per_step=5)
    with pytest.warns(UserWarning, match=r"dp: saved 1, now 4.*global batches stay the same"):
        wider.load_state_dict(state)
    larger = BalancedBatchSampler(index, recipe("static"), dp=1, max_tokens_per_rank=40, documents_per_step=7)
    with pytest.warns(UserWarning, match="every remaining document comes exactly once, in other global batches"):
        larger.load_state_dict(state)
    under_way = next(batch.state for batch in batches if batch.state["slot"])
    with pytest.warns(UserWarning, match="what was left of the step under way is a step of its own"):
        wider.load_state_dict(under_way)
    assert wider.state_dict()["rest"] is not None
    again = BalancedBatchSampler(index, recipe("static"), dp=4, max_tokens_per_rank=40, documents_per_step=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(json.loads(json.dumps(wider.state_dict())))
    assert global_steps(again) == global_steps(wider)


def test_what_queues_hold_is_released_without_them() -> None:
    lengths = np.array([60] + [4] * 30 + [60] + [4] * 30)
    first = BalancedBatchSampler(
        Lengths.from_array(lengths), recipe("wlb"), dp=2, max_tokens_per_rank=64, documents_per_step=8, shuffle=False
    )
    batch = next(batch for (batch,) in first if batch.state["held"][0] and batch.state["slot"] == 0)
    plain = recipe("wlb", options=WlbQueues(max_delay=0)) if WlbQueues().max_delay else recipe("static")
    second = BalancedBatchSampler(
        Lengths.from_array(lengths), plain, dp=2, max_tokens_per_rank=64, documents_per_step=8, shuffle=False
    )
    with pytest.warns(UserWarning, match="queued: saved True, now False"):
        second.load_state_dict(batch.state)
    done = [document for step, rows in global_steps(first) if step <= batch.step for document, _, _ in rows]
    rest = [document for _, rows in global_steps(second) for document, _, _ in rows]
    assert sorted(done + rest) == list(range(len(lengths)))


def test_chunks_under_way_are_not_parted() -> None:
    index = Lengths.from_array(np.array([30, 5, 5, 30, 9, 2]))
    options = {"documents_per_step": 6, "max_tokens_per_rank": 10}
    chosen = recipe("chunkflow", options=ChunkFlow(keep=1))
    first = BalancedBatchSampler(index, chosen, dp=1, **options)
    state = next(batch.state for (batch,) in first if batch.state["slot"])
    with pytest.raises(ValueError, match="chunks of one document cannot be parted"):
        BalancedBatchSampler(index, chosen, dp=2, **options).load_state_dict(state)


def test_a_jump_needs_no_scan() -> None:
    """The state holds the step's place, so lengths before it are not read, also where steps are sized by tokens."""

    index = Lengths.from_array(np.random.default_rng(0).integers(1, 50, 5000))
    options = {"dp": 1, "max_tokens_per_rank": 64, "tokens_per_step": 500}
    first = BalancedBatchSampler(index, recipe("static"), **options)
    state = [batch.state for (batch,) in first][-40]
    second = BalancedBatchSampler(index, recipe("static"), **options)
    second.load_state_dict(state)
    next(iter(second))
    first_step, edges = second.admission._edges[0]
    assert first_step == state["step"] > 200 and len(edges) <= 4


CHANGED = {
    "epoch": [-1, 1.0, "0", None, True],
    "step": [-1, "2", None],
    "slot": [-1, "1", None],
    "num_targets": ["7", -1],
    "position": [None, [1], 3.0, -3, 10**6, {"epoch": 0}],
    "epoch_start": [None, -5, 7],
    "config": [None, [], {}],
    "held": [[1], 5, [[0], [], 0, 0, 0], [[999], [0], 0, 0, 0]],
    "rest": [[1, 2], 5, [3, [999], [0], [4], [10]], [3, [0], [0], [4]]],
    "refitted": ["x", [1.0], 3],
}


@pytest.mark.parametrize("name", ["static", "wlb"])
def test_a_state_that_was_changed_is_refused(name: str) -> None:
    """Also where it came by another way than a file with a checksum; and the sampler stays where it was."""
    index = Lengths.from_array(np.random.default_rng(0).integers(1, 9, 40))
    options = {"dp": 1, "max_tokens_per_rank": 16, "documents_per_step": 6}
    sampler = BalancedBatchSampler(index, recipe(name), **options)
    state = [batch.state for (batch,) in sampler if batch.state["slot"]][3]
    before, whole = sampler.state_dict(), tokens_of(global_steps(sampler))
    for key, values in CHANGED.items():
        for value in values:
            with pytest.raises(ValueError, match="was changed since it was saved|read its documents in another order"):
                sampler.load_state_dict({**state, key: value})
            assert sampler.state_dict() == before
    assert tokens_of(global_steps(sampler)) == whole
    sampler.load_state_dict({**state, "slot": 99})
    with pytest.raises(ValueError, match=r"stands behind micro-batch 99 of step \d+ of epoch 0, which has \d+ here"):
        next(iter(sampler))
