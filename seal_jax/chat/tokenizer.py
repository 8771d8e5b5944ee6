"""Tokenizers: text to token ids and back, exactly.

Every tokenizer here keeps three promises, whatever its origin:

* `encode` adds nothing: no BOS, no prefix space. What a template wants at its head, the template writes, so a
  beginning-of-text token can never appear twice.
* A special token in the text is one id, always. (Text that users or tools wrote is made harmless by the chat format
  before it comes here.)
* `decode` leaves special tokens in the text, and `decode(encode(text)) == text`. (Qwen's vocabularies normalise to
  NFC first; there the promise is for NFC text.)

Four origins: `ByteTokenizer` (tests), `train_tokenizer` (small policies that start from random weights),
`load_tokenizer` (a folder or hub id) and `tokenizer_from_gguf` (the metadata of a GGUF file).

Pure Python; `tokenizers`, `transformers` and `gguf` are imported where they are needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    #: Number of real ids: every id is < vocab_size. A model's head may have more rows (padding); those are no tokens.
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int: ...

    def save(self, folder: Path) -> None: ...


def _utf8(text: str) -> str:
    """Replace lone surrogates (a JSON escape such as "\\ud800" makes one), which no UTF-8 tokenizer can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


# --- the general case: a `tokenizers` object -------------------------------------------------------------------------
@dataclass
class FastTokenizer:
    """A `tokenizers.Tokenizer` behind the protocol, with what its origin said about BOS, EOS and the chat template.

    `bos`, `eos` and `chat_template` are information only: `encode` never uses them.
    """

    backend: Backend
    bos: str | None = None
    eos: str | None = None
    chat_template: str | None = None
    vocab_size: int = field(init=False)

    def __post_init__(self) -> None:
        vocab = self.backend.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ValueError("tokenizer: the vocabulary is empty; check tokenizer.json")
        self.vocab_size = max(vocab.values()) + 1
        self.backend.no_padding()
        self.backend.no_truncation()

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(_utf8(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_id(self, token: str) -> int:
        found = self.backend.token_to_id(token)
        if found is None:
            raise ValueError(
                f"tokenizer: no token {token!r} in {self.vocab_size} ids; use the chat format it was made for"
            )
        return found

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which `load_tokenizer` and transformers load."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(1e30),
        }
        named = {"bos_token": self.bos, "eos_token": self.eos, "chat_template": self.chat_template}
        config |= {key: value for key, value in named.items() if value is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# --- bytes, for tests ------------------------------------------------------------------------------------------------
class ByteTokenizer:
    """One id per UTF-8 byte (0..255), then the special tokens in the given order (256, 257, ...)."""

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        _check_added("special_tokens", special_tokens)
        self.special_tokens = tuple(special_tokens)
        self.vocab_size = 256 + len(self.special_tokens)
        self._id = {token: 256 + i for i, token in enumerate(self.special_tokens)}
        self._split = _splitter(self.special_tokens)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._split(_utf8(text)):
            if part in self._id:
                ids.append(self._id[part])
            else:
                ids.extend(part.encode())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        data = bytearray()
        for i in ids:
            data += self.special_tokens[i - 256].encode() if i >= 256 else bytes([i])
        return data.decode("utf-8", "replace")

    def token_id(self, token: str) -> int:
        if token in self._id:
            return self._id[token]
        data = token.encode()
        if len(data) != 1:
            raise ValueError(f"tokenizer: no token {token!r}; the special tokens are {list(self.special_tokens)}")
        return data[0]

    def save(self, folder: Path) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        letters = _byte_letters()
        backend = Backend(models.BPE(vocab={letters[b]: b for b in range(256)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in self.special_tokens])
        FastTokenizer(backend).save(folder)


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE vocabularies write for each byte (GPT-2's convention)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]


# --- trained in place ------------------------------------------------------------------------------------------------
# One piece per alternative, left to right. A word is never in one piece with a blank, a quote or a digit, so it has the
# same ids at the start of a string, after a space and inside quotes: copying a name from the user's message into a call
# is then copying ids, also for names no one has seen. A single blank after punctuation goes with the punctuation (and
# with punctuation behind it), which costs no word its identity and makes `", "` and `: ` one piece each.
_PIECES = r"\p{L}[\p{L}\p{M}]*|\p{N}|_|\n+|[^\s\p{L}\p{N}_]+(?: [^\s\p{L}\p{N}_]*)?| +|\s"


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, special_tokens: Sequence[str], scaffold: Sequence[str] = ()
) -> FastTokenizer:
    """Train a byte-level BPE whose words never swallow a space, a quote or a digit.

    Ids: special tokens in order, then scaffold strings in order, then the 256 bytes, then merges. The result depends on
    the texts only (and not on their order). The vocabulary ends up smaller than `vocab_size` when the texts have too
    few distinct words to fill it.

    Args:
      texts: training text; special tokens and scaffold strings in it are cut out before pieces are counted.
      vocab_size: upper bound on the number of ids, everything included.
      special_tokens: markers that are one id wherever they stand (ASCII).
      scaffold: frequent fixed strings worth an id of their own, such as '{"name": "' (ASCII). The longest match wins.
        One that begins or ends with a letter or digit only matches at a word's edge, so that it cannot cut a word.

    Raises:
      ValueError: `vocab_size` cannot hold the bytes and the given tokens; a token is empty, repeated or not ASCII.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    _check_added("special_tokens", special_tokens)
    _check_added("scaffold", [*special_tokens, *scaffold])
    floor = 256 + len(special_tokens) + len(scaffold)
    if vocab_size < floor:
        raise ValueError(
            f"train_tokenizer: vocab_size={vocab_size} cannot hold 256 bytes, {len(special_tokens)} special tokens and "
            f"{len(scaffold)} scaffold strings; set it to {floor} or more"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(t, normalized=False, special=True) for t in special_tokens]
    fixed = [AddedToken(t, normalized=False, special=False, single_word=_wordlike(t)) for t in scaffold]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*special, *fixed],  # gives them the first ids
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    split = _splitter(special_tokens, scaffold)
    added = {*special_tokens, *scaffold}
    parts = (part for text in texts for part in split(_utf8(text)) if part and part not in added)
    backend.train_from_iterator(parts, trainer)
    # The trainer calls all of them special; a scaffold string is ordinary text that happens to have an id.
    state = json.loads(backend.to_str())
    for entry in state["added_tokens"]:
        entry["special"] = entry["content"] in set(special_tokens)
    return FastTokenizer(Backend.from_str(json.dumps(state)))


def _wordlike(text: str) -> bool:
    """Would this string, matched anywhere, cut a word or a number in two?"""
    return text[0].isalnum() or text[-1].isalnum()


def _check_added(name: str, tokens: Sequence[str]) -> None:
    seen: set[str] = set()
    for token in tokens:
        if not token or not token.isascii():  # a non-ASCII one could read as byte letters in decode
            raise ValueError(f"tokenizer: {name} has {token!r}; give non-empty ASCII strings")
        if token in seen:
            raise ValueError(f"tokenizer: {name} has {token!r} twice; give each token once")
        seen.add(token)


def _splitter(special: Sequence[str], scaffold: Sequence[str] = ()) -> Callable[[str], list[str]]:
    """A function that cuts text at every occurrence of the tokens (longest first), keeping them as parts."""
    if not special and not scaffold:
        return lambda text: [text]
    patterns = {t: re.escape(t) for t in special}
    patterns |= {t: rf"(?<!\w){re.escape(t)}(?!\w)" if _wordlike(t) else re.escape(t) for t in scaffold}
    longest_first = sorted(patterns, key=len, reverse=True)
    return re.compile("(" + "|".join(patterns[t] for t in longest_first) + ")").split


# --- from a folder or the hub ----------------------------------------------------------------------------------------
def load_tokenizer(folder_or_hub_id: str | Path) -> FastTokenizer:
    """Load the tokenizer that a folder's or repository's tokenizer.json describes, with transformers.

    Not through AutoTokenizer: beside a config.json of a known model_type it builds that model's tokenizer class anew,
    with that class's own splitting rules and special tokens, whatever tokenizer.json says (seen with transformers 5.24
    and model_type qwen2).

    Raises:
      ValueError: a local folder without tokenizer files, or a hub id that cannot be had (offline, misspelt, gated).
    """
    from transformers import PreTrainedTokenizerFast

    name = str(folder_or_hub_id)
    folder = Path(name).expanduser()
    looks_local = folder.exists() or isinstance(folder_or_hub_id, Path) or name.startswith((".", "/", "~"))
    if looks_local:
        if not folder.is_dir():
            raise ValueError(f"tokenizer: no folder {name}; give a folder that holds tokenizer.json, or a hub id")
        if not (folder / "tokenizer.json").is_file():
            raise ValueError(f"tokenizer: {folder / 'tokenizer.json'} is missing; copy it there from the model's page")
        name = str(folder)
    try:
        loaded = PreTrainedTokenizerFast.from_pretrained(name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and hub errors for one cause
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if looks_local:
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read ({reason}); download it again") from error
        raise ValueError(
            f"tokenizer: cannot load {name!r} from the hub: {reason}; check the id and the network, or give a folder"
        ) from error
    template = loaded.chat_template if isinstance(loaded.chat_template, str) else None
    return FastTokenizer(loaded.backend_tokenizer, bos=loaded.bos_token, eos=loaded.eos_token, chat_template=template)


# --- from a GGUF file ------------------------------------------------------------------------------------------------
def tokenizer_from_gguf(path: str | Path) -> FastTokenizer:
    """See `seal_jax.chat.gguf_tokenizer.tokenizer_from_gguf`."""
    from seal_jax.chat.gguf_tokenizer import tokenizer_from_gguf as build

    return build(path)
