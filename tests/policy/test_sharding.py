"""Sharding rules, and the decoder on a mesh of eight devices against one."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.model import init_params, token_logp
from seal_jax.policy.sharding import batch_sharding, check_batch, make_mesh, param_shardings, param_spec, shard_params

CONFIG = PolicyConfig.tiny(29, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24)
needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (forced) devices")


def batch() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    prompt_len, suffix_len = rng.integers(1, 10, 4), rng.integers(2, 13, (4, 2))
    prompt, suffix = rng.integers(0, 29, (4, 9)), rng.integers(0, 29, (4, 2, 12))
    return tuple(x.astype(np.int32) for x in (prompt, prompt_len, suffix, suffix_len))


def test_specs_come_from_names():
    assert param_spec("q_ldnh") == PartitionSpec(None, "fsdp", "tensor", None)
    assert param_spec("o_lnhd") == PartitionSpec(None, "tensor", None, "fsdp")
    assert param_spec("embed_vd") == PartitionSpec("tensor", "fsdp")
    assert param_spec("q_norm_lh") == PartitionSpec(None, None)


@needs_eight
def test_params_are_born_sharded_with_the_same_values():
    mesh = make_mesh((2, 2, 2))
    born, whole = init_params(CONFIG, 5, mesh), init_params(CONFIG, 5)
    jax.tree.map(np.testing.assert_array_equal, born, whole)
    q = born["layers"]["q_ldnh"]
    assert q.sharding.spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert q.addressable_shards[0].data.shape == (2, 8, 2, 4)
    placed = shard_params(CONFIG, whole, mesh)
    assert jax.tree.map(lambda x: x.sharding, placed) == jax.tree.map(lambda x: x.sharding, born)


@needs_eight
def test_token_logp_on_a_mesh_equals_one_device():
    params = init_params(CONFIG, 0)
    weight = np.random.default_rng(1).normal(size=(4, 2, 12)).astype(np.float32)

    @jax.jit
    def step(params, *arrays):
        def loss(params):
            logp = token_logp(CONFIG, params, *arrays)
            return (logp * weight).sum(), logp

        return jax.grad(loss, has_aux=True)(params)

    gradient, logp = step(params, *batch())
    mesh = make_mesh((2, 2, 2))
    sharded_gradient, sharded_logp = step(
        shard_params(CONFIG, params, mesh), *jax.device_put(batch(), batch_sharding(mesh))
    )
    np.testing.assert_allclose(sharded_logp, logp, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), sharded_gradient, gradient)


@needs_eight
def test_what_cannot_be_split_is_named_before_compiling():
    mesh = make_mesh((1, 2, 4))
    with pytest.raises(ValueError, match=r"layers/k_ldkh: dimension k=2 is not divisible by mesh axis tensor=4"):
        param_shardings(CONFIG, mesh)
    with pytest.raises(ValueError, match="embed_vd: dimension d=18 is not divisible by mesh axis fsdp=4"):
        init_params(dataclasses.replace(CONFIG, d_model=18), 0, make_mesh((1, 4, 1)))
    with pytest.raises(ValueError, match="batch=4 groups is not divisible by data"):
        check_batch(4, make_mesh((8, 1, 1)))


def test_meshes():
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert make_mesh((-1, 1, 1)).shape["data"] == jax.device_count()
    with pytest.raises(ValueError, match="needs 4096 devices"):
        make_mesh((4096, 1, 1))
    with pytest.raises(ValueError, match="not three positive sizes"):
        make_mesh((1, 1))
    with pytest.raises(ValueError, match="not three positive sizes"):
        make_mesh((-1, -1, 1))
