"""Trajectories to arrays: groups are an axis, lengths are explicit, and nothing is ever inferred from a token id.

Everything here is numpy on the host. A batch is `[B prompts, G rollouts]`; all rows of a group share one prompt.
Rows are right-padded to declared buckets, so that only a few shapes are ever compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flax import struct

from seal_jax.types import EXCLUDED_LABELS, LABEL_ID, Diagnosis, Trajectory

Strip = Literal["none", "positive"]


@struct.dataclass
class Batch:
    """The arrays of one batch (numpy or jax). Letters: b prompt, g rollout, p prompt token, s suffix token, t turn.

    A pad row has prompt length 1 and suffix length 1, so that attention over it is defined, and both masks False.
    """

    prompt_ids_bp: Any  # int32; tools + system + first user message, once per group
    prompt_len_b: Any  # int32
    suffix_ids_bgs: Any  # int32; everything after the prompt
    suffix_len_bg: Any  # int32
    loss_mask_bgs: Any  # bool; sampled by the policy, its end token too
    turn_id_bgs: Any  # int32; user turn the token belongs to, -1 on padding
    cue_mask_bgs: Any  # bool; added by the interface
    sample_logp_bgs: Any  # float32; recorded at sampling, NaN where the context has been changed since (stripped rows)
    old_logp_bgs: Any  # float32; recomputed by the trainer before a round's first step; NaN: that of the current policy
    ref_logp_bgs: Any  # float32; frozen reference policy
    reward_bg: Any  # float32; 0..1, the verifier's 0/1 unless config.reward says otherwise
    labels_bgt: Any  # int32; -1 = no such turn, or excluded
    row_mask_bg: Any  # bool; the row carries a gradient
    reward_mask_bg: Any  # bool; the row's reward counts in its group's mean and deviation

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, G, P, S)."""
        return (*self.suffix_len_bg.shape, self.prompt_ids_bp.shape[1], self.suffix_ids_bgs.shape[2])


@dataclass(frozen=True)
class Buckets:
    """The only lengths that are ever compiled. `turns` is the fixed T of `labels_bgt`."""

    prompt: tuple[int, ...]
    suffix: tuple[int, ...]
    turns: int = 8

    def __post_init__(self) -> None:
        for name in ("prompt", "suffix"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f"config.buckets.{name}={sizes!r} must be positive, distinct and ascending")
        if self.turns < 1:
            raise ValueError(f"Buckets(turns={self.turns}) must be at least 1")

    def prompt_for(self, length: int, what: str = "a prompt") -> int:
        return _bucket(self.prompt, length, "config.buckets.prompt", what)

    def suffix_for(self, length: int, what: str = "a suffix") -> int:
        return _bucket(self.suffix, length, "config.buckets.suffix", what)


def _bucket(sizes: tuple[int, ...], length: int, name: str, what: str) -> int:
    for size in sizes:
        if length <= size:
            return size
    raise ValueError(f"{what} has {length} tokens, more than the largest of {name}={sizes}; add a larger one")


@dataclass(frozen=True)
class _Row:
    ids: list[int]
    sampled: list[bool]
    turns: list[int]
    cues: list[bool]
    logps: list[float]


def has_cues(trajectory: Trajectory) -> bool:
    """True if the row really holds tokens of the interface. A cued row that never met a cue is a bare row."""
    return any(s.source == "cue" and s.ids for s in trajectory.segments)


def _where(trajectory: Trajectory) -> str:
    return f"task {trajectory.task_id!r} rollout {trajectory.rollout}"


def _row(trajectory: Trajectory, strip: bool, turns: int) -> _Row:
    """One trajectory as flat lists; with `strip`, the tokens of the interface are left out."""
    row = _Row([], [], [], [], [])
    for segment in trajectory.segments:
        if strip and segment.source == "cue":
            continue
        n, sampled = len(segment.ids), segment.source == "sampled"
        if not 0 <= segment.turn < turns:
            raise ValueError(
                f"{_where(trajectory)}: turn {segment.turn} is not in 0..{turns - 1}; raise Buckets(turns=)"
            )
        row.ids.extend(segment.ids)
        row.sampled.extend([sampled] * n)
        row.turns.extend([segment.turn] * n)
        row.cues.extend([segment.source == "cue"] * n)
        row.logps.extend(segment.logps if sampled else [0.0] * n)
    if not len(row.ids) == len(row.sampled) == len(row.logps):
        raise ValueError(
            f"{_where(trajectory)}: {len(row.ids)} ids, {len(row.sampled)} mask entries and {len(row.logps)} log-probs;"
            " every token needs one of each"
        )
    if not row.ids or row.sampled[0]:
        raise ValueError(f"{_where(trajectory)}: a suffix must open with a token that was not sampled (the header)")
    if sum(row.sampled) != trajectory.n_sampled:
        raise ValueError(f"{_where(trajectory)}: {sum(row.sampled)} loss tokens, {trajectory.n_sampled} sampled ones")
    if not np.isfinite(row.logps).all():
        raise ValueError(f"{_where(trajectory)}: a recorded log-prob is not finite; the sampler is at fault")
    return row


def label_ids(diagnosis: Diagnosis, turns: int, what: str = "a diagnosis") -> list[int]:
    """Label ids of the turns, padded with -1; excluded labels are -1 too."""
    names = diagnosis.names
    if len(names) > turns:
        raise ValueError(f"{what} has {len(names)} labelled turns, more than Buckets(turns={turns}); raise it")
    unknown = [name for name in names if name not in LABEL_ID]
    if unknown:
        raise ValueError(f"{what}: label {unknown[0]!r} is not one of {sorted(LABEL_ID)}")
    ids = [-1 if name in EXCLUDED_LABELS else LABEL_ID[name] for name in names]
    return ids + [-1] * (turns - len(ids))


def make_batch(
    groups: Sequence[Sequence[Trajectory]],
    rewards: Sequence[Sequence[float]] | None = None,
    diagnoses: Sequence[Sequence[Diagnosis]] | None = None,
    *,
    buckets: Buckets,
    strip: Strip = "none",
) -> Batch:
    """Arrays of `groups[b][g]`, with `rewards[b][g]` and `diagnoses[b][g]` (None: zero reward, no labels; for SFT).

    - A trajectory that stopped with `env_error` says nothing about the policy: its row leaves the loss and its
      group's statistics. A group with fewer than two rows left has advantage 0.
    - `strip="positive"` distils cues into the bare policy: a row that holds cue tokens and whose reward lies above
      its group's mean is rebuilt without them (its log-probs must then be recomputed by the trainer, which they are
      anyway); a row that holds cue tokens and is not above the mean leaves the loss, because without its cues it
      would be off-policy, but its reward stays in the group's statistics. Not in the paper.
    - Groups of unequal size are filled with pad rows.

    Raises ValueError, naming the task, for any broken invariant or a row longer than the largest bucket; a row is
    never cut.
    """
    if strip not in ("none", "positive"):
        raise ValueError(f"strip={strip!r} is not one of 'none', 'positive'")
    if not groups or not all(groups):
        raise ValueError("groups: every group needs at least one trajectory")
    for name, given in (("rewards", rewards), ("diagnoses", diagnoses)):
        if given is not None and [len(x) for x in given] != [len(x) for x in groups]:
            raise ValueError(f"{name} has another shape than the groups: one per trajectory is needed")

    B, G, T = len(groups), max(len(group) for group in groups), buckets.turns
    reward_bg = np.zeros((B, G), np.float32)
    row_mask_bg, reward_mask_bg = np.zeros((B, G), bool), np.zeros((B, G), bool)
    labels_bgt = np.full((B, G, T), -1, np.int32)
    stripped_bg = np.zeros((B, G), bool)
    rows: dict[tuple[int, int], _Row] = {}
    for b, group in enumerate(groups):
        for g, trajectory in enumerate(group):
            if trajectory.prompt_ids != group[0].prompt_ids:
                raise ValueError(f"{_where(trajectory)}: its prompt is not its group's; a group shares one prompt")
            reward_mask_bg[b, g] = trajectory.stop != "env_error"
            if rewards is not None:
                reward_bg[b, g] = rewards[b][g]
                if not np.isfinite(reward_bg[b, g]):
                    raise ValueError(f"{_where(trajectory)}: reward {rewards[b][g]!r} is not a finite number")
            if diagnoses is not None:
                labels_bgt[b, g] = label_ids(diagnoses[b][g], T, _where(trajectory))
        row_mask_bg[b] = reward_mask_bg[b]
        mean = reward_bg[b][reward_mask_bg[b]].mean() if reward_mask_bg[b].any() else 0.0
        for g, trajectory in enumerate(group):
            if strip == "positive" and has_cues(trajectory):
                stripped_bg[b, g] = reward_bg[b, g] > mean
                row_mask_bg[b, g] &= stripped_bg[b, g]
            rows[b, g] = _row(trajectory, bool(stripped_bg[b, g]), T)

    longest = max(rows, key=lambda at: len(rows[at].ids))
    S = buckets.suffix_for(len(rows[longest].ids), _where(groups[longest[0]][longest[1]]) + ": the suffix")
    widest = max(range(B), key=lambda b: len(groups[b][0].prompt_ids))
    P = buckets.prompt_for(len(groups[widest][0].prompt_ids), _where(groups[widest][0]) + ": the prompt")

    prompt_ids_bp, prompt_len_b = np.zeros((B, P), np.int32), np.ones(B, np.int32)
    suffix_ids_bgs, suffix_len_bg = np.zeros((B, G, S), np.int32), np.ones((B, G), np.int32)
    loss_mask_bgs, cue_mask_bgs = np.zeros((B, G, S), bool), np.zeros((B, G, S), bool)
    turn_id_bgs, sample_logp_bgs = np.full((B, G, S), -1, np.int32), np.zeros((B, G, S), np.float32)
    for b, group in enumerate(groups):
        if not group[0].prompt_ids:
            raise ValueError(f"{_where(group[0])}: the prompt is empty")
        prompt_len_b[b] = len(group[0].prompt_ids)
        prompt_ids_bp[b, : prompt_len_b[b]] = group[0].prompt_ids
    for (b, g), row in rows.items():
        n = suffix_len_bg[b, g] = len(row.ids)
        suffix_ids_bgs[b, g, :n] = row.ids
        loss_mask_bgs[b, g, :n] = row.sampled
        turn_id_bgs[b, g, :n] = row.turns
        cue_mask_bgs[b, g, :n] = row.cues
        sample_logp_bgs[b, g, :n] = np.nan if stripped_bg[b, g] else row.logps

    return Batch(
        prompt_ids_bp=prompt_ids_bp,
        prompt_len_b=prompt_len_b,
        suffix_ids_bgs=suffix_ids_bgs,
        suffix_len_bg=suffix_len_bg,
        loss_mask_bgs=loss_mask_bgs,
        turn_id_bgs=turn_id_bgs,
        cue_mask_bgs=cue_mask_bgs,
        sample_logp_bgs=sample_logp_bgs,
        old_logp_bgs=np.full((B, G, S), np.nan, np.float32),
        ref_logp_bgs=np.zeros((B, G, S), np.float32),
        reward_bg=reward_bg,
        labels_bgt=labels_bgt,
        row_mask_bg=row_mask_bg,
        reward_mask_bg=reward_mask_bg,
    )


_FILL = {"turn_id_bgs": -1, "labels_bgt": -1, "prompt_len_b": 1, "suffix_len_bg": 1}


def take(batch: Batch, prompts: np.ndarray, buckets: Buckets, size: int | None = None) -> Batch:
    """The groups `prompts` [n] of a numpy batch, in the smallest buckets that hold them, filled to `size` pad groups.

    Rows outside the loss shrink to one token: nothing of them is needed but their rewards.
    """
    size = len(prompts) if size is None else size
    live_bg = batch.row_mask_bg[prompts]
    suffix_len_bg = np.where(live_bg, batch.suffix_len_bg[prompts], 1)
    width = {
        "bp": buckets.prompt_for(int(batch.prompt_len_b[prompts].max(initial=1))),
        "bgs": buckets.suffix_for(int(suffix_len_bg.max(initial=1))),
    }
    out = {}
    for name, array in vars(batch).items():
        letters = name.rsplit("_", 1)[1]
        tail = array.shape[1:-1] + (width[letters],) if letters in width else array.shape[1:]
        new = np.full((size, *tail), _FILL.get(name, 0), array.dtype)
        part = array[prompts]
        if letters in width:
            n = min(width[letters], part.shape[-1])
            new[: len(prompts), ..., :n] = part[..., :n]
        else:
            new[: len(prompts)] = part
        out[name] = new
    out["suffix_len_bg"][: len(prompts)] = suffix_len_bg
    out["loss_mask_bgs"][: len(prompts)] &= live_bg[..., None]
    return Batch(**out)


def micro_batches(
    batch: Batch, prompts_per_micro: int, buckets: Buckets, prompts: np.ndarray | None = None
) -> list[tuple[np.ndarray, Batch]]:
    """Splits (the groups `prompts` of) a numpy batch into micro-batches of whole groups: [(indices [n], micro), ...].

    Groups of like length go together and each micro-batch takes the smallest buckets that hold it, so short groups do
    not pay for long ones. Groups without a row in the loss are left out: their contribution is exactly zero. The last
    micro-batch is filled with pad groups, so its shape is one of the declared ones.
    """
    if prompts_per_micro < 1:
        raise ValueError(f"prompts_per_micro={prompts_per_micro} must be at least 1")
    prompts = np.arange(len(batch.prompt_len_b)) if prompts is None else np.asarray(prompts, int)
    prompts = prompts[batch.row_mask_bg[prompts].any(1)]
    longest_b = np.where(batch.row_mask_bg, batch.suffix_len_bg, 1).max(1)
    prompts = prompts[np.lexsort((prompts, batch.prompt_len_b[prompts], longest_b[prompts]))]
    parts = [prompts[i : i + prompts_per_micro] for i in range(0, len(prompts), prompts_per_micro)]
    return [(part, take(batch, part, buckets, prompts_per_micro)) for part in parts]


def informative(batch: Batch) -> np.ndarray:
    """[B] bool: the group's rewards are not all equal, so its advantages are not all zero."""
    high = np.where(batch.reward_mask_bg, batch.reward_bg, -np.inf).max(1)
    low = np.where(batch.reward_mask_bg, batch.reward_bg, np.inf).min(1)
    return high > low


def group_metrics(batch: Batch) -> dict[str, float]:
    """Shares of groups that teach (rewards differ), that all fail (reward <= 0) and that all pass (reward >= 1)."""
    seen_b = batch.reward_mask_bg.any(1)
    n = max(int(seen_b.sum()), 1)
    fail_b = seen_b & np.where(batch.reward_mask_bg, batch.reward_bg <= 0, True).all(1)
    pass_b = seen_b & np.where(batch.reward_mask_bg, batch.reward_bg >= 1, True).all(1)
    return {
        "groups/informative": float(informative(batch).sum() / n),
        "groups/all_fail": float(fail_b.sum() / n),
        "groups/all_pass": float(pass_b.sum() / n),
        "rows/in_loss": float(batch.row_mask_bg.sum()),
        "rows/env_error_or_pad": float((~batch.reward_mask_bg).sum()),
        "reward/mean": float(batch.reward_bg[batch.reward_mask_bg].mean()) if seen_b.any() else 0.0,
    }
