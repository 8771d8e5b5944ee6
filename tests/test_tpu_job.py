"""The Cloud TPU job scripts: a dry run prints the commands in order and calls nothing; a job with stand-ins."""

import itertools
import os
import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from seal_jax.config import validate

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "experiments" / "tpu" / "run_on_tpu_vm.sh"
WORKER = ROOT / "experiments" / "tpu" / "on_worker.sh"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


#: Writes its calls down. LISTED is what the bucket holds (a job is "finished"); FAILS names a subcommand that breaks.
GCLOUD = """
echo "gcloud $*" >> {calls}
[[ "$*" != *status* ]] || echo "finished with 0"
if [[ -n "${{FAILS:-}}" && "$*" == *"$FAILS"* ]]; then echo "ERROR: HTTPError 503" >&2; exit 1; fi
if [[ "$*" == "storage ls"* ]]; then
  [[ -z "${{LISTED:-}}" ]] || {{ echo "$LISTED"; exit 0; }}
  echo "ERROR: (gcloud.storage.ls) One or more URLs matched no objects." >&2
  exit 1
fi
"""


def stand_in(folder, name, body):
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path):
    """A PATH whose gcloud only writes down how it was called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stand_in(folder, "gcloud", GCLOUD.format(calls=tmp_path / "calls"))
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}


def script(env, *args):
    return subprocess.run(["bash", str(SCRIPT), *args], env=env, capture_output=True, text=True, timeout=60)


ALL = ("all", "--name", "seal-1", "--zone", "us-west4-a", "--type", "v5litepod-8", "--config", "configs/toolbox.py")


def test_dry_run_prints_every_step_in_order_and_calls_nothing(tools, tmp_path):
    done = script(tools, *ALL, "--bucket", "gs://b/seal-1", "--args", "--config.seed=2 --x='y'", "--spot", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "calls").exists() and not (tmp_path / "seal_jax-seal-1.tar.gz").exists()
    commands = [line[2:] for line in done.stdout.splitlines() if line.startswith("+ ")]
    expected = [
        "gcloud compute tpus tpu-vm create seal-1 --zone=us-west4-a --accelerator-type=v5litepod-8 --spot",
        f"git -C {ROOT} archive",
        "gcloud compute tpus tpu-vm scp",
        "gcloud compute tpus tpu-vm ssh seal-1 --zone=us-west4-a --worker=all '--command=rm -rf seal_jax",
        "gcloud compute tpus tpu-vm ssh seal-1 --zone=us-west4-a --worker=all "
        "'--command=bash seal_jax/experiments/tpu/on_worker.sh install'",
        "gcloud compute tpus tpu-vm ssh seal-1 --zone=us-west4-a --worker=all '--command=CONFIG=configs/toolbox.py",
        "gcloud compute tpus tpu-vm ssh seal-1 --zone=us-west4-a --worker=0 '--command=CONFIG=configs/toolbox.py",
        "mkdir -p",
        "gcloud compute tpus tpu-vm ssh seal-1 --zone=us-west4-a --worker=0 '--command=tar czf seal_run.tar.gz",
        "gcloud compute tpus tpu-vm scp seal-1:seal_run.tar.gz",
        "tar xzf",
        "gcloud compute tpus tpu-vm delete seal-1 --zone=us-west4-a --quiet",
    ]
    assert len(commands) == len(expected), commands
    for command, start in zip(commands, expected, strict=True):
        assert command.startswith(start), (command, start)
    assert "--version=v2-alpha-tpuv5-lite" in commands[0]
    assert "billed" in done.stdout


def test_printed_commands_parse_as_shell(tools):
    done = script(tools, *ALL, "--args", "--x='y z'", "--dry-run")
    (start,) = [line[2:] for line in done.stdout.splitlines() if line.endswith("start'")]
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {start}"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    command = next(w.removeprefix("--command=") for w in words if w.startswith("--command="))
    # What the remote shell makes of it: the value arrives as it was given.
    seen = subprocess.run(
        ["bash", "-c", command.replace("bash seal_jax/experiments/tpu/on_worker.sh start", "bash -c 'echo \"$ARGS\"'")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert seen.stdout.strip() == "--x='y z'"


def test_queued_spot_and_keep(tools):
    done = script(tools, *ALL, "--queued", "--spot", "--keep", "--project", "p1", "--dry-run")
    assert "queued-resources create seal-1 --node-id=seal-1 --zone=us-west4-a --project=p1" in done.stdout
    assert "--spot --runtime-version=" in done.stdout and "queued-resources describe" in done.stdout
    assert "+ gcloud compute tpus queued-resources delete" not in done.stdout
    assert "--keep: the VM is still billed. Delete it with: gcloud compute tpus queued-resources delete" in done.stdout


def test_a_real_call_runs_what_the_dry_run_prints(tools, tmp_path):
    done = script(tools, "wait", "--name", "seal-1", "--zone", "z")
    assert done.returncode == 0, done.stderr
    assert "finished with 0" in done.stdout
    done = script(tools, "delete", "--name", "seal-1", "--zone", "z")
    assert done.returncode == 0
    assert (tmp_path / "calls").read_text().splitlines()[
        -1
    ] == "gcloud compute tpus tpu-vm delete seal-1 --zone=z --quiet"


START = ("start", "--name", "a", "--zone", "z", "--config", "c", "--type")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "no step given"),
        (("fly",), "unknown step 'fly'"),
        (("all", "--zone", "z"), "--name is missing"),
        (("all", "--name", "Bad_Name", "--zone", "z"), "must be lower-case"),
        (("create", "--name", "a", "--zone", "z"), "--type is missing"),
        (("start", "--name", "a", "--zone", "z", "--config", "c"), "--type is missing"),
        ((*START, "v5p-16", "--bucket", "gs://b/p"), "several hosts, which need one shared workdir"),
        ((*START, "v5p-16", "--mount", "m"), "--workdir '' must be an absolute path on a file system that they share"),
        (("start", "--name", "a", "--zone", "z", "--type", "v4-8"), "--config is missing"),
        ((*START, "v4-8", "--bucket", "b"), "must begin with gs://"),
        (("start", "--nmae", "a"), "unknown option '--nmae'"),
        (("start", "--name"), "--name needs a value"),
    ],
)
def test_bad_input_is_one_line(tools, args, message):
    done = script(tools, *args)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_help_is_the_header(tools):
    done = script(tools, "--help")
    assert done.returncode == 0
    assert "--bucket" in done.stdout and "billed" in done.stdout and "set -euo" not in done.stdout


def work(tools, tmp_path, command="run", code=0, **more):
    """on_worker.sh with a python that only ends; returns what ran and the calls of the stand-ins."""
    stand_in(tmp_path / "bin", "python", f'echo "python $*" >> {tmp_path}/calls; exit {code}')
    settings = {
        "PYTHON": str(tmp_path / "bin" / "python"),
        "CONFIG": "configs/toolbox.py",
        "WORKDIR": "runs/x",
        "BUCKET": "gs://b/x",
        "ARGS": "--config.seed=2",
    }
    env = {**tools, **settings, **more}
    done = subprocess.run(["bash", str(WORKER), command], env=env, capture_output=True, text=True, timeout=60)
    return done, (tmp_path / "calls").read_text().splitlines()


@pytest.mark.parametrize("listed", ["", "gs://b/x/metrics.jsonl"])
@pytest.mark.parametrize("code", [0, 3])
def test_the_workers_job_copies_runs_and_notes_the_exit(tools, tmp_path, code, listed):
    done, calls = work(tools, tmp_path, code=code, LISTED=listed)
    assert done.returncode == code
    workdir = tmp_path / "runs" / "x"
    assert calls == [
        "gcloud storage ls gs://b/x/**",
        *([f"gcloud storage rsync --recursive gs://b/x {workdir}"] if listed else []),
        f"python -m seal_jax.main --config=configs/toolbox.py --workdir={workdir} --config.seed=2",
        f"gcloud storage rsync --recursive --delete-unmatched-destination-objects {workdir} gs://b/x",
    ]
    status, _ = work(tools, tmp_path, "status")
    assert status.stdout.startswith(f"finished with {code}\n")


def test_a_slash_at_the_buckets_end_does_not_make_it_look_empty(tools, tmp_path):
    _, calls = work(tools, tmp_path, BUCKET="gs://b/x/")
    assert calls[0] == "gcloud storage ls gs://b/x/**"


@pytest.mark.parametrize("fails", ["storage ls", "storage rsync --recursive gs://b/x"])
def test_a_bucket_that_cannot_be_read_ends_the_job_before_anything_is_overwritten(tools, tmp_path, fails):
    done, calls = work(tools, tmp_path, LISTED="gs://b/x/metrics.jsonl", FAILS=fails)
    assert done.returncode != 0
    assert not any(call.startswith("python") or "--delete-unmatched" in call for call in calls)
    status, _ = work(tools, tmp_path, "status")
    assert not status.stdout.startswith("finished with 0") and "503" in status.stdout
    assert "gs://b/x" in status.stdout and "nothing was started" in status.stdout


@pytest.mark.parametrize("command", ["start", "run"])
def test_a_second_host_needs_a_job_of_several(tools, tmp_path, command):
    stand_in(tmp_path / "bin", "hostname", "echo t1v-n-0f3a-w-1")
    (tmp_path / "calls").touch()
    done, calls = work(tools, tmp_path, command)
    assert done.returncode == 2 and "the job is of one host" in done.stderr and done.stderr.count("\n") == 1
    done, calls = work(tools, tmp_path, command, DISTRIBUTED="1")  # with a bucket
    assert done.returncode == 2 and "one shared WORKDIR" in done.stderr and done.stderr.count("\n") == 1
    assert calls == []


def test_every_host_of_several_joins_the_job_in_the_shared_folder(tools, tmp_path):
    stand_in(tmp_path / "bin", "hostname", "echo t1v-n-0f3a-w-1")
    shared = tmp_path / "shared"
    mount = f"mkdir -p {shared}"
    done, calls = work(tools, tmp_path, DISTRIBUTED="1", BUCKET="", MOUNT=mount, WORKDIR=str(shared / "x"))
    assert done.returncode == 0, done.stderr
    assert calls == [
        f"python -m seal_jax.main --config=configs/toolbox.py --workdir={shared}/x --distributed --config.seed=2"
    ]


@pytest.mark.parametrize("kind, several", [("v5litepod-8", False), ("v5litepod-16", True)])
def test_the_number_of_hosts_decides_whether_the_job_is_distributed(tools, kind, several):
    done = script(tools, *START, kind, "--mount", "m", "--workdir", "/mnt/x", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert ("DISTRIBUTED=1 bash" in done.stdout) == several and "--worker=all" in done.stdout


def test_the_example_of_the_header_uses_the_chips_that_it_rents():
    header = SCRIPT.read_text().split("# Steps")[0].replace("\\\n#", "")
    example = shlex.split(next(line for line in header.splitlines() if " all " in line).lstrip("# "))
    option = dict(itertools.pairwise(example))
    config = runpy.run_path(str(ROOT / option["--config"]))["get_config"]()
    config.update_from_flattened_dict(
        {k.removeprefix("--config."): int(v) for k, v in (a.split("=") for a in option["--args"].split())}
    )
    validate(config)
    kind, number = option["--type"].split("-")
    assert kind == "v5litepod"  # whose number counts chips
    assert config.mesh.data * config.mesh.fsdp * config.mesh.tensor == int(number)


def test_start_hands_all_settings_to_tmux(tools, tmp_path):
    stand_in(tmp_path / "bin", "python", f'echo "python $*" >> {tmp_path}/calls')
    stand_in(tmp_path / "bin", "tmux", f'echo "tmux $1 $2 $3 $4" >> {tmp_path}/calls; bash -c "${{@: -1}}"')
    env = {**tools, "PYTHON": str(tmp_path / "bin" / "python"), "CONFIG": "c.py", "ARGS": "--a=1 --b=2"}
    done = subprocess.run(["bash", str(WORKER), "start"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.endswith("started\n"), done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "tmux new-session -d -s seal"
    assert calls[1].endswith(f"--config=c.py --workdir={tmp_path}/runs/seal --a=1 --b=2")
