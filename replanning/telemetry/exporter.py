"""Exporters: plugins that send spans, metrics or records of runs to another system."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from replanning import journal
from replanning.environment import Clock
from replanning.errors import PluginError, Problem, ReplanningError, SettingsError
from replanning.plan.types import RunId
from replanning.plugins import load_plugin, plugin_name
from replanning.telemetry.providers import Telemetry

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

ProviderT = TypeVar("ProviderT")


@dataclass(frozen=True, slots=True, eq=False)
class ExporterContext:
    """Store and clock of the engine that an exporter is attached to.

    Attributes:
        store: the journals of the runs; for a resumed run, the records before the resume are found
            only here.
        clock: the clock of the runs.
    """

    store: journal.RunStore
    clock: Clock


class Exporter(ABC):
    """Sends the records of runs to another system.

    Attributes:
        name: its registered name, used in settings.
    """

    name: ClassVar[str]

    def tracer_provider(self) -> TracerProvider | None:
        """Return the tracer provider of an exporter of spans."""
        return None

    def meter_provider(self) -> MeterProvider | None:
        """Return the meter provider of an exporter of metrics."""
        return None

    def attach(self, exporter_context: ExporterContext) -> None:
        """Prepare for use by an engine; called once per engine, before any run is opened."""

    async def export(self, run: RunId, record: journal.Record) -> None:
        """Send a committed record.

        An `Exception` is contained, and the first is reported in `RunResult.problems`.
        """

    async def aclose(self) -> None:
        """Send pending records and close connections."""


def create_exporter(name: str, target: str = "") -> Exporter:
    """Create the exporter that a plugin of this name registers.

    Args:
        name: the name of the plugin.
        target: the destination, for the plugin's `from_target`. If it is empty, `from_target` is
            called only if the plugin cannot be created without arguments.

    Raises:
        PluginError: there is no such plugin, or it cannot be loaded or created.
        SettingsError: the target is not valid.
    """
    plugin: Any = load_plugin("exporters", name)  # `from_target` is optional
    if target and not hasattr(plugin, "from_target"):
        reason = f"exporter {name!r} does not take a target; remove {target!r}"
        raise SettingsError.at("exporters", reason)
    created: Exporter
    try:
        if target or needs_target(plugin):
            created = plugin.from_target(target)
        else:
            created = plugin()
    except ReplanningError:
        raise
    except Exception as error:  # a plugin may raise anything
        raise PluginError(f"the exporter {name!r} cannot be created: {error!r}") from error
    return created


def needs_target(plugin: type) -> bool:
    """Return whether an exporter takes a target and cannot be created without one."""
    if not hasattr(plugin, "from_target"):
        return False
    try:
        inspect.signature(plugin).bind()
    except TypeError:
        return True
    return False


def build_telemetry(
    exporters: Sequence[Exporter],
    tracer_provider: TracerProvider | None,
    meter_provider: MeterProvider | None,
) -> Telemetry:
    """Return the telemetry of an engine, from its arguments and its exporters.

    Raises:
        SettingsError: more than one provider is given for spans, or for metrics.
    """
    tracers = [("the argument tracer_provider", tracer_provider)]
    meters = [("the argument meter_provider", meter_provider)]
    for exporter in exporters:
        source = f"the exporter {plugin_name(exporter)!r}"
        tracers.append((source, exporter.tracer_provider()))
        meters.append((source, exporter.meter_provider()))
    problems: list[Problem] = []
    telemetry = Telemetry(
        _single_provider("spans", tracers, "a span processor", problems),
        _single_provider("metrics", meters, "a metric reader", problems),
    )
    if problems:
        raise SettingsError(problems)
    return telemetry


def _single_provider(
    signal: str, sources: Sequence[tuple[str, ProviderT | None]], part: str, problems: list[Problem]
) -> ProviderT | None:
    """Return the only provider among the sources; add a problem if there are several."""
    places: list[str] = []
    first: ProviderT | None = None
    is_single = True
    for source, provider in sources:
        if provider is None:
            continue
        places.append(source)
        if first is None:
            first = provider
        elif provider is not first:
            is_single = False
    if not is_single:
        advice = f"pass only one of them, and add {part} to it for each further destination"
        text = f"{signal} would be sent by {' and '.join(places)}; {advice}"
        problems.append(Problem("exporters", text))
    return first
