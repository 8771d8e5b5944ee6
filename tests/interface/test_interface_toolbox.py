"""What Ω says about the toolbox stays byte for byte: the quickstart's kept policy was taught to read exactly this."""

import hashlib
import json

import pytest

from seal_jax.envs.toolbox import ToolboxSuite
from seal_jax.interface import InterfaceSettings, full
from seal_jax.interface.arguments import arguments
from seal_jax.interface.cues import FEEDBACK
from seal_jax.types import Call, CallResult, ParseError


@pytest.fixture(scope="module")
def tasks():
    suite = ToolboxSuite(train=8, val=2, test=2, ood=8)
    return [task for split in ("train", "val", "test", "ood") for task in suite.tasks(split)]


def test_cues_are_plain_unless_asked():
    assert InterfaceSettings().feedback == "plain"
    with pytest.raises(ValueError, match="interface.feedback='fine'.*'classed'"):
        InterfaceSettings(feedback="fine")


def test_no_prose_of_the_toolbox_is_read_as_a_constraint(tasks):
    for task in tasks:
        for doc in (*task.tools, *(d for turn in task.turns for d in turn.reveals)):
            for argument in arguments(doc):
                prop = doc["parameters"]["properties"][argument.name]
                assert argument.values == tuple(prop.get("enum", ()))
                assert not (argument.format or argument.items or argument.fields or argument.omit)


def every_text(tasks):
    for task in tasks:
        for placement in ("note", "inline"):
            shown = full(InterfaceSettings(placement=placement))
            yield shown.note(task.tools)
            yield json.dumps(shown.inline(task.tools))
            yield from (shown.note(turn.reveals, revealed=True) for turn in task.turns if turn.reveals)
        for doc in task.tools:
            for kind in (k for k in FEEDBACK if k != "parse"):
                for detail in ("", *doc["parameters"]["properties"], "sum", "a value"):
                    error = CallResult(Call(doc["name"]), '{"error": "already closed"}', kind, detail)
                    yield shown.feedback(error, task.tools)
        for kind in ("invalid_json", "unknown_tool", "unavailable_tool"):
            yield shown.feedback(ParseError(kind, "Tool 'x' is not available."), task.tools)


def test_every_text_as_the_kept_policy_knows_it(tasks):
    """A new digest means a new wording: then the quickstart's starting policy must be trained and kept anew."""
    digest = hashlib.sha256()
    for text in every_text(tasks):
        digest.update(text.encode() + b"\0")
    assert digest.hexdigest() == "ffc4a8fd890013df229771c32dcd8f946eff6ce59bbcf6d2fb7a912f53ef023c"
