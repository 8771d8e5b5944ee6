"""Compiling for a TPU that is not there, for either side's Python: needs jax and libtpu only."""

from __future__ import annotations

import os
import re
import time
from typing import Any

TOPOLOGY = "v5p:2x2x1"


def tpu_sharding(topology: str = TOPOLOGY) -> Any:
    """The place of every array: one chip of the topology."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # on a machine that is no TPU VM nobody answers it
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nobody's chip is taken by compiling
    import jax
    from jax.experimental import topologies

    return jax.sharding.SingleDeviceSharding(topologies.get_topology_desc(topology, "tpu").devices[0])


def measured(jitted: Any, arguments: tuple, beside: float = 0.0) -> dict[str, float]:
    """Compiles for the arguments' devices; XLA's counts (a loop's body once) and the chip's memory at the peak.

    `beside`: bytes of arrays that are no arguments but live meanwhile. A program that is too large for the chip has
    only the memory that the compiler says it needs.
    """
    import jax

    started = time.perf_counter()
    try:
        compiled = jitted.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        used = re.search(r"Used ([\d.]+)G of ([\d.]+)G", str(error))
        if used is None:
            raise
        return {"too_large_gib": float(used[1]), "chip_gib": float(used[2])}
    seconds = time.perf_counter() - started
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "xla_flops": costs["flops"],
        "xla_bytes": costs["bytes accessed"],
        "temporary_gib": memory.temp_size_in_bytes / 2**30,
        "peak_gib": (live + memory.temp_size_in_bytes + beside) / 2**30,
        "compile_seconds": seconds,
    }
