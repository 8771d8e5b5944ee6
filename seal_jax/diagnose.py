"""Verifies and diagnoses anyone's multi-turn result files; trains nothing, and needs no accelerator and no jax.

    python -m seal_jax.diagnose RESULTS [RESULTS ...] [--decoder=qwen_fc] [--out=DIR]

RESULTS are files of JSON lines, or folders of them (what `bfcl generate` wrote):

    {"id": "multi_turn_base_0", "result": [["text of step 0 of turn 0", ...], ...]}    raw text; --decoder reads it
    {"id": "multi_turn_base_0", "decoded": [[["cd(folder='a')", "ls()"], ...], ...]}   turns of steps of call strings

The denominator is the number of tasks asked for: those of --ids or --split, else all tasks of the categories that occur
in the files. A task without a line counts as a failure, and so does one whose line is broken; both are listed.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seal_jax.chat.official import DECODERS
from seal_jax.envs.base import Suite
from seal_jax.evaluation.results import EVIDENCE_FILE, Results, read_results, result_files
from seal_jax.evaluation.scores import Scored, evidence_record, score, suite_for, summarise
from seal_jax.types import PROTOCOLS, SUCCESS_LABELS, Task

_SUMMARY_FILE = "summary.json"


# --- the screen ------------------------------------------------------------------------------------------------------
def print_report(summary: Mapping[str, Any], scored: Sequence[Scored]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    columns = {**summary["categories"], "all": summary["per_task"]}
    table = Table(title=summary["title"], title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name.replace("_", "\n"), justify="right")

    def row(head: str, key: str, show: Callable[[Any], str] = str) -> None:
        table.add_row(head, *(show(c[key]) for c in columns.values()))

    row("tasks asked for", "tasks")
    row("  without a line", "missing")
    row("  with a broken line", "broken")
    row("accuracy %", "accuracy", _percent)
    row("  ± standard error", "stderr", _percent)
    row("strict abstention %", "strict_abstention", _percent)
    row("  abstain turns", "abstain_turns")
    table.add_section()
    row("turns reached", "turns")
    row("  not reached", "turns_not_reached")
    for label in columns["all"]["labels"]:
        table.add_row(f"  {label} %", *(_percent(c["labels"][label]) for c in columns.values()))
    console.print(table)
    overall, each = summary["overall"], summary["per_task"]
    kind = "category" if overall["categories"] == 1 else "categories"
    console.print(f"overall (unweighted mean of {overall['categories']} {kind}): {_plus_minus(overall)} %")
    console.print(f"per task: {_plus_minus(each)} % ({each['solved']} of {each['tasks']}); ± binomial standard error")
    why = ", ".join(f"{reason} {n}" for reason, n in each["reasons"].items())
    console.print(f"verdicts: {why}", markup=False, soft_wrap=True)
    if summary["lines_not_asked_for"]:
        console.print(f"{summary['lines_not_asked_for']} lines are of tasks not asked for: not counted")
    for name, c in summary["categories"].items():
        if c["missing"]:
            ids = [row.task.id for row in scored if row.reason == "missing" and row.task.category == name]
            what = f"{name}: {c['missing']} without a line, counted as failures: {_numbers(ids)}"
            console.print(what, markup=False, soft_wrap=True)
    folders = sorted({str(Path(row.result.file).parent) for row in scored if row.result is not None})
    if len(folders) > 1:
        what = f"the lines come from {len(folders)} folders ({', '.join(folders[:3])}, ...): are they of one model?"
        console.print(what, markup=False, soft_wrap=True)
    broken = summary["broken_lines"]
    if broken:
        console.print(f"{len(broken)} of {summary['lines']} lines cannot be used:")
    for item in broken[:20]:
        console.print(f"  {item['file']}:{item['line']}: {_printable(item['reason'])}", markup=False, soft_wrap=True)
    if len(broken) > 20:
        console.print(f"  ... and {len(broken) - 20} more (--out=DIR writes them all)")


def print_failures(scored: Sequence[Scored], limit: int = 10) -> None:
    """The first turn at fault of the first failed episodes, and why."""
    failed = [row for row in scored if row.verdict is not None and not row.reward]
    for row in failed[:limit]:
        assert row.diagnosis is not None
        at = next((i for i, x in enumerate(row.diagnosis.labels) if x.label not in SUCCESS_LABELS), None)
        fault = "no turn at fault" if at is None else f"turn {at}: {row.diagnosis.labels[at].label}"
        why = "" if at is None else row.diagnosis.labels[at].evidence
        print(_printable(f"  {row.task.id}: {row.reason}; {fault}" + (f": {why}" if why else "")))
    if len(failed) > limit:
        print(f"  ... and {len(failed) - limit} more")


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}"


def _plus_minus(c: Mapping[str, Any]) -> str:
    return "-" if c["accuracy"] is None else f"{100 * c['accuracy']:.1f} ± {100 * c['stderr']:.1f}"


def _printable(text: str) -> str:
    return "".join(x if x.isprintable() else "?" for x in text)


def _numbers(ids: Sequence[str], limit: int = 40) -> str:
    """`3, 5-9` for ids that end in numbers, else the ids; shortened."""
    tails = [i.rsplit("_", 1)[-1] for i in ids]
    if not all(tail.isdecimal() for tail in tails):
        return ", ".join(ids[:limit]) + (" ..." if len(ids) > limit else "")
    ranges: list[list[int]] = []
    for n in sorted(map(int, tails)):
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    return ", ".join(shown[:limit]) + (" ..." if len(shown) > limit else "")


# --- the command -----------------------------------------------------------------------------------------------------
def all_tasks(suite: Suite) -> dict[str, Task]:
    """Every task of a suite by id."""
    splits = ("all",) if suite.name == "bfcl" else ("train", "val", "test", "ood")
    return {task.id: task for split in splits for task in suite.tasks(split)}


def tasks_asked_for(
    suite: Suite, tasks: Mapping[str, Task], read: Results, *, ids: str = "", split: str = "", categories: str = ""
) -> list[Task]:
    """The denominator. ValueError for an unknown id, split or category, or if nothing is left."""
    if ids and split:
        raise ValueError(f"--ids={ids} and --split={split} both say which tasks are asked for; give one of them")
    known = {task.category for task in tasks.values()}
    wanted = [c.strip() for c in categories.split(",") if c.strip()]
    unknown = [c for c in wanted if c not in known]
    if unknown:
        raise ValueError(f"--categories={categories}: {unknown[0]!r} is not known; choose from {sorted(known)}")
    if ids:
        asked = [tasks[i] for i in read_ids(ids, tasks)]
    elif split:
        asked = list(suite.tasks(split))
    else:
        occurring = {tasks[i].category for i in (*read.results, *read.failed())}
        asked = [task for task in tasks.values() if task.category in (wanted or occurring)]
    asked = [task for task in asked if not wanted or task.category in wanted]
    if not asked:
        why = "no line is of a known task" if not (ids or split) else "no task is left"
        first = f"; line {read.broken[0].line}: {_printable(read.broken[0].reason)}" if read.broken else ""
        raise ValueError(f"{why}{first}; check the files, --suite={suite.name}, --ids, --split and --categories")
    return asked


def read_ids(path: str, tasks: Mapping[str, Task]) -> list[str]:
    """The task ids of a file: a JSON list, or one id a line. ValueError naming the first that is unknown or double."""
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"--ids={path}: {error}; name a file of task ids, one a line or a JSON list") from None
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else text.split()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--ids={path}: not JSON ({error}); write one task id a line or a JSON list") from None
    if not found:
        raise ValueError(f"--ids={path}: the file is empty; write one task id a line or a JSON list")
    seen: set[str] = set()
    for task_id in found:
        if not isinstance(task_id, str) or task_id not in tasks:
            raise ValueError(f"--ids={path}: {task_id!r:.80} is no known task; write ids such as {next(iter(tasks))}")
        if task_id in seen:
            raise ValueError(f"--ids={path}: {task_id!r} stands twice; name each task once")
        seen.add(task_id)
    return list(found)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Reads, scores, writes and prints; returns the summary."""
    suites = functools.cache(functools.partial(suite_for, args.suite))
    suite = suites(args.protocol or "official")
    folder = _out_folder(args.out, args.results) if args.out else None
    tasks = all_tasks(suite)
    read = read_results(args.results, tasks, decoder=args.decoder, protocol=args.protocol)
    asked = tasks_asked_for(suite, tasks, read, ids=args.ids, split=args.split, categories=args.categories)
    scored = score(suites, asked, read)
    protocols = sorted({row.result.protocol for row in scored if row.result is not None})
    title = f"{args.suite}, protocol {' and '.join(protocols) or '-'}, decoder {args.decoder}"
    summary = summarise(
        scored, read, title=title, suite=args.suite, protocols=protocols, decoder=args.decoder, files=args.results
    )
    if folder is not None:
        # Half a surrogate pair (a cut emoji) is no UTF-8; as a backslash escape it is still the same JSON.
        with (folder / EVIDENCE_FILE).open("w", encoding="utf-8", errors="backslashreplace") as file:
            for row in scored:
                file.write(json.dumps(evidence_record(row), ensure_ascii=False) + "\n")
        (folder / _SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print_report(summary, scored)
    print("failed episodes, each with its first turn at fault:")
    print_failures(scored)
    if folder is not None:
        print(f"evidence for every turn: {folder / EVIDENCE_FILE}; all numbers: {folder / _SUMMARY_FILE}")
    else:
        print("--out=DIR writes the evidence for every turn, and all numbers")
    return summary


def _out_folder(out: str, results: Sequence[str]) -> Path:
    """The folder, made; ValueError if it cannot be, or if a file to be read would be overwritten."""
    folder = Path(out)
    read = {path.resolve() for path in result_files(results)}
    for name in (EVIDENCE_FILE, _SUMMARY_FILE):
        if (folder / name).resolve() in read:
            raise ValueError(f"--out={out}: {name} in it is one of the files to be read; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out={out}: {error.strerror}; name a folder that can be written to") from None
    return folder


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m seal_jax.diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("results", nargs="+", metavar="RESULTS", help="result files, or folders of them")
    p.add_argument("--suite", default="bfcl", choices=["bfcl", "toolbox"], help="whose tasks (default: bfcl)")
    p.add_argument(
        "--decoder",
        default="qwen_fc",
        choices=sorted(DECODERS),
        help="how raw text is read: as the package reads Qwen's or Llama 3.1's function calling, ToolACE-2, or any "
        "prompted model (default: qwen_fc)",
    )
    p.add_argument(
        "--protocol",
        default="",
        choices=PROTOCOLS,
        help="official: every call that the package's decoder finds is executed. seal: messages are read strictly, and "
        "one that names a tool not offered at that turn is rejected. Default: what a line says, else official",
    )
    p.add_argument("--ids", default="", metavar="FILE", help="the tasks asked for: ids, one a line or a JSON list")
    p.add_argument("--split", default="", help="the tasks asked for: a split, e.g. test (300), eval (400) or all (800)")
    p.add_argument("--categories", default="", metavar="A,B", help="only these, e.g. base,miss_func")
    p.add_argument("--out", default="", metavar="DIR", help="write diagnosis.jsonl (each turn) and summary.json here")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        run(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
