"""AttentionPlan: which rank computes which part of attention, and what moves when (the fourth decision, as data).

A plan spans a *domain*: ranks that hold one pack between them, or several, laid end to end. Everything is stated in
positions of the pack, in five int64 arrays:

- `home`: the rows each rank holds, in the order it holds them;
- `tiles`: (rank, stage, q0, q1, k0, k1, lo, hi), the pairs a rank computes in a stage (bands.py says what lo, hi are);
- `moves`: (stage, kind, src, dst, start, stop), KV or Q rows that are there before that stage's tiles; the sender holds
  them at home or received them in an earlier stage, which is what a ring does;
- `returns`: the same columns, rows that go from their user `src` to their home `dst` after that stage: of KV rows the
  dK and dV, in backward; of Q rows O and LSE in forward, where home merges them, and dQ in backward. `dst` may be a rank on
  the way instead, which was sent the row too: it adds what it has, and the sum goes on after a later stage.

Heads may be computed in different places: with `head_groups` = G each position stands G times, at group · tokens + token,
for H/G query heads and K/G KV heads each. `home` stays in tokens; tiles, moves and returns are in these *virtual*
positions, and a tile lies in one group.

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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..packing.mask_kinds import causal, sliding_window
from ..packing.masks import Mask
from . import bands, proof, traffic
from .pair_proof import pairs_once
from .traffic import KV as KV
from .traffic import Loads as Loads
from .traffic import Q as Q
from .traffic import Traffic as Traffic
from .traffic import evenness, listed_traffic, told
from .windows import cut_routes, cut_tiles

Int64 = npt.NDArray[np.int64]


def check_window(window: int) -> None:
    if window < 1:
        raise ValueError(f"A window counts the keys a query sees, itself among them: at least 1; got {window}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionPlan:
    """See the module. Ranks inside the arrays are indices into `ranks`: 0 … len(ranks)-1."""

    ranks: tuple[int, ...]
    """Rank numbers of the domain in the whole run, in the order of its process group."""
    tokens: int
    """Length of the pack, or of all packs of the domain."""
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
    head_groups: int = 1
    """Groups of heads that are placed each for itself; divides the query and the KV heads."""
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
        if self.head_groups < 1:
            raise ValueError(f"A plan has at least one head group; got head_groups={self.head_groups}.")
        for name in ("moves", "returns"):
            kinds = getattr(self, name)[:, 1]
            if np.any((kinds != KV) & (kinds != Q)):
                raise ValueError(f"AttentionPlan.{name} are of KV, {KV}, or of Q, {Q}; got kinds {np.unique(kinds)}.")
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
        return listed if self.known is None else max(listed, self.known.stages)

    @property
    def traffic(self) -> Traffic:
        """What all ranks exchange."""
        return self.known or self._listed_traffic()

    def _listed_traffic(self) -> Traffic:
        return listed_traffic(self.moves, self.returns, self.stages, len(self.ranks))

    @property
    def moves_queries(self) -> bool:
        """Whether any rank computes for queries of another; known alike on all ranks."""
        return bool(self.traffic.of(Q)[1].any())

    def home_of(self, rank: int) -> Int64:
        """(start, stop) of what `rank` holds, in the order it holds them, int64[n, 2]."""
        return self.home[self.home_offsets[rank] : self.home_offsets[rank + 1]]

    def tokens_of(self, rank: int) -> int:
        """How many tokens `rank` holds."""
        home = self.home_of(rank)
        return int((home[:, 1] - home[:, 0]).sum())

    def windowed(self, window: int) -> AttentionPlan:
        """The same attention for keys k > q - window only: less is computed, and rows that nobody sees do not travel.

        Keys ahead of a query, where the mask has any, stay. Made once and kept in `cache`. A plan that lists one rank's part, and whose planner is not at hand, moves as much
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
            moves, returns = cut_routes(tiles, moves, returns, len(self.ranks), self.tokens * self.head_groups)
        return replace(self, tiles=tiles, moves=moves, returns=returns)

    def check(self, mask: npt.ArrayLike | Mask, window: int | None = None) -> None:
        """Prove the plan for a mask, or raise ValueError naming the pairs and rows where it fails.

        mask: of the pack's documents (of all packs of the domain, end to end); or their boundaries alone, int[k+1] from 0 to
        `tokens`: causal within each. window: how many keys a query sees, itself among them; None: all that the mask gives it.
        With `rank` given, the queries that this rank holds and computes alone are checked, the tiles of the others being
        elsewhere. Takes time and memory of ranks x tokens x head groups: for tests.
        """
        wanted = mask if isinstance(mask, Mask) else self._causal(mask)
        if int(wanted.tokens.sum()) != self.tokens:
            raise ValueError(f"The mask is of {int(wanted.tokens.sum())} tokens, the plan of {self.tokens}.")
        if window is not None:
            wanted = wanted & sliding_window(wanted.tokens, window)
        P, only = len(self.ranks), None if self.known is None else self.rank
        owner = np.tile(proof.owners(self.home_offsets, self.home, self.tokens), self.head_groups)
        computing = range(P) if self.rank is None else [self.rank]
        tiles = proof.in_groups(self.tiles, self.tokens, self.head_groups)
        routes = [[x[x[:, 1] == kind] for x in (self.moves, self.returns)] for kind in (KV, Q)]
        arrival = [proof.arrivals(owner, moves, P, only) for moves, _ in routes]
        proof.tiles_are_fed(tiles, owner, arrival, computing)
        self._check_pairs(tiles, owner, wanted.tiles_of_pack(), computing)
        for kind, (_, returns) in enumerate(routes):
            proof.rows_return(tiles, returns, kind, owner, arrival[kind], computing)
        if self.known is not None and self.rank is not None:
            listed = self._listed_traffic()
            for kind in (KV, Q):
                proof.traffic_is_known(self.rank, *listed.of(kind), *self.known.of(kind))

    def _check_pairs(self, tiles: Int64, owner: Int64, mask: Int64, computing: Iterable[int]) -> None:
        """Of each head group, in tokens. Of a rank that is listed alone, queries that go elsewhere may be computed there."""
        away = proof.moved(self.moves[self.moves[:, 1] == Q], len(owner)) & (self.rank is not None)
        holders = np.where(away, len(self.ranks), owner)
        for group in range(self.head_groups):
            first = group * self.tokens
            own = tiles[tiles[:, 2] // self.tokens == group] - np.array([0, 0, first, first, first, first, 0, 0])
            try:
                pairs_once(own, holders[first : first + self.tokens], mask, computing)
            except ValueError as error:
                raise ValueError(f"Head group {group}: {error}" if self.head_groups > 1 else f"{error}") from None

    def _causal(self, cu_seqlens: npt.ArrayLike) -> Mask:
        cu = np.asarray(cu_seqlens, dtype=np.int64)
        if cu.ndim != 1 or len(cu) == 0 or cu[0] != 0 or cu[-1] != self.tokens or np.any(np.diff(cu) < 0):
            raise ValueError(f"cu_seqlens must rise from 0 to the plan's {self.tokens} tokens; got {cu}.")
        return causal(np.diff(cu))

    def loads(self, bytes_per_row: int = 1) -> Loads:
        """What every rank computes, sends and receives. bytes_per_row: those of one KV row, K / head_groups · (D + V) · itemsize.

        With `rank` given, pairs of other ranks are not known here and count as 0.
        """
        pairs = np.zeros(len(self.ranks), np.int64)
        np.add.at(pairs, self.tiles[:, 0], bands.pairs(self.tiles[:, 2:]))
        sent, received, returned, reduced = self.traffic.of(KV)[1]
        q_sent, q_received, q_returned, q_reduced = self.traffic.of(Q)[1]
        return Loads(
            pairs=pairs,
            rows_sent=sent,
            rows_received=received,
            rows_returned=returned,
            rows_reduced=reduced,
            q_rows_sent=q_sent,
            q_rows_received=q_received,
            q_rows_returned=q_returned,
            q_rows_reduced=q_reduced,
            bytes_per_row=bytes_per_row,
        )

    def bytes_moved(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        itemsize: int,
        value_dim: int | None = None,
        *,
        backward: bool = False,
        keep: bool = True,
    ) -> Int64:
        """Bytes of a layer's forward, or of its backward: int64[2, 2, P], (sent, received) x (KV, Q) x rank.

        dim: of queries and keys. value_dim: of values, if it is another. keep: whether what was received was kept, as in
        `attend`. Raises ValueError where the head groups do not divide the heads.
        """
        self.check_heads((heads // kv_heads,) * kv_heads)
        share = heads // self.head_groups, kv_heads // self.head_groups
        return traffic.bytes_moved(self.traffic, *share, dim, itemsize, value_dim, backward=backward, keep=keep)

    def check_heads(self, per_kv: tuple[int, ...]) -> None:
        """ValueError unless heads divide into the plan's groups alike. per_kv: query heads of each KV head."""
        G, share = self.head_groups, len(per_kv) // self.head_groups
        if per_kv != per_kv[:share] * G:
            raise ValueError(
                f"A plan of {G} head groups needs heads that {G} divides; got {sum(per_kv)} query heads over {len(per_kv)} "
                f"KV heads{'' if len(set(per_kv)) == 1 else f' ({told(np.array(per_kv))} each)'}. Plan with as many "
                "groups as divide the KV heads."
            )

    def describe(self) -> str:
        """One line: size, pairs per rank and their evenness, rows per rank (at most eight ranks are listed)."""
        loads = self.loads()
        own = slice(None) if self.rank is None else slice(self.rank, self.rank + 1)
        even = f" (max/mean {evenness(loads.pairs):.3f})" if self.rank is None else f" (rank {self.rank} alone)"
        queries = f"; Q rows received {told(loads.q_rows_received)}, returned {told(loads.q_rows_returned)}"
        return (
            f"AttentionPlan over {len(self.ranks)} ranks, {self.tokens} tokens"
            f"{f' x {self.head_groups} head groups' if self.head_groups > 1 else ''}, {self.stages} stages: "
            f"pairs {told(loads.pairs[own])}{even}, "
            f"KV rows received {told(loads.rows_received)}, returned {told(loads.rows_returned)}"
            f"{queries if self.moves_queries else ''}"
        )

    def __str__(self) -> str:
        return self.describe()
