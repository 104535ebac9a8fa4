"""What hypothesis draws for masks, and their brute-force readings: boolean matrices, pair by pair, as the papers state them."""

from __future__ import annotations

import numpy as np
from equipoise.packing.mask_kinds import Ragged
from equipoise.packing.masks import BI_CAUSAL, CAUSAL, FULL, INV_CAUSAL, Mask
from hypothesis import settings
from hypothesis import strategies as st

PROMISE = settings(max_examples=200, deadline=None, derandomize=True)


def slice_matrix(slices, tokens: int) -> np.ndarray:
    """How many of the slices have each pair, int[tokens, tokens]: types as MagiAttention draws them."""
    times = np.zeros((tokens, tokens), int)
    for q0, q1, k0, k1, kind in np.asarray(slices, dtype=int).reshape(-1, 5).tolist():
        q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)
        from_bottom, from_top = (k1 - 1 - k) >= (q1 - 1 - q), (k - k0) >= (q - q0)
        seen = {FULL: True, CAUSAL: from_bottom, INV_CAUSAL: from_top, BI_CAUSAL: from_bottom & from_top}
        times[q0:q1, k0:k1] += seen[kind]
    return times


def by_hand(t: int, see) -> np.ndarray:
    """bool[t, t] of see(q, k)."""
    return np.array([[bool(see(q, k)) for k in range(t)] for q in range(t)], bool).reshape(t, t)


@st.composite
def slice_lists(draw: st.DrawFn, tokens: int, most: int = 8) -> list[list[int]]:
    """Slices within a document of `tokens`, empty and overlapping ones among them."""
    out = []
    for _ in range(draw(st.integers(0, most))):
        q, k = (sorted(draw(st.lists(st.integers(0, tokens), min_size=2, max_size=2))) for _ in "qk")
        out.append([*q, *k, draw(st.integers(0, 3))])
    return out


@st.composite
def masks(draw: st.DrawFn, largest: int = 14, most: int = 3) -> tuple[Mask, np.ndarray]:
    """A pack of documents with any slices, and its matrix."""
    parts, matrices = [], []
    for tokens in draw(st.lists(st.integers(0, largest), min_size=1, max_size=most)):
        stated = draw(slice_lists(tokens))
        parts.append(Mask.of_slices(tokens, stated, merge=True))
        matrices.append(slice_matrix(stated, tokens) > 0)
    return Mask.concat(parts), block_diagonal(matrices)


def block_diagonal(matrices) -> np.ndarray:
    total = sum(len(matrix) for matrix in matrices)
    out, at = np.zeros((total, total), bool), 0
    for matrix in matrices:
        out[at : at + len(matrix), at : at + len(matrix)] = matrix
        at += len(matrix)
    return out


lengths = st.lists(st.integers(0, 24), min_size=1, max_size=4)


@st.composite
def kinds(draw: st.DrawFn):
    """(kind, its arguments, matrix of the pack): every kind of mask with structure of its own for each document."""
    kind = draw(st.sampled_from(sorted(READINGS)))
    arguments, matrices = READINGS[kind](draw, draw(lengths))
    return kind, arguments, block_diagonal(matrices)


def _each(draw, ts, least, most):
    return [draw(st.integers(least, most)) for _ in ts]


def _causal(draw, ts):
    return {"lengths": ts}, [by_hand(t, lambda q, k: k <= q) for t in ts]


def _full(draw, ts):
    return {"lengths": ts}, [np.ones((t, t), bool) for t in ts]


def _sliding_window(draw, ts):
    w, a = _each(draw, ts, 1, 30), _each(draw, ts, 0, 9)
    return {"lengths": ts, "window": np.array(w), "ahead": np.array(a)}, [
        by_hand(t, lambda q, k, i=i: q - w[i] < k <= q + a[i]) for i, t in enumerate(ts)
    ]


def _window_with_sinks(draw, ts):
    """DCP: the ranges [0, min(sinks, i + 1)) and [max(0, i - window + 1), i + 1) of each token i."""
    w, s = _each(draw, ts, 1, 30), _each(draw, ts, 0, 30)
    return {"lengths": ts, "window": np.array(w), "sinks": np.array(s)}, [
        by_hand(t, lambda q, k, i=i: k < min(s[i], q + 1) or max(0, q - w[i] + 1) <= k < q + 1)
        for i, t in enumerate(ts)
    ]


def _shared_question(draw, ts):
    answers = [draw(st.lists(st.integers(0, 9), max_size=4)) for _ in ts]
    matrices = []
    for question, parts in zip(ts, answers, strict=True):
        part = np.repeat(np.arange(len(parts) + 1), [question, *parts])
        matrices.append(by_hand(len(part), lambda q, k, part=part: k <= q and (part[k] == 0 or part[k] == part[q])))
    return {"question": ts, "answers": Ragged.of(answers)}, matrices


def _causal_blockwise(draw, ts):
    """DCP: first block causal, last block all, a token i between the first block and [max(block, i - local·block), i + 1)."""
    block, local = _each(draw, ts, 1, 9), _each(draw, ts, 0, 3)

    def see(q, k, t, b, n):
        if q // b in (0, -(-t // b) - 1):
            return k <= q
        return k < b or max(b, q - n * b) <= k <= q

    return {"lengths": ts, "block": np.array(block), "local_blocks": np.array(local)}, [
        by_hand(t, lambda q, k, t=t, i=i: see(q, k, t, block[i], local[i])) for i, t in enumerate(ts)
    ]


def _prefix_lm(draw, ts):
    p = _each(draw, ts, 0, 30)
    return {"prefix": np.array(p), "lengths": ts}, [
        by_hand(t, lambda q, k, i=i: k <= q or max(q, k) < p[i]) for i, t in enumerate(ts)
    ]


def _block_causal(draw, ts):
    blocks = [draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 5]), max_size=8)) for _ in ts]
    matrices = []
    for sizes in blocks:
        block = np.repeat(np.arange(len(sizes)), sizes)
        matrices.append(by_hand(len(block), lambda q, k, block=block: block[k] <= block[q]))
    return {"blocks": Ragged.of(blocks)}, matrices


READINGS = {
    "causal": _causal,
    "full": _full,
    "sliding_window": _sliding_window,
    "window_with_sinks": _window_with_sinks,
    "shared_question": _shared_question,
    "causal_blockwise": _causal_blockwise,
    "prefix_lm": _prefix_lm,
    "block_causal": _block_causal,
}
