"""Sends spans and metrics, and counts what was not taken. Imported only where OTLP is wanted: it is an extra."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

_MAX_REASON_CHARS: Final = 300


class LossCounter:
    """What a collector did not take, and why.

    The SDK logs each try that fails, which would bury what a program has to say; while this counts, the first
    such message is kept as the reason instead.
    """

    def __init__(self) -> None:
        self._lost: dict[str, int] = {}
        self._reason = ""
        # On the two loggers, but for messages from our own sending alone: others' exporters keep theirs.
        for module in (trace_exporter, metric_exporter):
            logging.getLogger(module.__name__).addFilter(_capture_log)

    def problem(self, endpoint: str) -> str:
        """What was lost, in a sentence; empty when nothing was."""
        if not self._lost:
            return ""
        what = " and ".join(f"{count} {kind}" for kind, count in self._lost.items())
        return f"{what} could not be sent to {endpoint}; is a collector listening there? ({self._reason})"

    @contextmanager
    def track(self, kind: str, count: int) -> Iterator[BatchOutcome]:
        """Count a batch as lost unless it is said to be taken; what the sender raises goes no further."""
        counted = BatchOutcome()
        messages: list[str] = []
        _thread_state.messages = messages
        try:
            yield counted
        except Exception as error:  # noqa: BLE001 - a failing collector must not end the thread that sends
            messages.append(repr(error))
        finally:
            _thread_state.messages = None
        if not counted.accepted:
            self._lost[kind] = self._lost.get(kind, 0) + count
            self._reason = (messages or ["no reason is known"])[0][:_MAX_REASON_CHARS]


class BatchOutcome:
    """Whether a batch was taken."""

    accepted = False


class SpanSender(OTLPSpanExporter):
    """Sends spans.

    Args:
        url: where to.
        headers: sent along.
        timeout: seconds for one request with its repetitions.
        tally: counts what is not taken.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None, timeout: float, tally: LossCounter) -> None:
        # The SDK takes fractions of a second, whatever older versions declare.
        super().__init__(endpoint=url, headers=dict(headers or {}), timeout=timeout)  # type: ignore[arg-type,unused-ignore]
        self._losses = tally

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = SpanExportResult.FAILURE
        with self._losses.track("spans", len(spans)) as counted:
            result = super().export(spans)
            counted.accepted = result is SpanExportResult.SUCCESS
        return result


class MetricSender(OTLPMetricExporter):
    """Sends metrics; the arguments are those of `SpanSender`."""

    def __init__(self, url: str, headers: Mapping[str, str] | None, timeout: float, tally: LossCounter) -> None:
        super().__init__(endpoint=url, headers=dict(headers or {}), timeout=timeout)  # type: ignore[arg-type,unused-ignore]
        self._losses = tally

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Send a batch."""
        result = MetricExportResult.FAILURE
        with self._losses.track("batches of metrics", 1) as counted:
            result = super().export(metrics_data, timeout_millis, **kwargs)
            counted.accepted = result is MetricExportResult.SUCCESS
        return result


class _ThreadState(threading.local):
    messages: list[str] | None = None


_thread_state = _ThreadState()


def _capture_log(record: logging.LogRecord) -> bool:
    """Let a message through unless it is about a batch that is being counted in this thread."""
    if _thread_state.messages is None:
        return True
    _thread_state.messages.append(record.getMessage())
    return False
