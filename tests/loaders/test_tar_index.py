"""Indexing tar shards: every archive that tarfile writes and webdataset reads, and none that is damaged."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from equipoise.loaders import tar_index
from equipoise.loaders.index_file import read_index, write_index
from equipoise.loaders.tar import TarShards
from equipoise.loaders.tar_index import index_shards
from equipoise.loaders.tar_samples import group
from equipoise.loaders.tar_scan import walk
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from webdataset.tariterators import base_plus_ext, tarfile_samples

from tests.loaders.archives import END, FORMATS, Archive, header, npy, padded, record, tar_bytes, wait_for, write_shard

# Archives


FOLDERS = st.sampled_from(["", "./", "a/", "../", "/abs/", "a.b/c/", "é字/", "deep/" * 30, "__x__y/", "x__/"])
STEMS = st.text("ab-_ é字", max_size=8) | st.just("long" * 40)


@st.composite
def samples(draw: st.DrawFn) -> list[list[tuple[str, bytes]]]:
    """Samples of members in any order: tokens, labels, a class, perhaps others that nobody asks for."""
    out = []
    for at in range(draw(st.integers(0, 6))):
        name = f"{draw(FOLDERS)}{at}{draw(STEMS)}"
        ids = np.arange(draw(st.integers(0, 40)), dtype=draw(st.sampled_from(["u1", "u2", "i4", "i8"])))
        kind = draw(st.sampled_from(["i8", "f4", "i2", "b1"]))
        members = [
            (draw(st.sampled_from([".npy", ".NPY"])), npy(ids)),
            (".labels.npy", npy(np.ones(len(ids), kind))),
            (".cls", str(at).encode()),
            *([(".jpg", b"\xff" * draw(st.integers(0, 700)))] if draw(st.booleans()) else []),
        ]
        out.append([(name + ext, data) for ext, data in draw(st.permutations(members))])
    return out


@st.composite
def archives(draw: st.DrawFn) -> Archive:
    """An archive of samples, with folders, links and files without an extension in between."""
    out = io.BytesIO()
    members = [member for sample in draw(samples()) for member in sample]
    options = {"format": FORMATS[draw(st.sampled_from(sorted(FORMATS)))]}
    if (
        members and options["format"] == tarfile.PAX_FORMAT
    ):  # without members tarfile takes a header of all for no archive
        options["pax_headers"] = draw(st.sampled_from([None, {"comment": "of all"}]))
    with tarfile.open(fileobj=out, mode="w", **options) as tar:
        for name, data in members:
            for kind in draw(
                st.lists(
                    st.sampled_from([tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.REGTYPE]), max_size=2
                )
            ):
                info = tarfile.TarInfo(
                    "README" if kind == tarfile.REGTYPE else "other/name.npy" + "x" * draw(st.sampled_from([0, 120]))
                )
                info.type = kind
                if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                    info.linkname = "../../etc/passwd" * draw(st.integers(1, 9))
                _add(tar, info, b"")
            info = tarfile.TarInfo(name)
            # tarfile takes an old file for a folder where its long name happens to be cut behind a slash.
            info.type = (
                draw(st.sampled_from([tarfile.REGTYPE, tarfile.AREGTYPE]))
                if len(name.encode()) < 100
                else tarfile.REGTYPE
            )
            _add(tar, info, data)
    return Archive(out.getvalue())


def _add(tar: tarfile.TarFile, info: tarfile.TarInfo, data: bytes) -> None:
    info.size = len(data)
    try:
        tar.addfile(info, io.BytesIO(data))
    except ValueError:  # a name that ustar cannot hold
        assume(False)


def oracle(path: Path) -> list[dict]:
    """What webdataset makes of a shard, and where tarfile says that the data of its tokens begins."""
    with tarfile.open(path) as tar:
        places = {(base_plus_ext(info.name)): info.offset_data for info in tar if info.isreg()}
    out = []
    for sample in tarfile_samples([{"url": str(path)}]):
        key = sample["__key__"]
        raw = {ext: sample[ext] for ext in ("npy", "labels.npy", "cls")}
        place = places.get((key, "npy"), places.get((key, "NPY")))
        out.append({"key": key, "place": place, "raw": raw})
    return out


@settings(max_examples=200, deadline=None)
@given(archives(), st.data())
def test_an_index_says_what_webdataset_and_tarfile_say(archive: bytes, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder, "shard.tar")
        shard.write_bytes(archive)
        truth = oracle(shard)
        index = index_shards(shard, Path(folder, "index"), columns=("labels.npy", "cls"))
        batch, _ = read_index(index)
        assert batch["key"].to_pylist() == [sample["key"] for sample in truth]
        assert sorted(os.listdir(folder)) == ["index", "shard.tar"]
        source = TarShards(index)
        assert source.column_names == ["input_ids", "labels", "cls"]
        order = data.draw(st.lists(st.integers(0, len(truth) - 1), max_size=9)) if truth else []
        rows = source.rows(order)
        assert source.keys(order) == [truth[document]["key"] for document in order]
        for at, document in enumerate(order):
            raw = truth[document]["raw"]
            for name, ext in (("input_ids", "npy"), ("labels", "labels.npy")):
                expected = np.load(io.BytesIO(raw[ext]))
                value = rows[name][at]
                assert value.dtype == expected.dtype and np.array_equal(value, expected) and value.flags.aligned
            assert rows["cls"][at] == int(raw["cls"])
            place, size = batch["offset"][document].as_py(), batch["size"][document].as_py()
            header_bytes = len(raw["npy"]) - size
            assert place == truth[document]["place"] + header_bytes
        lengths = source.lengths()
        assert lengths.tokens.tolist() == [len(np.load(io.BytesIO(sample["raw"]["npy"]))) for sample in truth]


def names_of(archive: bytes) -> list[tuple[str, int, int]]:
    files = walk(np.frombuffer(archive, np.uint8))
    return [(files.name(at), int(files.offset[at]), int(files.size[at])) for at in range(len(files.size))]


def tarfile_names(archive: bytes) -> list[tuple[str, int, int]]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return [(info.name, info.offset_data, info.size) for info in tar if info.isreg()]


DATA = padded(b"x" * 700)
FORGED = {
    "size in base 256": header(b"a", b"\x80" + (700).to_bytes(11, "big")) + DATA,
    "size with spaces": header(b"a", b"       1274 ") + DATA,
    "size with nul only": header(b"a", bytes(12)),
    "old tar without magic": header(b"a", 700, b"\0", magic=b"") + DATA,
    "old tar, a folder by its slash": header(b"a/", 0, b"\0", magic=b"") + header(b"b", 700) + DATA,
    "prefix": header(b"name", 700, prefix=b"folder/of") + DATA,
    "name of 100 bytes": header(b"n" * 100, 700) + DATA,
    "old file, its long name cut behind a slash": (
        header(b"././@LongLink", 106, b"L", magic=b"ustar  \0") + padded(b"four/" * 20 + b"a.npy\0")
        + header(b"four/" * 20, 700, b"\0", magic=b"ustar  \0") + DATA
    ),
    "contiguous file": header(b"a", 700, b"7") + DATA,
    "folder with a size": header(b"a", 512, b"5") + header(b"b", 700) + DATA,
    "link with a size": header(b"a", 512, b"1") + header(b"b", 700) + DATA,
    "unknown type with data": header(b"a", 700, b"Q") + DATA + header(b"b", 3) + padded(b"abc"),
    "volume label": header(b"label", 0, b"V") + header(b"b", 700) + DATA,
    "long name, then pax": (
        header(b"././@LongLink", 5, b"L", magic=b"ustar  \0") + padded(b"long\0")
        + header(b"p", len(record("mtime", "1")), b"x") + padded(record("mtime", "1")) + header(b"b", 700) + DATA
    ),
    "pax path and size": (
        header(b"p", len(record("path", "é/n.npy") + record("size", "700")), b"x")
        + padded(record("path", "é/n.npy") + record("size", "700")) + header(b"b", 0) + DATA
    ),
    "pax path with slashes behind": header(b"p", len(record("path", "n.npy//")), b"x") + padded(record("path", "n.npy//")) + header(b"b", 700) + DATA,
    "pax of Solaris": header(b"p", len(record("path", "n")), b"X") + padded(record("path", "n")) + header(b"b", 700) + DATA,
    "global pax path": (
        header(b"g", len(record("path", "all")), b"g") + padded(record("path", "all")) + header(b"b", 700) + DATA
        + header(b"p", len(record("path", "own")), b"x") + padded(record("path", "own")) + header(b"c", 700) + DATA
    ),
    "signed checksum": b"",
}  # fmt: skip


def _signed(block: bytes) -> bytes:
    """The header with its bytes summed as signed ones, as some old tars did."""
    total = sum(byte - 256 if byte > 127 else byte for byte in block[:148] + b" " * 8 + block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


FORGED["signed checksum"] = _signed(header("é".encode(), 700)) + DATA


def test_what_is_no_prefix_is_not_read_as_one() -> None:
    """GNU's own format keeps times where ustar has a prefix; tarfile takes them for one."""
    archive = header(b"a", 700, magic=b"ustar  \0", prefix=b"14711215460") + DATA + END
    assert names_of(archive) == [("a", 512, 700)]


@pytest.mark.parametrize("case", FORGED)
def test_headers_that_tarfile_does_not_write(case: str) -> None:
    archive = FORGED[case] + END
    if "cut behind a slash" in case:  # tarfile takes it for a folder, and its data for a header
        assert names_of(archive) == [("four/" * 20 + "a.npy", 1536, 700)]
        return
    assert names_of(archive) == tarfile_names(archive) != []


def test_chunks_of_headers_join_to_one_walk() -> None:
    archive = tar_bytes([(f"{'d/' * 60}{at}.npy", b"x" * at) for at in range(9)], tarfile.GNU_FORMAT)
    whole, parts = walk(np.frombuffer(archive, np.uint8)), walk(np.frombuffer(archive, np.uint8), chunk=2)
    for name in ("names", "name_ends", "offset", "size", "header"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))


def test_hidden_files_are_webdatasets() -> None:
    """A name that begins with a dot belongs to its folder's key, unless the folder's own name has a dot."""
    names = [
        ".npy",
        "./.npy",
        "a/.npy",
        "a.b/.npy",
        "c//.npy",
        "/.npy",
        "x/./.npy",
        "d/._e.npy",
        "e",
        "f/g.h/i",
        "____.npy",
    ]
    names += ["__m__/a.npy", "___.npy", "__m_/a.npy", "n/__m__/a.npy", "__m__"]
    for name in names:
        samples = group(walk(np.frombuffer(tar_bytes([(name, b"")]), np.uint8)), ("npy",))
        key, ext = base_plus_ext(name)
        meta = re.match(r"__[^/]*__($|/)", name)
        assert samples.keys.tobytes().decode() == (key if key and not meta else ""), name
        assert samples.ignored == (not key or bool(meta))
        assert (samples.file >= 0).sum() == (ext == "npy" and not meta)


# Damage


FAULTS = {
    "checksum": (header(b"a", 3)[:-1] + b"!" + padded(b"abc") + END, "checksum is wrong.*member 'a', header at byte 0"),
    "negative": (header(b"a", b"\xff" * 12) + END, "negative size.*'a'.*byte 0"),
    "minus": (header(b"a", b"-0000000001\0") + END, "negative size"),
    "2**70": (header(b"a", b"\x80\0\0\x40" + bytes(8)) + END, r"more than 2\*\*62 bytes"),
    "2**95": (header(b"a", b"\x80" + b"\x7f" * 11) + END, r"more than 2\*\*62 bytes"),
    "2**60": (header(b"a", b"\x80\0\0\0\x10" + bytes(7)) + END, "states 1152921504606846976 bytes of data, and the file has only 1024"),
    "no number": (header(b"a", b"12345678x\0\0\0") + END, "size is no number"),
    "beyond the file": (header(b"a", 4096) + padded(b"abc") + END, "states 4096 bytes of data, and the file has only 1536"),
    "long name beyond": (header(b"a", 4096, b"L") + END, "states 4096 bytes of data, and the file has only 1024"),
    "endless name": (header(b"a", 70000, b"L") + padded(b"n" * 70000) + header(b"b", 0) + END, "name is longer than 65536 bytes"),
    "endless pax name": (
        header(b"a", len(record("path", "n" * 70000)), b"x") + padded(record("path", "n" * 70000)) + header(b"b", 0) + END,
        "name is longer than 65536 bytes",
    ),
    "sparse": (header(b"a", 0, b"S") + END, "is sparse"),
    "sparse by pax": (header(b"a", 24, b"x") + padded(b"24 GNU.sparse.major=1.0\n") + header(b"b", 0) + END, "is sparse"),
    "pax without length": (header(b"a", 9, b"x") + padded(b"path=abc\n") + header(b"b", 0) + END, "record that is none"),
    "pax beyond itself": (header(b"a", 9, b"x") + padded(b"99 path=a\n") + header(b"b", 0) + END, "record that is none"),
    "pax of length 0": (header(b"a", 9, b"x") + padded(b"0 path=a\n") + header(b"b", 0) + END, "record that is none"),
    "pax size": (header(b"a", 11, b"x") + padded(b"11 size=1x\n") + header(b"b", 0) + END, "size is no number"),
    "pax size negative": (header(b"a", 11, b"x") + padded(b"11 size=-1\n") + header(b"b", 0) + END, "negative size"),
    "pax size beyond": (header(b"a", 13, b"x") + padded(b"13 size=9999\n") + header(b"b", 0) + END, "states 9999 bytes"),
    "orphan": (header(b"a", 2, b"L") + padded(b"n\0") + END, "without a member"),
    "no end": (header(b"a", 3) + padded(b"abc"), "without an end-of-archive mark"),
    "empty file": (b"", "without an end-of-archive mark"),
    "half an end": (header(b"a", 3) + padded(b"abc") + bytes(511), "without an end-of-archive mark"),
    "two archives": (header(b"a", 3) + padded(b"abc") + END + header(b"b", 3) + padded(b"abc") + END, "followed by other data"),
    "gzip": (b"\x1f\x8b\x08" + bytes(600), "is compressed .gzip.*Stream.tar"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(600), "is compressed .zstd.*Stream.tar"),
    "no tar": (b"text" * 300, "checksum is wrong"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_damage_is_refused_by_shard_member_and_byte(case: str, tmp_path: Path) -> None:
    archive, message = FAULTS[case]
    (tmp_path / "bad.tar").write_bytes(archive)
    with pytest.raises(ValueError, match=f"bad.tar: .*{message}"):
        index_shards(tmp_path / "bad.tar", tmp_path / "index")
    assert os.listdir(tmp_path) == ["bad.tar"]


GOOD = tar_bytes([("a.npy", npy(np.arange(300))), ("b.npy", npy(np.arange(5, dtype=np.uint16)))])
LAST = 512 + 2560 + 512 + 512  # where the end-of-archive mark begins


@settings(max_examples=200, deadline=None)
@given(st.integers(0, LAST + 511))
def test_an_archive_that_is_cut_anywhere_is_refused(stop: int) -> None:
    with pytest.raises(ValueError):
        walk(np.frombuffer(GOOD[:stop], np.uint8))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 511), st.integers(1, 255), st.sampled_from([0, 3072]))
def test_a_header_that_was_changed_anywhere_is_refused(at: int, by: int, begin: int) -> None:
    assume(not 148 <= at < 156)
    changed = bytearray(GOOD)
    changed[begin + at] ^= by
    with pytest.raises(ValueError):
        walk(np.frombuffer(changed, np.uint8))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=20)), max_size=5))
def test_no_damage_leads_out_of_the_file(writes: list[tuple[int, bytes]]) -> None:
    """Whatever is read, it lies within the archive."""
    changed = bytearray(GOOD)
    for at, data in writes:
        changed[at : at + len(data)] = data
    for begin in (0, 3072):  # with right sums, so that more than the sum is read
        if any(changed[begin : begin + 512]):
            changed[begin + 148 : begin + 156] = b" " * 8
            changed[begin + 148 : begin + 156] = b"%06o\0 " % sum(changed[begin : begin + 512])
    try:
        files = walk(np.frombuffer(changed, np.uint8))
    except ValueError:
        return
    assert ((files.offset >= 512) & (files.size >= 0) & (files.offset + files.size <= len(changed))).all()


def npy_header(text: str, version: tuple[int, int] = (1, 0)) -> bytes:
    """An npy header with this text."""
    size = len(text).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + bytes(version) + size + text.encode()


PLAIN = "{'descr': '<u2', 'fortran_order': False, 'shape': (2,), }"


@pytest.mark.parametrize(
    "head",
    [
        npy_header(PLAIN + " " * 6 + "\n"),
        npy_header(PLAIN + " " * 100 + "\n", (2, 0)),
        npy_header(PLAIN + " " * 4 + "\n", (3, 0)),
        npy_header('{"shape": (2,), "fortran_order": False, "descr": "<u2"}\n'),
        npy_header("{'descr': '<u2', 'fortran_order': False, 'shape': (2,)}"),
    ],
)
def test_npy_headers_of_other_writers(head: bytes, tmp_path: Path) -> None:
    """Whatever their size, arrays come aligned."""
    (tmp_path / "a.tar").write_bytes(tar_bytes([("a.npy", head + b"\1\0\2\0"), ("b.npy", npy(np.arange(3)))]))
    source = TarShards(index_shards(tmp_path / "a.tar", tmp_path / "index"))
    first, second = source.rows([0, 1])["input_ids"]
    assert first.tolist() == [1, 2] and first.dtype == np.uint16 and first.flags.aligned
    assert second.tolist() == [0, 1, 2]


UNREAD = {
    "objects": (npy(np.array([None, 1], object)), "numbers in one dimension"),
    "big endian": (npy(np.arange(3).astype(">i4")), "little endian.*>i4"),
    "two dimensions": (npy(np.zeros((2, 2), int)), r"one dimension.*\(2, 2\)"),
    "no dimension": (npy(np.array(3)), "one dimension"),
    "Fortran order": (npy_header(PLAIN.replace("False", "True")) + bytes(4), "in C order"),
    "floats": (npy(np.zeros(3)), "token ids must be integers; these are <f8"),
    "complex": (npy(np.zeros(3, complex)), "of type"),
    "structured": (npy(np.zeros(2, [("a", "i4")])), "of type"),
    "code": (npy_header("__import__('os').system('false')"), "of type"),
    "deep": (npy_header("(" * 9000), "of type"),
    "version 9": (npy_header(PLAIN, (9, 0)), "no npy file of version 1 to 3"),
    "no npy": (b"abc", "no npy file"),
    "header beyond": (npy_header(PLAIN)[:40], "states 57 bytes"),
    "header of 4 GB": (b"\x93NUMPY\2\0" + b"\xff" * 4 + b"{", "states 4294967295 bytes"),
    "too short": (npy(np.arange(300))[:-8], "300 values of 8 bytes are due, and the member has 2392 bytes"),
    "too long": (npy(np.arange(300)) + b"1", "300 values of 8 bytes are due, and the member has 2401 bytes"),
    "2**60 values": (npy_header(PLAIN.replace("(2,)", "(1152921504606846976,)")), "1152921504606846976 values of 2 bytes are due"),
    "2**64 values": (npy_header(PLAIN.replace("(2,)", "(18446744073709551616,)")), "of type"),
    "negative": (npy_header(PLAIN.replace("(2,)", "(-2,)")), "of type"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD)
def test_npy_members_that_hold_no_tokens(case: str, tmp_path: Path) -> None:
    data, message = UNREAD[case]
    (tmp_path / "bad.tar").write_bytes(tar_bytes([("good.npy", npy(np.arange(3))), ("bad.npy", data)]))
    with pytest.raises(ValueError, match=rf"bad.tar: .*{message}.*member 'bad.npy', header at byte 1024\)"):
        index_shards(tmp_path / "bad.tar", tmp_path / "index")


# Samples and columns


IDS = ("a.npy", npy(np.arange(3)))
COLUMNS = {
    "no tokens": ([IDS, ("b.npy", IDS[1])], ["cls"], r"extension 'cls'.*'a.npy'"),
    "no tokens at all": ([IDS, ("b.txt", b"1")], [], r"extension 'npy'.*'b.txt'.*byte 1024"),
    "twice": ([IDS, ("a.NPY", IDS[1])], [], "second member of this extension.*'a.NPY'"),
    "ragged": ([IDS, ("a.labels.npy", npy(np.arange(4)))], ["labels.npy"], "this one has 4 beside 3 tokens.*'a.labels.npy'"),
    "ragged json": ([IDS, ("a.json", b'{"mask": [1, 2]}')], ["json"], "'mask' has 2 beside 3 tokens.*'a.json'"),
    "no json": ([IDS, ("a.json", b'{"mask": ')], ["json"], "cannot be read as json"),
    "deep json": ([IDS, ("a.json", b"[" * 100_000)], ["json"], "nested too deep"),
    "nested json": ([IDS, ("a.json", b'{"x": {"y": 1}}')], ["json"], "'x' must be a list of numbers, a number or a string; got dict"),
    "words in json": ([IDS, ("a.json", b'{"x": ["y", 1, 2]}')], ["json"], "'x' must be a list of numbers.*a list with int, str"),
    "beyond 64 bits": ([IDS, ("a.json", b'{"x": [1, 2, 99999999999999999999]}')], ["json"], "beyond 64 bits"),
    "a column twice": ([IDS, ("a.json", b'{"input_ids": [1, 2, 3]}')], ["json"], "name of its own"),
    "other columns": (
        [IDS, ("a.json", b'{"x": 1}'), ("b.npy", IDS[1]), ("b.json", b'{"y": 1}')],
        ["json"],
        r"same columns; this one has y \(per document\), those before x \(per document\).*'b.json'",
    ),
    "no class": ([IDS, ("a.cls", b"dog")], ["cls"], "cannot be read as cls"),
    "no text": ([IDS, ("a.txt", b"\xff")], ["txt"], "cannot be read as txt"),
    "a name in latin-1": ([("é".encode("latin-1").decode(errors="surrogateescape") + ".npy", IDS[1])], [], "is not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", COLUMNS)
def test_samples_that_are_not_alike(case: str, tmp_path: Path) -> None:
    members, columns, message = COLUMNS[case]
    (tmp_path / "bad.tar").write_bytes(tar_bytes(members, tarfile.GNU_FORMAT))
    with pytest.raises(ValueError, match=f"bad.tar: .*{message}"):
        index_shards(tmp_path / "bad.tar", tmp_path / "index", columns=columns)


def test_raw_members(tmp_path: Path) -> None:
    members = [("a.bin", b"\1\0\2\0"), ("a.loss.bin", b"\7\0\7\0"), ("b.bin", b""), ("b.loss.bin", b"")]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    options = {"tokens": "bin", "columns": ["loss.bin"], "dtype": "uint16"}
    source = TarShards(index_shards(tmp_path / "a.tar", tmp_path / "index", **options))
    rows = source.rows([1, 0])
    assert [ids.tolist() for ids in rows["input_ids"]] == [[], [1, 2]] and rows["loss"][1].tolist() == [7, 7]
    (tmp_path / "odd.tar").write_bytes(tar_bytes([("a.bin", b"\1\0\2")]))
    with pytest.raises(ValueError, match="1 values of 2 bytes are due, and the member has 3 bytes"):
        index_shards(tmp_path / "odd.tar", tmp_path / "index", tokens="bin", dtype="uint16")


def test_json_members(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7], "source": "web", "mask": [0, 1, 1], "score": 0.5, "weight": [0.5, 1, 2]},
        {"input_ids": [], "source": "é", "mask": [], "score": None, "weight": []},
    ]
    members = [(f"{at}.json", json.dumps(row).encode()) for at, row in enumerate(rows)]
    (tmp_path / "a.tar").write_bytes(tar_bytes([members[0], ("0.txt", b""), members[1]]))
    (tmp_path / "b.tar").write_bytes(tar_bytes([]))  # no documents, no columns: no contradiction
    index = index_shards([tmp_path / "b.tar", tmp_path / "a.tar"], tmp_path / "index", tokens="json")
    source = TarShards(index)
    assert source.column_names == ["input_ids", "mask", "score", "source", "weight"]
    assert source.lengths().tokens.tolist() == [3, 0]
    read = [{name: np.asarray(value).tolist() for name, value in source[at].items()} for at in range(2)]
    assert read == rows and source[0]["input_ids"].dtype == np.int64
    (tmp_path / "c.tar").write_bytes(tar_bytes([("0.json", b"[1, 2]"), ("1.json", b"[3]")]))
    assert TarShards(index_shards(tmp_path / "c.tar", tmp_path / "c", tokens="json"))[-1]["input_ids"].tolist() == [3]
    with pytest.raises(ValueError, match="a.tar has input_ids, mask, score, source, weight, .*c.tar has input_ids;?"):
        index_shards([tmp_path / "a.tar", tmp_path / "c.tar"], tmp_path / "d", tokens="json")
    for bad, message in (
        (b'{"ids": [1]}', "an object with 'ids'"),
        (b"[1.5]", "a list with float"),
        (b"[-1]", "negative; got -1"),
        (b"3", "got int"),
    ):
        (tmp_path / "bad.tar").write_bytes(tar_bytes([("0.json", bad)]))
        with pytest.raises(ValueError, match=f"bad.tar: .*{message}.*'0.json'"):
            index_shards(tmp_path / "bad.tar", tmp_path / "d", tokens="json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "pyd"}, "'pyd' members are pickles"),
        ({"columns": ["x.pickle"]}, "'x.pickle' members are pickles"),
        ({"columns": ["pth"]}, "'pth' members are pickles"),
        ({"columns": ["jpg"]}, "ends in npy, bin, json, txt, cls; got 'jpg'"),
        ({"tokens": "txt"}, "tokens are read from npy, bin or json members; got tokens='txt'"),
        ({"tokens": ".npy"}, "without its leading dot; got '.npy'"),
        ({"columns": ["Labels.npy"]}, "lower-case ASCII"),
        ({"columns": ["labels.npy", "labels.json"]}, "name of its own; .* make input_ids, labels, labels"),
        ({"columns": ["input_ids.npy"]}, "name of its own"),
        ({"tokens": "bin"}, "give both or neither; got dtype=None and bin"),
        ({"dtype": "uint16"}, "give both or neither; got dtype='uint16' and no bin member"),
        ({"tokens": "bin", "dtype": "float32"}, "dtype must be one of .*; got 'float32'"),
        ({"tokens": "bin", "dtype": "words"}, "dtype must be one of .*; got 'words'"),
        ({"processes": 0}, "processes must be at least 1; got 0"),
    ],
)
def test_options(options: dict, message: str, tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [np.arange(3)])
    with pytest.raises(ValueError, match=message):
        index_shards(shard, tmp_path / "index", **options)
    assert os.listdir(tmp_path) == ["a.tar"]


def test_paths(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "a.tar", [np.arange(3)])
    for shards, output, message in (
        ([], "index", "nothing to index"),
        ([shard, tmp_path / "." / "a.tar"], "index", "a.tar stands there twice"),
        ([tmp_path / "none.tar"], "index", "none.tar: there is no such file"),
        ([tmp_path], "index", "there is no such file"),
        ([shard], "none/index", "a file in a folder that is there"),
        ([shard], ".", "a file in a folder that is there"),
    ):
        with pytest.raises(ValueError, match=message):
            index_shards(shards, tmp_path / output)
    assert os.listdir(tmp_path) == ["a.tar"]


def test_names_are_keys_and_never_paths(tmp_path: Path) -> None:
    home = tmp_path / "x" / "y"
    home.mkdir(parents=True)
    names = ["../../escaped.npy", str(tmp_path / "absolute.npy"), "a/../../b.npy"]
    (home / "a.tar").write_bytes(tar_bytes([(name, npy(np.arange(2))) for name in names]))
    before = set(tmp_path.rglob("*"))
    source = TarShards(index_shards(home / "a.tar", home / "index"))
    assert source.keys([0, 1, 2]) == ["../../escaped", str(tmp_path / "absolute"), "a/../../b"]
    assert [len(ids) for ids in source.rows([0, 1, 2])["input_ids"]] == [2] * 3
    assert set(tmp_path.rglob("*")) - before == {home / "index"}


# The file


def test_every_byte_of_an_index_is_guarded(tmp_path: Path) -> None:
    index = index_shards(write_shard(tmp_path / "a.tar", [np.arange(3), np.arange(2)]), tmp_path / "index")
    good = index.read_bytes()
    rng = np.random.default_rng(0)
    with open(index, "r+b", buffering=0) as file:
        for at in range(len(good)):
            os.pwrite(file.fileno(), bytes([good[at] ^ int(rng.integers(1, 256))]), at)
            with pytest.raises(ValueError, match="no sound index"):
                read_index(index)
            os.pwrite(file.fileno(), good[at : at + 1], at)
    assert read_index(index)[1]["version"] == 1
    for stop in range(0, len(good), 97):
        index.write_bytes(good[:stop])
        with pytest.raises(ValueError, match="no sound index"):
            TarShards(index)
    for other in (good + b"\0", b"\0" + good, b"", b"ARROW1"):
        index.write_bytes(other)
        with pytest.raises(ValueError, match="no sound index"):
            TarShards(index)


def test_an_index_of_another_version_or_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index_shards(write_shard(tmp_path / "a.tar", [np.arange(3)]), path)
    batch, facts = read_index(path)
    write_index(path, batch, {**{name: facts[name] for name in facts if name != "checksum"}, "version": 2})
    with pytest.raises(ValueError, match="has version 2, and this package reads 1"):
        TarShards(path)
    write_index(path, pa.record_batch({"x": [1]}), {})
    with pytest.raises(ValueError, match="no index of tar shards"):
        TarShards(path)
    with pytest.raises(ValueError, match="there is no index .*none"):
        TarShards(tmp_path / "none")


@pytest.mark.parametrize(
    ("column", "value"),
    [("offset", -8), ("offset", 2**62), ("size", 2**62), ("size", 9), ("tokens", 2**61), ("tokens", -1), ("shard", 3), ("shard", -1), ("dtype", 99), ("dtype", 12)],
)  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(column: str, value: int, tmp_path: Path) -> None:
    """As if somebody had made it with a right checksum."""
    path = index_shards(write_shard(tmp_path / "a.tar", [np.arange(3), np.arange(2)]), tmp_path / "index")
    batch, facts = read_index(path)
    forged = {name: batch[name] for name in batch.schema.names}
    forged[column] = pa.array([batch[column][0].as_py(), value], batch[column].type)
    write_index(
        path, pa.record_batch(forged), {name: facts[name] for name in ("members", "columns", "dtypes", "shards")}
    )
    with pytest.raises(ValueError, match="document 1 does not lie within its shard"):
        TarShards(path)


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_shard(tmp_path / "a.tar", [np.arange(3)])
    index = index_shards(shard, tmp_path / "index")
    before = index.read_bytes()
    write_shard(shard, [np.arange(4)])

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        index_shards(shard, index)
    assert index.read_bytes() == before
    assert len(os.listdir(tmp_path / "index.parts")) == 1  # the shard's own part, and nothing unfinished


# Runs that were stopped


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [write_shard(tmp_path / f"{at}.tar", [np.arange(n) for n in range(4 + at)]) for at in range(3)]


def test_what_was_finished_is_used_again(three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = index_shards(three, tmp_path / "whole").read_bytes()
    good = three[2].read_bytes()
    three[2].write_bytes(good[:1500])
    with pytest.raises(ValueError, match="2.tar: .*truncated"):
        index_shards(three, tmp_path / "index")
    assert not (tmp_path / "index").exists() and len(os.listdir(tmp_path / "index.parts")) == 2
    three[2].write_bytes(good)
    read: list[str] = []
    shard_rows = tar_index.shard_rows

    def counted(path: str, members):
        read.append(Path(path).name)
        return shard_rows(path, members)

    monkeypatch.setattr(tar_index, "shard_rows", counted)
    with pytest.raises(ValueError, match="0.tar: every sample must have"):  # other members: other parts
        index_shards(three, tmp_path / "index", columns=["cls"])
    os.utime(three[0], ns=(0, 0))  # changed since: read again
    read.clear()
    assert index_shards(three, tmp_path / "index").read_bytes() == whole
    assert read == ["0.tar", "2.tar"] and not (tmp_path / "index.parts").exists()
    read.clear()
    index_shards(three[:1], tmp_path / "index")
    assert read == ["0.tar"]
    monkeypatch.setattr(tar_index, "shard_rows", lambda *args: (os.utime(three[0], ns=(5, 5)), counted(*args))[1])
    with pytest.raises(ValueError, match="0.tar: the shard was changed while it was indexed"):
        index_shards(three, tmp_path / "index")


def test_a_damaged_part_is_made_again(three: list[Path], tmp_path: Path) -> None:
    good = three[2].read_bytes()
    three[2].write_bytes(good[:1500])
    with pytest.raises(ValueError, match="2.tar"):
        index_shards(three, tmp_path / "index")
    three[2].write_bytes(good)
    for part in (tmp_path / "index.parts").iterdir():
        part.write_bytes(part.read_bytes()[:-9] + b"x" * 9)
    assert len(TarShards(index_shards(three, tmp_path / "index"))) == 4 + 5 + 6


def test_processes_give_the_same_bytes(three: list[Path], tmp_path: Path) -> None:
    alone = index_shards(three, tmp_path / "alone", processes=1).read_bytes()
    assert index_shards(three, tmp_path / "many", processes=2).read_bytes() == alone


def test_a_bar_is_shown_on_a_terminal_only(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=terminal: shown)
        index_shards(three, tmp_path / "index", progress=True)
        out, err = capsys.readouterr()
        assert out == "" and ("indexing" in err and "30.7/30.7 kB" in err) == terminal
        index_shards(three, tmp_path / "index")
        assert capsys.readouterr() == ("", "")


def test_what_goes_wrong_in_a_process_is_told() -> None:
    refused = SimpleNamespace(path="a.tar", run=partial(int, "x"))
    with pytest.raises(ValueError, match="invalid literal for int"):
        list(tar_index._run_in_processes([refused], 1))  # type: ignore[list-item]
    died = SimpleNamespace(path="b.tar", run=partial(os._exit, 7))
    with pytest.raises(RuntimeError, match=r"b.tar: the process that indexed it died \(exit code 7\)"):
        list(tar_index._run_in_processes([died], 1))  # type: ignore[list-item]


def test_two_runs_at_once_are_refused(three: list[Path], tmp_path: Path) -> None:
    with tar_index._parts_folder(str(tmp_path / "index")), pytest.raises(ValueError, match="another process is making"):
        index_shards(three, tmp_path / "index")
    index_shards(three, tmp_path / "index")


SLOW = """
import sys, time
from equipoise.loaders import tar_index
shard_rows = tar_index.shard_rows
def slow(path, members):
    if path.endswith("2.tar"):
        time.sleep(60)
    return shard_rows(path, members)
tar_index.shard_rows = slow
tar_index.index_shards(sys.argv[2:], sys.argv[1], processes=1)
"""


def test_killed_in_the_middle(three: list[Path], tmp_path: Path) -> None:
    whole = index_shards(three, tmp_path / "whole").read_bytes()
    parts = tmp_path / "index.parts"
    process = subprocess.Popen([sys.executable, "-c", SLOW, tmp_path / "index", *three])
    wait_for(lambda: parts.exists() and len(list(parts.glob("*.part"))) == 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "index").exists()
    assert index_shards(three, tmp_path / "index").read_bytes() == whole and not parts.exists()
