"""TPU slices that are not there: their chips as jax devices that can be compiled for, and no more."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from seal_jax.planner.chips import CHIPS, Chip

_FORM = re.compile(r"(?P<chip>\w+):(?P<sides>\d+(x\d+)*)")
#: Chips of one host: larger slices are made of whole hosts of 2x2, but for these, which are one host.
_HOST, _ONE_HOST = 4, ("v5e:2x4", "v6e:2x4")
#: Chips along a side, at most.
_LONGEST = 16


@dataclass(frozen=True)
class Topology:
    """A slice: "v5p:2x2x2" is 8 v5p chips."""

    chip: Chip
    sides: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.sides))}"

    @property
    def n_chips(self) -> int:
        return math.prod(self.sides)


def one_host(topology: Topology) -> Topology:
    """A host of a larger slice as a slice of its own."""
    return Topology(topology.chip, (2, 2, 1)[: topology.chip.dimensions])


def parse_topology(name: str) -> Topology:
    """ValueError, with the forms that there are, for any other name."""
    match = _FORM.fullmatch(name)
    chip = CHIPS.get(match["chip"]) if match else None
    forms = "v4:2x2x1, v5e:1x1, v5e:4x4, v5p:2x2x2, v6e:4x4 and larger ones"
    if match is None or chip is None:
        raise ValueError(f"--topology={name} is not known; chips are {', '.join(CHIPS)}, in forms like {forms}")
    sides = tuple(int(side) for side in match["sides"].split("x"))
    if len(sides) != chip.dimensions or min(sides) < 1:
        raise ValueError(f"--topology={name}: a slice of {chip.name} has {chip.dimensions} sides, as in {forms}")
    if max(sides) > _LONGEST:  # libtpu ends the process
        raise ValueError(f"--topology={name}: no side is longer than {_LONGEST} chips; take a smaller slice")
    return Topology(chip, sides)


def require_libtpu() -> None:
    """ValueError where the TPU compiler is not installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError('planning needs libtpu, the compiler (and no TPU): pip install -e ".[tpu]"')


def host_only() -> None:
    """Keeps jax on the CPU and libtpu from looking for a TPU; to be called before either is used."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",  # else it asks the cloud's metadata server, for minutes
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is run: another process may hold a TPU, or plan too
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",  # of this machine, not of the slice; without the two it warns
        "TPU_WORKER_HOSTNAMES": "localhost",
    }.items():
        os.environ.setdefault(name, value)


def devices(topology: Topology) -> list[Any]:
    """The slice's chips, one jax device each; ValueError for a slice that cannot be made of hosts."""
    require_libtpu()
    host_only()
    import jax
    from jax.experimental import topologies

    options: dict[str, Any] = {"chip_config_name": topology.chip.config}
    # Part of a host, or a larger one than usual; libtpu has all three dimensions always.
    if topology.n_chips < _HOST or str(topology) in _ONE_HOST:
        options["chips_per_host_bounds"] = [*topology.sides, 1, 1][:3]
    try:
        made = topologies.get_topology_desc(platform="tpu", topology_name=str(topology), **options)
    except jax.errors.JaxRuntimeError as error:
        what = str(error).splitlines()[0]
        raise ValueError(
            f"--topology={topology}: libtpu refuses it ({what}); sides of more than one host are multiples of 2"
        ) from error
    # In the order of a run's mesh: each host's chips stand together.
    return sorted(made.devices, key=lambda d: (d.process_index, d.id))
