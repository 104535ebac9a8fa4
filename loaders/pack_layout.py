"""PackLayout: rows of packs for ``datasets``, laid out in bulk by the same code that lays out a micro-batch.

``Dataset.map`` hands over a table of packs, as lists of spans; all of them are laid out as one micro-batch of one rank by
``ThdCollator`` and then cut apart, which costs an offset per pack. So labels, positions and other columns are those of
``BalancedLoader``, token for token, and nothing is decided here but how a row is stored.

    >>> layout = PackLayout(data=PlannedDataset([[1, 2, 3], [4, 5], [6]]))
    >>> packs = Packs(spans=Spans.whole([3, 2, 1], [6, 3, 1]), offsets=np.array([0, 2, 3]))
    >>> layout(packs_table(packs, np.array([3, 2, 1]))).to_pylist()[0]["labels"]
    [2, 3, -100, 5, -100]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..packing.packs import Packs, Spans
from ..recipes import recipe
from ..samplers.micro_batches import MicroBatch
from .collate import ThdCollator
from .dataset import PlannedDataset, Rows
from .layout import IGNORE

MADE = ("position_ids", "seq_lengths", "cu_seqlens", "doc_ids")


def packs_table(packs: Packs, length: np.ndarray) -> pa.Table:
    """One row per pack, lists of one entry per span; length int64[spans]: tokens of each span's whole document."""
    spans = packs.spans
    columns = {"document": spans.document, "start": spans.start, "stop": spans.stop, "length": length}
    return pa.table({name: _lists(packs.offsets, values) for name, values in columns.items()})


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """From a ``packs_table`` to rows. Raises ValueError for columns that cannot be packed.

    Args:
        data: where the documents are.
        types: Arrow types of columns with one value per document, which those keep.
        document_stop: documents end here even where they are longer; 0: nowhere.
        shift_labels, restart_positions: see ``pack_dataset``.
    """

    data: PlannedDataset
    types: dict[str, pa.DataType] = field(default_factory=dict)
    document_stop: int = 0
    shift_labels: bool = True
    restart_positions: bool = False

    def __call__(self, packs: pa.Table) -> pa.Table:
        columns = {name: packs.column(name).combine_chunks() for name in packs.column_names}
        edges = _prefix(pc.list_value_length(columns["document"]).to_numpy())
        flat = {name: np.array(column.flatten()) for name, column in columns.items()}
        ((spec, rows),) = self.data.__getitems__([self._micro_batch(**flat)])
        per_document = _per_document(rows)
        batch = ThdCollator(recipe("static", shard="whole", attend="none"), restart_positions=self.restart_positions)(
            [(spec, {name: values for name, values in rows.items() if name not in per_document})]
        )
        cu_seqlens, labels = batch.cu_seqlens.numpy(), batch.labels.numpy()
        if not self.shift_labels:
            labels = _unshifted(labels, cu_seqlens[:-1])
        ends = cu_seqlens[edges]
        made = {
            "input_ids": _lists(ends, _int32("input_ids", batch.input_ids.numpy())),
            "labels": _lists(ends, _int32("labels", labels)),
            "position_ids": _lists(ends, batch.position_ids.numpy().astype(np.int32)),
            "seq_lengths": _lists(edges, np.diff(cu_seqlens)),
            "cu_seqlens": _boundaries(cu_seqlens, edges),
            "doc_ids": _lists(edges, spec.spans.document),
        }
        for name in rows:
            if name in per_document:
                made[name] = _lists(edges, pa.array(rows[name], self.types.get(name)))
            elif name == "attention_mask":
                _check_mask(batch[name].numpy())
            elif name not in made:
                made[name] = _lists(ends, batch[name].numpy())
        return pa.table(made)

    def _micro_batch(self, document: np.ndarray, start: np.ndarray, stop: np.ndarray, length: np.ndarray) -> MicroBatch:
        """All of these spans on one rank."""
        return MicroBatch(
            spans=Spans(document=document, start=start, stop=stop, pairs=np.zeros_like(document)),
            document_tokens=length,
            epoch=0,
            step=0,
            slot=0,
            num_slots=1,
            ranks=(0,),
            cp_rank=0,
            num_targets=None,
            num_ranks=1,
            document_stop=self.document_stop,
            template=0,
            digest=0,
            planning_seconds=0.0,
            cost=0.0,
            max_tokens_per_rank=int((stop - start).sum()),
            pad_multiple=1,
            decision=None,
            chunk=None,
            state={},
        )


def _per_document(rows: Rows) -> set[str]:
    """Columns with one value per document. Raises ValueError where a column has a name that is taken."""
    taken = [name for name in MADE if name in rows]
    if taken:
        raise ValueError(f"column {taken[0]!r} has the name of a column that packing makes; rename or remove it")
    return {name for name, values in rows.items() if not any(isinstance(value, np.ndarray) for value in values)}


def _lists(edges: np.ndarray, values: np.ndarray | pa.Array) -> pa.ListArray:
    """values cut at edges int[p + 1]."""
    assert edges[-1] < 2**31, f"{edges[-1]} values overflow the offsets of an Arrow list"
    return pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), pa.array(values))


def _boundaries(cu_seqlens: np.ndarray, edges: np.ndarray) -> pa.ListArray:
    """cu_seqlens of each pack, from those of packs laid end to end, of which pack i has documents edges[i] … edges[i + 1]."""
    counts = np.diff(edges) + 1
    pack = np.repeat(np.arange(len(counts)), counts)
    inside = cu_seqlens[np.arange(len(pack)) - pack] - cu_seqlens[edges[pack]]
    return _lists(_prefix(counts), inside.astype(np.int32))


def _unshifted(labels: np.ndarray, starts: np.ndarray) -> np.ndarray:
    unshifted = np.concatenate([[IGNORE], labels[:-1]])
    unshifted[starts] = IGNORE
    return unshifted


def _int32(name: str, values: np.ndarray) -> np.ndarray:
    if len(values) and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ValueError(f"{name} are stored as int32; got {values.min()} … {values.max()}")
    return values.astype(np.int32)


def _check_mask(mask: np.ndarray) -> None:
    if not (mask == 1).all():
        raise ValueError(
            "packs hold tokens of documents and no padding; column 'attention_mask' is not 1 for all of them: tokenise without "
            "padding, or remove the column where it does not mean padding"
        )


def _prefix(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
