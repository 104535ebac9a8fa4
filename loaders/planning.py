"""PlanAhead: steps are planned before training needs them, in a thread or in planning processes.

    planning = PlanAhead(steps=4, processes=2)
    for plan, seconds in planning(windows, solver):
        …
    planning.close()

Windows are drawn in the caller's thread, for admission is sequential and cheap; solving runs ahead of it. The greedy
recipes need one thread, whose kernels release the GIL (SCIP does not). Solvers of seconds go to ``processes``: programs of
their own that import no torch (``samplers/planner.py``), each solving another step. Across ranks every rank plans all steps
for itself, with no exchange at all, or they ``share`` the work (``plan_share.py``). The plans are the same in every case.

A planner ends with the loader, with the trainer, and if the trainer is killed. One that dies, hangs or fails is an error in
the caller's thread that names the step.

Cost: a planning process gives its first plan after 0.6 s; a step of 512 documents costs half a millisecond more there than in
line, in a thread nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .plan_crew import Crew, Packed, Solve, Step
from .plan_share import Exchange, Share, SharedPlans, name_of

if TYPE_CHECKING:
    from ..samplers.admission import Window
    from ..samplers.plan import StepPlan

__all__ = ["PlanAhead", "Share"]


@dataclass(eq=False, kw_only=True)
class _Iteration:
    """Steps in flight, in order; ``end`` may come from any thread, and more than once."""

    exchange: Exchange | None
    steps: deque[Step] = field(default_factory=deque)
    ended: bool = False

    def end(self) -> None:
        self.ended = True
        for step in list(self.steps):
            step.future.cancel()
        if self.exchange is not None:
            self.exchange.leave()


class PlanAhead:
    """Solves windows ahead of whoever iterates over the plans.

    Args:
        steps: windows that may be drawn before their plans are handed out, the next one counted: with 1 nothing is ahead.
        processes: planning processes; 0: one thread. They are started by the first iteration and stay for the next.
        share: ranks plan in turn and read each other's plans; None: each plans all steps.
        timeout: seconds that the caller waits for a plan.

    >>> planning = PlanAhead(steps=2)
    >>> [plan for plan, seconds in planning("abc", str.upper)]  # windows and solvers may be of any kind
    ['A', 'B', 'C']
    >>> planning.close()
    """

    def __init__(self, *, steps: int, processes: int = 0, share: Share | None = None, timeout: float = 300.0) -> None:
        if steps < 1 or processes < 0 or not timeout > 0:
            raise ValueError(
                f"planning ahead wants steps >= 1, processes >= 0 and timeout > 0; got {steps}, {processes} and {timeout}"
            )
        self._steps, self._processes, self._timeout = steps, processes, timeout
        self._shared = SharedPlans(share, steps) if share is not None and share.world > 1 else None
        self._crew, self._iterations = Crew(processes), list[_Iteration]()
        weakref.finalize(self, _end, self._iterations, self._crew)  # on collection and at interpreter exit

    def __call__(self, windows: Iterable[Window], solver: Solve) -> Iterator[tuple[StepPlan, float]]:
        """The plans of the windows, in order, each with the seconds that its planning took.

        Raises, in the turn of the step that it concerns: the solver's ValueError with the step named; RuntimeError for any
        other failure, for a planner that died, and where no plan comes within ``timeout`` seconds or ``close`` is called.
        """
        packed = Packed.of(solver) if self._processes else None
        iteration = _Iteration(exchange=self._shared.begin() if self._shared is not None else None)
        self._iterations.append(iteration)
        self._crew.start()
        try:
            yield from self._plans(iteration, iter(windows), solver, packed)
        finally:
            iteration.end()
            self._iterations.remove(iteration)

    def close(self) -> None:
        """End planning processes and threads, at once and whatever they are at; iterating again starts new ones.

        An iteration that is under way, in this thread or another, ends with a RuntimeError.
        """
        _end(self._iterations, self._crew)

    def _plans(
        self, iteration: _Iteration, windows: Iterator[Window], solver: Solve, packed: Packed | None
    ) -> Iterator[tuple[StepPlan, float]]:
        steps, more, broken = iteration.steps, True, None
        while True:
            while more and len(steps) < self._steps:
                try:
                    window = next(windows, None)
                except Exception as error:  # raised in its turn: the plans before it are good
                    window, broken = None, error
                more = window is not None
                if window is not None:
                    steps.append(Step(window=window, solver=solver, packed=packed, exchange=iteration.exchange))
                    self._begin(steps[-1])
            if steps:
                outcome = self._await(iteration, steps[0])
                steps.popleft()
                yield outcome
            elif broken is not None:
                raise broken
            else:
                return

    def _begin(self, step: Step) -> None:
        if step.exchange is None or step.exchange.mine(step.window):
            self._crew.put(step)
        else:
            step.exchange.expect(step.window, step.settle)

    def _await(self, iteration: _Iteration, step: Step) -> tuple[StepPlan, float]:
        with contextlib.suppress(CancelledError):
            try:
                if not iteration.ended:
                    return step.future.result(self._timeout)
            except FutureTimeout:
                self.close()  # whatever is stuck serves no other iteration either
                raise RuntimeError(self._overdue(step)) from None
        raise RuntimeError(f"planning was closed before {name_of(step.window)} was planned")

    def _overdue(self, step: Step) -> str:
        told = f"{name_of(step.window)} was not planned within {self._timeout:g} s: "
        if step.exchange is not None and not step.exchange.mine(step.window):
            return told + (
                f"rank {step.exchange.owner(step.window)} should have planned it and is dead, stuck or paused; raise timeout= if "
                f"ranks may pause for so long"
            )
        where = f"its planning process (of {self._processes})" if self._processes else "the planning thread"
        return told + f"{where} is stuck or too slow; limit the solver, raise timeout=, or use more processes="


def _end(iterations: list[_Iteration], crew: Crew) -> None:
    if not crew.here:  # a worker that was forked may collect what it inherited
        return
    for iteration in list(iterations):
        iteration.end()
    crew.end()
