"""Attention over the ranks of a CP group beside its peers: time, work and bytes, forward and backward.

    python benchmarks/attention.py [--rounds 7] [--dtypes bf16 fp32] [--only time work]

One block kernel for all, equipoise's over aten's flash attention for CPU (`attention_peers.py` says how it gets under the
peers, which the command printed first installs; those missing are left out by name). 8192 tokens, 8 query and 2 KV heads of
64, forward and backward.

time: 2 ranks with a thread each. Contenders take turns in one pair of processes, in an order that moves on from round to
round; milliseconds are those of the slower rank, medians over rounds. The column of one process is the kernel alone on one
thread. Before it is timed each contender's out and gradients are held against one process in fp32: at most 4 times the error
that one process has in the row's dtype (bf16), or 1e-4 (fp32). ring-flash-attn's gradients are wrong in fp32 (it sums into
the buffer that it receives in): it is timed all the same, with a note. Ours where plans are the same for two ranks (a ring,
sent straight from home, gathered) are timed once.

work: 4 and 8 ranks, more than there are cores, so by counters: the CPU seconds in tiles of the rank with most, least of three
runs, and bytes sent by the rank that sends most.

Documents of `wlb_like` packs are scaled from 128K to 8192 tokens and rounded to multiples of 16, which peers need.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from attention_peers import INSTALL, Contender, Varlen, Whole, counted, install, missing, peers
from equipoise import CostModel, CpGroups, Hardware, Spans, recipe
from equipoise.attention.counting import Counter
from equipoise.attention.executor import attend
from equipoise.attention.gather import gather_plan
from equipoise.attention.kernels import cpu
from equipoise.attention.ring import ring_plan
from equipoise.attention.ulysses import ulysses_plan
from equipoise.packing.cost import SEVEN_B, causal_pairs
from equipoise.packing.shards import Shards, contiguous, zigzag
from equipoise.samplers.cluster import Cluster
from torch import Tensor
from traffic import packs

HEADS, DIM = (8, 2), 64
STEP = 16  # of document lengths: twice the most ranks
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NEAR, FASTER = 1.05, 1.85  # the marks


def scaled(lengths: np.ndarray, tokens: int) -> list[int]:
    """Lengths in the same proportions, multiples of STEP that add up to `tokens`; none is lost."""
    share = lengths / lengths.sum() * (tokens // STEP)
    units = np.maximum(np.floor(share), 1).astype(np.int64)
    left = tokens // STEP - units.sum()
    order = np.argsort(units - share) if left > 0 else np.argsort(-units)
    for i in order[: abs(left)]:
        units[i] += np.sign(left)
    return (units * STEP).tolist()


def rows(number: int, tokens: int) -> dict[str, np.ndarray]:
    """Boundaries of packs by name."""
    eighth = tokens // 8
    fixed = {
        "one document": [tokens],
        "1/4, 1/2, 1/4": [2 * eighth, 4 * eighth, 2 * eighth],
        "3/4 + 4 x 1/16": [6 * eighth, *[eighth // 2] * 4],
    }
    drawn = [scaled(np.diff(cu), tokens) for cu in packs("wlb_like", number)]
    named = {**fixed, **{f"wlb_like pack {i + 1} ({len(pack)} docs)": pack for i, pack in enumerate(drawn)}}
    return {name: np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64) for name, lengths in named.items()}


def dacp_of(cu: np.ndarray, ranks: int) -> Shards:
    """As the recipe cuts it with a tenth more room than an even share."""
    chosen, length = recipe("skrull"), np.diff(cu)
    cluster = Cluster(dp=1, cp=ranks, max_tokens_per_rank=int(1.1 * cu[-1] / ranks))
    cost = CostModel.of(SEVEN_B, Hardware(peak_flops=400e12, efficiency=1.0))
    decision = chosen.decide(Spans.whole(length, causal_pairs(0, length)), ranks, cluster, cost)
    return chosen.shards(cu, ranks, decision, cluster.max_tokens_per_rank)


def ours(cu: np.ndarray, groups: CpGroups) -> list[Contender]:
    """Every executor where it makes sense; plans that are the same on all ranks once, under all their names."""
    ranks, rank = groups.cp_ranks, groups.cp_index
    layouts = {"": zigzag(cu, len(ranks))}
    if len(cu) > 2:
        layouts["DACP "] = dacp_of(cu, len(ranks))
    plans, named = {}, {}
    for layout, shards in layouts.items():
        for name, make in {
            "ring": ring_plan,
            "direct": partial(ring_plan, forward=False),
            "gather": gather_plan,
        }.items():
            whole = make(shards, ranks)
            key = (layout, whole.tiles.tobytes(), whole.moves.tobytes(), whole.returns.tobytes())
            plans.setdefault(key, (shards, make(shards, ranks, rank)))
            named.setdefault(key, []).append(name)
    names = [key[0] + "/".join(kinds) for key, kinds in named.items()]
    plans = dict(zip(names, plans.values(), strict=True))
    if HEADS[0] >= len(ranks):
        plans["Ulysses"] = contiguous(cu, len(ranks)), ulysses_plan(contiguous(cu, len(ranks)), ranks, rank)
    return [
        Contender(
            name=name,
            positions=torch.from_numpy(shards.positions(rank)),
            attend=lambda q, k, v, plan=plan: attend(plan, q, k, v, groups),
            ours=True,
        )
        for name, (shards, plan) in plans.items()
    ]


def pack_tensors(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout of the pack, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads, DIM) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def one_process(cu: np.ndarray) -> Contender:
    varlen, boundaries = Varlen(cpu), cu.tolist()
    return Contender(
        name="one process",
        positions=torch.arange(boundaries[-1]),
        attend=lambda q, k, v: Whole.apply(q, k, v, boundaries, varlen, DIM**-0.5)[0],
    )


def step(contender: Contender, tensors: list[Tensor]) -> list[Tensor]:
    """Forward and backward of one layer → out, dq, dk, dv."""
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    out = contender.attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def errors(contender: Contender, tensors: list[Tensor], truth: list[Tensor]) -> Tensor:
    """Of out, dq, dk, dv: most of any rank, over the largest value."""
    got = step(contender, tensors)
    here = [(x.float() - y[contender.positions]).abs().max() / y.abs().max() for x, y in zip(got, truth, strict=True)]
    worst = torch.stack(here)
    if dist.is_initialized():
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst


def verdict(contender: Contender, worst: Tensor, limit: Tensor) -> str | None:
    """What is wrong with the results; None: nothing."""
    wrong = [
        f"{name} by {e:.2g}" for name, e, most in zip(("out", "dq", "dk", "dv"), worst, limit, strict=True) if e > most
    ]
    if wrong and contender.ours:
        raise AssertionError(f"{contender.name} is wrong: {', '.join(wrong)}")
    return f"{contender.name} is wrong: {', '.join(wrong)}" if wrong else None


def time_row(name: str, cu: np.ndarray, dtype: str, rounds: int, groups: CpGroups) -> tuple[dict[str, float], set[str]]:
    """Median milliseconds of each contender, printed by rank 0, and which are ours."""
    rank, ranks, tensors = groups.rank, groups.world, pack_tensors(int(cu[-1]), DTYPES[dtype])
    alone = one_process(cu)
    truth = step(alone, [x.float() for x in tensors])
    entries = [*ours(cu, groups), *peers(cu, rank, ranks, HEADS, cpu)]
    mine = [[x[c.positions] for x in tensors] for c in entries]
    limit = 4 * errors(alone, tensors, truth) if dtype == "bf16" else torch.full((4,), 1e-4)
    notes = [verdict(c, errors(c, own, truth), limit) for c, own in zip(entries, mine, strict=True)]
    spent = torch.zeros(rounds, len(entries) + 1, dtype=torch.float64)
    for i in range(rounds):
        for j in np.roll(np.arange(len(entries) + 1), -i):
            dist.barrier()
            begin = time.perf_counter()
            if j < len(entries):
                step(entries[j], mine[j])
            elif rank == 0:
                step(alone, tensors)
            spent[i, j] = time.perf_counter() - begin
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    medians = (1e3 * spent.median(0).values).tolist()
    result = dict(zip([c.name for c in entries], medians, strict=False)) | {"one process": medians[-1]}
    if rank == 0:
        show_row(f"{name}, {dtype}", result, 1e3 * spent, [c.ours for c in entries], [n for n in notes if n])
    return result, {c.name for c in entries if c.ours}


def show_row(name: str, medians: dict[str, float], spent: Tensor, our: list[bool], notes: list[str]) -> None:
    print(f"\n{name}: median ms (least)")
    least = spent.min(0).values.tolist()
    for (contender, median), low, side in zip(medians.items(), least, [*our, None], strict=True):
        print(f"  {'ours ' if side else '     '}{contender:28}{median:9.0f} ({low:.0f})")
    for note in notes:
        print(f"  note: {note}")
    sys.stdout.flush()


def marks(table: dict[str, dict[str, float]], our: set[str]) -> list[str]:
    lines = []
    for row, medians in table.items():
        best = min((n for n in medians if n in our), key=medians.__getitem__)
        rivals = [n for n in medians if n not in our and n != "one process"]
        line = f"{row:34} ours best: {best} {medians[best]:.0f} ms"
        if rivals:
            rival = min(rivals, key=medians.__getitem__)
            ratio = medians[best] / medians[rival]
            line += f" / best peer: {rival} {medians[rival]:.0f} = {ratio:.3f} ({_mark(ratio <= NEAR, f'<= {NEAR}')})"
        faster = medians["one process"] / medians[best]
        line += f"; one process / ours = {faster:.2f}"
        lines.append(line + (f" ({_mark(faster >= FASTER, f'>= {FASTER}')})" if row.startswith("one") else ""))
    return lines


def _mark(met: bool, mark: str) -> str:
    return f"{mark} met" if met else f"{mark} MISSED"


def time_all(groups: CpGroups, options: argparse.Namespace) -> None:
    table, our = {}, set()
    for dtype in options.dtypes:
        for name, cu in rows(options.packs, options.tokens).items():
            table[f"{name}, {dtype}"], mine = time_row(name, cu, dtype, options.rounds, groups)
            our |= mine
    if groups.rank == 0:
        print(f"\n{groups.world} ranks x 1 thread, forward + backward, {options.rounds} rounds:")
        print("\n".join(marks(table, our)), flush=True)


def work_all(groups: CpGroups, options: argparse.Namespace, counter: Counter) -> None:
    """Most CPU seconds in tiles and most bytes sent of any rank."""
    groups.counter = counter
    if groups.rank == 0:
        print(f"\n{groups.world} ranks, bf16, of the rank with most{'tile CPU ms':>25}{'work':>9}{'MiB sent':>10}")
    for name, cu in rows(options.packs, options.tokens).items():
        tensors = pack_tensors(int(cu[-1]), torch.bfloat16)
        entries = [*ours(cu, groups), *peers(cu, groups.rank, groups.world, HEADS, counter.kernel(cpu))]
        if groups.rank == 0:
            print(f"  {name}")
        for contender in entries:
            if contender.name.startswith(("torch", "yunchang", "DeepSpeed")):
                continue  # their kernels and exchanges are not counted
            show_work(contender, [x[contender.positions] for x in tensors], counter)


def show_work(contender: Contender, mine: list[Tensor], counter: Counter) -> None:
    runs = []
    for _ in range(4):
        counter.take()
        with counted(counter):
            step(contender, mine)
        runs.append(counter.take())
        dist.barrier()
    own = runs[1]
    least = min(run.tile_seconds for run in runs[1:])
    most = torch.tensor([least, own.head_pairs, own.bytes_sent], dtype=torch.float64)
    total = most.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        even = float(most[1]) * dist.get_world_size() / float(total[1])
        side = "ours " if contender.ours else "     "
        print(f"    {side}{contender.name:28}{1e3 * most[0]:9.0f}{even:9.3f}{most[2] / 2**20:9.2f}", flush=True)


def _rank(rank: int, ranks: int, store: str, options: argparse.Namespace, what: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # of peers' old names for collectives
    os.environ.update(
        DS_BUILD_OPS="0", DS_ACCELERATOR="cpu", RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank)
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=10)
    )
    counter = Counter()
    install(counter.kernel(cpu) if what == "work" else cpu)
    groups = CpGroups(dp=1, cp=ranks)
    groups.warm_up()
    if what == "time":
        time_all(groups, options)
    else:
        work_all(groups, options, counter)
    dist.barrier()
    groups.close()
    dist.destroy_process_group()


def spawn(ranks: int, options: argparse.Namespace, what: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (ranks, str(Path(folder) / "store"), options, what), nprocs=ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8192, help="a multiple of 512")
    parser.add_argument("--packs", type=int, default=2, help="of wlb_like")
    parser.add_argument("--dtypes", nargs="*", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--only", nargs="*", choices=("time", "work"), default=("time", "work"))
    options = parser.parse_args()
    if missing():
        print(f"left out, since not installed: {', '.join(missing())}\n  {INSTALL}")
    if "time" in options.only:
        spawn(2, options, "time")
    if "work" in options.only:
        spawn(4, options, "work")
        spawn(8, options, "work")


if __name__ == "__main__":
    main()
