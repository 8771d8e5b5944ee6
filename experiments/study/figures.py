"""Figures of the study, drawn from its records alone; each as PNG and SVG.

| name | shows |
|---|---|
| `study_difference` | paired difference to vanilla on test, with its 95 % interval |
| `study_fresh` | the arm chosen on validation beside vanilla, on each fresh seed |
| `study_curves` | validation success over episodes |
| `study_mechanism` | groups that all fail, and how often a refusal is repaired without a cue, over rounds |
| `study_labels` | what turns were diagnosed as, over rounds |
| `study_cues` | which cues the closed loop showed in which round |

The first shows all sizes that a start has, the larger ones hollow; the others show its first size alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.study import statistics
from experiments.study.jobs import SIZES, START_NAMES
from experiments.study.records import COUNTED, Record
from experiments.study.statistics import CLOSED_LOOP, REFERENCE, Arms, Place, success
from seal_jax.telemetry.drawing import curve, drawing, end_labels, panels, percent, save, titled
from seal_jax.telemetry.style import GRID, INK, LABEL_COLOURS, MUTED, in_order, words
from seal_jax.types import FAILURE_LABELS

#: Arms with curves of their own, and the same colour everywhere.
ARM_COLOURS = {
    "vanilla": INK,
    "full": "#c8443a",
    "no_closed_loop": "#e8871e",
    "half": "#3b73b9",
    "half_strip": "#2a9d60",
    "anneal": "#7f4fa5",
}
#: Arms whose labels are drawn.
PROFILED = ("vanilla", "full", "half_strip")
#: SEAL minus vanilla in the paper's ablation (Table 3, Qwen2.5-7B): 40.25 - 30.75, points.
PAPERS_MARGIN = 9.5
#: Coarse enough for every PNG to stay below 150 kB.
_DPI = 100
_VERDICT_COLOURS = {"helps": LABEL_COLOURS["pass"], "hurts": LABEL_COLOURS["state_mismatch"], "not shown": MUTED}


def draw(records: Iterable[Record], folder: str | Path) -> list[Path]:
    """Draws whatever there are records for; returns the files written. The same records give the same bytes.

    What an earlier call drew and this one has no records for is removed. Starts and sizes without vanilla are left out;
    so are, where there are others, starts that arms are not chosen from, and fresh seeds, which few arms have, but for
    the figure that is theirs.

    Raises:
      ValueError: two records of one run, or nothing is left.
    """
    records = list(records)
    confirming = statistics.confirming(records)
    found = statistics.places(statistics.choosing(records)) or confirming
    found = {place: arms for place, arms in found.items() if place.start in START_NAMES} or found
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shown: dict[Place, Arms] = {}
    for place, arms in found.items():
        if all(other.start != place.start for other in shown):
            shown[place] = arms
    with drawing():
        made = {
            "study_difference": difference(found),
            "study_fresh": fresh(statistics.chosen(found), confirming),
            "study_curves": curves(shown),
            "study_mechanism": mechanism(shown),
            "study_labels": labels(shown),
            "study_cues": cues(shown),
        }
        written = [
            path for name, figure in made.items() if figure is not None for path in save(figure, folder, name, dpi=_DPI)
        ]
    for path in {folder / f"{name}.{kind}" for name in made for kind in ("png", "svg")} - {*written}:
        path.unlink(missing_ok=True)  # of other records
    return written


# --- difference ------------------------------------------------------------------------------------------------------
def difference(found: Mapping[Place, Arms]) -> Any:
    """A row for each arm, by part; a panel for each start."""
    starts = list(dict.fromkeys(place.start for place in found))
    names = _all_arms(found.values())
    if not names:
        return None
    rows, y = {}, 0.0
    headings = []
    for i, arm in enumerate(names):
        if i == 0 or statistics.part_of(arm) != statistics.part_of(names[i - 1]):
            y += 0.4 if i else 0.0
            headings.append((y, statistics.part_of(arm)))
            y += 0.9
        rows[arm] = y
        y += 1.0
    figure, axes = panels(len(starts), width=4.9, height=1.0 + 0.26 * y, columns=len(starts))
    for ax, start in zip(axes, starts, strict=True):
        sizes = [place for place in found if place.start == start]
        hollow = f" (hollow: {', '.join(place.size for place in sizes[1:])})" if len(sizes) > 1 else ""
        titled(ax, f'start "{start}"{hollow}', grid=False, x="test success minus vanilla's, points (95 % interval)")
        ax.axvline(0, color=INK, linewidth=1)
        ax.axvline(PAPERS_MARGIN, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        ax.text(
            PAPERS_MARGIN + 0.4, -0.75, f"paper +{PAPERS_MARGIN:g}", color=MUTED, fontsize=8, ha="left", va="center"
        )
        for i, place in enumerate(sizes):
            for arm, base in rows.items():
                if arm in found[place]:
                    _interval(ax, base + 0.3 * i, statistics.difference(found[place], arm, success("test")), i > 0)
        ax.spines["left"].set_visible(False)
        ax.grid(axis="x", color=GRID, linewidth=0.8)
    ax = axes[0]
    ax.set_yticks(list(rows.values()), [words(arm) for arm in rows])
    ax.set_ylim(y - 0.3, -1.2)
    for each in axes:
        each.tick_params(axis="y", length=0, labelcolor=INK)
    for y, part in headings:
        ax.text(
            -0.02,
            y,
            part,
            transform=ax.get_yaxis_transform(),
            ha="right",
            va="center",
            color=MUTED,
            fontsize=9,
            style="italic",
        )
    figure.get_layout_engine().set(wspace=0.05)
    reach = _reach(found)
    for each in axes:
        each.set_xlim(-reach, reach)
    return figure


def _reach(found: Mapping[Place, Arms]) -> float:
    """Half the width of the x axis, points: every mean, and every interval that more than two seeds have made."""
    ends = [PAPERS_MARGIN]
    for arms in found.values():
        for arm in arms:
            gain = statistics.difference(arms, arm, success("test"))
            if gain is not None:
                ends.append(100 * abs(gain.mean) + (100 * gain.half if gain.half is not None and gain.n > 2 else 0.0))
    return min(100.0, 1.08 * max(ends) + 1.0)


def _interval(ax: Any, y: float, gain: statistics.Estimate | None, hollow: bool) -> None:
    if gain is None:
        return
    colour = _VERDICT_COLOURS[statistics.verdict(gain)]
    if gain.half is not None:
        ax.plot(
            [100 * (gain.mean - gain.half), 100 * (gain.mean + gain.half)],
            [y, y],
            color=colour,
            linewidth=1.8,
            solid_capstyle="butt",
        )
    ax.plot(
        [100 * gain.mean],
        [y],
        marker="o",
        markersize=5,
        color=colour,
        linestyle="none",
        markerfacecolor="white" if hollow else colour,
    )


# --- fresh -----------------------------------------------------------------------------------------------------------
def fresh(best: statistics.Chosen | None, confirming: Mapping[Place, Arms]) -> Any:
    """A line for each fresh seed, from vanilla's test success to that of the chosen arm, and their mean; a panel for
    each start of the small policy."""
    if best is None:
        return None
    drawn = {
        place.start: ([(b, a) for a, b in statistics.pairs(arms, best.arm, success("test"))], gain)
        for place, arms in confirming.items()
        if place.size == SIZES[0] and best.arm in arms
        if (gain := statistics.difference(arms, best.arm, success("test"))) is not None
    }
    if not drawn:
        return None
    top = _ceiling(max(max(pair) for scores, _ in drawn.values() for pair in scores))
    figure, axes = panels(len(drawn), width=3.6, height=3.4, columns=len(drawn))
    for ax, (start, (scores, gain)) in zip(axes, drawn.items(), strict=True):
        titled(ax, f'start "{start}", {len(scores)} fresh seeds', x="")
        percent(ax, top=top)
        for pair in scores:
            curve(ax, list(enumerate(pair)), MUTED, 1.0)
        means = [math.fsum(column) / len(scores) for column in zip(*scores, strict=True)]
        curve(ax, list(enumerate(means)), _VERDICT_COLOURS[statistics.verdict(gain)], 3.0)
        ends = "" if gain.interval is None else " [{:+.1f}, {:+.1f}]".format(*(100 * x for x in gain.interval))
        ax.text(0.5, 0.03, f"{100 * gain.mean:+.1f}{ends}", transform=ax.transAxes, ha="center", color=INK)
        ax.set_xticks([0, 1], [REFERENCE, words(best.arm)])
        ax.set_xlim(-0.25, 1.25)
    axes[0].set_ylabel("test success")
    return figure


# --- curves ----------------------------------------------------------------------------------------------------------
def curves(found: Mapping[Place, Arms]) -> Any:
    """Mean validation success of the main arms against the episodes played, with a standard error on either side."""
    drawn = {
        place: {arm: points for arm in _main(arms) if (points := statistics.validation(arms[arm].values()))}
        for place, arms in found.items()
    }
    drawn = {place: lines for place, lines in drawn.items() if lines}
    if not drawn:
        return None
    figure, axes = panels(len(drawn), width=5.2, height=3.8, columns=len(drawn))
    top = max(
        mean + (error or 0.0) for lines in drawn.values() for points in lines.values() for _, mean, error in points
    )
    for ax, (place, lines) in zip(axes, drawn.items(), strict=True):
        titled(ax, f'start "{place.start}"', x="episodes")
        percent(ax, top=_ceiling(top))
        ends = []
        for arm, points in lines.items():
            x, mean = [p[0] for p in points], [p[1] for p in points]
            error = [p[2] or 0.0 for p in points]
            low, high = ([m + sign * e for m, e in zip(mean, error, strict=True)] for sign in (-1, 1))
            ax.fill_between(x, low, high, color=ARM_COLOURS[arm], alpha=0.12, linewidth=0)
            curve(ax, list(zip(x, mean, strict=True)), ARM_COLOURS[arm], 2.4 if arm == REFERENCE else 1.8)
            ends.append((list(zip(x, mean, strict=True)), words(arm), ARM_COLOURS[arm]))
        end_labels(ax, ends)
        ax.set_xlim(left=0)
    axes[0].set_ylabel("validation success ± s.e.")
    return figure


# --- mechanism -------------------------------------------------------------------------------------------------------
def mechanism(found: Mapping[Place, Arms]) -> Any:
    """Over rounds: groups whose rows all failed, and the share of refusals that rows without cues repaired."""
    quantities: dict[str, Callable[[Iterable[Record]], list[tuple[float, float]]]] = {
        "groups that all fail": lambda runs: over_rounds(runs, "groups/all_fail"),
        "refusals repaired without a cue": repair_rates,
    }
    drawn = [
        (f'{name}, start "{place.start}"', {arm: values(arms[arm].values()) for arm in _main(arms)})
        for name, values in quantities.items()
        for place, arms in found.items()
    ]
    if not any(any(lines.values()) for _, lines in drawn):
        return None
    figure, axes = panels(len(drawn), width=5.2, height=3.1, columns=len(found))
    for ax, (title, lines) in zip(axes, drawn, strict=True):
        titled(ax, title)
        percent(ax)
        some = {arm: points for arm, points in lines.items() if points}
        for arm, points in some.items():
            curve(ax, points, ARM_COLOURS[arm], 2.4 if arm == REFERENCE else 1.8)
        end_labels(ax, [(points, words(arm), ARM_COLOURS[arm]) for arm, points in some.items()])
        if len(some) < len(lines):
            without = "nothing to count: " + ", ".join(words(arm) for arm in lines if arm not in some)
            ax.text(0.02, 0.97, without, transform=ax.transAxes, color=MUTED, fontsize=8, va="top")
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("mean over seeds")
    return figure


def over_rounds(runs: Iterable[Record], name: str) -> list[tuple[float, float]]:
    """[(round, mean over the runs that have the curve's value there)], rounds counted from 1."""
    return _rounds([run["curves"].get(name) or [] for run in runs], lambda values: math.fsum(values) / len(values))


def repair_rates(runs: Iterable[Record]) -> list[tuple[float, float]]:
    """[(round, share of bare rows' turns with a refused call in which it was then taken)], counted over all runs."""
    runs = list(runs)
    met = dict(_rounds([run["curves"].get("refused/bare") or [] for run in runs], math.fsum))
    repaired = dict(_rounds([run["curves"].get("refused/bare/repaired") or [] for run in runs], math.fsum))
    return [(r, repaired.get(r, 0.0) / n) for r, n in met.items() if n > 0]


def _rounds(
    series: Sequence[Sequence[float | None]], combined: Callable[[list[float]], float]
) -> list[tuple[float, float]]:
    points = []
    for i in range(max(map(len, series), default=0)):
        values = [v for s in series if i < len(s) and (v := s[i]) is not None]
        if values:
            points.append((float(i + 1), combined(values)))
    return points


# --- labels ----------------------------------------------------------------------------------------------------------
def labels(found: Mapping[Place, Arms]) -> Any:
    """The label profile over rounds, stacked, mean over seeds: a row of panels for each start."""
    names = [arm for arm in PROFILED if any(arm in arms for arms in found.values())]
    profiles = {
        (place, arm): {label: dict(over_rounds(arms[arm].values(), f"profile/{label}")) for label in COUNTED}
        for place, arms in found.items()
        for arm in names
        if arm in arms
    }
    shown = [label for label in COUNTED if any(any(p.get(label, {}).values()) for p in profiles.values())]
    if not shown:
        return None
    figure, axes = panels(len(found) * len(names), width=3.3, height=2.7, columns=len(names))
    panel = iter(axes)
    for place in found:
        for arm in names:
            ax = next(panel)
            titled(ax, f'{words(arm)}, start "{place.start}"', grid=False)
            percent(ax)
            ax.margins(x=0)
            bottom: dict[float, float] = {}
            for label, heights in profiles.get((place, arm), {}).items():
                if label in shown and heights:
                    top = {r: bottom.get(r, 0.0) + h for r, h in heights.items()}
                    # One shape a label instead of a bar a round: a fifth of the SVG.
                    edges = [edge for r in heights for edge in (r - 0.5, r + 0.5)]
                    low, high = ([of.get(r, 0.0) for r in heights for _ in range(2)] for of in (bottom, top))
                    ax.fill_between(edges, low, high, linewidth=0, color=LABEL_COLOURS[label])
                    bottom |= top
            if not bottom:
                ax.text(0.5, 0.5, "no run yet", transform=ax.transAxes, ha="center", color=MUTED)
            if arm == names[0]:
                ax.set_ylabel("share of turns")
    from matplotlib.patches import Patch

    handles = [Patch(color=LABEL_COLOURS[label], label=words(label), linewidth=0) for label in reversed(shown)]
    figure.legend(handles=handles, loc="outside right center", frameon=False, handlelength=1)
    return figure


# --- cues ------------------------------------------------------------------------------------------------------------
def cues(found: Mapping[Place, Arms]) -> Any:
    """A row for each arm and cue, a cell for each round: the more seeds have it on, the darker."""
    from matplotlib.colors import to_rgb

    names = [arm for arm in _all_arms(found.values()) if arm in CLOSED_LOOP]
    rows: dict[tuple[str, str], float] = {}
    headings, y = [], 0.0
    for arm in names:
        runs = [run for arms in found.values() for run in arms.get(arm, {}).values()]
        headings.append((y, words(arm)))
        y += 1.0
        for cue in in_order({cue for run in runs for on in run["cues"] for cue in on}, FAILURE_LABELS):
            rows[arm, cue] = y
            y += 1.0
        y += 0.3
    if not rows:
        return None
    figure, axes = panels(len(found), width=4.4, height=0.9 + 0.19 * y, columns=len(found))
    for ax, (place, arms) in zip(axes, found.items(), strict=True):
        titled(ax, f'cues shown, start "{place.start}"', grid=False, x="round (darker: on in more seeds)")
        last = max((len(run["cues"]) for arm in names for run in arms.get(arm, {}).values()), default=1)
        for (arm, cue), at in rows.items():
            shares = cue_shares(arms.get(arm, {}).values(), cue)
            for first, length, share in _stretches(shares):
                shade = [1 - share * (1 - c) for c in to_rgb(LABEL_COLOURS.get(cue, MUTED))]
                ax.barh(at, length, left=first - 0.5, height=0.8, color=shade, linewidth=0)
            ax.barh(at, last, left=0.5, height=0.8, color="none", edgecolor=GRID, linewidth=0.6)
            if arm not in arms:
                ax.text(0.8, at, "no run yet", va="center", color=MUTED, fontsize=8)
        ax.set_xlim(0.5, last + 0.5)
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.tick_params(length=0, labelcolor=INK)
    ax = axes[0]
    ax.set_yticks(list(rows.values()), [words(cue) for _, cue in rows], fontsize=8)
    ax.set_ylim(y - 0.2, -0.8)
    figure.get_layout_engine().set(wspace=0.05)
    for at, name in headings:
        ax.text(
            -0.02, at, name, transform=ax.get_yaxis_transform(), ha="right", va="center", fontsize=9, fontweight="bold"
        )
    return figure


def cue_shares(runs: Iterable[Record], cue: str) -> list[float]:
    """For each round, the share of the runs in which the cue was shown."""
    active = [run["cues"] for run in runs]
    rounds = max(map(len, active), default=0)
    return [
        math.fsum(cue in on[i] for on in active if i < len(on)) / sum(i < len(on) for on in active)
        for i in range(rounds)
    ]


def _stretches(shares: Sequence[float]) -> list[tuple[int, int, float]]:
    """(first round, how many rounds, share) of each stretch of equal shares above zero."""
    found: list[tuple[int, int, float]] = []
    for r, share in enumerate(shares, 1):
        if found and found[-1][2] == share and found[-1][0] + found[-1][1] == r:
            found[-1] = (found[-1][0], found[-1][1] + 1, share)
        elif share > 0:
            found.append((r, 1, share))
    return found


# --- what is drawn ---------------------------------------------------------------------------------------------------
def _main(arms: Arms) -> list[str]:
    return [arm for arm in ARM_COLOURS if arm in arms]


def _all_arms(found: Iterable[Arms]) -> list[str]:
    """Every arm but vanilla that has a run, in the study's order."""
    return sorted({arm for arms in found for arm in arms} - {REFERENCE}, key=statistics.arm_order)


def _ceiling(share: float) -> float:
    """The next tenth above, at most 1."""
    return min(1.0, math.ceil(10 * share + 0.2) / 10)
