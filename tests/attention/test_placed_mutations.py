"""Where queries move, what is left out shows: any one transfer, any return of (O, LSE) and dQ, the merge, the LSE's last bits.

python -m pytest tests/attention/test_placed_mutations.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from equipoise.attention import queries, totals
from equipoise.attention.executor import attend
from equipoise.attention.plan import Q

from tests.attention.placed import Placed, drawn, errors, positions, run
from tests.attention.test_mutations import SEEN, losing

WORLD = 3
CASE = Placed(seed=3, world=WORLD, groups=2, direct=True, stages=3, tokens=60)
"""Rank 0 sends and is sent rows of both kinds in both stages that have exchanges."""


def errors_of(ranks, function, *args) -> dict[str, float]:
    return errors(CASE, list(ranks.run(function, WORLD, *args)))


def without_returns(rank: int, world: int) -> list[list[torch.Tensor]]:
    """For each return of queries: results without it, on all ranks alike."""
    rows = np.flatnonzero(drawn(CASE).returns[:, 1] == Q)
    changes = [lambda plan, at=at: replace(plan, returns=np.delete(plan.returns, at, axis=0)) for at in rows.tolist()]
    return [run(rank, world, [CASE], change)[0][0] for change in changes]


def test_any_one_return_of_queries(ranks):
    parts = list(zip(*ranks.run(without_returns, WORLD), strict=True))
    assert len(parts) > 5
    for results in parts:
        found = errors(CASE, list(results))
        assert found["out"] > SEEN and max(found.values()) > SEEN


def without_transfers(rank: int, world: int, keep: bool) -> list[list[torch.Tensor]]:
    """For each exchange, first none: results when rank 0 loses what it brings it."""
    results, case, plan = [], replace(CASE, keep=keep), drawn(CASE)
    held = positions(plan, plan.ranks.index(rank))
    with losing(world) as (groups, counter):
        lost, made = None, 0
        while lost is None or lost < made:
            counter.made, counter.lost = 0, lost if rank == 0 else None
            q, k, v, dout = (x[held] for x in case.inputs())
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            out = attend(replace(plan), q, k, v, groups, keep=keep)
            results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), dout)])
            made, lost = counter.made, 0 if lost is None else lost + 1
    return results


@pytest.mark.parametrize("keep", [True, False])
def test_any_one_transfer(ranks, keep):
    """Two stages with both kinds: KV and Q out, (O, LSE) home; in backward Q rows out, KV too unless kept, and dKV and dQ home."""
    exact, *lossy = zip(*ranks.run(without_transfers, WORLD, keep), strict=True)
    assert max(errors(CASE, list(exact)).values()) <= 1e-12
    assert len(lossy) == 2 * 3 + 2 * (3 if keep else 4)
    for results in lossy:
        found = errors(CASE, list(results))
        assert max(found.values()) > SEEN, found


def mutated(rank: int, world: int, what: str) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        if what == "not merged":
            patch.setattr(totals.Outputs, "put", last_wins)
        elif what == "imprecise home":
            patch.setattr(totals.Outputs, "of", imprecise(totals.Outputs.of))
        elif what == "imprecise onward":
            patch.setattr(queries, "as_bits", lambda lse, dtype: lse.bfloat16().to(dtype).transpose(0, 1).contiguous())
        return run(rank, world, [CASE])[0][0]


def last_wins(self: totals.Outputs, buffer: int, rows, parts) -> None:
    out, lse = (x.clone() for x in self.of(buffer))
    out[rows], lse[rows] = parts[0].to(out.dtype), parts[1]
    self._totals[buffer] = out, lse


def imprecise(plain):
    """The LSE of rows that go home loses its last bits."""

    def of(self: totals.Outputs, buffer: int) -> totals.Parts:
        out, lse = plain(self, buffer)
        return (out, lse) if buffer == 0 else (out, lse.bfloat16().to(lse.dtype))

    return of


@pytest.mark.parametrize("what,shows", [("not merged", "out"), ("imprecise home", "out"), ("imprecise onward", "dq")])
def test_merges_and_precise_lse(ranks, what, shows):
    assert errors_of(ranks, mutated, what)[shows] > 1e-4
    assert max(errors_of(ranks, mutated, "nothing").values()) <= 1e-12
