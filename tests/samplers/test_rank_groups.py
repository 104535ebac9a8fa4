"""python -m pytest tests/samplers/test_rank_groups.py

The numba search of `group_search.py` is held against a plain statement of its rule, and its promises are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from equipoise.samplers.rank_groups import GroupRules, best_groups, filled_slots, least_groups, loads, place
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass
class Group:
    size: int
    documents: list[int] = field(default_factory=list)


class ByHand:
    """The rule of rank_groups.py under one target, on lists; None of its searches is clever."""

    def __init__(self, work: list[int], tokens: list[int], rules: GroupRules, target: int) -> None:
        self.work, self.tokens, self.rules, self.target = work, tokens, rules, target
        self.groups: list[Group] = []  # in order of their (size, slack), the last to get there in front of its equals

    def slack(self, documents: list[int], size: int) -> int:
        units = sum(self.work[d] + int(self.rules.token_units[size]) * self.tokens[d] for d in documents)
        return size * self.target - units

    def fits(self, documents: list[int], size: int) -> bool:
        held = sum(int(self.rules.padded(self.tokens[d], size)) for d in documents)
        return self.slack(documents, size) >= 0 and held <= size * self.rules.cap

    def loose(self, group: Group) -> int:
        return self.slack(group.documents, group.size) // group.size

    def settle(self, group: Group, at: int) -> None:
        key = (group.size, self.slack(group.documents, group.size))
        while (
            at > 0
            and (self.groups[at - 1].size, self.slack(self.groups[at - 1].documents, self.groups[at - 1].size)) > key
        ):
            at -= 1
        self.groups.insert(at, group)

    def put(self, d: int, merging: bool = True) -> bool:
        free = self.rules.num_ranks - sum(g.size for g in self.groups)
        opened = next((c for c in self.rules.sizes.tolist() if self.fits([d], c)), 0)
        opened = opened if opened <= free else 0
        for at, group in enumerate(self.groups):
            if (opened == 0 or group.size <= opened) and self.fits([*group.documents, d], group.size):
                del self.groups[at]
                group.documents.append(d)
                self.settle(group, at)
                return True
        if opened:
            self.settle(Group(opened, [d]), len(self.groups))
            return True
        return merging and self.merge(d, free)

    def merge(self, d: int, free: int) -> bool:
        for size in self.rules.sizes.tolist():
            chosen: list[Group] = []
            while sum(g.size for g in chosen) + free < size:
                room = size - sum(g.size for g in chosen)
                able = [g for g in self.groups if g not in chosen and g.size <= room]
                if not able:
                    break
                # Of each size only the last in line is looked at; of these the loosest, the smallest of equals.
                last = {g.size: g for g in able}
                chosen.append(max(last.values(), key=lambda g: (self.loose(g), -g.size)))
            chosen = [g for g in self.groups if g in chosen]
            documents = [m for g in chosen for m in g.documents]
            if sum(g.size for g in chosen) + free >= size and self.fits([*documents, d], size):
                self.groups = [g for g in self.groups if g not in chosen]
                merged = Group(size, documents)
                self.settle(merged, len(self.groups))
                at = self.groups.index(merged)
                del self.groups[at]
                merged.documents.append(d)
                self.settle(merged, at)
                return True
        return False

    def run(self) -> list[Group] | None:
        order = sorted(range(len(self.work)), key=lambda d: -self.work[d])
        return self.groups if all(self.put(d) for d in order) else None


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], GroupRules]:
    """Work that tokens do and do not explain, caps from tight to loose, any number of ranks, with or without padding."""
    num_ranks, count = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    tokens = draw(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 60)), min_size=count, max_size=count))
    work = [t * t for t in tokens] if draw(st.booleans()) else draw(
        st.lists(st.integers(0, 12), min_size=count, max_size=count)
    )  # fmt: skip
    units = draw(st.sampled_from([None, [3 * max(c - 1, 0) for c in range(num_ranks + 1)]]))
    cap = draw(st.integers(1, 12)) + -(-sum(tokens) // num_ranks) + (max(tokens) if draw(st.booleans()) else 0)
    rules = GroupRules.of(
        num_ranks=num_ranks, cap=cap, degrees=draw(st.sampled_from(["any", "powers"])),
        pad=draw(st.sampled_from([0, 0, 2])), token_units=units,
    )  # fmt: skip
    return work, tokens, rules


def key(groups: list[Group]) -> list[tuple[int, list[int]]]:
    return sorted((g.size, sorted(g.documents)) for g in groups)


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from([0, 50, 300, 2000]))
def test_the_search_is_the_rule(problem, target):
    work, tokens, rules = problem
    mean = -(-sum(work) // rules.num_ranks)
    tried = mean + mean * target // 1000
    by_hand = ByHand(work, tokens, rules, tried).run()
    if by_hand is None:
        without_limit = sum(work) + int(rules.token_units.max()) * sum(tokens) + 1
        by_hand = ByHand(work, tokens, rules, without_limit).run()
    found = best_groups(work, tokens, rules, targets=(target,))
    if by_hand is None:
        assert found is None
        return
    assert found is not None
    groups = [Group(int(c), np.flatnonzero(found.group == g).tolist()) for g, c in enumerate(found.size)]
    assert key(groups) == key(by_hand)
    units = rules.token_units
    times = [-(-sum(work[d] + int(units[g.size]) * tokens[d] for d in g.documents) // g.size) for g in groups]
    assert found.makespan == max(times)
    assert found.rows == sum(tokens[d] * (g.size - 1) for g in groups for d in g.documents)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_filled_slots_take_what_fits_in_turn(problem):
    work, tokens, rules = problem
    slot, targets = filled_slots(work, tokens, rules)
    fits = all(rules.smallest(tokens))
    assert (len(targets) > 0) == fits
    if not fits:
        return
    by_hand, left = np.full(len(work), -1), sorted(range(len(work)), key=lambda d: -work[d])
    for number, target in enumerate(targets.tolist()):
        dear = work[left[0]] + int(rules.token_units[rules.sizes].max()) * tokens[left[0]]
        assert target == (dear // max(tokens[left[0]], 1) + 1) * rules.cap
        rule = ByHand(work, tokens, rules, target)
        for d in [d for d in left if rule.put(d, merging=False)]:
            by_hand[d] = number
        left = [d for d in left if by_hand[d] < 0]
    assert slot.tolist() == by_hand.tolist() and not left
    for number, target in enumerate(targets.tolist()):
        mine = np.flatnonzero(slot == number)
        groups = best_groups(np.array(work)[mine], np.array(tokens)[mine], rules, targets=(), first=target)
        assert groups is not None and groups.makespan <= target


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_cap_holds_and_ranks_suffice(problem):
    work, tokens, rules = problem
    found = best_groups(work, tokens, rules)
    if found is None:
        # Without padding, one group of all ranks holds whatever the ranks hold.
        assert rules.pad or sum(tokens) > rules.num_ranks * rules.cap
        return
    assert sorted(set(found.group.tolist())) == list(range(len(found.size))), "no group is empty"
    assert found.size.sum() <= rules.num_ranks and np.isin(found.size, rules.sizes).all()
    for g, c in enumerate(found.size):
        held = rules.padded(np.array(tokens)[found.group == g], c).sum()
        assert held <= rules.cap * c


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(1, 5))
def test_every_rank_runs_one_pack_per_slot_and_powers_are_aligned(problem, copies):
    work, tokens, rules = problem
    groups = best_groups(work, tokens, rules)
    if groups is None:
        return
    n = len(work)
    slots = [(np.arange(n) + n * k, groups) for k in range(copies)]
    every, all_tokens = np.array(work * copies, np.int64), np.array(tokens * copies, np.int64)
    plan = place(slots, every, rules.num_ranks)
    assert sorted(plan.order.tolist()) == list(range(n * copies))
    assert (np.diff(plan.slot) >= 0).all()
    for slot in range(copies):
        mine = plan.slot == slot
        assert plan.first_rank[mine].tolist() == np.cumsum([0, *plan.cp_size[mine][:-1]]).tolist()
        assert plan.cp_size[mine].sum() == rules.num_ranks
    powers = (plan.cp_size & (plan.cp_size - 1)) == 0
    if powers.all():
        assert (plan.first_rank % plan.cp_size == 0).all()
    idle = np.diff(plan.offsets) == 0
    assert (plan.cp_size[idle] == 1).all()
    spent = loads(plan, every, all_tokens, rules)
    assert spent.shape == (rules.num_ranks, copies) and spent.max() == groups.makespan


def makespan(groups: list[Group], work: list[int], tokens: list[int], rules: GroupRules) -> int:
    units = rules.token_units
    return max(-(-sum(work[d] + int(units[g.size]) * tokens[d] for d in g.documents) // g.size) for g in groups)


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_least_makespan_is_bisected(problem):
    work, tokens, rules = problem
    found = least_groups(work, tokens, rules, rounds=30)
    mean = -(-sum(work) // rules.num_ranks)
    best = ByHand(work, tokens, rules, sum(work) + int(rules.token_units.max()) * sum(tokens) + 1).run()
    assert (found is None) == (best is None)
    if best is None:
        return
    low, high = mean - 1, makespan(best, work, tokens, rules)
    while high - low > max(1, low // 1000):
        tried = ByHand(work, tokens, rules, (low + high) // 2).run()
        if tried is None:
            low = (low + high) // 2
        else:
            best, high = tried, makespan(tried, work, tokens, rules)
    assert found.makespan == high
    groups = [Group(int(c), np.flatnonzero(found.group == g).tolist()) for g, c in enumerate(found.size)]
    assert key(groups) == key(best)


def test_busier_groups_go_to_ranks_that_did_less():
    rules = GroupRules.of(num_ranks=2, cap=100)
    work = np.array([9, 1, 9, 1])
    groups = best_groups(work[:2], work[:2], rules, targets=(900,))
    plan = place([(np.array([0, 1]), groups), (np.array([2, 3]), groups)], work, 2)
    assert loads(plan, work, work, rules).sum(1).tolist() == [10, 10]


def test_what_a_rank_did_is_its_share_of_a_groups_work():
    """Two ranks did 5 each of a document of 10, two did 6: the document of 9 goes to one of the first two."""
    rules = GroupRules.of(num_ranks=4, cap=100)
    work = np.array([10, 6, 6, 9, 8, 7, 7])
    first = best_groups(work[:3], np.ones(3), rules, targets=(100,))
    assert sorted(first.size.tolist()) == [1, 1, 2]
    second = best_groups(work[3:], np.ones(4), rules, targets=(500,))
    plan = place([(np.arange(3), first), (np.arange(3, 7), second)], work, 4)
    assert loads(plan, work, np.ones(7, np.int64), rules).sum(1).tolist() == [14, 13, 13, 13]


def test_a_price_of_rows_keeps_documents_together_on_few_ranks():
    tokens = np.array([4000] * 4)
    rules = GroupRules.of(num_ranks=16, cap=2048)
    assert best_groups(tokens**2, tokens, rules).size.tolist() == [4, 4, 4, 4]
    priced = best_groups(tokens**2, tokens, rules, price=256 * 10**6, targets=(1000,))
    assert priced.size.tolist() == [2, 2, 2, 2] and priced.rows == 16000


def test_a_score_that_nothing_undercuts_finds_nothing():
    rules = GroupRules.of(num_ranks=2, cap=10)
    best = best_groups([4, 4], [1, 1], rules)
    assert best_groups([4, 4], [1, 1], rules, limit=256 * best.makespan) is None


def test_thousands_of_ranks():
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(5.8, 1.5, 6000), 128, 8192).astype(np.int64)
    for degrees in ("any", "powers"):
        rules = GroupRules.of(num_ranks=4096, cap=2048, degrees=degrees)
        groups = best_groups(tokens**2, tokens, rules, targets=(100, 30))
        assert groups.makespan <= 1.1 * (tokens**2).sum() / 4096 + 1


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="num_ranks >= 1, cap >= 1"):
        GroupRules.of(num_ranks=0, cap=1)
    with pytest.raises(ValueError, match="got 'some'"):
        GroupRules.of(num_ranks=2, cap=1, degrees="some")
    with pytest.raises(ValueError, match="entry for 0 … 2 ranks"):
        GroupRules.of(num_ranks=2, cap=1, token_units=[0, 0])
    with pytest.raises(ValueError, match="No group size"):
        GroupRules.of(num_ranks=2, cap=1, token_units=[0, -1, -1])
    with pytest.raises(ValueError, match=r"below 2\*\*53 units"):
        best_groups([2**60], [1], GroupRules.of(num_ranks=2, cap=1))
    assert best_groups([1], [5], GroupRules.of(num_ranks=2, cap=2)) is None
