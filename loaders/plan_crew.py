"""The crew of a ``PlanAhead``: threads that solve, each with a planning process of its own or none.

A thread starts its planner (``samplers/planner.py``) with the first step it gets and ends with it; since the kernel ends a
planner with the thread that started it, none outlives the trainer. A solver is sent once, a window per step; both are
pickled, for they stay between our own live processes. A planner that died is an error of the step it was at, and of no
other: the next step gets a new one.

Cost: 0.6 s and 0.1 GB to start a planner; half a millisecond to send 512 documents there and their plan back.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ..samplers.planner import Script, describe
from .plan_share import Exchange, name_of

if TYPE_CHECKING:
    from ..samplers.admission import Window
    from ..samplers.plan import StepPlan

Solve = Callable[["Window"], "StepPlan"]
_GRACE = 0.5  # seconds that closing waits for a solver that runs in a thread
_LIVENESS = 0.5  # seconds between two looks whether a planner is alive


@dataclass(eq=False, kw_only=True)
class Step:
    """A window on its way to a plan."""

    window: Window
    solver: Solve
    packed: Packed | None  # the solver, for a planning process
    exchange: Exchange | None  # where the plan is published
    future: Future[tuple[StepPlan, float]] = field(default_factory=Future)

    def settle(self, plan: StepPlan | None, seconds: float, error: Exception | None) -> None:
        """Hand over the plan, or why there is none, unless nobody wants it any more."""
        with contextlib.suppress(InvalidStateError):
            if error is not None:
                self.future.set_exception(error)
            else:
                assert plan is not None
                self.future.set_result((plan, seconds))


@dataclass(frozen=True)
class Packed:
    """A solver for planning processes."""

    solver: bytes
    script: Script

    @staticmethod
    def of(solver: Solve) -> Packed:
        try:
            return Packed(pickle.dumps(solver, pickle.HIGHEST_PROTOCOL), Script.running())
        except Exception as error:
            raise ValueError(
                f"planning processes need a solver that pickles, and this one does not ({error}): define its cost function at "
                f"the top of a module, or plan with processes=0"
            ) from error


class Crew:
    """The threads that solve, each with a planning process of its own if there are any."""

    def __init__(self, processes: int) -> None:
        self._processes, self._pid = processes, os.getpid()
        self._queue: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._planners: list[_Planner] = []

    @property
    def here(self) -> bool:
        """Whether this is the process that it was made or last started in, not a fork of it."""
        return self._pid == os.getpid()

    def start(self) -> None:
        """Make sure that they run; processes follow with the first step that they get."""
        if self._threads and self.here:  # a fork inherits neither threads nor processes
            return
        self._pid, self._queue = os.getpid(), queue.SimpleQueue()
        self._planners = [_Planner() for _ in range(self._processes)]
        self._threads = [
            # Daemons, so that a solver that hangs does not keep the interpreter from ending.
            threading.Thread(target=_work, args=(self._queue, planner), name="equipoise-planning", daemon=True)
            for planner in (self._planners or [None])  # type: ignore[list-item]
        ]
        for thread in self._threads:
            thread.start()

    def put(self, step: Step) -> None:
        self._queue.put(step)

    def end(self) -> None:
        """Kill the processes and end the threads; one that solves ends when it is done."""
        for planner in self._planners:
            planner.kill()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_GRACE)
        self._threads, self._planners = [], []


class _Planner:
    """A planning process, started and driven by one thread, with which it ends."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._has: Packed | None = None
        self._killed = False

    def solve(self, step: Step) -> tuple[StepPlan, float]:
        """Have a step solved. Raises as ``PlanAhead`` does; a process that died is replaced at the next step."""
        packed = step.packed
        assert packed is not None
        if self._process is None:
            self._start()
        try:
            plan, seconds, error = self._ask(
                (None if packed == self._has else packed.solver, packed.script, step.window)
            )
        except (EOFError, OSError):
            pid, code = self._process.pid, self.end()  # type: ignore[union-attr]
            raise RuntimeError(
                f"{name_of(step.window)} was not planned: planning process {pid} ended with exit code {code} (-9: killed, as the "
                f"system does when memory runs out)"
            ) from None
        if error is not None:
            is_value_error, text, trace = error
            raise failure(step.window, is_value_error, text) from RuntimeError(f"in the planning process:\n{trace}")
        self._has = packed
        return plan, seconds

    def kill(self) -> None:
        """End the process from another thread; nothing is started after that."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def end(self) -> int | None:
        """Reap the process; its exit code."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = self._has = None
        if process is None or pipe is None:
            return None
        pipe.close()
        process.kill()
        return process.wait()

    def _start(self) -> None:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", Script.__module__, str(theirs.fileno()), str(os.getpid())]
        # The same modules in the same order as here, and none from the folder it happens to be started in.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, env=environment
        )
        theirs.close()
        self._pipe = ours
        if self._killed:
            self._process.kill()

    def _ask(self, request: tuple) -> tuple:
        assert self._process is not None and self._pipe is not None
        self._pipe.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
        while not self._pipe.poll(_LIVENESS):
            # A worker that was forked in the wrong moment may hold the other end open.
            if self._process.poll() is not None and not self._pipe.poll():
                raise EOFError
        return pickle.loads(self._pipe.recv_bytes())


def _work(steps: queue.SimpleQueue[Step | None], planner: _Planner | None) -> None:
    """Solve steps until there are no more."""
    try:
        while (step := steps.get()) is not None:
            if not step.future.done():
                step.settle(*_solved(step, planner))
            del step  # an idle thread holds no window
    finally:
        if planner is not None:
            planner.end()


def _solved(step: Step, planner: _Planner | None) -> tuple[StepPlan | None, float, Exception | None]:
    plan, seconds, error = None, 0.0, None
    try:
        plan, seconds = planner.solve(step) if planner is not None else _solve_here(step)
    except Exception as failed:
        error = failed
    if step.exchange is not None and not step.future.done():
        error = step.exchange.offer(step.window, plan, seconds, error)
    return plan, seconds, error


def _solve_here(step: Step) -> tuple[StepPlan, float]:
    begin = time.perf_counter()
    try:
        plan = step.solver(step.window)
    except Exception as error:
        raise failure(step.window, *describe(error)) from error
    return plan, time.perf_counter() - begin


def failure(window: Window, is_value_error: bool, text: str) -> Exception:
    """What the caller is told about a solver's error."""
    name = name_of(window)
    told = text if name in text else f"{name} cannot be planned: {text}"
    return ValueError(told) if is_value_error else RuntimeError(told)
