"""The streaming example and the soak run as a user runs them, short."""

from __future__ import annotations

import re

import pytest

from tests.scripts import Ran


@pytest.mark.script("examples/stream_shards.py", "--quick", "--no-stream", "--out", "{out}")
def test_indexed_shards_kill_resume_and_count(script: Ran) -> None:
    check(script)
    assert not list(script.out.glob("stream_shards/shards/*.tar.gz"))


@pytest.mark.script("examples/stream_shards.py", "--quick", "--stream", "--out", "{out}")
def test_streamed_shards_kill_resume_and_count(script: Ran) -> None:
    check(script)
    assert len(list(script.out.glob("stream_shards/shards/*.tar.gz"))) == 3


def check(script: Ran) -> None:
    """One rank was killed, two others went on, and nothing was lost or doubled."""
    first, second = script.printed.split("2 ranks go on from the state, which stands before step 8")
    steps = [[int(step) for step in re.findall(r"^step +(\d+):", part, re.MULTILINE)] for part in (first, second)]
    assert steps[0] == list(range(11)) and "rank 2 was killed" in first
    assert steps[1] == list(range(8, 8 + len(steps[1])))
    assert "60 documents with" in second and " 0 lost, 0 doubled" in second
    assert "3 steps behind the last save were done again, 3 of them with the very same documents" in second


@pytest.mark.script("benchmarks/soak.py", "--steps", "200", "--resume-every", "40", "--fault-every", "40")
def test_soak_in_short(script: Ran) -> None:
    printed = script.printed
    assert "0 documents lost, 0 doubled" in printed and printed.rstrip().endswith("passed")
    for fault in ("reader killed", "document raises", "rank killed", "state damaged", "reader slow"):
        assert fault in printed
