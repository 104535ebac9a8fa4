"""python -m pytest tests/packing/test_mask_columns.py"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset
from equipoise import Lengths, plan, recipe
from equipoise.packing import mask_columns as module
from equipoise.packing import mask_kinds
from equipoise.packing.mask_columns import KINDS, MaskColumns
from equipoise.packing.mask_kinds import Ragged
from hypothesis import given
from hypothesis import strategies as st

from tests.packing.mask_draws import PROMISE, READINGS, block_diagonal, kinds


def test_every_kind_that_is_tested_can_be_columns():
    assert set(KINDS) == set(READINGS)


@PROMISE
@given(kinds(), st.data())
def test_columns_make_the_masks_of_any_documents(drawn, data):
    """Masks of spans taken from columns are the pieces of the matrix; pairs of all documents are its sums."""
    kind, arguments, matrix = drawn
    columns = MaskColumns(kind, {name: arrays(values) for name, values in arguments.items()})
    whole = columns.mask()
    cu = whole.cu_seqlens
    lengths = columns.lengths()
    assert lengths.tokens.tolist() == whole.tokens.tolist()
    assert lengths.pairs.tolist() == [int(matrix[a:b, a:b].sum()) for a, b in pairwise(cu)]
    document = np.array(data.draw(st.lists(st.integers(-1, len(columns) - 1), max_size=5)), np.int64)
    size = np.append(whole.tokens, 3)[document]
    start = np.array([data.draw(st.integers(0, int(most))) for most in size], np.int64)
    pieces = columns.pieces(document, start, size)
    expected = [
        np.zeros((n - a, n - a), bool) if d < 0 else matrix[cu[d] + a : cu[d] + n, cu[d] + a : cu[d] + n]
        for d, a, n in zip(document, start, size, strict=True)
    ]
    assert np.array_equal(pieces.dense(), block_diagonal(expected))


def arrays(values):
    return values if isinstance(values, Ragged) else np.array(values)


def test_more_documents_than_are_measured_at_once(monkeypatch):
    monkeypatch.setattr(module, "TOGETHER", 3)
    tokens = np.arange(11)
    columns = MaskColumns("window_with_sinks", {"lengths": tokens, "window": 4, "sinks": 1})
    assert columns.lengths().pairs.tolist() == mask_kinds.window_with_sinks(tokens, 4, 1).pairs().tolist()
    assert len(columns) == 11 and len(columns.take([3, 3])) == 2


def test_columns_of_a_dataset():
    rows = Dataset.from_dict(
        {
            "input_ids": [[1] * 6, [1] * 5, [1] * 9],
            "question": [2, 5, 3],
            "answers": [[2, 2], [], [6]],
        }
    ).select([2, 0, 1])
    masks = MaskColumns.from_dataset(rows, "shared_question", {"question": "question", "answers": "answers"})
    assert masks.lengths().tokens.tolist() == [9, 6, 5] == list(map(len, rows["input_ids"]))
    assert masks.lengths().pairs.tolist() == [45, 17, 15]
    windows = MaskColumns.from_dataset(rows, "sliding_window", {"lengths": "input_ids"}, {"window": 2})
    assert windows.lengths().pairs.tolist() == [17, 11, 9]


def test_recipes_balance_by_the_pairs_of_the_mask():
    """Four windows and one causal document of the same length: the causal one weighs more, and gets a rank alone."""
    tokens = np.full(5, 1000)
    window = np.array([10, 10, 10, 10, 1000])
    lengths = MaskColumns("sliding_window", {"lengths": tokens, "window": window}).lengths()
    step = plan(
        lengths,
        recipe("vrsp", attend="groupcast"),
        dp=2,
        max_tokens_per_rank=5000,
        slots=1,
        cost=lambda pairs, tokens: pairs * 1e-9,
    )
    assert sorted(step.packs.pairs.tolist()) == [4 * (55 + 990 * 10), 500500]


def test_documents_that_are_cut_keep_their_masks():
    """Pieces of split documents, and truncated ones, count the pairs of their spans."""
    masks = MaskColumns("prefix_lm", {"lengths": np.array([10, 3]), "prefix": np.array([6, 3])})
    for too_long, expected in (("split", {16, 11, 3, 9}), ("truncate", {16, 9})):
        step = plan(masks.lengths(), recipe("magi"), dp=1, max_tokens_per_rank=4, too_long=too_long)
        spans = step.packs.spans
        assert set(spans.pairs[spans.document >= 0].tolist()) == expected
        parts = masks.pieces(spans.document, spans.start, spans.stop)
        assert np.array_equal(parts.pairs(), spans.pairs)
    with pytest.raises(ValueError, match="cuts documents as causal ones.*prefix_lm masks"):
        plan(masks.lengths(), recipe("static", pack="concat"), dp=1, max_tokens_per_rank=12)
    with pytest.raises(ValueError, match="each of its 1 documents; there are 2 masks"):
        Lengths(tokens=np.array([5]), pairs=np.array([9]), masks=masks)


@pytest.mark.parametrize(
    "make,says",
    [
        (lambda: MaskColumns("diagonal", {"lengths": np.ones(2)}), "A mask is one of causal, .*got 'diagonal'"),
        (lambda: MaskColumns("causal", {"tokens": np.ones(2)}), "columns of 'causal' are lengths"),
        (lambda: MaskColumns("prefix_lm", {"lengths": np.ones(2)}), "are prefix, lengths; missing"),
        (
            lambda: MaskColumns("prefix_lm", {"lengths": np.ones(2), "prefix": np.ones(3)}),
            "value for each document.*'lengths': 2, 'prefix': 3",
        ),
        (lambda: MaskColumns("causal", {"lengths": 3}), "at least one of them does"),
    ],
)
def test_wrong_columns_are_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
