"""The study's driver: which runs there are, that they are carried out once and in order, and what bad input says."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import toolbox
from experiments import ablation
from experiments.study import records
from experiments.study.jobs import Job, Study, ready
from experiments.study.known import Known
from experiments.study.workers import JobFailed, _expected, carry_out
from seal_jax.assembly import build_suite, check_prompts, episode_limits
from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import load_tokenizer
from seal_jax.checkpoints import hold_workdir
from seal_jax.telemetry.recorder import RunRecorder

from .made import record

ROOT = Path(__file__).parents[2]


def study(tmp_path, **options):
    options = {"arms": ("vanilla", "half"), "seeds": (0, 1), **options}
    return Study(Path("configs/toolbox.py"), tmp_path, toolbox.get_config, **options)


def fake(tmp_path, name, code="", needs=()):
    """A job that does `code` and then writes its summary."""
    workdir = tmp_path / name
    code += f"\nfrom pathlib import Path\np = Path({str(workdir)!r})\np.mkdir(parents=True)"
    code += "\n(p / 'summary.json').write_text('{}')"
    return Job(name, workdir, (sys.executable, "-c", code), needs=tuple(needs))


def test_every_run_waits_for_its_own_start(tmp_path):
    jobs = study(tmp_path).jobs()
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names) == 2 * (2 + 2 + 2 * 2)  # of each seed: two starts, two probes, 2 x 2 arms
    for i, job in enumerate(jobs):
        assert all(need in names[:i] for need in job.needs)
        source = [x.removeprefix("--config.policy.path=") for x in job.argv if "policy.path" in x]
        assert source == [str(tmp_path / "starts" / need / "start") for need in job.needs]
        if job.kind == "arm":
            assert job.needs == (f"{job.which['start']}-{job.which['seed']}-small",)
            assert f"--config=configs/toolbox.py:{job.which['arm']}" in job.argv
            assert f"--config.seed={job.which['seed']}" in job.argv
    assert [job.which["seed"] for job in jobs if job.kind == "arm"] == [0] * 4 + [
        1
    ] * 4  # one seed whole after the other


def test_a_start_from_nothing_has_the_size_of_the_study(tmp_path):
    for size, width in (("small", None), ("large", toolbox.LARGE["d_model"])):
        job = study(tmp_path, size=size, seeds=(3,)).jobs()[0]
        (recipe,) = (x.rsplit(":", 1)[1] for x in job.argv if x.startswith("--config="))
        assert toolbox.get_config(recipe).policy.overrides.get("d_model") == width and job.name == f"never-3-{size}"


def test_each_start_but_never_is_made_from_it(tmp_path):
    jobs = {job.name: job for job in study(tmp_path, starts=("seldom",), seeds=(0,)).jobs()}
    assert list(jobs)[:3] == ["never-0-small", "seldom-0-small", "seldom-0-small.probe"] and len(jobs) == 5
    assert jobs["seldom-0-small"].needs == ("never-0-small",)


def test_a_study_without_the_second_start_makes_one(tmp_path):
    names = [job.name for job in study(tmp_path, starts=("never",), seeds=(0,)).jobs()]
    assert names == ["never-0-small", "never-0-small.probe", "never-0-small/vanilla", "never-0-small/half"]


def test_ready_respects_needs(tmp_path):
    first, second = fake(tmp_path, "a"), fake(tmp_path, "b", needs=("a",))
    assert ready([first, second], set(), {}) is first
    assert ready([first, second], set(), {"a"}) is None
    assert ready([first, second], {"a"}, {}) is second
    assert ready([first, second], {"a", "b"}, {}) is None


def test_jobs_are_done_once_and_after_what_they_need(tmp_path):
    order = tmp_path / "order"
    note = f"open({str(order)!r}, 'a').write(%r)"
    jobs = [fake(tmp_path, "a", note % "a"), fake(tmp_path, "b", note % "b", needs=("a",))]
    said = []
    carry_out(jobs, tmp_path, tell=said.append)
    assert order.read_text() == "ab"
    carry_out(jobs, tmp_path, tell=said.append)
    assert order.read_text() == "ab"
    assert said[0].startswith("2 runs, 0 of them done") and said[-1].startswith("2 runs, 2 of them done")


def test_a_failure_names_its_log_and_the_next_start_goes_on(tmp_path):
    bad = fake(tmp_path, "bad", "raise SystemExit('no such thing')")
    jobs = [fake(tmp_path, "good"), bad, fake(tmp_path, "after", needs=("bad",))]
    with pytest.raises(JobFailed, match=r"bad failed \(exit code 1\); the end of .*bad.log: no such thing"):
        carry_out(jobs, tmp_path, 1, tell=lambda _: None)
    assert [job.done for job in jobs] == [True, False, False]
    mended = [jobs[0], fake(tmp_path, "bad"), jobs[2]]
    carry_out(mended, tmp_path, 1, tell=lambda _: None)
    assert all(job.done for job in mended)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os._exit(0)", "it wrote no summary.json"),
    ],
)
def test_a_failure_says_how_the_run_ended_and_nothing_of_earlier_ones(tmp_path, code, how):
    job = fake(tmp_path, "bad", code)
    job.workdir.with_name("bad.log").write_text("what an earlier attempt said\n")
    with pytest.raises(JobFailed) as error:
        carry_out([job], tmp_path, tell=lambda _: None)
    assert str(error.value) == f"bad failed ({how}); the end of {tmp_path / 'bad.log'}: it said nothing"
    assert (tmp_path / "bad.log").read_text() == "what an earlier attempt said\n"


def test_the_time_left_is_told_by_kind_of_job():
    """A start takes long, so that it says little of how long the runs of arms take."""
    start, arm = Job("a", Path(), (), "start"), Job("b", Path(), (), "arm")
    assert _expected([arm, arm, start], {"start": [1800.0], "arm": [200.0, 300.0]}) == 2 * 250 + 1800
    assert _expected([arm], {"start": [1800.0]}) is None  # an arm takes a tenth of a start from random weights


def test_a_smoke_run_has_the_arms_that_are_asked_for():
    def arms(*arguments):
        return ablation._study(
            ablation._parser().parse_args(["--config", str(ROOT / "configs/toolbox.py"), *arguments])
        ).arms

    assert arms("--smoke") == ("vanilla", "half_strip")
    assert arms("--smoke", "--arms=full") == ("vanilla", "full")


def test_longer_runs_are_others():
    """The flag is part of what a run was begun with; starts stay what they are."""

    def jobs(*arguments):
        command = ["--config", str(ROOT / "configs/toolbox.py"), "--seeds=1", "--arms=half", *arguments]
        return ablation._study(ablation._parser().parse_args(command)).jobs()

    for short, long in zip(jobs(), jobs("--rounds=24"), strict=True):
        assert ("--config.rounds=24" in long.argv) == (short.settings != long.settings) == (short.kind == "arm")


def test_progress_is_in_a_file_at_once(tmp_path, monkeypatch):
    with (tmp_path / "said").open("w") as said:
        monkeypatch.setattr(sys, "stdout", said)
        carry_out([], tmp_path / "out")
        assert (tmp_path / "said").read_text().startswith("0 runs, 0 of them done")


def test_each_run_has_a_core_of_its_own(tmp_path):
    seen = tmp_path / "seen"
    code = f"import os\nopen({str(seen)!r}, 'a').write(str(len(os.sched_getaffinity(0))))"
    if not sys.platform.startswith("linux"):
        pytest.skip("affinity is Linux's")
    carry_out([fake(tmp_path, "a", "import time\ntime.sleep(0.3)\n" + code)], tmp_path, tell=lambda _: None)
    assert seen.read_text() == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=nowhere.py"], "error: nowhere.py: there is no such file"),
        (["--arms=vanila"], "error: --arms: 'vanila' is not known; choose from vanilla, "),
        (["--starts=always"], "error: --starts: 'always' is not known; choose from never, seldom, sometimes"),
        (["--seeds=0"], "error: --seeds=0 must be from 1 to 100"),
        (["--cores=-1"], "error: --cores=-1 must be at least 0"),
        (["--report"], "no run is finished yet, so there is nothing to report"),
        (["--check=never-0-small/half"], "error: --check=never-0-small/half: no such finished run"),
        (["--check="], "error: --check=: no such finished run"),
        (["--records=nothing.gz"], "nothing.gz"),
        (["--known=nowhere"], "error: --known=nowhere: it takes the folder of a report"),
        (["--records=x.gz", "--arms=half"], "error: --records=x.gz reports all that is there; leave out --arms"),
        (["--known=nowhere", "--tune"], "error: --known is for a study, its report and --check; leave it out"),
        (["--known=nowhere", "--records=x.gz"], "error: --known is for a study, its report and --check; leave it out"),
        (["--arms=half, full"], "error: --arms: ' full' is not known; choose from vanilla, "),
        (["--arms="], "error: --arms: '' is not known"),
        (["--seeds=101"], "error: --seeds=101 must be from 1 to 100"),
        (["--seeds=0", "--fresh=5"], "error: --seeds=0 must be from 1 to 100"),
        (["--rounds=0"], "error: --rounds=0 must be at least 1"),
        (["--fresh=-1"], "error: --fresh=-1 must be from 0 to 900"),
        (["--fresh_arms=half"], "error: --fresh_arms=half needs fresh seeds to run on; add --fresh=5"),
        (["--fresh=5", "--fresh_arms=half,"], "error: --fresh_arms: '' is not known; choose from vanilla, "),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    assert ablation.main([*arguments, f"--out={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


_NO_ARMS = "from seal_jax.config import default_config\ndef get_config(arm):\n    return default_config()\n"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (_NO_ARMS, "it needs a mapping ARMS with an arm 'vanilla'"),
        (_NO_ARMS + "ARMS = ['vanilla']", "it needs a mapping ARMS with an arm 'vanilla'"),
        ("ARMS = {'vanilla': 0", "line 1: '{' was never closed"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("ARMS = {'vanilla': 0}", "it has no get_config()"),
        ("ARMS = {'vanilla': 0}\ndef get_config(x):\n    return {}[x]", "line 3: KeyError: 'vanilla'"),
        ("ARMS = {'vanilla': 0}\ndef get_config(x):\n    return 3", "get_config() returned int, not a ConfigDict"),
    ],
)
def test_a_recipe_that_is_none_is_one_line(tmp_path, capsys, recipe, message):
    path = tmp_path / "a recipe.py"
    path.write_text(recipe + "\n")
    assert ablation.main([f"--config={path}", "--report", f"--out={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and str(path) in error and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "--tune"], "argument --tune: not allowed with argument --report"),
        (["--records=x", "--check=y"], "argument --check: not allowed with argument --records"),
        (["--out="], "argument --out: it is empty; name a path"),
    ],
)
def test_flags_that_cannot_be_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        ablation.main(arguments)
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def finished(tmp_path, **options):
    """The runs of a study of one seed, all finished with these records in their folders; its options."""
    made = study(tmp_path, arms=("vanilla",), seeds=(0,), starts=("never",), **options)
    counts = {f"refused/{rows}{end}": 4.0 for rows in ("bare", "cued") for end in ("", "/repaired")}
    rate = {"train/sampled_tokens": 10.0, "rollout/processed_tokens": 50.0, "rollout/processed_per_s": 25.0}
    scores = {f"eval/{split}/success": 0.1 for split in ("test", "ood", "test_cued")}
    for job in made.jobs():
        job.begin()
        with RunRecorder(job.workdir, tensorboard=False) as recorder:
            recorder.record(1, {**counts, **rate})
            recorder.record(1, scores, kind="report")
            recorder.summary({"round": 1, "reported_round": 1, "evaluations": {"ood": 0.1}, "warm_start/seconds": 1.0})
        (job.workdir / "config.json").write_text(json.dumps({"tasks_per_round": 4, "rollouts": 8}))
    return made


def test_a_report_says_which_runs_are_not_in_it(tmp_path, capsys):
    made = finished(tmp_path)
    runs, starts = ablation.collect(made.jobs(), Known())
    assert [run["arm"] for run in runs] == ["vanilla"] and [start["seed"] for start in starts] == [0]
    command = ["--report", "--arms=vanilla", "--starts=never", f"--out={tmp_path}"]
    said = f"left out: 1 finished runs in {tmp_path / 'runs'} that this command does not name"
    for others in (False, True):
        if others:
            shutil.copytree(tmp_path / "runs" / "never-0-small", tmp_path / "runs" / "never-7-small")
        assert ablation.main([*command, "--seeds=1"]) == 0
        assert (said in capsys.readouterr().out) == others


def test_runs_of_other_settings_are_not_reported_as_these(tmp_path):
    with pytest.raises(ValueError, match="vanilla was begun with other settings than never-0-small/vanilla has now"):
        ablation.collect(replace(finished(tmp_path), arm_flags=("--config.rounds=2",)).jobs(), Known())


def report_elsewhere(tmp_path):
    """The folder with the report of such a study, and a study of two arms and two seeds that knows of it."""
    made = finished(tmp_path / "there")
    runs, starts = ablation.collect(made.jobs(), Known())
    ablation.publish(runs, starts, tmp_path / "report")
    here = study(tmp_path / "here", arms=("vanilla", "half"), starts=("never",))
    return here, Known.read(tmp_path / "report")


def test_what_is_known_is_not_run_again_unless_a_run_begins_with_it(tmp_path):
    here, known = report_elsewhere(tmp_path)
    names = [job.name for job in known.left(here.jobs())]
    second = ["never-1-small", "never-1-small.probe", "never-1-small/vanilla", "never-1-small/half"]
    assert names == ["never-0-small", "never-0-small/half", *second]  # its probe and vanilla are known
    assert known.left(replace(here, arms=("vanilla",), seeds=(0,)).jobs()) == []
    runs, starts = ablation.collect(here.jobs(), known)
    assert runs == [*known.runs.values()] and starts == [*known.starts.values()] and len(runs) == len(starts) == 1


def test_what_is_known_with_other_settings_is_refused(tmp_path):
    here, known = report_elsewhere(tmp_path)
    for changes, name in (({"arm_flags": ("--config.rounds=2",)}, "/vanilla"), ({"flags": ("--config.rounds=2",)}, "")):
        with pytest.raises(ValueError, match=f"report: never-0-small{name} was made with other settings") as error:
            known.left(replace(here, **changes).jobs())
        assert "\n" not in str(error.value)


def test_a_known_row_is_checked_from_its_start_made_anew(tmp_path, monkeypatch, capsys):
    here, known = report_elsewhere(tmp_path)
    asked = []

    def carry_out(jobs, out, *_):
        asked.append([job.name for job in jobs])
        for job in jobs:
            shutil.copytree(tmp_path / "there" / "runs" / "never-0-small" / "vanilla", job.workdir)

    monkeypatch.setattr(ablation, "carry_out", carry_out)
    assert ablation.check(here.jobs(), known, here.out, "never-0-small/vanilla") == 0
    assert asked == [["never-0-small"], ["never-0-small/vanilla"]]
    assert "the same record" in capsys.readouterr().out
    known.runs["never-0-small/vanilla"]["success"]["test"] += 0.0025
    shutil.rmtree(here.out / "starts")
    assert ablation.check(here.jobs(), known, here.out, "never-0-small/vanilla") == 1
    assert "never-0-small/vanilla: differs in success\n" in capsys.readouterr().out


def test_a_report_does_not_replace_what_it_knows(tmp_path, monkeypatch, capsys):
    """Nor where its folder is the default one."""
    report_elsewhere(tmp_path)
    folder = tmp_path / "runs" / "study"
    shutil.copytree(tmp_path / "report", folder)
    before = (folder / "records.jsonl.gz").read_bytes()
    monkeypatch.chdir(tmp_path)
    command = ["--report", "--arms=half", f"--config={ROOT / 'configs/toolbox.py'}", "--known=runs/study"]
    for out in ([f"--out={folder}"], []):
        assert ablation.main(command + out) == 1
        assert "its report would be replaced" in capsys.readouterr().err
    assert (folder / "records.jsonl.gz").read_bytes() == before


def test_only_what_is_not_known_is_carried_out(tmp_path, monkeypatch):
    report_elsewhere(tmp_path)
    asked = []
    monkeypatch.setattr(ablation, "carry_out", lambda jobs, *_: asked.append([job.name for job in jobs]))
    monkeypatch.setattr(ablation, "_study", lambda options: study(tmp_path / "here", seeds=(0,), starts=("never",)))
    assert ablation.main([f"--known={tmp_path / 'report'}"]) == 0
    assert asked == [["never-0-small", "never-0-small/half"]]


def test_a_run_that_is_known_twice_is_refused(tmp_path):
    records.save(tmp_path / "records.jsonl.gz", [record(), record()])
    with pytest.raises(ValueError, match="never-0-small/vanilla has two records; keep one of them"):
        Known.read(tmp_path)


def test_a_check_leaves_alone_what_another_one_runs(tmp_path):
    made = finished(tmp_path)
    at_work = tmp_path / "check" / "never-0-small" / "vanilla" / "checkpoint"
    at_work.mkdir(parents=True)
    with (
        contextlib.closing(hold_workdir(tmp_path / "check")),
        pytest.raises(ValueError, match="is in use by another process"),
    ):
        ablation.check(made.jobs(), Known(), tmp_path, "never-0-small/vanilla")
    assert at_work.exists()


def test_fresh_seeds_are_of_the_arm_that_validation_chose(tmp_path, capsys):
    """And of vanilla, from both starts; none until there is a choice."""
    made = study(tmp_path, arms=tuple(toolbox.ARMS), seeds=(0,))
    runs = [
        record(arm, start=start, validation=[(4, 0.5 if arm == "anneal" else 0.2)])
        for arm in toolbox.ARMS
        for start in ("never", "sometimes")
    ]
    jobs = ablation.confirming(replace(made, starts=("seldom", "never")), runs, 2)
    assert {(j.which["arm"], j.which["start"], j.which["seed"]) for j in jobs if j.kind == "arm"} == {
        (arm, start, seed) for arm in ("vanilla", "anneal") for start in ("never", "sometimes") for seed in (100, 101)
    }
    assert len([j for j in jobs if j.kind != "arm"]) == 2 * (2 + 2)  # their starts, and the probes of these
    more = ablation.confirming(made, runs, 2, ("half", "anneal"))
    assert more[: len(jobs)] == ablation.confirming(made, runs, 2)  # others come last, and nothing twice
    assert {(j.which["arm"], j.which["seed"]) for j in more[len(jobs) :]} == {("half", 100), ("half", 101)}
    assert len(more) == len(jobs) + 4
    runs = [run for run in runs if run["arm"] != "half"]
    assert ablation.confirming(made, runs, 2) == [] and "no arm is chosen yet" in capsys.readouterr().out
    named = ablation.confirming(replace(made, seeds=()), [], 1, ("half",))
    assert capsys.readouterr().out == ""  # where no seed chooses, none is missed
    assert {j.which["arm"] for j in named if j.kind == "arm"} == {"vanilla", "half"}


def test_a_run_of_other_settings_is_not_taken_for_this_one(tmp_path):
    carry_out([fake(tmp_path, "a")], tmp_path, tell=lambda _: None)
    other = replace(fake(tmp_path, "a"), settings="other")
    with pytest.raises(
        ValueError, match="a was begun with other settings than a has now; choose another --out"
    ) as error:
        carry_out([other], tmp_path, tell=lambda _: None)
    assert "\n" not in str(error.value)
    shutil.rmtree(other.workdir)
    carry_out([other], tmp_path, tell=lambda _: None)
    (tmp_path / "b").mkdir()  # begun by nobody knows what
    with pytest.raises(ValueError, match="b was begun with other settings"):
        carry_out([replace(other, name="b", workdir=tmp_path / "b")], tmp_path, tell=lambda _: None)


def test_settings_tell_runs_apart_and_not_where_they_lie(tmp_path):
    def settings(**options):
        return [job.settings for job in study(**{"tmp_path": tmp_path, **options}).jobs()]

    assert len(set(settings())) == len(settings())
    assert settings() == settings(tmp_path=tmp_path / "elsewhere")
    changed = settings(arm_flags=("--config.rounds=2",))
    kept = [a == b for a, b in zip(settings(), changed, strict=True)]
    assert kept == [job.kind != "arm" for job in study(tmp_path).jobs()]


def test_one_study_at_a_time_in_a_folder(tmp_path):
    with contextlib.closing(hold_workdir(tmp_path)), pytest.raises(ValueError, match="is in use by another process"):
        carry_out([], tmp_path, tell=lambda _: None)


def test_a_terminated_study_ends_its_runs(tmp_path):
    pid = tmp_path / "pid"
    code = f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    timer = threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        carry_out([fake(tmp_path, "long", code)], tmp_path, tell=lambda _: None)
    timer.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_the_prompts_of_every_arm_fit(tmp_path):
    """Marks inside the docs make prompts longer; the kept start's tokenizer is as good as any."""
    for arm in toolbox.ARMS:
        config = toolbox.get_config(arm)
        chat = get_format(config.chat)
        limits = episode_limits(config, max_context=1024)
        stub = SimpleNamespace(chat=chat, tokenizer=load_tokenizer(config.policy.path), limits=limits)
        check_prompts(config, build_suite(config).tasks("train"), stub)


@pytest.mark.slow
def test_smoke(tmp_path):
    """Two arms from a start made in place, with tables and figures; then one of the rows again, to the last digit."""
    command = [sys.executable, "experiments/ablation.py", "--config=configs/toolbox.py", "--smoke", f"--out={tmp_path}"]
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, timeout=900)
    print(f"{time.monotonic() - started:.0f} s")
    report = (tmp_path / "report.md").read_text()
    assert "half_strip" in report and "vanilla" in report
    assert {p.suffix for p in (tmp_path / "figures").iterdir()} == {".png", ".svg"}
    (start,) = json.loads((tmp_path / "starts.json").read_text())
    assert (start["start"], start["seed"], start["size"]) == ("never", 0, "small")
    again = subprocess.run(
        [*command, "--check=never-0-small/half_strip"],
        cwd=ROOT,
        check=True,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert "the same record" in again.stdout
