"""The episode machine: exact tokens, cues that can be taken out, limits, and every way a message can be wrong."""

import random

import pytest

from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import ByteTokenizer
from seal_jax.envs.toolbox import NO_HABITS, Habits, Teacher, ToolboxSuite, View
from seal_jax.envs.verifier import Verifier
from seal_jax.interface import BARE, Interface, InterfaceSettings, full
from seal_jax.learner.batch import has_cues
from seal_jax.rollout.collector import FailureWatch, cued_rows, row_seed
from seal_jax.rollout.episode import Episode, Limits, render_prompt
from seal_jax.types import CATEGORIES

CHAT = get_format("tiny")
TOKENIZER = ByteTokenizer(CHAT.special_tokens)
WIDE = Limits(max_new_tokens=400, max_suffix_tokens=100_000, max_context=200_000, max_observation_tokens=10_000)


@pytest.fixture(scope="module")
def suite():
    return ToolboxSuite(train=6, val=0, test=0, ood=0)


def open_episode(suite, task, interface=BARE, limits=WIDE, **options):
    prompt = render_prompt(task, CHAT, TOKENIZER, interface)
    return Episode(task, suite.open(task), CHAT, TOKENIZER, interface, limits, prompt_ids=prompt, **options)


def say(episode, text, end=True):
    fed = episode.take_pending()
    ids = TOKENIZER.encode(text + (CHAT.stop_tokens[0] if end else ""))
    episode.receive(ids, [-0.5] * len(ids), truncated=not end)
    return fed


def play(suite, task, habits=NO_HABITS, interface=BARE, cued=False, seed=0, limits=WIDE, **options):
    episode = open_episode(suite, task, interface, limits, cued=cued, **options)
    teacher = Teacher(task, suite, random.Random(seed), habits)
    while not episode.done:
        last = episode.last_step
        reply = teacher.reply(View(episode.turn, last.results if last is not None else ()))
        say(episode, CHAT.calls(reply.calls) if reply.calls else reply.text)
    return episode.trajectory()


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_oracle_solves_every_category(suite, category):
    tasks = [t for t in suite.tasks("train") if t.category == category]
    for task in tasks:
        trajectory = play(suite, task)
        assert trajectory.stop == "completed"
        assert Verifier(suite).verify_trajectory(task, trajectory).reward == 1.0


def test_the_row_is_what_the_model_saw(suite):
    task = suite.tasks("train")[1]
    episode = open_episode(suite, task)
    teacher, seen = Teacher(task, suite, random.Random(0)), list(episode.prompt_ids)
    while not episode.done:
        last = episode.last_step
        reply = teacher.reply(View(episode.turn, last.results if last is not None else ()))
        text = CHAT.calls(reply.calls) if reply.calls else reply.text
        seen += say(episode, text) + TOKENIZER.encode(text + CHAT.stop_tokens[0])
    trajectory = episode.trajectory()
    assert list(trajectory.prompt_ids) + trajectory.suffix_ids == seen
    assert trajectory.segments[0].source != "sampled"
    assert sum(s.source == "sampled" for s in trajectory.segments) == sum(len(t) for t in trajectory.turns)
    assert [s.turn for s in trajectory.segments] == sorted(s.turn for s in trajectory.segments)


def test_sampled_ids_are_kept_although_the_text_encodes_otherwise(suite):
    """The same text can be sampled as other ids than the tokenizer would choose; those ids are the row."""

    class TwoWays(ByteTokenizer):
        def decode(self, ids):
            return super().decode([TOKENIZER.token_id("<|end|>") if i == 999 else i for i in ids if i != 998])

    task = suite.tasks("train")[0]
    tokenizer = TwoWays(CHAT.special_tokens)
    prompt = render_prompt(task, CHAT, tokenizer, BARE)
    episode = Episode(task, suite.open(task), CHAT, tokenizer, BARE, WIDE, prompt_ids=prompt)
    episode.take_pending()
    ids = [*tokenizer.encode("do"), 998, *tokenizer.encode("ne."), tokenizer.token_id("<|end|>")]
    episode.receive(ids, [0.0] * len(ids))
    assert episode.segments[-1].ids == tuple(ids)
    assert episode.turns[0][0].text == "done."


def test_cues_are_segments_of_their_own_and_taking_them_out_gives_the_bare_row(suite):
    interface = full(InterfaceSettings())
    met = 0
    for task in suite.tasks("train"):
        bare = play(suite, task)
        cued = play(suite, task, interface=interface, cued=True)
        left = [i for s in cued.segments if s.source != "cue" for i in s.ids]
        assert left == bare.suffix_ids and cued.prompt_ids == bare.prompt_ids
        assert has_cues(cued) and not has_cues(bare)
        met += any("refused" in TOKENIZER.decode(s.ids) for s in cued.segments if s.source == "cue")
    assert met > 0  # φ_err was among them


def test_a_bare_row_never_sees_a_cue(suite):
    interface = full(InterfaceSettings())
    for task in suite.tasks("train"):
        assert play(suite, task, interface=interface, cued=False) == play(suite, task)


def test_malformed_messages_are_answered_and_the_turn_goes_on(suite):
    episode = open_episode(suite, suite.tasks("train")[0])
    say(episode, '<tool_call>{"name": "x"')
    step = episode.last_step
    assert step.error is not None and step.results == () and episode.turn == 0 and not episode.done
    assert "[ERROR]" in TOKENIZER.decode(episode.take_pending())


def test_malformed_messages_end_the_turn_in_the_official_protocol(suite):
    limits = Limits(**{**vars(WIDE), "retry_malformed": False})
    episode = open_episode(suite, suite.tasks("train")[0], limits=limits)
    say(episode, '<tool_call>{"name": "x"')
    assert episode.turn == 1


def test_tools_that_are_not_offered_are_rejected_not_executed(suite):
    task = next(t for t in suite.tasks("train") if t.category == "miss_func")
    held_out = next(t.reveals[0]["name"] for t in task.turns if t.reveals)
    episode = open_episode(suite, task)
    call = f'<tool_call>{{"name": "{held_out}", "arguments": {{}}}}</tool_call>'
    say(episode, call)
    assert episode.last_step.error.kind == "unavailable_tool"
    say(episode, '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>')
    assert episode.last_step.error.kind == "unknown_tool"
    while not any(doc["name"] == held_out for doc in episode.tools):
        say(episode, "no.")
    say(episode, call)
    assert episode.last_step.error is None and episode.last_step.results[0].error == "missing_argument"


def test_a_cut_message_ends_the_episode(suite):
    episode = open_episode(suite, suite.tasks("train")[0])
    say(episode, '<tool_call>{"name": "fi', end=False)
    trajectory = episode.trajectory()
    assert trajectory.stop == "truncated" and trajectory.turns[-1][-1].truncated
    assert trajectory.segments[-1].source == "sampled"


def test_step_limits(suite):
    task = suite.tasks("train")[0]
    for field in ("max_steps", "max_steps_per_turn"):
        episode = open_episode(suite, task, limits=Limits(**{**vars(WIDE), field: 3}))
        for _ in range(3):
            say(episode, "<tool_call>oops</tool_call>")
        assert episode.stop == "step_limit"
    # the last turn of a task ends it as completed, also on the last allowed step
    episode = open_episode(suite, task, limits=Limits(**{**vars(WIDE), "max_steps": len(task.turns)}))
    for _ in task.turns:
        say(episode, "done.")
    assert episode.stop == "completed"


def test_what_does_not_fit_is_dropped_whole(suite):
    """An observation that fills the row is never fed: ids, steps and log-probs still agree, and the row says why."""
    task = suite.tasks("train")[0]
    first = open_episode(suite, task)
    call = CHAT.calls([suite.reference(task)[0][0]])
    head = len(first.take_pending())
    used = head + len(TOKENIZER.encode(call)) + 1
    episode = open_episode(suite, task, limits=Limits(**{**vars(WIDE), "max_suffix_tokens": used + 10}))
    say(episode, call)
    trajectory = episode.trajectory()
    assert trajectory.stop == "context_limit" and trajectory.segments[-1].source == "sampled"
    assert len(trajectory.suffix_ids) == used
    # the same through the context of prompt and suffix together
    limits = Limits(**{**vars(WIDE), "max_context": len(first.prompt_ids) + used + 10})
    episode = open_episode(suite, task, limits=limits)
    assert episode.room == limits.max_context - len(first.prompt_ids) - head
    say(episode, call)
    assert episode.stop == "context_limit"


def test_a_turn_that_was_only_queued_was_not_reached(suite):
    task = suite.tasks("train")[0]
    head = len(open_episode(suite, task).take_pending())
    limits = Limits(**{**vars(WIDE), "max_suffix_tokens": head + len("done.") + 2})
    episode = open_episode(suite, task, limits=limits)
    say(episode, "done.")
    assert episode.stop == "context_limit" and len(episode.trajectory().turns) == 1


def test_long_results_are_clipped_for_the_policy_only(suite):
    task = suite.tasks("train")[0]
    call = suite.reference(task)[0][0]
    episode = open_episode(suite, task, limits=Limits(**{**vars(WIDE), "max_observation_tokens": 4}))
    say(episode, CHAT.calls([call]))
    whole = episode.last_step.results[0].text
    shown = TOKENIZER.decode(episode.take_pending())
    assert len(whole) > 4 and whole not in shown and whole[:4] + "..." in shown


def test_training_may_stop_at_the_first_failed_turn(suite):
    task = suite.tasks("train")[0]
    giving_up = Habits(**{f: 0.0 for f in vars(Habits())} | {"name_as_id": 1.0, "give_up": 1.0})
    whole = play(suite, task, giving_up)
    stopped = play(suite, task, giving_up, turn_failed=FailureWatch(suite, task))
    verdict = Verifier(suite).verify_trajectory(task, stopped)
    assert whole.stop == "completed" and stopped.stop == "stopped_early" and verdict.reward == 0.0
    assert stopped.turns == whole.turns[: len(stopped.turns)]
    assert [t.reached for t in verdict.turns] == [i < len(stopped.turns) for i in range(len(task.turns))]
    # and it never stops a right one
    assert play(suite, task, turn_failed=FailureWatch(suite, task)).stop == "completed"


def test_which_rows_see_cues():
    assert cued_rows(4, 0.5) == [False, True, False, True]
    assert cued_rows(8, 1.0) == [True] * 8 and cued_rows(8, 0.0) == [False] * 8
    for rollouts in range(2, 10):
        assert sum(cued_rows(rollouts, 0.25)) == round(0.25 * rollouts)


def test_row_seeds_are_stable_and_distinct():
    seeds = [row_seed(s, r, t, g) for s in (0, 1) for r in (1, 2) for t in ("a", "b") for g in range(8)]
    assert len(set(seeds)) == len(seeds) and all(0 <= x < 2**32 for x in seeds)
    assert row_seed(0, 1, "base-0", 3) == 506565464


def test_an_inline_interface_stands_in_the_prompt_and_nowhere_else(suite):
    task = suite.tasks("train")[0]
    inline = Interface(active=("argument_mismatch",), settings=InterfaceSettings(placement="inline"))
    assert render_prompt(task, CHAT, TOKENIZER, inline) != render_prompt(task, CHAT, TOKENIZER, BARE)
    row = play(suite, task, interface=inline, cued=True)
    assert not any(s.source == "cue" and "required" in TOKENIZER.decode(s.ids) for s in row.segments)
