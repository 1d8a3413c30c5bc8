"""Changes staged beside a live plan: checked as a whole, then committed, or dropped without a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import partial

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
from replanning.live.graph import TaskGraph
from replanning.live.staging import AddedDependency, PlanOverlay, check_changed_graph
from replanning.live.states import FINISHED, SATISFIED, STUCK, TRANSITIONS, WAITING, TaskEvent, TaskState
from replanning.plan.checks import check_task
from replanning.plan.tasks import PLANNING_KEY, Task
from replanning.plan.types import JsonObject, TaskId

_ANNOTATION_FIELDS = frozenset({"name", "goal", "metadata"})

_MAX_LISTED_TASKS = 8


class Draft:
    """A set of changes staged against a live plan.

    Staging looks at the tasks that the changes touch, not at the whole plan.

    Attributes:
        changes: the changes.
        problems: the reasons why the changes cannot be committed.
        overlay: the plan as the changes would leave it.
        version: the version of the plan that they were staged against; the draft is valid while the plan has it.
        plan_hash: the hash of the plan with the changes, once `LivePlan.prepare` has accepted them.
    """

    def __init__(self, graph: TaskGraph, changes: Sequence[PlanChange]) -> None:
        self.changes = tuple(changes)
        self.problems: list[Problem] = []
        self.overlay = PlanOverlay(graph)
        self.version = graph.version
        self.plan_hash = ""
        self._graph = graph
        self._change_path = ""
        self._committed_at = 0.0
        self._commit_steps: list[Callable[[Draft], None]] = []
        self._diff_notes: list[str] = []
        for index, change in enumerate(changes):
            self._change_path = f"changes[{index}]"
            _STAGE_HANDLERS[type(change)](self, change)
        self.problems += check_changed_graph(self.overlay, changes_valid=not self.problems)

    def diff(self) -> str:
        """Return the effect of the changes: per task `-` before and `+` after, then the dependents that wait for others."""
        graph, overlay = self._graph, self.overlay
        touched = dict.fromkeys([*overlay.states, *overlay.tasks, *overlay.removed])
        before = {i: _format_task(graph.entry(i).task, graph.entry(i).state) for i in touched if i in graph}
        after = {
            i: _format_task(overlay.task(i), overlay.state(i))
            for i in touched
            if i not in overlay.removed and overlay.state(i) is not TaskState.REPLACED_BY_REPLAN
        }
        lines = [f"- {line}" for i, line in before.items() if after.get(i) != line]
        lines += [f"+ {line}" for i, line in after.items() if before.get(i) != line]
        for i, sinks in overlay.sinks.items():
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
        self.overlay.add_task(task, None, self._change_path)
        self._commit_steps.append(partial(Draft._link, task_id=task.id))
        for waiting in change.before:
            if (old := self._find_task(waiting)) is not None and task.id not in old.depends_on:
                self._stage_edit(old, old.model_copy(update={"depends_on": (*old.depends_on, task.id)}))

    def _stage_remove(self, change: RemoveTask) -> None:
        if self._stage_event(change.task_id, TaskEvent.CANCEL, "be removed", (*WAITING, *STUCK)):
            self.overlay.remove(change.task_id, self._change_path)
            self._commit_steps.append(partial(Draft._remove, task_id=change.task_id))

    def _stage_replace(self, change: ReplaceTask) -> None:
        if not self._stage_event(change.task_id, TaskEvent.REPLACE, "be replaced"):
            return
        parts: dict[TaskId, Task] = {}
        for task in change.tasks:
            if self._validate_new_task(task, parts):
                parts[task.id] = task
        inherited = [dep for dep in self.overlay.task(change.task_id).depends_on if dep not in parts]
        for task in parts.values():
            new = task
            if parts.keys().isdisjoint(task.depends_on):
                deps = tuple(dict.fromkeys([*inherited, *task.depends_on]))
                new = task if deps == task.depends_on else task.model_copy(update={"depends_on": deps})
            self.overlay.add_task(new, change.task_id, self._change_path)
            foreign = [dep for dep in task.depends_on if dep not in parts and dep not in inherited]
            self.overlay.added_dependencies += [AddedDependency(task.id, dep, self._change_path) for dep in foreign]
        needed = {dep for task in parts.values() for dep in task.depends_on}
        sinks = tuple(i for i in parts if i not in needed)
        self.overlay.sinks[change.task_id] = sinks
        self._commit_steps.append(partial(Draft._replace, task_id=change.task_id, parts=tuple(parts), sinks=sinks))

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
                for detail in error.errors(include_url=False, include_context=False):
                    where = ".".join(str(part) for part in detail["loc"])
                    self._add_problem(f"task {change.task_id!r}, {where}: {detail['msg']}")
            else:
                self._stage_edit(old, new)

    def _stage_edit(self, old: Task, new: Task) -> None:
        state = self.overlay.state(new.id)
        if state in FINISHED and new.depends_on != old.depends_on:
            self._add_problem(f"task {new.id!r} is {state}: what it depends on cannot change")
        elif state is TaskState.RUNNING:
            self._add_problem(f"task {new.id!r} is {state}: it cannot be made to wait for another task")
        else:
            self._validate_task(new)
            self.overlay.edit(old, new, self._change_path)
            self._commit_steps.append(partial(Draft._edit, task=new))

    def _stage_reorder(self, change: ReorderTasks) -> None:
        order = tuple(dict.fromkeys(change.order))
        if len(order) != len(change.order):
            self._add_problem(f"order names tasks twice: {list(change.order)}")
        task_ids = [task_id for task_id in order if self._find_task(task_id) is not None]
        for task_id in task_ids:
            if (state := self.overlay.state(task_id)) not in WAITING:
                self._add_problem(f"task {task_id!r} is {state}: only waiting tasks have an order")
        positions = sorted(map(self.overlay.position, task_ids))
        for task_id, (priority, number) in zip(task_ids, positions, strict=True):
            task = self.overlay.reorder(task_id, priority, number)
            self._commit_steps.append(partial(Draft._reorder, task=task, order=number))
        self._diff_notes.append(f"  handed out in this order: {', '.join(change.order)}")

    def _stage_retry(self, change: RetryTask) -> None:
        task_id = change.task_id
        if self._find_task(task_id) is None or not self._can_retry(task_id):
            return
        state = self.overlay.state(task_id)
        if self._stage_event(task_id, TaskEvent.REVIVE, "be retried"):
            self.overlay.revive(task_id, state, self._change_path)
            self._commit_steps.append(partial(Draft._retry, task_id=task_id, delay=change.delay))

    def _stage_end(self, change: SkipTask | CancelTask) -> None:
        skips = isinstance(change, SkipTask)
        event, verb = (TaskEvent.SKIP, "be skipped") if skips else (TaskEvent.CANCEL, "be cancelled")
        if self._stage_event(change.task_id, event, verb):
            self._commit_steps.append(partial(Draft._end, task_id=change.task_id, event=event, reason=change.reason))

    def _stage_abort(self, change: AbortRun) -> None:
        reason = change.reason or "a change asked for it"
        self._commit_steps.append(partial(Draft._abort, reason=reason))
        self._diff_notes.append(f"  the run is aborted: {reason}")

    # Rules of staging

    def _add_problem(self, message: str) -> None:
        self.problems.append(Problem(self._change_path, message))

    def _find_task(self, task_id: TaskId) -> Task | None:
        """Return a task as the changes so far leave it; None, with a problem, if there is none."""
        if task_id in self.overlay:
            return self.overlay.task(task_id)
        self._add_problem(f"there is no task {task_id!r}")
        return None

    def _stage_event(
        self, task_id: TaskId, event: TaskEvent, verb: str, allowed: Collection[TaskState] | None = None
    ) -> bool:
        """Stage an event of a task; False, with a problem, if its state does not allow it."""
        overlay = self.overlay
        if task_id not in overlay:
            self._add_problem(f"there is no task {task_id!r}")
            return False
        if event is not TaskEvent.REVIVE and not overlay.exists(task_id):
            self._add_problem(f"task {task_id!r} was removed: it cannot {verb}, only be retried")
            return False
        state = overlay.state(task_id)
        follows = TRANSITIONS.get((state, event))
        if follows is None or (allowed is not None and state not in allowed):
            self._add_problem(f"task {task_id!r} is {state}: it cannot {verb}")
            return False
        overlay.states[task_id] = follows
        return True

    def _validate_new_task(self, task: Task, beside: Collection[TaskId] = ()) -> bool:
        """Add the problems of a new task; return whether its id is free."""
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

    def _can_retry(self, task_id: TaskId) -> bool:
        """Return whether nothing has followed from the end of a task; stages the removal of its replacement."""
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
        overlay = self.overlay
        entries = [] if task_id in overlay.new_tasks else [self._graph.entry(task_id)]
        for entry in entries:
            entries.extend(self._graph.entry(new) for new in entry.replaced_by)
        parts = entries[1:]
        if task_id in overlay.sinks or any(part.id in overlay.sinks for part in parts):
            self._add_problem(f"task {task_id!r} is replaced by these changes: it cannot be retried by them as well")
            return False
        ended = [p.id for p in parts if p.attempts or overlay.state(p.id) in SATISFIED]
        if ended:
            self._add_problem(f"task {task_id!r} was replaced and {ended} have started since: it cannot be retried")
            return False
        for part in parts:
            overlay.states[part.id] = TaskState.CANCELLED
            overlay.remove(part.id, self._change_path)
            overlay.withdrawn.add(part.id)
            self._commit_steps.append(partial(Draft._withdraw, task_id=part.id))
        return True

    # Committing; none of these can fail

    def commit(self, at: float) -> None:
        """Carry the changes out; only for a draft without problems.

        Args:
            at: now, in seconds since the epoch; the delay of a retry counts from it.
        """
        self._committed_at = at
        for new in self.overlay.new_tasks.values():
            self._graph.insert(new.task, None if new.parent is None else self._graph.entry(new.parent))
        self._graph.counts[TaskState.PENDING] += len(self.overlay.new_tasks)
        for step in self._commit_steps:
            step(self)

    def _link(self, task_id: TaskId) -> None:
        entry = self._graph.entry(task_id)
        self._graph.link(entry)
        if not entry.unsatisfied_dependencies:
            self._graph.make_ready(entry)

    def _replace(self, task_id: TaskId, parts: tuple[TaskId, ...], sinks: tuple[TaskId, ...]) -> None:
        graph = self._graph
        original = graph.entry(task_id)
        graph.dispatcher.end_claim(original)
        graph.transition(original, TaskEvent.REPLACE)
        original.replaced_by, original.unsatisfied_sinks = parts, len(sinks)
        original.sinks = tuple(map(graph.entry, sinks))
        for sink in original.sinks:
            sink.sink_of = original
        for part in map(graph.entry, parts):
            graph.link(part)
            if not part.unsatisfied_dependencies:
                graph.make_ready(part)

    def _edit(self, task: Task) -> None:
        graph = self._graph
        entry = graph.entry(task.id)
        if entry.state not in FINISHED:
            graph.dependency_index.discard(entry.task)
            graph.dependency_index.add(task)
        if entry.task.depends_on != task.depends_on:
            graph.unlink(entry)
            entry.set_task(task)
            graph.link(entry)
            graph.update_readiness(entry)
        entry.set_task(task)
        graph.update_unsatisfied_count(entry)
        graph.dispatcher.requeue(entry)

    def _reorder(self, task: Task, order: int) -> None:
        entry = self._graph.entry(task.id)
        entry.set_task(task)
        entry.order = order
        self._graph.dispatcher.requeue(entry)

    def _remove(self, task_id: TaskId) -> None:
        entry = self._graph.entry(task_id)
        self._graph.dispatcher.end_claim(entry)
        self._graph.transition(entry, TaskEvent.CANCEL)
        entry.removed = True
        self._graph.update_unsatisfied_count(entry)

    def _withdraw(self, task_id: TaskId) -> None:
        """Remove a replacement for good because the task it replaced is retried."""
        entry = self._graph.entry(task_id)
        if entry.state is TaskState.REPLACED_BY_REPLAN:
            self._graph.transition(entry, TaskEvent.REVIVE)
        if entry.state is not TaskState.CANCELLED:
            self._remove(task_id)
        entry.removed, entry.withdrawn, entry.sink_of = True, True, None

    def _retry(self, task_id: TaskId, delay: float) -> None:
        graph = self._graph
        entry = graph.entry(task_id)
        if entry.state is TaskState.SKIPPED:
            graph.unsatisfy_dependents(entry)
        graph.transition(entry, TaskEvent.REVIVE)
        graph.dependency_index.add(entry.task)
        entry.removed, entry.attempts_in_round, entry.reason, entry.condition_revision = False, 0, "", None
        entry.replaced_by, entry.sinks, entry.unsatisfied_sinks = (), (), 0
        entry.continuations, entry.feedback = 0, ""
        graph.update_unsatisfied_count(entry)
        graph.wait_until(entry, self._committed_at + delay if delay else None)
        graph.update_readiness(entry)

    def _end(self, task_id: TaskId, event: TaskEvent, reason: str) -> None:
        graph = self._graph
        entry = graph.entry(task_id)
        graph.dispatcher.end_claim(entry)
        graph.transition(entry, event)
        graph.end_attempt(entry)
        entry.reason = reason
        if event is TaskEvent.SKIP:
            graph.has_early_skips = graph.has_early_skips or entry.unsatisfied_dependencies > 0
            graph.satisfy_dependents(entry)

    def _abort(self, reason: str) -> None:
        self._graph.aborted = reason


_STAGE_HANDLERS: dict[type, Callable[..., None]] = {
    AddTask: Draft._stage_add,
    RemoveTask: Draft._stage_remove,
    ReplaceTask: Draft._stage_replace,
    ModifyTask: Draft._stage_modify,
    ReorderTasks: Draft._stage_reorder,
    RetryTask: Draft._stage_retry,
    SkipTask: Draft._stage_end,
    CancelTask: Draft._stage_end,
    AbortRun: Draft._stage_abort,
}


def _format_task(task: Task, state: TaskState) -> str:
    """Return a task in one line: its id, the fields that are set, as in a plan file, and its state."""
    fields = ", ".join(
        f"{name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in display_fields(task).items()
    )
    return f"{task.id}: {fields} [{state}]" if fields else f"{task.id} [{state}]"


def display_fields(task: Task) -> JsonObject:
    """Return the fields of a task that are set, without its id.

    Of the notes of planning mode only the intended tool and arguments are kept, if the task names no tool yet.
    """
    fields: JsonObject = task.model_dump(mode="json", exclude_defaults=True, exclude={"id"})
    metadata = fields.get("metadata")
    if isinstance(metadata, dict) and isinstance(planned := metadata.pop(PLANNING_KEY, None), dict):
        fields |= {name: planned[name] for name in ("tool", "arguments") if name in planned and task.tool is None}
        if not metadata:
            del fields["metadata"]
    return fields
