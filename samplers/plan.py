"""StepPlan: who runs which pack in which slot of one optimizer step. A handful of int64 arrays, global and small.

Every rank computes the same plan and looks up its own row. The plan proves the promises it makes (``check``), says what
each rank has to do (``loads``) and how far that is from the least possible (``bound``, ``describe``).

Ranks are numbers in the dp x cp plane: ``rank = replica * cp + cp_rank``; a micro-batch runs on ``cp_size`` consecutive
ranks from ``first_rank``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ..packing.chunkflow import schedule
from ..packing.packs import Packs, Spans
from .cluster import Cluster

if TYPE_CHECKING:
    from ..packing.cost import ModelShape
    from .network import ClusterShape
    from .simulate import StepTime


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """What each rank does in each slot: int64[ranks, slots]."""

    cost: np.ndarray  # nanoseconds of forward and backward by the cost model
    tokens: np.ndarray  # held; a pack's remainder is counted on each of its ranks
    pairs: (
        np.ndarray
    )  # (query, key) pairs, shared evenly by a CP group; in a pool, the most that one of its ranks computes
    rows: np.ndarray  # KV rows that a ring without skipping receives, per layer

    def imbalance(self, sync: str) -> float:
        """Slowest rank over the mean: of the step's sums, or slot by slot (sum of maxima over sum of means)."""
        cost = self.cost if sync == "slot" else self.cost.sum(1, keepdims=True)
        mean = cost.mean(0).sum()
        return float(cost.max(0).sum() / mean) if mean else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Rounds:
    """The order in which ChunkFlow's replicas run their slots: forward a round, then backward it (``chunkflow.schedule``)."""

    keep: int
    sizes: np.ndarray  # int64[r] slots of each round, replica after replica
    offsets: np.ndarray  # int64[dp + 1]: replica r runs sizes[offsets[r]:offsets[r + 1]]
    chunk_index: np.ndarray  # int64[p] number of a pack in its document's group; 0 where it stands alone
    chunk_count: np.ndarray  # int64[p] packs of that group


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedAttention:
    """Attention that neighbouring replicas share: that of the packs they run in a slot (TAP). Tokens stay where they are."""

    replicas: int
    slack: float  # attention migrates until no rank has more than so many times its pool's mean, as far as blocks allow
    block: int  # queries that migrate together, at most
    head_groups: int  # each of which migrates for itself
    span_cost: np.ndarray  # int64[m] what attention has in the cost of each span

    def means(self, of_packs: np.ndarray, cp: int) -> np.ndarray:
        """An even share of each pool's attention, float64[ranks, slots].

        of_packs: [ranks, slots], pairs, nanoseconds or seconds of attention over the pack that a rank's group holds.
        """
        pools = of_packs[::cp].reshape(-1, self.replicas, of_packs.shape[1])
        return np.repeat(pools.sum(1) / (self.replicas * cp), self.replicas * cp, axis=0)

    def slowest(self, packs: Packs, grid: np.ndarray, cp: int) -> np.ndarray:
        """How many times that share the rank with most of a pool computes, for which its others wait; float64[ranks, slots].

        The soft cap, or a block above the mean where that is more, and never more than one group holds: what a plan comes to,
        exactly (cp=1) or at most, for masks with no more than a causal one's share of pairs in one block.
        """
        part = self.block / packs.spans.tokens
        last = packs.spans.pairs * np.where(part > 1, part + 1, part * (2 - part)) / self.head_groups
        block = np.maximum.reduceat(last, packs.offsets[:-1])[grid]
        mean, held = self.means(packs.pairs[grid], cp), packs.pairs[grid]
        largest = [
            np.repeat(x.reshape(-1, self.replicas * cp, grid.shape[1]).max(1), self.replicas * cp, axis=0)
            for x in (held, block)
        ]
        most = np.minimum(largest[0], np.maximum(self.slack * mean, mean + largest[1]))
        return np.where(mean > 0, most / np.maximum(mean, 1e-300), 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """One optimizer step: ``packs[i]`` runs in ``slot[i]`` on ranks ``first_rank[i] … + cp_size[i]``.

    ``span_cost`` int64[m] are the cost units (nanoseconds) of the packs' spans, which the solver balanced.
    """

    epoch: int
    step: int
    recipe: str
    cluster: Cluster
    packs: Packs
    slot: np.ndarray  # int64[p]
    first_rank: np.ndarray  # int64[p]
    cp_size: np.ndarray  # int64[p]
    span_cost: np.ndarray  # int64[m]
    largest_group: int  # ranks that one pack may be given
    num_targets: int | None
    rounds: Rounds | None = None
    displacement: float = 0.0
    """How far documents come from their order of admission, on the mean, as a share of the step (a shuffle: a third)."""
    config: dict = field(default_factory=dict)
    """What it was planned from, plain values: told apart when it is loaded again."""
    shared: SharedAttention | None = None

    @property
    def num_slots(self) -> int:
        return int(self.slot.max()) + 1

    @cached_property
    def grid(self) -> np.ndarray:
        """int64[ranks, slots]: the pack that a rank runs in a slot; -1 where the plan leaves one idle."""
        grid = np.full((self.cluster.num_ranks, self.num_slots), -1, np.int64)
        pack = np.repeat(np.arange(len(self.packs)), self.cp_size)
        begin = np.cumsum(self.cp_size) - self.cp_size
        rank = np.arange(len(pack)) - np.repeat(begin - self.first_rank, self.cp_size)
        grid[rank, self.slot[pack]] = pack
        return grid

    @cached_property
    def padded(self) -> np.ndarray:
        """Tokens of each pack, its padding counted, int64[p]."""
        multiple = np.repeat(self.cluster.multiple(self.cp_size), np.diff(self.packs.offsets))
        return self.packs.sums(-(-self.packs.spans.tokens // multiple) * multiple)

    def loads(self) -> Loads:
        """Cost, tokens, pairs and received KV rows (without what a pool migrates) per rank and slot."""
        tokens, cp = self.padded, self.cp_size
        held = -(-tokens // cp)
        cost, pairs = self.packs.sums(self.span_cost), (self.packs.pairs // cp)[self.grid]
        if self.shared is None:
            seconds = -(-cost // cp)[self.grid]
        else:
            attention = self.packs.sums(self.shared.span_cost)
            seconds = -(-(cost - attention) // cp)[self.grid] + self.pooled(attention).astype(np.int64)
            pairs = self.pooled(self.packs.pairs).astype(np.int64)
        return Loads(
            cost=-(-seconds * 1000 // self.cluster.pace[:, None]),
            tokens=held[self.grid],
            pairs=pairs,
            rows=(tokens - tokens // cp)[self.grid],
        )

    def pooled(self, attention: np.ndarray) -> np.ndarray:
        """Of packs' attention (int64 or float64[p]: pairs, nanoseconds, seconds), what the slowest rank of each rank's pool computes,
        rounded up; float64[ranks, slots]. For plans with ``shared``."""
        assert self.shared is not None
        mean = self.shared.means(attention[self.grid], self.cluster.cp)
        slowest = mean * self.shared.slowest(self.packs, self.grid, self.cluster.cp)
        # A mean times its ratio to a whole number is that number but for rounding.
        return slowest if attention.dtype.kind == "f" else np.ceil(slowest * (1 - 1e-12))

    def makespan(self) -> int:
        """Cost units until the last rank is done, waiting as ``sync`` says."""
        cost = self.loads().cost
        return int(cost.max(0).sum() if self.cluster.sync == "slot" else cost.sum(1).max())

    def bound(self) -> int:
        """No plan of these spans ends sooner: the mean over ranks, or the costliest span on the largest group there is."""
        total, costliest = int(self.span_cost.sum()), int(self.span_cost.max(initial=0))
        pace = self.cluster.pace
        return max(-(-total * 1000 // int(pace.sum())), -(-costliest * 1000 // (self.largest_group * int(pace.max()))))

    def operations(self, rank: int) -> np.ndarray:
        """What a rank runs, int64[k, 2] of (FORWARD | RECOMPUTE | BACKWARD, slot), see ``packing.chunkflow``."""
        if self.rounds is None:
            sizes, keep = np.ones(self.num_slots, np.int64), 1
        else:
            replica, keep = rank // self.cluster.cp, self.rounds.keep
            sizes = self.rounds.sizes[self.rounds.offsets[replica] : self.rounds.offsets[replica + 1]]
        return schedule(sizes, keep)

    def check(self, window: Spans | None = None) -> None:
        """Prove the promises: cap kept, equal slots, no rank idle, each span of the ``window`` exactly once.

        Raises AssertionError: a plan that fails here is a bug of the planner, never the user's input.
        """
        cap, name = self.cluster.max_tokens_per_rank, f"step {self.step} of epoch {self.epoch}"
        held = -(-self.padded // self.cp_size)
        assert held.max() <= cap, f"{name}: a rank holds {held.max()} tokens, cap {cap}"
        assert (np.diff(self.packs.offsets) > 0).all(), f"{name}: an empty pack"
        assert self.cp_size.sum() == self.grid.size, f"{name}: {self.cp_size.sum()} runs for {self.grid.size} places"
        assert (self.grid >= 0).all(), f"{name}: ranks {np.flatnonzero((self.grid < 0).any(1))} idle in a slot"
        assert (self.padded >= self.cp_size).all(), f"{name}: fewer tokens than ranks"
        filler = self.packs.spans.document < 0
        assert (self.packs.spans.pairs[filler] == 0).all() and (self.span_cost[filler] == 0).all(), f"{name}: filler"
        if window is not None:
            self._check_chunks(name)
            assert _pieces(self.packs.spans.take(np.flatnonzero(~filler))) == _pieces(window), (
                f"{name}: lost or doubled"
            )

    def _check_chunks(self, name: str) -> None:
        """Chunks of one document lie on one replica, in the order of the document."""
        if self.rounds is None:
            return
        document, start = (
            values[self.packs.offsets[:-1]] for values in (self.packs.spans.document, self.packs.spans.start)
        )
        dependent = np.flatnonzero(self.rounds.chunk_count > 1)
        order = dependent[np.lexsort((start[dependent], document[dependent]))]
        index = self.rounds.chunk_index[order]
        inside = index[1:] > 0
        assert (np.diff(index)[inside] == 1).all(), f"{name}: a chunk is missing"
        assert (np.diff(self.slot[order])[inside] > 0).all(), f"{name}: chunks out of order"
        assert (np.diff(self.first_rank[order])[inside] == 0).all(), f"{name}: a document on two replicas"

    @property
    def digest(self) -> int:
        """64-bit hash of the arrays: equal on all ranks, or the run must stop."""
        spans, state = self.packs.spans, xxhash.xxh3_64(f"{self.recipe}{self.epoch}{self.step}{self.cluster}".encode())
        for array in (spans.document, spans.start, spans.stop, self.packs.offsets, self.slot, self.first_rank):
            state.update(np.ascontiguousarray(array).tobytes())
        state.update(np.ascontiguousarray(self.cp_size).tobytes())
        return state.intdigest()

    def simulate(
        self,
        model: ModelShape,
        shape: ClusterShape | None = None,
        *,
        traffic: str = "ring",
        gradient_bytes: float = 0.0,
        straggle: float = 0.0,
        seed: int = 0,
    ) -> StepTime:
        """Seconds of this step on a cluster (default: dp x cp H100s), see ``simulate.py``."""
        from .simulate import simulate_plan

        return simulate_plan(
            self, model, shape, traffic=traffic, gradient_bytes=gradient_bytes, straggle=straggle, seed=seed
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a ``.npz`` file."""
        from .plan_file import save_plan

        save_plan(self, path)

    @staticmethod
    def load(path: str | PathLike[str], config: dict | None = None) -> StepPlan:
        """Read a plan; ValueError if the file is damaged, or names what differs if ``config`` is another."""
        from .plan_file import load_plan

        return load_plan(path, config)

    def describe(self) -> str:
        """Tokens, seconds, balance and distance to the bound, in a few lines."""
        loads, spans = self.loads(), self.packs.spans
        real = spans.document >= 0
        makespan, bound = self.makespan(), self.bound()
        return (
            f"step {self.step} of epoch {self.epoch}, recipe {self.recipe}: {int(real.sum())} spans, "
            f"{int(spans.tokens[real].sum())} tokens in {len(self.packs)} packs ({int((~real).sum())} fillers, "
            f"{int(self.padded.sum() - self.packs.tokens.sum())} tokens of padding), "
            f"{self.num_slots} slots on {self.cluster.dp} replicas x cp {self.cluster.cp}"
            f"{self._sizes()}\n"
            f"  predicted {makespan / 1e9:.4g} s, lower bound {bound / 1e9:.4g} s ({makespan / max(bound, 1):.3f} x); "
            f"max/mean {loads.imbalance('slot'):.3f} per slot, {loads.imbalance('step'):.3f} per step\n"
            f"  documents are displaced by {self.displacement:.2f} of the step on the mean\n"
            f"  most tokens on a rank {loads.tokens.max()} of {self.cluster.max_tokens_per_rank}; KV rows received per "
            f"rank and layer {loads.rows.sum(1).max()}"
        )

    __str__ = describe

    def _sizes(self) -> str:
        if self.shared is not None:
            return f", attention shared by {self.shared.replicas} to {self.shared.slack:g} of the mean"
        sizes, counts = np.unique(self.cp_size, return_counts=True)
        if len(sizes) == 1:
            return ""
        return ", groups " + ", ".join(f"{count} x cp {size}" for size, count in zip(sizes, counts, strict=True))


def _pieces(spans: Spans) -> list[tuple[int, int, int]]:
    """Canonical list of (document, start, stop), neighbouring pieces of one document joined."""
    order = np.lexsort((spans.start, spans.document))
    document, start, stop = spans.document[order], spans.start[order], spans.stop[order]
    joined = np.r_[False, (document[1:] == document[:-1]) & (start[1:] == stop[:-1])]
    first = np.flatnonzero(~joined)
    last = np.r_[first[1:] - 1, len(document) - 1] if len(first) else first
    return list(zip(document[first].tolist(), start[first].tolist(), stop[last].tolist(), strict=True))
