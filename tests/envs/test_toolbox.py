"""The embedded environment: tasks, worlds and refusals, splits, determinism, and the teacher."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from seal_jax.envs.base import make_suite
from seal_jax.envs.execution import InstanceWorld
from seal_jax.envs.toolbox import (
    NO_HABITS,
    Habits,
    Teacher,
    ToolboxSuite,
    View,
    corpus,
    demonstrations,
    play,
    statistics,
    transcript,
)
from seal_jax.envs.toolbox.domain import instance_class, tool_doc, undress
from seal_jax.envs.toolbox.generator import KINDS, LOOKUPS, make_scenario, make_task, open_instance
from seal_jax.envs.toolbox.skins import ALL_KINDS, OOD_SKINS, TRAIN_SKINS, random_skin
from seal_jax.envs.toolbox.words import VERBS, all_words
from seal_jax.envs.verifier import Verifier
from seal_jax.types import CATEGORIES, Call

SPLITS = ("train", "val", "test", "ood")


@pytest.fixture(scope="module")
def suite() -> ToolboxSuite:
    return ToolboxSuite()


def everything(suite: ToolboxSuite) -> str:
    """All that a suite holds, as text."""
    rows = []
    for split in SPLITS:
        for b in suite.built(split):
            turns = [[u.user, [dict(d) for d in u.reveals]] for u in b.task.turns]
            rows.append([b.task.id, turns, b.task.tools, str(b.programs), open_instance(b).__dict__.keys().__repr__()])
            rows.append([suite.open(b.task).state(), b.scenario.state.get("_padding"), b.scenario.miss_turn])
    return json.dumps(rows)


# --- splits ----------------------------------------------------------------------------------------------------------
def test_sizes_and_categories(suite: ToolboxSuite) -> None:
    for split, n in {"train": 100, "val": 25, "test": 100, "ood": 50}.items():
        counts = Counter(t.category for t in suite.tasks(split))
        assert counts == dict.fromkeys(CATEGORIES, n)
    ids = [t.id for split in SPLITS for t in suite.tasks(split)]
    assert len(set(ids)) == len(ids) == 1100


def test_registered_and_refuses_bad_options() -> None:
    assert len(make_suite("toolbox", train=2, val=1, test=1, ood=1).tasks("train")) == 8
    with pytest.raises(ValueError, match="suite_options.train=-1"):
        ToolboxSuite(train=-1)
    with pytest.raises(ValueError, match="'dev' is not known; choose one of"):
        ToolboxSuite(train=1, val=1, test=1, ood=1).tasks("dev")


def test_no_scenario_text_or_state_comes_twice(suite: ToolboxSuite) -> None:
    built = [b for split in SPLITS for b in suite.built(split) if b.task.category == "base"]
    texts = Counter("\n".join(u.user for u in b.task.turns) for b in built)
    assert texts.most_common(1)[0][1] == 1
    states = Counter(json.dumps(b.scenario.state, sort_keys=True) for b in built)
    assert states.most_common(1)[0][1] == 1
    demos = demonstrations(0, 200, fixed_share=0.35, avoid=suite.user_texts)
    assert not {d.suite.built("demo")[0].scenario.id for d in demos} & {b.scenario.id for b in built}


def test_same_bytes_under_any_hash_seed() -> None:
    script = (
        "import hashlib, sys; sys.path.insert(0, 'tests/envs'); import test_toolbox as t;"
        "s = t.ToolboxSuite(seed=3, train=24, val=6, test=12, ood=6);"
        "demos = ''.join(str(t.play(d.task, d.suite, d.teacher)) for d in t.demonstrations(5, 24, fixed_share=0.35));"
        "print(hashlib.sha256((t.everything(s) + demos).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]

    def digest(hash_seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
        return subprocess.run(
            [sys.executable, "-c", script], cwd=root, env=env, check=True, capture_output=True, text=True
        ).stdout

    assert digest("1") == digest("77")


def test_seeds_differ_and_sizes_do_not_matter() -> None:
    a, b, c = (ToolboxSuite(seed=s, train=n, val=0, test=0, ood=0) for s, n in ((0, 4), (1, 4), (0, 6)))
    assert a.tasks("train") == c.tasks("train")[:16] != b.tasks("train")


def test_world_and_tasks_need_no_jax_or_numpy() -> None:
    code = "import sys, seal_jax.envs.toolbox; print(sorted({'jax', 'numpy'} & set(sys.modules)))"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip() == "[]"


# --- kinds and troubles ----------------------------------------------------------------------------------------------
def test_the_defaults_are_all_kinds_and_the_usual_share() -> None:
    sizes = {"train": 8, "val": 2, "test": 4, "ood": 3}
    default = everything(ToolboxSuite(**sizes))
    assert everything(ToolboxSuite(**sizes, kinds=ALL_KINDS[::-1], troubled=0.38)) == default
    # The same bytes as before there was a choice.
    digest = hashlib.sha256(default.encode()).hexdigest()
    assert digest == "e45f581426392fb64af3bde8f1413b9105e1e4225080f844cc30717104d089c8"
    assert ALL_KINDS == tuple(KINDS)


def test_only_the_chosen_kinds_are_met() -> None:
    chosen = ToolboxSuite(train=8, val=4, test=8, ood=4, kinds=["desk", "ledger", "desk"])
    assert chosen.kinds == ("ledger", "desk")
    for split in SPLITS:
        assert {b.scenario.skin.kind for b in chosen.built(split)} == {"ledger", "desk"}
        skins = {b.scenario.skin for b in chosen.built(split)}
        assert skins <= set(OOD_SKINS if split == "ood" else TRAIN_SKINS)
    no_ood = ToolboxSuite(train=2, val=0, test=0, ood=0, kinds=("devices", "booking"))
    assert {b.scenario.skin.kind for b in no_ood.built("train")} == {"devices", "booking"}
    for share in (0.0, 1.0):  # random skins only, and the training domains only
        demos = demonstrations(2, 60, fixed_share=share, kinds=chosen.kinds)
        assert {d.suite.built("demo")[0].scenario.skin.kind for d in demos} == {"ledger", "desk"}


@pytest.mark.parametrize("troubled", [0.0, 0.05, 0.3, 0.6, 1.0])
def test_the_share_of_troubled_tasks_is_what_was_asked_for(troubled: float) -> None:
    suite = ToolboxSuite(seed=1, train=40, val=0, test=20, ood=0, troubled=troubled)
    for split, n in {"train": 40, "test": 20}.items():
        refused = sum(b.scenario.refusals > 0 for b in suite.built(split)) / len(CATEGORIES)
        assert abs(refused - troubled * n) <= 2.2, split
        if troubled in (0.0, 1.0):
            assert refused == troubled * n


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kinds": ("desk", "garden")}, r"suite_options.kinds=\('desk', 'garden'\): give a list of some of"),
        ({"kinds": "desk"}, "suite_options.kinds='desk': give a list"),
        ({"kinds": 3}, "suite_options.kinds=3: give a list"),
        (
            {"kinds": ("devices", "booking")},
            r"leave split 'ood' without a domain; add one of \['desk', 'l",
        ),
        ({"troubled": 1.1}, "suite_options.troubled=1.1: the share of scenarios must be between 0 and 1"),
        ({"troubled": -0.1}, "suite_options.troubled=-0.1: the share"),
        ({"troubled": float("nan")}, "suite_options.troubled=nan: the share"),
        ({"troubled": "0.5"}, "suite_options.troubled='0.5': the share"),
        ({"troubled": True}, "suite_options.troubled=True: the share"),
    ],
)
def test_kinds_and_shares_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ToolboxSuite(train=1, val=0, test=0, ood=1, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


# --- words and skins -------------------------------------------------------------------------------------------------
def test_training_domains_are_of_several_kinds_and_held_out_tools_are_new(suite: ToolboxSuite) -> None:
    assert len({s.name for s in TRAIN_SKINS}) >= 5
    assert len({s.kind for s in TRAIN_SKINS}) >= 3
    assert len({s.kind for s in OOD_SKINS}) == 2
    offered = {
        doc["name"] for split in ("train", "val", "test") for b in suite.built(split) for doc in b.scenario.tools
    }
    held_out = {doc["name"] for b in suite.built("ood") for doc in b.scenario.tools}
    assert not offered & held_out
    rng = random.Random(0)
    randomised = {name for kind in KINDS for _ in range(300) for name in random_skin(rng, kind).tool_names}
    assert not randomised & held_out
    # ... but every part of a held-out name is met in random skins.
    parts = {part for name in randomised for part in name.split("_")}
    assert {part for name in held_out for part in name.split("_")} <= parts


def test_a_verb_belongs_to_one_role() -> None:
    for kind in VERBS:
        verbs = [v for pool in VERBS[kind].values() for v in pool]
        assert len(set(verbs)) == len(verbs), kind


def test_words_are_plain_and_argument_names_are_identifiers() -> None:
    assert all(re.fullmatch("[a-z]+", w) for w in all_words())
    rng = random.Random(1)
    for kind in KINDS:
        for _ in range(50):
            skin = random_skin(rng, kind)
            cls = instance_class(KINDS[kind], skin)
            for role in KINDS[kind].roles:
                doc = tool_doc(KINDS[kind], skin, role)
                assert callable(getattr(cls, doc["name"]))
                assert set(doc["parameters"]["required"]) <= set(doc["parameters"]["properties"])


def test_tools_have_required_optional_typed_and_enum_arguments(suite: ToolboxSuite) -> None:
    for split in ("train", "ood"):
        properties = [
            p for b in suite.built(split) for d in b.scenario.tools for p in d["parameters"]["properties"].values()
        ]
        assert any("enum" in p for p in properties)
        assert {"string", "integer"} <= {p["type"] for p in properties}
        assert any(
            set(d["parameters"]["properties"]) - set(d["parameters"]["required"])
            for b in suite.built(split)
            for d in b.scenario.tools
        )
    assert all(5 <= len(b.scenario.tools) <= 7 for split in SPLITS for b in suite.built(split))


def test_a_held_out_domain_has_no_word_without_a_token(suite: ToolboxSuite) -> None:
    tokenizers = pytest.importorskip("seal_jax.chat.tokenizer")
    pytest.importorskip("tokenizers")
    from seal_jax.chat.formats import get_format

    chat = get_format("tiny")
    tok = tokenizers.train_tokenizer(
        corpus(chat, n=200), vocab_size=1200, special_tokens=chat.special_tokens, scaffold=chat.scaffold
    )
    assert 600 <= tok.vocab_size <= 1200
    assert [w for w in all_words() if len(tok.encode(w)) != 1] == []
    for row in statistics(suite, "ood", tok.encode, chat):
        assert row.prompt_tokens_max <= 300
        assert row.episode_tokens_max <= 450
        assert row.message_tokens_max <= 40


# --- tasks -----------------------------------------------------------------------------------------------------------
def test_two_to_four_turns_and_few_calls(suite: ToolboxSuite) -> None:
    for split in SPLITS:
        for task in suite.tasks(split):
            assert 2 <= len(task.turns) <= 4
        for row in statistics(suite, split):
            assert 1 / 3 <= row.refusal_share <= 0.43  # every split alike
            assert row.max_calls_in_turn <= 6
            assert 6 <= row.messages <= 10


def test_abstain_and_reveal_turns(suite: ToolboxSuite) -> None:
    for split in SPLITS:
        for b in suite.built(split):
            m = b.scenario.miss_turn
            empty = [t for t, program in enumerate(b.programs) if not program]
            reveals = [t for t, u in enumerate(b.task.turns) if u.reveals]
            if b.task.category == "miss_func":
                assert (empty, reveals) == ([m], [m + 1])
                assert [d["name"] for d in b.task.turns[m + 1].reveals] == [b.scenario.miss_tool]
                assert b.task.turns[m + 1].user == ""
            else:
                assert (empty, reveals) == ([m] if b.task.category == "miss_param" else [], [])
                assert all(u.user for u in b.task.turns)
            offered = {d["name"] for d in b.task.tools}
            for user, program in zip(b.task.turns, b.programs, strict=True):
                offered |= {d["name"] for d in user.reveals}
                assert {c.name for c in program} <= offered


def test_the_missing_value_is_left_out_and_then_supplied(suite: ToolboxSuite) -> None:
    for split in SPLITS:
        for b in suite.built(split):
            if b.task.category != "miss_param":
                continue
            m = b.scenario.miss_turn
            (intent,) = b.scenario.intents[m]
            names = {str(v) for c in intent.calls for v in c.args.values() if not isinstance(v, bool)}
            words = [
                set(re.findall(r"[a-z]+|\d+", t)) for t in (intent.text, b.scenario.gap.vague, b.scenario.gap.supply)
            ]
            full, vague, supply = (names & w for w in words)
            assert vague < full == vague | supply, b.task.id


def test_all_categories_share_the_scenario(suite: ToolboxSuite) -> None:
    built = suite.built("test")
    for i in range(0, len(built), 4):
        base, func, param, long = built[i : i + 4]
        assert [b.task.category for b in (base, func, param, long)] == list(CATEGORIES)
        assert base.programs == long.programs
        assert [p for p in func.programs if p] == [p for p in param.programs if p] == list(base.programs)
        short_text = "".join(suite.open(base.task).call(c).text for p in base.programs for c in p[:1])
        long_text = "".join(suite.open(long.task).call(c).text for p in long.programs for c in p[:1])
        assert len(long_text) >= len(short_text)


def test_nothing_of_the_answer_is_in_the_task(suite: ToolboxSuite) -> None:
    for b in suite.built("train"):
        shown = " ".join(u.user for u in b.task.turns) + json.dumps(b.task.tools)
        assert not re.search(r"\b[a-z]\d\b", shown), b.task.id


def test_every_argument_can_be_read_off_the_conversation(suite: ToolboxSuite) -> None:
    """No look-up key, id, number or enum value of the oracle's calls is more than what the policy has been shown."""
    for split in SPLITS:
        for b in suite.built(split):
            enums = {
                str(v)
                for d in b.scenario.tools
                for p in d["parameters"]["properties"].values()
                for v in p.get("enum", ())
            }
            told = enums | {"True"}  # the only use of a boolean is to ask for it
            for user, steps in zip(
                b.task.turns, play(b.task, suite, Teacher(b.task, suite, random.Random(0))), strict=True
            ):
                told.update(re.findall(r"[a-z]+|\d+", user.user))
                for step in steps:
                    for call in step.calls:
                        assert {str(v) for v in call.arguments.values()} <= told, (b.task.id, call)
                    for result in step.results:
                        told.update(re.findall(r"[a-z]+\d|[a-z]+", result.text))


# --- verdicts --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("split", SPLITS)
def test_the_oracle_passes_everything(suite: ToolboxSuite, split: str) -> None:
    verifier = Verifier(suite)
    for task in suite.tasks(split):
        turns = play(task, suite, Teacher(task, suite, random.Random(0)))
        assert verifier.verify(task, turns).reward == 1.0, task.id
        assert sum(len(t) for t in turns) <= 15


def test_the_reference_program_passes_and_has_no_refusal(suite: ToolboxSuite) -> None:
    verifier = Verifier(suite)
    for task in suite.tasks("ood"):
        programs = suite.reference(task)
        verdict = verifier.verify(task, [[[c] for c in p] for p in programs])
        assert verdict.reward == 1.0
        assert all(r.ok for t in verdict.turns for r in t.reference_results)


def test_doing_nothing_passes_nothing(suite: ToolboxSuite) -> None:
    verifier = Verifier(suite)
    assert all(verifier.verify(t, [[]] * len(t.turns)).reward == 0.0 for t in suite.tasks("val"))


def test_giving_up_after_a_refusal_fails(suite: ToolboxSuite) -> None:
    verifier = Verifier(suite)
    habits = Habits(**{**NO_HABITS.__dict__, "give_up": 1.0})
    for b in suite.built("val"):
        turns = play(b.task, suite, Teacher(b.task, suite, random.Random(0), habits))
        assert verifier.verify(b.task, turns).reward == float(b.scenario.refusals == 0), b.task.id


def _needless(b: object, suite: ToolboxSuite, call: Call) -> Call | None:
    """The repair that would precede this call if its entity were in trouble."""
    scenario = b.scenario  # type: ignore[attr-defined]
    tools, arguments = scenario.skin.tools, scenario.skin.arguments
    canonical = undress(scenario.domain, scenario.skin, call)
    assert canonical is not None
    value = canonical.args.get("id", canonical.args.get("source", canonical.args.get("hold")))
    if scenario.skin.kind == "ledger" and canonical.role in ("add", "move", "grade"):
        return Call(tools["thaw"], {arguments["id"]: value})
    if scenario.skin.kind == "devices" and canonical.role in ("level", "timer"):
        return Call(tools["power"], {arguments["id"]: value, arguments["state"]: scenario.skin.choices["state"][1]})
    if scenario.skin.kind == "desk" and canonical.role in ("note", "assign", "close"):
        return Call(tools["reopen"], {arguments["id"]: value})
    if scenario.skin.kind == "booking" and canonical.role in ("confirm", "cancel"):
        return Call(tools["renew"], {arguments["hold"]: value})
    if scenario.skin.kind == "booking" and canonical.role == "find":
        return Call(tools["refresh"], dict(call.arguments))
    return None


def test_always_repairing_first_fails_where_no_repair_is_needed(suite: ToolboxSuite) -> None:
    verifier = Verifier(suite)
    tried = 0
    for b in suite.built("test"):
        if b.scenario.refusals or b.task.category != "base":
            continue
        turns = [[[x] for c in p for x in (_needless(b, suite, c), c) if x is not None] for p in b.programs]
        if sum(map(len, turns)) > sum(map(len, b.programs)):
            tried += 1
            assert verifier.verify(b.task, turns).reward == 0.0, b.task.id
    assert tried >= 20


def test_logging_in_without_need_fails(suite: ToolboxSuite) -> None:
    verifier = Verifier(suite)
    for b in suite.built("train"):
        state = suite.open(b.task).state()[b.scenario.skin.name]
        if b.scenario.skin.kind != "desk" or not state["session"] or b.task.category != "base":
            continue
        login = Call(b.scenario.skin.tools["login"], {b.scenario.skin.arguments["who"]: state["session"]})
        turns = [[[c] for c in p] for p in b.programs]
        assert verifier.verify(b.task, [[[login], *turns[0]], *turns[1:]]).reward == 0.0


def test_any_call_on_an_abstain_turn_fails(suite: ToolboxSuite) -> None:
    verifier = Verifier(suite)
    for b in suite.built("val"):
        if b.task.category not in ("miss_func", "miss_param"):
            continue
        m = b.scenario.miss_turn
        lookup = b.programs[m + 1][0]
        turns = [[[c] for c in p] for p in b.programs]
        turns[m] = [[lookup]]
        verdict = verifier.verify(b.task, turns)
        assert (verdict.reward, verdict.reason) == (0.0, "spurious_call")


def test_looking_up_again_is_harmless(suite: ToolboxSuite) -> None:
    verifier = Verifier(suite)
    for b in suite.built("val"):
        turns = [[[c] for c in p] for p in b.programs]
        for turn, program in zip(turns, b.programs, strict=True):
            turn += [[c] for c in program if undress(b.scenario.domain, b.scenario.skin, c).role in LOOKUPS]  # type: ignore[union-attr]
        assert verifier.verify(b.task, turns).reward == 1.0


# --- worlds ----------------------------------------------------------------------------------------------------------
def test_worlds_share_nothing(suite: ToolboxSuite) -> None:
    for b in suite.built("val"):
        before = json.dumps(suite.open(b.task).state())
        played = suite.open(b.task)
        for program in b.programs:
            for call in program:
                assert played.call(call).ok
        assert json.dumps(suite.open(b.task).state()) == before


def test_the_general_execution_layer_sees_ordinary_tools(suite: ToolboxSuite) -> None:
    for b in suite.built("val"):
        name = b.scenario.skin.name
        world = suite.open(b.task)
        general = InstanceWorld({name: open_instance(b)}, {d["name"]: name for d in b.scenario.tools})
        assert general.tool_names() == world.tool_names()
        for program in b.programs:
            for call in program:
                assert general.call(call).text == world.call(call).text
        assert general.state() == world.state()
        broken = Call(b.scenario.miss_tool, {"colour": 1})
        assert general.call(broken).error == world.call(broken).error == "unexpected_argument"


def _bank():  # noqa: ANN202
    suite = ToolboxSuite(train=1, val=0, test=0, ood=0)
    b = suite.built("train")[0]
    assert b.scenario.skin.name == "bank"
    return suite.open(b.task), b.scenario.state


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "detail", "text"),
    [
        ("fly", {}, "unknown_tool", "fly", "no tool fly"),
        ("find_account", {}, "missing_argument", "owner", "find_account needs owner"),
        ("find_account", {"owner": "kim", "x": 1}, "unexpected_argument", "x", "find_account has no x"),
        ("find_account", {"owner": 3}, "argument_type", "owner", "owner must be a string"),
        ("add_coins", {"id": "zz", "amount": "5"}, "argument_type", "amount", "amount must be an integer"),
        ("add_coins", {"id": "zz", "amount": True}, "argument_type", "amount", "amount must be an integer"),
        ("add_coins", {"id": "zz", "amount": None}, "argument_type", "amount", "amount must be an integer"),
        ("rank_account", {"id": "zz", "plan": "red"}, "argument_type", "plan", "plan must be basic, silver or gold"),
        ("add_coins", {"id": "zz", "amount": 10**5000}, "argument_type", "amount", "amount must be at most 1000000000"),
        ("find_account", {"owner": "a" * 201}, "argument_type", "owner", "owner must be at most 200 characters"),
        ("add_coins", {"id": "zz", "amount": 5}, "tool_error", "", "no account zz"),
        ("find_account", {"owner": "nobody"}, "tool_error", "", "no account of nobody"),
    ],
)
def test_errors_are_terse_typed_and_change_nothing(
    name: str, arguments: dict, kind: str, detail: str, text: str
) -> None:
    world, _ = _bank()
    before = json.dumps(world.state())
    result = world.call(Call(name, arguments))
    assert (result.error, result.detail, json.loads(result.text)) == (kind, detail, {"error": text})
    assert json.dumps(world.state()) == before


def test_positional_arguments_bind_in_order() -> None:
    world, state = _bank()
    id_ = next(iter(state["amounts"]))
    assert world.call(Call("check_coins", {}, (id_,))).text == json.dumps({"coins": state["amounts"][id_]})
    assert world.call(Call("check_coins", {"id": id_}, (id_,))).error == "unexpected_argument"
    assert world.call(Call("check_coins", {}, (id_, 1))).error == "unexpected_argument"


def test_a_refusal_names_its_entity_and_a_repair_lets_the_call_through() -> None:
    seen = set()
    for kind, domain in KINDS.items():
        for i in range(40):
            skin = random_skin(random.Random(f"{kind}{i}"), kind)
            b = make_task(make_scenario("x", skin, f"test/{kind}/{i}", troubles=1 + i % 2), "base")
            live = instance_class(domain, skin)(skin, b.scenario.state)
            for step in (s for turn in b.script for s in turn):
                for repair in step.repairs:
                    error = getattr(live, step.call.name)(**step.call.arguments)["error"]
                    assert next(iter(repair.arguments.values())) in error.split()
                    before = json.dumps(vars(live), default=str)
                    assert "error" in getattr(live, step.call.name)(**step.call.arguments)
                    assert json.dumps(vars(live), default=str) == before  # refused: nothing changed
                    assert "error" not in getattr(live, repair.name)(**repair.arguments)
                    seen.add((kind, undress(domain, skin, repair).role))  # type: ignore[union-attr]
                assert "error" not in getattr(live, step.call.name)(**step.call.arguments)
    assert seen == {
        ("ledger", "thaw"),
        ("devices", "power"),
        ("devices", "release"),
        ("desk", "login"),
        ("desk", "reopen"),
        ("booking", "renew"),
        ("booking", "refresh"),
    }


# --- the teacher -----------------------------------------------------------------------------------------------------
def test_the_teacher_writes_no_id_that_it_was_not_told() -> None:
    for d in demonstrations(7, 400, Habits(give_up=0.6), fixed_share=0.35):
        told: set[str] = set()
        for step in (s for turn in play(d.task, d.suite, d.teacher) for s in turn):
            for call in step.calls:
                ids = {v for v in call.arguments.values() if isinstance(v, str) and re.fullmatch(r"[a-z]\d", v)}
                assert ids <= told, (d.task.id, call)
            for result in step.results:
                told.update(re.findall(r"[a-z]\d", result.text))


def test_bad_habits_set_the_rates() -> None:
    after = {False: Counter(), True: Counter()}
    passed: Counter[str] = Counter()
    strayed = abstained = 0
    for d in demonstrations(11, 800, fixed_share=0.35):
        cued = int(d.task.id.split("-")[1].split("/")[0]) % 2 == 0
        turns = play(d.task, d.suite, d.teacher, cue=lambda result, cued=cued: cued)
        passed[d.task.category] += Verifier(d.suite).verify(d.task, turns).reward
        for steps, program in zip(turns, d.suite.reference(d.task), strict=True):
            if not program:
                abstained += 1
                strayed += bool(steps[0].calls)
            for step, following in zip(steps, steps[1:], strict=False):
                if program and step.results and not step.results[-1].ok:
                    after[cued][bool(following.calls)] += 1
    assert after[False][True] / after[False].total() < 0.12
    assert after[True][True] / after[True].total() > 0.6
    assert 0.45 < strayed / abstained < 0.7
    assert 0.1 < passed.total() / 800 < 0.5
    assert all(passed[c] > 0 for c in CATEGORIES)


def test_demonstrations_are_of_every_kind_and_repeatable() -> None:
    def digest() -> str:
        text = "".join(str(play(d.task, d.suite, d.teacher)) for d in demonstrations(2, 60, fixed_share=0.35))
        return hashlib.sha256(text.encode()).hexdigest()

    assert digest() == digest()
    kinds = Counter(d.suite.built("demo")[0].scenario.skin.kind for d in demonstrations(2, 200, fixed_share=0.35))
    assert set(kinds) == set(KINDS)
    with pytest.raises(ValueError, match=r"habits.give_up=1.2: a probability"):
        Habits(give_up=1.2)


def test_a_rejected_message_makes_the_teacher_end_the_turn(suite: ToolboxSuite) -> None:
    task = suite.tasks("train")[0]
    teacher = Teacher(task, suite, random.Random(0))
    assert teacher.reply(View(0)).calls
    assert teacher.reply(View(0)) == ((), "it failed.")


def test_transcripts_parse_back_to_the_same_calls(suite: ToolboxSuite) -> None:
    formats = pytest.importorskip("seal_jax.chat.formats")
    for name in ("tiny", "hermes"):
        chat = formats.get_format(name)
        for task in suite.tasks("val")[:20]:
            turns = play(task, suite, Teacher(task, suite, random.Random(0)))
            prompt, rest = transcript(task, turns, chat)
            assert all(d["name"] in prompt for d in task.tools)
            for step in (s for turn in turns for s in turn):
                body = chat.calls(step.calls) if step.calls else step.text
                assert body in rest
                assert chat.parse(body).calls == step.calls
