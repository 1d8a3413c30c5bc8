"""The program `replanning`: commands, shared options, output, errors and exit codes.

Each command is a function in the module of its subject. Results go to standard output, everything
else to standard error.
"""

from __future__ import annotations

import ast
import errno
import inspect
import json
import platform
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NoReturn,
    Protocol,
    TypeVar,
    get_type_hints,
)

import typer
from typer.core import TyperCommand, TyperGroup

from replanning.errors import ReplanningError, SettingsError
from replanning.version import __version__

if TYPE_CHECKING:
    from replanning.cli.terminal import TerminalConsole
    from replanning.plan.tasks import Task
    from replanning.secrets import Redactor

COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    "Run plans": {
        "demo": "run",
        "run": "run",
        "solve": "solve",
        "resume": "resume",
        "rerun": "resume",
        "undo": "resume",
        "pause": "status",
        "worker": "temporal",
    },
    "Look at runs": {
        "status": "status",
        "view": "view",
        "show": "show",
        "graph": "show",
        "history": "history",
        "why": "history",
        "diff": "history",
        "decisions": "history",
        "effects": "history",
        "what-if": "again",
        "replay": "again",
        "pending": "status",
        "notify": "history",
        "history prune": "history",
    },
    "Keep agents alive": {"mcp-proxy": "proxy"},
    "Decide about runs": {
        "approve": "status",
        "reject": "status",
        "modify": "status",
        "request": "status",
    },
    "Look at plans": {
        "plan": "solve",
        "validate": "plans",
        "tools": "plans",
        "schema": "plans",
        "simulate": "plans",
        "expect suggest": "expect",
        "expect check": "expect",
    },
    "About this installation": {"config": "setup", "providers": "setup"},
}
"""Commands by help panel, each with its module in `replanning.cli`.

A module is imported when one of its commands is called. The function of the same name implements a
command, and its docstring is the help; for a name with a space or hyphen, it is `first_second`.
"""

_MODULES: Final = {
    name: module for panel in COMMANDS.values() for name, module in panel.items()
} | {
    "questions": "status"  # alias of `pending`, hidden from help
}

DIFF_STYLES: Final = {"+": "green", "-": "red"}
"""Colours of diff lines, by their first character."""

_CONTROL_CHARACTERS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
"""Control characters, including marks that change the direction of text."""

_CONTROL_CODES: Final = {
    ord(character): f"\\x{ord(character):02x}"
    if character <= "\xff"
    else f"\\u{ord(character):04x}"
    for character in _CONTROL_CHARACTERS.findall("".join(map(chr, range(0x206A))))
}


class ExitCode(IntEnum):
    """Exit code of a command."""

    OK = 0
    FAILED = 1
    """The run failed or was aborted."""
    USAGE = 2
    """The command line, a file, a setting or the store is unusable; nothing ran."""
    PAUSED = 3
    """The run is paused and can be resumed."""
    NEEDS_HUMAN = 4
    """The run waits for a person to answer a question."""
    INTERRUPTED = 130
    """A second Ctrl-C or other signal stopped the run at once; it can be resumed."""


def console(*, error: bool = False) -> TerminalConsole:
    """Return a console that prints text literally: no markup, emoji codes or automatic colours."""
    from replanning.cli.terminal import TerminalConsole  # Rich is slow to load

    return TerminalConsole(error=error)


_settings_file: Final = ContextVar[str | None]("_settings_file", default=None)
"""The value of `--settings` in the running command."""

_NO_OVERRIDE: Final[Mapping[str, object]] = {"status": "success", "data": {"planning": {}}}

command_redactor: Final = ContextVar["Redactor | None"]("command_redactor", default=None)
"""The redactor of the running command; set once its settings are read."""


def redactor() -> Redactor:
    """Return the redactor of the settings, or the built-in rules if they are invalid."""
    current = command_redactor.get()
    # Output before a command has read its settings must not contain secrets either.
    if current is None:
        from replanning.config import load_settings  # help needs none of these
        from replanning.run.opening import redactor_for
        from replanning.secrets import Redactor

        try:
            # The server of overrides is not asked: it has no rules about secrets.
            loaded = load_settings(_settings_file.get(), override=lambda: _NO_OVERRIDE)
            current = redactor_for(loaded.settings)
        except (SettingsError, OSError):
            current = Redactor()
        command_redactor.set(current)
    return current


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a command; under nohup, SIGHUP is not one of them."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def print_message(text: str) -> None:
    """Print a message without secrets on standard error; ignore a closed stream."""
    shown = escape_control(redactor().text(text))
    with suppress(OSError):
        if sys.stderr.isatty():
            from replanning.cli.terminal import wrap_text  # Rich is slow to load

            shown = wrap_text(shown, console(error=True).width)
        sys.stderr.write(f"{shown}\n")
        sys.stderr.flush()


def print_json(value: object, *, redact: bool = False) -> None:
    """Print a result as ASCII JSON, which any program can read; `redact` masks its secrets."""
    if redact:
        value = redactor().value(json.loads(json.dumps(value, default=str)))
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
    sys.stdout.flush()


def escape_control(text: str) -> str:
    """Return text with escaped control characters, which could otherwise control the terminal."""
    return text.replace("\r\n", "\n").translate(_CONTROL_CODES)


def fail(message: str, code: ExitCode = ExitCode.USAGE) -> NoReturn:
    """Print an error on standard error and end the command."""
    print_message(f"error: {message}")
    raise typer.Exit(code)


def refuse(message: str) -> NoReturn:
    """Print an error and end the command with code 1: its object is missing or unsuitable."""
    fail(message, ExitCode.FAILED)


DEFAULT_STORE: Final = ".replanning/history.db"

DEFAULT_STOP_TIMEOUT: Final = 5.0
"""Default of --stop-timeout: seconds that running tasks may continue after a signal."""

_MAX_STOP_TIMEOUT: Final = 1_000_000.0

DEFAULT_CONCURRENCY: Final = 8
"""Default number of tasks that run at the same time."""

RUN_EXIT_CODES_HELP: Final = (
    "0 succeeded · 1 failed or aborted · 2 wrong usage, plan, settings or store, or another process"
    " executes the run; nothing ran · 3 paused · 4 needs a person's answer · 130 stopped by a second"
    " Ctrl-C. Resume the run after 3, 4 and 130."
)


_WHERE_PANEL: Final = "Where it runs"
_REPAIR_PANEL: Final = "Repairs and questions"
_OUTPUT_PANEL: Final = "Output"

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        "--on",
        metavar="PLACE",
        envvar="REPLANNING_STORE",
        show_default=False,
        show_envvar=False,
        rich_help_panel=_WHERE_PANEL,
        help="A SQLite file (.replanning/history.db), memory, postgresql://… or"
        " temporal=HOST:PORT/QUEUE. Also $REPLANNING_STORE.",
    ),
]

JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", rich_help_panel=_OUTPUT_PANEL, help="Print only JSON on standard output."
    ),
]

NewestRunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        show_default=False,
        help="The id of a run, or its beginning; by default the newest run.",
    ),
]

RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="The id of the run, or its beginning; latest is the newest run."
    ),
]

SettingsOption = Annotated[
    str | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        rich_help_panel=_WHERE_PANEL,
        help="The settings file; by default replanning.yaml or .replanning.yaml.",
    ),
]

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A parameter, or context.KEY=VALUE; repeatable.",
    ),
]

PlanArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN",
        show_default=False,
        help="The plan file, in YAML or JSON.",
    ),
]


@dataclass(kw_only=True, slots=True)
class RunOptions:
    """Options for executing a run; a parameter `options` of this type adds them to a command.

    It has many attributes because each of them is an option.

    Attributes:
        concurrency: maximum number of tasks at a time.
        ask: also set by `no_ask`.
        view: also set by `open_page`.
    """

    replan: Annotated[
        bool | None,
        typer.Option(
            "--replan/--no-replan",
            rich_help_panel=_REPAIR_PANEL,
            help="Repair the plan, or leave it.",
        ),
    ] = None
    providers: Annotated[
        list[str] | None,
        typer.Option(
            "--replan-provider",
            metavar="NAME",
            rich_help_panel=_REPAIR_PANEL,
            help="repair, auto, openai, ollama:MODEL, …; repeatable.",
        ),
    ] = None
    store: StoreOption = DEFAULT_STORE
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            metavar="FOLDER",
            rich_help_panel=_WHERE_PANEL,
            help="The working directory of the tools.",
        ),
    ] = None
    sequential: Annotated[
        bool,
        typer.Option("--sequential", rich_help_panel=_WHERE_PANEL, help="Run one task at a time."),
    ] = False
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency",
            metavar="N",
            min=1,
            rich_help_panel=_WHERE_PANEL,
            help="Maximum number of tasks at a time (8).",
        ),
    ] = None
    context: SetOption = None
    settings: SettingsOption = None
    observe: Annotated[
        bool,
        typer.Option(
            "--observe",
            rich_help_panel=_REPAIR_PANEL,
            help="Only record what would change.",
        ),
    ] = False
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="WHERE",
            rich_help_panel=_OUTPUT_PANEL,
            help="Send spans: console, or otlp=http://localhost:4318.",
        ),
    ] = None
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            metavar="TARGET",
            rich_help_panel=_OUTPUT_PANEL,
            help="Write notices and a checklist: a Markdown file or folder, github=owner/repo#12,"
            " gitlab=group/project!7 or console; repeatable.",
        ),
    ] = None
    ask: Annotated[
        Literal["console", "store", "never"] | None,
        typer.Option(
            "--ask",
            metavar="WHERE",
            rich_help_panel=_REPAIR_PANEL,
            help="Ask a person: console, store, or never (end with code 4).",
        ),
    ] = None
    no_ask: Annotated[
        bool, typer.Option("--no-ask", rich_help_panel=_REPAIR_PANEL, help="Same as --ask never.")
    ] = False
    stop_timeout: Annotated[
        float,
        typer.Option(
            "--stop-timeout",
            metavar="SECONDS",
            show_default=False,
            rich_help_panel=_WHERE_PANEL,
            help="Time limit for running tasks after SIGTERM or SIGHUP (5).",
        ),
    ] = DEFAULT_STOP_TIMEOUT
    view: Annotated[
        bool,
        typer.Option(
            "--view", rich_help_panel=_OUTPUT_PANEL, help="Show the run in a browser, live."
        ),
    ] = False
    open_page: Annotated[
        bool,
        typer.Option(
            "--open", rich_help_panel=_OUTPUT_PANEL, help="Same as --view, and open the page."
        ),
    ] = False
    json: JsonOption = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", rich_help_panel=_OUTPUT_PANEL, help="Show no progress.")
    ] = False

    concurrency: int = field(init=False)

    def __post_init__(self) -> None:
        if self.sequential and self.max_concurrency is not None:
            fail("--sequential and --max-concurrency contradict each other; give one of them")
        self.concurrency = self.max_concurrency or DEFAULT_CONCURRENCY
        if self.sequential:
            self.concurrency = 1
        if self.no_ask and self.ask is not None:
            fail("--ask and --no-ask contradict each other; give one of them")
        if self.no_ask:
            self.ask = "never"
        if self.open_page:
            self.view = True
        if not 0 <= self.stop_timeout <= _MAX_STOP_TIMEOUT:  # also true for nan
            fail(f"--stop-timeout: expected seconds from 0 to {_MAX_STOP_TIMEOUT:,.0f}")

    def resume_options(self) -> list[str]:
        """Return the options that a later `resume` needs too."""
        words: list[str] = []
        if self.settings:
            words += ["--settings", self.settings]
        for name in self.providers or ():
            words += ["--replan-provider", name]
        if self.concurrency != DEFAULT_CONCURRENCY:
            words += ["--max-concurrency", str(self.concurrency)]
        if self.trace:
            words += ["--trace", self.trace]
        for target in self.notify or ():
            words += ["--notify", target]
        if self.ask:
            words += ["--ask", self.ask]
        if self.view:
            words.append("--view")
        if self.stop_timeout != DEFAULT_STOP_TIMEOUT:
            words += ["--stop-timeout", f"{self.stop_timeout:g}"]
        return words


class RunDisplay(Protocol):
    """Display of the runs of this process, which can release the terminal for questions."""

    questions_on_terminal: bool

    def show_note(self, symbol: str, text: str, style: str = "") -> None:
        """Show a line in addition to those about the run."""

    def suspend(self) -> AbstractContextManager[None]:
        """Release the terminal while the body runs."""


def is_phase_task(task: Task) -> bool:
    """Return whether a task is a phase of planning mode."""
    if not task.metadata:
        return False
    from replanning.planning.tasks import phase_of  # slow to load, and most plans do not need it

    return phase_of(task) is not None


def all_except(*names: str) -> list[str]:
    """Return the names of all run options except these."""
    return [option.name for option in fields(RunOptions) if option.name not in names]


def decode_argument(text: str, option: str) -> str:
    """Decode a command-line argument as UTF-8, whatever the locale is.

    Raises:
        SettingsError: it is not valid UTF-8.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError.at(
            option, f"it is not UTF-8: {error.reason} at byte {error.start}"
        ) from error


def epilog(*examples: str, title: str = "Examples", codes: str = "") -> str:
    """Return the text below the help of a command: examples, and the meaning of its exit codes."""
    lines = [f"[bold]{title}[/bold]"]
    lines += [f"  {example}" for example in examples]
    text = "\n".join(lines)
    if codes:
        text += f"\n\n[bold]Exit codes[/bold]\n{codes}"
    return text


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _PlainHelp:
    """Mixin that hides Python types in the help, and indents continued lines of examples."""

    epilog: str | None

    def format_help(self, ctx: Any, formatter: Any) -> None:  # typer does not export the types
        """Write the help."""
        for param in ctx.command.get_params(ctx):
            if getattr(param, "is_flag", False):
                param.metavar = ""
            if param.param_type_name == "argument":
                param.display_type_rich = _no_type
        text = self.epilog
        if text:
            self.epilog = _wrap_examples(text)
        super().format_help(ctx, formatter)  # type: ignore[misc] # typer defines it
        self.epilog = text


def _wrap_examples(text: str) -> str:
    """Wrap the text below the help of a command at the width of the terminal."""
    from replanning.history.wording import wrap_line  # Rich is slow to load

    margins = 2
    lines: list[str] = []
    for line in text.splitlines():
        lines += wrap_line(line, shutil.get_terminal_size().columns - margins)
    return "\n".join(lines)


def _no_type(ctx: Any) -> None:
    """Return no type for the help: the name of an argument says enough."""


class Command(_PlainHelp, TyperCommand):
    """A command of the program."""

    def invoke(self, ctx: Any) -> Any:  # typer does not export the types
        """Execute the command, and redact its output as its own settings require."""
        _settings_file.set(ctx.params.get("settings"))
        command_redactor.set(None)
        return super().invoke(ctx)


class CommandGroup(_PlainHelp, TyperGroup):
    """Group of commands."""


class LazyCommandGroup(CommandGroup):
    """Group of all commands, which imports a module only when its command is called.

    It reports errors of the library without a traceback.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        listed = {
            name: Command(name, rich_help_panel=panel)
            for panel, modules in COMMANDS.items()
            for name in modules
        }
        self.commands = {**listed, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer does not export the types
        """Return the command that the words name; one of two words takes precedence."""
        count = 2 if len(args) > 1 and " ".join(args[:2]) in _MODULES else 1
        name = " ".join(args[:count])
        if name in _MODULES:
            commands: typer.Typer = import_module(f"replanning.cli.{_MODULES[name]}").commands
            group: Any = typer.main.get_group(commands)
            return name, group.commands[name], args[count:]
        longer = [each for each in _MODULES if each.startswith(f"{args[0]} ")]
        if longer:
            names = " and ".join(f"`replanning {each}`" for each in longer)
            fail(f"{args[0]!r} is not a command by itself; there are {names}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # typer does not export the types
        """Run a command; print errors that the user can correct, and exit with their code."""
        _settings_file.set(None)
        command_redactor.set(None)
        try:
            return super().invoke(ctx)
        except ReplanningError as error:
            if isinstance(error, SettingsError) and _is_about_arguments(error):
                fail("; ".join(map(str, error.problems)))
            fail(str(error))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            problem = f"the output cannot be written: {error.strerror}"
            advice = "`replanning status` shows how the run ended"
            fail(f"{problem}; {advice}", ExitCode.FAILED)
        except KeyboardInterrupt:
            fail("interrupted", ExitCode.INTERRUPTED)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # typer does not export the types
        """Write the help, with the docstrings of the commands as descriptions.

        The modules are parsed, not imported, so that help appears at once.
        """
        for name, command in self.commands.items():
            if name in _MODULES:
                source = Path(__file__).with_name(f"{_MODULES[name]}.py").read_bytes()
                functions = [
                    node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
                ]
                (function,) = (node for node in functions if node.name == re.sub("[ -]", "_", name))
                command.help = unwrap_paragraphs(ast.get_docstring(function))
        super().format_help(ctx, formatter)


def _is_about_arguments(error: SettingsError) -> bool:
    """Return whether an error concerns only arguments of the command, not settings."""
    for problem in error.problems:
        place = problem.place
        if place.startswith("--"):
            continue
        if not place.isalpha() or not place.isupper():
            return False
    return len(error.problems) > 0


class Program(typer.Typer):
    """Typer application whose help wraps docstrings at the width of the terminal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            **{"cls": CommandGroup, "no_args_is_help": True, "rich_markup_mode": "rich", **settings}
        )

    def command(
        self, *args: Any, without: Sequence[str] = (), **settings: Any
    ) -> Callable[[FunctionT], FunctionT]:
        """Return a decorator that registers a function as a command, as `Typer.command` does.

        Args:
            args: positional arguments of `Typer.command`.
            without: fields of the parameter `options` that the command does not have as options.
            settings: named arguments of `Typer.command`.
        """
        register = super().command

        def decorate(function: FunctionT) -> FunctionT:
            expanded = _expand_options(function, without)
            register(*args, cls=Command, help=unwrap_paragraphs(function.__doc__), **settings)(
                expanded
            )
            return function

        return decorate


def _expand_options(function: Callable[..., Any], without: Sequence[str]) -> Callable[..., Any]:
    """Return a function with a parameter for each field of `options` in place of `options`."""
    signature = inspect.signature(function, eval_str=True)
    if "options" not in signature.parameters:
        return function
    group = signature.parameters["options"].annotation
    hints = get_type_hints(group, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(
            option.name, keyword, default=option.default, annotation=hints[option.name]
        )
        for option in fields(group)
        if option.init and option.name not in without
    ]

    @wraps(function)
    def command(**values: Any) -> Any:
        given = {option.name: values.pop(option.name) for option in options}
        return function(**values, options=group(**given))

    parameters = [
        *(parameter for parameter in signature.parameters.values() if parameter.name != "options"),
        *options,
    ]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # inspect reads it
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def unwrap_paragraphs(docstring: str | None) -> str:
    """Return a docstring with each paragraph on one line."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(docstring or ""))


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


@app.callback(invoke_without_command=True)
def program(
    ctx: typer.Context,
    *,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Options of the program itself."""
    if show_version:
        version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        ctx.fail("Missing command.")


@app.command(rich_help_panel="About this installation")
def version(*, as_json: JsonOption = False) -> None:
    """Print the version."""
    if as_json:
        print_json(
            {
                "replanning": __version__,
                "python": platform.python_version(),
                "platform": platform.platform(),
            }
        )
    else:
        console().print(f"replanning {__version__} (Python {platform.python_version()})")
