"""What a journal says has become of a plan, read without any of the code that runs plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import JsonValue

from replanning import Plan, Task, journal
from replanning.changes import PlanChange, ReplaceTask, RetryTask

SATISFIED_STATES: Final = ("done", "skipped")


@dataclass(slots=True)
class TaskModel:
    """One task: `waiting`, `running`, `failed`, `done`, `skipped`, `cancelled`, `replaced` or `removed`."""

    task: Task
    root: str
    required: bool
    state: str = "waiting"
    attempts: int = 0
    tries_since_reset: int = 0
    attempt: str | None = None
    due: float = 0.0
    sinks: tuple[str, ...] = ()
    replacements: list[str] = field(default_factory=list)
    output: JsonValue = None
    condition_value: bool | None = None


class RunModel:
    """The tasks of a run, their lineages, and what else a journal says is so.

    Args:
        plan: the plan as the run was opened with it.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.goal = plan.goal
        self.tasks = {task.id: TaskModel(task, task.id, required=not task.optional) for task in plan.tasks}
        self.capacity = dict(plan.resources)
        self.available = {tool.name: tool.available for tool in plan.tools}
        self.holds: dict[str, tuple[str, ...]] = {}
        self.revision = 0
        self.paused = False
        self.aborted = False
        self.ended: journal.RunEnded | None = None

    def __repr__(self) -> str:
        return f"<RunModel revision={self.revision} tasks={len(self.tasks)}>"

    # Reading

    def is_satisfied(self, task_id: str) -> bool:
        model = self.tasks[task_id]
        return model.state in SATISFIED_STATES or (
            model.state == "replaced" and all(map(self.is_satisfied, model.sinks))
        )

    def unmet_dependencies(self, task_id: str) -> list[str]:
        return [dep for dep in self.tasks[task_id].task.depends_on if not self.is_satisfied(dep)]

    def result(self, task_id: str) -> JsonValue:
        model = self.tasks[task_id]
        if model.state != "replaced":
            return model.output if model.state == "done" else None
        if len(model.sinks) == 1:
            return self.result(model.sinks[0])
        return {sink: self.result(sink) for sink in model.sinks}

    def demand(self, task_id: str) -> Mapping[str, float]:
        task = self.tasks[task_id].task
        tool = self.plan.tool(task.tool)
        return {**(tool.resources if tool else {}), **task.resources}

    def running(self) -> list[str]:
        return [task_id for task_id, model in self.tasks.items() if model.state == "running"]

    def unsatisfied(self) -> list[str]:
        return [
            task_id
            for task_id, model in self.tasks.items()
            if model.required and model.root == task_id and model.state != "removed" and not self.is_satisfied(task_id)
        ]

    def open_questions(self, task_id: str) -> list[str]:
        return [question for question, holds in self.holds.items() if task_id in holds]

    # Following the journal

    def apply(self, record: journal.Record) -> None:
        handler = _HANDLERS.get(type(record.body))
        if handler is not None:
            handler(self, record.body, record.at)

    def _on_attempt_started(self, body: journal.AttemptStarted, at: float) -> None:
        model = self.tasks[body.task]
        model.state, model.attempt = "running", body.attempt
        model.attempts += 1
        model.tries_since_reset += 1

    def _on_attempt_succeeded(self, body: journal.AttemptSucceeded, at: float) -> None:
        model = self.tasks[body.task]
        model.state, model.attempt, model.output = "done", None, body.output

    def _on_attempt_failed(
        self, body: journal.AttemptFailed | journal.AttemptTimedOut | journal.AttemptInterrupted, at: float
    ) -> None:
        model = self.tasks[body.task]
        model.attempt = None
        model.state = "failed" if body.retry_at is None else "waiting"
        model.due = body.retry_at or 0.0
        if isinstance(body, journal.AttemptFailed) and body.exhausted:
            model.tries_since_reset = 0
        elif isinstance(body, journal.AttemptInterrupted):
            model.tries_since_reset -= 1  # it has not failed

    def _on_condition_evaluated(self, body: journal.ConditionEvaluated, at: float) -> None:
        model = self.tasks[body.task]
        model.condition_value = body.value
        if not body.value:
            model.state = "failed" if body.value is None else "skipped"

    def _on_resource_updated(self, body: journal.ResourceUpdated, at: float) -> None:
        if body.available is not None:
            self.available[body.name] = body.available
        if body.capacity is not None:
            self.capacity[body.name] = body.capacity

    def _on_goal_changed(self, body: journal.GoalChanged, at: float) -> None:
        self.goal = body.goal

    def _on_decided(self, body: journal.DecisionMade, at: float) -> None:
        for task_id in body.blocks:
            self.tasks[task_id].state = "failed"

    def _on_question_asked(self, body: journal.QuestionAsked, at: float) -> None:
        self.holds[body.question] = body.holds

    def _on_question_answered(self, body: journal.QuestionAnswered, at: float) -> None:
        self.holds.pop(body.question, None)

    def _on_run_paused(self, body: journal.RunPaused, at: float) -> None:
        self.paused = True

    def _on_run_resumed(self, body: journal.RunResumed, at: float) -> None:
        self.paused, self.ended = False, None

    def _on_run_ended(self, body: journal.RunEnded, at: float) -> None:
        self.ended = body
        for task_id in body.cancelled:
            self.tasks[task_id].state = "cancelled"

    def _on_revised(self, body: journal.PlanRevised, at: float) -> None:
        self.revision = body.number
        for change in body.changes:
            self._change(change, at)

    # Changes

    def _change(self, change: PlanChange, at: float) -> None:
        if change.kind == "add":
            self.tasks[change.task.id] = TaskModel(change.task, change.task.id, required=not change.task.optional)
            for waiting in change.before:
                task = self.tasks[waiting].task
                self._edit(waiting, task.model_copy(update={"depends_on": (*task.depends_on, change.task.id)}))
        elif change.kind == "replace":
            self._replace(change)
        elif change.kind == "modify":
            document = self.tasks[change.task_id].task.model_dump(exclude_unset=True)
            self._edit(change.task_id, Task.model_validate({**document, **change.fields}))
        elif change.kind == "retry":
            self._retry(change, at)
        elif change.kind == "abort":
            self.aborted = True
        elif change.kind != "reorder":
            model = self.tasks[change.task_id]
            model.state = {"remove": "removed", "skip": "skipped", "cancel": "cancelled"}[change.kind]
            model.attempt = None

    def _edit(self, task_id: str, task: Task) -> None:
        model = self.tasks[task_id]
        model.task = task
        model.required = model.root == task_id and not task.optional

    def _replace(self, change: ReplaceTask) -> None:
        original = self.tasks[change.task_id]
        new = {task.id for task in change.tasks}
        for task in change.tasks:
            inherited = [dep for dep in original.task.depends_on if dep not in task.depends_on]
            depends_on = (*(inherited if new.isdisjoint(task.depends_on) else ()), *task.depends_on)
            part = task.model_copy(update={"depends_on": depends_on})
            self.tasks[task.id] = TaskModel(part, original.root, required=False)
        needed = {dep for task in change.tasks for dep in task.depends_on}
        original.state = "replaced"
        original.replacements += [task.id for task in change.tasks]
        original.sinks = tuple(task.id for task in change.tasks if task.id not in needed)

    def _retry(self, change: RetryTask, at: float) -> None:
        model = self.tasks[change.task_id]
        if model.state == "replaced":
            for part in self._all_replacements(change.task_id):
                self.tasks[part].state = "removed"
        model.state, model.tries_since_reset, model.condition_value = "waiting", 0, None
        model.due = at + change.delay if change.delay else 0.0
        model.sinks, model.replacements = (), []

    def _all_replacements(self, task_id: str) -> Iterator[str]:
        for part in self.tasks[task_id].replacements:
            yield part
            yield from self._all_replacements(part)


_RecordHandler = Callable[[RunModel, Any, float], None]

_HANDLERS: Final[dict[type[journal.RecordBody], _RecordHandler]] = {
    journal.AttemptStarted: RunModel._on_attempt_started,
    journal.AttemptSucceeded: RunModel._on_attempt_succeeded,
    journal.AttemptFailed: RunModel._on_attempt_failed,
    journal.AttemptTimedOut: RunModel._on_attempt_failed,
    journal.AttemptInterrupted: RunModel._on_attempt_failed,
    journal.ConditionEvaluated: RunModel._on_condition_evaluated,
    journal.ResourceUpdated: RunModel._on_resource_updated,
    journal.GoalChanged: RunModel._on_goal_changed,
    journal.DecisionMade: RunModel._on_decided,
    journal.QuestionAsked: RunModel._on_question_asked,
    journal.QuestionAnswered: RunModel._on_question_answered,
    journal.RunPaused: RunModel._on_run_paused,
    journal.RunResumed: RunModel._on_run_resumed,
    journal.PlanRevised: RunModel._on_revised,
    journal.RunEnded: RunModel._on_run_ended,
}


def changed_tasks(changes: Sequence[PlanChange]) -> list[tuple[str, PlanChange]]:
    """The tasks that changes are about, each with the change, in order; new tasks left out."""
    found: list[tuple[str, PlanChange]] = []
    for change in changes:
        if change.kind == "add":
            found += [(task_id, change) for task_id in change.before]
        elif change.kind not in ("abort", "reorder"):
            found.append((change.task_id, change))
    return found
