"""What is published of the TPU chips, and how much of their memory the compiler may use."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Chip:
    """One chip. `flops`: peak bfloat16 operations per second; `hbm_bandwidth`: bytes per second of its memory;
    `ici_bandwidth`: bytes per second that can arrive over all its links to other chips together.

    `hbm_bytes` is what libtpu's compiler lets a program use: the published capacity without what it reserves.
    """

    name: str
    flops: float
    hbm_bytes: int
    hbm_bandwidth: float
    ici_bandwidth: float
    published: str  # where flops and bandwidths are from
    dimensions: int  # of its network: how many sides a slice has
    config: str = "default"  # libtpu's name for "one jax device per chip"


_DOCS = "https://docs.cloud.google.com/tpu/docs/"
CHIPS = {
    chip.name: chip
    for chip in (
        # published: 32 GiB; 2,400 Gbit/s of interconnect
        Chip("v4", 275e12, int(30.75 * GIB), 1200e9, 300e9, _DOCS + "v4", 3, "megacore"),
        # published: 16 GB; 400 GB/s of interconnect, both directions together
        Chip("v5e", 197e12, int(15.75 * GIB), 819e9, 200e9, _DOCS + "v5e", 2),
        # published: 95 GB; 4,800 Gbit/s of interconnect
        Chip("v5p", 459e12, int(95.74 * GIB), 2765e9, 600e9, _DOCS + "v5p", 3),
        # published: 32 GB; 800 GB/s of interconnect, both directions together
        Chip("v6e", 918e12, int(31.25 * GIB), 1638e9, 400e9, _DOCS + "v6e", 2),
    )
}
