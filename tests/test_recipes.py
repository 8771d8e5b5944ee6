"""What the recipes promise about the worlds they are for."""

import random

import pytest

from configs import quickstart, toolbox
from seal_jax.assembly import episode_limits, interface_settings
from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import load_tokenizer
from seal_jax.envs.toolbox import NO_HABITS, Teacher, ToolboxSuite
from seal_jax.envs.toolbox.teacher import Demo
from seal_jax.interface import BARE, Interface
from seal_jax.warm_start import play_demonstration


@pytest.mark.parametrize(
    ("config", "cues"),
    [  # the most tokens that three cues can take; in the study nothing ever asked for invalid_tool_call's
        (quickstart.get_config(), ("invalid_tool_call", "argument_mismatch", "spurious_tool_call")),
        (toolbox.get_config(), ("recovery_failure", "argument_mismatch", "spurious_tool_call")),
    ],
    ids=["quickstart", "toolbox"],
)
def test_no_training_task_is_out_of_reach_for_want_of_room(config, cues):
    """Else cues would seem to hurt where rows are too short for them."""
    settings = interface_settings(config)
    assert len(cues) == settings.max_cues
    chat, tokenizer = get_format(config.chat), load_tokenizer(quickstart.STARTS / "quickstart")
    suite, limits = ToolboxSuite(**config.suite_options.to_dict()), episode_limits(config, max_context=10_000)
    for interface in (BARE, Interface(active=cues, settings=settings)):
        rows = [
            play_demonstration(
                Demo(task, suite, Teacher(task, suite, random.Random(0), NO_HABITS)), chat, tokenizer, limits, interface
            )
            for task in suite.tasks("train")
        ]
        assert {row.stop for row in rows} == {"completed"}
        assert max(len(row.prompt_ids) for row in rows) <= config.buckets.prompt[-1]
    bare_room = config.buckets.suffix[-2]
    assert max(len(row.suffix_ids) for row in rows) > bare_room  # so the last bucket is not there for nothing
