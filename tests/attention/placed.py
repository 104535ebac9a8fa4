"""Plans that nobody would make: any mask over any homes, tiles on any rank and stage, rows by any way that is in time.

What a planner may emit, and more: rows that come early, from whoever has them, or through ranks that only pass them on; results
that go home later than they could, or over ranks that add theirs; two packs in one domain; heads in groups. The executor must run
them all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from equipoise.attention.counting import Counter, Counts
from equipoise.attention.executor import attend
from equipoise.attention.forwarding import forwarded
from equipoise.attention.groups import CpGroups
from equipoise.attention.kernels.reference import dense
from equipoise.attention.plan import KV, AttentionPlan, Q
from equipoise.attention.routing import direct, part_of
from equipoise.packing import mask_kinds as kinds
from equipoise.packing.masks import Mask
from torch import Tensor

from tests.attention.oracle import relative

Rng = np.random.Generator


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One call of attention under a drawn plan, small enough to pickle."""

    seed: int
    world: int
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int | None = None
    groups: int = 1
    """Head groups."""
    packs: int = 1
    stages: int = 4
    tokens: int = 40
    """Of a pack, about."""
    dtype: torch.dtype = torch.float64
    keep: bool = True
    sinks: bool = False
    head_chunks: int = 1
    window: int | None = None
    part: bool = False
    """Each rank has its part of the plan only."""
    strays: bool = True
    """Tiles anywhere; else where their queries are at home."""
    direct: bool = False
    """Rows go straight from home for their first use and back after their last, as `routing.direct` says."""
    nodes: int | None = None
    """With `direct`: ranks of a node, which rows enter and leave once."""

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dout of the domain, the same in every process."""
        generator = torch.Generator().manual_seed(self.seed)
        T, V = drawn(self).tokens, self.value_dim or self.dim
        shapes = [(T, self.heads, self.dim), (T, self.kv_heads, self.dim), (T, self.kv_heads, V), (T, self.heads, V)]
        q, k, v, dout = (torch.randn(s, generator=generator, dtype=torch.float64).to(self.dtype) for s in shapes)
        return q, k, v, dout

    def head_sinks(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.heads, generator=generator, dtype=torch.float64) * 3 if self.sinks else None


def some_mask(rng: Rng, tokens: int) -> Mask:
    """Documents of about so many tokens, each of a kind of its own."""
    lengths = rng.integers(1, max(tokens // 2, 2), rng.integers(1, 5))
    return Mask.concat([_document(rng, int(n)) for n in lengths])


def _document(rng: Rng, n: int) -> Mask:
    width = int(rng.integers(1, n + 1))
    kind = rng.integers(7)
    if kind == 0:
        return kinds.causal([n])
    if kind == 1:
        return kinds.full([n])
    if kind == 2:
        return kinds.sliding_window([n], width, ahead=int(rng.integers(0, 3)))
    if kind == 3:
        return kinds.window_with_sinks([n], width, 2)
    if kind == 4:
        return kinds.shared_question(*kinds.shares_of_questions([n]))
    if kind == 5:
        return kinds.causal_blockwise([n], max(width // 3, 1), 1)
    return kinds.prefix_lm([width], [n])


@functools.cache
def drawn(case: Placed) -> AttentionPlan:
    """The case's plan, of all ranks."""
    return _plan(case, mask_of(case))


@functools.cache
def mask_of(case: Placed) -> Mask:
    rng = np.random.default_rng([case.seed, 1])
    return Mask.concat([some_mask(rng, case.tokens) for _ in range(case.packs)])


def _plan(case: Placed, mask: Mask) -> AttentionPlan:
    rng, P, T = np.random.default_rng([case.seed, 2]), case.world, int(mask.tokens.sum())
    owner = _owners(case, rng, mask)
    home = [_runs(np.flatnonzero(owner == rank)) for rank in range(P)]
    home = [pieces[rng.permutation(len(pieces))] for pieces in home]
    tiles = placed_tiles(case, rng, mask.tiles_of_pack(), owner, T)
    offsets, pieces = np.cumsum([0, *map(len, home)]), np.concatenate(home)
    if case.nodes is not None:
        nodes = np.arange(P) // case.nodes
        tiles, moves, returns = forwarded(tiles, offsets, pieces, T, nodes=nodes, head_groups=case.groups)
    elif case.direct:
        moves, returns = direct(tiles, offsets, pieces, T, head_groups=case.groups)
    else:
        moves, returns = routes_of(rng, tiles, np.tile(owner, case.groups), P, case.stages)
    return AttentionPlan(
        ranks=tuple(rng.permutation(P).tolist()),
        tokens=T,
        home_offsets=offsets,
        home=pieces,
        tiles=tiles,
        moves=moves,
        returns=returns,
        head_groups=case.groups,
        head_chunks=case.head_chunks,
    )


def _owners(case: Placed, rng: Rng, mask: Mask) -> np.ndarray:
    """The rank that holds each token: blocks of any size; with two packs, each on ranks of its own."""
    owner = []
    ranks = np.array_split(np.arange(case.world), min(case.packs, case.world))
    documents = np.array_split(mask.tokens, case.packs)
    for pack, tokens in enumerate(documents):
        own = ranks[pack % len(ranks)]
        left = int(tokens.sum())
        while left:
            size = min(left, int(rng.integers(1, 12)))
            owner += [int(rng.choice(own))] * size
            left -= size
    return np.array(owner, np.int64)


def placed_tiles(case: Placed, rng: Rng, mask: np.ndarray, owner: np.ndarray, tokens: int) -> np.ndarray:
    """The mask cut into blocks, each on some rank in some stage: in 0 only if all is at home there."""
    tiles = []
    edges = np.unique([0, *np.flatnonzero(np.diff(owner)) + 1, tokens])
    for group in range(case.groups):
        for q0, q1, k0, k1, lo, hi in mask.tolist():
            rows, keys = _cuts(rng, q0, q1, edges), _cuts(rng, k0, k1, edges)
            for a, b in pairwise(rows):
                for c, d in pairwise(keys):
                    at_home, fits = int(owner[a]), len({*owner[a:b].tolist(), *owner[c:d].tolist()}) == 1
                    stray = case.strays and rng.random() < 0.5
                    rank = int(rng.choice([rng.integers(case.world), owner[c]])) if stray else at_home
                    stage = 0 if fits and rank == at_home and rng.random() < 0.8 else int(rng.integers(1, case.stages))
                    shift = group * tokens
                    tiles.append([rank, stage, a + shift, b + shift, c + shift, d + shift, lo, hi])
    order = rng.permutation(len(tiles))
    return np.array(tiles, np.int64).reshape(-1, 8)[order]


def _cuts(rng: Rng, start: int, stop: int, edges: np.ndarray) -> list[int]:
    """start … stop, cut where owners change and somewhere else."""
    inner = edges[(edges > start) & (edges < stop)]
    return np.unique([start, stop, *inner, *rng.integers(start, stop, 1)]).tolist()


def routes_of(rng: Rng, tiles: np.ndarray, owner: np.ndarray, ranks: int, stages: int) -> tuple[np.ndarray, np.ndarray]:
    """Row by row: moves from whoever has a row in time, perhaps over a rank that has no use for it, and returns after its last use,
    perhaps over a rank that has the row too."""
    moves, returns = [], []
    for kind in (KV, Q):
        first, last = _uses(tiles, kind, len(owner), ranks)
        # Neighbours share their fate mostly, so that routes are of more than a row.
        fate, seed = 0, 0
        for row, home in enumerate(owner.tolist()):
            if row == 0 or rng.random() < 0.15:
                fate = int(rng.integers(1 << 30))
            own = np.random.default_rng([fate, seed])
            needs = {rank: int(first[rank, row]) for rank in range(ranks) if first[rank, row] >= 0 and rank != home}
            arrives = {rank: int(own.integers(1, stage + 1)) for rank, stage in needs.items()}
            if own.random() < 0.3:  # one that only passes it on, or lets it lie
                carrier = int(own.integers(ranks))
                if carrier != home and carrier not in arrives:
                    arrives[carrier] = int(own.integers(1, stages))
            for rank, stage in arrives.items():
                having = [home, *(other for other, at in arrives.items() if at < stage)]
                moves.append((stage, kind, int(own.choice(having)), rank, row))
            leaves = {rank: int(own.integers(last[rank, row], stages)) for rank in needs}
            for rank in sorted(leaves, key=lambda rank: leaves[rank]):
                # Home, or to another rank that was sent the row, which adds its own and sends the sum on later.
                later = [x for x in arrives if x != rank and leaves.get(x, stages - 1) > leaves[rank]]
                over = int(own.choice(later)) if later and own.random() < 0.4 else home
                if over != home and over not in leaves:
                    leaves[over] = int(own.integers(leaves[rank] + 1, stages))
                    returns.append((leaves[over], kind, over, home, row))
                returns.append((leaves[rank], kind, rank, over, row))
    return _joined(rng, moves), _joined(rng, returns)


def _uses(tiles: np.ndarray, kind: int, tokens: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Stage of the first and last pair that needs a row, int[ranks, tokens]; -1: none."""
    first, last = np.full((ranks, tokens), -1), np.full((ranks, tokens), -1)
    for rank, stage, q0, q1, k0, k1, lo, hi in tiles.tolist():
        away = np.arange(q0, q1)[:, None] - np.arange(k0, k1)
        seen = (lo <= away) & (away <= hi)
        rows = np.arange(k0, k1)[seen.any(0)] if kind == KV else np.arange(q0, q1)[seen.any(1)]
        first[rank, rows] = np.where(first[rank, rows] < 0, stage, np.minimum(first[rank, rows], stage))
        last[rank, rows] = np.maximum(last[rank, rows], stage)
    return first, last


def _joined(rng: Rng, rows: list[tuple[int, ...]]) -> np.ndarray:
    """Routes of neighbouring rows in one, in any order."""
    routes: list[list[int]] = []
    for *way, row in sorted(rows):
        if routes and routes[-1][:4] == way and routes[-1][5] == row:
            routes[-1][5] = row + 1
        else:
            routes.append([*way, row, row + 1])
    return np.array(routes, np.int64).reshape(-1, 6)[rng.permutation(len(routes))]


def _runs(rows: np.ndarray) -> np.ndarray:
    cuts = np.flatnonzero(np.diff(rows) > 1) + 1
    return np.array([[run[0], run[-1] + 1] for run in np.split(rows, cuts) if len(run)], np.int64).reshape(-1, 2)


def positions(plan: AttentionPlan, index: int) -> Tensor:
    return torch.cat(
        [torch.zeros(0, dtype=torch.int64), *(torch.arange(a, b) for a, b in plan.home_of(index).tolist())]
    )


GROUPS: dict[tuple[int, int], CpGroups] = {}
"""Of this rank process: built once, as a training run does."""


def run(
    rank: int, world: int, cases: list[Placed], change: Any = None, dp: int = 1
) -> list[tuple[list[Tensor], Counts, Counts]]:
    """This rank's results (out, dq, dk, dv, and of sinks), and what it counted in forward and backward. change: of the plan."""
    if (dp, world) not in GROUPS:
        GROUPS[dp, world] = CpGroups(dp, world // dp)
    groups, results = GROUPS[dp, world], []
    groups.counter = counter = Counter()
    for case in cases:
        whole = drawn(case)
        index = whole.ranks.index(rank)
        plan = part_of(whole, index) if case.part else replace(whole)
        plan = plan if change is None else change(plan)
        held = positions(whole, index)
        q, k, v, dout = (x[held] for x in case.inputs())
        sinks = case.head_sinks()
        inputs = [x.requires_grad_() for x in (q, k, v) + (() if sinks is None else (sinks,))]
        out = attend(plan, q, k, v, groups, window=case.window, sinks_H=sinks, keep=case.keep)
        forward = counter.take()
        grads = torch.autograd.grad(out, inputs, dout)
        results.append(([out.detach(), *grads], forward, counter.take()))
    groups.counter = None
    return results


def gathered(case: Placed, parts: list[list[Tensor]]) -> list[Tensor]:
    """The ranks' results as one domain; gradients of sinks summed. parts: by rank number."""
    plan = drawn(case)
    where = torch.argsort(torch.cat([positions(plan, plan.ranks.index(rank)) for rank in range(case.world)]))
    results = list(zip(*parts, strict=True))
    return [torch.cat(x)[where] for x in results[:4]] + [torch.stack(x).sum(0) for x in results[4:]]


def truth(case: Placed, compute: torch.dtype = torch.float64) -> list[Tensor]:
    """out, dq, dk, dv, and those of the sinks, dense under the mask."""
    q, k, v, dout = (x.to(compute) for x in case.inputs())
    sinks, mask = case.head_sinks(), mask_of(case)
    if case.window is not None:
        mask = mask & kinds.sliding_window(mask.tokens, case.window, ahead=int(mask.tokens.max()))
    inputs = [x.requires_grad_() for x in (q, k, v) + (() if sinks is None else (sinks,))]
    out, lse = dense(q, k, v, torch.from_numpy(mask.dense()), case.dim**-0.5)
    if sinks is not None:
        out = out * torch.sigmoid(lse.T - sinks)[..., None]
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


NAMES = ("out", "dq", "dk", "dv", "d_sinks")


def errors(case: Placed, parts: list[list[Tensor]]) -> dict[str, float]:
    """Relative errors of the ranks' results; absolute ones of what is 0, as gradients of single tokens are."""
    got, want = gathered(case, parts), truth(case)
    return {
        name: relative(a, b) if b.any() else float(a.abs().sum()) for name, a, b in zip(NAMES, got, want, strict=False)
    }
