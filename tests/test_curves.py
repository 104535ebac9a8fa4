"""Twenty optimizer steps under each executor have the loss curve of one process: fp64, 1e-10, Qwen3 and Llama.

Through the real loader, unmodified HF models, DDP and AdamW; the reference runs each step's documents one at a time. One
step's gradients under every recipe and mesh are in test_training.py.

python -m pytest tests/test_curves.py
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from equipoise import BalancedLoader, CpGroups, Recipe, recipe, register_attention
from equipoise.attention.chunk_run import run_chunks
from equipoise.packing.queues import WlbQueues
from equipoise.samplers.solve import ChunkFlow
from torch.nn.parallel import DistributedDataParallel

from tests.models import in_fp64

transformers = pytest.importorskip("transformers")

STEPS = 20
VOCAB = 61
LENGTHS = (1, 23, 2, 31, 3, 7, 1, 13, 29, 19, 4, 11, 37, 1, 17, 41)
CHUNKS = ChunkFlow(chunk_tokens=16, keep=1)
EXECUTORS = {
    "ring": recipe("static", attend="ring"),
    "direct": recipe("static", attend="direct"),
    "gather": recipe("wlb", shard="adaptive", attend="gather", options=WlbQueues(max_delay=0)),
    "ulysses": recipe("static", shard="contiguous", attend="ulysses"),
    "chunks": recipe("chunkflow", shard="zigzag", attend="ring", options=CHUNKS),
}
GROUPS: dict[int, CpGroups] = {}
"""Of this rank process: built once, as a training run does."""


def rows() -> list[dict[str, np.ndarray]]:
    """Documents that can be learned: each counts up from some token; some labels are masked."""
    draw = np.random.default_rng(0)
    documents = []
    for tokens in LENGTHS:
        ids = (draw.integers(VOCAB) + np.arange(tokens)) % VOCAB
        documents.append({"input_ids": ids, "labels": np.where(draw.random(tokens) < 0.2, -100, ids)})
    return documents


def model_of(shape: str, implementation: str) -> torch.nn.Module:
    config = {"qwen3": transformers.Qwen3Config, "llama": transformers.LlamaConfig}[shape](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        attn_implementation=implementation,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return in_fp64(transformers.AutoModelForCausalLM.from_config(config)).train()


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)


def sum_of_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In fp64; HF's own loss casts logits to fp32."""
    return torch.nn.functional.cross_entropy(logits[0], labels, ignore_index=-100, reduction="sum")


def train(
    rank: int, world: int, shape: str, chosen: Recipe, checkpointing: bool
) -> tuple[list[float], list[list[int]]]:
    """The loss and the documents of each step."""
    if world not in GROUPS:
        GROUPS[world] = CpGroups(1, world)
    register_attention(GROUPS[world])
    net = model_of(shape, "equipoise")
    if checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    net = DistributedDataParallel(net)
    optimizer = optimizer_of(net)
    chunks = chosen.name.startswith("chunkflow")
    loader = BalancedLoader(
        rows(),
        chosen,
        max_tokens_per_rank=-(-(16 if chunks else 64) // world) + 2,
        documents_per_step=4,
        dp=1,
        cp=world,
        rank=rank,
        seed=3,
        timeout=50,
    )
    losses, documents = [], []
    for epoch in range(STEPS * 4 // len(LENGTHS)):
        loader.set_epoch(epoch)
        for step in loader.steps():
            batches = list(step)
            documents.append(sorted({d for batch in batches for d in batch.documents.tolist() if d >= 0}))
            if chunks:
                parts = run_chunks(
                    net, batches, loss=lambda out, batch: sum_of_losses(out.logits, batch.labels) * batch.loss_scale()
                )
            else:
                parts = [slot(net, batch) for batch in batches]
            losses.append(float(sum(parts)) / world)
            optimizer.step()
            optimizer.zero_grad()
    loader.close()
    curve = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(curve)
    return curve.tolist(), documents


def slot(net: DistributedDataParallel, batch) -> torch.Tensor:
    """Forward and backward of a micro-batch; gradients are reduced in the last one."""
    net.require_backward_grad_sync = batch.is_last_slot
    arguments = {name: value for name, value in batch.to_hf().items() if "labels" not in name}
    loss = sum_of_losses(net(**arguments).logits, batch.labels) * batch.loss_scale()
    loss.backward()
    return loss.detach()


@functools.cache
def one_process(shape: str, steps: tuple[tuple[int, ...], ...]) -> list[float]:
    """The curve of documents one at a time."""
    torch.set_num_threads(1)  # threads of small operations only wait for each other
    net, documents, losses = model_of(shape, "sdpa"), rows(), []
    optimizer = optimizer_of(net)
    for step in steps:
        shifted = {d: torch.from_numpy(np.append(documents[d]["labels"][1:], -100)) for d in step}
        targets, total = sum(int((labels != -100).sum()) for labels in shifted.values()), 0.0
        for d, labels in shifted.items():
            ids = torch.from_numpy(documents[d]["input_ids"])[None]
            loss = sum_of_losses(net(input_ids=ids, use_cache=False).logits, labels) / targets
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses


CASES = [(name, 2, shape) for name in EXECUTORS for shape in ("qwen3", "llama")]
CASES += [("ring", 3, "qwen3"), ("chunks", 3, "qwen3"), ("ulysses", 4, "qwen3")]


@pytest.mark.parametrize(("executor", "world", "shape"), CASES)
def test_twenty_steps(ranks, executor, world, shape):
    checkpointing = executor == "gather"
    curves = ranks.run(train, world, shape, EXECUTORS[executor], checkpointing, timeout=300)
    assert all(curve == curves[0] for curve in curves)
    losses, documents = curves[0]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3
    want = one_process(shape, tuple(map(tuple, documents)))
    np.testing.assert_allclose(losses, want, rtol=1e-10, atol=0)
