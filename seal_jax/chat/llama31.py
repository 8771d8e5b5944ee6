"""Llama 3.1: role headers, tool documents in the first user message, calls as bare JSON with "parameters".

Segments equal Meta's template (custom tools, `tools_in_user_message` on) byte for byte, with one exception on purpose:
results stand raw under the ipython role, as Meta's documentation and BFCL have them; Hugging Face's template would put
strings through `tojson` and so wrap them in quotes.

Decisions.

* A message holds either text or calls. It is a call message iff it starts with `{` (or `<|python_tag|>`), after any
  leading reasoning. A complete call object elsewhere in a text is an error (`text_around_call`), not a silent reply.
* Several calls are separated by `;`, as the models write them and BFCL reads them. Meta's template raises on such a
  message once it is history; here nothing is re-rendered, so it is simply accepted. `ParseOptions(parallel=False)` is
  the one-call-per-message policy: a typed error that tells the model so. Results come one ipython message each.
* "parameters" and "arguments" are both read; "type" (Llama 3.2 writes `"type": "function"`) is ignored.
* `<|begin_of_text|>` is written once, at the head of `prompt`; encoders must add none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from seal_jax.chat.formats import REVEAL_TEXT, dump_json, error_text, escape_in_json, neutralise
from seal_jax.chat.parsing import (
    Malformed,
    Parsed,
    ParseOptions,
    after_leading_reasoning,
    call_from_object,
    decode_json,
    run,
    skip_space,
)
from seal_jax.types import Call, ParseError, ToolDoc

PYTHON_TAG = "<|python_tag|>"


class LlamaMessages:
    """The message frame that Llama 3.x formats share."""

    stop_tokens = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
    special_tokens = (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
    )
    after_message = ""
    assistant_open = "<|start_header_id|>assistant<|end_header_id|>\n\n"

    def clean(self, text: str) -> str:
        return neutralise(text)

    def _open(self, role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}"

    def _message(self, role: str, text: str) -> str:
        return self._open(role, text) + "<|eot_id|>"

    def user(self, text: str) -> str:
        return self._message("user", self.clean(text).strip())

    def reveal(self, tools: Sequence[ToolDoc]) -> str:
        return self.user(dump_json(list(tools)) + "\n" + REVEAL_TEXT)

    def observation(self, results: Sequence[str]) -> tuple[str, str]:
        if not results:
            raise ValueError("observation needs at least one result; an assistant message without calls gets none")
        return "<|eot_id|>".join(self._open("ipython", self.clean(result)) for result in results), "<|eot_id|>"

    def parse_error(self, error: ParseError) -> tuple[str, str]:
        return self._open("user", self.clean(error_text(error))), "<|eot_id|>"

    def note(self, text: str) -> str:
        return self._message("system", self.clean(text).strip())


@dataclass(frozen=True)
class Llama31Format(LlamaMessages):
    """Llama 3.1 JSON calls. `date` is the template's "Today Date" (its default; fixed, so that prompts repeat)."""

    date: str = "26 Jul 2024"
    options: ParseOptions = field(
        default_factory=lambda: ParseOptions(accept_parameters_key=True, ignored_keys=frozenset({"type"}))
    )

    name = "llama31"
    scaffold = ('{"name": "', '", "parameters": {"', '", "parameters": {}}', '": "', '", "', '"}}')

    def document(self, doc: ToolDoc) -> str:
        """A tool document as indented JSON."""
        return dump_json(doc, indent=4)

    def prompt(self, tools: Sequence[ToolDoc], user: str, system: str = "") -> str:
        head = "Environment: ipython\n" if tools else ""
        head += f"Cutting Knowledge Date: December 2023\nToday Date: {self.date}\n\n" + self.clean(system).strip()
        body = ""
        if tools:  # wording of Meta's template: what the models were trained on
            body = (
                "Given the following functions, please respond with a JSON for a function call "
                "with its proper arguments that best answers the given prompt.\n\n"
                'Respond in the format {"name": function name, '
                '"parameters": dictionary of argument name and its value}.Do not use variables.\n\n'
            ) + "".join(self.clean(self.document(doc)) + "\n\n" for doc in tools)
        return (
            "<|begin_of_text|>" + self._message("system", head) + self._message("user", body + self.clean(user).strip())
        )

    def calls(self, calls: Sequence[Call], content: str = "") -> str:
        if calls and content:
            raise ValueError(
                "a llama31 message holds either text or calls; drop `content` or send it as its own message"
            )
        if not calls:
            return self.clean(content).strip()
        return "; ".join(
            escape_in_json(f'{{"name": {dump_json(call.name)}, "parameters": {dump_json(call.arguments)}}}')
            for call in calls
        )

    def parse(self, text: str) -> Parsed:
        return run(json_calls, text, self.options, self.special_tokens)


_CALL_START = re.compile(r'\{\s*"(?:name|type|parameters|arguments)"\s*:')
_TRIES = 16  # so that a text full of braces costs a bounded number of decodings


def json_calls(text: str, options: ParseOptions) -> tuple[str, list[Call]]:
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, or plain text."""
    start = after_leading_reasoning(text, options)
    tagged = text.startswith(PYTHON_TAG, start)
    if tagged:
        start = skip_space(text, start + len(PYTHON_TAG))
    if not text.startswith("{", start):
        if tagged:
            raise Malformed("not_an_object", "a call must be a JSON object", start)
        _refuse_buried_call(text, start, options)
        return text[start:].strip(), []
    calls: list[Call] = []
    while True:
        try:
            value, end = decode_json(text, start, options)
        except Malformed as fault:
            # No tag says where a call ends, so a fault at the end of the text is a call that was cut.
            if (fault.position or 0) >= len(text.rstrip()) or "Unterminated" in fault.message:
                raise Malformed("unclosed", "call is cut off before its end", start) from None
            raise
        calls.append(call_from_object(value, start, options))
        if len(calls) > options.max_calls:
            raise Malformed("too_many_calls", f"more than {options.max_calls} calls in one message", start)
        end = skip_space(text, end)
        if end == len(text):
            return "", calls
        if text[end] != ";":
            raise Malformed("extra_data", "unexpected text after the call's JSON object", end)
        if not options.parallel:
            raise Malformed("parallel_calls", "one call per message", end)
        start = skip_space(text, end + 1)


def _refuse_buried_call(text: str, start: int, options: ParseOptions) -> None:
    at = text.find(PYTHON_TAG, start)
    if at >= 0:
        raise Malformed("text_around_call", "text before the call", at)
    for tries, found in enumerate(_CALL_START.finditer(text, start)):
        if tries == _TRIES:
            return
        try:
            value, _ = decode_json(text, found.start(), options)
        except Malformed:
            continue
        if isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value):
            raise Malformed("text_around_call", "a message holds either text or calls", found.start())
