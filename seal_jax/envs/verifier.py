"""The strict verifier: one piece of code for every suite, in one pass, with the evidence the diagnosis reads.

The model's executed calls and the reference program are replayed side by side, each on its own fresh world, turn by
turn. A turn with a reference program passes iff (BFCL's multi-turn checker):

1. the model executed at least one call in it;
2. every public attribute of every instance equals the reference's;
3. every result string of this turn's reference calls is found, as a multiset, among all the model's results so far.

A turn without one is not checked (BFCL), or passes iff nothing was executed (`suite.checks_abstention`). The reward is
1 iff every turn was reached and every checked turn passed. Unlike the official checker the evidence has no early exit:
every reached turn is looked at, also after a failure, and on clean instances, so that a diagnosis can be read off it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from seal_jax.envs.base import Suite, World, open_pair
from seal_jax.envs.snapshot import Difference, StateTooLarge, differences, snapshot
from seal_jax.types import AttributeDiff, Call, CallResult, Program, Step, Task, Trajectory, TurnEvidence, Verdict

#: Stable names of `Verdict.reason`, in the order in which a turn is judged.
REASONS = (
    "valid",
    "force_terminated",
    "env_error",
    "spurious_call",
    "empty_turn",
    "state_mismatch",
    "response_mismatch",
)

#: One turn as the verifier takes it: recorded Steps, or bare steps of calls.
TurnCalls = Sequence[Step | Sequence[Call]]


def was_rejected(result: CallResult) -> bool:
    """Whether a recorded result stands for a call that the protocol refused, so that it was never executed.

    Read off the kind alone, which no world sets: `detail` and `text` hold words that the policy chose.
    """
    return result.error == "unavailable_tool"


def executed_calls(step: Step) -> tuple[Call, ...]:
    """The calls of a step that were executed: none of a malformed message, no rejected ones.

    A step without recorded results (a replay) counts all its calls; with recorded results, call i is executed iff
    `results[i]` exists and was not rejected.
    """
    if step.error is not None:
        return ()
    if not step.results:
        return step.calls
    return tuple(call for call, result in zip(step.calls, step.results, strict=False) if not was_rejected(result))


def failure_reason(turn: TurnEvidence) -> str:
    """The stable short reason of one turn, read off its evidence; "valid" if nothing speaks against the turn."""
    if has_env_error(turn):
        return "env_error"
    if turn.passed is not False:
        return "valid"
    if turn.abstain:
        return "spurious_call"
    if not any(executed_calls(step) for step in turn.steps):
        return "empty_turn"
    return "state_mismatch" if turn.state_diffs else "response_mismatch"


def has_env_error(turn: TurnEvidence) -> bool:
    """Whether the world, the reference or the verifier itself broke in this turn: an "env_error" result says so."""
    results = [r for step in turn.steps for r in step.results]
    return any(r.error == "env_error" for r in (*results, *turn.reference_results))


def went_astray(turn: TurnEvidence) -> bool:
    """Whether later turns may suffer from this one: it failed, left another state, or acted where nothing was due.

    States alone do not tell: where a world keeps private things (a current folder, a stream of random numbers), they
    can agree and later answers still differ.
    """
    acted = turn.abstain and any(executed_calls(step) for step in turn.steps)
    return bool(turn.passed is False or turn.state_diffs or acted)


class Verifier:
    """Judges whole episodes, or begins one that is judged turn by turn."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite

    def begin(self, task: Task) -> VerifierSession:
        """Opens two fresh worlds; feed the session one turn after the other, then finish it."""
        return VerifierSession(self.suite, task)

    def verify(
        self,
        task: Task,
        turns: Sequence[TurnCalls],
        *,
        stopped_early: bool = False,
        aborted: bool = False,
        begun: VerifierSession | None = None,
    ) -> Verdict:
        """Judges an episode given as turns of Steps (`trajectory.turns`) or as turns of steps of calls.

        A number of turns other than the task's makes it "force_terminated", whatever else failed, as the official
        checker has it; with `stopped_early` the reason is the failed turn's. `aborted`: it broke off in its last turn.
        `begun`: a session that has seen the first of these turns; only the others are replayed.
        """
        session = self.begin(task) if begun is None else begun
        for turn in turns[session.n_seen : session.n_turns]:
            session.turn(turn)
        # No task has 0 turns: an episode that was aborted is force_terminated, however far it came.
        return session.finish(0 if aborted else len(turns), stopped_early=stopped_early)

    def verify_trajectory(self, task: Task, trajectory: Trajectory, begun: VerifierSession | None = None) -> Verdict:
        if trajectory.task_id != task.id:
            raise ValueError(f"trajectory.task_id={trajectory.task_id!r} is verified against task {task.id!r}")
        # Where a row is full, the package's inference fails, and with it the task, whichever turn was being played.
        aborted = trajectory.protocol == "official" and trajectory.stop == "context_limit"
        early = trajectory.stop == "stopped_early"
        return self.verify(task, trajectory.turns, stopped_early=early, aborted=aborted, begun=begun)


class VerifierSession:
    """One episode under verification. `turn()` once per reached turn, in order; then `finish()`."""

    def __init__(self, suite: Suite, task: Task) -> None:
        self._suite, self._task = suite, task
        self._checks_abstention = suite.checks_abstention
        self._programs: tuple[Program, ...] = tuple(suite.reference(task))
        if len(self._programs) != len(task.turns):
            raise ValueError(
                f"task {task.id!r} has {len(task.turns)} turns but {len(self._programs)} reference programs; "
                "mend the suite's data"
            )
        self._evidence: list[TurnEvidence] = []
        self._model, self._reference = map(_Side, open_pair(suite, task))
        self._results_so_far: Counter[str] = Counter()
        self._open_diffs: dict[tuple[str, str], frozenset[Difference]] = {}
        # Fresh worlds of one task are in the same state, so one snapshot of it serves both.
        self._model.last = self._reference.last = _snapshots(self._reference.world.state())

    @property
    def n_turns(self) -> int:
        return len(self._programs)

    @property
    def n_seen(self) -> int:
        """Turns fed so far."""
        return len(self._evidence)

    def turn(self, steps: TurnCalls) -> TurnEvidence:
        """Replays one turn of the model and of the reference and compares; never raises for what the policy did."""
        index = len(self._evidence)
        if index >= self.n_turns:
            raise ValueError(f"turn {index} was given, but the task has {self.n_turns} turns")
        recorded = [step if isinstance(step, Step) else Step("", tuple(step)) for step in steps]
        try:
            evidence = self._judge(index, recorded)
        except Exception as error:  # our own code, a suite's world or its data: never the policy's fault
            evidence = _broken(index, recorded, self._programs[index], error)
        self._evidence.append(evidence)
        return evidence

    def finish(self, n_turns_reached: int | None = None, *, stopped_early: bool = False) -> Verdict:
        """The verdict; turns that were not fed are evidence with `reached=False`.

        `n_turns_reached` (default: the turns fed) may exceed the task's turns: that, too, is force_terminated.
        """
        reached = len(self._evidence) if n_turns_reached is None else n_turns_reached
        turns = tuple(self._evidence) + tuple(
            TurnEvidence(turn=i, reached=False, abstain=not self._programs[i], passed=None)
            for i in range(len(self._evidence), self.n_turns)
        )
        reasons = [failure_reason(turn) for turn in self._evidence]
        reason = next((r for r in reasons if r != "valid"), "valid")
        if reached != self.n_turns and not (stopped_early and reason != "valid"):
            reason = "env_error" if "env_error" in reasons else "force_terminated"
        return Verdict(reward=1.0 if reason == "valid" else 0.0, reason=reason, turns=turns)

    def _judge(self, index: int, recorded: Sequence[Step]) -> TurnEvidence:
        program = self._programs[index]
        steps = tuple(self._model.play(step) for step in recorded)
        results = [r for step in steps for r in step.results if not was_rejected(r)]
        reference_results = tuple(
            r if r.answered else replace(r, error="env_error", detail=f"reference: {r.error}")
            for r in (self._reference.world.call(call) for call in program)
        )
        self._results_so_far.update(r.text for r in results)
        missing = _missing([r.text for r in reference_results], self._results_so_far)
        diffs = self._compare(index, model_ran=bool(results), reference_ran=bool(program))
        passed: bool | None
        if program:
            passed = bool(results) and not diffs and not missing
        else:
            passed = not results if self._checks_abstention else None
        asks = bool(program) and bool(results) and not passed and any(map(went_astray, self._evidence))
        evidence = TurnEvidence(
            turn=index,
            reached=True,
            abstain=not program,
            passed=passed,
            right_alone=self._right_alone(index, recorded) if asks else None,
            steps=steps,
            reference_results=reference_results,
            state_diffs=diffs,
            missing_results=missing,
        )
        return replace(evidence, passed=False) if has_env_error(evidence) else evidence

    def _right_alone(self, index: int, recorded: Sequence[Step]) -> bool:
        """Whether this turn's calls pass after the reference's earlier turns: is the fault this turn's own."""
        if [call for step in recorded for call in executed_calls(step)] == list(self._programs[index]):
            return True
        session = VerifierSession(self._suite, self._task)
        for program in self._programs[:index]:
            session.turn((program,) if program else ())
        return session.turn(recorded).passed is True

    def _compare(self, index: int, *, model_ran: bool, reference_ran: bool) -> tuple[AttributeDiff, ...]:
        """The attributes that differ at the end of turn `index`; moves the sides' snapshots there.

        Snapshots cost more than all the rest, so they are taken only where they can be asked for: of both sides where
        they differ, of one for both where they agree, of none where they agree after the last turn.
        """
        if not (model_ran or reference_ran or self._open_diffs):
            return ()
        model, reference = self._model, self._reference
        is_last = index == self.n_turns - 1
        model_state, reference_state = model.world.state(), reference.world.state()
        model_now: dict[tuple[str, str], Any] = {}
        reference_now: dict[tuple[str, str], Any] = {}
        found, still_open = [], {}
        for instance, attributes in reference_state.items():
            model_attributes = model_state.get(instance, {})
            for attribute, value in attributes.items():
                key = (instance, attribute)
                ours = model_attributes.get(attribute, _ABSENT)
                if not _differ(ours, value):
                    if not is_last:
                        model_now[key] = reference_now[key] = _taken(value)
                    continue
                model_before, reference_before = model.last.get(key, _ABSENT), reference.last.get(key, _ABSENT)
                model_now[key] = _taken(ours) if model_ran else model_before
                reference_now[key] = _taken(value) if reference_ran else reference_before
                apart = differences(model_now[key], reference_now[key])
                still_open[key] = apart
                found.append(
                    AttributeDiff(
                        instance=instance,
                        attribute=attribute,
                        model_changed=model_ran and _differ(model_before, model_now[key]),
                        reference_changed=reference_ran and _differ(reference_before, reference_now[key]),
                        fresh=key not in self._open_diffs or not apart <= self._open_diffs[key],
                    )
                )
        model.last, reference.last, self._open_diffs = model_now, reference_now, still_open
        return tuple(found)


_ABSENT = "<absent>"
_UNREADABLE = "<unreadable>"


class _Side:
    """One of the two worlds, with snapshots of its attributes at the end of the last turn."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.last: dict[tuple[str, str], Any] = {}

    def play(self, step: Step) -> Step:
        """Replays the executed calls of a step; rejected ones keep their recorded results."""
        if step.error is not None:
            return replace(step, results=())
        if not step.results:
            return replace(step, results=tuple(self.world.call(call) for call in step.calls))
        replayed = tuple(
            result if was_rejected(result) else self.world.call(call)
            for call, result in zip(step.calls, step.results, strict=False)
        )
        return replace(step, results=replayed)


def _snapshots(state: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str], Any]:
    return {(instance, name): _taken(value) for instance, own in state.items() for name, value in own.items()}


def _taken(value: Any) -> Any:
    try:
        return snapshot(value)
    except StateTooLarge:  # grown without bound: known to differ, and how is not looked at
        return _UNREADABLE


def _differ(ours: Any, theirs: Any) -> bool:
    try:
        return bool(ours != theirs)
    except Exception:  # a state that cannot even be compared (endless nesting) does not equal the reference's
        return True


def _missing(wanted: Sequence[str], available: Counter[str]) -> tuple[str, ...]:
    """The wanted strings, in order, that the multiset `available` does not cover."""
    left = Counter(available)
    missing = []
    for text in wanted:
        if left[text] > 0:
            left[text] -= 1
        else:
            missing.append(text)
    return tuple(missing)


def _broken(index: int, recorded: Sequence[Step], program: Program, error: Exception) -> TurnEvidence:
    call = program[0] if program else Call("verifier")
    result = CallResult(call, "", "env_error", f"verifier: {type(error).__name__}: {error}")
    return TurnEvidence(
        turn=index,
        reached=True,
        abstain=not program,
        passed=False,
        steps=tuple(recorded),
        reference_results=(result,),
    )
