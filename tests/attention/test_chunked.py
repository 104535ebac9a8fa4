"""Attention of a document in chunks, on one rank or sharded, equals attention of the document: outputs and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equipoise.attention.chunk_plan import Home
from equipoise.attention.chunked import Chunk, attend_chunk, chunks_of
from equipoise.attention.counting import Counter
from equipoise.attention.groups import CpGroups
from equipoise.attention.kernels.reference import dense
from equipoise.packing.shards import contiguous, striped, zigzag
from hypothesis import given, settings
from hypothesis import strategies as st

GROUPS: dict[int, CpGroups] = {}
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
DIM = 8


def groups_of(cp: int) -> CpGroups:
    if cp not in GROUPS:
        GROUPS[cp] = CpGroups(1, cp)
    return GROUPS[cp]


def tensors(tokens: int, heads: int, kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and dout of a document."""
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, h, DIM, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def document(sizes: list[int], heads: int, kv_heads: int) -> list[torch.Tensor]:
    """out, dq, dk, dv of the whole document."""
    q, k, v, dout = tensors(sum(sizes), heads, kv_heads)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out, _ = dense(q, k, v, torch.ones(len(q), len(q), dtype=torch.bool).tril(), DIM**-0.5)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def in_chunks(
    chunks: list[Chunk], held: list[torch.Tensor], heads: int, kv_heads: int, keep: int, groups: CpGroups
) -> list[list[torch.Tensor]]:
    """out, dq, dk, dv of each chunk's rows at home; `held`: their positions in the document."""
    everything = tensors(chunks[-1].plan.tokens, heads, kv_heads)
    inputs = [[x[rows].requires_grad_() for x in everything[:3]] for rows in held]
    results: list[list[torch.Tensor]] = [[] for _ in chunks]
    for j, chunk in enumerate(chunks):
        with torch.set_grad_enabled(j >= len(chunks) - keep):
            results[j] = [attend_chunk(chunk, 3, *inputs[j], groups)]
    for j in reversed(range(len(chunks))):
        out = results[j][0]
        if j < len(chunks) - keep:
            again = attend_chunk(chunks[j], 3, *inputs[j], groups)
            assert torch.equal(again, out)
            out = again
        results[j] = [out.detach(), *torch.autograd.grad(out, inputs[j], everything[3][held[j]])]
    return results


def assert_close(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    assert (got - want).abs().max() <= 1e-12 * want.abs().max(), what


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6), st.sampled_from([(4, 4), (4, 2), (4, 1)]), st.integers(1, 6)
)
def test_chunks_of_a_document_attend_like_the_document(sizes, shape, keep):
    chunks = chunks_of([Home.whole([0, n]) for n in sizes], (0,), 0)
    rows = torch.arange(sum(sizes)).split(sizes)
    results = in_chunks(chunks, list(rows), *shape, keep, groups_of(1))
    for parts, want, name in zip(
        zip(*results, strict=True), document(sizes, *shape), "out dq dk dv".split(), strict=True
    ):
        assert_close(torch.cat(parts), want, name)
    assert chunks[0].store.nbytes == 2 * 2 * sum(sizes) * shape[1] * DIM * 8


def sharded(rank: int, world: int, cases: list[tuple[list[int], str, tuple[int, int], int]]) -> list[list]:
    """Positions in the document, and out, dq, dk, dv, of each chunk of each case, on this rank."""
    groups, results = groups_of(world), []
    for sizes, layout, shape, keep in cases:
        shards = [LAYOUTS[layout]([0, n], world) for n in sizes]
        homes = [Home(cu_seqlens=s.cu_seqlens, offsets=s.offsets, intervals=s.segments) for s in shards]
        held = [torch.from_numpy(s.positions(rank)) + at for s, at in zip(shards, np.cumsum([0, *sizes]), strict=False)]
        chunks = chunks_of(homes, tuple(range(world)), rank)
        results.append(list(zip(held, in_chunks(chunks, held, *shape, keep, groups), strict=True)))
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_chunks_are_sharded_over_any_group(ranks, world):
    """Chunks shorter than the group too: then ranks hold nothing of them."""
    draw = np.random.default_rng(world)
    cases = [([1, 1, 1], "contiguous", (4, 2), 1), ([2 * world + 1, 2 * world - 1, 1], "zigzag", (4, 1), 1)]
    for _ in range(10):
        sizes = draw.integers(1, 24, draw.integers(1, 6)).tolist()
        shape = [(4, 4), (4, 2), (4, 1)][draw.integers(3)]
        cases.append((sizes, str(draw.choice(list(LAYOUTS))), shape, int(draw.integers(1, 4))))
    for case, *parts in zip(cases, *ranks.run(sharded, world, cases), strict=True):
        sizes, _, shape, _ = case
        positions = torch.cat([held for part in parts for held, _ in part])
        assert torch.equal(positions.sort().values, torch.arange(sum(sizes)))
        for i, want in enumerate(document(sizes, *shape)):
            assert_close(torch.cat([results[i] for part in parts for _, results in part]), want[positions], (case, i))


def traffic(rank: int, world: int, sizes: list[int]) -> list[tuple]:
    """What is counted of each chunk's forward and backward, and its plan."""
    groups, counter = groups_of(world), Counter()
    homes = [Home(cu_seqlens=s.cu_seqlens, offsets=s.offsets, intervals=s.segments)
             for s in (zigzag([0, n], world) for n in sizes)]  # fmt: skip
    chunks, counts = chunks_of(homes, tuple(range(world)), rank), []
    groups.counter = counter
    inputs = [[torch.randn(chunk.rows, h, DIM, requires_grad=True) for h in (4, 2, 2)] for chunk in chunks]
    outs = []
    for chunk, qkv in zip(chunks, inputs, strict=True):
        outs.append(attend_chunk(chunk, 0, *qkv, groups))
        counts.append((counter.take(), chunk.plan.loads(2 * 2 * DIM * 4)))
    for out in reversed(outs):
        out.sum().backward()
    groups.counter = None
    return [*counts, counter.take()]


def test_what_moves_is_what_the_plans_say(ranks):
    """A chunk computes its own queries only, and its ring moves rows of earlier chunks again, twice in all."""
    sizes = [16, 16, 10]
    for rank, (*forward, backward) in enumerate(ranks.run(traffic, 2, sizes)):
        for counted, loads in forward:
            assert counted.pairs == loads.pairs[rank]
            assert counted.bytes_received == loads.bytes_received[rank]
        assert backward.pairs_backward == sum(counted.pairs for counted, _ in forward)
        returned = sum(int(loads.rows_reduced[rank]) for _, loads in forward) * 2 * 2 * DIM * 4
        assert backward.bytes_received == sum(counted.bytes_received for counted, _ in forward) + returned
    pairs = [sum(counts[i][0].pairs for counts in ranks.run(traffic, 2, sizes)) for i in range(3)]
    assert pairs == [16 * 17 // 2, 16 * 16 + 16 * 17 // 2, 10 * 32 + 10 * 11 // 2]


def test_gradients_of_low_precision_are_summed_in_fp32():
    """Ten chunks owe the first something: summed in bf16, its gradients would be several times as far off as one chunk's."""
    sizes, shape = [16] * 10, (4, 2)
    chunks = chunks_of([Home.whole([0, n]) for n in sizes], (0,), 0)
    q, k, v, dout = (x.bfloat16() for x in tensors(sum(sizes), *shape))
    parts = [[x[i * 16 : i * 16 + 16].requires_grad_() for x in (q, k, v)] for i in range(10)]
    outs = [attend_chunk(chunk, 0, *part, groups_of(1)) for chunk, part in zip(chunks, parts, strict=True)]
    for i in reversed(range(10)):
        outs[i].backward(dout[i * 16 : i * 16 + 16])
    assert chunks[0].store.nbytes == 2 * sum(sizes) * 2 * DIM * (2 + 4)
    want = document(sizes, *shape)
    for i, name in ((1, "dk"), (2, "dv")):
        got = torch.cat([part[i].grad for part in parts]).double()
        assert (got - want[i + 1]).norm() <= 0.02 * want[i + 1].norm(), name


def test_shapes_that_do_not_fit_are_refused():
    chunk = chunks_of([Home.whole([0, 4])], (0,), 0)[0]
    q, k, v, _ = tensors(5, 4, 2)
    with pytest.raises(ValueError, match="4 tokens"):
        attend_chunk(chunk, 0, q, k, v, groups_of(1))
