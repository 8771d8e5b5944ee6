"""The "toolbox" suite: its splits, reference programs and worlds.

Splits are made by scenario: train 100, val 25, test 100 (training domains), ood 50 (held-out domains); each scenario
gives one task per category, so a split has 4x as many tasks.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from seal_jax.envs.base import register_suite
from seal_jax.envs.toolbox.generator import BuiltTask, Script, make_scenario, make_task, open_instance, troubles_at
from seal_jax.envs.toolbox.skins import ALL_KINDS, OOD_SKINS, TRAIN_SKINS, Skin, skins_of
from seal_jax.envs.toolbox.world import ToolboxWorld
from seal_jax.types import CATEGORIES, Program, Task


class TaskStore:
    """Any collection of built tasks as a suite: worlds, reference programs and teacher's scripts by task id."""

    name = "toolbox"
    checks_abstention = True

    def __init__(self, splits: Mapping[str, Iterable[BuiltTask]]) -> None:
        self._splits = {split: tuple(built) for split, built in splits.items()}
        self._built = {b.task.id: b for built in self._splits.values() for b in built}

    def tasks(self, split: str) -> Sequence[Task]:
        return tuple(b.task for b in self.built(split))

    def reference(self, task: Task) -> tuple[Program, ...]:
        return self.built_task(task).programs

    def open(self, task: Task) -> ToolboxWorld:
        built = self.built_task(task)
        return ToolboxWorld(built.scenario.skin.name, open_instance(built), built.scenario.tools)

    def script(self, task: Task) -> tuple[Script, ...]:
        """What a teacher follows: the reference program with its repairs marked as such."""
        return self.built_task(task).script

    def built(self, split: str) -> tuple[BuiltTask, ...]:
        if split not in self._splits:
            raise ValueError(f"toolbox: split {split!r} is not known; choose one of {sorted(self._splits)}")
        return self._splits[split]

    def built_task(self, task: Task) -> BuiltTask:
        """The task with its scenario and script: for teachers and statistics, never for a policy."""
        try:
            return self._built[task.id]
        except KeyError:
            raise ValueError(f"toolbox: task {task.id!r} is not of this suite (another seed or split sizes?)") from None


@register_suite("toolbox")
class ToolboxSuite(TaskStore):
    """The embedded environment. The same options give the same tasks, byte for byte, everywhere.

    Args:
      seed: of all tasks of all splits.
      train, val, test, ood: number of scenarios of each split (tasks are four times as many).
      kinds: of domains; their skins alone are used. () = all four.
      troubled: share of scenarios in which a tool refuses something on the way.

    Raises:
      ValueError: for any value that cannot be, or kinds that leave a split without a domain.
    """

    def __init__(
        self,
        seed: int = 0,
        train: int = 100,
        val: int = 25,
        test: int = 100,
        ood: int = 50,
        kinds: Sequence[str] = (),
        troubled: float = 0.38,
    ) -> None:
        sizes = {"train": train, "val": val, "test": test, "ood": ood}
        for split, n in sizes.items():
            if not isinstance(n, int) or isinstance(n, bool) or n < 0:
                raise ValueError(f"suite_options.{split}={n!r}: the number of scenarios must be an integer >= 0")
        number = isinstance(troubled, int | float) and not isinstance(troubled, bool)
        if not number or not 0.0 <= troubled <= 1.0:
            raise ValueError(f"suite_options.troubled={troubled!r}: the share of scenarios must be between 0 and 1")
        if not isinstance(kinds, list | tuple) or any(kind not in ALL_KINDS for kind in kinds):
            raise ValueError(f"suite_options.kinds={kinds!r}: give a list of some of {ALL_KINDS}")
        #: The kinds of domain in use; demonstrations are of the same.
        self.kinds = kinds = tuple(kind for kind in ALL_KINDS if kind in kinds or not kinds)
        skins = {s: skins_of(OOD_SKINS if s == "ood" else TRAIN_SKINS, kinds) for s in sizes}
        for split, some in skins.items():
            if sizes[split] and not some:
                raise ValueError(
                    f"suite_options.kinds={kinds!r} leave split {split!r} without a domain; add one of "
                    f"{sorted({s.kind for s in OOD_SKINS})} or set suite_options.{split}=0"
                )
        taken: set[str] = set()  # no user text of one split returns in another
        super().__init__({s: _split(seed, s, n, skins[s], troubled, taken) for s, n in sizes.items()})
        #: Every scenario's user text; demonstrations keep away from them.
        self.user_texts = frozenset(taken)
        for split in sizes:
            refused, n = sum(b.scenario.refusals > 0 for b in self.built(split)), sizes[split]
            # Points that are spread evenly still miss a share of few scenarios by one or two.
            if refused < len(CATEGORIES) * (troubled * n - 0.05 * n - 2):
                raise RuntimeError(f"toolbox: only {refused} of {len(self.built(split))} {split} tasks have a refusal")


#: Of the scenarios with trouble, the share with two.
_TWO = 0.08 / 0.38
#: Steps of this length spread points evenly over [0, 1), whatever their number.
_GOLDEN = 0.6180339887498949


def _split(seed: int, split: str, n: int, skins: Sequence[Skin], troubled: float, taken: set[str]) -> list[BuiltTask]:
    start = random.Random(f"toolbox/{seed}/{split}").random()
    built = []
    for i in range(n):
        scenario = make_scenario(
            f"{split}-{i:03d}",
            skins[i % len(skins)],
            f"toolbox/{seed}/{split}/{i}",
            # Not drawn at random: the share of tasks with refusals, the main difficulty, is the same in all splits.
            troubles=troubles_at((start + i * _GOLDEN) % 1.0, 1.0 - troubled, 1.0 - troubled * _TWO),
            taken=taken,
        )
        built += [make_task(scenario, category) for category in CATEGORIES]
    return built
