"""The format of small policies that start from random weights: few tokens, one way to write everything.

    <|system|>send(id: str, amount: int, mode?: fast|slow) - move money
    find(key: str) - id of an account<|end|><|user|>Send 5 to Ann.<|end|>
    <|assistant|><tool_call>{"name": "find", "arguments": {"key": "Ann"}}</tool_call><|end|>
    <|tool|>{"id": "a1"}<|end|>

Role markers are single tokens and calls are canonical JSON (`json.dumps` with default separators), so the strings of
`scaffold`, made tokens of their own, cover everything in a call but names and values. Unlike in the other formats, call
and reasoning tags in outside text are neutralised too: here they are tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seal_jax.chat.formats import ERROR_HEAD, dump_json, error_text, escape_in_json, neutralise, opening_of
from seal_jax.chat.parsing import ERROR_KINDS, Parsed, ParseOptions, run, tagged_calls
from seal_jax.types import Call, ParseError, ToolDoc

_TAGS = opening_of(["<tool_call>", "</tool_call>", "<think>", "</think>"])
_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "float": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
}
_MARK = re.compile(r"\[[^\[\]]{1,80}\]")
_SENTENCE_END = re.compile(r"\.\s|\n")


def type_word(schema: Mapping[str, Any]) -> str:
    """`a|b|c` for an enum, else the Python word for a JSON type; lists name what they hold."""
    if schema.get("enum"):
        return "|".join(value if isinstance(value, str) else dump_json(value) for value in schema["enum"])
    word = _TYPES.get(str(schema.get("type", "")), str(schema.get("type", "any")))
    if word == "list" and isinstance(schema.get("items"), Mapping) and "type" in schema["items"]:
        return f"list[{type_word(schema['items'])}]"
    return word


def signature(doc: ToolDoc) -> str:
    """One line per tool: `name(arg: type, opt?: type=default) - what it does`.

    Of the description the first sentence is kept. Bracketed marks such as `[required]`, which an interface may have put
    into any description, are kept as well.
    """
    parameters = doc.get("parameters", {})
    required = set(parameters.get("required", ()))
    parts = []
    for name, schema in parameters.get("properties", {}).items():
        part = f"{name}{'' if name in required else '?'}: {type_word(schema)}"
        if "default" in schema:
            default = schema["default"]
            part += f"={default if isinstance(default, str) else dump_json(default)}"
        parts.append(" ".join([part, *_MARK.findall(str(schema.get("description", "")))]))
    described = str(doc.get("description", "")).strip()
    first = _SENTENCE_END.split(described, maxsplit=1)[0].rstrip(". ")
    marks = [mark for mark in _MARK.findall(described) if mark not in first]
    text = " ".join(x for x in [first, *marks] if x)
    return f"{doc['name']}({', '.join(parts)})" + (f" - {text}" if text else "")


@dataclass(frozen=True)
class TinyFormat:
    """Single-token role markers, one signature line per tool, `<tool_call>{json}</tool_call>`."""

    options: ParseOptions = field(default_factory=ParseOptions)

    name = "tiny"
    stop_tokens = ("<|end|>",)
    special_tokens = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|note|>", "<|end|>")
    scaffold = (
        '<tool_call>{"name": "',
        '", "arguments": {"',
        '", "arguments": {}}</tool_call>',
        '": "',
        '", "',
        '": ',
        ', "',
        '"}}</tool_call>',
        "}}</tool_call>",
        '": ["',
        '"]',
        '{"',
        '"}',
        '{"error": "',
        '[{"',
        '"}, {"',
        "}, {",
        "}]",
        "(",
        ")",
        "?: ",
        ") - ",
        ERROR_HEAD,
    )
    after_message = ""
    assistant_open = "<|assistant|>"

    def clean(self, text: str) -> str:
        return neutralise(text, _TAGS)

    def _tools(self, tools: Sequence[ToolDoc]) -> str:
        return self.clean("\n".join(signature(doc) for doc in tools))

    def prompt(self, tools: Sequence[ToolDoc], user: str, system: str = "") -> str:
        head = "\n".join(x for x in (self.clean(system), self._tools(tools)) if x)
        return (f"<|system|>{head}<|end|>" if head else "") + self.user(user)

    def user(self, text: str) -> str:
        return f"<|user|>{self.clean(text)}<|end|>"

    def reveal(self, tools: Sequence[ToolDoc]) -> str:
        return f"<|user|>New tools:\n{self._tools(tools)}<|end|>"

    def observation(self, results: Sequence[str]) -> tuple[str, str]:
        if not results:
            raise ValueError("observation needs at least one result; an assistant message without calls gets none")
        return "<|end|>".join(f"<|tool|>{self.clean(result)}" for result in results), "<|end|>"

    def parse_error(self, error: ParseError) -> tuple[str, str]:
        # The parser's errors by the words of their kind: few distinct tokens for a policy with a small vocabulary.
        # Other errors (a tool that is not available) name something the policy needs to know.
        text = ERROR_HEAD + error.kind.replace("_", " ") if error.kind in ERROR_KINDS else error_text(error)
        return f"<|tool|>{self.clean(text)}", "<|end|>"

    def note(self, text: str) -> str:
        return f"<|note|>{self.clean(text)}<|end|>"

    def calls(self, calls: Sequence[Call], content: str = "") -> str:
        parts = [self._content(content)] if content else []
        for call in calls:
            body = dump_json({"name": call.name, "arguments": call.arguments})
            parts.append(f"<tool_call>{escape_in_json(body, _TAGS)}</tool_call>")
        return "\n".join(parts)

    def _content(self, text: str) -> str:
        # An assistant message may reason, so only what would read as a call is neutralised.
        return neutralise(text, opening_of(["<tool_call>", "</tool_call>"]))

    def parse(self, text: str) -> Parsed:
        return run(tagged_calls, text, self.options, self.special_tokens)
