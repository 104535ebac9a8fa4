"""What the tables of `quality.py` share: the traces, their costs, and a table of max/mean by method, seed and step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

TRACES = Path(__file__).parents[2] / "shared" / "lengths"
CONTEXT = 131072


def split_at(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Lengths with longer ones split into pieces of `capacity` and a rest, in place."""
    tokens = tokens[tokens > 0].astype(np.int64)
    pieces = -(-tokens // capacity)
    split = np.full(pieces.sum(), capacity)
    split[np.cumsum(pieces) - 1] = tokens - (pieces - 1) * capacity
    return split


def prolong_like(count: int = 100_000) -> np.ndarray:
    rng = np.random.default_rng(0)
    short = np.exp(np.log(1000) + 1.2 * rng.standard_normal(count))
    share = 0.05 / 327_680 / (0.05 / 327_680 + 0.95 / short.mean())
    long = rng.uniform(131_072, 524_288, count)
    return np.clip(np.where(rng.random(count) < share, long, short), 16, 524_288).astype(np.int64)


def traces() -> dict[str, np.ndarray]:
    names = ("wlb_like", "mooncake_conversation", "wikipedia")
    found = {name: np.load(TRACES / f"{name}.npy") for name in names if (TRACES / f"{name}.npy").exists()}
    return {**found, "prolong_like": prolong_like()}


def quadratic(tokens: np.ndarray) -> np.ndarray:
    """WLB's cost, (d/48K)² + d/48K, in billionths."""
    x = tokens / 49152
    return np.rint((x * x + x) * 1e9).astype(np.int64)


class Table:
    """Values per seed and step under the name of each method, printed in one block."""

    def __init__(self, title: str, reach: str) -> None:
        print(f"\n{title}\n  reach: {reach}")
        self.values: dict[str, list[np.ndarray]] = {}
        self.notes: dict[str, list[tuple[float, ...]]] = {}

    def add(self, method: str, per_step: np.ndarray | list[float], *notes: float) -> None:
        self.values.setdefault(method, []).append(np.asarray(per_step, dtype=np.float64))
        self.notes.setdefault(method, []).append(notes)

    def show(self, note_names: tuple[str, ...] = (), reduce: tuple[Callable[..., float], ...] = ()) -> None:
        print(f"  {'':44s}    mean  worst seed  worst step" + "".join(f"{name:>14s}" for name in note_names))
        for method, seeds in self.values.items():
            means = [seed.mean() for seed in seeds if len(seed)]
            line = f"  {method:44s}{np.mean(means):8.4f}{max(means):12.4f}{max(s.max() for s in seeds if len(s)):12.3f}"
            for column, how in enumerate(reduce):
                at = [note[column] for note in self.notes[method] if len(note) > column]
                line += f"{how(at):14.3f}" if at else " " * 14
            print(line, flush=True)
