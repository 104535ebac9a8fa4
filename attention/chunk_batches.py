"""What a step of ChunkFlow is run from: groups of micro-batches, what each attends under, and an order that is exact.

What is decided: everything that is refused, is refused here, before a model is called: dropout (a chunk is run twice and
must come out the same), chunks that are missing or astray, orders in which gradients would be lost, a store beyond its
bound.

Cost: milliseconds a step.

    >>> [f"{'FRB'[kind]}{slot}" for kind, slot in exact([[0, 0], [0, 1], [2, 1], [1, 0], [2, 0]], [2])]
    ['F0', 'F1', 'B1', 'R0', 'B0']
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..packing.chunkflow import BACKWARD, FORWARD, RECOMPUTE
from ..packing.shards import contiguous
from .chunk_plan import Home
from .chunked import Chunk, chunks_of
from .kv_store import store_bytes
from .plan import AttentionPlan
from .ring import ring_plan


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


def exact(operations: npt.ArrayLike, sizes: list[int]) -> list[list[int]]:
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


def plans_of(batches: list[Any], sizes: list[int]) -> list[Any]:
    """What each batch attends under: the plan it carries, one made for it, or a chunk of its group's document."""
    groups = (batches[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0)))
    return [plan for group in groups for plan in _group_plans(group)]


def _group_plans(group: list[Any]) -> list[Any]:
    first = group[0]
    if len(group) == 1:
        return [first.plan if first.plan is not None else _alone(first)]
    return list(chunks_of([_home(batch) for batch in group], tuple(first.cp_ranks), first.cp_rank))


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


def refuse_dropout(model: Any) -> None:
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


def check_store(model: Any, plans: list[Any], todo: list[list[int]], limit: int | None) -> None:
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
