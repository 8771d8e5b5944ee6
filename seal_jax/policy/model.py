"""The policy: a decoder in Flax NNX for Qwen2/2.5, Qwen3, Llama 3.x and SmolLM2, and the functions around it.

Dimension letters: b groups, g rows of a group, s (or c) tokens of a row's suffix, p prompt tokens, t keys, d model
width, l layers, n query heads, k key/value heads, r query heads per key/value head (n = k * r), h head width, f MLP
width, v vocabulary, a rank of the adapters.

**Two-part attention.** The rows of a group share their prompt, so the prompt is computed once and its keys are read
by all rows. A row's token s stands at position prompt_len + s. It sees the prompt's real tokens and its own row up to
itself. With a prompt of 2 tokens in a bucket of 3 and a row of 3 tokens in a bucket of 4 (1 = may look; `.` =
padding, computed but never read):

               prompt     own row
               p0 p1 .    s0 s1 s2 .
    query s0    1  1 0     1  0  0 0        position 2
    query s1    1  1 0     1  1  0 0        position 3
    query s2    1  1 0     1  1  1 0        position 4
    query .     1  1 0     1  1  1 1        never read

Padding stands on the right, so the causal rule already hides a row's padding from its real tokens; prompt padding is
hidden by the prompt's length. Masks come from lengths, never from ids. The cached path (`extend`) adds a third part,
the row's earlier tokens, and is otherwise the same code.

Parameters are float32 masters, computation is in `config.compute_dtype`; softmax, norms and logits are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from seal_jax.policy import splash
from seal_jax.policy.attention import Past, attend
from seal_jax.policy.config import ADAPTERS, Params, PolicyConfig, dimension_letters, is_adapter, param_shapes
from seal_jax.policy.lora import initial_adapter, lora_scale
from seal_jax.policy.sharding import BATCH_AXES, VOCAB_AXES, constrain, gather_layer, gathers, param_shardings

#: Trunks of so few layers are unrolled: compiling them does not take long.
SHALLOW = 4


class KV(NamedTuple):
    """Keys (after norm and RoPE) and values of all layers.

    Of a prompt: keys [L, B, K, H, P], values [L, B, K, P, H]. Of rows: keys [L, B, K, G, H, S], values [L, B, K, G,
    S, H]. Keys are kept transposed: scores of a single query are then sums of whole rows (3x faster on CPU), and no
    matrix product ever transposes a cache.
    """

    keys: jax.Array
    values: jax.Array


# --- building blocks -------------------------------------------------------------------------------------------------
def rope_inverse_frequencies(config: PolicyConfig) -> np.ndarray:
    """Angle per position of each half-dimension, float32 [H/2]; with Llama 3's scaling where the config has it."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    inv_freq = config.rope_theta**-exponent
    scaling = config.rope_scaling
    if scaling is not None:
        # turns made within the original context: few turns -> slow dimension, interpolated; many -> kept; between ->
        # ramp
        turns = scaling.original_max_position * inv_freq / (2 * np.pi)
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        inv_freq = keep * inv_freq + (1 - keep) * inv_freq / scaling.factor
    return inv_freq.astype(np.float32)


def _rotation(config: PolicyConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin [..., 1, H/2] for integer positions [...], to be broadcast over heads."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """RoPE on [..., heads, H], pairing dimension i with i + H/2 (the convention of the Hugging Face checkpoints)."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] / rms(x) * weight [D], computed in float32.

    Its gradient is written out: XLA's own sums of products are 20 times slower on CPU than products with a vector.
    """
    x32 = x.astype(jnp.float32)
    return (x32 * _inverse_rms(x32, eps) * weight).astype(x.dtype)


def _inverse_rms(x32: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)


def _rms_norm_bwd(eps: float, kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With i = 1 / rms(x): dx = i (w g - x i^2 mean(x w g)) and dw = sum of i x g over all places."""
    x, weight = kept
    x32, grad32 = x.astype(jnp.float32), grad.astype(jnp.float32)
    inverse = _inverse_rms(x32, eps)
    both = x32 * grad32
    dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    mean = dot("...d,d->...", both, weight)[..., None] / x.shape[-1]
    x_grad = inverse * (weight * grad32 - x32 * inverse**2 * mean)
    return x_grad.astype(x.dtype), dot("...d,...->d", both, inverse[..., 0]).astype(weight.dtype)


_rms_norm.defvjp(lambda x, weight, eps: (_rms_norm(x, weight, eps), (x, weight)), _rms_norm_bwd)


def _dense(x: jax.Array, weight: jax.Array, inputs: int = 1) -> jax.Array:
    """x [..., D] times weight over D, the first `inputs` dimensions of the weight, as one flat matrix product (much
    faster on CPU than a high-rank einsum).
    """
    flat = x.reshape(-1, x.shape[-1]) @ weight.reshape(x.shape[-1], -1).astype(x.dtype)
    return flat.reshape(*x.shape[:-1], *weight.shape[inputs:])


# --- the module ------------------------------------------------------------------------------------------------------
class Layers(nnx.Module):
    """The stacked parameters of all blocks; the leading axis l is scanned over, so compile time does not grow with
    depth.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], config: PolicyConfig, rngs: nnx.Rngs):
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(_initial(name, shape, config, rngs.params())))


class Decoder(nnx.Module):
    """The decoder. Its parameters are named as in `param_shapes`; its methods do the work of the functions below."""

    embed_vd: nnx.Param
    final_norm_d: nnx.Param
    head_dv: nnx.Param  # absent when tied

    def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
        self.config = config
        for name, shape in param_shapes(config).items():
            if name == "layers":
                self.layers = Layers(shape, config, rngs)
            else:
                setattr(self, name, nnx.Param(_initial(name, shape, config, rngs.params())))

    @classmethod
    def from_params(cls, config: PolicyConfig, params: Params) -> Decoder:
        """A module around a pure dict of arrays (no copy)."""
        return nnx.merge(_graphdef(config), params)

    def to_params(self) -> Params:
        """The pure dict of arrays that `from_params` takes."""
        return nnx.to_pure_dict(nnx.state(self, nnx.Param))

    # -- trunk
    def embed(self, ids: jax.Array) -> jax.Array:
        # on a mesh: the ids of all groups along fsdp are looked up in this device's part of the width
        table, ids = constrain(self.embed_vd[...], "tensor", "fsdp"), constrain(ids, "data")
        x = constrain(table[ids].astype(self.config.compute_dtype), "data", None, "fsdp")
        return constrain(x, BATCH_AXES)

    def block(self, layer: Params, x_btd: jax.Array, rotation: tuple, attention: Any) -> tuple[jax.Array, Any]:
        """One layer. `attention(q_btnh, k_btkh, v_btkh)` decides who sees whom; it gives mixed values [B,T,N*H] and
        what to keep.
        """
        config = self.config
        y = _rms_norm(x_btd, layer["attn_norm_ld"], config.norm_eps)
        q, k, v = (self.project(layer, name, y) for name in ("q_ldnh", "k_ldkh", "v_ldkh"))
        if config.qkv_bias:
            q = q + layer["q_bias_lnh"].astype(q.dtype)
            k = k + layer["k_bias_lkh"].astype(k.dtype)
            v = v + layer["v_bias_lkh"].astype(v.dtype)
        if config.qk_norm:  # before RoPE
            q = _rms_norm(q, layer["q_norm_lh"], config.norm_eps)
            k = _rms_norm(k, layer["k_norm_lh"], config.norm_eps)
        mixed, kept = attention(_rotate(q, rotation), _rotate(k, rotation), v)
        x = x_btd + self.project(layer, "o_lnhd", mixed)
        y = _rms_norm(x, layer["mlp_norm_ld"], config.norm_eps)
        y = nnx.silu(self.project(layer, "gate_ldf", y)) * self.project(layer, "up_ldf", y)
        return x + self.project(layer, "down_lfd", y), kept

    def project(self, layer: Params, name: str, x: jax.Array) -> jax.Array:
        """x [B,T,inputs] through a projection W of a layer and its adapter (A, B), if any: x W + alpha/rank (x A) B."""
        inputs = 2 if name == "o_lnhd" else 1  # n and h, which are one dimension of x
        y = _dense(x, layer[name], inputs)
        if not self.config.lora_rank:
            return y
        first, second = ADAPTERS[name]
        return y + lora_scale(self.config) * _dense(_dense(x, layer[first], inputs), layer[second])

    def row_attention(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rows: int, pasts: Sequence[Past] = ()
    ) -> tuple[jax.Array, KV]:
        """Attention of `rows` rows that stand side by side in t: each sees the pasts and, causally, itself.

        Returns mixed values [B,T,N*H] and the rows' own keys [B,K,G,H,S] and values [B,K,G,S,H].
        """
        config = self.config
        batch, tokens = q.shape[:2]
        n_kv, repeat, head_dim = config.n_kv_heads, config.n_heads // config.n_kv_heads, config.head_dim
        # consecutive query heads share a key/value head: n = k * repeat + r
        q = q.reshape(batch, rows, -1, n_kv, repeat, head_dim).transpose(0, 3, 1, 4, 2, 5)
        k = k.reshape(batch, rows, -1, n_kv, head_dim).transpose(0, 3, 1, 4, 2)
        v = v.reshape(batch, rows, -1, n_kv, head_dim).transpose(0, 3, 1, 2, 4)
        mixed = attend(q, k, v, pasts, config.attention_budget)
        return mixed.transpose(0, 2, 4, 1, 3, 5).reshape(batch, tokens, -1), KV(k, v)

    def _scan(self, body: Any, carry: Any, *stacked: Any) -> tuple[Any, Any]:
        """Runs body(carry, layer, *slices) -> (carry, out) over the layers."""

        def step(carry: Any, slices: tuple) -> tuple[Any, Any]:
            layer, *others = slices
            carry, out = body(constrain(carry, BATCH_AXES), gather_layer(self.config, layer), *others)
            return constrain(carry, BATCH_AXES), out

        if self.config.remat == "block":
            step = jax.checkpoint(step, prevent_cse=False)
        elif gathers():  # keep the products, but not the gathered weights of every layer
            step = jax.checkpoint(step, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)
        # a scan stacks what the backward pass needs: for a shallow trunk that costs more than a longer compilation
        unroll = self.config.n_layers if self.config.n_layers <= SHALLOW else 1
        return jax.lax.scan(step, carry, (self.layer_params(), *stacked), unroll=unroll)

    def prefill(self, prompt_ids_bp: jax.Array, prompt_len_b: jax.Array) -> tuple[jax.Array, KV]:
        """The prompts alone: final hidden states [B,P,D] and their cache."""
        rotation = _rotation(self.config, jnp.arange(prompt_ids_bp.shape[1])[None])
        real_bp = _first(prompt_len_b, prompt_ids_bp.shape[1])

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, KV]:
            if self.config.attention == "splash":
                mixed = splash.group_attention(q, k, v, real_bp, rows=0, length=0).reshape(*q.shape[:2], -1)
                return mixed, KV(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))
            mixed, kv = self.row_attention(q, k, v, rows=1)
            return mixed, KV(kv.keys[:, :, 0], kv.values[:, :, 0])

        x, kv = self._scan(
            lambda x, layer: self.block(layer, x, rotation, attention), self.embed(_clean(prompt_ids_bp, prompt_len_b))
        )
        return self.final_norm(x), kv

    def suffix_hidden(self, prompt_ids_bp, prompt_len_b, suffix_ids_bgs, suffix_len_bg) -> jax.Array:
        """Final hidden states [B,G,S,D] of the rows.

        A group's tokens, t = [prompt, row 0, row 1, ...], go through each layer together; only attention tells them
        apart.
        """
        (batch, p), (_, rows, s) = prompt_ids_bp.shape, suffix_ids_bgs.shape
        prompt_valid = _first(prompt_len_b, p)[:, None, None, None, None]

        def join(prompt: jax.Array, suffix: jax.Array) -> jax.Array:
            return jnp.concatenate([prompt, suffix.reshape(batch, rows * s)], axis=1)

        positions = prompt_len_b[:, None, None] + jnp.arange(s)
        positions = join(jnp.broadcast_to(jnp.arange(p), (batch, p)), jnp.broadcast_to(positions, (batch, rows, s)))
        rotation = _rotation(self.config, positions)
        real_bt = join(_first(prompt_len_b, p), _first(suffix_len_bg, s))

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            if self.config.attention == "splash":
                mixed = splash.group_attention(q, k, v, real_bt, rows=rows, length=s)
                return mixed.reshape(*q.shape[:2], -1), None
            in_prompt, kv = self.row_attention(q[:, :p], k[:, :p], v[:, :p], rows=1)
            past = Past(kv.keys[:, :, 0], kv.values[:, :, 0], prompt_valid)
            in_rows, _ = self.row_attention(q[:, p:], k[:, p:], v[:, p:], rows, [past])
            return jnp.concatenate([in_prompt, in_rows], axis=1), None

        x = self.embed(join(_clean(prompt_ids_bp, prompt_len_b), _clean(suffix_ids_bgs, suffix_len_bg)))
        x, _ = self._scan(lambda x, layer: self.block(layer, x, rotation, attention), x)
        return self.final_norm(x[:, p:].reshape(batch, rows, s, -1))

    def extend(
        self, ids_bgc: jax.Array, first_bg: jax.Array, pasts: Sequence[tuple[Any, jax.Array]], layers: Any = None
    ) -> tuple[jax.Array, Any]:
        """New tokens of rows whose earlier tokens are cached.

        `first_bg` is the position of each row's first new token; `pasts` are caches (KV) with masks of what is real
        in them (bool, broadcastable to [B,K,G,R,C,T]). Returns final hidden states [B,G,C,D] and the new tokens' KV.
        The caches are only read: writing is the caller's, who can do it once for all layers.

        With `layers` (from `unstack`) the layers are unrolled instead of scanned, and every KV, in and out, is a list
        with one per layer. That is for CPU, where a scan copies each layer's cache and weights at every call.
        """
        batch, rows, c = ids_bgc.shape
        positions = first_bg[..., None] + jnp.arange(c)
        rotation = _rotation(self.config, positions.reshape(batch, rows * c))
        caches, valids = [kv for kv, _ in pasts], [valid for _, valid in pasts]

        def body(x: jax.Array, layer: Params, caches: Sequence[KV]) -> tuple[jax.Array, KV]:
            seen = [Past(*kv, valid) for kv, valid in zip(caches, valids, strict=True)]
            return self.block(layer, x, rotation, lambda q, k, v: self.row_attention(q, k, v, rows, seen))

        x = self.embed(ids_bgc.reshape(batch, rows * c))
        if layers is None:
            x, new = self._scan(body, x, caches)
        else:
            new = []
            for i, layer in enumerate(layers):
                x, one = body(x, layer, [cache[i] for cache in caches])
                new.append(one)
        return self.final_norm(x.reshape(batch, rows, c, -1)), new

    def layer_params(self) -> Params:
        """The stacked parameters of the blocks as a dict."""
        return nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))

    def final_norm(self, x: jax.Array) -> jax.Array:
        return _rms_norm(x, self.final_norm_d[...], self.config.norm_eps)

    # -- head
    def head(self) -> jax.Array:
        """The matrix of the logits, [V,D] if tied, else [D,V]; on a mesh, in parts of the vocabulary and none of d."""
        if self.config.tied:  # (said twice, because gradients go the same way back)
            return constrain(constrain(self.embed_vd[...], "tensor", "fsdp"), VOCAB_AXES)
        return constrain(constrain(self.head_dv[...], "fsdp", "tensor"), None, VOCAB_AXES)

    def logits(self, hidden: jax.Array, head: jax.Array | None = None) -> jax.Array:
        """float32 logits [..., V] of hidden states [..., D]; padding rows of the vocabulary are -inf.

        A loop makes the `head` before it, and once.
        """
        flat = constrain(hidden.reshape(-1, hidden.shape[-1]), "data")
        head = self.head() if head is None else head
        spec = "xd,vd->xv" if self.config.tied else "xd,dv->xv"
        logits = jnp.einsum(spec, flat, head.astype(flat.dtype), preferred_element_type=jnp.float32)
        logits = constrain(logits, "data", VOCAB_AXES)
        if self.config.padded_vocab > self.config.vocab_size:
            logits = jnp.where(jnp.arange(self.config.padded_vocab) < self.config.vocab_size, logits, -jnp.inf)
        return logits.reshape(*hidden.shape[:-1], -1)

    def next_logp(self, hidden_bgsd, target_bgs, keep_bgs, temperature) -> jax.Array:
        """log softmax(logits / temperature)[target] where `keep`, else 0.0; float32 [B,G,S].

        A group's places are sorted, the kept ones first, and go through the head in chunks of about
        `config.head_chunk` under scan and remat: the logits of a whole batch never exist, and what is not kept (most of
        a tool-use row was not sampled) costs nothing.
        """
        batch, rows, length, width = hidden_bgsd.shape
        n = rows * length
        order_bn = jnp.argsort(~keep_bgs.reshape(batch, n), axis=1)
        place_bn = jnp.argsort(order_bn, axis=1)
        columns = min(n, max(1, self.config.head_chunk // batch))
        n_chunks = -(-n // columns)
        head = self.head()

        def chunked(x: jax.Array) -> jax.Array:
            """[B,N,...] in sorted order -> [chunk,B,columns,...]; b stays an axis of its own (it is sharded)."""
            x = jnp.pad(x, [(0, 0), (0, n_chunks * columns - n)] + [(0, 0)] * (x.ndim - 2))
            return jnp.moveaxis(x.reshape(batch, n_chunks, columns, *x.shape[2:]), 1, 0)

        def score(hidden: jax.Array, target: jax.Array, keep: jax.Array) -> jax.Array:
            logits = self.logits(hidden, head) / temperature
            picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
            # the select stands before any use of `picked`, so that nothing of an unkept place reaches a gradient
            return jnp.where(keep, picked - jax.nn.logsumexp(logits, axis=-1), 0.0)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def chunk(_: None, args: tuple) -> tuple[None, jax.Array]:
            hidden, target, keep = args
            return None, jax.lax.cond(
                keep.any(), score, lambda h, t, k: jnp.zeros(k.shape, jnp.float32), hidden, target, keep
            )

        target_bn = jnp.where(keep_bgs, target_bgs, 0).reshape(batch, n)
        args = (
            _permute(hidden_bgsd.reshape(batch, n, width), order_bn, place_bn),
            jnp.take_along_axis(target_bn, order_bn, axis=1),
            jnp.take_along_axis(keep_bgs.reshape(batch, n), order_bn, axis=1),
        )
        _, logp = jax.lax.scan(chunk, None, jax.tree.map(chunked, args))
        logp_bn = jnp.moveaxis(logp, 0, 1).reshape(batch, -1)[:, :n]
        return jnp.take_along_axis(logp_bn, place_bn, axis=1).reshape(batch, rows, length)

    def token_logp(
        self, prompt_ids_bp, prompt_len_b, suffix_ids_bgs, suffix_len_bg, temperature=1.0, keep_bgs=None
    ) -> jax.Array:
        """See the function of the same name."""
        hidden = self.suffix_hidden(prompt_ids_bp, prompt_len_b, suffix_ids_bgs, suffix_len_bg)
        keep = _first(suffix_len_bg, suffix_ids_bgs.shape[2])
        if keep_bgs is not None:
            keep = keep & keep_bgs
        # token s is predicted at s-1: shift targets one to the left, score, shift the scores back
        logp = self.next_logp(hidden, _shift_left(suffix_ids_bgs), _shift_left(keep), temperature)
        return jnp.pad(logp[..., :-1], [(0, 0), (0, 0), (1, 0)])


@jax.custom_vjp
def _permute(x_bnd: jax.Array, order_bn: jax.Array, place_bn: jax.Array) -> jax.Array:
    """x[b, order[b, i]], where `place` is the inverse of `order`: so its gradient is a gather too, and no scatter."""
    del place_bn
    return jnp.take_along_axis(x_bnd, order_bn[..., None], axis=1)


def _permute_bwd(place_bn: jax.Array, grad_bnd: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.take_along_axis(grad_bnd, place_bn[..., None], axis=1), None, None


_permute.defvjp(lambda x, order, place: (_permute(x, order, place), place), _permute_bwd)


def _first(length: jax.Array, size: int) -> jax.Array:
    """bool [..., size]: the first `length` places."""
    return jnp.arange(size) < length[..., None]


def _clean(ids: jax.Array, length: jax.Array) -> jax.Array:
    """Padding replaced by id 0, whatever stood there: an id out of range would be read as NaN and poison gradients."""
    return jnp.where(_first(length, ids.shape[-1]), ids, 0)


def _shift_left(x: jax.Array) -> jax.Array:
    return jnp.pad(x[..., 1:], [(0, 0), (0, 0), (0, 1)])


def _initial(name: str, shape: tuple[int, ...], config: PolicyConfig, key: jax.Array) -> jax.Array:
    """Norms at one, biases at zero, matrices normal with 1/sqrt(fan-in); matrices that end a residual branch are also
    scaled by 1/sqrt(2 L), so that the residual stream's variance does not grow with depth."""
    if is_adapter(name):
        return initial_adapter(name, shape, key)
    if "_norm_" in name:
        return jnp.ones(shape, jnp.float32)
    if "_bias_" in name:
        return jnp.zeros(shape, jnp.float32)
    letters = dimension_letters(name)
    if name == "embed_vd":
        fan_in = config.d_model  # logits of a tied head start with variance 1
    elif letters == "lnhd":
        fan_in = config.n_heads * config.head_dim * 2 * config.n_layers
    elif letters == "lfd":
        fan_in = config.d_ff * 2 * config.n_layers
    else:
        fan_in = config.d_model
    return fan_in**-0.5 * jax.random.normal(key, shape, jnp.float32)


@functools.lru_cache(maxsize=64)
def _graphdef(config: PolicyConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))[0]


# --- functions over the pure dict of parameters ----------------------------------------------------------------------
def init_params(config: PolicyConfig, seed: int, mesh: Mesh | None = None) -> Params:
    """Random float32 params; with a mesh, each is born in its shards (no device ever holds a whole one). Same values
    either way.
    """

    def make() -> Params:
        return Decoder(config, nnx.Rngs(params=seed)).to_params()

    return jax.jit(make, out_shardings=None if mesh is None else param_shardings(config, mesh))()


def token_logp(
    config: PolicyConfig,
    params: Params,
    prompt_ids_bp: jax.Array,
    prompt_len_b: jax.Array,
    suffix_ids_bgs: jax.Array,
    suffix_len_bg: jax.Array,
    temperature: jax.Array | float = 1.0,
    keep_bgs: jax.Array | None = None,
) -> jax.Array:
    """log p(suffix token s | prompt, suffix[<s]) at a temperature, float32 [B,G,S].

    Position 0, padding and places outside the optional `keep_bgs` are 0.0. Ids are int32, lengths int32; what stands
    in padding changes nothing. The temperature divides the logits before the softmax, as in sampling.
    """
    decoder = Decoder.from_params(config, params)
    return decoder.token_logp(prompt_ids_bp, prompt_len_b, suffix_ids_bgs, suffix_len_bg, temperature, keep_bgs)


def full_logits(config: PolicyConfig, params: Params, ids_bt: jax.Array, len_b: jax.Array) -> jax.Array:
    """float32 logits [B,T,V] at every position, padded vocabulary at -inf. For parity tests and short texts: nothing
    is chunked.
    """
    decoder = Decoder.from_params(config, params)
    hidden, _ = decoder.prefill(ids_bt, len_b)
    return decoder.logits(hidden)


def prefill(config: PolicyConfig, params: Params, prompt_ids_bp: jax.Array, prompt_len_b: jax.Array) -> KV:
    """The prompts' cache [L,B,K,P,H] in the compute dtype; right-padded prompts, padding is garbage that readers must
    mask.
    """
    return Decoder.from_params(config, params).prefill(prompt_ids_bp, prompt_len_b)[1]


def extend(
    config: PolicyConfig,
    params: Params,
    ids_bgc: jax.Array,
    len_bg: jax.Array,
    prompt: KV,
    prompt_len_b: jax.Array,
    rows: KV,
    row_len_bg: jax.Array,
) -> tuple[jax.Array, KV, jax.Array]:
    """Feeds `len_bg` new tokens to each row (right-padded in `ids_bgc`; 0 leaves a row as it is).

    `prompt` [L,B,K,P,H] is shared by a group's rows; `rows` [L,B,K,G,S,H] holds `row_len_bg` tokens each and must
    have room. Returns the float32 logits [B,G,V] after each row's last new token, the rows' cache with the new tokens
    written at each row's own place, and the new lengths.
    """
    decoder = Decoder.from_params(config, params)
    pasts = [(prompt, prompt_mask(prompt, prompt_len_b)), (rows, row_mask(rows, row_len_bg))]
    hidden, new = decoder.extend(_clean(ids_bgc, len_bg), prompt_len_b[:, None] + row_len_bg, pasts)
    last = jnp.take_along_axis(hidden, jnp.maximum(len_bg - 1, 0)[..., None, None], axis=2)[:, :, 0]
    return decoder.logits(last), write_rows(rows, new, row_len_bg, len_bg), row_len_bg + len_bg


def prompt_mask(prompt: Any, prompt_len_b: jax.Array) -> jax.Array:
    """Which keys of a prompts' cache (stacked, or a list of layers) are real, bool [B,1,1,1,1,P]."""
    return _first(prompt_len_b, _size(prompt))[:, None, None, None, None]


def row_mask(rows: Any, row_len_bg: jax.Array) -> jax.Array:
    """Which keys of a rows' cache (stacked, or a list of layers) are real, bool [B,1,G,1,1,S]."""
    return _first(row_len_bg, _size(rows))[:, None, :, None, None]


def _size(cache: Any) -> int:
    return (cache if isinstance(cache, KV) else cache[0]).values.shape[-2]


def each_layer(fn: Callable[..., KV], *caches: Any) -> Any:
    """fn(one layer's KV of each cache) -> KV, for every layer of stacked caches or of lists with a KV per layer."""
    return jax.vmap(fn)(*caches) if isinstance(caches[0], KV) else list(map(fn, *caches))


def write_rows(rows: Any, new: Any, at_bg: jax.Array, count_bg: jax.Array) -> Any:
    """Writes the first `count` of each row's new tokens into its cache, from its own place `at` on, in all layers."""
    b, g = jnp.arange(at_bg.shape[0])[:, None, None], jnp.arange(at_bg.shape[1])[:, None]

    def write(rows: KV, new: KV) -> KV:
        size, length = rows.values.shape[-2], new.values.shape[-2]
        place = at_bg[..., None] + jnp.arange(length)
        place = jnp.where(_first(count_bg, length), place, size)  # padding is sent out of range, where "drop" drops it
        # advanced indices with slices between them put their axes first: the updates are [B, G, C, K, H]
        keys = jnp.transpose(new.keys, (0, 2, 4, 1, 3))
        values = jnp.transpose(new.values, (0, 2, 3, 1, 4))
        return KV(
            rows.keys.at[b, :, g, :, place].set(keys, mode="drop"),
            rows.values.at[b, :, g, place].set(values, mode="drop"),
        )

    return each_layer(write, rows, new)


def unstack(stacked: Any) -> list[Any]:
    """A stacked tree (leading axis l) as a list with one tree per layer."""
    leaves, tree = jax.tree.flatten(stacked)
    return [jax.tree.unflatten(tree, [leaf[i] for leaf in leaves]) for i in range(leaves[0].shape[0])]


def stack(layers: Sequence[Any]) -> Any:
    """The inverse of `unstack`."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def cast_matrices(config: PolicyConfig, params: Params) -> Params:
    """Params with everything that is multiplied (not the norms' weights) in the compute dtype.

    For loops that use the same params many times: the cast from the float32 masters happens once, with the same
    results.
    """

    def cast(path: tuple, x: jax.Array) -> jax.Array:
        return x if "norm" in path[-1].key else x.astype(config.compute_dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
