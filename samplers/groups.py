"""Groups: documents that must not be parted, admitted and packed as one (answers to one prompt, a DPO pair).

Decided here: what an *atom* of admission is. With ``Lengths.group`` an atom is all documents of one group, which enter one
step and one pack; planners see its summed tokens and cost and cannot tell it from a long document. That costs balance: an
atom is as indivisible as its sum is large. Without groups an atom is an item.

    >>> import numpy as np
    >>> from equipoise import Lengths
    >>> lengths = Lengths(tokens=np.array([5, 3, 4, 2]), group=np.array([7, 1, 7, 1]))
    >>> grouped = GroupedItems.of(Items.of(lengths, capacity=10))
    >>> len(grouped), grouped.tokens(np.array([0, 1])).tolist()
    (2, [9, 5])
    >>> spans, _, atom = grouped.spans(np.array([1, 0]))
    >>> spans.document.tolist(), atom.tolist()
    ([1, 3, 0, 2], [0, 0, 1, 1])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..packing.packs import Spans
from .items import Items


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedItems:
    """Groups of items, numbered by their first document; has the methods of ``Items``."""

    items: Items
    member: np.ndarray  # int64[n] items, group after group
    offsets: np.ndarray  # int64[g + 1]
    num_dropped: int  # groups left out as too long

    @classmethod
    def of(cls, items: Items) -> GroupedItems:
        """Group the items by ``lengths.group``. ValueError where a group fits no pack, or would be cut."""
        lengths = items.lengths
        assert lengths.group is not None
        if items.too_long in ("truncate", "split"):
            raise ValueError(
                f"documents of a group stay together and whole; too_long={items.too_long!r} cuts them: use 'error' or 'drop'"
            )
        documents = items.spans(np.arange(len(items)))[0].document
        group = np.asarray(lengths.group)
        _, first, owner = np.unique(group[documents], return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first, kind="stable")] = np.arange(len(first))
        owner = rank[owner]
        member = np.argsort(owner, kind="stable")
        counts = np.bincount(owner)
        offsets = np.r_[0, np.cumsum(counts)]
        tokens = np.add.reduceat(items.tokens(member), offsets[:-1])
        # A group that lost a document to too_long='drop' goes as a whole.
        parted = np.isin(group[documents[member[offsets[:-1]]]], group[lengths.tokens > items.capacity])
        long = np.flatnonzero((tokens > items.capacity) | parted)
        if len(long) and items.too_long == "error":
            worst = long[0]
            raise ValueError(
                f"a group may have at most {items.capacity} tokens, since its documents share a pack; the group of document "
                f"{documents[member[offsets[worst]]]} has {tokens[worst]} in {counts[worst]} documents: raise "
                f"max_tokens_per_rank or cp, or use too_long='drop'"
            )
        kept = np.setdiff1d(np.arange(len(counts)), long)
        if not len(kept):
            raise ValueError(
                f"no document is left to train on: all {len(counts)} groups exceed {items.capacity} tokens"
            )
        keep = np.isin(np.repeat(np.arange(len(counts)), counts), kept)
        return cls(items=items, member=member[keep], offsets=np.r_[0, np.cumsum(counts[kept])], num_dropped=len(long))

    @property
    def lengths(self):
        """The length index."""
        return self.items.lengths

    @property
    def capacity(self) -> int:
        """Tokens that an atom may have."""
        return self.items.capacity

    @property
    def too_long(self) -> str:
        """The policy for what is longer."""
        return self.items.too_long

    @property
    def longest(self) -> int:
        """Tokens of the longest atom."""
        return int(self.tokens(np.arange(len(self))).max())

    @property
    def longest_item(self) -> int:
        """The first atom of the most tokens."""
        return int(self.tokens(np.arange(len(self))).argmax())

    def document_tokens(self, document: np.ndarray) -> np.ndarray:
        """Tokens of whole documents, by their numbers int64[k]."""
        return self.items.document_tokens(document)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _members(self, atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = np.diff(self.offsets)[atoms]
        before = np.cumsum(counts) - counts
        at = np.arange(counts.sum()) + np.repeat(self.offsets[:-1][atoms] - before, counts)
        return self.member[at], np.repeat(np.arange(len(atoms)), counts)

    def spans(self, atoms: np.ndarray) -> tuple[Spans, np.ndarray | None, np.ndarray]:
        """Spans of all documents of these groups, int64[k]; their targets; and which of the k each belongs to."""
        members, atom = self._members(atoms)
        spans, targets, _ = self.items.spans(members)
        return spans, targets, atom

    def tokens(self, atoms: np.ndarray) -> np.ndarray:
        """Tokens of each group, padding counted, int64[k]."""
        members, atom = self._members(atoms)
        return summed(self.items.tokens(members), atom)

    def describe(self) -> str:
        """One sentence with the counts."""
        dropped = f"; {self.num_dropped} groups longer than {self.capacity} tokens dropped" if self.num_dropped else ""
        return f"{self.items.describe()}, in {len(self)} groups{dropped}"


def summed(values: np.ndarray, atom: np.ndarray) -> np.ndarray:
    """Sums of values int64[n] over each atom; ``atom`` int64[n] rises from 0 without a gap."""
    return np.add.reduceat(values, np.flatnonzero(np.diff(atom, prepend=-1))) if len(atom) else values


def atoms_of(spans: Spans, atom: np.ndarray, multiple: int) -> Spans:
    """One stand-in span per atom, with its summed tokens (each document's padded) and pairs: what planners see."""
    tokens = summed(-(-spans.tokens // multiple) * multiple, atom)
    first = np.flatnonzero(np.diff(atom, prepend=-1))
    return Spans(
        document=spans.document[first], start=np.zeros_like(tokens), stop=tokens, pairs=summed(spans.pairs, atom)
    )
