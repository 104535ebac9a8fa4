"""Workers end with their trainer, also where it is killed and they are children of another process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import multiprocessing, time
from equipoise import BalancedLoader, Stream, recipe

ROWS = [[1, 2, 3]] * 1000

def make(dataset):
    return BalancedLoader(
        dataset, recipe("static", attend="none"), max_tokens_per_rank=8, documents_per_step=2, dp=1, num_workers=1
    )

if __name__ == "__main__":
    multiprocessing.set_start_method({method!r})
    loaders = [make(ROWS), make(Stream.of([ROWS]))]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_workers_of_either_kind_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    programs = {
        method: _started(tmp_path, method) for method in ("fork", "forkserver")
    }  # side by side: they import torch
    try:
        workers = {method: program.stdout.readline().split() for method, program in programs.items()}  # type: ignore[union-attr]
        assert all(len(each) == 2 and all(map(_alive, each)) for each in workers.values())
    finally:
        for program in programs.values():
            program.kill()
            program.communicate()
    end = time.monotonic() + 60
    while any(_alive(pid) for each in workers.values() for pid in each):
        assert time.monotonic() < end, f"a worker outlives its trainer: {workers}"
        time.sleep(0.05)


def _started(folder: Path, method: str) -> subprocess.Popen[str]:
    path = folder / f"{method}.py"
    path.write_text(PROGRAM.format(method=method))
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[-1][0] not in "ZX"
    except OSError:
        return False
