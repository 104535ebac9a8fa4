"""Staircases are split into the same pairs, of which no row comes twice in a kind of tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from equipoise.attention.bands import NO_LIMIT, join
from equipoise.attention.kernels import cuda
from equipoise.attention.kernels.staircase import split_staircases
from equipoise.attention.program import lower
from equipoise.attention.ring import ring_plan
from equipoise.packing.shards import striped
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.draws import disjoint_tiles, mask_of


def full(*rectangles: tuple[int, int, int, int]) -> np.ndarray:
    return np.array([[*each, -NO_LIMIT, NO_LIMIT] for each in rectangles], np.int64).reshape(-1, 6)


@st.composite
def staircase(draw: st.DrawFn) -> np.ndarray:
    """Steps of one width but for the first and last, and now and then one that breaks the rule."""
    width, steps = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rows = [draw(st.integers(1, 5)), *[width] * steps]
    keys = [draw(st.integers(1, 5)), *[width] * steps]
    rows[-1] = draw(st.integers(1, width))
    if draw(st.booleans()):
        rows[draw(st.integers(0, steps))] += draw(st.integers(0, 2))
        keys[draw(st.integers(0, steps))] += draw(st.integers(0, 2))
    q, k, k0 = np.cumsum([0, *rows]), np.cumsum(keys), draw(st.integers(0, 3))
    return full(*[(q[i], q[i + 1], k0, k0 + k[i]) for i in range(steps + 1)])


@settings(max_examples=300, deadline=None)
@given(st.lists(staircase(), min_size=1, max_size=3), disjoint_tiles(20, 20, most=6), st.randoms())
def test_the_pairs_stay_the_same(stairs, others, random) -> None:
    q = k = 20  # each staircase has rows and keys of its own, and no order is relied on
    tiles = [others]
    for each in stairs:
        tiles.append(each + np.array([q, q, k, k, 0, 0]))
        q, k = tiles[-1][:, 1].max(), tiles[-1][:, 3].max()
    mixed = np.concatenate(tiles)
    mixed = mixed[random.sample(range(len(mixed)), len(mixed))]
    np.testing.assert_array_equal(mask_of(split_staircases(mixed), q, k), mask_of(mixed, q, k))


def test_nothing_stays_nothing() -> None:
    assert split_staircases(full()).shape == (0, 6)


@pytest.mark.parametrize("cp", [2, 5])
@pytest.mark.parametrize("stripe", [1, 2, 3, 16, 256])
def test_stripes_of_many_documents_take_at_most_four_varlen_calls(stripe: int, cp: int) -> None:
    lengths = np.random.default_rng(stripe).integers(1, 40, 100)
    lengths[::20] += 700
    shards = striped(np.append(0, np.cumsum(lengths)), cp, stripe=stripe)
    for rank in range(cp):
        program = lower(ring_plan(shards, tuple(range(cp)), rank), rank)
        rows = program.buffer_rows
        for stage in program.stages:
            calls = [
                cuda.prepare(tiles, rows[0], rows[at], torch.device("cpu"), cuda.TorchVarlen()).calls
                for _, at, tiles in stage.tiles
            ]
            assert sum(map(len, calls)) <= 4


def test_joined_stripes_are_one_causal_tile_and_triangles() -> None:
    """Rank 1 of two, four stripes of three rows each, sees rank 0's: eight rows of two sides a triangle, and no row twice."""
    steps = full(*[(3 * i, 3 * i + 3, 0, 3 * i + 3) for i in range(4)])
    tiles = split_staircases(join(steps))
    assert len(tiles) == 1 + 1 + 3
    causal = tiles[tiles[:, 4] == 0]
    assert causal[:, :4].tolist() == [[3, 12, 0, 12]]
    triangles = tiles[tiles[:, 5] == -1]
    assert triangles[:, :4].tolist() == [[3, 5, 4, 6], [6, 8, 7, 9], [9, 11, 10, 12]]
