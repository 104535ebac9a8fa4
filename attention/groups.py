"""Process groups of a data-parallel x context-parallel run.

Rank numbers run CP first: rank = dp_index · cp + cp_index, so a CP group is consecutive ranks, on one node where it can
be. All groups are built once, by all ranks in the same order, since building one later on some ranks only would hang.

    >>> groups = CpGroups(dp=1, cp=1)                       # without torch.distributed: a world of one rank
    >>> groups.rank, groups.cp_ranks, groups[(0,)] is None
    (0, (0,), True)
"""

from __future__ import annotations

import torch.distributed as dist


class CpGroups:
    """The CP groups of a plane of dp x cp ranks, over the default process group; every rank must construct it.

    Raises ValueError if the world is not dp · cp ranks.
    """

    def __init__(self, dp: int, cp: int) -> None:
        if dp < 1 or cp < 1:
            raise ValueError(f"dp and cp are at least 1; got dp={dp}, cp={cp}.")
        started = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if started else 1
        if dp * cp != world:
            hint = "" if started else " torch.distributed is not initialised: call init_process_group first."
            raise ValueError(
                f"dp x cp must be the world's size; got {dp} x {cp} = {dp * cp} for {world} rank(s).{hint}"
            )
        self.dp, self.cp = dp, cp
        self.rank = dist.get_rank() if started else 0
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {(rank,): None for rank in range(world)}
        for first in range(0, world if cp > 1 else 0, cp):
            ranks = tuple(range(first, first + cp))
            self._groups[ranks] = dist.new_group(list(ranks))

    @property
    def dp_index(self) -> int:
        return self.rank // self.cp

    @property
    def cp_index(self) -> int:
        return self.rank % self.cp

    @property
    def cp_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's CP group, in order."""
        first = self.dp_index * self.cp
        return tuple(range(first, first + self.cp))

    def __getitem__(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks in this order; None for a single rank, which communicates with nobody."""
        if ranks not in self._groups:
            known = [list(r) for r in self._groups if len(r) == self.cp]
            raise ValueError(
                f"There is no process group of ranks {list(ranks)}; dp={self.dp}, cp={self.cp} has {known}."
            )
        return self._groups[ranks]
