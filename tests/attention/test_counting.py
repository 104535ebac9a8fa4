"""What is counted where it happens is what plans say on paper: every byte and every pair, forward and backward."""

from __future__ import annotations

import pytest
import torch
from equipoise.attention.counting import Counter, Counts
from equipoise.attention.executor import attend
from equipoise.attention.groups import CpGroups
from equipoise.attention.plan import AttentionPlan

from tests.attention.oracle import LAYOUTS, Case

LENGTHS = [(3, 40, 1, 17, 8), (61,), (2, 1), (*[5, 3] * 4, 30)]


def counted(rank: int, world: int, ranks: tuple[int, ...], cases: list[Case]) -> list[tuple[Counts, Counts]]:
    """What this rank counts in forward and in backward of each case."""
    counter = Counter()
    groups, results = CpGroups(world, 1, counter=counter), []
    for case in cases:
        index = ranks.index(rank)
        held = torch.from_numpy(case.shards(world).positions(index))
        q, k, v, dout = (x[held] for x in case.inputs())
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = attend(case.plan(ranks, index), q, k, v, groups, keep=case.keep)
        forward = counter.take()
        torch.autograd.grad(out, (q, k, v), dout)
        results.append((forward, counter.take()))
    groups.close()
    return results


@pytest.mark.parametrize("ranks_of_plan", [(0, 1, 2), (2, 1, 0), (0, 1, 2, 3)])
def test_bytes_and_pairs_are_those_of_the_plan(ranks, ranks_of_plan):
    world = len(ranks_of_plan)
    cases = [
        Case(lengths=n, layout=layout, dtype=torch.bfloat16, keep=keep)
        for n in LENGTHS
        for layout in LAYOUTS
        for keep in (True, False)
    ]
    by_rank = ranks.run(counted, world, ranks_of_plan, cases)
    for at, case in enumerate(cases):
        for rank in range(world):
            forward, backward = by_rank[rank][at]
            index = ranks_of_plan.index(rank)
            plan = case.plan(ranks_of_plan, index)
            assert isinstance(plan, AttentionPlan)
            loads = plan.loads(bytes_per_row=2 * case.kv_heads * case.dim * 2)
            # Gradients travel in fp32: twice the bytes of bf16.
            returned, reduced = (
                2 * loads.bytes_per_row * rows[index] for rows in (loads.rows_returned, loads.rows_reduced)
            )
            again = not case.keep
            assert forward.bytes_sent == loads.bytes_sent[index]
            assert forward.bytes_received == loads.bytes_received[index]
            assert backward.bytes_sent == returned + again * loads.bytes_sent[index]
            assert backward.bytes_received == reduced + again * loads.bytes_received[index]
            assert forward.pairs == backward.pairs_backward == loads.pairs[index]
            assert forward.head_pairs == case.heads * loads.pairs[index]
            assert forward.pairs_backward == backward.pairs == 0
            assert (forward.tile_seconds > 0) == (loads.pairs[index] > 0)


@pytest.mark.parametrize("ranks_of_plan", [(0, 1, 2), (2, 1, 0)])
def test_ulysses_bytes_and_pairs(ranks, ranks_of_plan):
    """Every rank computes all pairs of the pack for its share of the heads."""
    case = Case(lengths=(3, 40, 1), kind="ulysses", dtype=torch.bfloat16, heads=7, kv_heads=1)
    by_rank = [r[0] for r in ranks.run(counted, 3, ranks_of_plan, [case])]
    said = case.plan(ranks_of_plan, 0).bytes_sent(case.heads, case.kv_heads, case.dim, 2)  # type: ignore[union-attr]
    assert [by_rank[rank][0].bytes_sent for rank in ranks_of_plan] == said.tolist()
    assert sum(f.bytes_sent for f, _ in by_rank) == sum(f.bytes_received for f, _ in by_rank)
    assert sum(b.bytes_sent for _, b in by_rank) == said.sum() == sum(b.bytes_received for _, b in by_rank)
    pairs = sum(n * (n + 1) // 2 for n in case.lengths)
    assert {f.pairs for f, _ in by_rank} == {b.pairs_backward for _, b in by_rank} == {pairs}
    assert sum(f.head_pairs for f, _ in by_rank) == case.heads * pairs


def test_a_counter_changes_nothing_and_may_come_and_go():
    case = Case(lengths=(20, 3, 31))
    groups, plan, counter = CpGroups(1, 1), case.plan((0,), 0), Counter()
    q, k, v, _ = case.inputs()
    plain = attend(plan, q, k, v, groups)
    assert set(counter.take().__dict__.values()) == {0}
    groups.counter = counter
    assert torch.equal(attend(plan, q, k, v, groups), plain)
    prepared = len(plan.cache)
    assert torch.equal(attend(plan, q, k, v, groups), plain)
    assert len(plan.cache) == prepared, "the plan is prepared once"
    counts = counter.take()
    assert counts.pairs == 2 * sum(n * (n + 1) // 2 for n in case.lengths) and counts.exchanges == 0
    groups.counter = None
    attend(plan, q, k, v, groups)
    assert counter.take() == Counts()


def test_counts_add_up_and_say_what_they_are():
    counts = Counts(bytes_sent=3, pairs=2, tile_seconds=0.5) + Counts(bytes_sent=4, exchanges=1)
    assert counts == Counts(bytes_sent=7, pairs=2, tile_seconds=0.5, exchanges=1)
    assert str(counts) == "2 pairs in 0.5 CPU seconds of tiles, 7 bytes sent and 0 received in 1 exchanges"
