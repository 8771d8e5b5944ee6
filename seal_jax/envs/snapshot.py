"""Structural snapshots of tool state: what changed in a turn, and how two states differ.

A snapshot is a plain copy (dicts, lists, frozensets, scalars, `Node`s) of a value, cut loose from the live objects,
so it can be kept over a turn and compared with `==`. Strings are shared, not copied, which is what makes snapshots
of long-context worlds cheap. Private attributes (`_...`) are left out, as the state check leaves them out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

_SCALARS = frozenset({str, int, float, bool, bytes, type(None), complex})


@dataclass(frozen=True, slots=True)
class Node:
    """Snapshot of an object with attributes: its class name and its public attributes."""

    kind: str
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BackReference:
    """Stands where a value contains one of the values that enclose it: the one at this depth."""

    depth: int


def public_attributes(instance: object) -> dict[str, Any]:
    """The live public attributes of a tool instance: what the state check compares."""
    return {name: value for name, value in vars(instance).items() if not name.startswith("_")}


#: A link from a part up to what holds it is not content; following it would copy whole trees again and again.
_UPWARD_LINKS = frozenset({"parent"})
#: Far beyond any honest state (the largest BFCL one has about 2,000 values); shared folders can grow as 2**calls.
#: Strings count as one, however long: a tool only stores what it was given, so the text of a state is bounded by the
#: text of the calls, and by what an executor lets a tool answer where one call's result is another's argument.
MAX_VALUES = 200_000
#: Containers inside one another; a folder counts twice, with its dict of contents. A number of its own, because how far
#: Python could go depends on who calls.
MAX_DEPTH = 100


class StateTooLarge(Exception):
    """A state holds more than MAX_VALUES values or is nested deeper than MAX_DEPTH: it is not copied, not compared."""


def snapshot(value: Any) -> Any:
    """Copies `value` into plain, comparable data; raises StateTooLarge. An object that (through others) contains
    itself is copied once and stands as a `BackReference` below."""
    return value if type(value) in _SCALARS else _Copier().copy(value)


class _Copier:
    def __init__(self) -> None:
        self.values = 1
        self.enclosing: dict[int, int] = {}  # id -> depth of the containers being copied

    def copy(self, value: Any) -> Any:
        """Copies a value that is no scalar. Scalars are passed on where they stand: most values are some."""
        here = id(value)
        if here in self.enclosing:
            return BackReference(self.enclosing[here])
        parts: Mapping[Any, Any] | None = None
        if isinstance(value, dict):
            parts = value
        elif isinstance(value, set | frozenset):
            return frozenset(value)
        elif not isinstance(value, list | tuple):
            if isinstance(value, type) or not hasattr(value, "__dict__"):
                return value  # datetimes, decimals and other values without attributes of their own: immutable
            parts = {k: v for k, v in public_attributes(value).items() if k not in _UPWARD_LINKS}
        self.values += len(value if parts is None else parts)
        if self.values > MAX_VALUES:
            raise StateTooLarge(f"more than {MAX_VALUES} values")
        if len(self.enclosing) == MAX_DEPTH:
            raise StateTooLarge(f"nested deeper than {MAX_DEPTH}")
        self.enclosing[here] = len(self.enclosing)
        copy, scalars = self.copy, _SCALARS
        try:
            if parts is None:
                return [v if type(v) in scalars else copy(v) for v in value]
            copied = {k: v if type(v) in scalars else copy(v) for k, v in parts.items()}
            return copied if parts is value else Node(type(value).__name__, copied)
        finally:
            del self.enclosing[here]


#: One elementary difference: where, what kind, and (for values) what stands on each side or how far apart they are.
Difference = tuple[Hashable, ...]


def differences(model: Any, reference: Any) -> frozenset[Difference]:
    """The elementary differences between two snapshots.

    Made so that a difference which merely persists gives the same elements in the next turn, although both sides went
    on changing in the same way: dicts and objects are compared key by key; lists by which items one side has and the
    other lacks; two numbers by their distance (both counters of 1 and 2 going up by one stay the same difference).
    """
    found: set[Difference] = set()
    _differ(model, reference, (), found)
    return frozenset(found)


def _differ(model: Any, reference: Any, path: tuple[Hashable, ...], found: set[Difference]) -> None:
    if model is reference or _same(model, reference):
        return
    if isinstance(model, Node) and isinstance(reference, Node) and model.kind == reference.kind:
        _differ_mapping(model.attributes, reference.attributes, path, found)
    elif isinstance(model, dict) and isinstance(reference, dict):
        _differ_mapping(model, reference, path, found)
    elif isinstance(model, list) and isinstance(reference, list):
        extra, lacking = _items_apart(model, reference)
        found.update((*path, "model_only", x) for x in extra)
        found.update((*path, "reference_only", x) for x in lacking)
        if not extra and not lacking:
            found.add((*path, "order", repr(model), repr(reference)))
    elif _is_number(model) and _is_number(reference):
        found.add((*path, "distance", _distance(model, reference)))
    else:
        found.add((*path, "value", repr(model), repr(reference)))


def _differ_mapping(
    model: Mapping[Any, Any], reference: Mapping[Any, Any], path: tuple[Hashable, ...], found: set[Difference]
) -> None:
    for key in model.keys() - reference.keys():
        found.add((*path, key, "model_only", repr(model[key])))
    for key in reference.keys() - model.keys():
        found.add((*path, key, "reference_only", repr(reference[key])))
    for key in model.keys() & reference.keys():
        _differ(model[key], reference[key], (*path, key), found)


def _items_apart(model: list[Any], reference: list[Any]) -> tuple[list[str], list[str]]:
    """Items (as text, numbered when repeated) that only one of two lists holds, as multisets."""

    def keyed(items: list[Any]) -> dict[tuple[str, int], str]:
        seen: dict[str, int] = {}
        out = {}
        for item in items:
            text = repr(item)
            seen[text] = seen.get(text, 0) + 1
            out[text, seen[text]] = f"{text} #{seen[text]}"
        return out

    left, right = keyed(model), keyed(reference)
    return [left[k] for k in left.keys() - right.keys()], [right[k] for k in right.keys() - left.keys()]


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # a value whose comparison breaks is not equal to anything
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _distance(a: int | float, b: int | float) -> Hashable:
    try:
        return round(a - b, 6)
    except (OverflowError, ValueError):  # int too large for a float, inf - inf
        return f"{a!r} {b!r}"
