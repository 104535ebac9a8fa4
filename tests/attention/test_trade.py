"""Ulysses alone and inside other plans: exact over every factorisation, and it sends what it says.

python -m pytest tests/attention/test_trade.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from equipoise.attention.agreement import words
from equipoise.attention.counting import Counter
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.kernels import cuda
from equipoise.attention.program import lower
from equipoise.attention.ulysses import UlyssesPlan, ulysses_plan
from equipoise.packing.shards import Shards, divided

from tests.attention.draws import LAYOUTS
from tests.attention.oracle import PLANNERS, Case, one_process, relative

OUTERS = [kind for kind in PLANNERS if kind != "ulysses"]
HEADS = [(8, 8), (8, 2), (8, 1), (12, 4), (6, 2), (12, 3), (10, 2), (9, 3), (7, 7)]
"""MHA, GQA and MQA; shares that are uneven, or that cut the query heads of a KV head."""
GROUPS: dict[int, CpGroups] = {}
"""Groups of this rank process: built once, as a training run does."""


@dataclass(frozen=True, kw_only=True)
class Inside(Case):
    """Ulysses over groups of `degree` ranks, a plan of `kind` between them."""

    degree: int = 2
    split: bool = True
    """Whether shards are those of groups, divided; else those of ranks."""

    def shards(self, cp: int) -> Shards:
        if not self.split:
            return super().shards(cp)
        return divided(super().shards(cp // self.degree), self.degree)

    def plan(self, ranks: tuple[int, ...], rank: int) -> UlyssesPlan:
        return ulysses_plan(self.shards(len(ranks)), ranks, rank, degree=self.degree, outer=PLANNERS[self.kind])  # type: ignore[arg-type]


def run_case(rank: int, groups: CpGroups, case: Case, ranks: tuple[int, ...]) -> list[torch.Tensor]:
    """out, dq, dk, dv, and the gradient of the sinks if there are any."""
    index = ranks.index(rank)
    held = torch.from_numpy(case.shards(len(ranks)).positions(index))
    q, k, v, dout = (x[held] for x in case.inputs())
    sinks = case.head_sinks()
    inputs = [x.requires_grad_() for x in (q, k, v) + (() if sinks is None else (sinks,))]
    out = attend(case.plan(ranks, index), q, k, v, groups, sinks_H=sinks, **case.options())
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def run_cases(rank: int, world: int, cases: list[Case], ranks: tuple[int, ...] | None = None) -> list | None:
    """Results of each case, run twice; None on a rank that takes no part."""
    if world not in GROUPS:
        GROUPS[world] = CpGroups(1, world)
    ranks = tuple(range(world)) if ranks is None else ranks
    if rank not in ranks:
        return None
    results = []
    for case in cases:
        first, again = (run_case(rank, GROUPS[world], case, ranks) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "two runs differ"
        results.append(first)
    return results


@functools.cache
def truth(case: Case) -> list[torch.Tensor]:
    return one_process(case)


def assert_exact(ranks, world: int, cases: list[Case], members: tuple[int, ...] | None = None) -> None:
    """Within 1e-12 of one process, relative to the largest value: a few hundred roundings of fp64."""
    by_rank = [part for part in ranks.run(run_cases, world, cases, members) if part is not None]
    if members is not None:
        by_rank = [by_rank[sorted(members).index(member)] for member in members]
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        shards = case.shards(len(parts))
        where = torch.from_numpy(np.concatenate([shards.positions(r) for r in range(len(parts))]))
        results = list(zip(*parts, strict=True))
        got = [torch.cat(x)[torch.argsort(where)] for x in results[:4]] + [torch.stack(x).sum(0) for x in results[4:]]
        wanted = truth(Case(**{name: getattr(case, name) for name in Case.__dataclass_fields__ if name != "kind"}))
        for name, x, want in zip(("out", "dq", "dk", "dv", "d_sinks"), got, wanted, strict=False):
            assert x.shape == want.shape and relative(x, want) <= 1e-12, (case, world, name)


def packs(cp: int) -> list[tuple[int, ...]]:
    """One token, lengths around the 2·cp chunks, primes, a giant among tiny ones, fewer tokens than ranks, empty ones."""
    return [(1,), (2 * cp - 1, 2 * cp, 2 * cp + 1), (7, 13, 31, 2), (83, *[1, 2, 3] * 7), (0, 2, 0, 1)]


@pytest.mark.parametrize(
    "world,degree", [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (8, 4)]
)
def test_exact_over_every_factorisation(ranks, world, degree):
    """Over every layout and plan between groups; `split` or not, received again or kept."""
    few = world > 4
    cases: list[Case] = []
    for i, lengths in enumerate(packs(world)):
        for j, kind in enumerate(OUTERS[i % 2 :: 2] if few else OUTERS):
            at = len(cases)
            heads, kv_heads = HEADS[(i + 2 * j) % len(HEADS)]
            cases.append(
                Inside(
                    lengths=lengths,
                    degree=degree,
                    kind=kind,
                    layout=LAYOUTS[at % len(LAYOUTS)],
                    heads=heads,
                    kv_heads=kv_heads,
                    seed=i,
                    keep=at % 2 == 0,
                    split=at % 3 > 0,
                    dim=4,
                )
            )
    assert_exact(ranks, world, cases)


@pytest.mark.parametrize("world", [3, 4, 6])
def test_kv_heads_go_to_as_many_ranks_as_look_at_them(ranks, world):
    cases: list[Case] = [
        Case(lengths=(13, 1, 21, 4), heads=h, kv_heads=k, dim=4, kind="ulysses", layout="contiguous") for h, k in HEADS
    ]
    assert_exact(ranks, world, cases)


def test_windows_capped_scores_sinks_and_other_value_dims(ranks):
    odd: dict = {"lengths": (7, 13, 31, 2), "heads": 6, "kv_heads": 2}
    changes: list[dict] = [{"window": 5}, {"softcap": 2.0, "kernel": "reference"}, {"sinks": True}, {"value_dim": 4}]
    changes.append({"window": 3, "sinks": True, "value_dim": 6, "keep": False})
    cases = [Inside(**odd, **change, kind=kind) for change in changes for kind in ("ring", "gather")]
    assert_exact(ranks, 4, [*cases, Inside(**odd, **changes[-1], degree=4)])


@pytest.mark.parametrize("members", [(4, 1, 5, 2), (0, 2, 3, 5)])
def test_any_ranks_in_any_order(ranks, members):
    """Logical groups inside and between; the others do not take part."""
    cases: list[Case] = [Inside(lengths=(7, 13, 31, 2), kind=kind, layout="sequence") for kind in OUTERS]
    assert_exact(ranks, 6, cases, members)


# ---- What is sent. ----


def counted(rank: int, world: int, cases: list[Case]) -> list[tuple]:
    """(bytes sent forward, backward, pairs) of each case."""
    counter, results = Counter(), []
    if world not in GROUPS:
        GROUPS[world] = CpGroups(1, world)
    groups = GROUPS[world]
    groups.counter = counter
    try:
        for case in cases:
            held = torch.from_numpy(case.shards(world).positions(rank))
            q, k, v, dout = (x[held] for x in case.inputs())
            inputs = [x.requires_grad_() for x in (q, k, v)]
            out = attend(case.plan(tuple(range(world)), rank), q, k, v, groups, **case.options())
            forward = counter.take()
            torch.autograd.grad(out, inputs, dout)
            results.append((forward.bytes_sent, counter.take().bytes_sent, forward.pairs))
    finally:
        groups.counter = None
    return results


@pytest.mark.parametrize("world,degree", [(1, 1), (3, 3), (4, 2), (4, 4), (6, 2), (6, 3)])
def test_bytes_and_pairs_are_those_of_the_plan(ranks, world, degree):
    cases = [
        Inside(
            lengths=(3, 40, 1, 17, 8),
            heads=h,
            kv_heads=k,
            degree=degree,
            kind=OUTERS[i % len(OUTERS)],
            layout=("document", "sequence")[i % 2],
            keep=i % 2 == 0,
            dtype=(torch.bfloat16, torch.float64)[i // 2 % 2],
            value_dim=(None, 4)[i // 4 % 2],
            dim=8,
        )
        for i, (h, k) in enumerate(HEADS)
    ]
    by_rank = ranks.run(counted, world, cases)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        plans = [case.plan(tuple(range(world)), rank) for rank in range(world)]
        sizes = (case.heads, case.kv_heads, case.dim, case.dtype.itemsize, case.value_dim)
        forward, backward, pairs = (list(values) for values in zip(*results, strict=True))
        assert forward == plans[0].bytes_sent(*sizes).tolist(), case
        assert backward == plans[-1].bytes_sent(*sizes, backward=True, keep=case.keep).tolist(), case
        assert pairs == [int(plan.outer.loads().pairs[rank // degree]) for rank, plan in enumerate(plans)]


@pytest.mark.parametrize("heads,kv_heads", [*HEADS, (28, 7), (40, 8), (64, 8)])
def test_no_more_is_sent_than_is_looked_at(heads, kv_heads):
    """Counted head by head: each token's queries to the one rank that has that head, its KV to those with a query for it."""
    for degree in (1, 2, 3, 4, 6):
        if degree > heads:
            continue
        plan = ulysses_plan(Case(lengths=(5, 9), layout="contiguous").shards(degree), tuple(range(degree)), 0)
        shares = plan.shares(heads, kv_heads)
        sees = [{query // (heads // kv_heads) for query in range(s.q0, s.q1)} for s in shares]
        held = [plan.tokens_of(rank) for rank in range(degree)]
        wanted = [
            sum(held[i] * (s.q1 - s.q0 + 2 * len(sees[j])) for j, s in enumerate(shares) if j != i)
            + (shares[i].q1 - shares[i].q0) * (sum(held) - held[i])
            for i in range(degree)
        ]
        assert plan.bytes_sent(heads, kv_heads, 1, 1).tolist() == wanted


def test_what_moves_between_groups_is_what_a_ring_of_groups_moves():
    """Of each rank's share of the KV heads: at 8 ranks, 2 x 4 sends a quarter of KV between groups, and the rest inside."""
    case = Inside(lengths=(1024,), degree=4, layout="document")
    plan, ring = case.plan(tuple(range(8)), 0), Case(lengths=(1024,)).plan((0, 1), 0)
    inner_only = ulysses_plan(case.shards(8), tuple(range(8)), 0, degree=4, outer=functools.partial(_nothing_moves))
    between = plan.bytes_sent(8, 8, 16, 2) - inner_only.bytes_sent(8, 8, 16, 2)
    assert between.tolist() == np.repeat(ring.loads(2 * 2 * 16 * 2).bytes_sent, 4).tolist()


def _nothing_moves(shards, ranks, rank):
    plan = PLANNERS["ring"](shards, ranks, rank)
    return replace(plan, moves=plan.moves[:0], returns=plan.returns[:0], known=None)


# ---- Few kernel calls. ----


@pytest.mark.parametrize("kind", OUTERS)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "striped"])
def test_a_thousand_documents_take_at_most_four_varlen_calls_a_stage(layout, kind):
    """Of a plan alone and between groups of two, of Ulysses alone: rows of several senders lie in the order of the pack."""
    draw = np.random.default_rng(0)
    tokens = np.where(draw.random(1000) < 0.01, draw.integers(200, 900, 1000), draw.integers(1, 30, 1000))
    case = Inside(lengths=tuple(tokens.tolist()), layout=layout, kind=kind)
    most = []
    for cp, degree in ((8, 1), (8, 2), (8, 8)):
        split = replace(case, degree=degree)
        for rank in range(0, cp, 3):
            plan = split.plan(tuple(range(cp)), rank).outer
            program = lower(plan, rank // degree)
            for stage in program.stages:
                calls = 0
                for *_, buffer, tiles in stage.tiles:
                    rows = program.tokens, program.buffer_rows[buffer]
                    calls += len(cuda.prepare(tiles, *rows, torch.device("cpu"), engine=cuda.TorchVarlen()).calls)
                most.append(calls)
    assert max(most) <= 4


# ---- What is refused. ----


def disagreeing(rank: int, world: int, changes: list[dict]) -> list[str]:
    """What attend says while rank 1 runs something else; nothing may have been sent, or this would hang."""
    groups, said = CpGroups(1, world), []
    case = Inside(lengths=(19, 7, 14), kind="ring", heads=6)
    sent = Counter()
    groups.counter = sent
    for change in changes:
        mine = replace(case, **change) if rank == 1 else case
        held = torch.from_numpy(mine.shards(world).positions(rank))
        q, k, v, _ = (x[held] for x in mine.inputs())
        try:
            attend(mine.plan(tuple(range(world)), rank), q, k, v, groups, **mine.options())
            said.append("")
        except ValueError as error:
            said.append(str(error))
        assert sent.take().bytes_sent == 0
    groups.close()
    return said


def test_a_rank_with_another_plan_is_found_on_all_ranks(ranks):
    changes: list[dict] = [
        {"degree": 6},
        {"degree": 1},
        {"kind": "direct"},
        {"kind": "gather"},
        {"layout": "contiguous"},
        {"lengths": (19, 14, 7)},
        {"split": False},
        {"keep": False},
        {"window": 3},
    ]
    for said in ranks.run(disagreeing, 6, changes):
        for change, text in zip(changes, said, strict=True):
            assert "All ranks of a plan must run the same one" in text, (change, text)


def test_turns_and_stages_between_groups_are_agreed_on():
    plan = Inside(lengths=(19, 7), kind="gather").plan(tuple(range(6)), 0)
    known = plan.outer.traffic
    in_turns, later = replace(plan.outer, head_chunks=2), replace(known, by_stage=known.by_stage[::-1].copy())
    in_groups, asked = replace(plan.outer, head_groups=2), replace(known, q_by_stage=known.by_stage)
    for outer in (in_turns, in_groups, replace(plan.outer, known=later), replace(plan.outer, known=asked)):
        assert words(replace(plan, outer=outer), 0, "")[0] != words(plan, 0, "")[0]


def too_few_heads(rank: int, world: int) -> str:
    case = Case(lengths=(9, 7), kind="ulysses", layout="contiguous")
    held = torch.from_numpy(case.shards(world).positions(rank))
    q, k, v, _ = (x[held] for x in case.inputs())
    groups = CpGroups(1, world)
    try:
        attend(case.plan(tuple(range(world)), rank), q[:, :2], k, v, groups)
    except ValueError as error:
        return str(error)
    finally:
        groups.close()
    return ""


def test_too_few_heads_are_refused_with_the_degrees_that_fit(ranks):
    for said in ranks.run(too_few_heads, 4):
        assert "got 2 heads for groups of 4" in said and "are 1, 2:" in said and "FlexSp(max_group=2)" in said
