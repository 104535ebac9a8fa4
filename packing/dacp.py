"""DACP, distribution-aware context parallelism (Skrull, arXiv:2505.19609, section 4.2): what of a pack stays whole.

Decided here, for one pack and the CP group that runs it: which documents stay whole on one rank (*local*: nothing is
sent for them), and which are cut over the group (*distributed*). A rank computes its local documents while the keys and
values of the distributed ones travel, so with costs in int64 units (`whole`, `split` per rank, `sent` per rank)

    Time_j = max(Σ sent of distributed, Σ whole of local on j) + Σ split of distributed,

and a rank holds Σ local + Σ distributed / cp tokens, which never exceeds the cap. The published heuristic goes through the
documents by rising length: to the rank with least work if it has room, else to the roomiest, else it is cut; where even
that does not fit, the last local document of the fullest rank is rolled back. It avoids cutting first and looks at time
second, and it fails where solutions exist (with 5 % of slack on more than half of 128K packs). Here it is one of the
candidates; the others are everything cut (which fits whenever anything does), and for many k the k costliest cut and the
rest dealt by LPT. The candidate of least time is then improved by single changes (a document cut, made whole, moved)
and by exchanges.

Cost: a few LPTs of the pack, 0.05–1 ms for 30–500 documents.

    >>> tokens = np.array([1000, 1000, 1000, 1000, 6000])
    >>> whole = tokens + tokens**2 // 1000
    >>> dacp(tokens, whole, whole // 4, tokens // 2, cp_size=4, max_tokens_per_rank=2600)
    array([ 0,  1,  2,  3, -1])
    >>> print(dacp_shards([0, 1000, 2000, 3000, 4000, 10000], [0, 1, 2, 3, -1], 4))
    4 ranks x 2500 tokens in 11 segments; pairs max/mean 1.000
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from .assign import same_length
from .cost import CostModel, SecondsOf, cost_units
from .efficiency import efficiency
from .packs import Int64
from .shards import Shards, zigzag
from .swaps import refine

TRIES = 24  # sizes of the distributed part that are tried
PASSES = 3
MAX_INT64 = np.iinfo(np.int64).max


def dacp(
    tokens: npt.ArrayLike,
    whole: npt.ArrayLike,
    split: npt.ArrayLike,
    sent: npt.ArrayLike,
    *,
    cp_size: int,
    max_tokens_per_rank: int,
) -> Int64:
    """The rank that holds each of n documents whole, int64[n]; -1: cut over all.

    tokens int[n]; whole: cost of a document on one rank, split: its cost on each rank when it is cut, sent: the time
    its keys and values then travel; int[n] in one unit (`dacp_costs`). No rank exceeds `max_tokens_per_rank`, and none
    stays empty where there are as many tokens as ranks. Raises ValueError where not even cut documents fit.
    """
    whole, tokens = same_length(whole, tokens)
    split, sent = same_length(split, tokens)[0], same_length(sent, tokens)[0]
    if cp_size < 1 or -(-int(tokens.sum()) // cp_size) > max_tokens_per_rank:
        raise ValueError(
            f"{int(tokens.sum())} tokens do not fit on cp_size={cp_size} ranks of {max_tokens_per_rank} tokens; raise "
            "the cap or the group, or make packs smaller."
        )
    cp, cap = int(cp_size), int(max_tokens_per_rank)
    rank = _decide(tokens, whole, split, sent, np.argsort(tokens, kind="stable"), cp, cap)
    share = -(-int(tokens[rank < 0].sum()) // cp)
    exchanged = refine(whole, tokens, rank, cp, cap - share)
    arrays = (tokens, whole, split, sent)
    return exchanged if _time(*arrays, exchanged, cp, cap) < _time(*arrays, rank, cp, cap) else rank


def dacp_costs(
    tokens: npt.ArrayLike,
    pairs: npt.ArrayLike,
    cp_size: int,
    cost: CostModel | SecondsOf,
    seconds_per_row: float,
) -> tuple[Int64, Int64, Int64]:
    """(whole, split, sent) int64[n] nanoseconds of documents with `tokens` and `pairs`, int[n], for `dacp`.

    seconds_per_row: to send the keys and values of one token to the next rank, all layers, both ways as `cost` counts them.
    A cut document's pairs cost more by what shorter pieces lose in kernel efficiency.
    """
    tokens, pairs = np.asarray(tokens, dtype=np.int64), np.asarray(pairs, dtype=np.int64)
    whole = cost_units(cost, pairs, tokens)
    rows, keys = np.maximum(-(-tokens // cp_size), 1), np.maximum(tokens, 1)
    loss = np.maximum(efficiency(keys, keys) / efficiency(rows, keys), 1.0)
    split = cost_units(cost, np.ceil(pairs * loss / cp_size).astype(np.int64), -(-tokens // cp_size))
    received = tokens - -(-tokens // cp_size)
    return whole, split, np.rint(received * (seconds_per_row * 1e9)).astype(np.int64)


def dacp_time(
    tokens: npt.ArrayLike,
    whole: npt.ArrayLike,
    split: npt.ArrayLike,
    sent: npt.ArrayLike,
    rank: npt.ArrayLike,
    *,
    cp_size: int,
    max_tokens_per_rank: int,
) -> int | None:
    """Units until the slowest rank is done with a decision `rank` as `dacp` returns it; None where it breaks the cap."""
    whole, tokens = same_length(whole, tokens)
    split, sent = same_length(split, tokens)[0], same_length(sent, tokens)[0]
    units = int(
        _time(tokens, whole, split, sent, np.asarray(rank, dtype=np.int64), int(cp_size), int(max_tokens_per_rank))
    )
    return None if units == MAX_INT64 else units


def dacp_shards(cu_seqlens: npt.ArrayLike, rank: npt.ArrayLike, cp_size: int) -> Shards:
    """Shards of a pack (cu_seqlens int[k + 1]) whose documents are placed by `rank` int[k], as `dacp` returns it.

    Local documents lie whole on their rank; the others are cut as `zigzag` cuts them, as if they were alone.
    """
    cu, rank = np.asarray(cu_seqlens, dtype=np.int64), np.asarray(rank, dtype=np.int64)
    if len(rank) != len(cu) - 1 or (len(rank) and not -1 <= rank.min() <= rank.max() < cp_size):
        raise ValueError(
            f"dacp_shards wants a rank of -1 … {cp_size - 1} for each of {len(cu) - 1} documents; got {rank}."
        )
    cut, local = np.flatnonzero(rank < 0), np.flatnonzero((rank >= 0) & (np.diff(cu) > 0))
    alone = np.concatenate([[0], np.cumsum(np.diff(cu)[cut])])
    pieces = zigzag(alone, cp_size)
    document = cut[pieces.document]
    shift = (cu[document] - alone[pieces.document])[:, None]
    segments = np.concatenate([pieces.segments + shift, np.stack([cu[local], cu[local + 1]], axis=1)])
    holder = np.concatenate([np.repeat(np.arange(cp_size), np.diff(pieces.offsets)), rank[local]])
    order = np.lexsort((segments[:, 0], holder))
    return Shards(
        cu_seqlens=cu,
        cp_size=cp_size,
        offsets=np.searchsorted(holder[order], np.arange(cp_size + 1)).astype(np.int64),
        segments=segments[order],
        document=np.concatenate([document, local])[order],
    )


@njit(nogil=True, cache=True)
def _time(tokens, whole, split, sent, rank, cp, cap):
    """Time of the slowest rank; MAX_INT64 where the cap is broken or a rank is idle that need not be."""
    local, work = np.zeros(cp, np.int64), np.zeros(cp, np.int64)
    cut = comm = after = np.int64(0)
    for i in range(len(tokens)):
        if rank[i] < 0:
            cut, comm, after = cut + tokens[i], comm + sent[i], after + split[i]
        else:
            local[rank[i]] += tokens[i]
            work[rank[i]] += whole[i]
    if local.max() + -(-cut // cp) > cap or _idle(local, cut):
        return MAX_INT64
    return max(comm, work.max()) + after


@njit(nogil=True, cache=True)
def _idle(local, cut):
    """Whether a rank holds no token that could hold one; of a few cut tokens each of the first ranks gets one."""
    for r in range(cut, len(local)):
        if local[r] == 0:
            return cut + local.sum() >= len(local)
    return False


@njit(nogil=True, cache=True)
def _decide(tokens, whole, split, sent, rising, cp, cap):
    n = len(tokens)
    best = np.full(n, -1, np.int64)
    least = _time(tokens, whole, split, sent, best, cp, cap)
    rank = np.full(n, -1, np.int64)
    if _published(tokens, whole, split, rising, cp, cap, rank):
        time = _time(tokens, whole, split, sent, rank, cp, cap)
        if time <= least:
            best, least = rank.copy(), time
    falling = np.argsort(-whole, kind="mergesort")
    # 0, 1, 2 … and, where documents are many, ever larger steps.
    k: Any = np.int64(0)
    while k < n:
        if _deal(tokens, whole, falling, k, cp, cap, rank):
            time = _time(tokens, whole, split, sent, rank, cp, cap)
            if time < least:
                best, least = rank.copy(), time
        k += max(1, k * 4 // TRIES)
    _improve(tokens, whole, split, sent, falling, cp, cap, best, least)
    return best


@njit(nogil=True, cache=True)
def _published(tokens, whole, split, rising, cp, cap, rank):
    """The paper's greedy with roll-back, into `rank`; False where it finds no room. Room is counted in 1/cp tokens."""
    rank[:] = -1
    room, load = np.full(cp, cap * cp, np.int64), np.zeros(cp, np.int64)
    last = np.full(cp, -1, np.int64)  # the local document placed last on each rank, and the one before each
    before = np.full(len(tokens), -1, np.int64)
    for i in rising:
        while True:
            t = np.argmin(load)
            if room[t] < tokens[i] * cp:
                t = np.argmax(room)
            if room[t] >= tokens[i] * cp:
                rank[i], before[i], last[t] = t, last[t], i
                room[t] -= tokens[i] * cp
                load[t] += whole[i]
                break
            t = np.argmin(room)
            if room[t] >= tokens[i]:
                room -= tokens[i]
                load += split[i]
                break
            undone = last[t]
            if undone < 0:
                return False
            last[t], rank[undone] = before[undone], -1
            room[t] += tokens[undone] * cp
            load[t] -= whole[undone]
            room -= tokens[undone]
            load += split[undone]
            if room.min() < 0:
                return False
    return True


@njit(nogil=True, cache=True)
def _deal(tokens, whole, falling, k, cp, cap, rank):
    """The k costliest cut, the others to the rank of least work with room, or cut too; False where that finds no room."""
    rank[:] = -1
    cut = np.int64(0)
    for i in falling[:k]:
        cut += tokens[i]
    local, work = np.zeros(cp, np.int64), np.zeros(cp, np.int64)
    for i in falling[k:]:
        share = -(-cut // cp)
        best = -1
        for r in range(cp):
            if local[r] + tokens[i] + share <= cap and (best < 0 or work[r] < work[best]):
                best = r
        if best >= 0:
            rank[i] = best
            local[best] += tokens[i]
            work[best] += whole[i]
        else:
            cut += tokens[i]
            if local.max() + -(-cut // cp) > cap:
                return False
    return True


@njit(nogil=True, cache=True)
def _improve(tokens, whole, split, sent, falling, cp, cap, rank, least):
    """Change one document at a time, in place, as long as it saves time: cut it, or give it to the rank of least work."""
    local, work = np.zeros(cp, np.int64), np.zeros(cp, np.int64)
    shared = np.zeros(3, np.int64)  # tokens that are cut, the time they travel, the time they take
    on, off = np.int64(1), np.int64(-1)  # else each is compiled for
    for i in range(len(tokens)):
        _add(tokens, whole, split, sent, local, work, shared, i, rank[i], on)
    for _ in range(PASSES):
        at_first = least
        for i in falling:
            was = best = rank[i]
            _add(tokens, whole, split, sent, local, work, shared, i, was, off)
            idlest: Any = np.int64(-1)
            for r in range(cp):
                fits = local[r] + tokens[i] + -(-shared[0] // cp) <= cap
                if fits and (idlest < 0 or work[r] < work[idlest]):
                    idlest = r
            for other in (np.int64(-1), idlest):
                _add(tokens, whole, split, sent, local, work, shared, i, other, on)
                time = max(shared[1], work.max()) + shared[2]
                if time < least and local.max() + -(-shared[0] // cp) <= cap and not _idle(local, shared[0]):
                    best, least = other, time
                _add(tokens, whole, split, sent, local, work, shared, i, other, off)
            rank[i] = best
            _add(tokens, whole, split, sent, local, work, shared, i, best, on)
        if least == at_first:
            break


@njit(nogil=True, cache=True)
def _add(tokens, whole, split, sent, local, work, shared, i, r, sign):
    """Put document i on rank r, or cut it (-1); sign -1 takes it away again."""
    if r < 0:
        shared[0] += sign * tokens[i]
        shared[1] += sign * sent[i]
        shared[2] += sign * split[i]
    else:
        local[r] += sign * tokens[i]
        work[r] += sign * whole[i]
