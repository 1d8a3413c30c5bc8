"""Where spans and metrics of runs go.

OpenTelemetry is imported only where something is to be traced or measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from replanning.decision.request import Exporter
from replanning.environment import Clock
from replanning.errors import Problem, SettingsError
from replanning.plan.redaction import Redactor
from replanning.plan.types import RunId
from replanning.telemetry.names import INSTRUMENTATION_SCOPE, NOOP_TRACER, RunTracer
from replanning.version import __version__

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from replanning.run.lifecycle import Lifecycle
    from replanning.telemetry.metrics import Instruments


ProviderT = TypeVar("ProviderT")


class Telemetry:
    """Where spans and measurements go: to the providers given, else to the global ones, else nowhere.

    The global ones are looked up when a run is opened, so that it does not matter when they are configured.

    Args:
        tracer_provider: makes the tracer of spans.
        meter_provider: makes the meter of metrics.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._instruments: tuple[MeterProvider, Instruments] | None = None

    def run_tracer(
        self, run: RunId, clock: Clock, redactor: Redactor, *, capture_content: bool, trace: str | None, resumed: bool
    ) -> RunTracer:
        """The spans of a run that begins or goes on now; the hooks that do nothing when nobody would get them."""
        from opentelemetry import trace as api

        provider = self._tracer_provider or api.get_tracer_provider()
        # What the API itself supplies as long as nothing is configured makes spans that go nowhere.
        if type(provider).__module__.startswith("opentelemetry.trace"):
            return NOOP_TRACER
        tracer = provider.get_tracer(INSTRUMENTATION_SCOPE, __version__)
        if isinstance(tracer, api.NoOpTracer):
            return NOOP_TRACER
        from replanning.telemetry.spans import OTelRunTracer
        from replanning.telemetry.writer import SpanWriter

        return OTelRunTracer(
            SpanWriter(tracer, clock, redactor, capture_content=capture_content), run, trace=trace, resumed=resumed
        )

    def watch_metrics(self, life: Lifecycle) -> None:
        """Measure a run from here on, if anybody would get the measurements."""
        from opentelemetry import metrics

        provider = self._meter_provider or metrics.get_meter_provider()
        if type(provider).__module__.startswith("opentelemetry.metrics"):
            return
        if self._instruments is None or self._instruments[0] is not provider:
            from replanning.telemetry.metrics import Instruments

            self._instruments = provider, Instruments(provider.get_meter(INSTRUMENTATION_SCOPE, __version__))
        self._instruments[1].watch(life)


def build_telemetry(
    exporters: Sequence[Exporter], tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None
) -> Telemetry:
    """Where an engine sends spans and measurements.

    Raises:
        SettingsError: there is more than one place for either.
    """
    tracers = [("the argument tracer_provider", tracer_provider)]
    tracers += [(f"the exporter {exporter.name!r}", exporter.tracer_provider()) for exporter in exporters]
    meters = [("the argument meter_provider", meter_provider)]
    meters += [(f"the exporter {exporter.name!r}", exporter.meter_provider()) for exporter in exporters]
    problems: list[Problem] = []
    telemetry = Telemetry(
        _single_provider("spans", tracers, "a span processor", problems),
        _single_provider("metrics", meters, "a metric reader", problems),
    )
    if problems:
        raise SettingsError(problems)
    return telemetry


def _single_provider(
    what: str, given: Sequence[tuple[str, ProviderT | None]], part: str, problems: list[Problem]
) -> ProviderT | None:
    """The one provider among those given; a second one is a problem."""
    found = [(who, provider) for who, provider in given if provider is not None]
    if any(provider is not found[0][1] for _, provider in found):
        places = " and ".join(who for who, _ in found)
        way_out = f"give one of them, and add {part} to it for each further place"
        problems.append(Problem("exporters", f"{what} would go to {places}; {way_out}"))
    return found[0][1] if found else None
