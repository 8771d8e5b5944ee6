"""What the study's numbers say: means and differences with 95 % intervals, which arm validation chooses, and how fine
the comparison can be.

A run is one seed; runs of two arms with the same start, size and seed are a pair: they begin at the same policy and
play the same tasks in the same order. Shares are in 0..1. Nothing here is NaN: what there is too little data for is
None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scipy.special import nctdtrinc
from scipy.stats import norm, t

from configs.toolbox import ARMS
from experiments.study.jobs import ALL_STARTS, FRESH, SIZES, START_NAMES
from experiments.study.records import CURVES, Record

REFERENCE = "vanilla"
LEVEL, POWER = 0.95, 0.80
#: Arms whose cues come and go with the profile.
CLOSED_LOOP = tuple(
    name
    for name, arm in ARMS.items()
    if arm.settings.get("interface.exposure", 0.0) > 0 and arm.settings.get("interface.closed_loop", True)
)
#: Of these one is chosen, on validation.
CHOOSABLE = tuple(name for name in CLOSED_LOOP if ARMS[name].part != "added")
#: The seeds below choose it: what is run later changes nothing about that.
CHOOSING = 3
#: The study's target, the paper's margin at 7B: so much above vanilla, on so many fresh seeds, from every start.
TARGET, TARGET_SEEDS = 0.095, 5
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
def choosing(records: Iterable[Record]) -> list[Record]:
    """The runs of the seeds on which all arms are compared."""
    return [record for record in records if record["seed"] < FRESH]


def fresh(records: Iterable[Record]) -> list[Record]:
    """The runs of the seeds that had no part in the choice of an arm."""
    return [record for record in records if record["seed"] >= FRESH]


def confirming(records: Iterable[Record]) -> dict[Place, Arms]:
    """The fresh runs by start and size, as `places`; none while vanilla has no fresh run."""
    runs = fresh(records)
    return places(runs) if any(run["arm"] == REFERENCE for run in runs) else {}


def places(records: Iterable[Record]) -> dict[Place, Arms]:
    """The runs, sorted: starts and sizes in their fixed order, arms in that of `ARMS`, then seeds.

    A start and size without vanilla, which its arms are compared with, is left out.

    Raises:
      ValueError: two records of one run, or nothing is left.
    """
    found = _by_place(records)
    kept = {place: arms for place, arms in found.items() if REFERENCE in arms}
    if found and not kept:
        raise ValueError(
            f"{next(iter(found))}: no record of arm {REFERENCE!r}, which all others are compared with, here or for "
            "another start or size; run it first"
        )
    return kept


def without_vanilla(records: Iterable[Record]) -> list[Place]:
    """What `places` leaves out."""
    return [place for place, arms in _by_place(records).items() if REFERENCE not in arms]


def _by_place(records: Iterable[Record]) -> dict[Place, Arms]:
    found: dict[Place, dict[str, dict[int, Record]]] = {}
    for record in records:
        place, arm, seed = Place(record["start"], record["size"]), record["arm"], record["seed"]
        runs = found.setdefault(place, {}).setdefault(arm, {})
        if seed in runs:
            raise ValueError(f"{place}: arm {arm!r} has two records of seed {seed}; keep one of them")
        runs[seed] = record
    return {
        place: {arm: dict(sorted(found[place][arm].items())) for arm in sorted(found[place], key=arm_order)}
        for place in sorted(found, key=lambda p: (_order(ALL_STARTS, p.start), _order(SIZES, p.size)))
    }


def _order(known: Sequence[str], name: str) -> tuple[int, str]:
    """Known names in their order, then the others by name."""
    return (known.index(name) if name in known else len(known)), name


def arm_order(arm: str) -> tuple[int, str]:
    return _order(tuple(ARMS), arm)


def begun_apart(arms: Arms) -> list[tuple[str, int]]:
    """Runs (arm, seed) that did not begin where vanilla's of that seed did, as their first rounds tell: nothing is cued
    in it, so that the same policy plays the same rows. (Not told of arms whose cues are there from the start, or that
    play failed turns on.)

    Such a pair is none: its start was made anew on another kind of machine, say.
    """
    compared = [
        arm
        for arm in arms
        if not setting(arm, "interface.pinned") and setting(arm, "stop_failed_turns", True) and arm != REFERENCE
    ]
    return [
        (arm, seed)
        for arm in compared
        for seed in shared_seeds(arms, arm)
        if _first_round(arms[arm][seed]) != _first_round(arms[REFERENCE][seed])
    ]


def _first_round(record: Record) -> list[float | None]:
    curves = record["curves"]
    told = [name for name in CURVES if name.startswith(("profile/", "refused/bare"))]
    return [None if (v := next(iter(curves[name]), None)) is None else float(f"{v:.6g}") for name in told]


def part_of(arm: str) -> str:
    """The part of the study that an arm belongs to."""
    return ARMS[arm].part if arm in ARMS else "other"


def setting(arm: str, name: str, default: object = None) -> object:
    """What an arm of the study sets; `default` where it leaves that as it is, or is no arm of the study."""
    return ARMS[arm].settings.get(name, default) if arm in ARMS else default


# --- values of one run -----------------------------------------------------------------------------------------------
def success(split: str, category: str | None = None) -> Value:
    """The share of a split's tasks (of one category) that the reported policy solved."""

    def value(record: Record) -> float | None:
        if category is None:
            return record["success"].get(split)
        return record["by_category"].get(split, {}).get(category)

    return value


def present(record: Record, curve: str, *, taught: bool = False) -> list[float]:
    """One metric's values over rounds, without those of rounds that had none.

    taught: nor those of rounds without an informative group: what is a share of its advantages is then written as 0.
    """
    curves = record["curves"]
    idle = {i for i, share in enumerate(curves.get("groups/informative", ())) if share == 0} if taught else set()
    return [v for i, v in enumerate(curves.get(curve, ())) if v is not None and i not in idle]


def best_validation(record: Record) -> float | None:
    """The highest validation score of a run; None if it has none."""
    return max((score for _, score in record["validation"] if score is not None), default=None)


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


def shared_seeds(arms: Arms, arm: str, against: str = REFERENCE) -> list[int]:
    """The seeds that both arms have; none if `against` has no run."""
    return [seed for seed in arms[arm] if seed in arms.get(against, {})]


def pairs(arms: Arms, arm: str, value: Value, against: str = REFERENCE) -> list[tuple[float, float]]:
    """(arm's, that of the arm `against`), for each seed of which both have one."""
    found = [(value(arms[arm][s]), value(arms[against][s])) for s in shared_seeds(arms, arm, against)]
    return [(a, b) for a, b in found if a is not None and b is not None]


def paired(arms: Arms, arm: str, value: Value, against: str = REFERENCE) -> list[float]:
    """Arm minus the arm `against`, one difference for each of their `pairs`."""
    return [a - b for a, b in pairs(arms, arm, value, against)]


def difference(arms: Arms, arm: str, value: Value, against: str = REFERENCE) -> Estimate | None:
    """Mean paired difference to another arm; None without a pair."""
    return estimate(paired(arms, arm, value, against))


def verdict(found: Estimate | None) -> str:
    """ "helps" (the whole interval is above zero), "hurts" (below) or "not shown" (neither).

    Two seeds show nothing, nor do seeds that agree to the last task: that is luck, no certainty.
    """
    if found is None or (interval := found.interval) is None or found.n < 3 or interval[1] - interval[0] < 1e-9:
        return "not shown"
    return "helps" if interval[0] > 0 else "hurts" if interval[1] < 0 else "not shown"


# --- the arm chosen on validation ------------------------------------------------------------------------------------
class Chosen(NamedTuple):
    arm: str
    validation: float  # mean of the runs' best validated rounds
    seeds: int  # of each start


def chosen(found: Mapping[Place, Arms], size: str = SIZES[0]) -> Chosen | None:
    """The closed-loop arm with the highest validation score, mean over seeds and all starts; of equals, the first.

    A run's score is that of its best validated round. The seeds are those below CHOOSING of which vanilla and every
    such arm have a validated run from every start; None while there is none.
    """
    starts = [found.get(Place(start, size), {}) for start in START_NAMES]
    runs = {arm: [arms.get(arm, {}) for arms in starts] for arm in (REFERENCE, *CHOOSABLE)}
    seeds = {*range(CHOOSING)}.intersection(
        *({s for s, run in of.items() if best_validation(run) is not None} for some in runs.values() for of in some)
    )
    if not seeds:
        return None

    def score(arm: str) -> float:
        return math.fsum(best_validation(of[s]) or 0.0 for of in runs[arm] for s in seeds) / len(starts) / len(seeds)

    best = max(CHOOSABLE, key=score)
    return Chosen(best, score(best), len(seeds))


def target(fresh: Mapping[Place, Arms], arm: str, size: str = SIZES[0]) -> str:
    """ "met" if on fresh seeds the arm is TARGET above vanilla from every start, both intervals above zero and none out
    of distribution wholly below; "not met"; or "not yet", before there are TARGET_SEEDS of them."""
    gains = []
    for start in START_NAMES:
        arms = fresh.get(Place(start, size), {})
        test, ood = (difference(arms, arm, success(s)) if arm in arms else None for s in ("test", "ood"))
        if test is None or test.n < TARGET_SEEDS:
            return "not yet"
        gains.append(test.mean >= TARGET and verdict(test) == "helps" and verdict(ood) != "hurts")
    return "met" if all(gains) else "not met"


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
    there at its first validated round gets that round's episodes. A first crossing flatters a curve that wavers, so
    vanilla is measured by it too, and may be there before its end. inf = not reached; None = no validation in common.
    """
    shared = shared_seeds(arms, arm)
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
class Tasks:
    """What the number of test tasks has to do with it; `sampling` is a share in 0..1.

    n: how many there were.
    sampling: how much of the standard deviation between seeds their luck can be, at most.
    seeds: with any number of them it takes at least so many seeds.
    needed: with fewer of them the seeds that were run are not enough; None if no number is.
    """

    n: int
    sampling: float
    seeds: int
    needed: int | None


@dataclass(frozen=True)
class Power:
    """What a difference between two arms needs to be seen at 80 % power, two-sided 5 %; shares in 0..1.

    pairs: how many differences `sd`, their standard deviation between seeds, was taken from; spreads: it of each arm.
    seeds: seeds needed with these tasks; seeds_now: the most that an arm has in common with vanilla.
    tasks: None where the records do not say how many there were.
    """

    delta: float
    pairs: int
    sd: float
    seeds_now: int
    seeds: int
    tasks: Tasks | None
    spreads: Mapping[str, float] = field(default_factory=dict)


def seeds_needed(sd: float, delta: float) -> int:
    """The fewest seeds n >= 2 with which the paired t-test sees a mean difference `delta` with the power.

    n is raised until it is enough, from what a known `sd` would ask for: with fewer none can be.
    """
    ends = norm.ppf((1 + LEVEL) / 2) + norm.ppf(POWER)
    n = max(2, math.ceil((ends * sd / delta) ** 2))
    while _distance(n) * sd > delta * math.sqrt(n):
        n += 1
    return n


def _distance(n: int) -> float:
    """How many standard errors from 0 a mean over n seeds must truly be to be seen on its own side with the power.

    The t statistic of such a mean has the noncentral t distribution, and the distance is its noncentrality.
    """
    return float(nctdtrinc(n - 1, 1 - POWER, t.ppf((1 + LEVEL) / 2, n - 1)))


def power(arms: Arms, delta: float = 0.03, split: str = "test") -> Power | None:
    """The power note of one start and size; None where no arm has two pairs. `delta`, a share, is what is to be seen.

    The standard deviation between seeds is pooled over all arms.
    """
    found = {arm: paired(arms, arm, success(split)) for arm in arms if arm != REFERENCE}
    spreads = {arm: sd for arm, gains in found.items() if (sd := spread(gains)) is not None}
    groups = [found[arm] for arm in spreads]
    if not groups:
        return None
    freedom = sum(len(d) - 1 for d in groups)
    variance = math.fsum((len(d) - 1) * (spread(d) or 0.0) ** 2 for d in groups) / freedom
    seeds_now = max(map(len, groups))
    return Power(
        delta=delta,
        pairs=sum(map(len, groups)),
        sd=math.sqrt(variance),
        seeds_now=seeds_now,
        seeds=seeds_needed(math.sqrt(variance), delta),
        tasks=_tasks(arms, variance, seeds_now, delta, split),
        spreads=spreads,
    )


def _tasks(arms: Arms, variance: float, seeds_now: int, delta: float, split: str) -> Tasks | None:
    """The part of the tasks; None unless all runs were tested on one known number of them.

    Part of the variance is noise of the tasks: two runs' shares p and q of N tasks differ by p (1 - p) + q (1 - q),
    over N, even if the policies are equally good. That is an upper bound, since both runs play the same tasks (those
    of one scenario count as independent), and it cannot be more than all. The rest is between runs, at least so much of
    it, and does not shrink with more tasks. All seeds are tested on the same tasks: what these have in common against
    others is in no seed's deviation, and no number of seeds removes it.
    """
    counts = {run.get(f"n_{split}") for runs in arms.values() for run in runs.values()}
    n = counts.pop() if len(counts) == 1 else None
    base = mean(arms[REFERENCE], success(split))
    if n is None or base is None:
        return None
    others = [m.mean for arm in arms if arm != REFERENCE if (m := mean(arms[arm], success(split)))]
    q = math.fsum(others) / len(others)
    noise = min(variance, (base.mean * (1 - base.mean) + q * (1 - q)) / n)
    between = variance - noise
    allowed = seeds_now * (delta / _distance(seeds_now)) ** 2
    return Tasks(
        n=int(n),
        sampling=math.sqrt(noise),
        seeds=seeds_needed(math.sqrt(between), delta),
        needed=math.ceil(n * noise / (allowed - between)) if allowed > between else None,
    )
