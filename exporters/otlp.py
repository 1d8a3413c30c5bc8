"""Sends the spans of runs to a collector, over OTLP/HTTP: Jaeger, Tempo, Honeycomb, an OpenTelemetry Collector."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Final, Self
from urllib.parse import urlsplit

import anyio.to_thread
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from replanning import __version__
from replanning.errors import PluginError, Problem, SettingsError
from replanning.telemetry import Exporter

if TYPE_CHECKING:
    from replanning.exporters._sending import LossCounter

DEFAULT_ENDPOINT: Final = "http://localhost:4318"
MAX_QUEUE_SIZE: Final = 16_384
"""Spans that wait to be sent; when more wait, the oldest are dropped. OTEL_BSP_MAX_QUEUE_SIZE overrides it."""

REFUSED_CLOSE_LIMIT: Final = 0.2
"""The same where nothing listens, which trying again for seconds would hardly change."""

_log = logging.getLogger(__name__)


class OtlpExporter(Exporter):
    """Sends spans, and metrics if wanted, to a collector in the background.

    It is given to an engine and closed after the last run::

        exporter = OtlpExporter("http://localhost:4318")
        engine = ReplanningEngine(exporters=[exporter])
        ...
        await engine.aclose()

    Runs never wait for the collector. Whatever it does not take is counted, and reported once, as a warning of
    this module's logger and in `problem`, when the exporter is closed.

    Args:
        endpoint: address of the collector, without a path for the kind of signal: `http://localhost:4318`. When
            left out, `OTEL_EXPORTER_OTLP_ENDPOINT`, or the port 4318 of this machine.
        headers: sent with every request, such as a key that the collector wants.
        metrics: whether metrics are sent, too; Jaeger does not take them.
        timeout: seconds for one request with its repetitions.
        close_limit: seconds for which sending what is left may hold up the end of a program.
        service_name: under which the collector shows the spans; `OTEL_SERVICE_NAME` or `replanning` when left out.

    Raises:
        SettingsError: the endpoint is no address of a collector.
        PluginError: the optional part of the package that this needs is not installed.
    """

    name: ClassVar[str] = "otlp"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        metrics: bool = False,
        timeout: float = 5.0,
        close_limit: float = 3.0,
        service_name: str | None = None,
    ) -> None:
        base = _base_url(endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT)
        sending = _import_sender()
        self.endpoint = _without_password(base)
        self._losses: LossCounter = sending.LossCounter()
        resource = _resource(service_name)
        spans = sending.SpanSender(f"{base}/v1/traces", headers, timeout, self._losses)
        # The end of the program is handled below: the SDK's own handler has no limit that could be set.
        self._tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracer_provider.add_span_processor(BatchSpanProcessor(spans, max_queue_size=_queue_size()))
        self._meter_provider: MeterProvider | None = None
        if metrics:
            sender = sending.MetricSender(f"{base}/v1/metrics", headers, timeout, self._losses)
            reader = PeriodicExportingMetricReader(sender)
            self._meter_provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._close_limit = close_limit
        self._closed = False
        self._problem = ""
        # The SDK waits for as long as a request lasts; a daemon thread can be left to itself. It is started now because
        # from Python 3.12 on none can be started at the end of a program.
        self._close_requested = threading.Event()
        self._close_thread = threading.Thread(target=self._shut_down_providers, name="otlp-close", daemon=True)
        self._close_thread.start()
        atexit.register(self._shut_down)

    @classmethod
    def from_target(cls, target: str) -> Self:
        """The exporter for what stands behind `otlp=` on the command line: `http://localhost:4318`.

        Raises:
            SettingsError: it is no address of a collector.
            PluginError: the optional part of the package that this needs is not installed.
        """
        return cls(target)

    def __repr__(self) -> str:
        return f"<OtlpExporter to {self.endpoint}{' closed' if self._closed else ''}>"

    @property
    def problem(self) -> str:
        """What went wrong so far, in a sentence; empty when everything sent was taken."""
        return self._problem or self._losses.problem(self.endpoint)

    def tracer_provider(self) -> TracerProvider:
        """Where the engine's spans go, and where spans of one's own may go as well."""
        return self._tracer_provider

    def meter_provider(self) -> MeterProvider | None:
        """Where the engine's metrics go, if they are wanted."""
        return self._meter_provider

    async def aclose(self) -> None:
        """Send what is left, within the limit, and let go of connections."""
        await anyio.to_thread.run_sync(self._shut_down, abandon_on_cancel=True)

    def _shut_down(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._shut_down)
        self._close_requested.set()
        absent = _refuses_connection(self.endpoint)
        self._close_thread.join(min(self._close_limit, REFUSED_CLOSE_LIMIT) if absent else self._close_limit)
        if self._close_thread.is_alive():
            self._problem = (
                f"spans could not be sent: no collector listens at {self.endpoint}"
                if absent
                else f"{self.endpoint} did not take all spans within {self._close_limit:g} s at the end; the rest is lost"
            )
        if self.problem:
            _log.warning("%s", self.problem)

    def _shut_down_providers(self) -> None:
        self._close_requested.wait()
        self._tracer_provider.shutdown()
        if self._meter_provider is not None:
            self._meter_provider.shutdown()


def _import_sender() -> ModuleType:
    try:
        from replanning.exporters import _sending
    except ImportError as error:
        raise PluginError(
            f"the exporter 'otlp' needs a part that is not installed ({error}): pip install 'replanning[otlp]'"
        ) from error
    return _sending


def _base_url(endpoint: str) -> str:
    """The address without a path for the kind of signal."""
    text = endpoint.strip() if "://" in endpoint else f"http://{endpoint.strip()}"
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or any(character.isspace() for character in text):
        raise SettingsError(
            [Problem("otlp", f"{endpoint!r} is no address of a collector; expected one such as {DEFAULT_ENDPOINT}")]
        )
    return text.rstrip("/").removesuffix("/v1/traces")


def _refuses_connection(address: str) -> bool:
    """Whether nothing listens at an address."""
    parts = urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=REFUSED_CLOSE_LIMIT).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # perhaps it is reached through a proxy
    return False


def _without_password(address: str) -> str:
    """The address as people see it: without a password."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _resource(service_name: str | None) -> Resource:
    name = service_name or os.environ.get("OTEL_SERVICE_NAME") or "replanning"
    return Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})


def _queue_size() -> int | None:
    return None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else MAX_QUEUE_SIZE
