"""Intervals against scipy, differences and crossings against numbers worked by hand."""

import math

import numpy as np
import pytest
import scipy.stats

from configs.toolbox import ARMS
from experiments.study import statistics
from experiments.study.statistics import Estimate, Place, success

from .made import record

NEVER = Place("never", "small")


def arms(*records):
    return statistics.places(records)[NEVER]


def test_means_and_intervals_are_scipys():
    values = [0.31, 0.28, 0.4, 0.35]
    found = statistics.estimate(values)
    low, high = scipy.stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert found.n == 4 and found.mean == pytest.approx(np.mean(values))
    assert found.interval == pytest.approx((low, high))


def test_too_few_values_give_no_interval_and_no_nan():
    assert statistics.estimate([0.5, None]) == Estimate(0.5, None, 1)
    assert statistics.estimate([None]) is None and statistics.spread([0.5]) is None
    assert statistics.estimate([0.5]).interval is None


def test_differences_are_paired_by_seed():
    """Seeds 1 and 2 are common: 0.5 - 0.2 and 0.6 - 0.5; seed 7 of vanilla and seed 3 of the arm have no partner."""
    vanilla = [record(seed=s, test=x) for s, x in ((1, 0.2), (2, 0.5), (7, 0.9))]
    full = [record("full", s, test=x) for s, x in ((3, 0.0), (2, 0.6), (1, 0.5))]
    found = arms(*vanilla, *full)
    gain = statistics.difference(found, "full", success("test", "miss_func"))
    # sd of (0.3, 0.1) is 0.2 / sqrt(2); over sqrt(2) seeds: 0.1; t(.975, 1) = 12.706
    assert (gain.mean, gain.half, gain.n) == (pytest.approx(0.2), pytest.approx(1.2706, abs=1e-4), 2)
    assert statistics.difference(found, "full", success("nothing")) is None
    assert statistics.difference(arms(record(seed=0), record("full", 1)), "full", success("test")) is None


def test_verdicts():
    assert statistics.verdict(Estimate(0.05, 0.04, 4)) == "helps"
    assert statistics.verdict(Estimate(-0.05, 0.04, 4)) == "hurts"
    assert [statistics.verdict(x) for x in (Estimate(0.05, 0.05, 4), Estimate(0.5, None, 1), None)] == ["not shown"] * 3
    records = [record(a, s, test=x + s / 100) for a, x in (("vanilla", 0.3), ("half", 0.5)) for s in range(3)]
    assert statistics.verdicts(records) == {NEVER: {"half": "helps"}}


def test_runs_are_sorted_as_the_study_names_them():
    records = [record(a, s, start=p) for p in ("zero", "sometimes", "never") for a in ("odd", *ARMS) for s in (3, 1)]
    found = statistics.places(reversed(records))
    assert [place.start for place in found] == ["never", "sometimes", "zero"]
    assert list(found[NEVER]) == [*ARMS, "odd"] and list(found[NEVER]["full"]) == [1, 3]
    assert statistics.part_of("half") == "exposure" and statistics.part_of("odd") == "other"


def test_what_cannot_be_compared_is_refused_in_one_line():
    with pytest.raises(ValueError, match="^start sometimes, size small: no record of arm 'vanilla'.*run it") as error:
        statistics.places([record(), record("full", start="sometimes")])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="^start never, size small: arm 'full' has two records of seed 3; keep one"):
        statistics.places([record(), record("full", 3), record("full", 3)])


def test_episodes_to_vanillas_last_validation():
    """128 episodes a round. Vanilla's mean ends at 0.4. The arm's mean is 0.1, 0.35, 0.55: it crosses a quarter of the
    way from round 8 to round 12."""

    def runs(arm, *scores):
        curves = [zip((4, 8, 12), of, strict=True) for of in scores]
        return [record(arm, s, validation=list(curve)) for s, curve in enumerate(curves)]

    vanilla = runs("vanilla", (0.1, 0.2, 0.3), (0.1, 0.2, 0.5))
    found = arms(*vanilla, *runs("full", (0.0, 0.3, 0.5), (0.2, 0.4, 0.6)), *runs("half", (0.1, 0.3, 0.39)))
    assert statistics.episodes_to_vanilla(found, "full") == pytest.approx(9 * 128)
    assert statistics.episodes_to_vanilla(found, "vanilla") == 12 * 128
    # half has seed 0 alone, whose vanilla ends at 0.3
    assert statistics.episodes_to_vanilla(found, "half") == pytest.approx(8 * 128)
    found = arms(
        *vanilla, *runs("full", (0.5, 0.3, 0.1)), *runs("half", (0.1, 0.1, 0.1)), record("turn", validation=[])
    )
    assert statistics.episodes_to_vanilla(found, "full") == 4 * 128  # there at its first validation
    assert statistics.episodes_to_vanilla(found, "half") == math.inf
    assert statistics.episodes_to_vanilla(found, "turn") is None


def test_validation_is_averaged_where_every_seed_has_it():
    runs = [record(seed=0, validation=[(0, 0.1), (4, 0.2)]), record(seed=1, validation=[(4, 0.4), (8, 0.5)])]
    ((episodes, mean, error),) = statistics.validation(runs)
    assert (episodes, mean, error) == (512, pytest.approx(0.3), pytest.approx(0.1))
    assert statistics.validation(runs[:1])[0] == (0, 0.1, None)
    assert statistics.validation([record(validation=[(4, None)])]) == []


@pytest.mark.parametrize(("sd", "delta", "n"), [(0.03, 0.03, 10), (0.02, 0.03, 6), (0.05, 0.03, 24), (0.0, 0.03, 2)])
def test_seeds_needed_is_the_fewest_that_are_enough(sd, delta, n):
    """The n are of the loop written out by hand from tables of t."""

    def enough(n):
        return (scipy.stats.t.ppf(0.975, n - 1) + scipy.stats.t.ppf(0.8, n - 1)) * sd / math.sqrt(n) <= delta

    assert statistics.seeds_needed(sd, delta) == n
    assert enough(n) and (n == 2 or not enough(n - 1))


def test_seeds_needed_have_the_power_they_were_asked_for():
    """The exact power of the paired t-test, from the noncentral t, is 80 % within two points."""
    n = statistics.seeds_needed(0.05, 0.03)
    shift, bound = 0.03 / 0.05 * math.sqrt(n), scipy.stats.t.ppf(0.975, n - 1)
    power = scipy.stats.nct.sf(bound, n - 1, shift) + scipy.stats.nct.cdf(-bound, n - 1, shift)
    assert 0.79 < power < 0.83


def test_power_splits_the_spread_between_tasks_and_runs():
    """Differences +-0.1 around 0: variance 4 * 0.01 / 3; scores of one half: up to 0.5 / 400 can be the tasks'."""
    records = [record(seed=s, test=0.5) for s in range(4)]
    records += [record("full", s, test=0.5 + (-1) ** s * 0.1) for s in range(4)]
    found = statistics.power(arms(*records), tasks=400)
    assert (found.pairs, found.seeds_now) == (4, 4)
    assert found.sd**2 == pytest.approx(0.04 / 3) and found.sampling**2 == pytest.approx(0.5 / 400)
    assert found.seeds == statistics.seeds_needed(found.sd, 0.03)
    assert found.seeds_all_tasks == statistics.seeds_needed(math.sqrt(0.04 / 3 - 0.5 / 400), 0.03)
    assert found.tasks_needed is None  # what runs differ by is too much for four seeds
    assert statistics.power(arms(record(), record("full")), tasks=400) is None


def test_tasks_needed_bring_the_spread_down_to_what_the_seeds_allow():
    records = [record(seed=s, test=0.5) for s in range(4)]
    records += [record("full", s, test=0.5 + (-1) ** s * 0.02) for s in range(4)]
    found = statistics.power(arms(*records), tasks=400, delta=0.01)
    assert found.sampling == found.sd and found.seeds_all_tasks == 2  # it can all be the tasks': 0.5 / 400 is more

    def seeds(tasks):
        return statistics.seeds_needed(found.sd * math.sqrt(400 / tasks), 0.01)

    assert (seeds(found.tasks_needed), seeds(found.tasks_needed - 2)) == (4, 5)
