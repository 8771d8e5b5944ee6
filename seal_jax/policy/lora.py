"""Low-rank adapters (LoRA; Hu et al. 2021, arXiv 2106.09685) on every projection of the blocks.

Beside a projection W stand A (`<projection>_lora_in_...`, inputs to rank a) and B (`<projection>_lora_out_...`, a to
outputs); the projection's result is x W + alpha/rank (x A) B. B starts at zero, so a fresh policy is the base. Only
adapters are trained: the base needs no float32 masters, no gradient and no moments, and its matrices are kept in the
compute dtype (each product rounds them to it anyway). An export has A B merged into W, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from seal_jax.policy.config import ADAPTERS, Params, PolicyConfig, dimension_letters, is_adapter, param_shape
from seal_jax.policy.sharding import param_shardings


def lora_scale(config: PolicyConfig) -> float:
    return config.lora_alpha / config.lora_rank


def initial_adapter(name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """float32: A normal with 1/sqrt(fan-in), B zero."""
    if "_lora_out_" in name:
        return jnp.zeros(shape, jnp.float32)
    return math.prod(shape[1:-1]) ** -0.5 * jax.random.normal(key, shape, jnp.float32)


def fresh_adapters(config: PolicyConfig, seed: int, shardings: Mapping[str, Any] | None = None) -> Params:
    """{name: array} of all adapters at their start, born in `shardings` (by name; others are ignored)."""
    names = [name for pair in ADAPTERS.values() for name in pair]

    def make() -> Params:
        keys = jax.random.split(jax.random.key(seed), len(names))
        return {n: initial_adapter(n, param_shape(config, n), k) for n, k in zip(names, keys, strict=True)}

    return jax.jit(make, out_shardings=None if shardings is None else {n: shardings[n] for n in names})()


def add_adapters(
    config: PolicyConfig, params: Params, *, rank: int, alpha: float, seed: int, mesh: Mesh | None = None
) -> tuple[PolicyConfig, Params]:
    """A policy without adapters with fresh ones; its own arrays are not copied."""
    config = replace(config, lora_rank=rank, lora_alpha=alpha)
    shardings = None if mesh is None else param_shardings(config, mesh)["layers"]
    return config, {**params, "layers": {**params["layers"], **fresh_adapters(config, seed, shardings)}}


def split(params: Mapping[str, Any]) -> tuple[Params, Params]:
    """(base, trained), both nested as `params`: the adapters are trained; without any, everything is. No copies."""
    layers = params.get("layers", {})
    adapters = {name: x for name, x in layers.items() if is_adapter(name)}
    if not adapters:
        return {}, dict(params)
    return {**params, "layers": {n: x for n, x in layers.items() if n not in adapters}}, {"layers": adapters}


def stored_dtype(config: PolicyConfig, name: str) -> str:
    """The dtype in which a parameter is kept: float32, but the compute dtype for the matrices of a frozen base."""
    frozen = config.lora_rank and not is_adapter(name) and "_norm_" not in name and "_bias_" not in name
    return config.compute_dtype if frozen else "float32"


def as_stored(config: PolicyConfig, params: Params) -> Params:
    """`params` in the dtypes of `stored_dtype`, where they were; arrays that have theirs are not copied."""

    def cast(path: tuple, x: jax.Array) -> jax.Array:
        dtype = jnp.dtype(stored_dtype(config, path[-1].key))
        return x if x.dtype == dtype else jax.device_put(x.astype(dtype), x.sharding)

    return jax.tree_util.tree_map_with_path(cast, params)


def merged(config: PolicyConfig, layers: Mapping[str, Any], name: str) -> Any:
    """A layer parameter with its adapter in it, W + alpha/rank A B in float32; as it is where it has no adapter."""
    if not config.lora_rank or name not in ADAPTERS:
        return layers[name]
    first, second = ADAPTERS[name]
    spec = f"{dimension_letters(first)},{dimension_letters(second)}->{dimension_letters(name)}"
    product = jnp.einsum(spec, layers[first], layers[second], precision=jax.lax.Precision.HIGHEST)
    return jnp.asarray(layers[name], jnp.float32) + lora_scale(config) * product


def merge(config: PolicyConfig, params: Params) -> tuple[PolicyConfig, Params]:
    """The same policy without adapters: every projection has its adapter in it."""
    layers = params["layers"]
    whole = {name: merged(config, layers, name) for name in layers if not is_adapter(name)}
    return replace(config, lora_rank=0), {**params, "layers": whole}
