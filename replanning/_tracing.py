"""The spans of one run, made from its records as they are committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import Token
from typing import TYPE_CHECKING, Final

from opentelemetry import context as otel
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from replanning import _spans as names
from replanning._changes import PlanChange
from replanning._completions import LLMCall
from replanning._ids import AttemptId, ReplanId, RunId
from replanning._observations import Usage, UsageCharged
from replanning._pen import MAX_CONTENT_CHARS, RecordHandler, SpanWriter, to_nanoseconds
from replanning._records import ErrorContained, Record, RunEnded
from replanning._span_parts import AttemptSpans, ReplanSpans, chat_span
from replanning._spans import ReportCompletion, ReportProposals, RunTracer
from replanning._triggers import Trigger

if TYPE_CHECKING:
    from replanning._lifecycle import Lifecycle

_W3C_PROPAGATOR: Final = TraceContextTextMapPropagator()


class OTelRunTracer(RunTracer):
    """The spans of a run: `replanning.run`, below it its attempts and replans, below these what they consist of.

    Args:
        pen: writes them.
        run: the run.
        trace: the trace context that the run began with, if it goes on in a new process.
        resumed: whether it does.
    """

    def __init__(self, pen: SpanWriter, run: RunId, *, trace: str | None = None, resumed: bool = False) -> None:
        links: tuple[Link, ...] = ()
        parent = otel.get_current()
        if trace is not None:
            # The trace goes on; who resumed the run is not its parent but is found from here.
            current = get_current_span().get_span_context()
            links = (Link(current),) if current.is_valid else ()
            parent = _W3C_PROPAGATOR.extract({"traceparent": trace}, context=parent)
        self._writer = pen
        self._span = pen.start(names.RUN_SPAN, {names.RUN_ID: run, names.RUN_RESUMED: resumed}, parent, links)
        self._context = set_span_in_context(self._span, parent)
        self._life: Lifecycle | None = None
        self._usage: dict[Span, Usage] = {}
        self._ended_at: int | None = None
        self._closed = False
        self._error_reported = False

    def __repr__(self) -> str:
        return f"<RunSpans {'closed' if self._closed else 'open'} {self.traceparent}>"

    @property
    def traceparent(self) -> str | None:
        """The trace context in the form of the W3C header; None where the trace has no identity."""
        carrier: dict[str, str] = {}
        _W3C_PROPAGATOR.inject(carrier, self._context)
        return carrier.get("traceparent")

    def watch(self, life: Lifecycle) -> None:
        """Follow a run from here on."""
        self._life = life
        plan, pen = life.live.plan, self._writer
        pen.on_error = self._report_error
        self._span.set_attribute(names.PLAN_TASKS, len(plan.tasks))
        if plan.name:
            self._span.set_attribute(names.PLAN_NAME, pen.redact_text(plan.name))
        if pen.capture_content:
            self._span.set_attribute(names.PLAN_OBJECTIVE, pen.redact_text(plan.goal.objective, MAX_CONTENT_CHARS))
        self._attempts = AttemptSpans(pen, self._context, life.live)
        self._replans = ReplanSpans(pen, self._context, self._attempts.unsuccessful_contexts)
        handlers = {**self._attempts.handlers(), **self._replans.handlers()}
        handlers[UsageCharged] = self._on_charged
        handlers[RunEnded] = self._on_ended
        for kind, handler in handlers.items():
            life.observers.setdefault(kind, []).append(_as_observer(handler))
        for asked in life.ledger.open_questions.values():
            found = [life.ledger.triggers[t] for t in asked.triggers if t in life.ledger.triggers]
            self._replans.resume_question(asked, found)

    def attach_attempt(self, attempt: AttemptId) -> Token[Context] | None:
        """Make the span of an attempt the current one, so that spans of its body become its children."""
        span = self._attempts.open_spans.get(attempt)
        return None if span is None else otel.attach(set_span_in_context(span))

    def detach(self, token: Token[Context]) -> None:
        """Make the span that was current before the current one again."""
        otel.detach(token)

    def replan_span(self, replan: ReplanId, triggers: Sequence[Trigger]) -> AbstractContextManager[None]:
        """Trace a replan; a question to a person keeps it open beyond the block."""
        return self._replans.replan_span(replan, triggers)

    @contextmanager
    def provider_span(self, name: str) -> Iterator[ReportProposals]:
        """Trace the asking of a provider, whose own spans become children."""
        span = self._writer.start(f"propose {name}", {names.PROVIDER_NAME: name})
        self._replans.provider_spans[name] = span

        def answered(proposed: int, late: bool) -> None:
            span.set_attribute(names.PROPOSED_COUNT, proposed)
            if late:
                self._writer.set_error(span, "timeout", "it did not answer in time")

        try:
            with self._writer.use_span(span):
                yield answered
        finally:
            self._replans.provider_spans.pop(name, None)

    def chat_span(self, call: LLMCall) -> AbstractContextManager[ReportCompletion]:
        """Trace a call of a language model, as a child of whatever span is current."""
        return chat_span(self._writer, call)

    def scoring_span(self) -> AbstractContextManager[None]:
        """Trace the checking, scoring and ranking of what was proposed."""
        return self._writer.use_span(self._writer.start(names.SCORE_SPAN, {}))

    @contextmanager
    def apply_span(self, changes: Sequence[PlanChange], by: str, replan: str | None) -> Iterator[None]:
        """Trace the applying of changes to the plan, within their replan, or by hand within the run."""
        assert self._life is not None
        context = self._replans.replan_context(replan)
        attributes = {
            names.CHANGES: [change.kind for change in changes],
            names.CHANGED_BY: self._writer.redact_text(by),
        }
        span = self._writer.start(names.APPLY_SPAN, attributes, context)
        with self._writer.use_span(span, current=False):
            yield
            span.set_attribute(names.REVISION, self._life.live.revision)

    def close(self, failure: BaseException | None) -> None:
        """End the span of the run; it is an error when the run failed or was aborted, or its user's code raised."""
        if self._closed:
            return
        self._closed = True
        now = self._writer.now()
        if self._life is not None:
            self._end_open(now)
            self._set_run_attributes(self._life)
        if failure is not None:
            self._writer.set_error(self._span, type(failure).__name__, str(failure))
        self._writer.end(self._span, now if self._ended_at is None else self._ended_at)

    def _set_run_attributes(self, life: Lifecycle) -> None:
        self._span.set_attribute(names.REVISION, life.live.revision)
        self._writer.set_usage(self._span, life.ledger.budget_tracker.spent)
        if life.end is not None:
            self._span.set_attribute(names.RUN_STATUS, life.end.status)
            self._span.set_attribute(names.RUN_REASON, self._writer.redact_text(life.end.reason))
            if life.end.status in ("failed", "aborted"):
                self._writer.set_error(self._span, life.end.status, life.end.reason)

    def _report_error(self, text: str) -> None:
        """Record, once, that tracing fails; the run goes on without those spans."""
        life = self._life
        if life is not None and not self._error_reported and not life.journal.blocked:
            self._error_reported = True
            life.commit_or_defer(ErrorContained("tracing", text))

    def _on_ended(self, body: RunEnded, at: int) -> None:
        self._ended_at = at
        self._end_open(at)

    def _end_open(self, at: int) -> None:
        self._attempts.end_open(at)
        self._replans.end_open(at)
        self._usage.clear()

    def _on_charged(self, body: UsageCharged, at: int) -> None:
        span = None
        if body.attempt is not None:
            span = self._attempts.open_spans.get(body.attempt)
        elif body.provider is not None:
            span = self._replans.provider_spans.get(body.provider)
        if span is not None:
            self._usage[span] = total = self._usage.get(span, Usage()) + body.usage
            self._writer.set_usage(span, total)


def _as_observer(handler: RecordHandler) -> Callable[[Record], None]:
    return lambda record: handler(record.body, to_nanoseconds(record.at))
