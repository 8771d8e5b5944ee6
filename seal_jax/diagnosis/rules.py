"""Ψ: one label for each turn, from the verifier's evidence alone (paper section 3.2, Table 5).

A label names what *this* turn did wrong. The rules are tried in the paper's order of priority and the first that holds
gives the label; its evidence says in words what was seen. The same evidence always gives the same labels.

Before the rules, in this order:

- `not_reached`: the turn was never opened.
- `env_error`: the world broke, or the reference program itself could not run.
- An abstain turn: `correct_abstention` if it passed; else `spurious_tool_call` if it holds a call, executed or
  rejected; else `invalid_tool_call` if its message was cut before the end, or malformed in a way that tells of no
  call (reasoning without an end); else `correct_abstention` (an unchecked turn, or one that failed only because the
  state differs since earlier).
- `pass`: the turn passed, whatever detours it took. No turn that passed is ever tagged as a failure.
- `pass`: the turn failed but caused nothing wrong itself. The difference stood already when it began; or an earlier
  turn had gone astray, this one got through with its calls, and they would have passed after the reference's own
  earlier turns (the verifier tries it: `TurnEvidence.right_alone`). A refused call that it left as it was is its own.

Then, for a turn that failed by its own fault:

1. `invalid_tool_call`: a message was malformed or cut, or named an unknown or unavailable tool, and no later call of
   the turn names a tool of the reference program (the policy never got back on track).
2. `argument_mismatch`: a call had a missing, unexpected or mistyped argument and its tool never succeeded afterwards;
   or a reference call is lacking while the same tool was called with other arguments; or the state differs and all
   that sets the calls apart is an optional argument left out or added.
3. `state_mismatch`: commission. With a call that is not the reference's (or its calls twice, or in another order) the
   turn changed an attribute that the reference leaves alone, or changed one wrongly.
4. `recovery_failure`: omission after an error. A call was refused and no retry succeeded in the turn, and it is a call
   that the reference needed or nothing succeeded after it.
5. `missing_tool_call`: omission without an error. No call succeeded, or the state lacks an effect of the reference.
6. `response_mismatch`: the state is right, but a result that the reference reads out was never obtained.

Where the order and the meaning collide, commission against omission decides:

- an error that was repaired later in the turn is not why the turn failed and gives no label;
- a refused call whose arguments are the reference's own is no `argument_mismatch`, and further variations tried after
  that refusal are attempts at recovery;
- when every successful call is one of the reference's and some are lacking, all that differs is an omission, whatever
  attributes it shows in (a basket that was filled and not bought);
- otherwise an attribute that both programs changed (two orders in one list) is ambiguous. It counts as omission when a
  needed call was refused and never got through, as commission if not. So giving up after an error is
  `recovery_failure` although the state differs, and a wrong write is `state_mismatch` although an effect is missing.
"""

from __future__ import annotations

from collections.abc import Callable

from seal_jax.diagnosis.facts import ARGUMENT_ERRORS, REFUSALS, Attempt, Facts, differing_arguments, facts_of, same_call
from seal_jax.envs.verifier import went_astray
from seal_jax.types import NO_CALL_FAULTS, AttributeDiff, Call, Diagnosis, TurnEvidence, TurnLabel, Verdict

_MAX_EVIDENCE = 200  # characters; evidence is for people, the whole record is in the verdict


def diagnose(verdict: Verdict) -> Diagnosis:
    """Labels every turn of a verdict. Pure; reads `TurnEvidence` only."""
    labels = []
    since: int | None = None  # the first turn that went astray
    for turn in verdict.turns:
        label, evidence = _label(turn, since)
        labels.append(TurnLabel(label, _short(evidence)))
        if since is None and went_astray(turn):
            since = turn.turn
    return Diagnosis(tuple(labels))


def _label(turn: TurnEvidence, since: int | None) -> tuple[str, str]:
    if not turn.reached:
        return "not_reached", "the episode ended before this turn"
    broken = _broken(turn)
    if broken:
        return "env_error", broken
    if turn.abstain:
        return _label_abstain(turn)
    if turn.passed:
        return "pass", ""
    facts = facts_of(turn, astray_before=since is not None)
    if not facts.at_fault:
        return "pass", "no fault here" if since is None else f"right on its own; turn {since} went astray"
    for label, rule in _RULES:
        evidence = rule(facts)
        if evidence is not None:
            return label, evidence
    raise AssertionError(f"turn {turn.turn}: at fault but no rule holds")  # the last rule always holds


def _broken(turn: TurnEvidence) -> str | None:
    for r in (r for step in turn.steps for r in step.results):
        if r.error == "env_error":
            return f"{r.call.name}: the environment failed: {r.text}"
    for r in turn.reference_results:
        if not r.answered:
            return f"the reference program could not run: {r.call.name}: {r.error}"
    return None


def _label_abstain(turn: TurnEvidence) -> tuple[str, str]:
    if turn.passed:
        return "correct_abstention", ""
    for i, step in enumerate(turn.steps):
        if step.calls:
            rejected = " (rejected)" if step.error is not None else ""
            return "spurious_tool_call", f"step {i}: {step.calls[0].name} called{rejected} where no call was due"
        if step.error is not None and not step.truncated and step.error.kind not in NO_CALL_FAULTS:
            return "spurious_tool_call", f"step {i}: a malformed call ({step.error.kind}) where no call was due"
    if any(step.truncated for step in turn.steps):
        return "invalid_tool_call", "the message was cut before its end"
    for i, step in enumerate(turn.steps):
        if step.error is not None:
            return "invalid_tool_call", f"step {i}: a malformed message ({step.error.kind}), no call to be seen in it"
    return "correct_abstention", "" if turn.passed is None else "no call; the state differs since an earlier turn"


# --- the rules of Table 5, for a turn that is at fault -----------------------------------------------------------
# Each returns the evidence, or None when it does not hold.


def _invalid_tool_call(f: Facts) -> str | None:
    on_track = (a.index for a in f.attempts if not a.invalid and f.reference_tools.intersection(a.names))
    last = max(on_track, default=-1)
    for a in f.attempts:
        if a.invalid and a.index > last:
            why = a.rejected if a.result is None else f"{a.result.error}: {a.names[0]}"
            return f"step {a.step}: never put right: {why}"
    return None


def _argument_mismatch(f: Facts) -> str | None:
    for a in f.attempts:
        if a.has(ARGUMENT_ERRORS) and a.index > f.last_ok.get(a.names, -1):
            assert a.result is not None
            return f"step {a.step}: {a.names[0]}: {a.result.error} {a.result.detail or a.result.text}"
    for wanted in f.lacking:
        if any(_refused_as_wanted(a, wanted) for a in f.attempts):
            continue  # the arguments were right; the state refused them
        for call in _other_attempts(f, wanted):
            names = ", ".join(differing_arguments(wanted, call)) or "arguments"
            return f"{call.name}: {names} not as the task asks"
    if f.fresh and not f.lacking and not f.extra:
        for wanted, call in f.near:  # every other call is right, so it is this one
            names = ", ".join(sorted(wanted.arguments.keys() ^ call.arguments.keys()))
            return f"{call.name}: {names} left out or not asked for"
    return None


def _state_mismatch(f: Facts) -> str | None:
    if f.lacking and not f.extra:
        return None  # all that was done was right; what differs is the effect of what was not done
    for d in f.fresh:
        if d.model_changed and not d.reference_changed:
            return f"{_where(d)} changed, which the task leaves alone"
    for d in f.fresh:
        if (d.model_changed or not d.reference_changed) and not _needed_refusals(f):
            calls = ", ".join(c.name for c in f.extra)
            return f"{_where(d)} wrong" + (f" after {calls}" if calls else "")
    return None


def _recovery_failure(f: Facts) -> str | None:
    needed = _needed_refusals(f)
    last_ok = max(f.last_ok.values(), default=-1)
    gave_up = [a for a in f.attempts if a.has(REFUSALS) and a.index > last_ok]
    for a in needed or gave_up:
        assert a.result is not None
        return f"step {a.step}: {a.names[0]} refused and never repaired: {a.result.text}"
    return None


def _missing_tool_call(f: Facts) -> str | None:
    if not f.worked:
        return "no call" if not f.attempts else "no call went through"
    if f.fresh:
        calls = ", ".join(c.name for c in f.lacking)
        return f"{_where(f.fresh[0])} lacks an effect" + (f"; not called: {calls}" if calls else "")
    return None


def _response_mismatch(f: Facts) -> str | None:
    return f"result never read: {f.absent[0] if f.absent else ''}"


_RULES: tuple[tuple[str, Callable[[Facts], str | None]], ...] = (
    ("invalid_tool_call", _invalid_tool_call),
    ("argument_mismatch", _argument_mismatch),
    ("state_mismatch", _state_mismatch),
    ("recovery_failure", _recovery_failure),
    ("missing_tool_call", _missing_tool_call),
    ("response_mismatch", _response_mismatch),
)


def _needed_refusals(f: Facts) -> list[Attempt]:
    """Refused calls that explain a lacking effect: the reference's very call, or its tool with no later success."""
    tools = {c.name for c in f.lacking}
    return [
        a
        for a in f.attempts
        if a.has(REFUSALS)
        and (
            any(_refused_as_wanted(a, wanted) for wanted in f.lacking)
            or (a.names[0] in tools and a.index > f.last_ok.get(a.names, -1))
        )
    ]


def _refused_as_wanted(a: Attempt, wanted: Call) -> bool:
    return a.has(REFUSALS) and a.result is not None and same_call(a.result.call, wanted)


def _other_attempts(f: Facts, wanted: Call) -> list[Call]:
    """Calls of the wanted tool that are no reference call: successful extras, and refused ones."""
    # A refused call that is itself a wanted one had the right arguments: it says nothing about its tool's other calls.
    wrong = [a for a in f.attempts if a.has(REFUSALS) and not any(_refused_as_wanted(a, w) for w in f.lacking)]
    refused = [a.result.call for a in wrong if a.result is not None]
    return [c for c in (*f.extra, *refused) if c.name == wanted.name]


def _where(d: AttributeDiff) -> str:
    return f"{d.instance}.{d.attribute}"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_EVIDENCE else text[: _MAX_EVIDENCE - 3] + "..."
