"""A pool of rank processes for tests that need torch.distributed.

Starting ranks costs seconds, most of it importing torch; a pool that is forked from a server with torch loaded starts a
team in a tenth of a second and then runs a case in milliseconds. Each world size has a team of its own, started on
demand, with a gloo default group of that size, so that DDP, FSDP2 and `CpGroups` find the world they expect.

    def add(rank, world, x):                            # at module level, so that it can be pickled
        total = torch.tensor(x + rank)
        dist.all_reduce(total)
        return total.item()

    def test_add(ranks):
        assert ranks.run(add, 3, 10) == [33, 33, 33]

An exception in a rank is raised in the test, with the rank's traceback as its cause; ranks that hang raise TimeoutError.
In both cases the team is ended and the next case gets a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch.distributed",
    "tests.preload",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]
"""What is loaded before ranks are forked; a module that is not installed is passed over."""
GRACE = 1.0
"""Seconds that the other ranks get to report as well once one has failed."""


class RankError(Exception):
    """The traceback of a rank, as the cause of the exception it raised."""


def start_server() -> None:
    """Let the server that ranks are forked from load what it loads, beside whatever is done here meanwhile."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


class Ranks:
    """Teams of rank processes by world size."""

    def __init__(self, timeout: float = 180.0) -> None:
        self.timeout = timeout
        self._context = multiprocessing.get_context("forkserver")
        start_server()
        self._teams: dict[int, _Team] = {}

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float | None = None) -> list[Any]:
        """function(rank, world, *args) on `world` ranks → their results by rank.

        Function, arguments and results are pickled. Process groups and whatever else a function leaves in a module
        stay for the next case.
        """
        if world not in self._teams:
            self._teams[world] = _Team(self._context, world, self.timeout)
        try:
            return self._teams[world].run(function, args, self.timeout if timeout is None else timeout)
        except BaseException:
            self._teams.pop(world).end()
            raise

    def close(self) -> None:
        """End all teams."""
        while self._teams:
            self._teams.popitem()[1].end()


class _Team:
    def __init__(self, context: Any, world: int, timeout: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world, store, timeout), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        job = pickle.dumps((function, args))
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(job)
            except BrokenPipeError:
                raise RuntimeError(f"{self._death(rank)}, before this case: look at the one that ran last") from None
        results: dict[int, Any] = {}
        failures: dict[int, tuple[BaseException, str]] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < len(self._pipes):
            pending = [p for rank, p in enumerate(self._pipes) if rank not in results and rank not in failures]
            ready = wait(pending, max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                stuck = [rank for rank, p in enumerate(self._pipes) if p in pending]
                raise TimeoutError(
                    f"Ranks {stuck} of {len(self._pipes)} did not finish {function.__name__} in {timeout} s."
                )
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                ok, value = self._receive(rank)
                (results if ok else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            raise _first_cause(failures, len(self._pipes))
        return [results[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except EOFError:
            message = self._death(rank)
            return False, (RuntimeError(message), message)

    def _death(self, rank: int) -> str:
        self._processes[rank].join(1.0)
        return f"rank {rank} died with exit code {self._processes[rank].exitcode}"

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _first_cause(failures: dict[int, tuple[BaseException, str]], world: int) -> BaseException:
    """The failure that is not merely another rank's connection breaking, if there is one."""
    rank = min(failures, key=lambda r: ("Connection" in str(failures[r][0]) or "gloo" in str(failures[r][0]), r))
    error, trace = failures[rank]
    error.__cause__ = RankError(f"on rank {rank} of {world} (ranks {sorted(failures)} failed):\n{trace}")
    return error


def _serve(pipe: Connection, rank: int, world: int, store: str, timeout: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(pipe.recv_bytes(), rank, world))


def _answer(job: bytes, rank: int, world: int) -> bytes:
    try:
        function, args = pickle.loads(job)
        return pickle.dumps((True, function(rank, world, *args)))
    except BaseException as error:
        trace = traceback.format_exc()
        with contextlib.suppress(Exception):
            # Some exceptions pickle but cannot be made again from what they pickled.
            pickle.loads(answer := pickle.dumps((False, (error.with_traceback(None), trace))))
            return answer
        return pickle.dumps((False, (RuntimeError(f"{type(error).__name__}: {error}"), trace)))
