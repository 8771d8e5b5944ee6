"""Hermes tool calls in ChatML: Qwen2, Qwen2.5, Qwen3 and (without an official tool section) SmolLM2.

Byte for byte what Qwen2.5's chat template writes, with these settings:

* Qwen2.5: the default (a persona line when no system text is given).
* Qwen3 and BFCL's own Qwen prompt: `default_system=""` (no persona; the tool section opens the system message).
  `generation_prefix="<think>\\n\\n</think>\\n\\n"` is Qwen3 with thinking switched off.
* SmolLM2: `default_system=SMOLLM2_SYSTEM`; its template knows no tools, so with tools it gets Qwen2.5's section.

Tool documents are dumped as they are given: pass the bare function objects (BFCL's local Qwen handler) or wrap them in
{"type": "function", "function": ...} (what `apply_chat_template` does with functions).

Decisions. White space inside a `<tool_call>` block is free (BFCL's reader wants newlines there). A `<tool_response>` or
`</tool_response>` inside a tool result stays as it is, as in the official template: it is text, not a special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from seal_jax.chat.formats import REVEAL_TEXT, dump_json, error_text, escape_in_json, neutralise, opening_of
from seal_jax.chat.parsing import Parsed, ParseOptions, run, tagged_calls
from seal_jax.types import Call, ParseError, ToolDoc

QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# Template text of Qwen2.5 (Apache-2.0): what the models were trained on, so not ours to reword.
_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

#: SmolLM2's special tokens that are not written `<|x|>`.
_SMOLLM2_TOKENS = opening_of(
    [
        *("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>", "<issue_start>", "<issue_comment>"),
        *("<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>"),
        *("<jupyter_script>", "<empty_output>"),
    ]
)
_CALL_TAGS = opening_of(["<tool_call>", "</tool_call>"])


@dataclass(frozen=True)
class HermesFormat:
    """ChatML with Hermes tool calls.

    default_system: system text when none is given ("" = none). generation_prefix: text behind the assistant header.
    """

    default_system: str = QWEN25_SYSTEM
    generation_prefix: str = ""
    options: ParseOptions = field(default_factory=ParseOptions)

    name = "hermes"
    stop_tokens = ("<|im_end|>", "<|endoftext|>")
    special_tokens = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    scaffold = (
        '<tool_call>\n{"name": "',
        '", "arguments": {"',
        '", "arguments": {}}\n</tool_call>',
        '": "',
        '", "',
        '": ',
        ', "',
        '"}}\n</tool_call>',
        "}}\n</tool_call>",
        "user\n<tool_response>\n",
        "\n</tool_response>",
    )
    after_message = "\n"

    @cached_property
    def assistant_open(self) -> str:
        return "<|im_start|>assistant\n" + self.generation_prefix

    def clean(self, text: str) -> str:
        return neutralise(text, _SMOLLM2_TOKENS)

    def _message(self, role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    def document(self, doc: ToolDoc) -> str:
        """A tool document as JSON on one line."""
        return dump_json(doc)

    def prompt(self, tools: Sequence[ToolDoc], user: str, system: str = "") -> str:
        head = self.clean(system) if system else self.default_system
        if tools:
            docs = "".join("\n" + self.clean(self.document(doc)) for doc in tools)
            head += ("\n\n" if head else "") + _TOOLS_HEAD + docs + _TOOLS_TAIL
        return (self._message("system", head) if head else "") + self.user(user)

    def user(self, text: str) -> str:
        return self._message("user", self.clean(text))

    def reveal(self, tools: Sequence[ToolDoc]) -> str:
        return self.user(dump_json(list(tools)) + "\n" + REVEAL_TEXT)

    def observation(self, results: Sequence[str]) -> tuple[str, str]:
        if not results:
            raise ValueError("observation needs at least one result; an assistant message without calls gets none")
        body = "".join(f"\n<tool_response>\n{self.clean(result)}\n</tool_response>" for result in results)
        return "<|im_start|>user" + body, "<|im_end|>\n"

    def parse_error(self, error: ParseError) -> tuple[str, str]:
        return "<|im_start|>user\n" + self.clean(error_text(error)), "<|im_end|>\n"

    def note(self, text: str) -> str:
        return self._message("system", self.clean(text))

    def calls(self, calls: Sequence[Call], content: str = "") -> str:
        parts = [neutralise(self.clean(content), _CALL_TAGS)] if content else []
        for call in calls:
            arguments = escape_in_json(dump_json(call.arguments), _SMOLLM2_TOKENS)
            name = escape_in_json(dump_json(call.name), _SMOLLM2_TOKENS)
            parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
        return "\n".join(parts)

    def parse(self, text: str) -> Parsed:
        return run(tagged_calls, text, self.options, self.special_tokens)
