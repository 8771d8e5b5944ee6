"""How long judging BFCL takes, beside the package's own checker, and what a round of live episodes holds in memory.

    python -m experiments.benchmarks.verifier [--repeats=7] [--no-memory]

Time: the 800 reference programs, played as if a policy had written them. In one process, alternating task by task,
everything imported and loaded before: `checker` is the package's multi_turn_checker alone (a model name of its own for
each check, since it keeps its instances under that name; what it leaves behind is removed outside the timed part);
`ours` is `Verifier.verify` with all its evidence, then `diagnose`. Neither writes a file. CPU time, since both are one
thread and a machine's other work then hardly counts.

Memory: 256 episodes (8 tasks of each category, 8 rollouts each) with their worlds, tokens and failure watches, as a
collector holds them, each played up to its last message. Resident memory over what the process held before it opened
them, in a process of its own (Linux only).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seal_jax.diagnosis import diagnose
from seal_jax.envs.base import Suite, make_suite
from seal_jax.envs.bfcl.package import package_folder, read_json_lines
from seal_jax.envs.verifier import Verifier
from seal_jax.provenance import git_commit, host, versions
from seal_jax.types import CATEGORIES, SUCCESS_LABELS, Task

Job = Callable[[], None]  # judges one task; SystemExit if the verdict is not what it must be
EPISODES, ROLLOUTS = 256, 8
MEMORY_LIMIT_GB = 1.0


def checker_jobs() -> dict[str, tuple[Job, Job]]:
    """{task id: (the package's checker on its reference program, removal of the instances that it left behind)}."""
    os.environ.setdefault("BFCL_PROJECT_ROOT", tempfile.mkdtemp())  # parts of the package make folders there
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    names, kept = itertools.count(), set(vars(multi_turn_utils))

    def job(row: dict[str, Any], gold: list[list[str]], category: str) -> Job:
        turns = [[turn] if turn else [] for turn in gold]

        def check() -> None:
            if not multi_turn_checker(turns, gold, row, category, f"bench{next(names)}")["valid"]:
                raise SystemExit(f"{row['id']}: the checker refuses the reference program")

        return check

    def clear() -> None:
        for left in vars(multi_turn_utils).keys() - kept:
            delattr(multi_turn_utils, left)

    jobs, data = {}, package_folder() / "data"
    for category in CATEGORIES:
        file = f"BFCL_v4_multi_turn_{category}.json"
        answers = read_json_lines(data / "possible_answer" / file)
        for row, answer in zip(read_json_lines(data / file), answers, strict=True):
            jobs[row["id"]] = job(row, answer["ground_truth"], category), clear
    return jobs


def our_jobs(suite: Suite) -> dict[str, tuple[Job, Job]]:
    verifier = Verifier(suite)

    def job(task: Task) -> Job:
        turns = [[program] if program else [] for program in suite.reference(task)]

        def check() -> None:
            verdict = verifier.verify(task, turns)
            labels = diagnose(verdict).names
            if verdict.reward != 1.0 or not SUCCESS_LABELS.issuperset(labels):
                raise SystemExit(f"{task.id}: we refuse the reference program: {verdict.reason} {labels}")

        return check

    return {task.id: (job(task), lambda: None) for task in suite.tasks("all")}


def compare(repeats: int) -> dict[str, dict[str, float]]:
    """Seconds for all 800, for both sides and as their ratio; the sides alternate task by task."""
    suite = make_suite("bfcl")
    jobs = {"checker": checker_jobs(), "ours": our_jobs(suite)}
    cpu: dict[tuple[str, str], list[float]] = defaultdict(list)  # (side, task id) -> seconds
    wall: dict[tuple[str, str], list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        gc.collect()
        for task in suite.tasks("all"):
            for side in sorted(jobs, reverse=repeat % 2 == 0):
                check, clear = jobs[side][task.id]
                start = time.process_time(), time.perf_counter()
                check()
                spent = time.process_time() - start[0], time.perf_counter() - start[1]
                clear()
                if repeat:  # the first fills the caches of both
                    cpu[side, task.id].append(spent[0])
                    wall[side, task.id].append(spent[1])
    of_category = {c: [t.id for t in suite.tasks("all") if t.category == c] for c in CATEGORIES}
    found: dict[str, dict[str, float]] = {}
    for side in jobs:
        median = {c: sum(statistics.median(cpu[side, i]) for i in ids) for c, ids in of_category.items()}
        found[side] = {
            "median": sum(median.values()),
            "min": sum(min(cpu[side, t.id]) for t in suite.tasks("all")),
            "wall": sum(statistics.median(wall[side, t.id]) for t in suite.tasks("all")),
            **median,
        }
    found["ratio"] = {key: found["ours"][key] / found["checker"][key] for key in found["ours"]}
    return found


# --- memory ----------------------------------------------------------------------------------------------------------
def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def hold_episodes() -> dict[str, Any]:
    """Opens and plays the episodes of one round and keeps them all; {"episodes", "bytes"}."""
    from seal_jax.chat.formats import get_format
    from seal_jax.chat.tokenizer import ByteTokenizer
    from seal_jax.interface import BARE
    from seal_jax.rollout.collector import FailureWatch
    from seal_jax.rollout.episode import Episode, Limits, render_prompt

    suite, chat = make_suite("bfcl"), get_format("hermes")
    tokenizer = ByteTokenizer(chat.special_tokens)  # four times the ids of a real one: an upper bound
    wide = Limits(10**6, 10**6, 10**6, 10**7, 10**8, 10**6)
    share = EPISODES // ROLLOUTS // len(CATEGORIES)
    tasks: list[Task] = []
    for category in CATEGORIES:
        of_category = [t for t in suite.tasks("train") if t.category == category]
        tasks += of_category[:: len(of_category) // share][:share]
    warm = suite.open(tasks[0])  # imports the tool classes
    del warm
    gc.collect()
    before, live = resident_bytes(), []
    for task in tasks:
        prompt = render_prompt(task, chat, tokenizer, BARE)
        for rollout in range(ROLLOUTS):
            watch = FailureWatch(suite, task)
            episode = Episode(
                *(task, suite.open(task), chat, tokenizer, BARE, wide), prompt_ids=prompt, rollout=rollout,
                turn_failed=watch,
            )  # fmt: skip
            play_to_last_message(episode, suite)
            live.append(episode)
    gc.collect()
    held = resident_bytes() - before
    return {"episodes": sum(not e.done for e in live), "bytes": held}


def play_to_last_message(episode: Any, suite: Suite) -> None:
    programs = list(suite.reference(episode.task))
    for i, program in enumerate(programs):
        messages = [episode.chat.calls([call]) for call in program]
        if i < len(programs) - 1:
            messages.append("done.")
        for message in messages:
            episode.take_pending()
            ids = episode.tokenizer.encode(message + episode.chat.stop_tokens[0])
            episode.receive(ids, [-0.1] * len(ids))


def memory_in_fresh_process() -> dict[str, Any]:
    command = [sys.executable, "-m", "experiments.benchmarks.verifier", "--hold"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true", help="leave the memory part out")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.hold:
        print(json.dumps(hold_episodes()))
        return
    machine, installed, git = host(), versions(), git_commit()
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{machine['cpus']} CPUs, {machine['memory_gib']} GiB, {machine['system']}, load {load}")
    print(f"python {installed['python']}, bfcl-eval {installed['bfcl-eval']}, commit {git['commit'][:10]}")
    found = compare(flags.repeats)
    print(f"\n800 reference trajectories, {flags.repeats} alternating repetitions of each")
    print("CPU seconds, sums of each task's median or least; wall: sum of the medians by the clock\n")
    print(f"{'':8}" + "".join(f"{key:>13}" for key in found["ratio"]))
    for name in ("checker", "ours", "ratio"):
        print(f"{name:8}" + "".join(f"{value:13.3f}" for value in found[name].values()))
    if not flags.no_memory:
        memory = memory_in_fresh_process()
        print(
            f"\n{memory['episodes']} live episodes hold {memory['bytes'] / 1e9:.3f} GB "
            f"(limit {MEMORY_LIMIT_GB:g} GB, {memory['bytes'] / memory['episodes'] / 1e6:.2f} MB each)"
        )


if __name__ == "__main__":
    main()
