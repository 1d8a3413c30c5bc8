"""What is installed: plugins, whether they work, and which language models can be asked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, runtime_checkable

import anyio
import typer

from replanning import Environment, Settings
from replanning.cli.options import ExitCode
from replanning.cli.output import console, escape_control, print_json, print_message, print_result, problems_json
from replanning.config import LoadedSettings, load_settings, misspelt, values
from replanning.engine.providers import LLM_PROVIDER_PLUGIN, REPAIR_PLUGIN
from replanning.errors import NoLLMProvider, PluginError, Problem, ReplanningError, SettingsError
from replanning.llm import LLMOptions, LLMProvider
from replanning.llm.selection import AUTO, create_clients, is_llm
from replanning.plan.redaction import Redactor
from replanning.plan.types import JsonValue
from replanning.plugins import PLUGIN_GROUPS, installed_plugins, load_plugin
from replanning.run.opening import redactor_for

if TYPE_CHECKING:
    from replanning.telemetry import Exporter


def read_settings(path: str | None, *, quiet: bool = False) -> Settings:
    """The settings that a command goes by; what was passed over is told.

    Raises:
        SettingsError: they are not valid.
    """
    loaded = load_settings(path)
    if not quiet:
        _warn(loaded.warnings)
    return loaded.settings


def show_settings(path: str | None, *, only_changed: bool, as_json: bool) -> None:
    """Print every setting, what it is and where that comes from.

    Args:
        path: the settings file, if one is named.
        only_changed: leave out what is as by default.
        as_json: whether it is for a program.

    Raises:
        SettingsError: they are not valid.
    """
    loaded = load_settings(path)
    clean = redactor_for(loaded.settings).value
    found = {key: clean(value) for key, value in values(loaded.settings).items()}
    if only_changed:
        found = {key: value for key, value in found.items() if key in loaded.sources}
    if as_json:
        rows = {
            key: {"value": value, "source": loaded.kind(key), "place": loaded.sources.get(key)}
            for key, value in found.items()
        }
        warnings = problems_json(loaded.warnings)
        print_json({"file": _file_name(loaded), "settings": rows, "warnings": warnings})
    else:
        _warn(loaded.warnings)
        _print_settings(found, loaded)


def check_settings(path: str | None, *, as_json: bool) -> int:
    """Say what is wrong with the settings; returns the exit code."""
    problems, warnings, told = list(misspelt(os.environ)), [], 0
    name = path
    try:
        loaded = load_settings(path)
        warnings = [warning for warning in loaded.warnings if warning not in problems]
        name, told = _file_name(loaded), len(loaded.sources)
    except SettingsError as error:
        problems = [*error.problems, *problems]
    if as_json:
        print_json(
            {
                "file": name,
                "valid": not problems,
                "problems": problems_json(problems),
                "warnings": problems_json(warnings),
            }
        )
    elif problems:
        print_message(f"error: {SettingsError(problems)}")
    else:
        print_result(f"{name or 'no settings file'}: nothing is wrong; {told} setting{'s' * (told != 1)} given")
        _warn(warnings)
    return int(ExitCode.USAGE if problems else ExitCode.OK)


def _warn(warnings: Sequence[Problem]) -> None:
    for warning in warnings:
        print_message(f"warning: {warning}")


def _file_name(loaded: LoadedSettings) -> str | None:
    return None if loaded.file is None else str(loaded.file)


def _print_settings(found: Mapping[str, JsonValue], loaded: LoadedSettings) -> None:
    from rich.text import Text

    out = console()
    for key, value in found.items():
        kind, place = loaded.kind(key), loaded.sources.get(key, "")
        source = f"file {place}" if kind == "file" else place or kind
        line = Text(f"{key}: {escape_control(_format_value(value))}", "" if kind == "default" else "bold")
        out.print(line.append(f"  # {escape_control(source)}", "dim"))


def _format_value(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    return "none" if value is None or value in ([], {}) else json.dumps(value, ensure_ascii=False)


LANGUAGE_MODEL: Final = "language model"

_PROBE_PROMPT: Final = "Answer with the single word yes."


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """One entry point, and what became of it.

    Attributes:
        state: `used` by a run that names nothing else, `fallback` where one that is used fails, `available`,
            `unavailable` where it says itself what it lacks, `broken`, or `missing`.
        problem: why it is broken or unavailable, or what it must be told.
        kind: `language model` for one; else empty.
        model: which model it would be asked for.
        key: the variable that holds its key, where it takes one.
        address: where it is asked.
        answers: whether it answered; None where it was not asked.
        seconds: how long that took.
    """

    group: str
    name: str
    package: str
    value: str
    state: str
    problem: str = ""
    kind: str = ""
    model: str = ""
    key: str = ""
    address: str = ""
    answers: bool | None = None
    seconds: float | None = None

    @property
    def details(self) -> str:
        """What is known of it, in words."""
        if self.kind != LANGUAGE_MODEL or self.state == "broken":
            return self.problem or self.value
        parts = [self.model or "no model", f"at {self.address}" if self.address else ""]
        parts += [f"key in {self.key}" if self.key in os.environ and self.key not in self.problem else "", self.problem]
        if self.answers:
            parts.append(f"answers in {self.seconds:.1f} s")
        return ", ".join(filter(None, parts))


def show_plugins(settings: str | None, *, check: bool, as_json: bool) -> int:
    """Print every plugin; returns the exit code.

    Args:
        settings: the settings file, if one is named.
        check: ask language models whether they answer.
        as_json: whether the list is for a program.

    Raises:
        SettingsError: the settings are not valid, or contradict one another.
    """
    loaded = read_settings(settings)
    chosen = _selected_clients(loaded)
    used: dict[str, list[str]] = {
        "providers": _used_providers(loaded),
        "triggers": list(loaded.triggers),
        "stores": ["sqlite"],
    }
    points = [
        (group, point, used.get(group, [])) for group in PLUGIN_GROUPS for point in installed_plugins(group).values()
    ]
    found = [_inspect_plugin(group, point, names, chosen, loaded) for group, point, names in points]
    plugins = anyio.run(_probe_models, found) if check else [plugin for plugin, _ in found]
    plugins += _missing_plugins(loaded)
    if as_json:
        print_json([asdict(plugin) for plugin in plugins])
    else:
        _show_table(plugins)
    return int(ExitCode.FAILED if check and not _models_respond(plugins) else ExitCode.OK)


def _models_respond(plugins: list[PluginStatus]) -> bool:
    """Whether a language model has answered, and each that runs would use."""
    answers = [(plugin.state, plugin.answers) for plugin in plugins if plugin.answers is not None]
    return any(answer for _, answer in answers) and ("used", False) not in answers


# What a run would use
def _configured_names(settings: Settings) -> list[str]:
    """The names in the settings, one by one."""
    return [part for name in settings.provider for part in name.split(",")]


def _used_providers(settings: Settings) -> list[str]:
    return [REPAIR_PLUGIN if name == AUTO else name.partition(":")[0] for name in _configured_names(settings)]


def _missing_plugins(settings: Settings) -> list[PluginStatus]:
    known = installed_plugins("providers")
    wanted = [*_used_providers(settings), *(name.partition(":")[0] for name in settings.llm.fallback)]
    problem = "the settings name it, but it is not installed"
    return [
        PluginStatus("providers", name, "", "", "missing", problem)
        for name in dict.fromkeys(wanted)
        if name not in known
    ]


def _selected_clients(settings: Settings) -> dict[str, tuple[LLMProvider, str]]:
    """The language models that a run would ask, by name, with whether they are used or a fallback."""
    found: dict[str, tuple[LLMProvider, str]] = {}
    for name in settings.provider:
        try:
            clients = create_clients(name, settings=settings) if name == AUTO or is_llm(name) else []
        except (NoLLMProvider, PluginError):
            continue  # seen below, plugin by plugin
        for number, client in enumerate(clients):
            found.setdefault(client.name, (client, "fallback" if number else "used"))
    return found


def _inspect_plugin(
    group: str,
    point: EntryPoint,
    used: list[str],
    chosen: Mapping[str, tuple[LLMProvider, str]],
    settings: Settings,
) -> tuple[PluginStatus, LLMProvider | None]:
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else ""
    plugin = PluginStatus(group, point.name, package, point.value, "available")
    try:
        if group == "providers" and is_llm(point.name):
            client, state = chosen.get(point.name) or (_create_client(point.name, settings), "available")
            return _with_model_details(replace(plugin, state=state), client), client
        _instantiate(group, point.name)
    except PluginError as error:
        return replace(
            plugin, state="unavailable" if _can_load(group, point.name) else "broken", problem=str(error)
        ), None
    except SettingsError as error:  # it works, and must be told more, such as below which issue it is to write
        return replace(plugin, problem="; ".join(problem.message for problem in error.problems)), None
    except Exception as error:  # noqa: BLE001 # somebody's constructor may raise anything, which is to be shown
        return replace(plugin, state="broken", problem=f"it cannot be made: {error!r}"), None
    return replace(plugin, state="used" if point.name in used else "available"), None


def _can_load(group: str, name: str) -> bool:
    """Whether a plugin is there as a whole; what it still lacks, it says when it is made."""
    try:
        load_plugin(group, name)
    except PluginError:
        return False
    return True


def _instantiate(group: str, name: str) -> None:
    """Make what a plugin registers, to see whether that works."""
    plugin = load_plugin(group, name)
    if group in ("providers", "triggers"):
        if name != LLM_PROVIDER_PLUGIN:  # that is made of a language model
            plugin()
    elif group == "exporters":
        anyio.run(plugin().aclose)


# Language models
def _create_client(name: str, settings: Settings) -> LLMProvider:
    """A language model that no run would ask: as it would be, named without a model and an address of its own."""
    own = settings.llm.model_copy(update={"model": AUTO, "base_url": None, "fallback": ()})
    return create_clients(name, settings=settings.model_copy(update={"llm": own}))[0]


def _with_model_details(plugin: PluginStatus, client: LLMProvider) -> PluginStatus:
    problem = client.unavailable_reason()
    return replace(
        plugin,
        kind=LANGUAGE_MODEL,
        state="unavailable" if problem else plugin.state,
        problem=problem,
        model=client.model,
        key=str(getattr(client, "key_variable", "")),
        address=Redactor().text(str(getattr(client, "base_url", ""))),
    )


async def _probe_models(found: list[tuple[PluginStatus, LLMProvider | None]]) -> list[PluginStatus]:
    """The plugins, those that are language models asked whether they answer, all at once."""
    results = [plugin for plugin, _ in found]

    async def ask(number: int, client: LLMProvider) -> None:
        results[number] = await _probe_model(results[number], client)

    wanted = [
        (number, client)
        for number, (plugin, client) in enumerate(found)
        if client is not None and plugin.state != "unavailable"
    ]
    if wanted:
        print_message(f"asking whether they answer: {', '.join(client.name for _, client in wanted)}")
    async with anyio.create_task_group() as group:
        for number, client in wanted:
            group.start_soon(ask, number, client)
    return results


async def _probe_model(plugin: PluginStatus, client: LLMProvider) -> PluginStatus:
    clock = Environment().clock
    began = clock.now()
    try:
        await client.complete(_PROBE_PROMPT, LLMOptions(max_tokens=16, max_attempts=1))
    except ReplanningError as error:
        return replace(plugin, answers=False, problem=str(error).removeprefix(f"{client.name}: "))
    finally:
        await client.aclose()
    return replace(plugin, answers=True, seconds=round(clock.now() - began, 3))


def _show_table(plugins: list[PluginStatus]) -> None:
    from rich.table import Table
    from rich.text import Text

    styles = {"used": "green", "fallback": "green", "broken": "red", "missing": "red", "unavailable": "yellow"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("group", "name", "state", "package"):
        table.add_column(heading, no_wrap=True)
    table.add_column("")
    for plugin in plugins:
        state = "no answer" if plugin.answers is False else plugin.state
        style = "red" if plugin.answers is False else styles.get(plugin.state, "")
        table.add_row(plugin.group, plugin.name, Text(state, style), plugin.package, escape_control(plugin.details))
    console().print(table)


FORGES: Final = ("github", "gitlab")
"""Exporters that write below an issue."""


@runtime_checkable
class DeliveryReporter(Protocol):
    """An exporter that says what it could not send."""

    @property
    def problem(self) -> str:
        """What is not sent, and why; empty when everything is."""
        ...


@runtime_checkable
class WriteChecker(Protocol):
    """An exporter that finds out beforehand whether it can write."""

    def write_error(self) -> str:
        """Why nothing can be written; empty where it can be."""
        ...


@runtime_checkable
class IssueNotifier(Protocol):
    """An exporter that tells people of a run, and how they answer."""

    hint: str

    @property
    def forge(self) -> object:
        """Where it tells them."""
        ...


NotifyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--notify",
        metavar="TARGET",
        help="Where notices and the plan as a checklist are kept: a Markdown file, or a folder with a file for each run;"
        " github=owner/repo#12 or gitlab=group/project!7 for comments there; console for lines on standard error;"
        " repeat for several.",
    ),
]


def open_notifiers(targets: Sequence[str]) -> list[Exporter]:
    """The exporters for what the options name, one for each place.

    Raises:
        SettingsError: an option names nothing that there is, or nothing can be written there.
        PluginError: an exporter cannot be loaded.
    """
    found: dict[tuple[str, str], Exporter] = {}
    for target in targets:
        exporter = _create_notifier(target.strip())
        if isinstance(exporter, WriteChecker) and (problem := exporter.write_error()):
            raise SettingsError([Problem("--notify", problem)])
        found.setdefault(_target_key(exporter), exporter)
    return list(found.values())


def _target_key(exporter: Exporter) -> tuple[str, str]:
    """Where an exporter writes, however that was written; forges, other than files, do not tell capitals apart."""
    place = str(getattr(exporter, "endpoint", ""))
    return exporter.name, place.lower() if exporter.name in FORGES else os.path.realpath(place)


def delivery_problems(exporters: Sequence[Exporter]) -> list[str]:
    """What exporters did not get to where it belongs, each in a sentence; once they are closed, that is final."""
    return [one.problem for one in exporters if isinstance(one, DeliveryReporter) and one.problem]


def _create_notifier(target: str) -> Exporter:
    name, _, place = target.partition("=")
    if target == "console":
        console: Exporter = load_plugin("exporters", "notices-console")()
        return console
    if not target:
        raise SettingsError([Problem("--notify", "name a file, console, or github=owner/repo#12")])
    if place and name not in FORGES and name.isidentifier():  # rather a slip than the name of a file
        known = f"there is {' and '.join(f'{forge}=…' for forge in FORGES)}"
        raise SettingsError([Problem("--notify", f"{name!r} is no forge; {known}; for a file write {'./' + target!r}")])
    return create_exporter(name if name in FORGES else "notices", place if name in FORGES else target, "--notify")


def create_exporter(name: str, target: str, option: str) -> Exporter:
    """The exporter of that name for what an option says behind it.

    Raises:
        SettingsError: it says nothing that there is.
        PluginError: the exporter cannot be loaded.
    """
    plugin: Any = load_plugin("exporters", name)  # `from_target` is optional
    try:
        exporter: Exporter = plugin.from_target(target)
    except SettingsError as error:
        raise SettingsError([Problem(option, problem.message) for problem in error.problems]) from None
    return exporter


def open_trace_exporter(text: str) -> Exporter:
    """The exporter that `NAME` or `NAME=PLACE` asks for; it is made of a place by its method `from_target`.

    Raises:
        SettingsError: there is no such exporter, or it takes no place.
        PluginError: it cannot be loaded.
    """
    name, _, place = text.partition("=")
    if name not in installed_plugins("exporters"):
        known = ", ".join(installed_plugins("exporters"))
        raise SettingsError([Problem("--trace", f"there is no exporter {name!r}; installed are: {known}")])
    plugin: Any = load_plugin("exporters", name)  # `from_target` is optional
    if place and not hasattr(plugin, "from_target"):
        raise SettingsError([Problem("--trace", f"the exporter {name!r} takes no place: leave out {place!r}")])
    exporter: Exporter = plugin.from_target(place) if place else plugin()
    return exporter


def trace_location(exporter: Exporter) -> str:
    """Where a person finds what an exporter sends."""
    return str(getattr(exporter, "endpoint", exporter.name))
