"""python -m pytest tests/packing/test_cost.py"""

from __future__ import annotations

import numpy as np
import pytest
from equipoise.packing.cost import CostModel, Hardware, ModelShape, causal_pairs, cost_units
from hypothesis import given, settings
from hypothesis import strategies as st

LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def skrull_layer(heads: int, kv_heads: int, dim: int) -> ModelShape:
    """One layer without a head, its FFN ungated and four times as wide: what Skrull's formula describes."""
    h = heads * dim
    return ModelShape(
        hidden_size=h,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        ffn_size=4 * h,
        vocab_size=0,
        gated=False,
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8))
def test_causal_pairs_count_what_a_span_attends_to(spans):
    start = np.array([a for a, _ in spans])
    stop = start + [length for _, length in spans]
    counted = [sum(1 for q in range(a, b) for k in range(q + 1)) for a, b in zip(start, stop, strict=True)]
    assert causal_pairs(start, stop).tolist() == counted


def test_causal_pairs_are_exact_where_floats_are_not():
    assert int(causal_pairs(2**31 - 2, 2**31 - 1)) == 2**31 - 1
    assert causal_pairs(np.int32(0), np.array([131072], dtype=np.int32)).tolist() == [131072 * 131073 // 2]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.sampled_from([1, 2, 4]), st.sampled_from([16, 64, 128]), st.integers(1, 2**20))
def test_flops_are_skrulls(kv_heads, group, dim, s):
    shape = skrull_layer(kv_heads * group, kv_heads, dim)
    h, h_kv = shape.hidden_size, kv_heads * dim
    assert shape.flops(s * s, s) == pytest.approx((20 * h**2 + 4 * h * h_kv) * s + 4 * h * s**2, rel=1e-14)


def test_one_40k_document_costs_ten_times_the_attention_of_ten_4k_documents():
    shape = skrull_layer(32, 8, 128)
    assert shape.flops(40960**2, 0) / shape.flops(10 * 4096**2, 0) == 10


def test_attention_is_four_flops_per_pair_head_and_dim_and_backward_two_and_a_half_of_it():
    shape = ModelShape.from_hf(LLAMA)
    assert shape.flops(1000, 0) == 4 * 1000 * 32 * 128 * 32
    assert shape.backward_flops(1000, 0) == 2.5 * shape.flops(1000, 0)
    assert shape.backward_flops(0, 1000) == 2 * shape.flops(0, 1000)


def test_a_token_costs_two_flops_per_weight():
    """Llama 3 8B has 7.50e9 weights beside its input embedding."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert ModelShape.from_hf(LLAMA).flops_per_token == 2 * (32 * layer + 4096 * 128256)


def test_activations_are_megatrons_34_bytes_less_dropout():
    assert skrull_layer(32, 32, 128).activation_bytes_per_token == 32 * 4096


def test_from_hf_reads_objects_and_dicts_alike():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )
    shape = ModelShape.from_hf(config)
    assert shape == ModelShape.from_hf(config.to_dict())
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 32)
    assert ModelShape.from_hf({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 32
    assert ModelShape.from_hf(LLAMA).head_dim == 128 and not ModelShape.from_hf(LLAMA, gated=False).gated


def test_from_hf_names_what_is_missing():
    with pytest.raises(
        ValueError, match="lacks hidden_size, num_hidden_layers, num_attention_heads, intermediate_size"
    ):
        ModelShape.from_hf({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257})
    with pytest.raises(ValueError, match="lacks intermediate_size"):
        ModelShape.from_hf({name: value for name, value in LLAMA.items() if name != "intermediate_size"})
    with pytest.raises(ValueError, match="experts"):
        ModelShape.from_hf({**LLAMA, "num_local_experts": 8})
    with pytest.raises(ValueError, match="multiple of num_kv_heads; got 32 and 5"):
        ModelShape.from_hf({**LLAMA, "num_key_value_heads": 5})


def test_cost_model_of_a_shape():
    shape, hardware = ModelShape.from_hf(LLAMA), Hardware(peak_flops=1e15, efficiency=0.5, memory_bytes=80e9)
    model = CostModel.of(shape, hardware, bytes_fixed=1e9)
    pairs, tokens = np.array([10**9, 0]), np.array([0, 10**5])
    spent = (shape.flops(pairs, tokens) + shape.backward_flops(pairs, tokens)) / 0.5e15
    assert model.seconds(pairs, tokens) == pytest.approx(spent, rel=1e-12)
    most = model.max_tokens(hardware.memory_bytes)
    assert model.bytes(most) <= hardware.memory_bytes < model.bytes(most + 1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**6)), min_size=1, max_size=9))
def test_units_are_nanoseconds_rounded_once(drawn):
    pairs, tokens = np.array(drawn).T
    model = CostModel(seconds_per_pair=3.7e-12, seconds_per_token=1.9e-7)
    units = model.units(pairs, tokens)
    assert units.dtype == np.int64
    assert np.all(np.abs(units - 1e9 * model.seconds(pairs, tokens)) <= 0.5)
    assert np.array_equal(units, cost_units(lambda p, t: 3.7e-12 * p + 1.9e-7 * t, pairs, tokens))


def test_units_refuse_what_integers_cannot_hold():
    for seconds in (np.nan, np.inf, -1.0, 5e9):
        with pytest.raises(ValueError, match=r"less than 2\*\*62 nanoseconds"):
            cost_units(lambda p, t, s=seconds: np.full(len(p), s), [1, 2], [1, 2])
    with pytest.raises(ValueError, match="must be vectorised"):
        cost_units(lambda p, t: 1.0, [1, 2], [1, 2])


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="seconds_per_pair must be a finite number"):
        CostModel(seconds_per_pair=float("nan"), seconds_per_token=1.0)
    with pytest.raises(ValueError, match="needs bytes_per_token"):
        CostModel(seconds_per_pair=1.0, seconds_per_token=1.0).max_tokens(1e9)
    with pytest.raises(ValueError, match="Not one token fits"):
        CostModel.of(ModelShape.from_hf(LLAMA), Hardware(), bytes_fixed=1e11).max_tokens(80e9)
    with pytest.raises(ValueError, match="0 < efficiency <= 1"):
        Hardware(efficiency=1.5)
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        ModelShape.from_hf({**LLAMA, "num_hidden_layers": 0})
    with pytest.raises(ValueError, match="vocab_size"):
        ModelShape.from_hf({**LLAMA, "vocab_size": -1})
