"""Makes tasks of what a model planned."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

from replanning._checks import check_task
from replanning._ids import TaskId
from replanning._patterns import placeholders
from replanning._plan import Fallback, JsonObject, JsonValue, Task, TaskBody, ToolSpec
from replanning._references import texts_with_references
from replanning._wording import brief_repr
from replanning.planning._outputs import Action, ActionPlan, Subtask, TaskDecomposition

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
        *_iter_strings(tool.body),
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


def _iter_strings(value: JsonValue) -> Iterator[str]:
    """Every text in what a request sends."""
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _iter_strings(item)


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
        for text in texts_with_references(arguments):
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
