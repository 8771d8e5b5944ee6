"""Result files of the benchmark's own package (bfcl-eval 2026.3.23), in and out. Imports no jax.

Out: `write_results` lays trajectories out as `bfcl evaluate` wants them. In: `read_results` reads such files and
decoded ones, line by line, and keeps account of every line that cannot be used.

    {"id": "multi_turn_base_0", "result": [["text of step 0 of turn 0", ...], ...]}    raw text, to be decoded
    {"id": "multi_turn_base_0", "decoded": [[["cd(folder='a')", "ls()"], ...], ...]}   turns of steps of call strings

Keys of ours are written beside the package's, which ignores them: "protocol" (how the episode was played), "stop" (how
it ended), and "unfinished" (the messages of a turn that broke off because the row was full: the package's inference
fails there, so as a turn of "result" it would be graded).
"""

from __future__ import annotations

import ast
import json
import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seal_jax.chat.formats import get_format
from seal_jax.chat.official import DECODER_OF_CHAT, DECODERS, MAX_CHARS, after_reasoning, parse_official
from seal_jax.envs.bfcl.gold import parse_call
from seal_jax.envs.bfcl.package import VERSION
from seal_jax.types import PROTOCOLS, Call, ParseError, Step, Task, Trajectory

#: A model that the package registers with each decoder. It picks the decoder by the name of the folder, and the models
#: trained here are not registered.
REGISTERED = {
    "qwen_fc": "Qwen/Qwen3-8B-FC",
    "llama31": "meta-llama/Llama-3.1-8B-Instruct-FC",
    "toolace": "Team-ACE/ToolACE-2-8B",
    "prompting": "Qwen/Qwen3-8B",
}
_STRICT_CHAT = {decoder: chat for chat, decoder in DECODER_OF_CHAT.items()}

Turns = tuple[tuple[Step, ...], ...]


# --- out -------------------------------------------------------------------------------------------------------------
def result_line(trajectory: Trajectory, decoder: str, protocol: str) -> dict[str, Any]:
    """One line of a result file. The package's Qwen handler keeps only what follows `</think>`: so does this, except
    in "seal", whose strict reading needs the whole message."""
    kept = after_reasoning if decoder == "qwen_fc" and protocol == "official" else str
    turns = [[kept(step.text) for step in turn] for turn in trajectory.turns]
    line = {"id": trajectory.task_id, "result": turns, "protocol": protocol, "stop": trajectory.stop}
    if turns and protocol == "official" and trajectory.stop == "context_limit":
        line["unfinished"] = turns.pop()
    return line


def write_results(
    folder: str | Path, trajectories: Sequence[Trajectory], *, decoder: str, protocol: str, **about: Any
) -> list[Path]:
    """Writes one file per category to `folder`, for `bfcl evaluate --result-dir=FOLDER --partial-eval`.

    folder/about.json                                                  the protocol, the command, and `about`
    folder/<registered model>/multi_turn/BFCL_v4_multi_turn_<category>_result.json

    The folder's model is one that the package registers with the same decoder (REGISTERED), not the one that was
    evaluated. Only files of protocol "official" are judged by the package as they were judged here: it executes the
    calls to unavailable tools and the lax readings of malformed messages that "seal" rejected.
    """
    if decoder not in REGISTERED:
        raise ValueError(f"write_results: decoder {decoder!r} is not known; choose one of {sorted(REGISTERED)}")
    if protocol not in PROTOCOLS:
        raise ValueError(f"write_results: protocol {protocol!r} is not known; choose one of {PROTOCOLS}")
    folder, model = Path(folder), REGISTERED[decoder]
    place = folder / model.replace("/", "_") / "multi_turn"
    place.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {}
    for trajectory in trajectories:
        # ASCII, so that half a surrogate pair (a cut emoji) can be written and read.
        line = json.dumps(result_line(trajectory, decoder, protocol))
        lines.setdefault(trajectory.category, []).append(line + "\n")
    for old in place.glob("BFCL_v4_multi_turn_*_result.json"):
        old.unlink()
    written = []
    for category, text in lines.items():
        written.append(place / f"BFCL_v4_multi_turn_{category}_result.json")
        written[-1].write_text("".join(text), encoding="utf-8")
    note = {
        **about,
        "protocol": protocol,
        "decoder": decoder,
        "package": f"bfcl-eval {VERSION}",
        "same_verdicts_in_the_package": protocol == "official",
        "command": f"bfcl evaluate --model {model} --test-category multi_turn --partial-eval "
        f"--result-dir {shlex.quote(str(folder.resolve()))} --score-dir {shlex.quote(str(folder.resolve() / 'score'))}",
    }
    (folder / "about.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
    return written


# --- in --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Result:
    """One readable line: the steps of an episode, with calls and no results yet. `line` counts from 1; `aborted` says
    that the last turn broke off, and the episode with it."""

    task_id: str
    turns: Turns
    protocol: str
    file: str
    line: int
    aborted: bool = False


@dataclass(frozen=True)
class BrokenLine:
    """A line that cannot be used, and why. `task_id` is set if the line could be told to be of a known task."""

    file: str
    line: int
    reason: str  # begins with a stable word: json, id, duplicate, shape, inference_error
    task_id: str = ""


@dataclass
class Results:
    """What was read: at most one result for each task (its first line counts), and all lines that cannot be used."""

    results: dict[str, Result] = field(default_factory=dict)
    broken: list[BrokenLine] = field(default_factory=list)
    lines: int = 0  # that hold anything at all

    def failed(self) -> dict[str, BrokenLine]:
        """The tasks whose line is broken: they were answered, and count as failures."""
        found: dict[str, BrokenLine] = {}
        for broken in self.broken:
            if broken.task_id and broken.task_id not in self.results:
                found.setdefault(broken.task_id, broken)
        return found


class _Broken(Exception):
    pass


#: What `python -m seal_jax.diagnose` writes, perhaps beside the results.
EVIDENCE_FILE = "diagnosis.jsonl"


def result_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files themselves, and the *_result.json files and *.jsonl files (but for EVIDENCE_FILE) of folders;
    ValueError if there is none."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            named = (p for p in path.rglob("*") if p.name.endswith(("_result.json", ".jsonl")))
            inside = sorted(p for p in named if p.is_file() and p.name != EVIDENCE_FILE)
            if not inside:
                raise ValueError(f"{path}: the folder holds no *_result.json and no *.jsonl; name the file itself")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path}: there is no such file")
    return found


def read_results(
    paths: Sequence[str | Path], tasks: Mapping[str, Task], *, decoder: str = "qwen_fc", protocol: str = ""
) -> Results:
    """Reads result files; no line is dropped without a word.

    Args:
      tasks: every known task by id; a line of any other is broken.
      decoder: how raw text is read, one of chat.official.DECODERS; of no use for decoded lines.
      protocol: "official" decodes as the package does and executes every call; "seal" reads strictly and rejects
        messages that are malformed or name a tool not offered at that turn. "" = what the line says, else official.
    """
    if decoder not in DECODERS:
        raise ValueError(f"--decoder={decoder} is not known; choose one of {', '.join(sorted(DECODERS))}")
    if protocol not in ("", *PROTOCOLS):
        raise ValueError(f"--protocol={protocol} is not known; choose one of {', '.join(PROTOCOLS)}")
    if protocol == "seal" and decoder not in _STRICT_CHAT:
        raise ValueError(f"--protocol=seal has no strict reading of --decoder={decoder}; use {sorted(_STRICT_CHAT)}")
    read, seen = Results(), set[str]()
    for path in result_files(paths):
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.strip():
                    continue
                read.lines += 1
                entry: dict[str, Any] = {}
                try:
                    entry = _read_object(raw)
                    task = _task_of(entry, tasks, seen)
                    result = _read_entry(entry, task, decoder, protocol)
                    aborted = "result" in entry and "unfinished" in entry
                    read.results[task.id] = Result(task.id, result[0], result[1], str(path), number, aborted)
                except _Broken as why:
                    known = entry.get("id")
                    task_id = known if isinstance(known, str) and known in tasks else ""
                    read.broken.append(BrokenLine(str(path), number, str(why), task_id))
                seen |= {entry["id"]} if isinstance(entry.get("id"), str) else set()
    return read


def _read_object(raw: bytes) -> dict[str, Any]:
    if raw.startswith(b"\x1f\x8b"):
        raise _Broken("json: the file is compressed; unpack it first")
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _Broken(f"json: {error}; write one object a line") from None
    if not isinstance(value, dict):
        raise _Broken(f"json: a {type(value).__name__}, not an object; write one object a line")
    return value


def _task_of(entry: Mapping[str, Any], tasks: Mapping[str, Task], seen: Iterable[str]) -> Task:
    if "id" not in entry:
        raise _Broken("id: the line has none")
    task_id = entry["id"]
    if not isinstance(task_id, str) or task_id not in tasks:
        raise _Broken(f"id: {task_id!r:.80} is no known task")
    if task_id in seen:
        raise _Broken(f"duplicate: {task_id} has a line already; the first counts")
    return tasks[task_id]


def _read_entry(entry: Mapping[str, Any], task: Task, decoder: str, protocol: str) -> tuple[Turns, str]:
    if ("result" in entry) == ("decoded" in entry):
        raise _Broken('shape: a line holds either "result" or "decoded"')
    protocol = protocol or str(entry.get("protocol", "official"))
    if protocol not in PROTOCOLS:
        raise _Broken(f"shape: protocol {protocol!r:.40} is none of {', '.join(PROTOCOLS)}")
    if "decoded" in entry:
        turns = _checked(entry["decoded"], "decoded", _is_list_of_strings, "a list of call strings")
        steps = tuple(tuple(Step("", tuple(map(read_call, step))) for step in turn) for turn in turns)
    else:
        if isinstance(entry["result"], str):
            raise _Broken(f"inference_error: {entry['result']!r:.120}")
        turns = _checked(entry["result"], "result", _is_text, "text")
        if "unfinished" in entry:
            turns = [*turns, *_checked([entry["unfinished"]], "unfinished", _is_text, "text")]
        read = _reader(decoder, protocol)
        steps = tuple(tuple(read(step) for step in turn) for turn in turns)
    if protocol == "seal":
        steps = tuple(_played(steps, task, cut=entry.get("stop") == "truncated"))
    return steps, protocol


def _is_text(step: Any) -> bool:
    return isinstance(step, str)


def _is_list_of_strings(step: Any) -> bool:
    return isinstance(step, list) and all(isinstance(call, str) for call in step)


def _checked(turns: Any, key: str, fits: Callable[[Any], bool], wanted: str) -> list[list[Any]]:
    if not isinstance(turns, list):
        raise _Broken(f"shape: {key!r} is a {type(turns).__name__}, not a list of turns")
    for i, turn in enumerate(turns):
        if not isinstance(turn, list):
            raise _Broken(f"shape: {key}[{i}] is a {type(turn).__name__}, not a list of steps")
        for j, step in enumerate(turn):
            if not fits(step):
                raise _Broken(f"shape: {key}[{i}][{j}] is {step!r:.60}, not {wanted}")
    return turns


# --- steps -----------------------------------------------------------------------------------------------------------
#: No tool can have this name: it marks a call string that is not a plain call with literal arguments.
NOT_A_CALL = "not a literal call"


class _Endless(float):
    """An infinity that was written as a number too large: it prints as one, so that `str(call)` reads back."""

    def __repr__(self) -> str:
        return "1e309" if self > 0 else "-1e309"


def _endless(value: Any) -> Any:
    """The value with its infinities as `_Endless`: the word `inf`, which is how they print, is an undefined name."""
    if isinstance(value, float) and math.isinf(value):
        return _Endless(value)
    if isinstance(value, dict):
        return {_endless(k): _endless(v) for k, v in value.items()}
    return type(value)(map(_endless, value)) if isinstance(value, list | tuple | set) else value


def read_call(source: str) -> Call:
    """A call string as a Call. What is not a plain call with literal arguments is never evaluated: it becomes a call of
    a tool that does not exist, with the source as its argument, and fails."""
    try:
        if len(source) <= MAX_CHARS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # '\d' in a string is the policy's matter
                tree = ast.parse(source.strip(), mode="eval").body
                names = [keyword.arg for keyword in tree.keywords] if isinstance(tree, ast.Call) else []
                if len(set(names)) == len(names):  # Python refuses a repeated argument only when it compiles
                    call = parse_call(source)
                    arguments = {name: _endless(value) for name, value in call.arguments.items()}
                    return Call(call.name, arguments, tuple(map(_endless, call.positional)))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return Call(NOT_A_CALL, {"source": source})


def _reader(decoder: str, protocol: str) -> Callable[[str], Step]:
    chat = get_format(_STRICT_CHAT.get(decoder, "toolace"))  # a prompted model's calls are a Python list, as ToolACE's

    def official(text: str) -> Step:
        parsed = parse_official(text, decoder, chat.parse)
        return Step(text, parsed.calls, parsed.error)

    def strict(text: str) -> Step:
        parsed = chat.parse(text)
        return Step(text, parsed.calls, parsed.error)

    return official if protocol == "official" else strict


def _played(turns: Turns, task: Task, *, cut: bool) -> Iterator[tuple[Step, ...]]:
    """The steps as the "seal" protocol plays them: a message that names a tool not offered yet is rejected whole."""
    offered = {doc["name"] for doc in task.tools}
    for i, turn in enumerate(turns):
        if i < len(task.turns):
            offered |= {doc["name"] for doc in task.turns[i].reveals}
        steps = []
        for j, step in enumerate(turn):
            missing = [call.name for call in step.calls if call.name not in offered]
            if cut and i == len(turns) - 1 and j == len(turn) - 1:
                step = Step(step.text, error=ParseError("truncated", "the message was cut"), truncated=True)
            elif step.error is None and missing:
                error = ParseError("unavailable_tool", f"Tool {missing[0]!r} is not available.")
                step = Step(step.text, step.calls, error)
            steps.append(step)
        yield tuple(steps)
