"""Shapes and options of a decoder, the families it can be, and the shapes of its parameters.

A parameter's name ends in its dimension letters (`q_ldnh`), and that suffix is the only place where its shape and its
sharding come from: v padded vocabulary, d model width, l layers, n query heads, k key/value heads, h head width, f
MLP width, a rank of the adapters (`policy/lora.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Params = dict[str, Any]  # nested dict of arrays, see `param_shapes`


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 1


@dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 and later: low frequencies are divided by `factor`, high ones kept, a ramp
    between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_number(value):
                raise ValueError(f"rope_scaling {name}={value!r} must be a number")
        if not self.factor >= 1 or not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling factor={self.factor} low={self.low_freq_factor} high={self.high_freq_factor} is "
                "impossible; need factor >= 1 and 0 < low_freq_factor < high_freq_factor"
            )


@dataclass(frozen=True)
class PolicyConfig:
    """A decoder: pre-RMSNorm blocks of grouped-query attention with RoPE and a SwiGLU MLP.

    `vocab_size` is the number of real token ids; rows of the head from there to `padded_vocab` exist only for
    alignment and are masked to -inf before every softmax, in training and in sampling.
    """

    vocab_size: int
    padded_vocab: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Rope | None = None
    norm_eps: float = 1e-6
    tied: bool = True  # the head is the embedding transposed
    qkv_bias: bool = False  # Qwen2, Qwen2.5
    qk_norm: bool = False  # Qwen3: RMS norm of each query and key head, before RoPE
    max_position: int = 4096
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Literal["none", "block"] = "none"  # "block": a layer's activations are recomputed in the backward pass
    head_chunk: int = 2048  # tokens whose logits exist at one time
    attention: Literal["blockwise", "splash"] = "blockwise"  # "splash": a fused kernel, on TPUs only
    attention_budget: int | None = (
        None  # blockwise: attention scores (elements) that exist at one time; None suits the backend
    )
    lora_rank: int = 0  # of an adapter beside every projection of the blocks (policy/lora.py); 0 = none
    lora_alpha: float = 16.0  # adapters count lora_alpha / lora_rank

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff", "max_position",
                     "head_chunk"):  # fmt: skip
            value = getattr(self, name)
            if not is_count(value):
                raise ValueError(f"policy.{name}={value!r} must be a whole number of at least 1")
        if self.lora_rank != 0 and not is_count(self.lora_rank):
            raise ValueError(f"policy.lora_rank={self.lora_rank!r} must be a whole number; 0 = no adapters")
        narrowest = min(self.d_model, self.n_kv_heads * self.head_dim, self.d_ff)
        if self.lora_rank > narrowest:
            raise ValueError(
                f"policy.lora_rank={self.lora_rank} is more than the narrowest projection has, {narrowest}; lower it"
            )
        for name in ("rope_theta", "norm_eps", "lora_alpha"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"policy.{name}={value!r} must be a number above 0")
        if self.attention_budget is not None and self.attention_budget < 1:
            raise ValueError(f"policy.attention_budget={self.attention_budget} must be positive, or None")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"policy.n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}; "
                "each key/value head must serve the same number of query heads"
            )
        if self.padded_vocab < self.vocab_size:
            raise ValueError(f"policy.padded_vocab={self.padded_vocab} is smaller than vocab_size={self.vocab_size}")
        if self.head_dim % 2:
            raise ValueError(f"policy.head_dim={self.head_dim} is odd; RoPE needs pairs")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"policy.compute_dtype={self.compute_dtype!r} is not known; use 'float32' or 'bfloat16'")
        if self.attention not in ("blockwise", "splash"):
            raise ValueError(f"policy.attention={self.attention!r} is not known; use 'blockwise' or 'splash'")
        if self.remat not in ("none", "block"):
            raise ValueError(f"policy.remat={self.remat!r} is not known; use 'none' or 'block'")

    @property
    def dims(self) -> dict[str, int]:
        """Size of each dimension letter."""
        return {
            "v": self.padded_vocab,
            "d": self.d_model,
            "l": self.n_layers,
            "n": self.n_heads,
            "k": self.n_kv_heads,
            "h": self.head_dim,
            "f": self.d_ff,
            "a": self.lora_rank,
        }

    def padded_to(self, multiple: int) -> PolicyConfig:
        """The same policy with more padding, so that its vocabulary can be split into `multiple` equal parts."""
        return replace(self, padded_vocab=-(-self.padded_vocab // multiple) * multiple)

    @property
    def family(self) -> Literal["qwen2", "qwen3", "llama"]:
        """The Hugging Face `model_type` that has these parameters."""
        return "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"

    @classmethod
    def tiny(cls, vocab_size: int, **overrides: Any) -> PolicyConfig:
        """The policy of the quickstart: about 0.75M parameters with 1,200 ids, fast on two CPU cores.

        As many key/value heads as query heads, biases and tied embeddings are what `wire_for_copying` asks for.
        """
        shape: dict[str, Any] = {
            "vocab_size": vocab_size,
            "padded_vocab": -(-vocab_size // 64) * 64,
            "d_model": 128,
            "n_layers": 3,
            "n_heads": 4,
            "n_kv_heads": 4,
            "head_dim": 32,
            "d_ff": 352,
            "rope_theta": 10_000.0,
            "tied": True,
            "qkv_bias": True,
        }
        return cls(**{**shape, **overrides})

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], **overrides: Any) -> PolicyConfig:
        """Reads a Hugging Face `config.json` of model_type qwen2 (Qwen2, Qwen2.5), qwen3 or llama (Llama 3.x, SmolLM2).

        `overrides` are fields of PolicyConfig; `vocab_size=len(tokenizer)` tells the real ids from the head's padding.
        Raises ValueError for anything that would make this decoder compute something else than the checkpoint's.
        """
        kind = hf.get("model_type")
        if kind not in ("qwen2", "qwen3", "llama"):
            raise ValueError(f"config.json: model_type={kind!r} is not supported; use qwen2, qwen3 or llama")
        missing = [
            key
            for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
            if hf.get(key) is None
        ]
        if missing:
            raise ValueError(f"config.json: {', '.join(missing)} missing; is this a complete {kind} config?")
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json: hidden_act={hf['hidden_act']!r} is not supported; this decoder has silu")
        for key in ("attention_bias", "mlp_bias"):
            if hf.get(key):
                raise ValueError(
                    f"config.json: {key}=true is not supported for model_type={kind}; no family here has it"
                )
        for key in _WHOLE:
            if hf.get(key) is not None and not is_count(hf[key]):
                raise ValueError(f"config.json: {key}={hf[key]!r} must be a whole number of at least 1")
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(hf.get(key), Mapping | None):
                raise ValueError(f"config.json: {key}={hf[key]!r} must be an object or null")
        for key in ("rope_theta", "rms_norm_eps"):
            if hf.get(key) is not None and not is_number(hf[key]):
                raise ValueError(f"config.json: {key}={hf[key]!r} must be a number")
        _refuse_windows(hf)
        n_heads = hf["num_attention_heads"]
        n_kv_heads = hf.get("num_key_value_heads")
        head_dim = hf.get("head_dim")
        # transformers 5 writes one `rope_parameters`; earlier versions `rope_theta` beside `rope_scaling`
        rope = hf.get("rope_parameters") or hf.get("rope_scaling")
        theta = hf.get("rope_theta")
        if theta is None:
            theta = (rope or {}).get("rope_theta", 10_000.0)
        fields: dict[str, Any] = {
            "vocab_size": hf["vocab_size"],
            "padded_vocab": hf["vocab_size"],
            "d_model": hf["hidden_size"],
            "n_layers": hf["num_hidden_layers"],
            "n_heads": n_heads,
            "n_kv_heads": n_heads if n_kv_heads is None else n_kv_heads,
            "head_dim": hf["hidden_size"] // n_heads if head_dim is None else head_dim,
            "d_ff": hf["intermediate_size"],
            "rope_theta": theta,
            "rope_scaling": _rope_scaling(rope),
            "norm_eps": hf.get("rms_norm_eps", 1e-6),
            "tied": bool(hf.get("tie_word_embeddings", False)),
            "qkv_bias": kind == "qwen2",
            "qk_norm": kind == "qwen3",
            "max_position": hf.get("max_position_embeddings", 4096),
        }
        return cls(**{**fields, **overrides})


#: Keys of a config.json that count something.
_WHOLE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)


def _refuse_windows(hf: Mapping[str, Any]) -> None:
    """Sliding windows count only when switched on and when some layer has one: `sliding_window` alone means nothing."""
    window = hf.get("sliding_window") if hf.get("use_sliding_window", False) else None
    first = hf.get("max_window_layers")  # layers from this index on are windowed
    windowed = window is not None and (first is None or first < hf["num_hidden_layers"])
    if windowed or "sliding_attention" in (hf.get("layer_types") or ()):
        raise ValueError(
            f"config.json: sliding-window attention (sliding_window={hf.get('sliding_window')}, "
            f"max_window_layers={first}) is not supported; use a checkpoint with use_sliding_window=false"
        )


def _rope_scaling(rope: Mapping[str, Any] | None) -> Llama3Rope | None:
    kind = "default" if rope is None else rope.get("rope_type", rope.get("type", "default"))
    if rope is None or kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"config.json: rope_scaling of type {kind!r} is not supported; use 'default' or 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"config.json: rope_scaling of type 'llama3' lacks {', '.join(missing)}")
    return Llama3Rope(*(rope[name] for name in names))


#: Projection of a block -> the two matrices of its adapter: from the projection's inputs to a, from a to its outputs.
ADAPTERS: Mapping[str, tuple[str, str]] = {
    "q_ldnh": ("q_lora_in_lda", "q_lora_out_lanh"),
    "k_ldkh": ("k_lora_in_lda", "k_lora_out_lakh"),
    "v_ldkh": ("v_lora_in_lda", "v_lora_out_lakh"),
    "o_lnhd": ("o_lora_in_lnha", "o_lora_out_lad"),
    "gate_ldf": ("gate_lora_in_lda", "gate_lora_out_laf"),
    "up_ldf": ("up_lora_in_lda", "up_lora_out_laf"),
    "down_lfd": ("down_lora_in_lfa", "down_lora_out_lad"),
}


def is_adapter(name: str) -> bool:
    return "_lora_" in name


def param_shapes(config: PolicyConfig) -> dict[str, Any]:
    """Every parameter's name and shape, nested as the params are; a stacked parameter's leading axis is the layer."""
    layer_names = [
        "attn_norm_ld",
        "q_ldnh",
        "k_ldkh",
        "v_ldkh",
        "o_lnhd",
        "mlp_norm_ld",
        "gate_ldf",
        "up_ldf",
        "down_lfd",
    ]
    if config.qkv_bias:
        layer_names += ["q_bias_lnh", "k_bias_lkh", "v_bias_lkh"]
    if config.qk_norm:
        layer_names += ["q_norm_lh", "k_norm_lh"]
    if config.lora_rank:
        layer_names += [name for pair in ADAPTERS.values() for name in pair]
    top_names = ["embed_vd", "final_norm_d"] + ([] if config.tied else ["head_dv"])
    shapes: dict[str, Any] = {name: param_shape(config, name) for name in top_names}
    shapes["layers"] = {name: param_shape(config, name) for name in layer_names}
    return shapes


def param_shape(config: PolicyConfig, name: str) -> tuple[int, ...]:
    return tuple(config.dims[letter] for letter in dimension_letters(name))


def dimension_letters(name: str) -> str:
    """The dimension suffix of a parameter's name: "q_ldnh" -> "ldnh"."""
    return name.rsplit("_", 1)[-1]
