"""Indexing tar shards beside ``tar tf``, and reading documents by offset beside a plain sequential read of the same files.

    python benchmarks/indexing.py [--gigabytes 1] [--repeats 9] [--folder /tmp]

The shards (four, of members of about 4 KB) are made in a temporary folder and removed. Rivals run one after the other in every
round, with the files in the page cache; medians, and the ratio of the two. ``equipoise index`` as a whole is shown beside the
function, for its start (imports) is a second that larger sets do not notice. Documents are read in the order of the files, as
many at once as make 2 MB; the rival reads blocks of 1 MB and throws them away.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from equipoise.loaders.tar import TarShards
from equipoise.loaders.tar_index import index_shards

MEMBER_BYTES = 3400  # with its two headers and the padding 4,096


def write_shards(folder: Path, count: int, num_bytes: int, document_bytes: int) -> list[Path]:
    """Shards of uint16 documents, together about num_bytes; one archive is made and written count times."""
    per_document = 512 + -(-(document_bytes + 128) // 512) * 512
    documents = max(1, num_bytes // count // per_document)
    ids = np.random.default_rng(0).integers(0, 60_000, document_bytes // 2).astype(np.uint16)
    member = io.BytesIO()
    np.save(member, ids)
    paths = [folder / f"{at:03d}.tar" for at in range(count)]
    for path in paths:
        with tarfile.open(path, "w") as tar:
            for at in range(documents):
                info = tarfile.TarInfo(f"{at:09d}.npy")
                info.size = len(member.getvalue())
                tar.addfile(info, io.BytesIO(member.getvalue()))
    return paths


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, over rounds in which every one runs once; one round before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def show(title: str, size: int, medians: dict[str, float]) -> None:
    """A line per rival: seconds, GB/s, and speed in terms of the first one's."""
    print(f"\n{title}")
    first = next(iter(medians.values()))
    for name, seconds in medians.items():
        print(
            f"  {name:44s}{seconds * 1e3:9.1f} ms {size / seconds / 1e9:7.2f} GB/s {first / seconds:7.2f} of the first"
        )


def indexing(folder: Path, gigabytes: float, repeats: int) -> None:
    """The header walk."""
    shards = write_shards(folder, 4, int(gigabytes * 1e9), MEMBER_BYTES)
    index = folder / "index"
    command = [
        sys.executable,
        "-c",
        "from equipoise.cli import app; app()",
        "index",
        *map(str, shards),
        "--output",
        str(index),
    ]

    def listed() -> None:
        for shard in shards:
            subprocess.run(["tar", "tf", shard], check=True, stdout=subprocess.DEVNULL)

    runs = {
        "tar tf": listed,
        "index_shards, one process": lambda: index_shards(shards, index, processes=1),
        "equipoise index, started anew": lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL),
    }
    size = sum(shard.stat().st_size for shard in shards)
    found = medians(runs, repeats)
    show(f"{len(TarShards(index)):,} members in {len(shards)} shards, {size / 1e9:.2f} GB", size, found)


def reading(folder: Path, gigabytes: float, repeats: int, document_bytes: int) -> None:
    """Documents in the order of the file."""
    (shard,) = write_shards(folder, 1, int(gigabytes * 5e8), document_bytes)
    source = TarShards(index_shards(shard, folder / "index"))
    documents, at_once = list(range(len(source))), max(1, (2 << 20) // document_bytes)

    def blocks() -> None:
        with open(shard, "rb") as file:
            while file.read(1 << 20):
                pass

    def rows() -> None:
        for begin in range(0, len(documents), at_once):
            source.rows(documents[begin : begin + at_once])

    size = shard.stat().st_size
    title = f"{len(source):,} documents of {document_bytes >> 10} KB, {at_once} at once"
    show(title, size, medians({"read() in blocks of 1 MB": blocks, "TarShards.rows": rows}, repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", default=None, help="where the temporary folder is made")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, page cache warm, medians of {options.repeats} interleaved rounds")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        indexing(Path(folder), options.gigabytes, options.repeats)
    for document_bytes in (32768, 8192):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            reading(Path(folder), options.gigabytes, options.repeats, document_bytes)


if __name__ == "__main__":
    main()
