"""Metrics that travel unreduced: a sum with its denominator, or a maximum; divided once, at the very end.

A mean of per-micro-batch means depends on how a batch was split; a sum over a count does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flax import struct


@struct.dataclass
class Mean:
    """`total / count`; both float32 scalars (or Python floats on the host)."""

    total: Any
    count: Any

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        """The mean, or 0.0 when nothing was counted."""
        count = float(self.count)
        return float(self.total) / count if count > 0 else 0.0


@struct.dataclass
class Max:
    """The largest value seen; 0.0 or above by use (ratios, absolute differences)."""

    largest: Any

    def merge(self, other: Max) -> Max:
        return Max(np.maximum(self.largest, other.largest))

    def value(self) -> float:
        return float(self.largest)


Metrics = Mapping[str, Mean | Max]


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Mean | Max]:
    """Merges host-side metrics of several micro-batches by name (in double precision)."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, metric in part.items():
            exact: dict[str, Any] = {k: np.float64(v) for k, v in vars(metric).items()}
            metric = replace(metric, **exact)
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def metric_values(metrics: Metrics) -> dict[str, float]:
    return {name: metric.value() for name, metric in metrics.items()}
