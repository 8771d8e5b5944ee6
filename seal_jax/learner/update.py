"""The update: a few optimiser steps over one round's batch, each accumulated over micro-batches of whole groups.

Three jitted functions do the work: `score` (log-probs without gradient), `accumulate` (adds one micro-batch's
gradient; the sum is donated) and `apply` (one optimiser step; the train state is donated). They are compiled once per
bucket pair and counted; settings, learning rate and utility never recompile them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from seal_jax.learner.batch import Batch, Buckets, group_metrics, informative, micro_batches, take
from seal_jax.learner.loss import LossSettings, denominators, seal_loss, weight_mass
from seal_jax.learner.metrics import Max, Mean, merge_metrics, metric_values
from seal_jax.learner.optimizer import OptimizerSettings, learning_rate, make_optimizer
from seal_jax.policy.model import token_logp
from seal_jax.policy.sharding import batch_sharding, check_batch

#: (config, params, prompt_ids_bp, prompt_len_b, suffix_ids_bgs, suffix_len_bg, temperature=, keep_bgs=) -> logp_bgs
TokenLogp = Callable[..., jax.Array]
Params = Any


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


@struct.dataclass
class TrainState:
    """Everything an optimiser step changes. Donated to each step: never keep an alias of its arrays."""

    params: Params  # float32 masters
    opt_state: Any
    step: Any  # int32 scalar, optimiser steps taken


def own_buffers(tree: Any, *others: Any) -> Any:
    """`tree` with every leaf that shares its buffer with another leaf, or with a leaf of `others`, copied.

    Donating a buffer that is also a reference policy's deletes the reference; donating one twice is an error.
    """
    taken = {_buffer(leaf) for other in others for leaf in jax.tree.leaves(other)}

    def own(leaf: Any) -> Any:
        if _buffer(leaf) in taken:
            leaf = jax.device_put(jnp.array(leaf, copy=True), leaf.sharding)
        taken.add(_buffer(leaf))
        return leaf

    return jax.tree.map(own, tree)


def _buffer(leaf: jax.Array) -> int:
    """The address of the leaf's first local shard: two array objects may stand for one buffer."""
    return leaf.addressable_shards[0].data.unsafe_buffer_pointer()


def global_norm(tree: Any) -> jax.Array:
    """The float32 L2 norm of all leaves together."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def check_masters(params: Params) -> None:
    """Raises ValueError for the first parameter that is not float32: steps of 1e-6 vanish in shorter types."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype != jnp.float32:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"parameter {name} is {leaf.dtype}; masters must be float32 (compute_dtype need not be)")


def init_state(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh | None = None) -> TrainState:
    """A train state around `params` (taken over, not copied); the optimiser's moments are born sharded like them."""
    check_masters(params)
    params = jax.tree.map(jnp.asarray, params)
    if mesh is not None and any(x.sharding.device_set != set(mesh.devices.flat) for x in jax.tree.leaves(params)):
        raise ValueError("params do not live on the mesh; lay them out with policy.sharding.shard_params first")
    shardings = state_shardings(params, optimizer, mesh)
    # Committed to their devices from the start: uncommitted first arguments would compile every function twice.
    params = own_buffers(jax.device_put(params, shardings.params))
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    return TrainState(params, opt_state, jax.device_put(np.int32(0), shardings.step))


def state_shardings(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh | None) -> TrainState:
    """The sharding of every leaf of the train state: params keep theirs, moments follow, counters are replicated."""
    everywhere: Any = NamedSharding(mesh, PartitionSpec()) if mesh is not None else None
    if everywhere is None:
        everywhere = SingleDeviceSharding(next(iter(jax.tree.leaves(params)[0].devices())))
    of_params = jax.tree.map(lambda x: x.sharding, params)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        of_params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(of_params, opt_state, everywhere)


class Learner:
    """Owns the train state and, with a KL, a frozen reference policy.

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
        self.state = init_state(params, self._tx, mesh)
        shardings = state_shardings(self.state.params, self._tx, mesh)
        of_params = shardings.params
        self.reference: Params | None = None
        if self.loss.kl_coef and not frozen:
            source = self.state.params if reference_params is None else reference_params
            self.reference = own_buffers(jax.device_put(source, of_params), self.state.params)

        logp = partial(_logp, logp_fn, config, self.settings.temperature)
        self._score = jax.jit(logp)
        self._zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=of_params)
        self._accumulate = jax.jit(
            partial(_accumulate, logp, self.loss), donate_argnums=0, out_shardings=(of_params, None)
        )
        self._mass = jax.jit(partial(_mass, self.loss))
        self._norm = jax.jit(partial(global_norm))  # a function of our own: jit shares the cache of equal functions
        self._apply = jax.jit(partial(_apply, self._tx), donate_argnums=0, out_shardings=(shardings, None))

    @property
    def params(self) -> Params:
        return self.state.params

    @property
    def compilations(self) -> dict[str, int]:
        """How often each jitted function has been compiled; bounded by the number of bucket pairs.

        Counted where jax keeps the executables: a trace can be reused where a compilation is not.
        """
        names = ("score", "zeros", "weight_mass", "accumulate", "norm", "apply")
        functions: Any = (self._score, self._zeros, self._mass, self._accumulate, self._norm, self._apply)
        return {name: function._cache_size() for name, function in zip(names, functions, strict=True)}

    def _put(self, micro: Batch) -> Batch:
        return micro if self.mesh is None else jax.device_put(micro, batch_sharding(self.mesh))

    def score(self, params: Params, batch: Batch, prompts: np.ndarray | None = None) -> np.ndarray:
        """[B,G,S] float32 log-probs of (the groups `prompts` of) a numpy batch; 0.0 elsewhere and outside the loss."""
        logp_bgs = np.zeros(batch.suffix_ids_bgs.shape, np.float32)
        parts = micro_batches(batch, self.settings.prompts_per_micro, self.buckets, prompts)
        for part, got in [(part, self._score(params, self._put(micro))) for part, micro in parts]:
            got = np.asarray(got)[: len(part)]
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

        done = time.perf_counter()
        tokens = int((batch.loss_mask_bgs & batch.row_mask_bg[..., None]).sum())
        return {
            **metrics,
            **group_metrics(batch),
            "groups/skipped": float((~live_b).sum()),
            "minibatches/empty": float(counts["empty"]),
            "optimizer/learning_rate": float(learning_rate(self.optimizer, int(self.state.step) - 1)),
            "optimizer/step": float(self.state.step),
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
        if self.loss.normalize_weights and self.loss.reweight != "none":
            mass = np.zeros(2) + sum(np.asarray(self._mass(m, whole, utility_z)) for m in placed)
            whole = replace(whole, weight_scale=np.float32(mass[1] / mass[0] if mass[0] > 0 else 1.0))
        gradients, parts = self._zeros(self.state.params), []
        for (_, micro), there in zip(micros, placed, strict=True):
            gradients, metrics = self._accumulate(gradients, self.state.params, there, whole, utility_z)
            parts.append(metrics)
            live_bg = micro.row_mask_bg
            counts["tokens"] += int(micro.suffix_len_bg[live_bg].sum() + micro.prompt_len_b[live_bg.any(1)].sum())
            counts["padded"] += micro.suffix_ids_bgs.size + micro.prompt_ids_bp.size
        merged = merge_metrics(jax.device_get(parts))
        norm = float(self._norm(gradients))
        # Looked at before the step, so the state stays good; stepping over it silently would hide a bug.
        for name, value in (("loss", merged["loss/total"].value() if merged else 0.0), ("gradient norm", norm)):
            if not np.isfinite(value):
                raise FloatingPointError(
                    f"{where}: the {name} is {value}; the step was not taken. Lower the learning rate or resume from an"
                    " earlier checkpoint"
                )
        self.state, sizes = self._apply(self.state, gradients)
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


def _logp(logp_fn: TokenLogp, config: Any, temperature: float, params: Params, m: Batch) -> jax.Array:
    return logp_fn(
        config,
        params,
        m.prompt_ids_bp,
        m.prompt_len_b,
        m.suffix_ids_bgs,
        m.suffix_len_bg,
        temperature=temperature,
        keep_bgs=m.loss_mask_bgs & m.row_mask_bg[..., None],
    )


def _accumulate(logp, settings, gradients, params, micro, whole, utility_z):
    """gradients + the gradient of this micro-batch's part of the mini-batch's loss, and the metrics."""

    def loss(params):
        return seal_loss(logp(params, micro), micro, settings, whole, utility_z)

    (_, metrics), new = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(jnp.add, gradients, new), metrics


def _mass(settings, micro, whole, utility_z):
    return jnp.stack(weight_mass(micro, settings, whole, utility_z))


def _apply(tx, state, gradients):
    updates, opt_state = tx.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {"norm/update": global_norm(updates), "norm/params": global_norm(params)}
    return TrainState(params, opt_state, state.step + 1), norms
