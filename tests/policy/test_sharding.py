"""Sharding rules: what lies where, and what is refused. (An update on a mesh: tests/learner/test_sharded_update.py.)"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from seal_jax.policy.config import PolicyConfig
from seal_jax.policy.model import init_params
from seal_jax.policy.sharding import (
    check_batch,
    constrain,
    gather_layer,
    gathers,
    make_mesh,
    param_shardings,
    param_spec,
    shard_params,
    vocab_parts,
)

CONFIG = PolicyConfig.tiny(29, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24)
needs_eight = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (forced) devices")


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
def test_few_key_value_heads_are_copied_and_query_heads_are_not():
    where = param_shardings(CONFIG, make_mesh((1, 2, 4)))["layers"]  # 2 key/value heads, tensor = 4
    assert where["k_ldkh"].spec == PartitionSpec(None, "fsdp", None, None)
    assert where["v_bias_lkh"].spec == PartitionSpec(None, None, None)
    assert where["q_ldnh"].spec == PartitionSpec(None, "fsdp", "tensor", None)


@needs_eight
def test_a_vocabulary_is_padded_to_what_the_mesh_splits():
    mesh = make_mesh((1, 2, 2))
    odd = dataclasses.replace(CONFIG, padded_vocab=29)
    with pytest.raises(
        ValueError, match=r"embed_vd: dimension v=29 .* tensor=2; .*config.policy.overrides.padded_vocab"
    ):
        param_shardings(odd, mesh)
    assert vocab_parts(mesh) == 4 and vocab_parts(None) == 1
    padded = odd.padded_to(vocab_parts(mesh))
    assert (padded.vocab_size, padded.padded_vocab) == (29, 32) and padded.padded_to(4) == padded
    assert param_shardings(padded, mesh)["embed_vd"].spec == PartitionSpec("tensor", "fsdp")


def test_outside_of_a_mesh_nothing_is_constrained():
    x = np.ones(3)
    assert constrain(x, "data") is x and gather_layer(CONFIG, {"q_ldnh": x})["q_ldnh"] is x and not gathers()


@needs_eight
def test_what_cannot_be_split_is_named_before_compiling():
    three = dataclasses.replace(CONFIG, n_heads=6, n_kv_heads=3)
    with pytest.raises(ValueError, match=r"layers/k_ldkh: dimension k=3 is not divisible by mesh axis tensor=2"):
        param_shardings(three, make_mesh((1, 2, 2)))
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
