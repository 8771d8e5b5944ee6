"""BFCL multi-turn as a Suite."""

from __future__ import annotations

from collections.abc import Sequence

from seal_jax.envs.base import World
from seal_jax.envs.bfcl.loader import Entry, load_category, load_docs
from seal_jax.envs.bfcl.package import language_hint as read_language_hint
from seal_jax.envs.bfcl.package import package_folder
from seal_jax.envs.bfcl.splits import paper_splits, read_splits
from seal_jax.envs.bfcl.worlds import open_quirky_pair, open_world
from seal_jax.envs.execution import MAX_RESULT_CHARS, TIME_LIMIT_S
from seal_jax.types import CATEGORIES, Program, Task


class BfclSuite:
    """The 800 tasks of base, miss_func, miss_param and long_context.

    Args:
      categories: which of them to load.
      split_file: your own splits (see splits.read_splits); "" = the paper's, by scenario number.
      allow_overlap: accept a split_file in which an evaluated split shares scenarios with train.
      language_hint: append the official generation script's Python hint to the docs offered at the start.
      time_limit_s, max_result_chars: limits of one call (see InstanceWorld).
      official_quirks: execute calls with the accidents of the official executor too (see quirks.py), for verdicts
        equal to the official ones also where a model writes text that looks like a call, or infinity. A text is the
        evaluated model's name, as bfcl-eval is told it; True stands for "model".

    Raises:
      ImportError: bfcl-eval is missing or of another version; the message holds the line to run.
      ValueError: an unknown category, or data that does not fit together, with the id of the task.
    """

    name = "bfcl"
    checks_abstention = False  # the official checker does not look at turns without a reference program

    def __init__(
        self,
        *,
        categories: Sequence[str] = CATEGORIES,
        split_file: str = "",
        allow_overlap: bool = False,
        language_hint: bool = False,
        time_limit_s: float | None = TIME_LIMIT_S,
        max_result_chars: int = MAX_RESULT_CHARS,
        official_quirks: bool | str = False,
    ) -> None:
        unknown = [c for c in categories if c not in CATEGORIES]
        if unknown or not categories:
            raise ValueError(f"suite_options.categories={tuple(categories)!r}: choose from {CATEGORIES}")
        self._splits = read_splits(split_file, allow_overlap=allow_overlap) if split_file else paper_splits()
        folder = package_folder()
        docs = load_docs(folder)
        hint = read_language_hint(folder) if language_hint else ""
        self._time_limit_s = time_limit_s
        self._max_result_chars = max_result_chars
        self.official_quirks = official_quirks
        self._entries: dict[str, Entry] = {}
        for category in CATEGORIES:
            if category in categories:
                for entry in load_category(folder, category, docs, hint):
                    self._entries[entry.task.id] = entry

    def tasks(self, split: str) -> tuple[Task, ...]:
        """By category, then number. The paper's: train 400, val 100, test 300, eval 400 (val and test), all 800."""
        if split not in self._splits:
            raise ValueError(f"split {split!r} is not one of this bfcl suite's: {', '.join(self._splits)}")
        ids = self._splits[split]
        return tuple(e.task for e in self._entries.values() if e.task.id in ids)

    def reference(self, task: Task) -> tuple[Program, ...]:
        return self._entry(task).programs

    def open(self, task: Task) -> World:
        if self.official_quirks:
            return self.open_pair(task)[0]
        entry = self._entry(task)
        return open_world(entry.scenarios, entry.long_context, self._time_limit_s, self._max_result_chars)

    def open_pair(self, task: Task) -> tuple[World, World]:
        """Worlds of policy and reference; with `official_quirks` they share what they share officially."""
        if not self.official_quirks:
            return self.open(task), self.open(task)
        entry = self._entry(task)
        model = self.official_quirks if isinstance(self.official_quirks, str) else "model"
        return open_quirky_pair(
            model, task.id, entry.scenarios, entry.long_context, self._time_limit_s, self._max_result_chars
        )

    def _entry(self, task: Task) -> Entry:
        if task.id not in self._entries:
            raise ValueError(f"task {task.id!r} is not among the {len(self._entries)} tasks of this bfcl suite")
        return self._entries[task.id]
