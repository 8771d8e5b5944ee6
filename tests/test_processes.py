"""Two processes on this machine, over loopback: they do what one does, and none waits for one that is gone."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from seal_jax.last_words import lost
from seal_jax.packing import pack, unpack
from seal_jax.policy.local import local_shape
from seal_jax.policy.sharding import AXES
from seal_jax.telemetry.recorder import read_jsonl
from seal_jax.types import Call, ParseError, Unevaluated
from tests import one_of_many

ROOT = Path(__file__).parents[1]
#: The noise of the clock, and what is counted per process.
OWN = ("time/", "rollout/", "seconds/", "count/", "memory/", "compilations")


def environment(devices=1):
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(*commands, devices=1):
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env=environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]


def finish(jobs, timeout):
    """[(exit code, output)]; none of them is left running."""
    try:
        outputs = [job.communicate(timeout=timeout)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, output) for job, output in zip(jobs, outputs, strict=True)]


def toys(job, folder, devices=1):
    port = free_port()
    script = Path(one_of_many.__file__)
    return start(*[(script, job, port, 2, index, folder) for index in range(2)], devices=devices)


def test_packed_records_come_back_equal_and_of_the_same_types():
    call = Call("f", {"a": Unevaluated("nan"), "b": [1, 2.5, {"k": (1,)}], 3: b"x", "s": {1, 2}, "c": 1 + 2j}, (None,))
    floats = tuple(float(np.float32(x)) for x in (0.1, -1e-38, 3.4e38)) + (-0.0, float("inf"))
    value = [call, ParseError("json", "\ud800", 3), floats, [10**5000, True, 1, -7], {}, (), ""]
    back = unpack(pack(value))
    assert back == value and repr(back[:3]) == repr(value[:3])
    assert type(back[0].arguments["a"]) is Unevaluated and type(back[3][1]) is bool
    with pytest.raises(TypeError, match="object cannot be handed to another process"):
        pack([object()])


def test_two_processes_learn_what_one_does(tmp_path):
    """Two devices each, parameters spread over all four: episodes equal, metrics and parameters to 1e-5."""
    jobs = toys("learn", tmp_path, devices=2)
    one = one_of_many.learn((1, 1, 1))
    for code, output in finish(jobs, 120):
        assert code == 0, output
    two = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]
    for got in two:
        assert got["episodes"] == one["episodes"]
        for mine, ones in zip(got["metrics"], one["metrics"], strict=True):
            assert mine == pytest.approx(ones, rel=1e-5, abs=1e-5)
        for mine, ones in zip(got["params"], one["params"], strict=True):
            np.testing.assert_allclose(mine, ones, atol=1e-5)
    assert two[0]["metrics"] == two[1]["metrics"] and two[0]["params"] == two[1]["params"]
    assert one["metrics"][1]["loss/kl"] > 0 and one["metrics"][0]["norm/gradient"] > 1e-3  # not all zeros
    assert "come apart: the index of process 0 is not that of process 1" in two[0]["apart"]
    for got in two:
        assert "of process 1 is not the folder that process 0 sees" in got["unshared"]


@pytest.mark.parametrize(
    ("shape", "parts", "local"),
    [
        ((8, 1, 1), 2, (4, 1, 1)),
        ((1, 8, 1), 2, (1, 4, 1)),
        ((2, 4, 1), 2, (1, 4, 1)),
        ((4, 2, 1), 2, (2, 2, 1)),
        ((2, 2, 2), 2, (1, 2, 2)),
        ((2, 2, 2), 1, (2, 2, 2)),
        ((1, 1, 8), 2, "config.mesh.tensor=8 does not divide the 4 devices of each process"),
        ((1, 3, 2), 4, "devices; each needs the same number"),
    ],
)
def test_a_process_plays_on_its_part_of_the_mesh(shape, parts, local):
    n = int(np.prod(shape))
    devices = np.array([SimpleNamespace(process_index=i * parts // n) for i in range(n)]).reshape(shape)
    mesh = SimpleNamespace(devices=devices, shape=dict(zip(AXES, shape, strict=True)))
    if isinstance(local, str):
        with pytest.raises(ValueError, match=local):
            local_shape(mesh)
    else:
        assert local_shape(mesh) == local


def test_a_process_that_dies_ends_the_job_in_one_line(tmp_path):
    (tmp_path / "checkpoints" / "7").mkdir(parents=True)
    jobs = toys("die", tmp_path)
    assert jobs[1].wait(60) == -signal.SIGKILL
    died = time.monotonic()
    assert jobs[0].wait(30) == 3
    assert time.monotonic() - died < 10
    (_, said), _ = finish(jobs, 30)
    lines = [line for line in said.splitlines() if "[Gloo]" not in line]
    assert [re.sub(r" \(.*\);", ";", line) for line in lines] == [lost(tmp_path)]  # without what gloo said
    assert "checkpoint of round 7 is in" in lines[0] and "start all processes again" in lines[0]


@pytest.mark.slow
def test_the_failure_of_one_is_told_and_leaves_no_other_waiting(tmp_path):
    """The first process fails by itself: its error is shown, and the other one ends, whoever notices first."""
    jobs = toys("fail", tmp_path)
    (code, said), (other, heard) = finish(jobs, 60)
    assert code == 1 and "FloatingPointError: the loss is nan" in said
    assert other not in (0, None) and "another process of this job is gone" in heard or "Terminating" in heard


def test_the_companion_speaks_only_for_a_process_that_said_nothing(tmp_path):
    code = "import os, sys; from seal_jax.last_words import companion; done = companion(sys.argv[1]); {}"
    killed, orderly = finish(
        start(*[("-c", code.format(end), tmp_path) for end in ("os.kill(os.getpid(), 9)", "done()")]), 30
    )
    assert killed[0] == -signal.SIGKILL and orderly == (0, "")
    assert killed[1].count("\n") == 1
    assert re.search(r"ended from outside, or by jax .* no checkpoint yet in .*; start all processes again", killed[1])


# --- whole runs of the quickstart's policy (minutes) -----------------------------------------------------------------
SMALL = (
    "--config.tasks_per_round=4",
    "--config.rollouts=4",
    "--config.buckets.groups=(4,)",
    "--config.buckets.rows=()",
    "--config.learner.minibatches=1",
    "--config.checkpoint.every=1",
    "--config.eval.val=4",
    "--config.eval.every=1",
)


def run(workdir, *options, index=None, port=None):
    together = () if port is None else (f"--coordinator=127.0.0.1:{port}", "--process_count=2", f"--process_id={index}")
    mesh = () if port is None else ("--config.mesh.data=-1",)
    off = ("--config.eval.test=0", "--config.eval.ood=0", f"--compilation_cache={workdir.parent / 'programs'}")
    recipe = "--config=configs/quickstart.py"
    return ("-m", "seal_jax.main", recipe, f"--workdir={workdir}", *off, *mesh, *together, *options)


def same_metrics(workdir, of):
    """Every line of metrics of one run is that of the other, to 1e-5; and so are Ω and profile of every round."""
    lines, others = (list(read_jsonl(w / "metrics.jsonl")) for w in (workdir, of))
    assert [(x["round"], x["kind"]) for x in lines] == [(x["round"], x["kind"]) for x in others] and lines
    for line, other in zip(lines, others, strict=True):
        assert line.get("cues") == other.get("cues")
        mine, ones = (
            {k: v for k, v in x["metrics"].items() if not k.startswith(OWN) and v is not None} for x in (line, other)
        )
        assert mine == pytest.approx(ones, rel=1e-5, abs=1e-5)
    interfaces, their = (list(read_jsonl(w / "interface.jsonl")) for w in (workdir, of))
    assert interfaces == their


@pytest.mark.slow
def test_two_processes_run_the_quickstart_as_one_does(tmp_path):
    options, port = ("--config.rounds=2",), free_port()
    ((code, output),) = finish(start(run(tmp_path / "one", *options)), 1200)
    assert code == 0, output
    jobs = start(*[run(tmp_path / "two", *options, index=i, port=port) for i in range(2)])
    for code, output in finish(jobs, 1200):
        assert code == 0, output
    same_metrics(tmp_path / "two", tmp_path / "one")
    first = json.loads((tmp_path / "two" / "provenance.jsonl").read_text().splitlines()[0])
    assert first["device"]["process_count"] == 2


@pytest.mark.slow
def test_a_job_that_lost_a_process_goes_on_with_one(tmp_path):
    port, cut = free_port(), tmp_path / "cut"
    ((code, output),) = finish(start(run(tmp_path / "whole", *SMALL, "--config.rounds=3")), 1200)
    assert code == 0, output
    jobs = start(*[run(cut, *SMALL, "--config.rounds=3", index=i, port=port) for i in range(2)])
    until = time.monotonic() + 1200
    while not (cut / "checkpoints" / "1").exists() and time.monotonic() < until and jobs[0].poll() is None:
        time.sleep(0.1)
    jobs[1].kill()
    (code, said), _ = finish(jobs, 300)
    assert code == 3, said
    told = said.splitlines()[-1]
    assert re.search(r"another process of this job is gone \(.*\); checkpoint of round \d is in .*; start all", told)
    assert "Traceback" not in said
    ((code, output),) = finish(start(run(cut, *SMALL, "--config.rounds=3")), 1200)
    assert code == 0 and "resumed from" in output, output
    same_metrics(cut, tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--process_count=2",), "belong together"),
        (("--coordinator=here:1", "--process_count=2", "--process_id=2"), "one of 0..1"),
        (("--distributed",), "jax found no job to join"),
    ],
)
@pytest.mark.slow
def test_a_start_that_cannot_join_is_refused_in_one_line(tmp_path, options, message):
    ((code, said),) = finish(start(run(tmp_path / "w", *options)), 300)
    assert code == 2 and message in said and said.count("\n") == 1
    assert not (tmp_path / "w").exists()
