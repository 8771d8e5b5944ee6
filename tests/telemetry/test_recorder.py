"""The run record: strict JSON, resumes without doubles, exact trajectories, TensorBoard files without TensorFlow."""

import gzip
import json
import math
from collections import Counter

import numpy as np
import pytest

from seal_jax.telemetry.recorder import RunRecorder, read_jsonl, read_trajectories, spread, to_json
from seal_jax.types import (
    Call,
    CallResult,
    Diagnosis,
    ParseError,
    Segment,
    Step,
    Trajectory,
    TurnEvidence,
    TurnLabel,
    Verdict,
)


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def make_row(i=0):
    call = Call("send", {"amount": 3, "to": "é", "rate": math.inf})
    steps = (
        Step("<bad", error=ParseError("bad_json", "Expecting value", 4)),
        Step("send", calls=(call,), results=(CallResult(call, '{"ok": true}'),)),
    )
    trajectory = Trajectory(
        task_id=f"t{i}",
        category="base",
        rollout=i,
        round=1,
        cued=False,
        prompt_ids=(1, 2, 3),
        segments=(Segment((7,), "template", 0), Segment((8, 9), "sampled", 0, (-0.1, -0.25)), Segment((10,), "cue", 0)),
        turns=(steps,),
        stop="completed",
    )
    verdict = Verdict(0.0, "state", (TurnEvidence(0, True, False, False, steps),))
    return trajectory, verdict, Diagnosis((TurnLabel("state_mismatch", "balance differs"),))


def test_lines_are_strict_json_and_say_what_was_not_finite(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        values = {"loss/kl": math.nan, "loss/policy": np.float32(0.5), "n": np.int64(3), "grad": -math.inf, "ok": True}
        recorder.record(1, values, cues=["a"])
    (line,) = [strict(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["metrics"] == {"loss/kl": None, "loss/policy": 0.5, "n": 3, "grad": None, "ok": 1}
    assert line["nonfinite"] == {"metrics/loss/kl": "nan", "metrics/grad": "-inf"}
    assert (line["round"], line["kind"], line["cues"]) == (1, "train", ["a"])


def test_a_metric_that_is_no_number_is_refused(tmp_path):
    with RunRecorder(tmp_path, tensorboard=False) as recorder, pytest.raises(ValueError, match="'loss/x' is 'abc'"):
        recorder.record(1, {"loss/x": "abc"})


def test_resume_drops_the_rounds_to_be_played_again(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        for r in range(5):
            recorder.record(r, {"x": r})
            recorder.interface(r, {"active": []})
            recorder.trajectories(r, [make_row()])
    # Killed in the middle of a line.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "metr')
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()[:3]
    with RunRecorder(tmp_path, first_round=3) as recorder:
        assert sorted(p.name for p in (tmp_path / "trajectories").iterdir()) == [
            f"0000{r}.train.jsonl.gz" for r in range(3)
        ]
        for r in range(3, 6):
            recorder.record(r, {"x": 10 * r})
            recorder.interface(r, {"active": ["c"]})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:3] == before
    assert [(x["round"], x["metrics"]["x"]) for x in read_jsonl(tmp_path / "metrics.jsonl")] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 30),
        (4, 40),
        (5, 50),
    ]
    assert [x["round"] for x in read_jsonl(tmp_path / "interface.jsonl")] == list(range(6))
    assert Counter(step for _, step, _ in scalars(tmp_path / "tb")) == Counter(range(6))


def test_resume_drops_the_reports_after_training_and_keeps_those_before(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        for r, kind in ((0, "report"), (1, "train"), (1, "eval"), (2, "train"), (1, "report")):
            recorder.record(r, {"x": r}, kind=kind)
            recorder.trajectories(r, [make_row()], kind="report.test" if kind == "report" else kind)
    with RunRecorder(tmp_path, first_round=3):
        pass
    kept = [(x["round"], x["kind"]) for x in read_jsonl(tmp_path / "metrics.jsonl")]
    assert kept == [(0, "report"), (1, "train"), (1, "eval"), (2, "train")]
    names = sorted(p.name.removesuffix(".jsonl.gz") for p in (tmp_path / "trajectories").iterdir())
    assert names == ["00000.report.test", "00001.eval", "00001.train", "00002.train"]


def test_resume_leaves_files_that_are_not_the_recorders(tmp_path):
    folder = tmp_path / "trajectories"
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        recorder.trajectories(7, [make_row()])
    mine = {"notes.md", "7.txt", "00007.train.jsonl", "00007.train.jsonl.gz.bak"}
    for name in (*mine, "00007.report.test.jsonl.gz.tmp"):
        (folder / name).write_text("")
    with RunRecorder(tmp_path, first_round=3, tensorboard=False):
        pass
    assert {p.name for p in folder.iterdir()} == mine


@pytest.mark.parametrize("line", [b"\xff\xfe\n", b"[1]\n", b"{]\n", b"{}\n", b'{"round": 1}\n'])
def test_a_damaged_line_is_named_before_anything_is_cut(tmp_path, line):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        recorder.record(1, {"x": 1})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with (tmp_path / "interface.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"interface\.jsonl.*; remove the line") as error:
        RunRecorder(tmp_path, tensorboard=False)
    assert "\n" not in str(error.value)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def scalars(folder):
    """(tag, step, value) of every scalar in the event files, read without TensorFlow."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):  # length (8), its crc (4), the event, its crc (4)
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 16 + size
    return found


def test_event_files_hold_the_finite_metrics(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        recorder.record(2, {"train/success": 0.25, "loss/kl": math.nan})
        recorder.record(2, {"eval/val/success": 0.5}, kind="eval")
    assert sorted(scalars(tmp_path / "tb")) == [("eval/val/success", 2, 0.5), ("train/success", 2, 0.25)]


def test_trajectories_keep_exact_ids_sources_and_labels(tmp_path):
    with RunRecorder(tmp_path, trajectories_per_round=2, tensorboard=False) as recorder:
        path = recorder.trajectories(3, [make_row(i) for i in range(8)], decode=lambda ids: " ".join(map(str, ids)))
        first = path.read_bytes()
        recorder.trajectories(3, [make_row(i) for i in range(8)], decode=lambda ids: " ".join(map(str, ids)))
        assert path.read_bytes() == first
    rows = read_trajectories(path)
    assert [row["task_id"] for row in rows] == [f"t{i}" for i in spread(range(8), 2)]
    row = rows[0]
    assert row["prompt_ids"] == [1, 2, 3] and row["prompt_text"] == "1 2 3"
    assert [(s["ids"], s["source"], s["turn"], s["logps"], s["text"]) for s in row["segments"]] == [
        ([7], "template", 0, [], "7"),
        ([8, 9], "sampled", 0, [-0.1, -0.25], "8 9"),
        ([10], "cue", 0, [], "10"),
    ]
    assert row["turns"][0][0]["error"] == {"kind": "bad_json", "message": "Expecting value", "position": 4}
    assert row["turns"][0][1]["results"][0]["text"] == '{"ok": true}'
    assert (row["reward"], row["reason"], row["passed"]) == (0.0, "state", [False])
    assert row["labels"] == [{"label": "state_mismatch", "evidence": "balance differs"}]
    with gzip.open(path, "rt") as file:
        assert "inf" in strict(file.readline())["nonfinite"].values()


def test_spread_takes_one_of_each_part_and_no_step_hides_a_rollout():
    for n, limit in ((10, 3), (128, 8), (9, 8)):
        chosen = spread(list(range(n)), limit)
        assert [i for i in range(limit) if i * n // limit <= chosen[i] < (i + 1) * n // limit] == list(range(limit))
        assert chosen == spread(list(range(n)), limit)
    assert {i % 2 for i in spread(list(range(128)), 8)} == {0, 1}  # rows of 8 rollouts, of which every second is cued
    assert spread([1, 2], 3) == [1, 2]
    assert spread([1, 2], None) == [1, 2]
    assert spread([1, 2], 0) == []


def test_summary_and_provenance(tmp_path):
    for start in range(2):
        with RunRecorder(tmp_path, first_round=start, tensorboard=False) as recorder:
            recorder.provenance({"seed": start})
            recorder.summary({"stderr": math.nan, "path": tmp_path, "labels": {"b", "a"}})
    assert [x["seed"] for x in read_jsonl(tmp_path / "provenance.jsonl")] == [0, 1]
    summary = strict((tmp_path / "summary.json").read_text())
    assert summary["stderr"] is None and summary["labels"] == ["a", "b"]


def test_disabled_writes_nothing(tmp_path):
    with RunRecorder(tmp_path / "run", enabled=False) as recorder:
        recorder.record(1, {"x": 1})
        recorder.interface(1, {})
        assert recorder.trajectories(1, [make_row()]) is None
        recorder.summary({})
        recorder.provenance({})
    assert not (tmp_path / "run").exists()


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 0}\nnonsense\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not a JSON object"):
        list(read_jsonl(path))
    assert to_json({"x": [1.5, {"y": math.inf}]}) == '{"x": [1.5, {"y": null}], "nonfinite": {"x/1/y": "inf"}}'
