"""What planning a step costs, per recipe: 512 documents on 64 ranks, 64K documents on 4,096, and its growth between.

    python benchmarks/planning.py [--repeats 20]

Milliseconds from a window of lengths to a StepPlan (median, kernels compiled). Beside it in the same run: TRL's
best-fit packer (``pip install --no-deps trl``; packing only, nothing is placed) and a plain-Python Karmarkar-Karp over the
documents of the step, which also breaks the token cap.
"""

from __future__ import annotations

import argparse
import heapq
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from equipoise import BalancedBatchSampler, Lengths, recipe
from equipoise.recipes import NAMED

CAP = 8192  # tokens per rank


def lengths(count: int) -> Lengths:
    """Lognormal lengths, some of them beyond one rank."""
    rng = np.random.default_rng(0)
    return Lengths.from_array(np.clip(rng.lognormal(7.2, 1.3, count), 16, 4 * CAP).astype(np.int64))


def sampler(name: str, documents: int, ranks: int) -> BalancedBatchSampler:
    """Two steps' worth of documents on a mesh of ``ranks``, cp 4 where the recipe shards packs over a group."""
    cp = 1 if NAMED[name].shard == "whole" else 4
    return BalancedBatchSampler(
        lengths(2 * documents),
        recipe(name),
        max_tokens_per_rank=CAP,
        dp=ranks // cp,
        cp=cp,
        documents_per_step=documents,
        sync="slot",
    )


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call, the first one not counted."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * float(np.median(times))


def karmarkar_karp(costs: list[int], parts: int) -> list[list[int]]:
    """The differencing method as RL balancers carry it, in Python."""
    heap = [
        (-cost, at, [cost] + [0] * (parts - 1), [[at]] + [[] for _ in range(parts - 1)])
        for at, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, at, sums, sets = heapq.heappop(heap)
        _, _, others, other_sets = heapq.heappop(heap)
        merged = sorted(
            ((a + b, x + y) for a, b, x, y in zip(sums, reversed(others), sets, reversed(other_sets), strict=True)),
            key=lambda pair: -pair[0],
        )
        sums, sets = [total for total, _ in merged], [held for _, held in merged]
        heapq.heappush(heap, (-(sums[0] - sums[-1]), at, sums, sets))
    return heap[0][3]


def trl_packer(documents: int) -> Callable[[], object] | None:
    """TRL's packing of the same documents, on Arrow as TRL does it; None where TRL is not installed."""
    try:
        import pyarrow as pa
        from trl.data_utils import _pack_bfd
    except ImportError:
        return None
    tokens = lengths(documents).tokens
    table = pa.table({"input_ids": pa.array([np.zeros(n, np.int32) for n in tokens])})
    return lambda: _pack_bfd(table, 4 * CAP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    sizes = [(512, 64), (1024, 64), (4096, 256), (16384, 1024), (65536, 4096)]
    print("ms per step" + "".join(f"{f'{documents} on {ranks}':>16s}" for documents, ranks in sizes))
    for name in NAMED:
        row = []
        for documents, ranks in sizes:
            made = sampler(name, documents, ranks)
            row.append(median_ms(lambda made=made: made.plan(0), repeats if documents < 5000 else 3))  # type: ignore[misc]
        print(f"{name:11s}" + "".join(f"{value:16.2f}" for value in row))
    costs = (lengths(512).tokens ** 2 // 1000).tolist()
    print(f"Karmarkar-Karp in Python, 512 into 64: {median_ms(lambda: karmarkar_karp(costs, 64), 3):.1f} ms")
    packer = trl_packer(512)
    print(
        "TRL is not installed"
        if packer is None
        else f"TRL's packer, 512 documents: {median_ms(packer, repeats):.2f} ms"
    )
    code = "import time; a = time.perf_counter(); import numpy as np; from equipoise import plan; plan(np.arange(1, 500), 'wlb', dp=8, max_tokens_per_rank=4096); print(time.perf_counter() - a)"
    first = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"first plan in a new process, numba cache warm: {float(first.stdout):.2f} s")


if __name__ == "__main__":
    main()
