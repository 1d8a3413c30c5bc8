"""Checks of the tools of a plan before it runs."""

from __future__ import annotations

import builtins
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import chain
from typing import Final

import httpx

from replanning.errors import ExpressionError, Problem
from replanning.plan.commands import (
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
from replanning.plan.messages import brief_repr, did_you_mean, first_problems, format_path
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
    Retry,
    SubPlan,
    Task,
    TaskBody,
    ToolSpec,
)
from replanning.plan.types import JsonObject, JsonPath, JsonValue, TaskId
from replanning.tools.call import missing_arguments, tool_templates, unset_variables
from replanning.tools.conditions import (
    OUTPUTS_BY_KIND,
    Checked,
    ToolKnowledge,
    agreement_problems,
    condition_problems,
    confirmation_problems,
    expectation_problems,
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

_DEFINITION_CHECKS: Final[Mapping[str, Callable[[ToolSpec], list[str]]]] = {
    "shell": shell_problems,
    "http": request_problems,
    "python": lambda tool: callable_problems(tool.callable),
    "mcp": lambda tool: [],  # that its server is described, the plan checks itself
}

TOOL_KINDS: Final = frozenset(_DEFINITION_CHECKS)
"""Kinds of tools that can be executed without a program."""

_ERRORS_BY_KIND: Final[Mapping[str, tuple[type[Exception], ...]]] = {
    "shell": (CommandFailed, TransientCommandFailed),
    "http": (TransientHttpStatusFailed, HttpUnreachable, HttpConnectionLost),
}
"""Errors of the kinds of tools of which all errors are known, beside those of every tool."""

_ERRORS_OF_EVERY_TOOL: Final = (ToolTimedOut, ToolUnavailable, ToolOutputTooLarge)

_NUMBERS_BY_KIND: Final[Mapping[str, tuple[range, str]]] = {
    "shell": (EXIT_CODES, "a command ends with an exit code from 1 to 255"),
    "http": (ERROR_STATUSES, "a server refuses with an HTTP status from 400 to 599"),
    "mcp": (range(0), "a tool of an MCP server fails without a number"),
}
"""Numbers that failures of a kind of tool have, and what to say where another one is stated."""

_MAX_LOOKUPS: Final = 2_000
"""Most programs that are looked for on the PATH."""

_MAX_JUDGED_CHARS: Final = 1_000_000
"""Most characters of commands whose uses are judged, each as often as it is used."""

_TEMPLATE_KINDS: Final = ("shell", "http")
"""Kinds of tools that use only the arguments in their templates."""


def check_tools(plan: Plan, *, kinds: frozenset[str] = frozenset()) -> list[Problem]:
    """Return everything about the tools of a plan that is bound to fail.

    Args:
        plan: the plan.
        kinds: kinds of tools that are known besides `shell`, `http`, `python` and `mcp`.

    Returns:
        The problems in the order of the plan, each with its place; none if the tools can be run.
    """
    known = sorted(kinds | _DEFINITION_CHECKS.keys())
    included = _included_problems(plan, partial(check_tools, kinds=kinds), name_file=False)
    return first_problems(chain(_tool_problems(plan, known), _condition_problems(plan), included))


def _included_problems(
    plan: Plan, check: Callable[[Plan], Sequence[Problem]], *, name_file: bool = True
) -> Iterator[Problem]:
    """Yield what a check finds about the tasks of the plans that tasks include.

    The check is that of a whole plan, and so it looks into what these include in turn. One that is
    included by several tasks is looked at once.

    Args:
        plan: the plan.
        check: the check.
        name_file: whether the messages begin with the file, for notes that are told without a place.
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
            # The tools are those of the whole plan, which is checked by itself.
            if problem.place.startswith("tasks"):
                message = problem.message
                if name_file:
                    message = f"{included.source}: {message}"
                yield Problem(f"{place}.{problem.place}", message)


def _tool_problems(plan: Plan, known: Sequence[str]) -> Iterator[Problem]:
    used = used_tools(plan.tasks)
    for index, tool in enumerate(plan.tools):
        at = f"tools[{index}]"
        name = f"tool {tool.name!r}"
        if tool.kind is None or tool.kind not in known:
            hint = did_you_mean(tool.kind or "", known) if tool.name in used else ""
            message = (
                f"nothing executes kind {tool.kind!r} of {name}"
                if tool.kind
                else f"{name} states no `kind`"
            )
            if tool.name in used:
                yield Problem(at, "; ".join(filter(None, [message, f"known are {known}", hint])))
            continue
        if tool.kind in _DEFINITION_CHECKS:
            yield from (
                Problem(at, f"{name}: {problem}") for problem in _DEFINITION_CHECKS[tool.kind](tool)
            )
        if tool.retry is not None:
            yield from _retry_problems(tool.retry, tool, ("tools", index), name)
        for key in sorted(OUTPUTS_BY_KIND.get(tool.kind, {}).keys() & set(tool.produces)):
            yield Problem(
                f"{at}.produces", f"{name}: {key!r} is a part of every output; name it otherwise"
            )
    # Many tasks may use one long tool, and many fallbacks inherit the same checks: each of these is
    # read once.
    tools = {tool.name: tool for tool in plan.tools}
    needed_by_body = {
        tool.name: missing_arguments(iter_strings(tool.body), {IDEMPOTENCY_KEY: ""})
        for tool in plan.tools
        if tool.body is not None
    }
    holes = {
        tool.name: leading_holes(tool.command)
        for tool in plan.tools
        if tool.kind == "shell" and tool.command
    }
    commands: dict[int, tuple[list[_Command], bool, set[str]]] = {}
    for index, task in enumerate(plan.tasks):
        for path, body, checks in _task_bodies(("tasks", index), task):
            described = tools.get(body.tool or "")
            if described is not None:
                if body.retry is not None:
                    yield from _retry_problems(body.retry, described, path, f"task {task.id!r}")
                needed_names = needed_by_body.get(described.name, ())
                if lacking := [name for name in needed_names if name not in body.arguments]:
                    message = f"task {task.id!r}: the body of tool {body.tool!r} needs the arguments {brief_repr(lacking)}"
                    where = format_path((*path, "arguments"))
                    yield Problem(where, f"{message}, given are {brief_repr(list(body.arguments))}")
                if described.name in holes:
                    for problem in leading_problems(
                        holes[described.name], body.arguments, described.parameters
                    ):
                        where = format_path((*path, "arguments"))
                        yield Problem(where, f"task {task.id!r}: tool {body.tool!r}: {problem}")
            if not checks:
                continue
            if id(checks) not in commands:
                commands[id(checks)] = _read_commands(checks)
            entries, is_wrong, needed = commands[id(checks)]
            for number, text, found, names in (
                entries if is_wrong or not needed <= body.arguments.keys() else ()
            ):
                why = list(found)
                if missing := [name for name in names if name not in body.arguments]:
                    given = f"given are {brief_repr(list(body.arguments))}"
                    why.append(f"it needs the arguments {brief_repr(missing)}, {given}")
                at = format_path((*path, "expect", "commands", number) if body.commands else path)
                yield from (
                    Problem(at, f"task {task.id!r}: the command {text!r}: {problem}")
                    for problem in why
                )


def _condition_problems(plan: Plan) -> Iterator[Problem]:
    """Yield the names and comparisons in conditions that can never be meant.

    Where tools of other kinds may take the place of one, nobody knows the fields of the output.
    """
    kinds: dict[str, set[str | None]] = {}
    for tool in plan.tools:
        if tool.capability is not None:
            kinds.setdefault(tool.capability, set()).add(tool.kind)
    # Without tasks, this is a file of tools, which may be of an MCP proxy.
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
    results: dict[TaskId, Sequence[JsonObject]] = {}
    for task in plan.tasks:
        if task.tool in known and not task.fallbacks:
            results[task.id] = known[task.tool].output
            if task.expect is not None and task.expect.json_schema is not None:
                results[task.id] = [*results[task.id], task.expect.json_schema]
            if task.for_each is not None:
                # Its result is the list of those of its elements, of which any may be missing.
                results[task.id] = [{"type": "array"}]
    for index, tool in enumerate(plan.tools):
        found = _stated_problems(tool, tool.name, None, known=known, own=own, results=results)
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
        subject = f"task {task.id!r}"
        for path, body, _ in _task_bodies(("tasks", index), task):
            if body.when is not None:
                try:
                    condition = Condition.parse(body.when)
                except ExpressionError:
                    continue  # the check of the plan says so
                checked = Checked((), None, None, results)
                for message in condition_problems(condition, checked):
                    yield Problem(format_path((*path, "when")), f"{subject}: {message}")
            found = _stated_problems(
                body, body.tool, body.arguments, known=known, own=own, results=results
            )
            if body.undo is not None:
                found = chain(found, undo_task_problems(body.undo, ids, results))
            for inner, message in found:
                yield Problem(format_path((*path, *inner)), f"{subject}: {message}")


def _stated_problems(
    part: ToolSpec | TaskBody,
    tool: str | None,
    given: JsonObject | None,
    *,
    known: Mapping[str, ToolKnowledge],
    own: Mapping[str, ToolKnowledge],
    results: Mapping[TaskId, Sequence[JsonObject]],
) -> Iterator[tuple[JsonPath, str]]:
    """Yield what is wrong with what a tool or a task states under `expect` and `confirm`.

    Args:
        part: the tool or the task.
        tool: the name of the tool whose calls that is about, if any is named.
        given: the arguments of the task; None for a tool.
        known: what is known of the calls of tools, whichever tool may take their places.
        own: what is known of the calls of the tools themselves.
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


_Command = tuple[int, str, list[str], tuple[str, ...]]


def _retry_problems(
    retry: Retry, tool: ToolSpec, path: JsonPath, subject: str
) -> Iterator[Problem]:
    """Yield the entries of `on` that no failure of the tool can fit.

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
            hint = did_you_mean(name, known)
            message = f"no failure of tool {tool.name!r} is of a class {entry!r}"
            message = "; ".join(filter(None, [message, hint]))
        yield Problem(format_path((*path, "retry", "on", number)), f"{subject}: {message}")


@cache
def _error_names(kind: str) -> frozenset[str]:
    """Return the names that a failure of a kind of tool may have in `on`; none where it may be any.

    Those of Python and of the client for HTTP are known as well: they are what the errors of tools
    are derived from, or raised from.
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


def _read_commands(checks: Sequence[str]) -> tuple[list[_Command], bool, set[str]]:
    """Return commands (number, text, problems, arguments), whether any is wrong, and all arguments."""
    commands: list[_Command] = []
    for number, command in enumerate(checks):
        needed = tuple(missing_arguments([command], {IDEMPOTENCY_KEY: ""}))
        commands.append((number, command, command_problems(command), needed))
    return (
        commands,
        any(found for _, _, found, _ in commands),
        {name for *_, names in commands for name in names},
    )


def check_machine(plan: Plan, environ: Mapping[str, str] | None = None) -> list[Problem]:
    """Return the programs, modules and variables that the tools of a plan need and this machine lacks.

    None of this keeps a plan from running: replanning handles a tool that fails for it.

    Args:
        plan: the plan.
        environ: the environment of the tools; by default that of the program.
    """
    environ = os.environ if environ is None else environ
    lookups: dict[tuple[str, str], bool] = {}
    notes: list[Problem] = []

    def needs_of(programs: Sequence[str], path: str, variables: Sequence[str]) -> list[str]:
        for program in programs:
            if (program, path) not in lookups and len(lookups) < _MAX_LOOKUPS:
                lookups[program, path] = shutil.which(program, path=path) is None
        lacking = [program for program in programs if lookups.get((program, path))]
        needs = [f"the program {program!r}, which is not on the PATH" for program in lacking]
        return needs + (
            [f"the environment variables {', '.join(variables)}, which are not set"]
            if variables
            else []
        )

    unconfined: dict[str, int] = {}
    is_confined = shutil.which(SANDBOX_PROGRAM, path=environ.get("PATH", os.defpath)) is not None
    if plan.mcp and find_spec("mcp") is None:
        notes.append(Problem("mcp", str(McpNotInstalled(plan.mcp))))
    for name, server in plan.mcp.items():
        program = server.command[0] if server.command else ""
        programs = [program] if program and "/" not in program else []
        path = server.env.get("PATH", environ.get("PATH", os.defpath))
        needs = needs_of(programs, path, unset_variables(server, environ))
        notes += [
            Problem(f"mcp.{name}", f"MCP server {name!r} needs {missing}") for missing in needs
        ]
    for index, tool in enumerate(plan.tools):
        programs = command_programs(tool.command) if tool.kind == "shell" and tool.command else []
        needs = needs_of(programs, environ.get("PATH", os.defpath), unset_variables(tool, environ))
        if tool.kind == "python" and tool.callable and not callable_problems(tool.callable):
            package = tool.callable.partition(":")[0].partition(".")[0]
            if find_spec(package) is None:
                advice = "install it, or put its folder on PYTHONPATH"
                needs.insert(0, f"the module {package!r}, which is not found; {advice}")
        notes += [
            Problem(f"tools[{index}]", f"tool {tool.name!r} needs {missing}") for missing in needs
        ]
        if tool.kind == "shell" and tool.workspace is not None and not is_confined:
            unconfined[tool.name] = index
    if unconfined:
        one = len(unconfined) == 1
        names = ", ".join(map(repr, unconfined))
        which = (
            f"tool {names} is not confined to its"
            if one
            else f"tools {names} are not confined to their"
        )
        lacking = f"{SANDBOX_PROGRAM!r} (bubblewrap) is not on the PATH; only arguments of type path are checked"
        notes.append(Problem(f"tools[{min(unconfined.values())}]", f"{which} workspace: {lacking}"))
    return notes


def check_danger(plan: Plan) -> list[Problem]:
    """Return the uses of tools whose commands look dangerous, where a tool does not state whether it is.

    Args:
        plan: the plan.
    """
    return first_problems(chain(_dangerous_uses(plan), _included_problems(plan, check_danger)))


def _dangerous_uses(plan: Plan) -> Iterator[Problem]:
    judged = 0
    for index, task in enumerate(plan.tasks):
        for path, body, _ in _task_bodies(("tasks", index), task):
            tool = plan.tool(body.tool)
            if tool is None or tool.dangerous:
                continue
            if (judged := judged + len(tool.command or "")) > _MAX_JUDGED_CHARS:
                yield Problem(
                    format_path(path),
                    "from here on, no use is judged: the commands are too long in all",
                )
                return
            if harm := command_risk(tool, body.arguments):
                message = f"task {task.id!r}: tool {body.tool!r} may do harm: {harm}"
                yield Problem(
                    format_path(path), f"{message}; state whether the tool is `dangerous`"
                )


def check_missing_outputs(plan: Plan) -> list[Problem]:
    """Return the arguments that may be null although the tool needs a value.

    It needs one where the parameter has a type, and where its command or its address contains it.

    They refer to a task that a condition may leave out while the task that reads it runs, or that
    may fail before a task with `run_if: always`.
    """
    branches = _Branches(plan)
    found = []
    for index, task in enumerate(plan.tasks):
        tool = plan.tool(task.tool)
        if tool is None or not (branches.conditional or task.run_if):
            continue
        filled_in = {*placeholders(tool.command or ""), *placeholders(tool.url or "")}
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
            if len(references) != 1 or str(references[0]) != value or references[0].task is None:
                continue
            source = references[0].task
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
    """Yield the texts in arguments: where each is, and the type of the value that belongs there.

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
    return properties.get(step) if isinstance(properties, dict) else None


def _type_in_schema(schema: object) -> str:
    """Return the one type that a schema states, or else `any`."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    return kind if isinstance(kind, str) and kind != "null" else "any"


class _Branches:
    """The branches of a plan that conditions may leave out.

    In a sequential plan, no task is left out but those whose own conditions do not hold.

    Args:
        plan: the plan.

    Attributes:
        tasks: the tasks by id.
        conditional: whether any has a condition.
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
        if source not in self.tasks:  # an element of a list
            return False
        skipped = self._least_skipped(source)
        return bool(skipped) and reader.id not in self._left_out(skipped)

    def _least_skipped(self, task_id: TaskId) -> set[TaskId]:
        """Return the fewest tasks whose conditions leave a task out; none if nothing does."""
        skipped: set[TaskId] = set()
        seen = {task_id}
        stack = [self.tasks[task_id]]
        while stack:
            task = stack.pop()
            # One about the element leaves out elements, and never the list.
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
        """Return the tasks that are left out where these are skipped by their conditions."""
        left_out = set(skipped)
        if self._sequential:
            return left_out
        stack = list(left_out)
        while stack:
            for task in self._dependents.get(stack.pop(), ()):
                is_behind = left_out.issuperset(task.depends_on) and task.run_if != "always"
                if is_behind and task.id not in left_out:
                    left_out.add(task.id)
                    stack.append(task.id)
        return left_out


def check_unused_arguments(plan: Plan) -> list[Problem]:
    """Return the arguments that no command and no request uses, so that they have no effect.

    They are no errors, since another tool may use them.

    Args:
        plan: the plan.
    """
    same: dict[str, set[str]] = {}  # what may take the place of a tool is given the same
    for tool in plan.tools:
        same.setdefault(tool.capability or "", set()).update(
            _accepted_arguments(tool) if tool.capability is not None else ()
        )
    accepted = {
        tool.name: (_accepted_arguments(tool), same[tool.capability or ""])
        for tool in plan.tools
        if tool.kind in _TEMPLATE_KINDS
        and not tool.produces  # what they make is looked for where arguments say
    }
    checked_names: dict[int, set[str]] = {}  # many fallbacks may inherit the same checks

    def unused_arguments() -> Iterator[Problem]:
        for index, task in enumerate(plan.tasks):
            for path, body, checks in _task_bodies(("tasks", index), task):
                own, others = accepted.get(body.tool or "", ((), ()))
                for name in body.arguments if body.tool in accepted else ():
                    if id(checks) not in checked_names:
                        checked_names[id(checks)] = {
                            name for text in checks for name in placeholders(text)
                        }
                    if not (name in own or name in others or name in checked_names[id(checks)]):
                        where = format_path((*path, "arguments", name))
                        yield Problem(
                            where, f"task {task.id!r}: tool {body.tool!r} makes no use of {name!r}"
                        )

    included = _included_problems(plan, check_unused_arguments)
    return first_problems(chain(unused_arguments(), included))


def check_env_arguments(plan: Plan) -> list[Problem]:
    """Return the arguments with `{env:NAME}`, which is filled in for tools alone.

    They are no errors, since a tool may want this text.

    Args:
        plan: the plan.
    """

    def plain_references() -> Iterator[Problem]:
        for index, task in enumerate(plan.tasks):
            for path, body, _ in _task_bodies(("tasks", index), task):
                for name, value in body.arguments.items():
                    for text in iter_strings(value):
                        for variable in env_references(text):
                            yield Problem(
                                format_path((*path, "arguments", name)),
                                f"task {task.id!r}: {{env:{variable}}} is plain text in the "
                                f"argument {name!r}; it is filled in where a tool states `env`, "
                                "`headers`, `url` or `body`",
                            )

    included = _included_problems(plan, check_env_arguments)
    return first_problems(chain(plain_references(), included))


def _accepted_arguments(tool: ToolSpec) -> set[str]:
    return {
        *tool.parameters,
        *(
            name
            for text in (*tool_templates(tool), *tool.fact_patterns)
            for name in placeholders(text)
        ),
    }


def _task_bodies(path: JsonPath, task: TaskBody) -> list[tuple[JsonPath, TaskBody, Sequence[str]]]:
    """Return a task with its fallbacks and undo tasks at all levels: path, body, commands of `expect`."""
    bodies: list[tuple[JsonPath, TaskBody, Sequence[str]]] = [(path, task, task.commands)]
    for where, body, held in bodies:  # grows while it is iterated
        for index, fallback in enumerate(body.fallbacks):
            inherited = held if fallback.expect is None else fallback.commands
            bodies.append(((*where, "fallbacks", index), fallback, inherited))
        if body.undo is not None:
            bodies.append(((*where, "undo"), body.undo, body.undo.commands))
    return bodies
