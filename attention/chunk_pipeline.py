"""ChunkFlow over a pipeline: one stage of the model on each rank, in the state-aware 1F1B order, gradients exact.

What is decided: a stage runs the operations that `samplers.pipeline.state_aware` gives it, receives when an operation
needs it and sends without waiting. Stages keep their *inputs*, so a chunk is recomputed by each stage for itself, without a
transfer, and each has a store of its own layers. Activations go one way and gradients the other on two process groups,
in the order of the plan, so neither waits for the other. (The schedules of `torch.distributed.pipelining` know no
recomputation and no gradients that come from elsewhere than the next stage, so they are not used.)

Cost: beside `run_chunks`, the inputs of recomputed chunks: tokens x hidden size of the documents under way, a stage.

    forward, backward = (dist.new_group(ranks) for _ in range(2))                # a pipeline's ranks, in order of stages
    stage = cut_stage(model, dist.get_rank(forward), len(ranks))
    order = state_aware(plan.operations(replica), pp=len(ranks)).stage(dist.get_rank(forward))
    losses = run_stage(stage, batches, order, forward, backward)                # [] but on the last stage
"""

# T tokens of a micro-batch on this rank, h hidden size.
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ..packing.chunkflow import BACKWARD, FORWARD, RECOMPUTE
from .chunk_batches import check_store, exact, group_sizes, plans_of, refuse_dropout
from .chunk_run import LOSS, finish


def cut_stage(model: Any, stage: int, stages: int) -> Any:
    """Leave a HF causal LM the layers of one stage, in place: stage i of n has layers i·L/n … (i+1)·L/n - 1.

    Embeddings stay on the first, norm and head on the last; elsewhere they are identities, so that the model's logits are
    what is handed on. Raises ValueError for tied embeddings, whose gradients two stages would have to add up.
    """
    base, config = model.base_model, model.config
    count = len(base.layers)
    if not 0 <= stage < stages <= count:
        raise ValueError(
            f"{count} layers make at most {count} stages, 0 … {stages - 1}; got stage {stage} of {stages}."
        )
    if config.tie_word_embeddings and stages > 1:
        raise ValueError("Tied embeddings would be on two stages; got tie_word_embeddings=True. Untie them first.")
    first, stop = stage * count // stages, (stage + 1) * count // stages
    base.layers = base.layers[first:stop]
    config.num_hidden_layers = stop - first
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[first:stop]
    if stage > 0:
        model.set_input_embeddings(torch.nn.Identity())
    if stage < stages - 1:
        base.norm = torch.nn.Identity()
        model.set_output_embeddings(torch.nn.Identity())
    return model


def run_stage(
    stage: Any,
    batches: Iterable[Any],
    operations: npt.ArrayLike,
    forward_group: dist.ProcessGroup,
    backward_group: dist.ProcessGroup,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    reduction: str = "mean",
    world: int | None = None,
    max_store_bytes: int | None = None,
) -> list[Tensor]:
    """Forward and backward of one replica's micro-batches of a step on this rank's stage. → losses on the last, else [].

    stage: from `cut_stage`, not wrapped in DDP (average gradients over replicas after the call). operations: int[k, 2 or
    more], this stage's of `state_aware`. forward_group, backward_group: two groups of the pipeline's ranks, in order of stages.
    The rest is as in `run_chunks`; every stage is given the same batches.
    """
    batches = list(batches)
    sizes = group_sizes(batches)
    todo = exact(np.asarray(operations)[:, :2], sizes)
    refuse_dropout(stage)
    if hasattr(stage, "no_sync"):
        raise ValueError(
            "DDP would reduce in the wrong pass; got a wrapped stage. Pass the module and average after the step."
        )
    plans = plans_of(batches, sizes)
    check_store(stage, plans, todo, max_store_bytes)
    pipe = _Pipe(stage, forward_group, backward_group)
    again = {slot for operation, slot in todo if operation == RECOMPUTE}
    kept: dict[int, Tensor | None] = {}
    graphs: dict[int, tuple[Tensor | None, Tensor]] = {}
    losses = [torch.tensor(0.0)] * len(batches)
    for operation, slot in todo:
        batch = batches[slot].replace(plan=plans[slot])
        if operation == BACKWARD:
            pipe.backward(*graphs.pop(slot))
            finish(plans[slot])
            continue
        given = kept.pop(slot) if operation == RECOMPUTE else pipe.receive(batch)
        if operation == FORWARD and slot in again:
            kept[slot] = given
            with torch.no_grad():
                pipe.send(_hidden(stage, batch, given, reduction, world, logits_to_keep=int(pipe.last)))
            continue
        given = None if given is None else given.requires_grad_()
        if pipe.last:
            made = _loss(stage, batch, given, loss, reduction, world)
            losses[slot] = made.detach()
        else:
            made = _hidden(stage, batch, given, reduction, world)
            if operation == FORWARD:
                pipe.send(made)
        graphs[slot] = (given, made)
    pipe.flush()
    return losses if pipe.last else []


class _Pipe:
    """The two neighbours of a stage."""

    def __init__(self, stage: Any, forward_group: dist.ProcessGroup, backward_group: dist.ProcessGroup) -> None:
        self.forward_group, self.backward_group = forward_group, backward_group
        rank, size = dist.get_rank(forward_group), dist.get_world_size(forward_group)
        if dist.get_process_group_ranks(forward_group) != dist.get_process_group_ranks(backward_group):
            raise ValueError("A pipeline's two groups have the same ranks, in order of its stages; got different ones.")
        self.rank, self.first, self.last = rank, rank == 0, rank == size - 1
        parameter = next(stage.parameters())
        device = parameter.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype
        self.hidden = stage.config.get_text_config().hidden_size
        self.under_way: list[tuple[Any, Tensor]] = []

    def receive(self, batch: Any) -> Tensor | None:
        """The stage's input [1, T, h]; None on the first, which has token ids."""
        if self.first:
            return None
        ids = batch.input_ids
        hidden = torch.empty((1, ids.numel(), self.hidden), dtype=self.dtype, device=ids.device)
        dist.recv(hidden, group=self.forward_group, group_src=self.rank - 1)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Hand the stage's output on, if another stage follows."""
        if not self.last:
            self._post(hidden, self.forward_group, self.rank + 1)

    def backward(self, given: Tensor | None, made: Tensor) -> None:
        """From the loss, or from the gradient that the next stage hands back; hand this stage's own back."""
        grad = None
        if not self.last:
            grad = torch.empty(made.shape, dtype=self.dtype, device=made.device)
            dist.recv(grad, group=self.backward_group, group_src=self.rank + 1)
            grad = grad.to(made.dtype)
        made.backward(grad)
        if given is not None:
            assert given.grad is not None
            self._post(given.grad, self.backward_group, self.rank - 1)
            given.grad = None

    def flush(self) -> None:
        """Wait until everything has left."""
        for work, _ in self.under_way:
            work.wait()
        self.under_way.clear()

    def _post(self, tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
        self.under_way = [(work, held) for work, held in self.under_way if not work.is_completed()]
        sent = tensor.detach().to(self.dtype).contiguous()
        self.under_way.append((dist.isend(sent, group=group, group_dst=to), sent))


def _arguments(batch: Any, given: Tensor | None, reduction: str, world: int | None) -> dict[str, Any]:
    arguments = batch.to_hf(reduction, world)
    if given is not None:
        del arguments["input_ids"]
        arguments["inputs_embeds"] = given
    return arguments


def _hidden(stage: Any, batch: Any, given: Tensor | None, reduction: str, world: int | None, **options: int) -> Tensor:
    arguments = _arguments(batch, given, reduction, world)
    return stage(**{name: value for name, value in arguments.items() if name not in LOSS}, **options).logits


def _loss(stage: Any, batch: Any, given: Tensor | None, loss: Any, reduction: str, world: int | None) -> Tensor:
    arguments = _arguments(batch, given, reduction, world)
    if loss is None:
        return stage(**arguments).loss
    return loss(stage(**{name: value for name, value in arguments.items() if name not in LOSS}), batch)
