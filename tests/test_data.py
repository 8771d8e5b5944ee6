"""Task batches: every task once per epoch, no task twice in a batch, resumed = uninterrupted."""

import json
from collections import Counter
from itertools import islice

import pytest

from seal_jax.data import task_batches
from seal_jax.types import CATEGORIES, Task, UserTurn


def make_tasks(n: int) -> list[Task]:
    return [Task(f"t{i}", "toy", CATEGORIES[i % 4], f"s{i}", (UserTurn("hi"),), ()) for i in range(n)]


def ids(batches, n: int) -> list[list[str]]:
    return [[task.id for task in batch] for batch in islice(batches, n)]


@pytest.mark.parametrize(("n_tasks", "batch_size"), [(10, 3), (10, 10), (10, 7), (5, 4), (16, 4), (1, 1), (400, 32)])
def test_every_task_once_per_epoch_and_no_task_twice_in_a_batch(n_tasks, batch_size):
    epochs = 6
    rows = ids(task_batches(make_tasks(n_tasks), batch_size, seed=3), -(-n_tasks * epochs // batch_size))
    assert all(len(row) == len(set(row)) == batch_size for row in rows)
    stream = [x for row in rows for x in row]
    orders = [stream[e * n_tasks : (e + 1) * n_tasks] for e in range(epochs)]
    assert all(sorted(order) == sorted(f"t{i}" for i in range(n_tasks)) for order in orders)
    if n_tasks > 4:
        assert orders[0] != orders[1]
        assert len(Counter(map(tuple, orders))) == epochs


@pytest.mark.parametrize("done", [0, 1, 4, 9])
def test_resumed_equals_uninterrupted(done):
    tasks = make_tasks(10)
    straight = ids(task_batches(tasks, 3, seed=7), 12)
    first = task_batches(tasks, 3, seed=7)
    ids(first, done)
    state = json.loads(json.dumps(first.get_state()))
    second = task_batches(tasks, 3, seed=7)
    second.set_state(state)
    assert second.epoch == first.epoch == pytest.approx(done * 3 / 10)
    assert ids(second, 12 - done) == straight[done:]


def test_state_can_be_set_back_on_a_live_iterator():
    batches = task_batches(make_tasks(10), 3, seed=7)
    next(batches)
    state = batches.get_state()
    ahead = ids(batches, 5)
    batches.set_state(state)
    assert ids(batches, 5) == ahead


def test_processes_share_each_global_batch_and_its_state():
    tasks = make_tasks(10)
    whole = task_batches(tasks, 4, seed=1)
    parts = [task_batches(tasks, 4, seed=1, process_index=p, process_count=2) for p in range(2)]
    for batch in ids(whole, 7):
        assert batch == [task.id for part in parts for task in next(part)]
    assert parts[0].get_state() == parts[1].get_state() == whole.get_state()


def test_seed_changes_the_order_and_repeats_it():
    a, b, c = (ids(task_batches(make_tasks(20), 5, seed=s), 4) for s in (1, 1, 2))
    assert a == b != c


@pytest.mark.parametrize(
    ("n_tasks", "options", "message"),
    [
        (0, {"batch_size": 1}, "no training tasks"),
        (3, {"batch_size": 4}, "config.tasks_per_round=4 is more than the 3 training tasks"),
        (3, {"batch_size": 0}, "config.tasks_per_round=0"),
        (8, {"batch_size": 3, "process_count": 2}, "does not divide over 2 processes"),
        (8, {"batch_size": 4, "process_count": 2, "process_index": 2}, "process_index=2"),
        (8, {"batch_size": 4, "seed": -1}, "seed=-1"),
    ],
)
def test_bad_input_names_the_value(n_tasks, options, message):
    with pytest.raises(ValueError, match=message) as error:
        task_batches(make_tasks(n_tasks), **{"seed": 0, **options})
    assert "\n" not in str(error.value)


def test_doubled_ids_and_foreign_states_are_refused():
    tasks = make_tasks(6)
    with pytest.raises(ValueError, match="'t0' appears twice"):
        task_batches([*tasks, tasks[0]], 2, seed=0)
    state = task_batches(tasks, 2, seed=0).get_state()
    for other in (task_batches(tasks[:5], 2, 0), task_batches(tasks, 3, 0), task_batches(tasks, 2, 1)):
        with pytest.raises(ValueError, match="saved data position has"):
            other.set_state(state)
