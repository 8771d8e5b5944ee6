"""Carries jobs out side by side, each process on one core of its own; what is done stays done."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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


def cores(most: int) -> list[int]:
    """The cores that this process may use, `most` at the most (0: all)."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return usable[:most] if most else usable


def carry_out(jobs: Sequence[Job], out: Path, most: int = 0, tell: Callable[[str], None] = print) -> None:
    """Runs all jobs that are not done yet, in order, as far as their needs and the cores allow.

    A job's output goes to `WORKDIR.log`. Stopped at any moment, the same call goes on where it was: each run resumes
    from its own checkpoint. Raises JobFailed when a job fails, after those beside it have come to their end; ValueError
    if another study works in `out`, or if a run there was begun with other settings.
    """
    with contextlib.closing(hold_workdir(out)), _terminated_is_interrupted():
        for job in jobs:
            if job.workdir.exists():
                job.begin()
        _carry_out(jobs, most, tell)


def _carry_out(jobs: Sequence[Job], most: int, tell: Callable[[str], None]) -> None:
    done = {job.name for job in jobs if job.done}
    free, failed = cores(most), None
    running: dict[str, tuple[Job, subprocess.Popen[bytes], int, float]] = {}
    todo, started, finished = len(jobs) - len(done), time.monotonic(), 0
    tell(f"{len(jobs)} runs, {len(done)} of them done; {len(free)} at a time")
    try:
        while True:
            while free and failed is None and (job := ready(jobs, done, running)):
                running[job.name] = (job, _start(job, free[0]), free.pop(0), time.monotonic())
            if not running:
                break
            time.sleep(0.2)
            for job, process, core, at in [x for x in running.values() if x[1].poll() is not None]:
                del running[job.name]
                free.append(core)
                if process.returncode or not job.done:
                    failed = failed or job
                    continue
                done.add(job.name)
                finished += 1
                left = (time.monotonic() - started) / finished * (todo - finished)
                tell(f"{job.name}: {time.monotonic() - at:.0f} s; {todo - finished} to go, about {left / 60:.0f} min")
    finally:
        for _, process, _, _ in running.values():
            process.terminate()
        for _, process, _, _ in running.values():
            process.wait()
    if failed is not None:
        last = _log(failed).read_text(errors="replace").strip().splitlines()[-3:]
        raise JobFailed(f"{failed.name} failed; the end of {_log(failed)}: {' / '.join(last)}")


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


def _start(job: Job, core: int) -> subprocess.Popen[bytes]:
    job.begin()
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH", ""))))
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), _XLA)))
    with _log(job).open("ab") as log:
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
    return process
