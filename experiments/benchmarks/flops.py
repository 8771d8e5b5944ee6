"""Floating-point operations: what an update needs, and what a traced program does.

XLA's cost analysis counts the body of a loop once, whatever its length, so it says little of a model whose layers are
scanned. `program_flops` walks the trace instead and multiplies; where nothing loops the two agree.
"""

from __future__ import annotations

import math
from typing import Any

from experiments.benchmarks.case import Case


def update_flops(case: Case, *, shared: bool = True, causal: bool = True) -> float:
    """Operations of one update's forward and backward pass, nothing computed twice (no remat, no optimiser).

    With N the weights of the layers' matrices, A the tokens that go through them, E the tokens whose log-prob is in the
    loss (all but a row's first) and Q the pairs of query and key:

        6 N A  +  6 d V E  +  12 L n h Q        (2 a multiply-add; forward once, backward twice)

    shared: A = P + G S and a row's tokens see the group's prompt; else A = G (P + S), the prompt repeated in each row.
    causal: Q holds only pairs that may look; else the whole squares, as a program without blocks computes them.
    """
    g, p, s = case.rollouts, case.prompt, case.response
    heads = (2 * case.heads + 2 * case.kv_heads) * case.head_width  # of q and o, of k and v
    weights = case.layers * case.width * (heads + 3 * case.mlp_width)

    def square(n: int) -> float:
        return n * (n + 1) / 2 if causal else n * n

    pairs = square(p) + g * (p * s + square(s)) if shared else g * square(p + s)
    tokens = p + g * s if shared else g * (p + s)
    head = 6 * case.width * case.vocab * g * (s - 1)
    return 6 * weights * tokens + head + 12 * case.layers * case.heads * case.head_width * pairs


def program_flops(jaxpr: Any) -> float:
    """Operations of all matrix products in a (closed) jaxpr, loops counted as often as they run.

    Of a branch the dearest counts; of a `while`, whose length is not known, one turn; of a kernel all cells of its
    grid, those too that it skips, unless it brings an estimate.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = 0.0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        elif name == "pallas_call" and params.get("cost_estimate") is not None:
            total += params["cost_estimate"].flops
        elif name == "cond":
            total += max(map(program_flops, params["branches"]))
        else:
            times = params["length"] if name == "scan" else 1
            if name == "pallas_call":
                times = math.prod(params["grid_mapping"].grid)
            total += times * sum(program_flops(inner) for value in params.values() for inner in _jaxprs(value))
    return total


def _jaxprs(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [inner for item in value for inner in _jaxprs(item)]
    return [value] if hasattr(value, "eqns") or hasattr(value, "jaxpr") else []
