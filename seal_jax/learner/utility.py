"""The failure utility rho: fixed per label, or the reference release's dynamic tag weights (host side, numpy)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from seal_jax.types import EXCLUDED_LABELS, LABEL_ID, LABELS

#: arXiv 2605.24426, Table 6.
PAPER_UTILITY: Mapping[str, float] = {
    "spurious_tool_call": 2.0,
    "correct_abstention": 1.8,
    "missing_tool_call": 1.5,
    "state_mismatch": 1.0,
    "response_mismatch": 0.9,
    "pass": 1.0,
}
#: Labels of the paper's Table 5 that Table 6 gives no value for: our choice, on the same scale.
OUR_UTILITY: Mapping[str, float] = {
    "invalid_tool_call": 2.0,
    "argument_mismatch": 1.5,
    "recovery_failure": 1.0,
}
#: Base weights of the reference release's tags under our labels: the paper's own table; a tag it does not know weighs
#: 1. Its `instance_mismatch` (0.6) can never be given and has no label here.
RELEASE_UTILITY = PAPER_UTILITY


def utility_vector(overrides: Mapping[str, float] | None = None) -> np.ndarray:
    """[Z] float32 rho over `LABELS`: the paper's values, ours where it has none; 1 (unused) for excluded labels."""
    return _vector({**PAPER_UTILITY, **OUR_UTILITY, **(overrides or {})}, "config.loss.utility")


def _vector(values: Mapping[str, float], what: str) -> np.ndarray:
    for label, value in values.items():
        if label not in LABEL_ID:
            raise ValueError(f"{what}[{label!r}]: no such label; choose from {LABELS}")
        if not np.isfinite(value) or value < 0:
            raise ValueError(f"{what}[{label!r}]={value} must be finite and not negative")
    return np.array([values.get(label, 1.0) for label in LABELS], np.float32)


@dataclass(frozen=True)
class DynamicWeights:
    """Dynamic tag weights of the reference release: an EMA towards base weights raised for common, unsolved tags.

    For tag t with base weight w_t, c_t of all N counted tags, and mean trajectory reward r_t over its occurrences:
      target_t = clip(w_t * (1 + alpha * c_t/N * (1 - r_t) * min(1, c_t/confidence)), w_min, w_max); w_t for "pass"
      weight_t <- (1 - beta) * weight_t + beta * target_t, starting at w_t
    Counts are those since the last `new_window`. A configured 0 means 0 (the release replaces it by its default);
    `confidence=0` trusts every count. Immutable: `observe` returns the next state.
    """

    alpha: float = 1.0
    beta: float = 0.25
    confidence: float = 32.0
    w_min: float = 0.5
    w_max: float = 2.0
    base: tuple[float, ...] = tuple(float(RELEASE_UTILITY.get(label, 1.0)) for label in LABELS)
    weights: tuple[float, ...] = ()  # empty: start at the base
    counts: tuple[int, ...] = (0,) * len(LABELS)
    rewards: tuple[float, ...] = (0.0,) * len(LABELS)  # summed trajectory reward over occurrences

    def __post_init__(self) -> None:
        if not self.weights:
            object.__setattr__(self, "weights", self.base)
        for name in ("base", "weights", "counts", "rewards"):
            if len(getattr(self, name)) != len(LABELS):
                raise ValueError(f"dynamic weights: {name} needs {len(LABELS)} entries, one per label")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"dynamic weights: beta={self.beta} must lie in 0..1")

    def observe(self, labels: Sequence[Sequence[str]], rewards: Sequence[float]) -> DynamicWeights:
        """One update after a batch: `labels[j]` are the turn labels of trajectory j, `rewards[j]` its reward."""
        if len(labels) != len(rewards):
            raise ValueError(f"dynamic weights: {len(labels)} label lists for {len(rewards)} rewards")
        counts, sums = np.array(self.counts), np.array(self.rewards, np.float64)
        for names, reward in zip(labels, rewards, strict=True):
            for name in names:
                if name not in EXCLUDED_LABELS:
                    counts[LABEL_ID[name]] += 1
                    sums[LABEL_ID[name]] += reward
        base = np.array(self.base)
        stagnation = np.where(counts > 0, 1.0 - sums / np.maximum(counts, 1), 0.0)
        trust = np.minimum(1.0, counts / self.confidence) if self.confidence > 0 else np.ones(len(LABELS))
        target = base * (1.0 + self.alpha * counts / max(counts.sum(), 1) * stagnation * trust)
        target[LABEL_ID["pass"]] = base[LABEL_ID["pass"]]
        for label in EXCLUDED_LABELS:
            target[LABEL_ID[label]] = 1.0
        target = np.clip(target, self.w_min, self.w_max)
        weights = (1.0 - self.beta) * np.array(self.weights) + self.beta * target
        return replace(
            self,
            weights=tuple(float(x) for x in weights),
            counts=tuple(int(x) for x in counts),
            rewards=tuple(float(x) for x in sums),
        )

    def new_window(self) -> DynamicWeights:
        """Forgets the counts (the release does so every epoch); the weights stay."""
        return replace(self, counts=(0,) * len(LABELS), rewards=(0.0,) * len(LABELS))

    def vector(self) -> np.ndarray:
        """[Z] float32 for `seal_loss`."""
        return np.array(self.weights, np.float32)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; per-label entries are keyed by label so that a file stays readable."""
        out = asdict(self)
        for name in ("base", "weights", "counts", "rewards"):
            out[name] = dict(zip(LABELS, out[name], strict=True))
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DynamicWeights:
        fields = dict(data)
        for name in ("base", "weights", "counts", "rewards"):
            missing = [label for label in LABELS if label not in fields[name]]
            if missing:
                raise ValueError(f"dynamic weights: {name} has no entry for {missing[0]!r}")
            fields[name] = tuple(fields[name][label] for label in LABELS)
        return cls(**fields)
