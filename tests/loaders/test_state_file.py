"""State files: what was saved comes back, what is not a whole state of this run is refused, a save that dies harms nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from equipoise import BalancedLoader, recipe
from equipoise.loaders import state_file
from equipoise.loaders.state_file import FORMAT, read_state, save_state
from hypothesis import given, settings
from hypothesis import strategies as st

ROWS = [np.arange(n) for n in (5, 1, 9, 3, 3, 7, 2, 8)]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)
OLD, NEW = {"epoch": 1, "step": 2}, {"epoch": 3, "step": 4}


def make(rows: object = ROWS, **options) -> BalancedLoader:
    defaults = {"max_tokens_per_rank": 10, "dp": 1, "documents_per_step": 3}
    return BalancedLoader(rows, recipe("vrsp", attend="none"), **{**defaults, **options})


@given(state=st.dictionaries(st.text(), VALUES, max_size=6))
@settings(max_examples=200, deadline=None)
def test_what_is_saved_is_read(state: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.json"
        save_state(OLD, path)
        save_state(state, path)
        assert read_state(path) == state and os.listdir(folder) == ["state.json"]


def test_what_a_killed_save_left_is_taken_away_once_it_is_old(tmp_path: Path) -> None:
    """Of this state alone, and never what another save may be writing."""
    path = tmp_path / "state[0].json"
    others = [
        ".state[0].json.7",
        ".state0.json.7.part",
        ".state[0].json.b.7.part",
        "state[0].json.7.part",
        ".state[0].json..part",
    ]
    for name, age in [
        (".state[0].json.7.part", 7200),
        (".state[0].json.8.part", 60),
        *((name, 7200) for name in others),
    ]:
        (tmp_path / name).write_text("half a sta")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    save_state(OLD, path)
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, ".state[0].json.8.part", *others])
    assert read_state(path) == OLD


def test_any_truncation_and_any_changed_byte_is_refused(tmp_path: Path) -> None:
    """Also bytes that JSON does not mind: a blank that became a tab tells of a file that is not as it was written."""
    path = tmp_path / "state.json"
    save_state({"epoch": 1, "name": "\u00e9", "rest": [None, [1, 2]]}, path)
    whole = path.read_bytes()
    assert read_state(path)["name"] == "\u00e9"
    changed = [whole[:end] for end in range(len(whole))]
    changed += [
        whole[:at] + bytes([other]) + whole[at + 1 :]
        for at in range(len(whole))
        for other in {whole[at] ^ 1, whole[at] ^ 0x20, whole[at] ^ 0x80, *b' \t\n"0'} - {whole[at]}
    ]
    for content in [*changed, whole + b"\n", whole * 2, b""]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="state.json holds no whole loader state .* take an older one"):
            read_state(path)


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "null",
        "3",
        '"state"',
        "not JSON",
        "[" * 100_000,
        json.dumps({"format": FORMAT, "checksum": "", "state": {"epoch": 0}}),
        json.dumps({"format": FORMAT, "checksum": "", "state": None}),
        state_file._content("{}").replace(FORMAT, "another"),
        state_file._content("{"),
    ],
    ids=lambda content: content[:30],
)
def test_foreign_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="holds no whole loader state"):
        read_state(path)
    with pytest.raises(ValueError, match="holds no whole loader state"):
        make().load(path)


def test_no_file_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make().load(tmp_path / "state.json")
    with pytest.raises(FileNotFoundError):
        make().save(tmp_path / "nowhere" / "state.json")


def test_states_of_another_version_or_without_a_key_are_refused(tmp_path: Path) -> None:
    loader, path = make(), tmp_path / "state.json"
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    other = make()
    before = other.state_dict()
    for wrong, told in [
        ({**state, "version": 1}, "a state of version 2 is needed; this one has version 1"),
        *[({k: v for k, v in state.items() if k != key}, f"lacks {key}") for key in state],
        ([state], "this one has version 'list'"),
        (None, "this one has version 'NoneType'"),
    ]:
        save_state(wrong, path)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=told):
            other.load(path)
        assert other.state_dict() == before


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rows": ROWS[:-1]}, "lengths: saved"),
        ({"rows": [*ROWS[:-1], np.arange(9)]}, "lengths: saved"),
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"shuffle": False}, "shuffle: saved True, now False"),
    ],
)
def test_the_state_of_another_dataset_or_order_is_refused(tmp_path: Path, options: dict, told: str) -> None:
    loader = make()
    next(iter(loader))
    loader.save(tmp_path / "state.json")
    loader.close()
    other = make(**options)
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"read its documents in another order .*{told}"):
        other.load(tmp_path / "state.json")
    assert other.state_dict() == before and len(list(other)) > 0


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path, monkeypatch, name: str) -> None:
    path = tmp_path / "state.json"
    save_state(OLD, path)

    def full(*_args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="no space left"):
        save_state(NEW, path)
    monkeypatch.undo()
    assert read_state(path) == OLD and os.listdir(tmp_path) == ["state.json"]
    save_state(NEW, path)
    assert read_state(path) == NEW


def test_what_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    save_state(OLD, path)
    with pytest.raises(TypeError):
        save_state({"array": np.arange(3)}, path)
    assert read_state(path) == OLD and os.listdir(tmp_path) == ["state.json"]


KILLED = """
import os, signal, sys
sys.modules["torch"] = None  # not needed to save
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("state_file", sys.argv[1])
module = module_from_spec(spec)
spec.loader.exec_module(module)
fatal, real = sys.argv[3], getattr(os, sys.argv[3].split()[-1])
def dies(*args):
    if fatal.startswith("after"):
        real(*args)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, fatal.split()[-1], dies)
module.save_state({"epoch": 3, "step": 4}, sys.argv[2])
"""


@pytest.mark.parametrize(
    ("moment", "kept"), [("before fsync", OLD), ("after fsync", OLD), ("before replace", OLD), ("after replace", NEW)]
)
def test_a_save_that_is_killed_leaves_the_old_state_or_the_new(tmp_path: Path, moment: str, kept: dict) -> None:
    path = tmp_path / "state.json"
    save_state(OLD, path)
    done = subprocess.run([sys.executable, "-c", KILLED, state_file.__file__, str(path), moment], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert read_state(path) == kept
    save_state({"epoch": 5}, path)
    assert read_state(path) == {"epoch": 5}


def saved(rank: int, world: int, folder: str) -> tuple:
    """Both ranks save behind each micro-batch; how often this one wrote, and what both then read."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    loader, path = make(dp=world, rank=rank, timeout=60), Path(folder) / "state.json"
    real, replaced = os.replace, []
    os.replace = lambda *args: (replaced.append(args), real(*args))  # type: ignore[assignment]
    try:
        batches = 0
        for _ in loader:
            loader.save(path)
            batches += 1
            if batches == 2:
                break
    finally:
        os.replace = real  # type: ignore[assignment]
    loader.close()
    dist.barrier()
    read, state = read_state(path), loader.state_dict()
    again = make(dp=world, rank=rank, timeout=60)
    again.load(path)
    rest = [(b.step, b.slot) for b in again]
    again.close()
    return batches, len(replaced), read == state, rest


def test_of_a_team_one_rank_writes(ranks, tmp_path: Path) -> None:
    told = ranks.run(saved, 2, str(tmp_path))
    assert [row[:3] for row in told] == [(2, 2, True), (2, 0, True)]
    assert told[0][3] == told[1][3] and told[0][3]
    assert os.listdir(tmp_path) == ["state.json"]
