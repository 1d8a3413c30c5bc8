"""Makes tasks of what a model planned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from replanning.errors import PlanError, Problem
from replanning.plan.checks import check_graph, check_task
from replanning.plan.json_values import iter_strings
from replanning.plan.messages import NameSuggester, brief_repr
from replanning.plan.references import placeholders
from replanning.plan.tasks import Fallback, Task, TaskBody, ToolSpec
from replanning.plan.types import JsonObject, JsonValue, TaskId
from replanning.planning.outputs import Action, ActionPlan, Subtask, TaskDecomposition

_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^{}]*)\}")

_OUTPUT_SUFFIX: Final = re.compile(r"\.output(?=$|[.\[])")


def revise_decomposition(
    decomposition: TaskDecomposition, action_plan: ActionPlan, finished: Iterable[str] = ()
) -> TaskDecomposition:
    """The subtasks that a revised action plan serves, with those that are finished.

    What it no longer names is dropped. What is new waits for what stands before it in the order, and what stands behind
    it waits for it: nobody said what it needs.
    """
    known, done = {subtask.id: subtask for subtask in decomposition.subtasks}, dict.fromkeys(finished)
    stays = {**done, **dict.fromkeys(subtask_order(action_plan))}
    subtasks = [known[name].model_copy(update={"dependencies": ()}) for name in done if name in known]
    before: str | None = None
    for name in (name for name in subtask_order(action_plan) if name not in done):
        old = known.get(name)
        needed = [each for each in old.dependencies if each in stays] if old else []
        if before is not None and (old is None or before not in known) and before not in needed:
            needed.append(before)
        purpose = next((action.purpose for action in action_plan.actions if action.task_id == name), "")
        subtask = old or Subtask(id=name, description=purpose)
        subtasks.append(subtask.model_copy(update={"dependencies": tuple(needed)}))
        before = name
    return decomposition.model_copy(update={"subtasks": tuple(subtasks)})


def tool_parameters(tool: ToolSpec) -> Mapping[str, str]:
    """The parameters of a tool and their types; where it states none, those that its patterns name."""
    if tool.parameters:
        return tool.parameters
    lists = (tool.requires, tool.adds, tool.removes, tool.needs, tool.produces, tuple(tool.headers.values()))
    texts = (
        *(text for texts in lists for text in texts),
        tool.command or "",
        tool.url or "",
        *iter_strings(tool.body, keys=False),
    )
    return {name: "any" for text in texts for name in placeholders(text)}


def undeclared_argument_problems(tool: ToolSpec, given: Iterable[str]) -> list[str]:
    """What is wrong with arguments that a command or a request has no place for, and would do without."""
    if tool.parameters or tool.kind not in ("shell", "http"):
        return []  # others are held against their parameters, or look at arguments themselves
    taken = tool_parameters(tool)
    unused = [name for name in given if name not in taken and name not in tool.produces]
    return [
        f"tool {tool.name!r} has no parameter {brief_repr(name)}; it has {brief_repr(list(taken))}" for name in unused
    ]


def missing_arguments(tool: ToolSpec, given: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """The arguments that a tool needs and that are not given."""
    return tuple(name for name in tool_parameters(tool) if name not in given and name not in tool.optional)


def planned_arguments(body: TaskBody) -> JsonObject:
    """The arguments of a task of planning mode that are known, whether or not that is all of them."""
    planning = body.metadata.get("planning")
    known = planning.get("arguments") if isinstance(planning, dict) else None
    return known if body.tool is None and isinstance(known, dict) else body.arguments


def tool_use_problems(tool: ToolSpec, arguments: JsonObject, capacity: Mapping[str, float]) -> list[str]:
    """What is wrong with arguments that are used as they stand, without references."""
    body = Fallback.model_validate({"tool": tool.name, "arguments": _escape_references(arguments)})
    return [*undeclared_argument_problems(tool, arguments), *check_task(body, {tool.name: tool}, capacity, {})]


def remaining_subtasks(decomposition: TaskDecomposition, done: Container[str]) -> list[Subtask]:
    """The subtasks that are to be done."""
    return [subtask for subtask in decomposition.subtasks if subtask.id not in done]


def _escape_references(value: JsonValue) -> JsonValue:
    """A value for checks, in which nothing is a reference."""
    match value:
        case str():
            return value.replace("${", "$${")
        case list():
            return [_escape_references(item) for item in value]
        case dict():
            return {key: _escape_references(item) for key, item in value.items()}
    return value


class TaskIdMap:
    """Which ids the tasks have that a model calls by the names of its subtasks.

    Args:
        prefix: stands before every id.
        finished: the ids of what was done before, by the names of the subtasks.
        reserved: names that no action may have beside its subtask.
    """

    def __init__(self, prefix: str = "", finished: Mapping[str, str] | None = None, taken: Iterable[str] = ()) -> None:
        self.prefix = prefix
        self.finished = finished or {}
        self.reserved = frozenset(taken)

    def resolve(self, name: str) -> TaskId:
        """The id of the task that does a subtask, or did it."""
        return TaskId(self.finished.get(name, self.prefix + name))

    def resolve_all(self, names: Iterable[str]) -> tuple[TaskId, ...]:
        """The ids of several."""
        return tuple(self.resolve(name) for name in names)

    def referenced_tasks(self, arguments: JsonObject) -> dict[TaskId, None]:
        """The finished tasks that arguments refer to by the names of their subtasks."""
        found: dict[TaskId, None] = {}
        for text in iter_strings(arguments, keys=False):
            for match in _REFERENCE.finditer(text):
                if (name := self._referenced_subtask(match[1] or "")) in self.finished:
                    found[self.resolve(name)] = None
        return found

    def rewrite_references(self, value: JsonValue) -> JsonValue:
        """A value in which references name the tasks themselves."""
        match value:
            case str():
                return _REFERENCE.sub(self._rewrite_match, value)
            case list():
                return [self.rewrite_references(item) for item in value]
            case dict():
                return {key: self.rewrite_references(item) for key, item in value.items()}
        return value

    def _rewrite_match(self, match: re.Match[str]) -> str:
        name = self._referenced_subtask(match[1] or "")
        return f"${{{self.resolve(name)}{match[1][len(name) :]}}}" if name else match[0]

    def _referenced_subtask(self, inner: str) -> str:
        """The subtask that a reference names: the longest that is finished, else the shortest possible one."""
        if inner.startswith("context."):
            return ""
        names = [inner[: found.start()] for found in _OUTPUT_SUFFIX.finditer(inner)]
        return next((name for name in reversed(names) if name in self.finished), names[0] if names else "")


def build_tasks(
    action_plan: ActionPlan, subtasks: Sequence[Subtask], library: Mapping[str, ToolSpec], ids: TaskIdMap
) -> tuple[Task, ...]:
    """The tasks of actions that were checked."""
    actions, taken = (
        _actions_by_subtask(action_plan),
        {*(subtask.id for subtask in subtasks), *ids.reserved, *ids.finished},
    )
    tasks: list[Task] = []
    for subtask in _ordered_subtasks(action_plan, subtasks):
        waits, served = ids.resolve_all(subtask.dependencies), actions[subtask.id]
        for action, name in zip(served, _action_names(subtask.id, len(served), taken), strict=True):
            fields = {
                **_task_fields(action, library, ids),
                "id": ids.resolve(name),
                "depends_on": tuple({**dict.fromkeys(waits), **ids.referenced_tasks(action.arguments)}),
                "priority": len(tasks),
                "fallbacks": tuple(_fallbacks(action, library, ids)),
            }
            tasks.append(Task.model_validate(fields))
            waits = (tasks[-1].id,)
    return tuple(tasks)


def _actions_by_subtask(action_plan: ActionPlan) -> Mapping[str, Sequence[Action]]:
    found: dict[str, list[Action]] = {}
    for action in action_plan.actions:
        found.setdefault(action.task_id, []).append(action)
    return found


def subtask_order(action_plan: ActionPlan) -> tuple[str, ...]:
    """The subtasks in the order in which they are to run: the stated one, then that of the actions."""
    return tuple(dict.fromkeys((*action_plan.execution_order, *(action.task_id for action in action_plan.actions))))


def _ordered_subtasks(action_plan: ActionPlan, subtasks: Sequence[Subtask]) -> list[Subtask]:
    known = {subtask.id: subtask for subtask in subtasks}
    return [known[name] for name in subtask_order(action_plan)]


def _action_names(subtask: str, count: int, taken: set[str]) -> list[str]:
    names: list[str] = []
    number = 1
    while len(names) < count - 1:
        if (name := f"{subtask}-{number}") not in taken:
            taken.add(name)
            names.append(name)
        number += 1
    return [*names, subtask]


def _task_fields(action: Action, library: Mapping[str, ToolSpec], ids: TaskIdMap) -> JsonObject:
    said: JsonObject = {
        "subtask": action.task_id,
        "action_type": action.action_type,
        "expected_outcome": action.expected_outcome,
        "fallback_strategy": action.fallback_strategy,
    }
    return {
        **_tool_fields(
            library[action.tool], action.arguments, {name: text for name, text in said.items() if text}, ids
        ),
        "goal": action.purpose or None,
        "acceptance": [action.expected_outcome] if action.expected_outcome else [],
    }


def _tool_fields(tool: ToolSpec, given: Mapping[str, JsonValue], said: JsonObject, ids: TaskIdMap) -> JsonObject:
    """Which tool is used and how; where not all of that is known, it stands in the metadata until it is asked for."""
    arguments = {name: ids.rewrite_references(value) for name, value in given.items()}
    if missing := missing_arguments(tool, given):
        return {
            "resources": dict(tool.resources),
            "metadata": {
                "planning": {**said, "tool": tool.name, "arguments": arguments, "missing": list(missing)},
            },
        }
    return {"tool": tool.name, "arguments": arguments, "metadata": {"planning": {**said, "tool": tool.name}}}


def _fallbacks(action: Action, library: Mapping[str, ToolSpec], ids: TaskIdMap) -> Iterator[Fallback]:
    """The other tool that a strategy names, with the arguments that both tools take."""
    tool = _fallback_tool(action.fallback_strategy or "", library)
    if tool is not None and tool.name != action.tool:
        shared = {name: action.arguments[name] for name in tool_parameters(tool) if name in action.arguments}
        yield Fallback.model_validate(
            {**_tool_fields(tool, shared, {"subtask": action.task_id}, ids), "goal": action.purpose or None}
        )


def _fallback_tool(strategy: str, library: Mapping[str, ToolSpec]) -> ToolSpec | None:
    """The tool whose name a strategy is or begins with, as in `write_file: from scratch` and `use write_file`."""
    text = re.sub(r"^use\s+", "", strategy.strip(), flags=re.IGNORECASE)
    head = re.split(r"[:;,(]|\s+[-–—]\s+|\s+(?:with|instead|for)\b", text, maxsplit=1)[0]
    return library.get(text) or library.get(head.strip(" `'\""))


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
