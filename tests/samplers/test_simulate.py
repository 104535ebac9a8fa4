"""python -m pytest tests/samplers/test_simulate.py"""

from __future__ import annotations

import numpy as np
import pytest
from equipoise.packing.chunkflow import chunks, schedule
from equipoise.packing.chunkflow_places import place
from equipoise.packing.cost import ModelShape
from equipoise.samplers.pipeline import interleaved, run, state_aware
from equipoise.samplers.simulate import ClusterShape, Network, chunkflow_seconds, pack_seconds, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

NETWORK = Network(within=100.0, across=10.0, per_node=8)


def test_one_slot_by_hand():
    """Two replicas of two ranks; attention 4 s, products 1 s, KV of 300 bytes in one hop over a link of 100 a second."""
    shape = ClusterShape(dp=2, cp=2, network=NETWORK)
    step = simulate(shape, attention=[[4.0], [4.0], [2.0], [3.0]], linear=1.0, received=300.0, gradient_bytes=400.0)
    # Forward: a block of 2 s hides 2 of the 3 s. Backward: 600 bytes take 6 s behind 5 s.
    assert step.exposed.tolist() == [1 + 1, 1 + 1, 2 + 3.5, 1.5 + 2.25]
    assert step.busy.tolist() == [4 + 1 + 10 + 2] * 2 + [2 + 1 + 5 + 2, 3 + 1 + 7.5 + 2]
    # 2·400·3/4 bytes take 6 s within the node, of which the least backward, 7 s, hides all.
    assert (step.seconds, step.gradient) == (19.0, 0.0)
    # In the second group forward ends after 4 + 1.5 and 3 + 2 s, backward takes 9.5 + 2.25 and 7 + 3.5 s more.
    assert step.waiting.tolist() == [0, 0, 19 - 10 - 5.5, 19 - 13.5 - 3.75]
    bare = simulate(shape, attention=[[4.0]] * 4, linear=1.0, gradient_bytes=400.0, overlap_gradients=False)
    assert (bare.seconds, bare.gradient) == (17 + 6, 6)
    assert "on 4 ranks: computing 73.9 %, exposed communication 0.0 %, waiting 0.0 %, gradients 26.1 %" in str(bare)


@pytest.mark.parametrize(("traffic", "waits"), [("ring", 1.0 + 1.0), ("gather", 3.0 + 6.0), ("all_to_all", 3.0 + 3.0)])
def test_only_a_ring_hides_its_traffic(traffic, waits):
    shape = ClusterShape(dp=1, cp=2, network=NETWORK)
    step = simulate(shape, attention=[[4.0], [4.0]], received=300.0, traffic=traffic)
    assert step.exposed.tolist() == [waits] * 2 and step.seconds == 14 + waits


def test_stages_of_a_plan_hide_what_the_next_one_needs():
    """A ring of two as stages is the ring; and where the first stage needs KV, nothing hides it."""
    shape = ClusterShape(dp=1, cp=2, network=NETWORK)
    ring = simulate(shape, attention=[[4.0], [4.0]], received=300.0)
    staged = simulate(shape, attention=np.full((2, 1, 2), 2.0), received=[0.0, 300.0])
    assert (staged.seconds, staged.busy.tolist()) == (ring.seconds, ring.busy.tolist())
    early = simulate(shape, attention=np.full((2, 1, 2), 2.0), received=[300.0, 0.0])
    assert early.exposed.tolist() == [3 + 6] * 2


def test_a_group_across_nodes_waits_for_its_slow_link():
    shape = ClusterShape(dp=1, cp=16, network=NETWORK)
    near = simulate(
        shape, attention=np.ones((16, 1)), received=15.0, first_rank=np.arange(16)[:, None] // 8 * 8, cp_size=8
    )
    far = simulate(shape, attention=np.ones((16, 1)), received=15.0)
    assert near.exposed.max() == 0 and far.exposed.min() == pytest.approx(15 / 10 - 15 / 16 + 30 / 10 - 2.5 * 15 / 16)


def test_bubbles_of_four_sequences_come_out_of_the_whole_simulator():
    for vpp, linear, seconds in ((1, [4, 2, 1, 1], 56), (1, [2, 2, 2, 2], 42), (2, [2, 2, 2, 2], 33)):
        step = simulate(ClusterShape(dp=1, pp=4, vpp=vpp), attention=np.zeros((1, 4)), linear=4 * np.array([linear]))
        assert step.seconds == pytest.approx(seconds)
        assert step.busy == pytest.approx([24]) and step.waiting == pytest.approx([seconds - 24])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ClusterShape, dict]:
    shape = ClusterShape(
        dp=draw(st.integers(1, 4)),
        cp=draw(st.integers(1, 3)),
        tp=draw(st.integers(1, 2)),
        pp=draw(st.integers(1, 3)),
        network=NETWORK,
    )
    slots = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    attention, linear = rng.integers(0, 9, (2, shape.num_ranks, slots)).astype(np.float64)
    received = rng.integers(0, 3, (shape.num_ranks, slots)) * 100.0
    return shape, {"attention": attention, "linear": linear, "received": received}


@settings(max_examples=200, deadline=None)
@given(clusters(), st.sampled_from(["ring", "gather", "all_to_all"]))
def test_a_step_is_no_shorter_than_its_work_and_slots_no_shorter_than_steps(drawn, traffic):
    shape, work = drawn
    step = simulate(shape, traffic=traffic, straggle=0.07, gradient_bytes=50.0, **work)
    own = work["attention"] * 3.5 + work["linear"] * 3
    assert (step.busy >= own.sum(1) / shape.pp - 1e-9).all() and (step.exposed >= 0).all()
    assert (step.waiting >= -1e-9).all() and step.seconds >= (step.busy + step.exposed).max() - 1e-9
    assert step.seconds == pytest.approx(step.waiting + step.busy + step.exposed + step.gradient)
    slot = simulate(shape, traffic=traffic, straggle=0.07, gradient_bytes=50.0, sync="slot", **work)
    assert slot.seconds >= step.seconds - 1e-9


@settings(max_examples=200, deadline=None)
@given(clusters(), st.sampled_from(["step", "slot"]), st.floats(0.1, 10))
def test_without_communication_time_scales_with_work(drawn, sync, factor):
    shape, work = drawn
    step, scaled = (
        simulate(shape, attention=c * work["attention"], linear=c * work["linear"], sync=sync) for c in (1, factor)
    )
    assert scaled.seconds == pytest.approx(factor * step.seconds)
    assert scaled.busy == pytest.approx(factor * step.busy)


@settings(max_examples=200, deadline=None)
@given(clusters())
def test_without_a_pipeline_waiting_is_a_maximum(drawn):
    """Per slot: the sum of the slots' slowest passes. Per step: the slowest group's sum."""
    shape, work = drawn
    shape = ClusterShape(dp=shape.dp, cp=shape.cp)
    forward, backward = work["attention"] + work["linear"], 2.5 * work["attention"] + 2 * work["linear"]
    slot = simulate(shape, attention=work["attention"], linear=work["linear"], sync="slot")
    assert slot.seconds == pytest.approx(forward.max(0).sum() + backward.max(0).sum())
    groups = (each.reshape(shape.dp, shape.cp, -1).max(1) for each in (forward, backward))
    step = simulate(shape, attention=work["attention"], linear=work["linear"])
    assert step.seconds == pytest.approx(sum(groups).sum(1).max())


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**32))
def test_groups_of_changing_size_start_when_their_last_rank_is_free(ranks, slots, seed):
    rng = np.random.default_rng(seed)
    first, size = np.zeros((2, ranks, slots), np.int64)
    for slot in range(slots):
        edges = np.flatnonzero(np.append(True, rng.integers(0, 2, ranks - 1)))
        sizes = np.diff(np.append(edges, ranks))
        first[:, slot], size[:, slot] = np.repeat(edges, sizes), np.repeat(sizes, sizes)
    linear = rng.integers(0, 9, (ranks, slots)).astype(np.float64)
    clock = np.zeros(ranks)
    for slot in range(slots):
        for edge in np.unique(first[:, slot]):
            members = slice(edge, edge + size[edge, slot])
            clock[members] = clock[members].max() + 3 * linear[members, slot].max()
    shape = ClusterShape(dp=ranks)
    step = simulate(shape, attention=np.zeros_like(linear), linear=linear, first_rank=first, cp_size=size)
    assert step.seconds == clock.max()


def test_accelerators_of_one_make_differ_by_the_seed():
    shape = ClusterShape(dp=256, tp=2)
    even = simulate(shape, attention=np.ones((256, 1)))
    uneven = [simulate(shape, attention=np.ones((256, 1)), straggle=0.07, seed=seed) for seed in (1, 1, 2)]
    assert uneven[0].busy.tolist() == uneven[1].busy.tolist() != uneven[2].busy.tolist()
    pace = uneven[0].busy / even.busy
    assert 1 <= pace.min() and pace.max() < 1.07 and uneven[0].seconds / even.seconds > 1.06
    assert pace.mean() > 1.04, "of two accelerators the slower counts"


def test_packs_take_what_their_calls_take():
    model = ModelShape(
        hidden_size=512, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=128, ffn_size=2048, vocab_size=100
    )
    shape = ClusterShape(dp=1, cp=8)
    tokens, pairs = np.array([1024, 100, 5000]), np.array([1024, 100, 5000]) * 1000
    attention, linear = pack_seconds(shape, model, tokens=tokens, pairs=pairs, offsets=[0, 2, 3], cp_size=[8, 2])
    calls = [
        float(shape.attention_seconds(model, pairs[i] / cp, -(-int(tokens[i]) // cp), tokens[i]))
        for i, cp in ((0, 8), (1, 8), (2, 2))
    ]
    assert attention == pytest.approx([calls[0] + calls[1], calls[2]])
    assert linear == pytest.approx([float(shape.linear_seconds(model, t)) for t in (1124 / 8, 2500)])
    assert attention[0] > shape.attention_seconds(model, (pairs[0] + pairs[1]) / 8, 141, 1124)


def test_replicas_may_run_schedules_of_their_own():
    """ChunkFlow under sync="step": a replica with a group of three beside one with three standalone chunks."""
    plans = [state_aware(schedule(sizes, 1), 2) for sizes in ([3], [1, 1, 1])]
    linear = np.array([[2.0, 4.0, 6.0], [4.0, 4.0, 4.0]])
    shape = ClusterShape(dp=2, pp=2, network=Network(within=1.0))
    step = simulate(shape, attention=np.zeros((2, 3)), linear=linear, schedules=plans, gradient_bytes=9.0)
    ends = [run(p, forward=row / 2, backward=row).seconds for p, row in zip(plans, linear, strict=True)]
    # Two chunks of the first replica are run forward twice; its last backward is that of chunk 0, 2 s.
    assert step.busy.tolist() == [18 + 3, 18] and step.gradient == 9 - 2
    assert step.seconds == max(ends) + 7
    received = simulate(shape, attention=np.zeros((2, 3)), received=[[1.0, 0, 0]], schedules=plans, traffic="gather")
    assert received.exposed.tolist() == [(2 * 1 + 2) / 2, (1 + 2) / 2]


def test_chunkflow_on_one_stage_is_what_its_placement_costs():
    made = chunks(np.array([9, 7, 3, 3, 2, 1, 1]), 3)
    for sync in ("slot", "step"):
        forward, backward = 10**9 * made.tokens, 2 * 10**9 * made.tokens
        placement = place(made.groups, forward, backward, dp=2, keep=1, sync=sync)
        seconds = chunkflow_seconds(placement, forward, backward, 1, pp=1, sync=sync)
        assert seconds == pytest.approx(placement.cost(forward, backward, 1, sync) / 1e9)
        deeper = chunkflow_seconds(placement, forward, backward, 1, pp=4, sync=sync)
        assert seconds / 4 < deeper < seconds


def test_wrong_arguments_are_refused():
    shape = ClusterShape(dp=2, cp=2)
    with pytest.raises(ValueError, match=r"seconds of \(4 ranks, slots\)"):
        simulate(shape, attention=np.ones((2, 1)))
    with pytest.raises(ValueError, match="ring, gather, all_to_all; got 'bus'"):
        simulate(shape, attention=np.ones((4, 1)), traffic="bus")
    plan = interleaved(1, 1, 1)
    with pytest.raises(ValueError, match="each of the 2 replicas needs sync='step'"):
        simulate(shape, attention=np.ones((4, 1)), schedules=[plan, plan], sync="slot")
