"""SEAL's closed loop (arXiv 2605.24426, Algorithm 1), top to bottom.

Task --Ω_t--> rollouts --verifier--> rewards --diagnosis Ψ--> labels --+--> profile C_t --Evolve--> Ω_{t+1}
                                                                       +--> weights w --update--> θ_{t+1}
"""

from __future__ import annotations

from typing import Any

from seal_jax.config import REPORTED
from seal_jax.diagnosis import diagnose
from seal_jax.evaluation.strict import Evaluation, cued_evaluation, evaluate
from seal_jax.interface import evolve
from seal_jax.learner.batch import Strip, make_batch
from seal_jax.run import Run
from seal_jax.types import Protocol


def train(run: Run) -> dict[str, Any]:
    """Carries a job to its end, from wherever its checkpoint left it, and returns its summary."""
    every = run.config.eval.every
    if run.round == 0 and run.config.eval.before:
        report(run, "before")
    while run.round < run.config.rounds:
        seal_round(run)
        if every and run.round % every == 0:
            run.validated(run_evaluation(run, "val", run.protocols[0]))
        run.save()
    run.take_best()
    if run.round:
        report(run, "after")
    return run.finish()


def seal_round(run: Run) -> None:
    """One round: act under Ω_t, verify, diagnose, update the policy, evolve the interface."""
    config, t, interface = run.config, run.round + 1, run.interface
    tasks = next(run.batches)

    # Act: G rollouts of each task; a share of each group's rows sees the cues of Ω_t.
    with run.timer.phase("rollout"):
        groups = run.collector.collect(
            run.acting_params(),
            tasks,
            interface,
            rollouts=config.rollouts,
            round=t,
            exposure=run.exposure(t),
            temperature=config.temperature,
            stop_failed_turns=config.stop_failed_turns,
        )

    # Verify and diagnose: the tools run again on clean instances; each turn gets one label and its evidence.
    with run.timer.phase("diagnosis"):
        verdicts = [[run.collector.verify(task, x) for x in g] for task, g in zip(tasks, groups, strict=True)]
        diagnoses = [[diagnose(v) for v in group] for group in verdicts]
    # Of several processes, each has played tasks of its own; from here on all hold all of them.
    groups, verdicts, diagnoses = run.exchanged(groups, verdicts, diagnoses)
    rewards = [[v.progress if config.reward == "progress" else v.reward for v in group] for group in verdicts]

    # Update θ: the labels weigh the group-relative advantages inside the one jitted loss (Eq. 10-13).
    with run.timer.phase("update"):
        strip: Strip = "positive" if config.interface.strip_in_update else "none"
        labels = run.weighed_labels(verdicts, diagnoses)
        batch = make_batch(groups, rewards, labels, buckets=run.learner.buckets, strip=strip)
        learned = run.learner.update(batch, round=t, utility_z=run.utility(labels, rewards))

    # Evolve Ω: the profile is counted on rows that saw no cue, whenever there are any.
    run.profile = run.profiled(groups, diagnoses)
    if config.interface.closed_loop or t == 1:
        run.interface = evolve(interface, run.profile)

    run.round = t
    run.record(interface, groups, verdicts, diagnoses, learned)


def run_evaluation(run: Run, split: str, protocol: Protocol, known: Evaluation | None = None) -> Evaluation:
    """Strict evaluation of the current policy on a split: greedy, bare interface. `known`: what it played already."""
    collector, tasks = run.evaluators[protocol], run.eval_tasks[split]
    with run.timer.phase("evaluation"):
        return evaluate(run.acting_params(), collector, tasks, split, run.evaluating(split, protocol), known)


def run_cued_evaluation(run: Run) -> Evaluation:
    """Test tasks with the cues of config.eval.cued: how much the policy leans on them."""
    with run.timer.phase("evaluation"):
        seen = run.evaluating("test", "seal", cued=True)
        shown = run.shown_in_cued_evaluation
        return cued_evaluation(run.acting_params(), run.collector, run.cued_tasks, "test", shown, seen)


def report(run: Run, when: str) -> None:
    """Evaluates the reported splits, which no decision of the run depends on, by every protocol asked for."""
    known: dict[Protocol, Evaluation] = {}
    for split in (s for s in REPORTED if run.eval_tasks[s]):
        for protocol in run.protocols:
            known[protocol] = run_evaluation(run, split, protocol, known.get(protocol))
            run.reported(when, known[protocol])
    if run.cued_tasks:
        run.reported(when, run_cued_evaluation(run))


def export(run: Run) -> None:
    """The best validated round's policy, else the latest, for other programs."""
    run.take_best()
    run.export()


def evaluate_only(run: Run) -> dict[str, Any]:
    """The report alone: of the best validated round, else of the latest; of the starting policy in a fresh workdir."""
    run.take_best()
    report(run, "after")
    return run.finish()
