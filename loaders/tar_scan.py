"""The walk over the headers of a tar archive that lies in memory (mapped): where every member's data is, by a numba kernel.

Read are ustar, GNU long names, pax (``path`` and ``size``, of one member or global) and base-256 sizes; links, devices and
directories are passed over, sparse members refused. Nothing from a header is believed: each size is held against the file
before anything is skipped or copied. An archive must end in its end-of-archive mark, or one that was cut between two
members would pass for whole.

    >>> import io, tarfile
    >>> with tarfile.open(fileobj=(out := io.BytesIO()), mode="w") as tar:
    ...     member = tarfile.TarInfo("000.txt")
    ...     member.size = 5
    ...     tar.addfile(member, io.BytesIO(b"hello"))
    >>> files = walk(np.frombuffer(out.getvalue(), np.uint8))
    >>> files.names.tobytes(), files.offset, files.size
    (b'000.txt', array([512]), array([5]))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from ..packing.packs import Int64

Bytes = npt.NDArray[np.uint8]

BLOCK = 512
MAX_NAME = 65536
"""Bytes of the longest member name that is read; file systems stop at 4,096."""

# Status of a walk: at the end of the archive, out of room, or a fault.
_DONE, _FULL, _TRUNCATED, _CHECKSUM, _NUMBER, _NEGATIVE, _HUGE, _BEYOND, _SPARSE, _PAX, _NAME, _ORPHAN, _AFTER = range(
    13
)
_FAULTS = {
    _TRUNCATED: "the file ends without an end-of-archive mark: it was truncated, or is still being written",
    _CHECKSUM: "the header's checksum is wrong: the file is damaged, or no tar archive",
    _NUMBER: "the header's size is no number",
    _NEGATIVE: "the header states a negative size",
    _HUGE: "the header states a size of more than 2**62 bytes",
    _BEYOND: "the header states {value} bytes of data, and the file has only {left} behind it: it was truncated or damaged",
    _SPARSE: "the member is sparse or continued from another volume, and cannot be read by offset: write it anew",
    _PAX: "the pax header holds a record that is none",
    _NAME: f"the member's name is longer than {MAX_NAME} bytes",
    _ORPHAN: "a long name or pax header stands before the end of the archive without a member",
    _AFTER: "the end-of-archive mark is followed by other data (archives one behind another?): write it as one archive",
}

# State between calls: where to go on; where a fault is and the number it is about; the global pax path (place, bytes) and size.
_POSITION, _FAULT, _VALUE, _PATH_AT, _PATH_SIZE, _SIZE = range(6)

# The types of members that are told apart, and characters: numba takes seconds to compile an ord().
_LONG_NAME, _LONG_LINK, _PAX_NEXT, _PAX_SUN, _PAX_ALL, _SPARSE_FILE, _CONTINUED, _LINK, _FIFO = b"LKxXgSM16"
_SPACE, _MINUS, _SLASH, _ZERO, _SEVEN, _NINE, _EQUALS, _NEWLINE = b" -/079=\n"
_USTAR = np.frombuffer(b"ustar\0", np.uint8)
_PAX_PATH, _PAX_SIZE, _PAX_SPARSE = (np.frombuffer(key, np.uint8) for key in (b"path", b"size", b"GNU.sparse"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Files:
    """The n regular files of an archive, in its order."""

    names: Bytes
    """Their names, one behind the other."""
    name_ends: Int64
    """int64[n]: where each ends."""
    offset: Int64
    """int64[n]: the byte of the archive at which its data begins."""
    size: Int64
    """int64[n]: bytes of data; they end within the archive."""
    header: Int64
    """int64[n]: the byte at which its own header begins, for messages."""

    def name(self, row: int) -> str:
        """One name, for messages."""
        return (
            self.names[self.name_ends[row - 1] if row else 0 : self.name_ends[row]].tobytes().decode(errors="replace")
        )


class TarError(ValueError):
    """What is wrong with a member: the rule, its name as far as known, and the byte of its header."""

    def __init__(self, rule: str, name: str, header: int) -> None:
        super().__init__(f"{rule} (member {name!r}, header at byte {header})")


def walk(data: Bytes, *, chunk: int = 65536) -> Files:
    """The files of the archive ``data`` (uint8[bytes]), ``chunk`` headers at a time. Raises TarError."""
    data = data.view()
    data.flags.writeable = False  # as a map is: kernels are compiled for one kind
    state = np.zeros(6, np.int64)
    state[_SIZE] = -1
    parts: list[tuple[Bytes, Int64]] = []
    base, status = 0, _FULL
    while status == _FULL:
        # Room for the longest name of all besides, so that every call takes a member at least.
        names, files = np.empty(64 * chunk + MAX_NAME, np.uint8), np.empty((4, chunk), np.int64)
        status, n = _walk(data, state, names, files)
        if status not in (_DONE, _FULL):
            raise _fault(status, data, state)
        size = int(files[0, n - 1]) if n else 0
        files[0] += base
        parts.append((names[:size].copy(), files[:, :n]))
        base += size
    name_ends, offset, sizes, header = np.concatenate([part for _, part in parts], axis=1)
    return Files(
        names=np.concatenate([part for part, _ in parts]), name_ends=name_ends, offset=offset, size=sizes, header=header
    )


def _fault(status: int, data: Bytes, state: Int64) -> TarError:
    at = int(state[_FAULT])
    rule = _FAULTS[status].format(value=state[_VALUE], left=max(len(data) - at - BLOCK, 0))
    return TarError(rule, data[at : at + 100].tobytes().split(b"\0")[0].decode(errors="replace"), at)


@njit(nogil=True, cache=True)
def _walk(data, state, names, files):
    """Fill names and files (int64[4, n]: name end, offset, size, header) from state[_POSITION] on; (status, files filled)."""
    position = entry = state[_POSITION]  # entry: the first header of a member, which others may precede
    n, name = 0, np.int64(0)
    # What headers before a member's own gave: bytes of its name, which stands behind the others, and its size.
    named, sized, awaited = np.int64(-1), np.int64(-1), False
    while True:
        state[_FAULT] = position
        if n == files.shape[1] or name + MAX_NAME > len(names):
            state[_POSITION] = entry
            return _FULL, n
        status, kind, length = _header(data, position)
        if status != _FULL:
            return _ORPHAN if status == _DONE and awaited else status, n
        at = position + BLOCK
        if kind == _LONG_NAME or kind == _LONG_LINK or kind == _PAX_NEXT or kind == _PAX_SUN or kind == _PAX_ALL:
            status, named, sized = _extension(data, at, length, kind, state, names[name:], named, sized)
            if status != _DONE:
                return status, n
            position, awaited = at + _padded(length), awaited or kind != _PAX_ALL
            continue
        if kind == _SPARSE_FILE or kind == _CONTINUED:
            return _SPARSE, n
        if sized >= 0:
            length = sized
        elif state[_SIZE] >= 0:
            length = state[_SIZE]
        regular = kind == 0 or kind == _ZERO or kind == _SEVEN
        if regular:
            if named < 0:
                named = _own_name(data, position, state, names[name:])
            # Old tars mark a directory by a slash behind its name only.
            regular = kind != 0 or named == 0 or names[name + named - 1] != _SLASH
        if not regular and (kind == 0 or _LINK <= kind <= _FIFO):
            length = np.int64(0)  # links, devices and directories have no data, whatever their size says
        if length > len(data) - at:
            state[_VALUE] = length
            return _BEYOND, n
        if regular:
            name += named
            files[0, n], files[1, n], files[2, n], files[3, n] = name, at, length, position
            n += 1
        position = entry = at + _padded(length)
        named, sized, awaited = np.int64(-1), np.int64(-1), False


@njit(nogil=True, cache=True)
def _padded(length):
    return (length + BLOCK - 1) // BLOCK * BLOCK


@njit(nogil=True, cache=True)
def _header(data, position):
    """(_FULL: there is a member; _DONE at the end; or a fault; the type; the size its header states)."""
    if position > len(data) - BLOCK:
        return _TRUNCATED, np.uint8(0), np.int64(0)
    if data[position] == 0 and _is_zero(data[position : position + BLOCK]):
        rest = data[position + BLOCK :]
        return _DONE if _is_zero(rest) else _AFTER, np.uint8(0), np.int64(0)
    if not _sum_is_right(data, position):
        return _CHECKSUM, np.uint8(0), np.int64(0)
    length = _number(data, position + 124, 12)
    if length < 0:
        return -length, np.uint8(0), np.int64(0)
    return _FULL, data[position + 156], length


@njit(nogil=True, cache=True)
def _is_zero(block):
    for byte in block:
        if byte:
            return False
    return True


@njit(nogil=True, cache=True)
def _sum_is_right(data, position):
    """Whether the header's bytes add up to what it says, its sum counted as spaces; signed bytes as some old tars have it."""
    stated = _number(data, position + 148, 8)
    total = high = np.int64(0)
    for byte in data[position : position + BLOCK]:
        total += byte
        high += byte >> 7
    for byte in data[position + 148 : position + 156]:
        total += 32 - np.int64(byte)
        high -= byte >> 7
    return stated == total or stated == total - 256 * high


@njit(nogil=True, cache=True)
def _number(data, at, width):
    """An octal or base-256 field; minus the fault where it is none, negative, or above 2**62."""
    if data[at] >= 0x80:
        if data[at] == 0xFF:
            return np.int64(-_NEGATIVE)
        value = np.int64(data[at] & 0x7F)
        for i in range(at + 1, at + width):
            if value >= 2**54:
                return np.int64(-_HUGE)
            value = value * 256 + data[i]
        return value
    value, i, stop = np.int64(0), at, at + width
    while i < stop and data[i] == _SPACE:
        i += 1
    if i < stop and data[i] == _MINUS:
        return np.int64(-_NEGATIVE)
    while i < stop and _ZERO <= data[i] <= _SEVEN:
        value = value * 8 + (data[i] - _ZERO)
        i += 1
    while i < stop and data[i] == _SPACE:
        i += 1
    return value if i == stop or data[i] == 0 else np.int64(-_NUMBER)


@njit(nogil=True, cache=True)
def _extension(data, at, length, kind, state, name, named, sized):
    """A header that tells of the next member, or of all: (_DONE or a fault, named, sized). The first to tell wins."""
    if length > len(data) - at:
        state[_VALUE] = length
        return _BEYOND, named, sized
    if kind == _LONG_NAME and named < 0:
        stop = at
        while stop < at + length and data[stop] != 0:
            stop += 1
        if stop - at > MAX_NAME:
            return _NAME, named, sized
        _copy(data, at, stop - at, name, 0)
        return _DONE, stop - at, sized
    if kind == _LONG_NAME or kind == _LONG_LINK:
        return _DONE, named, sized
    told = np.zeros(3, np.int64)  # path: place, bytes; size
    told[2] = -1
    status = _pax(data, at, at + length, told)
    if status != _DONE:
        return status, named, sized
    if kind == _PAX_ALL:
        if told[1]:
            state[_PATH_AT], state[_PATH_SIZE] = told[0], told[1]
        if told[2] >= 0:
            state[_SIZE] = told[2]
        return _DONE, named, sized
    if told[1] and named < 0:
        named = told[1]
        _copy(data, told[0], named, name, 0)
    return _DONE, named, told[2] if sized < 0 else sized


@njit(nogil=True, cache=True)
def _pax(data, at, end, told):
    """Read records "length key=value\\n" into told; _DONE or a fault."""
    while at < end and data[at] != 0:
        key, equals, stop = _pax_record(data, at, end)
        if stop < 0:
            return _PAX
        begin, last = equals + 1, stop - 1
        if equals - key == 4 and _matches(data, key, _PAX_PATH):
            while last > begin and data[last - 1] == _SLASH:
                last -= 1
            if last - begin > MAX_NAME:
                return _NAME
            told[0], told[1] = begin, last - begin
        elif equals - key == 4 and _matches(data, key, _PAX_SIZE):
            told[2] = _decimal(data, begin, last)
            if told[2] < 0:
                return -told[2]
        elif equals - key > 10 and _matches(data, key, _PAX_SPARSE):
            return _SPARSE
        at = stop
    return _DONE


@njit(nogil=True, cache=True)
def _pax_record(data, at, end):
    """Where the record's key begins, its equals sign is, and the next record begins; that is -1 where it is none."""
    length, key = np.int64(0), at
    while key < end and _ZERO <= data[key] <= _NINE and length < 2**54:
        length = length * 10 + (data[key] - _ZERO)
        key += 1
    stop = at + length
    if key == at or key == end or data[key] != _SPACE or not key + 1 < stop <= end or data[stop - 1] != _NEWLINE:
        return key, key, np.int64(-1)
    key = equals = key + 1
    while equals < stop and data[equals] != _EQUALS:
        equals += 1
    return key, equals, stop if equals < stop else np.int64(-1)


@njit(nogil=True, cache=True)
def _decimal(data, begin, end):
    """A whole number in decimal digits; minus the fault where it is none, negative, or above 2**62."""
    if begin < end and data[begin] == _MINUS:
        return np.int64(-_NEGATIVE)
    value = np.int64(0)
    for i in range(begin, end):
        if not _ZERO <= data[i] <= _NINE:
            return np.int64(-_NUMBER)
        if value >= 2**58:
            return np.int64(-_HUGE)
        value = value * 10 + (data[i] - _ZERO)
    return value if end > begin else np.int64(-_NUMBER)


@njit(nogil=True, cache=True)
def _matches(data, at, pattern):
    for i in range(len(pattern)):
        if data[at + i] != pattern[i]:
            return False
    return True


@njit(nogil=True, cache=True)
def _own_name(data, position, state, name):
    """Copy the name that the header, or a global one, gives; its bytes."""
    n = state[_PATH_SIZE]
    if n:
        _copy(data, state[_PATH_AT], n, name, 0)
        return n
    if _matches(data, position + 257, _USTAR):  # in other formats something else stands where the prefix would
        for i in range(position + 345, position + 500):
            if data[i] == 0:
                break
            name[n] = data[i]
            n += 1
        if n:
            name[n] = _SLASH
            n += 1
    for i in range(position, position + 100):
        if data[i] == 0:
            break
        name[n] = data[i]
        n += 1
    return n


@njit(nogil=True, cache=True)
def _copy(source, start, size, target, at):
    for i in range(size):  # a slice assignment takes numba ten times as long to compile
        target[at + i] = source[start + i]
