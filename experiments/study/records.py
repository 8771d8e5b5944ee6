"""What the study keeps of a run: one JSON object, made from the run's own record (metrics.jsonl, interface.jsonl).

    {"start", "arm", "seed", "size": which run it was
     "settings": a digest of its recipe's config and flags (`Job.settings`)
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
import math
import textwrap
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

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


#: What comes of counting with something of another type than a run writes.
DAMAGE = (LookupError, TypeError, AttributeError, ArithmeticError)
NAME = {"type": "string", "pattern": r"^[^|`$\s]+\Z"}  # shown as it is, in tables
COUNT = {"type": "integer", "minimum": 0, "maximum": 10**15}  # floats, and their sums, are exact up to here
_SHARE = {"type": ["number", "null"], "minimum": 0, "maximum": 1 + 1e-6}  # a sum in float32 may be a little above
AMOUNT = {**COUNT, "type": "number"}
SHARES = {"type": "object", "propertyNames": NAME, "additionalProperties": {**_SHARE, "type": "number"}}
_CURVE = {"type": "array", "items": {**AMOUNT, "type": ["number", "null"]}}
_CURVE_OF_SHARES = {"type": "array", "items": _SHARE}
SETTINGS = {"type": "string", "pattern": r"^[0-9a-f]{64}\Z"}
_WHICH = {"start": NAME, "arm": NAME, "seed": COUNT, "size": NAME, "settings": SETTINGS}
_FOUND: dict[str, Any] = {
    **{"rounds": COUNT, "reported_round": COUNT},
    "success": SHARES,
    "by_category": {"type": "object", "additionalProperties": SHARES},
    "cued_bonus": {"type": ["number", "null"], "minimum": -1, "maximum": 1},
    "after_error": _SHARE,
    "n_error": {**COUNT, "type": ["integer", "null"]},
    "n_test": {**COUNT, "type": ["integer", "null"], "minimum": 1},
    "validation": {
        "type": "array",
        "items": {"type": "array", "prefixItems": [COUNT, _SHARE], "minItems": 2, "maxItems": 2},
    },
    "cost": {
        "type": "object",
        "required": (cost := ["episodes", "sampled_tokens", "processed_tokens", "seconds"]),
        "properties": dict.fromkeys(cost, AMOUNT),
    },
    "curves": {
        "type": "object",
        "required": list(CURVES),
        "patternProperties": {"^(groups|profile|advantage_mass|train)/": _CURVE_OF_SHARES},
        "additionalProperties": _CURVE,
    },
    "cues": {"type": "array", "items": {"type": "array", "items": NAME}},
}


def of_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object with at least these fields."""
    return {"type": "object", "required": list(fields), "properties": dict(fields)}


def check(value: Any, schema: Mapping[str, Any], where: object, mend: str) -> None:
    """ValueError in one line, with the field, unless a value is as a JSON schema says."""
    error = best_match(Draft202012Validator(schema).iter_errors(value))
    if error is not None:
        field = "/".join(map(str, error.absolute_path))
        said = textwrap.shorten(error.message, 200)
        raise ValueError(f"{where}: {field}{': ' if field else ''}{said}; {mend}")


def _check_found(record: Record, schema: Mapping[str, Any], where: object, mend: str) -> None:
    """As `check`, and that its parts agree: what is short would be averaged with what is whole."""
    check(record, schema, where, mend)
    rounds, known = record["rounds"], [r for r, _ in record["validation"]]
    series = {**{f"curves/{name}": values for name, values in record["curves"].items()}, "cues": record["cues"]}
    odd = [f"{name} has {len(x)} values for {rounds} rounds" for name, x in series.items() if len(x) != rounds]
    if known != sorted({*known}) or max(known, default=0) > rounds:
        odd.append(f"validation is of rounds {known}, of a run of {rounds}")
    splits, others = sorted(record["success"]), sorted(record["by_category"])
    if splits != others:
        odd.append(f"success is of {splits}, by_category of {others}")
    if odd:
        raise ValueError(f"{where}: {odd[0]}; {mend}")


def read_run(workdir: Path, **which: Any) -> Record:
    """The record of a finished run; `which` names it (start, arm, seed, size, settings). ValueError if it is not
    finished, or if what it wrote is damaged."""
    mend = "delete the folder and run the study again"
    if not (workdir / "summary.json").exists():
        raise ValueError(f"{workdir}: no summary.json, so this run is not finished; run the study again")
    summary, config = (read_object(workdir / name, mend) for name in ("summary.json", "config.json"))
    try:
        found = _found(summary, config, list(read_jsonl(workdir / "metrics.jsonl")))
    except DAMAGE as error:
        raise ValueError(f"{workdir}: its record is damaged ({type(error).__name__}: {error}); {mend}") from error
    except ValueError as error:
        raise ValueError(f"{workdir}: {error}; run the study again, or {mend}") from error
    _check_found(found, of_fields(_FOUND), workdir, mend)
    return {**which, **found}


def _found(summary: Mapping[str, Any], config: Mapping[str, Any], lines: list[dict[str, Any]]) -> Record:
    """What a run wrote, made into a record. ValueError if there is less of it than its summary says."""
    rounds = [line for line in lines if line["kind"] == "train"]
    if summary["round"] != len(rounds):  # it went on after its end, and was stopped
        raise ValueError(f"summary.json is of round {summary['round']}, metrics.jsonl of {len(rounds)}")
    reports: dict[str, float] = {}
    for line in lines:
        if line["kind"] == "report":
            reports |= line["metrics"]
    for split, success in summary["evaluations"].items():  # where the last lines were lost, those before training stay
        if not math.isclose(reports.get(f"eval/{split}/success", math.nan), success):
            raise ValueError(f"metrics.jsonl does not report the {success:.6g} of {split} that summary.json has")
    bare = reports.get("eval/test_cued/success_bare")
    splits = [name for name in ("test", "ood", "test_cued") if f"eval/{name}/success" in reports]

    def total(name: str) -> float:
        return sum(line["metrics"].get(name, 0.0) for line in rounds)

    played = sum(x["metrics"]["rollout/processed_tokens"] / x["metrics"]["rollout/processed_per_s"] for x in rounds)

    return {
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
    """What `save` wrote; ValueError in one line for a file that is no such thing or is damaged."""
    mend = "take the file anew from where it came, or make it with --report"
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged, or no records.jsonl.gz ({error}); {mend}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line, parse_constant=refuse)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a JSON object ({error}); {mend}") from error
        _check_found(record, of_fields(_WHICH | _FOUND), f"{path}:{number}", mend)
        records.append(record)
    if not records:
        raise ValueError(f"{path} holds no record; {mend}")
    return records


def refuse(constant: str) -> None:
    """json.loads(parse_constant=): NaN and the like, which Python reads."""
    raise ValueError(f"{constant} is no JSON")


def _rounded(value: Any) -> Any:
    """Six digits are enough for shares, and keep the file small; counts stay whole."""
    if isinstance(value, float):
        return value if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value
