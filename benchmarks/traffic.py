"""What each layout costs in KV rows, passed round a ring or sent straight from home, beside balance and planning time.

    python benchmarks/traffic.py [--cp 4 8 16] [--packs 10] [--trace wlb_like]

128K packs (shuffled documents end to end, cut at the packs' edges), causal within documents. Rows received are a share of
the full ring's, which are (cp-1) x tokens in all and (cp-1)/cp x tokens a rank: those of all ranks together, and those of
the rank that receives most; means over packs. A KV gather receives what direct sends do, in one stage. Planning is one
rank's plan. Kernel calls are varlen calls of the rank with most, forward, over all stages, in the first packs. Times and
calls are medians. Traces are read from ../shared/lengths where they are; else a law like wlb_like's is drawn.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from equipoise import CostModel, Hardware, Spans, recipe
from equipoise.attention.gather import gather_plan
from equipoise.attention.kernels import cuda
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.program import lower
from equipoise.attention.ring import ring_plan
from equipoise.packing.cost import SEVEN_B, causal_pairs
from equipoise.packing.shards import Shards, striped
from equipoise.samplers.cluster import Cluster
from equipoise.shard_attend import PLANS

LENGTHS = Path(__file__).parents[2] / "shared" / "lengths"
CONTEXT = 131072
SLACK = 1.1  # of an even share, where ranks may hold uneven numbers of tokens
COUNTED = 5  # packs in which kernel calls are counted
CPU = torch.device("cpu")
LAYOUTS = ("contiguous", "zigzag_sequence", "zigzag", "striped 256", "adaptive", "mixed", "dacp")


def lengths_of(trace: str) -> np.ndarray:
    path = LENGTHS / f"{trace}.npy"
    if path.exists():
        tokens = np.load(path).astype(np.int64)
        return tokens[tokens > 0]
    rng = np.random.default_rng(0)
    return np.where(rng.random(100_000) < 0.012, rng.integers(6450, 124_914, 100_000), rng.integers(16, 6450, 100_000))


def packs(trace: str, number: int) -> list[np.ndarray]:
    """Boundaries of packs."""
    cu = np.concatenate([[0], np.cumsum(np.random.default_rng(0).permutation(lengths_of(trace)))])
    edges = np.arange(min(number, cu[-1] // CONTEXT) + 1) * CONTEXT
    return [np.unique(np.clip(cu, a, b)) - a for a, b in pairwise(edges)]


def cut(layout: str, cu: np.ndarray, cp: int) -> Shards:
    """A pack cut as a recipe would have it."""
    if layout.startswith("striped"):
        return striped(cu, cp, stripe=int(layout.split()[1]))
    chosen, length = recipe("skrull" if layout == "dacp" else "wlb", shard=layout), np.diff(cu)
    cluster = Cluster(dp=1, cp=cp, max_tokens_per_rank=int(SLACK * CONTEXT / cp))
    cost = CostModel.of(SEVEN_B, Hardware(peak_flops=400e12, efficiency=1.0))
    decision = chosen.decide(Spans.whole(length, causal_pairs(0, length)), cp, cluster, cost)
    return chosen.shards(cu, cp, decision, cluster.max_tokens_per_rank)


def shares(plan: AttentionPlan) -> tuple[float, float]:
    """Rows received as a share of the full ring's: of all ranks, and of the one that receives most."""
    rows, P = plan.loads().rows_received, len(plan.ranks)
    return rows.sum() / ((P - 1) * plan.tokens), rows.max() / ((P - 1) / P * plan.tokens)


def calls(plan: AttentionPlan) -> int:
    """Varlen calls of the forward of the rank with most, counted without a GPU."""
    most = 0
    for rank in range(len(plan.ranks)):
        program = lower(plan, rank)
        handles = [
            cuda.prepare(tiles, program.tokens, program.buffer_rows[buffer], CPU, engine=cuda.TorchVarlen())
            for stage in program.stages
            for _, buffer, tiles in stage.tiles
        ]
        most = max(most, sum(len(handle.calls) for handle in handles))
    return most


def measure(layout: str, pack: list[np.ndarray], cp: int) -> str:
    """A line of the table."""
    ranks, even, traffic, times, most = tuple(range(cp)), [], [], [], []
    for at, cu in enumerate(pack):
        shards = cut(layout, cu, cp)
        plans, spent = {}, []
        for name in PLANS:
            begin = time.perf_counter()
            plans[name] = recipe("static", attend=name).attention(shards, ranks, 0)
            spent.append(1e3 * (time.perf_counter() - begin))
        even.append(shards.pairs().max() * cp / shards.pairs().sum())
        traffic.append([*shares(plans["ring"]), *shares(plans["direct"])])
        times.append(spent)
        if at < COUNTED:
            whole = {"ring": ring_plan(shards, ranks), "gather": gather_plan(shards, ranks)}
            most.append([calls(plan) for plan in whole.values()])
    return (
        f"  {layout:16}{np.mean(even):9.4f}{np.max(even):9.4f}"
        + "".join(f"{share:9.1%}" for share in np.mean(traffic, axis=0))
        + "".join(f"{value:8.2f}" for value in np.median(times, axis=0))
        + "".join(f"{value:8.0f}" for value in np.median(most, axis=0))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", nargs="*", type=int, default=[8])
    parser.add_argument("--packs", type=int, default=100)
    parser.add_argument("--trace", default="wlb_like")
    options = parser.parse_args()
    pack = packs(options.trace, options.packs)
    for layout in LAYOUTS:
        measure(layout, pack[:1], 2)  # compiled
    for cp in options.cp:
        print(f"\n{options.trace}, {len(pack)} packs of {CONTEXT} tokens, cp {cp}")
        print(f"{'pairs max/mean':>36}{'rows, ring':>18}{'rows, direct':>18}{'planning ms':>24}{'kernel calls':>16}")
        names = ("mean", "worst", *("sum", "largest") * 2)
        print(" " * 18 + "".join(f"{n:>9}" for n in names) + "".join(f"{n:>8}" for n in (*PLANS, "ring", "gather")))
        for layout in LAYOUTS:
            print(measure(layout, pack, cp), flush=True)


if __name__ == "__main__":
    main()
