"""Carry-over: admission through WLB-LLM's outlier queues, where a document may enter a later step than its own.

Which documents a step releases depends on what the steps before it held back (``packing/queues.py``), so the steps of an
epoch are run through in sequence, a fraction of a millisecond each. Snapshots are kept, and what is held travels in the
state a run resumes from, so that a resumed run starts where it stopped. Once an epoch's own steps are over, further steps
empty the queues: every document still comes exactly once per epoch. A step's number of slots follows from the tokens it was
meant to have, so that released outliers find packs that can grow beside them.

    >>> import numpy as np
    >>> from equipoise import BalancedBatchSampler, Lengths, recipe
    >>> lengths = Lengths.from_array(np.array([900] + [100] * 20 + [900] + [100] * 20))
    >>> sampler = BalancedBatchSampler(lengths, recipe("wlb"), max_tokens_per_rank=1000, dp=2, documents_per_step=21, shuffle=False)
    >>> [int((sampler.plan(step).packs.spans.tokens == 900).sum()) for step in range(sampler.steps_per_epoch)]
    [0, 0, 2]
    >>> print(sampler.admission.delays(0))
    mean 0.47 steps per token, longest 2 of at most 16
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..packing.cost import cost_units
from ..packing.queues import WlbQueues, release
from .admission import Admission, Window
from .cluster import Cluster
from .groups import summed
from .solve import Cost, wlb_slots
from .stream import StreamAdmission

_EVERY = 64  # steps between snapshots


@dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """What waits before a step, and what the steps of the epoch so far have delayed."""

    items: np.ndarray  # int64[h]
    born: np.ndarray  # int64[h] the step each was meant for
    tokens: int = 0  # released
    waited: int = 0  # sum of tokens x steps
    longest: int = 0

    def to_state(self) -> list:
        """Plain numbers."""
        return [self.items.tolist(), self.born.tolist(), self.tokens, self.waited, self.longest]

    @classmethod
    def nothing(cls) -> Held:
        """Before an epoch's first step."""
        return cls(items=np.zeros(0, np.int64), born=np.zeros(0, np.int64))

    @classmethod
    def from_state(cls, state: list) -> Held:
        items, born, tokens, waited, longest = state
        return cls(
            items=np.array(items, np.int64),
            born=np.array(born, np.int64),
            tokens=tokens,
            waited=waited,
            longest=longest,
        )


@dataclass(frozen=True, kw_only=True)
class Delays:
    """How much later than meant the tokens of an epoch came, in steps."""

    mean: float
    longest: int
    allowed: int

    def __str__(self) -> str:
        return f"mean {self.mean:.2f} steps per token, longest {self.longest} of at most {self.allowed}"


@dataclass(kw_only=True, eq=False)
class QueuedAdmission:
    """An ``Admission`` whose long documents may wait; it has the same methods."""

    base: Admission | StreamAdmission
    queues: WlbQueues
    cluster: Cluster
    cost: Cost
    _held: dict[int, dict[int, Held]] = field(default_factory=dict, init=False, repr=False)
    _num_steps: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def set_cost(self, cost: Cost) -> None:
        """Plan with another cost model from here on: what was worked out with the old one is forgotten."""
        self.cost = cost
        self._held.clear()
        self._num_steps.clear()

    def start(self, epoch: int) -> Any:
        """Position in the stream of the epoch's first document."""
        return self.base.start(epoch)

    def position(self, epoch: int, step: int) -> Any:
        """Where the documents that a step adds begin in the stream."""
        return self.base.position(epoch, step)

    def resume(self, epoch: int, step: int, position: Any, start: Any) -> None:
        """Begin this step at this position of the stream; ``put`` says what waits there."""
        self.base.resume(epoch, step, position, start)
        self._held, self._num_steps = {}, {}

    def held(self, epoch: int, step: int) -> Held:
        """What waits before a step."""
        known = self._held.setdefault(epoch, {0: Held.nothing()})
        there = known.copy()  # at once: another thread may add to it, and forget
        at = max((number for number in there if number <= step), default=-1)
        if at < 0:
            self.base.members(epoch, step)  # says why it cannot be told
        held = there[at]
        for number in range(at, step):
            held = self._release(epoch, number, held)[1]
            known[number + 1] = held
            self._forget(known, number)
        return held

    @staticmethod
    def _forget(known: dict[int, Held], step: int) -> None:
        """Keep the last steps, whose states are still asked for, and every so many before them."""
        known.pop(step - _EVERY if (step - _EVERY) % _EVERY else -1, None)

    def put(self, epoch: int, step: int, held: Held) -> None:
        """Start from here: the state of a resumed run."""
        self._held[epoch] = {step: held}

    def _release(self, epoch: int, step: int, held: Held) -> tuple[tuple[np.ndarray, int] | None, Held]:
        """(items of the step, its slots), or None behind the last one; and what waits then."""
        new = self.base.members(epoch, step)
        if new is None and not len(held.items):
            return None, held
        items = held.items if new is None else np.r_[held.items, new]
        born = held.born if new is None else np.r_[held.born, np.full(len(new), step)]
        spans, _, atom = self.base.items.spans(items)
        tokens = self.base.items.tokens(items)
        cost = summed(cost_units(self.cost, spans.pairs, spans.tokens), atom)
        meant = tokens if new is None else tokens[len(held.items) :]
        slots = self.cluster.slots or wlb_slots(int(meant.sum()), self.cluster)
        goes = release(
            tokens,
            cost,
            step - born,
            slots * self.cluster.dp,
            self.cluster.capacity,
            self.queues,
            new is None,
        )
        delay = (step - born)[goes]
        after = Held(
            items=items[~goes],
            born=born[~goes],
            tokens=held.tokens + int(tokens[goes].sum()),
            waited=held.waited + int((tokens[goes] * delay).sum()),
            longest=max(held.longest, int(delay.max(initial=0))),
        )
        return (items[goes], slots), after

    def window(self, epoch: int, step: int) -> Window | None:
        """The documents of a step; None behind the epoch's last."""
        released, after = self._release(epoch, step, self.held(epoch, step))
        if released is None:
            return None
        self._held[epoch][step + 1] = after  # the next step, and the state behind this one, begin here
        self._forget(self._held[epoch], step)
        items, slots = released
        return self.base.window_of(epoch, step, items, num_slots=slots)

    def num_steps(self, epoch: int) -> int:
        """Steps of the epoch, exact: its own and those that empty the queues."""
        if epoch not in self._num_steps:
            step = self.base.num_steps(epoch)
            while self._release(epoch, step, self.held(epoch, step))[0] is not None:
                step += 1
            self._num_steps[epoch] = step
        return self._num_steps[epoch]

    def dropped(self, epoch: int) -> int:
        """Items that ``last='drop'`` leaves out of the epoch."""
        return self.base.dropped(epoch)

    def delays(self, epoch: int) -> Delays:
        """Of the whole epoch."""
        held = self.held(epoch, self.num_steps(epoch))
        return Delays(mean=held.waited / max(held.tokens, 1), longest=held.longest, allowed=self.queues.max_delay)
