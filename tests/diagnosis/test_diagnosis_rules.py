"""Every label on synthetic evidence, and the cases where the paper's order and the meaning of a label collide."""

from dataclasses import replace

import pytest

from seal_jax.diagnosis import diagnose, release_labels
from seal_jax.diagnosis.facts import same_call
from seal_jax.diagnosis.release import RELEASE_TAGS, TAG_TO_LABEL
from seal_jax.types import (
    LABELS,
    AttributeDiff,
    Call,
    CallResult,
    Diagnosis,
    ParseError,
    Step,
    TurnEvidence,
    Verdict,
)


def call(name, **arguments):
    return Call(name, arguments)


FIND, ADD, OPEN = call("find", who="Ann"), call("add", id="a1", amount=5), call("open", id="a1")


def ok(c, text="{}"):
    return CallResult(c, text)


def refused(c, text='{"error": "a1 is frozen"}'):
    return CallResult(c, text, "tool_error")


def failed(c, kind, detail=""):
    return CallResult(c, "Error during execution: ...", kind, detail)


def step(*results):
    return Step("", tuple(r.call for r in results), None, results)


def rejected(kind="bad_json", *calls):
    return Step("", calls, ParseError(kind, "why"))


def cut_but_ran(*results):
    """A message that was cut after its calls: the official protocol reads it as it is."""
    return replace(step(*results), truncated=True)


CUT = Step("", error=ParseError("truncated", "cut"), truncated=True)
DONE = Step("done")


def diff(model=False, reference=True, fresh=True, attribute="amounts"):
    return AttributeDiff("bank", attribute, model, reference, fresh)


LACKS = diff()  # the reference changed it, the policy did not
CHANGED = diff(model=True, reference=False)  # only the policy changed it
BOTH = diff(model=True, reference=True)
OLD = diff(model=False, reference=False, fresh=False)


def turn(*steps, reference=(FIND, ADD), diffs=(), missing=(), passed=False, index=0, reached=True):
    return TurnEvidence(
        turn=index,
        reached=reached,
        abstain=not reference,
        passed=passed,
        steps=steps,
        reference_results=tuple(r if isinstance(r, CallResult) else ok(r) for r in reference) if reached else (),
        state_diffs=tuple(diffs),
        missing_results=tuple(missing),
    )


def verdict(*turns):
    return Verdict(0.0, "", tuple(turns))


def label_of(t):
    (only,) = diagnose(verdict(t)).labels
    return only.label


CASES = {
    # --- before the rules
    "passed": ("pass", turn(step(ok(FIND)), step(ok(ADD)), DONE, passed=True)),
    "passed after every kind of detour": (
        "pass",
        turn(rejected(), step(refused(ADD)), step(failed(ADD, "missing_argument", "id")), step(ok(ADD)), passed=True),
    ),
    "not reached": ("not_reached", turn(passed=None, reached=False)),
    "abstain turn not reached": ("not_reached", turn(reference=(), passed=None, reached=False)),
    "the world broke": ("env_error", turn(step(failed(ADD, "env_error")))),
    "the reference could not run": ("env_error", turn(step(ok(FIND)), reference=(failed(ADD, "env_error"),))),
    "abstained": ("correct_abstention", turn(DONE, reference=(), passed=True)),
    "abstained, unchecked": ("correct_abstention", turn(DONE, reference=(), passed=None)),
    "abstained in a world that differs": ("correct_abstention", turn(DONE, reference=(), passed=False, diffs=[OLD])),
    "called where none was due": ("spurious_tool_call", turn(step(ok(FIND)), reference=(), passed=False)),
    "called, unchecked": ("spurious_tool_call", turn(step(ok(FIND)), reference=(), passed=None)),
    "rejected call where none was due": (
        "spurious_tool_call",
        turn(rejected("unavailable_tool", ADD), reference=(), passed=None),
    ),
    "malformed call where none was due": ("spurious_tool_call", turn(rejected(), reference=(), passed=None)),
    "rejected call, but the turn passed": ("correct_abstention", turn(rejected(), reference=(), passed=True)),
    "rambled on an abstain turn": ("invalid_tool_call", turn(CUT, reference=(), passed=None)),
    "reasoned without an end on an abstain turn": (
        "invalid_tool_call",
        turn(rejected("unclosed_reasoning"), DONE, reference=(), passed=None),
    ),
    # --- 1 invalid_tool_call
    "malformed, then gave up": ("invalid_tool_call", turn(rejected(), DONE, diffs=[LACKS])),
    "unknown tool": ("invalid_tool_call", turn(step(failed(call("addd"), "unknown_tool")), DONE, diffs=[LACKS])),
    "tool not offered": ("invalid_tool_call", turn(rejected("unavailable_tool", OPEN), DONE, diffs=[LACKS])),
    "cut message": ("invalid_tool_call", turn(step(ok(FIND)), CUT, diffs=[LACKS])),
    "malformed, then only a call the task has no use for": (
        "invalid_tool_call",
        turn(rejected(), step(ok(call("count", id="a1"))), DONE, diffs=[LACKS]),
    ),
    "malformed, put right, then another fault": (
        "argument_mismatch",
        turn(rejected(), step(ok(FIND)), step(ok(call("add", id="a1", amount=6))), diffs=[BOTH]),
    ),
    # --- 2 argument_mismatch
    "missing argument": (
        "argument_mismatch",
        turn(step(ok(FIND)), step(failed(call("add", id="a1"), "missing_argument", "amount")), DONE, diffs=[LACKS]),
    ),
    "unexpected argument": (
        "argument_mismatch",
        turn(step(ok(FIND)), step(failed(call("add", no=1), "unexpected_argument", "no")), diffs=[LACKS]),
    ),
    "mistyped argument": ("argument_mismatch", turn(step(failed(ADD, "argument_type", "amount")), diffs=[LACKS])),
    "wrong value": ("argument_mismatch", turn(step(ok(FIND)), step(ok(call("add", id="a1", amount=9))), diffs=[BOTH])),
    "wrong value in a message cut after the call": (
        "argument_mismatch",
        turn(step(ok(FIND)), cut_but_ran(ok(call("add", id="a1", amount=9))), diffs=[BOTH]),
    ),
    "wrong value, refused": (
        "argument_mismatch",
        turn(step(ok(FIND)), step(refused(call("add", id="Ann", amount=5), "no such account")), diffs=[LACKS]),
    ),
    "wrong read": (
        "argument_mismatch",
        turn(step(ok(call("count", id="b2"), "7")), reference=(ok(call("count", id="a1"), "5"),), missing=["5"]),
    ),
    "optional argument forgotten": (
        "argument_mismatch",
        turn(step(ok(ADD)), reference=(ok(call("add", id="a1", amount=5, speed="fast")),), diffs=[CHANGED, BOTH]),
    ),
    "argument error put right, then a wrong write": (
        "state_mismatch",
        turn(step(failed(ADD, "argument_type", "amount")), step(ok(FIND), ok(ADD), ok(OPEN)), diffs=[CHANGED]),
    ),
    # --- 3 state_mismatch: commission
    "needless repair": ("state_mismatch", turn(step(ok(FIND)), step(ok(OPEN)), step(ok(ADD)), diffs=[CHANGED])),
    "wrong tool": (
        "state_mismatch",
        turn(step(ok(FIND)), step(ok(call("remove", id="a1"))), diffs=[BOTH]),
    ),
    "did it twice": ("state_mismatch", turn(step(ok(FIND)), step(ok(ADD)), step(ok(ADD)), diffs=[BOTH])),
    "right calls in the wrong order": ("state_mismatch", turn(step(ok(ADD)), step(ok(FIND)), diffs=[BOTH])),
    "refused, then a write that the task leaves alone": (
        "state_mismatch",
        turn(step(ok(FIND)), step(refused(ADD)), step(ok(call("close", id="a1"))), diffs=[LACKS, CHANGED]),
    ),
    # --- 4 recovery_failure: omission after an error
    "refused, gave up": ("recovery_failure", turn(step(ok(FIND)), step(refused(ADD)), DONE, diffs=[LACKS])),
    "refused over and over": ("recovery_failure", turn(*[step(refused(ADD))] * 3, diffs=[LACKS])),
    "repaired but not repeated": (
        "recovery_failure",
        turn(step(ok(FIND)), step(refused(ADD)), step(ok(OPEN)), DONE, reference=(FIND, OPEN, ADD), diffs=[LACKS]),
    ),
    "one of two orders refused: the shared attribute changed, yet it is an omission": (
        "recovery_failure",
        turn(
            step(ok(call("add", id="b2", amount=1))),
            step(refused(ADD)),
            reference=(call("add", id="b2", amount=1), ADD),
            diffs=[BOTH],
        ),
    ),
    "half a transaction, then refused": (
        "recovery_failure",
        turn(
            step(ok(ADD)),
            step(refused(call("pay", id="a1"))),
            reference=(ADD, OPEN, call("pay", id="a1")),
            diffs=[CHANGED, LACKS],
        ),
    ),
    "refused as wanted, then varied": (
        "recovery_failure",
        turn(step(ok(FIND)), step(refused(ADD)), step(refused(call("add", id="a1", amount=1))), diffs=[LACKS]),
    ),
    "exception in the tool": ("recovery_failure", turn(step(ok(FIND)), step(failed(ADD, "exception")), diffs=[LACKS])),
    "refused read": (
        "recovery_failure",
        turn(step(refused(FIND)), DONE, reference=(ok(FIND, "a1"),), missing=["a1"]),
    ),
    "another tool refused, nothing after it": (
        "recovery_failure",
        turn(step(ok(FIND)), step(refused(call("close", id="a1"))), DONE, diffs=[LACKS]),
    ),
    # --- 5 missing_tool_call: omission without an error
    "no call": ("missing_tool_call", turn(DONE, diffs=[LACKS])),
    "no call, work done in an earlier turn": ("missing_tool_call", turn(DONE)),
    "too few calls": ("missing_tool_call", turn(step(ok(FIND)), DONE, diffs=[LACKS])),
    "one of two orders forgotten": (
        "missing_tool_call",
        turn(step(ok(ADD)), reference=(ADD, call("add", id="b2", amount=1)), diffs=[BOTH]),
    ),
    "half a transaction: the reference's calls but for the last": (
        "missing_tool_call",
        turn(step(ok(FIND)), step(ok(ADD)), DONE, reference=(FIND, ADD, call("pay", id="a1")), diffs=[CHANGED, LACKS]),
    ),
    "an error repaired, another call forgotten": (
        "missing_tool_call",
        turn(
            step(refused(ADD)),
            step(ok(OPEN)),
            step(ok(ADD)),
            reference=(OPEN, ADD, call("grade", id="a1", plan="x")),
            diffs=[diff(attribute="plans")],
        ),
    ),
    # --- 6 response_mismatch
    "never read out": (
        "response_mismatch",
        turn(step(ok(FIND)), DONE, reference=(FIND, ok(call("count", id="a1"), "5")), missing=["5"]),
    ),
    "65 is 65.0 as an argument, not as a result": (
        "response_mismatch",
        turn(
            step(ok(call("heat", to=65), "65")),
            reference=(ok(call("heat", to=65.0), "65.0"),),
            missing=["65.0"],
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_label(name):
    wanted, evidence = CASES[name]
    assert label_of(evidence) == wanted


def test_every_label_has_a_case():
    assert {wanted for wanted, _ in CASES.values()} == set(LABELS)


@pytest.mark.parametrize("name", CASES)
def test_a_turn_that_passed_is_never_a_failure(name):
    from dataclasses import replace

    _, t = CASES[name]
    if t.reached and label_of(t) != "env_error":
        assert label_of(replace(t, passed=True)) in ("pass", "correct_abstention")


def test_pure_and_deterministic():
    v = verdict(*[t for _, t in CASES.values()])
    assert diagnose(v) == diagnose(v)
    assert len(diagnose(v).labels) == len(v.turns)


def test_empty_verdict():
    assert diagnose(verdict()) == Diagnosis(())


# --- divergence is charged to the turn that caused it -----------------------------------------------------------------
def names(*turns):
    return diagnose(verdict(*turns)).names


def test_an_inherited_difference_is_a_pass():
    first = turn(step(ok(FIND)), step(ok(ADD)), step(ok(OPEN)), diffs=[CHANGED])
    second = turn(step(ok(ADD)), reference=(ADD,), diffs=[OLD], index=1)
    assert names(first, second) == ("state_mismatch", "pass")


def test_a_second_fault_after_an_inherited_difference_is_charged():
    first = turn(DONE, diffs=[LACKS])
    second = turn(step(ok(ADD)), step(ok(OPEN)), reference=(ADD,), diffs=[OLD, CHANGED], index=1)
    third = turn(DONE, reference=(ADD,), diffs=[OLD], index=2)
    assert names(first, second, third) == ("missing_tool_call", "state_mismatch", "missing_tool_call")


def test_the_same_calls_in_a_world_that_differs_are_a_pass_even_if_the_difference_grows():
    first = turn(DONE, diffs=[LACKS])
    second = turn(step(ok(ADD, "15")), reference=(ok(ADD, "10"),), diffs=[BOTH], missing=["10"], index=1)
    assert names(first, second) == ("missing_tool_call", "pass")
    # Without a difference before it, the same evidence is this turn's own fault.
    assert names(second) == ("state_mismatch",)


def test_an_inherited_result_is_not_charged_but_an_unread_one_is():
    first = turn(DONE, diffs=[LACKS])
    count = call("count", id="a1")
    read = turn(step(ok(count, "0")), reference=(ok(count, "5"),), diffs=[OLD], missing=["5"], index=1)
    unread = turn(step(ok(FIND)), reference=(FIND, ok(count, "5")), diffs=[OLD], missing=["5"], index=1)
    assert names(first, read)[1] == "pass"
    assert names(first, unread)[1] == "response_mismatch"


def test_a_fault_can_be_inherited_through_states_that_agree():
    """A wrong current folder or a spent random number is in no public state; the verifier tries the turn on its own."""
    first = turn(step(refused(FIND)), reference=(FIND,), missing=["x"])
    caught_up = turn(step(ok(FIND)), reference=(FIND,), passed=True, index=1)
    third = turn(step(ok(ADD)), step(ok(OPEN)), reference=(ADD,), diffs=[BOTH], index=2)
    right, wrong = (replace(third, right_alone=x) for x in (True, False))
    assert names(first, caught_up, right) == ("recovery_failure", "pass", "pass")
    assert names(first, caught_up, wrong) == ("recovery_failure", "pass", "state_mismatch")
    # A refusal that the turn saw and left as it was is its own fault in whatever world.
    left = replace(turn(step(refused(ADD)), reference=(ADD,), diffs=[LACKS], index=2), right_alone=True)
    assert names(first, caught_up, left)[2] == "recovery_failure"


# --- evidence ---------------------------------------------------------------------------------------------------------
def text_of(name):
    (only,) = diagnose(verdict(CASES[name][1])).labels
    return only.evidence


@pytest.mark.parametrize(
    "name, words",
    [
        ("unknown tool", ["unknown_tool", "addd"]),
        ("malformed, then gave up", ["bad_json", "why"]),
        ("missing argument", ["add", "missing_argument", "amount"]),
        ("wrong value", ["add", "amount"]),
        ("needless repair", ["bank.amounts", "changed"]),
        ("refused, gave up", ["add", "a1 is frozen"]),
        ("too few calls", ["bank.amounts", "add"]),
        ("never read out", ["5"]),
        ("called where none was due", ["find"]),
    ],
)
def test_evidence_names_what_was_seen(name, words):
    assert all(w in text_of(name) for w in words)


def test_evidence_of_a_wrong_value_does_not_tell_the_right_one():
    assert "5" not in text_of("wrong value")


def test_evidence_is_short():
    t = turn(step(refused(ADD, "x" * 5000)), diffs=[LACKS])
    assert all(len(x.evidence) <= 200 for x in diagnose(verdict(t)).labels)


# --- comparing calls --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "a, b, same",
    [
        (call("f", x=65), call("f", x=65.0), True),
        (call("f", x=True), call("f", x=1), False),
        (call("f", x=[1, {"y": 2}]), call("f", x=[1, {"y": 2.0}]), True),
        (call("f", x=[1, 2]), call("f", x=[2, 1]), False),
        (call("f", x="1"), call("f", x=1), False),
        (call("f"), call("g"), False),
        (Call("f", {}, ("a", 2)), call("f", s="a", n=2), True),
        (Call("f", {}, ("a",)), call("f", s="a", n=2), False),
        (Call("f", {"n": 3}, ("a",)), call("f", s="a", n=2), False),
    ],
)
def test_same_call(a, b, same):
    assert same_call(a, b) is same


def test_a_default_spelled_out_is_no_wrong_argument():
    spelled = ok(call("add", id="a1", amount=5, speed="slow"), '{"n": 5}')
    t = turn(step(spelled), DONE, reference=(ok(ADD, '{"n": 5}'), call("grade")), diffs=[diff(attribute="plans")])
    assert label_of(t) == "missing_tool_call"


# --- the release's tags -----------------------------------------------------------------------------------------------
def test_release_tags_are_cumulative_and_ignore_rejected_messages():
    v = verdict(
        turn(rejected(), DONE, diffs=[LACKS]),
        turn(step(ok(ADD)), reference=(ADD,), diffs=[OLD], index=1),
        turn(step(ok(FIND)), reference=(), passed=None, index=2),
        turn(rejected(), DONE, reference=(), passed=None, index=3),
        turn(passed=None, reached=False, index=4),
        turn(reference=(), passed=None, reached=False, index=5),
    )
    tags = release_labels(v)
    assert tags == (
        "empty_turn_model_response",
        "state_mismatch",
        "spurious_tool_call",
        "correct_abstention",
        "empty_turn_model_response",
        "correct_abstention",
    )


def test_release_tags_of_the_rest():
    v = verdict(
        turn(step(ok(ADD)), reference=(ADD,), passed=True),
        turn(step(ok(ADD)), reference=(ADD,), missing=["5"]),
        turn(step(ok(ADD)), reference=(failed(ADD, "env_error"),)),
        turn(step(failed(ADD, "env_error"))),
    )
    assert release_labels(v) == ("pass", "response_mismatch", "gt_error", "checker_error")


def test_every_release_tag_has_a_label():
    assert set(TAG_TO_LABEL) == set(RELEASE_TAGS)
    assert set(TAG_TO_LABEL.values()) <= set(LABELS)
