"""The attention benchmarks as a user runs them, at sizes that take seconds; figures are not asserted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def run(script: str, *options: str, status: int = 0) -> str:
    """What a script prints."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_attention_beside_its_peers() -> None:
    """torch's ring is always there; the others are named where they are not installed."""
    small = ("--tokens", "512", "--packs", "0", "--dtypes", "bf16")
    printed = run("attention.py", *small, "--rounds", "1", "--only", "time")
    assert re.search(r"ours ring/direct/gather +\d+ \(\d+\)\n", printed) and "torch ring, allgather" in printed
    assert re.search(r"one document, bf16 +ours best: .* / best peer: .* one process / ours = ", printed)
    assert "is wrong" not in printed


def test_what_attend_adds_to_its_kernel() -> None:
    printed = run("attention_overhead.py", "--tokens", "512", "--rounds", "1", "--dtypes", "fp32")
    assert [line.split(",")[0].strip() for line in printed.splitlines()[2:]] == ["one document", "64 random", "4 x 128"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_a_sentence() -> None:
    printed = run("gpu.py", status=2)
    assert printed.startswith("There is no GPU here") and printed.count("\n") == 1


def test_the_script_for_a_gpu_over_the_cpu_kernel() -> None:
    printed = run("gpu.py", "--device", "cpu", "--quick")
    assert "cpu kernel (aten)" in printed and re.search(r"^contract: .*", printed, re.MULTILINE)
    assert re.search(r"^ +512 +\S+ \(204\) +\S+ +\| +\S+ \(100\) +\S+$", printed, re.MULTILINE)
    assert re.search(r"^ +1024 tokens: plan \S+, prepare \S+; .* = ", printed, re.MULTILINE)
