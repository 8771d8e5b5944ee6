"""reweight="release": the weights that are learned and the labels they are applied to are of one tagging."""

from types import SimpleNamespace

import numpy as np

from seal_jax.config import default_config
from seal_jax.data import task_batches
from seal_jax.learner.utility import DynamicWeights
from seal_jax.run import Run
from seal_jax.types import LABEL_ID, Call, CallResult, Diagnosis, Step, Task, TurnEvidence, TurnLabel, Verdict

DONE = Step("done")
CALL = Call("add", {})
CALLED = Step("add", calls=(CALL,), results=(CallResult(CALL, "{}"),))


def verdict(reward, *turns):
    return Verdict(reward, "", tuple(TurnEvidence(i, True, False, False, steps) for i, steps in enumerate(turns)))


def run_of(reweight, batches=None):
    config = default_config()
    config.loss.reweight = reweight
    return SimpleNamespace(config=config, weights=DynamicWeights(), batches=batches)


def test_the_batch_carries_the_tags_that_are_weighed():
    verdicts = [[verdict(1.0, (CALLED,)), verdict(0.0, (DONE,), (CALLED,))]]
    ours = [[Diagnosis((TurnLabel("pass", ""),)), Diagnosis((TurnLabel("argument_mismatch", ""),) * 2)]]
    assert Run.weighed_labels(run_of("paper"), verdicts, ours) is ours
    (group,) = Run.weighed_labels(run_of("release"), verdicts, ours)
    assert [d.names for d in group] == [("pass",), ("missing_tool_call", "pass")]


def test_the_window_of_the_weights_is_an_epoch():
    tasks = [Task(f"t{i}", "", "", "", (), ()) for i in range(5)]
    run = run_of("release", task_batches(tasks, 2, seed=0))
    labels = [[Diagnosis((TurnLabel("state_mismatch", ""),))]]
    counts = []
    for _ in range(6):
        next(run.batches)
        weights = Run.utility(run, labels, [[0.0]])
        counts.append(run.weights.counts[LABEL_ID["state_mismatch"]])
    assert counts == [1, 2, 3, 1, 2, 1]  # batches begin at tasks 0, 2, 4 | 6, 8 | 10
    np.testing.assert_array_equal(weights, run.weights.vector())


def test_static_weights_come_from_the_config():
    run = run_of("paper")
    run.config.loss.utility = {"pass": 0.25}
    assert Run.utility(run, [[Diagnosis(())]], [[0.0]])[LABEL_ID["pass"]] == 0.25
