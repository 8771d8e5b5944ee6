"""The mesh, and where each parameter and each batch lives on it.

Axes: `data` (batch only), `fsdp` (batch, and parameters along the model width), `tensor` (heads, MLP width,
vocabulary). The rule is per dimension letter, so a parameter's name says how it is sharded: `q_ldnh` -> (None, fsdp,
tensor, None).

Inside a program that was made by `on_mesh`, `constrain` and `gather_layer` say where activations and a layer's weights
live while it is computed: each device holds its own groups, and of the weights the layer at hand. Left to itself, the
compiler rather splits the model width, and then every device computes the tokens of all. Embedding and head are never
whole anywhere, and neither are logits: there the tokens travel (see `Decoder.embed` and `Decoder.head`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from seal_jax.policy.config import Params, PolicyConfig, dimension_letters, param_shapes

AXES = ("data", "fsdp", "tensor")
#: Axes over which the groups of a batch are split.
BATCH_AXES = ("data", "fsdp")
#: Axes over which logits are split along the vocabulary.
VOCAB_AXES = ("tensor", "fsdp")
#: Dimension letter of a parameter's name -> mesh axis (absent: not sharded).
RULES: Mapping[str, str] = {"v": "tensor", "d": "fsdp", "n": "tensor", "k": "tensor", "f": "tensor"}


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


def param_spec(name: str, whole: Sequence[str] = ()) -> PartitionSpec:
    """The PartitionSpec of a parameter, from the dimension letters of its name; those in `whole` are not split."""
    return PartitionSpec(*(None if letter in whole else RULES.get(letter) for letter in dimension_letters(name)))


def whole_letters(config: PolicyConfig, mesh: Any) -> tuple[str, ...]:
    """Dimension letters that this mesh does not split although there is a rule: the key/value heads, where they are
    fewer than tensor. Each device then holds all of them, and still only its part of the query heads."""
    return ("k",) if config.n_kv_heads < mesh.shape["tensor"] else ()


def param_shardings(config: PolicyConfig, mesh: Mesh) -> dict[str, Any]:
    """A NamedSharding per parameter, nested as the params are.

    Raises ValueError naming parameter, size and axis when a dimension is not divisible, before anything compiles.
    """
    whole = whole_letters(config, mesh)
    if whole and mesh.shape["tensor"] % config.n_kv_heads:
        raise ValueError(
            f"the policy's {config.n_kv_heads} key/value heads do not divide config.mesh.tensor="
            f"{mesh.shape['tensor']}, and it does not divide them; use a multiple or a divisor of {config.n_kv_heads}"
        )

    def walk(shapes: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, shape in shapes.items():
            if isinstance(shape, Mapping):
                out[name] = walk(shape, f"{prefix}{name}/")
                continue
            spec = param_spec(name, whole)
            for letter, size, axis in zip(dimension_letters(name), shape, spec, strict=True):
                if axis is not None and size % mesh.shape[axis]:
                    more = ", or set config.policy.overrides.padded_vocab" if letter == "v" else ""
                    raise ValueError(
                        f"parameter {prefix}{name}: dimension {letter}={size} is not divisible by mesh axis "
                        f"{axis}={mesh.shape[axis]}; choose a {axis} size that divides {size}{more}"
                    )
            out[name] = NamedSharding(mesh, spec)
        return out

    return walk(param_shapes(config), "")


def vocab_parts(mesh: Mesh | None) -> int:
    """Into how many equal parts a vocabulary has to split: parameters over tensor, logits over fsdp as well."""
    return 1 if mesh is None else mesh.shape["tensor"] * mesh.shape["fsdp"]


# --- inside a compiled program ---------------------------------------------------------------------------------------
def on_mesh(mesh: Mesh | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, traced so that `constrain` and `gather_layer` in it know the mesh."""
    if mesh is None:
        return fn

    @functools.wraps(fn)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return fn(*args, **kwargs)

    return traced


def _mesh() -> Any:
    """The mesh (an abstract one) of the program that is being traced, or None outside of `on_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if set(AXES) <= set(mesh.axis_names) else None


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """x with its leading dimensions split over these mesh axes and the others whole; x itself outside of `on_mesh`."""
    return x if _mesh() is None else jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def gathers() -> bool:
    """True where `gather_layer` fetches what other devices hold: to be done again in the backward pass, not kept."""
    mesh = _mesh()
    return mesh is not None and mesh.shape["fsdp"] > 1


def gather_layer(config: PolicyConfig, layer: Params) -> Params:
    """One layer of the stacked parameters, brought together over fsdp; split over tensor as before.

    What is multiplied travels in the compute dtype. Gradients go the way back: summed, each device keeps its part.
    """
    mesh = _mesh()
    if mesh is None:
        return layer
    whole = whole_letters(config, mesh)

    def gather(name: str, weight: jax.Array) -> jax.Array:
        weight = weight if "norm" in name else weight.astype(config.compute_dtype)
        weight = constrain(weight, *param_spec(name, whole)[1:])
        return constrain(weight, *param_spec(name, (*whole, "d"))[1:])

    return {name: gather(name, weight) for name, weight in layer.items()}


# --- laying out what exists ------------------------------------------------------------------------------------------
def shard_params(config: PolicyConfig, params: Params, mesh: Mesh) -> Params:
    """Existing params (host or device) laid out on the mesh."""
    return jax.device_put(params, param_shardings(config, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Arrays whose leading axis is the batch of groups: split over data and fsdp, whole groups per device."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def put(tree: Any, sharding: Sharding) -> Any:
    """A pytree of host arrays laid out as `sharding` says. With several processes all must hold the same arrays, and
    each gives its own shards. (device_put would compare them over the processes first, each time.)
    """
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def shards(array: np.ndarray) -> jax.Array:
        places = sharding.addressable_devices_indices_map(array.shape)
        mine = [jax.device_put(array[index], device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, mine)

    return jax.tree.map(lambda x: shards(np.asarray(x)), tree)


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
