"""Plays a teacher against its world without tokens: for oracles, statistics and a tokenizer's training text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from seal_jax.envs.toolbox.suite import TaskStore
from seal_jax.envs.toolbox.teacher import Reply, Teacher, View, demonstrations
from seal_jax.envs.toolbox.words import all_words
from seal_jax.types import CallResult, Step, Task

_MAX_STEPS = 20


class Format(Protocol):
    """What this file needs of a chat format (`seal_jax.chat` has them)."""

    @property
    def stop_tokens(self) -> tuple[str, ...]: ...
    @property
    def assistant_open(self) -> str: ...
    @property
    def after_message(self) -> str: ...

    def prompt(self, tools: Any, user: str, system: str = "") -> str: ...
    def user(self, text: str) -> str: ...
    def reveal(self, tools: Any) -> str: ...
    def observation(self, results: Any) -> tuple[str, str]: ...
    def calls(self, calls: Any, content: str = "") -> str: ...


def play(
    task: Task,
    suite: TaskStore,
    teacher: Teacher,
    *,
    cue: Callable[[CallResult], bool] = lambda result: False,
    noted: bool = False,
) -> tuple[tuple[Step, ...], ...]:
    """The teacher's episode, as turns of steps. `cue` says whether a refusal would come with cue text."""
    world = suite.open(task)
    turns = []
    for t in range(len(task.turns)):
        steps: list[Step] = []
        view = View(t, noted=noted)
        while len(steps) < _MAX_STEPS:
            reply: Reply = teacher.reply(view)
            results = tuple(world.call(c) for c in reply.calls)
            steps.append(Step(reply.text, reply.calls, results=results))
            if not reply.calls:
                break
            view = View(t, results, cued=any(not r.ok and cue(r) for r in results), noted=noted)
        turns.append(tuple(steps))
    return tuple(turns)


def transcript(task: Task, turns: tuple[tuple[Step, ...], ...], chat: Format) -> tuple[str, str]:
    """(prompt, all that follows it) of an episode in a chat format, without cues."""
    out = [chat.assistant_open]
    for t, steps in enumerate(turns):
        if t:
            opening = task.turns[t]
            out.append(chat.after_message)
            out.append(chat.reveal(opening.reveals) if opening.reveals else chat.user(opening.user))
            out.append(chat.assistant_open)
        for step in steps:
            out.append(chat.calls(step.calls) if step.calls else step.text)
            out.append(chat.stop_tokens[0])
            if step.results:
                head, tail = chat.observation([r.text for r in step.results])
                out += [chat.after_message, head, tail, chat.assistant_open]
    return chat.prompt(task.tools, task.turns[0].user, task.system), "".join(out)


#: Share of the training domains in text for tokenizers. Low, because the words of all skins must be in it; the kept
#: clone's tokenizer (configs/starts) depends on it.
CORPUS_FIXED_SHARE = 0.35


def corpus(chat: Format, seed: int = 0, n: int = 600) -> Iterator[str]:
    """Text to train a tokenizer on: demonstrations in a chat format, then every word of the pools several times (also
    those of a rare kind of skin, so that a held-out domain has no word without a token of its own)."""
    for demo in demonstrations(seed, n, fixed_share=CORPUS_FIXED_SHARE):
        yield "".join(transcript(demo.task, play(demo.task, demo.suite, demo.teacher), chat))
    for _ in range(20):
        yield " ".join(all_words())


@dataclass(frozen=True)
class Stats:
    """Figures of one category of a split, over its tasks; lengths are means (and the largest) of reference play."""

    category: str
    tasks: int
    turns: float
    calls: float
    messages: float
    max_calls_in_turn: int
    refusal_share: float
    prompt_tokens: float
    prompt_tokens_max: int
    episode_tokens: float
    episode_tokens_max: int
    message_tokens_max: int


def statistics(
    suite: TaskStore, split: str, encode: Callable[[str], list[int]] | None = None, chat: Format | None = None
) -> tuple[Stats, ...]:
    """Per category: what a faultless teacher's play of a split is like. No `encode` and `chat`: token lengths are 0."""

    rows = []
    for category in dict.fromkeys(b.task.category for b in suite.built(split)):
        built = [b for b in suite.built(split) if b.task.category == category]
        episodes = [(b.task, play(b.task, suite, Teacher(b.task, suite, random.Random(0)))) for b in built]
        texts = [transcript(task, turns, chat) for task, turns in episodes] if chat and encode else []
        prompts = [len(encode(p)) for p, _ in texts] if encode else []
        suffixes = [len(encode(s)) for _, s in texts] if encode else []
        steps = [s for _, turns in episodes for turn in turns for s in turn]
        messages = [len(encode(chat.calls(s.calls))) + 1 for s in steps if s.calls] if chat and encode else [0]
        calls = [[sum(len(s.calls) for s in turn) for turn in turns] for _, turns in episodes]
        n = len(built)
        rows.append(
            Stats(
                category=category,
                tasks=n,
                turns=sum(len(b.task.turns) for b in built) / n,
                calls=sum(map(sum, calls)) / n,
                messages=len(steps) / n,
                max_calls_in_turn=max(map(max, calls)),
                refusal_share=sum(b.scenario.refusals > 0 for b in built) / n,
                prompt_tokens=sum(prompts) / n,
                prompt_tokens_max=max(prompts, default=0),
                episode_tokens=sum(suffixes) / n,
                episode_tokens_max=max(suffixes, default=0),
                message_tokens_max=max(messages),
            )
        )
    return tuple(rows)
