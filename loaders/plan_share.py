"""Ranks share the planning: each plans every world-th step and reads the others' plans from the job's store.

Rank r plans the steps t with t % world == r and publishes them; a plan that the last rank has read is deleted, and at most
``steps`` plans of a rank lie in the store at a time. One thread per iteration publishes and fetches; it polls and never
waits inside the store, through a connection of its own where the store has several, so that it holds up nobody and ends
at once. Ranks construct their loaders and iterate alike: the keys of an iteration are numbered, so that no plan of
another one is ever read. The last rank to leave an iteration deletes what is left of it.

Worth it for solvers of seconds; the greedy recipes plan a step in less time than it takes to fetch it. No more ranks plan
at once than ``steps``. With the steps of other ranks come their troubles: a rank that pauses for longer than the timeout
(a checkpoint, an evaluation) stops the others.

Cost: half a millisecond of a rank's CPU per step of 512 documents (26 KB), and three or four round trips to the store; who
waits for a plan finds it 1 to 50 ms after it was published.
"""

from __future__ import annotations

import json
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..samplers.plan_file import plan_bytes, plan_from_bytes

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..samplers.admission import Window
    from ..samplers.plan import StepPlan

Told = Callable[["StepPlan | None", float, "Exception | None"], None]

_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between two looks into the store
_GRACE = 1.0  # seconds that closing waits for a store that does not answer
# torch's TCPStore takes 8 MiB and closes the connection of a client that sends more.
_LARGEST = 7 << 20
_HEADER = struct.Struct("<cd")
_PLAN, _VALUE_ERROR, _RUNTIME_ERROR = b"P", b"V", b"R"


@dataclass(frozen=True, kw_only=True)
class Share:
    """Who shares the planning, and through what.

    Args:
        store: the job's torch.distributed store, or any ``Store``.
        rank, world: this process among all that iterate alike. Each has a number of its own, also ranks that get the same
            batches (tensor parallel peers).
    """

    store: dist.Store
    rank: int
    world: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must lie in 0 … world - 1; got rank={self.rank}, world={self.world}")


class SharedPlans:
    """This rank's part in the sharing over all iterations of one loader."""

    def __init__(self, share: Share, steps: int) -> None:
        from torch.distributed import PrefixStore

        self._share, self._steps, self._iterations = share, steps, 0
        self._store = PrefixStore("equipoise/plans", share.store.clone())  # type: ignore[attr-defined]  # missing in torch's stubs
        self._number = self._store.add(f"constructed/{share.rank}", 1)

    def begin(self) -> Exchange:
        """The exchange of the next iteration."""
        from torch.distributed import PrefixStore

        self._iterations += 1
        store = PrefixStore(f"{self._number}/{self._iterations}", self._store)
        return Exchange(store, self._share.rank, self._share.world, self._steps)


class Exchange:
    """One iteration: ``offer`` what this rank planned, ``expect`` what others plan, ``leave`` in the end."""

    def __init__(self, store: dist.Store, rank: int, world: int, steps: int) -> None:
        self._store, self._rank, self._world, self._steps = store, rank, world, steps
        self._ours: deque[tuple[str, bytes]] = deque()
        self._theirs: deque[tuple[Window, Told]] = deque()
        self._lying: deque[str] = deque()  # published, and perhaps not yet read by all
        self._wake, self._leaving = threading.Event(), False
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="equipoise-share", daemon=True)
        self._thread.start()

    def owner(self, window: Window) -> int:
        """The rank that plans this step."""
        return window.step % self._world

    def mine(self, window: Window) -> bool:
        """Whether this rank plans it."""
        return self.owner(window) == self._rank

    def expect(self, window: Window, told: Told) -> None:
        """Have ``told`` called with the plan of another rank, or with what went wrong, from this thread."""
        self._theirs.append((window, told))
        self._wake.set()
        if self._broken is not None:
            self._tell_broken()

    def offer(self, window: Window, plan: StepPlan | None, seconds: float, error: Exception | None) -> Exception | None:
        """Publish a plan, or why there is none. Returns what this rank must raise as well: the error, or one of size."""
        record = _HEADER.pack(_PLAN, seconds) + plan_bytes(plan) if plan is not None else b""
        if len(record) > _LARGEST:
            error = ValueError(
                f"{name_of(window)} has a plan of {len(record) >> 20} MiB, more than a store takes: let every rank plan for "
                f"itself (share=None), or make the step smaller"
            )
        if error is not None:
            kind = _VALUE_ERROR if isinstance(error, ValueError) else _RUNTIME_ERROR
            record = _HEADER.pack(kind, 0.0) + str(error).encode()[: 1 << 16]
        self._ours.append((_key(window), record))
        self._wake.set()
        return error

    def leave(self) -> None:
        """End the exchange: what this rank has planned is published still, the rest is not waited for."""
        self._leaving = True
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_GRACE)

    def _run(self) -> None:
        pause = _SHORTEST
        try:
            while self._ours or not self._leaving:
                if self._publish() or self._fetch(patient=pause == _LONGEST):
                    pause = _SHORTEST
                elif self._wake.wait(pause if self._ours or self._theirs else None):
                    self._wake.clear()
                    pause = _SHORTEST
                else:
                    pause = min(2 * pause, _LONGEST)
            self._tidy()
        except Exception as error:  # the store is gone, and with it the plans of others
            self._broken = error
            self._tell_broken()

    def _tell_broken(self) -> None:
        for window, told in list(self._theirs):
            told(
                None, 0.0, RuntimeError(f"{name_of(window)} cannot be fetched, the job's store failed: {self._broken}")
            )

    def _publish(self) -> bool:
        """Publish one plan, if there is one and room for it."""
        if not self._ours or (self._full() and not self._leaving):
            return False
        key, record = self._ours.popleft()
        self._store.set(key, record)  # type: ignore[arg-type]  # bytes will do, whatever the stubs say
        self._lying.append(key)
        return True

    def _full(self) -> bool:
        while len(self._lying) >= self._steps and not self._store.check([self._lying[0]]):
            self._lying.popleft()
        return len(self._lying) >= self._steps

    def _fetch(self, patient: bool) -> bool:
        """Fetch the first plan that is missing, if it is there. patient: also look whether it can still come."""
        if not self._theirs or self._leaving:
            return False
        (window, told), owner = self._theirs[0], self.owner(self._theirs[0][0])
        key = _key(window)
        if not self._store.check([key]):
            # A rank publishes before it leaves: what is missing after that will not come.
            gone = patient and self._store.check([f"left/{owner}"]) and not self._store.check([key])
            if gone:
                self._theirs.popleft()
                told(
                    None,
                    0.0,
                    RuntimeError(
                        f"{name_of(window)} will not be planned: rank {owner} of {self._world}, which plans it, has ended "
                        f"its iteration; all ranks must iterate alike"
                    ),
                )
            return gone
        record = self._store.get(key)
        if self._store.add(f"{key}/read", 1) == self._world - 1:
            self._delete(key)
        self._theirs.popleft()
        told(*_opened(record, window, owner))
        return True

    def _tidy(self) -> None:
        """Tell that this rank has left, and what of it may be left; the last one deletes all of that."""
        self._store.set(f"left/{self._rank}", json.dumps(list(self._lying)))
        if self._store.add("left", 1) < self._world:
            return
        for rank in range(self._world):
            for key in json.loads(self._store.get(f"left/{rank}")):
                self._delete(key)
            self._store.delete_key(f"left/{rank}")
        self._store.delete_key("left")

    def _delete(self, key: str) -> None:
        self._store.delete_key(key)
        self._store.delete_key(f"{key}/read")


def _opened(record: bytes, window: Window, owner: int) -> tuple[StepPlan | None, float, Exception | None]:
    kind, seconds = _HEADER.unpack_from(record)
    rest = record[_HEADER.size :]
    if kind == _VALUE_ERROR:
        return None, 0.0, ValueError(rest.decode(errors="replace"))
    if kind == _RUNTIME_ERROR:
        return None, 0.0, RuntimeError(f"on rank {owner}: {rest.decode(errors='replace')}")
    try:
        plan = plan_from_bytes(rest)
    except ValueError as damage:
        return None, 0.0, RuntimeError(f"{name_of(window)}, planned by rank {owner}, came damaged: {damage}")
    return plan, seconds, None


def _key(window: Window) -> str:
    return f"{window.epoch}/{window.step}"


def name_of(window: Window) -> str:
    """How errors name a step."""
    return f"step {window.step} of epoch {window.epoch}"
