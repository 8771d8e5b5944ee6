"""The study as Markdown: the arm chosen on validation, all arms in short, results, one part at a time, categories,
mechanisms, label profiles, cues and what could have been seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from configs.toolbox import ARMS
from experiments.study import statistics
from experiments.study.jobs import SIZES, START_NAMES
from experiments.study.parts import PARTS
from experiments.study.records import COUNTED, Record
from experiments.study.statistics import REFERENCE, Arms, Estimate, Place, Power, Value, success
from seal_jax.telemetry.style import in_order, words
from seal_jax.types import FAILURE_LABELS

#: What a cell says where there is nothing to say.
NOTHING = "-"
_SPLITS = {"test": "test", "ood": "out of distribution"}
_INTRODUCTION = (
    "Shares in %, differences in points, paired by seed; [ ] and ± are 95 % t-intervals over seeds. Means are over an "
    "arm's own seeds, differences over those that both arms have. An arm "
    '"helps" or "hurts" where the interval of its test difference, over three seeds or more, leaves zero out. The arm '
    "chosen on validation, against vanilla on fresh seeds, is the study's one confirmatory comparison; all others are "
    "exploratory and uncorrected: of those without any effect, one in twenty is called so by chance. "
    "Scores are of the reported policy, that of the best validated round, greedy and without cues, but for "
    '"three cues shown" (the same three for all arms, on 100 of the test tasks). After an error: of '
    "the test episodes that met a refusal, which differ by arm; their number is the mean over seeds. Episodes to "
    "vanilla's last validation: to the first crossing, for vanilla too. Seconds are of training alone, and of whatever "
    "machines the runs had."
)


def report(records: list[Record]) -> str:
    """All tables, a section for each start and size that has vanilla; ends in a newline.

    Args:
      records: of finished runs, in any order; a study that is half-way has fewer rows and more dashes.

    Raises:
      ValueError: two records of one run, or no start and size with vanilla.
    """
    compared = statistics.choosing(records)
    found, confirming = statistics.places(compared), statistics.confirming(records)
    if not found and not confirming:
        return "No run is finished yet.\n"
    there = {arm for arms in (*found.values(), *confirming.values()) for arm in arms}
    parts = [_INTRODUCTION]
    parts += [
        f"Left out, since vanilla has no run there yet: start `{place.start}`, {place.size}."
        for place in statistics.without_vanilla(compared)
    ]
    parts.append("\n".join(["### The arms", "", *(f"- `{arm}`: {ARMS[arm].says}" for arm in ARMS if arm in there)]))
    for size in dict.fromkeys(place.size for place in found):
        parts += [f"### Chosen on validation, {size}", choice(found, confirming, size)]
        if short := in_short(found, size):
            parts += [f"### In short, {size}", short]
    for place, arms in found.items():
        parts += [f"### {heading(place)}", *section(arms)]
    for place, arms in confirming.items():
        parts += [f"### {heading(place)}, fresh seeds", *section(arms)]
    return "\n\n".join(part for part in parts if part) + "\n"


def section(arms: Arms) -> list[str]:
    """All tables of one start and size; some may be empty."""
    parts = [apart(arms), results(arms), one_part(arms), categories(arms), mechanisms(arms), profiles(arms), cues(arms)]
    return [*parts, power_note(statistics.power(arms))]


def heading(place: Place) -> str:
    return f"Start `{place.start}`, {place.size}"


# --- the arm chosen on validation ------------------------------------------------------------------------------------
def choice(found: Mapping[Place, Arms], confirming: Mapping[Place, Arms], size: str = SIZES[0]) -> str:
    """Which arm it is, and how it compares with vanilla from each start: on the seeds that chose it, and on fresh ones,
    which alone say how much better it is, and whether the target is met."""
    best = statistics.chosen(found, size)
    if best is None:
        return "Not all closed-loop arms are finished, so there is no choice yet."
    head = ["start", "seeds", "vanilla", f"`{best.arm}`", "test - vanilla", "verdict", "ood - vanilla"]
    head += ["episodes to vanilla's last validation (vanilla)"]
    lines = [head, ["---"] * len(head)]
    for where, runs in (("fresh", confirming), ("those of the choice", found)):
        for start in START_NAMES:
            arms = runs.get(Place(start, size), {})
            if best.arm not in arms:
                continue
            test, ood = (statistics.difference(arms, best.arm, success(split)) for split in _SPLITS)
            seeds = statistics.shared_seeds(arms, best.arm)
            scores = [
                _share(statistics.mean({s: arms[arm][s] for s in seeds}, success("test")), half=False)
                for arm in (REFERENCE, best.arm)
            ]
            count = f"{len(seeds)}, {where}"
            verdict = statistics.verdict(test) if runs is confirming else ""
            episodes = f"{_episodes(arms, best.arm)} ({_episodes(arms, REFERENCE)})"
            lines.append([f"`{start}`", count, *scores, _gain(test), verdict, _gain(ood), episodes])
    return (
        f"`{best.arm}` has the highest validation score of the {len(statistics.CHOOSABLE)} closed-loop arms: "
        f"{100 * best.validation:.1f} % (each run's best validated round, mean over {_count(best.seeds, 'seed')} and "
        f"all starts). The seeds of the choice flatter it; fresh ones do not.\n\n{_markdown(lines)}\n\n"
        f"Target (on {statistics.TARGET_SEEDS} fresh seeds at least {100 * statistics.TARGET:g} points above vanilla "
        "from every start, both intervals above zero, none out of distribution wholly below): "
        f"**{statistics.target(confirming, best.arm, size)}**."
    )


def apart(arms: Arms) -> str:
    """The runs that are no pairs with vanilla's; empty where there are none."""
    named = ", ".join(f"`{arm}` of seed {seed}" for arm, seed in statistics.begun_apart(arms))
    if not named:
        return ""
    return f"**Not from the policy that vanilla began with**, as their first rounds show, and so no pairs: {named}."


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


# --- in short --------------------------------------------------------------------------------------------------------
def in_short(found: Mapping[Place, Arms], size: str = SIZES[0]) -> str:
    """A row for each arm of this size, its starts side by side: what it scored, against vanilla, and what it learned to
    repair; empty where only other starts have runs."""
    starts = {start: arms for start in START_NAMES if (arms := found.get(Place(start, size)))}
    if not starts:
        return ""
    named = sorted({arm for arms in starts.values() for arm in arms}, key=statistics.arm_order)
    columns = ["test", "- vanilla", "repairs"]

    def cells(arms: Arms, arm: str) -> list[str]:
        if arm not in arms:
            return [NOTHING] * len(columns)
        gain = statistics.difference(arms, arm, success("test"))
        verdict = "" if (v := statistics.verdict(gain)) == "not shown" else f" {v}"
        test = _share(statistics.mean(arms[arm], success("test")), half=False)
        return [test, "" if arm == REFERENCE else _gain(gain) + verdict, _change(*repairs(arms[arm].values(), "bare"))]

    def row(arm: str) -> list[str]:
        return [cell for arms in starts.values() for cell in cells(arms, arm)]

    text = (
        "Test success, the difference to vanilla, and bare repairs: the share of turns with a refused call that rows "
        "without cues then got right, in the first → last third of training."
    )
    head = [f"`{start}`: {name}" for start in starts for name in columns]
    return f"{text}\n\n{_table(['part', 'arm', *head], named, row)}"


# --- (a) results -----------------------------------------------------------------------------------------------------
def results(arms: Arms) -> str:
    """What each arm reached, how surely, and at what cost."""
    head = ["part", "arm", "seeds", "test", "- vanilla", "verdict", "ood", "- vanilla"]
    head += ["three cues shown", "after an error", "reported round", "episodes to vanilla's last validation"]
    head += ["episodes", "k sampled tokens", "seconds"]

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
            _after_error(runs),
            NOTHING if (r := statistics.mean(runs, lambda run: run["reported_round"])) is None else f"{r.mean:.0f}",
            _episodes(arms, arm),
            *(_cost(runs, name, unit) for name, unit in (("episodes", 1), ("sampled_tokens", 1e3), ("seconds", 1))),
        ]

    return _table(head, arms, row)


def _after_error(runs: Mapping[int, Record]) -> str:
    count = statistics.mean(runs, lambda run: run["n_error"])
    of = "" if count is None else f" of {count.mean:.0f}"
    found = statistics.mean(runs, lambda run: run["after_error"])
    return NOTHING if found is None else _share(found, half=False) + of


def _episodes(arms: Arms, arm: str) -> str:
    needed = statistics.episodes_to_vanilla(arms, arm)
    if needed is None:
        return NOTHING
    if math.isinf(needed):
        return "not reached"
    first = statistics.validation(arms[arm][s] for s in statistics.shared_seeds(arms, arm))[0][0]
    return f"{'<= ' if needed == first else ''}{needed:,.0f}"


def _cost(runs: Mapping[int, Record], name: str, unit: float) -> str:
    found = statistics.mean(runs, lambda run: run["cost"][name])
    return NOTHING if found is None else f"{found.mean / unit:,.0f}"


# --- (b) one part at a time ------------------------------------------------------------------------------------------
def one_part(arms: Arms) -> str:
    """What each part of the method adds (`PARTS`); empty where no two arms differ in one."""
    lines = [["what it adds", "with it", "without", "seeds", "test", "verdict", "ood"], ["---"] * 7]
    for part in (part for part in PARTS if part.with_it in arms):
        test, ood = (statistics.difference(arms, part.with_it, success(split), part.without) for split in _SPLITS)
        if test is not None:
            cells = [str(test.n), _gain(test), statistics.verdict(test), _gain(ood)]
            lines.append([part.what, f"`{part.with_it}`", f"`{part.without}`", *cells])
    if len(lines) == 2:
        return ""
    return f"One part at a time: the arm with it minus the arm without.\n\n{_markdown(lines)}"


# --- (c) categories --------------------------------------------------------------------------------------------------
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
        if not any(success(split)(run) for runs in arms.values() for run in runs.values()):
            tables.append(f"By category, {title}: no arm solved anything.")
            continue

        def row(arm: str, names: Sequence[str] = names, split: str = split) -> list[str]:
            return [_gain(statistics.difference(arms, arm, success(split, c))) for c in names]

        tables.append(f"Difference to vanilla by category, {title}:")
        tables.append(_table(["part", "arm", *map(words, names)], others, row))
    return "\n\n".join(tables)


# --- (d) mechanisms --------------------------------------------------------------------------------------------------
def mechanisms(arms: Arms) -> str:
    """How each arm learned: means over rounds and seeds, and repairs in the first and the last third of the rounds."""
    head = ["part", "arm", "groups with signal", "all-fail groups", "bare repairs", "cued repairs", "cued - bare score"]
    head += ["full rows", "weight gain", "advantage on"]

    def row(arm: str) -> list[str]:
        runs = arms[arm]
        gain = _over_rounds(runs, "weight/gain", taught=True)
        own = "*" if _own_rewards(arm) else ""
        groups = (_share(_over_rounds(runs, f"groups/{name}"), half=False) for name in ("informative", "all_fail"))
        bonus = statistics.mean(runs, lambda run: run["cued_bonus"])
        return [
            *(cell if cell == NOTHING else cell + own for cell in groups),
            *(_change(*repairs(runs.values(), which)) for which in ("bare", "cued")),
            NOTHING if bonus is None else f"{100 * bonus.mean:+.1f}",
            _share(_over_rounds(runs, "train/context_limit_cued"), half=False),
            NOTHING if gain is None else f"{gain.mean:.2f}",
            _largest(runs) if _says_by_label(arm) else NOTHING,
        ]

    text = (
        "What happened in training. Groups: mean over rounds (signal: their rewards differ). Repairs: turns with a "
        "refused call that was made again and taken, of all with one, in the first → last third of the rounds, of rows "
        "without and with cues. Cued - bare score: on the test tasks that the reported policy played both ways. Full "
        "rows: of rows with cues, those that ended for want of room. Weight gain: of the advantages' sizes "
        "(1 = plain GRPO), in rounds with a signal. Advantage on: the labels with the largest shares of it there."
    )
    notes = []
    if own := [f"`{arm}`" for arm in arms if _own_rewards(arm)]:
        notes.append(f"\\* {', '.join(own)}: counted on its own rewards.")
    if longer := [f"`{arm}`" for arm in arms if not statistics.setting(arm, "stop_failed_turns", True)]:
        notes.append(f"{', '.join(longer)}: plays on after a failed turn, so its turns, repairs and labels are others.")
    return "\n\n".join([text, _table(head, arms, row), *notes])


def _own_rewards(arm: str) -> bool:
    """Its groups differ, and fail, by another reward than the others' (the success of the episode)."""
    return statistics.setting(arm, "reward") is not None


def _says_by_label(arm: str) -> bool:
    """Its advantages are recorded by what was diagnosed; else by labels dealt at random, or by tags of its own."""
    dealt = statistics.setting(arm, "loss.shuffle_labels", False)
    return not dealt and statistics.setting(arm, "loss.reweight") != "release"


def repairs(runs: Iterable[Record], which: str) -> tuple[float | None, float | None]:
    """The share of turns with a refused call in which it was then taken, in the first and in the last third of the
    rounds (at least one), counted over all runs; `which` rows: "bare" or "cued". None where no such turn met a
    refusal."""
    sums = [[0.0, 0.0], [0.0, 0.0]]
    for run in runs:
        met, repaired = (run["curves"].get(f"refused/{which}{end}", []) for end in ("", "/repaired"))
        third = max(1, len(met) // 3)
        for total, part in zip(sums, (slice(None, third), slice(-third, None)), strict=True):
            total[0] += math.fsum(v or 0.0 for v in met[part])
            total[1] += math.fsum(v or 0.0 for v in repaired[part])
    first, last = (total[1] / total[0] if total[0] else None for total in sums)
    return first, last


def _over_rounds(runs: Mapping[int, Record], curve: str, *, taught: bool = False) -> Estimate | None:
    def value(record: Record) -> float | None:
        values = statistics.present(record, curve, taught=taught)
        return math.fsum(values) / len(values) if values else None

    return statistics.mean(runs, value)


def _largest(runs: Mapping[int, Record], most: int = 3) -> str:
    shares = {label: _over_rounds(runs, f"advantage_mass/{label}", taught=True) for label in COUNTED}
    known = sorted(((x.mean, label) for label, x in shares.items() if x and x.mean > 0), key=lambda pair: -pair[0])
    return ", ".join(f"{words(label)} {100 * share:.0f}" for share, label in known[:most]) or NOTHING


# --- (e) label profiles ----------------------------------------------------------------------------------------------
def profiles(arms: Arms) -> str:
    """What turns were diagnosed as in the first and in the last round, mean over seeds."""

    def end(label: str, which: int) -> Value:
        return lambda run: values[which] if (values := run["curves"].get(f"profile/{label}")) else None

    def rate(arm: str, label: str, which: int) -> float | None:
        found = statistics.mean(arms[arm], end(label, which))
        return None if found is None else found.mean

    shown = [label for label in COUNTED if any(rate(arm, label, end) for arm in arms for end in (0, -1))]
    if not shown:
        return ""

    def row(arm: str) -> list[str]:
        return [_change(rate(arm, label, 0), rate(arm, label, -1)) for label in shown]

    text = (
        "Turns by label, first → last round, of rows without cues (in rounds that had none of these: of all rows), at "
        "the training temperature."
    )
    return f"{text}\n\n{_table(['part', 'arm', *map(words, shown)], arms, row)}"


# --- (f) cues --------------------------------------------------------------------------------------------------------
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


# --- (g) power -------------------------------------------------------------------------------------------------------
def power_note(found: Power | None) -> str:
    """How fine the comparison is, as one short paragraph."""
    if found is None:
        return "How fine the comparison is cannot be said yet: no arm has two seeds in common with vanilla."
    points, tasks = f"{100 * found.delta:g}", found.tasks
    if found.seeds <= found.seeds_now:
        seeds = f"{found.seeds} seeds are enough to see {points} points; up to {found.seeds_now} were run."
    else:
        seeds = f"seeing {points} points takes {found.seeds} seeds; up to {found.seeds_now} were run."
        if tasks:
            more = "no number" if tasks.needed is None else f"at least {tasks.needed:,}"
            seeds += (
                f" More tasks would bring that down to {tasks.seeds} seeds at best; {more} of them would do with "
                f"{found.seeds_now} seeds."
            )
    extremes = ""
    if len(found.spreads) > 1:
        least, most = (f(found.spreads, key=lambda arm: found.spreads[arm]) for f in (min, max))
        extremes = f"; from {100 * found.spreads[least]:.1f}, `{least}`, to {100 * found.spreads[most]:.1f}, `{most}`"
        target = statistics.seeds_needed(found.spreads[most], statistics.TARGET)
        seeds += f" Seeing {100 * statistics.TARGET:g} points of `{most}` takes {target}."
    luck = f", of which the luck of {tasks.n} test tasks can be up to {100 * tasks.sampling:.1f}" if tasks else ""
    return (
        "What can be seen: differences to vanilla vary between seeds with a standard deviation of "
        f"{100 * found.sd:.1f} points (pooled over {found.pairs} differences, which share vanilla's runs{extremes})"
        f"{luck}. At 80 % power and a two-sided 5 %, {seeds} All seeds are tested on the same tasks, so none of this "
        "tells what other tasks would show."
    )


# --- cells -----------------------------------------------------------------------------------------------------------
def _table(head: Sequence[str], arms: Iterable[str], row: Callable[[str], Sequence[str]]) -> str:
    """Markdown; the first two columns are the part (named once) and the arm."""
    lines, part = [head, ["---"] * len(head)], ""
    for arm in arms:
        new = statistics.part_of(arm)
        lines.append([new if new != part else "", f"`{arm}`", *row(arm)])
        part = new
    return _markdown(lines)


def _markdown(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


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
