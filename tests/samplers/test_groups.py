"""Groups are atoms for every planner: one step, one pack, whole; and dropped or refused as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from equipoise import BalancedBatchSampler, Lengths, recipe
from equipoise.recipes import Recipe
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import RECIPES, clusters, cost

WHOLE = [chosen for chosen in RECIPES if not chosen.cuts]


@given(data=st.data(), cluster=clusters(), chosen=st.sampled_from(WHOLE))
@settings(max_examples=200, deadline=None)
def test_a_group_shares_one_pack(data: st.DataObject, cluster: dict, chosen: Recipe) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=20))
    group = np.repeat(np.arange(len(sizes)), [len(each) for each in sizes])
    tokens = np.array([n for each in sizes for n in each])
    shuffled = np.array(data.draw(st.permutations(range(len(tokens)))))
    cluster = {**cluster, "max_tokens_per_rank": max(cluster["max_tokens_per_rank"], *map(sum, sizes), 1)}
    if not tokens.any():
        return
    lengths = Lengths(tokens=tokens[shuffled], group=group[shuffled])
    sampler = BalancedBatchSampler(lengths, chosen, cost=cost, documents_per_step=7, **cluster)
    place: dict[int, tuple[int, int]] = {}
    documents = []
    for step in range(sampler.steps_per_epoch):
        plan = sampler.plan(step)
        window = sampler.admission.window(0, step)
        assert window is not None
        plan.check(window.spans)
        pack = np.repeat(np.arange(len(plan.packs)), np.diff(plan.packs.offsets))
        for document, number in zip(plan.packs.spans.document.tolist(), pack.tolist(), strict=True):
            if document >= 0:
                documents.append(document)
                assert place.setdefault(int(lengths.group[document]), (step, number)) == (step, number)
    assert sorted(documents) == np.flatnonzero(lengths.tokens).tolist()


def test_groups_that_fit_nowhere_are_refused_or_dropped_whole() -> None:
    lengths = Lengths(tokens=np.array([5, 6, 3, 20, 2]), group=np.array([0, 0, 1, 2, 2]))
    options = {"max_tokens_per_rank": 10, "dp": 1, "documents_per_step": 9}
    with pytest.raises(ValueError, match="a document may have at most 10 tokens"):
        BalancedBatchSampler(lengths, recipe("vrsp"), **options)
    sampler = BalancedBatchSampler(lengths, recipe("vrsp"), too_long="drop", **options)
    assert sampler.plan(0).packs.spans.document.tolist() == [2]
    assert "in 1 groups; 2 groups longer than 10 tokens dropped" in sampler.items.describe()
    pair = Lengths(tokens=np.array([5, 6]), group=np.array([4, 4]))
    with pytest.raises(ValueError, match=r"group of document 0 has 11 in 2 documents: raise max_tokens_per_rank"):
        BalancedBatchSampler(pair, recipe("vrsp"), **options)


def test_what_cuts_documents_cuts_no_group() -> None:
    lengths = Lengths(tokens=np.array([5, 6]), group=np.array([4, 4]))
    with pytest.raises(ValueError, match="'static\\+pack=concat' cuts documents"):
        BalancedBatchSampler(
            lengths, recipe("static", pack="concat"), max_tokens_per_rank=20, dp=1, documents_per_step=1
        )
    with pytest.raises(ValueError, match="too_long='split' cuts them"):
        BalancedBatchSampler(
            lengths, recipe("vrsp"), max_tokens_per_rank=20, dp=1, documents_per_step=1, too_long="split"
        )
