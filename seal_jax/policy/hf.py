"""Checkpoints of Hugging Face transformers, in and out: `config.json` and safetensors."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from seal_jax.policy import weights
from seal_jax.policy.config import Params, PolicyConfig, is_adapter
from seal_jax.policy.lora import merged
from seal_jax.policy.sharding import to_host

if TYPE_CHECKING:
    from seal_jax.chat.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOP = {"embed_vd": "model.embed_tokens.weight", "final_norm_d": "model.norm.weight", "head_dv": "lm_head.weight"}
_BLOCK = {
    "attn_norm_ld": "input_layernorm.weight",
    "q_ldnh": "self_attn.q_proj.weight",
    "k_ldkh": "self_attn.k_proj.weight",
    "v_ldkh": "self_attn.v_proj.weight",
    "o_lnhd": "self_attn.o_proj.weight",
    "mlp_norm_ld": "post_attention_layernorm.weight",
    "gate_ldf": "mlp.gate_proj.weight",
    "up_ldf": "mlp.up_proj.weight",
    "down_lfd": "mlp.down_proj.weight",
    "q_bias_lnh": "self_attn.q_proj.bias",
    "k_bias_lkh": "self_attn.k_proj.bias",
    "v_bias_lkh": "self_attn.v_proj.bias",
    "q_norm_lh": "self_attn.q_norm.weight",
    "k_norm_lh": "self_attn.k_norm.weight",
}
_FLOATS = ("F32", "F16", "BF16")
#: A key of ours in config.json: the policy's rows with padding, so that it comes back in the shapes it had.
_PADDED = "seal_jax_padded_vocab"
#: Not weights: a buffer that old Llama checkpoints carry.
_BUFFER = re.compile(r"rotary_emb\.inv_freq$")


def tensor_name(param: str, layer: int | None) -> str:
    """The transformers name of one layer of a parameter."""
    return _TOP[param] if layer is None else f"model.layers.{layer}.{_BLOCK[param]}"


# --- in ---
def load_hf(
    folder_or_hub_id: str | Path,
    *,
    shardings: weights.Shardings = None,
    vocab_parts: int = 1,
    seed: int = 0,
    **overrides: Any,
) -> tuple[PolicyConfig, Params]:
    """Load a checkpoint of a supported family (Qwen2/2.5, Qwen3, Llama 3.x, SmolLM2) as float32 params.

    With `lora_rank` among the overrides, fresh adapters come with them, and the base's matrices are in compute_dtype.

    Args:
      folder_or_hub_id: a folder with config.json and safetensors (one file, or shards with their index), or a hub id,
        which is downloaded first.
      shardings: a pytree of shardings nested as the params are, or a function of the config that makes one. Parameters
        go there one by one; the host never holds the whole model. None: the default device.
      vocab_parts: into how many equal parts the vocabulary will be split; it is padded to a multiple.
      seed: of the fresh adapters.
      overrides: fields of PolicyConfig. `vocab_size` (the real ids) defaults to what the folder's tokenizer.json says;
        a larger `padded_vocab` than the file's gives zero rows, and defaults to what it was at `save_hf`.

    Raises:
      ValueError: a missing shard, a missing, unknown or wrongly shaped tensor, a type that is not F32, F16 or BF16, or
        a config this decoder would compute differently. The message names the file and the tensor.
    """
    folder = _local(folder_or_hub_id)
    hf = _read_json(folder / "config.json")
    if "quantization_config" in hf:
        raise ValueError(
            f"{folder / 'config.json'}: the weights are quantised ({hf['quantization_config']}); give the unquantised "
            "checkpoint or a GGUF"
        )
    if isinstance(hf.get("vocab_size"), int):  # from_hf refuses any other
        if "vocab_size" not in overrides:
            overrides["vocab_size"] = _real_vocab(folder, hf["vocab_size"])
        overrides.setdefault("padded_vocab", max(hf["vocab_size"], hf.get(_PADDED, 0)))
    config = PolicyConfig.from_hf(hf, **overrides).padded_to(vocab_parts)
    with _Tensors(folder, config.family) as tensors:
        want = {tensor_name(*entry): entry for entry in weights.entries(config)}
        tensors.match(want, tied=config.tied)
        for name, (param, _) in want.items():
            tensors.check(name, weights.file_shape(config, param, hf["vocab_size"]))
        return config, weights.assemble(config, lambda p, layer: tensors.read(tensor_name(p, layer)), shardings, seed)


def _local(folder_or_hub_id: str | Path) -> Path:
    """The folder itself, or a download of the hub id."""
    name = str(folder_or_hub_id)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(folder_or_hub_id, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"no folder {name}; give a folder that holds config.json and safetensors, or a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:  # the hub client raises many kinds for: offline, no such model, gated
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot download {name!r} ({reason}); check the id and the network, or give a local folder"
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file} is missing; copy it there from the model's page")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a JSON {type(found).__name__}; expected an object")
    return found


def _real_vocab(folder: Path, rows: int) -> int:
    """How many of the embedding's rows are tokens: the rest is alignment padding that must never be sampled."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return rows
    from tokenizers import Tokenizer

    ids = 1 + max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values())
    if ids > rows:
        raise ValueError(
            f"{file} has {ids} ids but config.json says vocab_size={rows}; they belong to different models"
        )
    return ids


class _Tensors:
    """The tensors of a folder's safetensors files by transformers name, whatever prefix the files put before it."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.family = folder, family
        self.stack = contextlib.ExitStack()
        self.files: dict[str, Any] = {}  # stored name -> open file
        self.stored: dict[str, str] = {}  # transformers name -> stored name

    def __enter__(self) -> _Tensors:
        try:
            self._open()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _open(self) -> None:
        from safetensors import SafetensorError, safe_open

        index = self._index()
        files = sorted({*index.values()}) if index else [self._single()]
        missing = [name for name in files if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(f"{self.folder}: {_INDEX} lists {', '.join(missing)}, which is missing; download it again")
        for stray in sorted({path.name for path in self.folder.glob("*.safetensors")} - {*files}):
            _log.warning("%s: %s is not part of the checkpoint and is ignored", self.folder, stray)
        for name in files:
            try:
                opened = self.stack.enter_context(safe_open(self.folder / name, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{self.folder / name} cannot be read ({error}); download it again") from error
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                if index and index.get(key) != name:
                    raise ValueError(
                        f"{self.folder / name} holds {key}, which {_INDEX} does not place there; stale index"
                    )
                self.files[key] = opened
        for key, name in index.items():
            if key not in self.files:
                raise ValueError(
                    f"{self.folder / name} lacks tensor {key}, which {_INDEX} places there; download it again"
                )

    def _index(self) -> dict[str, str]:
        if not (self.folder / _INDEX).is_file():
            return {}
        found = _read_json(self.folder / _INDEX).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise ValueError(f"{self.folder / _INDEX}: weight_map is missing or empty; download it again")
        return found

    def _single(self) -> str:
        found = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if _SINGLE in found:
            return _SINGLE
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} safetensors files but no {_INDEX}" if found else f"no {_SINGLE}"
        raise ValueError(f"{self.folder}: {what}; the checkpoint is incomplete (only safetensors are read)")

    def match(self, want: Mapping[str, Any], *, tied: bool) -> None:
        """Map every wanted name to a stored one; refuse missing and unknown tensors."""
        named = self._without_prefix()
        unknown = [
            stored
            for name, stored in named.items()
            if name not in want and not _BUFFER.search(name) and not (tied and name == _TOP["head_dv"])
        ]
        missing = [name for name in want if name not in named]
        if unknown:
            raise ValueError(
                f"{self.folder}: {len(unknown)} tensors unknown to family {self.family}, first {_first(unknown)}; "
                "is this another kind of model?"
            )
        if missing:
            hint = " (untied: tie_word_embeddings is false)" if _TOP["head_dv"] in missing else ""
            raise ValueError(f"{self.folder}: missing {_first(missing)}{hint}, {len(missing)} tensors in all")
        self.stored = named
        if tied and _TOP["head_dv"] in named and not self._same_head():
            raise ValueError(
                f"{self.folder}: tie_word_embeddings is true but {_TOP['head_dv']} differs from the embedding; "
                "set tie_word_embeddings to false"
            )

    def _same_head(self) -> bool:
        return np.array_equal(self.read(_TOP["head_dv"]), self.read(_TOP["embed_vd"]))

    def _without_prefix(self) -> dict[str, str]:
        """{transformers name: stored name}. The prefix is what stands before the embedding's name."""
        ending = "embed_tokens.weight"
        found = [key for key in self.files if key.endswith(ending) and key[: -len(ending)][-1:] in ("", ".")]
        if len(found) != 1:
            raise ValueError(
                f"{self.folder}: {len(found)} tensors end in {ending}, family {self.family} has one; first keys: "
                f"{_first(sorted(self.files))}"
            )
        prefix = found[0][: -len(ending)]
        named = {}
        for key in self.files:
            if key.startswith(prefix) and not key.endswith(_TOP["head_dv"]):
                named["model." + key[len(prefix) :]] = key
            elif key.endswith(_TOP["head_dv"]):
                named[_TOP["head_dv"]] = key
            else:
                named[key] = key
        return named

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        view = self.files[self.stored[name]].get_slice(self.stored[name])
        if view.get_dtype() not in _FLOATS:
            raise ValueError(f"{self.folder}: {name} has type {view.get_dtype()}; supported are {', '.join(_FLOATS)}")
        if tuple(view.get_shape()) != shape:
            raise ValueError(f"{self.folder}: {name} has shape {tuple(view.get_shape())}; config.json says {shape}")

    def read(self, name: str) -> np.ndarray:
        return self.files[self.stored[name]].get_tensor(self.stored[name])


def _first(names: list[str]) -> str:
    return ", ".join(names[:3])


# --- out ---
def save_hf(
    folder: str | Path,
    config: PolicyConfig,
    params: Params,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    Padded vocabulary rows are left out (`load_hf` puts zero rows in their place), adapters are merged into their
    projections. float32 goes and comes back bit-equal; bfloat16 rounds to nearest. The folder appears whole or not at
    all, and replaces an older model folder of that name. On several hosts every process must call this; the first one
    writes.

    Raises:
      ValueError: params that do not fit the config, an unknown dtype, or a target that exists and is no model folder.
    """
    import ml_dtypes

    types = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    if dtype not in types:
        raise ValueError(f"save_hf: dtype={dtype!r} is not known; use 'float32' or 'bfloat16'")
    if max_shard_bytes < 1:
        raise ValueError(f"save_hf: max_shard_bytes={max_shard_bytes} must be positive")
    weights.check_params(config, params)
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(f"save_hf: the tokenizer has {tokenizer.vocab_size} ids, the model only {config.vocab_size}")
    folder = Path(folder).expanduser()
    if (
        folder.exists()
        and not (folder / "config.json").is_file()
        and not (folder.is_dir() and not any(folder.iterdir()))
    ):
        raise ValueError(f"save_hf: {folder} exists and is no model folder; give a new path or remove it")
    tensors = _file_tensors(config, params, types[dtype])
    if jax.process_index() != 0:
        for _ in tensors:  # takes part in gathering what is spread over hosts
            pass
        return folder
    temp = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(temp, ignore_errors=True)
    temp.mkdir(parents=True)
    try:
        _write_shards(temp, tensors, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(temp)
        (temp / "config.json").write_text(json.dumps(hf_config(config, dtype, tokenizer), indent=2) + "\n")
        for file in temp.glob("*.safetensors"):  # which safetensors writes for their owner alone
            file.chmod((temp / "config.json").stat().st_mode)
        _replace(temp, folder)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise
    return folder


def hf_config(config: PolicyConfig, dtype: str = "float32", tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """The `config.json` of a PolicyConfig, for transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters)."""
    family = config.family
    if config.qkv_bias and config.qk_norm:
        raise ValueError("save_hf: no transformers family has both qkv_bias and qk_norm")
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    out: dict[str, Any] = {
        "architectures": [{"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family] + "ForCausalLM"],
        "model_type": family,
        "vocab_size": config.vocab_size,
        _PADDED: config.padded_vocab,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if config.rope_scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_dropout": 0.0,
        "attention_bias": False,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    if family == "llama":
        out["mlp_bias"] = False
    else:
        out["use_sliding_window"] = False
    for key in ("bos", "eos"):
        token = getattr(tokenizer, key, None)
        out[f"{key}_token_id"] = None if tokenizer is None or token is None else tokenizer.token_id(token)
    return out


def _file_tensors(config: PolicyConfig, params: Params, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """(name, contiguous array) one by one; only one stacked parameter is on the host besides."""

    def ready(param: str, array: np.ndarray) -> np.ndarray:
        found = weights.to_file(param, array)
        if param in ("embed_vd", "head_dv"):
            found = found[: config.vocab_size]
        return np.ascontiguousarray(found.astype(dtype, copy=False))

    for param, value in params.items():
        if param != "layers":
            yield tensor_name(param, None), ready(param, to_host(value))
    for param in params["layers"]:
        if is_adapter(param):
            continue
        host = to_host(merged(config, params["layers"], param))
        for layer in range(config.n_layers):
            yield tensor_name(param, layer), ready(param, host[layer])


def _write_shards(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int) -> None:
    """Shards are written as they fill; names need the final count, so they are given at the end."""
    from safetensors.numpy import save_file

    shards: list[list[str]] = []
    total = 0

    def flush(shard: dict[str, np.ndarray]) -> None:
        save_file(shard, folder / f"part-{len(shards)}", metadata={"format": "pt"})  # "pt": transformers insists
        shards.append(list(shard))

    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, array in tensors:
        if shard and size + array.nbytes > max_bytes:
            flush(shard)
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
        total += array.nbytes
    flush(shard)
    if len(shards) == 1:
        (folder / "part-0").rename(folder / _SINGLE)
        return
    placed: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{i}").rename(folder / file)
        placed |= {name: file for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _replace(temp: Path, folder: Path) -> None:
    if not folder.exists():
        temp.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.rename(old)
    temp.rename(folder)
    shutil.rmtree(old)
