"""Choices: what there is to choose for each of the four decisions, and what fits what.

The only module that knows all four. ``samplers/solve.py`` packs and places by the names chosen here, ``shard_attend.py`` shards
and attends by them; ``recipes.py`` has the published mixes.

    >>> Recipe(name="mine", pack="best_fit", place="in_order", shard="blocks", attend="ring")
    Traceback (most recent call last):
    ValueError: shard='blocks' and attend='ring' do not fit: shard='blocks' goes with attend='blocks' or 'groupcast' or 'none'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import numpy as np

from .attention.blocks import Blocks, block_plan
from .attention.groupcast import Overlap
from .attention.plan import AttentionPlan
from .attention.tiles import Tap
from .packing.cost import CostModel, cost_units
from .packing.dacp import dacp, dacp_costs
from .packing.mask_kinds import causal
from .packing.masks import Mask
from .packing.packs import Spans
from .packing.queues import WlbQueues
from .packing.sharding_choice import ShardCost
from .packing.shards import Shards, divided
from .samplers.admission import Window
from .samplers.cluster import Cluster
from .samplers.dynamic_cp import DynamicCp
from .samplers.flexsp import FlexSp
from .samplers.plan import SharedAttention, StepPlan
from .samplers.solve import ChunkFlow, Cost, Vrsp, solve
from .shard_attend import ATTENDS, MASKED, PLANS, attention_between, placed_blocks, shards_by

# What packs, and the placements that fit it.
PLACES = {
    "best_fit": ("in_order", "vrsp"),
    "concat": ("in_order", "vrsp"),
    "wlb": ("in_order", "vrsp"),
    "chunks": ("chunkflow",),
    "gds": ("gds",),
    "sequences": ("flexsp", "dynamic_cp"),
}
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
        blocks: how blocks are cut and placed, for ``blocks``; None: the defaults. With ``Blocks(devices_per_node=…)`` rows enter
            a node once and are forwarded inside.
        overlap: how stages are chosen, for ``groupcast``; None: the defaults. ``Overlap(devices_per_node=…)`` forwards likewise.
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
    overlap: Overlap | None = None

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
        if self.overlap is not None and self.attend != "groupcast":
            raise ValueError(f"overlap says how attend='groupcast' chooses stages; got attend={self.attend!r}")
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
        inside = self.trading(cp_size)
        if self.shard != "dacp" or cp_size == inside:
            return None
        per_row = cost.seconds_per_row if isinstance(cost, CostModel) else 0.0
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
            known, placed = placed_blocks(cu_seqlens, len(ranks), max_tokens, mask, self.blocks)
            per_node = None if self.blocks is None else self.blocks.devices_per_node
            return placed.shards, block_plan(known, placed, ranks, rank=cp_rank, devices_per_node=per_node)
        shards = self.shards(cu_seqlens, len(ranks), decision, max_tokens, mask=mask)
        return shards, self.attention(shards, ranks, cp_rank, mask=mask)

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
        shards = shards_by(self, cu_seqlens, cp_size // inside, decision, most, mask)
        return shards if inside == 1 else divided(shards, inside)

    def attention(self, shards: Shards, ranks: tuple[int, ...], cp_rank: int, *, mask: Mask | None = None) -> Any:
        """The plan that ``attend`` runs on rank ``ranks[cp_rank]``; None for ``attend='none'``. mask: as ``shards`` takes it.

        Raises ValueError for ``attend='blocks'``, whose plan shards alone do not tell: see ``laid_out``.
        """
        if self.attend == "blocks":
            raise ValueError("attend='blocks' decides shards and plan at once: call laid_out")
        between = partial(attention_between, self, mask=mask)
        inside = self.trading(len(ranks))
        if self.attend != "ulysses" and inside == 1:
            return between(shards, ranks, cp_rank)
        from .attention.ulysses import ulysses_plan

        if self.attend == "ulysses":
            return ulysses_plan(shards, ranks, cp_rank)
        return ulysses_plan(shards, ranks, cp_rank, degree=inside, outer=between)

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
