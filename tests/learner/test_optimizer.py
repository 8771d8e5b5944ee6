"""AdamW in float32, the schedule, the clip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from seal_jax.learner.optimizer import OptimizerSettings, learning_rate, make_optimizer


def test_small_steps_reach_the_master():
    """AReaL#1292: weight 1.0 and 1000 steps of 1e-6 fall by about 1e-3 in float32; in bfloat16 nothing moves."""
    tx = make_optimizer(OptimizerSettings(learning_rate=1e-6, weight_decay=0.0, clip_norm=0.0))

    def run(dtype):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jnp.ones((), dtype), state, params)
            return (optax.apply_updates(params, updates), state), None

        params = jnp.ones((), dtype)
        return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, 1000)[0][0])(params)

    fallen = run(jnp.float32)
    assert fallen.dtype == jnp.float32 and 0.9e-3 < 1 - float(fallen) < 1.1e-3
    assert float(run(jnp.bfloat16)) == 1.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_type_of_the_learning_rate_changes_nothing(dtype):
    """optax#1405: a Python float, a jax scalar and a numpy scalar give the same dtypes and never retrace."""
    params = {"w": jnp.ones((3,), dtype)}
    results = []
    for rate in (0.1, jnp.float32(0.1), np.float64(0.1)):
        tx = make_optimizer(OptimizerSettings(learning_rate=rate))
        state, traces = tx.init(params), 0

        @jax.jit
        def step(params, state, tx=tx):
            nonlocal traces
            traces += 1
            updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
            return optax.apply_updates(params, updates), state

        before = jax.tree.map(lambda x: (x.dtype, x.weak_type), (params, state))
        new, after = step(params, state)
        new, after = step(new, after)
        assert jax.tree.map(lambda x: (x.dtype, x.weak_type), (new, after)) == before and traces == 1
        results.append(np.asarray(new["w"], np.float32))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    floats = [x for x in jax.tree.leaves(make_optimizer(OptimizerSettings()).init(params)) if x.ndim]
    assert floats and all(x.dtype == jnp.float32 for x in floats)


def test_global_norm_clip():
    """Adam hides the scale of one gradient, not the ratio of two: clipping [30, 40] to norm 1 leaves [0.6, 0.8]."""
    tx = make_optimizer(OptimizerSettings(clip_norm=1.0, weight_decay=0.0))
    params = {"w": jnp.zeros(2)}
    _, state = tx.update({"w": jnp.array([30.0, 40.0])}, tx.init(params), params)
    moment = [x for x in jax.tree.leaves(state) if x.shape == (2,)][0]
    np.testing.assert_allclose(moment, 0.1 * np.array([0.6, 0.8]), atol=1e-6)


def test_schedule():
    s = OptimizerSettings(learning_rate=1.0, schedule="cosine", warmup_steps=4, total_steps=14, final_fraction=0.1)
    rates = [float(learning_rate(s, i)) for i in range(16)]
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], atol=1e-6)
    np.testing.assert_allclose([rates[9], rates[14], rates[15]], [0.55, 0.1, 0.1], atol=1e-6)
    np.testing.assert_allclose(float(jax.jit(lambda i: learning_rate(s, i))(9)), 0.55, atol=1e-6)
    assert float(learning_rate(OptimizerSettings(), 10**6)) == np.float32(1e-6)


def test_bad_settings():
    with pytest.raises(ValueError, match="optimizer.learning_rate"):
        OptimizerSettings(learning_rate=float("nan"))
    with pytest.raises(ValueError, match="warmup_steps=0 leaves nothing of a cosine over all 0 steps"):
        OptimizerSettings(schedule="cosine")
    with pytest.raises(ValueError, match="schedule='linear'"):
        OptimizerSettings(schedule="linear")
