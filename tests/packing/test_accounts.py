"""python -m pytest tests/packing/test_accounts.py"""

from __future__ import annotations

import numpy as np
import pytest
from equipoise.packing.accounts import (
    activation_bytes,
    kv_bytes_per_token,
    layer_parameters,
    rank_memory,
    ring_block,
    ring_bytes,
    tp_bytes,
    ulysses_bytes,
)
from equipoise.packing.cost import ModelShape
from equipoise.packing.shards import contiguous
from hypothesis import given, settings
from hypothesis import strategies as st

GPT_22B = {"hidden": 6144, "heads": 64, "tp": 8}
MIB, GIB = 2**20, 2**30


def gpt(tp_heads: int = 8) -> ModelShape:
    """Multi-head attention and an ungated FFN of 4h: what the papers' sums describe."""
    return ModelShape(
        hidden_size=128 * tp_heads,
        num_layers=4,
        num_heads=tp_heads,
        num_kv_heads=tp_heads,
        head_dim=128,
        ffn_size=512 * tp_heads,
        vocab_size=1000,
        gated=False,
    )


def test_activations_of_the_22b_model_are_bytes_and_not_elements():
    """The corrected figures: an article doubles them."""
    tp = activation_bytes(4096, **GPT_22B)
    both = activation_bytes(4096, **GPT_22B, sequence_parallel=True)
    assert round(float(tp) / 1e9, 3) == 0.998
    assert round(float(both) / 1e9, 3) == 0.778
    assert round(float(tp - both) / 1e6, 1) == 220.2


def test_what_sequence_parallelism_saves_falls_with_length():
    s = np.array([1024, 2048, 4096, 8192, 16384])
    tp, both = activation_bytes(s, **GPT_22B), activation_bytes(s, **GPT_22B, sequence_parallel=True)
    assert ((1 - both / tp) * 100).round(1).tolist() == [44.5, 33.2, 22.1, 13.2, 7.3]
    assert (tp - both) == pytest.approx(10 * s * 6144 * (1 - 1 / 8))


def test_sequence_parallelism_moves_the_same_bytes():
    by_all_reduce = tp_bytes(4096, hidden=6144, tp=8)
    assert by_all_reduce == tp_bytes(4096, hidden=6144, tp=8, sequence_parallel=True)
    assert by_all_reduce == pytest.approx(4 * 2 * (7 / 8) * 4096 * 6144 * 2)
    assert tp_bytes(4096, hidden=6144, tp=1) == 0


def test_kv_traffic_of_a_ring():
    cp = np.array([2, 4, 8, 16])
    assert (ring_bytes(32768, cp, kv_width=1024) / MIB).tolist() == [64, 96, 112, 120]
    assert (ring_bytes(32768, cp, kv_width=8192) / MIB).tolist() == [512, 768, 896, 960]
    assert [32 * ring_bytes(32768, 8, kv_width=width) / GIB for width in (1024, 8192)] == [3.5, 28]


def test_all_to_all_falls_with_the_group_and_a_ring_does_not():
    p = np.array([2, 4, 8])
    assert (ulysses_bytes(32768, p, width=8192) / 2).tolist() == (4 * 32768 * 8192 / p).tolist()
    assert len(set(ulysses_bytes(4096 * p, p, width=8192).tolist())) == 1
    assert ulysses_bytes(8, 2, width=64, kv_width=16) == (2 * 64 + 2 * 16) * 8 / 2 * 2
    assert (np.diff(ring_bytes(32768, p, kv_width=8192)) > 0).all()


def test_block_that_hides_a_ring():
    assert ring_block(312e12, 300e9) == 1040
    assert ring_block(312e12, 12.5e9) == 24960


def test_ring_without_zigzag_computes_one_block_more_on_every_rank():
    shards = contiguous(np.array([0, 64]), 4)
    blocks = [len({k // 16 for q in shards.positions(rank) for k in range(q + 1)}) for rank in range(4)]
    assert blocks == [1, 2, 3, 4]


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 32),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 2**17),
    st.booleans(),
)
def test_sharing_never_takes_more_memory(heads, tp, pp, shards, tokens, sequence_parallel):
    shape = gpt(heads)
    totals = [
        rank_memory(
            shape, tokens=tokens, tp=tp, pp=pp, shards=shards, zero=zero, sequence_parallel=sequence_parallel
        ).total
        for zero in range(4)
    ]
    assert sorted(totals, reverse=True) == totals
    with_sp = rank_memory(shape, tokens=tokens, tp=tp, pp=pp)
    without = rank_memory(shape, tokens=tokens, tp=tp, pp=pp, sequence_parallel=False)
    assert with_sp.activations <= without.activations
    if tp == 1:
        assert with_sp == without


def test_memory_of_one_rank_by_hand():
    shape = gpt()
    h, v, layers = 1024, 1000, 4
    parameters = layers * 12 * h * h + 2 * v * h
    assert layer_parameters(shape) == 12 * h * h
    memory = rank_memory(shape, tokens=10, zero=0)
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * parameters, 2 * parameters, 12 * parameters)
    assert memory.activations == 10 * (layers * 32 * h + 6 * v)
    assert memory.total == 16 * parameters + memory.activations
    assert str(memory).startswith("0.8 GB: weights 0.1")


def test_what_zero_shares():
    whole = rank_memory(gpt(), tokens=1, zero=0)
    for zero in range(4):
        shared = rank_memory(gpt(), tokens=1, shards=4, zero=zero)
        assert shared.optimizer * (4 if zero >= 1 else 1) == whole.optimizer
        assert shared.gradients * (4 if zero >= 2 else 1) == whole.gradients
        assert shared.weights * (4 if zero >= 3 else 1) == whole.weights


def test_a_pipeline_holds_most_on_its_first_stage():
    shape = gpt()
    first = rank_memory(shape, tokens=4096, pp=4)
    assert first.activations == 4096 * 4 * 32 * 1024
    assert rank_memory(shape, tokens=4096, pp=4, recompute=True).activations == 4096 * (4 * 2 * 1024 + 32 * 1024)


def test_chunkflow_keeps_k_chunks_and_the_store():
    shape = gpt()
    assert kv_bytes_per_token(shape) == 2 * 4 * 1024 * 2
    one, two = (rank_memory(shape, tokens=64, held=k, store_tokens=1000) for k in (1, 2))
    assert two.activations - one.activations == 64 * 4 * 32 * 1024
    assert one.store == 2 * 1000 * kv_bytes_per_token(shape)


def test_an_unknown_way_of_sharing_is_refused():
    with pytest.raises(ValueError, match="zero must be 0"):
        rank_memory(gpt(), tokens=1, zero=4)
