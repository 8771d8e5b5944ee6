"""The update of a policy with adapters: what it changes, what it keeps, what it saves; with a real decoder."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seal_jax.checkpoints import Checkpoints
from seal_jax.learner.batch import Buckets, make_batch
from seal_jax.learner.loss import LossSettings
from seal_jax.learner.optimizer import OptimizerSettings
from seal_jax.learner.update import Learner, UpdateSettings
from seal_jax.policy.config import PolicyConfig, is_adapter
from seal_jax.policy.lora import split
from seal_jax.policy.model import init_params, token_logp
from seal_jax.policy.sharding import make_mesh, shard_params

from .toys import VOCAB, diagnosis, simple

BUCKETS = Buckets(prompt=(4,), suffix=(16,), turns=2)
PLAIN = PolicyConfig.tiny(VOCAB, d_model=16, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24)
CONFIG = dataclasses.replace(PLAIN, lora_rank=3, lora_alpha=6.0)
PARAMS = jax.device_get(init_params(CONFIG, 0))


def learner(config=CONFIG, mesh=None, params=PARAMS, **options) -> Learner:
    params = jax.tree.map(jnp.array, params)  # the learner takes them over
    return Learner(
        config,
        params if mesh is None else shard_params(config, params, mesh),
        buckets=BUCKETS,
        loss=LossSettings(reweight="none", kl_coef=0.05),
        optimizer=OptimizerSettings(learning_rate=1.0, eps=1.0, clip_norm=0.0),  # steps follow the gradient
        update=UpdateSettings(minibatches=1, prompts_per_micro=4),
        mesh=mesh,
        **options,
    )


def some_batch():
    groups = [
        [simple(5 + g, task=f"t{b}", rollout=g, seed=10 * b + g, prompt=range(1, 2 + b)) for g in range(2)]
        for b in range(4)
    ]
    return make_batch(groups, [[1.0, 0.0]] * 4, [[diagnosis("pass")] * 2] * 4, buckets=BUCKETS)


def margin(one: Learner, batch) -> float:
    """How much likelier the rewarded rows are than their siblings."""
    logp_bg = one.score(one.params, batch).sum(-1)
    return float((logp_bg[:, 0] - logp_bg[:, 1]).sum())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six rounds on one batch, saved after the second."""
    folder, batch, one = tmp_path_factory.mktemp("lora") / "c", some_batch(), learner()
    margins, metrics = [margin(one, batch)], []
    with Checkpoints(folder) as checkpoints:
        for t in range(6):
            metrics.append(one.update(batch, round=t))
            margins.append(margin(one, batch))
            if t == 1:
                checkpoints.save(2, one.state, {})
    return folder, batch, one, margins, metrics


def test_only_the_adapters_learn_and_they_do(run):
    _, _, one, margins, metrics = run
    base, adapters = split(jax.device_get(one.params))
    jax.tree.map(np.testing.assert_array_equal, base, split(PARAMS)[0])
    for name, value in adapters["layers"].items():
        assert (value != PARAMS["layers"][name]).any(), name
    assert margins[-1] - margins[0] > 1.0 and margins == sorted(margins)
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(one.state.params)}
    assert len(names) == 14 and all(map(is_adapter, names))
    assert one.compilations == {"score": 1, "zeros": 1, "mass": 0, "accumulate": 1, "norm": 1, "apply": 1}
    assert metrics[-1]["compilations"] == metrics[0]["compilations"] == 5


def test_the_reference_is_the_base_and_no_copy_of_it(run):
    _, batch, one, _, metrics = run
    arrays = (batch.prompt_ids_bp, batch.prompt_len_b, batch.suffix_ids_bgs, batch.suffix_len_bg)
    expected = jax.jit(token_logp, static_argnums=0)(PLAIN, split(PARAMS)[0], *arrays)
    got = one.score(one.reference, batch)
    np.testing.assert_allclose(got, np.where(batch.loss_mask_bgs, expected, 0.0), atol=1e-6)
    assert one.reference["layers"]["q_ldnh"] is one.base["layers"]["q_ldnh"]
    assert metrics[0]["loss/kl"] == 0.0 < metrics[1]["loss/kl"] < metrics[-1]["loss/kl"]


def test_a_resumed_run_is_the_uninterrupted_one(run):
    folder, batch, one, *_ = run
    again = learner()
    again.programs = one.programs  # made from settings and shardings alone: nothing compiles anew
    with Checkpoints(folder) as checkpoints:
        saved = checkpoints._read_host(2)["leaves"]
        again.state, _ = checkpoints.restore(again.state)
    arrays = [name for name, shape in saved.items() if not shape.endswith("[]")]
    assert len(arrays) == 3 * 14 and all("_lora_" in name for name in arrays)  # parameters and two moments
    for t in range(2, 6):
        again.update(batch, round=t)
    jax.tree.map(np.testing.assert_array_equal, again.state, one.state)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (forced) devices")
def test_an_update_on_a_mesh_equals_one_device(run):
    folder, batch, single, _, metrics = run
    one = learner(mesh=make_mesh((2, 2, 2)))
    for t in range(2):
        on_mesh = one.update(batch, round=t)
        for name in ("loss/total", "loss/kl", "norm/gradient"):
            np.testing.assert_allclose(on_mesh[name], metrics[t][name], atol=1e-5)
    with Checkpoints(folder) as checkpoints:
        expected, _ = checkpoints.restore(single.state)
        onto_mesh, _ = checkpoints.restore(one.state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), one.state, expected)
    jax.tree.map(np.testing.assert_array_equal, onto_mesh, expected)
    assert jax.tree.map(lambda x: x.sharding, onto_mesh) == jax.tree.map(lambda x: x.sharding, one.state)
    shapes = {n: x.addressable_shards[0].data.shape for n, x in one.params["layers"].items()}
    assert shapes["gate_lora_in_lda"] == (1, 8, 3) and shapes["gate_lora_out_laf"] == (1, 3, 12)
    assert shapes["q_ldnh"] == (1, 8, 2, 4)


def test_the_base_is_kept_in_the_compute_dtype_and_only_adapters_must_be_float32():
    half = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    one = learner(half, frozen=True)
    assert one.base["layers"]["q_ldnh"].dtype == one.base["embed_vd"].dtype == jnp.bfloat16
    assert one.base["layers"]["attn_norm_ld"].dtype == one.base["layers"]["q_bias_lnh"].dtype == jnp.float32
    wrong = {**PARAMS, "layers": {n: x.astype(jnp.bfloat16) for n, x in PARAMS["layers"].items()}}
    with pytest.raises(ValueError, match="layers/down_lora_in_lfa is bfloat16; masters must be float32"):
        learner(half, params=wrong)
