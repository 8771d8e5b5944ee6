"""The rules on evidence from the real verifier, with a toy bank whose frozen accounts must be thawed."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from seal_jax.diagnosis import diagnose, release_labels
from seal_jax.envs.execution import InstanceWorld
from seal_jax.envs.verifier import Verifier
from seal_jax.types import Call, ParseError, Step, Task, UserTurn


class Bank:
    def __init__(self):
        self.amounts = {"a1": 10, "b2": 20}
        self.frozen = {"a1": True, "b2": False}
        self.thaws = {"a1": 0, "b2": 0}
        self.receipts = {}  # by running number: an extra one shifts all later ones
        self._ids = {"Ann": "a1", "Bob": "b2"}

    def find(self, who):
        return {who: self._ids[who]} if who in self._ids else {"error": f"no account of {who}"}

    def count(self, id):
        return {"amount": self.amounts[id]}

    def add(self, id, amount):
        if id not in self.amounts:
            return {"error": f"no account {id}"}
        if self.frozen[id]:
            return {"error": f"{id} is frozen"}
        self.amounts[id] += amount
        self.receipts[len(self.receipts)] = (id, amount)
        return {"amount": self.amounts[id]}

    def thaw(self, id):
        self.frozen[id] = False
        self.thaws[id] += 1
        return {id: "open"}


def c(name, **arguments):
    return Call(name, arguments)


PROGRAMS = (
    (c("find", who="Ann"), c("thaw", id="a1"), c("add", id="a1", amount=5)),
    (),
    (c("add", id="b2", amount=1), c("add", id="a1", amount=2)),
    (c("count", id="a1"),),
)


class Suite:
    name = "bank"
    checks_abstention = True

    def tasks(self, split):
        return [Task("bank_0", "bank", "base", "0", tuple(UserTurn("?") for _ in PROGRAMS), ())]

    def reference(self, task):
        return PROGRAMS

    def open(self, task):
        names = ("find", "count", "add", "thaw")
        return InstanceWorld({"bank": Bank()}, dict.fromkeys(names, "bank"))


def labels(*turns):
    suite = Suite()
    return diagnose(Verifier(suite).verify(suite.tasks("")[0], turns)).names


def steps(*calls):
    return tuple((x,) for x in calls)


GOLD = tuple(steps(*p) for p in PROGRAMS)


def with_turn(i, *calls):
    return GOLD[:i] + (steps(*calls),) + GOLD[i + 1 :]


def test_reference_program_passes():
    assert labels(*GOLD) == ("pass", "correct_abstention", "pass", "pass")


def test_reading_more_than_needed_passes():
    assert labels(*with_turn(0, c("count", id="b2"), *PROGRAMS[0]))[0] == "pass"


@pytest.mark.parametrize(
    "calls, label",
    [
        ([c("find", who="Ann"), c("add", id="a1", amount=5)], "recovery_failure"),
        ([c("find", who="Ann"), c("add", id="a1", amount=5), c("thaw", id="a1")], "recovery_failure"),
        ([c("find", who="Ann"), c("add", id="Ann", amount=5)], "argument_mismatch"),
        ([c("find", who="Ann"), c("thaw", id="a1"), c("add", id="a1", amount=6)], "argument_mismatch"),
        ([c("find", who="Ann"), c("thaw", id="a1"), c("add", id="a1")], "argument_mismatch"),
        ([c("find", who="Ann"), c("thaw", id="a1"), c("add", id="a1", sum=5)], "argument_mismatch"),
        ([*PROGRAMS[0], c("thaw", id="b2")], "state_mismatch"),
        ([*PROGRAMS[0], c("add", id="b2", amount=1)], "state_mismatch"),
        ([c("find", who="Ann"), c("thaw", id="a1")], "missing_tool_call"),
        ([], "missing_tool_call"),
        ([c("find", who="Ann"), c("thaw", id="a1"), c("give", id="a1", amount=5)], "invalid_tool_call"),
        ([c("thaw", id="a1"), c("add", id="a1", amount=5)], "response_mismatch"),
    ],
)
def test_first_turn(calls, label):
    assert labels(*with_turn(0, *calls))[0] == label


def test_only_the_turn_that_caused_it_is_charged():
    """Dropping, repeating or skipping calls in one turn must not tag the turns that are right (the released code's
    diagnosis tagged half of such episodes wrongly)."""
    dropped = labels(*with_turn(2, PROGRAMS[2][0]))
    assert dropped == ("pass", "correct_abstention", "missing_tool_call", "pass")
    doubled = labels(*with_turn(2, *PROGRAMS[2], PROGRAMS[2][0]))
    assert doubled == ("pass", "correct_abstention", "state_mismatch", "pass")


@pytest.mark.parametrize(
    "calls, label",
    [
        ([*PROGRAMS[2]], "pass"),
        ([*PROGRAMS[2], c("count", id="b2")], "pass"),  # a look changes nothing, in whatever world
        ([c("count", id="b2"), c("find", who="Bob"), *PROGRAMS[2]], "pass"),
        ([*PROGRAMS[2], c("add", id="b2", amount=1)], "state_mismatch"),
        ([*reversed(PROGRAMS[2])], "state_mismatch"),  # the receipts are in another order
        ([PROGRAMS[2][0]], "missing_tool_call"),
        ([PROGRAMS[2][0], c("add", id="a1", amount=3)], "argument_mismatch"),
        ([], "missing_tool_call"),
    ],
)
def test_a_later_turn_is_judged_on_its_own_merits(calls, label):
    """Whether the worlds agreed when it began or not: its label is that of the same turn after right ones."""
    after_a_fault = labels(steps(*PROGRAMS[0], c("add", id="b2", amount=1)), (), steps(*calls), GOLD[3])
    assert after_a_fault == ("state_mismatch", "correct_abstention", label, "pass")
    assert labels(GOLD[0], (), steps(*calls), GOLD[3])[2] == label


def test_calls_on_an_abstain_turn():
    assert labels(*with_turn(1, c("count", id="a1"))) == ("pass", "spurious_tool_call", "pass", "pass")


def test_an_episode_that_ends_early():
    assert labels(*GOLD[:2]) == ("pass", "correct_abstention", "not_reached", "not_reached")


def test_a_malformed_message_is_seen():
    bad = (Step("<tool_call>", error=ParseError("bad_json", "no closing brace")), Step("done"))
    assert labels(GOLD[0], GOLD[1], bad, GOLD[3])[2] == "invalid_tool_call"


def test_release_tags_stay_cumulative_on_clean_worlds():
    suite = Suite()
    v = Verifier(suite).verify(suite.tasks("")[0], with_turn(0, *PROGRAMS[0], c("thaw", id="b2")))
    assert release_labels(v) == ("state_mismatch", "correct_abstention", "state_mismatch", "state_mismatch")


# --- the embedded suite's teacher: each bad habit must come out as its own label ---------------------------
HABITS = {
    "give_up": {"recovery_failure", "missing_tool_call"},  # after giving up on a look-up, a later turn may not start
    "spurious": {"spurious_tool_call"},
    "guess": {"spurious_tool_call"},
    "swap": {"argument_mismatch"},
    "forget": {"argument_mismatch"},
    "slip": {"argument_mismatch"},
}


def habit_labels(habit):
    from seal_jax.envs.base import make_suite
    from seal_jax.envs.toolbox.teacher import NO_HABITS, Teacher, View

    suite, rng, seen = make_suite("toolbox"), random.Random(0), Counter()
    verifier = Verifier(suite)
    for task in suite.tasks("val")[:100]:
        habits = replace(NO_HABITS, **({habit: 1.0} if habit else {}))
        world, teacher, turns = suite.open(task), Teacher(task, suite, rng, habits), []
        for t in range(len(task.turns)):
            played, results = [], ()
            while (reply := teacher.reply(View(t, results))).calls:
                results = tuple(world.call(call) for call in reply.calls)
                played.append(Step("", reply.calls, None, results))
            turns.append(tuple(played))
        seen.update(diagnose(verifier.verify(task, turns)).names)
    return seen


def test_a_teacher_without_bad_habits_has_no_failures():
    assert set(habit_labels("")) == {"pass", "correct_abstention"}


@pytest.mark.parametrize("habit", HABITS)
def test_a_bad_habit_comes_out_as_its_own_label(habit):
    failures = {k: n for k, n in habit_labels(habit).items() if k not in ("pass", "correct_abstention")}
    assert set(failures) <= HABITS[habit]
    if habit == "give_up":
        assert failures["recovery_failure"] > 0.8 * sum(failures.values())
    else:
        assert failures


@pytest.mark.slow
@pytest.mark.parametrize("doubled, valid", [(False, 800), (True, 288)])
def test_bfcl_replays_have_no_wrong_tags(doubled, valid, suite):
    """Reference programs replayed, and with every call doubled: the official checker passes 800 and 288 of 800. On the
    doubled ones the released diagnosis put a wrong tag on 352 trajectories."""
    verifier, passed = Verifier(suite), 0
    for task in suite.tasks("all"):
        programs = suite.reference(task)
        turns = [steps(*[x for x in p for _ in range(1 + doubled)]) for p in programs]
        verdict = verifier.verify(task, turns)
        passed += verdict.reward == 1.0
        for turn, name in zip(verdict.turns, diagnose(verdict).names, strict=True):
            assert (name in ("pass", "correct_abstention")) or turn.passed is False
            assert name in ("pass", "correct_abstention") or doubled
    assert passed == valid
