"""What all contestants of the peer comparison share: one model, one group of tokens, one set of weights on disk.

A case folder holds `case.json` (the sizes below), `model/` (config.json and safetensors in Hugging Face's names, which
every contestant reads with its own loader) and `tokens.npz` (prompt_ids [P], suffix_ids [G,S], rewards [G]). Reading it
takes numpy alone, so that a peer's own Python can. `python -m experiments.benchmarks.case SHAPE FOLDER` writes one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """A Llama with tied embeddings, and one group: `rollouts` rows of `response` tokens after `prompt` tokens."""

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    vocab: int
    rollouts: int = 8
    prompt: int = 512
    response: int = 128
    # Not SmolLM2's 100,000: the Llama of google-tunix 0.1.7 does not hand its config's theta to its rotation, which
    # then takes this default. The cost is the same, and so the log-probs can be compared.
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5

    @property
    def row_tokens(self) -> int:
        """Tokens of the layout that repeats the prompt in each row: what every contestant's speed is counted in."""
        return self.rollouts * (self.prompt + self.response)

    @property
    def sampled(self) -> int:
        return self.rollouts * self.response


CASES = {
    case.name: case
    for case in (
        Case("smollm2_135m", 30, 576, 9, 3, 64, 1536, 49152),
        Case("tiny", 3, 64, 4, 2, 16, 160, 512, rollouts=4, prompt=64, response=16),
        # Only compiled, never run: two layers with the dimensions of Qwen2.5-7B (without its biases), BFCL's lengths.
        Case("qwen25_7b_2layers", 2, 3584, 28, 4, 128, 18944, 152064, prompt=5120, response=1536),
    )
}


def policy_config(case: Case, **options: Any) -> Any:
    """The case's model as our PolicyConfig."""
    from seal_jax.policy.config import PolicyConfig

    return PolicyConfig(
        vocab_size=case.vocab,
        padded_vocab=case.vocab,
        d_model=case.width,
        n_layers=case.layers,
        n_heads=case.heads,
        n_kv_heads=case.kv_heads,
        head_dim=case.head_width,
        d_ff=case.mlp_width,
        rope_theta=case.rope_theta,
        norm_eps=case.norm_eps,
        max_position=8192,
        **options,
    )


def made_tokens(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens of a group, without id 0: peers that tell padding by its id would hide it."""
    rng = np.random.default_rng(seed)
    return {
        "prompt_ids": rng.integers(1, case.vocab, case.prompt, dtype=np.int32),
        "suffix_ids": rng.integers(1, case.vocab, (case.rollouts, case.response), dtype=np.int32),
        "rewards": (np.arange(case.rollouts) % 2).astype(np.float32),
    }


def write_case(case: Case, folder: Path, seed: int = 0) -> None:
    from seal_jax.policy.hf import save_hf
    from seal_jax.policy.model import init_params

    folder.mkdir(parents=True, exist_ok=True)
    config = policy_config(case)
    save_hf(folder / "model", config, init_params(config, seed))
    np.savez(folder / "tokens.npz", **made_tokens(case, seed))
    (folder / "case.json").write_text(json.dumps(asdict(case), indent=1) + "\n")  # last: with it, the folder is whole


def read_case(folder: Path) -> Case:
    return Case(**json.loads((folder / "case.json").read_text()))


def read_tokens(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "tokens.npz") as arrays:
        return dict(arrays)


if __name__ == "__main__":
    write_case(CASES[sys.argv[1]], Path(sys.argv[2]))
