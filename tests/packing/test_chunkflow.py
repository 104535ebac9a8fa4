"""python -m pytest tests/packing/test_chunkflow.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from equipoise.packing.chunkflow import BACKWARD, FORWARD, RECOMPUTE, chunks, schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packing.operations import check_operations

LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(1, 60)), max_size=30)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 10))
def test_every_schedule_obeys_the_dependencies_and_keeps_k(sizes, keep):
    check_operations(schedule(sizes, keep), sizes, keep)


def test_the_order_of_one_document():
    assert schedule(2, 2).tolist() == [[FORWARD, 0], [FORWARD, 1], [BACKWARD, 1], [BACKWARD, 0]]
    kinds = "".join("FRB"[k] for k in schedule([4, 1], 2)[:, 0])
    assert kinds == "FFFFBBRBRBFB"
    assert schedule(5, 2)[:, 1].tolist() == [0, 1, 2, 3, 4, 4, 3, 2, 2, 1, 1, 0, 0]


def toy_gradients(sizes: list[int], keep: int, ascending: bool = False) -> list[torch.Tensor]:
    """Gradients of a causal net of two layers over one sequence, run in chunks of these sizes with a store of K and V.

    ascending: the first N-K chunks recomputed in the order the paper prints.
    """
    generator = torch.Generator().manual_seed(0)
    layers, width, total = 2, 6, sum(sizes)
    x, y = (torch.randn(total, width, dtype=torch.float64, generator=generator) for _ in range(2))
    weights = [
        torch.randn(width, width, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(4 * layers)
    ]
    edges = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    store = [[torch.zeros(total, width, dtype=torch.float64) for _ in range(2)] for _ in range(layers)]
    owed = [[torch.zeros(total, width, dtype=torch.float64) for _ in range(2)] for _ in range(layers)]
    held: dict[int, tuple] = {}

    def forward(chunk: int) -> None:
        a, b = edges[chunk], edges[chunk + 1]
        h, own, earlier = x[a:b], [], []
        for layer in range(layers):
            q, k, v = (h @ w for w in weights[4 * layer : 4 * layer + 3])
            before = [kv[:a].clone().requires_grad_() for kv in store[layer]]
            keys, values = torch.cat([before[0], k]), torch.cat([before[1], v])
            mask = torch.arange(b)[None] <= torch.arange(a, b)[:, None]
            scores = (q @ keys.T / width**0.5).masked_fill(~mask, -torch.inf)
            h = h + torch.tanh(scores.softmax(-1) @ values @ weights[4 * layer + 3])
            for kept, new in zip(store[layer], (k, v), strict=True):
                kept[a:b] = new.detach()
            own += [k, v]
            earlier += before
        held[chunk] = ((h * y[a:b]).sum(), own, earlier)

    def backward(chunk: int) -> None:
        a, b = edges[chunk], edges[chunk + 1]
        loss, own, earlier = held.pop(chunk)
        grads = [owed[i // 2][i % 2][a:b] for i in range(2 * layers)]
        torch.autograd.backward([loss, *own], [torch.ones_like(loss), *grads])
        for i, kv in enumerate(earlier):
            if kv.grad is not None:
                owed[i // 2][i % 2][:a] += kv.grad

    operations = schedule(len(sizes), keep).tolist()
    if ascending:
        kept = len(sizes) - keep
        head = [op for op in operations if op[0] == FORWARD or (op[0] == BACKWARD and op[1] >= kept)]
        operations = head + [[kind, c] for c in range(kept) for kind in (RECOMPUTE, BACKWARD)]
    for operation, chunk in operations:
        if operation == BACKWARD:
            backward(chunk)
        else:
            forward(chunk)
            if operation == FORWARD and chunk < len(sizes) - keep:
                held.pop(chunk)
    return [w.grad for w in weights]


def relative_error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_gradients_are_those_of_the_whole_document(keep):
    """And not those of the order printed in the paper, which loses what later chunks owe to earlier ones."""
    sizes = [4, 4, 4, 4, 3]
    whole = toy_gradients([19], 1)
    assert relative_error(toy_gradients(sizes, keep), whole) < 1e-12
    if keep < 4:
        assert relative_error(toy_gradients(sizes, keep, ascending=True), whole) > 0.1


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 20))
def test_chunks_hold_every_token_once(lengths, chunk_tokens):
    made = chunks(lengths, chunk_tokens)
    seen = sorted(
        (i, t)
        for i, a, b in zip(made.item.tolist(), made.start.tolist(), made.stop.tolist(), strict=True)
        for t in range(a, b)
    )
    assert seen == [(i, t) for i, length in enumerate(lengths) for t in range(length)]
    assert len(made) == 0 or (made.tokens.max() <= chunk_tokens and made.tokens.min() > 0)
    assert made.tokens.tolist() == [int((made.stop - made.start)[a:b].sum()) for a, b in made.slices()]
    assert made.pairs.sum() == sum(length * (length + 1) // 2 for length in lengths)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.integers(1, 20))
def test_long_documents_are_groups_in_order_and_short_ones_stay_whole(lengths, chunk_tokens):
    made = chunks(lengths, chunk_tokens)
    for first, stop in pairwise(made.groups.tolist()):
        count = stop - first
        assert made.chunk_count[first:stop].tolist() == [count] * count
        assert made.chunk_index[first:stop].tolist() == list(range(count))
        pieces = range(*made.offsets[[first, stop]])
        if count > 1:
            item = int(made.item[pieces[0]])
            assert len(pieces) == count == -(-lengths[item] // chunk_tokens) and (made.item[pieces] == item).all()
            assert made.start[pieces].tolist() == list(range(0, lengths[item], chunk_tokens))
        else:
            assert (made.start[pieces] == 0).all() and made.stop[pieces].tolist() == [
                lengths[i] for i in made.item[pieces]
            ]


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """By trying every partition of the items."""

    def best(at: int, rooms: tuple[int, ...]) -> int:
        if at == len(lengths):
            return len(rooms)
        length = lengths[at]
        fitting = [(*rooms[:i], room - length, *rooms[i + 1 :]) for i, room in enumerate(rooms) if room >= length]
        return min(best(at + 1, choice) for choice in [*fitting, (*rooms, capacity - length)])

    return best(0, ())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_standalone_chunks_are_few(lengths):
    """Best-fit-decreasing needs at most 11/9 of the fewest, and two thirds of a pack."""
    assert len(chunks(lengths, 10)) <= 11 / 9 * fewest_bins(lengths, 10) + 2 / 3


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="chunk_tokens and every item must be at least 1; got 4 and items from 0"):
        chunks([3, 0], 4)
    with pytest.raises(ValueError, match="keeps at least one; got 3 and keep=0"):
        schedule(3, 0)
