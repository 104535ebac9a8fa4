"""CP groups: the plane of ranks, who exchanges rows with whom, and what is refused."""

from __future__ import annotations

import itertools
import math
import sys

import pytest
import torch
import torch.distributed as dist
from equipoise.attention.groups import Communicator, CpGroups, LogicalGroup


def described(rank: int, world: int, dp: int, cp: int) -> tuple:
    """This rank's place, and the ranks that its CP group really reaches."""
    groups = CpGroups(dp, cp)
    place = groups.rank, groups.dp_index, groups.cp_index, groups.cp_ranks, reached(groups, groups.cp_ranks)
    groups.close()
    return place


def reached(groups: CpGroups, ranks: tuple[int, ...]) -> list[int]:
    """What an exchange of rank numbers brings from each of `ranks`."""
    group, once = groups[ranks], [1] * len(ranks)
    if group is None:
        return [groups.rank]
    received = torch.full((len(ranks),), -1)
    group.exchange(torch.full((len(ranks),), groups.rank), once, received, once).wait()
    return received.tolist()


def test_ranks_of_a_group_are_consecutive(ranks):
    assert ranks.run(described, 4, 2, 2) == [
        (0, 0, 0, (0, 1), [0, 1]),
        (1, 0, 1, (0, 1), [0, 1]),
        (2, 1, 0, (2, 3), [2, 3]),
        (3, 1, 1, (2, 3), [2, 3]),
    ]
    assert [r[3] for r in ranks.run(described, 4, 4, 1)] == [(0,), (1,), (2,), (3,)]
    assert [r[4] for r in ranks.run(described, 4, 1, 4)] == [[0, 1, 2, 3]] * 4


def communicators(rank: int, world: int, dp: int, cp: int) -> list[tuple[int, ...]]:
    """The groups that this rank may have with a communicator of their own, by asking for every set of consecutive ranks."""
    groups = CpGroups(dp, cp)
    sets = [tuple(range(a, b)) for a, b in itertools.combinations(range(world + 1), 2) if a <= rank < b]
    own = [s for s in sets if isinstance(groups[s], Communicator)]
    assert all(isinstance(groups[s], LogicalGroup) for s in sets if s not in own and len(s) > 1)
    groups.warm_up()
    groups.close()
    return own


@pytest.mark.parametrize(("dp", "cp"), [(4, 1), (2, 2), (1, 6), (2, 3), (3, 2), (8, 1), (1, 3)])
def test_communicators_are_few_and_tile_the_world(ranks, dp, cp):
    world = dp * cp
    for rank, own in enumerate(ranks.run(communicators, world, dp, cp)):
        assert len(own) <= math.log2(world) + 1
        aligned = [tuple(range(rank // n * n, rank // n * n + n)) for n in (2, 4, 8) if world % n == 0]
        first = rank // cp * cp
        assert set(aligned) | {tuple(range(world))} <= set(own)
        assert cp == 1 or tuple(range(first, first + cp)) in own


def all_sets(rank: int, world: int, turns: list[tuple[int, ...]]) -> bool:
    groups = CpGroups(1, world)
    right = all(reached(groups, turn) == list(turn) for turn in turns if rank in turn)
    groups.close()
    return right


def test_any_ranks_in_any_order_form_a_group(ranks):
    turns = [t for n in (1, 2, 3, 4) for t in itertools.permutations(range(4), n)]
    assert ranks.run(all_sets, 4, turns) == [True] * 4


def uneven(rank: int, world: int) -> list[list[float]]:
    """Rank r sends (r + 2·dst) % 3 rows to each dst, over a communicator and over a logical group of the same ranks."""
    groups, results = CpGroups(1, world), []
    rows = [[(src + 2 * dst) % 3 for dst in range(world)] for src in range(world)]
    for ranks in (tuple(range(world)), tuple(reversed(range(world)))):
        send, receive = [rows[rank][dst] for dst in ranks], [rows[src][rank] for src in ranks]
        sent = torch.cat([torch.full((n, 2), 10.0 * rank + dst) for n, dst in zip(send, ranks, strict=True)])
        received = torch.empty(sum(receive), 2)
        groups[ranks].exchange(sent, send, received, receive).wait()
        want = [torch.full((n, 2), 10.0 * src + rank) for n, src in zip(receive, ranks, strict=True)]
        results.append(bool(torch.equal(received, torch.cat(want))))
    groups.close()
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_of_any_number_arrive_in_order_of_ranks(ranks, world):
    assert ranks.run(uneven, world) == [[True, True]] * world


def nothing_to_do(rank: int, world: int) -> int:
    """Ranks without rows take no part: the third posts nothing, and nobody waits for it."""
    groups = CpGroups(1, world)
    send, receive = {0: ([0, 2, 0], [0, 0, 0]), 1: ([0, 0, 0], [2, 0, 0]), 2: ([0] * 3, [0] * 3)}[rank]
    group, posted = groups[(0, 2, 1)], []
    plain, dist.batch_isend_irecv = dist.batch_isend_irecv, lambda ops: posted.append(ops) or plain(ops)
    try:
        order = [0, 2, 1]
        group.exchange(
            torch.zeros(sum(send)), [send[r] for r in order], torch.ones(sum(receive)), [receive[r] for r in order]
        ).wait()
    finally:
        dist.batch_isend_irecv = plain
    groups.close()
    return sum(len(ops) for ops in posted)


def test_transfers_of_no_rows_are_left_out_on_both_sides(ranks):
    assert ranks.run(nothing_to_do, 3) == [1, 1, 0]


def side_by_side(rank: int, world: int) -> bool:
    """Two logical groups at once, twice as often in one, beside a collective of all ranks on another communicator."""
    groups, right = CpGroups(1, world), True
    mine = (0, 2) if rank in (0, 2) else (3, 1)
    work = dist.all_reduce(total := torch.tensor(rank), async_op=True)
    for _ in range(20 if rank in (0, 2) else 40):
        right &= reached(groups, mine) == list(mine)
    work.wait()
    groups.close()
    return right and int(total) == 6


def test_groups_without_a_common_rank_run_side_by_side(ranks):
    assert ranks.run(side_by_side, 4) == [True] * 4


def told(rank: int, world: int) -> list:
    groups = CpGroups(1, world)
    said = [
        groups.tell((0, 2), [rank, -7]) if rank != 1 else None,
        groups.tell((2, 1, 0), [[0, 2**62, -(2**63)][rank]]),
    ]
    groups.close()
    return said


def test_ranks_tell_each_other_words(ranks):
    everyone = [[-(2**63)], [2**62], [0]]
    pair = [[0, -7], [2, -7]]
    assert ranks.run(told, 3) == [[pair, everyone], [None, everyone], [pair, everyone]]


def late(rank: int, world: int, wanted: float | None) -> float:
    """Seconds of the timeout: as asked for, or the default group's."""
    groups = CpGroups(1, world, timeout=wanted)
    communicator = groups[tuple(range(world))]
    assert isinstance(communicator, Communicator)
    seconds = communicator.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    dist.barrier()  # a group that is closed at once breaks off the connecting of who is slower
    groups.close()
    return seconds


def test_the_timeout_is_that_of_the_default_group_unless_given(ranks):
    assert ranks.run(late, 2, None) == [180.0, 180.0]
    assert ranks.run(late, 2, 7.5) == [7.5, 7.5]


def closed(rank: int, world: int) -> bool:
    groups = CpGroups(1, world)
    process_group = groups[tuple(range(world))].group
    dist.barrier()
    groups.close()
    groups.close()
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(process_group)
    return True


def test_close_destroys_the_communicators(ranks):
    assert all(ranks.run(closed, 2))


def after_an_error(rank: int, world: int) -> list[int]:
    groups = CpGroups(1, world)
    sys.last_type = RuntimeError  # what Python sets when an error ends the program
    try:
        groups._close_at_exit()
    finally:
        del sys.last_type
    still = reached(groups, tuple(range(world)))
    groups._close_at_exit()
    assert groups._opened == []
    return still


def test_at_exit_communicators_are_destroyed_unless_an_error_ends_the_program(ranks):
    assert ranks.run(after_an_error, 2) == [[0, 1]] * 2


def complaint(rank: int, world: int, dp: int, cp: int) -> str:
    with pytest.raises(ValueError) as caught:
        CpGroups(dp, cp)
    return str(caught.value)


def test_another_world_is_refused_with_numbers(ranks):
    assert set(ranks.run(complaint, 4, 3, 2)) == {"dp x cp must be the world's size; got 3 x 2 = 6 for 4 rank(s)."}


def test_one_rank_needs_no_process_group():
    groups = CpGroups(1, 1)
    assert groups.cp_ranks == (0,) and groups[(0,)] is None
    for ranks in [(0, 1), (1,), (0, 0), ()]:
        with pytest.raises(ValueError, match=r"different ranks of 0 … 0, this one \(0\) among them; got ranks \["):
            groups[ranks]
    with pytest.raises(ValueError, match="call init_process_group first"):
        CpGroups(1, 2)
    with pytest.raises(ValueError, match="at least 1; got dp=0, cp=1"):
        CpGroups(0, 1)
