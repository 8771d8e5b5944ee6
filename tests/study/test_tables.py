"""The study's tables on records whose answers are known."""

from dataclasses import replace

import pytest

from configs.toolbox import ARMS
from experiments.study import statistics, tables
from experiments.study.parts import PARTS

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
        "groups/informative": [0.2, 0.4] * 5 + [0.0, 0.6],
        "groups/all_fail": [None, 0.5] * 6,
        "refused/bare": [0.0, 10.0, 10.0, 5.0] + [9.0] * 4 + [10.0, 10.0, 10.0, 20.0],
        "refused/bare/repaired": [0.0, 1.0, 2.0, 2.0] + [9.0] * 4 + [10.0, 5.0, 5.0, 20.0],
        # The eleventh round taught nothing.
        "weight/gain": [1.2, 1.6] * 5 + [0.0, 1.4],
        "advantage_mass/pass": [0.2] * 10 + [0.0, 0.2],
        "advantage_mass/recovery_failure": [0.5] * 10 + [0.0, 0.5],
        "advantage_mass/state_mismatch": [0.25] * 10 + [0.0, 0.25],
        "advantage_mass/response_mismatch": [0.05] * 10 + [0.0, 0.05],
        "profile/pass": [0.25, *[0.5] * 10, 0.75],
    }
    vanilla = [record(seed=s, test=0.3 + 0.02 * s) for s in range(2)]
    half = [
        record("half", s, test=0.4 + 0.04 * s, curves=curves, cues=[halves[r >= 6 + 3 * s] for r in range(ROUNDS)])
        for s in range(2)
    ]
    return tables.report(vanilla + half)


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
        "three cues shown": "62.0 ± 25.4",
        "after an error": "25.0 of 100",
        "reported round": "12",
        "episodes to vanilla's last validation": "1,536",
        "episodes": "1,536",
        "k sampled tokens": "200",
        "seconds": "90",
    }
    assert found["vanilla"]["- vanilla"] == found["vanilla"]["verdict"] == ""


def test_in_short_has_the_starts_side_by_side():
    """Every start's own difference and verdict; an arm that one start lacks has dashes there."""
    curves = {"refused/bare": [10.0] * ROUNDS, "refused/bare/repaired": [0.0] * 8 + [4.0] * 4}
    records = [record(seed=s, test=0.3, start=start) for s in range(3) for start in ("never", "sometimes", "seldom")]
    records += [record("half", s, test=0.4 + 0.01 * s, curves=curves) for s in range(3)]
    records += [record("turn", s, test=0.2 + 0.01 * s, start="sometimes") for s in range(3)]
    found = rows(tables.report(records), "### In short, small")
    assert list(found) == ["vanilla", "half", "turn"]
    assert found["half"] == {
        "part": "exposure",
        "arm": "`half`",
        "`never`: test": "41.0",
        "`never`: - vanilla": "+11.0 [+8.5, +13.5] helps",
        "`never`: repairs": "0 → 40",
        "`sometimes`: test": "-",
        "`sometimes`: - vanilla": "-",
        "`sometimes`: repairs": "-",
    }
    assert found["turn"]["`sometimes`: - vanilla"] == "-9.0 [-11.5, -6.5] hurts"
    assert found["vanilla"]["`never`: - vanilla"] == "" and found["vanilla"]["`never`: test"] == "30.0"
    assert "### In short" not in tables.report([record(start="seldom")])


def test_one_part_at_a_time():
    """half_strip is half and one thing more, +0.05, +0.07, +0.09 on the seeds both have; what `plain` and `frozen` lack
    is held against them."""
    records = [record("half", s, test=0.4) for s in range(3)]
    records += [record("half_strip", s, test=0.45 + 0.02 * s) for s in range(4)]
    records += [record("half_strip_frozen", 0, test=0.55), record("odd", 0), record("progress", 5), record(seed=9)]
    text = tables.report(records)
    lines = text[text.index("One part at a time") :].split("\n\n")[1].splitlines()
    assert lines[2:] == [
        "| cues trained away (`strip_in_update`) | `half_strip` | `half` | 3 | +7.0 [+2.0, +12.0] | helps "
        "| +7.0 [+2.0, +12.0] |",
        "| the loop closed, cues on half, trained away | `half_strip` | `half_strip_frozen` | 1 | -10.0 [-] "
        "| not shown | -10.0 [-] |",
    ]
    assert "One part at a time" not in tables.report([record(), record("half")])


def test_parts_are_of_arms_that_there_are():
    assert {arm for part in PARTS for arm in part[1:]} == set(ARMS)  # and none is left out
    assert len({part[1:] for part in PARTS}) == len({part.what for part in PARTS}) == len(PARTS)


def chosen_records(seeds=2):
    """Every arm that can be chosen, and vanilla; anneal is best on validation and on test."""
    arms = ("vanilla", *statistics.CHOOSABLE)
    return [
        record(
            a, s, start=p, test=0.3 + (0.1 + 0.01 * s) * (a == "anneal"), validation=[(4, 0.3 + 0.15 * (a == "anneal"))]
        )
        for a in arms
        for p in ("never", "sometimes")
        for s in range(seeds)
    ]


def test_the_chosen_arm_is_named_with_its_differences():
    records = chosen_records()
    text = tables.report(records)
    count = len(statistics.CHOOSABLE)
    assert f"`anneal` has the highest validation score of the {count} closed-loop arms: 45.0 %" in text
    assert "mean over 2 seeds and all starts)" in text and "wholly below): **not yet**" in text
    gain = "+10.5 [+4.1, +16.9] |  | +10.5 [+4.1, +16.9]"
    for start in ("never", "sometimes"):
        assert f"| `{start}` | 2, those of the choice | 30.0 | 40.5 | {gain} |" in text

    # On fresh seeds it is worse. They choose nothing, and have tables of their own.
    fresh = [record("vanilla", 100 + s) for s in range(4)]
    fresh += [record("anneal", 100 + s, test=0.25 + 0.001 * s) for s in range(3)]
    with_fresh, _, sections = tables.report([*fresh, *records]).partition("\n### Start `never`, small, fresh seeds\n")
    line = "| `never` | 3, fresh | 30.0 | 25.1 | -4.9 [-5.1, -4.7] | hurts | -4.9 [-5.1, -4.7] | 1,536 (1,536) |"
    assert [x for x in with_fresh.splitlines() if x not in text.splitlines()] == [line]
    assert rows(sections)["anneal"]["- vanilla"] == "-4.9 [-5.1, -4.7]" and "###" not in sections

    text = tables.report([r for r in records if r["arm"] != "half"])
    assert "Not all closed-loop arms are finished" in text and "highest validation score" not in text


def test_fresh_runs_confirm_nothing_without_their_vanilla_or_of_another_arm():
    records = chosen_records()
    assert tables.report([*records, record("anneal", 100)]) == tables.report(records)  # its vanilla is not there yet
    text = tables.report([*records, record(seed=100), record("turn", 100), record("half_strip_err", 100)])
    assert ", fresh |" not in text and "**not yet**" in text
    assert list(rows(text, "### Start `never`, small, fresh seeds")) == ["vanilla", "turn", "half_strip_err"]
    assert f"- `half_strip_err`: {ARMS['half_strip_err'].says}" in text


def test_fresh_seeds_alone_have_a_report():
    """Of a study that ran longer, say."""
    text = tables.report(
        [record(arm, 100 + s, test=0.3 + 0.1 * (arm == "half")) for arm in ("vanilla", "half") for s in range(3)]
    )
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        "### The arms",
        "### Start `never`, small, fresh seeds",
    ]
    assert rows(text, "### Start `never`")["half"]["- vanilla"] == "+10.0 [+10.0, +10.0]"


def test_each_size_has_its_own_choice():
    large = [{**r, "size": "large", "validation": [[4, 0.9 if r["arm"] == "half" else 0.1]]} for r in chosen_records(1)]
    text = tables.report([*chosen_records(), *large])
    small_text, large_text = text[text.index("### Chosen on validation, small") :].split("### Chosen")[1:3]
    assert "`anneal` has the highest" in small_text and "`half` has the highest" in large_text


def test_runs_from_another_policy_are_named():
    records = [record(curves={"refused/bare": [3.0] * ROUNDS}), record("full", curves={"refused/bare": [4.0] * ROUNDS})]
    assert "as their first rounds show, and so no pairs: `full` of seed 0." in tables.report(records)
    assert "no pairs" not in tables.report([record(), record("full")])


def test_what_an_arm_counts_differently_is_marked():
    curves = {"groups/informative": [0.4] * ROUNDS, "groups/all_fail": [0.2] * ROUNDS, "weight/gain": [1.5] * ROUNDS}
    curves |= {"advantage_mass/pass": [0.7] * ROUNDS}
    names = ("no_environment", "random", "release", "progress")
    text = tables.report([record(), *(record(arm, curves=curves) for arm in names)])
    found = rows(text, "What happened in training")
    assert {a: found[a]["groups with signal"] for a in names} == dict.fromkeys(names, "40.0") | {"progress": "40.0*"}
    assert found["progress"]["all-fail groups"] == "20.0*" and found["vanilla"]["all-fail groups"] == "-"
    assert "\\* `progress`: counted on its own rewards." in text
    assert "\n`release`: plays on after a failed turn" in text
    assert [found[a]["advantage on"] for a in names] == ["pass 70", "-", "-", "pass 70"]
    assert {found[a]["weight gain"] for a in names} == {"1.50"}


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
        "full rows": "-",
        "weight gain": "1.40",
        "advantage on": "recovery failure 50, state mismatch 25, pass 20",
    }
    assert set(found["vanilla"].values()) == {"paper", "`vanilla`", "-", "+20.0"}
    assert "own rewards" not in pair


def test_profiles_and_cues(pair):
    assert rows(pair, "Turns by label")["half"]["pass"] == "25 → 75"
    assert rows(pair, "Turns by label")["vanilla"]["pass"] == "-"
    assert rows(pair, "Rounds in which a cue")["half"]["recovery failure"] == "62"  # 6 of 12 and 9 of 12
    assert "No cue in any round: `vanilla`." in pair


def test_the_power_note_says_what_was_computed(pair):
    found = statistics.Power(0.03, 8, 0.05, 4, 24, statistics.Tasks(400, 0.033, 16, None))
    note = tables.power_note(found)
    assert "deviation of 5.0 points" in note and "400 test tasks can be up to 3.3." in note
    assert "takes 24 seeds; up to 4 were run. More tasks would bring that down to 16 seeds at best" in note
    assert "no number of them would do with 4 seeds" in note
    old = tables.power_note(replace(found, tasks=None))
    assert (
        "(pooled over 8 differences, which share vanilla's runs). At 80 %" in old
        and "takes 24 seeds; up to 4 were run. All seeds are" in old
    )
    enough = statistics.Power(0.03, 8, 0.01, 8, 4, statistics.Tasks(400, 0.033, 2, 100))
    assert "4 seeds are enough to see 3 points; up to 8 were run." in tables.power_note(enough)
    assert "What can be seen" in pair
    arms = tables.power_note(replace(found, spreads={"full": 0.02, "half": 0.1, "turn": 0.05}))
    assert "vanilla's runs; from 2.0, `full`, to 10.0, `half`)" in arms
    assert f"Seeing 9.5 points of `half` takes {statistics.seeds_needed(0.1, 0.095)}." in arms


def test_a_study_that_is_half_way_is_reported():
    """One seed, one run that was never validated and met no refusal, one arm without its pair; nothing is NaN."""
    bare = record("full", 0, validation=[], after_error=None, by_category={}, cues=[], curves={"weight/gain": []})
    text = tables.report([record(seed=0), bare, record("half", 5, success={"test": 0.4})])
    found = rows(text, "### Start")
    assert found["full"]["- vanilla"] == "+0.0 [-]" and found["full"]["test"] == "30.0 ± -"
    assert found["full"]["episodes to vanilla's last validation"] == found["full"]["after an error"] == "-"
    assert found["half"]["- vanilla"] == found["half"]["three cues shown"] == "-"
    assert found["half"]["verdict"] == "not shown"
    assert "cannot be said yet" in text
    assert not any(word in text.lower() for word in ("nan", "none", "inf"))
    assert tables.report([]) == "No run is finished yet.\n"
    assert "by category" not in tables.report([record()])
    with pytest.raises(ValueError, match="start sometimes"):
        tables.report([record("full", start="sometimes")])
    left = tables.report([record(), record("full", start="sometimes")])
    assert "Left out, since vanilla has no run there yet: start `sometimes`, small." in left
    assert "### Start `sometimes`" not in left and "Left out" not in text


def test_a_whole_study_has_a_section_for_each_start_and_size():
    text = tables.report(study(seeds=2))
    for table in (part.splitlines() for part in text.split("\n\n") if part.startswith("|")):
        # Whatever its cells say, every line has as many.
        assert len({line.replace("\\|", "").count("|") for line in table}) == 1, table[0]
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "### The arms",
        "### Chosen on validation, small",
        "### In short, small",
        "### Chosen on validation, large",
        "### In short, large",
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
