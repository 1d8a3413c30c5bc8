"""A collector of spans, and the spans that it gets over the wire."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.support.http_server import HttpServer
from tests.support.tracing import Flat


class Collector(HttpServer):
    """A receiver of OTLP/HTTP that keeps what it gets."""

    @property
    def resources(self) -> list[dict[str, object]]:
        """The attributes of the resources that spans came from."""
        return [
            plain(group.resource.attributes)
            for message in self.messages
            for group in message.resource_spans
        ]

    @property
    def spans(self) -> list[Flat]:
        """The spans, in the order in which they came."""
        found: list[Flat] = []
        for message in self.messages:
            for group in message.resource_spans:
                for scope in group.scope_spans:
                    assert scope.scope.name in ("replanning", "mine")
                    found += map(received, scope.spans)
        return found

    @property
    def messages(self) -> list[ExportTraceServiceRequest]:
        """What was sent about spans."""
        found = [request.body for request in self.requests if request.path == "/v1/traces"]
        return [ExportTraceServiceRequest.FromString(body) for body in found]


def received(span: trace_pb2.Span) -> Flat:
    """A span as it went over the wire."""
    return Flat(
        span.span_id.hex(),
        span.parent_span_id.hex() or None,
        span.name,
        trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        plain(span.attributes),
        tuple(
            (link.span_id.hex(), plain(link.attributes).get("replanning.link"))
            for link in span.links
        ),
        span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else None,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


def plain(pairs: Iterable[KeyValue]) -> dict[str, object]:
    """Attributes as they were before they were put into a message."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    return getattr(value, kind or "string_value")
