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
from experiments.study.jobs import Job, Study, ready
from experiments.study.workers import JobFailed, carry_out
from seal_jax.assembly import build_suite, check_prompts, episode_limits
from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import load_tokenizer
from seal_jax.checkpoints import hold_workdir

ROOT = Path(__file__).parents[2]


def study(tmp_path, **options):
    options = {"arms": ("vanilla", "half"), "seeds": (0, 1), **options}
    return Study(Path("configs/toolbox.py"), tmp_path, toolbox.get_config, **options)


def fake(tmp_path, name, code="", needs=()):
    """A job that does `code` and then writes its summary."""
    workdir = tmp_path / name
    code += f"\nfrom pathlib import Path\np = Path({str(workdir)!r})\np.mkdir(parents=True)"
    code += "\n(p / 'summary.json').write_text('{}')"
    return Job(name, workdir, (sys.executable, "-c", code), tuple(needs))


def test_every_run_waits_for_its_own_start(tmp_path):
    jobs = study(tmp_path).jobs()
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names) == 2 * (2 + 2 + 2 * 2)  # of each seed: two starts, two probes, 2 x 2 arms
    for i, job in enumerate(jobs):
        assert all(need in names[:i] for need in job.needs)
        source = [x.removeprefix("--config.policy.path=") for x in job.argv if "policy.path" in x]
        assert source == [str(tmp_path / "starts" / need / "start") for need in job.needs]
        if job.which:
            assert job.needs == (f"{job.which['start']}-{job.which['seed']}-small",)
            assert f"--config=configs/toolbox.py:{job.which['arm']}" in job.argv
            assert f"--config.seed={job.which['seed']}" in job.argv
    assert [job.which["seed"] for job in jobs if job.which] == [0] * 4 + [1] * 4  # one seed whole after the other


def test_every_setting_that_a_job_names_is_one_of_the_recipe(tmp_path):
    for size in ("small", "large"):
        for job in study(tmp_path, size=size, seeds=(3,)).jobs():
            (recipe,) = (x.rsplit(":", 1)[1] for x in job.argv if x.startswith("--config="))
            toolbox.get_config(recipe)


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
    with pytest.raises(JobFailed, match="bad failed; the end of .*bad.log: no such thing"):
        carry_out(jobs, tmp_path, 1, tell=lambda _: None)
    assert [job.done for job in jobs] == [True, False, False]
    mended = [jobs[0], fake(tmp_path, "bad"), jobs[2]]
    carry_out(mended, tmp_path, 1, tell=lambda _: None)
    assert all(job.done for job in mended)


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
        (["--config=setup.py", "--report"], "error: --config=setup.py: "),
        (["--arms=vanila"], "error: --arms: 'vanila' is not known; choose from vanilla, "),
        (["--starts=always"], "error: --starts: 'always' is not known; choose from never, sometimes"),
        (["--seeds=0"], "error: --seeds=0 must be at least 1"),
        (["--cores=-1"], "error: --cores=-1 must be at least 0"),
        (["--report"], "no run is finished yet, so there is nothing to report"),
        (["--check=never-0-small/half"], "error: --check=never-0-small/half: no such finished run"),
        (["--records=nothing.gz"], "nothing.gz"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    if arguments == ["--config=setup.py", "--report"]:
        (tmp_path / "setup.py").write_text("ARMS = {}\n")
        arguments = [f"--config={tmp_path / 'setup.py'}", "--report"]
        message = f"error: --config={tmp_path / 'setup.py'}: it needs a mapping ARMS with an arm 'vanilla'"
    assert ablation.main([*arguments, f"--out={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


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
    assert kept == [not job.which for job in study(tmp_path).jobs()]


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
