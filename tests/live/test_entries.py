# Ids are written as plain text here.
# mypy: disable-error-code="arg-type, assignment, union-attr, attr-defined"
"""Parts of a live plan: entries, resource pool, ready queue and deadlines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Task, TaskState
from replanning.live.entries import Deadlines, ReadyQueue, ResourcePool, TaskEntry


def ready(task_id: str, order: int, priority: int = 0) -> TaskEntry:
    """Return a ready task."""
    task = Task(id=task_id, priority=priority)
    entry = TaskEntry(task, order, None, task.__dict__, task_id, priority, task_id, 0)
    entry.state = TaskState.READY
    return entry


# Resources


def test_all_or_none() -> None:
    """A demand fits only as a whole, and can ever fit only within the capacity."""
    pool = ResourcePool({"cpu": 2, "disk": 1})
    pool.acquire({"cpu": 1.5})
    assert pool.fits_now({"cpu": 0.5, "disk": 1})
    assert not pool.fits_now({"cpu": 1, "disk": 1})
    assert pool.can_ever_fit({"cpu": 2})
    assert not pool.can_ever_fit({"cpu": 3})
    assert not pool.can_ever_fit({"gpu": 1})
    assert not pool.fits_now({"gpu": 1})
    pool.release({"cpu": 1.5})
    assert pool.used == {"cpu": 0.0, "disk": 0.0}


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 1 / 3, 0.7]), max_size=30), st.randoms(use_true_random=False))
def test_fractions_add_up(amounts: list[float], random: object) -> None:
    """After any sequence of acquired and released fractions nothing is in use."""
    pool = ResourcePool({"cpu": 0.3})
    for amount in amounts:
        pool.acquire({"cpu": amount})
    random.shuffle(amounts)
    for amount in amounts:
        pool.release({"cpu": amount})
    assert pool.used == {"cpu": 0.0}
    for _ in range(3):
        assert pool.fits_now({"cpu": 0.1})
        pool.acquire({"cpu": 0.1})
    assert not pool.fits_now({"cpu": 0.01})


# The queue


def test_queue_order() -> None:
    """Ready tasks are returned by priority, then by insertion."""
    queue = ReadyQueue()
    for entry in (ready("c", 2), ready("b", 1), ready("late", 0, priority=5), ready("early", 9, priority=-1)):
        queue.push(entry)
    assert [queue.pop().id for _ in range(4)] == ["early", "b", "c", "late"]
    assert queue.pop() is None


@pytest.mark.parametrize(
    ("field", "value"), [("state", TaskState.RUNNING), ("claim", 1), ("hold_count", 1), ("priority", 7), ("order", 7)]
)
def test_outdated_queue_items_are_dropped(field: str, value: object) -> None:
    """A task that is running, claimed, held or has another position is not returned."""
    queue, entry = ReadyQueue(), ready("a", 0)
    queue.push(entry)
    setattr(entry, field, value)
    assert queue.pop() is None


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 9))), max_size=40))
def test_queue_order_property(steps: list[tuple[int, int] | None]) -> None:
    """Each pop returns the first of all entries in the queue."""
    queue = ReadyQueue()
    inside: list[TaskEntry] = []
    for number, step in enumerate(steps):
        if step is None:
            entry = queue.pop()
            assert entry is (min(inside, key=lambda e: (e.priority, e.order, e.id)) if inside else None)
            if entry is not None:
                inside.remove(entry)
        else:
            inside.append(ready(f"t{number:02}", step[1], priority=step[0]))
            queue.push(inside[-1])


# Time


def test_deadlines() -> None:
    """Due entries are returned earliest first, and only while they are current."""
    deadlines = Deadlines()
    late, waits, over = ready("late", 0), ready("waits", 1), ready("over", 2)
    late.attempt, late.deadline = "late#1", 5.0
    waits.state, waits.not_before = TaskState.BACKOFF, 4.0
    deadlines.add(5.0, late, "late#1")
    deadlines.add(4.0, waits, None)
    deadlines.add(1.0, over, "over#1")
    behind = ready("behind", 3)
    behind.state, behind.not_before = TaskState.PENDING, 4.5
    deadlines.add(4.5, behind, None)
    assert deadlines.next_due() == 4.0
    assert list(deadlines.pop_due(4.0)) == [(waits, None)]
    assert list(deadlines.pop_due(4.5)) == [(behind, None)]
    assert list(deadlines.pop_due(9.0)) == [(late, "late#1")]
    assert deadlines.next_due() is None


@pytest.mark.parametrize(
    "changed",
    [{"attempt": "a#2"}, {"deadline": 9.0}, {"attempt": None, "deadline": None}],
)
def test_deadlines_of_ended_attempts(changed: dict[str, object]) -> None:
    """The deadline of an attempt that has ended or changed is ignored."""
    deadlines, entry = Deadlines(), ready("a", 0)
    entry.attempt, entry.deadline = "a#1", 5.0
    deadlines.add(5.0, entry, "a#1")
    for field, value in changed.items():
        setattr(entry, field, value)
    assert deadlines.next_due() is None


def test_deadlines_do_not_pile_up() -> None:
    """Deadlines of ended attempts are removed in time; current ones are kept."""
    deadlines, entry, waits = Deadlines(), ready("a", 0), ready("b", 1)
    waits.state, waits.not_before = TaskState.BACKOFF, 7.0
    deadlines.add(7.0, waits, None)
    for number in range(5_000):
        entry.attempt, entry.deadline = f"a#{number}", 10.0 + number
        deadlines.add(10.0 + number, entry, f"a#{number}")
    assert len(deadlines._heap) < 600
    assert list(deadlines.pop_due(9_999.0)) == [(waits, None), (entry, "a#4999")]


# Entries


@pytest.mark.parametrize("state", list(TaskState))
def test_satisfied(state: TaskState) -> None:
    """A done or skipped task satisfies its dependents, a replaced one once all its sinks do."""
    entry = ready("a", 0)
    entry.state, entry.unsatisfied_sinks = state, 0
    replaced = state is TaskState.REPLACED_BY_REPLAN
    assert entry.satisfied is (state in (TaskState.DONE, TaskState.SKIPPED) or replaced)
    entry.unsatisfied_sinks = 1
    assert entry.satisfied is (state in (TaskState.DONE, TaskState.SKIPPED))
