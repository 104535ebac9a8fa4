"""What the ranks of a plan exchange and compute, counted: rows by stage and rank, and the bytes they take. No torch.

Rows of a plan are of a token and a group of heads (all of them where there is one group). What travels of a row:

| | forward | backward |
|---|---|---|
| KV, onward | K and V | the same again, unless kept |
| KV, home | – | dK and dV, in at least 4 bytes a value |
| Q, onward | Q | dO, O, LSE; and Q again, unless kept |
| Q, home | O and LSE, in at least 4 bytes a value | dQ, in at least 4 bytes a value |

    >>> traffic = listed_traffic(np.array([[1, KV, 0, 1, 4, 8], [1, Q, 1, 0, 9, 10]]), np.zeros((0, 6), np.int64), 2, 2)
    >>> traffic.by_rank[:2].tolist(), traffic.q_by_rank[:2].tolist()                          # sent, received
    ([[4, 0], [0, 4]], [[0, 1], [1, 0]])
    >>> bytes_moved(traffic, heads=4, kv_heads=2, dim=8, itemsize=2).tolist()                 # (sent, received) x (KV, Q) x rank
    [[[256, 0], [0, 64]], [[0, 256], [64, 0]]]
"""

# P ranks, H query heads, K key heads, D head dim, V that of values.
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

KV, Q = 0, 1
"""Kinds of moves and returns: keys and values, whose gradients come home; queries, whose outputs and gradients do."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Rows that the ranks of a plan exchange."""

    by_stage: Int64
    """int64[stages, 2]: KV rows moved before and returned after each stage, by all ranks. 0: there is no exchange."""
    by_rank: Int64
    """int64[4, P]: KV rows that each rank sends, receives, returns and reduces."""
    q_by_stage: Int64 | None = None
    """The same for Q rows; None: none move."""
    q_by_rank: Int64 | None = None

    def of(self, kind: int) -> tuple[Int64, Int64]:
        """(by stage, by rank) of a kind."""
        if kind == KV:
            return self.by_stage, self.by_rank
        by_stage = np.zeros((0, 2), np.int64) if self.q_by_stage is None else self.q_by_stage
        return by_stage, np.zeros_like(self.by_rank) if self.q_by_rank is None else self.q_by_rank

    @property
    def stages(self) -> int:
        """That there are rows of, at least 0."""
        return max(len(self.of(kind)[0]) for kind in (KV, Q))


def listed_traffic(moves: Int64, returns: Int64, stages: int, ranks: int) -> Traffic:
    """What moves and returns add up to."""
    by_stage, by_rank = np.zeros((2, stages, 2), np.int64), np.zeros((2, 4, ranks), np.int64)
    for kind in (KV, Q):
        for way, routes in enumerate((moves, returns)):
            own = routes[routes[:, 1] == kind]
            rows = own[:, 5] - own[:, 4]
            np.add.at(by_stage[kind, :, way], own[:, 0], rows)
            for side in (0, 1):
                np.add.at(by_rank[kind, 2 * way + side], own[:, 2 + side], rows)
    return Traffic(by_stage=by_stage[KV], by_rank=by_rank[KV], q_by_stage=by_stage[Q], q_by_rank=by_rank[Q])


def bytes_moved(
    traffic: Traffic,
    heads: int | Int64,
    kv_heads: int | Int64,
    dim: int,
    itemsize: int,
    value_dim: int | None = None,
    *,
    backward: bool = False,
    keep: bool = True,
) -> Int64:
    """Bytes of a layer's forward, or of its backward: int64[2, 2, P], (sent, received) x (KV, Q) x rank.

    heads, kv_heads: those of a row (all, or of one head group), of each rank if they differ. dim: of queries and keys.
    value_dim: of values, if it is another. keep: whether what was received in forward was kept, as in `attend`.
    """
    V, wide, again = dim if value_dim is None else value_dim, max(itemsize, 4), int(not keep)
    kv, q, out = kv_heads * (dim + V), heads * dim, heads * V
    if backward:
        onward = again * kv * itemsize, (again * q + 2 * out) * itemsize + heads * wide
        home = kv * wide, q * wide
    else:
        onward, home = (kv * itemsize, q * itemsize), (0 * kv, (out + heads) * wide)
    sides = []
    for side in (0, 1):
        rows = [traffic.of(kind)[1] for kind in (KV, Q)]
        sides.append([rows[kind][side] * onward[kind] + rows[kind][2 + side] * home[kind] for kind in (KV, Q)])
    return np.array(sides, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """Work and traffic of each rank of a plan, int64[P] each, for one layer."""

    pairs: Int64
    """(query, key) pairs computed, of each head group."""
    rows_sent: Int64
    """KV rows sent in forward (and again in backward unless they are kept)."""
    rows_received: Int64
    rows_returned: Int64
    """dK, dV rows sent home in backward."""
    rows_reduced: Int64
    """dK, dV rows received at home."""
    q_rows_sent: Int64
    """Q rows sent in forward; in backward their dO, O and LSE."""
    q_rows_received: Int64
    q_rows_returned: Int64
    """(O, LSE) rows sent home in forward, dQ rows in backward."""
    q_rows_reduced: Int64
    bytes_per_row: int = 1

    @property
    def bytes_sent(self) -> Int64:
        """Of KV, in forward; `AttentionPlan.bytes_moved` counts all."""
        return self.rows_sent * self.bytes_per_row

    @property
    def bytes_received(self) -> Int64:
        return self.rows_received * self.bytes_per_row


def evenness(values: Int64) -> float:
    """max/mean."""
    return float(values.max() * len(values) / max(int(values.sum()), 1))


def told(values: Int64) -> str:
    """Numbers of ranks, eight at most."""
    return "/".join(map(str, values[:8].tolist())) + ("/…" if len(values) > 8 else "")
