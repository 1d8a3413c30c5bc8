"""Settings, plugins and exporters of this installation, with the commands `config` and `providers`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Final

import anyio
import typer

from replanning import Environment
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
from replanning.config import FILES, find_file, load_settings, misspelt, trust_file, values
from replanning.engine.registry import DECOMPOSER_PLUGIN, LLM_PROVIDER_PLUGIN, REPAIR_PLUGIN
from replanning.errors import NoLLMProvider, PluginError, ReplanningError, SettingsError
from replanning.history.wording import pluralise
from replanning.llm import LLMOptions, LLMProvider
from replanning.llm.selection import AUTO, create_clients, is_llm
from replanning.plan.messages import format_duration
from replanning.plugins import PLUGIN_GROUPS, installed_plugins, load_plugin
from replanning.run.opening import redactor_for
from replanning.telemetry.exporter import needs_target

LANGUAGE_MODEL: Final = "language model"

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
        bool, typer.Option("--changed", help="Leave out settings that were not set anywhere.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every setting with its value and its source: the file, a variable, an override, or the default."""
    loaded = load_settings(settings)
    redact = redactor_for(loaded.settings).value
    shown = {
        key: redact(value)
        for key, value in values(loaded.settings).items()
        if key in loaded.sources or not changed
    }
    if as_json:
        rows = {
            key: {"value": value, "source": loaded.kind(key), "place": loaded.sources.get(key)}
            for key, value in shown.items()
        }
        print_json(
            {
                "file": str(loaded.file) if loaded.file is not None else None,
                "settings": rows,
                "warnings": list(map(asdict, loaded.warnings)),
            }
        )
        return
    for warning in loaded.warnings:
        print_message(f"warning: {warning}")
    from rich.text import Text

    out = console()
    for key, value in shown.items():
        kind, place = loaded.kind(key), loaded.sources.get(key, "")
        source = f"file {place}" if kind == "file" else place or kind
        if not isinstance(value, str):
            value = (  # noqa: PLW2901
                "none"
                if value is None or value in ([], {})
                else json.dumps(value, ensure_ascii=False)
            )
        line = Text(f"{key}: {escape_control(value)}", "" if kind == "default" else "bold")
        out.print(line.append(f"  # {escape_control(source)}", "dim"))


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
            help="The settings file; by default replanning.yaml or .replanning.yaml, if there is one.",
        ),
    ] = None,
    *,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the settings in the file and in variables; list every problem with its place and the expected value.

    Variables that look like misspelt settings are problems, too. A server that provides a user's settings is asked.
    """
    if file is not None and settings is not None:
        fail("FILE and --settings both name the settings file; give one of them")
    file = file or settings
    problems, warnings, given = list(misspelt(os.environ)), [], 0
    name = file
    try:
        loaded = load_settings(file)
        warnings = [warning for warning in loaded.warnings if warning not in problems]
        name, given = str(loaded.file) if loaded.file is not None else None, len(loaded.sources)
    except SettingsError as error:
        problems = [*error.problems, *problems]
    if as_json:
        found = {"problems": list(map(asdict, problems)), "warnings": list(map(asdict, warnings))}
        print_json({"file": name, "valid": not problems, **found}, redact=True)
    elif problems:
        print_message(f"error: {SettingsError(problems)}")
    else:
        console().print(
            f"{name or 'no settings file'}: nothing is wrong; {pluralise(given, 'setting')} given"
        )
        for warning in warnings:
            print_message(f"warning: {warning}")
    raise typer.Exit(ExitCode.USAGE if problems else ExitCode.OK)


@config_commands.command(
    epilog=epilog(
        "replanning config trust",
        codes="0 the file is trusted · 2 it cannot be read, or there is none",
    )
)
def trust(*, as_json: JsonOption = False) -> None:
    """Trust the settings file in the working directory, after you have read it.

    Settings that name servers, plugins, folders or patterns count only in a trusted file: a file from somebody else's
    checkout could send your keys and plans to their server. When one of them changes, trust the file again.
    A file that --settings names needs no trust.
    """
    file = find_file()
    if file is None:
        fail(f"there is no settings file here: neither {' nor '.join(FILES)}")
    trusted = trust_file(file)
    load_settings(file)  # what is wrong with it is told now
    if as_json:
        print_json({"file": str(file.resolve()), "trusted": trusted})
        return
    console().print(
        f"{file} is trusted"
        if trusted
        else f"{file} needs no trust: it sets no server, plugin, pattern or folder"
    )
    for key, value in trusted.items():
        console().print(f"  {key}: {escape_control(json.dumps(value, ensure_ascii=False))}")


@commands.command(
    epilog=epilog(
        "replanning providers --check",
        "replanning providers --json",
        "An unavailable plugin is shown with the key or package that it needs. A fallback replaces a model that fails.",
        codes="0 done · 1 with --check, when no language model answers, or one that runs would use does not ·"
        " 2 wrong usage or settings",
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
    named = [part.partition(":")[0] for name in loaded.provider for part in name.split(",")]
    used: dict[str, list[str]] = {
        "providers": [REPAIR_PLUGIN if name == AUTO else name for name in named],
        "triggers": list(loaded.triggers),
        "stores": ["sqlite"],
    }
    selected: dict[
        str, tuple[LLMProvider, str]
    ] = {}  # the language models that a run would ask, with their states
    for name in loaded.provider:
        with suppress(NoLLMProvider, PluginError):  # shown with the plugin
            clients = create_clients(name, settings=loaded) if name == AUTO or is_llm(name) else []
            for number, client in enumerate(clients):
                selected.setdefault(client.name, (client, "fallback" if number else "used"))
    needs_model = (LLM_PROVIDER_PLUGIN, DECOMPOSER_PLUGIN)
    plugins: list[PluginStatus] = []
    models: list[tuple[PluginStatus, LLMProvider]] = []  # those that can be asked
    for group in PLUGIN_GROUPS:
        for point in installed_plugins(group).values():
            package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else ""
            plugin = PluginStatus(group, point.name, package, point.value, "available")
            plugins.append(plugin)
            loadable = False
            try:  # to load and to create it
                if group == "providers" and is_llm(point.name):
                    loadable = True
                    if point.name not in selected:
                        # A model that no run would ask goes without the model and address that are set for another.
                        own = loaded.llm.model_copy(
                            update={"model": AUTO, "base_url": None, "fallback": ()}
                        )
                        unselected = loaded.model_copy(update={"llm": own})
                        selected[point.name] = (
                            create_clients(point.name, settings=unselected)[0],
                            "available",
                        )
                    client, state = selected[point.name]
                    plugin.problem = client.unavailable_reason()
                    plugin.state = "unavailable" if plugin.problem else state
                    plugin.kind, plugin.model = LANGUAGE_MODEL, client.model
                    plugin.key = str(getattr(client, "key_variable", ""))
                    plugin.address = redactor().text(str(getattr(client, "base_url", "")))
                    if not plugin.problem:
                        models.append((plugin, client))
                    continue
                create, loadable = load_plugin(group, point.name), True
                if group in ("providers", "triggers") and point.name not in needs_model:
                    create()
                elif group == "exporters" and needs_target(create):
                    # Made as `--trace NAME=TARGET` is read; what it is for is known then.
                    plugin.problem = f"it needs a target: --trace {point.name}=TARGET"
                elif group == "exporters":
                    anyio.run(create().aclose)
                if point.name in used.get(group, []):
                    plugin.state = "used"
            except PluginError as error:
                plugin.state, plugin.problem = "unavailable" if loadable else "broken", str(error)
                missing_package = error.__cause__
                # Python states the name of what it did not find; a module that says which extra it needs does not.
                if isinstance(missing_package, ImportError) and missing_package.name is None:
                    plugin.state, plugin.problem = "unavailable", str(missing_package)
            except (
                SettingsError
            ) as error:  # it works, and needs an option, such as the issue to write to
                plugin.problem = "; ".join(problem.message for problem in error.problems)
            except Exception as error:  # noqa: BLE001 # a plugin's constructor may raise anything
                plugin.state, plugin.problem = "broken", f"it cannot be created: {error!r}"
    if check:
        anyio.run(_probe_models, models)
    wanted = [*used["providers"], *(name.partition(":")[0] for name in loaded.llm.fallback)]
    missing = "the settings name it, but it is not installed"
    plugins += [
        PluginStatus("providers", name, "", "", "missing", missing)
        for name in dict.fromkeys(wanted)
        if name not in installed_plugins("providers")
    ]
    if as_json:
        print_json([asdict(plugin) for plugin in plugins])
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("group", "name", "state", "package"):
            table.add_column(heading, no_wrap=True)
        table.add_column("")
        for plugin in plugins:
            state = "no answer" if plugin.answers is False else plugin.state
            style = _STATE_STYLES.get(state, "")
            details = [plugin.problem or plugin.value]
            if plugin.kind == LANGUAGE_MODEL and plugin.state != "broken":
                has_key = plugin.key in os.environ and plugin.key not in plugin.problem
                details = [
                    plugin.model or "no model",
                    f"at {plugin.address}" if plugin.address else "",
                    f"key in {plugin.key}" if has_key else "",
                    plugin.problem,
                    f"answers in {format_duration(plugin.seconds)}"
                    if plugin.seconds is not None
                    else "",
                ]
            shown = escape_control(", ".join(filter(None, details)))
            table.add_row(plugin.group, plugin.name, Text(state, style), plugin.package, shown)
        console().print(table)
    answers = [(plugin.state, plugin.answers) for plugin in plugins if plugin.answers is not None]
    usable = any(answered for _, answered in answers) and ("used", False) not in answers
    raise typer.Exit(ExitCode.FAILED if check and not usable else ExitCode.OK)


@dataclass(slots=True)
class PluginStatus:
    """State of one installed plugin.

    Attributes:
        group: its entry-point group.
        name: its name in the group.
        package: the package that installs it, with its version.
        value: the object that the entry point names.
        state: `used` by a run that names no other, `fallback` for a used one that fails, `available`, `unavailable`
            because it lacks a key or a package, `broken`, or `missing`.
        problem: the reason why it is broken or unavailable, or the option that it needs.
        kind: `language model` for one; otherwise empty.
        model: the model that it would be asked for.
        key: the variable that holds its key, if it needs one.
        address: the address of its server.
        answers: whether it answered; None where it was not asked.
        seconds: the time that the answer took.
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
    """Ask these language models at the same time, and note their answers."""
    clock = Environment().clock

    async def ask(plugin: PluginStatus, client: LLMProvider) -> None:
        began = clock.now()
        try:
            await client.complete(_PROBE_PROMPT, LLMOptions(max_tokens=16, max_attempts=1))
        except ReplanningError as error:
            plugin.answers, plugin.problem = False, str(error).removeprefix(f"{client.name}: ")
        else:
            plugin.answers, plugin.seconds = True, round(clock.now() - began, 3)
        finally:
            await client.aclose()

    if models:
        print_message(
            f"asking whether they answer: {', '.join(client.name for _, client in models)}"
        )
    async with anyio.create_task_group() as group:
        for plugin, client in models:
            group.start_soon(ask, plugin, client)
