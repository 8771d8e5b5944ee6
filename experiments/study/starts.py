"""What the starting policies are like: their scores, and how often they repair a refusal (from their probe)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seal_jax.telemetry.recorder import read_jsonl

#: {"start", "seed", "size", "success": {split: share}, "seconds": of the warm start, "repaired": {"bare": [repaired,
#: refused], "cued": [repaired, refused]}}: turns in which a tool refused a call, and those in which it then took it.
Start = dict[str, Any]


def read_start(workdir: Path, probe: Path, **which: Any) -> Start:
    """Of a finished start and its finished probe; ValueError if their records lack something."""
    metrics: dict[str, float] = {}
    for line in read_jsonl(workdir / "metrics.jsonl"):
        metrics |= line["metrics"]
    (round_1,) = (line["metrics"] for line in read_jsonl(probe / "metrics.jsonl") if line["kind"] == "train")
    try:
        return {
            **which,
            "success": {s: metrics[f"eval/{s}/success"] for s in ("test", "ood", "test_cued")},
            "seconds": json.loads((workdir / "summary.json").read_text())["warm_start/seconds"],
            "repaired": {
                k: [int(round_1[f"refused/{k}/repaired"]), int(round_1[f"refused/{k}"])] for k in ("bare", "cued")
            },
        }
    except KeyError as missing:
        raise ValueError(f"{workdir}: its record has no {missing}; the recipe must report test, ood and cues") from None


def table(starts: Sequence[Start]) -> str:
    """Markdown: one line a start."""
    lines = ["| start | size | seed | test | out of distribution | test with cues | repairs | repairs with cues |"]
    lines.append("| --- " * 8 + "|")
    for s in starts:
        shares = [f"{s['success'][k]:.1%}" for k in ("test", "ood", "test_cued")]
        repaired = ["{} of {}".format(*s["repaired"][k]) for k in ("bare", "cued")]
        lines.append("| " + " | ".join([s["start"], s["size"], str(s["seed"]), *shares, *repaired]) + " |")
    return "\n".join(lines) + "\n"
