"""Scripts that tests run as a user does, one after another in processes beside the tests that come before.

Most tests keep one core busy; a script, which imports torch first, takes the other. All that the collected tests ask for
begin before the first test, in a process that is the tests' only child for them, and a test waits for its own.

    @pytest.mark.script("benchmarks/soak.py", "--steps", "200")
    def test_soak(script):
        assert script.printed.endswith("passed\n")

``{out}`` in an option is a new folder, which the test finds as ``script.out``. Another status than 0 fails the test, unless
the mark has ``status=``.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A script that has ended."""

    printed: str
    out: Path


class Scripts:
    """Runs these commands, scripts below the root with their options, in order."""

    def __init__(self, commands: list[tuple[str, ...]]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="scripts", ignore_cleanup_errors=True)
        self._commands = [
            tuple(part.replace("{out}", str(self._file(number))) for part in command)
            for number, command in enumerate(commands)
        ]
        text = [json.dumps(command) for command in self._commands]
        command = [sys.executable, __file__, self._folder.name, *text]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def result(self, number: int, *, status: int = 0, timeout: float = 1200) -> Ran:
        """Wait until a script has ended. Raises AssertionError for another status, TimeoutError, RuntimeError."""
        told, end = self._file(number, ".json"), time.monotonic() + timeout
        while not told.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"{shlex.join(self._commands[number])} has not ended in {timeout} s")
            if self._process.poll() is not None and not told.exists():
                raise RuntimeError(f"what runs scripts ended with {self._process.returncode}")
            time.sleep(0.05)
        ended, printed, errors = json.loads(told.read_text())
        assert ended == status, (
            f"{shlex.join(self._commands[number])} ended with {ended}, not {status}:\n{printed}{errors}"
        )
        return Ran(printed=printed, out=self._file(number))

    def close(self) -> None:
        """End what still runs."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def _file(self, number: int, suffix: str = "") -> Path:
        return Path(self._folder.name) / f"{number}{suffix}"


def run_all(folder: Path, commands: list[list[str]]) -> None:
    """In the process between: number.json holds (status, what was printed, errors) of each that has ended."""
    for number, (script, *options) in enumerate(commands):
        (folder / str(number)).mkdir()
        done = subprocess.run([sys.executable, str(ROOT / script), *options], capture_output=True, text=True)
        made = folder / f"{number}.tmp"
        made.write_text(json.dumps((done.returncode, done.stdout, done.stderr)))
        made.rename(folder / f"{number}.json")


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), [json.loads(command) for command in sys.argv[2:]])
