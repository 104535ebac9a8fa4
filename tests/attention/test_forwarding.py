"""python -m pytest tests/attention/test_forwarding.py"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from equipoise import recipe
from equipoise.attention.blocks import Blocks
from equipoise.attention.forwarding import forwarded, nodes_of, traffic_between
from equipoise.attention.groupcast import Overlap, groupcast_plan
from equipoise.attention.plan import KV, Q
from equipoise.attention.routing import direct, part_of
from equipoise.packing.dispatch import dispatch
from equipoise.packing.mask_kinds import causal, sliding_window
from equipoise.packing.shards import zigzag
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE, assert_part
from tests.attention.placed import Placed, drawn, errors, mask_of, run
from tests.attention.test_groupcast import masked, needed, overlaps
from tests.attention.test_placed import assert_as_planned, cases_of
from tests.attention.test_routing import placed, rows, used


def crossings(routes: np.ndarray, nodes: np.ndarray, kind: int, side: int) -> dict[tuple[int, int], int]:
    """How often each row of a kind enters (side 3) or leaves (side 2) each node from, or to, another: {(node, row): times}."""
    times: dict[tuple[int, int], int] = {}
    for route in routes.tolist():
        if route[1] == kind and nodes[route[2]] != nodes[route[3]]:
            for row in range(route[4], route[5]):
                key = int(nodes[route[side]]), row
                times[key] = times.get(key, 0) + 1
    return times


def assert_once_a_node(moves, returns, needs: set[tuple[int, int, int]], owner: np.ndarray, nodes: np.ndarray) -> None:
    """needs: (kind, rank, row) of what pairs need elsewhere. Each is moved once to each rank, each row once into each node and out of it."""
    assert {(kind, dst, row) for _, kind, _, dst, row in rows(moves)} == needs and len(rows(moves)) == len(needs)
    assert {(kind, src, row) for _, kind, src, _, row in rows(returns)} == needs and len(rows(returns)) == len(needs)
    for kind in (KV, Q):
        foreign = {(int(nodes[r]), x) for k, r, x in needs if k == kind and nodes[r] != nodes[owner[x]]}
        assert crossings(moves, nodes, kind, 3) == crossings(returns, nodes, kind, 2) == dict.fromkeys(foreign, 1)


@PROMISE
@given(placed(), st.integers(1, 3), st.booleans())
def test_a_row_enters_a_node_once_and_what_comes_of_it_leaves_it_once(drawn, per_node, mixed):
    tiles, offsets, home, tokens, groups, owner = drawn
    nodes = np.arange(len(offsets) - 1) % per_node if mixed else np.arange(len(offsets) - 1) // per_node
    staged, moves, returns = forwarded(tiles, offsets, home, tokens, nodes=nodes, head_groups=groups)
    assert np.array_equal(np.delete(staged, 1, axis=1), np.delete(tiles, 1, axis=1))
    assert np.isin(staged[:, 1] - tiles[:, 1], (0, 1)).all()
    whole = np.tile(owner, groups)
    away = {key: stages for key, stages in used(staged, tokens * groups).items() if whole[key[2]] != key[1]}
    assert_once_a_node(moves, returns, set(away), whole, nodes)
    came = {(kind, dst, x): (stage, src) for stage, kind, src, dst, x in rows(moves)}
    went = {(kind, src, x): (stage, dst) for stage, kind, src, dst, x in rows(returns)}
    for (kind, rank, x), stages in away.items():
        stage, src = came[kind, rank, x]
        over = src != whole[x]
        assert 1 <= stage <= min(stages)
        assert not over or (nodes[src] == nodes[rank] and came[kind, src, x][0] < stage)
        stage, dst = went[kind, rank, x]
        assert (stage == max(stages) and dst == src) if over else (stage >= max(stages) and dst == whole[x])
        assert not over or went[kind, src, x][0] > stage
    before = used(tiles, tokens * groups)
    for tile, was in zip(staged.tolist(), tiles.tolist(), strict=True):  # no tile is put off without need
        if tile[1] > was[1]:
            mine = [(k, tile[0], x) for k, r, x in used(np.array([tile]), tokens * groups)]
            assert any(key in came and came[key][1] != whole[key[2]] and min(before[key]) == was[1] for key in mine)


@PROMISE
@given(masked(), overlaps(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_group_casts_of_any_mask_send_rows_between_nodes_as_often_as_nodes_need_them(drawn, overlap, per_node, random):
    mask, matrix, shards = drawn
    ranks = list(range(2 * shards.cp_size))
    random.shuffle(ranks)
    ranks = tuple(ranks[: shards.cp_size])
    overlap = replace(overlap, devices_per_node=per_node)
    plan, straight = (
        groupcast_plan(shards, ranks, mask=mask, overlap=o) for o in (overlap, replace(overlap, devices_per_node=None))
    )
    plan.check(mask)
    nodes, owner = nodes_of(ranks, per_node), np.zeros(plan.tokens, np.int64)
    for rank in range(shards.cp_size):
        owner[shards.positions(rank)] = rank
    needs = needed(matrix, shards)
    assert_once_a_node(plan.moves, plan.returns, {(KV, *need) for need in needs}, owner, nodes)
    foreign = {(nodes[rank], x) for rank, x in needs if nodes[rank] != nodes[owner[x]]}
    between = traffic_between(plan, nodes).by_rank
    assert between.sum(axis=1).tolist() == [len(foreign)] * 4
    inside, before = (
        p.loads().rows_received.sum() - traffic_between(p, nodes).by_rank[1].sum() for p in (plan, straight)
    )
    assert np.array_equal(plan.loads().rows_received, straight.loads().rows_received)
    assert inside - before == traffic_between(straight, nodes).by_rank[1].sum() - len(foreign)
    assert plan.tiles[:, 1].max(initial=0) <= straight.tiles[:, 1].max(initial=0) + 1
    assert plan.loads().pairs.tolist() == straight.loads().pairs.tolist()
    for rank in range(min(2, shards.cp_size)):
        part = groupcast_plan(shards, ranks, rank, mask=mask, overlap=overlap)
        assert_part(part, plan)
        part.check(mask)
    if mask.tokens.max(initial=0) > 3:
        plan.windowed(3).check(mask & sliding_window(mask.tokens, 3))


@PROMISE
@given(
    st.builds(
        Placed,
        seed=st.integers(0, 10**6),
        world=st.integers(2, 6),
        groups=st.integers(1, 3),
        packs=st.integers(1, 2),
        stages=st.integers(2, 5),
        tokens=st.just(16),
        nodes=st.integers(1, 3),
    )
)
def test_random_plans_are_proved_whole_in_parts_and_windowed(case):
    plan, mask = drawn(case), mask_of(case)
    plan.check(mask)
    for rank in range(case.world):
        part_of(plan, rank).check(mask)
    plan.windowed(3).check(mask & sliding_window(mask.tokens, 3, ahead=plan.tokens))


@pytest.mark.parametrize("cp", [8, 16])
def test_receivers_of_a_node_receive_alike(cp):
    """From other nodes."""
    shards = zigzag([0, 120_000], cp)
    nodes = np.arange(cp) // 4
    plan = groupcast_plan(shards, tuple(range(cp)), overlap=Overlap(devices_per_node=4))
    received = traffic_between(plan, nodes).by_rank[1].reshape(-1, 4)
    assert np.all(received.max(axis=1) <= 1.1 * received.mean(axis=1))


@pytest.mark.parametrize("world", [4, 6])
def test_forwarded_rows_and_sums_are_exact_and_as_counted(ranks, world):
    cases = cases_of(world, 7, nodes=2, window=None)
    by_rank = ranks.run(run, world, cases)
    passed_on = 0
    for case, parts in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert max(errors(case, [results for results, _, _ in parts]).values()) <= 1e-12, case
        assert_as_planned(case, parts)
        plan = drawn(case)
        plain = direct(plan.tiles, plan.home_offsets, plan.home, plan.tokens, head_groups=plan.head_groups)
        nodes = np.arange(world) // 2
        passed_on += traffic_between(replace(plan, moves=plain[0], returns=plain[1]), nodes).by_rank[2].sum()
        passed_on -= traffic_between(plan, nodes).by_rank[2].sum()
    assert passed_on > 0


RECIPES = [
    ("magi", {"overlap": Overlap(devices_per_node=2)}),
    ("dcp", {"blocks": Blocks(devices_per_node=2, block=16)}),
]


@pytest.mark.parametrize(("name", "options"), RECIPES)
def test_recipes_forward(name, options):
    """magi and dcp, over ranks that are whole nodes and over such that are not."""
    cu = np.cumsum([0, 700, 31, 60])
    for ranks in ((0, 1, 2, 3), (3, 4, 5, 6)):
        parts = [recipe(name, **options).laid_out(cu, ranks, rank)[1] for rank in range(4)]
        for part in parts:
            part.check(cu)
        for kind in (KV, Q):
            entries = [crossings(p.moves[p.moves[:, 3] == p.rank], nodes_of(ranks, 2), kind, 3) for p in parts]
            assert sum(map(len, entries)) == len(set().union(*entries)), "each row enters a node once"
    with pytest.raises(ValueError, match="overlap says how attend='groupcast' chooses stages; got attend='ring'"):
        recipe("static", overlap=Overlap())


def test_nodes_that_are_none_are_refused():
    with pytest.raises(ValueError, match="A node has at least one rank; got devices_per_node=0"):
        Overlap(devices_per_node=0)
    with pytest.raises(ValueError, match="A node has at least one rank; got devices_per_node=0"):
        nodes_of([0, 1], 0)
    with pytest.raises(ValueError, match="an entry for each of 2 ranks; got 3"):
        forwarded([], [0, 1, 2], [[0, 4], [4, 8]], 8, nodes=[0, 0, 1])
    assert nodes_of((6, 2, 9), 4).tolist() == [1, 0, 2]
    assert groupcast_plan(dispatch([0, 40], 2), (0, 1), overlap=Overlap(devices_per_node=1)).check(causal([40])) is None
