"""Update and rollout on the accelerator at hand, against the matrix-product rate that it reaches in the same run.

    python -m experiments.benchmarks.accelerator --shape=qwen25_1p5b --out=accelerator.json

Random weights in the shape of Qwen2.5-1.5B or -3B, bfloat16 with float32 masters, one group at BFCL's lengths (prompt
5,120, G = 8 rows of 1,536). Reports model FLOP utilisation (operations that an update needs, none of them twice, over
what a large product reaches in the same time), tokens sampled a second by one session, and log-probs and gradient norm
of a small case beside those of the CPU. A few minutes on one GPU; nobody has run it on one for this repository. With
--shape=tiny it runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.case import Case, made_tokens, policy_config
from experiments.benchmarks.flops import update_flops
from experiments.benchmarks.ours import one_group
from seal_jax.learner.batch import Buckets
from seal_jax.learner.update import Learner, UpdateSettings
from seal_jax.policy.model import init_params
from seal_jax.rollout.engine import RolloutEngine

TINY = Case("tiny", 3, 64, 4, 2, 16, 160, 512, rollouts=4, prompt=128, response=128)
SHAPES = {
    "qwen25_1p5b": Case("qwen25_1p5b", 28, 1536, 12, 2, 128, 8960, 151936, prompt=5120, response=1536),
    "qwen25_3b": Case("qwen25_3b", 36, 2048, 16, 2, 128, 11008, 151936, prompt=5120, response=1536),
    "tiny": TINY,
}


def learner(case: Case, **options: Any) -> Learner:
    config = policy_config(case, **options)
    buckets = Buckets((case.prompt,), (case.response,), 1)
    return Learner(config, init_params(config, 0), buckets=buckets, update=UpdateSettings(minibatches=1))


def median_seconds(run: Callable[[], Any], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))


def matmul_flops(size: int) -> float:
    """FLOP/s of a square product in bfloat16, the best of five."""
    x = jnp.ones((size, size), jnp.bfloat16)
    dot = jax.jit(jnp.dot)
    dot(x, x).block_until_ready()
    return 2 * size**3 / min(median_seconds(lambda: dot(x, x), 1) for _ in range(5))


def update(case: Case, peak: float, **options: Any) -> dict[str, float]:
    made, batch = learner(case, **options), one_group(case, made_tokens(case))
    made.update(batch, round=0)  # compiles

    def step() -> Any:
        made.update(batch, round=1)
        return made.state

    seconds, flops = median_seconds(step, 3), update_flops(case)
    return {"seconds": seconds, "row_tokens_per_s": case.row_tokens / seconds, "mfu": flops / seconds / peak}


def rollout(case: Case, groups: int, **options: Any) -> dict[str, float]:
    """Sampled tokens a second of `groups` groups whose rows all sample `response` tokens (but for rare stop ids)."""
    config = policy_config(case, **options)
    params, prompt = init_params(config, 0), made_tokens(case)["prompt_ids"].tolist()
    engine = RolloutEngine(
        config, stop_ids=[case.vocab - 1], prompt_buckets=(case.prompt,), suffix_buckets=(case.response + 1,),
        chunk_buckets=(1,), group_buckets=(groups,), max_new_tokens=case.response,
    )  # fmt: skip
    sampled = 0

    def play() -> None:
        nonlocal sampled
        rows = {(b, g): prompt[-1:] for b in range(groups) for g in range(case.rollouts)}
        session = engine.start(params, [prompt[:-1]] * groups, case.rollouts)
        out = session.act(rows, temperature=1.0, keys={row: i for i, row in enumerate(rows)})
        sampled = sum(len(x.ids) for x in out.values())

    play()
    return {"sampled_per_s": sampled / median_seconds(play, 3), "rows": groups * case.rollouts}


def parity() -> dict[str, float]:
    """The tiny case in float32, here and on the CPU: largest difference of a log-prob, relative one of the gradient."""
    scored, norms = [], []
    for device in (jax.devices()[0], jax.devices("cpu")[0]):
        with jax.default_device(device), jax.default_matmul_precision("highest"):
            made, batch = learner(TINY), one_group(TINY, made_tokens(TINY))
            scored.append(made.score(made.params, batch))
            norms.append(made.update(batch, round=0)["norm/gradient"])
    return {"log_prob": float(np.abs(scored[0] - scored[1]).max()), "gradient_norm": abs(norms[0] / norms[1] - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen25_1p5b")
    parser.add_argument("--groups", type=int, default=8, help="groups of the rollout")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args()
    case, device = SHAPES[args.shape], jax.devices()[0]
    on_tpu = device.platform == "tpu"
    options = {"compute_dtype": "bfloat16", "remat": "block", "attention": "splash" if on_tpu else "blockwise"}
    peak = matmul_flops(8192 if device.platform != "cpu" else 512)
    report: dict[str, Any] = {"device": device.device_kind, "shape": args.shape, "matmul_tflops": peak / 1e12}
    report["parity"] = parity()
    report["update"] = update(case, peak, **options)
    report["rollout"] = rollout(case, args.groups, **{**options, "remat": "none"})
    text = json.dumps(report, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
