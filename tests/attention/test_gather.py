"""KV gather and rows sent straight from home: proved on paper over drawn shards, and exact over gloo ranks for every rule.

python -m pytest tests/attention/test_gather.py
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from equipoise.attention.executor import attend
from equipoise.attention.gather import gather_plan
from equipoise.attention.groups import CpGroups
from equipoise.attention.kernels.reference import dense
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.ring import ring_plan
from equipoise.packing.sharding_choice import received_rows
from equipoise.packing.shards import contiguous, zigzag
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import LAYOUTS, PROMISE, assert_part, sharded
from tests.attention.oracle import Case, one_process, relative

CHUNKS = st.sampled_from([1, 2, 3, 100])


def gather(shards, rank=None, **options) -> AttentionPlan:
    return gather_plan(shards, tuple(range(shards.cp_size)), rank, **options)


@PROMISE
@given(sharded(), st.booleans(), CHUNKS)
def test_every_pair_once_every_row_in_time_every_gradient_home(shards, skip, chunks):
    plan = gather(shards, skip=skip, chunks=chunks)
    plan.check(shards.cu_seqlens)
    assert np.array_equal(plan.loads().pairs, shards.pairs())


@PROMISE
@given(sharded(), st.integers(0, 11), st.booleans(), CHUNKS)
def test_one_ranks_plan_is_its_part_of_the_whole(shards, rank, skip, chunks):
    part = gather(shards, rank % shards.cp_size, skip=skip, chunks=chunks)
    part.check(shards.cu_seqlens)
    assert_part(part, gather(shards, skip=skip, chunks=chunks))


@PROMISE
@given(sharded(), CHUNKS)
def test_a_rank_receives_what_its_queries_need_and_no_more(shards, chunks):
    loads = gather(shards, chunks=chunks).loads()
    assert np.array_equal(loads.rows_received, received_rows(shards))
    assert np.array_equal(loads.rows_returned, loads.rows_received)
    assert np.array_equal(loads.rows_reduced, loads.rows_sent)


@PROMISE
@given(sharded(), st.booleans())
def test_the_bytes_are_those_of_a_ring_without_forwarding(shards, skip):
    """Which is also what a gather is, in as many stages as there are other ranks."""
    ring = ring_plan(shards, tuple(range(shards.cp_size)), skip=skip, forward=False)
    one, many = gather(shards, skip=skip), gather(shards, skip=skip, chunks=max(shards.cp_size - 1, 1))
    assert np.array_equal(one.loads().rows_received, ring.loads().rows_received)
    assert np.array_equal(many.moves, ring.moves) and np.array_equal(many.tiles, ring.tiles)


@PROMISE
@given(sharded())
def test_without_skipping_every_rank_receives_everything(shards):
    tokens = shards.tokens()
    assert np.array_equal(gather(shards, skip=False).loads().rows_received, tokens.sum() - tokens)


@pytest.mark.parametrize(
    "cp,chunks,stages", [(1, 1, 1), (2, 9, 2), (8, 1, 2), (8, 2, 3), (8, 3, 4), (8, 7, 8), (8, 50, 8)]
)
def test_chunks_are_stages_and_bound_what_is_held_at_once(cp, chunks, stages):
    plan = gather(zigzag([0, 64 * cp], cp), skip=False, chunks=chunks)
    assert plan.stages == stages
    for rank in range(cp):
        mine = plan.moves[plan.moves[:, 3] == rank]
        rows = np.bincount(mine[:, 0], mine[:, 5] - mine[:, 4], minlength=stages)[1:]
        assert all(rows <= 64 * -(-(cp - 1) // max(stages - 1, 1)))


def test_what_makes_no_gather_is_refused():
    with pytest.raises(ValueError, match="at least one stage and one turn; got chunks=0"):
        gather(contiguous([0, 4], 2), chunks=0)
    with pytest.raises(ValueError, match="one rank per shard"):
        gather_plan(contiguous([0, 4], 2), (0,))


# ---- Exactness. ----

NAMES = ("out", "lse", "dq", "dk", "dv")
KINDS = ("direct", "gather", "gather in 2")
GROUPS: dict[int, CpGroups] = {}
"""Groups of this rank process: built once, as a training run does."""


def run_cases(rank: int, world: int, cases: list[Case]) -> list[list[torch.Tensor]]:
    """This rank's out, lse [T, H], dq, dk, dv of each case."""
    if world not in GROUPS:
        GROUPS[world] = CpGroups(1, world)
    results = []
    for case in cases:
        mine = torch.from_numpy(case.shards(world).positions(rank))
        q, k, v, dout = (x[mine] for x in case.inputs())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attend(case.plan(tuple(range(world)), rank), q, k, v, GROUPS[world], keep=case.keep)
        lse = next(x for x in out.grad_fn.saved_tensors if x.ndim == 2)
        results.append([out.detach(), lse.T, *torch.autograd.grad(out, (q, k, v), dout)])
    return results


@functools.cache
def truth(lengths: tuple[int, ...], heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    case = Case(lengths=lengths, heads=heads, kv_heads=kv_heads, seed=seed)
    q, k, v, _ = case.inputs()
    lse = []
    for start, stop in zip(case.cu_seqlens[:-1].tolist(), case.cu_seqlens[1:].tolist(), strict=True):
        mask = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        lse.append(dense(q[start:stop], k[start:stop], v[start:stop], mask, case.dim**-0.5)[1].T)
    out, *grads = one_process(case)
    return [out, torch.cat(lse), *grads]


def assert_exact(ranks, world: int, cases: list[Case]) -> None:
    """Within 1e-12 of one process, relative to the largest value: a few hundred roundings of fp64."""
    for case, parts in zip(cases, zip(*ranks.run(run_cases, world, cases), strict=True), strict=True):
        where = torch.from_numpy(np.concatenate([case.shards(world).positions(r) for r in range(world)]))
        wanted = truth(case.lengths, case.heads, case.kv_heads, case.seed)
        for name, pieces, want in zip(NAMES, zip(*parts, strict=True), wanted, strict=True):
            got = torch.cat(pieces)[torch.argsort(where)]
            assert got.shape == want.shape and relative(got, want) <= 1e-12, (case, world, name)


def packs(cp: int) -> list[tuple[int, ...]]:
    """One token, lengths around the 2·cp chunks, primes, a giant among many tiny, fewer tokens than ranks, empty ones."""
    return [(1,), (2 * cp - 1, 2 * cp, 2 * cp + 1), (7, 13, 31, 2), (83, *[1, 2, 3] * 7), (0, 2, 0, 1)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_for_every_rule_that_cuts(ranks, world, layout):
    heads = [(4, 4), (4, 1), (4, 2)]
    cases = [
        Case(lengths=n, layout=layout, kind=kind, seed=i, heads=heads[i % 3][0], kv_heads=heads[i % 3][1])
        for i, n in enumerate(packs(world))
        for kind in KINDS
    ]
    assert_exact(ranks, world, cases)


@pytest.mark.parametrize("world", [6, 8])
def test_exact_on_larger_groups(ranks, world):
    cases = [
        Case(lengths=n, layout=LAYOUTS[(i + j) % len(LAYOUTS)], kind=kind, seed=i, keep=(i + j) % 2 == 0)
        for i, n in enumerate(packs(world))
        for j, kind in enumerate((*KINDS, "ring"))
    ]
    assert_exact(ranks, world, cases)


def test_kv_may_be_received_again(ranks):
    layouts = LAYOUTS[: len(packs(4))]
    cases = [
        Case(lengths=n, layout=layout, kind=kind, keep=False)
        for n, layout in zip(packs(4), layouts, strict=True)
        for kind in KINDS
    ]
    assert_exact(ranks, 4, cases)
