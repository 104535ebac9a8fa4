"""Process groups of a data-parallel x context-parallel run: who exchanges rows with whom, and over what.

Rank numbers run CP first: rank = dp_index · cp + cp_index, so a CP group is consecutive ranks, on one node where it can
be. What is decided: groups that tile the world are *communicators* of their own, built once, by all ranks in the same
order, since building one later on some ranks only would hang: all ranks, the CP groups, and aligned powers of two (as
far as they divide the world), which is what dynamic CP and FlexSP plan. Any other set of ranks is a *logical group*: its
members send to each other over the communicator of all ranks, and the others take no part. Both exchange rows alike.

Why a logical group cannot hang: nothing is collective about it. Two ranks match what they send each other in the order
in which both post it, and that order is the plan's: stage after stage, the same in both, transfers of no rows left out
on both sides. Groups without a common rank have no pair in common either, and communicators of other groups, those of
DDP and FSDP among them, keep orders of their own.

Cost: a rank is in at most log2(ranks) + 1 communicators. NCCL builds one when it is first used (`warm_up` does it now).

    >>> groups = CpGroups(dp=1, cp=1)                       # without torch.distributed: a world of one rank
    >>> groups.rank, groups.cp_ranks, groups[(0,)] is None
    (0, (0,), True)
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .counting import Counter

DATA, CONTROL = 0, 1
"""Tags, so that what ranks tell each other about a plan is never taken for its rows."""


class Work(Protocol):
    """An exchange under way."""

    def wait(self) -> object: ...


class Group(Protocol):
    """Ranks that exchange rows."""

    def exchange(self, sent: Tensor, send: list[int], received: Tensor, receive: list[int]) -> Work:
        """Start to send rows of `sent` and to fill `received`, both along dim 0 and contiguous, in the group's order of ranks.

        send, receive: rows for and from each rank, own ones included. The tensors stay untouched until `wait`.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Communicator:
    """Ranks with a process group of their own; every member takes part in every exchange."""

    group: dist.ProcessGroup

    def exchange(self, sent: Tensor, send: list[int], received: Tensor, receive: list[int]) -> Work:
        work = dist.all_to_all_single(received, sent, receive, send, group=self.group, async_op=True)
        assert work is not None
        return work


@dataclass(frozen=True, kw_only=True, eq=False)
class LogicalGroup:
    """Some of a communicator's ranks, in any order; who has nothing to send or receive takes no part."""

    parent: dist.ProcessGroup
    """Over all ranks, so that a rank's number in it is its number in the run."""
    ranks: tuple[int, ...]
    index: int
    """Of this rank among them."""
    tag: int = DATA

    def exchange(self, sent: Tensor, send: list[int], received: Tensor, receive: list[int]) -> Work:
        parts, places, own = sent.split(send), received.split(receive), self.index
        if send[own]:
            places[own].copy_(parts[own])  # gloo sends nothing to itself
        coming = [self._op(dist.irecv, place, peer) for peer, place in enumerate(places) if peer != own and len(place)]
        going = [self._op(dist.isend, part, peer) for peer, part in enumerate(parts) if peer != own and len(part)]
        # By (sender, receiver), as on every other rank.
        earlier = sum(1 for rows in receive[:own] if rows)
        operations = [*coming[:earlier], *going, *coming[earlier:]]
        return _All(works=dist.batch_isend_irecv(operations) if operations else [])

    def _op(self, operation: Callable[..., Any], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(operation, tensor, self.ranks[peer], self.parent, self.tag)


@dataclass(frozen=True, kw_only=True, eq=False)
class _All:
    works: list[dist.Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class CpGroups:
    """The groups of a plane of dp x cp ranks, over the default process group; every rank must construct it.

    With NCCL choose the GPU first (torch.cuda.set_device): ranks meet on theirs here.

    Args:
        timeout: seconds after which an exchange that another rank does not take part in is an error; default: that of
            the default process group.
        counter: what counts traffic and work of all that runs over these groups (counting.py); may be set and taken
            away later, on any rank.

    Raises ValueError if the world is not dp · cp ranks.
    """

    def __init__(self, dp: int, cp: int, *, timeout: float | None = None, counter: Counter | None = None) -> None:
        if dp < 1 or cp < 1:
            raise ValueError(f"dp and cp are at least 1; got dp={dp}, cp={cp}.")
        started = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if started else 1
        if dp * cp != world:
            hint = "" if started else " torch.distributed is not initialised: call init_process_group first."
            raise ValueError(
                f"dp x cp must be the world's size; got {dp} x {cp} = {dp * cp} for {world} rank(s).{hint}"
            )
        self.dp, self.cp, self.counter = dp, cp, counter
        self.rank = dist.get_rank() if started else 0
        self.world = world
        self._groups: dict[tuple[int, ...], Communicator | LogicalGroup | None] = {
            (rank,): None for rank in range(world)
        }
        self._opened: list[dist.ProcessGroup] = []
        if world > 1:
            self._open(timedelta(seconds=timeout) if timeout else _timeout())

    def _open(self, timeout: timedelta) -> None:
        for size in _sizes(self.world, self.cp):
            for first in range(0, self.world, size):
                ranks = tuple(range(first, first + size))
                group = dist.new_group(list(ranks), timeout=timeout)
                if self.rank in ranks:
                    self._groups[ranks] = Communicator(group=group)
                    self._opened.append(group)
        self._parent = self._control = self._opened[-1]
        if "cpu:gloo" not in dist.get_backend_config(self._parent):
            self._control = dist.new_group(list(range(self.world)), timeout=timeout, backend="gloo")
            self._opened.append(self._control)
        if "cuda:nccl" in dist.get_backend_config(self._parent):
            # NCCL lets some ranks send to each other only once all of them have used their communicator.
            _touch(self._parent)
        atexit.register(self._close_at_exit)

    @property
    def dp_index(self) -> int:
        return self.rank // self.cp

    @property
    def cp_index(self) -> int:
        return self.rank % self.cp

    @property
    def cp_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's CP group, in order."""
        first = self.dp_index * self.cp
        return tuple(range(first, first + self.cp))

    def __getitem__(self, ranks: tuple[int, ...]) -> Group | None:
        """The group of these ranks in this order; None for a single rank, which exchanges rows with nobody.

        Raises ValueError unless they are different ranks of this world and this rank is one of them.
        """
        if ranks not in self._groups:
            self._groups[ranks] = self._logical(ranks, DATA)
        return self._groups[ranks]

    def _logical(self, ranks: tuple[int, ...], tag: int) -> LogicalGroup:
        if self.rank not in ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < self.world:
            raise ValueError(
                f"A group has different ranks of 0 … {self.world - 1}, this one ({self.rank}) among them; got ranks "
                f"{list(ranks)} with dp={self.dp}, cp={self.cp}."
            )
        parent = self._control if tag == CONTROL else self._parent
        return LogicalGroup(parent=parent, ranks=tuple(ranks), index=ranks.index(self.rank), tag=tag)

    def tell(self, ranks: tuple[int, ...], words: list[int]) -> list[list[int]]:
        """What each of `ranks` passes here, int64 words, equally many: in the order of `ranks`, through the CPU."""
        if len(ranks) == 1:
            return [words]
        sent = torch.tensor([words] * len(ranks), dtype=torch.int64)
        received, once = torch.empty_like(sent), [1] * len(ranks)
        self._logical(ranks, CONTROL).exchange(sent, once, received, once).wait()
        return received.tolist()

    def warm_up(self) -> None:
        """Use every communicator once, so that the first step does not wait for them to be built. All ranks call it."""
        for group in self._opened:
            _touch(group)

    def close(self) -> None:
        """Destroy the communicators; done at exit otherwise. All ranks call it, with nothing under way."""
        atexit.unregister(self._close_at_exit)
        while self._opened:
            group = self._opened.pop()
            with suppress(ValueError):  # destroyed together with the default group
                if dist.is_initialized():
                    dist.destroy_process_group(group)
        self._groups = {ranks: None for ranks in self._groups if len(ranks) == 1}

    def _close_at_exit(self) -> None:
        # After an error exchanges may be under way that closing would wait for, while the others wait for this process
        # to end.
        if not hasattr(sys, "last_type"):
            self.close()


def _sizes(world: int, cp: int) -> list[int]:
    """Sizes of the groups that tile the world, rising: at most log2(world) + 1 of them."""
    powers = (1 << k for k in range(1, world.bit_length()))
    return sorted({cp, world, *(size for size in powers if world % size == 0)} - {1})


def _timeout() -> timedelta:
    """That of the default group: new_group would take the backend's, half an hour for gloo, whatever the user said."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(_device(world)).options._timeout


def _device(group: dist.ProcessGroup) -> torch.device:
    """One whose tensors the group sends."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")


def _touch(group: dist.ProcessGroup) -> None:
    on_gpu = "cuda:nccl" in dist.get_backend_config(group) and torch.cuda.is_available()
    dist.all_reduce(torch.zeros(1, device="cuda" if on_gpu else "cpu"), group=group)
