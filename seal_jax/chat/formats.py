"""Chat formats: how a conversation is written as text segments, and how a sampled message is read back.

A format only ever writes *new* text. The conversation itself is a list of token segments that nobody re-renders, so
what a template would do to earlier messages never happens; `prefix_breaks` counts where one would have done it.

Every piece of text that comes from outside (users, tools, tool documents, notes) goes through `neutralise` first: it
can never form a special token. The rule is readable and needs no undoing: a space is put behind the `<` of anything
that looks like one, so `<|im_end|>` is shown as `< |im_end|>`. Ordinary text, plain tags such as `<b>` or
`</tool_response>` included, stays byte for byte what the official template would write.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from seal_jax.chat.parsing import Parsed, ParseOptions
from seal_jax.types import Call, ParseError, ToolDoc

__all__ = [
    "ChatFormat",
    "FORMATS",
    "Parsed",
    "ParseOptions",
    "dump_json",
    "get_format",
    "neutralise",
    "prefix_breaks",
    "reasoning_rewrites",
]

#: What a reply to a malformed message starts with.
ERROR_HEAD = "[ERROR] Invalid tool call format: "
#: What a user says when held-out tools appear. BFCL's wording (bfcl_eval, Apache-2.0): part of the benchmark.
REVEAL_TEXT = "I have updated some more functions you can choose from. What about now?"


class ChatFormat(Protocol):
    """One family's chat template as text segments. All methods are pure."""

    @property
    def name(self) -> str:
        """ "tiny", "hermes" (Qwen2, Qwen2.5, Qwen3, SmolLM2), "llama31" or "toolace"."""
        ...

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """Special tokens that end an assistant message; demonstrations end with the first."""
        ...

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens this format writes or stops at."""
        ...

    @property
    def scaffold(self) -> tuple[str, ...]:
        """Strings worth a token of their own in a tokenizer trained for this format."""
        ...

    @property
    def assistant_open(self) -> str:
        """Header of an assistant message."""
        ...

    @property
    def after_message(self) -> str:
        """What the template puts behind a sampled end token; it goes at the head of the next segment."""
        ...

    @property
    def options(self) -> ParseOptions:
        """What `parse` accepts."""
        ...

    def clean(self, text: str) -> str:
        """Outside text made safe for this format. Methods below do it themselves; a cue between segments needs it."""
        ...

    def prompt(self, tools: Sequence[ToolDoc], user: str, system: str = "") -> str:
        """Tools, system text and the first user message, closed; without the assistant header."""
        ...

    def user(self, text: str) -> str:
        """A later user message, closed."""
        ...

    def reveal(self, tools: Sequence[ToolDoc]) -> str:
        """The user message that reveals held-out tools, closed."""
        ...

    def observation(self, results: Sequence[str]) -> tuple[str, str]:
        """The results of one message's calls as (head, tail). The tail starts with a special token, so the two tokenise
        separately exactly as together, and a cue may stand between them. No results: ValueError."""
        ...

    def parse_error(self, error: ParseError) -> tuple[str, str]:
        """The reply to a malformed message, as (head, tail) like an observation."""
        ...

    def note(self, text: str) -> str:
        """A closed message of its own holding the interface's note."""
        ...

    def calls(self, calls: Sequence[Call], content: str = "") -> str:
        """Body of an assistant message, without end token; `parse` reads the same calls back."""
        ...

    def parse(self, text: str) -> Parsed:
        """Reads one sampled message (end token removed). Strict; never raises."""
        ...


#: name -> (module, class). A format's module is imported when it is asked for.
FORMATS: Mapping[str, tuple[str, str]] = {
    "tiny": ("seal_jax.chat.tiny", "TinyFormat"),
    "hermes": ("seal_jax.chat.hermes", "HermesFormat"),
    "llama31": ("seal_jax.chat.llama31", "Llama31Format"),
    "toolace": ("seal_jax.chat.toolace", "ToolAceFormat"),
}


def get_format(name: str, **settings: Any) -> ChatFormat:
    """The format of that name.

    `settings` are its fields (`get_format("hermes", default_system="")`) and fields of ParseOptions, which change the
    format's own defaults (`get_format("llama31", parallel=False)`). Unknown ones are a ValueError.
    """

    if name not in FORMATS:
        raise ValueError(f"chat format {name!r} is not known; choose one of {sorted(FORMATS)}")
    module, class_name = FORMATS[name]
    kind = getattr(importlib.import_module(module), class_name)
    own, parsing = ({f.name for f in dataclasses.fields(x)} for x in (kind, ParseOptions))
    for setting in settings:
        if setting not in own | parsing:
            raise ValueError(f"chat format {name!r} has no setting {setting!r}; choose from {sorted(own | parsing)}")
    made = kind(**{key: value for key, value in settings.items() if key in own})
    changed = {key: value for key, value in settings.items() if key in parsing}
    return dataclasses.replace(made, options=dataclasses.replace(made.options, **changed)) if changed else made


# --- text from outside -----------------------------------------------------------------------------------------------
_SPECIAL = re.compile(r"<(?=\|[^\s|<>]+\|>)")
_SURROGATE = re.compile("[\ud800-\udfff]")


def neutralise(text: str, also: re.Pattern[str] | None = None) -> str:
    """Text that can form no special token: `<|x|>` becomes `< |x|>`. Applying it twice changes nothing more.

    `also` matches the `<` of further tokens of a format. Lone surrogates, which cannot be tokenised, become U+FFFD.
    """
    if _SURROGATE.search(text):
        text = _SURROGATE.sub("\ufffd", text)
    if "<" not in text:
        return text
    text = _SPECIAL.sub("< ", text)
    return also.sub("< ", text) if also is not None else text


def escape_in_json(text: str, also: re.Pattern[str] | None = None) -> str:
    """The same for JSON that must read back unchanged: the `<` of a special token is written as its JSON escape."""
    if _SURROGATE.search(text):
        text = _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
    if "<" not in text:
        return text
    text = _SPECIAL.sub(r"\\u003c", text)
    return also.sub(r"\\u003c", text) if also is not None else text


def opening_of(names: Sequence[str]) -> re.Pattern[str]:
    """A pattern for the `<` of the given tokens (each written with its brackets)."""
    return re.compile("<(?=" + "|".join(re.escape(name[1:]) for name in names) + ")")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"tool document or arguments hold {type(value).__name__} {value!r}, which is not JSON")


def dump_json(value: Any, indent: int | None = None) -> str:
    """JSON as chat templates write it: default separators, no ASCII escapes, no NaN (ValueError)."""
    return json.dumps(value, ensure_ascii=False, indent=indent, allow_nan=False, default=_plain)


def error_text(error: ParseError, limit: int = 200) -> str:
    return ERROR_HEAD + error.message[:limit]


# --- templates that rewrite history ----------------------------------------------------------------------------------
def prefix_breaks(
    render: Callable[[Sequence[Mapping[str, Any]], bool], str], messages: Sequence[Mapping[str, Any]]
) -> int:
    """On how many assistant messages re-rendering the conversation would have changed text the model already saw.

    `render(messages, add_generation_prompt)` is a chat template, e.g.
    `lambda m, g: tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=g)`. The text before and behind
    each assistant message must be a prefix of the text at the next one; Qwen3's template, which drops the reasoning of
    earlier turns, fails this. 0 means the template is prefix-preserving on this conversation.
    """
    breaks, seen = 0, ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opened = render(messages[:i], True)
        closed = render(messages[: i + 1], False)
        breaks += not (opened.startswith(seen) and closed.startswith(opened))
        seen = closed
    if messages and messages[-1]["role"] != "assistant":
        breaks += not render(messages, True).startswith(seen)
    return breaks


def reasoning_rewrites(turns: Sequence[Sequence[str]]) -> int:
    """Sampled messages whose reasoning a Qwen3-like template would have dropped: `</think>` in a turn that is over.

    `turns` are the sampled texts, turn by turn. The token segments keep that reasoning; this is the number to log.
    """
    return sum("</think>" in text for turn in turns[:-1] for text in turn)
