"""The verifier on a toy suite: the rule per turn, the evidence, and what breaks without being the policy's fault."""

from __future__ import annotations

import dataclasses

import pytest

from seal_jax.envs.execution import InstanceWorld
from seal_jax.envs.toolbox import ToolboxSuite
from seal_jax.envs.verifier import Verifier, executed_calls, failure_reason
from seal_jax.types import Call, CallResult, ParseError, Step, Task, Trajectory, UserTurn


class Safe:
    def __init__(self):
        self.notes, self.count, self._mood = [], 0, 0

    def add(self, text: str):
        self.notes.append(text)
        self.count += 1
        return {"count": self.count}

    def drop(self, text: str):
        if text not in self.notes:
            return {"error": "no such note"}
        self.notes.remove(text)

    def look(self):
        self._mood += 1
        return {"notes": self.notes}

    def nest(self):
        for _ in range(60):
            self.notes = [self.notes, self.notes]


class ToySuite:
    name = "toy"

    def __init__(self, *programs, checks_abstention=True):
        self.programs, self.checks_abstention = programs, checks_abstention

    def task(self):
        return Task("toy_1", "toy", "base", "1", (UserTurn("?"),) * len(self.programs), ())

    def reference(self, task):
        return self.programs

    def open(self, task):
        return InstanceWorld({"Safe": Safe()})


def add(text):
    return Call("add", {"text": text})


LOOK, WRONG = Call("look"), Call("add", {"txt": "a"})


def judge(suite, *turns, **options):
    return Verifier(suite).verify(suite.task(), turns, **options)


def test_reference_replay_passes_with_any_split_into_steps():
    suite = ToySuite((add("a"), LOOK), (add("b"),))
    for first in ([(add("a"), LOOK)], [(add("a"),), (), (LOOK,)], [(LOOK,), (add("a"),), (LOOK, LOOK)]):
        verdict = judge(suite, first, [(add("b"),)])
        assert (verdict.reward, verdict.reason) == (1.0, "valid")
        assert [turn.passed for turn in verdict.turns] == [True, True]


def test_every_reached_turn_gets_evidence_after_a_failure():
    suite = ToySuite((add("a"),), (add("b"),), (LOOK,))
    verdict = judge(suite, [(add("A"),)], [(add("b"),)], [(LOOK,)])
    assert (verdict.reward, verdict.reason) == (0.0, "state_mismatch")
    one, two, three = verdict.turns
    assert [d.attribute for d in one.state_diffs] == ["notes"]
    diff = one.state_diffs[0]
    assert (diff.instance, diff.model_changed, diff.reference_changed, diff.fresh) == ("Safe", True, True, True)
    # Both sides added "b": the attribute changed on both, but the difference is the one of turn 0.
    assert [(d.attribute, d.model_changed, d.fresh) for d in two.state_diffs] == [("notes", True, False)]
    assert [(d.attribute, d.model_changed, d.fresh) for d in three.state_diffs] == [("notes", False, False)]
    assert three.missing_results == ('{"notes": ["a", "b"]}',)
    assert [r.text for r in three.steps[0].results] == ['{"notes": ["A", "b"]}']
    assert [r.text for r in three.reference_results] == ['{"notes": ["a", "b"]}']


def test_a_difference_that_grows_or_comes_back_is_fresh():
    suite = ToySuite((add("a"),), (add("b"),), (add("c"),), (add("d"),))
    repaired = [(Call("drop", {"text": "A"}), add("a"), add("c"))]
    verdict = judge(suite, [(add("A"),)], [(add("B"),)], repaired, [(add("d"), add("e"))])
    fresh = [[(d.attribute, d.fresh) for d in turn.state_diffs] for turn in verdict.turns]
    assert fresh[0] == [("notes", True)] and fresh[1] == [("notes", True)]
    assert dict(fresh[2]) == {"notes": False, "count": True}  # the note was put right, at the price of a second add
    assert dict(fresh[3]) == {"notes": True, "count": True}


def test_results_are_a_multiset_over_all_turns_so_far():
    suite = ToySuite((add("a"), LOOK, LOOK), (LOOK,), (LOOK, LOOK))
    once = judge(suite, [(add("a"), LOOK)], [(LOOK,)], [(LOOK,)])
    assert once.reason == "response_mismatch"
    assert [turn.passed for turn in once.turns] == [False, True, True]  # earlier results serve later turns again
    assert once.turns[0].missing_results == ('{"notes": ["a"]}',)
    assert judge(suite, [(LOOK, add("a"), LOOK, LOOK)], [(WRONG,)], [(WRONG,)]).reward == 1.0


def test_empty_turns_fail_however_they_are_empty():
    suite = ToySuite((LOOK,), (LOOK,))
    malformed = Step("<tool_call>{", error=ParseError("json", "bad"))
    refused = Step("x", (LOOK,), results=(CallResult(LOOK, "[ERROR]", "unavailable_tool"),))
    for empty in ([], [()], [(), ()], [malformed], [refused]):
        verdict = judge(suite, [(LOOK, LOOK)], empty)
        assert (verdict.reason, verdict.turns[1].passed) == ("empty_turn", False)
        assert verdict.turns[1].missing_results == () and verdict.turns[1].state_diffs == ()
    assert judge(suite, [(LOOK, LOOK)], [(WRONG,)]).reward == 1.0  # a call that fails is a call


@pytest.mark.parametrize("checks, passed, reward", [(True, False, 0.0), (False, None, 1.0)])
def test_abstain_turns(checks, passed, reward):
    suite = ToySuite((), (add("a"),), checks_abstention=checks)
    verdict = judge(suite, [(LOOK,)], [(add("a"),)])
    assert (verdict.turns[0].abstain, verdict.turns[0].passed, verdict.reward) == (True, passed, reward)
    assert verdict.reason == ("spurious_call" if checks else "valid")
    quiet = judge(suite, [], [(add("a"),)])
    assert (quiet.turns[0].passed, quiet.reward) == (True if checks else None, 1.0)
    # What was done there shows in the next turn's state either way.
    early = judge(suite, [(add("a"),)], [(add("a"),)])
    assert [(d.attribute, d.model_changed, d.fresh) for d in early.turns[0].state_diffs] == [
        ("notes", True, True),
        ("count", True, True),
    ]
    assert early.reward == 0.0


def test_progress_is_the_share_of_checked_turns_passed():
    three = ToySuite((add("a"),), (add("b"),), (add("c"),))
    right = [(add(x),) for x in "abc"]
    assert judge(three, *([x] for x in right)).progress == 1.0
    assert judge(three, [right[0]], [(LOOK,)], [right[2]]).progress == 1 / 3  # the world stays without "b"
    assert judge(three, [right[0]], [right[1]]).progress == 2 / 3  # the last was not reached
    assert judge(three, [right[0]], [(LOOK,)], stopped_early=True).progress == 1 / 3
    assert judge(three, *([x] for x in right), [right[0]]).progress == 0.0  # all passed, and not the end of it
    assert judge(three).progress == 0.0


@pytest.mark.parametrize("checks, strayed, quiet", [(True, 1 / 3, 2 / 3), (False, 0.5, 0.5)])
def test_progress_leaves_out_what_is_not_checked(checks, strayed, quiet):
    suite = ToySuite((), (add("a"),), (add("b"),), checks_abstention=checks)
    assert judge(suite, [(LOOK,)], [(add("a"),)], [(LOOK,)]).progress == strayed
    assert judge(suite, [], [(add("a"),)], [(LOOK,)]).progress == quiet
    whole = judge(suite, [], [(add("a"),)], [(add("b"),)])
    assert whole.progress == whole.reward == 1.0
    alone = judge(ToySuite((), checks_abstention=checks), [(LOOK,)])
    assert alone.progress == alone.reward == (0.0 if checks else 1.0)


def test_progress_agrees_with_the_reward_on_the_toolbox():
    suite, seen = ToolboxSuite(train=6, val=0, test=0, ood=0, troubled=0.6), set()
    for task in suite.tasks("train"):
        calls = [[[call] for call in program] for program in suite.reference(task)]
        for turns in (calls, calls[:-1], [*calls[:-1], []], [[] for _ in calls]):
            verdict = Verifier(suite).verify(task, turns)
            assert (verdict.progress == 1.0) == (verdict.reward == 1.0)
            assert verdict.progress == sum(turn.passed is True for turn in verdict.turns) / len(calls)
            seen.add(verdict.progress)
    assert {0.0, 0.5, 1.0} <= seen


@pytest.mark.parametrize(
    "call",
    [Call("add", {"rejected": 1}), Call("add", {"unavailable_tool": 1}), Call("rejected"), Call("unavailable_tool")],
)
def test_the_names_in_a_call_cannot_make_it_count_as_refused(call):
    suite = ToySuite((), (add("a"),))
    result = suite.open(suite.task()).call(call)  # its `detail` is the policy's own word
    for turn in ([(call,)], [Step("", (call,), results=(result,))]):
        verdict = judge(suite, turn, [(add("a"),)])
        assert (verdict.turns[0].passed, verdict.reward, verdict.reason) == (False, 0.0, "spurious_call")


def test_episodes_of_another_length_are_force_terminated():
    suite = ToySuite((LOOK,), (LOOK,))
    short = judge(suite, [(LOOK,)])
    assert (short.reward, short.reason) == (0.0, "force_terminated")
    assert [(turn.reached, turn.passed) for turn in short.turns] == [(True, True), (False, None)]
    assert judge(suite).reason == judge(suite, [(LOOK,)], [(LOOK,)], []).reason == "force_terminated"
    assert judge(suite, []).reason == "force_terminated"  # the official precedence
    assert judge(suite, [], stopped_early=True).reason == "empty_turn"
    assert judge(suite, [(LOOK,)], stopped_early=True).reason == "force_terminated"


def test_session_judges_turn_by_turn():
    suite = ToySuite((add("a"),), (LOOK,))
    session = Verifier(suite).begin(suite.task())
    assert session.turn([(add("b"),)]).passed is False
    verdict = session.finish(1, stopped_early=True)
    assert (verdict.reason, len(verdict.turns), verdict.turns[1].reached) == ("state_mismatch", 2, False)
    session = Verifier(suite).begin(suite.task())
    session.turn([(add("a"),)])
    session.turn([(LOOK,)])
    assert session.finish().reward == 1.0
    with pytest.raises(ValueError, match="turn 2 was given, but the task has 2"):
        session.turn([])


def test_recorded_steps_keep_text_errors_and_rejections():
    suite = ToySuite((add("a"),), (LOOK,))
    stale = CallResult(add("a"), "what the live world said", "none")
    no_tool = CallResult(LOOK, "[ERROR] not available", "unavailable_tool", "look")
    steps = (
        Step("oops", error=ParseError("json", "bad", 3)),
        Step("two", (LOOK,), results=(no_tool,)),
        Step("three", (add("a"),), results=(stale,)),
    )
    assert [executed_calls(step) for step in steps] == [(), (), (add("a"),)]
    assert executed_calls(Step("", (LOOK,))) == (LOOK,)
    verdict = judge(suite, steps, [(LOOK,)])
    assert verdict.reward == 1.0
    replayed = verdict.turns[0].steps
    assert [step.text for step in replayed] == ["oops", "two", "three"]
    assert replayed[0].error == ParseError("json", "bad", 3) and replayed[0].results == ()
    assert replayed[1].results == (no_tool,)
    assert replayed[2].results[0].text == '{"count": 1}'

    trajectory = Trajectory("toy_1", "base", 0, 0, False, (), (), (steps, (Step("", (LOOK,)),)), "completed")
    assert Verifier(suite).verify_trajectory(suite.task(), trajectory) == verdict
    with pytest.raises(ValueError, match="'toy_2' is verified against task 'toy_1'"):
        Verifier(suite).verify_trajectory(suite.task(), dataclasses.replace(trajectory, task_id="toy_2"))


def test_tool_errors_of_the_reference_are_fine_but_broken_references_are_not():
    refused = Call("drop", {"text": "z"})
    suite = ToySuite((refused, add("a")))
    assert judge(suite, [(refused, add("a"))]).reward == 1.0
    broken = judge(ToySuite((add("a"),), (WRONG,), (LOOK,)), [(add("a"),)], [(WRONG,)], [(LOOK,)])
    assert (broken.reward, broken.reason) == (0.0, "env_error")
    assert [failure_reason(turn) for turn in broken.turns] == ["valid", "env_error", "valid"]
    result = broken.turns[1].reference_results[0]
    assert (result.error, result.detail) == ("env_error", "reference: unexpected_argument")


def test_what_breaks_in_the_verifier_is_evidence_not_a_crash():
    class Broken(InstanceWorld):
        calls = 0

        def call(self, call):
            raise RuntimeError("disk on fire")

    suite = ToySuite((add("a"),))
    suite.open = lambda task: Broken({"Safe": Safe()})
    verdict = judge(suite, [(add("a"),)])
    assert (verdict.reward, verdict.reason, verdict.turns[0].passed) == (0.0, "env_error", False)
    assert verdict.turns[0].reference_results[0].detail == "verifier: RuntimeError: disk on fire"

    wrong = ToySuite((LOOK,))
    task = dataclasses.replace(wrong.task(), turns=(UserTurn("?"),) * 2)
    with pytest.raises(ValueError, match="2 turns but 1 reference programs"):
        Verifier(wrong).begin(task)


def test_states_that_grow_without_bound_are_a_mismatch_not_a_hang():
    suite = ToySuite((LOOK,), (LOOK,))
    verdict = judge(suite, [(LOOK, Call("nest"))], [(WRONG,)])
    assert verdict.reason == "state_mismatch"
    assert [(d.attribute, d.fresh) for d in verdict.turns[0].state_diffs] == [("notes", True)]
