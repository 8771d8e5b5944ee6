"""The study: does closing the loop help, and what makes it help?

    python experiments/ablation.py --config=configs/toolbox.py --seeds=3 --fresh=5 --out=runs/study

runs every arm of the recipe from two starting policies for each seed, each run on one core, as many at a time as there
are cores; stopped and started again, it goes on where it was. --fresh=5 then runs the arm that validation chose on the
first three seeds, and vanilla, on five more, which had no part in the choice (--fresh_arms: beside them other arms,
which confirm nothing; with --seeds=0 only these and vanilla). Then, or at any time with --report, it writes

    OUT/report.md             the tables
    OUT/figures/              the figures, PNG and SVG
    OUT/records.jsonl.gz      what they are made from; OUT/starts.json: the starting policies

--records=FILE makes tables and figures from such a file alone and runs nothing. --known=FOLDER takes the runs whose
records another study left there and runs only the others, so that a study can move to another machine.
--check=never-0-small/half runs one row once more from the same start, in a folder of its own, and says whether its
record is the same (to six digits, seconds aside); with --known the row is the one there, and its start is made anew.
--tune compares learning rates for vanilla on validation, with a seed that the study does not use: the best is the one
whose best validated round, averaged over the starts, is highest. --smoke does a little of everything, in two minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # run as a file, only experiments/ would be there
    sys.path.insert(0, str(ROOT))

from experiments.study import figures, records, starts, statistics, tables  # noqa: E402
from experiments.study.jobs import ALL_STARTS, FRESH, SIZES, START_NAMES, Job, Study, needed  # noqa: E402
from experiments.study.known import Known  # noqa: E402
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
        if options.known is not None and (options.records or options.tune):
            raise ValueError("--known is for a study, its report and --check; leave it out beside --records and --tune")
        if options.records:
            if ignored := [f"--{name}" for name in ("arms", "fresh", "fresh_arms") if getattr(options, name)]:
                raise ValueError(f"--records={options.records} reports all that is there; leave out {ignored[0]}")
            if options.out is None:
                raise ValueError(f"--records={options.records} needs --out, the folder for its tables and figures")
            made = starts.load(options.records.with_name("starts.json"))
            return publish(records.load(options.records), made, options.out)
        study = _study(options)
        if options.tune:
            return tune(study, options.cores)
        if options.known is not None and options.known.resolve() == study.out:
            raise ValueError(
                f"--known={options.known}: its report would be replaced by this study's; choose another --out"
            )
        known = Known.read(options.known) if options.known else Known()

        def go_on(jobs: list[Job]) -> list[Job]:
            left = known.left(jobs)
            if left and not options.report and options.check is None:
                carry_out(left, study.out, options.cores)
            return jobs

        jobs = go_on(study.jobs())
        if options.fresh:
            jobs = go_on(jobs + confirming(study, collect(jobs, known)[0], options.fresh, _named(options.fresh_arms)))
        if options.check is not None:
            return check(jobs, known, study.out, options.check, options.cores)
        others = {p.parent for p in study.out.glob("runs/*/*/summary.json")} - {job.workdir for job in jobs}
        if others:
            print(f"left out: {len(others)} finished runs in {study.out / 'runs'} that this command does not name")
        if unnamed := known.runs.keys() - {job.name for job in jobs}:
            print(f"left out: {len(unnamed)} runs of {known.source} that this command does not name")
        return publish(*collect(jobs, known), study.out)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, OSError, JobFailed, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def confirming(study: Study, runs: list[records.Record], seeds: int, others: Sequence[str] = ()) -> list[Job]:
    """The arm that validation chose in these runs, and vanilla, on so many fresh seeds, and then `others`; without the
    chosen one until all arms are finished."""
    best = statistics.chosen(statistics.places(runs), study.size)
    if best is None:
        if study.seeds:
            print(f"--fresh={seeds}: no arm is chosen yet; it takes all closed-loop arms, from both starts")
        if not others:
            return []
    fresh = tuple(range(FRESH, FRESH + seeds))
    confirmed = ("vanilla", best.arm) if best else ("vanilla",)
    jobs = {
        job.name: job  # what confirms comes first
        for arms in (confirmed, (*confirmed, *others))
        for job in replace(study, arms=arms, starts=START_NAMES, seeds=fresh).jobs()
    }
    return [*jobs.values()]


def collect(jobs: Sequence[Job], known: Known) -> tuple[list[records.Record], list[starts.Start]]:
    """What is finished so far, here or elsewhere."""
    here = {job.name: job for job in jobs if job.done}
    for job in here.values():
        job.check_settings()
    runs = [run for job in jobs if job.kind == "arm" and (run := _record(job, known))]
    made = []
    for probe in (job for job in jobs if job.kind == "probe"):
        (name,) = probe.needs
        if probe.done and name in here:
            which = {**probe.which, "settings": here[name].settings, "probe_settings": probe.settings}
            made.append(starts.read_start(here[name].workdir, probe.workdir, **which))
        elif name in known.starts:
            made.append(known.starts[name])
    return runs, made


def _record(job: Job, known: Known) -> records.Record | None:
    """Of an arm's run, if it is finished."""
    if job.done:
        return records.read_run(job.workdir, **job.which, settings=job.settings)
    return known.runs.get(job.name)


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
    else:  # what an earlier report left is of other runs
        (out / "starts.json").unlink(missing_ok=True)
    write_whole(out / "report.md", text)
    drawn = figures.draw(runs, out / "figures")
    print(f"{len(runs)} runs: {out / 'report.md'} and {len(drawn)} figures in {out / 'figures'}")
    return 0


def check(jobs: Sequence[Job], known: Known, out: Path, name: str, cores: int = 0) -> int:
    """Runs one finished row again and compares the two records."""
    rows = {job.name: run for job in jobs if job.kind == "arm" and (run := _record(job, known))}
    if name not in rows:
        raise ValueError(f"--check={name}: no such finished run in {out}; finished: {sorted(rows)}")
    *making, job = needed(jobs, {name})
    job.check_settings()
    carry_out(making, out, cores)
    folder = out / "check"
    again = job.elsewhere(folder / name, needs=())
    with closing(hold_workdir(folder, "--out")):  # not while another check runs there
        shutil.rmtree(again.workdir, ignore_errors=True)
    carry_out([again], folder)
    differ = records.differences(rows[name], records.read_run(again.workdir, **job.which, settings=job.settings))
    print(f"{name}: {'differs in ' + ', '.join(differ) if differ else 'the same record, but for its seconds'}")
    return 1 if differ else 0


def tune(study: Study, cores: int) -> int:
    """Vanilla at several learning rates, by validation; nothing else of such a run is looked at."""
    study = replace(study, seeds=(_TUNING_SEED,), arms=("vanilla",))
    making = [job for job in study.jobs() if job.kind == "start"]
    tried: list[tuple[str, Job]] = []
    for rate in _RATES:
        for job in (j for j in study.jobs() if j.kind == "arm"):
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
    chosen = arms if options.arms is None else ("vanilla", *_named(options.arms))
    fresh = _named(options.fresh_arms)
    if fresh and not options.fresh:
        raise ValueError(f"--fresh_arms={options.fresh_arms} needs fresh seeds to run on; add --fresh=5")
    asked = (("arms", chosen, arms), ("fresh_arms", fresh, arms), ("starts", options.starts.split(","), ALL_STARTS))
    for name, given, known in asked:
        unknown = [x for x in given if x not in known]
        if unknown:
            raise ValueError(f"--{name}: {unknown[0]!r} is not known; choose from {', '.join(known)}")
    most = _TUNING_SEED - FRESH
    for name, given, low, high in (
        ("seeds", options.seeds, 0 if fresh else 1, FRESH),
        ("fresh", options.fresh, 0, most),
    ):
        if not low <= given <= high:
            raise ValueError(f"--{name}={given} must be from {low} to {high}")
    if options.cores < 0:
        raise ValueError(f"--cores={options.cores} must be at least 0")
    out = options.out if options.out is not None else Path("runs/smoke" if options.smoke else "runs/study")
    recipe = options.config.resolve()
    if options.rounds is not None and options.rounds < 1:
        raise ValueError(f"--rounds={options.rounds} must be at least 1")
    study = Study(
        recipe=recipe,
        out=out.resolve(),
        config_of=lambda setting: load_recipe(f"{recipe}:{setting}").unlock(),
        arms=tuple(a for a in arms if a in chosen),
        starts=tuple(s for s in ALL_STARTS if s in options.starts.split(",")),
        seeds=tuple(range(options.seeds)),
        size=options.size,
        arm_flags=() if options.rounds is None else (f"--config.rounds={options.rounds}",),
    )
    if not options.smoke:
        return study
    return replace(
        study,
        arms=tuple(a for a in study.arms if options.arms is not None or a in ("vanilla", "half_strip")),
        starts=study.starts[:1],
        seeds=(0,),
        flags=tuple(f"--config.{k}={v}" for k, v in _SMOKE.items()),
        arm_flags=tuple(f"--config.{k}={v}" for k, v in _SMOKE_ROUNDS.items()) + study.arm_flags,
    )


def _named(names: str | None) -> tuple[str, ...]:
    return () if names is None else tuple(names.split(","))


def _arms(recipe: Path) -> tuple[str, ...]:
    load_recipe(f"{recipe}:vanilla")  # says in one line what is wrong with a recipe
    arms = getattr(recipe_module(str(recipe)), "ARMS", None)
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
    parser.add_argument("--seeds", type=int, default=2, help="how many: 0, 1, ... (default 2)")
    parser.add_argument(
        "--fresh", type=int, default=0, help="further seeds, for the chosen arm and vanilla (default 0)"
    )
    parser.add_argument("--fresh_arms", help="arms to run on the fresh seeds besides, separated by commas")
    parser.add_argument("--arms", help="only these (and vanilla), separated by commas")
    parser.add_argument(
        "--starts", default=",".join(START_NAMES), help=f"of {', '.join(ALL_STARTS)} (default %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="of every arm, instead of the recipe's (anneal_rounds stay); needs an --out of its own",
    )
    parser.add_argument("--size", choices=SIZES, default="small", help="of the policy")
    parser.add_argument("--out", type=_path, help="folder of the study (default runs/study)")
    parser.add_argument("--cores", type=int, default=0, help="runs at a time (default: one for each core)")
    parser.add_argument("--known", type=_path, help="a folder with another study's report: its runs are not made again")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--report", action="store_true", help="run nothing; report what is finished")
    one.add_argument("--records", type=_path, help="run nothing; report what this file holds, to --out")
    one.add_argument("--check", metavar="RUN", help="run one row again and compare")
    one.add_argument("--tune", action="store_true", help="compare learning rates for vanilla")
    parser.add_argument("--smoke", action="store_true", help="a little of everything, in two minutes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
