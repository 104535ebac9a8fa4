"""Groups of unequal size: the documents of one slot onto groups of ranks, the step that dynamic CP and FlexSP share.

Decided here, for one slot: how many ranks a document's group has, and which documents share a group. A group of c ranks
that holds documents of work W and T tokens takes ``(W + token_units[c]·T) / c``: linear and quadratic work, and what
moving its tokens costs at that size (FlexSP's all-to-all, the rows of a ring). It may hold c·cap tokens.

Documents come by falling work under a *target* time that no group may exceed. Each goes into the smallest group whose
time and tokens both allow it, of these the fullest; else it opens the smallest group that holds it, from free ranks;
else groups are merged, those of most slack first, into the smallest that holds it. Work beyond the target so buys
more ranks, and once work is level the light documents fill what memory is left. Too low a target fails;
``best_groups`` tries several and keeps the least of makespan + price x received rows, since one group of all ranks
balances perfectly and moves most.

Cost: documents find their group by bisection; 110 documents on 64 ranks take 10–60 µs per target.

    >>> import numpy as np
    >>> rules = GroupRules.of(num_ranks=8, cap=2048)
    >>> tokens = np.array([8000, 3000, 900, 800, 500, 400])
    >>> groups = best_groups(tokens**2, tokens, rules, price=100_000, targets=(100, 1000))
    >>> groups.size[groups.group]                                 # ranks that each document got
    array([4, 2, 1, 1, 1, 1])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..packing.assign import same_length
from ..packing.packs import Int64
from .group_search import HUGE, SCALE, fill_slots, search, search_least

TARGETS = (100, 30, 60, 10, 200, 600)
"""Targets that are tried, in thousandths above the mean of the ranks; none at all where no one of them can be kept."""


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """What groups are allowed and what they cost; made by ``GroupRules.of``."""

    num_ranks: int
    cap: int
    """Tokens that a rank may hold."""
    pad: int
    """Documents are padded to a multiple of pad x group size, of pad / 2 on one rank (2: zigzag); 0: not at all."""
    sizes: Int64
    """Group sizes that may be used, rising."""
    token_units: Int64
    """int64[num_ranks + 1]: a group of c ranks spends token_units[c] / c on each of its tokens, beside their work."""

    @staticmethod
    def of(
        *, num_ranks: int, cap: int, degrees: str = "powers", pad: int = 0, token_units: npt.ArrayLike | None = None
    ) -> GroupRules:
        """degrees: "powers" (of two, and all ranks at once; groups are aligned to their size), or "any".

        token_units: int[num_ranks + 1], entry c for groups of c ranks; a negative entry forbids the size.
        """
        if num_ranks < 1 or cap < 1 or pad < 0:
            raise ValueError(f"Groups need num_ranks >= 1, cap >= 1, pad >= 0; got {num_ranks}, {cap} and {pad}.")
        if degrees not in ("powers", "any"):
            raise ValueError(f'degrees is "powers" (of two, and all ranks at once) or "any"; got {degrees!r}.')
        units = np.zeros(num_ranks + 1, np.int64) if token_units is None else np.array(token_units, dtype=np.int64)
        if units.shape != (num_ranks + 1,):
            raise ValueError(f"token_units has an entry for 0 … {num_ranks} ranks; got shape {units.shape}.")
        every = np.arange(1, num_ranks + 1)
        legal = every if degrees == "any" else every[((every & (every - 1)) == 0) | (every == num_ranks)]
        legal = legal[units[legal] >= 0]
        if not len(legal):
            raise ValueError(f"No group size of 1 … {num_ranks} ranks is left; give one of them token_units >= 0.")
        return GroupRules(num_ranks=num_ranks, cap=cap, pad=pad, sizes=legal, token_units=units)

    def smallest(self, tokens: npt.ArrayLike) -> Int64:
        """The fewest ranks that may hold each document, int64[n]; 0 where it fits into no group."""
        size, tokens = self.sizes, np.asarray(tokens, dtype=np.int64)
        fits = self.padded(tokens[:, None], size) <= self.cap * size
        return np.where(fits.any(1), size[fits.argmax(1)], 0)

    def padded(self, tokens: npt.ArrayLike, size: npt.ArrayLike) -> Int64:
        """Tokens of documents once padded for groups of `size` ranks, int64[...]."""
        size = np.asarray(size, dtype=np.int64)
        step = np.where(size > 1, self.pad * size, (self.pad + 1) // 2) if self.pad else np.int64(1)
        return -(-np.asarray(tokens, dtype=np.int64) // step) * step


class Groups(NamedTuple):
    """The groups of one slot: document i is in group[i], which has size[group[i]] ranks."""

    group: Int64
    size: Int64
    makespan: int
    """Cost units of the slowest group."""
    rows: int
    """Sum over documents of tokens x (group size - 1): the KV rows that the ranks of a ring receive."""


def best_groups(
    work: npt.ArrayLike,
    tokens: npt.ArrayLike,
    rules: GroupRules,
    *,
    price: int = 0,
    targets: tuple[int, ...] = TARGETS,
    first: int | None = None,
    limit: int = HUGE,
) -> Groups | None:
    """The groups of least ``256·makespan + price·rows`` among those that the targets lead to, the first of equals.

    work (cost units), tokens: int[n]. targets: thousandths above the mean of the ranks; first: one in cost units that
    is tried before them. limit: a score to undercut. Returns None where none of them undercuts it, or where the
    documents do not fit.
    """
    work, tokens = same_length(work, tokens)
    mean, without_limit = _bounds(work, tokens, rules, price)
    given = [] if first is None else [min(first, without_limit)]
    tried = np.array(given + [mean + mean * t // 1000 for t in targets] + [without_limit], np.int64)
    order = np.argsort(-work, kind="stable")
    found, group, size, makespan, rows = search(
        work, tokens, order, rules.num_ranks, rules.cap, rules.pad, rules.sizes, rules.token_units, tried, price, limit
    )
    return Groups(group, size, int(makespan), int(rows)) if found else None


def least_groups(work: npt.ArrayLike, tokens: npt.ArrayLike, rules: GroupRules, *, rounds: int = 12) -> Groups | None:
    """The groups of least makespan that `rounds` bisections find, to 0.1 %; None where the documents do not fit."""
    work, tokens = same_length(work, tokens)
    mean, without_limit = _bounds(work, tokens, rules, 0)
    order = np.argsort(-work, kind="stable")
    found, group, size, makespan, rows = search_least(
        work, tokens, order, rules.num_ranks, rules.cap, rules.pad, rules.sizes, rules.token_units,
        mean, without_limit, rounds,
    )  # fmt: skip
    return Groups(group, size, int(makespan), int(rows)) if found else None


def filled_slots(work: npt.ArrayLike, tokens: npt.ArrayLike, rules: GroupRules) -> tuple[Int64, Int64]:
    """(Slot of each document int64[n], a target for each slot): slots filled one after the other, as Megatron does it.

    A slot begins with the costliest document left and takes, by falling cost, what fits in time and tokens beside it,
    each document on the fewest ranks that hold it. Slots so hold documents of like length and short ones that fill
    the gaps.
    """
    work, tokens = same_length(work, tokens)
    _bounds(work, tokens, rules, 0)
    order = np.argsort(-work, kind="stable")
    return fill_slots(
        work, tokens, order, rules.num_ranks, rules.cap, rules.pad, rules.sizes, rules.token_units
    )  # fmt: skip


def _bounds(work: Int64, tokens: Int64, rules: GroupRules, price: int) -> tuple[int, int]:
    """(Mean work of the ranks, a target that no group exceeds); refuses work whose scores int64 cannot hold."""
    total, held = int(work.sum()), int(tokens.sum())
    most = total + int(rules.token_units[rules.sizes].max()) * held
    if SCALE * most + price * rules.num_ranks * held >= HUGE:
        raise ValueError(
            f"Work of {total} units, and communication, of one slot must stay below 2**53 units, and a price of rows "
            f"in proportion; got price={price}. State costs in a larger unit."
        )
    return -(-total // rules.num_ranks), min(most + 1, HUGE // rules.num_ranks)


class Placement(NamedTuple):
    """A step: pack i holds documents order[offsets[i]:offsets[i+1]], in slot[i], on ranks first_rank[i] … + cp_size[i].

    Every rank is in one pack of every slot; packs stand by slot, then by rank. A rank that got no document has an empty
    pack to itself.
    """

    order: Int64
    offsets: Int64
    slot: Int64
    first_rank: Int64
    cp_size: Int64


def place(slots: list[tuple[Int64, Groups]], work: Int64, num_ranks: int) -> Placement:
    """Give the groups of each slot (its documents, int64[k] indices into `work`; their groups) their ranks.

    Larger groups come first, which aligns powers of two; among groups of one size the busier ones go to ranks that did
    less so far.
    """
    done = np.zeros(num_ranks, np.int64)
    order, counts, first, width = [], [], [], []
    for documents, groups in slots:
        size = np.concatenate([groups.size, np.ones(num_ranks - groups.size.sum(), np.int64)])
        load = np.zeros(len(size), np.int64)
        np.add.at(load, groups.group, work[documents])
        load //= size
        busiest = np.lexsort((-load, -size))
        size = size[busiest]
        start = np.cumsum(size) - size
        busy = np.maximum.reduceat(done, start)
        block = np.empty(len(size), np.int64)
        block[busiest] = np.lexsort((busy, -size))
        busy[block] += load
        done = np.repeat(busy, size)
        at = block[groups.group]
        order.append(documents[np.argsort(at, kind="stable")])
        counts.append(np.bincount(at, minlength=len(size)))
        first.append(start)
        width.append(size)
    return Placement(
        order=np.concatenate(order),
        offsets=np.cumsum(np.concatenate([[0], *counts])),
        slot=np.repeat(np.arange(len(slots)), [len(sizes) for sizes in width]),
        first_rank=np.concatenate(first),
        cp_size=np.concatenate(width),
    )


def loads(placement: Placement, work: Int64, tokens: Int64, rules: GroupRules) -> Int64:
    """Cost units of each rank in each slot, int64[num_ranks, slots]."""
    of_pack = np.repeat(np.arange(len(placement.slot)), np.diff(placement.offsets))
    load, held = np.zeros((2, len(placement.slot)), np.int64)
    np.add.at(load, of_pack, work[placement.order])
    np.add.at(held, of_pack, tokens[placement.order])
    c = placement.cp_size
    each = -(-(load + rules.token_units[c] * held) // c)
    return np.repeat(each, c).reshape(-1, rules.num_ranks).T
