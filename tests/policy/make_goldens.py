"""Make the golden logits of tests/policy/goldens: tiny random checkpoints, scored by Hugging Face transformers on CPU.

    python tests/policy/make_goldens.py

Needs torch and transformers. Each .npz holds the config (JSON), the weights by transformers name (float16 values, which
are small and exact in float32), the ids and the float32 logits at all positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent / "goldens"

_SHARED = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2}
#: Original context 32 and theta 100, so that the ramp and the scaled frequencies are in play within 20 positions.
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _plain(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


#: name -> (model_type, config). 6 query heads on 2 key/value heads tells "repeat" from "tile".
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {**_GQA, "rope_parameters": _plain(1e6), "tie_word_embeddings": True}),
    "qwen2_untied": ("qwen2", {**_GQA, "rope_parameters": _plain(1e6), "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {**_GQA, "head_dim": 16, "rope_parameters": _plain(1e6), "tie_word_embeddings": True}),
    "qwen3_untied": ("qwen3", {**_GQA, "head_dim": 16, "rope_parameters": _plain(1e6), "tie_word_embeddings": False}),
    "llama3": ("llama", {**_GQA, "head_dim": 16, "rope_parameters": _LLAMA3, "tie_word_embeddings": False}),
    "llama3_tied": ("llama", {**_GQA, "head_dim": 16, "rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "smollm2": (
        "llama",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rope_parameters": _plain(1e4),
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
    ),
}
IDS = np.random.default_rng(7).integers(0, _SHARED["vocab_size"], (1, 20), dtype=np.int32)


def hf_model(name: str) -> Any:
    """A random transformers model of the case, float32; every weight, bias and norm is drawn, none left at 0 or 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, extra = CASES[name]
    config = AutoConfig.for_model(model_type, **_SHARED, **extra)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            scale = weight.shape[-1] ** -0.5 if weight.ndim == 2 else 0.3
            centre = 1.0 if key.endswith("norm.weight") else 0.0
            weight.copy_((centre + scale * noise).half().float())
    return model


def hf_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.float().numpy()


def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for name in CASES:
        model = hf_model(name)
        tied = model.config.tie_word_embeddings
        weights = {
            k: v.numpy().astype(np.float16) for k, v in model.state_dict().items() if not (tied and "lm_head" in k)
        }
        config = json.loads(model.config.to_json_string(use_diff=False))
        np.savez_compressed(
            GOLDENS / f"{name}.npz",
            config=json.dumps(config),
            ids=IDS,
            logits=hf_logits(model, IDS),
            **{f"w.{k}": v for k, v in weights.items()},
        )
        print(name, (GOLDENS / f"{name}.npz").stat().st_size)


if __name__ == "__main__":
    main()
