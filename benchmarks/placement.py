"""What planners that place attention cost: balance, bytes and planning time, for masks over real packs.

    python benchmarks/placement.py [--cp 8 16] [--packs 4] [--trace wlb_like] [--masks causal lambda] [--planners dispatch blocks]
    python benchmarks/placement.py --solvers [--cp 16]
    python benchmarks/placement.py --shares [--cp 8 16] [--packs 10]
    python benchmarks/placement.py --nodes 8 [--cp 16]

128K packs (shuffled documents end to end, cut at the packs' edges), 8 query and 2 KV heads of dim 128 in bf16. Each row is a planner;
all of its columns are means over packs:

- pairs: those of the rank with most over the mean; seconds: the same for kernel seconds forward, tile by tile (packing/efficiency.py);
- bytes: a layer's forward and backward, KV, Q, outputs and gradients, as a share of what a full ring moves: of all ranks, and of the
  rank that sends or receives most; KV and Q: rows received in forward, as a share of the ring's rows;
- ms: CPU time of this thread to plan for all ranks; tiles: of the rank with most.

Beside the mask: *density*, its pairs over those of causal documents; *least*, the bytes that even shares need for lack of keys, a rank
with T/P queries and 1/P of the W pairs needing the keys of W/T tokens at the least; *runs*, what equal runs of the pack receive straight
from home with no regard to balance.

--solvers: DCP's hypergraph by our search and by Mt-KaHyPar (extra `solvers`), total bytes, as it leaves it (with the balance of pairs and of
tokens, which it knows as one limit) and repaired to the same limits by a search of 240,000 steps whose time is not counted; by size of
the blocks and head groups. Times are of this thread from the hypergraph on, one thread each.

--shares: rows that joint dispatch moves over those of min-heap, which balances alone, for causal documents.

--nodes: causal documents over nodes of so many ranks, rows straight from home or forwarded inside (attention/forwarding.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from equipoise.attention import bands
from equipoise.attention.blocks import Blocks, block_plan, place
from equipoise.attention.forwarding import nodes_of, traffic_between
from equipoise.attention.groupcast import Overlap, groupcast_plan
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.ring import ring_plan
from equipoise.attention.traffic import bytes_moved
from equipoise.packing import mask_kinds as kinds
from equipoise.packing.block_graph import BlockGraph
from equipoise.packing.block_quick import quick
from equipoise.packing.dispatch import dispatch
from equipoise.packing.dispatch_joint import joint
from equipoise.packing.efficiency import kernel_seconds
from equipoise.packing.mask_areas import chunk_keys
from equipoise.packing.masks import Mask
from equipoise.packing.partition import Placement, limits_of
from equipoise.packing.partition_kahypar import partitioned
from traffic import CONTEXT, packs

SHAPE = (8, 2, 128, 2)  # query heads, KV heads, dim, bytes of a number
FLOPS_PER_PAIR = 4 * 8 * 128
RING_ROW = sum(Blocks().row_bytes().kv)  # a KV row there, its gradients back

MASKS: dict[str, Callable[[np.ndarray], Mask]] = {
    "causal": kinds.causal,
    "lambda": kinds.window_with_sinks,
    "shared question": lambda n: kinds.shared_question(*kinds.shares_of_questions(n)),
    "causal blockwise": kinds.causal_blockwise,
}


def dispatched(mask: Mask, cp: int, *, solver: str) -> AttentionPlan:
    shards = joint(mask, cp) if solver == "joint" else dispatch(mask, cp, solver=solver)
    return groupcast_plan(shards, tuple(range(cp)), mask=mask)


def by_nodes(options: argparse.Namespace) -> None:
    """Straight from home, and forwarded."""
    per, pack = options.nodes, [np.diff(cu) for cu in packs(options.trace, options.packs)]
    print(
        f"{options.trace}, {len(pack)} packs of {CONTEXT} tokens, nodes of {per}; of each: straight from home, then forwarded"
    )
    heads = ("MB between nodes", "of largest rank", "MB inside nodes", "stages", "ms")
    print(" " * 26 + "".join(f"{head:>19}" for head in heads))
    for cp in options.cp:
        ranks = tuple(range(cp))
        nodes, rows = nodes_of(ranks, per), {}
        for n in pack:
            mask = kinds.causal(n)
            for name, shards in (("min_heap", dispatch(mask, cp)), ("joint", joint(mask, cp))):
                made = [
                    partial(groupcast_plan, shards, ranks, overlap=Overlap(devices_per_node=x)) for x in (None, per)
                ]
                rows.setdefault(f"dispatch {name}", []).append([crossing(plan, nodes) for plan in made])
            spot = place(mask, cp, options=Blocks(devices_per_node=per))
            made = [partial(block_plan, mask, spot, ranks, devices_per_node=x) for x in (None, per)]
            rows.setdefault("blocks by nodes", []).append([crossing(plan, nodes) for plan in made])
        for name, values in rows.items():
            told = np.mean(values, axis=0)
            print(f"  cp {cp:3} {name:17}" + "".join(f"{a:11.2f}{b:8.2f}" for a, b in told.T), flush=True)


def crossing(planner: Callable[[], AttentionPlan], nodes: np.ndarray) -> list[float]:
    """MB between nodes in a layer's forward and backward, of all ranks and of the one that sends or receives most of them; inside
    nodes; stages; ms."""
    planner()  # compiled
    begin = time.thread_time()
    plan = planner()
    spent = 1e3 * (time.thread_time() - begin)
    both, whole = (
        sum(count(*SHAPE, backward=back).sum(axis=1) for back in (False, True)) / 1e6
        for count in (partial(bytes_moved, traffic_between(plan, nodes)), plan.bytes_moved)
    )
    return [both[0].sum(), both.max(), (whole - both)[0].sum(), plan.stages, spent]


def shares(options: argparse.Namespace) -> None:
    """Joint dispatch beside min-heap."""
    pack = packs(options.trace, options.packs)
    print(f"{options.trace}, {len(pack)} packs of {CONTEXT} tokens: joint dispatch's rows over min-heap's")
    for cp in options.cp:
        joint(pack[0], cp)  # compiled
        rows, even, spent = [], [], []
        for cu in pack:
            begin = time.thread_time()
            ours = joint(cu, cp)
            spent.append(1e3 * (time.thread_time() - begin))
            even.append(evenness(ours.pairs()))
            loads = [ring_plan(x, tuple(range(cp)), forward=False).loads() for x in (ours, dispatch(cu, cp))]
            rows.append([(x.rows_received.sum(), x.rows_received.max(), x.rows_sent.max()) for x in loads])
        moved = np.array(rows)
        every, means = moved[:, 0, 0].sum() / moved[:, 1, 0].sum(), np.mean(moved[:, 0] / moved[:, 1], axis=0)
        print(
            f"  cp {cp:3}: of all packs {every:.3f}; means of packs: {means[0]:.3f}, of the rank that "
            f"receives most {means[1]:.3f}, that sends most {means[2]:.3f}; pairs max/mean {np.mean(even):.3f}, at most {max(even):.3f}; "
            f"{np.mean(spent):.1f} ms"
        )


def placed(mask: Mask, cp: int, **options) -> AttentionPlan:
    return block_plan(mask, place(mask, cp, options=Blocks(**options)), range(cp))


PLANNERS: dict[str, Callable[[Mask, int], AttentionPlan]] = {
    "dispatch min_heap": partial(dispatched, solver="min_heap"),
    "dispatch joint": partial(dispatched, solver="joint"),
    "blocks largest": placed,
    "blocks largest, 2 head groups": partial(placed, head_groups=2),
    "blocks largest, balance 0.02": partial(placed, balance=0.02),
    "blocks total": partial(placed, objective="total"),
    "blocks largest, 30000 rounds": partial(placed, rounds=30_000),
    "blocks total, mtkahypar": partial(placed, objective="total", solver="mtkahypar"),
    "blocks largest, 2 nodes": lambda mask, cp: placed(mask, cp, devices_per_node=cp // 2),
}
"""Planner of each row: (mask, ranks) → the plan of all of them."""


def evenness(load: np.ndarray) -> float:
    return load.max() / load.mean()


def measured(planner: Callable[[Mask, int], AttentionPlan], mask: Mask, cp: int) -> list[float]:
    begin = time.thread_time()
    plan = planner(mask, cp)
    spent = 1e3 * (time.thread_time() - begin)
    loads, (q0, q1, k0, k1), groups = plan.loads(), plan.tiles[:, 2:6].T, plan.head_groups
    seconds = np.zeros(cp)
    np.add.at(
        seconds,
        plan.tiles[:, 0],
        kernel_seconds(bands.pairs(plan.tiles[:, 2:]), q1 - q0, k1 - k0, FLOPS_PER_PAIR / groups),
    )
    both = sum(plan.bytes_moved(*SHAPE, backward=back).sum(axis=1) for back in (False, True))
    ring, rows = (cp - 1) * plan.tokens * RING_ROW, (cp - 1) * plan.tokens * groups
    return [
        evenness(loads.pairs),
        evenness(seconds),
        both[1].sum() / ring,
        both.max() / (ring / cp),
        loads.rows_received.sum() / rows,
        loads.q_rows_received.sum() / rows,
        spent,
        np.bincount(plan.tiles[:, 0]).max(),
    ]


def least(mask: Mask, cp: int) -> tuple[float, float, float]:
    """(density, least share of the ring's rows for lack of keys, share that equal runs need)."""
    tokens, pairs = int(mask.tokens.sum()), int(mask.pairs().sum())
    causal = int(kinds.causal(mask.tokens).pairs().sum())
    edges = np.arange(cp + 1) * tokens // cp
    needed = chunk_keys(mask.tiles_of_pack(), edges)
    away = 0
    for rank in range(cp):
        for start, stop in needed.of(rank).tolist():
            away += stop - start - max(0, min(stop, edges[rank + 1]) - max(start, edges[rank]))
    ring = (cp - 1) * tokens
    return pairs / causal, max(0.0, pairs / tokens - tokens / cp) * cp / ring, away / ring


def table(options: argparse.Namespace) -> None:
    pack = [np.diff(cu) for cu in packs(options.trace, options.packs)]
    rows = {name: one for name, one in PLANNERS.items() if any(name.startswith(x) for x in options.planners)}
    for cp in options.cp:
        for name in options.masks:
            masks = [MASKS[name](n) for n in pack]
            density, bound, runs = np.mean([least(mask, cp) for mask in masks], axis=0)
            print(f"\n{options.trace}, {len(pack)} packs of {CONTEXT} tokens, cp {cp}, {name}:", end=" ")
            print(f"density {density:.3f}, least {bound:.1%}, runs {runs:.1%}")
            heads = ("pairs", "seconds", "sum", "largest", "KV rows", "Q rows", "ms", "tiles")
            print(" " * 32 + "".join(f"{head:>9}" for head in heads))
            for row, planner in rows.items():
                planner(masks[0], cp)  # compiled
                values = np.mean([measured(planner, mask, cp) for mask in masks], axis=0)
                print(f"  {row:30}" + "".join(f"{x:9.3f}" for x in values[:2]), end="")
                print("".join(f"{x:9.1%}" for x in values[2:6]) + "".join(f"{x:9.0f}" for x in values[6:]), flush=True)


def timed(solver: Callable[[], Any]) -> tuple[Any, float]:
    """What a solver found, and its milliseconds of this thread, the least of two calls: the first may compile."""
    spent = []
    for _ in range(2):
        begin = time.thread_time()
        found = solver()
        spent.append(1e3 * (time.thread_time() - begin))
    return found, min(spent)


def solvers(options: argparse.Namespace) -> None:
    cp, one = options.cp[-1], np.ones(options.cp[-1], np.int64)
    pack = [np.diff(cu) for cu in packs(options.trace, options.packs)]
    print(
        f"{options.trace}, {len(pack)} packs, cp {cp}: MB in all, ms; of Mt-KaHyPar before repair also pairs and tokens max/mean"
    )
    for name in options.masks:
        for block, groups in ((1024, 1), (512, 1), (512, 2), (256, 2)):
            asked = Blocks(objective="total", block=block, head_groups=groups)
            lines: dict[str, list[list[float]]] = {}
            for n in pack:
                mask = MASKS[name](n)
                graph = BlockGraph.of(mask, block=block, row_bytes=asked.row_bytes(), groups=groups)
                limits = limits_of(graph, graph.tokens, graph.units()[2], one, CONTEXT, asked.balance, asked)
                (home, owner, _), spent = timed(partial(quick, graph, one, seed=0, **limits))
                made = Placement(graph=graph, shards=place(mask, cp, options=asked).shards, home=home, owner=owner)
                lines.setdefault("greedy", []).append([made.bytes()[0].sum() / 1e6, spent, evenness(made.pairs())])
                more, spent = timed(partial(place, mask, cp, options=replace(asked, rounds=30_000)))
                lines.setdefault("greedy, 30000 rounds", []).append(
                    [more.bytes()[0].sum() / 1e6, spent, evenness(more.pairs())]
                )
                (home, owner), spent = timed(partial(partitioned, graph, one, asked.balance, 0))
                raw = replace(made, home=home, owner=owner)
                tokens = np.bincount(home, made.graph.tokens, cp)
                left = [raw.bytes()[0].sum() / 1e6, spent, evenness(raw.pairs()), evenness(tokens)]
                lines.setdefault("mtkahypar", []).append(left)
                fixed = place(mask, cp, options=replace(asked, solver="mtkahypar"))
                lines.setdefault("mtkahypar, repaired", []).append(
                    [fixed.bytes()[0].sum() / 1e6, spent, evenness(fixed.pairs())]
                )
            print(f"{name}, blocks of {block}, {groups} head groups, {groups * len(made.graph.q)} units")
            for label, values in lines.items():
                print(f"  {label:24}" + "".join(f"{x:10.3f}" for x in np.mean(values, axis=0)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", nargs="*", type=int, default=[8, 16])
    parser.add_argument("--packs", type=int, default=4)
    parser.add_argument("--trace", default="wlb_like")
    parser.add_argument("--masks", nargs="*", default=list(MASKS), choices=MASKS)
    parser.add_argument("--planners", nargs="*", default=[""], help="beginnings of their names; none: all")
    parser.add_argument("--solvers", action="store_true", help="our search beside Mt-KaHyPar instead")
    parser.add_argument("--shares", action="store_true", help="joint dispatch's rows beside min-heap's instead")
    parser.add_argument("--nodes", type=int, help="bytes between nodes of so many ranks instead")
    options = parser.parse_args()
    (solvers if options.solvers else shares if options.shares else by_nodes if options.nodes else table)(options)


if __name__ == "__main__":
    main()
