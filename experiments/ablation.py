"""The study: does closing the loop help, and what makes it help?

    python experiments/ablation.py --config=configs/toolbox.py --seeds=5 --out=runs/study

runs every arm of the recipe from two starting policies for each seed, each run on one core, as many at a time as there
are cores; stopped and started again, it goes on where it was. Then, or at any time with --report, it writes

    OUT/report.md             the tables
    OUT/figures/              the figures, PNG and SVG
    OUT/records.jsonl.gz      what they are made from; OUT/starts.json: the starting policies

--records=FILE makes tables and figures from such a file alone and runs nothing. --check=never-0-small/half runs one row
once more from the same start, in a folder of its own, and says whether its record is the same (to six digits, seconds
aside). --tune compares learning rates for vanilla on validation, with a seed that the study does not use: the best is
the one whose best validated round, averaged over the starts, is highest. --smoke does a little of everything, in two
minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, only experiments/ would be there
    sys.path.insert(0, str(ROOT))

from experiments.study import figures, records, starts, tables  # noqa: E402
from experiments.study.jobs import SIZES, START_NAMES, Job, Study  # noqa: E402
from experiments.study.workers import JobFailed, carry_out  # noqa: E402
from seal_jax.checkpoints import hold_workdir  # noqa: E402
from seal_jax.files import write_whole  # noqa: E402
from seal_jax.main import RecipeError, load_recipe, recipe_module  # noqa: E402

#: --tune: seed and learning rates.
_TUNING_SEED, _RATES = 1000, ("2e-4", "3e-4", "5e-4")
_SMOKE = {
    "warm_start.demos": "64",
    "warm_start.epochs": "1",
    "tasks_per_round": "4",
    "rollouts": "4",
    "learner.minibatches": "1",
    "eval.test": "8",
    "eval.ood": "8",
    "eval.val": "8",
    "eval.cued_tasks": "4",
}
_SMOKE_ROUNDS = {"rounds": "2", "eval.every": "1"}


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        if options.records:
            if options.out is None:
                raise ValueError(f"--records={options.records} needs --out, the folder for its tables and figures")
            made = starts.load(options.records.with_name("starts.json"))
            return publish(records.load(options.records), made, options.out)
        study = _study(options)
        if options.check is not None:
            return check(study, options.check)
        if options.tune:
            return tune(study, options.cores)
        if not options.report:
            carry_out(study.jobs(), study.out, options.cores)
        return publish(*collect(study), study.out)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, OSError, JobFailed, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def collect(study: Study) -> tuple[list[records.Record], list[starts.Start]]:
    """What is finished so far."""
    jobs = {job.name: job for job in study.jobs()}
    finished = [job for job in jobs.values() if job.done]
    for job in finished:
        job.check_settings()
    runs = [records.read_run(job.workdir, **job.which) for job in finished if job.which]
    made = []
    for name, probe in ((j.name.removesuffix(".probe"), j) for j in finished if j.name.endswith(".probe")):
        start, seed, size = name.split("-")
        made.append(starts.read_start(jobs[name].workdir, probe.workdir, start=start, seed=int(seed), size=size))
    others = {p.parent for p in (study.out / "runs").glob("*/*/summary.json")} - {job.workdir for job in finished}
    if others:
        print(f"left out: {len(others)} finished runs of other seeds, starts, arms or sizes in {study.out / 'runs'}")
    return runs, made


def publish(runs: list[records.Record], made: list[starts.Start], out: Path) -> int:
    """Writes records, tables and figures to `out`."""
    if not runs:
        raise ValueError(f"{out}: no run is finished yet, so there is nothing to report")
    text = "### The starting policies\n\n" + starts.table(made) + "\n" if made else ""
    text += tables.report(runs)  # before anything is written: it says what is wrong with the runs
    out.mkdir(parents=True, exist_ok=True)
    records.save(out / "records.jsonl.gz", runs)
    if made:
        write_whole(out / "starts.json", json.dumps(made, indent=1) + "\n")
    write_whole(out / "report.md", text)
    drawn = figures.draw(runs, out / "figures")
    print(f"{len(runs)} runs: {out / 'report.md'} and {len(drawn)} figures in {out / 'figures'}")
    return 0


def check(study: Study, name: str) -> int:
    """Runs one finished row again and compares the two records."""
    jobs = {job.name: job for job in study.jobs() if job.which}
    if name not in jobs or not jobs[name].done:
        finished = sorted(n for n, job in jobs.items() if job.done)
        raise ValueError(f"--check={name}: no such finished run in {study.out}; finished: {finished}")
    job = jobs[name]
    job.check_settings()
    folder = study.out / "check"
    again = job.elsewhere(folder / name, needs=())
    with closing(hold_workdir(folder)):  # not while another check runs there
        shutil.rmtree(again.workdir, ignore_errors=True)
    carry_out([again], folder)
    first, second = (records.read_run(j.workdir, **j.which) for j in (job, again))
    differ = records.differences(first, second)
    print(f"{name}: {'differs in ' + ', '.join(differ) if differ else 'the same record, but for its seconds'}")
    return 1 if differ else 0


def tune(study: Study, cores: int) -> int:
    """Vanilla at several learning rates, by validation; nothing else of such a run is looked at."""
    study = replace(study, seeds=(_TUNING_SEED,), arms=("vanilla",))
    making = [job for job in study.jobs() if not job.which and not job.name.endswith(".probe")]
    tried: list[tuple[str, Job]] = []
    for rate in _RATES:
        for job in (j for j in study.jobs() if j.which):
            job = job.elsewhere(
                job.workdir.with_name(f"learning_rate={rate}"),
                name=f"{job.name} {rate}",
                settings=f"{job.settings} {rate}",
            )
            flags = (f"--config.optimizer.learning_rate={rate}", "--config.eval.test=0", "--config.eval.ood=0")
            tried.append((rate, replace(job, argv=job.argv + flags)))
    carry_out([*making, *(job for _, job in tried)], study.out, cores)
    print("| start | learning rate | validation by round |\n| --- | --- | --- |")
    for rate, job in tried:
        curve = records.read_run(job.workdir, **job.which)["validation"]
        print(f"| {job.which['start']} | {rate} | " + ", ".join(f"{r}: {v:.1%}" for r, v in curve) + " |")
    return 0


def _study(options: argparse.Namespace) -> Study:
    arms = _arms(options.config)
    chosen = arms if options.arms is None else ("vanilla", *options.arms.split(","))
    for name, given, known in (("arms", chosen, arms), ("starts", options.starts.split(","), START_NAMES)):
        unknown = [x for x in given if x not in known]
        if unknown:
            raise ValueError(f"--{name}: {unknown[0]!r} is not known; choose from {', '.join(known)}")
    for name, given, least in (("seeds", options.seeds, 1), ("cores", options.cores, 0)):
        if given < least:
            raise ValueError(f"--{name}={given} must be at least {least}")
    if options.seeds > _TUNING_SEED:
        raise ValueError(f"--seeds={options.seeds} must be at most {_TUNING_SEED}, since --tune has the next")
    out = options.out if options.out is not None else Path("runs/smoke" if options.smoke else "runs/study")
    study = Study(
        recipe=(recipe := options.config.resolve()),
        out=out.resolve(),
        config_of=lambda setting: load_recipe(f"{recipe}:{setting}").unlock(),
        arms=tuple(a for a in arms if a in chosen),
        starts=tuple(s for s in START_NAMES if s in options.starts.split(",")),
        seeds=tuple(range(options.seeds)),
        size=options.size,
    )
    if not options.smoke:
        return study
    return replace(
        study,
        arms=tuple(a for a in study.arms if a in ("vanilla", "half_strip")),
        starts=study.starts[:1],
        seeds=(0,),
        flags=tuple(f"--config.{k}={v}" for k, v in _SMOKE.items()),
        arm_flags=tuple(f"--config.{k}={v}" for k, v in _SMOKE_ROUNDS.items()),
    )


def _arms(recipe: Path) -> tuple[str, ...]:
    try:
        arms = getattr(recipe_module(str(recipe)), "ARMS", None)
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"{recipe}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(arms, Mapping) or "vanilla" not in arms:
        raise ValueError(f"--config={recipe}: it needs a mapping ARMS with an arm 'vanilla', as toolbox.py has")
    return tuple(arms)


def _path(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; name a path")
    return Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=_path, default=Path("configs/toolbox.py"), help="the recipe with the arms")
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ... (default 3)")
    parser.add_argument("--arms", help="only these (and vanilla), separated by commas")
    parser.add_argument("--starts", default=",".join(START_NAMES), help="only these, separated by commas")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the policy")
    parser.add_argument("--out", type=_path, help="folder of the study (default runs/study)")
    parser.add_argument("--cores", type=int, default=0, help="runs at a time (default: one for each core)")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--report", action="store_true", help="run nothing; report what is finished")
    one.add_argument("--records", type=_path, help="run nothing; report what this file holds, to --out")
    one.add_argument("--check", metavar="RUN", help="run one row again and compare")
    one.add_argument("--tune", action="store_true", help="compare learning rates for vanilla")
    parser.add_argument("--smoke", action="store_true", help="a little of everything, in two minutes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
