"""Flat files of token ids: what they hold equals what was written, and no broken header is believed."""

from __future__ import annotations

import gc
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from equipoise import BalancedLoader, recipe
from equipoise.loaders.token_files import TokenFile
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import document_lengths

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def corpus(lengths: list[int], dtype: str = "uint16") -> tuple[np.ndarray, np.ndarray]:
    """Tokens and offsets."""
    offsets = np.r_[0, np.cumsum(lengths)].astype(np.int64)
    return (np.arange(offsets[-1]) * 7 % 101).astype(dtype), offsets


def write_megatron(
    prefix: Path, sequences: list[np.ndarray], edges: list[int], dtype: str = "int32", modes: bytes = b""
) -> None:
    """The pair as Megatron-LM's own writer lays it out, field by field."""
    (prefix.parent / f"{prefix.name}.bin").write_bytes(b"".join(s.astype(dtype).tobytes() for s in sequences))
    sizes = [len(s) for s in sequences]
    pointers = (np.r_[0, np.cumsum(sizes)][:-1] * np.dtype(dtype).itemsize).tolist()
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(edges))
    index += np.array(sizes, np.int32).tobytes() + np.array(pointers, np.int64).tobytes()
    index += np.array(edges, np.int64).tobytes() + modes
    (prefix.parent / f"{prefix.name}.idx").write_bytes(index)


def made(folder: Path, kind: str, lengths: list[int], dtype: str = "uint16") -> TokenFile:
    """The same documents, stored in one of the ways there are."""
    tokens, offsets = corpus(lengths, dtype)
    if kind == "megatron":
        write_megatron(folder / "m", np.split(tokens, offsets[1:-1]), list(range(len(lengths) + 1)), dtype)
        return TokenFile.megatron(folder / "m")
    np.save(folder / "offsets.npy", offsets)
    given_as = offsets if kind.endswith("array") else folder / "offsets.npy"
    if kind.startswith("npy"):
        np.save(folder / "tokens.npy", tokens)
        return TokenFile.npy(folder / "tokens.npy", given_as)
    tokens.tofile(folder / "tokens.bin")
    return TokenFile.raw(folder / "tokens.bin", dtype, given_as)


KINDS = ["npy", "npy array", "raw", "raw array", "megatron"]


@pytest.mark.parametrize("kind", KINDS)
@given(
    lengths=document_lengths(), dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]), block=st.integers(1, 9)
)
@settings(max_examples=40, deadline=None)
def test_documents_are_what_was_written(
    tmp_path_factory, kind: str, lengths: list[int], dtype: str, block: int
) -> None:
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("equipoise.loaders.token_files._BLOCK", block)
        patch.setattr("equipoise.loaders.megatron_index._BLOCK", block)
        source = pickle.loads(pickle.dumps(made(folder, kind, lengths, dtype)))
        index = source.lengths()
    tokens, offsets = corpus(lengths, dtype)
    assert (len(source), source.column_names) == (len(lengths), ["input_ids"])
    assert index.tokens.tolist() == lengths and index.tokens.dtype == np.int32
    asked = [*reversed(range(len(lengths))), 0]
    for document, ids in zip(asked, source.rows(asked)["input_ids"], strict=True):
        assert ids.dtype == dtype and ids.tolist() == tokens[offsets[document] : offsets[document + 1]].tolist()
    assert source[len(lengths) - 1]["input_ids"].tolist() == tokens[offsets[-2] :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_only_views_and_the_object_travels_small(tmp_path: Path, kind: str) -> None:
    source = made(tmp_path, kind, [1000] * 50)
    (first,), (again,) = source.rows([3])["input_ids"], source.rows([3])["input_ids"]
    assert np.shares_memory(first, again) and not first.flags.writeable
    assert len(pickle.dumps(source)) < (2000 if kind.endswith("array") else 900)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_trains_on_it(tmp_path: Path, kind: str) -> None:
    lengths = [5, 3, 9, 1, 4, 4]
    source = made(tmp_path, kind, lengths)
    tokens, offsets = corpus(lengths)
    loader = BalancedLoader(
        source,
        recipe("static", attend="none"),
        max_tokens_per_rank=10,
        documents_per_step=6,
        dp=1,
        lengths=source.lengths(),
    )
    for batch in loader:
        for at, document in enumerate(batch.documents.tolist()):
            begin, end = batch.cu_seqlens[at : at + 2].tolist()
            assert batch.input_ids[begin:end].tolist() == tokens[offsets[document] : offsets[document + 1]].tolist()


def test_sequences_of_a_document_are_joined(tmp_path: Path) -> None:
    sequences = [np.arange(n) + 10 * n for n in (2, 3, 1, 4)]
    write_megatron(tmp_path / "m", sequences, [0, 2, 2, 4])
    assert [r.tolist() for r in TokenFile.megatron(tmp_path / "m").rows([0, 3])["input_ids"]] == [
        [20, 21],
        [40, 41, 42, 43],
    ]
    joined = TokenFile.megatron(tmp_path / "m", documents=True)
    assert joined.lengths().tokens.tolist() == [5, 0, 5]
    assert [row.tolist() for row in joined.rows([2, 0, 1])["input_ids"]] == [
        [10, 40, 41, 42, 43],
        [20, 21, 30, 31, 32],
        [],
    ]


def test_sequences_may_lie_anywhere_but_a_document_only_in_one_piece(tmp_path: Path) -> None:
    """An index that names sequences in another order, as tools that select or deduplicate write it."""
    write_megatron(tmp_path / "m", [np.arange(3), np.arange(4)], [0, 1, 2])
    index = bytearray((tmp_path / "m.idx").read_bytes())
    index[34:42], index[42:58] = np.array([4, 3], np.int32).tobytes(), np.array([12, 0], np.int64).tobytes()
    (tmp_path / "m.idx").write_bytes(index)
    for documents in (False, True):
        source = TokenFile.megatron(tmp_path / "m", documents=documents)
        assert [row.tolist() for row in source.rows([0, 1])["input_ids"]] == [[0, 1, 2, 3], [0, 1, 2]]
    index[66:74] = struct.pack("<q", 2)
    (tmp_path / "m.idx").write_bytes(index)
    with pytest.raises(ValueError, match="sequence 1 of .*m.idx does not follow the one before it"):
        TokenFile.megatron(tmp_path / "m", documents=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:20], "header of 34 bytes; .*m.idx begins with .* and holds 20"),
        (lambda b: b"PK" + b[2:], "begins with b'PKIDIDX"),
        (lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "has version 2, code 4"),
        (lambda b: b[:17] + b"\x09" + b[18:], "has version 1, code 9"),
        (lambda b: b[:17] + b"\x06" + b[18:], "must be integers; .*m.idx holds float64"),
        (lambda b: b[:18] + struct.pack("<Q", 1 << 60) + b[26:], "claims 1152921504606846976 sequences .*truncated"),
        (lambda b: b[:26] + struct.pack("<Q", 1 << 62) + b[34:], "4611686018427387904 document edges.*truncated"),
        (lambda b: b[:-1], "holds 81: it is truncated"),
        (lambda b: b + b"\x00", "holds 83: it is broken"),
        (lambda b: b + b"\x00\x01", "mode per sequence"),
        (lambda b: b[:34] + struct.pack("<i", -3) + b[38:], "document 0 is 0 … -3 by .*m.idx"),
        (lambda b: b[:38] + struct.pack("<i", 9) + b[42:], "the 7 tokens of .*m.bin; document 1 is 3 … 12"),
        (lambda b: b[:42] + struct.pack("<q", -4) + b[50:], "document 0 is -1 … 2"),
        (lambda b: b[:50] + struct.pack("<q", 1 << 62) + b[58:], "document 1 is 1152921504606846976"),
        (lambda b: b[:50] + struct.pack("<q", 13) + b[58:], "multiples of the 4 bytes .*sequence 1 is 13"),
    ],
)
def test_no_broken_index_is_believed(tmp_path: Path, change, message: str) -> None:
    write_megatron(tmp_path / "m", [np.arange(3), np.arange(4)], [0, 1, 2])
    index = (tmp_path / "m.idx").read_bytes()
    (tmp_path / "m.idx").write_bytes(change(index))
    with pytest.raises(ValueError, match=message):
        TokenFile.megatron(tmp_path / "m")


@pytest.mark.parametrize("edges", [[0, 2, 1, 2], [1, 2], [0, 1], []])
def test_document_edges_must_rise_over_all_sequences(tmp_path: Path, edges: list[int]) -> None:
    write_megatron(tmp_path / "m", [np.arange(3), np.arange(4)], edges)
    with pytest.raises(ValueError, match="must rise from 0 to its 2 sequences"):
        TokenFile.megatron(tmp_path / "m", documents=True)


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", [np.arange(3)], [0, 1])
    (tmp_path / "m.bin").unlink()
    with pytest.raises(ValueError, match="no file .*m.bin"):
        TokenFile.megatron(tmp_path / "m")


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.array([0, 4, 2, 7]), "document 1 is 4 … 2 by the array of offsets"),
        (np.array([0, 7, 7, 6]), "from 0 to 6, and .*tokens.* holds 7"),
        (np.array([1, 7]), "goes from 1 to 7"),
        (np.array([0, 9, 7]), "document 0 is 0 … 9"),
        (np.array([], np.int64), "is empty"),
        (np.array([0.0, 7.0]), "whole numbers in one dimension; got float64"),
        (np.array([[0, 7]]), r"shape \(1, 2\)"),
    ],
)
@pytest.mark.parametrize("kind", ["npy", "raw"])
def test_offsets_must_cut_the_file(tmp_path: Path, kind: str, offsets: np.ndarray, message: str) -> None:
    np.arange(7, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", np.arange(7))
    with pytest.raises(ValueError, match=message):
        if kind == "npy":
            TokenFile.npy(tmp_path / "tokens.npy", offsets)
        else:
            TokenFile.raw(tmp_path / "tokens.bin", np.uint16, offsets)


def test_another_dtype_than_the_files_is_noticed(tmp_path: Path) -> None:
    np.arange(7, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    with pytest.raises(ValueError, match="multiple of 4 bytes; .* holds 14"):
        TokenFile.raw(tmp_path / "tokens.bin", np.uint32, np.array([0, 7]))
    with pytest.raises(ValueError, match="holds 14 of type uint8"):
        TokenFile.raw(tmp_path / "tokens.bin", np.uint8, np.array([0, 7]))
    with pytest.raises(ValueError, match="must be integers; .* float16"):
        TokenFile.raw(tmp_path / "tokens.bin", np.float16, np.array([0, 7]))


def npy(path: Path, array: np.ndarray, size: int | None = None) -> Path:
    np.save(path, array, allow_pickle=True)
    if size is not None:
        os.truncate(path, size)
    return path


@pytest.mark.parametrize(
    ("array", "size", "message"),
    [
        (
            np.arange(7),
            150,
            "must hold 7 values of type int64 behind its first 128 bytes, 184 bytes in all; it holds 150",
        ),
        (np.arange(7), 190, "holds 190 bytes, its header tells of 184"),
        (np.arange(7), 40, r"is no .npy file of numbers"),
        (np.arange(7), 0, r"is no .npy file of numbers"),
        (np.arange(7.0), None, "must be integers; .* float64"),
        (np.array([[1, 2]]), None, r"in one dimension; .* shape \(1, 2\)"),
        (np.array(["a", {}], dtype=object), None, "must be integers; .* object"),
    ],
)
def test_no_broken_npy_is_believed(tmp_path: Path, array: np.ndarray, size: int | None, message: str) -> None:
    good = npy(tmp_path / "good.npy", np.array([0, 7]))
    broken = npy(tmp_path / "broken.npy", array, size)
    with pytest.raises(ValueError, match=message):
        TokenFile.npy(broken, np.array([0, 7]))
    with pytest.raises(ValueError, match=message):
        TokenFile.npy(good, broken)


def test_a_header_that_claims_much_costs_no_memory(tmp_path: Path) -> None:
    npy(tmp_path / "tokens.npy", np.arange(7))
    raw = (tmp_path / "tokens.npy").read_bytes()
    (tmp_path / "tokens.npy").write_bytes(raw.replace(b"(7,), }" + b" " * 12, b"(7000000000000,), }"))
    with pytest.raises(ValueError, match="7000000000000 values"):
        TokenFile.npy(tmp_path / "tokens.npy", np.array([0, 7]))


def test_nothing_at_all_is_a_source_of_no_documents(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(b"")
    assert len(TokenFile.raw(tmp_path / "tokens.bin", np.uint16, np.array([0]))) == 0
    empty = TokenFile.raw(tmp_path / "tokens.bin", np.uint16, np.array([0, 0, 0]))
    assert empty.lengths().tokens.tolist() == [0, 0] and empty.rows([1])["input_ids"][0].tolist() == []
    write_megatron(tmp_path / "m", [], [0])
    assert len(TokenFile.megatron(tmp_path / "m")) == len(TokenFile.megatron(tmp_path / "m", documents=True)) == 0


@pytest.mark.parametrize("document", [-1, 2])
def test_no_document_that_is_not_there(tmp_path: Path, document: int) -> None:
    with pytest.raises(IndexError, match=f"has documents 0 … 1, not {document}"):
        made(tmp_path, "npy", [2, 3]).rows([0, document])


TRUNCATE = """
import os, sys
import numpy as np
from equipoise.loaders.token_files import TokenFile
source = TokenFile.{kind}
assert source.rows([1])["input_ids"][0].sum() > 0
os.truncate("{victim}", 4096)
for read in (lambda: source.rows([1])["input_ids"][0].sum(), lambda: source.lengths().tokens.sum()):
    try:
        read()
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("npy('tokens.npy', np.array([0, 10, 100_000]))", "tokens.npy"),
        ("npy('tokens.npy', 'offsets.npy')", "offsets.npy"),
        ("megatron('m')", "m.bin"),
        ("megatron('m')", "m.idx"),
        ("megatron('m', documents=True)", "m.idx"),
    ],
)
def test_a_file_truncated_while_it_is_mapped_is_an_error_and_no_crash(tmp_path: Path, kind: str, victim: str) -> None:
    np.save(tmp_path / "tokens.npy", np.ones(100_000, np.int64))
    np.save(tmp_path / "offsets.npy", np.r_[0, 10, np.full(2000, 100_000)])
    write_megatron(tmp_path / "m", [np.ones(10), np.ones(50_000), *[np.ones(1)] * 1000], list(range(1003)))
    code = TRUNCATE.format(kind=kind, victim=victim)
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    expected = 1 if victim in ("tokens.npy", "m.bin") else 2  # lengths read the index only
    assert run.stdout.count(f"{victim} was truncated while in use: it had") == expected, run.stdout


def test_a_worker_that_finds_the_file_shorter_says_so(tmp_path: Path) -> None:
    sent = pickle.dumps(made(tmp_path, "npy", [500, 500]))
    os.truncate(tmp_path / "tokens.npy", 300)
    with pytest.raises(ValueError, match="truncated while in use: it had 2128 bytes, now 300"):
        pickle.loads(sent).rows([0])


def test_no_handle_is_kept(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        made(tmp_path, "megatron", [3, 4]).rows([1])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
