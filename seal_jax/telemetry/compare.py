"""Before and after on the same tasks: success per category, paired difference and its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: One evaluation: {task id: (category, success in 0..1)}. With several samples per task, success is their mean.
Outcomes = Mapping[str, tuple[str, float]]


@dataclass(frozen=True)
class Comparison:
    """One line of the closing table. Rates in 0..1; `stderr` is that of the mean paired difference (ddof = 1; NaN for
    one task). It speaks of the tasks' spread for this one pair of policies, not of the spread between seeds."""

    category: str
    n: int
    before: float
    after: float
    difference: float
    stderr: float


def compare(before: Outcomes, after: Outcomes) -> list[Comparison]:
    """The line "all" first, then each category in the order of its first task; ValueError if the tasks differ."""
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(
            f"the two evaluations are of different tasks ({len(odd)} in only one of them, e.g. {odd[0]!r}); "
            "evaluate both policies on the same split"
        )
    if not before:
        raise ValueError("the evaluations hold no task; evaluate a split that has some")
    categories: dict[str, list[str]] = {}
    for task_id, (category, _) in before.items():
        categories.setdefault(category, []).append(task_id)
    groups = [("all", list(before))] + (list(categories.items()) if len(categories) > 1 else [])
    return [_line(name, [before[i][1] for i in ids], [after[i][1] for i in ids]) for name, ids in groups]


def _line(name: str, before: Sequence[float], after: Sequence[float]) -> Comparison:
    n = len(before)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    mean = sum(differences) / n
    spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1) / n) if n > 1 else math.nan
    return Comparison(name, n, sum(before) / n, sum(after) / n, mean, spread)
