"""Cluster: the ranks that a step is planned for, what they may hold, and when they wait for each other.

Ranks are numbers in the dp x cp plane: ``rank = replica * cp + cp_rank``. Which process has which is the launcher's to say.

    >>> Cluster(dp=2, cp=4, max_tokens_per_rank=1024).capacity
    4096
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SYNC = ("step", "slot")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The ranks a step is planned for, what they may hold, and when they wait for each other.

    Args:
        dp: data-parallel replicas.
        cp: ranks of one context-parallel group.
        max_tokens_per_rank: hard cap of tokens on one rank in one micro-batch.
        sync: ``step``: ranks meet once per optimizer step (DDP); ``slot``: at every micro-batch (FSDP, ZeRO-3, PP, EP).
        slots: micro-batches per replica and step; None: as few as the recipe needs.
        speeds: of each rank, relative to the nominal 1.0; None: all alike.
        pad_tp: documents are padded to what Transformer Engine's zigzag divides, 2·cp·tp tokens (tp at cp 1), for tensor
            parallelism of this size; 0: no padding.
    """

    dp: int
    cp: int = 1
    max_tokens_per_rank: int
    sync: str = "step"
    slots: int | None = None
    speeds: tuple[float, ...] | None = None
    pad_tp: int = 0

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "max_tokens_per_rank", "slots"):
            value = getattr(self, name)
            if value is not None and (int(value) != value or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1; got {value!r}")
        if self.sync not in SYNC:
            raise ValueError(
                f"sync must be 'step' (DDP: ranks wait once per optimizer step) or 'slot' (FSDP, ZeRO-3, PP, EP: at "
                f"every micro-batch); got {self.sync!r}"
            )

        if self.pad_tp < 0 or self.max_tokens_per_rank < 2 * self.pad_tp:
            raise ValueError(
                f"pad_tp must be 0 (no padding) or tp, and a rank must hold the 2·tp tokens of a padded filler; got "
                f"pad_tp={self.pad_tp} with max_tokens_per_rank={self.max_tokens_per_rank}"
            )
        if self.speeds is not None and (len(self.speeds) != self.dp * self.cp or not min(self.speeds) >= 0.001):
            raise ValueError(
                f"speeds are one number of at least 0.001 for each of the {self.dp * self.cp} ranks (1.0: nominal); got "
                f"{self.speeds}"
            )

    @property
    def num_ranks(self) -> int:
        return self.dp * self.cp

    @property
    def pace(self) -> np.ndarray:
        """int64[ranks] speed in thousandths: a CP group is as fast as its slowest rank."""
        if self.speeds is None:
            return np.full(self.num_ranks, 1000, np.int64)
        thousandths = np.rint(np.array(self.speeds) * 1000).astype(np.int64).reshape(self.dp, self.cp)
        return np.repeat(thousandths.min(1), self.cp)

    def multiple(self, cp_size: np.ndarray | int) -> np.ndarray:
        """What a document's tokens are padded to on a group of this size: int64, 1 where nothing is padded."""
        size = np.asarray(cp_size, np.int64)
        return np.where(size > 1, 2 * size, 1) * self.pad_tp if self.pad_tp else np.ones_like(size)

    @property
    def capacity(self) -> int:
        """Tokens one pack may have: its CP group shares them evenly, to within one."""
        return self.max_tokens_per_rank * self.cp
