"""Plays episodes in lockstep: all live rows act together, then their worlds answer, until every episode is done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from seal_jax.chat.formats import ChatFormat
from seal_jax.chat.tokenizer import Tokenizer
from seal_jax.envs.base import Suite
from seal_jax.envs.verifier import Verifier
from seal_jax.interface import BARE, Interface
from seal_jax.rollout.engine import RolloutEngine
from seal_jax.rollout.episode import Episode, Limits, render_prompt
from seal_jax.telemetry.timing import PhaseTimer
from seal_jax.types import Step, Task, Trajectory

Row = tuple[int, int]  # (prompt b, rollout g)


@dataclass
class Collector:
    """Where policy and world meet. Holds no weights: `params` are an argument of every call."""

    engine: RolloutEngine
    suite: Suite
    chat: ChatFormat
    tokenizer: Tokenizer
    limits: Limits
    seed: int
    timer: PhaseTimer = field(default_factory=PhaseTimer)

    def collect(
        self,
        params,
        tasks: Sequence[Task],
        interface: Interface = BARE,
        *,
        rollouts: int,
        round: int,
        exposure: float = 0.0,
        temperature: float = 1.0,
        stop_failed_turns: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[list[Trajectory]]:
        """Plays `rollouts` episodes of every task.

        Args:
          exposure: share of each group's rows that see Ω's cues (1.0 = the paper; 0.0 = bare).
          temperature: of sampling; 0 is greedy.
          stop_failed_turns: end an episode at its first failed turn (its reward is 0 already).
          progress: told (episodes done, episodes in all) after every step of the live ones.

        Returns:
          one list of `rollouts` trajectories per task, in the order of `tasks`.
        """
        cued = cued_rows(rollouts, exposure if interface.active else 0.0)
        shown = interface if any(cued) else BARE  # inline cues stand in the prompt, which all rows share
        groups: list[list[Trajectory]] = []
        total = len(tasks) * rollouts
        for wave in _chunks(tasks, self.engine.group_buckets[-1]):  # more tasks than fit at once are played in waves
            prompts = [render_prompt(t, self.chat, self.tokenizer, shown) for t in wave]
            episodes = {
                (b, g): Episode(
                    task,
                    self.suite.open(task),
                    self.chat,
                    self.tokenizer,
                    shown,
                    self.limits,
                    prompt_ids=prompts[b],
                    rollout=g,
                    round=round,
                    cued=cued[g],
                    turn_failed=FailureWatch(self.suite, task) if stop_failed_turns else None,
                )
                for b, task in enumerate(wave)
                for g in range(rollouts)
            }
            earlier = len(groups) * rollouts
            report = None if progress is None else lambda done, earlier=earlier: progress(earlier + done, total)
            self._play(params, prompts, episodes, rollouts, round, temperature, report)
            groups += [[episodes[b, g].trajectory() for g in range(rollouts)] for b in range(len(wave))]
        return groups

    def _play(
        self,
        params,
        prompts: Sequence[Sequence[int]],
        episodes: dict[Row, Episode],
        rollouts: int,
        round: int,
        temperature: float,
        report: Callable[[int], None] | None = None,
    ) -> None:
        with self.timer.phase("prefill"):
            session = self.engine.start(params, prompts, rollouts)
        # A row's noise depends on (seed, round, task, rollout) alone, never on who shares the batch.
        keys = {row: row_seed(self.seed, round, e.task.id, e.rollout) for row, e in episodes.items()}
        live = {row: e for row, e in episodes.items() if not e.done}
        while live:
            with self.timer.phase("decode"):
                pending = {row: e.take_pending() for row, e in live.items()}
                sampled = session.act(pending, temperature=temperature, keys=keys)
            with self.timer.phase("environment"):
                for row, e in live.items():
                    e.receive(sampled[row].ids, sampled[row].logps, sampled[row].truncated)
            live = {row: e for row, e in live.items() if not e.done}
            if report is not None:
                report(len(episodes) - len(live))


class FailureWatch:
    """Tells an episode, at the end of each turn, whether the verifier has already failed it."""

    def __init__(self, suite: Suite, task: Task):
        self._session = Verifier(suite).begin(task)

    def __call__(self, turn: int, steps: tuple[Step, ...]) -> bool:
        return self._session.turn(steps).passed is False


def cued_rows(rollouts: int, exposure: float) -> list[bool]:
    """Which rows of a group see cues: round(exposure·G) of them, spread evenly. `cued_rows(4, .5)` = [F, T, F, T]."""
    n = round(exposure * rollouts)
    return [(g + 1) * n // rollouts > g * n // rollouts for g in range(rollouts)]


def row_seed(seed: int, round: int, task_id: str, rollout: int) -> int:
    """A stable uint32 for one row's sampling noise; the same on every host and Python hash seed."""
    digest = hashlib.blake2s(f"{seed}/{round}/{task_id}/{rollout}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _chunks(items: Sequence[Task], size: int) -> Iterator[Sequence[Task]]:
    for i in range(0, len(items), size):
        yield items[i : i + size]
