"""The update: a few optimiser steps over one round's batch, each accumulated over micro-batches of whole groups.

Three of the jitted functions of `programs.py` do the work: `score` (log-probs without gradient), `accumulate` (adds one
micro-batch's gradient) and `apply` (one optimiser step). Their compilations are counted.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from seal_jax.learner.batch import Batch, Buckets, group_metrics, informative, micro_batches, take
from seal_jax.learner.loss import LossSettings, denominators
from seal_jax.learner.metrics import Max, Mean, merge_metrics, metric_values
from seal_jax.learner.optimizer import OptimizerSettings, learning_rate, make_optimizer
from seal_jax.learner.programs import (
    Params,
    TokenLogp,
    committed,
    init_state,
    join,
    make_programs,
    own_buffers,
    state_shardings,
)
from seal_jax.policy import lora
from seal_jax.policy.model import token_logp
from seal_jax.policy.sharding import batch_sharding, check_batch, put


@dataclass(frozen=True)
class UpdateSettings:
    """How one round's batch becomes optimiser steps.

    minibatches: optimiser steps per pass over the batch (the paper's runs: 4); epochs: passes.
    prompts_per_micro: groups per micro-batch; the memory knob, without effect on the result.
    temperature: the sampling temperature; the log-softmax of the trainer uses the same.
    skip_zero_advantage: leave out groups whose rewards are all equal when there is no KL: they contribute exactly zero
      but are still counted in the denominators.
    """

    minibatches: int = 4
    epochs: int = 1
    prompts_per_micro: int = 1
    temperature: float = 1.0
    skip_zero_advantage: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("minibatches", "epochs", "prompts_per_micro"):
            if getattr(self, name) < 1:
                raise ValueError(f"config.learner.{name}={getattr(self, name)} must be at least 1")
        if not self.temperature > 0:
            raise ValueError(f"config.temperature={self.temperature} must be above 0: log-probs are those of sampling")


class Learner:
    """Owns the train state and, with a KL, a frozen reference policy.

    Of a policy with adapters (`policy/lora.py`) only these are trained, saved and in `state`; the rest is `base`, and
    the base is the reference.

    The parameters passed in are taken over (donated by the first step): read `learner.params` afterwards.
    `update` is the whole of the learner's part in a round. A `frozen` learner only holds parameters that are evaluated:
    it refuses to update, and spends no memory on moments (twice the parameters) or a reference (once).
    """

    def __init__(
        self,
        config: Any,
        params: Params,
        *,
        buckets: Buckets,
        loss: LossSettings | None = None,
        optimizer: OptimizerSettings | None = None,
        update: UpdateSettings | None = None,
        reference_params: Params | None = None,
        frozen: bool = False,
        mesh: Mesh | None = None,
        logp_fn: TokenLogp = token_logp,
    ) -> None:
        self.buckets, self.mesh = buckets, mesh
        self.loss = loss if loss is not None else LossSettings()
        self.optimizer = optimizer if optimizer is not None else OptimizerSettings()
        self.settings = update if update is not None else UpdateSettings()
        if mesh is not None:
            check_batch(self.settings.prompts_per_micro, mesh, "config.learner.prompts_per_micro")
        self.frozen = frozen
        self._tx = optax.identity() if frozen else make_optimizer(self.optimizer)
        base, trained = lora.split(params)
        self.base: Params = lora.as_stored(config, committed(base, mesh))
        self.state = init_state(trained, self._tx, mesh)
        shardings = state_shardings(self.state.params, self._tx, mesh)
        self._everywhere = shardings.step
        self.programs = make_programs(
            config, self.loss, self._tx, shardings, temperature=self.settings.temperature, logp_fn=logp_fn
        )
        self.reference: Params | None = None
        if self.loss.kl_coef and not frozen:
            if reference_params is not None:
                reference = jax.device_put(reference_params, jax.tree.map(lambda x: x.sharding, self.params))
            elif self.base:  # adapters of zeros add exactly nothing: the base, without a copy or a program of its own
                reference = join(self.base, self.programs.zeros(self.state.params))
            else:
                reference = self.state.params
            self.reference = own_buffers(reference, self.state.params)

    @property
    def params(self) -> Params:
        """The whole policy."""
        return join(self.base, self.state.params)

    @functools.cached_property
    def base_marks(self) -> dict[str, float]:
        """{parameter: mean of its absolute values} of the frozen layers: tells one base from another."""
        layers = self.base.get("layers", {})
        means = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.abs(x.astype(jnp.float32)).mean(), tree))(layers)
        return {name: float(mean) for name, mean in jax.device_get(means).items()}

    @property
    def compilations(self) -> dict[str, int]:
        """How often each jitted function has been compiled; bounded by the number of bucket pairs.

        Counted where jax keeps the executables: a trace can be reused where a compilation is not.
        """
        return {name: program._cache_size() for name, program in vars(self.programs).items()}

    def _put(self, micro: Batch) -> Batch:
        return put(micro, self._everywhere if self.mesh is None else batch_sharding(self.mesh))

    def score(self, params: Params, batch: Batch, prompts: np.ndarray | None = None) -> np.ndarray:
        """[B,G,S] float32 log-probs of (the groups `prompts` of) a numpy batch; 0.0 elsewhere and outside the loss."""
        logp_bgs = np.zeros(batch.suffix_ids_bgs.shape, np.float32)
        parts = micro_batches(batch, self.settings.prompts_per_micro, self.buckets, prompts)
        for part, got in [(part, self.programs.score(params, self._put(micro))) for part, micro in parts]:
            got = jax.device_get(got)[: len(part)]
            n = min(got.shape[-1], logp_bgs.shape[-1])
            logp_bgs[part, :, :n] = got[..., :n]
        return np.where(batch.loss_mask_bgs & batch.row_mask_bg[..., None], logp_bgs, np.float32(0))

    def update(self, batch: Batch, *, round: int, utility_z: np.ndarray | None = None) -> dict[str, float]:
        """Trains on one round's numpy batch and returns its metrics.

        Mini-batches are drawn by a permutation seeded with (seed, round). Groups are never split.

        Raises FloatingPointError if a loss or gradient is not finite (the train state is then as before the step) or if
        the parameters after a step are not (the train state is then lost); ValueError if there are
        fewer groups than mini-batches.
        """
        # Whatever moves between host and devices does so by device_put and device_get: anything else is a mistake that
        # would stall every step.
        with jax.transfer_guard("disallow"):
            return self._update(batch, round=round, utility_z=utility_z)

    def _update(self, batch: Batch, *, round: int, utility_z: np.ndarray | None) -> dict[str, float]:
        if self.frozen:
            raise ValueError("this learner is frozen: it was made to hold parameters for evaluation, not to train them")
        started = time.perf_counter()
        s, n_groups = self.settings, len(batch.prompt_len_b)
        if n_groups < s.minibatches:
            raise ValueError(f"config.learner.minibatches={s.minibatches} exceeds the {n_groups} groups of the batch")
        if self.loss.reweight != "none" and utility_z is None:
            raise ValueError(f"loss.reweight={self.loss.reweight!r} needs utility_z, one value per label")
        utility_z = np.asarray(0 if utility_z is None else utility_z, np.float32)

        skip = s.skip_zero_advantage and not self.loss.kl_coef
        live_b = informative(batch) if skip else np.ones(n_groups, bool)
        rng = np.random.default_rng([s.seed, round])
        steps = [
            (f"round {round}, epoch {epoch}, mini-batch {i}", prompts)
            for epoch in range(s.epochs)
            for i, prompts in enumerate(np.array_split(rng.permutation(n_groups), s.minibatches))
        ]
        # In the first step the old policy is the current one: only what later steps use has to be scored.
        later_b = np.isin(np.arange(n_groups), [b for _, prompts in steps[1:] for b in prompts])
        old_bgs = self.score(self.params, batch, np.flatnonzero(live_b & later_b))
        batch = replace(batch, old_logp_bgs=np.where(later_b[:, None, None], old_bgs, np.float32(np.nan)))
        if self.reference is not None:
            batch = replace(batch, ref_logp_bgs=self.score(self.reference, batch, np.flatnonzero(live_b)))
        scored = time.perf_counter()

        counts: Counter[str] = Counter()
        parts = [self._step(batch, prompts, live_b, utility_z, where, counts) for where, prompts in steps]
        metrics = metric_values(merge_metrics(parts))

        step = int(jax.device_get(self.state.step))
        done = time.perf_counter()
        tokens = int((batch.loss_mask_bgs & batch.row_mask_bg[..., None]).sum())
        return {
            **metrics,
            **group_metrics(batch),
            "groups/skipped": float((~live_b).sum()),
            "minibatches/empty": float(counts["empty"]),
            "optimizer/learning_rate": float(learning_rate(self.optimizer, step - 1)),
            "optimizer/step": float(step),
            "tokens/loss": float(tokens),
            "tokens/trained": float(counts["tokens"]),
            "tokens/padded": float(counts["padded"]),
            "seconds/score": scored - started,
            "seconds/update": done - scored,
            "compilations": float(sum(self.compilations.values())),
        }

    def _step(
        self, batch: Batch, prompts: np.ndarray, live_b: np.ndarray, utility_z: np.ndarray, where: str, counts: Counter
    ) -> dict[str, Mean | Max]:
        """One optimiser step on the groups `prompts`."""
        mini = take(batch, prompts, self.buckets)
        micros = micro_batches(mini, self.settings.prompts_per_micro, self.buckets, np.flatnonzero(live_b[prompts]))
        whole = denominators(mini, 1.0 / max(len(micros), 1))
        counts["empty"] += int(whole.tokens == 0)
        placed = [self._put(micro) for _, micro in micros]
        whole, utility_z = put((whole, utility_z), self._everywhere)
        if self.loss.normalize_weights and self.loss.reweight != "none":
            mass = np.zeros(2) + sum(jax.device_get([self.programs.mass(m, whole, utility_z) for m in placed]))
            scale = np.float32(mass[1] / mass[0] if mass[0] > 0 else 1.0)
            whole = replace(whole, weight_scale=put(scale, self._everywhere))
        gradients, parts = self.programs.zeros(self.state.params), []
        for (_, micro), there in zip(micros, placed, strict=True):
            gradients, metrics = self.programs.accumulate(
                gradients, self.state.params, self.base, there, whole, utility_z
            )
            parts.append(metrics)
            live_bg = micro.row_mask_bg
            counts["tokens"] += int(micro.suffix_len_bg[live_bg].sum() + micro.prompt_len_b[live_bg.any(1)].sum())
            counts["padded"] += micro.suffix_ids_bgs.size + micro.prompt_ids_bp.size
        merged = merge_metrics(jax.device_get(parts))
        norm = float(jax.device_get(self.programs.norm(gradients)))
        # Looked at before the step, so the state stays good; stepping over it silently would hide a bug.
        for name, value in (("loss", merged["loss/total"].value() if merged else 0.0), ("gradient norm", norm)):
            if not np.isfinite(value):
                raise FloatingPointError(
                    f"{where}: the {name} is {value}; the step was not taken. Lower the learning rate or resume from an"
                    " earlier checkpoint"
                )
        self.state, sizes = self.programs.apply(self.state, gradients)
        sizes = jax.device_get(sizes)
        if not np.isfinite(sizes["norm/params"]):
            raise FloatingPointError(
                f"{where}: the parameters after the step are not finite (norm {sizes['norm/params']}); lower "
                "config.optimizer.learning_rate and resume from the last checkpoint"
            )
        one = np.float64(1.0)
        merged["norm/gradient"] = Mean(np.float64(norm), one)
        merged |= {name: Mean(np.float64(value), one) for name, value in sizes.items()}
        return merged
