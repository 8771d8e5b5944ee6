"""The update: splits that do not matter, donation, skipping, compilations, failures; with a model of three matrices."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seal_jax.learner.batch import Buckets, make_batch
from seal_jax.learner.loss import LossSettings, denominators, seal_loss
from seal_jax.learner.optimizer import OptimizerSettings, make_optimizer
from seal_jax.learner.programs import init_state, own_buffers
from seal_jax.learner.update import Learner, UpdateSettings
from seal_jax.learner.utility import utility_vector
from seal_jax.types import LABELS

from .toys import diagnosis, simple, toy_logp, toy_params, tree_close

RHO = utility_vector()
ONE = Buckets(prompt=(4,), suffix=(16,), turns=4)  # a single compiled shape
STILL = OptimizerSettings(learning_rate=0.0)
SGD_LIKE = OptimizerSettings(learning_rate=0.1, eps=1.0, weight_decay=0.0, clip_norm=0.0)  # steps follow the gradient


def some_batch(sizes=(5, 2, 9, 3, 1, 7, 4, 6), G=3, seed=0, rewards=None, buckets=ONE):
    """Ragged groups of several turns; the middle group is degenerate."""
    rng = np.random.default_rng(seed)
    groups = [
        [simple(n + g, task=f"t{b}", rollout=g, seed=seed + 10 * b + g, prompt=range(1, 2 + b % 4)) for g in range(G)]
        for b, n in enumerate(sizes)
    ]
    if rewards is None:
        rewards = [[1.0, 0.0] + [float(x) for x in rng.integers(0, 2, G - 2)] for _ in sizes]
        rewards[len(sizes) // 2] = [1.0] * G
    labels = [[diagnosis(*[LABELS[i] for i in rng.integers(0, 9, 2)]) for _ in range(G)] for _ in sizes]
    return make_batch(groups, rewards, labels, buckets=buckets)


@functools.cache
def compiled(**kw) -> Learner:
    """One learner per setting for the whole file: compiling is what these tests spend their time on."""
    names = ("loss", "optimizer", "logp_fn", "buckets")
    own = {"optimizer": SGD_LIKE, "logp_fn": toy_logp, "buckets": ONE} | {k: kw.pop(k) for k in names if k in kw}
    settings = UpdateSettings(**{"minibatches": 1, "prompts_per_micro": 2, **kw})
    return Learner(None, toy_params(), update=settings, **own)


def learner(**kw) -> Learner:
    one = compiled(**kw)
    one.state = init_state(toy_params(), make_optimizer(one.optimizer))
    return one


def after(batch, rounds=1, **kw):
    one = learner(**kw)
    metrics = {}
    for r in range(rounds):
        metrics = one.update(batch, round=r, utility_z=RHO)
    return one.params, metrics


def test_split_into_micro_batches_does_not_matter():
    """ms-swift#10117, TRL #5619: the same batch as 1x8, 4x2 and 3+3+2 gives the same step."""
    batch = some_batch()
    loss = LossSettings(reweight="turn", aggregation="seq-mean-token-mean")
    whole, metrics = after(batch, loss=loss, skip_zero_advantage=False, prompts_per_micro=8)
    for per_micro, skip in ((2, False), (3, True)):
        params, other = after(batch, loss=loss, prompts_per_micro=per_micro, skip_zero_advantage=skip)
        tree_close(params, whole)
        assert other["groups/skipped"] == float(skip)
        for name in ("loss/total", "clip/high", "weight/gain", "norm/gradient", "advantage_mass/pass"):
            np.testing.assert_allclose(other[name], metrics[name], atol=1e-6)


def test_step_is_the_plain_gradient_of_the_whole_batch():
    """The jitted, bucketed, accumulated update equals one gradient of the loss over the unsplit batch."""
    batch = some_batch()
    loss = LossSettings(reweight="paper", kl_coef=0.05)
    params, ref = toy_params(), toy_params(1)
    score = lambda p: toy_logp(  # noqa: E731
        None, p, batch.prompt_ids_bp, batch.prompt_len_b, batch.suffix_ids_bgs, batch.suffix_len_bg
    )
    old = batch.replace(old_logp_bgs=score(params), ref_logp_bgs=score(ref))
    grad = jax.grad(lambda p: seal_loss(score(p), old, loss, denominators(batch), jnp.asarray(RHO))[0])(params)
    tx = make_optimizer(SGD_LIKE)
    updates, _ = tx.update(grad, tx.init(params), params)
    want = optax.apply_updates(params, updates)

    one = Learner(
        None,
        toy_params(),
        buckets=ONE,
        loss=loss,
        optimizer=SGD_LIKE,
        update=UpdateSettings(minibatches=1, prompts_per_micro=3),
        reference_params=ref,
        logp_fn=toy_logp,
    )
    metrics = one.update(batch, round=0, utility_z=RHO)
    tree_close(one.params, want)
    assert metrics["loss/kl"] > 0 and metrics["ratio/max"] == 1.0 and metrics["old_kl"] == 0.0


def test_windows_of_unequal_size():
    """mlx-lm PR#1413: 7 groups in 3 mini-batches: 3 steps, each token-weighted, the short last one applied, no NaN."""
    batch = some_batch((1, 2, 3, 4, 5, 6, 7))
    whole, _ = after(batch, minibatches=3, prompts_per_micro=8)
    one = learner(minibatches=3)
    metrics = one.update(batch, round=0)
    assert int(one.state.step) == 3 and all(np.isfinite(x) for x in metrics.values())
    tree_close(one.params, whole)


def test_all_masked_counts_and_does_nothing():
    """unsloth-zoo PR#1286: nothing in the loss: no NaN, zero gradient, and it is counted."""
    batch = some_batch((2, 3), rewards=[[1.0, 0.0, 0.0]] * 2)
    batch.loss_mask_bgs[:] = False
    params, metrics = after(batch)
    assert metrics["minibatches/empty"] == 1 and metrics["norm/gradient"] == 0 and metrics["loss/total"] == 0
    tree_close(params, toy_params(), atol=0)
    batch = some_batch((2, 3), rewards=[[1.0] * 3] * 2)  # all groups skipped: still a (zero) step
    params, metrics = after(batch)
    assert metrics["groups/skipped"] == 2 and metrics["minibatches/empty"] == 0
    tree_close(params, toy_params(), atol=0)


def test_first_ratios_are_one_with_ragged_prompts():
    """TRL #454, trlx#582: uneven prompts, first step of a round: every ratio is 1."""
    for minibatches in (1, 3):
        _, metrics = after(some_batch(), optimizer=STILL, minibatches=minibatches)
        assert abs(metrics["ratio/mean"] - 1) < 1e-6 and abs(metrics["ratio/max"] - 1) < 1e-6
        assert metrics["clip/high"] == metrics["clip/low"] == 0


def test_sampler_gap_sees_the_recorded_log_probs():
    batch = some_batch()
    exact = learner(minibatches=3, optimizer=STILL).score(toy_params(), batch)
    batch = batch.replace(sample_logp_bgs=exact + np.float32(0.01))
    for minibatches in (1, 3):
        _, metrics = after(batch, optimizer=STILL, minibatches=minibatches)
        np.testing.assert_allclose([metrics["sampler_gap/mean"], metrics["sampler_gap/max"]], 0.01, atol=1e-5)


def test_positive_rows_become_likelier():
    """mlx-lm-lora#50: after one step (no KL) tokens of the positive row gain and those of the negative row lose."""
    batch = some_batch((6,), rewards=[[1.0, 0.0, 0.0]])
    one = learner()
    before = one.score(one.params, batch).sum(-1)[0]
    metrics = one.update(batch, round=0, utility_z=RHO)
    gain = one.score(one.params, batch).sum(-1)[0] - before
    assert gain[0] > 0 > gain[1:].sum() and metrics["norm/gradient"] > 0


def test_temperature_divides_in_the_trainer_too():
    batch = some_batch((4,))
    got = learner(temperature=0.5).score(toy_params(), batch)
    want = toy_logp(
        None, toy_params(), batch.prompt_ids_bp, batch.prompt_len_b, batch.suffix_ids_bgs, batch.suffix_len_bg, 0.5
    )
    np.testing.assert_allclose(got, np.where(batch.loss_mask_bgs, want, 0), atol=1e-5)


def test_donation_leaves_the_reference_alone():
    """flax#5461, jax#9635: a reference that shares buffers with the policy; a leaf that stands twice in the tree."""
    params = toy_params()
    params["tied_vd"] = params["embed_vd"]
    ref = dict(params)

    def logp(config, p, *args, **kw):
        return toy_logp(config, {**p, "embed_vd": 0.5 * (p["embed_vd"] + p["tied_vd"])}, *args, **kw)

    one = Learner(
        None,
        params,
        buckets=ONE,
        loss=LossSettings(kl_coef=0.1),
        optimizer=SGD_LIKE,
        update=UpdateSettings(minibatches=2, prompts_per_micro=4),
        reference_params=ref,
        logp_fn=logp,
    )
    batch, first = some_batch(), one.state.params["head_dv"]
    before = one.score(one.reference, batch)
    for r in range(2):
        one.update(batch, round=r)
    assert first.is_deleted()  # the old state was really donated
    np.testing.assert_array_equal(one.score(one.reference, batch), before)
    tree_close({k: one.reference[k] for k in toy_params()}, toy_params(), atol=0)
    assert float(jnp.abs(one.params["embed_vd"] - one.reference["embed_vd"]).max()) > 0

    a = jnp.ones(2)
    owned = own_buffers({"x": a, "y": a}, {"z": a})
    assert owned["x"] is not a and owned["y"] is not owned["x"]


def test_no_reference_forward_without_kl():
    assert learner().reference is None


def test_a_frozen_learner_holds_parameters_and_nothing_else():
    one = Learner(None, toy_params(), buckets=ONE, loss=LossSettings(kl_coef=0.1), frozen=True, logp_fn=toy_logp)
    tree_close(one.params, toy_params(), atol=0)
    assert one.reference is None and not jax.tree.leaves(one.state.opt_state)
    with pytest.raises(ValueError, match="this learner is frozen"):
        one.update(some_batch(), round=0)


def test_a_transfer_that_nobody_asked_for_is_an_error():
    """Every setting passes `update` with the guard on; a program that is handed a host array does not."""
    one = learner()
    accumulate = one.programs.accumulate
    one.programs = replace(
        one.programs, accumulate=lambda g, p, b, micro, *rest: accumulate(g, p, b, jax.device_get(micro), *rest)
    )
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        one.update(some_batch(), round=0)
    one.programs = replace(one.programs, accumulate=accumulate)


def test_second_update_compiles_nothing():
    """Other lengths, rewards and utilities in the same buckets reuse every compiled function."""
    loss, two = LossSettings(reweight="release", normalize_weights=True), Buckets((4,), (8, 16), turns=4)
    one = learner(loss=loss, minibatches=2, prompts_per_micro=1, buckets=two)
    seen = []
    for r in range(4):
        sizes = [1, 1, 1, 1, 9, 8 - r, 7, 6 + r]  # half of each bucket, in every mini-batch
        batch = some_batch(tuple(sizes), seed=r, buckets=two)
        one.update(batch, round=r, utility_z=RHO * (1 - 0.1 * r))
        seen.append(one.compilations)
    assert seen[-1] == {"score": 2, "zeros": 1, "mass": 2, "accumulate": 2, "norm": 1, "apply": 1}
    assert seen[1] == seen[-1]


def test_normalised_weights_keep_the_advantage_mass():
    batch = some_batch()
    _, metrics = after(batch, loss=LossSettings(reweight="turn", normalize_weights=True))
    np.testing.assert_allclose(metrics["weight/gain"], 1.0, atol=1e-5)
    _, metrics = after(batch, loss=LossSettings(reweight="turn"), skip_zero_advantage=False)
    assert abs(metrics["weight/gain"] - 1) > 0.01


def test_not_finite_is_an_error_that_names_round_and_quantity():
    def broken(config, params, *args, **kw):
        logp = toy_logp(config, params, *args, **kw)
        return jnp.where(logp < 0, logp * jnp.nan, logp)

    one = learner(logp_fn=broken)
    with pytest.raises(FloatingPointError, match="round 7, epoch 0, mini-batch 0: the loss is nan"):
        one.update(some_batch(), round=7)
    tree_close(one.params, toy_params(), atol=0)  # the step was not taken
    assert int(one.state.step) == 0


def test_parameters_that_a_step_made_not_finite_are_an_error():
    one = learner()
    # Bad moments stand for whatever overflows inside the optimiser: loss and gradient are fine.
    one.state = one.state.replace(
        opt_state=jax.tree.map(
            lambda x: x * jnp.array(jnp.nan, x.dtype) if x.dtype == jnp.float32 else x, one.state.opt_state
        )
    )
    with pytest.raises(FloatingPointError, match="round 7, .*the parameters after the step are not finite"):
        one.update(some_batch(), round=7)


def test_seeds_decide_the_mini_batches():
    batch = some_batch()
    one, params = learner(minibatches=3), []
    for r in (0, 0, 1):
        one.state = init_state(toy_params(), make_optimizer(one.optimizer))
        one.update(batch, round=r)
        params.append(jax.device_get(one.params))
    a, b, c = params
    tree_close(a, b, atol=0)
    assert float(jnp.abs(a["head_dv"] - c["head_dv"]).max()) > 0


def test_bad_input():
    with pytest.raises(ValueError, match="config.learner.minibatches=3 exceeds the 2 groups"):
        learner(minibatches=3).update(some_batch((1, 2)), round=0)
    with pytest.raises(ValueError, match="needs utility_z"):
        learner(loss=LossSettings(reweight="paper")).update(some_batch(), round=0)
    with pytest.raises(ValueError, match="config.temperature=0"):
        UpdateSettings(temperature=0)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), toy_params())
    with pytest.raises(ValueError, match="embed_vd is bfloat16"):
        Learner(None, half, buckets=ONE, logp_fn=toy_logp)
