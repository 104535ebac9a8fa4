"""The batches of a pool of replicas carry one plan between them, which is of the packs that they run in that slot.

python -m pytest tests/test_pools.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from equipoise import BalancedBatchSampler, Lengths, PlannedDataset, ThdCollator, recipe
from equipoise import plan as step_plan
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.tiles import Tap
from equipoise.loaders.shapes import Shapes
from equipoise.packing.cost import SEVEN_B
from equipoise.packing.mask_kinds import sliding_window
from equipoise.recipes import Recipe
from equipoise.samplers.cluster import Cluster
from equipoise.samplers.plan import StepPlan
from equipoise.samplers.solve import Vrsp
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = (97, 3, 14, 60, 5, 9, 1, 33, 26, 26, 8, 2, 71, 40, 11, 90, 7, 7, 19, 4)
TAP = Tap(head_groups=2, block=8)


def batches(chosen, dp: int, cp: int, shapes: Shapes | None = None) -> list[list[Any]]:
    """Of each rank, in one step."""
    data = PlannedDataset([np.arange(tokens) for tokens in LENGTHS])
    collate, made = ThdCollator(chosen, shapes=shapes), []
    for rank in range(dp * cp):
        sampler = BalancedBatchSampler(
            data.lengths(), chosen, max_tokens_per_rank=120 // cp, documents_per_step=20, dp=dp, cp=cp, rank=rank
        )
        made.append([collate(data.__getitems__(spec)) for spec in sampler])
    return made


def together(parts: list[AttentionPlan]) -> AttentionPlan:
    """The plan of which these are the ranks' parts."""
    assert [part.rank for part in parts] == list(range(len(parts)))
    routes = {
        name: np.unique(np.concatenate([getattr(part, name) for part in parts]), axis=0)
        for name in ("moves", "returns")
    }
    return replace(parts[0], tiles=np.concatenate([part.tiles for part in parts]), rank=None, known=None, **routes)


@pytest.mark.parametrize("shapes", [None, Shapes(pad_to=120, max_docs=20)])
@pytest.mark.parametrize(("dp", "cp", "size"), [(4, 1, 4), (4, 1, 2), (4, 2, 2), (2, 3, 2), (3, 1, 1)])
def test_the_ranks_of_a_pool_have_the_parts_of_one_plan_of_their_packs(dp, cp, size, shapes):
    made = batches(recipe("libra", tap=TAP, options=Vrsp(pool_size=size)), dp, cp, shapes)
    queries = 0
    for slot in zip(*made, strict=True):
        for first in range(0, dp * cp, size * cp):
            pool = slot[first : first + size * cp]
            assert all(batch.plan.ranks == tuple(range(first, first + size * cp)) for batch in pool)
            assert [batch.plan.tokens_of(at) for at, batch in enumerate(pool)] == [
                len(batch.input_ids) for batch in pool
            ]
            packs = [np.diff(batch.cu_seqlens.numpy()) for batch in pool[::cp]]
            plan = together([batch.plan for batch in pool])
            plan.check(np.concatenate([[0], np.cumsum(np.concatenate(packs))]))
            queries += int(plan.loads().q_rows_received.sum())
    assert queries > 0 or size == cp == 1


def planned(chosen: Recipe, step: StepPlan, pool: int, slot: int) -> np.ndarray:
    """Pairs that each rank of a pool computes, by the plan that it runs."""
    cluster, size = step.cluster, chosen.replicas_of_pool(step.cluster)
    packs = step.grid[pool * size * cluster.cp : (pool + 1) * size * cluster.cp : cluster.cp, slot].tolist()
    held = [np.concatenate([[0], np.cumsum(step.packs.take([pack]).spans.tokens)]) for pack in packs]
    shards = [chosen.shards(cu, cluster.cp) for cu in held]
    return chosen.tap.plan(shards, tuple(range(size * cluster.cp)), None).loads().pairs // chosen.tap.head_groups


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 120) | st.integers(1, 6), min_size=1, max_size=30),
    size=st.sampled_from([(4, 1, 4), (4, 1, 2), (4, 2, 2), (2, 3, 2), (1, 3, 1)]),
    tap=st.builds(
        Tap, head_groups=st.integers(1, 3), block=st.integers(1, 9), tolerance=st.sampled_from([1.0, 1.05, 1.5])
    ),
)
def test_a_step_is_predicted_to_take_as_long_as_the_pool_that_migrated(lengths, size, tap):
    dp, cp, replicas = size
    chosen = recipe("libra", tap=tap, options=Vrsp(pool_size=replicas))
    step = step_plan(
        np.array(lengths),
        chosen,
        dp=dp,
        cp=cp,
        max_tokens_per_rank=120 // cp,
        sync="slot",
        cost=lambda pairs, tokens: 1e-6 * pairs + 1e-5 * tokens,
    )
    loads = step.loads()
    for slot in range(step.num_slots):
        for pool in range(dp // replicas):
            ranks = slice(pool * replicas * cp, (pool + 1) * replicas * cp)
            packs = step.grid[ranks, slot]
            fillers = np.where(step.packs.spans.document < 0, step.packs.spans.tokens, 0)  # they weigh nothing
            beside = int(step.packs.sums(fillers * (fillers + 1) // 2)[packs].sum()) // cp
            real, held = planned(chosen, step, pool, slot), step.packs.pairs[packs]
            told = int(loads.pairs[ranks, slot][0])
            assert (loads.pairs[ranks, slot] == told).all(), "ranks of a pool wait for each other"
            assert real.max(initial=0) <= told + beside, "no rank computes more than was predicted"
            cap = int(tap.tolerance * held.sum() / cp / len(held))
            if cp == 1:
                assert told <= held.max() and told >= min(cap, held.max())
            tokens = step.packs.sums(step.packs.spans.tokens - fillers)[packs]
            assert np.abs(loads.cost[ranks, slot] - 10_000 * tokens / cp - 1000 * told).max() <= 1001
    assert step.bound() <= step.makespan()


@pytest.mark.parametrize("sync", ["step", "slot"])
def test_prediction_beside_plans_of_long_packs(sync):
    """Eight packs, one of them a single document: without its pool it would be predicted at many times the mean."""
    rng = np.random.default_rng(5)
    lengths = np.concatenate([[65536, 40000, 30000], rng.integers(50, 2000, 600)])
    chosen = recipe("libra", tap=Tap(head_groups=8, block=512))
    step = step_plan(
        lengths, chosen, dp=8, max_tokens_per_rank=65536, cost=lambda pairs, tokens: 1e-9 * pairs, sync=sync
    )
    alone = step_plan(
        lengths, "vrsp", dp=8, max_tokens_per_rank=65536, cost=lambda pairs, tokens: 1e-9 * pairs, sync=sync
    )
    real = np.array([planned(chosen, step, 0, slot).max() for slot in range(step.num_slots)])
    told = step.loads().cost.max(0)
    assert (real <= told).all() and (told <= 1.06 * real).all(), (real, told)
    assert alone.makespan() > 2 * step.makespan()
    assert step.loads().imbalance("slot") == pytest.approx(1.0)
    assert ", attention shared by 8 to 1.05 of the mean" in step.describe()
    pooled, unshared = (one.simulate(SEVEN_B).busy for one in (step, replace(step, shared=None)))
    assert pooled.max() < 0.95 * unshared.max()
    assert 1 <= pooled.sum() / unshared.sum() < 1.05, "a rank waits for the slowest of its pool, which has the slack"


def test_a_micro_batch_knows_its_share_of_the_pool():
    chosen = recipe("libra", tap=TAP)
    lengths = Lengths.from_array(np.array(LENGTHS))
    for rank in range(8):
        sampler = BalancedBatchSampler(
            lengths,
            chosen,
            max_tokens_per_rank=60,
            documents_per_step=20,
            dp=4,
            cp=2,
            rank=rank,
            cost=lambda p, t: 1e-9 * p,
        )
        loads = sampler.plan(0).loads()
        for (spec,) in sampler:
            assert spec.cost * 1e9 == pytest.approx(loads.cost[rank, spec.slot])
            assert spec.pairs == sum(int(spans.pairs.sum()) for spans, _ in spec.pool) // 8
            assert spec.pairs <= loads.pairs[rank, spec.slot]


def test_a_pool_that_comes_again_is_planned_once(monkeypatch):
    """Of equal lengths, masks and ranks; each of these alone makes it another pool."""
    made, plans = [], Recipe.pooled

    def counted(self, *args):
        made.append(args)
        return plans(self, *args)

    monkeypatch.setattr(Recipe, "pooled", counted)
    chosen = recipe("libra", tap=TAP)
    collate = ThdCollator(chosen)
    rows = [np.arange(7) for _ in range(12)]
    data = PlannedDataset(rows)
    sampler = BalancedBatchSampler(data.lengths(), chosen, max_tokens_per_rank=7, documents_per_step=4, dp=4, rank=1)
    specs = [spec for (spec,) in sampler]
    first, *others = [collate(data.__getitems__([spec])) for spec in specs]
    assert len(specs) == 3 and len(made) == 1, "three steps of four documents of 7 tokens"
    assert all(batch.plan is first.plan for batch in others)
    spans, _ = specs[0].pool[0]
    window = sliding_window(spans.tokens, 3)
    other = replace(specs[0], pool=((spans, window), *specs[0].pool[1:]))
    swapped = replace(specs[0], pool=(*other.pool[1:], other.pool[0]))
    shorter = replace(specs[0], pool=((replace(spans, stop=spans.stop - 1), None), *specs[0].pool[1:]))
    for at, spec in enumerate((other, swapped, shorter)):
        assert collate(data.__getitems__([spec])).plan is not first.plan
        assert len(made) == 2 + at
    assert collate(data.__getitems__([specs[0]])).plan is first.plan and len(made) == 4


def test_by_default_pools_have_as_many_replicas_as_divide_dp_up_to_eight():
    sizes = {
        dp: recipe("libra").replicas_of_pool(Cluster(dp=dp, max_tokens_per_rank=8))
        for dp in (1, 2, 6, 8, 9, 12, 16, 11)
    }
    assert sizes == {1: 1, 2: 2, 6: 6, 8: 8, 9: 3, 12: 6, 16: 8, 11: 1}


def test_only_tap_shares_attention():
    pooled = Cluster(dp=4, max_tokens_per_rank=8)
    assert recipe("vrsp", options=Vrsp(pool_size=4)).replicas_of_pool(pooled) == 1
    with pytest.raises(ValueError, match="tap says how attend='tap' shares attention; got attend='ring'"):
        recipe("static", tap=TAP)
    with pytest.raises(ValueError, match="shard='dacp' and attend='tap' do not fit"):
        recipe("libra", shard="dacp")
