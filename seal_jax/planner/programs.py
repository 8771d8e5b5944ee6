"""The run's own jitted functions, and arguments for them that are only shapes on a slice's mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from seal_jax.assembly import learner_settings
from seal_jax.learner.batch import Batch
from seal_jax.learner.loss import Denominators
from seal_jax.learner.optimizer import make_optimizer
from seal_jax.learner.programs import Params, Programs, TrainState, join, make_programs, state_shardings
from seal_jax.policy import lora
from seal_jax.policy.config import PolicyConfig, param_shapes
from seal_jax.policy.local import local_mesh
from seal_jax.policy.model import KV
from seal_jax.policy.sharding import batch_sharding, param_shardings
from seal_jax.rollout.engine import RolloutEngine, kv_sharding
from seal_jax.types import LABELS

#: User turns of a batch. Only a few small arrays depend on it.
_TURNS = 8


@dataclass(frozen=True)
class Grid:
    """The shape of a device call: groups (all chips together), their rows, and the buckets of prompt and suffix."""

    groups: int
    rows: int
    prompt: int
    suffix: int

    def __str__(self) -> str:
        return f"{self.groups} x {self.rows} rows, prompt {self.prompt:,}, suffix {self.suffix:,}"


class Abstract:
    """A run's programs for `policy` on `mesh`, none of whose devices needs to exist. Of a mesh of several hosts, `host`
    are the devices that stand for one: libtpu numbers what it compiles for from 0 on, and a slice's hosts do not all
    (of v5e:4x4 the first has the chips 0, 1, 4 and 5)."""

    def __init__(self, config: ConfigDict, policy: PolicyConfig, mesh: Mesh, host: Sequence[Any] = ()):
        self.config, self.policy, self.mesh = config, policy, mesh
        #: Where rollouts are played: the slice itself, or where it has several hosts, one of these.
        self.playing = local_mesh(mesh, mesh.devices.flat[0].process_index)
        if self.playing.size < mesh.size:
            own = np.asarray(host).reshape(self.playing.devices.shape)
            self.playing = Mesh(own, self.playing.axis_names, axis_types=self.playing.axis_types)
        settings = learner_settings(config)
        self.kl = settings["loss"].kl_coef > 0
        self.base, self.trained = abstract_params(policy, mesh)
        self._optimizer = make_optimizer(settings["optimizer"])
        shardings = state_shardings(self.trained, self._optimizer, mesh)
        self.state = self._abstract_state(shardings)
        self._programs: Programs = make_programs(
            policy, settings["loss"], self._optimizer, shardings, temperature=config.temperature
        )
        self._batch = batch_sharding(mesh)
        # The planner runs on a CPU, where an engine would unroll the layers; no TPU does.
        self._engine = RolloutEngine(
            policy,
            stop_ids=[0],
            prompt_buckets=config.buckets.prompt,
            suffix_buckets=config.buckets.suffix,
            chunk_buckets=config.buckets.chunk,
            group_buckets=config.buckets.groups,
            max_new_tokens=config.limits.max_new_tokens,
            decode_size=config.buckets.decode,
            mesh=self.playing,
            unroll=False,
        )
        # A host's copy of the parameters, with one host the parameters themselves.
        self.acting = join(*abstract_params(policy, self.playing))
        self.decode_size = self._engine.decode_size

    @property
    def params(self) -> Params:
        return join(self.base, self.trained)

    def _abstract_state(self, shardings: TrainState) -> TrainState:
        def make(params: Params) -> TrainState:
            return TrainState(params, self._optimizer.init(params), jnp.int32(0))

        return jax.tree.map(_placed, jax.eval_shape(make, self.trained), shardings)

    # --- the update ---
    def accumulate(self, grid: Grid) -> jax.stages.Lowered:
        whole = Denominators(*(_scalar(jnp.float32),) * 4)
        utility_z = jax.ShapeDtypeStruct((len(LABELS),), jnp.float32)
        micro = self._micro(grid)
        return self._programs.accumulate.lower(self.trained, self.trained, self.base, micro, whole, utility_z)

    def score(self, grid: Grid) -> jax.stages.Lowered:
        return self._programs.score.lower(self.params, self._micro(grid))

    def apply(self) -> jax.stages.Lowered:
        return self._programs.apply.lower(self.state, self.trained)

    def _micro(self, grid: Grid) -> Batch:
        b, g, p, s = grid.groups, grid.rows, grid.prompt, grid.suffix

        def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._batch)

        return Batch(
            prompt_ids_bp=of(jnp.int32, b, p),
            prompt_len_b=of(jnp.int32, b),
            suffix_ids_bgs=of(jnp.int32, b, g, s),
            suffix_len_bg=of(jnp.int32, b, g),
            loss_mask_bgs=of(jnp.bool_, b, g, s),
            turn_id_bgs=of(jnp.int32, b, g, s),
            cue_mask_bgs=of(jnp.bool_, b, g, s),
            sample_logp_bgs=of(jnp.float32, b, g, s),
            old_logp_bgs=of(jnp.float32, b, g, s),
            ref_logp_bgs=of(jnp.float32, b, g, s),
            reward_bg=of(jnp.float32, b, g),
            labels_bgt=of(jnp.int32, b, g, _TURNS),
            row_mask_bg=of(jnp.bool_, b, g),
            reward_mask_bg=of(jnp.bool_, b, g),
        )

    # --- rollouts ---
    def prefill(self, grid: Grid) -> jax.stages.Lowered:
        ids, length = self._ints(grid.groups, grid.prompt), self._ints(grid.groups)
        return self._engine._prefill.lower(self.acting, ids, length)

    def extend(self, grid: Grid, chunk: int) -> jax.stages.Lowered:
        rows, row_ints = self._rows(grid, grid.suffix), self._ints(grid.groups, grid.rows)
        return self._engine._extend.lower(
            self.acting,
            self._prompt(grid),
            self._ints(grid.groups),
            rows=rows,
            row_len_bg=row_ints,
            hidden_bgd=self._hidden(grid),
            ids_bgc=self._ints(grid.groups, grid.rows, chunk),
            len_bg=row_ints,
        )

    def decode(self, grid: Grid) -> jax.stages.Lowered:
        row_ints = self._ints(grid.groups, grid.rows)
        return self._engine._decode.lower(
            self.acting,
            self._prompt(grid),
            self._ints(grid.groups),
            rows=self._rows(grid, grid.suffix),
            row_len_bg=row_ints,
            hidden_bgd=self._hidden(grid),
            limit_bg=row_ints,
            seed_bg=jax.ShapeDtypeStruct(row_ints.shape, jnp.uint32, sharding=row_ints.sharding),
            temperature=_scalar(jnp.float32),
        )

    def caches(self, grid: Grid) -> tuple[KV, KV]:
        """What a session holds between calls: the prompts' cache and the rows'."""
        return self._prompt(grid), self._rows(grid, grid.suffix)

    def _kv(self, *lead: int, size: int) -> KV:
        keys, values = (*lead, self.policy.head_dim, size), (*lead, size, self.policy.head_dim)
        sharding = kv_sharding(self.policy, self.playing, stacked=True)
        made: Any = (jax.ShapeDtypeStruct(x, self.policy.compute_dtype, sharding=sharding) for x in (keys, values))
        return KV(*made)

    def _prompt(self, grid: Grid) -> KV:
        return self._kv(self.policy.n_layers, grid.groups, self.policy.n_kv_heads, size=grid.prompt)

    def _rows(self, grid: Grid, size: int) -> KV:
        return self._kv(self.policy.n_layers, grid.groups, self.policy.n_kv_heads, grid.rows, size=size)

    def _hidden(self, grid: Grid) -> jax.ShapeDtypeStruct:
        shape = (grid.groups, grid.rows, self.policy.d_model)
        return jax.ShapeDtypeStruct(shape, self.policy.compute_dtype, sharding=batch_sharding(self.playing))

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(self.playing))


def abstract_params(policy: PolicyConfig, mesh: Mesh) -> tuple[Params, Params]:
    """(what is frozen, what is trained) as shapes, each where it lives on the mesh."""

    def walk(shapes: dict[str, Any], shardings: dict[str, Any]) -> Params:
        return {
            name: walk(shape, shardings[name])
            if isinstance(shape, dict)
            else jax.ShapeDtypeStruct(shape, lora.stored_dtype(policy, name), sharding=shardings[name])
            for name, shape in shapes.items()
        }

    return lora.split(walk(param_shapes(policy), param_shardings(policy, mesh)))


def bytes_per_chip(tree: Any) -> int:
    """Bytes that one chip holds of a tree of shapes with shardings."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _scalar(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)
