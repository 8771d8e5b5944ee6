"""A wired start looks where it should and copies better than a random one, before any training."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.copying import wire_for_copying
from seal_jax.policy.model import Decoder, full_logits, init_params, rope_inverse_frequencies

CONFIG = PolicyConfig.tiny(600)
RANDOM = init_params(CONFIG, 0)
WIRED = wire_for_copying(CONFIG, RANDOM, seed=0)


@pytest.mark.parametrize("head", [0, 1])
def test_the_first_layer_looks_one_and_two_tokens_back(head):
    half = CONFIG.head_dim // 2
    query, key = (np.asarray(WIRED["layers"][name][0, head], np.float64) for name in ("q_bias_lnh", "k_bias_lkh"))
    query, key = query[:half] + 1j * query[half:], key[:half] + 1j * key[half:]
    distance = np.arange(300)
    turned = np.exp(1j * distance[:, None] * rope_inverse_frequencies(CONFIG))  # RoPE sees only the distance
    score = (turned * query * key.conj()).real.sum(-1) / np.sqrt(CONFIG.head_dim)
    share = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
    assert share.argmax() == head + 1
    assert share[head + 1] > 0.8


@pytest.mark.parametrize(("head", "back"), [(0, 1), (1, 2)])
def test_the_second_layer_finds_what_followed_the_present_token(monkeypatch, head, back):
    period = 50
    ids = np.tile(np.random.default_rng(1).permutation(600)[:period], 2)
    seen = []
    attend = Decoder.row_attention

    def watched(self, q, k, v, rows, pasts=()):
        seen.append((np.asarray(q[0]), np.asarray(k[0])))
        return attend(self, q, k, v, rows, pasts)

    monkeypatch.setattr(Decoder, "row_attention", watched)
    with jax.disable_jit():  # so that the arrays are at hand
        full_logits(CONFIG, WIRED, jnp.asarray(ids)[None], jnp.asarray([2 * period]))
    q, k = (x[:, head] for x in seen[1])
    score = q @ k.T / np.sqrt(CONFIG.head_dim)
    score[np.triu_indices(2 * period, 1)] = -np.inf
    share = np.exp(score - score.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    at = np.arange(period + 5, 2 * period)
    by_distance = [share[at, at - d].mean() for d in range(period)]
    assert np.argmax(by_distance) == period - back
    assert by_distance[period - back] > 10 / period


def test_shapes_dtypes_and_shardings_stay():
    for old, new in zip(jax.tree.leaves(RANDOM), jax.tree.leaves(WIRED), strict=True):
        assert (old.shape, old.dtype, old.sharding) == (new.shape, new.dtype, new.sharding)


@pytest.mark.parametrize("change", [{"n_kv_heads": 2}, {"qkv_bias": False}, {"tied": False}, {"n_layers": 1}])
def test_a_shape_without_room_is_refused(change):
    config = PolicyConfig.tiny(600, **change)
    with pytest.raises(ValueError, match="wired copying needs"):
        wire_for_copying(config, init_params(config, 0), seed=0)
