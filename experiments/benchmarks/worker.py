"""One contestant in a process of its own, stepped from outside over its standard streams.

The process loads, compiles and warms up, says so, then times one step per line "step" and ends on "end". So the
contestants' steps can alternate, and a machine's other work falls on all of them alike. Imports nothing outside the
standard library: peers run it with their own Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_MARK = "@@"  # what else a library prints is not for us
ROOT = Path(__file__).parents[2]


# --- inside --------------------------------------------------------------------------------------------------------
def say(message: dict[str, Any]) -> None:
    print(_MARK + json.dumps(message), flush=True)


def serve(step: Callable[[], dict[str, Any] | None], facts: dict[str, Any]) -> None:
    """`step` does the work once and returns when it is done, with what it wants to add; it has run once before."""
    say({**facts, "warm_mib": peak_mib()})
    for line in sys.stdin:
        if line.strip() == "end":
            break
        started = time.perf_counter()
        more = step()
        say({"seconds": time.perf_counter() - started, **(more or {})})
    say({"peak_mib": peak_mib()})


def peak_mib() -> float:
    """This process's peak resident memory. Not getrusage's: after a fork and exec that is at least the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) / 2**10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# --- outside -------------------------------------------------------------------------------------------------------
class Failed(RuntimeError):
    """A contestant that ended before it was told to."""


class Worker:
    """A contestant seen from outside. `command` is what follows `python`; its stderr goes to `log`."""

    def __init__(self, python: str, command: Sequence[str], log: Path, env: dict[str, str]) -> None:
        self.log = log
        self._process = subprocess.Popen(
            [python, *command], cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log.open("w"),
        )  # fmt: skip

    def ready(self) -> dict[str, Any]:
        return self._hear()

    def step(self) -> dict[str, Any]:
        return self._ask("step")

    def all(self) -> list[dict[str, Any]]:
        """Everything that a contestant without turns says before it ends."""
        said = []
        while True:
            try:
                said.append(self._hear())
            except Failed:
                if self._process.returncode:
                    raise
                return said

    def end(self) -> dict[str, Any]:
        """The contestant's last words; the process is gone afterwards."""
        last = self._ask("end")
        self._process.communicate()
        return last

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the next line tells why
        return self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        code = self._process.wait()
        said = self.log.read_text(errors="replace").strip().splitlines()
        raise Failed(f"ended with code {code}: {said[-1] if said else 'nothing on stderr'} (all in {self.log})")
