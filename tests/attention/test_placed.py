"""Plans that nobody would make (placed.py), run over gloo ranks: queries move, heads are placed in groups, rows are passed on,
domains hold two packs. Exact in fp64, with as many bytes and pairs as the plan says, rows under way while stages compute.

python -m pytest tests/attention/test_placed.py
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from equipoise.attention.bands import pairs
from equipoise.attention.counting import Counter
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.plan import AttentionPlan, Q
from equipoise.attention.routing import direct, part_of
from equipoise.attention.ulysses import ulysses_plan
from equipoise.packing.mask_kinds import causal
from equipoise.packing.shards import Shards

from tests.attention.oracle import LAYOUTS, Case, one_process, relative
from tests.attention.placed import NAMES, Placed, drawn, errors, gathered, mask_of, placed_tiles, positions, run, truth
from tests.attention.test_overlap import Clock, waits_at_once


def cases_of(world: int, count: int, **fixed) -> list[Placed]:
    """Every option in turn with every other, over the seeds."""
    ratios = [(4, 2, 2), (4, 4, 4), (6, 2, 1), (8, 4, 2), (2, 1, 1), (6, 6, 3), (4, 2, 1)]
    made = []
    for seed in range(count):
        heads, kv_heads, groups = ratios[seed % len(ratios)]
        made.append(
            Placed(
                **{
                    "seed": 100 * world + seed,
                    "world": world,
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "groups": groups,
                    "packs": 1 + seed % 2,
                    "keep": seed % 3 != 0,
                    "sinks": seed % 4 == 1,
                    "value_dim": (None, 5, 12)[seed % 3],
                    "head_chunks": 1 + (seed % 5 == 2),
                    "part": seed % 5 in (1, 2),
                    "window": 6 if seed % 8 == 7 else None,
                    **fixed,
                }
            )
        )
    return [replace(case, part=case.part and case.window is None) for case in made]


@pytest.mark.parametrize("world,dp", [(4, 2), (6, 3)])
def test_domains_of_several_cp_groups(ranks, world, dp):
    """Of two packs, on CP groups of two ranks: in the order of the ranks, or in another."""
    cases = cases_of(world, 4, packs=2, window=None)
    by_rank = ranks.run(run, world, cases, None, dp)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert max(errors(case, [results for results, _, _ in parts]).values()) <= 1e-12
        assert_as_planned(case, parts)


def itemsize(case: Placed) -> int:
    return torch.empty(0, dtype=case.dtype).element_size()


def assert_as_planned(case: Placed, parts) -> None:
    """Bytes and pairs that each rank counted are those that the plan says."""
    plan = drawn(case) if case.window is None else drawn(case).windowed(case.window)
    shape = (case.heads, case.kv_heads, case.dim, itemsize(case), case.value_dim)
    forward, backward = plan.bytes_moved(*shape), plan.bytes_moved(*shape, backward=True, keep=case.keep)
    turns, computed = min(case.head_chunks, case.kv_heads // case.groups), plan.loads().pairs
    for rank, (_, ahead, back) in enumerate(parts):
        index = plan.ranks.index(rank)
        for counts, said in ((ahead, forward), (back, backward)):
            assert [counts.bytes_sent, counts.bytes_received] == said[:, :, index].sum(1).tolist(), case
            assert [counts.q_bytes_sent, counts.q_bytes_received] == said[:, Q, index].tolist(), case
        assert ahead.pairs == back.pairs_backward == turns * computed[index]


@pytest.mark.parametrize("world,count", [(1, 8), (2, 24), (3, 24), (4, 24), (6, 3), (8, 2)])
def test_random_plans_are_exact_and_move_what_they_say(ranks, world, count):
    cases = cases_of(world, count)
    by_rank = ranks.run(run, world, cases)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert max(errors(case, [results for results, _, _ in parts]).values()) <= 1e-12, (
            case,
            errors(case, [results for results, _, _ in parts]),
        )
        assert_as_planned(case, parts)
    assert world == 1 or sum(drawn(case).moves_queries for case in cases) > count // 2


@pytest.mark.parametrize("world", [2, 4])
def test_plans_that_keep_queries_at_home_exchange_once_a_stage(ranks, world):
    cases = cases_of(world, 6, strays=False, direct=True, head_chunks=1, window=None)
    by_rank = ranks.run(run, world, cases)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert not drawn(case).moves_queries
        assert max(errors(case, [results for results, _, _ in parts]).values()) <= 1e-12
        assert_as_planned(case, parts)
        by_stage = drawn(case).traffic.by_stage > 0
        for _, ahead, back in parts:
            assert ahead.exchanges <= by_stage[:, 0].sum()
            assert back.exchanges <= by_stage[:, 1].sum() + (0 if case.keep else by_stage[:, 0].sum())


def bf16(case: Placed) -> Placed:
    return replace(case, dtype=torch.bfloat16, dim=16, value_dim=None, sinks=False, window=None)


@pytest.mark.parametrize("world", [1, 3])
def test_bf16_errs_no_more_than_twice_naive_bf16(ranks, world):
    """FlashAttention's rule, naive being dense matmuls and softmax in bf16."""
    cases = [bf16(case) for case in cases_of(world, 6)]
    by_rank = ranks.run(run, world, cases)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        got, want = gathered(case, [results for results, _, _ in parts]), truth(case)
        for name, a, b, plain in zip(NAMES, got, want, naive(case), strict=False):
            allowed = 2 * (plain - b).abs().max() + (b.bfloat16() - b).abs().max()
            assert a.dtype == torch.bfloat16 and (a - b).abs().max() <= allowed, (case, name)
        assert_as_planned(case, parts)


def naive(case: Placed) -> list[torch.Tensor]:
    q, k, v, dout = case.inputs()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    group, mask = case.heads // case.kv_heads, torch.from_numpy(mask_of(case).dense())
    scores = q.transpose(0, 1) @ k.repeat_interleave(group, 1).permute(1, 2, 0) * case.dim**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    out = (weights.nan_to_num() @ v.repeat_interleave(group, 1).transpose(0, 1)).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def twice(rank: int, world: int, cases: list[Placed]) -> bool:
    one, other = (run(rank, world, cases) for _ in range(2))
    return all(
        torch.equal(a, b) for (x, *_), (y, *_) in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_results_repeat_bit_for_bit(ranks):
    cases = [bf16(case) for case in cases_of(3, 6)] + cases_of(3, 3, dtype=torch.float32)
    assert ranks.run(twice, 3, cases) == [True] * 3


def test_a_window_of_one_ranks_part_moves_as_before(ranks):
    """Rows that nobody sees any more come and go: outputs of no keys at all among them."""
    cases = cases_of(3, 4, part=True, window=None)
    windowed = [replace(case, window=3) for case in cases]
    for case, parts in zip(windowed, zip(*ranks.run(run, 3, windowed), strict=True), strict=True):
        assert max(errors(case, [results for results, _, _ in parts]).values()) <= 1e-12


# ---- Ulysses around a plan that moves queries. ----


def around(rank: int, world: int, seeds: list[int]) -> list[tuple[list[torch.Tensor], int, int]]:
    """Results, and bytes sent in forward and backward, of two groups of two ranks that trade heads."""
    results, counter = [], Counter()
    groups = CpGroups(1, world, counter=counter)
    for seed in seeds:
        case = hybrid(seed)
        shards = case.shards(world)
        held = torch.from_numpy(shards.positions(rank))
        q, k, v, dout = (x[held] for x in case.inputs())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        plan = ulysses_plan(shards, tuple(range(world)), rank, degree=2, outer=partial(outer, seed))
        out = attend(plan, q, k, v, groups, keep=seed % 2 == 0)
        forward = counter.take().bytes_sent
        grads = torch.autograd.grad(out, (q, k, v), dout)
        results.append(([out.detach(), *grads], forward, counter.take().bytes_sent))
    groups.close()
    return results


def hybrid(seed: int) -> Case:
    return Case(lengths=(13, 1, 21, 4), heads=8, kv_heads=4, value_dim=6, layout=LAYOUTS[seed % 3], seed=seed)


def outer(seed: int, shards: Shards, ranks: tuple[int, ...], rank: int) -> AttentionPlan:
    """Causal documents with tiles on any rank, in two head groups."""
    case, tokens = Placed(seed=seed, world=len(ranks), groups=2), int(shards.cu_seqlens[-1])
    owner = np.zeros(tokens, np.int64)
    for place in range(len(ranks)):
        owner[shards.positions(place)] = place
    mask = causal(np.diff(shards.cu_seqlens))
    tiles = placed_tiles(case, np.random.default_rng(seed), mask.tiles_of_pack(), owner, tokens)
    moves, returns = direct(tiles, shards.offsets, shards.segments, tokens, head_groups=2)
    made = AttentionPlan(
        ranks=ranks,
        tokens=tokens,
        home_offsets=shards.offsets,
        home=shards.segments,
        tiles=tiles,
        moves=moves,
        returns=returns,
        head_groups=2,
    )
    made.check(mask)
    return part_of(made, rank)


def test_ulysses_around_a_plan_that_moves_queries(ranks):
    seeds = list(range(4))
    by_rank = ranks.run(around, 4, seeds)
    for seed, parts in zip(seeds, zip(*by_rank, strict=True), strict=True):
        case = hybrid(seed)
        where = torch.from_numpy(np.concatenate([case.shards(4).positions(rank) for rank in range(4)]))
        got = [torch.cat(x)[torch.argsort(where)] for x in zip(*(results for results, _, _ in parts), strict=True)]
        assert max(relative(a, b) for a, b in zip(got, one_process(case), strict=True)) <= 1e-12
        for rank, (_, ahead, back) in enumerate(parts):
            plan = ulysses_plan(case.shards(4), (0, 1, 2, 3), rank, degree=2, outer=partial(outer, seed))
            assert plan.outer.moves_queries
            said = partial(plan.bytes_sent, case.heads, case.kv_heads, case.dim, 8, case.value_dim)
            assert ahead == said()[rank] and back == said(backward=True, keep=seed % 2 == 0)[rank]


# ---- Time, as a clock sees it that transfers take a while on. ----


def timed(rank: int, world: int, cases: list[Placed], change=None) -> list[tuple[float, float, float]]:
    """(what all stages take if each takes the larger of computing and a transfer, and one transfer more; forward; backward)."""
    clock, results = Clock(0.0), []
    groups = CpGroups(1, world, counter=clock)
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(patch)
        for case in cases:
            plan = replace(drawn(case), ranks=tuple(range(world)))
            q, k, v, dout = (x[positions(plan, rank)] for x in case.inputs())
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            own = plan.tiles[plan.tiles[:, 0] == rank]
            work = np.bincount(own[:, 1], pairs(own[:, 2:]), plan.stages)
            for clock.delay in (0.0, 0.3 * work.mean(), 2 * work.mean()):
                out = attend(plan, q, k, v, groups)
                forward, _ = clock.take()
                torch.autograd.grad(out, (q, k, v), dout)
                results.append((np.maximum(work, clock.delay).sum() + clock.delay + 1e-6, forward, clock.take()[0]))
    groups.close()
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_rows_travel_while_stages_compute(ranks, world):
    """Both kinds on their way out for the next stage, and home from the last one, forward and backward."""
    cases = [Placed(seed=seed, world=world, groups=1 + seed % 2, packs=1 + seed % 2) for seed in range(6)]
    for results in ranks.run(timed, world, cases):
        assert all(max(forward, backward) <= bound for bound, forward, backward in results)
    assert any(f > bound for results in ranks.run(timed, world, cases, waits_at_once) for bound, f, _ in results)
    assert any(b > bound for results in ranks.run(timed, world, cases, waits_at_once) for bound, _, b in results)
