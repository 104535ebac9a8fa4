"""Dynamic context parallelism (NVIDIA, Megatron Core 2026): a CP group size for each micro-batch.

Decided here: the slot of each document, and within a slot which documents form a packed (THD) micro-batch and on how
many consecutive ranks it runs. DP and CP are one pool of ranks: a long document gets many, short ones share one.
Every rank is busy in every slot and holds at most `cap` tokens; what balances is time, memory is a limit.

Megatron gives a document the fewest ranks that memory demands, and so cannot come below the longest document's time
on those. Here ranks are also spent on time (``rank_groups.py``): a *quota* of work per rank (``quotas``) says how
many, several quotas are tried, and received KV rows are weighed against time by `traffic_price`, without which one
group of all ranks would always win. Slots are formed in three ways and the cheapest step kept: of like work (LPT),
which a pipeline needs; of like length and tokens; and filled in turn as Megatron does it, which is best where slots
are many. A pipeline of p stages and V virtual ones costs ``Σ slots + (p - 1)·longest / V``, the fill included; or
`score` says what a step costs.

What Megatron asserts or loses is handled: any number of ranks, the number of slots raised to a multiple by spreading
documents or by idle slots, padding to 2·cp_size after the choice of size and counted against the cap.

Cost: 1–2 ms for 512 documents on 64 ranks.

    >>> import numpy as np
    >>> tokens = np.array([4097, 100, 100])                      # six ranks: Megatron asks for a group it never built
    >>> plan = dynamic_cp(tokens, tokens**2, num_ranks=6, cap=2048, options=DynamicCp(traffic_price=0.3))
    >>> plan.order, plan.offsets, plan.cp_size, plan.first_rank
    (array([0, 1, 2]), array([0, 1, 3, 3]), array([4, 1, 1]), array([0, 4, 5]))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil

import numpy as np
import numpy.typing as npt

from ..packing.assign import csr_from_bins, lpt, same_length
from ..packing.packs import Int64
from .group_search import HUGE, SCALE
from .rank_groups import TARGETS, GroupRules, Groups, Placement, best_groups, filled_slots, loads, place

# With many documents, or slots, the first tries are good, and it is time that counts.
_MANY_DOCUMENTS = 256
_VERY_MANY_DOCUMENTS = 8192
_MANY_SLOTS = 4
_FILL_PERCENT = 92
# More slots than needed must save this share of the step.
_MORE_SLOTS = 0.02


@dataclass(frozen=True, kw_only=True)
class DynamicCp:
    """Options of dynamic CP."""

    degrees: str = "powers"
    """Group sizes: "powers" (of two, aligned, and all ranks at once), or "any" (consecutive ranks)."""
    traffic_price: float = 0.09
    """What one more received KV row per token of the step may cost in time, as a share of the step: 0 … 1. 0 where
    `row_units` says it all."""
    row_units: int = 0
    """Cost units of a KV row that a rank receives, as far as it is not hidden behind compute."""
    node_ranks: int = 0
    """Ranks of a node; groups larger than that pay `far_row_units`. 0: all ranks are near."""
    far_row_units: int = 0
    slot_units: int = 0
    """Cost units of a micro-batch whatever it holds."""
    pad: int = 0
    """Documents are padded to a multiple of pad x cp_size, and of pad / 2 on one rank, which cuts nothing: 2 for zigzag
    kernels, 2·tp with sequence parallelism."""
    slots_multiple_of: int = 1
    """The number of slots is a multiple of this (micro-batches per virtual pipeline stage)."""
    stages: int = 1
    """Pipeline stages p."""
    virtual_stages: int = 1
    """Virtual stages V of each."""

    def __post_init__(self) -> None:
        for name in ("slots_multiple_of", "stages", "virtual_stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"DynamicCp.{name} must be at least 1; got {getattr(self, name)}.")
        for name in ("row_units", "node_ranks", "far_row_units", "slot_units", "pad"):
            if getattr(self, name) < 0:
                raise ValueError(f"DynamicCp.{name} must be 0 or more; got {getattr(self, name)}.")
        if not 0 <= self.traffic_price <= 1:
            raise ValueError(f"DynamicCp.traffic_price is a share of the step, 0 … 1; got {self.traffic_price}.")

    def rules(self, num_ranks: int, cap: int) -> GroupRules:
        """The group sizes of these options and what they cost."""
        size = np.arange(num_ranks + 1)
        far = (size > self.node_ranks) & (self.node_ranks > 0)
        units = np.maximum(size - 1, 0) * np.where(far, self.far_row_units, self.row_units)
        return GroupRules.of(num_ranks=num_ranks, cap=cap, degrees=self.degrees, pad=self.pad, token_units=units)


def dynamic_cp(
    tokens: npt.ArrayLike,
    cost: npt.ArrayLike,
    *,
    num_ranks: int,
    cap: int,
    options: DynamicCp | None = None,
    slots: int | None = None,
    score: Callable[[Int64], float] | None = None,
) -> Placement:
    """Plan a step of n documents (tokens, cost units on one rank: int[n]) for ranks of at most `cap` tokens each.

    slots: their number, which the plan keeps; None: as few as it takes, or one multiple more where that is cheaper.
    score: cost of a step from int64[num_ranks, slots] cost units, in place of the pipeline's formula.
    Raises ValueError for a document that no group can hold, and where `slots` are too few.
    """
    options = options or DynamicCp()
    cost, tokens = same_length(cost, tokens)
    rules = options.rules(num_ranks, cap)
    _check_fits(tokens, rules)
    multiple = options.slots_multiple_of
    if slots is not None and (slots < 1 or slots % multiple):
        raise ValueError(f"slots must be a multiple of slots_multiple_of={multiple}, at least 1; got {slots}.")
    count = slots or _fewest(tokens, num_ranks * cap, multiple)
    filled = filled_slots(cost, tokens, rules) if len(tokens) <= _VERY_MANY_DOCUMENTS else None
    plans = _plans(tokens, cost, count, filled, rules, options)
    while not plans:
        if slots is not None:
            raise ValueError(
                f"{slots} slots of {num_ranks} ranks x {cap} tokens do not hold {len(tokens)} documents of "
                f"{int(tokens.sum())} tokens, padding apart, in groups of {options.degrees}: give more slots, or a "
                "larger cap."
            )
        count += multiple
        plans = _plans(tokens, cost, count, filled, rules, options)
    if slots is None and len(tokens) <= _MANY_DOCUMENTS and count <= _MANY_SLOTS:
        plans += _plans(tokens, cost, count + multiple, filled, rules, options)

    def value(plan: _Slots) -> float:
        rows = _price(tokens, cost, rules, options) * sum(groups.rows for _, groups in plan) / SCALE
        spent = score(loads(place(plan, cost, num_ranks), cost, tokens, rules)) if score else _pipeline(plan, options)
        return (spent + rows) * (1 + _MORE_SLOTS * (len(plan) > count))

    return place(plans[0] if len(plans) == 1 else min(plans, key=value), cost, num_ranks)


def quotas(work: int, micro_batches: npt.ArrayLike, *, stages: int = 1, virtual_stages: int = 1) -> Int64:
    """Work W_i per micro-batch of DP ranks with m_i micro-batches, such that all end together: int64[d].

    ``W_i·(m_i·V + p - 1)`` is the same for all, to the rounding, and ``Σ W_i·m_i`` at least `work`. With as many
    slots on every rank it is the mean, which is what ``dynamic_cp`` levels.

        >>> quotas(1000, [4, 4, 8], stages=5, virtual_stages=2)
        array([79, 79, 47])
    """
    m = np.asarray(micro_batches, dtype=np.int64)
    if m.ndim != 1 or len(m) == 0 or m.min() < 1 or stages < 1 or virtual_stages < 1 or work < 0:
        raise ValueError(
            "quotas takes work >= 0 and, of one dimension, at least 1 micro-batch per rank, on at least 1 stage and "
            f"virtual stage; got work={work}, micro_batches={micro_batches!r}, {stages} and {virtual_stages}."
        )
    length = [int(k) * virtual_stages + stages - 1 for k in m]
    common = Fraction(work) / sum(Fraction(int(k), units) for k, units in zip(m, length, strict=True))
    return np.array([ceil(common / units) for units in length], dtype=np.int64)


_Slots = list[tuple[Int64, Groups]]


def _fewest(tokens: Int64, capacity: int, multiple: int) -> int:
    """Slots to begin with. Full ones force large groups: with few documents one more is tried too, with many not."""
    percent = 100 if len(tokens) <= _MANY_DOCUMENTS else _FILL_PERCENT
    return max(-(-100 * int(tokens.sum()) // (percent * capacity * multiple)), 1) * multiple


def _plans(
    tokens: Int64, cost: Int64, count: int, filled: tuple[Int64, Int64] | None, rules: GroupRules, options: DynamicCp
) -> list[_Slots]:
    """The steps of `count` slots that are found, one per way of dividing the documents into slots."""
    capacity, many = rules.num_ranks * rules.cap, len(tokens) > _MANY_DOCUMENTS
    none = np.full(count, HUGE)
    ways = []
    in_turn = filled is not None and len(filled[1]) <= count
    if not many or not in_turn or options.stages > 1:
        # The one unit lets documents that cost nothing spread as well.
        ways.append((lpt(cost + 1, tokens, count, capacity), none))
    if count > 1 and not many:
        ways.append((_by_length(tokens, count), none))
    if filled is not None and in_turn:
        ways.append((filled[0], np.concatenate([filled[1], none[len(filled[1]) :]])))
    fitting = [way for way in ways if _most_tokens(way[0], tokens, count) <= capacity]
    plans = [_solve(tokens, cost, slot, targets, rules, options) for slot, targets in fitting]
    return [plan for plan in plans if plan is not None]


def _by_length(tokens: Int64, count: int) -> Int64:
    """The longest documents in the first slot, and so on, in shares of like tokens."""
    order = np.argsort(-tokens, kind="stable")
    middle = 2 * np.cumsum(tokens[order]) - tokens[order]
    slot = np.empty(len(tokens), np.int64)
    slot[order] = np.minimum(middle * count // max(2 * int(tokens.sum()), 1), count - 1)
    return slot


def _most_tokens(slot: Int64, tokens: Int64, count: int) -> float:
    """Tokens of the fullest slot; without bound where a document has none."""
    if len(slot) and slot.min() < 0:
        return np.inf
    held = np.zeros(count, np.int64)
    np.add.at(held, slot, tokens)
    return int(held.max())


def _solve(
    tokens: Int64, cost: Int64, slot: Int64, first: Int64, rules: GroupRules, options: DynamicCp
) -> _Slots | None:
    """The groups of each slot, whose first target is `first`; None where one of them cannot be formed."""
    many, very_many = len(tokens) > _MANY_DOCUMENTS or len(first) > _MANY_SLOTS, len(tokens) > _VERY_MANY_DOCUMENTS
    targets = TARGETS[: 1 if very_many else 2 if many else len(TARGETS)]
    price = _price(tokens, cost, rules, options)
    order, offsets = csr_from_bins(slot, len(first))
    plan = []
    for target, (start, stop) in zip(first, pairwise(offsets), strict=True):
        documents = order[start:stop]
        own = int(target) if target < HUGE else None
        groups = best_groups(cost[documents], tokens[documents], rules, price=price, targets=targets, first=own)
        if groups is None:
            return None
        plan.append((documents, groups))
    return plan


def _price(tokens: Int64, cost: Int64, rules: GroupRules, options: DynamicCp) -> int:
    """Cost units of a received row, times SCALE: traffic_price of the step for as many rows as it has tokens."""
    share = round(options.traffic_price * 2**20)
    return int(cost.sum()) * share * SCALE // (max(int(tokens.sum()), 1) * rules.num_ranks * 2**20)


def _pipeline(plan: _Slots, options: DynamicCp) -> float:
    """Cost units of a step: the slots one after the other, and the longest once more for each further stage."""
    spans = [groups.makespan + options.slot_units for _, groups in plan]
    return sum(spans) + (options.stages - 1) * max(spans) / options.virtual_stages


def _check_fits(tokens: Int64, rules: GroupRules) -> None:
    """Refuse a document that no group can hold: where the longest fits into a size, all do."""
    if len(tokens) and not rules.smallest(tokens.max(keepdims=True)).all():
        longest = int(tokens.argmax())
        raise ValueError(
            f"A document fits into some group of ranks, padding counted; document {longest} has {tokens[longest]} "
            f"tokens, and the {rules.num_ranks} ranks hold {rules.cap} each, padded to {rules.pad} per rank: raise the "
            "cap, or split it."
        )
