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
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, only experiments/ would be there
    sys.path.insert(0, str(ROOT))

from experiments.study import figures, records, starts, tables  # noqa: E402
from experiments.study.jobs import SIZES, START_NAMES, Job, Study  # noqa: E402
from experiments.study.workers import JobFailed, carry_out  # noqa: E402
from seal_jax.files import write_whole  # noqa: E402
from seal_jax.main import RecipeError, recipe_module  # noqa: E402

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
            beside = options.records.with_name("starts.json")
            made = json.loads(beside.read_text()) if beside.exists() else []
            return publish(records.load(options.records), made, options.out)
        study = _study(options)
        if options.check:
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
    runs = [records.read_run(job.workdir, **job.which) for job in jobs.values() if job.which and job.done]
    made = []
    for name, probe in ((n.removesuffix(".probe"), j) for n, j in jobs.items() if n.endswith(".probe") and j.done):
        start, seed, size = name.split("-")
        made.append(starts.read_start(jobs[name].workdir, probe.workdir, start=start, seed=int(seed), size=size))
    return runs, made


def publish(runs: list[records.Record], made: list[starts.Start], out: Path) -> int:
    """Writes records, tables and figures to `out`."""
    if not runs:
        raise ValueError(f"{out}: no run is finished yet, so there is nothing to report")
    out.mkdir(parents=True, exist_ok=True)
    records.save(out / "records.jsonl.gz", runs)
    text = ""
    if made:
        write_whole(out / "starts.json", json.dumps(made, indent=1) + "\n")
        text = "### The starting policies\n\n" + starts.table(made) + "\n"
    write_whole(out / "report.md", text + tables.report(runs))
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
    workdir = study.out / "check" / name
    shutil.rmtree(workdir, ignore_errors=True)
    again = job.elsewhere(workdir, needs=())
    job.begin()
    carry_out([again], study.out / "check")
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
    module = recipe_module(str(options.config))
    arms = tuple(getattr(module, "ARMS", ()))
    if "vanilla" not in arms:
        raise ValueError(f"--config={options.config}: it needs a mapping ARMS with an arm 'vanilla', as toolbox.py has")
    chosen = ("vanilla", *options.arms.split(",")) if options.arms else arms
    for name, given, known in (("arms", chosen, arms), ("starts", options.starts.split(","), START_NAMES)):
        unknown = [x for x in given if x not in known]
        if unknown:
            raise ValueError(f"--{name}: {unknown[0]!r} is not known; choose from {', '.join(known)}")
    for name, given, least in (("seeds", options.seeds, 1), ("cores", options.cores, 0)):
        if given < least:
            raise ValueError(f"--{name}={given} must be at least {least}")
    out = options.out if options.out is not None else Path("runs/smoke" if options.smoke else "runs/study")
    study = Study(
        recipe=options.config.resolve(),
        out=out.resolve(),
        config_of=module.get_config,
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/toolbox.py"), help="the recipe with the arms")
    parser.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ... (default 3)")
    parser.add_argument("--arms", default="", help="only these (and vanilla), separated by commas")
    parser.add_argument("--starts", default=",".join(START_NAMES), help="only these, separated by commas")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the policy")
    parser.add_argument("--out", type=Path, help="folder of the study (default runs/study)")
    parser.add_argument("--cores", type=int, default=0, help="runs at a time (default: one for each core)")
    parser.add_argument("--report", action="store_true", help="run nothing; report what is finished")
    parser.add_argument("--records", type=Path, help="run nothing; report what this file holds, to --out")
    parser.add_argument("--check", default="", metavar="RUN", help="run one row again and compare")
    parser.add_argument("--tune", action="store_true", help="compare learning rates for vanilla")
    parser.add_argument("--smoke", action="store_true", help="a little of everything, in two minutes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
