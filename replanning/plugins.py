"""Registry of providers, triggers, exporters and stores, found through entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

from replanning.errors import PluginError

PLUGIN_GROUPS = ("providers", "triggers", "exporters", "stores")


def plugin_name(plugin: object) -> str:
    """Return the name of a plugin; that of its class if it has none."""
    name = getattr(plugin, "name", None)
    return name if isinstance(name, str) else type(plugin).__name__


@cache
def installed_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group (`providers`, `triggers`, `exporters` or `stores`), sorted by name."""
    found = entry_points(group=f"replanning.{group}")
    return {point.name: point for point in sorted(found, key=lambda point: point.name)}


def load_plugin(group: str, name: str) -> type:
    """Return the class that a plugin registers.

    Raises:
        PluginError: no plugin has this name, or it cannot be imported.
    """
    points = installed_plugins(group)
    if name not in points:
        known = ", ".join(points) or "none; reinstall the package, its entry points are missing"
        raise PluginError(f"there is no plugin {name!r} among the {group}; installed are: {known}")
    try:
        plugin: type = points[name].load()
    except Exception as error:  # importing a module may raise anything
        raise PluginError(
            f"the plugin {name!r} ({points[name].value}) cannot be loaded: {error!r}"
        ) from error
    return plugin
