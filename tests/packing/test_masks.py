"""python -m pytest tests/packing/test_masks.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from equipoise.attention import bands
from equipoise.packing import mask_kinds, mask_tiles
from equipoise.packing.mask_kinds import Ragged
from equipoise.packing.masks import BI_CAUSAL, CAUSAL, FULL, INV_CAUSAL, Mask
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import mask_of, mask_of_segments, mask_of_squares
from tests.packing.mask_draws import PROMISE, block_diagonal, kinds, slice_lists, slice_matrix
from tests.packing.mask_draws import masks as packs

# ---- Slices. ----


@PROMISE
@given(st.data())
def test_slices_mean_what_magi_attention_means(data):
    """One slice of any type and any sizes of queries and keys, against the matrix drawn pair by pair."""
    tokens = data.draw(st.integers(0, 20))
    stated = data.draw(slice_lists(tokens, most=1))
    assert np.array_equal(Mask.of_slices(tokens, stated).dense(), slice_matrix(stated, tokens) > 0)


@PROMISE
@given(packs())
def test_slices_come_back(drawn):
    mask, matrix = drawn
    slices, offsets = mask.slices()
    assert np.array_equal(Mask.of_slices(mask.tokens, slices, offsets).dense(), matrix)
    per_document = [
        slice_matrix(slices[a:b], t) for a, b, t in zip(offsets[:-1], offsets[1:], mask.tokens, strict=True)
    ]
    assert all(times.max(initial=0) <= 1 for times in per_document)
    assert np.array_equal(block_diagonal([times > 0 for times in per_document]), matrix)


@pytest.mark.parametrize("q", range(7))
@pytest.mark.parametrize("k", range(7))
def test_areas_are_those_of_the_papers(q, k):
    """facts.md: FULL q·k; CAUSAL and INV-CAUSAL (2k − q + 1)·q/2 for k >= q; BI-CAUSAL max(0, k − q + 1)·q."""
    at = np.array([3, 3 + q, 5, 5 + k])
    area = {kind: int(Mask.of_slices(20, [[*at, kind]]).pairs()[0]) for kind in range(4)}
    assert area[FULL] == q * k
    # Where there are more queries than keys, the first ones see nothing and the triangle starts behind them.
    rows = min(q, k)
    assert area[CAUSAL] == area[INV_CAUSAL] == (2 * k - rows + 1) * rows // 2
    assert area[BI_CAUSAL] == max(0, k - q + 1) * q


def test_areas_are_exact_where_doubles_are_not():
    t = (1 << 31) - 1
    assert int(mask_kinds.causal([t]).pairs()[0]) == t * (t + 1) // 2
    assert int(mask_kinds.full([t]).pairs()[0]) == t * t
    a, b = 1_234_567_891, 2_000_000_011
    assert int(mask_kinds.causal([t]).cut(a, b, 0, t).pairs()[0]) == (b * (b + 1) - a * (a + 1)) // 2


# ---- Counts, cuts, unions. ----


@PROMISE
@given(packs())
def test_pairs_are_counted(drawn):
    mask, matrix = drawn
    cu = mask.cu_seqlens
    assert mask.pairs().tolist() == [int(matrix[a:b].sum()) for a, b in pairwise(cu)]
    assert np.array_equal(mask.row_pairs(), matrix.sum(axis=1))
    assert mask.pairs().dtype == mask.row_pairs().dtype == np.int64
    assert np.array_equal(mask.dense(), matrix)


@PROMISE
@given(packs(), st.data())
def test_a_cut_has_what_is_inside(drawn, data):
    mask, matrix = drawn
    total = len(matrix)
    (q0, q1), (k0, k1) = (sorted(data.draw(st.tuples(*[st.integers(0, total)] * 2))) for _ in "qk")
    inside = np.zeros_like(matrix)
    inside[q0:q1, k0:k1] = matrix[q0:q1, k0:k1]
    cut = mask.cut(q0, q1, k0, k1)
    assert np.array_equal(cut.dense(), inside) and int(cut.pairs().sum()) == int(inside.sum())
    assert np.array_equal(cut.tokens, mask.tokens)


@PROMISE
@given(packs(), st.data())
def test_pieces_are_documents_of_their_own(drawn, data):
    mask, matrix = drawn
    cu, spans = mask.cu_seqlens, []
    for _ in range(data.draw(st.integers(0, 4))):
        document = data.draw(st.integers(-1, len(mask) - 1))
        length = 5 if document < 0 else int(mask.tokens[document])
        spans.append((document, *sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2)))))
    pieces = mask.pieces(*np.array(spans, np.int64).reshape(-1, 3).T)
    expected = [
        np.zeros((b - a, b - a), bool) if d < 0 else matrix[cu[d] + a : cu[d] + b, cu[d] + a : cu[d] + b]
        for d, a, b in spans
    ]
    assert np.array_equal(pieces.dense(), block_diagonal(expected))
    assert pieces.pairs().tolist() == [int(part.sum()) for part in expected]


@PROMISE
@given(st.data())
def test_unions_have_every_pair_once(data):
    """merge=True, |, & and - over any overlaps; tiles stay disjoint, so all sums over them are right."""
    tokens = data.draw(st.integers(0, 16))
    (one, other) = (data.draw(slice_lists(tokens)) for _ in "ab")
    a, b = (Mask.of_slices(tokens, stated, merge=True) for stated in (one, other))
    x, y = (slice_matrix(stated, tokens) > 0 for stated in (one, other))
    for made, expected in ((a, x), (b, y), (a | b, x | y), (a & b, x & y), (a - b, x & ~y)):
        times = mask_of(made.tiles, tokens, tokens)
        assert times.max(initial=0) <= 1
        assert np.array_equal(times > 0, expected)
        made.check()


@PROMISE
@given(st.data())
def test_slices_that_share_a_pair_are_refused_by_name(data):
    tokens = data.draw(st.integers(1, 16))
    stated = data.draw(slice_lists(tokens))
    times = slice_matrix(stated, tokens)
    if times.max(initial=0) <= 1:
        assert np.array_equal(Mask.of_slices(tokens, stated).dense(), times > 0)
        return
    with pytest.raises(ValueError, match="share pairs") as error:
        Mask.of_slices(tokens, stated)
    query, key = (int(word.strip("(),")) for word in str(error.value).split("such as (query ")[1].split(" ")[0:3:2])
    assert times[query, key] > 1


def test_unions_of_packs_keep_documents_apart():
    a = Mask.concat([mask_kinds.causal([4]), mask_kinds.full([3])])
    b = Mask.concat([mask_kinds.full([4]), mask_kinds.causal([3])])
    assert (a | b).pairs().tolist() == [16, 9] and (a & b).pairs().tolist() == [10, 6]
    assert (b - a).pairs().tolist() == [6, 0] and len(b - a) == 2
    with pytest.raises(ValueError, match="same documents"):
        _ = a | mask_kinds.causal([4])


# ---- Kinds. ----


@PROMISE
@given(kinds())
def test_kinds_are_what_their_papers_say(drawn):
    kind, arguments, matrix = drawn
    mask = getattr(mask_kinds, kind)(**arguments)
    assert np.array_equal(mask.dense(), matrix)
    assert int(mask.pairs().sum()) == int(matrix.sum())
    mask.check()


@PROMISE
@given(kinds())
def test_kinds_lower_to_what_kernels_compute(drawn):
    """The tiles of the pack, through bands.squares and bands.segments, cover each pair of the mask exactly once."""
    kind, arguments, matrix = drawn
    tiles, total = getattr(mask_kinds, kind)(**arguments).tiles_of_pack(), len(matrix)
    for times in (
        mask_of(tiles, total, total),
        mask_of_squares(bands.squares(tiles), total, total),
        mask_of_segments(bands.segments(tiles), total, total),
        mask_of(bands.join(tiles), total, total),
    ):
        assert np.array_equal(times, matrix.astype(int))
    assert bands.pairs(tiles).sum() == matrix.sum()


@PROMISE
@given(packs())
def test_any_mask_lowers_to_what_kernels_compute(drawn):
    mask, matrix = drawn
    tiles, total = mask.tiles_of_pack(), len(matrix)
    assert mask_tiles.NO_LIMIT == bands.NO_LIMIT
    for times in (
        mask_of_squares(bands.squares(tiles), total, total),
        mask_of_segments(bands.segments(tiles), total, total),
    ):
        assert np.array_equal(times, matrix.astype(int))


def test_published_parameters():
    """facts.md, masks of DCP: exact pairs of one document of 32768 tokens, from sums by hand."""
    t = 32768
    window, sinks, rows = 4096, 64, np.arange(t)
    by_hand = np.minimum(rows + 1, window) + np.clip(rows - window + 1, 0, sinks)
    mask = mask_kinds.window_with_sinks([t])
    assert np.array_equal(mask.row_pairs(), by_hand) and mask.pairs()[0] == by_hand.sum()
    question, answers = mask_kinds.shares_of_questions([t])
    assert question.tolist() == [6553] and answers.values.tolist() == [6553, 6553, 6553, 6556]
    mask = mask_kinds.shared_question(question, answers)
    by_hand = np.concatenate([np.arange(1, 6554), *(6553 + np.arange(1, size + 1) for size in answers.values)])
    assert np.array_equal(mask.row_pairs(), by_hand) and mask.tokens.tolist() == [t]
    by_hand = np.where((rows < 256) | (rows >= t - 256), rows + 1, 256 + np.minimum(rows - 255, 513))
    assert np.array_equal(mask_kinds.causal_blockwise([t]).row_pairs(), by_hand)
    assert len(mask_kinds.causal_blockwise([t]).tiles) == 3


def test_a_question_without_answers_a_prefix_of_0_and_a_long_window_are_causal():
    causal = mask_kinds.causal([7]).dense()
    for mask in (
        mask_kinds.shared_question([7], Ragged.of([[]])),
        mask_kinds.prefix_lm(0, [7]),
        mask_kinds.sliding_window([7], 7),
        mask_kinds.block_causal(mask_kinds.equal_blocks([7], 1)),
        mask_kinds.causal_blockwise([7], block=4),
    ):
        assert np.array_equal(mask.dense(), causal)
    assert len(mask_kinds.block_causal(mask_kinds.equal_blocks([7], 1)).tiles) == 1


def test_equal_blocks_end_with_a_shorter_one():
    blocks = mask_kinds.equal_blocks([7, 0, 4], 4)
    assert blocks.values.tolist() == [4, 3, 4] and blocks.offsets.tolist() == [0, 2, 2, 3]


# ---- What is refused. ----


@pytest.mark.parametrize(
    "make,says",
    [
        (lambda: Mask.of_slices(4, [[0, 5, 0, 4, 0]]), r"queries \[0, 5\).*has 4 tokens"),
        (lambda: Mask.of_slices(4, [[3, 2, 0, 4, 0]]), r"queries \[3, 2\)"),
        (lambda: Mask.of_slices(4, [[0, 4, -1, 4, 0]]), r"keys \[-1, 4\)"),
        (lambda: Mask.of_slices(4, [[0, 4, 0, 4, 4]]), "got type 4"),
        (lambda: Mask.of_slices([4, 4], [[0, 4, 0, 4, 0]]), "need offsets"),
        (lambda: Mask.of_slices([4, 4], [[0, 4, 0, 4, 0]], [0, 1]), "offsets must rise"),
        (lambda: Mask(tokens=[2.5], offsets=[0, 0], tiles=np.zeros((0, 6))), "must be integers"),
        (lambda: Mask(tokens=[-1], offsets=[0, 0], tiles=np.zeros((0, 6))), "0 … "),
        (lambda: Mask(tokens=[1], offsets=[0, 0], tiles=np.zeros((0, 5), int)), "int64.n, 6"),
        (lambda: mask_kinds.causal([-3]), "lengths must be at least 0; got -3"),
        (lambda: mask_kinds.sliding_window([3], 0), "window must be at least 1; got 0"),
        (lambda: mask_kinds.causal_blockwise([3], block=0), "block must be at least 1"),
        (lambda: mask_kinds.shared_question([3], Ragged.of([[1], [2]])), "each of the 1 documents; got 2"),
        (lambda: mask_kinds.shared_question([3], Ragged.of([[-1]])), "answers must be at least 0"),
        (lambda: mask_kinds.shares_of_questions([3], 1.5), "share of 0 … 1"),
        (lambda: Ragged([1, 2], [0, 1]), "offsets must rise"),
        (lambda: mask_kinds.causal([3]).pieces([0], [1], [4]), "Pieces are spans"),
        (lambda: mask_kinds.causal([3]).pieces([1], [0], [1]), "of documents 0 … 0, or -1"),
    ],
)
def test_wrong_masks_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
