"""ChunkFlow (arXiv:2503.02356): documents become chunks of like size, so that no document decides how much memory a run needs.

Decides two things. **Pack** (Algorithm 1): documents longer than `chunk_tokens` are cut into pieces of that size, the
*dependent* chunks of a group; shorter ones are packed by best fit into few *standalone* chunks. **Order** (Algorithm 2,
corrected): a dependent chunk attends to the keys of those before it, kept in a store, so

    forward      all chunks of the group, keys and values detached into the store; the last K keep their activations;
    backward     the last K, **descending**: each adds its dK, dV for all chunks before it to the store;
    recompute    chunk N-K-1, then its backward, with what the store has gathered for its own keys and values, and so on
                 **down** to chunk 0.

As printed the paper recomputes in ascending order and keeps chunks "idx >= K" instead of N-K: gradients that later chunks
owe to earlier ones are lost (45 % error). Memory is K·chunk_tokens of activations and the group's keys, values and their
gradients; a group costs at most (N-K)/N of a forward more. Which replica runs which group: `chunkflow_places.py`; how large
chunks should be: `chunkflow_tuning.py`.

    >>> import numpy as np
    >>> made = chunks(np.array([10, 3, 1]), chunk_tokens=4)
    >>> [list(zip(*(a[i:j].tolist() for a in (made.item, made.start, made.stop)))) for i, j in made.slices()]
    [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)], [(1, 0, 3), (2, 0, 1)]]
    >>> [f"{'FRB'[operation]}{chunk}" for operation, chunk in schedule(3, keep=1).tolist()]
    ['F0', 'F1', 'F2', 'B2', 'R1', 'B1', 'R0', 'B0']
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numba import njit

from .assign import best_fit_decreasing
from .cost import causal_pairs
from .packs import Int64

FORWARD, RECOMPUTE, BACKWARD = 0, 1, 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """c chunks of m pieces: chunk i is the pieces `offsets[i]:offsets[i + 1]`. int64 arrays.

    Groups of dependent chunks come first, by item, then the standalone chunks.
    """

    item: Int64
    start: Int64
    stop: Int64
    offsets: Int64
    chunk_index: Int64
    """int64[c]: number of the chunk in its group; 0 for a standalone one."""
    chunk_count: Int64
    """int64[c]: chunks of its group; 1 for a standalone one."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def slices(self) -> list[tuple[int, int]]:
        """(first, stop) of the pieces of each chunk."""
        return list(pairwise(self.offsets.tolist()))

    @property
    def tokens(self) -> Int64:
        """Tokens of each chunk, int64[c]."""
        return self._sums(self.stop - self.start)

    @property
    def pairs(self) -> Int64:
        """(query, key) pairs of each chunk under a causal mask, the keys of earlier chunks included; int64[c]."""
        return self._sums(causal_pairs(self.start, self.stop))

    @property
    def groups(self) -> Int64:
        """int64[g + 1]: chunks groups[i] … groups[i + 1] - 1 are a group; a standalone chunk is one of its own."""
        return np.append(np.flatnonzero(self.chunk_index == 0), len(self)).astype(np.int64)

    def _sums(self, per_piece: Int64) -> Int64:
        return np.add.reduceat(per_piece, self.offsets[:-1]) if len(self) else np.zeros(0, np.int64)


def chunks(tokens: npt.ArrayLike, chunk_tokens: int) -> Chunks:
    """Cut and pack items of `tokens` (int[n], each >= 1) into chunks of at most `chunk_tokens`.

    The last chunk of a group may be shorter than the others; it stays a chunk of its own.
    """
    lengths = np.asarray(tokens, dtype=np.int64)
    if chunk_tokens < 1 or (len(lengths) and lengths.min() < 1):
        raise ValueError(
            f"chunk_tokens and every item must be at least 1; got {chunk_tokens} and items from "
            f"{min(lengths, default=1)}. Drop empty documents first."
        )
    long, short = np.flatnonzero(lengths > chunk_tokens), np.flatnonzero(lengths <= chunk_tokens)
    count = -(-lengths[long] // chunk_tokens)
    index = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    item = np.repeat(long, count)
    order, offsets = best_fit_decreasing(lengths[short], chunk_tokens)
    packed = short[order]
    alone = len(offsets) - 1
    return Chunks(
        item=np.concatenate([item, packed]),
        start=np.concatenate([index * chunk_tokens, np.zeros_like(packed)]),
        stop=np.concatenate([np.minimum((index + 1) * chunk_tokens, lengths[item]), lengths[packed]]),
        offsets=np.concatenate([np.arange(len(item)), len(item) + offsets]),
        chunk_index=np.concatenate([index, np.zeros(alone, np.int64)]),
        chunk_count=np.concatenate([np.repeat(count, count), np.ones(alone, np.int64)]),
    )


def schedule(counts: npt.ArrayLike, keep: int) -> Int64:
    """What to run, int64[k, 2] of (FORWARD | RECOMPUTE | BACKWARD, chunk), on one device.

    counts: chunks of one group, or int[g] of several that follow each other (1: standalone); chunks are numbered
    through. keep: K, how many chunks of a group keep their activations. `samplers.pipeline.state_aware` spreads the
    list over the stages of a pipeline.
    """
    sizes = np.atleast_1d(np.asarray(counts, dtype=np.int64))
    if keep < 1 or (len(sizes) and sizes.min() < 1):
        raise ValueError(
            f"A group has at least one chunk and keeps at least one; got {min(sizes, default=1)} and keep={keep}."
        )
    return _schedule(sizes, int(keep))


@njit(nogil=True, cache=True)
def _schedule(sizes, keep):
    total = 2 * sizes.sum()
    for size in sizes:
        total += max(0, size - keep)
    result = np.empty((total, 2), np.int64)
    at = first = 0
    for size in sizes:
        for chunk in range(size):
            result[at, 0], result[at, 1] = FORWARD, first + chunk
            at += 1
        for chunk in range(size - 1, -1, -1):
            if chunk < size - keep:
                result[at, 0], result[at, 1] = RECOMPUTE, first + chunk
                at += 1
            result[at, 0], result[at, 1] = BACKWARD, first + chunk
            at += 1
        first += size
    return result
