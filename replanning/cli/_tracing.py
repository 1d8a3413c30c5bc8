"""What `--trace` names: the exporter that is told of a run, and of its spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replanning._errors import Problem, SettingsError
from replanning._plugins import installed_plugins, load_plugin

if TYPE_CHECKING:
    from replanning.interfaces import Exporter


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
