"""Checks of a plan's tools before it runs."""

from __future__ import annotations

import builtins
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from typing import Final, NamedTuple

import httpx

from replanning.errors import ExpressionError, Problem
from replanning.plan.commands import (
    LeadingHoles,
    command_problems,
    command_programs,
    env_references,
    leading_holes,
    leading_problems,
)
from replanning.plan.conditions import Condition
from replanning.plan.document import Plan
from replanning.plan.elements import has_condition_of_its_own
from replanning.plan.inclusion import declared_parameters, used_tools
from replanning.plan.json_values import iter_strings
from replanning.plan.messages import (
    brief_repr,
    did_you_mean,
    first_problems,
    format_path,
    join_parts,
)
from replanning.plan.references import (
    IDEMPOTENCY_KEY,
    find_references,
    has_references,
    placeholders,
)
from replanning.plan.risk import command_risk
from replanning.plan.tasks import (
    ERROR_STATUSES,
    EXIT_CODES,
    TIMEOUT,
    McpServer,
    Retry,
    SubPlan,
    Task,
    TaskBody,
    ToolSpec,
)
from replanning.plan.types import JsonObject, JsonPath, JsonValue, TaskId
from replanning.tools.call import missing_arguments, unset_variables
from replanning.tools.conditions import (
    OUTPUTS_BY_KIND,
    Checked,
    ToolKnowledge,
    agreement_problems,
    condition_problems,
    confirmation_problems,
    expectation_problems,
    expected_schemas,
    tool_knowledge,
    undo_problems,
    undo_task_problems,
)
from replanning.tools.errors import (
    CommandFailed,
    HttpConnectionLost,
    HttpUnreachable,
    McpNotInstalled,
    ToolOutputTooLarge,
    ToolTimedOut,
    ToolUnavailable,
    TransientCommandFailed,
    TransientHttpStatusFailed,
)
from replanning.tools.http import request_problems
from replanning.tools.python import callable_problems
from replanning.tools.shell import SANDBOX_PROGRAM, shell_problems


def _python_problems(tool: ToolSpec) -> Iterator[tuple[JsonPath, str]]:
    path: JsonPath = ()
    if tool.callable is not None:
        path = ("callable",)
    for problem in callable_problems(tool.callable):
        yield path, problem


_DEFINITION_CHECKS: Final[Mapping[str, Callable[[ToolSpec], Iterable[tuple[JsonPath, str]]]]] = {
    "shell": shell_problems,
    "http": request_problems,
    "python": _python_problems,
    "mcp": lambda tool: (),  # the plan itself checks that its server is described
}

TOOL_KINDS: Final = frozenset(_DEFINITION_CHECKS)
"""Kinds of tools that the executor runs by itself."""

_ERRORS_BY_KIND: Final[Mapping[str, tuple[type[Exception], ...]]] = {
    "shell": (CommandFailed, TransientCommandFailed),
    "http": (TransientHttpStatusFailed, HttpUnreachable, HttpConnectionLost),
}
"""Errors of each kind of tool whose errors are all known, besides those of every tool."""

_ERRORS_OF_EVERY_TOOL: Final = (ToolTimedOut, ToolUnavailable, ToolOutputTooLarge)

_NUMBERS_BY_KIND: Final[Mapping[str, tuple[range, str]]] = {
    "shell": (EXIT_CODES, "a command ends with an exit code from 1 to 255"),
    "http": (ERROR_STATUSES, "a server refuses with an HTTP status from 400 to 599"),
    "mcp": (range(0), "a tool of an MCP server fails without a number"),
}
"""Numbers that failures of each kind of tool can have, with the reason why others cannot occur."""

_MAX_LOOKUPS: Final = 2_000
"""Maximum number of programs that are searched for on the PATH."""

_MAX_JUDGED_CHARS: Final = 1_000_000
"""Maximum number of characters of judged commands; each use counts."""

_TEMPLATE_KINDS: Final = ("shell", "http")
"""Kinds of tools that use only the arguments in their templates."""


class _Command(NamedTuple):
    """Command under `expect`: its number, text, problems, and the arguments that it needs."""

    number: int
    text: str
    problems: Sequence[str]
    needed: Sequence[str]


class _Commands(NamedTuple):
    """Commands under `expect`, whether any has problems, and the arguments that they need."""

    entries: Sequence[_Command]
    is_wrong: bool
    needed: frozenset[str]


def check_tools(plan: Plan, *, kinds: frozenset[str] = frozenset()) -> list[Problem]:
    """Return the problems of a plan's tools that are bound to make it fail.

    Args:
        plan: the plan.
        kinds: known kinds of tools besides `shell`, `http`, `python` and `mcp`.

    Returns:
        The problems in the order of the plan, each with its place; none if the tools can be run.
    """
    known = sorted(kinds | _DEFINITION_CHECKS.keys())
    included = _included_problems(plan, partial(check_tools, kinds=kinds), name_file=False)
    return first_problems(chain(_tool_problems(plan, known), _condition_problems(plan), included))


def _included_problems(
    plan: Plan, check: Callable[[Plan], Sequence[Problem]], *, name_file: bool = True
) -> Iterator[Problem]:
    """Yield the problems of the tasks of included plans.

    The check covers a whole plan, and so the plans that an included plan includes. A plan that
    several tasks include is checked once.

    Args:
        plan: the plan.
        check: the check.
        name_file: whether messages begin with the file, for notes that are shown without a place.
    """
    seen: set[str] = set()
    for index, task in enumerate(plan.tasks):
        included = task.include
        if not isinstance(included, SubPlan):
            continue
        text = included.model_dump_json()
        if text in seen:
            continue
        seen.add(text)
        fields = {"tasks": included.tasks, "parameters": declared_parameters(included)}
        place = format_path(("tasks", index, "include"))
        for problem in check(plan.model_copy(update=fields)):
            # The tools belong to the whole plan, whose own check covers them.
            if problem.place.startswith("tasks"):
                message = problem.message
                if name_file:
                    message = f"{included.source}: {message}"
                yield Problem(f"{place}.{problem.place}", message)


def _tool_problems(plan: Plan, known: Sequence[str]) -> Iterator[Problem]:
    """Yield the problems of a plan's tools, and those of their uses by tasks."""
    used = used_tools(plan.tasks)
    for index, tool in enumerate(plan.tools):
        if tool.kind is not None and tool.kind in known:
            yield from _definition_problems(tool, tool.kind, index)
        elif tool.name in used:
            path: JsonPath = ("tools", index)
            if tool.kind:
                path = (*path, "kind")
            yield Problem(format_path(path), _unknown_kind(tool, known))
    # Many tasks may use one long tool, and many fallbacks may inherit the same commands: each is
    # parsed once.
    tools: dict[str, ToolSpec] = {}
    needed_by_body: dict[str, list[str]] = {}
    holes: dict[str, list[LeadingHoles]] = {}
    for tool in plan.tools:
        tools[tool.name] = tool
        if tool.body is not None:
            texts = iter_strings(tool.body)
            needed_by_body[tool.name] = missing_arguments(texts, {IDEMPOTENCY_KEY: ""})
        if tool.kind == "shell" and tool.command:
            holes[tool.name] = leading_holes(tool.command)
    commands: dict[int, _Commands] = {}
    for index, task in enumerate(plan.tasks):
        for path, body, checks in _task_bodies(("tasks", index), task):
            described = tools.get(body.tool or "")
            if described is not None:
                if body.retry is not None:
                    yield from _retry_problems(body.retry, described, path, f"task {task.id!r}")
                needed = needed_by_body.get(described.name, ())
                leading = holes.get(described.name, ())
                for problem in _argument_problems(body, described, needed, leading):
                    place = format_path((*path, "arguments"))
                    yield Problem(place, f"task {task.id!r}: {problem}")
            if not checks:
                continue
            if id(checks) not in commands:
                commands[id(checks)] = _read_commands(checks)
            for command, problem in _command_problems(commands[id(checks)], body.arguments):
                # Commands that a fallback inherits have no place in it.
                place = format_path(path)
                if body.commands:
                    place = format_path((*path, "expect", "commands", command.number))
                message = f"the command {command.text!r}: {problem}"
                yield Problem(place, f"task {task.id!r}: {message}")


def _definition_problems(tool: ToolSpec, kind: str, index: int) -> Iterator[Problem]:
    """Yield the problems of the definition of a tool of a known kind."""
    name = f"tool {tool.name!r}"
    if kind in _DEFINITION_CHECKS:
        for path, problem in _DEFINITION_CHECKS[kind](tool):
            yield Problem(format_path(("tools", index, *path)), f"{name}: {problem}")
    if tool.retry is not None:
        yield from _retry_problems(tool.retry, tool, ("tools", index), name)
    for number, artifact in enumerate(tool.produces):
        if artifact in OUTPUTS_BY_KIND.get(kind, {}):
            message = f"{name}: {artifact!r} is a part of every output; name it otherwise"
            yield Problem(format_path(("tools", index, "produces", number)), message)


def _unknown_kind(tool: ToolSpec, known: Sequence[str]) -> str:
    if not tool.kind:
        return f"tool {tool.name!r} states no `kind`; known kinds are {known}"
    message = f"tool {tool.name!r} has the unknown kind {tool.kind!r}"
    return join_parts(message, f"known kinds are {known}", did_you_mean(tool.kind, known))


def _argument_problems(
    body: TaskBody, tool: ToolSpec, needed: Sequence[str], leading: Sequence[LeadingHoles]
) -> Iterator[str]:
    """Yield the problems of the arguments of a task.

    Args:
        body: the task.
        tool: its tool.
        needed: the arguments that the body of the tool needs.
        leading: the holes in the command of the tool whose values must not look like options.
    """
    lacking = [name for name in needed if name not in body.arguments]
    if lacking:
        message = f"the body of tool {tool.name!r} needs the arguments {brief_repr(lacking)}"
        yield f"{message}, the task gives {brief_repr(list(body.arguments))}"
    for problem in leading_problems(leading, body.arguments, tool.parameters):
        yield f"tool {tool.name!r}: {problem}"


def _command_problems(
    commands: _Commands, arguments: Mapping[str, JsonValue]
) -> Iterator[tuple[_Command, str]]:
    """Yield the problems of commands under `expect`, which use the arguments of the task."""
    # The common case, for tasks whose fallbacks inherit many commands.
    if not commands.is_wrong and commands.needed <= arguments.keys():
        return
    for command in commands.entries:
        for problem in command.problems:
            yield command, problem
        missing = [name for name in command.needed if name not in arguments]
        if missing:
            given = f"the task gives {brief_repr(list(arguments))}"
            yield command, f"it needs the arguments {brief_repr(missing)}, {given}"


def _condition_problems(plan: Plan) -> Iterator[Problem]:
    """Yield the names and comparisons in conditions that are certainly mistakes."""
    own, known = _knowledge_by_tool(plan)
    results = _result_schemas(plan, known)
    for index, tool in enumerate(plan.tools):
        found = _stated_problems(
            tool,
            tool.name,
            None,
            known=known,
            own=own,
            results=results,
        )
        if tool.undo is not None:
            found = chain(found, undo_problems(tool.undo, own[tool.name]))
        for path, message in found:
            where = format_path(("tools", index, *path))
            yield Problem(where, f"tool {tool.name!r}: {message}")
    ids = {task.id for task in plan.tasks}
    for index, task in enumerate(plan.tasks):
        stated = (task.when, task.expect, task.confirm, task.undo)
        if not task.fallbacks and all(part is None for part in stated):
            continue
        for path, body, _ in _task_bodies(("tasks", index), task):
            found = chain(
                _when_problems(body, results),
                _stated_problems(
                    body, body.tool, body.arguments, known=known, own=own, results=results
                ),
            )
            if body.undo is not None:
                found = chain(found, undo_task_problems(body.undo, ids, results))
            for inner, message in found:
                yield Problem(format_path((*path, *inner)), f"task {task.id!r}: {message}")


def _knowledge_by_tool(plan: Plan) -> tuple[dict[str, ToolKnowledge], dict[str, ToolKnowledge]]:
    """Return the knowledge of each tool by itself, and of its calls, which another tool may replace.

    If a tool of another kind may replace one, the fields of the output are unknown.
    """
    kinds: dict[str, set[str | None]] = {}
    for tool in plan.tools:
        if tool.capability is not None:
            kinds.setdefault(tool.capability, set()).add(tool.kind)
    # A file of tools without tasks may belong to an MCP proxy.
    is_plan = bool(plan.tasks)
    # Once for each tool, since many tasks may use one with many parameters.
    own: dict[str, ToolKnowledge] = {}
    known: dict[str, ToolKnowledge] = {}
    for tool in plan.tools:
        own[tool.name] = tool_knowledge(tool, is_plan=is_plan)
        known[tool.name] = own[tool.name]
        if len(kinds.get(tool.capability or "", ())) > 1:
            described = tool.model_copy(update={"kind": None})
            known[tool.name] = tool_knowledge(described, is_plan=is_plan)
    return own, known


def _result_schemas(
    plan: Plan, known: Mapping[str, ToolKnowledge]
) -> dict[TaskId, Sequence[JsonObject]]:
    """Return the schemas of the outputs of tasks, as far as they are known."""
    results: dict[TaskId, Sequence[JsonObject]] = {}
    for task in plan.tasks:
        tool = known.get(task.tool or "")
        if tool is None or task.fallbacks:
            continue
        results[task.id] = [*tool.output, *expected_schemas(task.expect)]
        # The result lists the results of the elements, any of which may be missing.
        if task.for_each is not None:
            results[task.id] = [{"type": "array"}]
    return results


def _when_problems(
    body: TaskBody, results: Mapping[TaskId, Sequence[JsonObject]]
) -> Iterator[tuple[JsonPath, str]]:
    if body.when is None:
        return
    # The check of the plan reports a condition that cannot be read.
    with suppress(ExpressionError):
        condition = Condition.parse(body.when)
        for message in condition_problems(condition, Checked((), None, None, results)):
            yield ("when",), message


def _stated_problems(
    part: ToolSpec | TaskBody,
    tool: str | None,
    given: JsonObject | None,
    *,
    known: Mapping[str, ToolKnowledge],
    own: Mapping[str, ToolKnowledge],
    results: Mapping[TaskId, Sequence[JsonObject]],
) -> Iterator[tuple[JsonPath, str]]:
    """Yield the problems of `expect` and `confirm` of a tool or a task.

    Args:
        part: the tool or the task.
        tool: the name of the tool whose calls are checked, if any is named.
        given: the arguments of the task; None for a tool.
        known: the knowledge of the calls of tools, which other tools may replace.
        own: the knowledge of the tools themselves.
        results: schemas of the outputs of tasks.
    """
    called = known.get(tool or "", ToolKnowledge())
    if part.expect is not None:
        found = chain(
            expectation_problems(part.expect, called, given, results),
            agreement_problems(part.expect, tool, own),
        )
        for path, message in found:
            yield ("expect", *path), message
    if part.confirm is not None:
        asked = own.get(part.confirm.tool, ToolKnowledge())
        for path, message in confirmation_problems(part.confirm, called, asked, given, results):
            yield ("confirm", *path), message


def _retry_problems(
    retry: Retry, tool: ToolSpec, path: JsonPath, subject: str
) -> Iterator[Problem]:
    """Yield the entries of `on` that no failure of the tool can match.

    A retry that never happens would otherwise be noticed only when the task fails.
    """
    kind = tool.kind or ""
    for number, entry in enumerate(retry.on or ()):
        if isinstance(entry, int):
            numbers, reason = _NUMBERS_BY_KIND.get(kind, (None, ""))
            if numbers is None or entry in numbers:
                continue
            message = f"no failure of tool {tool.name!r} has the number {entry}: {reason}"
        else:
            known = _error_names(kind)
            name = entry.rpartition(".")[2]
            if not known or name in known:
                continue
            message = f"no failure of tool {tool.name!r} is of a class {entry!r}"
            message = join_parts(message, did_you_mean(name, known))
        yield Problem(format_path((*path, "retry", "on", number)), f"{subject}: {message}")


@cache
def _error_names(kind: str) -> frozenset[str]:
    """Return the names in `on` that match failures of a kind of tool; empty if any name may.

    They include the errors of Python and of the HTTP client, from which errors of tools are derived
    or raised.
    """
    if kind not in _ERRORS_BY_KIND:
        return frozenset()
    names = {TIMEOUT}
    for error in (*_ERRORS_BY_KIND[kind], *_ERRORS_OF_EVERY_TOOL):
        names.update(base.__name__ for base in error.__mro__)
    modules = [builtins]
    if kind == "http":
        modules.append(httpx)
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, BaseException):
                names.add(name)
    return frozenset(names)


def _read_commands(checks: Sequence[str]) -> _Commands:
    commands: list[_Command] = []
    is_wrong = False
    needed_by_any: set[str] = set()
    for number, command in enumerate(checks):
        needed = missing_arguments([command], {IDEMPOTENCY_KEY: ""})
        problems = command_problems(command)
        commands.append(_Command(number, command, problems, needed))
        needed_by_any.update(needed)
        if problems:
            is_wrong = True
    return _Commands(commands, is_wrong, frozenset(needed_by_any))


def check_machine(plan: Plan, environ: Mapping[str, str] | None = None) -> list[Problem]:
    """Return the programs, modules and variables that tools need and this machine lacks.

    None of this keeps a plan from running: a tool that fails for such a reason is replanned.

    Args:
        plan: the plan.
        environ: the environment of the tools; by default that of the program.
    """
    if environ is None:
        environ = os.environ
    own_path = environ.get("PATH", os.defpath)
    lookups: dict[tuple[str, str], bool] = {}
    notes: list[Problem] = []
    if plan.mcp and find_spec("mcp") is None:
        notes.append(Problem("mcp", str(McpNotInstalled(plan.mcp))))
    for name, server in plan.mcp.items():
        programs: list[str] = []
        if server.command and "/" not in server.command[0]:
            programs.append(server.command[0])
        path = server.env.get("PATH", own_path)
        needs = _lacking_programs(programs, path, lookups) + _lacking_variables(server, environ)
        for missing in needs:
            notes.append(Problem(f"mcp.{name}", f"MCP server {name!r} needs {missing}"))
    for index, tool in enumerate(plan.tools):
        programs = []
        if tool.kind == "shell" and tool.command:
            programs = command_programs(tool.command)
        needs = _lacking_module(tool)
        needs += _lacking_programs(programs, own_path, lookups)
        needs += _lacking_variables(tool, environ)
        for missing in needs:
            notes.append(Problem(f"tools[{index}]", f"tool {tool.name!r} needs {missing}"))
    return [*notes, *_unconfined_tools(plan, own_path)]


def _lacking_programs(
    programs: Sequence[str], path: str, lookups: dict[tuple[str, str], bool]
) -> list[str]:
    """Return the programs that are not on a path.

    Args:
        programs: the programs.
        path: the path.
        lookups: the results of earlier searches: whether the program is lacking.
    """
    needs: list[str] = []
    for program in programs:
        if (program, path) not in lookups and len(lookups) < _MAX_LOOKUPS:
            lookups[program, path] = shutil.which(program, path=path) is None
        if lookups.get((program, path)):
            needs.append(f"the program {program!r}, which is not on the PATH")
    return needs


def _lacking_variables(described: ToolSpec | McpServer, environ: Mapping[str, str]) -> list[str]:
    unset = unset_variables(described, environ)
    if not unset:
        return []
    return [f"the environment variables {', '.join(unset)}, which are not set"]


def _lacking_module(tool: ToolSpec) -> list[str]:
    if tool.kind != "python" or not tool.callable or callable_problems(tool.callable):
        return []
    package = tool.callable.partition(":")[0].partition(".")[0]
    if find_spec(package) is not None:
        return []
    advice = "install it, or put its folder on PYTHONPATH"
    return [f"the module {package!r}, which is not found; {advice}"]


def _unconfined_tools(plan: Plan, path: str) -> list[Problem]:
    """Return a note about the commands with a workspace, if no sandbox can confine them to it."""
    unconfined: dict[str, int] = {}
    for index, tool in enumerate(plan.tools):
        if tool.kind == "shell" and tool.workspace is not None:
            unconfined[tool.name] = index
    if not unconfined or shutil.which(SANDBOX_PROGRAM, path=path) is not None:
        return []
    names = ", ".join(map(repr, unconfined))
    which = f"tools {names} are not confined to their workspace"
    if len(unconfined) == 1:
        which = f"tool {names} is not confined to its workspace"
    lacking = f"{SANDBOX_PROGRAM!r} (bubblewrap) is not on the PATH"
    text = f"{which}: {lacking}; only arguments of type path are checked"
    return [Problem(f"tools[{min(unconfined.values())}]", text)]


def check_danger(plan: Plan) -> list[Problem]:
    """Return the uses of tools that are dangerous, or look so although the tool does not say so.

    Args:
        plan: the plan.
    """
    uses = chain(_unasked_uses(plan), _dangerous_uses(plan))
    return first_problems(chain(uses, _included_problems(plan, check_danger)))


def _unasked_uses(plan: Plan) -> Iterator[Problem]:
    """Yield the tasks that name a dangerous tool: many people expect to be asked before it runs."""
    for index, task in enumerate(plan.tasks):
        tool = plan.tool(task.tool)
        if tool is None:
            continue
        if tool.dangerous:
            message = f"task {task.id!r}: nobody is asked before its tool {tool.name!r} runs"
            why = "`dangerous` is about what replans and models add, not what the plan says"
            yield Problem(f"tasks[{index}]", f"{message}; {why}")


def _dangerous_uses(plan: Plan) -> Iterator[Problem]:
    judged = 0
    for index, task in enumerate(plan.tasks):
        for path, body, _ in _task_bodies(("tasks", index), task):
            tool = plan.tool(body.tool)
            if tool is None:
                continue
            if tool.dangerous:  # stated, so no command needs judging
                continue
            judged += len(tool.command or "")
            if judged > _MAX_JUDGED_CHARS:
                end = "from here on, no use is judged: the commands are too long in total"
                yield Problem(format_path(path), end)
                return
            harm = command_risk(tool, body.arguments)
            if harm:
                message = f"task {task.id!r}: tool {body.tool!r} may do harm: {harm}"
                advice = "state whether the tool is `dangerous`"
                yield Problem(format_path(path), f"{message}; {advice}")


def check_missing_outputs(plan: Plan) -> list[Problem]:
    """Return the arguments that may be null although the tool needs a value.

    A tool needs a value where the parameter has a type, and where its command or URL contains it.

    Such an argument refers to a task that a condition may leave out while the task that reads it
    runs, or that may fail before a task with `run_if: always`.
    """
    branches = _Branches(plan)
    found: list[Problem] = []
    for index, task in enumerate(plan.tasks):
        tool = plan.tool(task.tool)
        if tool is None:
            continue
        if not (branches.conditional or task.run_if):  # every task before it has an output
            continue
        texts = [text for text in (tool.command, tool.url) if text]
        filled_in = _placeholders_in(texts)
        for path, value, kind in _typed_texts(tool, task.arguments):
            if not has_references(value):
                continue
            if kind != "any":
                need = f"the tool {tool.name!r} takes a value of type {kind}"
            elif len(path) == 1 and path[0] in filled_in:
                need = f"the tool {tool.name!r} cannot fill in null"
            else:
                continue
            references = find_references(value, branches.tasks)
            # Inside a longer text, null is a text like any other.
            if list(map(str, references)) != [value]:
                continue
            source = references[0].task
            if source is None:
                continue
            if not branches.may_miss(task, source):
                continue
            why = f"is null where {source!r} is left out"
            if task.run_if == "always":
                why = f"is null where {source!r} failed or is left out"
            text = (
                f"task {task.id!r}: the argument {format_path(path)!r}, {value}, {why}, and {need}"
            )
            place = format_path(("tasks", index, "arguments", *path))
            found.append(Problem(place, text))
    return [*found, *_included_problems(plan, check_missing_outputs)]


def _typed_texts(tool: ToolSpec, arguments: JsonObject) -> Iterator[tuple[JsonPath, str, str]]:
    """Yield the texts in arguments, each with its place and the type that the tool expects there.

    Parts of objects and arrays have a type where the JSON Schema of the tool states one.
    """
    pending: list[tuple[JsonPath, JsonValue, str, object]] = []
    for name, value in reversed(arguments.items()):
        kind = tool.parameters.get(name, "any")
        pending.append(((name,), value, kind, _part_of_schema(tool.input_schema, name)))
    while pending:
        path, value, kind, schema = pending.pop()
        parts: Iterable[tuple[str | int, JsonValue]] = ()
        if isinstance(value, str):
            yield path, value, kind
        elif isinstance(value, list):
            parts = enumerate(value)
        elif isinstance(value, dict):
            parts = value.items()
        for step, part in reversed(list(parts)):
            inner = _part_of_schema(schema, step)
            pending.append(((*path, step), part, _type_in_schema(inner), inner))


def _part_of_schema(schema: object, step: str | int) -> object:
    """Return the schema of a property or of the items; None if it states none."""
    if not isinstance(schema, dict):
        return None
    if isinstance(step, int):
        return schema.get("items")
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return None
    return properties.get(step)


def _type_in_schema(schema: object) -> str:
    """Return the one type that a schema states, or else `any`."""
    match schema:
        case {"type": str(kind)} if kind != "null":
            return kind
    return "any"


class _Branches:
    """Branches of a plan that conditions may leave out.

    In a sequential plan, a task is left out only if its own condition does not hold.

    Args:
        plan: the plan.

    Attributes:
        tasks: the tasks by id.
        conditional: whether any task has a condition.
    """

    def __init__(self, plan: Plan) -> None:
        self.tasks = {task.id: task for task in plan.tasks}
        self.conditional = any(task.when is not None for task in plan.tasks)
        self._sequential = plan.sequential
        self._dependents: dict[TaskId, list[Task]] = {}
        for task in plan.tasks:
            for dep in task.depends_on:
                self._dependents.setdefault(dep, []).append(task)

    def may_miss(self, reader: Task, source: TaskId) -> bool:
        """Return whether a task may run without the output of one that it depends on."""
        if reader.run_if == "always":
            return True
        # An element of a list is not a task of the plan.
        if source not in self.tasks:
            return False
        skipped = self._least_skipped(source)
        if not skipped:
            return False
        return reader.id not in self._left_out(skipped)

    def _least_skipped(self, task_id: TaskId) -> set[TaskId]:
        """Return the fewest tasks whose conditions leave a task out; none if nothing does."""
        skipped: set[TaskId] = set()
        seen = {task_id}
        stack = [self.tasks[task_id]]
        while stack:
            task = stack.pop()
            # A condition about the element leaves out elements, and never the list.
            if task.when is not None and not has_condition_of_its_own(task):
                skipped.add(task.id)
                continue
            if task.run_if == "always" or not task.depends_on or self._sequential:
                return set()
            for dep in task.depends_on:
                if dep not in seen:
                    seen.add(dep)
                    stack.append(self.tasks[dep])
        return skipped

    def _left_out(self, skipped: Iterable[TaskId]) -> set[TaskId]:
        """Return the tasks that are left out if the conditions of these skip them."""
        left_out = set(skipped)
        if self._sequential:
            return left_out
        stack = list(left_out)
        while stack:
            for task in self._dependents.get(stack.pop(), ()):
                if task.run_if == "always" or task.id in left_out:
                    continue
                if left_out.issuperset(task.depends_on):
                    left_out.add(task.id)
                    stack.append(task.id)
        return left_out


def check_unused_arguments(plan: Plan) -> list[Problem]:
    """Return the arguments that no command or request uses, so they have no effect.

    They are not errors, since another tool may use them.

    Args:
        plan: the plan.
    """
    included = _included_problems(plan, check_unused_arguments)
    return first_problems(chain(_unused_arguments(plan), included))


def _unused_arguments(plan: Plan) -> Iterator[Problem]:
    # A tool that may replace another one is given the same arguments.
    by_capability: dict[str, set[str]] = {}
    for tool in plan.tools:
        if tool.capability is not None:
            accepted = by_capability.setdefault(tool.capability, set())
            accepted |= _accepted_arguments(tool)
    by_tool: dict[str, set[str]] = {}
    for tool in plan.tools:
        if tool.kind not in _TEMPLATE_KINDS:
            continue
        if tool.produces:  # its arguments say where the files are
            continue
        if tool.capability is None:
            by_tool[tool.name] = _accepted_arguments(tool)
        else:
            by_tool[tool.name] = by_capability[tool.capability]
    # Many fallbacks may inherit the same checks.
    in_checks: dict[int, set[str]] = {}
    for index, task in enumerate(plan.tasks):
        for path, body, checks in _task_bodies(("tasks", index), task):
            if body.tool not in by_tool:
                continue
            if not body.arguments:
                continue
            if id(checks) not in in_checks:
                in_checks[id(checks)] = _placeholders_in(checks)
            for name in body.arguments:
                if name in by_tool[body.tool]:
                    continue
                if name in in_checks[id(checks)]:
                    continue
                where = format_path((*path, "arguments", name))
                message = f"tool {body.tool!r} does not use {name!r}"
                yield Problem(where, f"task {task.id!r}: {message}")


def check_env_arguments(plan: Plan) -> list[Problem]:
    """Return the arguments with `{env:NAME}`, which is filled in only in the fields of tools.

    They are not errors, since a tool may want this text.

    Args:
        plan: the plan.
    """
    included = _included_problems(plan, check_env_arguments)
    return first_problems(chain(_env_arguments(plan), included))


def _env_arguments(plan: Plan) -> Iterator[Problem]:
    for index, task in enumerate(plan.tasks):
        for path, body, _ in _task_bodies(("tasks", index), task):
            for name, value in body.arguments.items():
                texts = iter_strings(value)
                for variable in chain.from_iterable(map(env_references, texts)):
                    yield Problem(
                        format_path((*path, "arguments", name)),
                        f"task {task.id!r}: {{env:{variable}}} is plain text in the "
                        f"argument {name!r}; it is filled in where a tool states `env`, "
                        "`headers`, `url` or `body`",
                    )


def _accepted_arguments(tool: ToolSpec) -> set[str]:
    in_templates = _placeholders_in([*tool.filled_texts, *tool.fact_patterns])
    return in_templates.union(tool.parameters)


def _placeholders_in(texts: Iterable[str]) -> set[str]:
    names: set[str] = set()
    for text in texts:
        names.update(placeholders(text))
    return names


def _task_bodies(path: JsonPath, task: TaskBody) -> list[tuple[JsonPath, TaskBody, Sequence[str]]]:
    """Return a task with its fallbacks and undo tasks at all levels.

    Each has its path, its body, and the commands under `expect`, which a fallback may inherit.
    """
    bodies: list[tuple[JsonPath, TaskBody, Sequence[str]]] = [(path, task, task.commands)]
    # The list grows while it is iterated.
    for where, body, held in bodies:
        for index, fallback in enumerate(body.fallbacks):
            inherited = held if fallback.expect is None else fallback.commands
            bodies.append(((*where, "fallbacks", index), fallback, inherited))
        if body.undo is not None:
            bodies.append(((*where, "undo"), body.undo, body.undo.commands))
    return bodies
