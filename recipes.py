"""Recipes: one choice for each of the four decisions (pack, place, shard, attend), by name or mixed.

A recipe solves a window of documents into a ``StepPlan`` (pack, place), cuts a pack into ``Shards`` (shard) and says how its
ranks attend (attend); which choices fit each other, ``choices.py`` knows.

    >>> from equipoise import recipe
    >>> recipe("vrsp")
    Recipe(name='vrsp', pack='best_fit', place='vrsp', shard='contiguous', attend='ulysses', options=None, shard_cost=None, ulysses=None, tap=None, blocks=None, overlap=None)
    >>> recipe("static", pack="concat", attend="ulysses").name
    'static+pack=concat+attend=ulysses'
    >>> recipe("static", ulysses=2).name                # USP: a ring between pairs of ranks that trade heads
    'static+ulysses=2'

| recipe | pack | place | shard | attend |
|---|---|---|---|---|
| ``static``: no balancing, the baseline | best fit to a fixed length | in order, shuffled | zigzag | ring |
| ``wlb``: WLB-LLM | variable length, by workload, queues | VRSP | adaptive | direct |
| ``chunkflow``: ChunkFlow | chunks, dependent and standalone | rounds of chunks | whole | KV store: ``run_chunks`` |
| ``skrull``: Skrull | GDS | GDS | DACP | ring |
| ``vrsp``: Libra | best fit to a fixed length | VRSP | contiguous | Ulysses |
| ``libra``: Libra | best fit to a fixed length | VRSP over pools | contiguous | TAP over pools |
| ``flexsp``: FlexSP | sequences | SP groups of unequal size | contiguous | Ulysses |
| ``dynamic_cp``: Megatron-LM | sequences | CP groups of unequal size | zigzag | ring |
| ``dcp``: DCP | best fit to a fixed length | in order, shuffled | blocks, with their attention | blocks |
| ``magi``: MagiAttention | best fit to a fixed length | in order, shuffled | chunks dealt out by area | group cast |

WLB-LLM places its packs in order, since they are alike. Where one long document is worth several packs they are not, and
in order is worse than no balancing at all: without queues, waiting per slot, 1.05–1.33 of ``static``'s seconds on three of
four traces, against 0.68–0.89 placed by cost (``benchmarks/recipes.py``). It gathers KV before it computes; sent straight from
home in stages the same rows are hidden behind the tiles, and a ring would carry half as many again on 8 ranks, twice as many
on 16 (``benchmarks/traffic.py``). Gather where launches cost more than transfers.

``ulysses`` puts Ulysses inside any of them (USP, LoongTrain, Megatron-LM's a2a+p2p): that many neighbours of a CP group, best
those of a node, hold one shard between them and share the heads, and ring, direct sends or gather join the shards.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .attention.blocks import Blocks
from .attention.groupcast import Overlap
from .attention.tiles import Tap
from .choices import Options, Recipe
from .packing.lengths import Lengths
from .packing.queues import WlbQueues
from .packing.sharding_choice import ShardCost
from .samplers.batch_sampler import BalancedBatchSampler
from .samplers.plan import StepPlan
from .samplers.solve import Cost, Vrsp

NAMED = {
    "static": Recipe(name="static", pack="best_fit", place="in_order", shard="zigzag", attend="ring"),
    "wlb": Recipe(name="wlb", pack="wlb", place="vrsp", shard="adaptive", attend="direct", options=WlbQueues()),
    "chunkflow": Recipe(name="chunkflow", pack="chunks", place="chunkflow", shard="whole", attend="none"),
    "skrull": Recipe(name="skrull", pack="gds", place="gds", shard="dacp", attend="ring"),
    "vrsp": Recipe(name="vrsp", pack="best_fit", place="vrsp", shard="contiguous", attend="ulysses"),
    "flexsp": Recipe(name="flexsp", pack="sequences", place="flexsp", shard="contiguous", attend="ulysses"),
    "dynamic_cp": Recipe(name="dynamic_cp", pack="sequences", place="dynamic_cp", shard="zigzag", attend="ring"),
    "libra": Recipe(
        name="libra",
        pack="best_fit",
        place="vrsp",
        shard="contiguous",
        attend="tap",
        options=Vrsp(pool_size=None),
    ),
    "dcp": Recipe(name="dcp", pack="best_fit", place="in_order", shard="blocks", attend="blocks"),
    "magi": Recipe(name="magi", pack="best_fit", place="in_order", shard="dispatch", attend="groupcast"),
}


def choose(recipe: Recipe | str) -> Recipe:
    """A recipe as it is, or the named one."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in NAMED:
        raise ValueError(f"recipe must be one of {', '.join(NAMED)}; got {recipe!r}")
    return NAMED[recipe]


def recipe(
    name: str,
    *,
    pack: str | None = None,
    place: str | None = None,
    shard: str | None = None,
    attend: str | None = None,
    options: Options | None = None,
    shard_cost: ShardCost | None = None,
    ulysses: int | None = None,
    tap: Tap | None = None,
    blocks: Blocks | None = None,
    overlap: Overlap | None = None,
) -> Recipe:
    """A named recipe, or a mix that starts from one. Raises ValueError for an unknown name or halves that do not fit."""
    base = choose(name)
    choices = {"pack": pack, "place": place, "shard": shard, "attend": attend, "ulysses": ulysses}
    changed = {key: value for key, value in choices.items() if value is not None and value != getattr(base, key)}
    label = name + "".join(f"+{key}={value}" for key, value in changed.items())
    kept = base.options if base.pack == changed.get("pack", base.pack) else None
    own = {"shard_cost": shard_cost, "tap": tap, "blocks": blocks, "overlap": overlap}
    return replace(base, name=label, options=options or kept, **own, **changed)  # type: ignore[arg-type]


def plan(
    lengths: Lengths | np.ndarray,
    recipe: Recipe | str,
    *,
    dp: int,
    cp: int = 1,
    max_tokens_per_rank: int,
    sync: str = "step",
    slots: int | None = None,
    seed: int = 0,
    too_long: str = "error",
    cost: Cost | None = None,
    speeds: tuple[float, ...] | None = None,
) -> StepPlan:
    """One optimizer step of all these documents: from lengths to a ``StepPlan``, without torch.

    It can be checked, measured, simulated, saved and loaded. Nothing is held back for a later step, there being none.

        >>> step = plan(np.array([700, 90, 400, 300, 80, 30]), "vrsp", dp=2, max_tokens_per_rank=1000)
        >>> step.check(); step.packs.tokens.tolist()
        [1000, 600]
    """
    sampler = BalancedBatchSampler(
        lengths if isinstance(lengths, Lengths) else Lengths.from_array(lengths),
        choose(recipe),
        max_tokens_per_rank=max_tokens_per_rank,
        dp=dp,
        cp=cp,
        documents_per_step=1 << 40,  # more than there are, also once documents are split
        slots=slots,
        sync=sync,
        seed=seed,
        too_long=too_long,
        cost=cost,
        speeds=speeds,
        evaluation=True,
    )
    return sampler.plan(0)
