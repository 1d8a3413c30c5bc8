"""Corrected plans, and tasks that run again: changes that a person makes to a running plan.

A plan file is compared with the plan that the run was given last, so every difference is a change
by the person. Later changes by replans and edits stay, unless the person changed the same task.
Tasks correspond by their ids; a change of a replaced task applies to its replacement. The result is
an ordinary edit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from replanning.changes import (
    AddTask,
    CancelTask,
    ModifyTask,
    PlanChange,
    RemoveTask,
    ReplaceTask,
    RetryTask,
    SkipTask,
)
from replanning.errors import ChangeRejected, ExpressionError, Problem
from replanning.live.draft import Draft
from replanning.live.entries import LEFT_OUT, SKIPPED_BY_CONDITION, TaskEntry
from replanning.live.plan import LivePlan, unknown_task
from replanning.live.stale import outdated_by
from replanning.live.states import SATISFIED, STUCK, WAITING, TaskState
from replanning.live.view import PlanView
from replanning.plan.checks import parameters_of_work
from replanning.plan.document import Plan
from replanning.plan.json_values import is_redacted
from replanning.plan.messages import join_names
from replanning.plan.parameters import (
    Parameter,
    Parameters,
    current_values,
    missing_values,
    with_values_of,
)
from replanning.plan.tasks import (
    CALL_FIELDS,
    StrictModel,
    Task,
    ToolSpec,
    effect_of,
    is_repeatable,
)
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.secrets import MASK, Redactor

Rerun = Literal["changed", "none"]
"""Choice for finished tasks that a corrected plan changes: run them again, or keep them."""

_WORK_FIELDS: Final = {"tool", "arguments", "when", "depends_on", "acceptance", "expect"}
"""Fields of a task that its result depends on."""

_PROSE_FIELDS: Final = {*_WORK_FIELDS, "name", "goal", "metadata"}
"""Fields that the result of a task without a tool may depend on: its work may use any of them."""

_START_FIELDS: Final = {"when", "run_if", "depends_on"}
"""Fields of a task that decide whether it runs at all."""

_ANNOTATIONS: Final = ("name", "goal", "metadata", "undo_on_replace")
"""Fields that can change in a finished task."""

DONE_REASON: Final = "a person says that it is done"
"""Reason for skipping a task that took effect or was done by hand."""

_TOOL_DECLARATIONS: Final = ("effect", "idempotent", "retry", "undo", "undo_on_replace", "confirm")
"""Fields of a task that are lost when its tool changes, unless they are stated again."""

_FIXED_PARTS: Final = ("mcp", "facts", "objects")
"""Parts of a plan that cannot change while it runs."""

_UNFINISHED: Final = WAITING | STUCK
"""States of tasks that are neither running nor finished."""

_MAX_KEYS_IN_REASON: Final = 5
_MAX_NAMED_TASKS: Final = 5

_IDENTITY_FIELDS: Final = ("id", "name")
"""Fields that identify a plan."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Changes that a corrected plan, or a request to run or try tasks again, makes to a run.

    Attributes:
        plan: the plan that the run adopts, including the tools that the run has found by itself.
        changes: the changes of tasks, in order.
        parts: the other parts of the plan that change: `tool NAME`, `context.KEY`,
            `parameters.NAME`, `resource NAME`, `goal`.
        again: the tasks that would be run again, with the reasons: finished and running tasks,
            tasks that a condition left out while others went on without them, and failed tasks that
            may have taken effect.
        effects: the tasks of `again` that have begun and whose repetition is a second effect, with
            their declared effect: `reversible`, `partly`, `irreversible`, or empty.
        diff: the effect in readable lines, as in alternatives; empty without one.
    """

    plan: Plan
    changes: tuple[PlanChange, ...]
    parts: tuple[str, ...]
    again: Mapping[TaskId, str]
    effects: Mapping[TaskId, str]
    diff: str

    def __bool__(self) -> bool:
        return bool(self.diff)


def unstated_reruns(correction: Correction) -> list[Problem]:
    """Return a problem for each task that is run again only if the caller states `rerun`."""
    problems: list[Problem] = []
    for task_id, why in correction.again.items():
        message = (
            f"task {task_id!r} would be run again, because {why}: "
            "state `rerun`, as `changed` to run such tasks again"
            " or as `none` to keep them"
        )
        problems.append(Problem("", message))
    return problems


def correct_plan(
    live: LivePlan,
    given: Plan,
    redactor: Redactor,
    *,
    rerun: Rerun = "changed",
    undecided: Collection[TaskId] = (),
) -> Correction:
    """Compare a corrected plan with a running one.

    Args:
        live: the running plan.
        given: the corrected plan; masks stand for the values that the running plan has there.
        redactor: masks secrets, which no journal and no message may contain.
        rerun: whether finished tasks run again, with all tasks that used their results, if they or
            context values that they read have changed.
        undecided: tasks that an open replan or question is about. Those that failed and are not
            changed are left to it; other failed tasks are tried again.

    Raises:
        ChangeRejected: it is not a version of the running plan, or a change is impossible; with
            every problem.
    """
    comparison = _Comparison(live, given, redactor)
    problems = comparison.problems()
    if problems:
        raise ChangeRejected(problems)
    edit = _Edit(live, comparison.adopted)
    corrections = _TaskCorrections(edit, live, comparison)
    corrections.collect()
    if rerun == "changed":
        edit.run_again(corrections.again, corrections.corrected)
    if edit.changes or comparison.lines:
        for entry in list(map(live.entry, live.stuck)):
            if entry.id not in undecided and not live.in_doubt(entry):
                edit.revive(entry)
    return edit.correction(comparison.lines)


def rerun_tasks(live: LivePlan, tasks: Collection[str], *, only: bool = False) -> Correction:
    """Return the changes that run tasks again, with all tasks that depend on them.

    Args:
        live: the plan of a finished run.
        tasks: the tasks, by the id of any task of their lineage.
        only: leave the tasks that depend on them as they are.

    Raises:
        ChangeRejected: a task has not run yet, or cannot be run again; with every problem.
        UnknownTask: no task ever had this id.
    """
    edit = _Edit(live, live.plan)
    requested: dict[TaskId, str] = {}
    for name in dict.fromkeys(tasks):
        if name not in live:
            raise unknown_task(name, live)
        entry = live.entries[live.entry(TaskId(name)).root]
        parts = [leaf for leaf in live.leaves(entry) if not leaf.removed]
        if all(leaf.state in WAITING for leaf in parts):
            edit.reject(f"task {name!r} has not run yet: resume the run to run it")
        for leaf in parts:
            requested[leaf.id] = "it was requested"
    edit.run_again(requested, {}, only=only)
    return edit.correction([])


def retry_failed(
    live: LivePlan,
    *,
    undecided: Collection[TaskId] = (),
    not_done: Collection[str] = (),
    done: Collection[str] = (),
) -> Correction:
    """Return the changes that try all failed tasks again, once a person has removed the cause.

    `again` of the result has the tasks that the person must still decide about: it is unknown
    whether they took effect, and a second effect could do harm.

    Args:
        live: the plan.
        undecided: tasks that an open replan or question is about; they are left to it.
        not_done: failed tasks that did not take effect, as the person knows.
        done: failed tasks that are skipped instead: they took effect, or the person has done them.

    Raises:
        ChangeRejected: a named task has not failed, or a question about it is open; with every
            problem.
        UnknownTask: no task ever had a named id.
    """
    edit = _Edit(live, live.plan)
    looked_at = {entry.id for entry in _named_failures(live, not_done, undecided, edit)}
    for entry in _named_failures(live, done, undecided, edit):
        edit.give_up(SkipTask(task_id=entry.id, reason=DONE_REASON, done=True))
    for entry in list(map(live.entry, live.stuck)):
        if entry.id in undecided or entry.id in edit.settled:
            continue
        if entry.id not in looked_at and not _is_safe_to_retry(entry, live):
            edit.again[entry.id] = live.unknown_effects(entry)
        edit.revive(entry)
    return edit.correction([])


def _named_failures(
    live: LivePlan, names: Collection[str], undecided: Collection[TaskId], edit: _Edit
) -> list[TaskEntry]:
    """Return the failed current tasks of named ones; a name without one is a problem of the edit.

    Raises:
        UnknownTask: no task ever had this id.
    """
    found: list[TaskEntry] = []
    for name in dict.fromkeys(names):
        if name not in live:
            raise unknown_task(name, live)
        has_failed = False
        for entry in live.leaves(live.entry(TaskId(name))):
            if entry.state not in STUCK:
                continue
            has_failed = True
            found.append(entry)
            if entry.id in undecided:
                edit.reject(f"task {entry.id!r} is still being decided: answer the question first")
        if not has_failed:
            edit.reject(f"task {name!r} has not failed")
    return found


def _is_safe_to_retry(entry: TaskEntry, live: LivePlan) -> bool:
    """Return whether trying a task again does no harm, whatever its lineage has done before."""
    for part in live.in_doubt(entry):
        # A substitute for another call has its own effect.
        if part is not entry or not is_repeatable(part.task, live.tool_of(part.task)):
            return False
    return True


def retry_reason(correction: Correction) -> str:
    """Return the reason of a revision that tries failed tasks again, as the history shows it."""
    again: list[str] = []
    done: list[str] = []
    for change in correction.changes:
        if isinstance(change, SkipTask):
            done.append(repr(change.task_id))
        else:
            assert isinstance(change, RetryTask), "failed tasks are tried again or skipped"
            again.append(repr(change.task_id))
    parts: list[str] = []
    if again:
        parts.append(f"try {join_names(again, _MAX_NAMED_TASKS)} again")
    if done:
        parts.append(f"continue as if {join_names(done, _MAX_NAMED_TASKS)} had succeeded")
    return "; ".join(parts)


def unstated_retries(correction: Correction) -> list[Problem]:
    """Return a problem for each failed task that is tried again only if the caller decides so."""
    problems: list[Problem] = []
    for task_id, unknown in correction.again.items():
        message = (
            f"task {task_id!r}: {unknown}; look first, and name it under `not_done` to have it"
            " tried again, or under `done` to continue without it"
        )
        problems.append(Problem("", message))
    return problems


def restore_plan(masked: Plan, true: Plan, redactor: Redactor, clean: Plan | None = None) -> Plan:
    """Return a plan with true values in place of masks, where another plan has them.

    A part that is the masked form of a part of the other plan becomes that part.

    Args:
        masked: the plan with masks.
        true: the other plan.
        redactor: makes the masked forms.
        clean: the masked form of the other plan, if it is at hand.
    """
    if clean is None:
        clean = redactor.document(true)
    parameters = _restored_parameters(masked, true, clean)
    if parameters != masked.parameters:
        masked = masked.model_copy(update={"parameters": parameters})
        clean = clean.model_copy(update={"parameters": true.parameters})
    if masked == clean:
        return true
    if clean is true:
        return masked
    true_tasks = {task.id: task for task in true.tasks}
    tasks: list[Task] = []
    for task in masked.tasks:
        tasks.append(restore_part(task, true_tasks.get(task.id), redactor))
    tools = [restore_part(tool, true.tool(tool.name), redactor) for tool in masked.tools]
    context = dict(masked.context)
    for key, value in true.context.items():
        if key in context and context[key] == clean.context[key]:
            context[key] = value
    servers = masked.mcp
    if servers == clean.mcp:
        servers = true.mcp
    return masked.model_copy(
        update={
            "tasks": tuple(tasks),
            "tools": tuple(tools),
            "context": context,
            "mcp": servers,
        }
    )


def _restored_parameters(masked: Plan, true: Plan, clean: Plan) -> Parameters:
    """Return the parameters of a masked plan with the secret values of the true plan."""
    restored = dict(with_values_of(masked.parameters, true.parameters, secret_only=True))
    for name, parameter in masked.parameters.items():
        if name in true.parameters and parameter == clean.parameters[name]:
            restored[name] = true.parameters[name]
    return restored


PartT = TypeVar("PartT", Task, ToolSpec)


def restore_part(masked: PartT, true: PartT | None, redactor: Redactor) -> PartT:
    """Return a task or a tool with true values in its fields that are masked."""
    if true is None or masked == true:
        return masked
    clean = redactor.document(true)
    if clean is true:
        return masked
    if clean == masked:
        return true
    fields: dict[str, object] = {}
    for name in type(masked).model_fields:
        value = getattr(true, name)
        shown = getattr(clean, name)
        if shown != value and getattr(masked, name) == shown:
            fields[name] = value
    if not fields:
        return masked
    return masked.model_copy(update=fields)


def take_secrets(live: LivePlan, given: Plan, redactor: Redactor) -> None:
    """Restore secrets in a resumed plan from a plan that was passed again."""
    true_tasks = {task.id: task for task in given.tasks}
    tasks: list[Task] = []
    for task_id in live.masked.tasks:
        entry = live.entry(task_id)
        true = true_tasks.get(entry.root)
        if true is not None:
            true = true.model_copy(update={"id": task_id})
        tasks.append(restore_part(entry.task, true, redactor))
    tools: list[ToolSpec] = []
    for name in live.masked.tools:
        tool = live.tools[name]
        true_tool = given.tool(name)
        if true_tool is not None:
            true_tool = true_tool.model_copy(update={"available": tool.available})
        tools.append(restore_part(tool, true_tool, redactor))
    context: JsonObject = {}
    clean = redactor.document(given).context
    for key in live.masked.context:
        if key in clean and clean[key] == live.context[key]:
            context[key] = given.context[key]
    live.plan = restore_plan(live.plan, given, redactor)
    live.complete_masked_parts(given, tasks, tools, context)


def restore_changes(
    changes: Collection[PlanChange], adopted: Plan, live: LivePlan, redactor: Redactor
) -> tuple[PlanChange, ...]:
    """Return the changes of a corrected plan, with its secrets instead of masks."""
    tasks = {task.id: task for task in adopted.tasks}
    restored: list[PlanChange] = []
    for change in changes:
        if isinstance(change, AddTask):
            task = restore_part(change.task, tasks.get(change.task.id), redactor)
            restored.append(change.model_copy(update={"task": task}))
            continue
        if not isinstance(change, ReplaceTask | ModifyTask):
            restored.append(change)
            continue
        true = tasks.get(change.task_id)
        if true is None:
            true = tasks.get(live.entry(change.task_id).root)
        if true is None:
            # A task of a replan, which runs again because it depends on another.
            restored.append(change)
        elif isinstance(change, ModifyTask):
            restored.append(_restore_modification(change, true))
        else:
            (new,) = change.tasks
            true = true.model_copy(update={"id": new.id})
            part = restore_part(new, true, redactor)
            restored.append(change.model_copy(update={"tasks": (part,)}))
    return tuple(restored)


def _restore_modification(change: ModifyTask, true: Task) -> ModifyTask:
    fields = dict(change.fields)
    for name, value in _dumped(true, list(fields)).items():
        if is_redacted(fields[name]):
            fields[name] = value
    return change.model_copy(update={"fields": fields})


class _Comparison:
    """Differences between the plan that a run was given last and a corrected one.

    Attributes:
        adopted: the corrected plan, with true values and with the tools that the run has found.
        lines: the differences apart from tasks, in readable lines.
        changed_calls: the tools whose calls change.
        changed_parameters: the parameters that are removed or have another value.
    """

    def __init__(self, live: LivePlan, given: Plan, redactor: Redactor) -> None:
        self._live = live
        # A message has masks instead of the run's secrets.
        given = restore_plan(given, live.plan, redactor)
        # Values that are not set again stay as they are.
        parameters = with_values_of(given.parameters, live.plan.parameters)
        if parameters is not given.parameters:
            given = given.model_copy(update={"parameters": parameters})
        self._given = given
        self._redactor = redactor
        base = live.plan
        self.tasks_before = {task.id: task for task in base.tasks}
        self.changed_calls: set[str] = set()
        self.changed_parameters = _changed_parameters(base, given)
        self.adopted = given.model_copy(update={"tools": self._tools()})
        self.lines = list(self._part_lines())

    def problems(self) -> list[Problem]:
        """Return the reasons why the run cannot take the plan."""
        base = self._live.plan
        given = self.adopted
        problems: list[Problem] = []
        for name in _IDENTITY_FIELDS:
            before = getattr(base, name)
            now = getattr(self._given, name)
            if now != before:
                message = f"this is another plan: its {name} is {now!r}, not {before!r}"
                problems.append(Problem(name, message))
        known = any(task.id in self._live for task in given.tasks)
        if base.tasks and not known:
            problems.append(Problem("tasks", "this is another plan: it has no task of the run"))
        for name in _FIXED_PARTS:
            if getattr(given, name) != getattr(base, name):
                message = "this part cannot change while the plan runs; start a new run instead"
                problems.append(Problem(name, message))
        if base.budget is not None and given.budget is None:
            message = "the budget of a run cannot be removed; state a larger one"
            problems.append(Problem("budget", message))
        problems += missing_values(given.parameters)
        for place, part in self._maskable_parts():
            if is_redacted(part):
                message = (
                    f"{MASK} stands for a value that is not shown: leave it where it was, or refer"
                    " to the value as {env:NAME}"
                )
                problems.append(Problem(place, message))
        return problems

    def _maskable_parts(self) -> Iterator[tuple[str, JsonValue]]:
        """Yield changed parts of the plan, except tasks, whose masks may have no known secret."""
        for name in self._live.changed_tools(self.adopted):
            tool = self.adopted.tool(name)
            assert tool is not None
            yield f"tools.{name}", tool.model_dump(mode="json")
        for key, value in self._live.changed_context(self.adopted)[0].items():
            yield f"context.{key}", value
        values = current_values(self.adopted.parameters)
        for name in self.changed_parameters:
            if name in values:
                yield f"parameters.{name}", values[name]

    def _tools(self) -> tuple[ToolSpec, ...]:
        """Return the tools that the run has from now on.

        A tool that the file leaves out stays: tasks of replans may use it, and no file contains the
        tools of servers and functions.
        """
        base = self._live.plan
        given = {tool.name: tool for tool in self._given.tools}
        tools: list[ToolSpec] = []
        for before in base.tools:
            tool = given.pop(before.name, before)
            if tool is not before:
                tool = self._true_tool(tool, before)
            tools.append(tool)
        return (*tools, *given.values())

    def _true_tool(self, given: ToolSpec, before: ToolSpec) -> ToolSpec:
        new = given
        if before.kind in (None, "mcp"):
            # The function or the server supplied the parts that the file leaves open.
            stated = {name: getattr(given, name) for name in given.model_fields_set}
            new = before.model_copy(update=stated)
        if new == before:
            return before
        if any(getattr(new, name) != getattr(before, name) for name in CALL_FIELDS):
            self.changed_calls.add(new.name)
        return new

    # Differences for people, apart from tasks

    def _part_lines(self) -> Iterator[str]:
        live = self._live
        base = live.plan
        for name, tool in live.changed_tools(self.adopted).items():
            if name in live.tools:
                yield f"- tool {name}: {self._shown(live.tools[name])}"
            yield f"+ tool {name}: {self._shown(tool)}"
        changes, removed = live.changed_context(self.adopted)
        for key in (*changes, *removed):
            if key in live.context:
                yield f"- context.{key}: {self._text({key: live.context[key]})}"
            if key in changes:
                yield f"+ context.{key}: {self._text({key: changes[key]})}"
        for name in self.changed_parameters:
            if name in base.parameters:
                yield f"- parameters.{name}: {self._value_text(base.parameters[name])}"
            if name in self.adopted.parameters:
                yield f"+ parameters.{name}: {self._value_text(self.adopted.parameters[name])}"
        capacity = live.scheduler.pool.capacity
        for name, amount in live.changed_capacities(self.adopted).items():
            if name in capacity:
                yield f"- resource {name}: {capacity[name]:g}"
            yield f"+ resource {name}: {amount:g}"
        goal = live.goal_after(self.adopted)
        if goal != live.goal:
            yield f"- goal: {self._shown(live.goal)}"
            yield f"+ goal: {self._shown(goal)}"
        budget = self.adopted.budget
        if budget != base.budget:
            if base.budget is not None:
                yield f"- budget: {self._shown(base.budget)}"
            # Its removal is reported as a problem.
            if budget is not None:
                yield f"+ budget: {self._shown(budget)}"
        if self.adopted.on_stale != base.on_stale:
            yield f"- on_stale: {base.on_stale}"
            yield f"+ on_stale: {self.adopted.on_stale}"

    def _shown(self, part: StrictModel) -> str:
        document = part.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        texts: list[str] = []
        for name, value in document.items():
            text = value
            if not isinstance(text, str):
                text = json.dumps(value, ensure_ascii=False)
            texts.append(f"{name}: {text}")
        return self._redactor.text(", ".join(texts))

    def _value_text(self, parameter: Parameter) -> str:
        if parameter.secret:
            return "secret"
        return self._text({"value": parameter.current})

    def _text(self, member: JsonObject) -> str:
        masked = self._redactor.value(member)
        assert isinstance(masked, dict)
        (value,) = masked.values()
        return json.dumps(value, ensure_ascii=False)


def _changed_parameters(before: Plan, after: Plan) -> tuple[str, ...]:
    """Return the parameters whose values differ between two plans.

    Secrets do not count: their purpose stays, and their values cannot be compared after a resume.
    """
    changed: list[str] = []
    for name in dict.fromkeys((*before.parameters, *after.parameters)):
        old = _comparable_value(before.parameters.get(name))
        new = _comparable_value(after.parameters.get(name))
        if old != new:
            changed.append(name)
    return tuple(changed)


def _comparable_value(parameter: Parameter | None) -> tuple[str, JsonValue]:
    """Return a key that compares values of a parameter; a missing parameter equals no value."""
    if parameter is None:
        return "missing", None
    if parameter.secret:
        return "secret", None
    return "shown", parameter.current


class _Edit:
    """Collects the changes of a person's edit.

    Attributes:
        changes: the changes so far.
        again: the finished and running tasks that are run again, with the reasons.
        settled: the tasks that are tried again, removed or skipped, or whose list is expanded
            again.
    """

    def __init__(self, live: LivePlan, adopted: Plan) -> None:
        self.changes: list[PlanChange] = []
        self.again: dict[TaskId, str] = {}
        self.settled: set[TaskId] = set()
        self._live = live
        self._adopted = adopted
        self._problems: list[Problem] = []
        self._taken: set[TaskId] = set()

    def correction(self, lines: list[str]) -> Correction:
        """Return the edit, checked as a whole.

        Raises:
            ChangeRejected: with every problem.
        """
        live = self._live
        draft = Draft(live, self.changes, self._adopted)
        for problem in draft.problems:
            # Its path is that of a change which the person did not write.
            self._problems.append(Problem("", problem.message))
        if self._problems:
            raise ChangeRejected(self._problems)
        effects: dict[TaskId, str] = {}
        for task_id in self.again:
            entry = live.entry(task_id)
            tool = live.tool_of(entry.task)
            # An attempt that is cut off may already have taken effect.
            has_begun = entry.state in (TaskState.DONE, TaskState.RUNNING)
            if (has_begun or entry.log.in_doubt) and not is_repeatable(entry.task, tool):
                effects[task_id] = effect_of(entry.task, tool) or ""
        diff = "\n".join([*draft.diff().splitlines(), *lines])
        # A change of the document alone, such as the order of its tasks, makes no difference to a
        # run.
        parts: dict[str, None] = {}
        for line in lines:
            part, _, _ = line[2:].partition(":")
            parts[part] = None
        return Correction(
            self._adopted, tuple(self.changes), tuple(parts), self.again, effects, diff
        )

    def reject(self, message: str) -> None:
        """Record why the edit cannot be made."""
        self._problems.append(Problem("", message))

    def add(self, change: PlanChange) -> None:
        """Add a change."""
        self.changes.append(change)

    def revive(self, entry: TaskEntry) -> None:
        """Retry a task that has failed, or was cancelled, removed or skipped."""
        if entry.id not in self.settled:
            self.settled.add(entry.id)
            self.add(RetryTask(task_id=entry.id))

    def give_up(self, change: RemoveTask | SkipTask) -> None:
        """Remove or skip a task."""
        self.settled.add(change.task_id)
        self.add(change)

    def modify(self, task_id: TaskId, fields: JsonObject) -> None:
        """Change fields of a task, if there are any."""
        if fields:
            self.add(ModifyTask(task_id=task_id, fields=fields))

    def run_again(
        self, tasks: Mapping[TaskId, str], corrected: Mapping[TaskId, Task], *, only: bool = False
    ) -> None:
        """Run done or running tasks again, and all tasks that used their results.

        Args:
            tasks: the tasks, with the reasons.
            corrected: the new documents of tasks, by their ids; others stay as before.
            only: whether to leave tasks that used their results as they are.
        """
        live = self._live
        reasons = dict(tasks)
        queue = list(tasks)
        passed: set[TaskId] = set()
        # The list grows while it is examined.
        for task_id in queue:
            if only:
                break
            for other_id in live.entry(task_id).dependent_ids():
                other = live.entry(other_id)
                if other_id in reasons or other.state in WAITING:
                    continue
                # Skipped by a person or a decision, it stays so, whatever its dependencies do.
                if other.state is TaskState.SKIPPED:
                    if other.condition_revision == LEFT_OUT:
                        # It comes back automatically; tasks that went on without it run again.
                        if other_id not in passed:
                            passed.add(other_id)
                            queue.append(other_id)
                        continue
                    if not other.condition_not_met:
                        continue
                reasons[other_id] = f"it depends on {live.entry(task_id).root!r}"
                queue.append(other_id)
        for task_id in sorted(reasons, key=lambda task_id: live.entry(task_id).order):
            entry = live.entry(task_id)
            if entry.id in self.settled:
                continue  # an element comes back with its list, if it is still in it
            self._run_task_again(entry, corrected.get(task_id), reasons[task_id])

    def _run_task_again(self, entry: TaskEntry, corrected: Task | None, reason: str) -> None:
        """Run one task again: by a replacement if it has run, else by a retry."""
        state = entry.state
        if entry.replacement.expanded:
            self._expand_again(entry, corrected, reason)
            return
        if entry.removed or state is TaskState.REPLACED_BY_REPLAN:
            return
        if state in STUCK or state is TaskState.CANCELLED:
            if entry.log.in_doubt:
                self.again[entry.id] = reason
            self.revive(entry)
            return
        if state in WAITING:
            return
        self.again[entry.id] = reason
        if state is TaskState.RUNNING:
            self.again[entry.id] = f"{reason}, and its running work is cut off"
            self.add(CancelTask(task_id=entry.id, reason="it runs again, as corrected"))
        new_id = PlanView(self._live).unused_id(entry.root, self._taken)
        self._taken.add(new_id)
        task = corrected or entry.task
        new = task.model_copy(update={"id": new_id})
        self.add(ReplaceTask(task_id=entry.id, tasks=(new,)))

    def _expand_again(self, template: TaskEntry, corrected: Task | None, reason: str) -> None:
        """Expand a list again; unchanged elements that are done are kept."""
        self.again[template.id] = reason
        for part in self._live.parts_of(template):
            self.settled.add(part.id)
            if part.state is TaskState.RUNNING:
                self.again[template.id] = f"{reason}, and its running work is cut off"
                self.add(CancelTask(task_id=part.id, reason="its list is expanded again"))
        self.add(RetryTask(task_id=template.id))
        if corrected is not None:
            self.modify(template.id, _changed_fields(template.task, corrected))


class _TaskCorrections:
    """Collects the changes of tasks that a corrected plan requires.

    Attributes:
        again: the tasks that are run again if the person agrees, with the reasons.
        corrected: the new documents of tasks that had begun before the person changed them.
    """

    def __init__(self, edit: _Edit, live: LivePlan, comparison: _Comparison) -> None:
        self.again: dict[TaskId, str] = {}
        self.corrected: dict[TaskId, Task] = {}
        self._edit = edit
        self._live = live
        self._draft = Draft(live)
        self._changed_calls = comparison.changed_calls
        self._on_stale = comparison.adopted.on_stale
        changes, removed = live.changed_context(comparison.adopted)
        self._context = {**live.context, **changes}
        for key in removed:
            del self._context[key]
        self._outdated = outdated_by(live, changes, removed)
        self._changed_parameters = frozenset(comparison.changed_parameters)
        self._parameters = current_values(comparison.adopted.parameters)
        self._before = comparison.tasks_before
        self._tasks = comparison.adopted.tasks

    def collect(self) -> None:
        """Add the changes to the edit. The cases are a task that is

        1. new: it is added;
        2. unchanged: it stays;
        3. changed: see `_correct`;
        4. missing: it is removed, unless it has begun.

        Then come the unchanged tasks that used a tool or a value which has changed.
        """  # noqa: D415 # a list follows
        given_roots: set[TaskId] = set()
        for stated in self._tasks:
            entry = self._live.entries.get(stated.id)
            if entry is None:
                self._edit.add(AddTask(task=stated))
                continue
            given_roots.add(entry.root)
            base = self._before.get(stated.id, entry.task)
            task = self._with_known_dependencies(stated, base)
            # An earlier correction may have removed it; then it must come back, even unchanged.
            comes_back = entry.removed and task.id not in self._before
            # If a replan or an edit has made the same change already, nothing is left to change.
            if comes_back or task not in (base, entry.task):
                self._correct(entry, task, _changed_fields(base, task))
        taken_out: set[TaskId] = set()
        for task_id in self._before:
            entry = self._live.entry(task_id)
            if entry.root not in given_roots:
                taken_out.add(entry.root)
                self._take_out(entry)
        for entry in self._live:
            if entry.removed or entry.replacement.tasks:
                continue
            if entry.root not in taken_out:
                self._use_changed_parts(entry)

    def _with_known_dependencies(self, task: Task, base: Task) -> Task:
        """Return a task with the earlier ids of its dependencies, if their current tasks are equal.

        A file that was written from the run has the ids of replacements.
        """
        if task.depends_on == base.depends_on:
            return task
        if self._current(task.depends_on) != self._current(base.depends_on):
            return task
        return task.model_copy(update={"depends_on": base.depends_on})

    def _current(self, task_ids: Collection[TaskId]) -> dict[TaskId, None]:
        """Return the current tasks for some ids."""
        current: dict[TaskId, None] = {}
        for task_id in task_ids:
            if task_id in self._live:
                current |= dict.fromkeys(self._draft.follow_replacements([task_id]))
            else:
                current[task_id] = None
        return current

    def _use_changed_parts(self, entry: TaskEntry) -> None:
        """Run a task again if its tool, a parameter or the context it has read has changed."""
        if entry.id in self._edit.settled:
            return
        parameters: list[str] = []
        if self._changed_parameters:
            used = parameters_of_work(entry.task, self._live.tool_of(entry.task))
            parameters = [name for name in used if name in self._changed_parameters]
        keys = self._outdated.get(entry.id, [])
        policy = entry.task.on_stale or self._on_stale
        if policy == "ignore":
            keys = []
        if entry.state is TaskState.SKIPPED:
            # Its condition read a value that has changed, and now has the opposite outcome, unless
            # the condition is corrected as well.
            is_concerned = bool(keys or parameters)
            if is_concerned and self._would_run(entry, self.corrected.get(entry.id, entry.task)):
                self._bring_back(entry)
            return
        if entry.task.tool in self._changed_calls:
            why = f"its tool {entry.task.tool!r} was changed"
        elif parameters:
            names = join_names([f"parameters.{name}" for name in parameters], _MAX_KEYS_IN_REASON)
            why = f"it depends on changed values: {names}"
        elif keys:
            names = join_names([f"context.{key}" for key in keys], _MAX_KEYS_IN_REASON)
            why = f"it has read values that changed: {names}"
        else:
            return
        if entry.state in (TaskState.DONE, TaskState.RUNNING):
            self.again.setdefault(entry.id, why)
        elif entry.state in STUCK:
            self._try_again(entry, why)

    def _correct(self, entry: TaskEntry, task: Task, changed: JsonObject) -> None:
        """Apply a person's change of a task. The cases are its current states:

        1. replaced by several tasks: these must be changed instead;
        2. waiting: its fields change;
        3. failed, cancelled or removed: its fields change, and it is tried again;
        4. left out by a condition: its fields change, and it comes back if it would run now;
        5. finished or running: it is run again in its new form, if its result depends on the
           change; else only its annotations change.
        """  # noqa: D415 # a list follows
        if entry.replacement.expanded:
            self.corrected[entry.id] = task
            self.again[entry.id] = "it was changed"
            return
        if entry.state is TaskState.REPLACED_BY_REPLAN:
            replacement = self._single_replacement(entry)
            if replacement is None:
                return
            entry = replacement
            changed = _changed_fields(entry.task, task)
        if "tool" in changed:
            changed |= _dumped(task, _TOOL_DECLARATIONS)
        state = entry.state
        if state in WAITING:
            self._edit.modify(entry.id, changed)
            return
        if state in STUCK:
            self._try_again(entry, "it was changed")
            self._edit.modify(entry.id, changed)
            return
        if state is TaskState.CANCELLED:
            self._edit.revive(entry)
            self._edit.modify(entry.id, changed)
            return

        self.corrected[entry.id] = task
        if entry.condition_revision in SKIPPED_BY_CONDITION:
            if self._would_run(entry, task) and not _START_FIELDS.isdisjoint(changed):
                self._bring_back(entry)
            if entry.id not in self.again:
                self._edit.modify(entry.id, changed)
            return
        decisive = _WORK_FIELDS
        if task.tool is None and entry.task.tool is None:
            decisive = _PROSE_FIELDS
        if not decisive.isdisjoint(changed):
            self.again[entry.id] = "it was changed"
        elif state in SATISFIED:
            annotations = [name for name in _ANNOTATIONS if name in changed]
            self._edit.modify(entry.id, {name: changed[name] for name in annotations})

    def _try_again(self, entry: TaskEntry, why: str) -> None:
        """Try a failed task again; the person is asked if that may repeat its effect."""
        unknown = self._live.unknown_effects(entry)
        if unknown:
            self.again.setdefault(entry.id, f"{why}, and {unknown}")
        else:
            self._edit.revive(entry)

    def _would_run(self, entry: TaskEntry, task: Task) -> bool:
        """Return whether a task that a condition has left out would run, or wait, in this form."""
        needed: list[TaskEntry] = []
        for dep in task.depends_on:
            if dep not in self._live:
                return True
            needed.append(self._live.entry(dep))
        if entry.condition_revision == LEFT_OUT:
            if task.run_if == "always" or not needed:
                return True
            return not all(each.left_out for each in needed)
        if task.when is None:
            return True
        # Its condition is evaluated once its dependencies are done.
        if not all(each.satisfied for each in needed):
            return True
        try:
            return self._live.evaluate(task.when, task, self._context, self._parameters)
        except ExpressionError:
            return False

    def _bring_back(self, entry: TaskEntry) -> None:
        """Run a task that its condition left out, and evaluate the tasks behind it again.

        It has never run, so nothing is repeated, unless tasks went on without it. These would have
        to run again, so the person is asked.
        """
        live = self._live
        found = {entry.id: entry}
        stack = [entry]
        while stack:
            skipped = stack.pop()
            if live.has_gone_on_without(skipped):
                self.again[entry.id] = "it was left out, and would run now"
                return
            for other in (skipped, *live.left_out_with(skipped)):
                for task_id in other.dependent_ids():
                    dependent = live.entries[task_id]
                    if dependent.condition_not_met and task_id not in found:
                        found[task_id] = dependent
                        stack.append(dependent)
        for skipped in found.values():
            self._edit.revive(skipped)

    def _single_replacement(self, entry: TaskEntry) -> TaskEntry | None:
        """Return the single current task of a replaced one; None, with a problem, if several exist.

        Other unfinished tasks of the replacement are skipped.
        """
        parts = [part for part in self._live.leaves(entry) if not part.removed]
        sinks = list(self._current([entry.id]))
        if len(sinks) > 1:
            names = join_names([repr(part.id) for part in parts], 5)
            self._edit.reject(
                f"task {entry.id!r} was replaced by several tasks: change these instead: {names}"
            )
            return None
        for part in parts:
            if part.state in _UNFINISHED and part.id not in sinks:
                self._edit.give_up(SkipTask(task_id=part.id, reason=f"{entry.id!r} was corrected"))
        return self._live.entry(sinks[0])

    def _take_out(self, entry: TaskEntry) -> None:
        """Remove a task that the plan leaves out, unless it is running or finished."""
        for part in self._live.leaves(entry):
            if part.removed or part.state is TaskState.RUNNING or part.state in SATISFIED:
                continue
            if part is not entry:
                reason = "the corrected plan leaves it out"
                self._edit.give_up(SkipTask(task_id=part.id, reason=reason))
                continue
            if part.state is TaskState.CANCELLED:
                self._edit.revive(part)
            self._edit.give_up(RemoveTask(task_id=part.id))


def _changed_fields(before: Task, after: Task) -> JsonObject:
    """Return the fields that differ, as a file names them, with their new values."""
    names: list[str] = []
    for name, field in Task.model_fields.items():
        if name != "id" and getattr(before, name) != getattr(after, name):
            names.append(field.alias or name)
    return _dumped(after, names)


def _dumped(task: Task, names: Collection[str]) -> JsonObject:
    """Return fields of a task as JSON, named and written as in a file."""
    if not names:
        return {}
    stated = task.model_dump(mode="json", exclude_unset=True)
    everything = task.model_dump(mode="json")
    return {name: stated.get(name, everything[name]) for name in names}
