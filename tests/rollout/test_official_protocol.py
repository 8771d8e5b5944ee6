"""The official protocol on real BFCL tasks: what the model reads, when a turn and an episode end, and the verdict.

The oracle is bfcl-eval itself: its handlers' prompt functions are cut out of the installed source and run here, and
its checker (bfcl_official.py) grades what was decoded.
"""

import ast
import copy
import functools
import json
import re
from types import SimpleNamespace

import pytest
from bfcl_folder import FOLDER
from bfcl_official import Official

from seal_jax.assembly import official_collector
from seal_jax.chat.formats import get_format
from seal_jax.chat.official import DECODERS
from seal_jax.chat.official_formats import WireTexts, official_format
from seal_jax.chat.tokenizer import ByteTokenizer
from seal_jax.config import default_config
from seal_jax.envs.base import make_suite
from seal_jax.envs.bfcl import package
from seal_jax.envs.verifier import Verifier
from seal_jax.evaluation.strict import evaluate
from seal_jax.interface import BARE
from seal_jax.rollout.collector import Collector
from seal_jax.rollout.engine import Sampled
from seal_jax.rollout.episode import Episode, Limits, official_limits, render_prompt
from seal_jax.rollout.work import Work
from seal_jax.types import Call

TEXTS = WireTexts(package.language_hint(FOLDER), package.prompting_system_prompt())
OFFICIAL = {name: official_format(name, TEXTS) for name in ("hermes", "llama31", "toolace")}
HERMES = OFFICIAL["hermes"]
WIDE = official_limits(context=10_000_000, max_suffix_tokens=10_000_000)
SEAL = Limits(max_new_tokens=4096, max_suffix_tokens=10_000_000, max_context=10_000_000)


@pytest.fixture(scope="module")
def tasks(suite):
    return {task.id: task for task in suite.tasks("all")}


class Player:
    """An episode that is told what the policy says, in words."""

    def __init__(self, suite, task, chat=HERMES, limits=WIDE):
        self.tokenizer = ByteTokenizer(chat.special_tokens)
        prompt = render_prompt(task, chat, self.tokenizer, BARE)
        self.chat, self.read = chat, list(prompt)
        self.episode = Episode(task, suite.open(task), chat, self.tokenizer, BARE, limits, prompt_ids=prompt)

    def reads(self):
        """Everything the model has before it, as text."""
        self.read += self.episode.take_pending()
        return self.tokenizer.decode(self.read)

    def says(self, text, end=True):
        self.reads()
        ids = self.tokenizer.encode(text + (self.chat.stop_tokens[0] if end else ""))
        self.read += ids
        self.episode.receive(ids, [0.0] * len(ids), truncated=not end)
        return self.episode.last_step


def as_text(chat, program):
    """Calls as the package would write them back into its history."""
    if chat is HERMES:
        bodies = [f'{{"name": "{c.name}", "arguments": {json.dumps(c.arguments)}}}' for c in program]
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if chat is OFFICIAL["llama31"]:
        bodies = [{"name": c.name, "parameters": c.arguments} for c in program]
        return "; ".join(map(json.dumps, bodies)) if len(bodies) > 1 else repr(bodies[0])  # one is read as Python
    return f"[{', '.join(map(str, program))}]"


# --- what the model reads --------------------------------------------------------------------------------------------
rows_of = functools.cache(package.read_json_lines)


@functools.cache
def source(file):
    return (FOLDER / "model_handler" / file).read_text(encoding="utf-8")


def cut_out(file, *names, **space):
    """Functions and methods of one of the package's source files, as a namespace."""
    tree = ast.parse(source(file))
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names]
    assert {n.name for n in found} == set(names)
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    exec(compile(ast.Module(found, []), file, "exec"), space)
    return space


@functools.cache
def handler_functions(name):
    """(texts, formulate_system_prompt, _format_prompt, QwenFCHandler's reading of a response) of a handler."""
    from bfcl_eval.constants import default_prompts

    wire = {k: v for k, v in vars(default_prompts).items() if not k.startswith("__")}
    utils = cut_out(
        "utils.py",
        *("formulate_system_prompt", "parse_prompt_variation_params", "format_function_doc"),
        **(wire | {"json": json, "re": re}),
    )
    file = {"hermes": "qwen_fc.py", "llama31": "llama_3_1.py", "toolace": "llama.py"}[name]
    own = cut_out(f"local_inference/{file}", "_format_prompt", json=json)
    qwen = cut_out("local_inference/qwen_fc.py", "_extract_tool_calls", "_parse_query_response_prompting")
    qwen |= {"json": json, "re": re}
    return wire, utils["formulate_system_prompt"], own["_format_prompt"], qwen


class Package:
    """The prompting loop of bfcl-eval for one task: its messages, and its handler's `_format_prompt`."""

    def __init__(self, name, task_id):
        wire, system_prompt, self.format, qwen = handler_functions(name)
        self.name, self.handler = name, SimpleNamespace(model_name="Team-ACE/ToolACE-2-8B")
        self.handler._extract_tool_calls = qwen["_extract_tool_calls"]
        self.parse = qwen["_parse_query_response_prompting"]
        category, number = task_id.removeprefix("multi_turn_").rsplit("_", 1)
        row = rows_of(FOLDER / "data" / f"BFCL_v4_multi_turn_{category}.json")[int(number)]
        docs = []
        for involved in row["involved_classes"]:
            file = package.CLASS_MODULES[involved][1]
            docs += rows_of(FOLDER / "data" / "multi_turn_func_doc" / f"{file}.json")
        held = {
            n: next(d for d in docs if d["name"] == n) for ns in row.get("missed_function", {}).values() for n in ns
        }
        self.held_out = {turn: [held[n] for n in names] for turn, names in row.get("missed_function", {}).items()}
        self.functions = copy.deepcopy([d for d in docs if d["name"] not in held])
        for doc in self.functions:
            doc["description"] += " Note that the provided function is in Python 3 syntax."
        self.question, self.messages, self.template = row["question"], [], wire
        if name == "toolace":
            system = system_prompt(wire["DEFAULT_SYSTEM_PROMPT_FORMAT"], self.functions)
            self.messages.append({"role": "system", "content": system})
        self.turn = -1

    def next_turn(self):
        self.turn += 1
        if str(self.turn) in self.held_out:
            text = self.template["DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING"]
            content = text.format(functions=self.held_out[str(self.turn)])
            self.messages.append({"role": "user", "content": content})
        else:
            self.messages += self.question[self.turn]

    def answered(self, text, results=()):
        message = {"role": "assistant", "content": text}
        if self.name == "hermes":
            usage = SimpleNamespace(prompt_tokens=0, completion_tokens=0)
            response = SimpleNamespace(choices=[SimpleNamespace(text=text)], usage=usage)
            message = self.parse(self.handler, response)["model_responses_message_for_chat_history"]
        self.messages.append(message)
        role = "ipython" if self.name == "toolace" else "tool"
        self.messages += [{"role": role, "content": result} for result in results]

    def prompt(self):
        return self.format(self.handler, self.messages, self.functions)


SOME = [
    *("multi_turn_base_0", "multi_turn_base_77", "multi_turn_miss_func_33", "multi_turn_miss_func_199"),
    *("multi_turn_miss_param_102", "multi_turn_long_context_4"),
]


@pytest.mark.parametrize("task_id", SOME)
@pytest.mark.parametrize("name", OFFICIAL)
def test_whole_conversations_are_the_packages_byte_for_byte(suite, tasks, name, task_id):
    task, chat = tasks[task_id], OFFICIAL[name]
    player, theirs = Player(suite, task, chat), Package(name, task_id)
    for program in suite.reference(task):
        theirs.next_turn()
        assert player.reads() == theirs.prompt()
        for calls in (program, program[:1]):
            if calls:
                text = as_text(chat, calls)
                step = player.says(text)
                assert step.calls == tuple(calls)
                theirs.answered(text, [r.text for r in step.results])
                assert player.reads() == theirs.prompt()
        theirs.answered("Done.")
        player.says("Done.")
    assert player.episode.stop == "completed"


def test_every_opening_prompt_is_the_packages(suite, tasks):
    for name, chat in OFFICIAL.items():
        for task_id in list(tasks)[::37]:
            theirs = Package(name, task_id)
            theirs.next_turn()
            task = tasks[task_id]
            ours = chat.prompt(task.tools, task.turns[0].user, task.system) + chat.assistant_open
            assert ours == theirs.prompt(), (name, task_id)


def test_the_hint_is_there_once(suite, tasks):
    hinted = make_suite("bfcl", language_hint=True)
    for task in hinted.tasks("val")[:8]:
        plain = tasks[task.id]
        assert HERMES.prompt(task.tools, "x") == HERMES.prompt(plain.tools, "x")
        assert TEXTS.hint not in get_format("hermes").prompt(plain.tools, "x")


def test_reasoning_and_words_beside_calls_stay_in_our_row_only(suite, tasks):
    """The package renders its history anew, we never do: the stated difference."""
    task = tasks["multi_turn_base_0"]
    player, theirs = Player(suite, task), Package("hermes", task.id)
    theirs.next_turn()
    text = "Let me look. " + as_text(HERMES, [Call("ls")] * 2)
    step = player.says(text)
    theirs.answered(text, [r.text for r in step.results])
    assert "Let me look." in player.reads() and "Let me look." not in theirs.prompt()
    assert "</tool_call><tool_call>" in theirs.prompt()  # no newline between two equal calls


def test_formats_without_an_official_handler_are_refused():
    with pytest.raises(ValueError, match="'tiny' has no official protocol; choose one of"):
        official_format("tiny", TEXTS)


# --- the episode -----------------------------------------------------------------------------------------------------
official_checker = functools.cache(Official)


def graded(suite, task, player):
    """Our verdict of the episode, checked against the package's."""
    trajectory = player.episode.trajectory()
    assert trajectory.protocol == player.episode.limits.protocol
    verdict = Verifier(suite).verify_trajectory(task, trajectory)
    decoded = [[DECODERS["qwen_fc"](step.text) for step in turn] for turn in trajectory.turns]
    assert verdict.reason == official_checker().check(task, decoded)
    return verdict


def play_reference(player, suite, task, upto):
    for program in suite.reference(task)[:upto]:
        if program:
            player.says(as_text(HERMES, program))
        player.says("Done.")


LOOK = as_text(HERMES, [Call("pwd")])


def file_system_task(tasks, category):
    return next(t for t in tasks.values() if "GorillaFileSystem" in t.domains and t.category == category)


def test_the_21st_executed_step_of_a_turn_ends_the_episode(suite, tasks):
    task = file_system_task(tasks, "base")
    n = len(task.turns)
    # in the last turn it is graded as it stands, and the work was done
    player = Player(suite, task)
    play_reference(player, suite, task, n - 1)
    player.says(as_text(HERMES, suite.reference(task)[-1]))
    for _ in range(19):
        player.says(LOOK)
        assert not player.episode.done
    player.says(LOOK)
    assert player.episode.stop == "step_limit" and len(player.episode.turns[-1]) == 21
    assert graded(suite, task, player).reason == "valid"
    # in an earlier turn the rest of the conversation is missing
    player = Player(suite, task)
    play_reference(player, suite, task, n - 2)
    player.says(as_text(HERMES, suite.reference(task)[-2]))
    for _ in range(20):
        player.says(LOOK)
    assert player.episode.stop == "step_limit"
    assert graded(suite, task, player).reason == "force_terminated"


def test_there_is_no_limit_over_the_turns_together(suite, tasks):
    task = file_system_task(tasks, "base")
    player = Player(suite, task)
    for program in suite.reference(task):
        player.says(as_text(HERMES, program))
        for _ in range(15):
            player.says(LOOK)
        player.says("Done.")
    assert player.episode.stop == "completed" and sum(map(len, player.episode.turns)) > 40
    assert graded(suite, task, player).reason == "valid"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "pwd", "arguments": {}}</tool_call>',  # no newlines
        '<tool_call>\n{"name": "pwd"}\n</tool_call>',
        "<tool_call>\nnot json\n</tool_call>",
        "I am done.",
    ],
)
def test_what_does_not_decode_ends_the_turn(suite, tasks, text):
    task = file_system_task(tasks, "base")
    player = Player(suite, task)
    step = player.says(text)
    assert player.episode.turn == 1 and step is None
    step = player.episode.turns[0][0]
    assert step.results == () and (step.error is not None) == ("tool_call" in text)
    play = Player(suite, task, get_format("hermes"), SEAL)
    play.says(text)
    # the paper's protocol reads calls without newlines, and lets the policy try again
    assert play.episode.turn == (1 if text == "I am done." else 0)
    for _ in range(len(task.turns) - 1):
        player.says("Done.")
    assert graded(suite, task, player).reason == "empty_turn"


def test_tools_that_are_not_offered_execute_in_the_official_protocol_only(suite, tasks):
    task = next(t for t in tasks.values() if t.category == "miss_func")
    reveal = next(i for i, turn in enumerate(task.turns) if turn.reveals)
    held_out = {doc["name"] for doc in task.turns[reveal].reveals}
    program = next(p for p in suite.reference(task)[reveal:] if any(c.name in held_out for c in p))
    text = as_text(HERMES, [c for c in program if c.name in held_out])
    step = Player(suite, task).says(text)
    assert step.error is None and all(r.error != "unavailable_tool" for r in step.results)
    step = Player(suite, task, get_format("hermes"), SEAL).says(text)
    assert step.error.kind == "unavailable_tool" and step.results == ()
    # a whole episode: the reference itself, with the calls of the reveal turn made a turn too early as well
    player = Player(suite, task)
    for at, program in enumerate(suite.reference(task)):
        early = suite.reference(task)[at + 1] if at + 1 == reveal else ()
        for calls in (early, program):
            if calls:
                player.says(as_text(HERMES, calls))
        player.says("Done.")
    graded(suite, task, player)


def test_reference_episodes_are_valid_for_both(suite, tasks):
    played = 0
    for task in list(tasks.values())[::41]:
        player = Player(suite, task)
        play_reference(player, suite, task, len(task.turns))
        assert graded(suite, task, player).reason == "valid"
        played += 1
    assert played > 10


def test_a_cut_message_is_read_as_it_is_and_closed_for_the_next(suite, tasks):
    task = file_system_task(tasks, "base")
    player = Player(suite, task)
    step = player.says(LOOK, end=False)
    assert step.calls == (Call("pwd"),) and step.truncated and not player.episode.done
    assert LOOK + "<|im_end|>\n<|im_start|>user\n<tool_response>" in player.reads()
    player.says("I have to think about", end=False)
    assert player.episode.turn == 1 and "about<|im_end|>\n<|im_start|>user\n" in player.reads()
    assert player.episode.segments[-1].source == "template"


def test_a_row_that_is_full_fails_even_in_its_last_turn(suite, tasks):
    """The package's request fails there, and its result is an error message instead of turns."""
    task = file_system_task(tasks, "base")
    wide = Player(suite, task)
    play_reference(wide, suite, task, len(task.turns) - 1)
    wide.says(as_text(HERMES, suite.reference(task)[-1]))
    used = len(wide.read)
    tight = Player(suite, task, limits=official_limits(context=used + 20, max_suffix_tokens=10_000_000))
    play_reference(tight, suite, task, len(task.turns) - 1)
    tight.reads()
    assert tight.episode.room == min(4096, used + 20 - 2 - len(tight.read))
    tight.says(as_text(HERMES, suite.reference(task)[-1]))
    assert tight.episode.stop == "context_limit" and len(tight.episode.turns) == len(task.turns)
    verdict = Verifier(suite).verify_trajectory(task, tight.episode.trajectory())
    assert verdict.reward == 0.0 and verdict.reason == "force_terminated"


def test_results_are_never_clipped(suite, tasks):
    task = next(t for t in tasks.values() if t.category == "long_context" and "GorillaFileSystem" in t.domains)
    player = Player(suite, task)
    step = player.says(as_text(HERMES, [Call("ls"), Call("find", {"path": ".", "name": ""})]))
    assert max(len(r.text) for r in step.results) > 100
    shown = player.reads()
    assert all(r.text in shown for r in step.results)


# --- calls that hold calls -------------------------------------------------------------------------------------------
NESTED = [
    "[touch(file_name='a'), echo(content=cat(file_name='a'), file_name='b'), cat(file_name='b')]",
    "[echo(content=mkdir(dir_name='made'))]",
    "[mkdir(dir_name=touch(file_name='first')), ls()]",
    "[mkdir(dir_name={'touch': {'file_name': 'first'}}), ls()]",  # a dict of dicts is a call
    "[mkdir(dir_name={'x': {'touch': {'file_name': 'first'}}, 'y': 1}), ls()]",
    "[mkdir(dir_name=touch(file_name=mkdir(dir_name='inner'))), ls()]",
    "[mkdir(dir_name=cd(folder='nowhere', more=1)), ls()]",
    "[mkdir(dir_name=nothing(x=1)), ls()]",
    "[nothing(x=touch(file_name='first')), ls()]",  # the unknown name fails before its argument runs
    "[mkdir(dir_name=1e999), ls()]",
    "[mkdir(wrong=touch(file_name='first')), ls()]",
    "[mkdir(dir_name={'it\\'s': 1}), ls()]",
]


@pytest.mark.parametrize("text", NESTED)
def test_calls_inside_arguments_run_as_the_package_evaluates_them(suite, tasks, text):
    task = tasks["multi_turn_base_0"]
    world, calls = suite.open(task), DECODERS["prompting"](text)
    ours = [world.call(call) for call in calls]
    checker = official_checker()
    with checker.namespace() as name:
        theirs, instances = checker.execute(name, checker.rows[task.id][0], [str(call) for call in calls])
    assert [r.call for r in ours] == list(calls)
    for result, expected in zip(ours, theirs, strict=True):
        assert result.text == expected
    state, expected = world.state()["GorillaFileSystem"], instances["GorillaFileSystem"]
    assert all(value == getattr(expected, name) for name, value in state.items())


# --- a result names its protocol -------------------------------------------------------------------------------------
class Says:
    """An engine whose policy says one thing."""

    group_buckets = (4,)
    work = Work()

    def __init__(self, text):
        self.text = text

    def start(self, params, prompts, rollouts, *, timer):
        return self

    def act_in_parts(self, pending, *, temperature, keys):
        yield
        ids = tuple(ByteTokenizer(HERMES.special_tokens).encode(self.text + HERMES.stop_tokens[0]))
        return {row: Sampled(ids, (-0.5,) * len(ids), False) for row in pending}


def test_an_evaluation_is_named_by_its_protocol(suite, tasks):
    config = default_config()
    config.suite, config.chat = "bfcl", "hermes"
    config.buckets.suffix, config.limits.max_new_tokens = (100_000,), 512
    chat = get_format("hermes")
    seal = Collector(Says("No."), suite, chat, ByteTokenizer(chat.special_tokens), SEAL, seed=0)
    official = official_collector(config, seal, context=200_000)
    assert official.limits == official_limits(context=200_000, max_suffix_tokens=100_000, max_new_tokens=512)
    some, told = [tasks["multi_turn_base_0"], tasks["multi_turn_miss_func_0"]], []
    results = {
        c.limits.protocol: evaluate(None, c, some, "test", lambda done, total: told.append(done))
        for c in (seal, official)
    }
    assert {p: (r.protocol, r.name) for p, r in results.items()} == {
        "seal": ("seal", "test"),
        "official": ("official", "test_official"),
    }
    assert results["official"].metrics()["eval/test_official/success"] == 0.0
    assert results["seal"].metrics()["eval/test/n"] == 2.0 and told[-1] == 2
    for name, result in results.items():
        assert {t.protocol for t in result.trajectories} == {name}
        reveal = "I have updated some more functions"
        shown = official.tokenizer.decode(result.trajectories[1].suffix_ids)
        line = next(line for line in shown.splitlines() if reveal in line)
        before = shown[: shown.index(line)].rstrip("\n").splitlines()[-1]
        assert before.startswith("[{'name':" if name == "official" else '[{"name":')


@pytest.mark.slow
def test_a_run_reports_by_both_protocols(tmp_path):
    from seal_jax import loop
    from seal_jax.config import validate
    from seal_jax.run import Run
    from seal_jax.telemetry.recorder import read_jsonl, read_trajectories

    config = default_config()
    config.suite, config.chat, config.rounds = "bfcl", "hermes", 0
    config.eval.test, config.eval.category, config.eval.protocols = 1, "base", ("seal", "official")
    config.buckets.prompt, config.buckets.suffix, config.buckets.chunk = (32768,), (1024,), (512,)
    config.buckets.groups, config.limits.max_new_tokens = (1,), 8
    config.policy.overrides.update({"d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "head_dim": 8})
    config.policy.overrides.update({"d_ff": 16, "max_position": 65536})
    validate(config)
    with Run(config, tmp_path) as run:
        summary = loop.train(run)
    assert summary["before"] == {"test": 0.0, "test_official": 0.0}
    assert summary["protocols"] == {"test": "seal", "test_official": "official"}
    lines = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [line["protocol"] for line in lines] == ["seal", "official"]
    assert "eval/test_official/success" in lines[1]["metrics"]
    assert next(read_jsonl(tmp_path / "provenance.jsonl"))["protocols"] == ["seal", "official"]
    stops = {}
    for name in ("test", "test_official"):
        (row,) = read_trajectories(tmp_path / "trajectories" / f"00000.report.{name}.jsonl.gz")
        stops[row["protocol"]] = row["stop"]
    assert stops["seal"] == "truncated" and stops["official"] in ("completed", "context_limit")
