"""What planning is tested with: solvers that pickle, in a module without torch, so that planners stay without it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np
from equipoise.packing.packs import Packs, Spans
from equipoise.recipes import NAMED, Recipe
from equipoise.samplers.admission import Window
from equipoise.samplers.cluster import Cluster
from equipoise.samplers.order import key_of
from equipoise.samplers.plan import Rounds, SharedAttention, StepPlan


def cost(pairs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return 2e-6 * pairs + 2e-5 * tokens


@dataclass(frozen=True)
class Solve:
    """A recipe on a cluster, with a callable cost of this module."""

    recipe: Recipe
    cluster: Cluster

    def __call__(self, window: Window) -> StepPlan:
        return self.recipe.solve(window, self.cluster, cost)


GREEDY = Solve(NAMED["vrsp"], Cluster(dp=2, max_tokens_per_rank=64))


def window(lengths: list[int], step: int, epoch: int = 0) -> Window:
    tokens = np.array(lengths, np.int64)
    return Window(
        epoch=epoch,
        step=step,
        key=key_of(0, epoch, step),
        spans=Spans.whole(tokens, tokens * (tokens + 1) // 2),
        num_targets=int(tokens.sum()) if step % 2 else None,
        atom=np.arange(len(tokens)),
    )


def windows(num_steps: int, epoch: int = 0) -> Iterator[Window]:
    for step in range(num_steps):
        yield window([5 + step, 30, 3, 7, 60, 11 + epoch], step, epoch)


def content(plan: StepPlan) -> tuple:
    """All of a plan, for comparison bit by bit."""
    return (plan.digest, *(_plain(getattr(plan, field.name)) for field in fields(plan)))


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, Packs):
        return _plain(value.spans), _plain(value.offsets)
    if isinstance(value, Spans):
        return tuple(_plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Rounds | SharedAttention):
        return tuple(_plain(each) for each in astuple(value))
    return value


def heavy_modules(window: Window) -> StepPlan:
    """Tells which of the trainer's heavy modules a planner has imported, in its error."""
    heavy = {"torch", "datasets", "webdataset", "pyarrow", "transformers", "pytest", "hypothesis"}
    raise ValueError(f"loaded: {sorted(heavy & set(sys.modules))}, main: {sys.modules['__main__'].__name__}")


def refuses_step_3(window: Window) -> StepPlan:
    if window.step == 3:
        raise ValueError("slots=2 do not hold it")
    return GREEDY(window)


def breaks_at_step_3(window: Window) -> StepPlan:
    return GREEDY(window) if window.step != 3 else {}["no such key"]


def dies_at_step_3(window: Window) -> StepPlan:
    if window.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return GREEDY(window)


def hangs_at_step_3(window: Window) -> StepPlan:
    if window.step == 3:
        time.sleep(30)
    return GREEDY(window)


def holds_the_gil(window: Window) -> StepPlan:
    """Hangs as a solver in C may: no Python code of this process runs any more."""
    ctypes.PyDLL(None).sleep(60)
    return GREEDY(window)


@dataclass(frozen=True)
class Meet:
    """Steps 2k and 2k + 1 are solved only while the other is, too."""

    folder: Path

    def __call__(self, window: Window) -> StepPlan:
        (self.folder / str(window.step)).touch()
        deadline = time.monotonic() + 20
        while not (self.folder / str(window.step ^ 1)).exists():
            if time.monotonic() > deadline:
                raise ValueError("alone")
            time.sleep(0.005)
        return GREEDY(window)


@dataclass(frozen=True)
class Named:
    """Plans that tell who made them."""

    name: str

    def __call__(self, window: Window) -> StepPlan:
        from dataclasses import replace

        return replace(GREEDY(window), recipe=self.name)
