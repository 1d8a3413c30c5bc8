"""What commands have in common: options, exit codes, and how they fail."""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from replanning.errors import Problem, ReplanningError, SettingsError

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
    from replanning.cli.output import print_message

    print_message(f"error: {message}")
    raise typer.Exit(code)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _FlagMetavarMixin:
    """Shows no type behind options that take no value."""

    def get_params(self, ctx: Any) -> list[Any]:  # typer does not export the types
        """The parameters, as help shows them."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of the command that this is mixed into
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_FlagMetavarMixin, TyperCommand):
    """A command of the program."""


class CommandGroup(_FlagMetavarMixin, TyperGroup):
    """Says what is wrong in a sentence, where a traceback would help nobody."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer does not export the types
        """The command that words call; one of two words, as `history prune`, goes before one of the first word."""
        two = " ".join(args[:2])
        if len(args) > 1 and two in self.commands:
            return two, self.commands[two], args[2:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # likewise
        """Run a command; errors of the library are the user's to correct."""
        try:
            return super().invoke(ctx)
        except ReplanningError as error:
            fail(_error_message(error))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            problem = f"what there is to say cannot be written: {error.strerror}; `replanning status` says it again"
            fail(problem, ExitCode.FAILED)
        except KeyboardInterrupt:
            fail("interrupted", ExitCode.INTERRUPTED)


class Program(typer.Typer):
    """An application, or a group of commands in it."""

    def command(self, *args: Any, **named: Any) -> Callable[[FunctionT], FunctionT]:
        """Register a function as a command, as Typer does; its docstring is wrapped as wide as the terminal is."""
        register = super().command

        def registered(function: FunctionT) -> FunctionT:
            return register(*args, **{"cls": Command, "help": _help_text(function), **named})(function)

        return registered


def _help_text(function: Callable[..., Any]) -> str:
    """What a docstring says, a line for each paragraph: the lines of the source are no lines of the help."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")


def _error_message(error: ReplanningError) -> str:
    """What an error says; what is wrong with the command line itself is no matter of the settings."""
    problems = error.problems if isinstance(error, SettingsError) else ()
    written = bool(problems) and all(_is_argument_name(problem.place) for problem in problems)
    return "; ".join(map(str, problems)) if written else str(error)


def _is_argument_name(place: str) -> bool:
    return place.startswith("--") or (place.isalpha() and place.isupper())
