"""C_t: how often each label occurs, as counts of this round and as a moving average over rounds (paper section 3.3).

Counting and averaging are apart, so that many hosts can count their own rows, sum the counts, and all take the same
step: `count(...)` on each host, add (or sum `flat()` as an integer vector), then `profile.update(total, rate)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seal_jax.types import CATEGORIES, EXCLUDED_LABELS, LABEL_ID, LABELS, Diagnosis

#: Rows of a count table. A suite's own categories share the last, so that the table has the same shape everywhere.
ROWS: tuple[str, ...] = (*CATEGORIES, "other")
_Z = len(LABELS)
_COUNTED = tuple(z for z, name in enumerate(LABELS) if name not in EXCLUDED_LABELS)


@dataclass(frozen=True)
class Counts:
    """Turns per category and label. `table` is [len(ROWS)][len(LABELS)], `trajectories` is [len(ROWS)]."""

    table: tuple[tuple[int, ...], ...] = ((0,) * _Z,) * len(ROWS)
    trajectories: tuple[int, ...] = (0,) * len(ROWS)

    def __add__(self, other: Counts) -> Counts:
        return Counts.from_flat([a + b for a, b in zip(self.flat(), other.flat(), strict=True)])

    def flat(self) -> tuple[int, ...]:
        """All numbers as one vector of fixed length, ready to be summed over hosts."""
        return tuple(n for row in self.table for n in row) + self.trajectories

    @staticmethod
    def from_flat(values: Sequence[int]) -> Counts:
        size = len(ROWS) * _Z
        if len(values) != size + len(ROWS):
            raise ValueError(f"Counts: {len(values)} numbers, expected {size + len(ROWS)}; pass what flat() returned")
        ints = [int(v) for v in values]
        return Counts(tuple(tuple(ints[r * _Z : (r + 1) * _Z]) for r in range(len(ROWS))), tuple(ints[size:]))

    @property
    def labels(self) -> tuple[int, ...]:
        """Turns per label, over all categories; [len(LABELS)]."""
        return tuple(map(sum, zip(*self.table, strict=True)))

    @property
    def turns(self) -> int:
        """Turns that carry a label which counts."""
        return _labelled(self.labels)


def count(diagnoses: Sequence[Diagnosis], categories: Sequence[str] | None = None) -> Counts:
    """Counts labels. `categories`: the category of each diagnosis's task; None counts all of them as "other"."""
    names = ["other"] * len(diagnoses) if categories is None else list(categories)
    if len(names) != len(diagnoses):
        raise ValueError(f"count: {len(diagnoses)} diagnoses but {len(names)} categories; pass one category for each")
    table = [[0] * _Z for _ in ROWS]
    trajectories = [0] * len(ROWS)
    for diagnosis, name in zip(diagnoses, names, strict=True):
        row = ROWS.index(name) if name in CATEGORIES else len(ROWS) - 1
        trajectories[row] += 1
        for label in diagnosis.names:
            table[row][LABEL_ID[label]] += 1
    return Counts(tuple(map(tuple, table)), tuple(trajectories))


@dataclass(frozen=True)
class Profile:
    """The label profile after some rounds. Rates are shares of the labelled turns; `not_reached` and `env_error` turns
    are no part of them. When training stops an episode at its first failed turn, later turns are not in the profile.

    Attributes:
      latest: counts of the last round.
      total: counts of all rounds.
      ema: moving average of the label rates; [len(LABELS)]. A first observation is taken as it is.
      ema_by_category: the same within each of ROWS; a round without such turns leaves it unchanged.
      rounds: observations made.
      rows: which rows were counted: "bare", "cued" or "all". Only bare rows say what the policy can do unaided.
    """

    latest: Counts = field(default_factory=Counts)
    total: Counts = field(default_factory=Counts)
    ema: tuple[float, ...] = (0.0,) * _Z
    ema_by_category: tuple[tuple[float, ...], ...] = ((0.0,) * _Z,) * len(ROWS)
    rounds: int = 0
    rows: str = "all"

    def update(self, counts: Counts, rate: float, *, rows: str = "all") -> Profile:
        """C_{t+1} from the (summed) counts of a round.

        Args:
          rate: weight of the new round in the average, in (0, 1]; 1 forgets all earlier rounds.
          rows: which rows the counts are of; recorded.
        """
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"profile rate={rate}: the weight of a new round must be in (0, 1]; set it to e.g. 0.5")
        if rows not in ("bare", "cued", "all"):
            raise ValueError(f"profile rows={rows!r} is not known; choose one of ('bare', 'cued', 'all')")
        return Profile(
            latest=counts,
            total=self.total + counts,
            ema=_average(self.ema, counts.labels, self.total.turns == 0, rate),
            ema_by_category=tuple(
                _average(old, new, _labelled(seen) == 0, rate)
                for old, new, seen in zip(self.ema_by_category, counts.table, self.total.table, strict=True)
            ),
            rounds=self.rounds + 1,
            rows=rows,
        )

    @property
    def counts(self) -> tuple[int, ...]:
        """Turns per label in the last round; [len(LABELS)]."""
        return self.latest.labels

    @property
    def rates(self) -> dict[str, float]:
        """The moving average by label name, for the labels that count."""
        return {LABELS[z]: self.ema[z] for z in _COUNTED}

    @property
    def latest_rates(self) -> dict[str, float]:
        """The last round's own rates by label name."""
        rates = _rates(self.latest.labels)
        return {LABELS[z]: rates[z] for z in _COUNTED}

    def to_dict(self) -> dict[str, Any]:
        """A JSON object; labels and categories by name, so that it can be read by a person and by a later version."""
        return {
            "rounds": self.rounds,
            "rows": self.rows,
            "rates": dict(zip(LABELS, self.ema, strict=True)),
            "rates_by_category": {
                c: dict(zip(LABELS, row, strict=True)) for c, row in zip(ROWS, self.ema_by_category, strict=True)
            },
            "latest": _counts_to_dict(self.latest),
            "total": _counts_to_dict(self.total),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Profile:
        try:
            return Profile(
                latest=_counts_from_dict(data["latest"]),
                total=_counts_from_dict(data["total"]),
                ema=_by_label(data["rates"], float),
                ema_by_category=tuple(_by_label(data["rates_by_category"][c], float) for c in ROWS),
                rounds=int(data["rounds"]),
                rows=str(data["rows"]),
            )
        except KeyError as error:
            raise ValueError(f"profile: key {error} is missing; start from an empty one") from None


def _labelled(counts: Sequence[int]) -> int:
    return sum(counts[z] for z in _COUNTED)


def _rates(counts: Sequence[int]) -> tuple[float, ...]:
    n = _labelled(counts)
    return tuple(counts[z] / n if n and z in _COUNTED else 0.0 for z in range(_Z))


def _average(old: tuple[float, ...], counts: Sequence[int], first: bool, rate: float) -> tuple[float, ...]:
    if _labelled(counts) == 0:
        return old  # nothing was observed, so nothing was learned
    new = _rates(counts)
    return new if first else tuple((1.0 - rate) * o + rate * n for o, n in zip(old, new, strict=True))


def _counts_to_dict(counts: Counts) -> dict[str, Any]:
    return {
        "labels": {c: dict(zip(LABELS, row, strict=True)) for c, row in zip(ROWS, counts.table, strict=True)},
        "trajectories": dict(zip(ROWS, counts.trajectories, strict=True)),
    }


def _counts_from_dict(data: Mapping[str, Any]) -> Counts:
    return Counts(
        tuple(_by_label(data["labels"][c], int) for c in ROWS),
        tuple(int(data["trajectories"][c]) for c in ROWS),
    )


def _by_label(row: Mapping[str, Any], kind: Any) -> tuple[Any, ...]:
    return tuple(kind(row[name]) for name in LABELS)
