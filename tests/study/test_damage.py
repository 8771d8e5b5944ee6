"""What is damaged, foreign or half there is named in one line, and nothing is written from it."""

import copy
import gzip
import json
import math
import re

import pytest

from experiments import ablation
from experiments.study import figures, records, starts
from experiments.study.records import load, read_run
from seal_jax.telemetry.recorder import RunRecorder

from .made import record

START = {
    "start": "never",
    "seed": 0,
    "size": "small",
    "settings": "0" * 64,
    "probe_settings": "1" * 64,
    "success": {"test": 0.1, "ood": 0.0, "test_cued": 0.3},
    "seconds": 12.5,
    "repaired": {"bare": [1, 20], "cued": [15, 20]},
}

#: A number that JSON can write and no float can hold.
INFINITE = "1e999"


def packed(path, text):
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return path


def spoilt(value, path, bad):
    """`value` with another one at this path; ... leaves the field out."""
    value = copy.deepcopy(value)
    *inner, last = path
    at = value
    for key in inner:
        at = at[key]
    if bad is ...:
        del at[last]
    else:
        at[last] = bad
    return value


def refused(arguments, capsys):
    """The one line with which a command is refused."""
    assert ablation.main([str(a) for a in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error.strip()


# --- records and starts in a file ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "bad", "message"),
    [
        (["arm"], ..., "'arm' is a required property;"),
        (["seed"], True, "seed: True is not of type 'integer';"),
        (["seed"], 1.5, "seed: 1.5 is not of type 'integer';"),
        (["settings"], "ab", "settings: 'ab' does not match"),
        (["start"], "ne|ver", "start: 'ne|ver' does not match"),
        (["success"], [], "success: [] is not of type 'object';"),
        (["success", "test"], None, "success/test: None is not of type 'number';"),
        (["success", "test"], math.nan, "not a JSON object (NaN is no JSON);"),
        (["success", "test"], 30.0, "success/test: 30.0 is greater than the maximum"),
        (["by_category", "ood", "base"], "x", "by_category/ood/base: 'x' is not of type 'number';"),
        (["n_test"], 0, "n_test: 0 is less than the minimum of 1;"),
        (["validation", 1], [8], "validation/1: [8] is too short;"),
        (["cost", "seconds"], ..., "cost: 'seconds' is a required property;"),
        (["curves", "refused/bare"], ..., "curves: 'refused/bare' is a required property;"),
        (["curves", "refused/bare", 3], "1", "curves/refused/bare/3: '1' is not of type 'number', 'null';"),
        (["cues", 2], "ab", "cues/2: 'ab' is not of type 'array';"),
        (["arm"], "half\n", "arm: 'half\\n' does not match"),
        (["by_category", "ood"], {"a\nb": 1.0}, "by_category/ood: 'a\\nb' does not match"),
        (["cost", "episodes"], 10**20, "cost/episodes: 100000000000000000000 is greater than"),
        (["cost", "seconds"], INFINITE, "cost/seconds: inf is greater than the maximum"),
        (["curves", "profile/pass", 3], 1.5, "curves/profile/pass/3: 1.5 is greater than the maximum"),
        # What a schema does not see: such a record would be averaged with whole ones.
        (["curves", "refused/bare"], [1.0] * 11, "curves/refused/bare has 11 values for 12 rounds;"),
        (["cues"], [[]] * 13, "cues has 13 values for 12 rounds;"),
        (["validation", 1, 0], 4, "validation is of rounds [4, 4, 12], of a run of 12;"),
        (["validation", 2, 0], 13, "validation is of rounds [4, 8, 13], of a run of 12;"),
        (["success", "test"], ..., "success is of ['ood', 'test_cued'], by_category of ['ood', 'test', 'test_cued'];"),
    ],
)
def test_a_damaged_record_is_named_with_its_field(tmp_path, capsys, path, bad, message):
    good = record()
    text = "".join(json.dumps(x) + "\n" for x in (good, spoilt(record("full"), path, bad)))
    text = text.replace(f'"{INFINITE}"', "1e999")
    file = packed(tmp_path / "records.jsonl.gz", text)
    error = refused([f"--records={file}", f"--out={tmp_path / 'out'}"], capsys)
    assert error.startswith(f"error: {file}:2: {message}") and "make it with --report" in error
    assert not (tmp_path / "out").exists()


def test_a_file_of_records_that_is_none_is_named(tmp_path, capsys):
    whole = gzip.compress(json.dumps(record()).encode(), mtime=0)
    flipped = bytearray(whole)
    flipped[40] ^= 255
    text = gzip.compress
    contents = {
        "is damaged, or no records.jsonl.gz": (b"hello", whole[:-9], bytes(flipped), text(b"\xff\n")),
        " holds no record;": (b"", text(b"")),
        ":1: not a JSON object": (text(b"\n"), text(b"import this\n"), text(json.dumps(record())[:99].encode())),
        ":1: [1] is not of type 'object'": (text(b"[1]\n"),),
    }
    file = tmp_path / "records.jsonl.gz"
    for message, kinds in contents.items():
        for content in kinds:
            file.write_bytes(content)
            error = refused([f"--records={file}", f"--out={tmp_path / 'out'}"], capsys)
            assert error.startswith(f"error: {file}") and message in error
    file.write_bytes(whole)  # without the last line's end it is whole
    assert [x["arm"] for x in load(file)] == ["vanilla"]


def test_nothing_is_written_when_the_records_contradict_each_other(tmp_path, capsys):
    text = "".join(json.dumps(record()) + "\n" for _ in range(2))
    error = refused([f"--records={packed(tmp_path / 'r.gz', text)}", f"--out={tmp_path / 'out'}"], capsys)
    assert "start never, size small: arm 'vanilla' has two records of seed 0; keep one of them" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("path", "bad", "message"),
    [
        ([0], "never", "0: 'never' is not of type 'object';"),
        ([0, "success", "ood"], ..., "0/success: 'ood' is a required property;"),
        ([0, "repaired", "bare"], [1, 20, 3], "0/repaired/bare: [1, 20, 3] is too long;"),
        ([0, "seed"], "0", "0/seed: '0' is not of type 'integer';"),
        ([0, "start"], "a|b", "0/start: 'a|b' does not match"),
        ([0, "success", "ood"], 1.5, "0/success/ood: 1.5 is greater than the maximum"),
    ],
)
def test_damaged_starts_are_named_with_their_field(tmp_path, capsys, path, bad, message):
    file = packed(tmp_path / "records.jsonl.gz", json.dumps(record()) + "\n")
    beside = tmp_path / "starts.json"
    beside.write_text(json.dumps(spoilt([START], path, bad)))
    error = refused([f"--records={file}", f"--out={tmp_path / 'out'}"], capsys)
    assert error.startswith(f"error: {beside}: {message}") and "remove it to report without it" in error
    assert not (tmp_path / "out").exists()


def test_starts_come_back_and_a_torn_file_is_named(tmp_path):
    path = tmp_path / "starts.json"
    assert starts.load(path) == []
    path.write_text(json.dumps([START]))
    assert starts.load(path) == [START]
    for content in (b"[{", b"\xff", b"[NaN]"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"starts\.json is damaged .*; take it anew"):
            starts.load(path)


def test_figures_of_other_records_do_not_stay(tmp_path):
    for name in ("study_cues.png", "study_cues.svg", "mine.png"):
        (tmp_path / name).touch()
    assert figures.draw([record(validation=[])], tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["mine.png"]


# --- a run's folder --------------------------------------------------------------------------------------------------
@pytest.fixture
def workdir(tmp_path):
    """A run of two rounds, reported on two splits."""
    values = {"train/sampled_tokens": 10.0, "rollout/processed_tokens": 50.0, "rollout/processed_per_s": 25.0}
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        recorder.record(0, {"eval/ood/success": 0.1}, kind="report")
        for r in (1, 2):
            recorder.record(r, values, cues=["recovery_failure"])
            recorder.record(r, {"eval/val/success": 0.2}, kind="eval")
        for split, success in (("test", 1 / 3), ("ood", 0.2)):
            recorder.record(2, {f"eval/{split}/success": success}, kind="report")
        recorder.summary({"round": 2, "reported_round": 2, "evaluations": {"test": 1 / 3, "ood": 0.2}})
    (tmp_path / "config.json").write_text(json.dumps({"tasks_per_round": 4, "rollouts": 8}))
    return tmp_path


def test_a_report_that_was_lost_is_not_taken_from_before_training(workdir):
    """The last line is cut: what is left of ood is the starting policy's 0.1."""
    assert read_run(workdir)["success"] == {"test": 1 / 3, "ood": 0.2}
    path = workdir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(
        ValueError, match="does not report the 0.2 of ood that summary.json has; run the study again, or del"
    ):
        read_run(workdir)


@pytest.mark.parametrize(
    ("line", "path", "bad", "message"),
    [
        (1, ["kind"], ..., "its record is damaged (KeyError: 'kind')"),
        (1, ["metrics"], [], "its record is damaged (TypeError: "),
        (1, ["metrics", "train/sampled_tokens"], "x", "its record is damaged (TypeError: "),
        (3, ["metrics", "rollout/processed_per_s"], 0, "its record is damaged (ZeroDivisionError: "),
        (3, ["metrics", "rollout/processed_tokens"], ..., "damaged (KeyError: 'rollout/processed_tokens')"),
        (1, ["metrics"], "x", "its record is damaged (TypeError: "),
        (2, ["metrics"], {}, "damaged (KeyError: 'eval/val/success')"),
        (3, ["cues"], "ab", "cues/1: 'ab' is not of type 'array'"),
    ],
)
def test_a_damaged_line_of_a_run_is_named_with_its_field(workdir, line, path, bad, message):
    file = workdir / "metrics.jsonl"
    lines = [json.loads(x) for x in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(x) + "\n" for x in spoilt(lines, [line, *path], bad)))
    with pytest.raises(ValueError) as error:
        read_run(workdir)
    assert str(error.value).startswith(str(workdir)) and message in str(error.value) and "\n" not in str(error.value)
    assert "delete the folder and run the study again" in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "summary.json",
            '{"round": 2, "reported_round": 2, "evaluations": []}',
            "its record is damaged (AttributeError",
        ),
        ("summary.json", '{"round": 2, "reported_round": 2}', "its record is damaged (KeyError: 'evaluations')"),
        (
            "summary.json",
            '{"round": 2, "reported_round": "2", "evaluations": {}}',
            "reported_round: '2' is not of type",
        ),
        ("config.json", '{"tasks_per_round": 4}', "its record is damaged (KeyError: 'rollouts')"),
        ("config.json", "[]", "config.json is damaged (not a JSON object)"),
    ],
)
def test_a_damaged_file_beside_a_runs_lines_is_named(workdir, name, content, message):
    (workdir / name).write_text(content)
    with pytest.raises(ValueError) as error:
        read_run(workdir)
    assert str(error.value).startswith(str(workdir)) and message in str(error.value) and "\n" not in str(error.value)


def test_damaged_starts_of_a_study_are_named(tmp_path):
    start, probe = tmp_path / "never-0-small", tmp_path / "never-0-small.probe"
    scores = {f"eval/{split}/success": 0.1 for split in ("test", "ood", "test_cued")}
    counts = {f"refused/{rows}{end}": 4.0 for rows in ("bare", "cued") for end in ("", "/repaired")}
    for folder, metrics, kind in ((start, scores, "report"), (probe, counts, "train")):
        with RunRecorder(folder, tensorboard=False) as recorder:
            recorder.record(1, metrics, kind=kind)
            recorder.summary({"warm_start/seconds": 12.5})
    which = {"start": "never", "seed": 0, "size": "small", "settings": "0" * 64, "probe_settings": "1" * 64}
    made = starts.read_start(start, probe, **which)
    assert made == {**which, "success": dict.fromkeys(("test", "ood", "test_cued"), 0.1), "seconds": 12.5} | {
        "repaired": {"bare": [4, 4], "cued": [4, 4]}
    }

    def scored(test):
        return json.dumps({"metrics": {**scores, "eval/test/success": test}}) + "\n"

    for path, content, message in (
        (start / "summary.json", "{", "summary.json is damaged "),
        (start / "summary.json", "{}", "it or its probe has no 'warm_start/seconds'; "),
        (start / "metrics.jsonl", "", "it or its probe has no 'eval/test/success'; the recipe must report test, ood"),
        (probe / "metrics.jsonl", "", "it or its probe has no 'refused/bare"),
        (start / "metrics.jsonl", scored(None), "success/test: None is not of type 'number'"),
        (start / "metrics.jsonl", scored(30.0), "success/test: 30.0 is greater than the maximum"),
        (probe / "metrics.jsonl", '{"metrics": {"refused/bare": null, "refused/bare/repaired": null}}\n', "TypeError"),
        (probe / "metrics.jsonl", '{"metrics": 3}\n', "its record is damaged (TypeError"),
        (start / "summary.json", '{"warm_start/seconds": "x"}', "seconds: 'x' is not of type 'number'"),
    ):
        before = path.read_text()
        path.write_text(content)
        with pytest.raises(ValueError) as error:
            starts.read_start(start, probe, **which)
        path.write_text(before)
        assert str(error.value).startswith(str(start)) and message in str(error.value)
        assert "run the study again" in str(error.value) and "\n" not in str(error.value)


# --- records that are few or all alike -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "runs",
    [
        [record()],  # one arm, one seed
        [record(seed=s, test=0.3) for s in range(3)] + [record("half", s, test=0.3) for s in range(3)],  # sd 0
        [record(validation=[]), record("half", 1, validation=[])],  # no pair, no validation
        [record(rounds=0, reported_round=0, validation=[], curves=dict.fromkeys(records.CURVES, []), cues=[])],
        [record(success={}, by_category={}, n_test=None, n_error=None, after_error=None)],  # no split
        [
            record(),
            record("odd", cues=[["novel"]] * 12, start="other", size="huge"),
            record("odd", cues=[["new"]] * 12),
        ],
    ],
)
def test_a_small_or_even_study_is_reported(tmp_path, runs):
    file, out = tmp_path / "records.jsonl.gz", tmp_path / "out"
    records.save(file, runs)
    assert ablation.main([f"--records={file}", f"--out={out}"]) == 0
    assert load(out / "records.jsonl.gz") == load(file)
    text = (out / "report.md").read_text()
    assert not re.search(r"\b(nan|NaN|None|inf)\b", text)
