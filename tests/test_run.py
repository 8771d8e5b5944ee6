"""What the loop asks of a run, without a run: exposure by round, labels dealt out anew, turns and rows counted."""

import math
from collections import Counter
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from seal_jax.config import default_config
from seal_jax.learner.batch import label_ids
from seal_jax.learner.loss import LossSettings, turn_weights
from seal_jax.learner.utility import utility_vector
from seal_jax.rollout.collector import cued_rows
from seal_jax.run import Run, refused_turns, round_metrics, shuffled
from seal_jax.types import Call, CallResult, Diagnosis, Step, Trajectory, TurnEvidence, TurnLabel, Verdict


# --- exposure --------------------------------------------------------------------------------------------------------
def exposures(exposure, anneal_rounds, rounds=12):
    config = default_config()
    config.interface.exposure, config.interface.anneal_rounds = exposure, anneal_rounds
    return [Run.exposure(SimpleNamespace(config=config), t) for t in range(1, rounds + 1)]


def test_exposure_falls_evenly_to_nothing():
    falling = exposures(1.0, 9)
    np.testing.assert_allclose(np.diff(falling[:10]), -1 / 9)
    assert falling[0] == 1.0 and falling[9:] == [0.0] * 3
    assert [sum(cued_rows(8, x)) for x in falling] == [8, 7, 6, 5, 4, 4, 3, 2, 1, 0, 0, 0]
    assert exposures(0.5, 2) == [0.5, 0.25] + [0.0] * 10
    assert exposures(0.5, 1) == [0.5] + [0.0] * 11


def test_exposure_stays_unless_it_is_annealed():
    assert exposures(0.5, 0) == [0.5] * 12


# --- shuffled labels -------------------------------------------------------------------------------------------------
def diagnosis(*labels):
    return Diagnosis(tuple(TurnLabel(label, f"turn {i}") for i, label in enumerate(labels)))


GROUPS = [
    [diagnosis("pass", "spurious_tool_call"), diagnosis("pass"), diagnosis("missing_tool_call", "pass", "pass")],
    [diagnosis("recovery_failure"), diagnosis("argument_mismatch", "pass"), diagnosis("state_mismatch", "pass")],
    [diagnosis("pass", "pass"), diagnosis("correct_abstention"), diagnosis("response_mismatch"), diagnosis("pass")],
]


#: The rewards of the second group are all equal.
VERDICTS = [[Verdict(float(g == 0 and b != 1), "", ()) for g in range(len(group))] for b, group in enumerate(GROUPS)]


def dealt(seed, round, **loss):
    config = default_config()
    config.seed = seed
    config.loss.update(shuffle_labels=True, reweight="paper", **loss)
    return Run.weighed_labels(SimpleNamespace(config=config, round=round), VERDICTS, GROUPS)


def test_shuffled_labels_are_the_same_ones_of_other_trajectories():
    new = shuffled(GROUPS, [True] * 3, "any")
    assert new != GROUPS and [len(group) for group in new] == [3, 3, 4]
    assert Counter(d for g in new for d in g) == Counter(d for g in GROUPS for d in g)


def test_groups_without_an_advantage_keep_their_labels():
    """Else the weights that act would have another mean than those that are not dealt out."""
    new = dealt(0, 1)
    assert new[1] == GROUPS[1] and new != GROUPS
    assert Counter(new[0] + new[2]) == Counter(GROUPS[0] + GROUPS[2])


def test_the_deal_is_a_function_of_seed_and_round():
    assert dealt(0, 3) == dealt(0, 3)
    deals = [dealt(seed, round) for seed in (0, 1) for round in (0, 1, 2)]
    assert all(a != b for i, a in enumerate(deals) for b in deals[:i])
    config = default_config()
    assert Run.weighed_labels(SimpleNamespace(config=config, round=3), [], GROUPS) is GROUPS


def test_shuffled_weights_have_the_same_mean():
    def weights(groups):
        labels_bgt = jnp.asarray([[label_ids(d, 3) for g in groups for d in g]])
        advantage_bg = jnp.zeros(labels_bgt.shape[:2])
        return np.sort(turn_weights(labels_bgt, advantage_bg, utility_vector(), LossSettings(reweight="paper")).ravel())

    one, other = weights(GROUPS), weights(dealt(0, 1))
    np.testing.assert_array_equal(one, other)
    assert one[0] < one[-1]


# --- refused turns ---------------------------------------------------------------------------------------------------
def turn(passed, *errors, abstain=False):
    call = Call("add")
    results = tuple(CallResult(call, "", error) for error in errors)
    return TurnEvidence(0, True, abstain, passed, (Step("x"), Step("x", (call,) * len(results), results=results)))


REFUSED = Verdict(
    0.0,
    "state_mismatch",
    (
        turn(False, "tool_error", "none"),  # refused and taken, whatever else went wrong
        turn(False, "none", "tool_error", "tool_error"),  # refused twice: one turn
        turn(True, "none"),  # nothing was refused
        turn(False, "env_error"),  # not the tool's doing
        turn(False, "tool_error", abstain=True),  # no call was asked for
        turn(None),
    ),
)


@pytest.mark.parametrize("verdicts, counted", [([REFUSED], (2.0, 1.0)), ([REFUSED] * 3, (6.0, 3.0)), ([], (0.0, 0.0))])
def test_refused_turns_are_counted(verdicts, counted):
    assert refused_turns(verdicts) == counted


def test_another_call_repairs_nothing_by_itself():
    refused, other = CallResult(Call("add", {"id": "a1"}), "", "tool_error"), CallResult(Call("thaw", {"id": "a1"}), "")
    taken = CallResult(Call("add", {"id": "a1"}), "")

    def turns(*results):
        step = Step("x", tuple(r.call for r in results), results=results)
        return [Verdict(0.0, "", (TurnEvidence(0, True, False, False, (step,)),))]

    assert refused_turns(turns(refused, other)) == (1.0, 0.0)
    assert refused_turns(turns(refused, other, taken)) == (1.0, 1.0)


def test_refused_turns_are_told_apart_by_what_their_rows_saw():
    def row(cued, verdict):
        return Trajectory("t", "base", 0, 1, cued, (1,), (), ((Step("hello"),),), "completed"), verdict, Diagnosis(())

    repaired = Verdict(1.0, "valid", (turn(True, "tool_error", "none"),))
    metrics = round_metrics([row(False, REFUSED), row(True, repaired), row(True, repaired), row(True, REFUSED)])
    found = {name: value for name, value in metrics.items() if name.startswith("refused/")}
    assert found == {
        "refused/bare": 2.0,
        "refused/bare/repaired": 1.0,
        "refused/cued": 4.0,
        "refused/cued/repaired": 3.0,
    }


def test_rows_that_were_full_are_told_apart_by_what_they_saw():
    def row(cued, stop):
        steps = ((Step("hello"),),)
        return Trajectory("t", "base", 0, 1, cued, (1,), (), steps, stop), Verdict(0.0, "", ()), Diagnosis(())

    full, whole = row(True, "context_limit"), row(True, "completed")
    metrics = round_metrics([full, whole, whole, whole, row(False, "completed")])
    assert (metrics["train/context_limit_cued"], metrics["train/context_limit_bare"]) == (0.25, 0.0)
    assert math.isnan(round_metrics([full])["train/context_limit_bare"])
