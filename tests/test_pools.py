"""The batches of a pool of replicas carry one plan between them, which is of the packs that they run in that slot.

python -m pytest tests/test_pools.py
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from equipoise import BalancedBatchSampler, PlannedDataset, ThdCollator, recipe
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.tiles import Tap
from equipoise.loaders.shapes import Shapes
from equipoise.samplers.plan import Cluster
from equipoise.samplers.solve import Vrsp

LENGTHS = (97, 3, 14, 60, 5, 9, 1, 33, 26, 26, 8, 2, 71, 40, 11, 90, 7, 7, 19, 4)
TAP = Tap(head_groups=2, block=8)


def batches(chosen, dp: int, cp: int, shapes: Shapes | None = None) -> list[list[Any]]:
    """Of each rank, in one step."""
    data = PlannedDataset([np.arange(tokens) for tokens in LENGTHS])
    collate, made = ThdCollator(chosen, shapes=shapes), []
    for rank in range(dp * cp):
        sampler = BalancedBatchSampler(
            data.lengths(), chosen, max_tokens_per_rank=120 // cp, documents_per_step=20, dp=dp, cp=cp, rank=rank
        )
        made.append([collate(data.__getitems__(spec)) for spec in sampler])
    return made


def together(parts: list[AttentionPlan]) -> AttentionPlan:
    """The plan of which these are the ranks' parts."""
    assert [part.rank for part in parts] == list(range(len(parts)))
    routes = {
        name: np.unique(np.concatenate([getattr(part, name) for part in parts]), axis=0)
        for name in ("moves", "returns")
    }
    return replace(parts[0], tiles=np.concatenate([part.tiles for part in parts]), rank=None, known=None, **routes)


@pytest.mark.parametrize("shapes", [None, Shapes(pad_to=120, max_docs=20)])
@pytest.mark.parametrize(("dp", "cp", "size"), [(4, 1, 4), (4, 1, 2), (4, 2, 2), (2, 3, 2), (3, 1, 1)])
def test_the_ranks_of_a_pool_have_the_parts_of_one_plan_of_their_packs(dp, cp, size, shapes):
    made = batches(recipe("libra", tap=TAP, options=Vrsp(pool_size=size)), dp, cp, shapes)
    queries = 0
    for slot in zip(*made, strict=True):
        for first in range(0, dp * cp, size * cp):
            pool = slot[first : first + size * cp]
            assert all(batch.plan.ranks == tuple(range(first, first + size * cp)) for batch in pool)
            assert [batch.plan.tokens_of(at) for at, batch in enumerate(pool)] == [
                len(batch.input_ids) for batch in pool
            ]
            packs = [np.diff(batch.cu_seqlens.numpy()) for batch in pool[::cp]]
            plan = together([batch.plan for batch in pool])
            plan.check(np.concatenate([[0], np.cumsum(np.concatenate(packs))]))
            queries += int(plan.loads().q_rows_received.sum())
    assert queries > 0 or size == cp == 1


def test_by_default_pools_have_as_many_replicas_as_divide_dp_up_to_eight():
    sizes = {
        dp: recipe("libra").replicas_of_pool(Cluster(dp=dp, max_tokens_per_rank=8))
        for dp in (1, 2, 6, 8, 9, 12, 16, 11)
    }
    assert sizes == {1: 1, 2: 2, 6: 6, 8: 8, 9: 3, 12: 6, 16: 8, 11: 1}


def test_only_tap_shares_attention():
    pooled = Cluster(dp=4, max_tokens_per_rank=8)
    assert recipe("vrsp", options=Vrsp(pool_size=4)).replicas_of_pool(pooled) == 1
    with pytest.raises(ValueError, match="tap says how attend='tap' shares attention; got attend='ring'"):
        recipe("static", tap=TAP)
    with pytest.raises(ValueError, match="shard='dacp' and attend='tap' do not fit"):
        recipe("libra", shard="dacp")
