"""TAP over pools of CP groups: how even attention gets, and what migrates for it, beside the pool as it is.

    python benchmarks/tiles.py [--trace wlb_like] [--context 262144] [--pools 4] [--groups 8x1 4x2 4x8]

Packs of `context` tokens (shuffled documents end to end, cut at the packs' edges), 128 a step, in pools chosen by VRSP, each pack
cut contiguously over its CP group; causal within documents; 32 query and 8 KV heads of 128, bf16. Bytes are those of a layer's
forward and backward, received rows kept, in MB: of all ranks together, and of the rank with most, sent or received; Q counts O.
Rows without an order are the pool as it is. Means over pools; planning is all ranks' plan, median, kernels compiled before.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.tiles import tap_plan
from equipoise.attention.traffic import evenness
from equipoise.packing.cost import causal_pairs
from equipoise.packing.shards import contiguous
from equipoise.samplers.vrsp import pools
from traffic import lengths_of

PACKS = 128
HEADS, KV_HEADS, DIM, BF16 = 32, 8, 128, 2


def packs_of(trace: str, context: int) -> list[np.ndarray]:
    """Boundaries of a step's packs."""
    tokens, rng = lengths_of(trace), np.random.default_rng(0)
    lengths = rng.choice(tokens, size=4 * PACKS * context // int(tokens.mean()))
    cu = np.concatenate([[0], np.cumsum(np.minimum(lengths, context))])
    return [np.unique(np.clip(cu, at, at + context)) - at for at in np.arange(PACKS) * context]


def moved(plan: AttentionPlan) -> np.ndarray:
    """int64[2, 2, P] (sent, received) x (KV, Q) x rank, bytes of forward and backward."""
    shape = HEADS, KV_HEADS, DIM, BF16
    return plan.bytes_moved(*shape) + plan.bytes_moved(*shape, backward=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", default="wlb_like")
    parser.add_argument("--context", type=int, default=262144)
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--groups", nargs="+", default=["8x1", "4x2", "4x8"])
    parser.add_argument("--head-groups", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--blocks", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--tolerance", type=float, default=1.05)
    options = parser.parse_args()
    packs = packs_of(options.trace, options.context)
    cost = np.array([int(causal_pairs(np.zeros(len(cu) - 1, np.int64), np.diff(cu)).sum()) for cu in packs])
    print(f"{options.trace}, {options.context} tokens a pack, tolerance {options.tolerance}")
    print("groups x cp  heads  block  first   max/mean  worst  MB all: KV      Q   MB most: KV     Q   tiles  ms")
    for shape in options.groups:
        count, cp = map(int, shape.split("x"))
        member = pools(cost, count)
        chosen = [[contiguous(packs[at], cp) for at in np.flatnonzero(member == pool)] for pool in range(options.pools)]
        variants = [(1, max(options.blocks), True, float(count * cp))]
        variants += [
            (g, b, h, options.tolerance) for g in options.head_groups for b in options.blocks for h in (True, False)
        ]
        for groups, block, heads_first, tolerance in variants:
            found, even, many, seconds = [], [], [], []
            for pool in chosen:
                begin = time.perf_counter()
                plan = tap_plan(
                    pool,
                    tuple(range(count * cp)),
                    head_groups=groups,
                    block=block,
                    tolerance=tolerance,
                    heads_first=heads_first,
                )
                seconds.append(time.perf_counter() - begin)
                found.append(moved(plan))
                even.append(evenness(plan.loads().pairs))
                many.append(len(plan.tiles))
            all_mb = np.mean([x[1].sum(1) for x in found], axis=0) / 1e6
            most_mb = np.mean([x[:, :, x.sum(1).max(0).argmax()].max(0) for x in found], axis=0) / 1e6
            order = "-" if tolerance > options.tolerance else "heads" if heads_first else "bytes"
            print(
                f"{shape:>10} {groups:6} {block:6}  {order:6} {np.mean(even):8.3f} {max(even):7.3f} {all_mb[0]:10.0f} {all_mb[1]:6.0f} "
                f"{most_mb[0]:10.0f} {most_mb[1]:6.0f} {np.mean(many):7.0f} {1000 * np.median(seconds):5.0f}"
            )


if __name__ == "__main__":
    main()
