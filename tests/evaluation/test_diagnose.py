"""`python -m seal_jax.diagnose`: its numbers, its denominator, its files, and that it needs no jax."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import bfcl_folder  # noqa: F401 (skips without bfcl-eval)
import pytest

from seal_jax import diagnose
from seal_jax.envs.base import make_suite
from seal_jax.envs.bfcl import package
from seal_jax.envs.bfcl.gold import parse_call
from seal_jax.evaluation import scores
from seal_jax.evaluation.scores import score
from seal_jax.types import CATEGORIES, LABELS


@pytest.fixture
def run(tmp_path, capsys, suite, quirky, monkeypatch):
    """Writes lines, runs the command, returns (summary, evidence by id, what was printed)."""

    def run(lines, *options):
        if "--suite=toolbox" not in options:  # loaded once for all tests
            monkeypatch.setattr(scores, "make_suite", lambda name, **options: quirky if options else suite)
        path = tmp_path / "results.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), "utf-8")
        assert diagnose.main([str(path), f"--out={tmp_path / 'out'}", *options]) == 0
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        rows = [json.loads(x) for x in (tmp_path / "out" / "diagnosis.jsonl").read_text("utf-8").splitlines()]
        return summary, {row["id"]: row for row in rows}, capsys.readouterr().out

    return run


def decoded(suite, task, edit=None):
    """The reference program as a line, one call a step; `edit` changes the turns."""
    turns = [[[str(call)] for call in program] for program in suite.reference(task)]
    return {"id": task.id, "decoded": edit(turns) if edit else turns}


def without_last(turns):
    return [turn[:-1] for turn in turns]


def test_reference_programs_are_all_valid_positional_arguments_included(suite, run):
    wanted, lines = {t.id for t in suite.tasks("val")}, []
    for category in CATEGORIES:  # the strings as the package holds them
        path = package.package_folder() / "data" / "possible_answer" / f"BFCL_v4_multi_turn_{category}.json"
        rows = [row for row in package.read_json_lines(path) if row["id"] in wanted]
        lines += [{"id": r["id"], "decoded": [[[call] for call in turn] for turn in r["ground_truth"]]} for r in rows]
    assert sum(bool(parse_call(c[0]).positional) for x in lines for turn in x["decoded"] for c in turn) > 5
    summary, rows, printed = run(lines, "--split=val")
    assert summary["per_task"]["solved"] == 100 and not summary["broken_lines"] and not summary["missing"]
    assert summary["overall"] == {"accuracy": 1.0, "stderr": 0.0, "categories": 4}
    labels = {turn["label"] for row in rows.values() for turn in row["turns"]}
    assert labels == {"pass", "correct_abstention"}
    assert summary["per_task"]["strict_abstention"] == 1.0
    assert "overall (unweighted mean of 4 categories): 100.0 ± 0.0 %" in printed


def test_the_denominator_is_the_tasks_asked_for(suite, run):
    base, func = ([t for t in suite.tasks("all") if t.category == c] for c in ("base", "miss_func"))
    lines = [decoded(suite, t) for t in base[:150]] + [decoded(suite, t) for t in func[:50]]
    lines += ["{broken", {"id": "nobody", "decoded": []}, {"id": base[199].id, "result": "Error: timed out"}]
    summary, rows, printed = run(lines)
    assert summary["categories"]["base"]["tasks"] == summary["categories"]["miss_func"]["tasks"] == 200
    assert summary["categories"]["base"]["accuracy"] == 0.75 and summary["categories"]["miss_func"]["accuracy"] == 0.25
    assert summary["overall"]["accuracy"] == 0.5 == summary["per_task"]["accuracy"]
    each = math.sqrt(0.75 * 0.25 / 200)
    assert summary["categories"]["base"]["stderr"] == pytest.approx(each)
    assert summary["overall"]["stderr"] == pytest.approx(math.sqrt(2 * each**2) / 2)
    assert summary["per_task"]["stderr"] == pytest.approx(math.sqrt(0.25 / 400))
    assert len(rows) == 400 and len(summary["missing"]) == 49 + 150
    assert rows[base[199].id] == {"id": base[199].id, "category": "base", "reward": 0.0, "reason": "inference_error"}
    assert rows[base[198].id]["reason"] == "missing"
    assert "base: 49 without a line, counted as failures: 150-198" in printed
    assert "3 of 203 lines cannot be used:" in printed and "results.jsonl:201: json:" in printed


def test_ids_split_and_categories_state_the_denominator(suite, run, tmp_path):
    base = [t for t in suite.tasks("all") if t.category == "base"]
    lines = [decoded(suite, t) for t in base[:4]]
    ids = tmp_path / "ids.txt"
    ids.write_text("\n".join(t.id for t in base[2:6]) + "\n")
    summary, rows, printed = run(lines, f"--ids={ids}")
    assert list(rows) == [t.id for t in base[2:6]]
    assert summary["per_task"]["accuracy"] == 0.5 and summary["lines_not_asked_for"] == 2
    assert "2 lines are of tasks not asked for" in printed
    ids.write_text(json.dumps([base[0].id]))
    assert run(lines, f"--ids={ids}")[0]["per_task"]["accuracy"] == 1.0
    summary, _, _ = run(lines, "--split=test", "--categories=base,miss_param")
    assert summary["per_task"]["tasks"] == 150 and list(summary["categories"]) == ["base", "miss_param"]
    # Unequal categories: the mean of the categories is not the mean of the tasks.
    ids.write_text("\n".join([base[0].id, base[1].id, base[2].id, "multi_turn_miss_func_0"]))
    summary, _, _ = run(lines, f"--ids={ids}")
    assert summary["overall"]["accuracy"] == 0.5 and summary["per_task"]["accuracy"] == 0.75


def test_failures_are_labelled_and_abstention_is_counted_apart(suite, run, tmp_path):
    task = next(t for t in suite.tasks("val") if t.category == "miss_func")
    (tmp_path / "ids.txt").write_text(task.id)
    programs = suite.reference(task)
    early = next(i for i, p in enumerate(programs) if not p)

    def eager(turns):  # calls what is due in the next turn already, and again there; no such call is checked
        return [[["pwd()"]] if i == early else turn for i, turn in enumerate(turns)]

    summary, rows, _ = run([decoded(suite, task, eager)], f"--ids={tmp_path / 'ids.txt'}")
    column = summary["categories"]["miss_func"]
    assert (column["abstain_turns"], column["strict_abstention"]) == (1, 0.0)
    turn = rows[task.id]["turns"][early]
    assert (turn["label"], turn["release"], turn["abstain"], turn["passed"]) == (
        "spurious_tool_call",
        "spurious_tool_call",
        True,
        None,
    )
    summary, rows, _ = run([decoded(suite, task, lambda turns: turns[:1])], f"--ids={tmp_path / 'ids.txt'}")
    assert rows[task.id]["reason"] == "force_terminated" and rows[task.id]["turns"][-1]["label"] == "not_reached"
    assert (summary["per_task"]["turns"], summary["per_task"]["turns_not_reached"]) == (1, len(task.turns) - 1)
    assert sum(summary["per_task"]["labels"].values()) == pytest.approx(1.0)  # of the turns that happened
    assert list(summary["per_task"]["labels"]) == [label for label in LABELS if label != "not_reached"]


def test_evidence_says_what_was_done_and_what_was_due(suite, run):
    task = next(t for t in suite.tasks("all") if t.id == "multi_turn_base_0")
    summary, rows, _ = run([decoded(suite, task, without_last), ""], "--categories=base")
    row = rows[task.id]
    assert row["reward"] == 0.0 and row["line"] == 1 and row["protocol"] == "official"
    first = row["turns"][0]
    assert [s["calls"] for s in first["steps"]] == [[c] for c in first["reference"][:-1]]
    assert first["label"] != "pass" and first["evidence"] and first["passed"] is False
    assert first["state_diffs"][0]["attribute"].startswith("GorillaFileSystem.")
    assert summary["per_task"]["reasons"]["missing"] == 199


def test_hostile_lines_are_scored_and_written_as_json(suite, run):
    task = next(t for t in suite.tasks("all") if t.id == "multi_turn_base_0")
    calls = ["echo(content='\ud83d [red]x[/red]')", "__import__('os').getcwd()", "cd(folder='\x1b[31m')", "f(x=1e999)"]
    lines = [{"id": task.id, "decoded": [[[c] for c in calls]]}, {"id": "\x1b[31m[bold]\ud83d", "decoded": []}]
    summary, rows, printed = run(lines, "--categories=base")
    assert rows[task.id]["reason"] == "force_terminated" and "\x1b" not in printed
    errors = [step["results"][0]["error"] for step in rows[task.id]["turns"][0]["steps"]]
    assert errors == ["unknown_tool", "unknown_tool", "tool_error", "unknown_tool"]


def test_toolbox_lines_work_too(run):
    suite = make_suite("toolbox")
    tasks = suite.tasks("val")[:8]
    lines = [decoded(suite, t) for t in tasks[:6]] + [decoded(suite, tasks[6], without_last)]
    summary, rows, _ = run(lines, "--suite=toolbox", "--split=val")
    assert summary["per_task"]["solved"] == 6 and rows[tasks[6].id]["reward"] == 0.0
    assert summary["per_task"]["tasks"] == len(suite.tasks("val"))


@pytest.mark.parametrize(
    "options, words",
    [
        (["--split=dev"], "split 'dev' is not one of"),
        (["--categories=base,hard"], "'hard' is not known"),
        (["--ids=none.txt"], "--ids=none.txt: .*No such file"),
        (["--ids={ids}"], "'multi_turn_base_999' is no known task; write ids such as multi_turn_base_0"),
        (["--ids=/dev/null"], "--ids=/dev/null: the file is empty; write one task id a line"),
        (["--ids={ids}", "--split=val"], "both say which tasks"),
        ([], "no line is of a known task; line 1: id: 'nobody' is no known task"),
    ],
)
def test_what_cannot_be_asked_is_one_line(tmp_path, capsys, options, words):
    import re

    path, ids = tmp_path / "results.jsonl", tmp_path / "ids.txt"
    path.write_text(json.dumps({"id": "nobody", "decoded": []}) + "\n")
    ids.write_text("multi_turn_base_0\nmulti_turn_base_999\n")
    assert diagnose.main([str(path), *(x.format(ids=ids) for x in options)]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and error.startswith("error: ") and error.count("\n") == 1


def test_evidence_in_the_results_folder_is_not_read_as_results(suite, quirky, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scores, "make_suite", lambda name, **options: quirky if options else suite)
    (tmp_path / "deeper.jsonl").mkdir()  # a folder whose name looks like a file's
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(decoded(suite, t)) + "\n" for t in suite.tasks("val")))
    for _ in range(2):
        assert diagnose.main([str(tmp_path), f"--out={tmp_path}", "--split=val"]) == 0
        assert "(100 of 100)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, out, words",
    [
        ("results.jsonl", "results.jsonl", r"--out=\S+results.jsonl: File exists; name a folder"),
        ("results.jsonl", "results.jsonl/deeper", r"--out=\S+deeper: Not a directory; name a folder"),
        ("diagnosis.jsonl", "", r"--out=\S+: diagnosis.jsonl in it is one of the files to be read; name another"),
    ],
)
def test_an_out_that_cannot_be_is_refused_before_anything_is_scored(tmp_path, capsys, monkeypatch, name, out, words):
    import re

    monkeypatch.setattr(diagnose, "score", lambda *args: pytest.fail("scored"))
    path = tmp_path / name
    path.write_text(json.dumps({"id": "multi_turn_base_0", "decoded": []}) + "\n")
    before = path.read_text()
    assert diagnose.main([str(path), f"--out={tmp_path / out}"]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error) and error.startswith("error: ") and error.count("\n") == 1
    assert path.read_text() == before


def test_a_task_is_scored_the_same_whatever_stands_around_it(suite, quirky):
    """Worlds are not shared: a failing line changes nothing for the next."""
    from seal_jax.evaluation.results import Result, Results, read_call
    from seal_jax.types import Step

    tasks = [t for t in suite.tasks("val") if "TwitterAPI" in t.domains][:4]

    def read_of(edits) -> Results:
        found = Results()
        for task, edit in edits:
            turns = decoded(suite, task, edit)["decoded"]
            steps = tuple(tuple(Step("", tuple(map(read_call, s))) for s in turn) for turn in turns)
            found.results[task.id] = Result(task.id, steps, "official", "", 1)
        return found

    def tweet(turns):
        return [[["post_tweet('a')"], ["mention(0, ['@x'])"], *turn] for turn in turns]

    alone = [score(lambda _: quirky, [t], read_of([(t, None)]))[0] for t in tasks]
    mixed = read_of([(tasks[0], tweet), *((t, None) for t in tasks[1:])])
    together = score(lambda _: quirky, tasks, mixed)
    assert together[0].reward == 0.0 or together[0].verdict != alone[0].verdict
    assert [replace(x, result=None) for x in together[1:]] == [replace(x, result=None) for x in alone[1:]]


def test_it_imports_no_jax(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({"id": "multi_turn_base_0", "result": [["hi"]]}) + "\n")
    code = (
        "import sys; from seal_jax.diagnose import main; status = main(sys.argv[1:]); "
        "heavy = {'jax', 'numpy', 'torch', 'transformers', 'tokenizers', 'ml_collections', 'bfcl_eval.utils'}; "
        "print(sorted(heavy & set(sys.modules)), status)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0", done.stdout + done.stderr
