"""The chat formats as bfcl-eval's local handlers write and read them (its "prompting" loop, which all of them use).

| format  | the package's handler            | tool docs                          | decoder    |
|---------|----------------------------------|------------------------------------|------------|
| hermes  | QwenFCHandler                    | raw, one a line, system message    | qwen_fc    |
| llama31 | LlamaHandler_3_1                 | raw, indented, first user message  | llama31    |
| toolace | LlamaHandler (ToolACE-2's)       | raw, indented, its default prompt  | toolace    |

Prompts equal the package's byte for byte, and so do whole conversations of messages written as it would write them.
Where a policy writes otherwise, its own tokens stay in the row, whereas the package renders the history anew: it drops
text beside Qwen's calls and the reasoning of earlier turns, rewrites their JSON, leaves out the newline between two
calls that equal the first one, and strips white space around Llama's messages.

Text that would form a special token is neutralised as in every format of ours; none of BFCL's texts holds any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from seal_jax.chat.formats import REVEAL_TEXT, ChatFormat
from seal_jax.chat.hermes import HermesFormat
from seal_jax.chat.llama31 import Llama31Format
from seal_jax.chat.official import DECODER_OF_CHAT, parse_official
from seal_jax.chat.parsing import Parsed
from seal_jax.chat.toolace import ToolAceFormat
from seal_jax.types import ToolDoc


@dataclass(frozen=True)
class WireTexts:
    """The package's own sentences, read from the installed package (`envs.bfcl.package`).

    hint: what its generation script appends to the description of every tool offered at the start.
    system: its default system prompt, with `{functions}` where the tool documents go.
    """

    hint: str
    system: str


def official_format(name: str, texts: WireTexts) -> ChatFormat:
    """The chat format of that name as the package has it; ValueError if it has none."""
    makers: dict[str, Callable[..., ChatFormat]] = {
        "hermes": OfficialHermes,
        "llama31": OfficialLlama31,
        "toolace": OfficialToolAce,
    }
    if name not in makers:
        raise ValueError(f"chat format {name!r} has no official protocol; choose one of {sorted(makers)}")
    return makers[name](texts=texts)


class _Official:
    """What the three share: hinted docs, the reveal message, and the package's decoder."""

    name: str
    texts: WireTexts

    def _hinted(self, tools: Sequence[ToolDoc]) -> list[dict[str, Any]]:
        hint = self.texts.hint
        return [
            {**doc, "description": doc["description"] + ("" if doc["description"].endswith(hint) else hint)}
            for doc in tools
        ]

    def prompt(self, tools: Sequence[ToolDoc], user: str, system: str = "") -> str:
        return super().prompt(self._hinted(tools), user, system)  # type: ignore[misc]  # of the format beside it

    def reveal(self, tools: Sequence[ToolDoc]) -> str:
        """The docs as Python prints them: the package formats the list into its text."""
        plain = json.loads(json.dumps([dict(doc) for doc in tools]))
        return self.user(f"{plain}\n{REVEAL_TEXT}")  # type: ignore[attr-defined]

    def document(self, doc: ToolDoc) -> str:
        return json.dumps(doc)

    def parse(self, text: str) -> Parsed:
        return parse_official(text, DECODER_OF_CHAT[self.name], super().parse)  # type: ignore[misc]


@dataclass(frozen=True)
class OfficialHermes(_Official, HermesFormat):
    """Qwen in function calling mode: no persona line, docs as they are."""

    default_system: str = ""
    texts: WireTexts = WireTexts("", "")


@dataclass(frozen=True)
class OfficialLlama31(_Official, Llama31Format):
    """Llama 3.1 in function calling mode."""

    texts: WireTexts = WireTexts("", "")

    def document(self, doc: ToolDoc) -> str:
        return json.dumps(doc, indent=4)


@dataclass(frozen=True)
class OfficialToolAce(_Official, ToolAceFormat):
    """ToolACE-2 as a prompted Llama: the package's default system prompt; results are stripped."""

    texts: WireTexts = WireTexts("", "")

    def prompt(self, tools: Sequence[ToolDoc], user: str, system: str = "") -> str:
        docs = json.dumps(self._hinted(tools), indent=4)
        head = self.texts.system.replace("{functions}", docs) + (f"\n\n{system}" if system else "")
        return "<|begin_of_text|>" + self._message("system", self.clean(head).strip()) + self.user(user)

    def observation(self, results: Sequence[str]) -> tuple[str, str]:
        return super().observation([result.strip() for result in results])
