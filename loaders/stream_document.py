"""A document as a stream gives it, checked before anything is planned with it.

>>> document_of([7, 8, 9]).tokens, document_of({"input_ids": [7, 8, 9], "labels": [-100, 8, -100], "name": "a"}).targets
(3, 1)
>>> document_of({"input_ids": [7, -1]})
Traceback (most recent call last):
ValueError: it holds the token id -1, below 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .batch import IGNORE
from .dataset import fault

_OVERHEAD = 64  # bytes that a value costs beside itself


@dataclass(frozen=True, eq=False)
class Document:
    """Its columns: a 1-D array with a value per token, or one number or string."""

    row: dict[str, Any]
    tokens: int
    targets: int
    """Labels behind the first that are not masked; without labels all tokens but one."""

    @property
    def columns(self) -> dict[str, str]:
        """Names and kinds, ``array`` or ``value``: what all documents of a stream have alike."""
        return {name: "array" if isinstance(value, np.ndarray) else "value" for name, value in self.row.items()}

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        sizes = (value.nbytes if isinstance(value, np.ndarray) else len(str(value)) for value in self.row.values())
        return sum(sizes) + _OVERHEAD * len(self.row)


@dataclass(frozen=True)
class Failed:
    """A document that could not be read, or cannot be trained on."""

    reason: str
    trace: str = ""
    final: bool = False
    """Whether nothing behind it can be read, which is an error also where this one is not."""


@dataclass(frozen=True)
class End:
    """A part is over."""


def document_of(value: Any, columns: tuple[str, ...] | None = None) -> Document:
    """A document from a mapping of columns or from token ids alone; ``columns`` are kept, None: all.

    Raises ValueError that says what is wrong with it.
    """
    given = dict(value) if isinstance(value, Mapping) else {"input_ids": value}
    if columns is not None:
        missing = [name for name in columns if name not in given]
        if missing:
            raise ValueError(f"it has no column {missing[0]!r}, but {', '.join(map(repr, given))}")
        given = {name: each for name, each in given.items() if name in ("input_ids", *columns)}
    row = {name: _value(name, each) for name, each in given.items()}
    wrong = fault(row)
    if wrong:
        raise ValueError(wrong)
    tokens = len(row["input_ids"])
    targets = int((row["labels"][1:] != IGNORE).sum()) if "labels" in row else max(tokens - 1, 0)
    return Document(row, tokens, targets)


def _value(name: str, value: Any) -> Any:
    """A 1-D array of numbers for a sequence or tensor, or a number, a string or None."""
    if isinstance(value, str | bool | int | float | None):
        return value
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"column {name!r} is ragged: {error}") from None
    if array.dtype.kind not in "biuf" and array.size:
        held = type(value).__name__ if array.ndim == 0 else f"{type(value).__name__} of {array.dtype}"
        raise ValueError(
            f"column {name!r} must hold a number per token, or one number or string; got {held}: remove or convert it"
        )
    if array.ndim == 0:
        return array.item()
    if (
        not array.size
        and array.dtype.kind not in "biu"
        and (array.dtype.kind != "f" or name in ("input_ids", "labels"))
    ):
        return np.zeros(array.shape, np.int64)  # nothing tells the type of an empty list
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
