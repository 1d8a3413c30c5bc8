"""Changes staged beside a live plan: checked as a whole, then committed, or dropped without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError

from replanning.changes import (
    AbortRun,
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReorderTasks,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import Problem
from replanning.live import mutations as commit
from replanning.live.staging import AddedDependency, PlanOverlay, check_changed_graph
from replanning.live.states import FINISHED, SATISFIED, STUCK, TRANSITIONS, WAITING, TaskEvent, TaskState, transition
from replanning.plan.checks import check_task
from replanning.plan.tasks import PLANNING_KEY, Task
from replanning.plan.types import JsonObject, TaskId

if TYPE_CHECKING:
    from replanning.live.graph import TaskGraph


_ANNOTATION_FIELDS = frozenset({"name", "goal", "metadata"})

_MAX_LISTED_TASKS = 8


class Draft:
    """A set of changes staged against a live plan.

    Staging looks at the tasks that the changes touch, not at the whole plan.

    Attributes:
        problems: what speaks against the changes; `commit` must only be called when nothing does.
        version: the version of the plan that they were staged against; the draft holds as long as the plan has it.
        plan_hash: the hash of the plan with the changes, once `LivePlan.prepare` has accepted them.
    """

    def __init__(self, graph: TaskGraph, changes: Sequence[PlanChange]) -> None:
        self.changes = tuple(changes)
        self.problems: list[Problem] = []
        self.overlay = PlanOverlay(graph)
        self.change_path = ""
        self.version = graph.version
        self.plan_hash = ""
        self._graph = graph
        self._committed_at = 0.0
        self._mutations: list[Callable[[TaskGraph], None]] = []
        self._diff_notes: list[str] = []
        for index, change in enumerate(changes):
            self.change_path = f"changes[{index}]"
            self.stage(change)
        self.problems += check_changed_graph(self.overlay, changes_valid=not self.problems)

    def commit(self, at: float) -> None:
        """Carry the changes out now, at a time from which the delay of a retry counts."""
        self._committed_at = at
        for birth in self.overlay.new_tasks.values():
            commit.create(self._graph, birth.task, birth.parent)
        for step in self._mutations:
            step(self._graph)

    def stage(self, change: PlanChange) -> None:
        """Lay one more change over the plan."""
        _STAGE_HANDLERS[type(change)](self, change)

    def diff(self) -> str:
        """What becomes of the tasks concerned, one line each: `-` before, `+` after, then who waits for what."""
        graph, staging = self._graph, self.overlay
        touched = dict.fromkeys([*staging.states, *staging.tasks, *staging.removed])
        before = {i: _format_task_state(graph.entry(i).task, graph.entry(i).state) for i in touched if i in graph}
        after = {
            i: _format_task_state(staging.task(i), staging.state(i))
            for i in touched
            if i not in staging.removed and staging.state(i) is not TaskState.REPLACED_BY_REPLAN
        }
        lines = [f"- {line}" for i, line in before.items() if after.get(i) != line]
        lines += [f"+ {line}" for i, line in after.items() if before.get(i) != line]
        for i, sinks in staging.sinks.items():
            waiting = graph.entry(i).dependent_ids() if i in graph else ()
            if waiting:
                more = f" and {len(waiting) - _MAX_LISTED_TASKS} more" if len(waiting) > _MAX_LISTED_TASKS else ""
                lines.append(
                    f"  {', '.join(waiting[:_MAX_LISTED_TASKS])}{more}: waiting for {', '.join(sinks)} instead of {i}"
                )
        return "\n".join([*lines, *self._diff_notes])

    # Staging one change of each kind

    def _stage_add(self, change: AddTask) -> None:
        task = change.task
        if not self._validate_new_task(task):
            return
        self.overlay.add_task(task, None, self.change_path)
        self._mutations.append(partial(commit.link, task_id=task.id))
        for waiting in change.before:
            if (old := self._find_task(waiting)) is not None and task.id not in old.depends_on:
                self._stage_edit(old, old.model_copy(update={"depends_on": (*old.depends_on, task.id)}))

    def _stage_remove(self, change: RemoveTask) -> None:
        if self._stage_event(change.task_id, TaskEvent.CANCEL, "be removed", (*WAITING, *STUCK)):
            self.overlay.remove(change.task_id, self.change_path)
            self._mutations.append(partial(commit.remove, task_id=change.task_id))

    def _stage_replace(self, change: ReplaceTask) -> None:
        original = self._find_task(change.task_id)
        if original is None or not self._stage_event(change.task_id, TaskEvent.REPLACE, "be replaced"):
            return
        ids: dict[TaskId, Task] = {}
        for task in change.tasks:
            if self._validate_new_task(task, ids):
                ids[task.id] = task
        inherited = [dep for dep in original.depends_on if dep not in ids]
        for task in ids.values():
            new = task
            if ids.keys().isdisjoint(task.depends_on):
                deps = tuple(dict.fromkeys([*inherited, *task.depends_on]))
                new = task if deps == task.depends_on else task.model_copy(update={"depends_on": deps})
            self.overlay.add_task(new, change.task_id, self.change_path)
            foreign = [dep for dep in task.depends_on if dep not in ids and dep not in inherited]
            self.overlay.added_dependencies += [AddedDependency(task.id, dep, self.change_path) for dep in foreign]
        needed = {dep for task in ids.values() for dep in task.depends_on}
        sinks = tuple(i for i in ids if i not in needed)
        self.overlay.sinks[change.task_id] = sinks
        self._mutations.append(partial(commit.replace, task_id=change.task_id, parts=tuple(ids), sinks=sinks))

    def _stage_modify(self, change: ModifyTask) -> None:
        old = self._find_task(change.task_id)
        if old is None:
            return
        state = self.overlay.state(change.task_id)
        annotation = _ANNOTATION_FIELDS.issuperset(change.fields)
        if not self.overlay.exists(change.task_id):
            self._add_problem(f"task {change.task_id!r} was removed: it cannot be modified, only be retried")
        elif state not in WAITING and state not in STUCK and not (annotation and state in FINISHED):
            only = f", only annotated ({', '.join(sorted(_ANNOTATION_FIELDS))})" if state in FINISHED else ""
            self._add_problem(f"task {change.task_id!r} is {state}: it cannot be modified{only}")
        elif "id" in change.fields:
            self._add_problem(f"task {change.task_id!r}: an id cannot be changed; replace the task instead")
        else:
            try:
                new = Task.model_validate({**old.model_dump(exclude_unset=True), **change.fields})
            except ValidationError as error:
                self._add_validation_error(change.task_id, error)
            else:
                self._stage_edit(old, new)

    def _stage_reorder(self, change: ReorderTasks) -> None:
        order = tuple(dict.fromkeys(change.order))
        if len(order) != len(change.order):
            self._add_problem(f"order names tasks twice: {list(change.order)}")
        known = [task_id for task_id in order if self._find_task(task_id) is not None]
        for task_id in known:
            if (state := self.overlay.state(task_id)) not in WAITING:
                self._add_problem(f"task {task_id!r} is {state}: only waiting tasks have an order")
        places = sorted(map(self.overlay.position, known))
        for task_id, (priority, number) in zip(known, places, strict=True):
            task = self.overlay.reorder(task_id, priority, number)
            self._mutations.append(partial(commit.reorder, task=task, order=number))
        self._diff_notes.append(f"  handed out in this order: {', '.join(change.order)}")

    def _stage_retry(self, change: RetryTask) -> None:
        task_id = change.task_id
        if self._find_task(task_id) is None or not self._can_retry(task_id):
            return
        state = self.overlay.state(task_id)
        if self._stage_event(task_id, TaskEvent.REVIVE, "be retried"):
            self.overlay.revive(task_id, state, self.change_path)
            self._mutations.append(partial(self._commit_retry, change=change))

    def _commit_retry(self, graph: TaskGraph, change: RetryTask) -> None:
        commit.retry(graph, change.task_id, self._committed_at + change.delay if change.delay else None)

    def _stage_skip(self, change: SkipTask) -> None:
        self._stage_end(change, TaskEvent.SKIP, "be skipped")

    def _stage_cancel(self, change: CancelTask) -> None:
        self._stage_end(change, TaskEvent.CANCEL, "be cancelled")

    def _stage_end(self, change: SkipTask | CancelTask, event: TaskEvent, verb: str) -> None:
        if self._stage_event(change.task_id, event, verb):
            self._mutations.append(partial(commit.finish, task_id=change.task_id, event=event, reason=change.reason))

    def _stage_abort(self, change: AbortRun) -> None:
        reason = change.reason or "a change asked for it"
        self._mutations.append(partial(commit.abort, reason=reason))
        self._diff_notes.append(f"  the run is aborted: {reason}")

    # What staging is made of

    def _add_problem(self, message: str) -> None:
        self.problems.append(Problem(self.change_path, message))

    def _add_validation_error(self, task_id: TaskId, error: ValidationError) -> None:
        for detail in error.errors(include_url=False, include_context=False):
            where = ".".join(str(part) for part in detail["loc"])
            self._add_problem(f"task {task_id!r}, {where}: {detail['msg']}")

    def _find_task(self, task_id: TaskId) -> Task | None:
        """The task as the changes so far leave it; says so when there is none."""
        if task_id in self.overlay:
            return self.overlay.task(task_id)
        self._add_problem(f"there is no task {task_id!r}")
        return None

    def _stage_event(
        self, task_id: TaskId, event: TaskEvent, verb: str, allowed: Collection[TaskState] | None = None
    ) -> bool:
        """Stage an event of a task; says so when its state does not take it."""
        if self._find_task(task_id) is None:
            return False
        if event is not TaskEvent.REVIVE and not self.overlay.exists(task_id):
            self._add_problem(f"task {task_id!r} was removed: it cannot {verb}, only be retried")
            return False
        state = self.overlay.state(task_id)
        if (allowed is not None and state not in allowed) or (state, event) not in TRANSITIONS:
            self._add_problem(f"task {task_id!r} is {state}: it cannot {verb}")
            return False
        self.overlay.states[task_id] = transition(state, event, task_id)
        return True

    def _validate_new_task(self, task: Task, beside: Collection[TaskId] = ()) -> bool:
        """Whether a new task may have its id; says what else is wrong with it."""
        if task.id in self.overlay or task.id in beside:
            self._add_problem(f"the id {task.id!r} is already used; ids are never used again")
            return False
        self._validate_task(task)
        return True

    def _validate_task(self, task: Task) -> None:
        graph = self._graph
        for message in check_task(task, graph.tools, graph.pool.capacity, graph.plan.objects):
            self._add_problem(f"task {task.id!r}: {message}")
        for dep in dict.fromkeys(task.depends_on):
            if task.depends_on.count(dep) > 1:
                self._add_problem(f"task {task.id!r} depends on {dep!r} twice")

    def _stage_edit(self, old: Task, new: Task) -> None:
        state = self.overlay.state(new.id)
        if state in FINISHED and new.depends_on != old.depends_on:
            self._add_problem(f"task {new.id!r} is {state}: what it depends on cannot change")
        elif state is TaskState.RUNNING:
            self._add_problem(f"task {new.id!r} is {state}: it cannot be made to wait for another task")
        else:
            self._validate_task(new)
            self.overlay.edit(old, new, self.change_path)
            self._mutations.append(partial(commit.edit, task=new))

    def _can_retry(self, task_id: TaskId) -> bool:
        """Whether nothing has come of what is to be taken back; stages the removal of what replaced the task."""
        state = self.overlay.state(task_id)
        if task_id in self.overlay.withdrawn or (task_id in self._graph and self._graph.entry(task_id).withdrawn):
            self._add_problem(f"task {task_id!r} was withdrawn for what it had replaced: it cannot be retried")
            return False
        if state is TaskState.REPLACED_BY_REPLAN:
            return self._withdraw_replacement(task_id)
        if state is TaskState.SKIPPED and task_id in self._graph:
            started = self._graph.entry(task_id).started_dependents()
            if started:
                self._add_problem(f"task {task_id!r} was skipped and {started} have started since")
            return not started
        return True

    def _withdraw_replacement(self, task_id: TaskId) -> bool:
        staging = self.overlay
        entries = [] if task_id in staging.new_tasks else [self._graph.entry(task_id)]
        for entry in entries:
            entries.extend(self._graph.entry(new) for new in entry.replaced_by)
        parts = entries[1:]
        if task_id in staging.sinks or any(part.id in staging.sinks for part in parts):
            self._add_problem(f"task {task_id!r} is replaced by these changes: it cannot be retried by them as well")
            return False
        ended = [p.id for p in parts if p.attempts or staging.state(p.id) in SATISFIED]
        if ended:
            self._add_problem(f"task {task_id!r} was replaced and {ended} have started since: it cannot be retried")
            return False
        for part in parts:
            staging.states[part.id] = TaskState.CANCELLED
            staging.remove(part.id, self.change_path)
            staging.withdrawn.add(part.id)
            self._mutations.append(partial(commit.withdraw, task_id=part.id))
        return True


_STAGE_HANDLERS: dict[type, Callable[..., None]] = {
    AddTask: Draft._stage_add,
    RemoveTask: Draft._stage_remove,
    ReplaceTask: Draft._stage_replace,
    ModifyTask: Draft._stage_modify,
    ReorderTasks: Draft._stage_reorder,
    RetryTask: Draft._stage_retry,
    SkipTask: Draft._stage_skip,
    CancelTask: Draft._stage_cancel,
    AbortRun: Draft._stage_abort,
}


def _format_task_state(task: Task, state: TaskState) -> str:
    return f"{format_task(task)} [{state}]"


def format_task(task: Task) -> str:
    """A task in one line: its id and the fields that say something, written as in a plan."""
    rest = ", ".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in display_fields(task).items()
    )
    return f"{task.id}: {rest}" if rest else task.id


def display_fields(task: Task) -> JsonObject:
    """The fields of a task that say something to people, but for its id.

    Of what planning mode notes of a task, that is the tool and the arguments it will be used with, where the task itself
    names no tool yet.
    """
    fields: JsonObject = task.model_dump(mode="json", exclude_defaults=True, exclude={"id"})
    metadata = fields.get("metadata")
    if isinstance(metadata, dict) and isinstance(planned := metadata.pop(PLANNING_KEY, None), dict):
        fields |= {name: planned[name] for name in ("tool", "arguments") if name in planned and task.tool is None}
        if not metadata:
            del fields["metadata"]
    return fields
