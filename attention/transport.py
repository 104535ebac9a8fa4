"""What moves between ranks while attention is computed: KV and Q onward, what came of them home; the next always under way.

Each stage of a plan is one exchange of a kind of rows, with uneven splits (groups.py says over what); all that travels of a
row travels side by side, K and V as [rows, K·D + K·V]. Tensors that are being sent are held until they have left.
"""

# S rows of a buffer, K key heads, D head dim, V that of values.
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .groups import Group, Work
from .kernels.contract import Rows, rows_of, take
from .plan import Int64
from .program import Cargo

Pair: TypeAlias = tuple[Tensor, Tensor]
"""K and V, or dK and dV, [S, K, D] and [S, K, V]."""
Parts: TypeAlias = tuple[Tensor, ...]
"""What belongs to the rows of a buffer, [S, …] each: K and V, say, or their gradients."""


def side_by_side(parts: Parts, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Some rows as they travel, [rows, values of all parts]."""
    return torch.cat([take(x, rows).to(dtype).flatten(1) for x in parts], dim=1)


def apart(rows: Tensor, like: Parts) -> Parts:
    """Rows that came side by side as parts again, views with the heads and dims of `like`."""
    shapes = [x.shape[1:] for x in like]
    columns = rows.split([shape.numel() for shape in shapes], dim=1)
    return tuple(part.unflatten(1, shape) for part, shape in zip(columns, shapes, strict=True))


def no_rows(like: Parts, dtype: torch.dtype) -> Tensor:
    """What travels where there are none."""
    return like[0].new_empty((0, sum(x.shape[1:].numel() for x in like)), dtype=dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Freight:
    """A Cargo with its rows on the device."""

    picks: list[tuple[int, Rows]]
    order: Tensor | None
    send_splits: list[int]
    receive_splits: list[int]
    placing: Tensor | None
    landing: list[list[tuple[int, Rows | None, Rows]]]
    spent: frozenset[int] = frozenset()
    """For returns: buffers of which nothing goes home later."""

    @staticmethod
    def homeward(cargos: list[Cargo | None], device: torch.device) -> list[Freight | None]:
        """Of the returns of all stages."""
        freights: list[Freight | None] = []
        later: set[int] = set()
        for cargo in reversed(cargos):
            buffers = {buffer for buffer, _ in cargo.picks} if cargo else set()
            freights.append(Freight.of(cargo, device, frozenset(buffers - later)))
            later |= buffers
        return freights[::-1]

    @staticmethod
    def of(cargo: Cargo | None, device: torch.device, spent: frozenset[int] = frozenset()) -> Freight | None:
        if cargo is None:
            return None
        return Freight(
            picks=[(buffer, rows_of(rows, device)) for buffer, rows in cargo.picks],
            order=_index(cargo.order, device),
            send_splits=cargo.send_splits,
            receive_splits=cargo.receive_splits,
            placing=_index(cargo.placing, device),
            landing=[
                [
                    (buffer, None if which is None else rows_of(which, device), rows_of(rows, device))
                    for buffer, which, rows in part
                ]
                for part in cargo.landing
            ],
            spent=spent,
        )

    def send(self, pick: Callable[[int, Rows], Tensor], empty: Tensor, group: Group | None) -> Travelling:
        """Start the exchange. pick: (buffer, rows) → rows as they travel; empty: none, for who has nothing to send."""
        parts = [pick(buffer, rows) for buffer, rows in self.picks]
        sent = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else empty
        sent = sent if self.order is None else sent.index_select(0, self.order)
        received = empty.new_empty((sum(self.receive_splits), *empty.shape[1:]))
        assert group is not None, "a rank alone has no exchanges in its plan"
        work = group.exchange(sent, self.send_splits, received, self.receive_splits)
        return Travelling(freight=self, received=received, sent=sent, work=work)


def _index(rows: Int64 | None, device: torch.device) -> Tensor | None:
    return None if rows is None else torch.from_numpy(rows).to(device)


@dataclass(frozen=True, kw_only=True, eq=False)
class Travelling:
    """Rows under way."""

    freight: Freight
    received: Tensor
    sent: Tensor
    work: Work

    def wait(self) -> Tensor:
        """What arrived, in the order of its buffer."""
        self.work.wait()
        order = self.freight.placing
        return self.received if order is None else self.received.index_select(0, order)

    def landings(self, like: Parts) -> Iterator[tuple[int, Rows, Parts]]:
        """For a return, once it is there: buffer, rows of it and what comes for them, sender by sender."""
        for landing, part in zip(self.freight.landing, self.wait().split(self.freight.receive_splits), strict=True):
            for buffer, which, rows in landing:
                yield buffer, rows, apart(part if which is None else take(part, which), like)


class Journey:
    """Rows on their way through the stages of one layer: buffers while they are needed, the next one always under way.

    moves: the exchange before each stage. home: what travels of the rows here, of one dtype. read_until: the last stage in which a received buffer is read or sent on.
    kept: buffers received earlier, in which case nothing moves. following: what is to run next, over other heads; its
    first rows are sent off in this one's last stage.
    """

    def __init__(
        self,
        moves: list[Freight | None],
        read_until: Mapping[int, int],
        home: Parts,
        group: Group | None,
        kept: dict[int, Tensor] | None = None,
    ) -> None:
        self.home, self.group = home, group
        self.received: dict[int, Tensor] = kept or {}
        self.following: Journey | None = None
        self._moves = [None] * len(moves) if kept is not None else moves
        self._read_until = read_until
        self._sent_off = 0
        self._under_way: Travelling | None = None

    def arrive(self, stage: int) -> None:
        """Wait for the rows of this stage, drop what is no longer read, send off the rows of the next."""
        if self._under_way is not None and self._sent_off == stage:
            self.received[stage], self._under_way = self._under_way.wait(), None
        self.received = {b: x for b, x in self.received.items() if self._read_until.get(b, -1) >= stage}
        if stage + 1 < len(self._moves):
            self._send_off(stage + 1)
        elif self.following is not None:
            self.following._send_off(1)

    def end(self) -> None:
        """Drop what was received."""
        self.received = {}

    def of(self, buffer: int) -> Parts:
        """What a buffer holds."""
        return self.home if buffer == 0 else apart(self.received[buffer], self.home)

    def _pick(self, buffer: int, rows: Rows) -> Tensor:
        if buffer > 0:
            return take(self.received[buffer], rows)
        return side_by_side(self.home, rows, self.home[0].dtype)

    def _send_off(self, stage: int) -> None:
        """Once for each stage."""
        if self._sent_off < stage < len(self._moves):
            self._sent_off, freight = stage, self._moves[stage]
            if freight is not None:
                self._under_way = freight.send(self._pick, no_rows(self.home, self.home[0].dtype), self.group)
