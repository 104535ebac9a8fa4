"""Plans under a sliding window, when whoever made them cannot make them again: tiles cut to the band, routes cut to what
tiles still read. No torch.

What is decided: a row that no query of its receiver, nor of anyone it is passed on to, sees any more does not travel, and
no gradient comes back for it. This needs everybody's tiles. A plan that lists one rank's part only keeps its routes, for
senders and receivers must cut alike. (Ring and gather make such plans anew, `causal_plan(…, window)`.)

Cost: one byte per rank and token, and a pass over the routes.

    >>> cut_tiles(np.array([[0, 0, 4, 8, 0, 8, 0, bands.NO_LIMIT]]), window=2).tolist()
    [[0, 0, 4, 8, 3, 8, 0, 1]]
"""

from __future__ import annotations

import numpy as np

from . import bands
from .bands import Int64
from .traffic import KV, Q


def cut_tiles(tiles: Int64, window: int) -> Int64:
    """Tiles (int64[m, 8]) without pairs of `window` or more apart; those without a pair are left out."""
    tiles = tiles.copy()
    tiles[:, 7] = np.minimum(tiles[:, 7], window - 1)
    tiles[:, 2] = np.maximum(tiles[:, 2], tiles[:, 4] + tiles[:, 6])
    tiles[:, 3] = np.minimum(tiles[:, 3], tiles[:, 5] + tiles[:, 7])
    tiles[:, 4] = np.maximum(tiles[:, 4], tiles[:, 2] - tiles[:, 7])
    tiles[:, 5] = np.minimum(tiles[:, 5], tiles[:, 3] - tiles[:, 6])
    return tiles[bands.pairs(tiles[:, 2:]) > 0]


def cut_routes(tiles: Int64, moves: Int64, returns: Int64, ranks: int, tokens: int) -> tuple[Int64, Int64]:
    """Moves and returns (int64[n, 6]) of the rows that tiles, everybody's, read. Each rank is sent a row once.

    tokens: of the pack, times its head groups.
    """
    kept_moves: list[list[list[int]]] = [[] for _ in moves]
    kept_returns: list[list[list[int]]] = [[] for _ in returns]
    for kind, column in ((KV, 4), (Q, 2)):
        read = np.zeros((ranks, tokens), bool)
        for rank, start, stop in tiles[:, [0, column, column + 1]].tolist():
            read[rank, start:stop] = True
        # What comes back to a rank goes on from there later, so the first stage comes first; and it has to have the row.
        own = np.flatnonzero(returns[:, 1] == kind)
        for at in own[np.argsort(returns[own, 0], kind="stable")].tolist():
            kept_returns[at] = _pieces(returns[at].tolist(), read[returns[at, 2]])
            for piece in kept_returns[at]:
                read[piece[3], piece[4] : piece[5]] = True
        # What is sent on later is needed too, so the last stage comes first.
        own = np.flatnonzero(moves[:, 1] == kind)
        for at in own[np.argsort(-moves[own, 0], kind="stable")].tolist():
            kept_moves[at] = _pieces(moves[at].tolist(), read[moves[at, 3]])
            for piece in kept_moves[at]:
                read[piece[2], piece[4] : piece[5]] = True
    return tuple(_routes([piece for pieces in kept for piece in pieces]) for kept in (kept_moves, kept_returns))  # type: ignore[return-value]


def _pieces(route: list[int], read: np.ndarray) -> list[list[int]]:
    """The route for each run of rows that are read."""
    start, stop = route[4], route[5]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], read[start:stop].view(np.int8), [0]]))) + start
    return [[*route[:4], a, b] for a, b in edges.reshape(-1, 2).tolist()]


def _routes(pieces: list[list[int]]) -> Int64:
    return np.array(pieces, np.int64).reshape(-1, 6)
