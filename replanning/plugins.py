"""Registry of providers, triggers, exporters and stores, found through entry points."""

from __future__ import annotations

from dis import opname
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import FrameType
from typing import Any

from replanning.errors import PluginError

PLUGIN_GROUPS = ("providers", "triggers", "exporters", "stores")


def read_attribute(
    plugin: object, name: str, default: object = None
) -> Any:  # of a type that the caller checks
    """Return an attribute of a plugin; the default if there is none, or its code fails."""
    try:
        return getattr(plugin, name, default)
    except BaseException as error:
        if is_interruption(error):
            raise
        return default


def plugin_name(plugin: object) -> str:
    """Return the name of a plugin; that of its class if it has none."""
    name = read_attribute(plugin, "name")
    return name if isinstance(name, str) else type(plugin).__name__


def plugin_error(error: BaseException) -> Exception:
    """Return the error to report for an exception from a plugin: itself, or one that names what would end the program.

    Raises:
        BaseException: the exception is an interruption, such as a Ctrl-C.
    """
    if isinstance(error, Exception):
        return error
    if is_interruption(error):
        raise error
    contained = RuntimeError(f"it tried to end the program: {error!r}")
    contained.__cause__ = error
    return contained


def is_interruption(error: BaseException) -> bool:
    """Return whether an exception is, or contains, a KeyboardInterrupt or GeneratorExit that no `raise` statement made."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_interruption, error.exceptions))
    tb = error.__traceback__
    if not isinstance(error, KeyboardInterrupt | GeneratorExit) or tb is None:
        return False
    while tb.tb_next is not None:
        tb = tb.tb_next
    # Python's handler of a signal raises as well, and has the frame that was interrupted as an argument.
    in_handler = any(isinstance(value, FrameType) for value in tb.tb_frame.f_locals.values())
    return in_handler or not opname[tb.tb_frame.f_code.co_code[tb.tb_lasti]].startswith("RAISE")


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
