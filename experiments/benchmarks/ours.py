"""Our contestants: `python -m experiments.benchmarks.ours CONTESTANT CASE_FOLDER` (see `peers` for the comparison).

update_none, update_block: the whole of `Learner.update` on one group, without and with remat; rollout: a group from
`RolloutEngine`; matmul: what `jnp.dot` reaches; aot: the update compiled for a TPU that is not there.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.aot import measured, tpu_sharding
from experiments.benchmarks.case import CASES, Case, policy_config, read_case, read_tokens
from experiments.benchmarks.flops import program_flops
from experiments.benchmarks.worker import say, serve
from seal_jax.learner.batch import Batch, Buckets
from seal_jax.learner.loss import LossSettings, denominators
from seal_jax.learner.optimizer import OptimizerSettings, make_optimizer
from seal_jax.learner.programs import TrainState, make_programs
from seal_jax.learner.update import Learner, UpdateSettings
from seal_jax.policy.config import param_shapes
from seal_jax.policy.hf import load_hf
from seal_jax.policy.model import SHALLOW
from seal_jax.policy.splash import LANES
from seal_jax.rollout.engine import RolloutEngine

#: Tokens whose logits exist at one time; a setting of the policy.
HEAD_CHUNK = int(os.environ.get("SEAL_HEAD_CHUNK", "512"))


def one_group(case: Case, tokens: dict[str, np.ndarray]) -> Batch:
    """The case's group as a batch of one prompt: every token of a row but its first is in the loss."""
    g, s = case.rollouts, case.response
    mask_bgs = np.ones((1, g, s), bool)
    mask_bgs[..., 0] = False
    return Batch(
        prompt_ids_bp=tokens["prompt_ids"][None],
        prompt_len_b=np.full(1, case.prompt, np.int32),
        suffix_ids_bgs=tokens["suffix_ids"][None],
        suffix_len_bg=np.full((1, g), s, np.int32),
        loss_mask_bgs=mask_bgs,
        turn_id_bgs=np.zeros((1, g, s), np.int32),
        cue_mask_bgs=np.zeros((1, g, s), bool),
        sample_logp_bgs=np.zeros((1, g, s), np.float32),
        old_logp_bgs=np.full((1, g, s), np.nan, np.float32),
        ref_logp_bgs=np.zeros((1, g, s), np.float32),
        reward_bg=tokens["rewards"][None],
        labels_bgt=np.full((1, g, 1), -1, np.int32),
        row_mask_bg=np.ones((1, g), bool),
        reward_mask_bg=np.ones((1, g), bool),
    )


def update(folder: Path, remat: str) -> None:
    case, tokens = read_case(folder), read_tokens(folder)
    config, params = load_hf(folder / "model", remat=remat, head_chunk=HEAD_CHUNK)
    batch = one_group(case, tokens)
    learner = Learner(
        config, params, buckets=Buckets((case.prompt,), (case.response,), 1), update=UpdateSettings(minibatches=1)
    )
    del params
    np.save(folder / f"logp_ours_{remat}.npy", learner.score(learner.params, batch)[0])
    first = learner.update(batch, round=0)

    def step() -> None:
        learner.update(batch, round=1)
        jax.block_until_ready(learner.state)

    serve(step, {"loss": first["loss/total"], "gradient_norm": first["norm/gradient"]})


def rollout(folder: Path) -> None:
    """The prompt's last token opens each row, since a row must be fed something: 512 tokens of context as for all."""
    case, prompt = read_case(folder), read_tokens(folder)["prompt_ids"].tolist()
    config, params = load_hf(folder / "model")
    stop = case.vocab - 1
    engine = RolloutEngine(
        config, stop_ids=[stop], prompt_buckets=(case.prompt,), suffix_buckets=(case.response + 1,),
        chunk_buckets=(1,), group_buckets=(1,), max_new_tokens=case.response,
    )  # fmt: skip

    def sample(seed: int) -> bool:
        rows = {(0, g): prompt[-1:] for g in range(case.rollouts)}
        session = engine.start(params, [prompt[:-1]], case.rollouts)
        keys = {row: 1000 * seed + i for i, row in enumerate(rows)}
        sampled = session.act(rows, temperature=1.0, keys=keys)
        return all(len(x.ids) == case.response and x.truncated for x in sampled.values())

    whole = next(seed for seed in range(1000) if sample(seed))  # the first in which no row meets the stop id

    def step() -> None:
        if not sample(whole):
            raise RuntimeError("a row met the stop id")

    serve(step, {})


def matmul(folder: Path) -> None:
    """A step is one product of 2,048 squares, float32; with it go the rates of the model's own shapes."""
    case = read_case(folder)
    tokens = case.prompt + case.sampled
    sizes = {
        "square": (2048, 2048, 2048),
        "mlp": (tokens, case.width, case.mlp_width),
        "q": (tokens, case.width, case.heads * case.head_width),
        "head": (case.sampled, case.width, case.vocab),
    }
    dot = jax.jit(jnp.dot)
    made = {}
    for name, (m, k, n) in sizes.items():
        made[name] = (jnp.ones((m, k)), jnp.ones((k, n)), 2.0 * m * k * n)

    def rates() -> dict[str, float]:
        found = {}
        for name, (x, y, flops) in made.items():
            times = []
            for _ in range(5):
                started = time.perf_counter()
                dot(x, y).block_until_ready()
                times.append(time.perf_counter() - started)
            found[f"gflops_{name}"] = flops / min(times) / 1e9
        return found

    rates()
    serve(rates, {})


# --- ahead of time -------------------------------------------------------------------------------------------------
def update_programs(case: Case, sharding: Any, **options: Any) -> dict[str, tuple[Any, tuple, float]]:
    """The two programs of an update, {name: (jitted, abstract arguments, bytes that live meanwhile)}."""
    config = policy_config(case, **options)
    tx = make_optimizer(OptimizerSettings())

    def place(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), param_shapes(config), is_leaf=lambda x: type(x) is tuple
    )
    state = place(TrainState(params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((), jnp.int32)))
    programs = make_programs(config, LossSettings(), tx, jax.tree.map(lambda x: x.sharding, state), temperature=1.0)
    tokens = {
        "prompt_ids": np.zeros(case.prompt, np.int32),
        "suffix_ids": np.zeros((case.rollouts, case.response), np.int32),
        "rewards": np.zeros(case.rollouts, np.float32),
    }
    batch = one_group(case, tokens)
    whole = place(denominators(batch))
    moments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state))
    utility = place(jnp.zeros((), jnp.float32))
    return {
        "accumulate": (programs.accumulate, (state.params, state.params, {}, place(batch), whole, utility), moments),
        "apply": (programs.apply, (state, state.params), 0),
    }


def aot(name: str) -> None:
    """Operations, bytes and memory of an update in bfloat16 with float32 masters, without and with remat."""
    case = CASES[name]
    sharding = tpu_sharding()
    fits = case.prompt % LANES == case.response % LANES == 0
    options: dict[str, Any] = {
        "compute_dtype": "bfloat16",
        "head_chunk": HEAD_CHUNK,
        "attention": "splash" if fits else "blockwise",  # as attention="auto" would choose there
    }
    found: dict[str, dict[str, float]] = {}
    for remat in ("none", "block"):
        for program, (jitted, arguments, beside) in update_programs(case, sharding, remat=remat, **options).items():
            if program == "apply" and program in found:
                continue  # remat is nothing to it
            found[program] = measured(jitted, arguments, beside)
            found[program]["flops"] = program_flops(jax.make_jaxpr(jitted)(*arguments))
        whole = {"flops": sum(x["flops"] for x in found.values())}
        for key in ("peak_gib", "temporary_gib", "too_large_gib", "chip_gib", "compile_seconds"):
            values = [x[key] for x in found.values() if key in x]
            if values:
                whole[key] = sum(values) if key == "compile_seconds" else max(values)
        if remat == "block":  # the peer's setting
            whole |= _without_loops(case, sharding, found["apply"], remat=remat, **options)
        say({"contestant": f"ours_{remat}", **whole})


def _without_loops(case: Case, sharding: Any, apply: dict[str, float], **options: Any) -> dict[str, float]:
    """XLA's counts of an update whose loops it would count once: with the layers side by side and all logits at once.

    Layers are alike: what the second of two costs, the other ones cost too.
    """
    options["head_chunk"] = case.sampled

    def counts(layers: int) -> dict[str, float]:
        jitted, arguments, _ = update_programs(replace(case, layers=layers), sharding, **options)["accumulate"]
        return measured(jitted, arguments)

    keys = ("xla_flops", "xla_bytes")
    if case.layers <= SHALLOW:
        last = counts(case.layers)
        return {key: last[key] + apply[key] for key in keys if key in last}
    one, two = counts(1), counts(2)
    return {key: one[key] + (case.layers - 1) * (two[key] - one[key]) + apply[key] for key in keys}


CONTESTANTS = {
    "update_none": partial(update, remat="none"),
    "update_block": partial(update, remat="block"),
    "rollout": rollout,
    "matmul": matmul,
}

if __name__ == "__main__":
    if sys.argv[1] == "aot":
        aot(sys.argv[2])
    else:
        CONTESTANTS[sys.argv[1]](Path(sys.argv[2]))
