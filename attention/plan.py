"""AttentionPlan: which rank computes which part of attention, and what moves when (the fourth decision, as data).

A plan spans a *domain*: ranks that hold one pack (later: several) between them. Everything is stated in positions of
the pack, in five int64 arrays:

- `home`: the rows each rank holds, in the order it holds them;
- `tiles`: (rank, stage, q0, q1, k0, k1, lo, hi), the pairs a rank computes in a stage (bands.py says what lo, hi are);
- `moves`: (stage, kind, src, dst, start, stop), KV rows that are there before that stage's tiles; the sender holds them
  at home or received them in an earlier stage, which is what a ring does;
- `returns`: the same columns, rows whose dK and dV go from their user `src` to their home `dst` after that stage.

Planners write them, the executor obeys. A plan may list one rank's part only (`rank`), since that of a large group is
long; `traffic` still says what all ranks exchange, since whether a stage communicates at all must be known alike
everywhere. `check()` proves a plan on paper: each pair of the mask once, each row in time, each gradient home once.

    >>> from equipoise.packing.shards import zigzag
    >>> from equipoise.attention.ring import ring_plan
    >>> plan = ring_plan(zigzag([0, 8, 12], 2), ranks=(0, 1))
    >>> plan.check([0, 8, 12])
    >>> print(plan)
    AttentionPlan over 2 ranks, 12 tokens, 2 stages: pairs 23/23 (max/mean 1.000), KV rows received 6/3, returned 6/3
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..packing.mask_kinds import causal, sliding_window
from ..packing.masks import Mask
from . import bands, proof
from .pair_proof import pairs_once
from .windows import cut_routes, cut_tiles

Int64 = npt.NDArray[np.int64]

KV = 0
"""The kind of a move: keys and values. (Moved queries are a later kind.)"""


def check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"A window counts the keys a query sees, itself among them: at least 1; got {window}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """KV rows that the ranks of a plan exchange."""

    by_stage: Int64
    """int64[stages, 2]: rows moved before and returned after each stage, by all ranks. 0: there is no exchange."""
    by_rank: Int64
    """int64[4, P]: rows that each rank sends, receives, returns and reduces."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """See the module. Ranks inside the arrays are indices into `ranks`: 0 … len(ranks)-1."""

    ranks: tuple[int, ...]
    """Rank numbers of the domain in the whole run, in the order of its process group."""
    tokens: int
    """Length of the pack."""
    home_offsets: Int64
    """int64[P+1], CSR: rank → rows of `home`."""
    home: Int64
    """int64[n, 2], (start, stop)."""
    tiles: Int64
    """int64[m, 8]."""
    moves: Int64
    """int64[n, 6]."""
    returns: Int64
    """int64[n, 6]."""
    rank: int | None = None
    """Index of the only rank whose tiles are here; None: those of all."""
    head_chunks: int = 1
    """KV heads are exchanged and computed in so many turns, at most one each: as much less of received KV is held at once."""
    known: Traffic | None = None
    """What all ranks exchange, where moves and returns are only those that `rank` takes part in; None: they are all here."""
    planner: Callable[[int], AttentionPlan] | None = field(default=None, repr=False)
    """Makes this plan for a window; None: `windowed` cuts what is listed."""
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What executors prepared from the plan (device tensors, kernel handles): left behind when the plan is pickled."""

    def __post_init__(self) -> None:
        for name, width in (("home", 2), ("tiles", 8), ("moves", 6), ("returns", 6)):
            array = np.ascontiguousarray(getattr(self, name), dtype=np.int64)
            if array.ndim != 2 or array.shape[1] != width:
                raise ValueError(f"AttentionPlan.{name} must be int64[n, {width}]; got shape {array.shape}.")
            object.__setattr__(self, name, array)
        object.__setattr__(self, "home_offsets", np.asarray(self.home_offsets, dtype=np.int64))
        if len(self.home_offsets) != len(self.ranks) + 1:
            raise ValueError(f"home_offsets must have {len(self.ranks) + 1} entries; got {len(self.home_offsets)}.")
        if self.known is not None and self.rank is None:
            raise ValueError(
                "What all ranks exchange follows from their moves and returns: leave out known, or say whose rank's they are."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": {}}

    @property
    def stages(self) -> int:
        """Number of stages, at least 1."""
        columns = (self.tiles[:, 1], self.moves[:, 0], self.returns[:, 0])
        listed = 1 + max((int(column.max()) for column in columns if len(column)), default=0)
        return listed if self.known is None else max(listed, len(self.known.by_stage))

    @property
    def traffic(self) -> Traffic:
        """What all ranks exchange."""
        return self.known or self._listed_traffic()

    def home_of(self, rank: int) -> Int64:
        """(start, stop) of what `rank` holds, in the order it holds them, int64[n, 2]."""
        return self.home[self.home_offsets[rank] : self.home_offsets[rank + 1]]

    def tokens_of(self, rank: int) -> int:
        """How many tokens `rank` holds."""
        home = self.home_of(rank)
        return int((home[:, 1] - home[:, 0]).sum())

    def windowed(self, window: int) -> AttentionPlan:
        """The same attention for keys q - window < k <= q only: less is computed, and rows that nobody sees do not travel.

        Made once and kept in `cache`. A plan that lists one rank's part, and whose planner is not at hand, moves as much
        as before. Raises ValueError for a window below 1.
        """
        check_window(window)
        if window >= self.tokens:
            return self
        key = ("window", window)
        if key not in self.cache:
            made = self._cut(window) if self.planner is None else self.planner(window)
            self.cache[key] = replace(made, head_chunks=self.head_chunks)
        return self.cache[key]

    def _cut(self, window: int) -> AttentionPlan:
        tiles, moves, returns = cut_tiles(self.tiles, window), self.moves, self.returns
        if self.rank is None:
            moves, returns = cut_routes(tiles, moves, returns, len(self.ranks), self.tokens)
        return replace(self, tiles=tiles, moves=moves, returns=returns)

    def check(self, mask: npt.ArrayLike | Mask, window: int | None = None) -> None:
        """Prove the plan for a mask, or raise ValueError naming the pairs and rows where it fails.

        mask: of the pack's documents; or their boundaries alone, int[k+1] from 0 to `tokens`: causal within each. window: how
        many keys a query sees, itself among them; None: all that the mask gives it. With `rank` given, the queries of that rank
        are checked, the tiles of the others being elsewhere. Takes time and memory of ranks x tokens: for tests.
        """
        wanted = mask if isinstance(mask, Mask) else self._causal(mask)
        if int(wanted.tokens.sum()) != self.tokens:
            raise ValueError(f"The mask is of {int(wanted.tokens.sum())} tokens, the plan of {self.tokens}.")
        if window is not None:
            wanted = wanted & sliding_window(wanted.tokens, window)
        owner = proof.owners(self.home_offsets, self.home, self.tokens)
        arrival = proof.arrivals(owner, self.moves, len(self.ranks), None if self.known is None else self.rank)
        computing = range(len(self.ranks)) if self.rank is None else [self.rank]
        proof.tiles_are_fed(self.tiles, owner, arrival, computing)
        pairs_once(self.tiles, owner, wanted.tiles_of_pack(), computing)
        proof.gradients_return(self.tiles, self.returns, owner, arrival, computing)
        if self.known is not None and self.rank is not None:
            listed = self._listed_traffic()
            proof.traffic_is_known(self.rank, listed.by_stage, listed.by_rank, self.known.by_stage, self.known.by_rank)

    def _causal(self, cu_seqlens: npt.ArrayLike) -> Mask:
        cu = np.asarray(cu_seqlens, dtype=np.int64)
        if cu.ndim != 1 or len(cu) == 0 or cu[0] != 0 or cu[-1] != self.tokens or np.any(np.diff(cu) < 0):
            raise ValueError(f"cu_seqlens must rise from 0 to the plan's {self.tokens} tokens; got {cu}.")
        return causal(np.diff(cu))

    def loads(self, bytes_per_row: int = 1) -> Loads:
        """What every rank computes, sends and receives. bytes_per_row: those of one token's K and V, h_kv · (D + V) · itemsize.

        With `rank` given, pairs of other ranks are not known here and count as 0.
        """
        pairs = np.zeros(len(self.ranks), np.int64)
        np.add.at(pairs, self.tiles[:, 0], bands.pairs(self.tiles[:, 2:]))
        sent, received, returned, reduced = self.traffic.by_rank
        return Loads(
            pairs=pairs,
            rows_sent=sent,
            rows_received=received,
            rows_returned=returned,
            rows_reduced=reduced,
            bytes_per_row=bytes_per_row,
        )

    def describe(self) -> str:
        """One line: size, pairs per rank and their evenness, KV rows per rank (at most eight ranks are listed)."""
        loads = self.loads()
        own = slice(None) if self.rank is None else slice(self.rank, self.rank + 1)
        even = f" (max/mean {_evenness(loads.pairs):.3f})" if self.rank is None else f" (rank {self.rank} alone)"
        return (
            f"AttentionPlan over {len(self.ranks)} ranks, {self.tokens} tokens, {self.stages} stages: "
            f"pairs {_listed(loads.pairs[own])}{even}, "
            f"KV rows received {_listed(loads.rows_received)}, returned {_listed(loads.rows_returned)}"
        )

    def __str__(self) -> str:
        return self.describe()

    def _listed_traffic(self) -> Traffic:
        """What the moves and returns listed here add up to."""
        by_stage = np.zeros((self.stages, 2), np.int64)
        by_rank = np.zeros((4, len(self.ranks)), np.int64)
        for kind, routes in enumerate((self.moves, self.returns)):
            rows = routes[:, 5] - routes[:, 4]
            np.add.at(by_stage[:, kind], routes[:, 0], rows)
            for side in (0, 1):
                np.add.at(by_rank[2 * kind + side], routes[:, 2 + side], rows)
        return Traffic(by_stage=by_stage, by_rank=by_rank)


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """Work and traffic of each rank of a plan, int64[P] each, for one layer."""

    pairs: Int64
    """(query, key) pairs computed."""
    rows_sent: Int64
    """KV rows sent in forward (and again in backward unless they are kept)."""
    rows_received: Int64
    rows_returned: Int64
    """dK, dV rows sent home in backward."""
    rows_reduced: Int64
    """dK, dV rows received at home."""
    bytes_per_row: int = 1

    @property
    def bytes_sent(self) -> Int64:
        return self.rows_sent * self.bytes_per_row

    @property
    def bytes_received(self) -> Int64:
        return self.rows_received * self.bytes_per_row


def _evenness(values: Int64) -> float:
    return float(values.max() * len(values) / max(int(values.sum()), 1))


def _listed(values: Int64) -> str:
    return "/".join(map(str, values[:8].tolist())) + ("/…" if len(values) > 8 else "")
