"""python -m pytest tests/samplers/test_dynamic_cp.py"""

from __future__ import annotations

import numpy as np
import pytest
from equipoise import Lengths
from equipoise.samplers.dynamic_cp import DynamicCp, dynamic_cp, quotas
from equipoise.samplers.rank_groups import Placement, loads
from hypothesis import given, settings
from hypothesis import strategies as st

LAW = {
    "mode": "distribution", "type": "lognormal", "format": "thd", "min_seq_len": 128, "max_seq_len": 8192,
    "mean_seq_len": 1024, "lognormal_sigma": 1.5,
}  # fmt: skip


def megatron(documents: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens by Megatron's law, and their cost."""
    tokens = np.asarray(Lengths.from_law(LAW, documents, seed).tokens, dtype=np.int64)
    return tokens, tokens * tokens + 8192 * tokens


def groups(plan: Placement) -> list[tuple[int, int, int, list[int]]]:
    """(slot, first rank, ranks, documents) of each pack that holds documents."""
    return [
        (int(plan.slot[i]), int(plan.first_rank[i]), int(plan.cp_size[i]), plan.order[a:b].tolist())
        for i, (a, b) in enumerate(zip(plan.offsets[:-1], plan.offsets[1:], strict=True))
        if b > a
    ]


def check_promises(plan: Placement, tokens: np.ndarray, num_ranks: int, cap: int, options: DynamicCp) -> None:
    """Every document once, every rank once per slot, the cap hard, powers of two aligned, slots as asked."""
    assert sorted(plan.order.tolist()) == list(range(len(tokens)))
    slots = int(plan.slot.max()) + 1
    assert slots % options.slots_multiple_of == 0
    for slot in range(slots):
        mine = np.flatnonzero(plan.slot == slot)
        covered = np.concatenate([plan.first_rank[i] + np.arange(plan.cp_size[i]) for i in mine])
        assert sorted(covered.tolist()) == list(range(num_ranks))
    for _, first, size, documents in groups(plan):
        step = max(options.pad * size if size > 1 else -(-options.pad // 2), 1)
        assert -(-sum(-(-int(tokens[d]) // step) * step for d in documents) // size) <= cap
        if options.degrees == "powers":
            assert size == num_ranks or (size & (size - 1) == 0 and first % size == 0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, int, int, DynamicCp]:
    num_ranks, cap = draw(st.integers(1, 12)), draw(st.integers(1, 64))
    options = DynamicCp(
        degrees=draw(st.sampled_from(["any", "powers"])),
        pad=draw(st.sampled_from([0, 0, 1, 2])),
        slots_multiple_of=draw(st.integers(1, 4)),
        stages=draw(st.integers(1, 4)),
        traffic_price=draw(st.sampled_from([0.0, 0.1, 1.0])),
        row_units=draw(st.sampled_from([0, 5])),
    )
    longest = num_ranks * cap if options.pad == 0 else cap // options.pad * options.pad * num_ranks
    tokens = draw(st.lists(st.one_of(st.integers(0, min(9, longest)), st.integers(0, longest)), max_size=30))
    return np.array(tokens, np.int64), num_ranks, cap, options


@settings(max_examples=400, deadline=None)
@given(steps(), st.booleans())
def test_every_plan_keeps_the_promises(step, costly):
    tokens, num_ranks, cap, options = step
    plan = dynamic_cp(tokens, tokens**2 if costly else tokens * 0, num_ranks=num_ranks, cap=cap, options=options)
    check_promises(plan, tokens, num_ranks, cap, options)


@settings(max_examples=200, deadline=None)
@given(steps(), st.integers(0, 3))
def test_fixed_slots_are_kept_or_refused(step, more):
    tokens, num_ranks, cap, options = step
    free = dynamic_cp(tokens, tokens**2, num_ranks=num_ranks, cap=cap, options=options)
    slots = (int(free.slot.max()) // options.slots_multiple_of + 1 + more) * options.slots_multiple_of
    try:
        plan = dynamic_cp(tokens, tokens**2, num_ranks=num_ranks, cap=cap, options=options, slots=slots)
    except ValueError as refusal:
        # A plan of fewer slots with idle ones added always fits: only padding may stand in the way of the other division.
        assert "give more slots" in str(refusal) and options.pad
        return
    check_promises(plan, tokens, num_ranks, cap, options)
    assert int(plan.slot.max()) + 1 == slots


def test_what_megatron_loses_is_planned():
    """Its scheduler asks for four of six ranks, which were never made a group, and asserts where slots must be even."""
    six = dynamic_cp([4097, 100, 100], np.array([4097, 100, 100]) ** 2, num_ranks=6, cap=2048)
    check_promises(six, np.array([4097, 100, 100]), 6, 2048, DynamicCp())
    even = DynamicCp(slots_multiple_of=2)
    two = dynamic_cp([6144, 2048], np.array([6144, 2048]) ** 2, num_ranks=2, cap=4096, options=even)
    assert groups(two) == [(0, 0, 2, [0]), (1, 0, 2, [1])]
    four = DynamicCp(slots_multiple_of=4)
    short = dynamic_cp([100] * 4, [10] * 4, num_ranks=2, cap=4096, options=four)
    assert int(short.slot.max()) == 3
    check_promises(short, np.array([100] * 4), 2, 4096, four)
    uniform = np.random.default_rng(0).integers(1, 24 * 2048, 40)
    for ranks in (24, 12, 6):
        tokens = np.minimum(uniform, ranks * 2048)
        check_promises(dynamic_cp(tokens, tokens**2, num_ranks=ranks, cap=2048), tokens, ranks, 2048, DynamicCp())


def test_megatrons_own_small_case():
    """dev tests: (6144, 2048) on two ranks of 4096: both documents on both ranks, the short one's group widened."""
    plan = dynamic_cp([6144, 2048], np.array([6144, 2048]) ** 2, num_ranks=2, cap=4096)
    assert groups(plan) == [(0, 0, 2, [0, 1])]


def test_padding_counts_against_the_cap():
    """Over two ranks a document of 5 tokens pads to 8, four rows a rank: nothing else fits beside it. One rank pads to 1."""
    padded = DynamicCp(pad=2)
    apart = dynamic_cp([5, 1], [9, 9], num_ranks=2, cap=4, options=padded)
    assert [documents for *_, documents in groups(apart)] == [[0], [1]] and int(apart.slot.max()) == 1
    assert [size for _, _, size, _ in groups(dynamic_cp([3, 3], [9, 9], num_ranks=2, cap=3, options=padded))] == [1, 1]
    with pytest.raises(ValueError, match="document 0 has 5 tokens, and the 2 ranks hold 3 each, padded to 2 per rank"):
        dynamic_cp([5], [1], num_ranks=2, cap=3, options=padded)


def test_quotas_end_together():
    """facts: W_i·(m_i·V + p - 1) equal over DP ranks; exact where it divides."""
    for micro_batches, stages, virtual in (([4, 4], 1, 1), ([2, 5, 11], 4, 1), ([3, 8], 8, 2)):
        m = np.array(micro_batches)
        work = quotas(10**9, m, stages=stages, virtual_stages=virtual)
        ends = work * (m * virtual + stages - 1)
        assert np.ptp(ends) < (m * virtual + stages - 1).max()
        assert 10**9 <= (work * m).sum() < 10**9 + m.sum()
    assert (quotas(900, [1, 3], stages=4) * (np.array([1, 3]) + 3)).tolist() == [1200, 1200]


def test_a_pipeline_prefers_slots_of_like_work():
    """Of two slots with a pipeline behind, the longest is paid p - 1 times more: work is levelled over slots."""
    tokens, cost = megatron(96, 1)
    ranks = 16
    flat = DynamicCp(stages=16, traffic_price=0.0)
    plan = dynamic_cp(tokens, cost, num_ranks=ranks, cap=2048, options=flat)
    spans = loads(plan, cost, tokens, flat.rules(ranks, 2048)).max(0)
    assert len(spans) > 2 and spans.max() <= 1.1 * spans.mean()


def test_a_score_replaces_the_formula():
    seen = []

    def most_even(load: np.ndarray) -> float:
        seen.append(load.shape)
        return float(load.sum(1).max())

    tokens, cost = megatron(40, 3)
    dynamic_cp(tokens, cost, num_ranks=8, cap=2048, score=most_even)
    assert len(seen) >= 2 and all(shape[0] == 8 for shape in seen)


def test_communication_beyond_the_node_keeps_groups_inside():
    """A document worth half of 16 ranks' work gets more than a node's four of them, unless rows from afar are dear."""
    tokens = np.array([4000] + [300] * 14)
    cost = tokens * 1000
    sizes = []
    for far_row_units in (0, 10**5):
        options = DynamicCp(traffic_price=0.01, node_ranks=4, far_row_units=far_row_units)
        sizes.append(dynamic_cp(tokens, cost, num_ranks=16, cap=2048, options=options).cp_size.max())
    assert sizes[0] > 4 >= sizes[1]


def test_the_mark_of_planning():
    """Megatron's law, cost L² + 8192L: slots' slowest ranks over the ideal at most 1.10 on average, traffic bounded."""
    for ranks, documents in ((8, 16), (16, 32), (64, 128)):
        for degrees, most in (("any", 2.5), ("powers", 4.0)):
            times, traffic = [], []
            for seed in range(40):
                tokens, cost = megatron(documents, seed)
                options = DynamicCp(degrees=degrees)
                plan = dynamic_cp(tokens, cost, num_ranks=ranks, cap=2048, options=options)
                load = loads(plan, cost, tokens, options.rules(ranks, 2048))
                times.append(load.max(0).sum() * ranks / cost.sum())
                size = np.repeat(plan.cp_size, np.diff(plan.offsets))
                traffic.append((tokens[plan.order] * (size - 1)).sum() / tokens.sum())
            assert np.mean(times) <= 1.10 and np.mean(traffic) <= most


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="document 1 has 9 tokens, and the 2 ranks hold 4 each"):
        dynamic_cp([1, 9], [1, 9], num_ranks=2, cap=4)
    with pytest.raises(ValueError, match="1 slots of 2 ranks x 4 tokens do not hold 3 documents of 12 tokens"):
        dynamic_cp([4, 4, 4], [4, 4, 4], num_ranks=2, cap=4, slots=1)
    with pytest.raises(ValueError, match="multiple of slots_multiple_of=2"):
        dynamic_cp([1], [1], num_ranks=2, cap=4, slots=3, options=DynamicCp(slots_multiple_of=2))
    with pytest.raises(ValueError, match="stages must be at least 1"):
        DynamicCp(stages=0)
    with pytest.raises(ValueError, match="pad must be 0 or more"):
        DynamicCp(pad=-1)
    with pytest.raises(ValueError, match="share of the step"):
        DynamicCp(traffic_price=2)
    with pytest.raises(ValueError, match="at least 1 micro-batch per rank"):
        quotas(5, [0])
