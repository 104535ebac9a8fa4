"""python -m pytest tests/attention/test_groupcast.py"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from equipoise import BalancedLoader, recipe
from equipoise.attention.executor import attend
from equipoise.attention.groupcast import EVEN, HALVES, HIDDEN, IN_ORDER, Overlap, expected_seconds, groupcast_plan
from equipoise.attention.groups import CpGroups
from equipoise.attention.kernels.reference import dense
from equipoise.attention.plan import KV, AttentionPlan
from equipoise.attention.ring import ring_plan
from equipoise.packing import mask_kinds
from equipoise.packing.cost import CostModel
from equipoise.packing.dispatch import dispatch
from equipoise.packing.dispatch_joint import joint
from equipoise.packing.mask_kinds import (
    Ragged,
    block_causal,
    causal,
    causal_blockwise,
    full,
    prefix_lm,
    shared_question,
    sliding_window,
    window_with_sinks,
)
from equipoise.packing.masks import Mask
from equipoise.packing.shards import Shards, zigzag
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, assert_part, sharded, shards_of
from tests.attention.oracle import relative
from tests.packing.mask_draws import kinds, masks

LAYER = CostModel(seconds_per_pair=1e-9, seconds_per_token=0, seconds_per_row=4e-8)


@st.composite
def overlaps(draw):
    return Overlap(
        cost=CostModel(
            seconds_per_pair=draw(st.sampled_from([0.0, 1e-9])),
            seconds_per_token=0,
            seconds_per_row=draw(st.sampled_from([0.0, 1e-9, 1e-7])),
        ),
        stage_seconds=draw(st.sampled_from([0.0, 1e-7])),
        degree=draw(st.sampled_from([None, 0, 1, 2, 5])),
        max_degree=draw(st.integers(1, 4)),
        parcel=draw(st.integers(1, 9)),
        splits=draw(st.sampled_from([(IN_ORDER, EVEN, HIDDEN, HALVES), (HIDDEN,), (HALVES, EVEN)])),
    )


@st.composite
def masked(draw):
    """(mask, its matrix, shards): any mask over chunks dealt out by area, or over any layout."""
    mask, matrix = draw(
        st.one_of(masks(), kinds().map(lambda drawn: (getattr(mask_kinds, drawn[0])(**drawn[1]), drawn[2])))
    )
    cp = draw(st.integers(1, 12))
    rule = draw(st.sampled_from(["dispatch", "joint", "contiguous", "document", "striped"]))
    if rule == "dispatch":
        shards = dispatch(mask, cp, chunk=draw(st.integers(1, 5)))
    elif rule == "joint":
        shards = joint(mask, cp, rounds=60)
    else:
        shards = shards_of(rule, mask.cu_seqlens, cp)
    return mask, matrix, shards


def needed(matrix: np.ndarray, shards: Shards) -> set[tuple[int, int]]:
    """(rank, key) that some query there attends to and that is not held there, by the definition."""
    out = set()
    for rank in range(shards.cp_size):
        own = shards.positions(rank)
        keys = np.flatnonzero(matrix[own].any(axis=0))
        out |= {(rank, int(key)) for key in np.setdiff1d(keys, own)}
    return out


@PROMISE
@given(masked(), overlaps())
def test_a_plan_for_any_mask_computes_each_pair_once_and_moves_the_rows_that_are_needed_and_no_others(drawn, overlap):
    mask, matrix, shards = drawn
    ranks = tuple(range(shards.cp_size))
    plan = groupcast_plan(shards, ranks, mask=mask, overlap=overlap)
    plan.check(mask)
    moved = [(dst, row) for _, kind, _, dst, a, b in plan.moves.tolist() for row in range(a, b) if kind == KV]
    assert len(moved) == len(set(moved)) and set(moved) == needed(matrix, shards)
    assert plan.stages - 1 <= (overlap.max_degree if overlap.degree is None else max(overlap.degree, 1))
    for rank in ranks[:3]:
        part = groupcast_plan(shards, ranks, rank, mask=mask, overlap=overlap)
        assert_part(part, plan)
        part.check(mask)


@PROMISE
@given(sharded(), st.integers(1, 9))
def test_causal_documents_need_no_mask_and_move_what_direct_sends_do(shards, window):
    ranks = tuple(range(shards.cp_size))
    plan, direct = groupcast_plan(shards, ranks), ring_plan(shards, ranks, forward=False)
    plan.check(shards.cu_seqlens)
    assert np.array_equal(plan.loads().rows_received, direct.loads().rows_received)
    assert np.array_equal(plan.loads().pairs, direct.loads().pairs)
    plan.windowed(window).check(shards.cu_seqlens, window)
    assert np.array_equal(plan.windowed(window).loads().rows_received, direct.windowed(window).loads().rows_received)


LENGTHS = [60_000, 22_000, 9_000, 9_000, 3_000, 2_000, 2_000, 500]


@pytest.mark.parametrize(
    ("rule", "cp", "seconds_per_row", "gain"),
    [(dispatch, 8, 4e-6, 0.02), (joint, 8, 1e-5, 0.04), (zigzag, 16, 4e-6, 0.04), (dispatch, 16, 1e-6, 0.005)],
)
def test_rows_placed_by_cost_beat_even_stages(rule, cp, seconds_per_row, gain):
    cost = CostModel(seconds_per_pair=1e-9, seconds_per_token=0, seconds_per_row=seconds_per_row)
    shards, options = rule(np.cumsum([0, *LENGTHS]), cp), {"cost": cost, "stage_seconds": 1e-4}

    def seconds(**more):
        chosen = Overlap(**options, **more)
        return expected_seconds(groupcast_plan(shards, tuple(range(cp)), overlap=chosen), chosen)

    assert seconds() <= (1 - gain) * seconds(splits=(IN_ORDER,))
    assert seconds() < seconds(degree=1) < seconds(degree=0)


@PROMISE
@given(sharded(), st.sampled_from([0.0, 1e-9, 1e-7, 1e-5]))
def test_stages_are_never_worse_than_even_ones(shards, seconds_per_row):
    cost = CostModel(seconds_per_pair=1e-9, seconds_per_token=0, seconds_per_row=seconds_per_row)
    best = Overlap(cost=cost, stage_seconds=1e-8, parcel=2)
    plan = groupcast_plan(shards, tuple(range(shards.cp_size)), overlap=best)
    for more in ({"splits": (IN_ORDER,)}, {"degree": 1}, {"degree": 3, "splits": (EVEN,)}):
        other = groupcast_plan(shards, plan.ranks, overlap=replace(best, **more))
        assert expected_seconds(plan, best) <= 1.001 * expected_seconds(other, best) + 1e-15


def test_one_stage_where_transfers_hide_and_more_where_they_do_not():
    shards, ranks = zigzag([0, 64_000], 4), (0, 1, 2, 3)
    quick = CostModel(seconds_per_pair=1e-9, seconds_per_token=0, seconds_per_row=1e-9)
    assert groupcast_plan(shards, ranks, overlap=Overlap(cost=quick, stage_seconds=1e-3)).stages == 2
    slow = CostModel(seconds_per_pair=1e-9, seconds_per_token=0, seconds_per_row=1e-5)
    assert groupcast_plan(shards, ranks, overlap=Overlap(cost=slow, stage_seconds=1e-3)).stages > 2


def test_shared_questions_travel_only_to_those_who_answer():
    """Answers that fit into a rank move the question only: a quarter of what causal documents of that length would."""
    mask = shared_question([200, 200], Ragged.of([[200] * 4, [200] * 4]))
    shards = zigzag(mask.cu_seqlens, 5, per="sequence")
    by_mask = groupcast_plan(shards, tuple(range(5)), mask=mask).loads().rows_received.sum()
    assert (
        by_mask
        == len(needed(mask.dense(), shards))
        < 0.5 * groupcast_plan(shards, tuple(range(5))).loads().rows_received.sum()
    )


@dataclass(frozen=True)
class Case:
    name: str
    mask: Mask
    rule: str
    overlap: Overlap
    heads: tuple[int, int] = (4, 2)

    def shards(self, cp: int) -> Shards:
        return dispatch(self.mask, cp, chunk=3) if self.rule == "dispatch" else joint(self.mask, cp, rounds=100)

    def plan(self, cp: int, rank: int) -> AttentionPlan:
        return groupcast_plan(self.shards(cp), tuple(range(cp)), rank, mask=self.mask, overlap=self.overlap)

    def inputs(self):
        generator = torch.Generator().manual_seed(len(self.name))
        T, (h, k) = int(self.mask.tokens.sum()), self.heads
        return [torch.randn(T, n, 8, generator=generator, dtype=torch.float64) for n in (h, k, k, h)]


def cases() -> list[Case]:
    staged = Overlap(cost=LAYER, stage_seconds=0, parcel=4, degree=3, splits=(HALVES,))
    chosen = Overlap(cost=LAYER, stage_seconds=0, parcel=5)
    drawn = [
        Case("causal", causal([33, 7, 0, 1, 20]), "joint", chosen, (4, 4)),
        Case("full", full([17, 9]), "dispatch", staged, (6, 2)),
        Case("window", sliding_window([40, 9], 7, 2), "joint", staged, (4, 1)),
        Case("sinks", window_with_sinks([44, 5, 13], 6, 3), "dispatch", chosen),
        Case("question", shared_question([6, 3], Ragged.of([[5, 9, 2], [11, 4]])), "joint", staged),
        Case("blockwise", causal_blockwise([50, 11], 5, 2), "dispatch", staged),
        Case("prefix", prefix_lm([9, 0, 30], [31, 6, 12]), "joint", chosen),
        Case("video", block_causal(Ragged.of([[6, 6, 6, 3], [9, 1, 1]])), "dispatch", staged),
        Case("nothing", Mask.of_slices(24, [(3, 9, 1, 20, 0)]), "dispatch", staged),
    ]
    return drawn


def run_cases(rank: int, world: int) -> list[list[torch.Tensor]]:
    groups, results = CpGroups(1, world), []
    for case in cases():
        plan, mine = case.plan(world, rank), torch.from_numpy(case.shards(world).positions(rank))
        for _ in range(2):
            q, k, v, dout = (x[mine] for x in case.inputs())
            inputs = [x.requires_grad_() for x in (q, k, v)]
            out = attend(plan, *inputs, groups)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
    return results


def oracle(case: Case) -> list[torch.Tensor]:
    q, k, v, dout = case.inputs()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out, _ = dense(*inputs, torch.from_numpy(case.mask.dense()), 8**-0.5)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_mask_is_exact_and_repeats_bit_by_bit(ranks, world):
    by_rank = ranks.run(run_cases, world)
    for i, case in enumerate(cases()):
        first, second = ([results[2 * i + again] for results in by_rank] for again in (0, 1))
        assert all(torch.equal(x, y) for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True))
        where = torch.argsort(torch.from_numpy(np.concatenate([case.shards(world).positions(r) for r in range(world)])))
        for name, parts, want in zip(("out", "dq", "dk", "dv"), zip(*first, strict=True), oracle(case), strict=True):
            assert relative(torch.cat(parts)[where], want) <= 1e-12, (case.name, name)


@pytest.mark.parametrize("shard", ["dispatch", "joint"])
def test_batches_of_the_recipe_carry_plans_that_hold(shard):
    rows = [{"input_ids": np.arange(n)} for n in (40, 3, 21, 17, 9, 30, 1, 55)]
    planned = recipe("magi", shard=shard)
    for rank in range(3):
        loader = BalancedLoader(rows, planned, max_tokens_per_rank=30, dp=1, cp=3, rank=rank, documents_per_step=8)
        batches = list(loader)
        assert sum(int((batch.documents >= 0).sum()) for batch in batches) == len(rows)
        for batch in batches:
            assert batch.plan.rank == rank and batch.plan.tokens_of(rank) == batch.input_ids.numel() <= 30
            batch.plan.check(batch.cu_seqlens.numpy())


def test_what_does_not_fit_is_refused():
    shards = zigzag([0, 8], 2)
    with pytest.raises(ValueError, match="one rank per shard; got 3 ranks"):
        groupcast_plan(shards, (0, 1, 2))
    with pytest.raises(ValueError, match="rank is an index into the domain, 0 … 1; got 2"):
        groupcast_plan(shards, (0, 1), 2)
    with pytest.raises(ValueError, match="The mask is of 9 tokens, the shards of 8"):
        groupcast_plan(shards, (0, 1), mask=causal([9]))
    for wrong in (
        {"max_degree": 0},
        {"parcel": 0},
        {"degree": -1},
        {"stage_seconds": float("nan")},
        {"splits": (4,)},
        {"splits": ()},
    ):
        with pytest.raises(ValueError, match="Overlap has max_degree >= 1"):
            Overlap(**wrong)
