"""What the docs demand of each argument of a tool: required or not, type, allowed values, written format.

Real docs say most of it in prose: BFCL's multi-turn docs have no `enum` and no `format` key at all (the release looked
for an `enum` key, so its hint never fired). Everything here is read from the tool's own doc, so it may be told to the
policy, and the policy's own call may be held against it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seal_jax.interface.settings import SCHEMA_PARTS
from seal_jax.types import Call, ToolDoc

_TYPES: Mapping[str, str] = {
    "string": "str",
    "str": "str",
    "integer": "int",
    "int": "int",
    "number": "float",
    "float": "float",
    "double": "float",
    "boolean": "bool",
    "bool": "bool",
    "array": "list",
    "list": "list",
    "tuple": "list",
    "object": "dict",
    "dict": "dict",
}
_PYTHON: Mapping[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list, tuple),
    "dict": (dict,),
}


@dataclass(frozen=True)
class Argument:
    """One argument as the docs describe it.

    Attributes:
      type: "str", "int", "float", "bool", "list", "dict", or the docs' own word; "" when they say nothing.
      items: the type of a list's items, "" when not told.
      fields: the arguments inside a dict.
      values: the closed set that the value (or each item of a list) is taken from; () when there is none.
      format: how the value is written, in a word or two; "" when not told.
      omit: the documented default is the *string* "None": the argument is to be left out, not sent as that string.
    """

    name: str
    required: bool
    type: str
    items: str
    fields: tuple[Argument, ...]
    values: tuple[str, ...]
    format: str
    omit: bool

    def words(self, parts: Sequence[str] = SCHEMA_PARTS) -> str:
        """What the value must be, in few words: its allowed values, else its format, else its type."""
        many = "list of " if self.type == "list" and "type" in parts else ""
        if "values" in parts and self.values:
            return many + "|".join(self.values)
        if "format" in parts and self.format:
            number = self.type if self.type in ("int", "float") and "type" in parts else ""
            return many + f"{number} {self.format}".strip()
        return self.type_words(parts) if "type" in parts else ""

    def type_words(self, parts: Sequence[str]) -> str:
        """The type with what is inside it: "list of str", "dict with title str, priority int"."""
        if self.fields:
            return f"{self.type} with " + ", ".join(f"{f.name} {f.words(parts)}".rstrip() for f in self.fields)
        return f"{self.type} of {self.items}" if self.items else self.type

    def needs(self, value: Any) -> str:
        """What a value that does not fit lacks: its type where that is wrong, else what `words` tells."""
        return self.words() if _has_type(value, self.type) or self.values else self.words(("type",))

    def fits(self, value: Any) -> bool:
        """Whether a JSON value is what the docs ask for; what they do not say or we cannot check fits."""
        if not _has_type(value, self.type):
            return False
        each = value if self.type == "list" else (value,)
        return all(self._item_fits(item) for item in each) and all(
            f.fits(value[f.name]) for f in self.fields if f.name in value
        )

    def _item_fits(self, item: Any) -> bool:
        if self.items and not _has_type(item, self.items):
            return False
        if self.values:
            return _as_listed(item) in self.values
        return not self.format or _written_as(self.format, item)


def arguments(doc: ToolDoc) -> tuple[Argument, ...]:
    """Every argument of a tool, in the order of its docs."""
    return _arguments(properties(doc), required_arguments(doc), str(doc.get("description", "")))


def _arguments(
    props: Mapping[str, Mapping[str, Any]], required: frozenset[str], about: str = ""
) -> tuple[Argument, ...]:
    made = []
    for name, prop in props.items():
        items = prop.get("items")
        inner = items if isinstance(items, Mapping) else {}
        made.append(
            Argument(
                name=name,
                required=name in required,
                type=value_type(prop),
                items=value_type(inner),
                fields=_arguments(prop.get("properties") or {}, frozenset(prop.get("required") or ())),
                values=allowed_values(prop),
                format=value_format(prop) or _format_told_by_the_tool(name, about),
                omit=name not in required and prop.get("default") == "None",
            )
        )
    return tuple(made)


def first_misfit(call: Call, doc: ToolDoc) -> Argument | None:
    """The first argument of a call whose value is not what the docs ask for."""
    for argument in arguments(doc):
        if argument.name in call.arguments and not argument.fits(call.arguments[argument.name]):
            return argument
    return None


def properties(doc: ToolDoc) -> Mapping[str, Mapping[str, Any]]:
    return (doc.get("parameters") or {}).get("properties") or {}


def required_arguments(doc: ToolDoc) -> frozenset[str]:
    return frozenset((doc.get("parameters") or {}).get("required") or ())


def value_type(prop: Mapping[str, Any]) -> str:
    kind = prop.get("type")
    return _TYPES.get(kind, kind) if isinstance(kind, str) else ""


def _as_listed(value: Any) -> str:
    """A value as `allowed_values` writes it."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a cycle: no listed value
        return ""


def _has_type(value: Any, kind: str) -> bool:
    if kind not in _PYTHON:
        return True
    return isinstance(value, _PYTHON[kind]) and (kind == "bool" or not isinstance(value, bool))


# --- allowed values --------------------------------------------------------------------------------------------------
# As prose: `[Enum]: ["a", "b"]`, `[Enum]: a, b`, `Possible values: a, b`, `Options are: a, b`, `must be one of: a, b`.
_LISTED_VALUES = re.compile(
    r"(?:\[enum\]\s*:?|(?:possible|allowed|valid|accepted)\s+(?:values|options)\s*(?:are|:)|\boptions\s*(?:are\s*)?:|"
    r"(?:must\s+be\s+)?one\s+of\s*:)\s*(\[[^\]]*\]|[^\n]+)",
    re.IGNORECASE,
)
# `(Buy/Sell)`, and `('l' for lines, 'w' for words)`.
_SLASHED_VALUES = re.compile(r"\((\w+(?:/\w+)+)\)")
_GLOSSED_VALUES = re.compile(r"\(('\w+' for \w+(?:, (?:or |and )?'\w+' for \w+)+)\)")


def allowed_values(prop: Mapping[str, Any]) -> tuple[str, ...]:
    """The values that the docs allow: an `enum` key (of the argument or of its items), or prose in the description."""
    for holder in (prop, prop.get("items")):
        if isinstance(holder, Mapping) and isinstance(holder.get("enum"), list | tuple):
            return tuple(v if isinstance(v, str) else json.dumps(v) for v in holder["enum"])
    return _values_in(str(prop.get("description", "")))


@functools.lru_cache(maxsize=4096)  # every row of every round reads the same docs
def _values_in(prose: str) -> tuple[str, ...]:
    if match := _LISTED_VALUES.search(prose):
        return _listed(match.group(1))
    if match := _SLASHED_VALUES.search(prose):
        return tuple(match.group(1).split("/"))
    if match := _GLOSSED_VALUES.search(prose):
        return tuple(re.findall(r"'(\w+)' for", match.group(1)))
    return ()


def _listed(text: str) -> tuple[str, ...]:
    """Values of a written list; () when it is prose after all."""
    if text.startswith("["):
        try:
            values = json.loads(text)
        except ValueError:
            values = [v.strip().strip("'\"") for v in text[1:-1].split(",")]
    else:
        sentence = re.split(r"\.(?:\s|$)|;", text, maxsplit=1)[0]
        values = [v.strip().strip("'\"`") for v in re.split(r",\s*(?:and|or)\s+|,|\s+or\s+", sentence)]
    names = tuple(v if isinstance(v, str) else json.dumps(v) for v in values)
    return names if len(names) > 1 and all(0 < len(v) <= 24 for v in names) else ()


# --- formats ---------------------------------------------------------------------------------------------------------
#: What the prose says -> how a cue words it. The first that is found counts; groups fill the braces.
_PROSE_FORMATS: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), words)
    for pattern, words in (
        # Letters that stand for digits, joined by separators (YYYY-MM-DD, MM/YYYY).
        (r"format\b[^A-Z\n]{0,12}((?:YYYY|[YMDHS]{2})(?:[-/:T](?:YYYY|[YMDHS]{2}))+)", "{0}"),
        (r"in the format of ([a-z]+(?:, [a-z]+)+)", '"{0}"'),
        (r"\b(\d) letter code\b", "{0}-letter code"),
        (r"\b[Zz]ip ?code of\b", "zipcode"),
        (r"airport codes? in the IATA format", "IATA airport code"),
        (
            r"(?:from|between) (\d+)(?: \([^)]*\))? (?:to|and) (\d+)(?: \([^)]*\))? and a multiple of (\d+)",
            "{0} to {1}, a multiple of {2}",
        ),
        (r"(?:from|between) (\d+)(?: \([^)]*\))? (?:to|and) (\d+)\b", "{0} to {1}"),
        (r"should start with ([^\w\s])", "text starting with {0}"),
        (r"one folder level at a time", "one folder at a time"),
        (
            r"[Nn]o (?:file )?paths?\b|(?:cannot|must not) be a path\b|not allow paths?\b|only create \w+ at current|"
            r"must be local to the current directory",
            "name without path",
        ),
    )
]


def value_format(prop: Mapping[str, Any]) -> str:
    """The written format of a value: a `format` key, or what the description says of it."""
    form = prop.get("format")
    if isinstance(form, str) and form not in _TYPES:
        return form
    return _format_in(str(prop.get("description", "")))


@functools.lru_cache(maxsize=4096)
def _format_in(prose: str) -> str:
    for pattern, words in _PROSE_FORMATS:
        if match := pattern.search(prose):
            return words.format(*match.groups())
    return ""


@functools.lru_cache(maxsize=4096)
def _format_told_by_the_tool(name: str, about: str) -> str:
    """A format that the tool's own description gives for some arguments: "From and To should be ..." speaks of
    `travel_from` and `travel_to`."""
    for sentence in re.split(r"(?<=\.)\s", about):
        subject = re.match(r"(\w+)(?: and (\w+))? (?:should|must) be\b", sentence)
        if subject and name.rsplit("_", 1)[-1].lower() in {s.lower() for s in subject.groups() if s}:
            return _format_in(sentence)
    return ""


def _written_as(form: str, value: Any) -> bool:
    for pattern, check in _CHECKS:
        if match := pattern.fullmatch(form):
            return check(value, *match.groups())
    return True


def _in_range(value: Any, low: str, high: str, step: str | None) -> bool:
    if not _has_type(value, "float"):
        return True  # the type says so already
    return int(low) <= value <= int(high) and (step is None or value % int(step) == 0)


def _matches(pattern: str, value: Any) -> bool:
    return not isinstance(value, str) or re.fullmatch(pattern, value) is not None


#: How a value is held against a format that we worded above.
_CHECKS: Sequence[tuple[re.Pattern[str], Callable[..., bool]]] = [
    (re.compile(pattern), check)
    for pattern, check in (
        (r"([YMDHST:/-]{5,})", lambda v, form: _matches(re.sub("[YMDHS]", r"\\d", form), v)),
        (r"(\d)-letter code", lambda v, n: _matches(rf"[A-Za-z]{{{n}}}", v)),
        (r"IATA airport code", lambda v: _matches(r"[A-Za-z]{3}", v)),
        (r"zipcode", lambda v: _matches(r"\d{5}", v)),
        (r"(\d+) to (\d+)(?:, a multiple of (\d+))?", _in_range),
        (r"text starting with (.)", lambda v, mark: _matches(re.escape(mark) + r"[\s\S]*", v)),
        (r"name without path|one folder at a time", lambda v: not isinstance(v, str) or "/" not in v),
    )
]
