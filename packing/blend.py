"""Blend: which sources a length index holds one after the other, and in what shares documents are drawn from them.

Decided here: what a weight means (a share of the *documents* drawn, not of the tokens) and the names of what becomes of
a source that runs out, which are those of HF ``interleave_datasets``. Shares are rounded once, to 2⁻³⁰ and so that they
sum to one, so that every machine draws alike; ``samplers/mixture.py`` makes the order of documents from them.

    >>> blend = Blend(sizes=(1000, 50), weights=(3, 1), exhausted="first_exhausted")
    >>> blend.offsets, blend.shares / ONE
    (array([   0, 1000, 1050]), array([0.75, 0.25]))
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import isfinite

import numpy as np

from .packs import Int64

EXHAUSTED = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement")
ONE = 1 << 30  # the sum of all shares


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Sources of a length index, the first documents being those of source 0, and how they are mixed.

    Args:
        sizes: documents of each source.
        weights: shares of the documents drawn, of any sum; none below 10⁻⁹ of it.
        exhausted: an epoch ends when the first source would run out (``first_exhausted``; the next epoch goes on with
            the documents that were left); or once the last has been seen, the smaller ones being repeated
            (``all_exhausted``); or when all have been seen once, an exhausted source dropping out while the rest go on
            in the shares they have among themselves (``all_exhausted_without_replacement``).
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    exhausted: str

    def __post_init__(self) -> None:
        if self.exhausted not in EXHAUSTED:
            raise ValueError(f"exhausted must be one of {', '.join(EXHAUSTED)}; got {self.exhausted!r}")
        if len(self.sizes) == 0 or len(self.weights) != len(self.sizes):
            raise ValueError(
                f"a blend has at least one source and one weight for each; got {len(self.sizes)} sources, "
                f"{len(self.weights)} weights"
            )
        for source, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
            if int(size) != size or size < 0:
                raise ValueError(f"a source has a whole number of documents; source {source} has {size!r}")
            if not (isfinite(weight) and weight > 0):
                raise ValueError(
                    f"a weight must be positive and finite; source {source} has {weight!r}: leave out a source that is "
                    f"not to be seen"
                )
        object.__setattr__(self, "sizes", tuple(int(size) for size in self.sizes))
        object.__setattr__(self, "weights", tuple(float(weight) for weight in self.weights))
        if self.shares.min() < 1:
            source = int(self.shares.argmin())
            raise ValueError(
                f"a weight must be at least 1e-9 of the sum of weights; source {source} has {self.weights[source]!r} of "
                f"{sum(self.weights)!r}"
            )

    @property
    def offsets(self) -> Int64:
        """int64[k + 1]: source i holds the documents ``offsets[i] … offsets[i + 1]``."""
        return np.cumsum([0, *self.sizes], dtype=np.int64)

    @cached_property
    def shares(self) -> Int64:
        """int64[k] in units of 1 / ONE, by largest remainder: they sum to ONE."""
        exact = [Fraction(weight) for weight in self.weights]
        wanted = [share * ONE / sum(exact) for share in exact]
        whole = [share.numerator // share.denominator for share in wanted]
        by_remainder = sorted(range(len(wanted)), key=lambda source: (whole[source] - wanted[source], source))
        for source in by_remainder[: ONE - sum(whole)]:
            whole[source] += 1
        return np.array(whole, np.int64)

    def describe(self) -> str:
        """Sources, shares and policy, in a line."""
        told = ", ".join(
            f"{size} documents at {share / ONE:.3g}"
            for size, share in zip(self.sizes, self.shares.tolist(), strict=True)
        )
        return f"{len(self.sizes)} sources ({told}), {self.exhausted}"

    __str__ = describe
