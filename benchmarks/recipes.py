"""Simulated seconds per token of every recipe beside ``static``, on real length traces.

    python benchmarks/recipes.py [--lengths ../shared/lengths] [--steps 20] [--ranks 32]

A dense 7B model on H100s (kernel-efficiency table by document length, KV traffic hidden as far as it fits), 512 documents
a step, both ways of waiting; steps from the 20th on, when outlier queues have filled. ``azure_code`` is the control: short
and regular, so balancing must cost nothing there. `wlb` stands there without queues
too, placed by cost and in order. ChunkFlow shards no pack, so it runs at cp 1, and takes documents
whole that the others split. The last column is the
plan's makespan over its lower bound, by the cost model that planned.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from equipoise import BalancedBatchSampler, Lengths, recipe
from equipoise.packing.cost import SEVEN_B
from equipoise.packing.queues import WlbQueues
from equipoise.recipes import NAMED

# Trace: (tokens of a pack, cp).
TRACES = {
    "azure_code": (8192, 1),
    "mooncake_conversation": (131072, 4),
    "wlb_like": (131072, 4),
    "wikipedia": (131072, 4),
}
FILLED = 20
NO_QUEUES = WlbQueues(max_delay=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, default=Path(__file__).parent.parent.parent / "shared" / "lengths")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=32)
    options = parser.parse_args()
    for trace, (pack, cp) in TRACES.items():
        lengths = Lengths.from_npy(options.lengths / f"{trace}.npy")
        for sync in ("step", "slot"):
            print(f"\n{trace}, packs of {pack} tokens, cp {cp}, ranks wait per {sync}: seconds per token over static's")
            table(lengths, pack, cp, sync, options)


def table(lengths: Lengths, pack: int, cp: int, sync: str, options: argparse.Namespace) -> None:
    """One line per recipe."""
    static = 0.0
    rows = {**NAMED, "wlb, no queues": recipe("wlb", options=NO_QUEUES)}
    rows["the same in order"] = recipe("wlb", place="in_order", options=NO_QUEUES)
    for name, named in rows.items():
        whole = named.shard == "whole"
        sampler = BalancedBatchSampler(
            lengths,
            named,
            max_tokens_per_rank=pack if whole else pack // cp,
            dp=options.ranks // (1 if whole else cp),
            cp=1 if whole else cp,
            documents_per_step=512,
            sync=sync,
            too_long="split",
        )
        first = FILLED if sampler.steps_per_epoch > 2 * FILLED else 0  # a short epoch is taken whole
        last = min(first + options.steps, sampler.steps_per_epoch) if first else sampler.steps_per_epoch
        plans = [sampler.plan(step) for step in range(first, last)]
        traffic = "all_to_all" if named.attend == "ulysses" else "ring"
        tokens = sum(int(plan.packs.spans.tokens.sum()) for plan in plans)
        seconds = sum(plan.simulate(SEVEN_B, traffic=traffic).seconds for plan in plans) / tokens
        static = static or seconds
        ratios = [plan.makespan() / plan.bound() for plan in plans]
        print(f"  {name:17s}{seconds / static:8.3f}   makespan/bound {np.mean(ratios):.3f}, worst {np.max(ratios):.3f}")


if __name__ == "__main__":
    main()
