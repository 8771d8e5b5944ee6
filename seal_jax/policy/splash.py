"""The attention of groups as one fused TPU kernel: splash attention with a mask that knows the groups.

A group's tokens stand in one sequence, [prompt, row 0, row 1, ...]. A row's token sees the prompt and, causally, its
own row; the kernel never visits the blocks in which no query may see a key (a row beside another row). With a prompt
of one block and two rows of two blocks each (F = whole block, / = its causal half, . = skipped):

                prompt  row 0   row 1
    prompt        /      .  .    .  .
    row 0         F      /  .    .  .
                  F      F  /    .  .
    row 1         F      .  .    /  .
                  F      .  .    F  /

Padding is told by segment ids (1 = real, 0 = padding): a real token sees no padding.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from seal_jax.policy.sharding import BATCH_AXES

#: The kernel works on tiles of so many lanes: lengths must be multiples, and so must the width of a head.
LANES = 128
_BLOCKS = (512, 256, 128)


class GroupMask(masks.Mask):
    """Who may see whom in a group of `rows` rows of `length` tokens after a prompt of `prompt` tokens. Computed piece
    by piece: at 16,384 tokens the whole would be a quarter of a gigabyte.
    """

    def __init__(self, prompt: int, rows: int, length: int):
        self.prompt, self.rows, self.length = prompt, rows, length

    @property
    def shape(self) -> tuple[int, int]:
        n = self.prompt + self.rows * self.length
        return n, n

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        n = self.shape[0]
        query, key = (np.arange(n)[part] for part in idx)
        query, key = query[:, None], key[None, :]
        return (query >= key) & ((key < self.prompt) | (self._row(query) == self._row(key)))

    def _row(self, at: np.ndarray) -> np.ndarray:
        return (at - self.prompt) // max(self.length, 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupMask) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.prompt, self.rows, self.length))


def block_size(prompt: int, length: int) -> int:
    """The largest block that divides prompt and rows, so that no block holds two rows. ValueError if there is none."""
    for size in _BLOCKS:
        if prompt % size == 0 and length % size == 0:
            return size
    raise ValueError(
        f"policy.attention='splash' works on prompts and rows in multiples of {LANES} tokens, not {prompt} and "
        f"{length}; set config.buckets.prompt and suffix to multiples of {LANES}, or "
        "config.policy.attention='blockwise'"
    )


@functools.lru_cache(maxsize=64)
def _kernel(heads: int, prompt: int, rows: int, length: int) -> splash.SplashAttentionKernel:
    size = block_size(prompt, length)
    mask = masks.MultiHeadMask([GroupMask(prompt, rows, length)] * heads)
    sizes: dict[str, Any] = {
        **{name: size for name in ("block_q", "block_kv", "block_kv_compute", "block_q_dq", "block_kv_dq")},
        **{name: size for name in ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")},
    }
    # Made while something is traced, under an update's guard too, and kept: so its arrays go back to the host, where
    # they are constants of no device.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        kernel = splash.make_splash_mqa_single_device(mask, block_sizes=splash.BlockSizes(**sizes))
        return jax.tree.map(np.asarray, kernel)


def group_attention(
    q_btnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    real_bt: jax.Array,
    *,
    rows: int,
    length: int,
) -> jax.Array:
    """Mixed values [B,T,N,H] of groups whose tokens are [prompt, row 0, ...]: T = prompt + rows * length.

    `real_bt`: bool, False on padding. On a mesh, groups are split over its batch axes and heads over `tensor` (fewer
    key/value heads than that must divide it). Heads narrower than `LANES` are padded to it.
    """
    head_dim, prompt = q_btnh.shape[-1], q_btnh.shape[1] - rows * length
    n_kv_heads = k_btkh.shape[2]
    mesh = jax.sharding.get_abstract_mesh()
    split = not mesh.empty
    split_kv = split and n_kv_heads % mesh.shape["tensor"] == 0

    def local(q: jax.Array, k: jax.Array, v: jax.Array, real: jax.Array) -> jax.Array:
        if split and not split_kv:  # all key/value heads are here, but these query heads need only one of them
            mine = jax.lax.axis_index("tensor") * n_kv_heads // mesh.shape["tensor"]
            k, v = (jax.lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in (k, v))
        batch, tokens, n_kv, _ = k.shape
        repeat = q.shape[2] // n_kv  # consecutive query heads share a key/value head
        kernel = _kernel(repeat, prompt, rows, length)
        pad = [(0, 0)] * 3 + [(0, -head_dim % LANES)]
        q, k, v = (jnp.pad(x, pad) for x in (q * head_dim**-0.5, k, v))
        q = q.reshape(batch, tokens, n_kv, repeat, -1).transpose(0, 2, 3, 1, 4)
        k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
        segments = real.astype(jnp.int32)
        over_heads: Any = jax.vmap(kernel, in_axes=(0, 0, 0, None))
        out: Any = jax.vmap(over_heads)(q, k, v, splash.SegmentIds(segments, segments))
        return out[..., :head_dim].transpose(0, 3, 1, 2, 4).reshape(batch, tokens, n_kv * repeat, head_dim)

    if not split:
        return local(q_btnh, k_btkh, v_btkh, real_bt)
    of_q = PartitionSpec(BATCH_AXES, None, "tensor", None)
    of_kv = of_q if split_kv else PartitionSpec(BATCH_AXES)
    specs = (of_q, of_kv, of_kv, PartitionSpec(BATCH_AXES))
    return jax.shard_map(local, in_specs=specs, out_specs=of_q, check_vma=False)(q_btnh, k_btkh, v_btkh, real_bt)
