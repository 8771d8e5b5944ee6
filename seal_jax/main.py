"""The command line of seal_jax.

    python -m seal_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Trains with the settings of a recipe, writes everything to the workdir, and resumes by itself when the workdir already
holds a run of the same config. Any setting that seal_jax/config.py lists can be changed on the command line:
--config.rounds=20. Entries of its open mappings (suite_options, policy.overrides, ...) are set in a recipe. A recipe
may take an argument after a colon: --config=configs/bfcl.py:smollm2_135m.

    python -m seal_jax.main --mode=plan --config=configs/bfcl.py:qwen25_7b --topology=v5p:2x2x2

Says, on a machine without a TPU, whether that run fits the slice and how long its rounds take at least.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from seal_jax.last_words import companion, newest_checkpoint


class RecipeError(Exception):
    """A recipe that does not load. (Not a ValueError: absl would print its usage text around it.)"""


def recipe_module(path: str) -> ModuleType:
    """A recipe file, run as the module "recipe". RecipeError if there is none; whatever the file raises."""
    if not Path(path).is_file():
        raise RecipeError(f"{path}: {'is a folder' if Path(path).is_dir() else 'there is no such file'}")
    module = ModuleType("recipe")
    module.__file__ = path
    sys.modules["recipe"] = module
    SourceFileLoader("recipe", path).exec_module(module)
    return module


def load_recipe(argument: str) -> ConfigDict:
    """The config of FILE.py or FILE.py:ARGUMENT; RecipeError, one line, for whatever is wrong with it."""
    path, *options = argument.split(":", 1)
    try:
        module = recipe_module(path)
        if not hasattr(module, "get_config"):
            raise RecipeError(f"{path}: it has no get_config()")
        config = module.get_config(*options)
    except RecipeError:
        raise
    except SyntaxError as error:
        raise RecipeError(f"{error.filename}: line {error.lineno}: {error.msg}") from error
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f"{path}: line {lines[-1]}" if lines else path
        what = " ".join(str(error).split()).split(" Other fields present")[0].replace("'Key ", "Key ")
        if isinstance(error, ValueError) and Path(path).name in what:
            raise RecipeError(what) from error  # it names the file itself
        raise RecipeError(f"{where}: {type(error).__name__}: {what}") from error
    if not isinstance(config, ConfigDict):
        raise RecipeError(f"{path}: get_config() returned {type(config).__name__}, not a ConfigDict")
    return config.lock()


_CONFIG = config_flags.DEFINE_config_file("config", None, "The recipe, e.g. configs/quickstart.py", lock_config=True)
setattr(flags.FLAGS["config"].parser, "parse", load_recipe)  # noqa: B010  # its own answers with 40 lines of traceback
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run, resumed if it exists.")
_MODE = flags.DEFINE_enum(
    "mode",
    "train",
    ["train", "eval", "export", "plan"],
    "train: run (or resume) the closed loop, with strict evaluation before (config.eval.before) and after. "
    "eval: strict evaluation of the workdir's best validated round (without validation the latest; without a "
    "checkpoint the starting policy). "
    "export: that round's policy as a Hugging Face folder, workdir/export, adapters merged. "
    "plan: compile for a TPU slice that is not there and say whether the run fits it; needs no workdir.",
)
_TOPOLOGY = flags.DEFINE_string("topology", None, "With --mode=plan: the slice, e.g. v5e:4x4, v5p:2x2x2, v6e:4x4.")
_EPISODES = flags.DEFINE_string(
    "episodes", "", "With --mode=plan: tokens of an episode, e.g. prompt=5120,suffix=1536,sampled=512,messages=12."
)
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Join the other processes of a TPU slice, GKE or SLURM job (docs/many_hosts.md)."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "host:port of process 0, for processes that are started by hand; with the next two flags."
)
_PROCESS_COUNT = flags.DEFINE_integer("process_count", 0, "How many processes there are (with --coordinator).")
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "Which one this is, from 0 on (with --coordinator).")
_CACHE = flags.DEFINE_string("compilation_cache", "~/.cache/seal_jax/xla", "Folder of compiled programs; '' = none.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; settings are flags: --config.rounds=20")
    if _MODE.value == "plan":
        return plan()
    if _TOPOLOGY.value is not None or _EPISODES.value:
        print("error: --topology and --episodes belong to --mode=plan", file=sys.stderr)
        sys.exit(2)
    if not str(_WORKDIR.value or "").strip():
        what = "missing" if _WORKDIR.value is None else "empty"
        print(f"error: --workdir is {what}; name a folder, e.g. --workdir=runs/quickstart", file=sys.stderr)
        sys.exit(2)
    joining = _DISTRIBUTED.value or _COORDINATOR.value or _PROCESS_COUNT.value or _PROCESS_ID.value >= 0
    done = companion(str(_WORKDIR.value)) if joining else lambda: None  # it forks, so before jax is there
    # Imported late, so that --help and a misspelt flag answer at once.
    import jax

    from seal_jax import processes
    from seal_jax.telemetry.logs import quiet_libraries

    quiet_libraries()
    # Compiled programs are kept between runs: the second run of a recipe starts at once.
    jax.config.update("jax_compilation_cache_dir", os.path.expanduser(_CACHE.value) if _CACHE.value else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

    if not joining:
        carry_out()
        return
    try:
        processes.join(_COORDINATOR.value, _PROCESS_COUNT.value, _PROCESS_ID.value)
    except BaseException as error:
        done()
        if flags.FLAGS.showtraceback or not isinstance(error, ValueError):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # without jax's own leave-taking from processes that it has not met
    with processes.together(str(_WORKDIR.value), done):
        carry_out()


def carry_out() -> None:
    """The run of the flags, in this process."""
    from seal_jax.config import validate
    from seal_jax.loop import evaluate_only, export, train
    from seal_jax.processes import Apart, agree, lost_peer
    from seal_jax.run import Run

    try:
        validate(_CONFIG.value)
        if _MODE.value == "export" and newest_checkpoint(str(_WORKDIR.value)) is None:
            raise ValueError(f"there is no checkpoint in --workdir={_WORKDIR.value} to export; train one first")
        agree("--mode", _MODE.value)
        job = Run(_CONFIG.value, Path(str(_WORKDIR.value)))
    except (ValueError, OSError, ImportError, Apart) as error:
        # One line for a setting that cannot work. What fails later, in the middle of training, keeps its traceback.
        if flags.FLAGS.showtraceback or lost_peer(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    saved = None
    try:
        with job:
            try:
                if _MODE.value == "eval" and job.checkpoints.latest() is None:
                    job.progress.message(f"no checkpoint in {job.workdir}: evaluating the starting policy")
                {"train": train, "eval": evaluate_only, "export": export}[_MODE.value](job)
            except KeyboardInterrupt:
                saved = job.checkpoints.latest()
                raise
    except KeyboardInterrupt:
        if flags.FLAGS.showtraceback:
            raise
        now = f"after round {job.round} of {job.config.rounds}"
        now = now if _MODE.value == "train" else f"in --mode={_MODE.value}"
        kept = "no checkpoint yet" if saved is None else f"checkpoint of round {saved}"
        print(f"interrupted {now}; {kept} in {job.workdir}; the same command goes on from there", file=sys.stderr)
        sys.exit(130)


def plan() -> None:
    """--mode=plan: prints the plan; exit code 1 if the run does not fit."""
    from seal_jax.planner.topology import host_only, parse_topology, require_libtpu

    try:
        if _TOPOLOGY.value is None:
            raise ValueError("--mode=plan needs --topology, e.g. --topology=v5p:2x2x2")
        topology = parse_topology(_TOPOLOGY.value)
        require_libtpu()
        host_only()
        from seal_jax.config import validate
        from seal_jax.planner.plan import make_plan
        from seal_jax.planner.report import report
        from seal_jax.planner.work import Episodes

        validate(_CONFIG.value)
        told = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        made = make_plan(_CONFIG.value, topology, Episodes.parse(_EPISODES.value), told)
    except (ValueError, OSError) as error:
        if flags.FLAGS.showtraceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(report(made, _CONFIG.value))
    if not made.fits:
        sys.exit(1)


def run() -> None:
    """Entry point of the `seal-jax` command."""
    flags.DEFINE_bool("showtraceback", False, "Show the whole traceback of a configuration error.")
    flags.mark_flags_as_required(["config"])
    try:
        app.run(main, flags_parser=parse)
    except KeyboardInterrupt:
        if "--showtraceback" in sys.argv:
            raise
        print("interrupted before the run began; the same command starts it", file=sys.stderr)
        sys.exit(130)


def parse(argv: list[str]) -> list[str]:
    """absl's flag parser, with one line instead of a traceback for a recipe or a setting that is not there."""
    try:
        return flags.FLAGS(argv)
    except RecipeError as error:
        if "--showtraceback" in argv:
            raise
        what = str(error)
    except flags.UnrecognizedFlagError as error:
        what = " ".join(str(error).split())
        if _is_setting(error.flagname):
            what = f"unknown flag --{error.flagname}; did you mean --config.{error.flagname}?"
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError, OSError) as error:
        what = _misspelt(argv) or f"{' '.join(str(error).split())} (in {' '.join(argv[1:])})"
        what = what if isinstance(error, flags.Error) else f"{what}; seal_jax/config.py lists every setting"
    print(f"error: {what}", file=sys.stderr)
    sys.exit(2)


def _is_setting(name: str) -> bool:
    from seal_jax.config import default_config, lookup

    try:
        lookup(default_config(), name)
    except (AttributeError, KeyError, TypeError):
        return False
    return True


def _misspelt(argv: list[str]) -> str | None:
    """What is wrong with the names of the settings in a command that did not parse; None if all are settings."""
    from seal_jax.config import OPEN, default_config

    names = [a.lstrip("-").split("=")[0].removeprefix("config.") for a in argv[1:] if a.lstrip("-")[:7] == "config."]
    for name in names:
        mapping = next((m for m in OPEN if name.startswith(f"{m}.")), None)
        if mapping is not None:
            return f"config.{name} is no flag: entries of config.{mapping} that the recipe has not are set in a recipe"
        if not _is_setting(name):
            close = difflib.get_close_matches(name, _names(default_config()), n=1)
            return f"unknown setting config.{name}" + (f"; did you mean config.{close[0]}?" if close else "")
    return None


def _names(config: ConfigDict, prefix: str = "") -> list[str]:
    nested = [_names(v, f"{prefix}{k}.") for k, v in config.items() if isinstance(v, ConfigDict)]
    return [f"{prefix}{k}" for k in config] + [name for names in nested for name in names]


if __name__ == "__main__":
    run()
