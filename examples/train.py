"""The main job: a small model on real long-tailed documents, trained with ``static`` and with a balanced recipe.

    torchrun --nproc-per-node 4 examples/train.py
    torchrun --nproc-per-node 2 examples/train.py --dp 2 --cp 1 --recipe wlb --sync step

Both runs start from the same weights and read the same documents in the same steps; only who computes what differs. On a
machine with fewer cores than ranks the clock measures total work, so what ranks wait for is computed from each rank's
own CPU seconds. The cost model that plans is measured on this machine first.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import typer
from datasets import Dataset
from documents import tokenised
from equipoise import BalancedLoader, CostModel, CpGroups, Recipe, ThdBatch, recipe, register_attention
from report import Run, table, timeline
from rich.progress import Progress, TimeElapsedColumn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 1024
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def main(
    balanced: Annotated[
        str, typer.Option("--recipe", help="What static is compared with: wlb, vrsp, skrull, or static alone.")
    ] = "vrsp",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per recipe.")] = 2,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel replicas.")] = 2,
    cp: Annotated[int, typer.Option(min=1, help="Ranks that share a pack.")] = 2,
    max_tokens_per_rank: Annotated[int, typer.Option(min=1, help="Hard cap of tokens on a rank.")] = 8192,
    packs: Annotated[int, typer.Option(min=1, help="Packs of one optimizer step, over all ranks.")] = 24,
    sync: Annotated[
        str, typer.Option(help="slot: FSDP2, ranks meet at every micro-batch. step: DDP with no_sync.")
    ] = "slot",
    attention: Annotated[str, typer.Option(help="ring or ulysses.")] = "ring",
    data: Annotated[Path | None, typer.Option(help=".jsonl, .parquet, .txt, a folder, or a saved HF dataset.")] = None,
    too_long: Annotated[str, typer.Option(help="Documents over the cap: split, truncate, drop or error.")] = "split",
    seed: Annotated[int, typer.Option(help="Of the weights and the order of documents.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the documents and the picture go.")] = Path("runs"),
) -> None:
    """Train with static and with a balanced recipe; print one table, draw one timeline."""
    begin = time.time()
    recipes = chosen(balanced, attention, cp)
    check_world(dp, cp, sync)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = CpGroups(dp, cp)
    register_attention(groups)
    out.mkdir(parents=True, exist_ok=True)
    if dist.get_rank() == 0:
        read(data, out)
    dist.barrier()
    dataset = read(data, out)
    cost = measured_cost(max_tokens_per_rank * cp, seed)
    runs = []
    for choice in recipes:
        loader = BalancedLoader(
            dataset,
            choice,
            max_tokens_per_rank=max_tokens_per_rank,
            tokens_per_step=packs * max_tokens_per_rank * cp * 31 // 32,
            dp=dp,
            cp=cp,
            rank=dist.get_rank(),
            seed=seed,
            sync=sync,
            too_long=too_long,
            cost=cost,
        )
        if dist.get_rank() == 0 and not runs:
            print(loader.sampler.items.describe())
            ratio = 2 * cost.seconds_per_token / cost.seconds_per_pair
            print(f"cost model, measured here: {cost.seconds_per_pair / 2:.3g} s x (L² + {ratio:.0f}·L) for L tokens")
        runs.append(train(loader, seed, steps))
        loader.close()
    if dist.get_rank() == 0:
        picture = out / "timeline.png"
        table(runs, f"{dp} replicas x cp {cp}, {attention}; ranks wait per {sync}", sync)
        timeline(runs, sync, picture)
        print(f"timeline of the last step: {picture}; {time.time() - begin:.0f} s in all")
    dist.destroy_process_group()


def read(data: Path | None, out: Path) -> Dataset:
    """The documents; what is wrong with ``--data`` is said as such."""
    try:
        return tokenised(data, VOCAB, out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def chosen(balanced: str, attention: str, cp: int) -> list[Recipe]:
    """``static`` and the balanced one, attending alike where the recipe leaves that open."""
    shards = {"ring": "zigzag", "ulysses": "contiguous"}
    if attention not in shards:
        raise typer.BadParameter(f"--attention must be ring or ulysses; got {attention!r}")
    if attention == "ulysses" and cp > SHAPE["num_attention_heads"]:
        raise typer.BadParameter(
            f"Ulysses needs --cp at most the {SHAPE['num_attention_heads']} heads of this model; got {cp}"
        )
    try:
        own = {name: recipe(name) for name in ("static", balanced)}
    except ValueError as error:
        raise typer.BadParameter(f"--recipe: {error}") from error
    if not own[balanced].one_size:
        raise typer.BadParameter(
            f"--recipe {balanced} plans {'chunks with a store' if balanced == 'chunkflow' else 'groups of unequal size'}, and the "
            f"attention that runs these is not built yet; equipoise.plan(…, {balanced!r}) plans and simulates them"
        )
    mixable = {name: each for name, each in own.items() if each.shard in ("zigzag", "contiguous", "adaptive")}
    if attention == "ulysses" and len(mixable) < len(own):
        raise typer.BadParameter(f"--recipe {balanced} shards for a ring; got --attention ulysses")
    return [recipe(name, shard=shards[attention], attend=attention) if name in mixable else own[name] for name in own]


def check_world(dp: int, cp: int, sync: str) -> None:
    """Refuse a mesh that is not the world, before anything waits for anybody."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if dp * cp != world:
        raise typer.BadParameter(
            f"--dp {dp} x --cp {cp} must be the {world} ranks that torchrun started (--nproc-per-node)"
        )
    if sync not in ("slot", "step"):
        raise typer.BadParameter(f"--sync must be slot (FSDP2) or step (DDP); got {sync!r}")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")


def model(seed: int) -> Qwen3ForCausalLM:
    """A narrow Qwen3: attention outweighs the rest from some 2,700 tokens on, as in large models from some 10,000."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        intermediate_size=96,
        max_position_embeddings=1 << 20,
        attn_implementation="equipoise",
        tie_word_embeddings=True,
        **SHAPE,
    )
    return Qwen3ForCausalLM(config)


def measured_cost(capacity: int, seed: int) -> CostModel:
    """Seconds per pair and per token of this model on this machine: two packs, timed on every rank, least of three."""
    net, rank = model(seed), dist.get_rank()
    half = max(16, capacity // 2)
    seconds, pairs = [], []
    for lengths in ([half], [half // 16] * 16):
        ids = [np.arange(tokens) % VOCAB for tokens in lengths]
        loader = BalancedLoader(
            ids,
            recipe("static"),
            max_tokens_per_rank=half,
            documents_per_step=len(ids),
            dp=1,
            cp=1,
            rank=0,
            shuffle=False,
        )
        batch = next(iter(loader))
        loader.close()
        batch = batch.replace(
            plan=recipe("static").attention(recipe("static").shards(batch.cu_seqlens.numpy(), 1), (rank,), 0)
        )
        seconds.append(min(timed(net, batch) for _ in range(3)))
        pairs.append(sum(tokens * (tokens + 1) / 2 for tokens in lengths))
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times)
    times /= dist.get_world_size()
    per_pair = float(times[0] - times[1]) / (pairs[0] - pairs[1])
    per_token = (float(times[0]) - per_pair * pairs[0]) / half
    return CostModel(seconds_per_pair=max(per_pair, 1e-15), seconds_per_token=max(per_token, 1e-12))


def timed(net: torch.nn.Module, batch: ThdBatch) -> float:
    """CPU seconds of this rank's thread in forward and backward."""
    begin = time.thread_time()
    net(**batch.to_hf()).loss.backward()
    return time.thread_time() - begin


def parallel(net: Qwen3ForCausalLM, sync: str) -> torch.nn.Module:
    """FSDP2 over all ranks where they meet at every micro-batch, DDP where they meet once per step."""
    if sync == "step":
        return DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(loader: BalancedLoader, seed: int, steps: int) -> Run:
    """Some optimizer steps; the figures of all ranks, on every rank."""
    sync, world, name = loader.sampler.cluster.sync, dist.get_world_size(), loader.sampler.recipe.name.split("+")[0]
    net = parallel(model(seed), sync)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    measured, planning, tokens, fillers, sent, loss = [], [], 0, 0, 0.0, torch.zeros(())
    loader.sampler.plan(0)  # kernels are compiled once per machine: not a matter of training
    dist.barrier()
    begin = time.perf_counter()
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), disable=dist.get_rank() != 0) as progress:
        bar = progress.add_task(name, total=steps)
        for number, step in enumerate(loader.steps(), 1):
            row, loss = [], torch.zeros(())
            for batch in step:
                start = time.thread_time()
                last = batch.is_last_slot or not hasattr(net, "no_sync")
                with nullcontext() if last else net.no_sync():
                    part = net(**batch.to_hf()).loss
                    part.backward()
                row.append(time.thread_time() - start)
                loss = loss + part.detach() / world
                tokens += batch.input_ids.numel()
                fillers += batch.input_ids.numel() if batch.documents.tolist() == [-1] else 0
                sent += bytes_sent(batch)
            optimizer.step()
            optimizer.zero_grad()
            measured.append(row)
            planning.append(batch.planning_seconds)
            progress.update(bar, advance=1, description=name)
            if number == steps:
                break
    wall = time.perf_counter() - begin
    told: list = [None] * world
    dist.all_gather_object(told, (measured, tokens, fillers, sent, float(loss)))
    return Run(
        recipe=name,
        predicted=[loader.sampler.plan(step, 0).loads().cost / 1e9 for step in range(len(measured))],
        measured=[np.array([rows[step] for rows, *_ in told]) for step in range(len(measured))],
        wall_seconds=wall,
        tokens=sum(tokens for _, tokens, *_ in told),
        fillers=sum(fillers for _, _, fillers, *_ in told),
        planning_seconds=planning,
        bytes_sent=max(sent for *_, sent, _ in told) / len(measured),
        loss=sum(loss for *_, loss in told),
    )


def bytes_sent(batch: ThdBatch) -> float:
    """What this rank sends in attention, forward and backward, over all layers (fp32)."""
    shape = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"], 4
    plan, sent = batch.plan, 0.0
    for backward in (False, True):
        if hasattr(plan, "bytes_sent"):
            by_rank = plan.bytes_sent(*shape, backward=backward)
        else:
            by_rank = plan.bytes_moved(*shape, backward=backward)[0].sum(axis=0)
        sent += float(by_rank[plan.ranks.index(dist.get_rank())])
    return SHAPE["num_hidden_layers"] * sent


if __name__ == "__main__":
    typer.run(main)
