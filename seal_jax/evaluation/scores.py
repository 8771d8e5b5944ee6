"""Result lines judged: verdict, labels and evidence of each task asked for, and the numbers over them. No jax."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seal_jax.diagnosis import diagnose, release_labels
from seal_jax.envs.base import Suite, make_suite
from seal_jax.envs.verifier import Verifier
from seal_jax.evaluation.results import Result, Results
from seal_jax.types import CATEGORIES, LABELS, Diagnosis, Step, Task, TurnEvidence, Verdict


@dataclass(frozen=True)
class Scored:
    """A task asked for, with what its line came to; no verdict where there is no readable line."""

    task: Task
    reason: str  # the verdict's reason; "missing" without a line; "inference_error" or "broken_line"
    result: Result | None = None
    verdict: Verdict | None = None
    diagnosis: Diagnosis | None = None

    @property
    def reward(self) -> float:
        return 0.0 if self.verdict is None else self.verdict.reward

    @property
    def turns(self) -> list[tuple[TurnEvidence, str]]:
        """Evidence and label of each turn; none without a verdict."""
        if self.verdict is None or self.diagnosis is None:
            return []
        return list(zip(self.verdict.turns, self.diagnosis.names, strict=True))


def suite_for(name: str, protocol: str) -> Suite:
    """The suite whose worlds execute calls as the protocol does; the package's executor has quirks of its own."""
    return make_suite(name, official_quirks=True) if (name, protocol) == ("bfcl", "official") else make_suite(name)


def score(suites: Callable[[str], Suite], asked: Sequence[Task], read: Results) -> list[Scored]:
    """Verifies and diagnoses every task asked for; `suites` makes the suite of a protocol, each line has its own."""
    protocols = {result.protocol for result in read.results.values()}
    verifiers = {protocol: Verifier(suites(protocol)) for protocol in protocols}
    broken, out = read.failed(), []
    for task in asked:
        result = read.results.get(task.id)
        if result is not None:
            verdict = verifiers[result.protocol].verify(task, result.turns, aborted=result.aborted)
            out.append(Scored(task, verdict.reason, result, verdict, diagnose(verdict)))
        elif task.id in broken:
            answered = broken[task.id].reason.startswith("inference_error")
            out.append(Scored(task, "inference_error" if answered else "broken_line"))
        else:
            out.append(Scored(task, "missing"))
    return out


# --- numbers ---------------------------------------------------------------------------------------------------------
def column(rows: Sequence[Scored]) -> dict[str, Any]:
    """The numbers of one category, or of all. Rates in 0..1; label rates are shares of the turns that were reached, and
    "not_reached" counts the others beside them."""
    n, solved = len(rows), int(sum(row.reward for row in rows))
    turns = [turn for row in rows for turn in row.turns]
    reached = [label for evidence, label in turns if evidence.reached]
    labels = Counter(reached)
    abstain = [evidence for evidence, _ in turns if evidence.abstain and evidence.reached]
    quiet = sum(not any(step.calls for step in evidence.steps) for evidence in abstain)
    rate = solved / n if n else math.nan
    return {
        "tasks": n,
        "solved": solved,
        "accuracy": rate,
        "stderr": math.sqrt(rate * (1 - rate) / n) if n else math.nan,
        "missing": sum(row.reason == "missing" for row in rows),
        "broken": sum(row.reason in ("inference_error", "broken_line") for row in rows),
        "turns": len(reached),
        "turns_not_reached": len(turns) - len(reached),
        "labels": {k: labels[k] / len(reached) if reached else math.nan for k in LABELS if k != "not_reached"},
        "abstain_turns": len(abstain),
        "strict_abstention": quiet / len(abstain) if abstain else math.nan,
        "reasons": dict(Counter(row.reason for row in rows).most_common()),
    }


def summarise(scored: Sequence[Scored], read: Results, **about: Any) -> dict[str, Any]:
    """All numbers, in the order in which they are printed; NaN is None, so that it is JSON."""
    names = [c for c in CATEGORIES if any(row.task.category == c for row in scored)]
    names += sorted({row.task.category for row in scored} - set(names))
    columns = {name: column([row for row in scored if row.task.category == name]) for name in names}
    k = len(columns)
    asked = {row.task.id for row in scored}
    return _no_nan(
        {
            **about,
            "overall": {  # the benchmark's own rule: every category counts the same
                "accuracy": sum(c["accuracy"] for c in columns.values()) / k,
                "stderr": math.sqrt(sum(c["stderr"] ** 2 for c in columns.values())) / k,
                "categories": k,
            },
            "per_task": column(scored),
            "categories": columns,
            "lines": read.lines,
            "lines_not_asked_for": sum(task_id not in asked for task_id in read.results),
            "broken_lines": [
                {"file": b.file, "line": b.line, "id": b.task_id, "reason": b.reason} for b in read.broken
            ],
            "missing": [row.task.id for row in scored if row.reason == "missing"],
        }
    )


def _no_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _no_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def evidence_record(row: Scored) -> dict[str, Any]:
    """One task as a JSON line: what each turn did, what it should have done, and what it was diagnosed as."""
    record: dict[str, Any] = {
        "id": row.task.id,
        "category": row.task.category,
        "reward": row.reward,
        "reason": row.reason,
    }
    if row.result is None or row.verdict is None or row.diagnosis is None:
        return record
    record |= {"file": row.result.file, "line": row.result.line, "protocol": row.result.protocol}
    tags = release_labels(row.verdict)
    record["turns"] = [
        {
            "turn": turn.turn,
            "label": label.label,
            "evidence": label.evidence,
            "release": tag,
            "reached": turn.reached,
            "abstain": turn.abstain,
            "passed": turn.passed,
            "steps": [_step_record(step) for step in turn.steps],
            "reference": [_words(result.call) for result in turn.reference_results],
            "state_diffs": [
                {
                    "attribute": f"{diff.instance}.{diff.attribute}",
                    "model_changed": diff.model_changed,
                    "reference_changed": diff.reference_changed,
                    "fresh": diff.fresh,
                }
                for diff in turn.state_diffs
            ],
            "missing_results": list(turn.missing_results),
        }
        for turn, label, tag in zip(row.verdict.turns, row.diagnosis.labels, tags, strict=True)
    ]
    return record


def _step_record(step: Step) -> dict[str, Any]:
    record: dict[str, Any] = {"calls": [_words(call) for call in step.calls]}
    if step.error is not None:
        record["rejected"] = f"{step.error.kind}: {step.error.message}"
    else:
        record["results"] = [{"text": r.text, "error": r.error} for r in step.results]
    return record


def _words(call: object) -> str:
    try:
        return str(call)
    except RecursionError:
        return f"{getattr(call, 'name', '?')}(nested too deep to print)"
