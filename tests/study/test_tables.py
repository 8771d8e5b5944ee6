"""The study's tables on records whose answers are known."""

import pytest

from experiments.study import statistics, tables

from .made import ROUNDS, record, study


def rows(text, title=""):
    """{arm: {column: cell}} of the first table after a title; a column named twice keeps its first cell."""
    lines = text[text.index(title) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines[start:] if line.startswith("|")]
    end = next((i for i, line in enumerate(lines[start:]) if not line.startswith("|")), len(lines))
    head, _, *body = cells[:end]
    return {row[1].strip("`"): dict(zip(reversed(head), reversed(row), strict=True)) for row in body}


@pytest.fixture(scope="module")
def pair():
    """Vanilla 0.30, 0.32 and half 0.40, 0.44: +0.10 and +0.12."""
    halves = ("recovery_failure",), ()
    curves = {
        "groups/informative": [0.2, 0.4] * 6,
        "groups/all_fail": [None, 0.5] * 6,
        "refused/bare": [0.0, 10.0, 10.0, 5.0] + [9.0] * 4 + [10.0, 10.0, 10.0, 20.0],
        "refused/bare/passed": [0.0, 1.0, 2.0, 2.0] + [9.0] * 4 + [10.0, 5.0, 5.0, 20.0],
        "weight/gain": [1.2, 1.6] * 6,
        "advantage_mass/pass": [0.2] * 12,
        "advantage_mass/recovery_failure": [0.5] * 12,
        "advantage_mass/state_mismatch": [0.25] * 12,
        "advantage_mass/response_mismatch": [0.05] * 12,
        "profile/pass": [0.25, *[0.5] * 10, 0.75],
    }
    vanilla = [record(seed=s, test=0.3 + 0.02 * s) for s in range(2)]
    half = [
        record("half", s, test=0.4 + 0.04 * s, curves=curves, cues=[halves[r >= 6 + 3 * s] for r in range(ROUNDS)])
        for s in range(2)
    ]
    return tables.report(vanilla + half, tasks=400)


def test_results(pair):
    found = rows(pair, "### Start `never`, small")
    # sd 0.0141 / sqrt(2) = 0.01, t = 12.706
    assert found["half"] == {
        "part": "exposure",
        "arm": "`half`",
        "seeds": "2",
        "test": "42.0 ± 25.4",
        "- vanilla": "+11.0 [-1.7, +23.7]",
        "verdict": "not shown",
        "ood": "32.0 ± 25.4",
        "cued": "62.0 ± 25.4",
        "after an error": "25.0 ± 0.0",
        "episodes to vanilla's last validation": "1,536",
        "episodes": "1,536",
        "k sampled tokens": "200",
        "seconds": "90",
    }
    assert found["vanilla"]["- vanilla"] == found["vanilla"]["verdict"] == ""


def test_categories(pair):
    for title in ("by category, test", "by category, out of distribution"):
        assert rows(pair, title) == {
            "half": {"part": "exposure", "arm": "`half`"}
            | dict.fromkeys(("base", "miss func", "miss param", "long context"), "+11.0 [-1.7, +23.7]")
        }


def test_mechanisms(pair):
    found = rows(pair, "What happened in training")
    assert found["half"] == {
        "part": "exposure",
        "arm": "`half`",
        "groups with signal": "30.0",
        "all-fail groups": "50.0",
        "bare repairs": "20 → 80",  # 5 of 25 in four rounds, 40 of 50
        "cued repairs": "-",
        "cued - bare score": "+20.0",
        "weight gain": "1.40",
        "advantage on": "recovery failure 50, state mismatch 25, pass 20",
    }
    assert set(found["vanilla"].values()) == {"paper", "`vanilla`", "-", "+20.0"}


def test_profiles_and_cues(pair):
    assert rows(pair, "Turns by label")["half"]["pass"] == "25 → 75"
    assert rows(pair, "Turns by label")["vanilla"]["pass"] == "-"
    assert rows(pair, "Rounds in which a cue")["half"]["recovery failure"] == "62"  # 6 of 12 and 9 of 12
    assert "No cue in any round: `vanilla`." in pair


def test_the_power_note_says_what_was_computed(pair):
    found = statistics.Power(0.03, 8, 0.05, 0.033, 400, 4, 24, 16, None)
    note = tables.power_note(found)
    assert "deviation of 5.0 points" in note and "400 test tasks can be up to 3.3." in note
    assert "takes 24 seeds; up to 4 were run. More tasks would bring that down to 16 seeds at best" in note
    assert "no number of them would do with 4 seeds" in note
    enough = statistics.Power(0.03, 8, 0.01, 0.033, 400, 8, 4, 2, 100)
    assert "4 seeds are enough to see 3 points; up to 8 were run." in tables.power_note(enough)
    assert "What can be seen" in pair


def test_a_study_that_is_half_way_is_reported():
    """One seed, one run that was never validated and met no refusal, one arm without its pair; nothing is NaN."""
    bare = record("full", 0, validation=[], after_error=None, by_category={}, cues=[], curves={"weight/gain": []})
    text = tables.report([record(seed=0), bare, record("half", 5, success={"test": 0.4})])
    found = rows(text, "### Start")
    assert found["full"]["- vanilla"] == "+0.0 [-]" and found["full"]["test"] == "30.0 ± -"
    assert found["full"]["episodes to vanilla's last validation"] == found["full"]["after an error"] == "-"
    assert found["half"]["- vanilla"] == found["half"]["cued"] == "-" and found["half"]["verdict"] == "not shown"
    assert "cannot be said yet" in text
    assert not any(word in text.lower() for word in ("nan", "none", "inf"))
    assert tables.report([]) == "No run is finished yet.\n"
    assert "by category" not in tables.report([record()])
    with pytest.raises(ValueError, match="start sometimes"):
        tables.report([record("full", start="sometimes")])


def test_a_whole_study_has_a_section_for_each_start_and_size():
    text = tables.report(study(seeds=2))
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "### Start `never`, small",
        "### Start `never`, large",
        "### Start `sometimes`, small",
        "### Start `sometimes`, large",
    ]
    large = rows(text, "### Start `sometimes`, large")
    assert [(arm, row["part"]) for arm, row in large.items()] == [
        ("vanilla", "paper"),
        ("full", ""),
        ("half", "exposure"),
    ]
