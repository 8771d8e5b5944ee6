"""Task batches: a seeded, resumable, endless stream over the training tasks, fed by grain.

Each epoch is one permutation of the tasks and the epochs are laid end to end, so a batch that does not divide the
task count is filled up from the next epoch: no task is ever skipped (a loader that drops the last batch never shows a
few tasks of each epoch) and all have been seen equally often at every epoch's end. The head of an epoch is chosen so
that the batch across the border holds no task twice: two groups of one task in one round would also share their
sampling seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain

from seal_jax.types import Task


class _Stream:
    """Positions 0, 1, 2, ... of the endless stream as task numbers; what grain reads from.

    Random access, so the stream's state is one position. `order(e)` is a pure function of (seed, tasks, batch, e).
    """

    def __init__(self, n_tasks: int, batch_size: int, seed: int) -> None:
        self.n_tasks, self.batch_size = n_tasks, batch_size
        self._shuffled = grain.MapDataset.range(n_tasks).shuffle(seed=seed).repeat()
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return self.n_tasks * 2**31  # endless for every purpose; sys.maxsize itself overflows inside grain

    def __getitem__(self, position: int) -> int:
        epoch, i = divmod(int(position), self.n_tasks)
        return self.order(epoch)[i]

    def order(self, epoch: int) -> list[int]:
        """The permutation of one epoch. Epochs build on each other, so they are computed upwards and kept."""
        for e in range(len(self._orders), epoch + 1):
            order = [int(self._shuffled[e * self.n_tasks + i]) for i in range(self.n_tasks)]
            carried = (e * self.n_tasks) % self.batch_size  # rows that the batch across the border has already
            if carried:
                used = set(self._orders[e - 1][-carried:])
                head = self.batch_size - carried
                # Each repeated task changes places with the first later one that is new to the batch.
                spare = (j for j in range(head, self.n_tasks) if order[j] not in used)
                for i in range(head):
                    if order[i] in used:
                        j = next(spare)
                        order[i], order[j] = order[j], order[i]
            self._orders[e] = order
        return self._orders[epoch]


class TaskBatches:
    """Endless iterator of lists of tasks. `get_state()` is JSON-able; after `set_state` the stream goes on from there.

    With several processes each yields its own equal slice of every global batch, in process order, and the state is
    the same on all of them: a run may be resumed on another number of processes.
    """

    def __init__(
        self, tasks: Sequence[Task], batch_size: int, seed: int, *, process_index: int = 0, process_count: int = 1
    ) -> None:
        if not tasks:
            raise ValueError(
                "there are no training tasks; choose a suite whose split 'train' holds some (config.suite_options)"
            )
        if batch_size < 1:
            raise ValueError(f"config.tasks_per_round={batch_size} must be at least 1")
        if batch_size > len(tasks):
            raise ValueError(
                f"config.tasks_per_round={batch_size} is more than the {len(tasks)} training tasks there are; lower it"
            )
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index={process_index} is not in 0..{process_count - 1}")
        if batch_size % process_count:
            raise ValueError(
                f"config.tasks_per_round={batch_size} does not divide over {process_count} processes; "
                f"use a multiple of {process_count}"
            )
        if not 0 <= seed < 2**32:
            raise ValueError(f"config.seed={seed} must be in 0..2**32-1")
        ids = [task.id for task in tasks]
        if len(set(ids)) != len(ids):
            twice = next(x for i, x in enumerate(ids) if x in ids[:i])
            raise ValueError(f"task id {twice!r} appears twice in the task list; ids must be unique")
        self.tasks = tuple(tasks)
        self.batch_size, self.seed = batch_size, seed
        share = batch_size // process_count
        self._mine = slice(process_index * share, (process_index + 1) * share)
        self._digest = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16]
        numbers = grain.MapDataset.source(_Stream(len(tasks), batch_size, seed)).batch(batch_size, batch_fn=list)
        # No read threads: the tasks are in memory, and a prefetched position must never reach a checkpoint.
        self._iterator = iter(numbers.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
        self._batches = 0

    def __iter__(self) -> Iterator[list[Task]]:
        return self

    def __next__(self) -> list[Task]:
        numbers = next(self._iterator)
        self._batches += 1
        return [self.tasks[i] for i in numbers[self._mine]]

    @property
    def epoch(self) -> float:
        """How often every task has been seen so far, on average (over all processes)."""
        return self._batches * self.batch_size / len(self.tasks)

    @property
    def opens_epoch(self) -> bool:
        """Whether the last batch is the first one that begins in its epoch."""
        start = (self._batches - 1) * self.batch_size
        return start // len(self.tasks) > (start - self.batch_size) // len(self.tasks)

    def get_state(self) -> dict[str, Any]:
        """JSON-able position: grain's own iterator state, and what it is only valid for."""
        return {
            "grain": self._iterator.get_state(),
            "batches": self._batches,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "tasks": self._digest,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position; ValueError if it belongs to other tasks, another batch size or another seed."""
        for field, mine in (("tasks", self._digest), ("batch_size", self.batch_size), ("seed", self.seed)):
            if state[field] != mine:
                raise ValueError(
                    f"saved data position has {field}={state[field]!r}, this run has {mine!r}; "
                    "resume with the tasks, batch size and seed of the run, or start in a new --workdir"
                )
        self._iterator.set_state(dict(state["grain"]))
        self._batches = int(state["batches"])


def task_batches(
    tasks: Sequence[Task], batch_size: int, seed: int, *, process_index: int = 0, process_count: int = 1
) -> TaskBatches:
    """Batches of `batch_size` tasks (over all processes) for ever; see `TaskBatches`."""
    return TaskBatches(tasks, batch_size, seed, process_index=process_index, process_count=process_count)
