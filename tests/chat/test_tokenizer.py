"""Tokenizers: exact round trips, atomic special tokens, words that keep their ids wherever they stand."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest

from seal_jax.chat.gguf_tokenizer import gguf_chat_info
from seal_jax.chat.tokenizer import (
    ByteTokenizer,
    FastTokenizer,
    Tokenizer,
    load_tokenizer,
    tokenizer_from_gguf,
    train_tokenizer,
)

SPECIAL = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<tool_call>", "</tool_call>")
SCAFFOLD = ('{"name": "', '", "arguments": {"', '"}}', "true", "null")
TEXTS = [
    "Please send 30 credits from Anna to Bob.",
    '<|assistant|><tool_call>{"name": "send", "arguments": {"source": "Anna", "target": "Bob", "amount": 3}}',
    "find(name: str) - look up an id by name; send(source: str, target: str, amount: int) - move credits",
    "Which lamp is on? The lamp of Anna is on, the untrue one is off.",
] * 5
AWKWARD = [
    "",
    " ",
    "  two  spaces  ",
    "\n\n\r\n\t tabs\x0bvt\x00nul\x7f",
    "naïve café e\u0301 ñ",
    "中文字 ありがとう שלום العربية",
    "😀👩‍👩‍👧‍👦🇩🇪 \u200b\u200d\ufeff\uffff",
    "Ġ Ċ ▁ ## <0x0A> <unk> [UNK]",
    'x_id __init__ a-b "q" \'s don\'t {"a": [1, 2.50, -3e8], "b": null}',
    "qwxyz" * 9,
]


@pytest.fixture(scope="module")
def trained() -> FastTokenizer:
    return train_tokenizer(TEXTS, vocab_size=500, special_tokens=SPECIAL, scaffold=SCAFFOLD)


@pytest.fixture(params=["byte", "trained"])
def tokenizer(request, trained) -> Tokenizer:
    return trained if request.param == "trained" else ByteTokenizer(SPECIAL)


def _random_text(rng: random.Random) -> str:
    """Any code points but surrogates, mixed with what the tokenizer treats specially."""
    parts = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(4)
        if kind == 0:
            top = rng.choice([0x80, 0x800, 0x10000, 0x110000])
            codes = [c for c in (rng.randrange(top) for _ in range(rng.randrange(6))) if not 0xD800 <= c < 0xE000]
            parts.append("".join(map(chr, codes)))
        else:
            parts.append(rng.choice([*SPECIAL, *SCAFFOLD, *AWKWARD, " ", "Anna", "7", ", ", "_", '"']))
    return "".join(parts)


# --- every tokenizer ---
@pytest.mark.parametrize("text", AWKWARD)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_round_trip_of_random_unicode(tokenizer):
    rng = random.Random(0)
    for _ in range(400):
        text = _random_text(rng)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_protocol_and_nothing_added(tokenizer):
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("") == []
    assert tokenizer.encode("a b") == [*tokenizer.encode("a"), *tokenizer.encode(" "), *tokenizer.encode("b")]


def test_special_tokens_are_atomic(tokenizer):
    for token in SPECIAL:
        one = [tokenizer.token_id(token)]
        assert tokenizer.encode(token) == one
        assert tokenizer.encode(f"x{token}y") == [*tokenizer.encode("x"), *one, *tokenizer.encode("y")]
        assert tokenizer.decode(one) == token
    assert tokenizer.encode("<|user|") != [tokenizer.token_id("<|user|>")]


def test_unknown_token_is_named(tokenizer):
    with pytest.raises(ValueError, match="nonesuch"):
        tokenizer.token_id("<|nonesuch|>")


def test_lone_surrogates_do_not_raise(tokenizer):
    """`json.loads` makes them from an escape, so a tool result can hold one."""
    assert tokenizer.decode(tokenizer.encode(json.loads('"a\\ud800b"'))) == "a?b"


def test_save_loads_in_transformers(tokenizer, tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer.save(tmp_path / "t")
    texts = [*AWKWARD, *TEXTS[:4]]
    direct = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "t" / "tokenizer.json"))
    for found in (direct, AutoTokenizer.from_pretrained(tmp_path / "t")):
        assert [found.encode(t, add_special_tokens=False) for t in texts] == [tokenizer.encode(t) for t in texts]
    again = load_tokenizer(tmp_path / "t")
    assert [again.encode(t) for t in texts] == [tokenizer.encode(t) for t in texts]
    assert [again.decode(again.encode(t)) for t in texts] == texts
    assert again.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_a_config_beside_it_changes_nothing(trained, tmp_path, model_type):
    """AutoTokenizer would build the model family's own tokenizer class, with other splitting rules."""
    trained.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": trained.vocab_size}))
    again = load_tokenizer(tmp_path)
    assert again.vocab_size == trained.vocab_size
    assert [again.encode(t) for t in (*AWKWARD, *TEXTS)] == [trained.encode(t) for t in (*AWKWARD, *TEXTS)]


# --- trained in place ---
@pytest.mark.parametrize("word", ["Anna", "Bob", "Zorblax", "qwertz", "send", "source", "Ünwort"])
def test_a_word_keeps_its_ids(trained, word):
    """Copying a name from the user's text into a call is copying ids, for known and for unseen words."""
    ids = trained.encode(word)
    around = [("", " x"), ("x ", ""), ('"', '"'), (': "', '", '), ("(", ")"), ("\n", "\n"), ("_", "_"), ("3", "4")]
    around += [('{"name": "', '", "arguments": {"'), ("<|user|>", "<|end|>"), ("", "'s"), ("", ".")]
    for before, after in around:
        assert trained.encode(before + word + after) == [*trained.encode(before), *ids, *trained.encode(after)]


def test_digits_are_single(trained):
    assert [trained.decode([i]) for i in trained.encode("2024")] == list("2024")


def test_ids_come_in_the_promised_order(trained):
    order = [*SPECIAL, *SCAFFOLD]
    assert [trained.token_id(t) for t in order] == list(range(len(order)))
    assert trained.vocab_size <= 500


def test_scaffold_is_one_id_and_never_cuts_a_word(trained):
    for text in SCAFFOLD:
        assert trained.encode(text) == [trained.token_id(text)]
    assert trained.token_id("true") not in trained.encode("untrue trueness")
    added = {t["content"]: t["special"] for t in json.loads(trained.backend.to_str())["added_tokens"]}
    assert added == {**dict.fromkeys(SPECIAL, True), **dict.fromkeys(SCAFFOLD, False)}


def test_words_and_punctuation_with_its_blank_are_single_ids(trained):
    assert [trained.decode([i]) for i in trained.encode('"source": "Anna", "target": "Bob"')] == [
        '"', "source", '": "', "Anna", '", "', "target", '": "', "Bob", '"',
    ]  # fmt: skip


_TRAIN = """
import hashlib, sys
from seal_jax.chat.tokenizer import train_tokenizer
texts = [f"word{i} {w} and {w[::-1]}" for i in range(40) for w in ("alpha", "beta", "gamma", "delta")]
if sys.argv[1] == "reversed":
    texts.reverse()
t = train_tokenizer(texts, vocab_size=400, special_tokens=["<e>"], scaffold=["{}"])
print(hashlib.sha256(t.backend.to_str().encode()).hexdigest())
"""


def test_training_is_deterministic():
    """Same texts, same bytes: in any process, with any hash seed and number of threads, in any order of the texts."""
    found = set()
    for order, seed, threads in (("same", "1", "1"), ("same", "2", "4"), ("reversed", "3", "2")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        run = subprocess.run([sys.executable, "-c", _TRAIN, order], env=env, capture_output=True, text=True, check=True)
        found.add(run.stdout)
    assert len(found) == 1


def test_training_and_encoding_are_quick():
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 10))) for _ in range(3000)]
    texts = [" ".join(rng.choices(words, k=20)) for _ in range(16_000)]  # about 2 MB
    start = time.process_time()
    tokenizer = train_tokenizer(texts, vocab_size=1000, special_tokens=SPECIAL, scaffold=SCAFFOLD)
    assert time.process_time() - start < 6.0  # CPU seconds of all threads; about 1.5 on an idle machine
    start = time.process_time()
    tokenizer.encode(" ".join(texts[:150]))  # a prompt of about 20,000 characters
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "kwargs, match",
    [
        ({"vocab_size": 200, "special_tokens": SPECIAL}, "set it to 262 or more"),
        ({"vocab_size": 500, "special_tokens": ("<a>", "<a>")}, "'<a>' twice"),
        ({"vocab_size": 500, "special_tokens": ("<a>",), "scaffold": ("<a>",)}, "'<a>' twice"),
        ({"vocab_size": 500, "special_tokens": ("",)}, "''"),
        ({"vocab_size": 500, "special_tokens": ("«a»",)}, "«a»"),
    ],
)
def test_bad_training_input(kwargs, match):
    with pytest.raises(ValueError, match=match):
        train_tokenizer(["a"], **kwargs)


# --- folder or hub id ---
def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        load_tokenizer(tmp_path / "nothing")


def test_a_cut_tokenizer_is_named(trained, tmp_path):
    trained.save(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read .*; download it again") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_offline_hub_id(monkeypatch, tmp_path):
    import transformers

    def offline(*_, **__):
        raise OSError("We couldn't connect to the hub.\nSecond line")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "from_pretrained", offline)
    with pytest.raises(ValueError, match="cannot load 'org/model' from the hub: .*couldn't connect") as caught:
        load_tokenizer("org/model")
    assert "\n" not in str(caught.value)


def test_no_bos_from_a_tokenizer_that_adds_one(trained, tmp_path):
    """Two beginning-of-text tokens make Llama 3 diverge (vllm#27515): the template's is the only one."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import processors

    backend = Backend.from_str(trained.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", trained.token_id("<|system|>"))]
    )
    FastTokenizer(backend, bos="<|system|>").save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.bos == "<|system|>"
    assert loaded.backend.encode("Anna").ids != trained.encode("Anna")  # it does add one by itself
    assert loaded.encode("<|system|>Anna").count(loaded.token_id("<|system|>")) == 1


# --- GGUF metadata ---
def _gguf(path: Path, metadata: dict) -> Path:
    """A GGUF file without tensors, written by hand."""

    def text(s: str) -> bytes:
        return struct.pack("<Q", len(s.encode())) + s.encode()

    def value(v) -> bytes:
        if isinstance(v, bool):
            return struct.pack("<I?", 7, v)
        if isinstance(v, int):
            return struct.pack("<II", 4, v)
        if isinstance(v, str):
            return struct.pack("<I", 8) + text(v)
        if isinstance(v[0], str):
            return struct.pack("<IIQ", 9, 8, len(v)) + b"".join(map(text, v))
        return struct.pack("<IIQ", 9, 5, len(v)) + struct.pack(f"<{len(v)}i", *v)

    body = b"".join(text(k) + value(v) for k, v in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body)
    return path


@pytest.fixture(scope="module")
def bpe() -> tuple[dict[str, int], list[str]]:
    """Vocabulary and merges of an ordinary byte-level BPE (no rule of ours about spaces)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(
        [*TEXTS, "system user 2024 100 1000 don't naïve café", " system 100 1000 don't"] * 3, trainer
    )
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [" ".join(m) for m in model["merges"]]


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _metadata(bpe, arch: str, pre: str | None) -> dict:
    vocab, merges = bpe
    tokens = [*sorted(vocab, key=vocab.get), *CHATML, "<tool_call>", "[PAD9]", "[PAD10]"]
    n = len(vocab)
    out = {
        "general.architecture": arch,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * n + [3, 3, 3, 4, 5, 5],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": n,
        "tokenizer.ggml.eos_token_id": n + 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return out if pre is None else {**out, "tokenizer.ggml.pre": pre}


SAMPLE = "<|im_start|>system\nIn 2024, 1000 cafés; don't\n\n  naïve 😀 IT'S\t100%<|im_end|>\n<tool_call>{\"a\": 12345}"


def test_gguf_special_tokens_are_atomic(bpe, tmp_path):
    """llama.cpp#15842, #4331, #5838: control and user-defined tokens must not be split; padding is no token."""
    metadata = _metadata(bpe, "llama", "smollm")
    tokenizer = tokenizer_from_gguf(_gguf(tmp_path / "m.gguf", metadata))
    n = len(bpe[0])
    ids = tokenizer.encode(SAMPLE)
    assert ids[0] == n + 1
    assert [i for i in ids if i >= n] == [n + 1, n + 2, n + 3]
    assert tokenizer.decode(ids) == SAMPLE
    assert tokenizer.vocab_size == n + 4  # without the two unused entries
    assert all(i < n + 4 for i in tokenizer.encode("[PAD9]"))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.chat_template) == (CHATML[0], CHATML[2], "{{ messages }}")
    assert tokenizer.encode("Anna")[0] != n  # add_bos_token is information, encode adds nothing
    info = gguf_chat_info(tmp_path / "m.gguf")
    assert (info.bos_id, info.eos_id, info.eot_id, info.add_bos) == (n, n + 2, None, True)


def _qwen2(bpe):
    from transformers import Qwen2Tokenizer

    vocab, merges = bpe
    return Qwen2Tokenizer(vocab=dict(vocab), merges=[tuple(m.split(" ")) for m in merges]).backend_tokenizer


def _llama3(bpe):
    """By transformers' own converter of Llama 3 vocabularies, which knows the pattern."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers.convert_slow_tokenizer import TikTokenConverter

    vocab, merges = bpe
    pairs = [tuple(m.split(" ")) for m in merges]
    backend = Backend(models.BPE(vocab=dict(vocab), merges=pairs, ignore_merges=True))
    pattern = TikTokenConverter().pattern
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.parametrize(
    "arch, pre, reference", [("qwen2", "qwen2", _qwen2), ("qwen3", None, _qwen2), ("llama", "llama-bpe", _llama3)]
)
def test_gguf_cuts_text_as_transformers_does(bpe, tmp_path, arch, pre, reference):
    """transformers#31175, #31358: "gpt2" names no rule; digits, accents, emoji and newlines tell them apart."""
    tokenizer = tokenizer_from_gguf(_gguf(tmp_path / "m.gguf", _metadata(bpe, arch, pre)))
    expected = reference(bpe)
    for text in [*AWKWARD, *TEXTS[:4], "In 2024, 1000 cafés; don't\n\n  naïve 😀 IT'S\t100%"]:
        for token in (*SPECIAL, *CHATML):  # not in the reference's vocabulary
            text = text.replace(token, " ")
        assert tokenizer.encode(text) == expected.encode(text, add_special_tokens=False).ids
        normal = unicodedata.normalize("NFC", text) if arch != "llama" else text
        assert tokenizer.decode(tokenizer.encode(text)) == normal


def test_gguf_rules_differ(bpe, tmp_path):
    found = {
        pre: tuple(
            tokenizer_from_gguf(_gguf(tmp_path / f"{pre}.gguf", _metadata(bpe, "llama", pre))).encode("a 1000 b")
        )
        for pre in ("smollm", "qwen2", "llama-bpe")
    }
    digits = len("1000")
    assert len(found["smollm"]) == len(found["qwen2"]) > digits
    assert len(found["llama-bpe"]) < len(found["qwen2"])


def test_gguf_unknown_rules_are_named(bpe, tmp_path):
    for metadata, match in [
        (_metadata(bpe, "llama", "deepseek-v9"), "'deepseek-v9'"),
        (_metadata(bpe, "llama", None), "'default'"),
        ({**_metadata(bpe, "llama", "smollm"), "tokenizer.ggml.model": "llama"}, "only byte-level BPE"),
    ]:
        with pytest.raises(ValueError, match=match):
            tokenizer_from_gguf(_gguf(tmp_path / "m.gguf", metadata))


def test_gguf_prefers_a_tokenizer_json_that_agrees(bpe, tmp_path, caplog):
    path = _gguf(tmp_path / "m.gguf", _metadata(bpe, "qwen2", "qwen2"))
    built = tokenizer_from_gguf(path)
    built.save(tmp_path)
    with caplog.at_level("INFO"):
        assert tokenizer_from_gguf(path).encode(SAMPLE) == built.encode(SAMPLE)
    assert "agrees with the tokens of m.gguf" in caplog.text
    ByteTokenizer().save(tmp_path)
    assert tokenizer_from_gguf(path).encode(SAMPLE) == built.encode(SAMPLE)
    assert "ignored" in caplog.text


@pytest.mark.parametrize(
    "data, match",
    [
        (b"PK\x03\x04", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 5), "cut off"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 10**12), "cut off"),
    ],
)
def test_damaged_gguf(tmp_path, data, match):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ValueError, match=match):
        tokenizer_from_gguf(tmp_path / "m.gguf")


@pytest.mark.skipif(not os.environ.get("SEAL_SMOLLM2_GGUF"), reason="SEAL_SMOLLM2_GGUF names no file")
def test_real_smollm2_tokenizer():
    tokenizer = tokenizer_from_gguf(os.environ["SEAL_SMOLLM2_GGUF"])
    assert tokenizer.vocab_size == 49152
    ids = tokenizer.encode("<|im_start|>system\nHi 2024")
    assert ids[0] == tokenizer.token_id("<|im_start|>") == 1
    assert [tokenizer.decode([i]) for i in ids[-4:]] == list("2024")
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text)) == text
