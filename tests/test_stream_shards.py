"""The streaming example and the soak run as a user runs them, short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(script: str, *options: str) -> str:
    """What a script prints."""
    command = [sys.executable, str(ROOT / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("way", ["--no-stream", "--stream"])
def test_stream_shards_kills_resumes_and_counts(tmp_path: Path, way: str) -> None:
    printed = run("examples/stream_shards.py", "--quick", way, "--out", str(tmp_path))
    first, second = printed.split("2 ranks go on from the state, which stands before step 8")
    steps = [[int(step) for step in re.findall(r"^step +(\d+):", part, re.MULTILINE)] for part in (first, second)]
    assert steps[0] == list(range(11)) and "rank 2 was killed" in first
    assert steps[1] == list(range(8, 8 + len(steps[1])))
    assert "60 documents with" in second and " 0 lost, 0 doubled" in second
    assert "3 steps behind the last save were done again, 3 of them with the very same documents" in second
    assert len(list(tmp_path.glob("stream_shards/shards/*.tar.gz"))) == 3 * (way == "--stream")


def test_soak_in_short(tmp_path: Path) -> None:
    printed = run("benchmarks/soak.py", "--steps", "200", "--resume-every", "40", "--fault-every", "40")
    assert "0 documents lost, 0 doubled" in printed and printed.rstrip().endswith("passed")
    for fault in ("reader killed", "document raises", "rank killed", "state damaged", "reader slow"):
        assert fault in printed
