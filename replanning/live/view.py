"""A read-only look at a live plan, for providers, detectors and people."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from replanning.changes import PlanChange, ReplaceTask
from replanning.errors import Problem, StaleView
from replanning.journal.observations import Failure
from replanning.journal.records import PlanRevised
from replanning.live.draft import Draft
from replanning.live.entries import CONDITION_NOT_MET
from replanning.live.states import FINISHED, TaskState
from replanning.live.world import StripsProblem, strips_problem
from replanning.plan.document import Plan
from replanning.plan.tasks import Goal, Task, ToolSpec
from replanning.plan.types import JsonValue, TaskId

if TYPE_CHECKING:
    from replanning.live.entries import TaskEntry
    from replanning.live.plan import LivePlan


_ID_SUFFIX = re.compile(r"~\d+$")


class TaskView(NamedTuple):
    """One task as it stands: its document, state, attempts so far, last failure, and its lineage.

    `condition_not_met` says that it was skipped because its condition did not hold, `is_held` that a question to a person is
    about it.
    """

    id: TaskId
    task: Task
    state: TaskState
    attempts: int
    failure: Failure | None
    root: TaskId
    iteration: int
    replaced_by: tuple[TaskId, ...]
    reason: str
    failures: int
    duration: float
    condition_not_met: bool
    is_held: bool


class PlanView:
    """The plan as it stands, pinned to the revision at which the view was made; it copies nothing.

    Reading it after the plan has moved on to another revision raises `StaleView`. States move on within a
    revision, as tasks finish.
    """

    __slots__ = ("_plan", "revision")

    def __init__(self, live: LivePlan) -> None:
        self._plan = live
        self.revision = live.revision

    def __repr__(self) -> str:
        return f"<PlanView revision={self.revision} of {self._plan!r}>"

    @property
    def _live(self) -> LivePlan:
        if self._plan.revision != self.revision:
            raise StaleView(self.revision, self._plan.revision)
        return self._plan

    @property
    def goal(self) -> Goal:
        """What the plan is for now."""
        return self._live.goal

    @property
    def original_plan(self) -> Plan:
        """The plan document that the run started from."""
        return self._live.plan

    @property
    def context(self) -> Mapping[str, JsonValue]:
        """The context now."""
        return MappingProxyType(self._live.context)

    @property
    def facts(self) -> AbstractSet[str]:
        """The facts that hold now."""
        return self._live.facts.keys()

    @property
    def tools(self) -> Mapping[str, ToolSpec]:
        """The tools by name, with their availability now."""
        return MappingProxyType(self._live.tools)

    def tool(self, name: str | None) -> ToolSpec | None:
        """A tool, or None where the plan does not describe it."""
        return self._live.tools.get(name) if name is not None else None

    @property
    def capacity(self) -> Mapping[str, float]:
        """The resources and how much of each there is now."""
        return MappingProxyType(self._live.pool.capacity)

    def demand(self, task: Task) -> Mapping[str, float]:
        """What a task takes of the resources."""
        return self._live.dispatcher.demand(task)

    def task(self, task_id: TaskId) -> TaskView:
        """A task by its id, past ones included.

        Raises:
            UnknownTask: there never was one.
        """
        return _task_view(self._live.entry(task_id))

    def tasks(self) -> Iterator[TaskView]:
        """All tasks, past ones included, in the order in which they came into the plan."""
        return (_task_view(entry) for entry in self._live)

    def task_states(self) -> Iterator[tuple[Task, TaskState]]:
        """The same as they are written, each with its state alone: for whoever looks through all of a large plan."""
        return ((entry.task, entry.state) for entry in self._live)

    def stuck(self) -> tuple[TaskView, ...]:
        """The tasks that FAILED or are BLOCKED."""
        return tuple(_task_view(self._live.entry(task_id)) for task_id in self._live.stuck)

    def unfinished(self) -> Iterator[TaskView]:
        """The tasks that still have to run, or could not: neither finished nor removed."""
        return (_task_view(entry) for entry in self._live if entry.state not in FINISHED)

    def context_readers(self, key: str) -> tuple[TaskView, ...]:
        """The tasks whose arguments or condition refer to a key of the context."""
        return tuple(
            _task_view(self._live.entry(task_id))
            for task_id in self._live.dependency_index.context_readers.get(key, ())
        )

    def resource_users(self, name: str) -> Iterator[TaskView]:
        """The unfinished tasks that use a tool or take a resource of this name."""
        return (
            _task_view(self._live.entry(task_id))
            for task_id in self._live.dependency_index.resource_users.get(name, ())
        )

    def dependents(self, task_id: TaskId) -> tuple[TaskId, ...]:
        """The tasks that wait for a task, also those that wait for what it replaced."""
        return self._live.entry(task_id).dependent_ids()

    def arguments(self, task_id: TaskId) -> Mapping[str, JsonValue]:
        """The arguments of a task with references replaced by their values.

        Raises:
            ExpressionError: a reference finds nothing (yet).
        """
        return self._live.arguments(self._live.entry(task_id))

    def result(self, task_id: TaskId) -> JsonValue:
        """The output found through the lineage of a task.

        Raises:
            UnknownTask: there is none (yet).
        """
        return self._live.results.output_of(task_id)

    def lineage(self, task_id: TaskId) -> tuple[TaskView, ...]:
        """What a task replaced, the root first, and the task itself."""
        chain = [entry := self._live.entry(task_id)]
        while entry.parent is not None:
            chain.append(entry := entry.parent)
        return tuple(map(_task_view, reversed(chain)))

    def strips_problem(
        self, changes: Sequence[PlanChange] = (), *, tasks: Collection[TaskId] = (), facts: Collection[str] = ()
    ) -> StripsProblem:
        """The facts, the steps that are left and the goal, now or as changes that fit the plan would leave them.

        Args:
            changes: these changes.
            tasks: with `facts`, about which the world is to be: of a plan that states its facts, what has nothing to
                do with these may be left out.
            facts: see `tasks`.
        """
        live = self._live
        return strips_problem(live, Draft(live, changes).overlay if changes else None, tasks=tasks, facts=facts)

    def check(self, changes: Sequence[PlanChange]) -> tuple[Problem, ...]:
        """What speaks against changes; nothing if they can be applied."""
        return self._live.check(changes)

    def with_changes(self, changes: Sequence[PlanChange]) -> DraftView:
        """The plan as changes that fit it would leave it, to plan on from there."""
        return DraftView(self._live, changes)

    def unused_id(self, base: TaskId, taken: Container[TaskId] = ()) -> TaskId:
        """An id made from another that no task has had, and that is not among those already given out."""
        live, stem, number = self._live, _ID_SUFFIX.sub("", base)[:180], 2
        while (new := f"{stem}~{number}") in live or new in taken:
            number += 1
        return new

    @property
    def succeeded_attempts(self) -> int:
        """How many attempts have succeeded."""
        return self._live.success_durations[0]

    @property
    def ended_attempts(self) -> int:
        """How many attempts have ended."""
        return self._live.ended_attempts

    @property
    def successful_seconds(self) -> float:
        """How long successful attempts took, added up."""
        return self._live.success_durations[1]

    @property
    def counts(self) -> Mapping[TaskState, int]:
        """How many tasks are in each state, past ones included."""
        return MappingProxyType(self._live.counts)

    def evaluate(self, condition: str) -> bool:
        """Whether a `when` expression holds now.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        return self._live.evaluate(condition)


class DraftView:
    """A plan as changes would leave it that have not been applied; what is said of it follows these changes."""

    __slots__ = ("_base", "_changes", "_overlay")

    def __init__(self, live: LivePlan, changes: Sequence[PlanChange]) -> None:
        self._base = PlanView(live)
        self._changes = tuple(changes)
        self._overlay = Draft(live, self._changes).overlay

    def __repr__(self) -> str:
        return f"<DraftView of {len(self._changes)} changes to {self._base!r}>"

    @property
    def new_task_ids(self) -> tuple[TaskId, ...]:
        """The tasks that the changes bring in."""
        return tuple(self._overlay.new_tasks)

    @property
    def original_plan(self) -> Plan:
        """The plan document that the run started from."""
        return self._base.original_plan

    @property
    def goal(self) -> Goal:
        """What the plan is for now."""
        return self._base.goal

    @property
    def tools(self) -> Mapping[str, ToolSpec]:
        """The tools by name, with their availability now."""
        return self._base.tools

    def tool(self, name: str | None) -> ToolSpec | None:
        """A tool, or None where the plan does not describe it."""
        return self._base.tool(name)

    def task(self, task_id: TaskId) -> TaskView:
        """A task by its id, new and past ones included.

        Raises:
            UnknownTask: there is none.
        """
        staging = self._overlay
        if task_id not in staging.new_tasks:
            return self._base.task(task_id)._replace(task=staging.task(task_id), state=staging.state(task_id))
        older = (task_id, *staging.ancestors(task_id))
        task, state = staging.task(task_id), staging.state(task_id)
        root, iteration = older[-1], len(older) - 1
        return TaskView(
            task_id, task, state, 0, None, root, iteration, (), "", 0, 0.0, condition_not_met=False, is_held=False
        )

    def tasks(self) -> Iterator[TaskView]:
        """All tasks, past ones included, then the new ones."""
        return map(self.task, [*(task.id for task in self._base.tasks()), *self.new_task_ids])

    def task_states(self) -> Iterator[tuple[Task, TaskState]]:
        """The same as they are written, each with its state alone."""
        staging = self._overlay
        ids = [*(task.id for task, _ in self._base.task_states()), *self.new_task_ids]
        return ((staging.task(task_id), staging.state(task_id)) for task_id in ids)

    def lineage(self, task_id: TaskId) -> tuple[TaskView, ...]:
        """What a task replaced, the root first, and the task itself."""
        return (*map(self.task, reversed(list(self._overlay.ancestors(task_id)))), self.task(task_id))

    def strips_problem(self) -> StripsProblem:
        """The facts, the steps that would be left and the goal."""
        return strips_problem(self._base._live, self._overlay)

    def check(self, changes: Sequence[PlanChange]) -> tuple[Problem, ...]:
        """What speaks against applying these changes after the first ones."""
        return self._base.check((*self._changes, *changes))

    def unused_id(self, base: TaskId, taken: Container[TaskId] = ()) -> TaskId:
        """An id made from another that no task has had or would have, and that is not among those given out."""
        given: set[TaskId] = set()
        while (new := self._base.unused_id(base, given)) in self._overlay.new_tasks or new in taken:
            given.add(new)
        return new


def _task_view(entry: TaskEntry) -> TaskView:
    return TaskView(
        entry.id,
        entry.task,
        entry.state,
        entry.attempts,
        entry.failure,
        entry.root,
        entry.iteration,
        entry.replaced_by,
        entry.reason,
        entry.failures,
        entry.duration,
        entry.state is TaskState.SKIPPED and entry.condition_revision == CONDITION_NOT_MET,
        entry.hold_count > 0,
    )


class ReplanningInfo(NamedTuple):
    """How a task came about by replanning, and what became of it.

    Attributes:
        iteration: how many replacements lie between the original task and this one.
        max_iterations: how often a lineage may be replanned.
        original_task_id: the task that the lineage began with.
        replaced_by: what took the place of this task.
        replan_reason: why it was replaced; of one that was not, why it took the place of another.
    """

    iteration: int
    max_iterations: int
    original_task_id: TaskId
    replaced_by: tuple[TaskId, ...]
    replan_reason: str


def replanning_info(task: TaskView, revisions: Iterable[PlanRevised], max_iterations: int) -> ReplanningInfo:
    """What the revisions so far, the newest last, mean for a task."""
    made = replaced = ""
    for revised in revisions:
        for change in revised.changes:
            if isinstance(change, ReplaceTask):
                if change.task_id == task.id:
                    replaced = revised.reason
                elif any(new.id == task.id for new in change.tasks):
                    made = revised.reason
    reason = replaced if task.replaced_by else made
    return ReplanningInfo(task.iteration, max_iterations, task.root, task.replaced_by, reason)
