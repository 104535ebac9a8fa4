"""The examples run as a user runs them, and do what they say."""

from __future__ import annotations

import re

import pytest
from datasets import load_from_disk

from tests.scripts import Ran


@pytest.mark.script("examples/preprocess_hf.py", "--quick", "--out", "{out}")
def test_preprocess_hf_packs_saves_and_trains(script: Ran) -> None:
    printed = script.printed
    together, alone = map(float, re.search(r"at a time: (\S+) and (\S+)", printed).groups())  # type: ignore[union-attr]
    assert together == pytest.approx(alone, abs=2e-5)
    first, last = map(float, re.search(r"loss (\S+) at first, (\S+) at last", printed).groups())  # type: ignore[union-attr]
    assert last < first - 0.2
    packed = load_from_disk(str(script.out / "packed"))
    assert packed.info.description in printed and max(map(len, packed["input_ids"])) <= 1024
