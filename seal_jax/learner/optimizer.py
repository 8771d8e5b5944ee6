"""AdamW whose moments and arithmetic are float32, a learning-rate schedule, and clipping by the global norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclass(frozen=True)
class OptimizerSettings:
    """The paper's runs: AdamW, 1e-6 constant, betas 0.9/0.999, decay 0.01, clip 1.0.

    Decay applies to every parameter. `schedule="cosine"` falls to `final_fraction` of the rate at `total_steps`.
    Warm-up is linear and its first step is not zero. `clip_norm=0` turns clipping off.
    """

    learning_rate: float = 1e-6
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        # A numpy or jax scalar would change the dtype of the update (optax#1405).
        for name in ("learning_rate", "b1", "b2", "eps", "weight_decay", "clip_norm", "final_fraction"):
            value = float(getattr(self, name))
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"config.optimizer.{name}={value} must be finite and not negative")
            object.__setattr__(self, name, value)
        if self.learning_rate > 1:
            raise ValueError(f"config.optimizer.learning_rate={self.learning_rate} must be at most 1; e.g. 1e-6")
        for name in ("b1", "b2"):  # at 1 the bias correction divides by 0
            if getattr(self, name) >= 1:
                raise ValueError(f"config.optimizer.{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.warmup_steps < 0:
            raise ValueError(f"config.optimizer.warmup_steps={self.warmup_steps} must be at least 0")
        if self.schedule not in ("constant", "cosine"):
            raise ValueError(f"config.optimizer.schedule={self.schedule!r} is not one of 'constant', 'cosine'")
        if self.schedule == "cosine" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"config.optimizer.warmup_steps={self.warmup_steps} leaves nothing of a cosine over all "
                f"{self.total_steps} steps; lower it, train more rounds, or set schedule='constant'"
            )


def learning_rate(settings: OptimizerSettings, step: Any) -> Any:
    """The rate of (zero-based) optimiser step `step`; works on Python, numpy and traced integers."""
    xp: Any = jnp if isinstance(step, jax.Array) else np
    step = xp.asarray(step, xp.float32)
    scale = xp.minimum((step + 1.0) / max(settings.warmup_steps, 1), 1.0)
    if settings.schedule == "cosine":
        done = (step - settings.warmup_steps) / (settings.total_steps - settings.warmup_steps)
        cosine = 0.5 * (1.0 + xp.cos(math.pi * xp.clip(done, 0.0, 1.0)))
        scale = scale * (settings.final_fraction + (1.0 - settings.final_fraction) * cosine)
    return settings.learning_rate * scale


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Runs `inner` on float32 copies and casts the update back: no moment is ever kept in a shorter type."""

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)

    def init(params: Any) -> Any:
        return inner.init(widen(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = inner.update(widen(updates), state, None if params is None else widen(params))
        return jax.tree.map(lambda x, like: x.astype(like.dtype), new, updates), state

    return optax.GradientTransformation(init, update)


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Clip, then AdamW. Masters must be float32: steps of 1e-6 vanish in bfloat16 weights, whatever the moments."""
    steps = [optax.clip_by_global_norm(settings.clip_norm)] if settings.clip_norm else []
    steps.append(
        optax.adamw(
            lambda count: learning_rate(settings, count),
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
    )
    return _in_float32(optax.chain(*steps))
