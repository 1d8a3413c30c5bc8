"""The commands `config` and `providers`: settings, plugins and exporters of this installation."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import anyio
import typer

from replanning import Environment, Settings
from replanning.cli.app import (
    ExitCode,
    JsonOption,
    Program,
    SettingsOption,
    console,
    epilog,
    escape_control,
    fail,
    print_json,
    print_message,
    redactor,
)
from replanning.cli.lookup import read_settings
from replanning.config import (
    FILES,
    LoadedSettings,
    find_file,
    load_settings,
    misspelt,
    trust_file,
    values,
)
from replanning.engine.registry import DECOMPOSER_PLUGIN, LLM_PROVIDER_PLUGIN, REPAIR_PLUGIN
from replanning.errors import NoLLMProvider, PluginError, ReplanningError, SettingsError
from replanning.llm import LLMOptions, LLMProvider
from replanning.llm.selection import AUTO, create_clients, is_llm
from replanning.plan.messages import format_duration, pluralise
from replanning.plan.types import JsonObject, JsonValue
from replanning.plugins import PLUGIN_GROUPS, installed_plugins, load_plugin
from replanning.run.opening import redactor_for
from replanning.telemetry.exporter import needs_target

LANGUAGE_MODEL: Final = "language model"

_NEEDS_MODEL: Final = (LLM_PROVIDER_PLUGIN, DECOMPOSER_PLUGIN)
"""Providers that need a language model, and cannot be created alone."""

_PROBE_PROMPT: Final = "Answer with the single word yes."

_STATE_STYLES: Final = {
    "used": "green",
    "fallback": "green",
    "broken": "red",
    "missing": "red",
    "unavailable": "yellow",
    "no answer": "red",
}

commands = Program()

config_commands = Program()


@config_commands.callback()
def config() -> None:
    """Show the settings, and check them."""


commands.add_typer(config_commands, name="config")


@config_commands.command(
    epilog=epilog(
        "replanning config show",
        "replanning config show --changed --settings ci.yaml",
        "REPLANNING_PROVIDER=openai replanning config show --json",
    )
)
def show(
    *,
    settings: SettingsOption = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only settings that were set somewhere.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting with its value and its source: the file, a variable, an override, or the default."""
    loaded = load_settings(settings)
    redact = redactor_for(loaded.settings).value
    shown: JsonObject = {}
    for key, value in values(loaded.settings).items():
        if not changed or key in loaded.sources:
            shown[key] = redact(value)
    if as_json:
        rows: JsonObject = {}
        for key, value in shown.items():
            place = loaded.sources.get(key)
            rows[key] = {"value": value, "source": loaded.kind(key), "place": place}
        warnings = list(map(asdict, loaded.warnings))
        print_json({"file": _file_name(loaded), "settings": rows, "warnings": warnings})
        return
    for warning in loaded.warnings:
        print_message(f"warning: {warning}")
    from rich.text import Text

    out = console()
    for key, value in shown.items():
        kind = loaded.kind(key)
        source = loaded.sources.get(key) or kind
        if kind == "file":
            source = f"file {loaded.sources[key]}"
        style = "bold"
        if kind == "default":
            style = ""
        setting = f"{key}: {escape_control(_setting_text(value))}"
        comment = f"# {escape_control(source)}"
        if out.wraps and len(setting) + len(comment) + 2 > out.width:
            out.print(Text(comment, "dim"))
            out.print(Text(setting, style))
        else:
            out.print(Text(f"{setting}  ", style).append(comment, "dim"))


def _file_name(loaded: LoadedSettings) -> str | None:
    """Return the name of the settings file; None without one."""
    if loaded.file is None:
        return None
    return str(loaded.file)


def _setting_text(value: JsonValue) -> str:
    """Return the value of a setting as it is printed."""
    if isinstance(value, str):
        return value
    if value in (None, [], {}):
        return "none"
    return json.dumps(value, ensure_ascii=False)


@config_commands.command(
    epilog=epilog(
        "replanning config check",
        "replanning config check --settings ci.yaml --json",
        codes="0 the settings are valid · 2 they are not",
    )
)
def check(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="The settings file; by default replanning.yaml or .replanning.yaml, if there is"
            " one.",
        ),
    ] = None,
    *,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the settings in the file and in variables; list every problem with its place and the expected value.

    Variables that look like misspelt settings are problems, too. A server of overrides, if set, is
    asked.
    """
    if file is not None and settings is not None:
        fail("FILE and --settings both name the settings file; give one of them")
    file = file or settings
    problems = list(misspelt(os.environ))
    warnings = []
    given = 0
    name = file
    try:
        loaded = load_settings(file)
        warnings = [warning for warning in loaded.warnings if warning not in problems]
        name = _file_name(loaded)
        given = len(loaded.sources)
    except SettingsError as error:
        problems = [*error.problems, *problems]
    if as_json:
        report = {"problems": list(map(asdict, problems)), "warnings": list(map(asdict, warnings))}
        print_json({"file": name, "valid": not problems, **report}, redact=True)
    elif problems:
        print_message(f"error: {SettingsError(problems)}")
    else:
        where = name or "no settings file"
        console().print(f"{where}: no problems; {pluralise(given, 'setting')} given")
        for warning in warnings:
            print_message(f"warning: {warning}")
    if problems:
        raise typer.Exit(ExitCode.USAGE)


@config_commands.command(
    epilog=epilog(
        "replanning config trust",
        codes="0 the file is trusted · 2 it is missing or unreadable",
    )
)
def trust(*, as_json: JsonOption = False) -> None:
    """Trust the settings file in the working directory, after you have read it.

    Settings that name servers, plugins, folders or patterns count only in a trusted file: a file
    from somebody else's checkout could send your keys and plans to their server. Trust the file
    again when one of them changes. A file that --settings names needs no trust.
    """
    file = find_file()
    if file is None:
        fail(f"there is no settings file here: neither {' nor '.join(FILES)}")
    trusted = trust_file(file)
    load_settings(file)  # reports its problems now
    if as_json:
        print_json({"file": str(file.resolve()), "trusted": trusted})
        return
    if trusted:
        console().print(f"{file} is trusted")
    else:
        console().print(f"{file} needs no trust: it sets no server, plugin, pattern or folder")
    for key, value in trusted.items():
        console().print(f"  {key}: {escape_control(json.dumps(value, ensure_ascii=False))}")


@commands.command(
    epilog=epilog(
        "replanning providers --check",
        "replanning providers --json",
        "An unavailable plugin is shown with the key or package that it needs."
        " A fallback replaces a model that fails.",
        codes="0 done · 1 with --check, when no language model answers, or one that runs would use"
        " does not · 2 wrong usage or settings",
    )
)
def providers(
    *,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Ask each available language model a tiny question; this may cost a little.",
        ),
    ] = False,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the installed plugins: which are used, which are available, and which are broken and why."""
    loaded = read_settings(settings)
    used = _used_plugins(loaded)
    selected = _selected_models(loaded)
    plugins: list[PluginStatus] = []
    models: list[tuple[PluginStatus, LLMProvider]] = []  # the available ones
    for group in PLUGIN_GROUPS:
        for point in installed_plugins(group).values():
            package = ""
            if point.dist is not None:
                package = f"{point.dist.name} {point.dist.version}"
            plugin = PluginStatus(group, point.name, package, point.value, "available")
            plugins.append(plugin)
            client = _examine(plugin, point.name in used.get(group, []), loaded, selected)
            if client is not None and not plugin.problem:
                models.append((plugin, client))
    if check:
        anyio.run(_probe_models, models)
    plugins += _missing_providers(used["providers"], loaded)
    if as_json:
        print_json([asdict(plugin) for plugin in plugins])
    else:
        _print_plugins(plugins)
    if check and not _models_answer(plugins):
        raise typer.Exit(ExitCode.FAILED)


def _used_plugins(loaded: Settings) -> dict[str, list[str]]:
    """Return the plugins that a run uses with these settings, by their group."""
    named: list[str] = []
    for names in loaded.provider:
        for part in names.split(","):
            name = part.partition(":")[0]
            if name == AUTO:
                name = REPAIR_PLUGIN
            named.append(name)
    return {"providers": named, "triggers": list(loaded.triggers), "stores": ["sqlite"]}


def _selected_models(loaded: Settings) -> dict[str, tuple[LLMProvider, str]]:
    """Return the language models that a run asks, each with its state: `used`, or `fallback`."""
    selected: dict[str, tuple[LLMProvider, str]] = {}
    for name in loaded.provider:
        try:
            if name != AUTO and not is_llm(name):
                continue
            clients = create_clients(name, settings=loaded)
        except (NoLLMProvider, PluginError):
            continue  # the row of the plugin gives the reason
        state = "used"
        for client in clients:
            selected.setdefault(client.name, (client, state))
            state = "fallback"
    return selected


def _examine(
    plugin: PluginStatus,
    is_used: bool,
    loaded: Settings,
    selected: Mapping[str, tuple[LLMProvider, str]],
) -> LLMProvider | None:
    """Load a plugin, create its object, and set its state and problem.

    Returns:
        The client, if the plugin is a language model.
    """
    loadable = False
    try:
        if plugin.group == "providers" and is_llm(plugin.name):
            loadable = True
            return _examine_model(plugin, loaded, selected)
        factory = load_plugin(plugin.group, plugin.name)
        loadable = True
        if plugin.group == "exporters" and needs_target(factory):
            # It can only be created with a target, by `--trace NAME=TARGET`.
            plugin.problem = f"it needs a target: --trace {plugin.name}=TARGET"
        elif plugin.group == "exporters":
            anyio.run(factory().aclose)
        elif plugin.group in ("providers", "triggers") and plugin.name not in _NEEDS_MODEL:
            factory()
        if is_used:
            plugin.state = "used"
    except PluginError as error:
        plugin.state = "unavailable" if loadable else "broken"
        plugin.problem = str(error)
        # An error that states the missing extra has no `name`, unlike those of Python itself.
        missing_package = error.__cause__
        if isinstance(missing_package, ImportError) and missing_package.name is None:
            plugin.state = "unavailable"
            plugin.problem = str(missing_package)
    except SettingsError as error:
        # It works, but needs an option, such as the issue to write to.
        plugin.problem = "; ".join(problem.message for problem in error.problems)
    except Exception as error:  # noqa: BLE001 # a plugin's constructor may raise anything
        plugin.state = "broken"
        plugin.problem = f"it cannot be created: {error!r}"
    return None


def _examine_model(
    plugin: PluginStatus, loaded: Settings, selected: Mapping[str, tuple[LLMProvider, str]]
) -> LLMProvider:
    """Describe a language model, and return its client."""
    if plugin.name in selected:
        client, state = selected[plugin.name]
    else:
        # The model and address in the settings belong to the provider that runs ask.
        own = loaded.llm.model_copy(update={"model": AUTO, "base_url": None, "fallback": ()})
        client = create_clients(plugin.name, settings=loaded.model_copy(update={"llm": own}))[0]
        state = "available"
    plugin.problem = client.unavailable_reason()
    if plugin.problem:
        state = "unavailable"
    plugin.state = state
    plugin.kind = LANGUAGE_MODEL
    plugin.model = client.model
    plugin.key = str(getattr(client, "key_variable", ""))
    plugin.address = redactor().text(str(getattr(client, "base_url", "")))
    return client


def _missing_providers(used: Sequence[str], loaded: Settings) -> list[PluginStatus]:
    """Return the providers in the settings that are not installed, without duplicates."""
    names = list(used)
    for fallback in loaded.llm.fallback:
        names.append(fallback.partition(":")[0])
    problem = "the settings name it, but it is not installed"
    missing: list[PluginStatus] = []
    for name in dict.fromkeys(names):
        if name not in installed_plugins("providers"):
            missing.append(PluginStatus("providers", name, "", "", "missing", problem))
    return missing


def _print_plugins(plugins: Sequence[PluginStatus]) -> None:
    """Print the plugins of each group: a line with name, state and details for each."""
    from rich.table import Table
    from rich.text import Text

    names = max(len(plugin.name) for plugin in plugins)
    for group in PLUGIN_GROUPS:
        console().print(Text(group, "bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, min_width=names + 2)
        table.add_column(no_wrap=True, min_width=len("unavailable"))
        table.add_column(overflow="fold")
        for plugin in plugins:
            if plugin.group != group:
                continue
            state = plugin.state
            if plugin.answers is False:
                state = "no answer"
            styled = Text(state, _STATE_STYLES.get(state, ""))
            details = escape_control(_plugin_details(plugin))
            table.add_row(f"  {plugin.name}", styled, details)
        console().print(table)


def _plugin_details(plugin: PluginStatus) -> str:
    """Return the last column of a plugin: its problem, details of a language model, or a package."""
    if plugin.kind != LANGUAGE_MODEL or plugin.state == "broken":
        if not plugin.package or plugin.package.startswith("replanning "):
            return plugin.problem
        return f"{plugin.problem or plugin.value} ({plugin.package})"
    details = [plugin.model or "no model"]
    if plugin.address:
        details.append(f"at {plugin.address}")
    # A problem with the key itself already names the variable.
    if plugin.key in os.environ and plugin.key not in plugin.problem:
        details.append(f"key in {plugin.key}")
    if plugin.problem:
        details.append(plugin.problem)
    if plugin.seconds is not None:
        details.append(f"answers in {format_duration(plugin.seconds)}")
    return ", ".join(details)


def _models_answer(plugins: Sequence[PluginStatus]) -> bool:
    """Return whether a language model answers, and every model in use does."""
    has_answer = False
    for plugin in plugins:
        if plugin.state == "used" and plugin.answers is False:
            return False
        if plugin.answers:
            has_answer = True
    return has_answer


@dataclass(slots=True)
class PluginStatus:
    """State of one installed plugin.

    Attributes:
        group: its entry-point group.
        name: its name in the group.
        package: the package that installs it, with its version.
        value: the object that the entry point names.
        state: `used` by a run that names no other, `fallback` for a used one that fails,
            `available`, `unavailable` because it lacks a key or a package, `broken`, or `missing`.
        problem: the reason why it is broken or unavailable, or the option that it needs.
        kind: `language model` for one; otherwise empty.
        model: the model that runs would ask.
        key: the variable that holds its key, if it needs one.
        address: the address of its server.
        answers: whether it answered; None if it was not asked.
        seconds: its response time, in seconds.
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


async def _probe_models(models: Sequence[tuple[PluginStatus, LLMProvider]]) -> None:
    """Ask language models concurrently, and record whether they answer."""
    clock = Environment().clock

    async def ask(plugin: PluginStatus, client: LLMProvider) -> None:
        began = clock.now()
        try:
            await client.complete(_PROBE_PROMPT, LLMOptions(max_tokens=16, max_attempts=1))
        except ReplanningError as error:
            plugin.answers = False
            plugin.problem = str(error).removeprefix(f"{client.name}: ")
        else:
            plugin.answers = True
            plugin.seconds = round(clock.now() - began, 3)
        finally:
            await client.aclose()

    if models:
        names = ", ".join(client.name for _, client in models)
        print_message(f"asking whether these models answer: {names}")
    async with anyio.create_task_group() as group:
        for plugin, client in models:
            group.start_soon(ask, plugin, client)
