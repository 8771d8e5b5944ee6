"""Plays episodes in lockstep: all live rows act together, then their worlds answer, until every episode is done.

With `overlap` two half-batches take turns, each in lockstep (time runs to the right):

    device   | decode A | decode B | decode A | decode B | ...
    host                | worlds A | worlds B | worlds A | ...
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from seal_jax.chat.formats import ChatFormat
from seal_jax.chat.tokenizer import Tokenizer
from seal_jax.envs.base import Suite
from seal_jax.envs.verifier import Verifier, VerifierSession
from seal_jax.interface import BARE, Interface
from seal_jax.rollout.engine import RolloutEngine
from seal_jax.rollout.episode import Episode, Limits, render_prompt
from seal_jax.rollout.work import Work
from seal_jax.telemetry.timing import PhaseTimer
from seal_jax.types import Step, Task, Trajectory, Verdict


@dataclass
class Collector:
    """Where policy and world meet. Holds no weights: `params` are an argument of every call.

    overlap: play two half-batches in turns, so that the device decodes one while the worlds of the other answer. The
    episodes are the same either way: a row's noise and numbers do not depend on who shares its batch (but for the last
    bits of a float32, where a batch of another size is summed in another order).
    """

    engine: RolloutEngine
    suite: Suite
    chat: ChatFormat
    tokenizer: Tokenizer
    limits: Limits
    seed: int
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    overlap: bool = False
    spent: dict[str, float] = field(default_factory=dict, init=False)  # the `rollout/...` metrics of the last `collect`
    #: id of a trajectory of the last `collect` -> itself (ids of the living are unique) and what has judged its turns
    _judged: dict[int, tuple[Trajectory, VerifierSession]] = field(default_factory=dict, init=False, repr=False)

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
        self._judged = {}
        work, before, started = Work(), dict(self.timer.totals), time.perf_counter()

        def open_rows(task: Task, prompt_ids: Sequence[int]) -> list[Episode]:
            return [
                Episode(
                    task,
                    self.suite.open(task),
                    self.chat,
                    self.tokenizer,
                    shown,
                    self.limits,
                    prompt_ids=prompt_ids,
                    rollout=g,
                    round=round,
                    cued=cued[g],
                    turn_failed=FailureWatch(self.suite, task) if stop_failed_turns else None,
                )
                for g in range(rollouts)
            ]

        for wave in _chunks(tasks, self.engine.group_buckets[-1]):  # more tasks than fit at once are played in waves
            prompts = [render_prompt(t, self.chat, self.tokenizer, shown) for t in wave]
            rows = [open_rows(task, prompt) for task, prompt in zip(wave, prompts, strict=True)]

            def report(earlier: int = len(groups) * rollouts, rows: list[list[Episode]] = rows) -> None:
                if progress is not None:
                    progress(earlier + sum(e.done for group in rows for e in group), len(tasks) * rollouts)

            _in_turns(
                self._play(params, prompts[part], rows[part], round, temperature, work, report)
                for part in batches(len(wave), self.engine.group_buckets, halve=self.overlap)
            )
            groups += [[self._ended(e) for e in group] for group in rows]
        seconds = {name: total - before.get(name, 0.0) for name, total in self.timer.totals.items()}
        self.spent = work.metrics(seconds, time.perf_counter() - started)
        return groups

    def verify(self, task: Task, trajectory: Trajectory) -> Verdict:
        """The verifier's verdict. Turns that were judged while the episode was played are not replayed again."""
        _, begun = self._judged.pop(id(trajectory), (None, None))
        return Verifier(self.suite).verify_trajectory(task, trajectory, begun)

    def _ended(self, episode: Episode) -> Trajectory:
        trajectory = episode.trajectory()
        if isinstance(episode.turn_failed, FailureWatch):
            self._judged[id(trajectory)] = (trajectory, episode.turn_failed.session)
        return trajectory

    def _play(
        self,
        params,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Sequence[Episode]],
        round: int,
        temperature: float,
        work: Work,
        report: Callable[[], None],
    ) -> Iterator[None]:
        """Plays the episodes of some groups to their end; yields whenever only the device has something to do."""
        episodes = {(b, g): e for b, group in enumerate(rows) for g, e in enumerate(group)}
        session = self.engine.start(params, prompts, len(rows[0]), timer=self.timer)
        # A row's noise depends on (seed, round, task, rollout) alone, never on who shares the batch.
        keys = {row: row_seed(self.seed, round, e.task.id, e.rollout) for row, e in episodes.items()}
        live = {row: e for row, e in episodes.items() if not e.done}
        while live:
            pending = {row: e.take_pending() for row, e in live.items()}
            sampled = yield from session.act_in_parts(pending, temperature=temperature, keys=keys)
            with self.timer.phase("environment"):
                for row, e in live.items():
                    e.receive(sampled[row].ids, sampled[row].logps, sampled[row].truncated)
            live = {row: e for row, e in live.items() if not e.done}
            report()
        work += session.work


class FailureWatch:
    """Tells an episode, at the end of each turn, whether the verifier has already failed it."""

    def __init__(self, suite: Suite, task: Task):
        self.session = Verifier(suite).begin(task)

    def __call__(self, turn: int, steps: tuple[Step, ...]) -> bool:
        return self.session.turn(steps).passed is False


def batches(groups: int, buckets: Sequence[int], *, halve: bool) -> list[slice]:
    """Which groups of a wave play together: all, or two halves where the declared buckets hold these with no more
    places. `batches(12, (4, 8, 16), halve=True)` = groups 0-5 and 6-11, each in a bucket of 8."""
    half = (groups + 1) // 2
    size, size_of_half = (next(b for b in buckets if b >= n) for n in (groups, half))
    if not halve or groups < 2 or 2 * size_of_half > size:
        return [slice(0, groups)]
    return [slice(0, half), slice(half, groups)]


def _in_turns(plays: Iterable[Iterator[None]]) -> None:
    """Runs all to their end. Whoever yields waits until the others have yielded too."""
    running = list(plays)
    while running:
        running = [play for play in running if next(play, True) is None]


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
