"""Solver: what makes a step's plan of its documents, as whoever plans is handed it.

A ``Planner`` decides where and when that happens, never what comes of it: here, in turn (``in_turn``); ahead of training, in
threads or processes (``loaders/planning.py``); as a stream's documents arrive (``loaders/stream_feed.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .admission import Window
from .cluster import Cluster
from .plan import StepPlan

if TYPE_CHECKING:
    from ..recipes import Recipe
    from .solve import Cost


@dataclass(frozen=True, kw_only=True)
class Solver:
    """A pure function that any process can run; it pickles small."""

    recipe: Recipe
    cluster: Cluster
    cost: Cost
    order: str

    def __call__(self, window: Window) -> StepPlan:
        """Pack and place one step. Raises ValueError where fixed slots cannot hold it."""
        return self.recipe.solve(window, self.cluster, self.cost, order=self.order)


Planner = Callable[[Iterable[Window], Solver], Iterator[tuple[StepPlan, float]]]


def in_turn(windows: Iterable[Window], solver: Solver) -> Iterator[tuple[StepPlan, float]]:
    """Plans one after the other, each when it is asked for, with the seconds it took."""
    for window in windows:
        begin = time.perf_counter()
        plan = solver(window)
        yield plan, time.perf_counter() - begin
