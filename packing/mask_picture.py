"""A mask as a picture: as text, or (extra `plot`) as an image in which each rank that computes has a colour.

Both are drawn on a grid of equal cells over the pack, queries downward and keys to the right; a cell takes the shade of the share
of its pairs that the mask has, and the colour of the rank that computes most of them, of all heads together where heads are placed apart. Nothing as large as tokens² is made.

    >>> from equipoise.packing.mask_kinds import sliding_window
    >>> print(picture(sliding_window([4, 2], 2)))
    █·····
    ██····
    ·██···
    ··██··
    ····█·
    ····██
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .mask_areas import block_pairs
from .packs import Int64

if TYPE_CHECKING:
    from .masks import Mask

SHADES = "·░▒▓█"
RANKS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def picture(mask: Mask, work: Int64 | None = None, *, cells: int = 32) -> str:
    """The mask as lines of characters, at most `cells` of them.

    work: tiles of an AttentionPlan, int64[m, 8], of which a cell shows the rank that computes most of it (0 … 9, a … z, A … Z;
    more than 62 begin again); None: how full it is, ``·`` nothing, ``█`` every pair.
    """
    edges = _edges(mask, cells)
    if work is not None:
        pairs = _by_rank(work, edges)
        owner = np.where(pairs.sum(axis=0) > 0, pairs.argmax(axis=0), -1)
        return "\n".join("".join("·" if rank < 0 else RANKS[rank % len(RANKS)] for rank in row) for row in owner)
    full = _full(edges)
    shade = np.ceil(block_pairs(mask.tiles_of_pack(), edges).dense() / full * (len(SHADES) - 1)).astype(int)
    return "\n".join("".join(SHADES[at] for at in row) for row in shade)


def draw(mask: Mask, work: Int64 | None = None, *, cells: int = 256, axes: Any = None, title: str | None = None) -> Any:
    """The mask on matplotlib's `axes` (a new figure's by default), which are returned: `draw(mask).figure.savefig(…)`.

    work: tiles of an AttentionPlan, int64[m, 8] (rank, stage, q0, …): who computes which part, a colour for each rank, with the
    rank's share of the pairs in the legend; None: one colour. cells: resolution; documents are parted by lines.
    Raises ImportError where matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError('Pictures need matplotlib: pip install "equipoise[plot]".') from error

    tokens, edges = int(mask.tokens.sum()), _edges(mask, cells)
    drawn = np.pad(mask.tiles_of_pack(), ((0, 0), (2, 0))) if work is None else work
    pairs = _by_rank(drawn, edges)
    groups = 1 + int(drawn[:, 2].max(initial=0)) // tokens
    num_ranks = len(pairs)
    palette = matplotlib.colormaps["tab10" if num_ranks <= 10 else "tab20" if num_ranks <= 20 else "hsv"]
    colours = np.array([palette(rank if num_ranks <= 20 else rank / num_ranks)[:3] for rank in range(num_ranks)])
    share = np.minimum(pairs.sum(axis=0) / _full(edges) / groups, 1)
    # Thin masks must be seen too: a cell that has any pair is at least a third coloured.
    shade = np.where(share > 0, 1 / 3 + share * 2 / 3, 0)[:, :, None]
    image = 1 - shade * (1 - colours[pairs.argmax(axis=0)])
    if axes is None:
        axes = Figure(figsize=(6, 6), layout="constrained").add_subplot()
    axes.imshow(image, extent=(0, tokens, tokens, 0), interpolation="nearest")
    for boundary in mask.cu_seqlens[1:-1].tolist():
        axes.axhline(boundary, color="black", linewidth=0.4)
        axes.axvline(boundary, color="black", linewidth=0.4)
    if work is not None:
        shares = pairs.sum(axis=(1, 2)) / max(int(pairs.sum()), 1)
        handles = [Patch(color=colours[rank], label=f"rank {rank}: {shares[rank]:.1%}") for rank in range(num_ranks)]
        axes.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", ncols=1 + num_ranks // 32
        )
    axes.set(xlabel="keys", ylabel="queries", title=title or mask.describe().split(", ", 1)[0])
    return axes


def _edges(mask: Mask, cells: int) -> Int64:
    """Edges of equal cells over the pack, at most `cells` and at most one for each token."""
    tokens = int(mask.tokens.sum())
    if cells < 1 or tokens < 1:
        raise ValueError(f"A picture has at least one cell and one token; got cells={cells} and {tokens} tokens.")
    num = min(cells, tokens)
    return np.arange(num + 1) * tokens // num


def _full(edges: Int64) -> npt.NDArray[np.float64]:
    sizes = np.diff(edges).astype(np.float64)
    return sizes[:, None] * sizes


def _by_rank(work: Int64, edges: Int64) -> Int64:
    """Pairs of each cell that each rank computes, int64[ranks, cells, cells]; those of several head groups on top of each other."""
    num_ranks, rank, tiles = 1 + int(work[:, 0].max(initial=0)), work[:, 0], work[:, 2:].copy()
    # A plan's positions are group · tokens + token.
    tiles[:, :4] -= (tiles[:, :1] // edges[-1]) * edges[-1]
    return np.stack([block_pairs(tiles[rank == r], edges).dense() for r in range(num_ranks)])
