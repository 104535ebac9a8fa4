"""The pool of ranks itself: results by rank, failures with their traceback, hangs that end, and a team that recovers."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist


def total(rank: int, world: int, x: int) -> int:
    value = torch.tensor(x + rank)
    dist.all_reduce(value)
    return int(value)


def fail_on(rank: int, world: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"no luck on {rank}")
    dist.barrier()


def sleep(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


def die(rank: int, world: int) -> None:
    if rank == 0:
        os._exit(7)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_by_rank(ranks, world):
    assert ranks.run(total, world, 10) == [10 * world + world * (world - 1) // 2] * world


def test_a_failure_is_raised_with_its_rank_and_the_next_case_runs(ranks):
    with pytest.raises(ValueError, match="no luck on 1") as caught:
        ranks.run(fail_on, 2, 1)
    assert "rank 1 of 2" in str(caught.value.__cause__) and "fail_on" in str(caught.value.__cause__)
    assert ranks.run(total, 2, 0) == [1, 1]


def test_a_hang_ends_and_the_next_case_runs(ranks):
    ranks.run(total, 2, 0)  # the team stands, so that the time below is that of the case alone
    with pytest.raises(TimeoutError, match=r"Ranks \[1\] of 2"):
        ranks.run(sleep, 2, timeout=2.0)
    assert ranks.run(total, 2, 0) == [1, 1]


def test_a_dead_rank_is_named(ranks):
    with pytest.raises(RuntimeError, match="rank 0 died with exit code 7"):
        ranks.run(die, 2)
    assert ranks.run(total, 2, 0) == [1, 1]
