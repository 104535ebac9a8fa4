"""Documents for the example: the Python standard library's own sources, or what ``--data`` names, as token ids.

A byte-level BPE is trained on the spot, so nothing is downloaded. The result is a HF ``Dataset`` on disk with one column,
``input_ids``; it is made once by one process and then memory-mapped by all.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
from datasets import Dataset, load_dataset, load_from_disk
from tokenizers import ByteLevelBPETokenizer

BPE_SAMPLE_BYTES = 4_000_000


def standard_library() -> Iterator[str]:
    """Text of every module of the running Python's standard library: some 1,800 files, the longest 757 KB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="replace")


def texts(data: Path | None) -> Iterator[str]:
    """Documents of a ``.txt`` (one), ``.jsonl`` or ``.parquet`` (a column ``text``), or a folder of text files."""
    if data is None:
        yield from standard_library()
    elif data.is_dir():
        for path in sorted(path for path in data.rglob("*") if path.is_file()):
            yield path.read_text(encoding="utf-8", errors="replace")
    elif data.suffix == ".txt":
        yield data.read_text(encoding="utf-8", errors="replace")
    elif data.suffix in (".jsonl", ".parquet"):
        kind = "json" if data.suffix == ".jsonl" else "parquet"
        rows = load_dataset(kind, data_files=str(data), split="train")
        if "text" not in rows.column_names:
            raise ValueError(f"{data} needs a column 'text'; it has {', '.join(rows.column_names)}")
        yield from rows["text"]
    else:
        raise ValueError(f"--data takes .jsonl, .parquet, .txt, a folder or a saved HF dataset; got {data}")


def tokenised(data: Path | None, vocab_size: int, cache: Path) -> Dataset:
    """The documents as token ids, from ``cache`` if they were made before."""
    if data is not None and not data.exists():
        raise ValueError(f"--data must exist; there is no {data}")
    if data is not None and (data / "dataset_info.json").exists():
        return _within(load_from_disk(str(data)), vocab_size)
    name = hashlib.sha256(f"{_stamp(data)} {vocab_size}".encode()).hexdigest()
    made = cache / f"documents-{name[:12]}"
    if not made.exists():
        documents = [text for text in texts(data) if text]
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(_sample(documents), vocab_size=vocab_size, show_progress=False)
        ids = [encoding.ids for encoding in bpe.encode_batch(documents)]
        half = cache / f"{made.name}.part"
        Dataset.from_dict({"input_ids": ids}).save_to_disk(str(half))
        half.rename(made)
    return load_from_disk(str(made))


def _sample(documents: list[str]) -> Iterator[str]:
    """Every k-th document, about ``BPE_SAMPLE_BYTES`` in all: enough for a small vocabulary."""
    step = max(1, sum(map(len, documents)) // BPE_SAMPLE_BYTES)
    yield from documents[::step]


def _stamp(data: Path | None) -> str:
    """What the documents are made from, so that changed files are tokenised anew."""
    if data is None:
        return f"standard library of Python {sys.version}"
    files = [data] if data.is_file() else sorted(path for path in data.rglob("*") if path.is_file())
    return f"{data.resolve()} " + " ".join(f"{path.stat().st_mtime_ns}:{path.stat().st_size}" for path in files)


def _within(dataset: Dataset, vocab_size: int) -> Dataset:
    """The dataset, whose ids the model must know."""
    highest = max(pc.max(chunk.values).as_py() or 0 for chunk in dataset.data.column("input_ids").chunks)
    if highest >= vocab_size:
        raise ValueError(f"the model of this example knows token ids below {vocab_size}; the dataset has {highest}")
    return dataset
