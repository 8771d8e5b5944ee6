"""Our verdicts against the package's own checker, and labels that hold up: reference programs, perturbations, slips.

Parity runs have `official_quirks` on (seal_jax/envs/bfcl/quirks.py says what that means); what differs without it is
counted. The long runs: `python -m pytest -s -m slow tests/envs/test_bfcl_parity.py`.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import bfcl_families
import bfcl_folder  # noqa: F401 (skips without bfcl-eval)
import pytest
from bfcl_families import PERTURBATIONS, Family, Played, acts_early_and_repeats, as_turns, judgement, judgements
from bfcl_official import Official

from seal_jax.diagnosis import diagnose, release_labels
from seal_jax.envs.base import make_suite
from seal_jax.envs.bfcl.gold import parse_call
from seal_jax.envs.bfcl.worlds import open_quirky_pair, open_world
from seal_jax.envs.verifier import Verifier, went_astray
from seal_jax.evaluation.results import read_call
from seal_jax.types import EXCLUDED_LABELS, SUCCESS_LABELS, Call, Unevaluated, Verdict

SEED = 2026


@pytest.fixture(scope="module")
def official():
    return Official()


def labelled(verdict: Verdict) -> tuple[str, ...]:
    """The labels of a verdict, after the checks that hold for every trajectory."""
    labels, astray = diagnose(verdict).names, False
    assert len(labels) == len(verdict.turns)
    for turn, label in zip(verdict.turns, labels, strict=True):
        assert label != "env_error"
        assert (label == "not_reached") == (not turn.reached)
        good = label in SUCCESS_LABELS | EXCLUDED_LABELS
        if turn.passed:
            assert good, "a turn that passed is tagged as a failure"
        elif not good:
            assert turn.passed is False or label == "spurious_tool_call"
        if not astray and went_astray(turn):
            assert not good, "the turn that went astray first has no tag"
        if astray and turn.reached and _made_the_reference_calls(turn):
            assert label == "pass", "a turn with the reference's own calls is charged with an earlier one's fault"
        astray = astray or went_astray(turn)
    if verdict.reward:
        assert set(labels) <= SUCCESS_LABELS | {"spurious_tool_call"}
    return labels


def _made_the_reference_calls(turn) -> bool:
    results = [r for step in turn.steps for r in step.results]
    return (
        bool(results)
        and all(r.ok for r in results)
        and [r.call for r in results] == [r.call for r in turn.reference_results]
    )


def agree(official: Official, played: Played, verdict: Verdict) -> bool:
    """Whether the official checker says the same. Where its comparison breaks off, ours must fail the episode."""
    theirs = official.check(played.task, played.turns)
    return verdict.reward == 0.0 if theirs.startswith("broke off") else verdict.reason == theirs


# --- references and perturbations -------------------------------------------------------------------------------------
@pytest.mark.parametrize("quirks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_reference_replay_is_valid_for_us_and_for_the_official_checker_800_of_800(suite, quirky, official, quirks):
    chosen = quirky if quirks else suite
    verifier, ours, theirs = Verifier(chosen), Counter(), Counter()
    for task in chosen.tasks("all"):
        turns = as_turns(chosen.reference(task))
        verdict = verifier.verify(task, turns)
        assert not any(turn.state_diffs or turn.missing_results for turn in verdict.turns)
        assert all(result.ok for turn in verdict.turns for result in turn.reference_results)
        assert set(labelled(verdict)) <= SUCCESS_LABELS and set(release_labels(verdict)) <= SUCCESS_LABELS
        ours[verdict.reason] += 1
        theirs[official.check(task, turns)] += not quirks
    assert ours == {"valid": 800} and (quirks or theirs == ours)


@pytest.mark.parametrize(
    "perturb, stride", [(PERTURBATIONS[2][0], 16), (PERTURBATIONS[3][0], 16)], ids=["doubled", "acts_early_and_repeats"]
)
def test_perturbed_references_of_a_sample_judge_as_officially(suite, official, perturb, stride):
    verifier = Verifier(suite)
    for task in suite.tasks("all")[::stride]:
        turns = perturb(suite.reference(task), task)
        if turns is not None:
            verdict = verifier.verify(task, turns)
            assert verdict.reason == official.check(task, turns), task.id
            labelled(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("perturb, n_valid, n_tasks", PERTURBATIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_perturbed_references_judge_as_officially(suite, quirky, official, perturb, n_valid, n_tasks):
    verifier, with_quirks, valid, reasons = Verifier(suite), Verifier(quirky), Counter(), Counter()
    for task in suite.tasks("all"):
        turns = perturb(suite.reference(task), task)
        if turns is None:
            continue
        verdict = verifier.verify(task, turns)
        assert verdict.reason == with_quirks.verify(task, turns).reason == official.check(task, turns), task.id
        assert verdict.reward == (verdict.reason == "valid")
        assert release_labels(verdict) == official.tags(task, turns), task.id
        labelled(verdict)
        valid[task.category] += verdict.reason == "valid"
        reasons[verdict.reason] += 1
    assert (valid.total(), reasons.total()) == (n_valid, n_tasks)
    if perturb is acts_early_and_repeats:
        assert +valid == {"miss_func": 145, "miss_param": 128}
    if perturb is bfcl_families.acts_early:
        assert reasons == {"empty_turn": 402}


# --- the random family ------------------------------------------------------------------------------------------------
def play_family(quirky, suite, official: Official, start: int, stop: int, sample: int) -> Counter[str]:
    """Plays trajectories against the official checker; each `sample`-th also the release's tags and without quirks.

    Returns counts; prints the seed and one line for each disagreement.
    """
    family, plain = Family(quirky, SEED), Verifier(suite)
    counts: Counter[str] = Counter()
    verifier, begun = Verifier(quirky), time.monotonic()
    fresh = fresh_process(start, stop)
    lines = []
    for played in family.range(start, stop):
        verdict = verifier.verify(played.task, played.turns)
        lines.append(judgement(played.index, verdict))
        labelled(verdict)
        counts["played"] += 1
        counts[verdict.reason] += 1
        if not agree(official, played, verdict):
            counts["disagreements"] += 1
            theirs = official.check(played.task, played.turns)
            print(f"{played.index} {played.task.id}: ours {verdict.reason}, official {theirs}: {played.slips}")
        if played.index % sample == 0:
            counts["sampled"] += 1
            counts["wrong release tags"] += release_labels(verdict) != official.tags(played.task, played.turns)
            if not agree(official, played, plain.verify(played.task, played.turns)):
                counts["differs without quirks"] += 1
                counts["differs without quirks, though no slip is of that kind"] += not played.quirky
    counts["judged otherwise in a fresh process"] = sum(a != b for a, b in zip(lines, judged_by(fresh), strict=True))
    print(f"\nseed {SEED}, trajectories {start} to {stop - 1}, {time.monotonic() - begun:.0f} s: {dict(counts)}")
    return counts


def fresh_process(start: int, stop: int, quirks: int = 1) -> subprocess.Popen[str]:
    """Starts a process that judges the same trajectories, with other hashes of strings."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "12345"}
    command = [sys.executable, bfcl_families.__file__, *map(str, (SEED, start, stop, quirks))]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def judged_by(process: subprocess.Popen[str]) -> list[str]:
    output, _ = process.communicate()
    assert process.returncode == 0
    return output.splitlines()


@pytest.mark.parametrize("n, sample", [(300, 5), pytest.param(20_000, 5, marks=pytest.mark.slow)], ids=["300", "20000"])
def test_random_slips_judge_as_officially(quirky, suite, official, n, sample):
    counts = play_family(quirky, suite, official, 0, n, sample)
    assert counts["played"] == n
    assert counts["disagreements"] == 0
    assert counts["wrong release tags"] == 0
    assert counts["judged otherwise in a fresh process"] == 0
    assert counts["differs without quirks, though no slip is of that kind"] == 0
    reasons = ("valid", "empty_turn", "state_mismatch", "response_mismatch", "force_terminated")
    assert min(counts[reason] for reason in reasons) >= n // 100


def test_verdicts_and_labels_do_not_depend_on_what_was_judged_before(quirky, suite):
    indices = range(5_000, 5_060)
    shuffled = list(indices)
    random.Random(0).shuffle(shuffled)
    for chosen in (quirky, suite):
        family = Family(chosen, SEED)
        in_order = judgements(family, indices)
        assert judgements(family, shuffled) == in_order
        quirks = int(chosen.official_quirks)
        assert judged_by(fresh_process(5_000, 5_060, quirks)) == list(in_order.values())


def test_the_family_makes_every_slip(quirky):
    seen = Counter(slip for played in Family(quirky, SEED).range(0, 1_000) for slip in played.slips)
    assert set(seen) == set(bfcl_families.SLIPS)


# --- the executor's strings, turns and tools --------------------------------------------------------------------------
def test_reference_results_are_the_official_executors_strings(suite, official):
    for task in suite.tasks("all")[::7]:
        (row, gold), world = official.rows[task.id], suite.open(task)
        with official.namespace() as name:
            for program, sources in zip(suite.reference(task), gold, strict=True):
                ours = [world.call(call).text for call in program]
                assert ours == official.execute(name, row, sources)[0], task.id


ODD_CALLS = [
    "cd()",
    "cd(folder=3)",
    "cd(folder='a', depth=2)",
    "cd('a', 'b')",
    "cd('a', folder='b')",
    "cd(folder=None)",
    "ls(a='yes')",
    "mkdir(dir_name='docs')",
    "cat(file_name='nowhere')",
    "touch(file_name='n')",
    "echo(content=7, file_name='n')",
    "tail(file_name='a.txt', lines='two')",
    "nosuch(x=1)",
    "remove('a')",
    "exit()",
    "mean(numbers=3)",
    "mean(numbers=['a'])",
    "power(base='a', exponent=2)",
    "power(base=10, exponent=400)",
    "power(base=10, exponent=4400)",
    "divide(a=1, b=0)",
    "round_number(number='x')",
    "logarithm(value=10, base=10, precision=5)",
    "logarithm(value='x', base=10, precision=5)",
    "square_root(number=2, precision=-1)",
    "square_root(number=2, precision=30)",
    "add(a=[1], b=[2])",
]
ODD_ROW = {
    "id": "multi_turn_base_0",
    "involved_classes": ["GorillaFileSystem", "MathAPI"],
    "initial_config": {
        "GorillaFileSystem": {
            "root": {
                "r": {
                    "type": "directory",
                    "contents": {
                        "a.txt": {"type": "file", "content": "one\ntwo"},
                        "docs": {"type": "directory", "contents": {}},
                    },
                }
            }
        }
    },
}


def odd_worlds():
    """Without quirks, and the policy's with them."""
    scenarios = {"GorillaFileSystem": ODD_ROW["initial_config"]["GorillaFileSystem"], "MathAPI": {}}
    return open_world(scenarios, False, 5.0, 10**6), open_quirky_pair("model", "x_0", scenarios, False, 5.0, 10**6)[0]


@pytest.mark.parametrize("source", ODD_CALLS)
def test_odd_calls_get_the_official_executors_text(official, source):
    with official.namespace() as name:
        theirs, _ = official.execute(name, ODD_ROW, [source])
    for world in odd_worlds():
        assert world.call(parse_call(source)).text == theirs[0]


def test_fewer_turns_are_force_terminated_but_a_full_last_turn_is_graded(suite, official):
    task = suite.tasks("all")[0]
    turns = as_turns(suite.reference(task))
    verdict = Verifier(suite).verify(task, turns[:-1])
    assert (verdict.reward, verdict.reason) == (0.0, "force_terminated") == (0.0, official.check(task, turns[:-1]))
    assert [turn.reached for turn in verdict.turns] == [True] * (len(turns) - 1) + [False]
    # A turn cut off at the step limit still counts when it is the last one (and what it did is right).
    full = [*turns[:-1], [*turns[-1], *[(Call("pwd"),)] * 30]]
    assert Verifier(suite).verify(task, full).reason == official.check(task, full) == "valid"


def test_calls_of_held_out_tools_execute_before_they_are_revealed(suite, official):
    task = next(t for t in suite.tasks("all") if t.id == "multi_turn_miss_func_49")
    world = suite.open(task)
    held_out = {doc["name"] for turn in task.turns for doc in turn.reveals}
    assert held_out and held_out <= world.tool_names()
    assert not held_out & {doc["name"] for doc in task.tools}
    programs = suite.reference(task)
    reveal = next(i for i, turn in enumerate(task.turns) if turn.reveals)
    assert any(call.name in held_out for program in programs[:reveal] for call in program)  # the data's own slip
    assert official.check(task, as_turns(programs)) == "valid"


# --- the quirks -------------------------------------------------------------------------------------------------------
QUIRKS = [
    ("echo", {"content": "please sort (x) then cd(y)", "file_name": "n"}),
    ("echo", {"content": "total (approx)", "file_name": "n"}),
    ("echo", {"content": ["pwd ()", {"k": "ls  (a)"}], "file_name": "n"}),
    ("echo ", {"content": "x", "file_name": "n"}),
    (" echo", {" content": "x", "file_name ": "n"}),
    ("echo", {"cｏntent": "x", "file_name": "n"}),
    ("eｃho", {"content": "x", "file_name": "n"}),
    ("echo", {"content": math.inf, "file_name": "n"}),
    ("echo", {"content": [-math.inf, math.nan], "file_name": "n"}),
    ("echo", {"content": "x", "file_name": "n", "class": 1}),
    ("echo", {"content='x', file_name": "n"}),
    ("echo", {"content": "x", "": "n"}),
    ("echo", {"content": "\ud800\x00\u2028", "file_name": "n"}),
    ("sort.echo", {"content": "x", "file_name": "n"}),
    ("remove ", {"content": "x", "file_name": "n"}),
    ("x.run", {"content": "x"}),
    ("", {"content": "x"}),
    ("add", {"a": 10**400, "b": 0.5}),
    ("echo", {"content": Unevaluated("pwd()"), "file_name": "n"}),
    ("echo", {"content": Unevaluated("cat(file_name='a.txt')"), "file_name": "n"}),
    ("echo", {"content": Unevaluated("mean(numbers=[1, 'pwd (x)'])"), "file_name": "n"}),
    ("echo", {"content": Unevaluated("{'a': pwd()}"), "file_name": "n"}),
    ("echo", {"content": Unevaluated("nan"), "file_name": "n"}),
    ("echo", {"content": Unevaluated("'broken"), "file_name": "n"}),
    ("echo", {"content=pwd(), file_name": "n"}),
]


@pytest.mark.parametrize("name, arguments", QUIRKS, ids=lambda x: repr(x)[:50])
def test_what_the_official_executor_makes_of_a_call(official, name, arguments):
    """The same result, and the same text in the file, but for the name of the policy's instance."""
    calls = [Call("touch", {"file_name": "n"}), Call(name, arguments), Call("cat", {"file_name": "n"})]
    with official.namespace() as model:
        theirs, _ = official.execute(model, ODD_ROW, [str(call) for call in calls])
    theirs = [text.replace(f"{model}_eval_multi_turn_base_0", "model_eval_x_0") for text in theirs]
    _, world = odd_worlds()
    assert [world.call(call).text for call in calls] == theirs


@pytest.mark.parametrize("model", ["nine9", "ten1", "a/b-c.d:2"])
def test_a_flight_costs_by_the_name_of_the_model(official, model):
    """Its price doubles where the digits of its date add up to an even number, and here the date holds the name."""
    chosen = make_suite("bfcl", categories=("base",), official_quirks=model)
    task = next(t for t in chosen.tasks("all") if "TravelAPI" in t.domains)
    flight = {"travel_from": "SFO", "travel_to": "LAX", "travel_class": "economy"}
    call = Call("get_flight_cost", {**flight, "travel_date": "2024-11-11 get_flight_cost (x)"})
    with official.namespace(model) as name:
        theirs, _ = official.execute(name, official.rows[task.id][0], [str(call)])
    assert chosen.open(task).call(call).text == theirs[0]


def test_a_call_that_a_decoder_left_in_an_argument_runs_as_officially(official):
    for source in ("mkdir(dir_name='d')", "pwd()", "no_such_tool(x=1)", "nan", "{'k': touch(file_name='t')}"):
        calls = [Call("cd", {"folder": Unevaluated(source)}), Call("ls", {})]
        with official.namespace() as model:
            theirs, _ = official.execute(model, ODD_ROW, [str(call) for call in calls])
        world = odd_worlds()[1]
        assert [world.call(call).text for call in calls] == theirs


def test_a_number_beyond_floats_in_a_call_string_is_infinity_as_officially(official):
    """`1e400` is infinity when Python reads it, and no undefined name, though the value prints as one."""
    for source in ("add(a=1e400, b=1)", "add(-1e400, 1)", "sum_values(numbers=[1, 1e400])", "add(a=1e400, b='x')"):
        with official.namespace() as model:
            theirs, _ = official.execute(model, ODD_ROW, [source])
        for world in odd_worlds():
            assert world.call(read_call(source)).text == theirs[0]


def test_lists_nested_beyond_pythons_parser_do_not_run(official):
    for depth in range(190, 210):
        value = []
        for _ in range(depth):
            value = [value]
        call = Call("sum_values", {"numbers": value})
        with official.namespace() as model:
            theirs, _ = official.execute(model, ODD_ROW, [str(call)])
        assert odd_worlds()[1].call(call).text == theirs[0]


def test_without_the_option_a_call_is_what_was_written():
    plain, _ = odd_worlds()
    text = "please sort (x) then cd(y)"
    for call in (Call("touch", {"file_name": "n"}), Call("echo", {"content": text, "file_name": "n"})):
        plain.call(call)
    assert text in plain.call(Call("cat", {"file_name": "n"})).text
    assert plain.call(Call("add", {"a": math.inf, "b": 1})).text == '{"result": Infinity}'
    assert plain.call(Call("pwd ")).error == "unknown_tool"


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("pwd() or ls", {}),
        ("[pwd(), ls()][0] if 1 else ls", {}),
        ("(lambda: 1)", {}),
        ("__import__('os').getcwd", {}),
        ("print", {"x": 1}),
        ("len", {"obj": "x"}),
        ("json.dumps", {"obj": 1}),
        ("echo", {"content=__import__('os').getcwd(), file_name": "n"}),
        ("echo", {"content=2**9, file_name": "n"}),
        ("echo", {"content=[x for x in 'ab'], file_name": "n"}),
        ("echo", {"content=nothing(), file_name": "n"}),
        ("echo", {"content": Unevaluated("__import__(name='os')"), "file_name": "n"}),
        ("echo", {"content": Unevaluated("pwd().__class__"), "file_name": "n"}),
        ("echo(content='x', file_name='n') and pwd", {}),
        ("pwd().__class__", {}),
    ],
    ids=repr,
)
def test_nothing_is_evaluated_with_the_quirks_either(name, arguments):
    _, world = odd_worlds()
    world.call(Call("touch", {"file_name": "n"}))
    result = world.call(Call(name, arguments))
    assert not result.ok and result.text.startswith("Error during execution: ")
    assert world.call(Call("cat", {"file_name": "n"})).text == '{"file_content": ""}'


def test_sources_that_are_too_long_are_refused():
    _, world = odd_worlds()
    assert world.call(Call("echo", {"content": "x" * 10**6, "file_name": "a.txt"})).error == "size_limit"
    assert world.call(Call("add", {"a": 7**6000, "b": 1})).error == "argument_type"  # Python does not print it


# --- what policy and reference share ----------------------------------------------------------------------------------
def reasons_of(task, turns, *suites) -> set[str]:
    """What two verifications in a row say: nothing that the first one shared is left in the second."""
    return {Verifier(suite).verify(task, turns).reason for suite in suites for _ in range(2)}


def test_default_lists_are_shared_within_a_verification_only(suite, quirky, official):
    """A mention in a tweet posted without mentions extends the default list, so the reference's tweet has it, too: seen
    in the reference's answer when both come in one turn, and nowhere when the mention comes later."""
    reasons = Counter()
    for task in [t for t in suite.tasks("all") if "TwitterAPI" in t.domains][::2]:
        world = suite.open(task)
        for i, program in enumerate(suite.reference(task)):
            for call in program:
                world.call(call)
            bare = any(c.name == "post_tweet" and "mentions" not in c.arguments for c in program)
            for at in {i, len(task.turns) - 1} if bare else ():
                turns = as_turns(suite.reference(task))
                last = max(world.state()["TwitterAPI"]["tweets"])
                turns[at] = [*turns[at], (Call("mention", {"tweet_id": last, "mentioned_usernames": ["@ann"]}),)]
                theirs = official.check(task, turns)
                assert reasons_of(task, turns, quirky) == {theirs}
                reasons[theirs, *reasons_of(task, turns, suite), at > i] += 1
    assert reasons["valid", "state_mismatch", True] > 5 and reasons["response_mismatch", "state_mismatch", False] > 5


def test_long_context_cards_are_shared_within_a_verification_only(suite, quirky, official):
    """An insurance nobody asked for, on a card that the long-context category adds: the reference's card pays, too."""
    reasons = Counter()
    for task in suite.tasks("all"):
        if task.category == "long_context" and "TravelAPI" in task.domains:
            turns = as_turns(suite.reference(task))
            token = suite.open(task).state()["TravelAPI"]["access_token"]
            insurance = {
                "access_token": token,
                "insurance_type": "travel",
                "booking_id": "booking_901",
                "insurance_cost": 1.0,
                "card_id": "1234567812345678",
            }
            turns[-1] = [*turns[-1], (Call("purchase_insurance", insurance),)]
            theirs = official.check(task, turns)
            assert reasons_of(task, turns, quirky) == {theirs}
            reasons[theirs, *reasons_of(task, turns, suite)] += 1
    assert reasons["valid", "state_mismatch"] > 10
