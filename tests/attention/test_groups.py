"""CP groups: the plane of ranks, who is in which group, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from equipoise.attention.groups import CpGroups


def describe(rank: int, world: int, dp: int, cp: int) -> tuple:
    """This rank's place, and the sum of ranks over its group as proof that the group works."""
    groups = CpGroups(dp, cp)
    group = groups[groups.cp_ranks]
    total = torch.tensor(rank)
    if group is not None:
        dist.all_reduce(total, group=group)
    return groups.rank, groups.dp_index, groups.cp_index, groups.cp_ranks, int(total)


def test_ranks_of_a_group_are_consecutive(ranks):
    assert ranks.run(describe, 4, 2, 2) == [
        (0, 0, 0, (0, 1), 1),
        (1, 0, 1, (0, 1), 1),
        (2, 1, 0, (2, 3), 5),
        (3, 1, 1, (2, 3), 5),
    ]
    assert [r[3] for r in ranks.run(describe, 4, 4, 1)] == [(0,), (1,), (2,), (3,)]
    assert [r[4] for r in ranks.run(describe, 4, 1, 4)] == [6] * 4


def complaint(rank: int, world: int, dp: int, cp: int) -> str:
    with pytest.raises(ValueError) as caught:
        CpGroups(dp, cp)
    return str(caught.value)


def test_another_world_is_refused_with_numbers(ranks):
    assert set(ranks.run(complaint, 4, 3, 2)) == {"dp x cp must be the world's size; got 3 x 2 = 6 for 4 rank(s)."}


def test_one_rank_needs_no_process_group():
    groups = CpGroups(1, 1)
    assert groups.cp_ranks == (0,) and groups[(0,)] is None
    with pytest.raises(ValueError, match=r"no process group of ranks \[0, 1\]; dp=1, cp=1 has \[\[0\]\]"):
        groups[(0, 1)]
    with pytest.raises(ValueError, match="call init_process_group first"):
        CpGroups(1, 2)
    with pytest.raises(ValueError, match="at least 1; got dp=0, cp=1"):
        CpGroups(0, 1)
