"""Every layout x executor x head ratio x kind of lengths, on 1 to 8 ranks: out, lse, dq, dk, dv of one process.

Not their full product but a covering design: on each number of ranks, any two values of any two options meet in a case.
fp64 to 1e-12, fp32 to 1e-5, bf16 by FlashAttention's rule, and an error that does not grow with the ranks.

python -m pytest tests/attention/test_acceptance_grid.py
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.kernels.reference import dense

from tests.attention.draws import LAYOUTS
from tests.attention.oracle import PLANNERS, Case, naive, one_process, relative

WORLDS = (1, 2, 3, 4, 6, 8)
NAMES = ("out", "lse", "dq", "dk", "dv")
HEADS = ((8, 8), (8, 2), (8, 1))
"""MHA, GQA 4:1, MQA; as many as the largest group of ranks, so that Ulysses is legal."""
GROUPS: dict[int, CpGroups] = {}
"""Of this rank process: built once, as a training run does."""


def lengths_on(cp: int) -> list[tuple[int, ...]]:
    """Packs that break executors which expect divisible lengths, or tokens on every rank."""
    return [
        (1,),
        (2 * cp - 1, 2 * cp, 2 * cp + 1),
        (7, 13, 31, 2, 19),
        (97, *[1, 2, 3] * 6),
        (2, 0, 1),
        (16, 24, 0, 0),  # boundaries repeated at the end, as static shapes have them
        (6, 10, 1, 1),
    ]


def covering(options: list[list]) -> list[tuple]:
    """Few rows, one value of each option each, such that any two values of any two options meet in a row."""
    sides = list(itertools.combinations(range(len(options)), 2))
    open_pairs = {(i, a, j, b) for i, j in sides for a in options[i] for b in options[j]}
    rows = []
    while open_pairs:
        # Begin with a pair that has not met; then give each option the value that meets most.
        i, a, j, b = min(open_pairs, key=str)
        row = {i: a, j: b}
        for at in range(len(options)):
            if at not in row:
                row[at] = max(options[at], key=lambda value: len(_met({**row, at: value}, sides) & open_pairs))
        open_pairs -= _met(row, sides)
        rows.append(tuple(row[at] for at in range(len(options))))
    return rows


def _met(row: dict, sides: list[tuple[int, int]]) -> set[tuple]:
    return {(i, row[i], j, row[j]) for i, j in sides if i in row and j in row}


@functools.cache
def cases_on(world: int) -> list[Case]:
    lengths = lengths_on(world)
    rows = covering([list(LAYOUTS), list(PLANNERS), list(HEADS), list(range(len(lengths))), [True, False]])
    return [
        Case(layout=layout, kind=kind, heads=h, kv_heads=k, lengths=lengths[at], keep=keep, seed=at)
        for layout, kind, (h, k), at, keep in rows
    ]


def run_cases(rank: int, world: int, cases: list[Case]) -> list[list[torch.Tensor]]:
    """This rank's out, lse [tokens, heads], dq, dk, dv of each case; under Ulysses the lse of its heads, of all tokens."""
    if world not in GROUPS:
        GROUPS[world] = CpGroups(1, world)
    results = []
    for case in cases:
        held = torch.from_numpy(case.shards(world).positions(rank))
        q, k, v, dout = (x[held] for x in case.inputs())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attend(case.plan(tuple(range(world)), rank), q, k, v, GROUPS[world], keep=case.keep)
        node = out.grad_fn if case.kind != "ulysses" else out.grad_fn.next_functions[0][0]
        lse = next(x for x in node.saved_tensors if x.ndim == 2)
        results.append([out.detach(), lse.T, *torch.autograd.grad(out, (q, k, v), dout)])
    return results


def gathered(case: Case, world: int, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The ranks' results as one pack."""
    where = torch.from_numpy(np.concatenate([case.shards(world).positions(r) for r in range(world)]))
    pieces = list(zip(*parts, strict=True))
    whole = [torch.cat(x)[torch.argsort(where)] for x in (pieces[0], *pieces[2:])]
    lse = torch.cat(pieces[1], dim=1) if case.kind == "ulysses" else torch.cat(pieces[1])[torch.argsort(where)]
    return [whole[0], lse, *whole[1:]]


def truth(case: Case) -> list[torch.Tensor]:
    return _truth(case.lengths, case.heads, case.kv_heads, case.dim, case.dtype, case.seed)


@functools.cache
def _truth(lengths, heads, kv_heads, dim, dtype, seed) -> list[torch.Tensor]:
    case = Case(lengths=lengths, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, seed=seed)
    q, k, v, _ = (x.double() for x in case.inputs())
    lse = []
    for start, stop in itertools.pairwise(case.cu_seqlens.tolist()):
        mask = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        lse.append(dense(q[start:stop], k[start:stop], v[start:stop], mask, case.dim**-0.5)[1].T)
    out, *grads = one_process(case)
    return [out, torch.cat(lse), *grads]


def assert_exact(ranks, world: int, cases: list[Case], bound: float) -> None:
    by_rank = ranks.run(run_cases, world, cases)
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        for name, got, want in zip(NAMES, gathered(case, world, list(parts)), truth(case), strict=True):
            assert got.shape == want.shape and relative(got, want) <= bound, (world, case, name, relative(got, want))


def test_the_design_covers_what_it_says():
    """All pairs of (layout, executor, heads, lengths, keep), in hardly more cases than the two largest options need."""
    for world in WORLDS:
        options = [(c.layout, c.kind, (c.heads, c.kv_heads), c.lengths, c.keep) for c in cases_on(world)]
        for i, j in itertools.combinations(range(5), 2):
            values = [{o[at] for o in options} for at in (i, j)]
            assert {(o[i], o[j]) for o in options} == set(itertools.product(*values))
        assert {o[0] for o in options} == set(LAYOUTS) and {o[1] for o in options} == set(PLANNERS)
        assert len(options) <= 60


@pytest.mark.parametrize("world", WORLDS)
def test_exact_in_fp64(ranks, world):
    assert_exact(ranks, world, cases_on(world), 1e-12)


def low_precision(dtype: torch.dtype) -> list[Case]:
    """Every layout, twice, and every executor, with every ratio of heads."""
    lengths = [(130, 7, 64, 1), (151,), (20,) * 8]
    return [
        Case(
            lengths=lengths[i % 3],
            layout=layout,
            kind=list(PLANNERS)[i % len(PLANNERS)],
            heads=HEADS[i % 3][0],
            kv_heads=HEADS[i % 3][1],
            dim=32,
            dtype=dtype,
            seed=i,
        )
        for i, layout in enumerate(LAYOUTS * 2)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_fp32(ranks, world):
    assert_exact(ranks, world, low_precision(torch.float32), 1e-5)


@pytest.fixture(scope="module")
def bf16(ranks):
    """By number of ranks, for each case: (name, largest error, root of its mean square, what rounding to bf16 costs)."""
    cases, errors = low_precision(torch.bfloat16), {}
    for world in (1, 3, 8):
        by_rank = ranks.run(run_cases, world, cases)
        errors[world] = [
            [
                ((got - want).abs().max(), (got - want).square().mean().sqrt(), (want.bfloat16() - want).abs().max())
                for name, got, want in zip(NAMES, gathered(case, world, list(parts)), truth(case), strict=True)
                if name != "lse"
            ]
            for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True)
        ]
    return cases, errors


@pytest.mark.parametrize("world", [1, 3, 8])
def test_bf16_errs_no_more_than_twice_naive_bf16(bf16, world):
    """|ours - exact| <= 2 |naive bf16 - exact|, exact being fp64 on the same bf16 inputs."""
    cases, errors = bf16
    for case, measured in zip(cases, errors[world], strict=True):
        out, _, *grads = truth(case)
        for name, plain, want, (largest, _, rounding) in zip(
            ("out", "dq", "dk", "dv"), naive(case), [out, *grads], measured, strict=True
        ):
            assert largest <= 2 * (plain - want).abs().max() + rounding, (world, case, name)


def test_errors_do_not_grow_with_the_ranks(bf16):
    """At most twice those of one rank, largest and root mean square: partial results are merged and summed in fp32."""
    cases, errors = bf16
    for case, one, eight in zip(cases, errors[1], errors[8], strict=True):
        for name, (largest, mean, _), (largest_8, mean_8, _) in zip(("out", "dq", "dk", "dv"), one, eight, strict=True):
            assert largest_8 <= 2 * largest and mean_8 <= 2 * mean, (case, name)


# ---- What users of other executors ran into. ----


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_2999_tokens_on_four_ranks(ranks, kind):
    """EasyContext #47: chunks of 750, 750, 750 and 749 did not fit each other in backward."""
    case = Case(lengths=(2999,), heads=4, kv_heads=1, dim=4, kind=kind)
    by_rank = ranks.run(run_cases, 4, [case])
    assert sorted(len(parts[0][0]) for parts in by_rank) == [749, 750, 750, 750]
    for got, want in zip(gathered(case, 4, [parts[0] for parts in by_rank]), truth(case), strict=True):
        assert relative(got, want) <= 1e-12


@pytest.mark.parametrize(("world", "heads", "kv_heads"), [(8, 40, 8), (6, 40, 8), (2, 28, 7), (8, 28, 7), (4, 12, 3)])
def test_head_counts_that_others_cap_or_pair_wrongly(ranks, world, heads, kv_heads):
    """verl #1226 (40 over 8), vllm-omni PR #5716 (28 over 7 on 2 ranks), DeepSpeed #8291 (12 on 4 ranks)."""
    cases = [
        Case(lengths=(13, 1, 21), heads=heads, kv_heads=kv_heads, dim=4, kind=kind) for kind in ("ulysses", "ring")
    ]
    assert_exact(ranks, world, cases, 1e-12)


def filled_up(rank: int, world: int, case: Case) -> list[torch.Tensor]:
    """This rank's results where the pack's last document is padding, whose values are huge."""
    GROUPS.setdefault(world, CpGroups(1, world))
    held = torch.from_numpy(case.shards(world).positions(rank))
    q, k, v, dout = (x.clone() for x in case.inputs())
    for x in (q, k, v):
        x[case.cu_seqlens[-2] :] = 1e6
    dout[case.cu_seqlens[-2] :] = 0.0
    q, k, v, dout = (x[held] for x in (q, k, v, dout))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(case.plan(tuple(range(world)), rank), q, k, v, GROUPS[world])
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@pytest.mark.parametrize("kind", list(PLANNERS))
def test_padding_changes_no_real_token(ranks, kind):
    """TransformerEngine #1930, Megatron-LM #1669: 7 tokens padded to 8 on 2 ranks lost their last; all of 7 and 5 stay."""
    case = Case(lengths=(7, 5, 4), kind=kind)
    parts = ranks.run(filled_up, 2, case)
    where = torch.argsort(torch.from_numpy(np.concatenate([case.shards(2).positions(r) for r in range(2)])))
    out, _, *grads = truth(case)
    for pieces, want in zip(zip(*parts, strict=True), [out, *grads], strict=True):
        got = torch.cat(pieces)[where]
        assert relative(got[:12], want[:12]) <= 1e-12


def twice(rank: int, world: int, cases: list[Case]) -> bool:
    first, second = run_cases(rank, world, cases), run_cases(rank, world, cases)
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def test_results_repeat_bit_for_bit(ranks):
    cases = [
        Case(lengths=(50, 3, 81, 1, 1, 20), dtype=torch.bfloat16, layout=layout, kind=kind, dim=32)
        for layout, kind in zip(LAYOUTS, itertools.cycle(PLANNERS), strict=False)
    ]
    assert ranks.run(twice, 4, cases) == [True] * 4
