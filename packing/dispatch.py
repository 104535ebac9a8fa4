"""Dispatch: equal chunks of queries dealt out to the ranks of a CP group by the pairs they compute (MagiAttention).

Any mask that is made of slices balances by the areas of its chunks; queries stay where they are dealt to, keys travel (its plan:
attention/groupcast.py). Decided here: which chunks each rank holds.

- `lower_bound`, `min_heap` (the default; at most ceil(n / k) chunks a rank), `topp_heap` (of the least loaded ranks the one that
  needs most of the chunk's keys already), `sorted_sequential` (sample by sample), `exact` (branch and bound, for few chunks) are
  MagiAttention's solvers, on plain workloads.
- `dispatch` cuts a pack into chunks, at least eight a rank, the last one short (nothing is padded), and gives `Shards`.
- `dispatch_joint.joint` weighs balance and bytes, with chunks of any length: min-heap balances within 2 % and needs twice the bytes.

Chunks are dealt out whole, so a rank may hold a chunk more than its even share; with `max_tokens` what is over the cap goes to ranks
with room, in pieces.

Cost: 0.5 ms for 128 chunks on 16 ranks, most of it for the areas.

    >>> work = [2, 4, 3, 16, 13, 5, 9, 10]
    >>> loads(work, min_heap(work, 4), 4), loads(work, exact(work, 4), 4), lower_bound(work, 4)
    (array([18, 16, 14, 14]), array([16, 16, 15, 15]), 15.5)
    >>> dispatch([0, 4096, 5000, 8192], 2).describe()
    '2 ranks x 4096 tokens in 7 segments; pairs max/mean 1.003'
"""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt
from numba import njit

from .mask_areas import KeyRanges, chunk_keys, chunk_pairs
from .mask_kinds import causal
from .masks import Mask
from .packs import Int64
from .shards import Shards, boundaries, from_pieces

CHUNKS_PER_RANK = 8
MOST_EXACT = 32
"""Chunks that branch and bound is let loose on."""

SOLVERS = ("min_heap", "topp_heap", "sorted_sequential", "exact")


def dispatch(
    mask: Mask | npt.ArrayLike,
    cp_size: int,
    *,
    solver: str = "min_heap",
    chunk: int | None = None,
    max_tokens: int | None = None,
    top_p: float = 0.5,
) -> Shards:
    """Shards of a pack, chunk by chunk. mask: of its documents, or their boundaries alone, int[k + 1]: causal within each.

    chunk: queries of one; None, or more: so many that each rank has at least eight. max_tokens: none holds more. top_p: share of
    the ranks, the least loaded, among which topp_heap chooses.
    """
    masked = of_documents(mask)
    tiles, cu = masked.tiles_of_pack(), masked.cu_seqlens
    total = int(cu[-1])
    cap = checked_cap(total, cp_size, max_tokens)
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)}; got {solver!r}.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"A chunk has at least one query; got chunk={chunk}.")
    largest = max(-(-total // (CHUNKS_PER_RANK * cp_size)), 1)
    edges = np.append(np.arange(0, total, largest if chunk is None else min(chunk, largest)), total)
    work = chunk_pairs(tiles, edges)
    if solver == "min_heap":
        rank = min_heap(work, cp_size)
    elif solver == "topp_heap":
        rank = topp_heap(work, cp_size, chunk_keys(tiles, edges), top_p=top_p)
    elif solver == "exact":
        rank = exact(work, cp_size, most=-(-len(work) // cp_size))
    else:
        rank = sorted_sequential(work, cp_size, np.searchsorted(cu, edges[:-1], side="right") - 1)
    return shards_of(cu, edges, rank, cp_size, cap)


def lower_bound(work: npt.ArrayLike, k: int) -> float:
    """The mean load of k buckets; no assignment has a smaller maximum."""
    return float(np.sum(np.asarray(work, dtype=np.int64))) / k


def min_heap(work: npt.ArrayLike, k: int) -> Int64:
    """Bucket of each job (int[n] >= 0), int64[n]: the largest first, each into the least loaded bucket of fewer than ceil(n / k) jobs.

    Ties: the earlier job, the bucket of fewer jobs, the lower bucket.
    """
    values = _work(work, k)
    nothing = KeyRanges(offsets=np.zeros(len(values) + 1, np.int64), ranges=np.zeros((0, 2), np.int64))
    return topp_heap(values, k, nothing, top_p=0.0)


def topp_heap(work: npt.ArrayLike, k: int, keys: KeyRanges, *, top_p: float = 0.5) -> Int64:
    """As min_heap, but of the ceil(top_p · k) least loaded buckets that have room the one that needs most of the job's keys already.

    keys: those of each job. Affinity is the overlap of key ranges in rows; ties: the less loaded bucket.
    """
    values = _work(work, k)
    if not 0 <= top_p <= 1:
        raise ValueError(f"top_p is a share of the buckets, 0 … 1; got {top_p}.")
    if len(keys.offsets) != len(values) + 1:
        raise ValueError(f"keys must be those of the {len(values)} jobs; got {len(keys.offsets) - 1}.")
    order = np.argsort(-values, kind="stable")
    near = max(1, ceil(top_p * k))
    return _topp(values, order, k, -(-len(values) // k), near, keys.offsets, keys.ranges)


def sorted_sequential(work: npt.ArrayLike, k: int, sample: npt.ArrayLike, *, allocation_ratio: float = 1.0) -> Int64:
    """Bucket of each job: samples (int[n], of each job) by falling work; their jobs, the last first, go to the least loaded bucket.

    A bucket takes at most ceil(allocation_ratio · jobs of the sample / k) of a sample before the next one is visited, and at
    most ceil(n / k) jobs in all.
    """
    values, samples = _work(work, k), np.asarray(sample, dtype=np.int64)
    if not allocation_ratio > 0:
        raise ValueError(f"allocation_ratio must be above 0; got {allocation_ratio}.")
    _, place, count = np.unique(samples, return_inverse=True, return_counts=True)
    total = np.zeros(len(count), np.int64)
    np.add.at(total, place, values)
    order = np.lexsort((-np.arange(len(values)), place, -total[place]))
    visit = np.ceil(allocation_ratio * count[place] / k).astype(np.int64)
    return _visits(values, order, place, visit, k, -(-len(values) // k))


def exact(work: npt.ArrayLike, k: int, *, most: int | None = None) -> Int64:
    """Bucket of each job with the least maximum there is. most: jobs a bucket may hold; None: any number.

    Branch and bound, exponential: refuses more than 32 jobs.
    """
    values = _work(work, k)
    if len(values) > MOST_EXACT:
        raise ValueError(
            f"exact searches among at most {MOST_EXACT} jobs; got {len(values)}. Use min_heap, or larger chunks."
        )
    limit = len(values) if most is None else most
    if limit * k < len(values):
        raise ValueError(f"{k} buckets of at most {limit} jobs do not hold {len(values)}.")
    return _exact(values, np.argsort(-values, kind="stable"), k, limit)


def loads(work: npt.ArrayLike, bucket: npt.ArrayLike, k: int) -> Int64:
    """Work in each bucket, int64[k]."""
    total = np.zeros(k, np.int64)
    np.add.at(total, np.asarray(bucket, dtype=np.int64), np.asarray(work, dtype=np.int64))
    return total


def of_documents(mask: Mask | npt.ArrayLike) -> Mask:
    """A mask as it is; boundaries of documents, int[k + 1], as causal ones."""
    return mask if isinstance(mask, Mask) else causal(np.diff(boundaries(mask)))


def checked_cap(tokens: int, cp_size: int, max_tokens: int | None) -> int:
    """What a rank may hold: max_tokens, or anything."""
    even = -(-int(tokens) // cp_size) if cp_size > 0 else 0
    if cp_size < 1 or (max_tokens is not None and max_tokens < even):
        raise ValueError(
            f"A CP group has at least one rank, and they hold an even share, {even}; got cp_size={cp_size}, max_tokens={max_tokens}."
        )
    return int(tokens) if max_tokens is None else max_tokens


def shards_of(cu: Int64, edges: Int64, rank: Int64, cp_size: int, cap: int) -> Shards:
    """Shards of chunks (edges int64[c + 1], rank of each int64[c]), in the order of the pack, none of more than `cap` tokens."""
    if len(edges) < 2 or edges[-1] == edges[0]:
        nothing = np.zeros(0, np.int64)
        return from_pieces(cu, cp_size, nothing, nothing, nothing, nothing)
    start, holder = _fitted(edges, rank, cp_size, cap)
    cuts = np.union1d(cu, start)
    begin = cuts[:-1]
    piece = np.searchsorted(start, begin, side="right") - 1
    document = np.searchsorted(cu, begin, side="right") - 1
    return from_pieces(cu, cp_size, begin, cuts[1:], document, holder[piece])


def _work(work: npt.ArrayLike, k: int) -> Int64:
    values = np.asarray(work)
    if values.ndim != 1 or (len(values) and (values.dtype.kind not in "iu" or values.min() < 0)) or k < 1:
        raise ValueError(f"Work is integers >= 0 in one dimension, for at least one bucket; got {values} and k={k}.")
    return values.astype(np.int64)


@njit(nogil=True, cache=True)
def _topp(work, order, k, most, near, offsets, ranges):
    bucket, load, count = np.empty(len(work), np.int64), np.zeros(k, np.int64), np.zeros(k, np.int64)
    width = max(1, len(ranges))
    held, num = np.zeros((k, width, 2), np.int64), np.zeros(k, np.int64)
    for job in order:
        tried = count >= most
        best, closest = -1, np.int64(-1)
        for _ in range(near):
            least = -1
            for b in range(k):
                if not tried[b] and (least < 0 or (load[b], count[b]) < (load[least], count[least])):
                    least = b
            if least < 0:
                break
            tried[least] = True
            shared = np.int64(0)
            for i in range(offsets[job], offsets[job + 1]):
                for j in range(num[least]):
                    shared += max(0, min(ranges[i, 1], held[least, j, 1]) - max(ranges[i, 0], held[least, j, 0]))
            if shared > closest:
                best, closest = least, shared
        bucket[job] = best
        load[best] += work[job]
        count[best] += 1
        for i in range(offsets[job], offsets[job + 1]):
            num[best] = _unite(held[best], num[best], ranges[i, 0], ranges[i, 1])
    return bucket


@njit(nogil=True, cache=True)
def _unite(held, num, start, stop):
    """Add a range to ranges that are apart from each other; how many there are then."""
    kept = 0
    for j in range(num):
        if held[j, 1] < start or held[j, 0] > stop:
            held[kept] = held[j]
            kept += 1
        else:
            start, stop = min(start, held[j, 0]), max(stop, held[j, 1])
    held[kept] = start, stop
    return kept + 1


@njit(nogil=True, cache=True)
def _visits(work, order, place, visit, k, most):
    bucket, load, count = np.empty(len(work), np.int64), np.zeros(k, np.int64), np.zeros(k, np.int64)
    at, taken, sample = -1, 0, -1
    for job in order:
        if at < 0 or place[job] != sample or taken >= visit[job] or count[at] >= most:
            at, taken, sample = -1, 0, place[job]
            for b in range(k):
                if count[b] < most and (at < 0 or (load[b], count[b]) < (load[at], count[at])):
                    at = b
        bucket[job] = at
        load[at] += work[job]
        count[at] += 1
        taken += 1
    return bucket


@njit(nogil=True, cache=True)
def _exact(work, order, k, most):
    """Depth first over the jobs by falling work; a bucket like one tried before is skipped."""
    n = len(work)
    load, count, at = np.zeros(k, np.int64), np.zeros(k, np.int64), np.full(n + 1, -1, np.int64)
    best, found = np.int64(work.sum() + 1), np.zeros(n, np.int64)
    bound = max((work.sum() + k - 1) // k, work.max() if n else 0)
    depth = 0
    while depth >= 0 and best > bound:
        if depth == n:
            best = load.max()
            for i in range(n):
                found[order[i]] = at[i]
            depth -= 1
            continue
        size = work[order[depth]]
        if at[depth] >= 0:
            load[at[depth]] -= size
            count[at[depth]] -= 1
        b = at[depth] + 1
        while b < k:
            fresh = load[b] + size < best and count[b] < most
            for other in range(b):
                fresh = fresh and (load[other] != load[b] or count[other] != count[b])
            if fresh:
                break
            b += 1
        if b == k:
            at[depth] = -1
            depth -= 1
            continue
        at[depth] = b
        load[b] += size
        count[b] += 1
        depth += 1
    return found


@njit(nogil=True, cache=True)
def _fitted(edges, rank, ranks, cap):
    """(start, rank) of pieces, rising: chunks, but heads of those on overfull ranks go where there is room, and no rank is empty."""
    n, tokens = len(rank), np.zeros(ranks, np.int64)
    for c in range(n):
        tokens[rank[c]] += edges[c + 1] - edges[c]
    start, holder, num = np.empty(n + 3 * ranks, np.int64), np.empty(n + 3 * ranks, np.int64), 0
    for c in range(n):
        at, r = edges[c], rank[c]
        while at < edges[c + 1] and tokens[r] > cap:
            other = np.argmin(tokens)
            part = min(edges[c + 1] - at, tokens[r] - cap, cap - tokens[other])
            start[num], holder[num] = at, other
            tokens[r] -= part
            tokens[other] += part
            at, num = at + part, num + 1
        if at < edges[c + 1]:
            start[num], holder[num] = at, r
            num += 1
    for r in range(ranks):
        most = np.argmax(tokens)
        if tokens[r] > 0 or tokens[most] < 2:
            continue
        # The last token of the fullest rank's last piece.
        i = num - 1
        while holder[i] != most:
            i -= 1
        end = start[i + 1] if i + 1 < num else edges[n]
        if end - start[i] > 1:
            for j in range(num, i + 1, -1):
                start[j], holder[j] = start[j - 1], holder[j - 1]
            start[i + 1] = end - 1
            num, i = num + 1, i + 1
        holder[i] = r
        tokens[r] += 1
        tokens[most] -= 1
    return start[:num], holder[:num]
