"""The executors over gloo ranks against one process: exact in fp64, for every layout, head ratio and odd length.

python -m pytest tests/attention/test_executor.py
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.ring import ring_plan

from tests.attention.draws import direct, staggered
from tests.attention.oracle import LAYOUTS, Case, naive, one_process, relative

NAMES = ("out", "dq", "dk", "dv")
ONE_GROUP: dict[tuple[int, int], CpGroups] = {}
"""Groups of this rank process: built once, as a training run does."""


def groups_of(dp: int, cp: int) -> CpGroups:
    if (dp, cp) not in ONE_GROUP:
        ONE_GROUP[dp, cp] = CpGroups(dp, cp)
    return ONE_GROUP[dp, cp]


def run_cases(rank: int, world: int, cases: list[Case], change=None) -> list[list[torch.Tensor]]:
    """This rank's out, dq, dk, dv of each case. change: of the whole, full ring into the plan to run."""
    results = []
    for case in cases:
        plan = case.plan(tuple(range(world)), rank)
        if change is not None:
            plan = change(ring_plan(case.shards(world), tuple(range(world)), skip=False))
        mine = torch.from_numpy(case.shards(world).positions(rank))
        q, k, v, dout = (x[mine] for x in case.inputs())
        sinks = case.head_sinks()
        inputs = [x.requires_grad_() for x in (q, k, v) + (() if sinks is None else (sinks,))]
        out = attend(plan, q, k, v, groups_of(1, world), sinks_H=sinks, **case.options())
        results.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
    return results


def gathered(case: Case, world: int, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The ranks' results as one pack; gradients of sinks summed."""
    where = torch.from_numpy(np.concatenate([case.shards(world).positions(r) for r in range(world)]))
    results = list(zip(*parts, strict=True))
    return [torch.cat(x)[torch.argsort(where)] for x in results[:4]] + [torch.stack(x).sum(0) for x in results[4:]]


def errors(ranks, world: int, cases: list[Case], change=None) -> list[list[float]]:
    """Relative error of out, dq, dk, dv of each case."""
    by_rank = ranks.run(run_cases, world, cases, change)
    return [
        [relative(got, want) for got, want in zip(gathered(case, world, list(parts)), truth(case), strict=True)]
        for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True)
    ]


def truth(case: Case) -> list[torch.Tensor]:
    return _truth(replace(case, layout="document", kind="ring", keep=True, kernel=None))


@functools.cache
def _truth(case: Case) -> list[torch.Tensor]:
    return one_process(case, torch.float64)


def odd_lengths(cp: int) -> list[tuple[int, ...]]:
    """Packs that break executors which expect divisible lengths."""
    return [
        (1,),
        (1, 2, 3),
        (2 * cp - 1, 2 * cp, 2 * cp + 1),
        (7, 9),
        (1, 2, 33, 5),
        (0, 5, 0, 11, 1),
        (67, *[1, 2, 3] * 6),
        (97,),
        (*[3, 1] * 5, 61, 13, 2, 2, 31),
    ]


def assert_exact(ranks, world: int, cases: list[Case], bound: float, change=None) -> None:
    for case, got in zip(cases, errors(ranks, world, cases, change), strict=True):
        assert max(got) <= bound, (case, dict(zip((*NAMES, "d_sinks"), got, strict=False)))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ring_is_exact(ranks, world, layout):
    cases = [Case(lengths=n, layout=layout, seed=i) for i, n in enumerate(odd_lengths(world))]
    assert_exact(ranks, world, cases, 1e-12)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ulysses_is_exact(ranks, world):
    layouts = [LAYOUTS[i % 3] for i in range(9)]
    cases = [
        Case(lengths=n, layout=layout, kind="ulysses", seed=i)
        for i, (n, layout) in enumerate(zip(odd_lengths(world), layouts, strict=True))
    ]
    assert_exact(ranks, world, cases, 1e-12)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_one_rank_needs_no_process_group_and_sends_nothing(kind):
    case = Case(lengths=(7, 1, 9), kind=kind)
    assert not dist.is_initialized()
    q, k, v, dout = case.inputs()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(case.plan((0,), 0), q, k, v, CpGroups(1, 1))
    got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    assert max(relative(a.detach(), b) for a, b in zip(got, truth(case), strict=True)) <= 1e-12


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_heads_of_any_ratio(ranks, world, kind):
    """MHA, GQA, MQA, fewer KV heads than ranks, heads that the ranks do not divide and shares that cut a KV group."""
    ratios = [(4, 4), (4, 2), (4, 1), (6, 2), (5, 5), (7, 1), (12, 4), (8, 2)]
    cases = [Case(lengths=(13, 1, 21, 4), heads=h, kv_heads=k, kind=kind, seed=h) for h, k in ratios]
    assert_exact(ranks, world, cases, 1e-12)


KINDS = ("ring", "direct", "gather in 2", "ulysses")


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dims", [(8, 5), (5, 8)])
def test_values_of_another_head_dim(ranks, world, dims):
    cases = [
        Case(lengths=n, dim=dims[0], value_dim=dims[1], heads=h, kv_heads=kv, kind=kind, keep=keep, layout=layout)
        for n, h, kv in [((13, 1, 21, 4), 4, 2), ((1, 2), 7, 1)]
        for kind, keep, layout in [
            ("ring", True, "document"),
            ("direct", False, "sequence"),
            ("ulysses", True, "contiguous"),
        ]
    ]
    assert_exact(ranks, world, cases, 1e-12)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "sequence", "document", "striped"])
def test_sliding_windows(ranks, world, layout):
    """From a query that sees itself only to one that sees all, in packs whose documents are longer and shorter."""
    cases = [
        Case(lengths=n, window=window, layout=layout, kind=KINDS[i % 4], keep=bool(i % 3))
        for i, (n, window) in enumerate(
            (n, w) for n in [(13, 1, 21, 4), (0, 61, 0, 2, 9)] for w in (1, 2, 5, 16, 60, 1000)
        )
    ]
    assert_exact(ranks, world, cases, 1e-12)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sinks(ranks, world):
    """Their gradient is the sum of the ranks'."""
    ways = [(4, 2, None, True), (7, 1, None, False), (4, 4, 5, True)]
    cases = [
        Case(lengths=(13, 1, 21, 4), sinks=True, heads=h, kv_heads=kv, window=w, keep=keep, kind=kind, value_dim=6)
        for h, kv, w, keep in ways
        for kind in KINDS
    ]
    assert_exact(ranks, world, cases, 1e-12)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_capped_scores(ranks, world):
    """A cap that binds: scores are of the order of 1."""
    cases = [
        Case(lengths=(13, 1, 21), softcap=0.7, kernel="reference", kind=kind, sinks=sinks, window=window)
        for kind in KINDS
        for sinks, window in [(False, None), (True, 6)]
    ]
    assert_exact(ranks, world, cases, 1e-12)


def test_more_ranks_than_tokens(ranks):
    """Some ranks hold nothing, and still take part."""
    cases = [
        Case(lengths=n, layout=layout, kind=kind)
        for n in [(1,), (2, 1)]
        for layout in LAYOUTS
        for kind in ("ring", "ulysses")
    ]
    assert_exact(ranks, 4, cases, 1e-12)


@pytest.mark.parametrize("world", [2, 4])
def test_received_kv_may_be_received_again(ranks, world):
    cases = [Case(lengths=n, keep=False, layout=LAYOUTS[i % 3]) for i, n in enumerate(odd_lengths(world))]
    assert_exact(ranks, world, cases, 1e-12)


@pytest.mark.parametrize("change", [staggered, direct])
@pytest.mark.parametrize("keep", [True, False])
def test_plans_of_other_shapes_run_too(ranks, change, keep):
    """Plans that hold the tiles of all ranks; rows sent on from several buffers, or home from several ranks at once."""
    cases = [Case(lengths=n, layout=layout, keep=keep) for n in [(1, 2, 33, 5), (61,)] for layout in LAYOUTS]
    assert_exact(ranks, 4, cases, 1e-12, change)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_fp32(ranks, kind):
    cases = [Case(lengths=n, dtype=torch.float32, kind=kind, dim=32) for n in [(130, 7, 64, 1), (301,)]]
    assert_exact(ranks, 3, cases, 1e-5)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_bf16_errs_no_more_than_twice_naive_bf16(ranks, world, kind):
    """FlashAttention's rule: |ours - exact| <= 2 |naive bf16 - exact|, exact being fp64 on the same bf16 inputs."""
    cases = [Case(lengths=n, dtype=torch.bfloat16, kind=kind, dim=32) for n in [(130, 7, 64, 1), (301,), (20,) * 16]]
    by_rank = ranks.run(run_cases, world, cases)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        for name, got, want, plain in zip(
            NAMES, gathered(case, world, list(parts)), truth(case), naive(case), strict=True
        ):
            # The last term is what rounding the result to bf16 costs.
            allowed = 2 * (plain - want).abs().max() + (want.bfloat16() - want).abs().max()
            assert (got - want).abs().max() <= allowed, (case, name)
            assert got.dtype == torch.bfloat16


def twice(rank: int, world: int, case: Case) -> bool:
    first, second = (run_cases(rank, world, [case])[0] for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_results_repeat_bit_for_bit(ranks, kind):
    case = Case(lengths=(50, 3, 81, 1, 1, 20), dtype=torch.bfloat16, kind=kind, dim=32)
    assert ranks.run(twice, 3, case) == [True] * 3


def big_scores(rank: int, world: int) -> bool:
    """Scores that differ by hundreds between the blocks of a ring: exp of a difference must not overflow."""
    case = Case(lengths=(32,), dtype=torch.float32)
    plan = case.plan(tuple(range(world)), rank)
    q, k, v, dout = (x[torch.from_numpy(case.shards(world).positions(rank))] for x in case.inputs())
    k = (k * (300.0 if rank else 1.0)).requires_grad_()
    out = attend(plan, q, k, v, groups_of(1, world))
    (dk,) = torch.autograd.grad(out, (k,), dout)
    return bool(out.isfinite().all() and dk.isfinite().all())


def test_far_apart_lse_stay_finite(ranks):
    assert ranks.run(big_scores, 4) == [True] * 4


def count_bytes(rank: int, world: int, case: Case, keep: bool) -> tuple[int, int]:
    """Bytes this rank sends to others through the executor, forward and then backward."""
    sent = [0]
    plain = dist.all_to_all_single

    def counting(output, input, output_split_sizes=None, input_split_sizes=None, **options):
        row = input[0].numel() * input.element_size() if len(input) else 0
        sent[-1] += row * sum(n for to, n in enumerate(input_split_sizes) if to != rank)
        return plain(output, input, output_split_sizes, input_split_sizes, **options)

    dist.all_to_all_single = counting
    try:
        mine = torch.from_numpy(case.shards(world).positions(rank))
        q, k, v, dout = (x[mine] for x in case.inputs())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attend(case.plan(tuple(range(world)), rank), q, k, v, groups_of(1, world), keep=keep)
        sent.append(0)
        torch.autograd.grad(out, (q, k, v), dout)
    finally:
        dist.all_to_all_single = plain
    return sent[0], sent[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_sent_are_those_of_the_plan(ranks, layout):
    case = Case(lengths=(3, 40, 1, 17, 8), layout=layout, dtype=torch.bfloat16)
    loads = case.plan((0, 1, 2), 0).loads(bytes_per_row=2 * case.kv_heads * case.dim * 2)
    # Gradients travel in fp32: twice the bytes of bf16.
    returned = loads.rows_returned * 2 * loads.bytes_per_row
    assert ranks.run(count_bytes, 3, case, True) == list(zip(loads.bytes_sent, returned, strict=True))
    again = ranks.run(count_bytes, 3, case, False)
    assert again == list(zip(loads.bytes_sent, loads.bytes_sent + returned, strict=True))


@pytest.mark.parametrize("world", [1, 3])
def test_ulysses_sends_what_it_says(ranks, world):
    case = Case(lengths=(3, 40, 1), kind="ulysses", dtype=torch.bfloat16, heads=6)
    said = case.plan(tuple(range(world)), 0).bytes_sent(case.heads, case.kv_heads, case.dim, 2)
    forward, backward = zip(*ranks.run(count_bytes, world, case, True), strict=True)
    assert list(forward) == said.tolist() and sum(backward) == sum(forward)


def complaints(rank: int, world: int) -> list[str]:
    """What attend says to inputs that do not fit; nothing may have been sent, or this would hang."""
    groups = groups_of(1, world)
    case = Case(lengths=(9, 7))
    plan = case.plan(tuple(range(world)), rank)
    n = plan.tokens_of(rank)
    q, kv = torch.randn(n, 4, 8), torch.randn(n, 2, 8)
    other = case.plan(tuple(range(world)), (rank + 1) % world)
    tries = [
        lambda: attend(plan, q[1:], kv, kv, groups),
        lambda: attend(plan, q, kv.double(), kv, groups),
        lambda: attend(plan, torch.randn(n, 3, 8), kv, kv, groups),
        lambda: attend(plan, q, kv, kv[:, :1], groups),
        lambda: attend(plan, q, torch.randn(n, 2, 4), torch.randn(n, 2, 4), groups),
        lambda: attend(plan, q, kv, kv, groups, kernel="cuda"),
        lambda: attend(plan, q, kv, kv, groups, kernel="mps"),
        lambda: attend(other, q, kv, kv, groups),
        lambda: attend(case.plan(tuple(range(5, 5 + world)), rank), q, kv, kv, groups),
        lambda: attend(Case(lengths=(9, 7), kind="ulysses").plan((0, 1), rank), q[:, :1], kv[:, :1], kv[:, :1], groups),
    ]
    said = []
    for attempt in tries:
        try:
            attempt()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_does_not_fit_is_refused_before_anything_is_sent(ranks):
    expected = [
        "8 tokens",
        "one floating dtype",
        "multiple of KV heads",
        "alike",
        "one head dim",
        "on cuda",
        "cpu, cuda, reference",
        "was made for index",
        "runs a plan of ranks",
        "at least one query head",
    ]
    for said in ranks.run(complaints, 2):
        for text, want in zip(said, expected, strict=True):
            assert want in text
