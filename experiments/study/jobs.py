"""The runs of a study as jobs: what each is called, what it needs, and the command that carries it out.

    OUT/starts/never-0-small          warm start of seed 0, evaluated
    OUT/starts/never-0-small.probe    how often it repairs a refusal
    OUT/runs/never-0-small/half       the arm "half" from that start

A job is `python -m seal_jax.main` with a recipe and a workdir, so any row of the study is repeated by one command.
Beside its workdir lies WORKDIR.job, which says with what settings it was begun: a run of other settings is not taken
for this one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from seal_jax.files import write_whole

#: The starting policies that arms are chosen and compared from, and all there are, rarest repairs first.
START_NAMES = ("never", "sometimes")
ALL_STARTS = ("never", "seldom", "sometimes")
SIZES = ("small", "large")
#: Seeds from here on are fresh: all arms choose one on the seeds below, and these two, it and vanilla, then meet here.
FRESH = 100


@dataclass(frozen=True)
class Job:
    """One process. `which` says what it is of: {"start", "seed", "size"}, and "arm" for an arm's run.
    `settings`: a digest of its recipe's config and its flags."""

    name: str
    workdir: Path
    argv: tuple[str, ...]
    kind: Literal["start", "probe", "arm"] = "arm"
    needs: tuple[str, ...] = ()  # names of jobs
    which: dict[str, Any] = field(default_factory=dict)
    settings: str = ""

    @property
    def done(self) -> bool:
        """The summary is the last thing that a run writes."""
        return (self.workdir / "summary.json").exists()

    def elsewhere(self, workdir: Path, **changes: Any) -> Job:
        """The same run in another folder."""
        argv = tuple(f"--workdir={workdir}" if a.startswith("--workdir=") else a for a in self.argv)
        return replace(self, workdir=workdir, argv=argv, **changes)

    def begin(self) -> None:
        """Marks the workdir as this job's; ValueError if it is another's."""
        self.check_settings()
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._mark, self.settings + "\n")

    def check_settings(self) -> None:
        """ValueError if another recipe or other flags began what is in the workdir."""
        begun = self._mark.read_bytes().strip() if self._mark.exists() else b""
        if self.workdir.exists() and begun != self.settings.encode():
            # A start that is made anew is another one.
            also = " and all that began with it" if self.kind == "start" else ""
            raise ValueError(
                f"{self.workdir} was begun with other settings than {self.name} has now; choose another --out, go "
                f"back to those settings, or remove that folder{also} to run it anew"
            )

    @property
    def _mark(self) -> Path:
        return self.workdir.with_name(self.workdir.name + ".job")


@dataclass(frozen=True)
class Study:
    """What is to be run: `arms` of `recipe` (FILE.py) from each start, for each seed. `flags` go to every run,
    `arm_flags` to those of the arms. `config_of` gives the recipe's config of a setting; paths are absolute, since
    runs are started from the root of the repository."""

    recipe: Path
    out: Path
    config_of: Callable[[str], ConfigDict]
    arms: tuple[str, ...]
    starts: tuple[str, ...] = START_NAMES
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    size: str = "small"
    flags: tuple[str, ...] = ()
    arm_flags: tuple[str, ...] = ()

    def jobs(self) -> list[Job]:
        """All runs, in the order in which they are worth having: one seed whole after the other."""
        return [job for seed in self.seeds for job in (*self._making_starts(seed), *self._arms(seed))]

    def _making_starts(self, seed: int) -> Iterator[Job]:
        never = self._name("never", seed)
        fresh = "never" if self.size == "small" else f"never_{self.size}"
        yield self._job("start", never, fresh, {"start": "never", "seed": seed})
        for start in (s for s in self.starts if s != "never"):  # they are "never", trained a little further
            name = self._name(start, seed)
            yield self._job("start", name, start, {"start": start, "seed": seed}, needs=(never,))
        for start in self.starts:
            name = self._name(start, seed)
            yield self._job("probe", f"{name}.probe", "probe", {"start": start, "seed": seed}, needs=(name,))

    def _arms(self, seed: int) -> Iterator[Job]:
        for arm in self.arms:
            for start in self.starts:
                name = self._name(start, seed)
                yield self._job("arm", f"{name}/{arm}", arm, {"start": start, "arm": arm, "seed": seed}, needs=(name,))

    def _name(self, start: str, seed: int) -> str:
        return start_name(start, seed, self.size)

    def _job(
        self,
        kind: Literal["start", "probe", "arm"],
        name: str,
        setting: str,
        which: dict[str, Any],
        needs: tuple[str, ...] = (),
    ) -> Job:
        arm = kind == "arm"
        workdir = self.out / ("runs" if arm else "starts") / name
        flags = [f"--config.seed={which['seed']}", *self.flags, *(self.arm_flags if arm else ())]
        config = self.config_of(setting)
        config.policy.path = ""  # where the start lies: a flag, below
        told = "\n".join([config.to_json(sort_keys=True), *needs, *flags])
        argv = [sys.executable, "-m", "seal_jax.main", f"--config={self.recipe}:{setting}"]
        argv += [f"--workdir={workdir}", f"--compilation_cache={self.out / 'compiled'}", *flags]
        if needs:
            argv.append(f"--config.policy.path={self.out / 'starts' / needs[0] / 'start'}")
        which = {**which, "size": self.size}
        return Job(name, workdir, tuple(argv), kind, needs, which, hashlib.sha256(told.encode()).hexdigest())


def start_name(start: str, seed: int, size: str) -> str:
    """Of a start; a run of an arm is called by it and the arm."""
    return f"{start}-{seed}-{size}"


def needed(jobs: Sequence[Job], names: Collection[str]) -> list[Job]:
    """The jobs of these names and all that they wait for, in their order; what is needed comes before."""
    wanted = {*names}
    for job in reversed(jobs):
        if job.name in wanted:
            wanted.update(job.needs)
    return [job for job in jobs if job.name in wanted]


def ready(jobs: Iterable[Job], done: Collection[str], running: Collection[str]) -> Job | None:
    """The first job that waits for nothing but a free core."""
    for job in jobs:
        if job.name not in done and job.name not in running and set(job.needs) <= set(done):
            return job
    return None
