"""TAP: proven on paper over drawn pools, balanced as far as blocks allow, exact over gloo ranks.

python -m pytest tests/attention/test_tiles.py
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from equipoise.attention import migration
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.plan import KV, AttentionPlan, Q
from equipoise.attention.routing import NO_LIMIT
from equipoise.attention.tiles import KV_COST, Q_COST, Tap, kernel_work, tap_plan
from equipoise.attention.traffic import evenness
from equipoise.packing.efficiency import efficiency
from equipoise.packing.mask_areas import chunk_pairs
from equipoise.packing.mask_kinds import causal
from equipoise.packing.masks import Mask
from equipoise.packing.shards import Shards, contiguous
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, shards_of
from tests.attention.oracle import LAYOUTS, Case, one_process, relative
from tests.packing.mask_draws import masks as drawn_masks


@dataclass(frozen=True, kw_only=True)
class Pool:
    """CP groups of these sizes, each with documents of these lengths."""

    packs: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    layout: str = "contiguous"
    head_groups: int = 1
    block: int = 4
    tolerance: float = 1.05
    heads_first: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(sum(self.sizes)))

    @property
    def shards(self) -> list[Shards]:
        cut = [np.concatenate([[0], np.cumsum(pack, dtype=np.int64)]).astype(np.int64) for pack in self.packs]
        return [shards_of(self.layout, cu, size) for cu, size in zip(cut, self.sizes, strict=True)]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the documents of all packs, end to end."""
        return sum(self.packs, ())

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)

    def plan(self, rank: int | None = None, **options) -> AttentionPlan:
        stated = {name: getattr(self, name) for name in ("head_groups", "block", "tolerance", "heads_first")}
        return tap_plan(self.shards, self.ranks, rank, **{**stated, **options})


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    packs = [tuple(draw(st.lists(st.integers(0, 24), max_size=4))) for _ in sizes]
    return Pool(
        packs=tuple(packs),
        sizes=tuple(sizes),
        layout=draw(st.sampled_from(LAYOUTS)),
        head_groups=draw(st.integers(1, 4)),
        block=draw(st.integers(1, 8)),
        tolerance=draw(st.sampled_from([1.0, 1.05, 1.3, 2.0])),
        heads_first=draw(st.booleans()),
    )


@PROMISE
@given(pools())
def test_every_pair_once_every_row_in_time_and_no_rank_above_the_cap_but_for_blocks_that_no_one_else_could_take(pool):
    plan = pool.plan()
    plan.check(pool.cu_seqlens)
    load, P = plan.loads().pairs, len(pool.ranks)
    cap = round(1000 * pool.tolerance) * int(load.sum()) // (1000 * P)
    moved = {(src, row) for _, kind, src, _, a, b in plan.moves.tolist() if kind == Q for row in range(a, b)}
    for rank in np.flatnonzero(load > cap).tolist():
        for start, stop in blocks_of(plan, rank, pool.block):
            pairs = int(chunk_pairs(causal(pool.lengths).tiles_of_pack(), [start, stop])[0])
            at_home = any((rank, start + g * plan.tokens) not in moved for g in range(pool.head_groups))
            assert not at_home or pairs == 0 or int(load.min()) + pairs >= load[rank]


def blocks_of(plan: AttentionPlan, rank: int, block: int) -> list[tuple[int, int]]:
    """What a rank holds, touching ranges joined, in as few pieces of `block` or fewer as may be."""
    rows = np.sort(positions(plan, rank))
    made = []
    for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []:
        count = -(-len(run) // block)
        edges = [int(run[0]) + n * len(run) // count for n in range(count + 1)]
        made += pairwise(edges)
    return made


@PROMISE
@given(pools())
def test_where_blocks_are_small_queries_leave_ranks_above_the_cap_only_and_none_stays_there(pool):
    plan, before = pool.plan(), pool.plan(tolerance=float(len(pool.ranks)))
    load, now = before.loads().pairs, plan.loads().pairs
    mean = -(-int(load.sum()) // len(load))
    cap = round(1000 * pool.tolerance) * int(load.sum()) // (1000 * len(load))
    above = set(np.flatnonzero(load > cap).tolist())
    assert now.max(initial=0) <= load.max(initial=0)
    if not above:
        assert np.array_equal(plan.tiles, before.tiles) and np.array_equal(plan.moves, before.moves)
    edges = sorted({edge for rank in pool.ranks for edges in blocks_of(plan, rank, pool.block) for edge in edges})
    pairs = chunk_pairs(causal(pool.lengths).tiles_of_pack(), edges or [0])
    if pairs.max(initial=0) <= cap - mean:
        assert now.max(initial=0) <= cap
        assert set(plan.moves[plan.moves[:, 1] == Q, 2].tolist()) <= above


@PROMISE
@given(pools())
def test_without_migration_groups_keep_to_themselves(pool):
    plan = pool.plan(tolerance=float(len(pool.ranks)))
    group = np.repeat(np.arange(len(pool.sizes)), pool.sizes)
    assert not plan.moves_queries
    assert np.array_equal(group[plan.moves[:, 2]], group[plan.moves[:, 3]])
    if len(pool.cu_seqlens) > 1:
        assert plan.loads().pairs.sum() == pool.head_groups * causal(pool.lengths).pairs().sum()


@PROMISE
@given(pools(), st.integers(0, 11))
def test_a_rank_lists_its_part_and_knows_what_all_exchange(pool, rank):
    rank, whole = rank % len(pool.ranks), pool.plan()
    part = pool.plan(rank)
    part.check(pool.cu_seqlens)
    assert np.array_equal(part.tiles, whole.tiles[whole.tiles[:, 0] == rank])
    for kind in (KV, Q):
        for told, known in zip(part.traffic.of(kind), whole.traffic.of(kind), strict=True):
            assert np.array_equal(told, known)
    assert part.stages == whole.stages
    assert np.array_equal(pickle.loads(pickle.dumps(part)).tiles, part.tiles)


@PROMISE
@given(st.data(), st.lists(drawn_masks(largest=10), min_size=1, max_size=3), st.integers(1, 3))
def test_any_masks(data, drawn, head_groups):
    masks = [mask for mask, _ in drawn]
    sizes = [data.draw(st.integers(1, 2)) for _ in masks]
    shards = [contiguous(mask.cu_seqlens, size) for mask, size in zip(masks, sizes, strict=True)]
    options = {"masks": masks, "head_groups": head_groups, "block": 3, "tolerance": 1.0}
    plan = tap_plan(shards, tuple(range(sum(sizes))), **options)
    plan.check(Mask.concat(masks))
    if plan.tokens > 2:
        plan.windowed(2).check(Mask.concat(masks), window=2)


@PROMISE
@given(pools(), st.integers(1, 30))
def test_layers_with_a_window_are_balanced_anew_and_every_rank_lists_its_part_of_that(pool, window):
    whole = pool.plan().windowed(window)
    whole.check(pool.cu_seqlens, window)
    part = pool.plan(0).windowed(window)
    part.check(pool.cu_seqlens, window)
    assert np.array_equal(part.tiles, whole.tiles[whole.tiles[:, 0] == 0])


def test_one_giant_among_eight_packs_is_shared_by_all():
    lengths = [(4096,)] + [(64,) * 64] * 7
    pool = Pool(packs=tuple(lengths), sizes=(1,) * 8, block=128)
    for head_groups in (1, 4, 8):
        for heads_first in (False, True):
            plan = replace(pool, head_groups=head_groups, heads_first=heads_first).plan()
            pairs = plan.loads().pairs
            assert pairs.max() * 8 <= 1.05 * pairs.sum()
            assert set(plan.moves[:, 2].tolist()) == {0}, "keys and queries come from the rank with the giant alone"


@pytest.mark.parametrize("heads", [(8, 8, 64, 2), (32, 8, 128, 2), (16, 4, 96, 4), (64, 4, 128, 2, 64)])
@pytest.mark.parametrize("keep", [True, False])
def test_costs_of_rows_are_the_bytes_that_a_plan_moves(heads, keep):
    shape, values = heads[:4], heads[4] if len(heads) > 4 else None
    tap = Tap(head_groups=4, block=8).for_heads(*shape, value_dim=values, keep=keep)
    plan = Pool(packs=((128, 9), (4,) * 16, ()), sizes=(2, 1, 1), block=8, head_groups=4).plan(
        kv_cost=tap.kv_cost, q_cost=tap.q_cost
    )
    moved = sum(plan.bytes_moved(*shape, value_dim=values, backward=back, keep=keep) for back in (False, True))
    loads = plan.loads()
    assert loads.q_rows_sent.sum() > 0
    assert moved[0].sum(1).tolist() == [tap.kv_cost * loads.rows_sent.sum(), tap.q_cost * loads.q_rows_sent.sum()]


def test_the_costs_of_a_model_decide_what_moves():
    """With 32 query heads to a KV head a query weighs 37 keys: those go whose keys are many, whatever must follow them."""
    assert Tap().q_cost / Tap().kv_cost == pytest.approx(14 * 4 / 12, rel=0.05), (
        "the default: four query heads to a KV head"
    )
    pool, moved = Pool(packs=((96,), (48, 48), (4,) * 24), sizes=(1, 1, 2), head_groups=2, block=4), {}
    for name, heads in (("few", 2), ("many", 64)):
        tap = Tap(head_groups=2).for_heads(heads, 2, 128)
        loads = pool.plan(kv_cost=tap.kv_cost, q_cost=tap.q_cost).loads()
        moved[name] = int(loads.q_rows_received.sum()), int(loads.rows_received.sum())
    assert moved["many"][0] < moved["few"][0] and moved["many"][1] > moved["few"][1]
    with pytest.raises(ValueError, match="head_groups=4, 2 and 8"):
        Tap(head_groups=4).for_heads(8, 2, 64)


def test_head_groups_are_stages_and_each_arrives_while_the_one_before_is_computed():
    plan = Pool(packs=((64,), (4,) * 16), sizes=(1, 1), head_groups=4, block=8).plan()
    group = plan.moves[:, 4] // plan.tokens
    assert np.array_equal(plan.moves[:, 0], group + 1) and np.array_equal(
        plan.returns[:, 0], plan.returns[:, 4] // 128 + 1
    )
    own = plan.tiles[plan.tiles[:, 0] == 0]
    assert np.array_equal(own[:, 1], own[:, 2] // plan.tokens), "what is at home is computed in the stage of its group"


def test_whole_heads_go_first_and_move_more_queries_for_fewer_keys():
    pool = Pool(packs=((512,), (8,) * 64), sizes=(1, 1), head_groups=8, block=32)
    heads, cheapest = pool.plan(heads_first=True), pool.plan(heads_first=False)
    queries = [plan.moves[plan.moves[:, 1] == Q] for plan in (heads, cheapest)]
    whole = [np.bincount(x[:, 4] // 1024, x[:, 5] - x[:, 4], minlength=8) == 512 for x in queries]
    assert whole[0].sum() >= 3, "most of the head groups that move do so with all of the document"
    assert not whole[1].any()
    assert heads.loads().q_rows_received.sum() > cheapest.loads().q_rows_received.sum()
    assert heads.loads().rows_received.sum() <= cheapest.loads().rows_received.sum()
    cost = [
        KV_COST * plan.loads().rows_received.sum() + Q_COST * plan.loads().q_rows_received.sum()
        for plan in (heads, cheapest)
    ]
    assert cost[1] < cost[0], "which is why it is not the default"
    assert not Tap().heads_first


def test_kernel_seconds_are_balanced_on_request():
    """Of as many pairs, documents of 64 tokens take nine times as long as long ones."""
    pool = Pool(
        packs=((64,) * 2048, (2048,) * 8, (4096,) * 4, ()), sizes=(1,) * 4, head_groups=8, block=2048, tolerance=1.02
    )
    even = {}
    for by in ("pairs", "seconds"):
        plan = pool.plan(by=by)
        plan.check(pool.cu_seqlens)
        seconds = np.bincount(plan.tiles[:, 0], kernel_work(plan.tiles[:, 2:]), minlength=4)
        even[by] = evenness(plan.loads().pairs), seconds.max() / seconds.mean()
    assert even["pairs"][0] <= 1.02 < 1.15 < even["pairs"][1]
    assert even["seconds"][1] <= 1.06 < 1.1 < even["seconds"][0]


def test_kernel_work_is_pairs_over_the_share_of_the_best_speed():
    """Whole documents, an eighth of one, half a window without a causal edge; what a tile has no pairs for is not counted."""
    causal_of = lambda n: [0, n, 0, n, 0, NO_LIMIT]  # noqa: E731
    work = kernel_work(
        np.array([causal_of(16384), causal_of(64), [3584, 4096, 0, 4096, 0, NO_LIMIT], [0, 900, 0, 32, 0, 31]])
    )
    pairs = np.array([16384 * 16385 // 2, 64 * 65 // 2, 512 * 4096 - 512 * 511 // 2, 32 * 32])
    speed = np.array([370, 40, 324, float(efficiency(63, 32))])
    assert np.array_equal(work, np.ceil(pairs / (speed / 370)))


def test_of_very_many_blocks_those_with_the_most_pairs_may_move(monkeypatch):
    pool = Pool(packs=((64, 32), (1,) * 64), sizes=(2, 1), block=4, head_groups=2, tolerance=1.0)
    monkeypatch.setattr(migration, "MOST", 3)
    plan = pool.plan()
    plan.check(pool.cu_seqlens)
    moved = plan.moves[plan.moves[:, 1] == Q]
    rows = {row % plan.tokens for a, b in moved[:, 4:].tolist() for row in range(a, b)}
    assert rows and rows <= set(range(52, 64)), "the last 3 blocks of 4 of the long document"


def test_what_is_known_of_runs_is_asked_again_after_a_move():
    """Many donors and takers of several families, alike but for their room: none is filled beyond the cap, none gives twice."""
    rng = np.random.default_rng(11)
    for _ in range(20):
        packs = tuple(tuple(rng.integers(1, 400, rng.integers(1, 4)).tolist()) for _ in range(5))
        pool = Pool(packs=(*packs, (2,) * 40), sizes=(2, 1, 3, 1, 2, 1), block=2, head_groups=3, tolerance=1.02)
        plan = pool.plan()
        plan.check(pool.cu_seqlens)
        pairs = plan.loads().pairs
        assert pairs.max() * len(pairs) <= 1.02 * pairs.sum() + 800 * len(pairs)
        sent = plan.moves[plan.moves[:, 1] == Q]
        assert len(np.unique(sent[:, 4])) == len(sent)


def test_a_rank_that_has_the_keys_already_is_preferred():
    """Rank 1's surplus could go to ranks 2 and 3 alike, or to rank 0, which holds the first half of the document."""
    plan = Pool(packs=((64,), (4,) * 8), sizes=(2, 2), block=4, tolerance=1.4).plan()
    queries = plan.moves[plan.moves[:, 1] == Q]
    assert len(queries) and set(queries[:, 2].tolist()) == {1} and queries[0, 3] == 0


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"ranks": (0, 1)}, r"CP groups, of \[1, 2\] ranks; got 2 ranks"),
        ({"rank": 3}, "rank is an index into the pool, 0 … 2; got 3"),
        ({"masks": [causal([4]), causal([5])]}, r"packs of \[4, 6\] and masks of \[4, 5\]"),
        ({"masks": [causal([4])]}, "a mask of its tokens"),
        ({"head_groups": 0}, "head_groups=0"),
        ({"block": 0}, "block=0"),
        ({"tolerance": 0.9}, "tolerance=0.9"),
        ({"by": "tokens"}, "'pairs' or 'seconds'; got 'tokens'"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"shards": []}, "CP groups, of"),
    ],
)
def test_what_is_refused(change, rule):
    stated = {"shards": [contiguous([0, 4], 1), contiguous([0, 6], 2)], "ranks": (0, 1, 2), **change}
    with pytest.raises(ValueError, match=rule):
        tap_plan(**stated)


def run_pools(rank: int, world: int, cases: list[tuple[Pool, Case]]) -> list[list[torch.Tensor]]:
    """This rank's out, dq, dk, dv."""
    groups, results = CpGroups(1, world), []
    for pool, case in cases:
        plan = pool.plan(rank)
        mine = torch.from_numpy(positions(plan, rank))
        q, k, v, dout = (x[mine] for x in case.inputs())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = attend(plan, *inputs, groups, **case.options())
        results.append([out.detach(), *torch.autograd.grad(out, inputs, dout)])
    groups.close()
    return results


def positions(plan: AttentionPlan, rank: int) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b) for a, b in plan.home_of(rank))])


PACKS = {
    (1, 1): [((31,), (3, 5, 2, 7)), ((24, 1), ()), ((), (13,)), ((0, 9, 0), (1,) * 9)],
    (2, 2): [((40,), (3, 5, 2, 7)), ((17, 2), ())],
    (1, 1, 1): [((31,), (3, 5), (9, 1)), ((), (29, 2), (4,) * 5)],
    (1, 3): [((9, 9), (37, 1))],
}


@pytest.mark.parametrize("sizes", PACKS)
def test_exact_over_groups_with_different_packs(ranks, sizes):
    cases = []
    for at, packs in enumerate(PACKS[sizes]):
        for layout in ("contiguous", "document"):
            for head_groups in (1, 2, 4):
                pool = Pool(packs=packs, sizes=sizes, layout=layout, head_groups=head_groups, block=3)
                assert pool.plan().moves_queries
                case = Case(lengths=pool.lengths, heads=8, kv_heads=4, keep=(at + head_groups) % 2 == 0)
                cases.append((replace(pool, heads_first=head_groups == 4), case))
    cases.append((cases[0][0], replace(cases[0][1], window=6)))
    once, again = (ranks.run(run_pools, sum(sizes), cases) for _ in range(2))
    for at, (pool, case) in enumerate(cases):
        plan = pool.plan()
        where = np.argsort(np.concatenate([positions(plan, rank) for rank in pool.ranks]))
        made = [torch.cat(parts)[where] for parts in zip(*(each[at] for each in once), strict=True)]
        for name, got, want in zip(("out", "dq", "dk", "dv"), made, one_process(case), strict=True):
            assert relative(got, want) < 1e-12, (pool, name)
        assert all(
            torch.equal(a, b) for x, y in zip(once, again, strict=True) for a, b in zip(x[at], y[at], strict=True)
        )
