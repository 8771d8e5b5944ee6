"""Tools that are revealed later carry the same cues as those offered from the start, in both placements."""

import pytest

from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import ByteTokenizer
from seal_jax.interface import BARE, Interface, InterfaceSettings, full
from seal_jax.rollout.episode import Episode, Limits, render_prompt
from seal_jax.types import CallResult, Task, UserTurn

WIDE = Limits(max_new_tokens=400, max_suffix_tokens=100_000, max_context=200_000, max_observation_tokens=10_000)


def doc(name, argument, **prop):
    parameters = {"type": "object", "properties": {argument: prop}, "required": [argument]}
    return {"name": name, "description": f"{name} it", "parameters": parameters}


PLAIN = doc("ring", "bell", type="string", description="Which bell")
HELD_OUT = doc("light", "mode", type="string", description="The mode. [Enum]: on, off")
TASK = Task("t-0", "toy", "miss_func", "0", (UserTurn("light it"), UserTurn("", (HELD_OUT,))), (PLAIN,))


class NoWorld:
    def call(self, call):
        return CallResult(call, "done")

    def state(self):
        return {}

    def tool_names(self):
        return frozenset({"ring", "light"})


def play(chat_name, interface, cued):
    """The segments between the first answer and the end: the reveal with all that Ω adds to it, and the whole row."""
    chat = get_format(chat_name)
    tokenizer = ByteTokenizer(chat.special_tokens)
    prompt = render_prompt(TASK, chat, tokenizer, interface)
    episode = Episode(TASK, NoWorld(), chat, tokenizer, interface, WIDE, prompt_ids=prompt, cued=cued)
    while not episode.done:
        episode.take_pending()
        ids = tokenizer.encode("no" + chat.stop_tokens[0])
        episode.receive(ids, [0.0] * len(ids))
    row = episode.trajectory()
    assert row.stop == "completed" and episode.tools == [PLAIN, HELD_OUT]  # feedback reads the docs as they are
    revealed = [s for s in row.segments if s.turn == 1]
    return {source: tokenizer.decode([i for s in revealed if s.source == source for i in s.ids]) for source in
            ("user", "cue")}  # fmt: skip


@pytest.mark.parametrize("chat", ["tiny", "hermes", "llama31", "toolace"])
def test_inline_annotations_reach_revealed_docs(chat):
    shown = play(chat, full(InterfaceSettings(placement="inline")), cued=True)
    bare = play(chat, BARE, cued=False)
    assert "[one of: on|off]" in shown["user"] and "[one of:" not in bare["user"]
    assert "light: mode" not in shown["cue"] and bare["cue"] == ""


@pytest.mark.parametrize("chat", ["tiny", "hermes"])
def test_a_note_follows_the_reveal(chat):
    shown = play(chat, full(InterfaceSettings()), cued=True)
    assert shown["user"] == play(chat, BARE, cued=False)["user"]
    assert "light: mode on|off." in shown["cue"] and "ring" not in shown["cue"]


def test_without_its_cue_a_reveal_is_bare():
    other = Interface(active=("state_mismatch",), settings=InterfaceSettings(placement="inline"))
    assert play("hermes", other, cued=True)["user"] == play("hermes", BARE, cued=False)["user"]
