"""The planner: its arithmetic and refusals anywhere; with libtpu, compiles for slices that are not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from seal_jax.config import default_config
from seal_jax.learner.batch import Buckets, make_batch, take
from seal_jax.learner.optimizer import OptimizerSettings, make_optimizer
from seal_jax.learner.programs import init_state
from seal_jax.planner import topology, work
from seal_jax.planner.chips import CHIPS
from seal_jax.planner.hlo import Traffic, traffic
from seal_jax.planner.measure import Measured, measure, needed
from seal_jax.planner.plan import UPDATE, Planner, Program, mend
from seal_jax.planner.programs import Abstract, Grid, bytes_per_chip
from seal_jax.planner.shapes import PUBLISHED, policy_config
from seal_jax.planner.topology import parse_topology
from seal_jax.planner.work import Episodes
from seal_jax.policy.config import PolicyConfig, param_shapes
from seal_jax.policy.model import Decoder, init_params
from seal_jax.policy.sharding import make_mesh
from seal_jax.rollout.engine import RolloutEngine
from seal_jax.types import Segment, Trajectory

ROOT = Path(__file__).parents[1]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def small_config():
    """Bucket sizes for which a TPU would take the blockwise attention, so that a CPU can compile the same."""
    config = default_config()
    config.policy.overrides = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_ff": 48}
    config.policy.vocab_size = 64
    config.buckets.prompt, config.buckets.suffix, config.buckets.chunk = (12, 24), (8, 16), (4,)
    config.buckets.groups, config.learner.prompts_per_micro = (4, 8), 4
    config.limits.max_new_tokens, config.buckets.decode = 6, 4
    return config


# --- names and figures ---
@pytest.mark.parametrize(("name", "chips"), [("v5p:2x2x2", 8), ("v5e:1x1", 1), ("v6e:4x4", 16), ("v5e:16x16", 256)])
def test_slices_are_parsed(name, chips):
    parsed = parse_topology(name)
    assert (str(parsed), parsed.n_chips) == (name, chips)
    assert parsed.chip is CHIPS[name.split(":")[0]]


@pytest.mark.parametrize(
    ("name", "said"),
    [("v9:2x2", "chips are v4, v5e, v5p, v6e"), ("v5p", "v5p:2x2x2"), ("v5p:2x2", "3 sides"), ("v5e:0x4", "2 sides")],
)
def test_other_slices_are_refused(name, said):
    with pytest.raises(ValueError, match=said) as refused:
        parse_topology(name)
    assert name in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "billions"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0.494),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.544),
        ("Qwen/Qwen2.5-3B-Instruct", 3.086),
        ("Qwen/Qwen2.5-7B-Instruct", 7.616),
        ("Team-ACE/ToolACE-2-Llama-3.1-8B", 8.030),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.1345),
    ],
)
def test_published_dimensions_give_the_published_number_of_parameters(path, billions):
    config = default_config()
    config.policy.source, config.policy.path = "hf", path
    shapes = jax.tree.leaves(param_shapes(policy_config(config)), is_leaf=lambda x: isinstance(x, tuple))
    assert sum(int(np.prod(shape)) for shape in shapes) / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_folder_is_read_and_an_unknown_id_is_refused(tmp_path):
    config = default_config()
    config.policy.source, config.policy.path = "hf", "Qwen/Qwen2.5-1.5B-Instruct"
    known = policy_config(config)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[config.policy.path]))
    config.policy.path = str(tmp_path)
    assert policy_config(config) == known
    assert (known.qkv_bias, known.tied, known.head_dim, known.attention) == (True, True, 128, "splash")
    config.policy.path = "someone/some-model"
    with pytest.raises(ValueError, match="someone/some-model.*give a folder, or one of .*Qwen2.5-7B"):
        policy_config(config)


def test_what_the_compiler_says_it_needs_is_read():
    first = "RESOURCE_EXHAUSTED: ... memory required for HLO temporaries (149.06G) exceeds available HBM (15.75G)."
    second = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.50G of 15.75G hbm. Exceeded hbm ..."
    assert needed(first) == int(149.06 * 2**30) and needed(second) == int(17.5 * 2**30)
    assert needed("RESOURCE_EXHAUSTED: something else") == 0


# --- traffic ---
HLO = """
%slice_body (p0: f32[10,4,4], p1: s32[]) -> f32[1,4,4] {
  %p0 = f32[10,4,4]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)S(6)} parameter(1)
  ROOT %ds = f32[1,4,4]{2,1,0:T(8,128)} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,4,4}
}

%body (s: (s32[], f32[4,4], f32[10,4,4])) -> (s32[], f32[4,4], f32[10,4,4]) {
  %s = (s32[], f32[4,4]{1,0}, f32[10,4,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %w = f32[10,4,4]{2,1,0} get-tuple-element(%s), index=2
  %one = f32[1,4,4]{2,1,0:T(8,128)} fusion(%w, %i), kind=kLoop, calls=%slice_body
  %near = f32[4,4]{1,0:T(8,128)S(1)} copy(%one)
  %all = f32[8,4]{1,0:T(8,128)} all-gather(%near), channel_id=1, dimensions={0}
  ROOT %t = (s32[], f32[4,4]{1,0}, f32[10,4,4]{2,1,0}) tuple(%i, %near, %w)
}

%condition (s: (s32[], f32[4,4], f32[10,4,4])) -> pred[] {
  %s = (s32[], f32[4,4]{1,0}, f32[10,4,4]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(10)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: f32[4,4], w: f32[10,4,4]) -> f32[4,4] {
  %a = f32[4,4]{1,0:T(8,128)} parameter(0)
  %w = f32[10,4,4]{2,1,0:T(8,128)} parameter(1)
  %z = s32[] constant(0)
  %b = bf16[4,4]{1,0:T(8,128)(2,1)} convert(%a)
  %s = (s32[], f32[4,4]{1,0}, f32[10,4,4]{2,1,0}) tuple(%z, %a, %w)
  %loop = (s32[], f32[4,4]{1,0}, f32[10,4,4]{2,1,0}) while(%s), condition=%condition, body=%body
  ROOT %out = f32[4,4]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_traffic_counts_a_scan_as_often_as_it_runs():
    call, step = traffic(HLO)
    # 64 bytes a matrix: read and written by the slice, read by the copy; the gathered 128 are written. The convert
    # reads 64 and writes 32; the loop's counter, 4 bytes, is read by the slice.
    assert call == Traffic(hbm=10 * (64 + 4 + 64 + 64 + 128) + 96, ici=10 * 128)
    assert step == Traffic()


def test_traffic_tells_the_step_of_a_loop_without_a_known_end():
    whole, _ = traffic(HLO)
    call, step = traffic(HLO.replace("direction=LT", "direction=NE"))
    assert call == Traffic(hbm=96) and step * 10 + call == whole


def test_traffic_sees_through_fusions_in_fusions():
    """A slice or an update in place inside an inner fusion still touches only its part of a stacked array."""
    wrapped = HLO.replace("calls=%slice_body", "calls=%outer").replace(
        "%body (s:",
        "%outer (q0: f32[10,4,4], q1: s32[]) -> f32[1,4,4] {\n"
        "  %q0 = f32[10,4,4]{2,1,0:T(8,128)} parameter(0)\n"
        "  %q1 = s32[]{:T(128)S(6)} parameter(1)\n"
        "  ROOT %in = f32[1,4,4]{2,1,0:T(8,128)} fusion(%q0, %q1), kind=kLoop, calls=%slice_body\n"
        "}\n\n%body (s:",
    )
    assert traffic(wrapped) == traffic(HLO)
    update = HLO.replace(
        "dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,4,4}", "dynamic-update-slice(%p0, %u, %p1, %p1, %p1)"
    ).replace("  ROOT %ds = f32[1,4,4]", "  %u = f32[1,4,4]{2,1,0} constant(0)\n  ROOT %ds = f32[10,4,4]")
    assert traffic(update)[0].hbm == 10 * (4 + 64 + 64 + 128) + 96


# --- formulas ---
def test_forward_flops_are_those_of_the_compiled_program():
    policy = PolicyConfig.tiny(64, n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=256)
    groups, length = 2, 48
    args = jax.ShapeDtypeStruct((groups, length), jnp.int32), jax.ShapeDtypeStruct((groups,), jnp.int32)
    params = jax.eval_shape(lambda: init_params(policy, 0))

    def logits(params, ids, lengths):
        decoder = Decoder.from_params(policy, params)
        return decoder.logits(decoder.prefill(ids, lengths)[0])

    counted = jax.jit(logits).lower(params, *args).cost_analysis()["flops"]
    tokens = groups * length
    dense = work.trunk_flops(policy, tokens) + work.head_flops(policy, tokens)
    ours = dense + work.attention_flops(policy, groups * length**2)  # blockwise: the hidden half is computed too
    assert ours == pytest.approx(counted, rel=0.06)  # the rest is norms, softmax, RoPE
    assert ours < counted
    grid = Grid(groups, 0, length, 0)
    assert work.prefill_flops(policy, grid) == pytest.approx(
        work.trunk_flops(policy, tokens) + work.attention_flops(policy, work.grid_pairs(grid))
    )


def test_a_shared_prompt_is_counted_once():
    policy = PolicyConfig.tiny(64)
    shared, alone = Grid(1, 8, 5120, 1536), Grid(8, 1, 5120, 1536)
    assert work.grid_tokens(shared) == 5120 + 8 * 1536 and work.grid_tokens(alone) == 8 * (5120 + 1536)
    saved = work.score_flops(policy, alone, 512) - work.score_flops(policy, shared, 512)
    assert saved == pytest.approx(7 * work.prefill_flops(policy, Grid(1, 8, 5120, 0)))


def test_the_calls_of_a_round():
    config = small_config()
    config.tasks_per_round, config.learner.minibatches, config.loss.kl_coef = 20, 2, 0.001
    round = work.plan_round(config, Episodes(prompt=10, suffix=12, sampled=6, messages=3), kl=True)
    assert (round.waves, round.rollout, round.chunk, round.steps) == (3, Grid(8, 8, 12, 16), 4, 2)
    # 10 prompts a mini-batch in micro-batches of 4; the reference scores 20, the old policy those of the second step
    assert (round.micros, round.applies, round.scores) == (6, 2, 5 + 3)
    assert round.micro == Grid(4, 8, 12, 16)


def test_episodes_are_parsed_and_cut_to_the_buckets():
    assert Episodes.parse("suffix=2048,messages=4") == Episodes(suffix=2048, messages=4)
    for text, said in (("turns=3", "messages"), ("prompt=x", "a number"), ("sampled=9000", "sampled < suffix")):
        with pytest.raises(ValueError, match=said):
            Episodes.parse(text)
    assert work.cut(Episodes(), small_config()) == Episodes(prompt=24, suffix=16, sampled=5, messages=5)


# --- shapes are those of a run ---
def described(tree):
    return jax.tree.map(lambda x: (tuple(x.shape), jnp.dtype(x.dtype)), tree)


def test_abstract_arguments_are_those_of_a_run():
    config = small_config()
    config.loss.kl_coef = 0.001
    mesh = make_mesh((1, 4, 2))
    policy = policy_config(config)
    assert policy.attention == "blockwise"
    abstract = Abstract(config, policy, mesh)
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), abstract.params)
    real = init_state(zeros, make_optimizer(OptimizerSettings()), mesh)
    assert described(abstract.state) == described(real)
    assert jax.tree.map(lambda x: x.sharding, abstract.state) == jax.tree.map(lambda x: x.sharding, real)
    on_first = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(real))
    assert bytes_per_chip(abstract.state) == on_first

    segments = (Segment((1, 2), "template", 0), Segment((3,), "sampled", 0, (-1.0,)))
    row = Trajectory("t", "base", 0, 0, False, (1,), segments, ((),), "completed")
    groups = [[row] * 3] * 4
    batch = take(make_batch(groups, buckets=Buckets((24,), (16,))), np.arange(4), Buckets((24,), (16,)))
    assert described(abstract._micro(Grid(4, 3, 24, 16))) == described(batch)


def test_abstract_caches_are_those_of_the_engine():
    config, mesh = small_config(), make_mesh((1, 4, 2))
    policy = policy_config(config)
    abstract, grid = Abstract(config, policy, mesh), Grid(4, 3, 24, 16)
    prompt, rows = abstract.caches(grid)
    assert described(abstract.prefill(grid).out_info) == described(prompt)
    engine = RolloutEngine(
        policy,
        stop_ids=[1],
        prompt_buckets=(24,),
        suffix_buckets=(16,),
        chunk_buckets=(4,),
        group_buckets=(4,),
        max_new_tokens=6,
        mesh=mesh,
        unroll=False,
    )
    made, hidden = jax.eval_shape(lambda prompt: engine._new_rows(prompt, 3, 16), prompt)
    assert described(made) == described(rows) and described(hidden) == described(abstract._hidden(grid))
    new, hidden = abstract.extend(grid, 4).out_info
    assert described(new) == described(abstract._rows(grid, 4)) and described(hidden) == described(
        abstract._hidden(grid)
    )
    assert described(abstract.decode(grid).out_info[0]) == described(abstract._rows(grid, abstract.decode_size))


def test_the_update_is_lowered_from_shapes_alone():
    config = small_config()
    policy = policy_config(config)
    abstract = Abstract(config, policy, make_mesh((1, 4, 2)))
    gradient, _ = abstract.accumulate(Grid(4, 3, 24, 16)).out_info
    assert described(gradient) == described(abstract.trained)
    assert described(abstract.apply().out_info[0]) == described(abstract.state)


def test_a_mend_is_one_that_fits(monkeypatch):
    """Each prompt at once takes 6 GiB here: of 15.75 that is two, not four."""

    def accumulate(self, grid, scored):
        asked.append(grid.groups)
        measured = Measured(1.0, temporaries=grid.groups * 6 * 2**30)
        return Program("accumulate", UPDATE, str(grid), measured, 0.0, outside=0)

    monkeypatch.setattr(Planner, "accumulate", accumulate)
    monkeypatch.setattr(Planner, "apply", lambda self: Program("apply", UPDATE, "", Measured(1.0), 0.0, outside=0))
    config, asked = small_config(), []
    config.mesh.fsdp = 2
    planner = Planner(config, parse_topology("v5e:1x1"), jax.devices()[:2], lambda line: None)
    assert not planner.fits(UPDATE) and asked == [4]
    assert mend(planner, UPDATE).startswith("--config.learner.prompts_per_micro=2: the update then fits (12.0 GiB")
    assert asked[-1] == 2  # tried, not guessed
    config.learner.prompts_per_micro = 2
    small = dataclasses.replace(planner.topology, chip=dataclasses.replace(CHIPS["v5e"], hbm_bytes=2**30))
    text = mend(Planner(config, small, jax.devices()[:2], lambda line: None), UPDATE)
    assert text.startswith("none of these is enough for the update: --config.policy.remat=block; ")
    assert text.endswith("take a larger slice")


# --- the command line ---
def run_main(*args, **env):
    base = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "seal_jax.main", *args],
        cwd=ROOT,
        env={**base, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--mode=plan"], "error: --mode=plan needs --topology, e.g. --topology=v5p:2x2x2\n"),
        (["--mode=plan", "--topology=v5p:2x2"], "error: --topology=v5p:2x2: a slice of v5p has 3 sides"),
        (["--topology=v5p:2x2x2", "--workdir=x"], "error: --topology and --episodes belong to --mode=plan\n"),
        (["--mode=train"], "error: --workdir is missing; name a folder"),
    ],
)
def test_refusals(args, said):
    done = run_main("--config=configs/quickstart.py", *args)
    assert done.returncode == 2 and done.stderr.startswith(said) and done.stderr.count("\n") == 1


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[tpu\]"'):
        topology.devices(parse_topology("v5e:1x1"))


# --- with libtpu ---
@needs_libtpu
@pytest.mark.parametrize("name, hosts", [("v5e:1x1", 1), ("v5e:2x4", 1), ("v5e:4x4", 4), ("v5p:2x2x2", 2)])
def test_hosts_of_a_slice(name, hosts):
    assert len({device.process_index for device in topology.devices(parse_topology(name))}) == hosts


def test_a_side_that_libtpu_cannot_have_is_refused():
    with pytest.raises(ValueError, match="no side is longer than 16 chips"):
        parse_topology("v5e:64x64")


@needs_libtpu
def test_traffic_of_a_compiled_scan():
    """Four chips gather each of ten weights; libtpu's own count has one of them."""
    made = topology.devices(parse_topology("v5p:2x2x1"))
    mesh = Mesh(np.array(made), ("x",))

    def shape(size, *spec):
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jax.nn.silu(x @ w), None), x, w)[0]

    lowered = jax.jit(layers).lower(shape((512, 2048), "x"), shape((10, 2048, 2048), None, "x"))
    found = measure(lowered)
    weights = 10 * 2048 * 2048 * 2
    assert found.call.ici == pytest.approx(weights, rel=0.01)
    assert 2 * weights < found.call.hbm < 3 * weights  # written by the gather, read by the product, and the shards
    assert found.flops == pytest.approx(2 * 128 * 2048 * 2048, rel=0.1)  # one layer's, on one chip


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:1x1", "v5p:2x2x1", "v5p:2x2x2", "v5e:4x4", "v6e:4x4"])
def test_a_tiny_run_is_planned(name, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from seal_jax.config import default_config\n"
        "def get_config():\n"
        "    c = default_config()\n"
        "    c.policy.overrides.n_layers = 2\n"
        "    c.policy.compute_dtype = 'bfloat16'\n"
        "    c.buckets.prompt, c.buckets.suffix, c.buckets.chunk, c.buckets.groups = (128,), (128,), (16,), (4,)\n"
        "    c.limits.max_new_tokens, c.buckets.decode, c.tasks_per_round = 16, 16, 16\n"
        "    c.learner.prompts_per_micro, c.mesh.fsdp, c.learner.minibatches = 16, -1, 1\n"
        "    return c\n"
    )
    done = run_main("--mode=plan", f"--config={recipe}", f"--topology={name}")
    assert done.returncode == 0, done.stderr
    assert "attention splash" in done.stdout and "\nFITS. " in done.stdout
    for program in ("prefill", "extend", "decode", "score", "accumulate", "apply"):
        assert f"\n  {program} " in done.stdout
