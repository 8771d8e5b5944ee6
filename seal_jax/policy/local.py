"""The parameters on one process's own devices, where it plays: rollouts are local to a host, only the update is not.

With one process the learner's mesh is the player's, and nothing is copied.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from seal_jax.policy.config import Params
from seal_jax.policy.sharding import AXES


def spans_processes(mesh: Mesh | None) -> bool:
    return mesh is not None and len({d.process_index for d in mesh.devices.flat}) > 1


def local_shape(mesh: Mesh) -> tuple[int, int, int]:
    """(data, fsdp, tensor) of one process's devices: tensor as in the mesh, as much of its fsdp as there is room for.

    Raises ValueError where the processes have unequal parts of the mesh, or a tensor group would lie on two of them.
    """
    devices = list(mesh.devices.flat)
    processes = len({d.process_index for d in devices})
    parts = [[d for d in devices if d.process_index == p] for p in sorted({d.process_index for d in devices})]
    n, (_, fsdp, tensor) = len(parts[0]), (mesh.shape[axis] for axis in AXES)
    if any(len(part) != n for part in parts):
        raise ValueError(
            f"the {processes} processes have {[len(p) for p in parts]} devices; each needs the same number"
        )
    if n % tensor:
        raise ValueError(
            f"config.mesh.tensor={tensor} does not divide the {n} device{'' if n == 1 else 's'} of each process, and "
            f"rollouts are played on a process's own devices; use a divisor of {n}, and config.mesh.fsdp for the rest"
        )
    fsdp = math.gcd(fsdp, n // tensor)
    return n // tensor // fsdp, fsdp, tensor


def local_mesh(mesh: Mesh, process: int) -> Mesh:
    """The mesh of that process's own devices; of a mesh that one process has, the same mesh."""
    mine = [d for d in mesh.devices.flat if d.process_index == process]
    return Mesh(np.asarray(mine).reshape(local_shape(mesh)), AXES, axis_types=mesh.axis_types)


class LocalCopies:
    """Lays global parameters out on this process's devices; each process gets them all.

    `mesh` is for the rollout engine: None on a single device.
    """

    def __init__(self, mesh: Mesh) -> None:
        own = local_mesh(mesh, jax.process_index())
        self.mesh = own if own.size > 1 else None
        # The learner's devices in the learner's order (a program takes no other), each process's part by itself.
        parted = mesh.devices.reshape(-1, *own.devices.shape)
        self._everywhere = Mesh(parted, ("process", *AXES), axis_types=(mesh.axis_types[0], *mesh.axis_types))
        self._device = own.devices.flat[0]
        self._spread: Any = None

    def __call__(self, params: Params) -> Params:
        """Local arrays with the values of global ones; collective."""
        if self._spread is None:
            shardings = jax.tree.map(lambda x: NamedSharding(self._everywhere, x.sharding.spec), params)
            self._spread = jax.jit(lambda params: params, out_shardings=shardings)
        return jax.tree.map(self._local, self._spread(params))

    def _local(self, array: jax.Array) -> jax.Array:
        spec = array.sharding.spec  # type: ignore[attr-defined]
        sharding = SingleDeviceSharding(self._device) if self.mesh is None else NamedSharding(self.mesh, spec)
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
