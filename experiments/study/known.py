"""Runs that were made elsewhere: a folder with their report (records.jsonl.gz, starts.json) stands in for theirs.

So a study moves to another machine, several machines share one, and a published row is checked without the runs beside
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.study import records, starts
from experiments.study.jobs import Job, needed, start_name


@dataclass(frozen=True)
class Known:
    """Records and starts by the names of their jobs, and the settings that each known job had."""

    runs: dict[str, records.Record] = field(default_factory=dict)
    starts: dict[str, starts.Start] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    source: Path = Path()

    @classmethod
    def read(cls, folder: Path) -> Known:
        """ValueError or OSError in one line if there are no such files, or damaged ones, or a run is there twice."""
        if not folder.is_dir():
            raise ValueError(f"--known={folder}: it takes the folder of a report; there is none of that name")
        runs: dict[str, records.Record] = {}
        for run in records.load(file := folder / "records.jsonl.gz"):
            name = f"{_start(run)}/{run['arm']}"
            if name in runs:
                raise ValueError(f"{file}: {name} has two records; keep one of them")
            runs[name] = run
        made = {_start(x): x for x in starts.load(folder / "starts.json")}
        settings = {name: run["settings"] for name, run in runs.items()}
        for name, start in made.items():
            settings |= {name: start["settings"], f"{name}.probe": start["probe_settings"]}
        return cls(runs, made, settings, folder)

    def left(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs of which nothing is known, and those that they need.

        Raises:
          ValueError: a job is known with other settings than it has now.
        """
        for job in jobs:
            if self.settings.get(job.name, job.settings) != job.settings:
                raise ValueError(
                    f"{self.source}: {job.name} was made with other settings than it has now; go back to those, or "
                    "leave --known out"
                )
        return needed(jobs, {job.name for job in jobs} - self.settings.keys())


def _start(which: records.Record | starts.Start) -> str:
    """The name of the start that it is of."""
    return start_name(which["start"], which["seed"], which["size"])
