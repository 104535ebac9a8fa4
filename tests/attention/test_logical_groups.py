"""Plans over any ranks at once: groups of 3, 5, 6, unaligned, side by side in one slot; exact, and they never hang.

python -m pytest tests/attention/test_logical_groups.py
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from equipoise.attention.executor import attend
from equipoise.attention.groups import Communicator, CpGroups, LogicalGroup

from tests.attention.oracle import Case, one_process, relative

NAMES = ("out", "dq", "dk", "dv")
Slot = list[tuple[tuple[int, ...], Case]]
"""Who runs what at once; the ranks of different entries are disjoint."""
GROUPS: dict[int, CpGroups] = {}
"""Of this rank process: built once, as a training run does."""


def groups_of(world: int) -> CpGroups:
    if world not in GROUPS:
        GROUPS[world] = CpGroups(world, 1)
    return GROUPS[world]


def run_slots(rank: int, world: int, slots: list[Slot]) -> list[list[torch.Tensor] | None]:
    """This rank's out, dq, dk, dv of each slot, None where it has no part; nothing else keeps ranks together."""
    results = []
    for slot in slots:
        mine = [(ranks, case) for ranks, case in slot if rank in ranks]
        results.append(run_case(rank, *mine[0], groups_of(world)) if mine else None)
    return results


def run_case(rank: int, ranks: tuple[int, ...], case: Case, groups: CpGroups) -> list[torch.Tensor]:
    index = ranks.index(rank)
    held = torch.from_numpy(case.shards(len(ranks)).positions(index))
    q, k, v, dout = (x[held] for x in case.inputs())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(case.plan(ranks, index), q, k, v, groups, keep=case.keep)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def assert_exact(pool, world: int, slots: list[Slot], bound: float = 1e-12, timeout: float | None = None) -> None:
    by_rank = pool.run(run_slots, world, slots, timeout=timeout)
    for at, slot in enumerate(slots):
        for ranks, case in slot:
            shards = case.shards(len(ranks))
            where = torch.cat([torch.from_numpy(shards.positions(i)) for i in range(len(ranks))])
            parts = zip(*(by_rank[rank][at] for rank in ranks), strict=True)
            for name, part, want in zip(NAMES, parts, truth(replace(case, layout="", kind="", keep=True)), strict=True):
                error = relative(torch.cat(part)[torch.argsort(where)], want)
                assert error <= bound, (at, ranks, case, name, error)


@functools.cache
def truth(case: Case) -> list[torch.Tensor]:
    return one_process(case)


def case_of(draw: random.Random, most_ranks: int) -> Case:
    """Documents of any lengths, some empty, perhaps fewer tokens than ranks."""
    kind = draw.choice(["ring", "ulysses"])
    lengths = tuple(draw.choice([0, 1, 2, 3, draw.randint(1, 40)]) for _ in range(draw.randint(1, 6)))
    heads, kv_heads = draw.choice([(8, 8), (8, 2), (8, 1), (9, 3)] if kind == "ulysses" else [(4, 4), (4, 2), (4, 1)])
    layout = draw.choice(["contiguous", "sequence", "document"])
    return Case(
        lengths=lengths if sum(lengths) else (1,),
        heads=heads,
        kv_heads=kv_heads,
        layout=layout,
        kind=kind,
        keep=draw.random() < 0.5,
        seed=draw.randint(0, 9),
    )


def random_slot(draw: random.Random, world: int) -> Slot:
    """The ranks, shuffled or not, cut into groups of any size; some of them idle."""
    ranks = list(range(world))
    if draw.random() < 0.5:
        draw.shuffle(ranks)
    slot, at = [], 0
    while at < world:
        size = draw.randint(1, world - at)
        if draw.random() < 0.9:
            slot.append((tuple(ranks[at : at + size]), case_of(draw, size)))
        at += size
    return slot


@pytest.mark.parametrize(("world", "slots"), [(4, 100), (8, 100)])
def test_200_random_slots_are_exact_and_end(ranks, world, slots):
    draw = random.Random(world)
    assert_exact(ranks, world, [random_slot(draw, world) for _ in range(slots)], timeout=120)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("keep", [True, False])
def test_cp_3_5_6_and_unaligned_groups_are_exact(ranks, kind, keep):
    """Beside each other in a world of 8, of which none has a communicator of its own."""
    shapes = [
        [(0, 1, 2), (3, 4, 5, 6, 7)],
        [(0, 1, 2, 3, 4), (5, 6, 7)],
        [(1, 2, 3, 4, 5, 6), (7, 0)],
        [(2, 3, 4, 5), (1, 6), (0, 7)],
        [(7, 5, 3, 1), (6, 4, 2)],
    ]
    lengths = [(1,), (3, 40, 1, 17, 8), (11, 12, 13), (53, *[2, 1] * 6), (2, 61), (0, 5, 0, 9)]
    slots, at = [], 0
    for shape in shapes:
        for layout in ("contiguous", "sequence", "document"):
            slot = []
            for group in shape:
                case = Case(
                    lengths=lengths[at % 6], heads=12, kv_heads=(12, 3, 1)[at % 3], layout=layout, kind=kind, keep=keep
                )
                slot.append((group, case))
                at += 1
            slots.append(slot)
    assert_exact(ranks, 8, slots)


def test_a_slot_of_cp_4_2_1_and_1(ranks):
    """The shape of the issue, next to slots in which everybody works on one pack and on one each."""
    case = functools.partial(Case, heads=8, kv_heads=4)
    for kind in ("ring", "ulysses"):
        slots: list[Slot] = [
            [
                ((0, 1, 2, 3), case(lengths=(61, 9), kind=kind)),
                ((4, 5), case(lengths=(30, 3), kind=kind)),
                ((6,), case(lengths=(17,), kind=kind)),
                ((7,), case(lengths=(5, 1, 9), kind=kind)),
            ],
            [(tuple(range(8)), case(lengths=(70, 1, 50), kind=kind))],
            [((rank,), case(lengths=(rank + 1, 3), kind=kind)) for rank in range(8)],
        ]
        assert_exact(ranks, 8, slots * 2)


def both_ways(rank: int, world: int, case: Case) -> list[bool]:
    """The same plan over a communicator and over a logical group of the same ranks: bit for bit alike."""
    groups, everyone = groups_of(world), tuple(range(world))
    first = run_case(rank, everyone, case, groups)
    logical = LogicalGroup(parent=groups._parent, ranks=everyone, index=rank)
    assert isinstance(groups[everyone], Communicator)
    kept, groups._groups[everyone] = groups._groups[everyone], logical
    try:
        second = run_case(rank, everyone, case, groups)
    finally:
        groups._groups[everyone] = kept
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_a_plan_runs_alike_over_either_kind_of_group(ranks, kind):
    for keep in (True, False):
        case = Case(lengths=(50, 3, 81, 1, 1, 20), dtype=torch.bfloat16, kind=kind, dim=32, keep=keep)
        assert ranks.run(both_ways, 3, case) == [[True] * 4] * 3


def with_a_collective(rank: int, world: int, slots: list[Slot]) -> list:
    """A long all-reduce of all ranks, as DDP has one under way, is posted before each slot and awaited after it."""
    results, sums = [], []
    for slot in slots:
        work = dist.all_reduce(total := torch.full((100_000,), float(rank)), async_op=True)
        results += run_slots(rank, world, [slot])
        work.wait()
        sums.append(bool((total == sum(range(world))).all()))
    assert all(sums)
    return results


def test_a_collective_of_all_ranks_may_be_under_way(ranks):
    draw = random.Random(11)
    slots = [random_slot(draw, 4) for _ in range(20)]
    by_rank = ranks.run(with_a_collective, 4, slots)
    plain = ranks.run(run_slots, 4, slots)
    for a, b in zip(by_rank, plain, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x is None) == (y is None)
            assert x is None or all(torch.equal(p, q) for p, q in zip(x, y, strict=True))
