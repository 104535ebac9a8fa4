"""Run a step of ChunkFlow: forward, recompute and backward of one replica's micro-batches, in the order that is exact.

What is decided: when a chunk's activations exist. Forward runs through all chunks of a group, the last K keep their
activations, the others run without (and without a loss: their keys and values are what is wanted); then they go backward
in descending order, each of the others recomputed just before (`packing.chunkflow.schedule`). Gradients are exactly those
of the whole documents.

Cost: activations of K chunks, the store of the documents under way (`kv_store.py`, bounded by `max_store_bytes`), and a
further forward of N - K of a group's N chunks.

    register_attention(CpGroups(dp, cp))
    loader = BalancedLoader(rows, recipe("chunkflow", options=ChunkFlow(chunk_tokens=8192, keep=2)), …)
    for step in loader.steps():
        losses = run_chunks(model, step, keep=2)
        optimizer.step()

Under **DDP** pass the wrapped model: gradients are reduced once, in the last backward pass of the call, for which the
chunk that goes last is recomputed if others lie between its passes; a call is a step, do not wrap it in `no_sync()`. Under
**FSDP2** pass the model as it is: every pass is a collective, so all ranks must run the same ones; plan with
`sync="slot"` and pass `operations=plan.operations(rank)`. Gradients are then reduced in every backward pass; set
`set_requires_gradient_sync(False)` before all calls but a step's last, if it has several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from ..packing.chunkflow import BACKWARD, FORWARD, RECOMPUTE, schedule
from .chunk_batches import check_store, exact, group_sizes, plans_of, refuse_dropout
from .chunked import Chunk

LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""What a HF model is given for its loss."""


def run_chunks(
    model: Any,
    batches: Iterable[Any],
    *,
    keep: int = 1,
    operations: npt.ArrayLike | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
    reduction: str = "mean",
    world: int | None = None,
    max_store_bytes: int | None = None,
) -> list[Tensor]:
    """Forward and backward of one replica's micro-batches of a step; gradients are added to `.grad`. → losses, detached.

    model: a HF causal LM with `attn_implementation` registered by `register_attention`, as it is or wrapped in DDP or
    FSDP2. batches: ThdBatches of one step, in order, the chunks of a document one after another.

    Args:
        keep: K, how many chunks of a group keep their activations.
        operations: int[k, 2], what to run, as `StepPlan.operations(rank)` gives it; None: `schedule` of the groups of these
            batches with `keep`.
        loss: (the model's output, batch) → what to run backward from; None: the model's own loss.
        backward: runs a loss backward (`accelerator.backward`).
        reduction, world: see `ThdBatch.loss_scale`; for the model's own loss.
        max_store_bytes: bound of the stores on this rank, gradients included, counted in the parameters' or autocast's
            dtype; None: none.

    Raises ValueError, before the model is called, for dropout, chunks that are missing or out of order, operations that
    are not exact, a context-parallel batch without a ring plan, and a store beyond its bound.
    """
    batches = list(batches)
    sizes = group_sizes(batches)
    todo = schedule(sizes, keep).tolist() if operations is None else exact(operations, sizes)
    refuse_dropout(model)
    plans = plans_of(batches, sizes)
    check_store(model, plans, todo, max_store_bytes)
    if hasattr(model, "no_sync") and todo[-2][1] != todo[-1][1]:
        # DDP gets ready to reduce in a forward pass, whose backward must be the next.
        todo.insert(-1, [RECOMPUTE, todo[-1][1]])
    again = {slot for operation, slot in todo if operation == RECOMPUTE}
    losses: list[Tensor] = [torch.tensor(0.0)] * len(batches)
    graphs: dict[int, Tensor] = {}
    for at, (operation, slot) in enumerate(todo):
        silent = hasattr(model, "no_sync") and at < len(todo) - 2
        with model.no_sync() if silent else nullcontext():
            if operation == BACKWARD:
                backward(graphs.pop(slot))
                finish(plans[slot])
            elif operation == FORWARD and slot in again:
                _keys_only(model, batches[slot], plans[slot])
            else:
                graphs[slot] = _loss(model, batches[slot], plans[slot], loss, reduction, world)
                losses[slot] = graphs[slot].detach()
    return losses


def _keys_only(model: Any, batch: Any, plan: Any) -> None:
    arguments = {name: value for name, value in batch.replace(plan=plan).to_hf("sum").items() if name not in LOSS}
    with torch.no_grad():
        model(**arguments, logits_to_keep=1)


def _loss(model: Any, batch: Any, plan: Any, loss: Any, reduction: str, world: int | None) -> Tensor:
    arguments = batch.replace(plan=plan).to_hf(reduction, world)
    if loss is None:
        return model(**arguments).loss
    return loss(model(**{name: value for name, value in arguments.items() if name not in LOSS}), batch)


def finish(plan: Any) -> None:
    """After a chunk's backward pass: that of the first chunk is a document's last."""
    if isinstance(plan, Chunk) and plan.first_row == 0:
        plan.store.clear()
