"""Checks of a plan as a whole: unique names, tools and arguments, resources, references, no dependency cycles."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import JsonValue

from replanning.errors import ExpressionError, Problem
from replanning.plan.conditions import Condition
from replanning.plan.graph import find_cycles, unreachable_pairs
from replanning.plan.json_values import iter_strings, json_type_name
from replanning.plan.messages import NameSuggester, brief_repr, format_path
from replanning.plan.references import Reference, find_references, placeholders
from replanning.plan.tasks import McpServer, Task, TaskBody, ToolSpec
from replanning.plan.types import JsonPath

Finding = tuple[JsonPath, str]

_REQUIRED_FIELD_BY_KIND: Final = {"shell": "command", "http": "url", "python": "callable", "mcp": "server"}

_PATTERN_FIELDS: Final = ("requires", "adds", "removes", "needs", "produces", "command", "url", "headers")

_MAX_CYCLE_NAMES: Final = 10

_PARAMETER_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "any": (object,),
}


def check_plan(
    tasks: Sequence[Task],
    tools: Sequence[ToolSpec],
    *,
    resources: Mapping[str, float],
    objects: Mapping[str, str],
    servers: Mapping[str, McpServer],
) -> list[Problem]:
    """Return everything that is wrong with a plan whose parts are each valid."""
    scope = _Scope({tool.name: tool for tool in tools}, resources, objects, servers)
    findings = [*_check_unique("tool", [tool.name for tool in tools]), *_check_ids(tasks)]
    for name, server in servers.items():
        findings += [(("mcp", name), f"MCP server {name!r}: {text}") for text in server.problems()]
    for index, tool in enumerate(tools):
        findings += [(("tools", index, *path), f"tool {tool.name!r}{text}") for path, text in _check_tool(tool, scope)]
    for index, task in enumerate(tasks):
        findings += [
            (("tasks", index, *path), f"task {task.id!r}: {text}") for path, text in _check_nested_bodies(task, scope)
        ]
    findings += _DependencyChecker(tasks, scope.hints).check()
    return [Problem(format_path(path), text) for path, text in findings]


def check_graph(tasks: Sequence[Task]) -> list[Problem]:
    """Return the problems between tasks: duplicate ids, wrong dependencies, references to unavailable results."""
    findings = [*_check_ids(tasks), *_DependencyChecker(tasks, NameSuggester()).check()]
    return [Problem(format_path(path), text) for path, text in findings]


def check_task(
    task: TaskBody, tools: Mapping[str, ToolSpec], capacity: Mapping[str, float], objects: Mapping[str, str]
) -> list[str]:
    """Return the problems of one task and its fallbacks, without its relations to other tasks.

    Args:
        task: the task.
        tools: the described tools by name; if there are none, any tool name is accepted.
        capacity: the amount of each resource.
        objects: the type of each object that arguments may name.
    """
    findings = _check_nested_bodies(task, _Scope(tools, capacity, objects))
    return [
        f"{format_path(path[:2])}: {text}" if path and path[0] in ("fallbacks", "undo") else text
        for path, text in findings
    ]


def result_references(task: Task, known: Container[str]) -> Iterator[tuple[JsonPath, str, str]]:
    """Yield the results that a task and its fallbacks read: path, id of the other task, and the reference as written.

    Args:
        task: the task.
        known: the ids of all tasks, which separate a task's id from a path into its output.
    """
    for path, body in _nested_bodies(task):
        for text in _strings_with_references(body):
            for reference in _valid_references(text, known):
                if reference.task is not None and not ("undo" in path and reference.task == task.id):
                    yield (*path, "arguments"), reference.task, str(reference)
        for name in _condition_result_names(body.when):
            yield (*path, "when"), name, f"results.{name}"


@dataclass(frozen=True)
class _Scope:
    """Names that the tasks of a plan may use."""

    tools: Mapping[str, ToolSpec]
    capacity: Mapping[str, float]
    objects: Mapping[str, str]
    servers: Mapping[str, McpServer] = field(default_factory=dict)
    hints: NameSuggester = field(default_factory=NameSuggester)
    _placeholders: dict[str, dict[str, str]] = field(default_factory=dict)

    def placeholders(self, tool: ToolSpec) -> dict[str, str]:
        """Return the placeholders in the patterns of a tool, each with the first field that has it."""
        if tool.name not in self._placeholders:
            fields: dict[str, str] = {}
            for field_name in _PATTERN_FIELDS:
                value: str | Iterable[str] | Mapping[str, str] = getattr(tool, field_name) or ()
                texts = (value,) if isinstance(value, str) else value.values() if isinstance(value, Mapping) else value
                for text in texts:
                    for placeholder in placeholders(text):
                        fields.setdefault(placeholder, field_name)
            self._placeholders[tool.name] = fields
        return self._placeholders[tool.name]

    def may_be_server_tool(self, name: str) -> bool:
        """Return whether a server may offer this tool; only the server itself can confirm it."""
        tools = [(server, name[len(key) + 1 :]) for key, server in self.servers.items() if name.startswith(f"{key}.")]
        return any(tool and (server.tools is None or tool in server.tools) for server, tool in tools)


def _check_ids(tasks: Sequence[Task]) -> Iterator[Finding]:
    return _check_unique("task", [task.id for task in tasks], "id")


def _check_unique(what: str, names: Sequence[str], key: str = "name") -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if (before := first.setdefault(name, index)) != index:
            text = f"{what} {name!r} is there already, as {what}s[{before}]; each needs its own {key}"
            yield (f"{what}s", index, key), text


def _check_tool(tool: ToolSpec, scope: _Scope) -> Iterator[Finding]:
    """Yield the problems of a tool; the messages continue the words `tool 'name'`."""
    needed = _REQUIRED_FIELD_BY_KIND.get(tool.kind or "")
    if needed and not getattr(tool, needed):
        yield (), f" is of kind {tool.kind} and has no {needed}"
    if tool.callable is not None and not all(tool.callable.partition(":")):
        yield ("callable",), f": {brief_repr(tool.callable)} is not of the form module:function"
    if tool.server is not None and tool.server not in scope.servers:
        yield ("server",), f": `mcp` describes no server {tool.server!r}{scope.hints(tool.server, scope.servers)}"
    for path, text in _check_parameters(tool, scope):
        yield path, f": {text}"
    for resource in tool.resources:
        yield from ((path, f": {text}") for path, text in _check_resource_declared(resource, scope))


def _check_parameters(tool: ToolSpec, scope: _Scope) -> Iterator[Finding]:
    types = {*_PARAMETER_TYPES, *scope.objects.values()}
    for parameter, kind in tool.parameters.items():
        if kind not in types:
            known = f"expected one of {', '.join(_PARAMETER_TYPES)}, or a type that `objects` states"
            yield ("parameters", parameter), f"there is no type {kind!r}{scope.hints(kind, types)}; {known}"
    for parameter in tool.optional:
        if parameter not in tool.parameters:
            hint = scope.hints(parameter, tool.parameters)
            yield ("optional",), f"{parameter!r} is no parameter of it{hint}"
    for hole, name in scope.placeholders(tool).items() if tool.parameters else ():
        if hole not in tool.parameters:
            yield (name,), f"{{{hole}}} in {name} is no parameter of it{scope.hints(hole, tool.parameters)}"


def _check_resource_declared(resource: str, scope: _Scope) -> Iterator[Finding]:
    if resource not in scope.capacity:
        hint = scope.hints(resource, scope.capacity)
        text = f"the plan has no resource {resource!r}{hint}; state its capacity under `resources`"
        yield ("resources", resource), text


def _nested_bodies(task: TaskBody) -> list[tuple[JsonPath, TaskBody]]:
    """Return a task with its fallbacks and undo tasks at all levels, each with its path."""
    bodies: list[tuple[JsonPath, TaskBody]] = [((), task)]
    for path, body in bodies:  # grows while it is iterated
        if body.undo is not None:
            bodies.append(((*path, "undo"), body.undo))
        for index, fallback in enumerate(body.fallbacks):
            bodies.append(((*path, "fallbacks", index), fallback))
    return bodies


def _strings_with_references(body: TaskBody) -> Iterator[str]:
    return (text for text in iter_strings(body.arguments, keys=False) if "${" in text)


def _check_nested_bodies(task: TaskBody, scope: _Scope) -> Iterator[Finding]:
    for path, body in _nested_bodies(task):
        for inner, text in _check_single_body(body, scope):
            yield (*path, *inner), text


def _check_single_body(body: TaskBody, scope: _Scope) -> Iterator[Finding]:
    tool = scope.tools.get(body.tool) if body.tool is not None else None
    if tool is not None:
        yield from _check_arguments(body, tool, scope)
    elif body.tool is not None and (scope.tools or scope.servers) and not scope.may_be_server_tool(body.tool):
        hint = scope.hints(body.tool, scope.tools)
        yield ("tool",), f"there is no tool {body.tool!r}{hint}; describe it under `tools`"
    if body.resources or (tool is not None and tool.resources):
        yield from _check_resources(body, tool, scope)
    if body.when is not None:
        try:
            Condition.parse(body.when)
        except ExpressionError as error:
            yield ("when",), str(error)
    for text in _strings_with_references(body):
        try:
            find_references(text)
        except ExpressionError as error:
            yield ("arguments",), str(error)


def _check_resources(body: TaskBody, tool: ToolSpec | None, scope: _Scope) -> Iterator[Finding]:
    for resource in body.resources:
        yield from _check_resource_declared(resource, scope)
    taken = tool.resources if tool is not None else {}
    for resource, amount in {**taken, **body.resources}.items():
        if amount > scope.capacity.get(resource, amount):
            own = resource in body.resources
            taker = "it takes" if own or tool is None else f"its tool {tool.name!r} takes"
            text = f"{taker} {amount:g} of {resource!r}, and the plan has {scope.capacity[resource]:g} in all"
            yield ("resources", resource) if own else ("tool",), text


def _check_arguments(body: TaskBody, tool: ToolSpec, scope: _Scope) -> Iterator[Finding]:
    given, parameters = body.arguments, tool.parameters
    for name, kind in parameters.items():
        if name not in given:
            if name in tool.optional:
                continue
            yield ("arguments",), f"tool {tool.name!r} needs the argument {brief_repr(name)} ({kind})"
        elif expected := _type_mismatch(given[name], kind, scope.objects):
            text = (
                f"argument {brief_repr(name)} of tool {tool.name!r} is {brief_repr(given[name])}, expected {expected}"
            )
            yield ("arguments", name), text
    for name in given if parameters else ():
        if name not in parameters:
            hint = scope.hints(name, parameters)
            yield (
                ("arguments", name),
                f"tool {tool.name!r} has no parameter {brief_repr(name)}{hint}; it has {brief_repr(list(parameters))}",
            )
    for name, where in {} if parameters else scope.placeholders(tool).items():
        if name not in given:
            escape = f"; write {{{{{name}}}}} there if the braces are meant" if where == "command" else ""
            yield ("arguments",), f"tool {tool.name!r} names {{{name}}} in its {where}: give that argument{escape}"


def _type_mismatch(value: JsonValue, kind: str, objects: Mapping[str, str]) -> str:
    """Return the type that was expected instead of this value; "" if it fits or is known only at run time."""
    if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
        return ""
    if kind in _PARAMETER_TYPES:
        odd = isinstance(value, bool) and kind in ("integer", "number")
        return "" if isinstance(value, _PARAMETER_TYPES[kind]) and not odd else f"{kind}, not {json_type_name(value)}"
    if kind not in objects.values() or (isinstance(value, str) and objects.get(value) == kind):
        return ""
    return f"an object of type {kind!r} as `objects` states them"


class _DependencyChecker:
    """Check of the dependencies between tasks and of the results that they read."""

    def __init__(self, tasks: Sequence[Task], hints: NameSuggester) -> None:
        self._tasks = tasks
        self._hints = hints
        self._index: dict[str, int] = {}
        for index, task in enumerate(tasks):
            self._index.setdefault(task.id, index)

    def check(self) -> list[Finding]:
        """Return the problems of all tasks."""
        findings = [finding for index in range(len(self._tasks)) for finding in self._check_dependencies(index)]
        graph = [[self._index[i] for i in t.depends_on if i in self._index and i != t.id] for t in self._tasks]
        findings += map(self._cycle_finding, find_cycles(graph))
        uses = [use for index in range(len(self._tasks)) for use in self._result_references(index)]
        findings += [finding for use in uses for finding in self._check_task_exists(*use)]
        if not findings:  # what a task can see is known only where the dependencies are sound
            targets = [(index, self._index[name]) for index, _, name, _ in uses]
            apart = unreachable_pairs(graph, targets)
            findings += [
                self._missing_dependency(*use) for use, pair in zip(uses, targets, strict=True) if pair in apart
            ]
        return findings

    def _check_dependencies(self, index: int) -> Iterator[Finding]:
        task = self._tasks[index]
        seen: set[str] = set()
        for number, needed in enumerate(task.depends_on):
            at: JsonPath = ("tasks", index, "depends_on", number)
            if needed == task.id:
                yield at, f"task {task.id!r} depends on itself"
            elif needed not in self._index:
                hint = self._hints(needed, self._index)
                yield at, f"task {task.id!r} depends on {needed!r}, which is no task of the plan{hint}"
            elif needed in seen:
                yield at, f"task {task.id!r} depends on {needed!r} twice"
            seen.add(needed)

    def _cycle_finding(self, cycle: list[int]) -> Finding:
        names = [repr(self._tasks[index].id) for index in (*cycle, cycle[0])]
        if len(names) > _MAX_CYCLE_NAMES:
            left_out = len(names) - _MAX_CYCLE_NAMES
            names[_MAX_CYCLE_NAMES - 1 : -1] = [f"… ({left_out} more) …"]
        text = f"the tasks depend on one another in a circle: {' → '.join(names)}; remove one of these dependencies"
        return ("tasks", cycle[0], "depends_on"), text

    def _result_references(self, index: int) -> Iterator[tuple[int, JsonPath, str, str]]:
        for path, name, text in result_references(self._tasks[index], self._index):
            yield index, ("tasks", index, *path), name, text

    def _check_task_exists(self, index: int, at: JsonPath, name: str, text: str) -> Iterator[Finding]:
        if name not in self._index:
            hint = self._hints(name, self._index)
            yield at, f"task {self._tasks[index].id!r} refers to {text}, and {name!r} is no task of the plan{hint}"

    def _missing_dependency(self, index: int, at: JsonPath, name: str, text: str) -> Finding:
        task = self._tasks[index].id
        if task == name:
            return at, f"task {task!r} refers to its own output with {text}"
        why = f"does not depend on {name!r}: add {name!r} to its depends_on"
        return at, f"task {task!r} refers to {text} and {why}"


def _valid_references(text: str, known: Container[str]) -> tuple[Reference, ...]:
    try:
        return find_references(text, known)
    except ExpressionError:
        return ()  # reported with the task


def _condition_result_names(condition: str | None) -> Iterable[str]:
    if condition is None:
        return ()
    try:
        return sorted(Condition.parse(condition).result_names())
    except ExpressionError:
        return ()  # reported with the task
