"""A mask as DCP's hypergraph (SOSP'25): blocks of tokens, units of work between them, and the bytes that placing both costs.

Documents are cut into blocks of at most `block` tokens. The queries, keys, values and outputs of a block lie together, on its
*home*; a *unit* is a block of queries, a block of keys and a group of heads that have pairs in common, and is computed by its
*owner*. Each block has two nets per head group: its KV rows, which travel from home to every other rank that owns a unit with these
keys, dK and dV coming back; and its Q rows, which travel to every other owner of a unit with these queries, outputs and dQ coming
back. Their bytes are the connectivity objective (km1), exact but for rows that no pair of a unit needs.

Decided here: the size of blocks, by the paper's rule: halved from the longest document on until dealing blocks out by LPT leaves no
rank more than 1 + `memory` times the mean of the tokens, 256 at the least; and, ours, until a rank has sixteen of them: by the
paper's rule one long document is cut into one block a rank, and sparse masks into blocks that are wider than what they see.

    >>> from .mask_kinds import causal
    >>> graph = BlockGraph.of(causal([6, 3]), block=2, row_bytes=RowBytes.of(heads=4, kv_heads=2, dim=8))
    >>> graph.edges, graph.q, graph.k, graph.pairs
    (array([0, 2, 4, 6, 8, 9]), array([0, 1, 1, 2, 2, 2, 3, 4, 4]), array([0, 0, 1, 0, 1, 2, 3, 3, 4]), array([3, 4, 3, 4, 4, 3, 3, 2, 1]))
    >>> RowBytes.of(heads=4, kv_heads=2, dim=8)                       # of one row, there and back
    RowBytes(kv=(64, 128), q=(208, 272))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numba import njit

from .mask_areas import block_pairs
from .masks import Mask
from .packs import Int64

LEAST_BLOCK = 256
PER_RANK = 16
"""Blocks that an even share of the tokens has at the least."""


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of one row of a head group, in forward and backward: (from home to where it is used, from there to home)."""

    kv: tuple[int, int]
    q: tuple[int, int]

    def __post_init__(self) -> None:
        if min(*self.kv, *self.q) < 0 or self.kv[0] < 1 or self.q[0] < 1:
            raise ValueError(f"A row has at least one byte where it is used; got {self}.")

    @staticmethod
    def of(
        heads: int, kv_heads: int, dim: int, *, groups: int = 1, itemsize: int = 2, backward: bool = True
    ) -> RowBytes:
        """What the executor moves for numbers of `itemsize` bytes, kept from forward to backward; partial results in at least 4."""
        wide, g = max(itemsize, 4), groups
        if heads % g or kv_heads % g or g < 1:
            raise ValueError(f"Head groups divide query and KV heads; got {g} for {heads} and {kv_heads}.")
        kv, q, lse = 2 * kv_heads // g * dim, heads // g * dim, heads // g * wide
        if not backward:
            return RowBytes(kv=(kv * itemsize, 0), q=(q * itemsize, q * wide + lse))
        return RowBytes(kv=(kv * itemsize, kv * wide), q=(3 * q * itemsize + lse, 2 * q * wide + lse))


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockGraph:
    """n blocks, m units in each of `groups` head groups. Nets are numbered kind · groups · n + group · n + block, KV first."""

    edges: Int64
    """int64[n + 1], where blocks begin and end in the domain; documents begin at one of them."""
    document: Int64
    """int64[n], the document of each block."""
    q: Int64
    """int64[m], the block of each unit's queries, rising."""
    k: Int64
    """int64[m], the block of its keys, rising among those of the same queries."""
    pairs: Int64
    """int64[m]."""
    row_bytes: RowBytes
    groups: int = 1

    @staticmethod
    def of(mask: Mask, *, block: int, row_bytes: RowBytes, groups: int = 1) -> BlockGraph:
        """Of the masks of all packs of the domain, end to end."""
        if block < 1 or groups < 1:
            raise ValueError(
                f"Blocks have at least one token and heads are one group at least; got {block} and {groups}."
            )
        tokens = mask.tokens
        num = -(-tokens // block)
        document = np.repeat(np.arange(len(tokens)), num)
        first = np.cumsum(num) - num
        begin = mask.cu_seqlens[document] + (np.arange(len(document)) - first[document]) * block
        return _graph(mask, np.append(begin, mask.cu_seqlens[-1]), document, row_bytes, groups)

    @property
    def tokens(self) -> Int64:
        """Of each block, int64[n]."""
        return np.diff(self.edges)

    @property
    def nets(self) -> tuple[Int64, Int64]:
        """(from home, back home), bytes of each net, int64[2 · groups · n]."""
        kv, q = (np.tile(self.tokens, self.groups)[:, None] * way for way in (self.row_bytes.kv, self.row_bytes.q))
        both = np.concatenate([kv, q])
        return both[:, 0].copy(), both[:, 1].copy()

    def units(self) -> tuple[Int64, Int64, Int64]:
        """(net of its queries, net of its keys, pairs) of each unit of each head group, int64[groups · m]."""
        n, groups = len(self.tokens), self.groups
        first = np.repeat(np.arange(groups) * n, len(self.q))
        q, k, pairs = (np.tile(values, groups) for values in (self.q, self.k, self.pairs))
        return q + first + groups * n, k + first, pairs

    def refined(self, mask: Mask, edges: Int64) -> BlockGraph:
        """The same mask between finer blocks. edges: int64[f + 1], all of this graph's among them."""
        document = self.document[np.searchsorted(self.edges, edges[:-1], side="right") - 1]
        return _graph(mask, edges, document, self.row_bytes, self.groups)

    def coarser(self, factor: int) -> tuple[BlockGraph, Int64, Int64]:
        """Neighbouring blocks of a document in one: (graph, its block of each block int64[n], its unit of each unit int64[m])."""
        first = np.searchsorted(self.document, self.document)
        within = (np.arange(len(self.document)) - first) // factor
        new = np.ones(len(within), bool)
        new[1:] = (within[1:] != within[:-1]) | (self.document[1:] != self.document[:-1])
        block = np.cumsum(new) - 1
        coarse, unit = self.merged(block)
        return coarse, block, unit

    def merged(self, cluster: Int64) -> tuple[BlockGraph, Int64]:
        """Runs of blocks in one, each within a document: (graph, its unit of each unit int64[m]). cluster: int64[n], rising from 0."""
        new = np.diff(cluster, prepend=-1) > 0
        q, k, pairs, unit = _merged(cluster, self.q, self.k, self.pairs)
        edges = np.append(self.edges[:-1][new], self.edges[-1])
        return replace(self, edges=edges, document=self.document[new], q=q, k=k, pairs=pairs), unit


def chosen_block(mask: Mask, ranks: int, memory: float) -> int:
    """The size of blocks for so many ranks: see the module."""
    longest, total = int(mask.tokens.max(initial=1)), int(mask.tokens.sum())
    block = 1 << max(longest - 1, 0).bit_length()
    while block > LEAST_BLOCK:
        if block * PER_RANK * ranks <= total and _fullest(mask.tokens, block, ranks) * ranks <= (1 + memory) * total:
            break
        block //= 2
    return max(block, LEAST_BLOCK)


def _graph(mask: Mask, edges: Int64, document: Int64, row_bytes: RowBytes, groups: int) -> BlockGraph:
    units = block_pairs(mask.tiles_of_pack(), edges)
    return BlockGraph(
        edges=edges,
        document=document,
        q=units.row,
        k=units.column,
        pairs=units.pairs,
        row_bytes=row_bytes,
        groups=groups,
    )


def _fullest(tokens: Int64, block: int, ranks: int) -> int:
    """Tokens of the fullest rank once blocks are dealt out, the largest first, each to the emptiest rank."""
    whole, rest = np.divmod(tokens, block)
    rest = rest[rest > 0]
    return int(_dealt(int(whole.sum()), block, -np.sort(-rest), ranks).max())


@njit(nogil=True, cache=True)
def grouped(keys, n):
    """(offsets int64[n + 1], order int64[m]): where each of n keys is among keys int64[m], one key after the other, in order. To be
    called from Python: a kernel calls those of its own file only."""
    offsets, order = np.zeros(n + 1, np.int64), np.empty(len(keys), np.int64)
    for key in keys:
        offsets[key + 1] += 1
    for i in range(n):
        offsets[i + 1] += offsets[i]
    at = offsets[:-1].copy()
    for i in range(len(keys)):
        order[at[keys[i]]] = i
        at[keys[i]] += 1
    return offsets, order


@njit(nogil=True, cache=True)
def _merged(cluster, q, k, pairs):
    """Units between clusters of blocks, and which of them each unit belongs to."""
    num = cluster[-1] + 1 if len(cluster) else 0
    row, column, total = np.empty(len(q), np.int64), np.empty(len(q), np.int64), np.zeros(len(q), np.int64)
    unit, at, seen, some, u = np.empty(len(q), np.int64), np.empty(num, np.int64), np.full(num, -1, np.int64), 0, 0
    while u < len(q):
        c, first, begin = cluster[q[u]], u, some
        while u < len(q) and cluster[q[u]] == c:
            if seen[cluster[k[u]]] != c:
                seen[cluster[k[u]]] = c
                row[some], column[some] = c, cluster[k[u]]
                some += 1
            u += 1
        column[begin:some].sort()
        for i in range(begin, some):
            at[column[i]] = i
        for v in range(first, u):
            unit[v] = at[cluster[k[v]]]
            total[unit[v]] += pairs[v]
    return row[:some].copy(), column[:some].copy(), total[:some].copy(), unit


@njit(nogil=True, cache=True)
def _dealt(whole, block, rest, ranks):
    held = np.empty(ranks, np.int64)
    for r in range(ranks):
        held[r] = (whole // ranks + (1 if r < whole % ranks else 0)) * block
    for size in rest:
        held[np.argmin(held)] += size
    return held
