"""Lowered plans, run on paper: buffers that hold positions instead of keys must end up where tiles look for them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equipoise.attention.gather import gather_plan
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.program import Cargo, Program, lower
from equipoise.attention.ring import ring_plan
from equipoise.packing.shards import zigzag
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, direct, sharded, staggered


def sent_by(cargo: Cargo, buffers: dict[int, np.ndarray]) -> list[np.ndarray]:
    """What a rank sends to each rank, as all_to_all_single would cut it."""
    rows = np.concatenate([np.zeros(0, np.int64), *(buffers[buffer][rows] for buffer, rows in cargo.picks)])
    rows = rows if cargo.order is None else rows[cargo.order]
    return np.split(rows, np.cumsum(cargo.send_splits)[:-1])


def travel(plan: AttentionPlan, programs: list[Program]) -> list[dict[int, np.ndarray]]:
    """Every rank's buffers, filled with positions, after all moves."""
    held = []
    for rank in range(len(programs)):
        home = [np.arange(a, b) for a, b in plan.home_of(rank)]
        held.append({0: np.concatenate([np.zeros(0, np.int64), *home])})
    for s in range(plan.stages):
        cargos = [p.stages[s].moves for p in programs]
        assert len({cargo is None for cargo in cargos}) == 1, "some ranks would wait for ever"
        if cargos[0] is None:
            continue
        sent = [sent_by(cargo, buffers) for cargo, buffers in zip(cargos, held, strict=True)]
        for rank, cargo in enumerate(cargos):
            assert cargo.receive_splits == [len(sent[src][rank]) for src in range(len(programs))]
            arrived = np.concatenate([sent[src][rank] for src in range(len(programs))])
            held[rank][s] = arrived if cargo.placing is None else arrived[cargo.placing]
    return held


def pairs_of(program: Program, buffers: dict[int, np.ndarray]) -> list[tuple[int, int]]:
    pairs = []
    for stage in program.stages:
        for _, buffer, tiles in stage.tiles:
            for q0, q1, k0, k1, lo, hi in tiles.tolist():
                near = [(q, k) for q in range(q0, q1) for k in range(k0, k1) if lo <= q - k <= hi]
                pairs += [(int(buffers[0][q]), int(buffers[buffer][k])) for q, k in near]
    return pairs


def assert_right(plan: AttentionPlan, cu_seqlens: np.ndarray) -> None:
    programs = [lower(plan, rank) for rank in range(len(plan.ranks))]
    held = travel(plan, programs)
    wanted = [(q, k) for a, b in itertools.pairwise(cu_seqlens) for q in range(a, b) for k in range(a, q + 1)]
    assert sorted(pair for p, h in zip(programs, held, strict=True) for pair in pairs_of(p, h)) == wanted
    for rank, (program, buffers) in enumerate(zip(programs, held, strict=True)):
        assert program.buffer_rows == [len(buffers.get(s, [])) for s in range(plan.stages)]
        assert program.tokens == plan.tokens_of(rank)
    for s in range(plan.stages):
        cargos = [p.stages[s].returns for p in programs]
        if cargos[0] is not None:
            sent = [sent_by(cargo, buffers) for cargo, buffers in zip(cargos, held, strict=True)]
            for rank, cargo in enumerate(cargos):
                for src, landing in enumerate(cargo.landing):
                    for buffer, which, rows in landing:
                        assert which is None and np.array_equal(held[rank][buffer][rows], sent[src][rank])


@PROMISE
@given(sharded(largest=20))
def test_rows_are_where_tiles_look_for_them(shards):
    assert_right(ring_plan(shards, tuple(range(shards.cp_size))), shards.cu_seqlens)


@PROMISE
@given(sharded(largest=20), st.sampled_from([staggered, direct]))
def test_rows_may_come_from_several_buffers_and_to_several_ranks(shards, change):
    plan = change(ring_plan(shards, tuple(range(shards.cp_size)), skip=False))
    plan.check(shards.cu_seqlens)
    assert_right(plan, shards.cu_seqlens)


@PROMISE
@given(sharded(largest=20), st.sampled_from([1, 2, 100]))
def test_rows_from_several_senders_are_placed_in_the_order_of_the_pack(shards, chunks):
    plan = gather_plan(shards, tuple(range(shards.cp_size)), chunks=chunks)
    assert_right(plan, shards.cu_seqlens)
    programs = [lower(plan, rank) for rank in range(shards.cp_size)]
    for buffers in travel(plan, programs):
        assert all(np.all(np.diff(rows) > 0) for buffer, rows in buffers.items() if buffer)


def test_local_chunks_of_a_document_become_one_tile():
    program = lower(ring_plan(zigzag([0, 16, 40], 2), (0, 1)), 0)
    assert [len(tiles) for stage in program.stages for *_, tiles in stage.tiles] == [2, 2]


def test_the_plan_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="tiles of rank 0"):
        lower(ring_plan(zigzag([0, 16], 2), (0, 1), rank=0), 1)
