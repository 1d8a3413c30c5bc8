"""Included plans: their tasks replace the task that includes them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import JsonValue

from replanning.errors import ExpressionError
from replanning.plan.conditions import OUTPUT_ROOTS, Condition
from replanning.plan.json_values import map_strings
from replanning.plan.messages import did_you_mean
from replanning.plan.parameters import Parameter, ParameterName
from replanning.plan.references import (
    has_references,
    rename_references,
    rename_results,
    resolve_references,
)
from replanning.plan.tasks import (
    Confirmation,
    Expectation,
    Fallback,
    StrictModel,
    SubPlan,
    Task,
    TaskBody,
)
from replanning.plan.types import JsonObject, TaskId

NewIds = Mapping[TaskId, TaskId]
"""Ids of tasks in a run, by their ids in the included plan file."""


def included_ids(task: Task, taken: Container[TaskId]) -> NewIds:
    """Return unused ids for the tasks of an included plan, such as `notes/read`.

    When the plan is executed a second time they end in `~2`, and so on.

    Args:
        task: the task that includes the plan.
        taken: all ids used so far.

    Raises:
        ExpressionError: the file of the included plan was not read.
    """
    suffix = ""
    number = 1
    while True:
        ids = {}
        for part in included_plan(task).tasks:
            ids[part.id] = TaskId(f"{task.id}/{part.id}{suffix}")
        if not any(new_id in taken for new_id in ids.values()):
            return ids
        number += 1
        suffix = f"~{number}"


def included_plan(task: Task) -> SubPlan:
    """Return the plan that a task includes.

    Raises:
        ExpressionError: its file was not read.
    """
    if isinstance(task.include, SubPlan):
        return task.include
    raise ExpressionError(
        f"the plan {task.include!r} was not read: load the plan that includes it from a file"
    )


def used_tools(tasks: Iterable[Task]) -> set[str | None]:
    """Return the tools of tasks and of their included plans; None for tasks without one."""
    used: set[str | None] = set()
    for task in tasks:
        if isinstance(task.include, SubPlan):
            used |= used_tools(task.include.tasks)
        else:
            used.add(task.tool)
    return used


class _Declared(StrictModel):
    """Parameters as an included plan declares them."""

    parameters: Mapping[ParameterName, Parameter]


def declared_parameters(included: SubPlan) -> dict[str, Parameter]:
    """Return the parameters of an included plan.

    Raises:
        PlanError: declarations are invalid; lists every one.
    """
    return dict(_Declared.model_validate({"parameters": included.parameters}).parameters)


def with_problems(
    parameters: Mapping[str, Parameter], stated: Mapping[str, JsonValue]
) -> list[str]:
    """Return the problems of the values that a task passes to an included plan.

    Values with references are checked when those are resolved.
    """
    problems: list[str] = []
    for name, value in stated.items():
        parameter = parameters.get(name)
        if parameter is None:
            text = f"the included plan has no parameter {name!r}"
            hint = did_you_mean(name, parameters)
            if hint:
                text += f"; {hint}"
            problems.append(text)
        elif not has_references(value):
            problem = parameter.value_problem(value)
            if problem:
                problems.append(f"parameter {name!r} of the included plan: {problem}")
    for name, parameter in parameters.items():
        if name not in stated and parameter.default is None:
            problems.append(f"parameter {name!r} of the included plan has no value")
    return problems


def included_values(task: Task, stated: Mapping[str, JsonValue]) -> JsonObject:
    """Return the values of the parameters of the plan that a task includes.

    Args:
        task: the task.
        stated: the values that it passes, with references resolved.

    Raises:
        ExpressionError: values have the wrong type; lists every one.
    """
    problems: list[str] = []
    values: JsonObject = {}
    for name, parameter in declared_parameters(included_plan(task)).items():
        values[name] = stated.get(name, parameter.default)
        if name in stated:
            problem = parameter.value_problem(stated[name])
            if problem:
                problems.append(f"parameter {name!r} of the included plan: {problem}")
    if problems:
        raise ExpressionError("; ".join(problems))
    return values


def included_tasks(
    task: Task, ids: NewIds, values: JsonObject, limits: Mapping[str, float]
) -> list[Task]:
    """Return the tasks of an included plan with their ids in the run, in order.

    They refer to one another by these ids, and to the values as their parameters. Tasks that depend
    on none of the others get the dependencies of the including task.

    Args:
        task: the task that includes the plan.
        ids: the ids in the run.
        values: the values of the parameters of the included plan.
        limits: the amounts of `max_parallel` resources that the including task takes.

    Raises:
        ExpressionError: the file of the included plan was not read.
    """
    scope: JsonObject = {"parameters": values}
    tasks: list[Task] = []
    for part in included_plan(task).tasks:
        fields = renamed_fields(part, ids)
        depends_on = [ids.get(needed, needed) for needed in part.depends_on]
        if not depends_on:
            depends_on = list(task.depends_on)
            fields["run_if"] = part.run_if or task.run_if
        if task.optional:
            fields["optional"] = True
        fields["id"] = ids[part.id]
        fields["depends_on"] = tuple(depends_on)
        fields["priority"] = part.priority + task.priority
        fields["resources"] = {**part.resources, **limits}
        fields["scope"] = scope
        tasks.append(part.model_copy(update=fields))
    return tasks


def included_output(
    task: Task, outputs: Mapping[TaskId, Any], last: Sequence[TaskId]
) -> JsonValue | Any:
    """Return the output of a task that includes a plan.

    Args:
        task: the task.
        outputs: the outputs of the tasks of the plan, by their ids in its file.
        last: the tasks without dependents.

    Raises:
        ExpressionError: `outputs` refers to a part that the output of a task lacks.
    """
    if task.outputs is not None:
        return resolve_references(task.outputs, context={}, result_of=outputs.__getitem__)
    if len(last) == 1:
        return outputs[last[0]]
    return {name: outputs[name] for name in last}


def last_tasks(parts: Sequence[Task]) -> list[TaskId]:
    """Return the tasks without dependents, in order."""
    needed: set[TaskId] = set()
    for part in parts:
        needed.update(part.depends_on)
    return [part.id for part in parts if part.id not in needed]


# Renaming


def renamed_fields(task: Task, ids: NewIds) -> dict[str, Any]:
    """Return the fields of a task that refer to other tasks, with the new ids."""
    fields = _renamed_body(task, ids)
    for name in ("for_each", "with_"):
        value = getattr(task, name)
        if has_references(value):
            fields[name] = _renamed_value(value, ids)
    return fields


def _renamed_value(value: JsonValue, ids: NewIds) -> JsonValue:
    renamed = rename_references({"value": value}, partial(_new_id, ids), ids)
    return renamed["value"]


def _new_id(ids: NewIds, task_id: TaskId) -> TaskId:
    return ids.get(task_id, task_id)


def _renamed_body(body: TaskBody, ids: NewIds) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if has_references(body.arguments):
        fields["arguments"] = rename_references(body.arguments, partial(_new_id, ids), ids)
    if body.when is not None:
        fields["when"] = Condition.parse(body.when).renamed(ids)
    if body.expect is not None:
        fields["expect"] = _renamed_expectation(body.expect, ids)
    if body.confirm is not None:
        fields["confirm"] = _renamed_confirmation(body.confirm, ids)
    if body.undo is not None:
        fields["undo"] = _renamed_fallback(body.undo, ids)
    if body.fallbacks:
        fields["fallbacks"] = tuple([_renamed_fallback(each, ids) for each in body.fallbacks])
    return fields


def _renamed_fallback(fallback: Fallback, ids: NewIds) -> Fallback:
    return fallback.model_copy(update=_renamed_body(fallback, ids))


def _renamed_expectation(expect: Expectation, ids: NewIds) -> Expectation:
    where: list[str] = []
    for text in expect.where:
        where.append(Condition.parse(text, OUTPUT_ROOTS).renamed(ids))
    return expect.model_copy(update={"where": tuple(where)})


def _renamed_confirmation(confirm: Confirmation, ids: NewIds) -> Confirmation:
    rename = partial(rename_results, ids=ids)
    arguments: dict[str, JsonValue] = {}
    for name, value in confirm.arguments.items():
        arguments[name] = map_strings(value, rename)
    fields = {
        "arguments": arguments,
        "when": Condition.parse(confirm.when, OUTPUT_ROOTS).renamed(ids),
        "output": map_strings(confirm.output, rename),
    }
    return confirm.model_copy(update=fields)
