"""The one loss of SEAL: group advantage, diagnosis-weighted (arXiv 2605.24426, Eq. 10-13), clipped, with a k3 KL.

`seal_loss` is a pure function of log-probs and a `Batch`. With `reweight="none"` no weight exists and it is plain GRPO.
All arithmetic is float32. A masked place may hold anything, also inf and NaN: it is replaced before any exp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from seal_jax.learner.batch import Batch
from seal_jax.learner.metrics import Max, Mean
from seal_jax.types import EXCLUDED_LABELS, LABELS, SUCCESS_LABELS

Array = jax.Array

#: exp() of anything larger is not a ratio or a divergence any more, and above 88 it is inf in float32. The bound is put
#: on the argument: a bound on the result would still give 0 * inf = NaN in the gradient.
EXP_BOUND = 20.0

_SUCCESS_Z = np.array([label in SUCCESS_LABELS for label in LABELS])
_EXCLUDED_Z = np.array([label in EXCLUDED_LABELS for label in LABELS])


@dataclass(frozen=True)
class LossSettings:
    """What the loss is; static under jit (hashable). Values of the paper's runs are the defaults, except `kl_coef`.

    reweight: "none" plain GRPO; "paper" w_j = clip(p_j . rho) per trajectory; "release" the same arithmetic, to be fed
      with the reference release's dynamic tag weights; "turn" the same rho per turn, on that turn's tokens (ours).
    aggregation: "token-mean" over all loss tokens of the mini-batch; "seq-mean-token-mean": mean over rows of the
      row's token mean (what the reference release computes in effect, with one row per micro-batch).
    dual_clip: bound on -A * ratio for A < 0, in units of |A|; 0 turns it off.
    kl_max: ceiling on a token's k3 value (the gradient is 0 above it), as in verl; 0 turns it off.
    sign_aware: a failure label scales only negative advantages and a success label only positive ones (ours).
    normalize_weights: rescale so that reweighting moves advantage mass but does not change its sum (ours); needs
      `Denominators.weight_scale`.
    """

    reweight: Literal["none", "paper", "release", "turn"] = "none"
    aggregation: Literal["token-mean", "seq-mean-token-mean"] = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 10.0
    kl_coef: float = 0.0
    kl_max: float = 10.0
    advantage_eps: float = 1e-6
    w_min: float = 0.5
    w_max: float = 2.0
    sign_aware: bool = False
    normalize_weights: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("reweight", ("none", "paper", "release", "turn")),
            ("aggregation", ("token-mean", "seq-mean-token-mean")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"config.loss.{name}={getattr(self, name)!r} is not one of {allowed}")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ValueError(
                f"config.loss.clip_low={self.clip_low}, clip_high={self.clip_high}: need 0 <= low < 1, high >= 0"
            )
        if self.dual_clip != 0 and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"config.loss.dual_clip={self.dual_clip} must be 0 (off) or above 1 + clip_high")
        if self.kl_coef < 0 or self.kl_max < 0:
            raise ValueError(f"config.loss.kl_coef={self.kl_coef} and kl_max={self.kl_max} must not be negative")
        if not 0 <= self.w_min <= self.w_max:
            raise ValueError(f"config.loss.w_min={self.w_min}, w_max={self.w_max}: need 0 <= w_min <= w_max")


@struct.dataclass
class Denominators:
    """What the whole mini-batch is divided by, passed to each of its micro-batches (float32 scalars).

    `share` is 1 / number of micro-batches: the part of the count of mini-batches that one call carries in the metrics.
    """

    tokens: Any  # loss tokens of the mini-batch
    rows: Any  # rows with at least one loss token
    share: Any = 1.0
    weight_scale: Any = 1.0  # sum |A| / sum |w A|, only used with normalize_weights


def denominators(batch: Batch, share: float = 1.0) -> Denominators:
    """Counts of a whole numpy mini-batch; groups skipped later for their zero advantage are counted too."""
    n_bg = (batch.loss_mask_bgs & batch.row_mask_bg[..., None]).sum(-1)
    return Denominators(*(np.float32(x) for x in (n_bg.sum(), (n_bg > 0).sum(), share, 1.0)))


def group_advantage(reward_bg: Array, valid_bg: Array, eps: float = 1e-6) -> Array:
    """[B,G] float32 (r - mean) / (std + eps) over the valid rows of each group, std with ddof = 1.

    Exactly 0 for invalid rows, for a group whose rewards are all equal, and for a group with fewer than two valid rows.
    """
    n_b1 = jnp.sum(valid_bg, 1, keepdims=True)
    reward_bg = jnp.where(valid_bg, reward_bg, 0.0).astype(jnp.float32)
    mean_b1 = jnp.sum(reward_bg, 1, keepdims=True) / jnp.maximum(n_b1, 1)
    centred_bg = jnp.where(valid_bg, reward_bg - mean_b1, 0.0)
    var_b1 = jnp.sum(centred_bg**2, 1, keepdims=True) / jnp.maximum(n_b1 - 1, 1)
    high_b1 = jnp.max(jnp.where(valid_bg, reward_bg, -jnp.inf), 1, keepdims=True)
    low_b1 = jnp.min(jnp.where(valid_bg, reward_bg, jnp.inf), 1, keepdims=True)
    # The mean of equal rewards is not always that reward in float32, and eps is small: say it outright.
    return jnp.where(high_b1 > low_b1, centred_bg / (jnp.sqrt(var_b1) + eps), 0.0)


def turn_weights(labels_bgt: Array, advantage_bg: Array, utility_z: Array, settings: LossSettings) -> Array:
    """[B,G,T] float32: the weight of each turn's tokens; [B,G,1] where it is one weight per trajectory.

    A trajectory (or turn) without a label that counts has weight 1.
    """
    labelled_bgt = (labels_bgt >= 0) & ~jnp.asarray(_EXCLUDED_Z)[jnp.maximum(labels_bgt, 0)]
    z_bgt = jnp.where(labelled_bgt, labels_bgt, 0)
    rho_bgt = jnp.asarray(utility_z, jnp.float32)[z_bgt]
    sign_bg1 = advantage_bg[..., None]
    if settings.sign_aware:
        applies_bgt = jnp.where(jnp.asarray(_SUCCESS_Z)[z_bgt], sign_bg1 > 0, sign_bg1 < 0)
        rho_bgt = jnp.where(applies_bgt, rho_bgt, 1.0)
    if settings.reweight == "turn":
        w_bgt = jnp.where(labelled_bgt, jnp.clip(rho_bgt, settings.w_min, settings.w_max), 1.0)
    else:
        # p_j . rho of Eq. 10-11, with p_j the label frequencies: the mean utility over the labelled turns.
        n_bg1 = jnp.sum(labelled_bgt, -1, keepdims=True)
        mean_bg1 = jnp.sum(jnp.where(labelled_bgt, rho_bgt, 0.0), -1, keepdims=True) / jnp.maximum(n_bg1, 1)
        w_bgt = jnp.where(n_bg1 > 0, jnp.clip(mean_bg1, settings.w_min, settings.w_max), 1.0)
    return w_bgt


def bounded_exp(x: Array) -> Array:
    return jnp.exp(jnp.clip(x, -EXP_BOUND, EXP_BOUND))


def k3(logp: Array, ref_logp: Array, ceiling: float = 0.0) -> Array:
    """The k3 estimate of KL(policy || reference) per token: exp(d) - d - 1, d = ref - logp; always finite."""
    d = jnp.clip(ref_logp - logp, -EXP_BOUND, EXP_BOUND)
    value = jnp.exp(d) - d - 1.0
    return jnp.minimum(value, ceiling) if ceiling > 0 else value


def _shares(mask_bgs: Array, settings: LossSettings, denominators: Denominators) -> Array:
    """[B,G] what one token of each row weighs in the mini-batch's mean."""
    if settings.aggregation == "token-mean":
        return jnp.full(mask_bgs.shape[:2], 1.0 / jnp.maximum(denominators.tokens, 1.0))
    return 1.0 / (jnp.maximum(jnp.sum(mask_bgs, -1), 1) * jnp.maximum(denominators.rows, 1.0))


def _aggregate(x_bgs: Array, mask_bgs: Array, share_bg: Array) -> Array:
    """The part of the mini-batch's mean that these rows contribute (scalar)."""
    return jnp.sum(jnp.sum(jnp.where(mask_bgs, x_bgs, 0.0), -1) * share_bg)


def _per_token(x_bgt: Array, turn_id_bgs: Array) -> Array:
    """Spreads a per-turn array over tokens; a per-trajectory one ([B,G,1]) is left to broadcast."""
    if x_bgt.shape[-1] == 1:
        return x_bgt
    return jnp.take_along_axis(x_bgt, jnp.clip(turn_id_bgs, 0, x_bgt.shape[-1] - 1), axis=-1)


def _turn_shares(batch: Batch, mask_bgs: Array, share_bg: Array) -> Array:
    """[B,G,T] what the tokens of each turn weigh together in the mini-batch's mean."""
    T = batch.labels_bgt.shape[-1]
    turn_bgst = jnp.clip(batch.turn_id_bgs, 0, T - 1)[..., None] == jnp.arange(T)
    return jnp.sum(turn_bgst & mask_bgs[..., None], 2) * share_bg[..., None]


def weight_mass(
    batch: Batch, settings: LossSettings, denominators: Denominators, utility_z: Array
) -> tuple[Array, Array]:
    """(aggregated |w A|, aggregated |A|) of a micro-batch, before normalisation: what `weight_scale` is made from."""
    mask_bgs = batch.loss_mask_bgs & batch.row_mask_bg[..., None]
    share_bgt = _turn_shares(batch, mask_bgs, _shares(mask_bgs, settings, denominators))
    advantage_bg = group_advantage(batch.reward_bg, batch.reward_mask_bg, settings.advantage_eps)
    w_bgt = turn_weights(batch.labels_bgt, advantage_bg, utility_z, settings)
    mass_bgt = jnp.abs(advantage_bg)[..., None] * share_bgt
    return jnp.sum(w_bgt * mass_bgt), jnp.sum(mass_bgt)


def seal_loss(
    logp_bgs: Array,
    batch: Batch,
    settings: LossSettings,
    denominators: Denominators,
    utility_z: Array | None = None,
) -> tuple[Array, dict[str, Mean | Max]]:
    """The loss of one micro-batch, already divided by the whole mini-batch's denominators, and its metrics.

    The sum over a mini-batch's micro-batches is the mini-batch's loss, however it was split into groups.

    Args:
      logp_bgs: [B,G,S] float32 log-probs under the policy that is being trained, at the sampling temperature.
      utility_z: [Z] float32 rho over `LABELS`; an argument, so new dynamic weights compile nothing. Unused by "none".
    """
    mask_bgs = batch.loss_mask_bgs & batch.row_mask_bg[..., None]
    logp_bgs = jnp.where(mask_bgs, logp_bgs.astype(jnp.float32), 0.0)
    unscored_bgs = jnp.isnan(batch.old_logp_bgs)  # by a round's first step: there the old policy is the current one
    old_bgs = jnp.where(unscored_bgs, jax.lax.stop_gradient(logp_bgs), batch.old_logp_bgs)
    old_bgs = jnp.where(mask_bgs, old_bgs, 0.0)

    advantage_bg = group_advantage(batch.reward_bg, batch.reward_mask_bg, settings.advantage_eps)
    weighted_bgt = advantage_bg[..., None]
    if settings.reweight != "none":
        if utility_z is None:
            raise ValueError(f"config.loss.reweight={settings.reweight!r} needs utility_z, one value per label")
        w_bgt = turn_weights(batch.labels_bgt, advantage_bg, utility_z, settings)
        if settings.normalize_weights:
            w_bgt = w_bgt * denominators.weight_scale
        weighted_bgt = w_bgt * weighted_bgt
    weighted_bgs = _per_token(weighted_bgt, batch.turn_id_bgs)

    ratio_bgs = bounded_exp(logp_bgs - old_bgs)
    clipped_bgs = jnp.clip(ratio_bgs, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    gain_bgs = jnp.minimum(ratio_bgs * weighted_bgs, clipped_bgs * weighted_bgs)
    if settings.dual_clip:
        gain_bgs = jnp.where(weighted_bgs < 0, jnp.maximum(gain_bgs, settings.dual_clip * weighted_bgs), gain_bgs)
    share_bg = _shares(mask_bgs, settings, denominators)
    policy_loss = -_aggregate(gain_bgs, mask_bgs, share_bg)
    loss = policy_loss

    share = denominators.share
    metrics: dict[str, Mean | Max] = {"loss/policy": Mean(policy_loss, share)}
    if settings.kl_coef:
        ref_bgs = jnp.where(mask_bgs, batch.ref_logp_bgs, 0.0)
        kl = _aggregate(k3(logp_bgs, ref_bgs, settings.kl_max), mask_bgs, share_bg)
        loss = loss + settings.kl_coef * kl
        metrics["loss/kl"] = Mean(kl, share)
    metrics["loss/total"] = Mean(loss, share)
    frozen: Any = jax.tree.map(jax.lax.stop_gradient, (ratio_bgs, weighted_bgs, logp_bgs, old_bgs))
    ratio_bgs, weighted_bgs, logp_bgs, old_bgs = frozen
    metrics |= _token_metrics(batch, mask_bgs, ratio_bgs, weighted_bgs, logp_bgs, old_bgs, settings, denominators)
    share_bgt = _turn_shares(batch, mask_bgs, share_bg)
    metrics |= _mass_metrics(batch.labels_bgt, advantage_bg[..., None], weighted_bgt, share_bgt)
    return loss, metrics


def _mass_metrics(labels_bgt, advantage_bg1, weighted_bgt, share_bgt):
    """How much reweighting changes the step, and where the push goes."""
    mass_bgt = jnp.abs(weighted_bgt) * share_bgt
    plain, weighted = jnp.sum(jnp.abs(advantage_bg1) * share_bgt), jnp.sum(mass_bgt)
    by_label_z = jnp.sum(mass_bgt[..., None] * (labels_bgt[..., None] == jnp.arange(len(LABELS))), (0, 1, 2))
    names = {f"advantage_mass/{x}": z for z, x in enumerate(LABELS) if not _EXCLUDED_Z[z]}
    return {"weight/gain": Mean(weighted, plain)} | {name: Mean(by_label_z[z], weighted) for name, z in names.items()}


def _token_metrics(batch, mask_bgs, ratio_bgs, weighted_bgs, logp_bgs, old_bgs, settings, denominators):
    """Metrics as (sum, denominator). A zero-advantage token counts as not clipped, so skipping it changes nothing."""

    def total(x_bgs):
        return jnp.sum(jnp.where(mask_bgs, x_bgs, 0.0))

    tokens = jnp.sum(mask_bgs).astype(jnp.float32)
    whole = denominators.tokens * denominators.share
    high_bgs = (weighted_bgs > 0) & (ratio_bgs > 1.0 + settings.clip_high)
    low_bgs = (weighted_bgs < 0) & (ratio_bgs < 1.0 - settings.clip_low)
    known_bgs = mask_bgs & jnp.isfinite(batch.sample_logp_bgs)
    gap_bgs = jnp.where(known_bgs, jnp.abs(old_bgs - jnp.where(known_bgs, batch.sample_logp_bgs, 0.0)), 0.0)
    metrics: dict[str, Mean | Max] = {
        "clip/high": Mean(total(high_bgs), whole),
        "clip/low": Mean(total(low_bgs), whole),
        "ratio/mean": Mean(total(ratio_bgs), tokens),
        "ratio/max": Max(jnp.max(jnp.where(mask_bgs, ratio_bgs, 0.0))),
        "old_kl": Mean(total(old_bgs - logp_bgs), tokens),
        "sampler_gap/mean": Mean(jnp.sum(gap_bgs), jnp.sum(known_bgs).astype(jnp.float32)),
        "sampler_gap/max": Max(jnp.max(gap_bgs)),
    }
    if settings.dual_clip:
        metrics["clip/dual"] = Mean(total((weighted_bgs < 0) & (ratio_bgs > settings.dual_clip)), whole)
    return metrics
