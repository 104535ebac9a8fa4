"""DCP: attention placed block by block over all ranks of a slot (SOSP'25), as an `AttentionPlan`.

The domain is all of DP x CP, with the packs of all replicas end to end. `packing/partition.py` decides who holds which tokens and who
computes which block of the mask, `packing/divisions.py` in which stage; here both become tiles, and `routing.direct` says what
moves: keys and values to whoever computes with them, queries where a rank computes for queries that it does not hold, (O, LSE) and
gradients back. Rows that no pair of a tile needs do not travel, so less is moved than whole blocks.

Where tokens are held is part of the plan: `place` first, give each rank its `shards.positions(rank)`, then `block_plan`.

Decided here: tiles of a rank and stage that join are one, since kernels like few and large ones.

Cost: a second at the most for 128K tokens on 16 ranks, mostly that of `place`.

    >>> import numpy as np
    >>> from equipoise.packing.mask_kinds import shared_question, shares_of_questions
    >>> mask = shared_question(*shares_of_questions(np.array([6000, 2000, 4000])))
    >>> placed = place(mask, 4, max_tokens=3600)
    >>> plan = block_plan(mask, placed, ranks=(0, 1, 2, 3))
    >>> plan.check(mask)
    >>> plan.tokens, plan.tokens_of(2) == len(placed.shards.positions(2))
    (12000, True)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..packing.divisions import stages
from ..packing.mask_areas import blocks
from ..packing.masks import Mask
from ..packing.partition import Blocks as Blocks
from ..packing.partition import Placement as Placement
from ..packing.partition import place as place
from . import bands
from .forwarding import forwarded, nodes_of
from .plan import AttentionPlan, Int64
from .routing import direct, part_of


def block_plan(
    mask: Mask,
    placed: Placement,
    ranks: Sequence[int],
    *,
    divisions: int = 4,
    rank: int | None = None,
    devices_per_node: int | None = None,
) -> AttentionPlan:
    """The plan of a placement. mask: the one that was placed. ranks: rank numbers of the domain, in its order.

    divisions: stages after the first. rank: index of the rank whose part is wanted; None: all of it. devices_per_node: ranks of a node,
    by their numbers in the run, which rows enter once to be forwarded inside (forwarding.py); None: they come straight from home.
    """
    shards, graph = placed.shards, placed.graph
    if len(ranks) != shards.cp_size:
        raise ValueError(f"This placement is over {shards.cp_size} ranks; got {len(ranks)} ranks {tuple(ranks)}.")
    if divisions < 1:
        raise ValueError(f"What is not at home is computed in at least one division; got divisions={divisions}.")
    tokens = int(shards.cu_seqlens[-1])
    tiles = _tiles(mask, placed, stages(placed, divisions), tokens)
    where = shards.offsets, shards.segments, tokens
    if devices_per_node is None:
        moves, returns = direct(tiles, *where, head_groups=graph.groups)
    else:
        nodes = nodes_of(ranks, devices_per_node)
        tiles, moves, returns = forwarded(tiles, *where, nodes=nodes, head_groups=graph.groups)
    plan = AttentionPlan(
        ranks=tuple(ranks),
        tokens=tokens,
        home_offsets=shards.offsets,
        home=shards.segments,
        tiles=_joined(tiles, tokens, graph.groups),
        moves=moves,
        returns=returns,
        head_groups=graph.groups,
    )
    return plan if rank is None else part_of(plan, rank)


def _tiles(mask: Mask, placed: Placement, stage: Int64, tokens: int) -> Int64:
    """int64[m, 8]: the mask cut along the blocks, each piece for its unit's owner and stage, in every head group."""
    graph, n = placed.graph, len(placed.home)
    block, pieces = blocks(mask.tiles_of_pack(), graph.edges)
    unit = np.searchsorted(graph.q * n + graph.k, block[:, 0] * n + block[:, 1])
    owner, when = (values.reshape(graph.groups, -1)[:, unit] for values in (placed.owner, stage))
    tiles = np.column_stack([owner.ravel(), when.ravel(), np.tile(pieces, (graph.groups, 1))])
    tiles[:, 2:6] += np.repeat(np.arange(graph.groups) * tokens, len(pieces))[:, None]
    return tiles


def _joined(tiles: Int64, tokens: int, groups: int) -> Int64:
    """Tiles of a rank, stage and head group that join in one; by rank, stage and rows."""
    num, group = int(tiles[:, 1].max(initial=0)) + 1, tiles[:, 2] // max(tokens, 1)
    # Ranks, stages and groups lie apart, with a gap between them, so that no tile joins across.
    lot = (tiles[:, 0] * num + tiles[:, 1]) * groups + group
    spread = tiles[:, 2:].copy()
    spread[:, :4] += (lot * (tokens + 1) - group * tokens)[:, None]
    joined = bands.join(spread)
    lot = joined[:, 0] // (tokens + 1)
    joined[:, :4] += (lot % groups * tokens - lot * (tokens + 1))[:, None]
    at = lot // groups
    whole = np.column_stack([at // num, at % num, joined])
    return whole[np.lexsort((whole[:, 4], whole[:, 2], whole[:, 1], whole[:, 0]))]
