"""The utility vector and the release's dynamic tag weights."""

from __future__ import annotations

import json

import numpy as np
import pytest

from seal_jax.learner.utility import DynamicWeights, utility_vector
from seal_jax.types import LABEL_ID, LABELS


def at(weights: DynamicWeights, label: str) -> float:
    return weights.weights[LABEL_ID[label]]


def example() -> tuple[list[list[str]], list[float]]:
    """64 trajectories of 4 turns: 16 pass everything, 48 fail with one each of state, pass, spurious, empty."""
    bad = ["state_mismatch", "pass", "spurious_tool_call", "missing_tool_call"]
    return [["pass"] * 4] * 16 + [bad] * 48, [1.0] * 16 + [0.0] * 48


def test_static_vector_follows_the_label_order():
    rho = utility_vector()
    assert rho.shape == (len(LABELS),) and rho.dtype == np.float32
    assert rho[LABEL_ID["spurious_tool_call"]] == 2.0 and rho[LABEL_ID["pass"]] == 1.0
    np.testing.assert_allclose(rho[LABEL_ID["response_mismatch"]], 0.9)
    assert utility_vector({"pass": 0.0})[LABEL_ID["pass"]] == 0.0  # a configured zero is a zero
    with pytest.raises(ValueError, match="'passs'.*no such label"):
        utility_vector({"passs": 1.0})


def test_golden_ema():
    labels, rewards = example()
    weights = DynamicWeights().observe(labels, rewards)
    np.testing.assert_allclose(
        [at(weights, "missing_tool_call"), at(weights, "state_mismatch")], [1.570, 1.047], atol=5e-4
    )
    for _ in range(4):
        weights = weights.observe(labels, rewards)
    np.testing.assert_allclose(
        [at(weights, "missing_tool_call"), at(weights, "state_mismatch")], [1.715, 1.143], atol=5e-4
    )
    assert at(weights, "spurious_tool_call") == 2.0  # starts at the ceiling
    assert at(weights, "pass") == 1.0
    np.testing.assert_allclose(weights.vector()[LABEL_ID["state_mismatch"]], 1.143, atol=5e-4)


def test_configured_zeros_are_honoured():
    labels, rewards = example()
    assert DynamicWeights(alpha=0.0).observe(labels, rewards).weights == DynamicWeights().base
    assert DynamicWeights(beta=0.0).observe(labels, rewards).weights == DynamicWeights().base
    few = (labels[-1:], rewards[-1:])  # one occurrence: confidence 1/32, or full trust with confidence 0
    trusting, wary = DynamicWeights(confidence=0.0).observe(*few), DynamicWeights().observe(*few)
    np.testing.assert_allclose(at(trusting, "state_mismatch"), 1 + 0.25 * 0.25)
    np.testing.assert_allclose(at(wary, "state_mismatch"), 1 + 0.25 * 0.25 / 32)


def test_excluded_labels_never_count():
    weights = DynamicWeights().observe([["env_error", "not_reached"]] * 64, [0.0] * 64)
    assert sum(weights.counts) == 0 and weights.weights == DynamicWeights().base


def test_window_and_json_round_trip():
    labels, rewards = example()
    weights = DynamicWeights(alpha=0.5, confidence=0.0).observe(labels, rewards)
    back = DynamicWeights.from_dict(json.loads(json.dumps(weights.to_dict())))
    assert back == weights
    assert back.observe(labels, rewards) == weights.observe(labels, rewards)
    fresh = weights.new_window()
    assert sum(fresh.counts) == 0 and fresh.weights == weights.weights
    data = weights.to_dict()
    del data["counts"]["pass"]
    with pytest.raises(ValueError, match="counts has no entry for 'pass'"):
        DynamicWeights.from_dict(data)
