"""Recipes: one choice for each of the four decisions (pack, place, shard, attend), by name or mixed.

The only module that knows all four. A recipe solves a window of documents into a ``StepPlan`` (pack, place), cuts a
pack into ``Shards`` (shard) and says how its ranks attend (attend).

    >>> from equipoise import recipe
    >>> recipe("vrsp")
    Recipe(name='vrsp', pack='best_fit', place='vrsp', shard='contiguous', attend='ulysses', options=None, shard_cost=None, ulysses=None, tap=None, blocks=None)
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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import numpy as np

from .attention.blocks import Blocks, Placement, block_plan, place
from .attention.plan import AttentionPlan
from .attention.tiles import Tap
from .packing.cost import SEVEN_B, CostModel, cost_units
from .packing.dacp import dacp, dacp_costs, dacp_shards
from .packing.dispatch import dispatch
from .packing.dispatch_joint import joint
from .packing.lengths import Lengths
from .packing.mask_kinds import causal
from .packing.masks import Mask
from .packing.mixed import mixed
from .packing.packs import Spans
from .packing.queues import WlbQueues
from .packing.sharding_choice import ShardCost, adaptive
from .packing.shards import Shards, contiguous, divided, striped, zigzag
from .samplers.batch_sampler import BalancedBatchSampler
from .samplers.dynamic_cp import DynamicCp
from .samplers.flexsp import FlexSp
from .samplers.order import Window
from .samplers.plan import Cluster, SharedAttention, StepPlan
from .samplers.solve import ChunkFlow, Cost, Vrsp, solve

# What packs, and the placements that fit it.
PLACES = {
    "best_fit": ("in_order", "vrsp"),
    "concat": ("in_order", "vrsp"),
    "wlb": ("in_order", "vrsp"),
    "chunks": ("chunkflow",),
    "gds": ("gds",),
    "sequences": ("flexsp", "dynamic_cp"),
}
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
Options = WlbQueues | ChunkFlow | FlexSp | DynamicCp | Vrsp
# By what packs, or else by what places.
OPTIONS: dict[str, type] = {
    "wlb": WlbQueues,
    "chunkflow": ChunkFlow,
    "flexsp": FlexSp,
    "dynamic_cp": DynamicCp,
    "vrsp": Vrsp,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One choice per decision; checked when made.

    Args:
        pack: ``best_fit`` (decreasing, to the cap), ``concat`` (in order, documents cut at the pack's edge), ``wlb``
            (variable length, by workload), ``chunks``, ``gds`` or ``sequences`` (packed as they are placed).
        place: ``in_order`` (shuffled, dealt out), ``vrsp``, ``chunkflow``, ``gds``, ``flexsp``, ``dynamic_cp``.
        shard: ``zigzag`` per document, ``zigzag_sequence``, ``contiguous``, ``striped``, ``adaptive`` (zigzag per document or
            per sequence, by kernel time), ``mixed`` (each document over as many ranks as pays), ``dacp`` (documents whole
            where that is quicker), ``dispatch`` (equal chunks dealt out by area), ``joint`` (balanced with as few bytes as we
            find), ``blocks`` (as DCP places them), or ``whole`` (no context parallelism).
        attend: ``ring`` (KV passed on from rank to rank), ``direct`` (straight from home to who needs it, in as many stages),
            ``gather`` (the same in one stage), ``groupcast`` (in stages chosen by cost), ``tap`` (tiles
            migrate between the CP groups of a pool, ``Vrsp(pool_size=…)``), ``blocks`` (on whichever rank they were placed: DCP,
            whose domain is all ranks of a slot: ``dp=1``), ``ulysses``, or ``none`` (the batch carries no plan: bring your own attention).
        options: ``WlbQueues`` (documents may wait for company; None: they never do), ``ChunkFlow``, ``FlexSp`` or
            ``DynamicCp``, ``Vrsp`` (None: their defaults).
        shard_cost: what attention over a pack costs a rank, for ``adaptive`` and ``mixed``; None: that of a dense 7B over
            InfiniBand.
        ulysses: neighbours that trade tokens for heads inside ``ring``, ``direct`` or ``gather``, at most as many as there are
            query heads; None: none do. They must divide ``cp``; where groups are planned (``flexsp``, ``dynamic_cp``), a group
            whose size they do not divide takes the greatest common divisor.
        tap: how attention is shared in a pool, for ``tap``; None: the defaults.
        blocks: how blocks are cut and placed, for ``blocks``; None: the defaults.
    """

    name: str
    pack: str
    place: str
    shard: str
    attend: str
    options: Options | None = None
    shard_cost: ShardCost | None = None
    ulysses: int | None = None
    tap: Tap | None = None
    blocks: Blocks | None = None

    def __post_init__(self) -> None:
        _fit("pack", self.pack, "place", self.place, PLACES)
        _fit("shard", self.shard, "attend", self.attend, ATTENDS)
        wanted = OPTIONS.get(self.pack, OPTIONS.get(self.place))
        if self.options is not None and (wanted is None or not isinstance(self.options, wanted)):
            takes = f"options of type {wanted.__name__}" if wanted else "no options"
            raise ValueError(
                f"pack={self.pack!r}, place={self.place!r} take {takes}; got {type(self.options).__name__}"
            )
        if self.tap is not None and self.attend != "tap":
            raise ValueError(f"tap says how attend='tap' shares attention; got attend={self.attend!r}")
        if self.blocks is not None and self.shard != "blocks":
            raise ValueError(f"blocks says how shard='blocks' places them; got shard={self.shard!r}")
        if self.ulysses is not None and (self.ulysses < 1 or self.attend not in PLANS):
            raise ValueError(
                f"ulysses is a number of ranks, at least 1, inside attend={' or '.join(map(repr, PLANS))}; got "
                f"ulysses={self.ulysses}, attend={self.attend!r}"
            )

    @property
    def one_size(self) -> bool:
        """Whether every pack is run by a whole CP group and holds at most its cap."""
        return self.place not in ("flexsp", "dynamic_cp", "chunkflow")

    @property
    def layout(self) -> str:
        """The shard rule, and over what where that is not ranks."""
        return self.shard if self.ulysses in (None, 1) else f"{self.shard} in groups of {self.ulysses}"

    def trading(self, cp_size: int) -> int:
        """How many neighbours of a group of ``cp_size`` ranks hold one shard between them and trade heads."""
        return gcd(self.ulysses or 1, cp_size)

    def replicas_of_pool(self, cluster: Cluster) -> int:
        """Neighbouring replicas that share the attention of the packs they run in a slot."""
        return self.options.pool(cluster.dp) if self.attend == "tap" and isinstance(self.options, Vrsp) else 1

    @property
    def cuts(self) -> bool:
        """Whether packing may cut a document that fits."""
        return self.pack in ("concat", "chunks")

    @property
    def places_slowly(self) -> bool:
        """Whether laying a pack out takes so long that it is kept for packs of the same lengths and masks."""
        return self.attend == "blocks"

    @property
    def slow(self) -> bool:
        """Whether planning a step takes seconds rather than milliseconds: a MILP does."""
        return isinstance(self.options, FlexSp) and self.options.solver != "greedy"

    def longest(self, cluster: Cluster) -> int:
        """Tokens of the longest document that this recipe can take whole."""
        if self.place == "chunkflow":
            return 1 << 40
        ranks = cluster.cp if self.one_size else cluster.num_ranks
        if isinstance(self.options, FlexSp):
            ranks = self.options.largest_group(cluster.num_ranks)
        multiple = int(cluster.multiple(ranks))
        return cluster.max_tokens_per_rank * ranks // multiple * multiple

    def check_cluster(self, cluster: Cluster) -> None:
        """Refuse ranks that this recipe cannot serve, before any of them starts."""
        if self.shard == "whole" and cluster.cp > 1:
            raise ValueError(f"shard='whole' needs cp=1, got cp={cluster.cp}; use shard='zigzag' or 'contiguous'")
        if cluster.pad_tp and (self.shard != "zigzag" or self.cuts):
            raise ValueError(
                f"pad_tp lays whole documents out for Transformer Engine's zigzag; recipe {self.name!r} has shard={self.shard!r}, "
                f"pack={self.pack!r}: use shard='zigzag' and a packing that cuts none"
            )
        if self.one_size and self.ulysses is not None and cluster.cp % self.ulysses:
            raise ValueError(f"ulysses={self.ulysses} must divide cp; got cp={cluster.cp}")
        if cluster.pad_tp and self.ulysses not in (None, 1):
            raise ValueError(
                f"pad_tp lays documents out for Transformer Engine's zigzag over single ranks, and ulysses={self.ulysses} divides "
                f"them over groups: leave one of them out"
            )
        if isinstance(self.options, Vrsp) and cluster.dp % self.options.pool(cluster.dp):
            raise ValueError(f"pools of {self.options.pool_size} replicas must divide dp; got dp={cluster.dp}")
        if cluster.speeds is not None and self.place != "vrsp":
            raise ValueError(f"speeds are balanced by place='vrsp'; recipe {self.name!r} has place={self.place!r}")

    def check_masks(self, kind: str, pad_tp: bool) -> None:
        """Refuse masks that this recipe would take for causal ones."""
        if self.cuts:
            raise ValueError(
                f"recipe {self.name!r} cuts documents as causal ones (pack={self.pack!r}), and these have {kind} masks: choose a "
                f"packing that keeps them whole"
            )
        if self.attend not in (*MASKED, "none"):
            raise ValueError(
                f"attend={self.attend!r} computes causal attention, and these documents have {kind} masks: use attend="
                f"{' or '.join(map(repr, MASKED))}, or 'none' and batch.pack_mask"
            )
        if pad_tp:
            raise ValueError(f"pad_tp pads causal documents, and these have {kind} masks: leave it out")

    def solve(self, window: Window, cluster: Cluster, cost: Cost, *, order: str = "shuffle") -> StepPlan:
        """Pack and place one step; ``order`` of its slots: see ``solve``.

        Raises ValueError where fixed slots cannot hold the step.
        """
        made = solve(
            window,
            cluster,
            cost,
            name=self.name,
            pack=self.pack,
            place=self.place,
            options=self.options,
            slot_order=order,
        )
        return self._shared(made, cost) if self.attend == "tap" and self.one_size else made

    def _shared(self, made: StepPlan, cost: Cost) -> StepPlan:
        """The step as its pools run it: attention is all their ranks'."""
        tokens, replicas, tap = made.packs.spans.tokens, self.replicas_of_pool(made.cluster), self.tap or Tap()
        attention = np.maximum(made.span_cost - cost_units(cost, np.zeros_like(tokens), tokens), 0)
        return replace(
            made,
            largest_group=made.largest_group * replicas,
            shared=SharedAttention(
                replicas=replicas,
                slack=tap.tolerance,
                block=tap.block,
                head_groups=tap.head_groups,
                span_cost=attention,
            ),
        )

    def decide(self, spans: Spans, cp_size: int, cluster: Cluster, cost: Cost) -> np.ndarray | None:
        """What sharding a pack by its cost decides, for ``shards``: with ``dacp`` the rank that holds each document whole."""
        if self.shard != "dacp" or cp_size == self.trading(cp_size):
            return None
        per_row = cost.seconds_per_row if isinstance(cost, CostModel) else 0.0
        inside = self.trading(cp_size)
        whole, split, sent = dacp_costs(spans.tokens, spans.pairs, cp_size // inside, cost, per_row)
        most = cluster.max_tokens_per_rank * inside
        return dacp(spans.tokens, whole, split, sent, cp_size=cp_size // inside, max_tokens_per_rank=most)

    def laid_out(
        self,
        cu_seqlens: np.ndarray,
        ranks: tuple[int, ...],
        cp_rank: int,
        decision: np.ndarray | None = None,
        max_tokens: int | None = None,
        *,
        mask: Mask | None = None,
    ) -> tuple[Shards, Any]:
        """What ``shards`` and then ``attention`` give; ``blocks`` decides both at once."""
        if self.attend == "blocks":
            known, placed = self._placed(cu_seqlens, len(ranks), max_tokens, mask)
            return placed.shards, block_plan(known, placed, ranks, rank=cp_rank)
        shards = self.shards(cu_seqlens, len(ranks), decision, max_tokens, mask=mask)
        return shards, self.attention(shards, ranks, cp_rank, mask=mask)

    def _placed(
        self, cu_seqlens: np.ndarray, cp_size: int, max_tokens: int | None, mask: Mask | None
    ) -> tuple[Mask, Placement]:
        known = causal(np.diff(cu_seqlens)) if mask is None else mask
        return known, place(known, cp_size, max_tokens=max_tokens, options=self.blocks)

    def shards(
        self,
        cu_seqlens: np.ndarray,
        cp_size: int,
        decision: np.ndarray | None = None,
        max_tokens: int | None = None,
        *,
        mask: Mask | None = None,
    ) -> Shards:
        """Which tokens of a pack each rank of its CP group holds; ``decision``: from ``decide``; none holds over ``max_tokens``.

        mask: of the pack's documents, for rules that deal out by area; None: causal within each.
        """
        inside = self.trading(cp_size)
        most = None if max_tokens is None else max_tokens * inside
        shards = self._shards(cu_seqlens, cp_size // inside, decision, most, mask)
        return shards if inside == 1 else divided(shards, inside)

    def _shards(
        self,
        cu_seqlens: np.ndarray,
        cp_size: int,
        decision: np.ndarray | None,
        max_tokens: int | None,
        mask: Mask | None,
    ) -> Shards:
        if decision is not None:
            return dacp_shards(cu_seqlens, decision, cp_size)
        if self.shard in ("contiguous", "whole"):
            return contiguous(cu_seqlens, cp_size)
        if self.shard == "striped":
            return striped(cu_seqlens, cp_size)
        if self.shard == "adaptive":
            return adaptive(cu_seqlens, cp_size, self.shard_cost or SEVEN_B_SHARDS)
        if self.shard == "blocks":
            return self._placed(cu_seqlens, cp_size, max_tokens, mask)[1].shards
        if self.shard in ("dispatch", "joint"):
            deal = dispatch if self.shard == "dispatch" else joint
            return deal(cu_seqlens if mask is None else mask, cp_size, max_tokens=max_tokens)
        if self.shard == "mixed":
            return mixed(cu_seqlens, cp_size, self.shard_cost or SEVEN_B_SHARDS, max_tokens=max_tokens)
        return zigzag(cu_seqlens, cp_size, per="sequence" if self.shard == "zigzag_sequence" else "document")

    def attention(self, shards: Shards, ranks: tuple[int, ...], cp_rank: int, *, mask: Mask | None = None) -> Any:
        """The plan that ``attend`` runs on rank ``ranks[cp_rank]``; None for ``attend='none'``. mask: as ``shards`` takes it.

        Raises ValueError for ``attend='blocks'``, whose plan shards alone do not tell: see ``laid_out``.
        """
        if self.attend == "blocks":
            raise ValueError("attend='blocks' decides shards and plan at once: call laid_out")
        between = partial(self._between, mask=mask)
        inside = self.trading(len(ranks))
        if self.attend == "ulysses" or inside > 1:
            from .attention.ulysses import ulysses_plan

            if self.attend == "ulysses":
                return ulysses_plan(shards, ranks, cp_rank)
            return ulysses_plan(shards, ranks, cp_rank, degree=inside, outer=between)
        return between(shards, ranks, cp_rank)

    def _between(self, shards: Shards, ranks: tuple[int, ...], cp_rank: int, mask: Mask | None) -> Any:
        if self.attend in ("ring", "direct"):
            from .attention.ring import ring_plan

            return ring_plan(shards, ranks, cp_rank, forward=self.attend == "ring")
        if self.attend == "gather":
            from .attention.gather import gather_plan

            return gather_plan(shards, ranks, cp_rank)
        if self.attend == "groupcast":
            from .attention.groupcast import groupcast_plan

            return groupcast_plan(shards, ranks, cp_rank, mask=mask)
        if self.attend == "tap":
            return self.pooled([shards], ranks, cp_rank, [mask])
        return None

    def pooled(
        self, shards: Sequence[Shards], ranks: tuple[int, ...], rank: int, masks: Sequence[Mask | None]
    ) -> AttentionPlan:
        """The part of rank ``ranks[rank]`` in a plan of a pool, whose CP groups hold these shards; a pack without a mask is causal."""
        known = [
            causal(np.diff(pack.cu_seqlens)) if mask is None else mask for pack, mask in zip(shards, masks, strict=True)
        ]
        return (self.tap or Tap()).plan(shards, ranks, rank, known)


def _fit(first: str, chosen: str, second: str, other: str, legal: dict[str, tuple[str, ...]]) -> None:
    """Both are known, and the two halves fit. Raises ValueError."""
    seconds = dict.fromkeys(name for names in legal.values() for name in names)
    for decision, value, names in ((first, chosen, legal), (second, other, seconds)):
        if value not in names:
            raise ValueError(f"{decision} must be one of {', '.join(names)}; got {value!r}")
    if other not in legal[chosen]:
        raise ValueError(
            f"{first}={chosen!r} and {second}={other!r} do not fit: {first}={chosen!r} goes with {second}="
            f"{' or '.join(repr(name) for name in legal[chosen])}"
        )


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
) -> Recipe:
    """A named recipe, or a mix that starts from one. Raises ValueError for an unknown name or halves that do not fit."""
    base = choose(name)
    choices = {"pack": pack, "place": place, "shard": shard, "attend": attend, "ulysses": ulysses}
    changed = {key: value for key, value in choices.items() if value is not None and value != getattr(base, key)}
    label = name + "".join(f"+{key}={value}" for key, value in changed.items())
    kept = base.options if base.pack == changed.get("pack", base.pack) else None
    return replace(base, name=label, options=options or kept, shard_cost=shard_cost, tap=tap, blocks=blocks, **changed)  # type: ignore[arg-type]


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
