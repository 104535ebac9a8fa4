"""Placing blocks and their attention on ranks as DCP does (SOSP'25, section 4): who holds which tokens, who computes which unit.

The domain is all of DP x CP of a slot, with all packs end to end; the mask may be any. A hypergraph (block_graph.py) says what a
placement costs in bytes. Decided here, under these limits:

- tokens: no rank holds more than `max_tokens`, which is hard: where blocks do not fit, their heads go elsewhere; and, as far as
  whole blocks allow, none holds more than 1 + `memory` times the mean;
- pairs: as far as units allow, no rank computes more than 1 + `balance` times the mean. With `devices_per_node`, nodes are filled
  first, each to 1 + `node_balance` of an even share, and then the devices of each node to 1 + `balance` of the node's;
- bytes: the objective, of all ranks ("total", the paper's) or of the rank that moves most ("largest", ours, which a step waits for).

Solvers: "greedy" (ours, the default) is a placement in milliseconds (block_quick.py). With `rounds` it is then searched on
(block_search.py), and so is, as the better of both is what counts, MagiAttention's problem solved jointly (dispatch_joint.py) and
equal runs, each unit with its queries, on blocks so coarse that a rank has few, and from the best on blocks half as large, down to
the finest. "mtkahypar" (extra `solvers`) is Mt-KaHyPar with a fixed seed and one thread, with the weights that DCP
gives it. It knows one limit where there are two, and a search then repairs what it leaves over the limits.

On 128K packs of the two traces of benchmarks/placement.py, 16 ranks, causal: 0.18 and 0.21 of a full ring's bytes and 0.22 and 0.26
for the largest rank, where joint dispatch has 0.16 and 0.19, 0.28 and 0.41; "total" has 0.16 and 0.18, 0.28 and 0.33.

Cost: greedy 3 to 14 ms there, by the mask, and with rounds=30_000 0.09 to 0.16 s: some nine searches of `rounds` x 0.1 to 0.5 µs.

    >>> from .mask_kinds import causal
    >>> placed = place(causal([3000, 900, 1100, 1000]), 4, options=Blocks(block=256))
    >>> bool(placed.shards.tokens().max() <= 1.25 * 1500), bool(placed.pairs().max() <= 1.2 * placed.pairs().mean())
    (True, True)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .block_graph import BlockGraph, RowBytes, chosen_block
from .block_quick import quick
from .block_search import searched
from .dispatch import checked_cap, shards_of
from .dispatch_joint import joint
from .masks import Mask
from .packs import Int64
from .partition_kahypar import partitioned
from .shards import Shards, contiguous

OBJECTIVES = ("largest", "total")
SOLVERS = ("greedy", "mtkahypar")
COARSE, FRESH = 3, 12
"""Blocks a rank has at the coarsest level, at least; and up to how many a level is also started from scratch."""
WARM = 0.15
"""Of the first threshold: that of later levels, which start from what is good already."""
REPAIR = 240_000
"""Steps of the search that repairs Mt-KaHyPar's placement."""
INSIDE = 6000
"""Steps, at least, of the search inside of each node."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How attention is cut into blocks and placed."""

    block: int | None = None
    """Tokens of a block, in the paper 512 to 4096; None: as many as the lengths and ranks ask for (block_graph.py)."""
    head_groups: int = 1
    """Groups of heads that are placed each for itself."""
    objective: str = "largest"
    balance: float = 0.1
    node_balance: float = 0.4
    memory: float = 0.2
    devices_per_node: int | None = None
    """Ranks of a node, which are neighbours in the domain; None: all are on one."""
    solver: str = "greedy"
    heads: int = 8
    kv_heads: int = 2
    dim: int = 128
    itemsize: int = 2
    """Heads and bytes of a number decide whether queries or keys had better travel."""
    rounds: int = 0
    """Steps of each search after the quick one; 30_000 take some 0.1 s and save up to a third of the largest rank's bytes, or nothing."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES or self.solver not in SOLVERS:
            raise ValueError(
                f"objective is one of {OBJECTIVES} and solver one of {SOLVERS}; got {self.objective!r} and {self.solver!r}."
            )
        if min(self.balance, self.node_balance, self.memory) < 0:
            raise ValueError(
                "balance, node_balance and memory are what may be over the mean, at least 0; got "
                f"{self.balance}, {self.node_balance} and {self.memory}."
            )
        for name in ("block", "devices_per_node"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1, or None; got {value}.")
        if self.rounds < 0:
            raise ValueError(f"rounds is at least 0; got {self.rounds}.")
        self.row_bytes()

    def row_bytes(self) -> RowBytes:
        """What the rows of a head group weigh."""
        return RowBytes.of(self.heads, self.kv_heads, self.dim, groups=self.head_groups, itemsize=self.itemsize)


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """Who holds each block of a graph and who computes each of its units."""

    graph: BlockGraph
    shards: Shards
    """The tokens of each rank of the domain."""
    home: Int64
    """int64[n], the rank of each block."""
    owner: Int64
    """int64[groups · m], the rank of each unit, group by group."""

    def pairs(self) -> Int64:
        """Pairs that each rank computes, of each head group, int64[P]."""
        total = np.zeros(self.shards.cp_size, np.int64)
        np.add.at(total, self.owner, np.tile(self.graph.pairs, self.graph.groups))
        return total

    def bytes(self) -> tuple[Int64, Int64]:
        """(sent, received) of each rank in a layer's forward and backward, int64[P] each, whole blocks counted."""
        P, n, (out, back) = self.shards.cp_size, len(self.home), self.graph.nets
        used = np.zeros((len(out), P), bool)
        for net in self.graph.units()[:2]:
            used[net, self.owner] = True
        home = self.home[np.arange(len(out)) % max(n, 1)]
        used[np.arange(len(out)), home] = False
        sent, received = (used * way[:, None] for way in (back, out))
        from_home, to_home = np.zeros((2, P), np.int64)
        np.add.at(from_home, home, out * used.sum(axis=1))
        np.add.at(to_home, home, back * used.sum(axis=1))
        return sent.sum(axis=0) + from_home, received.sum(axis=0) + to_home


def place(mask: Mask, ranks: int, *, max_tokens: int | None = None, options: Blocks | None = None) -> Placement:
    """Place the attention of a mask (of all packs of the domain, end to end) on so many ranks. See the module.

    Raises ValueError where max_tokens is below an even share, ImportError where the solver of `options` is not installed.
    """
    o = options or Blocks()
    total = int(mask.tokens.sum())
    cap = checked_cap(total, ranks, max_tokens)
    block = o.block or chosen_block(mask, ranks, o.memory)
    graph = BlockGraph.of(mask, block=block, row_bytes=o.row_bytes(), groups=o.head_groups)
    if ranks == 1 or total == 0:
        home, owner = np.zeros(len(graph.tokens), np.int64), np.zeros(o.head_groups * len(graph.q), np.int64)
    elif o.devices_per_node is None or o.devices_per_node >= ranks:
        home, owner = _level(mask, graph, np.ones(ranks, np.int64), cap, o.balance, o)
    else:
        home, owner = _nodes(mask, graph, ranks, cap, o)
    return _fitted(mask, graph, home, owner, ranks, cap)


def _level(mask: Mask, graph: BlockGraph, size: Int64, cap: int, balance: float, o: Blocks) -> tuple[Int64, Int64]:
    """Blocks and units over parts of the domain, of so many ranks each (int64[P])."""
    if o.solver == "mtkahypar":
        home, owner = partitioned(graph, size, balance, o.seed)
        return _searched(graph, home, owner, size, cap, balance, o, heat=WARM, rounds=REPAIR)[:2]
    first = quick(graph, size, seed=o.seed, **limits_of(graph, graph.tokens, graph.units()[2], size, cap, balance, o))
    if o.rounds == 0:
        return first[:2]
    levels = [graph]
    ways = []
    while len(levels[-1].tokens) > COARSE * len(size):
        coarse, block, unit = levels[-1].coarser(2)
        if 5 * len(coarse.tokens) > 4 * len(levels[-1].tokens):
            break
        levels.append(coarse)
        ways.append((block, unit))
    ways.append((np.zeros(0, np.int64), np.zeros(0, np.int64)))
    ranks, best = int(size.sum()), None
    layouts = [joint(mask, ranks, slack=1 + o.memory), contiguous(mask.cu_seqlens, ranks)]
    for level, (block, unit) in zip(levels[::-1], ways[::-1], strict=True):
        found = []
        if best is not None:
            home, owner = best[0][block], best[1].reshape(graph.groups, -1)[:, unit].ravel()
            found.append(_searched(level, home, owner, size, cap, balance, o, heat=WARM))
        if best is None or len(level.tokens) <= FRESH * len(size):
            for home in _starts(level, size, layouts):
                owner = np.tile(home[level.q], level.groups)
                found.append(_searched(level, home, owner, size, cap, balance, o, heat=1.0))
        best = min(found, key=lambda one: one[2])
    assert best is not None, "there is a coarsest level"
    other = _searched(graph, first[0], first[1], size, cap, balance, o, heat=WARM)
    return min(best, other, key=lambda one: one[2])[:2]


def _starts(graph: BlockGraph, size: Int64, layouts: list[Shards]) -> list[Int64]:
    """Homes of blocks to start from, int64[n] each: where the middle of a block lies."""
    part = np.repeat(np.arange(len(size)), size)
    middle = (graph.edges[:-1] + graph.edges[1:]) // 2
    homes = []
    for shards in layouts:
        holder = np.repeat(part, np.diff(shards.offsets))
        order = np.argsort(shards.segments[:, 0])
        homes.append(holder[order][np.searchsorted(shards.segments[order, 0], middle, side="right") - 1])
    return homes


def _searched(
    graph: BlockGraph,
    home: Int64,
    owner: Int64,
    size: Int64,
    cap: int,
    balance: float,
    o: Blocks,
    *,
    heat: float,
    rounds: int | None = None,
) -> tuple[Int64, Int64, float]:
    q, k, work = graph.units()
    o = o if rounds is None else replace(o, rounds=rounds)
    return _placed(graph, q, k, work, home, owner, size, cap, balance, o, heat)


def _placed(
    graph: BlockGraph,
    q: Int64,
    k: Int64,
    work: Int64,
    home: Int64,
    owner: Int64,
    size: Int64,
    cap: int,
    balance: float,
    o: Blocks,
    heat: float,
) -> tuple[Int64, Int64, float]:
    """The search over units given (nets int64[u]), under limits that follow from the shares of the parts."""
    limits = limits_of(graph, graph.tokens[home < len(size)], work, size, cap, balance, o)
    return searched(
        graph.nets, q, k, work, graph.tokens, home, owner, rounds=o.rounds, heat=heat, seed=o.seed, **limits
    )


def limits_of(
    graph: BlockGraph, tokens: Int64, work: Int64, size: Int64, cap: int, balance: float, o: Blocks
) -> dict[str, Any]:
    """What a search may do with blocks of so many tokens and units of so many pairs, and what it minimises."""
    total, ranks = int(tokens.sum()), int(size.sum())
    share = max(total / len(size), 1.0)
    return {
        "token_cap": np.minimum(size * cap, np.ceil((1 + o.memory) * total / ranks * size).astype(np.int64)),
        "work_cap": ((1 + balance) * work.sum() / ranks * size).astype(np.int64),
        "largest": o.objective == "largest",
        "even": share * sum(graph.row_bytes.kv) * graph.groups,
    }


def _nodes(mask: Mask, graph: BlockGraph, ranks: int, cap: int, o: Blocks) -> tuple[Int64, Int64]:
    """Nodes first, then the devices of each."""
    per = o.devices_per_node or ranks
    size = np.diff(np.append(np.arange(0, ranks, per), ranks))
    node, worker = _level(mask, graph, size, cap, o.node_balance, o)
    home, owner = np.empty_like(node), np.empty_like(worker)
    q, k, work = graph.units()
    inner = replace(o, rounds=max(o.rounds, INSIDE))
    for at, devices in enumerate(size.tolist()):
        mine, units = np.flatnonzero(node == at), np.flatnonzero(worker == at)
        inside = np.full(len(node), devices)
        # Even runs of what the node holds; units of other nodes' queries go with their keys, or anywhere.
        before = np.cumsum(graph.tokens[mine]) - graph.tokens[mine] // 2
        inside[mine] = np.minimum(before * devices // max(int(graph.tokens[mine].sum()), 1), devices - 1)
        n = len(node)
        start = np.minimum(inside[q[units] % n], inside[k[units] % n])
        start = np.where(inside[q[units] % n] < devices, inside[q[units] % n], start)
        start = np.where(start < devices, start, units % devices)
        one = np.ones(devices, np.int64)
        found, by, _ = _placed(graph, q[units], k[units], work[units], inside, start, one, cap, o.balance, inner, 1.0)
        home[mine], owner[units] = at * per + found[mine], at * per + by
    return home, owner


def _fitted(mask: Mask, graph: BlockGraph, home: Int64, owner: Int64, ranks: int, cap: int) -> Placement:
    """Under the cap: heads of blocks go where there is room, and the units of their queries that their home computed with them."""
    shards = shards_of(mask.cu_seqlens, graph.edges, home, ranks, cap)
    holder = np.repeat(np.arange(ranks), np.diff(shards.offsets))
    edges = np.union1d(graph.edges, shards.segments.ravel())
    order = np.argsort(shards.segments[:, 0])
    settled = holder[order][np.searchsorted(shards.segments[order, 0], edges[:-1], side="right") - 1]
    if len(edges) == len(graph.edges) and np.array_equal(settled, home):
        return Placement(graph=graph, shards=shards, home=home, owner=owner)
    fine = graph.refined(mask, edges)
    block = np.searchsorted(graph.edges, edges[:-1], side="right") - 1
    n = len(home)
    unit = np.searchsorted(graph.q * n + graph.k, block[fine.q] * n + block[fine.k])
    by = owner.reshape(graph.groups, -1)[:, unit]
    by = np.where(by == home[block[fine.q]], settled[fine.q], by)
    return Placement(graph=fine, shards=shards, home=settled, owner=by.ravel())
