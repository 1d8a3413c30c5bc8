"""What commands have in common: options, exit codes, and how they fail."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated, Final, NoReturn

import typer

from replanning._errors import Problem, SettingsError

DEFAULT_STORE: Final = ".replanning/history.db"


class ExitCode(IntEnum):
    """What a command tells the program that started it."""

    OK = 0
    FAILED = 1
    """The run failed or was aborted."""
    USAGE = 2
    """The command, a file, a setting or the store cannot be used; nothing was run."""
    PAUSED = 3
    """The run stands still and can be resumed."""
    NEEDS_HUMAN = 4
    """The run stands still until a person answers a question."""
    INTERRUPTED = 130
    """The run was stopped at once by a second Ctrl-C; it can be resumed."""


class AskMode(StrEnum):
    """Who is asked where a person must decide."""

    CONSOLE = "console"
    STORE = "store"
    NEVER = "never"


StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="PLACE",
        envvar="REPLANNING_STORE",
        help="Where runs are kept: a SQLite file; a folder or NAME.jsonl for text files; memory for nowhere;"
        " or PLUGIN:PLACE.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The id of the run, or how it begins; latest is the newest.")
]
SettingsOption = Annotated[
    str | None,
    typer.Option(
        "--settings", metavar="FILE", help="Settings; by default replanning.yaml or .replanning.yaml, if there is one."
    ),
]


def decode_argument(words: str, option: str) -> str:
    """Words of the command line, which are taken for UTF-8 whatever the locale is.

    Raises:
        SettingsError: they are something else.
    """
    try:
        return words.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError([Problem(option, f"it is not UTF-8: {error.reason} at byte {error.start}")]) from error


def fail(message: str, code: ExitCode = ExitCode.USAGE) -> NoReturn:
    """Say on standard error what is wrong, and end."""
    from replanning.cli._output import print_message

    print_message(f"error: {message}")
    raise typer.Exit(code)
