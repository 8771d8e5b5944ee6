"""Figures from metrics.jsonl alone, the live panel, the plain lines, the closing table."""

import io
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from seal_jax.telemetry import figures
from seal_jax.telemetry.compare import compare
from seal_jax.telemetry.drawing import apart
from seal_jax.telemetry.progress import Progress, closing_table
from seal_jax.telemetry.recorder import RunRecorder
from seal_jax.telemetry.style import CATEGORY_COLOURS, LABEL_COLOURS, category_colours
from seal_jax.types import CATEGORIES, LABELS

ROOT = Path(__file__).parents[2]


def train_values(r):
    values = {f"train/success/{c}": min(1.0, 0.1 * r + 0.05 * i) for i, c in enumerate(CATEGORIES)}
    values |= {"train/success": 0.1 * r, "time/rollout": 2.0, "time/update": 1.0, "loss/kl": math.nan}
    return values | {"profile/pass": 0.1 * r, "profile/state_mismatch": 0.9 - 0.1 * r}


def eval_values(split, r):
    return {f"eval/{split}/success": 0.05 * r, **{f"eval/{split}/success/{c}": 0.04 * r for c in CATEGORIES}}


def make_run(workdir, rounds=4):
    with RunRecorder(workdir, tensorboard=False) as recorder:
        recorder.record(0, eval_values("test", 1), kind="eval")
        for r in range(1, rounds + 1):
            recorder.record(r, train_values(r), cues=["state_mismatch"] if r in (1, 2, 4) else [])
        recorder.record(rounds, {**eval_values("test", 9), **eval_values("ood", 2)}, kind="eval")


def test_every_label_and_category_has_its_own_colour():
    assert tuple(LABEL_COLOURS) == LABELS and len(set(LABEL_COLOURS.values())) == len(LABELS)
    assert tuple(CATEGORY_COLOURS) == CATEGORIES
    assert category_colours(["base", "other"])["other"] not in CATEGORY_COLOURS.values()


def test_figures_are_redrawn_by_the_command_line(tmp_path):
    make_run(tmp_path)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "seal_jax.telemetry.figures", str(tmp_path)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names = {Path(line).name for line in done.stdout.split()}
    assert names == {f"{name}.{kind}" for name in ("success", "labels", "cues") for kind in ("png", "svg")}
    assert (tmp_path / "figures" / "success.png").read_bytes().startswith(b"\x89PNG")
    assert "out of distribution" in (tmp_path / "figures" / "success.svg").read_text()


def test_the_same_record_gives_the_same_svg(tmp_path):
    make_run(tmp_path)
    texts = [[p.read_text() for p in figures.draw(tmp_path, tmp_path / f) if p.suffix == ".svg"] for f in "ab"]
    assert texts[0] == texts[1]


def test_a_record_without_evaluations_or_cues_still_draws(tmp_path):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        recorder.record(1, {"train/success": 0.5})
    assert {p.name for p in figures.draw(tmp_path)} == {"success.png", "success.svg"}


def test_the_labels_figure_says_which_rows_it_counts():
    lines = [{"round": 1, "metrics": {"profile/pass": 0.4, "train/success_bare": 0.4}}]
    assert figures.labels(lines).axes[0].get_title(loc="left").endswith("(rows without cues)")
    lines[0]["metrics"]["train/success_bare"] = None  # every row was cued
    assert figures.labels(lines).axes[0].get_title(loc="left").endswith("were diagnosed as")


def test_one_validation_is_one_tick_on_its_round():
    lines = [{"round": r, "metrics": {"train/success": 0.1 * r}} for r in (1, 2, 3)]
    lines.append({"round": 3, "metrics": {"eval/val/success": 0.5, "eval/val/success/base": 0.25}})
    train, val = figures.success(lines).axes
    assert val.get_title(loc="left") == "validation (bare interface)"
    assert list(val.get_xticks()) == [3] and len(train.get_xticks()) > 1


def test_an_evaluation_with_cues_is_not_called_bare():
    lines = [{"round": 3, "metrics": {f"eval/{s}/success": 0.5}} for s in ("test", "test_cued", "ood_official")]
    titles = {ax.get_title(loc="left") for ax in figures.success(lines).axes}
    assert {"test (bare interface)", "test (cues shown)"} <= titles
    assert "out of distribution (bare interface, official protocol)" in titles
    out = io.StringIO()
    progress = Progress(3, mode="plain", console=Console(file=out, width=100))
    for split in ("test", "test_cued"):
        progress.evaluation(split, {f"eval/{split}/success": 0.5}, round=3)
    assert out.getvalue().splitlines() == [
        "round 3: evaluation on test, bare interface, seal protocol: all 50%",
        "round 3: evaluation on test_cued, cues shown, seal protocol: all 50%",
    ]
    same = compare({"t": ("base", 0.0)}, {"t": ("base", 0.0)})
    for splits, told in ((("test",), False), (("test", "test_cued"), True)):
        shown = Console(file=io.StringIO(), width=110)
        shown.print(closing_table(dict.fromkeys(splits, same)))
        assert ("of ..._cued, no score: cues shown" in shown.file.getvalue()) == told


def test_no_record_is_a_clear_error(tmp_path, capsys):
    assert figures.main([str(tmp_path)]) == 1
    assert "metrics.jsonl is missing or empty" in capsys.readouterr().err


def test_series_and_runs():
    lines = [{"round": r, "metrics": {"x": x}} for r, x in ((2, 0.2), (1, 0.1), (3, None), (2, 0.3))]
    assert figures.series(lines, "x") == [(1, 0.1), (2, 0.3)]
    assert figures._runs([4, 1, 2, 2, 5, 9]) == [(1, 2), (4, 2), (9, 1)]


def play(progress):
    with progress:
        progress.message("warm start: 40 s")
        progress.evaluation("test", eval_values("test", 1), round=0)
        for r in range(1, 4):
            progress.phase("rollout 3/8")
            progress.round(r, train_values(r), cues=["state_mismatch"])
        progress.evaluation("test", eval_values("test", 9), round=3)


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    play(Progress(3, console=Console(file=out, width=60)))
    lines = out.getvalue().splitlines()
    assert len(lines) == 6 and "\x1b" not in out.getvalue()
    assert lines[2] == (
        "round 1/3 | success 10% (base 10%, miss func 15%, miss param 20%, long context 25%) | "
        "mostly state mismatch 80% | cues: state_mismatch | rollout 2.0s update 1.0s"
    )
    assert lines[1].startswith("round 0: evaluation on test, bare interface, seal protocol: all 5%, base 4%")


@pytest.mark.parametrize("width", [80, 140])
def test_live_panel_shows_rounds_success_labels_and_cues(width):
    out = io.StringIO()
    play(Progress(3, console=Console(file=out, width=width, force_terminal=True, height=50)))
    last = out.getvalue().split("round 3/3")[-1]
    for expected in ("done", "miss func", "5% → 45%", "state mismatch", "60%", "rollout 2.0s (67%)", "cues"):
        assert expected in last, expected


def test_off_prints_nothing():
    out = io.StringIO()
    play(Progress(3, mode="off", console=Console(file=out)))
    assert out.getvalue() == ""


def test_missing_values_do_not_break_the_display():
    out = io.StringIO()
    with Progress(2, console=Console(file=out, width=200), mode="plain") as progress:
        progress.round(1, {})
    assert out.getvalue() == "round 1/2 | success - | no cues\n"


def test_an_evaluation_shows_how_far_it_is(monkeypatch):
    clock = iter(range(0, 1000, 20))  # seconds
    monkeypatch.setattr("seal_jax.telemetry.progress.time.monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    progress = Progress(3, mode="plain", console=Console(file=out, width=200))
    for done in range(9):
        progress.evaluating("test_official", done, 8)
    progress.evaluating("val", 0, 2)
    progress.evaluating("val", 2, 2)
    lines = out.getvalue().splitlines()  # not more often than every PLAIN_EVERY_S, and no closing line
    assert lines == [f"evaluating test_official: {done}/8 episodes done" for done in (2, 4, 6)]
    live = Progress(3, mode="live", console=Console(file=io.StringIO(), force_terminal=True, width=120))
    live.evaluating("test", 1, 8)
    assert "evaluating test: 1/8 episodes done" in str(live._header())
    live.close()


def test_closing_table():
    before = {f"t{i}": (CATEGORIES[i % 4], 0.0) for i in range(8)}
    after = {f"t{i}": (CATEGORIES[i % 4], float(i < 4)) for i in range(8)}
    out = io.StringIO()
    Console(file=out, width=110).print(
        closing_table(
            {"test": compare(before, after), "ood": compare(before, before)},
            shares={"rollout": 0.7, "update": 0.298, "other": 0.002},
            wall_s=3725,
            compilations=9,
            peak_mib=2048,
            notes=["warm start: 12% of the time"],
            protocols={"test": "official"},
        )
    )
    text = out.getvalue()
    assert [line.replace("│", " ").split()[:2] for line in text.splitlines() if " all " in line] == [
        ["test", "official"],
        ["ood", "seal"],
    ]
    assert "+50.0 ± 18.9" in text and "+0.0 ± 0.0" in text and "miss func" in text
    assert "wall time 1:02:05; rollout 70%, update 30%; 9 compiled programs; peak memory 2.00 GiB" in text
    assert "warm start: 12% of the time" in text


def test_a_run_that_compares_nothing_ends_without_an_empty_table():
    console = Console(file=io.StringIO(), width=100)
    console.print(closing_table({}, wall_s=61.0, notes=["test: 0.0% of 20 tasks, the starting policy"]))
    shown = console.file.getvalue()
    assert "before" not in shown and "wall time 1:01" in shown and "0.0% of 20 tasks" in shown


def test_names_at_curves_ends_keep_apart_and_near():
    assert apart([0.2, 0.6], 0, 1) == pytest.approx([0.2, 0.6])
    assert apart([0.5, 0.5], 0, 1) == pytest.approx([0.469, 0.531])
    crowded = apart([0.96, 0.97, 1.0, 1.0], 0, 1)
    assert all(b - a == pytest.approx(0.062) for a, b in zip(crowded, crowded[1:], strict=False))
    assert crowded[-1] == pytest.approx(1.02)
    assert apart([0.0, 0.0], 0, 2)[0] == 0.0
