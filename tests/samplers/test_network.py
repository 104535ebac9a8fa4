"""python -m pytest tests/samplers/test_network.py"""

from __future__ import annotations

import numpy as np
import pytest
from equipoise.packing.accounts import ring_block, ring_bytes
from equipoise.packing.cost import Hardware, ModelShape
from equipoise.packing.efficiency import efficiency
from equipoise.samplers.network import ClusterShape, Network, exposed, exposed_ring
from hypothesis import given, settings
from hypothesis import strategies as st

NETWORK = Network(within=100.0, across=10.0, per_node=8)


@pytest.mark.parametrize(("bandwidth", "block"), [(300e9, 1040), (12.5e9, 24960)])
def test_a_ring_hides_from_flops_over_bandwidth_tokens_a_block(bandwidth, block):
    """An A100 over NVLink and InfiniBand, multi-head attention of width d: 4·d·c² FLOPs against 4·c·d bytes."""
    assert ring_block(312e12, bandwidth) == block

    def waits(c: int, cp: int = 4, d: int = 4096) -> float:
        shape = ClusterShape(dp=1, cp=cp, network=Network(within=bandwidth))
        transfer = shape.ring_seconds(ring_bytes(cp * c, cp, kv_width=d), 0, cp)
        return float(exposed_ring(cp * 4 * d * c**2 / 312e12, transfer, cp))

    assert waits(block) == pytest.approx(0, abs=1e-12) and waits(block - 1) > 1e-9


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.floats(0, 10), st.floats(0, 10))
def test_a_ring_is_stages_that_are_alike(cp, compute, transfer):
    moving = [0.0] + [transfer / max(cp - 1, 1)] * (cp - 1)
    stages = exposed([compute / cp] * cp, moving)
    assert exposed_ring(compute, transfer if cp > 1 else 0.0, cp) == pytest.approx(float(stages), abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_stages_wait_for_what_is_longer_than_the_compute_before(drawn):
    compute, transfer = [c for c, _ in drawn], [t for _, t in drawn]
    clock = arrived = transfer[0]
    for i, work in enumerate(compute):
        start = max(clock, arrived)
        clock = start + work
        arrived = start + (transfer[i + 1] if i + 1 < len(drawn) else 0)
    assert exposed(compute, transfer) == clock - sum(compute)


def test_groups_that_leave_the_node_go_across():
    shape = ClusterShape(dp=8, cp=4, tp=2, network=NETWORK)
    assert shape.inside_node([0, 4, 2, 0], [4, 4, 4, 8]).tolist() == [True, True, False, False]
    assert shape.ring_seconds([100, 100], [0, 2], [4, 4]).tolist() == [1, 10]
    # 4 of 8 ranks are on the node: of 7 shares 4 go across, 3 within.
    assert shape.all_to_all_seconds(70.0, 0, 8) == pytest.approx(40 / 10)
    assert shape.all_to_all_seconds(70.0, 4, 4) == pytest.approx(70 / 100)
    assert shape.all_to_all_seconds(70.0, 0, 1) == pytest.approx(0.7)


def test_gradients_use_all_adapters_of_a_node():
    assert ClusterShape(dp=4, network=NETWORK).gradient_seconds(100) == pytest.approx(2 * 0.75)
    wide = ClusterShape(dp=8, cp=2, tp=2, network=NETWORK)
    assert wide.gradient_seconds(100) == pytest.approx(2 * 100 * 15 / 16 / 40)
    assert ClusterShape(dp=1).gradient_seconds(100) == 0


def test_stages_talk_across_unless_the_whole_model_is_on_a_node():
    assert ClusterShape(dp=1, pp=4, network=NETWORK).transfer_seconds(100.0) == 1
    assert ClusterShape(dp=4, pp=4, network=NETWORK).transfer_seconds(100.0) == 10


def test_seconds_of_kernels_and_products():
    model = ModelShape(
        hidden_size=512, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=128, ffn_size=2048, vocab_size=0
    )
    shape = ClusterShape(dp=1, tp=2, hardware=Hardware(peak_flops=989e12 / 2, efficiency=0.5))
    pairs = 4096 * 4097 // 2
    by_hand = pairs * 4 * 2 * 4 * 128 / 2 / (348e12 / 2)
    assert shape.attention_seconds(model, [pairs], [4096], [4096]) == pytest.approx([by_hand])
    assert shape.linear_seconds(model, [10]) == pytest.approx([10 * model.flops_per_token / (989e12 / 4 * 2)])
    flat = ClusterShape(dp=1, attention_speed=lambda q, k: np.full(np.shape(q), 100.0))
    assert flat.attention_seconds(model, [10], [1], [1]) == pytest.approx([10 * model.flops_per_pair / 100e12])
    assert ClusterShape(dp=1).attention_speed is efficiency


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"ClusterShape.cp must be at least 1; got 0"):
        ClusterShape(dp=1, cp=0)
    with pytest.raises(ValueError, match="vpp=2 cuts the stages of a pipeline"):
        ClusterShape(dp=1, vpp=2)
    with pytest.raises(ValueError, match="bandwidths > 0"):
        Network(across=0)
