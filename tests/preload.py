"""What the server that test ranks are forked from does once, so that no rank has to: load and compile the planners.

Nothing here runs a torch operation: a fork after OpenMP has started would hang.
"""

from __future__ import annotations

import numpy as np
from equipoise import BalancedBatchSampler, Lengths, recipe
from equipoise.attention.bands import squares
from equipoise.attention.kernels.grouping import batches
from equipoise.attention.plan import AttentionPlan
from equipoise.attention.program import lower
from equipoise.attention.ring import ring_plan
from equipoise.loaders.tar_samples import group
from equipoise.loaders.tar_scan import walk
from equipoise.packing.mask_kinds import prefix_lm
from equipoise.packing.shards import zigzag
from equipoise.recipes import NAMED

for _, _buffer, _tiles in lower(ring_plan(zigzag([0, 9, 14], 2), ranks=(0, 1)), rank=1).stages[1].tiles:
    batches(squares(_tiles), 8)

for _name in ("static", "wlb", "vrsp"):
    for _sync in ("step", "slot"):
        _size = {"dp": 2, "max_tokens_per_rank": 64, "documents_per_step": 30, "sync": _sync}
        next(iter(BalancedBatchSampler(Lengths.from_array(np.arange(1, 31)), recipe(_name), **_size)))

# Attention of every kind, or all ranks of a team would compile it side by side.
_cu, _mask = np.array([0, 300, 309, 340]), prefix_lm(5, [300, 9, 31])
_kinds = [
    {"shard": shard, "attend": "direct"} for shard in ("zigzag_sequence", "striped", "adaptive", "mixed", "joint")
]
for _mix in [*_kinds, {"attend": "gather"}, {"attend": "groupcast"}]:
    _shards, _plan = recipe("static", **_mix).laid_out(_cu, (0, 1), 1)
    lower(_plan, rank=1)
for _name in ("dcp", "libra", "magi", "vrsp"):
    for _masked in (None, _mask) if _name != "vrsp" else (None,):
        _shards, _plan = NAMED[_name].laid_out(_cu, (0, 1), 1, mask=_masked)
        if isinstance(_plan, AttentionPlan):
            lower(_plan, rank=1)

# What tests without ranks need, too: they run first, and find it compiled.
ring_plan(zigzag([0, 9, 14], 2), ranks=(0, 1)).check([0, 9, 14])
for _name in ("skrull", "dynamic_cp", "flexsp"):
    _sizes = {"dp": 2, "cp": 2, "max_tokens_per_rank": 64, "documents_per_step": 30}
    next(iter(BalancedBatchSampler(Lengths.from_array(np.arange(1, 31)), recipe(_name), **_sizes)))
group(walk(np.zeros(1024, np.uint8)), ("npy",))
