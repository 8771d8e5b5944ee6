"""Counting, the moving average, and the way to JSON and back."""

import json

import pytest

from seal_jax.diagnosis import Counts, Profile, count
from seal_jax.types import LABEL_ID, LABELS, Diagnosis, TurnLabel


def diagnosis(*labels):
    return Diagnosis(tuple(TurnLabel(x) for x in labels))


A = diagnosis("pass", "recovery_failure", "not_reached")
B = diagnosis("pass", "pass")
C = diagnosis("correct_abstention", "env_error")


def observe(profile, diagnoses, categories, rate, **options):
    return profile.update(count(diagnoses, categories), rate, **options)


def test_counts_by_label_and_category():
    c = count([A, B, C], ["base", "base", "tau"])
    assert c.labels[LABEL_ID["pass"]] == 3
    assert c.labels[LABEL_ID["not_reached"]] == 1
    assert c.turns == 5
    assert c.trajectories == (2, 0, 0, 0, 1)


def test_one_category_for_each():
    with pytest.raises(ValueError, match="2 diagnoses but 1 categories"):
        count([A, B], ["base"])


def test_counts_sum_over_hosts():
    whole = count([A, B, C], ["base", "miss_func", "base"])
    parts = [count([A], ["base"]), count([B], ["miss_func"]), count([C], ["base"])]
    assert sum(parts, Counts()) == whole
    summed = [sum(x) for x in zip(*(p.flat() for p in parts), strict=True)]
    assert Counts.from_flat(summed) == whole
    assert Profile().update(Counts.from_flat(summed), 0.5) == observe(
        Profile(), [A, B, C], ["base", "miss_func", "base"], 0.5
    )


def test_flat_has_one_length():
    assert len(count([]).flat()) == len(count([A], ["base"]).flat())
    with pytest.raises(ValueError, match="pass what flat"):
        Counts.from_flat([1, 2])


def test_rates_are_shares_of_labelled_turns():
    p = observe(Profile(), [A, B, C], None, 0.5)
    assert p.rates["pass"] == pytest.approx(3 / 5)
    assert p.rates["recovery_failure"] == pytest.approx(1 / 5)
    assert "not_reached" not in p.rates
    assert sum(p.rates.values()) == pytest.approx(1.0)
    assert p.ema[LABEL_ID["not_reached"]] == 0.0


def test_first_round_is_taken_as_it_is_then_averaged():
    p = observe(Profile(), [diagnosis("missing_tool_call")], None, 0.25)
    assert p.rates["missing_tool_call"] == 1.0
    p = observe(p, [diagnosis("pass")], None, 0.25)
    assert p.rates["missing_tool_call"] == pytest.approx(0.75)
    assert p.latest_rates["missing_tool_call"] == 0.0
    assert p.counts[LABEL_ID["pass"]] == 1
    assert p.total.turns == 2
    assert p.rounds == 2


def test_rate_one_forgets():
    p = observe(observe(Profile(), [diagnosis("missing_tool_call")], None, 1.0), [diagnosis("pass")], None, 1)
    assert p.rates["missing_tool_call"] == 0.0


@pytest.mark.parametrize("rate", [0, -0.1, 1.5, float("nan")])
def test_bad_rate(rate):
    with pytest.raises(ValueError, match="profile rate"):
        observe(Profile(), [A], None, rate)


def test_bad_rows():
    with pytest.raises(ValueError, match="'hinted'"):
        observe(Profile(), [A], None, 0.5, rows="hinted")


@pytest.mark.parametrize("empty", [[], [diagnosis()], [diagnosis("not_reached", "env_error")]])
def test_nothing_observed_changes_no_rate(empty):
    p = observe(Profile(), empty, None, 0.5)
    assert p.rates == Profile().rates
    assert p.rounds == 1
    before = observe(Profile(), [A], None, 0.5)
    assert observe(before, empty, None, 0.5).ema == before.ema
    # The first real round after an empty one still counts in full.
    assert observe(p, [diagnosis("missing_tool_call")], None, 0.5).rates["missing_tool_call"] == 1.0


def test_categories_average_apart():
    p = observe(Profile(), [diagnosis("missing_tool_call"), diagnosis("pass")], ["miss_func", "base"], 0.5)
    p = observe(p, [diagnosis("pass")], ["base"], 0.5)
    rates = p.to_dict()["rates_by_category"]
    assert rates["miss_func"]["missing_tool_call"] == 1.0
    assert rates["base"]["pass"] == 1.0


def test_json_round_trip():
    p = observe(Profile(), [A, B], ["base", "x"], 0.3, rows="bare")
    p = observe(p, [C], ["long_context"], 0.3, rows="bare")
    assert Profile.from_dict(json.loads(json.dumps(p.to_dict()))) == p
    assert p.to_dict()["rates"].keys() == set(LABELS)
    with pytest.raises(ValueError, match="'ema' |'rates'"):
        Profile.from_dict({k: v for k, v in p.to_dict().items() if k != "rates"})
