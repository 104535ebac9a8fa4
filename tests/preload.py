"""What the server that test ranks are forked from does once, so that no rank has to: load and compile the planners.

Nothing here runs a torch operation: a fork after OpenMP has started would hang.
"""

from __future__ import annotations

import numpy as np
from equipoise import BalancedBatchSampler, Lengths, recipe
from equipoise.attention.bands import squares
from equipoise.attention.kernels.grouping import batches
from equipoise.attention.program import lower
from equipoise.attention.ring import ring_plan
from equipoise.packing.shards import zigzag

for _, _buffer, _tiles in lower(ring_plan(zigzag([0, 9, 14], 2), ranks=(0, 1)), rank=1).stages[1].tiles:
    batches(squares(_tiles), 8)

for _name in ("static", "wlb", "vrsp"):
    for _sync in ("step", "slot"):
        _size = {"dp": 2, "max_tokens_per_rank": 64, "documents_per_step": 30, "sync": _sync}
        next(iter(BalancedBatchSampler(Lengths.from_array(np.arange(1, 31)), recipe(_name), **_size)))
