"""The commands that show settings and check them."""

from __future__ import annotations

from typing import Annotated

import typer

from replanning.cli._carrying import paragraphs
from replanning.cli._options import JsonOption, SettingsOption
from replanning.cli._program import CommandGroup, Program

SettingsFileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        show_default=False,
        help="The settings file; by default replanning.yaml or .replanning.yaml, if there is one.",
    ),
]

config = Program(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode="rich", help="Show the settings, and check them."
)


@config.command(
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning config show",
        "replanning config show --changed --settings ci.yaml",
        "REPLANNING_PROVIDER=openai replanning config show --json",
    ),
)
def show(
    *,
    settings: SettingsOption = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not as it is by default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting with what it is, and where that comes from: the file, a variable, an override, or nowhere."""
    from replanning.cli._settings import show_settings

    show_settings(settings, only_changed=changed, as_json=as_json)


@config.command(
    epilog=paragraphs(
        "[bold]Examples[/bold]",
        "replanning config check",
        "replanning config check ci.yaml --json",
        "[bold]Exit codes[/bold]",
        "0 nothing is wrong · 2 something is",
    ),
)
def check(file: SettingsFileArgument = None, *, as_json: JsonOption = False) -> None:
    """Say everything that is wrong with the settings, in the file and in variables, with its place and what is expected.

    Variables that look like misspelt ones are wrong, too. A server that is to know a person's settings is asked.
    """
    from replanning.cli._settings import check_settings

    raise typer.Exit(check_settings(file, as_json=as_json))
