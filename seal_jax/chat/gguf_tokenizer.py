"""A tokenizer rebuilt from the metadata of a GGUF file.

GGUF keeps a byte-level BPE as `tokenizer.ggml.tokens` and `.merges` and only *names* the way text is cut before merging
(`tokenizer.ggml.pre`); `tokenizer.ggml.model` is "gpt2" for all of them and says nothing (transformers#31175, #31358).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seal_jax.gguf_header import GGUFHeader, read_gguf_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from seal_jax.chat.tokenizer import FastTokenizer

_log = logging.getLogger(__name__)

# `tokenizer.ggml.token_type`
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"

#: `tokenizer.ggml.pre` -> our name of the cutting rule.
_PRE = {"smollm": "smollm", "qwen2": "qwen2", "llama-bpe": "llama3", "llama3": "llama3", "llama-v3": "llama3"}
#: Where `pre` is absent or "default" (old conversions), the architecture decides.
_PRE_OF_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}


@dataclass(frozen=True)
class GGUFChatInfo:
    """What the metadata says about text boundaries; None where it says nothing."""

    bos_id: int | None
    eos_id: int | None
    eot_id: int | None  # end of a chat turn, where it differs from eos
    pad_id: int | None
    add_bos: bool | None  # for information: `encode` never adds one
    chat_template: str | None


def gguf_chat_info(path: str | Path | GGUFHeader) -> GGUFChatInfo:
    """The special ids and the chat template (Jinja text) that the file's metadata names."""
    header = path if isinstance(path, GGUFHeader) else read_gguf_header(path)
    get = header.metadata.get
    return GGUFChatInfo(
        bos_id=get("tokenizer.ggml.bos_token_id"),
        eos_id=get("tokenizer.ggml.eos_token_id"),
        eot_id=get("tokenizer.ggml.eot_token_id"),
        pad_id=get("tokenizer.ggml.padding_token_id"),
        add_bos=get("tokenizer.ggml.add_bos_token"),
        chat_template=get("tokenizer.chat_template"),
    )


def tokenizer_from_gguf(path: str | Path) -> FastTokenizer:
    """Rebuild the tokenizer; special and user-defined tokens are atomic, unused (padding) entries are left out.

    A `tokenizer.json` in the same folder is preferred (and logged) when it agrees with the metadata on every token.

    Raises:
      ValueError: not a byte-level BPE, or a pre-tokeniser name that is not known here.
    """
    from seal_jax.chat.tokenizer import FastTokenizer

    header = read_gguf_header(path)
    info = gguf_chat_info(header)
    tokens: list[str] = header.require("tokenizer.ggml.tokens")
    types = header.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"{header.path.name}: {len(tokens)} tokens but {len(types)} token types; convert it again")
    backend = _beside(header, tokens, types) or _build(header, tokens, types)

    def text(id_: int | None) -> str | None:
        return tokens[id_] if id_ is not None and id_ < len(tokens) else None

    return FastTokenizer(backend, bos=text(info.bos_id), eos=text(info.eos_id), chat_template=info.chat_template)


def _build(header: GGUFHeader, tokens: list[str], types: list[int]) -> Backend:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = _cutting_rule(header)
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    merges = [_merge(header, line) for line in header.require("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama3"))
    byte_level: Any = pre_tokenizers.ByteLevel
    first: Any
    if rule == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level(add_prefix_space=False, use_regex=True)])
    else:
        first = pre_tokenizers.Split(Regex(_QWEN2 if rule == "qwen2" else _LLAMA3), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level(add_prefix_space=False, use_regex=False)])
        if rule == "qwen2":
            backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [t for t, k in zip(tokens, types, strict=True) if k == kind]
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(t, normalized=False, special=special) for t in found])
    return backend


def _cutting_rule(header: GGUFHeader) -> str:
    model = header.require("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(
            f"{header.path.name}: tokenizer.ggml.model is {model!r}; only byte-level BPE ('gpt2') is supported"
        )
    pre = header.metadata.get("tokenizer.ggml.pre", "default")
    rule = _PRE.get(pre)
    if rule is None and pre == "default":
        rule = _PRE_OF_ARCHITECTURE.get(header.architecture)
    if rule is None:
        raise ValueError(
            f"{header.path.name}: tokenizer.ggml.pre is {pre!r} (architecture {header.architecture}); known are "
            f"{sorted(_PRE)}: put the model's tokenizer.json in a folder and load that instead"
        )
    return rule


def _merge(header: GGUFHeader, line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space or not left or not right:
        raise ValueError(
            f"{header.path.name}: tokenizer.ggml.merges has the malformed entry {line!r}; convert it again"
        )
    return left, right


def _beside(header: GGUFHeader, tokens: list[str], types: list[int]) -> Backend | None:
    file = header.path.parent / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    vocab = backend.get_vocab(with_added_tokens=True)
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind != _UNUSED and vocab.get(token) != i:
            _log.warning(
                "%s ignored: it gives %r id %s, %s gives it %d", file, token, vocab.get(token), header.path.name, i
            )
            return None
    _log.info("using %s, which agrees with the tokens of %s", file, header.path.name)
    return backend
