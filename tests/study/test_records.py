"""What the study keeps of a run, from a hand-made record of one."""

import gzip
import json
import math

import pytest

from experiments.study.records import CURVES, differences, load, read_run, save
from seal_jax.telemetry.recorder import RunRecorder

CONFIG = {"tasks_per_round": 4, "rollouts": 8}


def round_values(r):
    return {
        "groups/informative": 0.1 * r + 1 / 3,
        "groups/all_fail": math.nan if r == 2 else 0.5,
        "refused/bare": 3.0,
        "profile/pass": 0.25,
        "train/sampled_tokens": 1234567.0,
        "rollout/processed_tokens": 4000.0,
        "rollout/processed_per_s": 1000.0,
        "time/diagnosis": 0.5,
        "time/update": 1.5,
        "time/decode": 100.0,  # most of it the validation's, in the lap of the round that came after it
        "time/checkpoint": 7.0,
    }


def report(split, success, met=math.nan):
    values = {"success": success, "success/base": success, "success_after_error": met, "n_error": 4.0}
    return {f"eval/{split}/{name}": value for name, value in values.items()}


@pytest.fixture
def workdir(tmp_path):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        recorder.record(0, report("test", 0.1), kind="report")
        for r in (1, 2):
            recorder.record(r, round_values(r), cues=["recovery_failure"] if r == 1 else [])
            recorder.record(r, {"eval/val/success": 0.2 * r}, kind="eval")
        for split, success in (("test", 0.3), ("ood", 0.2), ("test_cued", 0.6)):
            bare = {"eval/test_cued/success_bare": 0.35} if split == "test_cued" else {}
            recorder.record(2, report(split, success, 0.25) | bare, kind="report")
        recorder.summary({"round": 2, "reported_round": 2, "evaluations": {"test": 0.3, "ood": 0.2}})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_record_holds_what_the_run_wrote(workdir):
    record = read_run(workdir, start="never", arm="half", seed=1)
    assert (record["start"], record["arm"], record["seed"]) == ("never", "half", 1)
    assert (record["rounds"], record["reported_round"]) == (2, 2)
    assert record["success"] == {"test": 0.3, "ood": 0.2, "test_cued": 0.6}  # of the report after training
    assert record["by_category"] == {split: {"base": x} for split, x in record["success"].items()}
    assert (record["after_error"], record["n_error"], record["cued_bonus"]) == (0.25, 4.0, pytest.approx(0.25))
    assert record["validation"] == [[1, 0.2], [2, 0.4]]
    assert record["curves"].keys() == set(CURVES)
    assert record["curves"]["groups/all_fail"] == [0.5, None] and record["curves"]["weight/gain"] == [None, None]
    assert record["cues"] == [["recovery_failure"], []]


def test_the_cost_is_that_of_training_alone(workdir):
    assert read_run(workdir)["cost"] == {
        "episodes": 2 * 4 * 8,
        "sampled_tokens": 2 * 1234567.0,
        "processed_tokens": 8000.0,
        "seconds": 2 * (4.0 + 0.5 + 1.5),
    }


def test_a_run_that_is_not_finished_is_refused(workdir):
    (workdir / "metrics.jsonl").write_text(
        "".join(x for x in (workdir / "metrics.jsonl").open() if '"round": 2' not in x)
    )
    for spoil, message in (
        (lambda path: None, "summary.json is of round 2, metrics.jsonl of 1; run the study again, or"),
        (lambda path: path.write_text("{"), "summary.json is damaged .*; delete the folder"),
        (lambda path: path.unlink(), "no summary.json, so this run is not finished; run the study again"),
    ):
        spoil(workdir / "summary.json")
        with pytest.raises(ValueError, match=message) as error:
            read_run(workdir)
        assert "\n" not in str(error.value)


def test_records_come_back_and_the_same_ones_give_the_same_bytes(workdir, tmp_path):
    records = [
        read_run(workdir, start="never", arm=arm, seed=0, size="small", settings="0" * 64)
        for arm in ("vanilla", "half")
    ]
    paths = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    save(paths[0], records)
    kept = load(paths[0])
    assert [differences(a, b) for a, b in zip(records, kept, strict=True)] == [[], []]
    assert kept[0]["cost"] == records[0]["cost"]  # counts are not rounded
    assert kept[0]["curves"]["groups/informative"] == [0.433333, 0.533333]
    save(paths[1], kept)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert len(gzip.decompress(paths[0].read_bytes()).splitlines()) == 2


def test_two_records_differ_in_anything_but_seconds(workdir):
    one = read_run(workdir, arm="half")
    slower = {**one, "cost": {**one["cost"], "seconds": 99.0}}
    assert differences(one, slower) == []
    assert differences(one, {**slower, "cost": {**slower["cost"], "sampled_tokens": 1.0}}) == ["cost"]
    other = {**one, "arm": "full", "curves": {**one["curves"], "weight/gain": [None, 1.0]}}
    assert differences(one, other) == ["arm", "curves"]
    assert differences(one, {k: v for k, v in one.items() if k != "cues"}) == ["cues"]
