"""KV heads in turns: exact, fewer received rows held at once, the next turn's under way meanwhile.

python -m pytest tests/attention/test_heads.py
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from equipoise.attention import transport
from equipoise.attention.executor import attend
from equipoise.attention.gather import gather_plan
from equipoise.attention.groups import CpGroups
from equipoise.attention.heads import turns
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.ring import ring_plan
from equipoise.attention.ulysses import UlyssesPlan, ulysses_plan
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE
from tests.attention.oracle import Case
from tests.attention.test_trade import assert_exact


@PROMISE
@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(1, 12))
def test_turns_share_out_all_heads_in_order(per_kv, count):
    made = turns(tuple(per_kv), count)
    assert len(made) == min(count, len(per_kv))
    assert [kv for turn in made for kv in range(len(per_kv))[turn.kv]] == list(range(len(per_kv)))
    assert [q for turn in made for q in range(sum(per_kv))[turn.q]] == list(range(sum(per_kv)))
    for turn in made:
        assert sum(turn.per_kv) == turn.q.stop - turn.q.start and turn.per_kv == tuple(per_kv[turn.kv])
    sizes = [turn.kv.stop - turn.kv.start for turn in made]
    assert max(sizes) - min(sizes) <= 1


@dataclass(frozen=True, kw_only=True)
class Turns(Case):
    """A plan whose KV heads come in turns, alone or between groups of Ulysses."""

    head_chunks: int = 2
    degree: int = 1

    def plan(self, ranks: tuple[int, ...], rank: int) -> AttentionPlan | UlyssesPlan:
        make = {
            "gather": partial(gather_plan, head_chunks=self.head_chunks),
            "gather in 2": partial(gather_plan, chunks=2, head_chunks=self.head_chunks),
            "ring": lambda *a: replace(ring_plan(*a), head_chunks=self.head_chunks),
        }[self.kind]
        if self.degree == 1:
            return make(self.shards(len(ranks)), ranks, rank)
        return ulysses_plan(self.shards(len(ranks)), ranks, rank, degree=self.degree, outer=make)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_exact_in_turns(ranks, world):
    packs = [(7, 13, 31, 2), (0, 2, 0, 1), (53, *[1, 2, 3] * 5)]
    heads = [(8, 8), (8, 2), (4, 1), (9, 3), (10, 5)]
    cases: list[Case] = [
        Turns(
            lengths=packs[i % 3], heads=h, kv_heads=k, kind=kind, keep=(i + j) % 2 == 0, head_chunks=2 + i % 3, dim=4,
            layout=("document", "sequence")[j % 2],
        )
        for i, (h, k) in enumerate(heads)
        for j, kind in enumerate(("gather", "gather in 2", "ring"))
    ]  # fmt: skip
    cases.append(Turns(lengths=(7, 13, 31), heads=6, kv_heads=3, kind="gather", window=5, sinks=True, keep=False))
    assert_exact(ranks, world, cases)


def test_exact_in_turns_between_groups(ranks):
    """Shares of heads that are uneven, so that a turn's query heads are not spread evenly over its KV heads either."""
    heads = [(8, 8), (7, 7), (9, 3), (12, 4), (10, 5)]
    cases: list[Case] = [
        Turns(lengths=(7, 13, 31, 2), heads=h, kv_heads=k, kind="gather", degree=2, head_chunks=n, keep=n == 2)
        for h, k in heads
        for n in (2, 3)
    ]
    assert_exact(ranks, 4, cases)


def peaks(rank: int, world: int, cases: list[Case]) -> list[tuple[int, int, list[bool]]]:
    """For each case: most bytes of received KV held at once, forward and backward (its dtype's only, so no gradients); and
    for each arrival, whether the next turn's rows were under way then."""
    groups, results = CpGroups(1, world), []
    live: dict[int, int] = {}
    peak, under_way = [0], []
    plain_wait, plain_send, plain_arrive = transport.Travelling.wait, transport.Freight.send, transport.Journey.arrive

    def watched(x: torch.Tensor) -> None:
        if x.dtype == torch.bfloat16 and x.numel() and id(x) not in live:
            live[id(x)] = x.nbytes
            weakref.finalize(x, live.pop, id(x), None)
        peak[0] = max(peak[0], sum(live.values()))

    def send(self, *rest):
        travelling = plain_send(self, *rest)
        watched(travelling.received)
        return travelling

    def wait(self):
        arrived = plain_wait(self)
        watched(arrived)
        return arrived

    def arrive(self, stage):
        plain_arrive(self, stage)
        if stage == len(self._moves) - 1 and any(self._moves):  # queries stay at home
            under_way.append(self.following is None or self.following._under_way is not None)

    patched = (
        (transport.Freight, "send", send),
        (transport.Travelling, "wait", wait),
        (transport.Journey, "arrive", arrive),
    )
    plain = [getattr(owner, name) for owner, name, _ in patched]
    for owner, name, function in patched:
        setattr(owner, name, function)
    try:
        for case in cases:
            held = torch.from_numpy(case.shards(world).positions(rank))
            q, k, v, dout = (x[held] for x in case.inputs())
            inputs = [x.requires_grad_() for x in (q, k, v)]
            peak[0] = 0
            under_way.clear()
            out = attend(case.plan(tuple(range(world)), rank), q, k, v, groups, keep=case.keep)
            forward, peak[0] = peak[0], 0
            told = list(under_way)
            torch.autograd.grad(out, inputs, dout)
            results.append((forward, peak[0], told))
            del out
    finally:
        for (owner, name, _), function in zip(patched, plain, strict=True):
            setattr(owner, name, function)
        groups.close()
    return results


def test_turns_bound_the_received_kv_that_is_held(ranks):
    """With 8 turns of one head each: two heads' rows at once, one computed and one under way, and a copy while rows are placed."""
    world = 4
    case = Turns(
        lengths=(96, 40),
        heads=8,
        kv_heads=8,
        kind="gather",
        dtype=torch.bfloat16,
        keep=False,
        layout="document",
        dim=16,
    )
    cases = [replace(case, head_chunks=n) for n in (1, 2, 4, 8)]
    received = gather_plan(case.shards(world), tuple(range(world))).loads(8 * 2 * 16 * 2).bytes_received
    for rank, results in enumerate(ranks.run(peaks, world, cases)):
        for (forward, backward, under_way), n in zip(results, (1, 2, 4, 8), strict=True):
            # All of it, twice while it is placed; else a turn's, the next one's, and one more while that is placed.
            most = 2 if n == 1 else 3
            assert 0 < forward <= received[rank] * most // n and 0 < backward <= received[rank] * most // n, (n, rank)
            assert under_way == [True] * n
