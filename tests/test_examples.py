"""The examples run as a user runs them, and do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *options: str) -> str:
    """What an example prints."""
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_preprocess_hf_packs_saves_and_trains(tmp_path: Path) -> None:
    printed = run("preprocess_hf.py", "--quick", "--out", str(tmp_path))
    together, alone = map(float, re.search(r"at a time: (\S+) and (\S+)", printed).groups())  # type: ignore[union-attr]
    assert together == pytest.approx(alone, abs=2e-5)
    first, last = map(float, re.search(r"loss (\S+) at first, (\S+) at last", printed).groups())  # type: ignore[union-attr]
    assert last < first - 0.2
    packed = load_from_disk(str(tmp_path / "packed"))
    assert packed.info.description in printed and max(map(len, packed["input_ids"])) <= 1024
