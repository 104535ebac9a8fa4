"""Packs of an epoch: all of them at once, for whoever keeps packs rather than trains on them as they come.

Decided here: a pack that a later document may still fill does not end with its window but is packed again with the next, so
that only the end of the epoch leaves packs part-filled. Cost: what is held is packed twice; it is little, see ``packs_of``.

    >>> from equipoise import BalancedBatchSampler, Lengths, recipe
    >>> lengths = Lengths.from_array(np.array([4, 3, 6, 7]))
    >>> options = {"max_tokens_per_rank": 10, "dp": 1, "documents_per_step": 2, "shuffle": False}
    >>> packs_of(BalancedBatchSampler(lengths, recipe("static"), **options), shortest=3).tokens.tolist()
    [10, 10]
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..packing.lengths import Lengths
from ..packing.packs import Packs, Spans
from .batch_sampler import BalancedBatchSampler


def packs_of(sampler: BalancedBatchSampler, shortest: int | None) -> Packs:
    """The packs of an epoch on one rank, in the order in which they come.

    shortest: tokens of the shortest document or piece that may come; None: each window is packed by itself. With it, what a
    later document may fill is packed again with the next window: of the packs in which one would fit the emptiest, as many
    as there are beyond those that the tokens would fill without gaps. So never more waits than best fit wastes; a document
    that few fit beside may wait for more than one window.
    """
    parts: list[Packs] = []
    held = Packs(spans=Spans.concat([]), offsets=np.zeros(1, np.int64))
    for window in sampler.windows():
        if len(held):
            spans = Spans.concat([held.spans, window.spans])
            window = replace(window, spans=spans, atom=np.arange(len(spans)))
        plan = sampler.solver(window)
        packs = plan.packs.take(plan.grid[0])
        packs = packs.take(
            np.flatnonzero(packs.spans.document[packs.offsets[:-1]] >= 0)
        )  # slots no document is left for
        if shortest is not None:
            full = _full(packs.tokens, sampler.cluster.capacity, shortest)
            packs, held = packs.take(np.flatnonzero(full)), packs.take(np.flatnonzero(~full))
        parts.append(packs)
    parts.append(held)
    offsets = np.cumsum(np.concatenate([[0], *(np.diff(part.offsets) for part in parts)]))
    return Packs(spans=Spans.concat([part.spans for part in parts]), offsets=offsets)


def _full(tokens: np.ndarray, capacity: int, shortest: int) -> np.ndarray:
    """Which packs no document can improve on: bool[p]."""
    full = capacity - tokens < shortest
    full[np.argsort(-tokens, kind="stable")[: int(tokens.sum()) // capacity]] = True
    return full


def shortest_of(lengths: Lengths, sampler: BalancedBatchSampler, too_long: str) -> int:
    """Tokens of the shortest document or piece."""
    if sampler.recipe.cuts:
        return 1
    tokens, capacity = lengths.tokens, sampler.cluster.capacity
    rest = tokens[tokens > capacity] % capacity if too_long == "split" else tokens[:0]
    return min(int(some[some > 0].min()) for some in (tokens, rest) if (some > 0).any())
