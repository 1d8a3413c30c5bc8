"""`replanning tools`: lists the tools of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replanning.cli._carrying import PLAN_PANEL, paragraphs
from replanning.cli._options import JsonOption

ToolsFileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A plan file, or a file of tools: YAML or JSON.")
]


def tools(file: ToolsFileArgument, *, as_json: JsonOption = False) -> None:
    """List the tools of a plan or of a file of tools, with those that its MCP servers have.

    The servers are started to ask them, and ended again; no tool is used.
    """
    from replanning.cli._task import read_tools
    from replanning.cli._tool_list import list_tools

    raise typer.Exit(list_tools(read_tools(file, "FILE", planning=False), as_json=as_json))


def add_tool_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command(
        rich_help_panel=PLAN_PANEL,
        epilog=paragraphs(
            "[bold]Examples[/bold]",
            "replanning tools plan.yaml",
            "replanning tools tools.yaml --json",
            "[bold]Exit codes[/bold]",
            "0 done · 2 wrong usage, file or tools",
        ),
    )(tools)
