"""Says everything that is wrong with what a model planned, and makes tasks of it where nothing is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from replanning._checks import check_graph, check_task
from replanning._errors import PlanError, Problem
from replanning._ids import TaskId
from replanning._plan import Fallback, JsonObject, Task, ToolSpec
from replanning._wording import NameSuggester
from replanning.planning._building import (
    TaskIdMap,
    build_tasks,
    missing_arguments,
    planned_arguments,
    remaining_subtasks,
    undeclared_argument_problems,
)
from replanning.planning._outputs import Action, ActionPlan, Subtask, TaskDecomposition

_PLACEHOLDER_ARGUMENT: Final = "${context.asked_for_later}"
"""Stands for an argument that is not known yet, in checks only: a reference fits every type."""


def plan_problems(
    decomposition: TaskDecomposition,
    action_plan: ActionPlan | None = None,
    *,
    tools: Iterable[ToolSpec],
    max_subtasks: int = 100,
    finished: Iterable[str] = (),
    resources: Mapping[str, float] | None = None,
) -> list[Problem]:
    """Everything that is wrong with a decomposition and, where there is one, with its action plan.

    Args:
        decomposition: the subtasks.
        action_plan: the actions; None where they are not planned yet.
        tools: the tools that may be used.
        max_subtasks: how many subtasks there may be beside those that are finished.
        finished: subtasks that were done before, of this decomposition or not: they may be depended on, and not planned.
        resources: how much there is of what tools take; None where that is not known.
    """
    done = {name: name for name in finished}
    library = {tool.name: tool for tool in tools}
    left = remaining_subtasks(decomposition, done)
    problems = [*_check_subtask_count(left, max_subtasks), *_check_subtasks(decomposition, library, done)]
    if action_plan is not None:
        problems, _ = _check_and_build(
            action_plan, left, library, TaskIdMap("", done), known=problems, resources=resources
        )
    return problems


def compile_action_plan(
    action_plan: ActionPlan,
    decomposition: TaskDecomposition,
    tools: Iterable[ToolSpec],
    *,
    prefix: str = "",
    finished: Mapping[str, str] | None = None,
) -> tuple[Task, ...]:
    """The tasks of an action plan, in the order in which they are to run; what is independent may run at once.

    The last action of a subtask has the subtask's id, those before it `id-1`, `id-2` …: what depends on the subtask
    waits for all of them. A fallback strategy that names a tool becomes a fallback. Where not all arguments of a tool
    are known, the task names no tool: then its metadata states under `planning` the `tool`, the `arguments` that are
    known, and which are `missing`.

    Args:
        action_plan: what is to be done.
        decomposition: the subtasks that it serves.
        tools: the tools that may be used.
        prefix: stands before every id, in references as well, so that no id is used again.
        finished: subtasks that were done before, each with the id of the task that did it.

    Raises:
        PlanError: something is wrong; with everything that is.
    """
    library, done = {tool.name: tool for tool in tools}, finished or {}
    left, wrong = remaining_subtasks(decomposition, done), _check_subtasks(decomposition, library, done)
    problems, tasks = _check_and_build(action_plan, left, library, TaskIdMap(prefix, done), known=wrong)
    if problems:
        raise PlanError(problems)
    return tasks


def compile_batch(
    decomposition: TaskDecomposition,
    action_plan: ActionPlan,
    part: Container[str],
    earlier: Sequence[Task],
    *,
    tools: Iterable[ToolSpec],
    finished: Iterable[str] = (),
    resources: Mapping[str, float] | None = None,
) -> tuple[list[Problem], tuple[Task, ...]]:
    """What is wrong with the actions of a part of the subtasks, or their tasks, as later parts are held against them.

    Args:
        decomposition: all the subtasks, which are known to be sound.
        action_plan: the actions of the part.
        part: the subtasks that it is to serve.
        earlier: the tasks of the parts before.
        tools: the tools that may be used.
        finished: subtasks that were done before.
        resources: how much there is of what tools take; None where that is not known.
    """
    library = {tool.name: tool for tool in tools}
    subtasks = [subtask for subtask in decomposition.subtasks if subtask.id in part]
    # Also those of later parts: an action that is called so now would be called otherwise in the whole.
    ids = TaskIdMap("", {name: name for name in finished}, (subtask.id for subtask in decomposition.subtasks))
    problems, tasks = _check_and_build(action_plan, subtasks, library, ids, resources=resources, earlier=earlier)
    return problems, tuple(Task(id=task.id, depends_on=task.depends_on) for task in tasks)


def subtask_ids_by_label(decomposition: TaskDecomposition) -> JsonObject:
    """The ids of subtasks, each by words that tell which it is without naming it."""
    return {f"the id of subtask {number}": one.id for number, one in enumerate(decomposition.subtasks, 1)}


def _check_and_build(
    action_plan: ActionPlan,
    subtasks: Sequence[Subtask],
    library: Mapping[str, ToolSpec],
    ids: TaskIdMap,
    *,
    known: Iterable[Problem] = (),
    resources: Mapping[str, float] | None = None,
    earlier: Sequence[Task] = (),
) -> tuple[list[Problem], tuple[Task, ...]]:
    """What is known to be wrong, with what is wrong with an action plan; or its tasks, where nothing is."""
    problems = [
        *known,
        *_check_execution_order(action_plan, subtasks),
        *_check_actions(action_plan, subtasks, library, ids, resources),
    ]
    if problems:
        return problems, ()
    tasks = build_tasks(action_plan, subtasks, library, ids)
    return _check_references(tasks, earlier, ids.finished.values()), tasks


def _check_subtask_count(subtasks: Sequence[Subtask], most: int) -> Iterator[Problem]:
    if (count := len(subtasks)) > most:
        text = f"there are {count} subtasks, at most {most} are allowed; merge those that belong together"
        yield Problem("task_decomposition.subtasks", text)


def _check_subtasks(
    decomposition: TaskDecomposition, library: Mapping[str, ToolSpec], done: Collection[str]
) -> Iterator[Problem]:
    at, hints = "task_decomposition.subtasks", NameSuggester()
    for index, subtask in enumerate(decomposition.subtasks):
        for tool in subtask.required_tools:
            if tool not in library:
                text = f"subtask {subtask.id!r} requires the tool {tool!r}, which there is not{hints(tool, library)}"
                yield Problem(f"{at}[{index}].required_tools", text)
    ids, own = TaskIdMap("", {}), {subtask.id for subtask in decomposition.subtasks}
    tasks = [Task(id=TaskId(each.id), depends_on=ids.resolve_all(each.dependencies)) for each in decomposition.subtasks]
    for problem in check_graph([*tasks, *(Task(id=TaskId(name)) for name in done if name not in own)]):
        where = problem.place.replace("tasks", at, 1).replace("depends_on", "dependencies")
        yield Problem(where, problem.message.replace(", as tasks[", ", as subtasks["))


def _check_execution_order(action_plan: ActionPlan, subtasks: Sequence[Subtask]) -> Iterator[Problem]:
    """What an order names that is not there, names too often, or leaves out."""
    at, hints = "action_plan.execution_order", NameSuggester()
    known = dict.fromkeys(subtask.id for subtask in subtasks)
    planned = Counter(action.task_id for action in action_plan.actions)
    for name, count in Counter(action_plan.execution_order).items():
        if name not in known:
            yield Problem(at, f"{name!r} is no subtask that is to be done{hints(name, known)}")
        elif count > max(1, planned[name]):
            yield Problem(at, f"{name!r} stands there {count} times and has {planned[name]} actions")
    placed = frozenset(action_plan.execution_order)
    for name in known if placed else ():
        if name not in placed:
            yield Problem(at, f"{name!r} is left out; every subtask has its place")


def _check_actions(
    action_plan: ActionPlan,
    subtasks: Sequence[Subtask],
    library: Mapping[str, ToolSpec],
    ids: TaskIdMap,
    resources: Mapping[str, float] | None = None,
) -> Iterator[Problem]:
    hints = NameSuggester()
    known = dict.fromkeys(subtask.id for subtask in subtasks)
    capacity = resources or {name: float("inf") for tool in library.values() for name in tool.resources}
    for index, action in enumerate(action_plan.actions):
        at, of = f"action_plan.actions[{index}]", f"the action for {action.task_id!r}"
        if action.task_id not in known:
            finished = "a subtask that is finished" if action.task_id in ids.finished else ""
            why = finished or f"no subtask{hints(action.task_id, known)}"
            yield Problem(f"{at}.task_id", f"{action.task_id!r} is {why}")
        if (tool := library.get(action.tool)) is None:
            yield Problem(
                f"{at}.tool", f"{of} uses the tool {action.tool!r}, which there is not{_tool_hint(action, library)}"
            )
            continue
        later: JsonObject = dict.fromkeys(missing_arguments(tool, action.arguments), _PLACEHOLDER_ARGUMENT)
        body = Fallback(tool=tool.name, arguments={**later, **action.arguments})
        for text in (*undeclared_argument_problems(tool, action.arguments), *check_task(body, library, capacity, {})):
            yield Problem(f"{at}.arguments", f"{of}: {text}")
    served = {action.task_id for action in action_plan.actions}
    for name in known:
        if name not in served:
            yield Problem("action_plan.actions", f"there is no action for subtask {name!r}")


def _tool_hint(action: Action, library: Mapping[str, ToolSpec]) -> str:
    if hint := NameSuggester()(action.tool, library):
        return hint
    names = ", ".join(map(repr, [*library][:20])) + (", …" if len(library) > 20 else "")
    return f"; there is {names}" if names else "; there are no tools at all"


def _check_references(tasks: Sequence[Task], earlier: Sequence[Task], done: Iterable[str]) -> list[Problem]:
    """References to what is not there, or not there in time; the rest is known to be sound."""
    whole = [task if task.tool else task.model_copy(update={"arguments": planned_arguments(task)}) for task in tasks]
    before = [Task(id=TaskId(name)) for name in dict.fromkeys(done)]
    return [Problem("action_plan.actions", one.message) for one in check_graph([*whole, *earlier, *before])]
