"""Figures of a run, drawn from its metrics.jsonl alone:

    python -m seal_jax.telemetry.figures WORKDIR [OUTPUT_FOLDER]

writes success, labels and cues as PNG and SVG to WORKDIR/figures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seal_jax.telemetry.recorder import read_jsonl
from seal_jax.telemetry.style import CUED, GRID, INK, LABEL_COLOURS, MUTED, category_colours, in_order, words
from seal_jax.types import FAILURE_LABELS, LABELS

Line = Mapping[str, Any]
_SPLIT_TITLES = {"val": "validation", "test": "test", "ood": "out of distribution", "train": "training tasks"}


def draw(workdir: str | Path, folder: str | Path | None = None) -> list[Path]:
    """Draws whatever the record has data for; returns the files written (PNG and SVG of each figure)."""
    workdir = Path(workdir)
    lines = list(read_jsonl(workdir / "metrics.jsonl"))
    if not lines:
        raise ValueError(f"{workdir / 'metrics.jsonl'} is missing or empty; give the --workdir of a run")
    folder = workdir / "figures" if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    import matplotlib

    style = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "seal_jax",  # the same record gives the same SVG
    }
    written = []
    with matplotlib.rc_context(style):
        for name, figure in (("success", success(lines)), ("labels", labels(lines)), ("cues", cues(lines))):
            if figure is None:
                continue
            for kind in ("png", "svg"):
                path = folder / f"{name}.{kind}"
                figure.savefig(path, dpi=160, bbox_inches="tight", metadata={"Date": None} if kind == "svg" else None)
                written.append(path)
    return written


def success(lines: Sequence[Line]) -> Any:
    """Success per category over rounds: one panel for the training rows and one for each evaluated split."""
    panels = []
    for split in ("train", *in_order(_splits(lines), ("val", "test", "ood"))):
        prefix = "train/success" if split == "train" else f"eval/{split}/success"
        total = series(lines, prefix)
        parts = {c: series(lines, f"{prefix}/{c}") for c in in_order(_tails(lines, f"{prefix}/"))}
        if total or parts:
            panels.append((split, total, parts))
    if not panels:
        return None
    figure, axes = _figure(len(panels))
    colours = category_colours(in_order({c for _, _, parts in panels for c in parts}))
    for ax, (split, total, parts) in zip(axes, panels, strict=True):
        ends = []
        for category, points in parts.items():
            _curve(ax, points, colours[category], 1.6)
            ends.append((points, words(category), colours[category]))
        if total:
            _curve(ax, total, INK, 2.6)
            ends.append((total, "all", INK))
        name, _, protocol = split.removesuffix(CUED).partition("_")
        how = "cues shown" if split.endswith(CUED) else "bare interface"
        how += f", {protocol} protocol" if protocol else ""
        title = "training rows" if split == "train" else f"{_SPLIT_TITLES.get(name, name)} ({how})"
        _axes(ax, title)
        _percent(ax)
        _end_labels(ax, ends)
        rounds = {r for points, _, _ in ends for r, _ in points}
        if len(rounds) == 1:  # left to itself, an axis around one point counts in fractions of a round
            ax.set_xticks(list(rounds))
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("success")
    return figure


def labels(lines: Sequence[Line]) -> Any:
    """The label profile over rounds, stacked: what the reached turns were diagnosed as. It is counted on rows without
    cues wherever a round has any."""
    points = {label: dict(series(lines, f"profile/{label}")) for label in LABELS}
    shown = [label for label in LABELS if any(points[label].values())]
    rounds = sorted({r for label in shown for r in points[label]})
    if not rounds:
        return None
    figure, (ax,) = _figure(1, width=8.4, height=4.4)
    bottom = [0.0] * len(rounds)
    for label in shown:  # in the order of LABELS: successes at the foot
        heights = [points[label].get(r) or 0.0 for r in rounds]
        ax.bar(rounds, heights, bottom=bottom, width=0.86, color=LABEL_COLOURS[label], label=words(label), linewidth=0)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    which = " (rows without cues)" if series(lines, "train/success_bare") else ""
    _axes(ax, f"what the turns of each round were diagnosed as{which}", grid=False)
    ax.set_ylabel("share of turns")
    _percent(ax, top=max(1.0, max(bottom)))
    ax.margins(x=0.01)
    handles, names = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handlelength=1)
    return figure


def cues(lines: Sequence[Line]) -> Any:
    """Which cues were active in which round, as bars over time, in the order of their first appearance."""
    active = [(line["round"], line["cues"]) for line in lines if "cues" in line]
    names = list(dict.fromkeys(name for _, on in active for name in on))
    if not active:
        return None
    figure, (ax,) = _figure(1, width=8.4, height=1.3 + 0.34 * max(1, len(names)))
    for y, name in enumerate(names):
        colour = next((c for label, c in LABEL_COLOURS.items() if label in name and label in FAILURE_LABELS), MUTED)
        for start, length in _runs(r for r, on in active if name in on):
            ax.barh(y, length, left=start - 0.5, height=0.62, color=colour, linewidth=0)
    ax.set_yticks(range(len(names)), [words(name) for name in names])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0, labelcolor=INK)
    rounds = [r for r, _ in active]
    ax.set_xlim(min(rounds) - 0.5, max(rounds) + 0.5)
    if not names:
        ax.text(0.5, 0.5, "no cue was active in any round", transform=ax.transAxes, ha="center", color=MUTED)
    _axes(ax, "active cues")
    ax.grid(axis="y", visible=False)
    return figure


# --- reading the record ----------------------------------------------------------------------------------------------
def series(lines: Iterable[Line], name: str) -> list[tuple[int, float]]:
    """[(round, value)] of one metric; rounds where it is absent or not finite are left out, later lines win."""
    found = {line["round"]: line["metrics"][name] for line in lines if line["metrics"].get(name) is not None}
    return sorted(found.items())


def _tails(lines: Iterable[Line], prefix: str) -> set[str]:
    return {n[len(prefix) :] for line in lines for n in line["metrics"] if n.startswith(prefix)}


def _splits(lines: Iterable[Line]) -> set[str]:
    return {tail.split("/")[0] for tail in _tails(lines, "eval/") if "/success" in tail}


def _runs(rounds: Iterable[int]) -> list[tuple[int, int]]:
    """Consecutive rounds as (first, how many)."""
    runs: list[tuple[int, int]] = []
    for r in sorted(rounds):
        if runs and r == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif not runs or r >= runs[-1][0] + runs[-1][1]:
            runs.append((r, 1))
    return runs


# --- drawing ---------------------------------------------------------------------------------------------------------
def _figure(panels: int, width: float = 4.6, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure of up to three panels in a row, or two columns of them; returns it with its axes in reading order."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = panels if panels <= 3 else 2
    rows = -(-panels // columns)
    # A Figure of its own, not pyplot's: no global state and no display, also inside a notebook.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=panels > 1).flat)
    for ax in axes[panels:]:
        ax.set_visible(False)
    return figure, axes[:panels]


def _curve(ax: Any, points: Sequence[tuple[int, float]], colour: str, width: float) -> None:
    marker = "o" if len(points) <= 12 else None
    ax.plot(*zip(*points, strict=True), color=colour, linewidth=width, marker=marker, markersize=3.5, clip_on=False)


def _axes(ax: Any, title: str, *, grid: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, loc="left", fontsize=11, pad=10)
    ax.set_xlabel("round")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.set_axisbelow(True)
    if grid:
        ax.grid(color=GRID, linewidth=0.8)


def _percent(ax: Any, top: float = 1.0) -> None:
    from matplotlib.ticker import PercentFormatter

    ax.set_ylim(0, top)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _end_labels(ax: Any, ends: Sequence[tuple[Sequence[tuple[int, float]], str, str]]) -> None:
    """Names each curve at its right end instead of in a legend, moved apart where they would overlap."""
    if not ends:
        return
    gap = 0.062
    order = sorted(range(len(ends)), key=lambda i: ends[i][0][-1][1])
    places = [ends[i][0][-1][1] for i in order]
    for k in range(1, len(places)):
        places[k] = max(places[k], places[k - 1] + gap)
    over = max(0.0, places[-1] - 1.02)
    places = [p - over for p in places]
    for k in range(len(places) - 2, -1, -1):
        places[k] = min(places[k], places[k + 1] - gap)
    right = max(points[-1][0] for points, _, _ in ends)
    for i, y in zip(order, places, strict=True):
        points, name, colour = ends[i]
        ax.annotate(
            f"{name} {points[-1][1]:.0%}",
            (right, y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
            fontweight="bold" if name == "all" else "normal",
            annotation_clip=False,
        )


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) not in (1, 2) or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    try:
        for path in draw(*argv):
            print(path)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
