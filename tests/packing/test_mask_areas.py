"""python -m pytest tests/packing/test_mask_areas.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from equipoise.packing.mask_areas import block_pairs, blocks, chunk_keys, chunk_pairs
from equipoise.packing.mask_kinds import (
    causal,
    causal_blockwise,
    shared_question,
    shares_of_questions,
    window_with_sinks,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import mask_of
from tests.packing.mask_draws import PROMISE, masks


@st.composite
def edges(draw: st.DrawFn, total: int) -> np.ndarray:
    """Chunks of any sizes, empty ones too; they need not reach from end to end."""
    return np.array(sorted(draw(st.lists(st.integers(0, total), min_size=1, max_size=9))), np.int64)


@PROMISE
@given(masks(), st.data())
def test_chunks_have_the_pairs_and_keys_of_their_queries(drawn, data):
    mask, matrix = drawn
    bounds, tiles = data.draw(edges(len(matrix))), mask.tiles_of_pack()
    keys = chunk_keys(tiles, bounds)
    chunks = [matrix[a:b] for a, b in pairwise(bounds)]
    assert chunk_pairs(tiles, bounds).tolist() == [int(chunk.sum()) for chunk in chunks]
    assert keys.rows().tolist() == [int(chunk.any(axis=0).sum()) for chunk in chunks]
    for c, chunk in enumerate(chunks):
        seen = np.zeros(len(matrix), int)
        for start, stop in keys.of(c):
            assert start < stop
            seen[start:stop] += 1
        assert np.array_equal(seen, chunk.any(axis=0).astype(int))
        assert np.all(keys.of(c)[1:, 0] > keys.of(c)[:-1, 1]), "ranges that touch are one"


@PROMISE
@given(masks(), st.data())
def test_blocks_have_the_pairs_of_their_rectangle(drawn, data):
    mask, matrix = drawn
    q, k = (data.draw(edges(len(matrix))) for _ in "qk")
    tiles = mask.tiles_of_pack()
    expected = np.array(
        [[int(matrix[a:b, c:d].sum()) for c, d in pairwise(k)] for a, b in pairwise(q)],
        np.int64,
    ).reshape(len(q) - 1, len(k) - 1)
    found = block_pairs(tiles, q, k)
    assert np.array_equal(found.dense(), expected) and len(found) == np.count_nonzero(expected)
    assert all(np.all(np.diff(found.column[a:b]) > 0) for a, b in pairwise(found.offsets))
    assert np.array_equal(block_pairs(tiles, q).dense(), block_pairs(tiles, q, q).dense())


@PROMISE
@given(masks(), st.data())
def test_a_mask_cut_along_a_grid_is_the_mask(drawn, data):
    mask, matrix = drawn
    total = len(matrix)
    q, k = (np.union1d(data.draw(edges(total)), [0, total]) for _ in "qk")
    block, pieces = blocks(mask.tiles_of_pack(), q, k)
    assert np.array_equal(mask_of(pieces, total, total), matrix.astype(int))
    inside = (q[block[:, 0]] <= pieces[:, 0]) & (pieces[:, 1] <= q[block[:, 0] + 1])
    inside &= (k[block[:, 1]] <= pieces[:, 2]) & (pieces[:, 3] <= k[block[:, 1] + 1])
    assert inside.all() and np.all(pieces[:, 0] < pieces[:, 1])
    number = block[:, 0] * len(k) + block[:, 1]
    assert np.all(np.diff(number) >= 0)


@pytest.mark.parametrize(
    "mask",
    [
        causal([131072]),
        window_with_sinks([100_000, 31_072]),
        shared_question(*shares_of_questions([90_000, 41_072])),
        causal_blockwise([131072]),
    ],
    ids=["causal", "lambda", "shared_question", "blockwise"],
)
def test_sums_over_a_large_grid_are_the_masks(mask):
    """128K tokens: chunks, blocks and rows are three ways to count the same pairs, of which only one is by the row."""
    tiles, edges = mask.tiles_of_pack(), np.arange(1025) * 128
    found, rows = block_pairs(tiles, edges), mask.row_pairs()
    by_chunk = rows.reshape(1024, 128).sum(axis=1)
    assert np.array_equal(chunk_pairs(tiles, edges), by_chunk)
    assert np.array_equal(np.diff(np.concatenate([[0], np.cumsum(found.pairs)])[found.offsets]), by_chunk)
    assert int(found.pairs.sum()) == int(mask.pairs().sum())
    keys = block_pairs(tiles, edges[::64])
    assert np.array_equal(keys.dense(), found.dense().reshape(16, 64, 16, 64).sum(axis=(1, 3)))


def test_causal_zigzag_chunks_balance():
    """facts.md: chunks r and 2·cp − 1 − r of one causal document have the same pairs."""
    pairs = chunk_pairs(causal([4096]).tiles_of_pack(), np.arange(17) * 256)
    assert len(set((pairs + pairs[::-1]).tolist())) == 1


def test_wrong_edges_are_refused():
    for bad in ([3, 2], [], [[0, 1]], [0.5, 1.0]):
        with pytest.raises(ValueError, match="never fall"):
            chunk_pairs(causal([4]).tiles_of_pack(), bad)
