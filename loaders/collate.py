"""ThdCollator: lays one rank's share of a pack out as a ``ThdBatch``.

Labels are shifted per document before anything is cut, so the last token of a document predicts nothing and the label at
a cut survives. Every token-aligned column goes through the same segments as the tokens; ids and labels are copied by kernels
from where they lie, without a Python object per document, and everything else follows from a few numbers per segment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..packing.packs import Spans
from ..packing.padded import pad_documents
from ..packing.shards import Shards
from ..samplers.micro_batches import MicroBatch
from .batch import FIELDS, ThdBatch
from .dataset import SKIPPED, Rows, fault_of_labels
from .layout import IGNORE, num_targets
from .shapes import Shapes
from .slices import Slices

RECENT = 8
"""Packs whose layout is kept, and pools whose plan is, where making it takes long."""

if TYPE_CHECKING:
    from ..packing.masks import Mask
    from ..recipes import Recipe


class ThdCollator:
    """``collate_fn`` of a ``DataLoader`` over a ``PlannedDataset``.

    Rows may tell of documents that could not be read, ``{document: reason}`` under ``"__skipped__"``, with None in every
    column: such a document is laid out as a filler of its length (tokens 0, labels -100, ``documents`` -1) and named in
    ``batch.skipped``; attention still covers it, so ``pairs`` count it. Where no document of a micro-batch could be read
    there is nothing to imitate the columns of, and the batch has ``input_ids`` and what follows from them only.

    Args:
        recipe: the sampler's, which shards packs and makes attention plans.
        restart_positions: pieces of a split document count positions from 0, not from where they were cut.
        shapes: sizes that all micro-batches share.
        label_offsets: for multi-token prediction, how far ahead labels are wanted beside the next token's: ``(2, 3)`` gives
            ``batch.shifted_labels`` of two rows. They are cut from whole documents, so a label beyond the end of a shard or of a
            piece is there all the same, and nothing is sent; the step's target count is that of ``labels``.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        restart_positions: bool = False,
        shapes: Shapes | None = None,
        label_offsets: Sequence[int] = (),
    ) -> None:
        self.recipe = recipe
        self.restart_positions = restart_positions
        whole = isinstance(label_offsets, Sequence) and all(
            isinstance(each, int | np.integer) for each in label_offsets
        )
        if not whole or any(offset < 1 for offset in label_offsets):
            raise ValueError(f"label_offsets are whole numbers of at least 1, tokens ahead; got {label_offsets!r}")
        self.label_offsets = tuple(map(int, label_offsets))
        self.shapes = shapes or Shapes()
        self._recent: OrderedDict[bytes, Any] = OrderedDict()
        self.shapes.check_rule(recipe.shard)

    def __call__(self, fetched: Sequence[tuple[MicroBatch, Rows]]) -> ThdBatch:
        if len(fetched) != 1 or not isinstance(fetched[0], tuple) or not isinstance(fetched[0][0], MicroBatch):
            raise ValueError(
                "ThdCollator takes one planned micro-batch at a time: use DataLoader(PlannedDataset(dataset), "
                "batch_sampler=BalancedBatchSampler(…), collate_fn=ThdCollator(…))"
            )
        spec, rows, skipped = _readable(*fetched[0])
        spec, rows = self._filled(spec, rows)
        spans, shapes = spec.spans, self.shapes
        cu_seqlens, cu_padded = _boundaries(spec)
        shards, plan = self._laid_out(spec, cu_padded)
        local = _Segments(spec, shards, rows)
        columns, labels, behind = local.columns(rows)
        ids = columns.pop("input_ids")
        real = spans.tokens[spans.document >= 0]
        own: dict[str, Any] = {} if labels is None else {"labels": torch.from_numpy(labels)}
        if self.label_offsets:
            values = Slices.of(rows.get("labels", rows["input_ids"]))
            ahead = [local.ahead(values, offset) for offset in self.label_offsets]
            own |= {"label_offsets": self.label_offsets, "shifted_labels": torch.from_numpy(np.stack(ahead))}
        if cu_padded[-1] > cu_seqlens[-1] or (spec.pad_multiple > 1 and shapes.max_docs is not None):
            own["cu_seqlens_padded"] = torch.from_numpy(shapes.ends(cu_padded.astype(np.int32)))
        return ThdBatch.laid_out(
            {
                "input_ids": torch.from_numpy(ids),
                **own,
                "segments": torch.from_numpy(local.segments(restart=self.restart_positions)),
                "behind": torch.from_numpy(behind),
                "cu_seqlens": torch.from_numpy(shapes.ends(cu_seqlens.astype(np.int32))),
                "num_docs": len(spans),
                "max_seqlen": shapes.longest(int(spans.tokens.max())),
                "layout": self.recipe.layout,
                "plan": plan,
                "pack_mask": spec.mask,
                "cp_size": len(spec.ranks),
                "cp_rank": spec.cp_rank,
                "cp_ranks": spec.ranks,
                "num_targets": num_targets(local.tokens, behind) if labels is None else int((labels != IGNORE).sum()),
                "num_targets_step": spec.num_targets,
                "num_ranks": spec.num_ranks,
                "pairs": spec.pairs,
                "sum_len": int(real.sum()),
                "sum_len_sq": int((real * real).sum()),
                "documents": torch.from_numpy(spans.document),
                "starts": torch.from_numpy(spans.start),
                "skipped": skipped,
                "epoch": spec.epoch,
                "step": spec.step,
                "slot": spec.slot,
                "num_slots": spec.num_slots,
                "chunk": spec.chunk,
                "digest": spec.digest,
                "cost": spec.cost,
                "planning_seconds": spec.planning_seconds,
                "resume": spec.state,
                **{name: _tensor(value) for name, value in columns.items()},
            }
        )

    def _laid_out(self, spec: MicroBatch, cu_padded: np.ndarray) -> tuple[Shards, Any]:
        """Shards of the pack, and this rank's plan."""
        decision, most, mask = spec.decision, spec.max_tokens_per_rank, spec.mask
        if spec.pool:
            return self.recipe.shards(cu_padded, len(spec.ranks), decision, most, mask=mask), self._pooled(spec)
        if not self.recipe.places_slowly:
            return self.recipe.laid_out(cu_padded, spec.ranks, spec.cp_rank, decision, most, mask=mask)
        key = repr((spec.ranks, spec.cp_rank, most)).encode() + _told(cu_padded, mask)
        return self._kept(
            key, lambda: self.recipe.laid_out(cu_padded, spec.ranks, spec.cp_rank, decision, most, mask=mask)
        )

    def _kept(self, key: bytes, make: Callable[[], Any]) -> Any:
        """What was made for this key, of packs' lengths and masks, if that is not long ago; nobody else waits for it or knows."""
        if key not in self._recent:
            self._recent[key] = make()
        self._recent.move_to_end(key)
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return self._recent[key]

    def _pooled(self, spec: MicroBatch) -> Any:
        """This rank's part in the plan of the pool with which its CP group shares attention."""
        cp = len(spec.ranks)
        first = spec.ranks[0] // (cp * len(spec.pool)) * cp * len(spec.pool)
        others = [
            self._filled(replace(spec, spans=spans, document_tokens=spans.tokens, mask=mask), {})[0]
            for spans, mask in spec.pool
        ]
        held, masks = [_boundaries(other)[1] for other in others], [other.mask for other in others]
        ranks, mine = tuple(range(first, first + cp * len(others))), spec.ranks[spec.cp_rank] - first

        def make() -> Any:
            packs = [
                self.recipe.shards(cu, cp, None, spec.max_tokens_per_rank, mask=mask)
                for cu, mask in zip(held, masks, strict=True)
            ]
            return self.recipe.pooled(packs, ranks, mine, masks)

        key = repr((ranks, mine, cp, spec.max_tokens_per_rank)).encode()
        return self._kept(key + b"".join(map(_told, held, masks)), make)

    def _filled(self, spec: MicroBatch, rows: Rows) -> tuple[MicroBatch, Rows]:
        """The micro-batch with fillers behind, up to the size that all share; their row is any, for it is not read."""
        if self.shapes.pad_to is None and self.shapes.max_docs is None:
            return spec, rows
        _, cu_padded = _boundaries(spec)
        tokens = self.shapes.fillers(
            num_docs=len(spec.spans), tokens=int(cu_padded[-1]), cp_size=len(spec.ranks), multiple=spec.pad_multiple
        )
        if not len(tokens):
            return spec, rows
        none = np.zeros(len(tokens), np.int64)
        fillers = Spans(document=none - 1, start=none, stop=tokens, pairs=none)
        mask, start = spec.mask, np.append(spec.spans.start * 0, none)
        if mask is not None:
            mask = mask.pieces(np.append(np.arange(len(mask)), none - 1), start, np.append(mask.tokens, tokens))
        spec = replace(
            spec,
            mask=mask,
            spans=Spans.concat([spec.spans, fillers]),
            document_tokens=np.concatenate([spec.document_tokens, none]),
        )
        at = np.append(np.arange(len(spec.spans) - len(tokens)), none)
        return spec, {name: _taken(values, at) for name, values in rows.items()}


def _told(cu_seqlens: np.ndarray, mask: Mask | None) -> bytes:
    """A pack's lengths and masks, and how much of it there is, so that several in a row are told apart."""
    tiles = b"" if mask is None else mask.tiles_of_pack().tobytes()
    return b"%d %d " % (len(cu_seqlens), len(tiles)) + cu_seqlens.tobytes() + tiles


def _boundaries(spec: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """Where documents end in the pack, and where with their padding; int64[d + 1] each."""
    cu_seqlens = np.concatenate([[0], np.cumsum(spec.spans.tokens)])
    cu_padded = pad_documents(cu_seqlens, spec.pad_multiple) if spec.pad_multiple > 1 else cu_seqlens
    assert cu_padded[-1] < 2**31, f"{cu_padded[-1]} tokens overflow int32"
    return cu_seqlens, cu_padded


def _readable(spec: MicroBatch, rows: Rows) -> tuple[MicroBatch, Rows, tuple[tuple[int, str], ...]]:
    """The micro-batch with a filler for each document that could not be read, which has the row of one that could; and
    those documents, with the reasons."""
    reasons: Any = rows.get(SKIPPED)
    if not reasons:
        return spec, {name: values for name, values in rows.items() if name != SKIPPED}, ()
    document = spec.spans.document
    lost = np.isin(np.where(document < 0, spec.template, document), list(reasons))
    read = np.flatnonzero(~lost)
    if len(read):
        at = np.where(lost, read[0], np.arange(len(lost)))
        rows = {name: _taken(values, at) for name, values in rows.items() if name != SKIPPED}
    else:
        rows = {"input_ids": [np.zeros(0, np.int64)] * len(lost)}
    told = tuple((number, str(reasons[number])) for number in dict.fromkeys(document[lost & (document >= 0)].tolist()))
    return replace(spec, spans=replace(spec.spans, document=np.where(lost, -1, document))), rows, told


def _taken(values: Sequence[Any], at: np.ndarray) -> Sequence[Any]:
    """A column's values of the rows int64[k]."""
    return values.take(at) if isinstance(values, Slices) else [values[row] for row in at.tolist()]


class _Segments:
    """The runs of tokens that this rank holds: of which document, from where in it, how many."""

    def __init__(self, spec: MicroBatch, shards: Shards, rows: Rows) -> None:
        held = slice(shards.offsets[spec.cp_rank], shards.offsets[spec.cp_rank + 1])
        spans, segments, self.document = spec.spans, shards.segments[held], shards.document[held]
        self.filler = spans.document < 0
        self.empty = self.filler[self.document]  # bool[s]
        if spec.pad_multiple > 1:
            segments, self.document, padding = _split_padding(
                segments, self.document, shards.cu_seqlens[:-1] + spans.tokens
            )
            self.empty = self.filler[self.document] | padding
        self.tokens = segments[:, 1] - segments[:, 0]
        self.place = segments[:, 0]  # in the pack
        self.begin = spans.start[self.document] + self.place - shards.cu_seqlens[self.document]
        self.span_start = spans.start
        self.numbers = spans.document
        self.named = np.where(self.filler, spec.template, spans.document)  # whose row it is
        self.length = self._document_tokens(spec, rows)  # int64[d], as the plan knows each document

    def _document_tokens(self, spec: MicroBatch, rows: Rows) -> np.ndarray:
        if "input_ids" not in rows:
            raise ValueError(
                f"the tokens must be in a column named 'input_ids'; the dataset has {', '.join(sorted(rows))}"
            )
        ids = rows["input_ids"]
        length = ids.tokens if isinstance(ids, Slices) else self._lengths(ids)
        other = np.flatnonzero((length != spec.document_tokens) & ~self.filler)
        if len(other):
            at = other[0]
            raise ValueError(
                f"document {self.numbers[at]} has {length[at]} tokens, but {spec.document_tokens[at]} in the length index, which "
                f"does not belong to this dataset: build it anew"
            )
        return np.minimum(length, spec.document_stop) if spec.document_stop else length

    def _lengths(self, rows: Sequence[Any]) -> np.ndarray:
        shapes = [getattr(ids, "shape", None) for ids in rows]
        bad = [at for at, shape in enumerate(shapes) if shape is None or len(shape) != 1]
        if bad:
            raise ValueError(
                f"the tokens of document {self.numbers[bad[0]]} must be a 1-D array of ids; got shape {shapes[bad[0]]}"
            )
        return np.array([shape[0] for shape in shapes if shape is not None], np.int64)

    def segments(self, *, restart: bool) -> np.ndarray:
        """int64[s, 4]: document of the pack, position of the first token, place in the pack, tokens."""
        begin = self.begin - self.span_start[self.document] if restart else self.begin
        out = np.empty((len(self.tokens), 4), np.int64)
        out[:, 0], out[:, 1], out[:, 2], out[:, 3] = self.document, begin, self.place, self.tokens
        return out

    def columns(self, rows: Rows) -> tuple[dict[str, Any], np.ndarray | None, np.ndarray]:
        """Every other column, token-aligned ones cut; the shifted labels int64[t], None where the tokens are the labels;
        and the label behind each segment, int64[s]."""
        taken = [name for name in rows if name in FIELDS and name not in ("input_ids", "labels")]
        if taken:
            raise ValueError(
                f"column {taken[0]!r} has the name of an entry that a ThdBatch makes itself; rename the column"
            )
        out: dict[str, Any] = {}
        for name, values in rows.items():
            if name in ("input_ids", "labels"):
                self._check_integers("labels" if name == "labels" else "token ids", values)
            if isinstance(values, Slices) or all(isinstance(value, np.ndarray) for value in values):
                self._check_aligned(name, values, rows["input_ids"])
                if name not in ("input_ids", "labels"):
                    out[name] = self._cut(values)
            elif any(isinstance(value, np.ndarray) for value in values):
                raise ValueError(f"column {name!r} holds arrays for some documents and single values for others")
            else:
                out[name] = [None if empty else value for value, empty in zip(values, self.filler, strict=True)]
        ids = Slices.of(rows["input_ids"])
        out["input_ids"], lowest = ids.widened(self.document, self.begin, self.tokens, self.empty)
        if lowest < 0:
            at = next(at for at, value in enumerate(rows["input_ids"]) if (value.astype(np.int64) < 0).any())
            raise ValueError(f"token ids must not be negative; got {lowest} in document {self.named[at]}")
        if "labels" not in rows:
            return out, None, self._behind(ids)
        values = Slices.of(rows["labels"])
        labels = self.ahead(values, 1)
        if np.count_nonzero(labels < 0) != np.count_nonzero(labels == IGNORE):
            at = next(at for at, value in enumerate(rows["labels"]) if fault_of_labels(value))
            raise ValueError(f"document {self.named[at]} cannot be trained on: {fault_of_labels(rows['labels'][at])}")
        return out, labels, self._behind(values)

    def _check_integers(self, what: str, values: Sequence[Any]) -> None:
        if isinstance(values, Slices) and len(values.dtypes) == 1 and next(iter(values.dtypes)).kind in "iu":
            return
        for at, value in enumerate(values):
            if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
                held = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
                raise ValueError(f"{what} must be integers; those of document {self.named[at]} are {held}")
        if np.result_type(*{value.dtype for value in values}).kind == "f":
            raise ValueError(f"{what} must be integers of a kind; in this pack some are uint64 and some are signed")

    def _check_aligned(self, name: str, values: Sequence[np.ndarray], ids: Sequence[np.ndarray]) -> None:
        if isinstance(values, Slices) and isinstance(ids, Slices):
            if values is ids or np.array_equal(values.tokens, ids.tokens):
                return
        for at, (value, tokens) in enumerate(zip(values, ids, strict=True)):
            if value.ndim != 1 or len(value) != len(tokens):
                raise ValueError(
                    f"column {name!r} must hold one value per token or one value per document; for document "
                    f"{self.numbers[at]} it has shape {value.shape} beside {len(tokens)} tokens"
                )

    def _cut(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """The values of this rank's tokens, of whatever type; zeros for a filler's and for padding."""
        if isinstance(values, Slices):
            pieces = values.cut(self.document, self.begin, self.tokens)
        else:
            pieces = [
                values[document][begin : begin + tokens]
                for document, begin, tokens in zip(
                    self.document.tolist(), self.begin.tolist(), self.tokens.tolist(), strict=True
                )
            ]
        if self.empty.any():
            nothing = np.zeros(int(self.tokens.max()), values[0].dtype)
            for at in np.flatnonzero(self.empty).tolist():
                pieces[at] = nothing[: self.tokens[at]]
        return np.concatenate(pieces) if pieces else np.zeros(0, values[0].dtype)

    def ahead(self, values: Slices, offset: int) -> np.ndarray:
        """int64[t]: for each token the value `offset` further on in its document; -100 where there is none and in fillers."""
        return values.ahead(self.document, self.begin, self.tokens, self.empty, self.length, offset)

    def _behind(self, values: Slices) -> np.ndarray:
        """int64[s]: the value behind each segment in its document; -100 behind a document's last, -101 in fillers."""
        return values.behind(self.document, self.begin + self.tokens, self.empty, self.length)


def _split_padding(segments: np.ndarray, document: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, ...]:
    """Segments cut where their document's real tokens end (``end`` int64[d], positions in the pack), so that each is real
    or padding: (segments int64[s, 2], document int64[s], whether it is padding bool[s])."""
    limit = np.clip(end[document], segments[:, 0], segments[:, 1])
    if (limit == segments[:, 1]).all():
        return segments, document, np.zeros(len(segments), bool)
    real, pads = np.stack([segments[:, 0], limit], 1), np.stack([limit, segments[:, 1]], 1)
    both = np.stack([real, pads], 1).reshape(-1, 2)
    kept = both[:, 1] > both[:, 0]
    return both[kept], np.repeat(document, 2)[kept], np.tile([False, True], len(segments))[kept]


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if value and all(isinstance(entry, int | float | bool) for entry in value):
        return torch.tensor(value)
    return value
