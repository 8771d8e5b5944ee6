"""Runs that were made elsewhere: a folder with their report (records.jsonl.gz, starts.json) stands in for theirs.

So a study moves to another machine, several machines share one, and a published row is checked without the runs
beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.study import records, starts
from experiments.study.jobs import PROBE, Job, needed, start_name


@dataclass(frozen=True)
class Known:
    """Records and starts by the names of their jobs, and the settings that each known job had."""

    runs: dict[str, records.Record] = field(default_factory=dict)
    starts: dict[str, starts.Start] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    source: Path = Path()

    @classmethod
    def read(cls, folder: Path) -> Known:
        """ValueError or OSError in one line if there are no such files, or damaged ones."""
        runs = {f"{_start(x)}/{x['arm']}": x for x in records.load(folder / "records.jsonl.gz")}
        made = {_start(x): x for x in starts.load(folder / "starts.json")}
        settings = {name: run["settings"] for name, run in runs.items()}
        settings |= {name: x["settings"] for name, x in made.items()}
        settings |= {name + PROBE: x["probe_settings"] for name, x in made.items()}
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
    return start_name(which["start"], which["seed"], which["size"])
