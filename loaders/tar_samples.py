"""Files of a tar archive made into samples, and the headers of npy members read: two numba kernels.

A sample is consecutive members of one key: the name up to the first dot behind the last slash; what follows is the extension,
in lower case. These are webdataset's rules, to the letter, also for hidden files and for its ``__meta__``.

    >>> names = np.frombuffer(b"a.npya.clsb.npy", np.uint8)
    >>> files = Files(names=names, name_ends=np.array([5, 10, 15]), **dict.fromkeys(("offset", "size", "header"), np.arange(3)))
    >>> samples = group(files, ("npy", "cls"))
    >>> samples.keys.tobytes(), samples.file
    (b'ab', array([[ 0,  1],
           [ 2, -1]]))
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

import numpy as np
from numba import njit

from ..packing.packs import Int64
from .tar_members import ARRAYS
from .tar_scan import Bytes, Files, TarError

_SLASH, _DOT, _UNDERSCORE, _A, _Z, _ZERO, _NINE, _NEWLINE, _SPACE = b"/._AZ09\n "

# An npy header as numpy writes it, around the type and the length.
_MAGIC = np.frombuffer(b"\x93NUMPY", np.uint8)
_HEAD = np.frombuffer(b"{'descr': '", np.uint8)
_BETWEEN = np.frombuffer(b"', 'fortran_order': False, 'shape': (", np.uint8)
_TAIL = np.frombuffer(b",), }", np.uint8)
_CODES = np.array([list(code.encode()) for code in ARRAYS], np.uint8)
_LONGEST_HEADER = 10_000
"""Bytes of an npy header that is given to a parser, as in numpy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """The s samples of an archive, in its order."""

    keys: Bytes
    """Their keys, one behind the other."""
    key_ends: Int64
    """int64[s]: where each ends."""
    first: Int64
    """int64[s]: the file that each begins with."""
    file: Int64
    """int64[s, extensions]: the file with each of the wanted extensions, -1 where there is none."""
    ignored: int
    """Files that belong to no sample: names without an extension, webdataset's ``__meta__``."""


def group(files: Files, extensions: tuple[str, ...]) -> Samples:
    """The samples of the files, and which are their members of these extensions (lower case). Raises TarError."""
    wanted = np.zeros((len(extensions), max(map(len, extensions))), np.uint8)
    for row, extension in zip(wanted, extensions, strict=True):
        row[: len(extension)] = np.frombuffer(extension.encode("ascii"), np.uint8)
    lengths = np.array([len(extension) for extension in extensions])
    n = len(files.name_ends)
    keys, key_ends, first = np.empty_like(files.names), np.empty(n, np.int64), np.empty(n, np.int64)
    file = np.full((n, len(extensions)), -1)
    s, ignored, twice = _group(files.names, files.name_ends, wanted, lengths, keys, key_ends, first, file)
    if twice >= 0:
        raise TarError("the sample has a second member of this extension", files.name(twice), files.header[twice])
    return Samples(
        keys=keys[: key_ends[s - 1] if s else 0], key_ends=key_ends[:s], first=first[:s], file=file[:s], ignored=ignored
    )


@njit(nogil=True, cache=True)
def _group(names, name_ends, wanted, lengths, keys, key_ends, first, file):
    """Fill the last four; (samples, files ignored, a file that its sample had already or -1)."""
    s, ignored, begin, key_start, key_size = 0, 0, np.int64(0), np.int64(0), np.int64(0)
    for i in range(len(name_ends)):
        name = names[begin : name_ends[i]]
        begin = name_ends[i]
        key = _key(name)
        if key == 0:
            ignored += 1
            continue
        if s == 0 or key != key_size or not _same(keys, key_start, name, key):
            key_start, key_size = key_start + key_size, key
            for at in range(key):
                keys[key_start + at] = name[at]
            key_ends[s], first[s] = key_start + key, i
            s += 1
        column = _column(name, key + 1, wanted, lengths)
        if column >= 0:
            if file[s - 1, column] >= 0:
                return s, ignored, np.int64(i)
            file[s - 1, column] = i
    return s, ignored, np.int64(-1)


@njit(nogil=True, cache=True)
def _key(name):
    """Bytes of a name's key, 0 where the member belongs to no sample: what webdataset's rules make of it."""
    n = len(name)
    first, before, slash = n, -1, -1  # the first slash, the last but one, the last
    for i in range(n):
        if name[i] == _SLASH:
            first, before, slash = min(first, i), slash, i
    if first >= 4 and name[0] == name[1] == name[first - 2] == name[first - 1] == _UNDERSCORE:
        return np.int64(0)
    dot = slash + 1
    while dot < n and name[dot] != _DOT:
        dot += 1
    if dot == n:
        return np.int64(0)
    if dot == slash + 1:  # nothing in front of the dot: the folder is the key, if its name has no dot itself
        for i in range(before + 1, slash):
            if name[i] == _DOT:
                return np.int64(0)
    return dot


@njit(nogil=True, cache=True)
def _same(keys, start, name, size):
    for i in range(size - 1, -1, -1):  # neighbours differ at the end
        if keys[start + i] != name[i]:
            return False
    return True


@njit(nogil=True, cache=True)
def _column(name, start, wanted, lengths):
    """Which of the wanted extensions name[start:] is, whatever its case; -1: none."""
    size = len(name) - start
    for column in range(len(lengths)):
        if lengths[column] == size:
            i = np.int64(0)
            while i < size:
                byte = name[start + i]
                if _A <= byte <= _Z:
                    byte += np.uint8(32)
                if byte != wanted[column, i]:
                    break
                i += 1
            if i == size:
                return np.int64(column)
    return np.int64(-1)


@njit(nogil=True, cache=True)
def _matches(data, at, pattern):
    for i in range(len(pattern)):
        if data[at + i] != pattern[i]:
            return False
    return True


@njit(nogil=True, cache=True)
def read_npy_headers(data, offset, size, tokens, dtype):
    """Of npy members at data[offset : offset + size] (int64[n] each): make offset and size those of the data behind the header,
    tokens (int64[n]) the length and dtype (int64[n]) the type's place in ARRAYS; -1 and no change where the header is not as
    numpy writes it for one dimension.
    """
    for i in range(len(offset)):
        dtype[i] = -1
        body, length, code = _npy_header(data, offset[i], offset[i] + size[i])
        if body >= 0:
            size[i] -= body - offset[i]
            offset[i], tokens[i], dtype[i] = body, length, code


@njit(nogil=True, cache=True)
def _npy_header(data, at, end):
    """(where the data begins, length, type) of an npy member at data[at:end]; -1 each where the header is another."""
    none = np.int64(-1), np.int64(-1), np.int64(-1)
    if end - at < 12 or not _matches(data, at, _MAGIC) or not 1 <= data[at + 6] <= 3:
        return none
    header, text = np.int64(data[at + 8]) + (np.int64(data[at + 9]) << 8), at + 10
    if data[at + 6] > 1:
        header += (np.int64(data[at + 10]) << 16) + (np.int64(data[at + 11]) << 24)
        text = at + 12
    body, code = text + header, text + len(_HEAD)
    i = digits = code + 3 + len(_BETWEEN)
    if body > end or digits + 18 > body or not (_matches(data, text, _HEAD) and _matches(data, code + 3, _BETWEEN)):
        return none
    length = np.int64(0)
    while i < body and _ZERO <= data[i] <= _NINE:
        length = length * 10 + (data[i] - _ZERO)
        i += 1
    if not 0 < i - digits <= 18 or i + len(_TAIL) > body or not _matches(data, i, _TAIL):
        return none
    for behind in range(i + len(_TAIL), body):
        if data[behind] != _SPACE and data[behind] != _NEWLINE:
            return none
    for known in range(len(_CODES)):
        if _matches(data, code, _CODES[known]):
            return body, length, np.int64(known)
    return none


def parse_npy_header(member: Bytes) -> tuple[int, int, int]:
    """(bytes of the header, length, place of the type in ARRAYS) of an npy member, however its header is written.

    Raises ValueError for anything but an array in one dimension of a type in ARRAYS.
    """
    start = member[:12].tobytes()
    if len(start) < 12 or start[:6] != _MAGIC.tobytes() or start[6] not in (1, 2, 3):
        raise ValueError("the member is no npy file of version 1 to 3")
    text = 10 if start[6] == 1 else 12
    body = text + int.from_bytes(start[8:text], "little")
    if body > len(member) or body > _LONGEST_HEADER:
        raise ValueError(
            f"the npy header states {body - text} bytes; the member has {len(member)}, and {_LONGEST_HEADER} are read"
        )
    try:
        header = ast.literal_eval(member[text:body].tobytes().decode("latin1").strip())
        descr, fortran_order, (length,) = header["descr"], header["fortran_order"], header["shape"]
        code = ARRAYS.index(np.dtype(descr).str) if isinstance(descr, str) else -1
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        code = -1
    if code < 0 or fortran_order or type(length) is not int or not 0 <= length < 2**62:
        shown = member[text:body].tobytes().decode("latin1").strip()[:200]
        raise ValueError(
            f"an npy member must hold numbers in one dimension, in C order, little endian, of type {', '.join(ARRAYS)}; its header "
            f"is {shown}"
        )
    return body, length, code
