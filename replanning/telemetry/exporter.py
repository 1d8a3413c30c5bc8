"""Interface of exporters: plugins that send the spans, metrics or records of runs to another system."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from replanning.environment import Clock
from replanning.journal.records import Record
from replanning.journal.store import RunStore
from replanning.plan.types import RunId

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


@dataclass(frozen=True, slots=True, eq=False)
class ExporterContext:
    """Store and clock of the engine that an exporter is attached to.

    Attributes:
        store: the journals of the runs; for a resumed run, the records before the resume are found only here.
        clock: the clock of the runs.
    """

    store: RunStore
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

    async def export(self, run: RunId, record: Record) -> None:
        """Send a committed record. Any exception is contained and recorded."""

    async def aclose(self) -> None:
        """Send pending records and close connections."""
