"""What the study's numbers say: means and differences to vanilla with 95 % intervals, and how fine they can be.

A run is one seed; runs of two arms with the same start, size and seed are a pair: they begin at the same policy and
play the same tasks in the same order. Shares are in 0..1. Nothing here is NaN: what there is too little data for is
None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy.stats import norm, t

from configs.toolbox import ARMS
from experiments.study.jobs import SIZES, START_NAMES
from experiments.study.records import Record

REFERENCE = "vanilla"
LEVEL, POWER = 0.95, 0.80
#: What one number is taken from a run; None where the run has none.
Value = Callable[[Record], float | None]


class Place(NamedTuple):
    """Where arms are compared: the same starting policy and the same size of it."""

    start: str
    size: str

    def __str__(self) -> str:
        return f"start {self.start}, size {self.size}"


#: The runs of each arm, by seed.
Arms = Mapping[str, Mapping[int, Record]]


# --- which runs there are --------------------------------------------------------------------------------------------
def places(records: Iterable[Record]) -> dict[Place, Arms]:
    """The runs, sorted: starts and sizes in their fixed order, arms in that of `ARMS`, then seeds.

    Raises:
      ValueError: two records of one run, or a start whose arms have no vanilla to be compared with.
    """
    found: dict[Place, dict[str, dict[int, Record]]] = {}
    for record in records:
        place, arm, seed = Place(record["start"], record["size"]), record["arm"], record["seed"]
        runs = found.setdefault(place, {}).setdefault(arm, {})
        if seed in runs:
            raise ValueError(f"{place}: arm {arm!r} has two records of seed {seed}; keep one of them")
        runs[seed] = record
    for place, arms in found.items():
        if REFERENCE not in arms:
            raise ValueError(
                f"{place}: no record of arm {REFERENCE!r}, which all others are compared with; run it for this start "
                "first, or leave the start out"
            )
    return {
        place: {arm: dict(sorted(found[place][arm].items())) for arm in sorted(found[place], key=arm_order)}
        for place in sorted(found, key=lambda p: (_order(START_NAMES, p.start), _order(SIZES, p.size)))
    }


def _order(known: Sequence[str], name: str) -> tuple[int, str]:
    """Known names in their order, then the others by name."""
    return (known.index(name) if name in known else len(known)), name


def arm_order(arm: str) -> tuple[int, str]:
    return _order(tuple(ARMS), arm)


def part_of(arm: str) -> str:
    """The part of the study that an arm belongs to."""
    return ARMS[arm].part if arm in ARMS else "other"


# --- values of one run -----------------------------------------------------------------------------------------------
def success(split: str, category: str | None = None) -> Value:
    """The share of a split's tasks (of one category) that the reported policy solved."""

    def value(record: Record) -> float | None:
        if category is None:
            return record["success"].get(split)
        return record["by_category"].get(split, {}).get(category)

    return value


def present(record: Record, curve: str) -> list[float]:
    """One metric's values over rounds, without those of rounds that had none."""
    return [v for v in record["curves"].get(curve, ()) if v is not None]


# --- means and differences -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds; `half` is half its 95 % t-interval, None for one seed."""

    mean: float
    half: float | None
    n: int

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation (n - 1); None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def estimate(values: Iterable[float | None]) -> Estimate | None:
    """Mean and interval of one value a seed; None if there is none. Values that are None are left out."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    sd, n = spread(known), len(known)
    half = None if sd is None else float(t.ppf((1 + LEVEL) / 2, n - 1)) * sd / math.sqrt(n)
    return Estimate(math.fsum(known) / n, half, n)


def mean(runs: Mapping[int, Record], value: Value) -> Estimate | None:
    return estimate(map(value, runs.values()))


def paired(arms: Arms, arm: str, value: Value) -> list[float]:
    """Arm minus vanilla, one difference for each seed that both have."""
    pairs = [(value(run), value(arms[REFERENCE][s])) for s, run in arms[arm].items() if s in arms[REFERENCE]]
    return [a - b for a, b in pairs if a is not None and b is not None]


def difference(arms: Arms, arm: str, value: Value) -> Estimate | None:
    """Mean paired difference to vanilla; None without a pair."""
    return estimate(paired(arms, arm, value))


def verdict(found: Estimate | None) -> str:
    """ "helps" (the whole interval is above zero), "hurts" (below) or "not shown" (neither, or no interval)."""
    interval = None if found is None else found.interval
    if interval is None:
        return "not shown"
    return "helps" if interval[0] > 0 else "hurts" if interval[1] < 0 else "not shown"


def verdicts(records: Iterable[Record], split: str = "test") -> dict[Place, dict[str, str]]:
    """The verdict on every arm but vanilla, by its success on a split."""
    return {
        place: {arm: verdict(difference(arms, arm, success(split))) for arm in arms if arm != REFERENCE}
        for place, arms in places(records).items()
    }


# --- rollouts to vanilla's score -------------------------------------------------------------------------------------
def validation(runs: Iterable[Record]) -> list[tuple[float, float, float | None]]:
    """[(episodes played, mean success, its standard error)] at the rounds that every one of the runs was validated in.

    Round 0 is there only if it was recorded. The standard error is None for one run.
    """
    curves = [({r: score for r, score in run["validation"]}, run) for run in runs]
    if not curves:
        return []
    points = []
    for r in sorted(set.intersection(*(set(curve) for curve, _ in curves))):
        scores = [curve[r] for curve, _ in curves]
        if any(score is None for score in scores):
            continue
        sd = spread(scores)
        episodes = math.fsum(run["cost"]["episodes"] * r / max(1, run["rounds"]) for _, run in curves) / len(curves)
        error = None if sd is None else sd / math.sqrt(len(scores))
        points.append((episodes, math.fsum(scores) / len(scores), error))
    return points


def episodes_to_vanilla(arms: Arms, arm: str) -> float | None:
    """How many episodes an arm plays until its mean validation success first is vanilla's last one.

    Both curves are means over the seeds that both arms have, and straight between validated rounds; an arm that is
    there at its first validated round gets that round's episodes. inf = not reached; None = no validation in common.
    """
    shared = [s for s in arms[arm] if s in arms[REFERENCE]]
    goal = validation(arms[REFERENCE][s] for s in shared)
    curve = validation(arms[arm][s] for s in shared)
    if not goal or not curve:
        return None
    target = goal[-1][1]
    before: tuple[float, float] | None = None
    for episodes, score, _ in curve:
        if score >= target:
            if before is None:
                return episodes
            return before[0] + (episodes - before[0]) * (target - before[1]) / (score - before[1])
        before = episodes, score
    return math.inf


# --- power -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Power:
    """What a difference between two arms needs to be seen at 80 % power, two-sided 5 %; shares in 0..1.

    pairs: how many differences `sd`, their standard deviation between seeds, was taken from.
    sampling: how much of `sd` the luck of `tasks` test tasks can be, at most.
    seeds, seeds_all_tasks: seeds needed with these tasks, and (at least) with any number of them.
    tasks_needed: with fewer tasks than these `seeds_now` seeds are not enough; None if no number of tasks is.
    """

    delta: float
    pairs: int
    sd: float
    sampling: float
    tasks: int
    seeds_now: int
    seeds: int
    seeds_all_tasks: int
    tasks_needed: int | None


def seeds_needed(sd: float, delta: float) -> int:
    """The fewest seeds n >= 2 with (t(.975, n - 1) + t(.8, n - 1)) sd / sqrt(n) <= delta.

    The t quantiles depend on n, so n is raised until it is enough, from what the normal quantiles ask for (always too
    few): below it no n can be.
    """
    n = max(2, math.ceil((_quantiles(None) * sd / delta) ** 2))
    while _quantiles(n - 1) * sd > delta * math.sqrt(n):
        n += 1
    return n


def _quantiles(df: int | None) -> float:
    """The distance from 0, in standard errors, of a difference that is seen with the power; None = sd known."""
    ends = ((1 + LEVEL) / 2, POWER)
    return float(sum(norm.ppf(q) if df is None else t.ppf(q, df) for q in ends))


def power(arms: Arms, tasks: int, delta: float = 0.03, split: str = "test") -> Power | None:
    """The power note of one start and size; None where no arm has two pairs.

    The standard deviation between seeds is pooled over all arms. Part of its square is noise of the tasks: two runs'
    shares p and q of N tasks differ by p (1 - p) + q (1 - q), over N, even if the policies are equally good. That is
    an upper bound, since both runs play the same tasks (those of one scenario count as independent), and it cannot be
    more than all. The rest is between runs, at least so much of it, and does not shrink with more tasks. All seeds are
    tested on the same tasks: what these have in common against others is in no seed's deviation, and no number of
    seeds removes it.

    Args:
      tasks: N, of the split that was evaluated.
      delta: the difference that is to be seen, a share.
    """
    groups = [d for arm in arms if arm != REFERENCE if len(d := paired(arms, arm, success(split))) > 1]
    base = mean(arms[REFERENCE], success(split))
    if not groups or base is None:
        return None
    others = [m.mean for arm in arms if arm != REFERENCE if (m := mean(arms[arm], success(split)))]
    q = math.fsum(others) / len(others)
    freedom = sum(len(d) - 1 for d in groups)
    variance = math.fsum((len(d) - 1) * (spread(d) or 0.0) ** 2 for d in groups) / freedom
    noise = min(variance, (base.mean * (1 - base.mean) + q * (1 - q)) / tasks)
    between = variance - noise
    seeds_now = max(map(len, groups))
    allowed = (delta * math.sqrt(seeds_now) / _quantiles(seeds_now - 1)) ** 2
    return Power(
        delta=delta,
        pairs=sum(map(len, groups)),
        sd=math.sqrt(variance),
        sampling=math.sqrt(noise),
        tasks=tasks,
        seeds_now=seeds_now,
        seeds=seeds_needed(math.sqrt(variance), delta),
        seeds_all_tasks=seeds_needed(math.sqrt(between), delta),
        tasks_needed=math.ceil(tasks * noise / (allowed - between)) if allowed > between else None,
    )
