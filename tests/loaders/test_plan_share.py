"""Ranks that share the planning: everybody's plans are those of planning alone, nothing piles up, and nobody is waited for in vain."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial

import pytest
import torch.distributed as dist
from equipoise.loaders import plan_share
from equipoise.loaders.planning import PlanAhead, Share
from hypothesis import given, settings

from tests.loaders import solvers
from tests.loaders.solvers import GREEDY, content, windows
from tests.loaders.test_planning import solving

WORLD = 3


def tcp_store(rank: int, world: int) -> dist.Store:
    """The kind that jobs have. Connecting asks for the host's name, which takes seconds now and then: for few tests."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port)
    return server or dist.TCPStore("127.0.0.1", port[0], is_master=False)


def shared(rank: int, world: int, steps: list, solver: Callable, file: str = "", processes: int = 0) -> list:
    store = dist.FileStore(file, world) if file else tcp_store(rank, world)
    share = Share(store=store, rank=rank, world=world)
    with closing(PlanAhead(steps=3, processes=processes, share=share, timeout=60)) as planning:
        told = [content(plan) for plan, seconds in planning(steps, solver) if seconds > 0]
    dist.barrier()
    return told


@settings(max_examples=50, deadline=None)
@given(case=solving())
def test_shared_plans_are_those_of_planning_alone(ranks, tmp_path_factory, case: tuple) -> None:
    solver, steps = case
    alone = [content(solver(window)) for window in steps]
    file = str(tmp_path_factory.mktemp("store") / "store")
    assert ranks.run(shared, WORLD, steps, solver, file) == [alone] * WORLD


def test_ranks_share_planning_processes(ranks) -> None:
    alone = [content(GREEDY(window)) for window in windows(7)]
    assert ranks.run(shared, WORLD, list(windows(7)), GREEDY, "", 1) == [alone] * WORLD


def dead(rank: int, world: int) -> str:
    """Rank 1 never plans anything."""
    store = tcp_store(rank, world)
    planning = PlanAhead(steps=2, share=Share(store=store, rank=rank, world=world), timeout=1.0)
    told = ""
    if rank != 1:
        try:
            list(planning(windows(6), GREEDY))
        except RuntimeError as error:
            told = str(error)
    planning.close()
    dist.barrier()
    return told


def test_a_rank_that_died_is_named_with_its_step(ranks) -> None:
    for told in ranks.run(dead, WORLD)[::2]:
        assert told.startswith("step 1 of epoch 0 was not planned within 1 s: rank 1 should have planned it")


class Team:
    """Ranks as threads around one store in memory."""

    def __init__(self, world: int = WORLD, *, steps: int = 2, timeout: float = 60.0) -> None:
        self.store = dist.HashStore()
        self.world, self.steps, self.timeout = world, steps, timeout
        self.planning = [self.loader(rank) for rank in range(world)]

    def loader(self, rank: int) -> PlanAhead:
        share = Share(store=self.store, rank=rank, world=self.world)
        return PlanAhead(steps=self.steps, share=share, timeout=self.timeout)

    def run(self, each: Callable[[int, PlanAhead], object]) -> list:
        """each(rank, planning) in a thread per rank; what it returned, or raised."""
        with ThreadPoolExecutor(self.world) as pool:
            futures = [pool.submit(each, rank, planning) for rank, planning in enumerate(self.planning)]
            if wait(futures, 120).not_done:
                self.close()
                raise TimeoutError("a rank waits in vain")
            return [future.exception() or future.result() for future in futures]

    def close(self) -> None:
        for planning in self.planning:
            planning.close()


@pytest.fixture
def team() -> Iterator[Team]:
    with closing(Team()) as made:
        yield made


def recipes(planning: PlanAhead, solver: Callable, epoch: int = 0, stop: int | None = None) -> list[str]:
    plans = planning(windows(7, epoch), solver)
    with closing(plans):
        return [plan.recipe for _, (plan, _) in zip(range(7 if stop is None else stop), plans, strict=False)]


def test_each_rank_plans_its_steps_and_reads_the_others(team: Team) -> None:
    told = team.run(lambda rank, planning: recipes(planning, solvers.Named(f"rank {rank}")))
    assert told == [[f"rank {step % WORLD}" for step in range(7)]] * WORLD


def test_no_iteration_reads_a_plan_of_another(team: Team) -> None:
    """Not a later epoch, nor the same one again, nor a second loader on the same store, nor one after a break."""
    second = Team(steps=3)
    second.store = team.store
    second.planning = [second.loader(rank) for rank in range(WORLD)]
    for turn in range(12):
        name, stop = f"turn {turn}", 2 + turn % 5 if turn % 3 else None
        used = second if turn % 4 == 1 else team
        told = used.run(partial(_told, name, turn % 2, stop))
        assert told == [[name] * (7 if stop is None else stop)] * WORLD
    second.close()


def _told(name: str, epoch: int, stop: int | None, rank: int, planning: PlanAhead) -> list[str]:
    return recipes(planning, solvers.Named(name), epoch, stop)


def test_the_store_does_not_fill_up(team: Team) -> None:
    """After an iteration, complete or broken off, nothing is left but who constructed how many loaders."""
    least = team.store.num_keys()
    for turn in range(8):
        team.run(lambda rank, planning, stop=turn % 3: recipes(planning, GREEDY, 0, stop + 2 if stop else None))
        assert team.store.num_keys() == least == WORLD


@pytest.mark.parametrize("world, steps", [(2, 1), (2, 4), (3, 2), (5, 3)])
def test_at_most_so_many_plans_of_a_rank_wait_for_readers(
    monkeypatch: pytest.MonkeyPatch, world: int, steps: int
) -> None:
    """The last rank reads slowly; the others run into the bound. Who leaves publishes what is left, one plan more."""
    seen: list[int] = []
    fetch = plan_share.Exchange._fetch

    def slowly(exchange: plan_share.Exchange, patient: bool) -> bool:
        if exchange._rank == world - 1:
            time.sleep(0.005)
            lying = [int(key.split("/0/")[1]) for key in team.store.list_keys() if re.search("/0/[0-9]+$", key)]
            seen.append(max(sum(1 for step in lying if step % world == rank) for rank in range(world)))
        return fetch(exchange, patient)

    monkeypatch.setattr(plan_share.Exchange, "_fetch", slowly)
    with closing(Team(world, steps=steps)) as team:
        assert team.run(lambda rank, planning: len(list(planning(windows(40), GREEDY)))) == [40] * world
    assert 0 < max(seen[:40]) <= steps and max(seen) <= steps + 1


def test_a_solvers_error_is_the_same_on_all_ranks(team: Team) -> None:
    for solver, kind in ((solvers.refuses_step_3, ValueError), (solvers.breaks_at_step_3, RuntimeError)):
        told = team.run(lambda rank, planning, solver=solver: recipes(planning, solver))
        assert {type(error) for error in told} == {kind}
        assert {str(error).removeprefix("on rank 0: ") for error in told} == {str(told[0])}
        assert "step 3 of epoch 0 cannot be planned" in str(told[0])


def test_a_plan_that_no_store_takes_is_refused_on_all_ranks(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_share, "_LARGEST", 100)
    told = team.run(lambda rank, planning: recipes(planning, GREEDY))
    assert {(type(error), str(error)) for error in told} == {(ValueError, str(told[0]))}
    assert "more than a store takes" in str(told[0])


def test_damage_on_the_way_is_told(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    intact = plan_share.plan_bytes
    monkeypatch.setattr(plan_share, "plan_bytes", lambda plan: intact(plan)[: -1 if plan.step == 1 else None])
    told = team.run(lambda rank, planning: recipes(planning, GREEDY))
    assert "step 1 of epoch 0, planned by rank 1, came damaged" in str(told[0])


def test_a_rank_that_leaves_early_is_named_at_once() -> None:
    """Long before the timeout: the others would need a plan that will never come."""
    with closing(Team(timeout=600.0)) as team:
        told = team.run(lambda rank, planning: recipes(planning, GREEDY, 0, 2 if rank == 1 else None))
    assert told[1] == [GREEDY.recipe.name] * 2
    for error in (told[0], told[2]):
        assert "of epoch 0 will not be planned: rank" in str(error) and "has ended its iteration" in str(error)


def test_closing_ends_the_wait_for_another_rank_at_once() -> None:
    with closing(Team(timeout=600.0)) as team:
        plans = team.planning[0](windows(7), GREEDY)
        assert next(plans)[0].step == 0
        threading.Timer(0.2, team.planning[0].close).start()
        with pytest.raises(RuntimeError, match="planning was closed before step 1"):
            next(plans)


def test_plans_of_a_rank_that_is_done_are_still_there_for_slower_ones(team: Team) -> None:
    """Rank 0 plans the last step, has read everything and closes; the others come later."""
    done = threading.Event()

    def read(rank: int, planning: PlanAhead) -> int:
        plans = planning(windows(7), GREEDY)
        count = sum(1 for _ in zip(range(6), plans, strict=False))
        if rank:
            done.wait(20)
        count += sum(1 for _ in plans)
        planning.close()
        done.set()
        return count

    assert team.run(read) == [7] * WORLD


class Hooked(dist.Store):
    """A store in memory; ``hook`` is called with the keys before they are looked for."""

    def __init__(self, hook: Callable[[dist.Store, list[str]], None]) -> None:
        super().__init__()
        self.inner, self.hook = dist.HashStore(), hook

    def clone(self) -> Hooked:
        return self

    def add(self, key: str, amount: int) -> int:
        return self.inner.add(key, amount)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def set(self, key: str, value: bytes) -> None:
        self.inner.set(key, value)

    def deleteKey(self, key: str) -> bool:  # noqa: N802  # as torch calls it
        return self.inner.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        self.hook(self.inner, keys)
        return self.inner.check(keys)


def test_a_store_that_fails_is_an_error_that_names_the_step() -> None:
    def fail(inner: dist.Store, keys: list[str]) -> None:
        raise RuntimeError("connection reset")

    with closing(PlanAhead(steps=2, share=Share(store=Hooked(fail), rank=0, world=2))) as planning:
        plans = planning(windows(7), GREEDY)
        next(plans)
        with pytest.raises(RuntimeError, match="step 1 of epoch 0 cannot be fetched, the job's store failed: .*reset"):
            next(plans)


def test_a_plan_that_is_published_just_before_its_rank_leaves_is_read() -> None:
    """Rank 1 publishes and leaves between two looks of rank 0: its plan is there, whatever the first look said."""

    def late(inner: dist.Store, keys: list[str]) -> None:
        if keys[0].endswith("left/1"):
            record = plan_share._HEADER.pack(b"P", 0.1) + plan_share.plan_bytes(GREEDY(list(windows(2))[1]))
            inner.set(keys[0].replace("left/1", "0/1"), record)
            inner.set(keys[0], "[]")

    with closing(PlanAhead(steps=2, share=Share(store=Hooked(late), rank=0, world=2), timeout=60)) as planning:
        assert [plan.step for plan, _ in planning(windows(2), GREEDY)] == [0, 1]


def test_alone_there_is_nothing_to_share() -> None:
    store = dist.HashStore()
    with closing(PlanAhead(steps=2, share=Share(store=store, rank=0, world=1))) as planning:
        assert len(list(planning(windows(3), GREEDY))) == 3
    assert store.num_keys() == 0
