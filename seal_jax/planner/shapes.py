"""The policy's dimensions without its weights: from a table for known hub ids, else from a folder or GGUF header."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from seal_jax.assembly import policy_overrides
from seal_jax.files import read_object
from seal_jax.policy.attention import BLOCKWISE_BUDGET
from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.gguf import config_from_gguf


def _config(kind: str, d: int, layers: int, heads: int, kv: int, f: int, vocab: int, **rest: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": f,
        "vocab_size": vocab,
        **rest,
    }


_QWEN = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_LLAMA31 = {
    "rope_theta": 5e5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_SMOL = {"rope_theta": 1e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
_QWEN_HALF = _config("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True, **_QWEN)

#: The published config.json of these hub ids, as far as it says what has to be computed.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN_HALF,
    "Qwen/Qwen2.5-Coder-0.5B": _QWEN_HALF,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": _QWEN_HALF,
    "Qwen/Qwen2.5-1.5B-Instruct": _config("qwen2", 1536, 28, 12, 2, 8960, 151936, tie_word_embeddings=True, **_QWEN),
    "Qwen/Qwen2.5-3B-Instruct": _config("qwen2", 2048, 36, 16, 2, 11008, 151936, tie_word_embeddings=True, **_QWEN),
    "Qwen/Qwen2.5-7B-Instruct": _config("qwen2", 3584, 28, 28, 4, 18944, 152064, tie_word_embeddings=False, **_QWEN),
    "Team-ACE/ToolACE-2-Llama-3.1-8B": _config(
        "llama", 4096, 32, 32, 8, 14336, 128256, tie_word_embeddings=False, **_LLAMA31
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _config(
        "llama", 576, 30, 9, 3, 1536, 49152, tie_word_embeddings=True, **_SMOL
    ),
}


def policy_config(config: ConfigDict, vocab_parts: int = 1) -> PolicyConfig:
    """The policy that a run of this config has, but for the ids that only its tokenizer knows to be padding; the
    vocabulary is padded so that it splits into `vocab_parts`.

    Raises ValueError for a hub id that is neither in `PUBLISHED` nor a folder here: nothing is downloaded.
    """
    overrides = {"attention_budget": BLOCKWISE_BUDGET, **policy_overrides(config, "tpu")}
    source, path = config.policy.source, config.policy.path
    if source == "tiny":
        return PolicyConfig.tiny(config.policy.vocab_size, **overrides).padded_to(vocab_parts)
    if source == "gguf":
        return config_from_gguf(path, **overrides).padded_to(vocab_parts)
    file = Path(path).expanduser() / "config.json"
    if file.is_file():
        hf = read_object(file, "put the model's config.json there")
    elif path in PUBLISHED:
        hf = dict(PUBLISHED[path])
    else:
        raise ValueError(
            f"config.policy.path={path!r} is no folder with a config.json, and its dimensions are not known here; "
            f"give a folder, or one of {', '.join(PUBLISHED)}"
        )
    return PolicyConfig.from_hf(hf, **overrides).padded_to(vocab_parts)
