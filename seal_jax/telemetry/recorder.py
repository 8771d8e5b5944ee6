"""The run on disk: metrics, interfaces and sampled trajectories, appended round by round and cut back on a resume.

    workdir/metrics.jsonl            one strict JSON object per line: {"round", "kind", "protocol", "wall_s", "time",
                                     "metrics", "cues"?}
    workdir/interface.jsonl          every Ω_t in words, and the profile of its round, which Ω_{t+1} is made from
    workdir/trajectories/            00003.train.jsonl.gz: sampled rows of round 3, exact ids, sources, text, labels
    workdir/results/                 reported BFCL episodes for `bfcl evaluate` (written by evaluation/results.py)
    workdir/tb/                      TensorBoard event files, always a copy of metrics.jsonl
    workdir/provenance.jsonl         one line per start of the run: versions, device, seed, command
    workdir/summary.json             written at the end

JSON has no NaN: a non-finite number is written as null and named in the line's "nonfinite" field.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seal_jax.files import write_whole
from seal_jax.types import Diagnosis, Protocol, Trajectory, Verdict

#: The files of `trajectories()`: round, kind, and perhaps what a crash left of one.
_TRAJECTORIES = re.compile(r"(\d{5,})\.([a-z]+)(?:\.\w+)?\.jsonl\.gz(?:\.tmp)?")

Row = tuple[Trajectory, Verdict, Diagnosis]


class RunRecorder:
    """Writes a run's record.

    Args:
      workdir: a local folder (created).
      first_round: the first round that this process will play. Whatever an earlier process wrote for this round or a
        later one is dropped first, so a resumed run holds each round once. Record all of a round before saving its
        checkpoint; a resume from round r then starts with first_round = r + 1. The reports after training (kind
        "report", round > 0) are dropped too: the run makes them anew at its end, perhaps of another round.
      trajectories_per_round: at most so many rows are kept per round and kind, evenly spaced; None keeps all.
      tensorboard: also write event files.
      enabled: False makes every method do nothing (all processes but the first).
      wall: seconds of the run so far; `PhaseTimer.wall` keeps them through a resume.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        first_round: int = 0,
        trajectories_per_round: int | None = 16,
        tensorboard: bool = True,
        enabled: bool = True,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self.workdir = Path(workdir)
        self.enabled = enabled
        self._limit = trajectories_per_round
        start = time.monotonic()
        self._wall = wall if wall is not None else lambda: time.monotonic() - start
        self._board: Any = None
        self._files: dict[str, Any] = {}
        if not enabled:
            return
        (self.workdir / "trajectories").mkdir(parents=True, exist_ok=True)
        # All is read before any is cut: a damaged line stops the start with nothing lost.
        names = ("metrics.jsonl", "interface.jsonl")
        kept = {self.workdir / name: _kept_lines(self.workdir / name, first_round) for name in names}
        for path, lines in kept.items():
            write_whole(path, "".join(_line(line) for line in lines))
            self._files[path.name] = path.open("a", encoding="utf-8")
        for path in (self.workdir / "trajectories").iterdir():
            ours = _TRAJECTORIES.fullmatch(path.name)  # any other file is its owner's
            if ours and not _kept(int(ours[1]), ours[2], first_round):
                path.unlink()
        if tensorboard:
            self._open_board()

    # --- round by round ----------------------------------------------------------------------------------------------
    def record(
        self,
        round: int,
        values: Mapping[str, Any],
        *,
        kind: str = "train",
        cues: Sequence[str] | None = None,
        protocol: Protocol = "seal",
    ) -> None:
        """Appends one line of metrics; see `seal_jax.telemetry` for the names. `kind` is "train", "eval" (a
        validation) or "report" (the reported splits, before and after training).

        `cues` are the cues that were active in this round (the figures draw them); `protocol` is how its episodes were
        played.
        """
        if not self.enabled:
            return
        line: dict[str, Any] = {"round": int(round), "kind": kind, "protocol": protocol}
        line |= {"wall_s": self._wall(), "time": time.time()}
        line["metrics"] = {name: _number(name, value) for name, value in values.items()}
        if cues is not None:
            line["cues"] = list(cues)
        self._append("metrics.jsonl", line)
        if self._board is not None:
            self._to_board(line)
            self._board.flush()

    def interface(self, round: int, interface: Mapping[str, Any], profile: Mapping[str, Any] | None = None) -> None:
        """Appends Ω_t (`Interface.describe()`) and the profile counted in round t, from which Ω_{t+1} is evolved."""
        if self.enabled:
            self._append("interface.jsonl", {"round": int(round), "interface": interface, "profile": profile})

    def trajectories(
        self,
        round: int,
        rows: Sequence[Row],
        *,
        kind: str = "train",
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> Path | None:
        """Writes sampled rows of a round to a file of their own (replaced if it is there); returns its path."""
        if not self.enabled or not rows:
            return None
        path = self.workdir / "trajectories" / f"{round:05d}.{kind}.jsonl.gz"
        text = "".join(to_json(trajectory_record(*row, decode=decode)) + "\n" for row in spread(rows, self._limit))
        scratch = path.with_name(path.name + ".tmp")
        # mtime=0: the same rows give the same bytes.
        with scratch.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed:
            packed.write(text.encode("utf-8", "backslashreplace"))  # a lone surrogate as its JSON escape
        scratch.replace(path)
        return path

    # --- once --------------------------------------------------------------------------------------------------------
    def provenance(self, record: Mapping[str, Any]) -> None:
        """Appends where this process runs (`seal_jax.provenance.provenance()`); one line per start."""
        if self.enabled:
            with (self.workdir / "provenance.jsonl").open("a", encoding="utf-8") as file:
                file.write(to_json(record) + "\n")

    def summary(self, record: Mapping[str, Any]) -> None:
        """Writes summary.json, whole or not at all."""
        if self.enabled:
            path = self.workdir / "summary.json"
            write_whole(path, to_json(record, indent=2) + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._board is not None:
            self._board.close()
            self._board = None

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        file = self._files[name]
        file.write(to_json(line) + "\n")
        file.flush()

    def _open_board(self) -> None:
        """Event files are made anew from the kept lines of metrics.jsonl, so a resume cannot leave a round in twice."""
        from tensorboardX import SummaryWriter

        folder = self.workdir / "tb"
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._board = SummaryWriter(logdir=str(folder))
        for line in read_jsonl(self.workdir / "metrics.jsonl"):
            self._to_board(line)
        self._board.flush()

    def _to_board(self, line: Mapping[str, Any]) -> None:
        for name, value in line["metrics"].items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                self._board.add_scalar(name, value, global_step=line["round"], walltime=line["time"])


# --- trajectories ----------------------------------------------------------------------------------------------------
def trajectory_record(
    trajectory: Trajectory,
    verdict: Verdict,
    diagnosis: Diagnosis,
    *,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> dict[str, Any]:
    """One row as JSON: exact ids and log-probs by segment (source "sampled" is the loss mask), text, calls, labels.

    `decode` (Tokenizer.decode) adds each segment's text for people; the ids are what counts.
    """
    record = asdict(trajectory)
    if decode is not None:
        record["prompt_text"] = decode(trajectory.prompt_ids)
        for segment, plain in zip(record["segments"], trajectory.segments, strict=True):
            segment["text"] = decode(plain.ids)
    record["reward"], record["reason"] = verdict.reward, verdict.reason
    record["labels"] = [asdict(label) for label in diagnosis.labels]
    record["passed"] = [turn.passed for turn in verdict.turns]
    return record


def read_trajectories(path: str | Path) -> list[dict[str, Any]]:
    """The rows of one trajectories file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def spread(rows: Sequence[Any], limit: int | None) -> list[Any]:
    """At most `limit` rows, one of each of `limit` equal parts of the list, always the same ones.

    Which one of its part is drawn: at even steps, rollouts that see cues (every second one) could all be missed.
    """
    if limit is None or len(rows) <= limit:
        return list(rows)
    draw = random.Random(0)
    return [rows[draw.randrange(i * len(rows) // limit, (i + 1) * len(rows) // limit)] for i in range(limit)]


# --- strict JSON lines -----------------------------------------------------------------------------------------------
def to_json(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Strict JSON of a record: a non-finite float becomes null, and "nonfinite" says which one was what."""
    nonfinite: dict[str, str] = {}
    clean = _strict(record, "", nonfinite)
    if nonfinite:
        clean["nonfinite"] = nonfinite
    return json.dumps(clean, ensure_ascii=False, allow_nan=False, indent=indent)


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a JSON lines file; a last line cut by a crash is left out. Nothing if there is no file."""
    path = Path(path)
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line.decode("utf-8"))
            except ValueError as error:  # not JSON, or not UTF-8
                raise ValueError(f"{path}:{number}: not a JSON object ({error}); remove the line") from error
            if not isinstance(value, dict):
                raise ValueError(f"{path}:{number}: not a JSON object ({type(value).__name__}); remove the line")
            yield value


def _strict(value: Any, where: str, nonfinite: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(item, f"{where}/{key}".lstrip("/"), nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item, f"{where}/{i}", nonfinite) for i, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted(_strict(item, where, nonfinite) for item in value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and jax scalars and arrays, without importing either
        return _strict(value.tolist(), where, nonfinite)
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[where] = repr(value)
        return None
    return str(value)  # e.g. a world's own object in a call's arguments: readable is all that is asked here


def _number(name: str, value: Any) -> float | int:
    """A metric as a plain number; ValueError naming the metric for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, (int, float)):
        raise ValueError(f"metric {name!r} is {value!r}, not a number; record scalars")
    return value


def _kept(round: int, kind: str | None, first_round: int) -> bool:
    """Whether a resume keeps what was written for a round; see `RunRecorder`."""
    return round < first_round and not (kind == "report" and round > 0)


def _kept_lines(path: Path, first_round: int) -> list[dict[str, Any]]:
    """The lines that a resume keeps; a last one that a crash cut short is not among them."""
    kept = []
    for number, line in enumerate(read_jsonl(path), 1):
        for key, kind in (("round", int), (path.stem, dict)):  # metrics.jsonl holds metrics, interface.jsonl interfaces
            if not isinstance(line.get(key), kind):
                raise ValueError(f"{path}:{number}: the line has no {key}; remove the line")
        if _kept(line["round"], line.get("kind"), first_round):
            kept.append(line)
    return kept


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
