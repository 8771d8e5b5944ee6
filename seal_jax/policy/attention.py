"""Attention of the rows of a group to the prompt they share and to themselves, in blocks.

Letters as in `policy.model`. The softmax runs over several parts (prompt, earlier tokens, the present ones) together
without ever joining them, and over a block of queries at a time: the scores of a whole sequence never exist, in the
backward pass neither (a block's scores are recomputed there).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: Score of a key that may not be seen. Finite, so that a row without any real key stays free of NaN.
HIDDEN = -1e30
#: Attention scores that exist at one time where the config leaves it open: a gigabyte, or what a CPU's caches like.
BLOCKWISE_BUDGET, _CPU_BUDGET = 2**28, 2**24
#: Queries are cut into at most so many segments of at least so many: a segment meets no key after its last query, so
#: of the half of the scores that the causal rule hides, three quarters are not computed. Each compiles by itself.
_SEGMENTS, _SEGMENT = 4, 512


class Past(NamedTuple):
    """One layer's keys and values from before the present tokens, and which of them are real."""

    keys: jax.Array  # [B, K, H, T] shared by a group's rows, or [B, K, G, H, T]
    values: jax.Array  # [B, K, T, H] or [B, K, G, T, H]
    valid: jax.Array  # bool, broadcastable to [B, K, G, R, S, T]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, pasts: Sequence[Past], budget: int | None) -> jax.Array:
    """Attention of queries [B,K,G,R,S,H] to all valid past keys, and causally to their own keys [B,K,G,H,S] and values
    [B,K,G,S,H]; gives mixed values [B,K,G,R,S,H].

    No more than about `budget` scores exist at one time (None: what suits the backend).
    """
    length = q.shape[-2]
    if budget is None:
        budget = _CPU_BUDGET if jax.default_backend() == "cpu" else BLOCKWISE_BUDGET
    n_segments = max(1, min(_SEGMENTS, length // _SEGMENT))
    if n_segments == 1:
        return _segment(q, k, v, pasts, 0, budget, last=True)
    bounds = [length * i // n_segments for i in range(n_segments + 1)]
    out = [
        _segment(q[..., start:end, :], k[..., :end], v[..., :end, :], pasts, start, budget, last=False)
        for start, end in itertools.pairwise(bounds)
    ]
    return jnp.concatenate(out, axis=-2)


def _segment(
    q: jax.Array, k: jax.Array, v: jax.Array, pasts: Sequence[Past], start: int, budget: int, last: bool
) -> jax.Array:
    """`attend` for queries that stand at `start` and after it among the keys, block by block."""
    scale = q.shape[-1] ** -0.5

    def block(q: jax.Array, first: jax.Array | int) -> jax.Array:
        at = first + jnp.arange(q.shape[-2])
        causal = at[:, None] >= jnp.arange(k.shape[-1])
        parts = [*pasts, Past(k, v, causal)]
        scores = [jnp.where(part.valid, _shared_matmul(q, part.keys) * scale, HIDDEN) for part in parts]
        top = functools.reduce(jnp.maximum, [score.max(-1, keepdims=True) for score in scores])
        top = jax.lax.stop_gradient(top)
        weights = [jnp.exp(score - top) for score in scores]
        total = sum(weight.sum(-1, keepdims=True) for weight in weights)
        out: Any = 0.0
        for part, weight in zip(parts, weights, strict=True):
            out += _shared_matmul(weight.astype(v.dtype), part.values)
        return (out / total).astype(v.dtype)

    length = q.shape[-2]
    n_keys = k.shape[-1] + sum(past.keys.shape[-1] for past in pasts)
    size = _block_size(length, scores_per_query=q.size // (length * q.shape[-1]) * n_keys, budget=budget)
    if size == length:
        return block(q, start) if last else jax.checkpoint(block)(q, start)
    n_blocks = -(-length // size)
    q = jnp.pad(q, [(0, 0)] * 4 + [(0, n_blocks * size - length), (0, 0)])
    q = jnp.moveaxis(q.reshape(*q.shape[:4], n_blocks, size, q.shape[-1]), 4, 0)
    out = jax.lax.map(lambda args: jax.checkpoint(block)(*args), (q, start + size * jnp.arange(n_blocks)))
    out = jnp.moveaxis(out, 0, 4)
    return out.reshape(*out.shape[:4], n_blocks * size, out.shape[-1])[..., :length, :]


def _shared_matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    """x [B,K,G,R,S,I] times y [B,K,I,J] (shared by a group's rows) or [B,K,G,I,J]; float32 [B,K,G,R,S,J].

    All rows of x that meet the same matrix are one axis: on CPU a product with two free axes costs twice as much.
    """
    flat = x.reshape(*x.shape[: y.ndim - 2], -1, x.shape[-1])
    return jnp.matmul(flat, y, preferred_element_type=jnp.float32).reshape(*x.shape[:-1], y.shape[-1])


def _block_size(length: int, scores_per_query: int, budget: int) -> int:
    """Queries per block: all of them if their scores fit the budget, else the largest fitting power of two (at least
    16).
    """
    if length * scores_per_query <= budget:
        return length
    return min(
        length, max(16, 1 << ((budget // scores_per_query).bit_length() - 1) if budget >= scores_per_query else 16)
    )
