"""Ulysses plans: what each rank is sent, and what travels."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from equipoise.attention.ulysses import _share, ulysses_plan
from equipoise.packing.shards import contiguous, zigzag
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, sharded


@PROMISE
@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_heads_are_shared_out_once_with_the_kv_heads_they_look_at(kv_heads, per_kv, data):
    heads = kv_heads * per_kv
    ranks = data.draw(st.integers(1, heads))
    shares = [_share(i, ranks, heads, kv_heads) for i in range(ranks)]
    assert [q for s in shares for q in range(s.q0, s.q1)] == list(range(heads))
    for s in shares:
        assert {q // per_kv for q in range(s.q0, s.q1)} == set(range(s.k0, s.k1))
        assert abs((s.q1 - s.q0) - heads / ranks) < 1


@PROMISE
@given(sharded())
def test_positions_are_the_pack_in_rank_order(shards):
    ranks = tuple(range(shards.cp_size))
    plan = ulysses_plan(shards, ranks, 0)
    assert sorted(plan.positions.tolist()) == list(range(plan.tokens))
    for rank in ranks:
        held = plan.positions[plan.home_offsets[rank] : plan.home_offsets[rank + 1]]
        assert np.array_equal(held, shards.positions(rank)) and plan.tokens_of(rank) == len(held)


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
