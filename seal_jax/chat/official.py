"""From a sampled message to the calls that BFCL's own handlers would execute (bfcl-eval 2026.3.23).

These decoders are lax where `ChatFormat.parse` is strict, and their quirks decide official scores: JSON bodies that do
not parse are skipped, positional arguments are dropped, a dict that holds only dicts becomes a call, an empty dict
makes the whole message undecodable. `()` means "no call": undecodable and empty are the same there, the turn ends.

What the package writes into a line of Python for its evaluator is read here instead. Values come back as that line
would yield them; what is no literal in it (a nested call, `nan`, a broken string) is kept as `Unevaluated` source.

Deviations, all of them where the package would run a model's text as code: names are names, so a tool or argument name
that smuggles in more Python is just an unknown name; an operator between numbers is computed by hand (and between two
strings, +), any other makes the message undecodable, and so does an integer that Python would refuse to print. Messages
beyond `MAX_CHARS` are undecodable.
"""

from __future__ import annotations

import ast
import json
import operator
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from seal_jax.chat.parsing import Parsed
from seal_jax.types import NO_CALL_FAULTS, Call, ParseError, Unevaluated

#: Characters. Twenty times what 4,096 tokens, the package's limit of a message, usually hold.
MAX_CHARS = 300_000
#: Python prints no longer integer (4,300 decimal digits).
_MAX_BITS = 14_284


class _Undecodable(Exception):
    """The package's decoder would raise here."""


def decode_qwen_fc(text: str) -> tuple[Call, ...]:
    """Qwen in function calling mode: JSON between `<tool_call>` tags on lines of their own, after any reasoning."""

    def read() -> Iterator[Call]:
        found = list(_tagged_json(text.rpartition("</think>")[2]))
        for item in found:
            if not isinstance(item, dict):
                raise _Undecodable
        for item in found:
            arguments = item["arguments"]
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            hash(item["name"])  # the package makes it a key, which fails for lists and objects
            yield _call(item["name"], {k: repr(v) for k, v in arguments.items()})

    return _decoded(read, text)


def decode_llama31(text: str) -> tuple[Call, ...]:
    """Llama 3.1 in function calling mode: JSON objects separated by `;`, or else *Python* literals.

    A single call is read as Python by the package, so one with `true`, `false` or `null` is undecodable there and here.
    """

    def read() -> Iterator[Call]:
        body = text.replace("<|python_tag|>", "")
        found: Any = (
            [json.loads(part) for part in body.split(";")] if ";" in body else _literal(_parse(body.lstrip(" \t")))
        )
        for item in [found] if isinstance(found, dict) else found:
            yield _call(item["name"], {k: repr(v) for k, v in item["parameters"].items()})

    return _decoded(read, text)


def decode_prompting(text: str) -> tuple[Call, ...]:
    """The default of prompted models: a Python list of calls, with or without its brackets."""

    def read() -> Iterator[Call]:
        body = text.strip("`\n ")
        body = body if body.startswith("[") else "[" + body
        body = body if body.endswith("]") else body + "]"
        tree = _parse(body.strip().strip("'"))
        elements: list[ast.expr] = [tree] if isinstance(tree, ast.Call) else tree.elts  # type: ignore[attr-defined]
        for element in elements:
            if not isinstance(element, ast.Call):
                raise _Undecodable
        for element in elements:
            assert isinstance(element, ast.Call)
            for name, arguments in _resolve_call(element).items():
                yield _call(name, {k: _written(v) for k, v in arguments.items()})

    return _decoded(read, text)


DECODERS: Mapping[str, Callable[[str], tuple[Call, ...]]] = {
    "qwen_fc": decode_qwen_fc,
    "prompting": decode_prompting,
    "toolace": decode_prompting,  # the package runs ToolACE-2 as a prompted Llama
    "llama31": decode_llama31,
}
#: Which of them reads what a chat format writes; the package has no handler for the other formats.
DECODER_OF_CHAT = {"hermes": "qwen_fc", "llama31": "llama31", "toolace": "toolace"}


def parse_official(text: str, decoder: str, strict: Callable[[str], Parsed]) -> Parsed:
    """A message as the official protocol reads it.

    One without a call ends the turn there, be it prose or a call gone wrong; here the latter carries an error (by
    `strict`, the chat format's own parser), so that the diagnosis can name it. The verdict is the same.
    """
    calls = DECODERS[decoder](text)
    if calls:
        return Parsed("", calls)
    parsed = strict(after_reasoning(text) if decoder == "qwen_fc" else text)
    if parsed.calls:
        fault = ParseError("undecodable", "the official decoder finds no call in this message")
        return Parsed(text, (), fault)
    if parsed.error is not None and parsed.error.kind in NO_CALL_FAULTS:
        return Parsed(text, ())
    return parsed


def after_reasoning(text: str) -> str:
    """What the package's Qwen handler keeps of a message."""
    return text.rpartition("</think>")[2].lstrip("\n") if "</think>" in text else text


# --- what all share --------------------------------------------------------------------------------------------------
def _decoded(read: Callable[[], Iterable[Call]], text: str) -> tuple[Call, ...]:
    if len(text) > MAX_CHARS:
        return ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # '\d' in a string is the policy's matter
            return tuple(read())
    except Exception:  # whatever the package trips over it catches; the message is then no call
        return ()


def _call(name: object, arguments: Mapping[Any, str]) -> Call:
    """The call in the line `name(key=text, ...)`; the texts are what the package would write for the values.

    Python ignores white space around a name and normalises identifiers.
    """
    return Call(
        str(name).strip(), {unicodedata.normalize("NFKC", str(k)): _as_python_reads(v) for k, v in arguments.items()}
    )


def _as_python_reads(text: str) -> Any:
    """The value of an argument's text, or the text itself where it is not a literal."""
    try:
        tree = _parse(f"f(x={text})")  # in its place, so that nesting is bounded where the evaluator bounds it
        if isinstance(tree, ast.Call) and not tree.args and len(tree.keywords) == 1:
            return ast.literal_eval(tree.keywords[0].value)
    except Exception:  # broken quotes, lists as keys, too deep: the evaluator would fail as well
        pass
    return Unevaluated(text)


def _parse(source: str) -> ast.expr:
    """Python's own parser, which runs nothing."""
    return ast.parse(source, mode="eval").body


def _tagged_json(text: str) -> Iterator[Any]:
    """The JSON values between `<tool_call>` and `</tool_call>`, each tag on a line of its own; others are skipped."""
    opening, closing = "<tool_call>\n", "\n</tool_call>"
    position = 0
    while (start := text.find(opening, position)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        try:
            yield json.loads(text[start + len(opening) : end])
        except Exception:  # not JSON, nested too deep, an integer too long
            pass
        position = end + len(closing)


# --- the prompting decoder -------------------------------------------------------------------------------------------
def _resolve_call(node: ast.Call) -> dict[str, dict[Any, Any]]:
    """{dotted name: {argument: value}}; positional arguments are dropped, of a repeated argument the last counts."""
    parts: list[str] = []
    function = node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(function.id)
    return {".".join(reversed(parts)): {item.arg: _resolve(item.value) for item in node.keywords}}


def _resolve(node: ast.expr | None) -> Any:
    """An argument's value by the package's rules, which are not Python's: names are strings, `+5` and `~5` are -5."""
    match node:
        case ast.Constant(value=value):
            return "..." if value is Ellipsis else value
        case ast.UnaryOp(operand=ast.Constant(value=value)):
            return -value  # type: ignore[operator]  # not a number: it raises, as it does there
        case ast.List(elts=elements):
            return [_resolve(x) for x in elements]
        case ast.Tuple(elts=elements):
            return tuple(_resolve(x) for x in elements)
        case ast.Dict(keys=keys, values=values):
            return {_resolve(k): _resolve(v) for k, v in zip(keys, values, strict=True)}
        case ast.BinOp():
            return _compute(node)
        case ast.Name(id=name):
            return name
        case ast.Call(keywords=[]):
            return ast.unparse(node)
        case ast.Call():
            return _resolve_call(node)
        case ast.Subscript(value=value, slice=index):
            return f"{ast.unparse(value)}[{ast.unparse(index)}]"
        case _:
            raise _Undecodable


def _written(value: Any) -> str:
    """A value in the package's own notation, in which a dict that holds only dicts is a call of its first key."""
    if not isinstance(value, dict):
        return repr(value)
    if all(isinstance(inner, dict) for inner in value.values()):
        if not value:
            raise _Undecodable  # the package looks for its first key
        name = next(iter(value))
        return f"{name}({', '.join(f'{k}={_written(v)}' for k, v in value[name].items())})"
    return "{" + ", ".join(f"'{k}': {_written(v)}" for k, v in value.items()) + "}"


# --- literals with arithmetic ----------------------------------------------------------------------------------------
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}


def _compute(node: ast.expr) -> Any:
    """Operators between numbers, as Python has them, within bounds; `+` between strings."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_number(_compute(operand))))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _compute(left), _compute(right)
            if isinstance(op, ast.Add) and isinstance(a, str) and isinstance(b, str):
                return a + b  # no longer than the message
            a, b = _number(a), _number(b)
            if isinstance(a, int) and isinstance(b, int):
                bits = {ast.Pow: b * a.bit_length() if abs(a) > 1 else 1, ast.LShift: b}
                if bits.get(type(op), 0) > 2 * _MAX_BITS:
                    raise _Undecodable
            return _bounded(_OPERATORS[type(op)](a, b))
    raise _Undecodable


def _number(value: Any) -> Any:
    if not isinstance(value, int | float | complex):
        raise _Undecodable
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise _Undecodable
    return value


def _literal(node: ast.expr | None) -> Any:
    """What the expression evaluates to, for literals and arithmetic; anything else is undecodable."""
    match node:
        case ast.List(elts=elements):
            return [_literal(x) for x in elements]
        case ast.Tuple(elts=elements):
            return tuple(_literal(x) for x in elements)
        case ast.Dict(keys=keys, values=values):
            return {_literal(k): _literal(v) for k, v in zip(keys, values, strict=True)}
        case ast.Set(elts=elements):
            return {_literal(x) for x in elements}
        case ast.Constant() | ast.UnaryOp() | ast.BinOp():
            return _compute(node)
        case _:
            raise _Undecodable
