"""What must be true of a plan as a whole: names, tools and arguments, resources, references, no cycles."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pydantic import JsonValue

from replanning.errors import ExpressionError, Problem
from replanning.plan.conditions import Condition
from replanning.plan.graph import find_cycles, unreachable_pairs
from replanning.plan.messages import JsonPath, NameSuggester, brief_repr, format_path
from replanning.plan.references import Reference, find_references, json_type_name, placeholders, texts_with_references

if TYPE_CHECKING:
    from replanning.plan.document import Plan
    from replanning.plan.tasks import McpServer, Task, TaskBody, ToolSpec


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


def check_plan(plan: Plan) -> list[Problem]:
    """Everything that is wrong with a plan whose parts are each valid."""
    scope = _Scope({tool.name: tool for tool in plan.tools}, plan.resources, plan.objects, plan.mcp)
    findings = [*_check_unique("tool", [tool.name for tool in plan.tools]), *_check_ids(plan.tasks)]
    findings += [*_check_servers(plan), *_check_tools(plan, scope)]
    for index, task in enumerate(plan.tasks):
        findings += [
            (("tasks", index, *path), f"task {task.id!r}: {text}") for path, text in _check_nested_bodies(task, scope)
        ]
    findings += _DependencyChecker(plan.tasks, scope.hints).check()
    return [Problem(format_path(path), text) for path, text in findings]


def check_graph(tasks: Sequence[Task]) -> list[Problem]:
    """What is wrong with how tasks stand to one another: their ids, dependencies, and the results that they read."""
    findings = [*_check_ids(tasks), *_DependencyChecker(tasks, NameSuggester()).check()]
    return [Problem(format_path(path), text) for path, text in findings]


def check_task(
    task: TaskBody, tools: Mapping[str, ToolSpec], capacity: Mapping[str, float], objects: Mapping[str, str]
) -> list[str]:
    """What is wrong with one task, apart from how it stands to other tasks.

    Args:
        task: the task, checked with its fallbacks.
        tools: the described tools; none means that any name will do.
        capacity: how much there is of each resource.
        objects: the type of each object that arguments may name.
    """
    findings = _check_nested_bodies(task, _Scope(tools, capacity, objects))
    return [
        f"{format_path(path[:2])}: {text}" if path and path[0] in ("fallbacks", "undo") else text
        for path, text in findings
    ]


def result_references(task: Task, known: Container[str]) -> Iterator[tuple[JsonPath, str, str]]:
    """The results that a task reads, with its fallbacks: the place, whose result, and how it is written.

    Args:
        task: the task.
        known: the ids of the tasks, which tell a task's name from a part of its output.
    """
    for path, body in _nested_bodies(task):
        for text in texts_with_references(body.arguments) if body.arguments else ():
            for reference in _valid_references(text, known):
                if reference.task is not None and not ("undo" in path and reference.task == task.id):
                    yield (*path, "arguments"), reference.task, str(reference)
        for name in _condition_result_names(body.when):
            yield (*path, "when"), name, f"results.{name}"


@dataclass(frozen=True)
class _Scope:
    """What the tasks of a plan may name."""

    tools: Mapping[str, ToolSpec]
    capacity: Mapping[str, float]
    objects: Mapping[str, str]
    servers: Mapping[str, McpServer] = field(default_factory=dict)
    hints: NameSuggester = field(default_factory=NameSuggester)
    _placeholders: dict[str, dict[str, str]] = field(default_factory=dict)

    def placeholders(self, tool: ToolSpec) -> dict[str, str]:
        """The arguments that the patterns of a tool name, each with the first field that names it."""
        if tool.name not in self._placeholders:
            found: dict[str, str] = {}
            for name in _PATTERN_FIELDS:
                for text in _pattern_texts(getattr(tool, name)):
                    for hole in placeholders(text):
                        found.setdefault(hole, name)
            self._placeholders[tool.name] = found
        return self._placeholders[tool.name]

    def may_be_server_tool(self, name: str) -> bool:
        """Whether this may be a tool of a server, which is known only when the server is asked."""
        found = [(server, name[len(key) + 1 :]) for key, server in self.servers.items() if name.startswith(f"{key}.")]
        return any(tool and (server.tools is None or tool in server.tools) for server, tool in found)


def _pattern_texts(value: str | Iterable[str] | Mapping[str, str] | None) -> Iterable[str]:
    if isinstance(value, Mapping):
        return value.values()
    return (value,) if isinstance(value, str) else value or ()


def _check_ids(tasks: Sequence[Task]) -> Iterator[Finding]:
    return _check_unique("task", [task.id for task in tasks], "id")


def _check_unique(what: str, names: Sequence[str], key: str = "name") -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if (before := first.setdefault(name, index)) != index:
            text = f"{what} {name!r} is there already, as {what}s[{before}]; each needs its own {key}"
            yield (f"{what}s", index, key), text


def _check_servers(plan: Plan) -> Iterator[Finding]:
    for name, server in plan.mcp.items():
        for text in server.problems():
            yield ("mcp", name), f"MCP server {name!r}: {text}"


def _check_tools(plan: Plan, scope: _Scope) -> Iterator[Finding]:
    types = {*_PARAMETER_TYPES, *plan.objects.values()}
    for index, tool in enumerate(plan.tools):
        at: JsonPath = ("tools", index)
        needed = _REQUIRED_FIELD_BY_KIND.get(tool.kind or "")
        if needed and not getattr(tool, needed):
            yield at, f"tool {tool.name!r} is of kind {tool.kind} and has no {needed}"
        if tool.callable is not None and not all(tool.callable.partition(":")):
            yield (
                (*at, "callable"),
                f"tool {tool.name!r}: {brief_repr(tool.callable)} is not of the form module:function",
            )
        if tool.server is not None and tool.server not in scope.servers:
            hint = scope.hints(tool.server, scope.servers)
            yield (*at, "server"), f"tool {tool.name!r}: `mcp` describes no server {tool.server!r}{hint}"
        yield from ((at + path, f"tool {tool.name!r}: {text}") for path, text in _check_parameters(tool, types, scope))
        for resource in tool.resources:
            yield from _check_resource_declared(("resources", resource), resource, scope, at, f"tool {tool.name!r}: ")


def _check_parameters(tool: ToolSpec, types: Collection[str], scope: _Scope) -> Iterator[Finding]:
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


def _check_resource_declared(
    path: JsonPath, resource: str, scope: _Scope, at: JsonPath = (), prefix: str = ""
) -> Iterator[Finding]:
    if resource not in scope.capacity:
        hint = scope.hints(resource, scope.capacity)
        text = f"the plan has no resource {resource!r}{hint}; state its capacity under `resources`"
        yield (*at, *path), prefix + text


def _nested_bodies(task: TaskBody) -> list[tuple[JsonPath, TaskBody]]:
    """A task and, however deeply nested, what may take its place or undo it."""
    found: list[tuple[JsonPath, TaskBody]] = [((), task)]
    for path, body in found:  # grows while it is walked
        if body.undo is not None:
            found.append(((*path, "undo"), body.undo))
        for index, fallback in enumerate(body.fallbacks):
            found.append(((*path, "fallbacks", index), fallback))
    return found


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
    for text in texts_with_references(body.arguments) if body.arguments else ():
        try:
            find_references(text)
        except ExpressionError as error:
            yield ("arguments",), str(error)


def _check_resources(body: TaskBody, tool: ToolSpec | None, scope: _Scope) -> Iterator[Finding]:
    for resource in body.resources:
        yield from _check_resource_declared(("resources", resource), resource, scope)
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
    """What was expected instead of this argument; empty where it fits or is known only at run time."""
    if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
        return ""
    if kind in _PARAMETER_TYPES:
        odd = isinstance(value, bool) and kind in ("integer", "number")
        return "" if isinstance(value, _PARAMETER_TYPES[kind]) and not odd else f"{kind}, not {json_type_name(value)}"
    if kind not in objects.values() or (isinstance(value, str) and objects.get(value) == kind):
        return ""
    return f"an object of type {kind!r} as `objects` states them"


class _DependencyChecker:
    """How tasks stand to one another."""

    def __init__(self, tasks: Sequence[Task], hints: NameSuggester) -> None:
        self._tasks = tasks
        self._hints = hints
        self._index: dict[str, int] = {}
        for index, task in enumerate(tasks):
            self._index.setdefault(task.id, index)

    def check(self) -> list[Finding]:
        """Everything that is wrong between tasks."""
        findings = [finding for index in range(len(self._tasks)) for finding in self._check_dependencies(index)]
        graph = [[self._index[i] for i in t.depends_on if i in self._index and i != t.id] for t in self._tasks]
        circles = find_cycles(graph)
        findings += map(self._cycle_finding, circles)
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

    def _cycle_finding(self, circle: list[int]) -> Finding:
        names = [repr(self._tasks[index].id) for index in (*circle, circle[0])]
        if len(names) > _MAX_CYCLE_NAMES:
            left_out = len(names) - _MAX_CYCLE_NAMES
            names[_MAX_CYCLE_NAMES - 1 : -1] = [f"… ({left_out} more) …"]
        text = f"the tasks depend on one another in a circle: {' → '.join(names)}; remove one of these dependencies"
        return ("tasks", circle[0], "depends_on"), text

    def _result_references(self, index: int) -> Iterator[tuple[int, JsonPath, str, str]]:
        """The results that a task reads: the task's index, the place, whose result, and how it is written."""
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
