"""The texts of Ω: constant guidelines (φ_cap), schema lines (φ_schema) and error feedback (φ_err).

They are short and always worded the same, so that a policy of half a million parameters can read them too. They speak
of the class of an error and of the constraint that was violated, and hold names and allowed values from the tool docs;
never a value from a task, a result or a reference program.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from seal_jax.types import CallResult, ParseError, ToolDoc

MARK = "[hint]"

#: φ_cap, one guideline per failure label.
GUIDELINES: Mapping[str, str] = {
    "invalid_tool_call": "use the exact call format and only these tools: {tools}.",
    "state_mismatch": "change only what was asked, and only once.",
    "missing_tool_call": "if a tool does what is asked, call it.",
    "response_mismatch": "to tell a value, read it with a tool.",
    "spurious_tool_call": "if no tool fits or a value is missing, call nothing.",
}

#: φ_err, one text per error kind. `{detail}` names an argument, `{tools}` the offered tools.
FEEDBACK: Mapping[str, str] = {
    "parse": "malformed: fix the format, then resend.",
    "unknown_tool": "no such tool; use one of: {tools}.",
    "unavailable_tool": "not offered now; use one of: {tools}, or call nothing.",
    "missing_argument": "missing argument{detail}; add it.",
    "unexpected_argument": "unexpected argument{detail}; drop it.",
    "argument_type": "wrong argument{detail}; fix it.",
    "tool_error": "refused: fix the cause, then retry.",
    "exception": "failed: check the arguments, then retry.",
    "time_limit": "too slow: ask for less.",
    "size_limit": "result too long: ask for less.",
}

#: Which failure label switches the feedback for an error kind on.
LABEL_OF_ERROR: Mapping[str, str] = {
    "parse": "invalid_tool_call",
    "unknown_tool": "invalid_tool_call",
    "unavailable_tool": "invalid_tool_call",
    "missing_argument": "argument_mismatch",
    "unexpected_argument": "argument_mismatch",
    "argument_type": "argument_mismatch",
    "tool_error": "recovery_failure",
    "exception": "recovery_failure",
    "time_limit": "recovery_failure",
    "size_limit": "recovery_failure",
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,40}")
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
# Allowed values as prose: `[Enum]: ["a", "b"]`, `[Enum]: a, b`, `Possible values: a, b`, `must be one of: a, b`.
_PROSE_VALUES = re.compile(
    r"(?:\[enum\]\s*:?|(?:possible|allowed|valid|accepted)\s+(?:values|options)\s*(?:are|:)|(?:must\s+be\s+)?one\s+of\s*:)"
    r"\s*(\[[^\]]*\]|[^\n]+)",
    re.IGNORECASE,
)
# A format as prose: letters that stand for digits, joined by separators (YYYY-MM-DD, MM/YYYY).
_PROSE_FORMAT = re.compile(r"format\b[^A-Z\n]{0,12}((?:YYYY|[YMDHS]{2})(?:[-/:T](?:YYYY|[YMDHS]{2}))+)")


def error_kind(error: CallResult | ParseError) -> str:
    """The key of FEEDBACK for an error; "" when there is none (no error, or the environment's own fault)."""
    if isinstance(error, ParseError):
        return error.kind if error.kind in ("unknown_tool", "unavailable_tool") else "parse"
    return error.error if error.error in FEEDBACK else ""


def feedback_text(error: CallResult | ParseError, tools: Sequence[ToolDoc], max_tools: int) -> str:
    """φ_err for one error."""
    kind = error_kind(error)
    if not kind:
        return ""
    detail = _argument_detail(error, tools) if isinstance(error, CallResult) else ""
    return f"{MARK} " + FEEDBACK[kind].format(detail=detail, tools=tool_names(tools, max_tools))


def _argument_detail(error: CallResult, tools: Sequence[ToolDoc]) -> str:
    """The offending argument and, from the docs, what it must be. Anything that is not a plain name is left out."""
    if not _NAME.fullmatch(error.detail):
        return ""
    doc = next((d for d in tools if d["name"] == error.call.name), None)
    prop = properties(doc).get(error.detail) if doc is not None else None
    needs = constraint(prop, ("type", "values", "format")) if prop is not None else ""
    return f" {error.detail}" + (f" ({needs})" if needs else "")


def guideline_text(label: str, tools: Sequence[ToolDoc], max_tools: int) -> str:
    """φ_cap for one label; "" when the label has no guideline."""
    text = GUIDELINES.get(label, "")
    return f"{MARK} " + text.format(tools=tool_names(tools, max_tools)) if text else ""


def schema_lines(tools: Sequence[ToolDoc], parts: Sequence[str], max_tools: int) -> list[str]:
    """φ_schema as lines, one per tool that has an argument worth a word: `[hint] send: id int, mode a|b.`

    Required arguments are listed plainly and optional ones (only when their values or format are constrained) with "?";
    without the part "required" there is no such distinction and only constrained arguments are listed.
    """
    lines = []
    for doc in tools:
        required = required_arguments(doc) if "required" in parts else frozenset()
        items = []
        for name, prop in properties(doc).items():
            special = constraint(prop, [p for p in parts if p in ("values", "format")])
            if name not in required and not special:
                continue
            mark = "" if name in required or "required" not in parts else "?"
            items.append(f"{name}{mark} {constraint(prop, parts)}".rstrip())
        if items:
            lines.append(f"{MARK} {doc['name']}: {', '.join(items)}.")
    if len(lines) > max_tools:
        lines = lines[:max_tools] + [f"{MARK} +{len(lines) - max_tools} more"]
    return lines


def annotate(doc: ToolDoc, parts: Sequence[str]) -> ToolDoc:
    """φ_schema written into a copy of the doc: each argument's description says what it must be."""
    required = required_arguments(doc)
    new: dict[str, Any] = {}
    for name, prop in properties(doc).items():
        marks = ["required"] if "required" in parts and name in required else []
        values = allowed_values(prop) if "values" in parts else ()
        form = value_format(prop) if "format" in parts else ""
        marks += [f"type: {value_type(prop)}"] if "type" in parts and value_type(prop) else []
        marks += [f"one of: {'|'.join(values)}"] if values else []
        marks += [f"format: {form}"] if form else []
        if marks:
            text = " ".join([str(prop.get("description", "")), *(f"[{m}]" for m in marks)])
            prop = {**prop, "description": text.strip()}
        new[name] = prop
    if not new:
        return doc
    return {**doc, "parameters": {**doc["parameters"], "properties": new}}


def constraint(prop: Mapping[str, Any], parts: Sequence[str]) -> str:
    """What a value must be, in a word: its allowed values, else its format, else its type."""
    if "values" in parts and (values := allowed_values(prop)):
        return "|".join(values)
    if "format" in parts and (form := value_format(prop)):
        return form
    return value_type(prop) if "type" in parts else ""


def allowed_values(prop: Mapping[str, Any]) -> tuple[str, ...]:
    """The values that the docs allow: an `enum` key (of the argument or of its items), or prose in the description."""
    for holder in (prop, prop.get("items")):
        if isinstance(holder, Mapping) and isinstance(holder.get("enum"), list | tuple):
            return tuple(v if isinstance(v, str) else json.dumps(v) for v in holder["enum"])
    match = _PROSE_VALUES.search(str(prop.get("description", "")))
    return _listed(match.group(1)) if match else ()


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


def value_format(prop: Mapping[str, Any]) -> str:
    """The written format of a value: a `format` key, or a pattern such as YYYY-MM-DD named in the description."""
    form = prop.get("format")
    if isinstance(form, str) and form not in _TYPES:
        return form
    match = _PROSE_FORMAT.search(str(prop.get("description", "")))
    return match.group(1) if match else ""


def value_type(prop: Mapping[str, Any]) -> str:
    kind = prop.get("type")
    return _TYPES.get(kind, kind) if isinstance(kind, str) else ""


def properties(doc: ToolDoc) -> Mapping[str, Mapping[str, Any]]:
    return (doc.get("parameters") or {}).get("properties") or {}


def required_arguments(doc: ToolDoc) -> frozenset[str]:
    return frozenset((doc.get("parameters") or {}).get("required") or ())


def tool_names(tools: Sequence[ToolDoc], limit: int) -> str:
    names = [str(doc["name"]) for doc in tools]
    return (", ".join(names[:limit]) or "none") + (f", +{len(names) - limit} more" if len(names) > limit else "")
