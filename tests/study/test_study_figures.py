"""The study's figures: drawn from records alone, the same bytes twice, and whatever part of the study there is."""

import pytest

from configs.toolbox import ARMS
from experiments.study import figures, statistics

from .made import record, study

NAMES = {"study_difference", "study_curves", "study_mechanism", "study_labels", "study_cues"}


def test_the_same_records_give_the_same_bytes(tmp_path):
    records = [r for r in study(seeds=2, starts=("never",)) if r["arm"] in ("vanilla", "full") and r["size"] == "small"]
    first, again = (figures.draw(records, tmp_path / folder) for folder in "ab")
    assert {p.name for p in first} == {f"{name}.{kind}" for name in NAMES for kind in ("png", "svg")}
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
    assert all(p.stat().st_size < 150_000 for p in first)


def test_every_arm_has_its_interval_in_the_forest():
    found = statistics.places(study(seeds=2))
    never, sometimes = figures.difference(found).axes
    assert never.get_title(loc="left") == 'start "never" (hollow: large)'
    dots = [line for line in sometimes.lines if line.get_marker() == "o"]
    others = len(ARMS) - 1
    assert len(dots) == others + 2 and len(never.get_yticks()) == others
    place = statistics.Place("sometimes", "small")
    gain = statistics.difference(found[place], "no_environment", statistics.success("test"))
    assert list(dots[0].get_xdata()) == [pytest.approx(100 * gain.mean)]


def test_fresh_seeds_are_lines_from_vanilla_to_the_chosen_arm(tmp_path):
    """Only seeds that have both; the mean of these is drawn too. The large size and other arms are left out."""
    fresh = [record(arm, s, test=x) for arm, s, x in [("vanilla", 100, 0.3), ("half", 100, 0.4), ("half", 101, 0.9)]]
    fresh += [record("vanilla", 102, test=0.2), record("half", 102, test=0.5), record("turn", 102, test=0.9)]
    fresh += [record(arm, 100, size="large") for arm in ("vanilla", "half")]
    best = statistics.Chosen("half", 0.5, 3)
    (ax,) = figures.fresh(best, statistics.confirming(fresh)).axes
    assert [list(line.get_ydata()) for line in ax.lines] == [[0.3, 0.4], [0.2, 0.5], [0.25, 0.45]]
    assert [text.get_text() for text in ax.texts] == ["+20.0 [-107.1, +147.1]"]
    assert figures.fresh(None, statistics.confirming(fresh)) is None
    assert figures.fresh(best, statistics.confirming(fresh[1:3])) is None  # nothing of vanilla yet

    # A whole study draws it beside the others; without fresh seeds it is taken away again.
    every = study(seeds=1)
    chosen = statistics.chosen(statistics.places(every)).arm
    more = [record(arm, 100) for arm in ("vanilla", chosen)]
    assert {p.stem for p in figures.draw(every + more, tmp_path)} == NAMES | {"study_fresh"}
    assert {p.stem for p in figures.draw(every, tmp_path)} == NAMES == {p.stem for p in tmp_path.iterdir()}


def test_rounds_without_a_value_are_left_out():
    runs = [record(curves={"x": [None, 0.2, 0.4]}), record(seed=1, curves={"x": [None, 0.4]})]
    assert figures.over_rounds(runs, "x") == [(2, pytest.approx(0.3)), (3, 0.4)]
    met = {"refused/bare": [0.0, 4.0, 5.0], "refused/bare/repaired": [0.0, 1.0, 5.0]}
    assert figures.repair_rates([record(curves=met), record(seed=1, curves=met)]) == [(2, 0.25), (3, 1.0)]
    assert figures.cue_shares([record(cues=[("a",), ()]), record(seed=1, cues=[("a",)])], "a") == [1.0, 0.0]
    assert figures._stretches([0.0, 0.5, 0.5, 1.0, 0.0, 0.5]) == [(2, 2, 0.5), (4, 1, 1.0), (6, 1, 0.5)]


def test_what_there_is_nothing_to_draw_of_is_left_out(tmp_path):
    """Vanilla alone, never validated and without a single value in its curves; and a start without vanilla."""
    alone = [record(validation=[]), record("full", start="sometimes")]
    assert figures.draw(alone, tmp_path) == figures.draw([], tmp_path) == []
    with pytest.raises(ValueError, match="start never, size small: no record of arm 'vanilla'"):
        figures.draw([record("full")], tmp_path)


def test_a_start_that_arms_are_not_chosen_from_is_drawn_where_it_stands_alone(tmp_path):
    records = [record(arm, start=s) for s in ("never", "seldom") for arm in ("vanilla", "half")]
    for few, many in ((records, ["never"]), (records[2:], ["seldom"])):
        svg = (figures.draw(few, tmp_path)[1]).read_text()
        assert [s for s in ("never", "seldom") if f'start "{s}"' in svg] == many


def test_fresh_seeds_are_drawn_like_others_where_there_are_no_others(tmp_path):
    drawn = figures.draw([record(arm, 100) for arm in ("vanilla", "half")], tmp_path)
    assert {p.stem for p in drawn} == {"study_difference", "study_curves"}


def test_one_seed_and_a_missing_arm_are_drawn():
    """Full was run for one start only: the other's panels say so."""
    on = [("recovery_failure",)] * 12
    profile = {"profile/pass": [0.5] * 12, "groups/all_fail": [0.5] * 12}
    records = [record(start=s, curves=profile) for s in ("never", "sometimes")] + [record("full", cues=on)]
    found = statistics.places(records)
    left, right = figures.difference(found).axes
    assert [line.get_marker() for line in left.lines].count("o") == 1
    assert [line.get_marker() for line in right.lines].count("o") == 0
    for figure in (figures.cues(found), figures.labels(found)):
        assert "no run yet" in [text.get_text() for text in figure.axes[-1].texts]
    assert figures.curves(found) is not None and figures.mechanism(found) is not None
