"""What the study keeps of a run: one JSON object, made from the run's own record (metrics.jsonl, interface.jsonl).

    {"start", "arm", "seed", "size": which run it was
     "rounds": trained, "reported_round": the round chosen on validation
     "success": {"test", "ood", "test_cued"}, shares of tasks; "by_category": {split: {category: share}}
     "cued_bonus": success with cues minus success without, on the test tasks that were played both ways
     "n_test": episodes of test, "n_error": of these, how many met a refusal, "after_error": share of those that
        succeeded
     "validation": [[round, share], ...]
     "cost": {"episodes", "sampled_tokens", "processed_tokens", "seconds"}, of training (rollouts and updates) alone
     "curves": {metric: one value a round, null where there was none}, see CURVES
     "cues": one list of active cues a round}

Everything but `seconds` is a function of the start, the arm and the seed on one kind of machine.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from seal_jax.files import read_object, write_whole
from seal_jax.telemetry.recorder import read_jsonl
from seal_jax.types import EXCLUDED_LABELS, LABELS

Record = dict[str, Any]
#: Labels that say something of the policy.
COUNTED = [label for label in LABELS if label not in EXCLUDED_LABELS]
#: Metrics of a round that the study draws, tabulates or explains results by.
CURVES = (
    *("groups/informative", "groups/all_fail", "weight/gain"),
    *("refused/bare", "refused/bare/repaired", "refused/cued", "refused/cued/repaired", "train/context_limit_cued"),
    *(f"profile/{label}" for label in COUNTED),
    *(f"advantage_mass/{label}" for label in COUNTED),
)
#: Phases of a round that are its own, beside its rollouts. (An evaluation decodes too, in a later round's lap.)
_JUDGED_AND_LEARNED = ("diagnosis", "update")


def read_run(workdir: Path, **which: Any) -> Record:
    """The record of a finished run; `which` names it (start, arm, seed, size). ValueError if it is not finished."""
    mend = "delete the folder and run the study again"
    if not (workdir / "summary.json").exists():
        raise ValueError(f"{workdir}: no summary.json, so this run is not finished; run the study again")
    summary, config = (read_object(workdir / name, mend) for name in ("summary.json", "config.json"))
    lines = list(read_jsonl(workdir / "metrics.jsonl"))
    rounds = [line for line in lines if line["kind"] == "train"]
    if summary["round"] != len(rounds):  # it went on after its end, and was stopped
        raise ValueError(
            f"{workdir}: summary.json is of round {summary['round']}, metrics.jsonl of {len(rounds)}, so this run is "
            "not finished; run the study again"
        )
    reports: dict[str, float] = {}
    for line in lines:
        if line["kind"] == "report":
            reports |= line["metrics"]
    bare = reports.get("eval/test_cued/success_bare")
    splits = [name for name in ("test", "ood", "test_cued") if f"eval/{name}/success" in reports]

    def total(name: str) -> float:
        return sum(line["metrics"].get(name, 0.0) for line in rounds)

    played = sum(x["metrics"]["rollout/processed_tokens"] / x["metrics"]["rollout/processed_per_s"] for x in rounds)

    return {
        **which,
        "rounds": len(rounds),
        "reported_round": summary["reported_round"],
        "success": {s: reports[f"eval/{s}/success"] for s in splits},
        "by_category": {
            s: {n.rsplit("/", 1)[1]: v for n, v in reports.items() if n.startswith(f"eval/{s}/success/")}
            for s in splits
        },
        "cued_bonus": None if bare is None else reports["eval/test_cued/success"] - bare,
        "after_error": reports.get("eval/test/success_after_error"),
        "n_error": reports.get("eval/test/n_error"),
        "n_test": reports.get("eval/test/n"),
        "validation": [[x["round"], x["metrics"]["eval/val/success"]] for x in lines if x["kind"] == "eval"],
        "cost": {
            "episodes": len(rounds) * config["tasks_per_round"] * config["rollouts"],
            "sampled_tokens": total("train/sampled_tokens"),
            "processed_tokens": total("rollout/processed_tokens"),
            "seconds": played + sum(total(f"time/{phase}") for phase in _JUDGED_AND_LEARNED),
        },
        "curves": {name: [line["metrics"].get(name) for line in rounds] for name in CURVES},
        "cues": [line.get("cues", []) for line in rounds],
    }


def differences(a: Record, b: Record) -> list[str]:
    """The fields in which two records of a run differ, fresh or kept, seconds aside."""

    def flat(record: Mapping[str, Any]) -> dict[str, Any]:
        return _rounded({**record, "cost": {k: v for k, v in record["cost"].items() if k != "seconds"}})

    one, other = flat(a), flat(b)
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def save(path: Path, records: Iterable[Record]) -> None:
    """One line a record, compressed; the same records give the same bytes."""
    text = "".join(json.dumps(_rounded(record), sort_keys=True, allow_nan=False) + "\n" for record in records)
    write_whole(path, gzip.compress(text.encode(), mtime=0))


def load(path: Path) -> list[Record]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _rounded(value: Any) -> Any:
    """Six digits are enough for shares, and keep the file small; counts stay whole."""
    if isinstance(value, float):
        return value if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value
