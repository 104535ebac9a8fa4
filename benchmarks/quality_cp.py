"""How good the placements on groups of ranks and the shards are, beside what is published.

    python benchmarks/quality_cp.py [dynamic_cp] [flexsp] [sharding] [--seeds 10] [--seconds 10]

Each published rule is written out here as its authors have it, runs on the same documents as ours, and stands in the
same line with the lower bound and the value that was to be reached. Means over seeds, and the worst seed. Traces are
read from ../shared/lengths where they are; Megatron's length law needs none.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
from equipoise import Lengths
from equipoise.packing.best_fit import best_fit_decreasing
from equipoise.packing.cost import causal_pairs
from equipoise.packing.efficiency import kernel_seconds
from equipoise.packing.mixed import mixed
from equipoise.packing.sharding_choice import ShardCost, adaptive, received_rows
from equipoise.packing.shards import Shards, from_pieces, zigzag
from equipoise.samplers.dynamic_cp import DynamicCp, dynamic_cp
from equipoise.samplers.flexsp import FlexSp, SpModel, flexsp
from equipoise.samplers.rank_groups import Placement, loads

LENGTHS = Path(__file__).parents[2] / "shared" / "lengths"
LAW = {
    "mode": "distribution", "type": "lognormal", "format": "thd", "min_seq_len": 128, "max_seq_len": 8192,
    "mean_seq_len": 1024, "lognormal_sigma": 1.5,
}  # fmt: skip
STEPS = 20


# Dynamic CP


def next_micro_batch(documents: list[int], length: np.ndarray, ranks: int, budget: int) -> tuple[list, list[int]]:
    """Megatron-LM dev `next_hdp_group_packing_aware`: ([documents, size] of each group, what is left).

    `documents` by falling length. Work is L² / size; a rank's may reach 1.05 x longest x budget.
    """
    need = {d: 1 << max(int(np.ceil(np.log2(length[d] / budget))), 0) for d in documents}
    first = documents[0]
    most, groups, left, free = 1.05 * length[first] * budget, [[[first], need[first]]], [], ranks - need[first]

    def work(group: list) -> float:
        return sum(float(length[d]) ** 2 for d in group[0]) / group[1]

    for d in documents[1:]:
        best = None
        size = need[d]
        while size <= ranks:
            added = float(length[d]) ** 2 / size
            others = max(map(work, groups))
            for group in (g for g in groups if g[1] == size):
                fits = sum(length[m] for m in group[0]) + length[d] <= budget * size
                reached = max(others, work(group) + added)
                if fits and reached <= most and (best is None or reached < best[0]):
                    best = (reached, group, size)
            if free >= size:
                reached = max(others, added)
                if reached <= most and (best is None or reached < best[0]):
                    best = (reached, None, size)
            size *= 2
        if best is None:
            left.append(d)
        elif best[1] is None:
            groups.append([[d], best[2]])
            free -= best[2]
        else:
            best[1][0].append(d)
    while free > 0:  # double the first of the smallest groups until no rank is empty
        smallest = min(groups, key=lambda g: g[1])
        grown = min(2 * smallest[1], ranks, smallest[1] + free)
        free -= grown - smallest[1]
        smallest[1] = grown
    return groups, left


def megatron(length: np.ndarray, cost: np.ndarray, ranks: int, budget: int) -> tuple[float, float]:
    """(Sum of the micro-batches' slowest ranks over the ideal, received rows per token) of Megatron's generation 2."""
    left, slowest, rows = np.argsort(-length, kind="stable").tolist(), 0.0, 0
    while left:
        groups, left = next_micro_batch(left, length, ranks, budget)
        slowest += max(cost[members].sum() / size for members, size in groups)
        rows += sum(int(length[members].sum()) * (size - 1) for members, size in groups)
    return slowest * ranks / cost.sum(), rows / length.sum()


def measured(
    plan: Placement, length: np.ndarray, cost: np.ndarray, options: DynamicCp, ranks: int
) -> tuple[float, float]:
    """The same of a plan of ours."""
    slowest = loads(plan, cost, length, options.rules(ranks, 2048)).max(0).sum()
    size = np.repeat(plan.cp_size, np.diff(plan.offsets))
    return slowest * ranks / cost.sum(), (length[plan.order] * (size - 1)).sum() / length.sum()


def dynamic_cp_quality(seeds: int) -> None:
    """Megatron's law, 2048 tokens a rank, cost L² + 8192L."""
    print(f"dynamic CP: slowest rank over ideal, all slots (received rows per token); {seeds} x {STEPS} steps, worst")
    names = ("Megatron gen 2", "ours, any size", "powers of two")
    print(f"  {'ranks / documents':20}" + "".join(f"{name:>22}" for name in names) + f"{'to reach':>26}{'ms':>12}")
    reach = {
        (8, 16): "1.08 (2.0) / 1.06 (3.3)",
        (16, 32): "1.09 (2.4) / 1.08 (3.7)",
        (64, 128): "1.10 (2.2) / 1.10 (3.9)",
    }
    for ranks, documents in ((8, 16), (16, 32), (64, 128), (8, 128), (64, 512)):
        table: dict[str, list[list[tuple[float, float]]]] = {"megatron": [], "any": [], "powers": []}
        spent = []
        for seed in range(seeds):
            rows: dict[str, list[tuple[float, float]]] = {name: [] for name in table}
            for step in range(STEPS):
                tokens = Lengths.from_law(LAW, documents, seed * STEPS + step).tokens.astype(np.int64)
                cost = tokens * tokens + 8192 * tokens
                rows["megatron"].append(megatron(tokens, cost, ranks, 2048))
                for degrees in ("any", "powers"):
                    options = DynamicCp(degrees=degrees)
                    begin = time.perf_counter()
                    plan = dynamic_cp(tokens, cost, num_ranks=ranks, cap=2048, options=options)
                    spent.append(time.perf_counter() - begin)
                    rows[degrees].append(measured(plan, tokens, cost, options, ranks))
            for name in table:
                table[name].append(rows[name])
        cells = []
        for values in table.values():
            array = np.array(values)
            cells.append(f"{array[..., 0].mean():.3f} ({array[..., 1].mean():.1f}) ≤ {array[..., 0].mean(1).max():.3f}")
        print(
            f"  {f'{ranks} / {documents}':20}{cells[0]:>22}{cells[1]:>22}{cells[2]:>22}"
            f"{reach.get((ranks, documents), 'bound 1.0'):>26}{np.median(spent) * 1e3:12.2f}"
        )


# FlexSP


def homogeneous(tokens: np.ndarray, options: FlexSp, ranks: int, cap: int) -> float:
    """Nanoseconds of the best single degree: groups filled by best fit to 0.9 of their capacity, run in waves by time.

    FlexSP's stronger baseline, which adapts its degree to every batch.
    """
    rules, work = options.rules(ranks, cap), options.model.work(tokens)
    best = np.inf
    for degree in rules.sizes.tolist():
        if tokens.max() > degree * cap:
            continue
        order, offsets = best_fit_decreasing(tokens, max(int(0.9 * degree * cap), int(tokens.max())))
        each = [
            (work[order[a:b]].sum() + rules.token_units[degree] * tokens[order[a:b]].sum()) / degree
            for a, b in pairwise(offsets)
        ]
        waves = np.sort(each)[::-1][:: ranks // degree]
        best = min(best, waves.sum() + len(waves) * options.model.fixed * 1e6)
    return best


def flexsp_quality(seeds: int, seconds: float) -> None:
    """GPT-7B on 64 A100, 40 GB, 512 sequences a step; then the greedy against the MILP."""
    model, ranks = SpModel.preset("gpt-7b"), 64
    cap, options = model.cap(ranks, 40), FlexSp(model=model)
    print(
        f"FlexSP, GPT-7B, {ranks} ranks x {cap} tokens: time over the mean of the ranks' compute; {seeds} seeds, worst"
    )
    print(f"  {'trace':24}{'one degree':>18}{'ours':>18}{'ms':>10}")
    for name in ("wikipedia", "wlb_like", "mooncake_conversation"):
        trace = np.load(LENGTHS / f"{name}.npy").astype(np.int64)
        trace = trace[trace <= min(383_872, ranks * cap)]
        theirs, ours, spent = [], [], []
        for seed in range(seeds):
            tokens = np.random.default_rng(seed).choice(trace, 512 if name == "wikipedia" else 128)
            begin = time.perf_counter()
            plan = flexsp(tokens, num_ranks=ranks, cap=cap, options=options)
            spent.append(time.perf_counter() - begin)
            load = loads(plan, model.work(tokens), tokens, options.rules(ranks, cap))
            mean = model.work(tokens).sum() / ranks
            ours.append((load.max(0).sum() + load.shape[1] * model.fixed * 1e6) / mean)
            theirs.append(homogeneous(tokens, options, ranks, cap) / mean)
        cells = [f"{np.mean(values):.3f} ≤ {np.max(values):.3f}" for values in (theirs, ours)]
        print(f"  {name:24}{cells[0]:>18}{cells[1]:>18}{np.median(spent) * 1e3:10.2f}")
    print(f"  greedy over MILP, {seconds:g} s a slot (at most 1.03 wanted)")
    for solver, package in (("scip", "pyscipopt"), ("highs", "highspy")):
        if find_spec(package) is None:
            print(f"    {package} is not installed")
            continue
        for small_ranks, count, number in ((16, 12, seeds), (32, 24, 4), (64, 512, 2)):
            gaps = [gap(number_of, small_ranks, count, solver, seconds) for number_of in range(number)]
            print(
                f"    {solver:6} {count:4} sequences on {small_ranks:2} ranks: "
                f"mean {np.mean(gaps):.4f}, worst {np.max(gaps):.4f}"
            )


def gap(seed: int, ranks: int, count: int, solver: str, seconds: float) -> float:
    """Time of the greedy over that of the MILP, one slot."""
    model = SpModel.preset("gpt-7b")
    name = "wikipedia" if count > 100 else "mooncake_conversation"
    trace, cap = np.load(LENGTHS / f"{name}.npy").astype(np.int64), model.cap(ranks, 60)
    tokens = np.random.default_rng(seed).choice(trace[trace <= ranks * cap // 2], count)
    tokens = tokens[np.cumsum(tokens) <= 0.9 * ranks * cap]
    times = []
    for which in ("greedy", solver):
        options = FlexSp(model=model, solver=which, seconds=seconds, more_slots=0)
        plan = flexsp(tokens, num_ranks=ranks, cap=cap, options=options, slots=1)
        times.append(loads(plan, model.work(tokens), tokens, options.rules(ranks, cap)).max() + model.fixed * 1e6)
    return float(times[0] / times[1])


# Shards inside a CP group

LAYER = 4 * 64 * 128  # FLOPs of a pair: 64 heads of dim 128
ROW = 2 * 2 * 4 * 128  # bytes of a token's keys and values: 4 KV heads in bf16
INFINIBAND = 50e9


def min_heap(chunk: int) -> Callable[[np.ndarray, int], Shards]:
    """MagiAttention's default: chunks by falling area, each to the least rank that holds fewer than its even number."""

    def rule(cu: np.ndarray, cp: int) -> Shards:
        cuts = np.union1d(cu, np.arange(0, cu[-1], chunk))
        start, stop = cuts[:-1], cuts[1:]
        document, number = np.searchsorted(cu, start, side="right") - 1, start // chunk
        area = np.bincount(number, weights=causal_pairs(start - cu[document], stop - cu[document]))
        rank, load, held = np.empty(len(area), np.int64), np.zeros(cp), np.zeros(cp, np.int64)
        for c in np.argsort(-area, kind="stable"):
            open_ranks = np.flatnonzero(held < -(-len(area) // cp))
            rank[c] = open_ranks[load[open_ranks].argmin()]
            load[rank[c]] += area[c]
            held[rank[c]] += 1
        return from_pieces(cu, cp, start, stop, document, rank[number])

    return rule


def measured_kernels() -> Callable:
    """Kernel seconds from the measured table where it is at hand (it knows 16K and 32K tokens), else the package's."""
    path = LENGTHS / "h100_attention_timing.psv"
    if not path.exists():
        return kernel_seconds
    lengths = [32 << k for k in range(11)]
    table = np.empty((11, 4))
    with path.open(newline="") as file:
        for row in csv.DictReader(file, delimiter="|"):
            length = int(row["total_len"]) // int(row["batch_size"])
            if row["tp"] == "1" and length in lengths:
                cut = int(np.log2(int(row["cp"])))
                flops = causal_pairs(0, length) * LAYER / int(row["cp"])
                table[lengths.index(length), cut] = flops / (float(row["latency(ms)"]) / 1e3)

    def seconds(pairs: np.ndarray, rows: np.ndarray, keys: np.ndarray, flops_per_pair: float) -> np.ndarray:
        rows, keys = np.broadcast_arrays(np.asarray(rows, float), np.asarray(keys, float))
        at, cut = np.clip(np.log2(keys) - 5, 0, 10), np.clip(np.log2(keys / rows), 0, 3)
        low, left = np.minimum(at.astype(int), 9), np.minimum(cut.astype(int), 2)
        a, c = at - low, cut - left
        speed = (1 - a) * ((1 - c) * table[low, left] + c * table[low, left + 1])
        speed = speed + a * ((1 - c) * table[low + 1, left] + c * table[low + 1, left + 1])
        return np.asarray(pairs) * flops_per_pair / speed

    return seconds


def real_packs(name: str, seed: int, number: int, capacity: int = 131072) -> Iterator[np.ndarray]:
    """Boundaries of best-fit packs of a shuffled trace, windows of eight packs."""
    trace = np.load(LENGTHS / f"{name}.npy").astype(np.int64)
    tokens = np.minimum(np.random.default_rng(seed).permutation(trace[trace > 0]), capacity)
    first = 0
    while number > 0:
        last = first + int(np.searchsorted(np.cumsum(tokens[first:]), 8 * capacity))
        order, offsets = best_fit_decreasing(tokens[first:last], capacity)
        for a, b in list(pairwise(offsets))[:-1][:number]:
            yield np.concatenate([[0], np.cumsum(tokens[first:last][order[a:b]])])
            number -= 1
        first = last


def sharding_quality(seeds: int) -> None:
    """128K packs over 16 ranks on InfiniBand, transfers hidden up to the kernels."""
    kernel = measured_kernels()
    cost = ShardCost(flops_per_pair=LAYER, row_seconds=ROW / INFINIBAND, kernel=kernel)
    rules: dict[str, Callable[[np.ndarray, int], Shards]] = {
        "per document": zigzag,
        "adaptive": lambda cu, cp: adaptive(cu, cp, cost),
        "min-heap 512": min_heap(512),
        "min-heap 2048": min_heap(2048),
        "mixed, cap 1.0": lambda cu, cp: mixed(cu, cp, cost, slack=1.0),
        "mixed, cap 1.1": lambda cu, cp: mixed(cu, cp, cost),
    }
    reach = {"wlb_like": "1.026 / 1.009", "mooncake_conversation": "1.024 / 1.009", "wikipedia": "1.024 / 1.010"}
    print(
        "shards, cp 16: slowest rank over an even share of whole documents (rows received / ring); "
        f"{seeds} x 10 packs, worst seed"
    )
    print(f"  {'trace':23}" + "".join(f"{name:>23}" for name in rules) + f"{'to reach':>16}{'µs':>8}")
    for name, wanted in reach.items():
        cells, spent = [], []
        for label, rule in rules.items():
            means, shares = [], []
            for seed in range(seeds):
                ratios = []
                for cu in real_packs(name, seed, 10):
                    length = np.diff(cu)
                    begin = time.perf_counter()
                    shards = rule(cu, 16)
                    if label.endswith("1.1"):
                        spent.append(time.perf_counter() - begin)
                    even = kernel(causal_pairs(0, length), length, length, LAYER).sum() / 16
                    ratios.append(cost.seconds(shards).max() / even)
                    shares.append(received_rows(shards).sum() / (15 * cu[-1]))
                means.append(np.mean(ratios))
            cells.append(f"{np.mean(means):.3f} ({np.mean(shares):.2f}) ≤ {np.max(means):.3f}")
        print(f"  {name:23}" + "".join(f"{cell:>23}" for cell in cells) + f"{wanted:>16}{np.median(spent) * 1e6:8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["dynamic_cp", "flexsp", "sharding"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of the MILPs")
    options = parser.parse_args()
    if "dynamic_cp" in options.what:
        dynamic_cp_quality(options.seeds)
    for name, run in (
        ("flexsp", lambda: flexsp_quality(options.seeds, options.seconds)),
        ("sharding", lambda: sharding_quality(options.seeds)),
    ):
        if name in options.what and LENGTHS.is_dir():
            run()
        elif name in options.what:
            print(f"{name}: no traces in {LENGTHS}")


if __name__ == "__main__":
    main()
