"""Recipes and bad input: every recipe resolves, and a value that cannot work is one line before anything compiles."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import bfcl, quickstart, toolbox
from seal_jax import main
from seal_jax.config import default_config, validate
from seal_jax.envs.base import make_suite

ROOT = Path(__file__).parents[1]


def test_every_recipe_is_valid():
    validate(default_config())
    validate(quickstart.get_config())
    for setting in toolbox.SETTINGS:
        validate(toolbox.get_config(setting))
    for backbone in bfcl.BACKBONES:
        config = bfcl.get_config(backbone)
        if backbone == "smollm2_135m":
            with pytest.raises(ValueError, match="config.policy.path is empty"):
                validate(config)
            config.policy.path = "model.gguf"
        validate(config)


def test_arguments_of_recipes_are_checked():
    with pytest.raises(ValueError, match="configs/toolbox.py:fulll is not known; choose one of"):
        toolbox.get_config("fulll")
    with pytest.raises(ValueError, match="configs/bfcl.py:x is not known; choose one of"):
        bfcl.get_config("x")


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("rounds", -1, "config.rounds=-1: must be at least 0"),
        ("rollouts", 1, "config.rollouts=1: a group advantage needs at least 2"),
        ("temperature", 0.0, "config.temperature=0.0"),
        ("chat", "tinny", "config.chat='tinny' is not known; choose one of"),
        ("policy.source", "hf", "config.policy.path is empty"),
        ("policy.compute_dtype", "float16", "config.policy.compute_dtype='float16' is not known"),
        ("loss.reweight", "papr", "config.loss.reweight='papr' is not known"),
        ("interface.exposure", 1.5, "config.interface.exposure=1.5 is a share"),
        ("interface.placement", "inline", "cannot be met; set exposure=1.0 or placement='note'"),
        ("interface.components", ("cap", "nap"), r"config.interface.components holds \['nap'\]"),
        ("buckets.suffix", (256, 128), "must be positive and ascending"),
        ("learner.minibatches", 3, "config.tasks_per_round=16 is not divisible by config.learner.minibatches=3"),
        ("mesh.data", 2, "config.learner.prompts_per_micro=1 is not divisible by the mesh's data x fsdp = 2"),
    ],
)
def test_values_that_cannot_work(key, value, message):
    config = default_config()
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)


def test_stripping_needs_bare_and_cued_rows():
    config = default_config()
    config.interface.strip_in_update, config.interface.exposure = True, 1.0
    with pytest.raises(ValueError, match="needs bare and cued rows in each group"):
        validate(config)


def test_the_config_is_locked():
    with pytest.raises(AttributeError):
        default_config().lock().learning_rate = 1.0


def run_main(*args):
    command = [sys.executable, "-m", "seal_jax.main", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--config.loss.clip=0.1", "unknown setting 'clip'"),
        ("--config.rollouts=1", "config.rollouts=1"),
    ],
)
def test_the_command_line_answers_in_one_line(tmp_path, flag, message):
    done = run_main("--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}", flag)
    last = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(last) == 1 and last[0].startswith("error: ") and message in last[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["tran", "language_hint"])
def test_a_misspelt_suite_option_is_named(option):
    with pytest.raises(ValueError, match=rf"config.suite_options holds \['{option}'\].*'ood', 'seed'") as error:
        make_suite("toolbox", **{option: 1})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("during", ["validate", "start", "training"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_only_what_fails_before_training_is_cut_to_one_line(tmp_path, monkeypatch, capsys, during, mode):
    class Run:
        def __init__(self, config, workdir):
            if during == "start":
                raise ValueError("no such folder")

        def __enter__(self):
            raise ValueError("broken in round 7")

        def __exit__(self, *exc):
            pass

    config = default_config()
    config.rollouts = 1 if during == "validate" else 8
    for name, value in {"CONFIG": config, "WORKDIR": tmp_path, "MODE": mode, "CACHE": ""}.items():
        monkeypatch.setattr(main, f"_{name}", SimpleNamespace(value=value))
    monkeypatch.setattr(main, "flags", SimpleNamespace(FLAGS=SimpleNamespace(showtraceback=False)))
    monkeypatch.setattr("seal_jax.run.Run", Run)
    if during == "training":
        with pytest.raises(ValueError, match="broken in round 7"):
            main.main([])
        return
    with pytest.raises(SystemExit) as end:
        main.main([])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_help_explains_the_flags():
    done = run_main("--help")
    assert "--config.rounds=20" in done.stdout and "--workdir" in done.stdout
