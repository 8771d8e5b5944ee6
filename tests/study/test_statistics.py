"""Intervals against scipy, differences and crossings against numbers worked by hand."""

import math

import numpy as np
import pytest
import scipy.stats

from configs.toolbox import ARMS
from experiments.study import statistics
from experiments.study.statistics import Estimate, Place, success
from seal_jax.interface.settings import COMPONENTS

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
    nothing = (Estimate(0.05, 0.05, 4), Estimate(0.5, None, 1), None)
    luck = (Estimate(0.05, 0.01, 2), Estimate(0.05, 1e-15, 3))  # two seeds; three that agree to the last task
    assert [statistics.verdict(x) for x in nothing + luck] == ["not shown"] * 5


def test_any_arm_can_be_the_one_compared_with():
    """Seeds 1 and 2 are common: +0.2 and +0.1, whatever vanilla has."""
    half = [record("half", s, test=x) for s, x in ((1, 0.3), (2, 0.5), (4, 0.9))]
    strip = [record("half_strip", s, test=x) for s, x in ((1, 0.5), (2, 0.6), (3, 0.0))]
    found = arms(record(seed=9), *half, *strip)
    assert statistics.paired(found, "half_strip", success("test"), "half") == pytest.approx([0.2, 0.1])
    gain = statistics.difference(found, "half_strip", success("test"), "half")
    assert (gain.mean, gain.n) == (pytest.approx(0.15), 2)
    assert statistics.difference(found, "half_strip", success("test")) is None  # no seed in common with vanilla
    assert statistics.difference(found, "half_strip", success("test"), "full") is None  # no run yet


def test_closed_loop_arms_are_those_whose_cues_follow_the_profile():
    assert {"full", "half", "anneal", "cap_only"} <= set(statistics.CHOOSABLE) < set(statistics.CLOSED_LOOP) < set(ARMS)
    added = {f"half_strip_{name}" for name in (*COMPONENTS, "anneal")}
    assert set(statistics.CLOSED_LOOP) - set(statistics.CHOOSABLE) == added
    apart = {"vanilla", "no_environment", "no_closed_loop", "half_strip_frozen", "release", "turn"}
    assert not apart & set(statistics.CLOSED_LOOP)


def test_the_arm_is_chosen_on_validation_alone():
    """Best rounds: half 0.5 and 0.3, anneal 0.45 and 0.4, the others 0.2; frozen ones do not count; test says full."""

    def run(arm, start, seed):
        best = {"half": (0.5, 0.3), "anneal": (0.45, 0.4), "half_strip_frozen": (0.9, 0.9)}.get(arm, (0.2, 0.2))
        best = best[start == "sometimes"]
        return record(arm, seed, start=start, test=0.9 if arm == "full" else 0.3, validation=[(4, best), (8, 0.1)])

    def choice(records):
        return statistics.chosen(statistics.places(records))

    starts = ("never", "sometimes")
    records = [run(arm, start, seed) for arm in ARMS for start in starts for seed in (0, 1)]
    assert choice(records) == ("anneal", pytest.approx(0.425), 2)
    assert statistics.chosen(statistics.places(records), "large") is None
    assert choice([r for r in records if r["start"] == "never"]) is None
    assert choice([r for r in records if r["arm"] not in ("turn", "no_closed_loop")]) is not None
    # The seeds that all have; one that was never validated is none.
    missing = [r for r in records if (r["arm"], r["start"], r["seed"]) != ("cap_only", "sometimes", 1)]
    assert choice(missing) == choice([*missing, record("cap_only", 1, start="sometimes", validation=[])])
    assert choice(missing) == ("anneal", pytest.approx(0.425), 1)
    assert choice([r for r in missing if r["seed"] == 1]) is None
    # Later ones have no say.
    late = [record(arm, 3, start=start, validation=[(4, 0.9 * (arm == "half"))]) for arm in ARMS for start in starts]
    assert choice([*records, *late]) == ("anneal", pytest.approx(0.425), 2)


def test_the_target_is_of_fresh_seeds_and_both_starts():
    def verdict(never, sometimes, ood=0.0, seeds=5):
        """With these gains, and that much out of distribution from `never`."""
        records = []
        for start, gain in (("never", never), ("sometimes", sometimes)):
            for s in range(seeds):
                score = 0.3 + gain + 0.01 * s
                success = {"test": score, "ood": 0.1 + (start == "never") * (ood + 0.001 * s)}
                records += [record(seed=s, start=start, success={"test": 0.3, "ood": 0.1})]
                records += [record("half", s, start=start, success=success)]
        return statistics.target(statistics.places(records), "half")

    assert verdict(0.1, 0.1) == "met" and verdict(0.1, 0.1, ood=0.2) == "met"
    assert verdict(0.1, 0.07) == verdict(0.07, 0.1) == "not met"  # 9 points, with what seeds add
    assert verdict(0.1, 0.1, ood=-0.05) == "not met"
    assert verdict(0.1, 0.1, seeds=4) == "not yet" and statistics.target({}, "half") == "not yet"


def test_a_run_that_began_with_another_policy_is_no_pair():
    """The first round tells, since nothing is cued in it; not of arms that are cued from the start."""
    here, there = ({"profile/pass": [0.25, *[x] * 11], "refused/bare": [7.0] * 12} for x in (0.5, 0.6))
    other = {**here, "refused/bare": [8.0] * 12}
    records = [record(curves=here), record("full", curves=there), record("half", curves=other)]
    records += [record("release", curves=other), record("turn", 1, curves=other)]
    assert statistics.begun_apart(arms(*records)) == [("half", 0)]


def test_rounds_that_taught_nothing_are_no_part_of_what_is_a_share_of_the_advantages():
    curves = {"groups/informative": [0.5, 0.0, None, 0.2], "x": [1.2, 0.0, 1.4, None, 1.6]}
    assert statistics.present(record(curves=curves), "x", taught=True) == [1.2, 1.4, 1.6]
    assert statistics.present(record(curves=curves), "x") == [1.2, 0.0, 1.4, 1.6]


def test_runs_are_sorted_as_the_study_names_them():
    records = [record(a, s, start=p) for p in ("zero", "sometimes", "never") for a in ("odd", *ARMS) for s in (3, 1)]
    found = statistics.places(reversed(records))
    assert [place.start for place in found] == ["never", "sometimes", "zero"]
    assert list(found[NEVER]) == [*ARMS, "odd"] and list(found[NEVER]["full"]) == [1, 3]
    assert statistics.part_of("half") == "exposure" and statistics.part_of("odd") == "other"


def test_what_cannot_be_compared_is_refused_in_one_line():
    with pytest.raises(ValueError, match="^start sometimes, size small: no record of arm 'vanilla'.*run it") as error:
        statistics.places([record("full", start="sometimes")])
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="^start never, size small: arm 'full' has two records of seed 3; keep one"):
        statistics.places([record(), record("full", 3), record("full", 3)])


def test_what_has_no_vanilla_is_left_out():
    records = [record(), record("full"), record("full", start="sometimes"), record("half", size="large")]
    assert list(statistics.places(records)) == [NEVER]
    assert statistics.without_vanilla(records) == [Place("never", "large"), Place("sometimes", "small")]
    assert statistics.places([]) == {}


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
    # Vanilla by the same rule: it is at its last score halfway from round 4 to round 8, above it, and back.
    assert statistics.episodes_to_vanilla(arms(*runs("vanilla", (0.1, 0.5, 0.3))), "vanilla") == pytest.approx(6 * 128)
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


@pytest.mark.parametrize(
    ("sd", "delta", "n"), [(0.03, 0.03, 10), (0.02, 0.03, 6), (0.05, 0.03, 24), (0.5, 0.03, 2183), (0.0, 0.03, 2)]
)
def test_seeds_needed_is_the_fewest_that_have_the_power(sd, delta, n):
    """The power of the paired t-test is that of the noncentral t, above its upper bound."""

    def power(n):
        shift = delta * math.sqrt(n) / sd if sd else 1e3
        return scipy.stats.nct.sf(scipy.stats.t.ppf(0.975, n - 1), n - 1, shift)

    assert statistics.seeds_needed(sd, delta) == n
    assert power(n) >= 0.8 and (n == 2 or power(n - 1) < 0.8)


def test_power_is_what_simulated_seeds_have():
    """200,000 studies of the seeds needed; the standard error of the share is 0.1 points."""
    n = statistics.seeds_needed(0.05, 0.03)
    draws = np.random.default_rng(0).normal(0.03, 0.05, (200_000, n))
    seen = draws.mean(1) * math.sqrt(n) / draws.std(1, ddof=1) > scipy.stats.t.ppf(0.975, n - 1)
    assert 0.797 < seen.mean() < 0.83


def test_power_splits_the_spread_between_tasks_and_runs():
    """Differences +-0.1 around 0: variance 4 * 0.01 / 3; scores of one half: up to 0.5 / 400 can be the tasks'."""
    records = [record(seed=s, test=0.5) for s in range(4)]
    records += [record("full", s, test=0.5 + (-1) ** s * 0.1) for s in range(4)]
    found = statistics.power(arms(*records))
    assert (found.pairs, found.seeds_now, found.tasks.n) == (4, 4, 400)
    assert found.sd**2 == pytest.approx(0.04 / 3) and found.tasks.sampling**2 == pytest.approx(0.5 / 400)
    assert found.seeds == statistics.seeds_needed(found.sd, 0.03)
    assert found.tasks.seeds == statistics.seeds_needed(math.sqrt(0.04 / 3 - 0.5 / 400), 0.03)
    assert found.tasks.needed is None  # what runs differ by is too much for four seeds
    assert statistics.power(arms(record(), record("full"))) is None


def test_the_part_of_the_tasks_needs_their_number():
    """Records of before it was kept do not have it; with different ones there is no one answer."""
    records = [record(a, s, test=0.3 + 0.01 * s * (a == "full")) for a in ("vanilla", "full") for s in range(3)]
    whole = statistics.power(arms(*records))
    old = statistics.power(arms(*({k: v for k, v in r.items() if k != "n_test"} for r in records)))
    mixed = statistics.power(arms(*records[:-1], {**records[-1], "n_test": 8}))
    assert whole.tasks is not None and old.tasks is mixed.tasks is None
    assert (old.sd, old.seeds) == (mixed.sd, mixed.seeds) == (whole.sd, whole.seeds)


def test_tasks_needed_bring_the_spread_down_to_what_the_seeds_allow():
    records = [record(seed=s, test=0.5) for s in range(4)]
    records += [record("full", s, test=0.5 + (-1) ** s * 0.02) for s in range(4)]
    found = statistics.power(arms(*records), delta=0.01)
    assert found.tasks.sampling == found.sd and found.tasks.seeds == 2  # it can all be the tasks': 0.5 / 400 is more

    def seeds(tasks):
        return statistics.seeds_needed(found.sd * math.sqrt(400 / tasks), 0.01)

    assert (seeds(found.tasks.needed), seeds(found.tasks.needed - 2)) == (4, 5)
