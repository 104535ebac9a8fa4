"""Shards: which tokens of a pack each rank of a context-parallel (CP) group holds (the third decision).

Four rules, each for any document length >= 0 and any group size >= 1, without padding; token counts of the ranks
differ by at most one (or one stripe):

- `contiguous`: the pack is cut into cp equal runs. What Ulysses and recurrent layers want; the last rank of a causal
  ring computes the most.
- `zigzag(per="sequence")`: the pack is cut into 2·cp chunks, rank r holds chunks r and 2·cp-1-r. Balances one long
  document, and no better than `contiguous` a pack of many.
- `zigzag(per="document")`: every document is cut into 2·cp chunks in the same way (WLB-LLM section 5.1, Megatron's
  THD layout). Balances pairs exactly, at the price of short kernels and of nearly all the ring's traffic.
- `striped`: stripes of a few tokens in turn (Striped Attention). Balances one document to within a stripe, and needs
  all of the ring's traffic and a kernel that takes positions.

Which of them a pack is better off with is for `sharding_choice.py` to say; `mixed.py` decides per document.

The 2·cp chunks of a document of t tokens have t // (2·cp) tokens each; the t % (2·cp) tokens that remain lengthen one
chunk each, beginning at an index that runs on from document to document. That running index equals the document's
first position modulo 2·cp (remainders and lengths agree modulo 2·cp), so nothing has to be carried and no loop over
documents is needed.

    >>> shards = zigzag([0, 8, 16], 2)
    >>> shards.positions(0)
    array([ 0,  1,  6,  7,  8,  9, 14, 15])
    >>> shards.pairs()
    array([36, 36])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cost import causal_pairs
from .packs import Int64


@dataclass(frozen=True, kw_only=True, eq=False)
class Shards:
    """What each of `cp_size` ranks holds of a pack.

    Rank r holds `segments[offsets[r]:offsets[r + 1]]`, in that order.
    """

    cu_seqlens: Int64
    """int64[k + 1], document boundaries of the pack."""
    cp_size: int
    offsets: Int64
    """int64[cp_size + 1], CSR: rank → segments."""
    segments: Int64
    """int64[s, 2], (start, stop) in the pack: not empty, each inside one document, no two of them mergeable."""
    document: Int64
    """int64[s], the document of each segment, 0 … k-1."""

    def positions(self, rank: int) -> Int64:
        """Positions in the pack of the t tokens that `rank` holds, in the order it holds them, int64[t]."""
        mine = self.segments[self.offsets[rank] : self.offsets[rank + 1]]
        lengths = mine[:, 1] - mine[:, 0]
        before = np.cumsum(lengths) - lengths
        return np.arange(lengths.sum()) + np.repeat(mine[:, 0] - before, lengths)

    def tokens(self) -> Int64:
        """Tokens of each rank, int64[cp_size]."""
        return self._per_rank(self.segments[:, 1] - self.segments[:, 0])

    def pairs(self) -> Int64:
        """Causal (query, key) pairs of each rank's queries within their documents, int64[cp_size]."""
        first = self.cu_seqlens[self.document]
        return self._per_rank(causal_pairs(self.segments[:, 0] - first, self.segments[:, 1] - first))

    def describe(self) -> str:
        """One line: ranks, segments, evenness of tokens and pairs."""
        tokens, pairs = self.tokens(), self.pairs()
        return (
            f"{self.cp_size} ranks x {tokens.max()} tokens in {len(self.segments)} segments; "
            f"pairs max/mean {pairs.max() * len(pairs) / max(int(pairs.sum()), 1):.3f}"
        )

    def __str__(self) -> str:
        return self.describe()

    def _per_rank(self, values: Int64) -> Int64:
        return np.diff(np.concatenate([[0], np.cumsum(values)])[self.offsets])


def contiguous(cu_seqlens: npt.ArrayLike, cp_size: int) -> Shards:
    """Rank r holds the r-th of cp_size equal runs of the pack. cu_seqlens: int[k + 1], from 0, never falling."""
    cu = _boundaries(cu_seqlens, cp_size)
    if cp_size == 1:
        return _whole(cu)
    start, stop, document, run = _cut(cu, cp_size)
    return from_pieces(cu, cp_size, start, stop, document, run)


def zigzag(cu_seqlens: npt.ArrayLike, cp_size: int, per: str = "document") -> Shards:
    """Rank r holds chunks r and 2·cp_size-1-r of the 2·cp_size chunks of each document, or of the whole sequence.

    cu_seqlens: int[k + 1], from 0, never falling. per: "document" or "sequence".
    """
    cu = _boundaries(cu_seqlens, cp_size)
    if cp_size == 1 and per in ("sequence", "document"):
        return _whole(cu)
    if per == "sequence":
        start, stop, document, chunk = _cut(cu, 2 * cp_size)
        return from_pieces(cu, cp_size, start, stop, document, np.minimum(chunk, 2 * cp_size - 1 - chunk))
    if per == "document":
        return _zigzag_documents(cu, cp_size)
    raise ValueError(f'zigzag cuts per="document" or per="sequence"; got per={per!r}.')


def striped(cu_seqlens: npt.ArrayLike, cp_size: int, stripe: int = 1) -> Shards:
    """Stripes of `stripe` tokens of the pack dealt to the ranks in turn (Striped Attention, arXiv:2311.09431).

    cu_seqlens: int[k + 1], from 0, never falling. Ranks differ by at most `stripe` tokens, and for one causal
    document by less than stripe x tokens pairs. A stripe of one token is a segment of its own: the plan has a segment
    per token.
    """
    cu = _boundaries(cu_seqlens, cp_size)
    if stripe < 1:
        raise ValueError(f"A stripe has at least one token; got stripe={stripe}.")
    cuts = np.union1d(cu, np.arange(0, cu[-1], stripe))
    start = cuts[:-1]
    document = np.searchsorted(cu, start, side="right") - 1
    return from_pieces(cu, cp_size, start, cuts[1:], document, start // stripe % cp_size)


def divided(shards: Shards, parts: int) -> Shards:
    """Shards of cp_size · parts ranks: the rows of each, in its order, cut into `parts` runs as long as each other.

    Ranks r·parts … (r + 1)·parts - 1 hold between them what rank r of `shards` held: the groups inside which Ulysses trades.
    """
    if parts < 1:
        raise ValueError(f"A shard is divided into at least one part; got parts={parts}.")
    length = shards.segments[:, 1] - shards.segments[:, 0]
    row = np.concatenate([[0], np.cumsum(length)])  # of all ranks' rows, rank after rank
    held = np.diff(row[shards.offsets])
    cuts = (row[shards.offsets[:-1], None] + np.arange(parts) * held[:, None] // parts).ravel()
    begin = np.union1d(row, cuts)[:-1]
    segment = np.searchsorted(row, begin, side="right") - 1
    start = shards.segments[segment, 0] + begin - row[segment]
    stop = start + np.diff(np.append(begin, row[-1]))
    holder = np.searchsorted(cuts, begin, side="right") - 1
    return from_pieces(shards.cu_seqlens, shards.cp_size * parts, start, stop, shards.document[segment], holder)


def together(shards: Shards, parts: int) -> Shards:
    """Shards of cp_size / parts ranks: what `parts` neighbours hold, in the order of the pack."""
    if parts < 1 or shards.cp_size % parts:
        raise ValueError(f"Groups of {parts} ranks must divide {shards.cp_size} shards.")
    holder = np.repeat(np.arange(shards.cp_size), np.diff(shards.offsets)) // parts
    order = np.lexsort((shards.segments[:, 0], holder))
    start, stop = shards.segments[order].T
    return from_pieces(shards.cu_seqlens, shards.cp_size // parts, start, stop, shards.document[order], holder[order])


def boundaries(cu_seqlens: npt.ArrayLike) -> Int64:
    """cu_seqlens as int64[k + 1]; refuses what does not rise from 0."""
    cu = np.asarray(cu_seqlens)
    if cu.ndim != 1 or len(cu) == 0 or cu.dtype.kind not in "iu" or cu[0] != 0 or np.any(cu[1:] < cu[:-1]):
        raise ValueError(f"cu_seqlens must be integers in one dimension that rise from 0; got {cu}.")
    return cu.astype(np.int64)


def _boundaries(cu_seqlens: npt.ArrayLike, cp_size: int) -> Int64:
    if cp_size < 1:
        raise ValueError(f"A CP group has at least one rank; got cp_size={cp_size}.")
    return boundaries(cu_seqlens)


def _whole(cu: Int64) -> Shards:
    """What every rule gives a rank that is alone: the documents as they are."""
    document = np.flatnonzero(cu[1:] > cu[:-1])
    segments = np.empty((len(document), 2), np.int64)
    segments[:, 0], segments[:, 1] = cu[document], cu[document + 1]
    return Shards(cu_seqlens=cu, cp_size=1, offsets=np.array([0, len(document)]), segments=segments, document=document)


def _cut(cu: Int64, pieces: int) -> tuple[Int64, Int64, Int64, Int64]:
    """(start, stop, document, piece) of the pack cut at document boundaries and into equal pieces."""
    base, longer = divmod(int(cu[-1]), pieces)
    bounds = np.arange(pieces + 1) * base + np.minimum(np.arange(pieces + 1), longer)
    cuts = np.union1d(cu, bounds)
    start = cuts[:-1]
    # side="right" passes over empty documents and pieces to the last one that begins here.
    document = np.searchsorted(cu, start, side="right") - 1
    piece = np.searchsorted(bounds, start, side="right") - 1
    return start, cuts[1:], document, piece


def _zigzag_documents(cu: Int64, cp_size: int) -> Shards:
    """Every document in 2·cp_size chunks under the running remainder rule."""
    chunks = 2 * cp_size
    first = cu[:-1]
    base, longer = np.divmod(np.diff(cu), chunks)
    running = first % chunks
    # edges[c]: where chunk c of every document begins. Chunks running … running + longer - 1 (modulo chunks) are one
    # longer: count those before each edge.
    edge = np.arange(chunks + 1)[:, None]
    edges = base * edge
    edges += first
    edges += np.minimum(np.maximum(edge - running, 0), longer)
    edges += np.minimum(np.maximum(running + longer - chunks, 0), edge)
    # [cp_size, documents, 2], so that flattened it is in the order the ranks hold it.
    chunk = np.stack([np.arange(cp_size), chunks - 1 - np.arange(cp_size)], axis=1)
    start, stop = (edges[chunk + after].transpose(0, 2, 1).ravel() for after in (0, 1))
    document = np.tile(np.repeat(np.arange(len(first)), 2), cp_size)
    return from_pieces(cu, cp_size, start, stop, document, np.repeat(np.arange(cp_size), 2 * len(first)))


def from_pieces(cu: Int64, cp_size: int, start: Int64, stop: Int64, document: Int64, rank: Int64) -> Shards:
    """Shards of pieces (positions start … stop of one document, on a rank; int64[p] each) that cover the pack once.

    cu: int64[k + 1] boundaries. Pieces of a rank keep the order given; empty ones are dropped, and such as touch are
    merged (the last rank's middle chunks).
    """
    kept = np.flatnonzero(stop > start)
    if np.any(rank[1:] < rank[:-1]):
        kept = kept[np.argsort(rank[kept], kind="stable")]
    start, stop, document, rank = start[kept], stop[kept], document[kept], rank[kept]
    apart = (start[1:] != stop[:-1]) | (document[1:] != document[:-1]) | (rank[1:] != rank[:-1])
    bounds = np.flatnonzero(np.concatenate([[True], apart, [True]])) if len(kept) else np.zeros(1, np.int64)
    begins, ends = bounds[:-1], bounds[1:] - 1
    return Shards(
        cu_seqlens=cu,
        cp_size=cp_size,
        offsets=np.searchsorted(rank[begins], np.arange(cp_size + 1)).astype(np.int64),
        segments=np.stack([start[begins], stop[ends]], axis=1),
        document=document[begins],
    )
