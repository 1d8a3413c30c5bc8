"""What is installed: plugins, and whether they work."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint

import anyio

from replanning import __version__
from replanning._config import load_settings
from replanning._errors import PluginError
from replanning._plugins import GROUPS, installed, load
from replanning.cli._output import console, plain, show, show_json
from replanning.cli._run import provider_names


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point, and what became of it.

    Attributes:
        state: `used` by a run that names nothing else, `available`, or `broken`.
        problem: why it is broken.
    """

    group: str
    name: str
    package: str
    value: str
    state: str
    problem: str = ""


def show_plugins(settings: str | None, *, as_json: bool) -> None:
    """Print every plugin."""
    loaded = load_settings(settings).settings
    used: dict[str, list[str]] = {
        "providers": provider_names((), loaded),
        "triggers": list(loaded.triggers),
        "stores": ["sqlite"],
    }
    plugins = [_look_at(group, point, used) for group in GROUPS for point in installed(group).values()]
    missing = [
        Plugin("providers", name, "", "", "missing", "the settings name it, but it is not installed")
        for name in used["providers"]
        if name not in installed("providers")
    ]
    if as_json:
        show_json([asdict(plugin) for plugin in [*plugins, *missing]])
    else:
        _show_table([*plugins, *missing])


def show_version(*, as_json: bool) -> None:
    """Print the version of the library and of what it runs on."""
    if as_json:
        show_json({"replanning": __version__, "python": platform.python_version(), "platform": platform.platform()})
    else:
        show(f"replanning {__version__} (Python {platform.python_version()})")


def _look_at(group: str, point: EntryPoint, used: dict[str, list[str]]) -> Plugin:
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else ""
    problem = _problem(group, point.name)
    state = "broken" if problem else "used" if point.name in used.get(group, ()) else "available"
    return Plugin(group, point.name, package, point.value, state, problem)


def _problem(group: str, name: str) -> str:
    """Why a plugin does not work; empty where it does."""
    try:
        plugin = load(group, name)
        if group in ("providers", "triggers"):
            plugin()
        elif group == "exporters":
            anyio.run(plugin().aclose)
    except PluginError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 # somebody's constructor may raise anything, which is to be shown
        return f"it cannot be made: {error!r}"
    return ""


def _show_table(plugins: list[Plugin]) -> None:
    from rich.table import Table
    from rich.text import Text

    styles = {"used": "green", "broken": "red", "missing": "red"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("group", "name", "state", "package"):
        table.add_column(heading, no_wrap=True)
    table.add_column("")
    for plugin in plugins:
        state = Text(plugin.state, styles.get(plugin.state, ""))
        table.add_row(plugin.group, plugin.name, state, plugin.package, plain(plugin.problem or plugin.value))
    console().print(table)
