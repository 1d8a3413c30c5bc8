"""Which unfinished tasks bear on which facts, kept up with the plan, so that what concerns a fact is found at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from replanning.live.staging import PlanOverlay
from replanning.live.states import FINISHED, SATISFIED
from replanning.plan.tasks import Task
from replanning.plan.types import TaskId

if TYPE_CHECKING:
    from replanning.live.plan import LivePlan
    from replanning.live.world import GroundAction


MIN_SUBGRAPH_LIMIT: Final = 1_000
"""So many tasks are followed in any case; of more, the whole plan is looked at when they are a quarter of it."""


class FactIndex:
    """The tasks by the facts that they need or change, of a plan that states its facts."""

    def __init__(self) -> None:
        self.writers: dict[str, dict[TaskId, None]] = {}
        self.readers: dict[str, dict[TaskId, None]] = {}
        self.unresolved: dict[TaskId, None] = {}
        self._actions: dict[TaskId, GroundAction] = {}

    def __repr__(self) -> str:
        return f"<Bearing of {len(self._actions)} tasks>"

    def __len__(self) -> int:
        return len(self._actions)

    def add(self, task_id: TaskId, use: GroundAction, *, resolved: bool) -> None:
        """Remember what a task needs and changes; of one that is not settled, that may be otherwise later."""
        self.discard(task_id)
        self._actions[task_id] = use
        if not resolved:
            self.unresolved[task_id] = None
        for index, facts in ((self.readers, use.requires), (self.writers, use.adds | use.removes)):
            for fact in facts:
                index.setdefault(fact, {})[task_id] = None

    def discard(self, task_id: TaskId) -> None:
        """Forget a task."""
        use = self._actions.pop(task_id, None)
        if use is None:
            return
        self.unresolved.pop(task_id, None)
        for index, facts in ((self.readers, use.requires), (self.writers, use.adds | use.removes)):
            for fact in facts:
                del index[fact][task_id]
                if not index[fact]:
                    del index[fact]


class RelevantSubgraph(NamedTuple):
    """The part of a plan that has to do with some tasks and facts."""

    tasks: frozenset[TaskId]
    facts: frozenset[str]


def relevant_subgraph(
    live: LivePlan, over: PlanOverlay, tasks: Collection[TaskId], facts: Collection[str]
) -> RelevantSubgraph | None:
    """All unfinished tasks that these tasks and facts have to do with, however indirectly; None: (nearly) all of them.

    Tasks belong together where one depends on the other, or one changes a fact on which the other bears.
    """
    bearing = live.dependency_index.fact_index
    if bearing is None or not (tasks or facts):
        return None
    return _SubgraphSearch(live, over, bearing, facts).run(tasks)


class _SubgraphSearch:
    """Goes from tasks to facts and from facts to tasks."""

    def __init__(self, live: LivePlan, over: PlanOverlay, bearing: FactIndex, facts: Collection[str]) -> None:
        self._live = live
        self._overlay = over
        self._fact_index = bearing
        self._facts = dict.fromkeys(facts)
        self._staged_dependents: dict[TaskId, list[TaskId]] = {}
        for task_id, task in over.tasks.items():
            for dep in over.follow_replacements(task.depends_on):
                self._staged_dependents.setdefault(dep, []).append(task_id)

    def run(self, tasks: Collection[TaskId]) -> RelevantSubgraph | None:
        bearing, over = self._fact_index, self._overlay
        most = max(MIN_SUBGRAPH_LIMIT, len(bearing) // 4)
        stack = [*tasks, *over.tasks, *over.states, *over.removed, *bearing.unresolved]
        for fact in self._facts:
            stack += [*bearing.writers.get(fact, ()), *bearing.readers.get(fact, ())]
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
            stack += self._neighbours(task_id)
        return RelevantSubgraph(frozenset(seen), frozenset(self._facts))

    def _neighbours(self, task_id: TaskId) -> Iterator[TaskId]:
        over, live = self._overlay, self._live
        task = over.task(task_id)
        yield from self._tasks_sharing_facts(task)
        yield from (dep for dep in over.follow_replacements(task.depends_on) if over.state(dep) not in SATISFIED)
        yield from self._staged_dependents.get(task_id, ())
        if task_id in live:
            yield from (i for i in live.entry(task_id).dependent_ids() if live.entry(i).state not in FINISHED)
            if (old := live.entry(task_id).task) is not task:
                yield from self._tasks_sharing_facts(old)

    def _tasks_sharing_facts(self, task: Task) -> Iterator[TaskId]:
        """The tasks with which a task shares a fact that one of them changes."""
        bearing = self._fact_index
        use = self._live.dependency_index.action_for(task)
        for fact in use.facts:
            changed = fact in use.adds or fact in use.removes
            if fact not in self._facts and (changed or fact in bearing.writers):
                self._facts[fact] = None
                yield from bearing.writers.get(fact, ())
                yield from bearing.readers.get(fact, ())
