"""The loss against a numpy loop, and the arithmetic that systems like this one have got wrong in public."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seal_jax.learner.loss import Denominators, LossSettings, denominators, group_advantage, k3, seal_loss, turn_weights
from seal_jax.learner.metrics import merge_metrics, metric_values
from seal_jax.learner.utility import PAPER_UTILITY, RELEASE_UTILITY, utility_vector
from seal_jax.types import LABEL_ID, LABELS

from .toys import numpy_loss, pad, padded, random_batch

RHO = utility_vector()


#: Op by op, so that the tests share their compiled ops; the update's tests and a few of these run it jitted.
_EAGER = jax.value_and_grad(seal_loss, has_aux=True)
_JITTED = jax.jit(_EAGER, static_argnums=2)


def value_and_grad(logp, batch, settings, rho=RHO, whole=None, run=_EAGER):
    whole = denominators(batch) if whole is None else whole
    b, g, s = np.shape(logp)
    logp = jnp.asarray(pad(np.asarray(logp, np.float32), "bgs", np.nan))
    (value, metrics), grad = run(logp, padded(batch), settings, whole, np.asarray(rho, np.float32))
    return float(value), np.asarray(grad)[:b, :g, :s], metric_values(merge_metrics([jax.device_get(metrics)]))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("reweight", ["none", "paper", "release", "turn"])
def test_equals_a_numpy_loop(reweight, aggregation):
    extras = [{}, {"kl_coef": 0.1}, {"sign_aware": True, "clip_high": 0.28}]
    for seed, extra in enumerate(extras):
        logp, batch = random_batch(seed)
        s = LossSettings(reweight=reweight, aggregation=aggregation, **extra)
        value, grad, metrics = value_and_grad(logp, batch, s)
        want, want_grad = numpy_loss(logp, batch, s, RHO)
        assert abs(value - want) < 2e-5 * max(1, abs(want))
        np.testing.assert_allclose(grad, want_grad, atol=2e-6, rtol=2e-5)
        for name in ("clip/high", "clip/low"):
            assert metrics[name] > 0  # the case really holds ratios on both sides of the clip


def test_some_case_holds_the_dual_clip():
    logp, batch = random_batch(2)
    value, _, metrics = value_and_grad(logp, batch, LossSettings(dual_clip=3.0))
    assert metrics["clip/dual"] > 0
    want, _ = numpy_loss(logp, batch, LossSettings(dual_clip=3.0), RHO)
    assert abs(value - want) < 2e-5 * max(1, abs(want))


def test_none_is_plain_grpo_bit_for_bit():
    """With all utilities 1 the weighted loss is the plain one to the last bit, in every mode.

    Run op by op: XLA may round two differently fused programs differently.
    """
    logp, batch = random_batch(3)
    value, grad, _ = value_and_grad(logp, batch, LossSettings())
    for mode in ("paper", "release", "turn"):
        s = LossSettings(reweight=mode)
        other, other_grad, _ = value_and_grad(logp, batch, s, rho=np.ones(len(LABELS)))
        assert other == value and (other_grad == grad).all()
    jitted, jitted_grad, _ = value_and_grad(logp, batch, s, rho=np.ones(len(LABELS)), run=_JITTED)
    assert abs(jitted - value) < 1e-6
    np.testing.assert_allclose(jitted_grad, grad, atol=1e-6)


def test_weights_are_not_in_the_plain_loss():
    """reweight="none" never reads the labels or the utility."""
    logp, batch = random_batch(3)
    value, grad, _ = value_and_grad(logp, batch, LossSettings())
    odd = batch.replace(labels_bgt=np.full_like(batch.labels_bgt, 7))
    other, other_grad, _ = value_and_grad(logp, odd, LossSettings(), rho=np.full(len(LABELS), np.nan))
    assert value == other and (grad == other_grad).all()
    with pytest.raises(ValueError, match="needs utility_z"):
        seal_loss(jnp.asarray(logp), batch, LossSettings(reweight="paper"), denominators(batch), None)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_places_may_hold_anything(poison):
    logp, batch = random_batch(2)
    s = LossSettings(reweight="turn", kl_coef=0.1)
    clean = value_and_grad(logp, batch, s, run=_JITTED)
    on = batch.loss_mask_bgs & batch.row_mask_bg[..., None]
    plant = lambda x: np.where(on, x, poison).astype(np.float32)  # noqa: E731
    bad = batch.replace(
        old_logp_bgs=plant(batch.old_logp_bgs),
        ref_logp_bgs=plant(batch.ref_logp_bgs),
        sample_logp_bgs=plant(batch.sample_logp_bgs),
    )
    value, grad, metrics = value_and_grad(plant(logp), bad, s, run=_JITTED)
    assert value == clean[0] and (grad == clean[1]).all() and metrics == clean[2]
    # the reward of a row outside the statistics too
    hole = batch.reward_mask_bg.copy()
    hole[1, 0] = hole[2] = False
    hollow = batch.replace(reward_mask_bg=hole)
    same = value_and_grad(logp, hollow.replace(reward_bg=np.where(hole, batch.reward_bg, np.float32(poison))), s)
    assert np.isfinite(same[0]) and same[0] == value_and_grad(logp, hollow, s)[0]


def test_environment_tokens_do_not_reach_the_loss():
    """What stands outside the loss mask (observations, headers, cues) changes neither value nor gradient."""
    logp, batch = random_batch(5)
    clean = value_and_grad(logp, batch, LossSettings(reweight="paper"))
    moved = np.where(batch.loss_mask_bgs, logp, logp - 3).astype(np.float32)
    value, grad, _ = value_and_grad(moved, batch, LossSettings(reweight="paper"))
    assert value == clean[0] and (grad == clean[1]).all() and (grad[~batch.loss_mask_bgs] == 0).all()


# --- known numeric bugs ----------------------------------------------------------------------------------------------
def tiny(mask, reward, **changes):
    """A batch of one shape [B,G,S] from a mask and rewards; old = ref = logp = 0 unless changed."""
    mask = np.asarray(mask, bool)
    _, batch = random_batch(0, *mask.shape)
    zeros = np.zeros(mask.shape, np.float32)
    return batch.replace(
        loss_mask_bgs=mask,
        reward_bg=np.asarray(reward, np.float32),
        old_logp_bgs=zeros,
        ref_logp_bgs=zeros,
        sample_logp_bgs=zeros,
        row_mask_bg=np.ones(mask.shape[:2], bool),
        **changes,
    )


def test_token_mean_does_not_depend_on_the_split():
    """verl PR#906, #7321: token losses [4] and [1,1,1] make 7/4 for any split, never the mean of means 2.5."""
    s = LossSettings(kl_coef=1.0, kl_max=0.0)
    mask = [[[1, 0, 0], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]]]
    batch = tiny(mask, [[1, 1], [1, 1]])  # equal rewards: only the KL is left
    d = np.zeros((2, 2, 3), np.float32)
    root = {4.0: 1.93685, 1.0: 1.14619}  # exp(d) - d - 1
    d[0, 0, 0], d[1, 0] = root[4.0], root[1.0]
    batch = batch.replace(ref_logp_bgs=d)
    logp, whole = np.zeros_like(d), denominators(batch)
    full, grad, _ = value_and_grad(logp, batch, s)
    assert abs(full - 7 / 4) < 1e-3
    halves = [
        value_and_grad(logp[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], batch), s, whole=whole)
        for i in (0, 1)
    ]
    assert abs(sum(h[0] for h in halves) - full) < 1e-6
    np.testing.assert_allclose(np.concatenate([h[1] for h in halves]), grad, atol=1e-6)


def test_denominator_ignores_what_the_numerator_ignores():
    """TRL #6369: 4 rows of 10 tokens, one of them masked: divide by 30."""
    batch = tiny(np.ones((1, 4, 10)), [[0, 1, 0, 1]])
    rows = np.array([[True, True, True, False]])
    batch = batch.replace(row_mask_bg=rows)
    assert float(denominators(batch).tokens) == 30 and float(denominators(batch).rows) == 3
    A = (np.array([0, 1, 0, 1]) - 0.5) / (np.std([0, 1, 0, 1], ddof=1) + 1e-6)
    value, _, _ = value_and_grad(np.zeros((1, 4, 10)), batch, LossSettings())
    assert abs(value - -(A[:3].sum() * 10) / 30) < 1e-6


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_all_masked_is_zero(aggregation):
    """TRL PR#3248: no loss token at all gives loss 0 and gradient 0, no NaN."""
    batch = tiny(np.zeros((2, 2, 3)), [[0, 1], [1, 0]])
    value, grad, metrics = value_and_grad(
        np.zeros((2, 2, 3)), batch, LossSettings(aggregation=aggregation, kl_coef=0.1, reweight="turn")
    )
    assert value == 0 and (grad == 0).all() and all(np.isfinite(x) for x in metrics.values())


@pytest.mark.parametrize("ceiling", [0.0, 10.0])
@pytest.mark.parametrize("gap", [89.0, 200.0, -200.0])
def test_kl_stays_finite(gap, ceiling):
    """TRL #3015: ref - policy = 89 overflows float32 in exp; bounding the result would still give 0 * inf backward."""
    value, grad = jax.value_and_grad(lambda x: k3(x, jnp.float32(gap), ceiling))(jnp.float32(0))
    assert np.isfinite(value) and np.isfinite(grad) and value > 1
    batch = tiny(np.ones((1, 2, 2)), [[0, 1]])
    batch = batch.replace(
        ref_logp_bgs=np.full((1, 2, 2), gap, np.float32), old_logp_bgs=np.full((1, 2, 2), -gap, np.float32)
    )
    value, grad, _ = value_and_grad(np.zeros((1, 2, 2)), batch, LossSettings(kl_coef=0.1, dual_clip=0.0))
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_equal_rewards_carry_only_kl():
    """TRL PR#7068: an all-equal group has exactly 0 policy gradient, reweighted or not; its KL gradient stays."""
    batch = tiny(np.ones((2, 4, 2)), [[1, 1, 1, 1], [0, 1, 0, 1]])
    logp = np.full((2, 4, 2), 0.1, np.float32)
    for mode in ("none", "paper", "turn"):
        _, grad, _ = value_and_grad(logp, batch, LossSettings(reweight=mode))
        assert (grad[0] == 0).all() and (grad[1] != 0).all()
    _, grad, _ = value_and_grad(logp, batch, LossSettings(kl_coef=0.1))
    assert (grad[0] != 0).all()
    thirds = jnp.full((1, 3), 0.1)  # the float32 mean of three 0.1 is not 0.1
    assert (group_advantage(thirds, jnp.ones((1, 3), bool)) == 0).all()


def test_group_of_one_is_zero():
    """verl PR#3635: std of one reward with n - 1 is NaN; here the advantage is 0, also when rows were excluded."""
    assert group_advantage(jnp.array([[0.5]]), jnp.ones((1, 1), bool)).tolist() == [[0.0]]
    valid = jnp.array([[True, False, False]])
    assert group_advantage(jnp.array([[1.0, 0.0, 0.0]]), valid).tolist() == [[0.0, 0.0, 0.0]]
    assert group_advantage(jnp.array([[1.0, 0.0]]), jnp.zeros((1, 2), bool)).tolist() == [[0.0, 0.0]]


def test_advantage_is_by_group_not_by_batch():
    """grpo-flat#2: [1,1,0,0] and [9,9,8,8] have the same advantages, in any order of the groups."""
    reward = jnp.array([[1.0, 1, 0, 0], [9, 9, 8, 8]])
    A = group_advantage(reward, jnp.ones((2, 4), bool))
    np.testing.assert_allclose(A[0], A[1], atol=1e-6)
    np.testing.assert_array_equal(group_advantage(reward[::-1], jnp.ones((2, 4), bool)), A[::-1])


def test_advantage_numbers():
    """The choice is n - 1 and eps 1e-6: [1, 0 x 7] gives 2.4749 and -0.35355."""
    A = np.asarray(group_advantage(jnp.array([[1.0] + [0.0] * 7]), jnp.ones((1, 8), bool)))[0]
    np.testing.assert_allclose(A, [2.47487] + [-0.353553] * 7, atol=1e-5)


def test_ratio_is_per_token():
    """walkinglabs#75: both log-probs up by 0.1 gives ratios e^0.1 each, not e^0.2."""
    batch = tiny(np.ones((1, 2, 2)), [[0, 1]])
    _, _, metrics = value_and_grad(np.full((1, 2, 2), 0.1), batch, LossSettings())
    assert abs(metrics["ratio/mean"] - np.exp(0.1)) < 1e-6 and abs(metrics["ratio/max"] - np.exp(0.1)) < 1e-6


def test_positive_advantage_has_a_gradient():
    """mlx-lm-lora#50: with no KL and ratio 1 the gradient is not zero and raises the positive row's log-probs."""
    batch = tiny(np.ones((1, 2, 2)), [[0, 1]])
    for old in (0.0, np.nan):
        batch = batch.replace(old_logp_bgs=np.full((1, 2, 2), old, np.float32))
        _, grad, _ = value_and_grad(np.zeros((1, 2, 2)), batch, LossSettings())
        assert (grad[0, 1] < 0).all() and (grad[0, 0] > 0).all()


def test_unscored_old_policy_is_the_current_one():
    logp, batch = random_batch(4)
    a, b = (
        value_and_grad(logp, batch.replace(old_logp_bgs=old), LossSettings(reweight="turn"))
        for old in (logp, np.full_like(logp, np.nan))
    )
    assert a[0] == b[0] and (a[1] == b[1]).all()


# --- weights ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("table", [PAPER_UTILITY, RELEASE_UTILITY])
@pytest.mark.parametrize(
    "labels, want",
    [
        (["correct_abstention", "pass", "pass", "pass"], 1.2),
        (["spurious_tool_call", "pass", "pass", "pass"], 1.25),
        (["spurious_tool_call", "state_mismatch"], 1.5),
        (["missing_tool_call"] * 4, 1.5),
        (["response_mismatch"] * 4, 0.9),
        (["env_error"], 1.0),
        ([], 1.0),
    ],
)
def test_trajectory_weight_numbers(labels, want, table):
    ids = np.full((1, 1, 4), -1, np.int32)
    ids[0, 0, : len(labels)] = [LABEL_ID[x] for x in labels]
    rho = np.array([table.get(x, 1.0) for x in LABELS])
    w = turn_weights(jnp.asarray(ids), jnp.ones((1, 1)), jnp.asarray(rho), LossSettings(reweight="paper"))
    np.testing.assert_allclose(w, [[[want]]], atol=1e-6)


def test_weights_are_clipped_and_excluded_labels_ignored():
    ids = np.array([[[LABEL_ID["spurious_tool_call"], LABEL_ID["env_error"], LABEL_ID["not_reached"], -1]]])
    rho = np.full(len(LABELS), 99.0)
    for mode, want in (("paper", [[[2.0]]]), ("turn", [[[2.0, 1.0, 1.0, 1.0]]])):
        w = turn_weights(jnp.asarray(ids), jnp.ones((1, 1)), jnp.asarray(rho), LossSettings(reweight=mode))
        assert w.tolist() == want
    low = turn_weights(jnp.asarray(ids), jnp.ones((1, 1)), jnp.zeros(len(LABELS)), LossSettings(reweight="paper"))
    assert low.tolist() == [[[0.5]]]


def test_sign_aware():
    """A failure label must not amplify a success, nor a correct abstention a failure."""
    ids = jnp.array([[[LABEL_ID["spurious_tool_call"], LABEL_ID["correct_abstention"]]] * 2])
    s = LossSettings(reweight="turn", sign_aware=True)
    w = turn_weights(ids, jnp.array([[1.0, -1.0]]), jnp.asarray(RHO), s)
    np.testing.assert_allclose(w[0], [[1.0, 1.8], [2.0, 1.0]], atol=1e-6)


def test_turn_weight_falls_on_that_turn_only():
    batch = tiny(np.ones((1, 2, 4)), [[0, 1]])
    turn = np.tile(np.array([0, 0, 1, 1], np.int32), (1, 2, 1))
    labels = np.full((1, 2, 3), LABEL_ID["pass"], np.int32)
    labels[0, 0, 1] = LABEL_ID["spurious_tool_call"]
    batch = batch.replace(turn_id_bgs=turn, labels_bgt=labels)
    _, plain, _ = value_and_grad(np.zeros((1, 2, 4)), batch, LossSettings())
    _, grad, metrics = value_and_grad(np.zeros((1, 2, 4)), batch, LossSettings(reweight="turn"))
    np.testing.assert_allclose(grad / plain, [[[1, 1, 2, 2], [1, 1, 1, 1]]], atol=1e-6)
    assert abs(metrics["weight/gain"] - 10 / 8) < 1e-6
    assert abs(metrics["advantage_mass/spurious_tool_call"] - 0.4) < 1e-6
    assert abs(metrics["advantage_mass/pass"] - 0.6) < 1e-6


def test_sampler_gap_ignores_rows_without_a_record():
    batch = tiny(np.ones((1, 2, 2)), [[0, 1]])
    batch = batch.replace(sample_logp_bgs=np.array([[[0.25, 0.5], [np.nan, np.nan]]], np.float32))
    _, _, metrics = value_and_grad(np.zeros((1, 2, 2)), batch, LossSettings())
    assert metrics["sampler_gap/mean"] == 0.375 and metrics["sampler_gap/max"] == 0.5


def test_bad_settings_name_their_field():
    cases = {
        "reweight": "papper",
        "aggregation": "mean",
        "clip_low": 1.5,
        "dual_clip": 1.0,
        "kl_coef": -1.0,
        "w_min": 3.0,
    }
    for name, value in cases.items():
        with pytest.raises(ValueError, match=f"loss.*{name}"):
            LossSettings(**{name: value})


def test_settings_are_static_and_utility_is_not():
    """New dynamic weights compile nothing; every settings object is hashable."""
    logp, batch = random_batch(0)
    traces = 0

    def run(x, batch, whole, rho):
        nonlocal traces
        traces += 1
        return seal_loss(x, batch, LossSettings(reweight="release"), whole, rho)[0]

    jitted, seen = jax.jit(run), set()
    for scale in (1.0, 0.7, 1.3):
        seen.add(float(jitted(logp, batch, denominators(batch), (RHO * scale).astype(np.float32))))
    assert traces == 1 and len(seen) == 3
    assert len({LossSettings(), replace(LossSettings(), kl_coef=0.1)}) == 2


def test_micro_batches_of_groups_sum_to_the_whole():
    for reweight, aggregation in itertools.product(["none", "turn"], ["token-mean", "seq-mean-token-mean"]):
        logp, batch = random_batch(7, B=4)
        s = LossSettings(reweight=reweight, aggregation=aggregation, kl_coef=0.01)
        full, grad, _ = value_and_grad(logp, batch, s)
        whole: Denominators = denominators(batch)
        total, grads = 0.0, []
        for part in (slice(0, 1), slice(1, 2), slice(2, 4)):
            v, g, _ = value_and_grad(logp[part], jax.tree.map(lambda x, p=part: x[p], batch), s, whole=whole)
            total += v
            grads.append(g)
        assert abs(total - full) < 1e-6
        np.testing.assert_allclose(np.concatenate(grads), grad, atol=1e-6)
