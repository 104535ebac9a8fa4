"""StreamAdmission: which documents enter step t where there is no index, and each is known only once it was read.

A stream lies in a fixed number of parts. Its order is by rounds: document 0 of part 0, of part 1, …, then document 1 of
each; parts that are over are passed over. That order knows neither ranks nor workers, and neither do the steps cut from it
here: what the next documents are is asked of ``more``, whose answer is the same on every rank. So is the state, a few
numbers: the round and part where reading goes on, and what is still to come of the documents before.

Steps come in turn; there is no looking ahead to their number. ``last="carry"`` makes an endless stream of the epochs, as in
``Admission``. Cost: some ten microseconds a step and a table of the documents that are known and not yet released.

    >>> from equipoise.samplers.stream_order import told
    >>> parts = [[5, 3], [7], [2, 9, 4]]                                              # tokens of each part's documents
    >>> admission = StreamAdmission(items=StreamItems(capacity=9), more=told(parts), num_parts=3,
    ...                             step_size=StepSize(documents_per_step=4))
    >>> [admission.window(0, step).spans.tokens.tolist() for step in range(2)], admission.window(0, 2)
    ([[5, 7, 2, 3], [9, 4]], None)
    >>> admission.position(0, 1)["round"], admission.position(0, 1)["part"]           # where step 1 is looked for
    (1, 1)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np

from ..packing.packs import Int64
from .admission import LAST, StepSize, Window
from .order import key_of
from .stream_items import Documents, StreamItems, counts_of, item_of, number_of, piece_of
from .stream_order import More, Place

_KEPT = 16  # steps whose documents and positions can still be asked for


@dataclass(kw_only=True, eq=False)
class StreamAdmission:
    """Cuts a stream into steps; has the methods of ``Admission``, but for the number of steps.

    Args:
        more: tells what the next visits find, the same on every rank.
        num_parts: parts of the stream.
        last: what becomes of an incomplete last step: ``partial``, ``drop`` (counted) or ``carry`` (it opens the next epoch).
    """

    items: StreamItems
    more: More
    num_parts: int
    step_size: StepSize
    seed: int = 0
    last: str = "partial"
    place: Place = field(default_factory=lambda: Place(epoch=0), init=False)
    _epoch: int = field(default=0, init=False)
    _step: int = field(default=0, init=False)  # the next to be admitted
    _edge: int = field(default=0, init=False)  # the first item that no step admitted
    _next: int = field(default=0, init=False)  # number of the next document to arrive
    _waiting: Int64 = field(default_factory=lambda: np.zeros(0, np.int64), init=False, repr=False)
    _over: bool = field(default=False, init=False)
    _ends: dict[int, Place] = field(
        default_factory=dict, init=False, repr=False
    )  # of epochs that documents are carried from
    _starts: dict[int, dict] = field(default_factory=dict, init=False, repr=False)
    _members: dict[int, Int64] = field(default_factory=dict, init=False, repr=False)
    _positions: dict[int, dict] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.last not in LAST:
            raise ValueError(f"last must be one of {', '.join(LAST)}; got {self.last!r}")
        if self.step_size.packs_per_step is not None:
            raise ValueError(
                "packs_per_step needs lengths that are known ahead, and a stream's are not: give documents_per_step or "
                "tokens_per_step"
            )
        self._positions[0] = self.start(0)

    @property
    def capacity(self) -> int:
        """Tokens that an item may have."""
        return self.items.capacity

    def start(self, epoch: int) -> dict:
        """Where an epoch begins. Behind an epoch whose end was not read, that is its own first document."""
        if epoch not in self._starts:
            fresh = {"epoch": epoch, "round": 0, "part": 0, "ends": [], "number": 0, "edge": [0, 0], "held": []}
            self._starts[epoch] = {**fresh, "counts": asdict(self.items.counts), "columns": self.items.columns}
        return self._starts[epoch]

    def position(self, epoch: int, step: int) -> dict:
        """Where a step begins, for ``resume``: plain JSON. Known for the next step and some before it."""
        if step == 0:
            return self.start(epoch)
        if epoch != self._epoch or step not in self._positions:
            raise ValueError(f"where step {step} of epoch {epoch} begins is not known: {self._stands()}")
        return self._positions[step]

    def resume(self, epoch: int, step: int, position: dict, start: dict) -> None:
        """Begin this step at this position, in an epoch that began at ``start``; nothing is read again where reading stands
        there already."""
        own = epoch == self._epoch and step == self._step and position == self._positions.get(step)
        following = epoch == self._epoch + 1 and step == 0 and self._over and position == self._starts.get(epoch)
        self._starts = {epoch: start}
        if own:
            return
        if following:
            self._begin(epoch)
            return
        edge, held = position["edge"], [item_of(*pair) for pair in position["held"]]
        self.items.renumber(self._next)
        self.items.counts, self.items.columns = counts_of(position["counts"]), position["columns"]
        self.place = Place.of(position)
        self._epoch, self._step, self._over, self._ends = epoch, step, False, {}
        self._edge, self._next, self._waiting = item_of(*edge), position["number"], np.array(held, np.int64)
        self._members, self._positions = {}, {step: position}

    def members(self, epoch: int, step: int) -> Int64 | None:
        """Items int64[k] that a step admits, in order; None behind the epoch's last.

        Steps come in turn, each of the last ones again if asked for. Raises ValueError for another, and where the stream's
        documents break a rule, on all ranks alike.
        """
        if epoch == self._epoch and step in self._members:
            return self._members[step]
        if (epoch, step) != (self._epoch, self._step) and step == 0:
            self.resume(epoch, 0, self.start(epoch), self.start(epoch))
        if epoch != self._epoch or (step != self._step and not (self._over and step > self._step)):
            raise ValueError(f"a stream's steps come in turn, not step {step} of epoch {epoch}: {self._stands()}")
        items = None if self._over else self._admitted()
        if items is None:
            if not self._over:
                self._close()
            return None
        self._step += 1
        self._members[step] = items
        self._members.pop(step - _KEPT, None)
        self._waiting = np.union1d(self._waiting, items)
        self._pass(int(items[-1]))
        return items

    def _stands(self) -> str:
        return f"step {self._step} of epoch {self._epoch} comes next; load the state of another to go there"

    def _admitted(self) -> Int64 | None:
        """The next step's items; None where the epoch is over."""
        while True:
            items = self.items.behind(self._edge)
            count, missing = self.items.cut(items, self.step_size, len(self._members.get(self._step - 1, ())))
            if not missing:
                return items[:count]
            if not self._read(missing):
                return items if len(items) and self.last == "partial" else None

    def _read(self, count: int) -> bool:
        """Look for ``count`` more documents; False where the epoch has none left."""
        self._roll()
        if len(self.place.ends) == self.num_parts:
            return False
        found = self.more(self.place, count, self.items.columns)
        self.items.columns = found.columns
        new = Documents.of(
            epoch=self.place.epoch, part=found.part, ordinal=found.ordinal, tokens=found.tokens, targets=found.targets
        )
        self.items.extend(new, first=self._next)
        self._next += len(new)
        self.place = self.place.behind(count, self.num_parts, found.ends)
        return True

    def _roll(self) -> None:
        """Where documents are carried, reading goes on with the epoch that they open."""
        if len(self.place.ends) == self.num_parts and self.place.epoch < self._epoch:
            self._ends = {self.place.epoch: self.place}
            self.place = Place(epoch=self.place.epoch + 1)

    def _pass(self, item: int) -> None:
        """Let the edge lie behind this item."""
        number, piece = number_of(item), piece_of(item)
        before = number_of(self._edge)
        row = self.items.rows.pieces[np.searchsorted(self.items.rows.number, number)]
        self._edge = item_of(number, piece + 1) if piece + 1 < row else item_of(number + 1, 0)
        self.items.passed(before, number_of(self._edge))

    def _close(self) -> None:
        """The epoch is over: settle what is left of it, and where the next one begins."""
        rest = self.items.behind(self._edge)
        if self._step == 0:
            raise ValueError(self._nothing(len(rest)))
        self._over = True
        first = number_of(self._edge)
        if self.last == "carry":
            self._starts[self._epoch + 1] = self._here(self._waiting[:0], first)
            return
        self.items.passed(first, self._next)
        self.items.counts.left_out += len(rest)
        self._edge = item_of(self._next, 0)

    def _nothing(self, left: int) -> str:
        told = f"epoch {self._epoch} of the stream has {self._next} documents, {left} items that can be admitted"
        if not left:
            return f"no document is left to train on: {told}"
        return (
            f"last={self.last!r} leaves no step at all: {told}, which do not fill one step of {self.step_size}; lower the step "
            f"size or use last='partial'"
        )

    def _begin(self, epoch: int) -> None:
        """Go on with the next epoch, which the rest of the one before opens if it is carried."""
        first = number_of(self._edge)
        self.items.renumber(first)
        self._edge, self._next = self._edge - item_of(first, 0), self._next - first
        self._epoch, self._step, self._over = epoch, 0, False
        self._waiting = self._waiting[:0]
        self._members, self._positions = {}, {0: self._starts[epoch]}
        self._roll()

    def _here(self, waiting: Int64, base: int = 0) -> dict:
        """The position of the edge and of what waits before it; documents are numbered from ``base``."""
        edge = self._edge
        front = number_of(min([edge, *waiting[:1].tolist()]))
        place = self.place
        if front < self._next:
            epoch, part, ordinal = (int(of[0]) for of in self.items.where(np.array([front])))
            place = (place if epoch == place.epoch else self._ends[epoch]).earlier(ordinal, part)
        return {
            "epoch": place.epoch,
            "round": place.round,
            "part": place.part,
            "ends": [list(end) for end in place.ends],
            "number": front - base,
            "edge": [number_of(edge) - base, piece_of(edge)],
            "held": np.stack([number_of(waiting) - base, piece_of(waiting)], 1).tolist(),
            "counts": asdict(self.items.counts),
            "columns": self.items.columns,
        }

    def window(self, epoch: int, step: int) -> Window | None:
        """The documents of a step; None behind the epoch's last."""
        members = self.members(epoch, step)
        return None if members is None else self.window_of(epoch, step, members)

    def window_of(self, epoch: int, step: int, members: Int64, num_slots: int | None = None) -> Window:
        """A step of these items, which are released with it; what was admitted and is not waits."""
        spans, targets, atom = self.items.spans(members)
        self._waiting = np.setdiff1d(self._waiting, members)
        self.items.give(members, step)
        self.items.forget(number_of(self._edge), self._waiting, step - _KEPT)
        self._positions.setdefault(step + 1, self._here(self._waiting))
        self._positions.pop(step - _KEPT, None)
        return Window(
            epoch=epoch,
            step=step,
            key=key_of(self.seed, epoch, step),
            spans=spans,
            atom=atom,
            num_targets=None if targets is None else int(targets.sum()),
            num_slots=num_slots,
        )

    def catch_up(self, wanted: Int64) -> None:
        """Of what waits in a resumed run only the items ``wanted``, int64[k], are to come: read their documents again."""
        self._waiting = np.intersect1d(self._waiting, wanted)
        stop = int(number_of(self._waiting).max(initial=-1)) + 1
        while self._next < stop and self._read(stop - self._next):
            pass

    def released(self, window: Window) -> None:
        """A window that was not made here, what was left of a step under way, takes its items along."""
        items = np.unique(item_of(window.spans.document, window.spans.start // self.capacity))
        self._waiting = np.setdiff1d(self._waiting, items)
        self.items.give(items, window.step)

    def num_steps(self, epoch: int) -> int:
        """Raises TypeError: only reading tells."""
        raise TypeError(
            f"the number of steps of epoch {epoch} is not known: a stream has no index, and ends where its parts do"
        )

    def dropped(self, epoch: int) -> int:
        """Items that ``last='drop'`` has left out of epochs so far."""
        return self.items.counts.left_out

    def unreleased(self) -> tuple[Int64, Int64, Int64]:
        """Where the documents were read that are known and still to be released: epoch, part, ordinal, int64[k]."""
        rows = self.items.rows
        waits = np.isin(rows.number, number_of(self._waiting))
        known = rows.take(waits | ((rows.number >= number_of(self._edge)) & (rows.pieces > 0)))
        return known.epoch, known.part, known.ordinal

    def describe(self) -> str:
        """Where reading stands and what has come of the documents, in one sentence."""
        return f"{self.items.describe()}; step {self._step} of epoch {self._epoch} comes next"
