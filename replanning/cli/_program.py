"""What the command line makes of Typer: errors in sentences, and a help that names types only where there are any."""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from replanning._errors import ReplanningError, SettingsError
from replanning.cli._options import ExitCode, fail

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
