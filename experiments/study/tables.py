"""The study as Markdown: results, categories, mechanisms, label profiles, cues and what could have been seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from experiments.study import statistics
from experiments.study.records import Record
from experiments.study.statistics import REFERENCE, Arms, Estimate, Place, Power, Value, success
from seal_jax.telemetry.style import in_order, words
from seal_jax.types import EXCLUDED_LABELS, FAILURE_LABELS, LABELS

#: What a cell says where there is nothing to say.
NOTHING = "-"
_SPLITS = {"test": "test", "ood": "out of distribution"}
_COUNTED = [label for label in LABELS if label not in EXCLUDED_LABELS]
_INTRODUCTION = (
    "Shares in %, differences to vanilla in points, paired by seed; [ ] and ± are 95 % t-intervals over seeds. An arm "
    '"helps" or "hurts" where the interval of its test difference leaves zero out; of twenty arms that do neither, one '
    "is expected to seem to. Scores are greedy and without cues, but for `cued`."
)


def report(records: list[Record], tasks: int = 400) -> str:
    """All tables, a section for each start and size; ends in a newline.

    Args:
      records: of finished runs, in any order; a study that is half-way has fewer rows and more dashes.
      tasks: how many tasks the test split had (all 400 of the toolbox's), for the power note.

    Raises:
      ValueError: two records of one run, or a start and size without vanilla.
    """
    found = statistics.places(records)
    if not found:
        return "No run is finished yet.\n"
    parts = [_INTRODUCTION]
    for place, arms in found.items():
        parts.append(f"### {heading(place)}")
        parts += [results(arms), categories(arms), mechanisms(arms), profiles(arms), cues(arms)]
        parts.append(power_note(statistics.power(arms, tasks)))
    return "\n\n".join(part for part in parts if part) + "\n"


def heading(place: Place) -> str:
    return f"Start `{place.start}`, {place.size}"


# --- (a) results -----------------------------------------------------------------------------------------------------
def results(arms: Arms) -> str:
    """What each arm reached, how surely, and at what cost."""
    head = ["part", "arm", "seeds", "test", "- vanilla", "verdict", "ood", "- vanilla", "cued", "after an error"]
    head += ["episodes to vanilla's last validation", "episodes", "k sampled tokens", "seconds"]

    def row(arm: str) -> list[str]:
        runs = arms[arm]
        gains = {split: statistics.difference(arms, arm, success(split)) for split in _SPLITS}
        other = arm != REFERENCE
        return [
            str(len(runs)),
            _share(statistics.mean(runs, success("test"))),
            _gain(gains["test"]) if other else "",
            statistics.verdict(gains["test"]) if other else "",
            _share(statistics.mean(runs, success("ood"))),
            _gain(gains["ood"]) if other else "",
            _share(statistics.mean(runs, success("test_cued"))),
            _share(statistics.mean(runs, lambda run: run["after_error"])),
            _episodes(arms, arm),
            *(_cost(runs, name, unit) for name, unit in (("episodes", 1), ("sampled_tokens", 1e3), ("seconds", 1))),
        ]

    return _table(head, arms, row)


def _episodes(arms: Arms, arm: str) -> str:
    needed = statistics.episodes_to_vanilla(arms, arm)
    if needed is None:
        return NOTHING
    if math.isinf(needed):
        return "not reached"
    first = statistics.validation(run for s, run in arms[arm].items() if s in arms[REFERENCE])[0][0]
    return f"{'<= ' if needed == first else ''}{needed:,.0f}"


def _cost(runs: Mapping[int, Record], name: str, unit: float) -> str:
    found = statistics.mean(runs, lambda run: run["cost"][name])
    return NOTHING if found is None else f"{found.mean / unit:,.0f}"


# --- (b) categories --------------------------------------------------------------------------------------------------
def categories(arms: Arms) -> str:
    """The difference to vanilla in every category, one table a split; empty where vanilla stands alone."""
    others = {arm: runs for arm, runs in arms.items() if arm != REFERENCE}
    tables = []
    for split, title in _SPLITS.items():
        names = in_order(
            {c for runs in arms.values() for run in runs.values() for c in run["by_category"].get(split, ())}
        )
        if not names or not others:
            continue

        def row(arm: str, names: Sequence[str] = names, split: str = split) -> list[str]:
            return [_gain(statistics.difference(arms, arm, success(split, c))) for c in names]

        tables.append(f"Difference to vanilla by category, {title}:")
        tables.append(_table(["part", "arm", *map(words, names)], others, row))
    return "\n\n".join(tables)


# --- (c) mechanisms --------------------------------------------------------------------------------------------------
def mechanisms(arms: Arms) -> str:
    """How each arm learned: means over rounds and seeds, and repairs in the first and the last third of the rounds."""
    head = ["part", "arm", "groups with signal", "all-fail groups", "bare repairs", "cued repairs", "cued - bare score"]
    head += ["weight gain", "advantage on"]

    def row(arm: str) -> list[str]:
        runs = arms[arm]
        gain = _over_rounds(runs, "weight/gain")
        bonus = statistics.mean(runs, cued_bonus)
        return [
            *(_share(_over_rounds(runs, f"groups/{name}"), half=False) for name in ("informative", "all_fail")),
            *(_change(*repairs(runs.values(), which)) for which in ("bare", "cued")),
            NOTHING if bonus is None else f"{100 * bonus.mean:+.1f}",
            NOTHING if gain is None else f"{gain.mean:.2f}",
            _largest(runs),
        ]

    text = (
        "What happened in training. Groups: mean over rounds (signal: their rewards differ). Repairs: turns with a "
        "refused call that were passed, of all with one, in the first → last third of the rounds, of rows without and "
        "with cues. Cued - bare score: of the final policy on test. Weight gain: of the advantages' sizes (1 = plain "
        "GRPO). Advantage on: the labels with the largest shares of it."
    )
    return f"{text}\n\n{_table(head, arms, row)}"


def repairs(runs: Iterable[Record], which: str) -> tuple[float | None, float | None]:
    """The share of turns with a refused call that were passed in the first and in the last third of the rounds (at
    least one), counted over all runs; `which` rows: "bare" or "cued". None where no such turn met a refusal."""
    sums = [[0.0, 0.0], [0.0, 0.0]]
    for run in runs:
        met, passed = (run["curves"].get(f"refused/{which}{end}", []) for end in ("", "/passed"))
        third = max(1, len(met) // 3)
        for total, part in zip(sums, (slice(None, third), slice(-third, None)), strict=True):
            total[0] += math.fsum(v or 0.0 for v in met[part])
            total[1] += math.fsum(v or 0.0 for v in passed[part])
    first, last = (total[1] / total[0] if total[0] else None for total in sums)
    return first, last


def cued_bonus(record: Record) -> float | None:
    """How much better the reported policy is on test where cues are shown, a share."""
    cued, bare = (record["success"].get(split) for split in ("test_cued", "test"))
    return None if cued is None or bare is None else cued - bare


def _over_rounds(runs: Mapping[int, Record], curve: str) -> Estimate | None:
    def value(record: Record) -> float | None:
        values = statistics.present(record, curve)
        return math.fsum(values) / len(values) if values else None

    return statistics.mean(runs, value)


def _largest(runs: Mapping[int, Record], most: int = 3) -> str:
    shares = {label: _over_rounds(runs, f"advantage_mass/{label}") for label in _COUNTED}
    known = sorted(((x.mean, label) for label, x in shares.items() if x and x.mean > 0), key=lambda pair: -pair[0])
    return ", ".join(f"{words(label)} {100 * share:.0f}" for share, label in known[:most]) or NOTHING


# --- (d) label profiles ----------------------------------------------------------------------------------------------
def profiles(arms: Arms) -> str:
    """What turns were diagnosed as in the first and in the last round, mean over seeds."""

    def end(label: str, which: int) -> Value:
        return lambda run: values[which] if (values := run["curves"].get(f"profile/{label}")) else None

    def rate(arm: str, label: str, which: int) -> float | None:
        found = statistics.mean(arms[arm], end(label, which))
        return None if found is None else found.mean

    shown = [label for label in _COUNTED if any(rate(arm, label, end) for arm in arms for end in (0, -1))]
    if not shown:
        return ""

    def row(arm: str) -> list[str]:
        return [_change(rate(arm, label, 0), rate(arm, label, -1)) for label in shown]

    text = (
        "Turns by label, first → last round, of rows without cues (in rounds that had none of these: of all rows), at "
        "the training temperature."
    )
    return f"{text}\n\n{_table(['part', 'arm', *map(words, shown)], arms, row)}"


# --- (e) cues --------------------------------------------------------------------------------------------------------
def cues(arms: Arms) -> str:
    """The share of rounds in which each cue was shown on some row, mean over seeds; arms without any are only named."""
    seen = {arm: {cue for run in runs.values() for on in run["cues"] for cue in on} for arm, runs in arms.items()}
    with_cues = {arm: runs for arm, runs in arms.items() if seen[arm]}
    without = [f"`{arm}`" for arm in arms if not seen[arm]]
    none = f"No cue in any round: {', '.join(without)}." if without else ""
    if not with_cues:
        return none
    names = in_order(set().union(*seen.values()), FAILURE_LABELS)

    def active(cue: str) -> Value:
        return lambda run: sum(cue in on for on in run["cues"]) / len(run["cues"]) if run["cues"] else None

    def row(arm: str) -> list[str]:
        return [_share(statistics.mean(with_cues[arm], active(cue)), half=False, digits=0) for cue in names]

    table = _table(["part", "arm", *map(words, names)], with_cues, row)
    return "\n\n".join(filter(None, ["Rounds in which a cue was shown:", table, none]))


# --- (f) power -------------------------------------------------------------------------------------------------------
def power_note(found: Power | None) -> str:
    """How fine the comparison is, as one short paragraph."""
    if found is None:
        return "How fine the comparison is cannot be said yet: no arm has two seeds in common with vanilla."
    points = f"{100 * found.delta:g}"
    if found.seeds <= found.seeds_now:
        seeds = f"{found.seeds} seeds are enough to see {points} points; up to {found.seeds_now} were run."
    else:
        more = "no number" if found.tasks_needed is None else f"at least {found.tasks_needed:,}"
        seeds = (
            f"seeing {points} points takes {found.seeds} seeds; up to {found.seeds_now} were run. More tasks would "
            f"bring that down to {found.seeds_all_tasks} seeds at best; {more} of them would do with "
            f"{found.seeds_now} seeds."
        )
    return (
        "What can be seen: differences to vanilla vary between seeds with a standard deviation of "
        f"{100 * found.sd:.1f} points (pooled over {found.pairs} pairs), of which the luck of {found.tasks} test tasks "
        f"can be up to {100 * found.sampling:.1f}. At 80 % power and a two-sided 5 %, {seeds} All seeds are tested on "
        "the same tasks, so none of this tells what other tasks would show."
    )


# --- cells -----------------------------------------------------------------------------------------------------------
def _table(head: Sequence[str], arms: Iterable[str], row: Callable[[str], Sequence[str]]) -> str:
    """Markdown; the first two columns are the part (named once) and the arm."""
    lines, part = [head, ["---"] * len(head)], ""
    for arm in arms:
        new = statistics.part_of(arm)
        lines.append([new if new != part else "", f"`{arm}`", *row(arm)])
        part = new
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _change(first: float | None, last: float | None) -> str:
    ends = [NOTHING if share is None else f"{100 * share:.0f}" for share in (first, last)]
    return NOTHING if first is None and last is None else " → ".join(ends)


def _share(found: Estimate | None, *, half: bool = True, digits: int = 1) -> str:
    if found is None:
        return NOTHING
    spread = NOTHING if found.half is None else f"{100 * found.half:.1f}"
    return f"{100 * found.mean:.{digits}f}" + (f" ± {spread}" if half else "")


def _gain(found: Estimate | None) -> str:
    if found is None:
        return NOTHING
    ends = NOTHING if found.interval is None else ", ".join(f"{100 * x:+.1f}" for x in found.interval)
    return f"{100 * found.mean:+.1f} [{ends}]"
