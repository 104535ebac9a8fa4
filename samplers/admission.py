"""Admission: which documents enter step t of epoch e. Balancing comes later and never changes this.

Decided here: where one step ends and the next begins, in a stream of items (``order.py``). It is a pure function of the length
index, the options, the seed, the epoch and the step, so every rank agrees without a collective.

Cost: ~30 ns per document for its place in the order, the gather of its length and the sum; with ``packs_per_step`` a dozen
best-fit runs per step. A resumed run jumps to its step at once: the state holds the step's place in the stream. That place,
not the step's number, is where the next step begins, so a run may go on with other step sizes.

    >>> import numpy as np
    >>> from equipoise import Lengths
    >>> items = Items.of(Lengths.from_array(np.array([5, 0, 3, 9])), capacity=8, too_long="split")
    >>> from equipoise.samplers.order import Shuffled
    >>> in_order = Shuffled(size=len(items), seed=0, shuffle=False)
    >>> admission = Admission(items=items, order=in_order, step_size=StepSize(documents_per_step=2), capacity=8)
    >>> [admission.window(0, step).spans.document.tolist() for step in range(admission.num_steps(0))]
    [[0, 2], [3, 3]]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..packing.assign import best_fit_decreasing
from ..packing.packs import Spans
from .groups import GroupedItems
from .items import Items
from .order import Order, key_of

LAST = ("partial", "drop", "carry")
_BLOCK = 1 << 16  # items scanned at a time when step edges depend on their lengths


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """How much one optimizer step holds, over all ranks: exactly one of the three.

    ``packs_per_step`` admits the longest run of documents that best-fit-decreasing lays into that many packs.
    """

    documents_per_step: int | None = None
    tokens_per_step: int | None = None
    packs_per_step: int | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                "a step has one size: give exactly one of documents_per_step, tokens_per_step, packs_per_step; "
                f"got {given or 'none of them'}"
            )
        ((name, value),) = given.items()
        if int(value) != value or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """The documents of one step, in admission order."""

    epoch: int
    step: int
    key: int  # of (seed, epoch, step), for whatever the solver shuffles
    spans: Spans
    num_targets: int | None  # None: not known from the index
    atom: np.ndarray  # int64[n] rising: spans of one number must share a pack
    num_slots: int | None = None  # where admission decided it


@dataclass(kw_only=True, eq=False)
class Admission:
    """Cuts the endless stream (epoch 0, epoch 1, …) of items into steps.

    Args:
        order: the stream.
        last: what becomes of an incomplete last step: ``partial`` keeps it, ``drop`` leaves it out (see ``dropped``),
            ``carry`` lets its documents open the next epoch.
    """

    items: Items | GroupedItems
    order: Order
    step_size: StepSize
    capacity: int
    seed: int = 0
    last: str = "partial"
    count_targets: bool = True
    _starts: dict[int, int] = field(default_factory=lambda: {0: 0}, init=False, repr=False)
    _resumed: tuple[int, int, int] | None = field(default=None, init=False, repr=False)  # epoch, step, position
    _edges: dict[int, tuple[int, list[int]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.last not in LAST:
            raise ValueError(f"last must be one of {', '.join(LAST)}; got {self.last!r}")
        size, count = self.step_size, self.order.size
        if size.tokens_per_step is not None:
            largest = self.items.longest
            if size.tokens_per_step < largest:
                raise ValueError(
                    f"a step must hold the longest document: tokens_per_step is {size.tokens_per_step}, the longest "
                    f"document (or piece) has {largest} tokens; raise tokens_per_step"
                )
        if self.last != "partial" and self._next_edge(0, count) is None:
            raise ValueError(
                f"last={self.last!r} leaves no step at all: the {count} documents do not fill one step of "
                f"{size}; lower the step size or use last='partial'"
            )

    def resume(self, epoch: int, step: int, position: int, start: int) -> None:
        """Begin this step at this position of the stream, in an epoch that began at ``start``."""
        self._starts[epoch], self._resumed = start, (epoch, step, position)
        self._edges = {known: edges for known, edges in self._edges.items() if known < epoch}

    def _next_edge(self, first: int, end: int) -> int | None:
        """Where the step that begins at ``first`` ends; None if the stream's ``end`` comes before it is complete."""
        size = self.step_size
        if size.documents_per_step is not None:
            return first + size.documents_per_step if first + size.documents_per_step <= end else None
        budget = size.tokens_per_step or (size.packs_per_step or 0) * self.capacity
        tokens, full = np.zeros(0, np.int64), False
        while not full and first + len(tokens) < end:
            at = first + len(tokens)
            more = self.items.tokens(self.order.at(at, min(end, at + max(64, min(_BLOCK, 2 * len(tokens))))))
            tokens = np.concatenate([tokens, more])
            full = tokens.sum() >= budget
        count = int(np.searchsorted(np.cumsum(tokens), budget, side="right"))
        if size.packs_per_step is not None:
            count = _longest_fit(tokens[:count], size.packs_per_step, self.capacity)
        if first + count < end or tokens.sum() == budget:  # all packs are full: no document could follow
            return first + count
        return None

    def start(self, epoch: int) -> int:
        """Position in the stream of the epoch's first document."""
        if self.last != "carry":
            return epoch * self.order.size
        if epoch not in self._starts:
            if self.step_size.documents_per_step is None:
                self._starts[epoch] = self._edge(epoch - 1, None)
            else:  # all edges behind a known one lie on its grid
                position, size = self._nearest(epoch), self.step_size.documents_per_step
                return position + (epoch * self.order.size - position) // size * size
        return self._starts[epoch]

    def _nearest(self, epoch: int) -> int:
        """The last known edge before an epoch."""
        known = max(number for number in self._starts if number < epoch)
        if self._resumed is not None and known <= self._resumed[0] < epoch:
            return self._resumed[2]
        return self._starts[known]

    def _first_edge(self, epoch: int) -> tuple[int, int]:
        """A step of the epoch and the position where it begins."""
        if self._resumed is not None and self._resumed[0] == epoch:
            return self._resumed[1:]
        return 0, self.start(epoch)

    def position(self, epoch: int, step: int) -> int:
        """Where a step begins in the stream; where the epoch's steps end if it has no such step."""
        if step == 0:
            return self.start(epoch)
        edge = self._edge(epoch, step)
        return edge if edge >= 0 else self._edge(epoch, None)

    def _edge(self, epoch: int, step: int | None) -> int:
        """Position where a step begins (None: where the epoch's last step ends), scanning no further than needed; -1 if
        it has no such step."""
        first, edges = self._edges.setdefault(epoch, (self._first_edge(epoch)[0], [self._first_edge(epoch)[1]]))
        end = (epoch + 1) * self.order.size
        size = self.step_size.documents_per_step
        if step is not None and step < first:
            raise ValueError(
                f"step {step} of epoch {epoch} lies before step {first}, where the run goes on from a state: set_epoch({epoch}) "
                f"begins the epoch anew"
            )
        if size is not None:
            last = self.num_steps(epoch)
            if step is not None and step > last:
                return -1
            return min(edges[0] + ((last if step is None else step) - first) * size, end)
        at = len(edges) - 1
        while (step is None or first + at < step) and edges[at] >= 0:
            following = self._next_edge(edges[at], end) if edges[at] < end else None
            if following is None and edges[at] < end and self.last == "partial":
                following = end
            at += 1
            # -1 closes the list. Put in its place, for another thread may be scanning too, and finds the same.
            edges[at : at + 1] = [-1 if following is None else following]
        if step is None:
            return edges[at - 1]
        return edges[step - first] if step - first < len(edges) else -1

    def num_steps(self, epoch: int) -> int:
        """Steps of the epoch, exact."""
        size = self.step_size.documents_per_step
        first, position = self._first_edge(epoch)
        if size is None:
            self._edge(epoch, None)
            return first + len(self._edges[epoch][1]) - 2
        span = (epoch + 1) * self.order.size - position
        return first + (-(-span // size) if self.last == "partial" else span // size)

    def dropped(self, epoch: int) -> int:
        """Items that ``last='drop'`` leaves out of the epoch."""
        return (epoch + 1) * self.order.size - self._edge(epoch, None) if self.last == "drop" else 0

    def members(self, epoch: int, step: int) -> np.ndarray | None:
        """Items int64[k] that a step admits, in order; None behind the epoch's last."""
        first, stop = self._edge(epoch, step), self._edge(epoch, step + 1)
        return None if first < 0 or stop < 0 else self.order.at(first, stop)

    def window(self, epoch: int, step: int) -> Window | None:
        """The documents of a step; None behind the epoch's last."""
        members = self.members(epoch, step)
        return None if members is None else self.window_of(epoch, step, members)

    def window_of(self, epoch: int, step: int, members: np.ndarray, num_slots: int | None = None) -> Window:
        """A step of these items."""
        spans, targets, atom = self.items.spans(members)
        known = self.count_targets and targets is not None
        return Window(
            epoch=epoch,
            step=step,
            key=key_of(self.seed, epoch, step),
            spans=spans,
            atom=atom,
            num_targets=int(targets.sum()) if known and targets is not None else None,
            num_slots=num_slots,
        )


def _longest_fit(tokens: np.ndarray, num_packs: int, capacity: int) -> int:
    """Largest prefix (by bisection) that best-fit-decreasing lays into ``num_packs`` packs; at least ``num_packs`` items fit."""
    low, high = min(num_packs, len(tokens)), len(tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if len(best_fit_decreasing(tokens[:middle], capacity)[1]) - 1 <= num_packs:
            low = middle
        else:
            high = middle - 1
    return low
