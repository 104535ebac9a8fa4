"""How long packing takes, beside something everybody knows the time of.

    python benchmarks/packing.py [lengths.npy]

Measured in turns in one process, medians; the machine may be shared, so ratios count. Exact best-fit-decreasing (packs
as CSR) of a million documents into 128K packs stands beside numpy's default sort of the same array; the packers of one
step stand alone. Without a file, and without `../shared/lengths`, Megatron's length law is drawn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from equipoise import Lengths
from equipoise.packing.assign import best_fit_decreasing, lpt
from equipoise.packing.cost import causal_pairs
from equipoise.packing.shards import zigzag
from equipoise.packing.wlb import wlb

CAPACITY = 131072
TRACE = Path(__file__).parents[2] / "shared" / "lengths" / "wikipedia.npy"


def split_at(tokens: np.ndarray, capacity: int) -> np.ndarray:
    """Lengths, int64[n], with longer ones split into pieces of `capacity` and a rest, in place."""
    tokens = tokens.astype(np.int64)
    pieces = np.maximum(-(-tokens // capacity), 1)
    split = np.full(pieces.sum(), capacity)
    split[np.cumsum(pieces) - 1] = tokens - (pieces - 1) * capacity
    return split


def packs_by_brute_force(tokens: np.ndarray, capacity: int) -> list[list[int]]:
    """Best-fit-decreasing as it is defined; among packs of equal room the one filled last."""
    packs: list[list[int]] = []
    state: list[tuple[int, int]] = []
    for now, item in enumerate(np.argsort(-tokens, kind="stable").tolist()):
        length = int(tokens[item])
        room, _, best = min((room, -at, p) for p, (room, at) in enumerate([*state, (capacity, -1)]) if room >= length)
        if best == len(packs):
            packs.append([])
            state.append((capacity, now))
        packs[best].append(item)
        state[best] = (room - length, now)
    return packs


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each call, measured in turns so that a slow moment of the machine hits all alike."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            spent[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in spent.items()}


def verify(tokens: np.ndarray) -> str:
    """The packs of a few documents, by both ways of sorting, equal those of brute force."""
    for count, capacity in ((3000, CAPACITY), (200, CAPACITY), (2000, 4 * int(tokens[:2000].max()))):
        order, offsets = best_fit_decreasing(tokens[:count], capacity)
        packs = [order[a:b].tolist() for a, b in pairwise(offsets)]
        if packs != packs_by_brute_force(tokens[:count], capacity):
            raise SystemExit(f"{count} documents into packs of {capacity}: not what brute force gives")
    return "as by brute force on 3000, 200 and 2000 documents"


def million(lengths: Lengths) -> None:
    tokens = split_at(np.asarray(lengths.tokens), CAPACITY)
    packs = len(best_fit_decreasing(tokens, CAPACITY)[1]) - 1
    took = medians(
        {"sort": lambda: np.argsort(tokens), "pack": lambda: best_fit_decreasing(tokens, CAPACITY)}, rounds=21
    )
    fewest = -(-int(tokens.sum()) // CAPACITY)
    print(
        f"{len(tokens):,} documents of {lengths.source} into packs of {CAPACITY}: {packs:,} packs, at least {fewest:,}"
    )
    print(f"  best-fit-decreasing {took['pack'] * 1e3:6.2f} ms   np.argsort {took['sort'] * 1e3:6.2f} ms")
    print(f"  ratio {took['pack'] / took['sort']:.2f} (at most 1 wanted); packs {verify(tokens)}")


def one_step(lengths: Lengths) -> None:
    """The packers of one step of 512 documents, and the shards of one pack of thousands."""
    tokens = split_at(np.asarray(lengths.tokens[:512]), CAPACITY)[:512]
    cost = causal_pairs(0, tokens) + 8192 * tokens
    many = np.concatenate([[0], np.cumsum(lengths.tokens[:4000], dtype=np.int64)])
    calls: dict[str, Callable[[], object]] = {
        "best-fit-decreasing, 512 documents": lambda: best_fit_decreasing(tokens, CAPACITY),
        "wlb, 512 documents, 16 packs": lambda: wlb(tokens, cost, 16, 2 * CAPACITY),
        "lpt, 512 documents, 16 bins": lambda: lpt(cost, tokens, 16, 2 * CAPACITY),
        "zigzag per document, 4000 documents, cp 8": lambda: zigzag(many, 8),
        "zigzag per sequence, 4000 documents, cp 8": lambda: zigzag(many, 8, per="sequence"),
    }
    for name, seconds in medians(calls, rounds=201).items():
        print(f"  {name:42s} {seconds * 1e6:8.1f} µs")


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE
    lengths = Lengths.from_npy(path) if path.exists() or len(sys.argv) > 1 else None
    if lengths is None:
        law = {"mode": "distribution", "type": "lognormal", "format": "thd", "min_seq_len": 128, "max_seq_len": 8192}
        lengths = Lengths.from_law({**law, "mean_seq_len": 1024, "lognormal_sigma": 1.5}, 1_000_000)
    million(lengths)
    one_step(lengths)


if __name__ == "__main__":
    main()
