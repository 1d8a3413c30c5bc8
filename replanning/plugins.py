"""Registry of providers, triggers, exporters and stores, found through entry points."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from replanning.errors import PluginError

PLUGIN_GROUPS = ("providers", "triggers", "exporters", "stores")


def plugin_name(plugin: object) -> str:
    """Return the name of a plugin, or of its class if it has none."""
    name = getattr(plugin, "name", None)
    return name if isinstance(name, str) else type(plugin).__name__


@cache
def installed_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group, such as `providers`, sorted by name."""
    found = entry_points(group=f"replanning.{group}")
    return {point.name: point for point in sorted(found, key=lambda point: point.name)}


def plugin_hint(group: str, name: str) -> str:
    """Return a hint for an unknown name: the nearest installed name, and all of the group."""
    points = installed_plugins(group)
    if not points:
        return "none is installed; reinstall the package, its entry points are missing"
    installed = f"installed are: {', '.join(points)}"
    for near in get_close_matches(name, points, n=1):
        return f"did you mean {near!r}? {installed}"
    return installed


def load_plugin(group: str, name: str) -> type:
    """Return the class that a plugin registers.

    Raises:
        PluginError: no plugin has this name, or it cannot be imported.
    """
    points = installed_plugins(group)
    if name not in points:
        hint = plugin_hint(group, name)
        raise PluginError(f"there is no plugin {name!r} among the {group}; {hint}")
    try:
        plugin: type = points[name].load()
    except ImportError as error:
        if error.name is None:  # raised by the module itself, which names the extra that it needs
            raise PluginError(str(error)) from error
        raise PluginError(
            f"the plugin {name!r} ({points[name].value}) cannot be loaded: {error!r}"
        ) from error
    except Exception as error:  # importing a module may raise anything
        raise PluginError(
            f"the plugin {name!r} ({points[name].value}) cannot be loaded: {error!r}"
        ) from error
    return plugin
