"""transformers' contestant, torch on CPU: `python -m experiments.benchmarks.peer_transformers CASE_FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from experiments.benchmarks.case import read_case, read_tokens
from experiments.benchmarks.worker import serve


def generate(folder: Path) -> None:
    """The group's rows side by side, as its generate takes them; cached, sampled at temperature 1, never stopped."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    case = read_case(folder)
    model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    ids = torch.tensor(read_tokens(folder)["prompt_ids"], dtype=torch.long)[None].repeat(case.rollouts, 1)
    settings = GenerationConfig(
        max_new_tokens=case.response, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, use_cache=True,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip

    def step() -> None:
        torch.manual_seed(0)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        if out.shape != (case.rollouts, case.prompt + case.response):
            raise RuntimeError(f"generate gave {tuple(out.shape)} ids")

    step()
    serve(step, {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
