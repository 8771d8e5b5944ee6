"""How every figure of a run or of the study is drawn: style, panels, axes, names at the curves' ends, files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from seal_jax.telemetry.style import GRID, INK, MUTED


def drawing() -> AbstractContextManager[None]:
    """The style, for as long as figures are made and saved."""
    import matplotlib

    return matplotlib.rc_context(
        {
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
    )


def save(figure: Any, folder: Path, name: str, dpi: int = 160) -> list[Path]:
    """Writes name.png and name.svg, without a date; returns both paths."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # panels stay where they were just laid out: else each file does so twice
    written = []
    for kind in ("png", "svg"):
        path = folder / f"{name}.{kind}"
        figure.savefig(path, dpi=dpi, bbox_inches="tight", metadata={"Date": None} if kind == "svg" else None)
        written.append(path)
    return written


def panels(number: int, width: float = 4.6, height: float = 3.6, columns: int | None = None) -> tuple[Any, list[Any]]:
    """A figure of panels that share their y axis (`width` x `height` inches each): up to three in a row, else two
    columns of them, or as many as told. Returns it with its axes in reading order."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = columns or (number if number <= 3 else 2)
    rows = -(-number // columns)
    # A Figure of its own, not pyplot's: no global state and no display, also inside a notebook.
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=number > 1).flat)
    for ax in axes[number:]:
        ax.set_visible(False)
    return figure, axes[:number]


def curve(ax: Any, points: Sequence[tuple[float, float]], colour: str, width: float) -> None:
    marker = "o" if len(points) <= 12 else None
    ax.plot(*zip(*points, strict=True), color=colour, linewidth=width, marker=marker, markersize=3.5, clip_on=False)


def titled(ax: Any, title: str, *, grid: bool = True, x: str = "round") -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(title, loc="left", fontsize=11, pad=10)
    ax.set_xlabel(x)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.set_axisbelow(True)
    if grid:
        ax.grid(color=GRID, linewidth=0.8)


def percent(ax: Any, top: float = 1.0) -> None:
    from matplotlib.ticker import PercentFormatter

    ax.set_ylim(0, top)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def end_labels(ax: Any, ends: Sequence[tuple[Sequence[tuple[float, float]], str, str]]) -> None:
    """Names each curve at its right end instead of in a legend, moved apart where they would overlap.

    Args:
      ends: (points, name, colour) of each curve; the y axis has its limits already.
    """
    if not ends:
        return
    order = sorted(range(len(ends)), key=lambda i: ends[i][0][-1][1])
    places = apart([ends[i][0][-1][1] for i in order], *ax.get_ylim())
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


def apart(wanted: Sequence[float], low: float, high: float) -> list[float]:
    """Where names go: as near to their curves' ends (ascending) as a gap between them and the axis' limits allow."""
    gap = 0.062 * (high - low)
    groups: list[list[float]] = []  # of names that touch: how far all of them are shifted is one number, their mean
    for i, y in enumerate(wanted):
        groups.append([y - i * gap])
        while len(groups) > 1 and _mean(groups[-2]) > _mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    ceiling = high + 0.02 * (high - low) - (len(wanted) - 1) * gap
    shifts = [min(max(_mean(group), low), ceiling) for group in groups for _ in group]
    return [shift + i * gap for i, shift in enumerate(shifts)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
