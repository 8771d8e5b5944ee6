"""What the learner's tests share: hand-made trajectories, a model of a few numbers, a numpy loop of the loss."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from seal_jax.learner.batch import Batch, Buckets
from seal_jax.types import EXCLUDED_LABELS, LABEL_ID, LABELS, SUCCESS_LABELS, Diagnosis, Segment, TurnLabel
from seal_jax.types import Trajectory as T

VOCAB = 13
BUCKETS = Buckets(prompt=(4, 8), suffix=(8, 16, 32), turns=4)


def segment(source: str, ids, turn: int = 0) -> Segment:
    ids = tuple(ids)
    return Segment(ids, source, turn, tuple(-0.5 - 0.1 * i for i in range(len(ids))) if source == "sampled" else ())


def trajectory(
    *segments: Segment, task: str = "t0", rollout: int = 0, prompt=(1, 2, 3), stop="completed", cued=False
) -> T:
    return T(task, "base", rollout, 0, cued, tuple(prompt), tuple(segments), (), stop)


def simple(n_sampled: int, task: str = "t0", rollout: int = 0, seed: int = 0, prompt=(1, 2, 3), **kw) -> T:
    """header, sampled, observation, header, sampled (over two turns)."""
    ids = [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, n_sampled + 4)]
    half = (n_sampled + 1) // 2
    parts = [segment("template", ids[:1]), segment("sampled", ids[1 : 1 + half])]
    if n_sampled > half:
        parts += [segment("observation", ids[-3:]), segment("sampled", ids[1 + half : 1 + n_sampled], turn=1)]
    return trajectory(*parts, task=task, rollout=rollout, prompt=prompt, **kw)


def diagnosis(*labels: str) -> Diagnosis:
    return Diagnosis(tuple(TurnLabel(x) for x in labels))


def toy_params(seed: int = 0, width: int = 6) -> dict:
    k = jax.random.split(jax.random.key(seed), 3)
    return {
        "embed_vd": jax.random.normal(k[0], (VOCAB, width)),
        "mix_dd": jax.random.normal(k[1], (width, width)) * 0.5,
        "head_dv": jax.random.normal(k[2], (width, VOCAB)) * 0.5,
    }


def toy_logp(config, params, prompt_bp, prompt_len_b, suffix_bgs, suffix_len_bg, temperature=1.0, keep_bgs=None):
    """A model with the policy's signature: next token from the mean of the prompt and of the suffix so far."""
    embed, S = params["embed_vd"], suffix_bgs.shape[-1]
    valid_bp = jnp.arange(prompt_bp.shape[-1]) < prompt_len_b[:, None]
    prompt_bd = jnp.sum(jnp.where(valid_bp[..., None], embed[prompt_bp], 0), 1) / prompt_len_b[:, None]
    x = embed[suffix_bgs]
    seen = jnp.cumsum(x, 2) / (jnp.arange(S)[:, None] + 1)
    hidden = jnp.tanh((x + seen + prompt_bd[:, None, None]) @ params["mix_dd"])
    logits = hidden @ params["head_dv"] / temperature
    logp = jax.nn.log_softmax(logits)[:, :, :-1]
    logp = jnp.take_along_axis(logp, suffix_bgs[:, :, 1:, None], -1)[..., 0]
    logp = jnp.pad(logp, ((0, 0), (0, 0), (1, 0)))
    keep = (jnp.arange(S) > 0) & (jnp.arange(S) < suffix_len_bg[..., None])
    return jnp.where(keep if keep_bgs is None else keep & keep_bgs, logp, 0.0)


def random_batch(seed: int = 0, B: int = 4, G: int = 4, S: int = 9, turns: int = 3) -> tuple[np.ndarray, Batch]:
    """Ragged rows; group 0 degenerate; both signs; ratios on both sides of the clip and of the dual clip."""
    rng = np.random.default_rng(seed)
    suffix_len = rng.integers(min(3, S), S + 1, (B, G)).astype(np.int32)
    valid = np.arange(S) < suffix_len[..., None]
    mask = valid & (rng.random((B, G, S)) < 0.7) & (np.arange(S) > 0)
    mask[..., 1] = True
    reward = rng.integers(0, 2, (B, G)).astype(np.float32)
    reward[0], reward[1:, 0], reward[1:, 1] = 1, 0, 1
    logp = -rng.random((B, G, S)).astype(np.float32) * 2
    spread = rng.choice([0.05, 0.5, 3.0], (B, G, S))
    batch = Batch(
        prompt_ids_bp=rng.integers(0, VOCAB, (B, 4)).astype(np.int32),
        prompt_len_b=np.full(B, 4, np.int32),
        suffix_ids_bgs=rng.integers(0, VOCAB, (B, G, S)).astype(np.int32),
        suffix_len_bg=suffix_len,
        loss_mask_bgs=mask,
        turn_id_bgs=np.where(valid, np.minimum(np.arange(S) // 3, turns - 1), -1).astype(np.int32),
        cue_mask_bgs=np.zeros((B, G, S), bool),
        sample_logp_bgs=logp,
        old_logp_bgs=(logp + rng.normal(0, 1, (B, G, S)) * spread).astype(np.float32),
        ref_logp_bgs=(logp + rng.normal(0, 1, (B, G, S))).astype(np.float32),
        reward_bg=reward,
        labels_bgt=rng.integers(-1, len(LABELS), (B, G, turns)).astype(np.int32),
        row_mask_bg=rng.random((B, G)) < 0.9,
        reward_mask_bg=np.ones((B, G), bool),
    )
    return logp, batch


SIZES = {"b": 4, "p": 4, "g": 8, "s": 10, "t": 4}


def pad(array, letters: str, fill):
    """Grows an array to `SIZES`, so that all tests of the loss share one compiled shape; the filling is poison."""
    array = np.asarray(array)
    return np.pad(array, [(0, SIZES[x] - n) for x, n in zip(letters, array.shape, strict=True)], constant_values=fill)


def padded(batch: Batch) -> Batch:
    fills = {np.dtype(bool): False, np.dtype(np.int32): -1, np.dtype(np.float32): np.nan}
    return Batch(**{k: pad(v, k.rsplit("_", 1)[1], fills[v.dtype]) for k, v in vars(batch).items()})


def numpy_loss(logp, batch: Batch, s, rho) -> tuple[float, np.ndarray]:
    """The loss and its gradient with respect to logp, token by token in float64, written from the formulas."""
    B, G, S = logp.shape
    excluded = [LABEL_ID[x] for x in EXCLUDED_LABELS]
    on = batch.loss_mask_bgs & batch.row_mask_bg[..., None]
    tokens, rows = on.sum(), on.any(-1).sum()
    total, grad = 0.0, np.zeros((B, G, S))
    for b in range(B):
        r = batch.reward_bg[b][batch.reward_mask_bg[b]].astype(np.float64)
        same = len(r) < 2 or r.max() == r.min()
        for g in range(G):
            A = 0.0 if same else (batch.reward_bg[b, g] - r.mean()) / (r.std(ddof=1) + s.advantage_eps)
            if not batch.reward_mask_bg[b, g]:
                A = 0.0

            def value_of(z, A=A):
                if not s.sign_aware:
                    return rho[z]
                return rho[z] if (A > 0 if LABELS[z] in SUCCESS_LABELS else A < 0) else 1.0

            labels = [z for z in batch.labels_bgt[b, g] if z >= 0 and z not in excluded]
            w_row = np.clip(np.mean([value_of(z) for z in labels]), s.w_min, s.w_max) if labels else 1.0
            for t in range(S):
                if not on[b, g, t]:
                    continue
                w = 1.0
                if s.reweight in ("paper", "release"):
                    w = w_row
                elif s.reweight == "turn":
                    z = batch.labels_bgt[b, g, batch.turn_id_bgs[b, g, t]]
                    w = np.clip(value_of(z), s.w_min, s.w_max) if z >= 0 and z not in excluded else 1.0
                wA, coef = w * A, 1 / tokens
                if s.aggregation == "seq-mean-token-mean":
                    coef = 1 / (on[b, g].sum() * rows)
                ratio = math.exp(float(logp[b, g, t]) - float(batch.old_logp_bgs[b, g, t]))
                bounded = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
                gain, slope = (ratio * wA, ratio * wA) if ratio * wA <= bounded * wA else (bounded * wA, 0.0)
                if wA < 0 and s.dual_clip and gain < s.dual_clip * wA:
                    gain, slope = s.dual_clip * wA, 0.0
                total -= coef * gain
                grad[b, g, t] -= coef * slope
                if s.kl_coef:
                    d = float(batch.ref_logp_bgs[b, g, t]) - float(logp[b, g, t])
                    k = math.exp(d) - d - 1
                    total += coef * s.kl_coef * min(k, s.kl_max or k)
                    grad[b, g, t] += coef * s.kl_coef * (1 - math.exp(d) if not s.kl_max or k < s.kl_max else 0.0)
    return total, grad


def tree_close(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=0), a, b)
