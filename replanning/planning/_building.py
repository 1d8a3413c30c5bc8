"""Makes tasks of what a model planned, and says everything that is in the way of that."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from replanning._checks import check_task
from replanning._errors import PlanError, Problem
from replanning._ids import TaskId
from replanning._patterns import holes
from replanning._plan import Fallback, Goal, JsonObject, JsonValue, Plan, Task, TaskBody, ToolSpec
from replanning._wording import Hints
from replanning.planning._outputs import Action, ActionPlan, Subtask, TaskDecomposition

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^{}]*)\}")
_ANY: Final = "${context.asked_for_later}"
"""Stands for an argument that is not known yet, in checks only: a reference fits every type."""


def problems_of(
    decomposition: TaskDecomposition,
    action_plan: ActionPlan | None = None,
    *,
    tools: Iterable[ToolSpec],
    max_subtasks: int = 100,
) -> list[Problem]:
    """Everything that is wrong with a decomposition and, where there is one, with its action plan.

    Args:
        decomposition: the subtasks.
        action_plan: the actions; None where they are not planned yet.
        tools: the tools that may be used.
        max_subtasks: how many subtasks there may be.
    """
    library = {tool.name: tool for tool in tools}
    problems = [*_count(decomposition, max_subtasks), *_subtasks(decomposition, library)]
    if action_plan is None:
        return problems
    problems += [*_order(action_plan, decomposition), *_actions(action_plan, decomposition, library)]
    return problems or _references(_built(action_plan, decomposition, library, ""))


def tasks_of(
    action_plan: ActionPlan, decomposition: TaskDecomposition, tools: Iterable[ToolSpec], *, prefix: str = ""
) -> tuple[Task, ...]:
    """The tasks of an action plan, in the order in which they are to run; what is independent may run at once.

    The last action of a subtask has the subtask's id, those before it `id-1`, `id-2` …: what depends on the subtask
    waits for all of them. A fallback strategy that names a tool becomes a fallback. Where not all arguments of a tool
    are known, the task names no tool: then its metadata states under `planning` the `tool` and what is `missing`.

    Args:
        action_plan: what is to be done.
        decomposition: the subtasks that it serves.
        tools: the tools that may be used.
        prefix: stands before every id, in references as well, so that no id is used again.

    Raises:
        PlanError: something is wrong; with everything that is.
    """
    library = {tool.name: tool for tool in tools}
    limit = len(decomposition.subtasks)
    if problems := problems_of(decomposition, action_plan, tools=library.values(), max_subtasks=limit):
        raise PlanError(problems)
    return _built(action_plan, decomposition, library, prefix)


def parameters_of(tool: ToolSpec) -> Mapping[str, str]:
    """The parameters of a tool and their types; where it states none, those that its patterns name."""
    if tool.parameters:
        return tool.parameters
    lists = (tool.requires, tool.adds, tool.removes, tool.needs, tool.produces, tuple(tool.headers.values()))
    texts = (*(text for texts in lists for text in texts), tool.command or "", tool.url or "")
    return {name: "any" for text in texts for name in holes(text)}


def missing_arguments(tool: ToolSpec, given: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """The arguments that a tool needs and that are not given."""
    return tuple(name for name in parameters_of(tool) if name not in given)


def known_arguments(body: TaskBody) -> JsonObject:
    """The arguments of a task of planning mode that are known, whether or not that is all of them."""
    planning = body.metadata.get("planning")
    known = planning.get("arguments") if isinstance(planning, dict) else None
    return known if body.tool is None and isinstance(known, dict) else body.arguments


def _count(decomposition: TaskDecomposition, most: int) -> Iterator[Problem]:
    if (count := len(decomposition.subtasks)) > most:
        text = f"there are {count} subtasks, at most {most} are allowed; merge those that belong together"
        yield Problem("task_decomposition.subtasks", text)


def _subtasks(decomposition: TaskDecomposition, library: Mapping[str, ToolSpec]) -> Iterator[Problem]:
    at, hints = "task_decomposition.subtasks", Hints()
    for index, subtask in enumerate(decomposition.subtasks):
        for tool in subtask.required_tools:
            if tool not in library:
                text = f"subtask {subtask.id!r} requires the tool {tool!r}, which there is not{hints(tool, library)}"
                yield Problem(f"{at}[{index}].required_tools", text)
    for problem in _sound(Task(id=TaskId(each.id), depends_on=_ids(each)) for each in decomposition.subtasks):
        where = problem.place.replace("tasks", at, 1).replace("depends_on", "dependencies")
        yield Problem(where, problem.message.replace(", as tasks[", ", as subtasks["))


def _ids(subtask: Subtask, prefix: str = "") -> tuple[TaskId, ...]:
    return tuple(TaskId(prefix + name) for name in subtask.dependencies)


def _sound(tasks: Iterable[Task]) -> tuple[Problem, ...]:
    try:
        Plan(goal=Goal(objective=""), tasks=tuple(tasks))
    except PlanError as error:
        return tuple(error.problems)
    return ()


def _order(action_plan: ActionPlan, decomposition: TaskDecomposition) -> Iterator[Problem]:
    """What an order names that is not there, names too often, or leaves out."""
    at, hints = "action_plan.execution_order", Hints()
    known = dict.fromkeys(subtask.id for subtask in decomposition.subtasks)
    planned = Counter(action.task_id for action in action_plan.actions)
    for name, count in Counter(action_plan.execution_order).items():
        if name not in known:
            yield Problem(at, f"{name!r} is no subtask{hints(name, known)}")
        elif count > max(1, planned[name]):
            yield Problem(at, f"{name!r} stands there {count} times and has {planned[name]} actions")
    placed = frozenset(action_plan.execution_order)
    for name in known if placed else ():
        if name not in placed:
            yield Problem(at, f"{name!r} is left out; every subtask has its place")


def _actions(
    action_plan: ActionPlan, decomposition: TaskDecomposition, library: Mapping[str, ToolSpec]
) -> Iterator[Problem]:
    hints = Hints()
    known = dict.fromkeys(subtask.id for subtask in decomposition.subtasks)
    capacity = {name: float("inf") for tool in library.values() for name in tool.resources}
    for index, action in enumerate(action_plan.actions):
        at, of = f"action_plan.actions[{index}]", f"the action for {action.task_id!r}"
        if action.task_id not in known:
            yield Problem(f"{at}.task_id", f"{action.task_id!r} is no subtask{hints(action.task_id, known)}")
        if (tool := library.get(action.tool)) is None:
            yield Problem(
                f"{at}.tool", f"{of} uses the tool {action.tool!r}, which there is not{_known(action, library)}"
            )
            continue
        later: JsonObject = dict.fromkeys(missing_arguments(tool, action.arguments), _ANY)
        body = Fallback(tool=tool.name, arguments={**later, **action.arguments})
        for text in check_task(body, library, capacity, {}):
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


def _references(tasks: Sequence[Task]) -> list[Problem]:
    """References to what is not there, or not there in time; the rest is known to be sound."""
    whole = (task.model_copy(update={"arguments": known_arguments(task)}) for task in tasks)
    return [Problem("action_plan.actions", problem.message) for problem in _sound(whole)]


def _built(
    action_plan: ActionPlan, decomposition: TaskDecomposition, library: Mapping[str, ToolSpec], prefix: str
) -> tuple[Task, ...]:
    rename, actions = _renaming(prefix), _by_subtask(action_plan)
    taken = {subtask.id for subtask in decomposition.subtasks}
    tasks: list[Task] = []
    for subtask in _sorted(action_plan, decomposition):
        waits, served = _ids(subtask, prefix), actions[subtask.id]
        for action, name in zip(served, _names(subtask.id, len(served), taken), strict=True):
            fields = _fields(action, library, rename)
            fallbacks = tuple(_fallbacks(action, library, rename))
            task = Task.model_validate(
                {**fields, "id": prefix + name, "depends_on": waits, "priority": len(tasks), "fallbacks": fallbacks}
            )
            tasks.append(task)
            waits = (task.id,)
    return tuple(tasks)


def _by_subtask(action_plan: ActionPlan) -> Mapping[str, Sequence[Action]]:
    found: dict[str, list[Action]] = {}
    for action in action_plan.actions:
        found.setdefault(action.task_id, []).append(action)
    return found


def _sorted(action_plan: ActionPlan, decomposition: TaskDecomposition) -> list[Subtask]:
    """The subtasks in the order in which they are to run: the stated one, else that of the actions."""
    order = action_plan.execution_order or tuple(action.task_id for action in action_plan.actions)
    subtasks = {subtask.id: subtask for subtask in decomposition.subtasks}
    return [subtasks[name] for name in dict.fromkeys(order)]


def _names(subtask: str, count: int, taken: set[str]) -> list[str]:
    names: list[str] = []
    number = 1
    while len(names) < count - 1:
        if (name := f"{subtask}-{number}") not in taken:
            taken.add(name)
            names.append(name)
        number += 1
    return [*names, subtask]


def _fields(action: Action, library: Mapping[str, ToolSpec], rename: Callable[[JsonValue], JsonValue]) -> JsonObject:
    said: JsonObject = {
        "subtask": action.task_id,
        "action_type": action.action_type,
        "expected_outcome": action.expected_outcome,
        "fallback_strategy": action.fallback_strategy,
    }
    return {
        **_use(library[action.tool], action.arguments, {name: text for name, text in said.items() if text}, rename),
        "goal": action.purpose or None,
        "acceptance": [action.expected_outcome] if action.expected_outcome else [],
    }


def _use(
    tool: ToolSpec, given: Mapping[str, JsonValue], said: JsonObject, rename: Callable[[JsonValue], JsonValue]
) -> JsonObject:
    """Which tool is used and how; where not all of that is known, it stands in the metadata until it is asked for."""
    arguments = {name: rename(value) for name, value in given.items()}
    if missing := missing_arguments(tool, given):
        return {
            "metadata": {
                "planning": {**said, "tool": tool.name, "arguments": arguments, "missing": list(missing)},
            }
        }
    return {"tool": tool.name, "arguments": arguments, "metadata": {"planning": {**said, "tool": tool.name}}}


def _fallbacks(
    action: Action, library: Mapping[str, ToolSpec], rename: Callable[[JsonValue], JsonValue]
) -> Iterator[Fallback]:
    """The other tool that a strategy names, with the arguments that both tools take."""
    tool = _named(action.fallback_strategy or "", library)
    if tool is not None and tool.name != action.tool:
        shared = {name: action.arguments[name] for name in parameters_of(tool) if name in action.arguments}
        yield Fallback.model_validate(
            {**_use(tool, shared, {"subtask": action.task_id}, rename), "goal": action.purpose or None}
        )


def _named(strategy: str, library: Mapping[str, ToolSpec]) -> ToolSpec | None:
    """The tool whose name a strategy is or begins with, as in `write_file: from scratch` and `use write_file`."""
    text = re.sub(r"^use\s+", "", strategy.strip(), flags=re.IGNORECASE)
    head = re.split(r"[:;,(]|\s+[-–—]\s+|\s+(?:with|instead|for)\b", text, maxsplit=1)[0]
    return library.get(text) or library.get(head.strip(" `'\""))


def _renaming(prefix: str) -> Callable[[JsonValue], JsonValue]:
    """Puts the prefix before every task that a value refers to."""

    def renamed(match: re.Match[str]) -> str:
        inner = match[1]
        refers = inner is not None and not inner.startswith("context.")
        return f"${{{prefix}{inner}}}" if refers else match[0]

    def rename(value: JsonValue) -> JsonValue:
        match value:
            case str():
                return _REFERENCE.sub(renamed, value) if prefix else value
            case list():
                return [rename(item) for item in value]
            case dict():
                return {key: rename(item) for key, item in value.items()}
        return value

    return rename
