"""python -m pytest tests/samplers/test_flexsp_milp.py    (needs the extra "solvers" for most)"""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest
from equipoise.samplers.flexsp import FlexSp, SpModel, flexsp
from equipoise.samplers.flexsp_milp import milp_groups
from equipoise.samplers.rank_groups import GroupRules, Groups, least_groups

SEVEN = SpModel.preset("gpt-7b")
PACKAGE = {"scip": "pyscipopt", "highs": "highspy"}


def partitions(total: int, sizes: list[int]) -> list[list[int]]:
    """Multisets of sizes whose sum is at most `total`."""
    if not sizes:
        return [[]]
    return [
        [sizes[0]] * k + rest
        for k in range(total // sizes[0] + 1)
        for rest in partitions(total - k * sizes[0], sizes[1:])
    ]


def optimum(work: np.ndarray, tokens: np.ndarray, rules: GroupRules) -> int:
    """The least makespan of all groups and assignments."""
    best = 2**62
    for sizes in partitions(rules.num_ranks, rules.sizes.tolist()):
        for homes in product(range(len(sizes)), repeat=len(work)):
            load, held = np.zeros((2, len(sizes)), np.int64)
            np.add.at(load, list(homes), work)
            np.add.at(held, list(homes), tokens)
            if (held <= rules.cap * np.array(sizes)).all():
                best = min(best, int((-(-(load + rules.token_units[sizes] * held) // np.array(sizes))).max()))
    return best


@pytest.mark.parametrize("solver", ["scip", "highs"])
def test_the_optimum_is_brute_forced(solver):
    pytest.importorskip(PACKAGE[solver])
    rng = np.random.default_rng(1)
    options = FlexSp(model=SEVEN, solver=solver, seconds=20, buckets=5)
    for tight in (False, True, False, True, True):
        tokens = rng.integers(500, 12000, 5)
        # With little room, memory decides and not time.
        rules = options.rules(4, int(tokens.sum() * (0.27 if tight else 0.5)))
        work = SEVEN.work(tokens)
        greedy = least_groups(work, tokens, rules)
        found = milp_groups(work, tokens, rules, greedy, options)
        best = optimum(work, tokens, rules)
        assert found.makespan == best <= greedy.makespan
        held = np.bincount(found.group, weights=tokens)
        assert (held <= rules.cap * found.size).all()


@pytest.mark.parametrize("solver", ["scip", "highs"])
def test_plans_hold_and_are_no_slower_than_the_greedys(solver):
    """With a limit on nodes, and not on time, the plan is the same each time."""
    pytest.importorskip(PACKAGE[solver])
    tokens = np.array([30000, 17000, 9000, 9000, 4000, 4000, 2000, 900, 800, 300])
    greedy, options = FlexSp(model=SEVEN, more_slots=0), FlexSp(model=SEVEN, more_slots=0, solver=solver, nodes=20)
    plans = [flexsp(tokens, num_ranks=16, cap=6000, options=o) for o in (greedy, options, options)]
    assert all((a == b).all() for a, b in zip(plans[1], plans[2], strict=True))
    held = np.add.reduceat(np.r_[tokens[plans[1].order], 0], plans[1].offsets[:-1]) * (np.diff(plans[1].offsets) > 0)
    assert (-(-held // plans[1].cp_size) <= 6000).all() and sorted(plans[1].order) == list(range(10))
    rules = options.rules(16, 6000)
    start = least_groups(SEVEN.work(tokens), tokens, rules)
    assert milp_groups(SEVEN.work(tokens), tokens, rules, start, options).makespan <= start.makespan


@pytest.mark.parametrize("solver", ["scip", "highs"])
def test_a_missing_solver_is_named(solver, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE[solver], None)
    with pytest.raises(
        ImportError, match=rf'solver="{solver}" needs {PACKAGE[solver]}: pip install "equipoise\[solvers\]"'
    ):
        flexsp([5, 4], num_ranks=2, cap=10, options=FlexSp(model=SEVEN, solver=solver))


@pytest.mark.parametrize("solver", ["scip", "highs"])
def test_memory_keeps_apart_what_time_would_put_together(solver):
    """Two ranks of 11 tokens: the two cheap documents of 10 and 9 would share one, and may not."""
    pytest.importorskip(PACKAGE[solver])
    rules = GroupRules.of(num_ranks=2, cap=11, token_units=[0, 0, -1])
    work, tokens = np.array([3, 1, 1]), np.array([1, 10, 9])
    start = Groups(np.array([0, 0, 1]), np.array([1, 1]), 5, 0)
    found = milp_groups(work, tokens, rules, start, FlexSp(model=SEVEN, solver=solver))
    assert found.makespan == 4 and found.group[1] != found.group[2]
