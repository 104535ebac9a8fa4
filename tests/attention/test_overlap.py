"""Transfers hide behind tiles, kernels are called a few times a stage, and what a plan needs is prepared once.

Time is simulated, so that what is asserted is exact: a kernel call takes as long as it computes pairs, a transfer arrives no
earlier than a delay after it was posted. Both stand where a `Counter` does, between an executor and its group and kernel.

python -m pytest tests/attention/test_overlap.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from equipoise.attention import transport
from equipoise.attention.bands import NO_LIMIT, pairs
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups, Group, Work
from equipoise.attention.hf import register_attention
from equipoise.attention.kernels import cuda
from equipoise.attention.kernels.contract import Kernel
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.program import lower

from tests.attention.draws import LAYOUTS
from tests.attention.oracle import PLANNERS, Case

CPU = torch.device("cpu")


@dataclass(eq=False)
class Clock:
    """Takes the place of a counter: what runs over its groups takes simulated time."""

    delay: float
    """Of every transfer, in the time that a pair takes."""
    now: float = 0.0
    stages: list[float] = field(default_factory=list)
    """What each kernel call took."""
    prepared: int = 0

    def take(self) -> tuple[float, list[float]]:
        """Time and calls since they were last taken."""
        took = self.now, self.stages
        self.now, self.stages = 0.0, []
        return took

    def group(self, group: Group | None, index: int) -> Group | None:
        return None if group is None else DelayedGroup(group=group, clock=self)

    def kernel(self, kernel: Kernel) -> Kernel:
        return TimedKernel(kernel=kernel, clock=self)


@dataclass(frozen=True)
class DelayedGroup:
    """A test group, each of whose transfers takes `clock.delay`."""

    group: Group
    clock: Clock

    def exchange(self, *tensors: Any) -> Work:
        return Delayed(work=self.group.exchange(*tensors), clock=self.clock, arrives=self.clock.now + self.clock.delay)


@dataclass(frozen=True)
class Delayed:
    work: Work
    clock: Clock
    arrives: float

    def wait(self) -> None:
        self.work.wait()
        self.clock.now = max(self.clock.now, self.arrives)


@dataclass(frozen=True, eq=False)
class Prepared:
    handle: Any
    pairs: int

    @property
    def q_rows(self) -> Any:
        return self.handle.q_rows

    @property
    def k_rows(self) -> Any:
        return self.handle.k_rows


@dataclass(frozen=True)
class TimedKernel:
    kernel: Kernel
    clock: Clock

    def prepare(self, tiles: np.ndarray, *sizes: Any) -> Prepared:
        self.clock.prepared += 1
        return Prepared(self.kernel.prepare(tiles, *sizes), int(pairs(tiles).sum()))

    def forward(self, handle: Prepared, *operands: Any) -> Any:
        return self._took(handle, self.kernel.forward(handle.handle, *operands))

    def backward(self, handle: Prepared, *operands: Any) -> Any:
        return self._took(handle, self.kernel.backward(handle.handle, *operands))

    def _took(self, handle: Prepared, result: Any) -> Any:
        self.clock.now += handle.pairs
        self.clock.stages.append(handle.pairs)
        return result


def timed(rank: int, world: int, cases: list[Case], delays: list[float], change: Callable | None = None) -> list[list]:
    """(delay, stages of the plan, (time, calls) of forward and of backward) of each case and delay."""
    clock = Clock(0.0)
    groups, results = CpGroups(1, world, counter=clock), []  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        if change is not None:
            change(patch)
        for case in cases:
            held = torch.from_numpy(case.shards(world).positions(rank))
            q, k, v, dout = (x[held] for x in case.inputs())
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            plan = case.plan(tuple(range(world)), rank)
            mean = pairs(plan.tiles[:, 2:]).sum() / plan.stages
            for share in delays:
                clock.delay = share * mean
                out = attend(plan, q, k, v, groups, keep=case.keep)
                forward = clock.take()
                torch.autograd.grad(out, (q, k, v), dout)
                results.append([case, clock.delay, plan.stages, forward, clock.take()])
    groups.close()
    return results


CASES = [
    Case(lengths=lengths, layout=layout, kind=kind, keep=keep)
    for kind in ("ring", "direct", "gather", "gather in 2")
    for lengths, layout in [((96,), "document"), ((96,), "contiguous"), ((40, 3, 17, 1, 30), "sequence")]
    for keep in (True, False)
]
DELAYS = [0.0, 0.3, 1.0, 3.0]
"""In mean stages."""


def late(results: list[list]) -> list[tuple]:
    """Where S stages took longer than the larger of computing and a transfer in each of them, and one transfer more."""
    found = []
    for case, delay, stages, *phases in results:
        for took, calls in phases:
            # A stage without tiles takes no call.
            each = [*calls, *[0] * (stages - len(calls))]
            if took > sum(max(call, delay) for call in each) + delay + 1e-6:
                found.append((case, delay, took, calls))
    return found


def test_stages_take_the_larger_of_computing_and_sending(ranks):
    for results in ranks.run(timed, 4, CASES, DELAYS):
        assert not late(results)
        for _, delay, _, *phases in results:
            for took, calls in phases:
                assert took >= sum(calls) and (delay > 0 or took == sum(calls))


def test_a_delay_that_is_hidden_costs_nothing(ranks):
    """A ring over one document cut by zigzag, transfers half as long as stages: all but gradients on their last way home."""
    case = Case(lengths=(96,), layout="document")
    for results in ranks.run(timed, 4, [case], [0.5]):
        (_, delay, _, (forward, calls), (backward, _)) = results[0]
        assert forward == sum(calls) and backward == sum(calls) + delay


def waits_at_once(patch: pytest.MonkeyPatch) -> None:
    """An exchange that is over before anything is computed."""
    send = transport.Freight.send

    def sent(self: transport.Freight, *arguments: Any) -> transport.Travelling:
        travelling = send(self, *arguments)
        travelling.wait()
        return travelling

    patch.setattr(transport.Freight, "send", sent)


def posts_late(patch: pytest.MonkeyPatch) -> None:
    """Rows that leave only when the receiver wants them."""
    arrive, send_off = transport.Journey.arrive, transport.Journey._send_off

    def arrived(self: transport.Journey, stage: int) -> None:
        send_off(self, stage)
        arrive(self, stage)

    patch.setattr(transport.Journey, "_send_off", lambda self, stage: None)
    patch.setattr(transport.Journey, "arrive", arrived)


@pytest.mark.parametrize("change", [waits_at_once, posts_late])
def test_the_clock_sees_an_executor_that_waits(ranks, change):
    case = Case(lengths=(96,), layout="document", keep=False)
    for results in ranks.run(timed, 4, [case], [1.0], change):
        assert late(results)


# ---- Few calls. ----


def a_thousand_documents() -> tuple[int, ...]:
    draw = np.random.default_rng(0)
    tokens = np.where(draw.random(1000) < 0.01, draw.integers(200, 900, 1000), draw.integers(1, 30, 1000))
    return tuple(tokens.tolist())


def varlen_calls(plan: AttentionPlan, rank: int) -> list[int]:
    """Of the varlen backend in each stage, forward."""
    program = lower(plan, rank)
    rows = program.buffer_rows
    return [
        sum(len(cuda.prepare(t, rows[0], rows[b], CPU, engine=cuda.TorchVarlen()).calls) for *_, b, t in stage.tiles)
        for stage in program.stages
    ]


@pytest.mark.parametrize("kind", ["ring", "direct"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_documents_take_at_most_four_varlen_calls_a_stage(layout, kind):
    case, most = Case(lengths=a_thousand_documents(), layout=layout, kind=kind), []
    for cp in (2, 8):
        shards, ranks = case.shards(cp), tuple(range(cp))
        for rank in range(cp):
            plan = PLANNERS[kind](shards, ranks, rank)
            assert isinstance(plan, AttentionPlan)
            most += varlen_calls(plan, rank)
    assert max(most) <= 4


def test_a_thousand_documents_take_few_varlen_calls_under_ulysses():
    """Whole documents, causal, as `ulysses.py` prepares them: one call, and one for documents of a single token."""
    cu = Case(lengths=a_thousand_documents()).cu_seqlens
    zero = np.zeros(1000, np.int64)
    tiles = np.stack([cu[:-1], cu[1:], cu[:-1], cu[1:], zero, np.full(1000, NO_LIMIT)], axis=1)
    assert len(cuda.prepare(tiles, int(cu[-1]), int(cu[-1]), CPU, engine=cuda.TorchVarlen()).calls) <= 2


# ---- Prepared once. ----


def prepared(rank: int, world: int, cases: list[Case], checkpointing: bool) -> list[list[int]]:
    """Kernel handles made, kernel calls, and those that a layer needs, of each case: forward and backward of a HF model."""
    transformers = pytest.importorskip("transformers")
    clock = Clock(0.0)
    groups = CpGroups(1, world, counter=clock)  # type: ignore[arg-type]
    register_attention(groups)
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_implementation="equipoise",
    )
    model = transformers.Qwen3ForCausalLM(config)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    results = []
    for case in cases:
        held = torch.from_numpy(case.shards(world).positions(rank))
        plan = case.plan(tuple(range(world)), rank)
        needed = 1
        if isinstance(plan, AttentionPlan):
            needed = sum(len(stage.tiles) for stage in lower(plan, rank).stages)
        at = torch.cat([torch.arange(n) for n in case.lengths])[held]
        clock.prepared = 0
        model(input_ids=at[None], position_ids=at[None], plan=plan, use_cache=False).logits.sum().backward()
        results.append([clock.prepared, len(clock.take()[1]), needed])
    groups.close()
    return results


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_plan_is_prepared_once_for_all_layers(ranks, checkpointing):
    """Of three, forward, backward and recomputed."""
    cases = [
        Case(lengths=(20, 3, 11), kind=kind, layout=layout) for kind in PLANNERS for layout in ("document", "dacp")
    ]
    for results in ranks.run(prepared, 2, cases, checkpointing):
        for case, (made, called, needed) in zip(cases, results, strict=True):
            assert made == needed and called == needed * 3 * (3 if checkpointing else 2), case
