"""Says everything that is wrong with what a model planned, and makes tasks of it where nothing is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from replanning._checks import check_graph, check_task
from replanning._errors import PlanError, Problem
from replanning._ids import TaskId
from replanning._plan import Fallback, JsonObject, Task, ToolSpec
from replanning._wording import Hints
from replanning.planning._building import Ids, built, known_arguments, left_of, missing_arguments, unused_arguments
from replanning.planning._outputs import Action, ActionPlan, Subtask, TaskDecomposition

_ANY: Final = "${context.asked_for_later}"
"""Stands for an argument that is not known yet, in checks only: a reference fits every type."""


def problems_of(
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
    left = left_of(decomposition, done)
    problems = [*_count(left, max_subtasks), *_subtasks(decomposition, library, done)]
    if action_plan is not None:
        problems, _ = _checked(action_plan, left, library, Ids("", done), known=problems, resources=resources)
    return problems


def tasks_of(
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
    left, wrong = left_of(decomposition, done), _subtasks(decomposition, library, done)
    problems, tasks = _checked(action_plan, left, library, Ids(prefix, done), known=wrong)
    if problems:
        raise PlanError(problems)
    return tasks


def part_of(
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
    ids = Ids("", {name: name for name in finished}, (subtask.id for subtask in decomposition.subtasks))
    problems, tasks = _checked(action_plan, subtasks, library, ids, resources=resources, earlier=earlier)
    return problems, tuple(Task(id=task.id, depends_on=task.depends_on) for task in tasks)


def ids_in(decomposition: TaskDecomposition) -> JsonObject:
    """The ids of subtasks, each by words that tell which it is without naming it."""
    return {f"the id of subtask {number}": one.id for number, one in enumerate(decomposition.subtasks, 1)}


def _checked(
    action_plan: ActionPlan,
    subtasks: Sequence[Subtask],
    library: Mapping[str, ToolSpec],
    ids: Ids,
    *,
    known: Iterable[Problem] = (),
    resources: Mapping[str, float] | None = None,
    earlier: Sequence[Task] = (),
) -> tuple[list[Problem], tuple[Task, ...]]:
    """What is known to be wrong, with what is wrong with an action plan; or its tasks, where nothing is."""
    problems = [*known, *_order(action_plan, subtasks), *_actions(action_plan, subtasks, library, ids, resources)]
    if problems:
        return problems, ()
    tasks = built(action_plan, subtasks, library, ids)
    return _references(tasks, earlier, ids.finished.values()), tasks


def _count(subtasks: Sequence[Subtask], most: int) -> Iterator[Problem]:
    if (count := len(subtasks)) > most:
        text = f"there are {count} subtasks, at most {most} are allowed; merge those that belong together"
        yield Problem("task_decomposition.subtasks", text)


def _subtasks(
    decomposition: TaskDecomposition, library: Mapping[str, ToolSpec], done: Collection[str]
) -> Iterator[Problem]:
    at, hints = "task_decomposition.subtasks", Hints()
    for index, subtask in enumerate(decomposition.subtasks):
        for tool in subtask.required_tools:
            if tool not in library:
                text = f"subtask {subtask.id!r} requires the tool {tool!r}, which there is not{hints(tool, library)}"
                yield Problem(f"{at}[{index}].required_tools", text)
    ids, own = Ids("", {}), {subtask.id for subtask in decomposition.subtasks}
    tasks = [Task(id=TaskId(each.id), depends_on=ids.all(each.dependencies)) for each in decomposition.subtasks]
    for problem in check_graph([*tasks, *(Task(id=TaskId(name)) for name in done if name not in own)]):
        where = problem.place.replace("tasks", at, 1).replace("depends_on", "dependencies")
        yield Problem(where, problem.message.replace(", as tasks[", ", as subtasks["))


def _order(action_plan: ActionPlan, subtasks: Sequence[Subtask]) -> Iterator[Problem]:
    """What an order names that is not there, names too often, or leaves out."""
    at, hints = "action_plan.execution_order", Hints()
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


def _actions(
    action_plan: ActionPlan,
    subtasks: Sequence[Subtask],
    library: Mapping[str, ToolSpec],
    ids: Ids,
    resources: Mapping[str, float] | None = None,
) -> Iterator[Problem]:
    hints = Hints()
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
                f"{at}.tool", f"{of} uses the tool {action.tool!r}, which there is not{_known(action, library)}"
            )
            continue
        later: JsonObject = dict.fromkeys(missing_arguments(tool, action.arguments), _ANY)
        body = Fallback(tool=tool.name, arguments={**later, **action.arguments})
        for text in (*unused_arguments(tool, action.arguments), *check_task(body, library, capacity, {})):
            yield Problem(f"{at}.arguments", f"{of}: {text}")
    served = {action.task_id for action in action_plan.actions}
    for name in known:
        if name not in served:
            yield Problem("action_plan.actions", f"there is no action for subtask {name!r}")


def _known(action: Action, library: Mapping[str, ToolSpec]) -> str:
    if hint := Hints()(action.tool, library):
        return hint
    names = ", ".join(map(repr, [*library][:20])) + (", …" if len(library) > 20 else "")
    return f"; there is {names}" if names else "; there are no tools at all"


def _references(tasks: Sequence[Task], earlier: Sequence[Task], done: Iterable[str]) -> list[Problem]:
    """References to what is not there, or not there in time; the rest is known to be sound."""
    whole = [task if task.tool else task.model_copy(update={"arguments": known_arguments(task)}) for task in tasks]
    before = [Task(id=TaskId(name)) for name in dict.fromkeys(done)]
    return [Problem("action_plan.actions", one.message) for one in check_graph([*whole, *earlier, *before])]
