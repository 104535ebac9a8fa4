"""Exact best-fit-decreasing: few packs of a fixed size, in half the time numpy takes to sort the lengths.

Decides which documents share a pack of `capacity` tokens, as TRL, LLaMA-Factory and ms-swift do, whose Python takes
6 to 12 s for a million documents. The same packs come out of four ideas that make it a matter of milliseconds:

1. lengths are sorted by counting (one step of a few hundred documents is sorted by numpy: a table would cost more);
2. open packs stand in lists by remaining room, so "the least room that is enough" is the next list that is not empty;
3. a bitmap of three levels finds that list in a handful of instructions, whatever the capacity;
4. equal lengths are placed in runs: the pack that fits one best is, once it holds it, the one that fits the next best.

    >>> import numpy as np
    >>> order, offsets = best_fit_decreasing(np.array([3, 7, 5, 2]), 10)
    >>> [order[a:b].tolist() for a, b in zip(offsets[:-1], offsets[1:])]
    [[1, 0], [2, 3]]
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .packs import Int64

COUNTING = 64
"""Lengths are counted where the longest is below COUNTING x the number of items, else sorted."""


def best_fit_decreasing(tokens: npt.ArrayLike, capacity: int) -> tuple[Int64, Int64]:
    """Pack items of `tokens` (int[n], each 1 … capacity) into packs of `capacity`; returns (order int64[n], offsets).

    Items come in order of falling length, equal ones by index; each goes into the open pack with the least room that
    is enough, among equals into the one that was filled last; where none is open that fits, a new pack is opened.
    Packs are numbered as they open, items keep the order in which they were placed. Scratch memory is 4 bytes of
    address space per token of capacity, touched only where packs land.
    """
    tokens = fitting(tokens, capacity)
    if len(tokens) == 0:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    longest, total = int(tokens.max()), int(tokens.sum())
    # Counting scans a table of `longest` entries: too dear for the few documents of one step.
    if COUNTING * len(tokens) > longest:
        lengths, counts = _runs_by_counting(tokens, longest)
        keys, key_of_run = tokens, lengths
    else:
        lengths, counts, keys = _runs_by_sorting(tokens, np.argsort(tokens))
        key_of_run = np.arange(len(lengths))
    capacity = min(int(capacity), total)
    # All packs but one are more than half full, or the last of them would have gone into the one before. A fragment
    # ends a run, or leaves its pack less than half the room it had.
    max_packs = min(len(tokens), 2 * total // capacity + 2)
    max_fragments = min(len(tokens), len(lengths) + max_packs * capacity.bit_length())
    pack_of, size, first, packs = _best_fit(lengths, counts, capacity, max_packs, max_fragments)
    order = np.empty(len(tokens), np.int64)
    return order, _fill(order, keys, key_of_run, first, pack_of, size, packs)


def fitting(tokens: npt.ArrayLike, capacity: int) -> Int64:
    """tokens as int64[n]; refuses items that fit into no pack, and empty ones."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be integers in one dimension; got {array.dtype} of shape {array.shape}.")
    if len(array) >= 2**31:
        raise ValueError(f"Items are numbered in 32 bits while packing; got {len(array)}. Pack them in parts.")
    array = np.ascontiguousarray(array, dtype=np.int64)
    if len(array) and (array.min() < 1 or array.max() > capacity):
        at = int(np.flatnonzero((array < 1) | (array > capacity))[0])
        raise ValueError(
            f"Every item must hold 1 … {capacity} tokens to fit into a pack; item {at} holds {array[at]}. "
            "Split, truncate or drop it first."
        )
    return array


def _emit_trailing_zeros(typingctx, word):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


# Number of zero bits below the lowest one of a word that is not 0: numba has no public name for the instruction.
_trailing_zeros: Any = intrinsic(_emit_trailing_zeros)


@njit(nogil=True, cache=True)
def _runs_by_counting(tokens, longest):
    """(lengths that occur, falling; how often each does)."""
    table = np.zeros(longest + 1, np.int32)
    for i in range(len(tokens)):
        table[tokens[i]] += 1
    most = min(longest, len(tokens))
    lengths, counts = np.empty(most, np.int64), np.empty(most, np.int64)
    runs = 0
    for length in range(longest, 0, -1):
        if table[length]:
            lengths[runs], counts[runs] = length, table[length]
            runs += 1
    return lengths[:runs], counts[:runs]


@njit(nogil=True, cache=True)
def _runs_by_sorting(tokens, rising):
    """(lengths that occur, falling; how often each does; the run of each item), from the items by rising length."""
    n = len(tokens)
    lengths, counts, run_of = np.empty(n, np.int64), np.zeros(n, np.int64), np.empty(n, np.int64)
    runs = 0
    for i in rising[::-1]:
        if runs == 0 or tokens[i] != lengths[runs - 1]:
            lengths[runs] = tokens[i]
            runs += 1
        counts[runs - 1] += 1
        run_of[i] = runs - 1
    return lengths[:runs], counts[:runs], run_of


@njit(nogil=True, cache=True)
def _set(bits, groups, tops, room):
    bits[room >> 6] |= np.uint64(1) << np.uint64(room & 63)
    groups[room >> 12] |= np.uint64(1) << np.uint64((room >> 6) & 63)
    tops[room >> 18] |= np.uint64(1) << np.uint64((room >> 12) & 63)


@njit(nogil=True, cache=True)
def _clear(bits, groups, tops, room):
    bits[room >> 6] &= ~(np.uint64(1) << np.uint64(room & 63))
    if bits[room >> 6] == 0:
        groups[room >> 12] &= ~(np.uint64(1) << np.uint64((room >> 6) & 63))
        if groups[room >> 12] == 0:
            tops[room >> 18] &= ~(np.uint64(1) << np.uint64((room >> 12) & 63))


@njit(nogil=True, cache=True)
def _above(words, at):
    """The bits of the word that holds bit `at` which lie at it or above; none past the last word."""
    if at >> 6 >= len(words):
        return np.uint64(0)
    return words[at >> 6] & (~np.uint64(0) << np.uint64(at & 63))


@njit(nogil=True, cache=True)
def _next_room(bits, groups, tops, wanted):
    """The least room >= wanted that is set, or -1."""
    word = _above(bits, wanted)
    if word:
        return (wanted >> 6 << 6) + _trailing_zeros(word)
    at = (wanted >> 6) + 1
    word = _above(groups, at)
    if not word:
        at = (at >> 6) + 1
        word = _above(tops, at)
        top = at >> 6
        while not word:
            top += 1
            if top >= len(tops):
                return np.int64(-1)
            word = tops[top]
        at = (top << 6) + _trailing_zeros(word)
        word = groups[at]
        at <<= 6
    at = (at >> 6 << 6) + _trailing_zeros(word)
    return (at << 6) + _trailing_zeros(bits[at])


@njit(nogil=True, cache=True)
def _best_fit(lengths, counts, capacity, max_packs, max_fragments):
    """Fragments, runs of equal items placed into one pack at once: (pack, size) of each, in order of placement; and the
    first fragment of every run."""
    shortest = lengths[-1]
    bits = np.zeros((capacity >> 6) + 1, np.uint64)
    groups = np.zeros((capacity >> 12) + 1, np.uint64)
    tops = np.zeros((capacity >> 18) + 1, np.uint64)
    # head[room] is the pack filled last among those with that room; valid only where the room's bit is set, so that
    # the table need not be cleared. below[pack] is the next one in its list, -1 at the end.
    head = np.empty(capacity + 1, np.int32)
    below = np.empty(max_packs, np.int32)
    pack_of, size = np.empty(max_fragments, np.int32), np.empty(max_fragments, np.int32)
    first = np.empty(len(lengths), np.int64)
    fragments = packs = np.int64(0)
    for run in range(len(lengths)):
        length, left = lengths[run], counts[run]
        first[run] = fragments
        while left:
            room = _next_room(bits, groups, tops, length)
            if room < 0:
                room, pack = capacity, packs
                packs += 1
            else:
                pack = np.int64(head[room])
                if below[pack] >= 0:
                    head[room] = below[pack]
                else:
                    _clear(bits, groups, tops, room)
            count = 1 if left == 1 or room < 2 * length else min(left, room // length)
            pack_of[fragments], size[fragments] = pack, count
            fragments += 1
            left -= count
            room -= count * length
            if room >= shortest:
                listed = bits[room >> 6] >> np.uint64(room & 63) & np.uint64(1)
                below[pack] = head[room] if listed else -1
                head[room] = pack
                if not listed:
                    _set(bits, groups, tops, room)
    return pack_of[:fragments], size[:fragments], first, packs


@njit(nogil=True, cache=True)
def _fill(order, keys, key_of_run, first, pack_of, size, packs):
    """Write CSR: items of a key (their length, or their run) go by index into the fragments of its run, in turn."""
    offsets = np.zeros(packs + 1, np.int64)
    for fragment in range(len(pack_of)):
        offsets[pack_of[fragment] + 1] += size[fragment]
    offsets = np.cumsum(offsets)
    end = offsets[:-1].copy()
    begin = np.empty(len(pack_of), np.int32)
    for fragment in range(len(pack_of)):
        begin[fragment] = end[pack_of[fragment]]
        end[pack_of[fragment]] += size[fragment]
    # Of every key: where its next item goes and where its fragment ends; which fragment that is.
    cursor = np.empty((key_of_run.max() + 1, 2), np.int32)
    current = np.empty(key_of_run.max() + 1, np.int32)
    for run in range(len(first)):
        fragment, key = first[run], key_of_run[run]
        cursor[key, 0], cursor[key, 1] = begin[fragment], begin[fragment] + size[fragment]
        current[key] = fragment
    for i in range(len(keys)):
        # Unsigned, or numba would test every index for being negative: a quarter of the time of this loop.
        key = np.uint64(keys[i])
        at = cursor[key, 0]
        if at == cursor[key, 1]:
            fragment = current[key] + 1
            at = begin[fragment]
            cursor[key, 1], current[key] = at + size[fragment], fragment
        order[np.uint32(at)] = i
        cursor[key, 0] = at + 1
    return offsets
