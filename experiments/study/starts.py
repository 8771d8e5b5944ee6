"""What the starting policies are like: their scores, and how often they repair a refusal (from their probe)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.study.records import AMOUNT, COUNT, DAMAGE, NAME, SETTINGS, SHARES, check, of_fields, refuse
from seal_jax.files import read_object
from seal_jax.telemetry.recorder import read_jsonl

#: {"start", "seed", "size", "settings", "probe_settings": digests (`Job.settings`), "success": {split: share},
#: "seconds": of the warm start, "repaired": {"bare": [repaired, refused], "cued": [repaired, refused]}}: turns in which
#: a tool refused a call, and those in which it then took it.
Start = dict[str, Any]


_SPLITS, _ROWS = ("test", "ood", "test_cued"), ("bare", "cued")
_PAIR = {"type": "array", "items": COUNT, "minItems": 2, "maxItems": 2}
_FIELDS = {
    **{"start": NAME, "seed": COUNT, "size": NAME},
    **{"settings": SETTINGS, "probe_settings": SETTINGS},
    "success": {**SHARES, "required": list(_SPLITS)},
    "seconds": AMOUNT,
    "repaired": {"type": "object", "required": list(_ROWS), "additionalProperties": _PAIR},
}
_SCHEMA = {"type": "array", "items": of_fields(_FIELDS)}


def read_start(workdir: Path, probe: Path, **which: Any) -> Start:
    """Of a finished start and its finished probe; ValueError if their records lack something."""
    mend = "delete the folders and run the study again"
    summary = read_object(workdir / "summary.json", mend)
    metrics: dict[str, float] = {}
    try:
        for line in (*read_jsonl(workdir / "metrics.jsonl"), *read_jsonl(probe / "metrics.jsonl")):
            metrics = {**metrics, **line["metrics"]}
        found = {
            **which,
            "success": {s: metrics[f"eval/{s}/success"] for s in _SPLITS},
            "seconds": summary["warm_start/seconds"],
            "repaired": {k: [int(metrics[f"refused/{k}/repaired"]), int(metrics[f"refused/{k}"])] for k in _ROWS},
        }
    except KeyError as missing:
        raise ValueError(
            f"{workdir}: it or its probe has no {missing}; the recipe must report test, ood and cues; if it does, "
            f"{mend}"
        ) from None
    except DAMAGE as error:
        raise ValueError(f"{workdir}: its record is damaged ({type(error).__name__}: {error}); {mend}") from error
    check(found, of_fields(_FIELDS), workdir, mend)
    return found


def load(path: Path) -> list[Start]:
    """The starts that a report was written with; none if there is no such file. ValueError if it is damaged."""
    mend = "take it anew from where the records came from, or remove it to report without it"
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_bytes().decode(), parse_constant=refuse)
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {mend}") from error
    check(found, _SCHEMA, path, mend)
    return found


def table(starts: Sequence[Start]) -> str:
    """Markdown: one line a start."""
    lines = ["| start | size | seed | test | out of distribution | test with cues | repairs | repairs with cues |"]
    lines.append("| --- " * 8 + "|")
    for s in starts:
        shares = [f"{s['success'][k]:.1%}" for k in _SPLITS]
        repaired = ["{} of {}".format(*s["repaired"][k]) for k in _ROWS]
        lines.append("| " + " | ".join([s["start"], s["size"], str(s["seed"]), *shares, *repaired]) + " |")
    lines += ["", "Test with cues: of 100 of its tasks. Repairs: turns with a refused call that was then made right."]
    return "\n".join(lines) + "\n"
