"""What ranks tell each other about a stream arrives as it was sent: values, notes, and documents with all their columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist
from equipoise.loaders.exchange import gather, move_rows, share
from equipoise.loaders.wire import decode, encode
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = ["uint8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64", "bool"]


@st.composite
def rows(draw: st.DrawFn) -> dict[str, list]:
    count = draw(st.integers(0, 5))
    if not count:
        return {}
    columns: dict[str, list] = {}
    for name in draw(st.lists(st.sampled_from(["input_ids", "labels", "weights", "é"]), unique=True)):
        dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=count, max_size=count))
        sizes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        columns[name] = [np.arange(size).astype(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    scalar = st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(), st.booleans())
    for name in draw(st.lists(st.sampled_from(["source", "score"]), min_size=not columns, unique=True)):
        columns[name] = draw(st.lists(scalar, min_size=count, max_size=count))
    return columns


def same(a: dict[str, list], b: dict[str, list]) -> bool:
    return list(a) == list(b) and all(
        type(x) is type(y) and (x.dtype == y.dtype and np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y)
        for name in a
        for x, y in zip(a[name], b[name], strict=True)
    )


@given(sent=rows())
@settings(max_examples=300, deadline=None)
def test_rows_come_back_as_they_were(sent: dict[str, list]) -> None:
    """Number types, empty arrays, None, text of any kind; arrays are views of the bytes."""
    data = encode(sent)
    back = decode(data)
    assert same(back, sent)
    for values in back.values():
        for value in values:
            if isinstance(value, np.ndarray) and value.size:
                assert np.shares_memory(value, data) and not value.flags.owndata and value.flags.aligned


def test_a_value_of_infinite_size_is_no_json_trouble() -> None:
    assert decode(encode({"score": [float("inf"), 2**80]})) == {"score": [float("inf"), 2**80]}


def drawn(case: int, sender: int, to: int) -> dict[str, list]:
    """Documents that a rank sends another in a case: seldom none, sometimes many."""
    rng = np.random.default_rng([case, sender, to])
    count = int(rng.integers(0, 4)) * int(rng.integers(0, 6))
    if not count:
        return {}
    ids = [
        rng.integers(0, 1 << 16, int(rng.integers(0, 200))).astype(DTYPES[int(rng.integers(1, 4))])
        for _ in range(count)
    ]
    return {"input_ids": ids, "mask": [each % 2 == 0 for each in ids], "name": [f"{sender}→{to}" for _ in ids]}


def moved(rank: int, world: int, cases: int) -> bool:
    group = None if world == 1 else dist.new_group(backend="gloo")
    for case in range(cases):
        received = move_rows([drawn(case, rank, to) for to in range(world)], group)
        assert len(received) == world
        assert all(same(each, drawn(case, sender, rank)) for sender, each in enumerate(received))
        for sender, each in enumerate(received):
            assert sender == rank or all(ids.flags.aligned for ids in each.get("input_ids", []))
    return True


def told(rank: int, world: int) -> list:
    group = None if world == 1 else dist.new_group(backend="gloo")
    values = np.arange(2 * rank).reshape(-1, 2)
    quiet = gather(values, most=3, note="", group=group)
    loud = gather(values, most=3, note="é" * rank, group=group)
    return [[each.tolist() for each in quiet[0]], quiet[1], loud[1], share(f"rank {rank}", group)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_documents_and_notes_reach_every_rank(ranks, world: int) -> None:
    assert ranks.run(moved, world, 50) == [True] * world
    expected = [
        [np.arange(2 * rank).reshape(-1, 2).tolist() for rank in range(world)],
        [""] * world,
        ["é" * rank for rank in range(world)],
        [f"rank {rank}" for rank in range(world)],
    ]
    assert ranks.run(told, world) == [expected] * world


def own(rank: int, world: int) -> bool:
    rows = [{"input_ids": [np.arange(5)]} for _ in range(world)]
    received = move_rows(rows, dist.new_group(backend="gloo"))
    return received[rank] is rows[rank]


def test_what_a_rank_sends_itself_is_not_copied(ranks) -> None:
    assert ranks.run(own, 2) == [True, True]
