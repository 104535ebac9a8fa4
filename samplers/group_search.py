"""The search behind `rank_groups.py`: documents into groups of ranks under a target time, in numba.

Groups stand in a line by (size, slack), so that the smallest and, of these, the fullest group that takes a document is
found by two bisections per size in use. Slack and loads are those of the whole group, c times what each of its c ranks
does, so that nothing is divided. Merging walks the sizes from their loosest groups. One target over n documents costs
about n·log(ranks) steps; where the target is tight, each merge adds as many steps as there are ranks in the new group.

What is done for every document is inlined: numba counts the references of all arrays of a named tuple at each call,
which took two thirds of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from ..packing.packs import Int64

HUGE = 2**62
SCALE = 256
"""Prices are in 1/256 cost units, so that a fraction of a unit per row can be stated in integers."""


class Rules(NamedTuple):
    """GroupRules as kernels take them."""

    num_ranks: int
    cap: int
    pad: int
    sizes: Int64
    token_units: Int64


class _State(NamedTuple):
    """Groups while they form, int64[num_ranks] each. `line` has them by (size, slack), the unused last."""

    line: Int64
    size: Int64
    slack: Int64  # allowed[size] - work - token_units[size] x tokens: c times the time that is left
    work: Int64
    tokens: Int64
    held: Int64  # tokens, padded
    first: Int64  # its documents, a linked list
    last: Int64
    after: Int64  # int64[n], the next document of the group
    totals: Int64
    allowed: Int64  # int64[num_ranks + 1]: size x target


GROUPS, FREE, ROWS = 0, 1, 2


@njit(nogil=True, cache=True)
def search(work, tokens, order, num_ranks, cap, pad, sizes, token_units, targets, price, limit):
    """(found, group, size, makespan, rows) of the best target; the last one counts only where no other can be kept.

    A target is given up once its rows alone cost too much.
    """
    # Flat arguments: numba takes tens of microseconds to look at a named tuple from Python.
    rules = Rules(num_ranks, cap, pad, sizes, token_units)
    found, makespan, rows = False, np.int64(0), np.int64(0)
    group, size = np.empty(0, np.int64), np.empty(0, np.int64)
    for target in targets:
        if target == targets[-1] and found:
            break
        s = _new_state(len(work), rules, target)
        if _form(work, tokens, order, rules, s, price, limit):
            slowest = _makespan(s)
            score = SCALE * slowest + price * s.totals[ROWS]
            if score < limit:
                found, limit, makespan, rows = True, score, slowest, s.totals[ROWS]
                group, size = _label(s)
    return found, group, size, makespan, rows


@njit(nogil=True, cache=True)
def search_least(work, tokens, order, num_ranks, cap, pad, sizes, token_units, mean, without_limit, rounds):
    """(found, group, size, makespan, rows) of the least makespan that bisection between the mean and no limit finds."""
    rules = Rules(num_ranks, cap, pad, sizes, token_units)
    best = _new_state(len(work), rules, without_limit)
    found = _form(work, tokens, order, rules, best, np.int64(0), np.int64(HUGE))
    low, high = mean - 1, _makespan(best)
    for _ in range(rounds if found else 0):
        if high - low <= max(1, low // 1000):
            break
        s = _new_state(len(work), rules, (low + high) // 2)
        if _form(work, tokens, order, rules, s, np.int64(0), np.int64(HUGE)):
            best, high = s, _makespan(s)
        else:
            low = (low + high) // 2
    group, size = _label(best)
    return found, group, size, high, best.totals[ROWS]


@njit(nogil=True, cache=True)
def fill_slots(work, tokens, order, num_ranks, cap, pad, sizes, token_units):
    """(slot of each document, target of each slot): slots filled in turn, of the documents left over those that fit.

    The target of a slot is what a rank takes that is full of tokens as dear as its first document's. Nothing is merged:
    documents get the fewest ranks that hold them.
    """
    rules = Rules(num_ranks, cap, pad, sizes, token_units)
    slot, targets, count, placed = np.full(len(work), -1, np.int64), np.empty(len(work), np.int64), 0, 0
    while placed < len(work):
        before = placed
        for d in order:
            if slot[d] < 0:
                if placed == before:
                    per_token = (work[d] + token_units[sizes].max() * tokens[d]) // max(tokens[d], 1) + 1
                    targets[count] = min(per_token, HUGE // num_ranks // cap) * cap
                    s = _new_state(len(work), rules, targets[count])
                if _put(d, work, tokens, rules, s, False):
                    slot[d] = count
                    placed += 1
                elif placed == before:
                    return slot, targets[:0]
        count += 1
    return slot, targets[:count]


@njit(nogil=True, cache=True)
def _new_state(documents, rules, target):
    n = rules.num_ranks
    zeros, none = np.zeros((5, n), np.int64), np.full((2, n), -1, np.int64)
    return _State(
        np.arange(n), zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], none[0], none[1],
        np.full(documents, -1, np.int64), np.array([0, n, 0]), np.arange(n + 1) * target,
    )  # fmt: skip


@njit(nogil=True, cache=True)
def _form(work, tokens, order, rules, s, price, limit):
    """Put every document into a group that keeps the target; False where one finds none."""
    for d in order:
        if not _put(d, work, tokens, rules, s, True) or price * s.totals[ROWS] >= limit:
            return False
    return True


@njit(nogil=True, cache=True, inline="always")
def _put(d, work, tokens, rules, s, merging):
    """Put a document into a group that keeps the target; False where there is none."""
    w, t = work[d], tokens[d]
    opened = _opening(w, t, rules, s)
    at = _joining(w, t, opened, rules, s)
    if at < 0 and opened > 0:
        at = s.totals[GROUPS]
        _clear(s, s.line[at], opened)
        s.totals[GROUPS] += 1
        s.totals[FREE] -= opened
    elif at < 0 and merging:
        at = _merging(w, t, tokens, rules, s)
    if at < 0:
        return False
    g = s.line[at]
    s.work[g] += w
    s.tokens[g] += t
    s.slack[g] -= w + rules.token_units[s.size[g]] * t
    s.held[g] += _padded(t, s.size[g], rules.pad)
    s.totals[ROWS] += t * (s.size[g] - 1)
    _append(s, g, d, d)
    _settle(s, at)
    return True


@njit(nogil=True, cache=True, inline="always")
def _opening(w, t, rules, s):
    """The smallest size that keeps target and cap with this document alone, if as many ranks are free; else 0."""
    for c in rules.sizes:
        if c > s.totals[FREE]:
            return 0
        if w + rules.token_units[c] * t <= s.allowed[c] and _padded(t, c, rules.pad) <= c * rules.cap:
            return c
    return 0


@njit(nogil=True, cache=True, inline="always")
def _joining(w, t, opened, rules, s):
    """Place in line of the smallest, then fullest group that takes the document, none above `opened`; -1: none."""
    at, count = 0, s.totals[GROUPS]
    while at < count:
        c = s.size[s.line[at]]
        if 0 < opened < c:
            return -1
        end = _bisect(s, c + 1, -HUGE, at, count)
        at = _bisect(s, c, w + rules.token_units[c] * t, at, end)
        room = c * rules.cap - _padded(t, c, rules.pad)
        while at < end:
            if s.held[s.line[at]] <= room:
                return at
            at += 1
    return -1


@njit(nogil=True, cache=True)
def _merging(w, t, tokens, rules, s):
    """Merge groups and free ranks into the smallest group that takes the document; returns its place, -1: none."""
    ends = _runs(s)
    cursor, chosen = np.empty(len(ends), np.int64), np.empty(s.totals[GROUPS], np.int64)
    least = 0
    for c in rules.sizes:
        load, held = w + rules.token_units[c] * t, _padded(t, c, rules.pad)
        if c < least or load > s.allowed[c] or held > c * rules.cap:
            continue
        # Every size to 64 ranks, then a thirty-second more each time: at 4,096 ranks they are too many to try.
        least = c + c // 32 if c + c // 32 < rules.num_ranks else rules.num_ranks
        ranks, picked = 0, 0
        cursor[:] = ends - 1
        while ranks + s.totals[FREE] < c:
            run = _loosest(c - ranks, cursor, ends, s)
            if run < 0:
                break
            chosen[picked] = cursor[run]
            g = s.line[cursor[run]]
            cursor[run] -= 1
            picked += 1
            ranks += s.size[g]
            load += s.work[g] + rules.token_units[c] * s.tokens[g]
            held += _held(s, g, c, tokens, rules.pad)
        if ranks + s.totals[FREE] >= c and load <= s.allowed[c] and held <= c * rules.cap:
            return _merge(c, np.sort(chosen[:picked]), tokens, rules, s)
    return -1


@njit(nogil=True, cache=True)
def _runs(s):
    """Where the groups of each size end in line."""
    count, runs = s.totals[GROUPS], 0
    ends = np.empty(count, np.int64)
    for i in range(count):
        if i + 1 == count or s.size[s.line[i + 1]] != s.size[s.line[i]]:
            ends[runs] = i + 1
            runs += 1
    return ends[:runs]


@njit(nogil=True, cache=True)
def _loosest(ranks, cursor, ends, s):
    """The run whose next group, of at most `ranks` ranks, has most slack per rank (ties: the smaller); -1: none."""
    best, most = -1, np.int64(0)
    for run in range(len(ends)):
        begin = ends[run - 1] if run > 0 else 0
        if cursor[run] >= begin:
            g = s.line[cursor[run]]
            if s.size[g] <= ranks and (best < 0 or s.slack[g] // s.size[g] > most):
                best, most = run, s.slack[g] // s.size[g]
    return best


@njit(nogil=True, cache=True)
def _merge(c, chosen, tokens, rules, s):
    """Make one group of c ranks of those at the `chosen` places (rising) and of free ranks; returns its place."""
    groups = s.line[chosen]
    count, kept, at = s.totals[GROUPS], 0, 0
    for i in range(count):
        if at < len(chosen) and chosen[at] == i:
            at += 1
        else:
            s.line[kept] = s.line[i]
            kept += 1
    s.line[kept:count] = groups
    into = s.line[kept]
    work, total, held, ranks = np.int64(0), np.int64(0), np.int64(0), 0
    for g in groups:
        work, total, ranks = work + s.work[g], total + s.tokens[g], ranks + s.size[g]
        held += _held(s, g, c, tokens, rules.pad)
        s.totals[ROWS] += s.tokens[g] * (c - s.size[g])
        if g != into:
            _append(s, into, s.first[g], s.last[g])
    first, last = s.first[into], s.last[into]
    _clear(s, into, c)
    s.work[into], s.tokens[into], s.held[into], s.first[into], s.last[into] = work, total, held, first, last
    s.slack[into] -= work + rules.token_units[c] * total
    s.totals[GROUPS] = kept + 1
    s.totals[FREE] -= c - ranks
    return _settle(s, kept)


@njit(nogil=True, cache=True, inline="always")
def _clear(s, g, c):
    """Group g becomes an empty one of c ranks."""
    s.size[g], s.slack[g], s.work[g], s.tokens[g], s.held[g] = c, s.allowed[c], 0, 0, 0
    s.first[g], s.last[g] = -1, -1


@njit(nogil=True, cache=True, inline="always")
def _append(s, g, first, last):
    if s.first[g] < 0:
        s.first[g] = first
    else:
        s.after[s.last[g]] = first
    s.last[g] = last


@njit(nogil=True, cache=True, inline="always")
def _settle(s, at):
    """Move the group at this place forward in line to where it belongs; returns the place. Slack only ever shrinks."""
    g = s.line[at]
    while at > 0:
        other = s.line[at - 1]
        if s.size[other] < s.size[g] or (s.size[other] == s.size[g] and s.slack[other] <= s.slack[g]):
            break
        s.line[at] = other
        at -= 1
    s.line[at] = g
    return at


@njit(nogil=True, cache=True, inline="always")
def _bisect(s, size, slack, low, high):
    """The first place in line from low to high that is not before (size, slack)."""
    while low < high:
        middle = (low + high) // 2
        g = s.line[middle]
        if s.size[g] < size or (s.size[g] == size and s.slack[g] < slack):
            low = middle + 1
        else:
            high = middle
    return low


@njit(nogil=True, cache=True, inline="always")
def _padded(t, c, pad):
    step = pad * c if c > 1 else (pad + 1) // 2
    return t if pad == 0 else (t + step - 1) // step * step


@njit(nogil=True, cache=True)
def _held(s, g, c, tokens, pad):
    """Tokens of group g, padded as a group of c ranks pads them."""
    if pad == 0:
        return s.tokens[g]
    held, d = np.int64(0), s.first[g]
    while d >= 0:
        held += _padded(tokens[d], c, pad)
        d = s.after[d]
    return held


@njit(nogil=True, cache=True)
def _makespan(s):
    slowest = np.int64(0)
    for g in s.line[: s.totals[GROUPS]]:
        load = s.allowed[s.size[g]] - s.slack[g]
        slowest = max(slowest, (load + s.size[g] - 1) // s.size[g])
    return slowest


@njit(nogil=True, cache=True)
def _label(s):
    """(group of each document, size of each group), groups numbered as they stand in line."""
    group, size = np.full(len(s.after), -1, np.int64), np.empty(s.totals[GROUPS], np.int64)
    for i in range(len(size)):
        size[i] = s.size[s.line[i]]
        d = s.first[s.line[i]]
        while d >= 0:
            group[d] = i
            d = s.after[d]
    return group, size
