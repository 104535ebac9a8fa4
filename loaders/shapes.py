"""Shapes: micro-batches of the same sizes, for compilers, CUDA graphs and pipelines, which want every one alike.

Decided here: what is put behind a pack to bring it to a fixed size. The filler is documents -1 of tokens 0 and labels -100
that weigh nothing, cut so short that attention over them costs next to nothing: 512 tokens, longer ones where
``max_docs`` leaves no room for so many. Boundaries behind the last document repeat the end: documents of no tokens, which
flash-attention takes and some recurrent kernels do not, so they are only there when asked for, and ``num_docs`` tells.

Cost: the padding itself; ``pad_to`` is also the most tokens a rank may hold, so the planner fills packs up to it.

    >>> shapes = Shapes(pad_to=1024, max_docs=8, max_seqlen_bucket=256)
    >>> shapes.fillers(num_docs=3, tokens=1300, cp_size=2, multiple=1)
    array([374, 374])
    >>> shapes.ends(np.array([0, 700, 1000, 1300, 1674, 2048], np.int32)).tolist(), shapes.longest(700)
    ([0, 700, 1000, 1300, 1674, 2048, 2048, 2048, 2048], 768)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..samplers.admission import Window
    from ..samplers.plan import StepPlan
    from ..samplers.solver import Planner, Solver

FILLER_TOKENS = 512
UNEVEN = ("dacp", "mixed", "dispatch", "joint", "blocks")  # rules that give ranks unequal shares


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes that are the same in every micro-batch; None: as they come."""

    pad_to: int | None = None
    """Tokens that every rank holds."""
    max_docs: int | None = None
    """Documents of a pack, fillers included: ``cu_seqlens`` has ``max_docs + 1`` entries."""
    max_seqlen_bucket: int | None = None
    """``max_seqlen`` is rounded up to a multiple of this."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (int(value) != value or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")

    def cap(self, max_tokens_per_rank: int) -> int:
        """The most tokens that a rank may be planned to hold. Raises ValueError where ``pad_to`` is more than it may hold."""
        if self.pad_to is not None and self.pad_to > max_tokens_per_rank:
            raise ValueError(
                f"a rank may hold {max_tokens_per_rank} tokens, padding counted; got pad_to={self.pad_to}: raise "
                f"max_tokens_per_rank or lower pad_to"
            )
        return self.pad_to or max_tokens_per_rank

    def checked(self, planner: Planner) -> Planner:
        """The planner, each of its plans held against ``max_docs`` on all ranks alike."""

        def plans(windows: Iterable[Window], solver: Solver) -> Iterator[tuple[StepPlan, float]]:
            for plan, seconds in planner(windows, solver):
                self.check_plan(np.diff(plan.packs.offsets), plan.padded, plan.cp_size)
                yield plan, seconds

        return plans

    def check_rule(self, shard: str, pad_tp: int = 0, cp: int = 1) -> None:
        """Refuse a shard rule that gives ranks unequal shares, and padding of documents that does not divide ``pad_to``.

        ``pad_tp``: as the sampler's; ``cp``: ranks of the largest CP group.
        """
        if self.pad_to is None:
            return
        if shard in UNEVEN:
            raise ValueError(
                f"pad_to={self.pad_to} needs a shard rule that gives ranks equal shares; shard={shard!r} does not: use "
                f"shard='zigzag', or leave pad_to out"
            )
        multiple = pad_tp * (2 if cp > 1 else 1)
        if multiple and self.pad_to % multiple:
            raise ValueError(
                f"with pad_tp={pad_tp} and cp={cp} a rank holds a multiple of {multiple} tokens; got pad_to={self.pad_to}: "
                f"use {-(-self.pad_to // multiple) * multiple}"
            )

    def check_plan(self, num_spans: np.ndarray, tokens: np.ndarray, cp_size: np.ndarray) -> None:
        """ValueError where a pack of the step exceeds a size, with the largest.

        num_spans, tokens, cp_size: int64[p] of each pack; the planner's fillers and the padding of documents counted.
        """
        held = -(-tokens // cp_size)
        if self.pad_to is not None and held.max() > self.pad_to:
            raise ValueError(
                f"pad_to={self.pad_to} must hold the tokens of every rank; the largest of this step has {held.max()}: lower "
                f"max_tokens_per_rank to {self.pad_to}, or raise pad_to"
            )
        if self.max_docs is None:
            return
        short = 0 if self.pad_to is None else tokens < self.pad_to * cp_size
        docs = num_spans + short
        if docs.max() > self.max_docs:
            largest = int(docs.argmax())
            filler = " and a filler up to pad_to" if docs[largest] > num_spans[largest] else ""
            raise ValueError(
                f"max_docs={self.max_docs} must hold the documents of every micro-batch; the largest of this step has "
                f"{num_spans[largest]}{filler}: raise max_docs to {docs[largest]}, or lower max_tokens_per_rank"
            )

    def fillers(self, *, num_docs: int, tokens: int, cp_size: int, multiple: int) -> np.ndarray:
        """Tokens int64[f] of the documents that fill a pack up to ``pad_to`` on each rank, each a ``multiple``."""
        self.check_plan(np.array([num_docs]), np.array([tokens]), np.array([cp_size]))
        if self.pad_to is None:
            return np.zeros(0, np.int64)
        left, rest = divmod(self.pad_to * cp_size - tokens, multiple)
        if rest:
            share = multiple // gcd(multiple, cp_size)
            raise ValueError(
                f"documents are padded to a multiple of {multiple} tokens for {cp_size} ranks, which pad_to={self.pad_to} tokens "
                f"on each do not make up: use {-(-self.pad_to // share) * share}"
            )
        count = -(-left // max(1, FILLER_TOKENS // multiple))
        if self.max_docs is not None:
            count = min(count, self.max_docs - num_docs)
        even, longer = divmod(left, max(count, 1))
        return (even + (np.arange(count) < longer)) * multiple

    def ends(self, cu_seqlens: np.ndarray) -> np.ndarray:
        """Boundaries int[max_docs + 1]: the end repeated behind those given; as they are without ``max_docs``."""
        if self.max_docs is None:
            return cu_seqlens
        return np.pad(cu_seqlens, (0, self.max_docs + 1 - len(cu_seqlens)), mode="edge")

    def longest(self, tokens: int) -> int:
        """``max_seqlen`` for a longest document of so many tokens."""
        bucket = self.max_seqlen_bucket or 1
        return -(-tokens // bucket) * bucket
