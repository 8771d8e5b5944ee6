"""How a round's cost grows: seconds of its parts against rollouts, turns, prompt length and tasks, with the exponents.

    python -m experiments.benchmarks.growth [--short]

A tiny policy, so that many sizes fit into minutes. Lengths are synthetic (a turn is 16 fed and 32 sampled tokens, none
of them stops); `toolbox tasks` are real episodes: the quickstart's clone plays 8 rollouts of each task, all parts of a
round timed apart. Fastest of three, after one to compile.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.worker import say

FED, SAMPLED = 16, 32
#: Where every axis starts from; one is changed at a time.
BASE = {"rollouts": 8, "turns": 2, "prompt": 512, "tasks": 2}
SIZES = {"rollouts": (2, 4, 8, 16), "turns": (1, 2, 4, 8), "prompt": (256, 512, 1024, 2048), "tasks": (1, 2, 4, 8)}
TOOLBOX_TASKS = (4, 8, 16)
SHORT_BASE = {"rollouts": 2, "turns": 1, "prompt": 32, "tasks": 1}
SHORT_SIZES = {"rollouts": (2, 4)}


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The e of seconds = c size^e: the slope of a least-squares line through the logarithms."""
    x, y = np.log(np.asarray(sizes, float)), np.log(np.asarray(seconds, float))
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def fastest(run: Callable[[], Any], times: int = 3) -> float:
    run()
    best = math.inf
    for _ in range(times):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def synthetic(rollouts: int, turns: int, prompt: int, tasks: int) -> dict[str, float]:
    """Seconds of a rollout and of an update of `tasks` groups with these lengths."""
    import jax

    from seal_jax.learner.batch import Batch, Buckets
    from seal_jax.learner.update import Learner, UpdateSettings
    from seal_jax.policy.config import PolicyConfig
    from seal_jax.policy.model import init_params
    from seal_jax.rollout.engine import RolloutEngine

    config = PolicyConfig.tiny(1200)
    params = init_params(config, 0)
    rng = np.random.default_rng(0)
    stop, length = config.vocab_size - 1, turns * (FED + SAMPLED)
    engine = RolloutEngine(
        config, stop_ids=[stop], prompt_buckets=(prompt,), suffix_buckets=(length,), chunk_buckets=(FED,),
        group_buckets=(tasks,), max_new_tokens=SAMPLED,
    )  # fmt: skip
    prompts = rng.integers(0, stop, (tasks, prompt)).tolist()
    rows = [(b, g) for b in range(tasks) for g in range(rollouts)]
    fed = rng.integers(0, stop, (len(rows), FED)).tolist()

    def rollout() -> None:
        session = engine.start(params, prompts, rollouts)
        for turn in range(turns):
            session.act(dict(zip(rows, fed, strict=True)), temperature=1.0, keys={r: turn for r in rows})

    mask_s = np.tile(np.arange(FED + SAMPLED) >= FED, turns)
    shape = (tasks, rollouts, length)
    batch = Batch(
        prompt_ids_bp=np.asarray(prompts, np.int32),
        prompt_len_b=np.full(tasks, prompt, np.int32),
        suffix_ids_bgs=rng.integers(0, stop, shape, dtype=np.int32),
        suffix_len_bg=np.full(shape[:2], length, np.int32),
        loss_mask_bgs=np.broadcast_to(mask_s, shape).copy(),
        turn_id_bgs=np.broadcast_to(np.arange(length, dtype=np.int32) // (FED + SAMPLED), shape).copy(),
        cue_mask_bgs=np.zeros(shape, bool),
        sample_logp_bgs=np.zeros(shape, np.float32),
        old_logp_bgs=np.full(shape, np.nan, np.float32),
        ref_logp_bgs=np.zeros(shape, np.float32),
        reward_bg=np.broadcast_to(np.arange(rollouts, dtype=np.float32) % 2, shape[:2]).copy(),
        labels_bgt=np.full((*shape[:2], turns), -1, np.int32),
        row_mask_bg=np.ones(shape[:2], bool),
        reward_mask_bg=np.ones(shape[:2], bool),
    )
    found = {"rollout": fastest(rollout)}
    learner = Learner(
        config, params, buckets=Buckets((prompt,), (length,), turns), update=UpdateSettings(minibatches=1)
    )

    def update() -> None:
        learner.update(batch, round=0)
        jax.block_until_ready(learner.state)

    return {**found, "update": fastest(update)}


def toolbox(tasks: int) -> dict[str, float]:
    """Seconds of the parts of a real round of `tasks` tasks: collector, verifier and diagnosis, update."""
    import jax

    from configs import quickstart
    from seal_jax.assembly import build_collector, build_learner, build_suite, starting_policy
    from seal_jax.diagnosis import diagnose
    from seal_jax.envs.verifier import Verifier
    from seal_jax.learner.batch import make_batch
    from seal_jax.telemetry.timing import PhaseTimer

    config = quickstart.get_config()
    config.buckets.groups, config.buckets.rows = (tasks,), ()  # never packed: fewer programs to compile for each size
    config.loss.reweight = "none"
    suite = build_suite(config)
    policy = starting_policy(config, Path("unused"), None, PhaseTimer())
    played = suite.tasks("train")[:tasks]
    learner = build_learner(config, policy, None, turns=max(len(task.turns) for task in suite.tasks("train")))
    collector = build_collector(config, policy, suite, None, PhaseTimer())
    best: dict[str, float] = {}
    for again in range(4):
        collector.timer = PhaseTimer()
        groups = collector.collect(learner.params, played, rollouts=config.rollouts, round=1)
        seconds = dict(collector.timer.totals)
        started = time.perf_counter()
        verifier = Verifier(suite)
        verdicts = [[verifier.verify_trajectory(t, x) for x in g] for t, g in zip(played, groups, strict=True)]
        diagnoses = [[diagnose(v) for v in group] for group in verdicts]
        seconds["diagnosis"] = time.perf_counter() - started
        started = time.perf_counter()
        # alternating rewards: every group is in the update, whatever the clone has learned
        rewards = [[float(g % 2) for g in range(len(group))] for group in groups]
        learner.update(make_batch(groups, rewards, diagnoses, buckets=learner.buckets), round=1)
        jax.block_until_ready(learner.state)
        seconds["update"] = time.perf_counter() - started
        if again:
            best = {name: min(value, best.get(name, math.inf)) for name, value in seconds.items()}
    return best


def grow(short: bool) -> dict[str, Any]:
    """{axis: {"sizes", part: seconds of each size, ..., "exponents": {part: e}}}."""
    base, sizes = (SHORT_BASE, SHORT_SIZES) if short else (BASE, SIZES)
    found: dict[str, Any] = {}
    known: dict[tuple, dict[str, float]] = {}

    def measure(changed: dict[str, int]) -> dict[str, float]:
        key = tuple(changed.values())
        if key not in known:
            known[key] = synthetic(**changed)
        return known[key]

    runs = {axis: [(n, measure({**base, axis: n})) for n in of_axis] for axis, of_axis in sizes.items()}
    if not short:
        runs["toolbox tasks"] = [(n, toolbox(n)) for n in TOOLBOX_TASKS]
    for axis, results in runs.items():
        of_axis = [n for n, _ in results]
        parts = {part: [seconds[part] for _, seconds in results] for part in results[0][1]}
        parts["round"] = [sum(seconds.values()) for _, seconds in results]
        exponents = {part: exponent(of_axis, seconds) for part, seconds in parts.items()}
        found[axis] = {"sizes": of_axis, "seconds": parts, "exponents": exponents}
    return found


if __name__ == "__main__":
    say(grow("--short" in sys.argv))
