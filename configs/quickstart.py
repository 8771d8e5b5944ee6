"""Quickstart: a tiny policy learns to use tools in the embedded toolbox, in minutes, on a laptop's CPU.

    python -m seal_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

1. A tokenizer is trained in place and a 0.6M-parameter decoder is cloned from a teacher with bad habits (warm start).
2. SEAL rounds: rollouts -> verifier -> diagnosis -> update, with the interface evolving between rounds.
3. Strict evaluation (greedy, bare interface) before and after on the test split, and on two held-out domains.
"""

from ml_collections import ConfigDict

from seal_jax.config import default_config


def get_config() -> ConfigDict:
    c = default_config()
    c.suite = "toolbox"
    c.chat = "tiny"
    c.policy.source = "tiny"

    c.warm_start.enabled = True

    # Prompts have 120-180 tokens, rows up to 400.
    c.buckets.prompt = (192,)
    c.buckets.suffix = (128, 192, 256, 512)
    c.buckets.chunk = (8, 32)
    c.buckets.groups = (4, 16)
    c.limits.max_new_tokens = 32
    c.limits.max_observation_tokens = 64

    c.rounds = 12
    c.tasks_per_round = 16
    c.rollouts = 8
    c.stop_failed_turns = True
    c.interface.exposure = 0.5

    c.loss.reweight = "turn"
    c.loss.kl_coef = 0.0
    c.loss.clip_high = 0.28
    c.optimizer.learning_rate = 3e-4
    c.optimizer.b2 = 0.98
    c.optimizer.weight_decay = 0.0
    c.learner.minibatches = 2
    c.learner.prompts_per_micro = 2

    c.eval.test, c.eval.ood = -1, -1
    return c
