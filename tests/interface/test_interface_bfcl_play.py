"""Ω beside real BFCL worlds: every error gets the right hint, and nothing that was not seen is told."""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from bfcl_folder import FOLDER

from seal_jax.chat.parsing import ERROR_KINDS
from seal_jax.envs.bfcl import package
from seal_jax.interface import InterfaceSettings, cues, full
from seal_jax.interface.arguments import arguments
from seal_jax.interface.errors import ERROR_CLASSES, PARSE_MENDS, error_class
from seal_jax.types import Call, CallResult, ParseError, Task

NOTE = full(InterfaceSettings(feedback="classed"))
INLINE = full(InterfaceSettings(placement="inline", max_tools=99))


@pytest.fixture(scope="module")
def docs(suite):
    found = {}
    for task in suite.tasks("all"):
        found |= {d["name"]: d for d in (*task.tools, *(d for turn in task.turns for d in turn.reveals))}
    assert len(found) == 128
    return found


# --- wrong calls -----------------------------------------------------------------------------------------------------
NONSENSE = ("zqx7741", "zqx/7741", 90817, -90817, 0, ["zqx7741"], [], {"zqx7741": 90817}, None, "")


def wrong_calls(call: Call) -> Iterator[Call]:
    """One argument less, one more, each one replaced by nonsense of every type, no argument at all."""
    given = dict(call.arguments)
    for name in given:
        yield Call(call.name, {k: v for k, v in given.items() if k != name})
        for value in NONSENSE:
            yield Call(call.name, given | {name: value})
    yield Call(call.name, given | {"zqx_more": 90817})
    yield Call(call.name, {})


def wild_calls(doc) -> Iterator[Call]:
    """Calls of a tool with nonsense in every place, and with what its docs would allow."""
    known = arguments(doc)
    for value in NONSENSE:
        yield Call(doc["name"], {a.name: value for a in known})
    plain = {"str": "zqx7741", "int": 90817, "float": 90817.5, "bool": True, "list": ["zqx7741"], "dict": {}}
    yield from wrong_calls(Call(doc["name"], {a.name: a.values[0] if a.values else plain[a.type] for a in known}))


def results_of(suite, tasks) -> Iterator[tuple[Task, CallResult]]:
    """What wrong calls of all tools bring about: as the task begins, between the reference's calls, and after."""
    for task in tasks:
        world = suite.open(task)
        for doc in task.tools:
            yield from ((task, world.call(c)) for c in wild_calls(doc))
        world = suite.open(task)
        met = set()
        for call in (c for program in suite.reference(task) for c in program):
            if call.name not in met:
                yield from ((task, world.call(c)) for c in wrong_calls(call))
                met.add(call.name)
            world.call(call)
        for doc in task.tools:  # the same in the state that the reference leaves
            yield from ((task, world.call(c)) for c in (Call(doc["name"]), next(wild_calls(doc))))


def vocabulary(tools) -> set[str]:
    """Every word that a hint may hold: of the constant texts and of the docs."""
    texts = [*cues.FEEDBACK.values(), *cues.CLASSED_FEEDBACK.values(), *PARSE_MENDS.values(), cues.MARK]
    texts += [c.text for c in ERROR_CLASSES]
    texts += [w for d in tools for a in arguments(d) for w in (d["name"], a.name, a.words())]
    return {word for text in texts for word in re.findall(r"\w+", text)} | {"and", "others", "zqx_more"}


def test_every_error_of_the_real_tools_has_a_hint_of_the_right_kind(suite, docs):
    """A task of each class: all that simple wrong calls can reach, some 10,000 calls."""
    tasks, left = [], Counter({name: 1 for name in package.CLASS_MODULES})
    for task in suite.tasks("all"):
        if task.category == "base" and any(left[c] > 0 for c in task.domains):
            tasks.append(task)
            left.subtract(task.domains)
    owner = {name: cls for cls, tools in tools_of_classes().items() for name in tools}
    kinds: dict[str, Counter] = defaultdict(Counter)
    classes: Counter = Counter()
    tried = 0
    words = {task.id: vocabulary(task.tools) for task in tasks}
    for task, result in results_of(suite, tasks):
        tried += 1
        plain, text = INLINE.feedback(result, task.tools), NOTE.feedback(result, task.tools)
        if result.ok:
            assert plain == text == ""
            continue
        assert result.error != "env_error", result
        kinds[owner[result.call.name]][result.error] += 1
        for hint in (plain, text):
            assert hint.startswith("[hint] ") and "\n" not in hint and hint != "[hint] "
            strange = {w for w in re.findall(r"\w+", hint) if w not in words[task.id] and not w.isdecimal()}
            assert not strange, (strange, result)
            assert "zqx7741" not in hint and "90817" not in hint, (hint, result)
        check_kind(result, text, docs[result.call.name])
        if result.error in ("tool_error", "exception"):
            found = error_class(result, sure=False)
            classes[found.name if found else ""] += 1
    print(f"{tried} calls in {len(tasks)} tasks; errors by class:", {c: dict(k) for c, k in kinds.items()})
    print("refusals by class:", dict(classes))
    assert set(kinds) == set(package.CLASS_MODULES)
    assert all(k["missing_argument"] and k["unexpected_argument"] for k in kinds.values())
    assert all(k["tool_error"] for c, k in kinds.items())
    assert set(classes) >= {c.name for c in ERROR_CLASSES}


def check_kind(result: CallResult, text: str, doc) -> None:
    """The hint against the call and the docs, without looking at how it was made."""
    known = {a.name: a for a in arguments(doc)}
    if result.error == "missing_argument":
        lacking = [a.name for a in known.values() if a.required and a.name not in result.call.arguments]
        assert lacking and text.startswith("[hint] missing argument")
        assert all(re.search(rf"[ ,]{name}\b", text) for name in lacking)
    elif result.error == "unexpected_argument":
        assert text.startswith("[hint] unexpected argument zqx_more; the tool takes ")
        assert all(name in text for name in known)
    elif result.error == "argument_type":
        assert text.startswith("[hint] wrong argument")
        wrong = [a.name for a in known.values() if a.name in result.call.arguments]
        assert text == "[hint] wrong argument; fix it." or any(f"argument {name} " in text for name in wrong)
    elif result.error in ("time_limit", "size_limit"):
        assert text == f"[hint] {cues.FEEDBACK[result.error]}"
    else:
        assert result.error in ("tool_error", "exception"), result
        constants = {f"[hint] {c.text}" for c in ERROR_CLASSES}
        constants |= {f"[hint] {cues.FEEDBACK[k]}" for k in ("tool_error", "exception")}
        assert text in constants or text.startswith("[hint] wrong argument "), text


def tools_of_classes() -> dict[str, list[str]]:
    folder = FOLDER / "data" / "multi_turn_func_doc"
    return {
        cls: [json.loads(line)["name"] for line in (folder / f"{file}.json").read_text().splitlines()]
        for cls, (_, file) in package.CLASS_MODULES.items()
    }


def messages_in_the_source() -> Iterator[tuple[str, str]]:
    """Every error message written in the source of the eight classes, with its holes filled by nonsense."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text, node.values))
        return text(node.left) + text(node.right) if isinstance(node, ast.BinOp) else "zqx7741"

    folder = FOLDER / "eval_checker" / "multi_turn_eval" / "func_source_code"
    for file, _ in package.CLASS_MODULES.values():
        for node in ast.walk(ast.parse((folder / f"{file}.py").read_text())):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "error":
                        yield "tool_error", text(value)
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                yield "exception", text(node.exc.args[0])


def test_every_error_message_in_the_source_has_its_class():
    found = defaultdict(set)
    for kind, message in messages_in_the_source():
        c = error_class(CallResult(Call("x"), json.dumps({"error": message}), kind, ""), sure=False)
        found[c.name if c else ""].add(message)
        in_a_list = CallResult(Call("x"), str([{"error": message}]), kind, "")
        assert error_class(in_a_list, sure=False) is c
    assert {name: len(messages) for name, messages in found.items()} == {
        "token": 3,
        "login": 16,
        "done": 13,
        "step": 6,
        "amount": 8,
        "path": 7,
        "not_found": 42,
        "number": 15,
        "value": 17,
        "": 2,
    }
    assert found[""] == {"zqx7741", "404"}  # another exception's own words, and a bare number: the general text


@pytest.mark.parametrize(
    "text, name",
    [
        ('{"error": "User not authenticated. Please log in to place an order."}', "login"),
        ("[{'error': 'User not authenticated. Please log in to view tickets.'}]", "login"),
        ('{"error": "No user is currently logged in."}', "login"),
        ('{"booking_status": false, "error": "Token expired"}', "token"),
        ('{"error": "cat: \'a.txt\': No such file or directory"}', "not_found"),
        ('{"error": "Invalid stock symbol: ABC"}', "not_found"),
        ('{"error": "Ticket with ID 7 is already closed."}', "done"),
        ('{"error": "Directory not empty"}', "step"),
        ('{"error": "Insufficient funds for withdrawal."}', "amount"),
        ('{"error": "Cannot divide by zero"}', "number"),
        ('{"error": "Invalid speed"}', "value"),
        ('{"error": 404}', ""),
        ('{"error": "boom"}', ""),
    ],
)
def test_the_class_of_a_refusal(text, name):
    found = error_class(CallResult(Call("x"), text, "tool_error"), sure=False)
    assert (found.name if found else "") == name


@pytest.mark.parametrize(
    "tool, given, hint",
    [
        ("mean", {}, "missing argument numbers (list of float); add it."),
        ("add", {}, "missing arguments a (float), b (float); add them."),
        ("wc", {"file_name": "a", "lines": 3}, "unexpected argument lines; the tool takes file_name, mode?."),
        ("ls", {"folder": "a"}, "unexpected argument folder; the tool takes a?."),
        ("wc", {"file_name": "a", "mode": "x"}, "wrong argument mode (l|w|c); fix it."),
        ("cd", {"folder": "a/b"}, "wrong argument folder (one folder at a time); fix it."),
        ("mkdir", {"dir_name": "a/b"}, "wrong argument dir_name (name without path); fix it."),
        ("mkdir", {"dir_name": 7}, "wrong argument dir_name (str); fix it."),
        ("cat", {"file_name": "nowhere"}, "nothing there by that name or id: look up what exists."),
        ("mean", {"numbers": ["1"]}, "wrong argument numbers (list of float); fix it."),
        ("mean", {"numbers": []}, "the numbers do not allow this: check them."),
        ("add", {"a": "1", "b": 2}, "wrong argument a (float); fix it."),
    ],
)
def test_hints_in_a_real_world(suite, tool, given, hint):
    task = next(t for t in suite.tasks("all") if t.domains == ("GorillaFileSystem", "MathAPI"))
    result = suite.open(task).call(Call(tool, given))
    assert NOTE.feedback(result, task.tools) == f"[hint] {hint}"


def test_every_parse_error_says_what_to_mend():
    assert set(PARSE_MENDS) == set(ERROR_KINDS)
    hints = {kind: NOTE.feedback(ParseError(kind, "zqx7741", 3), ()) for kind in ERROR_KINDS}
    assert len(set(hints.values())) == len(hints)
    assert all(h == f"[hint] malformed: {PARSE_MENDS[k]}." and "zqx" not in h for k, h in hints.items())
    assert NOTE.feedback(ParseError("new_kind", "zqx7741"), ()) == "[hint] malformed: fix the format, then resend."


def test_an_unknown_tool_brings_the_names_most_like_it(suite):
    task = max(suite.tasks("all"), key=lambda t: len(t.tools))
    short = full(InterfaceSettings(feedback="classed", max_tools=3))
    for error in (
        ParseError("unknown_tool", "Tool 'get_zipcode' is not available."),
        CallResult(Call("get_zipcode"), "Error during execution: name 'get_zipcode' is not defined", "unknown_tool"),
    ):
        hint = short.feedback(error, task.tools)
        assert "get_zipcode_based_on_city" in hint and hint.endswith(", and others.")
        assert hint == short.feedback(error, task.tools)


# --- nothing that was not seen ---------------------------------------------------------------------------------------
def values_of(programs) -> set[str]:
    """Every string of at least 3 characters and number of at least 2 digits in the arguments of all turns."""
    found: set[str] = set()
    todo = [v for program in programs for c in program for v in c.arguments.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif isinstance(value, str) and len(value.strip()) >= 3:
            found.add(value.strip())
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if sum(ch.isdecimal() for ch in str(value)) >= 2:
                found.add(str(abs(value)))
    return found


class Watch:
    """Looks for a task's reference values, as whole words in any case, in what Ω says."""

    def __init__(self, task: Task, values: set[str]) -> None:
        self.task, self.seen, self.texts = task, task.system, 0
        self.leaks: list[tuple[str, str, str]] = []
        longest_first = sorted(values, key=lambda v: (-len(v), v))
        self.any = re.compile(
            "|".join(rf"(?<!\w){re.escape(v)}(?!\w)" for v in longest_first) or r"(?!)", re.IGNORECASE
        )

    def see(self, *texts: str) -> None:
        self.seen += "\n" + "\n".join(texts)

    def said(self, text: str) -> None:
        self.texts += bool(text)
        for found in self.any.finditer(text):
            value = found.group()
            if not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", self.seen, re.IGNORECASE):
                self.leaks.append((self.task.id, value, text))


def added_inline(tools) -> str:
    """What placement "inline" adds to the docs, in one text."""
    added = []
    for doc, shown in zip(tools, INLINE.inline(tools), strict=True):
        before, after = json.dumps(doc), json.dumps(shown)
        assert after != before or not doc["parameters"]["properties"]
        added += re.findall(r"\[(?:required|optional|type|one of|format)[^\[\]\"]*(?:\"[^\"]*\")?[^\[\]]*\]", after)
    return "\n".join(added)


def watch_a_play(suite, task: Task) -> Watch:
    """The reference's play with wrong calls before each turn, among them later turns' calls made too early.

    What those wrong calls hold and what they return counts as not seen, so a hint that repeats any of it is a leak.
    """
    programs = list(suite.reference(task))
    watch, world, rng = Watch(task, values_of(programs)), suite.open(task), random.Random(task.id)
    later = [c for program in programs for c in program]
    offered = list(task.tools)
    watch.see(json.dumps(task.tools, ensure_ascii=False), task.turns[0].user)
    watch.said(NOTE.note(task.tools))
    watch.said(INLINE.note(task.tools))
    watch.said(added_inline(task.tools))

    def answered(error: CallResult | ParseError) -> None:
        watch.said(NOTE.feedback(error, offered))
        watch.said(INLINE.feedback(error, offered))

    for turn, program in zip(task.turns, programs, strict=True):
        watch.see(turn.user)
        if turn.reveals:
            offered += turn.reveals
            watch.see(json.dumps(turn.reveals, ensure_ascii=False))
            watch.said(NOTE.note(turn.reveals, revealed=True))
            watch.said(INLINE.note(turn.reveals, revealed=True))
            watch.said(added_inline(turn.reveals))
        for call in rng.sample(later, min(3, len(later))):
            values = list(call.arguments.values())
            wrong = [call, Call(call.name, {}), Call(call.name, dict(call.arguments) | {"zqx_more": 1})]
            wrong += [Call(call.name, dict(call.arguments) | {n: rng.choice([values, 90817])}) for n in call.arguments]
            for result in map(world.call, (*wrong, Call("no_such_tool", call.arguments))):
                answered(result)
            answered(ParseError("unavailable_tool", f"Tool '{call.name}' is not available."))
            answered(ParseError(rng.choice(sorted(ERROR_KINDS)), f"at {values}"))
        for call in program:
            result = world.call(call)
            watch.see(result.text)
            answered(result)
    return watch


def all_leaks(suite, tasks) -> tuple[list[tuple[str, str, str]], int]:
    watches = [watch_a_play(suite, task) for task in tasks]
    return [leak for w in watches for leak in w.leaks], sum(w.texts for w in watches)


def test_omega_tells_no_reference_value_that_was_not_seen(suite):
    leaks, texts = all_leaks(suite, suite.tasks("all")[::20])
    assert not leaks, leaks[:5]
    assert texts > 2000


@pytest.mark.slow
def test_omega_tells_no_reference_value_that_was_not_seen_in_any_task(suite):
    leaks, texts = all_leaks(suite, suite.tasks("all"))
    print(f"{texts} texts of Ω in {len(suite.tasks('all'))} tasks, {len(leaks)} leaks")
    assert not leaks, leaks[:5]


def _with_arguments(error, tools):
    return f" {error.detail} (not {list(error.call.arguments.values())})"


def _with_the_text(*args):
    error = args[0]
    return "[hint] " + (error.text if isinstance(error, CallResult) else error.message)


@pytest.mark.parametrize(
    "name, leaky",
    [
        ("_argument_detail", _with_arguments),  # the value that was sent is told with the argument's name
        ("feedback_text", _with_the_text),  # the error's own words are repeated
    ],
)
def test_a_planted_leak_is_caught(suite, monkeypatch, name, leaky):
    monkeypatch.setattr(cues, name, leaky)
    leaks, _ = all_leaks(suite, suite.tasks("all")[::80])
    assert len({task for task, _, _ in leaks}) >= 5


def test_a_leak_in_a_note_is_caught(suite, monkeypatch):
    """A guideline that gives an example from a task is caught in that task."""
    task = next(t for t in suite.tasks("all") if t.id == "multi_turn_miss_param_0")
    value = max(values_of([suite.reference(task)[-1]]), key=len)
    text = f"change only what was asked, and only once (as {value})."
    monkeypatch.setattr(cues, "GUIDELINES", {**cues.GUIDELINES, "state_mismatch": text})
    leaks, _ = all_leaks(suite, [task])
    assert {found for _, found, _ in leaks} == {value}
