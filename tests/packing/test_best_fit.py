"""python -m pytest tests/packing/test_best_fit.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from equipoise.packing import best_fit as module
from equipoise.packing.best_fit import best_fit_decreasing
from hypothesis import given, settings
from hypothesis import strategies as st


def by_hand(tokens: list[int], capacity: int) -> list[list[int]]:
    """Falling length, ties by index; the least sufficient room, ties to the pack filled last; else a new pack."""
    packs: list[list[int]] = []
    room: list[int] = []
    filled: list[int] = []
    for now, item in enumerate(sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))):
        fitting = [p for p in range(len(packs)) if room[p] >= tokens[item]]
        if fitting:
            best = min(fitting, key=lambda p: (room[p], -filled[p]))
        else:
            best = len(packs)
            packs.append([])
            room.append(capacity)
            filled.append(now)
        packs[best].append(item)
        room[best] -= tokens[item]
        filled[best] = now
    return packs


def as_lists(order: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    assert order.dtype == offsets.dtype == np.int64
    return [order[a:b].tolist() for a, b in pairwise(offsets)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int]:
    """Capacities around every level of the bitmap; lengths few and repeated, or anything up to the capacity."""
    capacity = draw(
        st.one_of(
            st.integers(1, 40), st.sampled_from([63, 64, 65, 4095, 4096, 4097, 2**17, 2**18, 2**18 + 1, 3 * 2**18])
        )
    )
    few = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=4))
    short = st.integers(1, max(1, capacity // 8))
    return draw(st.lists(st.one_of(st.sampled_from(few), short, st.integers(1, capacity)), max_size=80)), capacity


@settings(max_examples=400, deadline=None)
@given(problems(), st.booleans())
def test_the_packs_are_those_of_brute_force(problem, counting):
    tokens, capacity = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COUNTING", 2**40 if counting else 0)
        assert as_lists(*best_fit_decreasing(tokens, capacity)) == by_hand(tokens, capacity)


def test_a_thousand_documents_of_a_long_tailed_law():
    tokens = np.clip(np.random.default_rng(0).lognormal(6, 1.5, 1000), 1, 8192).astype(np.int32)
    for capacity in (8192, 131072, 10**9):
        assert as_lists(*best_fit_decreasing(tokens, capacity)) == by_hand(tokens.tolist(), capacity)


def test_what_fits_no_pack_is_refused():
    with pytest.raises(ValueError, match=r"1 … 10 tokens to fit into a pack; item 1 holds 11"):
        best_fit_decreasing([3, 11, 12], 10)
    with pytest.raises(ValueError, match="item 2 holds 0"):
        best_fit_decreasing([3, 1, 0], 10)
    with pytest.raises(ValueError, match="integers in one dimension"):
        best_fit_decreasing([[1, 2]], 10)
    with pytest.raises(ValueError, match="integers in one dimension"):
        best_fit_decreasing([1.0, 2.0], 10)
