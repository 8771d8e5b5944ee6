"""Figures of a run, drawn from its metrics.jsonl alone:

    python -m seal_jax.telemetry.figures WORKDIR [OUTPUT_FOLDER]

writes success, labels and cues as PNG and SVG to WORKDIR/figures.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from seal_jax.telemetry.drawing import curve, drawing, end_labels, panels, percent, save, titled
from seal_jax.telemetry.recorder import read_jsonl
from seal_jax.telemetry.style import CUED, INK, LABEL_COLOURS, MUTED, category_colours, in_order, words
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
    with drawing():
        made = (("success", success(lines)), ("labels", labels(lines)), ("cues", cues(lines)))
        return [path for name, figure in made if figure is not None for path in save(figure, folder, name)]


def success(lines: Sequence[Line]) -> Any:
    """Success per category over rounds: one panel for the training rows and one for each evaluated split."""
    shown = []
    for split in ("train", *in_order(_splits(lines), ("val", "test", "ood"))):
        prefix = "train/success" if split == "train" else f"eval/{split}/success"
        total = series(lines, prefix)
        parts = {c: series(lines, f"{prefix}/{c}") for c in in_order(_tails(lines, f"{prefix}/"))}
        if total or parts:
            shown.append((split, total, parts))
    if not shown:
        return None
    figure, axes = panels(len(shown))
    colours = category_colours(in_order({c for _, _, parts in shown for c in parts}))
    for ax, (split, total, parts) in zip(axes, shown, strict=True):
        ends = []
        for category, points in parts.items():
            curve(ax, points, colours[category], 1.6)
            ends.append((points, words(category), colours[category]))
        if total:
            curve(ax, total, INK, 2.6)
            ends.append((total, "all", INK))
        name, _, protocol = split.removesuffix(CUED).partition("_")
        how = "cues shown" if split.endswith(CUED) else "bare interface"
        how += f", {protocol} protocol" if protocol else ""
        title = "training rows" if split == "train" else f"{_SPLIT_TITLES.get(name, name)} ({how})"
        titled(ax, title)
        percent(ax)
        end_labels(ax, ends)
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
    figure, (ax,) = panels(1, width=8.4, height=4.4)
    bottom = [0.0] * len(rounds)
    for label in shown:  # in the order of LABELS: successes at the foot
        heights = [points[label].get(r) or 0.0 for r in rounds]
        ax.bar(rounds, heights, bottom=bottom, width=0.86, color=LABEL_COLOURS[label], label=words(label), linewidth=0)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    which = " (rows without cues)" if series(lines, "train/success_bare") else ""
    titled(ax, f"what the turns of each round were diagnosed as{which}", grid=False)
    ax.set_ylabel("share of turns")
    percent(ax, top=max(1.0, max(bottom)))
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
    figure, (ax,) = panels(1, width=8.4, height=1.3 + 0.34 * max(1, len(names)))
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
    titled(ax, "active cues")
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
