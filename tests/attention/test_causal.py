"""What plans of causal documents cost: pairs in balance, and no more rows than the published marks.

python -m pytest tests/attention/test_causal.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from equipoise.attention.gather import gather_plan
from equipoise.attention.ring import ring_plan
from equipoise.packing.shards import Shards, zigzag

LENGTHS = Path(__file__).parents[3] / "shared" / "lengths" / "wlb_like.npy"
CONTEXT = 131072
PLANNERS = [ring_plan, gather_plan]


def wlb_like_packs(drawn: bool, number: int) -> list[np.ndarray]:
    """Boundaries of full 128K packs: documents end to end, cut at the packs' edges."""
    if not drawn and not LENGTHS.exists():
        pytest.skip("no length traces here")
    rng = np.random.default_rng(0)
    # Even up to 6450 tokens and 1.2 % even up to 125K, as its percentiles have it.
    law = np.where(rng.random(100_000) < 0.012, rng.integers(6450, 124_914, 100_000), rng.integers(16, 6450, 100_000))
    tokens = law if drawn else rng.permutation(np.load(LENGTHS).astype(np.int64))
    cu = np.concatenate([[0], np.cumsum(tokens)])
    edges = np.arange(number + 1) * CONTEXT
    return [np.unique(np.clip(cu, a, b)) - a for a, b in itertools.pairwise(edges)]


def received(shards: Shards, **options) -> np.ndarray:
    """Rows each rank receives, as the plan of one rank says."""
    return ring_plan(shards, tuple(range(shards.cp_size)), 0, **options).loads().rows_received


@pytest.mark.parametrize("plan", PLANNERS)
def test_shards_per_document_balance_what_other_balancers_do_not(plan):
    """[4, 12] on 2 ranks: 44/44, where torch's has 26/62; [512] + 32 x [16] on 4: torch's has 1.94 times the mean."""
    pairs = plan(zigzag([0, 4, 16], 2), (0, 1)).loads().pairs
    assert pairs.tolist() == [44, 44]
    pairs = plan(zigzag(np.cumsum([0, 512, *[16] * 32]), 4), (0, 1, 2, 3)).loads().pairs
    assert pairs.max() <= 1.01 * pairs.mean()


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("cp", [2, 8, 16])
def test_packs_cut_per_document_are_even_to_a_thousandth(cp, drawn):
    for cu in wlb_like_packs(drawn, 20):
        pairs = ring_plan(zigzag(cu, cp), tuple(range(cp))).loads().pairs
        assert pairs.max() <= 1.001 * pairs.mean()


@pytest.mark.parametrize("drawn", [True, False])
def test_skipping_leaves_little_of_the_ring(drawn):
    """Per-sequence zigzag of 128K packs on 8 ranks: at most 12 % of the full ring's rows straight from home, 26 % passed on."""
    straight = passed = full = 0
    for cu in wlb_like_packs(drawn, 1000):
        shards = zigzag(cu, 8, per="sequence")
        straight += received(shards, forward=False).sum()
        passed += received(shards).sum()
        full += 7 * CONTEXT
    assert straight <= 0.12 * full and passed <= 0.26 * full


@pytest.mark.parametrize("drawn", [True, False])
def test_skipping_does_not_rescue_shards_per_document(drawn):
    """75 % and 94 % of the full ring: a rank holds a late chunk of every document, and so needs nearly all before it."""
    shares = [
        [received(zigzag(cu, 8), forward=forward).sum() / (7 * CONTEXT) for forward in (False, True)]
        for cu in wlb_like_packs(drawn, 20)
    ]
    assert np.allclose(np.mean(shares, axis=0), [0.75, 0.94], atol=0.01)


@pytest.mark.parametrize("plan", PLANNERS)
@pytest.mark.parametrize(
    "h_kv,cp,mib", [(1024, 2, 64), (1024, 4, 96), (1024, 8, 112), (1024, 16, 120), (8192, 8, 896), (8192, 16, 960)]
)
def test_published_traffic_without_skipping(plan, h_kv, cp, mib):
    """(cp-1) · 2 · (N/cp) · h_kv · 2 bytes per rank and layer, N = 32768, bf16; a gather's as much as a ring's."""
    loads = plan(zigzag([0, 32768], cp), tuple(range(cp)), 0, skip=False).loads(bytes_per_row=2 * h_kv * 2)
    assert loads.bytes_sent.tolist() == loads.bytes_received.tolist() == [mib * 2**20] * cp


def test_one_ranks_plan_of_a_large_group_is_small():
    """64 ranks, 200 documents: a rank lists the rows it sends or receives, and not all 2.8 million of them."""
    cu = np.cumsum([0, *np.random.default_rng(0).integers(500, 6000, 200)])
    plan = ring_plan(zigzag(cu, 64), tuple(range(64)), 5)
    assert len(plan.moves) + len(plan.returns) + len(plan.tiles) < 150_000
    assert plan.traffic.by_rank[1, 5] == (plan.moves[plan.moves[:, 3] == 5] @ [0, 0, 0, 0, -1, 1]).sum()
