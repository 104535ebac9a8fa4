"""A planning process: receives windows, solves them, sends the plans back. It imports no torch.

``loaders/planning.py`` starts it as ``python -m equipoise.samplers.planner FD PARENT`` and talks to it over the socket it
inherits. A program of its own, and no ``multiprocessing`` worker, because that would run the trainer's script again in
every planner: seconds of imports, and an endless loop where the script has no ``if __name__ == "__main__":``. Here that
happens only where the solver itself comes from the script, such as a cost function that is defined in it.

Cost: 0.6 s from start to the first plan: half of it imports numba, half loads compiled kernels. 0.1 GB of memory.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .admission import Window
    from .plan import StepPlan

_PR_SET_PDEATHSIG = 1
_SCRIPT = (
    "__mp_main__"  # what multiprocessing calls the script in a child: its guard keeps training from starting there
)


def serve(descriptor: int, parent: int) -> None:
    """Answer requests until the other end is closed, or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle; it ends us
    _die_with(parent)
    pipe, planner = Connection(descriptor), Planner()
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(planner.answer(request))


class Planner:
    """Solves with the last solver it was sent."""

    def __init__(self) -> None:
        self._solver: Callable[[Window], StepPlan] | None = None

    def answer(self, request: bytes) -> bytes:
        """The pickled (plan, seconds, None), or (None, 0.0, (whether it was a ValueError, text, traceback)).

        request: pickled (the pickled solver, or None for the last one; the trainer's script; a window).
        """
        try:
            packed, script, window = pickle.loads(request)
            if packed is not None:
                self._solver = load_solver(packed, script)
            assert self._solver is not None
            begin = time.perf_counter()
            plan = self._solver(window)
            return pickle.dumps((plan, time.perf_counter() - begin, None), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            return pickle.dumps((None, 0.0, (*describe(error), traceback.format_exc())))


def describe(error: Exception) -> tuple[bool, str]:
    """Whether it is a ValueError, and what to tell about it."""
    if isinstance(error, ValueError):
        return True, str(error)
    return False, f"{type(error).__name__}: {error}"


@dataclass(frozen=True, kw_only=True)
class Script:
    """The program that trains, and how it was called: what a planner finds it by."""

    module: str | None
    path: str | None
    arguments: tuple[str, ...]

    @staticmethod
    def running() -> Script:
        """The script of this process, by module (``python -m``) or by path; neither in an interactive session."""
        main = sys.modules["__main__"]
        spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        return Script(
            module=spec and spec.name, path=path and os.path.abspath(path), arguments=tuple(sys.argv)
        )  # fmt: skip

    def run(self) -> types.ModuleType:
        """Run it as multiprocessing's spawn would: a guarded ``__main__`` does not start."""
        sys.argv[:] = self.arguments
        if self.module:
            found = runpy.run_module(self.module, run_name=_SCRIPT, alter_sys=True)
        elif self.path:
            found = runpy.run_path(self.path, run_name=_SCRIPT)
        else:
            raise ValueError(
                "the solver takes something from an interactive session, which a planning process cannot see: put it (the "
                "cost function, most likely) into a module, or plan with processes=0"
            )
        module = types.ModuleType(_SCRIPT)
        module.__dict__.update(found)
        return module


def load_solver(packed: bytes, script: Script) -> Callable[[Window], StepPlan]:
    """Unpickle a solver; what it takes from the trainer's script is looked up in a second run of that."""
    return _Unpickler(io.BytesIO(packed), script).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, script: Script) -> None:
        super().__init__(file)
        self._script = script

    def find_class(self, module: str, name: str) -> Any:
        if module in ("__main__", _SCRIPT):
            if sys.modules[_SCRIPT] is sys.modules["__main__"]:  # multiprocessing's alias: not run yet
                sys.modules[_SCRIPT] = self._script.run()
            module = _SCRIPT
        return super().find_class(module, name)


def _die_with(parent: int) -> None:
    """Have the kernel end this process with the thread that started it, whatever holds the GIL here at the time.

    Elsewhere than on Linux a planner ends when it next looks for a request.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it was quicker


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
