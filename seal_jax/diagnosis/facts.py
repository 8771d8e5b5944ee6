"""One turn's evidence in the terms of the rules: what was tried, what is lacking, what this turn is to blame for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from seal_jax.types import AttributeDiff, Call, CallResult, Step, TurnEvidence

ARGUMENT_ERRORS = frozenset({"missing_argument", "unexpected_argument", "argument_type"})
NAME_ERRORS = frozenset({"unknown_tool", "unavailable_tool"})
#: The call was well formed and ran, and the world did not do what was asked.
REFUSALS = frozenset({"tool_error", "exception", "time_limit", "size_limit"})


@dataclass(frozen=True)
class Attempt:
    """One thing the policy tried: a message rejected whole (`result` is None), or one call that was answered."""

    index: int  # among the attempts of the turn
    step: int  # index of the assistant message in its turn
    names: tuple[str, ...]  # tools it names; empty for a message that could not be read
    result: CallResult | None = None
    rejected: str = ""  # why the message was rejected, in words

    @property
    def ok(self) -> bool:
        return self.result is not None and self.result.ok

    @property
    def invalid(self) -> bool:
        """A malformed message, or a tool that does not exist or is not offered."""
        return self.result is None or self.result.error in NAME_ERRORS

    def has(self, kinds: frozenset[str]) -> bool:
        return self.result is not None and self.result.error in kinds


@dataclass(frozen=True)
class Facts:
    """The evidence of one turn, digested. `fresh` and `absent` hold only what this turn did not inherit."""

    attempts: tuple[Attempt, ...]
    lacking: tuple[Call, ...]  # reference calls with no successful counterpart in this turn
    extra: tuple[Call, ...]  # successful calls with no counterpart in the reference program
    near: tuple[
        tuple[Call, Call], ...
    ]  # (reference, policy) pairs alike but for an optional argument given by one only
    reference_tools: frozenset[str]
    fresh: tuple[AttributeDiff, ...]
    absent: tuple[str, ...]  # required result strings not read, for which this turn is to blame

    @property
    def worked(self) -> bool:
        """Did at least one call run and return a result."""
        return any(a.ok for a in self.attempts)

    @property
    def at_fault(self) -> bool:
        """Is anything wrong that this turn caused itself."""
        return bool(self.fresh or self.absent) or not self.worked

    @cached_property
    def last_ok(self) -> Mapping[tuple[str, ...], int]:
        """{tool, as `Attempt.names`: index of its last attempt that worked}. A message can hold very many calls, so
        nothing here looks from each attempt through all later ones."""
        return {a.names: a.index for a in self.attempts if a.ok}


def facts_of(turn: TurnEvidence, astray_before: bool) -> Facts:
    """Digests one turn. `astray_before`: had an earlier turn gone astray, so that what went wrong may be its fault."""
    attempts = _attempts(turn.steps)
    done = [a.result for a in attempts if a.ok and a.result is not None]
    lacking, extra, near = _pair(turn.reference_results, done)
    fresh = tuple(d for d in turn.state_diffs if d.fresh)
    absent = turn.missing_results
    if astray_before:
        # Right calls in another world: what differs afterwards was caused by an earlier turn. A refusal that this turn
        # saw and left as it was stays its own.
        if turn.right_alone is None:
            right = not lacking and not extra and not near
        else:
            right = turn.right_alone and (not lacking or all(a.ok for a in attempts))
        if right:
            fresh, absent = (), ()
        elif lacking or turn.right_alone is None:
            answered = {r.text for r in turn.reference_results if r.call not in lacking}
            absent = tuple(text for text in absent if text not in answered)
    return Facts(
        attempts=attempts,
        lacking=lacking,
        extra=extra,
        near=near,
        reference_tools=frozenset(r.call.name for r in turn.reference_results),
        fresh=fresh,
        absent=absent,
    )


def _attempts(steps: Sequence[Step]) -> tuple[Attempt, ...]:
    out: list[Attempt] = []
    for i, step in enumerate(steps):
        if step.error is not None or (step.truncated and not step.results):  # cut, and nothing of it ran
            names = tuple(c.name for c in step.calls)
            why = f"{step.error.kind}: {step.error.message}" if step.error is not None else "cut before its end"
            out.append(Attempt(len(out), i, names, rejected=why))
        else:
            out += [Attempt(len(out) + j, i, (r.call.name,), r) for j, r in enumerate(step.results)]
    return tuple(out)


def _pair(
    reference: Sequence[CallResult], done: Sequence[CallResult]
) -> tuple[tuple[Call, ...], tuple[Call, ...], tuple[tuple[Call, Call], ...]]:
    """Pairs the reference program with the successful calls, each used once: equal calls first, then near ones.

    Returns what is lacking, what is extra, and the near pairs.
    """
    wanted, left = list(reference), list(done)
    near: list[tuple[Call, Call]] = []
    for alike in (lambda w, d: same_call(w.call, d.call), _near):
        for w in list(wanted):
            pair = next((d for d in left if alike(w, d)), None)
            if pair is not None:
                _drop(wanted, w)
                _drop(left, pair)
                if alike is _near:
                    near.append((w.call, pair.call))
    return tuple(w.call for w in wanted), tuple(d.call for d in left), tuple(near)


def _drop(items: list[CallResult], item: CallResult) -> None:
    """Removes this very record, not an equal one."""
    del items[next(i for i, x in enumerate(items) if x is item)]


def _near(a: CallResult, b: CallResult) -> bool:
    """Same tool and result, and one gives arguments that the other leaves out: equal if those are the defaults."""
    x, y = a.call, b.call
    if x.name != y.name or a.text != b.text or x.positional or y.positional:
        return False
    if not (x.arguments.keys() <= y.arguments.keys() or y.arguments.keys() <= x.arguments.keys()):
        return False
    return not differing_arguments(x, y)


def same_call(a: Call, b: Call) -> bool:
    """Same tool and arguments; 65 and 65.0 are equal, True and 1 are not. Positional arguments of a reference call
    are compared by value, since the tool's signature is not known here."""
    if a.name != b.name:
        return False
    if not a.positional and not b.positional:
        return same_value(dict(a.arguments), dict(b.arguments))
    rest = [*b.positional, *b.arguments.values()]
    for value in [*a.positional, *a.arguments.values()]:
        i = next((i for i, other in enumerate(rest) if same_value(value, other)), None)
        if i is None:
            return False
        del rest[i]
    return not rest


def differing_arguments(a: Call, b: Call) -> tuple[str, ...]:
    """Names of the arguments that both calls give and that differ."""
    return tuple(k for k in a.arguments if k in b.arguments and not same_value(a.arguments[k], b.arguments[k]))


def same_value(a: Any, b: Any) -> bool:
    """JSON equality: numbers by value, booleans apart from numbers, lists in order, objects by key."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
