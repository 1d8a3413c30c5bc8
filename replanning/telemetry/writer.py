"""Writes spans: with times from the clock of a run, without secrets, and without ever harming the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from replanning.environment import Clock
from replanning.journal.observations import Usage
from replanning.plan.redaction import Redactor
from replanning.plan.types import JsonValue
from replanning.telemetry import names

MAX_TEXT_CHARS: Final = 1_000
"""Characters of a description."""

MAX_CONTENT_CHARS: Final = 10_000
"""Characters of arguments, outputs and the like, where they are wanted."""

_REDACTION_MARGIN: Final = 1_000
"""Characters that are looked at beyond what is kept, so that nothing kept is half a secret."""

Attributes = Mapping[str, str | int | float | Sequence[str]]

RecordHandler = Callable[[Any, int], None]
"""Takes the body of a record and its time in nanoseconds."""


def to_nanoseconds(seconds: float) -> int:
    """Seconds since the epoch as OpenTelemetry wants them; a float has no more than microseconds of them."""
    return round(seconds * 1e6) * 1000


class SpanWriter:
    """Writes spans: times from the clock of the run, and no secrets.

    Args:
        tracer: makes spans.
        clock: stamps spans whose beginning or end is no record.
        redactor: takes secrets out of text.
        capture_content: whether arguments, outputs, reasons and questions go onto spans.
    """

    def __init__(self, tracer: Tracer, clock: Clock, redactor: Redactor, *, capture_content: bool = False) -> None:
        self.capture_content = capture_content
        self.on_error: Callable[[str], None] = lambda text: None
        self._tracer = tracer
        self._clock = clock
        self._redactor = redactor

    def now(self) -> int:
        """The time of the run's clock in nanoseconds."""
        return to_nanoseconds(self._clock.now())

    def start(
        self,
        name: str,
        attributes: Attributes,
        context: Context | None = None,
        links: Sequence[Link] = (),
        at: int | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Start a span, now unless it is said when, within the given context or else the current one."""
        at = self.now() if at is None else at
        try:
            return self._tracer.start_span(name, context, kind, attributes, links, at)
        except Exception as error:  # noqa: BLE001 - law 7: a span processor may raise anything
            self.on_error(self.redact_text(repr(error)))
            return INVALID_SPAN

    def end(self, span: Span, at: int | None = None) -> None:
        """End a span, now unless it is said when."""
        try:
            span.end(self.now() if at is None else at)
        except Exception as error:  # noqa: BLE001 - law 7: likewise
            self.on_error(self.redact_text(repr(error)))

    @contextmanager
    def use_span(self, span: Span, *, current: bool = True) -> Iterator[None]:
        """End a span with a block, as an error if the block raises one; in between it may be the current span."""
        token = otel.attach(set_span_in_context(span)) if current else None
        try:
            yield
        except Exception as error:
            self.set_error(span, type(error).__name__, str(error))
            raise
        finally:
            if token is not None:
                otel.detach(token)
            self.end(span)

    def set_error(self, span: Span, kind: str, text: str) -> None:
        """Mark a span as an error."""
        span.set_attribute(names.ERROR_TYPE, kind)
        span.set_status(Status(StatusCode.ERROR, self.redact_text(text)))

    def set_usage(self, span: Span, usage: Usage) -> None:
        """Put on a span what was used."""
        for name, amount in zip(names.USAGE_ATTRIBUTES, (usage.calls, usage.tokens, usage.money), strict=True):
            if amount:
                span.set_attribute(name, amount)

    def redact_text(self, text: str, limit: int = MAX_TEXT_CHARS) -> str:
        """A text without secrets, cut where it is long; only as much of it is looked at as is kept."""
        cut = len(text) > limit + _REDACTION_MARGIN
        clean = self._redactor.text(text[: limit + _REDACTION_MARGIN] if cut else text)
        if cut:
            clean = clean[:-_REDACTION_MARGIN]  # its end may be half a secret, which is not known for one
        return clean if len(clean) <= limit and not cut else f"{clean[:limit]}…"

    def redact_json(self, value: JsonValue, *, redacted: bool = False) -> str:
        """The same for a JSON value; one that has no secrets is not searched for them again."""
        text = json.dumps(value, ensure_ascii=False)
        if len(text) > 10 * MAX_CONTENT_CHARS:
            return f"[{len(text)} characters]"
        return self.redact_text(
            text if redacted else json.dumps(self._redactor.value(value), ensure_ascii=False), MAX_CONTENT_CHARS
        )
