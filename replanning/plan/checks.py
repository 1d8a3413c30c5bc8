"""Checks of a whole plan: names, tools, arguments, resources, references, cycles and secrets."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, islice
from types import NoneType
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, JsonValue

from replanning.errors import ExpressionError, PlanError, Problem
from replanning.plan.conditions import OUTPUT_ROOTS, Condition
from replanning.plan.elements import LIST_FIELDS, template_of
from replanning.plan.inclusion import declared_parameters, with_problems
from replanning.plan.json_values import iter_strings, json_type_name
from replanning.plan.messages import (
    MAX_PROBLEMS,
    NameSuggester,
    brief_repr,
    first_problems,
    format_path,
    parse_path,
)
from replanning.plan.parameters import PARAMETERS, Parameters, declaration_problems
from replanning.plan.references import (
    CONFIRMED_ROOTS,
    ELEMENT_ROOTS,
    IDEMPOTENCY_KEY,
    UNDO_ROOTS,
    Reference,
    find_references,
    has_references,
    placeholders,
    root_reference_problem,
    root_references,
)
from replanning.plan.tasks import (
    Confirmation,
    Expectation,
    McpServer,
    SubPlan,
    Task,
    TaskBody,
    ToolSpec,
    Undo,
    asking_problem,
    confirmation_problem,
)
from replanning.plan.types import JsonPath, TaskId
from replanning.secrets import MASK, Redactor, name_fields

Finding = tuple[JsonPath, str]
_Expression = Condition | tuple[Reference, ...] | str
"""Parsed condition, or references in a text; or the message why parsing failed."""
_ParsedBody = tuple[JsonPath, TaskBody, list[tuple[str, _Expression]]]
"""Path of a task, fallback or undo task in its task, the body, and its expressions by field."""
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
_COMMAND_PREFIX: Final = "$ "
_MAX_CYCLE_NAMES: Final = 10
_MAX_TOOL_RESULTS: Final = 20
"""Limit of results that one tool reads and that are checked for each task with this tool."""

_TARGETS_PER_PASS: Final = 4096
"""Targets checked in one pass: each node has a bit per target, so half a KiB."""
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
"""Types of most parameter values, without subclasses."""

_PARTS_WITH_NAMES: Final = frozenset(
    {
        "tasks",
        "tools",
        "mcp",
        "parameters",
        "fallbacks",
        "include",
        "undo",
        "confirm",
        "changes",
        "task",
        "fields",
    }
)
_CHECKED_FIELDS: Final = frozenset(
    {
        *("resources", "fallbacks", "undo", "undo_on_replace", "when", "expect", "acceptance"),
        *("confirm", "for_each", "include", "with_", "outputs", *LIST_FIELDS),
    }
)
"""Fields of a task that need checks where they are stated; a call of a tool has none of them."""

_NO_ELEMENT: Final = "refers to an element: only a task with `for_each` has any"
_COMPARISON: Final = re.compile("[=<>!]+")


def check_plan(
    tasks: Sequence[Task],
    tools: Sequence[ToolSpec],
    *,
    resources: Mapping[str, float],
    objects: Mapping[str, str],
    servers: Mapping[str, McpServer],
    parameters: Parameters,
) -> Iterator[Finding]:
    """Yield the problems of a plan whose parts are each valid.

    Lazily, so that a caller can stop after as many problems as anybody reads.
    """
    by_name = {tool.name: tool for tool in tools}
    scope = TaskScope(by_name, resources, objects, servers, parameters=parameters)
    yield from _check_declared(parameters, tasks)
    yield from _check_unique("tool", [tool.name for tool in tools], "name")
    for name, server in servers.items():
        for text in server.problems():
            yield ("mcp", name), f"MCP server {name!r}: {text}"
    for index, tool in enumerate(tools):
        which = f"tool {tool.name!r}"
        found = chain(
            _check_tool(tool, scope),
            _check_confirmation_by(tool, scope),
            _check_parameters_of(tool, scope),
        )
        for path, text in found:
            yield ("tools", index, *path), which + text
        problem = _agreement_problem(tool.expect, tool.name, scope)
        if tool.expect is not None and tool.expect.second_tool == tool.name:
            problem = "its output cannot confirm itself; name another tool"
        if problem:
            yield ("tools", index, "expect", "agrees_with"), f"{which}: {problem}"
    uses = {}
    for tool in tools:
        if tool.expect is not None or tool.confirm is not None:
            uses[tool.name] = _results_of_tool(tool)
    yield from _check_tasks(tasks, scope, uses)


def _check_tasks(
    tasks: Sequence[Task], scope: TaskScope, uses_of_tools: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    """Yield the problems of the tasks of a plan, or of an included one, and between them."""
    ids = {task.id for task in tasks}
    bodies: list[list[_ParsedBody]] = []
    for task in tasks:
        # A plan may have a hundred thousand tasks, and most need no further checks.
        if _is_simple_call(task, scope):
            bodies.append([])
        else:
            bodies.append(_parsed_bodies(task, ids))
    for index, task in enumerate(tasks):
        if not bodies[index]:
            continue
        found = chain(
            _check_list(task, bodies[index], scope),
            _check_inclusion(task),
            _check_parameters(bodies[index], scope),
            _check_bodies(bodies[index], scope),
            _check_acceptance(bodies[index]),
        )
        for path, text in found:
            yield ("tasks", index, *path), f"task {task.id!r}: {text}"
        if isinstance(task.include, SubPlan):
            for path, text in _check_included(task.include, scope, uses_of_tools):
                yield ("tasks", index, "include", *path), text
    yield from _check_graph(tasks, bodies, scope.hints, uses_of_tools)


def _check_inclusion(task: Task) -> Iterator[Finding]:
    """Yield the problems of a task's inclusion of a plan."""
    if task.include is None:
        for name, value in (("with", task.with_), ("outputs", task.outputs)):
            if value is not None:
                yield (name,), f"`{name}` needs `include`, which is missing"
        return
    if not isinstance(task.include, SubPlan):
        text = f"the plan {task.include!r} is read only if the plan that includes it is a file"
        yield ("include",), text
        return
    for name in ("tool", "confirm", "undo", "undo_on_replace", "expect", "timeout", "retry"):
        if getattr(task, name) is not None:
            text = f"a task with `include` has no `{name}`: state it in the included plan"
            yield (name,), text
    with suppress(PlanError):  # reported with the included plan itself
        declared = declared_parameters(task.include)
        for problem in with_problems(declared, task.with_ or {}):
            yield ("with",), problem
    ids = {part.id for part in task.include.tasks}
    try:
        for reference in find_references(task.outputs, ids):
            if reference.task not in ids:
                text = f"{reference} is not an output of a task of the included plan"
                yield ("outputs",), text
    except ExpressionError as error:
        yield ("outputs",), str(error)


def _check_included(
    included: SubPlan, scope: TaskScope, uses_of_tools: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    """Yield the problems of an included plan, which uses the tools of the whole plan."""
    try:
        declared = declared_parameters(included)
    except PlanError as error:
        for problem in error.problems:
            # The first step only names the model.
            yield parse_path(problem.place)[1:], problem.message
        return
    yield from _check_declared(declared, included.tasks)
    own = replace(scope, parameters=declared)
    yield from _check_tasks(included.tasks, own, uses_of_tools)


def check_graph(tasks: Sequence[Task]) -> list[Problem]:
    """Return the problems between tasks: ids, dependencies, cycles, and references to results."""
    ids = {task.id for task in tasks}
    bodies = [_parsed_bodies(task, ids) for task in tasks]
    found = _check_graph(tasks, bodies, NameSuggester(), {})
    return first_problems(Problem(format_path(path), text) for path, text in found)


def _check_graph(
    tasks: Sequence[Task],
    bodies: Sequence[Sequence[_ParsedBody]],
    hints: NameSuggester,
    uses_of_tools: Mapping[str, Mapping[str, str]],
) -> Iterator[Finding]:
    """Yield the problems between tasks: ids, dependencies, cycles, and references to results.

    References are checked against the graph last, and only if all dependencies are valid. Otherwise
    one misspelt name would be reported again for every task downstream.
    """
    yield from _check_reserved_ids(tasks)
    yield from _check_unique("task", [task.id for task in tasks], "id")
    # Of several tasks with one id, the first one counts.
    number_of: dict[str, int] = {}
    for number, task in enumerate(tasks):
        number_of.setdefault(task.id, number)
    sound = True
    for finding in _check_dependencies(tasks, number_of, hints):
        sound = False
        yield finding

    graph = []
    for task in tasks:
        known = [name for name in task.depends_on if name in number_of]
        # A task that depends on itself was reported above, and is not a separate cycle.
        graph.append([number_of[name] for name in known if name != task.id])
    for cycle in find_cycles(graph):
        sound = False
        # The first task is named again at the end, which closes the cycle.
        closed = [*cycle, cycle[0]]
        names = [repr(tasks[number].id) for number in closed]
        more = len(names) - _MAX_CYCLE_NAMES
        if more > 0:
            names[_MAX_CYCLE_NAMES - 1 : -1] = [f"… ({more} more) …"]
        circle = " → ".join(names)
        text = f"dependency cycle: {circle}"
        yield ("tasks", cycle[0], "depends_on"), f"{text}; remove one of these dependencies"

    uses = []
    for number, task in enumerate(tasks):
        for path, name, text in _results_read(task, bodies[number]):
            uses.append((number, path, name, text))
        for path, name, text in _results_compared(task, uses_of_tools):
            uses.append((number, path, name, text))
    uses = [(number, path, _known_task(name, number_of), text) for number, path, name, text in uses]
    for number, path, name, text in uses:
        if name not in number_of:
            sound = False
            hint = hints(name, number_of)
            task_id = tasks[number].id
            reason = f"{name!r} is not a task of the plan{hint}"
            message = f"task {task_id!r} refers to {text}, and {reason}"
            yield ("tasks", number, *path), message
    if not uses or not sound:
        return
    pairs = [(number, number_of[name]) for number, _, name, _ in uses]
    apart = unreachable_pairs(graph, pairs)
    for pair, (number, path, name, text) in zip(pairs, uses, strict=True):
        if pair not in apart:
            continue
        task_id = tasks[number].id
        if task_id == name:
            why = f"refers to its own output with {text}"
        else:
            missing = f"does not depend on {name!r}: add {name!r} to its depends_on"
            why = f"refers to {text} and {missing}"
        yield ("tasks", number, *path), f"task {task_id!r} {why}"


def _known_task(name: str, known: Container[str]) -> str:
    """Return the task that a reference names; for an element, the task with the list."""
    if name in known:
        return name
    template = template_of(TaskId(name))
    return template if template in known else name


def _check_dependencies(
    tasks: Sequence[Task], number_of: Mapping[str, int], hints: NameSuggester
) -> Iterator[Finding]:
    for index, task in enumerate(tasks):
        seen = set()
        for place, needed in enumerate(task.depends_on):
            why = ""
            if needed == task.id:
                why = "itself"
            elif needed not in number_of:
                hint = hints(needed, number_of)
                why = f"{needed!r}, which is not a task of the plan{hint}"
            elif needed in seen:
                why = f"{needed!r} twice"
            if why:
                path = ("tasks", index, "depends_on", place)
                yield path, f"task {task.id!r} depends on {why}"
            seen.add(needed)


def check_task(task: TaskBody, scope: TaskScope) -> list[str]:
    """Return the problems of one task and its fallbacks, apart from those between tasks."""
    if _is_simple_call(task, scope):
        return []
    problems = []
    bodies = _parsed_bodies(task)
    found = _check_bodies(bodies, scope)
    has_own_parameters = False
    if isinstance(task, Task):
        found = chain(_check_list(task, bodies, scope), _check_inclusion(task), found)
        if isinstance(task.include, SubPlan):
            found = chain(found, _check_staged_inclusion(task.include, scope))
        has_own_parameters = PARAMETERS in (task.scope or {})
    # A plan without parameters may have a task called `parameters`; the tasks are unknown here.
    if scope.parameters and not has_own_parameters:
        found = chain(found, _check_parameters(bodies, scope))
    for path, text in found:
        # A problem of the task itself names its field already.
        if path and path[0] in ("fallbacks", "undo"):
            text = f"{format_path(path[:2])}: {text}"  # noqa: PLW2901
        problems.append(text)
    if problems:
        scope.hints = NameSuggester()  # its bound is for one task
    return problems


def _check_staged_inclusion(included: SubPlan, scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of an included plan, with the place repeated in each message."""
    for path, text in _check_included(included, scope, {}):
        place = ("include", *path)
        yield place, f"{format_path(place)}: {text}"


def _is_simple_call(task: TaskBody, scope: TaskScope) -> bool:
    """Return whether a task only calls a tool with values of the stated types, or has no tool.

    A quick test: most tasks pass it, and need no further checks.
    """
    if not _CHECKED_FIELDS.isdisjoint(task.model_fields_set):
        return False
    arguments = task.arguments
    if task.tool is None:
        return not arguments or not has_references(arguments)
    tool = scope.tools.get(task.tool)
    if tool is None or scope.element_in(task.tool):
        return False
    if tool.parameters:
        for name, value in arguments.items():
            kind = tool.parameters.get(name, "")
            if type(value) not in _SIMPLE_TYPES.get(kind, ()):
                return False
    demands = scope.demands(tool)
    if demands.excess or not all(map(arguments.__contains__, demands.required)):
        return False
    return not arguments or not has_references(arguments)


def result_references(task: Task, known: Container[str]) -> Iterator[tuple[JsonPath, str, str]]:
    """Yield the results that a task and its fallbacks read: path, id of the other task, reference.

    Args:
        task: the task.
        known: the ids of all tasks, which separate a task's id from a path into its output.
    """
    return _results_read(task, _parsed_bodies(task, known, ("results", "status")))


def may_read_results(task: TaskBody) -> bool:
    """Return whether a task, its fallbacks or undo tasks may read results; a quick test."""
    if task.when or task.fallbacks or task.undo:
        return True
    # A list and an included plan become other tasks, which may read results as well.
    if isinstance(task, Task) and (task.for_each is not None or task.include is not None):
        return True
    return bool(task.arguments) and has_references(task.arguments)


def _results_read(task: Task, bodies: Sequence[_ParsedBody]) -> Iterator[tuple[JsonPath, str, str]]:
    for path, _, expressions in bodies:
        for name, parsed in expressions:
            where = (*path, name)
            if isinstance(parsed, Condition):
                for read in sorted(parsed.names("results")):
                    yield where, read, f"results.{read}"
                # The status of a task is known no earlier than its result.
                for read in sorted(parsed.names("status")):
                    yield where, read, f"status.{read}"
            elif not isinstance(parsed, str):
                # A string is a parse error, which is reported with the task.
                for reference in parsed:
                    read_by_undo = "undo" in path and reference.task == task.id
                    # An undo task runs after its task, and may read the output.
                    if reference.task is not None and not read_by_undo:
                        yield where, reference.task, str(reference)


def _results_compared(
    task: Task, uses_of_tools: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[JsonPath, str, str]]:
    """Yield the results that a task and its tools read under `expect` and `confirm`.

    Each has its path, the id of the other task, and its text.

    Args:
        task: the task.
        uses_of_tools: by tool name, the results that the tool reads and where it states them.
    """
    for path, body in nested_bodies(task):
        found: list[tuple[JsonPath, str, str]] = []
        for inner, names, _ in _results_stated(body):
            for name in sorted(names):
                found.append((inner, name, f"results.{name}"))
        for name, where in uses_of_tools.get(body.tool or "", {}).items():
            use = f"results.{name} in what its tool {body.tool!r} {where}"
            found.append((("tool",), name, use))
        for inner, name, use in found:
            # An undo task runs after its task.
            if name != task.id or "undo" not in path:
                yield (*path, *inner), name, use


def _results_of_tool(tool: ToolSpec) -> dict[str, str]:
    """Return the results that a tool needs wherever it is used, and where it states them.

    Results whose presence the tool tests are left out: it may also be used before that task. The
    number is limited, because each of many tasks may use the tool.
    """
    uses: dict[str, str] = {}
    for path, names, tested in _results_stated(tool):
        where = "expects" if path[0] == "expect" else "states under `confirm`"
        for name in sorted(names - tested):
            uses.setdefault(name, where)
    return dict(islice(uses.items(), _MAX_TOOL_RESULTS))


def _results_stated(
    part: ToolSpec | TaskBody,
) -> Iterator[tuple[JsonPath, frozenset[str], frozenset[str]]]:
    """Yield the results that a tool or a task reads under `expect` and `confirm`.

    Each item has the path, the tasks whose results are read there, and the tasks whose presence
    among the results is tested.
    """
    conditions: list[tuple[JsonPath, str]] = []
    if part.expect is not None:
        for number, text in enumerate(part.expect.where):
            conditions.append((("expect", "where", number), text))
    if part.confirm is not None:
        conditions.append((("confirm", "when"), part.confirm.when))
    for path, text in conditions:
        if "results" in text:
            condition = Condition.parse(text, OUTPUT_ROOTS)
            yield path, condition.names("results"), condition.questions("results")
    if part.confirm is None:
        return
    for name, value in (("arguments", part.confirm.arguments), ("output", part.confirm.output)):
        names = set()
        for reference in root_references(value, CONFIRMED_ROOTS):
            root, *steps = reference.path
            if root == "results":
                names.add(str(steps[0]))
        yield ("confirm", name), frozenset(names), frozenset()


def _check_declared(parameters: Parameters, tasks: Sequence[Task]) -> Iterator[Finding]:
    """Yield the problems of parameters, and the tasks whose outputs look like parameters."""
    yield from declaration_problems(parameters)
    if not parameters:
        return
    for index, task in enumerate(tasks):
        if task.id.partition(".")[0] == PARAMETERS:
            text = f"${{{PARAMETERS}.NAME}} is a parameter of this plan, so no task can be called"
            yield ("tasks", index, "id"), f"{text} {task.id!r}; choose another id"


def _check_parameters(bodies: Sequence[_ParsedBody], scope: TaskScope) -> Iterator[Finding]:
    """Yield the uses of undeclared parameters in a task, its fallbacks and undo tasks."""
    for path, body, expressions in bodies:
        for name, parsed in expressions:
            for read, text in _parameters_in(parsed):
                problem = _undeclared(read, scope)
                if problem:
                    yield (*path, name), f"{text}: {problem}"
        for inner, text in _check_parameters_of(body, scope):
            yield (*path, *inner), text.removeprefix(": ")


def _check_parameters_of(part: ToolSpec | TaskBody, scope: TaskScope) -> Iterator[Finding]:
    """Yield the undeclared parameters under `expect`, `confirm` and `undo`, like `_check_tool`."""
    for path, read, text in _parameters_stated(part):
        problem = _undeclared(read, scope)
        if problem:
            yield path, f": {text}: {problem}"


def _undeclared(name: str, scope: TaskScope) -> str:
    if name in scope.parameters:
        return ""
    hint = scope.hints(name, scope.parameters)
    return f"the plan has no parameter {name!r}{hint}; declare it under `{PARAMETERS}`"


def _parameters_in(parsed: _Expression) -> Iterator[tuple[str, str]]:
    """Yield the parameters that an expression reads, each with its text."""
    if isinstance(parsed, Condition):
        for name in sorted(parsed.names(PARAMETERS)):
            yield name, f"{PARAMETERS}.{name}"
    elif not isinstance(parsed, str):
        for reference in parsed:
            if reference.root == PARAMETERS:
                yield str(reference.path[0]), str(reference)


def _parameters_stated(part: ToolSpec | TaskBody) -> Iterator[tuple[JsonPath, str, str]]:
    """Yield the parameters that a tool or a task reads under `expect`, `confirm` and `undo`.

    Each has its path and its text.
    """
    conditions: list[tuple[JsonPath, str]] = []
    values: list[tuple[JsonPath, JsonValue, tuple[str, ...]]] = []
    if part.expect is not None:
        for number, text in enumerate(part.expect.where):
            conditions.append((("expect", "where", number), text))
    if part.confirm is not None:
        conditions.append((("confirm", "when"), part.confirm.when))
        values.append((("confirm", "arguments"), part.confirm.arguments, CONFIRMED_ROOTS))
        values.append((("confirm", "output"), part.confirm.output, CONFIRMED_ROOTS))
    if isinstance(part.undo, Undo):
        values.append((("undo", "arguments"), part.undo.arguments, UNDO_ROOTS))
    for path, text in conditions:
        if PARAMETERS in text:
            for read in _parameters_in(Condition.parse(text, OUTPUT_ROOTS)):
                yield path, *read
    for path, value, roots in values:
        try:
            references = root_references(value, roots)
        except ExpressionError:
            continue  # reported on its own
        for reference in references:
            root, *steps = reference.path
            if root == PARAMETERS:
                yield path, str(steps[0]), str(reference)


def parameters_of_work(task: TaskBody, tool: ToolSpec | None) -> dict[str, None]:
    """Return the parameters that decide whether a task runs, or that its result depends on."""
    names: dict[str, None] = {}
    # In an included plan, these names are its own parameters.
    if isinstance(task, Task) and PARAMETERS in (task.scope or {}):
        return names
    for _, parsed in _parsed_expressions(task, (), ("",)):
        for name, _ in _parameters_in(parsed):
            names[name] = None
    for part in (task, tool):
        if part is not None and part.expect is not None:
            for text in part.expect.where:
                if PARAMETERS in text:
                    for name, _ in _parameters_in(Condition.parse(text, OUTPUT_ROOTS)):
                        names[name] = None
    return names


def nested_bodies(task: TaskBody) -> list[tuple[JsonPath, TaskBody]]:
    """Return a task with its fallbacks and undo tasks at all levels, each with its path.

    Empty fallbacks are left out: a hostile plan may have hundreds of thousands.
    """
    bodies: list[tuple[JsonPath, TaskBody]] = [((), task)]
    if task.undo is None and not task.fallbacks:
        return bodies
    for path, body in bodies:  # grows while it is iterated
        if body.undo is not None:
            bodies.append(((*path, "undo"), body.undo))
        for index, fallback in enumerate(body.fallbacks):
            if fallback.model_fields_set:
                bodies.append(((*path, "fallbacks", index), fallback))
    return bodies


class ToolDemands(NamedTuple):
    """Requirements of a tool on its tasks and on the plan.

    Attributes:
        required: the required arguments.
        excess: the resources that it needs more of than the plan has, each with the amount.
        placeholders: the placeholders in its patterns, each with its first field.
    """

    required: list[str]
    excess: list[tuple[str, float]]
    placeholders: dict[str, str]


@dataclass(eq=False)
class TaskScope:
    """Names that the tasks of a plan may use.

    Args:
        tools: the described tools by name; if there are none, any tool name is accepted.
        capacity: the amount of each resource.
        objects: the type of each object that arguments may name.
        servers: the MCP servers, which may have further tools.
        parameters: the parameters of the plan.
        hints: suggests names for misspelt ones.
    """

    tools: Mapping[str, ToolSpec]
    capacity: Mapping[str, float]
    objects: Mapping[str, str]
    servers: Mapping[str, McpServer] = field(default_factory=dict)
    parameters: Parameters = field(default_factory=dict)
    hints: NameSuggester = field(default_factory=NameSuggester)
    _demands: dict[str, ToolDemands] = field(default_factory=dict)
    _elements: dict[str, str] = field(default_factory=dict)

    @cached_property
    def object_types(self) -> frozenset[str]:
        """Types of the objects that arguments may name."""
        return frozenset(self.objects.values())

    @cached_property
    def _server_tools(self) -> dict[str, frozenset[str] | None]:
        tools: dict[str, frozenset[str] | None] = {}
        for name, server in self.servers.items():
            tools[name] = None
            if server.tools is not None:
                tools[name] = frozenset(server.tools)
        return tools

    def may_be_served(self, name: str) -> bool:
        """Return whether a server may have a tool of this name; only the server can confirm it."""
        # Names of servers and tools may contain dots, so any dot may be the separator.
        for dot, character in enumerate(name[:-1]):
            if character != ".":
                continue
            server = name[:dot]
            tool = name[dot + 1 :]
            names = self._server_tools.get(server, frozenset())
            # A server that does not list its tools may have any.
            if names is None or tool in names:
                return True
        return False

    def demands(self, tool: ToolSpec) -> ToolDemands:
        """Return the requirements of a tool on its tasks and on the plan."""
        if tool.name in self._demands:
            return self._demands[tool.name]
        fields: dict[str, str] = {}
        for field_name in _PATTERN_FIELDS:
            value: str | Iterable[str] | Mapping[str, str] = getattr(tool, field_name)
            if not value:
                continue
            texts: Iterable[str]
            if isinstance(value, str):
                texts = (value,)
            elif isinstance(value, Mapping):
                texts = value.values()
            else:
                texts = value
            for text in texts:
                for placeholder in placeholders(text):
                    if placeholder != IDEMPOTENCY_KEY:
                        fields.setdefault(placeholder, field_name)

        optional = frozenset(tool.optional)
        required = [name for name in tool.parameters if name not in optional]
        if not tool.parameters:
            # Only its patterns show the arguments that it needs.
            required = list(fields)
        excess: list[tuple[str, float]] = []
        if tool.resources:
            excess = self.excess(tool.resources)
        self._demands[tool.name] = ToolDemands(required, excess, fields)
        return self._demands[tool.name]

    def element_in(self, name: str | None) -> str:
        """Return the expression of a tool that reads a list element; empty if it reads none."""
        if name is None or name not in self.tools:
            return ""
        if name not in self._elements:
            found = [text for _, text in _elements_stated(self.tools[name])]
            self._elements[name] = found[0] if found else ""
        return self._elements[name]

    def excess(self, resources: Mapping[str, float]) -> list[tuple[str, float]]:
        """Return the resources with an amount above the capacity."""
        above = []
        for name, amount in resources.items():
            # A resource that the plan lacks is reported as such.
            if amount > self.capacity.get(name, amount):
                above.append((name, amount))
        return above


def _check_unique(what: str, names: Sequence[str], key: str) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        before = first.setdefault(name, index)
        if before != index:
            place = f"{what}s[{before}]"
            text = f"{what} {name!r} is already defined as {place}; each needs its own {key}"
            yield (f"{what}s", index, key), text


def _check_tool(tool: ToolSpec, scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of a tool; the messages continue the words `tool 'name'`."""
    hints = scope.hints
    needed = _REQUIRED_FIELD_BY_KIND.get(tool.kind or "")
    if needed and not getattr(tool, needed):
        yield (), f" is of kind {tool.kind} and has no {needed}"
    if tool.callable is not None and not all(tool.callable.partition(":")):
        yield ("callable",), f": {brief_repr(tool.callable)} is not of the form module:function"
    if tool.server is not None and tool.server not in scope.servers:
        hint = hints(tool.server, scope.servers)
        yield ("server",), f": `mcp` describes no server {tool.server!r}{hint}"
    for parameter, kind in tool.parameters.items():
        if kind not in _PARAMETER_TYPES and kind not in scope.object_types:
            all_types = {*_PARAMETER_TYPES, *scope.object_types}
            hint = hints(kind, all_types)
            types = ", ".join(_PARAMETER_TYPES)
            known = f"expected one of {types}, or a type that `objects` states"
            yield ("parameters", parameter), f": there is no type {kind!r}{hint}; {known}"
    for number, parameter in enumerate(tool.optional):
        if parameter not in tool.parameters:
            hint = hints(parameter, tool.parameters)
            yield ("optional", number), f": {parameter!r} is not one of its parameters{hint}"
    # A tool without stated parameters takes any, so no placeholder can be wrong.
    if tool.parameters:
        for hole, name in scope.demands(tool).placeholders.items():
            if hole not in tool.parameters:
                hint = hints(hole, tool.parameters)
                yield (name,), f": {{{hole}}} in {name} is not one of its parameters{hint}"
    for resource in tool.resources:
        for path, text in _check_resource_declared(resource, scope):
            yield path, f": {text}"
    for path, text in _check_undo(tool, scope):
        yield path, f": {text}"


def _check_undo(tool: ToolSpec, scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of a tool's declaration of how to undo its effect."""
    if tool.undo is not None:
        for path, text in _check_undo_call(tool, tool.undo, scope):
            yield ("undo", *path), f"its undo: {text}"
    elif tool.undo_on_replace:
        yield ("undo_on_replace",), "`undo_on_replace` needs an `undo`, which it does not state"


def _check_undo_call(tool: ToolSpec, undo: Undo, scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of the call that undoes the effect of a tool."""
    body = TaskBody(tool=undo.tool, arguments=undo.arguments)
    yield from _check_bodies([((), body, [])], scope)
    try:
        references = root_references(undo.arguments, UNDO_ROOTS)
    except ExpressionError as error:
        yield ("arguments",), str(error)
        return
    if not tool.parameters:
        return
    for reference in references:
        root, *steps = reference.path
        if root != "arguments":
            continue
        name = steps[0]
        if name not in tool.parameters:
            hint = scope.hints(str(name), tool.parameters)
            yield ("arguments",), f"{tool.name!r} has no parameter {name!r}{hint}"


def _agreement_problem(expect: Expectation | None, own: str, scope: TaskScope) -> str:
    """Return why the second tool cannot confirm an output; empty if it can, or none is named.

    Args:
        expect: the expectation of the output, if any.
        own: the tool that returned the output.
        scope: the tools of the plan.
    """
    if expect is None or not expect.second_tool:
        return ""
    name = expect.second_tool
    if name in scope.tools:
        return confirmation_problem(name, own, scope.tools)
    # Only the server can describe its tools; this happens before a run begins.
    if scope.may_be_served(name):
        return ""
    hint = scope.hints(name, scope.tools)
    return f"there is no tool {name!r}{hint}; describe it under `tools`"


def _check_resource_declared(resource: str, scope: TaskScope) -> Iterator[Finding]:
    if resource not in scope.capacity:
        hint = scope.hints(resource, scope.capacity)
        text = f"the plan has no resource {resource!r}{hint}; state its capacity under `resources`"
        yield ("resources", resource), text


def _parsed_bodies(
    task: TaskBody, known: Container[str] = (), about: Sequence[str] = ("",)
) -> list[_ParsedBody]:
    bodies = []
    for path, body in nested_bodies(task):
        expressions = list(_parsed_expressions(body, known, about))
        bodies.append((path, body, expressions))
    return bodies


def _parsed_expressions(
    body: TaskBody, known: Container[str], about: Sequence[str]
) -> Iterator[tuple[str, _Expression]]:
    """Yield the expressions of a task, fallback or undo task, each with the field that holds it."""
    parts: list[tuple[str, JsonValue]] = [("arguments", body.arguments)]
    if isinstance(body, Task):
        parts += [("for_each", body.for_each), ("with", body.with_)]
    for name, value in parts:
        if not has_references(value):
            continue
        for text in iter_strings(value, keys=False):
            if "${" in text:
                try:
                    yield name, find_references(text, known)
                except ExpressionError as error:
                    yield name, str(error)
    when = body.when
    if when is not None and any(word in when for word in about):
        try:
            yield "when", Condition.parse(when)
        except ExpressionError as error:
            yield "when", str(error)


def _check_bodies(bodies: Sequence[_ParsedBody], scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of a task, its fallbacks and undo tasks."""
    for path, body, expressions in bodies:
        tool = None
        if body.tool is not None:
            tool = scope.tools.get(body.tool)
        if tool is not None:
            for inner, text in _check_call(body, tool, scope):
                yield (*path, *inner), text
            problem = _agreement_problem(body.expect, tool.name, scope)
            if problem:
                yield (*path, "expect", "agrees_with"), problem
        elif body.tool is not None and (scope.tools or scope.servers):
            # A plan without described tools may name any.
            if not scope.may_be_served(body.tool):
                hint = scope.hints(body.tool, scope.tools)
                text = f"there is no tool {body.tool!r}{hint}; describe it under `tools`"
                yield (*path, "tool"), text
        for inner, text in _check_resources(body, tool, scope):
            yield (*path, *inner), text
        if body.undo_on_replace and body.undo is None and (tool is None or tool.undo is None):
            text = "`undo_on_replace` needs an `undo`, which neither the task nor its tool states"
            yield (*path, "undo_on_replace"), text
        if body.confirm is not None:
            for inner, text in _check_confirmation(body.confirm, scope):
                yield (*path, "confirm", *inner), text
        for name, parsed in expressions:
            if isinstance(parsed, str):
                yield (*path, name), parsed


def _check_reserved_ids(tasks: Sequence[Task]) -> Iterator[Finding]:
    """Yield the tasks with ids that are reserved for the elements of lists."""
    if all(task.for_each is None for task in tasks):
        return
    for number, task in enumerate(tasks):
        if task.id in ELEMENT_ROOTS:
            text = f"a plan with `for_each` reserves the id {task.id!r} for elements"
            yield ("tasks", number, "id"), f"{text}; choose another id"


def _check_list(task: Task, bodies: Sequence[_ParsedBody], scope: TaskScope) -> Iterator[Finding]:
    """Yield the fields of a task that need `for_each`, and the element references without one."""
    has_element = "item" in (task.scope or {})
    if task.for_each is not None:
        for name in ("name", "goal"):
            text = getattr(task, name)
            if has_references(text):
                problem = root_reference_problem(text, ELEMENT_ROOTS)
                if problem:
                    yield (name,), problem
    else:
        for name in LIST_FIELDS:
            # An element's task keeps this field of its list.
            if has_element and name == "on_item_failure":
                continue
            if getattr(task, name) != Task.model_fields[name].default:
                yield (name,), f"`{name}` needs `for_each`, which is missing"
    if has_element:
        return
    for path, body, expressions in bodies:
        for name, parsed in expressions:
            found = _element_in(parsed)
            if not found:
                continue
            # The list itself is looked up before there are elements.
            if task.for_each is None or name == "for_each":
                yield (*path, name), f"{found} {_NO_ELEMENT}"
        if task.for_each is None:
            for inner, found in _elements_stated(body):
                yield (*path, *inner), f"{found} {_NO_ELEMENT}"
            found = scope.element_in(body.tool)
            if found:
                yield (*path, "tool"), f"{found} of its tool {body.tool!r} {_NO_ELEMENT}"


def _element_in(parsed: _Expression) -> str:
    """Return the part of an expression that reads a list element; empty if none does."""
    if isinstance(parsed, Condition):
        if parsed.reads_element():
            return f"the condition {parsed.text!r}"
    elif not isinstance(parsed, str):
        for reference in parsed:
            if reference.root in ELEMENT_ROOTS:
                return str(reference)
    return ""


def _elements_stated(part: ToolSpec | TaskBody) -> Iterator[tuple[JsonPath, str]]:
    """Yield the reads of an element under `expect`, `confirm` and `undo`, with their places."""
    conditions: list[tuple[JsonPath, str]] = []
    values: list[tuple[JsonPath, JsonValue]] = []
    if part.expect is not None:
        for number, text in enumerate(part.expect.where):
            conditions.append((("expect", "where", number), text))
    if part.confirm is not None:
        conditions.append((("confirm", "when"), part.confirm.when))
        values.append((("confirm", "arguments"), part.confirm.arguments))
        values.append((("confirm", "output"), part.confirm.output))
    if isinstance(part.undo, Undo):
        values.append((("undo", "arguments"), part.undo.arguments))
    for path, value in values:
        with suppress(ExpressionError):  # reported on its own
            for reference in root_references(value, CONFIRMED_ROOTS):
                if reference.path[0] in ELEMENT_ROOTS:
                    yield path, str(reference)
    for path, text in conditions:
        found = _element_in(Condition.parse(text, OUTPUT_ROOTS))
        if found:
            yield path, found


def _check_acceptance(bodies: Sequence[_ParsedBody]) -> Iterator[Finding]:
    """Yield the entries of `acceptance` that earlier versions ran as commands."""
    for path, body, _ in bodies:
        for number, text in enumerate(body.acceptance):
            if text.startswith(_COMMAND_PREFIX):
                command = brief_repr(text.removeprefix(_COMMAND_PREFIX))
                cure = f"write it as `expect: {{commands: [{command}]}}`"
                yield (*path, "acceptance", number), f"a command is not prose: {cure}"


def _check_confirmation_by(tool: ToolSpec, scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of a tool's `confirm`, like `_check_tool`."""
    if tool.confirm is not None:
        for path, text in _check_confirmation(tool.confirm, scope):
            yield ("confirm", *path), f": {text}"


def _check_confirmation(confirm: Confirmation, scope: TaskScope) -> Iterator[Finding]:
    """Yield why a tool cannot be asked whether a call was done: it is unknown, or may do harm."""
    tool = scope.tools.get(confirm.tool)
    if tool is None:
        if (scope.tools or scope.servers) and not scope.may_be_served(confirm.tool):
            hint = scope.hints(confirm.tool, scope.tools)
            yield ("tool",), f"there is no tool {confirm.tool!r}{hint}; describe it under `tools`"
        return
    problem = asking_problem(tool)
    if problem:
        yield ("tool",), problem
    yield from _check_call(confirm.call, tool, scope)


def _check_call(body: TaskBody, tool: ToolSpec, scope: TaskScope) -> Iterator[Finding]:
    """Yield the problems of a task's arguments for the parameters of its tool."""
    arguments = body.arguments
    parameters = tool.parameters
    for name, value in arguments.items():
        if name in parameters:
            expected = _type_mismatch(value, parameters[name], scope)
            if expected:
                which = f"argument {brief_repr(name)} of tool {tool.name!r}"
                got = brief_repr(value)
                yield ("arguments", name), f"{which} is {got}, expected {expected}"
    # Not all parameters: each of many tasks may leave out many optional ones.
    demands = scope.demands(tool)
    for name in demands.required:
        if name in arguments:
            continue
        if name in parameters:
            needed = f"{brief_repr(name)} ({parameters[name]})"
            yield ("arguments",), f"tool {tool.name!r} needs the argument {needed}"
            continue
        where = demands.placeholders[name]
        text = f"tool {tool.name!r} names {{{name}}} in its {where}: add that argument"
        if where == "command":
            text += f"; write {{{{{name}}}}} there if the braces are meant"
        yield ("arguments",), text
    # A tool without stated parameters takes any.
    if not parameters:
        return
    for name in arguments:
        if name not in parameters:
            hint = scope.hints(name, parameters)
            known = brief_repr(list(parameters))
            unknown = brief_repr(name)
            text = f"has no parameter {unknown}{hint}; it has {known}"
            yield ("arguments", name), f"tool {tool.name!r} {text}"


def _check_resources(body: TaskBody, tool: ToolSpec | None, scope: TaskScope) -> Iterator[Finding]:
    own = body.resources
    for resource in own:
        yield from _check_resource_declared(resource, scope)
    excess = []
    if tool is not None:
        # An amount that the task states replaces that of its tool.
        excess += [item for item in scope.demands(tool).excess if item[0] not in own]
    if own:
        excess += scope.excess(own)
    for resource, amount in excess:
        place: JsonPath = ("tool",)
        taker = f"its tool {body.tool!r} takes"
        if resource in own:
            place = ("resources", resource)
            taker = "it takes"
        capacity = scope.capacity[resource]
        text = f"{amount:g} of {resource!r}, but the plan has only {capacity:g}"
        yield place, f"{taker} {text}"


def _type_mismatch(value: JsonValue, kind: str, scope: TaskScope) -> str:
    """Return the type expected instead of a value; "" if it fits or is known only at run time."""
    if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
        return _parameter_mismatch(value, kind, scope)
    is_object = kind in scope.object_types
    # An object type called `path` means those objects, not file paths.
    if kind in _PARAMETER_TYPES and not (is_object and kind == "path"):
        # A boolean is an integer in Python, but not a number in JSON.
        is_boolean = isinstance(value, bool) and kind in ("integer", "number")
        if isinstance(value, _PARAMETER_TYPES[kind]) and not is_boolean:
            return ""
        return f"{kind}, not {json_type_name(value)}"
    if not is_object:
        return ""
    if isinstance(value, str) and scope.objects.get(value) == kind:
        return ""
    return f"an object of type {kind!r} as `objects` states them"


def _parameter_mismatch(reference: str, kind: str, scope: TaskScope) -> str:
    """Return the type expected instead of a parameter's; "" if it fits or is not known here."""
    name = reference.removeprefix(f"${{{PARAMETERS}.").removesuffix("}")
    parameter = scope.parameters.get(name)
    if parameter is None or kind not in _PARAMETER_TYPES or kind in scope.object_types:
        return ""
    fitting = {kind}
    if kind == "number":
        fitting.add("integer")
    elif kind == "path":
        fitting.update(("string", "array"))
    if kind == "any" or parameter.type in fitting:
        return ""
    return f"{kind}, and the parameter is of type {parameter.type}"


# Secrets in names: refused, because names are not masked.


def secret_name_problems(
    part: BaseModel | Sequence[BaseModel], redactor: Redactor
) -> list[Problem]:
    """Return the names in a plan or in changes that contain secrets, by their places."""
    # First all names at once, without their places: hardly any plan has such a name.
    if not redactor.is_secret_name("\n".join(_all_names(part))):
        return []
    why = "what looks like a secret cannot be a name, because names are kept; choose another"
    problems: list[Problem] = []
    for path, name in _iter_names(part, ()):
        if len(problems) < MAX_PROBLEMS and redactor.is_secret_name(name):
            problems.append(Problem(_masked_place(path, redactor), why))
    return problems


def _masked_place(path: JsonPath, redactor: Redactor) -> str:
    """Return a path into a document, such as `tasks[3].id`, with its secrets masked."""
    steps: list[str | int] = []
    for step in path:
        is_secret = isinstance(step, str) and redactor.is_secret_name(step)
        steps.append(MASK if is_secret else step)
    return format_path(steps)


def _all_names(part: BaseModel | Sequence[BaseModel]) -> dict[str, None]:
    """Return at least the names that `_iter_names` yields, each once, without their paths."""
    names: dict[str, None] = {}
    parts: list[Any] = []
    if isinstance(part, BaseModel):
        parts.append(part)
    else:
        parts += part
    for inner in parts:  # grows while it is iterated
        if isinstance(inner, str):
            names[inner] = None
            continue
        kind: Any = type(inner)
        fields = _fields_with_names(kind)
        if fields is not None:
            values = inner.__dict__
            # Defaults are not secrets.
            for field in fields & inner.__pydantic_fields_set__:
                value = values[field]
                if field == "when":
                    value = _name_in(value or "", field)
                if isinstance(value, str):
                    names[value] = None
                elif isinstance(value, tuple):
                    parts += value
                else:
                    parts.append(value)
        elif isinstance(inner, (tuple, list)):
            parts += inner
        elif isinstance(inner, Mapping):
            for name, value in inner.items():
                names[name] = None
                if isinstance(value, str):
                    names[_name_in(value, name)] = None
                else:
                    parts.append(value)
    return names


def _name_in(text: str, field: str) -> str:
    """Return the text to search for secrets; a comparison would look like an assignment."""
    if field == "when":
        return _COMPARISON.sub(" ", text)
    return text


def _iter_names(part: object, path: JsonPath) -> Iterator[tuple[JsonPath, str]]:
    """Yield the names in a plan or in changes, with their paths."""
    kind: Any = type(part)
    fields = _fields_with_names(kind)
    if fields is not None:
        for field, value in part.__dict__.items():
            if value and field in fields:
                yield from _iter_names(value, (*path, field))
    elif isinstance(part, str):
        yield path, _name_in(part, str(path[-1]))
    elif isinstance(part, Mapping):
        for name, value in part.items():
            # The fields of a change are those of a task, and not all are names.
            if path[-1] != "fields" or name in name_fields(Task):
                yield (*path, name), name
                yield from _iter_names(value, (*path, name))
    elif isinstance(part, Sequence):
        for number, item in enumerate(part):
            yield from _iter_names(item, (*path, number))


@cache
def _fields_with_names(kind: type) -> frozenset[str] | None:
    """Return the fields of a model that are or contain names; None for another type."""
    if not issubclass(kind, BaseModel):
        return None
    # Its parameters are JSON, which is masked.
    if kind is SubPlan:
        return frozenset({"tasks"})
    names = name_fields(kind) | _PARTS_WITH_NAMES
    return names.intersection(kind.model_fields)


# Graph algorithms; none recurses or is quadratic in the number of nodes.


def reverse_graph(dependencies: Graph) -> list[list[int]]:
    """Return for each node the nodes that depend on it."""
    dependents: list[list[int]] = [[] for _ in dependencies]
    for node, needed in enumerate(dependencies):
        for before in needed:
            dependents[before].append(node)
    return dependents


def topological_order(dependencies: Graph) -> list[int]:
    """Return the nodes, each after its dependencies; nodes on or behind a cycle are left out.

    Of several ready nodes, the one with the lowest number comes first.
    """
    dependents = reverse_graph(dependencies)
    missing = list(map(len, dependencies))
    ready = [node for node, count in enumerate(missing) if not count]
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for after in dependents[node]:
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, after)
    return order


def find_cycles(dependencies: Graph) -> list[list[int]]:
    """Return one cycle for each set of nodes that depend on one another.

    In the cycle [n0, n1, …], n0 depends on n1, and so on, and the last one on n0.
    """
    # Most plans list their tasks in order, and then no search is needed.
    if all(before < node for node, needed in enumerate(dependencies) for before in needed):
        return []
    core = set(range(len(dependencies))).difference(topological_order(dependencies))
    if not core:
        return []
    inner: list[list[int]] = [[] for _ in dependencies]
    for node in core:
        inner[node] = [before for before in dependencies[node] if before in core]
    cycles = []
    for component in _strongly_connected_components(inner, sorted(core)):
        cycle = _shortest_cycle(inner, set(component))
        if cycle:
            cycles.append(cycle)
    return sorted(cycles)


def unreachable_pairs(
    dependencies: Graph, queries: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return the pairs of `queries` whose node does not depend on its target, even indirectly.

    Each pair is (node, target). The graph must have no cycle. One pass in topological order gives
    each node a bit for every target that it depends on: the bits of its dependencies, and their
    own. This checks thousands of targets at once; a search from each node would be quadratic.
    """
    wanted: dict[int, list[int]] = {}
    for node, target in queries:
        # Most references name a direct dependency.
        if target not in dependencies[node]:
            wanted.setdefault(target, []).append(node)
    if not wanted:
        return set()
    order = topological_order(dependencies)
    position = {node: place for place, node in enumerate(order)}
    targets = sorted(wanted, key=position.__getitem__)
    apart = set()
    for first in range(0, len(targets), _TARGETS_PER_PASS):
        batch = targets[first : first + _TARGETS_PER_PASS]
        # Nodes before the first target depend on none, and nodes after the last query are unused.
        start = position[batch[0]]
        asking = chain.from_iterable(wanted[target] for target in batch)
        end = max(map(position.__getitem__, asking))
        own = {target: 1 << bit for bit, target in enumerate(batch)}
        reached: dict[int, int] = {}
        for node in order[start : end + 1]:
            bits = 0
            for before in dependencies[node]:
                bits |= reached.get(before, 0)
                bits |= own.get(before, 0)
            if bits:
                reached[node] = bits
        for target in batch:
            bit = own[target]
            for node in wanted[target]:
                bits = reached.get(node, 0)
                if not bits & bit:
                    apart.add((node, target))
    return apart


def _strongly_connected_components(
    dependencies: Graph, nodes: Iterable[int]
) -> Iterator[list[int]]:
    """Yield the strongly connected components (Kosaraju's algorithm).

    A depth-first search along the dependencies yields a postorder. From the last node of it, the
    reversed edges lead only to nodes of its own component, or of components yielded before.
    """
    seen = set()
    order = []
    for root in nodes:
        if root in seen:
            continue
        seen.add(root)
        walk = [(root, iter(dependencies[root]))]
        while walk:
            node, rest = walk[-1]
            unseen = (before for before in rest if before not in seen)
            before = next(unseen, None)
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
            for after in dependents[node]:
                if after not in seen:
                    seen.add(after)
                    component.append(after)
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
