"""Checks of a plan as a whole: unique names, tools and arguments, resources, references, no dependency cycles."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import NoneType
from typing import Final

from pydantic import JsonValue

from replanning.errors import ExpressionError, Problem
from replanning.plan.conditions import Condition
from replanning.plan.json_values import iter_strings, json_type_name
from replanning.plan.messages import NameSuggester, brief_repr, first_problems, format_path
from replanning.plan.references import (
    IDEMPOTENCY_KEY,
    Reference,
    find_references,
    has_references,
    placeholders,
)
from replanning.plan.tasks import McpServer, Task, TaskBody, ToolSpec
from replanning.plan.types import JsonPath

Finding = tuple[JsonPath, str]
_Expression = Condition | tuple[Reference, ...] | str
"""Parsed condition, or references of a text; or why there is none."""
_ParsedBody = tuple[JsonPath, TaskBody, list[tuple[str, _Expression]]]
"""A task, fallback or undo task: its path in the task, itself, and its expressions with the fields that hold them."""
Graph = Sequence[Sequence[int]]
"""Dependencies of numbered nodes: `graph[i]` are the nodes that i depends on."""

_REQUIRED_FIELD_BY_KIND: Final = {
    "shell": "command",
    "http": "url",
    "python": "callable",
    "mcp": "server",
}
_PATTERN_FIELDS: Final = (
    "requires",
    "adds",
    "removes",
    "needs",
    "produces",
    "command",
    "url",
    "headers",
)
_MAX_CYCLE_NAMES: Final = 10
_TARGETS_PER_PASS: Final = 4096
"""Targets answered for in one pass: one bit each per node, so half a KiB per node."""
_JSON_TYPES: Final = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
_PARAMETER_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "path": (str, list, tuple),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "any": (object,),
}

_SIMPLE_TYPES: Final[Mapping[str, frozenset[type]]] = {
    **{name: frozenset({kind}) for name, kind in _JSON_TYPES.items()},
    "number": frozenset({int, float}),
    "any": frozenset({*_JSON_TYPES.values(), float, NoneType}),
}
"""Types of most values of parameters, without subclasses."""


def check_plan(
    tasks: Sequence[Task],
    tools: Sequence[ToolSpec],
    *,
    resources: Mapping[str, float],
    objects: Mapping[str, str],
    servers: Mapping[str, McpServer],
) -> list[Problem]:
    """Return everything that is wrong with a plan whose parts are each valid."""
    scope = TaskScope({tool.name: tool for tool in tools}, resources, objects, servers)
    ids = {task.id for task in tasks}
    bodies = [_parsed_bodies(task, ids) for task in tasks]
    findings = chain(
        _check_unique("tool", [tool.name for tool in tools], "name"),
        (
            (("mcp", name), f"MCP server {name!r}: {text}")
            for name, server in servers.items()
            for text in server.problems()
        ),
        (
            (("tools", index, *path), f"tool {tool.name!r}{text}")
            for index, tool in enumerate(tools)
            for path, text in _check_tool(tool, scope)
        ),
        (
            (("tasks", index, *path), f"task {task.id!r}: {text}")
            for index, task in enumerate(tasks)
            for path, text in _check_bodies(bodies[index], scope)
        ),
        _check_graph(tasks, bodies, scope.hints),
    )
    return first_problems(Problem(format_path(path), text) for path, text in findings)


def check_graph(tasks: Sequence[Task]) -> list[Problem]:
    """Return the problems between tasks: duplicate ids, wrong dependencies, references to unavailable results."""
    ids = {task.id for task in tasks}
    findings = _check_graph(tasks, [_parsed_bodies(task, ids) for task in tasks], NameSuggester())
    return first_problems(Problem(format_path(path), text) for path, text in findings)


def _check_graph(
    tasks: Sequence[Task], bodies: Sequence[Sequence[_ParsedBody]], hints: NameSuggester
) -> Iterator[Finding]:
    yield from _check_unique("task", [task.id for task in tasks], "id")
    number_of = {
        task.id: number for number, task in reversed([*enumerate(tasks)])
    }  # the first of those with one id
    sound = True
    for index, task in enumerate(tasks):
        seen: set[str] = set()
        for place, needed in enumerate(task.depends_on):
            why = ""
            if needed == task.id:
                why = "itself"
            elif needed not in number_of:
                why = f"{needed!r}, which is no task of the plan{hints(needed, number_of)}"
            elif needed in seen:
                why = f"{needed!r} twice"
            if why:
                sound = False
                yield ("tasks", index, "depends_on", place), f"task {task.id!r} depends on {why}"
            seen.add(needed)
    graph = [
        [number_of[i] for i in task.depends_on if i in number_of and i != task.id] for task in tasks
    ]
    for cycle in find_cycles(graph):
        names = [repr(tasks[number].id) for number in (*cycle, cycle[0])]
        if len(names) > _MAX_CYCLE_NAMES:
            names[_MAX_CYCLE_NAMES - 1 : -1] = [f"… ({len(names) - _MAX_CYCLE_NAMES} more) …"]
        text = f"the tasks depend on one another in a circle: {' → '.join(names)}; remove one of these dependencies"
        sound = False
        yield ("tasks", cycle[0], "depends_on"), text
    uses = [
        (number, *use)
        for number, task in enumerate(tasks)
        for use in _results_read(task, bodies[number])
    ]
    for number, path, name, text in uses:
        if name not in number_of:
            sound = False
            told = f"task {tasks[number].id!r} refers to {text}, and {name!r} is no task of the plan{hints(name, number_of)}"
            yield ("tasks", number, *path), told
    if uses and sound:  # what a task can see is known only where the dependencies are sound
        apart = unreachable_pairs(graph, [(number, number_of[name]) for number, _, name, _ in uses])
        for number, path, name, text in uses:
            if (number, number_of[name]) in apart:
                why = f"refers to {text} and does not depend on {name!r}: add {name!r} to its depends_on"
                if tasks[number].id == name:
                    why = f"refers to its own output with {text}"
                yield ("tasks", number, *path), f"task {tasks[number].id!r} {why}"


def check_task(task: TaskBody, scope: TaskScope) -> list[str]:
    """Return the problems of one task and its fallbacks, without its relations to other tasks."""
    if _is_simple_call(task, scope):
        return []
    problems = [
        f"{format_path(path[:2])}: {text}" if path and path[0] in ("fallbacks", "undo") else text
        for path, text in _check_bodies(_parsed_bodies(task), scope)
    ]
    if problems:
        scope.hints = NameSuggester()  # its bound is for one task
    return problems


def _is_simple_call(task: TaskBody, scope: TaskScope) -> bool:
    """Return whether a task only calls a tool, with values of the stated types: a quick look, as most calls are like that."""
    tool = scope.tools.get(task.tool or "")
    if (
        tool is None
        or not tool.parameters
        or task.resources
        or task.fallbacks
        or task.undo
        or task.when
    ):
        return False
    given, parameters = task.arguments, tool.parameters
    required, taken = scope.demands(tool)
    for name in given:
        if type(given[name]) not in _SIMPLE_TYPES.get(parameters.get(name, ""), ()):
            return False
    return not taken and all(map(given.__contains__, required)) and not has_references(given)


def result_references(task: Task, known: Container[str]) -> Iterator[tuple[JsonPath, str, str]]:
    """Yield the results that a task and its fallbacks read: path, id of the other task, and the reference as written.

    Args:
        task: the task.
        known: the ids of all tasks, which separate a task's id from a path into its output.
    """
    return _results_read(task, _parsed_bodies(task, known, "results"))


def may_read_results(task: Task) -> bool:
    """Return whether a task, or a fallback or undo task of it, may read results: a quick look, as most read none."""
    return bool(task.when or task.fallbacks or task.undo or has_references(task.arguments))


def _results_read(task: Task, bodies: Sequence[_ParsedBody]) -> Iterator[tuple[JsonPath, str, str]]:
    for path, _, expressions in bodies:
        for name, parsed in expressions:
            if isinstance(parsed, Condition):
                for read in sorted(parsed.names("results")):
                    yield (*path, name), read, f"results.{read}"
            elif not isinstance(parsed, str):  # which is reported with the task
                for reference in parsed:
                    if reference.task is not None and not (
                        "undo" in path and reference.task == task.id
                    ):
                        yield (*path, name), reference.task, str(reference)


def nested_bodies(task: TaskBody) -> list[tuple[JsonPath, TaskBody]]:
    """Return a task with its fallbacks and undo tasks at all levels that state any field, each with its path."""
    bodies: list[tuple[JsonPath, TaskBody]] = [((), task)]
    if task.undo is None and not task.fallbacks:
        return bodies
    for path, body in bodies:  # grows while it is iterated
        if body.undo is not None:
            bodies.append(((*path, "undo"), body.undo))
        for index, fallback in enumerate(body.fallbacks):
            if fallback.model_fields_set:  # hundreds of thousands of empty ones take a second
                bodies.append(((*path, "fallbacks", index), fallback))
    return bodies


@dataclass(eq=False)
class TaskScope:
    """Names that the tasks of a plan may use.

    Args:
        tools: the described tools by name; if there are none, any tool name is accepted.
        capacity: the amount of each resource.
        objects: the type of each object that arguments may name.
        servers: the servers that may have further tools.
        hints: finds the names that somebody may have meant.
    """

    tools: Mapping[str, ToolSpec]
    capacity: Mapping[str, float]
    objects: Mapping[str, str]
    servers: Mapping[str, McpServer] = field(default_factory=dict)
    hints: NameSuggester = field(default_factory=NameSuggester)
    _placeholders: dict[str, dict[str, str]] = field(default_factory=dict)
    _demands: dict[str, tuple[list[str], list[tuple[str, float]]]] = field(default_factory=dict)

    @cached_property
    def object_types(self) -> frozenset[str]:
        """Types of the objects that arguments may name."""
        return frozenset(self.objects.values())

    @cached_property
    def _server_tools(self) -> dict[str, frozenset[str] | None]:
        return {
            key: None if one.tools is None else frozenset(one.tools)
            for key, one in self.servers.items()
        }

    def may_be_served(self, name: str) -> bool:
        """Return whether a server may have a tool of this name: only the server itself can confirm it."""
        dots = (place for place, character in enumerate(name[:-1]) if character == ".")
        offers = (
            (self._server_tools.get(name[:dot], frozenset()), name[dot + 1 :]) for dot in dots
        )
        return any(names is None or own in names for names, own in offers)

    def demands(self, tool: ToolSpec) -> tuple[list[str], list[tuple[str, float]]]:
        """Return the parameters that a tool cannot do without, and the resources of which it takes too much."""
        if tool.name not in self._demands:
            optional = frozenset(tool.optional)
            required = [name for name in tool.parameters if name not in optional]
            self._demands[tool.name] = required, self.excess(tool.resources)
        return self._demands[tool.name]

    def excess(self, resources: Mapping[str, float]) -> list[tuple[str, float]]:
        """Return the resources with an amount above the capacity."""
        return [
            (name, amount)
            for name, amount in resources.items()
            if amount > self.capacity.get(name, amount)
        ]

    def placeholders(self, tool: ToolSpec) -> dict[str, str]:
        """Return the placeholders in the patterns of a tool, each with the first field that has it."""
        if tool.name not in self._placeholders:
            fields: dict[str, str] = {}
            for field_name in _PATTERN_FIELDS:
                value: str | Iterable[str] | Mapping[str, str] = getattr(tool, field_name)
                if not value:
                    continue
                texts = (
                    (value,)
                    if isinstance(value, str)
                    else value.values()
                    if isinstance(value, Mapping)
                    else value
                )
                for text in texts:
                    for placeholder in placeholders(text):
                        if placeholder != IDEMPOTENCY_KEY:
                            fields.setdefault(placeholder, field_name)
            self._placeholders[tool.name] = fields
        return self._placeholders[tool.name]


def _check_unique(what: str, names: Sequence[str], key: str) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if (before := first.setdefault(name, index)) != index:
            text = (
                f"{what} {name!r} is there already, as {what}s[{before}]; each needs its own {key}"
            )
            yield (f"{what}s", index, key), text


def _check_tool(tool: ToolSpec, scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of a tool; the messages continue the words `tool 'name'`."""
    needed = _REQUIRED_FIELD_BY_KIND.get(tool.kind or "")
    if needed and not getattr(tool, needed):
        yield (), f" is of kind {tool.kind} and has no {needed}"
    if tool.callable is not None and not all(tool.callable.partition(":")):
        yield ("callable",), f": {brief_repr(tool.callable)} is not of the form module:function"
    if tool.server is not None and tool.server not in scope.servers:
        yield (
            ("server",),
            f": `mcp` describes no server {tool.server!r}{scope.hints(tool.server, scope.servers)}",
        )
    for parameter, kind in tool.parameters.items():
        if kind not in _PARAMETER_TYPES and kind not in scope.object_types:
            known = (
                f"expected one of {', '.join(_PARAMETER_TYPES)}, or a type that `objects` states"
            )
            hint = scope.hints(kind, {*_PARAMETER_TYPES, *scope.object_types})
            yield ("parameters", parameter), f": there is no type {kind!r}{hint}; {known}"
    for parameter in tool.optional:
        if parameter not in tool.parameters:
            hint = scope.hints(parameter, tool.parameters)
            yield ("optional",), f": {parameter!r} is no parameter of it{hint}"
    for hole, name in scope.placeholders(tool).items() if tool.parameters else ():
        if hole not in tool.parameters:
            yield (
                (name,),
                f": {{{hole}}} in {name} is no parameter of it{scope.hints(hole, tool.parameters)}",
            )
    for resource in tool.resources:
        yield from ((path, f": {text}") for path, text in _check_resource_declared(resource, scope))


def _check_resource_declared(resource: str, scope: TaskScope) -> Iterator[Finding]:
    if resource not in scope.capacity:
        hint = scope.hints(resource, scope.capacity)
        text = f"the plan has no resource {resource!r}{hint}; state its capacity under `resources`"
        yield ("resources", resource), text


def _parsed_bodies(
    task: TaskBody, known: Container[str] = (), about: str = ""
) -> list[_ParsedBody]:
    return [
        (path, body, [*_parsed_expressions(body, known, about)])
        for path, body in nested_bodies(task)
    ]


def _parsed_expressions(
    body: TaskBody, known: Container[str], about: str
) -> Iterator[tuple[str, _Expression]]:
    """Yield the expressions of a task, fallback or undo task, each with the field that holds it."""
    if has_references(body.arguments):
        for text in iter_strings(body.arguments, keys=False):
            if "${" in text:
                try:
                    yield "arguments", find_references(text, known)
                except ExpressionError as error:
                    yield "arguments", str(error)
    if body.when is not None and about in body.when:
        try:
            yield "when", Condition.parse(body.when)
        except ExpressionError as error:
            yield "when", str(error)


def _check_bodies(bodies: Sequence[_ParsedBody], scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of a task, its fallbacks and undo tasks."""
    for path, body, expressions in bodies:
        tool = scope.tools.get(body.tool) if body.tool is not None else None
        required, taken = scope.demands(tool) if tool is not None else ([], [])
        if tool is not None:
            given, parameters = body.arguments, tool.parameters
            for name in given:
                if name in parameters and (
                    expected := _type_mismatch(given[name], parameters[name], scope)
                ):
                    found = f"argument {brief_repr(name)} of tool {tool.name!r} is {brief_repr(given[name])}"
                    yield (*path, "arguments", name), f"{found}, expected {expected}"
            for name in required:  # not all parameters: each of many tasks may leave out many
                if name not in given:
                    needed = f"{brief_repr(name)} ({parameters[name]})"
                    yield (*path, "arguments"), f"tool {tool.name!r} needs the argument {needed}"
            for name in given if parameters else ():
                if name not in parameters:
                    hint = scope.hints(name, parameters)
                    text = f"has no parameter {brief_repr(name)}{hint}; it has {brief_repr(list(parameters))}"
                    yield (*path, "arguments", name), f"tool {tool.name!r} {text}"
            for name, where in {} if parameters else scope.placeholders(tool).items():
                if name not in given:
                    escape = (
                        f"; write {{{{{name}}}}} there if the braces are meant"
                        if where == "command"
                        else ""
                    )
                    text = f"tool {tool.name!r} names {{{name}}} in its {where}: give that argument{escape}"
                    yield (*path, "arguments"), text
        elif (
            body.tool is not None
            and (scope.tools or scope.servers)
            and not scope.may_be_served(body.tool)
        ):
            hint = scope.hints(body.tool, scope.tools)
            yield (
                (*path, "tool"),
                f"there is no tool {body.tool!r}{hint}; describe it under `tools`",
            )
        for resource in body.resources:
            yield from (
                ((*path, *inner), text) for inner, text in _check_resource_declared(resource, scope)
            )
        if taken or body.resources:
            taken = [(name, amount) for name, amount in taken if name not in body.resources]
            taken += scope.excess(body.resources)
        for resource, amount in taken:
            own = resource in body.resources
            taker = "it takes" if own else f"its tool {body.tool!r} takes"
            text = f"{taker} {amount:g} of {resource!r}, and the plan has {scope.capacity[resource]:g} in all"
            yield (*path, *(("resources", resource) if own else ("tool",))), text
        for name, parsed in expressions:
            if isinstance(parsed, str):
                yield (*path, name), parsed


def _type_mismatch(value: JsonValue, kind: str, scope: TaskScope) -> str:
    """Return the type that was expected instead of this value; "" if it fits or is known only at run time."""
    if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
        return ""
    if kind in _PARAMETER_TYPES and not (kind == "path" and kind in scope.object_types):
        odd = isinstance(value, bool) and kind in ("integer", "number")
        return (
            ""
            if isinstance(value, _PARAMETER_TYPES[kind]) and not odd
            else f"{kind}, not {json_type_name(value)}"
        )
    if kind not in scope.object_types or (
        isinstance(value, str) and scope.objects.get(value) == kind
    ):
        return ""
    return f"an object of type {kind!r} as `objects` states them"


# Algorithms on graphs of any size and shape: none recurses or is quadratic in the number of nodes.


def reverse_graph(dependencies: Graph) -> list[list[int]]:
    """Return for each node the nodes that depend on it."""
    dependents: list[list[int]] = [[] for _ in dependencies]
    for node, needed in enumerate(dependencies):
        for before in needed:
            dependents[before].append(node)
    return dependents


def topological_order(dependencies: Graph) -> list[int]:
    """Return the nodes, each after its dependencies, without those on a cycle or behind one."""
    dependents = reverse_graph(dependencies)
    missing = [len(needed) for needed in dependencies]
    order = [node for node, count in enumerate(missing) if not count]
    for node in order:  # grows while it is walked
        for after in dependents[node]:
            missing[after] -= 1
            if not missing[after]:
                order.append(after)
    return order


def find_cycles(dependencies: Graph) -> list[list[int]]:
    """Return one cycle for each set of nodes that depend on one another: n0 depends on n1 … depends on n0."""
    if all(before < node for node, needed in enumerate(dependencies) for before in needed):
        return []  # most plans list their tasks in order
    core = set(range(len(dependencies))).difference(topological_order(dependencies))
    if not core:
        return []
    inner = [
        [node for node in needed if node in core] if i in core else []
        for i, needed in enumerate(dependencies)
    ]
    found = [
        _shortest_cycle(inner, set(component))
        for component in _strongly_connected_components(inner, sorted(core))
    ]
    return sorted(cycle for cycle in found if cycle)


def unreachable_pairs(
    dependencies: Graph, queries: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return the pairs (node, target) of `queries` in which the node depends on the target neither directly nor indirectly.

    The graph must have no cycle.
    """
    wanted: dict[int, list[int]] = {}
    for node, target in queries:
        if target not in dependencies[node]:
            wanted.setdefault(target, []).append(node)
    if not wanted:
        return set()
    order = topological_order(dependencies)
    position = {node: place for place, node in enumerate(order)}
    targets = sorted(wanted, key=position.__getitem__)
    found: set[tuple[int, int]] = set()
    for first in range(0, len(targets), _TARGETS_PER_PASS):
        batch = targets[first : first + _TARGETS_PER_PASS]
        last = max(position[node] for target in batch for node in wanted[target])
        own = {target: 1 << bit for bit, target in enumerate(batch)}
        ancestors: dict[int, int] = {}  # for each node a bit for each target that it depends on
        for node in order[position[batch[0]] : last + 1]:
            bits = 0
            for before in dependencies[node]:
                bits |= ancestors.get(before, 0) | own.get(before, 0)
            if bits:
                ancestors[node] = bits
        for bit, target in enumerate(batch):
            found.update(
                (node, target) for node in wanted[target] if not ancestors.get(node, 0) >> bit & 1
            )
    return found


def _strongly_connected_components(
    dependencies: Graph, nodes: Iterable[int]
) -> Iterator[list[int]]:
    seen: set[int] = set()
    order = []  # in which a depth-first search leaves the nodes
    for root in nodes:
        walk = [] if root in seen else [(root, iter(dependencies[root]))]
        seen.add(root)
        while walk:
            node, rest = walk[-1]
            before = next((before for before in rest if before not in seen), None)
            if before is None:
                order.append(node)
                walk.pop()
            else:
                seen.add(before)
                walk.append((before, iter(dependencies[before])))
    dependents = reverse_graph(dependencies)
    seen.clear()
    for root in reversed(order):
        if root in seen:
            continue
        seen.add(root)
        component = [root]
        for node in component:  # grows while it is walked
            fresh = [after for after in dependents[node] if after not in seen]
            seen.update(fresh)
            component.extend(fresh)
        yield component


def _shortest_cycle(dependencies: Graph, component: set[int]) -> list[int]:
    """Return the shortest cycle through the first node of a component; [] if there is none."""
    start = min(component)
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for before in dependencies[node]:
            if before == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if before in component and before not in came_from:
                came_from[before] = node
                queue.append(before)
    return []
