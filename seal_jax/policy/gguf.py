"""Checkpoints in GGUF (llama.cpp's format), in: architectures llama, qwen2 and qwen3.

Types are read per tensor, never from the file's name. llama.cpp stores the query and key rows of architecture `llama`
in an order of its own (rotary pairs side by side); those of qwen2 and qwen3 it leaves alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from seal_jax.gguf_header import GGUFHeader, TensorInfo, read_gguf_header
from seal_jax.policy import weights
from seal_jax.policy.config import Llama3Rope, Params, PolicyConfig, is_number
from seal_jax.policy.model import rope_inverse_frequencies

_TOP = {"embed_vd": "token_embd.weight", "final_norm_d": "output_norm.weight", "head_dv": "output.weight"}
_BLOCK = {
    "attn_norm_ld": "attn_norm.weight",
    "q_ldnh": "attn_q.weight",
    "k_ldkh": "attn_k.weight",
    "v_ldkh": "attn_v.weight",
    "o_lnhd": "attn_output.weight",
    "mlp_norm_ld": "ffn_norm.weight",
    "gate_ldf": "ffn_gate.weight",
    "up_ldf": "ffn_up.weight",
    "down_lfd": "ffn_down.weight",
    "q_bias_lnh": "attn_q.bias",
    "k_bias_lkh": "attn_k.bias",
    "v_bias_lkh": "attn_v.bias",
    "q_norm_lh": "attn_q_norm.weight",
    "k_norm_lh": "attn_k_norm.weight",
}
_ROPE_FREQS = "rope_freqs.weight"

#: ggml type id -> (name, elements per block, bytes per block)
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_CHUNK = 2**24  # elements that are dequantised at one time


def tensor_name(param: str, layer: int | None) -> str:
    """llama.cpp's name of one layer of a parameter."""
    return _TOP[param] if layer is None else f"blk.{layer}.{_BLOCK[param]}"


def load_gguf(
    path: str | Path,
    *,
    shardings: weights.Shardings = None,
    vocab_parts: int = 1,
    seed: int = 0,
    **overrides: Any,
) -> tuple[PolicyConfig, Params]:
    """Load a GGUF file as float32 params (and adapters, as `load_hf` does).

    Every tensor's name, type, shape and place in the file is checked before the first one is read. A file without
    `output.weight` has a tied head; one with it has not, whatever the original model had.

    Args:
      shardings, vocab_parts, seed: as for `load_hf`.
      overrides: fields of PolicyConfig.

    Raises:
      ValueError: an architecture, tensor type or rope scaling that is not supported; a missing, unknown or wrongly
        shaped tensor; a file that is cut off.
    """
    header = read_gguf_header(path)
    config = config_from_gguf(header, **overrides).padded_to(vocab_parts)
    want = {tensor_name(*entry): entry for entry in weights.entries(config)}
    _match(header, want, config)
    rows = header.tensors[_TOP["embed_vd"]].shape[0]
    size = header.path.stat().st_size
    for name, (param, _) in want.items():
        _check(header, name, weights.file_shape(config, param, rows), size)
    if any(_TYPES[header.tensors[name].type_id][1] > 1 for name in want):
        _dequantize_function()  # fail now, not after minutes, when the package is not there
    data = np.memmap(header.path, np.uint8, mode="r")

    def read(param: str, layer: int | None) -> np.ndarray:
        array = _values(data, header.tensors[tensor_name(param, layer)])
        if header.architecture == "llama" and param in ("q_ldnh", "k_ldkh"):
            array = _unpermute(array, config.n_heads if param == "q_ldnh" else config.n_kv_heads)
        return array

    return config, weights.assemble(config, read, shardings, seed)


def config_from_gguf(path: str | Path | GGUFHeader, **overrides: Any) -> PolicyConfig:
    """The PolicyConfig that a file's metadata (and, for Llama 3's rope, its factor tensor) describes."""
    header = path if isinstance(path, GGUFHeader) else read_gguf_header(path)
    arch, name = header.architecture, header.path.name
    if arch not in ("llama", "qwen2", "qwen3"):
        raise ValueError(f"{name}: architecture {arch!r} is not supported; use llama, qwen2 or qwen3")

    def get(key: str, default: Any = None) -> Any:
        found = header.metadata.get(f"{arch}.{key}", default)
        if isinstance(found, Sequence) and not isinstance(found, str):  # one value per layer
            if len(set(found)) != 1:
                raise ValueError(f"{name}: {arch}.{key} differs between layers, which is not supported")
            found = found[0]
        return found

    def number(key: str, default: float | None = None) -> Any:
        found = get(key, default)
        if found is None:
            header.require(f"{arch}.{key}")
        if not is_number(found) or not found > 0:
            raise ValueError(f"{name}: {arch}.{key}={found!r} must be a number above 0; convert the file again")
        return found

    if get("expert_count", 0):
        raise ValueError(f"{name}: a mixture of experts ({arch}.expert_count={get('expert_count')}) is not supported")
    if get("attention.sliding_window", 0):
        raise ValueError(f"{name}: sliding-window attention is not supported; use a checkpoint without it")
    if _TOP["embed_vd"] not in header.tensors:
        raise ValueError(f"{name}: tensor {_TOP['embed_vd']} is missing; download the file again")
    d_model, n_heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", d_model // n_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise ValueError(f"{name}: {arch}.{key}={get(key)} differs from the head width {head_dim}; not supported")
    rows = header.tensors[_TOP["embed_vd"]].shape[0]
    fields: dict[str, Any] = {
        "vocab_size": _real_vocab(header, rows),
        "padded_vocab": rows,
        "d_model": d_model,
        "n_layers": number("block_count"),
        "n_heads": n_heads,
        "n_kv_heads": number("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        "d_ff": number("feed_forward_length"),
        "rope_theta": _float(number("rope.freq_base", 10_000.0)),
        "norm_eps": _float(number("attention.layer_norm_rms_epsilon")),
        "tied": _TOP["head_dv"] not in header.tensors,
        "qkv_bias": arch == "qwen2",
        "qk_norm": arch == "qwen3",
        "max_position": number("context_length"),
    }
    config = PolicyConfig(**{**fields, **overrides})
    return config if "rope_scaling" in overrides else _with_rope_scaling(header, config, get)


def _float(value: float) -> float:
    """The shortest decimal that is this float32: 9.999999974752427e-07 in the file means 1e-06."""
    return float(str(np.float32(value)))


def _real_vocab(header: GGUFHeader, rows: int) -> int:
    """Ids up to the last one that is not marked unused (type 5): the rest pads the embedding."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return rows
    types = header.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    last = max((i for i, kind in enumerate(types) if kind != 5), default=-1)
    if not 0 <= last < rows:
        raise ValueError(f"{header.path.name}: the last token is id {last} but {_TOP['embed_vd']} has {rows} rows")
    return last + 1


def _match(header: GGUFHeader, want: Mapping[str, Any], config: PolicyConfig) -> None:
    missing = [name for name in want if name not in header.tensors]
    unknown = [name for name in header.tensors if name not in want and name != _ROPE_FREQS]
    for state, names in (("missing", missing), ("unknown", unknown)):
        if names:
            raise ValueError(
                f"{header.path.name}: {len(names)} {state} tensors for architecture {header.architecture} with "
                f"{config.n_layers} blocks, first {', '.join(names[:3])}"
            )


def _check(header: GGUFHeader, name: str, shape: tuple[int, ...], file_size: int) -> None:
    info = header.tensors[name]
    if info.type_id not in _TYPES:
        known = ", ".join(t[0] for t in _TYPES.values())
        raise ValueError(f"{header.path.name}: {name} has type {_type_name(info.type_id)}; supported are {known}")
    if info.shape != shape:
        raise ValueError(f"{header.path.name}: {name} has shape {info.shape}; the metadata says {shape}")
    type_name, elements, _ = _TYPES[info.type_id]
    if shape[-1] % elements:
        raise ValueError(f"{header.path.name}: {name} has rows of {shape[-1]}, no multiple of {type_name}'s {elements}")
    if info.offset + _n_bytes(info) > file_size:
        raise ValueError(f"{header.path.name}: {name} passes the end of the file, which is cut off; download it again")


def _type_name(type_id: int) -> str:
    try:
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(type_id).name)
    except (ImportError, ValueError):
        return f"number {type_id}"


def _n_bytes(info: TensorInfo) -> int:
    _, elements, size = _TYPES[info.type_id]
    return math.prod(info.shape) // elements * size


def _values(data: np.ndarray, info: TensorInfo) -> np.ndarray:
    """The tensor as float32 (or float16), dequantised some rows at a time."""
    kind, elements, size = _TYPES[info.type_id]
    raw = data[info.offset : info.offset + _n_bytes(info)]
    if kind == "F32":
        return raw.view("<f4").reshape(info.shape)
    if kind == "F16":
        return raw.view("<f2").reshape(info.shape)
    if kind == "BF16":  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
    dequantize = _dequantize_function()
    width = info.shape[-1]
    raw_rows = raw.reshape(-1, width // elements * size)
    out = np.empty((len(raw_rows), width), np.float32)
    step = max(1, _CHUNK // width)
    for start in range(0, len(out), step):
        out[start : start + step] = dequantize(np.ascontiguousarray(raw_rows[start : start + step]), info.type_id)
    return out.reshape(info.shape)


def _dequantize_function() -> Any:
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise ValueError("quantised GGUF tensors need the gguf package: pip install 'seal-jax[gguf]'") from error
    return lambda rows, type_id: dequantize(rows, GGMLQuantizationType(type_id))


def _unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """From llama.cpp's row order in a head (r0, r_{h/2}, r1, ...) to transformers' (r0, r1, ..., r_{h/2}, ...)."""
    half = len(rows) // n_heads // 2
    return rows.reshape(n_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


# --- rope scaling ---
def _with_rope_scaling(header: GGUFHeader, config: PolicyConfig, get: Callable[..., Any]) -> PolicyConfig:
    """The config with the scaling that the metadata or the factor tensor describes."""
    name = header.path.name
    kind = get("rope.scaling.type", "none")
    original = get("rope.scaling.original_context_length")
    if kind == "llama3":
        factor = get("rope.scaling.factor")
        if factor is None or original is None:
            raise ValueError(f"{name}: rope.scaling.type is llama3 but factor or original_context_length is missing")
        low, high = get("rope.scaling.low_freq_factor", 1.0), get("rope.scaling.high_freq_factor", 4.0)
        return replace(config, rope_scaling=Llama3Rope(_float(factor), _float(low), _float(high), original))
    if kind != "none" and not (kind == "linear" and get("rope.scaling.factor", 1.0) == 1.0):
        raise ValueError(f"{name}: rope scaling of type {kind!r} is not supported; use a checkpoint without it")
    if _ROPE_FREQS not in header.tensors:
        return config
    _check(header, _ROPE_FREQS, (config.head_dim // 2,), header.path.stat().st_size)
    factors = _values(np.memmap(header.path, np.uint8, mode="r"), header.tensors[_ROPE_FREQS]).astype(np.float64)
    if np.allclose(factors, 1.0):
        return config
    plain = rope_inverse_frequencies(config)
    for guess in _llama3_guesses(factors, plain, original):
        scaled = replace(config, rope_scaling=guess)
        if np.allclose(plain / rope_inverse_frequencies(scaled), factors, rtol=1e-4):
            return scaled
    raise ValueError(f"{name}: {_ROPE_FREQS} does not follow Llama 3's rule, so it is not supported")


def _llama3_guesses(factors: np.ndarray, inv_freq: np.ndarray, original: int | None) -> list[Llama3Rope]:
    """Scalings that may have given these factors: GGUF keeps what each frequency is divided by, not the four numbers.

    The rule depends on the ratios of the other three numbers alone, so low_freq_factor = 1 loses nothing. Within the
    ramp, 1 / factor is linear in the frequency; the line gives the ratios.
    """
    factor = _float(float(factors.max()))
    guesses = [Llama3Rope(factor, 1.0, 4.0, n) for n in (original, 8192) if n is not None]
    ramp = (factors > 1 + 1e-4) & (factors < factor * (1 - 1e-4))
    if ramp.sum() >= 2:
        keep = (1 / factors[ramp] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(inv_freq[ramp] / (2 * np.pi), keep, 1)
        if intercept < 0 < slope:
            guesses.append(Llama3Rope(factor, 1.0, round(1 - 1 / intercept, 3), round(-slope / intercept)))
    return guesses
