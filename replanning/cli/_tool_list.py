"""Lists the tools of a plan, those of its MCP servers included: what they take, and whether they can be used here."""

from __future__ import annotations

import anyio

from replanning import Plan, ToolSpec
from replanning._plan import JsonObject, JsonValue
from replanning._wording import did_you_mean
from replanning.cli._options import ExitCode
from replanning.cli._output import escape_control, print_json, print_message, print_result
from replanning.tools import ToolExecutor, check_machine
from replanning.tools._danger import danger_reason

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
