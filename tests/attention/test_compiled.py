"""Models compiled around attention: the graph breaks at the call and nowhere else, no batch compiles anew, results stay.

Whole models through a backend that takes what dynamo traced (aot_eager), and one layer through inductor, which needs a C++
compiler.

python -m pytest tests/attention/test_compiled.py
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.hf import register_attention
from torch._dynamo.utils import counters

from tests.attention.oracle import Case
from tests.test_curves import VOCAB, model_of

transformers = pytest.importorskip("transformers")

LENGTHS = (7, 1, 9)
GROUPS: dict[int, CpGroups] = {}
"""Of this rank process: built once, as a training run does."""


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, graph: torch.fx.GraphModule, _example: list) -> object:
        self.made += 1
        return graph.forward


def compiled_layers(net: torch.nn.Module, backend: object) -> torch.nn.Module:
    """As trainers do it: layer by layer."""
    for layer in net.model.layers:  # type: ignore[union-attr]
        layer.compile(backend=backend)
    return net


def arguments(case: Case, world: int = 1, rank: int = 0) -> dict:
    """Of a model, for this rank's share of the pack."""
    held = torch.from_numpy(case.shards(world).positions(rank))
    ids = torch.randint(0, VOCAB, (sum(case.lengths),), generator=torch.Generator().manual_seed(1))
    at = torch.cat([torch.arange(n) for n in case.lengths])
    plan = case.plan(tuple(range(world)), rank)
    return {"input_ids": ids[held][None], "position_ids": at[held][None], "plan": plan, "use_cache": False}


def results(net: torch.nn.Module, given: dict) -> list[torch.Tensor]:
    """Logits and gradients."""
    logits = net(**given).logits
    logits.square().sum().backward()
    grads = [p.grad for p in net.parameters()]
    net.zero_grad()
    return [logits.detach(), *grads]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_the_graph_breaks_at_the_call_and_no_batch_compiles_anew(kind):
    register_attention(CpGroups(1, 1))
    case, graphs = Case(lengths=LENGTHS, kind=kind), Graphs()
    plain, net = model_of("qwen3", "equipoise"), compiled_layers(model_of("qwen3", "equipoise"), graphs)
    for a, b in zip(results(net, arguments(case)), results(plain, arguments(case)), strict=True):
        assert torch.equal(a, b)
    assert counters["graph_break"] and all("attention" in reason for reason in counters["graph_break"])
    made = graphs.made
    results(net, arguments(case))
    assert graphs.made == made, "another plan is another batch and no other program"
    totals = []
    for lengths in ((8, 2, 10), (30,), (9, 3, 14), (5, 5, 5, 6), (37, 1), (2, 9), (41,)):
        results(net, arguments(Case(lengths=lengths, kind=kind)))
        totals.append(graphs.made)
    # Sizes become symbols once they have changed; what attention gives for one document has other strides.
    assert totals[-1] == totals[1] <= 3 * made


def test_a_call_inside_a_compiled_function_breaks_it_in_two():
    case, graphs = Case(lengths=LENGTHS), Graphs()
    q, k, v, _ = case.inputs()
    plan, groups = case.plan((0,), 0), CpGroups(1, 1)

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attend(plan, q * 2, k, v, groups).sin()

    assert torch.equal(torch.compile(layer, backend=graphs)(q, k, v), layer(q, k, v))
    assert graphs.made == 2


def on_ranks(rank: int, world: int, case: Case, backend: str | None) -> list[torch.Tensor]:
    if world not in GROUPS:
        GROUPS[world] = CpGroups(1, world)
    register_attention(GROUPS[world])
    net = model_of("qwen3", "equipoise")
    if backend is not None:
        compiled_layers(net, backend)
    return results(net, arguments(case, world, rank))


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_compiled_layers_over_ranks(ranks, kind):
    """Ranks hold different numbers of tokens."""
    case = Case(lengths=(7, 1, 9, 2), kind=kind)
    plain, compiled = (ranks.run(on_ranks, 2, case, backend, timeout=300) for backend in (None, "aot_eager"))
    for a, b in zip(plain, compiled, strict=True):
        for want, got in zip(a, b, strict=True):
            assert (got - want).abs().max() <= 1e-12 * want.abs().max().clamp_min(1.0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: no g++ here")
def test_inductor_compiles_around_the_call():
    case = Case(lengths=LENGTHS)
    q, k, v, dout = case.inputs()
    q = q.requires_grad_()
    plan, groups = case.plan((0,), 0), CpGroups(1, 1)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return attend(plan, q * 2, k, v, groups).sin()

    want, got = layer(q), torch.compile(layer)(q)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    (plain,), (compiled,) = (torch.autograd.grad(out, (q,), dout) for out in (want, got))
    assert torch.allclose(compiled, plain, rtol=1e-12, atol=1e-12)
