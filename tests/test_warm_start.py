"""The pieces of the supervised start, and the clone that the quickstart starts from."""

from __future__ import annotations

import json

import pytest

from configs import quickstart
from seal_jax.assembly import WARM_START_FILE, interface_settings, warm_start_metrics
from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import load_tokenizer, train_tokenizer
from seal_jax.envs.toolbox.play import corpus
from seal_jax.policy.config import PolicyConfig
from seal_jax.types import Segment, Trajectory
from seal_jax.warm_start import by_length, cue_texts, cut, share_prompts

START = quickstart.STARTS / "quickstart"


def demo(prompt: tuple[int, ...], *lengths: int) -> Trajectory:
    segments = tuple(Segment(tuple(range(n)), "user", 0) for n in lengths)
    return Trajectory("t", "base", 0, 0, False, prompt, segments, turns=(), stop="completed")


def test_cut_keeps_whole_segments_that_fit():
    assert cut(demo((1,), 3, 4, 5), 12) == demo((1,), 3, 4, 5)
    assert cut(demo((1,), 3, 4, 5), 11) == demo((1,), 3, 4)
    assert cut(demo((1,), 3, 4, 5), 2) == demo((1,))


def test_groups_share_what_their_prompts_have_in_common_and_keep_their_tokens():
    demos = [demo((1, 2, 3), 9), demo((1, 2, 4), 2), demo((1, 2, 3), 4), demo((1, 5), 8)]
    ordered = by_length(demos)
    assert [len(d.suffix_ids) for d in ordered] == [2, 4, 8, 9]
    shared = share_prompts(ordered, 2)
    assert [d.prompt_ids for d in shared] == [(1, 2), (1, 2), (1,), (1,)]
    assert [(*d.prompt_ids, *d.suffix_ids) for d in shared] == [(*d.prompt_ids, *d.suffix_ids) for d in ordered]


def test_the_kept_start_fits_the_world_and_the_preset():
    """A change of the toolbox's words or of the tiny policy makes it stale: make it again (configs/quickstart.py)."""
    config = quickstart.get_config("scratch")
    chat, kept = get_format(config.chat), load_tokenizer(START)
    fresh = train_tokenizer(
        [*corpus(chat, seed=config.seed), *cue_texts(interface_settings(config), config.seed)],
        vocab_size=config.policy.vocab_size,
        special_tokens=chat.special_tokens,
        scaffold=chat.scaffold,
    )
    assert json.loads(kept.backend.to_str())["model"] == json.loads(fresh.backend.to_str())["model"]
    read = PolicyConfig.from_hf(json.loads((START / "config.json").read_text()))
    tiny = PolicyConfig.tiny(fresh.vocab_size)
    for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "rope_theta"):
        assert getattr(read, name) == getattr(tiny, name), name


def test_the_kept_start_says_what_it_cost():
    metrics = warm_start_metrics(START)
    assert metrics["warm_start/steps"] > 0 and metrics["warm_start/seconds"] > 0
    assert warm_start_metrics(START / "elsewhere") == {}


@pytest.mark.parametrize("text", [b"", b'{"warm_start/st', b"[]", b"\xff"])
def test_a_damaged_account_of_the_warm_start_is_named(tmp_path, text):
    (tmp_path / WARM_START_FILE).write_bytes(text)
    with pytest.raises(ValueError, match=r"warm_start.json is damaged \(.+\); remove it") as error:
        warm_start_metrics(tmp_path)
    assert "\n" not in str(error.value)
    assert (START / WARM_START_FILE).is_file()
