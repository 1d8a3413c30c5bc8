"""The command-line program: the options that commands share, their output, error messages and exit codes.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from replanning.errors import Problem, ReplanningError, SettingsError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

NON_TTY_WIDTH: Final = 120
"""Characters on one line of a table in a file or pipe."""

DIFF_STYLES: Final = {"+": "green", "-": "red"}
"""Colours of the lines of a diff, by their first character."""

_CONTROL_CHARACTERS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ExitCode(IntEnum):
    """Result of a command, for the program that started it."""

    OK = 0
    FAILED = 1
    """The run failed or was aborted."""
    USAGE = 2
    """The command, a file, a setting or the store cannot be used; nothing was run."""
    PAUSED = 3
    """The run is paused and can be resumed."""
    NEEDS_HUMAN = 4
    """The run waits until a person answers a question."""
    INTERRUPTED = 130
    """The run was stopped at once by a second Ctrl-C; it can be resumed."""


def prepare_streams() -> None:
    """Make printing safe: replace characters that the terminal cannot show, and closed streams by the null device."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - the process closes it
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - likewise
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def console(*, error: bool = False) -> Console:
    """Return a Rich console that prints text literally, without markup, emoji codes or automatic colours."""
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    width = None if stream.isatty() else NON_TTY_WIDTH
    return Console(stderr=error, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def print_result(renderable: RenderableType) -> None:
    """Print a result on standard output."""
    console().print(renderable)


def print_message(text: str) -> None:
    """Print a message on standard error; a closed standard error is ignored, so that the work continues."""
    with suppress(OSError):
        sys.stderr.write(f"{escape_control(text)}\n")
        sys.stderr.flush()


def print_json(value: object) -> None:
    """Print a result as JSON on standard output, in ASCII so that every program can read it."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
    sys.stdout.flush()


def problems_json(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """Return problems in the form that `--json` prints."""
    return [{"place": problem.place, "message": problem.message} for problem in problems]


def escape_control(text: str) -> str:
    """Return text from tools and plans with control characters, which could steer the terminal, shown as codes."""
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\x{ord(match[0]):02x}", text.replace("\r\n", "\n"))


def fail(message: str, code: ExitCode = ExitCode.USAGE) -> NoReturn:
    """Print an error on standard error and end the command."""
    print_message(f"error: {message}")
    raise typer.Exit(code)


def refuse(message: str) -> NoReturn:
    """End the command because the object it names does not exist, or does not allow the operation."""
    fail(message, ExitCode.FAILED)


DEFAULT_STORE: Final = ".replanning/history.db"

DEFAULT_CONCURRENCY: Final = 8
"""Tasks that run at the same time where the command line does not say otherwise."""

RUN_EXIT_CODES_HELP: Final = (
    "0 succeeded · 1 failed or aborted · 2 wrong usage, plan, settings or store: nothing was run · 3 paused ·"
    " 4 needs a person's answer · 130 stopped at once by a second Ctrl-C. After 3, 4 and 130 it can be resumed."
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

SequentialOption = Annotated[bool, typer.Option("--sequential", help="Run one task at a time.")]

ConcurrencyOption = Annotated[
    int | None,
    typer.Option("--max-concurrency", metavar="N", min=1, help="Run at most this many tasks at the same time (8)."),
]


@dataclass(kw_only=True, slots=True)
class RunOptions:
    """Options that carry out a run; a command with a parameter `options` of this type has all of them.

    Attributes:
        concurrency: tasks that may run at the same time.
        ask: also says what `no_ask` says.
    """

    replan: Annotated[
        bool | None,
        typer.Option("--replan/--no-replan", help="Repair the plan when something goes wrong, or leave it as it is."),
    ] = None
    providers: Annotated[
        list[str] | None,
        typer.Option(
            "--replan-provider",
            metavar="NAME",
            help="The provider of alternatives: repair, or a language model (openai, anthropic, github-copilot, ollama,"
            " local; NAME:MODEL for one of its models; NAME,NAME to fall back to the second); repeat for several."
            " auto is repair and the first model whose key is in the environment.",
        ),
    ] = None
    store: StoreOption = DEFAULT_STORE
    sequential: SequentialOption = False
    max_concurrency: ConcurrencyOption = None
    context: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="context.KEY=VALUE", help="Set a value of the context; repeat for several."),
    ] = None
    settings: SettingsOption = None
    observe: Annotated[bool, typer.Option("--observe", help="Record the changes that would be made; make none.")] = (
        False
    )
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace", metavar="WHERE", help="Send spans: console, or otlp=ADDRESS, such as otlp=http://localhost:4318."
        ),
    ] = None
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            metavar="TARGET",
            help="Write notices and the plan as a checklist to a Markdown file, or to a folder with a file for each run;"
            " github=owner/repo#12 or gitlab=group/project!7 for comments there; console for lines on standard error;"
            " repeat for several.",
        ),
    ] = None
    ask: Annotated[
        AskMode | None,
        typer.Option(
            "--ask",
            help="Ask a person at the console (the default on a terminal), or through the store, where replanning approve"
            " answers; never ends the run with code 4 when a decision is needed.",
        ),
    ] = None
    no_ask: Annotated[bool, typer.Option("--no-ask", help="The same as --ask never.")] = False
    json: JsonOption = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False

    concurrency: int = field(init=False)

    def __post_init__(self) -> None:
        self.concurrency = concurrency(sequential=self.sequential, max_concurrency=self.max_concurrency)
        if self.no_ask and self.ask is not None:
            fail("--ask and --no-ask contradict each other; give one of them")
        self.ask = AskMode.NEVER if self.no_ask else self.ask

    def resume_options(self) -> list[str]:
        """Return the options that a later `resume` needs as well."""
        words: list[str] = []
        words += ["--settings", self.settings] if self.settings else []
        words += [word for name in self.providers or () for word in ("--replan-provider", name)]
        if self.concurrency != DEFAULT_CONCURRENCY:
            words += ["--max-concurrency", str(self.concurrency)]
        words += ["--trace", self.trace] if self.trace else []
        words += [word for target in self.notify or () for word in ("--notify", target)]
        words += ["--ask", self.ask] if self.ask else []
        return words


def all_except(*names: str) -> list[str]:
    """Return the names of all run options but these."""
    return [option.name for option in fields(RunOptions) if option.name not in names]


def concurrency(*, sequential: bool, max_concurrency: int | None) -> int:
    """Return the number of tasks that may run at the same time."""
    if sequential and max_concurrency is not None:
        fail("--sequential and --max-concurrency contradict each other; give one of them")
    return 1 if sequential else DEFAULT_CONCURRENCY if max_concurrency is None else max_concurrency


def decode_argument(text: str, option: str) -> str:
    """Decode a command-line argument as UTF-8, whatever the locale is.

    Raises:
        SettingsError: it is not valid UTF-8.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError([Problem(option, f"it is not UTF-8: {error.reason} at byte {error.start}")]) from error


def epilog(*examples: str, title: str = "Examples", codes: str = "") -> str:
    """Return the text below the help of a command: examples, and what its exit codes mean; each line a paragraph."""
    return "\n\n".join([f"[bold]{title}[/bold]", *examples, *(["[bold]Exit codes[/bold]", codes] if codes else ())])


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
            problems = error.problems if isinstance(error, SettingsError) else ()
            places = [problem.place for problem in problems]
            if places and all(place.startswith("--") or (place.isalpha() and place.isupper()) for place in places):
                fail("; ".join(map(str, problems)))  # about arguments, not about settings
            fail(str(error))
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

    def command(self, *args: Any, without: Sequence[str] = (), **settings: Any) -> Callable[[FunctionT], FunctionT]:
        """Return a decorator that registers a function as a command; arguments are those of `Typer.command`.

        Args:
            args: positional arguments of `Typer.command`.
            without: fields of the parameter `options` that are no options of the command, which has the others.
            settings: named arguments of `Typer.command`.
        """
        register = super().command

        def decorate(function: FunctionT) -> FunctionT:
            expanded = _expand_options(function, without)
            register(*args, cls=Command, help=unwrap_paragraphs(function.__doc__), **settings)(expanded)
            return function

        return decorate


def _expand_options(function: Callable[..., Any], without: Sequence[str]) -> Callable[..., Any]:
    """Return a function that takes the fields of its parameter `options`, a dataclass, in place of that, if it has one."""
    signature = inspect.signature(function, eval_str=True)
    if "options" not in signature.parameters:
        return function
    group = signature.parameters["options"].annotation
    hints = get_type_hints(group, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(option.name, keyword, default=option.default, annotation=hints[option.name])
        for option in fields(group)
        if option.init and option.name not in without
    ]

    @wraps(function)
    def command(**values: Any) -> Any:
        given = {option.name: values.pop(option.name) for option in options}
        return function(**values, options=group(**given))

    parameters = [*(one for one in signature.parameters.values() if one.name != "options"), *options]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # inspect reads it
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def unwrap_paragraphs(docstring: str | None) -> str:
    """Return a docstring with each paragraph on one line."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(docstring or ""))
