"""Attention heads that can copy from the first step: a start for a small policy with random weights.

Tool use is copying: names, ids and argument names go from docs, user text and results into calls. A pretrained model
has heads for that (Olsson et al. 2022, "In-context Learning and Induction Heads"); a random one finds them only after
long plateaus, in which every candidate looks alike. Here they are wired by hand and then trained like all else:

* layer 0: two heads look one and two tokens back, and write what stands there into a subspace of their own;
* layer 1: two heads look for a token whose predecessor (by one, by two) is the present token: induction;
* of the other heads above layer 0, the first five look at their neighbourhood, some further back than others; any more
  (one in the tiny policy) look where chance has them look;
* every head above layer 0 writes the token it looks at where the tied head reads it. The heads' subspaces are
  orthogonal and fill the model's width, so that heads that agree copy a token whole.

Positions are matched by biases under RoPE: a query bias that is the key bias turned back by d positions peaks at d.
Contents are matched in the dimensions that RoPE turns slowest.
"""

from __future__ import annotations

import numpy as np

from seal_jax.policy.config import Params, PolicyConfig
from seal_jax.policy.model import rope_inverse_frequencies
from seal_jax.policy.sharding import put, to_host

_SHARP = 6.0  # attention score by which a head of layer 0 prefers its place
_WIDE = 3.0  # attention score by which a head prefers its neighbourhood
_MATCH = 3.0  # gain of queries and keys that match contents
_COPY = 0.7  # length of a copied token beside that of a token's embedding, about
_NEIGHBOURHOODS = (10, 24, 8, 16, 32)  # tokens back, of the heads above layer 0 that are not induction heads
_REACH = 100  # tokens over which contents are matched


def wire_for_copying(config: PolicyConfig, params: Params, seed: int) -> Params:
    """`params` of a fresh policy with its heads wired; the arrays keep their shapes, dtypes and shardings.

    Raises ValueError for a shape that has no room: it takes one key/value head per query head, heads that fill the
    width, biases, tied embeddings and two layers.
    """
    c = config
    if not (c.n_kv_heads == c.n_heads >= 2 and c.n_heads * c.head_dim == c.d_model and c.qkv_bias and c.tied):
        raise ValueError(
            "policy: wired copying needs n_kv_heads = n_heads >= 2, n_heads * head_dim = d_model, qkv_bias and tied; "
            f"got {c.n_heads} heads, {c.n_kv_heads} key/value heads of {c.head_dim}, d_model={c.d_model}, "
            f"qkv_bias={c.qkv_bias}, tied={c.tied}"
        )
    if c.n_layers < 2:
        raise ValueError(f"policy: wired copying needs n_layers >= 2, got {c.n_layers}")
    rng = np.random.default_rng([seed, 0xC0])
    frequency = rope_inverse_frequencies(c).astype(np.float64)  # radians per token
    half = len(frequency)
    layers = {name: np.array(to_host(value)) for name, value in params["layers"].items()}
    q, k, v, o = (layers[name] for name in ("q_ldnh", "k_ldkh", "v_ldkh", "o_lnhd"))

    def basis(width: int) -> np.ndarray:
        """Orthonormal columns [D, width]."""
        return np.linalg.qr(rng.normal(size=(c.d_model, width)))[0]

    def hush(layer: int, head: int, keep: float) -> None:
        """Shrinks what random contents say about where a head looks."""
        q[layer, :, head] *= keep
        k[layer, :, head] *= keep

    def look_back(layer: int, head: int, distance: int, height_h2: np.ndarray) -> None:
        """Adds a preference for tokens `distance` back."""
        amplitude = np.sqrt(np.sqrt(c.head_dim) * height_h2)
        turned = amplitude * np.exp(-1j * distance * frequency)
        layers["k_bias_lkh"][layer, head] = np.concatenate([amplitude, np.zeros(half)])
        layers["q_bias_lnh"][layer, head] = np.concatenate([turned.real, turned.imag])

    # what stands in the way of a token's identity: random writes into the residual stream
    o *= 0.3
    layers["down_lfd"] *= 0.1
    write = _COPY / np.sqrt(c.head_dim)  # a head reads sqrt(head_dim) of a normalised token

    here = basis(c.head_dim)  # reads a token
    before = [basis(c.head_dim), basis(c.head_dim)]  # holds the token one back, two back
    for head in (0, 1):
        hush(0, head, keep=0.1)
        look_back(0, head, head + 1, _SHARP * np.exp(-np.arange(half) / 3.0))
        v[0, :, head], o[0, head] = here, write * before[head].T

    middle = (frequency > 0.02) & (frequency < 0.25)
    slow = np.flatnonzero(frequency * _REACH <= 1.0)
    slow_h = np.concatenate([slow, slow + half])
    neighbourhoods = iter(_NEIGHBOURHOODS)
    for layer in range(1, c.n_layers):
        whole = basis(c.d_model).reshape(c.d_model, c.n_heads, c.head_dim)
        for head in range(c.n_heads):
            v[layer, :, head], o[layer, head] = whole[:, head], write * whole[:, head].T
            if layer == 1 and head < 2:
                hush(layer, head, keep=0.1)
                q[layer][:, head, slow_h] += _MATCH * here[:, : len(slow_h)]
                k[layer][:, head, slow_h] += _MATCH * before[head][:, : len(slow_h)]
            elif middle.any() and (distance := next(neighbourhoods, None)):
                hush(layer, head, keep=0.5)
                look_back(layer, head, distance, _WIDE * middle / middle.sum())
    wired = {name: put(layers[name].astype(old.dtype), old.sharding) for name, old in params["layers"].items()}
    return {**params, "layers": wired}
