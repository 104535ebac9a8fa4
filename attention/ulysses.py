"""Ulysses: an all-to-all that trades tokens for heads, attention over all tokens of a group, and the all-to-all back
(Jacobs et al. 2023, DeepSpeed-Ulysses); and 2-D: Ulysses among neighbours, any other plan between their groups (USP,
LoongTrain, Megatron-LM's a2a+p2p).

P ranks are P / degree groups of `degree` neighbours, on one node where they can be. Inside its group each rank gets all
tokens that the group holds for its share of the heads; between groups an AttentionPlan (ring, direct sends, gather)
joins the ranks that have the same place in their groups, for those heads. With degree = P, Ulysses alone, each rank has
the whole pack, so attention is causal per document with no merge, and traffic per rank falls with the group's size:
2·(H + K)·tokens/P · D values, where a ring moves 2·K·tokens·(P-1)/P · D. With a smaller degree the ring between groups
moves tokens/degree · 2·K·D values at most, and heads no longer limit the number of ranks.

What is decided: place i of U computes query heads ⌊i·H/U⌋ … ⌊(i+1)·H/U⌋, so H need not be a multiple of U, only at least
U; it is sent the KV heads these look at and no others, so a KV head goes to several ranks where U exceeds K. q, k, v
travel in one all-to-all with uneven splits, so tokens need not divide either. No torch here: trade.py runs it.

    >>> from equipoise.packing.shards import contiguous, divided, zigzag
    >>> print(ulysses_plan(contiguous([0, 5, 11], 2), ranks=(0, 1), rank=0))
    UlyssesPlan over 2 ranks, 11 tokens in 2 documents: rank 0 holds 6
    >>> print(ulysses_plan(divided(zigzag([0, 5, 11], 2), 3), ranks=tuple(range(6)), rank=0, degree=3).outer)
    AttentionPlan over 2 ranks, 11 tokens, 2 stages: pairs 15 (rank 0 alone), KV rows received 6/3, returned 6/3
"""

# P ranks, U ranks of a group, H query heads, K key heads, D head dim.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..packing.shards import Shards, together
from .plan import KV, AttentionPlan, Int64, Q, check_window
from .ring import ring_plan
from .traffic import bytes_moved


@dataclass(frozen=True, kw_only=True, eq=False)
class UlyssesPlan:
    """Where the tokens of a pack are, and how groups attend; heads are divided when the tensors are seen."""

    ranks: tuple[int, ...]
    """Rank numbers of the domain: group after group."""
    rank: int
    """Index of the rank that runs this plan."""
    degree: int
    """Ranks of a group; divides their number."""
    cu_seqlens: Int64
    """int64[k+1], document boundaries of the pack."""
    home_offsets: Int64
    """int64[P+1], CSR: rank → rows of `home`."""
    home: Int64
    """int64[n, 2], (start, stop) of what each rank holds, in the order it holds them."""
    outer: AttentionPlan
    """Between groups, for the ranks with this one's place; each holds what its group does, in the order of the pack."""
    window: int | None = None
    """How many keys a query sees, itself among them; None: all up to itself."""
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    """What the executor prepared from the plan: left behind when the plan is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": {}}

    @property
    def tokens(self) -> int:
        """Length of the pack."""
        return self.outer.tokens

    @property
    def place(self) -> int:
        """Of this rank in its group."""
        return self.rank % self.degree

    @property
    def inner_ranks(self) -> tuple[int, ...]:
        """Rank numbers of this rank's group."""
        first = self.rank - self.place
        return self.ranks[first : first + self.degree]

    def home_of(self, rank: int) -> Int64:
        """(start, stop) of what `rank` holds, in the order it holds them, int64[n, 2]."""
        return self.home[self.home_offsets[rank] : self.home_offsets[rank + 1]]

    def tokens_of(self, rank: int) -> int:
        """How many tokens `rank` holds."""
        home = self.home_of(rank)
        return int((home[:, 1] - home[:, 0]).sum())

    def windowed(self, window: int) -> UlyssesPlan:
        """The same for a query's last `window` keys only; kept in the cache."""
        check_window(window)
        if window >= self.tokens:
            return self
        if ("window", window) not in self.cache:
            self.cache["window", window] = replace(self, window=window, outer=self.outer.windowed(window))
        return self.cache["window", window]

    def shares(self, heads: int, kv_heads: int) -> list[HeadShare]:
        """Heads of each place in a group. Raises ValueError where there are fewer query heads than ranks in it."""
        if heads < self.degree:
            P = len(self.ranks)
            legal = [str(degree) for degree in range(1, min(heads, P) + 1) if P % degree == 0]
            raise ValueError(
                f"Ulysses gives every rank of a group at least one query head; got {heads} heads for groups of "
                f"{self.degree}. Legal degrees over these {P} ranks are {', '.join(legal)}: choose attend='ring' with "
                f"ulysses={legal[-1]}, or, where group sizes are planned, FlexSp(max_group={heads})."
            )
        return [head_share(place, self.degree, heads, kv_heads) for place in range(self.degree)]

    def bytes_sent(
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
        """What each rank sends to others in a layer's forward, or in its backward, in bytes, int64[P].

        dim: of queries and keys. value_dim: of values, if it is another. keep: whether received KV was kept, as in `attend`.
        Gradients between groups travel in at least 4 bytes a value.
        """
        P, U, out_dim = len(self.ranks), self.degree, dim if value_dim is None else value_dim
        place, group = np.arange(P) % U, np.arange(P) // U
        shares = self.shares(heads, kv_heads)
        q = np.array([share.q1 - share.q0 for share in shares])
        kv_held = np.array([share.k1 - share.k0 for share in shares])
        there, back = q * dim + kv_held * (dim + out_dim), q * out_dim
        if backward:
            there, back = back, there
        held = np.array([self.tokens_of(rank) for rank in range(P)])
        others = np.bincount(group, held).astype(np.int64)[group] - held
        inner = held * (there.sum() - there[place]) + back[place] * others
        rows, G = [self.outer.traffic.of(kind)[1][:, group] for kind in (KV, Q)], self.outer.head_groups
        traffic = replace(self.outer.traffic, by_rank=rows[KV], q_by_rank=rows[Q])
        heads_here = q[place] // G, kv_held[place] // G
        between = bytes_moved(traffic, *heads_here, dim, itemsize, value_dim, backward=backward, keep=keep)
        return inner * itemsize + between[0].sum(0)

    def describe(self) -> str:
        groups = f" in groups of {self.degree}" if self.degree < len(self.ranks) else ""
        return (
            f"UlyssesPlan over {len(self.ranks)} ranks{groups}, {self.tokens} tokens in {len(self.cu_seqlens) - 1} "
            f"documents: rank {self.rank} holds {self.tokens_of(self.rank)}"
            + (f"; between groups {self.outer}" if groups else "")
        )

    def __str__(self) -> str:
        return self.describe()


def ulysses_plan(
    shards: Shards,
    ranks: tuple[int, ...],
    rank: int,
    *,
    degree: int | None = None,
    outer: Callable[[Shards, tuple[int, ...], int], AttentionPlan] = ring_plan,
) -> UlyssesPlan:
    """Ulysses over any shards of causal documents. rank: an index into `ranks`.

    degree: ranks that trade heads with each other; None: all of them. outer: what plans between groups of them, given the
    shards of the groups, the ranks to run it, and which of them this is. Shards made by `divided` suit it best: what the
    neighbours of a group hold is then the shard of a group.
    """
    P = shards.cp_size
    if len(ranks) != P or not 0 <= rank < P:
        raise ValueError(
            f"{P} shards need {P} ranks and an index 0 … {P - 1} of them; got ranks {ranks}, index {rank}."
        )
    degree = P if degree is None else degree
    if degree < 1 or P % degree:
        raise ValueError(f"Groups of Ulysses must divide the ranks; got degree={degree} for {P} ranks.")
    return UlyssesPlan(
        ranks=tuple(ranks),
        rank=rank,
        degree=degree,
        cu_seqlens=shards.cu_seqlens,
        home_offsets=shards.offsets,
        home=shards.segments,
        outer=outer(together(shards, degree), tuple(ranks[rank % degree :: degree]), rank // degree),
    )


@dataclass(frozen=True, kw_only=True)
class HeadShare:
    """Heads of one place: queries q0 … q1, and the KV heads k0 … k1 they look at."""

    q0: int
    q1: int
    k0: int
    k1: int
    per_kv: tuple[int, ...]
    """How many of these query heads look at each of these KV heads."""


def head_share(place: int, degree: int, heads: int, kv_heads: int) -> HeadShare:
    """Heads of a place of `degree`."""
    q0, q1, group = place * heads // degree, (place + 1) * heads // degree, heads // kv_heads
    k0, k1 = q0 // group, (q1 - 1) // group + 1
    ends = [min(max(kv * group, q0), q1) for kv in range(k0, k1 + 1)]
    return HeadShare(q0=q0, q1=q1, k0=k0, k1=k1, per_kv=tuple(b - a for a, b in pairwise(ends)))
