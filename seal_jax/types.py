"""The records every room of seal_jax speaks: tasks, calls, trajectories, verdicts, labels.

Pure Python (no jax, no numpy): environments, diagnosis and interface import this and run anywhere.
Everything here is frozen; a room that wants a changed record makes a new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# --- labels (Ψ's alphabet) -------------------------------------------------------------------------------------------
#: Every label the diagnosis can give a turn. The order fixes the ids used in `labels_bgt` and the axis of `utility_z`.
#: The first eight are the paper's (Table 5, Fig. 2 and Table 6); `not_reached` and `env_error` never enter a weight.
LABELS: tuple[str, ...] = (
    "pass",
    "correct_abstention",
    "invalid_tool_call",
    "argument_mismatch",
    "state_mismatch",
    "recovery_failure",
    "missing_tool_call",
    "response_mismatch",
    "spurious_tool_call",
    "not_reached",
    "env_error",
)
LABEL_ID: Mapping[str, int] = {name: i for i, name in enumerate(LABELS)}
SUCCESS_LABELS = frozenset({"pass", "correct_abstention"})
#: Labels that carry no weight and no profile count: nothing was observed about the policy there.
EXCLUDED_LABELS = frozenset({"not_reached", "env_error"})
FAILURE_LABELS: tuple[str, ...] = tuple(x for x in LABELS if x not in SUCCESS_LABELS | EXCLUDED_LABELS)

CATEGORIES: tuple[str, ...] = ("base", "miss_func", "miss_param", "long_context")

#: A tool's documentation: a JSON object with `name`, `description`, `parameters` {`type`, `properties`, `required`}.
ToolDoc = Mapping[str, Any]


# --- tasks -----------------------------------------------------------------------------------------------------------
class Unevaluated(str):
    """An argument that is Python source instead of a value, where BFCL's executor would evaluate what a model wrote.

    It prints bare, so that `str(call)` is the line that the executor gets. A world reads it (literals, and calls of its
    own tools); no source is ever run as code.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Call:
    """One tool call. `positional` is non-empty only in calls that others wrote as Python (decoded result lines)."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()

    def __str__(self) -> str:
        args = [repr(v) for v in self.positional] + [f"{k}={v!r}" for k, v in self.arguments.items()]
        return f"{self.name}({', '.join(args)})"


#: One turn's reference program: its gold calls in order; empty on an abstain turn.
Program = tuple[Call, ...]


@dataclass(frozen=True)
class UserTurn:
    """What opens a turn: the user's message, or (a reveal turn) held-out tools that become available."""

    user: str
    reveals: tuple[ToolDoc, ...] = ()


@dataclass(frozen=True)
class Task:
    """A task as the policy's side may see it. The reference program is *not* here: `Suite.reference(task)` holds it,
    so nothing that is handed a Task (rendering, interface, collector) can leak one."""

    id: str
    suite: str
    category: str
    scenario: str  # splits are made by scenario, never by task
    turns: tuple[UserTurn, ...]
    tools: tuple[ToolDoc, ...]  # offered from the start; reveal turns add to them
    domains: tuple[str, ...] = ()
    system: str = ""  # extra system text of the suite, usually empty


# --- what happens in an episode --------------------------------------------------------------------------------------
ErrorKind = Literal[
    "none",  # the call returned a result
    "tool_error",  # the tool itself refused: it returned an error object
    "unknown_tool",  # no such tool in this world
    "unavailable_tool",  # the tool exists but is not offered (yet) at this turn
    "missing_argument",
    "unexpected_argument",
    "argument_type",  # a wrong type or value outside the documented enum, as far as the world checks it
    "exception",  # any other exception raised inside the tool
    "time_limit",
    "size_limit",
    "env_error",  # the world itself broke: never the policy's fault
]


@dataclass(frozen=True)
class CallResult:
    """The observation of one executed call. `text` is exactly the string the verifier compares and the policy reads."""

    call: Call
    text: str
    error: ErrorKind = "none"
    detail: str = ""  # for an error: the offending argument's name, the limit, ... never a value from a reference

    @property
    def ok(self) -> bool:
        return self.error == "none"

    @property
    def answered(self) -> bool:
        """The tool ran, if only to refuse. A reference call that did not shows a broken world or reference."""
        return self.error in ("none", "tool_error")


@dataclass(frozen=True)
class ParseError:
    """A malformed message. `position`: character offset in the sampled text; `kind`: a stable short name."""

    kind: str
    message: str
    position: int = 0


#: Kinds of ParseError that do not say that the message meant to call a tool.
NO_CALL_FAULTS = frozenset({"special_token", "too_long", "unclosed_reasoning", "stray_reasoning_end"})


@dataclass(frozen=True)
class Step:
    """One assistant message and what the world answered. A message with a parse error executes nothing."""

    text: str  # decoded sampled text (for people and result files; never re-encoded)
    calls: tuple[Call, ...] = ()
    error: ParseError | None = None
    results: tuple[CallResult, ...] = ()
    truncated: bool = False  # generation hit its token limit before an end token


TokenSource = Literal["template", "user", "observation", "cue", "sampled"]


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one origin, exactly as the policy saw (or sampled) them."""

    ids: tuple[int, ...]
    source: TokenSource
    turn: int  # index of the user turn the tokens belong to
    logps: tuple[float, ...] = ()  # float32 log-probs at sampling; only for source == "sampled"

    def __post_init__(self) -> None:
        if self.source == "sampled" and len(self.logps) != len(self.ids):
            raise ValueError(f"sampled segment has {len(self.ids)} ids but {len(self.logps)} log-probs")


#: How an episode is played: as the paper's environment does (training, always), or as the benchmark package does.
Protocol = Literal["seal", "official"]
PROTOCOLS: tuple[Protocol, ...] = ("seal", "official")

StopReason = Literal[
    "completed",  # every user turn was played
    "step_limit",  # too many steps in a turn or in the episode
    "context_limit",  # the row is full
    "truncated",  # a message was cut at max_new_tokens
    "stopped_early",  # training only: the turn failed, so the reward is already known to be 0
    "env_error",
]


@dataclass(frozen=True)
class Trajectory:
    """One episode. Invariant: prompt_ids + concat(segment ids) is exactly what the model saw, in order.

    `turns[t]` are the steps of user turn t; turns that were never opened are absent (len(turns) <= len(task.turns)).
    The first segment is never sampled (it is the assistant header, or a cue note), so position 0 of a suffix is never
    a loss position.
    """

    task_id: str
    category: str
    rollout: int
    round: int
    cued: bool  # did Ω show this row its cues
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    turns: tuple[tuple[Step, ...], ...]
    stop: StopReason
    protocol: Protocol = "seal"

    @property
    def suffix_ids(self) -> list[int]:
        return [i for s in self.segments for i in s.ids]

    @property
    def n_sampled(self) -> int:
        return sum(len(s.ids) for s in self.segments if s.source == "sampled")

    @property
    def calls(self) -> tuple[tuple[tuple[Call, ...], ...], ...]:
        """Executed calls as turns of steps of calls; a rejected message contributes an empty step."""
        return tuple(tuple(step.calls if step.error is None else () for step in turn) for turn in self.turns)


# --- verdict and diagnosis -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class AttributeDiff:
    """A public attribute of a tool instance whose value differs from the reference's at the end of a turn."""

    instance: str
    attribute: str
    model_changed: bool  # did the model's calls of this turn change it
    reference_changed: bool  # did the reference program of this turn change it
    fresh: bool  # False if the same difference already stood at the end of the previous turn


@dataclass(frozen=True)
class TurnEvidence:
    """Everything the verifier saw in one turn; the diagnosis reads only this.

    `passed` is None on an abstain turn that the suite does not check (BFCL), and on a turn that was not reached.
    """

    turn: int
    reached: bool
    abstain: bool
    passed: bool | None
    steps: tuple[Step, ...] = ()  # with results as replayed by the verifier
    reference_results: tuple[CallResult, ...] = ()
    state_diffs: tuple[AttributeDiff, ...] = ()
    missing_results: tuple[str, ...] = ()  # reference result strings not found among the model's results so far
    #: Of a failed turn after one that had gone astray: would the same calls have passed after the reference's earlier
    #: turns? None where the question does not arise.
    right_alone: bool | None = None


@dataclass(frozen=True)
class Verdict:
    """reward is 1.0 iff every checked turn passed and every turn was reached; `reason` is a stable short name."""

    reward: float
    reason: str
    turns: tuple[TurnEvidence, ...]

    @property
    def progress(self) -> float:
        """Share of the turns that were passed, of those that are checked; a turn that was not reached was not passed
        (nor was one that asks for no call, although BFCL would not have checked it). 1.0 iff the reward is."""
        if self.reward == 1.0:
            return 1.0
        checked = [turn.passed is True for turn in self.turns if turn.passed is not None or not turn.reached]
        return sum(checked) / len(checked) if checked and not all(checked) else 0.0


@dataclass(frozen=True)
class TurnLabel:
    """Ψ's output for one turn, with the evidence in words a person can read."""

    label: str
    evidence: str = ""


@dataclass(frozen=True)
class Diagnosis:
    labels: tuple[TurnLabel, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(x.label for x in self.labels)
