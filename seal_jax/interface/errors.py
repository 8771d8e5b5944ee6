"""φ_err in classes: which constant text answers an error (settings: feedback="classed").

An error's own words only ever *choose* among the constant texts below; nothing of them is repeated. So a hint can hold
no value of a call, a result or a reference program, whatever a tool writes into its error messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from seal_jax.types import CallResult

#: What mends a malformed message, by the parser's error kind (chat/parsing.py lists and explains the kinds).
PARSE_MENDS: Mapping[str, str] = {
    "too_long": "send the call alone, and shorter",
    "too_deep": "nest the arguments less deeply",
    "too_many_calls": "send fewer calls at once",
    "special_token": "leave the format's reserved tokens out of the message",
    "unclosed_reasoning": "close the reasoning before the call",
    "stray_reasoning_end": "reasoning must be opened before it is closed",
    "unclosed": "close the call",
    "stray_tag": "open the call before it is closed",
    "invalid_json": "write the call as JSON; check quotes, commas and braces",
    "python_literal": "write JSON, not Python: double quotes, true, false, null",
    "extra_data": "let nothing follow the call inside its tags",
    "duplicate_key": "write each key once",
    "invalid_number": "write numbers as plain digits",
    "invalid_text": "leave broken characters out",
    "not_an_object": "write each call as one JSON object",
    "missing_name": "give the tool's name",
    "invalid_name": "give the tool's name as text",
    "missing_arguments": "give the arguments, an empty object if there are none",
    "invalid_arguments": "give the arguments as an object of names and values",
    "unexpected_key": "a call holds a name and arguments, nothing else",
    "text_around_call": "send the call without text around it",
    "parallel_calls": "send one call per message",
    "syntax": "write a list of calls: [tool(argument=value)]",
    "missing_brackets": "put square brackets around the calls",
    "positional_argument": "give every argument by its name",
    "invalid_value": "give plain values, no expressions",
    "undecodable": "write the call exactly as the format has it",
}


@dataclass(frozen=True)
class ErrorClass:
    """A class of refusals.

    Attributes:
      pattern: searched in the error's text, case ignored.
      text: the hint.
      sure: the wording names the cause, so it goes before a look at what the call violates in its docs. (A call that
        is refused because nobody is logged in may well have a bad argument too; that is not what was refused.)
    """

    name: str
    pattern: re.Pattern[str]
    text: str
    sure: bool = False


def _class(name: str, pattern: str, text: str, sure: bool = False) -> ErrorClass:
    return ErrorClass(name, re.compile(pattern, re.IGNORECASE), text, sure)


#: The first whose pattern is found counts. The wordings are those of the error messages in the tool classes of
#: bfcl-eval 2026.3.23 (func_source_code/*.py), of Python's own exceptions, and what such messages say elsewhere.
ERROR_CLASSES: Sequence[ErrorClass] = (
    _class(
        "token",
        r"token (?:expired|not initialized)|(?:invalid|expired) access token",
        "access refused: authenticate, then pass what it returns.",
        True,
    ),
    _class(
        "login",
        r"not authenticated|not (?:currently )?logged in|no user is currently logged in|(?:please|must) log ?in\b",
        "not logged in: log in first, then retry.",
        True,
    ),
    _class(
        "done",
        r"\balready\b|file exists",
        "it exists or is done already: do not repeat it.",
        True,
    ),
    _class(
        "step",
        r"(?:must be|needs? to be) (?:locked|pressed|closed|opened|started)|must press|before (?:starting|activating)|"
        r"market is closed|not empty",
        "something must be done first: do it, then retry.",
        True,
    ),
    _class(
        "amount",
        r"insufficient|budget limit|tank capacity|tank is empty|min fuel level",
        "not enough, or too much: read the amount or limit first.",
        True,
    ),
    _class(
        "path",
        r"unsupported path|path not allowed|only one folder level|invalid character",
        "no paths: go to the folder first, then use a bare name.",
    ),
    _class(
        "not_found",
        r"not found|no such|not registered|no available|not a (?:file|directory)|is a directory|"
        r"invalid (?:stock symbol|departure|destination)|keyerror",
        "nothing there by that name or id: look up what exists.",
    ),
    _class(
        "number",
        r"must be (?:a |an )?(?:number|integer)|inputs? must|empty list|(?:divide|division) by zero|cannot be zero|"
        r"negative number|too large",
        "the numbers do not allow this: check them.",
    ),
    _class(
        "value",
        r"\binvalid\b|\bmust be\b|\bmust not\b|cannot|not supported|does not match",
        "value not allowed: the docs tell which are.",
    ),
)


def error_class(error: CallResult, *, sure: bool) -> ErrorClass | None:
    """The class of an error that a tool returned or raised; None when its words say nothing.

    `sure`: only classes whose wording names the cause. For a raised exception the exception's type counts as words.
    """
    words = f"{error.detail} {error.text}" if error.error == "exception" else error.text
    for c in ERROR_CLASSES:
        if c.pattern.search(words):
            return c if c.sure or not sure else None
    return None
