"""Checkpoints of transformers: parity of logits, round trips, and every way a folder can be wrong."""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from seal_jax.chat.tokenizer import ByteTokenizer
from seal_jax.policy.config import Llama3Rope, PolicyConfig, param_shapes
from seal_jax.policy.hf import load_hf, save_hf
from seal_jax.policy.model import full_logits
from seal_jax.policy.sharding import make_mesh, param_shardings

HERE = Path(__file__).parent
GOLDENS = sorted((HERE / "goldens").glob("*.npz"))


def _goldens_script():
    spec = importlib.util.spec_from_file_location("make_goldens", HERE / "make_goldens.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _logits(config, params, ids):
    lengths = np.full(len(ids), ids.shape[1], np.int32)
    return np.asarray(full_logits(config, params, jnp.asarray(ids), jnp.asarray(lengths)))


def _config(**changes) -> PolicyConfig:
    base = dict(vocab_size=50, padded_vocab=50, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24)
    return PolicyConfig(**{**base, **changes})


def _params(config: PolicyConfig, seed: int) -> dict:
    """Random numpy params: nothing to compile."""
    rng = np.random.default_rng(seed)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    draw = lambda shape: rng.normal(0.0, 0.2, shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, param_shapes(config), is_leaf=is_shape)


def _equal(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture
def folder(tmp_path) -> Path:
    """An untied Qwen2 checkpoint in one file."""
    config = _config(tied=False, qkv_bias=True)
    return save_hf(tmp_path / "model", config, _params(config, 0))


def _edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


# --- parity ---
@pytest.mark.parametrize("file", GOLDENS, ids=lambda f: f.stem)
def test_golden_logits(file, tmp_path):
    """All positions, against transformers' logits that were stored with the weights."""
    with np.load(file) as golden:
        (tmp_path / "config.json").write_text(str(golden["config"]))
        weights = {key[2:]: golden[key] for key in golden.files if key.startswith("w.")}
        ids, expected = golden["ids"], golden["logits"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config, params = load_hf(tmp_path)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))  # masters, though the file is float16
    np.testing.assert_allclose(_logits(config, params, ids), expected, atol=1e-4, rtol=0)


def test_there_are_goldens_of_every_family():
    families = {json.loads(str(np.load(f)["config"]))["model_type"] for f in GOLDENS}
    assert families == {"qwen2", "qwen3", "llama"}
    assert sum(f.stat().st_size for f in GOLDENS) < 300_000


@pytest.mark.parametrize("name", [f.stem for f in GOLDENS])
def test_live_logits(name, tmp_path, record_property):
    """The same against torch, through the folder that transformers itself writes."""
    pytest.importorskip("torch")
    script = _goldens_script()
    model = script.hf_model(name)
    model.save_pretrained(tmp_path)
    config, params = load_hf(tmp_path)
    error = np.abs(_logits(config, params, script.IDS) - script.hf_logits(model, script.IDS)).max()
    record_property("max_abs_error", float(error))
    print(f"\nparity {name}: max abs error {error:.2e}")
    assert error < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"qkv_bias": True, "tied": True},
        {"qk_norm": True, "tied": False, "head_dim": 8},
        {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, 32), "rope_theta": 100.0, "tied": False, "head_dim": 16},
    ],
    ids=["qwen2", "qwen3", "llama3"],
)
def test_transformers_loads_what_we_save(changes, dtype, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = _config(padded_vocab=64, **changes)
    params = _params(config, 1)
    save_hf(tmp_path / "out", config, params, dtype=dtype, max_shard_bytes=4000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    assert model.config.vocab_size == 50
    ids = np.random.default_rng(0).integers(0, 50, (1, 20), dtype=np.int32)
    expected = _goldens_script().hf_logits(model.eval(), ids)
    loaded, again = load_hf(tmp_path / "out")
    np.testing.assert_allclose(_logits(loaded, again, ids)[..., :50], expected, atol=1e-4, rtol=0)


# --- round trips ---
@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_bit_equal(tied, max_shard_bytes, tmp_path):
    config = _config(qk_norm=True, tied=tied, norm_eps=1e-5, rope_theta=1e6, max_position=512)
    params = _params(config, 3)
    save_hf(tmp_path / "m", config, params, max_shard_bytes=max_shard_bytes)
    loaded, again = load_hf(tmp_path / "m")
    assert loaded == config
    assert _equal(again, params)


def test_round_trip_strips_and_restores_padding(tmp_path):
    config = _config(vocab_size=50, padded_vocab=64, tied=False)
    params = _params(config, 0)
    save_hf(tmp_path / "m", config, params)
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].shape == stored["lm_head.weight"].shape == (50, 16)
    assert load_hf(tmp_path / "m", padded_vocab=50)[1]["embed_vd"].shape == (50, 16)
    again_config, again = load_hf(tmp_path / "m")
    assert again_config == config
    np.testing.assert_array_equal(again["embed_vd"][:50], params["embed_vd"][:50])
    np.testing.assert_array_equal(again["head_dv"][:, :50], params["head_dv"][:, :50])
    assert not np.any(again["embed_vd"][50:]) and not np.any(again["head_dv"][:, 50:])


def test_bfloat16_rounds_once(tmp_path):
    config = _config()
    params = _params(config, 0)
    save_hf(tmp_path / "m", config, params, dtype="bfloat16")
    _, again = load_hf(tmp_path / "m")
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), params)
    assert _equal(again, rounded)


def test_tokenizer_travels_and_gives_the_real_vocabulary(tmp_path):
    """The head of a padded checkpoint has more rows than tokens; those must be known, to be masked."""
    tokenizer = ByteTokenizer(("<|end|>",))
    config = _config(vocab_size=300, padded_vocab=320)
    save_hf(tmp_path / "m", config, _params(config, 0), tokenizer)
    loaded, _ = load_hf(tmp_path / "m")
    assert (loaded.vocab_size, loaded.padded_vocab) == (257, 320)
    assert load_hf(tmp_path / "m", vocab_size=280)[0].vocab_size == 280
    with pytest.raises(ValueError, match="the tokenizer has 257 ids, the model only 50"):
        save_hf(tmp_path / "n", _config(), _params(_config(), 0), tokenizer)


def test_straight_onto_a_sharding(folder):
    mesh = make_mesh((1, 1, 1))
    config, params = load_hf(folder, shardings=lambda c: param_shardings(c, mesh))
    want = param_shardings(config, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, params, want))
    assert _equal(params, load_hf(folder)[1])


def test_saving_is_atomic_and_replaces(tmp_path, monkeypatch):
    config = _config()
    save_hf(tmp_path / "m", config, _params(config, 0))
    with pytest.raises(ValueError, match="final_norm_d"):
        save_hf(tmp_path / "m", config, {**_params(config, 1), "final_norm_d": np.zeros(3)})
    monkeypatch.setattr("seal_jax.policy.hf.hf_config", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_hf(tmp_path / "m", config, _params(config, 1))
    monkeypatch.undo()
    assert _equal(load_hf(tmp_path / "m")[1], _params(config, 0))
    save_hf(tmp_path / "m", config, _params(config, 2))
    assert _equal(load_hf(tmp_path / "m")[1], _params(config, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("mine")
    with pytest.raises(ValueError, match="no model folder"):
        save_hf(tmp_path / "notes", config, _params(config, 0))


# --- wrong folders ---
def test_missing_shard_is_named(tmp_path):
    config = _config()
    save_hf(tmp_path / "m", config, _params(config, 0), max_shard_bytes=3000)
    shard = sorted((tmp_path / "m").glob("model-0*"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name) as caught:
        load_hf(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_stray_file_is_ignored_with_a_note(tmp_path, caplog):
    """An unlisted second copy must not be merged in (sglang#32279)."""
    config = _config()
    params = _params(config, 0)
    save_hf(tmp_path / "m", config, params, max_shard_bytes=3000)
    save_file({"model.norm.weight": np.full(16, 7, np.float32)}, tmp_path / "m" / "consolidated.safetensors")
    with caplog.at_level(logging.WARNING):
        _, again = load_hf(tmp_path / "m")
    assert _equal(again, params)
    assert "consolidated.safetensors" in caplog.text


def test_stale_index(tmp_path):
    config = _config()
    save_hf(tmp_path / "m", config, _params(config, 0), max_shard_bytes=3000)
    file = tmp_path / "m" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.ghost.weight"] = index["weight_map"]["model.norm.weight"]
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lacks tensor model\.ghost\.weight"):
        load_hf(tmp_path / "m")


def test_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_hf(folder)


def test_missing_tensor(folder):
    _edit(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight") is None)
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        load_hf(folder)


def test_unknown_tensor(folder):
    _edit(folder, lambda t: t.update({"model.layers.0.mlp.router.weight": np.zeros(3, np.float32)}))
    with pytest.raises(ValueError, match=r"unknown to family qwen2, first model\.layers\.0\.mlp\.router\.weight"):
        load_hf(folder)


def test_wrong_shape(folder):
    _edit(folder, lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \(3,\); config\.json says \(16,\)"):
        load_hf(folder)


def test_unsupported_type(folder):
    _edit(folder, lambda t: t.update({"model.norm.weight": np.zeros(16, np.int8)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has type I8"):
        load_hf(folder)


def test_not_finite(folder):
    def poison(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan

    _edit(folder, poison)
    with pytest.raises(ValueError, match="up_ldf of layer 1 holds NaN"):
        load_hf(folder)


def test_heads_tied_and_untied(tmp_path, folder):
    """pegainfer#544: the embedding stands in for a head only when the config says so."""
    tied = save_hf(tmp_path / "tied", _config(), _params(_config(), 0))
    assert "head_dv" not in load_hf(tied)[1]
    assert "head_dv" in load_hf(folder)[1]
    _edit_config(tied, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        load_hf(tied)
    _edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from the embedding"):
        load_hf(folder)
    _edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert "head_dv" not in load_hf(folder)[1]


@pytest.mark.parametrize("old, new", [("model.", "language_model.model."), ("model.", ""), ("model.", "model.text.")])
def test_prefixed_names_are_mapped(folder, old, new):
    """tunix#611: the same weights under another prefix."""
    expected = load_hf(folder)[1]
    _edit(folder, lambda t: {k.replace(old, new, 1) if k.startswith(old) else k: v for k, v in t.items()})
    assert _equal(load_hf(folder)[1], expected)


def test_foreign_names_are_refused(folder):
    _edit(folder, lambda t: {"transformer." + k.replace("embed_tokens", "wte"): v for k, v in t.items()})
    with pytest.raises(ValueError, match=r"family qwen2 .*transformer\.lm_head\.weight, transformer\.model\.layers\.0"):
        load_hf(folder)


def test_old_rotary_buffers_are_no_weights(folder):
    _edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}))
    load_hf(folder)


def test_missing_pieces(tmp_path, folder):
    with pytest.raises(ValueError, match="no folder"):
        load_hf(tmp_path / "nothing")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load_hf(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_hf(folder)


@pytest.mark.parametrize(
    "key, value",
    [
        ("hidden_size", "64"),
        ("num_hidden_layers", 0),
        ("num_key_value_heads", 1.5),
        ("head_dim", [8]),
        ("rope_theta", "big"),
        ("rms_norm_eps", False),
        ("rope_scaling", "llama3"),
        ("rope_parameters", {"rope_type": "llama3", "factor": "8", "low_freq_factor": 1, "high_freq_factor": 4,
                          "original_max_position_embeddings": 64}),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_are_named(folder, key, value):
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must be (a|an) .*") as caught:
        load_hf(folder)
    assert "\n" not in str(caught.value)


def test_quantised_folder_is_refused(folder):
    _edit_config(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="weights are quantised .*awq"):
        load_hf(folder)


def test_hub_id_goes_through_the_hub_client(folder, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: {"org/model": str(folder)}[name])
    assert load_hf("org/model")[0].qkv_bias
    with pytest.raises(ValueError, match="cannot download 'org/other'"):
        load_hf("org/other")
