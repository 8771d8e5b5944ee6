"""The decoder against a plain per-row forward pass, and the details that families are known to differ in."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seal_jax.policy import attention
from seal_jax.policy.config import Llama3Rope, PolicyConfig, param_shapes
from seal_jax.policy.model import (
    KV,
    Decoder,
    _rms_norm,
    extend,
    full_logits,
    init_params,
    prefill,
    rope_inverse_frequencies,
    token_logp,
)

# queries in several blocks, the head in several chunks: the dense computation is the reference below
CONFIG = PolicyConfig.tiny(
    29,
    d_model=24,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=4,
    d_ff=20,
    qk_norm=True,
    attention_budget=600,
    head_chunk=12,
)
DENSE = dataclasses.replace(CONFIG, attention_budget=2**30, head_chunk=2**20)
PARAMS = init_params(CONFIG, 0)
LOGP = jax.jit(token_logp, static_argnums=0)
LOGITS = jax.jit(full_logits, static_argnums=0)

B, G, P, S = 2, 3, 21, 18
PROMPT_LEN = np.asarray([21, 5], np.int32)
SUFFIX_LEN = np.asarray([[18, 1, 7], [2, 18, 11]], np.int32)


def arrays(garbage: int) -> tuple[np.ndarray, ...]:
    """The same ragged batch whatever the garbage in its padding."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 29, (B, P)).astype(np.int32)
    suffix = rng.integers(0, 29, (B, G, S)).astype(np.int32)
    prompt[np.arange(P) >= PROMPT_LEN[:, None]] = garbage
    suffix[np.arange(S) >= SUFFIX_LEN[..., None]] = garbage
    return prompt, PROMPT_LEN, suffix, SUFFIX_LEN


WEIGHT = np.random.default_rng(1).normal(size=(B, G, S)).astype(np.float32)


def naive(config: PolicyConfig, params, temperature=1.0) -> jax.Array:
    """token_logp by repeating each prompt in front of each row, one row at a time, logits in full."""
    prompt, prompt_len, suffix, suffix_len = arrays(0)
    rows = np.zeros((B * G, P + S), np.int32)
    for i in range(B * G):
        b, g = divmod(i, G)
        text = np.concatenate([prompt[b, : prompt_len[b]], suffix[b, g, : suffix_len[b, g]]])
        rows[i, : len(text)] = text
    length = np.repeat(prompt_len, G) + suffix_len.reshape(-1)
    logp = jax.nn.log_softmax(full_logits(config, params, rows, length) / temperature, axis=-1)
    out = jnp.zeros((B, G, S))
    for i in range(B * G):
        b, g = divmod(i, G)
        at = np.arange(1, suffix_len[b, g])
        out = out.at[b, g, at].set(logp[i, prompt_len[b] + at - 1, suffix[b, g, at]])
    return out


def assert_trees_close(a, b, **tolerance) -> None:
    flat, _ = jax.tree_util.tree_flatten_with_path(a)
    for (path, x), y in zip(flat, jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, err_msg=jax.tree_util.keystr(path), **tolerance)


NAIVE = jax.jit(naive, static_argnums=0)


@functools.lru_cache
def step(logp, config: PolicyConfig):
    """args -> (log-probs, gradient of their weighted sum), compiled once per config."""

    def loss(params, *args):
        out = logp(config, params, *args)
        return (out * WEIGHT).sum(), out

    gradient = jax.jit(jax.grad(loss, has_aux=True))
    return lambda *args: gradient(*args)[::-1]


def ours(config: PolicyConfig, garbage: int = 0, temperature: float = 1.0):
    return step(token_logp, config)(PARAMS, *arrays(garbage), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_shared_prompt_equals_repeated_prompt_value_and_gradient(temperature):
    logp, gradient = ours(CONFIG, -5, temperature)
    expected, expected_gradient = step(naive, DENSE)(PARAMS, temperature)
    np.testing.assert_allclose(logp, expected, atol=1e-5)
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * np.abs(y).max(), rtol=0)


def test_padding_changes_nothing_bit_for_bit():
    """Whatever stands in padding: other ids, negative ids, ids beyond any vocabulary."""

    for garbage in (28, -1, 10**6):
        jax.tree.map(np.testing.assert_array_equal, ours(CONFIG), ours(CONFIG, garbage))


def test_first_token_and_padding_are_zero():
    logp = np.asarray(LOGP(CONFIG, PARAMS, *arrays(7)))
    real = np.arange(S) < SUFFIX_LEN[..., None]
    real[..., 0] = False
    assert (logp[~real] == 0.0).all() and (logp[real] < 0.0).all()
    assert logp.dtype == np.float32


def test_keep_mask_selects_without_changing():
    keep = np.random.default_rng(2).random((B, G, S)) < 0.3
    full = np.asarray(LOGP(CONFIG, PARAMS, *arrays(7)))
    kept = np.asarray(LOGP(CONFIG, PARAMS, *arrays(7), 1.0, keep))
    np.testing.assert_array_equal(kept, np.where(keep, full, 0.0))
    assert not np.asarray(LOGP(CONFIG, PARAMS, *arrays(7), 1.0, np.zeros_like(keep))).any()


@pytest.mark.parametrize(
    "change",
    [
        {"remat": "block"},
        {"head_chunk": 10**6, "attention_budget": None},
        {"head_chunk": 1, "attention_budget": 1},
    ],
    ids=str,
)
def test_chunks_blocks_and_remat_change_nothing(change):
    assert_trees_close(ours(dataclasses.replace(CONFIG, **change)), ours(CONFIG), atol=1e-4, rtol=1e-4)


def test_segments_that_skip_hidden_keys_change_nothing(monkeypatch):
    monkeypatch.setattr(attention, "_SEGMENT", 5)  # 21 and 18 tokens: 4 and 3 segments of uneven length
    config = dataclasses.replace(CONFIG, attention_budget=300)
    assert_trees_close(ours(config), ours(CONFIG), atol=1e-4, rtol=1e-4)


def test_no_logits_of_the_whole_batch_and_no_square_of_the_prompt():
    """The compiled gradient of a long prompt stays far below prompt x prompt scores and suffix x vocabulary logits."""
    config = PolicyConfig.tiny(
        4000, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=16, attention_budget=2**17, head_chunk=64,  # noqa: E501
        remat="block",
    )  # fmt: skip
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    i32 = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 2048), (1,), (1, 2, 512), (1, 2))]

    def loss(params, *batch):
        return token_logp(config, params, *batch).sum()

    memory = jax.jit(jax.grad(loss)).lower(shapes, *i32).compile().memory_analysis().temp_size_in_bytes
    scores = 4 * 2048 * 2048 * 4  # heads x P x P in float32: 67 MB
    logits = 2 * 512 * 4032 * 4  # rows x S x V in float32: 16.5 MB
    assert memory < 0.3 * scores and memory < logits


def test_extend_equals_the_full_forward_on_ragged_chunks():
    prompt, prompt_len, suffix, _ = arrays(9)
    cache = prefill(CONFIG, PARAMS, prompt, prompt_len)
    assert cache.keys.shape == (2, B, 2, 4, P) and cache.values.shape == (2, B, 2, P, 4)
    rows = KV(jnp.full((2, B, 2, G, 4, 16), jnp.nan), jnp.full((2, B, 2, G, 16, 4), 1e9))
    rows = jax.tree.map(jnp.nan_to_num, rows)  # an unwritten place may hold anything finite
    lengths = np.zeros((B, G), np.int32)
    step = jax.jit(extend, static_argnums=0)
    for new in ([[4, 1, 3], [2, 4, 0]], [[1, 4, 4], [3, 0, 2]], [[0, 2, 4], [4, 4, 1]]):
        chunk = np.full((B, G, 4), 99, np.int32)
        for b, g in np.ndindex(B, G):
            chunk[b, g, : new[b][g]] = suffix[b, g, lengths[b, g] : lengths[b, g] + new[b][g]] % 29
        before = lengths
        logits, rows, lengths = step(CONFIG, PARAMS, chunk, np.asarray(new, np.int32), cache, prompt_len, rows, lengths)
        np.testing.assert_array_equal(lengths, before + np.asarray(new))
        lengths = np.asarray(lengths)
        text, length = np.zeros((B * G, P + 16), np.int32), prompt_len[:, None] + lengths
        for b, g in np.ndindex(B, G):
            joined = np.concatenate([prompt[b, : prompt_len[b]], suffix[b, g, : lengths[b, g]] % 29])
            text[b * G + g, : len(joined)] = joined
        expected = LOGITS(CONFIG, PARAMS, text, length.reshape(-1))
        for b, g in np.ndindex(B, G):
            if new[b][g]:
                np.testing.assert_allclose(logits[b, g], expected[b * G + g, length[b, g] - 1], atol=1e-4)


def test_short_prompt_is_the_same_beside_a_long_one():
    ids = np.asarray([[3, 4, 5, 0, 0, 0, 0, 0, 0], list(range(10, 19))], np.int32)
    together = LOGITS(CONFIG, PARAMS, ids, np.asarray([3, 9], np.int32))
    alone = LOGITS(CONFIG, PARAMS, ids[:1, :3], np.asarray([3], np.int32))
    np.testing.assert_allclose(together[0, :3, :29], alone[0, :, :29], atol=1e-5)


def test_query_heads_share_keys_by_repeating_not_tiling():
    """Six query heads over two key/value heads: heads 0-2 read the first, 3-5 the second."""
    config = dataclasses.replace(CONFIG, n_layers=1, qk_norm=False, attention_budget=None)
    params = init_params(config, 3)
    layer = {name: np.array(x) for name, x in params["layers"].items()}
    layer["v_ldkh"][:, :, 0] = 1.0
    layer["v_ldkh"][:, :, 1] = 0.0  # the second key/value head carries nothing
    ids, length = np.asarray([[5, 6, 7]], np.int32), np.asarray([3], np.int32)
    outputs = []
    for heads in ([0, 1, 2], [3, 4, 5]):
        o = np.zeros_like(layer["o_lnhd"])
        o[:, heads] = layer["o_lnhd"][:, heads]
        only = {**params, "layers": {**layer, "o_lnhd": o}}
        none = {**params, "layers": {**layer, "o_lnhd": np.zeros_like(o)}}
        change = LOGITS(config, only, ids, length) - LOGITS(config, none, ids, length)
        outputs.append(float(np.abs(change[..., :29]).max()))
    assert outputs[0] > 1e-3 and outputs[1] == 0.0


def test_qk_norm_stands_before_rope():
    """With it, scaling a query head's weights changes nothing; and positions still matter."""
    params = init_params(CONFIG, 3)
    scaled = {**params, "layers": {**params["layers"], "q_ldnh": 7.0 * params["layers"]["q_ldnh"]}}
    ids, length = np.asarray([[5, 6, 7, 8, 9]], np.int32), np.asarray([5], np.int32)
    np.testing.assert_allclose(
        LOGITS(CONFIG, params, ids, length)[..., :29], LOGITS(CONFIG, scaled, ids, length)[..., :29], atol=1e-4
    )
    weights = jnp.asarray([1.0, 2.0, 3.0, 4.0])  # not alike within a rotated pair: before and after RoPE differ
    uneven = {**params, "layers": {**params["layers"], "q_norm_lh": jnp.tile(weights, (2, 1))}}
    hidden = Decoder.from_params(CONFIG, uneven)
    kv = hidden.prefill(ids, length)[1]
    assert np.isfinite(kv.keys).all()
    # keys are normed, then rotated: their length is that of the normed key at every position
    np.testing.assert_allclose(np.sqrt((np.asarray(kv.keys) ** 2).mean(axis=-2)), 1.0, atol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_norms_gradient_is_that_of_its_formula(dtype):
    def plain(x, weight):
        x32 = x.astype(jnp.float32)
        return (x32 / jnp.sqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5) * weight).astype(x.dtype)

    rng = np.random.default_rng(0)
    x, grad = (jnp.asarray(rng.normal(size=(2, 7, 3, 16)), dtype) for _ in range(2))
    weight = jnp.asarray(rng.normal(size=16), jnp.float32)
    found = jax.vjp(lambda x, w: _rms_norm(x, w, 1e-5), x, weight)[1](grad)
    expected = jax.vjp(plain, x, weight)[1](grad)
    assert [x.dtype for x in found] == [dtype, jnp.float32]
    assert_trees_close(found, expected, atol=1e-5 if dtype == jnp.float32 else 2e-2, rtol=1e-5)


def test_padded_vocabulary_is_masked_before_the_softmax():
    config = dataclasses.replace(CONFIG, tied=False)
    assert config.padded_vocab == 64
    params = init_params(config, 0)
    huge = {**params, "head_dv": params["head_dv"].at[:, 29:].set(1e4)}
    logits = LOGITS(config, huge, np.asarray([[3, 4]], np.int32), np.asarray([2], np.int32))
    assert np.isneginf(logits[..., 29:]).all()
    logp, gradient = step(token_logp, config)(huge, *arrays(0))
    np.testing.assert_array_equal(logp, step(token_logp, config)(params, *arrays(0))[0])
    assert np.isfinite(gradient["head_dv"]).all() and not np.asarray(gradient["head_dv"][:, 29:]).any()


def test_temperature_divides_logits_before_the_softmax():
    """Logits [2, 0], T = 0.5, token 0: -0.01815; before temperature it would be -0.12693, divided after -0.25386."""
    config = PolicyConfig(
        vocab_size=2, padded_vocab=2, d_model=2, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2, d_ff=2, tied=False
    )
    params = jax.tree.map(jnp.zeros_like, init_params(config, 0))
    params["embed_vd"] = jnp.ones((2, 2))
    params["final_norm_d"] = jnp.ones(2)
    params["head_dv"] = jnp.asarray([[2.0, 0.0], [0.0, 0.0]])
    one = np.ones((1, 1), np.int32)
    logp = LOGP(config, params, one, one[0], np.zeros((1, 1, 2), np.int32), 2 * one, 0.5)
    assert float(logp[0, 0, 1]) == pytest.approx(-0.01815, abs=1e-5)


def test_bfloat16_computes_near_float32_and_keeps_float32_outputs():
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    logp, gradient = ours(config)
    assert logp.dtype == jnp.float32
    np.testing.assert_allclose(logp, ours(CONFIG)[0], atol=0.15)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(gradient))


def test_module_and_dict_are_two_views():
    decoder = Decoder.from_params(CONFIG, PARAMS)
    back = decoder.to_params()
    assert jax.tree.structure(back) == jax.tree.structure(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, back, PARAMS)
    assert jax.tree.map(jnp.shape, back) == param_shapes(CONFIG)
    with pytest.raises(ValueError):
        Decoder.from_params(CONFIG, {k: v for k, v in PARAMS.items() if k != "embed_vd"})


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"qk_norm": False, "qkv_bias": True}),
        ("qwen3", {"qk_norm": True, "qkv_bias": False}),
        ("llama", {"qk_norm": False, "qkv_bias": False, "tied": False}),
    ],
)
def test_every_family_initialises_and_runs(family, options):
    config = dataclasses.replace(CONFIG, **options)
    assert config.family == family
    params = init_params(config, 1)
    assert jax.tree.map(jnp.shape, params) == param_shapes(config)
    logp = LOGP(config, params, *arrays(0))
    np.testing.assert_allclose(logp, NAIVE(dataclasses.replace(config, attention_budget=None), params), atol=1e-5)
    assert (
        abs(float(logp[SUFFIX_LEN > 1].sum() / (SUFFIX_LEN - 1).sum()) + np.log(29)) < 1.5
    )  # near uniform at the start


def test_tiny_is_the_documented_size():
    config = PolicyConfig.tiny(800)
    assert (
        sum(int(np.prod(x)) for x in jax.tree.leaves(param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)))
        == 710_656
    )


# --- rope ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("head_dim", "factor", "golden"),
    [
        (64, 32.0, {14: 3.211446e-03, 15: 1.290548e-03, 16: 4.295568e-04, 17: 9.708287e-05, 18: 1.946164e-05, 31: 9.418307e-08}),  # noqa: E501
        (128, 8.0, {30: 1.371894e-03, 32: 5.248462e-04, 63: 3.068926e-07}),
    ],
)  # fmt: skip
def test_llama3_frequencies(head_dim, factor, golden):
    config = dataclasses.replace(
        CONFIG, head_dim=head_dim, rope_theta=5e5, rope_scaling=Llama3Rope(factor, 1.0, 4.0, 8192)
    )
    frequencies = rope_inverse_frequencies(config)
    assert frequencies.dtype == np.float32
    for i, value in golden.items():
        assert frequencies[i] == pytest.approx(value, rel=1e-6)


# --- config.json -----------------------------------------------------------------------------------------------------
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 8,
    "use_sliding_window": False,
    "max_window_layers": 1,
}


def test_from_hf_reads_each_family():
    qwen2 = PolicyConfig.from_hf(QWEN2, vocab_size=90, remat="block")
    assert (qwen2.vocab_size, qwen2.padded_vocab, qwen2.head_dim, qwen2.rope_theta) == (90, 100, 8, 1e6)
    assert qwen2.qkv_bias and not qwen2.qk_norm and qwen2.tied and qwen2.remat == "block" and qwen2.norm_eps == 1e-5
    qwen3 = PolicyConfig.from_hf({**QWEN2, "model_type": "qwen3", "head_dim": 16})
    assert qwen3.qk_norm and not qwen3.qkv_bias and qwen3.head_dim == 16
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = Llama3Rope(32.0, 1.0, 4.0, 8192)
    for rope in (
        {"rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_scaling": {"type": "llama3", **scaling}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **scaling}, "rope_theta": None},
    ):
        llama = PolicyConfig.from_hf({**QWEN2, "model_type": "llama", **rope})
        assert llama.rope_scaling == expected and llama.rope_theta == 1e6 and llama.family == "llama"
    untied = {key: value for key, value in QWEN2.items() if key not in ("tie_word_embeddings", "num_key_value_heads")}
    plain = PolicyConfig.from_hf({**untied, "model_type": "llama"})
    assert not plain.tied and plain.n_kv_heads == 4


def test_sliding_window_counts_only_when_it_is_on():
    assert PolicyConfig.from_hf(QWEN2).n_layers == 2  # a size alone means full attention
    on = {**QWEN2, "use_sliding_window": True}
    with pytest.raises(ValueError, match="sliding_window=8, max_window_layers=1"):
        PolicyConfig.from_hf(on)
    PolicyConfig.from_hf({**on, "max_window_layers": 2})  # no layer has one
    PolicyConfig.from_hf({**on, "sliding_window": None})
    with pytest.raises(ValueError, match="sliding-window"):
        PolicyConfig.from_hf({**QWEN2, "layer_types": ["full_attention", "sliding_attention"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "type 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": None}, "hidden_size missing"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4, "head_dim": 8}, "n_heads=6 is not a multiple of n_kv_heads=4"),  # noqa: E501
    ],
)  # fmt: skip
def test_unsupported_checkpoints_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig.from_hf({**QWEN2, **change})


@pytest.mark.parametrize(
    ("field", "value"),
    [("head_dim", 7), ("padded_vocab", 3), ("remat", "all"), ("compute_dtype", "float16"), ("n_layers", 0), ("attention_budget", 0)],  # noqa: E501
)  # fmt: skip
def test_impossible_shapes_are_refused(field, value):
    with pytest.raises(ValueError, match=f"policy.{field}"):
        dataclasses.replace(CONFIG, **{field: value})
