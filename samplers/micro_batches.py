"""MicroBatches: what one rank has to fetch and lay out of a step's plan, slot by slot.

The plan is global, the same on every rank, and small; a ``MicroBatch`` is all that a worker is told, which has no plan: the
spans of the rank's pack, the ranks that hold it with this one, what the recipe decides of the pack by its cost, and the packs
of the pool that shares attention with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..packing.mask_columns import MaskColumns
from ..packing.masks import Mask
from ..packing.packs import Spans
from .groups import GroupedItems
from .items import Items
from .plan import StepPlan
from .solver import Solver
from .stream_items import StreamItems


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """What one rank has to fetch and lay out for one slot: the spec that a sampler yields and a worker receives."""

    spans: Spans
    document_tokens: np.ndarray  # int64[spans] length of each span's document in the index; 0 for a filler
    epoch: int
    step: int
    slot: int
    num_slots: int
    ranks: tuple[int, ...]  # the CP group, in order
    cp_rank: int
    num_targets: int | None  # of the whole step
    num_ranks: int
    document_stop: int  # documents end here even where they are longer (too_long='truncate'); 0: nowhere
    template: int  # a document of the step whose columns a filler imitates
    digest: int
    planning_seconds: float
    cost: float  # predicted seconds of this rank in this slot
    max_tokens_per_rank: int
    pad_multiple: int  # documents are padded to a multiple of this; 1: not at all
    decision: np.ndarray | None  # int64[spans] how the pack is sharded, where that depends on its cost
    chunk: tuple[int, int] | None  # (index, count) in its document's group, where documents are cut into chunks
    state: dict  # what resumes a run behind this micro-batch
    mask: Mask | None = None  # of the pack's spans; None: causal within each
    pool: tuple[
        tuple[Spans, Mask | None], ...
    ] = ()  # packs that share attention in this slot, in order of ranks; (): none do

    @property
    def pairs(self) -> int:
        """An even share of attention: of the pack's over its CP group, or of its pool's."""
        packs = [spans for spans, _ in self.pool] or [self.spans]
        return sum(int(spans.pairs.sum()) for spans in packs) // (len(packs) * len(self.ranks))

    def __repr__(self) -> str:
        return (
            f"MicroBatch(epoch {self.epoch}, step {self.step}, slot {self.slot + 1}/{self.num_slots}: {len(self.spans)} "
            f"spans, {int(self.spans.tokens.sum())} tokens on ranks {self.ranks})"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatches:
    """Those of one rank.

    Args:
        solver: what makes the plans.
        items: what is admitted to them; ``masks``: of their documents, None: all causal.
        config_digest: of all that the plans follow from.
        state: (epoch, step, slot, slots of the step, its targets) → what to resume from once so many slots are done.
    """

    rank: int
    solver: Solver
    items: Items | GroupedItems | StreamItems
    masks: MaskColumns | None
    config_digest: int
    state: Callable[[int, int, int, int, int | None], dict]

    def of(self, plan: StepPlan, planning_seconds: float) -> list[MicroBatch]:
        """The rank's specs of one step, in slot order."""
        cluster, row, num_slots = self.solver.cluster, plan.grid[self.rank].tolist(), plan.num_slots
        cost, first, size = plan.loads().cost[self.rank].tolist(), plan.first_rank.tolist(), plan.cp_size.tolist()
        template = int(plan.packs.spans.document.max())  # any real one: a step is never all fillers
        digest = plan.digest ^ self.config_digest
        spans = [plan.packs.take([pack]).spans for pack in row]
        return [
            MicroBatch(
                spans=spans[slot],
                document_tokens=np.where(spans[slot].document < 0, 0, self.items.document_tokens(spans[slot].document)),
                epoch=plan.epoch,
                step=plan.step,
                slot=slot,
                num_slots=num_slots,
                ranks=tuple(range(first[pack], first[pack] + size[pack])),
                cp_rank=self.rank - first[pack],
                num_targets=plan.num_targets,
                num_ranks=cluster.num_ranks,
                document_stop=self.items.capacity if self.items.too_long == "truncate" else 0,
                template=template,
                digest=digest,
                planning_seconds=planning_seconds,
                cost=cost[slot] / 1e9,
                max_tokens_per_rank=cluster.max_tokens_per_rank,
                pad_multiple=int(cluster.multiple(size[pack])),
                decision=self.solver.recipe.decide(spans[slot], size[pack], cluster, self.solver.cost),
                chunk=None
                if plan.rounds is None
                else (int(plan.rounds.chunk_index[pack]), int(plan.rounds.chunk_count[pack])),
                state=self.state(plan.epoch, plan.step, slot + 1, num_slots, plan.num_targets),
                mask=self._mask_of(spans[slot]),
                pool=self._pool(plan, slot),
            )
            for slot, pack in enumerate(row)
        ]

    def _pool(self, plan: StepPlan, slot: int) -> tuple[tuple[Spans, Mask | None], ...]:
        """The packs with which this rank's shares its attention, its own among them."""
        cluster = self.solver.cluster
        size = self.solver.recipe.replicas_of_pool(cluster)
        if size == 1:
            return ()
        first = self.rank // cluster.cp // size * size
        packs = plan.grid[(first + np.arange(size)) * cluster.cp, slot].tolist()
        spans = [plan.packs.take([pack]).spans for pack in packs]
        return tuple((each, self._mask_of(each)) for each in spans)

    def _mask_of(self, spans: Spans) -> Mask | None:
        """That of a pack; None where all documents are causal."""
        return None if self.masks is None else self.masks.pieces(spans.document, spans.start, spans.stop)
