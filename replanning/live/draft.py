"""Changes staged beside a live plan: checked as a whole, then committed or dropped."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Final, Literal, NamedTuple

from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ExpandTask,
    IncludePlan,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import ExpressionError, PlanError, Problem, UnknownTask
from replanning.live.entries import SKIPPED_BY_CONDITION, TaskEntry
from replanning.live.graph import TaskGraph
from replanning.live.stale import StaleResult, stale_results
from replanning.live.states import (
    FINISHED,
    SATISFIED,
    STUCK,
    TRANSITIONS,
    WAITING,
    TaskEvent,
    TaskState,
)
from replanning.plan.checks import TaskScope, check_task, may_read_results, result_references
from replanning.plan.document import Plan
from replanning.plan.elements import (
    LIST_FIELDS,
    element_tasks,
    elements_problem,
    in_place_of_element,
    is_same_element,
    slot_resource,
    template_of,
)
from replanning.plan.inclusion import included_ids, included_tasks, last_tasks
from replanning.plan.messages import join_names
from replanning.plan.tasks import Task, for_another_tool, is_same_call, program_note
from replanning.plan.types import JsonObject, TaskId

_ANNOTATION_FIELDS = frozenset({"name", "goal", "metadata", "undo_on_replace"})

_REPLACED: Final = TaskState.REPLACED_BY_REPLAN

_UNFINISHED: Final = WAITING | STUCK
"""States of tasks that are neither running nor finished."""

_MAX_DEPENDENCY_SEARCH: Final = 1_000
"""Number of tasks searched for a dependency; beyond it a task is assumed to depend on the other."""

_ABORT_REASON: Final = "a change asked for it"

_MAX_WAITING_IN_DIFF: Final = 8

_MAX_TASKS_IN_PROBLEM: Final = 10


class StagedTask(NamedTuple):
    """New task, the task that it replaces, and the path of the change that adds it."""

    task: Task
    parent: TaskId | None
    change_path: str


class AddedDependency(NamedTuple):
    """Dependency that a change adds and that could close a cycle."""

    waiting: TaskId
    needed: TaskId
    change_path: str


class Draft:
    """A plan with a set of staged changes.

    Everything else is read from the live plan, which does not change until `commit`.
    Staging looks at the tasks that the changes touch, not at the whole plan. A draft has many
    attributes because each kind of change leaves its own trace, and the checks, the diff and the
    commit each read most of them.

    Args:
        graph: the live plan.
        changes: the changes, in order; none for the plan as it is.
        adopted: the corrected plan that the changes lead to. They may use its tools and resources,
            and do finished tasks again.

    Attributes:
        changes: the changes.
        adopted: the corrected plan, if there is one.
        problems: the reasons why the changes cannot be committed.
        version: the version of the plan that they were staged against; the draft is valid for this
            version only.
        plan_hash: the hash of the plan with the changes, once `LivePlan.prepare` has accepted them.
        new_tasks: the tasks that the changes add.
        tasks: the new tasks and the changed documents of others.
        states: the states that the changes lead to.
        sinks: for each task that the changes replace, the new tasks that its dependents would wait
            for.
        removed: the removed tasks, with the path of the change.
    """

    def __init__(
        self,
        graph: TaskGraph,
        changes: Sequence[PlanChange] = (),
        adopted: Plan | None = None,
    ) -> None:
        self.changes = tuple(changes)
        self.adopted = adopted
        self.problems: list[Problem] = []
        self.version = graph.version
        self.plan_hash = ""
        self.new_tasks: dict[TaskId, StagedTask] = {}
        self.tasks: dict[TaskId, Task] = {}
        self.states: dict[TaskId, TaskState] = {}
        self.sinks: dict[TaskId, tuple[TaskId, ...]] = {}
        self.removed: dict[TaskId, str] = {}
        self._graph = graph
        self._withdrawn: set[TaskId] = set()
        self._revived: dict[TaskId, str] = {}
        self._changed_references: dict[TaskId, str] = {}
        self._added_dependencies: list[AddedDependency] = []
        self._positions: dict[TaskId, tuple[int, int]] = {}
        self._change_path = ""
        self._committed_at = 0.0
        self._abort_reason: str | None = None
        self._commit_steps: list[Callable[[Draft], None]] = []
        for index, change in enumerate(changes):
            self._change_path = f"changes[{index}]"
            _STAGE_HANDLERS[type(change)](self, change)
        self._change_path = ""
        if adopted is not None:
            self._check_adopted(adopted)
        self._check_plan()

    def __contains__(self, task_id: object) -> bool:
        return task_id in self.new_tasks or task_id in self._graph.entries

    # Reading

    def task(self, task_id: TaskId) -> Task:
        """Return a task as the changes leave it."""
        if task_id in self.tasks:
            return self.tasks[task_id]
        return self._graph.entry(task_id).task

    def state(self, task_id: TaskId) -> TaskState:
        """Return the state of a task after the changes."""
        if task_id in self.states:
            return self.states[task_id]
        if task_id in self.new_tasks:
            return TaskState.PENDING
        return self._graph.entry(task_id).state

    def exists(self, task_id: TaskId) -> bool:
        """Return whether a task exists and is not removed."""
        if task_id in self.removed:
            return False
        if task_id in self.new_tasks or task_id in self._revived:
            return True
        entry = self._graph.entries.get(task_id)
        return entry is not None and not entry.removed

    def position(self, task_id: TaskId) -> tuple[int, int]:
        """Return the position of a task among the ready ones: priority, then order."""
        if task_id in self._positions:
            return self._positions[task_id]
        entry = self._graph.entry(task_id)
        return entry.task.priority, entry.order

    def follow_replacements(self, task_ids: Iterable[TaskId]) -> Iterator[TaskId]:
        """Yield the current tasks for some ids: replaced ones are followed to their sinks."""
        # Reversed, because the tasks are yielded in order and taken from the end.
        stack = list(task_ids)
        stack.reverse()
        while stack:
            task_id = stack.pop()
            if self.state(task_id) is not _REPLACED:
                yield task_id
            elif task_id in self.sinks:
                stack.extend(reversed(self.sinks[task_id]))
            else:
                for sink in reversed(self._graph.entry(task_id).replacement.sinks):
                    stack.append(sink.id)

    def ancestors(self, task_id: TaskId) -> Iterator[TaskId]:
        """Yield the tasks that a task replaces, the nearest first."""
        while task_id in self.new_tasks:
            parent = self.new_tasks[task_id].parent
            if parent is None:
                return
            task_id = parent
            yield task_id
        for entry in self._graph.entry(task_id).lineage()[-2::-1]:
            yield entry.id

    def diff(self) -> str:
        """Return the effect of the changes, as lines.

        These are one line for each expanded task; for each other task, `-` before and `+` after;
        the dependents that now wait for other tasks; and the changes that concern no single task.
        """
        graph = self._graph
        before: dict[TaskId, str] = {}
        after: dict[TaskId, str] = {}
        lines: list[str] = []
        # A list may have a thousand elements, which are all alike.
        collapsed: set[TaskId] = set()
        in_lists: set[TaskId] = set()
        for template in self._expanded_again():
            lines.append(f"~ {_format_collapse(template)}")
            for part in graph.parts_of(template):
                collapsed.add(part.id)
            # The list itself stays in the plan: only fields of it that differ are shown.
            if self.task(template.id) == template.task:
                in_lists.add(template.id)
        for change in self.changes:
            if isinstance(change, ExpandTask):
                elements = self.sinks.get(change.task_id, ())
                lines.append(f"~ {_format_list(change.task_id, elements)}")
                in_lists.update([change.task_id, *elements])
        in_lists |= collapsed
        for task_id in dict.fromkeys([*self.states, *self.tasks, *self.removed]):
            if task_id in in_lists:
                continue
            if task_id in graph:
                entry = graph.entry(task_id)
                state = entry.state
                if entry.is_expanded:
                    state = self.state(task_id)
                before[task_id] = _format_task(entry.task, state)
            if task_id not in self.removed and self.state(task_id) is not _REPLACED:
                after[task_id] = _format_task(self.task(task_id), self.state(task_id))
        for task_id, line in before.items():
            if after.get(task_id) != line:
                lines.append(f"- {line}")
        for task_id, line in after.items():
            if before.get(task_id) != line:
                lines.append(f"+ {line}")
        lines += self._waiting_lines(collapsed)
        lines += self._run_lines()
        return "\n".join(lines)

    def _run_lines(self) -> Iterator[str]:
        """Yield a line for each change that concerns no single task."""
        for change in self.changes:
            if isinstance(change, ReorderTasks):
                yield f"  handed out in this order: {', '.join(change.order)}"
            elif isinstance(change, AbortRun):
                what = "the run is aborted"
                if change.undo:
                    what = "the effects of the run are taken back, and the run is aborted"
                yield f"  {what}: {change.reason or _ABORT_REASON}"

    def _expanded_again(self) -> Iterator[TaskEntry]:
        """Yield the lists whose elements are made again, and tasks whose included plan is run again."""
        for change in self.changes:
            if isinstance(change, RetryTask):
                entry = self._graph.entries.get(change.task_id)
                if entry is not None and entry.is_expanded:
                    yield entry

    def _waiting_lines(self, collapsed: Collection[TaskId]) -> Iterator[str]:
        """Yield a line for each replaced task, with the dependents that now wait for its sinks.

        Args:
            collapsed: elements of lists that are expanded again; the list itself is named.
        """
        expanded = {change.task_id for change in self.changes if isinstance(change, ExpandTask)}
        for task_id, sinks in self.sinks.items():
            # Dependents of a list stay dependent on it.
            if task_id not in self._graph or task_id in expanded:
                continue
            entry = self._graph.entry(task_id)
            waiting = tuple(one for one in entry.dependent_ids() if one not in collapsed)
            # They also stay dependent on the list if one of its elements is replaced.
            if entry.template is not None:
                of_list = set(entry.template.dependent_ids())
                waiting = tuple(one for one in waiting if one not in of_list)
            if waiting:
                names = ", ".join(waiting[:_MAX_WAITING_IN_DIFF])
                more = len(waiting) - _MAX_WAITING_IN_DIFF
                if more > 0:
                    names += f" and {more} more"
                yield f"  {names}: waiting for {', '.join(sinks)} instead of {task_id}"

    # Staging one change of each kind

    def _stage_add(self, change: AddTask) -> None:
        task = change.task
        if not self._stage_new(task, None):
            return
        for waiting in change.before:
            old = self._find_task(waiting)
            if old is not None and task.id not in old.depends_on:
                new = old.model_copy(update={"depends_on": (*old.depends_on, task.id)})
                self._stage_edit(old, new)

    def _stage_remove(self, change: RemoveTask) -> None:
        if self._stage_event(change.task_id, TaskEvent.CANCEL, "be removed", (*WAITING, *STUCK)):
            self._revived.pop(change.task_id, None)
            self.removed[change.task_id] = self._change_path
            self._commit_steps.append(partial(Draft._remove, task_id=change.task_id))

    def _stage_replace(self, change: ReplaceTask) -> None:
        """Stage the tasks that replace another, and make its dependents wait for them.

        New tasks that depend on none of the others begin the replacement, so they inherit the
        dependencies of the replaced task. Those that none of the others depend on end it: they are
        the sinks, and its dependents wait for them.
        """
        task_id = change.task_id
        event = TaskEvent.REPLACE
        entry = self._graph.entries.get(task_id)
        if entry is not None and self.states.get(task_id, entry.state) in SATISFIED:
            # A finished task may be replaced only if it must be done again.
            stale = self._stale.get(task_id)
            # A person who corrects a plan has agreed to run finished tasks again.
            if self.adopted is not None or (stale is not None and stale.redo):
                event = TaskEvent.REDO
        if not self._stage_event(task_id, event, "be replaced"):
            return
        if event is TaskEvent.REDO:
            self._take_in_branch(task_id)
        parts: dict[TaskId, Task] = {}
        needed: set[TaskId] = set()
        replaced = self.task(task_id)
        for task in change.tasks:
            parts[task.id] = task
            needed.update(task.depends_on)
        inherited = [dep for dep in replaced.depends_on if dep not in parts]
        limits = self._graph.list_limits(replaced)
        for stated in change.tasks:
            task = in_place_of_element(stated, replaced, limits)
            own_inherited: Sequence[TaskId] = ()
            if parts.keys().isdisjoint(task.depends_on):
                own_inherited = inherited
            if self._stage_new(task, task_id, own_inherited):
                # Dependencies on other parts or inherited ones close no cycle with the rest.
                for dep in task.depends_on:
                    if dep not in parts and dep not in inherited:
                        self._add_dependency(task.id, dep)
        sinks = tuple([part for part in parts if part not in needed])
        self.sinks[task_id] = sinks
        step = partial(Draft._replace, task_id=task_id, parts=tuple(parts), sinks=sinks)
        self._commit_steps.append(step)

    def _stage_expand(self, change: ExpandTask) -> None:
        """Stage a task for each element of a list; the dependents wait for all of them.

        They are copies of a checked task and read nothing else. If the list is expanded again, the
        unchanged elements that are done are kept.
        """
        task_id = change.task_id
        if not self._stage_event(task_id, TaskEvent.REPLACE, "be expanded"):
            return
        template = self.task(task_id)
        tasks: list[Task] = []
        try:
            problem = elements_problem(template, change.elements)
            tasks = element_tasks(template, change.elements)
        except ExpressionError as error:
            problem = str(error)
        if problem:
            self._add_problem(f"task {task_id!r}: {problem}")
            return
        elements: list[TaskId] = []
        for task in tasks:
            element_id = task.id
            if element_id in self:
                element_id = self._earlier_element(task, task_id)
            elements.append(element_id)
            if element_id in self:
                continue
            new = task
            if element_id != task.id:
                new = task.model_copy(update={"id": element_id})
            self._stage_part(new, task_id)
        ids = tuple(elements)
        self.sinks[task_id] = ids
        step = partial(Draft._replace, task_id=task_id, parts=ids, sinks=ids)
        self._commit_steps.append(step)

    def _stage_include(self, change: IncludePlan) -> None:
        """Stage the tasks of an included plan, which were checked with the plan."""
        task_id = change.task_id
        if not self._stage_event(task_id, TaskEvent.REPLACE, "be expanded"):
            return
        task = self.task(task_id)
        try:
            limits = self._graph.list_limits(task)
            parts = included_tasks(task, included_ids(task, self), change.values, limits)
        except ExpressionError as error:
            self._add_problem(f"task {task_id!r}: {error}")
            return
        for part in parts:
            self._stage_part(part, task_id)
        sinks = tuple(last_tasks(parts))
        self.sinks[task_id] = sinks
        ids = tuple(part.id for part in parts)
        self._commit_steps.append(partial(Draft._replace, task_id=task_id, parts=ids, sinks=sinks))

    def _stage_part(self, task: Task, parent: TaskId) -> None:
        """Stage a task of a list or an included plan; it was checked with the plan."""
        order = self._graph.statistics.added_tasks + len(self.new_tasks)
        self._positions[task.id] = (task.priority, order)
        self.new_tasks[task.id] = StagedTask(task, parent, self._change_path)
        self.tasks[task.id] = task

    def _earlier_element(self, task: Task, template: TaskId) -> TaskId:
        """Return the earlier element that is equal and done; else an unused id."""
        number = 1
        task_id = task.id
        while task_id in self:
            entry = self._graph.entries.get(task_id)
            if entry is not None:
                is_earlier = all((entry.removed, entry.parent is self._graph.entries.get(template)))
                if is_earlier and _is_done(entry) and is_same_element(task, entry.task):
                    return task_id
            number += 1
            task_id = TaskId(f"{task.id}~{number}")
        return task_id

    def _stage_modify(self, change: ModifyTask) -> None:
        task_id = change.task_id
        old = self._find_task(task_id)
        if old is None:
            return
        entry = self._graph.entries.get(task_id)
        if entry is not None and entry.replacement.expanded and self.state(task_id) is _REPLACED:
            self._stage_modify_elements(entry, change)
            return
        rejection = self._reject_modification(change)
        if rejection:
            self._add_problem(f"task {task_id!r} {rejection}")
            return
        if "id" in change.fields:
            self._add_problem(
                f"task {task_id!r}: an id cannot be changed; replace the task instead"
            )
            return
        # Only the fields that were set, so that the defaults stay defaults.
        fields = old.model_dump(exclude_unset=True)
        if change.fields.get("tool", old.tool) != old.tool:
            # The declared effect of a task belongs to its earlier tool.
            fields.update(for_another_tool(old))
        fields.update(change.fields)
        try:
            new = Task.model_validate(fields)
        except PlanError as error:
            for problem in error.problems:
                text = str(problem).removeprefix("Task.")
                self._add_problem(f"task {task_id!r}, {text}")
        else:
            self._stage_edit(old, new)

    def _stage_modify_elements(self, template: TaskEntry, change: ModifyTask) -> None:
        """Stage a change of all waiting elements of a task."""
        # Of these fields, only `on_item_failure` is about existing elements.
        of_list = {"for_each", *LIST_FIELDS} - {"on_item_failure"}
        for name in change.fields:
            if name in of_list:
                self._add_problem(
                    f"task {template.id!r}: `{name}` cannot change once the list is expanded: "
                    "retry the task in the same changes, before this one, to expand it again"
                )
                return
        waiting: list[TaskId] = []
        for element in template.replacement.sinks:
            # Elements that back off are included: a backoff ends without a record.
            if element.state in WAITING:
                waiting.append(element.id)
        if not waiting:
            self._add_problem(f"task {template.id!r}: none of its elements is waiting")
        for task_id in waiting:
            self._stage_modify(ModifyTask(task_id=task_id, fields=change.fields))

    def _reject_modification(self, change: ModifyTask) -> str:
        """Return why a task's state does not allow a modification; empty if it does."""
        if not self.exists(change.task_id):
            return "was removed: it cannot be modified, only retried"
        state = self.state(change.task_id)
        if state in _UNFINISHED:
            return ""
        if state not in FINISHED:
            return f"is {state}: it cannot be modified"
        # The work of a finished task cannot change, but the text about it can.
        if _ANNOTATION_FIELDS.issuperset(change.fields):
            return ""
        if self._is_left_out_in_correction(change.task_id):
            return ""
        names = ", ".join(sorted(_ANNOTATION_FIELDS))
        return f"is {state}: it cannot be modified, only annotated ({names})"

    def _is_left_out_in_correction(self, task_id: TaskId) -> bool:
        """Return whether a condition left a task out, so that a correction may change it."""
        if self.adopted is None:
            return False
        return self._graph.entry(task_id).condition_revision in SKIPPED_BY_CONDITION

    def _stage_edit(self, old: Task, new: Task) -> None:
        state = self.state(new.id)
        if state in FINISHED and new.depends_on != old.depends_on:
            if not self._is_left_out_in_correction(new.id):
                self._add_problem(f"task {new.id!r} is {state}: its dependencies cannot change")
                return
        # A running task has begun without waiting: a new dependency would come too late.
        if state is TaskState.RUNNING:
            self._add_problem(
                f"task {new.id!r} is {state}: it cannot be made to wait for another task"
            )
            return
        self._validate_task(new)
        self.tasks[new.id] = new
        if new.priority != old.priority:
            _, order = self.position(new.id)
            self._positions[new.id] = (new.priority, order)
        for dep in new.depends_on:
            if dep not in old.depends_on:
                self._add_dependency(new.id, dep)
        # A reference may also be lost with the dependency that it needs.
        changed = not set(old.depends_on).issubset(new.depends_on)
        for name in ("arguments", "when", "fallbacks", "undo"):
            if getattr(new, name) != getattr(old, name):
                changed = True
        if changed:
            self._changed_references[new.id] = self._change_path
        self._commit_steps.append(partial(Draft._edit, task=new))

    def _stage_reorder(self, change: ReorderTasks) -> None:
        """Stage an order of waiting tasks: they exchange their positions."""
        order = tuple(dict.fromkeys(change.order))
        if len(order) != len(change.order):
            self._add_problem(f"order names tasks twice: {list(change.order)}")
        task_ids = [task_id for task_id in order if self._find_task(task_id) is not None]
        for task_id in task_ids:
            state = self.state(task_id)
            if state not in WAITING:
                self._add_problem(
                    f"task {task_id!r} is {state}: only waiting tasks can be reordered"
                )
        positions = sorted(map(self.position, task_ids))
        for task_id, position in zip(task_ids, positions, strict=True):
            self._positions[task_id] = position
            priority, number = position
            task = self.task(task_id)
            if task.priority != priority:
                task = task.model_copy(update={"priority": priority})
                self.tasks[task_id] = task
            self._commit_steps.append(partial(Draft._reorder, task=task, order=number))

    def _stage_retry(self, change: RetryTask) -> None:
        task_id = change.task_id
        if self._find_task(task_id) is None:
            return
        state = self.state(task_id)
        # It comes back anyway, with the branch that it was left out with.
        if self.states.get(task_id) is TaskState.PENDING and task_id not in self._revived:
            return
        rejection = self._reject_retry(task_id)
        if rejection:
            self._add_problem(f"task {task_id!r} {rejection}")
            return
        if state is _REPLACED and not self._take_back_replacement(task_id):
            return
        rejection = self._reject_retry_in_state(task_id, state)
        if rejection:
            self._add_problem(f"task {task_id!r} {rejection}")
            return
        if not self._stage_event(task_id, TaskEvent.REVIVE, "be retried"):
            return
        self.removed.pop(task_id, None)
        self._revived[task_id] = self._change_path
        self._take_in_branch(task_id)
        if state is _REPLACED:
            # Its own dependencies count again, not those of its sinks.
            for dep in self.task(task_id).depends_on:
                self._add_dependency(task_id, dep)
        self._commit_steps.append(partial(Draft._retry, task_id=task_id, delay=change.delay))

    def _reject_retry(self, task_id: TaskId) -> str:
        """Return why other tasks prevent a retry of a task; empty if none do."""
        withdrawn = task_id in self._withdrawn
        if task_id in self._graph:
            replacement = self._graph.entry(task_id).replacement
            if replacement.redone:
                return "was done and is done again by other tasks: it cannot be retried"
            withdrawn = withdrawn or replacement.withdrawn
        if withdrawn:
            return "was withdrawn in favour of the task that it replaced: it cannot be retried"
        return ""

    def _reject_retry_in_state(self, task_id: TaskId, state: TaskState) -> str:
        """Return why a task cannot be retried although it was skipped or done; empty if it can."""
        known = task_id in self._graph
        if state is TaskState.SKIPPED and known:
            started = self._graph.has_gone_on_without(self._graph.entry(task_id))
            if started:
                names = _format_names(started)
                return f"was skipped, and since then {names} started: it cannot be retried"
        if state is TaskState.DONE:
            # A result lost with its process must be produced again.
            if not known or self._graph.entry(task_id).output.recoverable:
                return f"is {state}: it cannot be retried"
        return ""

    def _stage_end(self, change: SkipTask | CancelTask) -> None:
        event = TaskEvent.CANCEL
        verb = "be cancelled"
        if isinstance(change, SkipTask):
            event = TaskEvent.SKIP
            verb = "be skipped"
        if self._stage_event(change.task_id, event, verb):
            step = partial(Draft._end, task_id=change.task_id, event=event, reason=change.reason)
            self._commit_steps.append(step)

    def _stage_abort(self, change: AbortRun) -> None:
        self._abort_reason = change.reason or _ABORT_REASON
        if change.undo and len(self.changes) > 1:
            self._add_problem("an abort with `undo` must be the only change")

    # Rules of staging

    @cached_property
    def _stale(self) -> dict[TaskId, StaleResult]:
        """The finished tasks with stale results, computed only if one is replaced."""
        return stale_results(self._graph)

    @cached_property
    def _adopted_scope(self) -> TaskScope:
        """Names that tasks of the corrected plan may refer to."""
        assert self.adopted is not None
        return self._graph.scope_after(self.adopted)

    def _add_problem(self, message: str) -> None:
        self.problems.append(Problem(self._change_path, message))

    def _add_dependency(self, waiting: TaskId, needed: TaskId) -> None:
        dependency = AddedDependency(waiting, needed, self._change_path)
        self._added_dependencies.append(dependency)

    def _find_task(self, task_id: TaskId) -> Task | None:
        """Return a task as the changes so far leave it; None, with a problem, if it is missing."""
        try:
            return self.task(task_id)
        except UnknownTask as error:
            self._add_problem(str(error))
            return None

    def _stage_event(
        self,
        task_id: TaskId,
        event: TaskEvent,
        verb: str,
        allowed: Collection[TaskState] | None = None,
    ) -> bool:
        """Stage an event of a task; False, with a problem, if its state does not allow it."""
        try:
            state = self.state(task_id)
        except UnknownTask as error:
            self._add_problem(str(error))
            return False
        revives = event is TaskEvent.REVIVE
        if state is TaskState.CANCELLED and not revives and not self.exists(task_id):
            self._add_problem(f"task {task_id!r} was removed: it cannot {verb}, only retried")
            return False
        follows = TRANSITIONS.get((state, event))
        if follows is None or (allowed is not None and state not in allowed):
            self._add_problem(f"task {task_id!r} is {state}: it cannot {verb}")
            return False
        self.states[task_id] = follows
        return True

    def _take_in_branch(self, task_id: TaskId) -> None:
        """Stage the return of the tasks that were left out with a task that runs again."""
        if task_id in self._graph:
            for entry in self._graph.left_out_with(self._graph.entry(task_id)):
                self.states.setdefault(entry.id, TaskState.PENDING)

    def _stage_new(
        self, task: Task, parent: TaskId | None, inherited: Sequence[TaskId] = ()
    ) -> bool:
        """Stage a new task, with inherited dependencies before its own.

        It returns False, with a problem, if the id is taken.
        """
        if task.id in self.new_tasks or self._graph.is_taken(task.id):
            self._add_problem(f"the id {task.id!r} is already used; ids are never used again")
            return False
        self._validate_task(task)
        new = task
        depends_on = tuple(dict.fromkeys([*inherited, *task.depends_on]))
        if inherited and depends_on != task.depends_on:
            new = task.model_copy(update={"depends_on": depends_on})
        if inherited and parent is not None and task.run_if is None:
            # It goes with the dependencies: a replacement starts when its original would have.
            run_if = self.task(parent).run_if
            if run_if is not None:
                new = new.model_copy(update={"run_if": run_if})
        order = self._graph.statistics.added_tasks + len(self.new_tasks)
        self._positions[task.id] = (task.priority, order)
        self.new_tasks[task.id] = StagedTask(new, parent, self._change_path)
        self.tasks[task.id] = new
        if may_read_results(task):
            self._changed_references[task.id] = self._change_path
        return True

    def _validate_task(self, task: Task) -> None:
        scope = self._graph.scope
        if self.adopted is not None:
            scope = self._adopted_scope
        for message in check_task(task, scope):
            self._add_problem(f"task {task.id!r}: {message}")
        for dep in dict.fromkeys(task.depends_on):
            if task.depends_on.count(dep) > 1:
                self._add_problem(f"task {task.id!r} depends on {dep!r} twice")

    def _take_back_replacement(self, task_id: TaskId) -> bool:
        """Stage the end of a task's replacement; False, with a problem, if that is impossible."""
        if task_id in self._graph:
            entry = self._graph.entry(task_id)
            if entry.replacement.expanded:
                return self._collapse_elements(entry)
        return self._withdraw_replacement(task_id)

    def _collapse_elements(self, template: TaskEntry) -> bool:
        """Stage the removal of a task's elements, because its list is expanded again.

        Their results are kept for elements that turn out to be equal.
        """
        if self.adopted is None and template.satisfied:
            started = template.started_dependents()
            if started:
                names = _format_names(started)
                self._add_problem(
                    f"task {template.id!r} is done, and since then {names} started: it cannot be "
                    "retried"
                )
                return False
        for element in self._graph.parts_of(template):
            state = self.state(element.id)
            if state is TaskState.RUNNING:
                self._add_problem(
                    f"task {template.id!r}: its part {element.id!r} is running: cancel it first"
                )
                return False
            if state in _UNFINISHED:
                self.states[element.id] = TaskState.CANCELLED
            self.removed[element.id] = self._change_path
        self._commit_steps.append(partial(Draft._collapse, task_id=template.id))
        return True

    def _withdraw_replacement(self, task_id: TaskId) -> bool:
        """Stage the removal of a task's replacements, unless one of them has started."""
        parts: list[TaskEntry] = []
        if task_id not in self.new_tasks:
            # Replacements may have been replaced themselves.
            entries = [self._graph.entry(task_id)]
            for entry in entries:
                for new in entry.replacement.tasks:
                    entries.append(self._graph.entry(new))
            parts = entries[1:]
        if task_id in self.sinks or any(part.id in self.sinks for part in parts):
            self._add_problem(
                f"task {task_id!r} is replaced by these changes: it cannot be retried by them as "
                "well"
            )
            return False
        started: list[TaskId] = []
        for part in parts:
            if part.log.count or self.state(part.id) in SATISFIED:
                started.append(part.id)
        if started:
            names = _format_names(started)
            self._add_problem(
                f"task {task_id!r} was replaced, and since then {names} started or ended: "
                "it cannot be retried"
            )
            return False
        for part in parts:
            self._revived.pop(part.id, None)
            self.states[part.id] = TaskState.CANCELLED
            self.removed[part.id] = self._change_path
            self._withdrawn.add(part.id)
            self._commit_steps.append(partial(Draft._withdraw, task_id=part.id))
        return True

    # Checks of the plan as the changes would leave it

    def _check_adopted(self, adopted: Plan) -> None:
        """Check that the unchanged unfinished tasks fit the corrected plan."""
        graph = self._graph
        capacity_changes = adopted.resources != graph.plan.resources
        changed_tools = graph.changed_tools(adopted)
        fewer_parameters = not graph.plan.parameters.keys() <= adopted.parameters.keys()
        for entry in graph:
            if entry.state in FINISHED or entry.id in self.states or entry.id in self.tasks:
                continue
            if capacity_changes or fewer_parameters or entry.task.tool in changed_tools:
                self._validate_task(entry.task)

    def _check_plan(self) -> None:
        """Check dependencies, removals, cycles and references, and collect their problems.

        Cycles and references cannot be followed in a plan with missing tasks, so they are checked
        only if there are no problems yet.
        """
        for task_id in dict.fromkeys([*self.tasks, *self._revived]):
            exists: Callable[[TaskId], bool] = self.exists
            if task_id in self.removed:
                # It waits for nothing; only a retry needs its dependencies, and may revive them.
                exists = self.__contains__
            for dep in self.task(task_id).depends_on:
                if not exists(dep):
                    why = "does not exist"
                    if dep in self:
                        why = "was removed"
                    path = self._path_of_dependency(task_id, dep)
                    message = f"task {task_id!r} depends on {dep!r}, which {why}"
                    self.problems.append(Problem(path, message))
        for task_id, path in self._revived.items():
            if self._would_be_left_out(task_id):
                names = _format_names(self.task(task_id).depends_on)
                message = (
                    f"task {task_id!r} would be left out again, "
                    "because all of its dependencies were: "
                    f"retry {names} as well, or state `run_if: always`"
                )
                self.problems.append(Problem(path, message))
        for task_id, path in self.removed.items():
            stranded = sorted(set(self._stranded_by_removal(task_id)))
            if stranded:
                names = _format_names(stranded)
                message = (
                    f"task {task_id!r} cannot be removed: {names} would be left waiting for it"
                )
                self.problems.append(Problem(path, message))
        if self.problems:
            return
        if self._may_close_cycle() and not self._check_cycles():
            return
        if self._changed_references:
            self._check_references()

    def _may_close_cycle(self) -> bool:
        """Return whether the changes may make tasks wait for one another.

        A single new task with inherited dependencies cannot: its original waited for the same
        tasks. It can only wait for itself.
        """
        if self._added_dependencies:
            return True
        for task_id, new in self.new_tasks.items():
            depends_on = new.task.depends_on
            if depends_on and (len(self.new_tasks) > 1 or task_id in depends_on):
                return True
        return False

    def _would_be_left_out(self, task_id: TaskId) -> bool:
        """Return whether all dependencies of a task were left out and the changes keep them so."""
        task = self.task(task_id)
        if task.run_if == "always":
            return False
        for dep in self.follow_replacements(task.depends_on):
            if not self._is_satisfied(dep):
                return False
            if not self._graph.entry(dep).left_out:
                return False
        return bool(task.depends_on)

    def _path_of_dependency(self, task_id: TaskId, dep: TaskId) -> str:
        """Return the path of the change that caused a dependency on a missing task."""
        for edge in reversed(self._added_dependencies):
            if edge.waiting == task_id and edge.needed == dep:
                return edge.change_path
        if task_id in self.new_tasks:
            return self.new_tasks[task_id].change_path
        return self._revived.get(task_id) or self.removed.get(dep, "")

    def _check_cycles(self) -> bool:
        """Check that no tasks wait for one another; return whether that is so.

        Following only new tasks finds a cycle among them. One that leads through the rest
        of the plan contains a dependency that a change adds there, so the search starts at those.
        """
        among_new: list[AddedDependency] = []
        for task_id, new in self.new_tasks.items():
            for dep in self.follow_replacements(new.task.depends_on):
                if dep in self.new_tasks:
                    among_new.append(AddedDependency(task_id, dep, new.change_path))
        for edges, within in ((among_new, True), (self._added_dependencies, False)):
            done: set[TaskId] = set()
            for edge in edges:
                loop = self._find_cycle(edge, done, within=within)
                if loop:
                    if len(loop) > _MAX_TASKS_IN_PROBLEM + 1:
                        loop = [*loop[:_MAX_TASKS_IN_PROBLEM], TaskId("…"), loop[-1]]
                    message = f"tasks would wait for one another: {' -> '.join(loop)}"
                    self.problems.append(Problem(edge.change_path, message))
                    return False
        return True

    def _check_references(self) -> None:
        """Check that tasks refer only to results that exist when they start."""
        for task_id, path in self._changed_references.items():
            if task_id in self.removed:
                continue
            for _, stated, text in result_references(self.task(task_id), self):
                name = stated
                # The elements of a list do not exist before the list does.
                if name not in self:
                    name = template_of(stated)
                why = self._reference_error(task_id, name)
                if why:
                    message = f"task {task_id!r} refers to {text}, {why}"
                    self.problems.append(Problem(path, message))

    def _stranded_by_removal(self, task_id: TaskId) -> Iterator[TaskId]:
        """Yield the tasks that would wait forever if a task were removed."""

        def is_active(other: TaskId) -> bool:
            return self.exists(other) and self.state(other) is not _REPLACED

        def is_replaced(other: TaskId) -> bool:
            # A list that is expanded again removes its elements and their replacements.
            return self.exists(other) and self.state(other) is _REPLACED

        for other, task in self.tasks.items():
            if task_id in task.depends_on and is_active(other):
                yield other
        for original, sinks in self.sinks.items():
            if task_id in sinks and is_replaced(original):
                yield original
        if task_id in self._graph:
            entry = self._graph.entry(task_id)
            for dependent in entry.dependents:
                # Tasks with changed documents were examined above.
                if dependent.id not in self.tasks and is_active(dependent.id):
                    yield dependent.id
            if entry.sink_of is not None and is_replaced(entry.sink_of.id):
                yield entry.sink_of.id

    def _is_satisfied(self, task_id: TaskId) -> bool:
        """Return whether a task was satisfied before the changes and they keep it so."""
        if task_id in self.new_tasks:
            return False
        entry = self._graph.entry(task_id)
        return entry.satisfied and self.state(task_id) is entry.state

    def _unsatisfied_dependencies(self, task_id: TaskId) -> Iterator[TaskId]:
        """Yield the dependencies that a task still waits for.

        If a task ever ended before its dependencies, or was left out, all are yielded: a satisfied
        task may then have unsatisfied dependencies, or wait for them again.
        """
        include_satisfied = self._graph.early.happened
        for dep in self.follow_replacements(self.task(task_id).depends_on):
            if include_satisfied or not self._is_satisfied(dep):
                yield dep

    def _find_cycle(
        self, edge: AddedDependency, done: set[TaskId], *, within: bool
    ) -> list[TaskId]:
        """Return a cycle that an edge leads to; `done` collects the tasks that lead to none.

        Args:
            edge: the dependency to begin with.
            done: tasks that lead to no cycle.
            within: whether to follow only new tasks.
        """
        path: dict[TaskId, Iterator[TaskId]] = {
            edge.waiting: self.follow_replacements([edge.needed])
        }
        while path:
            task_id = next(reversed(path))
            following = next(path[task_id], None)
            if following is None:
                path.pop(task_id)
                if path:
                    done.add(task_id)
            elif following in path:
                names = list(path)
                return [*names[names.index(following) :], following]
            elif following not in done and (not within or following in self.new_tasks):
                path[following] = self._unsatisfied_dependencies(following)
        return []

    def _reference_error(self, task_id: TaskId, name: TaskId) -> str:
        """Return why a task cannot see the result of another; empty if it can."""
        if not self.exists(name):
            return f"and {name!r} is not a task of the plan"
        if name == task_id:
            return "its own output"
        if name in self.ancestors(task_id):
            missing = f"it does not exist until {task_id!r} is done"
            return f"the output of a task that it replaces: {missing}"
        sources: set[TaskId] = set()
        for other in self.follow_replacements([name]):
            if not self._is_satisfied(other):
                sources.add(other)
        seen = {task_id}
        stack = [task_id]
        while stack and sources and len(seen) < _MAX_DEPENDENCY_SEARCH:
            for needed in self._unsatisfied_dependencies(stack.pop()):
                sources.discard(needed)
                if needed not in seen:
                    seen.add(needed)
                    stack.append(needed)
        # An abandoned search counts as a success: at worst, the task fails when it starts.
        if sources and not stack:
            return f"and does not depend on {name!r}: add {name!r} to its depends_on"
        return ""

    # Committing; none of these methods can fail

    def commit(self, at: float) -> None:
        """Apply the changes as a new revision, after `LivePlan.prepare` has accepted the draft.

        Args:
            at: now, in seconds since the epoch; the delay of a retry counts from it.
        """
        graph = self._graph
        graph.version += 1
        graph.revision += 1
        graph.revision_hash = self.plan_hash
        graph.world.problems.clear()
        graph.aborted = self._abort_reason or graph.aborted
        self._committed_at = at
        for change in self.changes:
            # Before its parts are inserted, because they are roots of their own lineages.
            if isinstance(change, ExpandTask):
                self._prepare_elements(change.task_id)
            elif isinstance(change, IncludePlan):
                self._mark_expanded(change.task_id, "plan")
        for new in self.new_tasks.values():
            parent = None
            if new.parent is not None:
                parent = graph.entries[new.parent]
            graph.insert(new.task, parent)
        graph.counts[TaskState.PENDING] += len(self.new_tasks)
        # Linked once all are inserted, because they may depend on one another in any order.
        for task_id in self.new_tasks:
            graph.link(graph.entries[task_id])
        for step in self._commit_steps:
            step(self)
        graph.early.standstill = None
        graph.wait_for_dependencies()
        # Whatever is left out is skipped, or replaced by tasks that are.
        if not graph.counts[TaskState.SKIPPED]:
            return
        # Last, because only now do all tasks have their final dependencies.
        for task_id in dict.fromkeys([*self.tasks, *self._revived]):
            entry = graph.entries[task_id]
            if graph.is_left_out(entry):
                graph.leave_out(entry, at)
                graph.leave_out_dependents(entry, at)

    def _replace(
        self, task_id: TaskId, parts: tuple[TaskId, ...], sinks: tuple[TaskId, ...]
    ) -> None:
        graph = self._graph
        original = graph.entries[task_id]
        if original.satisfied:
            graph.staleness.redone[task_id] = self.adopted is None
            original.replacement = original.replacement._replace(redone=True)
            graph.unsatisfy_dependents(original)
        event = TaskEvent.REPLACE
        if original.replacement.redone:
            event = TaskEvent.REDO
        graph.transition(original, event)
        entries: list[TaskEntry] = []
        unsatisfied = 0
        for sink in sinks:
            entry = graph.entries[sink]
            entry.sink_of = original
            entries.append(entry)
            if not entry.satisfied:
                unsatisfied += 1
        original.replacement = original.replacement._replace(
            tasks=parts, sinks=tuple(entries), unsatisfied=unsatisfied
        )
        graph.update_unsatisfied_count(original)
        if original.replacement.expanded:
            for part in graph.parts_of(original):
                graph.set_removed(part, False)
                # A kept element counts as made for the current list, so it is not stale.
                part.reads.started = graph.statistics.ended_attempts
            # A list without elements, or only with finished ones, is done at once.
            if not unsatisfied:
                graph.satisfy_dependents(original)

    def _mark_expanded(self, task_id: TaskId, expanded: Literal["", "elements", "plan"]) -> None:
        entry = self._graph.entries[task_id]
        entry.replacement = entry.replacement._replace(expanded=expanded)
        # Progress counts each list as one task, but each part of an included plan separately.
        if expanded == "elements":
            self._graph.statistics.expanded[task_id] = entry

    def _prepare_elements(self, task_id: TaskId) -> None:
        """Mark a task as expanded into elements, and set the limit of running ones."""
        self._mark_expanded(task_id, "elements")
        limit = self.task(task_id).max_parallel
        if limit is not None:
            self._graph.set_capacity(slot_resource(task_id), limit)

    def _edit(self, task: Task) -> None:
        graph = self._graph
        entry = graph.entries[task.id]
        # The running attempt began with the earlier form of the task.
        is_running = entry.state is TaskState.RUNNING
        if not is_running and not is_same_call(task, entry.task, graph.tools.get(task.tool or "")):
            entry.log.call_changes += 1
        if entry.state in FINISHED:
            graph.dependency_index.change_references(entry.task, task)
        else:
            graph.dependency_index.discard(entry.task)
            graph.dependency_index.add(task)
        relink = entry.task.depends_on != task.depends_on
        if relink:
            for dep in entry.task.depends_on:
                waiting = graph.entries[dep].dependents
                assert isinstance(waiting, list), "the entry was linked"
                waiting.remove(entry)
            entry.unsatisfied_dependencies = 0
        entry.task = task
        if task.run_if is not None:
            graph.early.possible = True
        if relink:
            graph.link(entry)
            graph.update_readiness(entry)
        if task.on_stale == "redo":
            graph.staleness.redoes = True
        graph.update_unsatisfied_count(entry)
        graph.scheduler.requeue(entry)

    def _reorder(self, task: Task, order: int) -> None:
        entry = self._graph.entries[task.id]
        entry.task = task
        entry.order = order
        # Results are listed in the order of the plan.
        self._graph.results.changed = None
        self._graph.scheduler.requeue(entry)

    def _remove(self, task_id: TaskId) -> None:
        entry = self._graph.entries[task_id]
        self._graph.transition(entry, TaskEvent.CANCEL)
        entry.removed = True
        self._graph.update_unsatisfied_count(entry)

    def _withdraw(self, task_id: TaskId) -> None:
        """Remove a replacement for good because the task it replaced is retried."""
        entry = self._graph.entries[task_id]
        # A replaced task can be cancelled only after it is revived.
        if entry.state is TaskState.REPLACED_BY_REPLAN:
            self._graph.transition(entry, TaskEvent.REVIVE)
        if entry.state is not TaskState.CANCELLED:
            self._remove(task_id)
        entry.removed = True
        entry.replacement = entry.replacement._replace(withdrawn=True)
        entry.sink_of = None

    def _collapse(self, task_id: TaskId) -> None:
        """Remove the elements of a task whose list is expanded again."""
        graph = self._graph
        template = graph.entries[task_id]
        if template.satisfied:
            graph.unsatisfy_dependents(template)
        for part in graph.parts_of(template):
            if part.state in _UNFINISHED:
                graph.transition(part, TaskEvent.CANCEL)
            graph.set_removed(part, True)
        for element in template.replacement.sinks:
            element.sink_of = None
        self._mark_expanded(task_id, "")

    def _retry(self, task_id: TaskId, delay: float) -> None:
        graph = self._graph
        entry = graph.entries[task_id]
        if entry.state in SATISFIED:
            graph.unsatisfy_dependents(entry)
        graph.set_removed(entry, False)
        graph.transition(entry, TaskEvent.REVIVE)
        graph.dependency_index.add(entry.task)
        entry.reason = ""
        entry.condition_revision = None
        entry.log.in_round = 0
        entry.log.continuations = 0
        entry.log.feedback = ""
        entry.replacement = entry.replacement._replace(tasks=(), sinks=(), unsatisfied=0)
        graph.update_unsatisfied_count(entry)
        ready_at = None
        if delay:
            ready_at = self._committed_at + delay
        graph.scheduler.wait_until(entry, ready_at)
        graph.update_readiness(entry)

    def _end(self, task_id: TaskId, event: TaskEvent, reason: str) -> None:
        graph = self._graph
        entry = graph.entries[task_id]
        running = entry.log.current
        if running is not None and entry.log.doubt is None:
            graph.keep_call(entry, running, in_doubt=True)
        graph.transition(entry, event)
        graph.end_attempt(entry)
        entry.reason = reason
        if event is TaskEvent.SKIP:
            if entry.unsatisfied_dependencies > 0:
                graph.early.happened = True
            graph.satisfy_dependents(entry)


_STAGE_HANDLERS: dict[type, Callable[..., None]] = {
    AddTask: Draft._stage_add,
    RemoveTask: Draft._stage_remove,
    ReplaceTask: Draft._stage_replace,
    ExpandTask: Draft._stage_expand,
    IncludePlan: Draft._stage_include,
    ModifyTask: Draft._stage_modify,
    ReorderTasks: Draft._stage_reorder,
    RetryTask: Draft._stage_retry,
    SkipTask: Draft._stage_end,
    CancelTask: Draft._stage_end,
    AbortRun: Draft._stage_abort,
}


def _format_names(task_ids: Iterable[TaskId]) -> str:
    """Return the tasks that a problem names, at most the first few of them."""
    return join_names([repr(task_id) for task_id in task_ids], _MAX_TASKS_IN_PROBLEM)


def _is_done(entry: TaskEntry) -> bool:
    """Return whether a task or its replacement was done, and not skipped."""
    return entry.satisfied and entry.state is not TaskState.SKIPPED


def _format_task(task: Task, state: TaskState) -> str:
    """Return a task in one line: its id, the fields that are set, and its state."""
    fields: list[str] = []
    for name, value in display_fields(task).items():
        # Strings are shown as in a plan file, without quotes.
        text = value
        if not isinstance(text, str):
            text = json.dumps(value, ensure_ascii=False)
        fields.append(f"{name}: {text}")
    if not fields:
        return f"{task.id} [{state}]"
    return f"{task.id}: {', '.join(fields)} [{state}]"


def _format_collapse(template: TaskEntry) -> str:
    """Return in one line that a list is expanded again, or an included plan run again."""
    if template.replacement.expanded == "plan":
        return f"{template.id}: its included plan is run again"
    return f"{template.id}: expanded again; elements that are done and stay the same are kept"


def _format_list(task_id: TaskId, elements: Sequence[TaskId]) -> str:
    """Return an expanded task in one line: the number of its elements, the first and the last."""
    if not elements:
        return f"{task_id}: no elements"
    if len(elements) == 1:
        return f"{task_id}: 1 element, {elements[0]}"
    return f"{task_id}: {len(elements)} elements, {elements[0]} … {elements[-1]}"


def display_fields(task: Task) -> JsonObject:
    """Return the fields of a task that are set, without its id.

    Objects in its metadata are left out: they are for programs. The tool and the arguments that a
    program intends are shown while the task names no tool.
    """
    fields: JsonObject = task.model_dump(mode="json", exclude_defaults=True, exclude={"id"})
    for name, value in fields.items():
        # Seconds are floats, and people write them without a fraction.
        if isinstance(value, float) and value.is_integer():
            fields[name] = int(value)
    metadata = fields.get("metadata")
    if not isinstance(metadata, dict):
        return fields
    note = program_note(task)
    for name in ("tool", "arguments"):
        if task.tool is None and name in note:
            fields[name] = note[name]
    del fields["metadata"]
    plain: JsonObject = {}
    for name, value in metadata.items():
        if not isinstance(value, dict):
            plain[name] = value
    if plain:
        fields["metadata"] = plain
    return fields
