"""Carries jobs out side by side, each process on one core of its own; what is done stays done."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.study.jobs import Job, ready
from seal_jax.checkpoints import hold_workdir

#: One thread for each process: two runs on a core each finish sooner than one after the other on both. Large pages save
#: a fifth of a warm start, whose steps touch much fresh memory.
_ONE_CORE = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
_XLA = "--xla_cpu_multi_thread_eigen=false"


class JobFailed(Exception):
    """A job ended with an error; its last lines say why."""


class _Running(NamedTuple):
    job: Job
    process: subprocess.Popen[bytes]
    core: int
    since: float
    log_from: int  # where its own lines begin: earlier attempts have left theirs


def cores(most: int) -> list[int]:
    """The cores that this process may use, `most` at the most (0: all)."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return usable[:most] if most else usable


#: At once, into a file too.
_say = functools.partial(print, flush=True)


def carry_out(jobs: Sequence[Job], out: Path, most: int = 0, tell: Callable[[str], None] = _say) -> None:
    """Runs all jobs that are not done yet, in order, as far as their needs and the cores allow.

    A job's output goes to `WORKDIR.log`. Stopped at any moment, the same call goes on where it was: each run resumes
    from its own checkpoint. Raises JobFailed when a job fails, after those beside it have come to their end; ValueError
    if another study works in `out`, or if a run there was begun with other settings.
    """
    with contextlib.closing(hold_workdir(out, "--out")), _terminated_is_interrupted():
        for job in jobs:
            job.check_settings()
        _carry_out(jobs, most, tell)


def _carry_out(jobs: Sequence[Job], most: int, tell: Callable[[str], None]) -> None:
    done = {job.name for job in jobs if job.done}
    free = cores(most)
    at_once = len(free)
    running: dict[str, _Running] = {}
    failed: _Running | None = None
    seconds: dict[str, list[float]] = {}
    tell(f"{len(jobs)} runs, {len(done)} of them done; {at_once} at a time")
    try:
        while True:
            while free and failed is None and (job := ready(jobs, done, running)):
                running[job.name] = _start(job, free.pop(0))
            if not running:
                break
            time.sleep(0.2)
            for run in [x for x in running.values() if x.process.poll() is not None]:
                name = run.job.name
                del running[name]
                free.append(run.core)
                if run.process.returncode or not run.job.done:
                    failed = failed or run
                    continue
                done.add(name)
                took = time.monotonic() - run.since
                seconds.setdefault(run.job.kind, []).append(took)
                left = [job for job in jobs if job.name not in done]
                expected = _expected(left, seconds)
                about = "" if expected is None else f", about {expected / 60 / at_once:.0f} min"
                tell(f"{name}: {took:.0f} s; {len(left)} to go{about}")
    finally:
        for run in running.values():
            run.process.terminate()
        for run in running.values():
            run.process.wait()
    if failed is not None:
        raise JobFailed(_failure(failed))


def _expected(jobs: Sequence[Job], seconds: Mapping[str, Sequence[float]]) -> float | None:
    """The seconds of all these jobs, each as those of its kind; None while a kind of them is not known (a start from
    random weights takes ten times an arm)."""
    mean = {kind: math.fsum(some) / len(some) for kind, some in seconds.items()}
    if any(job.kind not in mean for job in jobs):
        return None
    return math.fsum(mean[job.kind] for job in jobs)


def _failure(run: _Running) -> str:
    code, log = run.process.returncode, _log(run.job)
    how = f"signal {-code}" if code < 0 else f"exit code {code}" if code else "it wrote no summary.json"
    said = log.read_bytes()[run.log_from :].decode(errors="replace").strip().splitlines()[-3:]
    return f"{run.job.name} failed ({how}); the end of {log}: {' / '.join(said) or 'it said nothing'}"


@contextlib.contextmanager
def _terminated_is_interrupted() -> Iterator[None]:
    """SIGTERM as KeyboardInterrupt: else the runs would go on without their study."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log(job: Job) -> Path:
    return job.workdir.with_name(job.workdir.name + ".log")


def _start(job: Job, core: int) -> _Running:
    job.begin()
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), _XLA)))
    with _log(job).open("ab") as log:
        log_from = log.tell()
        process = subprocess.Popen(
            job.argv,
            cwd=root,
            env={**os.environ, **_ONE_CORE, "XLA_FLAGS": flags, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # it has ended already, or may not be moved
            os.sched_setaffinity(process.pid, {core})
    return _Running(job, process, core, time.monotonic(), log_from)
