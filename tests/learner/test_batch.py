"""Trajectories to arrays: lengths, masks, groups, stripping, micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from seal_jax.learner.batch import Buckets, group_metrics, informative, make_batch, micro_batches, take
from seal_jax.types import LABEL_ID

from .toys import BUCKETS, diagnosis, segment, simple, trajectory


def test_arrays_of_one_trajectory():
    t = trajectory(
        segment("cue", [9]),
        segment("template", [1]),
        segment("sampled", [5, 6, 2]),
        segment("observation", [7, 2]),
        segment("sampled", [2], turn=1),
    )
    batch = make_batch([[t]], [[1.0]], [[diagnosis("pass", "not_reached")]], buckets=BUCKETS)
    assert batch.shape == (1, 1, 4, 8)
    assert batch.prompt_ids_bp.tolist() == [[1, 2, 3, 0]] and batch.prompt_len_b.tolist() == [3]
    assert batch.suffix_ids_bgs[0, 0].tolist() == [9, 1, 5, 6, 2, 7, 2, 2] and batch.suffix_len_bg.tolist() == [[8]]
    assert batch.loss_mask_bgs[0, 0].astype(int).tolist() == [0, 0, 1, 1, 1, 0, 0, 1]
    assert batch.turn_id_bgs[0, 0].tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    assert batch.cue_mask_bgs[0, 0].astype(int).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(batch.sample_logp_bgs[0, 0], [0, 0, -0.5, -0.6, -0.7, 0, 0, -0.5])
    assert batch.labels_bgt[0, 0].tolist() == [LABEL_ID["pass"], -1, -1, -1]
    dtypes = {k.rsplit("_", 1)[0]: str(v.dtype) for k, v in vars(batch).items()}
    assert {dtypes[k] for k in ("prompt_ids", "prompt_len", "suffix_ids", "suffix_len", "turn_id", "labels")} == {
        "int32"
    }
    assert {dtypes[k] for k in ("sample_logp", "old_logp", "ref_logp", "reward")} == {"float32"}
    assert {dtypes[k] for k in ("loss_mask", "cue_mask", "row_mask", "reward_mask")} == {"bool"}


def test_mask_comes_from_lengths_not_ids():
    """TRL PR#6357: with pad id == eos id the sampled end token stays in the loss and the padding does not."""
    end = pad = 0
    t = trajectory(segment("template", [4]), segment("sampled", [5, 6, end]))
    batch = make_batch([[t]], [[1.0]], [[diagnosis("pass")]], buckets=BUCKETS)
    assert batch.suffix_ids_bgs[0, 0, 4:].tolist() == [pad] * 4
    assert batch.loss_mask_bgs[0, 0].astype(int).tolist() == [0, 1, 1, 1, 0, 0, 0, 0]


def test_sum_of_a_mask_is_never_a_length():
    """A multi-turn mask [.,1,1,0,0,0,1,1]: the tail after the observation is kept."""
    t = simple(4)
    batch = make_batch([[t]], [[1.0]], [[diagnosis("pass")]], buckets=BUCKETS)
    assert batch.suffix_len_bg.tolist() == [[len(t.suffix_ids)]] and batch.loss_mask_bgs.sum() == t.n_sampled
    assert batch.suffix_ids_bgs[0, 0].tolist() == t.suffix_ids
    cut = take(batch, np.array([0]), BUCKETS)
    assert cut.suffix_ids_bgs[0, 0].tolist() == t.suffix_ids


@pytest.mark.parametrize(
    "bad, match",
    [
        (trajectory(segment("sampled", [1]), task="tX"), "tX.*must open with a token that was not sampled"),
        (trajectory(task="tX"), "tX.*must open"),
        (trajectory(segment("template", range(40)), task="tX"), "tX.*40 tokens.*config.buckets.suffix.*add a larger"),
        (trajectory(segment("template", [1]), task="tX", prompt=range(9)), "tX.*9 tokens.*config.buckets.prompt"),
        (trajectory(segment("template", [1]), task="tX", prompt=()), "tX.*prompt is empty"),
        (trajectory(segment("template", [1], turn=4), task="tX"), "tX.*turn 4.*raise Buckets"),
    ],
)
def test_bad_trajectories_name_their_task(bad, match):
    with pytest.raises(ValueError, match=match):
        make_batch([[bad]], [[0.0]], [[diagnosis("pass")]], buckets=BUCKETS)


def test_broken_records_name_their_task():
    odd = segment("sampled", [1, 2])
    object.__setattr__(odd, "logps", (-0.5,))  # a record that skipped its own check
    with pytest.raises(ValueError, match="tX.*3 ids, 3 mask entries and 2 log-probs"):
        make_batch([[trajectory(segment("template", [1]), odd, task="tX")]], buckets=BUCKETS)
    object.__setattr__(odd, "logps", (-0.5, float("nan")))
    with pytest.raises(ValueError, match="tX.*not finite"):
        make_batch([[trajectory(segment("template", [1]), odd, task="tX")]], buckets=BUCKETS)
    with pytest.raises(ValueError, match="tX.*reward.*not a finite"):
        make_batch([[simple(2, task="tX")]], [[float("nan")]], buckets=BUCKETS)
    with pytest.raises(ValueError, match="tX.*prompt is not its group's"):
        make_batch([[simple(2), simple(2, task="tX", prompt=(1, 2))]], buckets=BUCKETS)
    with pytest.raises(ValueError, match="rewards has another shape"):
        make_batch([[simple(2)]], [[0.0, 1.0]], buckets=BUCKETS)
    with pytest.raises(ValueError, match="ascending"):
        Buckets((8, 4), (8,))
    with pytest.raises(ValueError, match="tX.*5 labelled turns"):
        make_batch([[simple(2, task="tX")]], [[0.0]], [[diagnosis(*["pass"] * 5)]], buckets=BUCKETS)


def test_env_error_rows_leave_loss_and_statistics():
    group = [simple(2, rollout=0), simple(2, rollout=1, stop="env_error"), simple(2, rollout=2)]
    batch = make_batch([group], [[1, 0, 1]], [[diagnosis("pass")] * 3], buckets=BUCKETS)
    assert batch.row_mask_bg.tolist() == batch.reward_mask_bg.tolist() == [[True, False, True]]
    assert informative(batch).tolist() == [False]  # the two that are left are equal


def cued_group():
    """Rewards 1 (cued), 0 (cued), 0 (bare), 1 (bare), 1 (meant to be cued, but no cue was ever shown)."""

    def cued(g):
        head = [segment("cue", [9, 9]), segment("template", [1])]
        parts = [segment("sampled", [5, 6]), segment("observation", [7]), segment("cue", [8]), segment("sampled", [2])]
        return trajectory(*head, *parts, rollout=g, cued=True)

    never = trajectory(segment("template", [1]), segment("sampled", [5]), rollout=4, cued=True)
    return [cued(0), cued(1), simple(2, rollout=2), simple(2, rollout=3), never], [1, 0, 0, 1, 1]


def test_strip_positive():
    group, rewards = cued_group()
    batch = make_batch([group], [rewards], [[diagnosis("pass")] * 5], buckets=BUCKETS, strip="positive")
    assert batch.row_mask_bg.tolist() == [[True, False, True, True, True]]
    assert batch.reward_mask_bg.all()  # the dropped row still counts in the mean
    assert batch.suffix_ids_bgs[0, 0, :5].tolist() == [1, 5, 6, 7, 2] and batch.suffix_len_bg[0, 0] == 5
    assert batch.loss_mask_bgs[0, 0, :5].astype(int).tolist() == [0, 1, 1, 0, 1]
    assert not batch.cue_mask_bgs[0, 0].any()
    assert np.isnan(batch.sample_logp_bgs[0, 0, :5]).all()  # recorded in another context
    assert np.isfinite(batch.sample_logp_bgs[0, 1:]).all()
    kept = make_batch([group], [rewards], [[diagnosis("pass")] * 5], buckets=BUCKETS)
    assert kept.row_mask_bg.all() and kept.suffix_len_bg[0, 0] == 8 and kept.cue_mask_bgs[0, 0].sum() == 3


def ragged(sizes, G=2):
    groups = [[simple(n + g, task=f"t{b}", rollout=g, seed=10 * b + g) for g in range(G)] for b, n in enumerate(sizes)]
    return groups, make_batch(groups, [[0.0, 1.0] + [0.0] * (G - 2)] * len(sizes), buckets=BUCKETS)


def test_micro_batches_keep_groups_and_shrink_to_their_bucket():
    groups, batch = ragged([20, 2, 9, 3, 1])
    parts = micro_batches(batch, 2, BUCKETS)
    assert [sorted(part.tolist()) for part, _ in parts] == [[1, 4], [2, 3], [0]]
    assert [m.shape for _, m in parts] == [(2, 2, 4, 8), (2, 2, 4, 16), (2, 2, 4, 32)]
    for part, micro in parts:
        for i, b in enumerate(part):
            for g in range(2):
                n = micro.suffix_len_bg[i, g]
                assert micro.suffix_ids_bgs[i, g, :n].tolist() == groups[b][g].suffix_ids
                assert micro.loss_mask_bgs[i, g].sum() == groups[b][g].n_sampled
    pad = parts[-1][1]
    assert not pad.row_mask_bg[1].any() and not pad.reward_mask_bg[1].any() and not pad.loss_mask_bgs[1].any()
    assert pad.suffix_len_bg[1].tolist() == [1, 1] and pad.prompt_len_b[1] == 1 and (pad.labels_bgt[1] == -1).all()


def test_rows_outside_the_loss_cost_nothing():
    _, batch = ragged([20, 2])
    batch.row_mask_bg[0, 1] = False
    batch.row_mask_bg[1] = False
    parts = micro_batches(batch, 2, BUCKETS)
    assert [part.tolist() for part, _ in parts] == [[0]]
    micro = parts[0][1]
    assert micro.suffix_len_bg[0].tolist() == [24, 1] and not micro.loss_mask_bgs[0, 1].any()
    assert micro.reward_bg[0].tolist() == [0.0, 1.0] and micro.reward_mask_bg[0].all()


def test_group_metrics():
    groups, _ = ragged([2, 2, 2, 2])
    batch = make_batch(groups, [[0, 0], [1, 1], [0, 1], [1, 1]], buckets=BUCKETS)
    got = group_metrics(batch)
    assert (got["groups/informative"], got["groups/all_fail"], got["groups/all_pass"]) == (0.25, 0.25, 0.5)


def test_groups_of_unequal_size_are_filled():
    batch = make_batch([[simple(2)], [simple(2, rollout=0), simple(3, rollout=1)]], [[1], [0, 1]], buckets=BUCKETS)
    assert batch.row_mask_bg.tolist() == batch.reward_mask_bg.tolist() == [[True, False], [True, True]]
    assert informative(batch).tolist() == [False, True]
