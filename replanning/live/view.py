"""Read-only views of a live plan for plugins and people, and its STRIPS problem."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

from replanning.changes import PlanChange
from replanning.errors import Problem, StaleView
from replanning.journal.records import Failure
from replanning.live.draft import Draft
from replanning.live.elements import TaskGroup, group_elements
from replanning.live.facts import FactIndex
from replanning.live.graph import Progress
from replanning.live.plan import LivePlan
from replanning.live.stale import StaleResult, followers, stale_results
from replanning.live.states import FINISHED, SATISFIED, STUCK, TaskState
from replanning.live.strips import NO_FACTS, StripsProblem, StripsStep
from replanning.plan.document import Plan
from replanning.plan.json_form import shown_form
from replanning.plan.parameters import shown_values
from replanning.plan.tasks import Goal, Task, ToolSpec, allows_repetition, stated_retry
from replanning.plan.types import JsonValue, TaskId

_GIVEN_UP: Final = STUCK | {TaskState.SKIPPED, TaskState.CANCELLED}
_ID_SUFFIX = re.compile(r"~\d+$")


class TaskView(NamedTuple):
    """State of one task.

    Attributes:
        task: its document.
        attempts: number of attempts so far.
        failure: its last failure.
        root: the first task of its lineage.
        iteration: number of replacements between the root and this task.
        replaced_by: the tasks that replaced it.
        reason: why it was skipped, cancelled or blocked.
        failures: number of failures that no retry followed.
        duration: duration of its last attempt in seconds.
        condition_not_met: whether it was skipped because its condition did not hold.
        is_held: whether a question or a trigger holds it back.
        in_doubt: whether one of its attempts may have taken effect although no success is known.
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
    in_doubt: bool = False


class PlanView:
    """Read-only view of a plan, pinned to the revision at which it was made.

    It shows the values of the plan itself, which readers must not change. Reading it at a later
    revision of the plan raises `StaleView`. Within a revision, states change as tasks finish.
    """

    __slots__ = ("_plan", "revision")

    def __init__(self, live: LivePlan) -> None:
        self._plan = live
        self.revision = live.revision

    def __repr__(self) -> str:
        return f"<PlanView revision={self.revision} of {self._plan!r}>"

    @property
    def _live(self) -> LivePlan:
        # A reader that mixed two revisions would propose changes that fit neither.
        if self._plan.revision != self.revision:
            raise StaleView(self.revision, self._plan.revision)
        return self._plan

    @property
    def goal(self) -> Goal:
        """Current goal of the plan."""
        return self._live.goal

    @property
    def original_plan(self) -> Plan:
        """Plan document that the run started from."""
        return self._live.plan

    @property
    def context(self) -> Mapping[str, JsonValue]:
        """Current context."""
        return MappingProxyType(self._live.context)

    @property
    def parameters(self) -> Mapping[str, JsonValue]:
        """Values of the parameters of the plan, with masks for secrets."""
        return shown_values(self._live.plan.parameters)

    @property
    def facts(self) -> AbstractSet[str]:
        """Facts that hold now."""
        return self._live.world.facts.keys()

    @property
    def tools(self) -> Mapping[str, ToolSpec]:
        """Tools by name, with their current availability."""
        return MappingProxyType(self._live.tools)

    def made_true_since(self, fact: str, task_id: TaskId) -> bool:
        """Return whether a fact does not hold, or began to after the last attempt at a task.

        Raises:
            UnknownTask: no task ever had this id.
        """
        return self._live.world.facts.get(fact, inf) >= self._live.entry(task_id).reads.ended

    def tool(self, name: str | None) -> ToolSpec | None:
        """Return a tool, or None if the plan does not describe it."""
        return self._live.tools.get(name or "")

    @property
    def capacity(self) -> Mapping[str, float]:
        """Current capacity of each resource."""
        return MappingProxyType(self._live.scheduler.pool.capacity)

    def demand(self, task: Task) -> Mapping[str, float]:
        """Return the resources that a task takes."""
        return self._live.scheduler.pool.demand(task)

    def task(self, task_id: TaskId) -> TaskView:
        """Return a task by its id, past ones included.

        Raises:
            UnknownTask: no task ever had this id.
        """
        entry = self._live.entry(task_id)
        return TaskView(
            entry.id,
            entry.task,
            entry.state,
            entry.log.count,
            entry.log.failure,
            entry.root,
            entry.iteration,
            entry.replacement.tasks,
            entry.reason,
            entry.log.failures,
            entry.log.duration,
            entry.condition_not_met,
            entry.holds > 0,
            entry.log.in_doubt,
        )

    def state(self, task_id: TaskId) -> TaskState:
        """Return the state of a task, past ones included.

        Raises:
            UnknownTask: no task ever had this id.
        """
        return self._live.entry(task_id).state

    def tasks(self) -> Iterator[TaskView]:
        """Yield all tasks, past ones included, in the order in which they were added."""
        return map(self.task, tuple(self._live.entries))

    def task_states(self) -> Iterator[tuple[Task, TaskState]]:
        """Yield the document and state of all tasks; faster than `tasks` for a large plan."""
        return ((entry.task, entry.state) for entry in self._live)

    def stuck(self, limit: int | None = None) -> tuple[TaskView, ...]:
        """Return the tasks that are FAILED or BLOCKED, at most `limit` of them."""
        return tuple(map(self.task, islice(self._live.stuck, limit)))

    @property
    def has_doubtful(self) -> bool:
        """Whether any task was ever in doubt: it may have taken effect without a known success."""
        return bool(self._live.doubtful)

    def has_used_retries(self, task_id: TaskId) -> bool:
        """Return whether a task used up the retries that it or its tool states.

        Raises:
            UnknownTask: no task ever had this id.
        """
        entry = self._live.entry(task_id)
        failure = entry.log.failure
        task = entry.task
        tool = self._live.tool_of(task)
        stated = stated_retry(task, tool)
        if failure is None or stated is None:
            return False
        # A call in doubt that is not repeated automatically has used no retries: a person decides.
        if not failure.in_doubt:
            return True
        is_named = failure.transient
        if failure.kind == "timeout":
            is_named = stated.names_timeouts
        return allows_repetition(task, tool, is_named=is_named)

    def given_up_in_doubt(self) -> list[TaskId]:
        """Return the failed, blocked, skipped and cancelled tasks that may have taken effect.

        Tasks without a tool are excluded: no later task is known to repeat their work.
        """
        given_up = []
        for task_id in self._live.doubtful:
            entry = self._live.entry(task_id)
            if entry.state in _GIVEN_UP and entry.task.tool is not None:
                given_up.append(task_id)
        return given_up

    def unfinished(self) -> Iterator[TaskView]:
        """Yield the tasks that are neither finished nor removed."""
        return map(self.task, [entry.id for entry in self._live if entry.state not in FINISHED])

    def context_readers(self, key: str) -> tuple[TaskView, ...]:
        """Return the tasks whose arguments or condition refer to a key of the context."""
        return tuple(map(self.task, self._live.dependency_index.context_references.get(key, ())))

    def stale_results(self) -> Mapping[TaskId, StaleResult]:
        """Return the finished tasks whose results are stale, in the order of the plan."""
        return stale_results(self._live)

    def followers(self, task_ids: Collection[TaskId]) -> Mapping[TaskId, Sequence[TaskId]]:
        """Return the tasks that must wait if these run again, with their additional dependencies.

        A task that depends on one of these only through tasks that are kept would not wait for it
        otherwise.

        Raises:
            UnknownTask: no task ever had this id.
        """
        return followers(self._live, [self._live.entry(task_id).id for task_id in task_ids])

    def resource_users(self, name: str) -> Iterator[TaskView]:
        """Yield the unfinished tasks that use a tool or take a resource of this name."""
        return map(self.task, self._live.dependency_index.resource_users.get(name, ()))

    def dependents(self, task_id: TaskId) -> tuple[TaskId, ...]:
        """Return the tasks that wait for a task, or for one that it replaced."""
        return self._live.entry(task_id).dependent_ids()

    def left_out_with(self, task_id: TaskId) -> tuple[TaskId, ...]:
        """Return the tasks that were left out because a condition skipped a task.

        Raises:
            UnknownTask: no task ever had this id.
        """
        return tuple(other.id for other in self._live.left_out_with(self._live.entry(task_id)))

    def arguments(self, task_id: TaskId) -> Mapping[str, JsonValue]:
        """Return the arguments of a task with references replaced by their values.

        Raises:
            ExpressionError: a reference has no value yet.
        """
        return self._live.arguments(self._live.entry(task_id))

    def result(self, task_id: TaskId) -> JsonValue:
        """Return the output found through the lineage of a task.

        Raises:
            NoResult: the task has no result yet.
        """
        return shown_form(self._live.results.output_of(self._live.entry(task_id).id))

    def list_of(self, task_id: TaskId) -> TaskId | None:
        """Return the expanded task that a task, or one it replaced, is a part of; else None."""
        template = self._live.entry(task_id).template
        if template is None:
            return None
        return template.id

    def element_states(self, task_id: TaskId) -> Mapping[TaskState, int] | None:
        """Return the number of elements in each state; None if the task was not expanded."""
        entry = self._live.entry(task_id)
        if not entry.is_expanded:
            return None
        return Counter(self._live.status_of(element) for element in entry.replacement.sinks)

    def group_elements(self, task_ids: Iterable[TaskId]) -> list[TaskGroup]:
        """Return tasks grouped for a sentence: each once, elements of one list together."""
        return group_elements(self._live, task_ids)

    def lineage(self, task_id: TaskId) -> tuple[TaskView, ...]:
        """Return the tasks that a task replaced, the root first, and the task itself."""
        return tuple(self.task(entry.id) for entry in self._live.entry(task_id).lineage())

    def strips_problem(
        self,
        changes: Sequence[PlanChange] = (),
        *,
        tasks: Collection[TaskId] = (),
        facts: Collection[str] = (),
    ) -> StripsProblem:
        """Return the facts, remaining steps and goal, now or as changes would leave them.

        Args:
            changes: the changes.
            tasks: with `facts`, the subject of the problem: in a plan that states its facts,
                everything unrelated to the subject and the changes may be left out.
            facts: see `tasks`.
        """
        live = self._live
        return strips_problem(
            live, Draft(live, changes) if changes else None, tasks=tasks, facts=facts
        )

    def check(self, changes: Sequence[PlanChange]) -> tuple[Problem, ...]:
        """Return the reasons why changes cannot be applied; empty if they can."""
        return tuple(Draft(self._live, changes).problems)

    def with_changes(self, changes: Sequence[PlanChange]) -> DraftView:
        """Return the plan as valid changes would leave it."""
        return DraftView(self._live, Draft(self._live, changes))

    def unused_id(self, base: TaskId, taken: Container[TaskId] = ()) -> TaskId:
        """Return an id derived from another that no task ever had and `taken` lacks."""
        live = self._live
        stem = _ID_SUFFIX.sub("", base)[:180]
        number = 2
        while (new := TaskId(f"{stem}~{number}")) in live.entries or new in taken:
            number += 1
        return new

    @property
    def succeeded_attempts(self) -> int:
        """Number of attempts that have succeeded."""
        return self._live.statistics.successes[0]

    @property
    def ended_attempts(self) -> int:
        """Number of attempts that have ended."""
        return self._live.statistics.ended_attempts

    @property
    def successful_seconds(self) -> float:
        """Total duration of the successful attempts, in seconds."""
        return self._live.statistics.successes[1]

    @property
    def remaining_cost(self) -> float:
        """Total cost of the unfinished tasks: of each one, the cost of its tool, by default 1."""
        live = self._live
        # Counted from the index: otherwise every score would walk a large plan.
        users = live.dependency_index.resource_users
        priced = {tool.name: tool.cost for tool in live.tools.values() if tool.cost is not None}
        count = sum(number for state, number in live.counts.items() if state not in FINISHED)
        return count + sum((cost - 1) * len(users.get(name, ())) for name, cost in priced.items())

    @property
    def busy_seconds(self) -> float:
        """Total time in which any attempt ran, in seconds, up to the last end of one."""
        return self._live.statistics.busy_seconds

    @property
    def recent_ends(self) -> tuple[bool, ...]:
        """Whether each of the last 20 attempts succeeded, oldest first.

        A replan that was applied counts as a failure.
        """
        return tuple(self._live.statistics.recent_ends)

    def unfinished_by_tool(self) -> Iterator[tuple[str, int, float | None]]:
        """Yield the tools in use: name, number of unfinished tasks, mean seconds of a success."""
        live = self._live
        for name, users in live.dependency_index.resource_users.items():
            if users and (name in live.tools or name not in live.scheduler.pool.capacity):
                count, seconds = live.statistics.tool_durations.get(name, (0, 0.0))
                yield name, len(users), seconds / count if count else None

    @property
    def counts(self) -> Mapping[TaskState, int]:
        """Number of tasks in each state, past ones included."""
        return MappingProxyType(self._live.counts)

    @property
    def progress(self) -> Progress:
        """Progress of the plan."""
        return self._live.progress()

    def evaluate(self, condition: str) -> bool:
        """Return whether a `when` expression holds now.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        return self._live.evaluate(condition)


class DraftView:
    """Read-only view of a plan as staged changes would leave it."""

    __slots__ = ("_base", "_draft")

    def __init__(self, live: LivePlan, draft: Draft) -> None:
        self._base = PlanView(live)
        self._draft = draft

    def __repr__(self) -> str:
        return f"<DraftView of {len(self._draft.changes)} changes to {self._base!r}>"

    @property
    def new_task_ids(self) -> tuple[TaskId, ...]:
        """Tasks that the changes add."""
        return tuple(self._draft.new_tasks)

    @property
    def original_plan(self) -> Plan:
        """Plan document that the run started from."""
        return self._base.original_plan

    @property
    def goal(self) -> Goal:
        """Current goal of the plan."""
        return self._base.goal

    @property
    def tools(self) -> Mapping[str, ToolSpec]:
        """Tools by name, with their current availability."""
        return self._base.tools

    @property
    def capacity(self) -> Mapping[str, float]:
        """Current capacity of each resource."""
        return self._base.capacity

    def tool(self, name: str | None) -> ToolSpec | None:
        """Return a tool, or None if the plan does not describe it."""
        return self._base.tool(name)

    def made_true_since(self, fact: str, task_id: TaskId) -> bool:
        """Return whether a fact does not hold, or began to after the last attempt at a task."""
        return self._base.made_true_since(fact, task_id)

    def task(self, task_id: TaskId) -> TaskView:
        """Return a task by its id, new and past ones included.

        Raises:
            UnknownTask: no task has this id.
        """
        draft = self._draft
        if task_id in draft.new_tasks:
            return self._new_task(task_id)
        # Changes execute nothing, so attempts and failures stay those of the plan.
        found = self._base.task(task_id)._replace(state=draft.state(task_id))
        if task_id in draft.tasks:
            found = found._replace(task=draft.tasks[task_id])
        return found

    def _new_task(self, task_id: TaskId) -> TaskView:
        ancestors = list(self._draft.ancestors(task_id))
        root = ancestors[-1] if ancestors else task_id
        return TaskView(
            id=task_id,
            task=self._draft.task(task_id),
            state=self._draft.state(task_id),
            attempts=0,
            failure=None,
            root=root,
            iteration=len(ancestors),
            replaced_by=(),
            reason="",
            failures=0,
            duration=0.0,
            condition_not_met=False,
            is_held=False,
        )

    def tasks(self) -> Iterator[TaskView]:
        """Yield all tasks, past ones included, then the new ones."""
        return map(self.task, [*(task.id for task in self._base.tasks()), *self.new_task_ids])

    def task_states(self) -> Iterator[tuple[Task, TaskState]]:
        """Yield the document and state of all tasks."""
        for task, _ in self._base.task_states():
            yield self._draft.task(task.id), self._draft.state(task.id)
        for task_id in self.new_task_ids:
            yield self._draft.task(task_id), self._draft.state(task_id)

    def lineage(self, task_id: TaskId) -> tuple[TaskView, ...]:
        """Return the tasks that a task replaced, the root first, and the task itself."""
        task = self.task(task_id)
        return (*map(self.task, reversed(list(self._draft.ancestors(task.id)))), task)

    def strips_problem(self) -> StripsProblem:
        """Return the facts, the steps that would remain and the goal."""
        return strips_problem(self._base._live, self._draft)

    def check(self, changes: Sequence[PlanChange]) -> tuple[Problem, ...]:
        """Return the reasons why changes cannot be applied after the staged ones."""
        return self._base.check((*self._draft.changes, *changes))

    def unused_id(self, base: TaskId, taken: Container[TaskId] = ()) -> TaskId:
        """Return an id derived from another that no task ever had and `taken` lacks."""
        # The draft adds ids that the plan does not know, and an id is never used again.
        used: set[TaskId] = set()
        while (new := self._base.unused_id(base, used)) in self._draft.new_tasks or new in taken:
            used.add(new)
        return new


class ReplanningInfo(NamedTuple):
    """Lineage of a task.

    Attributes:
        iteration: number of replacements between the original task and this one.
        max_iterations: limit of replans per lineage.
        original_task_id: the first task of the lineage.
        replaced_by: the tasks that replaced this one.
        replan_reason: why it was replaced; if it was not, why it replaced another task.
    """

    iteration: int
    max_iterations: int
    original_task_id: TaskId
    replaced_by: tuple[TaskId, ...]
    replan_reason: str


MIN_SUBGRAPH_LIMIT: Final = 1_000
"""Number of related tasks that are always followed.

If a part is larger than this and than a quarter of the plan, the whole plan is used instead.
"""


Subgraph = tuple[frozenset[TaskId], frozenset[str]]
"""Tasks related to some tasks and facts, and all facts of these tasks."""


def strips_problem(
    live: LivePlan,
    draft: Draft | None = None,
    *,
    tasks: Collection[TaskId] = (),
    facts: Collection[str] = (),
) -> StripsProblem:
    """Return the planning problem of a plan now, or as staged changes would leave it.

    The problem of the plan without changes is cached until the plan changes.

    Args:
        live: the plan.
        draft: the staged changes.
        tasks: with `facts`, the subject of the problem: in a plan that states its facts, everything
            unrelated to the subject and the changes is left out, unless the related part is most of
            the plan.
        facts: see `tasks`.
    """
    if draft is not None:
        return _build_problem(live, draft, _relevant_subgraph(live, draft, tasks, facts))
    subject = frozenset(tasks), frozenset(facts)
    # Providers and scorers ask for the same problem several times between two events.
    if subject not in live.world.problems:
        draft = Draft(live)
        part = _relevant_subgraph(live, draft, *subject)
        live.world.problems[subject] = (
            strips_problem(live)
            if part is None and any(subject)
            else _build_problem(live, draft, part)
        )
    return live.world.problems[subject]


def _build_problem(live: LivePlan, draft: Draft, part: Subgraph | None) -> StripsProblem:
    """Return the problem of the unfinished tasks, or of a part of them, running tasks first."""
    goal = tuple(live.goal.facts)
    task_ids: list[TaskId] = [*live.entries, *draft.new_tasks]
    if part is not None:
        related, facts = part
        goal = tuple(fact for fact in live.goal.facts if fact in facts)
        task_ids = [task_id for task_id in related if task_id in draft]
    states: dict[TaskId, TaskState] = {}
    for task_id in task_ids:
        state = draft.state(task_id)
        if state not in FINISHED and draft.exists(task_id):
            states[task_id] = state

    def position(task_id: TaskId) -> tuple[bool, int, int]:
        return (states[task_id] is not TaskState.RUNNING, *draft.position(task_id))

    steps = []
    for task_id in sorted(states, key=position):
        task = draft.task(task_id)
        running = states[task_id] is TaskState.RUNNING
        tool = None
        if task.tool:
            tool = live.tools.get(task.tool)
        action, arguments = live.dependency_index.ground(task)
        if running:
            # It has started, so its requirements held.
            action = action._replace(requires=NO_FACTS)
        waits_for: list[TaskId] = []
        for dep in draft.follow_replacements(task.depends_on):
            if draft.state(dep) not in SATISFIED:
                waits_for.append(dep)
        startable = states[task_id] not in STUCK and (tool is None or tool.available)
        step = StripsStep(
            task_id, task.tool, arguments, action, tuple(waits_for), running, startable
        )
        steps.append(step)
    return StripsProblem(tuple(live.world.facts), tuple(steps), goal, live.plan.facts is not None)


def _relevant_subgraph(
    live: LivePlan, draft: Draft, tasks: Collection[TaskId], facts: Collection[str]
) -> Subgraph | None:
    """Return the unfinished tasks and facts related to some of them, directly or indirectly.

    The result is None if that is most of the plan. Tasks are related if one depends on the other,
    or if they share a fact that one of them changes.
    """
    index = live.dependency_index.fact_index
    # Without an index nothing is known to be unrelated, and without a subject everything counts.
    if index is None or not (tasks or facts):
        return None
    limit = max(MIN_SUBGRAPH_LIMIT, len(index) // 4)
    stack = [*tasks, *draft.tasks, *draft.states, *draft.removed, *index.unresolved]
    for fact in facts:
        stack += [*index.writers.get(fact, ()), *index.readers.get(fact, ())]
    if len({task_id for task_id in stack if task_id in draft}) > limit:
        return None
    staged_dependents: dict[TaskId, list[TaskId]] = {}
    for task_id, task in draft.tasks.items():
        for dep in draft.follow_replacements(task.depends_on):
            staged_dependents.setdefault(dep, []).append(task_id)
    # The search stops early if it would find most of the plan, because that saves nothing.
    seen: set[TaskId] = set()
    seen_facts = set(facts)
    while stack and len(seen) <= limit:
        task_id = stack.pop()
        if task_id in seen or task_id not in draft:
            continue
        seen.add(task_id)
        task = draft.task(task_id)
        stack += _tasks_sharing_facts(live, index, task, seen_facts)
        stack += (
            d for d in draft.follow_replacements(task.depends_on) if draft.state(d) not in SATISFIED
        )
        stack += staged_dependents.get(task_id, ())
        if task_id in live:
            entry = live.entry(task_id)
            stack += (i for i in entry.dependent_ids() if live.entry(i).state not in FINISHED)
            if entry.task is not task:
                stack += _tasks_sharing_facts(live, index, entry.task, seen_facts)
    return (frozenset(seen), frozenset(seen_facts)) if len(seen) <= limit else None


def _tasks_sharing_facts(
    live: LivePlan, index: FactIndex, task: Task, seen_facts: set[str]
) -> Iterator[TaskId]:
    """Yield the tasks that share a new fact with a task, if one of them changes it.

    The fact is added to those seen.
    """
    action, _ = live.dependency_index.ground(task)
    for fact in action.facts:
        changed = fact in action.adds or fact in action.removes
        if fact not in seen_facts and (changed or fact in index.writers):
            seen_facts.add(fact)
            yield from index.writers.get(fact, ())
            yield from index.readers.get(fact, ())
