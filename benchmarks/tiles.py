"""TAP over pools of CP groups: how even attention gets, and what migrates for it, beside the pool as it is.

    python benchmarks/tiles.py [--trace wlb_like] [--context 262144] [--pools 4] [--groups 8x1 4x2 4x8]

Packs of `context` tokens (shuffled documents end to end, cut at the packs' edges), 128 a step, in pools chosen by VRSP, each pack
cut contiguously over its CP group; causal within documents; 32 query and 8 KV heads of 128, bf16. Bytes are those of a layer's
forward and backward, received rows kept, in MB: of all ranks together, and of the rank with most, sent or received; Q counts O.
max/mean is of pairs (mean and worst pool) and of the seconds that kernels take for them by the efficiency table; `--by` says which is
balanced. Rows without an order are the pool as it is. Means over pools; planning is all ranks' plan, median, kernels compiled before.

    python benchmarks/tiles.py --odd 40 [--context 262144] [--groups 8x8 64x1]

draws pools of odd packs and options instead (one giant among tiny documents, giants beside middling ones …) and prints which took
longest to plan, in the thread's own seconds.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.tiles import kernel_work, tap_plan
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


def odd_pack(kind: str, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Boundaries of a pack of this many tokens."""
    tiny = np.arange(0, tokens, int(rng.integers(20, 200)))
    cuts = {
        "giant": [0],
        "tiny": tiny,
        "giant and tiny": np.append(0, tiny[tiny > tokens * 3 // 4]),
        "middling": np.arange(0, tokens, 4096),
        "two": [0, tokens // 2],
        "lognormal": np.cumsum(np.append(0, rng.lognormal(7, 2, 4000).astype(np.int64) + 1)),
    }[kind]
    return np.unique(np.append(np.minimum(cuts, tokens), tokens)).astype(np.int64)


def odd(count: int, cp: int, context: int, draws: int, seed: int = 0) -> None:
    """Prints the pools that take longest to plan, of some drawn."""
    rng, kinds, rows = (
        np.random.default_rng(seed),
        ("giant and tiny", "giant", "tiny", "middling", "two", "lognormal"),
        [],
    )
    for draw in range(draws + 1):
        some = rng.choice(kinds, 2, replace=False).tolist()
        drawn = [some[int(rng.random() < rng.choice([0.1, 0.5]))] for _ in range(count)]
        options = {
            "head_groups": int(rng.choice([1, 4, 8])),
            "block": int(rng.choice([512, 2048, 8192])),
            "tolerance": float(rng.choice([1.0, 1.05, 1.2])),
            "heads_first": bool(rng.random() < 0.5),
        }
        shards = [contiguous(odd_pack(kind, context, rng), cp) for kind in drawn]
        begin = time.thread_time()
        plan = tap_plan(shards, tuple(range(count * cp)), **options)
        if draw:  # the first one compiles
            rows.append((time.thread_time() - begin, evenness(plan.loads().pairs), len(plan.tiles), options, some))
    rows.sort(key=lambda row: -row[0])
    print(
        f"{count}x{cp} of {context} tokens, {draws} odd pools: median {1000 * rows[len(rows) // 2][0]:.0f} ms; the slowest:"
    )
    for seconds, even, tiles, options, some in rows[:5]:
        print(f"{1000 * seconds:7.0f} ms, max/mean {even:.3f}, {tiles} tiles: {' and '.join(some)}, {options}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", default="wlb_like")
    parser.add_argument("--context", type=int, default=262144)
    parser.add_argument("--pools", type=int, default=4)
    parser.add_argument("--groups", nargs="+", default=["8x1", "4x2", "4x8"])
    parser.add_argument("--head-groups", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--blocks", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--tolerance", type=float, default=1.05)
    parser.add_argument("--by", default="pairs", choices=("pairs", "seconds"))
    parser.add_argument("--odd", type=int, default=0)
    options = parser.parse_args()
    if options.odd:
        for shape in options.groups:
            odd(*map(int, shape.split("x")), options.context, options.odd)
        return
    packs = packs_of(options.trace, options.context)
    cost = np.array([int(causal_pairs(np.zeros(len(cu) - 1, np.int64), np.diff(cu)).sum()) for cu in packs])
    print(f"{options.trace}, {options.context} tokens a pack, tolerance {options.tolerance}")
    print(
        "groups x cp  heads  block  first   max/mean  worst  seconds  MB all: KV      Q   MB most: KV     Q   tiles  ms"
    )
    for shape in options.groups:
        count, cp = map(int, shape.split("x"))
        member = pools(cost, count)
        chosen = [[contiguous(packs[at], cp) for at in np.flatnonzero(member == pool)] for pool in range(options.pools)]
        variants = [(1, max(options.blocks), True, float(count * cp))]
        variants += [
            (g, b, h, options.tolerance) for g in options.head_groups for b in options.blocks for h in (True, False)
        ]
        for groups, block, heads_first, tolerance in variants:
            found, even, timed, many, seconds = [], [], [], [], []
            for pool in chosen:
                begin = time.thread_time()
                plan = tap_plan(
                    pool,
                    tuple(range(count * cp)),
                    head_groups=groups,
                    block=block,
                    tolerance=tolerance,
                    heads_first=heads_first,
                    by=options.by,
                )
                seconds.append(time.thread_time() - begin)
                found.append(moved(plan))
                work = np.bincount(plan.tiles[:, 0], kernel_work(plan.tiles[:, 2:]), minlength=count * cp)
                timed.append(evenness(work))
                even.append(evenness(plan.loads().pairs))
                many.append(len(plan.tiles))
            all_mb = np.mean([x[1].sum(1) for x in found], axis=0) / 1e6
            most_mb = np.mean([x[:, :, x.sum(1).max(0).argmax()].max(0) for x in found], axis=0) / 1e6
            order = "-" if tolerance > options.tolerance else "heads" if heads_first else "bytes"
            print(
                f"{shape:>10} {groups:6} {block:6}  {order:6} {np.mean(even):8.3f} {max(even):7.3f} {np.mean(timed):8.3f} {all_mb[0]:10.0f} {all_mb[1]:6.0f} "
                f"{most_mb[0]:10.0f} {most_mb[1]:6.0f} {np.mean(many):7.0f} {1000 * np.median(seconds):5.0f}"
            )


if __name__ == "__main__":
    main()
