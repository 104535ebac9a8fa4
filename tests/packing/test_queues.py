"""python -m pytest tests/packing/test_queues.py"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from equipoise.packing.queues import WlbQueues, release, replay, tune
from equipoise.packing.wlb import wlb_balanced
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = Path(__file__).parents[3] / "shared" / "lengths"
CONTEXT = 131072


def cost_of(tokens: np.ndarray) -> np.ndarray:
    """(d/48K)² + d/48K in billionths."""
    x = tokens / 49152
    return np.rint((x * x + x) * 1e9).astype(np.int64)


@st.composite
def epochs(draw: st.DrawFn, crowded: bool = False) -> tuple[np.ndarray, np.ndarray, int, int, WlbQueues]:
    """Documents of at most half a pack, steps of at most half the room: then every document can go when it must.

    crowded: up to a whole pack, and twice the room.
    """
    num_packs, capacity = draw(st.integers(1, 5)), 2 * draw(st.sampled_from([8, 30, 64]))
    longest = capacity if crowded else capacity // 2
    lengths = st.one_of(st.integers(1, longest), st.integers(1, 3), st.just(longest))
    tokens, edges = draw(st.lists(lengths, max_size=70)), [0]
    room = num_packs * capacity * 2 if crowded else num_packs * capacity // 2
    for i, t in enumerate(tokens):
        if sum(tokens[edges[-1] : i]) + t > room or draw(st.integers(0, 9)) == 0:
            edges.append(i)
    options = WlbQueues(
        thresholds=tuple(sorted(set(draw(st.lists(st.integers(1, capacity), max_size=3))))),
        max_delay=draw(st.integers(0, 6)),
        release=draw(st.sampled_from(["adaptive", "adaptive", "paper"])),
        fill=draw(st.sampled_from([0.1, 0.5, 0.75, 1.0])),
    )
    return np.array(tokens, np.int64), np.unique([*edges, len(tokens)]), num_packs, capacity, options


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_every_document_once_in_time_and_under_the_cap(data, crowded):
    tokens, edges, num_packs, capacity, options = data.draw(epochs(crowded))
    cost, born = tokens * (tokens + 10), np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    held, seen, step = np.zeros(0, np.int64), [], 0
    while step < len(edges) - 1 or len(held):
        flush = step >= len(edges) - 1
        held = held if flush else np.r_[held, np.arange(edges[step], edges[step + 1])]
        goes = release(tokens[held], cost[held], step - born[held], num_packs, capacity, options, flush)
        now = held[goes]
        order, offsets, left = wlb_balanced(tokens[now], cost[now], num_packs, capacity)
        assert not len(left)
        assert all(tokens[now[order[a:b]]].sum() <= capacity for a, b in pairwise(offsets))
        assert len(now) >= min(num_packs, len(held)) > 0
        assert crowded or flush or (step - born[now]).max() <= options.max_delay
        seen += now.tolist()
        held, step = held[~goes], step + 1
        assert crowded or step <= len(edges) + options.max_delay
    assert sorted(seen) == list(range(len(tokens)))


@settings(max_examples=200, deadline=None)
@given(epochs())
def test_replay_tells_what_release_does(epoch):
    imbalance, delay = replay(epoch[0], epoch[0] * (epoch[0] + 10), *epoch[1:])
    assert (imbalance >= 1).all() and (delay >= 0).all()
    assert len(imbalance) >= len(epoch[1]) - 1 and len(delay) == len(epoch[0])


def test_more_than_fits_stays_back_the_youngest_first():
    tokens = np.array([6, 6, 6, 6, 2])
    age = np.array([0, 2, 1, 3, 0])
    for flush in (False, True):
        goes = release(tokens, tokens**2, age, 2, 10, WlbQueues(max_delay=1), flush)
        assert goes.tolist() == [False, True, False, True, False]


def test_the_papers_queues_pop_the_oldest_as_many_as_there_are_packs():
    tokens = np.array([20, 50, 22, 3, 21, 51, 23])
    age = np.array([1, 5, 3, 0, 2, 1, 0])
    options = WlbQueues(thresholds=(20, 50), max_delay=99, release="paper")
    goes = release(tokens, tokens**2, age, 3, 200, options)
    assert goes.tolist() == [True, False, True, True, True, False, False]  # three of 20 …, not yet of 50 …


def test_a_giant_waits_for_its_like_and_goes_when_late():
    short, options = [4] * 20, WlbQueues(thresholds=(16,), max_delay=4)

    def giants_that_go(ages: list[int], size: int = 64) -> int:
        tokens = np.array([*[size] * len(ages), *short])
        goes = release(tokens, tokens**2, np.array([*ages, *[0] * 20]), 2, 128, options)
        assert goes[len(ages) :].all()
        return int(goes[: len(ages)].sum())

    assert giants_that_go([0]) == 0
    assert giants_that_go([0, 0]) == 2
    assert giants_that_go([3]) == 0
    assert giants_that_go([4]) == 1


def test_a_run_takes_the_costliest_that_fit_and_late_ones_before_them():
    def gone(tokens: list[int], age: list[int], fill: float) -> list[int]:
        options = WlbQueues(thresholds=(1,), max_delay=8, fill=fill)
        goes = release(tokens, np.square(tokens), age, 2, 100, options)
        return np.array(tokens)[goes].tolist()

    # 100 tokens: the two of 40 match each other, one of 20 fits beside them; from 20 up the run would not fit.
    assert gone([40, 20, 20, 30, 40], [1] * 5, 0.5) == [40, 20, 40]
    # 110 tokens: 20 and 30 are late; 30, 40, 40 would be the run, but with 20 only one of 40 fits.
    assert gone([20, 30, 40, 40], [8, 8, 1, 1], 0.55) == [20, 30, 40]


def test_company_is_saved_for_an_outlier_that_must_go_soon():
    tokens = np.array([64, 24, 24, *[4] * 30])
    options = WlbQueues(thresholds=(16,), max_delay=8)
    early, soon = np.array([1, 0, 0, *[0] * 30]), np.array([5, 0, 0, *[0] * 30])
    assert release(tokens, tokens**2, early, 2, 256, options)[:3].tolist() == [False, True, True]
    assert release(tokens, tokens**2, soon, 2, 256, options)[:3].tolist() == [False, False, False]


@pytest.mark.skipif(not LENGTHS.exists(), reason="no length traces here")
@pytest.mark.parametrize("num_packs, limit", [(4, 1.02), (16, 1.04)])
@pytest.mark.parametrize("trace", ["wlb_like", "mooncake_conversation", "wikipedia"])
def test_traces_balance_at_twice_the_memory(trace, num_packs, limit):
    """The marks: mean of max/mean, and mean delay of a token, over up to 60 steps of N x 128K tokens."""
    tokens = np.minimum(np.load(LENGTHS / f"{trace}.npy"), CONTEXT).astype(np.int64)
    step = np.cumsum(tokens) // (num_packs * CONTEXT)
    tokens = tokens[(step < 60) & (tokens > 0)]
    edges = np.r_[0, np.flatnonzero(np.diff(np.cumsum(tokens) // (num_packs * CONTEXT))) + 1, len(tokens)]
    imbalance, delay = replay(tokens, cost_of(tokens), edges, num_packs, 2 * CONTEXT, WlbQueues())
    steps = len(edges) - 2  # the last is a rest, and the flush comes after it
    assert imbalance[:steps].mean() <= limit
    assert (delay * tokens).sum() / tokens.sum() <= 0.55
    assert delay.max() <= 17


def test_tune_takes_the_threshold_that_replays_best():
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random(1500) < 0.03, rng.integers(2000, 4096, 1500), rng.integers(20, 300, 1500))
    cost = tokens * (tokens + 1500)
    for rule in ("adaptive", "paper"):
        best = tune(tokens, cost, 4, 8192, options=WlbQueues(release=rule))
        edges = np.r_[0, np.flatnonzero(np.diff(np.cumsum(tokens) // 16384)) + 1, len(tokens)]

        def score(thresholds, rule=rule, edges=edges):
            options = WlbQueues(release=rule, thresholds=thresholds)
            imbalance, delay = replay(tokens, cost, edges, 4, 8192, options)
            return imbalance.mean() + 0.01 * (delay * tokens).sum() / tokens.sum()

        assert best == replace(WlbQueues(release=rule), thresholds=best.thresholds)
        assert score(best.thresholds) <= min(score((level,)) for level in (128, 512, 2048))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="one of adaptive, paper"):
        WlbQueues(release="fifo")
    with pytest.raises(ValueError, match=r"rise; got \(8, 4\)"):
        WlbQueues(thresholds=(8, 4))
    with pytest.raises(ValueError, match=r"fill in \(0, 1\]; got 16 and 0"):
        WlbQueues(fill=0)
    with pytest.raises(ValueError, match="at most 5 tokens"):
        release([6], [1], [0], 1, 5, WlbQueues())
    with pytest.raises(ValueError, match="ages of shape"):
        release([6, 1], [1, 1], [0], 1, 9, WlbQueues())
    with pytest.raises(ValueError, match="num_packs=0"):
        release([6], [1], [0], 0, 9, WlbQueues())
