"""What every list of forward, recompute and backward operations has to obey."""

from __future__ import annotations

import numpy as np
from equipoise.packing.chunkflow import FORWARD, RECOMPUTE


def check_operations(operations: np.ndarray, sizes: list[int], keep: int) -> None:
    """Forward in order; backward once all later chunks of the group have been, its activations being there; at most
    `keep` of a group's activations at a time; recomputed only what was not kept."""
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    last = np.cumsum(sizes) - 1
    done, held, again = [], set(), []
    backward: set[int] = set()
    for operation, chunk in operations.tolist():
        group = group_of[chunk]
        later = set(range(chunk + 1, int(last[group]) + 1))
        if operation == FORWARD:
            assert chunk == len(done)
            done.append(chunk)
            if len(later) < keep:
                held.add(chunk)
        elif operation == RECOMPUTE:
            assert chunk in done and chunk not in held and later <= backward
            held.add(chunk)
            again.append(chunk)
        else:
            assert chunk in held and later <= backward
            assert int(last[group]) in done
            held.remove(chunk)
            backward.add(chunk)
        assert len(held) <= keep
    assert len(done) == len(backward) == sum(sizes) and not held
    assert sorted(again) == [c for c in range(sum(sizes)) if int(last[group_of[c]]) - c >= keep]
