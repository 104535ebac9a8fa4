"""The loss is exact: one optimizer step over ranks equals the same documents, one at a time, on one device.

Loss and every gradient, fp64, relative 1e-10, for every recipe x attention x mesh x way of reducing gradients, through
the real loader and an unmodified HF model. Breaking the LSE merge, the label shift or the loss scale fails here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from equipoise import BalancedLoader, CpGroups, recipe, register_attention
from equipoise.attention.blocks import Blocks
from equipoise.attention.tiles import Tap
from equipoise.packing.queues import WlbQueues
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.models import in_fp64

VOCAB = 61
NO_QUEUES = WlbQueues(max_delay=0)  # so that the one step under test holds what the others hold
RECIPES = [
    recipe(name, attend=attend, shard=shard, options=NO_QUEUES if name == "wlb" else None)
    for name in ("static", "wlb", "vrsp")
    for attend, shard in (("ring", "zigzag"), ("ulysses", "contiguous"))
]
RECIPES += [
    recipe("skrull"),
    recipe("wlb", shard="mixed", options=NO_QUEUES),
    recipe("static", shard="striped", attend="ulysses"),
]
RECIPES += [recipe("static", pack="concat", shard="zigzag_sequence"), recipe("vrsp", attend="ring")]
RECIPES += [
    recipe("dcp", blocks=Blocks(block=8)),
    recipe("libra", tap=Tap(head_groups=2, block=4)),
    recipe("libra", shard="zigzag", tap=Tap(block=3, tolerance=1)),
]
# Ulysses inside: pairs of neighbours, which must divide cp where every group has that size.
RECIPES += [recipe("dynamic_cp", ulysses=2), recipe("flexsp", attend="direct", ulysses=2)]
INSIDE = [recipe("static", ulysses=2), recipe("skrull", attend="gather", ulysses=2)]


def documents(cp: int, masked: str) -> list[dict]:
    """Lengths 1, 2, 3, 2·cp ± 1, primes, one giant; ``masked``: some labels, whole documents, or nearly all ranks."""
    rng = np.random.default_rng(cp)
    rows = []
    for at, tokens in enumerate([1, 2, 3, max(1, 2 * cp - 1), 2 * cp + 1, 13, 7, 1, 45, 29, 17, 2]):
        ids = rng.integers(0, VOCAB, tokens)
        labels = ids.copy()
        if masked == "some":
            labels[rng.random(tokens) < 0.3] = -100
        if at == 6 or (masked == "ranks" and at != 9):
            labels[:] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def model(implementation: str) -> torch.nn.Module:
    """A copy of one that is built once: Hugging Face takes long to build even a tiny one."""
    return copy.deepcopy(built(implementation))


@functools.cache
def built(implementation: str) -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=8,  # as many as the largest group of ranks: Ulysses gives each of them one
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        attn_implementation=implementation,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return in_fp64(Qwen3ForCausalLM(config))


def sum_of_losses(net: torch.nn.Module, arguments: dict, labels: torch.Tensor) -> torch.Tensor:
    """Sum of token losses in fp64; HF's own loss casts logits to fp32."""
    logits = net(**{name: value for name, value in arguments.items() if "labels" not in name}).logits
    return torch.nn.functional.cross_entropy(logits[0], labels, ignore_index=-100, reduction="sum")


def one_process(
    rows: list[dict], pieces: list[tuple[int, int, int]], dense: Callable[[int], np.ndarray] | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of these (document, start, stop) one by one: sum of token losses over the targets of all.

    dense: the mask bool[n, n] of a document, where it is another than the causal one.
    """
    total, targets, gradients = 0.0, 0, None
    for document, start, stop in pieces:
        ids, labels = rows[document]["input_ids"], np.append(rows[document]["labels"][1:], -100)
        seen = dense(document)[start:stop, start:stop].tobytes() if dense else b""
        loss, parts = of_piece(np.stack([ids, labels])[:, start:stop].tobytes(), start, seen)
        gradients = [x + y for x, y in zip(gradients, parts, strict=True)] if gradients else parts
        total, targets = total + loss, targets + int((labels[start:stop] != -100).sum())
    names = [name for name, _ in built("sdpa").named_parameters()]
    return total / targets, {name: x / targets for name, x in zip(names, gradients or [], strict=True)}


@functools.lru_cache(maxsize=1000)
def of_piece(content: bytes, start: int, seen: bytes) -> tuple[float, list[torch.Tensor]]:
    """Sum of the token losses of a piece, int64[2, n] ids and labels, and its gradients: most steps hold the same pieces."""
    net = built("sdpa")  # eager takes its softmax in fp32
    ids, labels = torch.from_numpy(np.frombuffer(content, np.int64).reshape(2, -1).copy())
    arguments = {"input_ids": ids[None], "position_ids": start + torch.arange(len(ids))[None], "use_cache": False}
    if seen:
        hidden = ~torch.from_numpy(np.frombuffer(seen, bool).reshape(len(ids), -1).copy())
        mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)
        arguments["attention_mask"] = mask[None, None]
    loss = sum_of_losses(net, arguments, labels)
    return float(loss.detach()), list(torch.autograd.grad(loss, list(net.parameters())))


def wrapped(wrap: str, mesh: DeviceMesh) -> torch.nn.Module:
    net = model("equipoise")
    if wrap == "ddp":
        return DistributedDataParallel(net)
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def one_step(loader: BalancedLoader, rows: list[dict], net: torch.nn.Module) -> tuple[str, float]:
    """One optimizer step; where loss and gradients are furthest from one process, and by how much (relative)."""
    world = dist.get_world_size()
    loss, held, slots = 0.0, [], 0
    for batch in next(loader.steps()):
        sync = batch.is_last_slot or not hasattr(net, "no_sync")
        with nullcontext() if sync else net.no_sync():
            part = sum_of_losses(net, batch.to_hf(), batch.labels) * batch.loss_scale()
            part.backward()
        loss += float(part.detach()) / world
        starts, sizes = batch.starts.tolist(), batch.cu_seqlens.diff().tolist()
        held += [(d, a, a + n) for d, a, n in zip(batch.documents.tolist(), starts, sizes, strict=True) if d >= 0]
        slots += 1
    told: list = [None] * world
    dist.all_gather_object(told, (loss, held, slots))
    assert len({slots for _, _, slots in told}) == 1
    pieces = sorted({piece for _, pieces, _ in told for piece in pieces})
    assert sum(stop - start for _, start, stop in pieces) == sum(
        len(rows[d]["input_ids"]) for d in {d for d, _, _ in pieces}
    )
    made = {name.removeprefix("module."): parameter.grad for name, parameter in net.named_parameters()}
    made = {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in made.items()}
    if dist.get_rank():
        return "checked on rank 0", 0.0
    truth, gradients = one_process(rows, pieces)
    errors = {name: float((made[name] - grad).norm() / grad.norm()) for name, grad in gradients.items()}
    errors["loss"] = abs(sum(part for part, _, _ in told) - truth) / abs(truth)
    return max(errors.items(), key=lambda item: item[1])


def all_cases(rank: int, world: int, dp: int, cp: int, wrap: str) -> list[tuple[str, tuple[str, float]]]:
    """Every recipe on one mesh, whose process groups are built once, under one masking: under FSDP2 the other."""
    torch.set_num_threads(1)
    register_attention(CpGroups(dp, cp))
    mesh, group = init_device_mesh("cpu", (world,)), dist.new_group(backend="gloo") if world > 1 else None
    results = []
    for number, chosen in enumerate(RECIPES + (INSIDE if cp % 2 == 0 else [])):
        masked = ("some", "ranks")[(number + dp + cp + (wrap == "fsdp2")) % 2]
        rows = documents(cp, masked)
        loader = BalancedLoader(
            rows,
            chosen,
            max_tokens_per_rank=-(-48 // cp) + 4,
            documents_per_step=9,
            dp=dp,
            cp=cp,
            rank=rank,
            seed=3,
            timeout=50,
            group=group,
            pad_tp=1 if chosen.name == "static" else 0,  # padding must change nothing
        )
        results.append((f"{chosen.name}, {masked} masked", one_step(loader, rows, wrapped(wrap, mesh))))
        loader.close()
    return results


MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 4), (2, 4)]


@pytest.mark.parametrize(
    ("dp", "cp", "wrap"), [*((*mesh, "ddp") for mesh in MESHES), *((*mesh, "fsdp2") for mesh in MESHES[1:6])]
)
def test_a_step_equals_one_process(ranks, dp: int, cp: int, wrap: str) -> None:
    for results in ranks.run(all_cases, dp * cp, dp, cp, wrap, timeout=300):
        for case, (name, error) in results:
            assert error < 1e-10, f"{case}: {name} is off by {error:.2e}"
