"""python -m pytest tests/samplers/test_flexsp.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from equipoise.packing.cost import CostModel, ModelShape
from equipoise.samplers.flexsp import FlexSp, SpModel, flexsp
from equipoise.samplers.rank_groups import Placement, loads
from hypothesis import given, settings
from hypothesis import strategies as st

SEVEN = SpModel.preset("gpt-7b")


def makespan(plan: Placement, tokens: np.ndarray, options: FlexSp, num_ranks: int, cap: int) -> int:
    """Nanoseconds of the step, slot by slot, without its fixed part."""
    return int(loads(plan, options.model.work(tokens), tokens, options.rules(num_ranks, cap)).max(0).sum())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_plan_keeps_the_promises(data):
    num_ranks, cap = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5000))
    options = FlexSp(
        model=SEVEN,
        degrees=data.draw(st.sampled_from(["any", "powers"])),
        max_group=data.draw(st.none() | st.integers(1, 12)),
    )
    largest = options.largest_group(num_ranks)
    assert largest <= (options.max_group or num_ranks)
    tokens = np.array(data.draw(st.lists(st.integers(0, largest * cap), max_size=24)), np.int64)
    plan = flexsp(tokens, num_ranks=num_ranks, cap=cap, options=options)
    assert sorted(plan.order.tolist()) == list(range(len(tokens)))
    for slot in range(int(plan.slot.max()) + 1):
        mine = plan.slot == slot
        assert plan.first_rank[mine].tolist() == np.cumsum([0, *plan.cp_size[mine][:-1]]).tolist()
        assert plan.cp_size[mine].sum() == num_ranks
    held = np.add.reduceat(np.r_[tokens[plan.order], 0], plan.offsets[:-1]) * (np.diff(plan.offsets) > 0)
    assert (-(-held // plan.cp_size) <= cap).all() and plan.cp_size.max() <= largest
    powers = (plan.cp_size & (plan.cp_size - 1)) == 0
    if options.degrees == "powers":
        assert (powers | (plan.cp_size == num_ranks)).all()


def test_figure_1():
    """64 ranks, one sequence of 100K and four of 48K: 32 and 8, 8, 8, 8 ranks, faster than any one degree for all."""
    tokens, options = np.array([102400] + 4 * [49152]), FlexSp(model=SEVEN)
    cap = 6200
    plan = flexsp(tokens, num_ranks=64, cap=cap, options=options)
    assert plan.cp_size[np.diff(plan.offsets) > 0].tolist() == [32, 8, 8, 8, 8]
    ours = makespan(plan, tokens, options, 64, cap)
    units, work = SEVEN.all_to_all(64), SEVEN.work(tokens)
    for degree in (32, 64):
        # The five sequences on groups of one degree, by longest processing time.
        each = (work + units[degree] * tokens) // degree
        loads = np.zeros(64 // degree)
        for time in sorted(each, reverse=True):
            loads[loads.argmin()] += time
        assert ours < 0.95 * loads.max()


def test_presets_are_the_authors():
    """systems.md section 3: break-even of linear and quadratic at 35.9K, 33.0K and 52.1K tokens; two MB a token for 7B."""
    for name, tokens in (("gpt-7b", 35.9e3), ("gpt-13b", 33.0e3), ("gpt-30b", 52.1e3)):
        model = SpModel.preset(name)
        assert model.linear / model.quadratic == pytest.approx(tokens, rel=2e-3)
    # 4·2·32·4096·2 bytes are two of the authors' megabytes; over 96.5 GB/s that is 20.7 µs x degree.
    assert SEVEN.all_to_all(64)[[1, 2, 8, 16, 64]].tolist() == [0, 16731, 20725, 193611, 410678]
    assert SEVEN.all_to_all(5)[3] == SEVEN.all_to_all(64)[4] and SEVEN.all_to_all(100)[100] == 410678
    assert SEVEN.cap(64, 40) == int((40 * 1024 - 7.85 * 16 * 1024 / 64) / 4.480441895)
    assert SEVEN.work([1000]).tolist() == [round((5.128e-6 * 1e6 + 183.9576) * 1e6)]


def test_the_model_of_a_shape():
    """Seven billion parameters without grouped keys move what the authors' preset moves; costs are the cost model's."""
    shape = ModelShape(
        hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128, ffn_size=11008, vocab_size=32000
    )
    cost = CostModel(seconds_per_pair=3e-9, seconds_per_token=2e-4, bytes_per_token=2**20)
    model = SpModel.of(shape, cost)
    assert model.all_to_all(64).tolist() == SEVEN.all_to_all(64).tolist() and model.fixed == 0
    tokens = np.array([1, 1000, 30000])
    np.testing.assert_allclose(model.work(tokens), cost.units(tokens * (tokens + 1) // 2, tokens), rtol=1e-9)
    grouped = SpModel.of(replace(shape, num_kv_heads=8), cost, bandwidth=((8, 50.0),))
    assert grouped.all_to_all(8)[8] == round(16 * 32 * 2560 / 2**20 / 50 * 1e6)


def test_slots_are_the_fewest_that_pay():
    tokens = np.array([4000] * 12)
    options = FlexSp(model=SEVEN)
    assert flexsp(tokens, num_ranks=8, cap=8000, options=options).slot.max() == 0
    assert flexsp(tokens, num_ranks=8, cap=3000, options=options).slot.max() == 1
    assert flexsp(tokens, num_ranks=8, cap=8000, options=options, slots=3).slot.max() == 2
    assert flexsp([], num_ranks=2, cap=5, options=options).cp_size.tolist() == [1, 1]
    cheap = flexsp(tokens, np.ones(12), num_ranks=4, cap=12000, options=options, slots=1)
    assert (np.diff(cheap.offsets) == 3).all()


def test_the_longest_run_first_and_together():
    tokens = np.array([100, 9000, 300, 7000, 200, 8000, 5000, 6000])
    plan = flexsp(tokens, num_ranks=4, cap=5000, options=FlexSp(model=SEVEN), slots=2)
    slot = np.repeat(plan.slot, np.diff(plan.offsets))
    assert tokens[plan.order[slot == 0]].min() >= tokens[plan.order[slot == 1]].max()


def test_more_slots_are_used_where_they_pay():
    """Sequences that fill 16 ranks in one slot need groups beyond the node; two slots are a fifth faster, while they cost
    nothing by themselves."""
    tokens, cap = np.array([1514, 4712, 8108, 8376]), 1434
    times = {}
    for fixed, more_slots in ((0.0, 0), (0.0, 4), (1000.0, 4)):
        options = FlexSp(model=replace(SEVEN, fixed=fixed), more_slots=more_slots)
        plan = flexsp(tokens, num_ranks=16, cap=cap, options=options)
        times[fixed, more_slots] = makespan(plan, tokens, options, 16, cap), int(plan.slot.max()) + 1
    assert times[0.0, 4][0] < 0.85 * times[0.0, 0][0]
    assert [slots for _, slots in times.values()] == [1, 2, 1]


def test_wrong_arguments_are_refused():
    options = FlexSp(model=SEVEN)
    with pytest.raises(ValueError, match="sequence 1 has 99 tokens, and 2 ranks hold 20"):
        flexsp([5, 99], num_ranks=2, cap=10, options=options)
    with pytest.raises(ValueError, match="1 slots of 2 ranks x 10 tokens do not hold 3 sequences"):
        flexsp([9, 9, 9], num_ranks=2, cap=10, options=options, slots=1)
    with pytest.raises(ValueError, match="slots=0"):
        flexsp([9], num_ranks=2, cap=10, options=options, slots=0)
    with pytest.raises(ValueError, match="solver must be one of greedy, scip, highs"):
        FlexSp(model=SEVEN, solver="cplex")
    with pytest.raises(ValueError, match="seconds > 0"):
        FlexSp(model=SEVEN, seconds=0)
    with pytest.raises(ValueError, match="preset is one of gpt-7b"):
        SpModel.preset("gpt-4")
    with pytest.raises(ValueError, match="add ranks"):
        SEVEN.cap(2, 40)
