"""The texts of Ω: constant guidelines (φ_cap), schema lines (φ_schema) and error feedback (φ_err).

They are short and always worded the same, so that a policy of half a million parameters can read them too. They speak
of the class of an error and of the constraint that was violated, and hold names and allowed values from the tool docs;
never a value from a task, a result or a reference program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from seal_jax.interface.arguments import Argument, arguments, first_misfit, properties
from seal_jax.interface.errors import PARSE_MENDS, error_class
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

#: What `feedback="classed"` says instead, where it can say more.
CLASSED_FEEDBACK: Mapping[str, str] = {
    "parse": "malformed: {mend}.",
    "missing_argument": "missing arguments{detail}; add them.",
    "unexpected_argument": "unexpected argument{detail}; the tool takes {takes}.",
}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]{0,40}")


def error_kind(error: CallResult | ParseError) -> str:
    """The key of FEEDBACK for an error; "" when there is none (no error, or the environment's own fault)."""
    if isinstance(error, ParseError):
        return error.kind if error.kind in ("unknown_tool", "unavailable_tool") else "parse"
    return error.error if error.error in FEEDBACK else ""


def feedback_text(
    error: CallResult | ParseError, tools: Sequence[ToolDoc], max_tools: int, classed: bool = False
) -> str:
    """φ_err for one error."""
    kind = error_kind(error)
    if not kind:
        return ""
    if classed:
        return f"{MARK} " + _classed(error, kind, tools, max_tools)
    detail = _argument_detail(error, tools) if isinstance(error, CallResult) else ""
    return f"{MARK} " + FEEDBACK[kind].format(detail=detail, tools=tool_names(tools, max_tools))


def _argument_detail(error: CallResult, tools: Sequence[ToolDoc]) -> str:
    """The offending argument and, from the docs, what it must be. Anything that is not a plain name is left out."""
    if not _NAME.fullmatch(error.detail):
        return ""
    doc = _doc_of(error.call.name, tools)
    known = _argument(error, doc) if doc is not None else None
    return f" {error.detail}" if known is None else _named(known, known.words())


def _argument(error: CallResult, doc: ToolDoc) -> Argument | None:
    """The argument that the error is about, if its tool has one of that name."""
    return next((a for a in arguments(doc) if a.name == error.detail), None)


def _named(argument: Argument, needs: str) -> str:
    return f" {argument.name}" + (f" ({needs})" if needs else "")


def _classed(error: CallResult | ParseError, kind: str, tools: Sequence[ToolDoc], max_tools: int) -> str:
    """The finer wording: what mends the message, what the call violates in its docs, or the class of the refusal."""
    if isinstance(error, ParseError):
        if kind == "parse":
            mend = PARSE_MENDS.get(error.kind)
            return CLASSED_FEEDBACK["parse"].format(mend=mend) if mend else FEEDBACK["parse"]
        called = re.search(r"'([^']*)'", error.message)
        return FEEDBACK[kind].format(tools=_near_names(tools, called.group(1) if called else "", max_tools))
    doc = _doc_of(error.call.name, tools)
    detail = _argument_detail(error, tools)
    if doc is not None and kind == "missing_argument":
        lacking = [a for a in arguments(doc) if a.required and a.name not in error.call.arguments]
        if len(lacking) > 1 and not error.call.positional:
            return CLASSED_FEEDBACK[kind].format(detail=",".join(_named(a, a.words()) for a in lacking))
    if doc is not None and kind == "unexpected_argument":
        takes = ", ".join(a.name + ("" if a.required else "?") for a in arguments(doc)) or "none"
        return CLASSED_FEEDBACK[kind].format(detail=detail, takes=takes)
    if kind in ("tool_error", "exception") and (sure := error_class(error, sure=True)):
        return sure.text
    if doc is not None and kind in ("tool_error", "exception", "argument_type"):
        if misfit := _argument(error, doc) or first_misfit(error.call, doc):
            needs = misfit.needs(error.call.arguments.get(misfit.name))
            return FEEDBACK["argument_type"].format(detail=_named(misfit, needs))
    if kind in ("tool_error", "exception") and (found := error_class(error, sure=False)):
        return found.text
    return FEEDBACK[kind].format(detail=detail, tools=_near_names(tools, error.call.name, max_tools))


def _near_names(tools: Sequence[ToolDoc], name: str, limit: int) -> str:
    """Of more tools than a cue lists, those whose names share most letter pairs with the called one, in their order."""
    if len(tools) <= limit:
        return tool_names(tools, limit)
    called = _letter_pairs(name)

    def unlikeness(i: int) -> float:
        pairs = _letter_pairs(str(tools[i]["name"]))
        return -len(pairs & called) / (len(pairs) + len(called) or 1)

    best = sorted(range(len(tools)), key=unlikeness)[:limit]  # stable: equal ones in the order of the docs
    return tool_names([tools[i] for i in sorted(best)], limit, others=True)


def _letter_pairs(name: str) -> set[str]:
    word = name[:64].lower()
    return {word[i : i + 2] for i in range(len(word) - 1)}


def _doc_of(name: str, tools: Sequence[ToolDoc]) -> ToolDoc | None:
    return next((doc for doc in tools if doc["name"] == name), None)


def guideline_text(label: str, tools: Sequence[ToolDoc], max_tools: int) -> str:
    """φ_cap for one label; "" when the label has no guideline."""
    text = GUIDELINES.get(label, "")
    return f"{MARK} " + text.format(tools=tool_names(tools, max_tools)) if text else ""


def schema_lines(tools: Sequence[ToolDoc], parts: Sequence[str], max_tools: int) -> list[str]:
    """φ_schema as lines, one per tool that has an argument worth a word: `[hint] send: id int, mode a|b.`

    Required arguments are listed plainly and optional ones (only when the docs constrain them) with "?"; without the
    part "required" there is no such distinction and only constrained arguments are listed. Of more than `max_tools`
    lines those stay that tell allowed values or formats, which types and names alone do not show.
    """
    lines: list[tuple[bool, str]] = []
    for doc in tools:
        items, telling = [], False
        for argument in arguments(doc):
            required = argument.required and "required" in parts
            special = bool(argument.words([p for p in parts if p in ("values", "format")]))
            omit = argument.omit and "required" in parts
            if not (required or special or omit):
                continue
            mark = "" if required or "required" not in parts else "?"
            words = argument.words(parts)
            items.append(f"{argument.name}{mark} {words}".rstrip() + (" or left out" if omit else ""))
            telling = telling or special
        if items:
            lines.append((telling, f"{MARK} {doc['name']}: {', '.join(items)}."))
    if len(lines) <= max_tools:
        return [line for _, line in lines]
    first = sorted(range(len(lines)), key=lambda i: not lines[i][0])[:max_tools]  # stable
    return [lines[i][1] for i in sorted(first)] + [f"{MARK} for the other tools see their docs."]


def annotate(doc: ToolDoc, parts: Sequence[str]) -> ToolDoc:
    """φ_schema written into a copy of the doc: each argument's description says what it must be."""
    props = properties(doc)
    if not props:
        return doc
    return {**doc, "parameters": {**doc["parameters"], "properties": _annotated(props, arguments(doc), parts)}}


def _annotated(
    props: Mapping[str, Mapping[str, Any]], known: Sequence[Argument], parts: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    new: dict[str, Mapping[str, Any]] = {}
    for argument in known:
        prop = props[argument.name]
        marks = ["required"] if "required" in parts and argument.required else []
        marks += ["optional: leave out for none"] if "required" in parts and argument.omit else []
        kind = argument.type if argument.fields else argument.type_words(parts)  # fields get marks of their own
        marks += [f"type: {kind}"] if "type" in parts and kind else []
        marks += [f"one of: {'|'.join(argument.values)}"] if "values" in parts and argument.values else []
        marks += [f"format: {argument.format}"] if "format" in parts and argument.format else []
        if marks:
            text = " ".join([str(prop.get("description", "")), *(f"[{m}]" for m in marks)])
            prop = {**prop, "description": text.strip()}
        if argument.fields:
            prop = {**prop, "properties": _annotated(prop["properties"], argument.fields, parts)}
        new[argument.name] = prop
    return new


def tool_names(tools: Sequence[ToolDoc], limit: int, others: bool = False) -> str:
    """The first `limit` names, and that there are others; not how many, as any number could be a task's value."""
    names = [str(doc["name"]) for doc in tools]
    return (", ".join(names[:limit]) or "none") + (", and others" if others or len(names) > limit else "")
