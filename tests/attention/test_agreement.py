"""Ranks that do not run the same plan find out before a row moves, all of them; a rank that fails ends the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from equipoise.attention.agreement import WORD, words
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.kernels import cpu
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.ring import ring_plan
from equipoise.attention.ulysses import ulysses_plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, sharded
from tests.attention.oracle import Case
from tests.ranks import RankError, Ranks


def agreed(plans: list, terms: str = "") -> bool:
    """What every rank concludes from these words."""
    said = [words(plan, index, terms) for index, plan in enumerate(plans)]
    return len({s[:2] for s in said}) == 1 and sum(s[2] for s in said) % WORD == 0


@settings(PROMISE, suppress_health_check=[HealthCheck.too_slow])  # kernels are compiled while it draws
@given(sharded(), st.booleans(), st.data())
def test_one_plan_is_one_plan_whatever_part_of_it_a_rank_has(shards, skip, data):
    ranks = tuple(range(shards.cp_size))
    parts = [ring_plan(shards, ranks, rank, skip=skip) for rank in ranks]
    whole = ring_plan(shards, ranks, skip=skip)
    assert agreed(parts) and agreed([whole] * len(parts))
    assert agreed([whole if data.draw(st.booleans()) else part for part in parts])
    assert agreed([ulysses_plan(shards, ranks, rank) for rank in ranks])


@settings(PROMISE, suppress_health_check=[HealthCheck.too_slow])  # kernels are compiled while it draws
@given(sharded(), st.data())
def test_any_other_rows_are_noticed(shards, data):
    """One entry of one rank's plan is another: the rows, their stage, or who sends them."""
    ranks = tuple(range(shards.cp_size))
    plans: list[AttentionPlan] = [ring_plan(shards, ranks, skip=False)] * len(ranks)
    name = data.draw(st.sampled_from(["moves", "returns", "home"]))
    array = getattr(plans[0], name).copy()
    if len(array) == 0 or len(ranks) == 1:
        return
    if name == "home":
        odd, row, column = data.draw(st.sampled_from(ranks)), data.draw(st.integers(0, len(array) - 1)), 1
    else:
        row, column = data.draw(st.integers(0, len(array) - 1)), data.draw(st.sampled_from([0, 4, 5]))
        odd = int(array[row, data.draw(st.sampled_from([2, 3]))])
    array[row, column] += 1
    plans[odd] = replace(plans[0], **{name: array})
    assert not agreed(plans)


def test_rows_swapped_between_ranks_are_noticed():
    """As many rows by stage and rank, but others: only the pairs of ranks tell."""
    plan = ring_plan(Case(lengths=(8,), layout="contiguous").shards(2), (0, 1), skip=False)
    moves = plan.moves.copy()
    moves[0, 4:] = moves[0, 4:] + 1
    other = replace(plan, moves=moves)
    assert words(plan, 0, "")[0] == words(other, 0, "")[0]
    assert not agreed([plan, other]) and not agreed([other, plan]) and agreed([other, other])


def disagreeing(rank: int, world: int, odd: dict, ranks: tuple[int, ...]) -> list[str]:
    """What attend says on each rank while rank 1 does something else; then that the groups still work."""
    groups, case, said = CpGroups(world, 1), Case(lengths=(9, 7, 4)), []
    index = ranks.index(rank)
    posted = [0]

    def counting(plain):
        def call(*args, **options):
            posted[0] += 1
            return plain(*args, **options)

        return call

    for change in odd:
        mine = replace(case, **change) if rank == 1 else case
        plan = mine.plan(ranks, index)
        if rank == 1 and change == {}:  # as many rows, but others
            plan.moves[:, 4:] += 1
        held = torch.from_numpy(mine.shards(world).positions(index))
        q, k, v, _ = (x[held] for x in mine.inputs())
        dist.all_to_all_single, plain = counting(dist.all_to_all_single), dist.all_to_all_single
        dist.batch_isend_irecv, plain_batch = counting(dist.batch_isend_irecv), dist.batch_isend_irecv
        posted[0] = 0
        try:
            attend(plan, q, k, v, groups, keep=mine.keep)
            said.append("")
        except ValueError as error:
            said.append(f"{error}")
        finally:
            dist.all_to_all_single, dist.batch_isend_irecv = plain, plain_batch
        assert posted == [1], "something beside the words was sent"
    held = torch.from_numpy(case.shards(world).positions(index))
    q, k, v, _ = (x[held] for x in case.inputs())
    plan, plain_tell, times = case.plan(ranks, index), groups.tell, []
    groups.tell = lambda *args: times.append(1) or plain_tell(*args)  # type: ignore[method-assign]
    for _ in range(3):
        attend(plan, q, k, v, groups)
    assert len(times) == 1, "once per plan, not per layer"
    groups.close()
    return said


@pytest.mark.parametrize("ranks_of_plan", [(0, 1, 2), (2, 0, 1)])
def test_a_rank_with_another_plan_is_found_on_all_ranks(ranks, ranks_of_plan):
    odd = {
        "plans": [{"lengths": (9, 8, 4)}, {"lengths": (7, 9, 4)}, {"layout": "contiguous"}, {"kind": "ulysses"}],
        "tensors or options": [{"heads": 8}, {"kv_heads": 4}, {"dim": 16}, {"dtype": torch.float32}, {"keep": False}],
        "rows to exchange": [{}],
    }
    changes = [change for some in odd.values() for change in some]
    by_rank = ranks.run(disagreeing, 3, changes, ranks_of_plan)
    for said in by_rank:
        for text, what in zip(said, [what for what, some in odd.items() for _ in some], strict=True):
            assert f"have different {what}" in text and "Nothing was sent" in text
            assert ("alike are" in text) == (what != "rows to exchange")


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    """Not the ranks of other tests: gloo's threads never rest again once an exchange has broken off."""
    pool = Ranks(timeout=30)
    yield pool
    pool.close()


def apart(rank: int, world: int, groups_of_ranks: list[tuple[int, ...]]) -> str:
    """Each rank believes in another set of ranks."""
    groups, case, ranks = CpGroups(world, 1, timeout=2), Case(lengths=(40, 9)), groups_of_ranks[rank]
    held = torch.from_numpy(case.shards(len(ranks)).positions(ranks.index(rank)))
    q, k, v, _ = (x[held] for x in case.inputs())
    try:
        attend(case.plan(ranks, ranks.index(rank)), q, k, v, groups)
        return "finished"
    except (ValueError, RuntimeError) as error:
        return type(error).__name__


def test_ranks_that_wait_for_different_ranks_all_end(team):
    """Who hears from everybody knows at once; who waits for a rank that never speaks to it knows by the timeout."""
    said = team.run(apart, 3, [(0, 1, 2), (0, 1), (0, 1, 2)], timeout=30)
    assert said == ["ValueError", "ValueError", "RuntimeError"]


def failing(rank: int, world: int, ranks: tuple[int, ...], phase: str, how: str) -> str:
    """Rank 1 fails in its second kernel call of the phase, in the midst of a ring; the error that this rank ends with."""
    groups, case = CpGroups(world, 1, timeout=2), Case(lengths=(40, 9))
    plain, calls = getattr(cpu, phase), []

    def break_off(*args):
        calls.append(1)
        if rank == 1 and len(calls) == 2:
            if how == "dies":
                os._exit(3)
            raise ArithmeticError("rank 1 fails")
        return plain(*args)

    index = ranks.index(rank)
    held = torch.from_numpy(case.shards(world).positions(index))
    q, k, v, dout = (x[held] for x in case.inputs())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    setattr(cpu, phase, break_off)
    try:
        for _ in range(3):
            out = attend(case.plan(ranks, index), q, k, v, groups, keep=False)
            torch.autograd.grad(out, (q, k, v), dout)
        return "finished"
    except (ArithmeticError, RuntimeError) as error:
        if how == "dies":
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(cpu, phase, plain)


@pytest.mark.parametrize("ranks_of_plan", [(0, 1, 2), (1, 0, 2)])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_rank_that_raises_ends_the_others_within_the_timeout(team, ranks_of_plan, phase):
    """It lives on, as a process whose error is caught does: the others do not wait longer than they were told to."""
    first, second, third = team.run(failing, 3, ranks_of_plan, phase, "raises", timeout=30)
    assert second == "ArithmeticError: rank 1 fails"
    assert first.startswith("RuntimeError") and third.startswith("RuntimeError")


@pytest.mark.parametrize("ranks_of_plan", [(0, 1, 2), (1, 0, 2)])
def test_a_rank_that_dies_ends_the_others(team, ranks_of_plan):
    with pytest.raises(RuntimeError, match="rank 1 died with exit code 3") as caught:
        team.run(failing, 3, ranks_of_plan, "backward", "dies", timeout=30)
    assert isinstance(caught.value.__cause__, RankError) and "ranks [0, 1, 2] failed" in str(caught.value.__cause__)


def test_a_word_is_64_bits():
    plan = ring_plan(Case(lengths=(50, 3)).shards(4), (0, 1, 2, 3))
    assert all(0 <= word < WORD for index in range(4) for word in words(plan, index, "fp32"))
    assert len({words(plan, index, "fp32")[:2] for index in range(4)}) == 1
