"""What is said when a job of several processes has lost one: in one line, whatever ended this process.

jax itself ends the processes that are left when the first one (which coordinates) or a silent one is gone: from C++,
with a stack trace and no way to say anything from here. So a process of such a job has a companion, forked before jax
is there, which does nothing but wait until the process is over, and speaks if it went without a word.

No jax here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path


def newest_checkpoint(workdir: str | Path) -> int | None:
    """The newest round in workdir/checkpoints, by the folders' names; None where there is none (or it is no folder)."""
    try:
        rounds = [int(p.name) for p in (Path(workdir) / "checkpoints").iterdir() if p.name.isdecimal() and p.is_dir()]
    except OSError:
        return None
    return max(rounds, default=None)


def lost(workdir: str | Path, what: str = "another process of this job is gone") -> str:
    """The line: what happened, what is kept, what to do."""
    newest = newest_checkpoint(workdir)
    kept = f"no checkpoint yet in {workdir}" if newest is None else f"checkpoint of round {newest} is in {workdir}"
    return f"{what}; {kept}; start all processes again with the same command"


def companion(workdir: str | Path) -> Callable[[], None]:
    """Forks the companion; the function returned tells it that this process has ended in an orderly way.

    Only where processes can be forked; elsewhere nothing happens.
    """
    if not hasattr(os, "fork"):
        return lambda: None
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        heard = b""
        while part := os.read(read, 64):
            heard += part
        if not heard:  # the other end is closed: the process is over
            gone = "this process was ended from outside, or by jax because another process is gone or never came"
            os.write(2, f"{lost(workdir, gone)}\n".encode())
        os._exit(0)
    os.close(read)
    told = False

    def done() -> None:
        nonlocal told
        if not told:
            told = True
            with contextlib.suppress(OSError):  # the companion may have been killed
                os.write(write, b"done")
            os.close(write)

    return done
