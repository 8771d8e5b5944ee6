"""Reads the 800 multi-turn tasks of the installed package and refuses data that does not fit together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seal_jax.envs.bfcl.gold import parse_call, with_named_arguments
from seal_jax.envs.bfcl.package import CLASS_MODULES, read_json_lines
from seal_jax.types import Program, Task, ToolDoc, UserTurn

#: {class: {tool name: doc}}, in the order of the package's files.
Docs = Mapping[str, Mapping[str, ToolDoc]]


@dataclass(frozen=True)
class Entry:
    """A task with what must stay on the environment's side: its reference programs and its initial state."""

    task: Task
    programs: tuple[Program, ...]
    scenarios: Mapping[str, Any]  # involved class -> its scenario (shared: copy before use)

    @property
    def long_context(self) -> bool:
        return self.task.category == "long_context"


def load_docs(folder: Path) -> Docs:
    docs = {}
    for name, (_, file) in CLASS_MODULES.items():
        rows = read_json_lines(folder / "data" / "multi_turn_func_doc" / f"{file}.json")
        docs[name] = {row["name"]: row for row in rows}
    return docs


def load_category(folder: Path, category: str, docs: Docs, hint: str = "") -> list[Entry]:
    """The 200 entries of a category; questions and answers are row-aligned and must share their ids."""
    questions = read_json_lines(folder / "data" / f"BFCL_v4_multi_turn_{category}.json")
    answers = read_json_lines(folder / "data" / "possible_answer" / f"BFCL_v4_multi_turn_{category}.json")
    if len(questions) != len(answers):
        raise ValueError(f"BFCL {category}: {len(questions)} questions but {len(answers)} answers; reinstall bfcl-eval")
    return [make_entry(q, a, category, docs, hint) for q, a in zip(questions, answers, strict=True)]


def make_entry(
    question: Mapping[str, Any], answer: Mapping[str, Any], category: str, docs: Docs, hint: str = ""
) -> Entry:
    """One task from a question row and an answer row; ValueError naming the id and the field that is wrong."""
    task_id = question["id"]
    if answer["id"] != task_id:
        raise ValueError(f"{task_id}: the answer row has id {answer['id']!r}; the files are not row-aligned")
    gold: Sequence[Sequence[str]] = answer["ground_truth"]
    messages: Sequence[Sequence[Mapping[str, str]]] = question["question"]
    if len(messages) != len(gold):
        raise ValueError(f"{task_id}: question has {len(messages)} turns but ground_truth has {len(gold)}")
    try:
        programs = tuple(tuple(parse_call(source) for source in turn) for turn in gold)
    except ValueError as error:
        raise ValueError(f"{task_id}: {error}") from None
    classes = tuple(question["involved_classes"])
    unknown = [name for name in classes if name not in docs]
    if unknown:
        raise ValueError(f"{task_id}: involved_classes holds {unknown[0]!r}; known are {sorted(docs)}")
    offered = {name: doc for cls in classes for name, doc in docs[cls].items()}
    reveals = _reveals(task_id, question.get("missed_function", {}), messages, gold, offered)
    held_out = {doc["name"] for turn in reveals.values() for doc in turn}
    tools = tuple(doc for name, doc in offered.items() if name not in held_out)
    if hint:  # on the tools offered at the start only: revealed docs never carry it upstream either
        tools = tuple({**doc, "description": doc["description"] + hint} for doc in tools)
    turns = tuple(
        UserTurn(user="", reveals=reveals[i]) if i in reveals else UserTurn(_user_text(task_id, i, turn))
        for i, turn in enumerate(messages)
    )
    task = Task(
        id=task_id,
        suite="bfcl",
        category=category,
        scenario=task_id.rsplit("_", 1)[1],
        turns=turns,
        tools=tools,
        domains=classes,
    )
    programs = tuple(with_named_arguments(program, task) for program in programs)
    return Entry(task, programs, {cls: question["initial_config"].get(cls, {}) for cls in classes})


def _reveals(
    task_id: str,
    missed: Mapping[str, Sequence[str]],
    messages: Sequence[Sequence[Any]],
    gold: Sequence[Sequence[str]],
    offered: Mapping[str, ToolDoc],
) -> dict[int, tuple[ToolDoc, ...]]:
    """{turn: held-out docs}. The turn must have no user message, and the turn before it no reference program."""
    reveals = {}
    for key, names in missed.items():
        turn = int(key)
        field = f"{task_id}: missed_function[{key!r}]"
        if not 0 < turn < len(messages):
            raise ValueError(f"{field}: the task has turns 1 to {len(messages) - 1} to reveal functions at")
        if messages[turn]:
            raise ValueError(f"{field}: turn {turn} has a user message; a reveal turn must be empty")
        if gold[turn - 1]:
            raise ValueError(f"{field}: turn {turn - 1}, before the reveal, has a ground truth; it must be empty")
        unknown = [name for name in names if name not in offered]
        if unknown:
            raise ValueError(f"{field}: no involved class documents {unknown[0]!r}")
        reveals[turn] = tuple(offered[name] for name in names)
    return reveals


def _user_text(task_id: str, turn: int, messages: Sequence[Mapping[str, str]]) -> str:
    if len(messages) != 1 or messages[0].get("role") != "user":
        raise ValueError(f"{task_id}: question[{turn}] must hold exactly one user message; it holds {len(messages)}")
    return messages[0]["content"]
