"""Colours and names shared by the figures and the live display, so a label looks the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable

from seal_jax.types import CATEGORIES, LABELS

#: Successes are greens, failures warm or saturated, excluded labels greys.
LABEL_COLOURS: dict[str, str] = {
    "pass": "#2a9d60",
    "correct_abstention": "#8fd3a8",
    "invalid_tool_call": "#7f4fa5",
    "argument_mismatch": "#e8871e",
    "state_mismatch": "#c8443a",
    "recovery_failure": "#3b73b9",
    "missing_tool_call": "#f2c230",
    "response_mismatch": "#a33b74",
    "spurious_tool_call": "#4dbcc4",
    "not_reached": "#bdbdbd",
    "env_error": "#5f5f5f",
}
CATEGORY_COLOURS: dict[str, str] = {
    "base": "#3b73b9",
    "miss_func": "#e8871e",
    "miss_param": "#7f4fa5",
    "long_context": "#2a9d60",
}
_SPARE = ("#c8443a", "#a33b74", "#4dbcc4", "#f2c230", "#5f5f5f")
#: How the name of an evaluation with cues ends; all others have the bare interface.
CUED = "_cued"
INK, MUTED, GRID = "#222222", "#6f6f6f", "#e6e6e6"


def category_colours(categories: Iterable[str]) -> dict[str, str]:
    """A colour per category; those of other suites get spare ones in order."""
    spare = [c for c in categories if c not in CATEGORY_COLOURS]
    return {**CATEGORY_COLOURS, **{c: _SPARE[i % len(_SPARE)] for i, c in enumerate(spare)}}


def in_order(names: Iterable[str], known: tuple[str, ...] = CATEGORIES) -> list[str]:
    """Known names in their fixed order, then the others alphabetically."""
    names = set(names)
    return [n for n in known if n in names] + sorted(names - set(known))


def words(name: str) -> str:
    """`missing_tool_call` as people read it."""
    return name.replace("_", " ")


__all__ = ["CATEGORIES", "CATEGORY_COLOURS", "LABELS", "LABEL_COLOURS", "category_colours", "in_order", "words"]
