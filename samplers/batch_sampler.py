"""BalancedBatchSampler: the planner as torch's ``DataLoader(batch_sampler=…)`` wants it, an iterable of batches of indices.

torch hands whatever a batch sampler yields to ``dataset.__getitems__``; this one yields ``[MicroBatch]``, one spec per
batch, so the dataset must be a ``PlannedDataset`` and the collate function a ``ThdCollator``. ``BalancedLoader`` puts
the three together.

    DataLoader(PlannedDataset(dataset), batch_sampler=BalancedBatchSampler(lengths, recipe("vrsp"), …), collate_fn=ThdCollator(…))

Each rank plans every step by itself (a pure function, no collective) and keeps its own row. A sampler runs ahead of
training by the loader's prefetch, so the state to resume from travels with each batch: ``batch.state()``; what a state may
be loaded into is told in ``resume.py``.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ..packing.cost import SEVEN_B, CostModel, Hardware, cost_units
from ..packing.lengths import Lengths
from ..packing.masks import Mask
from ..packing.packs import Spans
from ..packing.queues import WlbQueues
from .carry import QueuedAdmission
from .groups import GroupedItems
from .items import Items
from .mixture import MixedOrder
from .order import Admission, Order, Shuffled, StepSize, Window
from .plan import Cluster, MicroBatch, StepPlan
from .resume import (
    STATE_VERSION,
    alike,
    check_place,
    check_state,
    differences,
    rest_to_state,
    stand,
    warning,
)
from .stream import StreamAdmission
from .stream_items import StreamItems
from .unindexed import Unindexed

if TYPE_CHECKING:
    from ..recipes import Recipe
    from .solve import Cost

ONCE = "all_exhausted_without_replacement"
ORDERS = ("shuffle", "preserve", "largest_first")


@dataclass(frozen=True, kw_only=True)
class Solver:
    """What makes a step's plan of its documents: a pure function that any process can run."""

    recipe: Recipe
    cluster: Cluster
    cost: Cost
    order: str

    def __call__(self, window: Window) -> StepPlan:
        """Pack and place one step. Raises ValueError where fixed slots cannot hold it."""
        return self.recipe.solve(window, self.cluster, self.cost, order=self.order)


Planner = Callable[[Iterable[Window], Solver], Iterator[tuple[StepPlan, float]]]


def in_turn(windows: Iterable[Window], solver: Solver) -> Iterator[tuple[StepPlan, float]]:
    """Plans one after the other, each when it is asked for, with the seconds it took."""
    for window in windows:
        begin = time.perf_counter()
        plan = solver(window)
        yield plan, time.perf_counter() - begin


class BalancedBatchSampler:
    """Yields this rank's micro-batches of an epoch, as ``[MicroBatch]``.

    Args:
        lengths: the length index of the dataset; ``Unindexed`` where a stream has none, which comes in its own order.
        recipe: from ``equipoise.recipe(name)``.
        max_tokens_per_rank: hard cap of tokens on one rank in one micro-batch.
        dp, cp, rank: the mesh, and this process in it: ``rank = replica * cp + cp_rank``.
        documents_per_step, tokens_per_step, packs_per_step: global size of an optimizer step; exactly one.
            ``packs_per_step`` must be a multiple of dp and fixes ``slots``.
        slots: micro-batches per replica and step; None: as few as the recipe needs.
        sync: ``step`` (DDP: ranks wait once per step) or ``slot`` (FSDP, ZeRO-3, PP, EP: at every micro-batch).
        seed, shuffle: order in which documents are admitted, a new one each epoch.
        order: within a step, slots are shuffled (``shuffle``: no curriculum by length), documents keep to their order of
            admission as far as packs allow (``preserve``), or the slot with the most tokens on a rank comes first and the
            longest document opens the first epoch (``largest_first``: what does not fit fails in step 1).
        last: an incomplete last step is kept (``partial``), left out (``drop``) or opens the next epoch (``carry``).
        too_long: documents of more than ``max_tokens_per_rank * cp`` tokens: ``error``, ``drop``, ``truncate``, ``split``.
        evaluation: in order, nothing carried or left out, every document once.
        cost: a ``CostModel``, or any vectorised callable (pairs, tokens) -> seconds; default: a dense 7B model.
        speeds: of each rank, where they differ (1.0: nominal); ``place="vrsp"`` then balances seconds.
        pad_tp: tensor-parallel size for which documents are padded as Transformer Engine's zigzag wants; 0: not at all.
        count_targets: whether target tokens follow from the index; False where a labels column may mask some.
    """

    def __init__(
        self,
        lengths: Lengths | Unindexed,
        recipe: Recipe,
        *,
        max_tokens_per_rank: int,
        dp: int,
        cp: int = 1,
        rank: int = 0,
        documents_per_step: int | None = None,
        tokens_per_step: int | None = None,
        packs_per_step: int | None = None,
        slots: int | None = None,
        sync: str = "step",
        seed: int = 0,
        shuffle: bool = True,
        order: str = "shuffle",
        last: str = "partial",
        too_long: str = "error",
        evaluation: bool = False,
        cost: Cost | None = None,
        speeds: tuple[float, ...] | None = None,
        pad_tp: int = 0,
        count_targets: bool = True,
    ) -> None:
        step_size = StepSize(
            documents_per_step=documents_per_step, tokens_per_step=tokens_per_step, packs_per_step=packs_per_step
        )
        slots = _fixed_slots(packs_per_step, dp, slots)
        self.cluster = Cluster(
            dp=dp,
            cp=cp,
            max_tokens_per_rank=max_tokens_per_rank,
            sync=sync,
            slots=slots,
            speeds=speeds and tuple(speeds),
            pad_tp=pad_tp,
        )
        if not 0 <= rank < self.cluster.num_ranks:
            raise ValueError(f"rank must lie in 0 … {self.cluster.num_ranks - 1} (dp={dp} x cp={cp}); got {rank}")
        recipe.check_cluster(self.cluster)
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
        if evaluation and isinstance(lengths, Lengths) and lengths.blend and lengths.blend.exhausted != ONCE:
            raise ValueError(
                f"evaluation reads every document once, and a mixture with exhausted={lengths.blend.exhausted!r} does not: use "
                f"exhausted={ONCE!r}"
            )
        if isinstance(lengths, Lengths) and lengths.masks is not None:
            recipe.check_masks(lengths.masks.kind, bool(pad_tp))
        if packs_per_step is not None and not recipe.one_size:
            raise ValueError(
                f"packs_per_step counts packs of one size, and recipe {recipe.name!r} makes them of any: give "
                f"documents_per_step or tokens_per_step"
            )
        self.index, self.recipe, self.rank, self.order, self.step_size = lengths, recipe, rank, order, step_size
        self.cost = cost or CostModel.of(SEVEN_B, Hardware(peak_flops=400e12, efficiency=1.0))
        self.seed, self.shuffle, self.last = seed, shuffle and not evaluation, "partial" if evaluation else last
        self.queued = isinstance(recipe.options, WlbQueues) and recipe.options.max_delay > 0 and not evaluation
        self.count_targets = count_targets
        self.planner: Planner = in_turn
        self.refitted: list[float] | None = None
        self.items = _items(lengths, recipe, self.cluster, too_long, recipe.longest(self.cluster))
        self.admission = self._admit()
        self.config = self._configuration()
        self._config_digest = self._digest_of_config()
        self.epoch, self.first_step, self.first_slot = 0, 0, 0
        self._first_targets: int | None = None
        self._rest: Window | None = None  # what was left of a step under way, for another cluster

    def _admit(self) -> Admission | StreamAdmission | QueuedAdmission:
        admission: Admission | StreamAdmission
        if isinstance(self.index, Unindexed):
            assert isinstance(self.items, StreamItems)
            if self.order == "largest_first":
                raise ValueError("order='largest_first' opens with the longest document, and a stream's is not known")
            admission = StreamAdmission(
                items=self.items,
                more=self.index.more,
                num_parts=self.index.num_parts,
                step_size=self.step_size,
                seed=self.seed,
                last=self.last,
            )
        else:
            assert not isinstance(self.items, StreamItems)
            admission = Admission(
                items=self.items,
                order=_order(self.items, self.order == "largest_first", self.seed, self.shuffle),
                step_size=self.step_size,
                capacity=self.recipe.longest(self.cluster),
                seed=self.seed,
                last=self.last,
                count_targets=self.count_targets,
            )
        if not self.queued:
            return admission
        assert isinstance(self.recipe.options, WlbQueues)
        return QueuedAdmission(base=admission, queues=self.recipe.options, cluster=self.cluster, cost=self.cost)

    def _configuration(self) -> dict:
        """All that the plans follow from, as plain JSON: compared when a state or a plan is loaded, and in the digest."""
        cluster = asdict(self.cluster)
        probe = cost_units(self.cost, np.array([0, 10**8]), np.array([10**4, 10**4])).tolist()
        return {
            "recipe": repr(self.recipe),
            "cost": [*probe, getattr(self.cost, "seconds_per_row", 0.0)],
            **cluster,
            "speeds": cluster["speeds"] and list(cluster["speeds"]),
            **{name: value for name, value in asdict(self.step_size).items() if value is not None},
            "seed": self.seed,
            "shuffle": self.shuffle and isinstance(self.index, Lengths),
            "order": self.order,
            "opening": self.order == "largest_first",
            "last": self.last,
            "too_long": self.items.too_long,
            "capacity": self.items.capacity,
            "queued": self.queued,
            "lengths": _told(self.index),
            "masks": _masks_told(self.index),
            "blend": repr(self.index.blend) if isinstance(self.index, Lengths) and self.index.blend else None,
        }

    def _digest_of_config(self) -> int:
        return xxhash.xxh3_64_intdigest(json.dumps([self.config, self.refitted], sort_keys=True).encode())

    def refit(self, coefficients: list[float]) -> None:
        """Plan with these seconds per pair and per token from the next epoch on; they are in the digest and the state."""
        if not isinstance(self.cost, CostModel):
            raise ValueError(f"only a CostModel has coefficients to refit; the cost is {self.cost!r}")
        per_pair, per_token = coefficients
        self.cost = replace(self.cost, seconds_per_pair=per_pair, seconds_per_token=per_token)
        if isinstance(self.admission, QueuedAdmission):
            self.admission.set_cost(self.cost)
        self.refitted = [per_pair, per_token]
        self._config_digest = self._digest_of_config()

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch."""
        if epoch != int(epoch) or epoch < 0:
            raise ValueError(f"epoch must be a whole number of at least 0; got {epoch!r}")
        self.epoch, self.first_step, self.first_slot, self._rest = int(epoch), 0, 0, None
        start: Any = self.admission.start(self.epoch)
        self.admission.resume(self.epoch, 0, start, start)  # not from where a state had stood in it

    @property
    def solver(self) -> Solver:
        """What plans a step, with the cost model as it is now."""
        return Solver(recipe=self.recipe, cluster=self.cluster, cost=self.cost, order=self.order)

    def plan(self, step: int, epoch: int | None = None) -> StepPlan:
        """The plan of any step, the same on every rank. Raises IndexError behind the epoch's last step."""
        epoch = self.epoch if epoch is None else epoch
        window = self.admission.window(epoch, step)
        if window is None:
            raise IndexError(f"epoch {epoch} has {self.admission.num_steps(epoch)} steps, no step {step}")
        return replace(self.solver(window), config=self.config)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of the current epoch, exact."""
        return self.admission.num_steps(self.epoch)

    def __len__(self) -> int:
        """Micro-batches of the epoch for this rank. TypeError where the slots per step vary."""
        if self.cluster.slots is None:
            raise TypeError(
                "the number of micro-batches varies from step to step: use steps_per_epoch, or fix slots= or "
                "packs_per_step="
            )
        return self.steps_per_epoch * self.cluster.slots

    def windows(self) -> Iterator[Window]:
        """The documents of the epoch's steps, from where the sampler stands."""
        epoch, step = self.epoch, self.first_step
        if self._rest is not None:
            yield self._rest
            step += 1
        while (window := self.admission.window(epoch, step)) is not None:
            yield window
            step += 1

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        first_slot, first_targets = self.first_slot, self._first_targets
        for plan, seconds in self.planner(self.windows(), self.solver):
            if first_slot >= plan.num_slots:
                raise ValueError(
                    f"the state stands behind micro-batch {first_slot} of step {plan.step} of epoch {plan.epoch}, which has "
                    f"{plan.num_slots} here: it was changed, or saved by another version; take one from behind a whole step"
                )
            if first_slot and plan.num_targets is None:
                plan = replace(plan, num_targets=first_targets)
            for micro_batch in self._micro_batches(plan, seconds)[first_slot:]:
                yield [micro_batch]
            first_slot = 0

    def _micro_batches(self, plan: StepPlan, planning_seconds: float) -> list[MicroBatch]:
        """This rank's specs of one step, in slot order."""
        row, num_slots = plan.grid[self.rank].tolist(), plan.num_slots
        cost, first, size = plan.loads().cost[self.rank].tolist(), plan.first_rank.tolist(), plan.cp_size.tolist()
        template = int(plan.packs.spans.document.max())  # any real one: a step is never all fillers
        digest = plan.digest ^ self._config_digest
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
                num_ranks=self.cluster.num_ranks,
                document_stop=self.items.capacity if self.items.too_long == "truncate" else 0,
                template=template,
                digest=digest,
                planning_seconds=planning_seconds,
                cost=cost[slot] / 1e9,
                max_tokens_per_rank=self.cluster.max_tokens_per_rank,
                pad_multiple=int(self.cluster.multiple(size[pack])),
                decision=self.recipe.decide(spans[slot], size[pack], self.cluster, self.cost),
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
        size = self.recipe.replicas_of_pool(self.cluster)
        if size == 1:
            return ()
        first = self.rank // self.cluster.cp // size * size
        packs = plan.grid[(first + np.arange(size)) * self.cluster.cp, slot].tolist()
        spans = [plan.packs.take([pack]).spans for pack in packs]
        return tuple((each, self._mask_of(each)) for each in spans)

    def _mask_of(self, spans: Spans) -> Mask | None:
        """That of a pack; None where all documents are causal."""
        if not isinstance(self.index, Lengths) or self.index.masks is None:
            return None
        return self.index.masks.pieces(spans.document, spans.start, spans.stop)

    def state(self, epoch: int, step: int, slot: int, num_slots: int, num_targets: int | None) -> dict:
        """The state to resume from once ``slot`` micro-batches of this step are done: global, the same on all ranks.

        ``num_targets`` of a step that is under way is part of it: it cannot be counted again from what is left.
        """
        if slot == num_slots:
            step, slot, num_targets = step + 1, 0, None
        rest = self._rest if self._rest is not None and (epoch, step) == (self._rest.epoch, self._rest.step) else None
        following, queued = step + (rest is not None), isinstance(self.admission, QueuedAdmission)
        return {
            "version": STATE_VERSION,
            "config": self.config,
            "epoch": epoch,
            "step": step,
            "slot": slot,
            "num_targets": num_targets,
            "position": self.admission.position(epoch, following),
            "epoch_start": self.admission.start(epoch),
            "refitted": self.refitted,
            "held": self.admission.held(epoch, following).to_state() if queued else None,  # type: ignore[union-attr]
            "rest": rest and rest_to_state(rest),
        }

    def state_dict(self) -> dict:
        """The state that the next iteration begins from."""
        return self.state(self.epoch, self.first_step, self.first_slot, -1, self._first_targets)

    @property
    def at_end(self) -> bool:
        """Whether nothing of the epoch is left."""
        known = isinstance(self.index, Lengths)  # of a stream only reading tells
        return known and self._rest is None and self.admission.window(self.epoch, self.first_step) is None

    def load_state_dict(self, state: dict) -> None:
        """Continue behind the micro-batch whose ``state()`` this is, also with another cluster, recipe or step size.

        Warns then, saying what becomes of the global batches. Raises ValueError where the documents or their order are
        not those of the saved run, or where what is left of a step cannot be told.
        """
        check_state(state)
        saved = state["config"]
        differences(saved, self.config)
        self._recut(saved["capacity"])
        differs = [name for name in differences(saved, self.config) if name != "capacity"]
        if state["refitted"] is not None and state["refitted"] != self.refitted:
            self.refit(state["refitted"])
        check_place(self, state)
        ahead = stand(self, state, anew=bool(differs))
        self.admission.resume(state["epoch"], ahead.step, ahead.position, state["epoch_start"])
        if isinstance(self.admission, QueuedAdmission):
            self.admission.put(state["epoch"], ahead.step, ahead.held)
        self.epoch, self.first_step, self._rest = state["epoch"], ahead.step - (ahead.rest is not None), ahead.rest
        self.first_slot = 0 if differs else state["slot"]
        self._first_targets = None if differs else state["num_targets"]
        if differs:
            warnings.warn(warning(differs, saved, self.config, state["slot"] > 0), stacklevel=2)

    def _recut(self, capacity: int) -> None:
        """Cut and leave out documents as a run with this capacity did. ValueError where what it could hold does not fit."""
        stream = isinstance(self.index, Unindexed)
        if capacity == self.items.capacity or (stream and self.items.too_long == "error"):
            return
        limit = self.recipe.longest(self.cluster)
        items = _items(self.index, self.recipe, self.cluster, self.items.too_long, capacity)
        if alike(items, self.items):
            return
        longest = capacity if stream else items.longest
        if longest > limit:
            raise ValueError(
                f"the saved run holds documents or pieces of up to {longest} tokens, and a pack has room for {limit} now: "
                f"raise max_tokens_per_rank or cp"
            )
        self.items = items
        self.admission, self.config = self._admit(), {**self.config, "capacity": capacity}
        self._config_digest = self._digest_of_config()


def _items(
    lengths: Lengths | Unindexed, recipe: Recipe, cluster: Cluster, too_long: str, capacity: int
) -> Items | GroupedItems | StreamItems:
    """What can be admitted under this recipe. Raises ValueError where recipe and groups do not fit."""
    multiple = int(cluster.multiple(cluster.cp)) if recipe.one_size else 1
    if isinstance(lengths, Unindexed):
        return StreamItems(capacity=capacity, too_long=too_long, multiple=multiple)
    if lengths.group is not None and recipe.cuts:
        raise ValueError(f"recipe {recipe.name!r} cuts documents, and documents of a group stay together and whole")
    items = Items.of(lengths, capacity=capacity, too_long=too_long, multiple=multiple)
    return items if lengths.group is None else GroupedItems.of(items)


def _order(items: Items | GroupedItems, longest_first: bool, seed: int, shuffle: bool) -> Order:
    """The endless stream of these items."""
    blend = items.lengths.blend
    if blend is None:
        opening = items.longest_item if longest_first else None
        return Shuffled(size=len(items), seed=seed, shuffle=shuffle, opening=opening)
    if longest_first:
        raise ValueError("order='largest_first' opens with the longest document, and a mixture has an order of its own")
    return MixedOrder(items=items, blend=blend, seed=seed, shuffle=shuffle)  # type: ignore[arg-type]  # it refuses groups


def _told(index: Lengths | Unindexed) -> str:
    """What tells one index from another; of a stream its parts."""
    if isinstance(index, Unindexed):
        return f"stream of {index.num_parts} parts"
    return f"{_digest_of(index)} of {len(index)}"


def _digest_of(lengths: Lengths) -> str:
    """Hash of all of the index that plans follow from."""
    state = xxhash.xxh3_64()
    for name in ("tokens", "pairs", "targets", "group"):
        values = getattr(lengths, name)
        state.update(name.encode() if values is None else np.ascontiguousarray(values).data)
    return state.hexdigest()


def _masks_told(index: Lengths | Unindexed) -> str | None:
    if not isinstance(index, Lengths) or index.masks is None:
        return None
    return f"{index.masks.kind} {index.masks.digest()}"


def _fixed_slots(packs_per_step: int | None, dp: int, slots: int | None) -> int | None:
    if packs_per_step is None:
        return slots
    if packs_per_step % dp or (slots is not None and slots * dp != packs_per_step):
        raise ValueError(
            f"packs_per_step must be dp x slots so that no rank waits; got packs_per_step={packs_per_step}, dp={dp}, "
            f"slots={slots}: use {-(-packs_per_step // dp) * dp}, or leave slots out"
        )
    return packs_per_step // dp
