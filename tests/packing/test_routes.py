"""python -m pytest tests/packing/test_routes.py"""

from __future__ import annotations

import numpy as np
import pytest
from equipoise.packing.routes import Route, route
from equipoise.packing.shards import Shards, contiguous, striped, zigzag
from hypothesis import given, settings
from hypothesis import strategies as st

LAYOUTS = {
    "contiguous": contiguous,
    "document": zigzag,
    "sequence": lambda cu, cp: zigzag(cu, cp, per="sequence"),
    "striped": lambda cu, cp: striped(cu, cp, 3),
}


def exchange(routes: list[Route], held: list[np.ndarray]) -> list[np.ndarray]:
    """What an all-to-all with uneven sizes does, all ranks in one process."""
    sent = [x if r.source_index is None else x[r.source_index] for r, x in zip(routes, held, strict=True)]
    parts = [np.split(x, np.cumsum(r.source_sizes)[:-1]) for r, x in zip(routes, sent, strict=True)]
    after = []
    for rank, r in enumerate(routes):
        arrived = np.concatenate([parts[source][rank] for source in range(len(routes))])
        assert [len(parts[source][rank]) for source in range(len(routes))] == r.target_sizes.tolist()
        rows = np.empty_like(arrived)
        rows[slice(None) if r.target_index is None else r.target_index] = arrived
        after.append(rows)
    return after


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 80)), max_size=8), st.integers(1, 6),
    st.sampled_from(list(LAYOUTS)), st.sampled_from(list(LAYOUTS)),
)  # fmt: skip
def test_every_row_arrives_where_the_layout_wants_it_and_comes_back(lengths, cp, source, target):
    cu = np.cumsum([0, *lengths])
    before, after = LAYOUTS[source](cu, cp), LAYOUTS[target](cu, cp)
    routes = [route(before, after, rank) for rank in range(cp)]
    start = [before.positions(rank) for rank in range(cp)]
    arrived = exchange(routes, start)
    assert [rows.tolist() for rows in arrived] == [after.positions(rank).tolist() for rank in range(cp)]
    back = exchange([r.reversed() for r in routes], arrived)
    assert [rows.tolist() for rows in back] == [rows.tolist() for rows in start]
    if source == target:
        assert all(r.source_index is None and r.target_index is None for r in routes)


def test_golden_route():
    """Megatron's own vector: cu [0, 8, 12, 16], cp 2, rank 0 sends four rows to each rank and receives in order."""
    there = route(contiguous([0, 8, 12, 16], 2), zigzag([0, 8, 12, 16], 2), 0)
    assert there.source_index.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert there.source_sizes.tolist() == [4, 4] == there.target_sizes.tolist() and there.target_index is None


def test_empty_documents_at_the_end_are_megatrons_padding():
    cu = [0, 32, 96, 128, 128, 128]
    routes = [route(contiguous(cu, 4), zigzag(cu, 4), rank) for rank in range(4)]
    arrived = exchange(routes, [np.arange(32) + 32 * rank for rank in range(4)])
    assert [rows.tolist() for rows in arrived] == [zigzag(cu, 4).positions(rank).tolist() for rank in range(4)]


def test_uneven_layouts():
    """Two ranks, of which one holds nothing before and everything after."""
    cu = np.array([0, 5])
    one = Shards(
        cu_seqlens=cu, cp_size=2, offsets=np.array([0, 1, 1]), segments=np.array([[0, 5]]), document=np.array([0])
    )
    other = Shards(
        cu_seqlens=cu, cp_size=2, offsets=np.array([0, 0, 1]), segments=np.array([[0, 5]]), document=np.array([0])
    )
    routes = [route(one, other, rank) for rank in range(2)]
    assert [rows.tolist() for rows in exchange(routes, [np.arange(5), np.arange(0)])] == [[], [0, 1, 2, 3, 4]]


def test_a_layout_may_hold_its_rows_in_any_order():
    """One rank that holds the second half first: rows are sent in the order in which they will be held."""
    cu = np.array([0, 6])
    backwards = Shards(
        cu_seqlens=cu, cp_size=1, offsets=np.array([0, 2]), segments=np.array([[3, 6], [0, 3]]), document=np.zeros(2, np.int64)
    )  # fmt: skip
    there = route(contiguous(cu, 1), backwards, 0)
    assert there.source_index.tolist() == [3, 4, 5, 0, 1, 2] and there.target_index is None
    assert exchange([there], [np.arange(6)])[0].tolist() == [3, 4, 5, 0, 1, 2]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="got 4 tokens on 2 ranks and 5 on 2"):
        route(contiguous([0, 4], 2), contiguous([0, 5], 2), 0)
    with pytest.raises(ValueError, match="got 2"):
        route(contiguous([0, 4], 2), zigzag([0, 4], 2), 2)
