"""What fits where: the paper's backbones on TPU slices, as a Markdown table (docs/planner.md).

    python -m experiments.benchmarks.plan_table [--backbones qwen25_3b,...] [--slices v5p:2x2x1,...] [--suffix=8192]

For each backbone of configs/bfcl.py the slices are tried in the order given: with more than one chip, each with `fsdp`
over all and a group per chip at once, and in a second try with `tensor=2`. The first that fits is the row. A slice on
which parameters, optimiser, reference and gradients alone have no room is passed over without compiling. A plan takes
minutes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ml_collections import ConfigDict

from configs.bfcl import get_config
from seal_jax.planner.chips import GIB
from seal_jax.planner.plan import ROLLOUT, UPDATE, Planner
from seal_jax.planner.programs import bytes_per_chip
from seal_jax.planner.topology import devices, parse_topology
from seal_jax.planner.work import Episodes, cut, plan_round

SLICES = "v5e:1x1,v6e:2x2,v5p:2x2x1,v6e:2x4,v5p:2x2x2,v5e:4x4,v6e:4x4"
BACKBONES = "qwen25_0p5b_lora,qwen25_1p5b_lora,qwen25_3b,qwen25_7b,toolace2_8b"
HEADER = ("backbone", "slice", "mesh", "rollouts GiB", "update GiB", "of GiB", "groups at once", "s a round, at least")


def recipe(backbone: str, chips: int, tensor: int, suffix: int) -> ConfigDict:
    """The backbone's recipe with one group per chip (or pair of chips) at once, and suffixes up to `suffix`."""
    config = get_config(backbone)
    if chips == 1:
        return config
    ways = chips // tensor
    config.mesh.fsdp, config.mesh.tensor = ways, tensor
    config.learner.prompts_per_micro = ways
    config.buckets.groups = (ways, 2 * ways)
    config.buckets.suffix = tuple(size for size in config.buckets.suffix if size <= suffix)
    config.buckets.chunk = tuple(size for size in config.buckets.chunk if size < suffix)
    config.limits.max_new_tokens = min(config.limits.max_new_tokens, suffix // 2)
    return config


def row(backbone: str, name: str, tensor: int, suffix: int) -> tuple[str, ...] | None:
    topology = parse_topology(name)

    def told(line: str) -> None:
        print(f"{backbone} {name}: {line}", file=sys.stderr, flush=True)

    config = recipe(backbone, topology.n_chips, tensor, suffix)
    try:
        planner = Planner(config, topology, devices(topology), told)
    except ValueError as error:  # heads that do not divide
        told(str(error))
        return None
    state = sum(planner.resident.values()) + bytes_per_chip(planner.abstract.trained)
    if state > topology.chip.hbm_bytes:
        told(f"parameters, optimiser, reference and gradients alone are {state / GIB:.1f} GiB a chip")
        return None
    if not all(planner.fits(moment) for moment in (UPDATE, ROLLOUT)):
        told("does not fit")
        return None
    phases = planner.phases(plan_round(config, cut(Episodes(), config), kl=planner.abstract.kl, hosts=planner.hosts))
    totals = (max(p.total for p in planner.largest(moment)) / GIB for moment in (ROLLOUT, UPDATE))
    mesh = f"fsdp {planner.mesh.shape['fsdp']}, tensor {planner.mesh.shape['tensor']}"
    return (
        backbone,
        name,
        mesh,
        *(f"{total:.1f}" for total in totals),
        f"{topology.chip.hbm_bytes / GIB:.2f}",
        str(planner.groups_at_once()),
        f"{sum(p.seconds for p in phases):.0f}",
    )


def main(args: Any) -> None:
    print("| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER), sep="\n", flush=True)
    for backbone in args.backbones.split(","):
        names = args.slices.split(",")
        tries = ((name, tensor) for name in names for tensor in ((1, 2) if parse_topology(name).n_chips > 1 else (1,)))
        found = next(filter(None, (row(backbone, name, tensor, args.suffix) for name, tensor in tries)), None)
        cells = found if found is not None else (backbone, "none of these", *[""] * (len(HEADER) - 2))
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbones", default=BACKBONES)
    parser.add_argument("--slices", default=SLICES)
    parser.add_argument("--suffix", type=int, default=8192)
    main(parser.parse_args())
