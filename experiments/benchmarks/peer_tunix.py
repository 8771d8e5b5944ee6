"""google-tunix's contestants, run by a Python that has it.

    python -m experiments.benchmarks.peer_tunix CONTESTANT CASE_FOLDER

Its own parts, as installed: the Llama and its safetensors loader, the GRPO loss, the body of its trainer's step (the
trainer around it would add logs and checkpoints; what it donates is donated here) and its native sampler. Imports
nothing of seal_jax.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import Llama3, ModelConfig, RematConfig
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl.algo_core import compute_advantages, grpo_loss_fn
from tunix.rl.common import TrainExample, compute_per_token_logps
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.sft.peft_trainer import PeftTrainer

from experiments.benchmarks.aot import measured, tpu_sharding
from experiments.benchmarks.case import CASES, Case, read_case, read_tokens
from experiments.benchmarks.flops import program_flops
from experiments.benchmarks.worker import say, serve


def model_config(case: Case, remat: RematConfig = RematConfig.BLOCK) -> ModelConfig:
    return ModelConfig(
        num_layers=case.layers,
        vocab_size=case.vocab,
        embed_dim=case.width,
        hidden_dim=case.mlp_width,
        num_heads=case.heads,
        head_dim=case.head_width,
        num_kv_heads=case.kv_heads,
        rope_theta=int(case.rope_theta),
        norm_eps=case.norm_eps,
        weight_tying=True,
        remat_config=remat,
    )


def load(folder: Path, case: Case, remat: RematConfig = RematConfig.BLOCK) -> Llama3:
    return create_model_from_safe_tensors(str(folder / "model"), model_config(case, remat), dtype=jnp.float32)


def example(case: Case, tokens: dict[str, np.ndarray]) -> TrainExample:
    """The group with its prompt repeated in each row, which is the only layout that its loss takes."""
    mask = np.ones((case.rollouts, case.response), np.int32)
    mask[:, 0] = 0
    prompt = np.tile(tokens["prompt_ids"], (case.rollouts, 1))
    return TrainExample(
        prompt_ids=jnp.asarray(prompt),
        prompt_mask=jnp.ones(prompt.shape, jnp.int32),
        completion_ids=jnp.asarray(tokens["suffix_ids"]),
        completion_mask=jnp.asarray(mask),
        advantages=jnp.asarray(compute_advantages(tokens["rewards"], case.rollouts)),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )


def train_step(case: Case, model_graph: Any, optimizer_graph: Any) -> Any:
    """(model state, optimiser state, example) -> both after a step, loss, gradient norm; jitted."""
    grpo = GRPOConfig(num_generations=case.rollouts, beta=0.0, loss_agg_mode="token-mean")
    grpo.temperature = 1.0

    def loss(model: Any, train_example: TrainExample) -> Any:
        return grpo_loss_fn(model, train_example, grpo, pad_id=case.vocab, eos_id=case.vocab)

    trainer: Any = types.SimpleNamespace(
        loss_fn=loss, gen_model_input_fn=lambda x: {"train_example": x}, _lora_enabled=False, _has_aux=True
    )

    def step(model_state: Any, optimizer_state: Any, inputs: TrainExample) -> Any:
        model, optimizer = nnx.merge(model_graph, model_state), nnx.merge(optimizer_graph, optimizer_state)
        loss, _, norm = PeftTrainer._train_step(trainer, model, optimizer, inputs)
        return nnx.state(model), nnx.state(optimizer), loss, norm

    return jax.jit(step, donate_argnums=(1,))


def make_optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, b1=0.9, b2=0.999, weight_decay=0.01))


def update(folder: Path) -> None:
    case, tokens = read_case(folder), read_tokens(folder)
    model = load(folder, case)
    inputs = example(case, tokens)
    ids = {"pad_id": case.vocab, "eos_id": case.vocab}
    logp = compute_per_token_logps(*nnx.split(model), inputs.prompt_ids, inputs.completion_ids, **ids)
    np.save(folder / "logp_tunix.npy", np.asarray(logp))
    optimizer = nnx.Optimizer(model, make_optimizer(), wrt=nnx.Param)
    (model_graph, model_state), (optimizer_graph, optimizer_state) = nnx.split(model), nnx.split(optimizer)
    del model, optimizer, logp
    train = train_step(case, model_graph, optimizer_graph)
    # committed to their device, or the second step would compile again
    state = jax.device_put({"model": model_state, "optimizer": optimizer_state}, jax.devices()[0])
    inputs = jax.device_put(inputs, jax.devices()[0])
    del model_state, optimizer_state

    def step() -> dict[str, Any]:
        state["model"], state["optimizer"], loss, norm = train(state["model"], state["optimizer"], inputs)
        jax.block_until_ready(state)
        return {"loss": float(loss), "gradient_norm": float(norm)}

    serve(step, step())


class Tokenizer:
    """The prompt for any text; no special ids that a sampled token could be."""

    def __init__(self, prompt: list[int], outside: int) -> None:
        self.prompt, self.outside = prompt, outside

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(self.prompt)

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return self.outside

    def pad_id(self) -> int:
        return self.outside


def rollout(folder: Path) -> None:
    case = read_case(folder)
    tokenizer = Tokenizer(read_tokens(folder)["prompt_ids"].tolist(), outside=case.vocab)
    cache = CacheConfig(case.prompt + case.response, case.layers, case.kv_heads, case.head_width)
    # without remat: with it, its decode loop does not trace
    sampler = Sampler(load(folder, case, RematConfig.NONE), tokenizer, cache)

    def step() -> None:
        out = sampler(
            [""] * case.rollouts, max_generation_steps=case.response, max_prompt_length=case.prompt, temperature=1.0,
            top_p=1.0, seed=0, return_logprobs=True,
        )  # fmt: skip
        if [len(x) for x in out.tokens] != [case.response] * case.rollouts:
            raise RuntimeError(f"rows of {[len(x) for x in out.tokens]} tokens")

    step()
    serve(step, {})


def aot(name: str) -> None:
    """FLOPs, bytes and memory of an update with everything in bfloat16 (its model computes in its parameters' type)."""
    case = CASES[name]
    sharding = tpu_sharding()

    def build() -> Any:
        model = Llama3(model_config(case), rngs=nnx.Rngs(0))
        nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
        return nnx.state(model), nnx.state(nnx.Optimizer(model, make_optimizer(), wrt=nnx.Param))

    def graphs() -> Any:
        model = nnx.eval_shape(lambda: Llama3(model_config(case), rngs=nnx.Rngs(0)))
        optimizer = nnx.eval_shape(lambda m: nnx.Optimizer(m, make_optimizer(), wrt=nnx.Param), model)
        return nnx.graphdef(model), nnx.graphdef(optimizer)

    tokens = {
        "prompt_ids": np.zeros(case.prompt, np.int32),
        "suffix_ids": np.zeros((case.rollouts, case.response), np.int32),
        "rewards": (np.arange(case.rollouts) % 2).astype(np.float32),
    }
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (*jax.eval_shape(build), example(case, tokens)),
    )
    jitted = train_step(case, *graphs())
    flops = program_flops(jax.make_jaxpr(jitted)(*arguments))
    say({"contestant": "tunix_block", "flops": flops, **measured(jitted, arguments)})


if __name__ == "__main__":
    if sys.argv[1] == "aot":
        aot(sys.argv[2])
    else:
        {"update": update, "rollout": rollout}[sys.argv[1]](Path(sys.argv[2]))
