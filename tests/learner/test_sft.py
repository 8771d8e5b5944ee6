"""The supervised warm start."""

from __future__ import annotations

import numpy as np
import pytest

from seal_jax.learner.batch import Buckets, make_batch
from seal_jax.learner.sft import SftSettings, epoch_batches, group_demonstrations, sft_loss, sft_train

from .toys import segment, toy_logp, toy_params, trajectory

BUCKETS = Buckets(prompt=(4,), suffix=(8, 16), turns=2)


def demo(answer: int, length: int = 3, prompt=(1, 2), task: str = "t") -> object:
    """header, assistant tokens (logp 0: a teacher's, not a sample), observation, end."""
    sampled = segment("sampled", [answer] * length + [0])
    object.__setattr__(sampled, "logps", (0.0,) * (length + 1))
    return trajectory(segment("template", [9]), sampled, segment("observation", [7, 8]), prompt=prompt, task=task)


def test_loss_weights_assistant_and_other_tokens():
    batch = make_batch([[demo(5), demo(5, 2)]], buckets=BUCKETS)
    logp = -np.arange(1.0, 17.0, dtype=np.float32).reshape(1, 2, 8)
    loss, metrics = sft_loss(logp, batch, 0.1)
    mine = np.array([2, 3, 4, 5, 10, 11, 12.0])  # row 0: positions 1-4; row 1: positions 1-3; never position 0
    other = np.array([6, 7, 13, 14.0])  # observations
    want = (mine.sum() + 0.1 * other.sum()) / (len(mine) + 0.1 * len(other))
    np.testing.assert_allclose(float(loss), want, rtol=1e-6)
    np.testing.assert_allclose(metrics["nll"].value(), mine.mean(), rtol=1e-6)


def test_grouping_shares_prompts():
    demos = [demo(1), demo(2, prompt=(3,)), demo(3), demo(4), demo(5, prompt=(3,))]
    groups = group_demonstrations(demos, 2)
    assert [[d.prompt_ids for d in g] for g in groups] == [[(1, 2)] * 2, [(1, 2)], [(3,)] * 2]


def test_epoch_batches_cover_everything_once_and_sort_within_pools():
    longest = np.random.default_rng(0).integers(1, 100, 37)
    batches = epoch_batches(longest, 4, 100, np.random.default_rng(1))
    assert sorted(np.concatenate(batches).tolist()) == list(range(37))
    spread = np.mean([np.ptp(longest[b]) for b in batches])
    assert spread < 20  # 4 random lengths of 1..99 spread over about 60


def test_clones_and_reports():
    """Learns to answer by prompt; groups of demonstrations and single ones go through the same code."""
    demos = [demo(5 + i % 2, 2 + i % 5, prompt=(1 + i % 2, 3), task=f"t{i}") for i in range(24)]
    seen = []
    settings = SftSettings(epochs=20, rows_per_step=8, group=2, learning_rate=0.03, warmup_steps=5, log_every=10)
    params, metrics = sft_train(
        None,
        toy_params(),
        demos,
        settings,
        buckets=BUCKETS,
        progress=lambda step, total, m: seen.append((step, total, m["nll"])),
        logp_fn=toy_logp,
    )
    assert seen[0][0] == 10 and seen[-1][:2] == (metrics["steps"], metrics["steps"]) and metrics["steps"] == 60
    assert seen[-1][2] < 0.6 * seen[0][2] and metrics["nll"] == seen[-1][2]
    assert metrics["compilations"] <= 2 and metrics["tokens_per_s_warm"] >= metrics["tokens_per_s"] > 0
    assert 0 <= metrics["padding"] < 1 and metrics["seconds_compiling"] < metrics["seconds"]
    batch = make_batch([[demo(5, prompt=(1, 3))]], buckets=BUCKETS)
    logp = toy_logp(None, params, batch.prompt_ids_bp, batch.prompt_len_b, batch.suffix_ids_bgs, batch.suffix_len_bg)
    assert float(logp[0, 0, 1]) > np.log(0.6)


def test_bad_input():
    with pytest.raises(ValueError, match="no demonstrations"):
        sft_train(None, toy_params(), [], buckets=BUCKETS, logp_fn=toy_logp)
    with pytest.raises(ValueError, match="rows_per_step=6 is not a multiple of config.warm_start.group=4"):
        SftSettings(rows_per_step=6, group=4)
    bad = toy_params()
    bad["head_dv"] = bad["head_dv"] * np.nan
    with pytest.raises(FloatingPointError, match="sft step 1: the loss is nan"):
        sft_train(
            None, bad, [demo(5)], SftSettings(epochs=1, rows_per_step=8, group=2), buckets=BUCKETS, logp_fn=toy_logp
        )
