"""FlexSP (ASPLOS'25, arXiv:2412.01523): sequence-parallel groups of unequal degree, side by side in one slot.

Decided here: the slot of each sequence, how many ranks its group has and which share a group; sequences are neither
cut nor padded. A group of d ranks with sequences s takes ``(Σ a1·s² + a2·s + all_to_all(d)·s) / d + beta``, where the
all-to-all is fast inside a node and slow beyond it: long sequences need many ranks for memory, short ones are better
off on few.

- Slots ("blaster"): sequences by falling length, cut into m consecutive parts of even tokens; m from the fewest that
  memory allows to four more, the cheapest step is kept. A count whose mean work alone is dearer is not tried.
- Groups of a slot: by default bisection over the slot's time with the greedy of ``rank_groups.py``, within 1 % of the
  proven optimum on small steps and ahead of a MILP's ten seconds on large ones; or that MILP (``solver="scip"`` or
  ``"highs"``, ``flexsp_milp.py``), which starts from the greedy's groups.

Cost: greedy 2–5 ms for 512 sequences on 64 ranks. A MILP that its clock stops gives plans that depend on the machine's
speed: limit its `nodes`, or plan on one rank and send the plan.

    >>> import numpy as np
    >>> options = FlexSp(model=SpModel.preset("gpt-7b"))
    >>> tokens = np.array([102400] + 4 * [49152])                   # the paper's Figure 1
    >>> plan = flexsp(tokens, num_ranks=64, cap=6200, options=options)
    >>> plan.cp_size[np.diff(plan.offsets) > 0]
    array([32,  8,  8,  8,  8])
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..packing.assign import same_length
from ..packing.cost import CostModel, Float64, ModelShape, cost_units
from ..packing.packs import Int64
from .bucketing import even_parts
from .rank_groups import GroupRules, Groups, Placement, least_groups, place

SOLVERS = ("greedy", "scip", "highs")
# With so many documents one bisection levels a slot to 5 % and the fewest slots do: it is time that counts.
_MANY_DOCUMENTS = 4096
_ROUNDS, _FEW_ROUNDS = 12, 1
A100_ALL_TO_ALL = ((2, 119.54), (4, 104.07), (8, 96.5), (16, 10.33), (32, 5.94), (64, 4.87))
"""GB/s of an all-to-all by degree, on 64 A100 in nodes of 8 (the authors' table "4k seq, 2 IB")."""


@dataclass(frozen=True, kw_only=True)
class SpModel:
    """What a sequence costs: the authors' fits in milliseconds, forward and backward, and the all-to-all's bytes."""

    quadratic: float
    """a1, ms per token²."""
    linear: float
    """a2, ms per token."""
    fixed: float
    """beta, ms of a slot whatever it holds."""
    hidden_size: int
    num_layers: int
    activation_mb: float
    """Megabytes of activations per token."""
    parameters: float
    """Billions of them, sharded over all ranks with gradients and optimizer state (ZeRO-3, 16 bytes each)."""
    bandwidth: tuple[tuple[int, float], ...] = A100_ALL_TO_ALL
    """(degree, GB/s), rising; a degree between two takes the larger one's, one beyond them the last."""

    @staticmethod
    def preset(name: str) -> SpModel:
        """ "gpt-7b", "gpt-13b" or "gpt-30b", as the authors fitted them for contexts of 384K on 64 A100."""
        presets = {
            "gpt-7b": (5.128e-6, 183.9576e-3, 629.3563, 4096, 32, 4.480441895, 7.850),
            "gpt-13b": (9.2852e-6, 306.0189e-3, 1132.5632, 5120, 40, 4.220439453, 14.032),
            "gpt-30b": (15.4262e-6, 803.5742e-3, 2789.3644, 6656, 60, 3.417381836, 32.715),
        }
        if name not in presets:
            raise ValueError(f"A preset is one of {', '.join(presets)}; got {name!r}.")
        a1, a2, beta, hidden, layers, activation, parameters = presets[name]
        return SpModel(
            quadratic=a1, linear=a2, fixed=beta, hidden_size=hidden, num_layers=layers, activation_mb=activation,
            parameters=parameters,
        )  # fmt: skip

    @staticmethod
    def of(
        shape: ModelShape,
        cost: CostModel,
        *,
        fixed: float = 0.0,
        bandwidth: tuple[tuple[int, float], ...] = A100_ALL_TO_ALL,
    ) -> SpModel:
        """The model of a shape that costs `cost`: its all-to-alls move query, key, value and output, each way.

        fixed: ms of a slot. Memory is the CostModel's to say (`max_tokens`): `cap` counts no weights here.
        """
        return SpModel(
            quadratic=cost.seconds_per_pair / 2 * 1e3,
            linear=(cost.seconds_per_token + cost.seconds_per_pair / 2) * 1e3,
            fixed=fixed,
            hidden_size=(shape.num_heads + shape.num_kv_heads) * shape.head_dim // 2,
            num_layers=shape.num_layers,
            activation_mb=cost.bytes_per_token / 2**20,
            parameters=0.0,
            bandwidth=bandwidth,
        )

    def seconds(self, pairs: npt.ArrayLike, tokens: npt.ArrayLike) -> Float64:
        """Seconds on one rank of sequences with `tokens` (int[n]), float64[n]; `pairs` are not looked at."""
        held = np.asarray(tokens, dtype=np.float64)
        return (self.quadratic * held * held + self.linear * held) / 1e3

    def work(self, tokens: npt.ArrayLike) -> Int64:
        """The same in int64 nanoseconds."""
        return cost_units(self.seconds, tokens, tokens)

    def all_to_all(self, num_ranks: int) -> Int64:
        """Nanoseconds x degree that a token's all-to-alls take, int64[num_ranks + 1] by degree.

        Four of them each way and layer; in bf16, so 16·layers·hidden bytes, of which each rank sends 1 / degree.
        """
        degrees = np.array([degree for degree, _ in self.bandwidth])
        speeds = np.array([speed for _, speed in self.bandwidth])
        at = np.minimum(np.searchsorted(degrees, np.arange(num_ranks + 1)), len(degrees) - 1)
        units = np.rint(16 * self.num_layers * self.hidden_size / 2**20 / speeds[at] * 1e6).astype(np.int64)
        units[:2] = 0
        return units

    def cap(self, num_ranks: int, memory_gb: float) -> int:
        """Tokens that a rank's `memory_gb` hold beside its share of the weights."""
        left = memory_gb * 1024 - self.parameters * 16 * 1024 / num_ranks
        if left < self.activation_mb:
            raise ValueError(
                f"A rank holds at least one token beside its weights; {memory_gb} GB less "
                f"{self.parameters * 16 / num_ranks:.4g} GB of weights hold none of {self.activation_mb} MB: add ranks."
            )
        return int(left / self.activation_mb)


@dataclass(frozen=True, kw_only=True)
class FlexSp:
    """Options of FlexSP."""

    model: SpModel
    degrees: str = "powers"
    """Group sizes: "powers" (of two, aligned, and all ranks at once), or "any" (consecutive ranks)."""
    more_slots: int = 4
    """Slot counts that are tried beyond the fewest."""
    solver: str = "greedy"
    seconds: float = 10.0
    """Time limit of a MILP, per slot."""
    nodes: int = 0
    """Limit on the nodes of its tree; 0: none."""
    buckets: int = 16
    """Buckets of a MILP, or more where they lose too much."""
    max_group: int | None = None
    """Largest group: Ulysses gives each of its ranks at least one query head; None: as large as it pays."""

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise ValueError(f"FlexSp.solver must be one of {', '.join(SOLVERS)}; got {self.solver!r}.")
        if min(self.more_slots, self.nodes) < 0 or self.buckets < 1 or not self.seconds > 0:
            raise ValueError(
                "FlexSp has more_slots >= 0, nodes >= 0, buckets >= 1 and seconds > 0; "
                f"got {self.more_slots}, {self.nodes}, {self.buckets} and {self.seconds}."
            )
        if self.max_group is not None and self.max_group < 1:
            raise ValueError(f"FlexSp.max_group is a number of ranks, at least 1; got {self.max_group}.")

    def rules(self, num_ranks: int, cap: int) -> GroupRules:
        """The degrees of these options and what they cost."""
        units = self.model.all_to_all(num_ranks)
        if self.max_group is not None:
            units[self.max_group + 1 :] = -1
        return GroupRules.of(num_ranks=num_ranks, cap=cap, degrees=self.degrees, token_units=units)

    def largest_group(self, num_ranks: int) -> int:
        """Ranks of the largest group that these options allow."""
        return int(self.rules(num_ranks, 1).sizes[-1])


def flexsp(
    tokens: npt.ArrayLike,
    cost: npt.ArrayLike | None = None,
    *,
    num_ranks: int,
    cap: int,
    options: FlexSp,
    slots: int | None = None,
) -> Placement:
    """Plan a step of n sequences (tokens: int[n]) for ranks of at most `cap` tokens each.

    cost: int[n] cost units on one rank, by default the model's nanoseconds. slots: their number, which the plan keeps.
    Raises ValueError for a sequence that no group can hold, and where `slots` are too few.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    cost, tokens = same_length(options.model.work(tokens) if cost is None else cost, tokens)
    rules = options.rules(num_ranks, cap)
    largest = int(rules.sizes[-1])
    if len(tokens) and tokens.max() > largest * cap:
        limited = "" if options.max_group is None else f" (max_group={options.max_group})"
        raise ValueError(
            f"A sequence fits into some group of ranks; sequence {int(tokens.argmax())} has {tokens.max()} tokens, and "
            f"{largest} ranks hold {largest * cap}{limited}: raise the cap, add ranks, or split it."
        )
    if slots is not None and slots < 1:
        raise ValueError(f"A step has at least one slot; got slots={slots}.")
    best, least, tried = None, 0, 0
    count = slots or max(-(-int(tokens.sum()) // (num_ranks * cap)), 1)
    fixed = round(options.model.fixed * 1e6)
    floor = int(cost.sum()) // num_ranks
    more = options.more_slots if len(tokens) <= _MANY_DOCUMENTS else 0
    while best is None or (slots is None and tried <= more and floor + count * fixed < least):
        plan = _solve(tokens, cost, count, rules, options)
        if plan is not None:
            time = sum(groups.makespan + fixed for _, groups in plan)
            best, least = (plan, time) if best is None or time < least else (best, least)
        elif slots is not None:
            raise ValueError(
                f"{slots} slots of {num_ranks} ranks x {cap} tokens do not hold {len(tokens)} sequences of "
                f"{int(tokens.sum())} tokens by falling length: give more slots, or a larger cap."
            )
        tried += best is not None
        count += 1
    return place(best, cost, num_ranks)


def _solve(
    tokens: Int64, cost: Int64, count: int, rules: GroupRules, options: FlexSp
) -> list[tuple[Int64, Groups]] | None:
    """The groups of each of `count` slots; None where a slot does not hold its part."""
    order = np.argsort(-tokens, kind="stable")
    offsets = even_parts(tokens[order], count)
    capacity = rules.num_ranks * rules.cap
    if max(int(tokens[order[a:b]].sum()) for a, b in pairwise(offsets)) > capacity:
        return None
    plan, rounds = [], _ROUNDS if len(tokens) <= _MANY_DOCUMENTS else _FEW_ROUNDS
    for first, last in pairwise(offsets):
        documents = np.sort(order[first:last])
        groups = least_groups(cost[documents], tokens[documents], rules, rounds=rounds)
        if groups is None:
            return None
        if options.solver != "greedy":
            # Imported here, since it needs a solver that is an extra.
            from .flexsp_milp import milp_groups

            groups = milp_groups(cost[documents], tokens[documents], rules, groups, options)
        plan.append((documents, groups))
    return plan
