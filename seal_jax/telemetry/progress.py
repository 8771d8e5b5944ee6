"""The run on screen: a live table on a terminal, one line per round anywhere else, and the closing table."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from seal_jax.telemetry.compare import Comparison
from seal_jax.telemetry.style import CUED, LABEL_COLOURS, in_order, words
from seal_jax.types import EXCLUDED_LABELS, LABELS

_TICKS = "▁▂▃▄▅▆▇█"
Mode = Literal["auto", "live", "plain", "off"]
#: Seconds between two lines on an evaluation that is going on, where nothing can be redrawn.
PLAIN_EVERY_S = 30.0


class Progress:
    """Shows a run while it goes on.

    Args:
      rounds: how many rounds the run has in all.
      mode: "live" redraws a panel, "plain" prints a line per round, "off" prints nothing; "auto" is live on a
        terminal and plain elsewhere (a log file, a notebook's pipe, CI).

    `values` are the metrics that `RunRecorder.record` gets, under the same names.
    """

    def __init__(
        self, rounds: int, *, mode: Mode = "auto", console: Console | None = None, title: str = "SEAL"
    ) -> None:
        self.console = console if console is not None else Console()
        self.rounds, self.title = rounds, title
        self.mode: Mode = ("live" if self.console.is_terminal else "plain") if mode == "auto" else mode
        self._round = 0
        self._phase = ""
        self._evaluating, self._last_word = "", 0.0
        self._start = time.monotonic()
        self._first_round: int | None = None
        self._train: dict[str, Any] = {}
        self._evals: dict[str, dict[str, float]] = {}  # "<split>/<category or all>" -> {"before", "now"}
        self._history: dict[str, list[float]] = {}
        self._cues: tuple[str, ...] = ()
        self._live: Live | None = None
        if self.mode == "live":
            self._live = Live(self._view(), console=self.console, refresh_per_second=4, transient=False)
            self._live.start()

    # --- what the loop calls -----------------------------------------------------------------------------------------
    def phase(self, name: str) -> None:
        """What is going on now ("rollout", "update", ...). Nothing is printed in plain mode."""
        self._phase = name
        self._refresh()

    def round(self, round: int, values: Mapping[str, Any], cues: Sequence[str] = ()) -> None:
        """A round is done."""
        self._round, self._train, self._cues = round, dict(values), tuple(cues)
        if self._first_round is None:
            self._first_round = round
        for name, value in values.items():
            if name.startswith("train/success") and _finite(value):
                self._history.setdefault(name, []).append(float(value))
        self._refresh()
        if self.mode == "plain":
            self.console.print(Text(self.line()), soft_wrap=True)

    def evaluating(self, split: str, done: int, total: int) -> None:
        """How many of an evaluation's episodes are done. In plain mode a line now and then, none if it is quick."""
        self._phase = f"evaluating {split}: {done}/{total} episodes done"
        self._refresh()
        now = time.monotonic()
        if done == 0 or split != self._evaluating:
            self._evaluating, self._last_word = split, now
        if self.mode == "plain" and done < total and now - self._last_word >= PLAIN_EVERY_S:
            self._last_word = now
            self.console.print(Text(self._phase), soft_wrap=True)
        if done == total:
            self._evaluating, self._phase = "", "evaluation"

    def evaluation(
        self, split: str, values: Mapping[str, Any], round: int | None = None, *, protocol: str = "seal"
    ) -> None:
        """An evaluation is done; `values` are its `eval/<split>/...` metrics. The first one of a split is "before"."""
        prefix = f"eval/{split}/success"
        for name, value in values.items():
            if name == prefix or name.startswith(prefix + "/"):
                key = f"{split}/{name[len(prefix) + 1 :] or 'all'}"
                self._evals.setdefault(key, {"before": value})["now"] = value
        self._refresh()
        if self.mode == "plain":
            parts = [
                f"{name[len(prefix) + 1 :] or 'all'} {_percent(value)}"
                for name, value in sorted(values.items())
                if name == prefix or name.startswith(prefix + "/")
            ]
            at = "" if round is None else f"round {round}: "
            if not parts:
                return
            how = f"{'cues shown' if split.endswith(CUED) else 'bare interface'}, {protocol} protocol"
            self.console.print(Text(f"{at}evaluation on {split}, {how}: {', '.join(parts)}"), soft_wrap=True)

    def message(self, text: str) -> None:
        """A line of its own, above the live panel."""
        if self.mode != "off":
            self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._phase = "done" if self._round >= self.rounds else "stopped"
            self._live.update(self._view(), refresh=True)
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- the line and the panel --------------------------------------------------------------------------------------
    def line(self) -> str:
        """The round in one line of plain text."""
        v = self._train
        head = f"round {self._round}/{self.rounds}"
        parts = [f"{words(c)} {_percent(v[f'train/success/{c}'])}" for c in self._categories()]
        success = f"success {_percent(v.get('train/success'))}" + (f" ({', '.join(parts)})" if parts else "")
        seconds = " ".join(f"{name} {value:.1f}s" for name, value in self._seconds().items())
        cues = f"cues: {', '.join(self._cues)}" if self._cues else "no cues"
        worst = max(
            ((x, v.get(f"profile/{x}")) for x in LABELS if x not in EXCLUDED_LABELS | {"pass", "correct_abstention"}),
            key=lambda item: float(item[1]) if _finite(item[1]) else -1.0,
        )
        failure = f"mostly {words(worst[0])} {_percent(worst[1])}" if _finite(worst[1]) and worst[1] > 0 else ""
        return " | ".join(part for part in (head, success, failure, cues, seconds) if part)

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._view())

    def _view(self) -> Any:
        body: Any
        if self.console.width >= 110:
            body = Table.grid(padding=(0, 4))
            body.add_row(self._success_table(), self._label_bars())
        else:
            body = Group(self._success_table(), Text(), self._label_bars())
        footer = Text()
        footer.append("cues  ", style="dim")
        footer.append(", ".join(words(c) for c in self._cues) if self._cues else "none")
        footer.append("\ntime  ", style="dim")
        seconds = self._seconds()
        total = sum(seconds.values())
        footer.append("  ".join(f"{n} {s:.1f}s ({s / total:.0%})" for n, s in seconds.items()) if total > 0 else "-")
        return Panel(Group(self._header(), Text(), body, Text(), footer), title=self.title, border_style="cyan")

    def _header(self) -> Text:
        width = 24
        filled = round(width * self._round / self.rounds) if self.rounds else 0
        elapsed = time.monotonic() - self._start
        text = Text(f"round {self._round}/{self.rounds} ")
        text.append("━" * filled, style="cyan").append("━" * (width - filled), style="dim")
        text.append(f"  {_clock(elapsed)}")
        if self._first_round is not None and self._round < self.rounds:
            played = self._round - self._first_round + 1
            text.append(f"  about {_clock(elapsed / played * (self.rounds - self._round))} left", style="dim")
        if self._phase:
            text.append(f"  {self._phase}", style="bold")
        return text

    def _success_table(self) -> Table:
        splits = list(dict.fromkeys(key.split("/")[0] for key in self._evals))
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("success")
        table.add_column("training", justify="right")
        table.add_column("", min_width=10, no_wrap=True)
        for split in splits:
            table.add_column(split, justify="right")
        for category in ("all", *in_order({*self._categories(), *(k.split("/", 1)[1] for k in self._evals)} - {"all"})):
            name = "train/success" if category == "all" else f"train/success/{category}"
            cells = []
            for split in splits:
                found = self._evals.get(f"{split}/{category}")
                cells.append("" if found is None else f"{_percent(found['before'])} → {_percent(found['now'])}")
            table.add_row(
                words(category),
                _percent(self._train.get(name)),
                Text(_sparkline(self._history.get(name, [])), style="cyan"),
                *cells,
                style="bold" if category == "all" else None,
            )
        return table

    def _label_bars(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("label of the turns")
        table.add_column("", width=20, no_wrap=True)
        table.add_column("", justify="right")
        for label in LABELS:
            rate = self._train.get(f"profile/{label}")
            if _finite(rate) and rate > 0:
                bar = Text("█" * max(1, round(20 * rate)), style=LABEL_COLOURS[label])
                table.add_row(words(label), bar, _percent(rate))
        return table

    def _categories(self) -> list[str]:
        return in_order(n.removeprefix("train/success/") for n in self._train if n.startswith("train/success/"))

    def _seconds(self) -> dict[str, float]:
        found = {n.removeprefix("time/"): v for n, v in self._train.items() if n.startswith("time/") and _finite(v)}
        found.pop("round", None)
        return found


def closing_table(
    comparisons: Mapping[str, Sequence[Comparison]],
    *,
    shares: Mapping[str, float] | None = None,
    wall_s: float | None = None,
    compilations: int | None = None,
    peak_mib: float | None = None,
    notes: Sequence[str] = (),
    protocols: Mapping[str, str] | None = None,
) -> Group:
    """What a run ends with: success before and after per split and category, and what it cost. `console.print` it.

    Args:
      comparisons: {split: compare(before, after)}; e.g. "test" and "ood" (out of distribution).
      protocols: how the episodes of each split were played; "seal" where it says nothing.
      shares: share of each phase in the wall time (`PhaseTimer.shares`).
    """
    title = "Strict success, bare interface"
    if any(split.endswith(CUED) for split in comparisons):
        title += f"; of ...{CUED}, no score: cues shown"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    table.add_column("split")
    table.add_column("protocol")
    table.add_column("category")
    for name in ("tasks", "before", "after", "difference"):
        table.add_column(name, justify="right")
    for split, lines in comparisons.items():
        for i, line in enumerate(lines):
            bold = "bold" if line.category == "all" else None
            points = f"{100 * line.difference:+.1f}"
            if math.isfinite(line.stderr):
                points += f" ± {100 * line.stderr:.1f}"
            cells = (words(line.category), str(line.n), f"{line.before:.1%}", f"{line.after:.1%}", points)
            last = i == len(lines) - 1
            head = (split, (protocols or {}).get(split, "seal")) if i == 0 else ("", "")
            table.add_row(*head, *cells, style=bold, end_section=last)
    cost = []
    if wall_s is not None:
        cost.append(f"wall time {_clock(wall_s)}")
    if shares:
        cost.append(", ".join(f"{n} {s:.0%}" for n, s in sorted(shares.items(), key=lambda x: -x[1]) if s >= 0.005))
    if compilations is not None:
        cost.append(f"{compilations} compiled programs")
    if peak_mib is not None:
        cost.append(f"peak memory {peak_mib / 1024:.2f} GiB")
    legend = Text("difference in points, ± standard error of the paired difference over tasks", style="dim")
    compared = (table, legend) if comparisons else ()
    return Group(*compared, Text("; ".join(cost)), *(Text(note) for note in notes))


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _percent(value: Any) -> str:
    return f"{value:.0%}" if _finite(value) else "-"


def _sparkline(values: Sequence[float], width: int = 10) -> str:
    return "".join(_TICKS[min(7, int(8 * max(0.0, min(1.0, v))))] for v in values[-width:])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
