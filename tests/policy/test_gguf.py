"""GGUF in: types, llama.cpp's row order, tied heads, rope factors; and every way a file can be wrong.

The files are written here with the gguf package's own writer, permuted as llama.cpp's converter does.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seal_jax.policy import weights
from seal_jax.policy.config import Llama3Rope, PolicyConfig, param_shapes
from seal_jax.policy.gguf import _TYPES, config_from_gguf, load_gguf, tensor_name
from seal_jax.policy.model import full_logits, rope_inverse_frequencies
from seal_jax.policy.sharding import make_mesh, param_shardings

gguf = pytest.importorskip("gguf")
GGML = gguf.GGMLQuantizationType


def _config(**changes: Any) -> PolicyConfig:
    base = dict(vocab_size=50, padded_vocab=50, d_model=64, n_layers=2, n_heads=8, n_kv_heads=2, head_dim=8, d_ff=96)
    return PolicyConfig(**{**base, "rope_theta": 1e4, "norm_eps": 1e-5, "max_position": 128, **changes})


def _params(config: PolicyConfig, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(0.0, 0.2, shape).astype(np.float32),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _llama_cpp_order(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """How llama.cpp's converter reorders the query and key rows of architecture llama, head by head."""
    halves = rows.reshape(n_heads, 2, -1, rows.shape[-1])
    return np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)


def _arch(config: PolicyConfig) -> str:
    return config.family


def _write(path: Path, config: PolicyConfig, params: dict, change=None, kinds=None, metadata=None) -> Path:
    """A GGUF file of these params. `change` edits {name: array}, `kinds` gives types by name, `metadata` adds keys."""
    arch = _arch(config)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.head_dim != config.d_model // config.n_heads:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key, value)
    tensors = {}
    for param, layer in weights.entries(config):
        array = params[param] if layer is None else params["layers"][param][layer]
        array = np.ascontiguousarray(weights.to_file(param, np.asarray(array)))
        if arch == "llama" and param in ("q_ldnh", "k_ldkh"):
            array = _llama_cpp_order(array, config.n_heads if param == "q_ldnh" else config.n_kv_heads)
        tensors[tensor_name(param, layer)] = array
    if change is not None:
        change(tensors)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _equal(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


FAMILIES = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 16},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_bit_equal(family, tied, tmp_path):
    """Only architecture llama is permuted (vllm-metal#480), keys by their own head count (transformers#31788), and a
    file without output.weight has a tied head (llama.cpp#5824)."""
    config = _config(tied=tied, **FAMILIES[family])
    params = _params(config)
    loaded, again = load_gguf(_write(tmp_path / "m.gguf", config, params))
    assert loaded == config
    assert _equal(again, params)
    assert ("head_dv" in again) is not tied


def test_the_test_permutes():
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert _llama_cpp_order(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types(kind, tmp_path):
    """Each tensor is what the gguf package makes of its bytes, rows intact, whatever its neighbours' types are."""
    config = _config()
    params = _params(config)
    names = {param: tensor_name(param, 1) for param in ("q_ldnh", "gate_ldf", "o_lnhd")}
    names["embed_vd"] = tensor_name("embed_vd", None)
    kinds = dict.fromkeys(names.values(), GGML[kind])
    _, again = load_gguf(_write(tmp_path / "misnamed-q4_0.gguf", config, params, kinds=kinds))

    def through(array):
        return gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(array), GGML[kind]), GGML[kind])

    layer = again["layers"]
    np.testing.assert_array_equal(again["embed_vd"], through(params["embed_vd"]))
    np.testing.assert_array_equal(layer["gate_ldf"][1], through(params["layers"]["gate_ldf"][1].T).T)
    np.testing.assert_array_equal(layer["gate_ldf"][0], params["layers"]["gate_ldf"][0])
    q_rows = params["layers"]["q_ldnh"][1].reshape(64, 64).T
    np.testing.assert_array_equal(layer["q_ldnh"][1].reshape(64, 64).T, through(q_rows))  # permuting keeps rows whole
    worst = {"F16": 1e-3, "BF16": 4e-3, "Q8_0": 5e-3}.get(kind, 0.1)
    assert np.abs(again["embed_vd"] - params["embed_vd"]).max() < worst


def test_k_quants(tmp_path):
    """The package reads K-quants but does not write them, so the blocks are random bytes with sane scales."""
    config = _config(d_model=256, n_heads=8, n_kv_heads=2, head_dim=32)
    rng = np.random.default_rng(0)
    for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        size = gguf.GGML_QUANT_SIZES[GGML[kind]][1]
        blocks = rng.integers(0, 256, (50, size), dtype=np.uint8)
        halfs = np.float16([0.01, 0.02]).view(np.uint8)
        places = {"Q2_K": [(80, 4)], "Q3_K": [(108, 2)], "Q4_K": [(0, 4)], "Q5_K": [(0, 4)], "Q6_K": [(208, 2)]}[kind]
        for start, n in places:
            blocks[:, start : start + n] = halfs[:n]
        writer_kinds = {}

        def change(tensors, blocks=blocks):
            tensors["token_embd.weight"] = blocks

        path = tmp_path / f"{kind}.gguf"
        original = gguf.quants.quantize
        try:
            gguf.quants.quantize = lambda array, _: array  # the blocks are already there
            writer_kinds["token_embd.weight"] = GGML[kind]
            _write(path, config, _params(config), change=change, kinds=writer_kinds)
        finally:
            gguf.quants.quantize = original
        _, again = load_gguf(path)
        assert again["embed_vd"].shape == (50, 256)
        np.testing.assert_array_equal(again["embed_vd"], gguf.quants.dequantize(blocks, GGML[kind]))


def test_bfloat16_is_exact(tmp_path):
    """transformers#31762: the package hands raw bytes, with the last dimension doubled."""
    config = _config()
    params = _params(config)
    exact = jax.tree.map(lambda x: (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32), params)
    kinds = {tensor_name(*entry): GGML.BF16 for entry in weights.entries(config)}
    _, again = load_gguf(_write(tmp_path / "m.gguf", config, exact, kinds=kinds))
    assert _equal(again, exact)


def test_type_table_is_the_packages():
    for type_id, (name, elements, size) in _TYPES.items():
        assert GGML(type_id).name == name
        assert gguf.GGML_QUANT_SIZES[GGML(type_id)] == (elements, size)


def test_rows_are_dequantised_in_parts(tmp_path, monkeypatch):
    config = _config()
    kinds = {tensor_name("embed_vd", None): GGML.Q8_0}
    path = _write(tmp_path / "m.gguf", config, _params(config), kinds=kinds)
    whole = load_gguf(path)[1]
    monkeypatch.setattr("seal_jax.policy.gguf._CHUNK", 7 * 64)
    assert _equal(load_gguf(path)[1], whole)


def test_straight_onto_a_sharding(tmp_path):
    config = _config()
    params = _params(config)
    mesh = make_mesh((1, 1, 1))
    path = _write(tmp_path / "m.gguf", config, params)
    _, again = load_gguf(path, shardings=lambda c: param_shardings(c, mesh))
    assert _equal(again, params)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, again, param_shardings(config, mesh)))


# --- vocabulary and rope ---
def test_padding_rows_are_no_tokens(tmp_path):
    """Rows for unused entries (type 5) are in the head but must never be sampled."""
    config = _config()
    types = [1] * 45 + [3, 4] + [5] * 3
    vocabulary = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(50)], "tokenizer.ggml.token_type": types}
    path = _write(tmp_path / "m.gguf", config, _params(config), metadata=vocabulary)
    loaded = config_from_gguf(path)
    assert (loaded.vocab_size, loaded.padded_vocab) == (47, 50)
    padded, params = load_gguf(path, padded_vocab=64)
    assert (padded.vocab_size, padded.padded_vocab) == (47, 64)
    assert params["embed_vd"].shape == (64, 64) and not np.any(params["embed_vd"][50:])


@pytest.mark.parametrize(
    "rope, theta, head_dim",
    [
        (Llama3Rope(8.0, 1.0, 4.0, 8192), 5e5, 128),  # Llama 3.1
        (Llama3Rope(32.0, 1.0, 4.0, 8192), 5e5, 64),  # Llama 3.2
        (Llama3Rope(4.0, 1.0, 4.0, 8192), 5e5, 8),  # too few frequencies in the ramp to fit: the usual numbers
        (Llama3Rope(16.0, 1.0, 8.0, 4096), 1e5, 64),
    ],
)
@pytest.mark.parametrize("fewer_bits", [False, True])
def test_llama3_factors_give_the_scaling_back(rope, theta, head_dim, fewer_bits, tmp_path):
    """GGUF keeps only what each frequency is divided by."""
    config = _config(rope_theta=theta, rope_scaling=rope, head_dim=head_dim)
    plain = rope_inverse_frequencies(replace(config, rope_scaling=None))
    factors = (plain / rope_inverse_frequencies(config)).astype(np.float32)
    if fewer_bits:
        factors = factors * np.float32(1 + 1e-6)
    path = _write(tmp_path / "m.gguf", config, _params(config), lambda t: t.update({"rope_freqs.weight": factors}))
    loaded = config_from_gguf(path)
    np.testing.assert_allclose(rope_inverse_frequencies(loaded), rope_inverse_frequencies(config), rtol=1e-4)
    if not fewer_bits:
        assert loaded == config


def test_rope_metadata(tmp_path):
    config, params = _config(), _params(_config())

    def load(name, change=None, **metadata):
        keys = {f"llama.rope.scaling.{k}": v for k, v in metadata.items()}
        return config_from_gguf(_write(tmp_path / name, config, params, change, metadata=keys))

    named = load("a", type="llama3", factor=8.0, original_context_length=8192)
    assert named.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    assert load("b", type="none").rope_scaling is None
    assert load("c", lambda t: t.update({"rope_freqs.weight": np.ones(4, np.float32)})).rope_scaling is None
    with pytest.raises(ValueError, match="rope scaling of type 'yarn'"):
        load("d", type="yarn", factor=4.0)
    with pytest.raises(ValueError, match="original_context_length is missing"):
        load("e", type="llama3", factor=4.0)
    with pytest.raises(ValueError, match="does not follow Llama 3's rule"):
        load("f", lambda t: t.update({"rope_freqs.weight": np.float32([1, 9, 2, 7])}))


# --- wrong files ---
def test_unsupported_type_is_named_before_anything_is_read(tmp_path, monkeypatch):
    """sparkinfer#16: an unknown type read as floats is silent garbage."""
    config = _config()
    path = _write(
        tmp_path / "m.gguf",
        config,
        _params(config),
        lambda t: t.update({"blk.1.ffn_up.weight": np.zeros((96, 64), np.int16)}),
    )
    monkeypatch.setattr("seal_jax.policy.weights.assemble", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight has type I16; supported are F32") as caught:
        load_gguf(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: t.pop("blk.1.attn_k.weight"), r"1 missing tensors .* first blk\.1\.attn_k\.weight"),
        (lambda t: t.pop("output_norm.weight"), r"first output_norm\.weight"),
        (lambda t: t.pop("token_embd.weight"), r"token_embd\.weight is missing"),
        (lambda t: t.update({"blk.0.attn_q.bias": np.zeros(64, np.float32)}), r"unknown .* first blk\.0\.attn_q\.bias"),
        (lambda t: t.update({"blk.0.attn_k.weight": np.zeros((64, 64), np.float32)}), r"attn_k.* says \(16, 64\)"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_named(change, match, tmp_path):
    config = _config()
    with pytest.raises(ValueError, match=match):
        load_gguf(_write(tmp_path / "m.gguf", config, _params(config), change))


def test_cut_off_file(tmp_path):
    config = _config()
    path = _write(tmp_path / "m.gguf", config, _params(config))
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(ValueError, match="cut off"):
        load_gguf(path)


@pytest.mark.parametrize(
    "metadata, match",
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.sliding_window": 64}, "sliding-window"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count=4 differs"),
        ({"llama.block_count": "two"}, "llama.block_count='two' must be a number"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count=0 must be a number above 0"),
        ({"llama.rope.freq_base": "big"}, "llama.rope.freq_base='big' must be a number"),
    ],
)
def test_what_this_decoder_is_not(metadata, match, tmp_path):
    config = _config()
    with pytest.raises(ValueError, match=match):
        load_gguf(_write(tmp_path / "m.gguf", config, _params(config), metadata=metadata))


def test_other_architectures_and_missing_metadata(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'gemma3' is not supported"):
        load_gguf(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="no GGUF file"):
        load_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_reads_the_same_logits(family, tmp_path):
    """The same file through transformers' own GGUF reader."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = _config(tied=False, **FAMILIES[family])
    path = _write(tmp_path / "m.gguf", config, _params(config), metadata={f"{family}.vocab_size": 50})
    found = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    assert found.pop("model_type") == family
    hf = AutoConfig.for_model(family, **{**found, "vocab_size": 50})
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict(load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"])
    ids = np.random.default_rng(0).integers(0, 50, (1, 16), dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids).long()).logits.numpy()
    loaded, params = load_gguf(path)
    ours = np.asarray(full_logits(loaded, params, jnp.asarray(ids), jnp.asarray([16], jnp.int32)))
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("SEAL_SMOLLM2_GGUF"), reason="SEAL_SMOLLM2_GGUF names no file")
def test_real_smollm2_knows_paris():
    from seal_jax.chat.tokenizer import tokenizer_from_gguf

    path = os.environ["SEAL_SMOLLM2_GGUF"]
    config, params = load_gguf(path)
    assert (config.n_layers, config.d_model, config.n_heads, config.n_kv_heads, config.tied) == (30, 576, 9, 3, True)
    tokenizer = tokenizer_from_gguf(path)
    ids = tokenizer.encode("The capital of France is")
    length = jnp.asarray([len(ids)], jnp.int32)
    logits = full_logits(config, params, jnp.asarray([ids], jnp.int32), length)
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
