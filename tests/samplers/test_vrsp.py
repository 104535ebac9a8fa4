"""VRSP: sorted stripes are optimal per slot, LPT keeps equal counts per step."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from equipoise.samplers.vrsp import vrsp
from hypothesis import given, settings
from hypothesis import strategies as st


def grid(cost: np.ndarray, slot: np.ndarray, replica: np.ndarray, dp: int) -> np.ndarray:
    """Cost int64[dp, slots]; every place taken once."""
    table = np.full((dp, len(cost) // dp), -1, np.int64)
    table[replica, slot] = cost
    assert (table >= 0).all()
    return table


@given(data=st.data(), dp=st.integers(1, 8), slots=st.integers(1, 8), sync=st.sampled_from(["step", "slot"]))
@settings(max_examples=200, deadline=None)
def test_every_place_is_taken_once(data: st.DataObject, dp: int, slots: int, sync: str) -> None:
    cost = np.array(data.draw(st.lists(st.integers(0, 1000), min_size=dp * slots, max_size=dp * slots)))
    grid(cost, *vrsp(cost, dp=dp, sync=sync, key=data.draw(st.integers(0, 99))), dp)


@given(cost=st.lists(st.integers(0, 20), min_size=6, max_size=6))
@settings(max_examples=200, deadline=None)
def test_stripes_reach_the_optimum_per_slot(cost: list[int]) -> None:
    """Against all ways to deal 6 packs into 3 slots of 2."""
    best = min(sum(max(way[i : i + 2]) for i in (0, 2, 4)) for way in permutations(cost))
    costs = np.array(cost)
    assert grid(costs, *vrsp(costs, dp=2, sync="slot", key=1), 2).max(0).sum() == best


def test_per_step_is_close_to_its_bound() -> None:
    """128 packs on 8 replicas of a mix with coefficient of variation 1: within 2 % of max(mean, largest)."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        cost = rng.lognormal(10, 0.8, 128).astype(np.int64)
        sums = grid(cost, *vrsp(cost, dp=8, sync="step", key=0), 8).sum(1)
        assert sums.max() <= 1.02 * max(cost.sum() / 8, cost.max())


def test_slots_are_no_curriculum() -> None:
    """The costliest stripe is not always first: slot number and cost are uncorrelated over steps."""
    cost = np.arange(32)
    correlations = []
    for key in range(300):
        slot, _ = vrsp(cost, dp=4, sync="slot", key=key)
        correlations.append(np.corrcoef(slot, cost)[0, 1])
    assert abs(np.mean(correlations)) < 0.07
