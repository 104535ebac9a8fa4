"""Ulysses plans: what each rank is sent, and what travels."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from equipoise.attention.gather import gather_plan
from equipoise.attention.ring import ring_plan
from equipoise.attention.ulysses import head_share, ulysses_plan
from equipoise.packing.shards import contiguous, divided, together, zigzag
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, sharded


@PROMISE
@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_heads_are_shared_out_once_with_the_kv_heads_they_look_at(kv_heads, per_kv, data):
    heads = kv_heads * per_kv
    ranks = data.draw(st.integers(1, heads))
    shares = [head_share(i, ranks, heads, kv_heads) for i in range(ranks)]
    assert [q for s in shares for q in range(s.q0, s.q1)] == list(range(heads))
    for s in shares:
        assert {q // per_kv for q in range(s.q0, s.q1)} == set(range(s.k0, s.k1))
        assert abs((s.q1 - s.q0) - heads / ranks) < 1
        assert s.per_kv == tuple(
            sum(s.q0 <= q < s.q1 for q in range(kv * per_kv, (kv + 1) * per_kv)) for kv in range(s.k0, s.k1)
        )


@PROMISE
@given(sharded(), st.data())
def test_groups_hold_what_their_ranks_hold(shards, data):
    """And between groups a plan of the whole pack, proved on paper, that all places have alike."""
    P = shards.cp_size
    degree = data.draw(st.sampled_from([d for d in range(1, P + 1) if P % d == 0]))
    make = data.draw(st.sampled_from([ring_plan, gather_plan]))
    plans = [ulysses_plan(shards, tuple(range(10, 10 + P)), rank, degree=degree, outer=make) for rank in range(P)]
    for rank, plan in enumerate(plans):
        assert [plan.tokens_of(r) for r in range(P)] == shards.tokens().tolist()
        group = rank // degree
        held = np.sort(np.concatenate([shards.positions(r) for r in range(group * degree, (group + 1) * degree)]))
        home = [np.arange(start, stop) for start, stop in plan.outer.home_of(group)]
        assert np.array_equal(np.concatenate([np.zeros(0, np.int64), *home]), held)
        assert plan.outer.ranks == tuple(range(10 + rank % degree, 10 + P, degree)) and plan.outer.rank == group
        assert plan.inner_ranks == tuple(range(10 + group * degree, 10 + (group + 1) * degree))
        plan.outer.check(shards.cu_seqlens)


@PROMISE
@given(sharded(), st.integers(1, 5))
def test_a_shard_is_divided_in_order_and_evenly(shards, parts):
    fine = divided(shards, parts)
    fine_tokens = fine.tokens().reshape(shards.cp_size, parts)
    assert np.array_equal(fine_tokens.sum(1), shards.tokens()) and np.all(np.ptp(fine_tokens, axis=1) <= 1)
    for rank in range(shards.cp_size):
        pieces = [fine.positions(rank * parts + part) for part in range(parts)]
        assert np.array_equal(np.concatenate(pieces), shards.positions(rank))
    again, sorted_rows = together(fine, parts), [np.sort(shards.positions(r)) for r in range(shards.cp_size)]
    assert all(np.array_equal(again.positions(r), rows) for r, rows in enumerate(sorted_rows))
    with pytest.raises(ValueError, match="at least one part"):
        divided(shards, 0)
    with pytest.raises(ValueError, match="must divide"):
        together(shards, shards.cp_size + 1)


def test_traffic_falls_with_the_group():
    """4 N h / P elements a rank (MHA: q, k, v and out), less what stays: (P - 1) / P of it."""
    for P in (2, 4, 8):
        sent = ulysses_plan(contiguous([0, 1024], P), tuple(range(P)), 0).bytes_sent(8, 8, 16, 1)
        assert sent.tolist() == [4 * 1024 * 128 * (P - 1) // P**2] * P


def test_a_plan_travels_without_what_was_prepared():
    plan = ulysses_plan(zigzag([0, 5, 9], 2), (4, 5), 1)
    plan.cache["prepared"] = lambda: None
    again = pickle.loads(pickle.dumps(plan))
    assert again.cache == {} and again.ranks == (4, 5) and again.rank == 1
    assert str(again) == "UlyssesPlan over 2 ranks, 9 tokens in 2 documents: rank 1 holds 4"


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="2 shards need 2 ranks"):
        ulysses_plan(zigzag([0, 5], 2), (0, 1, 2), 0)
    with pytest.raises(ValueError, match="an index 0 … 1"):
        ulysses_plan(zigzag([0, 5], 2), (0, 1), 2)
    with pytest.raises(ValueError, match="must divide the ranks; got degree=3 for 4 ranks"):
        ulysses_plan(zigzag([0, 5], 4), (0, 1, 2, 3), 0, degree=3)
    plan = ulysses_plan(zigzag([0, 5], 6), tuple(range(6)), 0)
    with pytest.raises(
        ValueError, match=r"got 4 heads for groups of 6. Legal degrees over these 6 ranks are 1, 2, 3: .*ulysses=3"
    ):
        plan.shares(4, 2)
