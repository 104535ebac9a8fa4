"""index_shards: where every document of a set of tar shards lies, in one columnar file that all ranks read by offset.

A webdataset shard can only be streamed, so ranks get whole shards, and three shards serve two ranks 10 documents and 5. With
this index the documents are numbered over all shards, any rank reads exactly its own (``TarShards``), and lengths are known
before a token is read. Costs one walk over the tar headers, about as fast as ``tar tf``; json, txt and cls
members are read and parsed besides.

    index_shards(sorted(Path("shards").glob("*.tar")), "shards/index.arrow", columns=("labels.npy",))

The file is Arrow IPC (``index_file.py``), a row per document: ``shard`` (int32), ``key`` (string), ``offset`` and ``size`` of the
token data in bytes, behind an npy header (int64), ``tokens`` (int64) and ``dtype`` (int8, a place in the ``dtypes`` of the
facts); and for every further member ``labels.npy.offset``, ``.size``, ``.dtype``. Beside it grows ``INDEX.parts/`` with one such
file per finished shard: a run that was stopped goes on from there, and removes it when the index is whole.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from .index_file import read_index, write_index
from .tar_members import CODES, Members
from .tar_rows import shard_rows

BYTES_PER_PROCESS = 1 << 30
"""Starting a process takes about as long as walking a gigabyte of tars, or parsing a sixteenth of that."""


def index_shards(
    shards: Sequence[str | PathLike[str]] | str | PathLike[str],
    output: str | PathLike[str],
    *,
    tokens: str = "npy",
    columns: Sequence[str] = (),
    dtype: str | None = None,
    processes: int | None = None,
    progress: bool = False,
) -> Path:
    """Index the documents of tar shards, in the order given; returns the path of the index.

    Args:
        shards: paths of uncompressed tars.
        output: the index to write, in one stroke; its parts lie in ``OUTPUT.parts/`` until then.
        tokens: extension of the members that hold the tokens: ``npy``, ``bin`` (raw, with ``dtype``) or ``json``.
        columns: extensions of further members: ``labels.npy`` is the token-aligned column ``labels``, ``cls``, ``txt`` and
            ``json`` hold one value per document.
        dtype: type of raw ``bin`` members, such as ``uint16``.
        processes: shards indexed at once; None: one per gigabyte (json, txt, cls: 64 MB), at most one per core.
        progress: show a bar on stderr, if that is a terminal.

    Raises ValueError that names shard, member and byte where an archive is damaged or does not hold what was asked for.
    """
    members = Members(tokens=tokens, columns=(columns,) if isinstance(columns, str) else tuple(columns), dtype=dtype)
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1; got {processes}")
    output = os.path.abspath(output)
    if os.path.isdir(output) or not os.path.isdir(os.path.dirname(output)):
        raise ValueError(f"the index is a file in a folder that is there; got {output}")
    given = [shards] if isinstance(shards, str | PathLike) else list(shards)
    with _parts_folder(output) as folder:
        jobs = _jobs([os.path.abspath(shard) for shard in given], output, folder, members)
        finished = {job.path for job in jobs if job.is_finished()}
        waiting = [job for job in jobs if job.path not in finished]
        if processes is None:
            per_process = BYTES_PER_PROCESS // (16 if members.are_parsed else 1)
            processes = min(_num_cores(), 1 + sum(job.size for job in waiting) // per_process)
        with _bar(progress, sum(job.size for job in jobs)) as advance, closing(_run(waiting, processes)) as done:
            advance(sum(job.size for job in jobs if job.path in finished))
            for job in done:
                advance(job.size)
        _merge(jobs, output, folder)
    return Path(output)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One shard: what it was when the run began, and where its part of the index goes."""

    path: str
    stored: str
    """The path that the index holds, relative to its folder."""
    size: int
    mtime_ns: int
    part: str
    members: Members

    def is_finished(self) -> bool:
        """Whether an earlier run left the part of this very shard."""
        try:
            facts = read_index(self.part)[1]
        except ValueError:
            return False  # none, or damaged: made again
        return (facts["shard"]["size"], facts["mtime_ns"]) == (self.size, self.mtime_ns)

    def run(self) -> None:
        """Index the shard. Raises ValueError that names it."""
        try:
            batch, made, ignored = shard_rows(self.path, self.members)
            now = os.stat(self.path)
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.path}: {error}") from error
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise ValueError(f"{self.path}: the shard was changed while it was indexed: let its writer finish first")
        shard = {"path": self.stored, "size": self.size, "documents": len(batch), "ignored": ignored}
        facts = {"shard": shard, "mtime_ns": self.mtime_ns, "columns": made}
        write_index(self.part, batch, facts, lasting=False)


def _jobs(paths: list[str], output: str, folder: str, members: Members) -> list[_Job]:
    """What is to be done, checked as far as that costs no reading. Raises ValueError."""
    if not paths:
        raise ValueError("there is nothing to index: give at least one shard")
    twice = [path for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise ValueError(f"every shard is given once; {twice[0]} stands there twice")
    base = os.path.realpath(os.path.dirname(output))
    jobs = []
    for path in paths:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: there is no such file")
        # The folder's own place, but the file's own name: a shard may be a link into a store of blobs.
        real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        name = xxhash.xxh3_64_hexdigest(json.dumps([real, asdict(members)]).encode())
        jobs.append(
            _Job(
                path=path,
                stored=os.path.relpath(real, base),
                size=os.stat(path).st_size,
                mtime_ns=os.stat(path).st_mtime_ns,
                part=os.path.join(folder, f"{name}.part"),
                members=members,
            )
        )
    return jobs


def _merge(jobs: list[_Job], output: str, folder: str) -> None:
    """Put the parts together and write the index. Raises ValueError where shards hold different columns."""
    parts = [read_index(job.part) for job in jobs]
    filled = [at for at, (batch, _) in enumerate(parts) if len(batch)] or [0]
    made = parts[filled[0]][1]["columns"]
    for at in filled:
        other = parts[at][1]["columns"]
        if other != made:
            raise ValueError(
                f"all shards must hold the same columns; {jobs[filled[0]].path} has {', '.join(chain(*made))}, {jobs[at].path} "
                f"has {', '.join(chain(*other))}"
            )
    shard = np.repeat(np.arange(len(jobs), dtype=np.int32), [len(batch) for batch, _ in parts])
    columns = {"shard": pa.array(shard)}
    for at, name in enumerate(parts[0][0].schema.names):
        columns[name] = pa.concat_arrays([batch.column(at) for batch, _ in parts])
    facts = {
        "members": asdict(jobs[0].members),
        "columns": made,
        "dtypes": CODES,
        "shards": [facts["shard"] for _, facts in parts],
    }
    write_index(output, pa.record_batch(columns), facts, folder=folder)


@contextmanager
def _parts_folder(output: str) -> Iterator[str]:
    """``OUTPUT.parts``, held by this process alone, and removed at the end if all went well."""
    folder = f"{output}.parts"
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, output)
        try:
            yield folder
            for name in os.listdir(folder):
                if name.endswith((".part", ".tmp")):
                    os.unlink(os.path.join(folder, name))
        finally:
            with suppress(OSError):
                os.rmdir(folder)  # where it is empty
    finally:
        os.close(descriptor)


def _lock(descriptor: int, output: str) -> None:
    """Hold the folder until its descriptor is closed. Raises ValueError where another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"another process is making {output}: make an index once, before the job starts or on one rank"
        ) from None
    except OSError:
        pass  # a file system without locks


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run(jobs: list[_Job], processes: int) -> Generator[_Job, None, None]:
    """Do the jobs, in this process or in others; each is yielded when it is done."""
    if min(processes, len(jobs)) > 1:
        yield from _run_in_processes(jobs, min(processes, len(jobs)))
        return
    for job in jobs:
        job.run()
        yield job


def _run_in_processes(jobs: list[_Job], processes: int) -> Iterator[_Job]:
    """The same in spawned processes, each at the end of a pipe: when this process ends, however it does, so do the pipes and
    they.
    """
    context = multiprocessing.get_context("spawn")
    waiting = iter(jobs)
    workers: dict[Any, tuple[Any, _Job]] = {}
    try:
        for job in islice(waiting, processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), name="equipoise-index", daemon=True)
            process.start()
            theirs.close()  # or the pipe would not end with the process
            workers[ours] = process, job
            ours.send(job)
        while workers:
            ready: list[Any] = wait(list(workers))
            for pipe in ready:
                process, job = workers[pipe]
                following = next(waiting, None)
                _exchange(pipe, process, job, following)
                yield job
                if following is not None:
                    workers[pipe] = process, following
                else:
                    del workers[pipe]
                    process.join()
                    pipe.close()
    finally:
        for pipe, (process, _) in workers.items():
            process.terminate()
            process.join()
            pipe.close()


def _exchange(pipe: Any, process: Any, job: _Job, following: _Job | None) -> None:
    """Take the answer to a job and hand over the following one. Raises ValueError for a refused shard, RuntimeError for a
    process that died.
    """
    try:
        refusal = pipe.recv()
        if refusal is None:
            pipe.send(following)
    except (EOFError, ConnectionError):
        process.join()
        raise RuntimeError(
            f"{job.path}: the process that indexed it died (exit code {process.exitcode}); what was finished is kept, so run again. "
            f"A script must call index_shards below `if __name__ == '__main__':`"
        ) from None
    if refusal is not None:
        raise ValueError(refusal)


def _serve(pipe: Connection) -> None:
    """Do the jobs that come through the pipe until None comes or the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the first one decides
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (job := pipe.recv()) is not None:
            try:
                job.run()
                refusal = None
            except ValueError as error:
                refusal = str(error)
            pipe.send(refusal)


@contextmanager
def _bar(shown: bool, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over bytes on stderr, if that is wanted and a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("indexing"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("indexing", total=total)
        yield lambda size: bar.advance(task, size)
