"""ToolACE-2 (Llama 3.1 base): calls as a Python call list, `[send(id='a1', amount=5), ls()]`.

The list is read, never evaluated: a scan bounds nesting and admits only what literals and calls are made of, then `ast`
parses, then only calls with keyword literals pass. Names may be dotted. Positional arguments, names as values,
operators, comprehensions, f-strings, bytes and sets are typed errors. A tuple becomes a list.

Decisions. A message is a call list iff it starts with `[name(`, after any leading reasoning; `[]` and prose in
brackets are text. A complete call list inside a text, or a call without the brackets, is an error. Argument names that
are Python keywords (`from`, `class`) cannot be written in this format. Tool documents are one compact JSON list with
`parameters` renamed `arguments`; results stand raw under the ipython role. The instructions are our wording: where a
checkpoint needs the exact sentences it was tuned on, pass them as `instructions`.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seal_jax.chat.formats import dump_json, escape_in_json
from seal_jax.chat.llama31 import LlamaMessages
from seal_jax.chat.parsing import (
    Malformed,
    Parsed,
    ParseOptions,
    after_leading_reasoning,
    check_value,
    run,
    shorten,
    skip_space,
)
from seal_jax.types import Call, ToolDoc

INSTRUCTIONS = (
    "You solve the user's request with the functions listed below. Reply with calls only, as a list "
    "[function(argument=value, ...), function(...)], and nothing else in that message. When the request is done, when "
    "no function fits, or when a required value is missing, say so in plain text instead."
)


@dataclass(frozen=True)
class ToolAceFormat(LlamaMessages):
    """ToolACE-2 call lists in Llama 3 messages."""

    instructions: str = INSTRUCTIONS
    options: ParseOptions = field(default_factory=ParseOptions)

    name = "toolace"
    scaffold = ("='", "', ", "')]", "()]", ")]", "(", "=", ", ")

    def prompt(self, tools: Sequence[ToolDoc], user: str, system: str = "") -> str:
        head = [self.clean(text).strip() for text in (system, self.instructions if tools else "") if text]
        if tools:
            docs = [{"arguments" if key == "parameters" else key: doc[key] for key in doc} for doc in tools]
            # Through dump_json first: it takes any Mapping and refuses what is not JSON.
            compact = json.dumps(json.loads(dump_json(docs)), ensure_ascii=False, separators=(",", ":"))
            head.append("Functions:\n" + self.clean(compact))
        system_message = self._message("system", "\n\n".join(head)) if head else ""
        return "<|begin_of_text|>" + system_message + self.user(user)

    def calls(self, calls: Sequence[Call], content: str = "") -> str:
        if calls and content:
            raise ValueError(
                "a toolace message holds either text or calls; drop `content` or send it as its own message"
            )
        if not calls:
            return self.clean(content).strip()
        return f"[{', '.join(map(_write_call, calls))}]"

    def parse(self, text: str) -> Parsed:
        return run(list_calls, text, self.options, self.special_tokens)


# --- writing ---------------------------------------------------------------------------------------------------------
def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text)


def _write_call(call: Call) -> str:
    if not all(map(_is_name, call.name.split("."))):
        raise ValueError(f"tool name {call.name!r} cannot be written as a Python call; rename the tool or use hermes")
    for name in call.arguments:
        if not _is_name(name):
            raise ValueError(f"argument {name!r} of {call.name} is not a Python name; rename it or use hermes")
    return f"{call.name}({', '.join(f'{name}={_literal(value)}' for name, value in call.arguments.items())})"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return escape_in_json(repr(value))  # \u003c is an escape in Python strings too
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    raise ValueError(f"argument value {value!r} is not JSON")


# --- reading ---------------------------------------------------------------------------------------------------------
_LIST_START = re.compile(r"\[\s*[^\W\d][\w.]*\s*\(")
_CALL_START = re.compile(r"[^\W\d][\w.]*\(")
_TRIES = 16  # as in llama31: bounded work on a text full of brackets


def list_calls(text: str, options: ParseOptions) -> tuple[str, list[Call]]:
    """`[name(argument=literal, ...), ...]`, or plain text."""
    start = after_leading_reasoning(text, options)
    if _LIST_START.match(text, start):
        calls, end = _read_list(text, start, options)
        end = skip_space(text, end)
        if end < len(text):
            raise Malformed("text_around_call", "text after the call list", end)
        return "", calls
    body = text[start:].strip()
    if _CALL_START.match(body) and body.endswith(")") and _reads(f"[{body}]", 0, options):
        raise Malformed("missing_brackets", "calls must stand in a list: [name(...)]", start)
    for tries, found in enumerate(_LIST_START.finditer(text, start)):
        if tries == _TRIES:
            break
        if _reads(text, found.start(), options):
            raise Malformed("text_around_call", "a message holds either text or calls", found.start())
    return body, []


def _reads(text: str, start: int, options: ParseOptions) -> bool:
    try:
        return bool(_read_list(text, start, options)[0])
    except Malformed:
        return False


_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    | (?P<string>'[^'\\\n]*(?:\\.[^'\\\n]*)*' | "[^"\\\n]*(?:\\.[^"\\\n]*)*")
    | (?P<number>(?:0[xXoObB]\w+ | (?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?))
    | (?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*){0,8})
    | (?P<mark>[][(){},=:-])""",
    re.VERBOSE | re.DOTALL,
)
#: What may stand before a value: after anything else, a bracket or a minus would be a call, a subscript or an operator.
_BEFORE_VALUE = frozenset("([{,=:")
_CLOSER = {"(": ")", "[": "]", "{": "}"}


def _end_of_list(text: str, start: int, options: ParseOptions) -> int:
    """Finds the bracket that closes the list and refuses what could make `ast` work hard: depth, operators, keywords.

    After this the syntax tree is at most a few levels deeper than `max_depth`.
    """
    closers: list[str] = []
    position, before = start, ""
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            if text[position] in "'\"":
                raise Malformed("unclosed", "a string is not closed", position)
            raise Malformed("syntax", f"unexpected {shorten(text[position])} in a call list", position)
        kind, token = found.lastgroup, found.group()
        if kind == "space":
            position = found.end()
            continue
        if kind == "string" and before == "name":
            raise Malformed("invalid_value", "strings must have no prefix", position)
        if kind == "number" and len(token) > 308:
            raise Malformed("invalid_number", "number is too large", position)
        if kind == "name" and keyword.iskeyword(token) and token not in ("True", "False", "None"):
            raise Malformed("invalid_value", f"{token!r} is not a literal or a name", position)
        if kind == "mark":
            opens_value = before in _BEFORE_VALUE or (token == "(" and before == "name") or before == ""
            if token in "([{-" and not opens_value:
                raise Malformed("syntax", f"unexpected {shorten(token)} in a call list", position)
            if token in "([{":
                closers.append(_CLOSER[token])
                if len(closers) > options.max_depth:
                    raise Malformed("too_deep", f"nested deeper than {options.max_depth}", position)
            elif token in ")]}" and closers.pop() != token:
                raise Malformed("syntax", f"unexpected {shorten(token)} in a call list", position)
        position = found.end()
        before = token if kind == "mark" else str(kind)
        if not closers:
            return position
    raise Malformed("unclosed", "the call list is not closed", start)


def _read_list(text: str, start: int, options: ParseOptions) -> tuple[list[Call], int]:
    end = _end_of_list(text, start, options)
    source = text[start:end]
    offset = _Offsets(source, start)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # '\d' in a string is the policy's matter, not a warning of ours
            tree = ast.parse(source, mode="eval").body
    except SyntaxError as fault:
        at = offset.of(fault.lineno or 1, fault.offset or 1)
        raise Malformed("syntax", f"not a call list: {fault.msg}", at) from None
    except (ValueError, RecursionError, MemoryError):  # null characters, lone surrogates; depth is bounded already
        raise Malformed("syntax", "not a call list", start) from None
    if not isinstance(tree, ast.List):
        raise Malformed("syntax", "not a call list", start)
    if len(tree.elts) > options.max_calls:
        raise Malformed("too_many_calls", f"more than {options.max_calls} calls in one message", start)
    return [_call(node, offset, options) for node in tree.elts], end


class _Offsets:
    """Line and column of a syntax tree to a character offset in the message."""

    def __init__(self, source: str, start: int):
        self.lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", source)
        self.starts = [start]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))

    def of(self, line: int, column: int) -> int:
        """`column` counts characters from 1, as in SyntaxError."""
        return self.starts[min(max(line, 1), len(self.lines)) - 1] + max(column - 1, 0)

    def node(self, node: ast.expr | ast.keyword) -> int:
        """Nodes count UTF-8 bytes from 0."""
        line = self.lines[min(node.lineno, len(self.lines)) - 1]
        return self.of(
            node.lineno, len(line.encode("utf-8", "replace")[: node.col_offset].decode("utf-8", "ignore")) + 1
        )


def _call(node: ast.expr, offset: _Offsets, options: ParseOptions) -> Call:
    if not isinstance(node, ast.Call):
        raise Malformed("syntax", "every element of the list must be a call", offset.node(node))
    names: list[str] = []
    function = node.func
    while isinstance(function, ast.Attribute):
        names.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        raise Malformed("invalid_name", "a call must start with a name", offset.node(node))
    name = ".".join([function.id, *reversed(names)])
    if node.args:
        raise Malformed("positional_argument", f"{shorten(name)} takes named arguments only", offset.node(node.args[0]))
    arguments: dict[str, Any] = {}
    for item in node.keywords:
        if item.arg is None:
            raise Malformed("invalid_value", "** is not a literal", offset.node(item))
        if item.arg in arguments:
            raise Malformed("duplicate_key", f"argument {shorten(item.arg)} appears twice", offset.node(item))
        arguments[item.arg] = _value(item.value, offset)
    check_value(arguments, offset.node(node), options)
    return Call(name, arguments)


def _value(node: ast.expr, offset: _Offsets) -> Any:
    """A literal's value; recursion is bounded by the scan's depth limit."""
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | bool | int | float)):
        return _finite(node.value, node, offset)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        number = node.operand.value
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -_finite(number, node, offset)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, offset) for item in node.elts]
    if isinstance(node, ast.Dict):
        out: dict[str, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
                raise Malformed("invalid_value", "dictionary keys must be strings", offset.node(node))
            if key.value in out:
                raise Malformed("duplicate_key", f"key {shorten(key.value)} appears twice", offset.node(key))
            out[key.value] = _value(item, offset)
        return out
    hint = f"{node.id} is a name; write a literal" if isinstance(node, ast.Name) else "an argument must be a literal"
    raise Malformed("invalid_value", hint[:80], offset.node(node))


def _finite(value: Any, node: ast.expr, offset: _Offsets) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise Malformed("invalid_number", "number is too large", offset.node(node))
    return value
