"""Exactness tests must see what is missing: the merge, any one transfer, tile or return, each on its own, shows.

Each mutation leaves out one thing of an executor that is exact without it, and the error of that case is then at least
ten orders of magnitude above the bound of the exactness tests. (That plans without it are refused on paper is in
test_ring.py.)

python -m pytest tests/attention/test_mutations.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from equipoise.attention import executor, totals
from equipoise.attention.groups import CpGroups, Group, Work
from equipoise.attention.plan import AttentionPlan
from torch import Tensor

from tests.attention.oracle import PLANNERS, Case, one_process, relative

SEEN = 1e-2
"""Relative error, where exactness tests allow 1e-12."""
NAMES = ("out", "dq", "dk", "dv")
PLANS = ("ring", "direct", "gather", "gather in 2")
CASES = {kind: Case(lengths=(17, 9, 1, 6), kind=kind, layout="document") for kind in PLANNERS}
WORLD = 3


def run(rank: int, world: int, case: Case, plan: Any, groups: CpGroups) -> list[Tensor]:
    """This rank's out, dq, dk, dv."""
    held = torch.from_numpy(case.shards(world).positions(rank))
    q, k, v, dout = (x[held] for x in case.inputs())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = executor.attend(plan, q, k, v, groups, keep=case.keep)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def errors(case: Case, world: int, parts: list[list[Tensor]]) -> dict[str, float]:
    where = torch.argsort(torch.from_numpy(np.concatenate([case.shards(world).positions(r) for r in range(world)])))
    pieces = zip(*parts, strict=True)
    return {
        name: relative(torch.cat(part)[where], want)
        for name, part, want in zip(NAMES, pieces, one_process(case), strict=True)
    }


# ---- The merge. ----


def overwritten(out: Tensor, lse: Tensor, rows: Any, part: Tensor, part_lse: Tensor) -> None:
    """The last part wins."""
    out[rows] = part.to(out.dtype)
    lse[rows] = part_lse


def added(out: Tensor, lse: Tensor, rows: Any, part: Tensor, part_lse: Tensor) -> None:
    """Parts are added up without their weights."""
    out[rows] += part.to(out.dtype)
    lse[rows] = torch.logaddexp(lse[rows], part_lse)


def without_merge(rank: int, world: int, case: Case, merge: Callable | None) -> list[Tensor]:
    groups = CpGroups(1, world)
    with pytest.MonkeyPatch.context() as patch:
        if merge is not None:
            patch.setattr(totals, "merge_", merge)
        result = run(rank, world, case, case.plan(tuple(range(world)), rank), groups)
    groups.close()
    return result


@pytest.mark.parametrize("kind", PLANS)
def test_the_merge(ranks, kind):
    case = CASES[kind]
    assert max(errors(case, WORLD, ranks.run(without_merge, WORLD, case, None)).values()) <= 1e-12
    for merge in (overwritten, added):
        found = errors(case, WORLD, ranks.run(without_merge, WORLD, case, merge))
        assert min(found["out"], found["dq"]) > SEEN, (merge.__name__, found)


# ---- One row of the plan: a tile, a move that nobody makes, a return. ----


def without_rows(rank: int, world: int, case: Case, name: str) -> list[list[Tensor]]:
    """For each row of one of the plan's arrays: results without it, on all ranks alike."""
    groups, results = CpGroups(1, world), []
    whole = PLANNERS[case.kind](case.shards(world), tuple(range(world)))
    assert isinstance(whole, AttentionPlan)
    for row in range(len(getattr(whole, name))):
        plan = replace(whole, **{name: np.delete(getattr(whole, name), row, axis=0)})
        results.append(run(rank, world, case, plan, groups))
    groups.close()
    return results


@pytest.mark.parametrize(("name", "shows"), [("tiles", ("out", "dq", "dk", "dv")), ("returns", ("dk", "dv"))])
@pytest.mark.parametrize("kind", PLANS)
def test_any_one_tile_or_return(ranks, kind, name, shows):
    case = CASES[kind]
    by_rank = ranks.run(without_rows, WORLD, case, name)
    assert len(by_rank[0]) > 5
    for row, parts in enumerate(zip(*by_rank, strict=True)):
        found = errors(case, WORLD, list(parts))
        # The tile of a single token is left out too, whose only gradient is that of its value.
        assert max(found[shown] for shown in shows) > SEEN, (name, row, found)
        if name == "returns":
            assert max(found["out"], found["dq"]) <= 1e-12


# ---- Transfers, as they happen. ----


@dataclass(eq=False)
class Losing:
    """Takes the place of a counter: what one exchange brings is lost, from the rank that brings most."""

    lost: int | None
    """Which one, in order; None: none."""
    made: int = 0
    bringing: int = 0
    """Exchanges that brought this rank something of another."""

    def group(self, group: Group | None, index: int) -> Group | None:
        return None if group is None else LosingGroup(group=group, index=index, losing=self)

    def kernel(self, kernel: Any) -> Any:
        return kernel


@dataclass(frozen=True)
class LosingGroup:
    group: Group
    index: int
    losing: Losing

    def exchange(self, sent: Tensor, send: list[int], received: Tensor, receive: list[int]) -> Work:
        work = self.group.exchange(sent, send, received, receive)
        others = [0 if peer == self.index else rows for peer, rows in enumerate(receive)]
        at, self.losing.made = self.losing.made, self.losing.made + 1
        self.losing.bringing += max(others) > 0
        if at != self.losing.lost or not max(others):
            return work
        peer = int(np.argmax(others))
        return Lost(work=work, rows=received.split(receive)[peer])


@dataclass(frozen=True)
class Lost:
    work: Work
    rows: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.rows.zero_()


@contextmanager
def losing(world: int) -> Iterator[tuple[CpGroups, Losing]]:
    counter = Losing(None)
    groups = CpGroups(1, world, counter=counter)  # type: ignore[arg-type]
    yield groups, counter
    groups.close()


def without_transfers(rank: int, world: int, case: Case) -> list[tuple[bool, list[Tensor]]]:
    """For each exchange, first none: whether it brought this rank something, and results when rank 0 loses that."""
    results: list[tuple[bool, list[Tensor]]] = []
    with losing(world) as (groups, counter):
        plan = case.plan(tuple(range(world)), rank)
        results.append((False, run(rank, world, case, plan, groups)))
        for lost in range(counter.made):
            counter.made, counter.bringing, counter.lost = 0, 0, lost if rank == 0 else None
            results.append((True, run(rank, world, case, plan, groups)))
    return results


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("kind", list(PLANNERS))
def test_any_one_transfer(ranks, kind, keep):
    """KV on its way out, received again in backward, gradients on their way home; what Ulysses trades, each of four times."""
    case = replace(CASES[kind], keep=keep)
    by_rank = ranks.run(without_transfers, WORLD, case)
    exact, *lossy = (list(parts) for parts in zip(*by_rank, strict=True))
    assert max(errors(case, WORLD, [part for _, part in exact]).values()) <= 1e-12
    assert len(lossy) == {"ring": 4, "direct": 4, "gather": 2, "gather in 2": 4, "ulysses": 4}[kind] + (
        {"ring": 2, "direct": 2, "gather": 1, "gather in 2": 2}.get(kind, 0) if not keep else 0
    )
    for parts in lossy:
        found = errors(case, WORLD, [part for _, part in parts])
        assert max(found.values()) > SEEN, found
