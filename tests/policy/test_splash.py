"""The fused TPU kernel against the blockwise attention, in Pallas's interpreter."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from seal_jax.policy import splash
from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.model import init_params, prefill, token_logp
from seal_jax.policy.splash import GroupMask, block_size

BLOCKWISE = PolicyConfig.tiny(29, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48)
SPLASH = dataclasses.replace(BLOCKWISE, attention="splash")
PARAMS = init_params(BLOCKWISE, 3)
P, S = 128, 128


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel runs on a CPU."""
    make = functools.partial(splash.splash.make_splash_mqa_single_device, interpret=True)
    monkeypatch.setattr(splash.splash, "make_splash_mqa_single_device", make)
    splash._kernel.cache_clear()
    yield
    splash._kernel.cache_clear()


def batch() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    lengths = np.asarray([128, 37], np.int32), np.asarray([[128, 1, 60], [2, 99, 128]], np.int32)
    prompt, suffix = (rng.integers(0, 29, shape).astype(np.int32) for shape in ((2, P), (2, 3, S)))
    return prompt, lengths[0], suffix, lengths[1]


@functools.lru_cache
def value_and_gradient(config: PolicyConfig):
    weight = np.random.default_rng(1).normal(size=(2, 3, S)).astype(np.float32)

    def loss(params):
        logp = token_logp(config, params, *batch())
        return (logp * weight).sum(), logp

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    with jax.transfer_guard("disallow"):  # as in an update, in which the kernel is first asked for
        (_, logp), gradient = step(PARAMS)
    return logp, gradient


def test_the_mask_is_prompt_and_own_row():
    mask = GroupMask(prompt=2, rows=2, length=3)
    expected = ["10000000", "11000000", "11100000", "11110000", "11111000", "11000100", "11000110", "11000111"]
    whole = mask[slice(None), slice(None)]
    assert ["".join("01"[int(x)] for x in row) for row in whole] == expected
    np.testing.assert_array_equal(mask[slice(3, 7), slice(1, 6)], whole[3:7, 1:6])  # in pieces as the whole


def test_fused_equals_blockwise_value_and_gradient(interpreted):
    logp, gradient = value_and_gradient(SPLASH)
    expected, expected_gradient = value_and_gradient(BLOCKWISE)
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max())


def test_fused_prefill_gives_the_same_cache(interpreted):
    prompt, length, *_ = batch()
    cache = jax.jit(prefill, static_argnums=0)(SPLASH, PARAMS, prompt, length)
    expected = jax.jit(prefill, static_argnums=0)(BLOCKWISE, PARAMS, prompt, length)
    real_bp = np.arange(P) < length[:, None]
    for x, y in zip(cache, expected, strict=True):
        real = np.broadcast_to(
            real_bp[None, :, None, None, :] if x is cache.keys else real_bp[:, None, :, None], x.shape
        )
        np.testing.assert_allclose(np.where(real, x, 0), np.where(real, y, 0), atol=1e-5)


def test_lengths_that_do_not_fit_the_kernel_are_refused():
    assert block_size(5120, 1536) == 512 and block_size(1280, 384) == 128
    with pytest.raises(ValueError, match=r"multiples of 128 tokens, not 192 and 384; set config\.buckets"):
        block_size(192, 384)
