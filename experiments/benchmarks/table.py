"""The peer comparison as one Markdown text: what was found, the targets, and whether each is met."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from experiments.benchmarks.case import CASES
from experiments.benchmarks.flops import update_flops

#: Largest difference of a token's log-prob, and of the gradient norms relative, at which both still compute the same.
SAME_LOGP, SAME_NORM = 1e-3, 1e-3
#: What sharing the prompt must leave of the operations at BFCL's lengths.
SHARED_SAVES = 0.33
_HEAD = ("", "ours", "peer", "ratio", "target", "met")


def table(found: dict[str, Any]) -> str:
    parts = found["parts"]
    rows = [row for part, make in _ROWS.items() if part in parts for row in make(found["shape"], parts)]
    case, host = CASES[found["shape"]], found["host"]
    lines = [
        f"{found['shape']}: {case.layers} layers, width {case.width}, {case.heads}/{case.kv_heads} heads, vocabulary "
        f"{case.vocab}; G = {case.rollouts}, prompt {case.prompt}, response {case.response}, float32; {host['cpus']} "
        f"CPUs ({host['system']}). A row-token is a token of the layout that repeats the prompt. Medians; ratios are "
        "medians of the ratios of steps that took turns.",
        "",
        *_markdown(_HEAD, rows),
    ]
    for name, contestant in ((f"{p}/{c}", x) for p, of in parts.items() for c, x in of.items()):
        if "failed" in contestant:
            lines.append(f"\n{name} failed: {contestant['failed']}")
    if "growth" in parts and "failed" not in parts["growth"]["growth"]:
        lines += ["", *_growth(parts["growth"]["growth"])]
    return "\n".join(lines)


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]


def _seconds(contestant: dict[str, Any]) -> list[float]:
    return [step["seconds"] for step in contestant["steps"]]


def _paired(ours: list[float], theirs: list[float], ratio: Callable[[float, float], float]) -> float:
    return statistics.median(map(ratio, ours, theirs))


def _ran(part: dict[str, Any], *names: str) -> bool:
    return all(name in part and part[name].get("steps") for name in names)


def _judged(name: str, ours: str, theirs: str, ratio: float, least: float | None = None, most: float | None = None):
    if least is None and most is None:
        return name, ours, theirs, f"{ratio:.2f}x", "", ""
    met = ratio >= least if least is not None else ratio <= most  # type: ignore[operator]
    target = f">= {least:g}x" if least is not None else f"<= {most:g}x"
    return name, ours, theirs, f"{ratio:.2f}x", target, "yes" if met else "no"


def _update(shape: str, parts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    case, part = CASES[shape], parts["update"]
    for remat in ("none", "block"):
        name = f"ours_{remat}"
        if not _ran(part, name):
            continue
        ours, seconds = part[name], _seconds(part[name])
        if _ran(part, "tunix"):
            tunix, theirs = part["tunix"], _seconds(part["tunix"])
            speed = [case.row_tokens / statistics.median(x) for x in (seconds, theirs)]
            faster = _paired(seconds, theirs, lambda x, y: y / x)
            yield _judged(
                f"update, remat {remat}: row-tokens/s", f"{speed[0]:.0f}", f"tunix {speed[1]:.0f}", faster, least=2.5
            )
            yield (
                f"update, remat {remat}: seconds", f"{statistics.median(seconds):.2f}",
                f"tunix {statistics.median(theirs):.2f}", "", "", "",
            )  # fmt: skip
            peaks = [x["peak_mib"] / 1024 for x in (ours, tunix)]
            yield _judged(
                f"update, remat {remat}: peak GiB", f"{peaks[0]:.2f}", f"tunix {peaks[1]:.2f}", peaks[0] / peaks[1],
                most=0.5,
            )  # fmt: skip
            norms = abs(ours["gradient_norm"] / tunix["gradient_norm"] - 1)
            same = ours["logp_difference"] <= SAME_LOGP and norms <= SAME_NORM
            yield (
                f"update, remat {remat}: the same? log-probs differ by at most, gradient norms by",
                f"{ours['logp_difference']:.1e}", f"{norms:.1e}", "", f"<= {SAME_LOGP:g}",
                "yes" if same else "no: VOID",
            )  # fmt: skip
        if _ran(part, "matmul"):
            needed = update_flops(case) / 1e9
            dot = [step["gflops_square"] for step in part["matmul"]["steps"]]
            share = _paired([needed / x for x in seconds], dot, lambda x, y: x / y)
            yield _judged(
                f"update, remat {remat}: GFLOP/s of the {needed:.0f} GFLOP needed, beside jnp.dot",
                f"{needed / statistics.median(seconds):.1f}", f"dot {statistics.median(dot):.1f}", share, least=0.5,
            )  # fmt: skip


def _generation(part: str, peer: str, least: float) -> Callable[[str, dict[str, Any]], Iterator[tuple[str, ...]]]:
    def rows(shape: str, parts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        case, of = CASES[shape], parts[part]
        if not _ran(of, "ours", peer):
            return
        ours, theirs = _seconds(of["ours"]), _seconds(of[peer])
        speed = [case.sampled / statistics.median(x) for x in (ours, theirs)]
        faster = _paired(ours, theirs, lambda x, y: y / x)
        yield _judged(f"{part}: sampled tokens/s", f"{speed[0]:.1f}", f"{peer} {speed[1]:.1f}", faster, least=least)
        peaks = [x["peak_mib"] / 1024 for x in (of["ours"], of[peer])]
        yield _judged(f"{part}: peak GiB", f"{peaks[0]:.2f}", f"{peer} {peaks[1]:.2f}", peaks[0] / peaks[1])

    return rows


def _matmul(shape: str, parts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    if _ran(parts["matmul"], "matmul"):
        steps = parts["matmul"]["matmul"]["steps"]
        for key in sorted(k for k in steps[0] if k.startswith("gflops_")):
            rate = statistics.median(step[key] for step in steps)
            yield f"jnp.dot, {key.removeprefix('gflops_')}: GFLOP/s", f"{rate:.1f}", "", "", "", ""


def _aot(shape: str, parts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    units = {
        "flops": ("TFLOP", 1e12),
        "xla_bytes": ("GB accessed (XLA, all logits at once)", 1e9),
        "peak_gib": ("peak GiB", 1.0),
    }
    for case in dict.fromkeys(name.split()[0] for name in parts["aot"]):
        theirs = parts["aot"].get(f"{case} tunix_block")
        for remat in ("none", "block"):
            ours = parts["aot"].get(f"{case} ours_{remat}")
            if ours is None or theirs is None:
                continue
            for key, (unit, scale) in units.items():
                values = [x.get(key, x.get("too_large_gib") if key == "peak_gib" else None) for x in (ours, theirs)]
                name = f"{case} for v5p, remat {remat}: {unit}"
                if None in values:
                    continue
                shown = [f"{v / scale:.3g}" for v in values]
                for i, x in enumerate((ours, theirs)):
                    if key == "peak_gib" and "too_large_gib" in x:
                        shown[i] += f" (chip: {x['chip_gib']:.3g})"
                most = SHARED_SAVES if key == "flops" and case == "qwen25_7b_2layers" else None
                yield _judged(name, shown[0], f"tunix {shown[1]}", values[0] / values[1], most=most)


_ROWS = {
    "update": _update,
    "rollout": _generation("rollout", "tunix", 2.0),
    "generate": _generation("generate", "transformers", 1.0),
    "matmul": _matmul,
    "aot": _aot,
}


def _growth(found: dict[str, Any]) -> list[str]:
    """Seconds of a round's parts against each size, and the exponents."""
    rows = []
    for axis, of in found.items():
        for part, seconds in of["seconds"].items():
            cells = ", ".join(f"{n}: {s:.3g}" for n, s in zip(of["sizes"], seconds, strict=True))
            rows.append((axis, part, cells, f"{of['exponents'][part]:.2f}"))
    return _markdown(("against", "part", "seconds", "exponent"), rows)
