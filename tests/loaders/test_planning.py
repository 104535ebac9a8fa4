"""Planning ahead: the same plans wherever they are made, in order, no further ahead than asked, and loud about every fault."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from equipoise.loaders.planning import PlanAhead, Share
from equipoise.recipes import NAMED
from equipoise.samplers.cluster import Cluster
from equipoise.samplers.flexsp import FlexSp, SpModel
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.loaders import solvers
from tests.loaders.solvers import GREEDY, Solve, content, windows
from tests.strategies import document_lengths

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def processes() -> Iterator[PlanAhead]:
    with closing(PlanAhead(steps=3, processes=2, timeout=60)) as planning:
        yield planning


@pytest.fixture(params=[0, 1])
def planning(request: pytest.FixtureRequest) -> Iterator[PlanAhead]:
    with closing(PlanAhead(steps=2, processes=request.param, timeout=60)) as planning:
        yield planning


@st.composite
def solving(draw: st.DrawFn) -> tuple[Solve, list]:
    """A recipe on a cluster that can run it, and a few windows."""
    recipe = NAMED[draw(st.sampled_from(sorted(NAMED)))]
    cp = 1 if recipe.shard == "whole" else draw(st.integers(1, 4))
    cap = draw(st.integers(-(-400 // cp), 500))
    cluster = Cluster(
        dp=draw(st.integers(1, 6)), cp=cp, max_tokens_per_rank=cap, sync=draw(st.sampled_from(["step", "slot"]))
    )
    epoch = draw(st.integers(0, 3))
    lengths = draw(st.lists(document_lengths(max_size=30, empty=False), min_size=1, max_size=4))
    return Solve(recipe, cluster), [solvers.window(each, step, epoch) for step, each in enumerate(lengths)]


@settings(max_examples=150, deadline=None)
@given(case=solving())
def test_plans_are_those_of_planning_in_line(processes: PlanAhead, case: tuple[Solve, list]) -> None:
    solver, steps = case
    alone = [content(solver(window)) for window in steps]
    with closing(PlanAhead(steps=2)) as thread:
        assert [content(plan) for plan, _ in thread(steps, solver)] == alone
    assert [content(plan) for plan, _ in processes(steps, solver)] == alone


@pytest.mark.parametrize("solver", ["scip", "highs"])
def test_mixed_integer_programmes_are_solved_in_planning_processes(processes: PlanAhead, solver: str) -> None:
    pytest.importorskip({"scip": "pyscipopt", "highs": "highspy"}[solver])
    options = FlexSp(model=SpModel.preset("gpt-7b"), more_slots=0, solver=solver, nodes=2, buckets=4)
    recipe = NAMED["flexsp"].__class__(**{**vars(NAMED["flexsp"]), "options": options})
    solve = Solve(recipe, Cluster(dp=4, max_tokens_per_rank=64))
    steps = list(windows(2))
    assert [content(plan) for plan, _ in processes(steps, solve)] == [content(solve(window)) for window in steps]


@pytest.mark.parametrize("steps, num_processes", [(1, 0), (3, 0), (3, 1)])
def test_windows_are_drawn_in_the_callers_thread_as_far_ahead_as_asked(steps: int, num_processes: int) -> None:
    drawn: list[int] = []

    def drawing() -> Iterator:
        for window in windows(8):
            assert threading.current_thread() is here
            drawn.append(window.step)
            yield window

    here, told, ahead = threading.current_thread(), [], []
    with closing(PlanAhead(steps=steps, processes=num_processes, timeout=60)) as planning:
        for plan, seconds in planning(drawing(), GREEDY):
            ahead.append(len(drawn) - len(told))
            told.append(plan.step)
            assert seconds > 0
    assert told == drawn == list(range(8)) and ahead == [steps] * (8 - steps + 1) + list(range(steps - 1, 0, -1))


def test_a_thread_plans_while_the_caller_is_busy() -> None:
    solved = threading.Semaphore(0)

    def solver(window):
        solved.release()
        return GREEDY(window)

    with closing(PlanAhead(steps=3)) as planning:
        plans = planning(windows(9), solver)
        next(plans)
        assert all(solved.acquire(timeout=60) for _ in range(3))


def test_processes_solve_different_steps_at_once(processes: PlanAhead, tmp_path: Path) -> None:
    assert len(list(processes(windows(4), solvers.Meet(tmp_path)))) == 4


def test_a_planner_imports_neither_torch_nor_the_script(processes: PlanAhead) -> None:
    assert "torch" in sys.modules or __import__("torch")
    with pytest.raises(ValueError, match=r"loaded: \[\], main: __main__"):
        next(processes(windows(1), solvers.heavy_modules))


@pytest.mark.parametrize(
    "solver, error, text",
    [
        (solvers.refuses_step_3, ValueError, r"^step 3 of epoch 1 cannot be planned: slots=2 do not hold it$"),
        (solvers.breaks_at_step_3, RuntimeError, r"^step 3 of epoch 1 cannot be planned: KeyError: 'no such key'$"),
    ],
)
def test_a_solvers_error_comes_in_its_turn_and_names_the_step(planning: PlanAhead, solver, error, text) -> None:
    told = []
    with pytest.raises(error, match=text) as caught:
        told += [None for _ in planning(windows(6, epoch=1), solver)]  # nothing is added if it raises
    assert caught.value.__cause__ is not None
    plans = planning(windows(6), solver)
    assert [next(plans)[0].step for _ in range(3)] == [0, 1, 2]
    with pytest.raises(error):
        next(plans)
    assert len(list(planning(windows(6), GREEDY))) == 6


def test_an_error_of_admission_comes_after_the_plans_before_it(planning: PlanAhead) -> None:
    def broken() -> Iterator:
        yield from windows(3)
        raise ValueError("no more documents")

    told = []
    with pytest.raises(ValueError, match="no more documents"):
        for plan, _ in planning(broken(), GREEDY):
            told.append(plan.step)
    assert told == [0, 1, 2]


def children() -> set[int]:
    """Processes that this one has started and not yet reaped."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")


def test_a_planner_that_is_killed_is_an_error_and_is_replaced(processes: PlanAhead) -> None:
    told = []
    with pytest.raises(
        RuntimeError, match=r"step 3 of epoch 0 was not planned: planning process \d+ ended with exit code -9"
    ):
        for plan, _ in processes(windows(6), solvers.dies_at_step_3):
            told.append(plan.step)
    assert told == [0, 1, 2]
    assert len(list(processes(windows(6), GREEDY))) == 6


@needs_proc
def test_a_planner_that_is_killed_while_idle_is_told_too() -> None:
    before = children()
    with closing(PlanAhead(steps=1, processes=1, timeout=60)) as planning:
        plans = planning(windows(3), GREEDY)
        next(plans)
        (pid,) = children() - before
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=f"step 1 of epoch 0 .* process {pid} ended with exit code -9"):
            next(plans)
        assert len(list(planning(windows(3), GREEDY))) == 3


@needs_proc
def test_a_fork_has_planners_of_its_own_and_leaves_ours_alone(processes: PlanAhead) -> None:
    assert len(list(processes(windows(2), GREEDY))) == 2
    before = children()
    child = os.fork()
    if not child:
        solved = len(list(processes(windows(2), GREEDY)))
        processes.close()
        os._exit(solved)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert before and children() == before
    assert len(list(processes(windows(2), GREEDY))) == 2


def test_a_solver_that_hangs_is_an_error_within_the_timeout(planning: PlanAhead) -> None:
    assert len(list(planning(windows(2), GREEDY))) == 2  # planners have started: what is timed is the wait for a plan
    planning._timeout = 0.5
    with pytest.raises(RuntimeError, match="step 3 of epoch 0 was not planned within 0.5 s: .* stuck or too slow"):
        list(planning(windows(6), solvers.hangs_at_step_3))
    planning._timeout = 60.0
    assert len(list(planning(windows(3), GREEDY))) == 3


@pytest.mark.parametrize("num_processes", [0, 1])
def test_closing_from_another_thread_ends_a_wait_at_once(num_processes: int) -> None:
    planning = PlanAhead(steps=1, processes=num_processes, timeout=60)
    plans = planning(windows(6), solvers.hangs_at_step_3)
    assert [next(plans)[0].step for _ in range(3)] == [0, 1, 2]
    closer = threading.Timer(0.2, planning.close)
    closer.start()
    with pytest.raises(RuntimeError, match="planning was closed before step 3 of epoch 0 was planned"):
        next(plans)
    closer.join()
    planning.close()
    assert len(list(planning(windows(3), GREEDY))) == 3  # and starts again
    planning.close()


def test_an_iteration_that_was_closed_does_not_end_as_if_it_were_complete() -> None:
    planning = PlanAhead(steps=2)
    plans = planning(windows(6), GREEDY)
    next(plans)
    planning.close()
    with pytest.raises(RuntimeError, match="planning was closed before step 1"):
        next(plans)


@needs_proc
def test_nothing_is_left_of_many_constructions() -> None:
    def held() -> tuple[int, int, set[int]]:
        gc.collect()
        deadline = time.monotonic() + 60
        while threading.active_count() > threads and time.monotonic() < deadline:
            time.sleep(0.01)
        return threading.active_count(), len(os.listdir("/proc/self/fd")), children()

    gc.collect()
    threads = threading.active_count()
    before = held()
    for turn in range(60):
        planning = PlanAhead(steps=2, processes=turn % 20 == 0)
        plans = planning(windows(3), GREEDY)
        next(plans)
        if turn % 2:
            planning.close()  # else collected
        del plans, planning
    after = held()  # of earlier tests, a thread may have ended meanwhile
    assert after[0] <= before[0] and after[1] <= before[1] and after[2] <= before[2]


SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
print("script runs as", __name__, flush=True)
from equipoise.loaders.planning import PlanAhead
from tests.loaders import solvers

def own(window):
    return solvers.GREEDY(window)

{rest}
"""


def script(folder: Path, rest: str) -> subprocess.Popen[str]:
    """A training script, started from the folder above its own."""
    path = folder / "scripts" / "train.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(SCRIPT.format(root=str(ROOT), rest=rest))
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(path)], stdout=pipe, stderr=pipe, text=True, cwd=folder)


def test_a_script_needs_a_guard_only_if_the_solver_is_defined_in_it(tmp_path: Path) -> None:
    if sys.version_info >= (3, 11):  # before, modules of the folder one is in are found first
        (tmp_path / "numba.py").write_text("raise SystemExit('not from here')")
    unguarded = "print(len(list(PlanAhead(steps=2, processes=1)(solvers.windows(3), solvers.GREEDY))))"
    out, err = script(tmp_path, unguarded).communicate(timeout=120)
    assert out.split("\n") == ["script runs as __main__", "3", ""], err
    guarded = "if __name__ == '__main__': print(len(list(PlanAhead(steps=2, processes=1)(solvers.windows(3), own))))"
    out, err = script(tmp_path, guarded).communicate(timeout=120)
    assert out.split("\n") == ["script runs as __main__", "script runs as __mp_main__", "3", ""], err


def test_a_solver_that_does_not_pickle_is_refused_before_anything_starts(planning: PlanAhead) -> None:
    planner = PlanAhead(steps=1, processes=1)
    with pytest.raises(ValueError, match="planning processes need a solver that pickles"):
        next(planner(windows(3), lambda window: GREEDY(window)))


@needs_proc
def test_planners_die_with_a_trainer_that_is_killed_whatever_they_are_at(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "plans = PlanAhead(steps=2, processes=2)(solvers.windows(3), solvers.holds_the_gil)\n"
        "import threading, os; threading.Thread(target=next, args=(plans,), daemon=True).start(); time.sleep(1.5)\n"
        "print(*(pid for task in os.listdir('/proc/self/task') for pid in open(f'/proc/self/task/{task}/children').read().split()), flush=True)\n"
        "time.sleep(60)",
    )
    assert program.stdout is not None
    program.stdout.readline()
    pids = program.stdout.readline().split()
    assert len(pids) == 2
    program.kill()
    program.wait()
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a planner outlives its trainer"
        time.sleep(0.02)
    program.communicate()


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] not in "ZX"
    except OSError:
        return False


def test_the_interpreter_ends_though_solvers_hang(tmp_path: Path) -> None:
    program = script(
        tmp_path,
        "kept = [PlanAhead(steps=2, processes=n)(solvers.windows(9), solvers.hangs_at_step_3) for n in (0, 1)]\n"
        "for plans in kept: next(plans), next(plans), next(plans)\n"
        "time.sleep(0.3); print('done')",
    )
    out, err = program.communicate(timeout=120)
    assert out.endswith("done\n") and program.returncode == 0 and not err, err


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"processes": -1}, {"timeout": 0.0}])
def test_impossible_options_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match="steps >= 1, processes >= 0 and timeout > 0"):
        PlanAhead(**{"steps": 1, **wrong})
    with pytest.raises(ValueError, match="rank must lie in"):
        Share(store=None, rank=3, world=3)  # type: ignore[arg-type]
