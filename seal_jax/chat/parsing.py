"""From one sampled message to calls: strict, total (never raises), and never touching a Python evaluator.

The rules every format shares:

* Reasoning comes off first. `<think>...</think>` is skipped wherever the scanner meets it outside a call, so a call
  that was only drafted there is not run. Reasoning that never closes was cut: an error, nothing runs.
* One fault rejects the whole message: calls that look right beside a broken one are not run either.
* JSON is read by the JSON decoder, from the opening tag onward; braces and tags inside string values are just text.
  Duplicate keys, NaN, Infinity, numbers too large for a float or for `int`'s own printing limit, and lone surrogates
  are errors: no two readers agree on them.
* Work is bounded: by `max_chars` before anything is read, by `max_depth` and `max_calls` after.

Positions are character offsets in the sampled text. Faults inside a JSON document that the decoder only reports when an
object closes (duplicate keys, NaN) carry the offset of that document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from seal_jax.types import Call, ParseError

#: Every `ParseError.kind`, with what it means.
ERROR_KINDS: dict[str, str] = {
    "too_long": "the message has more than max_chars characters",
    "too_deep": "lists and objects are nested deeper than max_depth",
    "too_many_calls": "the message holds more than max_calls calls",
    "special_token": "a special token of the format stands inside the message (a forged role marker)",
    "unclosed_reasoning": "<think> without </think>",
    "stray_reasoning_end": "</think> without <think>",
    "unclosed": "the last call is not closed (usually: generation was cut)",
    "stray_tag": "</tool_call> without <tool_call>",
    "invalid_json": "the call is not JSON",
    "python_literal": "the call is written as a Python literal (single quotes, True, None), not as JSON",
    "extra_data": "something follows the call inside its tags or its arguments string",
    "duplicate_key": "an object holds the same key twice",
    "invalid_number": "NaN, Infinity, or a number beyond the range of floats and printable integers",
    "invalid_text": "a lone surrogate, which no UTF-8 text can hold",
    "not_an_object": "the call is not a JSON object",
    "missing_name": "no name key",
    "invalid_name": "the name is not a non-empty string",
    "missing_arguments": "no arguments key",
    "invalid_arguments": "the arguments are not an object",
    "unexpected_key": "the call object has a key other than name and arguments",
    "text_around_call": "text stands before or after the call in a format whose messages hold either text or calls",
    "parallel_calls": "several calls in a format that is set to one call per message",
    "syntax": "the call list is not a list of calls",
    "missing_brackets": "a call without the list's square brackets",
    "positional_argument": "an argument without a name",
    "invalid_value": "an argument that is not a literal",
    "undecodable": "the strict parser reads calls here, but the official decoder, which decides, does not",
}


@dataclass(frozen=True)
class ParseOptions:
    """What a parser accepts; each format brings its own defaults.

    accept_parameters_key: take "parameters" where "arguments" is missing (off for Hermes, on for Llama JSON).
    parallel: several calls in one message are allowed; else `parallel_calls`.
    reasoning_open: the assistant header already opened <think>, so the message starts inside reasoning.
    ignored_keys: further keys a call object may carry (their values are dropped).
    max_chars, max_depth, max_calls: bounds on the work one message can cause.
    """

    accept_parameters_key: bool = False
    parallel: bool = True
    reasoning_open: bool = False
    ignored_keys: frozenset[str] = frozenset()
    max_chars: int = 300_000
    max_depth: int = 64
    max_calls: int = 128


@dataclass(frozen=True)
class Parsed:
    """A message's calls, and its text outside calls and reasoning (stripped). With an error: all the text, no calls."""

    content: str
    calls: tuple[Call, ...] = ()
    error: ParseError | None = None


class Malformed(Exception):
    """Raised inside parsers only; `run` turns it into a ParseError."""

    def __init__(self, kind: str, message: str, position: int | None = None):
        super().__init__(message)
        self.kind, self.message, self.position = kind, message, position


def run(
    body: Callable[[str, ParseOptions], tuple[str, list[Call]]],
    text: str,
    options: ParseOptions,
    special_tokens: Iterable[str],
) -> Parsed:
    """Bounds the message, runs a format's parser on it and turns what it rejects into a typed error."""
    try:
        if len(text) > options.max_chars:
            raise Malformed("too_long", f"message is longer than {options.max_chars} characters", options.max_chars)
        for token in special_tokens:
            at = text.find(token)
            if at >= 0:
                raise Malformed("special_token", "message contains a special token", at)
        content, calls = body(text, options)
        if len(calls) > 1 and not options.parallel:
            raise Malformed("parallel_calls", "one call per message")
        if len(calls) > options.max_calls:
            raise Malformed("too_many_calls", f"more than {options.max_calls} calls in one message")
        return Parsed(content, tuple(calls))
    except Malformed as fault:
        return Parsed(text, (), ParseError(fault.kind, fault.message, fault.position or 0))


# --- JSON ------------------------------------------------------------------------------------------------------------
_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
#: 10**308 is about the largest float; an `int` far beyond it cannot even be printed (CPython stops at 4,300 digits).
_MAX_DIGITS = 308


def skip_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]  # the pattern matches the empty string


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise Malformed("duplicate_key", f"key {shorten(key)} appears twice")
        out[key] = value
    return out


def _constant(word: str) -> Any:
    raise Malformed("invalid_number", f"{word} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise Malformed("invalid_number", "number is too large")
    return int(digits)


def _real(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise Malformed("invalid_number", "number is too large")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_constant, parse_int=_integer, parse_float=_real
)


def decode_json(text: str, start: int, options: ParseOptions) -> tuple[Any, int]:
    """Reads one JSON value at `start` (no leading space); returns it and the offset behind it."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except Malformed as fault:
        raise Malformed(fault.kind, fault.message, start) from None
    except json.JSONDecodeError as fault:
        if text.startswith(("'", "True", "False", "None"), fault.pos):
            hint = "write JSON: double quotes, true, false, null"
            raise Malformed("python_literal", hint, fault.pos) from None
        # The decoder's own words, without the offset in the whole message that it would append.
        raise Malformed("invalid_json", f"not valid JSON: {fault.msg}", fault.pos) from None
    except (RecursionError, MemoryError):
        raise Malformed("too_deep", f"nested deeper than {options.max_depth}", start) from None
    check_value(value, start, options)
    return value, end


def check_value(value: Any, position: int, options: ParseOptions) -> None:
    """Refuses deep nesting and lone surrogates, without recursion."""
    level: list[Any] = [value]
    for _ in range(options.max_depth + 1):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if _SURROGATE.search(item):
                    raise Malformed("invalid_text", "text holds a lone surrogate", position)
            elif isinstance(item, dict):
                deeper += item
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        if not deeper:
            return
        level = deeper
    raise Malformed("too_deep", f"nested deeper than {options.max_depth}", position)


def normalise_arguments(value: Any, options: ParseOptions, position: int = 0) -> dict[str, Any]:
    """A call's arguments as a dict: an object as it is, or a JSON string that holds one (unwrapped once).

    Raises Malformed: `invalid_arguments`, `extra_data` naming the column in the arguments text, or a JSON fault.
    """
    if isinstance(value, str):
        text = value
        try:
            value, end = decode_json(text, skip_space(text, 0), options)
        except Malformed as fault:
            column = (fault.position or 0) + 1
            raise Malformed(fault.kind, f"arguments, column {column}: {fault.message}", position) from None
        end = skip_space(text, end)
        if end < len(text):
            raise Malformed("extra_data", f"arguments: unexpected text at column {end + 1}", position)
    if not isinstance(value, dict):
        raise Malformed("invalid_arguments", "arguments must be an object", position)
    return value


def call_from_object(value: Any, position: int, options: ParseOptions) -> Call:
    """Checks {"name": ..., "arguments": {...}} and makes it a Call."""
    if not isinstance(value, dict):
        raise Malformed("not_an_object", "a call must be a JSON object", position)
    if "name" not in value:
        raise Malformed("missing_name", 'call needs "name"', position)
    name = value["name"]
    if not isinstance(name, str) or not name:
        raise Malformed("invalid_name", '"name" must be a non-empty string', position)
    key = "arguments"
    if key not in value and options.accept_parameters_key and "parameters" in value:
        key = "parameters"
    if key not in value:
        raise Malformed("missing_arguments", 'call needs "arguments"', position)
    for other in value:
        if other not in ("name", key) and other not in options.ignored_keys:
            raise Malformed("unexpected_key", f"unexpected key {shorten(other)}", position)
    return Call(name, normalise_arguments(value[key], options, position))


def shorten(text: str, limit: int = 40) -> str:
    """A quoted, printable piece of what the policy wrote, short enough for an error message."""
    return json.dumps(text if len(text) <= limit else text[:limit] + "...")


# --- <tool_call>{json}</tool_call> -----------------------------------------------------------------------------------
_TAG = re.compile(r"</?(?:tool_call|think)>")
_CLOSE = "</tool_call>"


def end_of_reasoning(text: str, start: int, opened_at: int) -> int:
    at = text.find("</think>", start)
    if at < 0:
        raise Malformed("unclosed_reasoning", "reasoning is not closed", opened_at)
    return at + len("</think>")


def tagged_calls(text: str, options: ParseOptions) -> tuple[str, list[Call]]:
    """Hermes-style messages: text, reasoning and `<tool_call>` blocks in any order; white space in a block is free."""
    pieces: list[str] = []
    calls: list[Call] = []
    position = end_of_reasoning(text, 0, 0) if options.reasoning_open else 0
    while (found := _TAG.search(text, position)) is not None:
        pieces.append(text[position : found.start()])
        tag = found.group()
        if tag == "<think>":
            position = end_of_reasoning(text, found.end(), found.start())
        elif tag == "</think>":
            raise Malformed("stray_reasoning_end", "</think> without <think>", found.start())
        elif tag == _CLOSE:
            raise Malformed("stray_tag", "closing tag without an opening tag", found.start())
        else:
            call, position = _block(text, found.start(), found.end(), options)
            calls.append(call)
            if len(calls) > options.max_calls:
                raise Malformed("too_many_calls", f"more than {options.max_calls} calls in one message", found.start())
    pieces.append(text[position:])
    return "\n".join(piece for piece in map(str.strip, pieces) if piece), calls


def _block(text: str, opened_at: int, start: int, options: ParseOptions) -> tuple[Call, int]:
    start = skip_space(text, start)
    try:
        value, end = decode_json(text, start, options)
    except Malformed:
        if _CLOSE not in text[start:]:
            raise Malformed("unclosed", "call is cut off before its closing tag", opened_at) from None
        raise
    end = skip_space(text, end)
    if not text.startswith(_CLOSE, end):
        if _CLOSE not in text[end:]:
            raise Malformed("unclosed", "call has no closing tag", opened_at)
        raise Malformed("extra_data", "unexpected text after the call's JSON object", end)
    return call_from_object(value, start, options), end + len(_CLOSE)


# --- formats whose messages hold either text or calls ----------------------------------------------------------------
def after_leading_reasoning(text: str, options: ParseOptions) -> int:
    """Offset of the first character that is neither reasoning nor white space."""
    position = end_of_reasoning(text, 0, 0) if options.reasoning_open else 0
    position = skip_space(text, position)
    while text.startswith("<think>", position):
        position = skip_space(text, end_of_reasoning(text, position + len("<think>"), position))
    return position
