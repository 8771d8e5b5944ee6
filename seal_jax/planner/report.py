"""A plan as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from seal_jax.planner.chips import GIB
from seal_jax.planner.plan import ROLLOUT, UPDATE, Plan, Program
from seal_jax.policy.config import param_shapes


def report(plan: Plan, config: ConfigDict) -> str:
    return "\n\n".join(
        "\n".join(part) for part in (_head(plan, config), _programs(plan), _memory(plan), _time(plan), _verdict(plan))
    )


def n_params(plan: Plan) -> int:
    leaves = jax.tree.leaves(param_shapes(plan.policy), is_leaf=lambda x: isinstance(x, tuple))
    return sum(math.prod(shape) for shape in leaves)


def _head(plan: Plan, config: ConfigDict) -> list[str]:
    chip, policy, episodes = plan.topology.chip, plan.policy, plan.episodes
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    return [
        f"{config.policy.path or config.policy.source}: {n_params(plan) / 1e9:.2f}B parameters, "
        f"{policy.n_layers} layers, {policy.compute_dtype}, remat {policy.remat}, attention {policy.attention}",
        f"{plan.topology}: {plan.topology.n_chips} chips, {math.prod(plan.mesh.values())} in the mesh {mesh}"
        + (f"; each of {plan.hosts} hosts plays its share of the tasks by itself" if plan.hosts > 1 else ""),
        f"a chip: {chip.flops / 1e12:.0f} TFLOP/s (bfloat16), {chip.hbm_bytes / GIB:.2f} GiB that a program may use, "
        f"{chip.hbm_bandwidth / 1e9:.0f} GB/s of HBM, {chip.ici_bandwidth / 1e9:.0f} GB/s from other chips "
        f"({chip.published})",
        f"a round: {config.tasks_per_round} tasks x {config.rollouts} rollouts, "
        f"{config.learner.minibatches} mini-batches of {config.learner.prompts_per_micro} prompts at once",
        f"assumed of an episode (--episodes): prompt={episodes.prompt},suffix={episodes.suffix},"
        f"sampled={episodes.sampled},messages={episodes.messages}",
    ]


def _programs(plan: Plan) -> list[str]:
    header = ("program", "shapes", "core s", "TFLOP", "XLA's", "HBM GB", "ICI GB", "args", "out", "alias", "temp")
    rows: list[tuple[str, ...]] = [header]
    for p in plan.programs:
        m = p.measured
        moved = m.call + m.step
        if m.refused is not None:
            rest: tuple[str, ...] = ("-", "-", "-", "", "", "", f"needs {m.refused / GIB:.2f}")
        else:
            memory = (m.arguments, m.outputs, m.aliased, m.temporaries)
            rest = (_short(m.flops / 1e12), _short(moved.hbm / 1e9), _short(moved.ici / 1e9))
            rest += tuple(f"{x / GIB:.2f}" for x in memory)
        rows.append((p.name, p.shapes, f"{m.seconds:.0f}", _short(p.flops / 1e12), *rest))
    return [
        "Programs, a call on a chip (decode: its start and one step). TFLOP by formula; XLA counts loop bodies once.",
        "core s: compiling, on one core. Memory in GiB: arguments, outputs, those written over arguments, temporaries.",
        *table(rows, left=2),
    ]


def _memory(plan: Plan) -> list[str]:
    lines = ["Memory of a chip in GiB at the largest buckets"]
    lines.append("  always there: " + ", ".join(f"{k} {v / GIB:.2f}" for k, v in plan.resident.items() if v))
    for moment in (ROLLOUT, UPDATE):
        worst = plan.worst(moment)
        lines.append(f"  {moment}: {_total(worst, plan)}")
    lines.append("  in rollouts: " + ", ".join(f"{k} {v / GIB:.2f}" for k, v in plan.caches.items()))
    return lines


def _total(worst: Program, plan: Plan) -> str:
    ok = worst.measured.refused is None and worst.total <= plan.hbm
    return (
        f"{worst.total / GIB:.2f} of {plan.hbm / GIB:.2f} in {worst.name} ({worst.shapes or 'the optimiser step'}): "
        f"{'fits' if ok else 'DOES NOT FIT'}"
    )


def _time(plan: Plan) -> list[str]:
    rows: list[tuple[str, ...]] = [("phase", "calls", "compute s", "HBM s", "ICI s", "at least s", "bound by")]
    for p in plan.phases:
        times = (_short(x) for x in (p.compute, p.memory, p.network, p.seconds))
        rows.append((p.name, str(p.calls), *times, p.bound))
    total = sum(p.seconds for p in plan.phases)
    rows.append(("round", "", "", "", "", _short(total), ""))
    return ["Roofline of a round: the least a chip can take, at its published peaks", *table(rows, left=1)]


def _verdict(plan: Plan) -> list[str]:
    rollouts = plan.at_once * plan.round.rollout.rows
    if plan.fits:
        hosts = f" on {plan.hosts} hosts" if plan.hosts > 1 else ""
        return [f"FITS. At the largest buckets {plan.at_once} groups ({rollouts} rollouts) fit at once{hosts}."]
    return ["DOES NOT FIT.", *(f"  {mend}" for mend in plan.mends)]


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}" if value >= 0.001 or not value else "<0.001"


def table(rows: Sequence[Sequence[Any]], left: int) -> list[str]:
    """Columns of equal width; the first `left` are flush left."""
    rows = [[str(cell) for cell in row] + [""] * (len(rows[0]) - len(row)) for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
