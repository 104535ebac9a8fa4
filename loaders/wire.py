"""Rows as bytes and back: what documents travel in, from a worker to its process and from rank to rank.

An Arrow record batch in the IPC stream format: a list column per column and number type (64-bit offsets), values end to end,
and numbers and strings that a document has one of as JSON in the schema's metadata, so that they come back exactly as they
were. Nothing is pickled. Encoding copies every value once; what is decoded are views of the bytes.

    >>> rows = {"input_ids": [np.arange(3, dtype=np.uint16), np.arange(2, dtype=np.int32)], "name": ["a", None]}
    >>> decode(encode(rows))
    {'input_ids': [array([0, 1, 2], dtype=uint16), array([0, 1], dtype=int32)], 'name': ['a', None]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .dataset import Rows

Bytes = npt.NDArray[np.uint8]


def encode(rows: Mapping[str, Sequence[Any]]) -> Bytes:
    """Columns of documents as uint8[bytes]; no documents make no bytes. Arrays must be 1-D numbers, others JSON's."""
    count = len(next(iter(rows.values()), []))
    if not count:
        return np.zeros(0, np.uint8)
    fields, arrays, scalars = [], [], {}
    for name, values in rows.items():
        if not isinstance(values[0], np.ndarray):
            scalars[name] = values
            continue
        for dtype in dict.fromkeys(value.dtype for value in values):
            fields.append((name, dtype.str))
            arrays.append(_list_column([value if value.dtype == dtype else None for value in values], dtype))
    told = json.dumps({"columns": list(rows), "fields": fields, "scalars": scalars, "count": count})
    schema = pa.schema([pa.field(str(at), array.type) for at, array in enumerate(arrays)], {"rows": told})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return np.frombuffer(sink.getvalue(), np.uint8)


def _list_column(values: list[np.ndarray | None], dtype: np.dtype) -> pa.Array:
    """A list of numbers per document, null for those of another type. Truth values travel as bytes, which Arrow would pack."""
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets[1:])
    flat = np.concatenate([value for value in values if value is not None])
    null = np.array([value is None for value in values])
    return pa.LargeListArray.from_arrays(
        pa.array(offsets),
        pa.array(flat.view(np.uint8) if dtype.kind == "b" else flat),
        mask=pa.array(null) if null.any() else None,
    )


def decode(data: Bytes) -> Rows:
    """The columns of documents, arrays as read-only views of ``data``."""
    if not len(data):
        return {}
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        batch = reader.read_next_batch()
    told: dict[str, Any] = json.loads(batch.schema.metadata[b"rows"])
    rows: dict[str, list[Any]] = {name: told["scalars"].get(name) or [None] * told["count"] for name in told["columns"]}
    for (name, dtype), column in zip(told["fields"], batch.columns, strict=True):
        flat, offsets = column.values.to_numpy(), column.offsets.to_numpy().tolist()
        flat = flat.view(bool) if np.dtype(dtype).kind == "b" else flat
        there = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
        for at, (begin, end) in enumerate(pairwise(offsets)):
            if there is None or there[at]:
                rows[name][at] = flat[begin:end]
    return dict(rows)
