"""Tiles mean the same pairs whatever is done to them; brute force over small rectangles."""

from __future__ import annotations

import itertools

import numpy as np
from equipoise.attention import bands
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, disjoint_tiles, mask_of, mask_of_segments, mask_of_squares, tile

SIZE = 12
one_tile = tile(SIZE, SIZE).map(lambda t: np.array([t], np.int64))


@PROMISE
@given(one_tile)
def test_pairs_are_counted(tiles):
    assert bands.pairs(tiles).tolist() == [mask_of(tiles, SIZE, SIZE).sum()]


@PROMISE
@given(one_tile)
def test_squares_cover_a_tile_once(tiles):
    pieces = bands.squares(tiles)
    assert np.array_equal(mask_of_squares(pieces, SIZE, SIZE), mask_of(tiles, SIZE, SIZE))
    diagonal = pieces[pieces[:, 4] != bands.FULL]
    assert np.array_equal(diagonal[:, 1] - diagonal[:, 0], diagonal[:, 3] - diagonal[:, 2])


@PROMISE
@given(one_tile)
def test_segments_cover_a_tile_once(tiles):
    pieces = bands.segments(tiles)
    assert np.array_equal(mask_of_segments(pieces, SIZE, SIZE), mask_of(tiles, SIZE, SIZE))
    assert len(pieces) <= 2


@PROMISE
@given(disjoint_tiles(SIZE, SIZE))
def test_joining_changes_no_pair(tiles):
    joined = bands.join(tiles)
    assert np.array_equal(mask_of(joined, SIZE, SIZE), mask_of(tiles, SIZE, SIZE))
    assert len(joined) <= len(tiles)


@PROMISE
@given(one_tile, st.lists(st.integers(0, SIZE), max_size=3), st.lists(st.integers(0, SIZE), max_size=3), st.randoms())
def test_what_was_cut_joins_to_the_same_pairs(tiles, rows, keys, random):
    (q0, q1, k0, k1, lo, hi), parts = tiles[0].tolist(), []
    rows, keys = ([a, *sorted(min(max(c, a), b) for c in cuts), b] for a, b, cuts in ((q0, q1, rows), (k0, k1, keys)))
    for qa, qb in itertools.pairwise(rows):
        parts += [[qa, qb, ka, kb, lo, hi] for ka, kb in itertools.pairwise(keys)]
    random.shuffle(parts)
    joined = bands.join(np.array(parts))
    assert np.array_equal(mask_of(joined, SIZE, SIZE), mask_of(tiles, SIZE, SIZE))


def test_two_chunks_of_a_document_become_one_causal_square():
    """What a zigzag rank holds of a document lies side by side: stage 0 is one square, not three tiles."""
    near, far = bands.NO_LIMIT, [[0, 3, 0, 3, 0], [3, 6, 0, 3, -bands.NO_LIMIT], [3, 6, 3, 6, 0]]
    joined = bands.join(np.array([[*t, near] for t in far]))
    assert bands.squares(joined).tolist() == [[0, 6, 0, 6, bands.CAUSAL]]


def test_a_causal_tile_is_at_most_three_pieces():
    assert bands.squares(np.array([[4, 20, 0, 10, 0, bands.NO_LIMIT]])).tolist() == [
        [4, 10, 4, 10, bands.CAUSAL],
        [4, 10, 0, 4, bands.FULL],
        [10, 20, 0, 10, bands.FULL],
    ]


def test_nothing_gives_nothing():
    nothing = np.zeros((0, 6), np.int64)
    for f in (bands.pairs, bands.squares, bands.segments, bands.join):
        assert len(f(nothing)) == 0
    assert len(bands.squares(np.array([[0, 4, 4, 8, 0, bands.NO_LIMIT]]))) == 0
