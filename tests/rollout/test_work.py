"""What is computed in an episode, counted at the compiled functions' arguments; and the same episodes by halves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from seal_jax.chat.formats import get_format
from seal_jax.chat.tokenizer import ByteTokenizer
from seal_jax.envs.toolbox import ToolboxSuite
from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.model import init_params
from seal_jax.rollout.collector import Collector, batches
from seal_jax.rollout.engine import RolloutEngine, Session
from seal_jax.rollout.episode import Limits
from seal_jax.rollout.work import Work
from seal_jax.types import Trajectory

CHAT = get_format("tiny")
TOKENIZER = ByteTokenizer(CHAT.special_tokens)
CONFIG = PolicyConfig.tiny(
    TOKENIZER.vocab_size, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16, max_position=4096
)
PARAMS = init_params(CONFIG, 0)
#: Messages of up to 24 tokens in pieces of 8; malformed ones (nearly all) are answered, so episodes have several steps.
LIMITS = Limits(max_new_tokens=24, max_steps=5, max_suffix_tokens=512, max_context=4096, cut_ends_episode=False)


class Counted(RolloutEngine):
    """Counts tokens and places at what the compiled functions are given and give."""

    def __init__(self) -> None:
        super().__init__(
            CONFIG,
            stop_ids=[TOKENIZER.token_id(t) for t in CHAT.stop_tokens],
            prompt_buckets=(1024,),
            suffix_buckets=(512,),
            chunk_buckets=(32,),
            group_buckets=(1, 2, 4),
            max_new_tokens=LIMITS.max_new_tokens,
            decode_size=8,
        )
        self.tokens, self.padding, self.idle = 0, 0, 0
        self.decodes: list[tuple[int, int]] = []  # the grid of each
        prefill, extend, decode = self._prefill, self._extend, self._decode

        def counting_prefill(params, ids_bp, len_b):
            self.tokens += int(len_b.sum())
            self.padding += int(ids_bp.size - len_b.sum())
            return prefill(params, ids_bp, len_b)

        def counting_extend(*args, ids_bgc, len_bg, **kwargs):
            self.tokens += int(len_bg.sum())
            self.padding += int(ids_bgc.size - len_bg.sum())
            return extend(*args, ids_bgc=ids_bgc, len_bg=len_bg, **kwargs)

        def counting_decode(*args, **kwargs):
            out = decode(*args, **kwargs)
            fed_bg = np.maximum(np.asarray(out[3]) - 1, 0)
            self.tokens += int(fed_bg.sum())
            self.idle += int((fed_bg.max() - fed_bg).sum())
            self.decodes.append(fed_bg.shape)
            return out

        self._prefill, self._extend, self._decode = counting_prefill, counting_extend, counting_decode


@dataclass
class Play:
    groups: list[list[Trajectory]]
    spent: dict[str, float]
    tokens: int
    padding: int
    idle: int
    decodes: list[tuple[int, int]]
    events: list[tuple[str, int]]  # ("ask" or "wait", session) in the order in which the host did so


@pytest.fixture(scope="module")
def plays() -> dict[bool, Play]:
    """Four tasks, two rows each, without overlap and with."""
    engine, suite = Counted(), ToolboxSuite(train=4, val=0, test=0, ood=0)
    sample, read, out = Session._sample, Session._read, {}
    for overlap in (False, True):
        engine.tokens, engine.padding, engine.idle, engine.decodes = 0, 0, 0, []
        events: list[tuple[str, int]] = []
        collector = Collector(engine, suite, CHAT, TOKENIZER, LIMITS, seed=3, overlap=overlap)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "_sample", lambda s, *a, on=events: (on.append(("ask", id(s))), sample(s, *a))[1])
            patch.setattr(Session, "_read", lambda s, *a, on=events: (on.append(("wait", id(s))), read(s, *a))[1])
            groups = collector.collect(PARAMS, suite.tasks("train"), rollouts=2, round=1, temperature=1.5)
        counts = (engine.tokens, engine.padding, engine.idle, engine.decodes)
        out[overlap] = Play(groups, collector.spent, *counts, events)
    return out


@pytest.mark.parametrize("overlap", [False, True])
def test_every_token_of_an_episode_goes_through_the_model_once(plays, overlap):
    """... the prompts once per group, and each row's last sampled token never; with messages in pieces, and rows that
    leave early, so that the grid is packed."""
    play = plays[overlap]
    rows = [row for group in play.groups for row in group]
    prompts = sum(len(group[0].prompt_ids) for group in play.groups)
    assert play.tokens == prompts + sum(len(row.suffix_ids) - 1 for row in rows)
    assert play.spent["rollout/processed_tokens"] == play.tokens
    assert play.spent["rollout/prompt_tokens"] == prompts
    assert play.spent["rollout/sampled_tokens"] == sum(row.n_sampled for row in rows)
    assert len(set(play.decodes)) > 1  # the grid was packed
    assert max(len(s.ids) for row in rows for s in row.segments if s.source == "sampled") > 8  # in pieces


def test_halves_play_the_same_episodes(plays):
    whole, halves = plays[False], plays[True]
    assert max(whole.decodes) == (4, 2) and max(halves.decodes) == (2, 2)
    for a, b in zip(whole.groups, halves.groups, strict=True):
        for x, y in zip(a, b, strict=True):
            assert (x.suffix_ids, x.turns, x.stop) == (y.suffix_ids, y.turns, y.stop)
            for s, t in zip(x.segments, y.segments, strict=True):
                np.testing.assert_allclose(s.logps or (), t.logps or (), atol=1e-4)


def test_the_host_has_the_other_half_to_do_while_one_is_decoded(plays):
    """Between a half's dispatch and the wait for its tokens stand the wait for the other half's and its worlds."""
    events = plays[True].events
    a, b = (session for _, session in events[:2])
    assert a != b
    assert events[:6] == [("ask", a), ("ask", b), ("wait", a), ("ask", a), ("wait", b), ("ask", b)]
    assert [what for what, _ in plays[False].events[:4]] == ["ask", "wait", "ask", "wait"]


@pytest.mark.parametrize("overlap", [False, True])
def test_waste_is_what_was_computed_and_held_no_token(plays, overlap):
    play = plays[overlap]
    spent = play.spent
    given = spent["rollout/prompt_tokens"] + spent["rollout/fed_tokens"]
    decoded = play.tokens - given
    assert spent["rollout/padding_share"] == pytest.approx(play.padding / (play.padding + given))
    assert spent["rollout/idle_share"] == pytest.approx(play.idle / (play.idle + decoded))
    shares = [spent[f"rollout/time_share/{name}"] for name in ("prefill", "extend", "decode", "environment")]
    assert all(share > 0 for share in shares) and sum(shares) <= 1


def test_work_adds_up():
    work = Work(prompt=30, fed=10, decoded=60, sampled=70, steps=10, prefill_places=64, extend_places=16)
    assert work.padding_share == 0.5 and math.isnan(work.idle_share)
    work += Work(decode_places=80)
    assert work.idle_share == 0.25 and work.processed == 100
    assert work.metrics({}, 2.0)["rollout/sampled_per_s"] == 35.0


@pytest.mark.parametrize(
    ("groups", "buckets", "expected"),
    [
        (16, (8, 16), [(0, 8), (8, 16)]),
        (12, (4, 8, 16), [(0, 6), (6, 12)]),
        (5, (1, 2, 4, 8), [(0, 3), (3, 5)]),
        (16, (16,), [(0, 16)]),  # no bucket for a half
        (9, (8, 12), [(0, 9)]),  # two halves would compute more places
        (1, (1, 2), [(0, 1)]),
    ],
)
def test_halves_stand_in_declared_buckets(groups, buckets, expected):
    assert [(part.start, part.stop) for part in batches(groups, buckets, halve=True)] == expected
    assert batches(groups, buckets, halve=False) == [slice(0, groups)]
