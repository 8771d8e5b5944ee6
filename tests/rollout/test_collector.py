"""The collector with a stand-in for the engine: who is shown what."""

import random
from collections import Counter

import pytest

from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import ByteTokenizer
from seal_jax.envs.toolbox import ToolboxSuite
from seal_jax.envs.verifier import Verifier
from seal_jax.interface import BARE, InterfaceSettings, full
from seal_jax.rollout.collector import Collector
from seal_jax.rollout.engine import Sampled
from seal_jax.rollout.episode import Limits, render_prompt
from seal_jax.rollout.work import Work
from seal_jax.types import Call

CHAT = get_format("tiny")
TOKENIZER = ByteTokenizer(CHAT.special_tokens)
WIDE = Limits(max_new_tokens=400, max_suffix_tokens=100_000, max_context=200_000, max_observation_tokens=10_000)


class Parrot:
    """An engine whose policy always says the same."""

    group_buckets = (4,)
    work = Work()

    def start(self, params, prompts, rollouts, *, timer):
        return self

    def act_in_parts(self, pending, *, temperature, keys):
        yield
        ids = tuple(TOKENIZER.encode("I am done." + CHAT.stop_tokens[0]))
        return {row: Sampled(ids, (-0.5,) * len(ids), False) for row in pending}


def test_whoever_waits_is_told_how_far_the_episodes_are():
    suite, told = ToolboxSuite(train=12, val=0, test=0, ood=0), []
    collector = Collector(Parrot(), suite, CHAT, TOKENIZER, WIDE, seed=0)
    tasks = suite.tasks("train")[:6]  # two waves of the engine's four groups
    collector.collect(None, tasks, rollouts=2, round=1, progress=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {12} and told[-1] == (12, 12) and (8, 12) in told
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize("placement", ["note", "inline"])
@pytest.mark.parametrize("exposure", [0.0, 1.0])
def test_inline_cues_stand_in_the_prompt_only_where_rows_count_as_cued(placement, exposure):
    suite = ToolboxSuite(train=2, val=0, test=0, ood=0)
    interface = full(InterfaceSettings(placement=placement))
    collector = Collector(Parrot(), suite, CHAT, TOKENIZER, WIDE, seed=0)
    tasks = suite.tasks("train")[:2]
    groups = collector.collect(None, tasks, interface, rollouts=2, round=1, exposure=exposure)
    for task, group in zip(tasks, groups, strict=True):
        bare = tuple(render_prompt(task, CHAT, TOKENIZER, BARE))
        for row in group:
            assert row.cued == bool(exposure)
            assert (row.prompt_ids != bare) == (placement == "inline" and row.cued)


class Fumbler:
    """An engine whose policy follows the reference, but for what a row's seed makes it do: a call left out, a wrong
    one, words, a message that is cut, a message that cannot be read, or the same call for ever."""

    group_buckets = (16,)

    def __init__(self, suite, tasks):
        self.programs = [suite.reference(task) for task in tasks]

    def start(self, params, prompts, rollouts, *, timer):
        return FumblerSession(self.programs, [list(p) for p in prompts])


class FumblerSession:
    work = Work()

    def __init__(self, programs, prompts):
        self.programs = programs
        self.left = {}  # row -> messages still to say

    def script(self, row, seed):
        rng, messages = random.Random(seed), []
        for program in self.programs[row[0]]:
            for call in program:
                kind = rng.choice(["right"] * 12 + ["left out", "wrong", "words", "cut", "unreadable", "again"])
                message = CHAT.calls([call]) + CHAT.stop_tokens[0]
                if kind == "again":
                    return messages + [message] * 50
                messages += {
                    "left out": [],
                    "wrong": [CHAT.calls([Call(call.name, {"x": 1})]) + CHAT.stop_tokens[0]],
                    "words": ["Well." + CHAT.stop_tokens[0]],
                    "cut": [message[:5]],
                    "unreadable": [CHAT.calls([call])[:-3] + CHAT.stop_tokens[0], message],
                }.get(kind, [message])
            messages.append("Done." + CHAT.stop_tokens[0])
        return messages + ["Done." + CHAT.stop_tokens[0]] * 50

    def act_in_parts(self, pending, *, temperature, keys):
        out = {}
        for row in pending:
            messages = self.left.setdefault(row, self.script(row, keys[row]))
            ids = tuple(TOKENIZER.encode(messages.pop(0)))
            out[row] = Sampled(ids, (-0.5,) * len(ids), TOKENIZER.decode(ids[-1:]) != CHAT.stop_tokens[0])
        yield
        return out


def test_verdicts_of_watched_episodes_are_the_verifiers(monkeypatch):
    """The watch has judged the finished turns already; what it hands on is what a fresh verifier finds."""
    suite = ToolboxSuite(train=4, val=0, test=0, ood=0)
    tasks = suite.tasks("train")
    collector = Collector(Fumbler(suite, tasks), suite, CHAT, TOKENIZER, WIDE, seed=5)
    groups = collector.collect(None, tasks, rollouts=16, round=1, stop_failed_turns=True)
    opened = []
    begin = Verifier.begin
    monkeypatch.setattr(Verifier, "begin", lambda self, task: (opened.append(task), begin(self, task))[1])
    verdicts = [[collector.verify(task, x) for x in group] for task, group in zip(tasks, groups, strict=True)]
    assert not opened
    fresh = [
        [Verifier(suite).verify_trajectory(task, x) for x in group] for task, group in zip(tasks, groups, strict=True)
    ]
    assert verdicts == fresh
    stops = Counter(x.stop for group in groups for x in group)
    assert min(stops[stop] for stop in ("completed", "stopped_early", "truncated", "step_limit")) >= 3, stops
    assert 0 < sum(v.reward for group in verdicts for v in group) < 256
    assert any(len(x.turns) > 1 and x.stop in ("truncated", "step_limit") for group in groups for x in group)
    assert len(opened) == 256
    assert collector.verify(tasks[0], groups[0][0]) == fresh[0][0] and len(opened) == 257  # asked again: played again
