"""Calls on per-episode instances: result strings, error kinds, limits, and nothing that leaks."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from seal_jax.envs import limits
from seal_jax.envs.execution import InstanceWorld, result_text
from seal_jax.envs.snapshot import MAX_VALUES, StateTooLarge, differences, snapshot
from seal_jax.types import Call


class Shelf:
    """A small tool class with one method per way a call can end."""

    def __init__(self) -> None:
        self.items: list = []
        self._secret = 0

    def put(self, item: str, count: int = 1, tags: list[str] = []) -> dict:  # noqa: B006 - the trap under test
        tags.append(item)
        self.items.append((item, count))
        return {"put": item, "tags": tags}

    def keep(self, box: dict) -> None:
        self.items.append(box)
        box["touched"] = True

    def refuse(self, how: str = "dict"):
        error = {"error": "shelf: locked"}
        return {"dict": error, "list": [error], "text": '{"error": "shelf: locked"}', "none": {"error": None}}[how]

    def upper(self, item: str) -> str:
        return item.upper()

    def age(self, year: int) -> int:
        return 2000 - int(year)

    def fail(self, kind: str):
        raise {"zero": ZeroDivisionError("division by zero"), "exit": SystemExit(3), "key": KeyError("k")}[kind]

    def choose(self, unit: str | None = None, size: float = 1.0) -> float:
        return size + len(unit)

    def spin(self) -> None:
        while True:
            pass

    def spin_and_swallow(self) -> dict:
        end = time.monotonic() + 20
        try:
            while time.monotonic() < end:
                pass
        except BaseException:
            return {"swallowed": True}
        return {}

    def sleep(self) -> None:
        time.sleep(20)

    def talk(self, n: int) -> str:
        return "x" * n

    def _private(self) -> str:
        return "secret"


class Echo:
    def say(self, text: str) -> str:
        return text


def world(**options) -> InstanceWorld:
    return InstanceWorld({"Shelf": Shelf()}, **options)


def test_results_become_strings_by_the_official_rule():
    assert result_text("as is") == "as is"
    assert result_text({"a": [1, None], "ö": True}) == '{"a": [1, null], "\\u00f6": true}'
    assert result_text({"a": {1, 2}}) == "{'a': {1, 2}}"
    assert result_text([1, "a"]) == "[1, 'a']"
    assert result_text(None) == "None"
    assert result_text(2.50) == "2.5"


@pytest.mark.parametrize(
    "call, text, error, detail",
    [
        (Call("put", {"item": "a"}), '{"put": "a", "tags": ["a"]}', "none", ""),
        (
            Call("put", {}),
            "Error during execution: Shelf.put() missing 1 required positional argument: 'item'",
            "missing_argument",
            "item",
        ),
        (
            # A name like no other: from Python 3.13 on the message would suggest the nearest one.
            Call("put", {"item": "a", "zzz": 2}),
            "Error during execution: Shelf.put() got an unexpected keyword argument 'zzz'",
            "unexpected_argument",
            "zzz",
        ),
        (
            Call("put", {"item": "a"}, ("b",)),
            "Error during execution: Shelf.put() got multiple values for argument 'item'",
            "unexpected_argument",
            "item",
        ),
        (
            Call("upper", {}, ("a", "b")),
            "Error during execution: Shelf.upper() takes 2 positional arguments but 3 were given",
            "unexpected_argument",
            "position 2",
        ),
        (Call("lift", {}), "Error during execution: name 'lift' is not defined", "unknown_tool", "lift"),
        (Call("_private", {}), "Error during execution: name '_private' is not defined", "unknown_tool", "_private"),
        (Call("print", {}, (1,)), "Error during execution: name 'print' is not defined", "unknown_tool", "print"),
        (Call("remove"), "Error during execution: Function call remove is not allowed.", "unknown_tool", "not allowed"),
        (
            Call("os.popen", {}, ("ls",)),
            "Error during execution: Function call popen is not allowed.",
            "unknown_tool",
            "not allowed",
        ),
        (
            Call("upper", {"item": 3}),
            "Error during execution: 'int' object has no attribute 'upper'",
            "argument_type",
            "item",
        ),
        (
            Call("age", {"year": "x"}),
            "Error during execution: invalid literal for int() with base 10: 'x'",
            "argument_type",
            "year",
        ),
        (
            Call("choose", {}),
            "Error during execution: object of type 'NoneType' has no len()",
            "argument_type",
            "",
        ),
        (Call("choose", {"unit": "m", "size": 2}), "3", "none", ""),
        (
            Call("choose", {"unit": "m", "size": "2"}),
            'Error during execution: can only concatenate str (not "int") to str',
            "argument_type",
            "size",
        ),
        (Call("fail", {"kind": "zero"}), "Error during execution: division by zero", "exception", "ZeroDivisionError"),
        (Call("fail", {"kind": "key"}), "Error during execution: 'k'", "exception", "KeyError"),
        (Call("fail", {"kind": "exit"}), "Error during execution: 3", "exception", "SystemExit"),
        (Call("refuse", {}), '{"error": "shelf: locked"}', "tool_error", ""),
        (Call("refuse", {"how": "list"}), "[{'error': 'shelf: locked'}]", "tool_error", ""),
        (Call("refuse", {"how": "text"}), '{"error": "shelf: locked"}', "tool_error", ""),
        (Call("refuse", {"how": "none"}), '{"error": null}', "none", ""),
    ],
    ids=str,
)
def test_how_a_call_can_end(call, text, error, detail):
    result = world().call(call)
    assert (result.text, result.error, result.detail) == (text, error, detail)
    assert result.call is call


def test_model_text_is_never_run():  # gorilla PR 1303: names and arguments once reached an evaluator
    for name in ("__import__('os').getcwd", "org/model-1.0:v2", "Shelf.put", "", "put\n", "a b"):
        assert world().call(Call(name, {"item": "a"})).error == "unknown_tool"


def test_arguments_are_copied_and_defaults_belong_to_one_world():
    first, box = world(), {"n": 1}
    assert first.call(Call("keep", {"box": box})).ok and box == {"n": 1}
    first.call(Call("put", {"item": "a"}))
    assert first.call(Call("put", {"item": "b"})).text == '{"put": "b", "tags": ["a", "b"]}'
    assert world().call(Call("put", {"item": "c"})).text == '{"put": "c", "tags": ["c"]}'
    assert Shelf.put.__defaults__ == (1, [])


def test_state_is_the_public_attributes():
    assert world().state() == {"Shelf": {"items": []}}


def test_world_refuses_a_wrong_map():
    with pytest.raises(ValueError, match="no method 'lift'"):
        InstanceWorld({"Shelf": Shelf()}, {"lift": "Shelf"})
    with pytest.raises(ValueError, match="instance 'Table', which is not in"):
        InstanceWorld({"Shelf": Shelf()}, {"put": "Table"})
    with pytest.raises(ValueError, match="offered by both"):
        InstanceWorld({"a": Shelf(), "b": Shelf()})
    with pytest.raises(ValueError, match="always refuses"):
        InstanceWorld({"a": type("Job", (), {"run": lambda self: None})()})


# --- limits ----------------------------------------------------------------------------------------------------------
def in_main_thread(work):
    return work()


def in_other_thread(work):
    box = []
    thread = threading.Thread(target=lambda: box.append(work()))
    thread.start()
    thread.join()
    return box[0]


@pytest.mark.parametrize("where", [in_main_thread, in_other_thread])
@pytest.mark.parametrize("tool", ["spin", "spin_and_swallow"])
def test_endless_call_ends_at_its_limit_and_the_world_lives_on(where, tool):
    here = world(time_limit_s=0.2)
    start = time.monotonic()
    result = where(lambda: here.call(Call(tool)))
    assert time.monotonic() - start < 2.0
    assert (result.error, result.detail) == ("time_limit", "0.2 s")
    assert result.text == "Error during execution: time limit exceeded"
    assert where(lambda: here.call(Call("upper", {"item": "a"}))).text == "A"


def test_sleeping_call_is_interrupted_in_the_main_thread_and_abandoned_elsewhere(monkeypatch):
    assert world(time_limit_s=0.1).call(Call("sleep")).error == "time_limit"
    monkeypatch.setattr(limits, "GRACE_S", 0.1)
    here = world(time_limit_s=0.1)
    assert in_other_thread(lambda: here.call(Call("sleep"))).error == "time_limit"
    # Its thread may still hold the instances, so the world is closed.
    assert here.call(Call("upper", {"item": "a"})).error == "time_limit"


def test_limit_leaves_handler_and_running_timer_alone():
    def handler(signum, frame):
        raise AssertionError("not yet")

    old = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        assert world(time_limit_s=0.1).call(Call("spin")).error == "time_limit"
        assert world().call(Call("upper", {"item": "a"})).ok
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_long_results_are_replaced():
    result = world(max_result_chars=10).call(Call("talk", {"n": 11}))
    assert (result.error, result.detail) == ("size_limit", "10 characters")
    assert result.text == "Error during execution: result of 11 characters exceeds the limit of 10"
    assert world(max_result_chars=10).call(Call("talk", {"n": 10})).text == "x" * 10


def test_all_calls_together_have_limits_too():
    here = world(time_limit_s=0.05)
    start = time.monotonic()
    details = [here.call(Call("spin")).detail for _ in range(100)]
    assert time.monotonic() - start < 3
    assert details[0] == "0.05 s" and details[-1] == "all calls"
    assert here.call(Call("upper", {"item": "a"})).error == "time_limit"

    here = world(max_result_chars=10)
    results = [here.call(Call("talk", {"n": 9})) for _ in range(100)]
    assert [r.error for r in results] == ["none"] * 35 + ["size_limit"] * 65  # 32 times the limit of one call


def test_text_that_only_looks_like_json_is_no_refusal():
    deep = "[" * 100_000 + '"error"'
    assert InstanceWorld({"Echo": Echo()}).call(Call("say", {"text": deep})).ok


def test_guard_refuses_before_the_call():
    here = world(guards={"talk": lambda arguments: "too long" if arguments["n"] > 5 else None})
    assert here.call(Call("talk", {"n": 6})).error == "time_limit"
    assert here.call(Call("talk", {}, (3,))).text == "xxx"
    assert here.call(Call("talk", {})).error == "missing_argument"


# --- snapshots -------------------------------------------------------------------------------------------------------
class Folder:
    def __init__(self, name, parent=None):
        self.name, self.parent, self.contents, self._time = name, parent, {}, object()


def test_snapshot_is_cut_loose_and_survives_cycles():
    root = Folder("r")
    root.contents["d"] = Folder("d", root)
    root.contents["self"] = root
    before = snapshot(root)
    assert before == snapshot(root)
    root.contents["d"].contents["x"] = 1
    assert before != snapshot(root)
    assert snapshot({"a": {1, 2}, "b": (1, [2])}) == {"a": frozenset({1, 2}), "b": [1, [2]]}
    with pytest.raises(StateTooLarge):
        snapshot(list(range(MAX_VALUES + 1)))
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(StateTooLarge):
        snapshot(deep)


def test_differences_persist_when_both_sides_move_on_alike():
    before = differences({"n": 1, "log": ["a"], "d": {"x": 1}}, {"n": 2, "log": ["b"], "d": {}})
    after = differences({"n": 2, "log": ["a", "c"], "d": {"x": 1, "y": 2}}, {"n": 3, "log": ["b", "c"], "d": {"y": 2}})
    assert before == after and len(before) == 4
    assert differences([1, 2], [2, 1]) and not differences([1, 2], [1, 2])
    assert differences(["a", "a"], ["a"]) and not differences({"x": 1.0}, {"x": 1})
    assert differences(True, 0) != differences(True, False) | {("x",)}
    assert differences(10**400, 1.5)
