"""BalancedBatchSampler: the planner as torch's ``DataLoader(batch_sampler=…)`` wants it, an iterable of batches of indices.

torch hands whatever a batch sampler yields to ``dataset.__getitems__``; this one yields ``[MicroBatch]``, one spec per
batch, so the dataset must be a ``PlannedDataset`` and the collate function a ``ThdCollator``. ``BalancedLoader`` puts
the three together.

    DataLoader(PlannedDataset(dataset), batch_sampler=BalancedBatchSampler(lengths, recipe("vrsp"), …), collate_fn=ThdCollator(…))

Each rank plans every step by itself (a pure function, no collective) and keeps its own row (``micro_batches.py``). Decided here
is where a run stands: its epoch, its step and the slot in it. A sampler runs ahead of training by the loader's prefetch, so the
state to resume from travels with each batch: ``batch.state()``; what a state may be loaded into is told in ``resume.py``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xxhash

from ..packing.cost import SEVEN_B, CostModel, Hardware
from ..packing.lengths import Lengths
from ..packing.queues import WlbQueues
from .admission import StepSize, Window
from .admission_choice import admission_of, items_of
from .carry import QueuedAdmission
from .cluster import Cluster
from .configuration import configuration, differences, warning
from .micro_batches import MicroBatch, MicroBatches
from .plan import StepPlan
from .resume import STATE_VERSION, check_place, check_state, items_as_saved, rest_to_state, stand
from .solver import Planner, Solver, in_turn
from .unindexed import Unindexed

if TYPE_CHECKING:
    from ..recipes import Recipe
    from .solve import Cost

ONCE = "all_exhausted_without_replacement"
ORDERS = ("shuffle", "preserve", "largest_first")


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
        if isinstance(lengths, Lengths):
            _check_documents(lengths, recipe, evaluation, bool(pad_tp))
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
        self.items = items_of(lengths, recipe, self.cluster, too_long, recipe.longest(self.cluster))
        self.admission = admission_of(self)
        self.config = configuration(self)
        self._config_digest = self._digest_of_config()
        self.epoch, self.first_step, self.first_slot = 0, 0, 0
        self._first_targets: int | None = None
        self._rest: Window | None = None  # what was left of a step under way, for another cluster

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
        made = MicroBatches(
            rank=self.rank,
            solver=self.solver,
            items=self.items,
            masks=self.index.masks if isinstance(self.index, Lengths) else None,
            config_digest=self._config_digest,
            state=self.state,
        )
        first_slot, first_targets = self.first_slot, self._first_targets
        for plan, seconds in self.planner(self.windows(), made.solver):
            if first_slot >= plan.num_slots:
                raise ValueError(
                    f"the state stands behind micro-batch {first_slot} of step {plan.step} of epoch {plan.epoch}, which has "
                    f"{plan.num_slots} here: it was changed, or saved by another version; take one from behind a whole step"
                )
            if first_slot and plan.num_targets is None:
                plan = replace(plan, num_targets=first_targets)
            for micro_batch in made.of(plan, seconds)[first_slot:]:
                yield [micro_batch]
            first_slot = 0

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
        items = items_as_saved(self, saved["capacity"])
        if items is not self.items:
            self.items = items
            self.admission, self.config = admission_of(self), {**self.config, "capacity": saved["capacity"]}
            self._config_digest = self._digest_of_config()
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


def _fixed_slots(packs_per_step: int | None, dp: int, slots: int | None) -> int | None:
    if packs_per_step is None:
        return slots
    if packs_per_step % dp or (slots is not None and slots * dp != packs_per_step):
        raise ValueError(
            f"packs_per_step must be dp x slots so that no rank waits; got packs_per_step={packs_per_step}, dp={dp}, "
            f"slots={slots}: use {-(-packs_per_step // dp) * dp}, or leave slots out"
        )
    return packs_per_step // dp


def _check_documents(lengths: Lengths, recipe: Recipe, evaluation: bool, pad_tp: bool) -> None:
    """Refuse a mixture that is not read once, and masks that the recipe would take for causal ones."""
    if evaluation and lengths.blend and lengths.blend.exhausted != ONCE:
        raise ValueError(
            f"evaluation reads every document once, and a mixture with exhausted={lengths.blend.exhausted!r} does not: use "
            f"exhausted={ONCE!r}"
        )
    if lengths.masks is not None:
        recipe.check_masks(lengths.masks.kind, pad_tp)
