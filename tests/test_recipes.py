"""The promises of the design, for every recipe: a pure plan, exactly once, a hard cap, equal slots, any sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from equipoise import BalancedBatchSampler, Lengths, recipe
from equipoise.packing.packs import Spans
from equipoise.packing.queues import WlbQueues
from equipoise.recipes import Recipe
from equipoise.samplers.cluster import Cluster
from equipoise.samplers.flexsp import FlexSp, SpModel, flexsp
from equipoise.samplers.plan import StepPlan
from equipoise.samplers.solve import ChunkFlow, Vrsp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import RECIPES, clusters, cost, document_lengths, step_sizes

POLICIES = ("drop", "truncate", "split")
LAST = ("partial", "drop", "carry")


def make(lengths: list[int], chosen: Recipe, **options) -> BalancedBatchSampler | None:
    """A sampler, or None where the documents leave nothing to do."""
    try:
        return BalancedBatchSampler(Lengths.from_array(np.array(lengths)), chosen, cost=cost, **options)
    except ValueError as error:
        if "no document is left" in str(error) or "leaves no step" in str(error):
            return None
        raise


@given(data=st.data(), lengths=document_lengths(), cluster=clusters(), chosen=st.sampled_from(RECIPES))
@settings(max_examples=600, deadline=None)
def test_every_plan_keeps_its_promises(data: st.DataObject, lengths: list[int], cluster: dict, chosen: Recipe) -> None:
    """Exactly once over an epoch, the cap, equal slots, no idle rank; rows of all ranks make up the plan."""
    if chosen.shard == "whole":
        cluster = {**cluster, "cp": 1}
    cap = chosen.longest(Cluster(**cluster))
    size = data.draw(step_sizes(cluster["dp"], max(1, *lengths, cap % (1 << 40)), packs=chosen.one_size))
    sampler = make(
        lengths,
        chosen,
        **cluster,
        **size,
        too_long=data.draw(st.sampled_from(POLICIES)),
        last=data.draw(st.sampled_from(LAST)),
        seed=data.draw(st.integers(0, 3)),
    )
    if sampler is None:
        return
    seen: dict[tuple[int, int], int] = {}
    for step in range(sampler.steps_per_epoch):
        window = sampler.admission.window(0, step)
        assert window is not None
        plan = sampler.plan(step)
        plan.check(window.spans)
        assert plan.makespan() >= plan.bound()
        assert (plan.packs.tokens <= plan.cp_size * cluster["max_tokens_per_rank"]).all()
        for tokens, group in zip(plan.packs.tokens, plan.cp_size, strict=True):
            assert -(-tokens // group) <= cluster["max_tokens_per_rank"]
        loads = plan.loads()
        assert loads.cost.shape == (cluster["dp"] * cluster["cp"], plan.num_slots)
        assert (loads.tokens >= 1).all()
        filler = plan.packs.spans.document < 0
        assert (plan.packs.spans.tokens[filler] <= plan.cp_size.max()).all()
        if "packs_per_step" in size:
            assert plan.num_slots * cluster["dp"] == size["packs_per_step"]
        for document, tokens in zip(plan.packs.spans.document, plan.packs.spans.tokens, strict=True):
            if document >= 0:
                seen[document] = seen.get(document, 0) + tokens
    if sampler.config["last"] == "partial":
        policy = sampler.items.too_long
        expected = {d: min(n, cap) if policy == "truncate" else n for d, n in enumerate(lengths) if n}
        if policy == "drop":
            expected = {d: n for d, n in expected.items() if n <= cap}
        assert seen == expected


@given(data=st.data(), lengths=document_lengths(), cluster=clusters())
@settings(max_examples=200, deadline=None)
def test_a_step_holds_the_same_documents_under_every_recipe(
    data: st.DataObject, lengths: list[int], cluster: dict
) -> None:
    """Where no document is cut at the door; what a recipe can take whole differs."""
    cluster = {**cluster, "max_tokens_per_rank": max(cluster["max_tokens_per_rank"], *lengths)}
    size = data.draw(step_sizes(cluster["dp"], max(1, *lengths), packs=False))
    contents = set()
    for chosen in RECIPES:
        if isinstance(chosen.options, WlbQueues) and chosen.options.max_delay:
            continue  # carries over: see test_carry.py
        cluster = {**cluster, "cp": 1 if chosen.shard == "whole" else cluster["cp"]}
        sampler = make(lengths, chosen, **cluster, **size, too_long="split")
        if sampler is None:
            return
        spans = sampler.plan(0).packs.spans
        covered: dict[int, int] = {}
        for document, tokens in zip(spans.document.tolist(), spans.tokens.tolist(), strict=True):
            if document >= 0:
                covered[document] = covered.get(document, 0) + tokens
        contents.add(tuple(sorted(covered.items())))
    assert len(contents) == 1


@given(data=st.data(), lengths=document_lengths(), cluster=clusters(), tp=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_padding_counts_against_the_cap(data: st.DataObject, lengths: list[int], cluster: dict, tp: int) -> None:
    chosen = data.draw(st.sampled_from([recipe("static"), recipe("wlb", shard="zigzag"), recipe("dynamic_cp")]))
    cluster = {**cluster, "max_tokens_per_rank": cluster["max_tokens_per_rank"] + 2 * tp, "pad_tp": tp}
    cap = max(1, *lengths, cluster["max_tokens_per_rank"] * cluster["cp"])
    size = data.draw(step_sizes(cluster["dp"], cap, packs=chosen.one_size))
    if "tokens_per_step" in size:
        size["tokens_per_step"] *= 2
    sampler = make(lengths, chosen, **cluster, **size, too_long="split")
    if sampler is None:
        return
    for step in range(sampler.steps_per_epoch):
        window, plan = sampler.admission.window(0, step), sampler.plan(step)
        assert window is not None
        plan.check(window.spans)
        multiple = plan.cluster.multiple(plan.cp_size)
        for pack in range(len(plan.packs)):
            tokens = plan.packs.take([pack]).spans.tokens
            held = sum(-(-n // multiple[pack]) * multiple[pack] for n in tokens) // plan.cp_size[pack]
            assert held <= cluster["max_tokens_per_rank"]


@given(data=st.data(), lengths=document_lengths(), chosen=st.sampled_from(RECIPES))
@settings(max_examples=200, deadline=None)
def test_all_ranks_read_one_plan(data: st.DataObject, lengths: list[int], chosen: Recipe) -> None:
    """Ranks of a CP group get the same pack, replicas different ones, and every rank equally many."""
    dp, cp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    cp = 1 if chosen.shard == "whole" else cp
    options = {"dp": dp, "cp": cp, "max_tokens_per_rank": 40, "documents_per_step": 13, "too_long": "split"}
    samplers = [make(lengths, chosen, **options, rank=rank) for rank in range(dp * cp)]
    if samplers[0] is None:
        return
    rows = [[batch for (batch,) in sampler] for sampler in samplers if sampler is not None]
    assert len({len(row) for row in rows}) == 1
    for column in zip(*rows, strict=True):
        assert len({(batch.step, batch.slot, batch.num_slots, batch.digest) for batch in column}) == 1
        for group in {batch.ranks for batch in column}:
            held = [column[rank] for rank in group]
            assert {batch.ranks for batch in held} == {group}
            assert len({tuple(batch.spans.document) for batch in held}) == 1
            assert [batch.cp_rank for batch in held] == list(range(len(group)))
            if chosen.one_size:
                assert len(group) == cp and group[0] % cp == 0


@given(data=st.data(), lengths=document_lengths(), cluster=clusters(), chosen=st.sampled_from(RECIPES))
@settings(max_examples=200, deadline=None)
def test_a_plan_is_a_pure_function(data: st.DataObject, lengths: list[int], cluster: dict, chosen: Recipe) -> None:
    """Made twice, in another order of steps, the digest is the same; another seed or epoch gives another order."""
    cluster = {**cluster, "cp": 1 if chosen.shard == "whole" else cluster["cp"]}
    options = {**cluster, "documents_per_step": data.draw(st.integers(1, 20)), "too_long": "split"}
    first, second = make(lengths, chosen, **options), make(lengths, chosen, **options)
    if first is None or second is None:
        return
    steps = range(first.steps_per_epoch)
    forward = [first.plan(step).digest for step in steps]
    assert [second.plan(step).digest for step in reversed(steps)][::-1] == forward


def test_the_digest_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "import numpy as np; from equipoise import *\n"
        "from equipoise import BalancedBatchSampler, Lengths, recipe\n"
        "lengths = Lengths.from_array(np.random.default_rng(0).integers(1, 500, 300))\n"
        "for name in ('static', 'wlb', 'vrsp', 'skrull', 'flexsp', 'dynamic_cp'):\n"
        "    s = BalancedBatchSampler(lengths, recipe(name), max_tokens_per_rank=256, dp=3, cp=2, documents_per_step=64)\n"
        "    print([s.plan(step).digest for step in range(s.steps_per_epoch)], s._config_digest)\n"
    ).replace("from equipoise import *\n", "\n")
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1 and printed.pop().count("[") == 6


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from equipoise import BalancedBatchSampler, Lengths, recipe\n"
        "s = BalancedBatchSampler(Lengths.from_array(np.arange(1, 50)), recipe('wlb'), max_tokens_per_rank=64, dp=2, documents_per_step=20)\n"
        "batch = next(iter(s))[0]\n"
        "recipe('static').attention(recipe('static').shards(np.array([0, 8, 13]), 2), (0, 1), 0)\n"
        "assert 'torch' not in sys.modules, 'planning imported torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_balanced_recipes_balance() -> None:
    """Right and unbalanced is a bug: on a long tail every balanced recipe beats in-order packs, and slots beat chance."""
    rng = np.random.default_rng(5)
    lengths = Lengths.from_array(np.clip(rng.lognormal(6, 1.4, 4000), 8, 8192).astype(np.int64))

    def imbalance(name: str, sync: str, **mix: str) -> float:
        sampler = BalancedBatchSampler(
            lengths,
            recipe(name, **mix),
            max_tokens_per_rank=8192,
            dp=4,
            packs_per_step=64,
            sync=sync,
            cost=lambda pairs, tokens: 2e-9 * pairs + 1.6e-6 * tokens,
        )
        return float(
            np.mean([sampler.plan(step).loads().imbalance(sync) for step in range(sampler.steps_per_epoch - 1)])
        )

    assert imbalance("static", "slot") > 1.3
    assert imbalance("vrsp", "slot") < 1.05
    assert imbalance("vrsp", "step") < 1.01 < imbalance("static", "step")
    assert imbalance("wlb", "slot") < 1.05


@pytest.mark.parametrize("chosen", RECIPES, ids=lambda recipe: recipe.name)
def test_slots_are_no_curriculum_by_length(chosen: Recipe) -> None:
    """Over many steps the number of a slot says nothing about how long its documents are."""
    rng = np.random.default_rng(1)
    lengths = Lengths.from_array(np.clip(rng.lognormal(3, 1.2, 6000), 1, 256).astype(np.int64))
    cp = 1 if chosen.shard == "whole" else 2
    sampler = BalancedBatchSampler(
        lengths, chosen, max_tokens_per_rank=256, dp=2, cp=cp, documents_per_step=100, cost=cost, sync="slot"
    )
    slots, means = [], []
    for step in range(60):
        plan = sampler.plan(step)
        pack = np.repeat(np.arange(len(plan.packs)), np.diff(plan.packs.offsets))
        slots += (plan.slot[pack] / max(plan.num_slots - 1, 1)).tolist()
        means += plan.packs.spans.tokens.tolist()
    assert abs(np.corrcoef(slots, means)[0, 1]) < 0.07


@pytest.mark.parametrize(
    "chosen", [each for each in RECIPES if each.place != "chunkflow"], ids=lambda recipe: recipe.name
)
def test_order_can_be_preserved_and_displacement_is_told(chosen: Recipe) -> None:
    """The same packs either way; preserved, documents ascend within a pack and come nearer to where they were admitted."""
    rng = np.random.default_rng(2)
    lengths = Lengths.from_array(np.clip(rng.lognormal(3, 1, 400), 1, 256).astype(np.int64))
    options = {"max_tokens_per_rank": 256, "dp": 2, "cp": 2, "documents_per_step": 400, "shuffle": False, "cost": cost}
    if isinstance(chosen.options, WlbQueues):
        options["evaluation"] = True
    shuffled = BalancedBatchSampler(lengths, chosen, **options).plan(0)
    kept = BalancedBatchSampler(lengths, chosen, order="preserve", **options).plan(0)
    kept.check()

    def packs(plan: StepPlan) -> list[list[int]]:
        return [sorted(plan.packs.take([pack]).spans.document.tolist()) for pack in range(len(plan.packs))]

    assert packs(kept) == packs(shuffled)
    for pack in range(len(kept.packs)):
        documents = kept.packs.take([pack]).spans.document
        assert (np.diff(documents[documents >= 0]) >= 0).all()
    assert kept.displacement <= shuffled.displacement and f"{kept.displacement:.2f} of the step" in str(kept)


def test_pools_level_what_their_replicas_share() -> None:
    """With pools of 4 of 8 replicas the sums of the two pools are level in every slot, far below single replicas."""
    rng = np.random.default_rng(3)
    lengths = Lengths.from_array(np.clip(rng.lognormal(6, 1.6, 3000), 8, 8192).astype(np.int64))
    options = {"max_tokens_per_rank": 8192, "dp": 8, "packs_per_step": 64, "sync": "slot", "cost": cost}
    pooled = BalancedBatchSampler(lengths, recipe("vrsp", options=Vrsp(pool_size=4)), **options).plan(0)
    sums = pooled.loads().cost.reshape(2, 4, -1).sum(1)
    single = BalancedBatchSampler(lengths, recipe("vrsp"), **options).plan(0).loads().cost
    assert (sums.max(0).sum() / sums.mean(0).sum()) < 1.02 < single.max(0).sum() / single.mean(0).sum()
    with pytest.raises(ValueError, match="pools of 3 replicas must divide dp; got dp=8"):
        BalancedBatchSampler(lengths, recipe("vrsp", options=Vrsp(pool_size=3)), **options)


def test_concat_fills_every_pack_but_the_last() -> None:
    lengths = Lengths.from_array(np.array([5, 9, 2, 30, 1, 17]))
    sampler = BalancedBatchSampler(
        lengths, recipe("static", pack="concat"), max_tokens_per_rank=8, dp=1, documents_per_step=12, too_long="split"
    )
    tokens = np.sort(sampler.plan(0).packs.tokens)
    assert tokens.tolist() == [8] * 8


def test_mixes_are_checked_by_naming_both_halves() -> None:
    with pytest.raises(ValueError, match=r"shard='whole' and attend='ring' do not fit"):
        recipe("static", shard="whole")
    with pytest.raises(ValueError, match=r"recipe must be one of static, wlb, .*; got 'wbl'"):
        recipe("wbl")
    with pytest.raises(ValueError, match=r"pack must be one of .*; got 'bestfit'"):
        recipe("static", pack="bestfit")
    with pytest.raises(ValueError, match="needs cp=1, got cp=2"):
        make(
            [5], recipe("static", shard="whole", attend="none"), dp=1, cp=2, max_tokens_per_rank=8, documents_per_step=1
        )
    with pytest.raises(ValueError, match=r"pack='gds' and place='vrsp' do not fit: pack='gds' goes with place='gds'"):
        recipe("skrull", place="vrsp")
    with pytest.raises(ValueError, match="take options of type FlexSp; got ChunkFlow"):
        recipe("flexsp", options=ChunkFlow())
    assert recipe("static", pack="best_fit") == recipe("static")
    assert recipe("wlb", place="in_order").name == "wlb+place=in_order"


def test_fixed_slots_that_cannot_hold_a_step_say_what_would() -> None:
    sampler = make([8] * 9, recipe("static"), dp=2, max_tokens_per_rank=8, documents_per_step=9, slots=4)
    assert sampler is not None
    with pytest.raises(ValueError, match=r"slots=4 on 2 replicas make 8 packs.*needs 9 for its 72 tokens: raise slots"):
        sampler.plan(0)
    with pytest.raises(ValueError, match="packs_per_step must be dp x slots"):
        make([8] * 9, recipe("wlb"), dp=2, max_tokens_per_rank=8, packs_per_step=3)


@pytest.mark.parametrize("attend", ["ring", "direct", "gather", "groupcast"])
@pytest.mark.parametrize(
    "shard", ["zigzag", "zigzag_sequence", "contiguous", "striped", "adaptive", "mixed", "dacp", "dispatch", "joint"]
)
def test_what_attends_fits_every_rule_that_cuts(shard: str, attend: str) -> None:
    chosen, cu = recipe("static", shard=shard, attend=attend), np.array([0, 9, 10, 23])
    plan = chosen.attention(chosen.shards(cu, 3), (3, 4, 5), 1)
    plan.check(cu)
    assert plan.ranks == (3, 4, 5) and plan.rank == 1
    passed_on = (plan.moves[:, 2] == (plan.moves[:, 3] - 1) % 3).all()
    assert passed_on or attend != "ring"
    assert not passed_on or (shard, attend) != ("zigzag", "direct")
    if attend != "groupcast" and shard not in ("dispatch", "joint"):
        assert plan.stages == (2 if attend == "gather" or shard == "contiguous" else 3)


def test_ulysses_inside_another_attention() -> None:
    """Groups of neighbours hold the shards of fewer ranks, divided; a planned group takes the common divisor."""
    cu_seqlens = np.array([0, 3, 40, 77])
    for chosen in (
        recipe("static", ulysses=2),
        recipe("dynamic_cp", ulysses=4),
        recipe("vrsp", attend="gather", ulysses=1),
    ):
        for cp in (1, 2, 4, 6):
            inside, shards = chosen.trading(cp), chosen.shards(cu_seqlens, cp)
            assert inside == np.gcd(chosen.ulysses or 1, cp)
            whole = replace(chosen, ulysses=None).shards(cu_seqlens, cp // inside)
            for group in range(cp // inside):
                held = [shards.positions(rank) for rank in range(group * inside, (group + 1) * inside)]
                assert np.array_equal(np.concatenate(held), whole.positions(group))
                assert max(map(len, held)) - min(map(len, held)) <= 1
            plan = chosen.attention(shards, tuple(range(cp)), 0)
            assert getattr(plan, "degree", 1) == inside
    assert recipe("static", ulysses=2).layout == "zigzag in groups of 2" and recipe("static").layout == "zigzag"


def test_dacp_holds_documents_whole_in_a_group() -> None:
    """A group of two ranks takes what two ranks may hold."""
    chosen, spans = recipe("skrull", ulysses=2), Spans.whole(np.array([30, 7, 8, 5]), np.array([465, 28, 36, 15]))
    decision = chosen.decide(spans, 4, Cluster(dp=1, cp=4, max_tokens_per_rank=13), cost)
    shards = chosen.shards(np.array([0, 30, 37, 45, 50]), 4, decision, 13)
    assert decision is not None and decision.max() <= 1 and shards.tokens().max() <= 13


@pytest.mark.parametrize(
    "choice,message",
    [
        ({"attend": "ulysses", "ulysses": 2}, "inside attend='ring' or 'direct' or 'gather'"),
        ({"attend": "none", "ulysses": 2}, "inside attend="),
        ({"ulysses": 0}, "at least 1, inside"),
    ],
)
def test_ulysses_inside_nothing_is_refused(choice: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("static", **choice)


def test_ulysses_that_does_not_fit_the_ranks_is_refused() -> None:
    lengths = Lengths.from_array(np.array([5, 9]))
    with pytest.raises(ValueError, match="ulysses=2 must divide cp; got cp=3"):
        BalancedBatchSampler(
            lengths, recipe("static", ulysses=2), max_tokens_per_rank=9, dp=1, cp=3, documents_per_step=2
        )
    with pytest.raises(ValueError, match="pad_tp lays documents out"):
        recipe("static", ulysses=2).check_cluster(Cluster(dp=1, cp=4, max_tokens_per_rank=9, pad_tp=1))


def test_groups_of_flexsp_stay_within_the_heads() -> None:
    chosen = recipe("flexsp", options=FlexSp(model=SpModel.preset("gpt-7b"), max_group=4))
    assert chosen.longest(Cluster(dp=8, cp=1, max_tokens_per_rank=100)) == 400
    with pytest.raises(ValueError, match="max_group is a number of ranks"):
        FlexSp(model=SpModel.preset("gpt-7b"), max_group=0)
    with pytest.raises(ValueError, match=r"4 ranks hold 400 \(max_group=4\)"):
        flexsp(np.array([401]), num_ranks=8, cap=100, options=FlexSp(model=SpModel.preset("gpt-7b"), max_group=4))


@pytest.mark.parametrize("shard", ["dispatch", "joint"])
def test_chunks_that_are_dealt_out_stay_within_a_cap_that_the_pack_fills(shard: str) -> None:
    """130 tokens on 12 ranks of 11: chunks of two do not fill a rank of eleven, so one is cut."""
    shards = recipe("magi", shard=shard).shards(np.array([0, 97, 130]), 12, None, 11)
    assert shards.tokens().max() == 11 and shards.tokens().sum() == 130
