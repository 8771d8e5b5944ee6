"""The real BFCL multi-turn tasks: loading, splits, worlds. test_bfcl_parity.py has the agreement with the package."""

from __future__ import annotations

import copy
import threading
from collections import Counter

import pytest
from bfcl_families import as_turns
from bfcl_folder import FOLDER

from seal_jax.envs.base import make_suite
from seal_jax.envs.bfcl import package, splits
from seal_jax.envs.bfcl.gold import parse_call
from seal_jax.envs.bfcl.loader import make_entry
from seal_jax.envs.bfcl.worlds import open_world
from seal_jax.envs.verifier import Verifier
from seal_jax.types import Call


def world_of(*classes: str, long_context: bool = False, time_limit_s: float = 5.0, **scenarios):
    return open_world({c: scenarios.get(c, {}) for c in classes}, long_context, time_limit_s, 1_000_000)


def files(**contents: str) -> dict:
    """A file-system scenario: a root folder `r` with files, and folders where the value is a dict."""

    def entry(value):
        if isinstance(value, dict):
            return {"type": "directory", "contents": {k: entry(v) for k, v in value.items()}}
        return {"type": "file", "content": value}

    return {"root": {"r": {"type": "directory", "contents": {k: entry(v) for k, v in contents.items()}}}}


# --- loading ---------------------------------------------------------------------------------------------------------
def test_tasks_have_the_published_shape(suite):
    tasks = suite.tasks("all")
    turns, empty, calls = Counter(), Counter(), Counter()
    for task in tasks:
        for program in suite.reference(task):
            turns[task.category] += 1
            empty[task.category] += not program
            calls[task.category] += len(program)
    assert len({t.id for t in tasks}) == 800
    assert turns == {"base": 734, "miss_func": 934, "miss_param": 934, "long_context": 734}
    assert empty == {"base": 3, "miss_func": 203, "miss_param": 203, "long_context": 3}
    assert calls == {"base": 1142, "miss_func": 1140, "miss_param": 1140, "long_context": 1203}
    assert not any(c.positional for t in tasks for p in suite.reference(t) for c in p)
    folder = FOLDER / "data" / "possible_answer"
    rows = [r for path in folder.glob("BFCL_v4_multi_turn_*.json") for r in package.read_json_lines(path)]
    gold = [parse_call(source) for row in rows for turn in row["ground_truth"] for source in turn]
    assert sum(bool(call.positional) for call in gold) == 160 and len(gold) == 4625
    reveals = [t for t in tasks if any(turn.reveals for turn in t.turns)]
    assert {t.category for t in reveals} == {"miss_func"} and len(reveals) == 200


def test_every_documented_tool_exists_and_takes_its_documented_arguments(suite):
    for task in suite.tasks("all")[::25]:
        world = suite.open(task)
        docs = [*task.tools, *(doc for turn in task.turns for doc in turn.reveals)]
        assert {doc["name"] for doc in docs} == world.tool_names()


def test_splits_are_disjoint_by_scenario_and_balanced(suite):
    assert not splits.TRAIN & splits.EVAL and splits.TRAIN | splits.EVAL == set(range(200))
    assert splits.VAL < splits.EVAL
    sizes = {"train": 400, "val": 100, "test": 300, "eval": 400, "all": 800}
    for split, size in sizes.items():
        tasks = suite.tasks(split)
        assert Counter(t.category for t in tasks) == dict.fromkeys(
            ("base", "miss_func", "miss_param", "long_context"), size // 4
        )
    assert {t.scenario for t in suite.tasks("train")}.isdisjoint(t.scenario for t in suite.tasks("eval"))
    for case_study in ("base_24", "miss_param_150", "base_147", "long_context_88"):
        assert f"multi_turn_{case_study}" in {t.id for t in suite.tasks("eval")}
    with pytest.raises(ValueError, match="dev.*train, val, test, eval, all"):
        suite.tasks("dev")


def test_language_hint_is_on_offered_docs_only():
    suite = make_suite("bfcl", categories=("miss_func",), language_hint=True)
    task = suite.tasks("all")[0]
    hint = package.language_hint(FOLDER)
    assert all(doc["description"].endswith(hint) for doc in task.tools)
    assert not any(doc["description"].endswith(hint) for turn in task.turns for doc in turn.reveals)
    assert len(suite.tasks("all")) == 200


def test_unknown_category_names_the_choices():
    with pytest.raises(ValueError, match="composite.*miss_func"):
        make_suite("bfcl", categories=("composite",))


DOCS = {
    "GorillaFileSystem": {
        "ls": {"name": "ls", "description": "d", "parameters": {}},
        "sort": {"name": "sort", "description": "d", "parameters": {"properties": {"file_name": {"type": "string"}}}},
    }
}


def row(n_turns: int, **changes):
    question = {
        "id": "multi_turn_miss_func_7",
        "question": [[{"role": "user", "content": f"turn {i}"}] for i in range(n_turns)],
        "initial_config": {},
        "involved_classes": ["GorillaFileSystem"],
    }
    return {**question, **changes}


def answer(*turns: list[str]):
    return {"id": "multi_turn_miss_func_7", "ground_truth": list(turns)}


def test_turn_counts_that_differ_are_refused_with_the_id():  # gorilla PR 1177
    with pytest.raises(ValueError, match="multi_turn_miss_func_7: question has 2 turns but ground_truth has 3"):
        make_entry(row(2), answer(["ls()"], ["ls()"], ["ls()"]), "miss_func", DOCS)


def test_held_out_tools_come_back_at_their_turn():  # gorilla PRs 1254 and 679
    question = row(5, missed_function={"3": ["sort"]})
    question["question"][3] = []
    gold = answer(["ls()"], ["ls()"], [], ["sort('a')"], ["ls()"])
    entry = make_entry(question, gold, "miss_func", DOCS)
    assert [doc["name"] for doc in entry.task.tools] == ["ls"]
    assert [[doc["name"] for doc in turn.reveals] for turn in entry.task.turns] == [[], [], [], ["sort"], []]
    assert entry.programs[3] == (Call("sort", {"file_name": "a"}),)  # under its documented name

    with pytest.raises(ValueError, match=r"missed_function\['3'\]: turn 3 has a user message"):
        make_entry(row(5, missed_function={"3": ["sort"]}), gold, "miss_func", DOCS)
    with pytest.raises(ValueError, match="turn 2, before the reveal, has a ground truth"):
        late = answer(["ls()"], ["ls()"], ["ls()"], ["sort('a')"], ["ls()"])
        make_entry(question, late, "miss_func", DOCS)
    with pytest.raises(ValueError, match="no involved class documents 'fly'"):
        make_entry({**question, "missed_function": {"3": ["fly"]}}, gold, "miss_func", DOCS)
    with pytest.raises(ValueError, match=r"question\[4\] must hold exactly one user message"):
        empty = copy.deepcopy(question)
        empty["question"][4] = []
        make_entry(empty, gold, "miss_func", DOCS)


def test_rows_that_are_not_aligned_are_refused():
    with pytest.raises(ValueError, match="multi_turn_miss_func_8.*not row-aligned"):
        make_entry(row(1), {**answer(["ls()"]), "id": "multi_turn_miss_func_8"}, "miss_func", DOCS)


def test_reference_calls_are_parsed_as_literals_and_never_run():
    assert parse_call("f(1, -2.5, a=[1, {'k': None}], b=True)") == Call(
        "f", {"a": [1, {"k": None}], "b": True}, (1, -2.5)
    )
    for source, problem in {
        "f(": "not a Python expression",
        "1 + 1": "not a call",
        "os.getcwd()": "not a call of a plain name",
        "f(a=g())": "not a literal",
        "f(a=__import__('os'))": "not a literal",
        "f(**{'a': 1})": "unpacks a mapping",
    }.items():
        with pytest.raises(ValueError, match=problem):
            parse_call(source)


def test_missing_or_other_package_says_what_to_run(monkeypatch):
    def not_found(name):
        raise package.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package.importlib.metadata, "version", not_found)
    with pytest.raises(ImportError, match="pip install --no-deps bfcl-eval==2026.3.23$"):
        make_suite("bfcl")
    monkeypatch.setattr(package.importlib.metadata, "version", lambda name: "2025.1.1")
    with pytest.raises(ImportError, match="needs bfcl-eval 2026.3.23, but 2025.1.1 is installed.*pip install"):
        make_suite("bfcl")


# --- tools and worlds ------------------------------------------------------------------------------------------------
def test_dot_is_the_current_folder():  # gorilla PR 1060
    world = world_of("GorillaFileSystem", GorillaFileSystem=files(**{"a.txt": "", "b.txt": ""}))
    assert world.call(parse_call("cd(folder='.')")).text == '{"current_working_directory": "r"}'
    assert world.call(parse_call("find(path='.', name='txt')")).text == '{"matches": ["./a.txt", "./b.txt"]}'


def test_numbers_compare_as_printed():  # gorilla 914: 22 and 22.0 are different result strings, officially
    texts = [
        world_of("VehicleControlAPI").call(Call("adjustClimateControl", {"temperature": t})).text for t in (22, 22.0)
    ]
    assert texts[0] != texts[1]


def test_find_minds_its_path():  # gorilla PR 1225
    world = world_of("GorillaFileSystem", GorillaFileSystem=files(z="", docs={}))
    assert world.call(parse_call("find(path='docs', name='z')")).text == '{"matches": []}'
    missing = world.call(parse_call("find(path='missing', name='x')"))
    assert missing.error == "tool_error" and missing.text.startswith('{"error": "find: \'missing\'')


def test_a_second_run_of_a_task_starts_clean(suite):  # mlcommons/endpoints 392
    task = suite.tasks("all")[0]
    suite.open(task).call(parse_call("touch('z1.txt')"))
    assert "z1.txt" not in suite.open(task).call(parse_call("ls()")).text


def test_denied_names_do_not_stop_other_calls():  # gorilla PRs 724 and 730
    world = world_of("GorillaFileSystem", GorillaFileSystem=files(document={}, a=""))
    assert world.call(parse_call("rm(file_name='a')")).ok
    denied = world.call(parse_call("remove('a')"))
    assert denied.text == "Error during execution: Function call remove is not allowed."
    assert world.call(parse_call("cd(folder='document')")).ok


def test_comment_while_logged_out_is_a_tool_error():  # gorilla PR 1240
    result = world_of("TwitterAPI").call(Call("comment", {"tweet_id": 0, "comment_content": "x"}))
    assert result.error == "tool_error" and result.text.startswith('{"error": ')


def test_pinned_behaviour_of_cd_echo_and_sort():  # gorilla 1133 and 1367
    world = world_of("GorillaFileSystem", GorillaFileSystem=files(docs={"x": {}}, one="b a"))
    assert "Only one folder level at a time" in world.call(parse_call("cd('docs/x')")).text
    refused = world.call(parse_call("echo(content='hi', file_name='new.txt')"))  # older releases created the file
    assert refused.error == "tool_error" and "No such file" in refused.text
    assert "b a" in world.call(parse_call("sort('one')")).text


def test_result_strings_follow_the_official_rule():
    world = world_of("GorillaFileSystem", "MathAPI", GorillaFileSystem=files(docs={}, f="中"))
    assert world.call(parse_call("touch('n')")).text == "None"
    assert world.call(parse_call("cd('docs')")).ok and world.call(parse_call("cd('..')")).text == "{}"
    assert world.call(parse_call("logarithm(10, 10, 5)")).text == "{'result': mpf('1.0')}"
    assert "\\u4e2d" in world.call(parse_call("cat('f')")).text


def test_order_of_calls_shows_in_results_but_not_in_state():
    scenario = files(docs={})
    worlds = [world_of("GorillaFileSystem", GorillaFileSystem=scenario) for _ in range(2)]
    for world, order in zip(worlds, ("pq", "qp"), strict=True):
        for name in order:
            world.call(Call("touch", {"file_name": name}))
    assert worlds[0].state() == worlds[1].state()
    assert worlds[0].call(Call("ls")).text != worlds[1].call(Call("ls")).text


def test_text_that_looks_like_a_call_is_stored_as_written():
    """The official executor rewrites `sort (x)` inside string arguments; that corruption is not copied."""
    world = world_of("GorillaFileSystem", GorillaFileSystem=files(docs={}))
    text = "please sort (x) then cd(y)"
    world.call(Call("touch", {"file_name": "n"}))
    world.call(Call("echo", {"content": text, "file_name": "n"}))
    assert text in world.call(Call("cat", {"file_name": "n"})).text


def test_default_lists_of_post_tweet_do_not_travel_between_worlds():
    def tweet_and_mention():
        world = world_of("TwitterAPI", TwitterAPI={"authenticated": True})
        world.call(Call("post_tweet", {"content": "first"}))
        world.call(Call("mention", {"tweet_id": 0, "mentioned_usernames": ["@ann"]}))
        return world, world.call(Call("post_tweet", {"content": "second"})).text

    (one, first), (_, again) = tweet_and_mention(), tweet_and_mention()
    assert first == again and "@ann" in first  # within a world the default stays one list, as upstream
    fresh = world_of("TwitterAPI", TwitterAPI={"authenticated": True})
    assert "@ann" not in fresh.call(Call("post_tweet", {"content": "x"})).text
    assert one.state() != fresh.state()


def test_long_context_payloads_do_not_travel_between_worlds():
    worlds = [world_of("TravelAPI", long_context=True) for _ in range(2)]
    cards = [world.state()["TravelAPI"]["credit_card_list"] for world in worlds]
    key = next(iter(cards[0]))
    assert cards[0] == cards[1] and cards[0][key] is not cards[1][key]
    cards[0][key]["balance"] = -1
    assert cards[1][key].get("balance") != -1
    assert world_of("TravelAPI", long_context=True).state()["TravelAPI"]["credit_card_list"][key].get("balance") != -1


def test_precision_settings_of_the_process_are_put_back():
    import decimal

    import mpmath

    before = mpmath.mp.dps, decimal.getcontext().prec
    world = world_of("MathAPI")
    assert world.call(Call("logarithm", {"value": 2, "base": 10, "precision": 77})).ok
    assert world.call(Call("square_root", {"number": 2, "precision": 77})).ok
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before


@pytest.mark.parametrize(
    "source",
    [
        "power(2, 1000000000)",
        "power(base=-7, exponent=1000000000)",
        "round_number(5, -1000000000)",
        "square_root(2, 1000000000)",
        "logarithm(2, 10, 1000000000)",
    ],
)
def test_sums_that_would_never_end_are_refused(source):
    result = world_of("MathAPI").call(parse_call(source))
    assert result.error == "time_limit" and result.text.startswith("Error during execution: time limit exceeded")


def test_worlds_run_in_other_threads(suite):
    tasks, results = suite.tasks("all")[::100], {}

    def play(worker: int) -> None:
        verifier = Verifier(suite)
        results[worker] = [verifier.verify(t, as_turns(suite.reference(t))).reward for t in tasks]

    threads = [threading.Thread(target=play, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [1.0] * len(tasks), 1: [1.0] * len(tasks)}
