"""Between the tensors of a checkpoint file and our stacked parameters.

Checkpoint files (safetensors and GGUF alike) hold one matrix per layer and projection in torch's layout, [out, in]; our
params hold one array per projection, stacked over layers, input dimensions first. Everything that knows both layouts is
here, so a file format only has to name tensors and hand over arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seal_jax.policy.config import Params, PolicyConfig, dimension_letters, is_adapter, param_shape, param_shapes
from seal_jax.policy.lora import fresh_adapters, stored_dtype

#: How many leading dimensions (after the layer) are inputs, for the parameters that are matrices.
_INPUTS = {"q_ldnh": 1, "k_ldkh": 1, "v_ldkh": 1, "o_lnhd": 2, "gate_ldf": 1, "up_ldf": 1, "down_lfd": 1, "head_dv": 1}

#: A pytree of shardings nested as the params are, or how to make it once the config is known.
Shardings = Mapping[str, Any] | Callable[[PolicyConfig], Mapping[str, Any]] | None


def entries(config: PolicyConfig) -> Iterator[tuple[str, int | None]]:
    """Every (parameter, layer) that a checkpoint stores as a tensor; layer is None outside the blocks. No adapters."""
    shapes = param_shapes(config)
    for name in shapes:
        if name != "layers":
            yield name, None
    for layer in range(config.n_layers):
        for name in shapes["layers"]:
            if not is_adapter(name):
                yield name, layer


def file_shape(config: PolicyConfig, param: str, vocab_rows: int) -> tuple[int, ...]:
    """Shape in the file of one layer's tensor. `vocab_rows` is the file's vocabulary, which may differ from ours."""
    dims = {**config.dims, "v": vocab_rows}
    shape = [dims[letter] for letter in dimension_letters(param) if letter != "l"]
    if param in _INPUTS:
        n = _INPUTS[param]
        return math.prod(shape[n:]), math.prod(shape[:n])
    return tuple(shape) if param == "embed_vd" else (math.prod(shape),)


def to_file(param: str, array: np.ndarray) -> np.ndarray:
    """One layer of a parameter in the file's layout (a view where possible)."""
    if param in _INPUTS:
        n = _INPUTS[param]
        return array.reshape(math.prod(array.shape[:n]), -1).T
    return array if param == "embed_vd" else array.reshape(-1)


def assemble(
    config: PolicyConfig, read: Callable[[str, int | None], np.ndarray], shardings: Shardings = None, seed: int = 0
) -> Params:
    """Build params one at a time: at any moment the host holds one stacked parameter and one file tensor. They are
    float32; where the config asks for adapters, these are fresh and the rest is kept as `lora.stored_dtype` says.

    Args:
      read: (parameter, layer) -> array in the file's layout and in any float type. Vocabulary rows beyond ours are
        dropped; rows that the file lacks are zero (both are padding, masked before every softmax).
      shardings: where each parameter goes; None is the default device.
      seed: of the adapters.

    Raises:
      ValueError: a tensor holds NaN or infinity.
    """
    where = shardings(config) if callable(shardings) else shardings

    def build(name: str, place: Any) -> jax.Array:
        host = np.zeros(param_shape(config, name), np.float32)
        stacked = dimension_letters(name).startswith("l")
        for layer in range(config.n_layers) if stacked else (None,):
            found = read(name, layer)
            target = host if layer is None else host[layer]
            if "v" in dimension_letters(name):
                rows = min(len(found), config.padded_vocab)
                found, target = found[:rows], target[..., :rows] if name == "head_dv" else target[:rows]
            target[...] = (found.T if name in _INPUTS else found).reshape(target.shape)
            if not np.isfinite(target.sum()):
                at = name if layer is None else f"{name} of layer {layer}"
                raise ValueError(f"checkpoint: {at} holds NaN or infinity; the file is damaged, download it again")
        host = host.astype(jnp.dtype(stored_dtype(config, name)), copy=False)
        if place is None:
            return jax.device_put(host)
        return jax.make_array_from_callback(host.shape, place, lambda index: host[index])

    layer_places = None if where is None else where["layers"]
    params: Params = {}
    for name, shape in param_shapes(config).items():
        if isinstance(shape, Mapping):
            stored = [n for n in shape if not is_adapter(n)]
            params[name] = {n: build(n, None if layer_places is None else layer_places[n]) for n in stored}
            if config.lora_rank:
                params[name] |= fresh_adapters(config, seed, layer_places)
        else:
            params[name] = build(name, None if where is None else where[name])
    return params


def check_params(config: PolicyConfig, params: Params) -> None:
    """Raises ValueError naming the first parameter that is missing, unknown or of a wrong shape."""
    shapes = param_shapes(config)

    def walk(want: Mapping[str, Any], have: Mapping[str, Any], prefix: str) -> None:
        for name in [*want, *have]:
            if name not in have or name not in want:
                state = "missing from" if name not in have else "unknown in"
                raise ValueError(f"parameter {prefix}{name} is {state} the params of this {config.family} config")
            if isinstance(want[name], Mapping):
                walk(want[name], have[name], f"{prefix}{name}/")
            elif tuple(have[name].shape) != want[name]:
                raise ValueError(f"parameter {prefix}{name} has shape {tuple(have[name].shape)}; expected {want[name]}")

    walk(shapes, params, "")
