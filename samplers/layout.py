"""Layout: packs and places while a step is being solved, and what every recipe's layout goes through before it is a plan.

A solver may leave packs empty and work on atoms (groups of documents); here atoms become documents again, order is restored
where it was asked for, and fillers see to it that no rank is idle: a document -1 that weighs nothing fills each pack up to
one token per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..packing.packs import Packs, Spans
from .plan import Rounds


@dataclass(kw_only=True, eq=False)
class Layout:
    """Packs in CSR form over ``spans`` and where they run; a pack may be empty until fillers are added."""

    spans: Spans
    units: np.ndarray
    order: np.ndarray
    offsets: np.ndarray
    slot: np.ndarray
    first_rank: np.ndarray
    cp_size: np.ndarray
    rounds: Rounds | None = None


def displacement(layout: Layout) -> float:
    """How far documents come from where they were admitted, on the mean, as a share of the step."""
    owner = np.repeat(np.arange(len(layout.slot)), np.diff(layout.offsets))
    came = (layout.slot[owner] + 0.5) / (int(layout.slot.max()) + 1)
    meant = (layout.order + 0.5) / len(layout.order)
    return float(np.abs(came - meant).mean())


def in_order(layout: Layout) -> Layout:
    """Spans of a pack by admission, slots by the mean of their spans."""
    owner = np.repeat(np.arange(len(layout.slot)), np.diff(layout.offsets))
    order = layout.order[np.lexsort((layout.order, owner))]
    slot, slots = layout.slot[owner], int(layout.slot.max()) + 1
    total, held = np.bincount(slot, weights=order, minlength=slots), np.bincount(slot, minlength=slots)
    mean = np.where(held > 0, total / np.maximum(held, 1), len(order))
    return replace(layout, order=order, slot=_places(mean)[layout.slot])


def largest_first(layout: Layout) -> Layout:
    """Slots by the most tokens that one of their ranks holds, falling."""
    owner = np.repeat(np.arange(len(layout.slot)), np.diff(layout.offsets))
    tokens = np.bincount(owner, weights=layout.spans.tokens[layout.order], minlength=len(layout.slot))
    most = np.zeros(int(layout.slot.max()) + 1)
    np.maximum.at(most, layout.slot, -(-tokens // layout.cp_size))
    return replace(layout, slot=_places(-most)[layout.slot])


def _places(keys: np.ndarray) -> np.ndarray:
    """int64[n]: the place of each key once they are sorted."""
    places = np.empty(len(keys), np.int64)
    places[np.argsort(keys, kind="stable")] = np.arange(len(keys))
    return places


def ungrouped(layout: Layout, spans: Spans, units: np.ndarray, atom: np.ndarray) -> Layout:
    """The layout of atoms as one of their documents."""
    counts = np.bincount(atom)
    first = np.cumsum(counts) - counts
    held = counts[layout.order]
    before = np.cumsum(held) - held
    order = np.arange(held.sum()) + np.repeat(first[layout.order] - before, held)
    offsets = np.r_[0, np.cumsum(held)][layout.offsets]
    return replace(layout, spans=spans, units=units, order=order, offsets=offsets)


def with_fillers(layout: Layout, padded: bool) -> tuple[Packs, np.ndarray]:
    """Packs and the cost of their spans; each pack of fewer tokens than ranks is filled up to one token per rank.

    Where documents are ``padded`` their padding does that, and only empty packs need a filler.
    """
    spans, units = layout.spans.take(layout.order), layout.units[layout.order]
    packs = Packs(spans=spans, offsets=layout.offsets)
    tokens = packs.tokens
    short = np.flatnonzero(tokens < (1 if padded else layout.cp_size))
    if not len(short):
        return packs, units
    zero = np.zeros(len(short), np.int64)
    fillers = Spans(document=zero - 1, start=zero, stop=(layout.cp_size - tokens)[short], pairs=zero)
    owner = np.r_[np.repeat(np.arange(len(packs)), np.diff(packs.offsets)), short]
    order = np.argsort(owner, kind="stable")
    offsets = np.r_[0, np.cumsum(np.bincount(owner, minlength=len(packs)))]
    return Packs(spans=Spans.concat([spans, fillers]).take(order), offsets=offsets), np.r_[units, zero][order]
