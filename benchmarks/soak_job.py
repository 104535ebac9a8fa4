"""The job that `soak.py` stops, moves and breaks: ranks that check every token they are given, and keep a journal.

What document ``number`` holds at a position follows from both, so a rank can tell whether it was given the right token. A state's
file is called by what lies before it, `state-MICROBATCHES-STEPS.json`, as a trainer's own checkpoint would tell it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
import webdataset
from equipoise import BalancedLoader, Stream, ThdBatch, recipe

CAPACITY = 768  # tokens of a pack, whatever cp
DOCUMENTS_PER_STEP = 12
PARTS = 7
TIMEOUT, SHORT = 60.0, 6.0  # seconds: the loader's, and where a reader is to be too slow
KEPT = 3  # states
ROW = 40  # bytes of a journal's row


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the job: on these ranks, until ``until`` steps are done or its fault, behind step ``at``, has ended it."""

    number: int
    dp: int
    cp: int
    workers: int
    until: int
    last: bool  # go on to the end of the epoch
    fault: str = ""
    at: int = 0

    @property
    def timeout(self) -> float:
        return SHORT if self.fault == "reader slow" else TIMEOUT


@dataclass(frozen=True, kw_only=True)
class Job:
    """What stays the same over all starts."""

    folder: Path
    recipe: str
    save_every: int
    documents: int

    def lengths(self) -> np.ndarray:
        """Tokens of each document: most short, some of several packs, one in twenty of a single token."""
        rng = np.random.default_rng(0)
        tokens = np.clip(rng.lognormal(4.6, 1.1, self.documents), 1, 4 * CAPACITY).astype(int)
        return np.where(rng.random(self.documents) < 0.05, 1, tokens)

    def make_shards(self) -> None:
        """Uneven shards, the first the largest, every other one compressed."""
        lengths, share = self.lengths(), np.cumsum(np.arange(PARTS, 0, -1)) / (PARTS * (PARTS + 1) / 2)
        edges = [0, *np.rint(share * self.documents).astype(int).tolist()]
        for part, (first, end) in enumerate(pairwise(edges)):
            with webdataset.TarWriter(str(self.folder / f"{part}.tar{'.gz' * (part % 2)}")) as shard:
                for number in range(first, end):
                    ids = token_ids(np.int64(number), np.arange(lengths[number]))
                    shard.write({"__key__": f"{number:06d}", "npy": ids.astype(np.uint16), "json": {"number": number}})

    def loader(self, start: Start, rank: int) -> BalancedLoader:
        """This rank's loader, over a stream that can be made to fail."""
        stream = Stream.tar(sorted(self.folder.glob("*.tar*")), columns=["json"])
        return BalancedLoader(
            Stream(open=Troubled(stream.open, self.folder), num_parts=stream.num_parts, source="the soak's shards"),
            recipe(self.recipe, attend="none"),
            max_tokens_per_rank=CAPACITY // start.cp,
            documents_per_step=DOCUMENTS_PER_STEP,
            dp=start.dp,
            cp=start.cp,
            rank=rank,
            too_long="split",
            num_workers=start.workers,
            buffer_bytes=1 << 12,  # a few documents, so that reading goes on all the time
            timeout=start.timeout,
        )


def token_ids(number: Any, position: Any) -> Any:
    """What document ``number`` holds at ``position``."""
    return (number * 40503 + position * 2654435761 + 12345) % 50021


@dataclass(frozen=True)
class Troubled:
    """Opens parts whose documents fail, or come late in the first part, once a file says so."""

    open: Any
    folder: Path

    def __call__(self, part: int, epoch: int) -> Iterator[dict[str, Any]]:
        for document in self.open(part, epoch):
            if (self.folder / "document raises").exists():
                raise OSError("a document that raises")
            if part == 0 and (self.folder / "reader slow").exists():
                time.sleep(1.25 * SHORT)
            yield document


def states(folder: Path) -> list[Path]:
    """The states on disk, oldest first."""
    return sorted(folder.glob("state-*.json"))


def counts(path: Path) -> tuple[int, int]:
    """Micro-batches and steps before a state."""
    _, batches, steps = path.stem.split("-")
    return int(batches), int(steps)


def run_rank(rank: int, start: Start, job: Job) -> None:
    """A rank of the job; tells in a file how it went, if it lives to."""
    os.setsid()  # its workers are found by that
    torch.set_num_threads(1)
    logging.getLogger("equipoise").setLevel(logging.ERROR)  # the trainer does nothing, and so waits much
    warnings.filterwarnings("ignore", message="the run is resumed under another configuration")
    told: dict[str, Any] = {"samples": [], "refused": [], "error": None, "struck": False, "longest": 0.0}
    loader = None
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.folder}/meeting-{start.number}",
            rank=rank,
            world_size=start.dp * start.cp,
            timeout=timedelta(seconds=start.timeout),
        )
        loader = job.loader(start, rank)
        Trainer(loader, start, job, told).run()
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    begin = time.monotonic()
    try:
        if loader is not None:
            loader.close()
    except Exception as error:
        told["error"] = f"{told['error']}; when it was closed, {type(error).__name__}: {error}"
    told["longest"] = max(told["longest"], time.monotonic() - begin)
    (job.folder / f"told-{start.number}-{rank}").write_text(json.dumps(told))
    sys.exit(told["error"] is not None)


class Trainer:
    """Reads, checks, writes down; saves now and then; breaks what is to be broken."""

    def __init__(self, loader: BalancedLoader, start: Start, job: Job, told: dict[str, Any]) -> None:
        self.loader, self.start, self.job, self.told = loader, start, job, told
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.batches, self.steps = self.resume()
        self.before = time.monotonic()

    def resume(self) -> tuple[int, int]:
        """Load the newest state that is whole, and do away with newer ones; what lies before it."""
        saved, found = states(self.job.folder), (0, 0)
        while saved:
            try:
                self.loader.load(saved[-1])
                found = counts(saved[-1])
                break
            except ValueError as error:
                self.told["refused"].append(str(error))
                saved.pop()
        dist.barrier()
        for newer in set(states(self.job.folder)) - set(saved) if self.rank == 0 else ():
            newer.unlink()
        return found

    def run(self) -> None:
        """Epoch after epoch; the last start ends with one."""
        with open(self.job.folder / f"journal-{self.start.number}-{self.rank}", "ab", buffering=0) as journal:
            over = False
            while not over:
                for batch in self.loader:
                    over = self.take(batch, journal)
                    if over:
                        break
                else:
                    over = self.start.last and self.steps >= self.start.until
        self.told["samples"].append(memory())

    def take(self, batch: ThdBatch, journal: IO[bytes]) -> bool:
        """One micro-batch; whether it was the last of this start."""
        start, every, now = self.start, self.job.save_every, time.monotonic()
        self.told["longest"], self.before = max(self.told["longest"], now - self.before), now
        before = self.steps
        journal.write(rows(batch, self.batches).tobytes())
        self.batches += 1
        if batch.is_last_slot:
            self.steps += 1
            dist.all_reduce(torch.ones(8))  # where gradients would be summed
            if self.steps % every == 0:
                self.told["samples"].append(memory())
            if start.fault and self.steps >= start.at and not self.told["struck"]:
                self.told["struck"] = self.strike()
        in_step = start.number % 2 == 1  # behind the first micro-batch of the next one
        over = (before if in_step else self.steps) >= start.until and not start.last
        middle = batch.slot == 0 and self.steps % every == every // 2
        if over or middle or (batch.is_last_slot and self.steps % every == 0):
            self.save()
        return over

    def save(self) -> None:
        """One file, once all ranks stand there, with the same state; older ones go."""
        told: list[Any] = [None] * self.world
        dist.all_gather_object(told, json.dumps(self.loader.state_dict(), sort_keys=True))
        if len(set(told)) > 1:
            raise RuntimeError(f"behind micro-batch {self.batches} the ranks have other states: {told}")
        self.loader.save(self.job.folder / f"state-{self.batches:09d}-{self.steps:06d}.json")
        for old in states(self.job.folder)[:-KEPT] if self.rank == 0 else ():
            old.unlink()

    def strike(self) -> bool:
        """Break something; False where there was nothing to break yet."""
        fault, readers = self.start.fault, list[Any]()
        if fault == "state damaged" or (fault == "rank killed" and self.rank == self.world - 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault in ("document raises", "reader slow") and self.rank == 0:
            (self.job.folder / fault).touch()
        if fault == "reader killed" and self.rank == 0:
            readers = multiprocessing.active_children()
            for reader in readers:
                os.kill(reader.pid, signal.SIGKILL)
        return fault != "reader killed" or bool(readers)


def rows(batch: ThdBatch, index: int) -> np.ndarray:
    """int64[n, 5] of a micro-batch: its index, epoch, and each document's number, tokens here, and a sum over positions.

    The first row is of no document, so that a micro-batch of nothing is one too. RuntimeError where a token is not the
    document's own.
    """
    doc, position = batch.doc_ids.numpy().astype(np.int64), batch.position_ids.numpy()
    number = np.where(batch.documents.numpy() < 0, -1, np.asarray(batch.number))
    real = number[doc] >= 0
    wrong = real & (batch.input_ids.numpy() != token_ids(number[doc], position))
    if wrong.any():
        raise RuntimeError(f"{wrong.sum()} tokens of {batch} are not those of its documents {number[doc][wrong]}")
    tokens = np.bincount(doc[real], minlength=len(number))
    squares = np.bincount(doc[real], (position[real] + 1.0) ** 2, minlength=len(number)).astype(np.int64)
    values = np.stack([number, tokens, squares], 1)[tokens > 0]
    return np.insert(np.concatenate([[[-1, 0, 0]], values]), 0, [[index], [batch.epoch]], axis=1).astype(np.int64)


def memory() -> tuple[float, int]:
    """Resident megabytes of this process, and its open files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir("/proc/self/fd"))
