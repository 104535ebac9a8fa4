"""StepPlan: check() refuses every broken promise; loads and bound against brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from equipoise import BalancedBatchSampler, Lengths, Packs, recipe
from equipoise.samplers.cluster import Cluster
from equipoise.samplers.plan import StepPlan


def sampler(**options) -> BalancedBatchSampler:
    lengths = Lengths.from_array(np.array([9, 3, 7, 5, 12, 1, 4, 4]))
    defaults = {"max_tokens_per_rank": 8, "dp": 2, "cp": 2, "documents_per_step": 8, "cost": lambda p, t: 1e-6 * p}
    return BalancedBatchSampler(lengths, recipe("static"), **{**defaults, **options})


def test_loads_and_bound_by_hand() -> None:
    plan = sampler().plan(0)
    loads = plan.loads()
    assert plan.num_slots == 2 and loads.cost.shape == (4, 2)
    pairs = {9: 45, 3: 6, 7: 28, 5: 15, 12: 78, 1: 1, 4: 10}
    for pack in range(len(plan.packs)):
        first, slot = plan.first_rank[pack], plan.slot[pack]
        spans = plan.packs.take(np.array([pack])).spans
        work = sum(pairs[n] for n in spans.tokens.tolist())
        assert (loads.pairs[first : first + 2, slot] == work // 2).all()
        assert (loads.cost[first : first + 2, slot] == -(-work * 1000 // 2)).all()
        assert (loads.tokens[first : first + 2, slot] == -(-spans.tokens.sum() // 2)).all()
    assert plan.bound() == max(-(-193 * 1000 // 4), 78 * 1000 // 2)
    assert sampler(sync="slot").plan(0).makespan() >= plan.makespan() >= plan.bound()


def broken(plan: StepPlan, **changes) -> StepPlan:
    return replace(plan, **changes)


def test_check_refuses_what_is_broken() -> None:
    made = sampler()
    plan, window = made.plan(0), made.admission.window(0, 0)
    assert window is not None
    plan.check(window.spans)
    spans, offsets = plan.packs.spans, plan.packs.offsets
    pack = int(np.diff(offsets).argmax())  # of several spans, so that none is empty without its first
    kept = np.delete(np.arange(len(spans)), offsets[pack])
    lost = Packs(spans=spans.take(kept), offsets=offsets - (np.arange(len(offsets)) > pack))
    with pytest.raises(AssertionError, match="lost or doubled"):
        broken(plan, packs=lost, span_cost=plan.span_cost[kept]).check(window.spans)
    doubled = Packs(spans=spans.take(np.r_[0, np.arange(len(spans))]), offsets=np.r_[0, offsets[1:] + 1])
    with pytest.raises(AssertionError, match="cap 8|lost or doubled"):
        broken(plan, packs=doubled, span_cost=np.r_[0, plan.span_cost]).check(window.spans)
    with pytest.raises(AssertionError, match="idle in a slot|runs for"):
        broken(plan, slot=np.zeros_like(plan.slot)).check()
    with pytest.raises(AssertionError, match="a rank holds"):
        broken(plan, cluster=Cluster(dp=2, cp=2, max_tokens_per_rank=5)).check()


def test_digest_changes_with_every_array() -> None:
    plan = sampler().plan(0)
    digests = {plan.digest, broken(plan, slot=1 - plan.slot).digest, broken(plan, step=7).digest}
    digests.add(broken(plan, first_rank=2 - plan.first_rank).digest)
    assert len(digests) == 4


def test_describe_prints_the_figures_that_matter() -> None:
    text = str(sampler().plan(0))
    assert "8 spans, 45 tokens in 4 packs (0 fillers, 0 tokens of padding), 2 slots on 2 replicas x cp 2" in text
    assert "lower bound" in text and "max/mean" in text


def test_cluster_is_checked() -> None:
    for wrong in ({"dp": 0}, {"cp": 0}, {"max_tokens_per_rank": 0}, {"slots": 0}, {"dp": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a whole number of at least 1"):
            Cluster(**{"dp": 1, "max_tokens_per_rank": 1, **wrong})
    with pytest.raises(ValueError, match="sync must be 'step'.*or 'slot'"):
        Cluster(dp=1, max_tokens_per_rank=1, sync="batch")
