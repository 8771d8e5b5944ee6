"""Adapters: at first nothing, then the same as merged weights, in every way that a policy is used."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file

from seal_jax.policy.config import ADAPTERS, PolicyConfig, param_shapes
from seal_jax.policy.hf import load_hf, save_hf
from seal_jax.policy.lora import add_adapters, fresh_adapters, is_adapter, merge, split, stored_dtype
from seal_jax.policy.model import full_logits, init_params, token_logp
from seal_jax.policy.sharding import make_mesh, param_spec, shard_params
from seal_jax.rollout.engine import RolloutEngine

# heads that do not fill the width, a rank that no mesh axis divides
PLAIN = PolicyConfig.tiny(29, d_model=20, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24)
CONFIG = dataclasses.replace(PLAIN, lora_rank=3, lora_alpha=6.0)
BASE = init_params(PLAIN, 0)


def trained(config: PolicyConfig = CONFIG, seed: int = 1) -> dict:
    """BASE with adapters as after a training: none of them is zero."""
    layers, rng = dict(BASE["layers"]), np.random.default_rng(seed)
    for name, shape in param_shapes(config)["layers"].items():
        if is_adapter(name):
            layers[name] = jnp.asarray(rng.normal(0.0, 0.3, shape), jnp.float32)
    return {**BASE, "layers": layers}


def batch() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    prompt_len, suffix_len = rng.integers(1, 10, 4), rng.integers(2, 13, (4, 2))
    prompt, suffix = rng.integers(0, 29, (4, 9)), rng.integers(0, 29, (4, 2, 12))
    return tuple(x.astype(np.int32) for x in (prompt, prompt_len, suffix, suffix_len))


WEIGHT = np.random.default_rng(1).normal(size=(4, 2, 12)).astype(np.float32)
LOGP = jax.jit(token_logp, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def with_gradient(logp, base, adapters, *arrays):
    """The gradient of a weighted sum of log-probs with respect to the adapters, and the log-probs."""

    def loss(adapters):
        out = logp({**base, "layers": base["layers"] | adapters["layers"]}, *arrays)
        return (out * WEIGHT).sum(), out

    return jax.grad(loss, has_aux=True)(adapters)


def with_adapters(params, *arrays):
    return token_logp(CONFIG, params, *arrays)


def with_merged_weights(params, *arrays):
    return token_logp(*merge(CONFIG, params), *arrays)


def test_names_shapes_and_shardings():
    layers = param_shapes(CONFIG)["layers"]
    adapters = {name: shape for name, shape in layers.items() if is_adapter(name)}
    assert layers.keys() - adapters.keys() == param_shapes(PLAIN)["layers"].keys() and len(adapters) == 14
    for name, pair in ADAPTERS.items():
        assert name in layers
        first, second = (adapters[n] for n in pair)
        assert (first[0], *first[1:-1], *second[2:]) == layers[name] and first[-1] == second[1] == 3
    assert param_spec("q_lora_in_lda") == PartitionSpec(None, "fsdp", None)
    assert param_spec("o_lora_in_lnha") == PartitionSpec(None, "tensor", None, None)
    assert param_spec("gate_lora_out_laf") == PartitionSpec(None, None, "tensor")


def test_a_fresh_policy_is_the_base():
    """Also: a seed gives the base that it gives without adapters, and adapters do not depend on how they came."""
    born = init_params(CONFIG, 0)
    base, adapters = split(born)
    jax.tree.map(np.testing.assert_array_equal, base, BASE)
    assert all((np.asarray(x) != 0).any() == ("_in_" in name) for name, x in adapters["layers"].items())
    config, added = add_adapters(PLAIN, BASE, rank=3, alpha=6.0, seed=5)
    assert config == CONFIG
    for params in (born, added):
        np.testing.assert_array_equal(LOGP(CONFIG, params, *batch()), LOGP(PLAIN, BASE, *batch()))
    deviation = np.std(added["layers"]["down_lora_in_lfa"]) * np.sqrt(24)
    assert 0.7 < deviation < 1.3  # 144 draws of 1/sqrt(fan-in)


def test_adapters_equal_merged_weights_value_and_gradient():
    base, adapters = split(trained())
    gradient, logp = with_gradient(with_adapters, base, adapters, *batch())
    expected_gradient, expected = with_gradient(with_merged_weights, base, adapters, *batch())
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    assert np.abs(logp - LOGP(PLAIN, BASE, *batch())).max() > 0.1  # they do something
    for name, got in gradient["layers"].items():
        want = np.asarray(expected_gradient["layers"][name])
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max(), rtol=1e-4, err_msg=name)
        assert np.abs(want).max() > 1e-3


@pytest.mark.slow
def test_greedy_rollouts_equal_those_of_merged_weights():
    prompts = [[3, 1, 4, 1, 5, 9], [2, 6, 5]]
    new = {(b, g): [7 + b, 8 + g] for b in range(2) for g in range(2)}

    def play(engine, params):
        session = engine.start(params, prompts, 2)
        acts = [session.act(new, temperature=0.0, keys=dict.fromkeys(new, 0)) for _ in range(2)]
        return [{row: sampled.ids for row, sampled in act.items()} for act in acts]

    def engine(config, unroll):
        sizes = {"prompt_buckets": (8,), "suffix_buckets": (32,), "chunk_buckets": (4,), "group_buckets": (2,)}
        return RolloutEngine(config, stop_ids=(28,), max_new_tokens=12, unroll=unroll, **sizes)

    config, whole = merge(CONFIG, trained())
    without = engine(config, unroll=True)
    expected = play(without, whole)
    assert play(engine(CONFIG, unroll=True), trained()) == expected
    assert play(engine(CONFIG, unroll=False), trained()) == expected
    assert play(without, BASE) != expected


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (forced) devices")
def test_adapters_are_born_and_merged_on_a_mesh():
    """(The update on a mesh: tests/learner/test_lora_update.py.)"""
    sharded = shard_params(CONFIG, trained(), make_mesh((2, 2, 2)))
    whole = merge(CONFIG, sharded)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, merge(CONFIG, trained())[1])
    born = fresh_adapters(CONFIG, 3, {n: x.sharding for n, x in sharded["layers"].items()})
    assert all(x.sharding == sharded["layers"][name].sharding for name, x in born.items())
    jax.tree.map(np.testing.assert_array_equal, born, fresh_adapters(CONFIG, 3))


def test_a_loaded_base_is_kept_in_the_compute_dtype_and_computes_the_same(tmp_path):
    save_hf(tmp_path / "m", PLAIN, BASE)
    half = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    config, params = load_hf(tmp_path / "m", compute_dtype="bfloat16", lora_rank=3, lora_alpha=6.0, seed=5)
    assert dataclasses.replace(config, max_position=half.max_position) == half
    base, adapters = split(params)
    for name, x in [*base.items(), *base["layers"].items(), *adapters["layers"].items()]:
        if name != "layers":
            kept = "float32" if "_norm_" in name or "_bias_" in name or "_lora_" in name else "bfloat16"
            assert x.dtype == kept == stored_dtype(config, name), name
    masters = {**BASE, "layers": BASE["layers"] | adapters["layers"]}
    np.testing.assert_array_equal(LOGP(config, params, *batch()), LOGP(config, masters, *batch()))
    again = load_hf(tmp_path / "m", compute_dtype="bfloat16", lora_rank=3, lora_alpha=6.0, seed=5)[1]
    jax.tree.map(np.testing.assert_array_equal, params, again)
    other = load_hf(tmp_path / "m", lora_rank=3, seed=6)[1]
    assert (other["layers"]["q_lora_in_lda"] != params["layers"]["q_lora_in_lda"]).any()


def test_an_export_is_merged_in_float32(tmp_path):
    save_hf(tmp_path / "ours", CONFIG, trained())
    save_hf(tmp_path / "merged", *merge(CONFIG, trained()))
    ours, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "merged"))
    assert ours.keys() == merged.keys() and not any("lora" in name for name in ours)
    for name, value in merged.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
    config, params = load_hf(tmp_path / "ours")
    np.testing.assert_allclose(LOGP(config, params, *batch()), LOGP(CONFIG, trained(), *batch()), atol=1e-5)

    half = {
        **trained(),
        "layers": {n: x if is_adapter(n) else x.astype(jnp.bfloat16) for n, x in trained()["layers"].items()},
    }
    save_hf(tmp_path / "half", dataclasses.replace(CONFIG, compute_dtype="bfloat16"), half)
    layer, name = BASE["layers"], "model.layers.1.mlp.up_proj.weight"
    want = layer["up_ldf"].astype(jnp.bfloat16).astype(jnp.float32)[1]
    want += 2.0 * half["layers"]["up_lora_in_lda"][1] @ half["layers"]["up_lora_out_laf"][1]
    np.testing.assert_allclose(load_file(tmp_path / "half" / "model.safetensors")[name].T, want, atol=1e-6)


def test_transformers_computes_the_same_with_an_export(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    save_hf(tmp_path / "out", CONFIG, trained())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    ids = np.random.default_rng(0).integers(0, 29, (1, 20), dtype=np.int32)
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(ids).long()).logits.numpy()
    ours = jax.jit(full_logits, static_argnums=0)(CONFIG, trained(), ids, np.asarray([20], np.int32))
    np.testing.assert_allclose(ours[..., :29], expected, atol=1e-4, rtol=0)


def test_bad_settings():
    for changes, message in (
        ({"lora_rank": -1}, "policy.lora_rank=-1 must be a whole number"),
        ({"lora_rank": 2.5}, "policy.lora_rank=2.5 must be a whole number"),
        ({"lora_alpha": 0.0}, "policy.lora_alpha=0.0 must be a number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(PLAIN, **changes)
