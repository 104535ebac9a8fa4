"""The attention benchmarks as a user runs them, at sizes that take seconds; figures are not asserted."""

from __future__ import annotations

import re

import pytest
import torch

from tests.scripts import Ran

SMALL = ("--tokens", "512", "--packs", "0", "--dtypes", "bf16", "--rounds", "1", "--only", "time")


@pytest.mark.script("benchmarks/attention.py", *SMALL)
def test_attention_beside_its_peers(script: Ran) -> None:
    """torch's ring is always there; the others are named where they are not installed."""
    printed = script.printed
    assert re.search(r"ours ring/direct/gather +\d+ \(\d+\)\n", printed) and "torch ring, allgather" in printed
    assert re.search(r"one document, bf16 +ours best: .* / best peer: .* one process / ours = ", printed)
    assert "is wrong" not in printed


@pytest.mark.script("benchmarks/attention_overhead.py", "--tokens", "512", "--rounds", "1", "--dtypes", "fp32")
def test_what_attend_adds_to_its_kernel(script: Ran) -> None:
    assert [line.split(",")[0].strip() for line in script.printed.splitlines()[2:]] == [
        "one document",
        "64 random",
        "4 x 128",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.script("benchmarks/gpu.py", status=2)
def test_no_gpu_is_said_in_a_sentence(script: Ran) -> None:
    assert script.printed.startswith("There is no GPU here") and script.printed.count("\n") == 1


@pytest.mark.script("benchmarks/gpu.py", "--device", "cpu", "--quick")
def test_the_script_for_a_gpu_over_the_cpu_kernel(script: Ran) -> None:
    printed = script.printed
    assert "cpu kernel (aten)" in printed and re.search(r"^contract: .*", printed, re.MULTILINE)
    assert re.search(r"^ +512 +\S+ \(204\) +\S+ +\| +\S+ \(100\) +\S+$", printed, re.MULTILINE)
    assert re.search(r"^ +1024 tokens: plan \S+, prepare \S+; .* = ", printed, re.MULTILINE)
