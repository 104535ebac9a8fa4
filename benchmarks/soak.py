"""A soak: one job on a small stream, stopped, moved to other ranks and broken on purpose, for 20,000 optimizer steps.

    python benchmarks/soak.py
    python benchmarks/soak.py --steps 400 --resume-every 80 --fault-every 80

The job (`soak_job.py`) trains nothing; it checks every token it is given, and keeps a journal. Every ``resume-every`` steps it
is stopped, behind a step or in the middle of one, and goes on with other ranks (``SHAPES``, dp x cp). Every ``fault-every``
steps something breaks (``FAULTS``, in turn), and the job starts again from the newest state on disk that is whole. A state
says how many micro-batches lie before it: what the journals hold behind the state from which the job went on was done again,
and does not count. What counts must be every token of every epoch once.

It fails (exit code 1) where a document is lost or doubled, where a fault does not end in an error that says what it was, where
a rank does not end by itself once another has failed, where processes are left behind, and where memory, open files or the
state grow. Linux. 20,000 steps take minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
from equipoise import BalancedBatchSampler, recipe
from equipoise.samplers.stream_order import told as told_lengths
from equipoise.samplers.unindexed import Unindexed
from soak_job import CAPACITY, DOCUMENTS_PER_STEP, PARTS, ROW, Job, Start, counts, run_rank, states

SHAPES = ((4, 1), (2, 1), (3, 1), (1, 1), (2, 2), (4, 1), (1, 2), (1, 3))  # dp x cp of each start, in turn
FAULTS = ("reader killed", "document raises", "rank killed", "state damaged", "reader slow")
GRACE = 15.0  # seconds beyond two timeouts within which all ranks must have ended, and their workers
TRIES = 6
SLACK = 8  # megabytes that memory may grow by, beside 5 %
STATE = 1 << 15  # bytes of a state, at most
HEAD = f"{'start':>5s} {'dp x cp':>7s} {'readers':>7s} {'steps':>6s}  {'fault':16s}{'ended in':>9s}{'again':>6s}{'MB':>12s}{'files':>6s}{'s':>6s}{'longest':>9s}"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a start ended."""

    start: Start
    told: list[dict[str, Any] | None]  # by rank; None: killed
    written: tuple[int, int]  # the first micro-batch in the journals, and the last
    state: Path | None  # the newest
    state_bytes: int
    stuck: list[int]  # ranks that did not end by themselves
    left: int  # processes
    seconds: float
    ending: float  # seconds from the first failure to the last rank's end

    def largest(self, column: int, sample: int) -> float:
        """Memory (0) or files (1) of the largest rank, at its first (0) or last (-1) sample; 0 where all were killed."""
        return max((told["samples"][sample][column] for told in self.told if told and told["samples"]), default=0)

    @property
    def struck(self) -> bool:
        """Whether its fault was."""
        return bool(self.start.fault) and any(told is None or told["struck"] for told in self.told)

    def complaints(self) -> list[str]:
        """What should not have been."""
        errors = [told["error"] for told in self.told if told is not None]
        said, all_told = [str(error) for error in errors], len(errors) == len(self.told)
        expected = {
            "": all_told and not any(errors),
            "reader killed": all(errors) and any("killed" in error for error in said),
            "document raises": all(errors) and any("a document that raises" in error for error in said),
            "rank killed": all(errors) and self.told[-1] is None,
            "state damaged": not errors,
            # where the machine is too busy for so short a timeout, it comes before the fault, which then comes again
            "reader slow": all(errors) and any(re.search("more than|came for|[Tt]imed out", error) for error in said),
        }
        found = [f"ranks {self.stuck} did not end by themselves"] * bool(self.stuck)
        found += [f"{self.left} processes were left behind"] * bool(self.left)
        found += [f"{self.start.fault or 'no fault'}, but the ranks told {self.told}"] * (
            not expected[self.start.fault]
        )
        return [f"start {self.start.number}: {each}" for each in found]

    def line(self, again: int) -> str:
        """Of the table: steps behind it, micro-batches that it did again, memory and files of the largest rank, seconds, and
        the longest that a rank was between two micro-batches."""
        start, longest = self.start, max((told["longest"] for told in self.told if told), default=0)
        grown = f"{self.largest(0, 0):.0f} … {self.largest(0, -1):.0f}"
        ended = f"{self.ending:.1f} s" if start.fault else ""
        return (
            f"{start.number:5d} {f'{start.dp} x {start.cp}':>7s} {start.workers:7d} {counts(self.state)[1] if self.state else 0:6d}  "
            f"{start.fault:16s}{ended:>9s}{again:6d}{grown:>12s}{self.largest(1, -1):6.0f}{self.seconds:6.1f}{longest:9.2f}"
        )


def soak(job: Job, options: argparse.Namespace) -> tuple[list[Ending], list[str]]:
    """All starts of the job, and what should not have been."""
    warm(job.recipe)
    endings, complaints, reached = list[Ending](), list[str](), 0
    print(HEAD)
    while not complaints and (not endings or not endings[-1].start.last):
        start = following(job.folder, endings, options)
        for fault in FAULTS:
            (job.folder / fault).unlink(missing_ok=True)
        ending = live(start, job)
        complaints += ending.complaints()
        if [each.start.until for each in endings].count(start.until) == TRIES:
            complaints.append(f"start {start.number}: {TRIES} starts did not reach step {start.until}")
        before = endings[-1] if endings else None
        if before and before.start.fault == "state damaged":
            refused = [told["refused"] for told in ending.told if told is not None]
            if not all(len(each) == 1 and "no whole loader state" in each[0] for each in refused):
                complaints.append(f"start {start.number}: the newest state was damaged, and refused were {refused}")
        if start.fault == "state damaged" and ending.state:
            damage(ending.state, start.number)
        print(ending.line(max(0, reached - ending.written[0])), flush=True)
        reached = ending.written[1] + 1 or reached
        endings.append(ending)
    return endings, complaints


def warm(name: str) -> None:
    """Load or compile the planner here, so that no rank has to: they are forked. No torch operation runs in this process."""
    for dp, cp in ((4, 1), (2, 2)):
        sampler = BalancedBatchSampler(
            Unindexed(more=told_lengths([[5, 3, 900], [7, 2]]), num_parts=2),
            recipe(name, attend="none"),
            max_tokens_per_rank=CAPACITY // cp,
            documents_per_step=4,
            dp=dp,
            cp=cp,
            too_long="split",
        )
        next(iter(sampler))


def following(folder: Path, endings: list[Ending], options: argparse.Namespace) -> Start:
    """The next start: other ranks, to the end of the segment under way, and with its fault unless that was."""
    number, every = len(endings), options.resume_every
    steps = max((counts(path)[1] for path in states(folder)), default=0)
    until = (steps // every + 1) * every
    struck = any(ending.struck and ending.start.until == until for ending in endings)
    fault = "" if struck or until % options.fault_every else FAULTS[(until // options.fault_every - 1) % len(FAULTS)]
    dp, cp = SHAPES[number % len(SHAPES)]
    return Start(
        number=number,
        dp=dp,
        cp=cp,
        workers=1 + number % 2 if fault == "reader killed" else (number // 2) % 2,
        until=until,
        last=until >= options.steps and not fault,
        fault=fault,
        at=until - every + every // 5 + number % 7,
    )


def live(start: Start, job: Job) -> Ending:
    """Run one start of the job to its end."""
    begin, failed, stuck = time.monotonic(), 0.0, list[int]()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, start, job)) for rank in range(start.dp * start.cp)]
    for process in ranks:
        process.start()
    try:
        while alive := [rank for rank, process in enumerate(ranks) if process.is_alive()]:
            wait([ranks[rank].sentinel for rank in alive], timeout=0.5)
            failed = failed or (time.monotonic() if any(process.exitcode for process in ranks) else 0.0)
            if failed and time.monotonic() - failed > 2 * start.timeout + GRACE:
                stuck = alive
                break
    finally:
        end = time.monotonic()
        for process in ranks:
            process.kill()
            process.join()
    told = [job.folder / f"told-{start.number}-{rank}" for rank in range(len(ranks))]
    newest = next(reversed(states(job.folder)), None)
    return Ending(
        start=start,
        told=[json.loads(file.read_text()) if file.exists() else None for file in told],
        written=written(job.folder, start),
        state=newest,
        state_bytes=newest.stat().st_size if newest else 0,
        stuck=stuck,
        left=left_behind({process.pid for process in ranks}),
        seconds=end - begin,
        ending=end - failed if failed else 0.0,
    )


def left_behind(sessions: set[int | None]) -> int:
    """Processes of these sessions that have not ended after ``GRACE`` seconds."""
    end = time.monotonic() + GRACE
    while (left := sum(session in sessions for session in alive_sessions())) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def alive_sessions() -> Iterator[int]:
    """The session of every process on this machine that runs."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = file.read_text().rpartition(")")[2].split()
            if state != "Z":
                yield int(session)


def damage(path: Path, number: int) -> None:
    """Cut a file short, or change a byte of it."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if number % 2 else data[: len(data) // 2])


# What is told.


def written(folder: Path, start: Start) -> tuple[int, int]:
    """The first and the last micro-batch in the journals of a start; (a huge number, -1) where they are empty."""
    first, last = [], []
    for path in folder.glob(f"journal-{start.number}-*"):
        with open(path, "rb") as file:
            first += np.frombuffer(file.read(8), np.int64).tolist()
            file.seek(max(0, path.stat().st_size // ROW - 1) * ROW)
            last += np.frombuffer(file.read(8), np.int64).tolist()
    return min(first, default=sys.maxsize), max(last, default=-1)


def what_counts(folder: Path, endings: list[Ending]) -> np.ndarray:
    """All rows of the journals, but those of micro-batches that a later start did again."""
    rows = np.empty((0, ROW // 8), np.int64)
    for ending in endings:
        rows = rows[rows[:, 0] < ending.written[0]]
        data = [path.read_bytes() for path in sorted(folder.glob(f"journal-{ending.start.number}-*"))]
        whole = [np.frombuffer(each[: len(each) // ROW * ROW], np.int64).reshape(-1, ROW // 8) for each in data]
        rows = np.concatenate([rows, *whole])
    return rows[rows[:, 2] >= 0]


def counted(rows: np.ndarray, lengths: np.ndarray) -> list[str]:
    """Compare what counts with what every epoch holds."""
    epochs = int(rows[:, 1].max()) + 1
    place = rows[:, 1] * len(lengths) + rows[:, 2]
    tokens, squares = np.zeros((2, epochs * len(lengths)), np.int64)
    np.add.at(tokens, place, rows[:, 3])
    np.add.at(squares, place, rows[:, 4])
    whole, due = np.tile(lengths, epochs), np.tile(lengths * (lengths + 1) * (2 * lengths + 1) // 6, epochs)
    lost, doubled, other = tokens < whole, tokens > whole, (tokens == whole) & (squares != due)
    print(
        f"\n{epochs} epochs of {len(lengths)} documents, {whole.sum()} tokens: {lost.sum()} documents lost, {doubled.sum()} "
        f"doubled, {other.sum()} with other tokens than their own"
    )
    return [
        f"document {at % len(lengths)} of epoch {at // len(lengths)} came with {tokens[at]} of its {whole[at]} tokens"
        for at in np.flatnonzero(lost | doubled | other)[:9]
    ]


def flat(endings: list[Ending]) -> list[str]:
    """Memory, open files and the state must not grow: within a start, and from the first start to any other."""
    whole = [ending for ending in endings if not ending.start.fault]
    first, end = whole[0].largest(0, -1), [ending.largest(0, -1) for ending in whole]
    growth = [ending.largest(0, -1) - ending.largest(0, 0) for ending in whole]
    files = [ending.largest(1, -1) - ending.largest(1, 0) for ending in whole]
    sizes = [ending.state_bytes for ending in endings]
    print(
        f"{len(endings)} starts, {sum(ending.struck for ending in endings)} ended by a fault, the slowest in "
        f"{max(ending.ending for ending in endings):.1f} s; {sum(ending.left for ending in endings)} processes left behind\n"
        f"memory of the largest rank: {first:.0f} MB behind the first start, {min(end):.0f} … {max(end):.0f} MB behind others, "
        f"{np.mean(growth):+.1f} MB within one; a state has {min(sizes)} … {max(sizes)} bytes"
    )
    found = [f"memory grew from {first:.0f} to {max(end):.0f} MB"] * (max(end) > 1.05 * first + SLACK)
    found += [f"memory grew by {max(growth):.0f} MB within a start"] * (max(growth) > 0.05 * first + SLACK)
    found += [f"{max(files):.0f} more files are open behind a start than in it"] * (max(files) > PARTS + 2)
    return found + [f"a state has {max(sizes)} bytes"] * (max(sizes) > STATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--resume-every", type=int, default=500)
    parser.add_argument("--fault-every", type=int, default=1_000)
    parser.add_argument("--recipe", default="vrsp")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak") as folder:
        job = Job(
            folder=Path(folder),
            recipe=options.recipe,
            save_every=max(options.resume_every // 5, 1),
            documents=DOCUMENTS_PER_STEP * options.resume_every // 4,
        )
        job.make_shards()
        endings, complaints = soak(job, options)
        if not complaints:  # else it stands in the middle of an epoch
            complaints += counted(what_counts(job.folder, endings), job.lengths()) + flat(endings)
    for each in complaints:
        print(f"NOT SO: {each}")
    print(f"{time.monotonic() - begin:.0f} s: {'FAILED' if complaints else 'passed'}")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
