"""One compiled program: how long it took, what the compiler says of its memory, what its text says of its traffic."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import jax

from seal_jax.planner.hlo import Traffic, traffic

_UNIT = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDS = (
    re.compile(r"Used ([\d.]+)([BKMGT]?) of [\d.]+[BKMGT]? hbm"),
    re.compile(r"\(([\d.]+)([BKMGT]?)\) exceeds available HBM"),
)


@dataclass(frozen=True)
class Measured:
    """Per chip. `flops` is XLA's own count (loop bodies once); `step` the traffic of one step of a decode loop.

    `seconds`: processor time of compiling, all threads together, so that a busy machine counts the same.
    `refused`: bytes that the program needs where the compiler found that it does not fit; the rest is then 0.
    """

    seconds: float
    flops: float = 0.0
    arguments: int = 0
    outputs: int = 0
    aliased: int = 0
    temporaries: int = 0
    call: Traffic = Traffic()
    step: Traffic = Traffic()
    refused: int | None = None

    @property
    def own(self) -> int:
        """Bytes beyond its arguments: temporaries, and outputs that are not written over an argument."""
        return self.temporaries + self.outputs - self.aliased


def measure(lowered: jax.stages.Lowered, taken: float = 1.0) -> Measured:
    """Compiles. A program that does not fit by itself is `refused`; any other error is raised as it is.

    `taken`: see `traffic`.
    """
    started = time.process_time()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Measured(time.process_time() - started, refused=needed(str(error)))
    seconds = time.process_time() - started
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis()
    text = compiled.as_text()
    assert memory is not None and costs is not None and text is not None
    call, step = traffic(text, taken)
    return Measured(
        seconds=seconds,
        flops=float(costs.get("flops", 0.0)),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        call=call,
        step=step,
    )


def needed(message: str) -> int:
    """Bytes that XLA's RESOURCE_EXHAUSTED says are needed; 0 where it does not say."""
    for pattern in _NEEDS:
        match = pattern.search(message)
        if match:
            return int(float(match[1]) * _UNIT[match[2]])
    return 0
