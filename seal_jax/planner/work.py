"""Matrix-product FLOPs by formula, and how often a round calls each program."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ml_collections import ConfigDict

from seal_jax.planner.programs import Grid
from seal_jax.policy.config import PolicyConfig


@dataclass(frozen=True)
class Episodes:
    """What the planner assumes of a run's episodes, in tokens of each; the defaults are like BFCL's multi-turn tasks.

    `prompt`: tools, system and first user message. `suffix`: all that follows, of which `sampled` by the policy, in
    `messages` messages.
    """

    prompt: int = 5120
    suffix: int = 1536
    sampled: int = 512
    messages: int = 12

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"--episodes: {field.name}={getattr(self, field.name)} must be at least 1")
        if self.messages > self.sampled or self.sampled >= self.suffix:
            raise ValueError(
                f"--episodes: need messages <= sampled < suffix, not messages={self.messages}, sampled={self.sampled}, "
                f"suffix={self.suffix}"
            )

    @classmethod
    def parse(cls, text: str) -> Episodes:
        """ "prompt=5120,suffix=1536,sampled=512,messages=12", any part of it; ValueError for anything else."""
        names, values = {field.name for field in fields(cls)}, {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in names or not value.isdecimal():
                raise ValueError(f"--episodes={text}: {part!r} is not one of {', '.join(sorted(names))} = a number")
            values[name] = int(value)
        return cls(**values)


def fitting(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest bucket that holds `wanted`, or the largest there is."""
    return next((size for size in sizes if size >= wanted), sizes[-1])


def cut(episodes: Episodes, config: ConfigDict) -> Episodes:
    """Episodes that the declared buckets hold: longer ones end where a run would end them."""
    suffix = min(episodes.suffix, config.buckets.suffix[-1])
    sampled = max(1, episodes.sampled * suffix // episodes.suffix)
    messages = min(episodes.messages, sampled)
    return Episodes(min(episodes.prompt, config.buckets.prompt[-1]), suffix, sampled, messages)


@dataclass(frozen=True)
class Round:
    """Calls of a round, and the shapes at which an average episode makes them."""

    waves: int  # sessions, one after the other
    rollout: Grid
    chunk: int  # tokens fed before each message
    messages: int  # of a session: each is one extend and one decode
    steps: int  # tokens sampled in a message
    micro: Grid
    scores: int  # micro-batches scored without a gradient
    micros: int  # micro-batches with one
    applies: int  # optimiser steps
    scored: int  # loss tokens of a row


def plan_round(config: ConfigDict, episodes: Episodes, *, kl: bool, hosts: int = 1) -> Round:
    """The calls of each of `hosts`, which share a round's tasks, and of the update that they make together."""
    tasks, rows, learner = config.tasks_per_round, config.rollouts, config.learner
    played = math.ceil(tasks / hosts)
    largest = config.buckets.groups[-1]
    prompt, suffix = fitting(config.buckets.prompt, episodes.prompt), fitting(config.buckets.suffix, episodes.suffix)
    acting = config.buckets.suffix[-1] if config.buckets.act_in_last else suffix
    fed = math.ceil((episodes.suffix - episodes.sampled) / episodes.messages) + 1
    of_mini = math.ceil(tasks / learner.minibatches)
    per_pass = learner.minibatches * math.ceil(of_mini / learner.prompts_per_micro)
    # The first step's old policy is the current one; the reference scores every prompt.
    again = tasks if learner.epochs > 1 else tasks - of_mini
    scores = math.ceil(again / learner.prompts_per_micro) + kl * math.ceil(tasks / learner.prompts_per_micro)
    return Round(
        waves=math.ceil(played / largest),
        rollout=Grid(fitting(config.buckets.groups, min(played, largest)), rows, prompt, acting),
        chunk=fitting(config.buckets.chunk, fed),
        messages=episodes.messages,
        steps=math.ceil(episodes.sampled / episodes.messages),
        micro=Grid(learner.prompts_per_micro, rows, prompt, suffix),
        scores=scores,
        micros=per_pass * learner.epochs,
        applies=learner.minibatches * learner.epochs,
        scored=episodes.sampled,
    )


# --- FLOPs of one call, all chips together ---------------------------------------------------------------------------
def trunk_flops(policy: PolicyConfig, tokens: float) -> float:
    """Of the blocks' projections, forward."""
    d, h = policy.d_model, policy.head_dim
    weights = d * (policy.n_heads + 2 * policy.n_kv_heads) * h + policy.n_heads * h * d + 3 * d * policy.d_ff
    return 2.0 * policy.n_layers * weights * tokens


def attention_flops(policy: PolicyConfig, pairs: float) -> float:
    """Of `pairs` of a query and a key that it sees, forward: scores and mixed values."""
    return 4.0 * policy.n_layers * policy.n_heads * policy.head_dim * pairs


def head_flops(policy: PolicyConfig, tokens: float) -> float:
    return 2.0 * policy.d_model * policy.padded_vocab * tokens


def grid_tokens(grid: Grid) -> int:
    return grid.groups * (grid.prompt + grid.rows * grid.suffix)


def grid_pairs(grid: Grid) -> float:
    """Visible pairs where the prompt stands once and each row sees it and, causally, itself."""
    p, s = grid.prompt, grid.suffix
    return grid.groups * (p * (p + 1) / 2 + grid.rows * (s * p + s * (s + 1) / 2))


def score_flops(policy: PolicyConfig, grid: Grid, scored: int) -> float:
    tokens = grid.groups * grid.rows * scored
    return (
        trunk_flops(policy, grid_tokens(grid)) + attention_flops(policy, grid_pairs(grid)) + head_flops(policy, tokens)
    )


def accumulate_flops(policy: PolicyConfig, grid: Grid, scored: int, *, adapters: bool = False) -> float:
    """Forward, backward, and what is computed again in the backward pass.

    A product costs twice its forward in the backward pass (by inputs and by weights); where only adapters are trained,
    once. Attention computes its scores again and then costs 2.5 times its forward; the head is always computed again.
    """
    again = policy.remat == "block"
    backward = 1 if adapters else 2
    tokens = grid.groups * grid.rows * scored
    return (
        trunk_flops(policy, grid_tokens(grid)) * (1 + again + backward)
        + attention_flops(policy, grid_pairs(grid)) * (1 + again + 2.5)
        + head_flops(policy, tokens) * (2 + backward)
    )


def prefill_flops(policy: PolicyConfig, grid: Grid) -> float:
    p = grid.prompt
    return trunk_flops(policy, grid.groups * p) + attention_flops(policy, grid.groups * p * (p + 1) / 2)


def extend_flops(policy: PolicyConfig, grid: Grid, chunk: int) -> float:
    """A cache is read whole, whatever of it is real."""
    tokens = grid.groups * grid.rows * chunk
    return trunk_flops(policy, tokens) + attention_flops(policy, tokens * (grid.prompt + grid.suffix + chunk))


def decode_step_flops(policy: PolicyConfig, grid: Grid, buffer: int) -> float:
    rows = grid.groups * grid.rows
    seen = grid.prompt + grid.suffix + buffer
    return trunk_flops(policy, rows) + head_flops(policy, rows) + attention_flops(policy, rows * seen)
