"""Order: an endless stream of items, epoch after epoch, each epoch in an order of its own.

Decided here: a keyed bijection of their numbers, a Feistel network over the smallest even number of bits that holds them, walked
until it lands inside. No array of n is kept, any part of the stream is known at once, and every machine finds the same.

Cost: 10–50 ns per item, least where their number is just below a power of four.

    >>> sorted(Shuffled(size=4, seed=0).at(4, 8).tolist())     # the second epoch
    [0, 1, 2, 3]
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
from numba import njit


def key_of(*numbers: int) -> int:
    """A 64-bit key from a few integers, the same on every machine.

    >>> key_of(0, 1) == key_of(0, 1) != key_of(1, 0)
    True
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}q", *numbers))


@njit(nogil=True, cache=True)
def _mix(value, key):
    z = value + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(nogil=True, cache=True)
def _permute(first, count, size, key):
    half = np.uint64(1)
    while (np.uint64(1) << (half + half)) < np.uint64(size):
        half += np.uint64(1)
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = np.empty(count, np.int64)
    for i in range(count):
        value = np.uint64(first + i)
        while True:
            left, right = value >> half, value & mask
            for turn in range(6):
                left, right = right, left ^ (_mix(right, key + np.uint64(turn) * np.uint64(0x9E3779B97F4A7C15)) & mask)
            value = (left << half) | right
            if value < np.uint64(size):
                break
        out[i] = np.int64(value)
    return out


def permute(first: int, count: int, size: int, key: int) -> np.ndarray:
    """Images int64[count] of ``first … first + count`` under the keyed bijection of ``range(size)``.

    >>> sorted(permute(0, 5, 5, key=7).tolist())
    [0, 1, 2, 3, 4]
    """
    return _permute(np.int64(first), np.int64(count), np.int64(size), np.uint64(key))


class Order(Protocol):
    """An endless stream of items, epoch after epoch."""

    @property
    def size(self) -> int:
        """Items of an epoch."""

    def at(self, first: int, stop: int) -> np.ndarray:
        """Items int64[stop - first] at these positions of the stream, which may run over epoch edges."""


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Every item once per epoch, in an order of its own each epoch (``shuffle``) or as they are numbered.

    ``opening`` is an item that the first epoch begins with, changing places with the one that would have; None: none.
    """

    size: int
    seed: int
    shuffle: bool = True
    opening: int | None = None

    def at(self, first: int, stop: int) -> np.ndarray:
        """Items int64[stop - first] at these positions of the stream."""
        parts = []
        while first < stop:
            epoch, begin = divmod(first, self.size)
            count = min(stop - first, self.size - begin)
            parts.append(self._within(epoch, begin, count))
            first += count
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _within(self, epoch: int, begin: int, count: int) -> np.ndarray:
        if not self.shuffle:
            items = np.arange(begin, begin + count)
        else:
            items = permute(begin, count, self.size, key_of(self.seed, epoch))
        if self.opening is None or epoch:
            return items
        replaced = permute(0, 1, self.size, key_of(self.seed, 0))[0] if self.shuffle else 0
        return np.where(items == replaced, self.opening, np.where(items == self.opening, replaced, items))
