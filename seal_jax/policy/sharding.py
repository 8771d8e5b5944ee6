"""The mesh, and where each parameter and each batch lives on it.

Axes: `data` (batch only), `fsdp` (batch, and parameters along the model width), `tensor` (heads, MLP width,
vocabulary). The rule is per dimension letter, so a parameter's name says how it is sharded: `q_ldnh` -> (None, fsdp,
tensor, None).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from seal_jax.policy.config import Params, PolicyConfig, dimension_letters, param_shapes

AXES = ("data", "fsdp", "tensor")
#: Dimension letter of a parameter's name -> mesh axis (absent: not sharded).
RULES: Mapping[str, str] = {"v": "tensor", "d": "fsdp", "n": "tensor", "k": "tensor", "f": "tensor"}
BATCH_AXES = ("data", "fsdp")


def make_mesh(shape: Sequence[int] = (1, 1, 1), devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `shape` (data, fsdp, tensor) over the first devices; -1 in one place takes what is left.

    Raises ValueError if the shape needs more devices than there are.
    """
    # Of several processes, each one's devices stand together (jax numbers some TPU slices otherwise).
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id)) if devices is None else list(devices)
    shape = list(shape)
    if len(shape) != len(AXES) or any(n < 1 and n != -1 for n in shape) or shape.count(-1) > 1:
        raise ValueError(f"config.mesh={tuple(shape)} is not three positive sizes for {AXES} (one may be -1)")
    if -1 in shape:
        rest = int(np.prod([n for n in shape if n != -1]))
        if len(devices) % rest:
            raise ValueError(
                f"config.mesh={tuple(shape)}: {len(devices)} devices do not divide by {rest}; change the fixed sizes"
            )
        shape[shape.index(-1)] = len(devices) // rest
    size = int(np.prod(shape))
    if size > len(devices):
        raise ValueError(
            f"config.mesh={tuple(shape)} needs {size} devices but there are {len(devices)}; make it smaller"
        )
    return Mesh(np.asarray(devices[:size]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def param_spec(name: str) -> PartitionSpec:
    """The PartitionSpec of a parameter, from the dimension letters that end its name."""
    return PartitionSpec(*(RULES.get(letter) for letter in dimension_letters(name)))


def param_shardings(config: PolicyConfig, mesh: Mesh) -> dict[str, Any]:
    """A NamedSharding per parameter, nested as the params are.

    Raises ValueError naming parameter, size and axis when a dimension is not divisible, before anything compiles.
    """

    def walk(shapes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, shape in shapes.items():
            if isinstance(shape, Mapping):
                out[name] = walk(shape, f"{prefix}{name}/")
                continue
            for letter, size in zip(dimension_letters(name), shape, strict=True):
                axis = RULES.get(letter)
                if axis is not None and size % mesh.shape[axis]:
                    raise ValueError(
                        f"parameter {prefix}{name}: dimension {letter}={size} is not divisible by mesh axis "
                        f"{axis}={mesh.shape[axis]}; choose a {axis} size that divides {size}"
                    )
            out[name] = NamedSharding(mesh, param_spec(name))
        return out

    return walk(param_shapes(config), "")


def shard_params(config: PolicyConfig, params: Params, mesh: Mesh) -> Params:
    """Existing params (host or device) laid out on the mesh."""
    return jax.device_put(params, param_shardings(config, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Arrays whose leading axis is the batch of groups: split over data and fsdp, whole groups per device."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def put_batch(batch: Any, mesh: Mesh | None) -> Any:
    """A pytree of host arrays with a leading axis of groups, on the mesh; as it is without one. With several processes
    each gives its own shards, and all must hold the same arrays.
    """
    if mesh is None:
        return batch
    sharding = batch_sharding(mesh)
    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda x: place(x, sharding), batch)


def place(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array laid out as `sharding` says. (device_put would compare it over the processes first, each time.)"""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def to_host(value: Any) -> np.ndarray:
    """The whole of an array; collective where it is spread over processes."""
    if isinstance(value, jax.Array) and not (value.is_fully_addressable or value.is_fully_replicated):
        from jax.experimental import multihost_utils

        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value)


def check_batch(size: int, mesh: Mesh, name: str = "batch") -> None:
    """Raises ValueError if `size` groups cannot be split evenly over the mesh's data and fsdp axes."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if size % ways:
        raise ValueError(
            f"{name}={size} groups is not divisible by data*fsdp={ways} of the mesh; use a multiple of {ways} "
            "or a smaller mesh"
        )
