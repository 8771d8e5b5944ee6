"""What a round's update runs on the devices: the train state, and the jitted functions that read and change it.

They are made from settings and shardings alone, so they can also be lowered for devices that are not there (see
`seal_jax.planner`); each compiles once per bucket pair, and no setting, learning rate or utility recompiles one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from seal_jax.learner.batch import Batch
from seal_jax.learner.loss import LossSettings, seal_loss, weight_mass
from seal_jax.policy.model import token_logp
from seal_jax.policy.sharding import on_mesh

#: (config, params, prompt_ids_bp, prompt_len_b, suffix_ids_bgs, suffix_len_bg, temperature=, keep_bgs=) -> logp_bgs
TokenLogp = Callable[..., jax.Array]
Params = Any


@struct.dataclass
class TrainState:
    """Everything an optimiser step changes. Donated to each step: never keep an alias of its arrays."""

    params: Params  # float32 masters of what is trained
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
    params = own_buffers(committed(params, mesh))
    shardings = state_shardings(params, optimizer, mesh)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    return TrainState(params, opt_state, jax.device_put(np.int32(0), shardings.step))


def committed(params: Params, mesh: Mesh | None = None) -> Params:
    """`params` (no copies) bound to the devices they are on: uncommitted arguments would compile every function twice.

    Raises ValueError if they are elsewhere than on the mesh.
    """
    params = jax.tree.map(jnp.asarray, params)
    if mesh is not None and any(x.sharding.device_set != set(mesh.devices.flat) for x in jax.tree.leaves(params)):
        raise ValueError("params do not live on the mesh; lay them out with policy.sharding.shard_params first")
    return jax.device_put(params, jax.tree.map(lambda x: x.sharding, params))


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


@dataclass(frozen=True)
class Programs:
    """The jitted functions of an update. `trained` is what the optimiser changes, `base` what it does not ({} where
    everything is trained); a policy's parameters are both, joined.
    """

    score: Any  # (params, micro) -> log-probs [B,G,S] without a gradient
    zeros: Any  # (trained) -> a gradient of zeros
    mass: Any  # (micro, whole, utility_z) -> [2]: weighted and plain advantage mass
    accumulate: Any  # (gradient, trained, base, micro, whole, utility_z) -> gradient + this micro-batch's, metrics
    norm: Any  # (gradient) -> its L2 norm
    apply: Any  # (state, gradient) -> state after one optimiser step, norms


def make_programs(
    config: Any,
    loss: LossSettings,
    optimizer: optax.GradientTransformation,
    shardings: TrainState,
    *,
    temperature: float,
    logp_fn: TokenLogp = token_logp,
) -> Programs:
    """The functions of an update for train states laid out as `shardings`. Gradients and states are donated."""
    mesh = getattr(shardings.step, "mesh", None)  # a single device has none
    logp = on_mesh(mesh, partial(_logp, logp_fn, config, temperature))
    # What the host reads: where the devices of several processes take part, each process needs it whole.
    read = None if shardings.step.is_fully_addressable else shardings.step
    return Programs(
        score=jax.jit(logp, out_shardings=read),
        zeros=jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=shardings.params),
        mass=jax.jit(partial(_mass, loss), out_shardings=read),
        accumulate=jax.jit(partial(_accumulate, logp, loss), donate_argnums=0, out_shardings=(shardings.params, read)),
        # A function of our own: jit shares the cache of equal functions.
        norm=jax.jit(partial(global_norm), out_shardings=read),
        apply=jax.jit(partial(_apply, optimizer), donate_argnums=0, out_shardings=(shardings, read)),
    )


def join(base: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested dicts without a common leaf as one; no array is copied."""
    out = dict(base)
    for name, value in trained.items():
        out[name] = join(out[name], value) if name in out else value
    return out


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


def _accumulate(logp, settings, gradients, trained, base, micro, whole, utility_z):
    """gradients + the gradient of this micro-batch's part of the mini-batch's loss, and the metrics."""

    def loss(trained):
        return seal_loss(logp(join(base, trained), micro), micro, settings, whole, utility_z)

    (_, metrics), new = jax.value_and_grad(loss, has_aux=True)(trained)
    return jax.tree.map(jnp.add, gradients, new), metrics


def _mass(settings, micro, whole, utility_z):
    return jnp.stack(weight_mass(micro, settings, whole, utility_z))


def _apply(tx, state, gradients):
    updates, opt_state = tx.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norms = {"norm/update": global_norm(updates), "norm/params": global_norm(params)}
    return TrainState(params, opt_state, state.step + 1), norms
