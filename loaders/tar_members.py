"""Members of tar shards that hold tokens or columns: their formats, by extension, and what may stand in them.

| the extension ends in | what it holds | column |
|---|---|---|
| ``npy`` | a 1-D array: integers for tokens, any numbers beside them | one value per token |
| ``bin`` | the same without a header, of the type that ``dtype`` says | one value per token |
| ``json`` | a list of numbers, a number or a string; or an object of such, each a column of its own | per token or document |
| ``txt``, ``cls`` | UTF-8 text; a whole number | one per document |

A column is called by its extension without the format, ``labels.npy`` makes ``labels``. Nothing else is read, pickles least
of all: they run code.

    >>> Members(tokens="npy", columns=("labels.npy", "cls")).names
    ('input_ids', 'labels', 'cls')
    >>> json_columns(b'{"input_ids": [5, 6], "source": "web"}', "input_ids")
    {'input_ids': array([5, 6]), 'source': 'web'}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

ARRAYS = ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "|b1")
NUM_INTEGERS = 8
"""Of ``ARRAYS``, the first so many may hold tokens."""
TEXTS = ("json", "txt", "cls")
CODES = ARRAYS + TEXTS
"""What the numbers of an index's dtype columns mean."""
ITEM_BYTES = np.array([np.dtype(code).itemsize for code in ARRAYS] + [1] * len(TEXTS))
"""Bytes of a value of each of ``CODES``, int64."""
FORMATS = ("npy", "bin", *TEXTS)
PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")


def format_of(extension: str) -> str:
    """What an extension says of the format: its last part."""
    return extension.rpartition(".")[2]


@dataclass(frozen=True, kw_only=True)
class Members:
    """Which members of a sample hold its tokens and its columns, by extension (lower case, without the leading dot)."""

    tokens: str = "npy"
    columns: tuple[str, ...] = ()
    dtype: str | None = None
    """Type of raw ``bin`` members, ``uint16`` or the like; little endian."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        for extension in self.extensions:
            _check_extension(extension)
        if format_of(self.tokens) not in ("npy", "bin", "json"):
            raise ValueError(f"tokens are read from npy, bin or json members; got tokens={self.tokens!r}")
        names = self.names
        if len(set(names)) < len(names):
            raise ValueError(
                f"every column needs a name of its own; {', '.join(self.extensions)} make {', '.join(names)}"
            )
        raw = [extension for extension in self.extensions if format_of(extension) == "bin"]
        if (self.dtype is None) == bool(raw):
            raise ValueError(
                "dtype= says what raw bin members hold, and goes with them: give both or neither; got "
                f"dtype={self.dtype!r} and {', '.join(raw) or 'no bin member'}"
            )
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _array_type(self.dtype, for_tokens=self.tokens in raw))

    @property
    def extensions(self) -> tuple[str, ...]:
        """All that are read, that of the tokens first."""
        return (self.tokens, *self.columns)

    @property
    def are_parsed(self) -> bool:
        """Whether some are read and parsed to index them."""
        return any(format_of(extension) in TEXTS for extension in self.extensions)

    @property
    def names(self) -> tuple[str, ...]:
        """The column that each of ``extensions`` makes (an object in a json member makes others)."""
        return ("input_ids", *(extension.removesuffix("." + format_of(extension)) for extension in self.columns))


def _check_extension(extension: str) -> None:
    if format_of(extension) in PICKLES:
        raise ValueError(
            f"{extension!r} members are pickles, which run code when they are read: write them as npy or json"
        )
    if format_of(extension) not in FORMATS:
        raise ValueError(f"members are read whose extension ends in {', '.join(FORMATS)}; got {extension!r}")
    if not extension.isascii() or extension != extension.lower() or extension.startswith(".") or "/" in extension:
        raise ValueError(f"an extension is given in lower-case ASCII, without its leading dot; got {extension!r}")


def _array_type(name: str, *, for_tokens: bool) -> str:
    """A numpy type by name, as it stands in an index."""
    allowed = ARRAYS[:NUM_INTEGERS] if for_tokens else ARRAYS
    try:
        code = np.dtype(name).newbyteorder("<").str
    except TypeError:
        code = ""
    if code not in allowed:
        raise ValueError(f"dtype must be one of {', '.join(np.dtype(each).name for each in allowed)}; got {name!r}")
    return code


def text_columns(data: bytes, text: str, name: str) -> dict[str, Any]:
    """What a member of format ``text`` (one of ``TEXTS``) says: values by column. Raises ValueError."""
    if text == "json":
        return json_columns(data, name)
    return {name: data.decode() if text == "txt" else int(data)}


def json_columns(data: bytes, name: str) -> dict[str, Any]:
    """The columns of a json member: an object's entries, or what else it holds under ``name``. Raises ValueError."""
    try:
        held = json.loads(data)
    except RecursionError:
        raise ValueError("lists are nested too deep") from None
    values = held if isinstance(held, dict) else {name: held}
    if name == "input_ids" and not isinstance(values.get(name), list):
        raise ValueError(f"tokens in json are a list, or an object with a list 'input_ids'; got {_told(held)}")
    return {column: _value(column, value) for column, value in values.items()}


def _told(held: Any) -> str:
    return (
        f"an object with {', '.join(map(repr, held)) or 'nothing'}" if isinstance(held, dict) else type(held).__name__
    )


def _value(column: str, value: Any) -> Any:
    """An array for a list of numbers, a scalar or string as it is."""
    if isinstance(value, str | bool | int | float | None):
        return value
    kinds = set(map(type, value)) if isinstance(value, list) else {dict}
    allowed: tuple[set[type], ...] = ({int},) if column == "input_ids" else ({int}, {bool}, {int, float})
    if not any(kinds <= each for each in allowed):
        raise ValueError(
            f"{column!r} must be {'a list of whole numbers' if column == 'input_ids' else 'a list of numbers, a number or a string'}; "
            f"got {type(value).__name__ if not isinstance(value, list) else 'a list with ' + ', '.join(sorted(kind.__name__ for kind in kinds))}"
        )
    try:
        array = np.array(value, np.int64 if kinds <= {int} else None)
    except OverflowError:
        raise ValueError(f"{column!r} holds a number beyond 64 bits") from None
    if column == "input_ids" and array.size and array.min() < 0:
        raise ValueError(f"token ids must not be negative; got {array.min()}")
    return array
