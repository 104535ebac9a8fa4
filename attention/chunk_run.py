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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..packing.chunkflow import BACKWARD, FORWARD, RECOMPUTE, schedule
from ..packing.shards import contiguous
from .chunk_plan import Home
from .chunked import Chunk, chunks_of
from .kv_store import store_bytes
from .plan import AttentionPlan
from .ring import ring_plan

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
    todo = schedule(sizes, keep).tolist() if operations is None else _checked(operations, sizes)
    _refuse_dropout(model)
    plans = [
        plan for group in np.split(np.arange(len(batches)), np.cumsum(sizes)[:-1]) for plan in _plans(batches, group)
    ]
    _bounded(model, plans, todo, max_store_bytes)
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
                _done(plans[slot])
            elif operation == FORWARD and slot in again:
                _keys_only(model, batches[slot], plans[slot])
            else:
                graphs[slot] = _loss(model, batches[slot], plans[slot], loss, reduction, world)
                losses[slot] = graphs[slot].detach()
    return losses


def group_sizes(batches: list[Any]) -> list[int]:
    """How many batches follow each other as chunks of one document; 1 where a batch stands alone."""
    sizes, at = [], 0
    while at < len(batches):
        count = (batches[at].chunk or (0, 1))[1]
        group = batches[at : at + count]
        if count > 1 and [batch.chunk for batch in group] != [(i, count) for i in range(count)]:
            raise ValueError(
                f"The {count} chunks of a document run on one rank one after another; got {[b.chunk for b in group]} from "
                f"micro-batch {at} on. Pass all micro-batches of a step, in order."
            )
        if count > 1:
            _one_document(group)
        sizes.append(count)
        at += count
    if not sizes:
        raise ValueError("run_chunks needs at least one micro-batch; got none.")
    return sizes


def _one_document(group: list[Any]) -> None:
    expected = int(group[0].starts[0])
    for batch in group:
        if (batch.documents[1:] >= 0).any() or int(batch.starts[0]) != expected:
            raise ValueError(
                f"A dependent chunk is one piece of a document and begins where the one before ends, at token {expected}; got "
                f"documents {batch.documents.tolist()}, the first from token {int(batch.starts[0])} on. Pass the batches of "
                f"recipe('chunkflow') as they are."
            )
        expected += int(batch.cu_seqlens[1])


def _checked(operations: npt.ArrayLike, sizes: list[int]) -> list[list[int]]:
    """Operations as a list, if they are exact for these groups."""
    todo = np.asarray(operations, dtype=np.int64).reshape(-1, 2)
    total = sum(sizes)
    when = np.full((3, total), -1)
    valid = len(todo) and todo.min() >= 0 and todo[:, 0].max() <= BACKWARD and todo[:, 1].max() < total
    if valid:
        when[todo[:, 0], todo[:, 1]] = np.arange(len(todo))
        once = len(np.unique(todo, axis=0)) == len(todo) and (when[[FORWARD, BACKWARD]] >= 0).all()
        again = np.where(when[RECOMPUTE] < 0, when[FORWARD], when[RECOMPUTE])
        inside = np.repeat(np.cumsum(sizes) - sizes, sizes)[1:] < np.arange(1, total)
        order = (np.diff(when[FORWARD]) > 0) & (np.diff(when[BACKWARD]) < 0)
        valid = once and (when[FORWARD] <= again).all() and (again < when[BACKWARD]).all() and order[inside].all()
    if not valid:
        raise ValueError(
            f"Operations run each of the {total} micro-batches forward and backward once, a document's chunks (groups of "
            f"{sizes}) forward in ascending and backward in descending order, recomputed in between if at all; got "
            f"{''.join('FRB?'[min(max(o, 0), 3)] + str(s) + ' ' for o, s in todo[:64].tolist())}. Pass "
            f"plan.operations(rank) of this rank."
        )
    return todo.tolist()


def _plans(batches: list[Any], group: np.ndarray) -> list[Any]:
    """What each batch of a group attends under."""
    first = batches[group[0]]
    if len(group) == 1:
        return [first.plan if first.plan is not None else _alone(first)]
    return list(chunks_of([_home(batches[slot]) for slot in group], tuple(first.cp_ranks), first.cp_rank))


def _alone(batch: Any) -> AttentionPlan:
    _refuse_unplanned(batch)
    return ring_plan(contiguous(batch.cu_seqlens[: batch.num_docs + 1].numpy(force=True), 1), tuple(batch.cp_ranks), 0)


def _home(batch: Any) -> Home:
    cu = batch.cu_seqlens[: batch.num_docs + 1].numpy(force=True).astype(np.int64)
    if batch.plan is None:
        _refuse_unplanned(batch)
        return Home.whole(cu)
    if not isinstance(batch.plan, AttentionPlan):
        raise ValueError(
            f"Earlier chunks of a document reach the others by a ring; got a {type(batch.plan).__name__}. Use "
            f"recipe('chunkflow', shard='zigzag', attend='ring')."
        )
    return Home(cu_seqlens=cu, offsets=batch.plan.home_offsets, intervals=batch.plan.home)


def _refuse_unplanned(batch: Any) -> None:
    if batch.cp_size > 1:
        raise ValueError(
            f"A micro-batch on {batch.cp_size} ranks needs a plan; got none. Use recipe('chunkflow', shard='zigzag', "
            f"attend='ring')."
        )


def _refuse_dropout(model: Any) -> None:
    """A chunk is run twice and must come out the same."""
    found = {
        name: module.p
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.training and module.p > 0
    }
    attention = getattr(getattr(model, "module", model).config, "attention_dropout", 0.0) or 0.0
    if model.training and attention > 0:
        found["attention_dropout"] = attention
    if found:
        listed = ", ".join(f"{name}={p}" for name, p in found.items())
        raise ValueError(
            f"Chunks are computed again for backward, so there can be no dropout; got {listed}. Set it to 0."
        )


def _bounded(model: Any, plans: list[Any], todo: list[list[int]], limit: int | None) -> None:
    """ValueError if the stores that are there at the same time need more than `limit` bytes."""
    if limit is None:
        return
    parameter = next(model.parameters())
    device = parameter.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype
    config = getattr(model, "module", model).config
    held = most = 0
    for operation, slot in todo:
        plan = plans[slot]
        if isinstance(plan, Chunk) and plan.first_row == 0 and operation != RECOMPUTE:
            held += (1 if operation == FORWARD else -1) * store_bytes(config, plan.store.rows, dtype)
            most = max(most, held)
    if most > limit:
        raise ValueError(
            f"Keys, values and their gradients of documents in chunks need {most} bytes on this rank, and "
            f"max_store_bytes={limit}. Raise it, spread the chunks over more ranks (cp), or bound the documents' length."
        )


def _keys_only(model: Any, batch: Any, plan: Any) -> None:
    arguments = {name: value for name, value in batch.replace(plan=plan).to_hf("sum").items() if name not in LOSS}
    with torch.no_grad():
        model(**arguments, logits_to_keep=1)


def _loss(model: Any, batch: Any, plan: Any, loss: Any, reduction: str, world: int | None) -> Tensor:
    arguments = batch.replace(plan=plan).to_hf(reduction, world)
    if loss is None:
        return model(**arguments).loss
    return loss(model(**{name: value for name, value in arguments.items() if name not in LOSS}), batch)


def _done(plan: Any) -> None:
    if isinstance(plan, Chunk) and plan.first_row == 0:
        plan.store.clear()
