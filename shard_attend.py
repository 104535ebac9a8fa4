"""Shard and attend: what the ranks of a pack hold, and how they attend, by the names of a recipe.

As ``samplers/solve.py`` is for pack and place: each name is a planner of its own, and here is only which. Ulysses stands around
all of them, see ``Recipe.trading``: the ranks of these functions may be groups that hold one shard between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .attention.blocks import Blocks, Placement, place
from .packing.cost import SEVEN_B
from .packing.dacp import dacp_shards
from .packing.dispatch import dispatch
from .packing.dispatch_joint import joint
from .packing.mask_kinds import causal
from .packing.masks import Mask
from .packing.mixed import mixed
from .packing.sharding_choice import ShardCost, adaptive
from .packing.shards import Shards, contiguous, striped, zigzag

if TYPE_CHECKING:
    from .choices import Recipe

# How a pack is sharded, and the attention that fits it.
PLANS = ("ring", "direct", "gather")
MASKED = ("groupcast", "tap", "blocks")  # attention under any mask
PLACED = (*PLANS, "groupcast", "tap")
ATTENDS = {
    "zigzag": (*PLACED, "ulysses", "none"),
    "zigzag_sequence": (*PLACED, "ulysses", "none"),
    "contiguous": (*PLACED, "ulysses", "none"),
    "striped": (*PLACED, "ulysses", "none"),
    "adaptive": (*PLACED, "none"),
    "mixed": (*PLACED, "none"),
    "dacp": (*PLANS, "groupcast", "none"),  # what is decided of one pack is not known of a pool's others
    "dispatch": (*PLACED, "none"),
    "joint": (*PLACED, "none"),
    "blocks": ("blocks", "groupcast", "none"),
    "whole": ("none",),
}
SEVEN_B_SHARDS = ShardCost.of(SEVEN_B, bytes_per_second=50e9)


def placed_blocks(
    cu_seqlens: np.ndarray, cp_size: int, max_tokens: int | None, mask: Mask | None, options: Blocks | None
) -> tuple[Mask, Placement]:
    """The mask of a pack (None: causal within each document), and where its blocks lie."""
    known = causal(np.diff(cu_seqlens)) if mask is None else mask
    return known, place(known, cp_size, max_tokens=max_tokens, options=options)


def shards_by(
    recipe: Recipe,
    cu_seqlens: np.ndarray,
    cp_size: int,
    decision: np.ndarray | None,
    max_tokens: int | None,
    mask: Mask | None,
) -> Shards:
    """Which tokens of a pack each of ``cp_size`` ranks holds, by the recipe's rule; ``decision``: from ``Recipe.decide``."""
    if decision is not None:
        return dacp_shards(cu_seqlens, decision, cp_size)
    if recipe.shard in ("contiguous", "whole"):
        return contiguous(cu_seqlens, cp_size)
    if recipe.shard == "striped":
        return striped(cu_seqlens, cp_size)
    if recipe.shard == "adaptive":
        return adaptive(cu_seqlens, cp_size, recipe.shard_cost or SEVEN_B_SHARDS)
    if recipe.shard == "blocks":
        return placed_blocks(cu_seqlens, cp_size, max_tokens, mask, recipe.blocks)[1].shards
    if recipe.shard in ("dispatch", "joint"):
        deal = dispatch if recipe.shard == "dispatch" else joint
        return deal(cu_seqlens if mask is None else mask, cp_size, max_tokens=max_tokens)
    if recipe.shard == "mixed":
        return mixed(cu_seqlens, cp_size, recipe.shard_cost or SEVEN_B_SHARDS, max_tokens=max_tokens)
    return zigzag(cu_seqlens, cp_size, per="sequence" if recipe.shard == "zigzag_sequence" else "document")


def attention_between(recipe: Recipe, shards: Shards, ranks: tuple[int, ...], cp_rank: int, mask: Mask | None) -> Any:
    """The plan by which ranks that hold these shards attend, on rank ``ranks[cp_rank]``; None where the recipe has none."""
    if recipe.attend in ("ring", "direct"):
        from .attention.ring import ring_plan

        return ring_plan(shards, ranks, cp_rank, forward=recipe.attend == "ring")
    if recipe.attend == "gather":
        from .attention.gather import gather_plan

        return gather_plan(shards, ranks, cp_rank)
    if recipe.attend == "groupcast":
        from .attention.groupcast import groupcast_plan

        return groupcast_plan(shards, ranks, cp_rank, mask=mask, overlap=recipe.overlap)
    if recipe.attend == "tap":
        return recipe.pooled([shards], ranks, cp_rank, [mask])
    return None
