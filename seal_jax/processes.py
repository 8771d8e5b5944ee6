"""Several processes as one job: how they come together, what they tell each other, and how they end.

jax.distributed is the engine. Every process plays its share of a round's tasks on its own devices and with its own
worlds; then all hold all episodes, in the order of one process, and run the same host code on them: so every process
has the same batch, profile and interface, and the update is one program over the devices of all. With one process
nothing here does anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from seal_jax.files import write_whole
from seal_jax.last_words import lost
from seal_jax.packing import pack, unpack

#: Seconds without a sign of life after which jax takes a process for dead and ends the others. (A process that died in
#: the middle of a computation on CPU is missed at once.)
HEARTBEAT_S = 60
#: Exit code of a process that stopped because another one is gone.
LOST = 3
#: What jax's errors say when a peer is gone: gloo (CPU), NCCL (GPU), and the coordination service.
_SIGNS = ("gloo", "nccl", "closed by peer", "connection reset", "unavailable:", "heartbeat", "coordination", "barrier")


def join(coordinator: str = "", count: int = 0, index: int = -1) -> None:
    """Joins this process to its job; to be called before anything else asks jax for its devices.

    Without arguments jax finds the other processes itself: on a Cloud TPU slice, on GKE, under SLURM and Open MPI.

    Args:
      coordinator: "host:port" of process 0, for processes that are started by hand; `count` and `index` then say how
        many there are and which one this is.

    Raises ValueError, one line, where jax finds no job or the others do not come.
    """
    if bool(coordinator) != (count > 0) or bool(coordinator) != (index >= 0):
        raise ValueError(
            f"--coordinator={coordinator!r}, --process_count={count} and --process_id={index} belong together: give "
            "all three, or none and --distributed alone"
        )
    host, _, port = coordinator.rpartition(":")
    if coordinator and not (host and port.isdecimal() and 0 < int(port) < 2**16 and index < count):
        raise ValueError(
            f"--coordinator={coordinator!r} must be host:port, and --process_id={index} one of 0..{count - 1}"
        )
    # With it jax waits for SIGTERM and asks the job to save at a common step; here SIGTERM ends the process, as always.
    jax.config.update("jax_enable_preemption_service", False)
    given = {"coordinator_address": coordinator, "num_processes": count, "process_id": index} if coordinator else {}
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_S, **given)  # type: ignore[arg-type]

    except Exception as error:
        if coordinator:
            what = f"the {count} processes of --coordinator={coordinator} did not come together"
        else:
            what = (
                "--distributed: jax found no job to join (it knows Cloud TPU, GKE, SLURM and Open MPI); "
                "elsewhere give --coordinator, --process_count and --process_id"
            )
        raise ValueError(f"{what} ({next(iter(str(error).splitlines()), type(error).__name__)})") from error
    devices = Counter(device.process_index for device in jax.devices())
    if len(set(devices.values())) > 1:
        raise ValueError(f"the processes have {[n for _, n in sorted(devices.items())]} devices; each needs as many")


def count() -> int:
    return jax.process_count()


def first() -> bool:
    """Whether this is the process that writes files and talks to people."""
    return jax.process_index() == 0


def share(n: int) -> slice:
    """This process's part of `n` things: contiguous, in process order, as equal as can be."""
    index, count = jax.process_index(), jax.process_count()
    return slice(n * index // count, n * (index + 1) // count)


def exchange(mine: Sequence[Any]) -> list[Any]:
    """The records of all processes, in process order. What `packing.pack` can pack; collective."""
    if jax.process_count() == 1:
        return list(mine)
    return [x for part in _gather(pack(list(mine))) for x in unpack(part)]


class Apart(RuntimeError):
    """The processes of a job do not have the same of something that they need the same of."""


def agree(what: str, value: Any) -> None:
    """Apart on all processes if `value` (JSON) is not the same on all; collective."""
    if jax.process_count() == 1:
        return
    digest = hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).digest()
    others = [i for i, got in enumerate(_gather(digest)) if got != digest]
    if others:
        raise Apart(
            f"the processes of this job have come apart: {what} of process {jax.process_index()} is not that of "
            f"process {others[0]}; start all of them with the same code and command, from the newest checkpoint"
        )


def told_by_first(value: Any) -> Any:
    """Process 0's `value`, on all; collective."""
    return value if jax.process_count() == 1 else unpack(_gather(pack(value))[0])


def check_shared(workdir: Path) -> None:
    """ValueError on all processes unless they see one and the same folder; collective."""
    if jax.process_count() == 1:
        return
    path = workdir / ".shared"
    token = told_by_first(secrets.token_hex(8))
    if first():
        write_whole(path, token)
    told_by_first(None)
    seen = [bool(x) for x in exchange([first() or _holds(path, token)])]
    if first():
        path.unlink()
    if not all(seen):
        raise ValueError(
            f"workdir {workdir} of process {seen.index(False)} is not the folder that process 0 sees; all processes "
            "need one shared folder (NFS, Filestore, a mounted bucket)"
        )


def _holds(path: Path, token: str, patience_s: float = 5.0) -> bool:
    """Network file systems may show a new file late."""
    until = time.monotonic() + patience_s
    while True:
        try:
            if path.read_text(encoding="utf-8") == token:
                return True
        except OSError:
            pass
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)


def _gather(data: bytes) -> list[bytes]:
    """The bytes of every process. Padded to a power of two, so that few sizes are ever compiled."""
    from jax.experimental import multihost_utils

    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).reshape(-1)
    padded = np.zeros(1 << max(12, int(lengths.max() - 1).bit_length()), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:n].tobytes() for row, n in zip(rows, lengths, strict=True)]


@contextmanager
def together(workdir: str | Path, done: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The body of a job. A process that fails takes no leave of the others: it ends at once, so that they notice.

    (jax would otherwise wait at its exit for minutes, and they in the middle of a computation.) A process that fails
    because another one is gone says so in one line and ends with exit code LOST.

    Args:
      done: called before the end; see `last_words.companion`.
    """
    try:
        yield
    except BaseException as error:
        if jax.process_count() == 1:
            done()
            raise
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if lost_peer(error):
            code = LOST
            cause = next(iter(str(error).strip().splitlines()), type(error).__name__)
            print(lost(workdir, f"another process of this job is gone ({cause})"), file=sys.stderr)
        elif not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        done()
        if first():
            time.sleep(1.0)  # the first one coordinates: those who end for the same reason have time to say so
        os._exit(code)
    done()


def lost_peer(error: BaseException) -> bool:
    """Whether an error came of another process's end. By what it says: gloo's is a ValueError or a JaxRuntimeError."""
    return (
        jax.process_count() > 1
        and isinstance(error, (RuntimeError, ValueError))
        and any(s in str(error).lower() for s in _SIGNS)
    )
