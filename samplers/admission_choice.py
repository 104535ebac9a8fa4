"""Admission choice: the items and the admission that a sampler's options ask for.

An index is read in an order of the seed's, a stream in its own; documents of a group are one item; recipes with queues hold
long documents back. What becomes of the admitted is the solver's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..packing.queues import WlbQueues
from .admission import Admission
from .carry import QueuedAdmission
from .groups import GroupedItems
from .items import Items
from .mixture import MixedOrder
from .order import Order, Shuffled
from .stream import StreamAdmission
from .stream_items import StreamItems
from .unindexed import Unindexed

if TYPE_CHECKING:
    from ..packing.lengths import Lengths
    from ..recipes import Recipe
    from .batch_sampler import BalancedBatchSampler
    from .cluster import Cluster


def items_of(
    index: Lengths | Unindexed, recipe: Recipe, cluster: Cluster, too_long: str, capacity: int
) -> Items | GroupedItems | StreamItems:
    """What can be admitted under this recipe. Raises ValueError where recipe and groups do not fit."""
    multiple = int(cluster.multiple(cluster.cp)) if recipe.one_size else 1
    if isinstance(index, Unindexed):
        return StreamItems(capacity=capacity, too_long=too_long, multiple=multiple)
    if index.group is not None and recipe.cuts:
        raise ValueError(f"recipe {recipe.name!r} cuts documents, and documents of a group stay together and whole")
    items = Items.of(index, capacity=capacity, too_long=too_long, multiple=multiple)
    return items if index.group is None else GroupedItems.of(items)


def admission_of(sampler: BalancedBatchSampler) -> Admission | StreamAdmission | QueuedAdmission:
    """Which of the sampler's items enter which step. Raises ValueError where step size, order and documents do not fit."""
    base = _of_stream(sampler) if isinstance(sampler.index, Unindexed) else _of_index(sampler)
    if not sampler.queued:
        return base
    assert isinstance(sampler.recipe.options, WlbQueues)
    return QueuedAdmission(base=base, queues=sampler.recipe.options, cluster=sampler.cluster, cost=sampler.cost)


def _of_stream(sampler: BalancedBatchSampler) -> StreamAdmission:
    assert isinstance(sampler.index, Unindexed) and isinstance(sampler.items, StreamItems)
    if sampler.order == "largest_first":
        raise ValueError("order='largest_first' opens with the longest document, and a stream's is not known")
    return StreamAdmission(
        items=sampler.items,
        more=sampler.index.more,
        num_parts=sampler.index.num_parts,
        step_size=sampler.step_size,
        seed=sampler.seed,
        last=sampler.last,
    )


def _of_index(sampler: BalancedBatchSampler) -> Admission:
    assert not isinstance(sampler.items, StreamItems)
    return Admission(
        items=sampler.items,
        order=_order(sampler.items, sampler.order == "largest_first", sampler.seed, sampler.shuffle),
        step_size=sampler.step_size,
        capacity=sampler.recipe.longest(sampler.cluster),
        seed=sampler.seed,
        last=sampler.last,
        count_targets=sampler.count_targets,
    )


def _order(items: Items | GroupedItems, longest_first: bool, seed: int, shuffle: bool) -> Order:
    """The endless stream of these items."""
    blend = items.lengths.blend
    if blend is None:
        opening = items.longest_item if longest_first else None
        return Shuffled(size=len(items), seed=seed, shuffle=shuffle, opening=opening)
    if longest_first:
        raise ValueError("order='largest_first' opens with the longest document, and a mixture has an order of its own")
    return MixedOrder(items=items, blend=blend, seed=seed, shuffle=shuffle)  # type: ignore[arg-type]  # it refuses groups
