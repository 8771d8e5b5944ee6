"""Does `bfcl evaluate` judge every task as `seal_jax.diagnose` does? Same files, task by task.

The benchmark's package pins versions that conflict with jax's, so it gets a virtual environment of its own:

    python3.11 -m venv bfclvenv
    bfclvenv/bin/pip install bfcl-eval==2026.3.23 soundfile
    PYTHONPATH=. bfclvenv/bin/python experiments/official/compare_evaluate.py --tasks=200 --out=/tmp/compare

For each decoder, result files are written from the reference programs with random faults in them (calls dropped,
doubled, reordered, with other arguments, to unknown tools, in turns without a program; malformed messages; episodes cut
short) by the code that a run writes its own with. The package then runs as its users run it, in a process of its own,
since it keeps its tools' state between two checks in one process. Prints one line for each disagreement, and exits with
1 if there is any. On 2,400 lines (`--tasks=799 --seed=4`, five minutes on two busy cores) there was none.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seal_jax.chat.formats import ChatFormat, get_format
from seal_jax.chat.official import DECODER_OF_CHAT
from seal_jax.diagnose import all_tasks
from seal_jax.envs.base import Suite
from seal_jax.evaluation.results import read_results, write_results
from seal_jax.evaluation.scores import score, suite_for
from seal_jax.types import Call, Program, Step, Task, Trajectory

#: The package's error types, and our reasons for a verdict.
REASONS = {
    "multi_turn:inference_error": "inference_error",
    "multi_turn:force_terminated": "force_terminated",
    "multi_turn:empty_turn_model_response": "empty_turn",
    "multi_turn:instance_state_mismatch": "state_mismatch",
    "multi_turn:execution_response_mismatch": "response_mismatch",
}
#: Written as a number that no float holds, which no writer of ours writes.
ENDLESS = "<endless>"
VALUES = (
    *("", "x", "then ls () again", "é\n'\"\\", "total", ENDLESS),
    *(
        0,
        -1,
        7.5,
        10**30,
        True,
        None,
        [],
        ["a", 1],
        {"a": {"b": 1}},
        {"pwd": {}},
        {"mkdir": {"dir_name": "nested"}},
        {"a": 1},
        {},
    ),
)


def perturbed(programs: Sequence[Program], rng: random.Random) -> list[list[Call]]:
    """The programs with one to three random faults; as they are in a third of the cases."""
    turns = [list(program) for program in programs]
    every = [call for turn in turns for call in turn]
    for _ in range(rng.choice((0, 1, 1, 2, 3)) if every else 0):
        turn = rng.choice(turns)
        fault = rng.randrange(7)
        i = rng.randrange(len(turn)) if turn else 0
        if fault == 0 and turn:
            del turn[i]
        elif fault == 1 and turn:
            turn.insert(i, turn[i])
        elif fault == 2:
            rng.shuffle(turn)
        elif fault == 3 and turn and turn[i].arguments:
            name = rng.choice(sorted(turn[i].arguments))
            turn[i] = replace(turn[i], arguments={**turn[i].arguments, name: rng.choice(VALUES)})
        elif fault == 4 and turn:
            turn[i] = replace(turn[i], arguments={**turn[i].arguments, rng.choice(("extra", "name")): 1})
        elif fault == 5:
            turn.insert(i, Call(rng.choice(("no_such_tool", "kill", "ls", "pwd", "logout")), {}))
        else:
            turn.insert(i, rng.choice(every))
    return turns


def messages(calls: Sequence[Call], chat: ChatFormat, rng: random.Random) -> list[str]:
    """The messages of a turn: calls one or two at a time, prose at the end, and sometimes something malformed."""
    texts, left = [], list(calls)
    while left:
        n = rng.choice((1, 1, 2)) if chat.name != "llama31" else 1
        texts.append(chat.calls(left[:n]).replace(f'"{ENDLESS}"', "1e999").replace(f"'{ENDLESS}'", "1e999"))
        left = left[n:]
    if texts and rng.random() < 0.1:
        i = rng.randrange(len(texts))
        texts[i] = rng.choice(
            (
                texts[i].replace("\n", " "),
                texts[i].replace('"', "'"),
                texts[i][: len(texts[i]) // 2],
                texts[i].replace('"name"', '"tool"'),
                "Let me see. " + texts[i] + " Done.",
                "<think>\nnot " + texts[i] + "\n</think>\n\n" + texts[i],
            )
        )
    return [*texts, rng.choice(("Done.", "", "All is well (so far)."))]


def trajectories(suite: Suite, tasks: Sequence[Task], chat: ChatFormat, rng: random.Random) -> list[Trajectory]:
    out = []
    for task in tasks:
        programs = list(suite.reference(task))
        turns = [messages(calls, chat, rng) for calls in perturbed(programs, rng)]
        if rng.random() < 0.03:
            turns = turns[:-1] if rng.random() < 0.7 else [*turns, ["More?"]]
        steps = tuple(tuple(Step(text) for text in turn) for turn in turns)
        out.append(Trajectory(task.id, task.category, 0, 0, False, (), (), steps, "completed"))
    return out


def by_package(folder: Path) -> dict[str, str]:
    """{task id: reason} by `bfcl evaluate` on a folder that write_results made."""
    about = json.loads((folder / "about.json").read_text())
    command = [sys.executable, "-m", "bfcl_eval", *shlex.split(about["command"])[1:]]
    env = {**os.environ, "BFCL_PROJECT_ROOT": str(folder / "root"), "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = ""
    (folder / "root").mkdir(exist_ok=True)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    reasons: dict[str, str] = {}
    for path in folder.rglob("BFCL_v4_multi_turn_*_result.json"):
        ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
        (scores,) = (folder / "score").rglob(path.name.replace("_result", "_score"))
        head, *failed = [json.loads(line) for line in scores.read_text().splitlines()]
        assert head["total_count"] == len(ids), (path, head)
        reasons |= dict.fromkeys(ids, "valid")
        reasons |= {entry["id"]: REASONS[entry["error"]["error_type"]] for entry in failed}
    return reasons


def compare(
    n_tasks: int,
    out: Path,
    *,
    seed: int = 0,
    chats: Sequence[str] = tuple(DECODER_OF_CHAT),
    write_only: bool = False,
) -> list[str]:
    """The disagreements, one line each; writes its files to `out` and prints the counts (or where the files are)."""
    suite = suite_for("bfcl", "official")
    tasks = all_tasks(suite)
    disagreements = []
    for chat in chats:
        rng, decoder = random.Random(f"{seed} {chat}"), DECODER_OF_CHAT[chat]
        *chosen, spare = rng.sample(list(tasks.values()), n_tasks + 1)
        folder = out / decoder
        played = trajectories(suite, chosen, get_format(chat), rng)
        written = write_results(folder, played, decoder=decoder, protocol="official", seed=seed)
        place = written[0].parent
        with (place / f"BFCL_v4_multi_turn_{spare.category}_result.json").open("a") as file:
            # as the package notes an episode that its own code could not finish
            file.write(json.dumps({"id": spare.id, "result": "Error during inference: timed out"}) + "\n")
        if write_only:
            print(place)
            continue
        read = read_results([place], tasks, decoder=decoder)
        ours = {row.task.id: row.reason for row in score(lambda _: suite, [*chosen, spare], read)}
        theirs = by_package(folder)
        assert ours.keys() == theirs.keys()
        for task_id, reason in ours.items():
            if reason != theirs[task_id]:
                disagreements.append(f"{decoder}: {task_id}: seal_jax {reason}, bfcl evaluate {theirs[task_id]}")
        counts = ", ".join(f"{k} {v}" for k, v in Counter(theirs.values()).most_common())
        print(f"{decoder}: {len(theirs)} tasks ({counts}); {len(disagreements)} disagreements so far", flush=True)
    return disagreements


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=200, help="tasks per decoder, at most 799 (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result and score files")
    parser.add_argument("--write-only", action="store_true", help="write the result files, run nothing")
    args = parser.parse_args()
    if not args.write_only and importlib.util.find_spec("qwen_agent") is None:
        sys.exit("the whole bfcl-eval is needed to compare (see --help); --write-only writes the files without it")
    found = compare(args.tasks, args.out.resolve(), seed=args.seed, write_only=args.write_only)
    if not args.write_only:
        print("\n".join(found) or "no disagreement")
    sys.exit(bool(found))
