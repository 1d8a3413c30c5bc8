"""Which unfinished tasks bear on which facts, kept up with the plan, so that what concerns a fact is found at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from replanning._ids import TaskId
from replanning._plan import Task
from replanning._staging import Staging
from replanning._states import FINISHED, SATISFIED

if TYPE_CHECKING:
    from replanning._live import LivePlan
    from replanning._world import Use

FEW: Final = 1_000
"""So many tasks are followed in any case; of more, the whole plan is looked at when they are a quarter of it."""


class Bearing:
    """The tasks by the facts that they need or change, of a plan that states its facts."""

    def __init__(self) -> None:
        self.changing: dict[str, dict[TaskId, None]] = {}
        self.needing: dict[str, dict[TaskId, None]] = {}
        self.open: dict[TaskId, None] = {}
        self._uses: dict[TaskId, Use] = {}

    def __repr__(self) -> str:
        return f"<Bearing of {len(self._uses)} tasks>"

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, task_id: TaskId, use: Use, *, settled: bool) -> None:
        """Remember what a task needs and changes; of one that is not settled, that may be otherwise later."""
        self.discard(task_id)
        self._uses[task_id] = use
        if not settled:
            self.open[task_id] = None
        for index, facts in ((self.needing, use.needs), (self.changing, use.adds | use.removes)):
            for fact in facts:
                index.setdefault(fact, {})[task_id] = None

    def discard(self, task_id: TaskId) -> None:
        """Forget a task."""
        use = self._uses.pop(task_id, None)
        if use is None:
            return
        self.open.pop(task_id, None)
        for index, facts in ((self.needing, use.needs), (self.changing, use.adds | use.removes)):
            for fact in facts:
                del index[fact][task_id]
                if not index[fact]:
                    del index[fact]


class Part(NamedTuple):
    """The part of a plan that has to do with some tasks and facts."""

    tasks: frozenset[TaskId]
    facts: frozenset[str]


def part_of(live: LivePlan, over: Staging, tasks: Collection[TaskId], facts: Collection[str]) -> Part | None:
    """All unfinished tasks that these tasks and facts have to do with, however indirectly; None: (nearly) all of them.

    Tasks belong together where one depends on the other, or one changes a fact on which the other bears.
    """
    bearing = live.usage.bearing
    if bearing is None or not (tasks or facts):
        return None
    return _Spread(live, over, bearing, facts).go(tasks)


class _Spread:
    """Goes from tasks to facts and from facts to tasks."""

    def __init__(self, live: LivePlan, over: Staging, bearing: Bearing, facts: Collection[str]) -> None:
        self._live = live
        self._over = over
        self._bearing = bearing
        self._facts = dict.fromkeys(facts)
        self._waiting: dict[TaskId, list[TaskId]] = {}
        for task_id, task in over.tasks.items():
            for dep in over.standing(task.depends_on):
                self._waiting.setdefault(dep, []).append(task_id)

    def go(self, tasks: Collection[TaskId]) -> Part | None:
        bearing, over = self._bearing, self._over
        most = max(FEW, len(bearing) // 4)
        stack = [*tasks, *over.tasks, *over.states, *over.removed, *bearing.open]
        for fact in self._facts:
            stack += [*bearing.changing.get(fact, ()), *bearing.needing.get(fact, ())]
        if len({task_id for task_id in stack if task_id in over}) > most:
            return None  # without following so many
        seen: dict[TaskId, None] = {}
        while stack:
            task_id = stack.pop()
            if task_id in seen or task_id not in over:
                continue
            seen[task_id] = None
            if len(seen) > most:
                return None
            stack += self._beside(task_id)
        return Part(frozenset(seen), frozenset(self._facts))

    def _beside(self, task_id: TaskId) -> Iterator[TaskId]:
        over, live = self._over, self._live
        task = over.task(task_id)
        yield from self._about(task)
        yield from (dep for dep in over.standing(task.depends_on) if over.state(dep) not in SATISFIED)
        yield from self._waiting.get(task_id, ())
        if task_id in live:
            yield from (i for i in live.entry(task_id).waiting() if live.entry(i).state not in FINISHED)
            if (old := live.entry(task_id).task) is not task:
                yield from self._about(old)

    def _about(self, task: Task) -> Iterator[TaskId]:
        """The tasks with which a task shares a fact that one of them changes."""
        bearing = self._bearing
        use = self._live.usage.of(task)
        for fact in use.stated:
            changed = fact in use.adds or fact in use.removes
            if fact not in self._facts and (changed or fact in bearing.changing):
                self._facts[fact] = None
                yield from bearing.changing.get(fact, ())
                yield from bearing.needing.get(fact, ())
