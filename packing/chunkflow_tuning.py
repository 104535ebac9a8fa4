"""Tuning ChunkFlow: which chunk size and how many kept chunks train a sample of lengths fastest under a memory cap.

Decides (chunk_tokens, K). Larger chunks cost memory, and a pipeline time that it waits for its first; smaller ones cost
what every operation costs whatever its tokens, and recomputation where K does not grow as they shrink. The paper's
search holds chunk_tokens·K fixed and runs both ends; here each size is placed and summed up: 0.05–0.9 s for a sample of
4K documents.

    >>> import numpy as np
    >>> lengths = np.array([100] * 60 + [4000])
    >>> cost = CostModel(seconds_per_pair=1e-9, seconds_per_token=1e-6, bytes_per_token=1e6)
    >>> tune(lengths, cost, documents_per_step=61, dp=2, memory_bytes=1.1e9, seconds_per_operation=1e-5)
    (1024, 1)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .chunkflow import chunks
from .chunkflow_places import Placement, place
from .cost import CostModel
from .packs import Int64

StepSeconds = Callable[[Placement, Int64, Int64, int], float]
SIZES = 10
"""Sizes that are tried: a size 1/512 of the largest would run hundreds of operations where one fits."""


def tune(
    tokens: npt.ArrayLike,
    cost: CostModel,
    *,
    documents_per_step: int,
    dp: int,
    memory_bytes: float,
    seconds_per_operation: float,
    store_bytes_per_token: float = 0.0,
    in_flight: int = 0,
    sync: str = "slot",
    step_seconds: StepSeconds | None = None,
) -> tuple[int, int]:
    """The (chunk_tokens, keep) that trains a sample of lengths fastest and fits into memory.

    tokens: int[n], a sample in training order, of one or more steps. cost: seconds and activation bytes of a chunk on
    one replica; store_bytes_per_token: twice `accounts.kv_bytes_per_token`, for the longest document. The ten largest
    powers of two that fit are tried, each with the largest keep that fits, for that costs memory only.
    seconds_per_operation: what a forward, a recompute or a backward takes whatever its tokens (launches, gathering
    weights), which is what speaks against small chunks. in_flight: chunks that a pipeline's first stage holds besides,
    pp - 1. step_seconds: (placement, forward, backward, keep) -> seconds, from int64 nanoseconds of each chunk, in place
    of the sum over slots.
    """
    lengths = np.asarray(tokens, dtype=np.int64)
    if len(lengths) == 0 or documents_per_step < 1:
        raise ValueError(f"tune needs a sample and documents_per_step >= 1; got {len(lengths)}, {documents_per_step}.")
    longest = int(lengths.max())
    held = cost.max_tokens(memory_bytes - store_bytes_per_token * longest)
    if held <= in_flight:
        raise ValueError(f"{held} tokens fit into memory, too few for {in_flight + 1} chunks in flight.")
    largest = min(held // (in_flight + 1), 2 * longest - 1).bit_length() - 1
    best = (np.inf, 0, 0)
    for chunk_tokens in (2**bits for bits in range(largest, max(largest - SIZES, -1), -1)):
        keep = min(held // chunk_tokens - in_flight, -(-longest // chunk_tokens))
        seconds = 0.0
        for at in range(0, len(lengths), documents_per_step):
            made = chunks(lengths[at : at + documents_per_step], chunk_tokens)
            nanoseconds = cost.units(made.pairs, made.tokens)
            overhead = round(seconds_per_operation * 1e9)
            forward = nanoseconds // 3 + overhead
            backward = nanoseconds - nanoseconds // 3 + overhead
            placement = place(made.groups, forward, backward, dp=dp, keep=keep, sync=sync, filler=3 * overhead)
            if step_seconds is None:
                seconds += placement.cost(forward, backward, keep, sync) / 1e9
            else:
                seconds += step_seconds(placement, forward, backward, keep)
        best = min(best, (seconds, chunk_tokens, keep))
    return best[1], best[2]
