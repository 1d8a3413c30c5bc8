"""Looks at plan files without running them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import anyio
from pydantic import BaseModel, ValidationError

from replanning import Goal, Plan, PlanError, Task, ToolSpec
from replanning.cli.options import ExitCode
from replanning.cli.output import escape_control, print_json, print_message, print_result, problems_json
from replanning.errors import Problem
from replanning.plan.document import plan_schema
from replanning.plan.messages import did_you_mean, format_path, parse_path
from replanning.plan.reading import format_of, locate_problems, read_document
from replanning.plan.types import JsonObject, JsonValue
from replanning.tools import ToolExecutor, check_machine, check_tools
from replanning.tools.check import check_unused_arguments
from replanning.tools.danger import danger_reason

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_plan(path: str) -> Plan:
    """The plan in a file.

    Raises:
        PlanError: it is not valid; where it is a file of tools, that says which commands take those.
    """
    try:
        return Plan.load(path)
    except PlanError as error:
        if not _is_tools_file(path):
            raise
        name = shlex.quote(path)
        what = "this is a file of tools, and no plan: it has neither a goal nor tasks"
        ways = (
            f"replanning solve --goal TEXT --tools {name} reaches a goal with them, replanning tools {name} lists them"
        )
        others = (problem for problem in error.problems if problem.place != f"{path} goal")
        raise PlanError([Problem(path, f"{what}; {ways}"), *others]) from None


def validate_plan(path: str, *, as_json: bool) -> int:
    """Say what is wrong with a plan file; returns the exit code."""
    plan, problems, notes = _check_plan_file(path)
    if as_json:
        print_json(
            {
                "plan": path,
                "valid": not problems,
                "problems": problems_json(problems),
                "notes": problems_json(notes),
            }
        )
    elif plan is None or problems:
        print_message(f"error: {PlanError(problems)}")
    else:
        count = len(plan.tasks)
        print_result(
            f"{path} is valid: {count} task{'s' * (count != 1)}, {len(plan.tools)} tool{'s' * (len(plan.tools) != 1)}"
        )
        for note in notes:
            print_result(f"note: {escape_control(note.message)}")
    return int(ExitCode.USAGE if problems else ExitCode.OK)


def print_schema() -> None:
    """Print the JSON Schema of plan files."""
    print_json(plan_schema())


def _check_plan_file(path: str) -> tuple[Plan | None, list[Problem], list[Problem]]:
    try:
        plan = read_plan(path)
    except PlanError as error:
        return None, [*error.problems, *_partial_tool_problems(path, error.problems)], []
    return plan, locate_problems(check_tools(plan), path), [*check_unused_arguments(plan), *check_machine(plan)]


def _partial_tool_problems(path: str, told: Sequence[Problem]) -> list[Problem]:
    """What is wrong with tools of a plan that is not valid, where nothing is told of them yet."""
    document = _load_document(path)
    tools, tasks = _valid_parts(document, "tools", ToolSpec), _valid_parts(document, "tasks", Task)
    # Only to be looked at: as a whole it is wrong, and its positions are not those of the file.
    plan = Plan.model_construct(goal=Goal(objective=""), tools=tuple(tools.values()), tasks=tuple(tasks.values()))
    numbers = {"tools": list(tools), "tasks": list(tasks)}
    found = []
    for problem in check_tools(plan):
        match parse_path(problem.place):
            case (("tools" | "tasks") as group, int(index), *rest):
                at = (group, numbers[group][index])
                if not any(_is_about_part(one, format_path(at)) for one in told):
                    found.append(Problem(format_path((*at, *rest)), problem.message))
    return locate_problems(found, path)


def _is_tools_file(path: str) -> bool:
    keys = _load_document(path).keys()
    return not keys.isdisjoint({"tools", "mcp"}) and keys.isdisjoint({"goal", "tasks"})


def _load_document(path: str) -> JsonObject:
    """What stands in a file; nothing where it is no plan by any measure."""
    try:
        document = read_document(Path(path).read_text(encoding="utf-8-sig"), format=format_of(path))
    except (OSError, UnicodeDecodeError, PlanError):
        return {}
    return document if isinstance(document, dict) else {}


def _valid_parts(document: JsonObject, group: str, model: type[ModelT]) -> dict[int, ModelT]:
    """The parts of a plan that are right by themselves, unknown fields aside, by their number."""
    found: dict[int, ModelT] = {}
    parts = document.get(group)
    for number, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict):
            with suppress(ValidationError, PlanError):
                found[number] = model.model_validate({name: part[name] for name in part if name in model.model_fields})
    return found


def _is_about_part(problem: Problem, part: str) -> bool:
    return re.search(rf"(?:^|\s){re.escape(part)}(?![0-9])", problem.place) is not None


_MAX_DESCRIPTION_CHARS = 100
"""Characters of a description that are shown."""


def list_tools(plan: Plan, *, as_json: bool) -> int:
    """Print the tools; returns the exit code.

    Raises:
        ReplanningError: the tools do not fit together, or the servers cannot be asked.
    """
    found, absent = anyio.run(_discover_tools, plan)
    lacking = _missing_requirements(found)
    stated = {tool.name for tool in plan.tools if not tool.available}
    rows = [
        _tool_json(tool, found, lacking.get(tool.name) or _unavailable_reason(tool, found, absent, stated))
        for tool in found.tools
    ]
    if as_json:
        servers = {name: absent.get(name, "") for name in plan.mcp}
        print_json(
            {"tools": rows, "servers": {name: {"available": not why, "why": why} for name, why in servers.items()}}
        )
    else:
        for row in rows:
            _print_tool(row)
        for name, why in absent.items():
            print_message(f"MCP server {name!r} is not there: {why}")
    return int(ExitCode.OK)


async def _discover_tools(plan: Plan) -> tuple[Plan, dict[str, str]]:
    """The plan with the tools of its servers, and the servers that are not there and why."""
    if plan.mcp:
        print_message(f"asking the MCP servers what they can do: {', '.join(plan.mcp)}")
    async with ToolExecutor(plan) as executor:
        return await executor.discover(plan), dict(executor.unavailable_servers)


def _missing_requirements(plan: Plan) -> dict[str, str]:
    """What tools need and this machine lacks."""
    noted = check_machine(plan)
    found: dict[str, str] = {}
    for index, tool in enumerate(plan.tools):
        own = [problem.message for problem in noted if problem.place == f"tools[{index}]"]
        if own:
            found[tool.name] = "; ".join(text.removeprefix(f"tool {tool.name!r} ") for text in own)
    return found


def _unavailable_reason(tool: ToolSpec, plan: Plan, absent: dict[str, str], stated: set[str]) -> str:
    """Why a tool is not available; empty where it is."""
    if tool.available or tool.name in stated:
        return "" if tool.available else "the plan says so"
    if tool.server in absent:
        return absent[tool.server]
    wanted, known = (
        tool.tool or tool.name,
        [one.tool or one.name for one in plan.tools if _is_available_on(one, tool.server)],
    )
    hint = did_you_mean(wanted, known)
    return f"the MCP server {tool.server!r} has no tool {wanted!r}{f'; {hint}' if hint else ''}"


def _is_available_on(tool: ToolSpec, server: str | None) -> bool:
    return tool.available and tool.server == server


def _tool_json(tool: ToolSpec, plan: Plan, why: str) -> JsonObject:
    server = plan.mcp.get(tool.server or "")
    where = tool.command or tool.url or tool.callable or (f"{tool.server}: {server.location}" if server else "")
    return {
        "name": tool.name,
        "kind": tool.kind,
        "from": where,
        "description": tool.description,
        "parameters": dict[str, JsonValue](tool.parameters),
        "optional": list[JsonValue](tool.optional),
        "capability": tool.capability,
        "dangerous": tool.dangerous,
        "harm": danger_reason(tool) if tool.dangerous else "",
        "available": not why,
        "why": why,
    }


def _print_tool(row: JsonObject) -> None:
    parameters, optional = row["parameters"], row["optional"]
    assert isinstance(parameters, dict)
    assert isinstance(optional, list)
    taken = ", ".join(f"{name}{'?' if name in optional else ''}: {kind}" for name, kind in parameters.items())
    kind = f"{row['kind']}{', dangerous' if row['dangerous'] else ''}"
    print_result(escape_control(f"{row['name']}({taken})  {kind}  from {row['from']}"))
    text = " ".join(str(row["description"]).split())
    if text:
        print_result(
            escape_control(
                f"    {text if len(text) <= _MAX_DESCRIPTION_CHARS else f'{text[:_MAX_DESCRIPTION_CHARS]}…'}"
            )
        )
    if row["harm"]:
        print_result(escape_control(f"    dangerous: {row['harm']}"))
    if row["why"]:
        print_result(escape_control(f"    not available: {row['why']}"))
