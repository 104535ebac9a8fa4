"""python -m pytest tests/packing/test_shards.py"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from equipoise.packing.best_fit import best_fit_decreasing
from equipoise.packing.shards import Shards, contiguous, striped, zigzag
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = Path(__file__).parents[3] / "shared" / "lengths"
RULES = {
    "contiguous": contiguous,
    "sequence": lambda cu, cp: zigzag(cu, cp, per="sequence"),
    "document": zigzag,
}

lengths_and_cp = st.tuples(
    st.lists(st.one_of(st.integers(0, 12), st.integers(0, 200)), max_size=12),
    st.integers(1, 9),
    st.sampled_from(list(RULES)),
)


def boundaries(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths])


def zigzag_document_by_hand(lengths: list[int], cp: int) -> list[list[int]]:
    """WLB-LLM's rule literally: a running index, carried from document to document, says which chunk grows."""
    held: list[list[int]] = [[] for _ in range(cp)]
    running = at = 0
    for length in lengths:
        sizes = [length // (2 * cp)] * (2 * cp)
        for _ in range(length % (2 * cp)):
            sizes[running] += 1
            running = (running + 1) % (2 * cp)
        chunks = []
        for size in sizes:
            chunks.append(list(range(at, at + size)))
            at += size
        for rank in range(cp):
            held[rank] += chunks[rank] + chunks[2 * cp - 1 - rank]
    return held


def cut_by_hand(lengths: list[int], pieces: int) -> list[list[int]]:
    total = sum(lengths)
    sizes = [total // pieces + (i < total % pieces) for i in range(pieces)]
    ends = np.cumsum([0, *sizes])
    return [list(range(a, b)) for a, b in pairwise(ends)]


def by_hand(rule: str, lengths: list[int], cp: int) -> list[list[int]]:
    if rule == "document":
        return zigzag_document_by_hand(lengths, cp)
    if rule == "contiguous":
        return cut_by_hand(lengths, cp)
    chunks = cut_by_hand(lengths, 2 * cp)
    return [chunks[rank] + chunks[2 * cp - 1 - rank] for rank in range(cp)]


@settings(max_examples=200, deadline=None)
@given(lengths_and_cp)
def test_ranks_hold_what_the_rule_says(drawn):
    lengths, cp, rule = drawn
    shards = RULES[rule](boundaries(lengths), cp)
    assert [shards.positions(rank).tolist() for rank in range(cp)] == by_hand(rule, lengths, cp)


@settings(max_examples=200, deadline=None)
@given(lengths_and_cp)
def test_every_token_once_and_evenly(drawn):
    lengths, cp, rule = drawn
    shards = RULES[rule](boundaries(lengths), cp)
    everything = np.concatenate([shards.positions(rank) for rank in range(cp)])
    assert sorted(everything.tolist()) == list(range(sum(lengths)))
    assert shards.tokens().max() - shards.tokens().min() <= 1
    assert shards.tokens().tolist() == [len(shards.positions(rank)) for rank in range(cp)]


@settings(max_examples=200, deadline=None)
@given(lengths_and_cp)
def test_segments_are_maximal_and_inside_one_document(drawn):
    lengths, cp, rule = drawn
    cu = boundaries(lengths)
    shards = RULES[rule](cu, cp)
    start, stop = shards.segments[:, 0], shards.segments[:, 1]
    assert shards.segments.shape == (len(shards.document), 2) and np.all(stop > start)
    assert np.all(cu[shards.document] <= start) and np.all(stop <= cu[shards.document + 1])
    assert shards.offsets[0] == 0 and shards.offsets[-1] == len(start)
    for rank in range(cp):
        mine = slice(shards.offsets[rank], shards.offsets[rank + 1])
        touch = (start[mine][1:] == stop[mine][:-1]) & (np.diff(shards.document[mine]) == 0)
        assert not touch.any()


@settings(max_examples=200, deadline=None)
@given(lengths_and_cp)
def test_pairs_count_the_prefix_of_each_query(drawn):
    lengths, cp, rule = drawn
    cu = boundaries(lengths)
    shards = RULES[rule](cu, cp)
    prefix = np.concatenate([np.arange(1, length + 1) for length in lengths] or [np.zeros(0, int)])
    assert shards.pairs().tolist() == [int(prefix[shards.positions(rank)].sum()) for rank in range(cp)]
    assert shards.pairs().sum() == sum(t * (t + 1) // 2 for t in lengths)


def held(shards: Shards) -> list[list[int]]:
    return [shards.positions(rank).tolist() for rank in range(shards.cp_size)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 6), st.integers(1, 9))
def test_stripes_are_dealt_in_turn(lengths, cp, stripe):
    shards = striped(boundaries(lengths), cp, stripe)
    stripes = [list(range(a, min(a + stripe, sum(lengths)))) for a in range(0, sum(lengths), stripe)]
    assert held(shards) == [[p for one in stripes[rank::cp] for p in one] for rank in range(cp)]
    assert np.ptp(shards.tokens()) <= stripe
    cu, start, stop = boundaries(lengths), shards.segments[:, 0], shards.segments[:, 1]
    assert np.all(cu[shards.document] <= start) and np.all(stop <= cu[shards.document + 1]) and np.all(stop > start)


def test_stripes_balance_one_document():
    pairs = striped([0, 4096], 8).pairs()
    assert pairs.max() - pairs.min() < 4096 and contiguous([0, 4096], 8).pairs().max() > 1.8 * pairs.max()


def test_golden_vectors():
    """Megatron's and Transformer Engine's own test vectors for zigzag per document."""
    assert held(zigzag([0, 8, 16], 2)) == [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]
    assert held(zigzag([0, 8, 12], 2)) == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert held(contiguous([0, 8, 12, 16], 2)) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]]
    assert held(zigzag([0, 8, 12, 16], 2))[0] == [0, 1, 6, 7, 8, 11, 12, 15]
    # Seven tokens padded to eight leave 3 and 4 valid ones; unpadded they are shared out alike.
    assert zigzag([0, 7], 2).tokens().tolist() == [3, 4]


def test_a_causal_ring_without_zigzag_computes_one_to_four_blocks():
    """cp 4, one document of four blocks: rank r computes r whole blocks and its own diagonal one."""
    block = 32
    pairs = contiguous([0, 4 * block], 4).pairs()
    diagonal = block * (block + 1) // 2
    assert pairs.tolist() == [r * block * block + diagonal for r in range(4)]
    assert [-(-p // block**2) for p in pairs.tolist()] == [1, 2, 3, 4]
    assert len(set(zigzag([0, 4 * block], 4).pairs().tolist())) == 1


def test_the_remainder_runs_on_from_document_to_document():
    """cp 2, three documents of 5: chunk 0 grows first, then 1, then 2, so no rank collects all remainders."""
    shards = zigzag([0, 5, 10, 15], 2)
    assert held(shards) == [[0, 1, 4, 5, 9, 10, 14], [2, 3, 6, 7, 8, 11, 12, 13]]
    assert shards.tokens().tolist() == [7, 8]


def test_thousands_of_documents_and_large_groups():
    lengths = np.random.default_rng(0).integers(0, 40, 5000)
    shards = zigzag(np.concatenate([[0], np.cumsum(lengths)]), 64)
    assert shards.tokens().sum() == lengths.sum() and np.ptp(shards.tokens()) <= 1
    assert np.ptp(contiguous([0, 7], 70000).tokens()) == 1


@pytest.mark.skipif(not LENGTHS.is_dir(), reason="document lengths of the benchmarks are not here")
def test_per_document_shards_balance_real_packs():
    """128K packs of a long-tailed trace, cp 8: max/mean pairs at most 1.001 in every full one."""
    tokens = np.load(LENGTHS / "wlb_like.npy").astype(np.int64)
    order, offsets = best_fit_decreasing(tokens, 131072)
    for first, last in pairwise(offsets):
        cu_seqlens = np.concatenate([[0], np.cumsum(tokens[order[first:last]])])
        pairs = zigzag(cu_seqlens, 8).pairs()
        assert pairs.max() * 8 / pairs.sum() <= 1.001 or cu_seqlens[-1] < 131072 / 2


def test_wrong_arguments_are_refused():
    for cu in ([], [1, 2], [0, 3, 2], [[0, 1]], [0.0, 1.0]):
        with pytest.raises(ValueError, match="cu_seqlens must be integers"):
            zigzag(cu, 2)
    with pytest.raises(ValueError, match="cp_size=0"):
        contiguous([0, 4], 0)
    with pytest.raises(ValueError, match="per='token'"):
        zigzag([0, 4], 2, per="token")
    with pytest.raises(ValueError, match="stripe=0"):
        striped([0, 4], 2, 0)
