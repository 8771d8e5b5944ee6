"""One episode as a state machine over tokens: what the policy is fed, what it sampled, what the world answered.

Token-in, token-out: the row is a list of segments, each tokenised once when it is added. What the policy sampled is
kept as ids and never re-encoded, so `prompt_ids + concat(segments)` is exactly what the model saw. The machine knows
neither jax nor where its replies come from: the collector feeds it sampled ids, the warm start feeds it a teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seal_jax.chat.formats import ChatFormat
from seal_jax.chat.tokenizer import Tokenizer
from seal_jax.envs.base import World
from seal_jax.interface import Interface
from seal_jax.types import (
    Call,
    CallResult,
    ParseError,
    Protocol,
    Segment,
    Step,
    StopReason,
    Task,
    TokenSource,
    ToolDoc,
    Trajectory,
)


@dataclass(frozen=True)
class Limits:
    """What ends an episode, and how a step is played: by the paper's protocol ("seal", the defaults) or BFCL's own.

    Token counts are of the policy's own tokenizer. None: no such limit.
    """

    max_new_tokens: int = 64  # per assistant message
    max_steps_per_turn: int = 20
    max_steps: int | None = 20  # per episode (paper: 20)
    max_suffix_tokens: int = 4096  # everything after the prompt
    max_context: int = 16384  # prompt and suffix together (paper: 16,384)
    max_observation_tokens: int | None = 4096  # a longer result is clipped; the verifier always sees it whole
    retry_malformed: bool = True  # a malformed message gets an error reply and another try; else it ends the turn
    enforce_available: bool = True  # a call to a tool that is not offered (yet) is rejected, not executed
    cut_ends_episode: bool = True  # a message of max_new_tokens ends it as "truncated"; else it is read as it is
    protocol: Protocol = "seal"

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_steps_per_turn", "max_steps", "max_observation_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"config.limits.{name}={value} must be at least 1")


def official_limits(*, context: int, max_suffix_tokens: int, max_new_tokens: int = 4096) -> Limits:
    """How bfcl-eval plays an episode with a local model of `context` positions.

    No retry, no check of what is offered, no clipping, no limit over the whole episode; a turn's 21st executed step
    ends the episode. A message gets min(4096, context - everything before it - 2) tokens, and is read where it was cut.
    `max_suffix_tokens` and a smaller `max_new_tokens` are ours alone: what the compiled shapes hold.
    """
    return Limits(
        max_new_tokens=min(4096, max_new_tokens),
        max_steps_per_turn=21,
        max_steps=None,
        max_suffix_tokens=max_suffix_tokens,
        max_context=context - 2,
        max_observation_tokens=None,
        retry_malformed=False,
        enforce_available=False,
        cut_ends_episode=False,
        protocol="official",
    )


class Episode:
    """Plays one rollout of one task.

    Use: `while not episode.done: episode.receive(sample(episode.take_pending()))`.

    Args:
      prompt_ids: the group's bare prompt, already tokenised (`render_prompt`); the same for every row of a group.
      cued: whether Ω's note and feedback are shown to this row.
      turn_failed: called with (turn index, its steps) when a turn ends; True stops the episode there. Training uses
        it to save the rest of an episode whose reward is already 0; evaluation leaves it None.
    """

    def __init__(
        self,
        task: Task,
        world: World,
        chat: ChatFormat,
        tokenizer: Tokenizer,
        interface: Interface,
        limits: Limits,
        *,
        prompt_ids: Sequence[int],
        rollout: int = 0,
        round: int = 0,
        cued: bool = False,
        turn_failed: Callable[[int, tuple[Step, ...]], bool] | None = None,
    ):
        self.task, self.world, self.chat, self.tokenizer = task, world, chat, tokenizer
        self.interface, self.limits, self.turn_failed = interface, limits, turn_failed
        self.rollout, self.round, self.cued = rollout, round, cued
        self.prompt_ids = tuple(prompt_ids)
        self.tools: list[ToolDoc] = list(task.tools)
        self.segments: list[Segment] = []
        self.turns: list[list[Step]] = [[]]
        self.stop: StopReason | None = None
        self._pending: list[Segment] = []
        self._suffix_len = 0
        self._n_steps = 0
        self._cut = False  # the last message has no end token
        self._stop_ids = {tokenizer.token_id(t) for t in chat.stop_tokens}
        if cued:
            self._queue_note(task.tools)
        self._queue("template", chat.assistant_open)
        self._check_room()

    # --- the policy's side ---------------------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        return self.stop is not None

    @property
    def turn(self) -> int:
        """Index of the user turn being played."""
        return len(self.turns) - 1

    @property
    def last_step(self) -> Step | None:
        """The last step of this turn, or None at its start."""
        return self.turns[-1][-1] if self.turns[-1] else None

    @property
    def room(self) -> int:
        """Tokens the policy may still sample in this message, given what is pending."""
        space = min(self.limits.max_suffix_tokens, self.limits.max_context - len(self.prompt_ids))
        left = space - self._suffix_len - sum(len(s.ids) for s in self._pending)
        return min(self.limits.max_new_tokens, left)

    def take_pending(self) -> list[int]:
        """The tokens that stand between the last sampled token and the next one; they join the row now."""
        ids = [i for s in self._pending for i in s.ids]
        self.segments += self._pending
        self._suffix_len += len(ids)
        self._pending = []
        return ids

    def receive(self, ids: Sequence[int], logps: Sequence[float], truncated: bool = False) -> None:
        """Takes one sampled message (end token included unless truncated), executes it, queues what follows."""
        if self.done or self._pending or not ids:
            raise RuntimeError("receive() needs a live episode, take_pending() first, and at least one sampled token")
        self.segments.append(Segment(tuple(ids), "sampled", self.turn, tuple(logps)))
        self._suffix_len += len(ids)
        self._n_steps += 1
        body = ids[:-1] if ids[-1] in self._stop_ids else ids
        text = self.tokenizer.decode(body)
        self._cut = truncated
        if truncated and self.limits.cut_ends_episode:
            # The cut message has no end token, so nothing may follow it: the template would not allow it.
            self.turns[-1].append(
                Step(text, error=ParseError("truncated", "the message was cut", len(text)), truncated=True)
            )
            self._finish("truncated")
            return
        parsed = self.chat.parse(text)
        error = parsed.error if parsed.error is not None else self._unavailable(parsed.calls)
        if error is not None:
            self._reject(text, parsed.calls, error)
        elif parsed.calls:
            self._execute(text, parsed.calls)
        else:
            self.turns[-1].append(Step(text, truncated=truncated))
            self._end_turn()
        if not self.done:
            self._check_limits()

    def trajectory(self) -> Trajectory:
        if self.stop is None:
            raise RuntimeError(f"task {self.task.id}: the episode is still running")
        return Trajectory(
            task_id=self.task.id,
            category=self.task.category,
            rollout=self.rollout,
            round=self.round,
            cued=self.cued,
            prompt_ids=self.prompt_ids,
            segments=tuple(self.segments),
            turns=tuple(tuple(t) for t in self.turns),
            stop=self.stop,
            protocol=self.limits.protocol,
        )

    # --- the world's side ----------------------------------------------------------------------------------------
    def _unavailable(self, calls: Sequence[Call]) -> ParseError | None:
        if not self.limits.enforce_available:
            return None
        offered = {doc["name"] for doc in self.tools}
        for call in calls:
            if call.name not in offered:
                kind = "unavailable_tool" if call.name in self.world.tool_names() else "unknown_tool"
                return ParseError(kind, f"Tool '{call.name}' is not available.")
        return None

    def _reject(self, text: str, calls: tuple[Call, ...], error: ParseError) -> None:
        self.turns[-1].append(Step(text, calls, error, truncated=self._cut))
        if not self.limits.retry_malformed:
            self._end_turn()
            return
        head, tail = self.chat.parse_error(error)
        self._queue_reply(head, self._feedback([error]), tail)

    def _execute(self, text: str, calls: tuple[Call, ...]) -> None:
        results = tuple(self.world.call(c) for c in calls)
        self.turns[-1].append(Step(text, calls, None, results, self._cut))
        if any(r.error == "env_error" for r in results):
            self._finish("env_error")
            return
        head, tail = self.chat.observation([self._clip(r.text) for r in results])
        self._queue_reply(head, self._feedback([r for r in results if not r.ok]), tail)

    def _end_turn(self) -> None:
        if self.turn_failed is not None and self.turn_failed(self.turn, tuple(self.turns[-1])):
            self._finish("stopped_early")
            return
        if len(self.turns) == len(self.task.turns):
            self._finish("completed")
            return
        self.turns.append([])
        opening = self.task.turns[self.turn]
        if opening.reveals:
            self.tools += opening.reveals
            docs = self.interface.inline(opening.reveals) if self.cued else opening.reveals
            self._queue("user", self._after_message + self.chat.reveal(docs))
            if self.cued:
                self._queue_note(opening.reveals, revealed=True)
        else:
            self._queue("user", self._after_message + self.chat.user(opening.user))
        self._queue("template", self.chat.assistant_open)

    def _check_limits(self) -> None:
        played_out = self.limits.max_steps is not None and self._n_steps >= self.limits.max_steps
        if played_out or len(self.turns[-1]) >= self.limits.max_steps_per_turn:
            self._finish("step_limit")
        else:
            self._check_room()

    def _check_room(self) -> None:
        if self.room < 1:
            self._finish("context_limit")

    def _finish(self, reason: StopReason) -> None:
        # What was queued but never fed is not part of the row: the row ends with the last sampled token, and a turn
        # that was opened in the queue only was never reached.
        self._pending = []
        if not self.turns[-1] and len(self.turns) > 1:
            self.turns.pop()
        self.stop = reason

    # --- tokens --------------------------------------------------------------------------------------------------
    @property
    def _after_message(self) -> str:
        """What closes the last message: the template's part, and the end token that a cut message lacks."""
        return (self.chat.stop_tokens[0] if self._cut else "") + self.chat.after_message

    def _feedback(self, errors: Sequence[CallResult | ParseError]) -> str:
        """φ_err for the first error of a message; one hint at a time."""
        return self.interface.feedback(errors[0], self.tools) if self.cued and errors else ""

    def _queue_reply(self, head: str, cue: str, tail: str) -> None:
        self._queue("observation", self._after_message + head)
        if cue:
            self._queue("cue", "\n" + self.chat.clean(cue))
        self._queue("observation", tail)
        self._queue("template", self.chat.assistant_open)

    def _queue_note(self, tools: Sequence[ToolDoc], revealed: bool = False) -> None:
        note = self.interface.note(tools, revealed=revealed)
        if note:
            self._queue("cue", self.chat.note(note))

    def _queue(self, source: TokenSource, text: str) -> None:
        if text:
            self._pending.append(Segment(tuple(self.tokenizer.encode(text)), source, self.turn))

    def _clip(self, text: str) -> str:
        limit = self.limits.max_observation_tokens
        if limit is None or len(text.encode()) <= limit:  # a token is at least one byte, so this cannot be longer
            return text
        ids = self.tokenizer.encode(text)
        return text if len(ids) <= limit else self.tokenizer.decode(ids[:limit]) + "..."


def render_prompt(task: Task, chat: ChatFormat, tokenizer: Tokenizer, interface: Interface) -> list[int]:
    """The group's prompt: tools, system text and the first user message. Bare unless Ω is placed inline."""
    return tokenizer.encode(chat.prompt(interface.inline(task.tools), task.turns[0].user, task.system))
