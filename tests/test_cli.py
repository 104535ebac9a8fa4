"""The command line: what it prints, what it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from equipoise.cli import app
from equipoise.loaders import tar_index
from equipoise.loaders.tar import TarShards
from typer.testing import CliRunner

from tests.loaders.archives import npy, tar_bytes, wait_for

# A test that runs in the background of a shell has SIGINT ignored, and its children with it.
RUN = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from equipoise.cli import app; app()",
]


def test_an_index_of_columns(tmp_path: Path) -> None:
    members = [
        (f"{at}.{ext}", data)
        for at in range(3)
        for ext, data in (("bin", b"\1\0\2\0"), ("mask.bin", b"\0\0\1\0"), ("cls", b"7"))
    ]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    options = [
        "--output",
        str(tmp_path / "index"),
        "--tokens",
        "bin",
        "--columns",
        "mask.bin,cls",
        "--dtype",
        "uint16",
        "--processes",
        "1",
    ]
    result = CliRunner().invoke(app, ["index", str(tmp_path / "a.tar"), *options])
    assert result.exit_code == 0 and result.stderr == ""
    assert (
        result.stdout
        == f"{tmp_path}/index: 3 documents, 6 tokens in 1 shards of 10,240 bytes; columns input_ids, mask, cls\n"
    )
    assert TarShards(tmp_path / "index").rows([2])["cls"] == [7]


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 200)
    result = CliRunner().invoke(app, ["index", str(tmp_path / "bad.tar"), "--output", str(tmp_path / "index")])
    assert result.exit_code == 1 and result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"equipoise index: {tmp_path}/bad.tar: the header's checksum is wrong")
    assert CliRunner().invoke(app, ["index", "a.tar"]).exit_code == 2
    assert "index" in CliRunner().invoke(app, ["--help"]).stdout


def test_what_ctrl_c_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tar_index, "index_shards", stopped)
    result = CliRunner().invoke(app, ["index", "a.tar", "--output", str(tmp_path / "index")])
    assert result.exit_code == 130 and "finished shards are kept in" in result.stderr


def children(pid: int) -> list[int]:
    """Processes started by this one, and by those."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(status.parent.name)
            found += [child, *children(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_stopped_it_leaves_no_process_and_no_half_index(tmp_path: Path) -> None:
    shards = [tmp_path / f"{at}.tar" for at in range(6)]  # a second of parsing each
    members = [("0.json", b"[" + b"0," * 2_000_000 + b"0]"), ("0.npy", npy(np.arange(2_000_001, dtype=np.uint8)))]
    shards[0].write_bytes(tar_bytes(members))
    for path in shards[1:]:
        os.link(shards[0], path)
    indexing = {}
    for how in (signal.SIGINT, signal.SIGKILL):  # side by side
        options = ["--output", tmp_path / how.name, "--processes", "2", "--columns", "json"]
        indexing[how] = subprocess.Popen([*RUN, "index", *shards, *options], stderr=subprocess.PIPE, text=True)
    for how, process in indexing.items():
        parts = tmp_path / f"{how.name}.parts"
        wait_for(lambda: any(parts.glob("*.part")))  # noqa: B023
        started = children(process.pid)
        assert len(started) >= 2
        process.send_signal(how)
        _, said = process.communicate(timeout=120)
        assert process.returncode in (130, -signal.SIGKILL) and "Traceback" not in said
        wait_for(lambda: not any(alive(pid) for pid in started))  # noqa: B023
        assert not (tmp_path / how.name).exists() and any(parts.glob("*.part"))


def test_planning_and_indexing_import_no_torch() -> None:
    code = "import sys, equipoise.cli, equipoise.loaders.tar_index; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("recipe", ["magi", "dcp", "libra", "static", "wlb", "skrull", "dynamic_cp"])
def test_a_picture_shows_who_computes(recipe: str) -> None:
    result = CliRunner().invoke(app, ["draw", "40", "16", "8", "--recipe", recipe, "--cp", "3"])
    rows = result.stdout.splitlines()
    assert result.exit_code == 0 and len(rows) == 48 and all(len(row) == 48 for row in rows)
    assert set("".join(rows)) == set("012·")


def test_masks_are_drawn(tmp_path: Path) -> None:
    options = ["draw", "24", "--cp", "2"]
    shown = CliRunner().invoke(app, [*options, "--mask", "prefix_lm:prefix=10"]).stdout.splitlines()
    assert [row.count("·") for row in shown] == [14] * 10 + list(range(13, -1, -1))
    for mask in ("full", "sliding_window:window=3", "shared_question:answers=3", "block_causal:block=5"):
        path = tmp_path / "plan.png"
        result = CliRunner().invoke(app, [*options, "--mask", mask, "--output", str(path)])
        assert result.exit_code == 0 and path.read_bytes()[1:4] == b"PNG"
        path.unlink()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mask", "oval"], "a mask is one of causal, full"),
        (["--mask", "prefix_lm"], "'prefix'"),
        (["--mask", "prefix_lm:prefix=x"], "options of a mask are name=number"),
        (["--recipe", "static", "--mask", "full"], "attend='ring' computes causal attention, and these documents have full masks"),
        (["--recipe", "vrsp"], "no blocks to draw"),
        (["--recipe", "circle"], "recipe must be one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_one_line(options: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["draw", "24", *options])
    assert result.exit_code == 1 and said in result.stderr and result.stderr.count("\n") == 1
