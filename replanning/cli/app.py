"""The program `replanning`: assembles the commands, each of which is a function in the module of its subject."""

from __future__ import annotations

import ast
import platform
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import typer

from replanning.cli.options import (
    RUN_EXIT_CODES_HELP,
    Command,
    CommandGroup,
    JsonOption,
    Program,
    epilog,
    print_json,
    print_result,
    unwrap_paragraphs,
)
from replanning.version import __version__

COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "Run plans": {"demo": "run", "run": "run", "solve": "solve", "resume": "status", "pause": "status"},
    "Look at runs": {
        "status": "status",
        "history": "history",
        "why": "history",
        "diff": "history",
        "pending": "status",
        "history prune": "history",
    },
    "Decide about runs": {"approve": "status", "reject": "status", "modify": "status", "request": "status"},
    "Look at plans": {
        "plan": "solve",
        "validate": "plans",
        "tools": "plans",
        "schema": "plans",
        "simulate": "plans",
    },
    "About this installation": {"config": "setup", "providers": "setup"},
}
"""Commands by the panel that lists them in the help, each with the module of `replanning.cli` that implements it.

A module is imported when one of its commands is called. A command is the function of its name, whose docstring is its
help; a command of two words is the function `first_second`.
"""

_MODULES: Final = {name: module for panel in COMMANDS.values() for name, module in panel.items()} | {
    "questions": "status"  # another name of `pending`, which help does not list
}


class LazyCommandGroup(CommandGroup):
    """The group of all commands, which imports the module of a command only when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        listed = {name: Command(name, rich_help_panel=panel) for panel, modules in COMMANDS.items() for name in modules}
        self.commands = {**listed, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer does not export the types
        """Return the command that the words call; one of two words takes precedence over one of the first word."""
        count = 2 if len(args) > 1 and " ".join(args[:2]) in _MODULES else 1
        name = " ".join(args[:count])
        if name in _MODULES:
            commands: typer.Typer = import_module(f"replanning.cli.{_MODULES[name]}").commands
            group: Any = typer.main.get_group(commands)
            return name, group.commands[name], args[count:]
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # likewise
        """Write the help, in which each command is described by the docstring of its function.

        The modules are read, not imported, so that help appears at once.
        """
        for name, command in self.commands.items():
            if name in _MODULES:
                source = Path(__file__).with_name(f"{_MODULES[name]}.py").read_bytes()
                functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
                (function,) = (node for node in functions if node.name == name.replace(" ", "_"))
                command.help = unwrap_paragraphs(ast.get_docstring(function))
        super().format_help(ctx, formatter)


app = Program(
    name="replanning",
    cls=LazyCommandGroup,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Keeps a plan alive while it runs: repairs it in place when reality departs from it.",
    epilog=epilog(
        "replanning demo  —  see a real plan repair itself",
        "replanning run plan.yaml  —  run a plan of your own",
        "replanning why RUN  —  see what was changed, and why",
        title="First steps",
        codes=RUN_EXIT_CODES_HELP,
    ),
)


def _print_version(requested: bool) -> None:
    if requested:
        version(as_json=False)
        raise typer.Exit


@app.callback()
def program(
    *,
    version: bool = typer.Option(  # its callback prints it
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Options of the program itself."""


@app.command(rich_help_panel="About this installation")
def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"replanning": __version__, "python": platform.python_version(), "platform": platform.platform()})
    else:
        print_result(f"replanning {__version__} (Python {platform.python_version()})")
