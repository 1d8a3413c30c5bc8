"""The command-line program: groups of commands, the options they share, and their error messages."""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from replanning.cli.output import ExitCode, fail
from replanning.errors import Problem, ReplanningError, SettingsError

DEFAULT_STORE: Final = ".replanning/history.db"

DEFAULT_CONCURRENCY: Final = 8
"""Tasks that run at the same time where the command line does not say otherwise."""

RUN_EXIT_CODES_HELP: Final = (
    "[bold]Exit codes[/bold]",
    (
        "0 succeeded · 1 failed or aborted · 2 wrong usage, plan, settings or store: nothing was run · 3 paused ·"
        " 4 needs a person's answer · 130 stopped at once by a second Ctrl-C. After 3, 4 and 130 it can be resumed."
    ),
)


class AskMode(StrEnum):
    """Place where a person is asked to decide."""

    CONSOLE = "console"
    STORE = "store"
    NEVER = "never"


StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        metavar="PLACE",
        envvar="REPLANNING_STORE",
        help="The store that keeps runs: a SQLite file; a folder or NAME.jsonl for text files; memory to keep nothing;"
        " or PLUGIN:PLACE.",
    ),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="The id of the run, or the beginning of it; latest is the newest run.")
]

SettingsOption = Annotated[
    str | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        help="The settings file; by default replanning.yaml or .replanning.yaml, if there is one.",
    ),
]

PlanArgument = Annotated[
    Path, typer.Argument(metavar="PLAN", help="The plan file: YAML, or JSON where its name ends in .json.")
]

ReplanOption = Annotated[
    bool | None,
    typer.Option("--replan/--no-replan", help="Repair the plan when something goes wrong, or leave it as it is."),
]

ProviderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--replan-provider",
        metavar="NAME",
        help="The provider of alternatives: repair, or a language model (openai, anthropic, github-copilot, ollama,"
        " local; NAME:MODEL for one of its models; NAME,NAME to fall back to the second); repeat for several."
        " auto is repair and the first model whose key is in the environment.",
    ),
]

SequentialOption = Annotated[bool, typer.Option("--sequential", help="Run one task at a time.")]

ConcurrencyOption = Annotated[
    int | None,
    typer.Option("--max-concurrency", metavar="N", min=1, help="Run at most this many tasks at the same time (8)."),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="context.KEY=VALUE", help="Set a value of the context; repeat for several."),
]

ObserveOption = Annotated[bool, typer.Option("--observe", help="Record the changes that would be made; make none.")]

TraceOption = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="WHERE", help="Send spans: console, or otlp=ADDRESS, such as otlp=http://localhost:4318."
    ),
]

NotifyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--notify",
        metavar="TARGET",
        help="Write notices and the plan as a checklist to a Markdown file, or to a folder with a file for each run;"
        " github=owner/repo#12 or gitlab=group/project!7 for comments there; console for lines on standard error;"
        " repeat for several.",
    ),
]

AskOption = Annotated[
    AskMode | None,
    typer.Option(
        "--ask",
        help="Ask a person at the console (the default on a terminal), or through the store, where replanning approve"
        " answers; never ends the run with code 4 when a decision is needed.",
    ),
]

NoAskOption = Annotated[bool, typer.Option("--no-ask", help="The same as --ask never.")]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of the commands that carry out a run; the names are those of the options."""

    store: str = DEFAULT_STORE
    settings: str | None = None
    replan: bool | None = None
    observe: bool = False
    providers: Sequence[str] = ()
    max_concurrency: int = DEFAULT_CONCURRENCY
    context: Sequence[str] = ()
    trace: str | None = None
    notify: Sequence[str] = ()
    ask: AskMode | None = None
    json: bool = False
    quiet: bool = False

    def resume_options(self) -> list[str]:
        """Return the options that a later `resume` needs as well."""
        words: list[str] = []
        words += ["--settings", self.settings] if self.settings else []
        words += [word for name in self.providers for word in ("--replan-provider", name)]
        if self.max_concurrency != DEFAULT_CONCURRENCY:
            words += ["--max-concurrency", str(self.max_concurrency)]
        words += ["--trace", self.trace] if self.trace else []
        words += [word for target in self.notify for word in ("--notify", target)]
        words += ["--ask", self.ask] if self.ask else []
        return words


def concurrency(*, sequential: bool, max_concurrency: int | None) -> int:
    """Return the number of tasks that may run at the same time."""
    if sequential and max_concurrency is not None:
        fail("--sequential and --max-concurrency contradict each other; give one of them")
    return 1 if sequential else DEFAULT_CONCURRENCY if max_concurrency is None else max_concurrency


def ask_mode(ask: AskMode | None, *, no_ask: bool) -> AskMode | None:
    """Return the place where a person is asked; None for the default."""
    if no_ask and ask is not None:
        fail("--ask and --no-ask contradict each other; give one of them")
    return AskMode.NEVER if no_ask else ask


def decode_argument(text: str, option: str) -> str:
    """Decode a command-line argument as UTF-8, whatever the locale is.

    Raises:
        SettingsError: it is not valid UTF-8.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError([Problem(option, f"it is not UTF-8: {error.reason} at byte {error.start}")]) from error


def paragraphs(*lines: str) -> str:
    """Return the text of an epilog in which each line is a paragraph."""
    return "\n\n".join(lines)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _HideFlagTypes:
    """Mixin that shows no type in the help of options without a value."""

    def get_params(self, ctx: Any) -> list[Any]:  # typer does not export the types
        """Return the parameters, as help shows them."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc] # of the command that this is mixed into
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_HideFlagTypes, TyperCommand):
    """A command of the program."""


class CommandGroup(_HideFlagTypes, TyperGroup):
    """Group of commands that reports errors in a sentence instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:  # likewise
        """Run a command; print errors of the library, which the user can correct, and end with their exit code."""
        try:
            return super().invoke(ctx)
        except ReplanningError as error:
            fail(_error_message(error))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            problem = f"the output cannot be written: {error.strerror}; `replanning status` shows how the run ended"
            fail(problem, ExitCode.FAILED)
        except KeyboardInterrupt:
            fail("interrupted", ExitCode.INTERRUPTED)


class Program(typer.Typer):
    """Typer application whose help wraps docstrings at the width of the terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": CommandGroup, "no_args_is_help": True, "rich_markup_mode": "rich", **settings})

    def command(self, *args: Any, **settings: Any) -> Callable[[FunctionT], FunctionT]:
        """Return a decorator that registers a function as a command; arguments are those of `Typer.command`."""
        register = super().command

        def decorate(function: FunctionT) -> FunctionT:
            return register(*args, **{"cls": Command, "help": unwrap_paragraphs(function.__doc__), **settings})(
                function
            )

        return decorate


def unwrap_paragraphs(docstring: str | None) -> str:
    """Return a docstring with each paragraph on one line."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(docstring or ""))


def _error_message(error: ReplanningError) -> str:
    """Return the message of an error; problems with arguments are shown without the heading for settings."""
    problems = error.problems if isinstance(error, SettingsError) else ()
    about_arguments = bool(problems) and all(_is_argument_name(problem.place) for problem in problems)
    return "; ".join(map(str, problems)) if about_arguments else str(error)


def _is_argument_name(place: str) -> bool:
    return place.startswith("--") or (place.isalpha() and place.isupper())
