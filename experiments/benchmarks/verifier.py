"""How long judging BFCL takes, beside the package's own checker, and what a round of live episodes holds in memory.

    python -m experiments.benchmarks.verifier [--repeats=7] [--no-memory]

Time: the 800 reference programs, played as if a policy had written them. In one process, alternating, everything
imported and loaded before: `checker` is the package's multi_turn_checker alone (a model name of its own for each check,
since it keeps its instances under that name; what it leaves behind is removed outside the timed part); `ours` is
`Verifier.verify` with all its evidence, then `diagnose`. Neither writes a file. CPU time, since both are one thread and
a machine's other work then hardly counts.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seal_jax.diagnosis import diagnose
from seal_jax.envs.base import Suite, make_suite
from seal_jax.envs.bfcl.package import package_folder, read_json_lines
from seal_jax.envs.verifier import Verifier
from seal_jax.provenance import git_commit, host, versions
from seal_jax.types import CATEGORIES, Call, Task

Spent = dict[str, float]  # seconds by category, and "wall": seconds by the clock on the wall
EPISODES, ROLLOUTS = 256, 8
MEMORY_LIMIT_GB = 1.0


@contextmanager
def timed(spent: Spent, category: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    spent[category] += time.process_time() - cpu
    spent["wall"] += time.perf_counter() - wall


def official_checker() -> tuple[Callable[..., dict[str, Any]], Any]:
    """multi_turn_checker, and the module that holds the instances it leaves behind."""
    os.environ.setdefault("BFCL_PROJECT_ROOT", tempfile.mkdtemp())  # parts of the package make folders there
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    return multi_turn_checker, multi_turn_utils


def time_checker(names: Iterator[int]) -> Callable[[], Spent]:
    check, module = official_checker()
    data, work = package_folder() / "data", []
    for category in CATEGORIES:
        file = f"BFCL_v4_multi_turn_{category}.json"
        answers = read_json_lines(data / "possible_answer" / file)
        for row, answer in zip(read_json_lines(data / file), answers, strict=True):
            gold = answer["ground_truth"]
            work.append((category, [[turn] if turn else [] for turn in gold], gold, row))
    kept = set(vars(module))

    def measure() -> Spent:
        spent: Spent = defaultdict(float)
        for category, turns, gold, row in work:
            name = f"bench{next(names)}"
            with timed(spent, category):
                verdict = check(turns, gold, row, category, name)
            if not verdict["valid"]:
                raise SystemExit(f"{row['id']}: the checker refuses the reference program: {verdict['error_type']}")
            for left in vars(module).keys() - kept:
                delattr(module, left)
        return spent

    return measure


def time_ours(suite: Suite) -> Callable[[], Spent]:
    verifier = Verifier(suite)
    work = [(task, [[program] if program else [] for program in suite.reference(task)]) for task in suite.tasks("all")]

    def measure() -> Spent:
        spent: Spent = defaultdict(float)
        for task, turns in work:
            with timed(spent, task.category):
                verdict = verifier.verify(task, turns)
                labels = diagnose(verdict).names
            if verdict.reward != 1.0 or not {"pass", "correct_abstention"}.issuperset(labels):
                raise SystemExit(f"{task.id}: we refuse the reference program: {verdict.reason} {labels}")
        return spent

    return measure


def compare(repeats: int) -> dict[str, Any]:
    """Seconds for all 800, median and least of `repeats`, alternating."""
    sides = {"checker": time_checker(itertools.count()), "ours": time_ours(make_suite("bfcl"))}
    for measure in sides.values():  # fills the caches of both
        measure()
    times: dict[str, list[Spent]] = {name: [] for name in sides}
    for i in range(repeats):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            gc.collect()
            times[name].append(sides[name]())
    found: dict[str, Any] = {}
    for name, runs in times.items():
        cpu = [sum(run[c] for c in CATEGORIES) for run in runs]
        found[name] = {
            "median": statistics.median(cpu),
            "min": min(cpu),
            "wall": statistics.median(run["wall"] for run in runs),
            **{c: statistics.median(run[c] for run in runs) for c in CATEGORIES},
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
    programs = suite.reference(episode.task)
    for i, program in enumerate(programs):
        messages = [episode.chat.calls([named(suite, episode.task, call)]) for call in program]
        if i < len(programs) - 1:
            messages.append("done.")
        for message in messages:
            episode.take_pending()
            ids = episode.tokenizer.encode(message + episode.chat.stop_tokens[0])
            episode.receive(ids, [-0.1] * len(ids))


def named(suite: Suite, task: Task, call: Call) -> Call:
    """A reference call with its positional arguments named, since a chat format knows no others."""
    docs = {doc["name"]: doc for doc in (*task.tools, *(d for turn in task.turns for d in turn.reveals))}
    names = list(docs[call.name]["parameters"]["properties"])
    return Call(call.name, {**dict(zip(names, call.positional, strict=False)), **call.arguments})


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
    print(f"\n800 reference trajectories, {flags.repeats} alternating repetitions")
    print("CPU seconds: median, least, median by category; wall: median seconds by the clock\n")
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
