"""Strict evaluation: greedy, one episode a task, the bare interface. Always; there is no argument to change that.

`cued_evaluation` is beside it for those who ask how much a policy leans on cues. What it finds is no score.

The protocol is the collector's ("seal" or "official"), and every result names it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seal_jax import processes
from seal_jax.diagnosis import diagnose
from seal_jax.envs.verifier import Verifier
from seal_jax.interface import BARE, Interface
from seal_jax.rollout.collector import Collector
from seal_jax.telemetry.style import CUED
from seal_jax.types import LABELS, Diagnosis, Protocol, Task, Trajectory, Verdict


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of one split. Success is the verifier's 0/1; the denominator is the number of tasks asked for."""

    split: str
    rewards: dict[str, float]  # task id -> 0/1
    categories: dict[str, str]
    trajectories: tuple[Trajectory, ...]
    verdicts: tuple[Verdict, ...]
    diagnoses: tuple[Diagnosis, ...]
    protocol: Protocol = "seal"
    cued: bool = False

    @property
    def name(self) -> str:
        """Of split and protocol in metrics and files: "test" in the paper's protocol, "test_official" in the other, and
        "test_cued" where cues were shown."""
        return result_name(self.split, self.protocol, self.cued)

    @property
    def success(self) -> float:
        """Share of tasks solved."""
        return sum(self.rewards.values()) / len(self.rewards)

    @property
    def by_category(self) -> dict[str, float]:
        rewards = defaultdict(list)
        for task_id, reward in self.rewards.items():
            rewards[self.categories[task_id]].append(reward)
        return {c: sum(r) / len(r) for c, r in sorted(rewards.items())}

    @property
    def label_rates(self) -> dict[str, float]:
        """Share of each label among all turns of the split."""
        counts = Counter(name for d in self.diagnoses for name in d.names)
        total = max(1, sum(counts.values()))
        return {label: counts[label] / total for label in LABELS}

    @property
    def error_success(self) -> tuple[float, int]:
        """(success, count) over the episodes in which some tool refused a call."""
        met = [
            v.reward
            for v, t in zip(self.verdicts, self.trajectories, strict=True)
            if any(r.error == "tool_error" for turn in t.turns for step in turn for r in step.results)
        ]
        return (sum(met) / len(met) if met else float("nan")), len(met)

    @property
    def outcomes(self) -> dict[str, tuple[str, float]]:
        """{task id: (category, reward)}, for a paired comparison."""
        return {i: (self.categories[i], r) for i, r in self.rewards.items()}

    def metrics(self) -> dict[str, float]:
        out = {"success": self.success, "n": float(len(self.rewards))}
        out |= {f"success/{c}": v for c, v in self.by_category.items()}
        out |= {f"label/{k}": v for k, v in self.label_rates.items() if v > 0}
        out["success_after_error"], out["n_error"] = self.error_success
        # Where a row was full it is our shapes that failed, perhaps, and not the policy.
        out["context_limit"] = sum(t.stop == "context_limit" for t in self.trajectories) / len(self.trajectories)
        return {f"eval/{self.name}/{key}": value for key, value in out.items()}


def result_name(split: str, protocol: Protocol, cued: bool = False) -> str:
    return (split if protocol == "seal" else f"{split}_{protocol}") + (CUED if cued else "")


def evaluate(
    params,
    collector: Collector,
    tasks: Sequence[Task],
    split: str,
    progress: Callable[[int, int], None] | None = None,
    known: Evaluation | None = None,
) -> Evaluation:
    """Plays every task once, greedily, without any cue, and verifies and diagnoses it. Several processes share the
    tasks, and each returns the whole evaluation.

    Args:
      params: on this process's devices.
      progress: told (episodes done, episodes in all of this process) as they are played.
      known: another evaluation of the same policy in the same protocol; its tasks are not played again.
    """
    return _evaluate(params, collector, tasks, split, BARE, progress, known)


def cued_evaluation(
    params,
    collector: Collector,
    tasks: Sequence[Task],
    split: str,
    interface: Interface,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """As `evaluate`, but with the cues of `interface` shown in every episode."""
    return _evaluate(params, collector, tasks, split, interface, progress)


def _evaluate(params, collector, tasks, split, interface, progress, known=None) -> Evaluation:
    if not tasks:
        raise ValueError(f"evaluation split {split!r} of suite {collector.suite.name!r} has no tasks")
    cued = bool(interface.active)
    have = () if known is None else zip(known.trajectories, known.verdicts, known.diagnoses, strict=True)
    rows = {t.task_id: (t, v, d) for t, v, d in have}
    new = [task for task in tasks if task.id not in rows]
    if new:
        mine = new[processes.share(len(new))]
        groups = collector.collect(
            params,
            mine,
            interface,
            rollouts=1,
            round=-1,
            exposure=float(cued),
            temperature=0.0,
            progress=progress,
        )
        verifier = Verifier(collector.suite)
        played = []
        for task, (trajectory,) in zip(mine, groups, strict=True):
            verdict = verifier.verify_trajectory(task, trajectory)
            played.append((trajectory, verdict, diagnose(verdict)))
        rows |= {row[0].task_id: row for row in processes.exchange(played)}
    trajectories, verdicts, diagnoses = zip(*(rows[task.id] for task in tasks), strict=True)
    return Evaluation(
        split=split,
        rewards={task.id: v.reward for task, v in zip(tasks, verdicts, strict=True)},
        categories={task.id: task.category for task in tasks},
        trajectories=trajectories,
        verdicts=verdicts,
        diagnoses=diagnoses,
        protocol=collector.limits.protocol,
        cued=cued,
    )
