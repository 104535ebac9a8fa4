"""Plans that nobody would make (placed.py), proved on paper, whole and in parts; and with anything dropped, doubled or shifted refused.

python -m pytest tests/attention/test_placed_proof.py
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from equipoise.attention.agreement import WORD, words
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.plan import KV, AttentionPlan
from equipoise.attention.routing import direct, part_of
from equipoise.packing.mask_kinds import sliding_window
from equipoise.packing.masks import Mask
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.attention.draws import PROMISE
from tests.attention.placed import Placed, drawn, mask_of

CASES = st.builds(
    Placed,
    seed=st.integers(0, 10**6),
    world=st.integers(1, 5),
    groups=st.integers(1, 3),
    packs=st.integers(1, 2),
    stages=st.integers(2, 5),
    tokens=st.just(16),
)


@PROMISE
@given(CASES)
def test_random_plans_are_proved_whole_and_in_parts(case):
    plan, mask = drawn(case), mask_of(case)
    plan.check(mask)
    assert plan.loads().pairs.sum() == case.groups * mask.pairs().sum()
    parts = [part_of(plan, rank) for rank in range(case.world)]
    for part in parts:
        part.check(mask)
    said = [words(part, rank, "") for rank, part in enumerate(parts)]
    assert len({s[:2] for s in said}) == 1 and sum(s[2] for s in said) % WORD == 0
    windowed = plan.windowed(3)
    windowed.check(mask & sliding_window(mask.tokens, 3, ahead=plan.tokens))
    moved, cut = plan.loads(), windowed.loads()
    assert np.all(cut.rows_sent <= moved.rows_sent) and np.all(cut.q_rows_returned <= moved.q_rows_returned)
    other = replace(plan, head_groups=plan.head_groups + 1)
    assert words(other, 0, "")[0] != said[0][0]


@PROMISE
@given(CASES, st.sampled_from(["tiles", "moves", "returns"]), st.sampled_from(["drop", "double", "shift"]), st.data())
def test_a_plan_with_anything_dropped_doubled_or_shifted_is_refused(case, name, how, data):
    plan, mask = drawn(case), mask_of(case)
    array = getattr(plan, name)
    assume(len(array))
    at = data.draw(st.integers(0, len(array) - 1))
    if name == "moves" and how == "drop":
        # One that only lets rows lie may go.
        assume(needed(plan, at))
    changed = array.copy()
    if how == "drop":
        changed = np.delete(array, at, axis=0)
    elif how == "double":
        changed = np.concatenate([array, array[at : at + 1]])
    else:
        columns = data.draw(st.sampled_from([[4, 5], [2, 3]] if name == "tiles" else [[4, 5]]))
        changed[at, columns] += data.draw(st.sampled_from([-1, 1]))
    assume(how != "shift" or name != "moves" or needed(plan, at))
    broken = replace(plan, **{name: changed})
    if name == "tiles" and np.array_equal(pairs_of(plan), pairs_of(broken)):
        return
    with pytest.raises(ValueError) as error:
        broken.check(mask)
    assert re.search(r"\d", str(error.value))


def needed(plan: AttentionPlan, at: int) -> bool:
    """Whether every row of a move is used, or passed on, by its receiver."""
    _, kind, _, rank, start, stop = plan.moves[at].tolist()
    back = plan.returns[(plan.returns[:, 1] == kind) & (plan.returns[:, 2] == rank)]
    used = {row for a, b in back[:, 4:].tolist() for row in range(a, b)}
    return all(row in used for row in range(start, stop))


def pairs_of(plan: AttentionPlan) -> np.ndarray:
    """How often each pair is computed, int[queries, keys]."""
    size = plan.tokens * plan.head_groups
    times = np.zeros((size + 2, size + 2), int)
    for _, _, q0, q1, k0, k1, lo, hi in plan.tiles.tolist():
        away = np.arange(q0, q1)[:, None] - np.arange(k0, k1)
        times[q0 + 1 : q1 + 1, k0 + 1 : k1 + 1] += ((lo <= away) & (away <= hi))[
            : max(size + 1 - q0, 0), : size + 1 - k0
        ]
    return times


def small() -> tuple[AttentionPlan, Mask]:
    """Rank 1 computes for queries of rank 0, in two head groups."""
    tiles = np.array(
        [[0, 0, 0, 4, 0, 4, 0, 9], [1, 1, 8, 12, 8, 12, 0, 9], [1, 0, 4, 8, 4, 8, 0, 9], [1, 0, 12, 16, 12, 16, 0, 9]]
    )
    offsets, home = np.array([0, 1, 2]), np.array([[0, 4], [4, 8]])
    moves, returns = direct(tiles, offsets, home, 8, head_groups=2)
    plan = AttentionPlan(
        ranks=(0, 1),
        tokens=8,
        home_offsets=offsets,
        home=home,
        tiles=tiles,
        moves=moves,
        returns=returns,
        head_groups=2,
    )
    causal = np.array([[0, 4, 0, 4, 0, 9], [0, 4, 0, 4, 0, 9]])
    return plan, Mask(tokens=np.array([4, 4]), offsets=np.array([0, 1, 2]), tiles=causal)


@pytest.mark.parametrize(
    "name,row,column,value,says",
    [
        ("tiles", 1, 1, 0, "query 8 has not arrived"),
        ("tiles", 2, 0, 0, "query 4 is not at home there and never arrives"),
        ("tiles", 1, 4, 7, "not of one of the 2 head groups of 8 tokens"),
        ("tiles", 1, 5, 17, "outside of the 2 x 8 tokens of 2 head groups"),
        ("tiles", 3, 6, 1, r"Head group 1: Pair \(query 4, key 4\) on rank 1 is never computed \(4 such pairs"),
        ("moves", 1, 0, 2, "query 8 has not arrived"),
        ("moves", 1, 1, KV, "has row 8 already"),
        ("returns", 1, 0, 0, "uses Q row 8 last in stage 1 and returns its output in stage 0"),
        ("returns", 1, 5, 11, r"uses Q row 11 last in stage 1 and returns its output in stage -1"),
        ("returns", 0, 5, 11, r"uses KV row 11 last in stage 1 and returns its gradient in stage -1"),
        ("returns", 1, 3, 1, "No such return"),
    ],
)
def test_what_is_wrong_is_named(name, row, column, value, says):
    plan, mask = small()
    plan.check(mask)
    array = getattr(plan, name).copy()
    array[row, column] = value
    with pytest.raises(ValueError, match=says):
        replace(plan, **{name: array}).check(mask)


@pytest.mark.parametrize(
    ("row", "column", "value", "says"),
    [
        (0, 0, 2, r"Stage 2: row 0 returns to rank 1, which is not its home and sends it on in stage 2 \(-1: never\)"),
        (0, 3, 3, "Stage 1: row 0 returns to rank 3, which is not its home and was never sent it"),
        (1, 4, 2, r"Stage 1: row 0 returns to rank 1, .* sends it on in stage -1"),
        (0, 3, 0, None),
    ],
)
def test_sums_on_their_way_home_go_on_after_they_came(row, column, value, says):
    """Rank 2 gives its gradients to rank 1, which sends the sum home."""
    tiles, home = [[1, 1, 4, 8, 0, 4, 0, 9], [2, 1, 8, 12, 0, 4, 0, 99]], [[0, 4], [4, 8], [8, 12], [12, 16]]
    returns = np.array([[1, KV, 2, 1, 0, 4], [2, KV, 1, 0, 0, 4]])
    plan = AttentionPlan(
        ranks=(0, 1, 2, 3),
        tokens=16,
        home_offsets=np.arange(5),
        home=np.array(home),
        tiles=np.array(tiles),
        moves=np.array([[1, KV, 0, 1, 0, 4], [1, KV, 0, 2, 0, 4]]),
        returns=returns,
    )
    mask = Mask.of_slices(16, [(4, 8, 0, 4, 0), (8, 12, 0, 4, 0)])
    plan.check(mask)
    changed = returns.copy()
    changed[row, column] = value
    broken = replace(plan, returns=changed)
    if says is None:
        return broken.check(mask)
    with pytest.raises(ValueError, match=says):
        broken.check(mask)


def test_kinds_groups_and_heads_that_do_not_fit_are_refused():
    plan, _ = small()
    with pytest.raises(ValueError, match=r"AttentionPlan.moves are of KV, 0, or of Q, 1; got kinds \[2\]"):
        replace(plan, moves=np.array([[1, 2, 0, 1, 0, 4]]))
    with pytest.raises(ValueError, match="at least one head group; got head_groups=0"):
        replace(plan, head_groups=0)
    with pytest.raises(ValueError, match="2 head groups needs heads that 2 divides; got 6 query heads over 3 KV heads"):
        plan.bytes_moved(6, 3, 8, 2)
    assert "8 tokens x 2 head groups" in str(plan) and "Q rows received 0/4, returned 0/4" in str(plan)


def refused(rank: int, world: int) -> list[str]:
    """What attend says to heads that do not divide, and to a rank that has other groups; nothing is sent, or this would hang."""
    plan, _ = small()
    said, groups = [], CpGroups(1, world)
    for kv_heads, own in ((3, plan), (2, plan if rank == 0 else replace(plan, head_groups=1))):
        q, kv = torch.randn(4, 2 * kv_heads, 8), torch.randn(4, kv_heads, 8)
        try:
            attend(own, q, kv, kv, groups)
        except ValueError as error:
            said.append(str(error))
    groups.close()
    return said


def test_heads_that_do_not_divide_and_other_groups_are_refused_on_all_ranks(ranks):
    for heads, other in ranks.run(refused, 2):
        assert "needs heads that 2 divides" in heads
        assert "ranks [0, 1] have different plans: alike are [0] and [1]" in other and "AttentionPlan" in other
