"""Exporter of spans and metrics over OTLP/HTTP, to Jaeger, Tempo, Honeycomb or a Collector."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self
from urllib.parse import urlsplit

import anyio.to_thread

from replanning import __version__
from replanning.errors import SettingsError
from replanning.plan.messages import format_duration
from replanning.telemetry import Exporter

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import (
        HOST_NAME,
        SERVICE_INSTANCE_ID,
        SERVICE_NAME,
        SERVICE_VERSION,
        Resource,
    )
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
except ImportError as error:
    raise ImportError(
        f"exporter 'otlp' needs an extra that is not installed ({error}): "
        "pip install 'replanning[otlp]'"
    ) from error

DEFAULT_ENDPOINT: Final = "http://localhost:4318"
MAX_QUEUE_SIZE: Final = 16_384
"""Longest queue of unsent spans; beyond, the oldest are dropped.

OTEL_BSP_MAX_QUEUE_SIZE overrides it.
"""

REFUSED_CLOSE_LIMIT: Final = 0.2
"""Longest wait on closing, in seconds, if no collector listens."""

_MAX_REASON_CHARS: Final = 300

_log = logging.getLogger(__name__)


class _ThreadState(threading.local):
    messages: list[str] | None = None


_thread_state = _ThreadState()


def _capture_log(record: logging.LogRecord) -> bool:
    """Filter a log message: keep it as a reason if this thread tracks a batch, else log it."""
    if _thread_state.messages is None:
        return True
    _thread_state.messages.append(record.getMessage())
    return False


class _LossCounter:
    """Counter of the data that a collector did not accept.

    The SDK logs each failed try, which would bury the program's own output; while batches are
    tracked, the first message is kept as the reason instead.
    """

    def __init__(self) -> None:
        self._lost: dict[str, int] = {}
        self._reason = ""

    def problem(self, endpoint: str) -> str:
        """Return the losses in a sentence; empty if there are none."""
        if not self._lost:
            return ""
        lost = " and ".join(f"{count} {kind}" for kind, count in self._lost.items())
        advice = "is a collector listening there?"
        return f"{lost} could not be sent to {endpoint}; {advice} ({self._reason})"

    def track(self, exporter: Any, failure: object, kind: str) -> None:
        """Count the batches of an exporter of the SDK as lost if it returns `failure` or raises."""
        # The filter affects only messages from tracked batches; those of other exporters are
        # logged.
        logging.getLogger(type(exporter).__module__).addFilter(_capture_log)
        send = exporter.export

        def export(batch: Any, *args: Any, **kwargs: Any) -> object:
            result = failure
            messages = list[str]()
            _thread_state.messages = messages
            try:
                result = send(batch, *args, **kwargs)
            # A failing collector must not end the thread that sends.
            except Exception as error:  # noqa: BLE001
                messages.append(repr(error))
            finally:
                _thread_state.messages = None
            if result is failure:
                count = len(batch) if kind == "spans" else 1
                self._lost[kind] = self._lost.get(kind, 0) + count
                reason = messages[0] if messages else "unknown reason"
                self._reason = reason[:_MAX_REASON_CHARS]
            return result

        exporter.export = export


class OtlpExporter(Exporter):
    """Exporter that sends spans, and optionally metrics, to a collector in the background.

    Pass it to an engine, which closes it after the last run::

        exporter = OtlpExporter("http://localhost:4318")
        engine = ReplanningEngine(exporters=[exporter])
        ...
        await engine.aclose()

    Runs never wait for the collector. Lost data is counted, and reported once when the exporter is
    closed: as a warning of this module's logger and in `problem`.

    Args:
        endpoint: URL of the collector without the path of a signal, such as
            `http://localhost:4318`; by default `OTEL_EXPORTER_OTLP_ENDPOINT`, or port 4318 of this
            machine.
        headers: headers of every request, such as an API key.
        metrics: send metrics, too, which Jaeger does not accept; by default if
            `OTEL_METRICS_EXPORTER` is `otlp`. They go to `OTEL_EXPORTER_OTLP_METRICS_ENDPOINT`, by
            default to the same collector.
        timeout: seconds for one request, retries included.
        close_limit: seconds that sending the rest may delay the end of a program.
        service_name: service name of the spans; by default `OTEL_SERVICE_NAME` or `replanning`.

    Raises:
        SettingsError: the endpoint is not a URL of a collector.
    """

    name: ClassVar[str] = "otlp"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        metrics: bool | None = None,
        timeout: float = 5.0,
        close_limit: float = 3.0,
        service_name: str | None = None,
    ) -> None:
        base = _base_url(
            endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT
        )
        parts = urlsplit(base)
        without_password = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        self.endpoint = without_password.geturl()
        self._losses = _LossCounter()
        name = service_name or os.environ.get("OTEL_SERVICE_NAME") or "replanning"
        # The host tells Jaeger that all processes of a run share a clock. Otherwise it would
        # adjust their times.
        host = Resource({HOST_NAME: socket.gethostname()})
        resource = host.merge(Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__}))
        # The SDK takes fractions of a second, whatever older versions declare.
        options: dict[str, Any] = {"headers": dict(headers or {}), "timeout": timeout}
        spans = OTLPSpanExporter(endpoint=f"{base}/v1/traces", **options)
        self._losses.track(spans, SpanExportResult.FAILURE, "spans")
        queue_size = None if "OTEL_BSP_MAX_QUEUE_SIZE" in os.environ else MAX_QUEUE_SIZE
        # The end of the program is handled below: the SDK's own handler has no time limit.
        self._tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracer_provider.add_span_processor(
            BatchSpanProcessor(spans, max_queue_size=queue_size)
        )
        self._meter_provider: MeterProvider | None = None
        if metrics is None:
            metrics = os.environ.get("OTEL_METRICS_EXPORTER") == "otlp"
        if metrics:
            place = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or f"{base}/v1/metrics"
            batches = OTLPMetricExporter(endpoint=place, **options)
            self._losses.track(batches, MetricExportResult.FAILURE, "batches of metrics")
            reader = PeriodicExportingMetricReader(batches)
            # Distinguishes the counters of each process.
            process = Resource({SERVICE_INSTANCE_ID: str(uuid.uuid4())}).merge(resource)
            self._meter_provider = MeterProvider([reader], process, shutdown_on_exit=False)
        self._close_limit = close_limit
        self._closed = False
        self._problem = ""
        # The SDK's shutdown lasts as long as its request; a daemon thread can be abandoned. It is
        # started now because Python 3.12 and later cannot start one at the end of a program.
        self._close_requested = threading.Event()
        self._close_thread = threading.Thread(
            target=self._shut_down_providers, name="otlp-close", daemon=True
        )
        self._close_thread.start()
        atexit.register(self._shut_down)

    @classmethod
    def from_target(cls, target: str) -> Self:
        """Return the exporter for an endpoint named on the command line.

        Raises:
            SettingsError: the endpoint is not a URL of a collector.
        """
        return cls(target)

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<OtlpExporter to {self.endpoint}{state}>"

    @property
    def problem(self) -> str:
        """The losses so far, in a sentence; empty if there are none."""
        return self._problem or self._losses.problem(self.endpoint)

    def tracer_provider(self) -> TracerProvider:
        """Return the provider of the engine's tracer, also for spans of the program itself."""
        return self._tracer_provider

    def meter_provider(self) -> MeterProvider | None:
        """Return the provider of the engine's meter; None without metrics."""
        return self._meter_provider

    async def aclose(self) -> None:
        """Send the rest within `close_limit`, and close the connections."""
        await anyio.to_thread.run_sync(self._shut_down, abandon_on_cancel=True)

    def _shut_down(self) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._shut_down)
        self._close_requested.set()
        limit = self._close_limit
        problem = (
            f"{self.endpoint} did not take all spans within {format_duration(limit)} at the end"
        )
        problem = f"{problem}; the rest is lost"
        if self._is_refused():
            limit = min(limit, REFUSED_CLOSE_LIMIT)
            problem = f"spans could not be sent: no collector listens at {self.endpoint}"
        self._close_thread.join(limit)
        if self._close_thread.is_alive():
            self._problem = problem
        if self.problem:
            _log.warning("%s", self.problem)

    def _is_refused(self) -> bool:
        """Return whether no collector listens, as far as a connection without a proxy tells."""
        parts = urlsplit(self.endpoint)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            address = (parts.hostname or "", port)
            socket.create_connection(address, timeout=REFUSED_CLOSE_LIMIT).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def _shut_down_providers(self) -> None:
        self._close_requested.wait()
        self._tracer_provider.shutdown()
        if self._meter_provider is not None:
            self._meter_provider.shutdown()


def _is_address(text: str) -> bool:
    """Return whether a text is a URL with a host."""
    if len(text.split()) != 1:
        return False
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in ("http", "https"):
        return False
    return bool(parts.hostname) and port != 0


def _base_url(endpoint: str) -> str:
    """Return the URL without the path of a signal."""
    text = endpoint.strip()
    if "://" not in endpoint:
        text = f"http://{text}"
    if not _is_address(text):
        expected = f"expected one such as {DEFAULT_ENDPOINT}"
        raise SettingsError.at("otlp", f"{endpoint!r} is not a URL of a collector; {expected}")
    return text.rstrip("/").removesuffix("/v1/traces")
