"""State-aware 1F1B over gloo stages has the gradients of the unpipelined model, one document at a time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from equipoise.attention.chunk_pipeline import cut_stage, run_stage
from equipoise.samplers.pipeline import state_aware

from tests.attention.test_chunk_run import SHORT, documents, loader_of, loss_of, model_of, one_by_one, register

PIPES: dict[int, list[dist.ProcessGroup]] = {}


def pipes(world: int) -> list[dist.ProcessGroup]:
    if world not in PIPES:
        PIPES[world] = [dist.new_group(list(range(world))) for _ in range(2)]
    return PIPES[world]


def staged(rank: int, world: int, shape: str, keeps: list[int]) -> list[tuple[float, float]]:
    """How far this stage's gradients, and on the last one the loss, are from the whole model's, for each K."""
    register(world, 1)
    rows, reference, errors = documents(SHORT), model_of(shape, "sdpa", layers=5), []
    truth = one_by_one(rows, reference)
    whole = dict(reference.named_parameters())
    first = rank * 5 // world
    for keep in keeps:
        # Every stage is given the batches of replica 0; attention runs on each stage alone.
        loader = loader_of(rows, keep=keep)
        batches = [batch.replace(cp_ranks=(rank,)) for batch in next(loader.steps())]
        order = state_aware(loader.sampler.plan(0).operations(0), pp=world).stage(rank)
        loader.close()
        stage = cut_stage(model_of(shape, layers=5), rank, world)
        losses = run_stage(stage, batches, order, *pipes(world), loss=loss_of)
        assert bool(losses) == (rank == world - 1)
        off = abs(float(sum(losses)) - truth) if losses else 0.0
        parameters = dict(stage.named_parameters())
        assert len(parameters) > 0
        for name, parameter in parameters.items():
            part = name.split(".")
            if "layers" in part:
                at = part.index("layers") + 1
                part[at] = str(int(part[at]) + first)
            want = whole[".".join(part)].grad
            off = max(off, float((parameter.grad - want).norm() / want.norm()))
        errors.append((off, len(parameters)))
    return errors


@pytest.mark.parametrize(
    ("world", "shape", "keeps"), [(2, "qwen3", [1, 2, 99]), (3, "llama", [1]), (4, "qwen3", [1, 2])]
)
def test_stages_take_the_step_of_the_whole_model(ranks, world, shape, keeps):
    results = ranks.run(staged, world, shape, keeps, timeout=300)
    names = len(list(model_of(shape, "sdpa", layers=5).parameters()))
    for errors in zip(*results, strict=True):
        assert max(off for off, _ in errors) < 1e-12, errors
        assert sum(count for _, count in errors) == names


def test_stages_that_cannot_be_are_refused():
    register(1, 1)
    with pytest.raises(ValueError, match="3 layers make at most 3 stages"):
        cut_stage(model_of(), 0, 4)
    with pytest.raises(ValueError, match="Tied embeddings"):
        tied = model_of()
        tied.config.tie_word_embeddings = True
        cut_stage(tied, 0, 2)
    with pytest.raises(ValueError, match="DDP would reduce"):
        stage = model_of()
        stage.no_sync = None
        run_stage(stage, loader_batches(), [[0, 0], [2, 0]], None, None)


def loader_batches() -> list:
    loader = loader_of(documents((5,)))
    batches = list(next(loader.steps()))
    loader.close()
    return batches


def test_stages_one_after_another_are_the_model():
    ids, hidden = torch.arange(6)[None], None
    for i in range(3):
        stage = cut_stage(model_of(implementation="sdpa"), i, 3)
        hidden = (
            stage(ids, use_cache=False) if hidden is None else stage(inputs_embeds=hidden, use_cache=False)
        ).logits
    assert torch.equal(hidden, model_of(implementation="sdpa")(ids).logits)
