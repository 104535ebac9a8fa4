"""Tokens per second, memory and waiting of the loaders people would use instead, in one table of one run.

    python benchmarks/loader.py [--documents 20000] [--workers 0,2] [--repeats 5] [--index 10000000] [--only map-style]

The same documents for all (lognormal lengths, mean about 1,000 tokens, int32), the same number of workers, about 64K tokens a
batch; rounds interleaved, medians. What is delivered is touched (summed), so that no lazily mapped page escapes, and the sums
must agree. Rivals: torch's ``DataLoader`` with HF's flattening collator, webdataset's own loader over the same tar shards (its
documents joined, which is the least a trainer needs), and TRL's rows, packed beforehand (packing is not counted). Beside them
stands what a bare copy of the delivered bytes costs here. Memory is the peak of the private, changed pages of the main process
and its workers, what they had before the loader taken off, each loader in a process of its own.

Then: reading tar documents in the order of their offsets beside a plain sequential read of the same files, in bytes of tokens
over bytes of the files, with the documents of the table and with longer ones (``offset_order`` says what is compared); how long a trainer
whose step keeps the interpreter busy for 50 ms waits; the first batch of an index of ten million documents, and a worker's
memory with one and with ten million. ``--only TEXT``: the speeds of the loaders with this in their names, beside a bare copy, and
nothing else; with them the CPU time of each, which other programs on the machine change less than they do the speeds.
"""

from __future__ import annotations

import argparse
import io
import mmap
import multiprocessing
import os
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
import webdataset
from datasets import Dataset, load_from_disk
from equipoise import BalancedLoader, Stream, TarShards, TokenFile, index_shards, recipe
from equipoise.loaders import tar
from equipoise.loaders.tar_read import Handle, read_range
from torch.utils.data import DataLoader
from transformers import DataCollatorWithFlattening
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

MAX_TOKENS = 65536
SHARDS = 8
AHEAD = 8  # batches that a loader holds ready


def lengths_of(documents: int) -> np.ndarray:
    """Lognormal, as in the corpora of long-context training, cut at the cap."""
    return np.clip(np.random.default_rng(0).lognormal(6.2, 1.2, documents), 8, MAX_TOKENS).astype(np.int64)


def write_corpus(documents: int, folder: Path) -> None:
    """The same documents as a HF dataset, as tar shards with an index, and packed by TRL."""
    rng, lengths = np.random.default_rng(1), lengths_of(documents)
    tokens = [rng.integers(0, 50_000, length, dtype=np.int32) for length in lengths]
    Dataset.from_generator(
        lambda: ({"input_ids": ids} for ids in tokens), cache_dir=str(folder / "cache")
    ).save_to_disk(str(folder / "documents"), num_shards=SHARDS)
    write_shards(tokens, folder)
    pack_dataset(load_from_disk(str(folder / "documents")), seq_length=MAX_TOKENS, strategy="bfd").save_to_disk(
        str(folder / "packed")
    )


def write_shards(tokens: list[np.ndarray], folder: Path) -> None:
    """Tar shards of these documents, and their index."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03d}.tar", "w") as archive:
            for number in range(shard, len(tokens), SHARDS):
                held = io.BytesIO()
                np.save(held, tokens[number])
                member = tarfile.TarInfo(f"{number:08d}.npy")
                member.size = held.tell()
                held.seek(0)
                archive.addfile(member, held)
    index_shards(shards_in(folder), folder / "index.arrow")


def shards_in(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("*.tar")))


def balanced(source: Any, workers: int) -> BalancedLoader:
    return BalancedLoader(
        source,
        recipe("vrsp", attend="none"),
        max_tokens_per_rank=MAX_TOKENS,
        documents_per_step=512,
        dp=1,
        num_workers=workers,
        ahead=AHEAD,
    )


def flattened(documents: Dataset, workers: int) -> DataLoader:
    mean = np.diff(documents.data.column("input_ids").chunk(0).offsets.to_numpy()).mean()
    return DataLoader(
        documents,
        batch_size=max(1, round(MAX_TOKENS / mean)),
        shuffle=True,
        collate_fn=DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def joined(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The least that makes a batch of webdataset's samples: tokens end to end, labels and positions."""
    ids = [sample["npy"] for sample in samples]
    tokens = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    labels = torch.full_like(tokens, -100)
    labels[:-1] = tokens[1:]
    ends = np.cumsum([len(each) for each in ids])
    labels[torch.from_numpy(ends) - 1] = -100
    positions = torch.arange(len(tokens)) - torch.from_numpy(np.repeat(np.r_[0, ends[:-1]], np.diff(np.r_[0, ends])))
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def webdataset_own(folder: Path, documents: int, workers: int) -> Iterable[Any]:
    per_batch = max(1, round(MAX_TOKENS / lengths_of(documents).mean()))
    read = webdataset.WebDataset(shards_in(folder), shardshuffle=False, empty_check=False).decode()
    return webdataset.WebLoader(read.batched(per_batch, collation_fn=joined), batch_size=None, num_workers=workers)


def packed_rows(folder: Path, workers: int) -> DataLoader:
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, return_position_ids=True)
    rows = load_from_disk(str(folder / "packed"))
    return DataLoader(
        rows,
        batch_size=1,
        shuffle=True,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def loaders(folder: Path, documents: int, workers: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """What makes each loader of the table."""
    dataset = load_from_disk(str(folder / "documents"))
    return {
        "equipoise, map-style (HF dataset)": lambda: balanced(dataset, workers),
        "equipoise, tar shards by index": lambda: balanced(TarShards(folder / "index.arrow"), workers),
        "equipoise, stream of tar shards": lambda: balanced(Stream.tar(shards_in(folder)), workers),
        "equipoise, stream of a HF dataset": lambda: balanced(
            Stream.of(dataset.to_iterable_dataset(num_shards=SHARDS)), workers
        ),
        "DataLoader + DataCollatorWithFlattening": lambda: flattened(dataset, workers),
        "webdataset's loader, documents joined": lambda: webdataset_own(folder, documents, workers),
        "DataLoader over rows packed by TRL": lambda: packed_rows(folder, workers),
    }


def drain(batches: Iterable[Any]) -> tuple[int, int]:
    """Tokens delivered and a checksum over them."""
    tokens, checksum = 0, 0
    for batch in batches:
        tokens += batch["input_ids"].numel()
        checksum += int(batch["input_ids"].sum())
        assert batch["labels"].shape == batch["position_ids"].shape == batch["input_ids"].shape
    return tokens, checksum


def bare_copy(source: torch.Tensor) -> int:
    """input_ids, labels, position_ids and shard_index, copied batch by batch; as many are alive as a loader holds ready."""
    ready: deque[torch.Tensor] = deque(maxlen=AHEAD)
    for batch in source:
        ready.append(batch.clone())
    return len(source) * MAX_TOKENS


def cpu_seconds() -> float:
    """Of this process and the children that it has now."""
    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in children)


def speeds(
    folder: Path, documents: int, workers: int, repeats: int, only: str = ""
) -> tuple[dict[str, float], dict[str, float]]:
    """Tokens per second of each, the median of interleaved rounds; and per second of CPU time."""
    made = {name: make() for name, make in loaders(folder, documents, workers).items() if only in name}
    expected = {drain(each) for each in made.values()}
    assert len(expected) == 1, f"all loaders must deliver the same tokens; got {expected}"
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in [*made, COPY]}
    source = torch.ones(64, 4, MAX_TOKENS, dtype=torch.int64)
    for _ in range(repeats):
        for name in seen:
            begin, busy_before = time.perf_counter(), cpu_seconds()
            tokens = bare_copy(source) if name == COPY else drain(made[name])[0]
            seconds = time.perf_counter() - begin
            seen[name].append((tokens / seconds, tokens / (cpu_seconds() - busy_before)))
    for each in made.values():
        if isinstance(each, BalancedLoader):
            each.close()
    rates, per_cpu = ({name: float(np.median(np.array(each)[:, at])) for name, each in seen.items()} for at in (0, 1))
    return rates, per_cpu


COPY = "bare copy of four int64 a token"


def _drained(name: str, folder: Path, documents: int, workers: int, answer: Any) -> None:
    torch.set_num_threads(1)
    me, peak, done = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], memory_of(me))

    watching = threading.Thread(target=watch)
    loader = loaders(folder, documents, workers)[name]()
    before = memory_of(me)
    watching.start()
    drain(loader)
    done.set()
    watching.join()
    answer.send(peak[0] - before)


def memory_of(process: psutil.Process, children: bool = True) -> int:
    """Bytes of a process, and of its children, that are its own and changed: pages of mapped files can be given back."""
    total = 0
    for each in [process, *(process.children(recursive=True) if children else [])]:
        try:
            lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty:"))
    return total


def apart(target: Callable[..., None], *arguments: Any) -> Any:
    """What ``target`` answers from a process of its own."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(*arguments, theirs))
    process.start()
    theirs.close()
    answer = ours.recv()
    process.join()
    return answer


def table(folder: Path, documents: int, workers: int, repeats: int) -> None:
    """One line per loader; then the ratios that matter."""
    rates, _ = speeds(folder, documents, workers, repeats)
    print(f"\nworkers {workers}: median of {repeats} interleaved rounds over {documents} documents")
    print(f"  {'':42s} {'M tokens/s':>10s} {'peak MiB':>9s}")
    for name, rate in rates.items():
        memory = "" if name == COPY else f"{apart(_drained, name, folder, documents, workers) / 2**20:9.0f}"
        print(f"  {name:42s} {rate / 1e6:10.1f} {memory}")
    ours, tar = rates["equipoise, map-style (HF dataset)"], rates["equipoise, tar shards by index"]
    print(f"  map-style over HF flattening            {ours / rates['DataLoader + DataCollatorWithFlattening']:.1f} x")
    print(f"  map-style over TRL's packed rows        {ours / rates['DataLoader over rows packed by TRL']:.1f} x")
    print(f"  map-style over a bare copy              {ours / rates[COPY]:.2f} x")
    print(
        f"  tar over webdataset's loader            {tar / rates['webdataset' + chr(39) + 's loader, documents joined']:.1f} x"
    )


def long_documents(documents: int) -> list[np.ndarray]:
    """Lengths as WLB-LLM's trace of long-context training has them: uniform up to 6,450 tokens, and 1.2 % up to 125,000."""
    rng = np.random.default_rng(0)
    few, most = rng.integers(6450, 124_914, documents), rng.integers(16, 6450, documents)
    lengths = np.where(rng.random(documents) < 0.012, few, most)
    return [rng.integers(0, 50_000, length, dtype=np.int32) for length in lengths]


def part_of_table(folder: Path, documents: int, workers: int, repeats: int, only: str) -> None:
    """One line per loader that is chosen, beside a bare copy."""
    rates, per_cpu = speeds(folder, documents, workers, repeats, only)
    print(
        f"\nworkers {workers}: median of {repeats} interleaved rounds over {documents} documents; of a bare copy's speed"
    )
    for name, rate in rates.items():
        print(
            f"  {name:42s} {rate / 1e6:8.1f} M tokens/s ({rate / rates[COPY]:.2f}), {per_cpu[name] / 1e6:8.1f} M tokens a "
            f"second of CPU ({per_cpu[name] / per_cpu[COPY]:.2f})"
        )


def offset_order(folder: Path, documents: int, repeats: int) -> None:
    """Windows of 512 documents in the order of their offsets, beside a plain sequential read of the same files in memory.

    The plain read takes blocks of 1 MiB into one buffer, which stays in cache, and all its bytes count. Of ours only the bytes
    of tokens count, in arrays that are the caller's, who lets go of a window before the next, as a collator does. Between
    stands what no reader by offset can pass: bare preadv calls for the ranges that ours reads, into one buffer of a window's
    size; and into fresh pages, which is what ours would cost if its buffers were not used again. Since nobody waits for a
    disk, what counts is the thread's processor time: others on the machine do not disturb it much.
    """
    print(
        "\ntar documents in the order of their offsets, windows of 512: bytes per second over a plain sequential read's"
    )
    (folder / "long").mkdir()
    write_shards(long_documents(documents // 4), folder / "long")
    for name, place in (("of the table above", folder), ("as long-context training has them", folder / "long")):
        tokens = 4 * TarShards(place / "index.arrow").lengths().tokens.sum()
        rates = reading(place, repeats)
        plain = rates.pop("plain")
        share = tokens / sum(Path(path).stat().st_size for path in shards_in(place))
        print(f"  documents {name}: tokens are {share:.3f} of the files; the plain read has {plain / 1e9:.1f} GB/s")
        print("    " + ", ".join(f"{way} {rate / plain:.3f}" for way, rate in rates.items()), end="; ")
        print(f"bytes around the tokens counted too, by index {rates['by index'] / plain / share:.3f}")


def reading(folder: Path, repeats: int) -> dict[str, float]:
    """Bytes per second of the thread's own time, the median of interleaved rounds."""
    source = TarShards(folder / "index.arrow")
    windows = [np.arange(first, min(first + 512, len(source))) for first in range(0, len(source), 512)]
    ranges: list[tuple[int, int, int, int]] = []

    def noted(handle: Handle, offset: int, buffer: np.ndarray, late: Callable[[], None]) -> None:
        place = buffer.ctypes.data - buffer.base.ctypes.data
        ranges.append((handle.descriptor, offset, len(buffer), place))
        read_range(handle, offset, buffer, late)

    with patch.object(tar, "read_range", noted):
        tokens = sum(ids.nbytes for window in windows for ids in source.rows(window)["input_ids"])
    shards, block = shards_in(folder), bytearray(1 << 20)
    memory = memoryview(bytearray(max(place + size for _, _, size, place in ranges)))

    def by_index() -> int:
        for window in windows:
            source.rows(window)
        return tokens

    def bare() -> int:
        for descriptor, offset, size, place in ranges:
            os.preadv(descriptor, [memory[place : place + size]], offset)
        return tokens

    def fresh() -> int:
        for descriptor, offset, size, _ in ranges:
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            os.preadv(descriptor, [pages], offset)
        return tokens

    def plain() -> int:
        read = 0
        for path in shards:
            with open(path, "rb", buffering=0) as file:
                while count := file.readinto(block):
                    read += count
        return read

    runs = {"by index": by_index, "bare preadv": bare, "bare preadv into fresh pages": fresh, "plain": plain}
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(6 * repeats + 1):
        for name in np.random.default_rng(turn).permutation(list(runs)).tolist():  # what ran before leaves its traces
            begin = time.thread_time()
            read = runs[name]()
            seen[name].append(read / (time.thread_time() - begin))
    return {name: float(np.median(rates[1:])) for name, rates in seen.items()}


def busy(seconds: float) -> None:
    """Keep the interpreter: what a Python training loop does to background threads."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def waiting(folder: Path, workers: int) -> None:
    """The share of its time that a trainer waits whose step of one micro-batch is 50 ms of busy Python."""
    loader = balanced(load_from_disk(str(folder / "documents")), workers)
    for at, _batch in enumerate(loader):
        if at == 100:
            break
        busy(0.05)
    print(f"\nworkers {workers}, 50 ms of busy Python a micro-batch: {loader.waiting}")
    loader.close()


def _first_batch(documents: int, folder: Path, method: str, answer: Any) -> None:
    """Seconds to the first batch of an index, and the bytes of its one worker."""
    multiprocessing.set_start_method(method, force=True)
    begin = time.perf_counter()
    source = TokenFile.npy(folder / f"tokens-{documents}.npy", folder / f"offsets-{documents}.npy")
    loader = BalancedLoader(
        source,
        recipe("vrsp", attend="none"),
        max_tokens_per_rank=8192,
        documents_per_step=512,
        dp=1,
        num_workers=1,
        seed=1,
    )
    batches = iter(loader)
    next(batches)
    seconds = time.perf_counter() - begin
    for _ in range(50):
        next(batches)
    (worker,) = psutil.Process().children()
    answer.send((seconds, memory_of(worker, children=False)))
    loader.close()


def large_index(documents: int, folder: Path) -> None:
    """Ten million documents: time to the first batch, and a worker's memory beside that with a tenth of them."""
    seconds, told = 0.0, dict[int, int]()
    for count in (documents // 10, documents):
        np.lib.format.open_memmap(folder / f"tokens-{count}.npy", "w+", np.uint16, (count * 8,)).flush()
        np.save(folder / f"offsets-{count}.npy", np.arange(count + 1) * 8)
        seconds, _ = apart(
            _first_batch, count, folder, "fork"
        )  # the imports of a worker that is spawned take seconds …
        _, told[count] = apart(
            _first_batch, count, folder, "spawn"
        )  # … and what it shares with its parent is not its own
    few, many = told.values()
    print(f"\nindex of {documents} documents: first batch after {seconds:.2f} s, process start and imports aside")
    print(
        f"  a worker's own memory: {few / 2**20:.1f} MiB with {documents // 10}, {many / 2**20:.1f} MiB with {documents} "
        f"({many / few - 1:+.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--index", type=int, default=10_000_000)
    parser.add_argument("--only", default="", help="loaders of the table whose names hold this, and nothing else")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the checksum must not spin on the cores that workers need
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(options.documents, folder)
        for workers in map(int, options.workers.split(",")):
            if options.only:
                part_of_table(folder, options.documents, workers, options.repeats, options.only)
            else:
                table(folder, options.documents, workers, options.repeats)
        if options.only:
            return
        offset_order(folder, options.documents, options.repeats)
        for workers in map(int, options.workers.split(",")):
            waiting(folder, workers)
        large_index(options.index, folder)


if __name__ == "__main__":
    main()
