"""Ranks of unequal speed: seconds are balanced, counts stay equal."""

from __future__ import annotations

import numpy as np
import pytest
from equipoise import plan, recipe
from equipoise.samplers.pace import paced
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import cost


@given(data=st.data(), dp=st.integers(1, 6), slots=st.integers(1, 6), sync=st.sampled_from(["step", "slot"]))
@settings(max_examples=200, deadline=None)
def test_every_place_is_taken_once(data: st.DataObject, dp: int, slots: int, sync: str) -> None:
    packs = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=dp * slots, max_size=dp * slots)))
    speed = np.array(data.draw(st.lists(st.integers(500, 1000), min_size=dp, max_size=dp)))
    slot, replica = paced(packs, speed, sync=sync, key=1)
    assert len(set(zip(slot.tolist(), replica.tolist(), strict=True))) == dp * slots
    assert slot.max() == slots - 1 and replica.max() == dp - 1


def test_the_slow_rank_gets_less_work() -> None:
    """One of eight GPUs 7 % slow, 16 packs each: seconds within 1 % of the bound, which equal work misses by 6 %."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1, 4000), 8, 4096).astype(int)
    speeds = (1.0, 1.0, 1.0, 0.93, 1.0, 1.0, 1.0, 1.0)
    options = {"dp": 8, "max_tokens_per_rank": 8192, "cost": cost}
    made = plan(lengths, recipe("vrsp"), speeds=speeds, **options)
    assert made.makespan() < 1.01 * made.bound()
    blind = plan(lengths, recipe("vrsp"), **options)
    assert blind.loads().cost.sum(1)[3] / 0.93 > 1.05 * made.bound()
    assert made.digest != blind.digest
    made.check()


def test_a_group_is_as_fast_as_its_slowest_rank_and_others_refuse() -> None:
    made = plan([9, 8, 7, 6], "vrsp", dp=2, cp=2, max_tokens_per_rank=8, speeds=(1.0, 0.5, 1.0, 1.0), cost=cost)
    assert made.cluster.pace.tolist() == [500, 500, 1000, 1000]
    with pytest.raises(ValueError, match="balanced by place='vrsp'; recipe 'static'"):
        plan([9, 8], "static", dp=2, max_tokens_per_rank=9, speeds=(1.0, 0.5))
    with pytest.raises(ValueError, match="for each of the 2 ranks"):
        plan([9, 8], "vrsp", dp=2, max_tokens_per_rank=9, speeds=(1.0,))
