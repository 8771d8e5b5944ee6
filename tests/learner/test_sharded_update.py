"""One update on eight devices equals one device's, whatever the mesh; and what each device holds meanwhile."""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from seal_jax.checkpoints import Checkpoints
from seal_jax.learner.batch import Batch, Buckets, make_batch
from seal_jax.learner.loss import LossSettings
from seal_jax.learner.optimizer import OptimizerSettings
from seal_jax.learner.update import Learner, UpdateSettings
from seal_jax.learner.utility import utility_vector
from seal_jax.policy.config import Params, PolicyConfig, dimension_letters, param_shapes
from seal_jax.policy.sharding import make_mesh, param_spec, shard_params, whole_letters
from seal_jax.types import LABELS

from .toys import VOCAB, diagnosis, simple

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (forced) devices")

#: Sizes that tell each other apart in a compiled program, also when halved. One device has the 13 ids and no more; a
#: mesh pads them.
ONE = PolicyConfig(
    VOCAB, VOCAB, d_model=56, n_layers=5, n_heads=24, n_kv_heads=8, head_dim=10, d_ff=88, qkv_bias=True, head_chunk=64,
    remat="block",
)  # fmt: skip
MESHED = replace(ONE, padded_vocab=104)
OTHER = {"tied": False, "remat": "none", "n_layers": 3, "n_kv_heads": 4, "qkv_bias": False, "qk_norm": True}
BUCKETS = Buckets(prompt=(6,), suffix=(16,), turns=4)
# Without momentum the first moment is the gradient of the last step, and with eps = 1 the step follows it.
STEP = OptimizerSettings(learning_rate=0.1, b1=0.0, eps=1.0, weight_decay=0.0, clip_norm=1.0)


@functools.cache
def rows() -> Batch:
    """Eleven groups of one to three rows; rows and prompts are of uneven length, and one group teaches nothing."""
    rng = np.random.default_rng(0)
    groups, rewards, labels = [], [], []
    for b in range(11):
        n = (3, 2, 3, 1)[b % 4]
        prompt = range(1, 2 + b % 5)
        groups.append([simple(1 + (5 * b + 3 * g) % 9, f"t{b}", g, seed=10 * b + g, prompt=prompt) for g in range(n)])
        rewards.append([float((g + b) % 2) if b != 4 else 1.0 for g in range(n)])
        labels.append([diagnosis(*[LABELS[i] for i in rng.integers(0, 9, 2)]) for _ in range(n)])
    return make_batch(groups, rewards, labels, buckets=BUCKETS)


def some_params(config: PolicyConfig, seed: int, mesh=None) -> Params:
    """The same numbers for both vocabularies; what stands in the padding must not matter."""
    rng = np.random.default_rng(seed)

    def make(path: tuple, shape: tuple[int, ...]) -> np.ndarray:
        name = path[-1].key
        leaf = np.ones(shape) if "norm" in name else rng.normal(size=shape) / np.sqrt(config.d_model)
        letters = dimension_letters(name)
        pad = [(0, config.padded_vocab - VOCAB if letter == "v" else 0) for letter in letters]
        return np.pad(leaf, pad, constant_values=7.0).astype(np.float32)

    shapes = param_shapes(replace(config, padded_vocab=VOCAB))
    params = jax.tree_util.tree_map_with_path(make, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.device_put(params, jax.devices()[0]) if mesh is None else shard_params(config, params, mesh)


class Program:
    """A jitted function that keeps the text of the one program it was compiled to."""

    def __init__(self, jitted) -> None:
        self.jitted, self.compiled = jitted, None

    def __call__(self, *args):
        if self.compiled is None:
            self.compiled = self.jitted.lower(*args).compile()
        return self.compiled(*args)

    def _cache_size(self) -> int:
        return self.compiled is not None

    def arrays(self) -> set[tuple[int, ...]]:
        """The shapes of everything that a device computes."""
        text = self.compiled.as_text()
        results = re.findall(r"^ *(?:ROOT )?%?[\w.-]+ = (.*?) [\w-]+\(", text, re.MULTILINE)
        shapes = re.findall(r"\b[a-z]+\d*\[([\d,]*)\]", " ".join(results))
        return {tuple(int(n) for n in shape.split(",") if n) for shape in shapes}


def updated(config: PolicyConfig, mesh=None) -> tuple[Learner, dict[str, float]]:
    """After two steps on a batch whose halves fill no micro-batch, with a KL to other params and weighted labels."""
    learner = Learner(
        config,
        some_params(config, 0, mesh),
        reference_params=some_params(config, 1, mesh),
        buckets=BUCKETS,
        loss=LossSettings(reweight="turn", kl_coef=0.1),
        optimizer=STEP,
        update=UpdateSettings(minibatches=2, prompts_per_micro=8, temperature=0.8),
        mesh=mesh,
    )
    names = ("score", "accumulate", "apply")
    learner.programs = replace(learner.programs, **{n: Program(getattr(learner.programs, n)) for n in names})
    return learner, learner.update(rows(), round=0, utility_z=utility_vector())


@functools.cache
def on_one_device(config: PolicyConfig):
    learner, metrics = updated(config)
    return jax.device_get(learner.state), metrics


def real(path, leaf: np.ndarray) -> np.ndarray:
    """Without the padding of the vocabulary."""
    name = path[-1].key if hasattr(path[-1], "key") else ""
    return leaf[:VOCAB] if name == "embed_vd" else leaf[:, :VOCAB] if name == "head_dv" else leaf


def assert_same(mesh_shape: tuple[int, int, int], **changes) -> Learner:
    want, want_metrics = on_one_device(replace(ONE, **changes))
    learner, metrics = updated(replace(MESHED, **changes), make_mesh(mesh_shape))
    assert metrics.keys() == want_metrics.keys()
    for name in metrics.keys() - {"seconds/score", "seconds/update"}:
        if name not in ("norm/params", "compilations"):  # padding rows have a norm too
            np.testing.assert_allclose(metrics[name], want_metrics[name], rtol=1e-5, atol=1e-5, err_msg=name)
    got = jax.tree_util.tree_leaves_with_path(jax.device_get(learner.state))
    for (path, leaf), (_, like) in zip(got, jax.tree_util.tree_leaves_with_path(want), strict=True):
        error = jax.tree_util.keystr(path)
        np.testing.assert_allclose(real(path, leaf), real(path, like), rtol=0, atol=1e-5, err_msg=error)
    return learner


def assert_split(learner: Learner, config: PolicyConfig) -> None:
    """Each leaf of the state lies as its parameter's name says, and a device holds its share of it and no more."""
    state, mesh = learner.state, learner.mesh
    (adam,) = (s for s in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(s))
    for tree in (state.params, learner.reference, adam.mu, adam.nu):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = path[-1].key
            assert leaf.sharding.spec == param_spec(name, whole_letters(config, mesh)), name
            parts = math.prod(mesh.shape[axis] for axis in leaf.sharding.spec if axis is not None)
            assert leaf.addressable_shards[0].data.size * parts == leaf.size, name
    moments = len(jax.tree.leaves((adam.mu, adam.nu)))
    assert [x.shape for x in jax.tree.leaves(state.opt_state)].count(()) == len(
        jax.tree.leaves(state.opt_state)
    ) - moments


def is_adam(state) -> bool:
    return hasattr(state, "mu")


def assert_nothing_whole(learner: Learner, config: PolicyConfig) -> None:
    """No program ever holds a whole parameter that is split, whole logits, or activations of others' groups."""
    mesh = learner.mesh
    tokens = BUCKETS.prompt[0] + 3 * BUCKETS.suffix[0]
    local = 8 // (mesh.shape["data"] * mesh.shape["fsdp"])
    leaves = jax.tree_util.tree_leaves_with_path(learner.params)
    forbidden = {shape: path[-1].key for path, leaf in leaves if leaf.ndim > 1 for shape in less_split(leaf)}
    for program in (learner.programs.score, learner.programs.accumulate, learner.programs.apply):
        arrays = program.arrays()
        found = {forbidden.get(tuple(sorted(n for n in shape if n > 1))) for shape in arrays} - {None}
        assert not found
        if mesh.shape["fsdp"] * mesh.shape["tensor"] > 1:
            shards = {leaf.addressable_shards[0].data.size for _, leaf in leaves}
            assert not [x for x in arrays if config.padded_vocab in x and math.prod(x) not in shards]
        for shape in arrays:
            shape = tuple(itertools.dropwhile(lambda n: n == 1, shape))
            for n in (n for n in (2, 4, 8) if n > local):  # that many groups, flat or not
                width = shape[1:] if shape[:1] == (n * tokens,) else shape[2:] if shape[:2] == (n, tokens) else ()
                if width == (config.head_dim,):  # this device's places times heads, which may come to the same number
                    continue
                # of others' groups there are ids, and embeddings in this device's part of the width
                assert math.prod(width) <= config.d_model // mesh.shape["fsdp"], shape


def less_split(leaf: jax.Array) -> set[tuple[int, ...]]:
    """Shapes (sorted, without ones) of a parameter that is gathered over some axis, also with dimensions merged."""
    part = leaf.addressable_shards[0].data.shape
    out = set()
    for shape in itertools.product(*({n, whole} for n, whole in zip(part, leaf.shape, strict=True))):
        for joined in itertools.product((False, True), repeat=leaf.ndim - 2) if shape != part else ():
            merged = list(shape[:2])
            for n, join in zip(shape[2:], joined, strict=True):
                merged[-1:] = [merged[-1] * n] if join else [merged[-1], n]
            out.add(tuple(sorted(n for n in merged if n > 1)))
    return out


@pytest.mark.parametrize("shape", [(2, 2, 2)])
def test_an_update_on_a_mesh_is_that_of_one_device(shape):
    """Parameters, gradients (the first moments) and metrics to 1e-5 in float32."""
    learner = assert_same(shape)
    assert_split(learner, MESHED)
    assert_nothing_whole(learner, MESHED)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, OTHER])
@pytest.mark.parametrize(
    "shape", [(8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8), (1, 4, 2), (1, 2, 4)]
)
def test_an_update_on_any_mesh_is_that_of_one_device(shape, changes):
    """Of the second policy, tensor = 8 is more than its key/value heads."""
    learner = assert_same(shape, **changes)
    assert_split(learner, replace(MESHED, **changes))
    assert_nothing_whole(learner, replace(MESHED, **changes))


@pytest.mark.slow
def test_training_goes_on_on_another_mesh(tmp_path):
    """Two rounds on one device equal one on eight devices and one on four, through a checkpoint."""
    want = updated(ONE)[0]
    want.update(rows(), round=1, utility_z=utility_vector())
    first, _ = updated(MESHED, make_mesh((2, 2, 2)))
    second, _ = updated(replace(ONE, padded_vocab=14), make_mesh((1, 2, 2), jax.devices()[4:]))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, first.state, {})
        second.state, _ = checkpoints.restore(second.state)
    second.update(rows(), round=1, utility_z=utility_vector())
    for (path, leaf), (_, like) in zip(
        jax.tree_util.tree_leaves_with_path(jax.device_get(second.state)),
        jax.tree_util.tree_leaves_with_path(jax.device_get(want.state)),
        strict=True,
    ):
        np.testing.assert_allclose(real(path, leaf), real(path, like), rtol=0, atol=2e-5, err_msg=str(path))
