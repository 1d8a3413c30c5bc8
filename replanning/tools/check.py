"""Checks of the tools of a plan before it runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from replanning.errors import Problem
from replanning.plan.commands import command_problems, command_programs, option_problems, use_danger
from replanning.plan.document import Plan
from replanning.plan.json_values import iter_strings
from replanning.plan.messages import checked, did_you_mean, format_path
from replanning.plan.references import placeholders
from replanning.plan.tasks import COMMAND_PREFIX, TaskBody, ToolSpec
from replanning.plan.types import JsonPath
from replanning.tools.call import missing_arguments, tool_templates, unset_variables
from replanning.tools.errors import McpNotInstalled
from replanning.tools.http import request_problems
from replanning.tools.python import callable_problems
from replanning.tools.shell import SANDBOX_PROGRAM, shell_problems

_RESERVED_OUTPUT_KEYS: Final[Mapping[str, frozenset[str]]] = {
    "shell": frozenset({"exit_code", "stdout", "stderr", "json", "undecodable"}),
    "http": frozenset({"status", "headers", "json", "text", "undecodable"}),
    "mcp": frozenset({"text", "json", "content"}),
}

_DEFINITION_CHECKS: Final[Mapping[str, Callable[[ToolSpec], list[str]]]] = {
    "shell": shell_problems,
    "http": request_problems,
    "python": lambda tool: callable_problems(tool.callable),
    "mcp": lambda tool: [],  # that its server is described, the plan checks itself
}

_TEMPLATE_KINDS: Final = ("shell", "http")
"""Kinds of tools that use only the arguments in their templates."""


@checked
def check_tools(plan: Plan, *, kinds: frozenset[str] = frozenset()) -> list[Problem]:
    """Return everything about the tools of a plan that is bound to fail.

    Args:
        plan: the plan.
        kinds: kinds of tools that are known besides `shell`, `http`, `python` and `mcp`.

    Returns:
        The problems in the order of the plan, each with its place; none if the tools can be run.
    """
    known, problems = sorted(kinds | _DEFINITION_CHECKS.keys()), list[Problem]()
    used = {task.tool for task in plan.tasks}
    for index, tool in enumerate(plan.tools):
        at, name = f"tools[{index}]", f"tool {tool.name!r}"
        if tool.kind is None or tool.kind not in known:
            hint = did_you_mean(tool.kind or "", known)
            message = f"nothing executes kind {tool.kind!r} of {name}" if tool.kind else f"{name} states no `kind`"
            if tool.name in used:
                problems.append(Problem(at, "; ".join(filter(None, [message, f"known are {known}", hint]))))
            continue
        if tool.kind in _DEFINITION_CHECKS:
            problems += [Problem(at, f"{name}: {problem}") for problem in _DEFINITION_CHECKS[tool.kind](tool)]
        problems += [
            Problem(f"{at}.produces", f"{name}: {key!r} is a part of every output; name it otherwise")
            for key in sorted(_RESERVED_OUTPUT_KEYS.get(tool.kind, frozenset()).intersection(tool.produces))
        ]
    for index, task in enumerate(plan.tasks):
        for path, body, checks in _task_bodies(("tasks", index), task):
            described = plan.tool(body.tool)
            if described is not None and (lacking := missing_arguments(iter_strings(described.body), body.arguments)):
                message = f"task {task.id!r}: the body of tool {body.tool!r} needs the arguments {lacking}"
                where = format_path((*path, "arguments"))
                problems.append(Problem(where, f"{message}, given are {list(body.arguments)}"))
            if described is not None and described.kind == "shell" and described.command:
                where = format_path((*path, "arguments"))
                found = option_problems(described.command, body.arguments, described.parameters)
                problems += [Problem(where, f"task {task.id!r}: tool {body.tool!r}: {problem}") for problem in found]
            for number, text in enumerate(checks):
                if not text.startswith(COMMAND_PREFIX):
                    continue
                command = text.removeprefix(COMMAND_PREFIX)
                found = command_problems(command)
                if missing := missing_arguments([command], body.arguments):
                    found.append(f"it needs the arguments {missing}, given are {list(body.arguments)}")
                where = format_path((*path, "acceptance", number) if body.acceptance else path)
                problems += [Problem(where, f"task {task.id!r}: the check {text!r}: {problem}") for problem in found]
    return problems


@checked
def check_machine(plan: Plan, environ: Mapping[str, str] | None = None) -> list[Problem]:
    """Return the programs, modules and variables that the tools of a plan need and this machine lacks.

    None of this keeps a plan from running: replanning handles a tool that fails for it.

    Args:
        plan: the plan.
        environ: the environment of the tools; by default that of the program.
    """
    environ = os.environ if environ is None else environ
    notes: list[Problem] = []
    unconfined: dict[str, int] = {}
    if plan.mcp and find_spec("mcp") is None:
        notes.append(Problem("mcp", str(McpNotInstalled(plan.mcp))))
    for name, server in plan.mcp.items():
        program = server.command[0] if server.command else ""
        programs = [program] if program and "/" not in program else []
        path = server.env.get("PATH", environ.get("PATH", os.defpath))
        needs = _missing(programs, path, unset_variables(server, environ))
        notes += [Problem(f"mcp.{name}", f"MCP server {name!r} needs {missing}") for missing in needs]
    for index, tool in enumerate(plan.tools):
        programs = command_programs(tool.command) if tool.kind == "shell" and tool.command else []
        needs = _missing(programs, environ.get("PATH", os.defpath), unset_variables(tool, environ))
        if tool.kind == "python" and tool.callable and not callable_problems(tool.callable):
            package = tool.callable.partition(":")[0].partition(".")[0]
            if find_spec(package) is None:
                advice = "install it, or put its folder on PYTHONPATH"
                needs.insert(0, f"the module {package!r}, which is not found; {advice}")
        notes += [Problem(f"tools[{index}]", f"tool {tool.name!r} needs {missing}") for missing in needs]
        is_confined = shutil.which(SANDBOX_PROGRAM, path=environ.get("PATH", os.defpath)) is not None
        if tool.kind == "shell" and tool.workspace is not None and not is_confined:
            unconfined[tool.name] = index
    if unconfined:
        one, names = len(unconfined) == 1, ", ".join(map(repr, unconfined))
        which = f"tool {names} is not confined to its" if one else f"tools {names} are not confined to their"
        lacking = f"{SANDBOX_PROGRAM!r} (bubblewrap) is not on the PATH; only arguments of type path are checked"
        notes.append(Problem(f"tools[{min(unconfined.values())}]", f"{which} workspace: {lacking}"))
    return notes


def _missing(programs: Sequence[str], path: str, variables: Sequence[str]) -> list[str]:
    lacking = [program for program in programs if shutil.which(program, path=path) is None]
    needs = [f"the program {program!r}, which is not on the PATH" for program in lacking]
    return needs + ([f"the environment variables {', '.join(variables)}, which are not set"] if variables else [])


def check_danger(plan: Plan) -> list[Problem]:
    """Return the uses of tools whose commands look dangerous, where a tool does not state whether it is.

    Args:
        plan: the plan.
    """
    advice = "state whether the tool is `dangerous`"
    return [
        Problem(format_path(path), f"task {task.id!r}: tool {body.tool!r} may do harm: {harm}; {advice}")
        for index, task in enumerate(plan.tasks)
        for path, body, _ in _task_bodies(("tasks", index), task)
        if (tool := plan.tool(body.tool)) is not None
        and not tool.dangerous
        and (harm := use_danger(tool, body.arguments))
    ]


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
    taken = {
        tool.name: _accepted_arguments(tool) | same[tool.capability or ""]
        for tool in plan.tools
        if tool.kind in _TEMPLATE_KINDS
    }
    makers = {tool.name for tool in plan.tools if tool.produces}  # what they make is looked for where arguments say
    return [
        Problem(
            format_path((*path, "arguments", name)), f"task {task.id!r}: tool {body.tool!r} makes no use of {name!r}"
        )
        for index, task in enumerate(plan.tasks)
        for path, body, checks in _task_bodies(("tasks", index), task)
        if body.tool in taken and body.tool not in makers
        for name in body.arguments
        if name not in taken[body.tool] and name not in {hole for text in checks for hole in placeholders(text)}
    ]


def _accepted_arguments(tool: ToolSpec) -> set[str]:
    facts = (*tool.requires, *tool.adds, *tool.removes, *tool.needs, *tool.produces)
    return {*tool.parameters, *(name for text in (*tool_templates(tool), *facts) for name in placeholders(text))}


def _task_bodies(
    path: JsonPath, body: TaskBody, checks: Sequence[str] = ()
) -> Iterator[tuple[JsonPath, TaskBody, Sequence[str]]]:
    """Yield a task with its fallbacks and undo tasks at all levels: path, body, acceptance."""
    held = body.acceptance or checks
    yield path, body, held
    for index, fallback in enumerate(body.fallbacks):
        yield from _task_bodies((*path, "fallbacks", index), fallback, held)
    if body.undo is not None:
        yield from _task_bodies((*path, "undo"), body.undo)
