"""Supervised warm start: clones demonstrations into a policy that starts from random weights.

A demonstration is a `Trajectory` whose assistant tokens are segments of source "sampled" (log-probs 0.0), so it goes
through the same arrays as a rollout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from seal_jax.learner.batch import Batch, Buckets, make_batch, take
from seal_jax.learner.metrics import Mean, merge_metrics, metric_values
from seal_jax.learner.optimizer import OptimizerSettings, make_optimizer
from seal_jax.learner.programs import Params, TokenLogp, TrainState, init_state, state_shardings
from seal_jax.policy.model import token_logp
from seal_jax.policy.sharding import batch_sharding, check_batch, on_mesh, put
from seal_jax.types import Trajectory

#: progress(step, total steps, {"loss", "nll"}: means over the steps since the last call)
Progress = Callable[[int, int, dict[str, float]], None]


@dataclass(frozen=True)
class SftSettings:
    """Warm-start training; the defaults suit a policy of about a million parameters.

    rows_per_step: demonstrations per optimiser step; group: demonstrations that share one prompt's computation
      (demonstrations are grouped by equal prompts; leave it at 1 when every prompt occurs once).
    other_weight: weight of the suffix tokens that are not the assistant's (headers, user turns, observations).
    pool: batches of like length are cut from shuffled pools of this many batches, which avoids padding without
      training on the lengths in order.
    """

    epochs: int = 6
    rows_per_step: int = 16
    group: int = 1
    learning_rate: float = 2e-3
    b2: float = 0.99
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    warmup_steps: int = 20
    other_weight: float = 0.1
    pool: int = 16
    log_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "rows_per_step", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"config.warm_start.{name}={getattr(self, name)} must be at least 1")
        if self.rows_per_step % self.group:
            raise ValueError(
                f"config.warm_start.rows_per_step={self.rows_per_step} is not a multiple of "
                f"config.warm_start.group={self.group}"
            )
        if self.other_weight < 0:
            raise ValueError(f"config.warm_start.other_weight={self.other_weight} must not be negative")


def group_demonstrations(demos: Sequence[Trajectory], group: int) -> list[list[Trajectory]]:
    """Groups of at most `group` demonstrations with equal prompts, in order of first appearance."""
    by_prompt: dict[tuple[int, ...], list[Trajectory]] = {}
    for demo in demos:
        by_prompt.setdefault(demo.prompt_ids, []).append(demo)
    return [rows[i : i + group] for rows in by_prompt.values() for i in range(0, len(rows), group)]


def sft_loss(logp_bgs: jax.Array, batch: Batch, other_weight: float) -> tuple[jax.Array, dict[str, Mean]]:
    """Weighted mean negative log-likelihood: weight 1 on assistant tokens, `other_weight` on other suffix tokens.

    The first suffix token is never predicted (its log-prob is 0.0 by contract) and has no weight.
    """
    at_s = jnp.arange(logp_bgs.shape[-1])
    valid_bgs = (at_s > 0) & (at_s < batch.suffix_len_bg[..., None]) & batch.row_mask_bg[..., None]
    mine_bgs, other_bgs = valid_bgs & batch.loss_mask_bgs, valid_bgs & ~batch.loss_mask_bgs
    nll_bgs = -jnp.where(valid_bgs, logp_bgs.astype(jnp.float32), 0.0)
    weight_bgs = jnp.where(mine_bgs, 1.0, jnp.where(other_bgs, other_weight, 0.0))
    total, count = jnp.sum(weight_bgs * nll_bgs), jnp.sum(weight_bgs)
    metrics = {
        "loss": Mean(total, count),
        "nll": Mean(jnp.sum(jnp.where(mine_bgs, nll_bgs, 0.0)), jnp.sum(mine_bgs).astype(jnp.float32)),
    }
    return total / jnp.maximum(count, 1e-6), metrics


def epoch_batches(longest_b: np.ndarray, per_step: int, pool: int, rng: np.random.Generator) -> list[np.ndarray]:
    """One epoch's batches of group indices: every group once, like lengths together, in shuffled order."""
    order = rng.permutation(len(longest_b))
    batches = []
    for i in range(0, len(order), per_step * pool):
        part = order[i : i + per_step * pool]
        part = part[np.argsort(longest_b[part], kind="stable")]
        batches += [part[j : j + per_step] for j in range(0, len(part), per_step)]
    return [batches[i] for i in rng.permutation(len(batches))]


def sft_train(
    config: Any,
    params: Params,
    demos: Sequence[Trajectory],
    settings: SftSettings | None = None,
    *,
    buckets: Buckets,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
    logp_fn: TokenLogp = token_logp,
) -> tuple[Params, dict[str, float]]:
    """Trains `params` (taken over: donated) on the demonstrations; returns the new params and closing metrics.

    Metrics: loss and nll of the last `log_every` steps, steps, seconds, seconds_compiling, tokens (real prompt + suffix
    tokens passed through the model), tokens_per_s (all of the time) and tokens_per_s_warm (compilation excluded),
    padding (share of padded positions), compilations.

    Raises ValueError without demonstrations, FloatingPointError naming the step if the loss is not finite.
    """
    s = settings if settings is not None else SftSettings()
    if not demos:
        raise ValueError("sft: no demonstrations; the warm start needs at least one")
    whole = make_batch(group_demonstrations(demos, s.group), buckets=buckets)
    G = whole.suffix_len_bg.shape[1]
    per_step = s.rows_per_step // s.group
    if mesh is not None:
        check_batch(per_step, mesh, "config.warm_start.rows_per_step / group")
    longest_b = whole.suffix_len_bg.max(1) * G + whole.prompt_len_b
    rng = np.random.default_rng([s.seed, 0x5F7])
    plan = [b for _ in range(s.epochs) for b in epoch_batches(longest_b, per_step, s.pool, rng)]

    warmup = min(s.warmup_steps, len(plan) - 1)
    tx = make_optimizer(
        OptimizerSettings(
            learning_rate=s.learning_rate,
            b2=s.b2,
            weight_decay=s.weight_decay,
            clip_norm=s.clip_norm,
            schedule="cosine",
            warmup_steps=warmup,
            total_steps=len(plan),
        )
    )
    state = init_state(params, tx, mesh)
    step: Any = jax.jit(
        partial(_step, tx, on_mesh(mesh, partial(logp_fn, config)), s.other_weight),
        donate_argnums=0,
        out_shardings=(state_shardings(state.params, tx, mesh), None),
    )

    started = time.perf_counter()
    compiling, tokens, padded, recent, closing = 0.0, 0, 0, [], {}
    for i, prompts in enumerate(plan):
        micro = take(whole, prompts, buckets, per_step)
        before, at = step._cache_size(), time.perf_counter()
        state, metrics = step(state, micro if mesh is None else put(micro, batch_sharding(mesh)))
        if step._cache_size() > before:
            jax.block_until_ready(metrics)
            compiling += time.perf_counter() - at
        recent.append(metrics)
        tokens += int(micro.suffix_len_bg[micro.row_mask_bg].sum() + micro.prompt_len_b[micro.row_mask_bg.any(1)].sum())
        padded += micro.suffix_ids_bgs.size + micro.prompt_ids_bp.size
        if (i + 1) % s.log_every == 0 or i + 1 == len(plan):
            closing = metric_values(merge_metrics(jax.device_get(recent)))
            recent = []
            if not np.isfinite(closing["loss"]):
                raise FloatingPointError(
                    f"sft step {i + 1}: the loss is {closing['loss']}; lower config.warm_start.learning_rate"
                )
            if progress is not None:
                progress(i + 1, len(plan), closing)
    seconds = time.perf_counter() - started
    return state.params, {
        **closing,
        "steps": float(len(plan)),
        "seconds": seconds,
        "seconds_compiling": compiling,
        "tokens": float(tokens),
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_warm": tokens / max(seconds - compiling, 1e-9),
        "padding": 1.0 - tokens / padded,
        "compilations": float(step._cache_size()),
    }


def _step(tx, logp, other_weight, state, m):
    def loss(params):
        logp_bgs = logp(params, m.prompt_ids_bp, m.prompt_len_b, m.suffix_ids_bgs, m.suffix_len_bg)
        return sft_loss(logp_bgs, m, other_weight)

    (_, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, opt_state = tx.update(gradients, state.opt_state, state.params)
    return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics
