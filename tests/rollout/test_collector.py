"""The collector with a stand-in for the engine: who is shown what."""

import pytest

from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import ByteTokenizer
from seal_jax.envs.toolbox import ToolboxSuite
from seal_jax.interface import BARE, InterfaceSettings, full
from seal_jax.rollout.collector import Collector
from seal_jax.rollout.engine import Sampled
from seal_jax.rollout.episode import Limits, render_prompt
from seal_jax.rollout.work import Work

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
