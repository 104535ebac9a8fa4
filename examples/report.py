"""What the example prints and draws: one table of both recipes, and a timeline of the ranks over one step of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class Run:
    """Figures of one training run over all ranks; per step an array [ranks, slots] of seconds."""

    recipe: str
    predicted: list[np.ndarray]
    measured: list[np.ndarray]  # each rank's thread CPU seconds in forward and backward
    wall_seconds: float
    tokens: int
    fillers: int
    planning_seconds: list[float]
    bytes_sent: float  # attention, per rank and step
    loss: float


def waiting(seconds: list[np.ndarray], per: str) -> float:
    """Slowest rank over the mean, where ranks wait: slot by slot, or step by step."""
    if per == "step":
        seconds = [step.sum(1, keepdims=True) for step in seconds]
    return float(sum(step.max(0).sum() for step in seconds) / sum(step.mean(0).sum() for step in seconds))


def makespan(seconds: list[np.ndarray], sync: str) -> float:
    """Seconds of the run if each rank had a core of its own and waited only for the others."""
    return float(sum(step.max(0).sum() if sync == "slot" else step.sum(1).max() for step in seconds))


def idle(run: Run, sync: str) -> np.ndarray:
    """Share of the run that each rank waits, float64[ranks]."""
    busy = sum(step.sum(1) for step in run.measured)
    return 1 - busy / makespan(run.measured, sync)


def table(runs: list[Run], title: str, sync: str) -> None:
    """One row per figure, one column per recipe, and the gain in the last."""
    view = Table(title=title)
    view.add_column("")
    for run in runs:
        view.add_column(run.recipe, justify="right")
    view.add_column("gain", justify="right")
    for per in ("slot", "step"):
        for kind in ("predicted", "measured"):
            values = [waiting(getattr(run, kind), per) for run in runs]
            view.add_row(f"max/mean per {per}, {kind}", *(f"{value:.3f}" for value in values), "")
    spans = [idle(run, sync) for run in runs]
    view.add_row(
        "idle share of a rank", *(f"{each.mean():.0%} ({each.min():.0%}–{each.max():.0%})" for each in spans), ""
    )
    for name, seconds in (
        ("tokens/s predicted, a core each", [makespan(run.predicted, sync) for run in runs]),
        ("tokens/s measured, a core each", [makespan(run.measured, sync) for run in runs]),
        ("tokens/s by the clock", [run.wall_seconds for run in runs]),
    ):
        speeds = [run.tokens / value for run, value in zip(runs, seconds, strict=True)]
        view.add_row(name, *(f"{speed:,.0f}" for speed in speeds), f"{speeds[-1] / speeds[0]:.2f} x")
    # Outlier queues hold documents back for a step or more: the two runs then train on not quite the same ones.
    view.add_row("tokens", *(f"{run.tokens:,}" for run in runs), "")
    view.add_row("padding (filler tokens)", *(f"{run.fillers / run.tokens:.2%}" for run in runs), "")
    view.add_row("planning a step", *(f"{1e3 * np.median(run.planning_seconds):.2f} ms" for run in runs), "")
    view.add_row("attention sends, MB per rank and step", *(f"{run.bytes_sent / 1e6:.1f}" for run in runs), "")
    view.add_row("loss of the last step", *(f"{run.loss:.4f}" for run in runs), "")
    Console(width=110).print(view)


def timeline(runs: list[Run], sync: str, path: Path) -> None:
    """A PNG: the ranks over the last step of each run, work coloured by slot, waiting in grey."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(runs), 1, figsize=(11, 2.6 * len(runs)), sharex=True, layout="constrained")
    longest = max(makespan([run.measured[-1]], sync) for run in runs)
    for axis, run in zip(np.atleast_1d(axes), runs, strict=True):
        step = run.measured[-1]
        num_ranks, num_slots = step.shape
        begin = np.zeros(num_ranks)
        for slot in range(num_slots):
            if sync == "slot":
                begin[:] = begin.max()
            axis.barh(
                range(num_ranks),
                step[:, slot],
                left=begin,
                color=plt.cm.viridis(0.25 + 0.6 * (slot % 2)),
                edgecolor="white",
            )
            begin += step[:, slot]
            end = begin.max() if sync == "slot" or slot == num_slots - 1 else begin
            axis.barh(range(num_ranks), end - begin, left=begin, color="lightgrey", hatch="///", edgecolor="white")
        share = 1 - step.sum() / (num_ranks * makespan([step], sync))
        axis.set_title(
            f"{run.recipe}: {makespan([step], sync):.1f} s, of which a rank waits {share:.0%} (hatched)", loc="left"
        )
        axis.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
        axis.invert_yaxis()
        axis.set_xlim(0, longest * 1.02)
    axes_list = np.atleast_1d(axes)
    axes_list[-1].set_xlabel(f"seconds of one optimizer step (each rank's CPU time; ranks meet at every {sync})")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
