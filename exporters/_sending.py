"""OTLP transport that counts losses; imported only by `otlp`, because it needs an extra."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

_MAX_REASON_CHARS: Final = 300

_Result = TypeVar("_Result")


class LossCounter:
    """Counter of the data that a collector did not accept.

    The SDK logs each failed try, which would bury the program's own output; while batches are tracked, the first
    message is kept as the reason instead.
    """

    def __init__(self) -> None:
        self._lost: dict[str, int] = {}
        self._reason = ""
        # The filter affects only messages from tracked batches; those of other exporters are logged.
        for module in (trace_exporter, metric_exporter):
            logging.getLogger(module.__name__).addFilter(_capture_log)

    def problem(self, endpoint: str) -> str:
        """Return the losses in a sentence; empty if there are none."""
        if not self._lost:
            return ""
        lost = " and ".join(f"{count} {kind}" for kind, count in self._lost.items())
        return f"{lost} could not be sent to {endpoint}; is a collector listening there? ({self._reason})"

    def send(self, export: Callable[[], _Result], failure: _Result, kind: str, count: int) -> _Result:
        """Export a batch and return its result; count it as lost if that is `failure` or if the sender raises."""
        result, messages = failure, list[str]()
        _thread_state.messages = messages
        try:
            result = export()
        except Exception as error:  # noqa: BLE001 - a failing collector must not end the thread that sends
            messages.append(repr(error))
        finally:
            _thread_state.messages = None
        if result is failure:
            self._lost[kind] = self._lost.get(kind, 0) + count
            self._reason = (messages or ["unknown reason"])[0][:_MAX_REASON_CHARS]
        return result


class SpanSender(OTLPSpanExporter):
    """Span exporter that counts losses.

    Args:
        url: URL of the collector.
        headers: headers of every request.
        timeout: seconds for one request, retries included.
        losses: counter of losses.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None, timeout: float, losses: LossCounter) -> None:
        # The SDK takes fractions of a second, whatever older versions declare.
        super().__init__(endpoint=url, headers=dict(headers or {}), timeout=timeout)  # type: ignore[arg-type,unused-ignore]
        self._losses = losses

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        send = super().export
        return self._losses.send(lambda: send(spans), SpanExportResult.FAILURE, "spans", len(spans))


class MetricSender(OTLPMetricExporter):
    """Metric exporter that counts losses, with the arguments of `SpanSender`."""

    def __init__(self, url: str, headers: Mapping[str, str] | None, timeout: float, losses: LossCounter) -> None:
        super().__init__(endpoint=url, headers=dict(headers or {}), timeout=timeout)  # type: ignore[arg-type,unused-ignore]
        self._losses = losses

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Send a batch."""
        send, failure = super().export, MetricExportResult.FAILURE
        return self._losses.send(lambda: send(metrics_data, timeout_millis, **kwargs), failure, "batches of metrics", 1)


class _ThreadState(threading.local):
    messages: list[str] | None = None


_thread_state = _ThreadState()


def _capture_log(record: logging.LogRecord) -> bool:
    """Filter a log message: keep it as a reason if this thread tracks a batch, else log it."""
    if _thread_state.messages is None:
        return True
    _thread_state.messages.append(record.getMessage())
    return False
