"""Quickstart: a tiny policy learns to use tools in the embedded toolbox, in minutes, on a laptop's CPU.

    python -m seal_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

1. Start: a 0.75M-parameter decoder, cloned from a teacher with bad habits. The clone lies in configs/starts/quickstart;
   its warm_start.json says what it cost. `configs/quickstart.py:scratch` trains tokenizer and clone in place.
2. SEAL rounds: rollouts -> verifier -> diagnosis -> update, with the interface evolving between rounds.
3. Strict evaluation (greedy, bare interface) before and after on the test split, and on two held-out domains.

How the diagnosis is used is one argument, see METHODS: the default is the setting that the study found best
(experiments/RESULTS.md), `configs/quickstart.py:paper` the paper's own, `:vanilla` uses it for nothing (plain GRPO).

    python -m seal_jax.main --config=configs/quickstart.py:scratch --workdir=runs/scratch --config.rounds=0

makes such a folder, runs/scratch/start; so was the kept one made.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from seal_jax.config import default_config

STARTS = Path(__file__).parent / "starts"

#: How the diagnosis is used: which rows see cues, what is trained on of those, how advantages are weighted.
METHODS: dict[str, dict[str, Any]] = {
    "default": {"interface.exposure": 0.5, "interface.strip_in_update": True, "loss.reweight": "paper"},
    "paper": {"interface.exposure": 1.0, "loss.reweight": "paper"},
    "vanilla": {"interface.exposure": 0.0, "loss.reweight": "none"},
}


def get_config(setting: str = "default") -> ConfigDict:
    settings = (*METHODS, "scratch")
    if setting not in settings:
        raise ValueError(f"configs/quickstart.py:{setting} is not known; choose one of {', '.join(settings)}")
    c = base()
    if setting == "scratch":
        c.policy.source, c.policy.path, c.warm_start.enabled = "tiny", "", True
    c.update_from_flattened_dict(METHODS.get(setting, METHODS["default"]))
    return c


def base() -> ConfigDict:
    """The world, the policy and the training, without the method."""
    c = default_config()
    c.suite = "toolbox"
    c.chat = "tiny"
    c.policy.source, c.policy.path = "hf", str(STARTS / "quickstart")

    # Prompts have 120-180 tokens, reference rows up to 314, with three cues 495; none may fail for its length. Few
    # buckets: here a compilation costs as much as a round.
    c.buckets.prompt = (192,)
    c.buckets.suffix, c.buckets.act_in_last = (192, 256, 320, 384, 496), True
    c.buckets.chunk = (16,)
    c.buckets.groups, c.buckets.rows = (16, 64), (2, 4)
    c.limits.max_new_tokens = 32
    c.limits.max_observation_tokens = 64

    c.rounds = 36
    c.tasks_per_round = 16
    c.rollouts = 8
    c.stop_failed_turns = True

    c.loss.kl_coef = 0.0
    c.loss.clip_high = 0.28
    c.optimizer.learning_rate = 3e-4
    c.optimizer.b2 = 0.98
    c.optimizer.weight_decay = 0.0
    c.learner.minibatches = 2
    c.learner.prompts_per_micro = 2

    c.eval.test, c.eval.ood = -1, -1
    c.checkpoint.every = 2  # a save takes a fraction of a round; an interrupted run loses little
    return c
