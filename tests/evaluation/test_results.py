"""Result files: what is written is what the package reads, and nothing that is read is dropped without a word."""

from __future__ import annotations

import json
from dataclasses import replace

import bfcl_folder  # noqa: F401 (skips without bfcl-eval)
import pytest

from seal_jax.chat.formats import get_format
from seal_jax.envs.verifier import Verifier
from seal_jax.evaluation.results import (
    NOT_A_CALL,
    read_call,
    read_results,
    result_files,
    result_line,
    write_results,
)
from seal_jax.types import Call, CallResult, ParseError, Step, Task, Trajectory, UserTurn

HERMES = get_format("hermes")
LS, REVEALED = Call("ls"), Call("sort", {"file_name": "a"})


def task(task_id: str = "multi_turn_base_0") -> Task:
    """Two turns; `sort` is revealed at the second."""
    doc = {"name": "ls", "parameters": {"properties": {}}}
    turns = (UserTurn("look"), UserTurn("", reveals=({**doc, "name": "sort"},)))
    return Task(task_id, "bfcl", task_id[11:].rsplit("_", 1)[0], task_id.rsplit("_", 1)[1], turns, (doc,))


def trajectory(turns, task_id: str = "multi_turn_base_0", stop="completed") -> Trajectory:
    return Trajectory(task_id, task(task_id).category, 0, 0, False, (), (), turns, stop)


@pytest.fixture
def read(tmp_path):
    """Reads lines (objects or raw text) against two known tasks."""

    def read(*lines, **options):
        path = tmp_path / "lines.jsonl"
        text = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
        path.write_bytes(b"\n".join(text) + b"\n")
        known = {i: task(i) for i in ("multi_turn_base_0", "multi_turn_base_1")}
        return read_results([path], known, **options)

    return read


def steps(read_back, task_id: str = "multi_turn_base_0"):
    return [list(turn) for turn in read_back.results[task_id].turns]


# --- out -------------------------------------------------------------------------------------------------------------
def test_files_lie_where_the_package_looks_for_them(tmp_path):
    turns = ((Step("<think>\nls?\n</think>\n\n" + HERMES.calls([LS]), (LS,)), Step("é \ud83d")),)
    rows = [trajectory(turns), trajectory(turns, "multi_turn_miss_func_3", "step_limit")]
    written = write_results(tmp_path, rows, decoder="qwen_fc", protocol="official", split="test")
    place = tmp_path / "Qwen_Qwen3-8B-FC" / "multi_turn"
    assert written == [place / f"BFCL_v4_multi_turn_{c}_result.json" for c in ("base", "miss_func")]
    line = json.loads(written[1].read_text("ascii"))
    assert line == {
        "id": "multi_turn_miss_func_3",
        "result": [[HERMES.calls([LS]), "é \ud83d"]],
        "protocol": "official",
        "stop": "step_limit",
    }
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["split"] == "test" and about["protocol"] == "official" and about["same_verdicts_in_the_package"]
    assert about["command"].startswith("bfcl evaluate --model Qwen/Qwen3-8B-FC --test-category multi_turn")
    # Written again, without the second category: its old file must not be scored.
    write_results(tmp_path, rows[:1], decoder="qwen_fc", protocol="official")
    assert list(place.iterdir()) == written[:1]


def test_an_unknown_decoder_or_protocol_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="decoder 'tiny' is not known"):
        write_results(tmp_path, [], decoder="tiny", protocol="official")
    with pytest.raises(ValueError, match="protocol 'strict' is not known"):
        write_results(tmp_path, [], decoder="qwen_fc", protocol="strict")
    assert not list(tmp_path.iterdir())


def test_a_strict_episode_reads_back_with_the_same_executed_and_rejected_steps(tmp_path):
    result = (CallResult(LS, "{}"),)
    malformed = ParseError("stray_reasoning_end", "")
    turns = (
        (
            Step(HERMES.calls([LS]), (LS,), results=result),
            Step(HERMES.calls([REVEALED]), (REVEALED,), ParseError("unavailable_tool", "")),
            Step("so </think>" + HERMES.calls([LS]), error=malformed),
            Step("Done."),
        ),
        (Step(HERMES.calls([LS]), error=ParseError("truncated", "", 9), truncated=True),),
    )
    files = write_results(tmp_path, [trajectory(turns, stop="truncated")], decoder="qwen_fc", protocol="seal")
    found = read_results(files, {"multi_turn_base_0": task()})
    assert found.results["multi_turn_base_0"].protocol == "seal"
    for mine, again in zip(turns, steps(found), strict=True):
        for a, b in zip(mine, again, strict=True):
            assert (a.text, a.calls if a.error is None else (), a.truncated) == (
                b.text,
                b.calls if b.error is None else (),
                b.truncated,
            )
            assert (a.error and a.error.kind) == (b.error and b.error.kind)
    # The same file under the package's rules: everything that looks like a call runs.
    official = read_results(files, {"multi_turn_base_0": task()}, protocol="official")
    assert [[s.calls for s in turn] for turn in steps(official)] == [[(LS,), (REVEALED,), (LS,), ()], [(LS,)]]


def test_written_and_read_trajectories_get_the_verdict_they_had(tmp_path):
    from seal_jax.envs.base import make_suite

    suite = make_suite("bfcl", categories=("base",))
    verifier, rows, before = Verifier(suite), [], {}
    for i, one in enumerate(suite.tasks("val")):
        programs = suite.reference(one)
        turns = tuple(
            tuple(Step(HERMES.calls([call]), (call,)) for call in (program[:-1] if i % 3 == 0 else program))
            for program in programs
        )
        rows.append(trajectory(turns, one.id))
        before[one.id] = verifier.verify(one, turns).reason
    files = write_results(tmp_path, rows, decoder="qwen_fc", protocol="official")
    known = {one.id: one for one in suite.tasks("all")}
    found = read_results(files, known)
    after = {i: verifier.verify(known[i], result.turns).reason for i, result in found.results.items()}
    assert after == before and len(set(after.values())) > 1 and not found.broken


def test_a_row_that_was_full_fails_in_the_written_file_too(tmp_path):
    """The package's request fails there: the turn that broke off is no turn of the result, though it stands by it."""
    from seal_jax.envs.base import make_suite
    from seal_jax.evaluation.scores import score

    suite = make_suite("bfcl", categories=("base",))
    known = {one.id: one for one in suite.tasks("all")}
    one = known["multi_turn_base_1"]
    turns = tuple(tuple(Step(HERMES.calls([c]), (c,)) for c in program) for program in suite.reference(one))
    row = replace(trajectory(turns, one.id, stop="context_limit"), protocol="official")
    assert Verifier(suite).verify_trajectory(one, row).reason == "force_terminated"
    files = write_results(tmp_path, [row], decoder="qwen_fc", protocol="official")
    line = json.loads(files[0].read_text())
    assert len(line["result"]) == len(one.turns) - 1
    assert line["unfinished"] == [step.text for step in turns[-1]]
    found = read_results(files, known)
    (scored,) = score(lambda protocol: suite, [one], found)
    assert scored.reason == "force_terminated" and [label for _, label in scored.turns] == ["pass"] * len(one.turns)


# --- in --------------------------------------------------------------------------------------------------------------
GOOD = {"id": "multi_turn_base_0", "decoded": [[["ls()"]], []]}


def test_every_line_that_cannot_be_used_is_named_and_counted(read):
    found = read(
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        b"",
        b'{"id": "multi_turn_base_1", "decoded": [',
        b"\xff\xfe",
        b"[" * 100_000,
        b"[1]",
        {"decoded": []},
        {"id": ["multi_turn_base_1"], "decoded": []},
        {"id": "multi_turn_base_200", "decoded": []},
        GOOD,
        {"id": "multi_turn_base_1", "result": "Error during inference: timed out"},
        {"id": "multi_turn_base_1", "decoded": []},
    )
    assert [(b.line, b.reason.split(":")[0]) for b in found.broken] == [
        (3, "json"),
        (4, "json"),
        (5, "json"),
        (6, "json"),
        (7, "id"),
        (8, "id"),
        (9, "id"),
        (10, "duplicate"),
        (11, "inference_error"),
        (12, "duplicate"),
    ]
    assert found.lines == 11 and list(found.results) == ["multi_turn_base_0"]
    assert {i: b.line for i, b in found.failed().items()} == {"multi_turn_base_1": 11}


@pytest.mark.parametrize(
    "line, words",
    [
        (b"\x1f\x8b\x08\x00", "json: the file is compressed; unpack it first"),
        (b"[" + json.dumps(GOOD).encode() + b"]", "json: a list, not an object; write one object a line"),
        (b"{", "json: Expecting property name .*; write one object a line"),
    ],
)
def test_a_line_that_is_no_object_says_how_to_mend_it(read, line, words):
    import re

    (broken,) = read(line).broken
    assert re.match(words, broken.reason) and broken.line == 1


@pytest.mark.parametrize(
    "line, words",
    [
        ({}, 'a line holds either "result" or "decoded"'),
        ({"result": [], "decoded": []}, 'a line holds either "result" or "decoded"'),
        ({"decoded": "[[]]"}, "'decoded' is a str, not a list of turns"),
        ({"result": None}, "'result' is a NoneType, not a list of turns"),
        ({"decoded": [[], None]}, r"decoded\[1\] is a NoneType, not a list of steps"),
        ({"decoded": [["ls()"]]}, r"decoded\[0\]\[0\] is 'ls\(\)', not a list of call strings"),
        ({"decoded": [[["ls()", 1]]]}, r"decoded\[0\]\[0\] is \['ls\(\)', 1\], not a list of call strings"),
        ({"result": [[["ls()"]]]}, r"result\[0\]\[0\] is \['ls\(\)'\], not text"),
        ({"result": [["", {"ls": "{}"}]]}, r"result\[0\]\[1\] is \{'ls': '\{\}'\}, not text"),
        ({"result": [], "unfinished": "ls()"}, r"unfinished\[0\] is a str, not a list of steps"),
        ({"result": [], "protocol": "strict"}, "protocol 'strict' is none of"),
    ],
)
def test_a_wrong_shape_fails_the_task_it_names(read, line, words):
    import re

    found = read({"id": "multi_turn_base_1", **line})
    (broken,) = found.broken
    assert re.search(words, broken.reason) and broken.reason.startswith("shape: ")
    assert list(found.failed()) == ["multi_turn_base_1"] and not found.results


@pytest.mark.parametrize(
    "source, call",
    [
        ("cd('a')", Call("cd", {}, ("a",))),
        (" mv('a', destination='b') ", Call("mv", {"destination": "b"}, ("a",))),
        ("f(x=-1, y=[1, {'k': None}], z=(1.5, True))", Call("f", {"x": -1, "y": [1, {"k": None}], "z": (1.5, True)})),
    ],
)
def test_a_plain_call_string_is_read(source, call):
    assert read_call(source) == call


@pytest.mark.parametrize(
    "source",
    [
        "",
        "pwd",
        "cd(",
        "cd('a'); ls()",
        "cd('a').keys()",
        "fs.cd('a')",
        "cd(folder=pwd())",
        "cd(folder='a' + 'b')",
        "cd(folder=x)",
        "cd(*['a'])",
        "cd(**{'folder': 'a'})",
        "cd(folder='a', folder='b')",  # Python refuses it when it compiles, not when it parses
        "cd(folder=f'{1}')",
        "cd(folder=[x for x in 'a'])",
        "__import__('os').getcwd()",
        "(lambda: 1)()",
        "cd(folder='\0')\0",
        "cd(folder='\ud83d')",
        "cd(folder=" + "-" * 200_000 + "1)",
        "cd(folder=" + "[" * 10_000 + "]" * 10_000 + ")",
        "cd(folder=" + "1" * 5_000 + ")",
        "cd(folder='" + "a" * 400_000 + "')",
    ],
)
def test_what_is_no_plain_call_becomes_one_that_fails(source):
    assert read_call(source) == Call(NOT_A_CALL, {"source": source})


def test_a_message_whose_call_went_wrong_is_told_from_prose(read):
    def kinds(decoder, *texts):
        found = read({"id": "multi_turn_base_0", "result": [list(texts)]}, decoder=decoder)
        return [(s.error and s.error.kind, s.calls) for s in steps(found)[0]]

    one_line = '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'  # the package wants line breaks there
    assert kinds("qwen_fc", one_line, "<tool_call>\n{'name': 'ls'}\n</tool_call>", HERMES.calls([LS])) == [
        ("undecodable", ()),
        ("python_literal", ()),
        (None, (LS,)),
    ]
    prose = ("Done.", "<think><tool_call></think>Done.", "so </think> Done.", "Done.<|im_end|>", "")
    assert kinds("qwen_fc", *prose) == [(None, ())] * 5
    for decoder in ("prompting", "toolace"):
        assert kinds(decoder, "[ls(]", "[ls()]", "Done (so far).", "I ran [1].") == [
            ("syntax", ()),
            (None, (LS,)),
            (None, ()),
            (None, ()),
        ]


def test_availability_counts_only_where_it_is_asked_for(read):
    line = {"id": "multi_turn_base_0", "decoded": [[["sort(file_name='a')"]], [["sort(file_name='a')"]]]}
    assert [s.error for turn in steps(read(line)) for s in turn] == [None, None]
    early, revealed = (s.error for turn in steps(read(line, protocol="seal")) for s in turn)
    assert early.kind == "unavailable_tool" and revealed is None


def test_settings_and_paths_that_cannot_be_are_refused(read, tmp_path):
    for options, words in (
        ({"decoder": "gpt"}, "--decoder=gpt is not known; choose one of"),
        ({"protocol": "lax"}, "--protocol=lax is not known"),
        ({"protocol": "seal", "decoder": "prompting"}, "no strict reading of --decoder=prompting"),
    ):
        with pytest.raises(ValueError, match=words):
            read(GOOD, **options)
    with pytest.raises(ValueError, match="there is no such file"):
        result_files([tmp_path / "none.jsonl"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="the folder holds no"):
        result_files([tmp_path / "empty"])


def test_only_the_qwen_handler_drops_reasoning():
    row = trajectory(((Step("<think>a</think>\nb"),),))
    assert result_line(row, "qwen_fc", "official")["result"] == [["b"]]
    assert result_line(row, "llama31", "official")["result"] == [["<think>a</think>\nb"]]
    assert result_line(row, "qwen_fc", "seal")["result"] == [["<think>a</think>\nb"]]
